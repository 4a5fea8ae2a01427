# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

A transformer trained on numbers of about 6 digits answers questions of 60 and of 1,000 digits
exactly, once attention may only look where it looked on short numbers. This file trains it, finds
those places (Attention Bias Calibration, ABC) and tests it, beside the methods that fail.

    python lengen.py --task successor --method abc        # train, calibrate, retrain, test
    python lengen.py --task addition --method vanilla     # right at 6 digits, wrong at 10
    python lengen.py --ask 123+748                        # ask the newest finished run
    python lengen.py --list                               # tasks, methods, models

Read it from top to bottom; each section builds on those above it. 1 to 6 are ABC.

    1. Tasks                   digits in, tokens out
    2. Positions and biases    sinusoids, RoPE, relative tables, ALiBi, windows
    3. Attention               scores = (q k^T + relative) / sqrt(D) + bias; 0 neutral, -inf closed
    4. Transformer             methods, options, encoder-decoder, greedy decoding
    5. Calibration             average attention, find lines, continue them to any size
    6. Training                the loop, checkpoints, exact match, the three stages of ABC
    7. Consecutive pairs       one attention head, read completely
    8. Encoders                one pass, relative positions, priming
    9. Command line

Shapes: B batch, T queries, S keys, H heads, D head width, C = H * D model width, V vocabulary,
W digits of an operand; m x n is an attention matrix at training length, M x N at another. Lengths
count digits, not tokens. No run decides anything by numbers longer than it was trained on.

ABC v1: Duan and Shi, From Interpolation to Extrapolation: Complete Length Generalization for
Arithmetic Transformers, 2023. ABC v2: Duan, Shi and Xu, Attention Bias as an Inductive Bias: How to
Teach Transformers Simple Arithmetic, 2024. Jelassi: Jelassi et al., Length Generalization in
Arithmetic Transformers, 2023. Pairs: a study of consecutive pairs; it names no author.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import time
import zipfile
from collections import Counter
from itertools import accumulate, groupby
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

INF = float("inf")

# ----------------------------------------
# 1. Tasks: digits in, tokens out
#
# A digit's token is its value. Numbers are digit tensors (B, W), least significant digit
# first, so any length works.

VOCAB = "0123456789+*$&@"
START, END, PAD = "$", "&", "@"
LIMIT = 2 ** 20  # training numbers are 0 .. LIMIT, mainly of 6 digits (ABC v2, App. B)

def encode(text):
    """String of VOCAB symbols -> (T,) int64 tokens. Raises: ValueError on any other symbol."""
    if not set(text) <= set(VOCAB):
        raise ValueError(f"{text!r} has symbols that are not in the vocabulary {VOCAB}")
    return torch.tensor([VOCAB.index(symbol) for symbol in text], dtype=torch.int64)

def decode(tokens):
    """(T,) tokens -> string."""
    return "".join(VOCAB[token] for token in tokens)

def carry(columns, base):
    """Column sums (B, W), least significant first -> digits (B, W), carries out (B, W) bool.
    Negative columns borrow. Raises: ValueError when the last column carries or borrows."""
    digits, carried, rest = [], [], torch.zeros_like(columns[:, 0])
    for column in columns.unbind(1):
        total = column + rest
        digits.append(total % base)
        rest = total // base  # rounds down: -1 borrows
        carried.append(rest != 0)
    if rest.any():
        raise ValueError(f"the answer does not fit the width {columns.shape[1]}")
    return torch.stack(digits, 1), torch.stack(carried, 1)

def product(a, b):
    """Digits a (B, W), b (B, K) -> column sums (B, W) of a * b, without what lies beyond W."""
    W = a.shape[1]
    return sum(F.pad(a * digit[:, None], (k, 0))[:, :W] for k, digit in enumerate(b.unbind(1)))

class Task(NamedTuple):
    """A task is one entry of TASKS, and its sign a symbol of VOCAB; all else follows. Of a task
    without headroom `ask` tells the last digit written."""
    about: str
    columns: Optional[Callable]     # operands (B, W) -> column sums; `carry` makes them the answer
    operands: tuple = ("number",)   # "number": W digits, "digit": one, "short": --second-digits
    sign: str = ""                  # stands before the second operand
    headroom: int = 1               # digits by which answers may outgrow operands; 0: never shorter
    base: Optional[int] = None      # None: any base from 2 to 10
    admit: Callable = lambda *operands: operands    # operands drawn -> operands that have an answer
    steps: tuple = (2000, 600)      # of the first training and of the retraining
    models: tuple = ("seq2seq",)    # kinds of models that learn it
    modular: bool = False           # encoders: the answer is a remainder of --modulus

TASKS = {
    "successor": Task("n + 1", lambda a: a + (torch.arange(a.shape[1]) == 0), steps=(350, 350)),
    "addition": Task("a + b", lambda a, b: a + b, ("number", "number"), "+",
                     models=("seq2seq", "universal", "encoder")),
    "nx1": Task("a * b, b a single digit", product, ("number", "digit"), "*", steps=(1200, 1000)),
    "parity": Task("running xor of the bits, last bit first; the last one is the parity",
                   lambda a: a.cumsum(1) % 2, headroom=0, base=2, steps=(500, 300)),
    "parity-label": Task("parity in one digit, without the scratchpad",
                         lambda a: a.sum(1, keepdim=True) % 2, headroom=0, base=2),
}

def pad(task, operands, width):
    """Operands with their numbers padded with zeros to `width` digits."""
    return [a if kind == "digit" else F.pad(a, (0, width - a.shape[1]))
            for a, kind in zip(operands, TASKS[task].operands)]

def arrange(task, operands, base=10, align=False):
    """Operand digits (B, W), (B, 1) -> source (B, S), target (B, T + 1) tokens.

    Source `$0123+0748&` has the most significant digit first, target `$1780&` the least, the order
    in which carries run. align=True interleaves the operands, `$+00172438&`, and repeats a single
    digit beside each digit of the number. Source: ABC v2, Sec. 2 and App. C.4.
    """
    spec = TASKS[task]
    answer, _ = carry(spec.columns(*operands), base)
    mark = lambda text: encode(text).expand(len(answer), -1)
    body = [a.flip(1) for a in operands]
    if align and len(body) == 2:
        body = [mark(spec.sign), torch.stack(torch.broadcast_tensors(*body), 2).flatten(1)]
    else:
        body.insert(1, mark(spec.sign))
    source = torch.cat([mark(START), *body, mark(END)], 1)
    return source, torch.cat([mark(START), answer, mark(END)], 1)

def example(task, *operands, width=None, base=10, align=False):
    """One worked example: example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&").

    width: digits each number is padded to; by default enough for every answer of these lengths.
    Raises: ValueError for an unknown task, operands outside it, a bad base or a width too small.
    """
    known = [name for name, spec in TASKS.items() if "seq2seq" in spec.models]
    if task not in known or not 2 <= base <= 10:
        raise ValueError(f"no task {task!r} in base {base}; tasks are {', '.join(known)}")
    spec = TASKS[task]
    if len(operands) != len(spec.operands):
        raise ValueError(f"{task} takes {len(spec.operands)} operand(s), not {len(operands)}")
    base, width = spec.base or base, width or max(map(len, operands)) + spec.headroom
    for text, kind in zip(operands, spec.operands):
        if not text or not set(text) <= set(VOCAB[:base]):
            raise ValueError(f"{text!r} is not a number in base {base}")
        if len(text) > (1 if kind == "digit" else width):
            raise ValueError(f"{text!r} is too long for a {kind} at width {width}")
    digits = pad(task, [encode(text).flip(0)[None] for text in operands], width)
    if not all(map(torch.equal, spec.admit(*digits), digits)):
        raise ValueError(f"{task} is {spec.about}")
    source, target = arrange(task, digits, base, align)
    return decode(source[0]), decode(target[0])

def to_digits(numbers, width, base):
    """(B,) integers >= 0 -> (B, width) digits, without what lies beyond the width."""
    digits = []
    for _ in range(width):
        digits.append(numbers % base)
        numbers = numbers // base
    return torch.stack(digits, 1)

def n_digits(a):
    """Digits (B, W) -> how many each number has without zeros in front, (B,), at least 1."""
    return (torch.arange(1, a.shape[1] + 1) * (a > 0)).amax(1).clamp(min=1)

def question_width(task, digits, base=10):
    """Digits to which numbers of so many digits are padded; digits=0: to which training numbers
    are, those of their largest answer. Both leave as many zeros in front: one, for a carry (in
    binary sums two, since LIMIT alone has 21 digits), and none where answers do not grow."""
    spec = TASKS[task]
    base = spec.base or base
    top = to_digits(torch.tensor([LIMIT, LIMIT - 1]), 24, base)
    longest, usual = n_digits(top).tolist()
    if not spec.headroom:
        return digits or longest
    largest = [top if kind == "number" else top[:, :1] * 0 + base - 1 for kind in spec.operands]
    longest = max(longest, int(n_digits(carry(spec.columns(*largest), base)[0])[0]))
    return digits + max(spec.headroom, longest - usual) if digits else longest

def split_numbers(seed):
    """-> (training, held-out) integers, [0, 2^20] permuted and cut 7 : 1. Source: v2, App. B."""
    order = torch.randperm(LIMIT + 1, generator=torch.Generator().manual_seed(seed))
    cut = len(order) * 7 // 8
    return order[:cut], order[cut:]

def draw(task, B, base, number):
    """Operands for B questions; number() draws digits (B, W), single digits are uniform."""
    return TASKS[task].admit(*[torch.randint(base, (B, 1)) if kind == "digit" else number()
                               for kind in TASKS[task].operands])

def draw_test(task, length, samples, base):
    """Operands (B, length) of exactly `length` digits, B = min(b^L - b^(L-1), samples). Source: ABC
    v2, App. B, with samples = 10000."""
    B = min((base - 1) * base ** (length - 1), samples)
    return draw(task, B, base, lambda: torch.cat([torch.randint(base, (B, length - 1)),
                                                  torch.randint(1, base, (B, 1))], 1))

def draw_hard(task, length, B, base):
    """Questions that random numbers hardly ever contain: every kind of number below in the place of
    every operand, B of each -> operands, the name of each question, such as "99...9 + 1"."""
    place, top, half = torch.arange(length), base - 1, -(-base // 2)
    unit = (place == 0).long()

    def kinds(kind, before):
        a = torch.randint(base, (B, 1 if kind == "digit" else length))
        zero = a * 0
        if kind == "digit":
            return {"0": zero, "1": zero + 1, str(top): zero + top, "random": a}
        found = {"0": zero, "1": zero + unit, "10...0": zero + unit.flip(0), "99...9": zero + top,
                 "..99": a.masked_fill(place < length // 2, top), "low digits": a % half,
                 "high digits": top - a % half, "short": a * (place < 3), "random": a}
        for x in before:
            found |= {"the same": x, "complement": top - x + unit * (x > 0)}
        return found

    sets = {"": []}
    for kind in TASKS[task].operands:
        sets = {f"{name} {TASKS[task].sign} {more}" if name else more: [*before, x]
                for name, before in sets.items() for more, x in kinds(kind, before).items()}
    operands = [torch.cat(parts) for parts in zip(*sets.values())]
    return TASKS[task].admit(*operands), [name for name in sets for _ in range(B)]

# ----------------------------------------
# 2. Positions and biases: one pure function each
#
# Every bias is added to the scores: 0 is neutral, -inf closes. Rows are queries i, columns
# keys j.

def sinusoidal(positions, d_model):
    """Positions (T,) -> (T, C): channel 2p is sin(t / 10000^(2p/C)), channel 2p + 1 the cosine.

    Source: Vaswani et al. 2017, Sec. 3.5. Angles are float64, so that long positions keep digits.
    """
    pairs = torch.arange(0, d_model, 2, dtype=torch.float64)
    angles = positions.cpu().double()[:, None] * 10000.0 ** (-pairs / d_model)  # (T, C / 2)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :d_model]
    return waves.to(positions.device, torch.get_default_dtype())

def rope(x, positions):
    """Rotate channel pairs (2p, 2p + 1) of x (B, H, T, D) by positions (T,) * 10000^(-2p/D).

    Source: Su et al. 2021, Eqs. 14 and 34 (interleaved pairs). Raises: ValueError when D is odd.
    """
    D = x.shape[-1]
    if D % 2:
        raise ValueError(f"RoPE rotates pairs of channels; the head width {D} is odd")
    pairs = torch.arange(0, D, 2, dtype=torch.float64)
    angles = positions.cpu().double()[:, None] * 10000.0 ** (-pairs / D)  # (T, D / 2)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

def relative_scores(q, table, k=None, S=None):
    """q_i . a_ij, and with k also k_j . a_ij, where a_ij = table[clip(j - i, -K, K) + K].

    q (B, H, T, D), table (2K + 1, D), k (B, H, S, D) -> (B, H, T, S), unscaled; S = T by default.
    Source: Shaw et al. 2018, Eq. 4 (keys); Huang et al. 2020, method 4 (keys and queries). Jelassi
    et al. cite a Huang et al. of 2018; the layers that they name have this form.
    """
    T, K = q.shape[2], len(table) // 2
    S = k.shape[2] if k is not None else S or T
    i, j = torch.arange(T, device=q.device), torch.arange(S, device=q.device)
    index = ((j - i[:, None]).clamp(-K, K) + K).expand(*q.shape[:2], -1, -1)  # (B, H, T, S)
    scores = (q @ table.T).gather(3, index)
    if k is not None:
        scores = scores + (k @ table.T).transpose(2, 3).gather(2, index)
    return scores

def alibi_slopes(n_head):
    """-> (H,) slopes 2^(-8h/H), h = 1 .. H; if H is no power of two, those of the next lower power
    and then every second of twice that power. Source: Press et al. 2022, Sec. 3, and their code."""
    power = 2 ** int(math.log2(n_head))
    geometric = lambda n: [2.0 ** (-8 * h / n) for h in range(1, n + 1)]
    return torch.tensor(geometric(power) + geometric(2 * power)[0::2][:n_head - power])

def alibi_bias(n_head, T, S):
    """-> (H, T, S): -slope_h * |j - i|. Source: Press et al. 2022, Sec. 3. Differs: symmetric, for
    encoders and cross-attention; the causal mask is separate."""
    distance = (torch.arange(S) - torch.arange(T)[:, None]).abs()
    return -alibi_slopes(n_head)[:, None, None] * distance

def causal_bias(T):
    """-> (1, T, T): 0 for j <= i, -inf above the diagonal."""
    return torch.full((T, T), -INF).triu(1)[None]

def window_bias(w, T, S, cross=False, step=1):
    """-> (1, T, S): 0 inside the window, -inf outside. Self-attention opens the diagonal and w
    positions below it; cross-attention the anti-diagonal that starts at the end marker, `step`
    columns wide and `step` a row (2 for two interleaved operands), and w positions on either side.
    Source: ABC v2, App. C.4, which does not say where the anti-diagonal starts; here a row sees the
    digit in turn and those used before it, none to come."""
    i, j = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        right = (S - 1) - step * i  # last column of the band
        inside = (j >= right - (step - 1) - w) & (j <= right + w)
    else:
        inside = (j <= i) & (j >= i - w)
    return torch.zeros(T, S).masked_fill(~inside, -INF)[None]

# ----------------------------------------
# 3. Attention

class OpenKeys(NamedTuple):
    """A bias that is nearly everywhere -inf, without the matrix: query i may see only K keys."""
    columns: torch.Tensor  # (T, K)
    values: torch.Tensor  # (H, T, K), added to their scores

class MultiHeadAttention(nn.Module):
    """scores = (q k^T + relative) / sqrt(D) + bias; weights = softmax(scores); output = weights v.

    relative: "" none, "k" Shaw keys, "kq" keys and queries, at offsets -clip .. clip. rotate:
    function of q or k (B, H, T, D) and positions (T,), such as `rope`. d_head, d_out: widths other
    than d_model / n_head and d_model. Source: Vaswani et al. 2017, Sec. 3.2; bias: ABC v2, Eq. 2.
    """

    def __init__(self, d_model, n_head, relative="", clip=16, rotate=None, dropout=0.0,
                 d_head=None, d_out=None):
        super().__init__()
        if d_model % n_head and d_head is None:
            raise ValueError(f"{n_head} heads do not divide the width {d_model}")
        self.n_head, self.d_head = n_head, d_head or d_model // n_head
        self.relative, self.rotate = relative, rotate
        self.q = nn.Linear(d_model, n_head * self.d_head)
        self.k = nn.Linear(d_model, n_head * self.d_head)
        self.v = nn.Linear(d_model, n_head * self.d_head)
        self.out = nn.Linear(n_head * self.d_head, d_out or d_model)
        self.dropout = nn.Dropout(dropout)
        if relative:
            self.table = nn.Parameter(torch.randn(2 * clip + 1, self.d_head) / self.d_head ** 0.5)

    def forward(self, x, memory, bias=None):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) or OpenKeys
        -> output (B, T, C), weights (B, H, T, S), with OpenKeys (B T, H, 1, K). A row whose keys
        are all closed attends to nothing: weights and output are 0 there, not nan."""
        if isinstance(bias, OpenKeys):  # each query becomes a question of its own with K keys;
            # only calibrated methods, which need no positions, come here
            near = memory[:, bias.columns.to(x.device)].flatten(0, 1)  # (B T, K, C)
            values = bias.values.to(x).transpose(0, 1)[:, :, None].repeat(len(x), 1, 1, 1)
            y, weights = self(x.flatten(0, 1)[:, None], near, values)
            return y.view(*x.shape[:2], -1), weights
        heads = lambda y: y.unflatten(-1, (self.n_head, self.d_head)).transpose(1, 2)
        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))  # (B, H, ., D)
        if self.rotate:
            q, k = (self.rotate(y, torch.arange(y.shape[2])) for y in (q, k))
        scores = q @ k.transpose(2, 3)  # (B, H, T, S)
        if self.relative:
            both = k if self.relative == "kq" else None
            scores = scores + relative_scores(q, self.table, both, k.shape[2])
        scores = scores / math.sqrt(self.d_head)
        if bias is None:
            weights = scores.softmax(-1)
        else:
            bias = bias.to(scores)
            closed = bias.isneginf().all(-1, keepdim=True)
            weights = (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0)
        y = self.dropout(weights) @ v  # (B, H, T, D)
        return self.out(y.transpose(1, 2).flatten(2)), weights

# ----------------------------------------
# 4. Transformer

class Method(NamedTuple):
    """An entry of METHODS names the functions, or the modules if they are learned, of a method.

    position: config -> function (side, T) -> (T, C), added to the embeddings of the "source" or
    "target". rotate: see MultiHeadAttention. bias: config -> function (layer, kind, T, S) ->
    (1 or H, T, S), OpenKeys or None, added to the scores; kind is "encoder", "self" or "cross".
    """
    about: str
    source: str
    position: Optional[Callable] = None
    rotate: Optional[Callable] = None
    relative: str = ""              # relative table in every attention: "k" or "kq"
    bias: Optional[Callable] = None
    lines: bool = False             # only the place of a key counts, so training varies the width
    align: bool = False             # the source interleaves its two operands
    calibrated: bool = False        # the bias comes from a model trained before

def sinusoids(config, period=None):
    """Sinusoids of the position index, with a period modulo it (ABC v2, App. C.4). Differs: a
    cyclic source counts from its end, where windows start."""
    @functools.lru_cache(maxsize=64)
    def at(side, T):
        index = torch.arange(T)
        if period:
            index = (index.flip(0) if side == "source" else index) % period
        return sinusoidal(index, config.d_model)
    return at

class LearnedPositions(nn.Embedding):
    """A learned vector for each of 4,096 positions."""

    def __init__(self, config):
        super().__init__(4096, config.d_model)
        nn.init.normal_(self.weight, std=config.embedding_std)

    def forward(self, side, T):
        if T > len(self.weight):
            raise ValueError(f"{T} tokens do not fit {len(self.weight)} learned positions")
        return self.weight[:T]

def window(config, w=1):
    step = 2 if config.align else 1
    return lambda layer, kind, T, S: (
        None if kind == "encoder" else window_bias(w, T, S, kind == "cross", step))

def alibi(config, kinds=("encoder", "self", "cross")):
    return lambda layer, kind, T, S: alibi_bias(config.n_head, T, S) if kind in kinds else None

WINDOW = dict(bias=window, lines=True, align=True)
METHODS = {
    "vanilla": Method("sinusoids on the embeddings", "Vaswani et al. 2017", sinusoids),
    "nope": Method("no positions", "Kazemnejad et al. 2023"),
    "ape": Method("learned positions on the embeddings", "Gehring et al. 2017", LearnedPositions),
    "alibi": Method("ALiBi, symmetric, in every attention", "Press et al. 2022", bias=alibi),
    "alibi-decoder": Method("sinusoids, ALiBi in the decoder's self-attention", "code of ABC v2",
                            sinusoids, bias=lambda config: alibi(config, ("self",))),
    "rope": Method("rotated queries and keys, every attention", "Su et al. 2021", rotate=rope),
    "rpe-k": Method("relative table for keys, every attention", "Shaw et al. 2018", relative="k"),
    "rpe-kq": Method("relative table for keys and queries", "Huang et al. 2020", relative="kq"),
    "window": Method("sinusoids, windows in the decoder", "ABC v2, +w", sinusoids, **WINDOW),
    "window-cyclic": Method("the same, position index modulo 3", "ABC v2, +T",
                            lambda config: sinusoids(config, period=3), **WINDOW),
    "window-nope": Method("windows in the decoder, no positions", "ABC v2, NoPE+w", **WINDOW),
    "abc": Method("bias calibrated on a vanilla model, no positions", "ABC v2, Sec. 4", lines=True,
                  calibrated=True),
}

# Defaults by kind of model; an option that is not in a kind's table has no effect on it. None:
# another option decides. "paper": ABC v2, App. B and D, batch and steps of the authors' code;
# Jelassi, Sec. 2.2, 15,000 epochs of 5,000 examples.
COMMON = dict(task="successor", model=None, preset="fast", seed=0, precision="float32")
FAST = {
    "seq2seq": dict(
        method="abc", base=10, n_encoder=0, n_layer=1, n_head=4, d_model=64, dropout=0.0, clip=16,
        optimizer="muon", lr=4e-3, batch=64, steps=None, retrain_steps=None, rules="robust",
        kappa_cross=None, kappa_self=None, width=None, lengths=(6, 10, 20, 60), samples=1000),
    "encoder": dict(
        method="rpe-k", size="small", n_encoder=None, n_head=None, d_model=None, dropout=0.1,
        clip=None, optimizer="adam", lr=1e-3, batch=64, steps=2000, retrain_steps=1000, width=None,
        lengths=(5, 6, 10), samples=1000, train_digits=5, second_digits=3, modulus=100, even=False,
        n_train=5000, prime=0, prime_lengths=None, finetune=0),
    "head": dict(
        method="nope", d_model=128, d_head=32, optimizer="adam", lr=1e-4, batch=1000, steps=10_000,
        lengths=(5,), samples=10_000, d_vocab=16, dummy=False, plant=0.0)}
PAPER = {
    "seq2seq": dict(n_encoder=1, n_layer=6, n_head=8, d_model=128, dropout=0.3, optimizer="adam",
                    lr=1e-5, batch=512, steps=460_000, retrain_steps=46_000, rules="paper",
                    samples=10_000),
    "encoder": dict(size="standard", lr=1e-4, batch=32, steps=2_343_750, samples=10_000,
                    lengths=(5, 6, 10, 15, 20)),
    "head": {}}
SIZES = {"small": (2, 64, 4), "base": (6, 512, 8), "standard": (6, 1024, 16),
         "large": (10, 1024, 16)}  # n_encoder, d_model, n_head
MODELS = {"seq2seq": "encoder-decoder that answers digit by digit (ABC)",
          "universal": "encoder that applies one layer again and again (Jelassi)",
          "encoder": "encoder with layers of their own (Jelassi)",
          "head": "one attention head (Pairs)"}

def option(help, low=1, high=10 ** 9, choices=None, needs=None):
    """A field of Config; its checks, its place on the command line and its help are made from it.
    needs: field of Method without which a method does not have the option."""
    meta = dict(help=help, low=low, high=high, choices=choices, needs=needs)
    return dataclasses.field(default=None, metadata=meta)

def flag(name):
    return "--" + name.replace("_", "-")

@dataclasses.dataclass
class Config:
    """All that a run depends on; what is not given comes from the preset, the model and the task.
    An option without effect is None. Raises: ValueError naming the option."""
    task: str = option("what to learn", choices=TASKS)
    model: str = option("kind of model, by default the first that learns the task", choices=MODELS)
    method: str = option("how positions and attention are treated", choices=METHODS)
    preset: str = option("defaults of all else", choices=("fast", "paper"))
    seed: int = option("of every random stream", 0, 2 ** 32)
    precision: str = option("of products in training", choices=("float32", "bf16"))
    base: int = option("of the numbers; parity always has 2", 2, 10)
    size: str = option("of encoders", choices=SIZES)
    n_encoder: int = option("encoder layers or rounds", 0, 100)
    n_layer: int = option("decoder layers", 1, 100)
    n_head: int = option("attention heads")
    d_model: int = option("width", 1, 8192)
    dropout: float = option("probability", 0, 0.99)
    clip: int = option("relative tables cover offsets -clip to clip", needs="relative")
    optimizer: str = option("muon for matrices of layers, or adam", choices=("muon", "adam"))
    lr: float = option("peak learning rate", 1e-12, 10)
    batch: int = option("examples a step", 1, 10 ** 5)
    steps: int = option("of the first training, by default of the task")
    retrain_steps: int = option("of retraining or fine-tuning")
    rules: str = option("of calibration", choices=("robust", "paper"), needs="calibrated")
    kappa_cross: float = option("drop-off of cross-attention lines (robust 0.3, paper 4.5)", -1e6,
                                1e6, needs="calibrated")
    kappa_self: float = option("drop-off of self-attention lines (robust 0.5, paper 0.87)", -1e6,
                               1e6, needs="calibrated")
    width: int = option("digits of every number, by default what the longest needs, and up to 8 "
                        "more to train methods with lines")
    lengths: tuple = option("digits tested; hard questions at the longest up to 60", 1, 10 ** 5)
    samples: int = option("questions a length, a fifth above 100 digits", 1, 10 ** 6)
    # encoders, section 8
    train_digits: int = option("digits of training numbers, at most", 1, 18)
    second_digits: int = option("products: digits of the second operand", 1, 18)
    modulus: int = option("of modular tasks", 2)
    even: bool = option("train on numbers of each length equally often")
    n_train: int = option("first operands in the training set", 1, 10 ** 7)
    prime: int = option("how many of them are long, priming examples", 0)
    prime_lengths: tuple = option("digits of these, by default the longest tested")
    finetune: int = option("afterwards train on this many long examples", 0)
    # consecutive pairs, section 7
    d_vocab: int = option("integers", 4, 2 ** 16)
    d_head: int = option("width of queries and keys", 1, 8192)
    dummy: bool = option("a dummy token before each sequence")
    plant: float = option("probability that two places are made a pair", 0, 1)

    def __post_init__(self):
        fields = dataclasses.fields(self)
        self.task = "successor" if self.task is None else self.task
        check_option(fields[0], self.task)
        spec = TASKS[self.task]
        self.model = spec.models[0] if self.model is None else self.model
        if self.model not in spec.models:
            raise ValueError(f"--model: {self.model!r} does not learn {self.task}; choose from "
                             f"{', '.join(spec.models)}")
        usual = COMMON | FAST[self.kind]
        if self.preset == "paper":
            usual |= PAPER[self.kind]
        elif self.kind == "seq2seq":
            usual |= dict(steps=spec.steps[0], retrain_steps=spec.steps[1])
        size = SIZES.get(self.size or usual.get("size"), ())
        usual |= zip(("n_encoder", "d_model", "n_head"), size)
        for field in fields:
            name, value, needs = field.name, getattr(self, field.name), field.metadata["needs"]
            useless = "model" if name not in usual else (
                "method" if needs and not getattr(METHODS[self.method], needs) else "")
            if useless and value is not None:
                raise ValueError(f"{flag(name)}: has no effect on --{useless} "
                                 f"{getattr(self, useless)}")
            if value is None and not useless:
                value = usual[name]
                setattr(self, name, value)
            if value is not None:
                check_option(field, value)
        # values that follow from others, and checks of options against each other
        needed, heads, method = 0, self.n_head or 1, METHODS[self.method]
        if self.kind == "encoder" and method.lines or self.kind == "head" and self.method != "nope":
            raise ValueError(f"--method: {self.method} does not go with --model {self.model}")
        if self.kind == "seq2seq":
            self.base = spec.base or self.base
            needed = question_width(self.task, 0, self.base)
            if self.preset == "paper":  # the authors' fixed width
                self.width = self.width or max(max(self.lengths) + 1, needed)
        if self.kind == "encoder":
            if self.prime or self.finetune:
                self.prime_lengths = self.prime_lengths or (max(self.lengths),)
            elif self.prime_lengths:
                raise ValueError("--prime-lengths: goes with --prime or --finetune")
            if self.prime > self.n_train:
                raise ValueError(f"--prime: {self.prime} of {self.n_train} training examples")
            needed = max(*self.lengths, *self.prime_lengths or (), self.train_digits,
                         self.second_digits * ("short" in spec.operands),
                         len(str(self.modulus - 1)) * spec.modular)
            self.width = self.width or needed
            self.clip = self.clip or 2 * self.width
        if self.width and self.width < needed:
            raise ValueError(f"--width: {self.width} is too narrow; {needed} digits are needed")
        if self.d_model % heads or method.rotate and self.d_model // heads % 2:
            raise ValueError(f"--n-head: {heads} heads do not divide --d-model {self.d_model}, or "
                             "not into the even widths that RoPE needs")

    @property
    def kind(self):
        return "encoder" if self.model in ("universal", "encoder") else self.model

    @property
    def align(self):
        """Do sources interleave their two operands, as windows need it?"""
        return METHODS[self.method].align and len(TASKS[self.task].operands) == 2

    @property
    def widths(self):
        """Widths of training. At one width END always comes in the same row; nine teach methods
        with lines that it comes where the source ends."""
        first = self.width or question_width(self.task, 0, self.base)
        return range(first, first + 9) if METHODS[self.method].lines and not self.width else [first]

    @property
    def embedding_std(self):
        """1.33 are the embeddings of ABC's authors. Differs in the preset "fast": beside smaller
        ones positions stand out; from 1 on addition takes about twice as many steps."""
        return 1.33 if self.preset == "paper" and self.kind == "seq2seq" else 0.3

def check_option(field, value):
    """Raises: ValueError when a value is of the wrong type or out of the field's limits."""
    low, high, choices = (field.metadata[key] for key in ("low", "high", "choices"))
    name, kind = flag(field.name), field.type
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{name}: {value!r} is not of type {kind.__name__}")
    if choices and value not in choices:
        raise ValueError(f"{name}: {value!r} is unknown; choose from {', '.join(choices)}")
    numbers = value or (0,) if kind is tuple else () if kind in (str, bool) else (value,)
    if not all(type(n) in (int, kind) and low <= n <= high for n in numbers):  # nan fails, too
        raise ValueError(f"{name}: {value} is not between {low} and {high}")

class Layer(nn.Module):
    """Self-attention, cross-attention if there is a memory, feed-forward; a norm before each, in
    the preset "paper" after each."""

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
        """x plus the sublayer of it, with norm i before or after."""
        x = x + self.dropout(sublayer(self.norms[i](x) if self.pre else x))
        return x if self.pre else self.norms[i](x)

    def forward(self, x, self_bias=None, memory=None, cross_bias=None):
        """x (B, T, C), memory (B, S, C) -> (B, T, C)."""
        x = self.residual(0, x, lambda y: self.self_attention(y, y, self_bias)[0])
        if self.cross_attention:
            x = self.residual(1, x, lambda y: self.cross_attention(y, memory, cross_bias)[0])
        return self.residual(-1, x, self.feed_forward)

class Transformer(nn.Module):
    """Encoder-decoder; bias: function as in `Method`, in place of the method's."""

    def __init__(self, config, bias=None):
        super().__init__()
        self.config, method, C = config, METHODS[config.method], config.d_model
        self.embedding = nn.Embedding(len(VOCAB), C)
        nn.init.normal_(self.embedding.weight, std=config.embedding_std)
        self.position = method.position and method.position(config)
        self.bias = bias or (method.bias and method.bias(config)) or (lambda *place: None)
        self.dropout = nn.Dropout(config.dropout)
        layers = [Layer(config, cross=False) for _ in range(config.n_encoder)]
        shared = layers[:1] * config.n_encoder
        self.encoder = nn.ModuleList(shared if config.model == "universal" else layers)
        self.decoder = nn.ModuleList(Layer(config, cross=True) for _ in range(config.n_layer or 0))
        self.norm = nn.Identity() if config.preset == "paper" else nn.LayerNorm(C)
        self.head = nn.Linear(C, len(VOCAB))

    def embed(self, tokens, side):
        """Tokens (B, T) -> (B, T, C)."""
        x = self.embedding(tokens)
        if self.position:
            x = x + self.position(side, tokens.shape[1]).to(x)
        return self.dropout(x)

    def read(self, source):
        """Source (B, S) -> memory (B, S, C)."""
        memory, S = self.embed(source, "source"), source.shape[1]
        for n, layer in enumerate(self.encoder):
            memory = layer(memory, self.bias(n, "encoder", S, S))
        return memory

    def biases(self, T, S):
        """-> [(self (1 or H, T, T) with the causal mask, cross (1 or H, T, S) or None)], a pair a
        decoder layer; OpenKeys may take the place of either."""
        pairs, device = [], self.head.weight.device
        for n in range(len(self.decoder)):
            own = self.bias(n, "self", T, T)
            if not isinstance(own, OpenKeys):
                own = causal_bias(T).to(device) + (0.0 if own is None else own.to(device))
            pairs.append((own, self.bias(n, "cross", T, S)))
        return pairs

    def forward(self, source, target, bias=None):
        """source (B, S), target (B, T) -> logits (B, T, V). bias: as `biases` returns it, in place
        of the model's own. Raises: ValueError when it does not fit the layers, heads or tokens."""
        T, S = target.shape[1], source.shape[1]
        pairs = self.biases(T, S) if bias is None else bias
        if len(pairs) != len(self.decoder):
            raise ValueError(f"bias: {len(pairs)} (self, cross) pairs, {len(self.decoder)} layers")
        memory, x = self.read(source), self.embed(target, "target")
        for n, (layer, pair) in enumerate(zip(self.decoder, pairs), 1):
            for kind, part, keys in zip(("self", "cross"), pair, (T, S)):
                fits = [(H, T, keys) for H in (1, self.config.n_head)]
                if isinstance(part, torch.Tensor) and part.shape not in fits:
                    raise ValueError(f"bias: {kind} of layer {n} is {[*part.shape]}, not {fits}")
            x = layer(x, pair[0], memory, pair[1])
        return self.head(self.norm(x))

@torch.no_grad()
def generate(model, source, limit, bias=None):
    """Greedy decoding: source (B, S) -> target (B, limit + 1) tokens, START first; what comes
    behind an END means nothing. bias: as in `Transformer.forward`, for `limit` rows.

    All tokens are made at once from those before them, until none changes. After k passes the first
    k are those of greedy decoding, so nothing else can come out; usually few passes do.
    """
    model.eval()
    target = torch.full((len(source), limit + 1), VOCAB.index(START), device=source.device)
    for _ in range(limit):
        tokens = model(source, target[:, :-1], bias).argmax(-1)
        if torch.equal(tokens, target[:, 1:]):
            break
        target[:, 1:] = tokens
    return target

# ----------------------------------------
# 5. Attention Bias Calibration
#
# A line is a set of matrix elements along (1, 1), (1, 0) or (1, -1), and has one value, the
# mean attention along it. Lines that stand out are kept; to extend a matrix is to continue
# them. The columns may be cut into blocks, one an operand, whose lines are continued block
# by block: as numbers grow, the first operand of a sum moves away from the end of the source,
# and its lines move along. One block over all columns is the paper's algorithm.

class Line(NamedTuple):
    """An open line. offset: key - query along (1, 1), the column along (1, 0); along (1, -1) the
    column, counted from the right, minus the query. Columns count within the block."""
    head: int
    direction: int
    block: int
    offset: int
    value: float                    # d_l - d_max, the bias along it
    z: float                        # (d_l - mu) / sigma
    layer: int = 0
    attention: str = "cross"

RULES = {"robust": dict(directions=(1, 0, -1), kappa=0.3, reach=True, support=0.5, empty="first"),
         "paper": dict(directions=(1, 0, -1), kappa=4.5, reach=False, support=0.0, empty="all")}

def lines_along(attention, direction):
    """Attention (H, m, n) -> [(offset, elements (H, length))] of every line in a direction."""
    _, m, n = attention.shape
    if direction == 0:
        return [(j, attention[:, :, j]) for j in range(n)]
    if direction == -1:
        attention = attention.flip(2)
    return [(offset, attention.diagonal(offset, 1, 2)) for offset in range(1 - m, n)]

def find_lines(attention, directions, kappa, reach, support, blocks=None, markers=None, empty=None):
    """The lines of attention (H, m, n) that stand out -> list of Line. Source: ABC v2, Eq. 1:

        dropoff:  d_l - d_max  if d_l > mu + kappa * sigma,  else -inf

    mu and sigma run over the lines of a head and direction. reach: kappa is a share of
    sqrt(lines - 1), the largest z that one line can have: the same rule at every size. support:
    lines with no more than this share of the rows do not count (a mean over an element or two in a
    corner is noise). blocks: columns of each block. markers (n,) bool: columns where a vertical may
    open (inside a number it would be a digit at a fixed place from the left).

    Differs: the printed `d_l - d_max > threshold` never holds for a positive threshold; the code of
    the authors and this one compare d_l.
    """
    _, m, n = attention.shape
    blocks, found = blocks or [n], []
    markers = torch.ones(n, dtype=torch.bool) if markers is None else markers
    for direction in directions:
        lines = [(b, offset, x.mean(1)) for b, part in enumerate(attention.split(blocks, 2))
                 for offset, x in lines_along(part, direction) if x.shape[1] > support * m]
        if not lines:
            continue
        d = torch.stack([mean for _, _, mean in lines], 1)  # (H, L)
        mu, sigma = d.mean(1, keepdim=True), d.std(1, unbiased=False, keepdim=True)
        flat = sigma <= 1e-5 * mu.abs()  # rounding is no pattern
        z = ((d - mu) / sigma.masked_fill(flat, 1)).masked_fill(flat, -INF)
        value = d - d.amax(1, keepdim=True)
        threshold = kappa * math.sqrt(len(lines) - 1) if reach else kappa
        for h, l in (z > threshold).nonzero().tolist():
            b, offset, _ = lines[l]
            if direction or markers.split(blocks)[b][offset]:
                found.append(Line(h, direction, b, offset, float(value[h, l]), float(z[h, l])))
    return found

def open_keys(lines, H, M, blocks):
    """Lines continued to M rows and blocks of these widths -> OpenKeys; its first key is column 0,
    closed unless a line runs there.

    Along (1, 1) the bias depends on j - i alone, as Shaw et al.'s relative table does, but it is a
    scalar, and -inf beyond the offsets seen. Source: ABC v2, Eq. 1 (case distinction), App. E.1.
    """
    rows, starts = torch.arange(M), [0, *accumulate(blocks)]
    columns, values = [rows * 0], [torch.full((H, M), -INF)]
    place = lambda line: (line.direction, line.block, line.offset)
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

def fill_empty(bias, empty, mask=0.0):
    """Bias (H, M, N) + mask, with a 0 in rows where nothing is open: at every key ("all": the
    paper's transparent head) or at column 0 ("first": the same at every length of the input)."""
    nothing = (bias + mask).isneginf().all(2, keepdim=True)
    if empty == "first":
        nothing = nothing & (torch.arange(bias.shape[2]) == 0)
    return bias.masked_fill(nothing, 0) + mask

def abc_bias(attention, M, N, rules="robust", blocks=None, markers=None, mask=0.0, **changes):
    """Attention (H, m, n) of a model that interpolates -> bias (H, M, N) that continues its lines:
    d_l - d_max along those open, -inf elsewhere. Source: ABC v2, Eq. 1 and Algorithm 1.

    rules: "robust", for small matrices, too, or "paper"; `changes` replace single ones of RULES:
    "paper" with `directions` and `kappa` is Eq. 1 to the letter. blocks: [(columns now, columns
    then)], by default [(n, N)]. mask: `causal_bias(M)` for causal self-attention, or lines may open
    entries after the query. Raises: ValueError on attention that is not finite, of one layer and
    averaged over the batch, on unknown rules or directions, or blocks that do not add up.
    """
    if rules not in RULES or not set(changes) <= set(RULES["paper"]):
        raise ValueError(f"unknown rules {rules!r}, {changes}; known are {RULES}")
    rule = RULES[rules] | changes
    if attention.dim() != 3 or not attention.isfinite().all():
        raise ValueError(f"attention is finite, (H, m, n), of one layer. Got {attention.shape}.")
    if not {*rule["directions"]} <= {1, 0, -1} or rule["empty"] not in ("all", "first"):
        raise ValueError(f"directions are 1, 0, -1, empty is 'all' or 'first'. Got {rule}.")
    now, then = map(list, zip(*(blocks or [(attention.shape[2], N)])))
    if (sum(now), sum(then)) != (attention.shape[2], N):
        raise ValueError(f"blocks must add up to {attention.shape[2]} and {N}. Got {blocks}.")
    lines = find_lines(attention.cpu(), blocks=now, markers=markers, **rule)
    bias = lay_out(open_keys(lines, len(attention), M, then), N)
    return fill_empty(bias, rule["empty"], mask).to(attention)

@torch.no_grad()
def collect_attention(model, source, target, batch=250):
    """Attention weights averaged over the examples that the model answers correctly.

    source (B, S), target (B, T + 1) -> self (n_layer, H, T, T), cross (n_layer, H, T, S), number
    of correct examples. Source: ABC v2, App. D, step 1 and the average of step 2. Differs: weights
    after the softmax, as in the authors' code; the paper's formula has scores before it.
    Raises: ValueError when no example is correct.
    """
    seen, totals, correct = [], [], 0
    watch = lambda module, inputs, outputs: seen.append(outputs[1])  # (B, H, T, S)
    hooks = [attention.register_forward_hook(watch) for layer in model.decoder
             for attention in (layer.self_attention, layer.cross_attention)]
    model.eval()
    try:
        for s, t in zip(source.split(batch), target.split(batch)):
            seen.clear()
            right = (model(s, t[:, :-1]).argmax(-1) == t[:, 1:]).all(1)
            totals.append([weights[right].sum(0) for weights in seen])  # self, cross, self, ...
            correct += int(right.sum())
    finally:
        for hook in hooks:
            hook.remove()
    if not correct:
        raise ValueError("the model answers no example correctly; there is no attention to average")
    means = [sum(parts) / correct for parts in zip(*totals)]
    return torch.stack(means[0::2]), torch.stack(means[1::2]), correct

def column_blocks(task, S):
    """Source columns as blocks -> (columns of each block, markers (S,) bool: columns that hold no
    digit of a number). In `$0123|+0748|&` each number takes the marker on its left along."""
    kinds = TASKS[task].operands
    numbers, rest = kinds.count("number"), 1 + 2 * kinds.count("digit")  # `&` or `*7&`
    each = (S - rest) // numbers
    markers = ([True] + [False] * (each - 1)) * numbers + [True] * rest
    return [each] * numbers + [rest], torch.tensor(markers)

def calibrate(config, self_attention, cross_attention):
    """Averaged attention (n_layer, H, T, T), (n_layer, H, T, S) -> list of Line.

    config.rules "paper": one block, all directions, the last layer's lines for every layer. Else a
    block an operand, each layer its own lines, no (1, 1) in cross-attention and only (1, 1) in
    self-attention. At a fixed width only the rows are read that training fills, since in all others
    it saw zeros (authors' code: the first 6). Source: ABC v2, App. D, step 2.
    """
    rows, lines = question_width(config.task, 0, config.base) + 1, []
    robust = config.rules == "robust"
    own, cross = RULES[config.rules] | dict(kappa=0.5 if robust else 0.87), {**RULES[config.rules]}
    if robust:  # (1, 1) in cross-attention would read numbers from their first digit on
        blocks, markers = column_blocks(config.task, cross_attention.shape[3])
        own |= dict(directions=(1,))
        cross |= dict(directions=(0, -1), blocks=blocks, markers=markers)
    for rule, kappa in (own, config.kappa_self), (cross, config.kappa_cross):
        rule["kappa"] = rule["kappa"] if kappa is None else kappa
    for layer, (a, b) in enumerate(zip(self_attention.cpu(), cross_attention.cpu())):
        if robust or layer == config.n_layer - 1:
            lines += [line._replace(layer=layer, attention="self")
                      for line in find_lines(a[:, :rows, :rows], **own)]
            lines += [line._replace(layer=layer) for line in find_lines(b[:, :rows], **cross)]
    return lines

def calibrated_bias(config, lines):
    """Lines -> the bias function of `Method`, dense up to 100 rows and OpenKeys beyond ("paper":
    always dense). Source: ABC v2, Eq. 2."""
    @functools.lru_cache(maxsize=64)
    def bias(layer, kind, T, S):
        if kind == "encoder":
            return None
        robust = config.rules == "robust"
        place = (layer if robust else config.n_layer - 1, kind)
        chosen = [line for line in lines if (line.layer, line.attention) == place]
        blocks = column_blocks(config.task, S)[0] if kind == "cross" and robust else [S]
        keys = open_keys(chosen, config.n_head, T, blocks)
        if robust and T > 100:
            later = (keys.columns > torch.arange(T)[:, None]) & (kind == "self")  # (T, K)
            mask = torch.zeros(later.shape).masked_fill(later, -INF)
            return OpenKeys(keys.columns, fill_empty(keys.values, "first", mask))
        mask = causal_bias(T) if kind == "self" else 0.0
        return fill_empty(lay_out(keys, S), RULES[config.rules]["empty"], mask)
    return bias

# ----------------------------------------
# 6. Training and evaluation
#
# A run is a row of named parts: trained weights, averaged attention, tests. Each is kept when
# it is done. To resume a run is to run it again; to load one, to run it with every part there.

SAVE_SECONDS = 5  # of training that a kill can cost, about
silent = lambda stage, **numbers: None  # a report, what to tell the user, that goes nowhere

def seed_by_name(*names):
    """Seed torch by name, such as (seed, "teacher", step): what is drawn then depends on nothing
    that was drawn before, and a checkpoint holds no random state."""
    torch.manual_seed(random.Random(repr(names)).getrandbits(63))

@contextlib.contextmanager
def refused(text):
    """Errors in here come from bad input: a ValueError of one line, the text and why."""
    try:
        yield
    except Exception as error:
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{text}: {(getattr(error, 'strerror', None) or why)[:300]}") from None

class Keep:
    """Parts of a run by name, and the training under way, in DIR/checkpoint.pt; without a folder in
    memory alone. complete: nothing is to be made any more."""

    def __init__(self, config, folder=None, parts=None, current=None, complete=False):
        self.config, self.path = config, folder and Path(folder) / "checkpoint.pt"
        self.parts, self.current, self.complete = parts or {}, current or {}, complete

    def part(self, name, make):
        """The part of this name, made and kept if it is not there."""
        if name not in self.parts:
            if self.complete:
                raise ValueError(f"the run is not finished: {name!r} is missing")
            self.parts[name], self.current = make(), {}
            self.save()
        return self.parts[name]

    def save(self):
        """Write beside the file, then move into place: a half-written file never has its name."""
        if not self.path:
            return
        beside = self.path.with_name("checkpoint.pt.part")
        state = dict(config=dataclasses.asdict(self.config), parts=self.parts, current=self.current)
        try:
            with open(beside, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        except Exception as error:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise OSError(f"{str(self.path)!r} cannot be written: {error}") from None

def read_checkpoint(folder):
    """-> config, parts, training under way. Raises: ValueError, in one line, for anything that
    `Keep.save` has not written; no code in the file is run."""
    path = Path(folder) / "checkpoint.pt"
    with refused(f"{str(folder)!r} holds no run that can be read"):
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise ValueError("the file is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        return Config(**state["config"]), dict(state["parts"]), dict(state["current"])

def load_weights(model, weights):
    """Raises: ValueError when they do not fit in name, shape or type, or are not finite."""
    with refused("the weights do not fit the options"):
        for name, own in model.state_dict().items():
            if weights[name].dtype != own.dtype or not weights[name].isfinite().all():
                raise ValueError(f"{name} is {weights[name].dtype}, or not finite")
        model.load_state_dict(weights)

def make_optimizers(model, config):
    """Muon for the matrices of layers at config.lr and Adam for all else at a quarter of it, or
    Adam for all. Differs: the papers have Adam alone."""
    named = dict(model.named_parameters())
    muon = [] if config.optimizer == "adam" else [
        name for name, weight in named.items() if name.startswith(("encoder", "decoder"))
        and weight.dim() == 2 and "table" not in name]
    rest = [weight for name, weight in named.items() if name not in muon]
    betas = (0.9, 0.98) if config.kind == "seq2seq" else (0.9, 0.999)
    adam = torch.optim.AdamW(rest, config.lr / 4 if muon else config.lr, betas, fused=True,
                             weight_decay=0.01 if config.kind == "encoder" else 0.0)
    return [adam] if not muon else [adam, torch.optim.Muon(
        [named[name] for name in muon], config.lr, 0.0, adjust_lr_fn="match_rms_adamw")]

def falling(share):
    """Rate that warms up for 30 steps and falls linearly to zero over the last share of all."""
    return lambda step, steps: min(1.0, step / 30, (steps - step + 1) / (share * steps))

def processes():
    """-> number of this process, number of processes that share each batch (under torchrun)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

def take_step(model, optimizers, source, target, share=1.0, precision="float32"):
    """One step at a share of the peak rate -> the loss, the cross-entropy of each token of target
    (B, T + 1) given those before it. Differs: gradients are clipped at norm 1."""
    model.train()
    with torch.autocast(source.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * share
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()

def train(model, batch, steps, rate, name, keep, report, check=lambda model: []):
    """Train for a fixed number of steps; a part of the run, {"weights", "steps", "tokens",
    "seconds", "curve"}, that goes on where `keep` has a training of this name.

    batch() draws source (B, S), target (B, T + 1). rate(step, steps): share of the peak rate, None
    for all of it. curve: [step, loss, *check(model)] every 100 steps. Raises: FloatingPointError
    when the loss is not finite.
    """
    if name in keep.parts or keep.complete:
        return load_weights(model, keep.part(name, dict)["weights"])
    device, (number, count) = next(model.parameters()).device, processes()
    optimizers = make_optimizers(model, keep.config)
    now = dict(step=0, tokens=0, seconds=0.0, curve=[])
    if keep.current.get("name") == name:
        with refused("the training under way does not fit the options"):
            saved = keep.current
            load_weights(model, saved["model"])
            for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            now = {key: saved[key] for key in now}
            if now["step"] not in range(1, steps):
                raise ValueError(f"its step is {now['step']} of {steps}")
    parallel = nn.parallel.DistributedDataParallel(model) if count > 1 else model
    told = saved = time.perf_counter()
    start = told - now["seconds"]
    for step in range(now["step"] + 1, steps + 1):
        seed_by_name(keep.config.seed, name, step)
        source, target = (x[number::count].to(device, non_blocking=True) for x in batch())
        share = rate(step, steps) if rate else 1.0
        loss = take_step(parallel, optimizers, source, target, share, keep.config.precision)
        now["tokens"] += (source.numel() + target[:, 1:].numel()) * count
        if step % 100 == 0 or step == steps:
            now["curve"].append([step, loss.item(), *check(model)])
        clock = time.perf_counter()
        if clock - told > 1 or step == steps:  # else a GPU is not waited for
            told, now["step"], now["seconds"] = clock, step, round(clock - start, 2)
            if not loss.isfinite():
                raise FloatingPointError(f"the loss is {loss.item()} at step {step} of {name}")
            report(name, step=step, steps=steps, loss=loss.item(), seconds=now["seconds"])
            if clock - saved > SAVE_SECONDS and step < steps:
                saved = clock
                keep.current = dict(now, name=name, model=model.state_dict(),
                                    optimizers=[x.state_dict() for x in optimizers])
                keep.save()
    weights = {key: x.detach().clone() for key, x in model.state_dict().items()}
    keep.part(name, lambda: dict(weights=weights, steps=now.pop("step"), **now))

@torch.no_grad()
def right_tokens(model, source, target):
    """source (B, S), target (B, T + 1) -> (B, T) bool on the CPU: is each token of the target the
    most likely one after those before it? Greedy decoding gives the target if and only if all are,
    since up to the first mistake both see the same tokens."""
    model.eval()
    device = next(model.parameters()).device
    chunk = max(1, 2 ** 20 // (target.shape[1] * min(source.shape[1], 100)))  # bounds memory
    return torch.cat([model(s.to(device), t[:, :-1].to(device)).argmax(-1).cpu() == t[:, 1:]
                      for s, t in zip(source.split(chunk), target.split(chunk))])

def present(config, operands, width):
    """Operands (B, W) -> source, target, their numbers padded to `width` digits."""
    return arrange(config.task, pad(config.task, operands, width), config.base, config.align)

def questions(config, length):
    """Test questions -> {"random": (source, target, names)}, and at the longest length up to 60
    "hard" ones with the name of each."""
    task, base = config.task, config.base
    samples = config.samples if length <= 100 else -(-config.samples // 5)
    sets = {"random": (draw_test(task, length, samples, base), None)}
    if length == max((n for n in config.lengths if n <= 60), default=0):
        sets["hard"] = draw_hard(task, length, -(-samples // 100), base)
    width = max(config.widths[0], question_width(task, length, base))
    return {name: (*present(config, operands, width), names)
            for name, (operands, names) in sets.items()}

def evaluate(model, config, questions=questions, report=silent):
    """Test at config.lengths -> {"rows", "seconds"}; a row has "digits", "set", "correct", "n" and
    "places", the share right of each digit of random answers, or "missed", {name: how many} of hard
    questions. questions: config, length -> sets."""
    rows, start = [], time.perf_counter()
    for length in sorted(set(config.lengths)):
        report(f"test of {length} digits")
        seed_by_name(config.seed, "test", length)
        for name, (source, target, names) in questions(config, length).items():
            right = right_tokens(model, source, target)
            exact, digits = right.all(1), (target[:, 1:] < 10).any(0)  # not END, not padding
            row = dict(digits=length, set=name, correct=int(exact.sum()), n=len(exact))
            if names:
                row["missed"] = dict(Counter(names[i] for i in (~exact).nonzero()))
            else:
                row["places"] = [round(x, 4) for x in right[:, digits].float().mean(0).tolist()]
            rows.append(row)
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

def ask(model, config, question):
    """One question, such as "123+748", put to an encoder-decoder -> its answer, "871", without
    padding; parity is answered by its last digit. Raises: ValueError for one outside the task."""
    spec = TASKS[config.task]
    operands = question.split(spec.sign or None)
    with refused(f"{question!r} is no question of {config.task}, {spec.about}"):
        width = question_width(config.task, max(map(len, operands)), config.base)
        source, target = example(config.task, *operands, base=config.base, align=config.align,
                                 width=max(config.widths[0], width))
    source = encode(source)[None].to(next(model.parameters()).device)
    text = decode(generate(model, source, len(target) - 1)[0])[1:]
    digits = text.partition(END)[0]
    if END not in text or not digits or not set(digits) <= set(VOCAB[:config.base]):
        return f"no number; the model wrote {text!r}"
    return digits[-1] if spec.headroom == 0 else digits[::-1].lstrip("0") or "0"

def training_batch(config, numbers, widths, B):
    """B questions on numbers drawn from these, at a width drawn from these -> source, target."""
    width = widths[int(torch.randint(len(widths), (1,)))]
    number = lambda: to_digits(numbers[torch.randint(len(numbers), (B,))], width, config.base)
    return present(config, draw(config.task, B, config.base, number), width)

class Run(NamedTuple):
    model: nn.Module
    tests: dict                             # as `evaluate` returns them
    teacher: Optional[nn.Module] = None     # calibrated methods: the vanilla model looked at,
    attention: tuple = ()                   # its averaged self- and cross-attention,
    lines: tuple = ()                       # and what was calibrated from it

def learn(config, device, keep, report):
    """Train and test an encoder-decoder -> Run. ABC has three stages: a vanilla model learns the
    training numbers (interpolation), its averaged attention is calibrated, and a new model without
    positions is trained with the bias, on the same numbers. Source: ABC v2, Sec. 4 and App. D.

    Raises: RuntimeError when the first model answers nothing whose attention could be averaged.
    """
    pool, held_out = split_numbers(config.seed)

    def stage(name, config, steps, bias=None):
        seed_by_name(config.seed, name)
        model = Transformer(config, bias).to(device)
        check = lambda model: [float(right_tokens(model, *training_batch(
            config, held_out, config.widths, 1000)).all(1).float().mean())]
        batch = lambda: training_batch(config, pool, config.widths, config.batch)
        rate = falling(0.4 if bias is None else 1.0) if config.optimizer == "muon" else None
        train(model, batch, steps, rate, name, keep, report, check)
        return model

    def average():
        seed_by_name(config.seed, "attention")
        source, target = training_batch(teacher.config, pool, config.widths[:1], 1000)
        try:
            return collect_attention(teacher, source.to(device), target.to(device))[:2]
        except ValueError as error:
            raise RuntimeError(f"{error}; train with more --steps than {config.steps}") from None

    tests = lambda: evaluate(model, config, report=report)
    if not METHODS[config.method].calibrated:
        model = stage("model", config, config.steps)
        return Run(model, keep.part("tests", tests))
    plain = dataclasses.replace(config, method="vanilla", rules=None, kappa_cross=None,
                                kappa_self=None)
    teacher = stage("teacher", plain, config.steps)
    attention = keep.part("attention", average)
    with refused("the averaged attention does not fit the options"):
        if any(a.shape[:2] != (config.n_layer, config.n_head) or not a.isfinite().all()
               for a in attention):
            raise ValueError("another number of layers or heads, or nan")
        lines = calibrate(config, *attention)
    model = stage("model", config, config.retrain_steps, calibrated_bias(config, lines))
    return Run(model, keep.part("tests", tests), teacher, attention, lines)

# ----------------------------------------
# 7. Consecutive pairs: one attention head, read completely
#
# Source: Pairs. Tokens are integers 0 .. V - 1; a token's label is 1 where the sequence also
# holds its value - 1 or + 1. One layer, one head, no feed-forward; no positions and no residual
# either, of which the source says nothing. Which token attends to which is one score matrix.

TASKS["consecutive"] = Task("does the sequence hold a neighbour of this integer?", None,
                            models=("head",))

def draw_pairs(B, length, d_vocab, plant=0.0, dummy=False):
    """-> source (B, length), with `dummy` a token V before it, target (B, 1 + length): the labels,
    behind a start token as for every model.

    Uniform integers; then each of the places (0, 1), (2, 3), ... becomes a consecutive pair with
    probability `plant`. Differs: the source does not say how it draws.
    """
    tokens = torch.randint(d_vocab, (B, length))
    first, n = tokens[:, 0:length - 1:2], length // 2
    side = 1 - 2 * torch.randint(2, (B, n))
    side = torch.where((first + side < 0) | (first + side >= d_vocab), -side, side)
    tokens[:, 1::2] = torch.where(torch.rand(B, n) < plant, first + side, tokens[:, 1::2])
    near = (tokens[:, :, None] - tokens[:, None]).abs() == 1  # (B, T, T)
    source = F.pad(tokens, (1, 0), value=d_vocab) if dummy else tokens
    return source, F.pad(near.any(2).long(), (1, 0))

class PairsHead(nn.Module):
    """Source (B, T), target -> logits (B, T, 2) of the labels, 0 and z: embedding and one attention
    of output width 1. The dummy has no label.

    Differs: the source does not say how its models start. Here every integer starts by voting yes,
    and the dummy, whose embedding alone is long (standard deviation 1, not 0.1), soon votes no.
    """

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
    """Train and test one head -> Run; the source takes the best of several seeds. Tests are drawn
    as in training ("random") and without planted pairs ("uniform").

    Differs: the rate is constant; the source cuts it after 100 epochs without a better loss.
    """
    draw = lambda B, length, plant: draw_pairs(B, length, config.d_vocab, plant, config.dummy)
    sets = lambda config, length: {
        "random": (*draw(config.samples, length, config.plant), None),
        "uniform": (*draw(config.samples, length, 0.0), None)}
    seed_by_name(config.seed, "model")
    model = PairsHead(config).to(device)
    batch = lambda: draw(config.batch, 5, config.plant)
    train(model, batch, config.steps, None, "model", keep, report)
    return Run(model, keep.part("tests", lambda: evaluate(model, config, sets, report)))

# ----------------------------------------
# 8. Encoders: one pass, relative positions, priming
#
# Source: Jelassi. One pass over the question, no decoder: answer digit t is read off at token
# t. Numbers start with their most significant digit and are padded on the right, so digits of
# equal weight stand at equal places only where numbers are equally long. A model has one task,
# so + and * serve for the paper's four signs.

ENCODER = dict(operands=("number", "number"), sign="+", models=("universal", "encoder"))
PRODUCT = ENCODER | dict(operands=("number", "short"), sign="*")
TASKS |= {
    "modular-addition": Task("(a + b) mod c", lambda a, b: a + b, modular=True, **ENCODER),
    "multiplication": Task("a * b, b of few digits", product, **PRODUCT),
    "modular-multiplication": Task("(a * b) mod c, b of few digits", product, modular=True,
                                   **PRODUCT),
    "elementwise-addition": Task("a + b, carries dropped", lambda a, b: (a + b) % 10, headroom=0,
                                 **ENCODER),
}

def modulo(digits, modulus):
    """Digits (B, W) of a number -> those of its remainder, as many as modulus - 1 has."""
    rest = torch.zeros_like(digits[:, 0])
    for digit in digits.flip(1).unbind(1):  # Horner: no integer grows
        rest = (10 * rest + digit) % modulus
    return to_digits(rest, len(str(modulus - 1)), 10)

def write_padded(a, length):
    """Digits (B, W) -> tokens (B, W): the lowest `length` (B,), highest first, then PAD."""
    place = length[:, None] - 1 - torch.arange(a.shape[1])
    return a.gather(1, place.clamp(min=0)).masked_fill(place < 0, VOCAB.index(PAD))

def arrange_encoder(task, a, b, modulus=100):
    """Operands a, b (B, W) -> question (B, 2W + 1), target (B, 1 + n): START, which is not read,
    and the answer, n = W + 1 for sums, 2W for products, W without carries, else as below.

    12 + 39 at width 3 is `12@+39@` and `$51@@`. Source: Jelassi, Sec. 2.1. Modular answers
    have as many digits as modulus - 1, zeros in front included (Sec. 4 says so of powers of ten);
    element-wise sums, of which the paper says nothing, keep all digits of the longer operand.
    """
    spec = TASKS[task]
    room = a.shape[1] if "short" in spec.operands else spec.headroom
    answer, _ = carry(spec.columns(F.pad(a, (0, room)), F.pad(b, (0, room))), 10)
    length = n_digits(answer) if room else torch.maximum(n_digits(a), n_digits(b))
    if spec.modular:
        answer = modulo(answer, modulus)
        length = torch.full_like(length, answer.shape[1])
    mark = lambda symbol: encode(symbol).expand(len(a), -1)
    question = [write_padded(a, n_digits(a)), mark(spec.sign), write_padded(b, n_digits(b))]
    return torch.cat(question, 1), torch.cat([mark(START), write_padded(answer, length)], 1)

def numbers_below(length, B, width, even=False):
    """-> (B, width) digits of numbers below 10^length, 1 in place of 0: uniform, so nine in ten
    have all the digits, or, if even, of 1 to `length` digits equally often."""
    digits, place = torch.randint(10, (B, length)), torch.arange(length)
    if even:
        top = torch.randint(length, (B, 1))  # place of the first digit
        first = torch.randint(1, 10, (B, 1)) * (place == top)
        digits = digits * (place < top) + first
    digits[:, 0] += digits.sum(1) == 0
    return F.pad(digits, (0, width - length))

def second_operands(config, length, B, even=False):
    """B second operands for first ones of this length."""
    short = "short" in TASKS[config.task].operands
    return numbers_below(config.second_digits if short else length, B, config.width, even)

def encoder_questions(config, length, samples=None):
    """Test questions on numbers below 10^length, as in the paper, for `evaluate`."""
    B = samples or config.samples
    a, b = numbers_below(length, B, config.width), second_operands(config, length, B)
    return {"random": (*arrange_encoder(config.task, a, b, config.modulus), None)}

def training_set(config, n, prime):
    """-> first operands (n, W), second ones (n, W) of the `prime` long examples, which come first
    and have the --prime-lengths in turn; the other second operands are new each time. Source:
    Jelassi, "Training procedures". Equal numbers may come twice."""
    a = numbers_below(config.train_digits, n, config.width, config.even)
    b, lengths = torch.zeros_like(a), config.prime_lengths or (1,)
    for turn, length in enumerate(lengths):
        places = torch.arange(prime)[turn::len(lengths)]
        a[places] = numbers_below(length, len(places), config.width)
        b[places] = second_operands(config, length, len(places))
    return a, b

class Encoder(Transformer):
    """Source (B, S), target (B, T), read for its length alone -> logits (B, T, V) of the answer.

    Source: Jelassi, Sec. 2.2; its layers are BERT's and ALBERT's. GELU; for "paper" a norm
    after each sublayer and matrices that start with standard deviation 0.02. Differs: feed-forward
    layers are 4 C wide, not 3,072 (BERT) and 16,384 (ALBERT); ALBERT has no dropout, does not scale
    the relative term, approximates GELU and widens embeddings of 128. "vanilla" are the sinusoids
    that the paper cites, "ape" the learned table that its layers have.
    """

    def __init__(self, config):
        super().__init__(config)
        paper = config.preset == "paper"
        self.first_norm = nn.LayerNorm(config.d_model) if paper else nn.Identity()
        for weight in self.parameters() if paper else ():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def embed(self, tokens, side):
        return self.first_norm(super().embed(tokens, side))

    def forward(self, source, target):
        return self.head(self.norm(self.read(source)[:, :target.shape[1]]))

def cosine(step, steps):
    """Share of the peak rate: a cosine to zero, warmed up over 100 steps (Jelassi, Sec. 2.2)."""
    return min(1.0, step / 100) * (1 + math.cos(math.pi * step / steps)) / 2

def learn_encoder(config, device, keep, report):
    """Train on short numbers, with --prime on a few long ones among them, test, and with --finetune
    train on long ones alone and test again -> Run; the curve holds the share right of each answer
    digit (Fig. 7). Source: Jelassi, Secs. 2.2 and 5. Differs: examples are drawn with replacement,
    not in epochs."""
    seed_by_name(config.seed, "model")
    model = Encoder(config).to(device)

    def check(model):
        source, target, _ = encoder_questions(config, config.train_digits, 200)["random"]
        shown = (target[:, 1:] < 10).any(0)
        return right_tokens(model, source, target)[:, shown].float().mean(0).tolist()

    def stage(name, n, prime, steps):
        seed_by_name(config.seed, name, "examples")
        first, second = training_set(config, n, prime)

        def batch():
            pick = torch.randint(n, (config.batch,))
            b = second_operands(config, config.train_digits, config.batch, config.even)
            b = torch.where((pick < prime)[:, None], second[pick], b)
            return arrange_encoder(config.task, first[pick], b, config.modulus)

        train(model, batch, steps, cosine, name, keep, report, check)

    tests = lambda: evaluate(model, config, encoder_questions, report)
    stage("model", config.n_train, config.prime, config.steps)
    if config.finetune:
        keep.part("before", tests)
        stage("finetune", config.finetune, config.finetune, config.retrain_steps)
    return Run(model, keep.part("tests", tests))

# ----------------------------------------
# 9. Command line

LEARN = {"seq2seq": learn, "universal": learn_encoder, "encoder": learn_encoder,
         "head": learn_pairs}

def load(folder):
    """A finished run's folder -> model, config, Run. Raises: ValueError when it holds none."""
    config, parts, _ = read_checkpoint(folder)
    with refused(f"--from: {str(folder)!r} holds no finished run"):
        device, keep = torch.device("cpu"), Keep(config, parts=parts, complete=True)
        run = LEARN[config.model](config, device, keep, silent)
        summary(make_record(config, device, run, parts))  # what was measured can be told
    return run.model, config, run

def wilson(correct, n, z=1.959964):
    """Wilson 95% interval of a share -> (low, high). Source: Wilson 1927."""
    centre, half = correct + z * z / 2, z * math.sqrt(correct * (n - correct) / n + z * z / 4)
    return max(0.0, (centre - half) / (n + z * z)), min(1.0, (centre + half) / (n + z * z))

def percent(share):
    """A share in percent with one decimal, rounded down: 100 is said of nothing less."""
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}%"

def make_record(config, device, run, parts):
    """What a run came to, as plain values: one line of JSON."""
    git, commit = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"], None
    with contextlib.suppress(OSError):
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return dict(
        config={name: x for name, x in dataclasses.asdict(config).items() if x is not None},
        torch=torch.__version__, commit=commit, device=torch.cuda.get_device_name(device)
        if device.type == "cuda" else f"{device.type}, threads: {torch.get_num_threads()}",
        train={name: {key: x for key, x in part.items() if key != "weights"}
               for name, part in parts.items() if "weights" in part},
        lines=[line._asdict() for line in run.lines], before=parts.get("before"), tests=run.tests)

def table(tests, places):
    """Tests as lines of text."""
    yield "digits   exact  set        95% interval         n"
    for row in tests["rows"]:
        low, high = wilson(row["correct"], row["n"])
        yield (f"{row['digits']:>6}  {percent(row['correct'] / row['n']):>6}  {row['set']:<8} "
               f"{low:7.2%} - {high:7.2%}  {row['n']:8,}")
        yield from (f"        missed {n} of {name}" for name, n in row.get("missed", {}).items())
        if places:
            yield "        right by place " + " ".join(f"{100 * x:g}" for x in row["places"])

def summary(record):
    """The record as the text that a run prints."""
    names, out = {1: "diagonal", 0: "vertical", -1: "anti-diagonal"}, []
    other = record["config"]["model"] != "seq2seq"
    for name, part in record["train"].items():
        exact = "" if other else f", {percent(part['curve'][-1][2])} of 1,000 held-out exact"
        out.append(f"{name:<9} {part['steps']:,} steps, {part['seconds']:.1f} s{exact}")
        out += [f"  layer {x['layer'] + 1} {x['attention']:<5} head {x['head'] + 1}: "
                f"{names[x['direction']]}, block {x['block'] + 1}, offset {x['offset']}, bias "
                f"{x['value']:.2f}, z {x['z']:.1f}" for x in record["lines"] if name == "teacher"]
    if record["before"]:
        out += ["", "before fine-tuning", *table(record["before"], other)]
    return "\n".join([*out, f"tests     {record['tests']['seconds']:.1f} s on {record['device']}",
                      "", *table(record["tests"], other)])

def whole_numbers(text):
    return tuple(int(part) for part in text.split(","))

class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line instead of the whole usage."""
        hint = "; write --name=VALUE if it begins with -" * ("expected" in message)
        raise ValueError(message.removeprefix("argument ") + hint)

def parser():
    """Every field of Config is an option; those left out are absent from the result."""
    p = Parser(prog="lengen.py", allow_abbrev=False, argument_default=argparse.SUPPRESS,
               description="Length generalization in arithmetic transformers.")
    for field in dataclasses.fields(Config):
        meta, how = field.metadata, dict(type=field.type)
        if field.type in (tuple, bool):
            how = dict(type=whole_numbers) if field.type is tuple else dict(action="store_true")
        if meta["choices"]:
            how["metavar"] = f"{{{','.join(meta['choices'])}}}"
        usual = [f"{kind} {fast[field.name]}".strip() for kind, fast in {"": COMMON, **FAST}.items()
                 if fast.get(field.name) is not None]
        p.add_argument(flag(field.name), help=f"{meta['help']} ({', '.join(usual)})", **how)
    p.add_argument("--seeds", type=int, help="runs, from --seed on, one after the other")
    p.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), help="where to run")
    p.add_argument("--out", help="new folder of the run; by default one under runs/")
    p.add_argument("--from", metavar="DIR", help="finish a run that was interrupted, or test a "
                   "finished one at --lengths, or --ask it")
    p.add_argument("--ask", nargs="+", metavar="QUESTION", help="such as 123+748; - reads one a "
                   "line from standard input; without --from the newest finished run answers")
    p.add_argument("--json", action="store_true", help="print the record as one line of JSON")
    p.add_argument("--quiet", action="store_true", help="no progress on standard error")
    p.add_argument("--list", action="store_true", help="print tasks, methods and models")
    return p

def refuse(options, known, why):
    """Raises: ValueError when an option is given that is not known."""
    for name in options:
        if name not in known:
            raise ValueError(f"{flag(name)}: {why}")

def pick_device(config, name="auto"):
    """"auto", "cpu", "cuda" or "mps" -> torch.device; sets up threads and, under torchrun, the
    processes. Raises: ValueError when the device is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    name = next(device for device in there if there[device]) if name == "auto" else name
    if not there[name]:
        raise ValueError(f"--device: {name} is not there")
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if name == "cuda" else "gloo")
    if config.batch % processes()[1]:
        raise ValueError(f"--batch: {config.batch} cannot be shared by {processes()[1]} processes")
    if config.d_model <= 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # small matrices gain little from more, and lose much
    return torch.device(name, int(os.environ.get("LOCAL_RANK", 0)) if name == "cuda" else None)

def say(text):
    """To standard error; a run does not end because nobody can read it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)

def progress(stage, step=0, steps=0, loss=0.0, seconds=0.0):
    left = seconds / max(1, step) * (steps - step)
    say(stage if not steps else f"{stage}: step {step:,} of {steps:,}, loss {loss:.4f}, "
        f"{seconds:.0f} s, about {left:.0f} s left")

def new_folder(config, options):
    """Made here, so that no two runs share one. Raises: ValueError when it is there already."""
    if os.environ.get("RANK", "0") != "0":
        return None
    name = f"{config.task}-{config.model}-{config.method}-seed{config.seed}-{time.time_ns()}"
    folder = Path(options.get("out", f"runs/{name}"))
    if "out" in options and "seeds" in options:
        folder = folder / f"seed{config.seed}"
    with refused(f"--out: {str(folder)!r} cannot be a new folder"):
        folder.mkdir(parents=True)
    return folder

def execute(config, options, folder=None, parts=None, current=None):
    """Train and test, or go on with the parts that are there; print the result, and keep it in the
    folder if there is one."""
    device, first = pick_device(config, options.get("device", "auto")), processes()[0] == 0
    report = silent if "quiet" in options or not first else progress
    report(f"{config.task}, {config.method}, seed {config.seed} on {device}, in {folder}")
    keep = Keep(config, folder if first else None, parts, current)
    keep.save()
    run = LEARN[config.model](config, device, keep, report)
    if not first:
        return
    known = keep.parts["teacher"]["curve"][-1][2] if run.teacher else 1.0
    if known < 0.99:
        say(f"lengen: the teacher is right on {percent(known)} of held-out questions, 99% are "
            f"wanted: raise --steps, now {config.steps}")
    record = make_record(config, device, run, keep.parts)
    print(json.dumps(record) if "json" in options else summary(record), flush=True)
    if folder:
        (folder / "result.json").write_text(json.dumps(record))
        report(f"kept in {folder}")

def go_on(folder, options):
    """--from DIR: finish a run that was interrupted, or test a finished one again, which changes
    nothing in its folder."""
    config, parts, current = read_checkpoint(folder)
    refuse(options, ("from", "device", "json", "quiet", "lengths", "samples"), "is fixed on --from")
    changes = {name: options[name] for name in ("lengths", "samples") if name in options}
    if "tests" not in parts:
        refuse(changes, (), "the run is not finished; finish it by --from alone")
        return execute(config, options, Path(folder), parts, current)
    load(folder)  # all is there, and fits
    if changes:
        del parts["tests"]
    execute(dataclasses.replace(config, **changes), options, None, parts)

def answer(options):
    """--ask: a line for each question, ? for one that is refused -> exit code."""
    refuse(options, ("ask", "from"), "has no effect on --ask")
    folder, code = options.get("from"), 0
    if folder is None:
        finished = sorted(Path("runs").rglob("result.json"), key=lambda path: path.stat().st_mtime)
        if not finished:
            raise ValueError("--ask: no finished run under runs/; name one by --from DIR")
        folder = finished[-1].parent
        say(f"asking {folder}")
    model, config, _ = load(folder)
    if config.kind != "seq2seq":
        raise ValueError(f"--ask: models of kind {config.model} answer no questions")
    for given in options["ask"]:
        for question in sys.stdin if given == "-" else [given]:
            try:
                print(ask(model, config, re.sub(r"\s", "", question)), flush=True)
            except ValueError as error:
                print("?", flush=True)
                say(f"lengen: {error}")
                code = 2
    return code

def run_command(options):
    """Options as given -> exit code."""
    if "list" in options:
        refuse(options, ("list",), "has no effect on --list")
        for title, entries in (("tasks", TASKS), ("methods", METHODS), ("models", MODELS)):
            print(title, *(f"  {name:<23} {getattr(entry, 'about', entry)}"
                           for name, entry in entries.items()), sep="\n")
        return 0
    if "ask" in options:
        return answer(options)
    if "from" in options:
        return go_on(options["from"], options)
    program = ("seeds", "device", "out", "json", "quiet")
    config = Config(**{name: x for name, x in options.items() if name not in program})
    if options.get("seeds", 1) < 1:
        raise ValueError(f"--seeds: {options['seeds']} is not positive")
    for seed in range(config.seed, config.seed + options.get("seeds", 1)):
        config = dataclasses.replace(config, seed=seed)
        execute(config, options, new_folder(config, options))

def main(argv=None):
    """Command line -> exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    try:
        return run_command(vars(parser().parse_args(argv))) or 0
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        text, code = "interrupted; go on by --from and the run's folder", 130
    except Exception as error:
        text, code = str(error).partition("\n")[0] or repr(error), 2 * isinstance(error, ValueError)
        if isinstance(error, MemoryError) or "memory" in text and code != 2:
            text = "out of memory; lower --batch, --d-model or --lengths"
    say(f"lengen: {text}")
    return code or 1

if __name__ == "__main__":
    sys.exit(main())
