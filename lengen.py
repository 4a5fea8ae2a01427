# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

    python lengen.py --task successor --method abc        # train, calibrate, retrain, prove, test
    python lengen.py --task addition --method vanilla     # right at 6 digits, wrong at 10
    python lengen.py --ask 123+748                        # ask the newest finished run in runs/

A transformer that has learned sums of 6 digits fails at 10. Attention Bias Calibration (ABC) makes
it read along lines that continue to any length. In our variant, which adds windows and a proof to
the papers' stages (`learn_abc`, section 7), it becomes exact at every length:

1. Train a vanilla transformer. It answers `$0129&` by `$0310&`: 129 + 1 = 130, last digit first,
   between `$` (start) and `&` (end).
2. Average its attention over right answers. On the left is a part of one head, in percent: row t
   writes digit t of the answer, and columns are the keys at the end of the question.

           place 3    2    1    0    &                 place 3     2     1     0    &
        t = 0    0    0    7   48   28                       -     -     -     0    -
        t = 1    1    6   27   31   18                       -     -     0  -.15    -
        t = 2   16   48   22    6    2                       -     0  -.15     -    -
        t = 3   58   27    4    0    0                       0  -.15     -     -    -

3. Two lines stand out: row t looks at the digit at place t (48, 27, 48, 58) and at the one below
   it (31, 22, 27), which helps decide whether a carry arrives. Keep a minimal set of lines that
   determines every answer, and continue them to any length as a bias on the attention scores, on
   the right. The strongest line of each head and direction gets 0, any other its mean less the mean
   of the strongest (-.15, over all rows, of which four are shown). All other keys get -inf (-),
   which closes them. Lines do not leave the number, so `&` stays closed.
4. Retrain on short numbers, with this bias in place of positions.
5. Prove. A row now sees only a few tokens, its *window*. All 212 windows of successor occur in
   short numbers. A model that is right on each of them is right on numbers of any length.

The way to the idea is this preamble and sections 1, 2, 5 and 7. Section 6 is the proof, 3 and 4
are the model, its training and its tests, and 8 to 10 are consecutive pairs, encoders, and options
with the command line. All use `config`: the options of a run as attributes (config.lr) and what
follows from them: `spec`, `scheme` and `kind`, entries of TASKS, METHODS and KINDS (of models), the
`widths` of training numbers, and whether to `align` operands.

Sizes: B batch, T queries (rows), S keys (columns), H heads, D head width, C = H * D model width, V
vocabulary, W digits of a number; attention is m x n in training, M x N at any other length. Lengths
are in digits, and place 0 is the digit that a task computes first. In docstrings, `x -> y` means
that y is returned for x; `Source:` names an origin, `Differs:` a departure from it.

v1: Duan and Shi 2023, From Interpolation to Extrapolation: Complete Length Generalization for
Arithmetic Transformers. v2: Duan, Shi and Xu 2024, Attention Bias as an Inductive Bias: How to
Teach Transformers Simple Arithmetic. Jelassi: Jelassi et al. 2023, Length Generalization in
Arithmetic Transformers. Pairs: an anonymous study of consecutive pairs."""

import argparse
import ast
import contextlib
import copy
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import os
import random
import re
import sys
import time
import zipfile
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

SOURCE = ""  # hash of this file, for records; none if it was read from standard input
with contextlib.suppress(NameError, OSError):
    SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
LOG = logging.getLogger("lengen")  # progress at level INFO, the command's errors at level ERROR
RANDOM = random.Random()  # draws integers of any size
SECONDS = 3  # between progress reports, and between saves, of a training

class BadInput(ValueError):
    """An error that the user can fix. The command prints one line and exits with 2."""

class RunFailed(RuntimeError):
    """An error that ends a run. The command prints one line and exits with 1."""

def demand(condition, complaint):
    if not condition:
        raise BadInput(complaint)

@contextlib.contextmanager
def seeded(*names):
    """Seed torch and RANDOM by `names`; restore their states on exit. Not for several threads."""
    state, gpu_in_use = RANDOM.getstate(), torch.cuda.is_initialized()
    with torch.random.fork_rng(range(gpu_in_use)):  # GPU 0 alone
        RANDOM.seed(repr(names))
        seed = RANDOM.getrandbits(63)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed is slow
        if gpu_in_use:
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            RANDOM.setstate(state)

def show(text):
    """Print at once. A closed pipe, as after `| head`, is no error."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)

def percent(share):
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}%"  # rounded down: 100.0% means all

# 1. Tasks: digits in, tokens out ------------------------------------------------------------------
# The token of a digit is its value. A number is drawn as a tensor of digits (B, W), least
# significant first. A column of a question has one digit of each of its n operands, those of one
# place; columns (B, W, n) have the places in the order in which the task computes them.

VOCAB = "0123456789+*$&@"
START, END, PAD = "$&@"
LIMIT = 2 ** 20  # training numbers are below this limit; most have 6 decimal digits

def encode(text):
    """A string of VOCAB symbols -> tokens (T,). Raises: ValueError for other symbols."""
    return torch.tensor(list(map(VOCAB.index, text))).long()

def decode(tokens):
    """Tokens (T,) -> their symbols, a string."""
    return "".join(VOCAB[token] for token in tokens)

class Task(NamedTuple):
    """A rule that computes an answer place by place, from the last digit on. At each, `total(carry,
    *digits)` joins the carry of the place before and the operands' digits, all integer tensors of
    one shape. The total modulo the base is the answer's digit; the quotient, rounded down, is the
    next carry. Or `total` returns both, digit and carry. With headroom, numbers have leading zeros,
    and a final carry other than 0 is invalid; without, it is dropped. For a - b, total is a - b +
    carry: a borrow is the carry -1, and a < b is invalid.

    With msd_first, places run from the most significant digit on, the answer is written in this
    order, and the final carry is dropped. In long division, n // d, the carry is the remainder:
    digit and next carry are divmod(10 * carry + a, d), so `$0129/3&` -> `$0043&`. A digit of -1
    says that there is no answer, as for d = 0."""
    about: str
    total: Callable
    operands: tuple = ("number",)  # each "number" (W digits) or "digit" (one digit), numbers first
    sign: str = ""  # the symbol of VOCAB that separates operands
    base: int = 10
    first: int = 0  # the carry into the first place that is computed
    headroom: int = 1  # leading zeros of tested numbers; the largest training numbers lack them
    label: bool = False  # whether the answer is only the digit of the last place computed
    msd_first: bool = False  # whether places run from the most significant digit on
    steps: int = 600  # number of steps of the first training
    retrain_steps: int = 300  # maximum number of steps of the first attempt at retraining
    batch: int = 64
    lr: float = 6e-3

    def step(self, carry, digits):
        """carry (...), digits (..., n) of a place -> digit of the answer, next carry, both (...)
        integers, whatever type `total` returns. Raises: BadInput if it fails or returns floats."""
        try:
            # It gets copies, as it may change its arguments in place.
            results = self.total(carry.clone(), *digits.clone().unbind(-1))
            if not isinstance(results, tuple):
                results = (results,)
            results = [torch.as_tensor(x) for x in results]
        except Exception as error:  # of any kind, in a function that a user wrote
            raise BadInput(f"{self.about}: total(carry, *digits) fails: {error!r:.200}") from error
        for x in results:
            if x.is_floating_point() or x.shape not in ((), carry.shape) or len(results) > 2:
                raise BadInput(f"{self.about}: total gives {len(results)} of {x.dtype}, shape "
                               f"{tuple(x.shape)}, for 1 or 2 integers of {tuple(carry.shape)}")
        results = [x.long().expand_as(carry) for x in results]
        if len(results) == 1:
            return results[0] % self.base, results[0] // self.base
        return results

    def check(self, answer):
        """Raise BadInput if a digit of answers, other than -1, is not a digit of the base."""
        if ((answer < -1) | (answer >= self.base)).any():
            raise BadInput(f"{self.about}: an answer has a digit that base {self.base} does not "
                           "have")

    @property
    def width(self):
        """The least training width. It fits n < LIMIT * 2^headroom and all answers of TASKS."""
        width = 1
        while self.base ** width < LIMIT * 2 ** self.headroom:
            width += 1
        return width

def xor(carry, a):
    digit = (a + carry) % 2
    return digit, digit  # the answer's digit is also the next carry

TASKS = {
    "successor": Task("n + 1", lambda carry, a: a + carry, first=1, steps=350, retrain_steps=350,
                      batch=32, lr=4e-3),  # $0129& -> $0310&
    "addition": Task("a + b", lambda carry, a, b: a + b + carry, ("number", "number"), "+"),
    "nx1": Task("a * b, b a single digit", lambda carry, a, b: a * b + carry, ("number", "digit"),
                "*", retrain_steps=450, batch=128, lr=8e-3),  # $0123*7& -> $1680&
    "parity": Task("running xor of the bits, last bit first", xor, base=2, headroom=0,
                   steps=300, retrain_steps=200, batch=32),  # $1011& -> $1001&
    "parity-label": Task("parity in one digit, without the scratchpad", xor, base=2, headroom=0,
                         label=True),  # $1011& -> $1&
}

def write_question(spec, columns, align=False):
    """Digits (B, W, n) of n operands, a single digit being at every place -> tokens (B, S) of
    `$0123+0748&`. With align, two operands are interleaved, `$+00172438&`. Source: v1, Sec. 3.2;
    v2, App. D.1, C.4."""
    sign, start, end = (encode(x).expand(len(columns), -1) for x in (spec.sign, START, END))
    if not spec.msd_first:  # a question is written from the most significant digit on
        columns = columns.flip(1)
    if align:
        return torch.cat([start, sign, columns.flatten(1), end], 1)
    parts = [start]
    for operand, digits in zip(spec.operands, columns.unbind(2)):
        parts += [digits if operand == "number" else digits[:, :1], sign]
    parts[-1] = end  # no sign after the last operand
    return torch.cat(parts, 1)

def arrange(spec, columns, align=False):
    """Digits (B, W, n), as above -> tokens of the questions that have an answer: source (B, S),
    `$0123+0748&`, and target (B, T + 1), `$1780&`, in the order of the places. Raises: BadInput."""
    answer, carry = [], torch.full_like(columns[:, 0, 0], spec.first)
    valid = torch.ones_like(carry, dtype=torch.bool)
    for digits in columns.unbind(1):
        digit, carry = spec.step(carry, digits)
        if (digit < 0).any():
            valid = valid & (digit != -1)
            # The question is dropped below; until then, it goes on from the first carry.
            digit, carry = digit.where(valid, 0), carry.where(valid, spec.first)
        answer.append(digit)
    answer = torch.stack(answer, 1)
    spec.check(answer)
    if spec.headroom and not spec.msd_first:
        valid &= carry == 0
    columns, answer = columns[valid], answer[valid]
    if spec.label:
        answer = answer[:, -1:]
    start, end = (encode(x).expand(len(answer), -1) for x in (START, END))
    return write_question(spec, columns, align), torch.cat([start, answer, end], 1)

def example(task, *operands, width=1, align=False):
    """example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&"). The width is raised
    to what the longest operand and the headroom need. Raises: BadInput."""
    spec, columns = TASKS.get(task), []
    demand(spec and len(operands) == len(spec.operands),
           f"{' '.join(operands)} is not a question of {task}")
    width = max(width, max(map(len, operands)) + spec.headroom)
    for operand, text in zip(spec.operands, operands):
        most = width if operand == "number" else 1
        demand(1 <= len(text) <= most and set(text) <= set(VOCAB[:spec.base]),
               f"{text!r} is not a base-{spec.base} {operand}")
        digits = encode(text.rjust(most, "0"))
        columns.append((digits if spec.msd_first else digits.flip(0)).expand(width))
    source, target = arrange(spec, torch.stack(columns, 1)[None], align)
    demand(len(source), f"{f' {spec.sign} '.join(operands)} has no answer of {width} digits: "
           f"{spec.about}")
    return decode(source[0]), decode(target[0])

def split_numbers(seed):
    """-> training and held-out integers below LIMIT, 7:1, each sorted. Source: v2, App. B (whose
    range includes 2^20 itself)."""
    order = torch.randperm(LIMIT, generator=torch.Generator().manual_seed(seed))
    return [part.sort().values for part in order.split(LIMIT * 7 // 8)]

def draw_exact(base, length, B):
    """-> (B, length): B numbers of exactly `length` digits. Source: v1, Sec. 3.3."""
    digits = torch.randint(base, (B, length))
    digits[:, -1].random_(1, base)  # no leading zero
    return digits

def draw_hard(base, length, B):
    """-> (B, length): B numbers of zeros or of highest digits; in each, a random share of the
    digits is redrawn. They are hard: carries run far, and operands are short or nearly equal."""
    usual = torch.randint(2, (B, 1)) * (base - 1)
    other = torch.rand(B, length, dtype=torch.float32) < torch.rand(B, 1, dtype=torch.float32)
    return torch.where(other, torch.randint(base, (B, length)), usual)

def draw_columns(spec, draw, length, width, B):
    """-> digits (B, width, n) of B questions, in the order of the task's places; draw(base, length,
    B) -> numbers (B, length), least significant digit first."""
    columns = []
    for operand in spec.operands:
        if operand == "number":
            columns.append(F.pad(draw(spec.base, length, B), (0, width - length)))
        else:
            columns.append(torch.randint(spec.base, (B, 1)).expand(B, width))
    columns = torch.stack(columns, 2)
    return columns.flip(1) if spec.msd_first else columns

def draw_questions(config, draw, length, n):
    """-> up to n valid, distinct questions: source (n, S), target (n, T + 1). Raises: BadInput."""
    width, found = max(config.widths[0], length + config.spec.headroom), {}
    for _ in range(20):
        if len(found) < n:
            columns = draw_columns(config.spec, draw, length, width, n)
            for source, target in zip(*arrange(config.spec, columns, config.align)):
                found.setdefault(source.numpy().tobytes(), (source, target))
    demand(found, f"{config.task}: 20 draws of {n} gave no question; has it headroom?")
    return [torch.stack(rows[:n]) for rows in zip(*found.values())]

# 2. Attention and biases --------------------------------------------------------------------------
# This section can be copied as it stands; it needs math, torch, nn and F (torch.nn.functional).
#
# A bias is added to the scores: 0 is neutral, and -inf closes a key. A bias that is made from sizes
# alone is on torch's default device, which is the model's own device while the model runs.

def masked_softmax(scores, bias):
    """softmax(scores + bias) over the keys; 0, not NaN, in a row whose keys are all closed."""
    if bias is None:
        return scores.softmax(-1)
    bias = bias.to(scores)
    closed = bias.amax(-1, keepdim=True) == -math.inf
    return (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0)

class MultiHeadAttention(nn.Module):
    """weights = softmax(q k^T / sqrt(D) + bias), output = weights v. If set, scores(q, k) of q (B,
    H, T, D), k (B, H, S, D) replaces q k^T. Source: Vaswani et al. 2017, Sec. 3.2; v2, App. C.4."""
    def __init__(self, d_model, n_head, dropout=0.0, d_head=None):
        super().__init__()
        self.scores, self.n_head = None, n_head
        inner = n_head * (d_head or d_model // n_head)
        self.q, self.k, self.v = (nn.Linear(d_model, inner) for _ in range(3))
        self.out = nn.Linear(inner, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory, bias=None):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) or None -> output (B,
        T, C), weights (B, H, T, S), also kept. For a bias too large for memory, an iterator yields
        its pieces, which cover all rows in order: rows (R,), the keys (K,) that they see, and the
        bias (H, R, K) between them. The weights are then None."""
        if bias is not None and not torch.is_tensor(bias):
            with x.device:  # the iterator makes each piece when it is needed
                pieces = [self(x[:, rows], memory[:, keys], piece)[0] for rows, keys, piece in bias]
            self.weights = None
            return torch.cat(pieces, 1), None
        projected = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in projected)
        scores = self.scores(q, k) if self.scores else q @ k.mT  # (B, H, T, S)
        weights = masked_softmax(scores / math.sqrt(q.shape[3]), bias)
        if not torch.compiler.is_exporting():  # an exported model has no attributes to set
            self.weights = weights.detach()
        mixed = self.dropout(weights) @ v  # (B, H, T, D)
        return self.out(mixed.transpose(1, 2).flatten(2)), weights

def sinusoidal(positions, d_model):
    """Positions t (T,) -> (T, C): channels 2p, 2p + 1 are sin and cos of t / 10000^(2p/C). Source:
    Vaswani et al. 2017, Sec. 3.5. Angles are float64, to be precise at large positions."""
    pairs = torch.arange(0, d_model, 2, device=positions.device).double()
    angles = positions[:, None] * 10000.0 ** (-pairs / d_model)  # (T, C / 2)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :d_model]
    return waves.to(torch.get_default_dtype())

def rope(x, positions=None):
    """Rotate channels 2p and 2p + 1 of x (B, H, T, D), at positions t (T,), by default 0, 1, ...,
    by the angle t / 10000^(2p/D). Source: Su et al. 2021, Eqs. 14 and 34."""
    if positions is None:
        positions = torch.arange(x.shape[2], device=x.device)
    waves = sinusoidal(positions, x.shape[3]).to(x)
    sin, cos = waves[:, ::2], waves[:, 1::2]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], 4).flatten(3)

def relative_scores(q, table, k=None, S=None):
    """q (B, H, T, D), table (2K + 1, D), k (B, H, S, D) -> unscaled scores (B, H, T, S): q_i . a_ij
    plus, if k is given, k_j . a_ij; a_ij = table[clip(j - i, -K, K) + K]. By default, S is that of
    k, or else T. Source: Shaw et al. 2018, Eq. 4 (keys); Huang et al. 2020, method 4 (keys and
    queries), as in HuggingFace's models; Jelassi cites Huang et al. 2018."""
    S = S or (q if k is None else k).shape[2]
    i, j = torch.arange(q.shape[2], device=q.device), torch.arange(S, device=q.device)
    K = len(table) // 2
    a = F.embedding((j - i[:, None]).clamp(-K, K) + K, table)  # (T, S, D)
    scores = torch.einsum("bhid,ijd->bhij", q, a)
    if k is not None:
        scores += torch.einsum("bhjd,ijd->bhij", k, a)
    return scores

def alibi_slopes(n_head):
    """-> slopes (H,): 2^(-8h/H) for h = 1 .. H. If H is not a power of two: those of the next lower
    power n, then every second of those of 2n. Source: Press et al. 2022, Sec. 3 and code."""
    n = 2 ** (n_head.bit_length() - 1)
    h = torch.cat([torch.arange(1, n + 1), torch.arange(0.5, n)])  # 1, 2, ... n, 0.5, 1.5, ...
    return 2.0 ** (-8 * h[:n_head] / n)

def alibi_bias(n_head, T, S):
    """-> (H, T, S): -slope_h * |j - i|. Source: Press et al. 2022, Sec. 3. Differs: symmetric."""
    i, j = torch.arange(T)[:, None], torch.arange(S)
    return -alibi_slopes(n_head)[:, None, None] * (j - i).abs()

def causal_bias(T):
    """-> (1, T, T): 0 for j <= i, -inf above the diagonal."""
    return torch.full((1, T, T), -math.inf).triu(1)

def window_bias(w, T, S, cross=False, step=1):
    """-> (1, T, S): 0 inside a band, -inf outside. In self-attention, row i sees its own token and
    the w tokens before it. In cross-attention, it sees the column of place i and the w columns to
    the right of it: with w = 1, row 0 sees `9&` of `$0129&`, and row 1 sees `29`. Signs and START
    take places, too. If two operands are interleaved, `step` = 2 columns belong to one place.
    Source: v2, App. C.4; columns: the authors' code. Differs: v2's text also opens w positions on
    the other side, and that code does not interleave operands."""
    i, seen = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        seen = (S - 2 - seen) // step  # the place of the digit in each column; END counts as -1
    return torch.zeros(1, T, S).masked_fill((seen > i) | (seen < i - w), -math.inf)

# 3. Transformer and the table of methods ----------------------------------------------------------

class Method(NamedTuple):
    """How a model knows positions. `position`, `bias` and `scores` are functions or module classes.
    They get their arguments in two parts, which a semicolon separates below: the first from `bind`,
    once, when the model is built; the second with each call. So banded(config, layer, attention, T,
    S) is a function, and RelativeScores(config, attention) is a class, whose `forward` has the
    arguments q, k. side is "source" or "target"; attention is "encoder", "self" or "cross"; index
    (T,) is 0, 1, ..."""
    about: str
    position: Callable = None  # config; side, index -> (T, C), added to the embeddings
    bias: Callable = None  # config; layer, attention, T, S -> (1 or H, T, S), or None for none
    scores: Callable = None  # config, attention; q, k -> (B, H, T, S), used instead of q k^T
    n_width: int = 1  # number of training widths; a model trained at one ends all answers there
    steps_factor: int = 1  # multiplies the task's default number of steps
    defaults: dict = None  # default values of other options of a run
    embedding: float = 0.3  # standard deviation of embeddings; small, so that positions stand out
    window: int = 0  # w of `window_bias`; 0: keys are open at any distance, unless calibrated
    calibrated: bool = False  # the first part of `bias` is config and lines of a vanilla model
    period: int = 0  # number of rows after which positions repeat; 0: never

def bind(part, *given):
    """Bind the first arguments of a method's part: a class, a function or None."""
    if isinstance(part, type):
        return part(*given)
    return part and functools.partial(part, *given)

def sinusoids(config, side, index):
    return sinusoidal(index, config.d_model)

class LearnedPositions(nn.Embedding):
    def __init__(self, config):
        super().__init__(4096, config.d_model)
        nn.init.normal_(self.weight, std=0.3)  # as large as the embeddings of tokens

    def forward(self, side, index):
        demand(len(index) <= 4096, f"{len(index)} tokens exceed the 4096 learned positions")
        return super().forward(index)

def banded(config, layer, attention, T, S):
    if attention != "encoder":
        return window_bias(config.scheme.window, T, S, attention == "cross", 1 + config.align)

def alibi(config, layer, attention, T, S):
    if attention == "self" or config.method == "alibi":
        return alibi_bias(config.n_head, T, S)

def rotary(config, attention, q, k):
    return rope(q) @ rope(k).mT

class RelativeScores(nn.Module):
    """q k^T plus learned scores of relative positions, for keys and, in "rpe-kq", for queries."""
    def __init__(self, config, attention):
        super().__init__()
        D = config.d_model // config.n_head
        self.table = nn.Parameter(torch.randn(2 * config.clip + 1, D) / D ** 0.5)
        self.for_queries = config.method == "rpe-kq"

    def forward(self, q, k):
        keys = k if self.for_queries else None
        return q @ k.mT + relative_scores(q, self.table, keys, k.shape[2])

METHODS = {  # section 5 adds "abc"
    "vanilla": Method("sinusoids on the embeddings", sinusoids),
    "nope": Method("no positions (Kazemnejad et al. 2023)"),
    "ape": Method("learned positions on the embeddings (Gehring et al. 2017)", LearnedPositions),
    "alibi": Method("ALiBi, symmetric, in every attention", bias=alibi),
    "alibi-decoder": Method("sinusoids, ALiBi in the decoder's self-attention (code of v2)",
                            sinusoids, alibi),
    "rope": Method("rotated queries and keys, in every attention",
                   scores=rotary, steps_factor=10, defaults=dict(lr=3e-3)),
    "rpe-k": Method("relative table for keys", scores=RelativeScores, steps_factor=4),
    "rpe-kq": Method("relative table for keys and queries", scores=RelativeScores, steps_factor=4),
    # A window opens the keys near a row, in v2's sense; in section 6, it is all that one row sees.
    # At width 61, leading zeros train the positions of 60 digits. Large embeddings and dropout
    # favor content over position. With 3 layers, a row can use what the one before it saw.
    "window": Method("sinusoids, windows in the decoder (v2, +w)", sinusoids, banded, window=1,
                     steps_factor=3, defaults=dict(width=61, dropout=0.3, n_layer=3),
                     embedding=1.33),
    "window-cyclic": Method("windows, position index modulo 3 (v2, +T)", sinusoids, banded,
                            window=1, n_width=9, steps_factor=6, period=3),
    "window-nope": Method("windows in the decoder, no positions (v2, NoPE+w)", bias=banded,
                          window=1, n_width=9, steps_factor=3),
}

def make_bias(config, lines):
    """-> bias(layer, attention, T, S) of the method, made of `lines` if it is calibrated."""
    if config.scheme.calibrated:
        return config.scheme.bias(config, lines)
    return bind(config.scheme.bias, config)

class Layer(nn.Module):
    """Differs: pre-norm by default. Unlike torch's, an encoder that feeds a decoder has no norm
    after its last layer, as the decoder's projections of keys and values can learn the scale."""
    def __init__(self, config, cross):
        super().__init__()
        scores, C = config.scheme.scores, config.d_model
        self.self_attention = MultiHeadAttention(C, config.n_head, config.dropout)
        self.self_attention.scores = bind(scores, config, "self" if cross else "encoder")
        if cross:
            self.cross_attention = MultiHeadAttention(C, config.n_head, config.dropout)
            self.cross_attention.scores = bind(scores, config, "cross")
        self.dropout = nn.Dropout(config.dropout)
        self.feed_forward = nn.Sequential(nn.Linear(C, 4 * C), config.kind.activation(),
                                          self.dropout, nn.Linear(4 * C, C))
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(2 + cross))
        self.norm_first = config.preset != "paper"

    def residual(self, n, x, sublayer):
        if self.norm_first:
            return x + self.dropout(sublayer(self.norms[n](x)))
        return self.norms[n](x + self.dropout(sublayer(x)))

    def forward(self, x, self_bias, memory=None, cross_bias=None):
        x = self.residual(0, x, lambda y: self.self_attention(y, y, self_bias)[0])
        if memory is not None:
            x = self.residual(1, x, lambda y: self.cross_attention(y, memory, cross_bias)[0])
        # The feed-forward network takes rows in chunks, so that a million fit in memory.
        chunks = [self.residual(-1, rows, self.feed_forward) for rows in x.split(2 ** 12, 1)]
        return torch.cat(chunks, 1)

class Transformer(nn.Module):
    """An encoder-decoder or, in section 9, an encoder alone. lines: those of a calibrated method.
    Differs: v2's code initializes q, k and v smaller than the paper preset, by a factor of sqrt(2);
    Jelassi's initialization is Gaussian."""
    def __init__(self, config, lines=()):
        super().__init__()
        self.config, scheme, C = config, config.scheme, config.d_model
        self.embedding = nn.Embedding(config.n_vocab, C)
        nn.init.normal_(self.embedding.weight, std=scheme.embedding)
        self.position = bind(scheme.position, config)
        self.bias = make_bias(config, lines)
        self.dropout = nn.Dropout(config.dropout)
        layers = [Layer(config, False) for _ in range(config.n_encoder)]
        if config.model == "universal":  # one layer, applied repeatedly
            layers = layers[:1] * config.n_encoder
        self.encoder = nn.ModuleList(layers)
        self.decoder = nn.ModuleList(Layer(config, True) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, config.n_vocab)
        if config.preset == "paper":
            for weight in self.parameters():
                if weight.dim() == 2:
                    nn.init.xavier_uniform_(weight)
            self.embedding.weight.data *= math.sqrt(C)

    def embed(self, tokens, side):
        """Tokens (B, T) -> embeddings with positions (B, T, C). Source: v2, App. C.4 (repeating
        positions). Differs: in a source, these are counted from its end."""
        x = self.embedding(tokens.to(self.embedding.weight.device))
        if self.position:
            with x.device:
                index, period = torch.arange(tokens.shape[1]), self.config.scheme.period
                positions = self.position(side, torch.arange(period or len(index))).to(x)
                if period:
                    index = (index.flip(0) if side == "source" else index) % period
                x = x + positions[index]
        return self.dropout(x)

    def bias_of(self, layer, attention, T, S):
        """-> the method's bias (1 or H, T, S), causal in self-attention, or None. In evaluation,
        it is an iterator of pieces for long numbers and lines by our rules, which are causal."""
        with self.head.weight.device:
            pieces = hasattr(self.bias, "in_pieces") and self.config.rules == "ours"
            # Pieces of fewer rows are slower than the whole.
            if pieces and attention != "encoder" and T > 100 and not self.training:
                return self.bias.in_pieces(layer, attention, T, S)
            bias = self.bias and self.bias(layer, attention, T, S)
            if attention != "self":
                return bias
            if bias is None:
                return causal_bias(T)
            return causal_bias(T) + bias

    def forward(self, source, target):
        """source (B, S), target (B, T) -> logits (B, T, V). With no decoder, target only sets T."""
        memory, S, T = self.embed(source, "source"), source.shape[1], target.shape[1]
        for n, layer in enumerate(self.encoder):
            memory = layer(memory, self.bias_of(n, "encoder", S, S))
        if not self.decoder:
            return self.head(self.norm(memory[:, :T]))
        x = self.embed(target, "target")
        for n, layer in enumerate(self.decoder):
            x = layer(x, self.bias_of(n, "self", T, T), memory, self.bias_of(n, "cross", T, S))
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
    token from those before it until none changes; after k passes, the first k are final."""
    model.eval()
    target = torch.full((len(source), limit + 1), VOCAB.index(START))
    for _ in range(limit):
        tokens = model(source, target[:, :-1]).argmax(-1).cpu()
        if torch.equal(tokens, target[:, 1:]):
            break
        target[:, 1:] = tokens
    return target

# 4. Training and tests ----------------------------------------------------------------------------

class Optimizer:
    """Muon for the weight matrices of the linear maps of each `Layer`, Adam at a quarter of the
    rate for all other weights; in the paper preset and without a `Layer`, Adam for all. `share`, a
    fraction of the peak rate, is set before each step. All state consists of tensors that change in
    place, as a CUDA graph needs. torch.optim is not used, as it imports torch's compiler, which
    takes a second. Source: Jordan et al. 2024 (Muon); Liu et al. 2025 (scaling to the size of
    Adam's updates); Kingma and Ba 2015 (Adam); Loshchilov and Hutter 2019 (weight decay). Differs:
    the sources use Adam, Jelassi with a decay of 1e-5 to 1e-2."""
    def __init__(self, model, config):
        self.config, matrices = config, set()
        for layer in model.modules():
            if isinstance(layer, Layer) and config.preset == "fast":
                matrices |= {x.weight for x in layer.modules() if isinstance(x, nn.Linear)}
        self.stacks, self.others = {}, []  # Muon's matrices by shape, and Adam's weights
        for weight in model.parameters():
            if weight in matrices and weight.requires_grad:
                self.stacks.setdefault(weight.shape, []).append(weight)
            elif weight.requires_grad:
                self.others.append(weight)
        self.share = next(model.parameters()).new_ones(())
        self.steps = torch.zeros_like(self.share)
        self.momenta = [torch.zeros_like(torch.stack(x)) for x in self.stacks.values()]
        self.mean = self.share.new_zeros(sum(x.numel() for x in self.others))
        self.square = torch.zeros_like(self.mean)  # the mean of squared gradients
        self.state = [self.steps, self.mean, self.square, *self.momenta]  # kept to resume
        self.graphs = {}  # CUDA graphs by the shape of a batch

    @torch.no_grad()
    def step(self):
        self.steps += 1
        rate = self.share * self.config.lr
        for weights, momentum in zip(self.stacks.values(), self.momenta):
            grad = torch.stack(gradients(weights))  # (n, a, b)
            momentum.lerp_(grad, 0.05)
            update = orthogonal(grad.lerp(momentum, 0.95))  # Nesterov
            move(weights, rate * 0.2 * math.sqrt(max(grad.shape[1:])) * update)
        if not self.others:
            return
        beta, decay = self.config.kind.beta, self.config.kind.decay
        grad = torch.cat([x.flatten() for x in gradients(self.others)])
        self.mean.lerp_(grad, 0.1)
        self.square.lerp_(grad * grad, 1 - beta)
        spread = (self.square / (1 - beta ** self.steps)).sqrt() + 1e-8
        update = self.mean / (1 - 0.9 ** self.steps) / spread
        update += decay * parameters_to_vector(self.others)
        if self.stacks:
            rate = rate / 4
        move(self.others, (rate * update).split([x.numel() for x in self.others]))

def gradients(weights):
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in weights]

def move(weights, updates):
    """Subtract updates from weights, but not from those frozen after the optimizer was made."""
    for weight, update in zip(weights, updates):
        if weight.grad is not None:
            weight -= update.view_as(weight)

def orthogonal(x):
    """Matrices (n, a, b) -> nearly the closest semi-orthogonal ones, by Newton-Schulz steps."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    x = F.normalize(x, dim=(1, 2), eps=1e-7)
    for _ in range(5):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, square, x, beta=3.4445)
    return x

def take_step(model, optimizer, source, target):
    """-> the loss: cross-entropy of target (B, T + 1). Differs: gradients are clipped at norm 1,
    in the paper preset, too."""
    model.train()
    weights = list(model.parameters())
    for weight in weights:
        weight.grad = None
    logits = model(source, target[:, :-1]).flatten(0, 1).float()
    loss = F.cross_entropy(logits, target[:, 1:].flatten().to(logits.device))
    loss.backward()
    clip_grad_norm_(weights, 1.0)
    optimizer.step()
    return loss.detach()

def graphed_step(model, optimizer, *batch):
    """`take_step`; on CUDA, as a graph, since hundreds of kernel launches take about 9 ms and a
    replay takes 1 ms. Of each shape, the first batch takes an ordinary step, to warm up. For the
    second, a step is captured, but not executed; it is replayed for this and later ones. A replay
    reads the graph's inputs and overwrites the loss that the last one returned."""
    graphs, shape = optimizer.graphs, batch[0].shape  # which determines the target's
    if not optimizer.share.is_cuda or shape not in graphs:
        graphs[shape] = None  # warmed up
        return take_step(model, optimizer, *batch)
    if graphs[shape] is None:
        graph, inputs = torch.cuda.CUDAGraph(), [x.cuda() for x in batch]
        with torch.cuda.graph(graph):
            loss = take_step(model, optimizer, *inputs)
        graphs[shape] = graph, inputs, loss
    graph, inputs, loss = graphs[shape]
    for x, new in zip(inputs, batch):
        x.copy_(new)
    graph.replay()
    return loss

class Run(NamedTuple):
    """Parts, such as a model or the proof, are kept, so that a run resumes where it stopped."""
    config: object
    parts: dict
    folder: Path = None
    device: str = "cpu"

    def keep(self, **parts):
        """Add parts and save all as plain values and tensors, which load without running code."""
        self.parts.update(parts)
        buffer = io.BytesIO()
        torch.save(dict(config=self.config.values, vocab=VOCAB, parts=self.parts), buffer)
        self.write("checkpoint.pt", buffer.getvalue())

    def write(self, name, data):
        """Write a file of the folder, if any, by renaming, so that it is never half-written."""
        if self.folder:
            part = Path(self.folder, f"{name}.{os.getpid()}")  # no other process writes this file
            try:
                part.write_bytes(data)
                part.replace(Path(self.folder, name))
            except OSError:
                part.unlink(missing_ok=True)
                raise

def load_weights(model, weights):
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # as of another shape
        raise BadInput(f"--from: has the method or VOCAB changed? {error!r:.200}") from None

def train(run, model, name, data, windows=None):
    """Train a model, or resume from run.parts[name], which has an "optimizer" only while training
    is unfinished. data has `steps`, a count; batch(step) -> source (B, S), target (B, T + 1);
    rate(step) -> share of the peak rate; and check(model) -> list, which the curve gets as [step,
    loss, *check]. With windows, training also ends when the model is proved on them -> the last
    proof. Raises: RunFailed if the loss is not finite."""
    optimizer = Optimizer(model, run.config)
    part = run.parts.get(name, dict(steps=0, seconds=0.0, curve=[]))
    step, curve = part["steps"], part["curve"]
    if step:
        load_weights(model, part["weights"])
        if "optimizer" not in part:
            return windows and prove(model, windows)
        for state, kept in zip(optimizer.state, part["optimizer"]):
            state.copy_(kept)
    saved, done, proof = time.perf_counter(), False, None
    start = saved - part["seconds"]
    while not done:
        step += 1
        optimizer.share.fill_(data.rate(step))
        with seeded(run.config.seed, name, step):  # so that a resumed run draws the same
            loss = graphed_step(model, optimizer, *data.batch(step))
        done = step == data.steps
        if windows and (done or step % 25 == 0 and step >= 50):
            proof = prove(model, windows)
            done = done or proof["proved"]
        if step % 100 == 0 or done:
            curve.append([step, loss.item()] + data.check(model))
        if done or time.perf_counter() - saved > SECONDS:
            if not loss.isfinite():  # waits for the GPU
                raise RunFailed(f"the loss is {loss.item()} at step {step} of {name}")
            seconds = round(time.perf_counter() - start, 2)
            most = seconds / step * data.steps
            LOG.info(f"{name}: step {step:,} of {data.steps:,}, loss {loss:.4f}, "
                     f"{seconds:.0f} of at most {most:.0f} s")
            part = dict(steps=step, seconds=seconds, curve=curve, weights=model.state_dict())
            if not done:
                part["optimizer"] = optimizer.state
            run.keep(**{name: copy.deepcopy(part)})  # as the next step changes tensors in place
            saved = time.perf_counter()  # however long that took
    return proof

def numbers_data(config, numbers, steps, first_training):
    """Training data of an encoder-decoder, from training and held-out numbers. The first training
    begins with small numbers, half of them below 1.6% of the range, on which a model learns sooner
    how places align, in the paper preset, too. Differs: the sources draw uniformly and name no
    schedule of the rate."""
    spec, (training, held_out) = config.spec, numbers
    def batch(step, B=config.batch, pool=training):
        """-> up to B questions of one training width."""
        power = 6 - 5 * step / steps if first_training else 1.0  # falls to 1, which is uniform
        def draw(base, length, n):
            share = torch.rand(n, dtype=torch.float32) ** power
            pick = (len(pool) * share).long()  # pools are sorted: small numbers come first
            return pool[pick, None] // base ** torch.arange(length) % base
        width, drawn = config.widths[torch.randint(len(config.widths), ())], []
        for _ in range(20):  # in some tasks, few questions have an answer
            columns = draw_columns(spec, draw, spec.width, width, B)
            drawn.append(arrange(spec, columns, config.align))
            source, target = map(torch.cat, zip(*drawn))
            if len(source) >= B:
                break
        demand(len(source), f"{config.task}: 20 draws of {B} gave no question; has it headroom?")
        return source[:B], target[:B]
    def rate(step):
        if config.preset == "paper":
            return 1.0
        falling = 0.4 if first_training else 1.0  # share of the steps in which the rate falls
        return min(1.0, step / 30, (steps - step + 1) / (falling * steps))
    def check(model):
        with seeded(config.seed, "held-out"):
            source, target = batch(steps, 1000, held_out)
        return [right_tokens(model, source, target).all(1).sum().item() / len(source)]
    return SimpleNamespace(steps=steps, batch=batch, rate=rate, check=check)

def draw_tests(config, length):
    """-> {"random": (source, target)}, and for the longest length up to 60 also "hard"."""
    n = config.samples
    if length > 100:
        n = min(n, 200)  # long questions are slow
    tests = dict(random=draw_questions(config, draw_exact, length, n))
    if length == max([x for x in config.lengths if x <= 60], default=0):
        with seeded(config.seed, "hard", length):
            tests["hard"] = draw_questions(config, draw_hard, length, n)
    return tests

def evaluate(model, config):
    """Test at config.lengths -> {"rows", "seconds"}. A row has the number of exact answers,
    "correct" of "n", and the accuracy of each digit, "places"."""
    rows, start = [], time.perf_counter()
    for length in config.lengths:
        with seeded(config.seed, "test", length):
            tests = config.kind.draw_tests(config, length)
        for name, (source, target) in tests.items():
            right = right_tokens(model, source, target)
            digit = target[:, 1:] < VOCAB.index("+")
            places = ((right & digit).sum(0) / digit.sum(0))[digit.any(0)]
            rows.append(dict(digits=length, set=name, correct=right.all(1).sum().item(),
                             n=len(right), places=[round(x, 4) for x in places.tolist()]))
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

def ask(model, config, question):
    """A question, "123+748" or "123 + 748" -> "871". Raises: BadInput if it is not the task's."""
    operands = [text.strip() for text in question.split(config.spec.sign or None)]
    source, target = example(config.task, *operands, width=config.widths[0], align=config.align)
    text = decode(generate(model, encode(source)[None], len(target) - 1)[0])[1:]
    digits, end, _ = text.partition(END)
    if not end or not set(digits) <= set(VOCAB[:VOCAB.index("+")]) or not digits:
        return f"no number; the model wrote {text!r}"
    if not config.spec.msd_first:
        digits = digits[::-1]
    if config.spec.headroom:
        return digits.lstrip("0") or "0"
    return digits[-max(map(len, operands)):]  # one digit for each digit of the question

# 5. ABC: lines, bias, calibration -----------------------------------------------------------------
# This section, up to `blocks_of`, can be copied as it stands; it needs math, torch and NamedTuple.
#
# A line is all elements of an attention matrix along a (row, column) step of (1, 1), (1, 0) or
# (1, -1). Lines that stand out are extended to other sizes, within blocks of columns: as numbers
# grow, the first operand moves away from the end of the source, but not within its block.
#
# A diagonal (1, 1) of self-attention shows a token at a fixed distance before the row. A vertical
# (1, 0) of cross-attention shows one symbol or single digit to all rows. Numbers are written from
# the most significant digit on, so a line of cross-attention shows a place at a fixed distance from
# the row if it runs as the places do: an anti-diagonal (1, -1) in tasks from the last digit on, a
# diagonal in those from the first. A line that runs the other way shows a place that depends on the
# width, so it means nothing at other widths. The rules of this file, "ours" (see RULES), use the
# directions named here except this one; the other rules are those of the sources.

class Line(NamedTuple):
    """A line that is kept open. Its `path` identifies it in any head and layer."""
    head: int
    direction: int  # 1 diagonal, 0 vertical, -1 anti-diagonal
    block: int  # index of the block of columns that the line is in
    offset: int  # its column in row 0; of anti-diagonals, counted from the block's last column
    bias: float  # d less the greatest d, see `find_lines`
    z: float  # (d - mu) / sigma
    layer: int = 0
    attention: str = "cross"

    @property
    def path(self):
        return self.attention, self.direction, self.block, self.offset

def lines_of(x, direction):
    """x (m, n), of one head and block -> {offset: the elements of this line}."""
    if direction == 0:
        return dict(enumerate(x.unbind(1)))
    if direction < 0:
        x = x.flip(1)
    return {n: x.diagonal(n) for n in range(1 - len(x), x.shape[1])}

def columns_of(lines, rows, blocks):
    """-> {path: the line's column in each of these rows (M,)}, -1 where it has none: outside the
    block or, in self-attention, after the row."""
    columns = {}
    for path in {line.path for line in lines}:  # a line is often in several heads
        attention, direction, block, offset = path
        size, start = blocks[block], sum(blocks[:block])
        column = offset + abs(direction) * rows
        if direction < 0:
            column = size - 1 - column
        inside = (column >= 0) & (column < size)
        if attention == "self":
            inside &= column <= rows
        columns[path] = torch.where(inside, start + column, -1)
    return columns

EACH, TOGETHER = ((1,), (0,), (-1,)), ((1, 0, -1),)  # directions, each alone or in one group

def find_lines(attention, blocks, kappa, groups=EACH, total=False, ours=False):
    """Yield the lines that stand out of attention (H, m, n), given the sizes of its blocks.

    In each head, the lines of one group of directions are compared by their means d. Six, say:

        offset     -2    -1     0     1     2     3       mean mu = .143, deviation sigma = .168
        mean d    .02   .31   .44   .05   .03   .01       z = (d - mu) / sigma is 1.8 at offset 0

    A line stands out if d > mu + kappa * sigma: for kappa = 1.5 (> .395), that of offset 0, with
    bias 0; for 0.9 (> .294), that of offset -1, too, with bias .31 - .44 = -.13. With total, d is
    the sum. Source: v1, Eqs. 1 and 2. Differs: the printed condition, d - d_max > threshold, holds
    for no positive threshold, so d is compared, as in the authors' code. That code also leaves out
    sums of 0, counts lines of equal sums as one, compares by >=, takes the sum as the bias, and
    opens END's column in row 0; this function does not.

    ours: sigma is multiplied by sqrt(L - 1), where L is the number of lines that are compared. No z
    can exceed this (2.24 above), so one kappa fits any L; the papers' kappa of 4 is out of reach
    for 16 lines. Only lines that cross more than half of the rows count, as the mean of a short
    line can be high by chance.

    With several blocks, only a block's first column may be a vertical, as others are different
    places at different widths."""
    for group in groups:
        for head, maps in enumerate(attention):
            means = {}  # (direction, block, offset) -> d
            for direction in group:
                for block, x in enumerate(maps.split(blocks, 1)):
                    for offset, line in lines_of(x, direction).items():
                        if not ours or len(line) > len(maps) / 2:
                            means[direction, block, offset] = line.sum() if total else line.mean()
            if not means:
                continue
            d = torch.stack(list(means.values()))
            sigma, mu = torch.std_mean(d, correction=0)
            unit = sigma * math.sqrt(len(d) - 1) if ours else sigma
            # Lines of equal mean differ by rounding, so a little is added to the threshold.
            threshold = mu + kappa * unit + 1e-5 * mu
            for (direction, block, offset), x in means.items():
                if x > threshold and (direction or offset == 0 or len(blocks) == 1):
                    bias, z = x - d.max(), (x - mu) / sigma
                    yield Line(head, direction, block, offset, bias.item(), z.item())

def bias_of_lines(lines, n_head, blocks, rules, rows, keys):
    """Extend lines -> bias (H, M, N) between rows (M,) and keys (N,): -inf but on lines; where two
    cross, the greater bias. Rows that see nothing are opened: by our rules at column 0, the same at
    every length; by others at all columns. Source: v2, Eq. 1 (cases), step 2.4, App. E.1; v1, step
    2.3. Differs: the papers open a head only if all of it is closed, not single rows."""
    columns = columns_of(lines, rows, blocks)
    bias = torch.full((n_head, len(rows), len(keys)), -math.inf, device=rows.device)
    for line in sorted(lines, key=lambda line: line.bias):  # the greater bias is written last
        bias[line.head].masked_fill_(keys == columns[line.path][:, None], line.bias)
    empty = bias.isneginf().all(2, keepdim=True)
    if rules == "ours":
        empty = empty & (keys == 0)
    return bias.masked_fill(empty, 0)

# Arguments of `find_lines`. Where a proof is possible, `choose_lines` tries KAPPAS, not our 0.5.
RULES = {
    "ours": dict(self=dict(kappa=0.5, groups=((1,),), ours=True),
                 cross=dict(kappa=0.5, groups=((0,), (-1,)), ours=True)),  # or (1,), see above
    "v1": dict(self=dict(kappa=4.0), cross=dict(kappa=4.0)),  # Secs. 5 and 6
    "v2": dict(self=dict(kappa=0.87, groups=TOGETHER),  # App. D; App. F may mean EACH
               cross=dict(kappa=4.5, groups=TOGETHER)),
    "code": dict(self=dict(kappa=0.87, groups=((1,),), total=True),  # the authors' code
                 cross=dict(kappa=4.5, groups=((-1,),), total=True)),
}

def abc_bias(attention, M, N, rules="ours", blocks=None, **changes):
    """For a model of your own, without a proof: attention (H, m, n), averaged over examples but not
    heads (as by nn.MultiheadAttention with average_attn_weights=False) -> bias (H, M, N) of its
    extended lines. A row on none of them sees column 0 or, by other rules, all. In self-attention,
    add `causal_bias(M)`. blocks: the size of each block of columns as (size in n, size in N), by
    default one block. Lines are found as in cross-attention by RULES[rules], for "ours" in all
    directions; `changes` replace arguments of `find_lines`. Source: v1, Sec. 5, step 2; v2, App. D,
    step 2. Raises: ValueError."""
    if attention.dim() != 3 or not (attention.is_floating_point() and attention.isfinite().all()):
        raise ValueError("attention is (H, m, n), of finite floats. "
                         f"Got {attention.dtype}, {attention.shape}.")
    if rules not in RULES:
        raise ValueError(f"rules: {rules!r} is none of {list(RULES)}")
    H, _, n = attention.shape
    blocks = blocks or [(n, N)]
    now, then = [old for old, _ in blocks], [new for _, new in blocks]
    if (sum(now), sum(then)) != (n, N) or min(now + then) < 1:
        raise ValueError(f"blocks add up to {n} and {N}. Got {blocks}.")
    if rules == "ours":
        changes = dict(groups=EACH) | changes
    lines = list(find_lines(attention.cpu(), now, **RULES[rules]["cross"] | changes))
    return bias_of_lines(lines, H, then, rules, torch.arange(M), torch.arange(N)).to(attention)

# What follows calibrates the bias of a run. By default, a model has one decoder layer and no
# encoder, so its cross-attention reads the embeddings of the question. `bias(layer, attention, T,
# S)` gives the bias of one attention, "self" or "cross", of T rows and S keys. Training numbers are
# padded to one of `config.widths`, 7 to 15 digits in addition.

def blocks_of(config, attention, N):
    """-> sizes of the blocks of N columns. In cross-attention by our rules, these are numbers with
    the symbol on their left, and single other columns: `$0123|+0748|&`, `$0123|*|7|&`."""
    if config.rules != "ours" or attention == "self":
        return [N]
    operands = config.spec.operands
    numbers, others = operands.count("number"), 1 + 2 * operands.count("digit")
    return [(N - others) // numbers] * numbers + [1] * others

class CalibratedBias(nn.Module):
    """A run's bias, made of its lines. torch calls `get_extra_state` and `set_extra_state`, to keep
    the lines in the state_dict. Source: v2, Eq. 2. Differs: in Eq. 2, scores are not divided by
    sqrt(D); in App. C.4, they are."""
    def __init__(self, config, lines):
        super().__init__()
        self.config, self.lines = config, lines

    def get_extra_state(self):
        return [tuple(line) for line in self.lines]

    def set_extra_state(self, lines):
        self.lines = [Line(*line) for line in lines]

    def forward(self, layer, attention, T, S):
        """-> bias (H, T, S); None in encoders."""
        if attention == "encoder":
            return None
        lines = [line for line in self.lines if (line.attention, line.layer) == (attention, layer)]
        blocks, rows, keys = blocks_of(self.config, attention, S), torch.arange(T), torch.arange(S)
        return bias_of_lines(lines, self.config.n_head, blocks, self.config.rules, rows, keys)

    def in_pieces(self, layer, attention, T, S):
        """By our rules, yield pieces of the fastest size: rows, keys (those on lines, and key 0),
        and the bias between them."""
        lines = [line for line in self.lines if (line.attention, line.layer) == (attention, layer)]
        blocks, all_rows = blocks_of(self.config, attention, S), torch.arange(T)
        for rows in all_rows.split(2048 if all_rows.is_cuda else 128):
            columns = list(columns_of(lines, rows, blocks).values())
            keys = torch.cat([rows.new_zeros(1)] + columns).clamp(min=0).unique()
            yield rows, keys, bias_of_lines(
                lines, self.config.n_head, blocks, self.config.rules, rows, keys)

METHODS["abc"] = Method("bias calibrated on a vanilla model, no positions", bias=CalibratedBias,
                        n_width=9, calibrated=True)

@torch.no_grad()
def average_attention(model, source, target):
    """Attention averaged over right answers: source (B, S), target (B, T + 1) -> self (n_layer, H,
    T, T), cross (n_layer, H, T, S). Source: v1, Sec. 5; v2, App. D. Differs: as in the authors'
    code, weights are averaged, not scores. Raises: RunFailed if fewer than 1% of the answers are
    right (a run with 1.3% has still been proved)."""
    demand(len(source), "there are no examples to average attention over")
    right = right_tokens(model, source, target).all(1)
    if right.float().mean() < 0.01:
        raise RunFailed("the model answers fewer than 1% of examples correctly; raise --steps")
    model(source[right], target[right, :-1])
    own = [layer.self_attention.weights.mean(0) for layer in model.decoder]
    cross = [layer.cross_attention.weights.mean(0) for layer in model.decoder]
    return torch.stack(own).cpu(), torch.stack(cross).cpu()

def calibrate(config, attention, **changes):
    """Yield the lines of `average_attention`, by RULES but for `changes`. By ours, each layer has
    its own; by others, all have those of the last. Source: v2, App. D. Differs: only rows that
    training fills count (authors' code: 6; papers: all); biases are rounded to two decimals."""
    shape, filled = tuple(attention[0].shape), config.spec.width + 1
    demand(shape[:2] == (config.n_layer, config.n_head),
           f"--n-layer, --n-head: other than those of attention {shape}")
    demand(all(x.is_floating_point() and x.isfinite().all() for x in attention),
           "attention is of finite floats")
    demand(config.spec.label or shape[2] >= filled,
           f"an answer has {filled} rows or more. Got attention {shape}.")
    for layer in range(config.n_layer):
        index = layer if config.rules == "ours" else -1
        for name, maps in zip(("self", "cross"), attention):
            rule = RULES[config.rules][name] | changes
            if config.rules == "ours" and name == "cross" and config.spec.msd_first:
                rule["groups"] = (0,), (1,)
            blocks = blocks_of(config, name, maps.shape[3])
            demand(sum(blocks) == maps.shape[3],
                   f"{config.task} has no {maps.shape[3]} columns of {name}-attention")
            for line in find_lines(maps[index, :, :filled], blocks, **rule):
                yield line._replace(layer=layer, attention=name, bias=round(line.bias, 2))

# 6. Proof -----------------------------------------------------------------------------------------
# Row t writes digit t of the answer, the last row END. With one decoder layer, no encoder, a bias
# that opens few keys, and no positions or repeating ones, what a row writes depends only on its
# *window*: the token before it and, for each head, the weight that the bias alone gives to each
# token. (What queries and keys add depends on these tokens, too.) For `$0129&`, with lines of
# offsets 0 and -1, which show what stands at place t and below it:
#
#     row t                             0       1       2       3       4
#     token before the row              $       0       3       1       0
#     tokens that the lines show        9       2 9     1 2     0 1     $ 0
#     token that it must write          0       3       1       0       &
#
# So a row that sees 2 and 9 after a 0 always writes 3. Without the line of offset -1, a row that
# sees 2 after a 0 must write 3 in `$0129&` and 2 in `$0205&`, 205 + 1 = 206: these questions
# *clash*, as no weights can tell them apart.
#
# There are finitely many windows. If the model is right on all, it is right at every length, by
# induction: if the tokens before row t are right, the row sees one of the windows, so it is right.
#
# Which numbers show all windows? Places are counted in the order of the task, and a row sees places
# within a span of `reach` places. The places before the span act only through the carry that they
# hand on; those after it must only end in a valid carry. For a + b, the carry into place 0 is 0,
# and the carry into any later place is 0 or 1: after one place, the carries that can arrive are
# *settled*. Likewise, one place after the span suffices to end, after the zero of headroom, with
# the carry 0. With lines of offsets 0 and -1, the span has two places, and numbers of
#
#     1 place | the span of 2 places | 1 place | 1 zero of headroom
#
# N = 5 places have a row that sees what all rows far from both ends see, in longer numbers, too. In
# general, N = settled + reach + settled + headroom, where `settled` is the greater of the numbers
# of places before and after the span. (If more rows at an end differ from those in the middle than
# the span explains, as a bias of one's own may have it, `reach` has room for them, too.)
#
# - A row nearer to an end sees what the row at its distance from this end sees in N places. So the
#   widths from the least training width to N show all windows. If that width exceeds N, as 7 does
#   for addition, it alone shows them.
# - If carries or positions repeat after p places, what a row sees also depends on its index and
#   on the width, both modulo p. A row in the middle needs p - 1 more places, and p successive
#   widths are read.
# - In tasks from the most significant digit on, headroom zeros come first, and all final carries
#   are valid.
#
# All this assumes exact arithmetic, numbers padded with zeros to the training width or more, and a
# bias of one's own that goes on as it does up to 48 places. In floating point, rounding depends on
# the width. So the right token must lead all others by MARGIN, and by a thousandth of the largest
# logit. And in drawn questions of up to 1,000 digits, each row must show a listed window, with
# logits that differ by less than MARGIN / 10 from those of the short question that shows it.
# (Weights of attention count as equal if they are to 9 decimals.)

MARGIN = 0.5  # lead, in logits, that the right token must have
MOST_PARTIAL = 2 ** 24  # limit on the number of partial questions that one place can lead to
MOST_WINDOWS = 2 ** 19  # limit on the number of windows, of which each takes 2 kB of memory
# The least share that a bias may give to an open key: shares are rounded to 9 decimals, and the
# scores of queries and keys may enlarge differences that this rounding hides.
LEAST_SHARE = 1e-6

class Windows(NamedTuple):
    """The windows of a bias. seen: {window: (token that it must write, source, target, n)}, where
    question n of this batch was the first to show it. questions: these questions, in chunks of
    source (B, S), target (B, T + 1), rows; where each chunk has one row, they are in the order of
    `seen`. clash: two questions, (source, target), in which a row sees the same but must write
    different tokens. why: the reason if there can be no proof, such as a clash, else empty."""
    config: object
    bias: Callable  # whose windows these are
    seen: dict
    questions: list
    clash: tuple = ()
    why: str = ""

def bias_between(bias, attention, T, N):
    """-> the bias (1 or H, T, N) of a bias function, causal in self-attention, or its pieces."""
    found = bias(0, attention, T, N)
    if found is None:
        found = torch.zeros(1, T, N)
    if torch.is_tensor(found):
        found = found.reshape(-1, T, N)
        if attention == "self":
            found = found + causal_bias(T).to(found)
    return found

def shares_of(bias):
    """Bias (H, R, K) -> the shares of attention that it alone gives to keys, on the CPU. Raises:
    RunFailed if a key is open with a share below LEAST_SHARE."""
    shares = bias.double().softmax(2)
    if ((shares < LEAST_SHARE) & ~bias.isneginf()).any():
        raise RunFailed(f"no proof: a bias leaves an open key less than {LEAST_SHARE:g} of the "
                        "attention")
    return shares.cpu()

@torch.no_grad()
def views_of_rows(config, bias, source, target, rows):
    """What rows [R] see of questions, source (B, S), target (B, T + 1) -> numbers (B, R, features),
    equal where models with this bias see the same: the token before the row and, for each head and
    token, the share of the weights that the bias alone gives to keys with this token. Tokens are
    paired with their repeating positions, in a source counted from its end. If
    bias(layer, attention, T, N) gives pieces, which cover all rows, `rows` must be all. Raises:
    RunFailed, as `shares_of`."""
    T, S, period = target.shape[1] - 1, source.shape[1], config.scheme.period or 1
    before = target[:, :-1] * period + torch.arange(T) % period
    source = source * period + torch.arange(S).flip(0) % period
    parts = [before[:, rows, None]]
    for attention, tokens in ("self", before), ("cross", source):
        pieces, views = bias_between(bias, attention, T, tokens.shape[1]), []
        if torch.is_tensor(pieces):
            pieces = [(rows, slice(None), pieces[:, rows])]
        for _, keys, piece in pieces:
            keys = F.one_hot(tokens[:, keys], len(VOCAB) * period).double()
            views.append(torch.einsum("hrk,bkv->brhv", shares_of(piece), keys).flatten(2))
        parts.append(torch.cat(views, 1).round(decimals=9))
    return torch.cat(parts, 2)

def collect_windows(config, bias, questions):
    """Read questions, each source (B, S), target (B, T + 1), rows [R], up to a clash -> the Windows
    that they show to models with this bias(layer, attention, T, N). Raises: RunFailed."""
    seen, kept = {}, []
    for source, target, rows in questions:
        views = views_of_rows(config, bias, source, target, rows)
        tokens, new = target[:, 1:][:, rows].flatten().tolist(), []
        for index, view in enumerate(views.flatten(0, 1).numpy()):
            window, token, n = view.tobytes(), tokens[index], index // len(rows)
            if window not in seen:
                seen[window] = token, source, target, n
                new.append(n)
            first, sources, targets, m = seen[window]
            if token != first:
                clash = (source[n, None], target[n, None]), (sources[m, None], targets[m, None])
                why = (f"{decode(source[n])} and {decode(sources[m])} look the same to a row that "
                       f"must write {VOCAB[token]} or {VOCAB[first]}")
                return Windows(config, bias, seen, kept, clash, why)
        if len(seen) > MOST_WINDOWS:
            raise RunFailed(f"no proof: too many windows, over {MOST_WINDOWS:,}; tested only")
        for start in range(0, len(new), 500):
            chunk = new[start:start + 500]
            kept.append((source[chunk], target[chunk], rows))
    return Windows(config, bias, seen, kept)

def follow_carries(spec, singles):
    """All carries that can enter a place, given the single digits, the same at every place ->
    {carry: [(digits of all operands, token, next carry), ...]}, with the columns of digits that
    have an answer. For n + 1: {1: [((0,), 1, 0), ..., ((9,), 0, 1)], 0: [((0,), 0, 0), ...]}.
    Raises: RunFailed."""
    numbers = itertools.product(range(spec.base), repeat=spec.operands.count("number"))
    columns = [digits + singles for digits in numbers]
    table, carries = {}, [spec.first]
    for carry in carries:  # grows
        if len(table) > 1000:
            raise RunFailed("no proof: more than 1,000 carries can be handed on")
        token, after = spec.step(torch.full((len(columns),), carry), torch.tensor(columns))
        spec.check(token)
        table[carry] = [move for move in zip(columns, token.tolist(), after.tolist())
                        if move[1] >= 0]
        carries += {after for _, _, after in table[carry]} - set(carries)
    return table

def places_to_settle(spec, table):
    """-> `settled`, and after how many places carries then repeat. Raises: RunFailed."""
    n_number = spec.operands.count("number")
    steps, zero_steps = set(), set()  # (carry, next carry), by any digits and by leading zeros
    for carry, moves in table.items():
        for column, _, after in moves:
            steps.add((carry, after))
            if not any(column[:n_number]):
                zero_steps.add((carry, after))
    # Carries that can arrive after n places, and that can end validly in n (headroom not counted).
    arrive, can_end = {spec.first}, set(table)
    if spec.headroom and not spec.msd_first:
        can_end = {0} & can_end
    for _ in range(spec.headroom):
        if spec.msd_first:
            arrive = {after for carry, after in zero_steps if carry in arrive}
        else:
            can_end = {carry for carry, after in zero_steps if after in can_end}
    known = []
    for n in range(100):
        state = arrive, can_end
        if state in known:
            settled = known.index(state)
            return settled, n - settled
        known.append(state)
        arrive = {after for carry, after in steps if carry in arrive}
        can_end = {carry for carry, after in steps if after in can_end}
    raise RunFailed("no proof: the carries that a place can get do not repeat within 100 places")

def looks_of(config, table, row, opened):
    """-> two views of a row, given its open keys (`opened`, from `rows_seen`). looks: {place:
    {column: (id,)}}, where columns of equal id look the same to the row at this place; a column is
    one digit of each operand, as in `table`. tokens: the places whose tokens of the answer the row
    sees or writes."""
    tokens, digits = {row - 1, row}, []  # digits: place, head, bias, operand
    for attention, operand, place, head, value in opened:
        if attention == "self" and operand == 0:
            tokens.add(row + place)
        elif operand >= 0:
            digits.append((row + place, head, value, operand))
    # A look is a sorted list, as a head shows digits without their order; which operand a digit
    # belongs to shows only if positions repeat. Each different look gets an id.
    looks, ids = {place: {} for place, _, _, _ in digits}, {}
    columns = {column for moves in table.values() for column, _, _ in moves}
    for place, column in itertools.product(looks, columns):
        look = sorted((head, value, config.scheme.period and operand, column[operand])
                      for at, head, value, operand in digits if at == place)
        looks[place][column] = (ids.setdefault(tuple(look), len(ids)),)
    return looks, tokens

def questions_of_row(spec, table, width, looks, tokens):
    """-> digits (B, W, n) of questions, some invalid, that show all windows of a row, given its
    `looks_of`. Raises: RunFailed.

    This is dynamic programming: questions grow from place 0 on. If two look the same to the row so
    far and hand on the same carry, whatever follows shows the same windows, so one of them is kept.
    Of 129 + 748, a row that writes at place 1 and also sees place 0 has seen 9, 8 and the token 7,
    then 2, 4 and the token 7, and nothing of place 2: there, (0, 0) stands for all digits that hand
    on the carry 0, and (1, 9) for all that hand on 1."""
    n_number = spec.operands.count("number")
    partial = {((), spec.first): ()}  # (what the row has seen, carry) -> digits of all places
    for place in range(width):
        is_zero = place >= width - spec.headroom
        if spec.msd_first:
            is_zero = place < spec.headroom
        ways = {}  # carry -> {(what the row sees here, next carry): digits}
        for carry, moves in table.items():
            ways[carry] = {}
            if is_zero:
                moves = [move for move in moves if not any(move[0][:n_number])]
            for column, token, after in moves:
                look = ()
                if place in looks:
                    look = looks[place][column]
                if place in tokens:
                    look += (token,)
                ways[carry].setdefault((look, after), column)
        extended = {}
        for (seen, carry), columns in partial.items():
            if len(partial) * len(ways[carry]) > MOST_PARTIAL:
                raise RunFailed(f"no proof: too many windows to list, over {MOST_PARTIAL:,} cases; "
                                "tested only")
            for (look, after), column in ways[carry].items():
                extended.setdefault((seen + look, after), columns + (column,))
        partial = extended
    return torch.tensor(list(partial.values())).long()

def obstacles(config):
    """-> what rules out a proof, as rows depend on more than windows: "positions, an encoder"."""
    scheme = config.scheme
    found = {"positions": scheme.scores or scheme.position and not scheme.period,
             "keys open at any distance": not (
                 scheme.calibrated or scheme.window and scheme.bias),
             "several layers": config.n_layer > 1, "an encoder": config.n_encoder,
             "the sources' rules": config.rules != "ours", "a label": config.spec.label}
    return ", ".join(name for name, present in found.items() if present)

def rows_seen(config, bias, width):
    """-> for each row, the set of (attention, operand, place relative to the row, head, bias) of
    its open keys. In self-attention, digits have operand 0. All tokens that are no digits of a
    number, such as `$` or the 7 of `$0123*7&`, have operand -1 and, as their place, how many such
    tokens are on their left."""
    columns = torch.zeros(1, width, len(config.spec.operands)).long()
    for operand, kind in enumerate(config.spec.operands):
        if kind == "number" or config.align:  # not digits, but marks that tell operand and place
            columns[0, :, operand] = len(VOCAB) + operand * width + torch.arange(width)
    question = write_question(config.spec, columns, config.align)[0].tolist()
    answer = [0, *range(len(VOCAB), len(VOCAB) + width)]  # START, then a mark of each place
    rows = [set() for _ in answer]
    for attention, marks in ("self", answer), ("cross", question):
        opened = bias_between(bias, attention, width + 1, len(marks))
        if not torch.is_tensor(opened):
            raise RunFailed("no proof: the method gives its bias in pieces")
        shares_of(opened)  # which refuses some
        opened = opened.cpu()
        for head, row, key in (opened > -math.inf).nonzero().tolist():
            operand, place = divmod(marks[key] - len(VOCAB), width)
            place -= row
            if operand < 0:
                operand, place = -1, sum(mark < len(VOCAB) for mark in marks[:key])
            rows[row].add((attention, operand, place, head, opened[head, row, key].item()))
    return rows

def reach_of(config, bias):
    """-> `reach`, the number of places that decide what a row sees: `before` it, and `after`, from
    it on. before is the distance to the first place that a bias shows to any row, or the number of
    rows at the start that differ from those in the middle, whichever is greater; after likewise, to
    the last place and at the end. The tokens that a row sees or writes, of its place and the one
    before, count, too. Widths from the least training width to 48, or eight, are read, for
    CalibratedBias two. Raises: RunFailed unless, over these widths, all rows in the middle, and all
    rows at one distance from an end, see the same."""
    near, least = 20, config.widths[0]
    widths = range(least, max(49, least + 8))
    if type(bias) is CalibratedBias:
        near = 3 + 2 * max([abs(line.offset) for line in bias.lines], default=0)
        widths = 2 * near + 1, 2 * near + 8
    rows_of = {width: rows_seen(config, bias, width) for width in widths}
    places, longest = {-1, 0}, rows_of[max(widths)]
    for opened in itertools.chain(*rows_of.values()):
        places |= {place for _, operand, place, _, _ in opened if operand >= 0}
    middle, before, after = longest[len(longest) // 2], -min(places), 1 + max(places)
    for row, opened in enumerate(longest):
        if opened != middle and row < len(longest) // 2:
            before = max(before, row + 1)
        elif opened != middle:
            after = max(after, len(longest) - row)
    fixed = max(before, after) <= near
    for width, rows in rows_of.items():
        if width >= before + after:  # shorter ones are read in full
            fixed &= rows[:before] == longest[:before] and rows[-after:] == longest[-after:]
            fixed &= all(row == middle for row in rows[before:-after])
    if not fixed:
        raise RunFailed("no proof: keys are open at no fixed distance from the row, or farther "
                        f"than {near} places")
    return before + after

def short_questions(config, bias):
    """Yield questions that show all windows, as `collect_windows` reads them, row by row. Raises:
    RunFailed."""
    if obstacles(config):
        raise RunFailed(f"no proof attempted: this run has {obstacles(config)}")
    spec, reach, rows_of = config.spec, reach_of(config, bias), {}
    for singles in itertools.product(range(spec.base), repeat=spec.operands.count("digit")):
        table = follow_carries(spec, singles)
        settled, repeat = places_to_settle(spec, table)
        period = math.lcm(config.scheme.period or 1, repeat)
        N = settled + reach + settled + spec.headroom
        # The least training width is 7 for addition; for parity it is 20, far beyond N = 4.
        least, needed = config.widths[0], N + period - 1
        for width in range(least, max(least, needed) + period):
            if width not in rows_of:
                rows_of[width] = rows_seen(config, bias, width)
            for row, opened in enumerate(rows_of[width]):
                looks, tokens = looks_of(config, table, row, opened)
                columns = questions_of_row(spec, table, width, looks, tokens)
                for part in columns.split(2 ** 16):  # few enough for memory
                    if len(part):
                        yield *arrange(spec, part, config.align), [row]

def enumerate_windows(config, bias):
    """-> Windows: all, or only those up to a clash; `why` says why they cannot be enumerated."""
    try:
        return collect_windows(config, bias, short_questions(config, bias))
    except RunFailed as error:
        return Windows(config, bias, {}, [], why=str(error))

def measure_drift(model, windows, logits, lengths=(*range(20, 41), 60, 1000)):
    """Given the logits (n, V) of windows -> the largest difference from those of rows that show the
    same windows by the model's own bias, in drawn questions of these lengths; inf if a row shows
    another window or must write another token than its window, or a logit is not a number. Raises:
    BadInput if no question can be drawn."""
    config, drift = windows.config, 0.0
    spec, index_of = config.spec, {window: n for n, window in enumerate(windows.seen)}
    bias = getattr(model, "bias_of", windows.bias)
    for length in lengths:
        n = max(2, 200 // length)
        if length == 20:  # about ten questions of each combination of single digits
            n = max(n, min(5000, 10 * spec.base ** spec.operands.count("digit")))
        with seeded(config.seed, "drift", length):
            source, target = draw_questions(config, draw_hard, length, n)
        views = views_of_rows(config, bias, source, target, range(target.shape[1] - 1))
        seen = [view.tobytes() for view in views.flatten(0, 1).numpy()]
        known = [windows.seen.get(window, [None])[0] for window in seen]
        if known != target[:, 1:].flatten().tolist():
            return math.inf
        found = model(source, target[:, :-1]).cpu().flatten(0, 1)
        expected = logits[[index_of[window] for window in seen]]
        difference = (found - expected).abs().masked_fill(found == expected, 0)  # -inf, too
        drift = max(drift, difference.nan_to_num(math.inf).max().item())
    return drift

@torch.no_grad()
def prove(model, windows):
    """-> {"proved", "why"} and, if windows are known, "windows", "margin" and "drift" (None if one
    fails). A right token must lead, in logits, by `need`, which is MARGIN or a thousandth of the
    largest logit of its row, whichever is greater; and the drift must be below MARGIN / 10. margin:
    MARGIN plus the least excess of a lead over what it needs. If the bias has parameters, which
    training may have changed, windows are listed anew. The model is left in evaluation mode."""
    bias = getattr(model, "bias", windows.bias)
    if isinstance(bias, nn.Module) and list(bias.parameters()):
        windows = enumerate_windows(windows.config, getattr(model, "bias_of", windows.bias))
    if windows.clash:
        return dict(proved=False, why=f"refuted for any weights: {windows.why}")
    if windows.why:
        return dict(proved=False, why=windows.why)
    model.eval()
    margin, drift, why, found = math.inf, None, "there are no questions", []
    for source, target, [row] in windows.questions:
        logits, want = model(source, target[:, :-1]).cpu(), target[:, 1:, None]  # (B, T, V)
        lead = logits.gather(2, want).squeeze(2) - logits.scatter(2, want, -math.inf).amax(2)
        largest = logits.abs().masked_fill(logits.isneginf(), 0).amax(2)
        need = (largest / 1000).clamp(min=MARGIN)
        excess = (lead - need).nan_to_num(-1e9).amin(1)  # (B,)
        margin, why = min(margin, MARGIN + excess.min().item()), ""
        found.append(logits[:, row])
        if margin < MARGIN:
            why = f"{decode(source[excess.argmin()])} is wrong or in doubt"
            break
    if not why:
        try:
            drift = measure_drift(model, windows, torch.cat(found))
            if drift == math.inf:
                drift, why = None, "longer questions show windows that were not listed"
            elif drift >= MARGIN / 10:
                why = f"logits of longer questions drift by {drift:.1e}"
        except (RunFailed, BadInput) as error:  # questions cannot be drawn, or shares be compared
            why = str(error)
    if why:
        why = f"not proved: {why}; more steps, another seed or more heads may help"
    margin = round(margin, 3) if found else None
    return dict(proved=not why, why=why, windows=len(windows.seen), margin=margin, drift=drift)

# 7. ABC from end to end ---------------------------------------------------------------------------
# Of other sections, this one uses `make_bias`, which turns lines into a bias (3); `train`, which
# returns the last proof, `numbers_data`, and `run.keep`, which saves into `run.parts` (4);
# `enumerate_windows`, which lists what rows see under a bias (`clash`: two questions that clash;
# `why`: the reason if there can be no proof), `collect_windows`, the same for given questions, and
# `obstacles` to a proof (6); and `config.replace` (10).

# Tried in this order: the lower kappa is, the more lines are open. At kappa = 0, they are those
# above the mean; if one line is far stronger than the others, all others are below the mean.
KAPPAS = 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0, -0.05, -0.1, -0.15, -0.2, -2.0

def deal_lines(lines, n_head, merge=False):
    """Deal different lines to the heads, the strongest first, one to each -> lines. If there are
    more lines than heads, a head's next line has a third of the weight of the one before. merge:
    lines that show the same place of several numbers go to one head, with equal biases."""
    dealt, heads = {}, {"self": [], "cross": []}  # what has been dealt, in order
    for line in sorted(lines, key=lambda line: -line.z):
        shown = line.path
        if merge and line.attention == "cross" and line.direction:
            shown = line.direction, line.offset  # of any number
        order = heads[line.attention]
        if shown not in order:
            order.append(shown)
        turn, head = divmod(order.index(shown), n_head)
        bias = round(-1.1 * turn, 1) + 0.0  # e^-1.1 is a third; not -0.0
        dealt.setdefault(line.path, line._replace(head=head, bias=bias))
    return list(dealt.values())

def share_heads(config, lines):
    """-> lines, their Windows. If these are too many to list, lines that show the same place of
    several numbers are moved to one head, which cannot tell these numbers apart. They stay there if
    no windows clash: if the order of the numbers does not matter, as in a + b + c."""
    windows = enumerate_windows(config, make_bias(config, lines))
    if windows.why and not windows.clash:  # too many to list
        shared = deal_lines(lines, config.n_head, merge=True)
        fewer = enumerate_windows(config, make_bias(config, shared))
        if not fewer.why:
            return shared, fewer
    return lines, windows

def choose_lines(config, attention):
    """Averaged attention -> kappa, lines, Windows. Two rows *clash* if they see the same but must
    write different tokens. Kappa falls until no two rows in a pool of questions clash. Then lines
    are dropped, the weakest first, if the rest still avoids clashes, and windows are enumerated. If
    two of these clash, their questions join the pool, and the choice goes on. With `obstacles` to a
    proof, such as the sources' rules, all lines at RULES' kappa are kept. Raises: RunFailed."""
    if obstacles(config):
        kappa = RULES[config.rules]["cross"]["kappa"]
        lines = list(calibrate(config, attention))
        return kappa, lines, enumerate_windows(config, make_bias(config, lines))
    with seeded(config.seed, "pool"):
        pool = [draw_questions(config, draw, length, 300)
                for draw in (draw_exact, draw_hard) for length in (6, 8)]
    def clash_in_pool(lines):
        """-> the clash, in words; empty if there is none."""
        every_row = ((s, t, range(t.shape[1] - 1)) for s, t in pool)
        return collect_windows(config, make_bias(config, lines), every_row).why
    for kappa in KAPPAS:
        opened = list(calibrate(config, attention, kappa=kappa))
        strongest_first = sorted(opened, key=lambda line: -line.z)
        paths = dict.fromkeys(line.path for line in strongest_first)
        while not clash_in_pool(opened):  # again after a clash has joined the pool
            lines = opened
            # The weakest is dropped first, from all heads at once. The main diagonal of
            # self-attention stays: it adds nothing to a window, but speeds up training.
            for path in reversed(paths):
                fewer = [line for line in lines if line.path != path]
                if path != ("self", 1, 0, 0) and not clash_in_pool(fewer):
                    lines = fewer
            lines, windows = share_heads(config, lines)
            if not windows.clash:
                return kappa, lines, windows
            pool += windows.clash
    raise RunFailed(f"no lines determine the answer: {clash_in_pool(opened)}")

def new_model(run, name, config, lines=()):
    """-> a model on the run's device, initialized from the seed and `name`; a calibrated method
    has these lines."""
    given = dict(lines=lines) if config.scheme.calibrated else {}
    with seeded(config.seed, name):
        return config.kind.model(config, **given).to(run.device)

def learn_abc(run):
    """Train a model by ABC in five stages -> proof. `train` and `parts` keep what a stage has made,
    so that an interrupted run resumes. Source: v1, Sec. 5; v2, App. D. Differs: kappa falls until
    windows determine the answer; few lines are kept; the vanilla model is retrained, and proved."""
    config, parts, numbers = run.config, run.parts, split_numbers(run.config.seed)
    # 1. A vanilla model learns, from random weights. It is never tested at the run's lengths.
    plain = config.replace(method="vanilla", lengths=(6,))
    vanilla = new_model(run, "vanilla", plain)
    data = numbers_data(plain, numbers, config.steps, first_training=True)
    train(run, vanilla, "vanilla", data)
    # 2. Its attention is averaged over right answers to 1,000 training questions.
    if "attention" not in parts:
        with seeded(config.seed, "attention"):
            source, target = data.batch(data.steps, 1000)
        run.keep(attention=average_attention(vanilla, source, target))
    # 3. A minimal set of lines that determine the answer is chosen, and windows are enumerated.
    if "lines" in parts:
        kappa, lines = parts["lines"]["kappa"], [Line(**line) for line in parts["lines"]["lines"]]
        windows = enumerate_windows(config, make_bias(config, lines))
    else:
        kappa, lines, windows = choose_lines(config, parts["attention"])
        run.keep(lines=dict(kappa=kappa, lines=[line._asdict() for line in lines]))
    for attempt in 1, 2:
        # 4. Retraining starts from the vanilla weights, with queries and keys set to zero, so that
        # the bias alone determines attention. They stay zero, as the gradient of each has the other
        # as a factor. A second attempt, and all under other rules, start from random weights.
        name = f"attempt {attempt}"
        model = new_model(run, name, config, lines)
        if attempt == 1 and config.rules == "ours":
            model.load_state_dict(model.state_dict() | vanilla.state_dict())  # all but the lines
            for key, weight in model.named_parameters():
                if ".q." in key or ".k." in key:
                    nn.init.zeros_(weight)
        data = numbers_data(config, numbers, attempt * config.retrain_steps, first_training=False)
        # 5. It ends when the model is proved on all windows. Without windows there is one attempt.
        proof = train(run, model, name, data, windows)
        if proof["proved"] or windows.why:
            break
        if attempt == 1:  # a head that mixes two lines hardly shows which digit is which
            dealt = deal_lines(lines, config.n_head)
            dealt_windows = enumerate_windows(config, make_bias(config, dealt))
            if not dealt_windows.why:
                lines, windows = dealt, dealt_windows
    parts["model"] = parts.pop(name)  # the last attempt
    return proof | dict(kappa=kappa, lines=[line._asdict() for line in lines], attempt=attempt)

def learn_method(run):
    """Train by a method other than ABC, stopping early if the model can be proved -> proof."""
    config, model = run.config, new_model(run, "model", run.config)
    data = numbers_data(config, split_numbers(config.seed), config.steps, first_training=True)
    return train(run, model, "model", data, enumerate_windows(config, model.bias_of))

# 8. Consecutive pairs: one attention head ---------------------------------------------------------
# Source: Pairs. The label of n in 0 .. V - 1 is 1 if n - 1 or n + 1 also occurs. The one layer has
# no feed-forward part and, by our choice, no positions, norm or residual; draws are uniform.

PAIRS_TASKS = {"consecutive": Task("is a neighbor there?", None, steps=6000, batch=300, lr=1e-3)}

def draw_pairs(config, B, length):
    """-> source (B, length), after a token V if config.dummy; target (B, 1 + length): 0, labels."""
    tokens = torch.randint(config.d_vocab, (B, length))
    label = torch.zeros_like(tokens)
    for other in tokens.unbind(1):
        label |= (tokens - other[:, None]).abs() == 1
    if config.dummy:
        tokens = F.pad(tokens, (1, 0), value=config.d_vocab)
    return tokens, F.pad(label, (1, 0))

class PairsHead(nn.Module):
    """source (B, T or 1 + T), target (B, T) -> logits (B, T, 2), 0 and z. Differs: an output bias
    of +5 makes all predict 1 at first; a larger dummy embedding (std 1) lets it learn 0 quickly."""
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

def learn_pairs(run):
    """Train on sequences of five. There is no proof. Differs: the learning rate is constant; Pairs
    reduces it on plateaus (patience 100) and takes the best of several seeds."""
    config = run.config
    data = SimpleNamespace(steps=config.steps, rate=lambda step: 1.0, check=lambda model: [],
                           batch=lambda step: draw_pairs(config, config.batch, 5))
    train(run, new_model(run, "model", config), "model", data)

# 9. Encoders: one pass, relative positions, priming -----------------------------------------------
# Source: Jelassi, Secs. 2.1, 2.2 and 5. Digit t of the answer is read at token t. Numbers have the
# highest digit first, padding last: places align only at equal length. Differs: the source has four
# signs, +, %, x and *; here, + serves both additions, and * multiplication.

class EncoderTask(NamedTuple):
    about: str
    sign: str
    answer: Callable  # positive integers a, b -> integer or text, longest for the largest a and b
    steps: int
    second_digits: int = None  # maximum number of digits of b; by default the same as for a
    n_encoder: int = 3  # number of layers, or of passes through one

def add_digits(a, b):
    """15, 27 -> "32", the sum without carries."""
    text = ""
    while a or b:
        text = str((a + b) % 10) + text
        a, b = a // 10, b // 10
    return text

ENCODER_TASKS = {
    # 12@+39@ -> $51@@, modulo 100 $51
    "addition": EncoderTask("a + b", "+", int.__add__, 8000, n_encoder=6),
    "multiplication": EncoderTask("a * b, b of few digits", "*", int.__mul__, 10_000,
                                  second_digits=1),  # 12@*9@@ -> $108@@@, modulo 100 $08
    "elementwise-addition": EncoderTask("a + b, carries dropped", "+", add_digits, 6000),
}

def settle_encoder(config):
    """Derive and check options of an encoder. Answers fit into the 2W + 1 tokens of a question."""
    config.prime_lengths = config.prime_lengths or (max(config.lengths),)
    needed = max(*config.lengths, *config.prime_lengths, config.train_digits,
                 config.second_digits or 1, len(str(config.modulus or 1)) // 2)
    # Differs: two more, so that PAD follows even the longest tested numbers, as in training.
    config.width = W = config.width or needed + 2 * (config.preset == "fast")
    config.clip = config.clip or 2 * W
    demand(needed <= W <= 2000, f"--lengths or others need --width {needed} to 2,000, not {W}")
    demand(config.method not in ("abc", "alibi-decoder") and not config.scheme.window,
           f"--method: {config.method} needs a decoder")
    demand(config.prime <= config.examples, f"--prime: {config.prime} is more than --examples")

def arrange_encoder(config, pairs):
    """Pairs of integers -> source (B, 2W + 1), target (B, 1 + n), whose START is not read. Differs:
    the example that Sec. 2.1 prints has one PAD fewer; modular answers are filled with zeros;
    numbers are padded to 12 digits by default, in the source to 20 or 35."""
    spec, W, sources, targets = config.spec, config.width, [], []
    n = len(str(spec.answer(10 ** W - 1, 10 ** W - 1)))
    if config.modulus:
        n = len(str(config.modulus - 1))
    for a, b in pairs:
        answer = spec.answer(a, b)
        if config.modulus:
            answer = str(int(answer) % config.modulus).zfill(n)
        sources.append(encode(str(a).ljust(W, PAD) + spec.sign + str(b).ljust(W, PAD)))
        targets.append(encode(START + str(answer).ljust(n, PAD)))
    return torch.stack(sources), torch.stack(targets)

def draw_integers(config, lengths):
    """-> pairs of positive integers, of up to `length` and of up to second_digits digits."""
    return [(RANDOM.randrange(1, 10 ** length),
             RANDOM.randrange(1, 10 ** (config.second_digits or length))) for length in lengths]

def encoder_data(config, n_short, n_long, steps):
    """n_short first operands, whose second is drawn at each use, and n_long long questions. The
    curve tests train_digits and the longest prime_lengths (Figs. 3b, 4d). Differs: 100 warm-up
    steps; draws with replacement; a tenth of the long numbers are shorter, as they are uniform
    below 10 ** length; in the fast preset, lengths of short operands are uniform."""
    def draw_short(digits):
        if config.preset == "paper":
            return RANDOM.randrange(1, 10 ** digits)
        digits = RANDOM.randint(1, digits)
        return RANDOM.randrange(10 ** (digits - 1), 10 ** digits)
    with seeded(config.seed, "examples", n_short, n_long):
        known = [(draw_short(config.train_digits), None) for _ in range(n_short)]
        known += draw_integers(config, RANDOM.choices(config.prime_lengths, k=n_long))
    def batch(step):
        pairs = []
        for a, b in RANDOM.choices(known, k=config.batch):
            if b is None:  # the second operand of a short question
                b = draw_short(config.second_digits or config.train_digits)
            pairs.append((a, b))
        return arrange_encoder(config, pairs)
    def check(model):
        test = config.replace(lengths=(config.train_digits, max(config.prime_lengths)), samples=200)
        return [row["correct"] / row["n"] for row in evaluate(model, test)["rows"]]
    return SimpleNamespace(
        steps=steps, batch=batch, check=check,
        rate=lambda step: min(1.0, step / 100) * (1 + math.cos(math.pi * step / steps)) / 2)

def learn_encoder(run):
    """Train on short and, by --prime, a few long questions; then, by --finetune, on long ones."""
    config, model = run.config, new_model(run, "model", run.config)
    data = encoder_data(config, config.examples - config.prime, config.prime, config.steps)
    if config.finetune:
        train(run, model, "short numbers", data)
        run.keep(before=evaluate(model, config))
        data = encoder_data(config, 0, config.finetune, config.retrain_steps)
    train(run, model, "model", data)

# 10. Options, checkpoints, command line -----------------------------------------------------------
# Defaults by kind of model ("universal" has those of "encoder") and preset. In a cell, = means as
# on its left, a dot that there is no such option, and None that the value comes from the task, is
# derived, or is off. The paper presets are those of v2, App. B and D, with batch, steps and width
# of its code for addition and a tenth of the steps for retraining, and of Jelassi, Sec. 2.2 (15,000
# epochs of 5,000 examples; multiplication needs --second-digits 3). Differs: v2 tests parity at 200
# bits; Jelassi's models have HuggingFace's defaults, for ALBERT no dropout, a feed-forward width of
# 16,384 and embeddings of 128 with a norm, for BERT 3,072 and a norm of the embeddings.

OPTIONS = """
option           seq2seq     paper   encoder  paper         pairs
what is learned
--task           .           .       .        .             .      what to learn, see --list
--model          .           .       .        .             .      what learns it, see --list
--preset         'fast'      =       'fast'   =             .      or paper: published sizes
--seed           0           =       0        =             0      seed of all random draws
--method         'abc'       =       'rpe-k'  =             .      position scheme, see --list
--rules          'ours'      'v2'    .        .             .      of ABC: ours, v1, v2, code
tests
--lengths        6,10,20,60  =       5,6,10   5,6,10,15,20  5,     lengths to test, e.g. 6,60,1000
--samples        1000        10000   1000     10000         10000  questions per length
training
--steps          None        460000  None     2343750       None   steps of the first training
--retrain-steps  None        46000   1000     =             .      of retraining or fine-tuning
--batch          None        512     32       =             None   batch size
--lr             None        1e-5    3e-3     1e-4          None   peak learning rate
--dropout        0.0         0.3     0.0      0.1           .      dropout probability
the model
--n-encoder      0           1       None     6             .      encoder layers, or passes
--n-layer        1           6       .        .             .      decoder layers
--n-head         4           8       4        16            .      attention heads
--d-model        64          128     64       1024          128    width of the model
--d-head         .           .       .        .             32     width of queries and keys
--clip           16          =       None     =             .      largest offset in relative tables
training numbers
--width          None        61      None     =             .      digits of a training number
--train-digits   .           .       5        =             .      most digits in training
--second-digits  .           .       None     =             .      most digits of the second operand
--modulus        .           .       None     =             .      compute answers modulo this
--examples       .           .       5000     =             .      examples of training
--prime          .           .       0        =             .      long questions among them
--prime-lengths  .           .       ()       =             .      their lengths
--finetune       .           .       None     =             .      long questions to train on next
--d-vocab        .           .       .        .             16     number of different integers
--dummy          .           .       .        .             False  put a dummy token at the start
"""
COMMAND = """
the command
--device  None   cuda or cpu, by default cuda if there is one
--out     None   a new folder, by default in runs/
--from    None   finish, test or --ask the run in this folder
--ask     ()     ask 123+748 of --from or of the newest finished run
--json    False  print the record as JSON
--quiet   False  report no progress
--list    False  print tasks, methods and models
--help    False  print this, and the resulting values of all options of a run
"""
CHOICES = dict(preset=("fast", "paper"), method=METHODS, rules=RULES, dummy=(False, True))

def settle_seq2seq(config):
    """Derive and check options of an encoder-decoder, such as `widths` of training numbers."""
    spec, scheme = config.spec, config.scheme
    digits, least = VOCAB.index("+"), spec.width
    signs = re.findall(f"[^{START}{END}{PAD}]", VOCAB[digits:])
    demand(re.fullmatch("number( number)*( digit)*", " ".join(spec.operands))
           and (len(spec.operands) == 1 or spec.sign in signs) and spec.base in range(2, digits + 1)
           and spec.headroom in range(64)
           and {type(x) for x in (spec.base, spec.headroom, spec.first)} == {int},
           f"--task: {config.task} needs a base of 2 to {digits}, operands that are numbers, then "
           f"digits, between them a sign of {signs}, and integers as headroom and first carry")
    config.align = scheme.window > 0 and len(spec.operands) == 2
    config.widths = [config.width] if config.width else range(least, least + scheme.n_width)
    demand(spec.base ** least <= 2 ** 63,
           f"--task: {config.task} has numbers that exceed 64 bits, by headroom {spec.headroom}")
    demand(least <= max(config.widths) <= 2000, f"--width: {config.width} is not {least} to 2,000")
    demand(not (spec.msd_first and scheme.bias is banded),
           f"--method: {config.method} reads from the last digit on, {config.task} from the first")
    if config.n_encoder or config.rules != "ours" or not scheme.calibrated:
        demand(max(config.lengths) <= 2000,
               "--lengths: more than 2,000 needs ABC by our rules without an encoder")

class Kind(NamedTuple):
    column: int  # index of its column in OPTIONS; the next one is that of the paper preset
    tasks: dict
    model: Callable
    learn: Callable  # run -> proof, None if there can be none; not used by ABC
    draw_tests: Callable  # config, length -> {name: (source, target)}
    settle: Callable = lambda config: None  # derives and checks options
    activation: Callable = nn.ReLU
    beta: float = 0.999  # of Adam's second moment
    decay: float = 0.0  # Adam's weight decay

KINDS = {
    "seq2seq": Kind(1, TASKS, Transformer, learn_method, draw_tests, settle_seq2seq, beta=0.98),
    "pairs": Kind(5, PAIRS_TASKS, PairsHead, learn_pairs,
                  lambda config, length: dict(random=draw_pairs(config, config.samples, length))),
}
# The first of these, which repeats one layer, is the default for tasks of encoders alone.
KINDS["universal"] = KINDS["encoder"] = Kind(
    3, ENCODER_TASKS, Transformer, learn_encoder,
    lambda config, length: dict(random=arrange_encoder(
        config, draw_integers(config, [length] * config.samples))),
    settle_encoder, nn.GELU, decay=0.01)

def options_of(text, column):
    """-> {option: default}, from this column of a text."""
    options = {}
    for line in re.findall("--(.*)", text):
        cells = line.split()
        if cells[column] not in ".=":
            options[cells[0].replace("-", "_")] = ast.literal_eval(cells[column])
    return options

def accept(name, value, default):
    """A value of an option, or its text, such as "5,6" -> a plain value of its default's type, for
    None an integer. Floats are 0 to 1; integers are 1 to 10^9, or 0 if that is the default. Raises:
    BadInput."""
    flag = f"--{name.replace('_', '-')}"
    if name in CHOICES:
        choices = list(CHOICES[name])
        demand(value in choices, f"{flag}: {value!r} is none of {choices}")
        return type(default)(value)  # not a NumPy string, which checkpoints refuse
    several = value if isinstance(value, (list, tuple)) else str(value).split(",")
    read, least, most = int, 1, 10 ** 9
    if isinstance(default, float):
        read, least, most = float, 0, 1
    elif default == 0:
        least = 0
    try:
        numbers = tuple(read(str(number)) for number in several)
    except ValueError:
        numbers = ()
    demand(numbers and all(least <= number <= most for number in numbers)
           and (isinstance(default, tuple) or len(numbers) == 1), f"{flag}: {value!r} is invalid")
    return numbers if isinstance(default, tuple) else numbers[0]

class Config:
    """The options of a run as attributes, and what follows from them. An option that is not given
    has the default of the paper preset (if that is chosen), or else of the method, of the task, or
    of the kind of model. Differs: but for the paper preset, models are small and fast. Raises:
    BadInput."""
    method, preset, n_layer, n_head = None, "fast", 0, 1  # where a kind of model lacks the option

    def __init__(self, task=None, model=None, **given):
        task = task or next(iter(KINDS[model].tasks if model in KINDS else TASKS))
        models = [name for name, kind in KINDS.items() if task in kind.tasks]
        demand(models, f"--task: {task!r} is none of {sorted(TASKS | PAIRS_TASKS | ENCODER_TASKS)}")
        model = model or models[0]
        demand(model in models, f"--model: {task} is learned by {', '.join(models)}")
        self.kind, self.spec = KINDS[model], KINDS[model].tasks[task]
        values = dict(task=str(task), model=str(model)) | options_of(OPTIONS, self.kind.column)
        values |= {name: x for name, x in self.spec._asdict().items() if name in values}
        for name in given:
            demand(name in values, f"--{name.replace('_', '-')}: not an option of {task}, {model}")
        accepted = {name: accept(name, value, values[name])
                    for name, value in given.items() if value is not None}
        self.scheme = METHODS.get((values | accepted).get("method"), Method(""))
        if model == "seq2seq":
            values["steps"] *= self.scheme.steps_factor
            values |= self.scheme.defaults or {}
        if accepted.get("preset") == "paper":
            values |= options_of(OPTIONS, self.kind.column + 1)
        vars(self).update(values | accepted)
        self.n_vocab = len(VOCAB)
        self.kind.settle(self)
        n = self.n_head * (1 + (self.method == "rope"))  # which rotates pairs of channels
        demand(self.d_model % n == 0, f"--n-head: {n} does not divide --d-model {self.d_model}")
        self.values = {name: getattr(self, name) for name in values}

    def replace(self, **changes):
        """-> Config of the same values but for these changes. All values count as given: the number
        of steps, for example, does not follow a change of the method."""
        return Config(**self.values | changes)

    def __reduce__(self):  # pickles `values` alone, as entries of tables may be functions
        return functools.partial(Config, **self.values), ()

def build(run):
    """-> the trained model of a run, in evaluation mode. Raises: BadInput if its method changed."""
    part = run.parts["model"]
    # VOCAB may have more symbols than when the model was trained.
    run.config.n_vocab = len(part["weights"]["embedding.weight"])
    lines = [Line(**line) for line in run.parts["proof"].get("lines", [])]
    model = new_model(run, "model", run.config, lines).eval()
    source, target = run.parts["example"][:2]
    load_weights(model, part["weights"])
    logits = model(source, target[:, :-1]).detach().cpu().float()
    if logits.isnan().any():
        raise RunFailed("the weights are not finite; has the method's bias finite gradients?")
    if "logits" not in part:  # it has just been trained
        part["logits"] = logits
    demand(torch.allclose(part["logits"].float(), logits, atol=MARGIN / 10),
           "the model answers otherwise than when it was trained; has its method changed?")
    return model

def example_of(config):
    """-> source, target: questions of a task and their answers; for an encoder-decoder, also what
    `Task.step` returns for every carry and column of digits, if there are at most 1,000 carries,
    and four fields of the task. A stored run is used only if all are the same: its task was not
    changed."""
    with seeded("example"):
        length = min(4, vars(config).get("width") or 4)  # an encoder's numbers fit its width
        found = list(config.kind.draw_tests(config.replace(samples=50), length)["random"])
    if config.model == "seq2seq":
        spec, moves = config.spec, []
        try:
            for singles in itertools.product(range(spec.base), repeat=spec.operands.count("digit")):
                for carry, of_carry in follow_carries(spec, singles).items():
                    moves += [(carry, *column, *results) for column, *results in of_carry]
            found.append(torch.tensor(moves))
        except RunFailed:
            pass
        found.append(torch.tensor([spec.base, spec.first, spec.headroom, spec.msd_first]))
    return found

def read_checkpoint(folder):
    """-> config, parts. Code in the file is never run. Raises: BadInput if it cannot be used."""
    path = Path(folder, "checkpoint.pt")
    demand(path.exists(), f"--from, --ask: there is no run in {str(folder)!r}")
    try:
        demand(not zipfile.ZipFile(path).testzip(), "it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        demand(VOCAB.startswith(state["vocab"]), f"its symbols are {state['vocab']}")
        config = Config(**state["config"])
        stored, now = state["parts"]["example"], example_of(config)
        demand(len(stored) == len(now) and all(map(torch.equal, stored, now)),
               f"{config.task} had other questions or answers")
        return config, state["parts"]
    except Exception as error:
        raise BadInput(f"--from, --ask: {str(folder)!r} cannot be used: {error!r:.300}") from None

def load(folder):
    """Folder of a trained run -> model, config, parts. Raises: BadInput."""
    config, parts = read_checkpoint(folder)
    demand("proof" in parts, f"{str(folder)!r} is not finished; finish it with --from alone")
    return build(Run(config, parts)), config, parts

def example_as_numbers(run):
    """-> a question of the run's task and its answer: "1957+2408 -> 4365"."""
    config, (source, target) = run.config, (tokens[0] for tokens in run.parts["example"][:2])
    if config.model == "pairs":
        return f"{source.tolist()} -> {target[1:].tolist()}"
    question, answer = (re.sub(f"[{START}{END}{PAD}]", "", decode(x)) for x in (source, target))
    if config.model != "seq2seq":
        return f"{question} -> {answer}"
    if config.align:  # interleaved, after the sign
        last = question[2::2] if config.spec.operands[1] == "number" else question[2]
        question = question[1::2] + question[0] + last
    text = f"{question} -> {answer if config.spec.msd_first else answer[::-1]}"
    return re.sub(r"\b0+(?=\w)", "", text) if config.spec.headroom else text

def make_record(run, tests):
    parts, device = run.parts, f"cpu, threads: {torch.get_num_threads()}"
    if run.device == "cuda":
        device = torch.cuda.get_device_name()
    training = {name: {key: part[key] for key in ("steps", "seconds", "curve")}
                for name, part in parts.items() if "weights" in part}
    proof = dict(parts["proof"])
    return dict(config=run.config.values, torch=torch.__version__, source=SOURCE, device=device,
                example=example_as_numbers(run), train=training, lines=proof.pop("lines", []),
                proof=proof, before=parts.get("before"), tests=tests)

def summary(record):
    config, proof = record["config"], record["proof"]
    how = f"{config.get('method', '')} {config['model']}".removesuffix(" seq2seq").strip()
    yield f"{config['task']}, {how}, seed {config['seed']}: {record['example']}"
    for name, part in record["train"].items():
        unseen, hint = part["curve"][-1][2:], ""
        if unseen and unseen[0] < 0.9:
            hint = "; raise --steps"
        yield (f"{name:<9} {part['steps']:,} steps, {part['seconds']:.1f} s, unseen "
               f"{' '.join(map(percent, unseen)) or '-'}{hint}")
    layers_of = {}  # layers may have equal lines
    for line in record["lines"]:
        name = ("vertical", "diagonal", "anti-diagonal")[line["direction"]]  # -1: the last
        text = (f"{line['attention']:<5} head {line['head'] + 1}: {name}, block "
                f"{line['block'] + 1}, offset {line['offset']}, bias {line['bias']:.2f}, "
                f"z {line['z']:.1f}")
        layers_of.setdefault(text, []).append(str(line["layer"] + 1))
    for text, layers in itertools.islice(layers_of.items(), 40):
        yield f"  layer {','.join(layers)} {text}"
    if len(layers_of) > 40:
        yield f"  {len(layers_of) - 40} more in result.json"
    if proof:
        found = proof["why"]
        if proof["proved"]:
            found = (f"exact at every length: right on all {proof['windows']:,} windows, by "
                     f"{proof['margin']:.1f} or more, drift {proof['drift']:.0e}")
        kappa = f"; kappa {proof['kappa']}" if "kappa" in proof else ""
        yield f"proof     {found}{kappa}"
    for name in "before", "tests":
        if record[name]:
            yield f"{name:<9} {record[name]['seconds']:.1f} s on {record['device']}"
            yield "digits   exact  set             n"
            for row in record[name]["rows"]:
                share = percent(row["correct"] / row["n"])
                yield f"{row['digits']:>6}  {share:>6}  {row['set']:<8} {row['n']:8,}"

def execute(run, as_json=False):
    """Make the missing parts of a run and test it; print and keep its record -> the record."""
    config = run.config
    if config.d_model <= 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads help little
    run.parts.setdefault("example", example_of(config))
    run.keep()
    LOG.info(f"{config.task}, {example_as_numbers(run)}, {config.model}, seed {config.seed}, "
             f"{run.device}, {run.folder or 'tested again'}")
    is_finished = "proof" in run.parts
    if not is_finished:
        learn = learn_abc if config.scheme.calibrated else config.kind.learn
        run.parts["proof"] = learn(run) or {}
    model, proof = build(run), run.parts["proof"]
    if is_finished and proof.get("proved"):  # this file may have changed since
        proof.update(prove(model, enumerate_windows(config, model.bias)))
    tests = evaluate(model, config)
    wrong = sum(row["n"] - row["correct"] for row in tests["rows"])
    if proof.get("proved") and wrong:  # the code that runs on long numbers is not what was proved
        proof.update(proved=False, why=f"right on all windows, but wrong in {wrong:,} tests")
    run.keep()
    record = make_record(run, tests)
    try:
        show(json.dumps(record) if as_json else "\n".join(summary(record)))
    finally:  # the record is written even if it cannot be printed
        run.write("result.json", json.dumps(record).encode())
    return record

def make_run(given, options):
    """-> the run of --from, or one in a new folder. Raises: BadInput."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device, folder = options["device"] or best, options["from"]
    demand(device in ("cpu", best), f"--device: there is no {device}")
    if folder is not None:
        config, parts = read_checkpoint(folder)
        if Path(folder, "result.json").exists():
            folder = None  # a finished run stays as it is
        return Run(config.replace(**given), parts, folder, device)
    config = Config(**given)
    name = f"{datetime.now():%y%m%d-%H%M%S-%f}-{config.task}-{config.method or 'pairs'}"
    folder = Path(options["out"] or f"runs/{name}").expanduser()
    folder.mkdir(parents=True)
    return Run(config, {}, folder, device)

def ask_run(folder, questions):
    """Print the answers of the run in a folder, by default of the newest finished run in runs/."""
    if folder is None:
        records = sorted(Path("runs").glob("*/result.json"), key=os.path.getmtime)
        folder = records[-1].parent if records else "runs"
    model, config, parts = load(folder)
    demand(config.model == "seq2seq",
           f"--ask: only encoder-decoders can be asked, not {config.model}")
    LOG.info(f"asking {folder}: {config.task} by {config.method}, seed {config.seed}, proved: "
             f"{parts['proof'].get('proved', False)}")
    for question in questions:
        show(ask(model, config, question))

def fail(error, code):
    LOG.error(f"lengen: {error}")
    return code

class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, like all bad input
        raise BadInput(message)

def parse(argv):
    """Arguments -> the options of a run that are given, as text, and those of the command."""
    p = Parser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS,
               conflict_handler="resolve")
    for line in re.findall("--.*", OPTIONS + COMMAND):
        p.add_argument(line.split()[0], action="store_true" if "False" in line else "store")
    p.add_argument("--ask", nargs="+")  # replaces the one above
    given = vars(p.parse_args(argv and [str(word) for word in argv]))
    if "ask" in given:
        demand(given.keys() <= {"from", "ask", "quiet", "help"}, "--ask takes only --from, --quiet")
    demand("from" not in given or given.keys() <= set(
        "from ask lengths samples device json quiet help".split()),
        "--from takes only --ask, --lengths, --samples, --device, --json, --quiet")
    command = options_of(COMMAND, 1)
    return given, {name: given.pop(name, default) for name, default in command.items()}

def main(argv=None):
    """-> exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    LOG.handlers, LOG.propagate = [logging.StreamHandler()], False
    go_on = ""
    try:
        given, options = parse(argv)
        LOG.setLevel("ERROR" if options["quiet"] else "INFO")
        if options["help"]:
            show(f"{OPTIONS}{COMMAND}\nwith these options: {Config(**given).values}")
        elif options["list"]:
            for name, kind in KINDS.items():
                for task, spec in kind.tasks.items():
                    show(f"--model {name:<9} --task {task:<21} {spec.about}")
            for name, method in METHODS.items():
                show(f"--method {name:<14} {method.about}")
        elif options["ask"]:
            ask_run(options["from"], options["ask"])
        else:
            run = make_run(given, options)
            go_on = f"; go on by --from {run.folder or options['from']}"
            execute(run, options["json"])
        return 0
    except KeyboardInterrupt:
        return fail(f"interrupted{go_on}", 130)
    except RunFailed as error:
        return fail(error, 1)
    except (BadInput, OSError) as error:  # OSError: such as a full disk
        return fail(error, 2)

if __name__ == "__main__":
    code = main()
    try:
        sys.stdout.flush()
    except OSError:  # reported, or of a closed pipe; the exit must not try again
        sys.stdout = None
    sys.exit(code)
