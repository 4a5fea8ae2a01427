# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

A transformer trained on numbers of about 6 digits answers questions of 60 and of 1,000 digits
exactly, once attention may only look where it looked on short numbers. This file trains it, finds
those places (Attention Bias Calibration, ABC), proves that the result is exact at every length, and
tests it, beside other methods.

    python lengen.py --task successor --method abc        # train, calibrate, retrain, prove, test
    python lengen.py --task addition --method vanilla     # right at 6 digits, wrong at 10
    python lengen.py --ask 123+748                        # ask the newest finished run
    python lengen.py --task addition --help               # its options

Sections 1 to 7 are ABC, to be read in this order: tasks, positions and biases, attention, the
transformer, calibration, proof, training. 8 (consecutive pairs) and 9 (encoders) are systems of
their own, 10 is the command line.

Letters: B batch, T queries, S keys, H heads, D width of a head, C = H * D width of the model,
V vocabulary, W digits of a number. Attention is m x n at training length and M x N at another.
Lengths count digits. `Source:` says where a thing comes from, `Differs:` where it departs from it.

v1: Duan and Shi, From Interpolation to Extrapolation: Complete Length Generalization for Arithmetic
Transformers, 2023. v2: Duan, Shi and Xu, Attention Bias as an Inductive Bias: How to Teach
Transformers Simple Arithmetic, 2024. Jelassi: Jelassi et al., Length Generalization in Arithmetic
Transformers, 2023. Pairs: an unsigned study of consecutive pairs.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import operator
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

INF = float("inf")

class BadInput(ValueError):
    """Something that the user can mend. On the command line: one line and exit code 2."""

class RunFailed(RuntimeError):
    """A run that cannot go on. On the command line: one line and exit code 1."""

class NotEnumerated(Exception):
    """Why the windows of some lines cannot be enumerated: section 6."""

# -----
# 1. Tasks: digits in, tokens out
# A digit's token is its value. Numbers are digits (B, W), the least significant first.

VOCAB = "0123456789+*$&@"
START, END, PAD = "$", "&", "@"
LIMIT = 2 ** 20  # training numbers are below it, mainly of 6 digits

def encode(text):
    """String of VOCAB symbols -> (T,) tokens. Raises: ValueError."""
    return torch.tensor([VOCAB.index(symbol) for symbol in text], dtype=torch.int64)

def decode(tokens):
    """(T,) tokens -> string."""
    return "".join(VOCAB[token] for token in tokens)

def carry(columns, base):
    """Column sums (B, W), least significant first -> digits (B, W). Negative columns borrow.
    Raises: BadInput when the last column carries or borrows."""
    digits, rest = [], 0
    for column in columns.unbind(1):
        digits.append((column + rest) % base)
        rest = (column + rest) // base  # rounds down: -1 borrows
    if rest.any():
        raise BadInput(f"the answer does not fit the width {columns.shape[1]}")
    return torch.stack(digits, 1)

def product(a, b):
    """Digits a (B, W), b (B, K) -> the lowest column sums (B, W) of a * b."""
    W = a.shape[1]
    columns = torch.zeros_like(a)
    for k, digit in enumerate(b.unbind(1)):
        columns = columns + F.pad(a * digit[:, None], (k, 0))[:, :W]
    return columns

def as_drawn(*operands):
    """Where all operands have an answer."""
    return operands

class Task(NamedTuple):
    """A task of encoder-decoders is one entry of TASKS, and its sign a symbol of VOCAB. Widths,
    draws, tests, proof and --ask follow."""
    about: str
    columns: Callable  # operands (B, W) -> column sums (B, W); `carry` makes them the answer
    operands: tuple = ("number",)  # each a "number" of W digits or one "digit"
    sign: str = ""  # stands before each further operand
    base: int = 10
    headroom: int = 1  # zeros in front of the numbers, where answers may be longer
    admit: Callable = as_drawn  # operands drawn -> operands that have an answer
    last_alone: bool = False  # --ask shows only the digit written last
    steps: int = 600  # of the first training
    retrain_steps: int = 300  # of an attempt at retraining, at most
    batch: int = 64
    lr: float = 6e-3

TASKS = {
    # $0129& -> $0310&: 129 + 1 = 130, written from the last digit on
    "successor": Task("n + 1", lambda a: a + (torch.arange(a.shape[1]) == 0),
                      steps=350, retrain_steps=350, batch=32, lr=4e-3),
    # $0123+0748& -> $1780&: 123 + 748 = 871
    "addition": Task("a + b", operator.add, ("number", "number"), "+"),
    # $0123*7& -> $1680&: 123 * 7 = 861
    "nx1": Task("a * b, b a single digit", product, ("number", "digit"), "*",
                retrain_steps=450, batch=128, lr=8e-3),
    # $1011& -> $1001&: of the last bit, the last two, ...; the last digit written is the parity
    "parity": Task("running xor of the bits, last bit first", lambda a: a.cumsum(1) % 2,
                   base=2, headroom=0, last_alone=True, steps=300, retrain_steps=200, batch=32),
    # $1011& -> $1&
    "parity-label": Task("parity in one digit, without the scratchpad",
                         lambda a: a.sum(1, keepdim=True) % 2, base=2, headroom=0,
                         last_alone=True),
}

def pad(task, operands, width):
    """Operands, their numbers padded with zeros in front to `width` digits."""
    padded = []
    for kind, digits in zip(TASKS[task].operands, operands):
        room = width - digits.shape[1] if kind == "number" else 0
        padded.append(F.pad(digits, (0, room)))
    return padded

def arrange(task, operands, align=False):
    """Operand digits (B, W), (B, 1) -> source (B, S), target (B, T + 1) tokens.

    `$0123+0748&` has the most significant digit first, its answer `$1780&` the least, as carries
    run. align: two operands interleaved, `$+00172438&`. Source: v1, Sec. 3.2; v2, App. D.1 and
    C.4 (align). Raises: BadInput where an answer does not fit.
    """
    spec = TASKS[task]
    answer = carry(spec.columns(*operands), spec.base)
    sign, start, end = (encode(x).expand(len(answer), -1) for x in (spec.sign, START, END))
    first, *others = [digits.flip(1) for digits in operands]
    question = [first]
    for other in others:
        question += [sign, other]
    if align:
        question = [sign, torch.stack(torch.broadcast_tensors(*question[::2]), 2).flatten(1)]
    return torch.cat([start, *question, end], 1), torch.cat([start, answer, end], 1)

def example(task, *operands, width=None, align=False):
    """One worked example: example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&").
    By default wide enough for every answer. Raises: BadInput outside the task."""
    spec = TASKS.get(task)
    if not spec or len(operands) != len(spec.operands):
        raise BadInput(f"{' '.join(operands)} is no question of {task}")
    width, digits = width or max(map(len, operands)) + spec.headroom, []
    for kind, text in zip(spec.operands, operands):
        most = width if kind == "number" else 1
        if not 1 <= len(text) <= most or set(text) - set(VOCAB[:spec.base]):
            raise BadInput(f"{text!r} is no {kind} of 1 to {most} digits in base {spec.base}")
        digits.append(encode(text).flip(0)[None])
    digits = pad(task, digits, width)
    if not all(map(torch.equal, spec.admit(*digits), digits)):
        raise BadInput(f"{task} is {spec.about}")
    source, target = arrange(task, digits, align)
    return decode(source[0]), decode(target[0])

def to_digits(numbers, width, base=10):
    """(B,) integers >= 0 -> digits (B, width). Raises: BadInput where they do not fit."""
    return carry(F.pad(numbers[:, None], (0, width - 1)), base)

def n_digits(a):
    """Digits (B, W) -> how many, without zeros in front (B,), at least 1."""
    return (torch.arange(1, a.shape[1] + 1) * (a > 0)).amax(1).clamp(min=1)

def training_width(task):
    """Width of training numbers: as many digits as the largest or its answer has."""
    spec = TASKS[task]
    top = to_digits(torch.tensor([LIMIT - 1]), 24, spec.base)  # wide enough in every base
    top = top[:, :int(n_digits(top)) + spec.headroom]
    digit = torch.full((1, 1), spec.base - 1)
    largest = [top if kind == "number" else digit for kind in spec.operands]
    return int(max(n_digits(top), n_digits(carry(spec.columns(*largest), spec.base))))

def split_numbers(seed):
    """-> (training, held-out) integers in order, parted 7 : 1. Source: v2, App. B. Differs: without
    2^20 itself, the one number of 21 bits; no other would fill the width of parity."""
    order = torch.randperm(LIMIT, generator=torch.Generator().manual_seed(seed))
    cut = len(order) * 7 // 8
    return order[:cut].sort().values, order[cut:].sort().values

def seed_by_name(*names):
    """Seed torch by name, such as (seed, "teacher", step), so that no draw depends on another."""
    torch.manual_seed(random.Random(repr(names)).getrandbits(63))

def draw(task, B, draw_number):
    """Operands for B questions: draw_number() draws digits (B, W), single digits are uniform."""
    spec, operands = TASKS[task], []
    for kind in spec.operands:
        if kind == "number":
            operands.append(draw_number())
        else:
            operands.append(torch.randint(spec.base, (B, 1)))
    return spec.admit(*operands)

def distinct(draw_some, B):
    """Up to B distinct questions, from at most 20 draws of B; where there are few, and all are as
    likely, these find all of them."""
    found = {}
    for _ in range(20):
        if len(found) < B:
            operands = draw_some()
            found |= dict.fromkeys(map(tuple, torch.cat(operands, 1).tolist()))
    sizes = [digits.shape[1] for digits in operands]
    return torch.tensor(list(found)[:B]).split(sizes, 1)

def draw_test(task, length, samples):
    """Operands of `samples` distinct questions, or of all there are, whose numbers have exactly
    `length` digits. Source: v1, Sec. 3.3."""
    base = TASKS[task].base

    def number():
        digits = torch.randint(base, (samples, length))
        digits[:, -1] = torch.randint(1, base, (samples,))  # no zero in front
        return digits

    return distinct(lambda: draw(task, samples, number), samples)

def draw_hard(task, length, samples):
    """Operands of distinct questions that are rare among random ones, of up to `length` digits.

    Digits come in runs, in the same places for all numbers. A run is all zeros, all of the highest
    digit, or random; of a second number also the first's digits again, or what they lack of the
    highest. So carries run far, numbers are short, and numbers tie."""
    spec = TASKS[task]

    def some():
        often = length ** -torch.rand(samples, 1)  # the share of places where a run begins
        run = (torch.rand(samples, length) < often).cumsum(1)  # number of the run
        operands = []
        for kind in spec.operands:
            digits = torch.randint(spec.base, (samples, length))
            kinds = [digits, 0 * digits, 0 * digits + spec.base - 1]
            if operands:
                kinds += [operands[0], spec.base - 1 - operands[0]]
            pick = torch.randint(len(kinds), (samples, length + 1)).gather(1, run)
            mixed = torch.stack(kinds).gather(0, pick[None])[0]
            operands.append(mixed if kind == "number" else digits[:, :1])
        return spec.admit(*operands)

    return distinct(some, samples)

# -----
# 2. Positions and biases: one pure function each
# A bias is added to the scores: 0 is neutral, -inf closes. Rows are queries i, columns keys j.

def sinusoidal(positions, d_model):
    """Positions (T,) -> (T, C): channel 2p is sin(t / 10000^(2p/C)), channel 2p + 1 the cosine.
    Source: Vaswani et al. 2017, Sec. 3.5. Angles in float64: long positions keep their digits."""
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64)
    angles = positions.cpu().double()[:, None] * 10000.0 ** (-pairs / d_model)  # (T, C / 2)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :d_model]
    return waves.to(positions.device, torch.get_default_dtype())

def rope(x, positions):
    """Rotate channel pairs (2p, 2p + 1) of x (B, H, T, D) by positions (T,) * 10000^(-2p/D).
    Source: Su et al. 2021, Eqs. 14 and 34."""
    sin, cos = sinusoidal(positions, x.shape[-1]).to(x).unflatten(1, (-1, 2)).unbind(2)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [even * cos - odd * sin, even * sin + odd * cos]
    return torch.stack(turned, -1).flatten(-2)

def relative_scores(q, table, k=None, S=None):
    """q_i . a_ij, and with k also k_j . a_ij, where a_ij = table[clip(j - i, -K, K) + K]: q (B, H,
    T, D), table (2K + 1, D), k (B, H, S, D) -> (B, H, T, S), unscaled; S = T by default. Source:
    Shaw et al. 2018, Eq. 4 (keys); Huang et al. 2020, method 4 (keys and queries)."""
    T, K = q.shape[2], len(table) // 2
    S = k.shape[2] if k is not None else S or T
    i, j = torch.arange(T, device=q.device), torch.arange(S, device=q.device)
    index = ((j - i[:, None]).clamp(-K, K) + K).expand(*q.shape[:2], -1, -1)  # (B, H, T, S)
    scores = (q @ table.T).gather(3, index)
    if k is not None:
        scores = scores + (k @ table.T).transpose(2, 3).gather(2, index)
    return scores

def alibi_slopes(n_head):
    """-> (H,) slopes 2^(-8h/H), h = 1 .. H. Source: Press et al. 2022, Sec. 3."""
    return 2.0 ** (-8 * torch.arange(1, n_head + 1) / n_head)

def alibi_bias(n_head, T, S):
    """-> (H, T, S): -slope_h * |j - i|. Source: Press et al. 2022, Sec. 3. Differs: symmetric, for
    encoders and cross-attention; the causal mask is separate."""
    distance = (torch.arange(S) - torch.arange(T)[:, None]).abs()
    return -alibi_slopes(n_head)[:, None, None] * distance

def causal_bias(T):
    """-> (1, T, T): 0 for j <= i, -inf above the diagonal."""
    return torch.full((T, T), -INF).triu(1)[None]

def window_bias(w, T, S, cross=False, step=1):
    """-> (1, T, S): 0 inside, -inf outside. Self-attention opens the diagonal and w positions below
    it; cross-attention the anti-diagonal, `step` columns wide and `step` a row (2 for interleaved
    operands), and w positions on either side. Source: v2, App. C.4. Differs: row 0 starts at the
    end marker, not at the last digit."""
    i, j = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        right = S - 1 - step * i  # last column of the band
        inside = (j >= right - (step - 1) - w) & (j <= right + w)
    else:
        inside = (j <= i) & (j >= i - w)
    return torch.zeros(T, S).masked_fill(~inside, -INF)[None]

# -----
# 3. Attention

class OpenKeys(NamedTuple):
    """A bias that is nearly everywhere -inf, without its matrix: row i may see K keys alone. A
    dense matrix is faster on short numbers; of 10,000 digits it would fill the memory."""
    columns: torch.Tensor  # (T, K)
    values: torch.Tensor  # (H, T, K), added to their scores

def masked_softmax(scores, bias):
    """softmax(scores + bias) over keys; 0, not nan, in a row whose keys are all closed."""
    if bias is None:
        return scores.softmax(-1)
    bias = bias.to(scores)
    closed = bias.isneginf().all(-1, keepdim=True)
    return (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0)

class MultiHeadAttention(nn.Module):
    """scores = (q k^T + relative) / sqrt(D) + bias; weights = softmax(scores); output = weights v.

    relative: "" none, "k" keys, "kq" keys and queries, at offsets -clip .. clip. rotate: function
    of q or k (B, H, T, D) and positions (T,), such as `rope`. Source: Vaswani et al. 2017,
    Sec. 3.2; bias: v2, App. C.4.
    """
    def __init__(self, d_model, n_head, relative="", clip=16, rotate=None, dropout=0.0,
                 d_head=None):
        super().__init__()
        self.n_head, self.d_head = n_head, d_head or d_model // n_head
        self.relative, self.rotate = relative, rotate
        inner = n_head * self.d_head
        self.q, self.k, self.v = (nn.Linear(d_model, inner) for _ in range(3))
        self.out = nn.Linear(inner, d_model)
        self.dropout = nn.Dropout(dropout)
        if relative:
            self.table = nn.Parameter(torch.randn(2 * clip + 1, self.d_head) / self.d_head ** 0.5)

    def heads(self, y):
        """(B, T, H * D) -> (B, H, T, D)"""
        return y.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2)

    def forward(self, x, memory, bias=None):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) or OpenKeys -> output
        (B, T, C), weights (B, H, T, S), with OpenKeys (B, H, T, K)."""
        q, k, v = self.heads(self.q(x)), self.heads(self.k(memory)), self.heads(self.v(memory))
        if isinstance(bias, OpenKeys):
            y, weights = self.attend_to_open_keys(q, k, v, bias)
        else:
            if self.rotate:
                q, k = (self.rotate(y, torch.arange(y.shape[2])) for y in (q, k))
            scores = q @ k.transpose(2, 3)  # (B, H, T, S)
            if self.relative:
                keys = k if self.relative == "kq" else None
                scores = scores + relative_scores(q, self.table, keys, k.shape[2])
            weights = masked_softmax(scores / math.sqrt(self.d_head), bias)
            y = self.dropout(weights) @ v  # (B, H, T, D)
        return self.out(y.transpose(1, 2).flatten(2)), weights

    def attend_to_open_keys(self, q, k, v, bias):
        """The same where each row gathers its own keys, but for dropout; rows in pieces, which
        bounds the memory."""
        assert not self.rotate and not self.relative, "OpenKeys go without positions"
        outputs, weights = [], []
        for rows in torch.arange(q.shape[2]).split(2 ** 14):
            columns = bias.columns[rows].to(q.device)  # (R, K)
            scores = (q[:, :, rows, None] * k[:, :, columns]).sum(4)  # (B, H, R, K)
            weights.append(masked_softmax(scores / math.sqrt(self.d_head), bias.values[:, rows]))
            outputs.append((weights[-1][..., None] * v[:, :, columns]).sum(3))  # (B, H, R, D)
        return torch.cat(outputs, 2), torch.cat(weights, 2)

# -----
# 4. Transformer
# Positions are functions (config, side, T) -> (T, C), added to the embeddings of the "source" or
# "target". Biases are functions (config, layer, kind, T, S) -> (1 or H, T, S), OpenKeys or None,
# added to the scores of "encoder", "self" or "cross" attention. Where something is learned, a class
# of modules stands in place of the function; it is made from config and called with the rest.

def sinusoids(config, side, T):
    """The same for the source and the target."""
    return sinusoidal(torch.arange(T), config.d_model)

def cyclic_sinusoids(config, side, T):
    """Position index modulo 3. Source: v2, App. C.4. Differs: sources count from their end."""
    index = torch.arange(T)
    return sinusoidal((index.flip(0) if side == "source" else index) % 3, config.d_model)

class LearnedPositions(nn.Embedding):
    """A learned vector for each of 4,096 positions."""
    def __init__(self, config):
        super().__init__(4096, config.d_model)
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, side, T):
        return self.weight[:T]

def window(config, layer, kind, T, S):
    """w = 1, in the decoder."""
    if kind != "encoder":
        return window_bias(1, T, S, kind == "cross", 2 if config.align else 1)

def alibi(config, layer, kind, T, S):
    """In every attention."""
    return alibi_bias(config.n_head, T, S)

def alibi_of_decoder(config, layer, kind, T, S):
    """In self-attention of the decoder alone."""
    if kind == "self":
        return alibi_bias(config.n_head, T, S)

class Method(NamedTuple):
    """A method is one entry of METHODS."""
    about: str
    position: Callable = None
    bias: Callable = None
    rotate: Callable = None  # see MultiHeadAttention
    relative: str = ""  # relative table in every attention: "k" or "kq"
    by_place: bool = False  # the bias opens places: for decoders, trained at several widths
    align: bool = False  # the source interleaves its two operands
    calibrated: bool = False  # the bias comes from a model trained before

WINDOW = dict(bias=window, by_place=True, align=True)
METHODS = {
    "vanilla": Method("sinusoids on the embeddings", sinusoids),
    "nope": Method("no positions (Kazemnejad et al. 2023)"),
    "ape": Method("learned positions on the embeddings (Gehring et al. 2017)", LearnedPositions),
    "alibi": Method("ALiBi, symmetric, in every attention", bias=alibi),
    "alibi-decoder": Method("sinusoids, ALiBi in the decoder's self-attention (code of v2)",
                            sinusoids, alibi_of_decoder),
    "rope": Method("rotated queries and keys, every attention", rotate=rope),
    "rpe-k": Method("relative table for keys, every attention", relative="k"),
    "rpe-kq": Method("relative table for keys and queries", relative="kq"),
    "window": Method("sinusoids, windows in the decoder (v2, +w)", sinusoids, **WINDOW),
    "window-cyclic": Method("the same, position index modulo 3 (v2, +T)", cyclic_sinusoids,
                            **WINDOW),
    "window-nope": Method("windows in the decoder, no positions (v2, NoPE+w)", **WINDOW),
    "abc": Method("bias calibrated on a vanilla model, no positions", by_place=True,
                  calibrated=True),
}

class System(NamedTuple):
    """A kind of model; sections 7 to 9 each add theirs."""
    about: str
    tasks: dict
    options: type
    learn: Callable  # makes the parts of a Run that are not there
    model: type  # made from its options

SYSTEMS = {}

def flag(name):
    """Name of an option -> as it is on the command line."""
    return "--" + name.replace("_", "-")

@dataclasses.dataclass
class Options:
    """All that a run depends on; each system adds its own, and their comments are their help.
    Raises: BadInput naming the option."""
    task: str = "successor"  # what to learn
    model: str = ""  # what learns it; by default the task's first
    preset: str = "fast"  # defaults, norms and embeddings
    seed: int = 0  # of every random stream
    samples: int = 1000  # questions a length

    paper = {}  # what preset "paper" changes
    choices = dict(preset=("fast", "paper"))
    # Of numbers, where it is not 10^9. The least is 0 of shares and rates and where that is the
    # default, 1 of all others.
    most = {}

    def __post_init__(self):
        self.settle()
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            choices = self.choices.get(name, [value])
            if value not in choices:
                raise BadInput(f"{flag(name)}: {value!r} is none of {', '.join(choices)}")
            if field.type in (int, float, tuple):
                least = 0 if field.default == 0 or field.type is float else 1
                for number in value if field.type is tuple else [value]:
                    if not least <= number <= self.most.get(name, 10 ** 9):
                        raise BadInput(f"{flag(name)}: {number} is out of its limits")

    def settle(self):
        """Values that follow from others, and checks of several."""

    def without_effect(self):
        """Names of options that change nothing beside the others."""
        return set()

    def given(self):
        """Options that have an effect, as a dict from which `Config` makes them again."""
        values = dataclasses.asdict(self)
        return {name: values[name] for name in values if name not in self.without_effect()}

    def check_heads(self):
        """Heads, or their channel pairs, must part the width."""
        parts = self.n_head * (2 if METHODS[self.method].rotate else 1)  # RoPE rotates pairs
        if self.d_model % parts:
            raise BadInput(f"--n-head: --d-model {self.d_model} is no multiple of {parts}")

def Config(task="successor", model="", preset="fast", **given):
    """Options of a run, of the class that goes with the model. Raises: BadInput."""
    models = [name for name, system in SYSTEMS.items() if task in system.tasks]
    if not models:
        raise BadInput(f"--task: {task!r} is none of those of --list")
    model = model or models[0]
    if model not in models:
        raise BadInput(f"--model: {task} is learned by {', '.join(models)}")
    kind = SYSTEMS[model].options
    values = (kind.paper if preset == "paper" else {}) | given
    for name in values:
        if name not in kind.__dataclass_fields__:
            raise BadInput(f"{flag(name)}: not an option of {task}, {model}")
    config = kind(task, model, preset, **values)
    for name in given:
        if name in config.without_effect():
            raise BadInput(f"{flag(name)}: no effect beside the other options")
    return config

@dataclasses.dataclass
class Seq2SeqOptions(Options):
    """Options of encoder-decoders. The task decides rate, batch and steps that are 0 here."""
    samples: int = 1000  # questions a length; above 100 digits a fifth
    method: str = "abc"  # positions and attention
    rules: str = "robust"  # of calibration
    n_encoder: int = 0  # encoder layers
    n_layer: int = 1  # decoder layers
    n_head: int = 4  # attention heads
    d_model: int = 64  # width of the model
    dropout: float = 0.0  # probability
    optimizer: str = "muon"  # of layers
    lr: float = 0.0  # peak learning rate
    batch: int = 0  # examples a step
    steps: int = 0  # of the first training
    retrain_steps: int = 0  # of an attempt at retraining, at most
    width: int = 0  # digits of every number; 0: as many as are needed
    lengths: tuple = (6, 10, 20, 60)  # digits tested

    clip = 16  # no option: offsets of relative tables
    choices = Options.choices | dict(method=METHODS, rules=("robust", "paper"),
                                     optimizer=("muon", "adam"))
    most = dict(dropout=0.99, width=2000)
    # v2, App. B and D; batch and steps on sums of the authors' code, retraining a tenth.
    paper = dict(rules="paper", n_encoder=1, n_layer=6, n_head=8, d_model=128, dropout=0.3,
                 optimizer="adam", lr=1e-5, batch=512, steps=460_000, retrain_steps=46_000,
                 width=61, samples=10_000)

    def settle(self):
        if self.method not in METHODS:
            return  # refused by `choices`
        spec, method, needed = TASKS[self.task], METHODS[self.method], training_width(self.task)
        for name in "lr", "batch", "steps", "retrain_steps":
            setattr(self, name, getattr(self, name) or getattr(spec, name))
        self.align = method.align and len(spec.operands) == 2
        # At one width END always comes in the same row; nine teach that the source says where.
        widest = self.width or needed + 8 * method.by_place
        self.widths = range(self.width or needed, widest + 1)
        if widest < needed:
            raise BadInput(f"--width: {self.width} is too narrow; {needed} digits are needed")
        if max(self.lengths) > 2000 and (self.rules == "paper" or not method.calibrated):
            raise BadInput("--lengths: above 2,000 digits only abc, robust")
        self.check_heads()

    def without_effect(self):
        return set() if METHODS[self.method].calibrated else {"rules", "retrain_steps"}

class Layer(nn.Module):
    """Self-attention, cross-attention, feed-forward; a norm before each ("paper": after each)."""
    def __init__(self, config, cross):
        super().__init__()
        C = config.d_model
        self.self_attention = self.attention(config)
        self.cross_attention = self.attention(config) if cross else None
        self.feed_forward = nn.Sequential(nn.Linear(C, 4 * C), nn.ReLU(),
                                          nn.Dropout(config.dropout), nn.Linear(4 * C, C))
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(3 if cross else 2))
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.preset != "paper"

    def attention(self, config):
        """One attention, as the method has it."""
        method = METHODS[config.method]
        return MultiHeadAttention(config.d_model, config.n_head, method.relative, config.clip,
                                  method.rotate, config.dropout)

    def residual(self, norm, x, sublayer):
        """x + sublayer(x), with the norm where the preset has it."""
        y = sublayer(norm(x) if self.norm_first else x)
        return x + self.dropout(y) if self.norm_first else norm(x + self.dropout(y))

    def forward(self, x, self_bias=None, memory=None, cross_bias=None):
        own = self.self_attention
        x = self.residual(self.norms[0], x, lambda y: own(y, y, self_bias)[0])
        if self.cross_attention:
            cross = self.cross_attention
            x = self.residual(self.norms[1], x, lambda y: cross(y, memory, cross_bias)[0])
        return self.residual(self.norms[-1], x, self.feed_forward)

def bound(part, config):
    """A function of a method with its config in place, or a module made from it; or None."""
    if part is None:
        return None
    if isinstance(part, type):
        return part(config)
    return functools.partial(part, config)

class Transformer(nn.Module):
    """Encoder-decoder. bias (layer, kind, T, S): in place of the method's. Differs: embeddings have
    standard deviation 0.3, so that positions stand out; for "paper" the authors' 1.33."""
    def __init__(self, config, bias=None):
        super().__init__()
        self.config, method, C = config, METHODS[config.method], config.d_model
        paper = config.preset == "paper"
        self.embedding = nn.Embedding(len(VOCAB), C)
        nn.init.normal_(self.embedding.weight, std=1.33 if paper else 0.3)
        self.position = bound(method.position, config)
        self.bias = bias or bound(method.bias, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(Layer(config, False) for _ in range(config.n_encoder))
        self.decoder = nn.ModuleList(Layer(config, True) for _ in range(config.n_layer))
        self.norm = nn.Identity() if paper else nn.LayerNorm(C)
        self.head = nn.Linear(C, len(VOCAB))

    def embed(self, tokens, side):
        """Tokens (B, T) of the "source" or "target" -> (B, T, C)."""
        x = self.embedding(tokens)
        if self.position:
            x = x + self.position(side, tokens.shape[1]).to(x)
        return self.dropout(x)

    def bias_of(self, layer, kind, T, S):
        """-> the method's bias (1 or H, T, S), OpenKeys or None; in self-attention with the causal
        mask, which OpenKeys contain. Raises: ValueError on shapes."""
        bias = self.bias and self.bias(layer, kind, T, S)
        if isinstance(bias, OpenKeys):
            return bias
        if bias is not None and bias.shape not in [(1, T, S), (self.config.n_head, T, S)]:
            raise ValueError(f"{kind} bias of layer {layer} is {[*bias.shape]}, not (H, {T}, {S})")
        if kind == "self":
            mask = causal_bias(T).to(self.head.weight)
            bias = mask if bias is None else bias.to(mask) + mask
        return bias

    def read(self, source):
        """source (B, S) -> memory (B, S, C)"""
        memory, S = self.embed(source, "source"), source.shape[1]
        for n, layer in enumerate(self.encoder):
            memory = layer(memory, self.bias_of(n, "encoder", S, S))
        return memory

    def forward(self, source, target):
        """source (B, S), target (B, T) -> logits (B, T, V)."""
        memory, x = self.read(source), self.embed(target, "target")
        S, T = source.shape[1], target.shape[1]
        for n, layer in enumerate(self.decoder):
            own, cross = self.bias_of(n, "self", T, T), self.bias_of(n, "cross", T, S)
            x = layer(x, own, memory, cross)
        return self.head(self.norm(x))

@torch.no_grad()
def generate(model, source, limit):
    """Greedy decoding: source (B, S) -> target (B, limit + 1), START first. Tokens are made at once
    from those before them until none changes; after k passes the first k are right."""
    model.eval()
    target = torch.full((len(source), limit + 1), VOCAB.index(START), device=source.device)
    for _ in range(limit):
        tokens = model(source, target[:, :-1]).argmax(-1)
        if torch.equal(tokens, target[:, 1:]):
            break
        target[:, 1:] = tokens
    return target

# -----
# 5. Attention Bias Calibration
# A line is the elements of a matrix along (1, 1), (1, 0) or (1, -1); its value is their mean.
# Lines of the attention that stand out are kept, and continued at another size.

class Line(NamedTuple):
    """An open line. offset: `line_index` of its elements, with columns counted in the block."""
    head: int
    direction: int
    block: int
    offset: int
    value: float  # d_l - d_max, the bias along it
    z: float  # (d_l - mu) / sigma
    layer: int = 0
    attention: str = "cross"

RULES = {"robust": dict(kappa=0.5, of_largest=True, support=0.5),
         "paper": dict(kappa=4.5, of_largest=False, support=0.0)}
PAPER_KAPPA = {"self": 0.87, "cross": 4.5}  # v2, App. D

def line_index(direction, i, j, N):
    """Number of the line through row i, column j of N: key - query along the diagonal (1, 1), the
    column along the vertical (1, 0), and along the anti-diagonal (1, -1), which starts at the right
    edge, the column counted from there minus the row."""
    i, j = torch.broadcast_tensors(i, j)
    return {1: j - i, 0: j, -1: (N - 1 - j) - i}[direction]

def find_lines(attention, kappa, of_largest, support, directions=(1, 0, -1), blocks=None,
               markers=None):
    """The lines of attention (H, m, n) that stand out -> list of Line. Source: v1, Eqs. 1 and 2:

        dropoff:  d_l - d_max  if d_l > mu + kappa * sigma,  else -inf

    mu, sigma and d_max run over a head's lines of one direction. Differs: the printed
    `d_l - d_max > threshold` holds for no positive threshold; d_l, as in the authors' code. More
    that differs by the robust rules:

    blocks: widths of parts of the columns, each with lines of its own. As numbers grow the first
    operand moves away from the end of the source; within its own block its lines stay in place.
    markers (n,) bool: columns where a vertical may open; within a number a column means nothing.
    support: share of the rows that a line must exceed; the mean of a corner is high by chance.
    of_largest: kappa is a share of sqrt(L - 1), the largest z that one of L lines can have. By the
    paper's kappa of 4.5 none of fewer than 22 lines can open.
    """
    m, n = attention.shape[1:]
    rows, found = torch.arange(m)[:, None], []
    blocks = blocks or [n]
    if markers is None:
        markers = torch.ones(n, dtype=torch.bool)
    for direction in directions:
        lines = []
        for b, part in enumerate(attention.split(blocks, 2)):
            width = part.shape[2]
            index = line_index(direction, rows, torch.arange(width), width)
            for offset in index.unique().tolist():
                elements = part[:, index == offset]  # (H, length)
                if elements.shape[1] > support * m:
                    lines.append((b, offset, elements.mean(1)))
        d = torch.stack([mean for _, _, mean in lines], 1)  # (H, L)
        mu, sigma = d.mean(1, keepdim=True), d.std(1, unbiased=False, keepdim=True)
        unit = math.sqrt(len(lines) - 1) if of_largest else 1
        threshold = mu + kappa * unit * sigma + 1e-5 * mu.abs()  # equal lines differ by rounding
        value, z = d - d.amax(1, keepdim=True), (d - mu) / sigma
        for h, l in (d > threshold).nonzero().tolist():
            b, offset, _ = lines[l]
            if direction or markers.split(blocks)[b][offset]:
                found.append(Line(h, direction, b, offset, float(value[h, l]), float(z[h, l])))
    return found

def lay_out(lines, H, M, blocks):
    """Lines continued to M rows and blocks of these widths -> dense bias (H, M, N), -inf where none
    runs. Along (1, 1) this is a relative table of scalars, closed beyond the offsets seen. Source:
    v2, Eq. 1 (case distinction), App. E.1."""
    bias = torch.full((H, M, sum(blocks)), -INF)
    for line in lines:
        width, start = blocks[line.block], sum(blocks[:line.block])
        index = line_index(line.direction, torch.arange(M)[:, None], torch.arange(width), width)
        value = torch.tensor(line.value).masked_fill(index != line.offset, -INF)
        part = bias[line.head, :, start:start + width]
        part.copy_(torch.maximum(part, value))  # where lines cross the greater counts
    return bias

def open_keys(lines, H, M, blocks):
    """The same as OpenKeys: a key for each place of lines, which several heads may share. The first
    key is column 0, for rows without any; here it is closed unless a line runs there."""
    rows = torch.arange(M)
    columns, values = [0 * rows], [torch.full((H, M), -INF)]
    for direction, block, offset in sorted({line[1:4] for line in lines}):
        width, start = blocks[block], sum(blocks[:block])
        column = {1: rows + offset, 0: 0 * rows + offset, -1: width - 1 - rows - offset}[direction]
        inside = (column >= 0) & (column < width)
        value = torch.full((H, M), -INF)
        for line in lines:
            if line[1:4] == (direction, block, offset):
                value[line.head, inside] = line.value
        columns.append((start + column) * inside)
        values.append(value)
    columns, values = torch.stack(columns, 1), torch.stack(values, 2)  # (M, K), (H, M, K)
    # Where lines cross, two keys of a row are one column, such as 0, 4, 4, with values -inf, -0.1
    # and 0. A column must count once: its first key gets the greatest value, the others are closed,
    # here -inf, 0 and -inf.
    same = columns[:, :, None] == columns[:, None, :]  # (M, K, K)
    values = values[:, :, None].masked_fill(~same, -INF).amax(3)
    return OpenKeys(columns, values.masked_fill(same.tril(-1).any(2), -INF))

def fill_empty(bias, rules):
    """Bias (H, M, N), or values of OpenKeys, with a 0 where a row has nothing open: by the paper's
    rules, which say so of heads, at every key; else at the first, the same at every length."""
    nothing = bias.isneginf().all(2, keepdim=True)
    if rules == "robust":
        nothing = nothing & (torch.arange(bias.shape[2]) == 0)
    return bias.masked_fill(nothing, 0)

def abc_bias(attention, M, N, rules="robust", blocks=None, markers=None, mask=0.0, **changes):
    """Attention (H, m, n) of a model that interpolates -> bias (H, M, N) that continues its lines:
    d_l - d_max along those open, -inf elsewhere. Source: v1, Sec. 5, step 2; v2, App. D, step 2.

    For other models; a run uses its two parts, `find_lines` and `lay_out`, layer by layer. rules:
    "robust", for small matrices, too, or "paper", v1's Eqs. 1 and 2, v2's kappa for cross-
    attention; `changes` replace single ones of RULES, and `directions`. blocks: [(columns now,
    then)], by default [(n, N)]. mask: `causal_bias(M)` for self-attention. Raises: ValueError.
    """
    now, then = map(list, zip(*(blocks or [(attention.shape[-1], N)])))
    if attention.dim() != 3 or not attention.isfinite().all():
        raise ValueError(f"attention is (H, m, n) and finite. Got {attention.shape}.")
    if (sum(now), sum(then)) != (attention.shape[2], N):
        raise ValueError(f"blocks add up to {attention.shape[2]} and {N}. Got {blocks}.")
    lines = find_lines(attention.cpu(), blocks=now, markers=markers, **(RULES[rules] | changes))
    bias = lay_out(lines, len(attention), M, then) + mask
    return (fill_empty(bias, rules) + mask).to(attention)

@torch.no_grad()
def collect_attention(model, source, target, batch=250):
    """Attention averaged over examples that the model answers correctly: source (B, S), target
    (B, T + 1) -> self (n_layer, H, T, T), cross (n_layer, H, T, S). Source: v1, Sec. 5; v2, App. D.
    Differs: weights, not scores (authors' code). Raises: RunFailed where no answer is right."""
    watched, totals, correct = [], [], 0

    def watch(module, inputs, outputs):
        watched.append(outputs[1])  # weights (B, H, T, S)

    model.eval()
    with contextlib.ExitStack() as hooks:
        for layer in model.decoder:
            for attention in layer.self_attention, layer.cross_attention:
                hooks.enter_context(attention.register_forward_hook(watch))
        for s, t in zip(source.split(batch), target.split(batch)):
            watched.clear()
            right = (model(s, t[:, :-1]).argmax(-1) == t[:, 1:]).all(1)
            totals.append([weights[right].sum(0) for weights in watched])  # self, cross, self, ...
            correct += int(right.sum())
    if not correct:
        raise RunFailed("the model answers no example correctly; raise --steps")
    means = [sum(parts) / correct for parts in zip(*totals)]
    return torch.stack(means[0::2]), torch.stack(means[1::2])

def column_blocks(task, S):
    """Source columns as blocks -> columns of each, markers (S,) bool: columns that hold no digit of
    a number. In `$0123|+0748|&` each number takes the marker on its left along."""
    kinds = TASKS[task].operands
    numbers, rest = kinds.count("number"), 1 + 2 * kinds.count("digit")  # `&` or `*7&`
    each = (S - rest) // numbers
    markers = ([True] + [False] * (each - 1)) * numbers + [True] * rest
    return [each] * numbers + [rest], torch.tensor(markers)

def calibrate(config, self_attention, cross_attention, kappa=None, directions=(0, -1)):
    """Averaged attention (n_layer, H, T, T), (n_layer, H, T, S) -> list of Line.

    By the robust rules each layer has its own lines, self-attention (1, 1) alone, cross-attention
    these directions and a block an operand. By the paper's all directions, one block, the paper's
    kappas, and the last layer's lines for all layers. Of a fixed width only the rows that training
    fills count (authors' code: the first 6). Source: v2, App. D, step 2.
    """
    rows, layers = training_width(config.task) + 1, range(config.n_layer)
    maps = {"self": self_attention[..., :rows, :rows], "cross": cross_attention[..., :rows, :]}
    robust = RULES["robust"] | dict(kappa=kappa or RULES["robust"]["kappa"])
    blocks, markers = column_blocks(config.task, cross_attention.shape[3])
    rules = {"self": robust | dict(directions=(1,)),
             "cross": robust | dict(directions=directions, blocks=blocks, markers=markers)}
    if config.rules == "paper":
        layers = layers[-1:]
        rules = {name: RULES["paper"] | dict(kappa=PAPER_KAPPA[name]) for name in maps}
    found = []
    for layer in layers:
        for name, attention in maps.items():
            for line in find_lines(attention[layer].cpu(), **rules[name]):
                found.append(line._replace(layer=layer, attention=name))
    return found

def run_keys(config, lines, layer, kind, T, S):
    """OpenKeys of one attention of a run, by the robust rules; a row without any sees column 0."""
    chosen = [line for line in lines if (line.attention, line.layer) == (kind, layer)]
    blocks = column_blocks(config.task, S)[0] if kind == "cross" else [T]
    columns, values = open_keys(chosen, config.n_head, T, blocks)
    if kind == "self":
        values = values.masked_fill(columns > torch.arange(T)[:, None], -INF)
    return OpenKeys(columns, fill_empty(values, "robust"))

def calibrated_bias(config, lines):
    """Lines -> a bias function (v2, Eq. 2); by the robust rules OpenKeys beyond 100 rows."""
    @functools.lru_cache(maxsize=64)
    def bias(layer, kind, T, S):
        if kind == "encoder":
            return None
        robust = config.rules == "robust"
        if robust and T > 100:
            return run_keys(config, lines, layer, kind, T, S)
        place = (kind, layer if robust else config.n_layer - 1)
        chosen = [line for line in lines if (line.attention, line.layer) == place]
        blocks = column_blocks(config.task, S)[0] if robust and kind == "cross" else [S]
        dense = lay_out(chosen, config.n_head, T, blocks)
        return fill_empty(dense + causal_bias(T) if kind == "self" else dense, config.rules)
    return bias

# -----
# 6. Proof
# A calibrated model of one decoder layer, without encoder and positions, can be proved exact at
# every length, because it can only ever see finitely many things.
#
# Row t of its output, which writes digit t of the answer, depends on its *window* alone: the token
# before it and, for each head, the tokens at its open keys with their bias values, in any order.
# Lines run beside the rows. So at every width the first rows see what the first rows of a short
# question see, the last rows what its last rows see, and all rows between see digits alone: those
# at the places where they look, and a token before them that tells what was carried there. (The
# last row writes END.)
# A carry is made by the digits below. It takes all its values where the place below takes every
# digit (of two numbers: 0 or the highest) and all further places are 0 or all are the highest, as
# nearer and further carries are alike. So short questions, enumerated, show all windows there are.
# For example row 3 of a sum, whose lines run to places 3 and 2 of both numbers: these take every
# digit, 10^4; place 1 takes 0 or 9 in each, 4; the others are 0 or 9 throughout, 2. The 80,000
# questions show 20,000 windows: four digits, and a token before that has a carry in it or has not;
# fewer where a head cannot tell two digits apart.
#
# Induction: if the tokens before row t are right, row t sees one of these windows; if the model is
# right on each of them, so is row t. Then greedy decoding is right for every question that has
# its headroom of zeros in front, as all that are asked have. The order of sums differs at other
# widths: logits of about 10 change by about 1e-5, so the right token must lead by MARGIN, and by a
# thousandth of the largest logit.
#
# That far places matter by what is carried alone is true of these tasks, not of every task that
# one may write. So random and hard questions must show no window that was not enumerated, and none
# that needs another token: short ones before a model is retrained, long ones (`unseen`) before it
# is called proved.

MARGIN = 0.5  # logits by which the right token must lead
TOO_MANY = 2 ** 21  # questions to enumerate for one row; a sum of three numbers has more
FURTHER = -1  # in place of a digit: as at all further places
KAPPAS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
DIRECTIONS = ((0, -1), (0, 1))  # of cross-attention: answers from the last digit on, or the first

def seen(config, lines, source, target, rows):
    """What rows see of questions: source (B, S), target (B, T + 1), rows [R] -> codes (B, R, L),
    equal where a model with these lines cannot tell two rows apart. A code is the token before the
    row, then for each head its open keys as sorted numbers, each a token with a bias value."""
    T, S = target.shape[1] - 1, source.shape[1]
    levels = torch.tensor(sorted({-INF, 0.0, *(line.value for line in lines)}))
    parts = [target[:, rows, None]]
    for kind, tokens, N in ("self", target, T), ("cross", source, S):
        columns, values = run_keys(config, lines, 0, kind, T, N)
        level = torch.searchsorted(levels, values[:, rows].contiguous())  # (H, R, K); 0: closed
        code = tokens[:, None, columns[rows]] * len(levels) + level  # (B, H, R, K)
        code = code.masked_fill(level == 0, 0).sort(3).values
        parts.append(code.transpose(1, 2).flatten(2))
    return torch.cat(parts, 2)

def distinct_rows(rows):
    """Rows (N, L) of tokens -> an index of each distinct one."""
    number = torch.zeros(len(rows), dtype=torch.int64)  # of a row so far, among those that differ
    for column in rows.unbind(1):
        _, number = (number * len(VOCAB) + column).unique(return_inverse=True)
    return list(dict(zip(number.tolist(), range(len(rows)))).values())

def as_asked(task, source):
    """Source [S] -> the question as `ask` takes it, 123+748."""
    spec, parts = TASKS[task], []
    for kind, part in zip(spec.operands, decode(source)[1:-1].split(spec.sign or None)):
        parts.append(part[spec.headroom:] if kind == "number" else part)
    return spec.sign.join(parts)

def draw_questions(config, draw_some, length, samples):
    """Questions of a task by `draw_test` or `draw_hard` -> source (B, S), target (B, T + 1)."""
    operands = draw_some(config.task, length, samples)
    width = max(config.widths[0], length + TASKS[config.task].headroom)
    return arrange(config.task, pad(config.task, operands, width), config.align)

class Windows:
    """Distinct windows that rows have through some lines.

    found: code -> token that must be written, source [S], target [T + 1] and row of a question that
    shows it. same: two questions that look the same to a row and differ there, in words; ""
    where none do, so that the lines decide the answer."""
    def __init__(self, config, lines):
        self.config, self.lines, self.found, self.same = config, lines, {}, ""

    def add(self, source, target, rows):
        """Keep what rows [R] see of these questions (B, .) -> sources of those that show more."""
        more, task = [], self.config.task
        codes = seen(self.config, self.lines, source, target, rows).flatten(0, 1).tolist()
        wanted = target[:, 1:][:, rows].flatten().tolist()
        for i, (code, token) in enumerate(zip(map(tuple, codes), wanted)):
            asked = source[i // len(rows)]
            if code not in self.found:
                answer = target[i // len(rows)].tolist()
                self.found[code] = token, asked.tolist(), answer, rows[i % len(rows)]
                more.append(asked)
            elif self.found[code][0] != token:
                known, other, *_ = self.found[code]
                self.same = (f"{as_asked(task, other)} and {as_asked(task, asked)} look the same "
                             f"to a row that must write {VOCAB[known]} or {VOCAB[token]}")
        return more

def places_of(lines, row, width):
    """Places of the numbers that a row looks at, or that make a token which it sees or writes. With
    lines along (1, 1) the answer runs leftward, from the first digit on."""
    leftward, written, places = False, {row, row - 1}, set()
    for line in lines:
        if line.attention == "self":
            written.add(row + line.offset - 1)  # START is token 0
        elif line.direction == -1:
            places.add(row + line.offset)
        elif line.direction == 1:
            leftward = True
            places.add(width - row - line.offset)
    for place in written:
        places.add(width - 1 - place if leftward else place)
    return places

def all_questions(config, places, width, both_sides):
    """Operands, in pieces, of the questions that show all windows of a row that looks at these
    places: see the head of this section. both_sides: what is carried may come from above, too.
    Raises: NotEnumerated."""
    spec = TASKS[config.task]
    digits, extremes = range(spec.base), (0, spec.base - 1)
    near = {place - 1 for place in places}
    if both_sides:
        near |= {place + 1 for place in places}
    near_choice = digits if spec.operands.count("number") == 1 else extremes
    sizes, choices = [], [extremes]  # the first choice is made for all FURTHER places at once
    for kind in spec.operands:
        sizes.append(width if kind == "number" else 1)
        for place in range(sizes[-1]):
            if kind == "number" and place >= width - spec.headroom:
                choices.append((0,))
            elif kind == "digit" or place in places:
                choices.append(digits)
            else:
                choices.append(near_choice if place in near else (FURTHER,))
    total = math.prod(len(choice) for choice in choices)
    if total > TOO_MANY:
        raise NotEnumerated(f"{total:,} questions for a row are too many to enumerate")
    for index in torch.arange(total).split(2 ** 18):
        columns = []
        for choice in choices:
            columns.append(torch.tensor(choice)[index % len(choice)])
            index = index // len(choice)
        everywhere, table = columns[0][:, None], torch.stack(columns[1:], 1)
        yield spec.admit(*torch.where(table == FURTHER, everywhere, table).split(sizes, 1))

def enumerate_windows(config, lines):
    """All windows that rows can have through these lines -> Windows; ends where two clash. Raises:
    NotEnumerated where they are too many, or the task has others."""
    spec, windows, narrowest = TASKS[config.task], Windows(config, lines), config.widths[0]
    leftward = any(line.attention == "cross" and line.direction == 1 for line in lines)
    both_sides = leftward or spec.admit is not as_drawn
    # A row far from both ends looks at places from low to high, counted from its own. Rows below
    # `bottom` have fewer than two places under these, for carries; rows from T - `top` on have no
    # place above them, for numbers in order, before the headroom. All rows between are alike. At
    # width `enough` there is one, so wider questions show the same windows. Narrower ones that the
    # run may ask, from its own width on, are enumerated themselves.
    far = 10 ** 4
    between = places_of(lines, far, 2 * far)
    bottom, top = 2 - (min(between) - far), max(between) - far + 2 + spec.headroom
    enough = bottom + top
    for width in range(narrowest, max(narrowest, enough) + 1):
        source, target = draw_questions(config, draw_test, width - spec.headroom, 1)
        T, S = target.shape[1] - 1, source.shape[1]
        own = run_keys(config, lines, 0, "self", T, T).columns
        cross = run_keys(config, lines, 0, "cross", T, S).columns
        for row in sorted({*range(min(bottom + 1, T)), *range(max(0, T - top), T)}):
            places = places_of(lines, row, width)
            for operands in all_questions(config, places, width, both_sides):
                source, target = arrange(config.task, operands)
                looks = [target[:, own[row]], source[:, cross[row]], target[:, row:row + 2]]
                differ = distinct_rows(torch.cat(looks, 1))  # few do
                windows.add(source[differ], target[differ], [row])
                if windows.same:
                    return windows
    odd = unseen(windows, narrowest - spec.headroom)
    if odd and not windows.same:
        raise NotEnumerated(odd)
    return windows

def unseen(windows, *lengths):
    """Add random and hard questions of these lengths -> what is wrong: one that shows a new window,
    or two that clash; "" if nothing is."""
    config, odd = windows.config, ""
    seed_by_name(config.seed, "unseen")
    for length, draw_some in itertools.product(lengths, (draw_test, draw_hard)):
        source, target = draw_questions(config, draw_some, length, 200)
        for question in windows.add(source, target, list(range(target.shape[1] - 1))):
            odd = f"{as_asked(config.task, question)} shows what was not enumerated"
    return windows.same or odd

@torch.no_grad()
def prove(model, questions, whole=False):
    """By how many logits does the right token lead over all others, in each of these questions of
    Windows.found? -> the smallest lead, [(lead, question)] of those where it is too small, or no
    number. Ends with the first piece of 1,000 that has such, unless whole."""
    model.eval()
    device = next(model.parameters()).device
    margin, doubtful = INF, []
    for (_, row), group in itertools.groupby(questions, lambda asked: (len(asked[1]), asked[3])):
        group = list(group)
        for start in range(0, len(group), 1000):
            piece = group[start:start + 1000]
            _, source, target, _ = zip(*piece)
            source, target = (torch.tensor(x, device=device) for x in (source, target))
            logits = model(source, target[:, :row + 1])[:, row]  # (B, V)
            want = target[:, row + 1, None]
            leads = logits.gather(1, want)[:, 0] - logits.scatter(1, want, -INF).amax(1)
            enough = leads >= (logits.abs().amax(1) / 1000).clamp(min=MARGIN)  # nan is not
            margin = min(margin, float(leads.nan_to_num(-1e9).min()))
            for i in (~enough).nonzero().flatten().tolist():
                doubtful.append((float(leads[i]), piece[i]))
            if doubtful and not whole:
                return margin, doubtful
    return margin, doubtful

class Candidate(NamedTuple):
    """Lines to train with."""
    kappa: float
    lines: list
    windows: Windows = None
    why: str = ""  # there are no windows

def deciding_lines(config, attention):
    """Yields lines that decide the answer: two rows that look the same write the same token. Kappa
    falls, and each Candidate opens other lines than the one before. Of lines along (1, 0) and
    (1, -1) first; where none decide, of (1, 0) and (1, 1). If windows cannot be enumerated there is
    one Candidate, without them. Raises: RunFailed where no lines decide."""
    if config.rules == "paper" or config.n_encoder or config.n_layer > 1:
        why = "only one decoder layer with the robust rules and no encoder sees finitely much"
        kappa = RULES["robust"]["kappa"] if config.rules == "robust" else None  # the paper's two
        yield Candidate(kappa, calibrate(config, *attention), None, why)
        return
    same, not_enumerated, decided = "", None, False
    for directions in DIRECTIONS:
        before = None
        for kappa in KAPPAS:
            lines = calibrate(config, *attention, kappa, directions)
            opened = {(line.attention, *line[:4]) for line in lines}
            if opened == before:
                continue
            before = opened
            try:
                windows = enumerate_windows(config, lines)
            except NotEnumerated as error:  # nor can those of more lines be, at lower kappas
                not_enumerated = not_enumerated or Candidate(kappa, lines, None, str(error))
                break
            if windows.same:
                same = same or windows.same
            else:
                decided = True
                yield Candidate(kappa, lines, windows)
        if decided:
            return
    if not not_enumerated:
        raise RunFailed(f"no lines decide the answer: {same}")
    yield not_enumerated

# -----
# 7. Training and evaluation
# A run is a row of named parts: trained weights, averaged attention, tests. Each is kept when
# done; a run that was stopped goes on with the parts that are not there.

SECONDS = 3  # between reports, and saves, of a training

def say(text):
    """To standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr or io.StringIO(), flush=True)

def silent(text):
    """A report that nobody reads."""

def processes():
    """-> number of this process, how many there are; more than one under torchrun."""
    count = int(os.environ.get("WORLD_SIZE", 1))
    return (int(os.environ["RANK"]) if count > 1 else 0), count

@contextlib.contextmanager
def kept_right(what="what is kept of the run"):
    """Whatever goes wrong in here is wrong with a file. Raises: BadInput."""
    try:
        yield
    except Exception as error:
        why = " ".join((getattr(error, "strerror", None) or repr(error)).split())
        raise BadInput(f"{what} cannot be used: {why[:300]}") from None

class Run:
    """Options, parts by name, the training under way; in checkpoint.pt if there is a folder."""
    def __init__(self, config, folder=None, parts=None, current=None, device="cpu", report=silent):
        self.config, self.folder = config, folder and Path(folder)
        self.parts, self.current = parts or {}, current or {}
        self.device, self.report = torch.device(device), report

    def add(self, name, part):
        """A part is done."""
        self.parts[name] = part
        self.save()

    def save(self):
        """All as plain values and tensors, which load without running code."""
        state, buffer = dict(parts=self.parts, current=self.current), io.BytesIO()
        torch.save(state | dict(config=self.config.given()), buffer)
        self.write("checkpoint.pt", buffer.getvalue())

    def write(self, name, data):
        """Beside, then moved into place: never half-written. On a full disk the run goes on."""
        if self.folder and processes()[0] == 0:
            beside = self.folder / f"{name}.part"
            try:
                beside.write_bytes(data)
                beside.replace(self.folder / name)
            except OSError as error:
                say(f"lengen: {self.folder / name} cannot be written: {error.strerror}")
                with contextlib.suppress(OSError):
                    beside.unlink()

class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by five Newton-Schulz steps, at the size of Adam's updates. Source:
    Jordan et al. 2024; the size, 0.2 sqrt(max(rows, columns)): Liu et al. 2025. torch.optim.Muon,
    from torch 2.9 on, works in bfloat16, which is slow on a CPU."""
    def __init__(self, weights, lr):
        super().__init__(weights, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.05)
                update = orthogonal(weight.grad.lerp(momentum, 0.95))  # Nesterov
                weight.sub_(update, alpha=group["lr"] * 0.2 * math.sqrt(max(weight.shape)))

def orthogonal(x):
    """Matrix (a, b) -> about the nearest one whose singular values are 1."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        square = torch.addmm(square, square, square, beta=-4.775, alpha=2.0315)
        x = torch.addmm(x, square, x, beta=3.4445)
    return x

def make_optimizers(model, config, decay=0.0, betas=(0.9, 0.98)):
    """Muon for matrices of layers, Adam at a quarter of its rate for all else; or Adam alone."""
    muon, rest = [], []
    for name, weight in model.named_parameters():
        matrix = weight.dim() == 2 and "coder." in name and not name.endswith("table")
        (muon if config.optimizer == "muon" and matrix else rest).append(weight)
    lr = config.lr / 4 if muon else config.lr
    adam = torch.optim.AdamW(rest, lr, betas, weight_decay=decay, fused=True)
    return [adam, Muon(muon, config.lr)] if muon else [adam]

def take_step(model, optimizers, source, target, share=1.0):
    """One step at a share of the peak rate -> the loss, cross-entropy of target (B, T + 1), each
    token given those before it. Differs: gradients are clipped at norm 1."""
    model.train()
    logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * share
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()

def train(run, model, optimizers, name, steps, draw_batch, rate, check=None, done=None):
    """Train, from where the run is; keep the part {"weights", "steps", "seconds", "curve"}.

    draw_batch(step) -> source (B, S), target (B, T + 1); rate(step) -> share of the peak rate.
    check(model) -> a list, for the curve: [step, loss, *check] every 100 steps. done(model): asked
    every 25 steps, from 50 on, whether to stop. Raises: RunFailed where the loss is not finite."""
    if name in run.parts:
        with kept_right():
            return model.load_state_dict(run.parts[name]["weights"])
    begun, curve, seconds = 0, [], 0.0
    if run.current.get("name") == name:
        with kept_right():
            begun, curve, seconds = (run.current[key] for key in ("steps", "curve", "seconds"))
            assert 0 < begun < steps, f"step {begun} of {steps}"
            model.load_state_dict(run.current["weights"])
            for optimizer, state in zip(optimizers, run.current["optimizers"], strict=True):
                optimizer.load_state_dict(state)
    number, count = processes()
    parallel = nn.parallel.DistributedDataParallel(model) if count > 1 else model
    told = time.perf_counter()
    start = told - seconds
    for step in range(begun + 1, steps + 1):
        seed_by_name(run.config.seed, name, step)
        source, target = (x[number::count].to(run.device) for x in draw_batch(step))
        loss = take_step(parallel, optimizers, source, target, rate(step))
        last = step == steps
        if done and step % 25 == 0 and step >= 50:
            last = done(model) or last
        if step % 100 == 0 or last:
            curve.append([step, loss.item(), *(check(model) if check else [])])
        if last or time.perf_counter() - told > SECONDS:  # here a GPU is waited for
            told = time.perf_counter()
            if not loss.isfinite():
                raise RunFailed(f"the loss is {loss.item()} at step {step} of {name}")
            run.report(f"{name}: step {step:,} of {steps:,}, loss {loss:.4f}, {told - start:.0f} s")
            part = dict(steps=step, seconds=round(told - start, 2), curve=curve,
                        weights={key: x.clone() for key, x in model.state_dict().items()})
            if last:
                run.current = {}
                return run.add(name, part)
            states = [optimizer.state_dict() for optimizer in optimizers]
            run.current = part | dict(name=name, optimizers=states)
            run.save()
            told = time.perf_counter()  # saving takes time

@torch.no_grad()
def right_tokens(model, source, target):
    """source (B, S), target (B, T + 1) -> (B, T) bool on the CPU: is each token the most likely one
    after those before it? If all are, and only then, greedy decoding writes the target."""
    model.eval()
    device = next(model.parameters()).device
    chunk = max(1, 2 ** 12 // target.shape[1])  # rows that stay in a cache
    right = []
    for s, t in zip(source.split(chunk), target.split(chunk)):
        tokens = model(s.to(device), t[:, :-1].to(device)).argmax(-1)
        right.append(tokens.cpu() == t[:, 1:].cpu())
    return torch.cat(right)

def test_questions(config, length):
    """-> {"random": (source, target)}; at the longest length up to 60 also "hard" ones."""
    samples = config.samples if length <= 100 else -(-config.samples // 5)
    sets = {"random": draw_questions(config, draw_test, length, samples)}
    if length == max((n for n in config.lengths if n <= 60), default=0):
        sets["hard"] = draw_questions(config, draw_hard, length, samples)
    return sets

def evaluate(model, config, draw_sets=test_questions, report=silent):
    """Test at config.lengths -> {"rows", "seconds"}; "places" is the share right of each digit."""
    rows, start = [], time.perf_counter()
    for length in sorted(set(config.lengths)):
        report(f"test of {length} digits")
        seed_by_name(config.seed, "test", length)
        for name, (source, target) in draw_sets(config, length).items():
            right, digit = right_tokens(model, source, target), target[:, 1:] < 10
            shown = digit.any(0)  # without END and padding
            places = (right & digit)[:, shown].sum(0) / digit[:, shown].sum(0)
            rows.append(dict(digits=length, set=name, correct=int(right.all(1).sum()),
                             n=len(right), places=[round(x, 4) for x in places.tolist()]))
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

def ask(model, config, question):
    """A question, such as "123+748" -> the answer, "871". Raises: BadInput outside the task."""
    spec = TASKS[config.task]
    operands = question.split(spec.sign or None)
    width = max([config.widths[0]] + [len(text) + spec.headroom for text in operands])
    source, target = example(config.task, *operands, width=width, align=config.align)
    source = encode(source)[None].to(next(model.parameters()).device)
    text = decode(generate(model, source, len(target) - 1)[0])[1:]
    digits = text.partition(END)[0]
    if END not in text or not digits or set(digits) - set(VOCAB[:spec.base]):
        return f"no number; the model wrote {text!r}"
    return digits[-1] if spec.last_alone else digits[::-1].lstrip("0") or "0"

def training_batch(config, numbers, B, power=1.0):
    """B questions on some of these numbers, at one of the run's widths -> source, target. power:
    above 1 the first, the short ones, come more often."""
    width = config.widths[int(torch.randint(len(config.widths), (1,)))]

    def number():
        pick = (len(numbers) * torch.rand(B) ** power).long()
        return to_digits(numbers[pick], width, TASKS[config.task].base)

    return arrange(config.task, draw(config.task, B, number), config.align)

def fit(run, config, model, name, steps, short_first=False, falling=1.0, done=None):
    """Train on the training numbers; the curve has the share of 1,000 held-out ones that are exact.
    short_first: short numbers come more often at first, half of them below 1.6% of all. falling:
    the share of the steps, the last, over which the rates fall to zero, after 30 of warm-up.
    --optimizer adam has constant rates."""
    numbers, held_out = split_numbers(config.seed)

    def draw_batch(step):
        power = 6 - 5 * step / steps if short_first else 1.0
        return training_batch(config, numbers, config.batch, power)

    def rate(step):
        muon = min(1.0, step / 30, (steps - step + 1) / (falling * steps))
        return muon if config.optimizer == "muon" else 1.0

    def check(model):
        right = right_tokens(model, *training_batch(config, held_out, 1000))
        return [float(right.all(1).float().mean())]

    optimizers = make_optimizers(model, config)
    train(run, model, optimizers, name, steps, draw_batch, rate, check, done)

def learn(run):
    """Make the parts of a run of an encoder-decoder that are not there. Source: v1, Sec. 5; v2,
    App. D. Differs: short numbers come more often at first (not in preset "paper"); rates fall; see
    `retrain`. Raises: RunFailed."""
    # 1. A model with the method's positions learns the training numbers; for ABC a vanilla one.
    config, calibrated = run.config, METHODS[run.config.method].calibrated
    name, first = "model", config
    if calibrated:
        # It is not tested; lengths above 2,000 are not for vanilla models.
        name, first = "teacher", dataclasses.replace(config, method="vanilla", lengths=(6,))
    seed_by_name(config.seed, name)
    model = Transformer(first).to(run.device)
    fit(run, first, model, name, config.steps, config.preset == "fast", falling=0.4)
    if calibrated:
        # 2. Its attention is averaged over training numbers, to find lines in it.
        if "attention" not in run.parts:
            seed_by_name(config.seed, "attention")
            batch = training_batch(first, split_numbers(config.seed)[0], 1000)
            average = collect_attention(model, *(x.to(run.device) for x in batch))
            run.add("attention", tuple(weights.cpu() for weights in average))
        # 3. A model without positions is trained with the lines as its bias.
        if "proof" not in run.parts:
            name, proof = retrain(run, model)
            run.parts["model"] = run.parts.pop(name)
            run.add("proof", proof)
        model = build(config, run.parts).to(run.device)
    if "tests" not in run.parts:
        run.add("tests", evaluate(model, config, report=run.report))

def retrain(run, teacher):
    """Train models with lines of the teacher's attention until one is proved -> name of the part
    that has its weights, {"proved", "why" not, "kappa", "attempt", "lines"}, and "windows" and
    "margin" where they could be enumerated. At most two sets of lines, twice each.

    The lines are those of the first kappa that decide the answer. Training goes on from the
    teacher's weights. If that ends without a proof, as it may where a head is set on something
    else, a new model gets twice the steps, as in the paper; then both are tried with the lines of
    the next kappa. What cannot be proved is trained once to the end (rules "paper": anew)."""
    config, attempt = run.config, 0
    candidates = deciding_lines(config, run.parts["attention"])
    for kappa, lines, windows, why in itertools.islice(candidates, 2):
        for anew in [True] if config.rules == "paper" else [False, True]:
            attempt += 1
            name, steps = f"attempt {attempt}", config.retrain_steps
            seed_by_name(config.seed, name)
            model = Transformer(config, calibrated_bias(config, lines)).to(run.device)
            if not anew:
                model.load_state_dict(teacher.state_dict())
            proof = dict(proved=False, why=why, kappa=kappa, attempt=attempt,
                         lines=[tuple(line) for line in lines])
            if windows is None:
                fit(run, config, model, name, steps)
                return name, proof
            questions, margin, doubtful = list(windows.found.values()), None, []

            def proved(model):
                # Looks mostly fail, and where the last one did: begin there.
                nonlocal margin, doubtful
                again = [question for _, question in doubtful]
                margin, doubtful = prove(model, again + questions)
                return not doubtful

            fit(run, config, model, name, 2 * steps if anew else steps, done=proved)
            if doubtful or margin is None:  # it failed, or nobody has looked
                margin, doubtful = prove(model, questions, whole=True)
            proof |= dict(margin=round(margin, 3), windows=len(questions))
            if not doubtful:
                wrong = unseen(windows, 8, 60)
                return name, proof | dict(proved=not wrong, why=wrong)
            _, (_, worst, *_) = min(doubtful, key=lambda pair: pair[0])
            proof["why"] = (f"{len(doubtful)} windows are wrong or in doubt, such as one of "
                            f"{as_asked(config.task, worst)}")
    return name, proof

def build(config, parts):
    """Parts of a run, of any system -> its trained model. Raises: BadInput."""
    with kept_right():
        model = SYSTEMS[config.model].model(config)
        if "proof" in parts:
            lines = [Line(*line) for line in parts["proof"]["lines"]]
            model.bias = calibrated_bias(config, lines)
        model.load_state_dict(parts["model"]["weights"])
        return model

SYSTEMS["seq2seq"] = System("encoder-decoder (ABC)", TASKS, Seq2SeqOptions, learn, Transformer)

# -----
# 8. Consecutive pairs: one attention head, read completely
# Source: Pairs. Tokens are integers 0 .. V - 1; a token's label is 1 where the sequence also
# holds its value - 1 or + 1. One layer and head, no feed-forward; and no positions, norm or
# residual, of which the source says nothing.

@dataclasses.dataclass
class PairsOptions(Options):
    """Options of consecutive pairs."""
    samples: int = 10_000  # sequences a test
    d_vocab: int = 16  # how many integers
    d_model: int = 128  # width of embeddings
    d_head: int = 32  # width of queries and keys
    dummy: bool = False  # a dummy token before each sequence
    plant: float = 0.0  # share of places that are made pairs
    lr: float = 1e-4  # learning rate
    batch: int = 1000  # sequences a step
    steps: int = 10_000  # of training
    lengths: tuple = (5,)  # integers of a sequence, as tested

    optimizer = "adam"  # no option
    choices = dict(preset=("fast",))
    most = dict(plant=1, d_vocab=2 ** 16)

    def settle(self):
        if self.d_vocab < 4:
            raise BadInput(f"--d-vocab: {self.d_vocab} is below 4")

def draw_pairs(B, length, d_vocab, plant=0.0, dummy=False):
    """-> source (B, length), with `dummy` a token V before it, target (B, 1 + length), the labels
    behind a start token. Integers are uniform; places (0, 1), (2, 3), ... become pairs with
    probability `plant`. The source does not say how it draws."""
    tokens = torch.randint(d_vocab, (B, length))
    first, n = tokens[:, 0:length - 1:2], length // 2
    side = 1 - 2 * torch.randint(2, (B, n))
    outside = (first + side < 0) | (first + side >= d_vocab)
    second = first + torch.where(outside, -side, side)
    tokens[:, 1::2] = torch.where(torch.rand(B, n) < plant, second, tokens[:, 1::2])
    near = (tokens[:, :, None] - tokens[:, None]).abs() == 1  # (B, T, T)
    source = F.pad(tokens, (1, 0), value=d_vocab) if dummy else tokens
    return source, F.pad(near.any(2).long(), (1, 0))

class PairsHead(nn.Module):
    """Source (B, T), target -> logits (B, T, 2) of the labels, 0 and z. Differs: all integers start
    by voting yes; the dummy, whose embedding alone is long, soon votes no."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.d_vocab + config.dummy, config.d_model)
        nn.init.normal_(self.embedding.weight[:config.d_vocab], std=0.1)
        self.attention = MultiHeadAttention(config.d_model, 1, d_head=config.d_head)
        self.attention.out = nn.Linear(config.d_head, 1)
        nn.init.constant_(self.attention.out.bias, 5.0)

    def forward(self, source, target):
        x = self.embedding(source)
        z = self.attention(x, x)[0][:, -target.shape[1]:]
        return torch.cat([torch.zeros_like(z), z], 2)

def pairs_questions(config, length):
    """Tests, drawn as in training ("random") and without planted pairs ("uniform")."""
    sets = {}
    for name, plant in ("random", config.plant), ("uniform", 0.0):
        sets[name] = draw_pairs(config.samples, length, config.d_vocab, plant, config.dummy)
    return sets

def learn_pairs(run):
    """Make the parts of a run of one head that are not there. Differs: a constant rate; the source
    cuts it on a plateau, with a patience of 100, and takes the best of several seeds."""
    config = run.config
    seed_by_name(config.seed, "model")
    model = PairsHead(config).to(run.device)

    def draw_batch(step):
        return draw_pairs(config.batch, 5, config.d_vocab, config.plant, config.dummy)

    optimizers = make_optimizers(model, config, betas=(0.9, 0.999))
    train(run, model, optimizers, "model", config.steps, draw_batch, rate=lambda step: 1.0)
    if "tests" not in run.parts:
        run.add("tests", evaluate(model, config, pairs_questions, run.report))

PAIRS = {"consecutive": "is a neighbour of this integer there?"}
SYSTEMS["head"] = System("one attention head (Pairs)", PAIRS, PairsOptions, learn_pairs, PairsHead)

# -----
# 9. Encoders: one pass, relative positions, priming
# Source: Jelassi. One pass over the question: answer digit t is read off at token t. Numbers
# start with their most significant digit and are padded on the right, so digits of equal weight
# are aligned only in numbers of equal length. + and * serve for the paper's four signs.

class EncoderTask(NamedTuple):
    about: str
    columns: Callable  # as those of Task
    sign: str
    modular: bool = False  # the answer is a remainder of --modulus
    carries: bool = True  # else an answer is as long as the longer operand

ENCODER_TASKS = {  # at width 3 and modulus 100
    # 12@+39@ -> $51@@
    "addition": EncoderTask("a + b", operator.add, "+"),
    # 98@+7@@ -> $05
    "modular-addition": EncoderTask("(a + b) mod c", operator.add, "+", modular=True),
    # 12@*3@@ -> $36@@@@
    "multiplication": EncoderTask("a * b, b of few digits", product, "*"),
    # 12@*9@@ -> $08
    "modular-multiplication": EncoderTask("(a * b) mod c, b of few", product, "*", modular=True),
    # 15@+27@ -> $32@
    "elementwise-addition": EncoderTask("a + b, carries dropped", lambda a, b: (a + b) % 10, "+",
                                        carries=False),
}
SIZES = {"small": (2, 64, 4), "base": (6, 512, 8), "standard": (6, 1024, 16),
         "large": (10, 1024, 16)}  # n_encoder, d_model, n_head

@dataclasses.dataclass
class EncoderOptions(Options):
    """Options of encoders."""
    method: str = "rpe-k"  # positions and attention
    size: str = "small"  # decides n_encoder, d_model and n_head where they are 0
    n_encoder: int = 0  # layers, or rounds of one
    d_model: int = 0  # width of the model
    n_head: int = 0  # attention heads
    dropout: float = 0.1  # probability
    clip: int = 0  # relative offsets, -clip to clip; 0: twice the width
    optimizer: str = "adam"  # of layers
    lr: float = 1e-3  # peak learning rate
    batch: int = 64  # examples a step
    steps: int = 2000  # of training
    width: int = 0  # digits of every number; 0: 20, or what is needed
    lengths: tuple = (5, 6, 10)  # numbers tested are below 10^length
    train_digits: int = 5  # digits of training numbers, at most
    second_digits: int = 3  # of products: digits of the second operand, at most
    modulus: int = 100  # of modular tasks
    even: bool = False  # train on each length equally often
    n_train: int = 5000  # first operands to train on
    prime: int = 0  # long ones among them, for priming
    prime_lengths: tuple = ()  # their digits; by default the longest tested
    finetune: int = 0  # long ones to train on afterwards
    retrain_steps: int = 1000  # of fine-tuning

    n_layer, align = 0, False  # no options: there is no decoder
    choices = Options.choices | dict(size=SIZES, optimizer=("muon", "adam"), method=(
        "vanilla", "nope", "ape", "alibi", "rope", "rpe-k", "rpe-kq"))
    most = dict(dropout=0.99, width=2000, train_digits=2000)
    # Jelassi, Sec. 2.2: 15,000 epochs of 5,000 examples.
    paper = dict(size="standard", lr=1e-4, batch=32, steps=2_343_750, samples=10_000,
                 lengths=(5, 6, 10, 15, 20))

    def settle(self):
        spec = ENCODER_TASKS[self.task]
        sizes = SIZES.get(self.size, SIZES["small"])  # others are refused by `choices`
        for name, usual in zip(("n_encoder", "d_model", "n_head"), sizes):
            setattr(self, name, getattr(self, name) or usual)
        if self.prime or self.finetune:
            self.prime_lengths = self.prime_lengths or (max(self.lengths),)
        self.has_short_operand = spec.columns is product
        needed = max(*self.lengths, *self.prime_lengths, self.train_digits,
                     self.second_digits * self.has_short_operand,
                     len(str(self.modulus - 1)) * spec.modular)
        self.width = self.width or max(needed, 20)  # Jelassi's for sums
        self.clip = self.clip or 2 * self.width
        if self.width < needed:
            raise BadInput(f"--width: {self.width} is too narrow; {needed} digits are needed")
        if self.prime > self.n_train:
            raise BadInput(f"--prime: {self.prime} of {self.n_train} examples")
        if self.method in METHODS:
            self.check_heads()

    def without_effect(self):
        has_effect = {"clip": METHODS[self.method].relative, "retrain_steps": self.finetune,
                      "prime_lengths": self.prime or self.finetune,
                      "modulus": ENCODER_TASKS[self.task].modular,
                      "second_digits": self.has_short_operand}
        return {name for name, effect in has_effect.items() if not effect}

def write_padded(a, length):
    """Digits (B, W) -> tokens (B, W): the lowest `length` (B,), highest first, then PAD."""
    place = length[:, None] - 1 - torch.arange(a.shape[1])
    return a.gather(1, place.clamp(min=0)).masked_fill(place < 0, VOCAB.index(PAD))

def arrange_encoder(task, a, b, modulus=100):
    """Operands a, b (B, W) -> question (B, 2W + 1), target (B, 1 + n), the answer behind a START
    that is not read. Source: Jelassi, Sec. 2.1 (printed with a pad less). Modular answers have as
    many digits as modulus - 1."""
    spec = ENCODER_TASKS[task]
    room = spec.carries * (a.shape[1] if spec.columns is product else 1)
    answer = carry(spec.columns(F.pad(a, (0, room)), F.pad(b, (0, room))), 10)
    length = n_digits(answer) if spec.carries else torch.maximum(n_digits(a), n_digits(b))
    if spec.modular:
        rest = 0 * length
        for digit in answer.flip(1).unbind(1):  # Horner: no integer grows
            rest = (10 * rest + digit) % modulus
        answer = to_digits(rest, len(str(modulus - 1)))
        length = torch.full_like(rest, answer.shape[1])
    signs, starts = (encode(symbol).expand(len(a), -1) for symbol in (spec.sign, START))
    question = [write_padded(a, n_digits(a)), signs, write_padded(b, n_digits(b))]
    return torch.cat(question, 1), torch.cat([starts, write_padded(answer, length)], 1)

def draw_below(config, length, B, even=False):
    """Numbers (B, width) below 10^length, 1 in place of 0; even: each length as often."""
    digits, place = torch.randint(10, (B, length)), torch.arange(length)
    if even:
        top = torch.randint(length, (B, 1))  # place of the first digit
        first = torch.randint(1, 10, (B, 1)) * (place == top)
        digits = digits * (place < top) + first
    digits[:, 0] += digits.sum(1) == 0
    return F.pad(digits, (0, config.width - length))

def draw_encoder(config, length, B, even=False):
    """Operands (B, width) of B questions on numbers below 10^length."""
    second = config.second_digits if config.has_short_operand else length
    return draw_below(config, length, B, even), draw_below(config, second, B, even)

def encoder_questions(config, length):
    """Test questions on numbers below 10^length. Source: Jelassi, Sec. 2.1."""
    operands = draw_encoder(config, length, config.samples)
    return {"random": arrange_encoder(config.task, *operands, config.modulus)}

class Encoder(Transformer):
    """Source (B, S), target (B, T), read for its length alone -> logits (B, T, V). Source: Jelassi,
    Sec. 2.2, with layers of BERT and ALBERT; "vanilla" are the sinusoids that it cites, "ape" the
    table of these layers. Differs: 4 C wide, not 3,072 and 16,384; ALBERT has no dropout, does not
    scale the relative term, and widens embeddings of 128."""
    def __init__(self, config):
        super().__init__(config)
        if config.model == "universal":  # one layer, again and again
            self.encoder = nn.ModuleList([self.encoder[0]] * config.n_encoder)
        for layer in self.encoder:
            layer.feed_forward[1] = nn.GELU()
        if config.preset == "paper":
            self.dropout = nn.Sequential(nn.LayerNorm(config.d_model), self.dropout)
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02)

    def forward(self, source, target):
        return self.head(self.norm(self.read(source)[:, :target.shape[1]]))

def fit_encoder(run, model, name, n, prime, steps):
    """Train on n first operands, of which `prime` are long and keep their second one. The curve has
    the share right of each digit (Figs. 7, 10; of new questions)."""
    config = run.config
    seed_by_name(config.seed, name, "examples")
    a, b = draw_encoder(config, config.train_digits, n, config.even)
    for turn, length in enumerate(config.prime_lengths):
        places = torch.arange(prime)[turn::len(config.prime_lengths)]
        a[places], b[places] = draw_encoder(config, length, len(places))

    def draw_batch(step):
        pick = torch.randint(n, (config.batch,))
        _, fresh = draw_encoder(config, config.train_digits, config.batch, config.even)
        second = torch.where((pick < prime)[:, None], b[pick], fresh)
        return arrange_encoder(config.task, a[pick], second, config.modulus)

    def rate(step):
        return min(1.0, step / 100) * (1 + math.cos(math.pi * step / steps)) / 2

    def check(model):
        short = dataclasses.replace(config, lengths=(config.train_digits,), samples=200)
        return evaluate(model, short, encoder_questions)["rows"][0]["places"]

    optimizers = make_optimizers(model, config, decay=0.01, betas=(0.9, 0.999))
    train(run, model, optimizers, name, steps, draw_batch, rate, check)

def learn_encoder(run):
    """Make the parts of an encoder's run that are not there: train on short numbers (--prime: and a
    few long ones), test; --finetune: then train on long ones, test again. Source: Jelassi,
    Secs. 2.2 and 5. Differs: 100 steps of warm-up; draws with replacement."""
    config = run.config
    seed_by_name(config.seed, "model")
    model = Encoder(config).to(run.device)
    first = "short numbers" if config.finetune else "model"
    fit_encoder(run, model, first, config.n_train, config.prime, config.steps)
    if config.finetune:
        if "before" not in run.parts:
            run.add("before", evaluate(model, config, encoder_questions, run.report))
        n = config.finetune
        fit_encoder(run, model, "model", n, n, config.retrain_steps)
    if "tests" not in run.parts:
        run.add("tests", evaluate(model, config, encoder_questions, run.report))

SYSTEMS["universal"] = System("encoder of one shared layer (Jelassi)", ENCODER_TASKS,
                              EncoderOptions, learn_encoder, Encoder)
SYSTEMS["encoder"] = SYSTEMS["universal"]._replace(about="encoder (Jelassi)")

# -----
# 10. Command line

def read_checkpoint(folder):
    """-> config, parts, training under way. Raises: BadInput; runs no code in the file."""
    path = Path(folder) / "checkpoint.pt"
    with kept_right(repr(str(folder))):
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise ValueError("it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        return Config(**state["config"]), dict(state["parts"]), dict(state["current"])

def load(folder):
    """Folder of a finished run -> model, config, parts. Raises: BadInput."""
    config, parts, _ = read_checkpoint(folder)
    if not parts.keys() >= {"model", "tests"}:
        raise BadInput(f"{str(folder)!r} is not finished; finish it by --from alone")
    return build(config, parts), config, parts

def wilson(correct, n, z=1.959964):
    """95% interval of a share (Wilson 1927)."""
    centre, half = correct + z * z / 2, z * math.sqrt(correct * (n - correct) / n + z * z / 4)
    return max(0.0, (centre - half) / (n + z * z)), min(1.0, (centre + half) / (n + z * z))

def percent(share):
    """Rounded down: 100 is all."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}%"

def make_record(run):
    """What a run came to, as plain values."""
    commit = ""
    if shutil.which("git"):
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True).stdout.decode(errors="replace").strip()
    machine = f"cpu, threads: {torch.get_num_threads()}"
    if run.device.type == "cuda":
        machine = torch.cuda.get_device_name(run.device)
    train = {}
    for name, part in run.parts.items():
        if "weights" in part:
            train[name] = {key: part[key] for key in ("steps", "seconds", "curve")}
    proof = dict(run.parts.get("proof", {}))
    lines = [Line(*line)._asdict() for line in proof.pop("lines", [])]
    return dict(config=run.config.given(), torch=torch.__version__, commit=commit, device=machine,
                train=train, lines=lines, proof=proof, before=run.parts.get("before"),
                tests=run.parts["tests"])

def table(tests):
    """Lines of text, a row a test."""
    yield "digits   exact  set        95% interval         n"
    for row in tests["rows"]:
        low, high = wilson(row["correct"], row["n"])
        yield (f"{row['digits']:>6}  {percent(row['correct'] / row['n']):>6}  {row['set']:<8} "
               f"{low:7.2%} - {high:7.2%}  {row['n']:8,}")

def summary(record):
    """The record as text."""
    config, proof, out = record["config"], record["proof"], []
    out.append(f"{config['task']}, {config.get('method', config['model'])}, seed {config['seed']}")
    for name, part in record["train"].items():
        out.append(f"{name:<9} {part['steps']:,} steps, {part['seconds']:.1f} s")
        if config["model"] == "seq2seq":
            out[-1] += f", {percent(part['curve'][-1][2])} of 1,000 held-out exact"
    for x in record["lines"]:
        direction = {1: "diagonal", 0: "vertical", -1: "anti-diagonal"}[x["direction"]]
        out.append(f"  layer {x['layer'] + 1} {x['attention']:<5} head {x['head'] + 1}: "
                   f"{direction}, block {x['block'] + 1}, offset {x['offset']}, "
                   f"bias {x['value']:.2f}, z {x['z']:.1f}")
    if proof and proof["proved"]:
        out.append(f"proof     exact at every length: right on all {proof['windows']:,} windows, "
                   f"by {proof['margin']:.1f} or more; kappa {proof['kappa']}")
    elif proof:
        out.append(f"proof     not proved: {proof['why']}; kappa {proof['kappa']}")
    if record["before"]:
        out += ["", "before fine-tuning", *table(record["before"])]
    out += [f"tests     {record['tests']['seconds']:.1f} s on {record['device']}", ""]
    return "\n".join([*out, *table(record["tests"])])

def whole_numbers(text):
    """"6,10,20" -> (6, 10, 20)"""
    return tuple(int(part) for part in text.split(","))

class Parser(argparse.ArgumentParser):
    """One whose errors are one line, like all bad input."""
    def error(self, message):
        raise BadInput(message.removeprefix("argument "))

def helps(options):
    """Name of each option -> its comment, in the first paragraph of its class in this file."""
    source, found = Path(__file__).read_text(encoding="utf-8"), {}
    for kind in reversed(type(options).__mro__[:-1]):
        fields = source.split(f"class {kind.__name__}")[1].partition("\n\n")[0]
        found |= re.findall(r"    (\w+): .*?  # (.*)", fields)
    return found

def parse(argv):
    """Arguments -> those given, as a dict. The options are those that have an effect on the task,
    model, method and preset asked for; their defaults are those of such a run."""
    first = Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for name in "task", "model", "method", "preset", "prime", "finetune":
        first.add_argument(flag(name), type=int if name in ("prime", "finetune") else str)
    config = Config(**vars(first.parse_known_args(argv)[0]))
    p = Parser(prog="lengen.py", allow_abbrev=False, argument_default=argparse.SUPPRESS,
               description="Length generalization in arithmetic transformers.")
    comments = helps(config)
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        how = dict(type=whole_numbers if field.type is tuple else field.type)
        if field.type is bool:
            how = dict(action="store_true")
        if field.type is tuple:
            value = ",".join(map(str, value))
        if name not in config.without_effect():
            p.add_argument(flag(name), **how, help=f"{comments[name]} ({value})")
    p.add_argument("--seeds", type=int, help="runs, from --seed on (1)")
    p.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda if there")
    p.add_argument("--out", help="new folder, by default in runs/")
    p.add_argument("--from", metavar="DIR", help="finish a run, test it at --lengths, --ask it")
    p.add_argument("--ask", nargs="+", help="123+748, of --from or of the newest finished run")
    p.add_argument("--json", action="store_true", help="print the record, JSON")
    p.add_argument("--quiet", action="store_true", help="no reports")
    p.add_argument("--list", action="store_true", help="print tasks, methods and models")
    return vars(p.parse_args(argv))

def pick_device(config, name=None):
    """"cpu", "cuda" or None -> torch.device; sets up threads and, under torchrun, processes."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device: cuda is not there")
    if processes()[1] > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if name == "cuda" else "gloo")
    if config.d_model <= 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads help little
    return torch.device(name, int(os.environ.get("LOCAL_RANK", 0)) if name == "cuda" else None)

def new_folder(config, options):
    """New, so that no two runs share one; for the first process alone."""
    if processes()[0]:
        return None
    method = getattr(config, "method", config.model)
    folder = Path(f"runs/{config.task}-{method}-seed{config.seed}-{time.time_ns()}")
    if "out" in options:
        folder = Path(options["out"], f"seed{config.seed}" if "seeds" in options else "")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"--out: {str(folder)!r} cannot be a new folder: {error.strerror}") from None
    return folder

def execute(run, options):
    """Make the parts of a run that are not there; print and keep what it came to."""
    first = processes()[0] == 0
    run.device = pick_device(run.config, options.get("device"))
    run.report = say if first and "quiet" not in options else silent
    run.report(f"{run.config.task}, seed {run.config.seed}, {run.device}, {run.folder or ''}")
    run.save()
    SYSTEMS[run.config.model].learn(run)
    if first:
        record = make_record(run)
        run.write("result.json", json.dumps(record).encode())
        print(json.dumps(record) if "json" in options else summary(record), flush=True)
        for name in {"teacher", "model"} & record["train"].keys():
            known = record["train"][name]["curve"][-1][2:]
            if run.config.model == "seq2seq" and known[0] < 0.99:
                say(f"lengen: the {name} has {percent(known[0])} of held-out right; raise --steps")

def go_on(options):
    """--from: finish a run, or test a finished one, whose folder stays as it is."""
    folder = options["from"]
    config, parts, current = read_checkpoint(folder)
    changes = {name: options[name] for name in ("lengths", "samples") if name in options}
    for name in ("tests", "before") if changes else ():
        parts.pop(name, None)
    kept = None if Path(folder, "result.json").exists() else folder
    execute(Run(dataclasses.replace(config, **changes), kept, parts, current), options)

def answer(options):
    """--ask: a line for each question."""
    finished = sorted(Path("runs").rglob("result.json"), key=os.path.getmtime)
    if "from" not in options and not finished:
        raise BadInput("--ask: no finished run under runs/")
    folder = options["from"] if "from" in options else finished[-1].parent
    model, config, _ = load(folder)
    if config.model != "seq2seq":
        raise BadInput(f"--ask: {config.model} models answer nothing")
    say(f"asking {folder}")
    for question in options["ask"]:
        print(ask(model, config, question.replace(" ", "")), flush=True)

def print_lists(options):
    """--list"""
    for name, system in SYSTEMS.items():
        print(f"--model {name}: {system.about}")
        for task, spec in system.tasks.items():
            print(f"  --task {task:<23} {getattr(spec, 'about', spec)}")
    for name, method in METHODS.items():
        print(f"--method {name:<14} {method.about}")

# Options with which a command does something else than train, and those that go with each.
MODES = {"list": (print_lists, ()), "ask": (answer, ("from",)),
         "from": (go_on, ("device", "json", "quiet", "lengths", "samples"))}

def run_command(options):
    """-> exit code"""
    for mode, (act, others) in MODES.items():
        if mode in options:
            for name in options:
                if name not in (mode, *others):
                    raise BadInput(f"{flag(name)}: not with --{mode}")
            act(options)
            return 0
    control = ("seeds", "device", "out", "json", "quiet")
    config = Config(**{name: x for name, x in options.items() if name not in control})
    seeds = range(config.seed, config.seed + options.get("seeds", 1))
    if not seeds:
        raise BadInput("--seeds: at least 1")
    configs = [dataclasses.replace(config, seed=seed) for seed in seeds]  # all are checked first
    pick_device(config, options.get("device"))
    code = 0
    for config in configs:
        try:
            execute(Run(config, new_folder(config, options)), options)
        except RunFailed as error:  # of this seed alone
            code = fail(error, 1)
    return code

def fail(error, code):
    """Say why -> the exit code."""
    say(f"lengen: {error}")
    return code

def main(argv=None):
    """-> exit code: 0 done, 1 a run failed, 2 bad input, 130 interrupted. Other errors are bugs."""
    try:
        return run_command(parse(argv))
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return fail("interrupted; go on by --from DIR", 130)
    except RunFailed as error:
        return fail(error, 1)
    except BadInput as error:
        return fail(error, 2)

if __name__ == "__main__":
    sys.exit(main())
