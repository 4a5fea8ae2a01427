# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

A transformer trained on numbers of about 6 digits answers questions of 60 digits exactly, once attention may only look
where it looked on short numbers. This file trains it, finds those places (Attention Bias Calibration, ABC) and tests
it, beside the position schemes that fail.

    python lengen.py --task successor --method abc          # half a minute on two CPU cores
    python lengen.py --task addition --method abc           # two minutes
    python lengen.py --task successor --method vanilla      # a quarter of a minute: right at 6 digits, wrong at 10
    python lengen.py --from runs/NAME --ask "123+748"       # a second

Read it from top to bottom; each section needs only those above it. Sections 1 to 5 and 8 are the method, two fifths of
the file; the others can be left out at a first reading.

    1. Tasks               digits in, tokens out
    2. Positions, biases   sinusoidal, RoPE, relative tables, ALiBi, windows
    3. Attention           the one hook:  scores = (q k^T + relative) / sqrt(D) + bias;  0 is neutral, -inf closes
    4. Transformer         methods, configuration, encoder-decoder, greedy decoding
    5. Calibration         collect attention, average along lines, drop off, continue to any size (ABC v2, Eq. 1)
    6. Sparse decoding     only the open keys are read, for very long numbers
    7. Keeping a run       checkpoints, interruption, locks
    8. Training            interpolate, calibrate, retrain (ABC v2, Eq. 2), evaluate
    9. Consecutive pairs   one attention head, read completely
   10. Encoder-only        one pass, relative positions, priming (Jelassi et al.)
   11. Report              records to Markdown tables
   12. Pictures            of a run or of records; the only part that needs matplotlib
   13. Benchmark           speed, as ratios
   14. Command line

Shapes: B batch, T queries, S keys, H heads, D head width, C = H * D model width, V vocabulary, W digits of an operand;
m x n an attention matrix at training length, M x N at another. Lengths count digits, not tokens. offset = key - query.

Left out: key-value caches for dense attention, models split over GPUs, data files. A run is minutes on a laptop, and
each would hide the few lines that matter. No run decides anything by looking at lengths beyond training.

References
    ABC v1   Duan and Shi, From Interpolation to Extrapolation: Complete Length Generalization for Arithmetic
             Transformers, 2023
    ABC v2   Duan, Shi and Xu, Attention Bias as an Inductive Bias: How to Teach Transformers Simple Arithmetic, 2024
    Jelassi  Jelassi et al., Length Generalization in Arithmetic Transformers, 2023
    Pairs    a study of consecutive pairs with one attention head; it names no author
    Vaswani et al., Attention Is All You Need, 2017
    Gehring et al., Convolutional Sequence to Sequence Learning, 2017
    Shaw et al., Self-Attention with Relative Position Representations, 2018
    Huang et al., Improve Transformer Models with Better Relative Position Embeddings, 2020
    Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021
    Press et al., Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation, 2022
    Kazemnejad et al., The Impact of Positional Encoding on Length Generalization in Transformers, 2023
"""

import argparse
import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import json
import math
import os
import re
import shlex
import signal
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

try:
    import fcntl
    import resource
except ImportError:                         # Windows: no locks, no limits
    fcntl = resource = None

INF = float("inf")


# ======================================================================================
# 1. Tasks: digits in, tokens out
# ======================================================================================
#
# A digit's token is its value. Questions are digit tensors (B, W), least significant digit
# first, so any length works; integers are drawn for training and at short lengths alone.

VOCAB = "0123456789+*$&@"
START, END = "$", "&"              # "@" pads, in section 10 alone: elsewhere a batch has one width
TOKEN = {symbol: token for token, symbol in enumerate(VOCAB)}


def encode(text):
    """String of VOCAB symbols -> (T,) int64 tokens. Raises: ValueError on any other symbol."""
    for symbol in text:
        if symbol not in TOKEN:
            raise ValueError(f"no token for {symbol!r}; the vocabulary is {VOCAB}")
    return torch.tensor([TOKEN[symbol] for symbol in text], dtype=torch.int64)


def decode(tokens):
    """(T,) tokens -> string."""
    return "".join(VOCAB[token] for token in tokens)


def carry(columns, base):
    """Column sums (B, W), least significant first -> digits (B, W) of the same number, carries out (B, W) bool.

    Raises: ValueError when the last column carries, that is, when W digits are too few.
    """
    digits, carried, rest = [], [], torch.zeros_like(columns[:, 0])
    for column in columns.unbind(1):
        total = column + rest
        digits.append(total % base)
        rest = total // base
        carried.append(rest > 0)
    if rest.any():
        raise ValueError(f"the answer does not fit the width {columns.shape[1]}")
    return torch.stack(digits, 1), torch.stack(carried, 1)


class Task(NamedTuple):
    """What a task is made of. Digits a, b are (B, W), or (B, 1) for a "digit". Training draws numbers from 0 to 2^20;
    each needs an answer, and column sums are not negative."""
    operands: tuple                 # "number": as wide as the width; "digit": always one digit
    operator: str
    headroom: int                   # digits by which the answer may outgrow the operands, but 1 at least unless, as in
                                    # parity, digits may stand where nearly every training number has a zero
    base: Optional[int]             # None: any base from 2 to 10
    about: str
    columns: Optional[Callable] = None      # operands -> column sums (B, W), from which `carry` makes the answer
    solve: Optional[Callable] = None        # operands -> answer, where nothing is carried
    length: Optional[int] = None            # digits of the answer; None: as many as the width


TASKS = {
    "successor": Task(("number",), "", 1, None, "n + 1", columns=lambda a: a + F.one_hot(torch.tensor(0), a.shape[1])),
    "addition": Task(("number", "number"), "+", 1, None, "a + b", columns=lambda a, b: a + b),
    "nx1": Task(("number", "digit"), "*", 1, None, "a * b, b a single digit", columns=lambda a, b: a * b),
    "parity": Task(("number",), "", 0, 2, "running xor of the bits, last bit first; the last token is the parity",
                   solve=lambda a: a.cumsum(1) % 2),
    "parity-label": Task(("number",), "", 0, 2, "parity in one token, without the scratchpad",
                         solve=lambda a: a.sum(1, keepdim=True) % 2, length=1),
}


def carry_chains(task, operands, base):
    """Longest run of neighbouring columns that carry, (B,); None for a task without carries."""
    if not TASKS[task].columns:
        return None
    _, carried = carry(F.pad(TASKS[task].columns(*operands), (0, 1)), base)
    run = longest = torch.zeros_like(operands[0][:, 0])
    for column in carried.unbind(1):
        run = (run + 1) * column
        longest = torch.maximum(longest, run)
    return longest


def arrange(task, operands, base=10, align=False):
    """Operand digits -> (source (B, S), target (B, T + 1)) tokens.

    Source `$0123+0748&` has the most significant digit first, target `$1780&` the least, the order in which carries
    run. align=True interleaves the operands, `$+00172438&`, and repeats nx1's digit beside each digit of the number.
    Source: ABC v2, Sec. 2 and "Input Alignment" in App. C.4.
    """
    spec = TASKS[task]
    B = len(operands[0])
    answer = carry(spec.columns(*operands), base)[0] if spec.columns else spec.solve(*operands)
    mark = lambda symbol: operands[0].new_full((B, len(symbol)), TOKEN.get(symbol, 0))
    digits = [a.flip(1) for a in operands]
    if align and len(digits) == 2:
        pairs = torch.stack(torch.broadcast_tensors(*digits), 2).flatten(1)
        body = [mark(spec.operator), pairs]
    else:
        body = digits[:1] + [part for b in digits[1:] for part in (mark(spec.operator), b)]
    source = torch.cat([mark(START), *body, mark(END)], 1)
    target = torch.cat([mark(START), answer, mark(END)], 1)
    return source, target


def pad(task, operands, width):
    """Operands with their numbers padded with zeros to `width` digits."""
    return [F.pad(a, (0, width - a.shape[1])) if kind == "number" else a
            for a, kind in zip(operands, TASKS[task].operands)]


def read_digits(text, width, base):
    """Decimal-style string -> (1, width) digits, least significant first, zero-padded."""
    if not text or any(symbol not in VOCAB[:base] for symbol in text):
        raise ValueError(f"{text!r} is not a number in base {base}")
    if len(text) > width:
        raise ValueError(f"{text!r} has {len(text)} digits, more than the width {width}")
    return encode(text.rjust(width, "0")).flip(0)[None]


def example(task, *operands, width=None, base=10, align=False):
    """One worked example as strings: example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&").

    width: digits each operand is padded to; by default just enough for every answer of these lengths.
    Raises: ValueError for an unknown task, a wrong number of operands, a bad base or digit, or a width too small.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    if not 2 <= base <= 10:
        raise ValueError(f"base {base} is not between 2 and 10")
    spec = TASKS[task]
    base = spec.base or base
    if len(operands) != len(spec.operands):
        raise ValueError(f"{task} takes {len(spec.operands)} operand(s), not {len(operands)}")
    numbers = [text for text, kind in zip(operands, spec.operands) if kind == "number"]
    width = width or max(map(len, numbers)) + spec.headroom
    digits = [read_digits(text, width if kind == "number" else 1, base) for text, kind in zip(operands, spec.operands)]
    source, target = arrange(task, digits, base, align)
    return decode(source[0]), decode(target[0])


def to_digits(numbers, width, base):
    """(B,) non-negative integers -> (B, width) digits. Raises: ValueError if one has more digits than that."""
    digits = []
    for _ in range(width):
        digits.append(numbers % base)
        numbers = numbers // base
    if numbers.any():
        raise ValueError(f"a width of {width} digits is too small for these numbers in base {base}")
    return torch.stack(digits, 1)


LIMIT = 2 ** 20      # training numbers are 0 .. LIMIT: "mainly 6-digit numbers, less than 5% 7-digit"


def split_numbers(seed):
    """-> (training, held-out) integers, a random permutation of [0, 2^20] cut 7 : 1. Source: ABC v2, App. B."""
    order = torch.randperm(LIMIT + 1, generator=torch.Generator().manual_seed(seed))
    cut = len(order) * 7 // 8
    return order[:cut], order[cut:]


def count_digits(number, base):
    """Digits of a positive integer."""
    digits = 0
    while number:
        digits, number = digits + 1, number // base
    return digits


def natural_width(task, base=10):
    """Digits that hold every training number and every answer to one.

    No wider, so that most training numbers fill it as those of a test do, up to the zero that leaves room for a carry.
    """
    base = TASKS[task].base or base
    answers = {"successor": LIMIT + 1, "addition": 2 * LIMIT, "nx1": (base - 1) * LIMIT}
    return count_digits(answers.get(task, LIMIT), base)


def width_for(task, digits, base=10):
    """Width at which a question of so many digits is put: zeros in front make room for the answer, and are no fewer
    than those of the longest training numbers, or answers would end where none did in training. One in base 10, two
    in binary sums; parity needs none."""
    headroom, zeros = TASKS[task].headroom, natural_width(task, base) - count_digits(LIMIT - 1, base)
    return digits + max(headroom, zeros) if headroom else digits


def target_length(task, width):
    """Tokens that an answer to operands of `width` digits has, END included."""
    return (TASKS[task].length or width) + 1


def draw_training(task, numbers, B, width, base, generator):
    """Operands for B training examples, each number drawn independently from `numbers`."""
    operands = []
    for kind in TASKS[task].operands:
        if kind == "number":
            pick = torch.randint(len(numbers), (B,), generator=generator)
            operands.append(to_digits(numbers[pick], width, base))
        else:
            operands.append(torch.randint(base, (B, 1), generator=generator))
    return operands


def draw_test(task, length, samples, base, generator):
    """Operands (B, length) of exactly `length` digits, B = min(b^L - b^(L-1), samples).

    Lengths that have no more numbers than that are run through completely, in random order.
    Source: ABC v2, App. B, with samples = 10000.
    """
    count = (base - 1) * base ** (length - 1)
    B = min(count, samples)
    operands = []
    for kind in TASKS[task].operands:
        if kind == "digit":
            operands.append(torch.randint(base, (B, 1), generator=generator))
        elif count <= max(samples, 10_000):
            order = torch.randperm(count, generator=generator)[:B]
            operands.append(to_digits(base ** (length - 1) + order, length, base))
        else:
            digits = torch.randint(base, (B, length), generator=generator)
            digits[:, -1] = torch.randint(1, base, (B,), generator=generator)
            operands.append(digits)
    return operands


def draw_hard(task, length, B, base, generator):
    """Questions that random numbers leave out -> {name: operands, least significant digit first}, 1 to 2B a set.

    In "carry-through" a carry runs through every column, in "all-carry" every column makes one of its own (not in nx1
    with base 2, where none does).
    """
    top, draw = base - 1, lambda: torch.randint(base, (B, length), generator=generator)
    a, zeros = draw(), torch.zeros(B, length, dtype=torch.int64)
    ones = zeros + 1                                                                   # 11...1
    one, first = F.pad(zeros[:, 1:], (1, 0), value=1), F.pad(zeros[:, 1:], (0, 1), value=1)     # 0...01 and 10...0
    if task == "successor":
        nines = torch.arange(length) < torch.randint(length + 1, (B, 1), generator=generator)
        return {"carry-through": [ones[:1] * top], "trailing-nines": [a.masked_fill(nines, top)],
                "no-carry": [a - (a == top) * one], "zeros": [torch.cat([first[:1], zeros[:1]])]}
    if task == "addition":
        a[:, 0].clamp_(min=1)
        short, positive = a * (torch.arange(length) < 3), a.clamp(min=1)
        return {"carry-through": [a, top - a + one], "99...9+1": [ones[:1] * top, one[:1]],
                "1+99...9": [one[:1], ones[:1] * top], "all-carry": [positive, top - draw() % positive],
                "no-carry": [a, draw() % (base - a)], "zeros": [torch.cat([a, zeros]), torch.cat([zeros, a])],
                "unequal": [torch.cat([a, short]), torch.cat([short.flip(0), draw()])]}
    if task == "nx1":
        b = torch.randint(base, (B, 1), generator=generator)
        return {"99...9": [ones * top, b], "all-carry": [a.clamp(min=min(2, top)), ones[:, :1] * top],
                "no-carry": [a % (top // b.clamp(min=1) + 1), b], "zeros": [torch.cat([first, zeros]), b.repeat(2, 1)],
                "digit 0": [a, b * 0], f"digit {top}": [a, b * 0 + top]}
    if not task.startswith("parity"):
        raise ValueError(f"--task: {task} has no hard sets; `draw_hard` makes them")
    place = torch.randint(length, (B,), generator=generator)
    return {"all-ones": [ones[:1]], "one-one": [F.one_hot(place, length)], "zeros": [zeros[:1]]}


# ======================================================================================
# 2. Positions and biases: one pure function each
# ======================================================================================
#
# Every bias is added to the scores: 0 is neutral, -inf closes. Rows are queries i, columns
# keys j, offset = key - query.

def sinusoidal(positions, d_model):
    """Positions (T,) -> (T, C): channel 2p is sin(t / 10000^(2p/C)), channel 2p + 1 the cosine.

    Source: Vaswani et al., Sec. 3.5. Differs: built in float64, so that long positions keep their digits.
    """
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64)
    angles = positions.cpu().double()[:, None] * 10000.0 ** (-pairs / d_model)          # (T, C / 2)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :d_model]
    return waves.to(positions.device, torch.get_default_dtype())


def cyclic(positions, period):
    """Position index i -> i mod period. Source: ABC v2, "Cyclic Position Indexing" in App. C.4."""
    return positions % period


def rope(x, positions):
    """Rotate channel pairs (2p, 2p + 1) of x (B, H, T, D) by the angles positions (T,) * 10000^(-2p/D).

    Source: Su et al., Eqs. 14 and 34 (interleaved pairs). Raises: ValueError when D is odd.
    """
    D = x.shape[-1]
    if D % 2:
        raise ValueError(f"RoPE rotates pairs of channels; the head width {D} is odd")
    pairs = torch.arange(0, D, 2, dtype=torch.float64)
    angles = positions.cpu().double()[:, None] * 10000.0 ** (-pairs / D)                # (T, D / 2)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def relative_scores(q, table, k=None, S=None):
    """q_i . a_ij, and with k also k_j . a_ij, where a_ij = table[clip(j - i, -K, K) + K]. Unscaled.

    q (B, H, T, D), table (2K + 1, D), k (B, H, S, D) -> (B, H, T, S); without k or S, S = T.
    Source: Shaw et al., Eq. 4 (keys); Huang et al. 2020, method 4 (keys and queries). Jelassi et al. cite a Huang et
    al. of 2018 for these; the layers that they name, HuggingFace's, have this form.
    """
    T, K = q.shape[2], len(table) // 2
    S = k.shape[2] if k is not None else (S or T)
    i, j = torch.arange(T, device=q.device)[:, None], torch.arange(S, device=q.device)
    index = (j - i).clamp(-K, K) + K                                                    # (T, S)
    shape = (*q.shape[:2], T, S)
    scores = (q @ table.T).gather(3, index.expand(shape))
    if k is not None:
        scores = scores + (k @ table.T).transpose(2, 3).gather(2, index.expand(shape))
    return scores


def alibi_slopes(n_head):
    """-> (H,) slopes 2^(-8h/H) for h = 1 .. H; for other head counts than powers of two, those of the next lower
    power followed by every second slope of twice that power. Source: Press et al., Sec. 3, and their code."""
    power = 2 ** int(math.log2(n_head))
    geometric = lambda n: [2.0 ** (-8 * h / n) for h in range(1, n + 1)]
    return torch.tensor(geometric(power) + geometric(2 * power)[0::2][:n_head - power])


def alibi_bias(n_head, T, S):
    """-> (H, T, S): -slope_h * |j - i|. Source: Press et al., Sec. 3.

    Differs: symmetric, since the papers' models have an encoder and cross-attention; the causal mask is separate.
    """
    distance = (torch.arange(S) - torch.arange(T)[:, None]).abs()
    return -alibi_slopes(n_head)[:, None, None] * distance


def causal_bias(T):
    """-> (1, T, T): 0 for j <= i, -inf above the diagonal."""
    return torch.full((T, T), -INF).triu(1)[None]


def window_bias(w, T, S, cross=False, step=1):
    """-> (1, T, S): 0 inside the window, -inf outside.

    Self-attention opens the diagonal and w positions below it. Cross-attention (cross=True) opens the anti-diagonal
    that leaves the top-right corner, `step` columns wide and `step` columns a row, and w positions on either side:
    step 1 for one operand, 2 for two interleaved ones. Source: ABC v2, "Windowed Attention Biasing" in App. C.4.

    Differs: the paper does not say where the anti-diagonal starts. Here row 0 starts at the end marker, so the
    window holds the digit in turn and those already used, none to come: without positions only this can be told apart.
    """
    i, j = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        right = (S - 1) - step * i                       # last column of the band in row i
        open_ = (j >= right - (step - 1) - w) & (j <= right + w)
    else:
        open_ = (j <= i) & (j >= i - w)
    return torch.zeros(T, S).masked_fill(~open_, -INF)[None]


# ======================================================================================
# 3. Attention
# ======================================================================================

class MultiHeadAttention(nn.Module):
    """scores = (q k^T + relative) / sqrt(D) + bias;  weights = softmax(scores);  output = weights v.

    relative: "" none, "k" Shaw keys, "kq" keys and queries; its table covers offsets -clip .. clip.
    d_head, d_out: head and output width where they are not d_model / n_head and d_model.
    Source: Vaswani et al., Sec. 3.2; the place of the bias: ABC v2, Eq. 2.
    """

    def __init__(self, d_model, n_head, relative="", clip=16, dropout=0.0, d_head=None, d_out=None):
        super().__init__()
        if d_model % n_head and d_head is None:
            raise ValueError(f"{n_head} heads do not divide the width {d_model}")
        self.n_head, self.d_head, self.relative = n_head, d_head or d_model // n_head, relative
        self.q = nn.Linear(d_model, n_head * self.d_head)
        self.k = nn.Linear(d_model, n_head * self.d_head)
        self.v = nn.Linear(d_model, n_head * self.d_head)
        self.out = nn.Linear(n_head * self.d_head, d_out or d_model)
        self.dropout = nn.Dropout(dropout)
        if relative:
            self.table = nn.Parameter(torch.randn(2 * clip + 1, self.d_head) / math.sqrt(self.d_head))

    def forward(self, x, memory, bias=None, positions=None, pre_softmax=False):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) -> output (B, T, C), weights (B, H, T, S).

        positions: (query positions (T,), key positions (S,)) turns on RoPE.
        pre_softmax: return the scores before bias and softmax in place of the weights.
        A row whose keys are all closed attends to nothing: weights and output contribution are 0, never NaN. A bias may
        be of another dtype; weights and output have that of the module.
        """
        heads = lambda y: y.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2)
        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))        # (B, H, T or S, D)
        if positions is not None:
            q, k = rope(q, positions[0]), rope(k, positions[1])
        if self.relative:
            relative = relative_scores(q, self.table, k if self.relative == "kq" else None, S=k.shape[2])
            scores = (q @ k.transpose(2, 3) + relative) / math.sqrt(self.d_head)
        else:
            scores = (q / math.sqrt(self.d_head)) @ k.transpose(2, 3)                   # (B, H, T, S)
        if bias is None:
            weights = scores.softmax(-1)
        else:
            closed = bias.isneginf().all(-1, keepdim=True)
            weights = (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0).to(v)
        y = self.dropout(weights) @ v                                                   # (B, H, T, D)
        return self.out(y.transpose(1, 2).flatten(2)), scores if pre_softmax else weights


# ======================================================================================
# 4. Methods, configuration, transformer
# ======================================================================================

class Method(NamedTuple):
    """Where a method enters the model."""
    position: str                   # added to the embeddings: "sinusoidal", "learned" or "none"
    where: str
    source: str
    cyclic: bool = False            # position index modulo the period
    rotary: bool = False            # RoPE in every attention
    relative: str = ""              # relative table in every attention: "k" or "kq"
    bias: str = ""                  # added to the scores: "alibi", "window" or "abc"


METHODS = {
    "vanilla": Method("sinusoidal", "embeddings", "Vaswani et al. 2017"),
    "nope": Method("none", "nowhere", "Kazemnejad et al. 2023"),
    "ape": Method("learned", "embeddings", "Gehring et al. 2017"),
    "alibi": Method("none", "bias of every attention", "Press et al. 2022", bias="alibi"),
    "rope": Method("none", "queries and keys of every attention", "Su et al. 2021", rotary=True),
    "rpe-k": Method("none", "scores of every attention", "Shaw et al. 2018", relative="k"),
    "rpe-kq": Method("none", "scores of every attention", "Huang et al. 2020", relative="kq"),
    "window": Method("sinusoidal", "bias of the decoder's attentions", "ABC v2, +w", bias="window"),
    "window-cyclic": Method("sinusoidal", "bias of the decoder's attentions, position index", "ABC v2, +T",
                            bias="window", cyclic=True),
    "window-nope": Method("none", "bias of the decoder's attentions", "ABC v2, NoPE+w", bias="window"),
    "abc": Method("none", "bias of the decoder's attentions, after calibrating on a vanilla model", "ABC v2, Sec. 4",
                  bias="abc"),
}


def option(default, help, low=None, high=None, choices=None):
    """A configuration field: the command line, its checks and its help text are made from these."""
    return dataclasses.field(default=default, metadata=dict(help=help, low=low, high=high, choices=choices))


def flag(name):
    return "--" + name.replace("_", "-")


def check_option(field, value):
    """Raises: ValueError when a configuration value is of the wrong kind or out of range."""
    meta, many, kind = field.metadata, isinstance(field.default, tuple), type(field.default)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{flag(field.name)}: {value!r} is not of type {kind.__name__}")
    if meta["choices"] and value not in meta["choices"]:
        raise ValueError(f"{flag(field.name)}: {value!r} is unknown; choose from {', '.join(meta['choices'])}")
    if many and not value:
        raise ValueError(f"{flag(field.name)}: needs at least one number")
    for number in (value if many else [value]) if meta["low"] is not None else []:
        if many and type(number) is not int or not meta["low"] <= number <= meta["high"]:   # nan fails this, too
            raise ValueError(f"{flag(field.name)}: {number} is not between {meta['low']} and {meta['high']}")


def check_options(config):
    for field in dataclasses.fields(config):
        check_option(field, getattr(config, field.name))


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run depends on. The defaults are the preset "fast". Raises: ValueError naming the option."""
    last_section = 8                        # results depend on sections 1 to this one: see `source_sha256`
    task: str = option("successor", "what to learn", choices=TASKS)
    method: str = option("abc", "how positions and attention are treated", choices=METHODS)
    preset: str = option("fast", "defaults of all other options", choices=("fast", "paper"))
    seed: int = option(0, "seed of every random stream", 0, 2 ** 32)
    base: int = option(10, "base of the numbers; parity always has 2", 2, 10)
    # model
    n_encoder: int = option(0, "encoder layers; 0 is the identity", 0, 100)
    n_layer: int = option(2, "decoder layers; encoders: 0 for those of --size", 1, 100)
    n_head: int = option(4, "attention heads; encoders: 0 as above", 1, 1024)
    d_model: int = option(128, "width of the model; encoders: 0 as above", 1, 65536)
    d_ff: int = option(512, "width of the feed-forward layers", 1, 2 ** 20)
    dropout: float = option(0.0, "dropout probability", 0, 0.99)
    norm: str = option("pre", "layer norm before or after each sublayer", choices=("pre", "post"))
    window: int = option(1, "window methods: positions open beside the line", 0, 10 ** 6)
    period: int = option(3, "window-cyclic: period of the position index", 1, 10 ** 6)
    clip: int = option(16, "rpe methods: tables cover offsets -clip to clip; encoders: 0 for all", 1, 10 ** 6)
    table: int = option(256, "ape: positions in the learned table", 1, 10 ** 7)
    # data
    width: int = option(0, "digits an operand is padded to in training; 0: those of the largest answer, encoders: of "
                        "the longest number tested", 0, 10 ** 6)
    spread: int = option(8, "methods that bias with lines see widths from width to width + spread", 0, 1000)
    # optimization
    batch: int = option(64, "examples a step", 1, 10 ** 6)
    lr: float = option(1e-3, "peak learning rate", 1e-12, 10)
    average: float = option(0.98, "decay of the moving average of the weights, which is the model kept", 0, 0.9999)
    warmup: int = option(100, "steps of linear warm-up", 1, 10 ** 9)
    steps: int = option(8000, "most steps of the first training", 1, 10 ** 9)
    retrain_steps: int = option(2000, "most steps of the retraining", 1, 10 ** 9)
    precision: str = option("float32", "of the products in training", choices=("float32", "tf32", "bf16"))
    compile: bool = option(False, "train with torch.compile")
    every: int = option(50, "steps between checks on held-out numbers, encoders: in the learning curve", 1, 10 ** 9)
    goal: float = option(0.999, "held-out accuracy at which training has done its work", 0, 1)
    cooldown: float = option(1.0, "steps of falling learning rate after that, as a share of those before", 0, 100)
    # calibration
    calibrate_on: str = option("weights", "attention after or before the softmax", choices=("weights", "scores"))
    calibration_samples: int = option(1000, "training examples decoded", 1, 10 ** 7)
    line: str = option("mean", "value of a line", choices=("mean", "sum"))
    directions_cross: tuple = option((0, -1), "diagonal 1, vertical 0, anti-diagonal -1", -1, 1)
    directions_self: tuple = option((1,), "the same for self-attention", -1, 1)
    kappa_cross: float = option(0.6, "drop-off of cross-attention lines", -1e6, 1e6)
    kappa_self: float = option(0.5, "drop-off of self-attention lines", -1e6, 1e6)
    kappa_unit: str = option("reach", "kappa in sigmas, or in shares of the z in reach", choices=("sigma", "reach"))
    support: float = option(0.5, "lines in no more than this share of the rows are ignored", 0, 1)
    tries: int = option(3, "retrainings at most, each with half the --kappa-cross, until one is exact", 1, 100)
    teachers: int = option(2, "models to calibrate on at most, should every retraining fail", 1, 100)
    floor: float = option(0.2, "attention that most elements of an open cross line exceed", 0, 1)
    layer: str = option("own", "each layer its own bias, or that of the last for all", choices=("own", "last"))
    blocks: bool = option(True, "continue lines operand by operand")
    empty: str = option("first", "what a row or head without a line sees", choices=("first", "all"))
    force: bool = option(False, "calibrate on a model that interpolates less than 99%%, too")
    penalty: float = option(0.0, "subtracted from the scores of closed entries; 0 closes them for good", 0, 1e9)
    # evaluation
    lengths: tuple = option((6, 10, 20, 60), "digits tested", 1, 10 ** 6)
    hard: tuple = option((60,), "digits of the hard test sets", 1, 10 ** 6)
    samples: int = option(1000, "examples a length, at most; a tenth of them in a hard set", 1, 10 ** 7)
    long_samples: int = option(200, "the same above 100 digits", 1, 10 ** 7)

    def __post_init__(self):
        check_options(self)
        spec, needed = TASKS[self.task], natural_width(self.task, self.base)
        object.__setattr__(self, "base", spec.base or self.base)
        if 0 < self.width < needed:
            raise ValueError(f"--width: {self.width} is too narrow; {self.task} in base {self.base} needs {needed}")
        object.__setattr__(self, "width", self.width or needed)
        if self.d_model % self.n_head:
            raise ValueError(f"--n-head: {self.n_head} heads do not divide --d-model {self.d_model}")
        if self.method == "rope" and self.d_model // self.n_head % 2:
            raise ValueError(f"--n-head: RoPE needs an even head width, not {self.d_model // self.n_head}")
        digits = max(self.lengths + self.hard)
        width = max(self.width, width_for(self.task, digits, self.base))
        longest = spec.operands.count("number") * (width + 1) + 2 * spec.operands.count("digit") + 1
        if self.method == "ape" and longest > self.table:
            raise ValueError(f"--table: {self.table} positions are fewer than the {longest} of {digits} digits")

    @property
    def align(self):
        """Do sources interleave their two operands, as windows need it?"""
        return METHODS[self.method].bias == "window" and len(TASKS[self.task].operands) == 2


PAPER = dict(n_encoder=1, n_layer=6, n_head=8, dropout=0.3, norm="post", spread=0, batch=512, lr=1e-5, warmup=1,
             average=0.0, cooldown=0.0, steps=460_000, retrain_steps=46_000, every=1000,
             directions_cross=(1, 0, -1), directions_self=(1, 0, -1), kappa_cross=4.5, kappa_self=0.87,
             kappa_unit="sigma", support=0.0, floor=0.0, tries=1, teachers=1, layer="last", blocks=False, empty="all",
             samples=10_000)


def make_config(preset="fast", **options):
    """Config of a preset, with `options` on top. "paper": ABC v2, App. B and D, at the fixed width of the authors' code
    (longest of --lengths + 1, or what training needs); batch and steps are theirs, since the paper gives none.
    Addition by RoPE has width 512 (App. C.2)."""
    if preset != "paper":
        return Config(preset=preset, **options)
    wide = {"d_model": 512} if (options.get("task"), options.get("method")) == ("addition", "rope") else {}
    config = Config(preset=preset, **(PAPER | wide | options))
    fixed = config.width if options.get("width") else max(config.width, max(config.lengths) + 1)
    return dataclasses.replace(config, width=fixed)


class Bias(NamedTuple):
    """What is added to the scores: encoder (1 or H, S, S) or None; per decoder layer a pair of
    self (1 or H, T, T), causal mask included, and cross (1 or H, T, S) or None."""
    encoder: Optional[torch.Tensor]
    decoder: list


class Layer(nn.Module):
    """Self-attention, cross-attention when there is a memory, feed-forward; norm before or after each."""

    def __init__(self, config, cross):
        super().__init__()
        C, method = config.d_model, METHODS[config.method]
        attention = lambda: MultiHeadAttention(C, config.n_head, method.relative, config.clip, config.dropout)
        self.self_attention = attention()
        self.cross_attention = attention() if cross else None
        self.feed_forward = nn.Sequential(nn.Linear(C, config.d_ff), nn.ReLU(), nn.Dropout(config.dropout),
                                          nn.Linear(config.d_ff, C))
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(3 if cross else 2))
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def forward(self, x, self_bias, memory=None, cross_bias=None, positions=(None, None), pre_softmax=False):
        """x (B, T, C) -> x (B, T, C), self weights, cross weights. positions: for self- and cross-attention each, as
        MultiHeadAttention takes them."""
        cross_weights = None
        x, self_weights = self.residual(0, x, lambda y: self.self_attention(y, y, self_bias, positions[0], pre_softmax))
        if self.cross_attention:
            x, cross_weights = self.residual(1, x, lambda y: self.cross_attention(y, memory, cross_bias, positions[1],
                                                                                 pre_softmax))
        x, _ = self.residual(-1, x, lambda y: (self.feed_forward(y), None))
        return x, self_weights, cross_weights

    def residual(self, i, x, sublayer):
        """x plus the sublayer of it, with norm i before or after; also the attention weights it returns."""
        y, weights = sublayer(self.norms[i](x) if self.pre else x)
        x = x + self.dropout(y)
        return (x if self.pre else self.norms[i](x)), weights


class Transformer(nn.Module):
    """Encoder-decoder. The method in the config decides positions and relative terms; biases come from outside.

    Source: Vaswani et al.; size and use: ABC v2, App. B. Differs: pre-norm by default; embeddings start with standard
    deviation 0.3, so that positions stand out: from 1 addition takes about twice as many steps to interpolate.
    """

    def __init__(self, config):
        super().__init__()
        self.config, self.method = config, METHODS[config.method]
        C = config.d_model
        self.embedding = nn.Embedding(len(VOCAB), C)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.waves = torch.empty(0)                     # sinusoids so far needed
        if self.method.position == "learned":
            self.tables = nn.ModuleList(nn.Embedding(config.table, C) for _ in range(2))     # source, target
        self.encoder = nn.ModuleList(Layer(config, cross=False) for _ in range(config.n_encoder))
        self.decoder = nn.ModuleList(Layer(config, cross=True) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(C) if config.norm == "pre" else nn.Identity()
        self.head = nn.Linear(C, len(VOCAB))

    def indices(self, tokens, side):
        """Position index of each token, (T,), on the CPU; side 0 source, 1 target.

        Differs: cyclic ones count the source from its end, where the windows start. At the fixed width of the authors
        that renames the phases; at widths that vary a row and its window would fall out of phase.
        """
        positions = torch.arange(tokens.shape[1])
        if not self.method.cyclic:
            return positions
        return cyclic(positions if side else positions.flip(0), self.config.period)

    def embed(self, tokens, side):
        """Tokens (B, T) -> (B, T, C). Raises: ValueError past a learned table's end."""
        x, positions = self.embedding(tokens), self.indices(tokens, side)
        if self.method.position == "sinusoidal":
            if len(self.waves) < len(positions) or self.waves.device != x.device:
                self.waves = sinusoidal(torch.arange(len(positions) + 64), self.config.d_model).to(x)
            x = x + (self.waves[positions] if self.method.cyclic else self.waves[:len(positions)])
        elif self.method.position == "learned":
            if len(positions) > self.config.table:
                raise ValueError(f"a sequence of {len(positions)} tokens does not fit the learned table of "
                                 f"{self.config.table} positions")
            x = x + self.tables[side](positions.to(x.device))
        return x

    def forward(self, source, target, bias=None, trace=None, pre_softmax=False):
        """source (B, S), target (B, T) -> logits (B, T, V).

        trace: a list that receives (self, cross) attention weights of each decoder layer, (B, H, T, T) and
        (B, H, T, S); pre_softmax puts the scores there instead.
        """
        if bias is None:
            causal = causal_bias(target.shape[1]).to(source.device)
            bias = Bias(None, [(causal, None)] * len(self.decoder))
        s, t = self.indices(source, 0), self.indices(target, 1)
        rotate = lambda q, k: (q, k) if self.method.rotary else None
        memory = self.embed(source, 0)
        for layer in self.encoder:
            memory, _, _ = layer(memory, bias.encoder, positions=(rotate(s, s), None))
        x = self.embed(target, 1)
        for layer, (self_bias, cross_bias) in zip(self.decoder, bias.decoder):
            x, *weights = layer(x, self_bias, memory, cross_bias, (rotate(t, t), rotate(t, s)), pre_softmax)
            if trace is not None:
                trace.append(weights)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model, source, limit, bias=None):
    """Greedy decoding: source (B, S) -> target (B, <= limit + 1) tokens, START first, until every row has its END.

    Every step runs the whole model again: slow, and plain enough to be the check on `evaluate`.
    Raises: ValueError when the bias has too few rows, or a position table is too short; nothing is ever cropped.
    """
    model.eval()
    rows = min([part.shape[1] for pair in bias.decoder for part in pair if part is not None] if bias else [limit])
    if rows < limit:
        raise ValueError(f"the bias has {rows} rows, {limit} tokens were asked for")
    target = torch.full((len(source), 1), TOKEN[START], device=source.device)
    for T in range(1, limit + 1):
        part = bias and Bias(bias.encoder, [(a[:, :T, :T], b if b is None else b[:, :T]) for a, b in bias.decoder])
        token = model(source, target, part)[:, -1].argmax(-1, keepdim=True)
        target = torch.cat([target, token], 1)
        if (target == TOKEN[END]).any(1).all():
            break
    return target


# ======================================================================================
# 5. Attention Bias Calibration
# ======================================================================================
#
# A line is a set of matrix elements along (1, 1), (1, 0) or (1, -1), and has one value. To
# extend a matrix is to continue its lines. The columns may be cut into blocks, one per
# operand, whose lines are continued block by block: the first operand of an addition moves
# away from the end of the source as numbers grow, its lines move along. One block over all
# columns is the paper's algorithm.

@torch.no_grad()
def collect_attention(model, source, target, bias=None, pre_softmax=False, batch=250):
    """Attention averaged over the examples that the model decodes correctly.

    source (B, S), target (B, T + 1) -> self (n_layer, H, T, T), cross (n_layer, H, T, S), number of correct examples.
    Source: ABC v2, App. D, step 1 and the average of step 2. Differs: post-softmax weights by default, as in the
    authors' code; the paper's formula is pre_softmax, up to its missing 1/sqrt(D).
    Raises: ValueError when no example is correct.
    """
    model.eval()
    totals, correct = None, 0
    for s, t in zip(source.split(batch), target.split(batch)):
        trace = []
        logits = model(s, t[:, :-1], bias, trace, pre_softmax)
        right = (logits.argmax(-1) == t[:, 1:]).all(1)
        sums = [torch.stack([pair[kind][right].sum(0) for pair in trace]) for kind in (0, 1)]
        totals = sums if totals is None else [a + b for a, b in zip(totals, sums)]
        correct += int(right.sum())
    if not correct:
        raise ValueError("the model decodes no example correctly; there is no attention to average")
    return totals[0] / correct, totals[1] / correct, correct


def line_offsets(m, n, direction):
    """(m, n) integers that are equal along each line: j - i for (1, 1), j for (1, 0), and for (1, -1) j' - i, where
    j' counts columns from the right, so that the top-right corners of two matrices align."""
    i, j = torch.arange(m)[:, None], torch.arange(n)
    if direction == -1:
        j = n - 1 - j
    return j - abs(direction) * i


def line_values(attention, direction, line="mean"):
    """Attention (H, m, n) -> value of each line (H, L), elements of each line (L,). Line l has offset l - first,
    first = m - 1 for the diagonals and 0 for the verticals. Source: ABC v2, step 2.1 (d_l)."""
    H, m, n = attention.shape
    first = (m - 1) * abs(direction)
    ids = (line_offsets(m, n, direction) + first).flatten().to(attention.device)
    size = torch.bincount(ids, minlength=n + first)
    total = attention.new_zeros(H, n + first).index_add(1, ids, attention.flatten(1))
    return (total / size if line == "mean" else total), size


def continue_lines(values, m, M, N, direction):
    """Line values (H, L) of an m-row matrix -> (H, M, N); -inf where no line of the small matrix reaches.
    Source: ABC v2, Eq. 1, the case distinction."""
    H, L = values.shape
    ids = line_offsets(M, N, direction).to(values.device) + (m - 1) * abs(direction)
    ids = ids.where((ids >= 0) & (ids < L), L).flatten()                                # L: no line, closed
    return F.pad(values, (0, 1), value=-INF).index_select(1, ids).view(H, M, N)


class Lines(NamedTuple):
    """Calibrated lines of one attention, independent of any matrix size. Per direction a list with one (H, L) tensor
    a block: values d_l - d_max (-inf when closed), mean attention d_l, and z = (d_l - mu) / sigma."""
    rows: int
    values: dict
    mean: dict
    z: dict


def find_lines(attention, directions=(1, 0, -1), kappa=4.5, line="mean", kappa_unit="sigma", support=0.0, floor=-INF,
               blocks=None, markers=None):
    """The lines of attention (H, m, n) that stand out, per head and direction.

        dropoff:  d_l - d_max  if d_l > mu + kappa * sigma,  else -inf

    mu and sigma run over all lines of a head and direction, in all blocks together. Source: ABC v2, Eq. 1.

    kappa_unit "reach" takes kappa as a share of sqrt(lines - 1), the largest z one line can have: the same rule at
    every matrix size. support: lines with no more than this share of the rows do not count at all (a mean over one
    or two elements in a corner is noise). floor: more than half of an open line's elements exceed it (where a line
    crosses a strong one, one element lifts its mean). blocks: columns of each block. markers (n,) bool: columns where a
    vertical may open (a vertical inside a number is a digit at a fixed place from the left, which means nothing at
    another length).

    Differs: the printed `d_l - d_max > threshold` never holds for a positive threshold; the code of the authors and
    this one compare d_l.
    """
    H, m, n = attention.shape
    widths, values, mean, z = blocks or [n], {}, {}, {}
    for direction in directions:
        along = lambda x, value: [torch.cat(parts, -1) for parts in zip(*(line_values(block, direction, value)
                                                                          for block in x.split(widths, 2)))]
        lengths = [width + (m - 1) * abs(direction) for width in widths]
        d, size = along(attention, line)                                                # (H, L), (L,)
        above = torch.ones_like(d)                                                      # share of a line above floor
        if floor > -INF:
            above, _ = along((attention > floor).to(d), "mean")
        counted = size > support * m                                                    # (L,)
        may_open = counted & markers.to(d.device) if direction == 0 and markers is not None else counted
        if not counted.any():                                                           # then none may open
            counted = torch.ones_like(counted)
        mu, sigma = d[:, counted].mean(1, keepdim=True), d[:, counted].std(1, unbiased=False, keepdim=True)
        flat = sigma <= 1e-5 * mu.abs()                                                 # rounding is no pattern
        score = (d - mu) / sigma.masked_fill(flat, 1)
        limit = kappa * math.sqrt(int(counted.sum()) - 1) if kappa_unit == "reach" else kappa
        is_open = (score > limit) & (above > 0.5) & may_open & ~flat
        best = d[:, counted].amax(1, keepdim=True)
        values[direction] = (d - best).masked_fill(~is_open, -INF).split(lengths, 1)
        mean[direction], z[direction] = d.split(lengths, 1), score.split(lengths, 1)
    return Lines(m, values, mean, z)


def extend_lines(lines, M, blocks, empty="all", closed=-INF, mask=None):
    """Lines -> bias (H, M, N), N = sum(blocks): the maximum over directions. Source: ABC v2, "Finalization".

    A head in which nothing opened is transparent, all 0, and a row that no line reaches is left unbiased, or softmax
    would have nothing to sum. empty="first" opens only the first column to both instead: what a head sees then does
    not change with the length of the input. closed: the value of closed entries; -1e6 in the authors' code. mask: a
    bias, such as `causal_bias`, that is added at the end; lines behind it reach nothing.
    """
    lay = lambda values, direction: torch.cat([continue_lines(value, lines.rows, M, N, direction)
                                               for value, N in zip(values, blocks)], 2)
    bias = functools.reduce(torch.maximum, [lay(values, direction) for direction, values in lines.values.items()])
    masked = bias if mask is None else bias + mask
    nothing = masked.isneginf().all(2, keepdim=True)                                    # (H, M, 1)
    where = nothing if empty == "all" else nothing & (torch.arange(bias.shape[2], device=bias.device) == 0)
    bias = bias.masked_fill(where, 0)
    bias = bias.masked_fill(bias.isneginf(), closed)
    return bias if mask is None else bias + mask


def abc_bias(attention, M, N, directions=(1, 0, -1), kappa=4.5, line="mean", kappa_unit="sigma", support=0.0,
             floor=-INF, blocks=None, markers=None, empty="all", mask=None):
    """Attention (H, m, n) of a model that interpolates -> bias (H, M, N) that continues its lines.

    Values are d_l - d_max along open lines, -inf elsewhere, 0 for a head without any. Source: ABC v2, Eq. 1 and
    Algorithm 1. blocks: list of (columns now, columns then), one (n, N) by default; mask: for causal self-attention
    `causal_bias(M)`, or lines may open entries after the query; the rest as in `find_lines` and `extend_lines`.

    Raises: ValueError on attention that is not of one layer, averaged over the batch, or is nan or inf, on an unknown
    rule or direction, or blocks that do not add up.
    """
    if attention.dim() != 3:
        raise ValueError(f"attention is (H, m, n), a layer at a time. Got {tuple(attention.shape)}.")
    n = attention.shape[2]
    if not attention.isfinite().all():
        raise ValueError("attention is nan or inf; average weights, or scores before they are masked")
    for rule, known in ((line, ("mean", "sum")), (kappa_unit, ("sigma", "reach")), (empty, ("all", "first"))):
        if rule not in known:
            raise ValueError(f"{rule!r} is unknown; choose from {', '.join(known)}")
    blocks = blocks or [(n, N)]
    if not set(directions) <= {1, 0, -1} or not directions:
        raise ValueError(f"directions are 1, 0 and -1. Got {directions}.")
    if (sum(now for now, _ in blocks), sum(then for _, then in blocks)) != (n, N):
        raise ValueError(f"blocks must add up to {n} and {N} columns. Got {blocks}.")
    lines = find_lines(attention, directions, kappa, line, kappa_unit, support, floor, [now for now, _ in blocks],
                       markers)
    return extend_lines(lines, M, [then for _, then in blocks], empty, mask=mask)


def column_blocks(task, width, cut=True):
    """Source columns as blocks -> (columns of each block, markers (S,) bool: columns that hold no long number).

    `$0123|+0748|&`: every number takes the marker on its left along, the rest keeps its width.
    """
    operands = TASKS[task].operands
    numbers = operands.count("number")
    rest = 1 + 2 * operands.count("digit")                       # `&`, or `*7&`
    markers = torch.tensor(([True] + [False] * width) * numbers + [True] * rest)
    blocks = [width + 1] * numbers + [rest]
    return (blocks, markers) if cut else ([len(markers)], torch.ones_like(markers))


def calibrate(config, self_attention, cross_attention):
    """Averaged attention (n_layer, H, T, T) and (n_layer, H, T, S) at the training width -> per layer
    (self Lines, cross Lines), with the config's rules. Source: ABC v2, App. D, step 2.

    At a fixed width only the rows are read that natural width has, since in all others training saw nothing but zeros
    (authors' code: the first 6 rows). Scores of keys after the query count as the least of their head, since nothing
    is attended to there: the weights are 0.
    """
    rows = target_length(config.task, natural_width(config.task, config.base))
    self_attention, cross_attention = self_attention[..., :rows, :rows], cross_attention[..., :rows, :]
    blocks, markers = column_blocks(config.task, config.width, config.blocks)
    common = dict(line=config.line, kappa_unit=config.kappa_unit, support=config.support)
    floor = config.floor if config.calibrate_on == "weights" else -INF                  # scores have no natural zero
    if config.calibrate_on == "scores":
        later = torch.ones_like(self_attention, dtype=torch.bool).triu(1)
        self_attention = torch.where(later, self_attention.amin((2, 3), keepdim=True), self_attention)
    return [(find_lines(a, config.directions_self, config.kappa_self, **common),
             find_lines(b, config.directions_cross, config.kappa_cross, floor=floor, blocks=blocks,
                        markers=markers, **common))
            for a, b in zip(self_attention, cross_attention)]


NAMES = {1: "diagonal", 0: "vertical", -1: "anti-diagonal"}


def line_table(calibration):
    """Calibrated lines -> list of records, one an open line or head without one; layers and heads count from 1."""
    records = []
    for layer, pair in enumerate(calibration, 1):
        for kind, lines in zip(("self", "cross"), pair):
            for head in range(len(next(iter(lines.values.values()))[0])):
                place = dict(layer=layer, attention=kind, head=head + 1)
                found = [dict(place, line=NAMES[direction], block=b + 1,
                              offset=int(l) - (lines.rows - 1) * abs(direction),
                              mean=round(float(lines.mean[direction][b][head, l]), 4),
                              z=round(float(lines.z[direction][b][head, l]), 2))
                         for direction, blocks in lines.values.items() for b, values in enumerate(blocks)
                         for l in (~values[head].isneginf()).nonzero().flatten()]
                records += found or [dict(place, line=None)]
    return records


# ======================================================================================
# 6. Line-sparse decoding: only the open keys are read
# ======================================================================================
#
# A calibrated bias opens a handful of keys a row, whatever the length of the number. The
# answers are those of the dense model above; nothing but long numbers needs this section.

class OpenKeys(NamedTuple):
    """Row i may see the keys columns[i], (M, K); values (H, M, K) are added to their scores, -inf where not even they
    are open to a head."""
    columns: torch.Tensor
    values: torch.Tensor


def open_keys(lines, M, blocks, empty="all", causal=False):
    """What `extend_lines` opens, never laid out -> OpenKeys, or None where a head or a row sees everything.

    causal: keys after the query stay closed, as in `causal_bias`.
    """
    rows, start = torch.arange(M), 0
    H = len(next(iter(lines.values.values()))[0])
    columns, values = [rows * 0], [torch.full((H, M), -INF)]                            # the key of an empty row
    for b, width in enumerate(blocks):
        for direction, parts in lines.values.items():
            for l in (~parts[b].isneginf()).any(0).nonzero().flatten().tolist():
                column = l + (rows - (lines.rows - 1)) * abs(direction)
                column = width - 1 - column if direction == -1 else column
                inside = (column >= 0) & (column < width) & ~(causal & (column > rows))
                columns.append((start + column) * inside)
                values.append(parts[b][:, l, None].masked_fill(~inside, -INF))
        start += width
    columns, values = torch.stack(columns, 1), torch.stack(values, 2)                   # (M, K), (H, M, K)
    nothing = values.isneginf().all(2)
    if empty == "all" and nothing.any():
        return None
    values[..., 0] = values[..., 0].masked_fill(nothing, 0)
    same = columns[:, :, None] == columns[:, None, :]                                   # (M, K, K), lines that cross
    values = values[:, :, None, :].masked_fill(~same, -INF).amax(3)
    closed = (same & torch.ones_like(same[0]).tril(-1)).any(2)                          # an earlier place holds the key
    return OpenKeys(columns, values.masked_fill(closed, -INF))


def make_keys(config, width, calibration):
    """Per decoder layer (self OpenKeys, cross OpenKeys) for operands of `width` digits, the open entries of
    `make_bias`; None where the method, a head or an encoder layer is not sparse."""
    if not calibration or config.penalty or config.n_encoder:
        return None
    blocks, _ = column_blocks(config.task, width, config.blocks)
    T = target_length(config.task, width)
    chosen = calibration if config.layer == "own" else calibration[-1:] * config.n_layer
    keys = [(open_keys(a, T, [T], config.empty, causal=True), open_keys(b, T, blocks, config.empty)) for a, b in chosen]
    return None if any(part is None for pair in keys for part in pair) else keys


def open_attention(attention, x, memory, keys, rows=slice(None)):
    """MultiHeadAttention of x (B, T, C), the rows named, over their open keys of memory (B, S, C) alone -> (B, T, C).

    Every query becomes a question of its own, with K keys.
    """
    columns, values = keys.columns[rows].to(x.device), keys.values[:, rows].to(x)
    near = memory[:, columns].flatten(0, 1)                                             # (B T, K, C)
    bias = values.transpose(0, 1)[:, :, None].repeat(len(x), 1, 1, 1)                   # (B T, H, 1, K)
    return attention(x.flatten(0, 1)[:, None], near, bias)[0].view_as(x)


def sparse_layer(layer, x, past, memory, keys, rows=slice(None)):
    """`Layer` of x (B, T, C), the rows named; past (B, rows, C) keeps the inputs of self-attention, and is changed."""
    def self_attention(y):
        past[:, rows] = y
        return open_attention(layer.self_attention, y, past, keys[0], rows), None

    x, _ = layer.residual(0, x, self_attention)
    x, _ = layer.residual(1, x, lambda y: (open_attention(layer.cross_attention, y, memory, keys[1], rows), None))
    return layer.residual(-1, x, lambda y: (layer.feed_forward(y), None))[0]


def sparse_logits(model, source, target, keys):
    """`Transformer.forward` over the open keys: source (B, S), target (B, T) -> logits (B, T, V)."""
    memory, x = model.embed(source, 0), model.embed(target, 1)
    for layer, pair in zip(model.decoder, keys):
        x = sparse_layer(layer, x, torch.empty_like(x), memory, pair)
    return model.head(model.norm(x))


@torch.no_grad()
def generate_sparse(model, source, limit, keys):
    """`generate` over the open keys: the time of a digit does not depend on the length of the number. What is kept a
    digit, C numbers a layer, are the inputs of self-attention, from which its few keys and values are made again.
    Raises: ValueError when the keys have fewer rows than the limit."""
    model.eval()
    rows = len(keys[0][0].columns)
    if not 0 < limit <= rows:
        raise ValueError(f"the keys have {rows} rows, {limit} tokens were asked for")
    memory = model.embed(source, 0)
    past = [memory.new_zeros(len(source), limit, memory.shape[2]) for _ in model.decoder]
    target = torch.full((len(source), limit + 1), TOKEN[START], device=source.device)
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for t in range(limit):
        x = model.embedding(target[:, t:t + 1])                                         # "abc" adds no positions
        for layer, inputs, pair in zip(model.decoder, past, keys):
            x = sparse_layer(layer, x, inputs, memory, pair, slice(t, t + 1))
        target[:, t + 1] = model.head(model.norm(x))[:, 0].argmax(-1)
        ended |= target[:, t + 1] == TOKEN[END]
        if ended.all():
            break
    return target[:, :t + 2]


# ======================================================================================
# 7. Keeping a run through interruptions
# ======================================================================================
#
# A run is repeated from its start when it is resumed: trainings that were finished give back
# their weights, the one under way goes on where it was saved, and the rest takes seconds.

FORMAT = 1                                  # of checkpoint.pt


class Interrupted(Exception):
    """A signal has stopped the run, and what it had is saved. The argument is the number of the signal."""


def write_file(path, data):
    """Write beside `path`, then move into place: a half-written file never carries the name."""
    beside = path.with_name(path.name + ".part")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_checkpoint(path, state):
    """A dict of tensors and plain values as a torch archive whose zip comment is the SHA-256 of all before it."""
    buffer = io.BytesIO()
    torch.save(dict(state, format=FORMAT), buffer)
    body = buffer.getvalue()[:-2] + (64).to_bytes(2, "little")                          # the length of the comment
    write_file(path, body + hashlib.sha256(body).hexdigest().encode())


def read_checkpoint(path):
    """-> what `write_checkpoint` wrote. Raises: ValueError, in one line, for anything else."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    if data[-64:] != hashlib.sha256(data[:-64]).hexdigest().encode():
        raise ValueError(f"{str(path)!r} is damaged, or no checkpoint of this program")
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:                                   # torch's own text advises to turn the safety off: not shown
        raise ValueError(f"{str(path)!r} is no checkpoint of this program") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} has another format than {FORMAT}, the one of this program")
    return state


class Keeper:
    """Saves the trainings of a run, finished ones and the one under way, to DIR/checkpoint.pt every `every` steps; by
    default nothing. `signal`, once set, makes the next step save, too, and raise Interrupted."""

    def __init__(self, path=None, config=None, every=0, state=None):
        self.path, self.config, self.every, self.signal = path, config, every, None
        self.finished, self.current = (state or {}).get("finished", {}), (state or {}).get("current")

    def save(self):
        write_checkpoint(self.path, dict(config=self.config, finished=self.finished, current=self.current))

    def resume(self, name, parts, generator):
        """Put parts (name -> module or optimizer) and random states back -> counters, or None for a new training."""
        if not self.current or self.current["name"] != name:
            return None
        for key, part in parts.items():
            part.load_state_dict(self.current["parts"][key])
        generator.set_state(self.current["generator"])
        torch.set_rng_state(self.current["random"])
        device = next(parts["model"].parameters()).device
        if device.type == "cuda" and self.current["cuda"] is not None:                  # None: it began on another kind
            torch.cuda.set_rng_state(self.current["cuda"], device)
        return self.current["counters"]

    def step(self, name, parts, generator, counters):
        """To be called after every step; saves when it is time. Raises: Interrupted; FloatingPointError in place of
        saving weights that are nan or inf."""
        if self.path and (self.signal or self.every and counters["step"] % self.every == 0):
            if not all(x.isfinite().all() for x in parts["model"].parameters()):
                raise FloatingPointError(f"weights are nan or inf after step {counters['step']}")
            device = next(parts["model"].parameters()).device
            cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            states = {key: part.state_dict() for key, part in parts.items()}
            self.current = dict(name=name, counters=counters, parts=states,
                                generator=generator.get_state(), random=torch.get_rng_state(), cuda=cuda)
            self.save()
        self.check()

    def check(self):
        if self.signal:
            raise Interrupted(self.signal)

    def finish(self, name, model, result):
        if self.path:
            weights = {key: x.clone() for key, x in model.state_dict().items()}         # it may be trained on
            self.finished[name], self.current = dict(model=weights, result=result), None
            self.save()

    @contextlib.contextmanager
    def signals(self):
        """Ctrl-C and SIGTERM set `signal` meanwhile; a second one stops at once."""
        def stop(number, frame):
            self.signal = number
            signal.signal(number, before[number])

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def locked(folder):
    """One run a folder: the system gives the lock of a dead process free. Raises: ValueError if another has it."""
    with open(folder / "lengen.lock", "a+", encoding="utf-8") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ValueError(f"--out: process {file.read() or '?'} is at work in {str(folder)!r}") from None
        file.truncate(0)
        print(os.getpid(), end="", file=file, flush=True)
        for name in ("checkpoint.pt.part", "result.json.part"):                         # of a process that was killed
            (folder / name).unlink(missing_ok=True)
        yield


# ======================================================================================
# 8. Train and evaluate
# ======================================================================================

def seeded(seed):
    return torch.Generator().manual_seed(seed)


def silent(**fields):
    """A report that goes nowhere."""


def make_bias(config, width, calibration=None):
    """Bias of the config's method for operands of `width` digits; calibration as `calibrate` returns it for "abc".
    Raises: ValueError when "abc" has none."""
    task, kind, H = config.task, METHODS[config.method].bias, config.n_head
    T = target_length(task, width)
    blocks, _ = column_blocks(task, width, config.blocks)
    S = 2 * width + 3 if config.align else sum(blocks)
    self_bias, cross, encoder = causal_bias(T), None, None
    if kind == "alibi":
        self_bias, cross, encoder = self_bias + alibi_bias(H, T, T), alibi_bias(H, T, S), alibi_bias(H, S, S)
    elif kind == "window":
        step = 2 if config.align else 1
        self_bias, cross = window_bias(config.window, T, T), window_bias(config.window, T, S, True, step)
    elif kind == "abc":
        if not calibration:
            raise ValueError("abc has no bias without a calibration")
        lay = functools.partial(extend_lines, M=T, empty=config.empty, closed=-config.penalty or -INF)
        decoder = [(lay(a, blocks=[T], mask=self_bias), lay(b, blocks=blocks)) for a, b in calibration]
        return Bias(None, decoder if config.layer == "own" else decoder[-1:] * config.n_layer)
    elif kind:
        raise ValueError(f"--method: nothing lays out the bias {kind!r}")
    return Bias(encoder, [(self_bias, cross)] * config.n_layer)


def to_device(bias, device):
    move = lambda x: None if x is None else x.to(device)
    return Bias(move(bias.encoder), [(move(a), move(b)) for a, b in bias.decoder])


def device_name(device):
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def source_sha256(config):
    """Of the sections of this file on which the results of a config depend: the first to config.last_section."""
    text = Path(__file__).read_text(encoding="utf-8")
    end = text.index(f"\n# {config.last_section + 1}. ")
    return hashlib.sha256(text[text.index("\n# 1. Tasks"):end].encode()).hexdigest()


def wilson(correct, n, z=1.959964):
    """Wilson 95% interval of a share -> (low, high). Source: Wilson 1927."""
    share, denominator = correct / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / denominator
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def percent(correct, n, decimals=1):
    """A share in percent, rounded down: 100 is said of nothing less."""
    return math.floor(100 * 10 ** decimals * correct / n) / 10 ** decimals


def exact_lines(accuracy):
    """{length: share} as the lines of a table."""
    return ["digits   exact     95% interval         n"] + [
        f"{length:>6}  {percent(a['correct'], a['n']):5.1f}%  {a['low']:7.2%} - {a['high']:7.2%}  {a['n']:8,}"
        for length, a in accuracy.items()]


def share(right):
    """(B,) bool -> {"correct", "n", "low", "high"}, the bounds of the Wilson 95% interval."""
    correct, n = int(right.sum()), len(right)
    low, high = wilson(correct, n)
    return {"correct": correct, "n": n, "low": low, "high": high}


@torch.no_grad()
def exact_match(model, source, target, bias=None, keys=None):
    """(B,) bool: is the greedy answer exactly the target? keys, from `make_keys`, take the place of the bias.

    One pass decides it: greedy decoding gives the target if and only if every teacher-forced argmax does, since up to
    the first mistake both see the same tokens.
    """
    model.eval()
    seen = 16 if keys else source.shape[1]                                              # keys a query
    chunk = max(1, 2 ** 22 // (model.config.n_head * target.shape[1] * seen))           # bounds the memory of a pass
    logits = lambda s, t: sparse_logits(model, s, t, keys) if keys else model(s, t, bias)
    return torch.cat([(logits(s, t[:, :-1]).argmax(-1) == t[:, 1:]).all(1)
                      for s, t in zip(source.split(chunk), target.split(chunk))])


def evaluate(model, config, calibration=None, report=silent):
    """Exact match at the config's lengths -> {"accuracy": {length: share}, "chains": {length: {longest run of carries:
    [correct, n]}}, "hard": {length: {name in `draw_hard`: share}}}; all keys are strings, shares as `share` gives."""
    device = next(model.parameters()).device
    found = {"accuracy": {}, "chains": {}, "hard": {}}
    for length in sorted({*config.lengths, *config.hard}):
        report(digits=length)
        width = max(config.width, width_for(config.task, length, config.base))
        keys = make_keys(config, width, calibration) if width > 100 else None          # dense is faster below
        bias = None if keys else to_device(make_bias(config, width, calibration), device)
        samples = config.samples if length <= 100 else config.long_samples
        generator = seeded(config.seed * 1_000_003 + length)

        def answered(operands):
            source, target = arrange(config.task, pad(config.task, operands, width), config.base, config.align)
            return exact_match(model, source.to(device), target.to(device), bias, keys).cpu()

        if length in config.lengths:
            operands = draw_test(config.task, length, samples, config.base, generator)
            right, chains = answered(operands), carry_chains(config.task, operands, config.base)
            found["accuracy"][str(length)] = share(right)
            if chains is not None:
                found["chains"][str(length)] = {str(n): [int(right[chains == n].sum()), int((chains == n).sum())]
                                                for n in chains.unique().tolist()}
        if length in config.hard:
            sets = draw_hard(config.task, length, max(1, samples // 10), config.base, generator)
            found["hard"][str(length)] = {name: share(answered(operands)) for name, operands in sets.items()}
    return found


def pose(config, question):
    """A question, such as "123+748" -> width, source and target as strings. Raises: ValueError if outside the task."""
    operands = question.split(TASKS[config.task].operator or None)
    width = max([config.width, *(width_for(config.task, len(text), config.base) for text in operands)])
    return width, *example(config.task, *operands, width=width, base=config.base, align=config.align)


def ask(model, config, calibration, question):
    """One question, such as "123+748", put to a trained model -> its answer, "871", without padding.

    Parity is answered by the last bit of the scratchpad. Raises: ValueError for a question outside the task.
    """
    width, source, target = pose(config, question)
    device = next(model.parameters()).device
    keys, source = make_keys(config, width, calibration), encode(source)[None].to(device)
    if keys:
        tokens = generate_sparse(model, source, len(target) - 1, keys)
    else:
        tokens = generate(model, source, len(target) - 1, to_device(make_bias(config, width, calibration), device))
    written = decode(tokens[0])[1:]
    digits = written.partition(END)[0]
    if END not in written or not digits or not set(digits) <= set(VOCAB[:config.base]):
        return f"no number; the model wrote {written!r}"
    return digits[-1:] if config.task.startswith("parity") else digits[::-1].lstrip("0") or "0"


def batches(config, numbers, B, widths, generator):
    """Endless training batches (width, source, target), the same for the same generator whatever the method."""
    while True:
        width = widths[int(torch.randint(len(widths), (1,), generator=generator))]
        operands = draw_training(config.task, numbers, B, width, config.base, generator)
        yield width, *arrange(config.task, operands, config.base, config.align)


def held_out_checks(config, numbers, widths, hard):
    """Batches (width, source, target) that decide when training has done its work: 768 random questions in all, and
    with `hard` one more batch, the hard sets of the longest length that training covers completely."""
    checked = sorted({widths[0], widths[len(widths) // 2], widths[-1]})
    checks = [next(batches(config, numbers, 768 // len(checked), [width], seeded(config.seed + 1)))
              for width in checked]
    if hard:
        digits = count_digits(LIMIT, config.base) - 1
        sets = draw_hard(config.task, digits, 50, config.base, seeded(config.seed + 1)).values()
        operands = pad(config.task, [torch.cat(parts) for parts in zip(*sets)], widths[0])
        checks.append((widths[0], *arrange(config.task, operands, config.base, config.align)))
    return checks


def with_lines(config):
    """Does the method bias with lines, so that only the place of a key counts and not the length of the number?"""
    return METHODS[config.method].bias in ("window", "abc")


def widths_of(config):
    """Widths to train on: several teach a model with lines that numbers go on."""
    return list(range(config.width, config.width + 1 + (config.spread if with_lines(config) else 0)))


def processes():
    """-> number of this process, number of processes that share each batch (started by torchrun)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def average_over_processes(tensors):
    """Put the mean over all processes into the tensors."""
    _, count = processes()
    if count > 1:
        flat = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(flat)
        for x, mean in zip(tensors, (flat / count).split([x.numel() for x in tensors])):
            x.copy_(mean.view_as(x))


def descend(optimizer, lr, loss):
    """One step down the gradient, which is averaged over processes and clipped at norm 1 -> the loss."""
    optimizer.zero_grad()
    loss.backward()
    weights = [x for group in optimizer.param_groups for x in group["params"]]
    loss = loss.detach()
    average_over_processes([x.grad for x in weights] + [loss])
    nn.utils.clip_grad_norm_(weights, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return loss


def train_step(model, optimizer, lr, source, target, bias, bf16=False):
    """One step on this process's part of a batch -> the loss, which a GPU may still be at work on."""
    device, (number, count) = bias.decoder[0][0].device, processes()
    source, target = (x[number::count].to(device, non_blocking=True) for x in (source, target))
    model.train()
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        logits = model(source, target[:, :-1], bias)
    return descend(optimizer, lr, F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten()))


def check_shares(model, checks, biases, hard):
    """Shares exact: "accuracy" of all random held-out questions and, with `hard`, "hard" of the last batch."""
    device = next(model.parameters()).device
    right = [exact_match(model, source.to(device), target.to(device), biases[width])
             for width, source, target in checks]
    shares = {"hard": float(right.pop().float().mean())} if hard else {}
    return shares | {"accuracy": float(torch.cat(right).float().mean())}


class Plan(NamedTuple):
    """How long to train on what."""
    steps: int                              # at most, cool-down included
    widths: list                            # digits that operands are padded to; one is drawn for each batch
    cooldown: float = 0.0                   # steps of falling learning rate, as a share of those before
    give_up: bool = False                   # stop where the cool-down would come without success


def is_over(plan, now, goal):
    """Is training at its end, or to be given up: short of the goal when the cool-down would have to begin, or after
    five checks no better than those before?"""
    succeeded = now["end"] < plan.steps                 # reaching the goal has brought the end forward
    if succeeded or not plan.give_up:
        return now["step"] >= now["end"]
    before, last = max(now["accuracies"][:-5], default=0), max(now["accuracies"][-5:], default=0)
    return now["step"] >= now["reached"] or last <= before and 0 < before < goal


def train(model, config, plan, calibration=None, report=silent, keeper=Keeper(), name="train"):
    """Train until `config.goal` of the held-out numbers are exact, then let the learning rate fall to zero ->
    {"steps", "examples", "tokens", "seconds", "exact"}. The model ends as the average of its last weights; "exact" says
    whether that one reaches the goal.

    With a cool-down, methods that bias with lines have to answer hard numbers of the training length, too; without
    these the numbers look learned too soon: an answer of 60 digits meets rare cases that 700 short ones did not show.
    Only numbers of the training range are looked at. plan.give_up also stops when five checks have brought no better.
    report(step=, of=, loss=, accuracy=, hard=) comes at every check. Differs: the papers name Adam; its betas are here
    those of Vaswani et al., and gradients are clipped at norm 1. Raises: FloatingPointError when the loss is nan or
    inf; Interrupted.
    """
    if name in keeper.finished:
        model.load_state_dict(keeper.finished[name]["model"])
        return keeper.finished[name]["result"]
    device = next(model.parameters()).device
    pool, held_out = split_numbers(config.seed)
    biases = {width: to_device(make_bias(config, width, calibration), device) for width in plan.widths}
    hard = plan.cooldown > 0 and with_lines(config)
    checks = held_out_checks(config, held_out, plan.widths, hard)
    optimizer = torch.optim.Adam(model.parameters(), config.lr, (0.9, 0.98), fused=device.type in ("cpu", "cuda"))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.average))
    parts, generator = dict(model=model, optimizer=optimizer, average=average), seeded(config.seed + 2)
    now = keeper.resume(name, parts, generator) or dict(
        step=0, reached=plan.steps / (1 + plan.cooldown), end=plan.steps,           # cool-down begins at `reached`
        tokens=0, seconds=0.0, accuracies=[])
    forward = torch.compile(model, dynamic=True) if config.compile else model
    start = time.perf_counter() - now["seconds"]
    for width, source, target in batches(config, pool, config.batch, plan.widths, generator):
        now["step"] += 1
        warm, cool = now["step"] / config.warmup, (now["end"] - now["step"] + 1) / (now["end"] - now["reached"] + 1)
        loss = train_step(forward, optimizer, config.lr * min(1, warm, cool), source, target, biases[width],
                          config.precision == "bf16")
        average.update_parameters(model)
        now["tokens"] += source.numel() + target[:, 1:].numel()
        checking = now["step"] % config.every == 0 or is_over(plan, now, config.goal)
        if (checking or device.type == "cpu") and not loss.isfinite():                  # a GPU is not waited for
            raise FloatingPointError(f"the loss is {float(loss)} at step {now['step']}")
        if checking:
            shares = check_shares(average.module, checks, biases, hard)
            report(step=now["step"], of=now["end"], loss=float(loss), **shares)
            now["accuracies"].append(shares["accuracy"])
            if min(shares.values()) >= config.goal and now["step"] < now["reached"]:
                now.update(reached=now["step"], end=min(plan.steps, round(now["step"] * (1 + plan.cooldown))))
        now["seconds"] = time.perf_counter() - start
        if checking and is_over(plan, now, config.goal):
            break
        keeper.step(name, parts, generator, now)
    model.load_state_dict(average.module.state_dict())
    result = {"steps": now["step"], "examples": now["step"] * config.batch, "tokens": now["tokens"],
              "seconds": round(now["seconds"], 2), "exact": min(shares.values()) >= config.goal}
    keeper.finish(name, model, result)
    return result


def retrain(config, device, attention, attempt=0, report=silent, keeper=Keeper()):
    """Calibrate on averaged attention (self, cross), and train a new model with the biases -> model, calibration, what
    `train` returned for each try.

    The fewest lines come first: they are the strongest bias, and only if the training numbers cannot be learned with
    them are weaker ones let in, by half the kappa; where that lets none in, there is nothing to try. Source: ABC v2,
    Eq. 2. Differs: the paper tries once.
    """
    found, results = {}, []
    for n in range(config.tries):
        calibration = calibrate(dataclasses.replace(config, kappa_cross=config.kappa_cross / 2 ** n), *attention)
        found.setdefault(str(line_table(calibration)), calibration)
    for n, calibration in enumerate(found.values()):
        report(stage=f"retrain, try {n + 1}", lines=line_table(calibration))
        torch.manual_seed(config.seed + 1)
        model = Transformer(config).to(device)
        plan = Plan(config.retrain_steps, widths_of(config), config.cooldown, n + 1 < len(found))
        results.append(train(model, config, plan, calibration, report, keeper, f"retrain {attempt}.{n}"))
        if results[-1]["exact"]:
            break
    return model, calibration, results


class Run(NamedTuple):
    record: dict
    model: Transformer
    calibration: Optional[list]             # as `calibrate` returns it
    teacher: Optional[Transformer]          # "abc": the model that interpolates


def sample(config, numbers, n, seed, device):
    """n questions at the training width -> source, target on the device."""
    _, source, target = next(batches(config, numbers, n, [config.width], seeded(seed)))
    return source.to(device), target.to(device)


def learn(config, device, report=silent, keeper=Keeper()):
    """Interpolate and, for "abc", calibrate and retrain -> model, calibration, teacher, results of `train` by stage,
    interpolation accuracy, seconds of the calibration.

    A teacher may solve the task without lines; if no retraining succeeds, another one is trained from other weights.
    """
    abc, results, seconds = config.method == "abc", {"interpolate": []}, 0.0
    first = dataclasses.replace(config, method="vanilla") if abc else config
    bias, (pool, held_out) = to_device(make_bias(first, config.width), device), split_numbers(config.seed)
    plan = Plan(config.steps, [config.width]) if abc else Plan(config.steps, widths_of(config), config.cooldown)
    for attempt in range(config.teachers):
        report(stage="interpolate")
        torch.manual_seed(config.seed + 10 ** 6 * attempt)
        learner = Transformer(first).to(device)
        results["interpolate"].append(train(learner, first, plan, None, report, keeper, f"interpolate {attempt}"))
        right = exact_match(learner, *sample(first, held_out, 2000, config.seed + 3, device), bias)
        exact = float(right.float().mean())
        report(interpolation_accuracy=exact, n=len(right))
        if not abc:
            return learner, None, None, results, exact, seconds
        if exact < 0.99 and not config.force:
            if attempt:                                 # what was retrained before is kept
                break
            raise ValueError(f"--method: abc calibrates on a model that interpolates, 99% at least; this one answers "
                             f"{percent(int(right.sum()), len(right))}% of held-out numbers (train longer, or --force)")
        start, teacher, accuracy = time.perf_counter(), learner, exact
        questions = sample(first, pool, config.calibration_samples, config.seed + 4, device)
        attention = collect_attention(teacher, *questions, bias, config.calibrate_on == "scores")[:2]
        seconds += time.perf_counter() - start
        model, calibration, tried = retrain(config, device, [a.cpu() for a in attention], attempt, report, keeper)
        results["retrain"] = results.get("retrain", []) + tried
        if tried[-1]["exact"] or not results["interpolate"][-1]["steps"]:               # no steps: given, not trained
            break
    return model, calibration, teacher, results, accuracy, seconds


def run(config, device, report=silent, keeper=Keeper()):
    """`learn`, then evaluate -> Run. report receives stage=, with lines= of a retraining, what `train` reports,
    interpolation_accuracy= with n=, and digits= of each length tested.

    Raises: ValueError when "abc" would calibrate on a model below 99% (not with config.force); Interrupted.
    """
    model, calibration, teacher, trained, accuracy, calibrating = learn(config, device, report, keeper)
    report(stage="evaluate")
    start = time.perf_counter()
    found = evaluate(model, config, calibration, report)
    sums = {key: {name: sum(r[key] for r in results) for name, results in trained.items()}
            for key in ("seconds", "examples", "tokens")}
    seconds = sums["seconds"] | ({"calibrate": calibrating} if calibration else {})
    seconds["evaluate"] = time.perf_counter() - start
    seconds["total"] = sum(seconds.values())
    record = dict(task=config.task, method=config.method, preset=config.preset, seed=config.seed,
                  config=dataclasses.asdict(config), device=device_name(device), torch=torch.__version__,
                  source_sha256=source_sha256(config), seconds={name: round(x, 2) for name, x in seconds.items()},
                  examples=sums["examples"], tokens=sums["tokens"],
                  teachers=sum(r["steps"] > 0 for r in trained["interpolate"]), tries=len(trained.get("retrain", [])),
                  interpolation_accuracy=accuracy, lines=line_table(calibration or []), **found)
    return Run(record, model, calibration, teacher)


# ======================================================================================
# 9. Consecutive pairs: one attention head, read completely
# ======================================================================================
#
# Source: Pairs. Tokens are integers 0 .. V - 1; a token's label is 1 where the sequence also
# holds its value - 1 or + 1. One layer, one head, no feed-forward; no positions and no residual
# either, of which the source says nothing. Which token attends to which is in one score matrix.

def kept_steps(keeper, name, parts, generator, steps, now):
    """Yield the number of each step that a training has left. The counters `now`, among them "step" and "seconds", are
    kept with the parts; a finished training has no steps left and gets its weights and counters back."""
    if name in keeper.finished:
        parts["model"].load_state_dict(keeper.finished[name]["model"])
        now.update(keeper.finished[name]["result"])
        return
    now.update(keeper.resume(name, parts, generator) or {})
    start = time.perf_counter() - now["seconds"]
    for step in range(now["step"] + 1, steps + 1):
        yield step
        now.update(step=step, seconds=time.perf_counter() - start)
        keeper.step(name, parts, generator, now)
    keeper.finish(name, parts["model"], now)


@dataclasses.dataclass(frozen=True)
class PairsConfig:
    """What a run of the task "consecutive" depends on. Raises: ValueError naming the option."""
    last_section = 9
    task: str = option("consecutive", "what to learn", choices=("consecutive",))
    seed: int = option(0, "first seed", 0, 10 ** 5)            # below 10 ** 6, that of the test
    seeds: int = option(1, "consecutive: models trained, from --seed on", 1, 1000)
    d_vocab: int = option(16, "consecutive: tokens", 4, 2 ** 16)
    d_head: int = option(32, "consecutive: width of queries and keys", 1, 65536)
    d_model: int = option(128, "width of the embedding", 1, 65536)
    dummy: bool = option(False, "consecutive: a dummy token before each sequence")
    length: int = option(5, "consecutive: integers in a sequence", 2, 1000)
    batch: int = option(1000, "sequences a step", 1, 10 ** 6)
    lr: float = option(1e-4, "learning rate at the start", 1e-12, 10)
    steps: int = option(10_000, "steps", 1, 10 ** 9)
    plant: float = option(0.0, "consecutive: probability that a pair of places is made consecutive", 0, 1)

    def __post_init__(self):
        check_options(self)


class PairsModel(nn.Module):
    """Tokens (B, T) -> logits (B, T): embedding and one attention of output width 1.

    Differs: the source does not say how its models start. Here every integer starts by voting yes, and the dummy, whose
    embedding alone is long (standard deviation 1, not 0.1), soon votes no. With votes of either sign at the start some
    integers keep voting no: in a small vocabulary, where the others nearly always have a neighbour, that costs little.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.d_vocab + config.dummy, config.d_model)
        nn.init.normal_(self.embedding.weight[:config.d_vocab], std=0.1)
        self.attention = MultiHeadAttention(config.d_model, 1, d_head=config.d_head, d_out=1)
        nn.init.constant_(self.attention.out.bias, 5.0)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.attention(x, x)[0].squeeze(2)


def draw_pairs(B, length, d_vocab, generator, plant=0.0, dummy=False):
    """-> tokens (B, length), labels (B, length); with dummy, token V and label 0 stand before them.

    Uniform integers; then each of the pairs of places (0, 1), (2, 3), ... becomes a consecutive pair with probability
    `plant`, by moving its second integer next to its first. Differs: the source does not say how it draws. Uniform
    sequences of 5 have 39% positive labels at V = 16, but 3% at V = 256, where plant=0.5 makes it 42%.
    """
    tokens = torch.randint(d_vocab, (B, length), generator=generator)
    first, n = tokens[:, 0:length - 1:2], length // 2
    side = 1 - 2 * torch.randint(2, (B, n), generator=generator)
    side = torch.where((first + side < 0) | (first + side >= d_vocab), -side, side)
    planted = torch.rand(B, n, generator=generator) < plant
    tokens[:, 1::2] = torch.where(planted, first + side, tokens[:, 1::2])
    ranked = tokens.sort(1).values
    holds = lambda x: ranked.gather(1, torch.searchsorted(ranked, x).clamp(max=length - 1)) == x
    labels = holds(tokens - 1) | holds(tokens + 1)
    if not dummy:
        return tokens, labels
    return F.pad(tokens, (1, 0), value=d_vocab), F.pad(labels, (1, 0))


def train_pairs(config, seed, device, report=silent, keeper=Keeper()):
    """One model by the source's appendix: Adam, learning rate cut tenfold after 100 reports without a better loss ->
    model, seconds. Differs: a report is the mean loss of 100 fresh batches, since nothing says how long the source's
    epochs are; so no rate is cut before step 10,200. Raises: FloatingPointError when the loss is nan or inf;
    Interrupted."""
    torch.manual_seed(seed)
    model, generator = PairsModel(config).to(device), seeded(seed)
    optimizer = torch.optim.Adam(model.parameters(), config.lr)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
    parts = dict(model=model, optimizer=optimizer, schedule=schedule)
    now = dict(step=0, seconds=0.0, total=0.0)
    for step in kept_steps(keeper, f"seed {seed}", parts, generator, config.steps, now):
        tokens, labels = draw_pairs(config.batch, config.length, config.d_vocab, generator, config.plant, config.dummy)
        loss = F.binary_cross_entropy_with_logits(model(tokens.to(device)), labels.to(device).float())
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now["total"] += loss.item()
        if step % 100 == 0:
            schedule.step(now["total"] / 100)
            report(step=step, of=config.steps, loss=now["total"] / 100)
            now["total"] = 0.0
    return model, now["seconds"]


@torch.no_grad()
def pairs_accuracy(model, plant, n=10_000):
    """-> {"soft": share of labels right, "hard": share of whole sequences right} on n fresh sequences."""
    c = model.config
    tokens, labels = draw_pairs(n, c.length, c.d_vocab, seeded(10 ** 6), plant, c.dummy)
    device, chunk = model.embedding.weight.device, max(1, 2 ** 24 // c.length ** 2)
    logits = torch.cat([model(part.to(device)).cpu() for part in tokens.split(chunk)])
    right = ((logits > 0) == labels)[:, int(c.dummy):]
    hard = int(right.all(1).sum())
    return {"soft": float(right.float().mean()), "hard": hard / n, "n": n, "hard_interval": wilson(hard, n)}


@torch.no_grad()
def query_key(model):
    """Query and key vector of every token, each (V, D), keys divided by sqrt(D): scores = queries @ keys.T."""
    a, x = model.attention, model.embedding.weight[:model.config.d_vocab]
    return a.q(x).cpu(), a.k(x).cpu() / math.sqrt(a.d_head)


def score_patterns(scores):
    """Scores (V, V) -> differences of mean scores by the distance of the two tokens: "neighbour_gap" between distance
    1, two stripes of the heat map, and all others; "checkerboard" between odd distances from 3 on and even ones, that
    is, what is left of Observation 5's pattern without the stripes. V is at least 4."""
    index = torch.arange(len(scores))
    distance = (index[:, None] - index).abs()
    near, odd = distance == 1, distance % 2 == 1
    contrast = lambda high, low: float(scores[high].mean() - scores[low].mean())
    return {"neighbour_gap": contrast(near, ~near), "checkerboard": contrast(odd & ~near, ~odd)}


def circle_order(vectors):
    """Vectors (V, 2) -> per parity class the rank correlation of angle with value, without its sign; the circle is cut
    at the widest gap. 1: in order along an arc (Hypothesis 2); an order that goes all around may be cut elsewhere and
    have less, 0.2 of four vectors. Short vectors count like long ones. None: fewer than three, always in order."""
    def order(points):
        angle, value = torch.atan2(points[:, 1], points[:, 0]).sort()
        gap = (angle.roll(-1) - angle) % (2 * math.pi)
        value = value.roll(-1 - int(gap.argmax())).double()                             # as met around the circle
        return abs(float(torch.corrcoef(torch.stack([value, torch.arange(len(value)).double()]))[0, 1]))

    return [order(points) if len(points) > 2 else None for points in (vectors[0::2], vectors[1::2])]


def run_pairs(config, device, report=silent, keeper=Keeper()):
    """Train config.seeds models, measure each -> (record with the best one's figures and all seeds' under "runs", the
    best model). Best: most whole sequences right; the source takes its best run and does not say by what."""
    runs, models, seconds = [], [], 0.0
    for seed in range(config.seed, config.seed + config.seeds):
        report(stage=f"seed {seed}")
        model, taken = train_pairs(config, seed, device, report, keeper)
        queries, keys = query_key(model)
        order = dict(queries=circle_order(queries), keys=circle_order(keys)) if config.d_head == 2 else None
        runs.append(dict(seed=seed, accuracy=pairs_accuracy(model, config.plant),
                         accuracy_uniform=pairs_accuracy(model, 0.0), **score_patterns(queries @ keys.T),
                         circle_order=order))
        models.append(model)
        seconds += taken
    rank = [(run["accuracy"]["hard"], run["accuracy"]["soft"]) for run in runs]
    best = rank.index(max(rank))
    record = dict(runs[best], task="consecutive", config=dataclasses.asdict(config), device=device_name(device),
                  torch=torch.__version__, source_sha256=source_sha256(config), seconds={"total": round(seconds, 2)},
                  runs=runs)
    return record, models[best]


def two_decimals(share):
    """In percent, rounded down; first the share is rounded to six decimals, since float32 holds no more."""
    return f"{percent(round(1e6 * share), 10 ** 6, 2):.2f}"


def pairs_summary(record):
    """The record as the lines that a run prints."""
    out = ["seed   soft     hard     uniform: soft  hard     neighbour gap  checkerboard  circle order"]
    for r in record["runs"]:
        a, u, order = r["accuracy"], r["accuracy_uniform"], r["circle_order"]
        measured = order["queries"] + order["keys"] if order else []
        circle = " ".join("-" if x is None else f"{x:.2f}" for x in measured) or "-"
        soft, hard, soft_u, hard_u = (two_decimals(x) + "%" for x in (a["soft"], a["hard"], u["soft"], u["hard"]))
        out.append(f"{r['seed']:>4}  {soft:>7}  {hard:>7}  {soft_u:>13}  {hard_u:>7}  "
                   f"{r['neighbour_gap']:13.2f}  {r['checkerboard']:12.2f}  {circle}")
    low, high = record["accuracy"]["hard_interval"]
    out.append(f"best: seed {record['seed']}, hard 95% interval {low:.2%} - {high:.2%}, "
               f"n = {record['accuracy']['n']:,}; {record['seconds']['total']:.0f} s")
    return "\n".join(out)


# ======================================================================================
# 10. Encoder-only models (Jelassi et al.)
# ======================================================================================
#
# Source: Jelassi et al. One pass over the question, no decoder: answer digit t is read off at
# token t. Operands and answers start with their most significant digit and are padded on the
# right, so digits of equal weight stand at equal places only where numbers are equally long.

def product_columns(a, b):
    """Digits a (B, W), b (B, K), least significant first -> column sums (B, W + K) of a * b."""
    K = b.shape[1]
    return sum(F.pad(a * b[:, k:k + 1], (k, K - k)) for k in range(K))


def modulo(digits, modulus):
    """Digits (B, W) of a number, least significant first -> those of its remainder, as many as modulus - 1 has."""
    rest = torch.zeros_like(digits[:, 0])
    for digit in digits.flip(1).unbind(1):                              # Horner's rule, so no integer grows
        rest = (10 * rest + digit) % modulus
    return to_digits(rest, len(str(modulus - 1)), 10)


class Operation(NamedTuple):
    """A task of encoder-only models; operands are digits (B, W), least significant first."""
    symbol: str                     # + $ & * for the paper's + % x *; a model has one task, so element-wise shares +
    columns: Callable               # operands -> column sums
    about: str
    modular: bool = False
    short: bool = False             # the second operand has --second-digits at most, at every length
    zeros: bool = False             # the answer has all digits of the longer operand


OPERATIONS = {
    "addition": Operation("+", lambda a, b: F.pad(a + b, (0, 1)), "a + b"),
    "modular-addition": Operation("$", lambda a, b: F.pad(a + b, (0, 1)), "(a + b) mod c", modular=True),
    "multiplication": Operation("&", product_columns, "a * b, b of few digits", short=True),
    "modular-multiplication": Operation("*", product_columns, "(a * b) mod c, b of few digits", True, True),
    "elementwise-addition": Operation("+", lambda a, b: (a + b) % 10, "a + b, carries dropped", zeros=True),
}


def n_digits(a):
    """Digits (B, W) -> how many each number has without leading zeros, (B,), at least 1."""
    return (torch.arange(1, a.shape[1] + 1) * (a > 0)).amax(1).clamp(min=1)


def write(a, length):
    """Digits (B, W), least significant first -> tokens (B, W): the `length` (B,) lowest, in written order, then "@"."""
    place = length[:, None] - 1 - torch.arange(a.shape[1])
    return a.gather(1, place.clamp(min=0)).masked_fill(place < 0, TOKEN["@"])


def arrange_encoder(task, a, b, modulus=100):
    """Operands a, b (B, W) -> question (B, 2W + 1), answer tokens (B, n): W + 1 for sums, 2W for products, W for
    element-wise sums, the digits of modulus - 1 for modular answers.

    12 + 39 at width 3 is `12@+39@` and `51@@`. Source: Jelassi et al., Sec. 2.1. Both operands have the same width:
    2W answer tokens would not fit a question with a shorter one. Modular answers have as many digits as modulus - 1,
    zeros in front included; the paper, Sec. 4, says so of powers of ten. Element-wise sums, of which it says nothing,
    keep all digits of the longer operand.
    """
    spec = OPERATIONS[task]
    answer, _ = carry(spec.columns(a, b), 10)
    length = torch.maximum(n_digits(a), n_digits(b)) if spec.zeros else n_digits(answer)
    if spec.modular:
        answer = modulo(answer, modulus)
        length = torch.full_like(length, answer.shape[1])
    sign = a.new_full((len(a), 1), TOKEN[spec.symbol])
    return torch.cat([write(a, n_digits(a)), sign, write(b, n_digits(b))], 1), write(answer, length)


SIZES = {"small": (2, 64, 4), "base": (6, 512, 8), "standard": (6, 1024, 16), "large": (10, 1024, 16)}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """What an encoder-only run depends on. The defaults are the preset "fast". Raises: ValueError naming the option."""
    last_section = 10
    task: str = option("addition", "what to learn", choices=OPERATIONS)
    model: str = option("universal", "encoder, or universal, whose layer is shared; seq2seq for tasks it has",
                       choices=("encoder", "universal"))
    method: str = option("rpe-k", "how positions are treated", choices=("vanilla", "ape", "rpe-k", "rpe-kq"))
    preset: str = option("fast", "defaults of all other options", choices=("fast", "paper"))
    seed: int = option(0, "seed of every random stream", 0, 2 ** 32)
    size: str = option("small", "encoders: layers, width and heads", choices=SIZES)
    n_layer: int = option(0, "layers, or rounds of the shared one; 0: from --size", 0, 100)
    d_model: int = option(0, "width of the model; 0: from --size", 0, 65536)
    n_head: int = option(0, "attention heads; 0: from --size", 0, 1024)
    dropout: float = option(0.1, "dropout probability", 0, 0.99)
    norm: str = option("pre", "layer norm before or after each sublayer", choices=("pre", "post"))
    init: float = option(0.0, "encoders: standard deviation of all matrices at the start; 0: torch's choice", 0, 10)
    clip: int = option(0, "rpe methods: tables cover offsets -clip to clip; 0: all", 0, 10 ** 6)
    train_digits: int = option(5, "encoders: digits of training numbers, at most", 1, 18)
    even: bool = option(False, "encoders: numbers of each length equally often in training")
    second_digits: int = option(3, "multiplications: digits of the second operand, at most", 1, 18)
    modulus: int = option(100, "modular tasks: the modulus", 2, 10 ** 9)
    n_train: int = option(5000, "encoders: first operands in the training set, equal ones counted", 1, 10 ** 8)
    prime: int = option(0, "encoders: how many of them are priming examples", 0, 10 ** 8)
    prime_lengths: tuple = option((0,), "encoders: their digits, in equal shares; 0: the longest tested", 0, 10 ** 4)
    finetune: int = option(0, "encoders: train on this many examples of --prime-lengths afterwards", 0, 10 ** 8)
    finetune_steps: int = option(1000, "encoders: steps of that", 1, 10 ** 9)
    width: int = option(0, "digits an operand is padded to; 0: the longest tested", 0, 10 ** 4)
    batch: int = option(64, "examples a step", 1, 10 ** 6)
    lr: float = option(1e-3, "peak learning rate", 1e-12, 10)
    decay: float = option(0.01, "encoders: weight decay", 0, 1)
    warmup: int = option(100, "steps of linear warm-up", 1, 10 ** 9)
    steps: int = option(2000, "steps of the training", 1, 10 ** 9)
    precision: str = option("float32", "of the products in training", choices=("float32", "tf32", "bf16"))
    every: int = option(100, "steps between points of the learning curve", 1, 10 ** 9)
    lengths: tuple = option((5, 6, 10), "digits tested", 1, 10 ** 4)
    samples: int = option(1000, "examples a length", 1, 10 ** 7)

    def __post_init__(self):
        check_options(self)
        fill = functools.partial(object.__setattr__, self)
        for name, value in zip(("n_layer", "d_model", "n_head"), SIZES[self.size]):
            fill(name, getattr(self, name) or value)
        fill("prime_lengths", tuple(n or max(self.lengths) for n in self.prime_lengths))
        spec, used = OPERATIONS[self.task], self.prime_lengths if self.prime or self.finetune else ()
        needed = max(*self.lengths, *used, self.train_digits, self.second_digits * spec.short,
                     len(str(self.modulus - 1)) * spec.modular)
        if 0 < self.width < needed:
            raise ValueError(f"--width: {self.width} is too narrow; {needed} digits are needed")
        fill("width", self.width or needed)
        fill("clip", self.clip or 2 * self.width)
        if self.d_model % self.n_head:
            raise ValueError(f"--n-head: {self.n_head} heads do not divide --d-model {self.d_model}")
        if self.prime > self.n_train:
            raise ValueError(f"--prime: {self.prime} of {self.n_train} training examples")

    @property
    def d_ff(self):
        return 4 * self.d_model


PAPER_ENCODER = dict(size="standard", norm="post", init=0.02, dropout=0.1, batch=32, lr=1e-4, warmup=1,
                     steps=15_000 * 5000 // 32, every=5000, samples=10_000, lengths=(5, 6, 10, 15, 20))
PAPER_PRODUCTS = dict(lengths=(5, 10, 20, 30, 35))
PAPER_TASKS = {"elementwise-addition": dict(size="base", n_train=50_000, steps=15_000 * 50_000 // 32),
               "modular-addition": dict(size="base"), "multiplication": PAPER_PRODUCTS,
               "modular-multiplication": PAPER_PRODUCTS | dict(size="base")}


def make_encoder_config(preset="fast", **options):
    """EncoderConfig of a preset, with `options` on top. "paper": Jelassi et al., Sec. 2.2, 15,000 epochs of 5,000;
    modular tasks have the size of Table 2; element-wise addition as in App. A.2."""
    if preset == "paper":
        options = PAPER_ENCODER | PAPER_TASKS.get(options.get("task"), {}) | options
    return EncoderConfig(preset=preset, **options)


class Encoder(nn.Module):
    """Non-causal transformer encoder with a classifier at each token; "universal" applies one layer n_layer times.

    Source: Jelassi et al., Sec. 2.2; its layers are BERT's and ALBERT's. GELU is here always, norm after each sublayer
    and the initial standard deviation 0.02 in the preset "paper". Differs: feed-forward layers are 4 d_model wide,
    not 3,072 (BERT) and 16,384 (ALBERT); ALBERT has no dropout, does not scale the relative term, approximates GELU and
    widens embeddings of 128; without a norm after them embeddings start from 0.3, as in `Transformer`. Absolute
    positions are sinusoids, "vanilla", which the paper cites, or a learned table, "ape", which its layers have.
    """

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.d_model
        self.embedding = nn.Embedding(len(VOCAB), C)
        self.table = nn.Embedding(2 * config.width + 1, C) if config.method == "ape" else None
        self.norm, self.dropout = nn.LayerNorm(C), nn.Dropout(config.dropout)
        own = config.n_layer if config.model == "encoder" else 1
        self.layers = nn.ModuleList(Layer(config, cross=False) for _ in range(own))
        self.head = nn.Linear(C, len(VOCAB))
        for name, weight in self.named_parameters():
            if name in ("embedding.weight", "table.weight") and (config.norm == "pre" or not config.init):
                nn.init.normal_(weight, std=0.3)
            elif weight.dim() == 2 and config.init:
                nn.init.normal_(weight, std=config.init)
        for layer in self.layers:
            layer.feed_forward[1] = nn.GELU()

    def forward(self, tokens, n_out):
        """tokens (B, T) -> logits (B, n_out, V) of the answer."""
        x = self.embedding(tokens)
        if self.table is not None:
            x = x + self.table.weight[:tokens.shape[1]]
        if self.config.method == "vanilla":
            x = x + sinusoidal(torch.arange(tokens.shape[1], device=x.device), x.shape[2])
        pre = self.config.norm == "pre"
        x = self.dropout(x if pre else self.norm(x))
        for n in range(self.config.n_layer):
            x, *_ = self.layers[n % len(self.layers)](x, None)
        x = x[:, :n_out]
        return self.head(self.norm(x) if pre else x)


def draw_short(config, place, B, generator):
    """B training operands -> digits (B, width): integers from 1 to 10^d - 1, uniform, so that 90% have all d digits;
    with config.even, numbers of 1 to d digits equally often, uniform among those of a length. place: 0 for the first
    operand, 1 for the second, which in multiplications has another d."""
    d = config.second_digits if place and OPERATIONS[config.task].short else config.train_digits
    numbers = torch.randint(10 ** (d - 1) if config.even else 1, 10 ** d, (B,), generator=generator)
    if config.even:
        numbers = numbers // 10 ** torch.randint(d, (B,), generator=generator)
    return to_digits(numbers, config.width, 10)


def draw_long(config, length, B, generator):
    """-> operands a, b (B, width) of exactly `length` digits; in multiplications b is as in training without --even."""
    def number():
        digits = torch.randint(10, (B, length), generator=generator)
        digits[:, -1] = torch.randint(1, 10, (B,), generator=generator)
        return F.pad(digits, (0, config.width - length))
    uniform = dataclasses.replace(config, even=False)
    return number(), (draw_short(uniform, 1, B, generator) if OPERATIONS[config.task].short else number())


def draw_examples(config, generator):
    """The training set -> operands a, b (n_train, width). Long ones, as many as --prime, come first, with the
    --prime-lengths in turn; of the others only a counts, since their b is new each time. Source: Jelassi et al.,
    "Training procedures". Numbers may repeat: of 50,000 with --even about 16,000 differ, of 5,000 without it 4,900."""
    a, lengths = draw_short(config, 0, config.n_train, generator), config.prime_lengths
    b, long_ones = torch.zeros_like(a), seeded(config.seed + 10 ** 6)                   # a stream that no test has
    for turn, length in enumerate(lengths):
        places = torch.arange(config.prime)[turn::len(lengths)]
        a[places], b[places] = draw_long(config, length, len(places), long_ones)
    return a, b


def draw_encoder_batch(config, examples, generator):
    """-> question, answer tokens. Differs: examples are drawn with replacement, not in epochs."""
    a, b = examples
    pick = torch.randint(config.n_train, (config.batch,), generator=generator)
    fresh = draw_short(config, 1, config.batch, generator)
    second = torch.where((pick < config.prime)[:, None], b[pick], fresh)
    return arrange_encoder(config.task, a[pick], second, config.modulus)


@torch.no_grad()
def right_digits(model, question, answer):
    """-> (B, n_out) bool: is this token of the answer right?"""
    model.eval()
    device = model.head.weight.device
    return torch.cat([(model(q.to(device), t.shape[1]).argmax(-1).cpu() == t)
                      for q, t in zip(question.split(256), answer.split(256))])


def by_place(right, answer):
    """right, answer (B, n_out) -> share right at each place where an answer has a digit, the leftmost first."""
    shown = (answer != TOKEN["@"]).any(0)
    return [round(x, 4) for x in right[:, shown].float().mean(0).tolist()]


def train_encoder(model, config, name, seed, report=silent, keeper=Keeper()):
    """AdamW on every answer token; the rate is a cosine from step 0, its beginning warmed up -> {"curve": [[step,
    [share right of each answer digit]]] on 200 fresh questions of the training length, "seconds"}. Source: Jelassi
    et al., Sec. 2.2 and Fig. 7. Differs: gradients are clipped at norm 1. Raises: FloatingPointError when the loss is
    nan or inf; Interrupted."""
    steps, device = config.steps, model.head.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.decay)
    numbers = draw_long(config, config.train_digits, 200, seeded(config.seed + 1))
    check = arrange_encoder(config.task, *numbers, config.modulus)
    parts, generator = dict(model=model, optimizer=optimizer), seeded(seed)
    examples, now = draw_examples(config, generator), dict(step=0, seconds=0.0, curve=[])
    for step in kept_steps(keeper, name, parts, generator, steps, now):
        lr = config.lr * min(1, step / config.warmup) * (1 + math.cos(math.pi * step / steps)) / 2
        question, answer = draw_encoder_batch(config, examples, generator)
        model.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            logits = model(question.to(device), answer.shape[1])
        loss = descend(optimizer, lr, F.cross_entropy(logits.flatten(0, 1).float(), answer.to(device).flatten()))
        checking = step % config.every == 0 or step == steps
        if (checking or device.type == "cpu") and not loss.isfinite():                  # a GPU is not waited for
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
        if checking:
            right = right_digits(model, *check)
            now["curve"].append([step, by_place(right, check[1])])
            report(step=step, of=steps, loss=loss.item(), accuracy=right.all(1).float().mean().item())
    return now


def evaluate_encoder(model, config, report=silent):
    """-> {"accuracy": {length: share exact}, "places": {length: share right of each answer digit}} and, at the longest
    length, {"wrong_digits": {digits wrong: answers}, "wrong_places": {place of the only wrong digit, 1 is the leftmost:
    answers}} and, for addition, {"carries": {"nc": {carries: [right, n]}, "mc": {longest run of carries: [right, n]}}};
    all keys are strings. report receives digits= of each length. Source: Jelassi et al., Figs. 6, 8 and 11."""
    found = {"accuracy": {}, "places": {}}
    for length in sorted(config.lengths):
        report(digits=length)
        a, b = draw_long(config, length, config.samples, seeded(config.seed * 1_000_003 + length))
        question, answer = arrange_encoder(config.task, a, b, config.modulus)
        right = right_digits(model, question, answer)
        exact, wrong = right.all(1), (~right).sum(1)
        found["accuracy"][str(length)], found["places"][str(length)] = share(exact), by_place(right, answer)
    counts = lambda x: {str(n): int((x == n).sum()) for n in x.unique().tolist()}       # of the last, longest length
    found["wrong_digits"] = counts(wrong[~exact])
    found["wrong_places"] = counts((~right[wrong == 1]).int().argmax(1) + 1)
    if config.task == "addition":
        split = lambda x: {str(n): [int(exact[x == n].sum()), int((x == n).sum())] for n in x.unique().tolist()}
        _, carried = carry(F.pad(a + b, (0, 1)), 10)
        found["carries"] = {"nc": split(carried.sum(1)), "mc": split(carry_chains("addition", (a, b), 10))}
    return found


def run_encoder(config, device, report=silent, keeper=Keeper()):
    """Train, with priming if asked, evaluate; then fine-tune and evaluate again -> (record, model). With fine-tuning
    the record holds what came before it under "before"."""
    torch.manual_seed(config.seed)
    model, stages = Encoder(config).to(device), {"train": config}
    if config.finetune:                                 # training in which all examples are long ones
        stages["finetune"] = dataclasses.replace(config, n_train=config.finetune, prime=config.finetune,
                                                 steps=config.finetune_steps)
    seconds, found = {"evaluate": 0.0}, []
    for seed, (name, stage) in enumerate(stages.items(), config.seed + 2):
        report(stage=name)
        if found:                                       # dropout in fine-tuning must not depend on a resumption
            torch.manual_seed(seed)
        result = train_encoder(model, stage, name, seed, report, keeper)
        start = time.perf_counter()
        found.append(evaluate_encoder(model, config, report) | {"curve": result["curve"]})
        seconds[name] = round(result["seconds"], 2)
        seconds["evaluate"] = round(seconds["evaluate"] + time.perf_counter() - start, 2)
    seconds["total"] = round(sum(seconds.values()), 2)
    record = dict(task=config.task, method=config.method, preset=config.preset, seed=config.seed,
                  config=dataclasses.asdict(config), device=device_name(device), torch=torch.__version__,
                  source_sha256=source_sha256(config), seconds=seconds, **found[-1])
    if config.finetune:
        record["before"] = found[0]
    return record, model


def encoder_summary(record):
    """The record as the lines that a run prints."""
    words = lambda found: ", ".join(f"{key}: {value}" for key, value in found.items()) or "none"
    out = exact_lines(record["accuracy"])
    if "before" in record:
        out = ["before fine-tuning", *exact_lines(record["before"]["accuracy"]), "after it", *out]
    if "carries" in record:
        out += [f"[right, n] by carries  {words(record['carries']['nc'])}",
                f"[right, n] by longest run of carries  {words(record['carries']['mc'])}"]
    longest = max(record["places"], key=int)
    places = " ".join(f"{100 * x:g}" for x in record["places"][longest])
    out += [f"percent right by place, {longest} digits  {places}",
            f"wrong answers by digits wrong  {words(record['wrong_digits'])}",
            f"by place of the only wrong one  {words(record['wrong_places'])}",
            f"{record['config']['steps']:,} steps, {record['seconds']['total']:.0f} s on {record['device']}"]
    return "\n".join(out)


# ======================================================================================
# 11. Report: records to Markdown tables
# ======================================================================================
#
# Tables are made of groups: {(task, method, changed options): records, one a seed}.

def is_encoder(record):
    """Only encoder-only models have a training set of fixed size."""
    return "n_train" in record["config"]


def is_given_teacher(record):
    """Was it told by --teacher which model to calibrate on, instead of training one?"""
    return record.get("method") == "abc" and record.get("teachers") == 0


def changed_options(record):
    """Flags by which a record's run differs from the defaults, apart from seed, most steps, what was tested and, unless
    the method is "abc", the rules of calibration. Those of encoder-only models begin with --model; theirs and those of
    consecutive pairs hold the steps. A run that was given its teacher, and nothing else changed, is told by --teacher.
    """
    config, default = record["config"], {"preset": Config.preset}
    ignored = {"task", "method", "seed", "lengths", "hard", "samples", "long_samples"}
    if config["task"] == PairsConfig.task:
        usual = PairsConfig()
    elif is_encoder(record):
        usual = make_encoder_config(record["preset"], task=config["task"])
        default.update(model="", clip=2 * config["width"])
        ignored.update(["every"], [] if config["prime"] or config["finetune"] else ["prime_lengths"])
    else:
        usual = make_config(record["preset"], task=config["task"], method=config["method"], base=config["base"])
        default.update(base=TASKS[config["task"]].base or Config.base)
        names = list(config)
        rules = names[names.index("calibrate_on"):names.index("penalty") + 1]
        ignored.update(["steps"], rules if record["method"] != "abc" else [])
    default = json.loads(json.dumps(dataclasses.asdict(usual) | default))               # lists, as in the record
    changed = []
    for name, value in config.items():
        if name not in ignored and value != default[name]:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            switch = flag(name if value else f"no_{name}")
            changed.append(switch if isinstance(value, bool) else f"{flag(name)} {text}")
    return " ".join(changed or ["--teacher DIR"] * is_given_teacher(record))


@contextlib.contextmanager
def refused(text, *errors):
    """Errors of these kinds, by default of any, come from bad input: a ValueError of one line, the text and why."""
    try:
        yield
    except errors or Exception as error:
        why = getattr(error, "strerror", None) or (str(error) if isinstance(error, ValueError) else repr(error))
        raise ValueError(f"{text}: {why[:300]}") from None


def records_in(path):
    """A file of records, one a line, or the folder of a run -> list of (record, its key: task, method, changed
    options). Raises: ValueError naming file and line."""
    path, found = Path(path), []
    with refused(f"{str(path)!r} holds no records that can be read"):
        text = (path / "result.json" if path.is_dir() else path).read_text(encoding="utf-8")
    for number, line in enumerate([text] if path.is_dir() else text.splitlines(), 1):
        with refused(f"line {number} of {str(path)!r} is no record of a run"):
            record = json.loads(line)
            key = record["task"], record.get("method"), changed_options(record)
            int(record["config"]["seed"]), tables({key: [record]})                      # it has all that a table reads
            found.append((record, key))
    return found


def grouped(found):
    """What `records_in` returns -> groups, of each seed the last record."""
    groups = {}
    for record, key in found:
        groups.setdefault(key, {})[record["config"]["seed"]] = record
    return {key: [seeds[seed] for seed in sorted(seeds)] for key, seeds in groups.items()}


def read_records(*paths):
    """The records of files and folders together -> groups."""
    return grouped(sum(map(records_in, paths), []))


def interval(low, high):
    """A share's bounds in percent, rounded outwards."""
    return f"({math.floor(1e4 * low) / 100:g}-{math.ceil(1e4 * high) / 100:g})"


def tested(records, kind="accuracy"):
    """Lengths in the records; kind: "accuracy", "hard" or "chains"."""
    return sorted({int(length) for r in records for length in r[kind]})


def tally(records, length, name=None):
    """(right, asked) of every seed at a length, in a hard set if named."""
    found = [r["hard"].get(str(length), {}).get(name) if name else r["accuracy"].get(str(length)) for r in records]
    return [(counts["correct"], counts["n"]) for counts in found if counts]


def cell(records, length, name=None):
    """-> "percent (Wilson 95% interval, rounded outwards), seeds without a mistake/seeds"."""
    seeds = tally(records, length, name)
    if not seeds:
        return "not run"
    total = [sum(counts) for counts in zip(*seeds)]
    exact = f", {sum(right == asked for right, asked in seeds)}/{len(seeds)}" if len(seeds) > 1 else ""
    return f"{percent(*total, 2):g} {interval(*wilson(*total))}{exact}"


def cells(records, lengths, **more):
    """Columns: accuracy at the lengths, more, the seeds run, and the numbers of questions a length and seed."""
    sizes = sorted({share["n"] for r in records for share in r["accuracy"].values()})
    return {length: cell(records, length) for length in lengths} | more | {
        "seeds": ", ".join(map(str, sorted({r["seed"] for r in records}))), "n": ", ".join(f"{n:,}" for n in sizes)}


def costs(records):
    """Columns: median time and tokens (least-most) of one task on one device."""
    seconds, tokens = [r["seconds"] for r in records], [sum(r["tokens"].values()) / 1e6 for r in records]
    times = PUBLISHED_TOKENS.get(records[0]["task"], 0) / 1e6 / statistics.median(tokens)
    span = lambda x, digits=0: f"{statistics.median(x):.{digits}f} ({min(x):.{digits}f}-{max(x):.{digits}f})"
    return {"task": records[0]["task"], "device": records[0]["device"], "seeds": len(records),
            "interpolate, s": span([s["interpolate"] for s in seconds]),
            "retrain, s": span([s["retrain"] for s in seconds]),
            "test, s": span([s["evaluate"] for s in seconds]),
            "all but test, s": span([s["total"] - s["evaluate"] for s in seconds]),
            "all, s": span([s["total"] for s in seconds]),
            "retrain / interpolate": span([s["retrain"] / max(s["interpolate"], 1e-9) for s in seconds], 2),
            "training tokens, millions": span(tokens, 2),
            "of the authors' tokens": f"1 / {times:,.0f}" if times else "not published"}


def by_carries(seeds):
    """{run of carries: (right, asked)} of each seed -> columns: the same of all together, in bins."""
    counts = [(int(chain), *count) for seed in seeds for chain, count in seed.items()]
    total = lambda column, low, high: sum(count[column] for count in counts if low <= count[0] <= high)
    bins = {"0 to 1": (0, 1), "2 to 3": (2, 3), "4 to 7": (4, 7), "8 to 15": (8, 15), "16 or more": (16, INF)}
    return {name: f"{total(1, *ends):,} / {total(2, *ends):,}" for name, ends in bins.items()}


# Percent at 6 / 10 / 15 / 20 / 50 / 60 digits. Source: ABC v2, Tables 1 and 3; 15 and 50 digits of "abc" and of
# addition by "rpe-k" (quoted there from Jelassi et al.): ABC v1, Table 1; 50 digits of the others: ABC v1, Table 3.
# "parity-label" is quoted there, too, from Deletang et al. and Ruoss et al.
ALL, NONE = " / ".join(["100"] * 6), "100 / 0 / 0 / 0 / 0 / 0"
PUBLISHED = {
    "successor": {"vanilla": NONE, "alibi": "1.3 / 0 / 0 / 0 / 0 / 0", "rope": NONE, "window": ALL,
                  "window-cyclic": ALL, "window-nope": ALL, "abc": ALL},
    "addition": {"vanilla": NONE, "alibi": "0 / 0 / 0 / 0 / 0 / 0", "rope": NONE, "window": NONE, "window-cyclic": ALL,
                 "rpe-k": "100 / 99.9 / 97.2 / 21.3 / - / -", "abc": "100 / 100 / 99.9 / 99.9 / 99.8 / 99.8",
                 "window-nope": "99.95 / 99.81 / 99.84 / 99.76 / 99.35 / 99.35"},
    "nx1": {"vanilla": NONE, "rope": NONE, "window": "100 / 6.0 / 0.19 / 0 / 0 / 0", "window-cyclic": ALL,
            "window-nope": "99.89 / 99.63 / 99.49 / 99.39 / 98.31 / 98.31", "abc": ALL},
    "parity": {"vanilla": "29.23 / 0.29 / 0 / 0 / - / 0", "window": ALL, "window-cyclic": ALL, "window-nope": ALL,
               "abc": "does not interpolate"},
    "parity-label": {"vanilla": "52.0 to 52.6"},
}
# Epochs x batches x samples x tokens of a sample padded to 60 digits, in the published training of the authors.
PUBLISHED_TOKENS = {"successor": 128 * 1792 * 512 * (63 + 62), "addition": 256 * 1792 * 512 * (125 + 62)}


SHARES = "Percent exact (Wilson 95% interval over the questions of all seeds), seeds without a mistake / seeds run"


def abc_tables(runs):
    """-> tables (title, note, rows {column: cell}) of ABC; runs: task -> records with default settings."""
    every = sum(runs.values(), [])
    missed = [f"{r['task']} seed {r['seed']} {percent(a['correct'], a['n'], 2):g} at {length} (n = {a['n']:,})"
              for r in every for length, a in r["accuracy"].items() if a["correct"] < a["n"]]
    columns = {task: cells(records, tested(every)) for task, records in runs.items()}
    yield ("ABC, default settings",
           f"{SHARES}, by digits (parity: bits). Seeds with a mistake: {'; '.join(missed) or 'none'}.",
           [{"digits": name} | {task: columns[task][name] for task in runs} for name in (*tested(every), "seeds", "n")])
    parts = [[r for r in records if r["device"] == device]
             for device in sorted({r["device"] for r in every}) for records in runs.values()]
    yield ("Cost of ABC", "Median over seeds (least-most). The authors' tokens are those of their published schedule.",
           [costs(records) for records in parts if records])
    yield ("Hard questions, ABC", SHARES + ".",
           [{"task, digits": f"{task}, {length}", "set": name, "right": cell(records, length, name)}
            for task, records in runs.items() for length in tested(records, "hard")
            for name in dict.fromkeys(name for r in records for name in r["hard"].get(str(length), {}))])
    yield ("ABC by longest run of carries", "Right / asked, all seeds together.",
           [{"task": task, "digits": length} | by_carries([r["chains"].get(str(length), {}) for r in records])
            for task, records in runs.items() for length in tested(records, "chains")])


def method_tables(groups):
    """-> tables of encoder-decoders at the two widths of the papers' runs, and of everything else."""
    widths, rows = {"": "natural width", "--width 61 --spread 0": "the authors' fixed width 61"}, []
    for change, title in widths.items():
        chosen = [(task, method, groups[task, method, change]) for task in TASKS for method in METHODS
                  if (task, method, change) in groups]
        others = tested([r for _, method, records in chosen for r in records if method != "abc" or change])
        lengths = [n for n in tested(sum((records for *_, records in chosen), []))      # `abc_tables` has all of "abc"
                   if n in (6, 10, 15, 20, 50, 60, 200) or n in others]
        yield (f"The papers' tables, {title}",
               f"{SHARES}; trained: thousands of examples; held-out: of 2,000 numbers left out of training (`abc`: by "
               "the model calibrated on); both are medians. Papers: at 6 to 60 digits, for parity, too, where 6 are "
               "20 bits and 60 are 200.",
               [{"task": task, "method": f"`{method}`",
                 "trained": f"{statistics.median(sum(r['examples'].values()) for r in records) / 1000:,.0f}",
                 "held-out": percent(round(2000 * statistics.median(r["interpolation_accuracy"] for r in records)),
                                     2000),
                 **cells(records, lengths, papers=PUBLISHED.get(task, {}).get(method, "-"))}
                for task, method, records in chosen])
    others = [key for key in groups if key[2] not in widths]
    tasks = [task for task in TASKS if task in {key[0] for key in others}]
    for method, change in dict.fromkeys(key[1:] for key in others):
        runs = {task: groups.get((task, method, change), []) for task in tasks}
        every = sum(runs.values(), [])
        rows += [{"method": f"`{method}`", "changed": f"`{change}`", "digits": length}
                 | {task: cell(runs[task], length) for task in tasks} | cells(every, ()) for length in tested(every)]
    yield "Other settings", SHARES + ", by digits (parity: bits).", rows


def encoder_tables(groups):
    """-> tables of encoder-only models, and of their sums by carries at the longest length."""
    every, stages, sums = sum(groups.values(), []), {}, []
    for (task, method, change), records in groups.items():
        if before := [r | r["before"] for r in records if "before" in r]:
            stages[task, method, f"{change}, before"] = before
        stages[task, method, change] = records
    yield ("Encoder-only models", SHARES + ", by digits; s: median of training and tests.",
           [{"task": task, "method": f"`{method}`", "changed": f"`{change}`",
             **cells(records, tested(every), s=f"{statistics.median(r['seconds']['total'] for r in records):.0f}")}
            for (task, method, change), records in stages.items()])
    for (_, method, change), records in stages.items():
        for length in sorted({tested([r])[-1] for r in records if "carries" in r}):
            counts = [r["carries"] for r in records if tested([r])[-1] == length]
            sums += [{"method": f"`{method}`", "changed": f"`{change}`", "digits": length, "by": by}
                     | by_carries([seed[name] for seed in counts])
                     for name, by in (("nc", "carries"), ("mc", "longest run of carries"))]
    yield ("Encoder-only models, sums by carries", "Right / asked at the longest length, all seeds together.", sums)


def pairs_tables(groups):
    """-> the table of consecutive pairs."""
    both = lambda a: f"{two_decimals(a['soft'])}, {two_decimals(a['hard'])} {interval(*a['hard_interval'])}"
    yield ("Consecutive pairs", "Percent of labels (soft) and of whole sequences (hard; Wilson 95% interval) right, "
           "every seed; checkerboard: their mean.",
           [{"changed": f"`{change}`", "soft, hard": "; ".join(both(run["accuracy"]) for run in record["runs"]),
             "n": f"{record['accuracy']['n']:,}",
             "checkerboard": f"{statistics.mean(run['checkerboard'] for run in record['runs']):.1f}"}
            for (*_, change), records in groups.items() for record in records])


def tables(groups):
    """-> all tables of groups."""
    decoders, encoders, pairs = {}, {}, {}
    for key, records in groups.items():
        (pairs if key[0] == PairsConfig.task else encoders if is_encoder(records[0]) else decoders)[key] = records
    runs = {task: decoders[task, "abc", ""] for task in TASKS if (task, "abc", "") in decoders}
    abc = abc_tables(runs) if runs else ()
    return *abc, *method_tables(decoders), *encoder_tables(encoders), *pairs_tables(pairs)


def report(path):
    """Tables of a file of records, as Markdown; one without rows is left out. Says on stderr how many records are."""
    found, texts = records_in(path), []
    groups = grouped(found)
    if left_out := len(found) - sum(map(len, groups.values())):
        print(f"lengen: records left out: {left_out}; of equal settings and seeds the last counts", file=sys.stderr)
    for title, note, rows in tables(groups):
        if rows:
            lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
            text = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
            texts.append(f"### {title}\n\n{note}\n\n{text}")
    return "\n".join(texts)


# ======================================================================================
# 12. Pictures of a finished run, or of a file of records
# ======================================================================================
#
# Only this section needs matplotlib, imported by `pyplot`. Colours tell apart without red
# against green (Okabe and Ito); grey is closed.

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def pyplot():
    """matplotlib.pyplot that draws to files. Raises: ValueError that says how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from None
    plt.switch_backend("agg")
    plt.rcParams.update({"axes.prop_cycle": plt.cycler(color=COLOURS * 2, marker=list("osv^DPX<>phd*8")),
                         "lines.markersize": 5, "font.size": 11, "axes.titlesize": 10, "figure.titlesize": 11,
                         "legend.fontsize": 9, "image.aspect": "auto", "image.interpolation": "nearest",
                         "savefig.dpi": 110, "figure.constrained_layout.use": True})
    return plt


def save_picture(figure, path):
    """To stderr goes where it lies: stdout may hold a record."""
    figure.savefig(path)
    pyplot().close(figure)
    print(path, file=sys.stderr)


def run_title(config):
    return f"{config.task}, {config.method}, seed {config.seed}, trained on numbers up to 2^20"


def draw_shares(axes, counts, band=False, **style):
    """{number: (right, asked)} -> a curve of percent right against the number, with its Wilson band if asked."""
    points = sorted((int(x), right / asked, *wilson(right, asked)) for x, (right, asked) in counts.items())
    x, *shares = zip(*points)
    share, low, high = 100 * torch.tensor(shares).numpy()
    [line] = axes.plot(x, share, **style)
    if band:
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
    axes.set(ylabel="exact answers, percent" + " (band: 95%)" * band, ylim=(-3, 103))
    axes.locator_params(axis="x", integer=True)


def accuracy_picture(plt, groups, task):
    """Exact match against length, one curve a method and setting of the task's encoder-decoders in `groups`;
    questions of all seeds are counted together."""
    groups = {key: records for key, records in groups.items() if key[0] == task and not is_encoder(records[0])}
    every = sum(groups.values(), [])
    seeds, bases = (sorted({r["config"][name] for r in every}) for name in ("seed", "base"))
    figure, axes = plt.subplots(figsize=(9 + max(len(change) for *_, change in groups) / 12, 5))
    for base in bases:
        axes.axvspan(1, count_digits(LIMIT, base), color="k", alpha=0.1, label=f"training range, base {base}")
    for (_, method, change), records in groups.items():
        counts = {n: [sum(column) for column in zip(*tally(records, n))] for n in tested(records)}
        draw_shares(axes, counts, band=True, label=f"{method} {change}")
    axes.set_xscale("log", subs=(2, 5))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set(xlabel="digits of each number", xlim=(0.8 * tested(every)[0], None),
             title=f"{task}, seeds {', '.join(map(str, seeds))}, trained on numbers up to 2^20")
    figure.legend(loc="outside center right")
    return figure


def heat_maps(panels, names, matrices, xlabel, ylabel, unit, ends=None):
    """Draws matrices (T, S) beside each other, grey where -inf, on one scale of colours with these ends, by default the
    least and the greatest of their values."""
    values = torch.cat([matrix[matrix.isfinite()] for matrix in matrices])
    low, high = ends or (float(values.min()), float(values.max()))
    for axes, name, matrix in zip(panels, names, matrices):
        image = axes.imshow(matrix.numpy(), vmin=low, vmax=high)
        axes.set(title=name, xlabel=xlabel, facecolor="0.8")
        axes.locator_params(integer=True)
    panels[0].set_ylabel(ylabel)
    panels[0].figure.colorbar(image, ax=panels, label=unit)


@torch.no_grad()
def attend(model, config, calibration, question):
    """Cross-attention of the last decoder layer while a question's right answer is read -> (H, T, S) weights, source
    and answer as strings, rows whose next token is wrong."""
    width, source, target = pose(config, question)
    trace, tokens, bias = [], encode(target)[None], make_bias(config, width, calibration)
    wrong = model.eval()(encode(source)[None], tokens[:, :-1], bias, trace).argmax(-1) != tokens[:, 1:]
    return trace[-1][1][0], source, target[1:], wrong[0].nonzero().flatten().tolist()


def attention_picture(plt, models, question):
    """Heat maps of every head in the last layer, a row of panels for each (name, model, config, calibration)."""
    config = models[-1][2]
    figure, grid = plt.subplots(len(models), config.n_head, sharey="row", squeeze=False,
                                figsize=(2.3 * config.n_head + 4, 3.4 * len(models) + 0.6))
    figure.suptitle(f"{run_title(config)}\nlast layer's cross-attention for {question} (bold orange rows: wrong digit)")
    for panels, (name, *model) in zip(grid, models):
        weights, source, answer, wrong = attend(*model, question)
        heads = [f"{name}, head {head}" for head in range(1, config.n_head + 1)]
        heat_maps(panels, heads, weights, "input digit", "output digit, lowest first", "attention weight", (0, 1))
        for axes in panels:
            axes.set_xticks(range(len(source)), list(source), fontsize=7)
        panels[0].set_yticks(range(len(answer)), list(answer), fontsize=7)
        for row in wrong:
            panels[0].get_yticklabels()[row].set(color=COLOURS[1], fontweight="bold")
    return figure


def bias_pictures(plt, config, calibration, teacher):
    """Of each layer the averaged attention and, below it, the biases calibrated from it, at training size."""
    numbers, _ = split_numbers(config.seed)
    questions = sample(teacher.config, numbers, config.calibration_samples, config.seed + 4, torch.device("cpu"))
    scores = config.calibrate_on == "scores"
    unit, ends = ("score", None) if scores else ("weight", (0, 1))
    attention = collect_attention(teacher, *questions, make_bias(teacher.config, config.width), scores)
    empty = [(r["layer"], r["attention"], r["head"]) for r in line_table(calibration) if r["line"] is None]
    config = dataclasses.replace(config, penalty=0.0)                                   # closed is closed
    for layer, biases in enumerate(make_bias(config, config.width, calibration).decoder, 1):
        read = layer if config.layer == "own" else config.n_layer
        figure, grid = plt.subplots(4, config.n_head, sharey="row", squeeze=False, figsize=(2 * config.n_head + 4, 10))
        figure.suptitle(f"{run_title(config)}: layer {layer}")
        for kind, above, below, averages, bias in zip(("self", "cross"), grid[::2], grid[1::2], attention, biases):
            heads = [f"head {n}" + ": no line" * ((read, kind, n) in empty) for n in range(1, config.n_head + 1)]
            read_from = {"self": "output position", "cross": "input position"}[kind]
            heat_maps(above, heads, averages[read - 1], read_from, f"averaged {kind}-attention\noutput position",
                      unit, ends)
            heat_maps(below, heads, bias, read_from, f"{kind} bias\noutput position", "bias (grey: closed)",
                      (-0.5, 0))
        yield figure


def window_picture(plt, config):
    """Window biases of one operand and of two interleaved ones, self and cross."""
    w, names = config.window, ("self", "cross, one operand", "cross, two operands")
    biases = [window_bias(w, 9, 9)[0], window_bias(w, 9, 10, True)[0], window_bias(w, 9, 19, True, 2)[0]]
    figure, panels = plt.subplots(1, 3, figsize=(11, 4))
    figure.suptitle(f"{run_title(config)}: window biases, w = {w}")
    heat_maps(panels, names, biases, "key position", "query position", "bias (grey: closed)", (-0.5, 0))
    return figure


def training_picture(plt, config, log):
    """Loss and held-out accuracy of every stage on one time axis."""
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(9, 6))
    starts = [n for n, entry in enumerate(log) if "stage" in entry]
    for start, end in zip(starts, [*starts[1:], None]):
        checks = [(e["seconds"], e["loss"], 100 * e["accuracy"]) for e in log[start:end] if "step" in e]
        if checks:
            seconds, loss, accuracy = zip(*checks)
            above.plot(seconds, loss, label=log[start]["stage"])
            below.plot(seconds, accuracy)
    above.set(yscale="log", ylabel="loss", title=run_title(config))
    below.set(xlabel="seconds since the start", ylabel="held-out numbers exact, percent", ylim=(-3, 103))
    figure.legend(loc="outside center right")
    return figure


def errors_picture(plt, model, config, calibration, chains):
    """Accuracy by longest run of carries, and the share of wrong digits at every output position."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    figure.suptitle(run_title(config))
    for digits, counts in chains.items():
        draw_shares(left, counts, label=digits)
    left.set(xlabel="longest run of carries, columns")
    left.legend(*left.get_legend_handles_labels(), title="digits" if chains else "this task carries nothing")
    length = min(20, max(config.lengths + config.hard))                                     # fits a learned table
    width = max(config.width, width_for(config.task, length, config.base))
    operands = draw_test(config.task, length, 200, config.base, seeded(config.seed))
    source, target = arrange(config.task, pad(config.task, operands, width), config.base, config.align)
    with torch.no_grad():
        wrong = model.eval()(source, target[:, :-1], make_bias(config, width, calibration)).argmax(-1) != target[:, 1:]
    right.bar(range(1, wrong.shape[1] + 1), (100 * wrong.double().mean(0)).tolist())
    right.set(xlabel="output position, lowest digit first", ylabel="wrong digits, percent", ylim=(0, 103),
              title=f"{length} digits, n = {len(target)}, each after a right beginning: {int(wrong.sum())} wrong")
    return figure


def pairs_picture(plt, model):
    """The score matrix of a consecutive-pairs model, a zoom, and its vectors where they have two dimensions."""
    c, (queries, keys) = model.config, query_key(model)
    scores, flat = queries @ keys.T, c.d_head == 2
    maps = [scores, scores[:16, :16]] if c.d_vocab > 16 else [scores]
    n = len(maps) + flat
    figure, [panels] = plt.subplots(1, n, figsize=(4.4 * n + 1, 4.8), squeeze=False)
    seeds = f"seed {c.seed}" + f" to {c.seed + c.seeds - 1}, the best" * (c.seeds > 1)
    figure.suptitle(f"consecutive pairs, V = {c.d_vocab}, D = {c.d_head}, {'with' if c.dummy else 'no'} dummy, {seeds}")
    heat_maps(panels[:len(maps)], ("all tokens", "the first 16"), maps, "key token", "query token", "score")
    if flat:
        for name, vectors, beside in (("query", queries, (3, 3)), ("key", keys, (-9, -9))):
            panels[-1].plot(*vectors.T.numpy(), linestyle="none", label=name)
            for token, point in enumerate(vectors.tolist()):
                panels[-1].annotate(token, point, beside, textcoords="offset points", fontsize=8)
        panels[-1].set(title="vectors", xlabel="first component", ylabel="second component")
        panels[-1].legend()
    return figure


def encoder_picture(plt, records):
    """Runs of a task by encoder-only models: accuracy by length and, at the longest, by carries or, where the task has
    none, by place; of the first run the learning curve of each answer digit and how many digits wrong answers have
    wrong."""
    figure, ((lengths, detail), (curve, wrong)) = plt.subplots(2, 2, figsize=(12, 8))
    longest = ", ".join(map(str, sorted({tested([r])[-1] for r in records})))
    first, most = records[0], records[0]["config"]["train_digits"]
    names = [f"{r['method']} {changed_options(r)}, seed {r['seed']}" for r in records]
    figure.suptitle(f"{first['task']}, encoder-only, trained on numbers of up to {most} digits")
    lengths.axvspan(1, most, color="0.9", label="training range")
    for number, (name, record) in enumerate(zip(names, records)):
        counts = {length: (a["correct"], a["n"]) for length, a in record["accuracy"].items()}
        draw_shares(lengths, counts, band=True, label=name)
        for by, counts in record.get("carries", {}).items():
            draw_shares(detail, counts, color=f"C{number}", marker="", linestyle={"nc": "-", "mc": ":"}[by])
        if "carries" not in record and "places" in record:
            right = record["places"][str(tested([record])[-1])]
            detail.plot(range(1, len(right) + 1), [100 * x for x in right], color=f"C{number}")
            detail.set(ylabel="right, percent", ylim=(-3, 103))
            detail.locator_params(axis="x", integer=True)
    lengths.set(xlabel="digits")
    detail.set(title=f"{longest} digits", xlabel="carries (solid), longest run of carries (dotted)"
               if "carries" in first else "place in the answer, from the left")
    detail.set_visible(bool(detail.lines))
    steps, digits = zip(*first.get("before", first).get("curve", first["curve"]))
    curve.plot(steps, 100 * torch.tensor(digits).numpy(), label=range(1, len(digits[0]) + 1))
    curve.set(xlabel="training step", ylabel=f"right at {most} digits, percent", title="the first run")
    curve.legend(title="digit from\nthe left", loc="center left", bbox_to_anchor=(1, 0.5))
    wrong.bar(list(first["wrong_digits"]), list(first["wrong_digits"].values()))
    wrong.set(xlabel="digits wrong in a wrong answer", ylabel="answers", title="the first run")
    figure.legend(*lengths.get_legend_handles_labels(), loc="outside lower center")
    return figure


def character_map(config, calibration):
    """The calibrated biases at training size as text: # strongest entry of its head, + open, . closed."""
    out, config = [], dataclasses.replace(config, penalty=0.0)
    for layer, pair in enumerate(make_bias(config, config.width, calibration).decoder, 1):
        for kind, bias in zip(("self", "cross"), pair):
            out.append(f"layer {layer} {kind}, heads 1 to {config.n_head}")
            marks = (bias > -INF).int() + (bias == bias.amax((1, 2), keepdim=True))                 # (H, T, S)
            for row in marks.transpose(0, 1).tolist():
                out.append("  " + "  ".join("".join(".+#"[mark] for mark in head) for head in row))
    return "\n".join(out)


def draw_pictures(folder, loaded, groups, question=None):
    """Every picture of a finished run, as `load` returns it -> PNG files in its folder; groups, as `read_records`
    returns them, hold the runs to draw beside it."""
    plt, folder, (model, config, calibration, teacher) = pyplot(), Path(folder), loaded
    if isinstance(model, PairsModel):
        return save_picture(pairs_picture(plt, model), folder / "pairs.png")
    [(record, key)] = records_in(folder)
    if isinstance(model, Encoder):
        others = [r for r in sum(groups.values(), []) if is_encoder(r) and r["task"] == record["task"] and r != record]
        return save_picture(encoder_picture(plt, [record, *others]), folder / "encoder.png")
    save = lambda name, figure: save_picture(figure, folder / f"{name}.png")
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    own = [record, *(r for r in groups[key] if r["seed"] != record["seed"])]
    save("accuracy", accuracy_picture(plt, groups | {key: own}, config.task))
    save("training", training_picture(plt, config, log))
    save("errors", errors_picture(plt, model, config, calibration, record["chains"]))
    models = [(config.method, model, config, calibration)]
    if calibration:
        models.insert(0, ("vanilla", teacher, teacher.config, None))
        for layer, figure in enumerate(bias_pictures(plt, config, calibration, teacher), 1):
            save(f"bias-layer{layer}", figure)
    if METHODS[config.method].bias == "window":
        save("window", window_picture(plt, config))
    if not question:
        length = min(20, max(config.lengths + config.hard))                             # fits a learned table
        operands = draw_test(config.task, length, 1, config.base, seeded(config.seed))
        question = TASKS[config.task].operator.join(decode(a[0].flip(0)) for a in operands)
    save("attention", attention_picture(plt, models, question))


# ======================================================================================
# 13. Benchmark
# ======================================================================================

class TorchTransformer(Transformer):
    """Ours with the layers of torch.nn.Transformer in the same shape; its only bias is the causal mask."""

    def __init__(self, config):
        super().__init__(config)
        shape = dict(d_model=config.d_model, nhead=config.n_head, dim_feedforward=config.d_ff, dropout=config.dropout,
                     batch_first=True, norm_first=config.norm == "pre")
        self.encoder = nn.Sequential(*(nn.TransformerEncoderLayer(**shape) for _ in range(config.n_encoder)))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), config.n_layer)

    def forward(self, source, target, bias):
        memory, mask = self.encoder(self.embed(source, 0)), bias.decoder[0][0][0]
        return self.head(self.norm(self.decoder(self.embed(target, 1), memory, tgt_mask=mask, tgt_is_causal=True)))


def literal_abc_bias(attention, M, N, directions, kappa):
    """`abc_bias` as the papers' Algorithm 1 writes it, corrected to Eq. 1: every element adds up its line anew. The
    (1, -1) direction aligns the top-right corners."""
    H, m, n = attention.shape
    A, out = attention.tolist(), torch.full((H, M, N), -INF)
    for h in range(H):
        for delta in directions:
            shift = N - n if delta == -1 else 0
            lines = {}                                  # a line is named by where it meets row 0, inside or outside
            for i in range(m):
                for j in range(n):
                    on_line = [A[h][i + k][j + k * delta] for k in range(-m, m + 1)
                               if 0 <= i + k < m and 0 <= j + k * delta < n]
                    lines[j - i * delta] = sum(on_line) / len(on_line)
            d = list(lines.values())
            mu = sum(d) / len(d)
            sigma = math.sqrt(sum((x - mu) ** 2 for x in d) / len(d))
            for i in range(M):
                for j in range(N):
                    value = lines.get(j - shift - i * delta)
                    if value is not None and value > mu + kappa * sigma:
                        out[h, i, j] = max(out[h, i, j], value - max(d))
    out[out.isneginf().all(2)] = 0
    return out


def interleaved(calls, rounds, device=torch.device("cpu"), warm=2):
    """Functions called in turn, `rounds` times after `warm` to warm up -> median seconds of each."""
    taken = [[] for _ in calls]
    for _ in range(warm + rounds):
        for call, times in zip(calls, taken):
            start = time.perf_counter()
            call()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - start)
    return [statistics.median(times[warm:]) for times in taken]


def step_times(config, device, rounds):
    """Median seconds of a training step -> ours, torch's, and the floor: the time that the products in it take at the
    rate of a 1024 x 1024 matrix product on this machine, as if the step's other work were free."""
    config = dataclasses.replace(config, method="vanilla", task="addition")
    numbers, bias = split_numbers(0)[0], to_device(make_bias(config, config.width), device)
    stream = batches(config, numbers, config.batch, [config.width], seeded(0))
    models = [kind(config).to(device) for kind in (Transformer, TorchTransformer)]

    def step(model):
        optimizer = torch.optim.Adam(model.parameters(), fused=device.type in ("cpu", "cuda"))
        return lambda: train_step(model, optimizer, 1e-3, *next(stream)[1:], bias, config.precision == "bf16")

    _, source, target = next(stream)
    with FlopCounterMode(display=False) as counter:
        models[0](source.to(device), target[:, :-1].to(device), bias).sum().backward()
    square = torch.rand(1024, 1024, device=device)
    ours, torchs, product = interleaved([*map(step, models), lambda: square @ square], rounds, device)
    return ours, torchs, counter.get_total_flops() / (2 * 1024 ** 3 / product)


def synthetic_run(length, n, device):
    """n questions of a length for a model with random weights that never ends its answers, and a calibration with the
    lines of windows -> model, calibration, source, target."""
    config = Config(task="addition", method="abc", kappa_cross=0.1, kappa_self=0.1)
    T, (blocks, _) = target_length(config.task, config.width), column_blocks(config.task, config.width)
    cross = torch.cat([window_bias(1, T, width, cross=True) for width in blocks], 2)
    attention = [x.exp().expand(1, config.n_head, -1, -1) for x in (window_bias(1, T, T), cross)]
    model = Transformer(config).to(device).eval()
    model.head.bias.data[TOKEN[END]] = -1e9
    operands = pad(config.task, draw_test(config.task, length, n, config.base, seeded(0)), length + 1)
    source, target = (x.to(device) for x in arrange(config.task, operands))
    return model, calibrate(config, *attention) * config.n_layer, source, target


def decoding_times(device, lengths):
    """Seconds to write an answer of each length by `generate_sparse`, the median of three, the lengths in turn, and by
    `generate`, once; None where its bias needs more than 1 GiB."""
    sparse, dense = [], dict.fromkeys(lengths)
    for length in lengths:
        model, calibration, source, _ = synthetic_run(length, 1, device)
        config, limit = model.config, length + 2
        keys = make_keys(config, length + 1, calibration)
        sparse.append(functools.partial(generate_sparse, model, source, limit, keys))
        if 4 * config.n_head * config.n_layer * limit * source.shape[1] < 2 ** 30:
            bias = to_device(make_bias(config, length + 1, calibration), device)
            [dense[length]] = interleaved([lambda: generate(model, source, limit, bias)], 1, device, warm=0)
    return dict(zip(lengths, interleaved(sparse, 3, device, warm=0))), dense


def peak_bytes(device):
    """Most memory in use so far: of the process, or of the GPU's tensors; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def benchmark(device):
    """Measured on this machine -> {"rows": [name of the ratio, what is compared, seconds of both; None: not run],
    "ratios", "peak_bytes", "device", "torch"}."""
    rows, paper = [], make_config("paper", width=8, lengths=(6,), batch=Config.batch)
    for name, shape, config, rounds in (("", "default", Config(), 100), ("paper_", "paper's", paper, 25)):
        ours, torchs, floor = step_times(config, device, rounds)
        what = f"training step, {shape} shape, batch 64 / torch.nn.Transformer"
        rows += [(f"{name}step_vs_torch", what, ours, torchs),
                 (f"{name}step_vs_floor", "the same / the matrix products in it", ours, floor)]
    attention = torch.rand(8, 62, 125)
    [loop] = interleaved([lambda: literal_abc_bias(attention, 62, 125, (1, 0, -1), 1.5)], 1, warm=0)
    [ours] = interleaved([lambda: abc_bias(attention, 62, 125, kappa=1.5)], 100)
    rows.append(("abc_vs_loop", "loops of Eq. 1 / `abc_bias`, 8 x 62 x 125", loop, ours))
    model, calibration, source, target = synthetic_run(60, 64, device)
    bias = to_device(make_bias(model.config, 61, calibration), device)
    rows.append(("evaluate_vs_greedy", "greedy decoding / evaluation in one pass, 64 questions of 60 digits",
                 *interleaved([lambda: generate(model, source, 62, bias),
                               lambda: exact_match(model, source, target, bias)], 3, device)))
    sparse, dense = decoding_times(device, (100, 1000, 10_000))
    rows += [(n, f"dense / line-sparse decoding of a {n:,}-digit answer", dense[n], sparse[n]) for n in sparse]
    rows.append(("digit_time_10000_vs_1000", "a digit of 10,000 / of 1,000, line-sparse",
                 sparse[10_000] / 10_000, sparse[1000] / 1000))
    ratios = {name: first and first / second for name, _, first, second in rows}
    ratios["sparse_vs_dense"] = {n: ratios.pop(n) for n in sparse}
    return {"ratios": ratios, "rows": rows, "peak_bytes": peak_bytes(device), "device": device_name(device),
            "torch": torch.__version__}


def benchmark_summary(found):
    """As a Markdown table."""
    show = lambda s: "not run" if s is None else f"{1e3 * s:.1f} ms" if s < 1 else f"{s:.1f} s"
    lines = ["| what | first | second | ratio |", "| --- | --- | --- | --- |"]
    for _, what, first, second in found["rows"]:
        ratio = f"{first / second:.2f}" if first else "not run"
        lines.append(f"| {what} | {show(first)} | {show(second)} | {ratio} |")
    peak = f"{found['peak_bytes'] / 2 ** 30:.2f} GiB" if found["peak_bytes"] else "not known"
    return "\n".join([*lines, "", f"{found['device']}, torch {found['torch']}, peak memory {peak}"])


# ======================================================================================
# 14. Command line
# ======================================================================================

def pick_device(name):
    """"auto", "cpu", "cuda" or "mps" -> torch.device. Raises: ValueError when it is not there."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if there[device])
    if not there[name]:
        raise ValueError(f"--device: {name} is not there; choose from {', '.join(d for d in there if there[d])}")
    return torch.device(name)


def summary(record):
    """The record as the lines that a run prints."""
    seconds, config, learned = record["seconds"], record["config"], round(2000 * record["interpolation_accuracy"])
    lines = [r for r in record["lines"] if config["layer"] == "own" or r["layer"] == config["n_layer"]]  # those in use
    out = [f"interpolate  {percent(learned, 2000)}% of 2,000 held-out numbers exact, "
           f"{record['examples']['interpolate']:,} examples, {seconds['interpolate']:.1f} s"]
    if lines:
        opened = [r for r in lines if r["line"]]
        out += [f"calibrate    {len(opened)} lines open, {len(lines) - len(opened)} heads without, "
                f"{seconds['calibrate']:.1f} s"]
        out += [f"  layer {r['layer']} {r['attention']:<5} head {r['head']}: {r['line']}, block {r['block']}, "
                f"offset {r['offset']}, z {r['z']:.1f}, open" for r in opened]
        out += [f"  no line in {kind}-attention stands out; none can if --kappa-{kind} reaches sqrt(lines - 1) sigmas"
                for kind in ("self", "cross") if not any(r["line"] for r in lines if r["attention"] == kind)]
        out += [f"retrain      tries: {record['tries']}, {record['examples']['retrain']:,} examples, "
                f"{seconds['retrain']:.1f} s"]
    out += [f"evaluate     {seconds['evaluate']:.1f} s; whole run {seconds['total']:.1f} s on {record['device']}", "",
            *exact_lines(record["accuracy"])]
    for length, sets in record["hard"].items():
        out.append(f"hard sets of {length} digits, right of n: "
                   + ", ".join(f"{name} {a['correct']}/{a['n']}" for name, a in sets.items()))
    return "\n".join(out)


class Kind(NamedTuple):
    """What belongs to a kind of run."""
    make: Callable                          # options -> config
    model: type
    run: Callable                           # config, device, report, keeper -> record, model, and more for Config
    summary: Callable


KINDS = {Config: Kind(make_config, Transformer, run, summary),
         PairsConfig: Kind(PairsConfig, PairsModel, run_pairs, pairs_summary),
         EncoderConfig: Kind(make_encoder_config, Encoder, run_encoder, encoder_summary)}
OPTIONS = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
TESTED = ("lengths", "hard", "samples", "long_samples")


def read_run(folder, asked_by):
    """DIR/checkpoint.pt -> (state, config). Raises: ValueError when it holds no run of this program."""
    with refused(f"{asked_by}: {str(folder)!r} holds no run of this program, or one of other options"):
        state = read_checkpoint(Path(folder) / "checkpoint.pt")
        kind = next(kind for kind in KINDS if state["config"].keys() == {x.name for x in dataclasses.fields(kind)})
        return state, kind(**state["config"])


def build(kind, config, weights):
    """A model with weights from a file; nothing is allocated for those that do not fit. Raises: ValueError."""
    with torch.device("meta"):
        model = kind(config)
    model.load_state_dict(dict(weights), assign=True)   # a copy: torch notes "assign" in the metadata of what it gets
    if not all(x.isfinite().all() for x in model.parameters()):
        raise ValueError("weights are nan or inf")
    return model.eval()


def load(folder, asked_by="--from"):
    """A finished run's folder -> (model, config, calibration, teacher). Raises: ValueError when it holds none."""
    state, config = read_run(folder, asked_by)
    if "model" not in state:
        raise ValueError(f"{asked_by}: the run in {str(folder)!r} is not finished; go on with --resume {str(folder)!r}")
    calibration = teacher = None
    with refused(f"{asked_by}: the model in {str(folder)!r} does not fit its options"):
        model = build(KINDS[type(config)].model, config, state["model"])
        if state["teacher"]:
            teacher = build(Transformer, dataclasses.replace(config, method="vanilla"), state["teacher"])
        if state["calibration"]:
            calibration = [tuple(Lines(**lines) for lines in pair) for pair in state["calibration"]]
            make_bias(config, config.width, calibration)
    return model, config, calibration, teacher


def load_teacher(folder, config):
    """The interpolating model of a finished abc run, as a training that took no steps. Raises: ValueError when it was
    trained on something else."""
    if getattr(config, "method", None) != "abc":
        raise ValueError("--teacher: only --method abc calibrates on one")
    _, other, _, teacher = load(folder, "--teacher")
    if teacher is None:
        raise ValueError(f"--teacher: {folder!r} holds no run of --method abc")
    for name in ("task", "base", "seed", "width", "n_encoder", "n_layer", "n_head", "d_model", "d_ff", "norm",
                 "dropout", "batch", "lr", "average", "warmup", "steps", "precision", "every", "goal"):
        has, wanted = getattr(other, name), getattr(config, name)
        if has != wanted:
            raise ValueError(f"--teacher: {folder!r} has {flag(name)} {has}, not {wanted}")
    result = {"steps": 0, "examples": 0, "tokens": 0, "seconds": 0.0, "exact": True}
    return {"model": teacher.state_dict(), "result": result}


def load_unfinished(folder, options):
    """An interrupted run's folder -> (state, config), with what is tested, and --force, as the options say. Raises:
    ValueError when it is finished, or other options differ."""
    state, config = read_run(folder, "--resume")
    if "model" in state:
        raise ValueError(f"--resume: the run in {folder!r} is finished; --eval tests it on other lengths")
    kept, free = dataclasses.asdict(config), (*TESTED, "force") if isinstance(config, Config) else ()
    for name in options:
        if name in OPTIONS and name not in free:
            has = kept.get(name, "no such option")
            if name not in kept or getattr(dataclasses.replace(config, **{name: options[name]}), name) != has:
                raise ValueError(f"{flag(name)}: the run in {folder!r} has {has}, not {options[name]}")
    with refused(f"--resume: the state of the run in {folder!r} does not fit its options"):
        for part in (*state["finished"].values(), *([state["current"]["parts"]] if state["current"] else [])):
            build(KINDS[type(config)].model, config, part["model"])
    return state, dataclasses.replace(config, **{name: options[name] for name in free if name in options})


class Progress:
    """Progress to stderr, one live line on a terminal and plain lines otherwise; every report to log.jsonl."""

    def __init__(self, path, quiet, keeper):
        self.log, self.keeper, self.quiet, self.live = open(path, "a+b"), keeper, quiet, sys.stderr.isatty()
        self.log.seek(0)
        text = self.log.read().rpartition(b"\n")[0]
        self.log.truncate(len(text) + bool(text))                                       # what a killed run left half
        before = re.findall(rb'^{"seconds": ([\d.]+)', text, re.MULTILINE)
        self.start = time.perf_counter() - float(before[-1] if before else 0)           # a resumed run goes on

    def __call__(self, **fields):
        if "step" not in fields:                        # in training the step is saved first
            self.keeper.check()
        seconds = time.perf_counter() - self.start
        self.log.write(json.dumps({"seconds": round(seconds, 2), **fields}).encode() + b"\n")
        self.log.flush()
        if "stage" in fields:
            self.stage, self.last = fields["stage"], None
            self.show(f"{self.stage} ...")
        if "step" in fields:
            text = f"{self.stage}: step {fields['step']}, loss {fields['loss']:.4f}"
            for name, said in (("accuracy", "held-out"), ("hard", "hard")):
                if name in fields:
                    text += f", {said} {fields[name]:.1%}"
            if self.last:                               # a resumed training does not begin with step 1
                pace = (seconds - self.last[0]) / max(1, fields["step"] - self.last[1])
                text += f", at most {pace * (fields['of'] - fields['step']):.0f} s left"
            self.last = seconds, fields["step"]
            self.show(f"{text}, {seconds:.0f} s")

    def show(self, text):
        try:
            if not self.quiet:
                print(f"\r{text:<100}" if self.live else f"{text}\n", end="", file=sys.stderr, flush=True)
        except BrokenPipeError:                         # nobody reads on; the run goes on
            self.quiet = True

    def close(self):
        self.log.close()
        if self.live and not self.quiet:
            print(file=sys.stderr)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line instead of the whole usage."""
        raise ValueError(message.removeprefix("argument "))


def whole_numbers(text):
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers with commas, but no spaces, between") from None


def parser():
    """Every field of the configurations is an option, its help with the defaults of each kind of run. Options left out
    are absent from the result, so that a preset can fill them."""
    p = Parser(prog="lengen.py", allow_abbrev=False, argument_default=argparse.SUPPRESS,
               description=__doc__.partition("\n")[0])
    known = {}
    for kind, label in ((Config, ""), (EncoderConfig, "encoders "), (PairsConfig, "consecutive ")):
        for field in dataclasses.fields(kind):
            _, defaults, choices = known.setdefault(field.name, (field, {}, {}))
            defaults.setdefault(field.default, f"{label}{field.default}")               # only defaults that differ
            choices.update(dict.fromkeys(field.metadata["choices"] or ()))
    for name, (field, defaults, choices) in known.items():
        kind = whole_numbers if isinstance(field.default, tuple) else type(field.default)
        how = dict(action=argparse.BooleanOptionalAction) if kind is bool else dict(type=kind)
        if choices:
            how["metavar"] = f"{{{','.join(choices)}}}"
        p.add_argument(flag(name), help=f"{field.metadata['help']} (default: {'; '.join(defaults.values())})", **how)
    p.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="where to run (default: auto)")
    p.add_argument("--out", help="folder of the run; a new one under runs/ by default")
    p.add_argument("--save-every", type=int, help="steps between checkpoints (default: 200)")
    p.add_argument("--resume", help="folder of an interrupted run to go on with")
    p.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    p.add_argument("--teacher", help="abc: folder of a run whose first model is calibrated on again, not trained")
    p.add_argument("--record", help="file to append the record to as one line; a run that it holds is not run "
                   "again, but by --eval tested again")
    p.add_argument("--deterministic", action="store_true", help="only algorithms that give the same result each time")
    p.add_argument("--debug", action="store_true", help="show where an error comes from")
    p.add_argument("--eval", help="folder of a finished run to test on other --lengths, --hard, --samples")
    p.add_argument("--json", action="store_true", help="print the record as one line of JSON")
    p.add_argument("--quiet", action="store_true", help="no progress on stderr")
    p.add_argument("--report", help="file of records, one a line, to print as Markdown tables")
    p.add_argument("--plot", action="store_true", help="draw pictures into the run's folder (needs matplotlib)")
    p.add_argument("--plot-from", nargs="+", help="folders of finished runs, or files of records, to draw")
    p.add_argument("--attend", help="question whose attention is drawn, such as 0361145144924")
    p.add_argument("--benchmark", action="store_true", help="print speeds as ratios, measured here")
    p.add_argument("--list", action="store_true", help="print tasks and methods")
    p.add_argument("--from", metavar="FOLDER", help="folder of a finished run, to --ask")
    p.add_argument("--ask", nargs="+", help="questions to a finished run; - reads one a line from standard input")
    return p


def refuse(options, allowed, why):
    """Raises: ValueError when an option is given that is not allowed."""
    for name in options:
        if name not in allowed:
            raise ValueError(f"{flag(name)}: {why}")


def read_config(options):
    """Parsed options -> Config, PairsConfig for "consecutive", EncoderConfig for tasks that only encoders have or
    if --model says so. Raises: ValueError for an option of another."""
    task, tasks = options.get("task"), {**TASKS, PairsConfig.task: None, **OPERATIONS}
    if task is not None and task not in tasks:
        raise ValueError(f"--task: {task!r} is unknown; choose from {', '.join(tasks)}")
    kinds = {"seq2seq": Config, "encoder": EncoderConfig, "universal": EncoderConfig}
    model = options.get("model", "universal" if task in OPERATIONS.keys() - TASKS.keys() else "seq2seq")
    if model not in kinds:
        raise ValueError(f"--model: {model!r} is unknown; choose from {', '.join(kinds)}")
    kind = PairsConfig if task == PairsConfig.task else kinds[model]
    given = {name: value for name, value in options.items() if name in OPTIONS}
    if kind is Config:
        given.pop("model", None)
    if "prime_lengths" in given and not given.get("prime") and not given.get("finetune"):
        raise ValueError("--prime-lengths: goes with --prime or --finetune")
    refuse(given, {field.name for field in dataclasses.fields(kind)},
           f"--task {task or kind.task}" + f" with --model {model}" * (kind is not PairsConfig) + " has no such option")
    return KINDS[kind].make(**given)


def new_folder(config, out):
    """The run's folder, made if it is not there; a fresh one under runs/ unless named. Raises: ValueError."""
    kind = (config.d_vocab, config.d_head) if isinstance(config, PairsConfig) else (config.method, config.preset)
    if out == "":
        raise ValueError("--out: '' is no folder")
    name = (config.task, *kind, f"seed{config.seed}", f"{datetime.now():%Y%m%d-%H%M%S-%f}")
    folder = Path("runs", "-".join(map(str, name))) if out is None else Path(out)
    with refused(f"--out: {str(folder)!r} cannot be a folder", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def clear(folder, overwrite):
    """Remove an earlier run, its pictures too. Raises: ValueError when there is one and overwrite is not set."""
    names = (r"result\.json|checkpoint\.pt|log\.jsonl|"
             r"(accuracy|attention|bias-layer\d+|encoder|errors|pairs|training|window)\.png")
    earlier = [path for path in folder.iterdir() if re.fullmatch(names, path.name)]
    if earlier and not overwrite:
        raise ValueError(f"--out: {str(folder)!r} already holds a run; choose another folder, add --overwrite, or go "
                         f"on with --resume")
    for path in earlier:
        path.unlink()


def find_record(config, path, given_teacher=False):
    """This run with this source in a file of records, made here if it is not there -> record, or None. Raises:
    ValueError."""
    with refused(f"--record: {path!r} cannot be written", OSError):
        open(path, "a").close()
    wanted = {"config": json.loads(json.dumps(dataclasses.asdict(config))), "source_sha256": source_sha256(config)}
    return next((record for record, _ in records_in(path)
                 if wanted.items() <= record.items() and is_given_teacher(record) == given_teacher), None)


def limit_memory():
    """On Linux, make an allocation beyond the memory that is free fail, or the system kills the process."""
    with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
        free = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
        resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(free[1]), resource.getrlimit(resource.RLIMIT_DATA)[1]))


def prepare(options, config):
    """Device and settings of this process -> torch.device. Raises: ValueError."""
    device = pick_device(options.get("device", "auto"))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:                                        # started by torchrun
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if processes()[1] > 1 and not isinstance(config, Config):
        raise ValueError(f"--task: {config.task} is trained by one process, not {processes()[1]}")
    if config.batch % processes()[1]:
        raise ValueError(f"--batch: {config.batch} examples cannot be shared by {processes()[1]} processes")
    if options.get("save_every", 1) < 1:
        raise ValueError(f"--save-every: {options['save_every']} is not positive")
    if device.type == "cpu":
        limit_memory()
    if "deterministic" in options:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high" if getattr(config, "precision", "") == "tf32" else "highest")
    return device


def without_compile(config, device):
    """The config as it is, or without --compile where torch cannot do it, which one line says."""
    try:
        if getattr(config, "compile", False):
            torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        return config
    except Exception as error:                          # of many kinds: no compiler, no Triton, an old Python
        print(f"lengen: --compile is left out: {type(error).__name__}", file=sys.stderr)
        return dataclasses.replace(config, compile=False)


def append_line(path, text):
    """In one write, so that runs beside each other share a file, and always on a line of its own. Raises: OSError when
    the disk is full, and then leaves no half line."""
    with open(path, "a+b", buffering=0) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        line = (b"" if file.read(1) in (b"", b"\n") else b"\n") + text.encode() + b"\n"
        written = file.write(line)
        if written < len(line):
            file.truncate(file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def publish(record, options, text):
    """Append the record to --record; print it. Of several processes only the first does."""
    if processes()[0] > 0:
        return
    if "record" in options:
        append_line(options["record"], json.dumps(record))
    print(json.dumps(record) if "json" in options else text)


def carry_out(config, device, folder, state, options):
    """Run, or go on from a state, in a folder that is locked -> exit code."""
    kind = KINDS[type(config)]
    keeper = Keeper(folder / "checkpoint.pt", dataclasses.asdict(config), options.get("save_every", 200), state)
    keeper.save()
    try:
        with contextlib.closing(Progress(folder / "log.jsonl", "quiet" in options, keeper)) as report, keeper.signals():
            report.show(f"{config.task} on {device}, in {folder}")
            record, model, *more = kind.run(config, device, report, keeper)
    except Interrupted as stop:
        print(f"lengen: interrupted; go on with: python lengen.py --resume {shlex.quote(str(folder))}",
              file=sys.stderr)
        return 128 + stop.args[0]
    write_file(folder / "result.json", json.dumps(record, indent=1).encode())
    calibration, teacher = more or (None, None)
    write_checkpoint(keeper.path, dict(config=keeper.config, model=model.cpu().state_dict(),
                                       teacher=teacher and teacher.cpu().state_dict(),
                                       calibration=[[lines._asdict() for lines in pair] for pair in calibration or []]))
    publish(record, options, f"{kind.summary(record)}\n\nrun kept in {folder}")
    if "plot" in options:
        draw_pictures(folder, load(folder), read_records(folder), options.get("attend"))
    return 0


def check_question(config, question):
    """Raises: ValueError when a run of this config has no attention to the question to be drawn."""
    if not isinstance(config, Config):
        raise ValueError("--attend: only encoder-decoders have this picture")
    _, source, _ = pose(config, question)
    if config.method == "ape" and len(source) > config.table:
        raise ValueError(f"--attend: a question of {len(source)} tokens does not fit the --table of {config.table}")


def train_command(options):
    """Run an experiment, or go on with an interrupted one; write its folder, print the result -> exit code."""
    resumed = "resume" in options
    state, config = load_unfinished(options["resume"], options) if resumed else ({}, read_config(options))
    device = prepare(options, config)
    config = without_compile(config, device)
    if "attend" in options and "plot" not in options:
        raise ValueError("--attend: goes with --plot or --plot-from")
    if "plot" in options:                               # what would fail after the run is told before it
        pyplot()
        if "attend" in options:
            check_question(config, options["attend"])
    recorded = find_record(config, options["record"], "teacher" in options) if "record" in options else None
    if recorded and not resumed:
        if processes()[0] == 0:
            print(f"{options['record']} holds this run", file=sys.stderr)
            if "json" in options:
                print(json.dumps(recorded))
        return 0
    if "teacher" in options:
        state = {"finished": {"interpolate 0": load_teacher(options["teacher"], config)}}
    if processes()[0] > 0:                              # the first process writes
        run(config, device, keeper=Keeper(state=state))
        return 0
    folder = Path(options["resume"]) if resumed else new_folder(config, options.get("out"))
    with locked(folder):
        if not resumed:
            clear(folder, "overwrite" in options)
        return carry_out(config, device, folder, state, options)


def eval_command(options):
    """Test a finished run on other lengths; its record, with the new figures, is printed and kept only by --record."""
    model, config, calibration, _ = load(options["eval"], "--eval")
    if isinstance(config, PairsConfig):
        raise ValueError(f"--eval: a run of the task {config.task} cannot be tested on other lengths")
    asked = {name: options[name] for name in TESTED if name in options}
    refuse(asked, {field.name for field in dataclasses.fields(config)}, "encoder-only models have no such option")
    if isinstance(config, EncoderConfig) and max(asked.get("lengths", (0,))) > config.width:
        raise ValueError(f"--lengths: {max(asked['lengths'])} digits do not fit the width of the run, {config.width}")
    config = dataclasses.replace(config, **asked)
    test = functools.partial(evaluate, calibration=calibration) if isinstance(config, Config) else evaluate_encoder
    device, record = prepare(options, config), records_in(options["eval"])[0][0]
    if "record" in options:
        find_record(config, options["record"])          # a file that cannot be written is told before the tests
    start = time.perf_counter()
    record.update(test(model.to(device), config), config=dataclasses.asdict(config),
                  evaluated=dict(device=device_name(device), source_sha256=source_sha256(config)))
    record.pop("before", None)                          # what preceded fine-tuning is known at the lengths of the run
    seconds, record["peak_bytes"] = record["seconds"], peak_bytes(device)
    seconds["evaluate"] = round(time.perf_counter() - start, 2)
    seconds["total"] = round(sum(taken for name, taken in seconds.items() if name != "total"), 2)
    publish(record, options, KINDS[type(config)].summary(record))


def ask_command(options):
    """Answer questions with a finished run; one that is outside the task costs a line on stderr, not the others."""
    if "from" not in options or "ask" not in options:
        raise ValueError("--from DIR and --ask QUESTION go together")
    limit_memory()
    model, config, calibration, _ = load(options["from"])
    if not isinstance(config, Config):
        raise ValueError("--ask: encoder-only models and the head of consecutive pairs answer no questions")
    code = 0
    for given in options["ask"]:
        for question in sys.stdin if given == "-" else [given]:
            try:
                question = re.sub(r"\s*([+*])\s*", r"\1", question.strip())
                print(ask(model, config, calibration, question), flush=True)
            except ValueError as error:
                print(f"lengen: {error}", file=sys.stderr)
                code = 2
    return code


def report_command(options):
    print(report(options["report"]), end="")


def plot_command(options):
    """Pictures of every folder named, all runs of a task in one accuracy picture; of files of records that one, beside
    the first. The biases also as text, which needs no matplotlib."""
    limit_memory()
    paths, question = options["plot_from"], options.get("attend")
    files = [path for path in paths if Path(path).is_file()]
    folders, groups = {path: load(path, "--plot-from") for path in paths if path not in files}, read_records(*paths)
    if question is not None and not folders:
        raise ValueError("--attend: files of records hold no model to draw; name the folder of a run")
    for _, config, *_ in folders.values():
        if question is not None:
            check_question(config, question)            # told before anything is drawn
    try:
        for path, loaded in folders.items():
            draw_pictures(path, loaded, groups, question)
    finally:                                            # without matplotlib, too; and last, as its reader may have gone
        for _, config, calibration, _ in folders.values():
            if calibration:
                print(character_map(config, calibration))
    if files:
        plain = {key: records for key, records in read_records(*files).items() if key[0] in TASKS and not key[2]}
        if not plain:
            raise ValueError(f"--plot-from: {', '.join(files)} hold no encoder-decoder with default settings to draw")
        for task in dict.fromkeys(task for task, *_ in plain):
            save_picture(accuracy_picture(pyplot(), plain, task), Path(files[0]).with_name(f"accuracy-{task}.png"))


def benchmark_command(options):
    found = benchmark(pick_device(options.get("device", "auto")))
    print(json.dumps(found) if "json" in options else benchmark_summary(found))


def list_command(options):
    print("tasks")
    for name, task in TASKS.items():
        print(f"  {name:<14} {task.about}")
    print(f"  {'consecutive':<14} does the sequence hold a neighbour of this integer? (one attention head)")
    for name, operation in OPERATIONS.items():
        print(f"  {name:<22} {operation.about} (encoder-only models{': --model encoder' * (name in TASKS)})")
    print("methods")
    for name, method in METHODS.items():
        print(f"  {name:<14} {method.where} ({method.source})")


# What each command takes beside itself and --debug.
COMMANDS = {"list": (list_command, ()), "benchmark": (benchmark_command, ("json", "device")),
            "report": (report_command, ()), "plot_from": (plot_command, ("attend",)),
            "eval": (eval_command, (*TESTED, "record", "json", "device", "deterministic")),
            "resume": (train_command, (*OPTIONS, "record", "plot", "attend", "json", "quiet", "device", "deterministic",
                                       "save_every")),
            "ask": (ask_command, ("from",)), "from": (ask_command, ())}


def choose_command(options):
    """-> the function for the options. Raises: ValueError for one that would be ignored."""
    for name, (command, more) in COMMANDS.items():
        if name in options:
            refuse(options, {name, "debug", *more}, f"has no effect on {flag(name)}")
            return command
    return train_command


def one_line(error):
    """What went wrong, for the user."""
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        return "out of memory; lower --batch, --d-model, --d-ff, --calibration-samples or the --lengths"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, (ValueError, FloatingPointError)):
        return text
    first, _, _ = text.partition("\n")
    return f"{type(error).__name__}: {first} (--debug shows where)"


def main(argv=None):
    """Command line -> exit code: 0 done, 1 the run failed, 2 bad input, 130 or 143 interrupted."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:                  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))
        if hasattr(getattr(sys, name), "reconfigure"):  # bytes or names that the encoding lacks end nothing
            getattr(sys, name).reconfigure(errors="backslashreplace")
    code, text, debug = 1, None, "--debug" in (sys.argv if argv is None else argv)
    try:
        options = vars(parser().parse_args(argv))
        code = choose_command(options)(options) or 0
        sys.stdout.flush()
    except SystemExit as stop:                          # --help
        code = stop.code
    except BrokenPipeError:                             # the reader has seen enough; the run is kept
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except KeyboardInterrupt:
        code, text = 130, "interrupted"
    except Exception as error:
        if debug:
            raise
        code, text = (2 if isinstance(error, ValueError) else 1), one_line(error)
    if text:
        print(f"lengen: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
