# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

A transformer trained on numbers of about 6 digits answers questions of 60 and of 1,000 digits
exactly, once attention may only look where it looked on short numbers. This file trains it, finds
those places (Attention Bias Calibration, ABC) and tests it, beside other methods.

    python lengen.py --task successor --method abc        # train, calibrate, retrain, test
    python lengen.py --task addition --method vanilla     # right at 6 digits, wrong at 10
    python lengen.py --ask 123+748                        # ask the newest finished run

Sections 1 to 7 are ABC; then 8 consecutive pairs, 9 encoders, 10 command line.

B batch, T queries, S keys, H heads, D head width, C = H * D model width, V vocabulary, W digits of
an operand; attention is m x n at training length, M x N at another. Lengths count digits.

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
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from itertools import accumulate, groupby
from pathlib import Path
from typing import Callable, NamedTuple
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F

INF = float("inf")

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
    return "".join(VOCAB[token] for token in tokens)

def carry(columns, base):
    """Column sums (B, W), least significant first -> digits (B, W). Negative columns borrow.
    Raises: ValueError when the last column carries or borrows."""
    digits, rest = [], torch.zeros_like(columns[:, 0])
    for column in columns.unbind(1):
        digits.append((column + rest) % base)
        rest = (column + rest) // base  # rounds down: -1 borrows
    if rest.any():
        raise ValueError(f"the answer does not fit the width {columns.shape[1]}")
    return torch.stack(digits, 1)

def product(a, b):
    """Digits a (B, W), b (B, K) -> the lowest column sums (B, W) of a * b."""
    W = a.shape[1]
    return sum(F.pad(a * digit[:, None], (k, 0))[:, :W] for k, digit in enumerate(b.unbind(1)))

class Task(NamedTuple):
    """A task is one entry of TASKS, and its sign a symbol of VOCAB; all else follows."""
    about: str
    columns: Callable  # operands (B, W) -> column sums; `carry` makes them the answer
    operands: tuple = ("number",)  # and maybe "number", "digit" or "short" (--second-digits)
    sign: str = ""  # stands before the second operand
    headroom: int = 1  # digits that answers may gain; 0: --ask shows the last alone
    base: int = None  # None: any from 2 to 10
    admit: Callable = None  # operands drawn -> operands that have an answer; None: all have
    recipe: tuple = (600, 300, 64, 6e-3)  # steps of training and retraining, batch, rate
    models: tuple = ("seq2seq",)  # kinds of models that learn it
    modular: bool = False  # encoders: the answer is a remainder of --modulus

TASKS = {
    "successor": Task("n + 1", lambda a: a + (torch.arange(a.shape[1]) == 0),
                      recipe=(350, 350, 32, 4e-3)),
    "addition": Task("a + b", lambda a, b: a + b, ("number", "number"), "+",
                     models=("seq2seq", "universal", "encoder")),
    "nx1": Task("a * b, b a single digit", product, ("number", "digit"), "*",
                recipe=(600, 450, 128, 8e-3)),
    "parity": Task("running xor of the bits, last bit first",
                   lambda a: a.cumsum(1) % 2, headroom=0, base=2, recipe=(300, 200, 32, 6e-3)),
    "parity-label": Task("parity in one digit, without the scratchpad",
                         lambda a: a.sum(1, keepdim=True) % 2, headroom=0, base=2),
}

def admitted(task, *operands):
    """Operands drawn -> operands of questions that have an answer."""
    admit = TASKS[task].admit
    return admit(*operands) if admit else operands

def pad(task, operands, width):
    """Operands, their numbers padded with zeros to `width` digits."""
    return [a if kind == "digit" else F.pad(a, (0, width - a.shape[1]))
            for a, kind in zip(operands, TASKS[task].operands)]

def arrange(task, operands, base=10, align=False):
    """Operand digits (B, W), (B, 1) -> source (B, S), target (B, T + 1) tokens.

    `$0123+0748&` has the most significant digit first, its answer `$1780&` the least, as carries
    run. align: interleaved, `$+00172438&`. Source: v1, Sec. 3.2; v2, App. D.1 and C.4 (align).
    """
    spec = TASKS[task]
    answer = carry(spec.columns(*operands), base)
    mark = lambda text: encode(text).expand(len(answer), -1)
    body = [a.flip(1) for a in operands]
    if align:
        body = [mark(spec.sign), torch.stack(torch.broadcast_tensors(*body), 2).flatten(1)]
    else:
        body.insert(1, mark(spec.sign))
    source = torch.cat([mark(START), *body, mark(END)], 1)
    return source, torch.cat([mark(START), answer, mark(END)], 1)

def example(task, *operands, width=None, base=10, align=False):
    """One worked example: example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&").
    By default wide enough for every answer. Raises: ValueError outside the task."""
    spec = TASKS.get(task)
    if not spec or "seq2seq" not in spec.models or not 2 <= base <= 10:
        raise ValueError(f"no task {task!r} in base {base}")
    base, width = spec.base or base, width or max(map(len, operands), default=0) + spec.headroom
    fits = [set(text) <= set(VOCAB[:base]) and 1 <= len(text) <= (1 if kind == "digit" else width)
            for text, kind in zip(operands, spec.operands)]
    if len(operands) != len(spec.operands) or not all(fits):
        raise ValueError(f"{operands} is no {' and '.join(spec.operands)} in base {base}")
    digits = pad(task, [encode(text).flip(0)[None] for text in operands], width)
    if not all(map(torch.equal, admitted(task, *digits), digits)):
        raise ValueError(f"{task} is {spec.about}")
    source, target = arrange(task, digits, base, align)
    return decode(source[0]), decode(target[0])

def to_digits(numbers, width, base):
    """(B,) integers >= 0 -> digits (B, width). Raises: ValueError."""
    return carry(F.pad(numbers[:, None], (0, width - 1)), base)

def n_digits(a):
    """Digits (B, W) -> how many, without zeros in front (B,), at least 1."""
    return (torch.arange(1, a.shape[1] + 1) * (a > 0)).amax(1).clamp(min=1)

def question_width(task, digits, base=10):
    """Width of numbers of so many digits with room for an answer; digits=0: of training numbers."""
    spec = TASKS[task]
    if digits:
        return digits + spec.headroom
    base = spec.base or base
    top = to_digits(torch.tensor([LIMIT - 1]), 24, base)
    top = top[:, :int(n_digits(top)) + spec.headroom]
    largest = [top if kind == "number" else top[:, :1] * 0 + base - 1 for kind in spec.operands]
    answer = carry(spec.columns(*largest), base)
    return int(max(n_digits(top), n_digits(answer)))

def split_numbers(seed):
    """-> (training, held-out) integers in order, parted 7 : 1. Source: v2, App. B. Differs: without
    2^20 itself, the one number of 21 bits; no other would fill the width of parity."""
    order = torch.randperm(LIMIT, generator=torch.Generator().manual_seed(seed))
    cut = len(order) * 7 // 8
    return order[:cut].sort().values, order[cut:].sort().values

def seed_by_name(*names):
    """Seed torch by name, such as (seed, "teacher", step), so that no draw depends on another."""
    torch.manual_seed(random.Random(repr(names)).getrandbits(63))

def draw(task, B, base, number):
    """Operands for B questions; number() draws digits (B, W), single digits are uniform."""
    return admitted(task, *[torch.randint(base, (B, 1)) if kind == "digit" else number()
                            for kind in TASKS[task].operands])

def distinct(draw_some, B):
    """Up to B distinct questions: draw_some() draws operands of B; 20 draws find all of few."""
    found = {}
    for _ in range(20):
        operands = draw_some()
        for question in torch.cat(operands, 1).tolist():
            found[tuple(question)] = True
        if len(found) >= B:
            break
    sizes = [a.shape[1] for a in operands]
    return torch.tensor(list(found)[:B]).split(sizes, 1)

def draw_test(task, length, samples, base):
    """Operands of `samples` distinct questions, or of all there are, whose numbers have exactly
    `length` digits. Source: v1, Sec. 3.3."""
    def number():
        digits = torch.randint(base, (samples, length))
        digits[:, -1] = torch.randint(1, base, (samples,))  # no zero in front
        return digits
    return distinct(lambda: draw(task, samples, base, number), samples)

def draw_hard(task, length, samples, base):
    """Operands of distinct questions that are rare among random ones. Digits come in runs, in the
    same places for all numbers: a run is all zeros, all of the highest digit or random; of a second
    number also the first's digits again, or what they lack of the highest. So carries run far,
    numbers are short, and numbers tie."""
    def some():
        often = length ** -torch.rand(samples, 1)  # of how many places one begins a run
        run = (torch.rand(samples, length) < often).cumsum(1)
        operands = []
        for kind in TASKS[task].operands:
            digits = torch.randint(base, (samples, length))
            if kind == "number":
                kinds = [digits * 0, digits * 0 + base - 1, digits]
                for first in operands[:1]:
                    kinds += [first, base - 1 - first]
                pick = torch.randint(len(kinds), (samples, length + 1)).gather(1, run)
                digits = torch.stack(kinds, 2).gather(2, pick[:, :, None])[:, :, 0]
            operands.append(digits[:, :1] if kind == "digit" else digits)
        return admitted(task, *operands)
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
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

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
    """A bias that is nearly everywhere -inf, without the matrix: query i may see only K keys."""
    columns: torch.Tensor  # (T, K)
    values: torch.Tensor  # (H, T, K), added to their scores

def masked_softmax(scores, bias):
    """softmax(scores + bias) over keys; 0, not nan, in a row whose keys are all closed."""
    bias = scores.new_zeros(1) if bias is None else bias.to(scores)
    closed = bias.isneginf().all(-1, keepdim=True)
    return (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0)

class MultiHeadAttention(nn.Module):
    """scores = (q k^T + relative) / sqrt(D) + bias; weights = softmax(scores); output = weights v.

    relative: "" none, "k" keys, "kq" keys and queries, at offsets -clip .. clip. rotate: function
    of q or k (B, H, T, D) and positions (T,), such as `rope`. Source: Vaswani et al. 2017,
    Sec. 3.2; bias: v2, App. C.4.
    """
    def __init__(self, d_model, n_head, relative="", clip=16, rotate=None, dropout=0.0,
                 d_head=None, d_out=None):
        super().__init__()
        self.n_head, self.d_head = n_head, d_head or d_model // n_head
        self.relative, self.rotate = relative, rotate
        self.q, self.k, self.v = (nn.Linear(d_model, n_head * self.d_head) for _ in range(3))
        self.out = nn.Linear(n_head * self.d_head, d_out or d_model)
        self.dropout = nn.Dropout(dropout)
        if relative:
            self.table = nn.Parameter(torch.randn(2 * clip + 1, self.d_head) / self.d_head ** 0.5)

    def forward(self, x, memory, bias=None):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) or OpenKeys -> output
        (B, T, C), weights (B, H, T, S), with OpenKeys (B, H, T, K); 0, not nan, in a row whose keys
        are all closed."""
        heads = lambda y: y.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2)
        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))  # (B, H, ., D)
        if isinstance(bias, OpenKeys):
            y, weights = self.attend_to_open_keys(q, k, v, bias)
            return self.out(y.transpose(1, 2).flatten(2)), weights
        if self.rotate:
            q, k = (self.rotate(y, torch.arange(y.shape[2])) for y in (q, k))
        scores = q @ k.transpose(2, 3)  # (B, H, T, S)
        if self.relative:
            both = k if self.relative == "kq" else None
            scores = scores + relative_scores(q, self.table, both, k.shape[2])
        scores = scores / math.sqrt(self.d_head)
        weights = masked_softmax(scores, bias)
        y = self.dropout(weights) @ v  # (B, H, T, D)
        return self.out(y.transpose(1, 2).flatten(2)), weights

    def attend_to_open_keys(self, q, k, v, bias):
        """The same where each row gathers its own keys; rows in pieces, which bounds the memory."""
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

class Method(NamedTuple):
    """A method is one entry of METHODS; it names functions, or learned modules.
    position: config -> function (side, T) -> (T, C), added to the embeddings of the "source" or
    "target". bias: config -> function (layer, kind, T, S) -> (1 or H, T, S), OpenKeys or None,
    added to the scores; kind is "encoder", "self" or "cross"."""
    about: str
    position: Callable = None
    bias: Callable = None
    rotate: Callable = None  # see MultiHeadAttention
    relative: str = ""  # relative table in every attention: "k" or "kq"
    lines: bool = False  # bias by place: decoders, at several widths
    align: bool = False  # the source interleaves its two operands
    calibrated: bool = False  # the bias comes from a model trained before

def sinusoids(config, period=None):
    """Sinusoids of the position, or modulo a period (v2, App. C.4; but sources from their end)."""
    @functools.lru_cache(maxsize=64)
    def at(side, T):
        index = torch.arange(T).flip(0) if period and side == "source" else torch.arange(T)
        return sinusoidal(index % (period or T), config.d_model)
    return at

class LearnedPositions(nn.Embedding):
    """A learned vector for each of 4,096 positions."""
    def __init__(self, config):
        super().__init__(4096, config.d_model)
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, side, T):
        return self.weight[:T]

def window(config, w=1):
    step = 2 if config.align else 1
    return lambda layer, kind, T, S: (
        None if kind == "encoder" else window_bias(w, T, S, kind == "cross", step))

def alibi(config, kinds=("encoder", "self", "cross")):
    return lambda layer, kind, T, S: alibi_bias(config.n_head, T, S) if kind in kinds else None

WINDOW = dict(bias=window, lines=True, align=True)
METHODS = {
    "vanilla": Method("sinusoids on the embeddings", sinusoids),
    "nope": Method("no positions (Kazemnejad et al. 2023)"),
    "ape": Method("learned positions on the embeddings (Gehring et al. 2017)", LearnedPositions),
    "alibi": Method("ALiBi, symmetric, in every attention", bias=alibi),
    "alibi-decoder": Method("sinusoids, ALiBi in the decoder's self-attention (code of v2)",
                            sinusoids, lambda config: alibi(config, ("self",))),
    "rope": Method("rotated queries and keys, every attention", rotate=rope),
    "rpe-k": Method("relative table for keys, every attention", relative="k"),
    "rpe-kq": Method("relative table for keys and queries", relative="kq"),
    "window": Method("sinusoids, windows in the decoder (v2, +w)", sinusoids, **WINDOW),
    "window-cyclic": Method("the same, position index modulo 3 (v2, +T)",
                            lambda config: sinusoids(config, period=3), **WINDOW),
    "window-nope": Method("windows in the decoder, no positions (v2, NoPE+w)", **WINDOW),
    "abc": Method("bias calibrated on a vanilla model, no positions", lines=True, calibrated=True),
}

MODELS = {"seq2seq": "encoder-decoder (ABC)", "universal": "encoder of one shared layer (Jelassi)",
          "encoder": "encoder (Jelassi)", "head": "one attention head (Pairs)"}
KINDS = ("seq2seq", "encoder", "head")
NO = "no effect"  # in place of a default: not an option of this kind
SIZES = {"small": (2, 64, 4), "base": (6, 512, 8), "standard": (6, 1024, 16),
         "large": (10, 1024, 16)}  # n_encoder, d_model, n_head
# v2, App. B and D, batch and steps on sums of the authors' code, retraining a tenth; Jelassi,
# Sec. 2.2, 15,000 epochs of 5,000 examples.
PAPER = {
    "seq2seq": dict(n_encoder=1, n_layer=6, n_head=8, d_model=128, dropout=0.3, optimizer="adam",
                    lr=1e-5, batch=512, steps=460_000, retrain_steps=46_000, rules="paper",
                    width=61, samples=10_000),
    "encoder": dict(size="standard", lr=1e-4, batch=32, steps=2_343_750, samples=10_000,
                    lengths=(5, 6, 10, 15, 20))}

def option(help, usual, low=1, high=10 ** 9, choices=None):
    """A field of Config; its checks, its place on the command line and its help come from it.
    usual: default of each of KINDS, or one of all; None where other options decide."""
    usual = dict(zip(KINDS, usual if type(usual) is tuple else (usual,) * 3))
    meta = dict(help=help, usual=usual, low=low, high=high, choices=choices)
    return dataclasses.field(default=None, metadata=meta)

def flag(name):
    return "--" + name.replace("_", "-")

@dataclasses.dataclass
class Config:
    """All that a run depends on; what is not given comes from preset, model and task, what has no
    effect is None. Raises: ValueError naming the option."""
    task: str = option("what to learn", "successor", choices=TASKS)
    model: str = option("by default the task's first", None, choices=MODELS)
    method: str = option("positions and attention", ("abc", "rpe-k", "nope"), choices=METHODS)
    preset: str = option("defaults, norms and embeddings", "fast", choices=("fast", "paper"))
    seed: int = option("of every random stream", 0, 0, 2 ** 32)
    precision: str = option("of products in training", "float32", choices=("float32", "bf16"))
    base: int = option("of the numbers", (10, NO, NO), 2, 10)
    size: str = option("of encoders", (NO, "small", NO), choices=SIZES)
    n_encoder: int = option("encoder layers or rounds", (0, None, NO), 0, 100)
    n_layer: int = option("decoder layers", (1, NO, NO), 1, 100)
    n_head: int = option("attention heads", (4, None, NO))
    d_model: int = option("width", (64, None, 128), 1, 8192)
    dropout: float = option("probability", (0.0, 0.1, NO), 0, 0.99)
    clip: int = option("relative offsets, -clip to clip", (16, None, NO))
    optimizer: str = option("of layers", ("muon", "adam", NO), choices=("muon", "adam"))
    lr: float = option("peak learning rate", (None, 1e-3, 1e-4), 1e-12, 10)
    batch: int = option("examples a step", (None, 64, 1000), 1, 10 ** 5)
    steps: int = option("of the first training", (None, 2000, 10_000))
    retrain_steps: int = option("of retraining or fine-tuning", (None, 1000, NO))
    rules: str = option("of calibration", ("robust", NO, NO), choices=("robust", "paper"))
    width: int = option("digits of every number", (None, None, NO), 1, 2000)
    lengths: tuple = option("digits tested", ((6, 10, 20, 60), (5, 6, 10), (5,)), 1, 10 ** 5)
    samples: int = option("questions a length; seq2seq above 100 a fifth",
                          (1000, 1000, 10_000), 1, 10 ** 6)
    # encoders, section 9
    train_digits: int = option("digits of training numbers, at most", (NO, 5, NO), 1, 18)
    second_digits: int = option("products: digits of the second operand", (NO, 3, NO), 1, 18)
    modulus: int = option("of modular tasks", (NO, 100, NO), 2)
    even: bool = option("train on each length equally often", (NO, False, NO))
    n_train: int = option("first operands to train on", (NO, 5000, NO), 1, 10 ** 7)
    prime: int = option("long ones among them, for priming", (NO, 0, NO), 0)
    prime_lengths: tuple = option("their digits (the longest tested)", (NO, None, NO), 1, 2000)
    finetune: int = option("long ones to train on afterwards", (NO, 0, NO), 0)
    # consecutive pairs, section 8
    d_vocab: int = option("integers", (NO, NO, 16), 4, 2 ** 16)
    d_head: int = option("width of queries and keys", (NO, NO, 32), 1, 8192)
    dummy: bool = option("a dummy token before each sequence", (NO, NO, False))
    plant: float = option("share of places that are made pairs", (NO, NO, 0.0), 0, 1)

    def __post_init__(self):
        _, *fields = dataclasses.fields(self)  # but for task
        self.task = self.task or "successor"
        if self.task not in TASKS:
            raise ValueError(f"--task: {self.task!r} is none of {', '.join(TASKS)}")
        spec = TASKS[self.task]
        self.model = self.model or spec.models[0]
        if self.model not in spec.models:
            raise ValueError(f"--model: {self.task} is learned by {', '.join(spec.models)}")
        self.kind = "encoder" if self.model == "universal" else self.model
        usual = {field.name: field.metadata["usual"][self.kind] for field in fields}
        if self.preset == "paper":
            if self.kind not in PAPER:
                raise ValueError(f"--preset: not for {self.model}")
            usual |= PAPER[self.kind]
        elif self.kind == "seq2seq":
            usual |= zip(("steps", "retrain_steps", "batch", "lr"), spec.recipe)
        usual["base"] = spec.base or usual["base"]
        if self.kind == "encoder":
            size = SIZES.get(self.size or usual["size"], ())
            usual |= zip(("n_encoder", "d_model", "n_head"), size)
        method = METHODS.get(self.method or usual["method"], METHODS["nope"])
        for name, used in (("clip", method.relative), ("rules", method.calibrated),
                           ("retrain_steps", method.calibrated or self.finetune),
                           ("modulus", spec.modular), ("second_digits", "short" in spec.operands)):
            usual[name] = usual[name] if used else NO
        for field in fields:
            name, meta, value = flag(field.name), field.metadata, getattr(self, field.name)
            low, high, choices = meta["low"], meta["high"], meta["choices"]
            numbers = value if field.type is tuple else (value,)
            if value is None:
                setattr(self, field.name, None if usual[field.name] == NO else usual[field.name])
            elif usual[field.name] == NO:
                raise ValueError(f"{name}: {NO} on {self.task}, {self.model}, {self.method}")
            elif choices and value not in choices:
                raise ValueError(f"{name}: {value!r} is none of {', '.join(choices)}")
            elif field.type not in (str, bool) and not all(low <= n <= high for n in numbers):
                raise ValueError(f"{name}: {value} is not between {low} and {high}")
        self.settle(spec, method)

    def settle(self, spec, method):
        """Values and checks that follow from several options."""
        decoder = method.lines or self.method == "alibi-decoder"
        if decoder and self.kind != "seq2seq" or self.kind == "head" and self.method != "nope":
            raise ValueError(f"--method: {self.method} does not go with --model {self.model}")
        self.align = method.align and len(spec.operands) == 2
        needed = 0
        if self.kind == "seq2seq":
            if self.base != (spec.base or self.base):
                raise ValueError(f"--base: {self.task} has {spec.base}")
            needed = question_width(self.task, 0, self.base)
            # At one width END always comes in the same row; nine teach that the source says where.
            first, last = (self.width or needed), (self.width or needed + 8 * method.lines)
            self.widths = range(first, last + 1)
        elif self.kind == "encoder":
            if self.prime or self.finetune:
                self.prime_lengths = self.prime_lengths or (max(self.lengths),)
            elif self.prime_lengths:
                raise ValueError("--prime-lengths: goes with --prime or --finetune")
            if self.prime > self.n_train:
                raise ValueError(f"--prime: {self.prime} of {self.n_train} examples")
            needed = max(*self.lengths, *self.prime_lengths or (), self.train_digits,
                         self.second_digits or 0, len(str((self.modulus or 1) - 1)))
            self.width = self.width or max(needed, 20)  # Jelassi's for sums
            self.clip = self.clip or (2 * self.width if method.relative else None)
        if self.width and self.width < needed:
            raise ValueError(f"--width: {self.width} is too narrow; {needed} digits are needed")
        if self.rules != "robust" and max(self.lengths) > 2000:
            raise ValueError("--lengths: above 2,000 digits only abc, robust")
        parts = (self.n_head or 1) * (2 if method.rotate else 1)  # RoPE rotates pairs
        if self.d_model % parts:
            raise ValueError(f"--n-head: --d-model {self.d_model} is no multiple of {parts}")

class Layer(nn.Module):
    """Self-attention, cross-attention, feed-forward; a norm before each ("paper": after each)."""
    def __init__(self, config, cross):
        super().__init__()
        C, method = config.d_model, METHODS[config.method]
        attention = lambda: MultiHeadAttention(C, config.n_head, method.relative, config.clip,
                                               method.rotate, config.dropout)
        self.self_attention = attention()
        self.cross_attention = attention() if cross else None
        activation = nn.ReLU() if config.kind == "seq2seq" else nn.GELU()
        self.feed_forward = nn.Sequential(nn.Linear(C, 4 * C), activation,
                                          nn.Dropout(config.dropout), nn.Linear(4 * C, C))
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(3 if cross else 2))
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.preset != "paper"

    def residual(self, i, x, sublayer):
        x = x + self.dropout(sublayer(self.norms[i](x) if self.pre else x))
        return x if self.pre else self.norms[i](x)

    def forward(self, x, self_bias=None, memory=None, cross_bias=None):
        x = self.residual(0, x, lambda y: self.self_attention(y, y, self_bias)[0])
        if self.cross_attention:
            x = self.residual(1, x, lambda y: self.cross_attention(y, memory, cross_bias)[0])
        return self.residual(-1, x, self.feed_forward)

class Transformer(nn.Module):
    """Encoder-decoder; bias (layer, kind, T, S): in place of the method's. Differs: embeddings have
    standard deviation 0.3, so that positions stand out; for "paper" the authors' 1.33."""
    def __init__(self, config, bias=None):
        super().__init__()
        self.config, method, C = config, METHODS[config.method], config.d_model
        paper = config.preset == "paper"
        self.embedding = nn.Embedding(len(VOCAB), C)
        nn.init.normal_(self.embedding.weight, std=1.33 if paper else 0.3)
        self.position = method.position and method.position(config)
        self.bias = bias or (method.bias and method.bias(config)) or (lambda *place: None)
        self.dropout = nn.Dropout(config.dropout)
        layers = [Layer(config, cross=False) for _ in range(config.n_encoder)]
        shared = layers[:1] * config.n_encoder
        self.encoder = nn.ModuleList(shared if config.model == "universal" else layers)
        self.decoder = nn.ModuleList(Layer(config, cross=True) for _ in range(config.n_layer or 0))
        self.norm = nn.Identity() if paper else nn.LayerNorm(C)
        self.head = nn.Linear(C, len(VOCAB))

    def embed(self, tokens, side):
        x = self.embedding(tokens)
        if self.position:
            x = x + self.position(side, tokens.shape[1]).to(x)
        return self.dropout(x)

    def read(self, source):
        memory, S = self.embed(source, "source"), source.shape[1]
        for n, layer in enumerate(self.encoder):
            memory = layer(memory, self.bias(n, "encoder", S, S))
        return memory

    def biases(self, T, S):
        """-> [(self (1 or H, T, T) with the causal mask, cross (1 or H, T, S) or None)], a pair a
        decoder layer; either may be OpenKeys, self without mask. Raises: ValueError on shapes."""
        pairs = []
        for n in range(len(self.decoder)):
            own, cross = self.bias(n, "self", T, T), self.bias(n, "cross", T, S)
            for kind, bias, keys in ("self", own, T), ("cross", cross, S):
                fits = [(1, T, keys), (self.config.n_head, T, keys)]
                if isinstance(bias, torch.Tensor) and bias.shape not in fits:
                    raise ValueError(f"{kind} bias of layer {n} is {[*bias.shape]}, not {fits}")
            if not isinstance(own, OpenKeys):
                mask = causal_bias(T).to(self.head.weight.device)
                own = mask if own is None else mask + own.to(mask)
            pairs.append((own, cross))
        return pairs

    def forward(self, source, target):
        """source (B, S), target (B, T) -> logits (B, T, V)."""
        memory, x = self.read(source), self.embed(target, "target")
        pairs = self.biases(target.shape[1], source.shape[1])
        for layer, (own, cross) in zip(self.decoder, pairs):
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
# Lines that stand out are kept, and continued at another size: block by block, since as numbers
# grow the first operand moves away from the end of the source. One block is the paper's.

class Line(NamedTuple):
    """An open line. offset: key - query along (1, 1), the column along (1, 0); along (1, -1) the
    column, counted from the right, minus the query. Columns count within the block."""
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
PAPER_KAPPA = {"cross": 4.5, "self": 0.87}  # v2, App. D

def lines_along(attention, direction):
    """Attention (H, m, n) -> [(offset, elements (H, length))] of every line in a direction."""
    _, m, n = attention.shape
    if direction == 0:
        return [(j, attention[:, :, j]) for j in range(n)]
    if direction == -1:
        attention = attention.flip(2)
    return [(offset, attention.diagonal(offset, 1, 2)) for offset in range(1 - m, n)]

def find_lines(attention, kappa, of_largest, support, directions=(1, 0, -1), blocks=None,
               markers=None):
    """The lines of attention (H, m, n) that stand out -> list of Line. Source: v1, Eqs. 1 and 2:

        dropoff:  d_l - d_max  if d_l > mu + kappa * sigma,  else -inf

    mu, sigma and d_max run over a head's lines of one direction. of_largest: kappa is a share of
    sqrt(n - 1), the largest z that one of n lines can have, so that it means the same for small
    matrices. support: share of the rows that a line must exceed, since the mean of a corner is high
    by chance. blocks: columns of each. markers (n,) bool: where a vertical may open. Differs: the
    printed `d_l - d_max > threshold` holds for no positive threshold; d_l, as in the authors' code.
    """
    m, n = attention.shape[1:]
    blocks, found = blocks or [n], []
    markers = torch.ones(n, dtype=torch.bool) if markers is None else markers
    for direction in directions:
        lines = []
        for b, part in enumerate(attention.split(blocks, 2)):
            for offset, elements in lines_along(part, direction):
                if elements.shape[1] > support * m:
                    lines.append((b, offset, elements.mean(1)))
        d = torch.stack([mean for _, _, mean in lines], 1)  # (H, L)
        mu, sigma = d.mean(1, keepdim=True), d.std(1, unbiased=False, keepdim=True)
        share = kappa * math.sqrt(len(lines) - 1) if of_largest else kappa
        stands_out = d > mu + share * sigma + 1e-5 * mu.abs()  # rounding
        value, z = d - d.amax(1, keepdim=True), (d - mu) / sigma
        for h, l in stands_out.nonzero().tolist():
            b, offset, _ = lines[l]
            if direction or markers.split(blocks)[b][offset]:
                found.append(Line(h, direction, b, offset, float(value[h, l]), float(z[h, l])))
    return found

def open_keys(lines, H, M, blocks):
    """Lines continued to M rows and blocks of these widths -> OpenKeys; its first key is column 0,
    closed unless a line runs there. Along (1, 1) this is a relative table, of scalars, that is -inf
    beyond the offsets seen. Source: v2, Eq. 1 (case distinction), App. E.1."""
    rows, starts = torch.arange(M), [0, *accumulate(blocks)]
    columns, values = [rows * 0], [torch.full((H, M), -INF)]
    place = lambda line: line[1:4]
    for (direction, b, offset), heads in groupby(sorted(lines, key=place), place):
        column = offset + abs(direction) * rows
        if direction == -1:
            column = blocks[b] - 1 - column
        inside = (column >= 0) & (column < blocks[b])
        value = torch.full((H, 1), -INF)
        for line in heads:
            value[line.head] = line.value
        columns.append((starts[b] + column) * inside)
        values.append(value.expand(H, M).masked_fill(~inside, -INF))
    columns, values = torch.stack(columns, 1), torch.stack(values, 2)  # (M, K)
    same = columns[:, :, None] == columns[:, None, :]  # of lines that cross in a key
    values = values[:, :, None].masked_fill(~same, -INF).amax(3)  # the first keeps the greatest
    return OpenKeys(columns, values.masked_fill(same.tril(-1).any(2), -INF))

def lay_out(keys, N):
    """OpenKeys -> the same as a dense bias (H, M, N)."""
    bias = torch.full((*keys.values.shape[:2], N), -INF)
    return bias.scatter_reduce(2, keys.columns.expand(len(bias), -1, -1), keys.values, "amax")

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

    rules: "robust", for small matrices, too, or "paper", v1's Eqs. 1 and 2, v2's kappa for cross-
    attention; `changes` replace single ones of RULES, and `directions`. blocks: [(columns now,
    then)], by default [(n, N)]. mask: `causal_bias(M)` for self-attention. Raises: ValueError.
    """
    rule = RULES[rules] | changes
    now, then = map(list, zip(*(blocks or [(attention.shape[-1], N)])))
    if attention.dim() != 3 or not attention.isfinite().all():
        raise ValueError(f"attention is (H, m, n) and finite. Got {attention.shape}.")
    if (sum(now), sum(then)) != (attention.shape[2], N):
        raise ValueError(f"blocks add up to {attention.shape[2]} and {N}. Got {blocks}.")
    lines = find_lines(attention.cpu(), blocks=now, markers=markers, **rule)
    bias = lay_out(open_keys(lines, len(attention), M, then), N) + mask
    return (fill_empty(bias, rules) + mask).to(attention)

@torch.no_grad()
def collect_attention(model, source, target, batch=250):
    """Attention averaged over examples that the model answers correctly: source (B, S), target
    (B, T + 1) -> self (n_layer, H, T, T), cross (n_layer, H, T, S). Source: v1, Sec. 5; v2, App. D.
    Differs: weights, not scores (authors' code). Raises: RuntimeError."""
    seen, totals, correct = [], [], 0
    watch = lambda module, inputs, outputs: seen.append(outputs[1])  # (B, H, T, S)
    model.eval()
    with contextlib.ExitStack() as hooks:
        for layer in model.decoder:
            for attention in layer.self_attention, layer.cross_attention:
                hooks.enter_context(attention.register_forward_hook(watch))
        for s, t in zip(source.split(batch), target.split(batch)):
            seen.clear()
            right = (model(s, t[:, :-1]).argmax(-1) == t[:, 1:]).all(1)
            totals.append([weights[right].sum(0) for weights in seen])  # self, cross, self, ...
            correct += int(right.sum())
    if not correct:
        raise RuntimeError("the model answers no example correctly; raise --steps")
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

    Rules "paper": one block, all directions, the last layer's lines for all layers, the paper's
    kappas. Else a block an operand, each layer its own lines, (1, 1) alone in self-attention, in
    cross-attention these directions. Of a fixed width only the rows that training fills (authors'
    code: the first 6). Source: v2, App. D, step 2.
    """
    for attention in self_attention, cross_attention:
        if attention.shape[:2] != (config.n_layer, config.n_head) or not attention.isfinite().all():
            raise ValueError("the averaged attention is not this model's")
    rows = question_width(config.task, 0, config.base) + 1
    maps = {"self": self_attention[..., :rows, :rows], "cross": cross_attention[..., :rows, :]}
    found = []
    for layer in range(config.n_layer) if config.rules == "robust" else [config.n_layer - 1]:
        for name, attention in maps.items():
            rule = dict(RULES[config.rules])
            if config.rules == "paper":
                rule |= dict(kappa=PAPER_KAPPA[name])
            else:
                rule |= dict(kappa=kappa or rule["kappa"], directions=(1,))
            if config.rules == "robust" and name == "cross":
                blocks, markers = column_blocks(config.task, attention.shape[3])
                rule |= dict(directions=directions, blocks=blocks, markers=markers)
            for line in find_lines(attention[layer].cpu(), **rule):
                found.append(line._replace(layer=layer, attention=name))
    return found

def keys_of_run(config, lines, layer, kind, T, S):
    """OpenKeys of one attention of a run, by the robust rules; a row without any sees column 0."""
    chosen = [line for line in lines if (line.attention, line.layer) == (kind, layer)]
    blocks = column_blocks(config.task, S)[0] if kind == "cross" else [T]
    columns, values = open_keys(chosen, config.n_head, T, blocks)
    if kind == "self":
        values = values.masked_fill(columns > torch.arange(T)[:, None], -INF)
    return OpenKeys(columns, fill_empty(values, "robust"))  # the first key is column 0

def calibrated_bias(config, lines):
    """Lines -> a bias function (v2, Eq. 2); by the robust rules OpenKeys beyond 100 rows."""
    @functools.lru_cache(maxsize=64)
    def bias(layer, kind, T, S):
        if kind == "encoder":
            return None
        if config.rules == "robust":
            keys = keys_of_run(config, lines, layer, kind, T, S)
            return keys if T > 100 else lay_out(keys, S)
        chosen = [line for line in lines if line.attention == kind]
        keys = open_keys(chosen, config.n_head, T, [S])
        future = causal_bias(T) if kind == "self" else 0.0
        return fill_empty(lay_out(keys, S) + future, "paper")
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
# at the places where they look, and a token before them that tells what was carried there.
# A carry is made by the digits below. It takes all its values where the place below takes every
# digit (of two numbers: 0 or the highest) and all further places are 0 or all are the highest, as
# nearer and further carries are alike. So short questions, enumerated, show all windows there are.
#
# Induction: if the tokens before row t are right, row t sees one of these windows; if the model is
# right on each of them, so is row t. Then greedy decoding is right for every question. The order of
# sums differs at other widths: logits by about 1e-5, so the right token must lead by MARGIN.
#
# That far places matter by what is carried alone is true of these tasks, not of every task that
# one may write. So random and hard questions must not show a window that was not enumerated: short
# ones before anything is trained, long ones (`unseen`) before a model is called proved.

MARGIN = 0.5  # logits by which the right token must lead
TOO_MANY = 2 ** 21  # questions for one row
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
        columns, values = keys_of_run(config, lines, 0, kind, T, N)
        level = torch.searchsorted(levels, values[:, rows].contiguous())  # (H, R, K); 0: closed
        code = tokens[:, None, columns[rows]] * len(levels) + level  # (B, H, R, K)
        code = code.masked_fill(level == 0, 0).sort(3).values
        parts.append(code.transpose(1, 2).flatten(2))
    return torch.cat(parts, 2)

def first_of_each(rows):
    """Rows (N, L) of integers >= 0 -> for each row the index of the first row equal to it (N,)."""
    number = torch.zeros(len(rows), dtype=torch.int64)  # of a row so far, among the distinct ones
    for column in rows.unbind(1):
        _, number = (number * (int(column.max()) + 1) + column).unique(return_inverse=True)
    index = torch.arange(len(rows))
    first = index.new_full((len(rows),), len(rows)).scatter_reduce(0, number, index, "amin")
    return first[number]

def draw_questions(config, draw_some, length, samples):
    """Questions of a task by `draw_test` or `draw_hard` -> source (B, S), target (B, T + 1)."""
    operands = draw_some(config.task, length, samples, config.base)
    width = max(config.widths[0], question_width(config.task, length, config.base))
    return arrange(config.task, pad(config.task, operands, width), config.base, config.align)

class Windows:
    """Distinct windows that rows have through some lines, and questions that show them.

    questions: list of (source, target). codes (N, L): see `seen`. same: two questions that look the
    same to a row and differ there; "" where none do, so that the lines decide the answer."""
    def __init__(self, config, lines):
        self.config, self.lines, self.same = config, lines, ""
        self.questions, self.codes, self.wanted = [], None, None

    def add(self, source, target, rows):
        """Keep what rows [R] see of these questions, if it is new -> sources that show new ones."""
        codes = seen(self.config, self.lines, source, target, rows).flatten(0, 1)
        wanted = target[:, 1:][:, rows].flatten()
        known = 0 if self.codes is None else len(self.codes)
        if known:
            codes, wanted = torch.cat([self.codes, codes]), torch.cat([self.wanted, wanted])
        first = first_of_each(codes)
        new = first == torch.arange(len(first))
        shown = new[known:].view(-1, len(rows)).any(1)
        clash = (wanted != wanted[first]).nonzero().flatten().tolist()
        if clash:
            code, pair = codes[clash[0]], wanted[[int(first[clash[0]]), clash[0]]]
            one, other = (self.question(code, want, (source, target)) for want in pair)
            self.same = (f"{one} and {other} look the same to a row that must write "
                         f"{' or '.join(decode(pair))}")
        self.codes, self.wanted = codes[new], wanted[new]
        if shown.any():
            self.questions.append((source[shown], target[shown]))
        return source[shown]

    def question(self, code, want, *more):
        """A question that shows the window of this code where this token must follow."""
        for source, target in [*self.questions, *more]:
            rows = list(range(target.shape[1] - 1))
            match = (seen(self.config, self.lines, source, target, rows) == code).all(2)
            match = (match & (target[:, 1:] == want)).any(1)
            if match.any():
                return as_asked(self.config.task, source[match][0])

def open_columns(config, lines, row, T, S):
    """-> columns of the target and of the source that are open to a row in some head."""
    found = []
    for kind, N in ("self", T), ("cross", S):
        columns, values = keys_of_run(config, lines, 0, kind, T, N)
        found.append(columns[row][values[:, row].isfinite().any(0)].unique().tolist())
    return found

def places_of(task, own, cross, row, width, leftward):
    """Places of the numbers that a row sees, or that make a token which it sees or writes."""
    places = set()
    for token in {row, row - 1} | {column - 1 for column in own}:  # column 0 is START
        places.add(width - 1 - token if leftward else token)
    numbers = TASKS[task].operands.count("number")
    for column in cross:
        if column < numbers * (width + 1):  # each number stands behind a marker
            places.add(width - column % (width + 1))
    return places & set(range(width))

def all_questions(config, places, width, both_sides):
    """Operands, in pieces, of the questions that show a row that sees these places all its windows:
    see the head of this section. both_sides: what is carried may come from above, too. Raises:
    OverflowError."""
    spec, base = TASKS[config.task], config.base
    digits, extremes = torch.arange(base), torch.tensor([0, base - 1])
    zero, further = torch.tensor([0]), torch.tensor([-1])
    near = {place - 1 for place in places}
    if both_sides:
        near |= {place + 1 for place in places}
    near_choice = digits if spec.operands.count("number") == 1 else extremes
    sizes, choices = [], [extremes]  # the first choice is the digit that stands for -1
    for kind in spec.operands:
        sizes.append(1 if kind == "digit" else width)
        for place in range(sizes[-1]):
            if kind == "digit":
                choices.append(digits)
            elif place >= width - spec.headroom:
                choices.append(zero)
            elif place in places:
                choices.append(digits)
            elif place in near:
                choices.append(near_choice)
            else:
                choices.append(further)
    total = math.prod(len(choice) for choice in choices)
    if total > TOO_MANY:
        raise OverflowError(f"{total:,} questions for a row are too many to enumerate")
    for index in torch.arange(total).split(2 ** 18):
        columns = []
        for choice in choices:
            columns.append(choice[index % len(choice)])
            index = index // len(choice)
        rest, table = columns[0][:, None], torch.stack(columns[1:], 1)
        yield admitted(config.task, *torch.where(table < 0, rest, table).split(sizes, 1))

def enumerate_windows(config, lines):
    """All windows that rows can have through these lines -> Windows; ends where two clash. Raises:
    OverflowError where they are too many, or the task has others."""
    spec = TASKS[config.task]
    leftward = any(line.direction == 1 and line.attention == "cross" for line in lines)
    both_sides = leftward or spec.admit is not None
    offsets = {-1, 0}  # of places that a row looks at, from the place that it writes
    for line in lines:
        if line.attention == "self" or leftward:
            offsets.add(line.offset - 1)
        elif line.direction:
            offsets.add(line.offset)
    # At this width a row between sees neither end, with room for carries on either side; windows
    # of greater widths are the same ones. The run's narrower widths are enumerated themselves.
    enough = max(offsets) - min(offsets) + 4 + spec.headroom
    narrowest = config.widths[0]
    windows = Windows(config, lines)
    for width in range(narrowest, max(narrowest, enough) + 1):
        source, target = draw_questions(config, draw_test, width - spec.headroom, 1)
        T, S = target.shape[1] - 1, source.shape[1]
        for row in sorted({*range(min(enough, T)), *range(max(0, T - enough), T)}):
            own, cross = open_columns(config, lines, row, T, S)
            places = places_of(config.task, own, cross, row, width, leftward)
            for operands in all_questions(config, places, width, both_sides):
                source, target = arrange(config.task, operands, config.base)
                looks = [target[:, own], source[:, cross], target[:, row:row + 2]]
                differ = first_of_each(torch.cat(looks, 1)).unique()  # few do
                windows.add(source[differ], target[differ], [row])
                if windows.same:
                    return windows
    odd = unseen(windows, narrowest - spec.headroom)
    if odd and not windows.same:
        raise OverflowError(f"{odd} shows a row what was not enumerated")
    return windows

def unseen(windows, *lengths):
    """A random or hard question of such a length that shows a new window, or "". A task whose far
    digits matter by more than a carry has one."""
    config, odd = windows.config, ""
    seed_by_name(config.seed, "unseen")
    for length in lengths:
        for draw_some in draw_test, draw_hard:
            source, target = draw_questions(config, draw_some, length, 200)
            for question in windows.add(source, target, list(range(target.shape[1] - 1))):
                odd = odd or as_asked(config.task, question)
    return odd

def as_asked(task, source):
    """Source (S,) -> the question as `ask` takes it, 123+748."""
    spec, text = TASKS[task], decode(source)[1:-1]
    parts = []
    for kind, part in zip(spec.operands, text.split(spec.sign or None)):
        parts.append(part if kind == "digit" else part[spec.headroom:])
    return spec.sign.join(parts)

@torch.no_grad()
def prove(model, windows, enough=MARGIN):
    """Is the model right on all windows? -> the smallest lead of a right token over all others, in
    logits, and the questions whose answers are wrong. Ends at the first lead below `enough`."""
    model.eval()
    device = next(model.parameters()).device
    margin, wrong = INF, []
    for sources, targets in windows.questions:
        for source, target in zip(sources.split(1000), targets.split(1000)):
            logits = model(source.to(device), target[:, :-1].to(device)).cpu()  # (B, T, V)
            want = target[:, 1:, None]
            others = logits.scatter(2, want, -INF).amax(2)
            lead = logits.gather(2, want)[:, :, 0] - others  # (B, T)
            margin = min(margin, float(lead.min()))
            for question in source[(lead <= 0).any(1)]:
                wrong.append(as_asked(model.config.task, question))
            if margin < enough:
                return margin, wrong
    return margin, wrong

def not_provable(config):
    """Why nothing can be proved of such a model, or ""."""
    if config.rules != "robust":
        return "the paper's rules open whole rows"
    if config.n_encoder or config.n_layer > 1:
        return "only one decoder layer without an encoder sees finitely much"
    return ""

def deciding_lines(config, attention):
    """Lines that decide the answer: two rows that look the same need the same token. For each
    kappa from high to low, directions in turn -> (kappa, lines, Windows, ""); where windows cannot
    be enumerated the last two are None and why. Raises: RuntimeError where none decide."""
    why = not_provable(config)
    if why:
        kappa = RULES[config.rules]["kappa"]
        yield kappa, calibrate(config, *attention), None, why
        return
    same, not_counted = "", None
    for directions in DIRECTIONS:
        before, decided = None, False
        for kappa in KAPPAS:
            lines = calibrate(config, *attention, kappa, directions)
            opened = sorted((line.attention, *line[:4]) for line in lines)
            if opened == before:
                continue
            before = opened
            try:
                windows = enumerate_windows(config, lines)
            except OverflowError as error:  # at lower kappas there are more
                not_counted = not_counted or (kappa, lines, None, str(error))
                break
            if windows.same:
                same = same or windows.same
            else:
                decided = True
                yield kappa, lines, windows, ""
        if decided:
            return
    if not_counted:
        yield not_counted
        return
    raise RuntimeError(f"no lines decide the answer: {same}")

# -----
# 7. Training and evaluation
# A run is a row of named parts: trained weights, averaged attention, tests. Each is kept when
# done; to resume or to load a run is to run it with these parts there.

SECONDS = 3  # between reports, and saves, of a training
silent = lambda text: None
rank0 = lambda: os.environ.get("RANK", "0") == "0"  # process under torchrun

def say(text):
    """To standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr or io.StringIO(), flush=True)

@contextlib.contextmanager
def refused(text, errors=Exception):
    """Errors in here are bad input: ValueError, the text and why."""
    try:
        yield
    except errors as error:
        why = getattr(error, "strerror", None) or str(error) or repr(error)
        raise ValueError(f"{text}: {' '.join(why.split())[:300]}") from None

class Keep:
    """Parts of a run by name, and the training under way; in checkpoint.pt if there is a folder."""
    def __init__(self, config, folder=None, parts=None, current=None):
        self.config, self.folder = config, Path(folder) if folder and rank0() else None
        self.parts, self.current = parts or {}, current or {}

    def part(self, name, make):
        """The part of this name; made and kept if it is not there."""
        if name not in self.parts:
            self.parts[name] = make()
            self.save()
        return self.parts[name]

    def save(self):
        buffer = io.BytesIO()
        torch.save(dict(config=dataclasses.asdict(self.config), parts=self.parts,
                        current=self.current), buffer)
        self.write("checkpoint.pt", buffer.getvalue())

    def write(self, name, data):
        """Beside, then moved into place: never half-written. On a full disk the run goes on."""
        beside = self.folder and self.folder / f"{name}.part"
        try:
            if beside:
                beside.write_bytes(data)
                beside.replace(self.folder / name)
        except OSError as error:
            say(f"lengen: {self.folder / name} cannot be written: {error.strerror}")
            with contextlib.suppress(OSError):
                beside.unlink()

def read_checkpoint(folder):
    """-> config, parts, training under way. Raises: ValueError; runs no code in the file."""
    path = Path(folder) / "checkpoint.pt"
    with refused(f"{str(folder)!r} holds no readable run"):
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise ValueError("it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        return Config(**state["config"]), dict(state["parts"]), dict(state["current"])

def make_optimizers(model, config):
    """Muon for matrices of layers, Adam at a quarter of its rate for all else; or Adam alone."""
    muon, rest = [], []
    for name, weight in model.named_parameters():
        inside = name.startswith(("encoder", "decoder")) and weight.dim() == 2
        fast = inside and "table" not in name and config.optimizer == "muon"
        (muon if fast else rest).append(weight)
    betas = (0.9, 0.98) if config.kind == "seq2seq" else (0.9, 0.999)
    adam = torch.optim.AdamW(rest, config.lr / 4 if muon else config.lr, betas, fused=True,
                             weight_decay=0.01 if config.kind == "encoder" else 0.0)
    if not muon:
        return [adam]
    return [adam, torch.optim.Muon(muon, config.lr, 0.0, adjust_lr_fn="match_rms_adamw")]

def take_step(model, optimizers, source, target, share=1.0, precision="float32"):
    """One step at a share of the peak rate -> the loss, cross-entropy of target (B, T + 1), each
    token given those before it. Differs: gradients are clipped at norm 1."""
    model.train()
    with torch.autocast(source.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * share
        # torch's Muon has bfloat16, slow on a CPU
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
            optimizer.step()
        optimizer.zero_grad()
    return loss.detach()

def train(model, batch, steps, rate, name, keep, report, check=lambda model: [],
          done=lambda model: False):
    """Train on from where `keep` is; keep the part {"weights", "steps", "seconds", "curve"}.
    batch(share of steps) draws source (B, S), target (B, T + 1). rate(step, steps): share of the
    peak. curve: [step, loss, *check(model)] every 100 steps. done: asked every 25 steps, from 50
    on, whether to stop. Raises: RuntimeError."""
    device = next(model.parameters()).device
    number, count = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun
    now, saved = dict(step=0, seconds=0.0, curve=[]), keep.current
    with refused("what is kept of the run does not fit"):
        if name in keep.parts:
            return model.load_state_dict(keep.parts[name]["weights"])
        optimizers = make_optimizers(model, keep.config)
        if saved.get("name") == name:
            model.load_state_dict(saved["model"])
            for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            now = {key: saved[key] for key in now}
            if not 0 < now["step"] < steps:
                raise ValueError(f"step {now['step']} of {steps}")
    parallel = nn.parallel.DistributedDataParallel(model) if count > 1 else model
    told = time.perf_counter()
    start = told - now["seconds"]
    for step in range(now["step"] + 1, steps + 1):
        seed_by_name(keep.config.seed, name, step)
        source, target = (x[number::count].to(device) for x in batch(step / steps))
        loss = take_step(parallel, optimizers, source, target, rate(step, steps),
                         keep.config.precision)
        last = step % 25 == 0 and step >= 50 and done(model) or step == steps
        if step % 100 == 0 or last:
            now["curve"].append([step, loss.item(), *check(model)])
        if time.perf_counter() - told > SECONDS or last:  # here a GPU is waited for
            told = time.perf_counter()
            now |= dict(step=step, seconds=round(told - start, 2))
            if not loss.isfinite():
                raise RuntimeError(f"the loss is {loss.item()} at step {step} of {name}")
            report(f"{name}: step {step:,} of {steps:,}, loss {loss:.4f}, {now['seconds']:.0f} s")
            if last:
                break
            keep.current = dict(now, name=name, model=model.state_dict(),
                                optimizers=[x.state_dict() for x in optimizers])
            keep.save()
            told = time.perf_counter()  # saving takes time
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    keep.current = {}
    keep.part(name, lambda: dict(weights=weights, steps=now.pop("step"), **now))

@torch.no_grad()
def right_tokens(model, source, target):
    """source (B, S), target (B, T + 1) -> (B, T) bool on the CPU: is each token the most likely one
    after those before it? If all are, and only then, greedy decoding writes the target."""
    model.eval()
    device = next(model.parameters()).device
    chunk = max(1, 2 ** 12 // target.shape[1])  # rows that stay in a cache
    return torch.cat([model(s.to(device), t[:, :-1].to(device)).argmax(-1).cpu() == t[:, 1:]
                      for s, t in zip(source.split(chunk), target.split(chunk))])

def questions(config, length):
    """-> {"random": (source, target)}; at the longest length up to 60 also "hard" ones."""
    samples = config.samples if length <= 100 else -(-config.samples // 5)
    sets = {"random": draw_questions(config, draw_test, length, samples)}
    if length == max((n for n in config.lengths if n <= 60), default=0):
        sets["hard"] = draw_questions(config, draw_hard, length, samples)
    return sets

def evaluate(model, config, questions=questions, report=silent):
    """Test at config.lengths -> {"rows", "seconds"}; "places" is the share right of each digit."""
    rows, start = [], time.perf_counter()
    for length in sorted(set(config.lengths)):
        report(f"test of {length} digits")
        seed_by_name(config.seed, "test", length)
        for name, (source, target) in questions(config, length).items():
            right, shown = right_tokens(model, source, target), (target[:, 1:] < 10).any(0)
            places = right[:, shown].float().mean(0).tolist()  # without END and padding
            rows.append(dict(digits=length, set=name, correct=int(right.all(1).sum()),
                             n=len(right), places=[round(x, 4) for x in places]))
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

def ask(model, config, question):
    """A question, such as "123+748" -> the answer, "871"; without headroom, as of parity, its last
    digit. Raises: ValueError outside the task."""
    spec = TASKS[config.task]
    operands = question.split(spec.sign or None)
    with refused(f"{question!r} is no question of {config.task}, {spec.about}"):
        width = question_width(config.task, max(map(len, operands), default=0), config.base)
        source, target = example(config.task, *operands, base=config.base, align=config.align,
                                 width=max(config.widths[0], width))
    source = encode(source)[None].to(next(model.parameters()).device)
    text = decode(generate(model, source, len(target) - 1)[0])[1:]
    digits = text.partition(END)[0]
    if END not in text or not digits or not set(digits) <= set(VOCAB[:config.base]):
        return f"no number; the model wrote {text!r}"
    return digits[-1] if spec.headroom == 0 else digits[::-1].lstrip("0") or "0"

def training_batch(config, numbers, B, power=1.0):
    """B questions on some of these numbers, at one of the run's widths -> source, target. power:
    above 1 the first, the short ones, come more often."""
    width = config.widths[int(torch.randint(len(config.widths), (1,)))]
    pick = lambda: (len(numbers) * torch.rand(B) ** power).long()
    number = lambda: to_digits(numbers[pick()], width, config.base)
    operands = draw(config.task, B, config.base, number)
    return arrange(config.task, operands, config.base, config.align)

class Run(NamedTuple):
    model: nn.Module
    tests: dict  # as `evaluate` returns them
    teacher: nn.Module = None  # calibrated methods: the vanilla model looked at,
    attention: tuple = ()  # its averaged self- and cross-attention,
    lines: tuple = ()  # what was calibrated from it,
    proof: dict = None  # and whether the model is proved exact: see `retrain`

def learn(config, device, keep, report):
    """Train and test an encoder-decoder -> Run. ABC has three stages: a vanilla model learns the
    training numbers, its averaged attention is calibrated, and a model without positions is trained
    with the bias. Source: v1, Sec. 5; v2, App. D. Differs: short numbers come first in the first
    training (not in preset "paper"); Muon's rate falls to zero over its last 0.4, or all of
    retraining; see `retrain`. Raises: RuntimeError."""
    pool, held_out = split_numbers(config.seed)

    def stage(name, config, steps, bias=None, weights=None, done=lambda model: False):
        seed_by_name(config.seed, name)
        model = Transformer(config, bias).to(device)
        if weights:
            model.load_state_dict(weights)
        tokens = lambda model: right_tokens(model, *training_batch(config, held_out, 1000))
        check = lambda model: [float(tokens(model).all(1).float().mean())]
        power = lambda share: 6 - 5 * share if bias is None and config.preset == "fast" else 1
        batch = lambda share: training_batch(config, pool, config.batch, power(share))
        falling = 0.4 if bias is None else 1.0
        rate = lambda step, steps: 1.0 if config.optimizer == "adam" else min(
            1.0, step / 30, (steps - step + 1) / (falling * steps))
        train(model, batch, steps, rate, name, keep, report, check, done)
        return model

    def average():
        seed_by_name(config.seed, "attention")
        examples = training_batch(teacher.config, pool, 1000)
        return collect_attention(teacher, *(x.to(device) for x in examples))

    def retrain():
        """-> {"proved", "why" not, "kappa", "attempt", "windows", "margin", "lines"}: models are
        trained until one is proved exact. The lines are those of the first kappa that decide the
        answer. Training goes on from the teacher's weights; if that leads to no proof, which it may
        for a head that is set on something else, anew with twice the steps, as in the paper; then
        with the lines of the next kappa. What cannot be proved is trained once to the end (rules
        "paper": anew)."""
        attempt = 0
        for kappa, lines, windows, why in itertools.islice(deciding_lines(config, attention), 2):
            bias = calibrated_bias(config, lines)
            for weights in (teacher.state_dict(), None):
                if config.rules == "paper" and weights:
                    continue
                attempt += 1
                name, looks = f"attempt {attempt}", []

                def proved(model):
                    looks.append(windows and prove(model, windows))
                    return windows and looks[-1][0] >= MARGIN

                steps = config.retrain_steps * (2 if windows and weights is None else 1)
                model = stage(name, config, steps, bias, weights, proved)
                proof = dict(proved=False, why=why, kappa=kappa, attempt=attempt,
                             lines=[tuple(line) for line in lines])
                if windows:
                    if looks and looks[-1][0] >= MARGIN:
                        margin, wrong = looks[-1]
                    else:
                        margin, wrong = prove(model, windows, enough=-INF)
                    proof |= dict(windows=len(windows.codes), margin=margin)
                    odd = unseen(windows, 8, 60)
                    if wrong:
                        proof["why"] = f"{len(wrong)} questions are wrong, such as {wrong[0]}"
                    elif margin < MARGIN:
                        proof["why"] = f"a right token leads by {margin:.2f}, not by {MARGIN}"
                    elif odd:
                        proof["why"] = f"{odd} shows a row what was not enumerated"
                    else:
                        proof["proved"] = True
                if proof["proved"] or not windows or margin >= MARGIN:
                    keep.parts["model"] = keep.parts.pop(name)
                    return proof
        keep.parts["model"] = keep.parts.pop(name)
        return proof

    tests = lambda: evaluate(model, config, report=report)
    if not METHODS[config.method].calibrated:
        model = stage("model", config, config.steps)
        return Run(model, keep.part("tests", tests))
    plain = dataclasses.replace(config, method="vanilla", rules=None, retrain_steps=None,
                                lengths=(6,))  # not tested
    teacher = stage("teacher", plain, config.steps)
    attention = keep.part("attention", average)
    proof = keep.part("proof", retrain)
    lines = [Line(*line) for line in proof["lines"]]
    model = Transformer(config, calibrated_bias(config, lines)).to(device)
    model.load_state_dict(keep.parts["model"]["weights"])
    proof = {name: x for name, x in proof.items() if name != "lines"}
    return Run(model, keep.part("tests", tests), teacher, attention, lines, proof)

# -----
# 8. Consecutive pairs: one attention head, read completely
# Source: Pairs. Tokens are integers 0 .. V - 1; a token's label is 1 where the sequence also
# holds its value - 1 or + 1. One layer and head, no feed-forward; and no positions, norm or
# residual, of which the source says nothing.

TASKS["consecutive"] = Task("is a neighbour of this integer there?", None, models=("head",))

def draw_pairs(B, length, d_vocab, plant=0.0, dummy=False):
    """-> source (B, length), with `dummy` a token V before it, target (B, 1 + length), the labels
    behind a start token. Integers are uniform; places (0, 1), (2, 3), ... become pairs with
    probability `plant`. The source does not say how it draws."""
    tokens = torch.randint(d_vocab, (B, length))
    first, n = tokens[:, 0:length - 1:2], length // 2
    side = 1 - 2 * torch.randint(2, (B, n))
    side = torch.where((first + side < 0) | (first + side >= d_vocab), -side, side)
    tokens[:, 1::2] = torch.where(torch.rand(B, n) < plant, first + side, tokens[:, 1::2])
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
        self.attention = MultiHeadAttention(config.d_model, 1, d_head=config.d_head, d_out=1)
        nn.init.constant_(self.attention.out.bias, 5.0)

    def forward(self, source, target):
        x = self.embedding(source)
        z = self.attention(x, x)[0][:, -target.shape[1]:]
        return torch.cat([torch.zeros_like(z), z], 2)

def learn_pairs(config, device, keep, report):
    """Train and test one head -> Run. Tests are drawn as in training ("random") and without planted
    pairs ("uniform"). Differs: a constant rate; the source cuts it on a plateau, with a patience of
    100, and takes the best of several seeds."""
    draw = lambda B, length, plant: draw_pairs(B, length, config.d_vocab, plant, config.dummy)
    sets = lambda config, length: {
        "random": draw(config.samples, length, config.plant),
        "uniform": draw(config.samples, length, 0.0)}
    seed_by_name(config.seed, "model")
    model = PairsHead(config).to(device)
    train(model, lambda share: draw(config.batch, 5, config.plant), config.steps,
          lambda step, steps: 1.0, "model", keep, report)
    return Run(model, keep.part("tests", lambda: evaluate(model, config, sets, report)))

# -----
# 9. Encoders: one pass, relative positions, priming
# Source: Jelassi. One pass over the question: answer digit t is read off at token t. Numbers
# start with their most significant digit and are padded on the right, so digits of equal weight
# are aligned only in numbers of equal length. + and * serve for the paper's four signs.

ENCODER = dict(operands=("number", "number"), sign="+", models=("universal", "encoder"))
PRODUCT = ENCODER | dict(operands=("number", "short"), sign="*")
TASKS |= {
    "modular-addition": Task("(a + b) mod c", lambda a, b: a + b, modular=True, **ENCODER),
    "multiplication": Task("a * b, b of few digits", product, **PRODUCT),
    "modular-multiplication": Task("(a * b) mod c, b of few", product, modular=True, **PRODUCT),
    "elementwise-addition": Task("a + b, carries dropped", lambda a, b: (a + b) % 10, headroom=0,
                                 **ENCODER),
}

def write_padded(a, length):
    """Digits (B, W) -> tokens (B, W): the lowest `length` (B,), highest first, then PAD."""
    place = length[:, None] - 1 - torch.arange(a.shape[1])
    return a.gather(1, place.clamp(min=0)).masked_fill(place < 0, VOCAB.index(PAD))

def arrange_encoder(task, a, b, modulus=100):
    """Operands a, b (B, W) -> question (B, 2W + 1), target (B, 1 + n), the answer behind a START
    that is not read: 12 + 39 at width 3 is `12@+39@`, `$51@@`. Source: Jelassi, Sec. 2.1 (printed
    with a pad less). Modular answers have as many digits as modulus - 1, element-wise sums those of
    the longer operand."""
    spec = TASKS[task]
    room = a.shape[1] if "short" in spec.operands else spec.headroom
    answer = carry(spec.columns(F.pad(a, (0, room)), F.pad(b, (0, room))), 10)
    length = n_digits(answer) if room else torch.maximum(n_digits(a), n_digits(b))
    if spec.modular:
        rest = torch.zeros_like(length)
        for digit in answer.flip(1).unbind(1):  # Horner: no integer grows
            rest = (10 * rest + digit) % modulus
        answer = to_digits(rest, len(str(modulus - 1)), 10)
        length = torch.full_like(length, answer.shape[1])
    mark = lambda symbol: encode(symbol).expand(len(a), -1)
    question = [write_padded(a, n_digits(a)), mark(spec.sign), write_padded(b, n_digits(b))]
    return torch.cat(question, 1), torch.cat([mark(START), write_padded(answer, length)], 1)

def draw_encoder(config, length, B, even=False):
    """Operands (B, width) below 10^length, 1 in place of 0; even: each length as often."""
    def below(length):
        digits, place = torch.randint(10, (B, length)), torch.arange(length)
        if even:
            top = torch.randint(length, (B, 1))  # place of the first digit
            first = torch.randint(1, 10, (B, 1)) * (place == top)
            digits = digits * (place < top) + first
        digits[:, 0] += digits.sum(1) == 0
        return F.pad(digits, (0, config.width - length))

    short = "short" in TASKS[config.task].operands
    return below(length), below(config.second_digits if short else length)

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
        if config.preset == "paper":
            self.dropout = nn.Sequential(nn.LayerNorm(config.d_model), self.dropout)
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02)

    def forward(self, source, target):
        return self.head(self.norm(self.read(source)[:, :target.shape[1]]))

def learn_encoder(config, device, keep, report):
    """Train on short numbers (--prime: and a few long ones), test; --finetune: train on long ones,
    test again -> Run. The curve has the share right of each digit (Figs. 7, 10; of new questions).
    Source: Jelassi, Secs. 2.2 and 5. Differs: 100 steps of warm-up; draws with replacement."""
    seed_by_name(config.seed, "model")
    model = Encoder(config).to(device)
    rate = lambda step, steps: min(1.0, step / 100) * (1 + math.cos(math.pi * step / steps)) / 2
    short = dataclasses.replace(config, lengths=(config.train_digits,), samples=200)
    check = lambda model: evaluate(model, short, encoder_questions)["rows"][0]["places"]

    def stage(name, n, prime, steps):
        """n first operands, of which `prime` are long and keep their second one."""
        seed_by_name(config.seed, name, "examples")
        a, b = draw_encoder(config, config.train_digits, n, config.even)
        lengths = config.prime_lengths or ()
        for turn, length in enumerate(lengths):
            places = torch.arange(prime)[turn::len(lengths)]
            a[places], b[places] = draw_encoder(config, length, len(places))

        def batch(share):
            pick = torch.randint(n, (config.batch,))
            _, fresh = draw_encoder(config, config.train_digits, config.batch, config.even)
            second = torch.where((pick < prime)[:, None], b[pick], fresh)
            return arrange_encoder(config.task, a[pick], second, config.modulus)

        train(model, batch, steps, rate, name, keep, report, check)

    tests = lambda: evaluate(model, config, encoder_questions, report)
    stage("model", config.n_train, config.prime, config.steps)
    if config.finetune:
        keep.part("before", tests)
        stage("finetune", config.finetune, config.finetune, config.retrain_steps)
    return Run(model, keep.part("tests", tests))

# -----
# 10. Command line

LEARN = {"seq2seq": learn, "encoder": learn_encoder, "head": learn_pairs}

def load(folder):
    """Folder of a finished run -> model, config, Run. Raises: ValueError."""
    config, parts, _ = read_checkpoint(folder)
    if not parts.keys() >= {"model", "tests"}:
        raise ValueError(f"{str(folder)!r} is not finished; finish it by --from alone")
    with refused(f"{str(folder)!r} does not fit"):
        run = LEARN[config.kind](config, torch.device("cpu"), Keep(config, parts=parts), silent)
    return run.model, config, run

def wilson(correct, n, z=1.959964):
    """95% interval of a share (Wilson 1927)."""
    centre, half = correct + z * z / 2, z * math.sqrt(correct * (n - correct) / n + z * z / 4)
    return max(0.0, (centre - half) / (n + z * z)), min(1.0, (centre + half) / (n + z * z))

def percent(share):
    """Rounded down: 100 is all."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}%"

def make_record(config, device, run, parts):
    """What a run came to, as plain values."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = shutil.which("git") and subprocess.run(git, capture_output=True, text=True).stdout
    cuda, threads = device.type == "cuda", f"cpu, threads: {torch.get_num_threads()}"
    return dict(
        config={name: x for name, x in dataclasses.asdict(config).items() if x is not None},
        torch=torch.__version__, commit=(commit or "").strip(),
        device=torch.cuda.get_device_name(device) if cuda else threads,
        train={name: {key: x for key, x in part.items() if key != "weights"}
               for name, part in parts.items() if "weights" in part},
        lines=[line._asdict() for line in run.lines], proof=run.proof,
        before=parts.get("before"), tests=run.tests)

def table(tests):
    yield "digits   exact  set        95% interval         n"
    for row in tests["rows"]:
        low, high = wilson(row["correct"], row["n"])
        yield (f"{row['digits']:>6}  {percent(row['correct'] / row['n']):>6}  {row['set']:<8} "
               f"{low:7.2%} - {high:7.2%}  {row['n']:8,}")

def summary(record):
    """The record as text."""
    names, c = {1: "diagonal", 0: "vertical", -1: "anti-diagonal"}, record["config"]
    out, seq2seq = [f"{c['task']}, {c['method']}, seed {c['seed']}"], c["model"] == "seq2seq"
    for name, part in record["train"].items():
        exact = f", {percent(part['curve'][-1][2])} of 1,000 held-out exact" if seq2seq else ""
        out.append(f"{name:<9} {part['steps']:,} steps, {part['seconds']:.1f} s{exact}")
        out += [f"  layer {x['layer'] + 1} {x['attention']:<5} head {x['head'] + 1}: "
                f"{names[x['direction']]}, block {x['block'] + 1}, offset {x['offset']}, bias "
                f"{x['value']:.2f}, z {x['z']:.1f}" for x in record["lines"] if name == "teacher"]
    if record["proof"]:
        out.append(f"proof     {describe(record['proof'])}")
    if record["before"]:
        out += ["", "before fine-tuning", *table(record["before"])]
    return "\n".join([*out, f"tests     {record['tests']['seconds']:.1f} s on {record['device']}",
                      "", *table(record["tests"])])

def describe(proof):
    """A proof in words."""
    if not proof["proved"]:
        return f"not proved: {proof['why']}"
    return (f"exact at every length: right on all {proof['windows']:,} windows, by "
            f"{proof['margin']:.1f} or more; kappa {proof['kappa']}, attempt {proof['attempt']}")

def whole_numbers(text):
    return tuple(int(part) for part in text.split(","))

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message.removeprefix("argument "))

def parser():
    """Every field of Config is an option; those not given are absent."""
    p = Parser(prog="lengen.py", allow_abbrev=False, argument_default=argparse.SUPPRESS,
               description="Length generalization in arithmetic transformers.")
    for field in dataclasses.fields(Config):
        meta, kind = field.metadata, whole_numbers if field.type is tuple else field.type
        how = dict(type=kind, choices=meta["choices"])
        how = dict(action="store_true") if kind is bool else how
        usual = [f"{kind} {x}" for kind, x in meta["usual"].items() if x not in (None, NO)]
        text = meta["help"] + (f" ({', '.join(usual)})" if usual else "")
        p.add_argument(flag(field.name), help=text, **how)
    p.add_argument("--seeds", type=int, help="runs, from --seed on")
    p.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda if there")
    p.add_argument("--out", help="new folder, by default in runs/")
    p.add_argument("--from", metavar="DIR", help="finish a run, test it at --lengths, --ask it")
    p.add_argument("--ask", nargs="+", help="123+748, of --from or of the newest finished run")
    p.add_argument("--json", action="store_true", help="print the record, JSON")
    p.add_argument("--quiet", action="store_true", help="no reports")
    p.add_argument("--list", action="store_true", help="print tasks, methods and models")
    return p

def pick_device(config, name=None):
    """"cpu", "cuda" or None -> torch.device; sets up threads and, under torchrun, processes."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda is not there")
    if "WORLD_SIZE" in os.environ and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if name == "cuda" else "gloo")
    if config.d_model <= 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads help little
    return torch.device(name, int(os.environ.get("LOCAL_RANK", 0)) if name == "cuda" else None)

def new_folder(config, options):
    """New, so that no two runs share one."""
    name = f"runs/{config.task}-{config.method}-seed{config.seed}-{time.time_ns()}"
    folder = Path(options.get("out", name))
    if "out" in options and "seeds" in options:
        folder = folder / f"seed{config.seed}"
    with refused(f"--out: {str(folder)!r} cannot be a new folder"):
        folder.mkdir(parents=True)
    return folder

def execute(keep, options):
    """Make the parts of a run that are not there; print and keep what it came to."""
    config, device = keep.config, pick_device(keep.config, options.get("device"))
    report = silent if "quiet" in options or not rank0() else say
    report(f"{config.task}, {config.method}, seed {config.seed}, {device}, {keep.folder or ''}")
    keep.save()
    run = LEARN[config.kind](config, device, keep, report)
    if not rank0():
        return
    known = keep.parts["teacher"]["curve"][-1][2] if run.teacher else 1.0
    if known < 0.99:
        say(f"lengen: the teacher has {percent(known)} right; raise --steps")
    record = make_record(config, device, run, keep.parts)
    keep.write("result.json", json.dumps(record).encode())
    print(json.dumps(record) if "json" in options else summary(record), flush=True)

def go_on(options):
    """--from: finish a run, or test a finished one, whose folder stays as it is."""
    config, parts, current = read_checkpoint(options["from"])
    changes = {name: options[name] for name in ("lengths", "samples") if name in options}
    folder = None if Path(options["from"], "result.json").exists() else options["from"]
    for name in ("tests", "before") if changes else ():
        parts.pop(name, None)
    with refused(f"{options['from']!r} does not fit", (TypeError, AttributeError, LookupError)):
        execute(Keep(dataclasses.replace(config, **changes), folder, parts, current), options)

def answer(options):
    """--ask: a line for each question."""
    finished = sorted(Path("runs").rglob("result.json"), key=os.path.getmtime)
    if "from" not in options and not finished:
        raise ValueError("--ask: no finished run under runs/")
    folder = options.get("from") or finished[-1].parent
    model, config, _ = load(folder)
    if config.kind != "seq2seq":
        raise ValueError(f"--ask: {config.model} models answer nothing")
    say(f"asking {folder}")
    for question in options["ask"]:
        print(ask(model, config, question.replace(" ", "")), flush=True)

# What goes with modes other than to train.
ALONE = {"list": (), "ask": ("from",), "from": ("device", "json", "quiet", "lengths", "samples")}

def run_command(options):
    mode = next((mode for mode in ALONE if mode in options), None)
    for name in options if mode else ():
        if name not in (mode, *ALONE[mode]):
            raise ValueError(f"{flag(name)}: {NO} on --{mode}")
    if mode == "list":
        for title, entries in (("tasks", TASKS), ("methods", METHODS), ("models", MODELS)):
            print(title, *(f"  {name:<23} {getattr(entry, 'about', entry)}"
                           for name, entry in entries.items()), sep="\n")
        return 0
    if mode:
        return (answer if mode == "ask" else go_on)(options)
    fields = Config.__dataclass_fields__
    config = Config(**{name: x for name, x in options.items() if name in fields})
    if options.get("seeds", 1) < 1:
        raise ValueError("--seeds: at least 1")
    pick_device(config, options.get("device"))  # before a folder is made
    code = 0
    for seed in range(config.seed, config.seed + options.get("seeds", 1)):
        config = dataclasses.replace(config, seed=seed)
        try:
            execute(Keep(config, rank0() and new_folder(config, options)), options)
        except RuntimeError as error:  # of this seed alone
            code = fail(error, 1)
    return code

def fail(error, code):
    say(f"lengen: {str(error).partition(chr(10))[0] or repr(error)}")
    return code

def main(argv=None):
    """-> exit code: 0 done, 1 a run failed, 2 bad input, 130 interrupted."""
    try:
        return run_command(vars(parser().parse_args(argv))) or 0
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        return fail("interrupted; go on by --from DIR", 130)
    except Exception as error:
        return fail(error, 2 if isinstance(error, ValueError) else 1)

if __name__ == "__main__":
    sys.exit(main())
