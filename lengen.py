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

Letters: B batch, T queries, S keys, K keys of one row, H heads, D width of a head, C = H * D width
of the model, V vocabulary, W digits of a number. Attention is m x n at training length and M x N at
another. Lengths count digits; places of digits are counted from the last one, place 0. `Source:`
says where a thing comes from, `Differs:` where it departs from it.
Tokens and biases are made on the CPU; models take them to their device.

v1: Duan and Shi, From Interpolation to Extrapolation: Complete Length Generalization for Arithmetic
Transformers, 2023. v2: Duan, Shi and Xu, Attention Bias as an Inductive Bias: How to Teach
Transformers Simple Arithmetic, 2024. Jelassi: Jelassi et al., Length Generalization in Arithmetic
Transformers, 2023. Pairs: an unsigned study of consecutive pairs.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import math
import operator
import os
import random
import re
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

SECONDS = 3  # between reports, and saves, of long work

def silent(text):
    """A report that nobody reads."""

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

    A task with headroom has questions with a zero in front of each number, and what leaves a rest
    after the first place is no question. Without headroom the last rest is dropped.
    """
    about: str
    total: Callable
    operands: tuple = ("number",)  # "number", of W digits, and after these "digit", of one
    sign: str = ""  # a symbol of VOCAB that stands before each further operand
    base: int = 10
    first: int = 0  # the rest that the last place gets
    headroom: int = 1  # zeros in front of a number, so that its answer fits
    label: bool = False  # the answer is the digit of the first place alone
    steps: int = 600  # of the first training
    retrain_steps: int = 300  # of an attempt at retraining, at most
    batch: int = 64
    lr: float = 6e-3

    def step(self, rest, *digits):
        """Rest and digits of a place -> digit of the answer, rest for the next place."""
        total = self.total(rest, *digits)
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

def answer_digits(spec, operands):
    """Operand digits (B, W), (B, 1) -> digits of the answers (B, W), the last rests (B,)."""
    columns = torch.stack(torch.broadcast_tensors(*operands), 2)  # (B, W, n)
    rest, digits = torch.full_like(columns[:, 0, 0], spec.first), []
    for column in columns.unbind(1):
        digit, rest = spec.step(rest, *column.unbind(1))
        digits.append(digit)
    return torch.stack(digits, 1), rest

def arrange(task, operands, align=False):
    """Operand digits (B, W), (B, 1) -> source (B, S), target (B, T + 1) tokens of all that are
    questions.

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
        a, b = torch.broadcast_tensors(*operands)
        question += [sign, torch.stack([a, b], 2).flip(1).flatten(1)]
    else:
        for digits in operands:
            question += [sign, digits.flip(1)]
        del question[1]  # no sign before the first
    source, target = torch.cat([*question, end], 1), torch.cat([start, answer, end], 1)
    if not spec.headroom:
        return source, target
    return source[rest == 0], target[rest == 0]

def example(task, *operands, width=None, align=False):
    """One worked example: example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&").
    By default it is as wide as its longest operand and the headroom. Raises: BadInput if it is no
    question of the task, or too wide."""
    spec = TASKS.get(task)
    if not spec or len(operands) != len(spec.operands):
        raise BadInput(f"{' '.join(operands)} is no question of {task}")
    width, digits = width or max(map(len, operands)) + spec.headroom, []
    for kind, text in zip(spec.operands, operands):
        most = width if kind == "number" else 1
        if not 1 <= len(text) <= most or set(text) - set(VOCAB[:spec.base]):
            raise BadInput(f"{text!r} is no {kind} of 1 to {most} digits in base {spec.base}")
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
    cut = len(order) * 7 // 8
    return order[:cut].sort().values, order[cut:].sort().values

def seed_by_name(*names):
    """Seed torch by name, such as (seed, "teacher", step), so that no draw depends on another."""
    torch.manual_seed(random.Random(repr(names)).getrandbits(63))

def draw_exact(spec, length, B):
    """Operands of B questions whose numbers have exactly `length` digits. Source: v1, Sec. 3.3."""
    operands = []
    for kind in spec.operands:
        digits = torch.randint(spec.base, (B, length if kind == "number" else 1))
        if kind == "number":
            digits[:, -1] = torch.randint(1, spec.base, (B,))  # no zero in front
        operands.append(digits)
    return operands

def draw_hard(spec, length, B):
    """Operands of B questions that are rare among random ones, of up to `length` digits.

    Digits come in runs, in the same places for all numbers. A run is all zeros, all of the highest
    digit, or random; of a second number also the first's digits again, or what they lack of the
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
        operands.append({"number": mixed, "digit": digits[:, :1]}[kind])
    return operands

def draw_questions(config, draw, length, n):
    """Up to n distinct questions, with zeros in front, from at most 20 draws of n by `draw_exact`
    or `draw_hard` -> source (n, S), target (n, T + 1). If there are only few, 20 draws find them
    all."""
    spec, found = TASKS[config.task], {}
    width = max(config.widths[0], length + spec.headroom)
    for _ in range(20):
        operands = draw(spec, length, n)
        for i, kind in enumerate(spec.operands):
            if kind == "number":
                operands[i] = F.pad(operands[i], (0, width - length))
        source, target = arrange(config.task, operands, config.align)
        for question, answer in zip(source.tolist(), target.tolist()):
            found.setdefault(tuple(question), answer)
        if len(found) >= n:
            break
    if not found:
        raise BadInput(f"--lengths: {config.task} has no question of {length} digits")
    source, target = list(found), list(found.values())
    return torch.tensor(source[:n]), torch.tensor(target[:n])

# -----
# 2. Positions and biases: one pure function each
# A bias is added to the scores: 0 is neutral, -inf closes. Rows are queries i, columns keys j.

def sinusoidal(positions, d_model):
    """Positions (T,) -> (T, C): channel 2p is sin(t / 10000^(2p/C)), channel 2p + 1 the cosine.
    Source: Vaswani et al. 2017, Sec. 3.5. Angles in float64: long positions keep their digits."""
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    angles = positions.double()[:, None] * 10000.0 ** (-pairs / d_model)  # (T, C / 2)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :d_model]
    return waves.to(torch.get_default_dtype())

def rope(x, positions):
    """Rotate channel pairs (2p, 2p + 1) of x (B, H, T, D) by positions (T,) * 10000^(-2p/D).
    Source: Su et al. 2021, Eqs. 14 and 34."""
    return rotate(x, sinusoidal(positions, x.shape[-1]).to(x))

def rotate(x, waves):
    """Rotate channel pairs of x (B, H, T, D) by angles whose sines and cosines are in waves (T, D),
    in turn."""
    sin, cos = waves.unflatten(1, (-1, 2)).unbind(2)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = [even * cos - odd * sin, even * sin + odd * cos]
    return torch.stack(turned, -1).flatten(-2)

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
    """-> (H,) slopes 2^(-8h/H), h = 1 .. H. Where H is no power of two, those of the next lower
    power, then every second of twice that many. Source: Press et al. 2022, Sec. 3 and code."""
    n = 2 ** (n_head.bit_length() - 1)
    slopes = 2.0 ** (-8 * torch.arange(1, n + 1) / n)
    between = 2.0 ** (-4 * torch.arange(1, 2 * n, 2) / n)
    return torch.cat([slopes, between[:n_head - n]])

def alibi_bias(n_head, T, S):
    """-> (H, T, S): -slope_h * |j - i|. Source: Press et al. 2022, Sec. 3. Differs: symmetric, for
    encoders and cross-attention; the causal mask is separate."""
    distance = (torch.arange(S) - torch.arange(T)[:, None]).abs()
    return -alibi_slopes(n_head)[:, None, None] * distance

def causal_bias(T):
    """-> (1, T, T): 0 for j <= i, -inf above the diagonal."""
    return torch.full((T, T), -INF).triu(1)[None]

def window_bias(w, T, S, cross=False, step=1):
    """-> (1, T, S): 0 inside, -inf outside. Row i sees, in self-attention, itself and w tokens
    before it; in cross-attention digit i, counted from the end, and the w digits behind it, the end
    marker included. Of interleaved operands (step=2) digits are pairs. Source: v2, App. C.4, and
    the authors' code for the columns, of w = 1. Differs: the text opens w positions on the other
    side, too, and names no first column; the code has no pairs."""
    i, j = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        end = S - 1
        inside = (j >= end - step * (i + 1)) & (j < end - step * (i - w))
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
    """softmax(scores + bias) over keys; 0, not nan, in a row whose keys are all closed. Raises:
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

    scores: function or module of q (B, H, T, D) and k (B, H, S, D), in place of q k^T. Source:
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

    def heads(self, y):
        """(B, T, H * D) -> (B, H, T, D)"""
        return y.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2)

    def project(self, x, memory):
        """-> q (B, H, T, D), k and v (B, H, S, D)."""
        return self.heads(self.q(x)), self.heads(self.k(memory)), self.heads(self.v(memory))

    def merge(self, y):
        """Outputs of heads (B, H, T, D) -> (B, T, C)."""
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, memory, bias=None):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) or OpenKeys -> output
        (B, T, C), weights (B, H, T, S), with OpenKeys (B, H, T, K)."""
        if isinstance(bias, OpenKeys):
            return self.attend_to_open_keys(x, memory, bias)
        q, k, v = self.project(x, memory)
        scores = self.scores(q, k) if self.scores else q @ k.transpose(2, 3)  # (B, H, T, S)
        weights = masked_softmax(scores / math.sqrt(self.d_head), bias)
        return self.merge(self.dropout(weights) @ v), weights

    def attend_to_open_keys(self, x, memory, bias):
        """The same where each row gathers its own keys, without dropout. Rows come in pieces and
        use few columns of the memory, so that a million rows fit."""
        assert not self.scores, "OpenKeys have scores of their own"
        output, weights = torch.empty_like(x), []
        for rows in torch.arange(x.shape[1]).split(2 ** 12):
            used, keys = bias.columns[rows].unique(return_inverse=True)  # keys (R, K) among used
            q, k, v = self.project(x[:, rows], memory[:, used])
            scores = (q[:, :, :, None] * k[:, :, keys]).sum(4)  # (B, H, R, K)
            weights.append(masked_softmax(scores / math.sqrt(self.d_head), bias.values[:, rows]))
            y = (weights[-1][..., None] * v[:, :, keys]).sum(3)  # (B, H, R, D)
            output[:, rows] = self.merge(y)
        return output, torch.cat(weights, 2)

# -----
# 4. Transformer
# Positions are functions (config, side, T) -> (T, C), added to the embeddings of the "source" or
# "target". Biases are functions (config, layer, kind, T, S) -> (1 or H, T, S), OpenKeys or None,
# added to the scores of "encoder", "self" or "cross" attention. Scores are functions (config, kind,
# q, k) -> (B, H, T, S), in place of q k^T. Where something is learned, a class of modules stands in
# place of the function; it is made from config, for scores from config and kind, and called with
# the rest.
# `config` holds the options of a run, Seq2SeqOptions of section 7.

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
        return window_bias(1, T, S, kind == "cross", step=1 + config.align)

def alibi(config, layer, kind, T, S):
    """In every attention."""
    return alibi_bias(config.n_head, T, S)

def alibi_of_decoder(config, layer, kind, T, S):
    """In self-attention of the decoder alone."""
    if kind == "self":
        return alibi_bias(config.n_head, T, S)

@functools.lru_cache(maxsize=4)
def rotary_waves(T, D, device, dtype):
    """Sines and cosines for `rotate`, made once for all queries and keys."""
    return sinusoidal(torch.arange(T, device=device), D).to(dtype)

def rotary(config, kind, q, k):
    """Products of queries and keys, rotated as by `rope`."""
    T, S, D = q.shape[2], k.shape[2], q.shape[3]
    waves = rotary_waves(max(T, S), D, q.device, q.dtype)
    return rotate(q, waves[:T]) @ rotate(k, waves[:S]).transpose(2, 3)

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
    # At one width END always comes in the same row; several teach to take its row from the source.
    n_width: int = 1  # widths to train at, from the task's on
    align: bool = False  # the source interleaves its two operands
    steps: int = 1  # by default it trains for so many times the steps of the task
    defaults: dict = {}  # of other options of a run
    unary: dict = {}  # more of them, for tasks of one operand
    embedding: float = 0.3  # standard deviation of embeddings; positions must stand out
    calibrated: bool = False  # the bias comes from a model trained before
    # A bias that is a window can be proved if positions are none (1) or repeat after so many rows.
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
    # embeddings and dropout, as the authors have them, make what is there count, not where; more
    # layers tell the digits of a window apart by those of the row before. With two operands
    # nothing extrapolates, in v2 neither.
    "window": WINDOW._replace(about="sinusoids, windows in the decoder (v2, +w)", steps=3,
                              position=sinusoids, embedding=1.33,
                              unary=dict(width=61, dropout=0.3, n_layer=3)),
    "window-cyclic": WINDOW._replace(about="the same, position index modulo 3 (v2, +T)", steps=6,
                                     position=cyclic_sinusoids, period=3),
    "window-nope": WINDOW._replace(about="windows in the decoder, no positions (v2, NoPE+w)",
                                   steps=3, period=1),
    "abc": Method("bias calibrated on a vanilla model, no positions", n_width=9, calibrated=True),
}

class Layer(nn.Module):
    """Self-attention, cross-attention, feed-forward; a norm before each ("paper": after each)."""
    def __init__(self, config, cross):
        super().__init__()
        method, C = METHODS[config.method], config.d_model

        def attention(kind):
            made = MultiHeadAttention(C, config.n_head, config.dropout)
            made.scores = bind(method.scores, config, kind)
            return made

        self.self_attention = attention("self" if cross else "encoder")
        self.cross_attention = attention("cross") if cross else None
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
        own, cross = self.self_attention, self.cross_attention
        x = self.residual(self.norms[0], x, lambda y: own(y, y, self_bias)[0])
        if cross:
            x = self.residual(self.norms[1], x, lambda y: cross(y, memory, cross_bias)[0])
        return self.residual(self.norms[-1], x, self.feed)

    def feed(self, x):
        """Feed-forward. Rows come in pieces, so that a million of them fit."""
        return torch.cat([self.feed_forward(rows) for rows in x.split(2 ** 12, 1)], 1)

@functools.lru_cache(maxsize=4)
def causal_mask(T, device):
    """`causal_bias`, made once for all layers."""
    return causal_bias(T).to(device)

def bind(entry, *given):
    """A function of a method with what is given in place, or a module made from it; or None."""
    if entry is None:
        return None
    if isinstance(entry, type):
        return entry(*given)
    return functools.partial(entry, *given)

class Transformer(nn.Module):
    """Encoder-decoder. bias (layer, kind, T, S): in place of the method's. "paper": matrices start
    as in the authors' code, but for q, k and v, which there are smaller by sqrt(2); embeddings have
    a standard deviation of 1.33."""
    def __init__(self, config, bias=None):
        super().__init__()
        self.config, method, C = config, METHODS[config.method], config.d_model
        self.embedding = nn.Embedding(len(VOCAB), C)
        nn.init.normal_(self.embedding.weight, std=method.embedding)
        self.position = bind(method.position, config)
        self.bias = bias or bind(method.bias, config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(Layer(config, False) for _ in range(config.n_encoder))
        self.decoder = nn.ModuleList(Layer(config, True) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, len(VOCAB))
        if config.preset == "paper":
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.xavier_uniform_(weight)
            self.embedding.weight.data *= math.sqrt(C)

    def embed(self, tokens, side):
        """Tokens (B, T) of the "source" or "target" -> (B, T, C)."""
        x = self.embedding(tokens.to(self.head.weight.device))
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
            raise ValueError(f"{kind} bias of layer {layer}: {bias.shape}, not (H, {T}, {S})")
        if kind != "self":
            return bias
        mask = causal_mask(T, self.head.weight.device)
        return mask if bias is None else bias.to(mask.device) + mask

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
def generate(model, source, limit, report=None):
    """Greedy decoding: source (B, S) -> target (B, limit + 1), START first. All tokens are made at
    once from those before them, until none changes; after k passes the first k are those of
    decoding step by step. report: told every two seconds how many tokens are made; a carry that
    runs far takes a pass a digit."""
    model.eval()
    target = torch.full((len(source), limit + 1), VOCAB.index(START))
    told = time.perf_counter()
    for made in range(limit):
        tokens = model(source, target[:, :-1]).argmax(-1).cpu()
        if torch.equal(tokens, target[:, 1:]):
            break
        target[:, 1:] = tokens
        if report and time.perf_counter() - told > 2:
            told = time.perf_counter()
            report(f"{made + 1:,} tokens of {limit:,}")
    return target

# -----
# 5. Attention Bias Calibration
# A line is the elements of a matrix along (1, 1), (1, 0) or (1, -1). Of each line l the mean d_l is
# taken; mu, sigma and d_max are mean, standard deviation and maximum of these over the lines of one
# direction in one head. Lines that stand out are kept, and continued at another size.

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

# What `find_lines` takes, by name of the rules.
RULES = {"robust": dict(kappa=0.5, of_largest=True, support=0.5),
         "paper": dict(kappa=4.0),  # v1, Secs. 5 and 6
         "v2": dict(kappa=4.5, together=True),  # v2, App. D
         "code": dict(kappa=4.5, total=True, directions=(-1,))}  # the authors' code
# What differs in self-attention.
SELF_RULES = {"v2": dict(kappa=0.87), "code": dict(kappa=0.87, directions=(1,))}

def line_columns(direction, offset, rows, width):
    """Where a line crosses rows (R,) of a block -> columns (R,), inside (R,) bool.

    The offset of a diagonal (1, 1) is column - row, of a vertical (1, 0) the column, and of an
    anti-diagonal (1, -1), which starts at the right edge, (width - 1 - column) - row. Outside of
    the block the column is 0."""
    along = {1: rows + offset, 0: 0 * rows + offset, -1: width - 1 - rows - offset}
    column = along[direction]
    inside = (column >= 0) & (column < width)
    return column * inside, inside

def elements_of_lines(part, direction, support):
    """Some columns of attention, (H, m, width) -> yields (offset, elements (H, K)) of each line
    that crosses more than this share of the rows."""
    m, width = part.shape[1:]
    rows = torch.arange(m)
    for offset in range(1 - m, width):
        column, inside = line_columns(direction, offset, rows, width)
        if inside.sum() > support * m:
            yield offset, part[:, rows[inside], column[inside]]

def find_lines(attention, kappa, directions=(1, 0, -1), together=False, total=False,
               of_largest=False, support=0.0, blocks=None):
    """The lines of attention (H, m, n) that stand out -> list of Line. Source: v1, Eqs. 1 and 2:

        dropoff:  d_l - d_max  if d_l > mu + kappa * sigma,  else -inf

    Differs: the printed `d_l - d_max > threshold` holds for no positive threshold; so it is d_l, as
    in the authors' code. Variants of the sources:

    together: mu, sigma and d_max are those of all directions together, as v2 has it.
    total: d_l is the sum of a line, as in the authors' code. Theirs leaves sums of 0 out, counts
    equal ones once, and opens the end marker in row 0.

    More that differs by the robust rules:

    of_largest: kappa is a share of sqrt(L - 1), the largest z that one of L lines can have. By the
    papers' kappas of 4 and more none of 16 lines can open.
    support: share of the rows that a line must exceed; the mean of a corner is high by chance.
    blocks: widths of parts of the columns, each with lines of its own. As numbers grow the first
    operand moves away from the end of the source; within its own block its lines stay in place.
    Verticals open in the first column of a block alone: inside a number a column means nothing.
    """
    parts, found = attention.split(blocks or [attention.shape[2]], 2), []
    groups = [directions] if together else [[direction] for direction in directions]
    for group in groups:  # lines of a group are compared with one another
        places, values = [], []
        for direction in group:
            for block, part in enumerate(parts):
                for offset, line in elements_of_lines(part, direction, support):
                    places.append((direction, block, offset))
                    values.append(line.sum(1) if total else line.mean(1))
        d = torch.stack(values, 1)  # (H, L)
        mu, sigma = d.mean(1, keepdim=True), d.std(1, unbiased=False, keepdim=True)
        unit = sigma * math.sqrt(len(values) - 1) if of_largest else sigma
        threshold = mu + kappa * unit + 1e-5 * mu.abs()  # lines of equal mean differ by rounding
        bias, z = d - d.amax(1, keepdim=True), (d - mu) / sigma
        for h, l in (d > threshold).nonzero().tolist():
            direction, block, offset = places[l]
            if direction != 0 or offset == 0 or not blocks:
                found.append(Line(h, *places[l], float(bias[h, l]), float(z[h, l])))
    return found

def lay_out(lines, H, M, blocks):
    """Lines continued to M rows and blocks of these widths -> the keys of each row: columns (M, K),
    values (H, M, K), -inf where a head has no line there. Along (1, 1) this is a relative table of
    scalars, closed beyond the offsets seen. Source: v2, Eq. 1 (case distinction), App. E.1. The
    first key is column 0, for rows without any; it is closed unless a line runs there."""
    rows = torch.arange(M)
    columns, values = [0 * rows], [torch.full((H, M), -INF)]
    same_place = {}  # lines of several heads share a key
    for line in lines:
        place = line.direction, line.block, line.offset
        same_place.setdefault(place, []).append(line)
    for direction, block, offset in sorted(same_place):
        column, inside = line_columns(direction, offset, rows, blocks[block])
        value = torch.full((H, M), -INF)
        for line in same_place[direction, block, offset]:
            value[line.head, inside] = line.bias
        column = (sum(blocks[:block]) + column) * inside
        # Merge keys of one column, where lines cross: the earlier one keeps the greater value, the
        # new one is closed.
        for k in range(len(columns)):
            same = column == columns[k]
            values[k] = torch.where(same, torch.maximum(values[k], value), values[k])
            value = value.masked_fill(same, -INF)
        columns.append(column)
        values.append(value)
    return torch.stack(columns, 1), torch.stack(values, 2)

def dense_bias(columns, values, N):
    """Keys of each row, as of `lay_out` -> bias (H, M, N)."""
    H, M, K = values.shape
    closed = torch.full((H, M, N), -INF)
    return closed.scatter_reduce(2, columns.expand(H, M, K), values, "amax")

def fill_empty(bias, rules):
    """Bias (H, M, N), or values of keys, with a 0 in rows that have nothing open: by the robust
    rules at the first key alone, which is the same at every length; by the sources' at every key,
    as they have it for heads without a line."""
    empty = bias.isneginf().all(2, keepdim=True)
    if rules == "robust":
        empty = empty & (torch.arange(bias.shape[2]) == 0)
    return bias.masked_fill(empty, 0)

def abc_bias(attention, M, N, rules="robust", blocks=None, mask=0.0, **changes):
    """Attention (H, m, n) of a model that interpolates -> bias (H, M, N) that continues its lines:
    d_l - d_max along those open, -inf elsewhere. Source: v1, Sec. 5, step 2; v2, App. D, step 2.
    It must be averaged over examples, not over heads (nn.MultiheadAttention has an option).

    For other models; a run uses its two parts, `find_lines` and `lay_out`, layer by layer. rules:
    "robust", or one of the sources', see RULES; `changes` replace single ones. blocks: [(columns
    now, then)] of parts of the columns, see `find_lines`; by default there are none. mask:
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
    columns, values = lay_out(lines, H, M, then)
    bias = dense_bias(columns, values, N) + mask
    return (fill_empty(bias, rules) + mask).to(attention)

@torch.no_grad()
def collect_attention(model, source, target, batch=250):
    """Attention averaged over examples that the model answers correctly: source (B, S), target
    (B, T + 1) -> self (n_layer, H, T, T), cross (n_layer, H, T, S). Source: v1, Sec. 5; v2, App. D.
    Differs: weights are averaged, as in the authors' code, not scores. Raises: RunFailed where no
    answer is right."""
    watched, totals, correct = [], [], 0

    def watch(module, inputs, outputs):
        watched.append(outputs[1].cpu())  # weights (B, H, T, S)

    model.eval()
    with contextlib.ExitStack() as hooks:
        for module in model.decoder.modules():
            if isinstance(module, MultiHeadAttention):
                hooks.enter_context(module.register_forward_hook(watch))
        for s, t in zip(source.split(batch), target.split(batch)):
            watched.clear()
            right = (model(s, t[:, :-1]).argmax(-1).cpu() == t[:, 1:].cpu()).all(1)
            totals.append([weights[right].sum(0) for weights in watched])  # self, cross, self, ...
            correct += int(right.sum())
    if not correct:
        raise RunFailed("the model answers no example correctly; raise --steps")
    means = [sum(parts) / correct for parts in zip(*totals)]
    return torch.stack(means[0::2]), torch.stack(means[1::2])

def column_blocks(task, S):
    """Source columns as blocks -> columns of each. In `$0123|+0748|&` and `$0123|*|7|&` each number
    takes the marker on its left along, and each further column is a block."""
    kinds = TASKS[task].operands
    numbers, rest = kinds.count("number"), 1 + 2 * kinds.count("digit")
    return [(S - rest) // numbers] * numbers + [1] * rest

def calibrate(config, attention, kappa):
    """Averaged attention (self (n_layer, H, T, T), cross (n_layer, H, T, S)) -> list of Line.

    robust: each layer has lines of its own; self-attention along (1, 1), cross-attention along
    (1, 0) and (1, -1) in a block for each operand; above `kappa`.
    Others: the last layer's lines are those of all layers; no blocks. Source: v2, App. D.
    Of a fixed width only the rows that training fills count (authors' code: the first 6).
    """
    rows, layers, found = TASKS[config.task].width + 1, range(config.n_layer), []
    if config.rules != "robust":
        layers = layers[-1:]
    for layer in layers:
        for kind, maps in zip(("self", "cross"), attention):
            weights = maps[layer, :, :rows]  # (H, rows, T) or (H, rows, S)
            rule = dict(RULES[config.rules])
            if config.rules != "robust":
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

def run_keys(config, lines, layer, kind, T, S):
    """Lines -> OpenKeys of one attention of a run. By the robust rules all rows have one."""
    chosen = [line for line in lines if (line.attention, line.layer) == (kind, layer)]
    blocks = [S]
    if config.rules == "robust" and kind == "cross":
        blocks = column_blocks(config.task, S)
    columns, values = lay_out(chosen, config.n_head, T, blocks)
    if kind == "self":
        values = values.masked_fill(columns > torch.arange(T)[:, None], -INF)
    if config.rules == "robust":
        values = fill_empty(values, "robust")
    return OpenKeys(columns, values)

def calibrated_bias(config, lines):
    """Lines -> a bias function (v2, Eq. 2); by the robust rules OpenKeys beyond 100 rows."""
    @functools.lru_cache(maxsize=64)
    def bias(layer, kind, T, S):
        if kind == "encoder":
            return None
        last = config.n_layer - 1
        if config.rules != "robust" and layer < last:
            return bias(last, kind, T, S)  # the last layer's is that of all
        keys = run_keys(config, lines, layer, kind, T, S)
        if config.rules == "robust" and T > 100:
            return keys
        dense = dense_bias(keys.columns, keys.values, S)
        if config.rules != "robust":
            dense = fill_empty(dense, config.rules)
        return dense
    return bias

# -----
# 6. Proof
# A calibrated model of one decoder layer, without encoder and positions, can be proved exact at
# every length, because it can only ever see finitely many things. So can a model whose method opens
# a fixed window, if its positions repeat or are none; a token then counts with its index.
#
# Row t of the output, which writes digit t of the answer, depends on its *window* alone: the token
# before it and, for each head, the tokens at its open keys with their biases, in whatever order.
# An anti-diagonal shows row t the digit at place t + a constant, a vertical shows every row the
# same marker or single digit, and a diagonal of self-attention an earlier token of the answer. (The
# last row writes END.)
#
# Let the places that a row sees span `reach` places. What a question has below them matters by the
# rest that they get alone: that is what a task is. What it has above them matters only in that the
# last rest must be 0. From some number of places on, `below`, the rests that can come from below
# are always the same, and with more than `above` places to go, the rests that can still end in 0
# are, too. So all rows with `below` places or more under what they see and `above` and the headroom
# or more over it see the same windows, at every width. A width of
#
#     below + reach + above + headroom
#
# has such a row. A row of a larger number has fewer places under it or fewer over it, and then sees
# what a row of that width sees, which has as many on this side and enough on the other; or it has
# enough on both sides. So the widths from the narrowest up to this one show all windows. Where the
# position index repeats after p rows, p widths in a row do.
#
# At each width all windows of a row are found by following every state of the machine, from the
# last place to the first: what has been seen so far, and the rest.
#
# Induction: if the tokens before row t are right, row t sees one of these windows; if the model is
# right on each of them, so is row t. Then greedy decoding is right for every question of any
# length. The order of floating-point sums differs at other widths: logits of about 10 change by
# about 1e-5, so the right token must lead by MARGIN, and by a thousandth of the largest logit.

MARGIN = 0.5  # logits by which the right token must lead
TOO_MANY = 2 ** 20  # windows
KAPPAS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)

def keys_of_model(config, lines, kind, T, S):
    """OpenKeys of a model that has one layer: those of ABC's lines, or, where lines are None, those
    that the method's fixed window opens, alike for all heads."""
    if lines is not None:
        return run_keys(config, lines, 0, kind, T, S)
    bias = METHODS[config.method].bias(config, 0, kind, T, S)[0]  # (T, S)
    most = int((bias > -INF).sum(1).max())
    values, columns = bias.topk(most)
    return OpenKeys(columns, values[None])

def with_index(tokens, period, side):
    """Tokens (B, T) -> numbers that also tell the position index, which repeats after `period`;
    sources count from their end."""
    index = torch.arange(tokens.shape[1])
    if side == "source":
        index = index.flip(0)
    return tokens * period + index % period

def views_of_rows(config, lines, source, target, rows, rounded=False):
    """What rows [R] see of questions, source (B, S), target (B, T + 1), and in the last column what
    they must write -> (B, R, L) numbers, equal where a model with these lines sees the same.

    The token before the row, then for each head its open keys, sorted, each as 2 * token + bias.
    As a bias is a difference of attention weights, between -1 and 0, no two keys share a number.
    rounded: biases count to one decimal, as a model hardly learns from less."""
    T, S = target.shape[1] - 1, source.shape[1]
    period = max(1, METHODS[config.method].period)
    before = with_index(target[:, :-1], period, "target")
    source = with_index(source, period, "source")
    parts = [before[:, rows, None].double()]
    for kind, tokens, N in ("self", before, T), ("cross", source, S):
        columns, values = keys_of_model(config, lines, kind, T, N)
        if rounded:
            values = values.round(decimals=1)
        keys = 2.0 * tokens[:, None, columns[rows]] + values[:, rows].double()  # (B, H, R, K)
        parts.append(keys.sort(3).values.transpose(1, 2).flatten(2))
    return torch.cat([*parts, target[:, 1:][:, rows, None]], 2)

def number_rows(columns):
    """Columns of (N,) -> (N,) integers, equal where all columns are."""
    number = 0
    for column in columns:
        values, index = column.unique(return_inverse=True)
        _, number = (number * len(values) + index).unique(return_inverse=True)
    return number

def first_of_each(numbers):
    """(N,) -> ascending, the places where a number stands for the first time."""
    kinds, which = numbers.unique(return_inverse=True)
    first = torch.full((len(kinds),), len(numbers))
    first = first.scatter_reduce(0, which, torch.arange(len(numbers)), "amin")
    return first.sort().values

def question_text(config, source):
    """Tokens (S,) of a question -> as it is asked, "0123+0748"."""
    text = decode(source[1:-1])
    if config.align:
        first, second = text[1::2], text[2::2]
        if TASKS[config.task].operands[1] == "digit":
            second = second[:1]
        text = first + text[0] + second
    return text

class Windows:
    """The windows of runs with these lines, or of a method's own windows where lines are None, as
    far as questions were added.

    views: each distinct window, with the token to write in its last column. questions: a question
    that shows it for each, in the same order, in pieces of source (B, S), target (B, T + 1). clash:
    two questions that look the same to a row and differ there, if there are any; where there are
    none the lines determine the answer. why: in words, why these are not all windows."""
    def __init__(self, config, lines=None):
        self.config, self.lines = config, lines
        self.views, self.questions, self.clash, self.why = None, [], [], ""

    def add(self, source, target, rows, rounded=False):
        """Keep what rows [R] see of questions, and the first question that shows each."""
        views = views_of_rows(self.config, self.lines, source, target, rows, rounded)
        views = views.flatten(0, 1)
        known = 0
        if self.views is not None:
            known = len(self.views)
            views = torch.cat([self.views, views])
        window, token = number_rows(views[:, :-1].unbind(1)), views[:, -1].long()
        first = first_of_each(window * len(VOCAB) + token)
        self.views, window = views[first], window[first]
        new = (first[first >= known] - known) // len(rows)
        self.questions.append((source[new], target[new]))
        tokens = window.bincount()  # how many tokens a window needs
        if tokens.max() > 1 and not self.clash:
            alike = (window == tokens.argmax()).nonzero().flatten()
            self.clash = [self.question(n) for n in alike[:2].tolist()]
            named = [VOCAB[n] for n in self.views[alike[:2], -1].long()]
            texts = [question_text(self.config, source[0]) for source, _ in self.clash]
            self.why = (f"{' and '.join(texts)} look the same to a row that must write "
                        f"{' or '.join(named)}")

    def question(self, n):
        """The question of the nth window, source (1, S), target (1, T + 1)."""
        for source, target in self.questions:
            if n < len(source):
                return source[n:n + 1], target[n:n + 1]
            n -= len(source)

def places_seen(lines):
    """-> the places of digits and of tokens of the answer that a row sees or, of tokens, writes,
    both counted from the place it writes.

    The anti-diagonal with offset o shows place t + o to row t, which writes place t. The diagonal
    with offset o shows it the token that row t + o - 1 has written. Where lines are None, the
    method's windows show the digit that is written and the one before, and the last two tokens."""
    if lines is None:
        return {0, -1}, {0, -1, -2}
    digits, tokens = set(), {0, -1}
    for line in lines:
        if line.attention == "self":
            tokens.add(line.offset - 1)
        elif line.direction == -1:
            digits.add(line.offset)
    return digits, tokens

def every_choice(base, n):
    """-> (base^n, n) all choices of n digits."""
    digits = torch.arange(base ** n)[:, None] // base ** torch.arange(n)
    return digits % base

def places_to_settle(spec):
    """-> `below` and `above`, see the head of this section. Raises: RunFailed where there is no
    such number.

    With total(r, a) = (a + r) % 10 + 10 * (a if r == 0 else r - 1) they are 1 and 8."""
    columns = every_choice(spec.base, spec.operands.count("number"))
    below = above = 0

    def settle(rests, change):
        """How often the rests change until they stay the same."""
        for places in range(100):
            changed = change(rests)
            if changed == rests:
                return places
            rests = changed
        raise RunFailed("the rests that a place can get never settle")

    for single in every_choice(spec.base, spec.operands.count("digit")):
        handed_on, new = {}, {spec.first}  # rest: the rests that it can lead to, zeros first
        while new:
            for rest in new:
                rests = torch.full((len(columns),), rest)
                digits = torch.broadcast_tensors(rests, *columns.unbind(1), *single)[1:]
                handed_on[rest] = spec.step(rests, *digits)[1].tolist()
            new = {rest for rests in handed_on.values() for rest in rests} - handed_on.keys()
            if len(handed_on) > 1000:
                raise RunFailed("more than 1,000 rests can be handed on")
        below = max(below, settle({spec.first}, lambda rests: {
            after for rest in rests for after in handed_on[rest]}))
        ends = {0}  # rests from which the rest after the first place can be 0
        for _ in range(spec.headroom):
            ends = {rest for rest in handed_on if handed_on[rest][0] in ends}
        if spec.headroom:
            above = max(above, settle(ends, lambda rests: {
                rest for rest in handed_on if rests & set(handed_on[rest])}))
    return below, above

def unlike_columns(spec, columns, rest, singles, token_seen):
    """Columns of digits (C, n) that a row does not see -> one for each effect that they have on
    what follows, whatever the rest (N,) and the single digits (S, k) are."""
    rest = rest.unique()
    given = torch.cartesian_prod(rest, torch.arange(len(singles)))
    digits = [*columns.unbind(1), *singles[given[:, 1]].T[:, :, None]]
    token, after = spec.step(*torch.broadcast_tensors(given[:, :1], *digits))
    effect = [*after]
    if token_seen:
        effect += [*token]
    return columns[first_of_each(number_rows(effect))]

def questions_of_row(spec, width, digits, tokens):
    """Operands of questions of this width that bring about all that a row can see, which looks at
    the digits of some places and the tokens of others. Raises: RunFailed where they are too many.

    From place to place every state goes on by every column of digits. Of those that look the same
    so far and hand on the same rest one is kept, with its numbers."""
    n, k = spec.operands.count("number"), spec.operands.count("digit")
    singles = every_choice(spec.base, k)
    which = seen = torch.arange(len(singles))  # single digits; the number of what has been seen
    rest, numbers = torch.full_like(seen, spec.first), torch.zeros(len(seen), 0, n).long()
    for place in range(width):
        columns = every_choice(spec.base, n)
        if place >= width - spec.headroom:
            columns = columns[:1]
        if place not in digits:
            columns = unlike_columns(spec, columns, rest, singles, place in tokens)
        C, grown = len(columns), []
        for piece in torch.arange(len(rest)).split(2 ** 14):  # so that memory is enough
            digit = [*columns.unbind(1), *singles[which[piece]].T[:, :, None]]
            token, after = spec.step(*torch.broadcast_tensors(rest[piece, None], *digit))
            look = seen[piece, None] * C * spec.base
            if place in digits:
                look = look + torch.arange(C) * spec.base
            if place in tokens:
                look = look + token
            look = look.expand_as(after).flatten()
            kept = first_of_each(number_rows([look, after.flatten()]))
            grown.append(torch.stack([look[kept], after.flatten()[kept], piece[kept // C],
                                      kept % C]))
        look, after, was, column = torch.cat(grown, 1)
        kept = first_of_each(number_rows([look, after]))
        if len(kept) > TOO_MANY:
            raise RunFailed(f"a row has more than {TOO_MANY:,} windows")
        seen, rest = number_rows([look[kept]]), after[kept]
        was, column = was[kept], column[kept]
        which, numbers = which[was], torch.cat([numbers[was], columns[column, None]], 1)
    if spec.headroom:
        which, numbers = which[rest == 0], numbers[rest == 0]
    return [*numbers.unbind(2), *singles[which].T[:, :, None]]

def enumerate_windows(config, lines=None, report=silent):
    """-> Windows, all that a run with these lines, or by its method, can have; it ends early where
    two clash."""
    spec, windows, told = TASKS[config.task], Windows(config, lines), time.perf_counter()
    digits, tokens = places_seen(lines)
    reach = max(digits | tokens) - min(digits | tokens) + 1
    narrowest, period = config.widths[0], max(1, METHODS[config.method].period)
    try:
        below, above = places_to_settle(spec)
        widest = max(narrowest, below + reach + above + spec.headroom)
        for width in range(narrowest, widest + period):
            for row in range(width + 1):
                operands = questions_of_row(spec, width, {row + place for place in digits},
                                            {row + place for place in tokens})
                windows.add(*arrange(config.task, operands, config.align), [row])
                if windows.clash:
                    return windows
                if len(windows.views) > TOO_MANY:
                    raise RunFailed(f"there are more than {TOO_MANY:,} windows")
                if time.perf_counter() - told > SECONDS:
                    told = time.perf_counter()
                    report(f"{len(windows.views):,} windows at row {row} of {width} digits")
    except RunFailed as error:
        windows.why = str(error)
    return windows

@torch.no_grad()
def least_lead(model, questions):
    """Questions, pieces of source (B, S), target (B, T + 1) -> margin, source [S] that has it.

    The margin is how many logits the right token leads by over all others, at least. It ends with
    the first thousand below MARGIN, with what was found till then. The lead must also exceed 0.1%
    of the largest logit; any shortfall is subtracted from the margin, and NaN fails."""
    model.eval()
    margin, worst = INF, None
    for source, target in questions:
        for s, t in zip(source.split(1000), target.split(1000)):
            logits, want = model(s, t[:, :-1]).cpu(), t[:, 1:, None]  # (B, T, V)
            lead = logits.gather(2, want) - logits.scatter(2, want, -INF).amax(2, keepdim=True)
            needed = (logits.abs().amax(2, keepdim=True) / 1000).clamp(min=MARGIN)
            least = (lead - needed).nan_to_num(-1e9).amin((1, 2)) + MARGIN  # (B,)
            if len(s) and least.min() < margin:
                margin, worst = least.min().item(), s[least.argmin()]
            if margin < MARGIN:
                return margin, worst
    return margin, worst

def prove(model, windows):
    """Windows, a trained model -> {"proved", "why" not}, and "windows" and "margin" where all
    windows are known."""
    if windows.why:
        return dict(proved=False, why=windows.why)
    margin, worst = least_lead(model, windows.questions)
    proof = dict(proved=margin >= MARGIN, why="", windows=len(windows.views),
                 margin=round(margin, 3))
    if not proof["proved"]:
        proof["why"] = f"{question_text(model.config, worst)} is wrong or in doubt"
    return proof

NO_WINDOWS = "a proof needs one decoder layer, no encoder, no positions the robust rules, no label"

def has_windows(config):
    """Does what a row writes depend on what it sees alone?"""
    method = METHODS[config.method]
    placed = method.scores or (method.position and not method.period)
    label = TASKS[config.task].label
    one_layer = config.n_layer == 1 and not config.n_encoder
    return config.rules == "robust" and one_layer and not placed and not label

def windows_of_method(config, report=silent):
    """-> Windows of a method whose bias is fixed, and whose positions repeat or are none."""
    if has_windows(config):
        return enumerate_windows(config, None, report)
    windows = Windows(config)
    windows.why = NO_WINDOWS
    return windows

def determine(config, lines, pool):
    """Do these lines, with biases that differ clearly, determine the answers of a pool of
    questions? -> Windows of the pool, with a clash if they do not."""
    windows = Windows(config, lines)
    for source, target in pool:
        windows.add(source, target, list(range(target.shape[1] - 1)), rounded=True)
    return windows

def drop_places(config, lines, pool):
    """Lines that determine the answers of a pool -> as few of them as do. All heads' lines at one
    place are dropped together, the places with the weakest lines first."""
    strength = {}
    for line in lines:
        strength[line.place] = max(strength.get(line.place, 0), line.z)
    for place in sorted(strength, key=strength.get):
        fewer = [line for line in lines if line.place != place]
        # The token before a row is a part of its window without a line.
        if place[:2] != ("self", 1) or place[3] != 0:
            if not determine(config, fewer, pool).clash:
                lines = fewer
    return lines

def choose_lines(config, attention, report=silent):
    """Averaged attention -> kappa, lines, Windows: the fewest lines that determine the answer, such
    that two rows that look the same write the same token. Raises: RunFailed where none do.

    Kappa falls until the open lines determine the answers of a pool of questions; of these the
    fewest that do are kept. Then all windows are enumerated; two that clash join the pool."""
    if not has_windows(config):
        kappa = RULES[config.rules]["kappa"]
        windows = Windows(config, calibrate(config, attention, kappa))
        windows.why = NO_WINDOWS
        return kappa, windows.lines, windows
    seed_by_name(config.seed, "pool")
    pool = [draw_questions(config, draw, length, 300)
            for length in (6, 8) for draw in (draw_exact, draw_hard)]
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
# A run depends on its options and on nothing else. It is a row of named parts: trained weights,
# averaged attention, tests. Each is kept when done; a run that was stopped goes on with the parts
# that are not there.

class System(NamedTuple):
    """A kind of model; sections 7 to 9 each add theirs."""
    about: str
    tasks: dict
    options: type
    model: type  # made from its options
    learn: Callable  # makes the parts of a Run that are not there
    questions: Callable  # (config, length) -> sets of test questions by name

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
    preset: str = "fast"  # fast, or paper: defaults, norms and embeddings of the source
    seed: int = 0  # of every random stream
    samples: int = 1000  # questions a length

    # Not options:
    choices = dict(preset=("fast", "paper"))
    paper = {}  # what preset "paper" changes
    betas, decay = (0.9, 0.999), 0.0  # of Adam

    def __post_init__(self):
        """Real numbers are 0 to 1; whole ones from 1 on, or from 0 on where 0 is the default."""
        for field in dataclasses.fields(self):
            value, values = getattr(self, field.name), self.choices.get(field.name)
            if values and value not in values:
                raise BadInput(f"{flag(field.name)}: {value!r} is none of {', '.join(values)}")
            if field.type in (int, float, tuple):
                least, most = (0, 1) if field.type is float else (int(field.default != 0), 10 ** 9)
                for number in torch.tensor(value, dtype=torch.float64).flatten().tolist():
                    if not least <= number <= most:
                        raise BadInput(f"{flag(field.name)}: {value} is out of its limits")
        self.settle()

    def settle(self):
        """Values that follow from others, and checks of several."""

    def check_heads(self):
        """Heads, or their channel pairs, must part the width."""
        parts = self.n_head
        if METHODS[self.method].scores is rotary:
            parts = 2 * self.n_head  # each head has pairs
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
    changed = {}
    if kind is Seq2SeqOptions:
        method = METHODS.get(given.get("method", kind.method))
        if method:
            changed = dict(method.defaults)
            if len(TASKS[task].operands) == 1:
                changed |= method.unary
    if preset == "paper":
        changed = changed | kind.paper
    given = changed | given
    for name in given:
        if name not in kind.__dataclass_fields__:
            raise BadInput(f"{flag(name)}: not an option of {task}, {model}")
    return kind(task, model, preset, **given)

@dataclasses.dataclass
class Seq2SeqOptions(Options):
    """Options of encoder-decoders. The task decides rate, batch and steps that are 0 here."""
    samples: int = 1000  # questions a length; above 100 digits at most 200
    method: str = "abc"  # positions and attention, see --list
    rules: str = "robust"  # of calibration: robust, or those of a source, paper (v1), v2, code
    n_encoder: int = 0  # encoder layers
    n_layer: int = 1  # decoder layers
    n_head: int = 4  # attention heads
    d_model: int = 64  # width of the model
    dropout: float = 0.0  # probability
    optimizer: str = "muon"  # of layers, muon or adam
    lr: float = 0.0  # peak learning rate
    batch: int = 0  # examples a step
    steps: int = 0  # of the first training
    retrain_steps: int = 0  # of an attempt at retraining, at most
    width: int = 0  # digits of every number; 0: as many as are needed
    lengths: tuple = (6, 10, 20, 60)  # digits tested

    # Not options:
    clip = 16  # offsets of relative tables
    betas = (0.9, 0.98)
    choices = Options.choices | dict(method=METHODS, rules=RULES,
                                     optimizer=("muon", "adam"))
    # v2, App. B and D. Batch and steps are those of sums in the authors' code; retraining takes a
    # tenth.
    paper = dict(rules="v2", n_encoder=1, n_layer=6, n_head=8, d_model=128, dropout=0.3,
                 optimizer="adam", lr=1e-5, batch=512, steps=460_000, retrain_steps=46_000,
                 width=61, samples=10_000)

    @property
    def align(self):
        """Are operands interleaved?"""
        return METHODS[self.method].align and len(TASKS[self.task].operands) == 2

    @property
    def widths(self):
        """Widths of training numbers."""
        if self.width:
            return [self.width]
        narrowest = TASKS[self.task].width
        return range(narrowest, narrowest + METHODS[self.method].n_width)

    def settle(self):
        spec = TASKS[self.task]
        if spec.sign not in VOCAB or not {"number", "digit"} >= set(spec.operands):
            raise BadInput(f"--task: {self.task} has a sign or operand that is not known")
        for name in "lr", "batch", "retrain_steps":
            setattr(self, name, getattr(self, name) or getattr(spec, name))
        self.steps = self.steps or spec.steps * METHODS[self.method].steps
        if not spec.width <= max(self.widths) <= 2000:
            raise BadInput(f"--width: {self.width} is not {spec.width} to 2,000")
        calibrated = METHODS[self.method].calibrated
        if max(self.lengths) > 2000 and (self.rules != "robust" or not calibrated):
            raise BadInput("--lengths: above 2,000 digits only abc, robust")
        self.check_heads()

def say(text):
    """To standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr or io.StringIO(), flush=True)

@contextlib.contextmanager
def kept_right(what="what is kept of the run"):
    """Whatever goes wrong in here is wrong with a file. Raises: BadInput."""
    try:
        yield
    except Exception as error:
        why = " ".join((getattr(error, "strerror", None) or repr(error)).split())
        raise BadInput(f"{what} cannot be used: {why[:300]}") from None

class Run:
    """Options and parts by name; in checkpoint.pt if there is a folder."""
    def __init__(self, config, folder=None, parts=None, device="cpu", report=silent):
        self.config, self.folder, self.parts = config, folder, parts or {}
        self.device, self.report = torch.device(device), report

    def part(self, name, make, *given):
        """-> the part of this name, made and saved if it is not there."""
        if name not in self.parts:
            self.parts[name] = make(*given)
            self.save()
        return self.parts[name]

    def save(self):
        """All as plain values and tensors, which load without running code."""
        if not self.folder:
            return
        buffer = io.BytesIO()
        torch.save(dict(config=dataclasses.asdict(self.config), parts=self.parts), buffer)
        self.write("checkpoint.pt", buffer.getvalue())

    def write(self, name, data):
        """Beside, then moved into place: never half-written. On a full disk the run goes on."""
        if self.folder:
            path, beside = Path(self.folder, name), Path(self.folder, f"{name}.part")
            try:
                beside.write_bytes(data)
                beside.replace(path)
            except OSError as error:
                say(f"lengen: {path} cannot be written: {error.strerror}")
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

def make_optimizers(model, config):
    """Muon for matrices of layers, Adam at a quarter of its rate for all else; or Adam alone."""
    muon, rest = [], []
    for name, weight in model.named_parameters():
        # Matrices of encoder.0, decoder.0, ..., but for what makes scores.
        matrix = weight.dim() == 2 and "coder." in name and ".scores." not in name
        if matrix and config.optimizer == "muon":
            muon.append(weight)
        else:
            rest.append(weight)
    how = dict(betas=config.betas, weight_decay=config.decay, fused=True)
    if not muon:
        return [torch.optim.AdamW(rest, config.lr, **how)]
    return [torch.optim.AdamW(rest, config.lr / 4, **how), Muon(muon, config.lr)]

def take_step(model, optimizers, source, target, share=1.0):
    """One step at a share of the peak rate -> the loss, cross-entropy of target (B, T + 1), each
    token given those before it. Differs: gradients are clipped at norm 1."""
    model.train()
    logits = model(source, target[:, :-1])
    wanted = target[:, 1:].flatten().to(logits.device)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * share
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()

def train(run, model, name, steps, draw_batch, rate, check=None, done=None):
    """Train, and keep the part {"weights", "steps", "seconds", "curve"}. If that is there, it is
    loaded; one with "optimizers" is not finished and goes on.

    draw_batch(step) -> source (B, S), target (B, T + 1); rate(step) -> share of the peak rate.
    check(model) -> a list, for the curve: [step, loss, *check] every 100 steps. done(model): asked
    every 25 steps, from 50 on, whether to stop. Raises: RunFailed where the loss is not finite."""
    optimizers = make_optimizers(model, run.config)
    part = run.parts.get(name, dict(steps=0, seconds=0.0, curve=[]))
    with kept_right():
        begun, curve = part["steps"], part["curve"]
        if begun:
            model.load_state_dict(part["weights"])
            if "optimizers" not in part:
                return
            assert begun < steps, f"step {begun} of {steps}"
            for optimizer, state in zip(optimizers, part["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        told = time.perf_counter()
        start = told - part["seconds"]
    for step in range(begun + 1, steps + 1):
        seed_by_name(run.config.seed, name, step)
        loss = take_step(model, optimizers, *draw_batch(step), rate(step))
        last = step == steps
        if done and step % 25 == 0 and step >= 50:
            last = done(model) or last
        if step % 100 == 0 or last:
            curve.append([step, loss.item()])
            if check:
                curve[-1] += check(model)
        if last or time.perf_counter() - told > SECONDS:
            finite = bool(loss.isfinite())  # a GPU is waited for
            told = time.perf_counter()
            if not finite:
                raise RunFailed(f"the loss is {loss.item()} at step {step} of {name}")
            run.report(f"{name}: step {step:,} of {steps:,}, loss {loss:.4f}, {told - start:.0f} s")
            part = dict(steps=step, seconds=round(told - start, 2), curve=curve,
                        weights={key: x.clone() for key, x in model.state_dict().items()})
            if not last:
                part["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
            run.parts[name] = part
            run.save()
            told = time.perf_counter()  # saving takes time
        if last:
            return

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

def evaluate(model, config, report=silent):
    """Test at config.lengths -> {"rows", "seconds"}; "places" is the share right of each digit."""
    rows, start = [], time.perf_counter()
    for length in sorted(set(config.lengths)):
        report(f"test of {length} digits")
        seed_by_name(config.seed, "test", length)
        questions = SYSTEMS[config.model].questions(config, length)
        for name, (source, target) in questions.items():
            right, digit = right_tokens(model, source, target), target[:, 1:] < 10
            shown = digit.any(0)  # without END and padding
            places = (right & digit)[:, shown].sum(0) / digit[:, shown].sum(0)
            rows.append(dict(digits=length, set=name, correct=int(right.all(1).sum()),
                             n=len(right), places=[round(x, 4) for x in places.tolist()]))
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

def test_questions(config, length):
    """-> {"random": (source, target)}; at the longest length up to 60 also "hard" ones."""
    samples = min(config.samples, 200) if length > 100 else config.samples  # they take long
    sets = {"random": draw_questions(config, draw_exact, length, samples)}
    if length == max([n for n in config.lengths if n <= 60], default=0):
        sets["hard"] = draw_questions(config, draw_hard, length, samples)
    return sets

def ask(model, config, question, report=None):
    """A question, such as "123+748" -> the answer, "871". Raises: BadInput outside the task."""
    spec = TASKS[config.task]
    operands = question.split(spec.sign or None)
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

def training_batch(config, numbers, B, power=1.0):
    """B questions on some of these numbers, at one of the run's widths -> source, target. power:
    above 1 the first, the short ones, come more often. What is no question is drawn again, at most
    20 times."""
    spec, batches = TASKS[config.task], []
    width = config.widths[int(torch.randint(len(config.widths), (1,)))]
    for _ in range(20):
        operands = []
        for kind in spec.operands:
            if kind == "number":
                pick = (len(numbers) * torch.rand(B) ** power).long()
                operands.append(to_digits(numbers[pick], width, spec.base))
            else:
                operands.append(torch.randint(spec.base, (B, 1)))
        batches.append(arrange(config.task, operands, config.align))
        if sum(len(source) for source, _ in batches) >= B:
            break
    source, target = map(torch.cat, zip(*batches))
    return source[:B], target[:B]

def fit(run, model, name, steps, short_first=False, falling=1.0, done=None):
    """Train on the training numbers; the curve has the share of 1,000 held-out ones that are exact.
    short_first: short numbers come more often at first, half of them below 1.6% of all. falling:
    the share of the steps, the last, over which the rates fall to zero, after 30 of warm-up.
    --optimizer adam has constant rates."""
    config = model.config
    numbers, held_out = split_numbers(config.seed)

    def draw_batch(step):
        power = 6 - 5 * step / steps if short_first else 1.0
        return training_batch(config, numbers, config.batch, power)

    def rate(step):
        if config.optimizer == "adam":
            return 1.0
        return min(1.0, step / 30, (steps - step + 1) / (falling * steps))

    def check(model):
        right = right_tokens(model, *training_batch(config, held_out, 1000))
        return [float(right.all(1).float().mean())]

    train(run, model, name, steps, draw_batch, rate, check, done)

def learn(run):
    """Make the parts of a run of an encoder-decoder that are not there. Source: v1, Sec. 5; v2,
    App. D. Differs: short numbers come more often at first (not in preset "paper"); rates fall; see
    `retrain`. Raises: RunFailed."""
    # 1. A model with the method's positions learns the training numbers; for ABC a vanilla one. If
    # the method's windows can be enumerated, it ends when it is proved.
    config, calibrated = run.config, METHODS[run.config.method].calibrated
    name, first = "model", config
    if calibrated:
        # It is not tested; lengths above 2,000 are not for vanilla models.
        name, first = "teacher", dataclasses.replace(config, method="vanilla", lengths=(6,))
    windows, done = None, None
    if METHODS[config.method].period and "proof" not in run.parts:
        windows = windows_of_method(config, run.report)
        if windows.clash:
            run.report(f"no training makes it exact: {windows.why}")
        done = until_proved(windows)
    seed_by_name(config.seed, name)
    model = Transformer(first).to(run.device)
    fit(run, model, name, config.steps, config.preset == "fast", 0.4, done)
    if calibrated:
        # 2. Its attention is averaged over training numbers.
        run.part("attention", average_attention, model)
        # 3. A model without positions is trained with lines of that attention as its bias.
        run.part("proof", retrain, run, model)
        model = build(config, run.parts).to(run.device)
    elif METHODS[config.method].period:
        run.part("proof", prove, model, windows)
    run.part("tests", evaluate, model, config, run.report)

def average_attention(teacher):
    """Over 1,000 questions on training numbers, those that it answers correctly -> self (n_layer,
    H, T, T), cross (n_layer, H, T, S)."""
    config = teacher.config
    seed_by_name(config.seed, "attention")
    batch = training_batch(config, split_numbers(config.seed)[0], 1000)
    return collect_attention(teacher, *batch)

def until_proved(windows):
    """-> function (model) that ends a training when the model is proved; None if none can be."""
    if windows.why:
        return None
    return lambda model: prove(model, windows)["proved"]

def retrain(run, vanilla):
    """Train a model whose bias continues the lines of the vanilla model's attention, until it is
    proved; it is the part "model" -> the part "proof": that of `prove`, and "kappa", "attempt" and
    "lines".

    It starts with the weights of the vanilla model, but with queries and keys at zero, so that
    attention begins as its bias alone says; what they knew were positions, which are gone. If it is
    not proved, a new model with the same lines gets twice the steps. By the sources' rules, as
    there, the only one is new."""
    config = run.config
    kappa, lines, windows = choose_lines(config, run.parts["attention"], run.report)
    for attempt in 1, 2:
        name = f"attempt {attempt}"
        seed_by_name(config.seed, name)
        model = Transformer(config, calibrated_bias(config, lines)).to(run.device)
        if attempt == 1 and config.rules == "robust":
            weights = vanilla.state_dict()
            for weight in weights:
                if ".q." in weight or ".k." in weight:
                    weights[weight] = torch.zeros_like(weights[weight])
            model.load_state_dict(weights)
        fit(run, model, name, attempt * config.retrain_steps, done=until_proved(windows))
        proof = dict(kappa=kappa, attempt=attempt, lines=[line._asdict() for line in lines])
        proof |= prove(model, windows)
        if proof["proved"] or windows.why:
            break
    run.parts["model"] = run.parts.pop(name)
    return proof

def build(config, parts):
    """Parts of a run, of any system -> its trained model. Raises: BadInput."""
    with kept_right():
        model = SYSTEMS[config.model].model(config)
        if "lines" in parts.get("proof", {}):
            lines = [Line(**line) for line in parts["proof"]["lines"]]
            model.bias = calibrated_bias(config, lines)
        model.load_state_dict(parts["model"]["weights"])
        return model

SYSTEMS["seq2seq"] = System("encoder-decoder (ABC)", TASKS, Seq2SeqOptions, Transformer, learn,
                            test_questions)

# -----
# 8. Consecutive pairs: one attention head, read completely
# Source: Pairs. Tokens are integers 0 .. V - 1; a token's label is 1 where the sequence also
# holds its value - 1 or + 1. One layer and head, no feed-forward; and no positions, norm or
# residual, of which the source says nothing.

@dataclasses.dataclass
class PairsOptions(Options):
    """Options of consecutive pairs."""
    samples: int = 10_000  # sequences a test
    d_vocab: int = 16  # how many integers, 4 to 65,536
    d_model: int = 128  # width of embeddings
    d_head: int = 32  # width of queries and keys
    dummy: bool = False  # a dummy token before each sequence
    plant: float = 0.0  # share of places that are made pairs
    lr: float = 1e-3  # learning rate
    batch: int = 300  # sequences a step
    steps: int = 6000  # of training
    lengths: tuple = (5,)  # integers of a sequence, as tested

    # Not options:
    optimizer = "adam"
    paper = dict(lr=1e-4, batch=1000, steps=10_000)  # Appendix, which says nothing of steps

    def settle(self):
        if not 4 <= self.d_vocab <= 2 ** 16:
            raise BadInput(f"--d-vocab: {self.d_vocab} is not 4 to 65,536")

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
    if dummy:
        tokens = F.pad(tokens, (1, 0), value=d_vocab)
    return tokens, F.pad(near.any(2).long(), (1, 0))

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
        x = self.embedding(source.to(self.embedding.weight.device))
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

    train(run, model, "model", config.steps, draw_batch, rate=lambda step: 1.0)
    run.part("tests", evaluate, model, config, run.report)

class PairsTask(NamedTuple):
    about: str

PAIRS = {"consecutive": PairsTask("is a neighbour of this integer there?")}
SYSTEMS["head"] = System("one attention head (Pairs)", PAIRS, PairsOptions, PairsHead, learn_pairs,
                         pairs_questions)

# -----
# 9. Encoders: one pass, relative positions, priming
# Source: Jelassi. One pass over the question: answer digit t is read off at token t. Numbers
# start with their most significant digit and are padded on the right, so digits of equal weight
# are aligned only in numbers of equal length. + and * serve for the paper's four signs.

def carry(columns):
    """Column sums (B, W), least significant first -> digits (B, W)."""
    digits, rest = [], 0
    for column in columns.unbind(1):
        digits.append((column + rest) % 10)
        rest = (column + rest) // 10
    return torch.stack(digits, 1)

def product(a, b):
    """Digits a (B, W), b (B, .) -> the lowest column sums (B, W) of a * b."""
    W = a.shape[1]
    columns = torch.zeros_like(a)
    for k, digit in enumerate(b.unbind(1)):
        columns = columns + F.pad(a * digit[:, None], (k, 0))[:, :W]
    return columns

class EncoderTask(NamedTuple):
    """With --modulus the answer is the remainder, in as many digits as the largest has."""
    about: str
    columns: Callable  # operands -> column sums of the answer (B, W), which `carry` makes digits of
    sign: str
    carries: bool = True  # else an answer is as long as the longer operand
    is_product: bool = False  # an answer has up to twice the digits, else up to one more
    steps: int = 16_000  # of training

ENCODER_TASKS = {  # at width 3
    # 12@+39@ -> $51@@, modulo 100 $51
    "addition": EncoderTask("a + b", operator.add, "+"),
    # 12@*9@@ -> $108@@@, modulo 100 $08
    "multiplication": EncoderTask("a * b, b of few digits", product, "*", is_product=True,
                                  steps=10_000),
    # 15@+27@ -> $32@
    "elementwise-addition": EncoderTask("a + b, carries dropped", lambda a, b: (a + b) % 10, "+",
                                        carries=False, steps=6000),
}
SIZES = {"small": (3, 64, 4), "base": (6, 512, 8), "standard": (6, 1024, 16),
         "large": (10, 1024, 16)}  # n_encoder, d_model, n_head

@dataclasses.dataclass
class EncoderOptions(Options):
    """Options of encoders. Differs: layers learn by Muon, and training numbers have each length as
    often, so that a model of width 64 learns in minutes; the source's take 75 million examples."""
    method: str = "rpe-k"  # positions and attention, see --list
    size: str = "small"  # small, base, standard, large: n_encoder, d_model, n_head where 0
    n_encoder: int = 0  # layers, or rounds of one
    d_model: int = 0  # width of the model
    n_head: int = 0  # attention heads
    dropout: float = 0.0  # probability
    clip: int = 0  # relative offsets, -clip to clip; 0: twice the width
    optimizer: str = "muon"  # of layers, muon or adam
    lr: float = 3e-3  # peak learning rate
    batch: int = 32  # examples a step
    steps: int = 0  # of training; 0: as the task has it
    width: int = 0  # digits of every number; 0: two more than needed
    lengths: tuple = (5, 6, 10)  # numbers tested are below 10^length
    train_digits: int = 5  # digits of training numbers, at most
    second_digits: int = 0  # of the second operand, at most; 0: 1 in products, else as the first
    modulus: int = 0  # the answer is the remainder; 0: all of it
    uniform: bool = False  # train on numbers as tested, mostly long; else each length as often
    n_train: int = 5000  # first operands to train on
    prime: int = 0  # long ones among them, for priming
    prime_lengths: tuple = ()  # their digits; by default the longest tested
    finetune: int = 0  # long ones to train on afterwards
    retrain_steps: int = 1000  # of fine-tuning

    # Not options:
    n_layer, align = 0, False  # there is no decoder
    decay = 0.01
    choices = Options.choices | dict(size=SIZES, optimizer=("muon", "adam"), method=(
        "vanilla", "nope", "ape", "alibi", "rope", "rpe-k", "rpe-kq"))
    # Jelassi, Sec. 2.2: 15,000 epochs of 5,000 examples. Its products need --second-digits 3.
    paper = dict(size="standard", dropout=0.1, optimizer="adam", lr=1e-4, steps=2_343_750,
                 uniform=True, samples=10_000, lengths=(5, 6, 10, 15, 20))

    def settle(self):
        for name, value in zip(("n_encoder", "d_model", "n_head"), SIZES[self.size]):
            setattr(self, name, getattr(self, name) or value)
        spec = ENCODER_TASKS[self.task]
        self.steps = self.steps or spec.steps
        self.second_digits = self.second_digits or int(spec.is_product)
        self.prime_lengths = self.prime_lengths or (max(self.lengths),)
        needed = max(self.lengths + self.prime_lengths + (self.train_digits, self.second_digits,
                                                          len(str(self.modulus))))
        # Behind every training number there is PAD; without room the longest tested have none.
        room = 2 if self.preset == "fast" else 0
        self.width = self.width or needed + room
        self.clip = self.clip or 2 * self.width
        if not needed <= self.width <= 2000:
            raise BadInput(f"--width: {self.width} is not {needed} to 2,000")
        if self.prime > self.n_train:
            raise BadInput(f"--prime: {self.prime} of {self.n_train} examples")
        self.check_heads()

def n_digits(a):
    """Digits (B, W) -> (B,) how many they are without zeros in front; 0 has one."""
    places = torch.arange(1, a.shape[1] + 1)
    return ((a > 0) * places).amax(1).clamp(min=1)

def write_padded(a, length):
    """Digits (B, W) -> tokens (B, W): the lowest `length` (B,), highest first, then PAD."""
    place = length[:, None] - 1 - torch.arange(a.shape[1])
    return a.gather(1, place.clamp(min=0)).masked_fill(place < 0, VOCAB.index(PAD))

def remainder(a, modulus):
    """Digits (B, W) -> digits of the number modulo `modulus`, as many as modulus - 1 has."""
    rest = torch.zeros(len(a), dtype=torch.int64)
    for digit in a.flip(1).unbind(1):  # Horner: no integer grows
        rest = (10 * rest + digit) % modulus
    return to_digits(rest, len(str(modulus - 1)))

def arrange_encoder(task, a, b, modulus=0):
    """Operands a, b (B, W) -> question (B, 2W + 1), target (B, 1 + n), the answer behind a START
    that is not read. Source: Jelassi, Sec. 2.1 (printed with a pad less)."""
    spec = ENCODER_TASKS[task]
    room = a.shape[1] if spec.is_product else int(spec.carries)
    answer = carry(spec.columns(F.pad(a, (0, room)), F.pad(b, (0, room))))
    length = n_digits(answer) if spec.carries else torch.maximum(n_digits(a), n_digits(b))
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

def encoder_questions(config, length):
    """Test questions on numbers below 10^length. Source: Jelassi, Sec. 2.1."""
    a, b = draw_encoder(config, length, config.samples)
    return {"random": arrange_encoder(config.task, a, b, config.modulus)}

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
            self.norm = nn.Identity()  # the last layer ends in one
            self.dropout = nn.Sequential(nn.LayerNorm(config.d_model), self.dropout)
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02)

    def forward(self, source, target):
        return self.head(self.norm(self.read(source)[:, :target.shape[1]]))

def fit_encoder(run, model, name, n, prime, steps):
    """Train on n first operands, of which `prime` are long and keep their second one. The curve has
    the share right of each digit (Figs. 7, 10; of new questions) and, where some are long, the
    share exact of the longest (Figs. 3b, 4d)."""
    config = run.config
    even = not config.uniform
    seed_by_name(config.seed, name, "examples")
    a, b = draw_encoder(config, config.train_digits, n, even)
    for turn, length in enumerate(config.prime_lengths):
        places = torch.arange(prime)[turn::len(config.prime_lengths)]
        a[places], b[places] = draw_encoder(config, length, len(places))

    def draw_batch(step):
        pick = torch.randint(n, (config.batch,))
        _, fresh = draw_encoder(config, config.train_digits, config.batch, even)
        second = torch.where((pick < prime)[:, None], b[pick], fresh)
        return arrange_encoder(config.task, a[pick], second, config.modulus)

    def rate(step):
        return min(1.0, step / 100) * (1 + math.cos(math.pi * step / steps)) / 2

    def check(model):
        lengths = {config.train_digits}
        if prime:
            lengths.add(max(config.prime_lengths))
        few = dataclasses.replace(config, lengths=tuple(lengths), samples=200)
        rows = evaluate(model, few)["rows"]
        return rows[0]["places"] + [row["correct"] / row["n"] for row in rows[1:]]

    train(run, model, name, steps, draw_batch, rate, check)

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
        run.part("before", evaluate, model, config, run.report)
        n = config.finetune
        fit_encoder(run, model, "model", n, n, config.retrain_steps)
    run.part("tests", evaluate, model, config, run.report)

SYSTEMS["universal"] = System("encoder of one shared layer (Jelassi)", ENCODER_TASKS,
                              EncoderOptions, Encoder, learn_encoder, encoder_questions)
SYSTEMS["encoder"] = SYSTEMS["universal"]._replace(about="encoder (Jelassi)")

# -----
# 10. Command line

def read_checkpoint(folder):
    """-> config, parts. Raises: BadInput; runs no code in the file."""
    path = Path(folder, "checkpoint.pt")
    with kept_right(repr(str(folder))):
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise ValueError("it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
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
    train = {}
    for name, part in run.parts.items():
        if "weights" in part:
            train[name] = {key: part[key] for key in ("steps", "seconds", "curve")}
    proof = dict(run.parts.get("proof", {}))
    lines = proof.pop("lines", [])
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return dict(config=dataclasses.asdict(run.config), torch=torch.__version__, source=source,
                device=machine, train=train, lines=lines, proof=proof,
                before=run.parts.get("before"), tests=run.parts["tests"])

def summary(record):
    """The record as lines of text."""
    config, proof = record["config"], record["proof"]
    yield f"{config['task']}, {config.get('method', config['model'])}, seed {config['seed']}"
    for name, part in record["train"].items():
        unseen = " ".join(map(percent, part["curve"][-1][2:]))
        yield f"{name:<9} {part['steps']:,} steps, {part['seconds']:.1f} s, unseen {unseen or '-'}"
    for line in map(dict.values, record["lines"]):
        head, direction, block, offset, value, z, layer, attention = line
        name = {1: "diagonal", 0: "vertical", -1: "anti-diagonal"}[direction]
        yield (f"  layer {layer + 1} {attention:<5} head {head + 1}: {name}, block {block + 1}, "
               f"offset {offset}, bias {value:.2f}, z {z:.1f}")
    if proof:
        found = f"not proved: {proof['why']}"
        if proof["proved"]:
            found = (f"exact at every length: right on all {proof['windows']:,} windows, by "
                     f"{proof['margin']:.1f} or more")
        if "kappa" in proof:
            found += f"; kappa {proof['kappa']}"
        yield f"proof     {found}"
    for name in "before", "tests":
        tests = record[name]
        if tests:
            yield f"{name:<9} {tests['seconds']:.1f} s on {record['device']}"
            yield "digits   exact  set              n"
            for row in tests["rows"]:
                share = percent(row["correct"] / row["n"])
                yield f"{row['digits']:>6}  {share:>6}  {row['set']:<8} {row['n']:8,}"

def unlearned(record):
    """What is not learned at the length of training, below 99%, as lines of text."""
    config = record["config"]
    for name, part in record["train"].items():
        known = part["curve"][-1][2:]
        if name in ("teacher", "model") and config["model"] == "seq2seq" and known[0] < 0.99:
            yield f"the {name} has {percent(known[0])} of held-out right"
    for row in record["tests"]["rows"]:
        share = row["correct"] / row["n"]
        if row["digits"] == config.get("train_digits") and share < 0.99:
            yield f"the model has {percent(share)} of {row['digits']} digits right"

def whole_numbers(text):
    """"6,10,20" -> (6, 10, 20)"""
    return tuple(map(int, text.split(",")))

class Parser(argparse.ArgumentParser):
    """One whose errors are one line, like all bad input."""
    def error(self, message):
        raise BadInput(message.removeprefix("argument "))

def comments(options):
    """Name of each option -> its comment, in the first paragraph of its class in this file."""
    source, found = Path(__file__).read_text(encoding="utf-8"), {}
    for kind in reversed(options.__mro__[:-1]):
        fields = source.split(f"class {kind.__name__}")[1].partition("\n\n")[0]
        found |= re.findall(r"    (\w+): .*?  # (.*)", fields)
    return found

def parse(argv):
    """Arguments -> those given, as a dict. The options are those of the model of the task asked
    for; their defaults those of the method, size and preset asked for."""
    first = Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for name in "task", "model", "preset", "method", "size":
        first.add_argument(flag(name))
    config = Config(**vars(first.parse_known_args(argv)[0]))
    p = Parser(prog="lengen.py", allow_abbrev=False, argument_default=argparse.SUPPRESS,
               description="Length generalization in arithmetic transformers.")
    about = comments(type(config))
    for field in dataclasses.fields(config):
        value, how = getattr(config, field.name), dict(type=field.type)
        if field.type is bool:
            how = dict(action="store_true")
        if field.type is tuple:
            how, value = dict(type=whole_numbers), ",".join(map(str, value))
        p.add_argument(flag(field.name), **how, help=f"{about[field.name]} ({value})")
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
    """"cpu", "cuda" or None -> torch.device. Raises: BadInput."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BadInput("WORLD_SIZE: a run is one process; start it without torchrun")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device: cuda is not there")
    if config.d_model <= 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads help little
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))

def new_folder(config, options):
    """New, so that no two runs share one. Raises: BadInput."""
    method = getattr(config, "method", config.model)
    folder = Path(f"runs/{config.task}-{method}-seed{config.seed}-{time.time_ns()}")
    if "out" in options:
        folder = Path(options["out"])
        if "seeds" in options:
            folder = folder / f"seed{config.seed}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"--out: {str(folder)!r} cannot be a new folder: {error.strerror}") from None
    return folder

def execute(config, folder, parts, options):
    """Make the parts of a run that are not there; print and keep what it came to."""
    report = silent if "quiet" in options else say
    run = Run(config, folder, parts, pick_device(config, options.get("device")), report)
    report(f"{config.task}, seed {config.seed}, {run.device}, {folder or ''}")
    run.save()
    SYSTEMS[config.model].learn(run)
    record = make_record(run)
    run.write("result.json", json.dumps(record).encode())
    if "json" in options:
        print(json.dumps(record), flush=True)
    else:
        print("\n".join(summary(record)), flush=True)
    for line in unlearned(record):
        say(f"lengen: {line}; raise --steps")

def go_on(options):
    """--from: finish a run, or test a finished one, whose folder stays as it is."""
    folder = options["from"]
    config, parts = read_checkpoint(folder)
    changes = {name: options[name] for name in ("lengths", "samples") if name in options}
    if changes:
        config = dataclasses.replace(config, **changes)
        parts.pop("tests", None)
        parts.pop("before", None)
    if Path(folder, "result.json").exists():
        folder = None
    execute(config, folder, parts, options)

def ask_all(options):
    """--ask: a line for each question."""
    folder = options.get("from")
    if folder is None:
        finished = sorted(Path("runs").rglob("result.json"), key=os.path.getmtime)
        if not finished:
            raise BadInput("--ask: no finished run under runs/")
        folder = finished[-1].parent
    model, config, _ = load(folder)
    if config.model != "seq2seq":
        raise BadInput(f"--ask: {config.model} models answer nothing")
    say(f"asking {folder}: {config.task} by {config.method}, seed {config.seed}")
    for question in options["ask"]:
        print(ask(model, config, question.replace(" ", ""), say), flush=True)

def print_lists(options):
    """--list"""
    for name, system in SYSTEMS.items():
        print(f"--model {name}: {system.about}")
        for task, spec in system.tasks.items():
            print(f"  --task {task:<21} {spec.about}")
    for name, method in METHODS.items():
        print(f"--method {name:<14} {method.about}")

# Options with which a command does something else than train, and all that go with each.
MODES = {"list": (print_lists, ("list",)), "ask": (ask_all, ("ask", "from")),
         "from": (go_on, ("from", "device", "json", "quiet", "lengths", "samples"))}

def run_command(options):
    """-> exit code"""
    for mode, (act, beside) in MODES.items():
        if mode in options:
            for name in options:
                if name not in beside:
                    raise BadInput(f"{flag(name)}: not with --{mode}")
            act(options)
            return 0
    control = ("seeds", "device", "out", "json", "quiet")
    config = Config(**{name: x for name, x in options.items() if name not in control})
    pick_device(config, options.get("device"))
    seeds = range(config.seed, config.seed + options.get("seeds", 1))
    if not seeds:
        raise BadInput("--seeds: at least 1")
    code = 0
    for config in [dataclasses.replace(config, seed=seed) for seed in seeds]:  # all are checked
        try:
            execute(config, new_folder(config, options), {}, options)
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
