# SPDX-License-Identifier: MIT
"""lengen: length generalization in arithmetic transformers, in one file.

    python lengen.py --task successor --method abc        # train, calibrate, retrain, prove, test
    python lengen.py --task addition --method vanilla     # right at 6 digits, wrong at 10
    python lengen.py --ask 123+748                        # ask the newest finished run in runs/

A transformer that has learned sums of 6 digits fails at 10. Attention Bias Calibration (ABC) makes
it read along lines that continue to any length. Our variant, `learn_abc` (section 7), adds a proof:

1. Train a vanilla transformer. It answers `$0129&` by `$0310&`: 129 + 1 = 130, last digit first.
2. Average its attention over right answers. The left table shows a part of head 2 of its cross-
   attention, in percent: row t writes digit t, and columns are keys at the end of the question.

           place 3    2    1    0    &                 place 3     2     1     0     &
        t = 0 |  0    2   13   50   23                |      x     x     x     0     x
        t = 1 |  1    9   38   33   13                |      x     x     0  -.14     x
        t = 2 | 13   35   29   13    5                |      x     0  -.14     x     x
        t = 3 | 46   24    7    2    1                |      0  -.14     x     x     x

3. Two lines stand out: row t looks at the digit at place t (50, 38, 35, 46) and, if t > 0, at
   place t - 1 (33, 29, 24), which helps decide whether a carry arrives. Keep a small set of lines
   that determines every answer, and continue them to any length as a bias on the attention scores,
   on the right. In each head, the bias of a diagonal is its mean minus the greatest mean of any
   diagonal (here, .423 - .423 = 0 and .287 - .423 = -.136). Other keys are closed by -inf (x).
4. Retrain on short numbers, without positions; at first, attention is the bias alone (q = k = 0).
5. Prove. A row now sees only the token before it and those at open keys, its *window*. All 212
   windows of these lines occur in short numbers: 10 of row 0; 200 of later rows (10 digits at t,
   times 10 at t - 1, times 2 tokens before the row: the digit at t - 1 plus 0 or 1, modulo 10);
   and 2 of END (the token before it is a leading zero plus 0 or 1). Rounding aside, a model right
   on each is right on numbers of any length, by induction: if the tokens before a row are right,
   it sees one of these windows.

For the idea alone, read this preamble and sections 1, 2, 5 and 7. `config` has the options of a
run, such as config.lr, and its entries of TASKS, METHODS and KINDS (of models): `spec`, `scheme`
and `kind`. By default, a model has one decoder layer, whose cross-attention reads embeddings.

Sizes: B batch, T queries (rows), S keys (columns), H heads, D head width, C = H * D model width, V
vocabulary, W digits of a number; attention is m x n in training, M x N at other lengths. Place 0 is
computed first. `x -> y`: y is returned for x. `Source:` an origin, `Differs:` a departure from it.

v1: Duan and Shi 2023, From Interpolation to Extrapolation. v2: its revision by Duan, Shi and Xu
2024, Attention Bias as an Inductive Bias. Jelassi: Jelassi et al. 2023, Length Generalization in
Arithmetic Transformers. Pairs: an anonymous study of consecutive pairs."""

import argparse
import functools
import itertools
import json
import logging
import math
import os
import random
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# 1. Tasks: digits in, tokens out ------------------------------------------------------------------
# A task computes its answer place by place, as on paper. For 129 + 1:
#
#     place             0   1   2   3
#     carry             1   1   0   0    the first is the 1 that is added
#     digit of 0129     9   2   1   0
#     total            10   3   1   0    carry + digit
#     answer            0   3   1   0    total % 10; the next carry is total // 10
#
# So `$0129&` -> `$0310&`. The token of a digit is its value. Numbers are drawn as digits (B, W),
# least significant first. `digits` (B, W, n) has those of n operands, in the order of the places; a
# single digit, as the 7 of `$0123*7&`, is repeated at every place. This section can be copied as it
# stands; it needs itertools, torch, Callable and NamedTuple.

VOCAB = "0123456789+*$&@"
START, END, PAD = "$&@"  # of questions and answers; PAD is for encoders
LIMIT = 2 ** 20  # training numbers are below this limit

def encode(text):
    """A string of VOCAB symbols -> tokens (T,). Raises: ValueError for other symbols."""
    return torch.tensor(list(map(VOCAB.index, text))).long()

def decode(tokens):
    """Tokens (T,) -> their symbols, a string. A token beyond VOCAB becomes "?"."""
    return "".join(VOCAB[token:token + 1] or "?" for token in tokens)

class Task(NamedTuple):
    """What is computed at each place. total(carry, *digits), of integer tensors of one shape, gives
    the total, as above, or a pair: the answer's digit and the next carry. Two more examples:

        a - b     total a - b + carry; a borrow is the carry -1
        n // 2    pair (10 * carry + a) // 2, a % 2, with msd_first: `$0129&` -> `$0064&`

    A question has no answer if an answer's digit is -1 or if the final carry is not 0, as in a - b
    for a < b; but with msd_first or without headroom, the final carry is dropped."""
    about: str
    total: Callable
    operands: tuple = ("number",)  # "number" (W digits) or "digit" (one); numbers come first
    sign: str = ""  # the symbol of VOCAB that separates operands
    base: int = 10
    first: int = 0  # the carry into place 0
    headroom: int = 1  # leading zeros of tested numbers, for a longer answer
    label: bool = False  # whether the answer is only the digit of the last place computed
    msd_first: bool = False  # whether place 0 is the most significant digit, not the least
    steps: int = 600  # number of steps of the first training
    retrain_steps: int = 300  # maximum number of steps of the first attempt at retraining
    batch: int = 64
    lr: float = 6e-3

    def step(self, carry, digits):
        """carry, digits (..., n) of a place -> digit of the answer, next carry, both (...)"""
        carry = 0 * digits[..., 0] + carry  # one for each question, also if it is a plain number
        found = self.total(carry, *digits.unbind(-1))
        if not isinstance(found, tuple):
            found = found % self.base, found // self.base
        return [(0 * carry + x).long() for x in found]  # also if x is a plain number

    @property
    def width(self):
        """The least training width, 7 in base 10: base^width >= LIMIT * 2^headroom, so sums fit."""
        return next(n for n in itertools.count(1) if self.base ** n >= LIMIT * 2 ** self.headroom)

def xor(carry, a):
    return a ^ carry, a ^ carry  # the answer's digit is also the next carry

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

def arrange(spec, digits, align=False):
    """Digits (B, W, n), as above -> tokens of the questions that have an answer: source (B, S),
    `$0123+0748&`, and target (B, T + 1), `$1780&`, in the order of the places. With align, two
    operands are interleaved: `$+00172438&`. Source: v1, Sec. 3.2; v2, App. D.1, C.4. Raises:
    ValueError for digits of an answer that the base does not have."""
    answer, carry = [], spec.first
    for column in digits.clone().unbind(1):  # `total` may change them
        digit, carry = spec.step(carry, column)
        answer.append(digit)
    answer = torch.stack(answer, 1)
    valid = (answer != -1).all(1)
    if spec.headroom and not spec.msd_first:
        valid &= carry == 0
    if not ((answer >= 0) & (answer < spec.base))[valid].all():
        raise ValueError(f"digits of an answer must be -1 or 0 to {spec.base - 1}")
    if spec.label:
        answer = answer[:, -1:]
    sign, start, end = (encode(x).expand(len(answer), -1) for x in (spec.sign, START, END))
    target = torch.hstack([start, answer, end])
    if not spec.msd_first:  # questions always start with the most significant digit
        digits = digits.flip(1)
    parts = [start]
    if align:
        parts += [sign, digits.flatten(1), end]
    else:
        for operand, x in zip(spec.operands, digits.unbind(2)):
            parts += [x if operand == "number" else x[:, :1], sign]
        parts[-1] = end  # no sign after the last operand
    return torch.hstack(parts)[valid], target[valid]

# 2. Attention with a bias -------------------------------------------------------------------------
# This section can be copied as it stands; it needs math, torch, nn and Iterator. A bias is added to
# the scores: 0 is neutral, and -inf closes a key. `causal_bias` is on torch's default device.

def masked_softmax(scores, bias):
    """softmax(scores + bias) over the keys; 0, not NaN, in a row whose keys are all closed."""
    if bias is None:
        return scores.softmax(-1)
    closed = bias.amax(-1, keepdim=True) == -math.inf
    return (scores + bias.masked_fill(closed, 0)).softmax(-1).masked_fill(closed, 0)

class MultiHeadAttention(nn.Module):
    """weights = softmax(q k^T / sqrt(D) + bias), output = weights v. If set, scores(q, k) of q (B,
    H, T, D), k (B, H, S, D) replaces q k^T. Source: Vaswani et al. 2017, Sec. 3.2; v2, App. C.4."""
    def __init__(self, d_model, n_head, dropout=0.0, d_head=None, scores=None):
        super().__init__()
        self.n_head, self.scores = n_head, scores
        inner = n_head * (d_head or d_model // n_head)
        self.q, self.k, self.v = (nn.Linear(d_model, inner) for _ in range(3))
        self.out = nn.Linear(inner, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, memory, bias=None):
        """x (B, T, C), memory (B, S, C), bias broadcastable to (B, H, T, S) or None -> output (B,
        T, C), weights (B, H, T, S), also kept. A very large bias comes as an iterator, for groups
        of rows in order: rows (R,), the keys (K,) that any of them sees, and their bias (H, R, K).
        Then `scores` must be None, and weights are None."""
        if isinstance(bias, Iterator):
            outputs = [self(x[:, rows], memory[:, keys], part)[0] for rows, keys, part in bias]
            return torch.hstack(outputs), None
        projected = self.q(x), self.k(memory), self.v(memory)
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in projected)
        scores = self.scores(q, k) if self.scores else q @ k.mT  # (B, H, T, S)
        weights = masked_softmax(scores / math.sqrt(q.shape[3]), bias)
        self.weights = weights.detach()
        mixed = self.dropout(weights) @ v  # (B, H, T, D)
        return self.out(mixed.transpose(1, 2).flatten(2)), weights

def causal_bias(T):
    """-> (1, T, T): 0 for j <= i, -inf above the diagonal."""
    return torch.full((1, T, T), -math.inf).triu(1)

# 3. Positions, methods, Transformer ---------------------------------------------------------------
def sinusoidal(positions, d_model):
    """Positions t (T,) -> (T, C): channels 2p, 2p + 1 are sin and cos of t / 10000^(2p/C), made in
    float64, to be precise at large t. Source: Vaswani et al. 2017, Sec. 3.5."""
    pairs = torch.arange(0, d_model, 2, device=positions.device).double()
    angles = positions[:, None] * 10000.0 ** (-pairs / d_model)  # (T, C / 2)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :d_model]
    return waves.to(torch.get_default_dtype())

def rope(x):
    """Rotate channels 2p and 2p + 1 of x (B, H, T, D), at positions t = 0, 1, ..., by the angle
    t / 10000^(2p/D). Source: Su et al. 2021, Eqs. 14 and 34."""
    waves = sinusoidal(torch.arange(x.shape[2], device=x.device), x.shape[3])
    sin, cos = waves[:, ::2], waves[:, 1::2]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], 4).flatten(3)

def relative_scores(q, table, k=None, S=None):
    """q (B, H, T, D), table (2K + 1, D), k (B, H, S, D) -> unscaled scores (B, H, T, S): q_i . a_ij
    plus, given k, k_j . a_ij; a_ij = table[clip(j - i, -K, K) + K]. Without k, S is given or T.
    Source: Shaw et al. 2018, Eq. 4 (keys); Huang et al. 2020, method 4 (keys and queries)."""
    S, K = S or (q if k is None else k).shape[2], len(table) // 2
    i, j = torch.arange(q.shape[2], device=q.device), torch.arange(S, device=q.device)
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
    distance = (torch.arange(S) - torch.arange(T)[:, None]).abs()
    return -alibi_slopes(n_head)[:, None, None] * distance

def window_bias(w, T, S, cross=False, step=1):
    """-> (1, T, S): 0 in a band, -inf outside. Row i sees, in self-attention, itself and w tokens
    before it; in cross-attention, place i and w places to its right: with w = 1, rows 0 and 1 see
    `9&` and `29` of `$0129&`. Interleaved operands have `step` = 2 columns a place. Source: v2,
    App. C.4 and code. Differs: v2's text opens w places on the left, too."""
    i, seen = torch.arange(T)[:, None], torch.arange(S)
    if cross:
        seen = (S - 2 - seen) // step  # now the place in each column; END counts as -1
    return torch.where((seen > i) | (seen < i - w), -math.inf, 0.0)[None]

class Method(NamedTuple):
    """How a model knows positions. A part is a function, such as `banded`, or a module class:

        part        `bind` gives it      it is called with            and returns
        position    config               side, index (T,)             (T, C), added to embeddings
        bias        config               layer, attention, T, S       (1 or H, T, S) or None
        scores      config, attention    q, k (B, H, T or S, D)       (B, H, T, S), for q k^T

    side is "source" or "target"; attention is "encoder", "self" or "cross"."""
    about: str
    position: Callable = None
    bias: Callable = None
    scores: Callable = None
    n_width: int = 1  # number of widths in training; with one, END is learned only at that width
    steps_factor: int = 1  # multiplies the task's default number of steps
    defaults: dict = {}  # default values of other options of a run
    embedding: float = 0.3  # standard deviation of embeddings; small, so that positions stand out
    window: int = 0  # w of `window_bias`, if there is a band
    period: int = 0  # if not 0, index is taken modulo this, in the source from END backward

def bind(part, *given):
    if isinstance(part, type):  # a class; else a function or None
        return part(*given)
    return part and functools.partial(part, *given)

def sinusoids(config, side, index):
    return sinusoidal(index, config.d_model)

class LearnedPositions(nn.Embedding):
    def __init__(self, config):
        super().__init__(4096, config.d_model)  # room for two numbers of 2,000 digits
        nn.init.normal_(self.weight, std=0.3)  # as large as the embeddings of tokens

    def forward(self, side, index):
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
    def __init__(self, config, attention):
        super().__init__()
        D, self.both = config.d_model // config.n_head, config.method == "rpe-kq"
        self.table = nn.Parameter(torch.randn(2 * config.clip + 1, D) / D ** 0.5)

    def forward(self, q, k):
        keys = k if self.both else None
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
    # At width 61, leading zeros train all positions; large embeddings and dropout favor content.
    "window": Method("sinusoids, a band in the decoder (v2, +w)", sinusoids, banded, window=1,
                     steps_factor=3, defaults=dict(width=61, dropout=0.3, n_layer=3),
                     embedding=1.33),
    "window-cyclic": Method("a band, position index modulo 3 (v2, +T)", sinusoids, banded,
                            window=1, n_width=9, steps_factor=6, period=3),
    "window-nope": Method("a band in the decoder, no positions (v2, NoPE+w)", bias=banded,
                          window=1, n_width=9, steps_factor=3),
}

def make_bias(config, lines=()):
    """-> bias(layer, attention, T, S) of the method; that of ABC is made of `lines`."""
    if config.scheme.bias is CalibratedBias:  # section 5
        return CalibratedBias(config, lines)
    return bind(config.scheme.bias, config)

class Layer(nn.Module):
    """Differs: post-norm only in the paper preset; encoders before decoders have no last norm."""
    def __init__(self, config, cross):
        super().__init__()
        C = config.d_model
        def attention(name):
            scores = bind(config.scheme.scores, config, name)
            return MultiHeadAttention(C, config.n_head, config.dropout, scores=scores)
        self.self_attention = attention("self" if cross else "encoder")
        if cross:
            self.cross_attention = attention("cross")
        self.dropout = nn.Dropout(config.dropout)
        self.feed_forward = nn.Sequential(nn.Linear(C, 4 * C), config.kind.activation(),
                                          self.dropout, nn.Linear(4 * C, C))
        self.norms = nn.ModuleList(nn.LayerNorm(C) for _ in range(2 + cross))
        self.norm_first = config.preset != "paper"

    def residual(self, n, x, sublayer):
        norm = self.norms[n]
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))

    def forward(self, x, self_bias, memory=None, cross_bias=None):
        x = self.residual(0, x, lambda y: self.self_attention(y, y, self_bias)[0])
        if memory is not None:
            x = self.residual(1, x, lambda y: self.cross_attention(y, memory, cross_bias)[0])
        return self.residual(-1, x, self.feed_forward)

class Transformer(nn.Module):
    """If n_encoder is 0, the decoder reads embeddings; if n_layer is 0, the encoder answers."""
    def __init__(self, config, lines=()):  # lines: those of ABC
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
        """Tokens (B, T) -> embeddings with positions (B, T, C). Source: v2, App. C.4 (period)."""
        x = self.embedding(tokens.to(self.embedding.weight.device))
        if self.position:
            with x.device:
                index, period = torch.arange(tokens.shape[1]), self.config.scheme.period
                if period:
                    if side == "source":
                        index = index.flip(0)
                    index = index % period
                x = x + self.position(side, index)
        return self.dropout(x)

    def bias_of(self, layer, attention, T, S):
        """-> bias (1 or H, T, S) or None, causal in self-attention; in long tests, in pieces."""
        with self.head.weight.device:
            if self.config.provable and T > 100 and not self.training:
                # No causal bias is needed, as lines open no later columns.
                return self.bias.pieces(layer, attention, torch.arange(T), S)
            bias = self.bias and self.bias(layer, attention, T, S)
            if attention == "self":
                causal = causal_bias(T)
                return causal if bias is None else causal + bias
            return bias

    def forward(self, source, target):
        """source (B, S), target (B, T) -> logits (B, T, V). With no decoder, target only sets T."""
        memory, S, T = self.embed(source, "source"), source.shape[1], target.shape[1]
        for n, layer in enumerate(self.encoder):
            memory = layer(memory, self.bias_of(n, "encoder", S, S))
        x = memory[:, :T]
        if self.decoder:
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
    return torch.cat([model(s, t[:, :-1]).argmax(-1).cpu() == t[:, 1:] for s, t in chunks])

@torch.no_grad()
def generate(model, source, limit):
    """Greedy decoding: source (B, S) -> target (B, limit + 1), START first. Each pass predicts all
    tokens from those before them, until none changes; pass k makes token k final."""
    model.eval()
    target = encode(START).repeat(len(source), limit + 1)
    for _ in range(limit):
        tokens = model(source, target[:, :-1]).argmax(-1).cpu()
        if torch.equal(tokens, target[:, 1:]):
            break
        target[:, 1:] = tokens
    return target

# 4. Options, questions, training, tests -----------------------------------------------------------
LOG = logging.getLogger("lengen")  # progress, at level INFO

class BadInput(ValueError):
    """An error that the user can fix. The command prints one line and exits with 2."""

class RunFailed(RuntimeError):
    """An error that ends a run or a proof. If it ends a run, the command exits with 1."""

def demand(condition, complaint):
    if not condition:
        raise BadInput(complaint)

def seed_draws(*names):
    random.seed(repr(names))
    seed = random.getrandbits(63)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed is slow
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)

def number(value, kind=int, least=1, most=10 ** 9):
    """7, "7" or NumPy's 7 -> 7. Raises: ValueError for anything else, such as True or 1.5."""
    x = kind(str(value))
    demand(least <= x <= most, f"it must be {least} to {most}")  # nan, too
    return x

def numbers(value):
    """"6,10" or [6, 10] -> (6, 10). Raises: ValueError."""
    found = tuple(map(number, value.split(",") if isinstance(value, str) else value))
    demand(found, "there is none")
    return found

number_or_0 = functools.partial(number, least=0)
fraction = functools.partial(number, kind=float, least=0, most=1)

# For each option: a function that reads it, or choices; its default; and help. A default of None
# is replaced by the task or from other options, or turns the option off.
COMMON = dict(
    task=(str, "successor", "what to learn"),
    model=(str, None, "what learns it: seq2seq, universal, encoder or pairs"),
    seed=(number_or_0, 0, "seed of all random draws"),
    lengths=(numbers, (6, 10, 20, 60), "lengths to test, as 6,60,1000"),
    samples=(number, 1000, "questions for each length"),
    steps=(number, None, "steps of the first training"),
    batch=(number, None, "batch size"),
    lr=(fraction, None, "peak learning rate"),
    d_model=(number, 64, "width of the model"))
TRANSFORMER = COMMON | dict(
    method=(METHODS, "abc", "how the model knows positions"),
    preset=(("fast", "paper"), "fast", "fast, or paper for the published sizes"),
    retrain_steps=(number, None, "steps of the first attempt at retraining, or of fine-tuning"),
    dropout=(fraction, 0.0, "dropout probability"),
    width=(number, None, "digits of a training number"),
    n_head=(number, 4, "attention heads"),
    clip=(number, 16, "largest offset in relative tables"))

def draw_exact(base, length, n):
    """-> (n, length): n numbers of exactly `length` digits. Source: v1, Sec. 3.3."""
    digits = torch.randint(base, (n, length))
    digits[:, -1].random_(1, base)  # no leading zero
    return digits

def draw_hard(base, length, n):
    """-> (n, length): zeros or highest digits, a random share of them redrawn. Carries run far."""
    usual = torch.randint(2, (n, 1)) * (base - 1)
    redrawn = torch.rand(n, length) < torch.rand(n, 1)
    return torch.where(redrawn, torch.randint(base, (n, length)), usual)

def draw_questions(config, draw, length, n, width=None, distinct=True):
    """-> up to n questions that have an answer, source (n, S), target (n, T + 1). Numbers of
    draw(base, length, n), such as `draw_exact`, are padded with zeros to `width`. If distinct, none
    is repeated. Of up to 20 attempts, the last ten halve length while no question is found."""
    spec, rows, earlier = config.spec, [], []
    width = width or max(config.widths[0], length + spec.headroom)
    for attempt in range(20):
        if attempt > 9 and not len(rows):
            length = (length + 1) // 2
        digits = []
        for operand in spec.operands:
            if operand == "number":
                digits.append(F.pad(draw(spec.base, length, n), (0, width - length)))
            else:
                digits.append(torch.randint(spec.base, (n, 1)).expand(n, width))
        digits = torch.stack(digits, 2)
        if spec.msd_first:
            digits = digits.flip(1)
        source, target = arrange(spec, digits, config.align)
        rows = torch.cat(earlier + [torch.hstack([source, target])])
        if distinct:  # one of each is kept
            indexes = {tuple(row): index for index, row in enumerate(rows.tolist())}
            rows = rows[list(indexes.values())]
        if len(rows) >= n:
            break
        earlier = [rows]
    return rows[:n].tensor_split([source.shape[1]], 1)

class Optimizer:
    """Muon for matrices of encoder and decoder layers; Adam, with decay, at a quarter of the rate
    for others; in the paper preset or without such layers, only Adam. It can be copied with `muon`,
    math, torch and F; config has lr, preset, kind.beta, kind.decay. Source: Jordan et al. 2024
    (Muon), Liu et al. 2025 (its scale), Kingma and Ba 2015, Loshchilov and Hutter 2019 (Adam)."""
    def __init__(self, model, config):  # the model is on its device
        self.config, self.adam_share, together = config, 1.0, {}
        for name, weight in model.named_parameters():
            in_layer = name.startswith(("encoder.", "decoder.")) and name.endswith(".weight")
            use_muon = in_layer and weight.dim() == 2 and config.preset == "fast"
            together.setdefault((use_muon, weight.shape), []).append(weight)
            if use_muon:
                self.adam_share = 0.25
        self.steps, self.groups = next(model.parameters()).new_zeros(()), []
        # Kept in checkpoints; like weights, changed in place, as a CUDA graph needs.
        self.state = [self.steps]
        for (use_muon, _), weights in together.items():
            values = torch.stack(weights).detach()
            grads, mean, square = values.new_zeros(3, *values.shape)
            # Weights and gradients become views of stacks (n, *shape), so one update moves all.
            for weight, value, grad in zip(weights, values, grads):
                weight.data, weight.grad = value, grad
            self.groups.append((use_muon, values, grads, mean, square))
            self.state += [mean, square]

    @torch.no_grad()
    def step(self, share):
        """Move the weights at `share` (a scalar) of the peak rate; set their gradients to zero."""
        self.steps += 1
        rate, beta, decay = share * self.config.lr, self.config.kind.beta, self.config.kind.decay
        for use_muon, values, grads, mean, square in self.groups:
            if use_muon:
                values -= rate * 0.2 * math.sqrt(max(values.shape[1:])) * muon(grads, mean)
            else:
                mean.lerp_(grads, 0.1)
                square.lerp_(grads * grads, 1 - beta)
                spread = (square / (1 - beta ** self.steps)).sqrt() + 1e-8
                update = mean / (1 - 0.9 ** self.steps) / spread + decay * values
                values -= rate * self.adam_share * update
            grads.zero_()

def muon(grad, momentum):
    """Matrices (n, a, b) -> updates (n, a, b), nearly semi-orthogonal, by Newton-Schulz steps."""
    momentum.lerp_(grad, 0.05)
    x = grad.lerp(momentum, 0.95)  # Nesterov
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = F.normalize(x, dim=(1, 2), eps=1e-7)
    for _ in range(5):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, square, x, beta=3.4445)
    return x.mT if is_tall else x

def take_step(model, optimizer, share, source, target):
    """-> the loss: cross-entropy of target (B, T + 1). Differs: gradients are clipped at norm 1."""
    model.train()
    logits = model(source, target[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits, target[:, 1:].flatten().to(logits.device))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(share)
    return loss.detach()

def graphed_step(model, optimizer, graphs, *batch):
    """`take_step` of a batch: share, source, target. On CUDA, as a graph, since hundreds of kernel
    launches take about 9 ms and a replay takes 1 ms. graphs: {shape: graph, its inputs, loss}."""
    shape = batch[1].shape
    if shape in graphs:
        graph, inputs, loss = graphs[shape]
        for x, new in zip(inputs, batch):
            x.copy_(new)
        graph.replay()
        return loss
    loss = take_step(model, optimizer, *batch)
    if batch[0].is_cuda:  # the graph is recorded for later batches, which does not execute it
        graph, inputs = torch.cuda.CUDAGraph(), [x.cuda() for x in batch]
        with torch.cuda.graph(graph):
            graphs[shape] = graph, inputs, take_step(model, optimizer, *inputs)
    return loss

class Run(NamedTuple):
    """A run and its parts so far: trainings by name, as `train` keeps them; the last is "model";
    "attention", see `average_attention`; "before", tests before fine-tuning; "examples", see
    `draw_examples`; and, of a trained run, "proof", see `prove`."""
    config: object
    parts: dict
    folder: Path = None
    device: str = "cpu"

    def keep(self, **parts):
        """Add parts and save all, as plain values and tensors, which load without running code."""
        self.parts.update(parts)
        if self.folder:
            new = self.folder / f"checkpoint.{os.getpid()}"  # renamed, so never half-written
            torch.save(dict(config=self.config.values, parts=self.parts), new)
            demand(not (self.folder / "result.json").exists(),
                   f"another process has finished the run in {self.folder}")
            new.replace(self.folder / "checkpoint.pt")

class Data(NamedTuple):
    steps: int  # maximum number of steps of a training
    batch: Callable  # step, on which draws may depend -> source (B, S), target (B, T + 1)
    rate: Callable  # step -> share of the peak learning rate
    check: Callable  # model -> list of accuracies, for the curve

def percent(share):
    return f"{math.floor(1000 * share + 1e-9) / 10:.1f}%"  # rounded down: 100.0% means all

def train(run, model, name, data, windows=None):
    """Train a model on Data -> the last proof, or None. With windows, a proof ends the training.
    run.parts[name] gets "steps", "seconds", "weights", "curve", a list of [step, loss, *check], and
    "optimizer", to resume, which is absent from a finished part."""
    optimizer, graphs, proof = Optimizer(model, run.config), {}, None
    part = run.parts.setdefault(name, dict(steps=0, seconds=0.0, curve=[]))
    start = time.perf_counter() - part["seconds"]
    if part["steps"]:
        model.load_state_dict(part["weights"])
        if "optimizer" not in part:  # it is finished
            return windows and prove(model, windows)
        for state, kept in zip(optimizer.state, part["optimizer"]):
            state.copy_(kept)
    for step in range(part["steps"] + 1, data.steps + 1):
        share = optimizer.steps.new_tensor(data.rate(step))
        seed_draws(run.config.seed, name, step)  # so that a resumed run draws the same
        loss = graphed_step(model, optimizer, graphs, share, *data.batch(step))
        done = step == data.steps
        if windows and (done or step % 25 == 0 and step >= 50):
            proof = prove(model, windows)
            done |= proof["proved"]
        if done or step % 100 == 0:
            if not loss.isfinite():
                raise RunFailed(f"the loss is {loss.item()} at step {step} of {name}")
            part["curve"].append([step, loss.item()] + data.check(model))
            seconds = round(time.perf_counter() - start, 2)
            LOG.info(f"{name}: step {step:,} of {data.steps:,}, {seconds:.0f} s, loss {loss:.4f}")
            part.update(steps=step, seconds=seconds, weights=model.state_dict(),
                        optimizer=optimizer.state)  # saved at once, as steps change them in place
            if done:
                del part["optimizer"]
            run.keep()
        if done:
            return proof

def numbers_data(config, steps, first_training):
    """-> Data of numbers below LIMIT, split 7:1 into training and held-out ones (v2, App. B). The
    first training begins with mostly small numbers, to align places sooner."""
    torch.manual_seed(config.seed)
    training, held_out = map(torch.msort, torch.randperm(LIMIT).split(LIMIT * 7 // 8))
    def batch(step, B=config.batch, pool=training):
        """-> up to B questions of one training width. Raises: BadInput if there are none."""
        power = 6 - 5 * step / steps if first_training else 1.0  # at 1, draws are uniform
        def draw(base, length, n):
            share = torch.rand(n) ** power  # at 6, mostly near 0
            number = pool[(len(pool) * share).long()]  # pools are sorted, small numbers first
            return number[:, None] // base ** torch.arange(length) % base
        width = config.widths[torch.randint(len(config.widths), ())]
        source, target = draw_questions(config, draw, config.spec.width, B, width, distinct=False)
        demand(len(source), f"{config.task}: 20 draws of {B} gave no question")
        return source, target
    def rate(step):
        if config.preset == "paper":
            return 1.0
        falling = 0.4 if first_training else 1.0  # share of the steps in which the rate falls
        return min(1.0, step / 30, (steps - step + 1) / (falling * steps))
    def check(model):
        seed_draws(config.seed, "held-out")
        right = right_tokens(model, *batch(steps, 1000, held_out))
        return [right.all(1).double().mean().item()]
    return Data(steps, batch, rate, check)

def new_model(run, name, lines=()):
    """-> a model on the run's device, initialized from the seed and `name`."""
    seed_draws(run.config.seed, name)
    return run.config.kind.model(run.config, lines).to(run.device)

def learn_method(run):
    data = numbers_data(run.config, run.config.steps, first_training=True)
    train(run, new_model(run, "model"), "model", data)

NO_PROOF = ("no proof, which needs ABC by our rules without positions, one decoder layer, no "
            "encoder, and answers of all digits; tested only")

def settle_seq2seq(config):
    spec, scheme, operands = config.spec, config.scheme, config.spec.operands
    n_number, max_base = operands.count("number"), VOCAB.index("+")
    signs = set(VOCAB[max_base:]) - {START, END, PAD}
    demand(n_number and set(operands[n_number:]) <= {"digit"} and 1 < spec.base <= max_base
           and (len(operands) == 1 or spec.sign in signs),
           f"--task: {config.task} needs numbers, then digits; and, by VOCAB, a base of 2 to "
           f"{max_base} and a sign")
    demand(0 <= spec.headroom and spec.base ** spec.width <= 2 ** 63,
           f"--task: {config.task} needs a headroom of 0 or more; its numbers must fit 64 bits")
    least = spec.width
    config.widths = [config.width] if config.width else range(least, least + scheme.n_width)
    demand(least <= config.widths[0] <= 2000, f"--width must be {least} to 2,000")
    config.align = scheme.bias is banded and len(operands) == 2
    demand(scheme.bias is not banded or (not spec.msd_first and len(operands) < 3),
           f"--method: {config.method} reads one or two operands, from the last digit on")
    # If provable, lines alone determine what rows see, so a long bias can come in pieces.
    config.provable = (scheme.bias is CalibratedBias and config.rules == "ours"
                       and config.n_layer == 1 and not config.n_encoder
                       and not (scheme.position or scheme.scores or spec.label))
    demand(config.provable or max(config.lengths) <= 2000,
           "--lengths: more than 2,000 needs a method that can be proved")

def draw_tests(config, length, n):
    """Yield name, (source, target): "random" and, for the longest length up to 60, "hard"."""
    if length > 100:
        n = min(n, 200)  # long questions are slow
    yield "random", draw_questions(config, draw_exact, length, n)
    if length == max([x for x in config.lengths if x <= 60], default=0):
        seed_draws(config.seed, "hard", length)
        yield "hard", draw_questions(config, draw_hard, length, n)

def evaluate(model, config):
    """Test at config.lengths -> {"rows", "seconds"}; "places" has the accuracy of each digit."""
    rows, start = [], time.perf_counter()
    for length in config.lengths:
        seed_draws(config.seed, "test", length)
        for name, (source, target) in config.kind.draw_tests(config, length, config.samples):
            right = right_tokens(model, source, target)
            is_digit = target[:, 1:] < VOCAB.index("+")
            places = ((right & is_digit).sum(0) / is_digit.sum(0))[is_digit.any(0)]
            rows.append(dict(digits=length, set=name, correct=right.all(1).sum().item(),
                             n=len(right), places=[round(x, 4) for x in places.tolist()]))
    return dict(rows=rows, seconds=round(time.perf_counter() - start, 2))

def example(task, *operands, width=1, align=False):
    """example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&"). The width is raised
    to what the longest operand and the headroom need. Raises: BadInput."""
    spec, digits = TASKS.get(task), []
    demand(spec and len(operands) == len(spec.operands), f"{task} has no such question")
    width = max(width, max(map(len, operands)) + spec.headroom)
    for operand, text in zip(spec.operands, operands):
        demand(text and set(text) <= set(VOCAB[:spec.base])
               and (operand == "number" or len(text) == 1),
               f"{text!r} is not a base-{spec.base} {operand}")
        digits.append(encode(text.rjust(width, "0" if operand == "number" else text)))
    digits = torch.stack(digits, 1)[None]
    source, target = arrange(spec, digits if spec.msd_first else digits.flip(1), align)
    demand(len(source), f"{spec.about} has no answer of {width} digits")
    return decode(source[0]), decode(target[0])

def ask(model, config, question):
    """A question, "123+748" or "123 + 748" -> "871". Raises: BadInput if it is not the task's."""
    demand(config.model == "seq2seq", f"{config.task} by {config.model} cannot be asked")
    operands = [text.strip() for text in question.split(config.spec.sign or None)]
    source, target = example(config.task, *operands, width=config.widths[0], align=config.align)
    text = decode(generate(model, encode(source)[None], len(target) - 1)[0, 1:])
    digits, end, _ = text.partition(END)
    if not (digits and end) or set(digits) - set(VOCAB[:config.spec.base]):
        return f"no number; the model wrote {text!r}"
    if not config.spec.msd_first:
        digits = digits[::-1]
    if config.spec.headroom:
        return digits.lstrip("0") or "0"
    return digits[-max(map(len, operands)):]  # one digit for each digit of the question

# 5. ABC: lines, bias, calibration -----------------------------------------------------------------
# Up to `blocks_of`, this section can be copied as it stands; it needs math, torch and NamedTuple. A
# line is all elements of an attention matrix along a (row, column) step of (1, 1), (1, 0) or (1,
# -1). Lines that stand out are extended to other sizes, within blocks of columns, such as the
# operands. Four kinds of lines mean the same at every size; the sources' rules also use others:
#
#     attention   direction               what it shows to row t, which writes digit t
#     self        diagonal (1, 1)         the token at a fixed distance before digit t
#     cross       vertical (1, 0)         one symbol or single digit, whatever t is
#     cross       anti-diagonal (1, -1)   place t + offset, counted from a number's last digit
#     cross       diagonal (1, 1)         if msd_first, place t + offset - 1: column c of a block
#                                         has place c - 1, and column 0 has START or a sign

class Line(NamedTuple):
    """A line that is kept open. Its `path` identifies it in any head and layer."""
    head: int
    direction: int  # 1 diagonal, 0 vertical, -1 anti-diagonal
    block: int  # index of the block of columns that the line is in
    offset: int  # column in row 0, from the block's left; if direction is -1, from its right
    bias: float  # d minus the greatest d, see `find_lines`; or as `deal_lines` sets it
    z: float  # (d - mu) / sigma
    layer: int = 0
    attention: str = "cross"

    @property
    def path(self):
        return self.attention, self.direction, self.block, self.offset

def lines_of(x, direction):
    """x (m, n), one head and block -> (offset, line) of each; offset < 0 begins in a later row."""
    if direction == 0:
        return enumerate(x.unbind(1))
    if direction < 0:
        x = x.flip(1)
    return [(n, x.diagonal(n)) for n in range(1 - len(x), x.shape[1])]

def columns_of(lines, rows, blocks):
    """-> {path: the line's column in each row (M,)}; -1 where it leaves its block or would, in
    "self", show a later token. In `$0129|&`, the anti-diagonal (cross, -1, 0, -1) has columns -1,
    4, 3, 2, 1: row 1 sees the 9, and row 2 the 2."""
    columns = {}
    for path in {line.path for line in lines}:  # a line is often in several heads
        attention, direction, block, offset = path
        size, start = blocks[block], sum(blocks[:block])
        if direction < 0:
            offset = size - 1 - offset  # from the left end
        column = offset + direction * rows  # within the block
        inside = (column >= 0) & (column < size)
        if attention == "self":
            inside &= column <= rows
        columns[path] = torch.where(inside, start + column, -1)
    return columns

def find_lines(attention, of, blocks, kappa, directions=(1, 0, -1), together=False, total=False,
               ours=False):
    """Yield the lines that stand out of attention (H, m, n), `of` "self" or "cross", given the
    sizes of its blocks. d of a line is its mean attention or, if total, its sum; mu and sigma are
    the mean and deviation of d over the L lines of a head and direction or, if together, of a head.
    A line stands out if d > mu + kappa * sigma. By our rules, sigma * sqrt(L - 1), the most by
    which d can exceed mu, replaces sigma, so one kappa fits any L. For L = 6:

        offset     -2    -1     0     1     2     3       mu = .143, sigma = .168
        d         .02   .31   .44   .05   .03   .01       sigma * sqrt(5) = .377

        kappa 1.5         d > .396    offset 0, with bias 0
        ours, kappa 0.4   d > .294    offset 0, and offset -1 with bias .31 - .44 = -.13

    By our rules, only lines in over half of the rows count, as means of few cells vary more. With
    several blocks, all verticals count in mu and sigma, but only those in a block's first column,
    such as that of `+`, are yielded: places in others change with the width. Source: v1, Eqs. 1, 2;
    the authors' code."""
    groups = [directions] if together else [[direction] for direction in directions]
    for group in groups:
        for head, maps in enumerate(attention):
            means = {}  # (direction, block, offset) -> d
            for direction in group:
                for block, x in enumerate(maps.split(blocks, 1)):
                    for offset, line in lines_of(x, direction):
                        if not ours or len(line) > len(maps) / 2:
                            means[direction, block, offset] = line.sum() if total else line.mean()
            d = torch.stack(list(means.values()))
            sigma, mu = torch.std_mean(d, correction=0)
            unit = sigma * math.sqrt(len(d) - 1) if ours else sigma
            # A little more, or lines of equal mean would stand out by rounding.
            threshold = mu + kappa * unit + 1e-5 * mu
            for (direction, block, offset), x in means.items():
                moves_with_width = direction == 0 and offset > 0 and len(blocks) > 1
                if x > threshold and not moves_with_width:
                    yield Line(head, direction, block, offset, bias=float(x - d.max()),
                               z=float((x - mu) / sigma), attention=of)

def bias_of_lines(lines, n_head, blocks, rules, rows, keys):
    """Extend lines -> bias (H, M, N) between rows (M,) and keys (N,): -inf off all lines; where two
    cross, the greater bias counts. A row on no line of a head sees column 0 by our rules, all keys
    by others (in papers, only if a head has none). Source: v2, Eq. 1, App. E.1; v1, step 2.3."""
    columns = columns_of(lines, rows, blocks)
    bias = torch.full((n_head, len(rows), len(keys)), -math.inf, device=rows.device)
    for line in sorted(lines, key=lambda line: line.bias):  # the greater bias is written last
        bias[line.head].masked_fill_(keys == columns[line.path][:, None], line.bias)
    empty = bias.isneginf().all(2, keepdim=True)
    if rules == "ours":
        empty = empty & (keys == 0)
    return bias.masked_fill(empty, 0)

# Arguments of `find_lines`. Where a proof is possible, `choose_lines` tries KAPPAS instead of 0.5.
RULES = {
    "ours": dict(self=dict(kappa=0.5, directions=(1,), ours=True),
                 cross=dict(kappa=0.5, ours=True)),  # `calibrate` leaves out a direction
    "v1": dict(self=dict(kappa=4.0), cross=dict(kappa=4.0)),  # Secs. 5 and 6
    "v2": dict(self=dict(kappa=0.87, together=True),  # App. D; App. F may mean each direction
               cross=dict(kappa=4.5, together=True)),
    "code": dict(self=dict(kappa=0.87, directions=(1,), total=True),
                 cross=dict(kappa=4.5, directions=(-1,), total=True)),
}

def abc_bias(attention, M, N, rules="ours", of="cross", blocks=None, **changes):
    """For your own model, without a proof: attention (H, m, n), averaged over examples but not
    heads -> bias (H, M, N) of its lines, by RULES[rules][of] and `changes`. of: "cross" or "self"
    (add `causal_bias(M)`). blocks: (size in n, size in N) of each column block; with several and
    directions=(0, -1), cross lines mean the same at any size. Source: v1, Sec. 5; v2, App. D."""
    now, then = zip(*(blocks or [(attention.shape[2], N)]))
    lines = list(find_lines(attention.cpu(), of, now, **RULES[rules][of] | changes))
    return bias_of_lines(lines, len(attention), then, rules,
                         torch.arange(M), torch.arange(N)).to(attention)

def blocks_of(config, attention, N):
    """-> sizes of the blocks of N columns. In cross-attention by our rules, these are numbers with
    the symbol on their left, and single other columns: `$0123|+0748|&`, `$0123|*|7|&`."""
    if config.rules != "ours" or attention == "self":
        return [N]
    operands = config.spec.operands
    n_number = operands.count("number")
    n_single = 1 + 2 * operands.count("digit")  # END, and each single digit with its sign
    return [(N - n_single) // n_number] * n_number + [1] * n_single

class CalibratedBias(nn.Module):
    """A run's bias, made of its lines, which torch keeps in the state_dict. Source: v2, Eq. 2."""
    def __init__(self, config, lines):
        super().__init__()
        self.config, self.lines = config, lines

    def get_extra_state(self):  # called by state_dict
        return list(map(tuple, self.lines))

    def set_extra_state(self, lines):  # called by load_state_dict
        self.lines = [Line(*line) for line in lines]

    def arguments(self, layer, attention, S):
        lines = [line for line in self.lines if (line.layer, line.attention) == (layer, attention)]
        return lines, self.config.n_head, blocks_of(self.config, attention, S), self.config.rules

    def forward(self, layer, attention, T, S):
        """-> bias (H, T, S), which the model adds to scores; None if attention is "encoder"."""
        if attention != "encoder":
            given = self.arguments(layer, attention, S)
            return bias_of_lines(*given, torch.arange(T), torch.arange(S))

    def pieces(self, layer, attention, all_rows, S):
        """Yield all_rows (T,) in pieces: rows, the keys that they see, and their bias."""
        given = self.arguments(layer, attention, S)
        lines, _, blocks, _ = given
        for rows in all_rows.split(2048 if all_rows.is_cuda else 128):  # the fastest sizes
            columns = torch.stack([0 * rows, *columns_of(lines, rows, blocks).values()])
            # Column 0 is always a key, for rows on no line, so -1 (no column) may become 0.
            keys = columns.clamp(min=0).unique()
            yield rows, keys, bias_of_lines(*given, rows, keys)

# Numbers of nine widths teach a model to end its answer at any width.
METHODS["abc"] = Method("bias calibrated on a vanilla model, no positions", bias=CalibratedBias,
                        n_width=9)

@torch.no_grad()
def average_attention(model, source, target):
    """Attention averaged over right answers: source (B, S), target (B, T + 1) -> self (n_layer, H,
    T, T), cross (n_layer, H, T, S). Source: v1, Sec. 5; v2, App. D; the authors' code. Raises:
    RunFailed if hardly any answer is right."""
    right = right_tokens(model, source, target).all(1)  # (B,): are all tokens the likeliest?
    if right.float().mean() < 0.01:  # models with as few as 1.3% have led to a proof
        raise RunFailed("the model answers fewer than 1% of examples correctly; raise --steps")
    model(source[right], target[right, :-1])  # each attention keeps its weights
    own = [layer.self_attention.weights.mean(0) for layer in model.decoder]
    cross = [layer.cross_attention.weights.mean(0) for layer in model.decoder]
    return torch.stack(own).cpu(), torch.stack(cross).cpu()

def calibrate(config, attention, **changes):
    """Yield the lines of `average_attention`, by RULES and `changes`. By our rules, each layer has
    its own; by others, all have those of the last. Source: v2, App. D."""
    ours = config.rules == "ours"
    for layer in range(config.n_layer):
        for name, maps in zip(("self", "cross"), attention):
            rule = RULES[config.rules][name] | changes
            if ours and name == "cross":  # only directions that mean the same at every size
                rule["directions"] = (0, 1) if config.spec.msd_first else (0, -1)
            # With a large --width, rows after these write leading zeros and are left out. (With
            # msd_first, zeros come first, so that the rows kept may write nothing else.)
            filled = maps[layer if ours else -1, :, :config.spec.width + 1]
            for line in find_lines(filled, name, blocks_of(config, name, maps.shape[3]), **rule):
                yield line._replace(layer=layer, bias=round(line.bias, 2))

def deal_lines(lines, n_head):
    """Deal the different lines of each attention to its heads, the strongest first -> lines. After
    n_head lines, a head's next one has a third of the weight of the one before."""
    dealt, count = {}, dict(self=0, cross=0)
    for line in sorted(lines, key=lambda line: -line.z):
        if line.path not in dealt:
            turn, head = divmod(count[line.attention], n_head)
            bias = 0.0 - round(1.1 * turn, 1)  # e^-1.1 is a third
            dealt[line.path] = line._replace(head=head, bias=bias)
            count[line.attention] += 1
    return list(dealt.values())

# 6. Proof -----------------------------------------------------------------------------------------
# A proof is attempted for lines by our rules in one decoder layer, without an encoder, positions,
# other scores or a label. Row t writes digit t of the answer, the last row END. What it writes
# depends only on its *window*: the token before it and, for each head, the share of attention that
# the bias alone gives to each token. Without positions, equal tokens have equal keys and values, so
# the weight of a token is proportional to exp(its score) times the sum of exp(bias) over the keys
# that hold it. For `$0129&` (in runs, padded to 7 digits or more) and lines of offsets -1 and 0:
#
#     row t                             0       1       2       3       4
#     token before the row              $       0       3       1       0
#     tokens that the lines show        9       9 2     2 1     1 0     0 $
#     token that it must write          0       3       1       0       &
#
# Without the line of offset -1, row 1 sees only the digit 2 and, before it, the token 0. So does
# row 2 of `$0205&`, 205 + 1 = 206, but it must write 2, not 3: these questions *clash*, as no
# weights can tell them apart.
#
# Which questions show all windows? A question is a path of *moves*, one at each place: a digit of
# each operand and of the answer. They lead from *state* to state: the carry, single digits, and
# counts of zeros and places, which tell where the question may end. Lines show a row only moves at
# fixed distances, its *sight*: here moves t - 1 and t. Equal sights have equal windows and answers:
#
#     row of `$0129&`             0              1             2             3             4
#     carry before move t         1              1             0             0             0
#     move t - 1                  missing        9 -> 0        2 -> 3        1 -> 1        0 -> 0
#     move t                      9 -> 0         2 -> 3        1 -> 1        0 -> 0        (the end)
#
# `short_questions` walks from the start along all moves, and remembers the state and the latest
# moves that the next sight needs (here one). Walks that agree in both continue alike, so only the
# first is followed. Each new sight gives a question: the walk to it, and a shortest way to an end.
# With a third line, of offset 1, the sight of row t is moves t - 1 to t + 1. The walk's first sight
# ends at move 0: it is of row -1, which does not exist, and only adds a question. Its last, up to
# the end, is of row 3; row 4 sees a part of it, in the same question.
#
# All this assumes exact arithmetic and numbers padded as `ask` does, to the least training width or
# more. As floating point rounds, the right token must lead by MARGIN, and rows of drawn questions
# of up to 1,000 digits must show listed windows, with logits that differ by less than MARGIN / 10.

MARGIN = 0.5  # lead, in logits, that the right token must have
MOST_WINDOWS = 2 ** 19  # limit on sights and on nodes of the walk; a window takes 2 kB

class Windows(NamedTuple):
    bias: CalibratedBias  # made of the lines by which rows see; None if there is no list
    seen: dict  # {window, as bytes: (token to write, source (S,), target (T + 1,), its index)}
    questions: list  # source (B, S), target (B, T + 1), indexes of the windows (B, T)
    clash: tuple = ()  # two questions that clash, each as source (1, S), target (1, T + 1)
    why: str = ""  # why there can be no proof, such as a clash

def views_of_rows(bias, source, target):
    """What rows of questions, source (B, S), target (B, T + 1), see by lines -> numbers (B, T,
    features). Two rows see the same window if their numbers, rounded to 9 decimals, are equal."""
    before = target[:, :-1]
    views = [before[:, :, None]]
    for attention, tokens in ("self", before), ("cross", source):
        shares = bias(0, attention, before.shape[1], tokens.shape[1]).double().softmax(2)
        keys = F.one_hot(tokens, len(VOCAB)).double()
        views.append(torch.einsum("hrk,bkv->brhv", shares, keys).flatten(2))
    return torch.cat(views, 2).round(decimals=9)

def collect_windows(config, lines, questions):
    """Batches of questions, source (B, S), target (B, T + 1) -> Windows, up to the first clash."""
    bias, seen, read = CalibratedBias(config, lines), {}, []
    for source, target in questions:
        indexes, views = [], views_of_rows(bias, source, target).numpy()
        for s, t, rows in zip(source, target, views):
            for view, token in zip(rows, t[1:].tolist()):
                shown = token, s, t, len(seen)  # kept if the window is new
                first, s0, t0, index = seen.setdefault(view.tobytes(), shown)
                indexes.append(index)
                if first != token:
                    why = (f"refuted for any weights: {decode(s)} and {decode(s0)} look the same "
                           f"to a row that must write {VOCAB[token]} or {VOCAB[first]}")
                    clash = (s[None], t[None]), (s0[None], t0[None])
                    return Windows(bias, seen, read, clash, why)
        read.append((source, target, torch.tensor(indexes).view_as(target[:, 1:])))
    return Windows(bias, seen, read)

class State(NamedTuple):  # a question may end only if both counts have reached their limits
    singles: tuple  # the single digits, the same at every place
    carry: int
    zeros: int  # latest (msd_first: first) places with digits 0, counted up to headroom
    places: int  # places so far; stops at the least width

def follow_places(spec, least):
    """Follow questions of `least` or more places -> moves, {state: [(digits, token, next state),
    ...]}; tails, {state: digits of a shortest way to an end, if any}. Raises: RunFailed."""
    numbers, singles = (list(itertools.product(range(spec.base), repeat=spec.operands.count(name)))
                        for name in ("number", "digit"))
    states = [State(digits, spec.first, 0, 0) for digits in singles]
    moves, tails = {state: [] for state in states}, {}
    for state in states:  # grows
        if len(states) > 50_000:
            raise RunFailed("no proof: there are too many states, such as carries")
        final = state.carry == 0 or spec.msd_first or spec.headroom == 0
        if final and (state.zeros, state.places) == (spec.headroom, least):
            tails[state] = ()  # a question may end here
        columns = torch.tensor([digits + state.singles for digits in numbers])
        tokens, carries = spec.step(state.carry, columns)
        for number, token, carry in zip(numbers, tokens.tolist(), carries.tolist()):
            if token == -1 or (spec.msd_first and any(number) and state.zeros < spec.headroom):
                continue  # there is no answer, or a nonzero digit within the headroom
            if spec.msd_first or not any(number):  # msd_first: if any(number), zeros is headroom
                zeros = min(state.zeros + 1, spec.headroom)
            else:
                zeros = 0
            after = State(state.singles, carry, zeros, min(state.places + 1, least))
            digits = number + state.singles
            moves[state].append((digits, token, after))
            if after not in moves:
                moves[after] = []
                states.append(after)
    further = tails  # at first, the states at which a question may end
    while further:  # each pass finds the states that are one place further from an end
        further = {state: (digits,) + tails[after] for state in moves.keys() - tails
                   for digits, _, after in moves[state] if after in tails}
        tails |= further
    return moves, tails

def length_of_sight(config, lines):
    """-> number of moves from the first to the last that a row may see. Raises: RunFailed."""
    spec = config.spec
    places = {-1, 0}  # relative to row t: -1 of the token before it, 0 of the one to write
    forward = 1 if spec.msd_first else -1
    n_number = spec.operands.count("number")  # block n < n_number is operand n with its sign
    for attention, direction, block, offset in {line.path for line in lines}:
        if (attention, direction) == ("self", 1):  # column c > 0 holds digit c - 1
            places.add(offset - 1)
        elif (attention, direction) == ("cross", forward) and block < n_number:
            places.add(offset - spec.msd_first)  # see the table of section 5
        elif (direction, offset) != (0, 0):  # a block's first column is the same in all rows
            raise RunFailed("no proof: a line shows different places at different widths")
    return max(places) - min(places) + 1

def short_questions(config, lines):
    """Yield questions, source (B, S), target (B, T + 1), of all windows. Raises: RunFailed."""
    moves, tails = follow_places(config.spec, config.widths[0])
    if not tails:
        raise RunFailed("no proof: the task has no question")
    missing = (None,) * (length_of_sight(config, lines) - 1)
    # A sight, `latest` plus a move or the end, fixes a window. A state fixes what may follow.
    # paths: {(state, latest): digits of a shortest way}; found: {sight: digits of its question}.
    paths, found = {(state, missing): () for state in moves if state.places == 0}, {}
    nodes = list(paths)
    for state, latest in nodes:  # grows
        path = paths[state, latest]
        if tails.get(state) == ():
            # Later rows see only a part of this sight, in the same question.
            found.setdefault(latest + (END,), path)
        for digits, token, after in moves[state]:
            if after not in tails:
                continue
            sight = latest + ((digits, token),)
            found.setdefault(sight, path + (digits,) + tails[after])
            node = after, sight[1:]
            if node not in paths:
                paths[node] = path + (digits,)
                nodes.append(node)
        too_many = max(len(found), len(nodes)) > MOST_WINDOWS
        if too_many:
            break
    for _, group in itertools.groupby(sorted(found.values(), key=len), len):
        for digits in torch.tensor(list(group)).split(500):  # few enough for memory
            yield arrange(config.spec, digits)
    if too_many:  # said last, as a clash would say more
        raise RunFailed(f"no proof: too many windows (limit {MOST_WINDOWS:,}); tested only")

def enumerate_windows(config, lines):
    """-> Windows: all, or those up to a clash, or none, if `why` says that there is no list."""
    if not config.provable:
        return Windows(None, {}, [], why=NO_PROOF)
    try:
        return collect_windows(config, lines, short_questions(config, lines))
    except RunFailed as error:
        return Windows(None, {}, [], why=str(error))

def measure_drift(model, windows, logits):
    """Compare rows of drawn questions with the logits (n, V) of the windows that they show -> the
    largest difference, and the most digits of a question. Raises: RunFailed."""
    config, drift, digits = windows.bias.config, 0.0, 0
    for length in 20, 33, 60, 1000:
        seed_draws(config.seed, "drift", length)
        source, target = draw_questions(config, draw_hard, length, 2000 // length)
        views = views_of_rows(windows.bias, source, target).flatten(0, 1).numpy()
        indexes = [windows.seen.get(view.tobytes(), [None])[-1] for view in views]
        found = model(source, target[:, :-1]).cpu().flatten(0, 1)
        if None in indexes or not torch.equal(found.argmax(1), target[:, 1:].flatten()):
            raise RunFailed("longer questions are wrong, or show windows that were not listed")
        if len(found):  # else no question was found
            drift = max(drift, (found - logits[indexes]).abs().nan_to_num(1e9).max().item())
            digits = length
    return drift, digits

@torch.no_grad()
def prove(model, windows):
    """-> {"proved", "why"} and, as far as the proof gets, "windows", their number; "margin", the
    least lead of a right token, in logits; "drift", "drift_digits", see `measure_drift`."""
    model.eval()
    if windows.why:
        return dict(proved=False, why=windows.why)
    proof = dict(proved=True, why="", windows=len(windows.seen), margin=math.inf)
    known = None
    try:
        for source, target, indexes in windows.questions:
            logits, right = model(source, target[:, :-1]).cpu(), target[:, 1:, None]
            if known is None:
                known = logits.new_zeros(len(windows.seen), logits.shape[2])
            known[indexes] = logits
            lead = logits.gather(2, right) - logits.scatter(2, right, -math.inf).amax(2, True)
            lead = lead.nan_to_num(-1e9).amin((1, 2))  # (B,)
            proof["margin"] = min(proof["margin"], round(lead.min().item(), 3))
            if lead.min() < MARGIN:
                raise RunFailed(f"{decode(source[lead.argmin()])} is wrong or in doubt")
        proof["drift"], proof["drift_digits"] = measure_drift(model, windows, known)
        if proof["drift"] >= MARGIN / 10:
            raise RunFailed(f"logits of longer questions drift by {proof['drift']:.1e}")
    except RunFailed as error:
        proof |= dict(proved=False, why=f"not proved: {error}; more steps, heads or seeds may help")
    return proof

# 7. ABC from end to end ---------------------------------------------------------------------------
# Besides section 5 and RunFailed, this uses the following; Q: source (B, S), target (B, T + 1).
#
#     Config(**values) -> a config; config.provable: whether there can be a proof (by default: yes)
#     seed_draws(*names): seed random draws by these names
#     draw_questions(config, draw, length, n) -> Q; draw_exact is random, draw_hard has long carries
#     numbers_data(config, steps, first_training) -> data; its batch(steps, n) -> a uniform Q of n
#     new_model(run, name, lines) -> a Transformer that adds the bias of lines to its scores
#     train(run, model, name, data, windows) -> the last proof; one that is "proved" ends it
#     run.parts[name]["curve"], a list of [step, loss, unseen accuracy]; run.keep saves a part
#     collect_windows(config, lines, [Q, ...]) -> Windows: what rows of these questions see, up to a
#         `clash`: two Q that look the same to a row but need different tokens; () if there is none
#     enumerate_windows(config, lines) -> Windows of all questions, or `why` they are not known

def drop_lines(config, lines, pool):
    """-> the lines that a pool of questions needs to avoid clashes. Others are dropped from all
    heads, the weakest first; the main diagonal of self-attention stays, to train faster."""
    strongest_first = sorted(lines, key=lambda line: -line.z)
    for path in reversed(dict.fromkeys(line.path for line in strongest_first)):
        fewer = [line for line in lines if line.path != path]
        if path != ("self", 1, 0, 0) and not collect_windows(config, fewer, pool).clash:
            lines = fewer
    return lines

# Some are below 0, as one strong line can raise the mean above needed ones; -2 opens nearly all.
KAPPAS = 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0, -0.05, -0.1, -0.15, -0.2, -2.0

def choose_lines(config, attention):
    """Averaged attention -> kappa, lines, Windows. Kappa falls until its lines avoid clashes in a
    pool of questions; lines that are not needed are dropped. A clash found later joins the pool,
    and the same kappa is tried again. Without a proof, RULES' kappa is used. Raises: RunFailed."""
    if not config.provable:
        lines = list(calibrate(config, attention))
        return RULES[config.rules]["cross"]["kappa"], lines, enumerate_windows(config, lines)
    seed_draws(config.seed, "pool")
    pool = [draw_questions(config, draw, length, 300)
            for draw in (draw_exact, draw_hard) for length in (6, 8)]
    for kappa in KAPPAS:
        opened = list(calibrate(config, attention, kappa=kappa))
        while True:
            in_pool = collect_windows(config, opened, pool)
            if in_pool.clash:
                break  # the next kappa is tried
            lines = drop_lines(config, opened, pool)
            windows = enumerate_windows(config, lines)
            if not windows.clash:
                return kappa, lines, windows
            pool += windows.clash  # two batches, one question each
    raise RunFailed(f"no lines determine the answer; {in_pool.why}")

def retrain(run, attempt, lines, windows, vanilla=None):
    """Train a model with these lines, from the weights of `vanilla` if it is given -> proof."""
    config, name = run.config, f"attempt {attempt}"
    model = new_model(run, name, lines)
    if vanilla:
        # All queries and keys become zero for good: the gradient of one has the other as factor.
        model.load_state_dict(vanilla.state_dict(), strict=False)  # vanilla has no lines
        for key, weight in model.named_parameters():
            if ".q." in key or ".k." in key:
                nn.init.zeros_(weight)
    data = numbers_data(config, attempt * config.retrain_steps, first_training=False)
    proof = train(run, model, name, data, windows)
    return proof | dict(attempt=attempt, lines=[line._asdict() for line in lines])

def learn_abc(run):
    """Train a model by ABC in five stages -> proof. A run that resumes goes on with what `train`
    and `run.keep` have saved. Source: v1, Sec. 5; v2, App. D. Differs: see results/claims.md."""
    config, parts = run.config, run.parts
    # 1. Vanilla learns, at one width, so it ends answers only there.
    plain = Config(**config.values | dict(method="vanilla", lengths=(6,)))  # long ones need ABC
    vanilla = new_model(run._replace(config=plain), "vanilla")
    data = numbers_data(plain, config.steps, first_training=True)
    train(run, vanilla, "vanilla", data)
    # 2. Its attention is averaged over right answers to 1,000 training questions.
    if "attention" not in parts:
        seed_draws(config.seed, "attention")
        run.keep(attention=average_attention(vanilla, *data.batch(data.steps, 1000)))
    # 3. A small set of lines that determine the answer is chosen, and windows are enumerated.
    kappa, lines, windows = choose_lines(config, parts["attention"])
    # 4., 5. Vanilla is retrained and proved; by other rules, a new model is trained instead.
    proof = retrain(run, 1, lines, windows, vanilla if config.rules == "ours" else None)
    if not (proof["proved"] or windows.why):  # windows are known, but the proof failed
        # As q = k = 0, a head may confuse its lines. A new model has them in different heads.
        dealt = deal_lines(lines, config.n_head)
        second = retrain(run, 2, dealt, enumerate_windows(config, dealt))
        before, after = (parts[f"attempt {n}"]["curve"][-1][2] for n in (1, 2))
        if second["proved"] or after > before:  # on unseen numbers
            proof = second
    parts["model"] = parts.pop(f"attempt {proof['attempt']}")
    return proof | dict(kappa=kappa)

# 8. Consecutive pairs: one attention head ---------------------------------------------------------
# Source: Pairs. The label of n in 0 .. V - 1 is 1 if n - 1 or n + 1 also occurs. The one layer has
# no feed-forward part and, by our choice, no positions, norm or residual; draws are uniform.

PAIRS_TASKS = {"consecutive": Task("is a neighbor there?", None, steps=6000, batch=300, lr=1e-3)}

PAIRS_OPTIONS = dict(
    d_vocab=(number, 16, "number of different integers"),
    d_head=(number, 32, "width of queries and keys"),
    dummy=((False, True), False, "put a dummy token at the start"))

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
    """source (B, T or 1 + T), target (B, T) -> logits (B, T, 2): 0, z. Differs: initial values."""
    def __init__(self, config, lines):  # lines: none
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
    """Train on sequences of five. Differs: the learning rate is constant."""
    config = run.config
    data = Data(config.steps, lambda step: draw_pairs(config, config.batch, 5),
                rate=lambda step: 1.0, check=lambda model: [])
    train(run, new_model(run, "model"), "model", data)

# 9. Encoders: one pass, relative positions, priming -----------------------------------------------
# Source: Jelassi, Secs. 2.1, 2.2 and 5. Digit t of the answer is read at token t of the question,
# which has 2W + 1 tokens. Numbers have the highest digit first, padding last. Differs: modular
# tasks have no signs of their own.

class EncoderTask(NamedTuple):
    about: str
    sign: str
    answer: Callable  # positive integers a, b -> integer or text, longest for the largest a and b
    steps: int
    second_digits: int = None  # maximum number of digits of b; by default the same as for a
    n_encoder: int = 3  # number of layers, or of passes through one

ENCODER_TASKS = {
    # 12@+39@ -> $51@@; modulo 100: $51
    "addition": EncoderTask("a + b", "+", int.__add__, 8000, n_encoder=6),
    # 12@*9@@ -> $108@@@; modulo 100: $08
    "multiplication": EncoderTask("a * b, b is short", "*", int.__mul__, 10_000, second_digits=1),
}

ENCODER_OPTIONS = dict(
    n_encoder=(number, None, "encoder layers, or passes through one"),
    train_digits=(number, 5, "most digits of a training number"),
    second_digits=(number, None, "most digits of the second operand"),
    modulus=(number, None, "compute answers modulo this"),
    examples=(number, 5000, "examples of training"),
    prime=(number_or_0, 0, "how many of them are long"),
    prime_lengths=(numbers, None, "their lengths, by default the longest tested"),
    finetune=(number, None, "long examples to train on next"))

def settle_encoder(config):
    config.prime_lengths = config.prime_lengths or (max(config.lengths),)
    needed = max(*config.lengths, *config.prime_lengths, config.train_digits,
                 config.second_digits or 1, len(str(config.modulus or 1)) // 2)
    # Differs: in the fast preset, PAD follows even the longest tested numbers, as in training.
    config.width = config.width or needed + 2 * (config.preset == "fast")
    config.clip = config.clip or 2 * config.width
    demand(needed <= config.width <= 2000, f"--width must be {needed} to 2,000 here")
    demand(config.method not in ("abc", "alibi-decoder") and not config.scheme.window,
           f"--method: {config.method} needs a decoder")
    demand(config.prime <= config.examples, f"--prime: {config.prime} is more than --examples")

def arrange_encoder(config, pairs):
    """Pairs of integers -> source (B, 2W + 1), target (B, 1 + n), whose START is not read. Differs:
    the example that Sec. 2.1 prints has one PAD fewer; modular answers are padded with zeros."""
    spec, W, sources, targets = config.spec, config.width, [], []
    greatest = config.modulus - 1 if config.modulus else spec.answer(10 ** W - 1, 10 ** W - 1)
    n = len(str(greatest))
    for a, b in pairs:
        answer = spec.answer(a, b)
        if config.modulus:
            answer = str(int(answer) % config.modulus).zfill(n)
        sources.append(encode(str(a).ljust(W, PAD) + spec.sign + str(b).ljust(W, PAD)))
        targets.append(encode(START + str(answer).ljust(n, PAD)))
    return torch.stack(sources), torch.stack(targets)

def draw_integers(config, lengths):
    """-> pairs of positive integers, of up to `length` and of up to second_digits digits."""
    return [(random.randrange(1, 10 ** length),
             random.randrange(1, 10 ** (config.second_digits or length))) for length in lengths]

def encoder_data(config, n_short, n_long, steps):
    """-> Data of n_short operands a, with b drawn at each use, and of n_long long questions.
    Differs: the rate warms up; the fast preset draws all short lengths equally often."""
    def draw_short(digits):
        least = 1
        if config.preset == "fast":
            digits = random.randint(1, digits)
            least = 10 ** (digits - 1)
        return random.randrange(least, 10 ** digits)
    seed_draws(config.seed, "examples", n_short, n_long)
    known = [(draw_short(config.train_digits), None) for _ in range(n_short)]
    known += draw_integers(config, random.choices(config.prime_lengths, k=n_long))
    def batch(step):
        drawn = random.choices(known, k=config.batch)
        digits = config.second_digits or config.train_digits
        return arrange_encoder(config, [(a, b or draw_short(digits)) for a, b in drawn])
    def check(model):
        lengths = config.train_digits, max(config.prime_lengths)
        test = Config(**config.values | dict(lengths=lengths, samples=200))
        return [row["correct"] / row["n"] for row in evaluate(model, test)["rows"]]
    def rate(step):
        return min(1.0, step / 100) * (1 + math.cos(math.pi * step / steps)) / 2
    return Data(steps, batch, rate, check)

def learn_encoder(run):
    """Train on short and, by --prime, a few long questions; then, by --finetune, on long ones."""
    config, model = run.config, new_model(run, "model")
    data = encoder_data(config, config.examples - config.prime, config.prime, config.steps)
    if config.finetune:
        train(run, model, "short numbers", data)
        run.keep(before=evaluate(model, config))
        data = encoder_data(config, 0, config.finetune, config.retrain_steps)
    train(run, model, "model", data)

# 10. Kinds of models, checkpoints, command line ---------------------------------------------------
# Kinds of models. `defaults` replace those of the options; a task's and a method's own come next.
# `paper` has the published values: v2, App. B, D and code; Jelassi, Sec. 2.2, where multiplication
# has --second-digits 3. Differs: v2's retrain_steps are, by our choice, a tenth of its steps.
SEQ2SEQ = SimpleNamespace(
    tasks=TASKS, model=Transformer, settle=settle_seq2seq, learn=learn_method,
    draw_tests=draw_tests, activation=nn.ReLU, beta=0.98, decay=0.0, defaults={},
    options=TRANSFORMER | dict(
        rules=(RULES, "ours", "which choose the lines of ABC: ours, v1, v2 or code"),
        n_encoder=(number_or_0, 0, "encoder layers, or passes through one"),
        n_layer=(number, 1, "decoder layers")),
    paper=dict(rules="v2", samples=10_000, steps=460_000, retrain_steps=46_000, batch=512, lr=1e-5,
               dropout=0.3, width=61, n_encoder=1, n_layer=6, n_head=8, d_model=128))
ENCODER = SimpleNamespace(
    tasks=ENCODER_TASKS, model=Transformer, settle=settle_encoder, learn=learn_encoder,
    draw_tests=lambda config, length, n: [
        ("random", arrange_encoder(config, draw_integers(config, [length] * n)))],
    activation=nn.GELU, beta=0.999, decay=0.01,
    defaults=dict(method="rpe-k", lengths=(5, 6, 10), retrain_steps=1000, batch=32, lr=3e-3,
                  clip=None),
    options=TRANSFORMER | ENCODER_OPTIONS,
    paper=dict(lengths=(5, 6, 10, 15, 20), samples=10_000, steps=2_343_750, lr=1e-4, dropout=0.1,
               n_encoder=6, n_head=16, d_model=1024))
PAIRS = SimpleNamespace(
    tasks=PAIRS_TASKS, model=PairsHead, settle=lambda config: None, learn=learn_pairs,
    draw_tests=lambda config, length, n: [("random", draw_pairs(config, n, length))],
    beta=0.999, decay=0.0,
    defaults=dict(lengths=(5,), samples=10_000, d_model=128),
    options=COMMON | PAIRS_OPTIONS)
# By default, the first kind that has a task learns it. A universal transformer repeats one layer.
KINDS = dict(seq2seq=SEQ2SEQ, universal=ENCODER, encoder=ENCODER, pairs=PAIRS)

class Config:
    """The options of a run as attributes, and its kind, scheme and spec, entries of KINDS, METHODS
    and a table of tasks. An option's value is the last of these: its kind's default; the task's;
    the method's, if seq2seq; the paper preset's, if chosen; one given. Raises: BadInput."""
    # Values for kinds of models that do not set these.
    method, preset, n_layer, n_head, train_digits, provable = "nope", "fast", 0, 1, 4, False

    def __init__(self, task="successor", model=None, **given):
        models = [name for name, kind in KINDS.items() if task in list(kind.tasks)]
        model = model or next(iter(models), None)
        demand(model in models, f"--task: {task} is not known, or not to this --model; see --help")
        self.kind, self.n_vocab = KINDS[model], len(VOCAB)
        self.spec, options = self.kind.tasks[task], self.kind.options
        chosen = {}
        for name, value in dict(given, task=task, model=model).items():
            if value is None:
                continue
            try:
                read = options[name][0]
                if not callable(read):  # choices
                    read = {choice: choice for choice in read}.__getitem__
                chosen[name] = read(value)
            except (KeyError, TypeError, ValueError) as error:
                raise BadInput(f"--{name.replace('_', '-')}: {task} cannot take {value!r}: "
                               f"{error!r}") from None
        values = {name: default for name, (_, default, _) in options.items()} | self.kind.defaults
        values |= self.spec._asdict()  # also what is no option, such as base
        vars(self).update(values | chosen)  # to know the method and the preset
        self.scheme = METHODS[self.method]
        if self.kind is SEQ2SEQ:
            values["steps"] *= self.scheme.steps_factor
            values |= self.scheme.defaults
        if self.preset == "paper":
            values |= self.kind.paper
        vars(self).update(values | chosen)
        self.kind.settle(self)
        n = self.n_head * (1 + (self.method == "rope"))  # which rotates pairs of channels
        demand(self.d_model % n == 0, "--n-head, twice for rope, must divide --d-model")
        self.values = {name: getattr(self, name) for name in options}

def draw_examples(config):
    """-> source, target: questions by which a changed task is noticed."""
    seed_draws("examples")
    return dict(config.kind.draw_tests(config, min(4, config.train_digits), 20))["random"]

def read_run(folder):
    """-> the run in a folder. Code in its file is never run. Raises: BadInput."""
    try:
        state = torch.load(Path(folder, "checkpoint.pt"), map_location="cpu", weights_only=True)
        config, parts = Config(**state["config"]), state["parts"]
        demand(all(map(torch.equal, parts["examples"], draw_examples(config))),
               "its task or VOCAB has changed")
        run = Run(config, parts, Path(folder))
        if "proof" in parts:
            build(run)
        return run
    except Exception as error:
        raise BadInput(f"{str(folder)!r} has no run that can be used: {error!r:.300}") from None

def build(run):
    """-> the trained model of a run. Raises: BadInput if its logits are no longer those kept."""
    config, part = run.config, run.parts["model"]
    source, target = run.parts["examples"]
    config.n_vocab = len(part["weights"]["embedding.weight"])  # VOCAB may have grown since
    model = new_model(run, "model").eval()
    model.load_state_dict(part["weights"])
    logits = model(source, target[:, :-1]).detach().cpu()
    kept = part.setdefault("logits", logits)  # those of the first call
    demand(torch.allclose(kept, logits, atol=0.01), "its method has changed")
    return model

def load(folder):
    """Folder of a finished run -> model, config, parts. Raises: BadInput."""
    run = read_run(folder)
    demand("proof" in run.parts, f"{folder} is not finished; --from {folder} goes on")
    return build(run), run.config, run.parts

def summary(record):  # README explains an example
    config, proof, tests = record["config"], record["proof"], record["tests"]
    example = " -> ".join(record["example"])
    yield f"{config['task']}, {config['model']}, seed {config['seed']}: {example}"
    for name, part in record["train"].items():
        unseen = " ".join(map(percent, part["curve"][-1][2:])) or "-"
        yield f"{name:<9} {part['steps']:,} steps, {part['seconds']:.1f} s, unseen {unseen}"
    if "lines" in proof:
        yield f"lines     {len(proof['lines'])} at kappa {proof['kappa']}"
    if proof["proved"]:
        yield (f"proof     exact at every length, rounding aside: right on all "
               f"{proof['windows']:,} windows, by {proof['margin']:.1f} or more; "
               f"drift {proof['drift']:.0e} in up to {proof['drift_digits']:,} digits")
    else:
        yield f"proof     {proof['why']}"
    yield f"tests     {tests['seconds']:.1f} s on {record['device']}"
    yield "digits   exact  set             n"
    for row in tests["rows"]:
        share = percent(row["correct"] / row["n"]) if row["n"] else "-"
        yield f"{row['digits']:>6}  {share:>6}  {row['set']:<8} {row['n']:8,}"

def execute(run, as_json=False):
    """Train a run if it is not trained, test it, and write and print its record -> the record."""
    config, parts = run.config, run.parts
    if config.d_model <= 128 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # for the same results on any number of cores
    run.keep(examples=draw_examples(config))
    LOG.info(f"{config.task}, {config.model}, {config.method}, {run.device}: {run.folder}")
    trained = "proof" in parts
    if not trained:
        learn = learn_abc if config.scheme.bias is CalibratedBias else config.kind.learn
        parts["proof"] = learn(run) or dict(proved=False, why=NO_PROOF)
    model, proof = build(run), parts["proof"]
    if trained:  # the code, or the file, may have changed since
        lines = model.bias.lines if config.provable else []
        proof.update(prove(model, enumerate_windows(config, lines)))
    tests = evaluate(model, config)
    if proof["proved"] and any(row["correct"] < row["n"] for row in tests["rows"]):
        proof.update(proved=False, why="right on all windows, but wrong in tests")
    run.keep()
    example = [x[:1].flatten() for x in parts["examples"]]
    record = dict(
        config=config.values, torch=torch.__version__, tests=tests, proof=proof,
        example=[str(x.tolist()) if config.kind is PAIRS else decode(x) for x in example],
        device=torch.cuda.get_device_name() if run.device == "cuda" else "cpu",
        train={name: {key: part[key] for key in ("steps", "seconds", "curve")}
               for name, part in parts.items() if "curve" in part}, before=parts.get("before"))
    if run.folder:
        (run.folder / "result.json").write_text(json.dumps(record))
    print(json.dumps(record) if as_json else "\n".join(summary(record)))
    return record

def make_run(given, source=None, out=None, device="cpu"):
    """-> a new run of these options or, from the folder `source`, one that goes on."""
    parts = {}
    if source:
        demand(given.keys() <= {"lengths", "samples"}, "--from allows only --lengths, --samples")
        config, parts, source, _ = read_run(source)
        given = config.values | given
    config = Config(**given)
    folder = source
    if not source or out or (source / "result.json").exists():  # a finished run stays as it is
        name = f"{datetime.now():%y%m%d-%H%M%S-%f}-{config.task}-{config.method}"
        folder = Path(out or "runs/" + name.replace("/", "-"))
        folder.mkdir(parents=True)
    return Run(config, parts, folder, device)

def make_parser():
    """An option of a run that is not given is absent from the parser's result."""
    entries = TASKS | ENCODER_TASKS | PAIRS_TASKS | METHODS
    listed = "".join(f"\n  {name:<22}{entry.about}" for name, entry in entries.items())
    p = argparse.ArgumentParser(
        "lengen.py", allow_abbrev=False, epilog=f"tasks and methods:{listed}",
        description="Shared options show seq2seq defaults; None depends on the task, or is off.",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (_, default, about) in (ENCODER.options | PAIRS.options | SEQ2SEQ.options).items():
        p.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS,
                       action="store_true" if name == "dummy" else "store",
                       help=f"{about} ({default})")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    p.add_argument("--device", choices=devices, default=devices[0], help="a GPU if there is one")
    p.add_argument("--out", help="a new folder, by default in runs/")
    p.add_argument("--from", help="the folder of a run to finish, test again or ask")
    p.add_argument("--ask", nargs="+", help="ask 123+748 of --from or of the newest finished run")
    p.add_argument("--json", action="store_true", help="print the record as JSON")
    p.add_argument("--quiet", action="store_true", help="report no progress")
    return p

def main(argv=None):
    """-> exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    given, interrupted = vars(make_parser().parse_args(argv)), "interrupted"
    source, out, device, questions, as_json, quiet = map(
        given.pop, ("from", "out", "device", "ask", "json", "quiet"))
    logging.basicConfig(format="%(message)s")
    LOG.setLevel("WARNING" if quiet else "INFO")
    try:
        if questions:
            demand(not (given or out or as_json), "--ask takes only --from, --device, --quiet")
            finished = sorted(Path("runs").glob("*/result.json"), key=os.path.getmtime)
            demand(source or finished, "--ask: there is no finished run in runs/")
            model, config, parts = load(source or finished[-1].parent)
            if not parts["proof"]["proved"]:  # its answers may be wrong
                print(f"lengen: {parts['proof']['why']}", file=sys.stderr)
            for question in questions:
                print(ask(model.to(device), config, question))
        else:
            run = make_run(given, source, out, device)
            interrupted += f"; go on by --from {run.folder}"
            execute(run, as_json)
        return 0
    except (KeyboardInterrupt, RunFailed, BadInput, OSError) as error:
        print(f"lengen: {str(error) or interrupted}", file=sys.stderr)
        return {KeyboardInterrupt: 130, RunFailed: 1}.get(type(error), 2)

if __name__ == "__main__":
    sys.exit(main())
