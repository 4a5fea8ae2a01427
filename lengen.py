# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

A transformer trained on numbers of about 6 digits can answer questions of 60 or 1,000 digits
exactly if its attention is confined to the patterns that it learned on these short numbers. This
file trains such a model, extracts the patterns (Attention Bias Calibration, ABC), proves that the
result is exact at every length, and compares it with other methods.

    python lengen.py --task successor --method abc        # train, calibrate, retrain, prove, test
    python lengen.py --task addition --method vanilla     # right at 6 digits, wrong at 10
    python lengen.py --ask 123+748                        # ask the newest finished run in runs/
    python lengen.py --task addition --help               # show the options of this task

Sections 1 to 7 implement ABC and are meant to be read in order. Sections 8 (consecutive pairs) and
9 (encoders) are separate experiments; section 10 is the command line.

Sizes: B batch, T queries, S keys, K open keys of a query, H heads, D head width, C = H * D model
width, V vocabulary, W digits of a number. Attention is m x n at the training length and M x N at
any other. Lengths are in digits; place 0 is the last digit. In docstrings, `x -> y` means that x is
given and y is returned; `Source:` names an origin, `Differs:` a departure from it. Random draws use
global generators, which `seeded` seeds, so concurrent runs need separate processes, not threads.

v1: Duan and Shi, From Interpolation to Extrapolation: Complete Length Generalization for Arithmetic
Transformers, 2023. v2: Duan, Shi and Xu, Attention Bias as an Inductive Bias: How to Teach
Transformers Simple Arithmetic, 2024. Jelassi: Jelassi et al., Length Generalization in Arithmetic
Transformers, 2023. Pairs: an anonymous study of consecutive pairs."""

import argparse
import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import json
import logging
import math
import os
import random
import re
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

SOURCE = ""  # hash of this file at import time, for records
with contextlib.suppress(NameError, OSError):  # no file, e.g. when read from standard input
    SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
LOG = logging.getLogger("lengen")  # progress at level INFO, the command's errors at level ERROR
RANDOM = random.Random()  # draws integers of any size
INF = float("inf")
SECONDS = 3  # between progress reports, and between saves, of a long computation

class BadInput(ValueError):
    """An error that the user can fix. The command prints one line and exits with 2."""

class RunFailed(RuntimeError):
    """An error that ends a run. The command prints one line and exits with 1."""

@contextlib.contextmanager
def seeded(*names):
    """Seed torch and RANDOM from `names`, e.g. seed, "test", 60; restore torch's state on exit."""
    with torch.random.fork_rng():
        RANDOM.seed(repr(names))
        torch.manual_seed(RANDOM.getrandbits(63))
        yield

# 1. Tasks: digits in, tokens out ------------------------------------------------------------------
# The token of a digit is its value. Numbers are tensors of digits (B, W), least significant first.

VOCAB = "0123456789+*$&@"
START, END, PAD = "$", "&", "@"
LIMIT = 2 ** 20  # training numbers are below this; most have 6 decimal digits

def encode(text):
    """A string of VOCAB symbols -> tokens (T,). Raises: ValueError for other symbols."""
    return torch.tensor([VOCAB.index(symbol) for symbol in text], dtype=torch.int64)

def decode(tokens):
    return "".join(VOCAB[token] for token in tokens)

class Task(NamedTuple):
    """A rule that computes the answer from the last place to the first. At each place, `total(rest,
    *digits)` combines the operands' digits with the rest (the carry) of the place before. The total
    modulo the base is the answer's digit; the total divided by the base, rounded down, is the next
    rest. All are integer tensors of one shape. With headroom, numbers have leading zeros, and
    operands whose final rest is not 0 are invalid; without it, the final rest is dropped."""
    about: str
    total: Callable
    operands: tuple = ("number",)  # each "number" (W digits) or "digit" (one digit), numbers first
    sign: str = ""  # the symbol of VOCAB that separates operands
    base: int = 10
    first: int = 0  # the initial rest, which the last place receives
    headroom: int = 1  # leading zeros, to make room for the answer; training numbers may have fewer
    label: bool = False  # whether the answer is only the digit of the first place
    steps: int = 600  # number of steps of the initial training
    retrain_steps: int = 300  # maximum number of steps of the first attempt at retraining
    batch: int = 64
    lr: float = 6e-3

    def step(self, rest, digits):
        """rest (...), digits (..., n) of a place -> digit of the answer, rest of the next place."""
        total = self.total(rest, *digits.unbind(-1))
        return total % self.base, total // self.base  # rounds down: a negative total borrows

    @property
    def width(self):
        """The smallest number of digits that can hold every number below LIMIT * 2^headroom."""
        width = 1
        while self.base ** width < LIMIT * 2 ** self.headroom:
            width += 1
        return width

def xor(rest, a):
    """Running xor: the answer's digit x is also the next rest, so the total is x + 2 * x."""
    return 3 * ((a + rest) % 2)

TASKS = {
    # $0129& -> $0310&: 129 + 1 = 130, written from the last digit on
    "successor": Task("n + 1", lambda rest, a: a + rest, first=1,
                      steps=350, retrain_steps=350, batch=32, lr=4e-3),
    # $0123+0748& -> $1780&: 123 + 748 = 871
    "addition": Task("a + b", lambda rest, a, b: a + b + rest, ("number", "number"), "+"),
    # $0123*7& -> $1680&: 123 * 7 = 861
    "nx1": Task("a * b, b a single digit", lambda rest, a, b: a * b + rest, ("number", "digit"),
                "*", retrain_steps=450, batch=128, lr=8e-3),
    # $1011& -> $1001&: parity of the last bit, of the last two, ..., of all four
    "parity": Task("running xor of the bits, last bit first", xor, base=2, headroom=0,
                   steps=300, retrain_steps=200, batch=32),
    # $1011& -> $1&
    "parity-label": Task("parity in one digit, without the scratchpad", xor, base=2, headroom=0,
                         label=True),
}

def add_digits(a, b):
    """15, 27 -> "32", the sum without carries."""
    text = ""
    while a or b:
        text = str((a + b) % 10) + text
        a, b = a // 10, b // 10
    return text

class EncoderTask(NamedTuple):
    """A task of encoders (section 9) on two positive integers."""
    about: str
    sign: str
    answer: Callable  # integers a, b -> the answer as text, longest for the largest a and b
    steps: int
    second_digits: int = None  # maximum number of digits of b; by default the same as for a

ENCODER_TASKS = {
    # 12@+39@ -> $51@@, modulo 100 $51
    "addition": EncoderTask("a + b", "+", lambda a, b: str(a + b), 16_000),
    # 12@*9@@ -> $108@@@, modulo 100 $08
    "multiplication": EncoderTask("a * b, b of few digits", "*", lambda a, b: str(a * b), 10_000,
                                  second_digits=1),
    # 15@+27@ -> $32@
    "elementwise-addition": EncoderTask("a + b, carries dropped", "+", add_digits, 6000),
}
TASKS_OF = {"seq2seq": TASKS, "pairs": {"consecutive": Task("is a neighbor there?", None)},
            "universal": ENCODER_TASKS, "encoder": ENCODER_TASKS}

def arrange(task, columns, align=False):
    """Digits (B, W, n) of n operands (a single digit is at every place) -> tokens of the valid
    questions: source (B, S), `$0123+0748&`, and target (B, T + 1), `$1780&`, last digit first. With
    align, two operands are interleaved, `$+00172438&`. Source: v1, Sec. 3.2; v2, App. D.1, C.4."""
    spec, answer = TASKS[task], []
    rest = torch.full_like(columns[:, 0, 0], spec.first)
    for column in columns.unbind(1):
        digit, rest = spec.step(rest, column)
        answer.append(digit)
    if spec.label:
        answer = answer[-1:]
    sign, start, end = (encode(x).expand(len(rest), -1) for x in (spec.sign, START, END))
    source = [start]
    if align:
        source += [sign, columns.flip(1).flatten(1)]
    else:
        for kind, digits in zip(spec.operands, columns.flip(1).unbind(2)):
            if kind == "digit":
                digits = digits[:, :1]
            source += [sign, digits]
        del source[1]  # no sign before the first
    source = torch.cat(source + [end], 1)
    target = torch.cat([start, torch.stack(answer, 1), end], 1)
    valid = (rest == 0) | (not spec.headroom)
    return source[valid], target[valid]

def example(task, *operands, width=1, align=False):
    """example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&"). The width is raised
    if the longest operand and the headroom need more. Raises: BadInput."""
    spec = TASKS.get(task)
    if not spec or len(operands) != len(spec.operands):
        raise BadInput(f"{' '.join(operands)} is no question of {task}")
    width, digits = max(width, max(map(len, operands)) + spec.headroom), []
    for kind, text in zip(spec.operands, operands):
        most = width if kind == "number" else 1
        if not 1 <= len(text) <= most or set(text) - set(VOCAB[:spec.base]):
            raise BadInput(f"{text!r} is not a base-{spec.base} {kind} of 1 to {most} digits")
        digits.append(encode(text.rjust(most, "0")).flip(0).expand(width))
    source, target = arrange(task, torch.stack(digits, 1)[None], align)
    if not len(source):
        raise BadInput(f"{' and '.join(operands)} have no answer: {spec.about}")
    return decode(source[0]), decode(target[0])

def to_digits(numbers, width, base):
    """Integers >= 0, of any shape -> their lowest digits (..., width)."""
    return numbers[..., None] // base ** torch.arange(width) % base

def split_numbers(seed):
    """-> training, held-out integers, 7 : 1, sorted. Source: v2, App. B. Differs: 2^20 left out."""
    order = torch.randperm(LIMIT, generator=torch.Generator().manual_seed(seed))
    training, held_out = order.tensor_split([LIMIT * 7 // 8])
    return training.sort().values, held_out.sort().values

def first_of_each(rows):
    """Rows (N,) or (N, L) -> ascending indices of the first occurrence of each distinct row."""
    dim = 0 if rows.dim() > 1 else None  # faster, for single numbers
    which = rows.unique(dim=dim, return_inverse=True)[1]
    index = torch.arange(len(rows))
    first = torch.full_like(index, len(rows)).scatter_reduce(0, which, index, "amin")
    return index[first[which] == index]

def draw_exact(base, length, B):
    """B numbers of exactly `length` digits -> (B, length). Source: v1, Sec. 3.3."""
    digits = torch.randint(base, (B, length))
    digits[:, -1] = torch.randint(1, base, (B,))  # no leading zero
    return digits

def draw_hard(base, length, B):
    """-> (B, length): B hard numbers. All digits are 0, or all are the highest digit, except for a
    random share of random digits. So carries run far, and operands are short or nearly equal."""
    usual = torch.randint(2, (B, 1)) * (base - 1)
    other = torch.rand(B, length) < torch.rand(B, 1)
    return torch.where(other, torch.randint(base, (B, length)), usual)

def draw_questions(config, draw, length, n, width=None, distinct=True):
    """-> up to n valid, distinct questions: source (n, S), target (n, T + 1). draw(base, length, B)
    -> numbers (B, length), which get leading zeros. Raises: BadInput if 20 draws of n find none."""
    spec, drawn = TASKS[config.task], []
    width = width or max(config.widths[0], length + spec.headroom)
    for _ in range(20):
        operands = []
        for kind in spec.operands:
            if kind == "number":
                operands.append(F.pad(draw(spec.base, length, n), (0, width - length)))
            else:
                operands.append(torch.randint(spec.base, (n, 1)).expand(n, width))
        drawn.append(arrange(config.task, torch.stack(operands, 2), config.align))
        source, target = map(torch.cat, zip(*drawn))
        if distinct:
            kept = first_of_each(source)
            source, target = source[kept], target[kept]
        if len(source) >= n:
            break
    if not len(source):
        raise BadInput(f"{config.task}: no question was found in 20 draws of {n}")
    return source[:n], target[:n]

# 2. Positions and biases: one pure function each --------------------------------------------------
# A bias is added to the scores: 0 is neutral, -inf closes a key. Rows are queries i, columns keys
# j. Tensors made from sizes alone are on torch's default device, which a model sets to its own.

def sinusoidal(positions, d_model):
    """Positions t (T,) -> (T, C): channels 2p, 2p + 1 are sin and cos of t / 10000^(2p/C). Source:
    Vaswani et al. 2017, Sec. 3.5. Angles are float64, to be precise at large positions."""
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * 10000.0 ** (-pairs / d_model)  # (T, C / 2)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :d_model]
    return waves.to(torch.get_default_dtype())

def rope(x, positions):
    """Rotate channels 2p and 2p + 1 of x (B, H, T, D), at positions t (T,), by the angle t /
    10000^(2p/D). Source: Su et al. 2021, Eqs. 14 and 34."""
    waves = sinusoidal(positions, x.shape[-1]).to(x)
    sin, cos = waves[:, 0::2], waves[:, 1::2]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

def relative_scores(q, table, k=None, S=None):
    """q (B, H, T, D), table (2K + 1, D), k (B, H, S, D) -> unscaled (B, H, T, S): q_i . a_ij, plus
    k_j . a_ij if k is given, where a_ij = table[clip(j - i, -K, K) + K]. By default S = T. Source:
    Shaw et al. 2018, Eq. 4 (keys); Huang et al. 2020, method 4 (keys and queries)."""
    S = S or (q if k is None else k).shape[2]
    i, j = torch.arange(q.shape[2], device=q.device), torch.arange(S, device=q.device)
    K = len(table) // 2
    a = F.embedding((j - i[:, None]).clamp(-K, K) + K, table)  # (T, S, D)
    scores = torch.einsum("bhid,ijd->bhij", q, a)
    if k is not None:
        scores = scores + torch.einsum("bhjd,ijd->bhij", k, a)
    return scores

def alibi_slopes(n_head):
    """-> slopes (H,): 2^(-8h/H) for h = 1 .. H. If H is not a power of two: those of the next lower
    power n, then every second of those of 2n. Source: Press et al. 2022, Sec. 3 and code."""
    n = 2 ** (n_head.bit_length() - 1)
    h = torch.cat([torch.arange(1, n + 1), torch.arange(0.5, n)])  # 1, 2, ... n, 0.5, 1.5, ...
    return 2.0 ** (-8 * h[:n_head] / n)

def alibi_bias(n_head, T, S):
    """-> (H, T, S): -slope_h * |j - i|. Source: Press et al. 2022, Sec. 3. Differs: symmetric, for
    encoders and cross-attention; the causal mask is separate."""
    i, j = torch.arange(T)[:, None], torch.arange(S)
    return -alibi_slopes(n_head)[:, None, None] * (j - i).abs()

def causal_bias(T):
    """-> (1, T, T): 0 for j <= i, -inf above the diagonal."""
    return torch.full((1, T, T), -INF).triu(1)

def window_bias(w, T, S, cross=False, step=1):
    """-> (1, T, S): 0 inside the window, -inf outside. In self-attention, row i sees itself and the
    w tokens before it; in cross-attention, the digits at place i and at the w places below it,
    where the end marker has place -1. With interleaved operands (step=2), a place has two digits.
    Source: v2, App. C.4; for the columns of w = 1, the authors' code. Differs: v2's text also opens
    w positions on the other side and does not name the first column; the code has no pairs."""
    i, place = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        place = (S - 2 - place) // step  # counted from the end; the end marker has place -1
    return torch.zeros(1, T, S).masked_fill((place > i) | (place < i - w), -INF)

# 3. Attention -------------------------------------------------------------------------------------

class OpenKeys(NamedTuple):
    """A sparse bias: -inf except at K or fewer keys of each row. A dense matrix is faster on short
    numbers, but would exhaust memory at 10,000 digits."""
    columns: torch.Tensor  # (H, T, K), the keys
    values: torch.Tensor  # (H, T, K), the bias at these keys

def masked_softmax(scores, bias):
    """softmax(scores + bias) over the keys; 0, not NaN, in a row whose keys are all closed."""
    if bias is None:
        return scores.softmax(-1)
    bias = bias.to(scores)
    closed = bias.isneginf().all(-1, keepdim=True)
    return (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0)

class MultiHeadAttention(nn.Module):
    """weights = softmax(q k^T / sqrt(D) + bias), output = weights v. If set, `scores` of q and k
    (B, H, T or S, D) replace q k^T. Source: Vaswani et al. 2017, Sec. 3.2; v2, App. C.4."""
    def __init__(self, d_model, n_head, dropout=0.0, d_head=None):
        super().__init__()
        self.n_head, self.d_head = n_head, d_head or d_model // n_head
        self.scores = None
        inner = n_head * self.d_head
        self.q, self.k, self.v = (nn.Linear(d_model, inner) for _ in range(3))
        self.out = nn.Linear(inner, d_model)
        self.dropout = nn.Dropout(dropout)

    def project(self, x, memory):
        """-> q (B, H, T, D), k and v (B, H, S, D)."""
        projected = self.q(x), self.k(memory), self.v(memory)
        return [y.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2) for y in projected]

    def forward(self, x, memory, bias=None):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) or OpenKeys -> output
        (B, T, C), weights (B, H, T, S) or, with OpenKeys, (B, H, T, K)."""
        if isinstance(bias, OpenKeys):
            return self.attend_to_open_keys(x, memory, bias)
        q, k, v = self.project(x, memory)
        scores = self.scores(q, k) if self.scores else q @ k.mT  # (B, H, T, S)
        weights = masked_softmax(scores / math.sqrt(self.d_head), bias)
        mixed = self.dropout(weights) @ v  # (B, H, T, D)
        return self.out(mixed.transpose(1, 2).flatten(2)), weights

    def attend_to_open_keys(self, x, memory, bias):
        """`forward` on open keys only, in chunks, so that a million rows fit; without dropout."""
        assert not self.scores, "OpenKeys cannot be combined with a scores function"
        outputs, weights = [], []
        heads = torch.arange(self.n_head, device=x.device)[:, None, None]
        for rows in torch.arange(x.shape[1], device=x.device).split(2 ** 12):
            used, keys = bias.columns[:, rows].unique(return_inverse=True)  # keys (H, R, K) of used
            q, k, v = self.project(x[:, rows], memory[:, used])
            scores = (q[:, :, :, None] * k[:, heads, keys]).sum(4)  # (B, H, R, K)
            piece = masked_softmax(scores / math.sqrt(self.d_head), bias.values[:, rows])
            mixed = (piece[..., None] * v[:, heads, keys]).sum(3)  # (B, H, R, D)
            outputs.append(self.out(mixed.transpose(1, 2).flatten(2)))
            weights.append(piece)
        return torch.cat(outputs, 1), torch.cat(weights, 2)

# 4. Transformer -----------------------------------------------------------------------------------
# A method has up to three parts. Each part is either a function, whose arguments before `;` are
# bound when the model is built, or a module class, which is instantiated with these arguments:
#     position(config; side, index) -> (T, C), added to the embeddings of a side, "source" or
#         "target"; index (T,) is 0, 1, ... or, if positions repeat, modulo the method's `period`
#     bias(config; layer, kind, T, S) -> (1 or H, T, S), OpenKeys or None, added to the scores
#     scores(config, kind; q, k) -> (B, H, T, S), used instead of q k^T
# `kind` is the attention: "encoder", "self" or "cross"; `config` has a run's options (section 7).

def sinusoids(config, side, index):
    return sinusoidal(index, config.d_model)

class LearnedPositions(nn.Embedding):
    def __init__(self, config):
        super().__init__(4096, config.d_model)
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, side, index):
        if len(index) > len(self.weight):
            raise BadInput(f"{len(index)} tokens exceed the {len(self.weight)} learned positions")
        return super().forward(index)

def window(config, layer, kind, T, S):
    if kind != "encoder":
        return window_bias(1, T, S, kind == "cross", 1 + config.align)

def alibi(config, layer, kind, T, S):
    if kind == "self" or config.method == "alibi":
        return alibi_bias(config.n_head, T, S)

def rotary(config, kind, q, k):
    i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    return rope(q, i) @ rope(k, j).mT

class RelativeScores(nn.Module):
    """q k^T plus learned scores of relative positions, for keys and, in "rpe-kq", for queries."""
    def __init__(self, config, kind):
        super().__init__()
        D = config.d_model // config.n_head
        self.table = nn.Parameter(torch.randn(2 * config.clip + 1, D) / D ** 0.5)
        self.for_queries = config.method == "rpe-kq"

    def forward(self, q, k):
        keys = k if self.for_queries else None
        return q @ k.mT + relative_scores(q, self.table, keys, k.shape[2])

class Method(NamedTuple):
    about: str
    position: Callable = None
    bias: Callable = None
    scores: Callable = None
    n_width: int = 1  # training widths; a single one, as in the papers, lets END's row be memorized
    align: bool = False  # the source interleaves its two operands
    steps: int = 1  # factor by which the task's default number of steps is multiplied
    defaults: dict = {}  # default values of other options of a run
    embedding: float = 0.3  # standard deviation of embeddings; small, so that positions stand out
    calibrated: bool = False  # the bias comes from a vanilla model that is trained first
    period: int = 1  # rows after which positions repeat; 1: never

METHODS = {
    "vanilla": Method("sinusoids on the embeddings", sinusoids),
    "nope": Method("no positions (Kazemnejad et al. 2023)"),
    "ape": Method("learned positions on the embeddings (Gehring et al. 2017)", LearnedPositions),
    "alibi": Method("ALiBi, symmetric, in every attention", bias=alibi),
    "alibi-decoder": Method("sinusoids, ALiBi in the decoder's self-attention (code of v2)",
                            sinusoids, alibi),
    "rope": Method("rotated queries and keys, in every attention", scores=rotary, steps=10,
                   defaults=dict(lr=3e-3)),
    "rpe-k": Method("relative table for keys, in every attention", scores=RelativeScores, steps=4),
    "rpe-kq": Method("relative table for keys and queries", scores=RelativeScores, steps=4),
    # Far positions are learned only if leading zeros occupy them in training. Large embeddings and
    # dropout, as used by the authors, favor content over position. With more layers, the model can
    # tell the digits in a window apart by comparison with those of the previous row.
    "window": Method("sinusoids, windows in the decoder (v2, +w)", sinusoids, window, align=True,
                     steps=3, defaults=dict(width=61, dropout=0.3, n_layer=3), embedding=1.33),
    "window-cyclic": Method("windows, position index modulo 3 (v2, +T)", sinusoids, window,
                            n_width=9, align=True, steps=6, period=3),
    "window-nope": Method("windows in the decoder, no positions (v2, NoPE+w)", bias=window,
                          n_width=9, align=True, steps=3),
    "abc": Method("bias calibrated on a vanilla model, no positions", n_width=9, calibrated=True),
}

def bind(entry, *given):
    """Give a part of a method its first arguments: instantiate a class, or bind a function."""
    if isinstance(entry, type):
        return entry(*given)
    return entry and functools.partial(entry, *given)

class Layer(nn.Module):
    """Self-attention, cross-attention (decoder), feed-forward. Differs: pre-norm by default."""
    def __init__(self, config, cross):
        super().__init__()
        scores, C = METHODS[config.method].scores, config.d_model
        self.self_attention = MultiHeadAttention(C, config.n_head, config.dropout)
        self.self_attention.scores = bind(scores, config, "self" if cross else "encoder")
        if cross:
            self.cross_attention = MultiHeadAttention(C, config.n_head, config.dropout)
            self.cross_attention.scores = bind(scores, config, "cross")
        activation = nn.GELU() if config.kind == "encoder" else nn.ReLU()
        self.feed_forward = nn.Sequential(nn.Linear(C, 4 * C), activation,
                                          nn.Dropout(config.dropout), nn.Linear(4 * C, C))
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(2 + cross))
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.preset != "paper"

    def residual(self, norm, x, sublayer):
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def forward(self, x, self_bias=None, memory=None, cross_bias=None):
        x = self.residual(self.norms[0], x, lambda y: self.self_attention(y, y, self_bias)[0])
        if memory is not None:
            x = self.residual(self.norms[1], x,
                              lambda y: self.cross_attention(y, memory, cross_bias)[0])
        # The feed-forward network takes rows in chunks, so that a million fit in memory.
        return torch.cat([self.residual(self.norms[-1], rows, self.feed_forward)
                          for rows in x.split(2 ** 12, 1)], 1)

class Transformer(nn.Module):
    """An encoder-decoder or, in section 9, an encoder alone. The paper preset uses Xavier
    initialization and multiplies embeddings by sqrt(C). Differs: v2 initializes q, k and v smaller
    by a factor of sqrt(2), and Jelassi's initialization is Gaussian."""
    def __init__(self, config, n_vocab=None):
        super().__init__()
        self.config, method, C = config, METHODS[config.method], config.d_model
        n_vocab = n_vocab or len(VOCAB)
        self.embedding = nn.Embedding(n_vocab, C)
        nn.init.normal_(self.embedding.weight, std=method.embedding)
        self.position = bind(method.position, config)
        self.bias = CalibratedBias(config) if method.calibrated else bind(method.bias, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(Layer(config, False) for _ in range(config.n_encoder))
        if config.model == "universal":  # one layer, applied repeatedly
            self.encoder = nn.ModuleList([self.encoder[0]] * config.n_encoder)
        self.decoder = nn.ModuleList(Layer(config, True) for _ in range(config.n_layer or 0))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, n_vocab)
        if config.preset == "paper":
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.xavier_uniform_(weight)
            self.embedding.weight.data *= math.sqrt(C)

    def embed(self, tokens, side):
        """Tokens (B, T) of a side -> embeddings with positions (B, T, C). Source: v2, App. C.4
        (modulo). Differs: with the modulo, the index in a source counts from its end."""
        x = self.embedding(tokens.to(self.embedding.weight.device))
        period = METHODS[self.config.method].period
        if self.position:
            with x.device:
                index = torch.arange(tokens.shape[1])
                if period > 1:
                    index = (index.flip(0) if side == "source" else index) % period
                x += self.position(side, index).to(x)
        return self.dropout(x)

    def bias_of(self, layer, kind, T, S):
        """-> bias (1 or H, T, S), OpenKeys or None; causal in self-attention."""
        with self.head.weight.device:
            bias = self.bias and self.bias(layer, kind, T, S)
            if kind != "self" or isinstance(bias, OpenKeys):
                return bias
            mask = causal_bias(T)
            return mask if bias is None else bias + mask

    def forward(self, source, target):
        """source (B, S), target (B, T) -> logits (B, T, V). An encoder uses only the length T."""
        memory, S, T = self.embed(source, "source"), source.shape[1], target.shape[1]
        for n, layer in enumerate(self.encoder):
            memory = layer(memory, self.bias_of(n, "encoder", S, S))
        if self.config.kind == "encoder":
            return self.head(self.norm(memory[:, :T]))
        x = self.embed(target, "target")
        for n, layer in enumerate(self.decoder):
            own, cross = self.bias_of(n, "self", T, T), self.bias_of(n, "cross", T, S)
            x = layer(x, own, memory, cross)
        return self.head(self.norm(x))

@torch.no_grad()
def right_tokens(model, source, target):
    """source (B, S), target (B, T + 1) -> (B, T) bool on the CPU: whether each token is the
    likeliest after those before it. Greedy decoding writes the target if and only if all are."""
    model.eval()
    chunk = max(1, 2 ** 12 // target.shape[1])  # few enough questions to stay in the cache
    chunks = zip(source.split(chunk), target.split(chunk))
    return torch.cat([model(s, t[:, :-1]).argmax(-1).cpu() == t[:, 1:].cpu() for s, t in chunks])

@torch.no_grad()
def generate(model, source, limit):
    """Greedy decoding: source (B, S) -> target (B, limit + 1), START first. Passes predict every
    token from those before it until none changes; after k passes, the first k are final. A long
    carry takes one pass per digit, so an upper bound on the time is logged if it is long."""
    model.eval()
    target = torch.full((len(source), limit + 1), VOCAB.index(START))
    start = time.perf_counter()
    for n in range(limit):
        tokens = model(source, target[:, :-1]).argmax(-1).cpu()
        if torch.equal(tokens, target[:, 1:]):
            break
        target[:, 1:] = tokens
        most = (time.perf_counter() - start) / (n + 1) * limit
        if n == 10 and most > SECONDS:  # most questions need fewer passes
            LOG.info(f"decoding takes {most:,.0f} s at most")
    return target

# 5. Attention Bias Calibration --------------------------------------------------------------------
# A line is all elements of an attention matrix along a (row, column) step of (1, 1), (1, 0) or
# (1, -1); d_l is its mean. Over the lines of one direction in one head, d_l has mean mu, standard
# deviation sigma and maximum d_max. Lines that stand out are kept and extended to other sizes.

class Line(NamedTuple):
    """A line that is kept open. direction: 1 diagonal, 0 vertical, -1 anti-diagonal."""
    head: int
    direction: int
    block: int  # index of the block of columns that the line is in
    offset: int  # column - row (anti-diagonal: with columns reversed), or the column of a vertical
    bias: float  # d_l - d_max
    z: float  # (d_l - mu) / sigma
    layer: int = 0
    attention: str = "cross"

    @property
    def path(self):
        """The kind of attention and the line's position in it, regardless of head and layer."""
        return self.attention, self.direction, self.block, self.offset

# Arguments of `find_lines` for each rule set. Our kappa of 0.5 is used only where no proof is
# possible; elsewhere `choose_lines` tries KAPPAS.
RULES = {"ours": dict(kappa=0.5, of_largest=True, support=0.5),
         "v1": dict(kappa=4.0),  # Secs. 5 and 6
         "v2": dict(kappa=4.5, groups=((1, 0, -1),)),  # App. D
         "code": dict(kappa=4.5, total=True, groups=((-1,),))}  # the authors' code
SELF_RULES = {"v2": dict(kappa=0.87), "code": dict(kappa=0.87, groups=((1,),))}

def find_lines(attention, kappa, groups=((1,), (0,), (-1,)), total=False, of_largest=False,
               support=0.0, blocks=None):
    """Attention (H, m, n) -> list of Line, those that stand out. Source: v1, Eqs. 1 and 2:

        dropoff:  d_l - d_max  if d_l > mu + kappa * sigma,  else -inf

    Differs: the printed condition, `d_l - d_max > threshold`, holds for no positive threshold, so
    d_l itself is compared, as in the authors' code.
    groups: tuples of directions whose lines share mu, sigma and d_max; in v2, all three do.
    total: d_l is the sum of a line, as in the authors' code. Differs: their code leaves out sums of
    0, counts equal sums once, compares by >=, and opens the end marker in row 0.
    of_largest (ours): kappa is a share of sqrt(L - 1), the largest z that one of L lines can have.
    The papers' kappas of 4 and more would open none of 16 lines.
    support (ours): a line must cross more than this share of rows; corner means are high by chance.
    blocks (ours): sizes of column blocks, each with its own lines. As numbers grow, the first
    operand moves away from the source's end, but its lines keep their offsets in its block.
    Verticals open only in a block's first column, as other columns of a number mean nothing."""
    m, found = attention.shape[1], []
    parts = attention.split(blocks or [attention.shape[2]], 2)
    for group in groups:
        places, values = [], []
        for direction in group:
            for block, part in enumerate(parts):
                if direction < 0:
                    part = part.flip(2)
                lines = {offset: part.diagonal(offset, 1, 2)
                         for offset in range(1 - m, part.shape[2])}
                if direction == 0:
                    lines = dict(enumerate(part.unbind(2)))
                for offset, line in lines.items():  # (H, elements)
                    if line.shape[1] > support * m:
                        places.append((direction, block, offset))
                        values.append(line.sum(1) if total else line.mean(1))
        d = torch.stack(values, 1)  # (H, L)
        sigma, mu = torch.std_mean(d, 1, correction=0, keepdim=True)
        unit = sigma * math.sqrt(len(places) - 1) if of_largest else sigma
        threshold = mu + kappa * unit + 1e-5 * mu.abs()  # lines of equal mean differ by rounding
        bias, z = d - d.amax(1, keepdim=True), (d - mu) / sigma
        for h, l in (d > threshold).nonzero().tolist():
            direction, block, offset = places[l]
            if direction != 0 or offset == 0 or not blocks:
                line = Line(h, direction, block, offset, bias[h, l].item(), z[h, l].item())
                found.append(line)
    return found

def lay_out(lines, H, M, blocks, causal=False):
    """Extend lines to M rows and blocks of these sizes -> OpenKeys: one key per line of a head,
    closed (-inf) in rows where the line leaves its block. Where lines of a head cross, the greater
    bias counts. A first key at column 0, always closed here, is for `fill_empty` to open in rows
    without others. causal: no row sees later columns. Source: v2, Eq. 1 (cases), App. E.1."""
    rows = torch.arange(M)
    keys = [[(0 * rows, torch.full((M,), -INF))] for _ in range(H)]  # (column, value) (M,) each
    for line in sorted(lines, key=lambda line: -line.bias):
        size = blocks[line.block]
        column = line.offset + abs(line.direction) * rows
        inside = (column >= 0) & (column < size)
        if line.direction < 0:
            column = size - 1 - column
        column = sum(blocks[:line.block]) + column
        if causal:
            inside &= column <= rows
        keys[line.head].append((column * inside, torch.where(inside, line.bias, -INF)))
    K, filled = max(map(len, keys)), []
    for own in keys:
        filled += own + own[:1] * (K - len(own))
    columns, values = (torch.stack(x).view(H, K, M).mT for x in zip(*filled))  # (H, M, K)
    same = columns[..., None] == columns[..., None, :]  # (H, M, K, K)
    again = (same & (values[..., None, :] > -INF)).tril(-1).any(3)  # open in an earlier key
    return OpenKeys(columns, values.masked_fill(again, -INF))

def dense_bias(keys, N):
    """OpenKeys -> bias (H, M, N)."""
    closed = keys.values.new_full((*keys.values.shape[:2], N), -INF)
    return closed.scatter_reduce(2, keys.columns, keys.values, "amax")

def fill_empty(bias, rules):
    """Set 0 in fully closed rows of a bias (H, M, N) or of OpenKeys values (H, M, K): by our rules
    at key 0, the same at every length; by others at all keys, as in heads without lines."""
    empty = bias.isneginf().all(2, keepdim=True)
    if rules == "ours":
        empty = empty & (torch.arange(bias.shape[2]) == 0)
    return bias.masked_fill(empty, 0)

def abc_bias(attention, M, N, rules="ours", blocks=None, **changes):
    """Attention (H, m, n) of a model that interpolates -> bias (H, M, N): d_l - d_max along its
    extended lines, -inf elsewhere. Source: v1, Sec. 5, step 2; v2, App. D, step 2. This is for
    other models; a run calls `find_lines` and `lay_out` for each layer. Average attention over
    examples but not heads (nn.MultiheadAttention: average_attn_weights=False). In self-attention,
    add `causal_bias(M)`. rules: a key of RULES; `changes` override its arguments. blocks: list of
    (size now, size then), see `find_lines`; one block by default. Raises: ValueError."""
    if attention.dim() != 3 or not attention.isfinite().all():
        raise ValueError(f"attention is (H, m, n) and finite. Got {attention.shape}.")
    H, m, n = attention.shape
    now, then = zip(*(blocks or [(n, N)]))
    if (sum(now), sum(then)) != (n, N):
        raise ValueError(f"blocks add up to {n} and {N}. Got {blocks}.")
    lines = find_lines(attention.cpu(), blocks=blocks and now, **(RULES[rules] | changes))
    return fill_empty(dense_bias(lay_out(lines, H, M, then), N), rules).to(attention)

@torch.no_grad()
def collect_attention(model, source, target):
    """Average attention over the correctly answered examples: source (B, S), target (B, T + 1) ->
    self (n_layer, H, T, T), cross (n_layer, H, T, S). Source: v1, Sec. 5; v2, App. D. Differs: as
    in the authors' code, weights are averaged, not scores. Raises: RunFailed if none is correct."""
    means, hooks = [], []

    def watch(module, inputs, outputs):
        means.append(outputs[1].mean(0).cpu())  # of weights (B, H, T, S)

    right = right_tokens(model, source, target).all(1)
    if not right.any():
        raise RunFailed("the model answers no example correctly; raise --steps")
    for module in model.decoder.modules():
        if isinstance(module, MultiHeadAttention):
            hooks.append(module.register_forward_hook(watch))
    model(source[right], target[right, :-1])
    for hook in hooks:
        hook.remove()
    return torch.stack(means[0::2]), torch.stack(means[1::2])  # self, cross, self, ...

def column_blocks(task, S):
    """Sizes of the blocks of S source columns, e.g. of `$0123|+0748|&` and `$0123|*|7|&`: a number
    and the symbol on its left are one block, and every other column is a block of its own."""
    kinds = TASKS[task].operands
    numbers, others = kinds.count("number"), 1 + 2 * kinds.count("digit")
    return [(S - others) // numbers] * numbers + [1] * others

def calibrate(config, attention, kappa):
    """Averaged attention (self (n_layer, H, T, T), cross (n_layer, H, T, S)) -> list of Line. Under
    our rules, each layer has its own lines above `kappa`: (1, 1) in self-attention, (1, 0) and
    (1, -1) in blocks of cross-attention. Under others, all use the last layer's (authors' code: the
    third's). Only rows that training fills count (authors' code: 6). Source: v2, App. D."""
    rows, found, ours = TASKS[config.task].width + 1, [], config.rules == "ours"
    cross_rule = RULES[config.rules]
    self_rule = cross_rule | SELF_RULES.get(config.rules, {})
    if ours:
        blocks = column_blocks(config.task, attention[1].shape[3])
        self_rule = cross_rule | dict(kappa=kappa, groups=((1,),))
        cross_rule = cross_rule | dict(kappa=kappa, groups=((0,), (-1,)), blocks=blocks)
    for layer in range(config.n_layer):
        for kind, maps, rule in zip(("self", "cross"), attention, (self_rule, cross_rule)):
            for line in find_lines(maps[layer if ours else -1][:, :rows], **rule):
                bias = round(line.bias, 2)  # Differs: rounded, as finer differences hardly matter
                found.append(line._replace(layer=layer, attention=kind, bias=bias))
    return found

class CalibratedBias(nn.Module):
    """A run's bias, made of its lines, which are part of the state_dict. Source: v2, Eq. 2. By our
    rules it is sparse in evaluation above 100 rows."""
    def __init__(self, config, lines=()):
        super().__init__()
        self.config, self.lines = config, list(lines)

    def get_extra_state(self):
        return [tuple(line) for line in self.lines]

    def set_extra_state(self, lines):
        self.lines = [Line(*line) for line in lines]

    def forward(self, layer, kind, T, S):
        """-> bias (H, T, S) or OpenKeys; None in an encoder."""
        if kind == "encoder":
            return None
        ours, blocks = self.config.rules == "ours", [S]
        if ours and kind == "cross":
            blocks = column_blocks(self.config.task, S)
        lines = [line for line in self.lines if (line.attention, line.layer) == (kind, layer)]
        keys = lay_out(lines, self.config.n_head, T, blocks, causal=kind == "self")
        if ours and T > 100 and not self.training:
            return OpenKeys(keys.columns, fill_empty(keys.values, "ours"))
        return fill_empty(dense_bias(keys, S), self.config.rules)

# 6. Proof -----------------------------------------------------------------------------------------
# A calibrated model with one decoder layer, no encoder and no positions can be proved exact at
# every length, because its rows can see only finitely many different inputs. The same is true of a
# model with a fixed window if it has no positions, or positions that repeat.
#
# Row t writes digit t of the answer, and the last row END. The output of a row depends only on its
# *window*: the token before it and, for each head, the share of the weights that the bias gives to
# each token, as scores depend on tokens alone. An anti-diagonal shows the digit at place t + offset
# or the symbol before it; a vertical, a marker or single digit; a diagonal, an earlier token.
#
# Let the places that a row sees span `reach` places. By the definition of a task, the places below
# this span matter only through the rest that they hand on, and those above it only because the
# final rest must be 0. After `below` places, counted from the last one up, the set of rests that
# can be handed on no longer changes; after `above` places, counted from the headroom down, the set
# of rests from which the final rest can be 0 no longer changes. So all rows that stand like this
#
#     highest place: headroom zeros | at least `above` places | the span | at least `below` places
#
# see the same windows, whatever the width, and a number of `below + reach + above + headroom`
# places has one of them. For addition these are 1 + 2 + 0 + 1 = 4 places; training numbers have 7.
# A row of a longer number with too few places on one side has enough on the other, and sees what
# the row equally far from that end sees in this number. So all windows occur at widths up to this
# one or, if positions repeat after p rows, at p widths from this one on.
#
# Induction: if the tokens before row t are right, row t sees one of these windows; if the model is
# right on every window, so is row t. Hence greedy decoding is right at any length. At other widths,
# sums are taken in another order, which changes logits of about 10 by about 1e-5. So the right
# token must lead by MARGIN and by a thousandth of the largest logit.

MARGIN = 0.5  # lead, in logits, that the right token must have
TOO_MANY = 2 ** 24  # limit on the number of states that one place can lead to
KAPPAS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)  # tried in this order

def views_of_rows(bias, period, source, target, rows):
    """What rows [R] see of questions, source (B, S), target (B, T + 1) -> numbers (B, R, L), equal
    where a model with this bias sees the same: the token before the row, then, for each head and
    token, the share of the weights that the bias alone would give to keys with this token. Tokens
    include their position modulo `period`, counted from the end in a source."""
    T, S = target.shape[1] - 1, source.shape[1]
    before = target[:, :-1] * period + torch.arange(T) % period
    source = source * period + torch.arange(S).flip(0) % period
    parts = [before[:, rows, None]]
    for kind, tokens in ("self", before), ("cross", source):
        values = bias(0, kind, T, tokens.shape[1])[:, rows]  # (H, R, N)
        opened = values.amax((0, 1)) > -INF  # only columns open in some row, to save time
        shares = values[:, :, opened].double().softmax(2)
        tokens = F.one_hot(tokens[:, opened], len(VOCAB) * period).double()
        parts.append(torch.einsum("hrn,bnv->brhv", shares, tokens).flatten(2).round(decimals=9))
    return torch.cat(parts, 2)

class Windows:
    """The windows in the questions added so far, for models with these lines or, if lines is None,
    with the method's fixed window. seen: window -> the token to write and a question that shows it.
    questions: those that showed a new window, in chunks of source (B, S), target (B, T + 1). clash:
    two questions that look the same to a row that must write different tokens; if there is none,
    windows determine the answer. why: the reason if there is no proof."""
    def __init__(self, config, lines=None, pool=()):
        self.period = METHODS[config.method].period
        self.bias = bind(METHODS[config.method].bias, config)
        if lines is not None:
            self.bias = CalibratedBias(config, lines)  # in training mode, so dense
        self.seen, self.questions, self.clash, self.why = {}, [], [], ""
        for source, target in pool:
            self.add(source, target, list(range(target.shape[1] - 1)))

    def add(self, source, target, rows):
        """Add what rows [R] see, each with the first question that shows it; stop at a clash."""
        views = views_of_rows(self.bias, self.period, source, target, rows).numpy()
        tokens, new = target[:, 1:][:, rows].tolist(), []
        for n in range(len(source)):
            for view, token in zip(views[n], tokens[n]):
                window = view.tobytes()
                if window not in self.seen:
                    self.seen[window] = token, source[n], target[n]
                    new.append(n)
                want, *question = self.seen[window]
                if token != want:
                    self.clash = [(source[n, None], target[n, None]), [x[None] for x in question]]
                    self.why = (f"{decode(source[n])} and {decode(question[0])} look the same to a "
                                f"row that must write {VOCAB[token]} or {VOCAB[want]}")
                    return
        if new:
            self.questions += zip(source[new].split(500), target[new].split(500))

def places_until_stable(possible, follow):
    """The states possible at a place, (n_state,) bool, and a function that makes those of the next
    place -> number of places until they stay the same. Raises: RunFailed after 100 places."""
    for n in range(100):
        following = follow(possible)
        if following.equal(possible):
            return n
        possible = following
    raise RunFailed("the rests that a place can get do not settle within 100 places")

class Machine:
    """A task's `step` as tables. A state is a rest and the values of the single digits, which are
    the same at every place. A column is a digit of each number, all zeros in column 0. digits
    (n_state, n_column, n): all digits at a place. token (n_state, n_column): the digit written.
    after (n_state, n_column): index of the next state. For n + 1, states 0 and 1 are rests 0 and 1,
    token[1] is 1, 2, ..., 9, 0, and after[1] is 0, ..., 0, 1. Raises: RunFailed above 1,000
    rests."""
    def __init__(self, spec):
        self.spec, n = spec, len(spec.operands)
        n_column = spec.base ** spec.operands.count("number")
        n_single = spec.base ** spec.operands.count("digit")
        states = spec.first * n_single + torch.arange(n_single)  # rest * n_single + single digits
        while True:  # until all states are known
            rests, singles = states[:, None] // n_single, states[:, None] % n_single
            self.digits = to_digits(singles * n_column + torch.arange(n_column), n, spec.base)
            self.token, after = spec.step(rests.repeat(1, n_column), self.digits)
            after = after * n_single + singles
            known, states = len(states), torch.cat([states, after.flatten()]).unique()
            if len(states) == known:
                break
            if len(states) > 1000 * n_single:
                raise RunFailed("more than 1,000 rests can be handed on")
        self.rests, self.after = rests.flatten(), torch.searchsorted(states, after)
        self.begins = self.rests == spec.first

    def places_to_settle(self):
        """-> `below` and `above` of the proof. Raises: RunFailed if no such numbers exist."""
        ends = (self.rests == 0) | (not self.spec.headroom)
        for _ in range(self.spec.headroom):
            ends = ends[self.after[:, 0]]  # a zero in front
        n = torch.arange(len(ends))
        below = places_until_stable(self.begins, lambda states: torch.isin(n, self.after[states]))
        return below, places_until_stable(ends, lambda states: states[self.after].any(1))

    def questions(self, width, digits, tokens):
        """-> digits (B, W, n), whose valid questions show all windows of a row that sees the digits
        and tokens at these places. From the last place on, every partial question is extended by
        every column. If several look alike to the row and are in the same state, only one is kept;
        where digits are unseen, only one of the columns with the same effect is tried. Raises:
        RunFailed if there are too many."""
        n_state, n_column, n = self.digits.shape
        state = self.begins.nonzero().flatten()
        look = 0 * state  # identifies what the row has seen so far
        numbers = torch.zeros(len(state), 0, n, dtype=torch.int64)
        for place in range(width):
            columns = torch.arange(n_column)
            if place >= width - self.spec.headroom:
                columns = columns[:1]
            elif place not in digits:
                effects = torch.cat([self.after, self.token][:1 + (place in tokens)])
                columns = first_of_each(effects.T)
            if len(state) * len(columns) > TOO_MANY:
                raise RunFailed(f"a place leads to more than {TOO_MANY:,} states")
            was = torch.arange(len(state)).repeat_interleave(len(columns))
            before, column = state[was], columns.repeat(len(state))
            token, after = self.token[before, column], self.after[before, column]
            look = look[was] * n_column + column * (place in digits)
            look = look * self.spec.base + token * (place in tokens)
            look = look.unique(return_inverse=True)[1]
            kept = first_of_each(look * n_state + after)
            added = self.digits[before[kept], column[kept]]
            numbers = torch.cat([numbers[was[kept]], added[:, None]], 1)
            look, state = look[kept], after[kept]
        return numbers

def has_windows(config):
    """Whether the output of a row depends only on its window, so that a proof is possible."""
    method = METHODS[config.method]
    windowed = method.calibrated or method.bias is window
    placed = method.scores or (method.position and method.period == 1)
    simple = config.n_layer == 1 and not config.n_encoder and not TASKS[config.task].label
    return config.rules == "ours" and windowed and not placed and simple

def enumerate_windows(config, lines=None):
    """-> Windows: all, or only those up to a clash; `why` says why they cannot be enumerated."""
    spec, windows = TASKS[config.task], Windows(config, lines)
    if not has_windows(config):
        windows.why = "a proof needs windows, one layer, our rules, no encoder, positions or label"
        return windows
    # Places, relative to t, whose digits row t sees, and those whose tokens it sees or writes. A
    # diagonal of self-attention shows row t the token that row t + offset - 1 has written.
    if lines is None:  # of window_bias with w = 1: two digits and two tokens
        digits, tokens = {0, -1}, {0, -1, -2}
    else:
        digits = {x.offset for x in lines if x.attention == "cross" and x.direction == -1}
        tokens = {0, -1} | {x.offset - 1 for x in lines if x.attention == "self"}
    reach = max(digits | tokens) - min(digits | tokens) + 1
    try:
        machine = Machine(spec)
        widest = max(config.widths[0], sum(machine.places_to_settle()) + reach + spec.headroom)
        for width in range(config.widths[0], widest + windows.period):
            for row in range(width + 1):
                numbers = machine.questions(width, {row + place for place in digits},
                                            {row + place for place in tokens})
                windows.add(*arrange(config.task, numbers, config.align), [row])
                if windows.clash:
                    return windows
            LOG.info(f"{len(windows.seen):,} windows in numbers of up to {width} digits")
    except RunFailed as error:
        windows.why = str(error)
    return windows

@torch.no_grad()
def prove(model, windows):
    """-> {"proved", "why" (if not)} and, if all windows are known, "windows" and "margin": the
    least lead, in logits, of a right token over all others. Checking ends after the first chunk of
    500 questions with one below MARGIN. Where logits exceed 500, the lead must exceed 0.1% of the
    largest, and the excess of this over MARGIN is subtracted from the margin. NaN fails."""
    if windows.why:
        return dict(proved=False, why=windows.why)
    model.eval()
    margin, why = INF, "" if windows.questions else "there are no questions"
    for source, target in windows.questions:
        logits, want = model(source, target[:, :-1]).cpu(), target[:, 1:, None]  # (B, T, V)
        lead = logits.gather(2, want) - logits.scatter(2, want, -INF).amax(2, keepdim=True)
        needed = (logits.abs().amax(2, keepdim=True) / 1000).clamp(min=MARGIN)
        least = (lead - needed + MARGIN).nan_to_num(-1e9).amin((1, 2))  # (B,)
        margin = min(margin, least.min().item())
        if margin < MARGIN:
            why = f"{decode(source[least.argmin()])} is wrong or in doubt"
            break
    return dict(proved=not why, why=why, windows=len(windows.seen), margin=round(margin, 3))

def drop_lines(config, lines, pool):
    """Lines that determine the answers to a pool of questions -> a minimal subset that still does.
    The weakest are dropped first, each from all heads at once. The main diagonal of self-attention
    is always kept: its token is in every window anyway, but is learned more slowly without it."""
    strength = {line.path: line.z for line in sorted(lines, key=lambda line: line.z)}  # largest
    strength.pop(("self", 1, 0, 0), None)
    for path in sorted(strength, key=strength.get):
        fewer = [line for line in lines if line.path != path]
        if not Windows(config, fewer, pool).clash:
            lines = fewer
    return lines

def choose_lines(config, attention):
    """Averaged attention -> kappa, lines (a minimal set that determines the answer), Windows.
    Kappa is lowered until the open lines determine the answers to a pool of questions. Superfluous
    lines are dropped, and all windows are enumerated; questions that clash join the pool. Without
    `has_windows`, all lines at the kappa of RULES are kept. Raises: RunFailed."""
    if not has_windows(config):
        kappa = RULES[config.rules]["kappa"]
        lines = calibrate(config, attention, kappa)
        return kappa, lines, enumerate_windows(config, lines)
    pool = []
    with seeded(config.seed, "pool"):
        for draw in draw_exact, draw_hard:
            pool += [draw_questions(config, draw, length, 300) for length in (6, 8)]
    for kappa in KAPPAS:
        opened = calibrate(config, attention, kappa)
        windows = Windows(config, opened, pool)
        while not windows.clash:
            lines = drop_lines(config, opened, pool)
            windows = enumerate_windows(config, lines)
            if not windows.clash:
                return kappa, lines, windows
            pool += windows.clash
            windows = Windows(config, opened, pool)
    raise RunFailed(f"no lines determine the answer: {windows.why}")

# 7. Training and evaluation -----------------------------------------------------------------------
# A run is determined by its options. It produces named parts, such as the weights of a model or its
# proof, and saves them on the way, so that an interrupted run resumes where it stopped.

def flag(name):
    return "--" + name.replace("_", "-")

def option(help, choices=None, least=1, default=None, **kinds):
    """A field of Config. choices: valid values. least: the smallest. kinds: the default for each
    kind of model that has the option, None if derived later. Without kinds, all models have it."""
    metadata = dict(help=help, choices=choices, least=least, kinds=kinds)
    return dataclasses.field(default=default, metadata=metadata)

def accept(field, value):
    """The value of a field, or its text, e.g. "5,6" or "[5, 6]" -> text, bool, fraction up to 1,
    integer up to 10^9, or tuple of such integers. Raises: BadInput naming the option."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    if choices and value not in list(choices):
        raise BadInput(f"{flag(field.name)}: {value!r} is none of {list(choices)}")
    if choices or field.type is str:
        return field.type(value)  # not a NumPy string, which checkpoints refuse
    read, most = (float, 1) if field.type is float else (int, 10 ** 9)
    try:
        numbers = tuple([read(text) for text in str(value).strip("()[],").split(",")])
        if not least <= min(numbers) <= max(numbers) <= most:
            raise ValueError
        if field.type is not tuple:
            [numbers] = numbers
        return numbers
    except ValueError:
        raise BadInput(f"{flag(field.name)}: {value!r} is invalid") from None

SIZES = {"small": (3, 64, 4), "base": (6, 512, 8), "standard": (6, 1024, 16),
         "large": (10, 1024, 16)}  # n_encoder, d_model and n_head of encoders
# v2, App. B and D, with batch, steps and width of addition in its code (a tenth for retraining).
# Jelassi, Sec. 2.2: 15,000 epochs of 5,000 examples; its multiplication needs --second-digits 3.
PAPERS = {
    "seq2seq": dict(rules="v2", n_encoder=1, n_layer=6, n_head=8, d_model=128, dropout=0.3,
                    lr=1e-5, batch=512, steps=460_000, retrain_steps=46_000, width=61,
                    samples=10_000),
    "encoder": dict(size="standard", dropout=0.1, lr=1e-4, steps=2_343_750, samples=10_000,
                    lengths=(5, 6, 10, 15, 20))}

@dataclasses.dataclass
class Config:
    """Options of a run, as values or text. None becomes the default of the preset, the method, the
    kind of model or the task, in this order of precedence. To change one, use dataclasses.replace:
    it derives `kind`, `align` and `widths` anew, but keeps defaults already filled in. Differs: the
    defaults are small and fast; the paper preset has the sources' values. Raises: BadInput."""
    task: str = option("what to learn, see --list", default="successor")
    model: str = option("what learns it, see --list")
    preset: str = option("paper: as published", ("fast", "paper"), seq2seq="fast", encoder="fast")
    seed: int = option("seed of all random draws", least=0, default=0)
    method: str = option("position scheme, see --list", METHODS, seq2seq="abc", encoder="rpe-k")
    rules: str = option("rules of calibration: ours, v1, v2 or v2's code", RULES, seq2seq="ours")
    size: str = option("defaults of n_encoder, d_model and n_head", SIZES, encoder="small")
    n_encoder: int = option("encoder layers (universal: passes)", least=0, seq2seq=0, encoder=None)
    n_layer: int = option("decoder layers", seq2seq=1)
    n_head: int = option("attention heads", seq2seq=4, encoder=None)
    d_model: int = option("width of the model", seq2seq=64, pairs=128, encoder=None)
    d_head: int = option("width of queries and keys", pairs=32)
    d_vocab: int = option("number of different integers, at least 4", least=4, pairs=16)
    dropout: float = option("dropout probability", least=0, seq2seq=0.0, encoder=0.0)
    clip: int = option("relative tables have offsets from -clip to clip", seq2seq=16, encoder=None)
    lr: float = option("peak learning rate", least=0, seq2seq=None, pairs=1e-3, encoder=3e-3)
    batch: int = option("batch size", seq2seq=None, pairs=300, encoder=32)
    steps: int = option("steps of the initial training", seq2seq=None, pairs=6000, encoder=None)
    retrain_steps: int = option("steps of retraining or fine-tuning", seq2seq=None, encoder=1000)
    width: int = option("digits of every number, by default as needed", seq2seq=None, encoder=None)
    lengths: tuple = option("lengths to test, in digits or in integers of a sequence",
                            seq2seq=(6, 10, 20, 60), pairs=(5,), encoder=(5, 6, 10))
    samples: int = option("questions per length; encoder-decoders: at most 200 above 100 digits",
                          seq2seq=1000, pairs=10_000, encoder=1000)
    train_digits: int = option("maximum digits of training numbers", encoder=5)
    second_digits: int = option("maximum digits of the second operand", encoder=None)
    modulus: int = option("compute answers modulo this number", encoder=None)
    prime: int = option("number of long questions among the 5,000 in all", least=0, encoder=0)
    prime_lengths: tuple = option("lengths to prime; by default the longest tested", encoder=None)
    finetune: int = option("number of long questions for fine-tuning afterwards", encoder=None)
    dummy: bool = option("put a dummy token before each sequence", (False, True), pairs=False)

    def __post_init__(self):
        models = [name for name, tasks in TASKS_OF.items() if self.task in list(tasks)]
        self.model = self.model or "".join(models[:1])
        if self.model not in models:
            raise BadInput(f"--task: {self.task!r} is learned by {', '.join(models) or 'no model'}")
        self.kind = "encoder" if self.model == "universal" else self.model  # repeats one layer
        usual = {}
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), field.metadata["kinds"]
            usual[field.name] = kinds.get(self.kind)
            if value is None:
                continue
            if kinds and self.kind not in kinds:
                raise BadInput(f"{flag(field.name)}: not an option of {self.task}, {self.model}")
            setattr(self, field.name, accept(field, value))
        if self.kind == "seq2seq":
            usual |= METHODS[self.method or usual["method"]].defaults
        if self.preset == "paper":
            usual |= PAPERS[self.kind]
        self.fill(**usual)
        if self.kind == "seq2seq":
            self.settle_seq2seq()
        elif self.kind == "encoder":
            self.settle_encoder()
        if self.method:
            rotated = METHODS[self.method].scores is rotary
            parts = self.n_head * (1 + rotated)  # rotated heads need pairs of channels
            if self.d_model % parts:
                raise BadInput(f"--n-head: {parts} does not divide --d-model {self.d_model}")

    def fill(self, **values):
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def settle_seq2seq(self):
        spec, method, digits = TASKS[self.task], METHODS[self.method], VOCAB.index("+")
        signs = set(VOCAB[digits:]) - {START, END, PAD}
        ordered = re.fullmatch("number( number)*( digit)*", " ".join(spec.operands))
        signed = len(spec.operands) == 1 or spec.sign in signs
        based = isinstance(spec.base, int) and 2 <= spec.base <= digits
        if not (ordered and signed and based):
            raise BadInput(f"--task: {self.task} needs a base of 2 to {digits}, operands that are "
                           f"numbers, then digits, and between them a sign of {sorted(signs)}")
        self.fill(lr=spec.lr, batch=spec.batch, steps=spec.steps * method.steps,
                  retrain_steps=spec.retrain_steps)
        self.align = method.align and len(spec.operands) == 2
        self.widths = range(spec.width, spec.width + method.n_width)  # of training numbers
        if self.width:
            self.widths = [self.width]
        if not spec.width <= max(self.widths) <= 2000:
            raise BadInput(f"--width: {self.width} is not {spec.width} to 2,000")
        far = method.calibrated and self.rules == "ours" and not self.n_encoder
        if max(self.lengths) > 2000 and not far:
            raise BadInput("--lengths: more than 2,000 needs ABC by our rules without an encoder")

    def settle_encoder(self):
        spec, (n_encoder, d_model, n_head) = ENCODER_TASKS[self.task], SIZES[self.size]
        self.fill(n_encoder=n_encoder, d_model=d_model, n_head=n_head, steps=spec.steps,
                  second_digits=spec.second_digits, prime_lengths=(max(self.lengths),))
        needed = max(*self.lengths, *self.prime_lengths, self.train_digits, self.second_digits or 1,
                     len(str(self.modulus or 1)) // 2)
        # Differs: two more, so that PAD follows even the longest tested numbers, as in training.
        self.fill(width=needed + 2 * (self.preset == "fast"))
        self.fill(clip=2 * self.width)
        if not needed <= self.width <= 2000:
            raise BadInput(f"--lengths or others need --width {needed} to 2,000, not {self.width}")
        if not self.n_encoder:
            raise BadInput("--n-encoder: an encoder needs a layer")
        if self.method in ("abc", "alibi-decoder") or METHODS[self.method].align:
            raise BadInput(f"--method: {self.method} needs a decoder")

class Optimizer:
    """Muon for the matrices of layers and Adam, at a quarter of Muon's rate, for all else; in the
    paper preset and for pairs, Adam for all. `share`, a fraction of the peak rate, is set before
    each step. A CUDA graph refers to rates and state, so they are tensors and are restored in
    place. This is not a torch.optim.Optimizer, which takes a second to import. Muon: momentum,
    orthogonalized by five Newton-Schulz steps and scaled to the size of Adam's updates; matrices of
    one shape are stacked. Source: Jordan et al. 2024; scale, 0.2 sqrt(max(rows, columns)): Liu et
    al. 2025. Adam: Kingma and Ba 2015; weight decay: Loshchilov and Hutter 2019. Differs: the
    sources use Adam, Jelassi with weight decay (AdamW) of 1e-5 to 1e-2."""
    def __init__(self, model, config):
        self.lr, self.decay = config.lr, 0.01 if config.kind == "encoder" else 0.0  # not of Muon
        self.beta = 0.98 if config.kind == "seq2seq" else 0.999
        self.groups, self.values = {(): []}, []  # weights by shape, () for those of Adam
        for name, weight in model.named_parameters():
            # Matrices of encoder.0, decoder.0, ..., except those of `scores` modules.
            layered = weight.dim() == 2 and "coder." in name and ".scores." not in name
            shape = weight.shape if layered and config.preset == "fast" else ()
            self.groups.setdefault(shape, []).append(weight)
        for shape, weights in self.groups.items():
            vector = nn.utils.parameters_to_vector(weights).detach()
            nn.utils.vector_to_parameters(vector, weights)  # makes the weights views of the vector
            self.values.append(vector.view(-1, *shape))
        self.share, self.graphs = vector.new_ones(()), {}  # CUDA graphs by the shapes of a batch
        self.state = [torch.zeros_like(x) for x in (self.share, self.values[0], *self.values)]

    @torch.no_grad()
    def step(self):
        steps, square, *means = self.state  # square of Adam's group, a mean of each group
        steps.add_(1)
        for weights, values, mean in zip(self.groups.values(), self.values, means):
            grad = nn.utils.parameters_to_vector([x.grad for x in weights]).view_as(values)
            rate = self.share * self.lr
            if values.dim() == 3:  # Muon
                mean.lerp_(grad, 0.05)
                update = orthogonal(grad.lerp(mean, 0.95))  # Nesterov
                rate = rate * 0.2 * math.sqrt(max(values.shape[1:]))
            else:
                mean.lerp_(grad, 0.1)
                square.lerp_(grad * grad, 1 - self.beta)
                spread = (square / (1 - self.beta ** steps)).sqrt() + 1e-8
                update = mean / (1 - 0.9 ** steps) / spread + self.decay * values
                if len(self.groups) > 1:
                    rate = rate / 4
            values.sub_(rate * update)

def orthogonal(x):
    """Matrices (n, a, b) -> approximately the nearest semi-orthogonal ones."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    x = F.normalize(x, dim=(1, 2), eps=1e-7)
    for _ in range(5):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, square, x, beta=3.4445)
    return x

def take_step(model, optimizer, source, target):
    """-> the loss: cross-entropy of target (B, T + 1). Differs: gradients are clipped at norm 1."""
    model.train()
    model.zero_grad()
    logits = model(source, target[:, :-1]).flatten(0, 1).float()
    loss = F.cross_entropy(logits, target[:, 1:].flatten().to(logits.device))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()

def graphed_step(model, optimizer, source, target):
    """`take_step`, on CUDA as a graph: hundreds of kernel launches take about 9 ms, a replay 1 ms.
    The first batch of a shape is an ordinary step, as warm-up. The second is captured, which runs
    nothing, and then replayed. Later ones are copied into the graph's inputs and replayed, so each
    batch is trained on once. A replay overwrites the loss."""
    device, graphs, shape = optimizer.share.device, optimizer.graphs, (source.shape, target.shape)
    if device.type != "cuda" or shape not in graphs:
        graphs[shape] = None
        return take_step(model, optimizer, source, target)
    if graphs[shape] is None:
        graph = torch.cuda.CUDAGraph()
        static_source, static_target = source.to(device), target.to(device)
        with torch.cuda.graph(graph):
            loss = take_step(model, optimizer, static_source, static_target)
        graphs[shape] = graph, static_source, static_target, loss
    graph, static_source, static_target, loss = graphs[shape]
    static_source.copy_(source)
    static_target.copy_(target)
    graph.replay()
    return loss

def write(folder, name, data):
    """Write a file by renaming, so it is never half-written. On a full disk, the run goes on."""
    path = Path(folder, name)
    beside = Path(f"{path}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        LOG.error(f"lengen: {path} cannot be written: {error.strerror}")
        beside.unlink(missing_ok=True)

@dataclasses.dataclass
class Run:
    """Options and named parts, saved in checkpoint.pt if there is a folder."""
    config: Config
    folder: Path = None
    parts: dict = dataclasses.field(default_factory=dict)
    device: torch.device = torch.device("cpu")

    def keep(self, name, part):
        self.parts[name] = part
        self.save()

    def save(self):
        """Save all as plain values and tensors, which load without running code."""
        if self.folder:
            buffer, config = io.BytesIO(), dataclasses.asdict(self.config)
            torch.save(dict(config=config, vocab=VOCAB, parts=self.parts), buffer)
            write(self.folder, "checkpoint.pt", buffer.getvalue())

def train(run, model, name, data, windows=None):
    """Train a model and keep the part {"weights", "steps", "seconds", "curve"}, or load it. A part
    with an "optimizer" is unfinished; its training resumes. data: `steps`; `batch(step)` -> source
    (B, S), target (B, T + 1); `rate(step)` -> share of the peak rate; `check(model)` -> list. Every
    100 steps, the curve gets [step, loss, *check]. windows: every 25 steps from 50 on, training
    stops if they prove the model. Raises: RunFailed if the loss is not finite."""
    optimizer = Optimizer(model, run.config)
    part = run.parts.get(name, dict(steps=0, seconds=0.0, curve=[]))
    if part["steps"]:
        model.load_state_dict(part["weights"])
        if "optimizer" not in part:
            return
        for state, kept in zip(optimizer.state, part["optimizer"], strict=True):
            state.copy_(kept)
    told, curve, steps = time.perf_counter(), part["curve"], data.steps
    start = told - part["seconds"]
    for step in range(part["steps"] + 1, steps + 1):
        optimizer.share.fill_(data.rate(step))
        with seeded(run.config.seed, name, step):
            source, target = data.batch(step)
            loss = graphed_step(model, optimizer, source, target)
        last = step == steps
        if windows and step % 25 == 0 and step >= 50:
            last = prove(model, windows)["proved"] or last
        if step % 100 == 0 or last:
            curve.append([step, loss.item()] + data.check(model))
        if last or time.perf_counter() - told > SECONDS:
            if not loss.isfinite():  # waits for the GPU
                raise RunFailed(f"the loss is {loss.item()} at step {step} of {name}")
            told = time.perf_counter()
            LOG.info(f"{name}: step {step:,} of {steps:,}, loss {loss:.4f}, {told - start:.0f} s")
            part = dict(steps=step, seconds=round(told - start, 2), curve=curve,
                        weights=copy.deepcopy(model.state_dict()))
            if not last:
                part["optimizer"] = copy.deepcopy(optimizer.state)
            run.keep(name, part)
        if last:
            return

def new_model(run, model_class, config, name):
    """-> a model of this class on the run's device, initialized from the seed and `name`."""
    with seeded(config.seed, name):
        return model_class(config).to(run.device)

def evaluate(model, config):
    """Test at config.lengths -> {"rows", "seconds"}. A row counts exact answers, "correct" of "n",
    and has the accuracy of each digit, "places". With a decoder, the longest length up to 60 also
    has a "hard" set."""
    rows, start = [], time.perf_counter()
    for length in config.lengths:
        sets, n = {}, config.samples
        with seeded(config.seed, "test", length):
            if config.kind == "pairs":
                sets["random"] = draw_pairs(config, n, length)
            elif config.kind == "encoder":
                pairs = [draw_integers(config, length) for _ in range(n)]
                sets["random"] = arrange_encoder(config, pairs)
            else:
                if length > 100:
                    n = min(n, 200)  # they take long
                sets["random"] = draw_questions(config, draw_exact, length, n)
                if length == max([x for x in config.lengths if x <= 60], default=0):
                    sets["hard"] = draw_questions(config, draw_hard, length, n)
        for name, (source, target) in sets.items():
            right = right_tokens(model, source, target)
            digit = target[:, 1:] < VOCAB.index("+")
            places = ((right & digit).sum(0) / digit.sum(0))[digit.any(0)]
            rows.append(dict(digits=length, set=name, correct=right.all(1).sum().item(),
                             n=len(right), places=[round(x, 4) for x in places.tolist()]))
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

class Numbers:
    """Training data of an encoder-decoder, checked on 1,000 held-out questions. After 30 warm-up
    steps, the rate falls, over the last 40% of the initial training or throughout retraining; in
    the paper preset it is constant. The initial training favors small numbers: at first, half are
    below 1.6% of the range. Differs: the sources draw uniformly and name no schedule."""
    def __init__(self, config, steps, first):
        self.config, self.steps, self.first = config, steps, first
        self.training, self.held_out = split_numbers(config.seed)

    def batch(self, step):
        power = 6 - 5 * step / self.steps if self.first else 1.0
        return training_batch(self.config, self.training, self.config.batch, power)

    def rate(self, step):
        if self.config.preset == "paper":
            return 1.0
        falling = 0.4 if self.first else 1.0
        return min(1.0, step / 30, (self.steps - step + 1) / (falling * self.steps))

    def check(self, model):
        with seeded(self.config.seed, "held-out"):
            source, target = training_batch(self.config, self.held_out, 1000)
        return [right_tokens(model, source, target).all(1).float().mean().item()]

def training_batch(config, numbers, B, power=1.0):
    """-> B questions, source and target, at one of the widths. power > 1 favors small numbers."""
    def draw(base, length, B):
        pick = (len(numbers) * torch.rand(B) ** power).long()
        return to_digits(numbers[pick], length, base)

    width = config.widths[int(torch.randint(len(config.widths), (1,)))]
    return draw_questions(config, draw, TASKS[config.task].width, B, width, distinct=False)

def learn_method(run):
    """Train by a method other than ABC, stopping early if the model can be proved -> proof."""
    config = run.config
    model, windows = new_model(run, Transformer, config, "model"), enumerate_windows(config)
    train(run, model, "model", Numbers(config, config.steps, first=True), windows)
    return prove(model, windows)

def learn_abc(run):
    """Train a model by ABC in five stages -> proof. Source: v1, Sec. 5; v2, App. D. Differs: small
    numbers come first; learning rates fall; kappa falls until windows determine the answer; lines
    are few; retraining starts from the vanilla model and ends with the proof."""
    config = run.config
    # 1. From random weights: a vanilla model learns the training numbers. It is never tested.
    plain = dataclasses.replace(config, method="vanilla", lengths=(6,))  # ABC's may exceed 2,000
    data = Numbers(plain, config.steps, first=True)
    vanilla = new_model(run, Transformer, plain, "vanilla")
    train(run, vanilla, "vanilla", data)
    # 2. From the vanilla model: its mean attention in right answers to 1,000 training questions.
    if "attention" not in run.parts:
        with seeded(config.seed, "attention"):
            source, target = training_batch(plain, data.training, 1000)
        run.keep("attention", collect_attention(vanilla, source, target))
    # 3. From the averaged attention: a minimal set of lines that determine the answer, and windows.
    kappa, lines, windows = choose_lines(config, run.parts["attention"])
    for attempt in 1, 2:
        # 4. From the vanilla weights, with queries and keys set to zero, so that the bias alone
        # determines attention. They stay zero, as the gradient of each has the other as a factor.
        # The second attempt, and the only one under the other rules, starts from random weights.
        name = f"attempt {attempt}"
        model = new_model(run, Transformer, config, name)
        model.bias.lines = lines
        if attempt == 1 and config.rules == "ours":
            model.load_state_dict(vanilla.state_dict(), strict=False)  # all but the lines
            for key, weight in model.named_parameters():
                if ".q." in key or ".k." in key:
                    nn.init.zeros_(weight)
        train(run, model, name,
              Numbers(config, attempt * config.retrain_steps, first=False), windows)
        if model.bias.lines != lines:  # resumed from a checkpoint with other lines
            lines = model.bias.lines
            windows = enumerate_windows(config, lines)
        # 5. From the retrained model and all windows: the proof.
        proof = prove(model, windows)
        if proof["proved"] or windows.why:
            break
    run.parts["model"] = run.parts.pop(name)
    proof |= dict(kappa=kappa, attempt=attempt, lines=[line._asdict() for line in lines])
    return proof

def ask(model, config, question):
    """A question, "123+748" or "123 + 748" -> "871". Raises: BadInput if it is not the task's."""
    spec = TASKS[config.task]
    operands = [text.strip() for text in question.split(spec.sign or None)]
    source, target = example(config.task, *operands, width=config.widths[0], align=config.align)
    text = decode(generate(model, encode(source)[None], len(target) - 1)[0])[1:]
    digits, end, _ = text.partition(END)
    if not end or not digits.isalnum():
        return f"no number; the model wrote {text!r}"
    if spec.headroom:
        return digits[::-1].lstrip("0") or "0"
    return digits[:max(map(len, operands))][::-1]  # one digit for each digit of the question

# 8. Consecutive pairs: one attention head, read completely ----------------------------------------
# Source: Pairs. Tokens are integers 0 .. V - 1; the label of n is 1 if n - 1 or n + 1 also occurs.
# One layer, one head, no feed-forward; no positions, norm or residual, as the source names none.

def draw_pairs(config, B, length):
    """-> source (B, length), preceded by a token V if config.dummy; target (B, 1 + length), a start
    token and the labels. Integers are drawn uniformly; Pairs does not say how to draw them."""
    tokens = torch.randint(config.d_vocab, (B, length))
    label = torch.zeros_like(tokens)
    for other in tokens.unbind(1):
        label |= ((tokens - other[:, None]).abs() == 1).long()
    if config.dummy:
        tokens = F.pad(tokens, (1, 0), value=config.d_vocab)
    return tokens, F.pad(label, (1, 0))

class PairsHead(nn.Module):
    """source (B, T), target -> logits (B, T, 2), 0 and z. Differs: an output bias of +5 makes every
    integer predict 1 at first; the larger embedding of the dummy lets it learn 0 quickly."""
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.d_vocab + config.dummy, config.d_model)
        nn.init.normal_(self.embedding.weight[:config.d_vocab], std=0.1)
        self.attention = MultiHeadAttention(config.d_model, 1, d_head=config.d_head)
        self.attention.out = nn.Linear(config.d_head, 1)
        nn.init.constant_(self.attention.out.bias, 5.0)

    def forward(self, source, target):
        x = self.embedding(source.to(self.embedding.weight.device))
        z = self.attention(x, x)[0][:, -target.shape[1]:]
        return F.pad(z, (1, 0))

def pairs_data(config):
    """Training data: sequences of five integers. Differs: the learning rate is constant; Pairs
    reduces it on a plateau (patience 100) and takes the best of several seeds."""
    return SimpleNamespace(batch=lambda step: draw_pairs(config, config.batch, 5),
                           steps=config.steps, rate=lambda step: 1.0, check=lambda model: [])

def learn_pairs(run):
    """Train on sequences of five integers. There is no proof."""
    model = new_model(run, PairsHead, run.config, "model")
    train(run, model, "model", pairs_data(run.config))

# 9. Encoders: one pass, relative positions, priming -----------------------------------------------
# Source: Jelassi. Digit t of the answer is read at token t. Numbers start with the highest digit
# and end in padding, so places align only at equal length. + and * replace its four signs.

def arrange_encoder(config, pairs):
    """Pairs of integers -> source (B, 2W + 1), target (B, 1 + n), e.g. "12@+39@" and "$51@@" for
    W = 3; START is not read. Source: Jelassi, Sec. 2.1 (which prints one PAD fewer)."""
    spec, W, sources, targets = ENCODER_TASKS[config.task], config.width, [], []
    longest = spec.answer(10 ** W - 1, 10 ** W - 1)
    if config.modulus:
        longest = str(config.modulus - 1)
    for a, b in pairs:
        answer = spec.answer(a, b)
        if config.modulus:
            answer = str(int(answer) % config.modulus).zfill(len(longest))
        sources.append(encode(str(a).ljust(W, PAD) + spec.sign + str(b).ljust(W, PAD)))
        targets.append(encode(START + answer.ljust(len(longest), PAD)))
    return torch.stack(sources), torch.stack(targets)

def draw_integers(config, length):
    """-> two positive integers, of up to `length` and up to second_digits digits."""
    second = config.second_digits or length
    return RANDOM.randrange(1, 10 ** length), RANDOM.randrange(1, 10 ** second)

class EncoderExamples:
    """Training data of an encoder: n_long long questions, and the first operands of n_short short
    ones, whose second operand is drawn anew each time. The curve has the share of exact answers to
    new questions of train_digits and of the longest prime_lengths (Figs. 3b, 4d). Differs: 100
    warm-up steps; draws with replacement; by default, equally many short numbers of each length."""
    def __init__(self, config, n_short, n_long, steps):
        self.config, self.steps = config, steps
        with seeded(config.seed, "examples", n_short, n_long):
            self.pairs = [(self.draw_short(config.train_digits), None) for _ in range(n_short)]
            for length in RANDOM.choices(config.prime_lengths, k=n_long):
                self.pairs.append(draw_integers(config, length))

    def draw_short(self, length):
        least = 0
        if self.config.preset == "fast":
            length = RANDOM.randint(1, length)
            least = length - 1
        return RANDOM.randrange(10 ** least, 10 ** length)

    def batch(self, step):
        pairs = []
        most = self.config.second_digits or self.config.train_digits
        for a, b in RANDOM.choices(self.pairs, k=self.config.batch):
            pairs.append((a, b or self.draw_short(most)))
        return arrange_encoder(self.config, pairs)

    def rate(self, step):
        return min(1.0, step / 100) * (1 + math.cos(math.pi * step / self.steps)) / 2

    def check(self, model):
        lengths = self.config.train_digits, max(self.config.prime_lengths)
        few = dataclasses.replace(self.config, lengths=lengths, samples=200)
        return [row["correct"] / row["n"] for row in evaluate(model, few)["rows"]]

def learn_encoder(run):
    """Train on short numbers and, with --prime, a few long ones; with --finetune, then test and
    train on long ones alone. There is no proof. Source: Jelassi, Secs. 2.2 and 5."""
    config = run.config
    name = "short numbers" if config.finetune else "model"
    model = new_model(run, Transformer, config, "model")
    data = EncoderExamples(config, 5000 - config.prime, config.prime, config.steps)
    train(run, model, name, data)
    if config.finetune:
        run.keep("before", evaluate(model, config))
        data = EncoderExamples(config, 0, config.finetune, config.retrain_steps)
        train(run, model, "model", data)

# 10. Command line ---------------------------------------------------------------------------------

def build(config, parts):
    """Config and parts of a run -> its trained model, of any kind, in evaluation mode."""
    weights = parts["model"]["weights"]
    with seeded("build"):
        if config.kind == "pairs":
            model = PairsHead(config)
        else:  # symbols may have been added to VOCAB since
            model = Transformer(config, len(weights["embedding.weight"]))
    model.load_state_dict(weights)
    return model.eval()

def read_checkpoint(folder):
    """-> config, parts. Code in the file is never run. Raises: BadInput if it cannot be used."""
    path = Path(folder, "checkpoint.pt")
    try:
        if zipfile.ZipFile(path).testzip():
            raise ValueError("it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not VOCAB.startswith(state["vocab"]):
            raise ValueError(f"its symbols are {state['vocab']}, those of VOCAB {VOCAB}")
        return Config(**state["config"]), dict(state["parts"])
    except Exception as error:
        raise BadInput(f"--from, --ask: {str(folder)!r} cannot be used: {error!r:.300}") from None

def load(folder):
    """Folder of a trained run -> model, config, parts. Raises: BadInput."""
    config, parts = read_checkpoint(folder)
    if "proof" not in parts:
        raise BadInput(f"{str(folder)!r} is not finished; finish it by --from alone")
    return build(config, parts), config, parts

def percent(share):
    """-> text, rounded down, so that 100.0% means all."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}%"

def make_record(run, tests):
    machine = f"cpu, threads: {torch.get_num_threads()}"
    if run.device.type == "cuda":
        machine = torch.cuda.get_device_name(run.device)
    training = {}
    for name, part in run.parts.items():
        if "weights" in part:
            training[name] = {key: part[key] for key in ("steps", "seconds", "curve")}
    proof = dict(run.parts["proof"])
    return dict(config=dataclasses.asdict(run.config), torch=torch.__version__, source=SOURCE,
                device=machine, train=training, lines=proof.pop("lines", []), proof=proof,
                before=run.parts.get("before"), tests=tests)

def summary(record):
    config, proof = record["config"], record["proof"]
    yield f"{config['task']}, {config['method'] or config['model']}, seed {config['seed']}"
    for name, part in record["train"].items():
        unseen = " ".join(map(percent, part["curve"][-1][2:]))
        yield f"{name:<9} {part['steps']:,} steps, {part['seconds']:.1f} s, unseen {unseen or '-'}"
    for line in record["lines"]:
        name = {1: "diagonal", 0: "vertical", -1: "anti-diagonal"}[line["direction"]]
        yield (f"  layer {line['layer'] + 1} {line['attention']:<5} head {line['head'] + 1}: "
               f"{name}, block {line['block'] + 1}, offset {line['offset']}, "
               f"bias {line['bias']:.2f}, z {line['z']:.1f}")
    if proof:
        found = f"not proved: {proof['why']}"
        if proof["proved"]:
            found = (f"exact at every length: right on all {proof['windows']:,} windows, by "
                     f"{proof['margin']:.1f} or more")
        yield f"proof     {found}; kappa {proof.get('kappa', '-')}"
    for name in "before", "tests":
        if record[name]:
            yield f"{name:<9} {record[name]['seconds']:.1f} s on {record['device']}"
            yield "digits   exact  set              n"
            for row in record[name]["rows"]:
                share = percent(row["correct"] / row["n"])
                yield f"{row['digits']:>6}  {share:>6}  {row['set']:<8} {row['n']:8,}"

def prepare_process(config):
    """Small models use one thread, as more help little. Raises: BadInput if WORLD_SIZE > 1."""
    if os.environ.get("WORLD_SIZE", "") not in ("", "1"):
        raise BadInput("WORLD_SIZE: a run is one process; start it without torchrun")
    if config.d_model <= 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)

def new_folder(config, options):
    """A new folder, so that no two runs share one. Raises: BadInput."""
    name = f"runs/{config.task}-{config.method or config.model}-seed{config.seed}-{time.time_ns()}"
    folder = Path(options.out or name)
    if options.seeds > 1:
        folder /= f"seed{config.seed}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"--out: {str(folder)!r} cannot be a new folder: {error.strerror}") from None
    return folder

def execute(run, options):
    """Make the missing parts of a run and test it; print and keep its record."""
    config = run.config
    LOG.info(f"{config.task}, seed {config.seed}, {run.device}, {run.folder or ''}")
    run.save()
    if "proof" not in run.parts:
        learn = {"pairs": learn_pairs, "encoder": learn_encoder}.get(config.kind, learn_method)
        if config.kind == "seq2seq" and METHODS[config.method].calibrated:
            learn = learn_abc
        run.keep("proof", learn(run) or {})
    model = build(config, run.parts).to(run.device)
    record = make_record(run, evaluate(model, config))
    if run.folder:
        write(run.folder, "result.json", json.dumps(record).encode())
    print(json.dumps(record) if options.json else "\n".join(summary(record)), flush=True)

def ask_all(options):
    newest = max(Path("runs").rglob("result.json"), key=os.path.getmtime,
                 default=Path("runs/*/result.json"))  # without a run, the error names this path
    folder = newest.parent if options.folder is None else options.folder
    model, config, _ = load(folder)
    if config.model != "seq2seq":
        raise BadInput(f"--ask: only encoder-decoders can be asked, not {config.model}")
    LOG.info(f"asking {folder}: {config.task} by {config.method}, seed {config.seed}")
    for question in options.ask:
        print(ask(model, config, question), flush=True)

def fail(error, code):
    LOG.error(f"lengen: {error}")
    return code

class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all bad input."""
    def error(self, message):
        raise BadInput(message)

def parse(argv):
    """Arguments -> the given options of a run, and the options of the command. Prints help."""
    p = Parser(allow_abbrev=False, add_help=False)
    for field in dataclasses.fields(Config):
        action = "store_true" if field.type is bool else "store"
        p.add_argument(flag(field.name), action=action, default=argparse.SUPPRESS,
                       help=field.metadata["help"])
    p.add_argument("--seeds", type=int, default=1, help="number of runs, with seeds from --seed on")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    p.add_argument("--device", choices=devices, default=devices[0], help="by default, cuda if any")
    p.add_argument("--out", help="a new folder, by default in runs/")
    p.add_argument("--from", dest="folder", metavar="DIR", help="finish, test or --ask this run")
    p.add_argument("--ask", nargs="+", help="ask 123+748 of --from or of the newest finished run")
    p.add_argument("--json", action="store_true", help="print the record as JSON")
    p.add_argument("--quiet", action="store_true", help="do not report progress")
    p.add_argument("--list", action="store_true", help="print tasks, methods and models")
    p.add_argument("--help", action="store_true", help="print this, and the options of a run")
    options = p.parse_args(argv)
    given = {name: value for name, value in vars(options).items() if name in Config.__annotations__}
    trains = given.keys() - {"lengths", "samples"} or options.out or options.seeds > 1
    if trains and (options.ask or options.folder) or options.seeds < 1:
        raise BadInput("--out and --seeds (1 or more) go without --from and --ask, which take only "
                       "--lengths and --samples")
    if options.help:
        p.print_help()
    return given, options

def main(argv=None):
    """-> exit code: 0 done, 1 a run failed (other seeds go on), 2 bad input, 130 interrupted."""
    LOG.handlers = [logging.StreamHandler()]
    code = 0
    try:
        given, options = parse(argv)
        LOG.setLevel("ERROR" if options.quiet else "INFO")
        if options.help:
            print(f"\nwith these options: {Config(**given)}")
        elif options.list:
            for name, tasks in TASKS_OF.items():
                for task, spec in tasks.items():
                    print(f"--model {name:<9} --task {task:<21} {spec.about}")
            for name, method in METHODS.items():
                print(f"--method {name:<14} {method.about}")
        elif options.ask:
            ask_all(options)
        else:
            if options.folder is None:
                config, parts = Config(**given), {}
            else:
                config, parts = read_checkpoint(options.folder)
                config = dataclasses.replace(config, **given)
            prepare_process(config)  # before a folder is made
            seeds = range(config.seed, config.seed + options.seeds)
            for config in [dataclasses.replace(config, seed=seed) for seed in seeds]:  # checks all
                folder = options.folder or new_folder(config, options)
                if Path(folder, "result.json").exists():  # a finished run's stays as it is
                    folder = None
                try:
                    execute(Run(config, folder, dict(parts), torch.device(options.device)), options)
                except RunFailed as error:
                    code = fail(error, 1)
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        return fail("interrupted; go on by --from DIR", 130)
    except BadInput as error:
        return fail(error, 2)
    except OSError as error:  # from standard output, which must not be flushed again at exit
        sys.stdout = None
        if isinstance(error, BrokenPipeError):  # e.g. from `| head`
            return 0
        return fail(f"standard output cannot be written: {error.strerror}", 2)

if __name__ == "__main__":
    sys.exit(main())
