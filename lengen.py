# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

A transformer trained on numbers of about 6 digits can answer questions of 60 or 1,000 digits
exactly if its attention may look only where it looked on short numbers. This file trains such a
model, finds those places (Attention Bias Calibration, ABC), proves the result exact at every
length, and tests it beside other methods.

    python lengen.py --task successor --method abc        # train, calibrate, retrain, prove, test
    python lengen.py --task addition --method vanilla     # right at 6 digits, wrong at 10
    python lengen.py --ask 123+748                        # ask the newest finished run
    python lengen.py --task addition --help               # its options

Sections 1 to 7 are ABC, in reading order. Sections 8 (consecutive pairs) and 9 (encoders) are
systems of their own; section 10 is the command line.

Letters: B batch, T queries, S keys, K open keys of a row, H heads, D head width, C = H * D model
width, V vocabulary, W digits of a number. Attention is m x n at the training length, M x N at
another. Lengths count digits; place 0 is the last digit. `Source:` names an origin, `Differs:` a
departure from it. Random draws share global generators, which `seeded` blocks seed, so concurrent
runs need separate processes, not threads.

v1: Duan and Shi, From Interpolation to Extrapolation: Complete Length Generalization for Arithmetic
Transformers, 2023. v2: Duan, Shi and Xu, Attention Bias as an Inductive Bias: How to Teach
Transformers Simple Arithmetic, 2024. Jelassi: Jelassi et al., Length Generalization in Arithmetic
Transformers, 2023. Pairs: an unsigned study of consecutive pairs."""

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
import sys
import time
import zipfile
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

SOURCE = ""  # hash of this file as it was imported, for records
if os.path.exists(globals().get("__file__", "")):
    SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
LOG = logging.getLogger("lengen")  # progress, at the level INFO; errors of the command
RANDOM = random.Random()  # for integers of any size
INF = float("inf")
SECONDS = 3  # between two reports, and two saves, of long work

class BadInput(ValueError):
    """An error that the user can fix. The command prints one line and exits with 2."""

class RunFailed(RuntimeError):
    """A run cannot continue. The command prints one line and exits with 1."""

@contextlib.contextmanager
def seeded(*names):
    """Seed torch and RANDOM with `names`, as (seed, "test", 60); restore torch's state on exit."""
    with torch.random.fork_rng():
        RANDOM.seed(repr(names))
        torch.manual_seed(RANDOM.getrandbits(63))
        yield

# 1. Tasks: digits in, tokens out ------------------------------------------------------------------
# A digit's token is its value. Numbers are digits (B, W), the least significant first.

VOCAB = "0123456789+*$&@"
START, END, PAD = "$", "&", "@"
LIMIT = 2 ** 20  # training numbers are below it, mainly of 6 digits

def encode(text):
    """String of VOCAB symbols -> (T,) tokens. Raises: ValueError."""
    return torch.tensor([VOCAB.index(symbol) for symbol in text], dtype=torch.int64)

def decode(tokens):
    return "".join(VOCAB[token] for token in tokens)

class Task(NamedTuple):
    """A digit-by-digit rule, applied from the last place to the first. At each place, `total(rest,
    *digits)` combines the operands' digits with the rest handed on by the previous place. The total
    modulo the base is the answer's digit; the total divided by the base, rounded down, is the next
    rest. All are integer tensors of one shape. With headroom, numbers have leading zeros, and
    operands that leave a final rest are invalid; without it, the final rest is dropped."""
    about: str
    total: Callable
    operands: tuple = ("number",)  # "number" (W digits) first, then "digit" (one digit)
    sign: str = ""  # a symbol of VOCAB that stands before each further operand
    base: int = 10
    first: int = 0  # the rest that the last place gets
    headroom: int = 1  # zeros in front of a number, so that its answer fits
    label: bool = False  # the answer is the digit of the first place alone
    steps: int = 600  # of the first training
    retrain_steps: int = 300  # of the first attempt at retraining, at most
    batch: int = 64
    lr: float = 6e-3

    def step(self, rest, digits):
        """rest (...), digits (..., n) of a place -> digit of the answer, rest of the next place."""
        total = self.total(rest, *digits.unbind(-1))
        return total % self.base, total // self.base  # rounds down: a negative total borrows

    @property
    def width(self):
        """The least number of digits that holds all numbers below LIMIT * 2^headroom."""
        width = 1
        while self.base ** width < LIMIT * 2 ** self.headroom:
            width += 1
        return width

def xor(rest, a):
    """Running xor: the digit that is written is also the rest, so the total is 0 or 1 + 2 * 1."""
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
    n = len(str(max(a, b)))
    pairs = zip(str(a).zfill(n), str(b).zfill(n))
    return "".join([str((int(x) + int(y)) % 10) for x, y in pairs])

class EncoderTask(NamedTuple):
    """A task of encoders (section 9) on two positive integers."""
    about: str
    sign: str
    answer: Callable  # integers a, b -> the answer as text, longest for the largest a and b
    steps: int
    second_digits: int = None  # digits of b, at most; by default as many as those of a

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

def arrange(task, operands, align=False):
    """Digits (B, W) or (B, 1) of operands -> tokens of the valid questions: source (B, S), target
    (B, T + 1), as `$0123+0748&` and, last digit first as carries run, `$1780&`. align: two operands
    interleaved, `$+00172438&`. Source: v1, Sec. 3.2; v2, App. D.1 and C.4 (align)."""
    spec, answer = TASKS[task], []
    columns = torch.stack(torch.broadcast_tensors(*operands), 2)  # (B, W, n)
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
        for digits in operands:
            source += [sign, digits.flip(1)]
        del source[1]  # no sign before the first
    source = torch.cat(source + [end], 1)
    target = torch.cat([start, torch.stack(answer, 1), end], 1)
    if not spec.headroom:
        return source, target
    return source[rest == 0], target[rest == 0]

def example(task, *operands, width=None, align=False):
    """example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&"). By default the width
    is that of the longest operand plus the headroom. Raises: BadInput."""
    spec = TASKS.get(task)
    if not spec or len(operands) != len(spec.operands):
        raise BadInput(f"{' '.join(operands)} is no question of {task}")
    width, digits = width or max(map(len, operands)) + spec.headroom, []
    for kind, text in zip(spec.operands, operands):
        most = width if kind == "number" else 1
        if not 1 <= len(text) <= most or set(text) - set(VOCAB[:spec.base]):
            raise BadInput(f"{text!r} is not a base-{spec.base} {kind} of 1 to {most} digits")
        digits.append(encode(text.rjust(most, "0")).flip(0)[None])
    source, target = arrange(task, digits, align)
    if not len(source):
        raise BadInput(f"{' and '.join(operands)} have no answer of {width} digits: {spec.about}")
    return decode(source[0]), decode(target[0])

def to_digits(numbers, width, base=10):
    """(B,) integers >= 0 -> their lowest digits (B, width)."""
    digits = []
    for _ in range(width):
        digits.append(numbers % base)
        numbers = numbers // base
    return torch.stack(digits, 1)

def split_numbers(seed):
    """-> sorted training, held-out integers, 7 : 1. Source: v2, App. B. Differs: without 2^20."""
    order = torch.randperm(LIMIT, generator=torch.Generator().manual_seed(seed))
    training = torch.zeros(LIMIT, dtype=torch.bool)
    training[order[:LIMIT * 7 // 8]] = True
    return training.nonzero().flatten(), (~training).nonzero().flatten()

def first_of_each(rows):
    """Rows (N,) or (N, L) -> ascending indices of the first occurrence of each distinct row."""
    if rows.dim() > 1:
        rows = rows.unique(dim=0, return_inverse=True)[1]
    kinds, which = rows.unique(return_inverse=True)
    first = torch.full((len(kinds),), len(rows))
    first = first.scatter_reduce(0, which, torch.arange(len(rows)), "amin")
    return first.sort().values

def draw_exact(base, length, B):
    """B numbers of exactly `length` digits -> (B, length). Source: v1, Sec. 3.3."""
    digits = torch.randint(base, (B, length))
    digits[:, -1] = torch.randint(1, base, (B,))  # no leading zero
    return digits

def draw_hard(base, length, B):
    """B hard numbers -> (B, length): all zeros or all highest digits, but for a random share of
    random digits, so that carries run far and numbers are short or tie."""
    usual = torch.randint(2, (B, 1)) * (base - 1)
    other = torch.rand(B, length) < torch.rand(B, 1)
    return torch.where(other, torch.randint(base, (B, length)), usual)

def draw_questions(config, draw, length, n, width=None, distinct=True):
    """Up to n valid, distinct questions -> source (n, S), target (n, T + 1). draw(base, length, B)
    -> numbers (B, length), which get leading zeros. Raises: BadInput if 20 draws of n find none."""
    spec, drawn = TASKS[config.task], []
    width = width or max(config.widths[0], length + spec.headroom)
    for _ in range(20):
        operands = []
        for kind in spec.operands:
            if kind == "number":
                operands.append(F.pad(draw(spec.base, length, n), (0, width - length)))
            else:
                operands.append(torch.randint(spec.base, (n, 1)))
        drawn.append(arrange(config.task, operands, config.align))
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
# A bias is added to the scores: 0 is neutral, -inf closes. Rows are queries i, columns keys j.
# Tensors made from sizes alone are on torch's default device, which a model sets to its own.

def sinusoidal(positions, d_model):
    """Positions (T,) -> (T, C): channels 2p, 2p + 1 are sin, cos of t / 10000^(2p/C). Source:
    Vaswani et al. 2017, Sec. 3.5. Angles are float64, for precision at long positions."""
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * 10000.0 ** (-pairs / d_model)  # (T, C / 2)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :d_model]
    return waves.to(torch.get_default_dtype())

def rope(x, positions):
    """Rotate the channel pairs (2p, 2p + 1) of x (B, H, T, D) by positions (T,) * 10000^(-2p/D).
    Source: Su et al. 2021, Eqs. 14 and 34."""
    waves = sinusoidal(positions, x.shape[-1]).to(x)
    sin, cos = waves[:, 0::2], waves[:, 1::2]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

def relative_scores(q, table, k=None, S=None):
    """q (B, H, T, D), table (2K + 1, D), k (B, H, S, D) -> (B, H, T, S), unscaled: q_i . a_ij, with
    k also + k_j . a_ij, where a_ij = table[clip(j - i, -K, K) + K]. By default S = T. Source: Shaw
    et al. 2018, Eq. 4 (keys); Huang et al. 2020, method 4 (keys and queries)."""
    T, K = q.shape[2], len(table) // 2
    S = S or T
    if k is not None:
        S = k.shape[2]
    i, j = torch.arange(T, device=q.device), torch.arange(S, device=q.device)
    index = ((j - i[:, None]).clamp(-K, K) + K).expand(*q.shape[:2], -1, -1)  # (B, H, T, S)
    scores = (q @ table.T).gather(3, index)
    if k is not None:
        scores = scores + (k @ table.T).transpose(2, 3).gather(2, index)
    return scores

def alibi_slopes(n_head):
    """-> (H,) slopes 2^(-8h/H), h = 1 .. H; if H is no power of two, those of the next lower power
    n, then every second of 2n. Source: Press et al. 2022, Sec. 3 and code."""
    n = 2 ** (n_head.bit_length() - 1)
    slopes = 2.0 ** (-8 * torch.arange(1, n + 1) / n)
    between = 2.0 ** (-4 * torch.arange(1, 2 * n, 2) / n)
    return torch.cat([slopes, between[:n_head - n]])

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
    w tokens before it; in cross-attention, digit i from the end and the w digits after it, counting
    the end marker. With interleaved operands (step=2), a digit is a pair. Source: v2, App. C.4; for
    the columns of w = 1, the authors' code. Differs: the text opens w positions on the other side,
    too, and does not name the first column; the code has no pairs."""
    i, j = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        end = S - 1
        inside = (j >= end - step * (i + 1)) & (j < end - step * (i - w))
    else:
        inside = (j <= i) & (j >= i - w)
    return torch.zeros(1, T, S).masked_fill(~inside, -INF)

# 3. Attention -------------------------------------------------------------------------------------

class OpenKeys(NamedTuple):
    """Sparse bias, -inf except at K keys of a row or fewer. On short numbers a dense matrix is
    faster, but at 10,000 digits it would exhaust memory."""
    columns: torch.Tensor  # (T, K)
    values: torch.Tensor  # (H, T, K), added to their scores

def masked_softmax(scores, bias):
    """softmax(scores + bias) over the keys; 0, not NaN, in a row whose keys are all closed."""
    if bias is None:
        return scores.softmax(-1)
    bias = bias.to(scores)
    closed = bias.isneginf().all(-1, keepdim=True)
    return (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0)

class MultiHeadAttention(nn.Module):
    """weights = softmax(q k^T / sqrt(D) + bias), output = weights v. `scores`, if set, is a
    function of q (B, H, T, D) and k (B, H, S, D) that replaces q k^T. Source: Vaswani et al. 2017,
    Sec. 3.2; v2, App. C.4 (bias)."""
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

    def merge(self, y):
        """Outputs of heads (B, H, T, D) -> (B, T, C)."""
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, memory, bias=None):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) or OpenKeys -> output
        (B, T, C), weights (B, H, T, S) or, with OpenKeys, (B, H, T, K)."""
        if isinstance(bias, OpenKeys):
            return self.attend_to_open_keys(x, memory, bias)
        q, k, v = self.project(x, memory)
        if self.scores:
            scores = self.scores(q, k) / math.sqrt(self.d_head)  # (B, H, T, S)
        else:
            scores = (q / math.sqrt(self.d_head)) @ k.transpose(2, 3)
        weights = masked_softmax(scores, bias)
        return self.merge(self.dropout(weights) @ v), weights

    def attend_to_open_keys(self, x, memory, bias):
        """`forward` on open keys alone, without dropout, in chunks so that a million rows fit."""
        assert not self.scores, "OpenKeys cannot be combined with a scores function"
        outputs, weights = [], []
        for rows in torch.arange(x.shape[1], device=x.device).split(2 ** 12):
            used, keys = bias.columns[rows].unique(return_inverse=True)  # keys (R, K) among used
            q, k, v = self.project(x[:, rows], memory[:, used])
            scores = (q[:, :, :, None] * k[:, :, keys]).sum(4)  # (B, H, R, K)
            piece = masked_softmax(scores / math.sqrt(self.d_head), bias.values[:, rows])
            outputs.append(self.merge((piece[..., None] * v[:, :, keys]).sum(3)))
            weights.append(piece)
        return torch.cat(outputs, 1), torch.cat(weights, 2)

# 4. Transformer -----------------------------------------------------------------------------------
# A method has up to three parts. Each is a function whose arguments before `;` are bound when the
# model is built, or a module class that is instantiated with them:
#     position(config; side, T) -> (T, C), added to embeddings of the "source" or "target"
#     bias(config; layer, kind, T, S) -> (1 or H, T, S), OpenKeys or None, added to the scores
#     scores(config, kind; q, k) -> (B, H, T, S), replaces q k^T
# `kind` is "encoder", "self" or "cross" attention; `config` holds a run's options (section 7).

def sinusoids(config, side, T):
    """Sinusoids of the token index or, for window-cyclic, of the index modulo 3. Source: v2, App.
    C.4 (modulo). Differs: with the modulo, sources count from their end."""
    index = torch.arange(T)
    if config.method == "window-cyclic":
        index = (index.flip(0) if side == "source" else index) % 3
    return sinusoidal(index, config.d_model)

class LearnedPositions(nn.Embedding):
    def __init__(self, config):
        super().__init__(4096, config.d_model)
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, side, T):
        if T > len(self.weight):
            raise BadInput(f"{T} tokens are more than the {len(self.weight)} learned positions")
        return self.weight[:T]

def window(config, layer, kind, T, S):
    if kind != "encoder":
        return window_bias(1, T, S, kind == "cross", 1 + config.align)

def alibi(config, layer, kind, T, S):
    if kind == "self" or config.method == "alibi":
        return alibi_bias(config.n_head, T, S)

def rotary(config, kind, q, k):
    i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    return rope(q, i) @ rope(k, j).transpose(2, 3)

class RelativeScores(nn.Module):
    """q k^T plus learned scores of relative positions, for keys or ("rpe-kq") keys and queries."""
    def __init__(self, config, kind):
        super().__init__()
        D = config.d_model // config.n_head
        self.table = nn.Parameter(torch.randn(2 * config.clip + 1, D) / D ** 0.5)
        self.for_queries = config.method == "rpe-kq"

    def forward(self, q, k):
        keys = k if self.for_queries else None
        return q @ k.transpose(2, 3) + relative_scores(q, self.table, keys, k.shape[2])

class Method(NamedTuple):
    about: str
    position: Callable = None
    bias: Callable = None
    scores: Callable = None
    # Several widths keep a model from memorizing the row of END. Differs: the papers use one.
    n_width: int = 1
    align: bool = False  # the source interleaves its two operands
    steps: int = 1  # the default number of steps is so many times the task's
    defaults: dict = {}  # of other options of a run
    embedding: float = 0.3  # standard deviation of embeddings; small, so that positions stand out
    calibrated: bool = False  # the bias comes from a vanilla model that is trained first
    # Rows after which positions repeat (1: no positions), for the proof of a fixed window.
    period: int = 0

WINDOW = Method("", bias=window, align=True, steps=3)
METHODS = {
    "vanilla": Method("sinusoids on the embeddings", sinusoids),
    "nope": Method("no positions (Kazemnejad et al. 2023)"),
    "ape": Method("learned positions on the embeddings (Gehring et al. 2017)", LearnedPositions),
    "alibi": Method("ALiBi, symmetric, in every attention", bias=alibi),
    "alibi-decoder": Method("sinusoids, ALiBi in the decoder's self-attention (code of v2)",
                            sinusoids, alibi),
    "rope": Method("rotated queries and keys, every attention", scores=rotary, steps=10,
                   defaults=dict(lr=3e-3)),
    "rpe-k": Method("relative table for keys, every attention", scores=RelativeScores, steps=4),
    "rpe-kq": Method("relative table for keys and queries", scores=RelativeScores, steps=4),
    # Far positions are learned only if zeros fill them in training. Large embeddings and dropout,
    # as the authors use, favor content over position; with more layers the model can tell a
    # window's digits apart by those of the previous row.
    "window": WINDOW._replace(about="sinusoids, windows in the decoder (v2, +w)",
                              position=sinusoids, embedding=1.33,
                              defaults=dict(width=61, dropout=0.3, n_layer=3)),
    "window-cyclic": WINDOW._replace(about="windows, position index modulo 3 (v2, +T)", steps=6,
                                     position=sinusoids, period=3, n_width=9),
    "window-nope": WINDOW._replace(about="windows in the decoder, no positions (v2, NoPE+w)",
                                   period=1, n_width=9),
    "abc": Method("bias calibrated on a vanilla model, no positions", n_width=9, calibrated=True),
}

def bind(entry, *given):
    """Bind a part of a method: instantiate a class with `given`, or fix them in a function."""
    if isinstance(entry, type):
        return entry(*given)
    return functools.partial(entry, *given) if entry else None

class Layer(nn.Module):
    """Self-attention, cross-attention (decoder), feed-forward. Differs: pre-norm; the sources and
    the paper preset are post-norm."""
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
        own, feed = self.self_attention, self.feed_forward
        x = self.residual(self.norms[0], x, lambda y: own(y, y, self_bias)[0])
        if memory is not None:
            cross = self.cross_attention
            x = self.residual(self.norms[1], x, lambda y: cross(y, memory, cross_bias)[0])
        # Rows are fed in chunks, so that a million fit in memory.
        return self.residual(self.norms[-1], x,
                             lambda y: torch.cat([feed(rows) for rows in y.split(2 ** 12, 1)], 1))

class Transformer(nn.Module):
    """Encoder-decoder or (section 9) encoder alone. The paper preset has Xavier initialization,
    with embeddings times sqrt(C). Differs: v2's q, k and v are smaller by sqrt(2), and Jelassi's
    weights are Gaussian (Sec. 2.2)."""
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
        if config.model == "universal":  # one layer, again and again
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
        """Tokens (B, T) of the "source" or "target" -> (B, T, C)."""
        x = self.embedding(tokens)
        if self.position:
            with x.device:
                x = x + self.position(side, tokens.shape[1]).to(x)
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
        """source (B, S), target (B, T) -> logits (B, T, V). An encoder uses only T."""
        source, target = (tokens.to(self.head.weight.device) for tokens in (source, target))
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
    """source (B, S), target (B, T + 1) -> (B, T) bool on the CPU: is each token the most likely one
    after those before it? Greedy decoding writes the target if and only if all are."""
    model.eval()
    chunk = max(1, 2 ** 12 // target.shape[1])  # rows that stay in a cache
    right = []
    for s, t in zip(source.split(chunk), target.split(chunk)):
        right.append(model(s, t[:, :-1]).argmax(-1).cpu() == t[:, 1:].cpu())
    return torch.cat(right)

@torch.no_grad()
def generate(model, source, limit):
    """Greedy decoding: source (B, S) -> target (B, limit + 1), START first. Each pass predicts all
    tokens from those before them, until none changes: after k passes the first k are final. A carry
    that runs far takes one pass per digit, so a bound on the time left is logged."""
    model.eval()
    target = torch.full((len(source), limit + 1), VOCAB.index(START))
    start = told = time.perf_counter()
    for made in range(limit):
        tokens = model(source, target[:, :-1]).argmax(-1).cpu()
        if torch.equal(tokens, target[:, 1:]):
            break
        target[:, 1:] = tokens
        if time.perf_counter() - told > SECONDS:
            told = time.perf_counter()
            most = (told - start) / (made + 1) * (limit - made - 1)
            LOG.info(f"{made + 1:,} tokens of {limit:,}, {most:,.0f} s more at most")
    return target

# 5. Attention Bias Calibration --------------------------------------------------------------------
# A line is the elements of a matrix along (1, 1), (1, 0) or (1, -1), and d_l is the mean of line l.
# mu, sigma and d_max are the mean, standard deviation and maximum of d_l over all lines of one
# direction in one head. Lines that stand out are kept and continued at another size.

class Line(NamedTuple):
    """An open line. direction: 1 diagonal, 0 vertical, -1 anti-diagonal."""
    head: int
    direction: int
    block: int  # a part of the columns
    offset: int  # see `line_columns`
    bias: float  # d_l - d_max
    z: float  # (d_l - mu) / sigma
    layer: int = 0
    attention: str = "cross"

    @property
    def path(self):
        """The line's position in a map, regardless of head and layer."""
        return self.attention, self.direction, self.block, self.offset

# Arguments of `find_lines` for each rule set; where a proof is possible, kappa falls (section 6).
RULES = {"ours": dict(kappa=0.5, of_largest=True, support=0.5),
         "v1": dict(kappa=4.0),  # Secs. 5 and 6
         "v2": dict(kappa=4.5, groups=((1, 0, -1),)),  # App. D
         "code": dict(kappa=4.5, total=True, groups=((-1,),))}  # the authors' code
SELF_RULES = {"v2": dict(kappa=0.87), "code": dict(kappa=0.87, groups=((1,),))}

def line_columns(direction, offset, rows, size):
    """Rows (R,) and size of a block -> column (R,) of a line, 0 outside the block, inside (R,)
    bool. The offset of a diagonal (1, 1) is column - row, of a vertical (1, 0) the column, and of
    an anti-diagonal (1, -1), which starts at the right edge, size - 1 - column - row."""
    first = size - 1 - offset if direction < 0 else offset  # column in row 0
    column = first + direction * rows
    inside = (column >= 0) & (column < size)
    return column * inside, inside

def find_lines(attention, kappa, groups=((1,), (0,), (-1,)), total=False, of_largest=False,
               support=0.0, blocks=None):
    """The lines of attention (H, m, n) that stand out -> list of Line. Source: v1, Eqs. 1 and 2:

        dropoff:  d_l - d_max  if d_l > mu + kappa * sigma,  else -inf

    Differs: the printed `d_l - d_max > threshold` holds for no positive threshold, so d_l itself is
    compared, as in the authors' code.
    groups: directions whose lines share mu, sigma and d_max; in v2 all three do.
    total: d_l is the sum of a line, as in the authors' code. Differs: that leaves out sums of 0,
    counts equal ones once, compares by >=, and opens the end marker in row 0.
    of_largest (ours): kappa is a share of sqrt(L - 1), the largest z that one of L lines can have.
    The papers' kappas of 4 and more open none of 16 lines.
    support (ours): a line must cross more than this share of rows; corner means are high by chance.
    blocks (ours): sizes of column blocks that have their own lines. As numbers grow, the first
    operand moves away from the source's end, but its lines keep their place in its block. Verticals
    open only in the first column of a block, as inside a number a column means nothing."""
    m, found = attention.shape[1], []
    rows, parts = torch.arange(m), attention.split(blocks or [attention.shape[2]], 2)
    for group in groups:
        places, values = [], []
        for direction in group:
            for block, part in enumerate(parts):
                for offset in range(1 - m, part.shape[2]):
                    column, inside = line_columns(direction, offset, rows, part.shape[2])
                    if inside.sum() > support * m:
                        line = part[:, rows[inside], column[inside]]  # (H, K)
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

def lay_out(lines, H, M, blocks):
    """Lines continued to M rows and blocks of these sizes -> OpenKeys, -inf where a head has no
    line; along (1, 1), a relative table of scalars, closed beyond the offsets seen. Source: v2, Eq.
    1 (case distinction), App. E.1. Key 0 is column 0, left closed for `fill_empty` to open."""
    rows, closed = torch.arange(M), torch.full((H, M), -INF)
    keys = {None: (0 * rows, rows < 0, closed)}  # path: columns (M,), inside (M,), values (H, M)
    for line in lines:
        if line.path not in keys:
            column, inside = line_columns(line.direction, line.offset, rows, blocks[line.block])
            if line.attention == "self":
                inside = inside & (column <= rows)  # no token sees later ones
            column = (sum(blocks[:line.block]) + column) * inside
            keys[line.path] = column, inside, closed.clone()
        _, inside, values = keys[line.path]
        values[line.head] = torch.where(inside, line.bias, -INF)
    columns, _, values = zip(*keys.values())
    return OpenKeys(torch.stack(columns, 1), torch.stack(values, 2))

def merge_keys(keys):
    """OpenKeys -> OpenKeys that open no column twice in a row: where lines of a head cross, the
    first key of the column gets the greatest value, and the others are closed."""
    merged = []
    for n in range(keys.columns.shape[1]):
        same = keys.columns == keys.columns[:, n:n + 1]  # (M, K)
        greatest = keys.values.masked_fill(~same, -INF).amax(2)  # (H, M)
        merged.append(greatest.masked_fill(same[:, :n].any(1), -INF))
    return OpenKeys(keys.columns, torch.stack(merged, 2))

def dense_bias(keys, N):
    """OpenKeys -> bias (H, M, N); where lines cross, the greater value counts."""
    closed = keys.values.new_full((*keys.values.shape[:2], N), -INF)
    return closed.scatter_reduce(2, keys.columns.expand_as(keys.values), keys.values, "amax")

def fill_empty(bias, rules):
    """Set 0 in fully closed rows of a bias (H, M, N) or of key values (H, M, K): by our rules at
    the first key, the same at every length; by others at every key, as for heads without a line."""
    empty = bias.isneginf().all(2, keepdim=True)
    if rules == "ours":
        empty = empty & (torch.arange(bias.shape[2]) == 0)
    return bias.masked_fill(empty, 0)

def abc_bias(attention, M, N, rules="ours", blocks=None, **changes):
    """Attention (H, m, n) of a model that interpolates -> bias (H, M, N): d_l - d_max along its
    continued lines, -inf elsewhere. Source: v1, Sec. 5, step 2; v2, App. D, step 2. This is for
    other models; a run calls `find_lines` and `lay_out` layer by layer. Average attention over
    examples, not heads (nn.MultiheadAttention: average_attn_weights=False). In self-attention, add
    `causal_bias(M)`. rules: a key of RULES; `changes` override single arguments. blocks: [(size
    now, size then)] of column blocks, see `find_lines`; by default none. Raises: ValueError."""
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
    """Attention averaged over correctly answered examples: source (B, S), target (B, T + 1) -> self
    (n_layer, H, T, T), cross (n_layer, H, T, S). Source: v1, Sec. 5; v2, App. D. Differs: weights
    are averaged, as in the authors' code, not scores. Raises: RunFailed if none is right."""
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
    """Sizes of the blocks of S source columns. In `$0123|+0748|&` and `$0123|*|7|&`, a number
    includes the marker on its left, and every other column is a block."""
    kinds = TASKS[task].operands
    numbers, others = kinds.count("number"), 1 + 2 * kinds.count("digit")
    return [(S - others) // numbers] * numbers + [1] * others

def calibrate(config, attention, kappa):
    """Averaged attention (self (n_layer, H, T, T), cross (n_layer, H, T, S)) -> list of Line. By
    our rules, each layer has its own lines above `kappa`: (1, 1) in self-attention, (1, 0) and (1,
    -1) in blocks of cross-attention. By others, the last layer's serve all, without blocks. Source:
    v2, App. D. Differs: the authors' code takes the third's. At a fixed width, only rows that
    training fills count (authors' code: 6)."""
    rows, found = TASKS[config.task].width + 1, []
    for layer in range(config.n_layer):
        for kind, maps in zip(("self", "cross"), attention):
            rule, ours = dict(RULES[config.rules]), config.rules == "ours"
            weights = maps[layer if ours else -1][:, :rows]  # (H, rows, T or S)
            if not ours and kind == "self":
                rule |= SELF_RULES.get(config.rules, {})
            elif ours and kind == "self":
                rule |= dict(kappa=kappa, groups=((1,),))
            elif ours:
                blocks = column_blocks(config.task, weights.shape[2])
                rule |= dict(kappa=kappa, groups=((0,), (-1,)), blocks=blocks)
            for line in find_lines(weights, **rule):
                bias = round(line.bias, 2)  # Differs: rounded; a model hardly learns from less
                found.append(line._replace(layer=layer, attention=kind, bias=bias))
    return found

class CalibratedBias(nn.Module):
    """A run's bias, made of its lines, which are part of the state_dict. Source: v2, Eq. 2."""
    def __init__(self, config, lines=()):
        super().__init__()
        self.config, self.lines = config, list(lines)

    def get_extra_state(self):
        return [tuple(line) for line in self.lines]

    def set_extra_state(self, lines):
        self.lines = [Line(*line) for line in lines]

    def keys(self, layer, kind, T, S):
        """-> OpenKeys; by our rules each row has an open key."""
        ours, blocks = self.config.rules == "ours", [S]
        if ours and kind == "cross":
            blocks = column_blocks(self.config.task, S)
        chosen = [line for line in self.lines if (line.attention, line.layer) == (kind, layer)]
        columns, values = lay_out(chosen, self.config.n_head, T, blocks)
        return OpenKeys(columns, fill_empty(values, "ours") if ours else values)

    def forward(self, layer, kind, T, S):
        """-> (H, T, S), or by our rules OpenKeys beyond 100 rows; None for an encoder."""
        if kind == "encoder":
            return None
        keys = self.keys(layer, kind, T, S)
        if self.config.rules == "ours" and T > 100:
            return merge_keys(keys)
        return fill_empty(dense_bias(keys, S), self.config.rules)

# 6. Proof -----------------------------------------------------------------------------------------
# A calibrated model with one decoder layer, no encoder and no positions can be proved exact at
# every length, because its rows see only finitely many things. So can a model with a fixed window,
# if it has no positions or positions that repeat.
#
# Row t, which writes digit t of the answer (the last writes END), depends on its *window* alone:
# the token before it and, for each head, the tokens at its open keys with their biases, in any
# order. An anti-diagonal shows row t the digit at place t + a constant, a vertical shows all rows
# the same marker or single digit, and a diagonal of self-attention an earlier token of the answer.
#
# Let the places that a row sees span `reach` places. Lower places affect the row only through the
# rest that they hand on: that is what a task is. Higher places matter only because the final rest
# must be 0. From some number of lower places on, `below`, the set of rests that they can hand on no
# longer changes; from some number of higher places on, `above`, neither does the set of rests from
# which the final rest can be 0. So all rows with at least `below` places below what they see, and
# at least `above` and the headroom above it, see the same windows at every width. A number of
# `below + reach + above + headroom` places has such a row. A row of a longer number with too few
# places on one side has enough on the other, and sees what this number's row at the same end sees.
# So widths up to this one show all windows; if positions repeat after p rows, p widths from it on.
#
# Induction: if the tokens before row t are right, row t sees one of these windows; if the model is
# right on each window, so is row t. Hence greedy decoding is right at any length. Other widths sum
# in another order, which changes logits of about 10 by about 1e-5, so the right token must lead by
# MARGIN and by a thousandth of the largest logit.

MARGIN = 0.5  # logits by which the right token must lead
TOO_MANY = 2 ** 24  # limit on the states that one place can lead to
KAPPAS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)

def open_keys(bias, kind, T, S):
    """OpenKeys of a one-layer model: of its ABC lines, or of its fixed window, for all heads."""
    if isinstance(bias, CalibratedBias):
        return merge_keys(bias.keys(0, kind, T, S))
    window = bias(0, kind, T, S)[0]  # (T, S)
    values, columns = window.topk(int((window > -INF).sum(1).max()))
    return OpenKeys(columns, values[None])

def views_of_rows(bias, period, source, target, rows):
    """What rows [R] see of questions, source (B, S), target (B, T + 1) -> (B, R, L) numbers, equal
    where a model with this bias sees the same: the token before the row, then each head's open
    keys, sorted, each as 2 * token + bias. Biases, differences of attention weights, are between -1
    and 0, so keys' numbers differ. A token's number includes its position modulo `period`, in
    sources from the end."""
    T, S = target.shape[1] - 1, source.shape[1]
    before = target[:, :-1] * period + torch.arange(T) % period
    source = source * period + torch.arange(S).flip(0) % period
    parts = [before[:, rows, None].double()]
    for kind, tokens, N in ("self", before, T), ("cross", source, S):
        columns, values = open_keys(bias, kind, T, N)
        keys = 2.0 * tokens[:, None, columns[rows]] + values[:, rows].double()  # (B, H, R, K)
        parts.append(keys.sort(3).values.transpose(1, 2).flatten(2))
    return torch.cat(parts, 2)

class Windows:
    """The windows, in the questions added, of models with these lines or, without lines, with the
    method's fixed window. seen: window -> the token to write and a question that shows it.
    questions: those that show a new window, in chunks of source (B, S), target (B, T + 1). clash:
    two questions that look the same to a row that must write different tokens; without one, the
    view determines the answer. why: reason for no proof."""
    def __init__(self, config, lines=None, pool=()):
        method = METHODS[config.method]
        self.period = max(1, method.period)
        self.bias = bind(method.bias, config) if lines is None else CalibratedBias(config, lines)
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
            self.questions += zip(source[new].split(1000), target[new].split(1000))

def changes_until_stable(rests, follows):
    """Rests (S, R) bool, and which can follow which, (S, R, R) bool -> number of changes from place
    to place until the rests stay the same. Raises: RunFailed after 100 changes."""
    for times in range(100):
        changed = (rests[:, :, None] & follows).any(1)
        if changed.equal(rests):
            return times
        rests = changed
    raise RunFailed("the rests that a place can get do not settle within 100 places")

class Machine:
    """A task's steps as tables over the rests that can be handed on (R, the first one first), the
    single digits (S, k), which are the same at every place, and the columns of digits that numbers
    can have at a place (C, n), that of zeros first. token (R, S, C): the digit written. after (R,
    S, C): index of the rest handed on. Raises: RunFailed above 1,000 rests."""
    def __init__(self, spec):
        self.spec, rests, tokens, after = spec, [spec.first], [], []
        n, k = spec.operands.count("number"), spec.operands.count("digit")
        S, C = spec.base ** k, spec.base ** n
        digits = to_digits(torch.arange(S * C), n + k, spec.base)
        self.columns, self.singles = digits[:C, :n], digits[::C, n:]
        for rest in rests:  # which grows
            token, following = spec.step(torch.full((S * C,), rest), digits)
            tokens.append(token)
            after.append(following)
            rests += sorted(set(following.tolist()) - set(rests))
            if len(rests) > 1000:
                raise RunFailed("more than 1,000 rests can be handed on")
        self.rests, self.token = torch.tensor(rests), torch.stack(tokens).view(-1, S, C)
        self.after = (torch.stack(after)[..., None] == self.rests).byte().argmax(2).view(-1, S, C)

    def places_to_settle(self):
        """-> `below` and `above` of the proof: 1 and 8 for total(rest, a) = (a + rest) % 10 + 10 *
        (a if rest == 0 else rest - 1). Raises: RunFailed if there are no such numbers."""
        index, S = torch.arange(len(self.rests)), len(self.singles)
        follows = (self.after[..., None] == index).any(2).transpose(0, 1)  # (S, R, R)
        ends = (self.rests == 0).expand(S, -1)
        for _ in range(self.spec.headroom):
            ends = ends.gather(1, self.after[:, :, 0].T)  # a zero in front
        if not self.spec.headroom:
            ends = torch.ones_like(ends)
        below = changes_until_stable((index == 0).expand(S, -1), follows)
        return below, changes_until_stable(ends, follows.mT)

    def questions(self, width, digits, tokens):
        """-> operands of this width that produce all windows of a row, which sees the digits and
        tokens of some places. From the last place on, every state is extended by every column of
        digits. Of states that look alike and hand on the same rest, one is kept; columns of unseen
        digits with the same effect are tried once. Raises: RunFailed if there are too many."""
        C, n = self.columns.shape
        seen = which = torch.arange(len(self.singles))  # ids of what is seen; index of singles
        rest, numbers = 0 * seen, torch.zeros(len(seen), 0, n, dtype=torch.int64)
        for place in range(width):
            columns = torch.arange(C)
            if place >= width - self.spec.headroom:
                columns = columns[:1]
            elif place not in digits:
                effects = torch.cat([self.after, self.token][:1 + (place in tokens)])
                columns = first_of_each(effects.flatten(0, 1).T)
            if len(rest) * len(columns) > TOO_MANY:
                raise RunFailed(f"a place leads to more than {TOO_MANY:,} states")
            was = torch.arange(len(rest)).repeat_interleave(len(columns))
            column = columns.repeat(len(rest))
            state = rest[was], which[was], column
            token, after = self.token[state], self.after[state]
            look = seen[was] * C * self.spec.base
            if place in digits:
                look = look + column * self.spec.base
            if place in tokens:
                look = look + token
            look = look.unique(return_inverse=True)[1]
            kept = first_of_each(look * len(self.rests) + after)
            seen, rest, was = look[kept], after[kept], was[kept]
            which = which[was]
            numbers = torch.cat([numbers[was], self.columns[column[kept], None]], 1)
        if self.spec.headroom:
            ended = self.rests[rest] == 0
            which, numbers = which[ended], numbers[ended]
        return list(numbers.unbind(2)) + list(self.singles[which].T[:, :, None])

def has_windows(config):
    """Whether a row's output depends on its window alone."""
    method = METHODS[config.method]
    windowed = method.calibrated or method.period
    placed = method.scores or (method.position and not method.period)
    one_layer = config.n_layer == 1 and not config.n_encoder and not TASKS[config.task].label
    return bool(config.rules == "ours" and windowed and not placed and one_layer)

def enumerate_windows(config, lines=None):
    """-> all Windows, up to the first clash; `why` is set if there are none, or too many."""
    spec, windows = TASKS[config.task], Windows(config, lines)
    if not has_windows(config):
        windows.why = "a proof needs one decoder layer, no encoder, positions or label, our rules"
        return windows
    # Places, relative to t, whose digits row t sees and whose tokens it sees or writes. A diagonal
    # of self-attention shows it the token that row t + offset - 1 has written.
    if lines is None:  # a window of two digits and two tokens
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
                operands = machine.questions(width, {row + place for place in digits},
                                             {row + place for place in tokens})
                windows.add(*arrange(config.task, operands, config.align), [row])
                if windows.clash:
                    return windows
            LOG.info(f"{len(windows.seen):,} windows in numbers of up to {width} digits")
    except RunFailed as error:
        windows.why = str(error)
    return windows

@torch.no_grad()
def prove(model, windows):
    """-> {"proved", "why" not} and, if all windows are known, "windows" and "margin": the least
    lead, in logits, of the right token over all others; checking ends at the first thousand
    questions with one below MARGIN. Where logits exceed 500, the lead must exceed 0.1% of the
    largest, and the excess of this over MARGIN is subtracted from the margin. NaN fails."""
    if windows.why:
        return dict(proved=False, why=windows.why)
    model.eval()
    margin, why = INF, ""
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
    """Lines that determine a pool's answers -> a minimal subset that does, dropped from all heads
    at once, the weakest first. The diagonal of self-attention through the row's own token stays:
    the window has this token anyway, but without the line it is learned more slowly."""
    strength = {}
    for line in lines:
        strength[line.path] = max(strength.get(line.path, 0), line.z)
    strength.pop(("self", 1, 0, 0), None)
    for path in sorted(strength, key=strength.get):
        fewer = [line for line in lines if line.path != path]
        if not Windows(config, fewer, pool).clash:
            lines = fewer
    return lines

def choose_lines(config, attention):
    """Averaged attention -> kappa, lines, Windows: a minimal set of lines that determine the
    answer. Kappa falls until the open lines determine the answers of a pool of questions;
    superfluous ones are dropped. Then all windows are enumerated; two that clash join the pool. If
    rows depend on more than windows, all lines at the rules' kappa are kept. Raises: RunFailed."""
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
# A run depends only on its options. It makes named parts, such as a model's weights or its test
# results. Each is saved when done, so that an interrupted run resumes with the missing ones.

def flag(name):
    return "--" + name.replace("_", "-")

def option(help, choices=None, least=1, default=None, **kinds):
    """A field of Config: help; choices or the least value; and its default for each kind of model
    that has it (none given: all), None if it is derived from the task or other options."""
    about = dict(help=help, choices=choices, least=least, kinds=kinds)
    return dataclasses.field(default=default, metadata=about)

def number(value, kind, least):
    """Value or text of an option -> an integer up to 10^9, a fraction up to 1 or a tuple of
    integers. Raises: ValueError, TypeError, OverflowError."""
    if kind is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if not len(parts):
            raise ValueError
        return tuple([number(part, int, least) for part in parts])
    read, most = kind(value), 1 if kind is float else 10 ** 9
    if not least <= read == float(value) <= most:
        raise ValueError
    return read

def accept(field, value):
    """Value or text of a field of Config -> its value. Raises: BadInput naming the option."""
    choices, least = field.metadata["choices"], field.metadata["least"]
    if choices and value not in list(choices):
        known = ", ".join(map(str, choices))
        raise BadInput(f"{flag(field.name)}: {value!r} is none of {known}")
    try:
        return value if choices or field.type is str else number(value, field.type, least)
    except (TypeError, ValueError, OverflowError):
        raise BadInput(f"{flag(field.name)}: {value!r} is invalid") from None

# n_encoder, d_model and n_head of encoders.
SIZES = {"small": (3, 64, 4), "base": (6, 512, 8), "standard": (6, 1024, 16),
         "large": (10, 1024, 16)}
# v2, App. B and D; batch, steps and width are those of sums in its code, a tenth for retraining.
# Jelassi, Sec. 2.2: 15,000 epochs of 5,000 examples; its products need --second-digits 3.
PAPERS = {
    "seq2seq": dict(rules="v2", n_encoder=1, n_layer=6, n_head=8, d_model=128, dropout=0.3,
                    lr=1e-5, batch=512, steps=460_000, retrain_steps=46_000, width=61,
                    samples=10_000),
    "encoder": dict(size="standard", dropout=0.1, lr=1e-4, steps=2_343_750, samples=10_000,
                    lengths=(5, 6, 10, 15, 20))}

@dataclasses.dataclass
class Config:
    """Options of a run, as values or as text. None is replaced by the value of the preset, the
    method, the kind of model or the task, in this order. Differs: the defaults are small and fast
    (one decoder layer, no encoder, no dropout); the paper preset has the sources' settings.
    Raises: BadInput naming the option."""
    task: str = option("what to learn, see --list", default="successor")
    model: str = option("what learns it, see --list", TASKS_OF)
    preset: str = option("paper: defaults, norms and embeddings of the source", ("fast", "paper"),
                         seq2seq="fast", encoder="fast")
    seed: int = option("of every random stream", least=0, default=0)
    method: str = option("positions and attention, see --list", METHODS, seq2seq="abc",
                         encoder="rpe-k")
    rules: str = option("of calibration: ours, or those of v1, v2 or the authors' code", RULES,
                        seq2seq="ours")
    size: str = option("n_encoder, d_model and n_head, if not given", SIZES, encoder="small")
    n_encoder: int = option("encoder layers, or rounds of one", least=0, seq2seq=0, encoder=None)
    n_layer: int = option("decoder layers", seq2seq=1)
    n_head: int = option("attention heads", seq2seq=4, encoder=None)
    d_model: int = option("width of the model", seq2seq=64, pairs=128, encoder=None)
    d_head: int = option("width of queries and keys", pairs=32)
    d_vocab: int = option("how many integers, from 4 on", least=4, pairs=16)
    dropout: float = option("probability", least=0, seq2seq=0.0, encoder=0.0)
    clip: int = option("relative tables have offsets from -clip to clip", seq2seq=16, encoder=None)
    lr: float = option("peak learning rate", least=0, seq2seq=None, pairs=1e-3, encoder=3e-3)
    batch: int = option("batch size", seq2seq=None, pairs=300, encoder=32)
    steps: int = option("of the first training", seq2seq=None, pairs=6000, encoder=None)
    retrain_steps: int = option("steps of fine-tuning; limit of the first retraining attempt",
                                seq2seq=None, encoder=1000)
    width: int = option("digits of every number; by default as many as are needed", seq2seq=None,
                        encoder=None)
    lengths: tuple = option("digits, or integers of a sequence, that are tested",
                            seq2seq=(6, 10, 20, 60), pairs=(5,), encoder=(5, 6, 10))
    samples: int = option("questions per length; with a decoder, 200 at most above 100 digits",
                          seq2seq=1000, pairs=10_000, encoder=1000)
    train_digits: int = option("digits of training numbers, at most", encoder=5)
    second_digits: int = option("digits of the second operand, at most", encoder=None)
    modulus: int = option("answers are modulo this", encoder=None)
    prime: int = option("how many of the 5,000 first operands are long", least=0, encoder=0)
    prime_lengths: tuple = option("their digits; by default the longest tested", encoder=None)
    finetune: int = option("long ones to train on afterwards", encoder=None)
    dummy: bool = option("a dummy token before each sequence", (False, True), pairs=False)

    def __post_init__(self):
        models = [name for name, tasks in TASKS_OF.items() if self.task in list(tasks)]
        self.model = self.model or "".join(models[:1])
        if self.model not in models:
            raise BadInput(f"--task: {self.task!r} is learned by {', '.join(models) or 'no model'}")
        usual = {}
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), field.metadata["kinds"]
            if self.kind in kinds:
                usual[field.name] = kinds[self.kind]
            elif kinds and value is not None:
                raise BadInput(f"{flag(field.name)}: not an option of {self.task}, {self.model}")
            if value is not None:
                setattr(self, field.name, accept(field, value))
        if self.preset == "paper":
            self.fill(**PAPERS[self.kind])
        if self.kind == "seq2seq":
            self.fill(**METHODS[self.method or usual["method"]].defaults)
        self.fill(**usual)
        if self.kind == "seq2seq":
            self.settle_seq2seq()
        elif self.kind == "encoder":
            self.settle_encoder()
        if self.method:
            parts = self.n_head
            if METHODS[self.method].scores is rotary:
                parts = 2 * self.n_head  # rotated heads need pairs of channels
            if self.d_model % parts:
                raise BadInput(f"--n-head: {parts} does not divide --d-model {self.d_model}")

    def fill(self, **values):
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def settle_seq2seq(self):
        spec, method, digits = TASKS[self.task], METHODS[self.method], VOCAB.index("+")
        signs = set(VOCAB[digits:]) - {START, END, PAD}
        n, k = spec.operands.count("number"), spec.operands.count("digit")
        ordered = n and list(spec.operands) == ["number"] * n + ["digit"] * k
        signed = n + k == 1 or spec.sign in signs
        based = isinstance(spec.base, int) and 2 <= spec.base <= digits
        if not (ordered and signed and based):
            raise BadInput(f"--task: {self.task} needs a base of 2 to {digits}, operands that are "
                           f"numbers, then digits, and between them a sign of {sorted(signs)}")
        self.fill(lr=spec.lr, batch=spec.batch, steps=spec.steps * method.steps,
                  retrain_steps=spec.retrain_steps)
        if not spec.width <= max(self.widths) <= 2000:
            raise BadInput(f"--width: {self.width} is not {spec.width} to 2,000")
        far = method.calibrated and self.rules == "ours" and not self.n_encoder
        if max(self.lengths) > 2000 and not far:
            raise BadInput("--lengths: more than 2,000 needs ABC by our rules without an encoder")

    def settle_encoder(self):
        spec, (n_encoder, d_model, n_head) = ENCODER_TASKS[self.task], SIZES[self.size]
        self.fill(n_encoder=n_encoder, d_model=d_model, n_head=n_head, steps=spec.steps,
                  second_digits=spec.second_digits, prime_lengths=(max(self.lengths),))
        needed = max(*self.lengths, *self.prime_lengths, self.train_digits, self.second_digits or 1)
        # Differs: two more, so that PAD stands behind the longest tested numbers, as in training.
        self.fill(width=needed + 2 if self.preset == "fast" else needed)
        self.fill(clip=2 * self.width)
        if not needed <= self.width <= 2000:
            raise BadInput(f"--lengths, --prime-lengths, --train-digits and --second-digits need a "
                           f"--width of {needed} to 2,000. Got {self.width}.")
        if not self.n_encoder:
            raise BadInput("--n-encoder: an encoder needs a layer")
        if self.method in ("abc", "alibi-decoder") or METHODS[self.method].align:
            raise BadInput(f"--method: {self.method} needs a decoder")

    @property
    def kind(self):
        """seq2seq, pairs or encoder; "universal" is an encoder that repeats one layer."""
        return "encoder" if self.model == "universal" else self.model

    @property
    def align(self):
        return METHODS[self.method].align and len(TASKS[self.task].operands) == 2

    @property
    def widths(self):
        """Widths of training numbers of an encoder-decoder."""
        if self.width:
            return [self.width]
        narrowest = TASKS[self.task].width
        return range(narrowest, narrowest + METHODS[self.method].n_width)

class Optimizer:
    """Muon for the matrices of layers and Adam, at a quarter of its rate, for all else; or (paper
    preset, pairs) Adam for all. `share`, of the peak rate, is set before a step. It is no
    torch.optim.Optimizer, whose import takes a second; CUDA graphs need rates and state in tensors.
    Muon: momentum, made orthogonal by five Newton-Schulz steps, at the size of Adam's updates;
    matrices of one shape are stacked. Source: Jordan et al. 2024; size, 0.2 sqrt(max(rows,
    columns)): Liu et al. 2025. Adam: Kingma and Ba 2015; its decay: Loshchilov and Hutter 2019.
    Differs: the sources use Adam, Jelassi with decay (AdamW), of 1e-5 to 1e-2."""
    def __init__(self, model, config):
        self.lr, self.decay = config.lr, 0.01 if config.kind == "encoder" else 0.0
        self.beta = 0.98 if config.kind == "seq2seq" else 0.999
        self.weights, self.matrices, self.others = list(model.parameters()), {}, []
        for name, weight in model.named_parameters():
            # Matrices of encoder.0, decoder.0, ..., except for those that make scores.
            layered = weight.dim() == 2 and "coder." in name and ".scores." not in name
            if layered and config.preset == "fast":
                self.matrices.setdefault(weight.shape, []).append(weight)
            else:
                self.others.append(weight)
        self.sizes = [weight.numel() for weight in self.others]
        vector = nn.utils.parameters_to_vector(self.others).detach()
        self.share, self.steps = torch.ones_like(vector[0]), torch.zeros_like(vector[0])
        self.mean, self.square = torch.zeros_like(vector), torch.zeros_like(vector)
        self.momenta = [vector.new_zeros(len(x), *shape) for shape, x in self.matrices.items()]
        # A CUDA graph refers to these tensors, so they are restored in place.
        self.state = [self.steps, self.mean, self.square] + self.momenta

    @torch.no_grad()
    def step(self):
        rate = self.share * self.lr
        for weights, momentum in zip(self.matrices.values(), self.momenta):
            grads = torch.stack([weight.grad for weight in weights])
            momentum.lerp_(grads, 0.05)
            update = orthogonal(grads.lerp(momentum, 0.95))  # Nesterov
            size = 0.2 * math.sqrt(max(update.shape[1:]))
            for weight, change in zip(weights, update * (rate * size)):
                weight.sub_(change)
        if self.matrices:
            rate = rate / 4
        grad = nn.utils.parameters_to_vector([x.grad for x in self.others])
        self.steps += 1
        self.mean.lerp_(grad, 0.1)
        self.square.lerp_(grad * grad, 1 - self.beta)
        spread = (self.square / (1 - self.beta ** self.steps)).sqrt() + 1e-8
        update = self.mean / (1 - 0.9 ** self.steps) / spread
        for weight, change in zip(self.others, update.split(self.sizes)):
            weight.sub_(rate * (change.view_as(weight) + self.decay * weight))

def orthogonal(x):
    """Matrices (n, a, b) -> approximately the nearest semi-orthogonal ones."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, square, x, beta=3.4445)
    return x

def take_step(model, optimizer, source, target):
    """-> the loss: cross-entropy of target (B, T + 1). Differs: gradients are clipped at norm 1."""
    model.train()
    for weight in optimizer.weights:
        weight.grad = None
    target = target.to(optimizer.share.device)
    logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.weights, 1.0)
    optimizer.step()
    return loss.detach()

class GraphedStep:
    """`take_step`, on CUDA as a graph: hundreds of launches take about 9 ms, a replay 1 ms. A
    shape's first batch is an ordinary step, as warm-up; the next is captured, which runs nothing,
    and replayed; later ones are copied in. So each counts once. A replay overwrites the loss."""
    def __init__(self, model, optimizer, graphed):
        self.step = functools.partial(take_step, model, optimizer)
        self.device, self.graphed, self.graphs = optimizer.share.device, graphed, {}

    def __call__(self, source, target):
        shape = source.shape, target.shape
        if not self.graphed or shape not in self.graphs:
            self.graphs[shape] = None
            return self.step(source, target)
        if self.graphs[shape] is None:
            graph, batch = torch.cuda.CUDAGraph(), [x.to(self.device) for x in (source, target)]
            with torch.cuda.graph(graph):
                loss = self.step(batch[0], batch[1])
            self.graphs[shape] = graph, batch, loss
        graph, batch, loss = self.graphs[shape]
        batch[0].copy_(source)
        batch[1].copy_(target)
        graph.replay()
        return loss

def write(folder, name, data):
    """Write a file by renaming, so that none is half-written. On a full disk the run goes on."""
    path, beside = Path(folder, name), Path(folder, f"{name}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        LOG.error(f"lengen: {path} cannot be written: {error.strerror}")
        beside.unlink(missing_ok=True)

class Run:
    """Options and named parts, saved in checkpoint.pt if there is a folder."""
    def __init__(self, config, folder=None, parts=None, device="cpu"):
        self.config, self.folder, self.parts = config, folder, parts or {}
        self.device = torch.device(device)

    def keep(self, name, part):
        self.parts[name] = part
        self.save()

    def save(self):
        """Save all as plain values and tensors, which load without running code."""
        if self.folder:
            buffer, config = io.BytesIO(), dataclasses.asdict(self.config)
            torch.save(dict(config=config, vocab=VOCAB, parts=self.parts), buffer)
            write(self.folder, "checkpoint.pt", buffer.getvalue())

def train(run, model, name, steps, data, windows=None):
    """Train a model and keep the part {"weights", "steps", "seconds", "curve"}, or load it; a part
    with the state of an "optimizer" is unfinished and resumes. data: `batch(step)` -> source (B,
    S), target (B, T + 1); `rate(step)` -> share of the peak rate; `check(model)` -> list, for the
    curve: [step, loss, *check] every 100 steps. windows: from step 50 on, every 25 steps, training
    stops if the model is proved on them. Raises: RunFailed if the loss is not finite."""
    optimizer = Optimizer(model, run.config)
    take = GraphedStep(model, optimizer, run.device.type == "cuda")
    part = run.parts.get(name, dict(steps=0, seconds=0.0, curve=[]))
    if part["steps"]:
        model.load_state_dict(part["weights"])
        if "optimizer" not in part:
            return
        for state, kept in zip(optimizer.state, part["optimizer"], strict=True):
            state.copy_(kept)
    told, curve = time.perf_counter(), part["curve"]
    start = told - part["seconds"]
    for step in range(part["steps"] + 1, steps + 1):
        optimizer.share.fill_(data.rate(step))
        with seeded(run.config.seed, name, step):
            source, target = data.batch(step)
            loss = take(source, target)
        last = step == steps
        if windows and not windows.why and step % 25 == 0 and step >= 50:
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

def new_model(run, kind, config, name):
    """-> Transformer or PairsHead, initialized by the seed and this name."""
    with seeded(config.seed, name):
        return kind(config).to(run.device)

def test_questions(config, length):
    """-> test sets by name; encoder-decoders also have "hard", at the longest length up to 60."""
    if config.kind == "pairs":
        return {"random": draw_pairs(config, config.samples, length)}
    if config.kind == "encoder":
        pairs = [draw_integers(config, length) for _ in range(config.samples)]
        return {"random": arrange_encoder(config, pairs)}
    samples = config.samples
    if length > 100:
        samples = min(samples, 200)  # they take long
    sets = {"random": draw_questions(config, draw_exact, length, samples)}
    if length == max([n for n in config.lengths if n <= 60], default=0):
        sets["hard"] = draw_questions(config, draw_hard, length, samples)
    return sets

def evaluate(model, config):
    """Test at config.lengths -> {"rows", "seconds"}. A row has exact answers ("correct" of "n") and
    the accuracy of each digit ("places")."""
    rows, start = [], time.perf_counter()
    for length in sorted(set(config.lengths)):
        LOG.info(f"test of {length} digits")
        with seeded(config.seed, "test", length):
            questions = test_questions(config, length)
        for name, (source, target) in questions.items():
            right = right_tokens(model, source, target)
            digit = torch.isin(target[:, 1:], encode(END + PAD), invert=True)
            places = ((right & digit).sum(0) / digit.sum(0))[digit.any(0)]
            rows.append(dict(digits=length, set=name, correct=right.all(1).sum().item(),
                             n=len(right), places=[round(x, 4) for x in places.tolist()]))
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

class Numbers:
    """Training data of an encoder-decoder, checked on 1,000 held-out questions. After 30 warm-up
    steps the rate falls, over the last 40% of a first training or throughout a retraining; the
    paper preset keeps it constant. A first training favors small numbers: half of the first are
    below 1.6% of the range. Differs: the sources draw uniformly and name no schedule."""
    def __init__(self, config, steps, first):
        self.config, self.steps, self.first = config, steps, first
        self.training, self.held_out = split_numbers(config.seed)

    def batch(self, step):
        power = 1.0
        if self.first:
            power = 6 - 5 * step / self.steps
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

def draw_numbers(numbers, power, base, length, B):
    """B of these numbers -> lowest digits (B, length). A power above 1 favors the first (short)."""
    pick = (len(numbers) * torch.rand(B) ** power).long()
    return to_digits(numbers[pick], length, base)

def training_batch(config, numbers, B, power=1.0):
    """B questions on some of these numbers, at one of the run's widths -> source, target."""
    width = config.widths[int(torch.randint(len(config.widths), (1,)))]
    draw = functools.partial(draw_numbers, numbers, power)
    return draw_questions(config, draw, width, B, width, distinct=False)

def learn_method(run):
    """Train by a method other than ABC, until proved where a proof is possible -> model, proof."""
    config = run.config
    model, windows = new_model(run, Transformer, config, "model"), enumerate_windows(config)
    if windows.clash:
        LOG.info(f"no training makes it exact: {windows.why}")
    train(run, model, "model", config.steps, Numbers(config, config.steps, first=True), windows)
    return model, prove(model, windows)

def learn_abc(run):
    """Train a model by ABC in five stages, each named by its start -> model, proof. Source: v1,
    Sec. 5; v2, App. D. Differs: short numbers prevail at first; rates fall; so does kappa, until
    windows decide; lines are as few as needed; retraining starts from the vanilla model and ends
    when it is proved."""
    config = run.config
    # 1. From random weights: a vanilla model learns the training numbers. It is never tested.
    plain = dataclasses.replace(config, method="vanilla", lengths=(6,))
    data = Numbers(plain, config.steps, first=True)
    vanilla = new_model(run, Transformer, plain, "vanilla")
    train(run, vanilla, "vanilla", config.steps, data)
    # 2. From the vanilla model: its attention, averaged over 1,000 training questions.
    if "attention" not in run.parts:
        with seeded(config.seed, "attention"):
            source, target = training_batch(plain, data.training, 1000)
        run.keep("attention", collect_attention(vanilla, source, target))
    # 3. From the averaged attention: a minimal set of lines that determine the answer, and windows.
    kappa, lines, windows = choose_lines(config, run.parts["attention"])
    for attempt in 1, 2:
        # 4. From the vanilla weights, but with queries and keys at zero, so that the bias alone
        # determines attention. They stay zero, as each one's gradient is a product with the other.
        # The second attempt, and the only one by the other rules, starts from random weights.
        name, steps = f"attempt {attempt}", attempt * config.retrain_steps
        model = new_model(run, Transformer, config, name)
        model.bias.lines = lines
        if attempt == 1 and config.rules == "ours":
            weights = vanilla.state_dict()
            for key in weights:
                if ".q." in key or ".k." in key:
                    weights[key] = torch.zeros_like(weights[key])
            model.load_state_dict(weights, strict=False)  # all but the lines
        train(run, model, name, steps, Numbers(config, steps, first=False), windows)
        # 5. From the retrained model and all windows: the proof.
        proof = prove(model, windows)
        if proof["proved"] or windows.why:
            break
    run.parts["model"] = run.parts.pop(name)
    proof |= dict(kappa=kappa, attempt=attempt, lines=[line._asdict() for line in lines])
    return model, proof

def ask(model, config, question):
    """A question, as "123+748" or "123 + 748" -> "871". Raises: BadInput outside the task."""
    spec = TASKS[config.task]
    operands = [text.strip() for text in question.split(spec.sign or None)]
    width = max([config.widths[0]] + [len(text) + spec.headroom for text in operands])
    source, target = example(config.task, *operands, width=width, align=config.align)
    text = decode(generate(model, encode(source)[None], len(target) - 1)[0])[1:]
    digits, end, _ = text.partition(END)
    if not end or not digits or set(digits) - set(VOCAB[:spec.base]):
        return f"no number; the model wrote {text!r}"
    if spec.headroom:
        return digits[::-1].lstrip("0") or "0"
    return digits[:max(map(len, operands))][::-1]  # a digit for each that was asked

# 8. Consecutive pairs: one attention head, read completely ----------------------------------------
# Source: Pairs. Tokens are integers 0 .. V - 1; a label is 1 if its integer - 1 or + 1 also occurs.
# One layer, one head, no feed-forward; as the source names none, no positions, norm or residual.

def draw_pairs(config, B, length):
    """-> source (B, length), with `dummy` a token V before it, target (B, 1 + length), the labels
    after a start token. Integers are uniform; the source does not say how it draws."""
    tokens = torch.randint(config.d_vocab, (B, length))
    label = torch.zeros_like(tokens)
    for other in tokens.unbind(1):
        label |= ((tokens - other[:, None]).abs() == 1).long()
    if config.dummy:
        tokens = F.pad(tokens, (1, 0), value=config.d_vocab)
    return tokens, F.pad(label, (1, 0))

class PairsHead(nn.Module):
    """Source (B, T), target -> logits (B, T, 2), 0 and z. Differs: the output bias of +5 makes
    every integer first predict 1; the dummy's larger embedding lets it learn 0 quickly."""
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
        return torch.cat([torch.zeros_like(z), z], 2)

class Pairs:
    """Training data: sequences of five integers. Differs: the rate is constant; the source reduces
    it on a plateau (patience 100) and takes the best of several seeds."""
    def __init__(self, config):
        self.config = config

    def batch(self, step):
        return draw_pairs(self.config, self.config.batch, 5)

    def rate(self, step):
        return 1.0

    def check(self, model):
        return []

def learn_pairs(run):
    """-> model, {}, as there is no proof."""
    model = new_model(run, PairsHead, run.config, "model")
    train(run, model, "model", run.config.steps, Pairs(run.config))
    return model, {}

# 9. Encoders: one pass, relative positions, priming -----------------------------------------------
# Source: Jelassi. Digit t of the answer is read off at token t. Numbers have the highest digit
# first and padding on the right, so places align only at equal length. + and * replace the paper's
# four signs.

def arrange_encoder(config, pairs):
    """Pairs of integers -> source (B, 2W + 1), target (B, 1 + n), as "12@+39@" and "$51@@" for W =
    3; START is not read. Source: Jelassi, Sec. 2.1 (printed with a pad less)."""
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

def draw_integers(config, length, even=False):
    """Two positive integers of up to `length` and second_digits digits; even: uniform in length."""
    pair = []
    for most in length, config.second_digits or length:
        least = 0
        if even:
            most = RANDOM.randint(1, most)
            least = most - 1
        pair.append(RANDOM.randrange(10 ** least, 10 ** most))
    return pair

class EncoderExamples:
    """Training data of an encoder: questions with n first operands, of which `prime` are long and
    keep their second one; others draw it anew. The curve has the exact share of new questions and,
    with `prime`, of the longest (Figs. 3b, 4d). Differs: 100 steps of warm-up; draws with
    replacement; except in the paper preset, all lengths of short numbers are equally likely."""
    def __init__(self, config, name, n, prime, steps):
        self.config, self.prime, self.steps = config, prime, steps
        self.even, self.pairs = config.preset == "fast", []
        with seeded(config.seed, name, "examples"):
            for i in range(n):
                if i < prime:
                    length = config.prime_lengths[i % len(config.prime_lengths)]
                    self.pairs.append(draw_integers(config, length))
                else:
                    self.pairs.append(draw_integers(config, config.train_digits, self.even))

    def batch(self, step):
        pairs = []
        for _ in range(self.config.batch):
            i = RANDOM.randrange(len(self.pairs))
            a, b = self.pairs[i]
            if i >= self.prime:
                _, b = draw_integers(self.config, self.config.train_digits, self.even)
            pairs.append((a, b))
        return arrange_encoder(self.config, pairs)

    def rate(self, step):
        return min(1.0, step / 100) * (1 + math.cos(math.pi * step / self.steps)) / 2

    def check(self, model):
        lengths = [self.config.train_digits]
        if self.prime:
            lengths.append(max(self.config.prime_lengths))
        few = dataclasses.replace(self.config, lengths=tuple(lengths), samples=200)
        return [row["correct"] / row["n"] for row in evaluate(model, few)["rows"]]

def learn_encoder(run):
    """Train on short numbers and, with --prime, a few long ones; with --finetune, test, then train
    on long ones -> model, {} (no proof). Source: Jelassi, Secs. 2.2 and 5."""
    config, n = run.config, run.config.finetune  # the paper's 5,000 first operands come first
    model, name = new_model(run, Transformer, config, "model"), "model"
    if n:
        name = "short numbers"
    data = EncoderExamples(config, name, 5000, config.prime, config.steps)
    train(run, model, name, config.steps, data)
    if n:
        if "before" not in run.parts:
            run.keep("before", evaluate(model, config))
        data = EncoderExamples(config, "model", n, n, config.retrain_steps)
        train(run, model, "model", config.retrain_steps, data)
    return model, {}

# 10. Command line ---------------------------------------------------------------------------------

def build(config, parts):
    """Parts of a run, of any model -> its trained model, ready to answer."""
    weights = parts["model"]["weights"]
    if config.kind == "pairs":
        model = PairsHead(config)
    else:  # symbols may have been added to VOCAB since
        model = Transformer(config, len(weights["embedding.weight"]))
    model.load_state_dict(weights)
    return model.eval()

def read_checkpoint(folder):
    """-> config, parts; code in the file never runs. Raises: BadInput if it is bad in any way."""
    path = Path(folder, "checkpoint.pt")
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise ValueError("it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not VOCAB.startswith(state["vocab"]):
            raise ValueError(f"its symbols are {state['vocab']}, those of VOCAB {VOCAB}")
        return Config(**state["config"]), dict(state["parts"])
    except Exception as error:
        raise BadInput(f"{str(folder)!r} cannot be used: {error!r:.300}") from None

def load(folder):
    """Folder of a finished run -> model, config, parts. Raises: BadInput."""
    config, parts = read_checkpoint(folder)
    if "tests" not in parts:
        raise BadInput(f"{str(folder)!r} is not finished; finish it by --from alone")
    return build(config, parts), config, parts

def percent(share):
    """Rounded down: 100 is all."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}%"

def make_record(run):
    machine = f"cpu, threads: {torch.get_num_threads()}"
    if run.device.type == "cuda":
        machine = torch.cuda.get_device_name(run.device)
    training = {}
    for name, part in run.parts.items():
        if "weights" in part:
            training[name] = {key: part[key] for key in ("steps", "seconds", "curve")}
    proof = dict(run.parts.get("proof", {}))
    return dict(config=dataclasses.asdict(run.config), torch=torch.__version__, source=SOURCE,
                device=machine, train=training, lines=proof.pop("lines", []), proof=proof,
                before=run.parts.get("before"), tests=run.parts["tests"])

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

def pick_device(config, name=None):
    """"cpu", "cuda" or None -> torch.device. Raises: BadInput."""
    if os.environ.get("WORLD_SIZE", "") not in ("", "1"):
        raise BadInput("WORLD_SIZE: a run is one process; start it without torchrun")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device: there is no cuda device")
    if config.d_model <= 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads help little
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))

def new_folder(config, out, several):
    """A new folder, so that no two runs share one. Raises: BadInput."""
    method = config.method or config.model
    folder = Path(out or f"runs/{config.task}-{method}-seed{config.seed}-{time.time_ns()}")
    if out and several:
        folder = folder / f"seed{config.seed}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"--out: {str(folder)!r} cannot be a new folder: {error.strerror}") from None
    return folder

def execute(config, folder, parts, options):
    """Make the missing parts of a run; print and keep its results."""
    run = Run(config, folder, parts, pick_device(config, options.device))
    LOG.info(f"{config.task}, seed {config.seed}, {run.device}, {folder or ''}")
    run.save()
    if "proof" in run.parts:
        model = build(config, parts).to(run.device)
    else:
        learn = {"pairs": learn_pairs, "encoder": learn_encoder}.get(config.kind, learn_method)
        if config.kind == "seq2seq" and METHODS[config.method].calibrated:
            learn = learn_abc
        model, proof = learn(run)
        run.keep("proof", proof)
    if "tests" not in run.parts:
        run.keep("tests", evaluate(model, config))
    record = make_record(run)
    if folder:
        write(folder, "result.json", json.dumps(record).encode())
    print(json.dumps(record) if options.json else "\n".join(summary(record)), flush=True)

def go_on(given, options):
    """--from: finish a run, or test a finished one, whose folder stays as it is."""
    config, parts = read_checkpoint(options.folder)
    if given:
        config = dataclasses.replace(config, **given)
        parts.pop("tests", None)
    finished = Path(options.folder, "result.json").exists()
    execute(config, None if finished else options.folder, parts, options)

def ask_all(options):
    folder = options.folder
    if folder is None:
        finished = sorted(Path("runs").rglob("result.json"), key=os.path.getmtime)
        if not finished:
            raise BadInput("--ask: no finished run under runs/")
        folder = finished[-1].parent
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
        raise BadInput(message.removeprefix("argument "))

def parse(argv):
    """Arguments -> the given options of a run, and the options of the command."""
    p = Parser(prog="lengen.py", allow_abbrev=False, add_help=False)
    names = [field.name for field in dataclasses.fields(Config)]
    for field in dataclasses.fields(Config):
        how = dict(help=field.metadata["help"], default=argparse.SUPPRESS)
        if field.type is bool:
            how["action"] = "store_true"
        p.add_argument(flag(field.name), **how)
    p.add_argument("--seeds", type=int, default=1, help="runs, from --seed on")
    p.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda if there is one")
    p.add_argument("--out", help="a new folder, by default in runs/")
    p.add_argument("--from", dest="folder", metavar="DIR",
                   help="finish a run, test it at --lengths and --samples, or --ask it")
    p.add_argument("--ask", nargs="+", help="123+748, of --from or of the newest finished run")
    p.add_argument("--json", action="store_true", help="print the record, JSON")
    p.add_argument("--quiet", action="store_true", help="no reports")
    p.add_argument("--list", action="store_true", help="print tasks, methods and models")
    p.add_argument("--help", action="store_true", help="print this, and the options of a run")
    options = p.parse_args(argv)
    given = {name: value for name, value in vars(options).items() if name in names}
    if options.ask and given or options.folder and given.keys() - {"lengths", "samples"}:
        raise BadInput("--ask takes no option of a run, --from only --lengths and --samples")
    if options.seeds < 1 or (options.ask or options.folder) and (options.out or options.seeds > 1):
        raise BadInput("--seeds is 1 or more; --out and --seeds go neither with --from nor --ask")
    return given, options, p

def main(argv=None):
    """-> exit code: 0 done, 1 a run failed (other seeds go on), 2 bad input, 130 interrupted."""
    LOG.handlers = [logging.StreamHandler()]
    code = 0
    try:
        given, options, parser = parse(argv)
        LOG.setLevel(logging.ERROR if options.quiet else logging.INFO)
        if options.help:
            parser.print_help()
            print(f"\nwith these options: {Config(**given)}", flush=True)
        elif options.list:
            for name, tasks in TASKS_OF.items():
                for task, spec in tasks.items():
                    print(f"--model {name:<9} --task {task:<21} {spec.about}")
            for name, method in METHODS.items():
                print(f"--method {name:<14} {method.about}", flush=True)
        elif options.ask:
            ask_all(options)
        elif options.folder is not None:
            go_on(given, options)
        else:
            config = Config(**given)
            pick_device(config, options.device)  # before a folder is made
            seeds = range(config.seed, config.seed + options.seeds)
            for config in [dataclasses.replace(config, seed=seed) for seed in seeds]:  # checks all
                try:
                    execute(config, new_folder(config, options.out, len(seeds) > 1), {}, options)
                except RunFailed as error:
                    code = fail(error, 1)
        return code
    except KeyboardInterrupt:
        return fail("interrupted; go on by --from DIR", 130)
    except RunFailed as error:
        return fail(error, 1)
    except BadInput as error:
        return fail(error, 2)
    except OSError as error:  # of standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):  # as of `| head`
            return 0
        return fail(f"standard output cannot be written: {error.strerror}", 2)

if __name__ == "__main__":
    sys.exit(main())
