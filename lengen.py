# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

A transformer that is trained on numbers of about 6 digits answers questions of 60 and of 1,000
digits exactly if its attention may only look where it looked on short numbers. This file trains
it, finds those places (Attention Bias Calibration, ABC), proves that the result is exact at every
length, and tests it, beside other methods.

    python lengen.py --task successor --method abc        # train, calibrate, retrain, prove, test
    python lengen.py --task addition --method vanilla     # right at 6 digits, wrong at 10
    python lengen.py --ask 123+748                        # ask the newest finished run
    python lengen.py --task addition --help               # its options

Sections 1 to 7 are ABC, to be read in this order: tasks, positions and biases, attention, the
transformer, calibration, proof, training. Section 8 (consecutive pairs) and section 9 (encoders)
are systems of their own, and section 10 is the command line.

Letters: B batch, T queries, S keys, K keys of one row, H heads, D width of a head, C = H * D width
of the model, V vocabulary, W digits of a number. Attention is m x n at training length and M x N at
another. Lengths count digits. Places are counted from the last digit, which has place 0. `Source:`
says where something comes from, `Differs:` where it departs from it.

Random numbers come from torch's global generator, inside `seeded` blocks that leave it as they
found it; so two runs need two processes, not two threads.

v1: Duan and Shi, From Interpolation to Extrapolation: Complete Length Generalization for Arithmetic
Transformers, 2023. v2: Duan, Shi and Xu, Attention Bias as an Inductive Bias: How to Teach
Transformers Simple Arithmetic, 2024. Jelassi: Jelassi et al., Length Generalization in Arithmetic
Transformers, 2023. Pairs: an unsigned study of consecutive pairs.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import json
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
INF = float("inf")
SECONDS = 3  # between two reports, and two saves, of long work

class BadInput(ValueError):
    """An error that the user can fix. The command prints one line and exits with 2."""

class RunFailed(RuntimeError):
    """A run cannot continue. The command prints one line and exits with 1."""

def silent(text):
    """Discard a progress report."""

@contextlib.contextmanager
def seeded(*names):
    """Seed torch with `names`, such as (seed, "test", 60), so that no draw in the block depends on
    another. On exit torch's random state is restored."""
    with torch.random.fork_rng():
        torch.manual_seed(random.Random(repr(names)).getrandbits(63))
        yield

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

class Task(NamedTuple):
    """A task is a machine that goes from place to place, from the last place to the first.

    At each place `total(rest, *digits)` is computed from the digits that the operands have there
    and from the rest that the previous place has handed on. The total modulo the base is the digit
    of the answer; the total divided by the base, rounded down, is the rest for the next place. All
    arguments and the total are integer tensors of one shape.

    With headroom, each number has leading zeros, and operands that leave a rest after the first
    place are invalid. Without headroom the last rest is dropped.
    """
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
        """Rest (B,), digits (B, n) of a place -> digit of the answer, rest for the next place."""
        total = self.total(rest, *digits.unbind(1))
        return total % self.base, total // self.base  # rounds down: a negative total borrows

    @property
    def width(self):
        """Digits of training numbers: enough for all below LIMIT, or twice that with headroom."""
        width = 1
        while self.base ** width < LIMIT * 2 ** self.headroom:
            width += 1
        return width

def xor(rest, a):
    """Running xor: the digit that is written is also handed on."""
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

# Tasks of encoders (section 9), at width 3. Without headroom an answer is as long as its longer
# operand; in a product with a second operand of several digits, all of it is the "digit".
ENCODER_TASKS = {
    # 12@+39@ -> $51@@, modulo 100 $51
    "addition": TASKS["addition"]._replace(steps=16_000),
    # 12@*9@@ -> $108@@@, modulo 100 $08
    "multiplication": TASKS["nx1"]._replace(about="a * b, b of few digits", steps=10_000),
    # 15@+27@ -> $32@
    "elementwise-addition": Task("a + b, carries dropped", lambda rest, a, b: (a + b) % 10,
                                 ("number", "number"), "+", headroom=0, steps=6000),
}
# What each model learns.
TASKS_OF = {"seq2seq": TASKS, "pairs": {"consecutive": Task("is a neighbor there?", None)},
            "universal": ENCODER_TASKS, "encoder": ENCODER_TASKS}

def answer_digits(spec, operands):
    """Operand digits (B, W), (B, 1) -> digits of the answers (B, W), the last rests (B,)."""
    columns = torch.stack(torch.broadcast_tensors(*operands), 2)  # (B, W, n)
    rest, digits = torch.full_like(columns[:, 0, 0], spec.first), []
    for column in columns.unbind(1):
        digit, rest = spec.step(rest, column)
        digits.append(digit)
    return torch.stack(digits, 1), rest

def arrange(task, operands, align=False):
    """Operand digits (B, W), (B, 1) -> tokens of the valid questions: source (B, S), target
    (B, T + 1).

    `$0123+0748&` has the most significant digit first, its answer `$1780&` the least, as carries
    run. align: two operands interleaved, `$+00172438&`. Source: v1, Sec. 3.2; v2, App. D.1 and
    C.4 (align).
    """
    spec = TASKS[task]
    answer, rest = answer_digits(spec, operands)
    if spec.label:
        answer = answer[:, -1:]
    sign, start, end = (encode(x).expand(len(answer), -1) for x in (spec.sign, START, END))
    question = [start]
    if align:
        pairs = torch.stack(torch.broadcast_tensors(*operands), 2)  # (B, W, 2)
        question += [sign, pairs.flip(1).flatten(1)]
    else:
        for digits in operands:
            question += [sign, digits.flip(1)]
        del question[1]  # no sign before the first
    source, target = torch.cat(question + [end], 1), torch.cat([start, answer, end], 1)
    if not spec.headroom:
        return source, target
    return source[rest == 0], target[rest == 0]

def example(task, *operands, width=None, align=False):
    """One worked example: example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&").
    The default width is that of the longest operand plus the headroom. Raises: BadInput if the
    question is invalid or too wide."""
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
    """-> (training, held-out) integers, sorted, parted 7 : 1. Source: v2, App. B. Differs: 2^20
    itself is left out; it alone has 21 bits."""
    order = torch.randperm(LIMIT, generator=torch.Generator().manual_seed(seed))
    training = torch.zeros(LIMIT, dtype=torch.bool)
    training[order[:LIMIT * 7 // 8]] = True
    return training.nonzero().flatten(), (~training).nonzero().flatten()

def first_of_each(numbers):
    """(N,) -> ascending indices at which a number occurs for the first time."""
    kinds, which = numbers.unique(return_inverse=True)
    first = torch.full((len(kinds),), len(numbers))
    first = first.scatter_reduce(0, which, torch.arange(len(numbers)), "amin")
    return first.sort().values

def draw_exact(spec, length, B):
    """Operands of B questions whose numbers have exactly `length` digits. Source: v1, Sec. 3.3."""
    operands = []
    for kind in spec.operands:
        if kind == "digit":
            operands.append(torch.randint(spec.base, (B, 1)))
        else:
            operands.append(torch.randint(spec.base, (B, length)))
            operands[-1][:, -1] = torch.randint(1, spec.base, (B,))  # no zero in front
    return operands

def draw_hard(spec, length, B):
    """Operands of B questions that are rare among random ones, of up to `length` digits.

    Digits come in runs at the same places in all numbers. A run is all zeros, all highest digits,
    or random; in a second number it may also repeat the first's digits or complement them to the
    highest. So carries run far, numbers are short, and numbers tie."""
    often = length ** -torch.rand(B, 1)  # the share of places where a run begins
    run = (torch.rand(B, length) < often).cumsum(1)  # number of the run
    operands = []
    for kind in spec.operands:
        digits = torch.randint(spec.base, (B, length))
        kinds = [digits, 0 * digits, 0 * digits + spec.base - 1]
        if operands:
            kinds += [operands[0], spec.base - 1 - operands[0]]
        pick = torch.randint(len(kinds), (B, length + 1)).gather(1, run)
        mixed = torch.stack(kinds).gather(0, pick[None])[0]
        operands.append(mixed if kind == "number" else digits[:, :1])
    return operands

def collect_questions(config, draw, n, distinct=True):
    """Up to n questions, from at most 20 draws: draw() -> operands, of which invalid ones are left
    out -> source (n, S), target (n, T + 1). Raises: BadInput if there are none."""
    sources, targets = [], []
    for _ in range(20):
        source, target = arrange(config.task, draw(), config.align)
        sources.append(source)
        targets.append(target)
        source, target = torch.cat(sources), torch.cat(targets)
        if distinct:
            kept = first_of_each(source.unique(dim=0, return_inverse=True)[1])
            source, target = source[kept], target[kept]
        sources, targets = [source], [target]
        if len(source) >= n:
            break
    if not len(source):
        raise BadInput(f"{config.task}: no question was found in 20 draws of {n}")
    return source[:n], target[:n]

def draw_questions(config, draw_some, length, n):
    """Up to n distinct questions, with zeros in front, by `draw_exact` or `draw_hard`; if there are
    only few, 20 draws find nearly all -> source (n, S), target (n, T + 1)."""
    spec = TASKS[config.task]
    width = max(config.widths[0], length + spec.headroom)

    def draw():
        operands = draw_some(spec, length, n)
        for i in range(spec.operands.count("number")):
            operands[i] = F.pad(operands[i], (0, width - length))
        return operands

    return collect_questions(config, draw, n)

# -----
# 2. Positions and biases: one pure function each
# A bias is added to the scores: 0 is neutral, -inf closes. Rows are queries i, columns keys j.
# Tensors made from sizes alone are on torch's default device, set by a model to its own.

def sinusoidal(positions, d_model):
    """Positions (T,) -> (T, C): channel 2p is sin(t / 10000^(2p/C)), channel 2p + 1 the cosine.
    Source: Vaswani et al. 2017, Sec. 3.5. Angles are float64, so that long positions keep their
    digits."""
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
    """q_i . a_ij, and with k also k_j . a_ij, where a_ij = table[clip(j - i, -K, K) + K]: q (B, H,
    T, D), table (2K + 1, D), k (B, H, S, D) -> (B, H, T, S), unscaled; S = T by default. Source:
    Shaw et al. 2018, Eq. 4 (keys); Huang et al. 2020, method 4 (keys and queries)."""
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
    """-> (H,) slopes 2^(-8h/H), h = 1 .. H. If H is not a power of two, those of the next lower
    power, followed by every second slope of twice that many. Source: Press et al. 2022, Sec. 3 and
    code."""
    n = 2 ** (n_head.bit_length() - 1)
    slopes = 2.0 ** (-8 * torch.arange(1, n + 1) / n)
    between = 2.0 ** (-4 * torch.arange(1, 2 * n, 2) / n)
    return torch.cat([slopes, between[:n_head - n]])

def alibi_bias(n_head, T, S):
    """-> (H, T, S): -slope_h * |j - i|. Source: Press et al. 2022, Sec. 3. Differs: it is
    symmetric, for encoders and cross-attention; the causal mask is separate."""
    i, j = torch.arange(T)[:, None], torch.arange(S)
    return -alibi_slopes(n_head)[:, None, None] * (j - i).abs()

def causal_bias(T):
    """-> (1, T, T): 0 for j <= i, -inf above the diagonal."""
    return torch.full((1, T, T), -INF).triu(1)

def window_bias(w, T, S, cross=False, step=1):
    """-> (1, T, S): 0 inside the window, -inf outside. In self-attention row i sees itself and the
    w tokens before it; in cross-attention it sees digit i, counted from the end, and the w digits
    after it, counting the end marker. With interleaved operands (step=2), a digit is a pair.

    Source: v2, App. C.4, and for the columns of w = 1 the authors' code. Differs: the text opens w
    positions on the other side, too, and does not name the first column; the code has no pairs."""
    i, j = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        end = S - 1
        inside = (j >= end - step * (i + 1)) & (j < end - step * (i - w))
    else:
        inside = (j <= i) & (j >= i - w)
    return torch.zeros(1, T, S).masked_fill(~inside, -INF)

# -----
# 3. Attention

class OpenKeys(NamedTuple):
    """Sparse form of a bias that is -inf nearly everywhere: row i sees at most K keys. A dense
    matrix is faster on short numbers, but would exhaust memory at 10,000 digits."""
    columns: torch.Tensor  # (T, K)
    values: torch.Tensor  # (H, T, K), added to their scores

def masked_softmax(scores, bias):
    """softmax(scores + bias) over the keys; 0, not NaN, in a row whose keys are all closed. Raises:
    ValueError."""
    if bias is None:
        return scores.softmax(-1)
    if bias.dtype == torch.bool:
        raise ValueError("a bias is added to scores: 0 is neutral, -inf closes. Got a bool mask.")
    bias = bias.to(scores)
    closed = bias.isneginf().all(-1, keepdim=True)
    return (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0)

class MultiHeadAttention(nn.Module):
    """weights = softmax(q k^T / sqrt(D) + bias); output = weights v.

    `scores` is None or a function of q (B, H, T, D) and k (B, H, S, D) that replaces q k^T. Source:
    Vaswani et al. 2017, Sec. 3.2; bias: v2, App. C.4.
    """
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
        (B, T, C), weights (B, H, T, S), or (B, H, T, K) with OpenKeys."""
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
        """`forward` with keys gathered for each row, without dropout. Rows are split into chunks
        that use few columns of `memory`, so that a million rows fit."""
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

# -----
# 4. Transformer
# A method has up to three parts, each a function whose arguments before `;` are bound when the
# model is built, or a module built from them:
#
#     position(config; side, T) -> (T, C), added to embeddings of the "source" or "target"
#     bias(config; layer, kind, T, S) -> (1 or H, T, S), OpenKeys or None, added to the
#         scores of "encoder", "self" or "cross" attention
#     scores(config, kind; q, k) -> (B, H, T, S), in place of q k^T
#
# `config` holds the options of a run, see section 7.

def sinusoids(config, side, T):
    """The same for the source and the target."""
    return sinusoidal(torch.arange(T), config.d_model)

def cyclic_sinusoids(config, side, T):
    """Position index modulo 3. Source: v2, App. C.4. Differs: sources count from their end."""
    index = torch.arange(T)
    if side == "source":
        index = index.flip(0)
    return sinusoidal(index % 3, config.d_model)

class LearnedPositions(nn.Embedding):
    """A learned vector for each of 4,096 positions."""
    def __init__(self, config):
        super().__init__(4096, config.d_model)
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, side, T):
        if T > len(self.weight):
            raise BadInput(f"{T} tokens are more than the {len(self.weight)} learned positions")
        return self.weight[:T]

def window(config, layer, kind, T, S):
    """Windows of w = 1 in the decoder."""
    if kind != "encoder":
        return window_bias(1, T, S, kind == "cross", 1 + config.align)

def alibi(config, layer, kind, T, S):
    """ALiBi in every attention."""
    return alibi_bias(config.n_head, T, S)

def alibi_of_decoder(config, layer, kind, T, S):
    """ALiBi in the decoder's self-attention alone."""
    if kind == "self":
        return alibi_bias(config.n_head, T, S)

def rotary(config, kind, q, k):
    """Products of queries and keys that `rope` has rotated."""
    i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    return rope(q, i) @ rope(k, j).transpose(2, 3)

class RelativeScores(nn.Module):
    """q k^T and a learned table of offsets, for keys."""
    queries = False

    def __init__(self, config, kind):
        super().__init__()
        D = config.d_model // config.n_head
        self.table = nn.Parameter(torch.randn(2 * config.clip + 1, D) / D ** 0.5)

    def forward(self, q, k):
        keys = k if self.queries else None
        return q @ k.transpose(2, 3) + relative_scores(q, self.table, keys, k.shape[2])

class RelativeScoresOfBoth(RelativeScores):
    """The same for keys and queries."""
    queries = True

class Method(NamedTuple):
    """A method is one entry of METHODS."""
    about: str
    position: Callable = None
    bias: Callable = None
    scores: Callable = None
    # With one training width the model could memorize the row of END; several widths, from the
    # task's up, make it find the end in the source. Differs: the papers use one width.
    n_width: int = 1
    align: bool = False  # the source interleaves its two operands
    steps: int = 1  # the default number of steps is so many times the task's
    defaults: dict = {}  # of other options of a run
    unary: dict = {}  # more of them, for tasks of one operand
    embedding: float = 0.3  # standard deviation of embeddings; small, so that positions stand out
    calibrated: bool = False  # the bias comes from a vanilla model that is trained first
    # A fixed window can be proved if positions repeat after this many rows, or if there are none
    # (1).
    period: int = 0

WINDOW = Method("", bias=window, n_width=9, align=True)
METHODS = {
    "vanilla": Method("sinusoids on the embeddings", sinusoids),
    "nope": Method("no positions (Kazemnejad et al. 2023)"),
    "ape": Method("learned positions on the embeddings (Gehring et al. 2017)", LearnedPositions),
    "alibi": Method("ALiBi, symmetric, in every attention", bias=alibi),
    "alibi-decoder": Method("sinusoids, ALiBi in the decoder's self-attention (code of v2)",
                            sinusoids, alibi_of_decoder),
    "rope": Method("rotated queries and keys, every attention", scores=rotary, steps=10,
                   defaults=dict(lr=3e-3)),
    "rpe-k": Method("relative table for keys, every attention", scores=RelativeScores, steps=4),
    "rpe-kq": Method("relative table for keys and queries", scores=RelativeScoresOfBoth,
                     steps=4),
    # Sinusoids of long numbers are known only if zeros have filled their places in training. Large
    # embeddings and dropout, which the authors use, make the model rely on content rather than
    # position; with more layers it can tell the digits of a window apart by those of the
    # previous row. With nine widths (v2: one), sums of 10 digits lie within the training range.
    "window": WINDOW._replace(about="sinusoids, windows in the decoder (v2, +w)", steps=3,
                              position=sinusoids, embedding=1.33,
                              unary=dict(width=61, dropout=0.3, n_layer=3)),
    "window-cyclic": WINDOW._replace(about="the same, position index modulo 3 (v2, +T)", steps=6,
                                     position=cyclic_sinusoids, period=3),
    "window-nope": WINDOW._replace(about="windows in the decoder, no positions (v2, NoPE+w)",
                                   steps=3, period=1),
    "abc": Method("bias calibrated on a vanilla model, no positions", n_width=9, calibrated=True),
}

def bind(entry, *given):
    """Bind a part of a method: build a module from `given`, or fix `given` in a function."""
    if isinstance(entry, type):
        return entry(*given)
    return functools.partial(entry, *given) if entry else None

class Layer(nn.Module):
    """Self-attention, cross-attention (in a decoder), feed-forward; a norm before each, or after
    each in the paper's preset."""
    def __init__(self, config, cross):
        super().__init__()
        scores, C = METHODS[config.method].scores, config.d_model
        self.self_attention = MultiHeadAttention(C, config.n_head, config.dropout)
        self.self_attention.scores = bind(scores, config, "self" if cross else "encoder")
        if cross:
            self.cross_attention = MultiHeadAttention(C, config.n_head, config.dropout)
            self.cross_attention.scores = bind(scores, config, "cross")
        self.feed_forward = nn.Sequential(nn.Linear(C, 4 * C), nn.ReLU(),
                                          nn.Dropout(config.dropout), nn.Linear(4 * C, C))
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(2 + cross))
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.preset != "paper"

    def residual(self, norm, x, sublayer):
        """x + sublayer(x), with the norm where the preset has it."""
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def forward(self, x, self_bias=None, memory=None, cross_bias=None):
        own = self.self_attention
        x = self.residual(self.norms[0], x, lambda y: own(y, y, self_bias)[0])
        if memory is not None:
            cross = self.cross_attention
            x = self.residual(self.norms[1], x, lambda y: cross(y, memory, cross_bias)[0])
        return self.residual(self.norms[-1], x, self.feed)

    def feed(self, x):
        """Apply the feed-forward to chunks of rows, so that a million fit."""
        return torch.cat([self.feed_forward(rows) for rows in x.split(2 ** 12, 1)], 1)

class Transformer(nn.Module):
    """Encoder-decoder. The paper preset initializes matrices like the authors' code, whose q, k
    and v are smaller by sqrt(2), and embeddings with a standard deviation of 1.33."""
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
        """-> the method's bias (1 or H, T, S), OpenKeys or None; in self-attention with the causal
        mask, which OpenKeys contain."""
        with self.head.weight.device:
            bias = self.bias and self.bias(layer, kind, T, S)
            if kind != "self" or isinstance(bias, OpenKeys):
                return bias
            mask = causal_bias(T)
            return mask if bias is None else bias + mask

    def read(self, source):
        """source (B, S) -> memory (B, S, C)"""
        memory, S = self.embed(source, "source"), source.shape[1]
        for n, layer in enumerate(self.encoder):
            memory = layer(memory, self.bias_of(n, "encoder", S, S))
        return memory

    def forward(self, source, target):
        """source (B, S), target (B, T) -> logits (B, T, V)."""
        source, target = (tokens.to(self.head.weight.device) for tokens in (source, target))
        memory, x = self.read(source), self.embed(target, "target")
        S, T = source.shape[1], target.shape[1]
        for n, layer in enumerate(self.decoder):
            own, cross = self.bias_of(n, "self", T, T), self.bias_of(n, "cross", T, S)
            x = layer(x, own, memory, cross)
        return self.head(self.norm(x))

@torch.no_grad()
def right_tokens(model, source, target):
    """source (B, S), target (B, T + 1) -> (B, T) bool on the CPU: is each token the most likely one
    after those before it? If all are, and only then, greedy decoding writes the target."""
    model.eval()
    chunk = max(1, 2 ** 12 // target.shape[1])  # rows that stay in a cache
    right = []
    for s, t in zip(source.split(chunk), target.split(chunk)):
        right.append(model(s, t[:, :-1]).argmax(-1).cpu() == t[:, 1:].cpu())
    return torch.cat(right)

@torch.no_grad()
def generate(model, source, limit, report=silent):
    """Greedy decoding: source (B, S) -> target (B, limit + 1), START first.

    Each pass predicts all tokens at once from those before them, until none changes; after k passes
    the first k match step-by-step decoding. A carry that runs far takes one pass per digit, so
    `report` gets the number of certain tokens and a bound on the time left every few seconds."""
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
            report(f"{made + 1:,} tokens of {limit:,}, {most:,.0f} s more at most")
    return target

# -----
# 5. Attention Bias Calibration
# A line is the elements of a matrix along (1, 1), (1, 0) or (1, -1), and d_l is the mean of line l;
# mu, sigma and d_max are the mean, standard deviation and maximum of the means of all lines
# of one direction in one head. Lines that stand out are kept, and continued at another size.

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
    def place(self):
        """Where it lies, in whatever head."""
        return self.attention, self.direction, self.block, self.offset

# Arguments of `find_lines` for each rule set.
RULES = {"ours": dict(kappa=0.5, of_largest=True, support=0.5),
         "v1": dict(kappa=4.0),  # Secs. 5 and 6
         "v2": dict(kappa=4.5, together=True),  # App. D
         "code": dict(kappa=4.5, total=True, directions=(-1,))}  # the authors' code
# Overrides for self-attention.
SELF_RULES = {"v2": dict(kappa=0.87), "code": dict(kappa=0.87, directions=(1,))}

def line_columns(direction, offset, rows, size):
    """Where a line crosses rows (R,) of a block of this size -> columns (R,), inside (R,) bool.

    The offset of a diagonal (1, 1) is column - row, of a vertical (1, 0) the column, and of an
    anti-diagonal (1, -1), which starts at the right edge, (size - 1 - column) - row. Outside of the
    block the column is 0."""
    first = size - 1 - offset if direction < 0 else offset  # column in row 0
    column = first + direction * rows
    inside = (column >= 0) & (column < size)
    return column * inside, inside

def find_lines(attention, kappa, directions=(1, 0, -1), together=False, total=False,
               of_largest=False, support=0.0, blocks=None):
    """The lines of attention (H, m, n) that stand out -> list of Line. Source: v1, Eqs. 1 and 2:

        dropoff:  d_l - d_max  if d_l > mu + kappa * sigma,  else -inf

    Differs: the printed `d_l - d_max > threshold` holds for no positive threshold, so d_l itself is
    compared, as in the authors' code. Variants of the sources:

    together: mu, sigma and d_max are those of all directions together, as v2 has it.
    total: d_l is the sum of a line, as in the authors' code. Theirs leaves out sums of 0, counts
    equal ones once, and opens the end marker in row 0.

    Differences by our rules:
    of_largest: kappa is a share of sqrt(L - 1), the largest z that one of L lines can have. With
    the papers' kappas of 4 and more none of 16 lines can open.
    support: a line must cross more than this share of rows; corner means are high by chance.
    blocks: sizes of parts of the columns, each with lines of its own. As numbers grow the first
    operand moves away from the end of the source, but within its own block its lines stay in place.
    Verticals open in the first column of a block alone: inside a number a column means nothing.
    """
    m, found = attention.shape[1], []
    parts = attention.split(blocks or [attention.shape[2]], 2)
    groups = [directions] if together else [[direction] for direction in directions]
    for group in groups:  # the lines of a group are compared with one another
        places, values = [], []
        for direction in group:
            for block, part in enumerate(parts):
                for offset in range(1 - m, part.shape[2]):
                    rows = torch.arange(m)
                    column, inside = line_columns(direction, offset, rows, part.shape[2])
                    if inside.sum() > support * m:
                        line = part[:, rows[inside], column[inside]]  # (H, K)
                        places.append((direction, block, offset))
                        values.append(line.sum(1) if total else line.mean(1))
        d = torch.stack(values, 1)  # (H, L)
        mu, sigma = d.mean(1, keepdim=True), d.std(1, unbiased=False, keepdim=True)
        unit = sigma * math.sqrt(len(places) - 1) if of_largest else sigma
        threshold = mu + kappa * unit + 1e-5 * mu.abs()  # lines of equal mean differ by rounding
        bias, z = d - d.amax(1, keepdim=True), (d - mu) / sigma
        for h, l in (d > threshold).nonzero().tolist():
            direction, block, offset = places[l]
            if direction != 0 or offset == 0 or not blocks:
                found.append(Line(h, *places[l], float(bias[h, l]), float(z[h, l])))
    return found

def lay_out(lines, H, M, blocks):
    """Lines continued to M rows and blocks of these sizes -> OpenKeys, -inf where a head has no
    line. Along (1, 1) this is a relative table of scalars, closed beyond the offsets seen. Source:
    v2, Eq. 1 (case distinction), App. E.1. The first key is column 0, for rows without a line; it
    is closed unless a line runs there."""
    rows = torch.arange(M)
    closed = torch.full((H, M), -INF)
    columns, values = [0 * rows], [closed]
    for place in sorted({line.place for line in lines}):
        _, direction, block, offset = place
        column, inside = line_columns(direction, offset, rows, blocks[block])
        value = closed.clone()
        for line in lines:
            if line.place == place:
                value[line.head] = line.bias
        columns.append((sum(blocks[:block]) + column) * inside)
        values.append(value.masked_fill(~inside, -INF))
    return OpenKeys(torch.stack(columns, 1), torch.stack(values, 2))

def merge_keys(keys):
    """OpenKeys -> OpenKeys whose rows open no column twice: where lines of a head cross, the
    earlier key gets the greater value and the later one is closed."""
    columns, values = keys.columns, [*keys.values.unbind(2)]
    for later in range(1, len(values)):
        for earlier in range(later):
            same = columns[:, later] == columns[:, earlier]
            greater = torch.maximum(values[earlier], values[later])
            values[earlier] = torch.where(same, greater, values[earlier])
            values[later] = values[later].masked_fill(same, -INF)
    return OpenKeys(columns, torch.stack(values, 2))

def dense_bias(keys, N):
    """OpenKeys -> bias (H, M, N); where lines cross, the greater value counts."""
    closed = keys.values.new_full((*keys.values.shape[:2], N), -INF)
    return closed.scatter_reduce(2, keys.columns.expand_as(keys.values), keys.values, "amax")

def fill_empty(bias, rules):
    """Set 0 in fully closed rows of a bias (H, M, N) or of values of keys: by our rules at the
    first key alone, which is the same at every length; by the other rules at every key, as they
    do for heads without a line."""
    empty = bias.isneginf().all(2, keepdim=True)
    if rules == "ours":
        empty = empty & (torch.arange(bias.shape[2]) == 0)
    return bias.masked_fill(empty, 0)

def abc_bias(attention, M, N, rules="ours", blocks=None, mask=0.0, **changes):
    """Attention (H, m, n) of a model that interpolates -> bias (H, M, N) that continues its lines:
    d_l - d_max along open lines, -inf elsewhere. Source: v1, Sec. 5, step 2; v2, App. D, step 2.
    Average it over examples, not heads (nn.MultiheadAttention: average_attn_weights=False).

    This is for other models; a run uses its parts, `find_lines` and `lay_out`, layer by layer.
    rules: a key of RULES; `changes` override single arguments. blocks: [(size now, size then)]
    of blocks of columns, see `find_lines`; by default there are none. mask:
    `causal_bias(M)` for self-attention. Raises: ValueError.
    """
    if attention.dim() != 3 or not attention.isfinite().all():
        raise ValueError(f"attention is (H, m, n) and finite. Got {attention.shape}.")
    H, m, n = attention.shape
    now, then = zip(*(blocks or [(n, N)]))
    if (sum(now), sum(then)) != (n, N):
        raise ValueError(f"blocks add up to {n} and {N}. Got {blocks}.")
    lines = find_lines(attention.cpu(), blocks=blocks and now, **(RULES[rules] | changes))
    mask = torch.as_tensor(mask).cpu()
    bias = dense_bias(lay_out(lines, H, M, then), N) + mask
    return (fill_empty(bias, rules) + mask).to(attention)

@torch.no_grad()
def collect_attention(model, source, target, batch=250):
    """Attention averaged over the examples that the model answers correctly: source (B, S), target
    (B, T + 1) -> self (n_layer, H, T, T), cross (n_layer, H, T, S). Source: v1, Sec. 5; v2, App. D.
    Differs: weights are averaged, as in the authors' code, not scores. Raises: RunFailed if no
    answer is right."""
    sums, hooks = {}, []

    def watch(module, inputs, outputs):
        sums[module] = sums.get(module, 0) + outputs[1].sum(0).cpu()  # weights (B, H, T, S)

    right = right_tokens(model, source, target).all(1)
    if not right.any():
        raise RunFailed("the model answers no example correctly; raise --steps")
    for module in model.decoder.modules():
        if isinstance(module, MultiHeadAttention):
            hooks.append(module.register_forward_hook(watch))
    for s, t in zip(source[right].split(batch), target[right].split(batch)):
        model(s, t[:, :-1])
    for hook in hooks:
        hook.remove()
    means = [total / right.sum() for total in sums.values()]  # self, cross, self, ...
    return torch.stack(means[0::2]), torch.stack(means[1::2])

def column_blocks(task, S):
    """Source columns as blocks -> the size of each. In `$0123|+0748|&` and `$0123|*|7|&` each
    number takes along the marker on its left, and each further column is a block."""
    kinds = TASKS[task].operands
    numbers, rest = kinds.count("number"), 1 + 2 * kinds.count("digit")
    return [(S - rest) // numbers] * numbers + [1] * rest

def calibrate(config, attention, kappa):
    """Averaged attention (self (n_layer, H, T, T), cross (n_layer, H, T, S)) -> list of Line.

    By our rules each layer has lines of its own, above `kappa`: in self-attention along (1, 1), in
    cross-attention along (1, 0) and (1, -1), in a block for each operand. By the other rules
    the lines of the last layer serve all layers, without blocks. Source: v2, App. D.
    At a fixed width only the rows that training fills count (authors' code: the first 6).
    """
    rows, found = TASKS[config.task].width + 1, []
    layers = range(config.n_layer)
    if config.rules != "ours":
        layers = layers[-1:]
    for layer in layers:
        for kind, maps in zip(("self", "cross"), attention):
            weights = maps[layer, :, :rows]  # (H, rows, T) or (H, rows, S)
            rule = dict(RULES[config.rules])
            if config.rules != "ours":
                if kind == "self":
                    rule |= SELF_RULES.get(config.rules, {})
            elif kind == "self":
                rule |= dict(kappa=kappa, directions=(1,))
            else:
                blocks = column_blocks(config.task, weights.shape[2])
                rule |= dict(kappa=kappa, directions=(0, -1), blocks=blocks)
            for line in find_lines(weights, **rule):
                found.append(line._replace(layer=layer, attention=kind))
    return found

class CalibratedBias(nn.Module):
    """The bias of a run, made of its lines (v2, Eq. 2). The lines are a part of the model's
    state_dict. By our rules a row without a line sees the first key alone."""
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
        if not ours:
            layer = self.config.n_layer - 1  # the bias of the last layer is that of all
        elif kind == "cross":
            blocks = column_blocks(self.config.task, S)
        chosen = [line for line in self.lines if (line.attention, line.layer) == (kind, layer)]
        columns, values = lay_out(chosen, self.config.n_head, T, blocks)
        if kind == "self":
            future = columns > torch.arange(T)[:, None]
            values = values.masked_fill(future, -INF)
        if ours:
            values = fill_empty(values, "ours")
        return OpenKeys(columns, values)

    def forward(self, layer, kind, T, S):
        """-> (H, T, S), or by our rules OpenKeys beyond 100 rows; None for an encoder."""
        if kind == "encoder":
            return None
        keys = self.keys(layer, kind, T, S)
        if self.config.rules != "ours":
            return fill_empty(dense_bias(keys, S), self.config.rules)
        if T > 100:
            return merge_keys(keys)
        return dense_bias(keys, S)

# -----
# 6. Proof
# A calibrated model of one decoder layer, without encoder and positions, can be proved exact at
# every length, because it can only ever see finitely many things. So can a model whose method opens
# a fixed window, if it has no positions or positions that repeat.
#
# Row t of the output, which writes digit t of the answer, depends on its *window* alone: the token
# before it and, for each head, the tokens at its open keys with their biases, in whatever order.
# An anti-diagonal shows row t the digit at place t + a constant, a vertical shows every row the
# same marker or single digit, and a diagonal of self-attention an earlier token of the answer. (The
# last row writes END.)
#
# Let the places that a row sees span `reach` places. The places below them affect the row only
# through the rest that they hand on: that is what a task is. The places above them matter only in
# that the last rest must be 0. From some number of places on, `below`, the rests that can come from
# below no longer change; from some number on, `above`, neither do the rests from which the end can
# be 0. So all rows with at least `below` places under what they see, and at least `above` and the
# headroom over it, see the same windows, at every width. A number of
#
#     below + reach + above + headroom
#
# places has such a row. A row of a longer number with fewer places on one side of what it sees has
# enough on the other, and sees what that number's row at the same end sees. So widths up to this
# one show all windows; if positions repeat after p rows, p widths from this one on do.
#
# Induction: if the tokens before row t are right, row t sees one of these windows; if the model is
# right on each of them, so is row t. Then greedy decoding is right for every question of any
# length. The order of floating-point sums differs at other widths: logits of about 10 change by
# about 1e-5, so the right token must lead by MARGIN, and by a thousandth of the largest logit.

MARGIN = 0.5  # logits by which the right token must lead
TOO_MANY = 2 ** 20  # limit on the windows of a row, and on the states that lead to them
KAPPAS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)

def open_keys(bias, kind, T, S):
    """OpenKeys of a one-layer model: those of its ABC lines, or of the fixed window of its method,
    which all heads share."""
    if isinstance(bias, CalibratedBias):
        return merge_keys(bias.keys(0, kind, T, S))
    window = bias(0, kind, T, S)[0]  # (T, S)
    values, columns = window.topk(int((window > -INF).sum(1).max()))
    return OpenKeys(columns, values[None])

def views_of_rows(bias, period, source, target, rows, rounded=False):
    """What rows [R] see of questions, source (B, S), target (B, T + 1), and in the last column what
    they must write -> (B, R, L) numbers, equal where a model with this bias sees the same.

    The token before the row, then for each head its open keys, sorted, each as 2 * token + bias. As
    a bias is a difference of attention weights, between -1 and 0, no two keys share a number. The
    number of a token also tells the position index, which repeats after `period`; sources count
    from their end. rounded: biases count in hundredths, as a model hardly learns from less."""
    T, S = target.shape[1] - 1, source.shape[1]
    before = target[:, :-1] * period + torch.arange(T) % period
    source = source * period + torch.arange(S).flip(0) % period
    parts = [before[:, rows, None].double()]
    for kind, tokens, N in ("self", before, T), ("cross", source, S):
        columns, values = open_keys(bias, kind, T, N)
        if rounded:
            values = values.round(decimals=2)
        keys = 2.0 * tokens[:, None, columns[rows]] + values[:, rows].double()  # (B, H, R, K)
        parts.append(keys.sort(3).values.transpose(1, 2).flatten(2))
    return torch.cat(parts + [target[:, 1:][:, rows, None]], 2)

def number_rows(columns):
    """Columns of (N,) -> (N,) integers, equal where all columns are."""
    number = 0
    for column in columns:
        values, index = column.unique(return_inverse=True)
        _, number = (number * len(values) + index).unique(return_inverse=True)
    return number

class Windows:
    """The windows, in the questions added so far, of models with these lines or, if lines is None,
    with the method's fixed window.

    views: each distinct window, with the token to write in its last column. questions: for each, a
    question that shows it, in the same order, in chunks of source (B, S), target (B, T + 1). clash:
    two questions that look the same to a row and differ there; if there are none, the lines
    determine the answer. why: the reason there is no proof."""
    def __init__(self, config, lines=None):
        method = METHODS[config.method]
        self.period = max(1, method.period)
        self.bias = bind(method.bias, config) if lines is None else CalibratedBias(config, lines)
        self.views, self.questions, self.clash, self.why = torch.empty(0), [], [], ""

    def add(self, source, target, rows, rounded=False):
        """Keep what rows [R] see of questions, and the first question that shows each."""
        known = len(self.views)
        views = views_of_rows(self.bias, self.period, source, target, rows, rounded).flatten(0, 1)
        views = torch.cat([self.views.view(known, views.shape[1]), views])
        window, token = number_rows(views[:, :-1].unbind(1)), views[:, -1].long()
        first = first_of_each(window * len(VOCAB) + token)
        self.views, window, token = views[first], window[first], token[first]
        new = (first[first >= known] - known) // len(rows)
        if len(new):
            self.questions += zip(source[new].split(1000), target[new].split(1000))
        tokens = window.bincount()  # how many tokens must be written at a window
        if tokens.max() > 1:
            alike = (window == tokens.argmax()).nonzero().flatten()[:2]
            self.clash = [self.question(n) for n in alike.tolist()]
            shown = " and ".join(decode(source[0]) for source, _ in self.clash)
            self.why = (f"{shown} look the same to a row that must write "
                        f"{' or '.join(decode(token[alike]))}")

    def question(self, n):
        """The question of the nth window, source (1, S), target (1, T + 1)."""
        for source, target in self.questions:
            if n < len(source):
                return source[n:n + 1], target[n:n + 1]
            n -= len(source)

def places_seen(lines):
    """-> the places, counted from the one that a row writes, whose digits it sees, and those whose
    tokens it sees or writes.

    The anti-diagonal with offset o shows place t + o to row t, which writes place t. The diagonal
    with offset o shows it the token that row t + o - 1 has written. A method's window (lines are
    None) shows the digit that is written and the one before, and the last two tokens."""
    if lines is None:
        return {0, -1}, {0, -1, -2}
    digits = {x.offset for x in lines if x.attention == "cross" and x.direction == -1}
    return digits, {0, -1} | {x.offset - 1 for x in lines if x.attention == "self"}

def every_choice(base, n):
    """-> (base^n, n) all choices of n digits."""
    return torch.arange(base ** n)[:, None] // base ** torch.arange(n) % base

def changes_until_stable(states, change):
    """-> how often a set of states changes until it stays the same. Raises: RunFailed if this takes
    100 changes."""
    for times in range(100):
        changed = change(states)
        if changed == states:
            return times
        states = changed
    raise RunFailed("the rests that a place can get do not settle within 100 places")

def places_to_settle(spec):
    """-> `below` and `above`, see the head of this section. Raises: RunFailed if there are no such
    numbers. A state is a rest with an index of the single digits, which are the same at all places.

    For total(rest, a) = (a + rest) % 10 + 10 * (a if rest == 0 else rest - 1) they are 1 and 8."""
    columns = every_choice(spec.base, spec.operands.count("number"))
    singles = every_choice(spec.base, spec.operands.count("digit"))
    start = {(spec.first, n) for n in range(len(singles))}
    after, new = {}, start  # after[state]: the states that follow it, by a column of zeros first
    while new:
        for rest, n in new:
            digits = torch.cat([columns, singles[n].expand(len(columns), -1)], 1)
            _, rests = spec.step(torch.full_like(digits[:, 0], rest), digits)
            after[rest, n] = [(r, n) for r in rests.tolist()]
        new = {state for states in after.values() for state in states} - after.keys()
        if len(after) > 1000 * len(singles):
            raise RunFailed("more than 1,000 rests can be handed on")

    def one_place_on(states):
        return {following for state in states for following in after[state]}

    def one_place_back(states):
        return {state for state in after if states & set(after[state])}

    below = changes_until_stable(start, one_place_on)
    if not spec.headroom:
        return below, 0
    ends = {(0, n) for n in range(len(singles))}
    for _ in range(spec.headroom):
        ends = {state for state in after if after[state][0] in ends}
    return below, changes_until_stable(ends, one_place_back)

def unlike_columns(spec, columns, rest, singles, token_seen):
    """Columns of digits (C, n) that a row does not see -> one for each distinct effect on what
    follows, over all rests (N,) and single digits (S, k)."""
    C, effects = len(columns), []
    for single in singles:
        digits = torch.cat([columns, single.expand(C, -1)], 1)
        for value in rest.unique():
            token, after = spec.step(value.expand(C), digits)
            effects += [token, after] if token_seen else [after]
    return columns[first_of_each(number_rows(effects))]

def questions_of_row(spec, width, digits, tokens):
    """-> operands of questions of this width that produce all windows of a row, which sees the
    digits of some places and the tokens of others. Raises: RunFailed if there are too many.

    From the last place on, every state is extended by every column of digits. Of those that look
    the same so far and hand on the same rest, one is kept with its numbers."""
    n, k = spec.operands.count("number"), spec.operands.count("digit")
    singles = every_choice(spec.base, k)
    which = seen = torch.arange(len(singles))  # index into singles; id of what has been seen
    rest, numbers = torch.full_like(seen, spec.first), torch.zeros(len(seen), 0, n).long()
    for place in range(width):
        columns = every_choice(spec.base, n)
        if place >= width - spec.headroom:
            columns = columns[:1]
        if place not in digits and n > 1:  # of several numbers there are many columns
            columns = unlike_columns(spec, columns, rest, singles, place in tokens)
        grown = []
        for piece in torch.arange(len(rest)).split(2 ** 14):  # so that memory suffices
            was = piece.repeat_interleave(len(columns))
            column = torch.arange(len(columns)).repeat(len(piece))
            digit = torch.cat([columns[column], singles[which[was]]], 1)
            token, after = spec.step(rest[was], digit)
            look = seen[was] * len(columns) * spec.base
            if place in digits:
                look = look + column * spec.base
            if place in tokens:
                look = look + token
            kept = first_of_each(number_rows([look, after]))
            grown.append(torch.stack([look, after, was, column])[:, kept])
        look, after, was, column = torch.cat(grown, 1)
        kept = first_of_each(number_rows([look, after]))
        if len(kept) > TOO_MANY:
            raise RunFailed(f"a row has more than {TOO_MANY:,} windows")
        seen, rest, which = number_rows([look])[kept], after[kept], which[was[kept]]
        numbers = torch.cat([numbers[was[kept]], columns[column[kept], None]], 1)
    if spec.headroom:
        which, numbers = which[rest == 0], numbers[rest == 0]
    return list(numbers.unbind(2)) + list(singles[which].T[:, :, None])

def has_windows(config):
    """Whether a row's output depends on its window alone."""
    method = METHODS[config.method]
    placed = method.scores or (method.position and not method.period)
    one_layer = config.n_layer == 1 and not config.n_encoder
    return config.rules == "ours" and one_layer and not placed and not TASKS[config.task].label

def enumerate_windows(config, lines=None, report=silent):
    """-> all Windows that a model can have with these lines or by its method. It stops at the first
    clash; `why` is set if there are no such windows, or too many."""
    spec, windows, told = TASKS[config.task], Windows(config, lines), time.perf_counter()
    if not has_windows(config):
        windows.why = "a proof needs one decoder layer, no encoder, positions or label, our rules"
        return windows
    digits, tokens = places_seen(lines)
    reach = max(digits | tokens) - min(digits | tokens) + 1
    try:
        below, above = places_to_settle(spec)
        widest = max(config.widths[0], below + reach + above + spec.headroom)
        for width in range(config.widths[0], widest + windows.period):
            for row in range(width + 1):
                operands = questions_of_row(spec, width, {row + place for place in digits},
                                            {row + place for place in tokens})
                windows.add(*arrange(config.task, operands, config.align), [row])
                if windows.clash:
                    return windows
                if time.perf_counter() - told > SECONDS:
                    told = time.perf_counter()
                    report(f"{len(windows.views):,} windows at row {row} of {width} digits")
    except RunFailed as error:
        windows.why = str(error)
    return windows

@torch.no_grad()
def prove(model, windows):
    """A trained model and its Windows -> {"proved", "why" not}, plus "windows" and "margin" if all
    windows are known.

    The margin is the least lead, in logits, of the right token over all others; the first thousand
    questions with one below MARGIN end it. Where logits exceed 500, the lead must exceed 0.1% of
    the largest; what this is above MARGIN is subtracted from the margin. NaN fails."""
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
    return dict(proved=not why, why=why, windows=len(windows.views), margin=round(margin, 3))

def determine(config, lines, pool):
    """-> Windows of a pool of questions, with a clash if these lines, where biases must differ
    clearly, do not determine the answers."""
    windows = Windows(config, lines)
    for source, target in pool:
        windows.add(source, target, list(range(target.shape[1] - 1)), rounded=True)
    return windows

def drop_places(config, lines, pool):
    """Lines that determine the answers of a pool -> a minimal subset that does. All heads' lines
    at one place are dropped together, the weakest places first."""
    strength = {}
    for line in lines:
        strength[line.place] = max(strength.get(line.place, 0), line.z)
    for place in sorted(strength, key=strength.get):
        fewer = [line for line in lines if line.place != place]
        own_token = place == ("self", 1, 0, 0)  # a part of the window even without a line
        if not own_token and not determine(config, fewer, pool).clash:
            lines = fewer
    return lines

def choose_lines(config, attention, report=silent):
    """Averaged attention -> kappa, lines, Windows: the fewest lines that determine the answer, such
    that two rows that look the same write the same token. Raises: RunFailed where none do.

    Kappa falls until the open lines determine the answers of a pool of questions; of these the
    fewest that do are kept. Then all windows are enumerated; two that clash join the pool. If
    rows depend on more than windows, all lines at the rules' own kappa are kept."""
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
        windows = determine(config, opened, pool)
        while not windows.clash:
            lines = drop_places(config, opened, pool)
            windows = enumerate_windows(config, lines, report)
            if not windows.clash:
                return kappa, lines, windows
            pool += windows.clash
            windows = determine(config, opened, pool)
    raise RunFailed(f"no lines determine the answer: {windows.why}")

# -----
# 7. Training and evaluation
# A run depends only on its options. It produces named parts, such as the weights of a model or its
# test results. Each part is saved when it is done, so that an interrupted run resumes with the
# missing parts.

def flag(name):
    """Name of an option -> as it is on the command line."""
    return "--" + name.replace("_", "-")

def whole(value, least=0):
    """A value or text -> an integer up to 10^9. Raises: ValueError, TypeError."""
    if not least <= int(value) == float(value) <= 10 ** 9:
        raise ValueError
    return int(value)

def positive(value):
    """-> an integer from 1 on. Raises: ValueError, TypeError."""
    return whole(value, 1)

def positives(value):
    """"6,10,20" or (6, 10, 20) -> (6, 10, 20). Raises: ValueError, TypeError."""
    parts = value.split(",") if isinstance(value, str) else value
    if not len(parts):
        raise ValueError
    return tuple(map(positive, parts))

def fraction(value):
    """-> a number from 0 to 1. Raises: ValueError, TypeError."""
    if not 0 <= float(value) <= 1:
        raise ValueError
    return float(value)

def option(help, read=positive, choices=None, default=None, **kinds):
    """A field of Config: its help, the parser and the choices of its values, and its default for
    each kind of model that has it; None is derived from the task or other options."""
    about = dict(help=help, read=read, choices=choices, kinds=kinds)
    return dataclasses.field(default=default, metadata=about)

# n_encoder, d_model and n_head of encoders.
SIZES = {"small": (3, 64, 4), "base": (6, 512, 8), "standard": (6, 1024, 16),
         "large": (10, 1024, 16)}
# The paper's preset. v2, App. B and D; batch and steps are those of sums in the authors' code;
# retraining takes a tenth. Pairs, Appendix, which says nothing of steps. Jelassi, Sec. 2.2: 15,000
# epochs of 5,000 examples; its products need --second-digits 3.
PAPERS = {
    "seq2seq": dict(rules="v2", n_encoder=1, n_layer=6, n_head=8, d_model=128, dropout=0.3,
                    lr=1e-5, batch=512, steps=460_000, retrain_steps=46_000, width=61,
                    samples=10_000),
    "pairs": dict(lr=1e-4, batch=1000, steps=10_000),
    "encoder": dict(size="standard", dropout=0.1, lr=1e-4, steps=2_343_750, samples=10_000,
                    lengths=(5, 6, 10, 15, 20))}

@dataclasses.dataclass
class Config:
    """Options of a run, as given in Python or as text. None is replaced by the value
    of the preset, the method, the kind of model or the task, in this order. Raises: BadInput naming
    the option."""
    task: str = option("what to learn, see --list", str, default="successor")
    model: str = option("what learns it, see --list", str, TASKS_OF)
    preset: str = option("paper: defaults, norms and embeddings of the source", str,
                         ("fast", "paper"), default="fast")
    seed: int = option("of every random stream", whole, default=0)
    method: str = option("positions and attention, see --list", str, METHODS, seq2seq="abc",
                         encoder="rpe-k")
    rules: str = option("of calibration: ours, or those of v1, v2 or the authors' code", str, RULES,
                        seq2seq="ours")
    size: str = option("n_encoder, d_model and n_head, if not given", str, SIZES, encoder="small")
    n_encoder: int = option("encoder layers, or rounds of one", whole, seq2seq=0, encoder=None)
    n_layer: int = option("decoder layers", seq2seq=1)
    n_head: int = option("attention heads", seq2seq=4, encoder=None)
    d_model: int = option("width of the model", seq2seq=64, pairs=128, encoder=None)
    d_head: int = option("width of queries and keys", pairs=32)
    d_vocab: int = option("how many integers, from 4 on", pairs=16)
    dropout: float = option("probability", fraction, seq2seq=0.0, encoder=0.0)
    clip: int = option("relative tables have offsets from -clip to clip", seq2seq=16, encoder=None)
    lr: float = option("peak learning rate", fraction, seq2seq=None, pairs=1e-3, encoder=3e-3)
    batch: int = option("batch size", seq2seq=None, pairs=300, encoder=32)
    steps: int = option("of the first training", seq2seq=None, pairs=6000, encoder=None)
    retrain_steps: int = option("steps of fine-tuning; limit of the first retraining attempt",
                                seq2seq=None, encoder=1000)
    width: int = option("digits of every number; by default as many as are needed", seq2seq=None,
                        encoder=None)
    lengths: tuple = option("digits, or integers of a sequence, that are tested", positives,
                            seq2seq=(6, 10, 20, 60), pairs=(5,), encoder=(5, 6, 10))
    samples: int = option("questions per length; at most 200 above 100 digits",
                          seq2seq=1000, pairs=10_000, encoder=1000)
    train_digits: int = option("digits of training numbers, at most", encoder=5)
    second_digits: int = option("digits of the second operand, at most", encoder=None)
    modulus: int = option("answers are modulo this", encoder=None)
    n_train: int = option("first operands to train on", encoder=5000)
    prime: int = option("how many of --n-train are long", whole, encoder=0)
    prime_lengths: tuple = option("their digits; by default the longest tested", positives,
                                  encoder=None)
    finetune: int = option("long ones to train on afterwards", encoder=None)
    dummy: bool = option("a dummy token before each sequence", bool, (False, True), pairs=False)
    plant: float = option("probability of planting a pair", fraction, pairs=0.0)

    def __post_init__(self):
        models = [name for name, tasks in TASKS_OF.items() if self.task in tasks]
        self.model = self.model or "".join(models[:1])
        if self.model not in models:
            raise BadInput(f"--task: {self.task!r} is learned by {', '.join(models) or 'no model'}")
        usual = {}
        for field in dataclasses.fields(self):
            value, name, about = getattr(self, field.name), flag(field.name), field.metadata
            if self.kind in about["kinds"]:
                usual[field.name] = about["kinds"][self.kind]
            elif about["kinds"] and value is not None:
                raise BadInput(f"{name}: not an option of {self.task}, {self.model}")
            if value is not None:
                try:
                    setattr(self, field.name, about["read"](value))
                except (TypeError, ValueError, OverflowError):
                    raise BadInput(f"{name}: {value!r} is invalid") from None
                value, choices = getattr(self, field.name), about["choices"]
                if choices and value not in choices:
                    raise BadInput(f"{name}: {value!r} is none of {', '.join(map(str, choices))}")
        if self.preset == "paper":
            self.fill(**PAPERS[self.kind])
        if self.kind == "seq2seq":
            method = METHODS[self.method or usual["method"]]
            self.fill(**method.defaults)
            if len(TASKS[self.task].operands) == 1:
                self.fill(**method.unary)
        self.fill(**usual)
        if self.kind == "seq2seq":
            self.settle_seq2seq()
        elif self.kind == "encoder":
            self.settle_encoder()
        elif not 4 <= self.d_vocab <= 2 ** 16:
            raise BadInput(f"--d-vocab: {self.d_vocab} is not 4 to 65,536")
        if self.method:
            self.check_heads()

    def fill(self, **values):
        """Give values to those options that have none."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def settle_seq2seq(self):
        check_task(self.task)
        spec, method = TASKS[self.task], METHODS[self.method]
        self.fill(lr=spec.lr, batch=spec.batch, steps=spec.steps * method.steps,
                  retrain_steps=spec.retrain_steps)
        if not spec.width <= max(self.widths) <= 2000:
            raise BadInput(f"--width: {self.width} is not {spec.width} to 2,000")
        far = method.calibrated and self.rules == "ours" and not self.n_encoder
        if max(self.lengths) > 2000 and not far:
            raise BadInput("--lengths: more than 2,000 needs --method abc and --rules ours")

    def settle_encoder(self):
        spec, (n_encoder, d_model, n_head) = ENCODER_TASKS[self.task], SIZES[self.size]
        self.fill(n_encoder=n_encoder, d_model=d_model, n_head=n_head, steps=spec.steps,
                  prime_lengths=(max(self.lengths),))
        if "digit" in spec.operands:
            self.fill(second_digits=1)
        needed = max(self.lengths + self.prime_lengths + (self.train_digits,
                                                          self.second_digits or 1))
        # Behind every training number there is PAD; without room the longest tested have none.
        self.fill(width=needed + 2 if self.preset == "fast" else needed)
        self.fill(clip=2 * self.width)
        if not needed <= self.width <= 2000:
            raise BadInput(f"--lengths, --prime-lengths, --train-digits and --second-digits need a "
                           f"--width of {needed} to 2,000. Got {self.width}.")
        if not self.n_encoder:
            raise BadInput("--n-encoder: an encoder needs a layer")
        if self.prime > self.n_train:
            raise BadInput(f"--prime: {self.prime} > --n-train {self.n_train}")
        if "digit" in spec.operands and self.second_digits > 15:  # totals are 64-bit integers
            raise BadInput(f"--second-digits: {self.second_digits} > 15")
        if METHODS[self.method].n_width > 1 or self.method == "alibi-decoder":
            raise BadInput(f"--method: {self.method} needs a decoder")

    def check_heads(self):
        """The heads must divide the width of the model; rotated heads need pairs of channels."""
        parts = self.n_head
        if METHODS[self.method].scores is rotary:
            parts = 2 * self.n_head
        if self.d_model % parts:
            raise BadInput(f"--n-head: {parts} does not divide --d-model {self.d_model}")

    @property
    def kind(self):
        """seq2seq, pairs or encoder; "universal" is an encoder that repeats one layer."""
        return "encoder" if self.model == "universal" else self.model

    @property
    def align(self):
        """Are operands interleaved?"""
        return METHODS[self.method].align and len(TASKS[self.task].operands) == 2

    @property
    def widths(self):
        """Widths of training numbers of an encoder-decoder."""
        if self.width:
            return [self.width]
        narrowest = TASKS[self.task].width
        return range(narrowest, narrowest + METHODS[self.method].n_width)

def check_task(task):
    """Raises: BadInput if this entry of TASKS cannot be learned."""
    spec, digits = TASKS[task], VOCAB.index("+")
    signs = set(VOCAB[digits:]) - {START, END, PAD}
    numbers_first = list(spec.operands) == sorted(spec.operands, reverse=True)
    known = {"number"} <= set(spec.operands) <= {"number", "digit"}
    signed = len(spec.operands) == 1 or spec.sign in signs
    based = isinstance(spec.base, int) and 2 <= spec.base <= digits
    if not (based and numbers_first and known and signed):
        raise BadInput(f"--task: {task} needs a base of 2 to {digits}, operands that are numbers, "
                       f"then digits, and if there are several a sign of {' '.join(sorted(signs))}")

class Optimizer:
    """Muon for the matrices of layers and Adam, at a quarter of its rate, for all other weights; or
    Adam for all. `share`, of the peak rate, is set before a step.

    Muon: momentum, made orthogonal by five Newton-Schulz steps, at the size of Adam's updates; all
    matrices of one shape are stacked. Source: Jordan et al. 2024; the size, 0.2 sqrt(max(rows,
    columns)): Liu et al. 2025. Adam: Kingma and Ba 2015; its decay: Loshchilov and Hutter 2019. It
    is no torch.optim.Optimizer, whose import takes a second; a CUDA graph needs rates and state in
    tensors."""
    def __init__(self, model, lr, muon=True, betas=(0.9, 0.999), decay=0.0):
        self.lr, self.betas, self.decay = lr, betas, decay
        self.matrices, self.rest = {}, []
        for name, weight in model.named_parameters():
            # Matrices of encoder.0, decoder.0, ..., except for those that make scores.
            if muon and weight.dim() == 2 and "coder." in name and ".scores." not in name:
                self.matrices.setdefault(tuple(sorted(weight.shape)), []).append(weight)
            else:
                self.rest.append(weight)
        self.sizes = [weight.numel() for weight in self.rest]
        vector = torch.cat([weight.detach().flatten() for weight in self.rest])
        self.share, self.steps = torch.ones_like(vector[0]), torch.zeros_like(vector[0])
        self.mean, self.square = torch.zeros_like(vector), torch.zeros_like(vector)
        self.momenta = [vector.new_zeros(len(x), *shape) for shape, x in self.matrices.items()]

    def state(self):
        """-> the state tensors. CUDA graphs refer to them, so restore them in place."""
        return [self.steps, self.mean, self.square] + self.momenta

    @torch.no_grad()
    def step(self):
        rate = self.share * self.lr
        self.adam_step(rate / 4 if self.matrices else rate)
        for (shape, weights), momentum in zip(self.matrices.items(), self.momenta):
            wide = [x.grad if x.shape[0] <= x.shape[1] else x.grad.T for x in weights]
            grads = torch.stack(wide)  # (n, rows, columns), rows <= columns
            momentum.lerp_(grads, 0.05)
            update = orthogonal(grads.lerp(momentum, 0.95))  # Nesterov
            update = update * (rate * 0.2 * math.sqrt(shape[1]))
            for weight, change in zip(weights, update):
                weight.sub_(change if weight.shape == change.shape else change.T)

    def adam_step(self, rate):
        """On all weights but Muon's, as one vector."""
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.rest]
        grad = torch.cat([x.flatten() for x in grads])
        self.steps += 1
        self.mean.lerp_(grad, 1 - self.betas[0])
        self.square.lerp_(grad * grad, 1 - self.betas[1])
        spread = (self.square / (1 - self.betas[1] ** self.steps)).sqrt() + 1e-8
        update = self.mean / (1 - self.betas[0] ** self.steps) / spread
        for weight, change in zip(self.rest, update.split(self.sizes)):
            weight.sub_(rate * (change.view_as(weight) + self.decay * weight))

def orthogonal(x):
    """Matrices (n, a, b), a <= b -> approximately the nearest semi-orthogonal ones."""
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, square, x, beta=3.4445)
    return x

def make_optimizer(model, config):
    """The optimizer of a run; in the paper's preset there is no Muon."""
    how = {"seq2seq": dict(betas=(0.9, 0.98)), "pairs": dict(muon=False),
           "encoder": dict(decay=0.01)}[config.kind]
    if config.preset == "paper":
        how["muon"] = False
    return Optimizer(model, config.lr, **how)

def take_step(model, optimizer, source, target):
    """One step -> the loss, the cross-entropy of target (B, T + 1), each token given those before
    it. Differs: gradients are clipped at norm 1."""
    model.train()
    model.zero_grad()
    target = target.to(next(model.parameters()).device)
    logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()

class GraphedStep:
    """`take_step`, on CUDA as a graph. A step of a small model is some hundreds of short kernels,
    and launching them takes about 9 ms; captured as one CUDA graph they take about 1 ms.

    The first batch of a shape is an ordinary step, which warms up what a capture needs. The next
    is captured, which runs nothing, and replayed; later batches are copied into its tensors. So
    every batch counts once. The loss is overwritten by the next replay."""
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

def say(text):
    """To standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr or io.StringIO(), flush=True)

def write(folder, name, data):
    """Write and rename a temporary file, so none is half-written. On a full disk the run goes
    on."""
    path, beside = Path(folder, name), Path(folder, f"{name}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        say(f"lengen: {path} cannot be written: {error.strerror}")
        with contextlib.suppress(OSError):
            beside.unlink()

@contextlib.contextmanager
def reading(what):
    """Re-raise any exception in the block as BadInput about `what`."""
    try:
        yield
    except Exception as error:
        why = " ".join((getattr(error, "strerror", None) or repr(error)).split())
        raise BadInput(f"{what} cannot be used: {why[:300]}") from None

class Run:
    """Options and named parts, saved in checkpoint.pt if there is a folder."""
    def __init__(self, config, folder=None, parts=None, device="cpu", report=silent):
        self.config, self.folder, self.parts = config, folder, parts or {}
        self.device, self.report = torch.device(device), report

    def keep(self, name, part):
        """Keep a part, and save all."""
        self.parts[name] = part
        self.save()

    def save(self):
        """Save all as plain values and tensors, which load without running code."""
        if self.folder:
            buffer, config = io.BytesIO(), dataclasses.asdict(self.config)
            torch.save(dict(config=config, vocab=VOCAB, parts=self.parts), buffer)
            write(self.folder, "checkpoint.pt", buffer.getvalue())

def train(run, model, name, steps, data, windows=None):
    """Train a model and keep the part {"weights", "steps", "seconds", "curve"}; if it is there, it
    is loaded. A part that also has the state of an "optimizer" is not finished and goes on.
    data: `batch(step)` -> source (B, S), target (B, T + 1); `rate(step)` -> share of the peak rate;
    `check(model)` -> a list, for the curve: [step, loss, *check] every 100 steps. windows: every 25
    steps, from 50 on, training stops if the model is proved on them. Raises: RunFailed if the loss
    is not finite."""
    optimizer = make_optimizer(model, run.config)
    take = GraphedStep(model, optimizer, run.device.type == "cuda")
    part = run.parts.get(name, dict(steps=0, seconds=0.0, curve=[]))
    with reading("what is kept of the run"):
        begun, curve = part["steps"], part["curve"]
        if begun:
            model.load_state_dict(part["weights"])
            if "optimizer" not in part:
                return
            assert begun < steps, f"step {begun} of {steps}"
            for x, kept in zip(optimizer.state(), part["optimizer"], strict=True):
                x.copy_(kept)
    told = time.perf_counter()
    start = told - part["seconds"]
    for step in range(begun + 1, steps + 1):
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
            seconds = time.perf_counter() - start
            run.report(f"{name}: step {step:,} of {steps:,}, loss {loss:.4f}, {seconds:.0f} s")
            part = dict(steps=step, seconds=round(seconds, 2), curve=curve,
                        weights=copy.deepcopy(model.state_dict()))
            if not last:
                part["optimizer"] = copy.deepcopy(optimizer.state())
            run.keep(name, part)
            told = time.perf_counter()
        if last:
            return

def test_questions(config, length):
    """-> sets of test questions by name; encoder-decoders have "hard" ones, too, at the longest
    length up to 60. For the other models see sections 8 and 9."""
    if config.kind == "pairs":
        return pairs_questions(config, length)
    if config.kind == "encoder":
        return encoder_questions(config, length)
    samples = config.samples
    if length > 100:
        samples = min(samples, 200)  # they take long
    sets = {"random": draw_questions(config, draw_exact, length, samples)}
    if length == max([n for n in config.lengths if n <= 60], default=0):
        sets["hard"] = draw_questions(config, draw_hard, length, samples)
    return sets

def evaluate(model, config, report=silent):
    """Test at config.lengths -> {"rows", "seconds"}. In a row, "correct" of "n" answers are
    exact, and "places" has the accuracy of each digit."""
    rows, start = [], time.perf_counter()
    for length in sorted(set(config.lengths)):
        report(f"test of {length} digits")
        with seeded(config.seed, "test", length):
            questions = test_questions(config, length)
        for name, (source, target) in questions.items():
            right, token = right_tokens(model, source, target), target[:, 1:]
            digit = (token != VOCAB.index(END)) & (token != VOCAB.index(PAD))
            shown = digit.any(0)
            places = (right & digit)[:, shown].sum(0) / digit[:, shown].sum(0)
            rows.append(dict(digits=length, set=name, correct=int(right.all(1).sum()),
                             n=len(right), places=[round(x, 4) for x in places.tolist()]))
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

class Numbers:
    """Training data of an encoder-decoder: questions on training numbers, and a check on 1,000
    questions on held-out ones.

    In a first training short numbers come more often at first, half of them below 1.6% of all, and
    the rate falls to zero over the last 40% of the steps; in a retraining it falls throughout. It
    starts with 30 steps of warm-up. In the paper preset it is constant."""
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
        return [float(right_tokens(model, source, target).all(1).float().mean())]

def training_batch(config, numbers, B, power=1.0):
    """B questions on some of these numbers, at one of the run's widths -> source, target. power:
    above 1, the first (short) ones come more often."""
    spec, width = TASKS[config.task], config.widths[int(torch.randint(len(config.widths), (1,)))]

    def draw():
        operands = []
        for kind in spec.operands:
            if kind == "number":
                pick = (len(numbers) * torch.rand(B) ** power).long()
                operands.append(to_digits(numbers[pick], width, spec.base))
            else:
                operands.append(torch.randint(spec.base, (B, 1)))
        return operands

    return collect_questions(config, draw, B, distinct=False)

def learn_method(run):
    """Train a model by a method other than ABC -> model, proof. If its attention is a fixed window
    and its positions are none or repeat, training ends when it is proved."""
    config = run.config
    with seeded(config.seed, "model"):
        model = Transformer(config).to(run.device)
    data = Numbers(config, config.steps, first=True)
    if not METHODS[config.method].period:
        train(run, model, "model", config.steps, data)
        return model, {}
    windows = enumerate_windows(config, None, run.report)
    if windows.clash:
        run.report(f"no training makes it exact: {windows.why}")
    train(run, model, "model", config.steps, data, windows)
    return model, prove(model, windows)

def learn_abc(run):
    """Train a model by ABC, in five stages; each names what it starts from -> model, proof. Source:
    v1, Sec. 5; v2, App. D. Differs: short numbers come more often at first; rates fall; lines are
    as few as determine the answer; the retraining starts from the vanilla model, and ends when it
    is proved."""
    config = run.config
    # 1. From random weights: a vanilla model learns the training numbers. It is never tested.
    plain = dataclasses.replace(config, method="vanilla", lengths=(6,))
    data = Numbers(plain, config.steps, first=True)
    with seeded(config.seed, "vanilla"):
        vanilla = Transformer(plain).to(run.device)
    train(run, vanilla, "vanilla", config.steps, data)
    # 2. From the vanilla model: its attention, averaged over 1,000 training questions.
    if "attention" not in run.parts:
        with seeded(config.seed, "attention"):
            source, target = training_batch(plain, data.training, 1000)
        run.keep("attention", collect_attention(vanilla, source, target))
    # 3. From the averaged attention: the fewest lines that determine the answer, and their windows.
    kappa, lines, windows = choose_lines(config, run.parts["attention"], run.report)
    for attempt in 1, 2:
        # 4. From the weights of the vanilla model, but with queries and keys at zero, so that
        # the bias alone determines attention; the positions that they encoded are gone. They stay
        # at zero, as the gradient of each is a product with the other. The second attempt starts
        # from random weights; so does the only one by the other rules.
        name, steps = f"attempt {attempt}", attempt * config.retrain_steps
        with seeded(config.seed, name):
            model = Transformer(config)
        model.bias = CalibratedBias(config, lines)
        model.to(run.device)
        if attempt == 1 and config.rules == "ours":
            start_from(model, vanilla)
        train(run, model, name, steps, Numbers(config, steps, first=False), windows)
        # 5. From the retrained model and all windows: the proof.
        proof = prove(model, windows)
        if proof["proved"] or windows.why:
            break
    run.parts["model"] = run.parts.pop(name)
    proof |= dict(kappa=kappa, attempt=attempt, lines=[line._asdict() for line in lines])
    return model, proof

@torch.no_grad()
def start_from(model, vanilla):
    """Give a model the weights of the vanilla one, with queries and keys at zero."""
    for (name, weight), old in zip(model.named_parameters(), vanilla.parameters(), strict=True):
        weight.copy_(old)
        if ".q." in name or ".k." in name:
            weight.zero_()

def ask(model, config, question, report=silent):
    """A question, such as "123+748" or "123 + 748" -> the answer, "871". Raises: BadInput outside
    the task."""
    spec = TASKS[config.task]
    operands = [text.strip() for text in question.split(spec.sign or None)]
    if spec.headroom:
        operands = [text.lstrip("0") or text[:1] for text in operands]
    width = max([config.widths[0]] + [len(text) + spec.headroom for text in operands])
    source, target = example(config.task, *operands, width=width, align=config.align)
    text = decode(generate(model, encode(source)[None], len(target) - 1, report)[0])[1:]
    digits, end, _ = text.partition(END)
    if not end or not digits or set(digits) - set(VOCAB[:spec.base]):
        return f"no number; the model wrote {text!r}"
    if spec.headroom:
        return digits[::-1].lstrip("0") or "0"
    return digits[:max(map(len, operands))][::-1]  # a digit for each that was asked

# -----
# 8. Consecutive pairs: one attention head, read completely
# Source: Pairs. Tokens are integers 0 .. V - 1; the label of a token is 1 if the sequence also
# holds its value - 1 or + 1. There is one layer with one head, and no feed-forward; also no
# positions, norm or residual, of which the source says nothing.

def draw_pairs(config, B, length):
    """-> source (B, length), with `dummy` a token V before it, target (B, 1 + length), the labels
    behind a start token. Integers are uniform; places (0, 1), (2, 3), ... become pairs with
    probability `plant`. The source does not say how it draws."""
    tokens, n = torch.randint(config.d_vocab, (B, length)), length // 2
    first, side = tokens[:, 0:2 * n:2], 1 - 2 * torch.randint(2, (B, n))
    outside = (first + side < 0) | (first + side >= config.d_vocab)
    second = first + torch.where(outside, -side, side)
    planted = torch.rand(B, n) < config.plant
    tokens[:, 1::2] = torch.where(planted, second, tokens[:, 1::2])
    ordered, label = tokens.sort(1).values, torch.zeros_like(tokens)
    for neighbor in tokens - 1, tokens + 1:
        place = torch.searchsorted(ordered, neighbor).clamp(max=length - 1)
        label |= (ordered.gather(1, place) == neighbor).long()
    if config.dummy:
        tokens = F.pad(tokens, (1, 0), value=config.d_vocab)
    return tokens, F.pad(label, (1, 0))

class PairsHead(nn.Module):
    """Source (B, T), target -> logits (B, T, 2) of the labels, 0 and z. Differs: the output bias
    starts at +5, so every integer first predicts 1; the dummy's larger embedding lets it learn 0
    quickly."""
    def __init__(self, config, n_vocab=None):
        super().__init__()
        self.config = config
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
    it on a plateau, with a patience of 100, and takes the best of several seeds."""
    def __init__(self, config):
        self.config = config

    def batch(self, step):
        return draw_pairs(self.config, self.config.batch, 5)

    def rate(self, step):
        return 1.0

    def check(self, model):
        return []

def pairs_questions(config, length):
    """Tests, drawn as in training ("random") and without planted pairs ("uniform")."""
    uniform = dataclasses.replace(config, plant=0.0)
    return {"random": draw_pairs(config, config.samples, length),
            "uniform": draw_pairs(uniform, config.samples, length)}

def learn_pairs(run):
    """-> model, proof, of which there is none."""
    with seeded(run.config.seed, "model"):
        model = PairsHead(run.config).to(run.device)
    train(run, model, "model", run.config.steps, Pairs(run.config))
    return model, {}

# -----
# 9. Encoders: one pass, relative positions, priming
# Source: Jelassi. One pass over the question: digit t of the answer is read off at token t. Numbers
# start with their most significant digit and are padded on the right, so digits of equal weight
# are aligned only in numbers of equal length. + and * serve for the paper's four signs.

def n_digits(a):
    """Digits (B, W) -> (B,) their number without leading zeros; 0 has one."""
    places = torch.arange(1, a.shape[1] + 1)
    return ((a > 0) * places).amax(1).clamp(min=1)

def write_padded(a, length):
    """Digits (B, W) -> tokens (B, W): the lowest `length` (B,), highest first, then PAD."""
    place = length[:, None] - 1 - torch.arange(a.shape[1])
    return a.gather(1, place.clamp(min=0)).masked_fill(place < 0, VOCAB.index(PAD))

def remainder(a, modulus):
    """Digits (B, W) -> digits of the number modulo `modulus`, as many as modulus - 1 has."""
    rest = torch.zeros(len(a), dtype=torch.int64)
    for digit in a.flip(1).unbind(1):  # Horner's method, so that no integer grows
        rest = (10 * rest + digit) % modulus
    return to_digits(rest, len(str(modulus - 1)))

def arrange_encoder(task, a, b, modulus=None):
    """Operands a, b (B, W) -> question (B, 2W + 1), target (B, 1 + n), the answer behind a START
    that is not read. Source: Jelassi, Sec. 2.1 (printed with a pad less)."""
    spec, W = ENCODER_TASKS[task], a.shape[1]
    if "digit" in spec.operands:
        operands = [F.pad(a, (0, W)), b @ 10 ** torch.arange(W)[:, None]]  # (B, 2W), (B, 1)
    else:
        operands = [F.pad(x, (0, spec.headroom)) for x in (a, b)]
    answer, _ = answer_digits(spec, operands)
    length = n_digits(answer) if spec.headroom else torch.maximum(n_digits(a), n_digits(b))
    if modulus:
        answer = remainder(answer, modulus)
        length = torch.full_like(length, answer.shape[1])
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
    second = config.second_digits or length
    return draw_below(config, length, B, even), draw_below(config, second, B, even)

class Encoder(Transformer):
    """Source (B, S), target (B, T), read for its length alone -> logits (B, T, V). Source: Jelassi,
    Sec. 2.2, with layers of BERT and ALBERT; "vanilla" are the sinusoids that it cites, "ape" the
    table of these layers. Differs: feed-forward layers are 4 C wide, not 3,072 and 16,384; ALBERT
    has no dropout, does not scale the relative term, and widens embeddings of 128."""
    def __init__(self, config, n_vocab=None):
        super().__init__(config, n_vocab)
        if config.model == "universal":  # one layer, again and again
            self.encoder = nn.ModuleList([self.encoder[0]] * config.n_encoder)
        for layer in self.encoder:
            layer.feed_forward[1] = nn.GELU()
        if config.preset == "paper":
            self.norm = nn.Identity()  # the last layer ends in one
            self.dropout = nn.Sequential(nn.LayerNorm(config.d_model), self.dropout)
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02)

    def forward(self, source, target):
        memory = self.read(source.to(self.head.weight.device))
        return self.head(self.norm(memory[:, :target.shape[1]]))

def encoder_questions(config, length):
    """Test questions on numbers below 10^length. Source: Jelassi, Sec. 2.1."""
    a, b = draw_encoder(config, length, config.samples)
    return {"random": arrange_encoder(config.task, a, b, config.modulus)}

class EncoderExamples:
    """Training data of an encoder: questions with n first operands, of which `prime` are long and
    keep their second one; all others draw it anew. Differs: 100 steps of warm-up; draws with
    replacement.

    The curve has the accuracy of each digit (Figs. 7, 10; on new questions) and, if some numbers
    are long, the exact share of the longest (Figs. 3b, 4d)."""
    def __init__(self, config, name, n, prime, steps):
        self.config, self.n, self.prime, self.steps = config, n, prime, steps
        self.even, lengths = config.preset == "fast", config.prime_lengths
        with seeded(config.seed, name, "examples"):
            self.a, self.b = draw_encoder(config, config.train_digits, n, self.even)
            for turn, length in enumerate(lengths):
                long = slice(turn, prime, len(lengths))  # the lengths take turns
                count = len(self.a[long])
                self.a[long], self.b[long] = draw_encoder(config, length, count)

    def batch(self, step):
        config = self.config
        pick = torch.randint(self.n, (config.batch,))
        _, fresh = draw_encoder(config, config.train_digits, config.batch, self.even)
        second = torch.where((pick < self.prime)[:, None], self.b[pick], fresh)
        return arrange_encoder(config.task, self.a[pick], second, config.modulus)

    def rate(self, step):
        return min(1.0, step / 100) * (1 + math.cos(math.pi * step / self.steps)) / 2

    def check(self, model):
        lengths = [self.config.train_digits]
        if self.prime:
            lengths.append(max(self.config.prime_lengths))
        few = dataclasses.replace(self.config, lengths=tuple(lengths), samples=200)
        rows = {row["digits"]: row for row in evaluate(model, few)["rows"]}
        exact = [rows[length]["correct"] / rows[length]["n"] for length in lengths[1:]]
        return rows[lengths[0]]["places"] + exact

def learn_encoder(run):
    """Train on short numbers and, with --prime, on a few long ones; with --finetune, then test, and
    train on long ones -> model, {} (no proof). Source: Jelassi, Secs. 2.2 and 5."""
    config, n = run.config, run.config.finetune
    with seeded(config.seed, "model"):
        model = Encoder(config).to(run.device)
    name = "short numbers" if n else "model"
    data = EncoderExamples(config, name, config.n_train, config.prime, config.steps)
    train(run, model, name, config.steps, data)
    if n:
        if "before" not in run.parts:
            run.keep("before", evaluate(model, config, run.report))
        data = EncoderExamples(config, "model", n, n, config.retrain_steps)
        train(run, model, "model", config.retrain_steps, data)
    return model, {}

# -----
# 10. Command line

def build(config, parts):
    """Parts of a run, of any model -> its trained model, ready to answer. Raises: BadInput."""
    kind = {"seq2seq": Transformer, "pairs": PairsHead, "encoder": Encoder}[config.kind]
    with reading("what is kept of the run"):
        weights = parts["model"]["weights"]
        n_vocab = len(weights["embedding.weight"])  # symbols may have been added to VOCAB since
        model = kind(config, n_vocab)
        model.load_state_dict(weights)
        return model.eval()

def read_checkpoint(folder):
    """-> config, parts. Raises: BadInput; runs no code in the file."""
    path = Path(folder, "checkpoint.pt")
    with reading(repr(str(folder))):
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise ValueError("it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not VOCAB.startswith(state["vocab"]):
            raise ValueError(f"its symbols are {state['vocab']}, those of VOCAB {VOCAB}")
        return Config(**state["config"]), dict(state["parts"])

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
    """What a run came to, as plain values."""
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
    """The record as lines of text."""
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
    """New, so that no two runs share one. Raises: BadInput."""
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
    report = silent if options.quiet else say
    run = Run(config, folder, parts, pick_device(config, options.device), report)
    report(f"{config.task}, seed {config.seed}, {run.device}, {folder or ''}")
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
        run.keep("tests", evaluate(model, config, report))
    record = make_record(run)
    if folder:
        write(folder, "result.json", json.dumps(record).encode())
    print(json.dumps(record) if options.json else "\n".join(summary(record)), flush=True)

def go_on(given, options):
    """--from: finish a run, or test a finished one, whose folder stays as it is."""
    for name in given:
        if name not in ("lengths", "samples"):
            raise BadInput(f"{flag(name)}: not with --from")
    if options.out is not None or options.seeds > 1:
        raise BadInput("--out and --seeds: not with --from")
    config, parts = read_checkpoint(options.folder)
    if given:
        config = dataclasses.replace(config, **given)
        parts.pop("tests", None)
        if parts.pop("before", None):
            parts.pop("proof")  # so that both models of the run are tested
    folder = options.folder
    if Path(folder, "result.json").exists():
        folder = None
    execute(config, folder, parts, options)

def ask_all(given, options):
    """--ask: a line for each question."""
    for name in given:
        raise BadInput(f"{flag(name)}: not with --ask")
    folder = options.folder
    if folder is None:
        finished = sorted(Path("runs").rglob("result.json"), key=os.path.getmtime)
        if not finished:
            raise BadInput("--ask: no finished run under runs/")
        folder = finished[-1].parent
    model, config, _ = load(folder)
    if config.model != "seq2seq":
        raise BadInput(f"--ask: only encoder-decoders can be asked, not {config.model}")
    say(f"asking {folder}: {config.task} by {config.method}, seed {config.seed}")
    for question in options.ask:
        print(ask(model, config, question, say), flush=True)

def print_lists():
    """--list"""
    for name, tasks in TASKS_OF.items():
        print(f"--model {name}")
        for task, spec in tasks.items():
            print(f"  --task {task:<21} {spec.about}")
    for name, method in METHODS.items():
        print(f"--method {name:<14} {method.about}", flush=True)

def fail(error, code):
    """Say why -> the exit code."""
    say(f"lengen: {error}")
    return code

class Parser(argparse.ArgumentParser):
    """One whose errors are one line, like all bad input."""
    def error(self, message):
        raise BadInput(message.removeprefix("argument "))

def parse(argv):
    """Arguments -> the options of a run that are given, and those of the command."""
    p = Parser(prog="lengen.py", allow_abbrev=False, add_help=False)
    for field in dataclasses.fields(Config):
        how = dict(help=field.metadata["help"])
        if field.type is bool:
            how |= dict(action="store_true", default=None)
        p.add_argument(flag(field.name), **how)
    p.add_argument("--seeds", type=positive, default=1, help="runs, from --seed on")
    p.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda if there is one")
    p.add_argument("--out", help="a new folder, by default in runs/")
    p.add_argument("--from", dest="folder", metavar="DIR",
                   help="finish a run, test it at --lengths and --samples, or --ask it")
    p.add_argument("--ask", nargs="+", help="123+748, of --from or of the newest finished run")
    p.add_argument("--json", action="store_true", help="print the record, JSON")
    p.add_argument("--quiet", action="store_true", help="no reports")
    p.add_argument("--list", action="store_true", help="print tasks, methods and models")
    p.add_argument("--help", action="store_true", help="print this, and the options of a run")
    options, given = p.parse_args(argv), {}
    for field in dataclasses.fields(Config):
        value = getattr(options, field.name)
        if value is not None:
            given[field.name] = value
    if options.help:
        p.print_help()
        print(f"\nwith these options: {Config(**given)}", flush=True)
    return given, options

def main(argv=None):
    """-> exit code: 0 done, 1 a run failed, 2 bad input, 130 interrupted. Other errors are bugs.
    A run that fails does not stop those of other seeds."""
    code = 0
    try:
        given, options = parse(argv)
        if options.list:
            print_lists()
        elif options.ask:
            ask_all(given, options)
        elif options.folder is not None:
            go_on(given, options)
        elif not options.help:
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
