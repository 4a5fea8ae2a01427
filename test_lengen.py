# SPDX-License-Identifier: MIT
"""Tests of lengen.py, in its order. Oracles: torch, published numbers, loops, random models."""

import contextlib
import copy
import decimal
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import accumulate, compress, count, product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock, call, patch

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from pytest import approx, raises
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import lengen as L
from lengen import METHODS, TASKS, BadInput, Config, Line, Optimizer, Run, RunFailed, Task
from lengen import Transformer, abc_bias, alibi_bias, average_attention, causal_bias
from lengen import choose_lines, decode, draw_exact, draw_hard, draw_questions, encode
from lengen import encoder_data, enumerate_windows, example, load, make_bias, measure_drift
from lengen import prove, read_checkpoint, seeded, split_numbers, take_step

torch.set_num_threads(1)
INF = float("inf")
parametrize, assert_close = pytest.mark.parametrize, torch.testing.assert_close
HERE = Path(__file__).resolve().parent
QUIET = "--quiet --device=cpu"
SHORT = f"--d-model=16 --batch=8 --steps=4 --lengths=2,3 --samples=5 {QUIET}"
NOPE = f"{SHORT} --method=nope"

def small(**options):
    given = dict(task="addition", dropout=0, d_model=16, n_head=2, n_layer=2, n_encoder=1,
                 batch=8, steps=4, retrain_steps=2, lengths=(2, 3), samples=5)
    return Config(**given | options)

@pytest.fixture(autouse=True)
def seeded_by_the_test():
    torch.manual_seed(0)

@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run a command line in an empty folder -> exit code, output, lines of standard error."""
    monkeypatch.chdir(tmp_path)
    def run(arguments, more=()):
        code = L.main(arguments.split() + list(more))
        out, err = capsys.readouterr()
        return code, out, err.splitlines()
    return run

@pytest.fixture
def one_question(monkeypatch):
    """Questions are drawn one at a time, however many are asked for."""
    monkeypatch.setattr(L, "draw_questions", lambda *given: draw_questions(*given[:3], 1))

@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The four tasks, trained by the defaults -> by task, the folder of the run and its record."""
    runs = {}
    for task in "successor", "addition", "nx1", "parity":
        folder = tmp_path_factory.mktemp("runs") / task
        arguments = f"--task={task} --lengths=6,60 --samples=200 --out={folder}"
        assert L.main(f"{arguments} {QUIET}".split()) == 0
        runs[task] = folder, json.loads((folder / "result.json").read_text())
    return runs

# 1. Tasks: Python's integers ----------------------------------------------------------------------

ALL_TASKS = *TASKS, "subtraction", "remainders", "division"

def answer_of(task, width, a, b=1):
    """An integer, which is negative where there is no question."""
    if task in ("parity", "remainders"):
        modulus, order = (2, -1) if task == "parity" else (3, 1)
        digits = np.base_repr(a, TASKS[task].base).rjust(width, "0")[::order]
        running = [str(total % modulus) for total in accumulate(map(int, digits))]
        return int("".join(running[::order]), TASKS[task].base)
    known = {"successor": a + 1, "addition": a + b, "nx1": a * b, "subtraction": a - b,
             "division": a // b if b else -1, "parity-label": a.bit_count() % 2}
    return known[task]

@pytest.fixture
def more_tasks(monkeypatch):
    """Adds three tasks. One overwrites digits, and returns digit and carry."""
    monkeypatch.setattr(L, "VOCAB", L.VOCAB + "-/")
    monkeypatch.setitem(TASKS, "subtraction", TASKS["addition"]._replace(
        total=lambda carry, a, b: a - b + carry, sign="-"))
    def remainders(carry, a):
        carry += a
        carry %= 3
        a += 1
        return carry, carry
    monkeypatch.setitem(TASKS, "remainders", Task("", remainders, base=4, headroom=0,
                                                  msd_first=True))
    def divide(carry, a, b):
        a, divisor = 10 * carry + a, b.clamp(min=1)
        return torch.where(b == 0, -1, a // divisor), a % divisor
    monkeypatch.setitem(TASKS, "division", Task("", divide, ("number", "digit"), "/",
                                                msd_first=True))

def written(task, width, numbers):
    spec, texts = TASKS[task], []
    for number, kind in zip(numbers, spec.operands):
        digits = width if kind == "number" else 1
        texts.append(np.base_repr(number, spec.base).rjust(digits, "0"))
    answer = np.base_repr(answer_of(task, width, *numbers), spec.base)
    answer = answer.rjust(1 if spec.label else width, "0")
    return f"${spec.sign.join(texts)}&", f"${answer if spec.msd_first else answer[::-1]}&"

def numbers_answered(task, source, target):
    found, spec = [], TASKS[task]
    for question, answer in zip(source, target):
        texts = decode(question)[1:-1].split(spec.sign or None)
        numbers = tuple(int(text, spec.base) for text in texts)
        right = written(task, len(texts[0]), numbers)
        assert (decode(question), decode(answer)) == right
        found.append(numbers)
    return found

def data_of(config, steps, first=True):
    return L.numbers_data(config, split_numbers(0), steps, first)

def batch_of(config, n, numbers):
    return L.numbers_data(config, (numbers, numbers), 1, False).batch(1, n)

@parametrize("draw", [draw_exact, draw_hard])
@parametrize("task", ALL_TASKS)
def test_drawn_questions_are_distinct_and_answered_as_by_pythons_integers(more_tasks, task, draw):
    """Of few all are found. Training numbers keep all digits; exact ones have no zeros in front."""
    config, spec, least = small(task=task), TASKS[task], L.LIMIT - 1000
    n_number = spec.operands.count("number")
    config = config.replace(width=config.widths[0])
    learned = numbers_answered(task, *batch_of(config, 50, torch.arange(least, L.LIMIT)))
    assert len(learned) == 50 and min(min(x[:n_number]) for x in learned) >= least
    for length, n in (1, 500), (6, 100), (200, 10):
        drawn = numbers_answered(task, *draw_questions(config, draw, length, n))
        least = spec.base ** (length - 1) if draw == draw_exact else 0
        assert len(set(drawn)) == len(drawn)
        assert min(min(x[:n_number]) for x in drawn) >= least
        if length == 1:
            every = product(range(spec.base), repeat=len(spec.operands))
            answered = [x for x in every if answer_of(task, 1 + spec.headroom, *x) >= 0]
            assert len(drawn) == sum(min(x[:n_number]) >= least for x in answered)

def test_a_batch_is_full_even_if_half_of_the_questions_have_no_answer(more_tasks):
    config = small(task="subtraction")
    data = data_of(config, 300)
    for step in 1, 300:
        assert len(numbers_answered("subtraction", *data.batch(step, 999))) == 999
    config.spec = config.spec._replace(first=-1)  # 0 - 0 - 1 has none
    with raises(BadInput, match="gave no question; has it headroom"):
        data_of(config, 300).batch(1, 8, torch.tensor([0]))

def test_operands_are_interleaved_for_windows():
    found = example("addition", "123", "748", width=4, align=True)
    assert found == ("$+00172438&", "$1780&")
    found = example("nx1", "123", "7", width=4, align=True)
    assert found == ("$*07172737&", "$1680&")

def test_hard_numbers_are_short_and_tie_and_carry_far():
    first, second = draw_hard(10, 60, 20_000).split(10_000)
    short = (first[:, 40:] == 0) & (first[:, :1] % 9 > 0)  # zeros before other digits
    tied = first[:, 40:] == second[:, 40:]
    carried = (first + second)[:, 20:40] == 9
    for places in short, tied, carried:
        assert places.all(1).any()

@parametrize("question, why", [
    ("logarithm 1", "is not a question"), ("successor", "is not a question"),
    ("subtraction 5 7", "^5 - 7 has no answer"), ("division 7 0", "^7 / 0 has no answer"),
    ("nx1 7 12", "not a base-10 digit"), ("odd 91", "a digit that base 10 does not have")])
def test_what_is_no_question_is_refused(more_tasks, monkeypatch, question, why):
    monkeypatch.setitem(TASKS, "odd", Task("a + 4", lambda carry, a: (a + 4, carry)))
    with raises(BadInput, match=why):
        example(*question.split())

def test_results_of_any_integer_type_are_integers(monkeypatch):
    def total(carry, a):
        return (a + carry).byte() % 10, carry + (a == 9) > 1
    monkeypatch.setitem(TASKS, "next", Task("n + 1", total, first=1))
    assert example("next", "199") == ("$0199&", "$0020&")
    monkeypatch.setitem(TASKS, "nines", Task("9 - a", lambda carry, a: (9 - a, 0)))
    assert example("nines", "108") == ("$0108&", "$1989&")

@parametrize("total", [
    lambda carry, a: a / 2, lambda carry, a: (a, carry, a), lambda carry, a: a[:1],
    lambda carry: carry, lambda carry, a: (a, None)])
def test_a_total_that_is_no_integer_costs_one_line_that_names_the_task(monkeypatch, total):
    monkeypatch.setitem(TASKS, "odd", Task("an odd task", total))
    with raises(BadInput, match="^an odd task: [^\n]*total"):
        draw_questions(small(task="odd"), draw_exact, 3, 5)

def test_numbers_below_two_to_the_twenty_are_parted_seven_to_one_by_the_seed():
    training, held_out = split_numbers(3)
    assert torch.cat([training, held_out]).sort().values.equal(torch.arange(2 ** 20))
    assert len(training) == 7 * len(held_out)
    assert not training.equal(split_numbers(4)[0])

# 2. Positions and biases: plain loops and published numbers ---------------------------------------

def test_rope_multiplies_by_complex_numbers_whose_parts_are_sinusoids():
    """Su et al. 2021, Eq. 12. Also at positions that have few digits left in float32."""
    x = torch.randn(2, 3, 5, 8)
    numbers = torch.view_as_complex(x.unflatten(3, (4, 2)))
    positions = torch.tensor([0, 1, 5, 77, 999_999])
    waves = torch.exp(1j * positions[:, None] * 10000 ** (-torch.arange(0, 8, 2).double() / 8))
    sinusoids = torch.stack([waves.imag, waves.real], 2).flatten(1)
    assert_close(L.sinusoidal(positions, 8), sinusoids.float())
    assert_close(L.rope(x, positions), torch.view_as_real(numbers * waves).flatten(3).float())
    rotated = L.rope(x, torch.arange(5))
    assert_close(METHODS["rope"].scores(None, "self", x, x), rotated @ rotated.mT)

def test_relative_scores_are_the_papers_sums(double):
    q = torch.randn(2, 3, 5, 4)
    k = torch.randn(2, 3, 8, 4)
    table = torch.randn(5, 4)
    offsets = torch.arange(8) - torch.arange(5)[:, None]
    a = table[offsets.clamp(-2, 2) + 2]
    of_keys = torch.einsum("bhid,ijd->bhij", q, a)
    of_queries = torch.einsum("bhjd,ijd->bhij", k, a)
    for method, of_table in ("rpe-k", of_keys), ("rpe-kq", of_keys + of_queries):
        ours = METHODS[method].scores(small(method=method, d_model=8, clip=2), "cross")
        ours.table.data = table
        assert_close(ours(q, k), q @ k.mT + of_table)

def test_alibi_falls_to_both_sides_with_the_published_slopes():
    """Beyond eight heads, by the authors' code. All attention is biased, or the decoder's own."""
    slopes = [2.0 ** -h for h in range(1, 9)]
    slopes += [0.707107, 0.353553, 0.176777, 0.088388, 0.044194, 0.022097]
    distance = (torch.arange(4)[:, None] - torch.arange(6)).abs()
    expected = torch.stack([-slope * distance for slope in slopes])
    assert_close(alibi_bias(14, 4, 6), expected, atol=1e-5, rtol=0)
    ours, causal = alibi_bias(2, 6, 6), causal_bias(6)
    for method, others in ("alibi", ours), ("alibi-decoder", None):
        bias_of = Transformer(small(method=method)).bias_of
        assert torch.equal(bias_of(0, "self", 6, 6), causal + ours)
        for kind in "encoder", "cross":
            bias = bias_of(0, kind, 6, 6)
            assert bias is others or torch.equal(bias, others)

def test_a_row_that_sees_nothing_is_zero_with_finite_gradients():
    """Scores may be those of a method."""
    attention, x = L.MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    bias = torch.randn(3, 5, 5)
    bias[0, 1] = -INF
    weights = attention(x, x, bias)[1]
    weights.square().sum().backward()
    assert weights[:, 0, 1].eq(0).all()
    assert attention.q.weight.grad.isfinite().all()
    attention.scores = lambda q, k: q @ k.mT
    assert_close(attention(x, x, bias)[1], weights)

# 3. Transformer: torch's own layers, and a greedy loop --------------------------------------------

def crossing_lines():
    """In two layers of two heads: an anti-diagonal and a vertical that cross, and a diagonal."""
    lines = []
    for layer, head, direction in product((0, 1), (0, 1), (-1, 0, 1)):
        attention, block = ("self", 0) if direction == 1 else ("cross", head)
        bias = -len(lines) / 20
        lines.append(Line(head, direction, block, -direction, bias, 3.0, layer, attention))
    return lines

def drawn_model(made=small, **options):
    """A model in evaluation, with weights large enough to see a difference."""
    model = Transformer(made(**options)).eval()
    if model.config.method == "abc":
        model.bias.lines = crossing_lines()
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.5)
    return model

def drawn_tokens(*shape):
    return torch.randint(10, shape)

def as_torchs(ours, kind, preset):
    theirs = kind(16, 2, 64, 0.0, batch_first=True, norm_first=preset == "fast")
    theirs.linear1 = ours.feed_forward[0]
    theirs.linear2 = ours.feed_forward[3]
    pairs = [(ours.self_attention, theirs.self_attn)]
    if kind == nn.TransformerDecoderLayer:
        pairs.append((ours.cross_attention, theirs.multihead_attn))
    for our, their in pairs:
        parts = our.q, our.k, our.v
        their.in_proj_weight.data = torch.cat([part.weight for part in parts])
        their.in_proj_bias.data = torch.cat([part.bias for part in parts])
        their.out_proj = our.out
    return theirs

@parametrize("preset", ["fast", "paper"])
@parametrize("kind, n_layer", [("seq2seq", 3), ("universal", 1), ("encoder", 3)])
def test_the_transformer_equals_torchs_layers(double, kind, n_layer, preset):
    """An encoder, too; with other biases in each layer."""
    made = small if kind == "seq2seq" else encoder
    model = drawn_model(made, model=kind, method="vanilla", n_encoder=3, preset=preset, dropout=0)
    assert len(set(model.encoder)) == n_layer
    def bias(layer, kind, T, S):
        return (1 + layer) * alibi_bias(2, T, S)
    source, target = drawn_tokens(3, 7), drawn_tokens(3, 5)
    waves = L.sinusoidal(torch.arange(7), 16)
    mask = bias(0, "", 7, 7).repeat(3, 1, 1)
    memory = model.embedding(source) + waves
    for n, layer in enumerate(model.encoder, 1):
        theirs = as_torchs(layer, nn.TransformerEncoderLayer, preset)
        theirs.activation = F.relu if kind == "seq2seq" else F.gelu
        memory = theirs(memory, n * mask)
    x = model.embedding(target) + waves[:5] if kind == "seq2seq" else memory[:, :5]
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for n, layer in enumerate(model.decoder, 1):
        theirs = as_torchs(layer, nn.TransformerDecoderLayer, preset)
        x = theirs(x, memory, n * mask[:, :5, :5] + causal, n * mask[:, :5])
    model.bias = bias
    expected = model.head(F.layer_norm(x, (16,)))
    assert_close(model(source, target), expected)

@parametrize("method, limit", [("abc", 103)] + [(x, 12) for x in METHODS])
def test_decoding_equals_the_greedy_loop(double, method, limit):
    """Which later targets cannot change. Beyond 100 rows, one side has a bias in pieces."""
    model, source = drawn_model(method=method, dropout=0.5), drawn_tokens(3, 19)
    expected = torch.full((3, 1), L.VOCAB.index("$"))
    for _ in range(limit):
        token = model(source, expected)[:, -1:].argmax(2)
        expected = torch.cat([expected, token], 1)
    assert len(expected.unique()) > 2  # not one token again and again
    assert torch.equal(L.generate(model.train(), source, limit), expected)

def test_windows_are_a_place_and_those_before_it(monkeypatch):
    monkeypatch.setitem(METHODS, "wide", METHODS["window-nope"]._replace(window=2))
    for method, expected in ("window", ["9&", "29", "12"]), ("wide", ["9&", "29&", "129"]):
        bias = make_bias(small(task="successor", method=method), ())
        rows = bias(0, "cross", 3, 6)[0] == 0
        shown = ["".join(compress("$0129&", row)) for row in rows.tolist()]
        assert shown == expected

# 4. Attention Bias Calibration: the papers' formulas as loops over every element ------------------

def offsets_of(direction, height, width):
    """The line of each element of a matrix."""
    i, j = np.indices((height, width))
    return {1: j - i, 0: j, -1: width - 1 - j - i}[direction]

def drawn_bias(lines, M, blocks):
    bias = torch.full((2, M, sum(blocks)), -INF)
    for line in lines:
        block = bias[line.head].split(blocks, 1)[line.block]
        on_line = torch.tensor(offsets_of(line.direction, *block.shape) == line.offset)
        block[on_line] = block[on_line].clamp(min=line.bias)
    return bias

def literal_lines(attention, kappa, groups=((1,), (0,), (-1,)), total=False):
    """The lines of attention (H, m, n), by v1, Eqs. 1 and 2."""
    lines = []
    for (h, weights), group in product(enumerate(attention.numpy()), groups):
        d = {}
        for way in group:
            offsets = offsets_of(way, *weights.shape)
            for offset in np.unique(offsets):
                elements = weights[offsets == offset]
                d[way, offset] = elements.sum() if total else elements.mean()
        values = list(d.values())
        for (way, offset), value in d.items():
            z = (value - np.mean(values)) / np.std(values)
            if z > kappa:
                lines.append(Line(h, way, 0, offset, value - max(values), z))
    return lines

@parametrize("rules, of_self, of_cross", [
    ("v1", dict(kappa=4), dict(kappa=4)),
    ("v2", dict(kappa=0.87, groups=((1, 0, -1),)), dict(kappa=4.5, groups=((1, 0, -1),))),
    ("code", dict(kappa=0.87, groups=((1,),), total=True),
     dict(kappa=4.5, groups=((-1,),), total=True))])
def test_lines_are_those_of_the_papers(double, rules, of_self, of_cross):
    """In a run, those of the last layer's first 8 rows. Rows without a line see every key."""
    own = torch.rand(2, 2, 62, 62)
    cross = torch.rand(2, 2, 62, 124)
    own[1, 0, range(8), range(8)] += 1
    cross[1, 1, range(8), range(120, 112, -1)] += 1
    config = small(rules=rules)
    bias = L.CalibratedBias(config, list(L.calibrate(config, (own, cross))))
    for kind, attention, rule, N in ("self", own, of_self, 12), ("cross", cross, of_cross, 24):
        expected = drawn_bias(literal_lines(attention[1, :, :8], **rule), 12, [N])
        if kind == "self":
            expected += causal_bias(12)
        expected[expected.isneginf().all(2)] = 0
        for layer in 0, 1:
            assert_close(bias(layer, kind, 12, N), expected, atol=0.005, rtol=0)
    assert_close(abc_bias(cross[1, :, :8], 12, 24, rules, **of_cross), expected)

def test_uniform_attention_opens_the_first_key_alone():
    for n in 23, 3:  # of three columns, no diagonal counts
        bias = abc_bias(torch.full((2, 11, n), 1 / n), 20, 30)
        assert bias[:, :, 0].isfinite().all()
        assert bias.isfinite().sum() == 40

def test_sections_can_be_copied_as_they_stand():
    """Into an empty file, after the imports that their first lines name."""
    text = Path(L.__file__).read_text()
    attention = text[text.index("# 2. "):text.index("# 3. ")]
    lines = text[text.index("# 5. "):text.index("# What follows calibrates")]
    copied = dict(__name__="copied", torch=torch, math=math, nn=torch.nn, F=F)
    exec(attention, copied)
    x, table = torch.randn(2, 4, 8, 6), torch.randn(9, 6)
    copied["MultiHeadAttention"](6, 2)(x[0], x[1], copied["alibi_bias"](2, 8, 8))
    assert_close(copied["rope"](x), L.rope(x))
    assert_close(copied["relative_scores"](x, table, x), L.relative_scores(x, table, x))
    assert_close(copied["window_bias"](1, 7, 7) + copied["causal_bias"](7), L.window_bias(1, 7, 7))
    copied = dict(__name__="copied", torch=torch, math=math, NamedTuple=NamedTuple)
    exec(lines, copied)
    averaged = torch.rand(2, 5, 7).softmax(2)
    for rules in L.RULES:
        expected = abc_bias(averaged, 8, 9, rules, kappa=0.1)
        assert_close(copied["abc_bias"](averaged, 8, 9, rules, kappa=0.1), expected)
    with raises(ValueError):
        copied["abc_bias"](averaged, 8, 9, "v9")

def test_what_cannot_be_calibrated_is_refused():
    attention = torch.rand(2, 3, 7)
    for bad in attention[0], attention / 0, attention.long():
        with raises(ValueError, match="attention is"):
            abc_bias(bad, 5, 11)
    for given, why in ((dict(blocks=[(3, 5), (4, 5)]), "blocks add up to 7 and 11"),
                       (dict(blocks=[(0, 1), (7, 10)]), "blocks add up to 7 and 11"),
                       (dict(rules="v9"), "rules: 'v9' is none of")):
        with raises(ValueError, match=why):
            abc_bias(attention, 5, 11, **given)
    own, cross = torch.rand(1, 2, 8, 8), torch.rand(1, 2, 8, 19)
    for maps, why in (((own, cross[..., 1:]), "no 18 columns of cross-attention"),
                      ((own, cross / 0), "of finite floats"), ((own[:, :1], cross), "--n-head"),
                      ((own[..., 1:, 1:], cross), "an answer has 8 rows or more")):
        with raises(BadInput, match=why):
            list(L.calibrate(one_layer("addition"), maps))
    with raises(BadInput, match="no examples to average"):
        average_attention(None, torch.zeros(0, 9), torch.zeros(0, 9))

@parametrize("T", [20, 101, 130])
@parametrize("task", ["successor", "addition", "nx1"])
def test_biases_of_a_run_are_its_lines_at_every_length(double, task, T):
    """Rows without a line see the first key alone. Beyond 100 rows there are pieces."""
    question, _ = example(task, *"11"[:len(TASKS[task].operands)], width=T - 1)
    blocks = [len(part) for part in re.findall(r"[$+]\d+|.", question)]
    lines = crossing_lines()[1:]
    bias = L.CalibratedBias(small(task=task), lines)
    assert bias(0, "encoder", T, T) is None
    for kind, layer in product(("self", "cross"), (0, 1, 2)):  # the last has no line
        sizes = [T] if kind == "self" else blocks
        chosen = [line for line in lines if (line.attention, line.layer) == (kind, layer)]
        expected = drawn_bias(chosen, T, sizes)
        if kind == "self":
            expected += causal_bias(T)
        expected[:, :, 0][expected.isneginf().all(2)] = 0
        joined = torch.full_like(expected, -INF)
        for rows, keys, piece in bias.in_pieces(layer, kind, T, sum(sizes)):
            joined[:, rows[:, None], keys] = piece
        assert torch.equal(joined, expected)
        assert torch.equal(bias(layer, kind, T, sum(sizes)), expected)

def test_layers_and_numbers_have_lines_of_their_own(monkeypatch):
    """They run as the task's places do. A vertical inside a number means nothing. Attention is of
    `$0123456789+0123456789&`."""
    own = torch.full((2, 2, 11, 11), 0.01)
    cross = torch.full((2, 2, 11, 23), 0.01)
    own[0, 0].diagonal(-1).fill_(1)
    own[0, 1, 8:].fill_diagonal_(1)  # in rows that training never fills
    cross[0, 1, range(9), range(19, 10, -1)] = 1  # in the second number
    cross[1, 1, :, [5, 11]] = 1  # inside the first number; at the sign of the second
    expected = [(0, 0, "self", 1, 0, -1), (0, 1, "cross", -1, 1, 2), (1, 1, "cross", 0, 1, 0)]
    lines = L.calibrate(small(width=10), (own, cross))
    assert [(line.layer, line.head) + line.path for line in lines] == expected
    monkeypatch.setitem(TASKS, "addition", TASKS["addition"]._replace(msd_first=True))
    cross[0, 0, range(9), range(2, 11)] = 1  # it runs as the places do now
    found = list(L.calibrate(small(width=10), (own, cross)))
    assert (0, 0, "cross", 1, 0, 2) in [(line.layer, line.head) + line.path for line in found]
    assert not any(line.direction == -1 for line in found)

@parametrize("rules", L.RULES)
def test_no_row_of_a_long_number_sees_later_tokens(rules):
    """Rows without a line open all columns by the sources' rules."""
    model = drawn_model(method="abc", rules=rules)
    model.bias.lines = [Line(0, 0, 0, 0, 0.0, 1.0)]
    source, target = drawn_tokens(1, 240), drawn_tokens(1, 120)
    changed = target.clone()
    changed[:, 100:] = (changed[:, 100:] + 1) % 10
    found = [model(source, tokens)[:, :100] for tokens in (target, changed)]
    assert_close(found[0], found[1])

def test_lines_of_deep_models_hide_digits(double):
    """By v2's rules, models of six layers got lines of which no row up to `row` sees two questions
    apart, whatever the weights, although their answers differ there. Another line would help."""
    for record in (HERE / "results/records/hidden.jsonl").read_text().splitlines():
        r = json.loads(record)
        task, row = r["config"]["task"], r["row"]
        model = drawn_model(task=task, method="abc", rules="v2", n_layer=6, n_head=8, width=61)
        texts = [example(task, *numbers, width=61) for numbers in r["questions"]]
        source = torch.stack([encode(question) for question, _ in texts])
        target = torch.stack([encode(answer) for _, answer in texts])
        assert (target[0] == target[1]).tolist().index(False) == row + 1
        column = (source[0] != source[1]).tolist().index(True)
        for lines in r["lines"], r["lines"] + [[0, 0, column, 0.0]]:
            model.bias.lines = [Line(head, direction, 0, offset, bias, 0.0, layer, "cross")
                                for head, direction, offset, bias in lines for layer in range(6)]
            first, second = model(source, target[:, :-1])[:, :row + 1]
            assert torch.allclose(first, second) == (len(lines) == len(r["lines"]))

def test_attention_is_averaged_over_right_examples_alone(double):
    model, source = drawn_model(dropout=0.5), drawn_tokens(7, 19)
    target, maps = L.generate(model, source, 9), []
    target[2:5, 3] += 1
    for n in 0, 1, 5, 6:
        model(source[n, None], target[n, None, :-1])
        maps += [[layer.self_attention.weights[0], layer.cross_attention.weights[0]]
                 for layer in model.decoder]
    found = average_attention(model.train(), source, target)
    for average, weights in zip(found, zip(*maps)):
        assert_close(average, torch.stack([sum(weights[n::2]) / 4 for n in (0, 1)]))
    target[1:, 0] += 1
    with raises(RunFailed, match="fewer than 1% of examples"):  # one of 103
        average_attention(model, source[[0] + [1] * 102], target[[0] + [1] * 102])

# 5. Proof: what a row sees, told by the logits of random weights ----------------------------------

def one_layer(task="successor", method="abc", **options):
    given = dict(task=task, method=method, n_layer=1, n_encoder=0)
    return small(**given | options)

def windows_of(config, lines):
    return enumerate_windows(config, make_bias(config, lines))

# Lines of two places, which decide a successor, and one that is not needed.
DECIDING = [Line(head, -1, 0, -head, -0.1, 3.0) for head in (0, 1)]
STRAY = Line(0, -1, 0, 1, -0.2, 9.0)

def reader(config, lines):
    """A model with random weights. Its logits, in float64, tell every key that a row sees."""
    model = drawn_model(**config.values).double()
    for name, weight in model.named_parameters():
        if ".q." in name or ".k." in name:
            weight.data *= 0.1
    if config.scheme.calibrated:
        model.bias.lines = lines
    return model

def tokens_to_write(model, questions):
    """-> of each view, told by its logits, the tokens that rows which have it must write."""
    found, groups = defaultdict(set), defaultdict(list)
    for source, target, *_ in questions:
        groups[target.shape[1]].append((source, target))
    for group in groups.values():
        source, target = map(torch.cat, zip(*group))
        logits = model(source, target[:, :-1]).detach().round(decimals=6).flatten(0, 1)
        for view, token in zip(logits.numpy(), target[:, 1:].flatten().tolist()):
            found[view.tobytes()].add(token)
    return found

def assert_windows(model, windows, tokens):
    """They are the views that logits tell apart, or two of their questions clash in these."""
    if windows.clash:
        words = windows.why.split()
        assert words[0:3:2] == [decode(source[0]) for source, _ in windows.clash]
        named = set(encode(words[-3] + words[-1]).tolist())
        assert len(named) == 2
        assert any(named <= needed for needed in tokens_to_write(model, windows.clash).values())
    else:
        assert len(windows.seen) == len(tokens)
        assert {len(needed) for needed in tokens.values()} <= {1}

def own_bias(config, layer, attention, T, S):
    """It opens two places of each number, a third to the first three rows, and single digits."""
    operands = config.spec.operands
    last = S - 2 - 2 * operands.count("digit")  # column of the last digit of the last number
    bias = torch.full((2, T, S), -INF)
    for row, head, block in product(range(T), (0, 1), range(operands.count("number"))):
        column = last - block * T - row + head
        if attention == "self":
            column = row
        if column > 0:
            bias[head, row, column] = -0.1 * block
    if attention == "cross":
        for row in range(min(3, T - 2)):
            bias[0, row, last - 1 - row] = 0
        bias[1, :, last + 2::2] = 0
    return bias

def drawn_task(draw, scheme, number):
    """A task that is a table of any carries and digits, some without an answer."""
    operands = ("number",) * draw.randint(1, 2)
    base, n_carry = draw.randint(2, 4 - len(operands)), draw.randint(1, 3)
    operands += ("digit",) * draw.randint(0, 2)
    table = torch.randint(base * n_carry, [n_carry] + [base] * len(operands))
    if number % 5 == 0:  # carries take turns
        for carry in range(n_carry):
            table[carry] = (carry + 1) % n_carry * base + carry % base
    digits = table % base
    digits[torch.rand(table.shape) < 0.2 * (number % 8 > 3)] = -1
    return Task("", lambda *given: (digits[given], table[given] // base), operands, "+", base,
                headroom=draw.randint(0, 2), msd_first=scheme.calibrated and draw.random() < 0.5)

def test_windows_of_random_tasks_are_those_that_longer_questions_show(monkeypatch):
    """100 of each width that is enumerated and of the next seven, or all, in both orders."""
    monkeypatch.setattr(L, "LIMIT", 4)
    schemes = [METHODS["window-nope"]._replace(window=2), METHODS["window-cyclic"],
               METHODS["abc"], METHODS["abc"]._replace(position=L.sinusoids, period=2),
               L.Method("", bias=own_bias, window=1)]
    checked = Counter()
    for number in range(60):
        draw, scheme = random.Random(number), schemes[number % 5]
        spec = drawn_task(draw, scheme, number)
        monkeypatch.setitem(TASKS, "random", spec)
        monkeypatch.setitem(METHODS, "drawn", scheme._replace(n_width=1))
        config, n_number = one_layer("random", "drawn"), spec.operands.count("number")
        config.align = scheme.bias == L.banded and config.align
        lines = [Line(0, 1, 0, -draw.randint(0, 2), 0.0, 1.0, attention="self"),
                 Line(1, 0, draw.randint(0, 2 * len(spec.operands) - n_number), 0, -0.2, 1.0)]
        for head, block in product((0, 1), range(n_number)):
            offset = draw.randint(-2, 2) + spec.msd_first
            lines.append(Line(head, 2 * spec.msd_first - 1, block, offset, -0.1 * head, 1.0))
        model, bias = reader(config, lines), make_bias(config, lines)
        questions = list(L.short_questions(config, bias))
        zeros = sum(source[:, 1:1 + spec.headroom].sum() for source, *_ in questions)
        assert config.align or zeros == 0
        with contextlib.suppress(BadInput):  # no answer
            short = tokens_to_write(model, questions)
            assert_windows(model, L.collect_windows(config, bias, questions), short)
            widest = max([target.shape[1] - 2 for _, target, _ in questions], default=0)
            for width in range(config.widths[0], widest + 8):
                length = width - spec.headroom
                source, target = draw_questions(config, draw_hard, length, 100)
                pool = [(source, target, range(width + 1))]
                tokens = tokens_to_write(model, pool)
                assert all(needed <= short[view] for view, needed in tokens.items())
                assert_windows(model, L.collect_windows(config, bias, pool), tokens)
            checked[spec.msd_first, number % 5] += 1
    assert min(checked.values()) > 3 and len(checked) == 7

@parametrize("case, why", [*product(
    ["half as far", "from the left", "in one row", "at odd widths", "far away", "at one width",
     "at a width that is not enumerated"],
    ["no proof: keys are open at no fixed distance from the row, or farther than 20 places"]),
    ("none", "look the same"), ("in pieces", "no proof: the method gives its bias in pieces")])
def test_a_bias_that_shows_no_fixed_places_is_not_enumerated(monkeypatch, case, why):
    """It opens the place of the row and one more key."""
    def own(config, layer, attention, T, S):
        bias = torch.full((1, T, S), -INF)
        for row in range(T if attention == "cross" else 0):
            place = S - 2 - row
            more = {"half as far": S - 2 - row // 2, "from the left": 1 + row,
                    "in one row": place + (row == 22), "at odd widths": place + T % 2,
                    "far away": max(0, S - 40), "at one width": place + (T == 33),
                    "at a width that is not enumerated": max(0, place - 12 + (T == 20))}
            bias[0, row, [place, more.get(case, place)]] = 0
        return [bias] if case == "in pieces" else bias
    monkeypatch.setitem(METHODS, "own", L.Method("", bias=own, window=1))
    config = one_layer(method="own")
    assert why in enumerate_windows(config, make_bias(config, ())).why

def test_what_follows_no_answer_does_not_count(monkeypatch):
    """Here a carry of 5, with which 9 would be 14. Other negative digits are none."""
    def total(carry, a):
        return torch.where(a == 7, -1, a + carry), torch.where(a == 7, 5, 0)
    monkeypatch.setitem(TASKS, "odd", Task("a copy without 7", total))
    source, _ = draw_questions(one_layer("odd"), draw_exact, 3, 50)
    assert len(source) == 50 and not (source == 7).any()
    with raises(BadInput, match="odd: an answer has a digit that base 10 does not have"):
        L.follow_carries(Task("odd", lambda carry, a: (a - 3, 0)), ())

def test_shares_that_rounding_hides_are_refused():
    """A hand-set model can attend to a key that has a bias of -40."""
    for bias in -40.0, -13.0:
        lines = DECIDING + [Line(0, -1, 0, 3, bias, 1.0)]
        why = windows_of(one_layer(), lines).why
        assert why == ("no proof: a bias leaves an open key less than 1e-06 of the attention"
                       if bias == -40 else "")
    for path in (1, 0, 0), (0, 0, 2):  # as the places do not run; in them
        line = Line(0, *path, 0.0, 1.0)
        assert "at no fixed distance" in windows_of(one_layer(), DECIDING + [line]).why

def test_lines_are_dealt_to_heads():
    """The strongest first, the first to two; those of self-attention apart."""
    lines = [Line(1, -1, block, offset, -0.3, 4.0 - offset - 2 * block)
             for block, offset in product((0, 1), (0, -1))]
    lines += [Line(3, 0, 2, 0, -0.2, 9.0), lines[0]._replace(head=0, z=1.0),
              Line(3, 1, 0, 0, -0.2, 2.0, attention="self")]
    dealt = {line.path[1:]: (line.head, line.bias) for line in L.deal_lines(lines, 2)}
    assert dealt == {(0, 2, 0): (0, 0.0), (-1, 0, -1): (1, 0.0), (-1, 0, 0): (0, -1.1),
                     (-1, 1, -1): (1, -1.1), (-1, 1, 0): (0, -2.2), (1, 0, 0): (0, 0.0)}

@parametrize("sign, clash", [(1, False), (-1, True)])
def test_numbers_share_a_head_if_windows_are_too_many(monkeypatch, sign, clash):
    """In a + b + c; in a + b - c the order of numbers matters."""
    monkeypatch.setattr(L, "MOST_PARTIAL", 2 ** 15)
    monkeypatch.setitem(TASKS, "three", Task(
        "", lambda carry, a, b, c: a + b + sign * c + carry, ("number",) * 3, "+", 4))
    lines = [Line(head, -1, block, -head, 0.0, 1.0 + block)
             for block, head in product(range(3), (0, 1))]
    lines = L.deal_lines(lines, 4)
    found, windows = L.share_heads(one_layer("three", n_head=4), lines)
    assert ("too many" in windows.why) == clash
    assert (found == lines) == clash
    assert clash or len(windows.seen) == 1223

def test_carries_that_settle_late_are_followed_until_then():
    def fall(carry, a):
        return (a + carry) % 10 + 10 * torch.where(carry == 0, a, carry - 1)
    # 9 to 0, then all carries; 1 to 9 can end. If zeros come first, 9 has fallen to 8, and all end.
    for first, msd_first, places in (9, False, 10), (0, False, 8), (9, True, 9), (0, True, 1):
        spec = Task("carries that fall", fall, first=first, msd_first=msd_first)
        assert L.places_to_settle(spec, L.follow_carries(spec, ())) == (places, 1)

@parametrize("after, offsets, why", [
    (lambda carry: (carry + 1) % 101, 1,
     "the carries that a place can get do not repeat within 100 places"),
    (lambda carry: carry + 1, 1, "more than 1,000 carries can be handed on"),
    (lambda carry: 0 * carry, 4, "too many windows to list, over 9,999 cases; tested only"),
    (lambda carry: 0 * carry, 2, "too many windows, over 1,000; tested only")])
def test_what_cannot_be_enumerated_is_not_proved(monkeypatch, after, offsets, why):
    monkeypatch.setattr(L, "MOST_PARTIAL", 9999)
    monkeypatch.setattr(L, "MOST_WINDOWS", 1000)
    monkeypatch.setitem(TASKS, "odd", Task("n", lambda carry, a: a + 10 * after(carry)))
    lines = [Line(0, -1, 0, offset, -0.1 * offset, 3.0) for offset in range(offsets)]
    windows = windows_of(one_layer("odd"), lines)
    assert prove(None, windows) == dict(proved=False, why=f"no proof: {why}")

@parametrize("options, why", [
    (dict(task="parity-label"), "a label"), (dict(n_layer=2), "several layers"),
    (dict(n_encoder=1), "an encoder"), (dict(rules="v1"), "the sources' rules"),
    (dict(method="rope"), "positions, keys open at any distance")])
def test_labels_more_layers_positions_and_the_sources_rules_have_no_proof(options, why):
    assert windows_of(one_layer(**options), ()).why == f"no proof attempted: this run has {why}"

def planted(strengths):
    """Attention of n + 1 in which anti-diagonals stand out, by offset."""
    mirrored = torch.full((1, 2, 8, 8), 0.1)
    for offset, strength in strengths.items():
        mirrored[0, 0].diagonal(offset).add_(strength)
    cross = F.pad(mirrored.flip(3), (0, 1), value=0.1)
    return torch.eye(8).expand(1, 2, 8, 8), cross

def test_the_fewest_lines_that_determine_the_answer_are_kept_or_a_run_fails(
        one_question, monkeypatch):
    """What stands out most is not needed, the weakest is. A small pool misleads at first."""
    # Kappa is below (0.4 - 0.3) / 0.6, as mu is 0.3 and sigma * sqrt(7 - 1) is 0.6; then one line
    # lifts the mean above the other.
    for strengths, expected in ({1: 0.6, 0: 0.503, -1: 0.3}, 0.15), ({0: 5.0, -1: 0.02}, -0.2):
        kappa, lines, windows = choose_lines(one_layer(), planted(strengths))
        assert kappa == expected and len(windows.seen) == 212
        assert {line.path for line in lines} == {
            ("cross", -1, 0, 0), ("cross", -1, 0, -1), ("self", 1, 0, 0)}  # of a row's own token
        assert all(line.bias == round(line.bias, 2) for line in lines)
    monkeypatch.setattr(L, "KAPPAS", L.KAPPAS[:5])
    with raises(RunFailed, match=r"the answer: \S+ and \S+ look the same to a row"):
        choose_lines(one_layer(), planted(strengths))

@parametrize("rows, margin", [
    ([[5.0, 3.0, 4.0], [3.0, 0.0, 0.0]], 1.0),  # the least lead over all others
    ([[0.51, 0.0], [0.49, 0.0], [0.1, 0.0]], 0.49),  # the first in doubt ends it
    ([[900.0, 899.0]], 0.6),  # less what a thousandth of the largest logit has above 0.5
    ([[9.0, 0.0, -INF]], 9.0),  # a token that is ruled out
    ([], None), ([[9.0, math.nan]], None)])
def test_the_margin_is_the_least_lead_of_a_right_token(rows, margin):
    """Token 0. Proved; what is nothing, no number (None), beyond precision or drifting is not."""
    question = encode("$12&")[None], encode("$0")[None], [0]
    for drift in 0.04, 0.06:
        model = nn.Module()
        model.forward = Mock(side_effect=torch.tensor(rows)[:, None, None])
        with patch.object(L, "measure_drift", return_value=drift):
            proof = prove(model, L.Windows(None, None, {}, [question] * len(rows)))
        assert margin is None or proof["margin"] == approx(margin, abs=1e-3)
        assert proof["proved"] == (margin is not None and margin >= 0.5 and drift < 0.05)

@pytest.fixture
def proved(trained):
    """-> a model that is proved, its configuration and windows, and their logits."""
    model, config, _ = load(trained["successor"][0])
    windows = enumerate_windows(config, model.bias)
    logits = [model(source, target[:, :-1])[:, row].detach()
              for source, target, [row] in windows.questions]
    return model, config, windows, torch.cat(logits)

def test_a_proof_says_what_stands_in_its_way(proved):
    """Two questions that no weights tell apart; none that can be drawn; a key that is all but
    closed. What is printed is JSON, also if a row shows a window that was not listed."""
    model, config, windows, _ = proved
    clash = windows_of(config, model.bias.lines[:1])
    assert prove(model, clash)["why"].startswith("refuted for any weights: $")
    for error in BadInput("none"), RunFailed("none"):
        with patch.object(L, "draw_questions", side_effect=error):
            assert prove(model, windows)["why"].startswith("not proved: none; more steps")
    windows.seen.popitem()
    proof = json.loads(json.dumps(prove(model, windows), allow_nan=False))
    assert proof["drift"] is None and "windows that were not listed" in proof["why"]

def test_tests_that_fail_end_a_proof(trained):
    """A model that is right on windows and wrong on numbers has been proved by wrong code."""
    wrong = dict(rows=[dict(digits=60, set="random", n=9, correct=7, places=[])], seconds=1)
    run = Run(*read_checkpoint(trained["parity"][0]))
    with patch.object(L, "evaluate", return_value=wrong):
        proof = L.execute(run)["proof"]
    assert proof["why"] == "right on all windows, but wrong in 2 tests"
    assert not proof["proved"] and not run.parts["proof"]["proved"]

class Learned(nn.Embedding):
    """A bias inside a window that is learned, as README lets methods have: of END."""
    def __init__(self, config):
        super().__init__(2, 1)

    def forward(self, layer, attention, T, S):
        is_end = (torch.arange(S) == S - 1).long()
        return L.window_bias(1, T, S, attention == "cross") + super().forward(is_end)[:, 0]

def test_windows_of_a_learned_bias_are_those_of_the_trained_model(monkeypatch):
    monkeypatch.setitem(METHODS, "learned", L.Method("", bias=Learned, window=1))
    config = one_layer("parity", "learned")
    model = Transformer(config)
    before = enumerate_windows(config, model.bias_of)
    assert "is wrong or in doubt" in prove(model, before)["why"]
    nn.init.constant_(model.bias.weight[1], -40)  # training could do so
    assert "less than 1e-06 of the attention" in prove(model, before)["why"]

def test_a_proof_looks_at_longer_questions(trained, proved):
    """Other pieces, weights or NaN, or another bias at odd lengths are seen."""
    model, _, windows, logits = proved
    assert prove(model, windows).items() <= trained["successor"][1]["proof"].items()
    pieces, forward = model.bias.in_pieces, model.bias.forward
    def shifted(*given):
        for rows, keys, bias in pieces(*given):
            yield rows, keys, bias.roll(1, 2)
    def uneven(layer, kind, T, S):
        return forward(layer, kind, T, S).roll(T % 2, 2)
    for name, changed, lengths in (
            ("in_pieces", shifted, (20, 60)), ("forward", uneven, (20, 60, 1000))):
        with patch.object(model.bias, name, changed):
            assert measure_drift(model, windows, logits) == INF
            assert measure_drift(model, windows, logits, lengths) < 1e-5
    changed = {view: (-token, *rest) for view, (token, *rest) in windows.seen.items()}
    assert measure_drift(model, windows._replace(seen=changed), logits) == INF
    for factor in 1.01, math.nan:
        model.embedding.weight.data *= factor
        assert measure_drift(model, windows, logits) > 0.05

# 6. Training and evaluation: torch's optimizers, a step that is replayed, killed runs -------------

def new_run(kind, **options):
    """A small run of a kind of model -> the run, its new model, its training data for 50 steps."""
    if kind == "pairs":  # whose data are made by `learn_pairs` alone
        config = Config("consecutive", d_model=8, d_head=4, batch=8, steps=50, **options)
        with patch.object(L, "train") as train:
            L.learn_pairs(Run(config, {}))
        run, model, _, data = train.call_args.args
        return run, model, data
    if kind == "seq2seq":
        config = small(**dict(method="nope") | options)
        data = data_of(config, 50)
    else:
        config = encoder(model=kind, batch=8, **options)
        data = encoder_data(config, 20, 0, 50)
    return Run(config, {}), Transformer(config), data

@parametrize("kind, options, beta, decay", [
    ("pairs", {}, 0.999, 0.0), ("seq2seq", dict(preset="paper"), 0.98, 0.0),
    ("seq2seq", {}, 0.98, 0.0), ("encoder", {}, 0.999, 0.01)])
def test_training_equals_torchs_own(double, monkeypatch, kind, options, beta, decay):
    """Muon moves matrices of layers but no tables; then Adam all else, at a quarter of the rate."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # torch's Muon is coarse
    run, model, data = new_run(kind, lr=0.002, **options)
    model.unused = nn.Parameter(torch.zeros(3))
    for weight in model.parameters():
        weight.data *= 1.5  # so that gradients are clipped
    muon_moves = kind != "pairs" and not options
    batches = [data.batch(step) for step in range(51)]
    data.batch = batches.__getitem__
    theirs, matrices, others = copy.deepcopy(model), [], []
    for name, weight in theirs.named_parameters():
        matrix = "coder" in name and weight.dim() == 2 and "table" not in name
        (matrices if matrix and muon_moves else others).append(weight)
    adam = torch.optim.AdamW(others, betas=(0.9, beta), weight_decay=decay)
    optimizers = [(0.002, adam)]
    if matrices:
        muon = torch.optim.Muon(matrices, weight_decay=0, adjust_lr_fn="match_rms_adamw")
        optimizers = [(0.0005, adam), (0.002, muon)]
    for step in range(1, 51):
        source, target = batches[step]
        logits = theirs(source, target[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        theirs.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for peak, optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = peak * data.rate(step)
            optimizer.step()
    L.train(run, model, "model", data)
    [curve] = run.parts["model"]["curve"]
    assert curve[:2] == [50, approx(loss.item())]
    for found, expected in zip(model.parameters(), theirs.parameters()):
        assert_close(found, expected)

def test_weights_that_are_frozen_later_stay():
    """All but matrices are frozen from the start, the decoder's after a step."""
    run, model, data = new_run("seq2seq")
    for weight in Optimizer(model, run.config).others:
        weight.requires_grad_(False)
    optimizer, batch = Optimizer(model, run.config), data.batch(1)
    take_step(model, optimizer, *batch)
    model.decoder.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    take_step(model, optimizer, *batch)
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    matrices = [name for name, x in model.encoder.named_parameters() if x.dim() == 2]
    assert moved == {f"encoder.{name}" for name in matrices}

@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_graphed_steps_have_the_losses_of_eager_ones():
    config, losses = Config("parity", method="window-cyclic", dropout=0.1), []
    data = data_of(config, 60)
    for step in take_step, L.graphed_step:
        with seeded("model"):
            model = Transformer(config).to("cuda")
        optimizer = Optimizer(model, config)
        losses.append([])
        for n in range(1, 61):
            optimizer.share.fill_(data.rate(n))
            with seeded("step", n):
                source, target = data.batch(n)
                losses[-1].append(step(model, optimizer, source, target).item())
    eager, graphed = losses
    assert graphed == approx(eager, rel=1e-5)
    assert graphed[-1] < 0.5 * graphed[0]

class Devices(torch.utils._python_dispatch.TorchDispatchMode):
    found = frozenset()
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **kwargs or {})
        tensors = filter(torch.is_tensor, tree_leaves((args, made)))
        self.found |= {x.device.type for x in tensors}
        return made

@parametrize("kind, options", [("seq2seq", dict(method=x, width=8)) for x in METHODS] + [
    ("pairs", {}), ("universal", dict(method="rope"))])
def test_a_step_stays_on_its_device_and_can_be_recorded_and_replayed(kind, options):
    """As a CUDA graph. On the meta device no value can be read, and other devices show."""
    run, model, data = new_run(kind, **options)
    if run.config.method == "abc":
        model.bias.lines = crossing_lines()
    twin, far = copy.deepcopy(model), copy.deepcopy(model).to("meta")
    ours, other, meta = (Optimizer(x, run.config) for x in (model, twin, far))
    source, target = data.batch(0)
    on_meta = source.to("meta"), target.to("meta")
    with Devices() as devices:
        take_step(far, meta, *on_meta)
    assert devices.found == {"meta"}
    replay = make_fx(lambda s, t: take_step(model, ours, s, t))(source, target)
    take_step(twin, other, source, target)
    for step in range(1, 5):
        source, target = data.batch(step)
        twin.double().float()  # moves its weights
        for optimizer in ours, other:
            optimizer.share.fill_(1 / step)
        with torch.no_grad():
            loss = replay(source, target)
        assert torch.equal(loss, take_step(twin, other, source, target))

def test_a_process_trains_without_torchs_compiler_and_without_its_file(tmp_path):
    """Records name the file that was imported, even if it is deleted since."""
    source = Path(L.__file__).read_bytes()
    Path(tmp_path, "lengen.py").write_bytes(source)
    code = """if 1:
        import lengen, os, sys
        os.remove("lengen.py")
        lengen.main("--method nope --steps 2 --lengths 3 --json --quiet".split())
        print(int("torch._dynamo" in sys.modules))"""
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path)
    record, compiler = map(json.loads, out.splitlines())
    assert record["source"] == L.hashlib.sha256(source).hexdigest() and not compiler

def test_draws_depend_on_names_alone(monkeypatch):
    """Neither other GPUs nor other test sets matter, nor the file's own generator."""
    monkeypatch.setattr(torch.cuda, "device_count", Mock(return_value=2))
    draws, hard, state = [], [], L.RANDOM.getstate()
    for names in "0a1", "0a2", "0b1", "1a1", "0a1":
        with seeded(*names):
            draws.append(torch.rand(1).item())
            hard.append(L.draw_tests(small(lengths=(60,), samples=9), 60)["hard"][0])
    assert len(set(draws)) == 4 and draws[0] == draws[4]
    assert torch.equal(hard[0], hard[1])
    assert L.RANDOM.getstate() == state

def test_each_process_writes_a_file_of_its_own(tmp_path):
    with patch.object(Path, "replace"), patch.object(os, "getpid", side_effect=(1, 2)):
        for _ in range(2):
            Run(None, {}, tmp_path).write("checkpoint.pt", b"")
    assert len(os.listdir(tmp_path)) == 2

def numbers_of(source):
    return [int(decode(row)[1:-1]) for row in source]

def abc_run(trained, names, more={}, **options):
    """-> the run, with these parts of the trained one and more, and the proof in which it ends."""
    config, parts = read_checkpoint(trained["successor"][0])
    given = {name: parts[name] for name in names + ["example"]} | more
    run, state = Run(config.replace(**options), given), torch.get_rng_state()
    proof = L.learn_abc(run)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's, as without the call
    return run, proof

def test_rates_rise_then_fall():
    numbers, encoders = small(task="successor"), encoder_data(encoder(), 1, 0, 400)
    for data, steps, rates in ((data_of(numbers, 300), (15, 181, 241), [0.5, 1, 0.5]),
                               (data_of(numbers, 300, first=False), (31, 151), [0.9, 0.5]),
                               (data_of(small(preset="paper"), 300), [1], [1]),
                               (encoders, (50, 200, 400), [0.481, 0.5, 0]),
                               (new_run("pairs")[2], [9], [1])):
        assert [data.rate(step) for step in steps] == approx(rates, abs=1e-3)
    assert data.batch(1)[0].shape == (8, 5)  # pairs are five integers

@parametrize("first, step, half", [(True, 0, 2 ** 14), (True, 300, 2 ** 19), (False, 0, 2 ** 19)])
def test_short_numbers_come_first(first, step, half):
    """Half of the first ones are below 1.6% of the range; a retraining draws uniformly."""
    data = data_of(small(task="successor", batch=4000), 300, first)
    torch.set_default_dtype(torch.bfloat16)
    numbers = numbers_of(data.batch(step)[0])
    torch.set_default_dtype(torch.float32)
    assert np.median(numbers) == approx(half, rel=0.3)
    assert half < 2 ** 19 or len(set(numbers)) > 3900

def test_the_second_attempt_starts_anew_and_is_twice_as_long(trained):
    """The first starts from the vanilla weights, but its queries and keys are zero and stay so."""
    run, _ = abc_run(trained, ["vanilla", "attention"], retrain_steps=1)
    names = "vanilla", "attempt 1", "model"
    assert [run.parts[name]["steps"] for name in names] == [350, 1, 2]
    start, first, second = (run.parts[name]["weights"] for name in names)
    for name, weight in start.items():
        weight, near = (0 * weight, 0) if re.search(r"\.[qk]\.", name) else (weight, 1e-3)
        assert_close(first[name], weight, atol=near, rtol=0)
    assert not torch.allclose(second["head.weight"], start["head.weight"], atol=0.01)

def test_a_training_ends_with_its_proof_or_with_a_loss_that_is_not_finite():
    """It is tried every 25 steps, from 50 on. The curve has every 100th step and the last."""
    run, model, _ = new_run("seq2seq")
    proofs = [dict(proved=n == 3) for n in range(9)]
    with patch.object(L, "prove", side_effect=proofs) as proving:
        assert L.train(run, model, "model", data_of(run.config, 300), [1]) == proofs[3]
    assert [step for step, *_ in run.parts["model"]["curve"]] == [100, 125]
    assert proving.mock_calls == 4 * [call(model, [1])]
    nn.init.constant_(model.embedding.weight, math.nan)
    with raises(RunFailed, match="the loss is nan at step 3 of name"):
        L.train(run, model, "name", data_of(run.config, 3))

def test_no_held_out_number_is_trained_on(trained, monkeypatch):
    seen = defaultdict(set)  # True: in training and calibration, False: in checks and proofs
    def averaged(model, source, target):
        seen[True].update(numbers_of(source))
        return average_attention(model, source, target)
    monkeypatch.setattr(L, "average_attention", averaged)
    def watch(module, inputs):
        if isinstance(module, Transformer):
            seen[module.training].update(numbers_of(inputs[0]))
    with nn.modules.module.register_module_forward_pre_hook(watch):
        abc_run(trained, ["attention"], steps=5, retrain_steps=5, batch=300)
        abc_run(trained, ["vanilla"], retrain_steps=1)
    held_out = set(split_numbers(0)[1].tolist())
    assert len(seen[True]) > 3000 and not seen[True] & held_out
    assert len(seen[False] & held_out) > 900

def test_a_run_is_not_resumed_with_weights_of_other_shapes(trained, monkeypatch):
    monkeypatch.setattr(L, "VOCAB", L.VOCAB + "-")
    with raises(BadInput, match="has the method or VOCAB changed"):
        abc_run(trained, ["vanilla"])

@parametrize("kind", ["seq2seq", "encoder"])
def test_a_killed_run_goes_on_to_the_same_bits(trained, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(L, "SECONDS", -1)  # each step is saved
    config, parts = read_checkpoint(trained["successor"][0])
    learn, config = L.learn_abc, config.replace(steps=6, retrain_steps=5, dropout=0.1)
    if kind == "encoder":
        learn = L.learn_encoder
        config = encoder(batch=8, steps=9, finetune=6, retrain_steps=5, dropout=0.1)
    parts = dict(attention=parts["attention"], example=L.example_of(config))
    whole = Run(config, dict(parts))
    learn(whole)
    for kills in count():
        run, steps = Run(config, parts, tmp_path), count()
        def kill(module, inputs):
            if module.training and hasattr(module, "embedding") and next(steps) == 5:
                raise KeyboardInterrupt
        try:
            with nn.modules.module.register_module_forward_pre_hook(kill):
                learn(run)
            break
        except KeyboardInterrupt:
            _, parts = read_checkpoint(tmp_path)
    assert kills >= 2
    texts = [json.dumps(x.parts, default=torch.Tensor.tolist) for x in (run, whole)]
    found, expected = (re.sub(r'"seconds": [\d.]+', "", text) for text in texts)
    assert found == expected
    if kind == "seq2seq":  # the last kills were in the second attempt, whose lines are dealt
        dealt = [Line(*line) for line in run.parts["model"]["weights"]["bias._extra_state"]]
        chosen = [Line(**line) for line in run.parts["lines"]["lines"]]
        assert dealt == L.deal_lines(chosen, 4) != chosen

@parametrize("change, n_window", [("more", 2122), ("fewer", None)])
def test_a_run_that_has_lines_keeps_them(trained, change, n_window):
    """Windows are theirs: with one line more there are 2,122; without a needed one some clash."""
    lines = [STRAY._asdict()] + trained["successor"][1]["lines"]
    if change == "fewer":
        lines = [line for line in lines[1:] if line["offset"] != -1]
    more = dict(lines=dict(kappa=0.7, lines=lines))
    run, proof = abc_run(trained, ["vanilla", "attention"], more, retrain_steps=1)
    assert (proof["kappa"], proof.get("windows")) == (0.7, n_window)
    assert run.parts["lines"]["lines"] == lines
    assert ("look the same to a row" in proof["why"]) == (change == "fewer")
    if change == "fewer":  # there is no second attempt
        assert proof["lines"] == lines and proof["attempt"] == 1
    run.parts["proof"] = proof
    assert [line._asdict() for line in L.build(run).bias.lines] == proof["lines"]

def test_right_answers_and_places_are_counted(monkeypatch):
    """The last but one digit is wrong where a number ends in 7."""
    counts = []
    def right_tokens(model, source, target):
        right = torch.ones_like(target[:, 1:], dtype=torch.bool)
        right[:, 1] = source[:, -2] != 7
        counts.append(right[:, 1].sum().item())
        return right
    monkeypatch.setattr(L, "right_tokens", right_tokens)
    rows = L.evaluate(None, small(task="successor", lengths=(60, 5, 101), samples=201))["rows"]
    assert [(row["digits"], row["set"], row["n"]) for row in rows] == [
        (60, "random", 201), (60, "hard", 201), (5, "random", 201), (101, "random", 200)]
    for row, right, width in zip(rows, counts, (61, 61, 7, 102), strict=True):  # END has none
        assert row["correct"] == right
        assert row["places"] == [1, round(right / row["n"], 4)] + [1] * (width - 2)

@parametrize("method", ["rope", "abc"])
def test_a_model_trains_after_inference_mode_autocast_and_export(method):
    model = drawn_model(method=method, width=40)
    source, target = batch_of(model.config, 8, torch.arange(1000))
    batch = source, target[:, :-1]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        model(*batch)
    torch.export.export(model, batch)
    assert take_step(model, Optimizer(model, model.config), source, target).isfinite()

@parametrize("method", METHODS)
def test_a_model_is_saved_with_all_that_it_needs(method, tmp_path):
    """Such as its lines. Biases may be overwritten. Its state does not fit another method."""
    model, tokens = drawn_model(method=method), drawn_tokens(1, 19)
    expected = model(tokens, tokens)
    for kind in "encoder", "self", "cross":
        bias = model.bias_of(0, kind, 19, 19)
        if bias is not None:
            bias.fill_(math.nan)
    restored = Transformer(small(method=method))
    restored.load_state_dict(model.state_dict())
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for same in model, restored, loaded:
        assert torch.equal(same(tokens, tokens), expected)
    with raises(RuntimeError):
        other = "nope" if method == "abc" else "abc"
        drawn_model(method=other).load_state_dict(model.state_dict())

# 7. Consecutive pairs: labels by brute force, torch's attention ----------------------------------

@parametrize("d_vocab, B, length", [(16, 500, 5), (2 ** 16, 1, 40_000)])
def test_labels_say_whether_a_neighbor_is_there(d_vocab, B, length):
    config = Config("consecutive", d_vocab=d_vocab, dummy=True)
    source, target = L.draw_pairs(config, B, length)
    for row, labels in zip(source.tolist(), target[:, 1:].tolist()):
        dummy, *integers = row
        there = set(integers)
        assert dummy == d_vocab
        assert labels == [x - 1 in there or x + 1 in there for x in integers]

def test_a_pairs_head_is_torchs_attention_without_the_dummys_row(double):
    config = Config("consecutive", d_vocab=7, dummy=True)
    model = L.PairsHead(config)
    source, target = L.draw_pairs(config, 9, 5)
    x, head = model.embedding(source), model.attention
    z = head.out(F.scaled_dot_product_attention(head.q(x), head.k(x), head.v(x)))
    assert_close(model(source, target[:, 1:]), F.pad(z[:, 1:], (1, 0)))

# 8. Encoders: Python's integers, Jelassi's examples -----------------------------------------------

@parametrize("modulus", [None, 2, 101, 10 ** 9])
@parametrize("task, width, most", [
    ("addition", 7, 8), ("elementwise-addition", 36, 36), ("multiplication", 36, 72)])
def test_questions_of_encoders_are_answered_by_pythons_integers(task, width, most, modulus):
    """As 12@+39@ and $51@@."""
    config = encoder(task=task, width=width, lengths=(width,), train_digits=1, modulus=modulus)
    pairs = [(10 ** width - 1, 10 ** width - 1), (7, 3)]
    with seeded("pairs"):
        pairs += L.draw_integers(config, [width] * 60)
    source, target = L.arrange_encoder(config, pairs)
    sign = "*" if task == "multiplication" else "+"
    for (a, b), question, found in zip(pairs, source, target):
        answer = {"addition": a + b, "multiplication": a * b}.get(task, L.add_digits(a, b))
        expected = str(answer).ljust(most, "@")
        if modulus:
            expected = str(int(answer) % modulus).zfill(len(str(modulus - 1)))
        assert decode(question) == f"{a:@<{width}}{sign}{b:@<{width}}"
        assert decode(found) == "$" + expected

def test_digits_are_added_without_carries():
    assert [L.add_digits(*pair) for pair in ((15, 27), (7, 95), (5, 5))] == ["32", "92", "0"]

def encoder(**options):
    given = dict(task="addition", model="encoder", n_encoder=3, n_head=2, d_model=16,
                 batch=2000, train_digits=3, lengths=(3, 4), samples=5)
    return Config(**given | options)

def taught(config, n_short, n_long=0):
    source, _ = encoder_data(config, n_short, n_long, 1).batch(1)
    texts = [decode(row).replace("@", "") for row in source]
    return [tuple(map(int, re.split(r"[+*]", text))) for text in texts]

@parametrize("task, second", [("addition", 999), ("multiplication", 9)])
def test_primes_are_a_few_long_questions_among_short_ones(task, second):
    """Ten of 40, of 6 or 7 digits, keep both operands; the short ones draw the second."""
    config = encoder(task=task, prime_lengths=(6, 7), lengths=(20,))
    questions = taught(config, 30, 10)
    long = [pair for pair in questions if pair[0] > 999]
    assert abs(len(long) - 500) < 100 and len(set(long)) == 10
    assert {len(str(a)) for a, _ in long} >= {6, 7}
    drawn = {b for a, b in questions if a <= 999}
    assert max(drawn) <= second <= 3 * len(drawn)
    with patch.object(L, "train"), patch.object(L, "encoder_data") as drawn:
        L.learn_encoder(Run(config.replace(examples=40, prime=10, finetune=6, steps=7), {}))
    assert [x.args[1:] for x in drawn.call_args_list] == [(30, 10, 7), (0, 6, 1000)]

def test_short_numbers_are_uniform_in_their_lengths_or_by_the_paper_in_their_values():
    for preset, share in ("fast", 1 / 3), ("paper", 9 / 999):
        short = [a for a, _ in taught(encoder(preset=preset), 2000) if a < 10]
        assert len(short) / 2000 == approx(share, abs=0.05)
    config = encoder(prime_lengths=(6, 7), lengths=(20,))
    with patch.object(L, "evaluate", return_value=dict(rows=[])) as evaluated:
        encoder_data(config, 5, 5, 9).check(None)
    assert evaluated.call_args.args[1].width == config.width  # it is not derived again

# 9. Command line: exit codes, one line for bad input ----------------------------------------------

ENCODER = "--task addition --model encoder --steps 2"

def assert_refused(result, cause):
    code, out, lines = result
    assert (code, out, len(lines)) == (2, "", 1)
    assert lines[0].startswith("lengen: ") and cause in lines[0]

@parametrize("arguments", [  # the first option is the one that the line names
    "--task nothing", "--device gpu", "--steps", "--steps 1.5", "--lengths 6,x",  # no such value
    "--samples 0", "--width 2001", "--d-vocab 0 --task consecutive",  # too small or large
    "--foo", "--tas addition", "--json=1", "--dummy",  # no such option, or none of this task
    "--n-head 4 --d-model 36 --method rope", f"--method window {ENCODER}",  # not together
    "--lengths 2001 --method window", f"--lengths 20 --width 12 {ENCODER}",
    f"--n-encoder 0 {ENCODER}", f"--prime 6000 {ENCODER}",
    f"--lengths 1 --width 3 --train-digits 1 --modulus 1000000000 {ENCODER}",
    "--from y --out x", "--from y --steps 9", "--ask 1+1 --steps 9", "--ask 1+1",
    "--ask 1+1 --json", "--ask 1+1 --lengths 6", "--seeds 2", "--seed 1000000001"])
def test_bad_input_is_one_line_and_exit_code_2(command, arguments):
    assert_refused(command(arguments), re.match("--[a-z-]+", arguments)[0])
    assert not os.listdir()

def test_values_are_brought_to_their_types_and_follow_the_method():
    with torch.device("meta"):
        config = Config(np.str_("nx1"), seed=np.int64(3), lengths=list(np.arange(5, 7)), lr="1e-3")
    same = Config("nx1", seed=3, lengths="5,6", lr=1e-3)
    assert config.values == same.values
    given = config.task, config.seed, config.lengths[0]
    assert [type(x) for x in given] == [str, int, int]
    assert Config("addition", method="window").width == 61 == config.replace(width=61).width
    assert METHODS["nope"].defaults is None  # not a dict that methods share

def test_values_of_another_type_and_entries_that_cannot_be_learned_are_refused(monkeypatch):
    for name, value in ("seed", 10 ** 400), ("lengths", ()), ("method", ["abc"]):
        with raises(BadInput, match=f"--{name}"):
            Config(**{name: value})
    for wrong in (dict(sign="&"), dict(base=12), dict(operands=("digit", "number")),
                  dict(base=2, headroom=44)):  # numbers are drawn as integers of 64 bits
        monkeypatch.setitem(TASKS, "odd", TASKS["addition"]._replace(**wrong))
        with raises(BadInput, match="--task: odd"):
            Config("odd")
    monkeypatch.setitem(TASKS, "odd", TASKS["successor"]._replace(msd_first=True))
    with raises(BadInput, match="--method: window-nope reads from the last digit on"):
        Config("odd", method="window-nope")

@parametrize("task, question, target, answer", [
    ("division", "00129/3", "$0000043&", "43"), ("subtraction", "129 - 3", "$6210000&", "126"),
    ("remainders", "00121", "$0000000101&", "00101")])
def test_answers_are_read_in_the_order_of_the_task(more_tasks, task, question, target, answer):
    with patch.object(L, "generate", return_value=encode(target)[None]):
        assert L.ask(None, Config(task), question) == answer

def test_the_list_names_all_tasks_methods_and_models(command, monkeypatch):
    monkeypatch.setitem(TASKS, "a%b", TASKS["successor"]._replace(about="100% n"))
    listed = set(command("--list")[1].split())
    assert listed >= {"consecutive", *TASKS, *L.ENCODER_TASKS, *METHODS, *L.KINDS}

def test_positions_that_are_not_there_are_refused():
    positions = L.LearnedPositions(small())
    assert len(positions("source", torch.arange(4096))) == 4096
    with raises(BadInput, match="4097 tokens exceed the 4096 learned positions"):
        positions("source", torch.arange(4097))

class Hostile:
    def __reduce__(self):  # makes a folder when it is unpickled
        return os.mkdir, ("owned",)

@parametrize("change, bit", [
    ({}, 4), (dict(parts=Hostile()), 0), (dict(vocab="9876543210+*$&@"), 0)])
def test_a_damaged_checkpoint_costs_one_line(trained, command, change, bit):
    """A bit is flipped, code is hidden, or symbols are others."""
    state = torch.load(trained["parity"][0] / "checkpoint.pt", weights_only=True)
    file = Path("bad/checkpoint.pt")
    file.parent.mkdir()
    torch.save(state | change, file)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= bit
    file.write_bytes(data)
    assert_refused(command("--from=bad --ask=1"), "cannot be used")
    assert os.listdir() == ["bad"]

def test_a_model_is_not_built_of_other_weights_or_by_another_method(trained, monkeypatch):
    """Such as NaN in a run's last step. A run is read in any precision."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        run = Run(*read_checkpoint(trained["parity"][0]))
        L.build(run)
        run.parts["model"]["weights"]["head.weight"] *= 2
        with raises(BadInput, match="answers otherwise"):
            L.build(run)
    torch.set_default_dtype(torch.float32)
    run.parts["model"]["weights"]["head.bias"][0] = math.nan
    with raises(RunFailed, match="the weights are not finite"):
        L.build(run)
    for position, why in ((L.sinusoids, "has its method changed?"),
                          (L.LearnedPositions, "method or VOCAB changed?")):
        monkeypatch.setitem(METHODS, "abc", METHODS["abc"]._replace(position=position))
        with raises(BadInput, match=why):
            L.build(Run(*read_checkpoint(trained["parity"][0])))

def test_a_checkpoint_is_of_the_task_that_was_trained(tmp_path, one_question):
    """Values that were derived when the run was made, such as widths, are not derived again."""
    for task in "successor", "multiplication", "consecutive", "addition":
        config = Config(task)
        Run(config, {}, tmp_path).keep(example=L.example_of(config), part=1)
        assert read_checkpoint(tmp_path)[1]["part"] == 1
    _, target, _, _ = L.example_of(config)
    def rare(carry, x, y):  # another total at one of 200 combinations, which the example lacks
        return x + y + carry + ((x == 9) & (y == 8) & (carry == 1)).long()
    for change in (dict(total=rare), dict(total=TASKS["nx1"].total), dict(sign="*"),
                   dict(headroom=2), dict(first=1)):
        with patch.dict(TASKS, addition=TASKS["addition"]._replace(**change)):
            assert change != dict(total=rare) or torch.equal(target, L.example_of(config)[1])
            with raises(BadInput, match="addition had other questions or answers"):
                read_checkpoint(tmp_path)

@parametrize("error, code", [
    (KeyboardInterrupt(), 130), (RunFailed("--from"), 1), (BadInput("--from"), 2)])
def test_a_run_that_stops_says_why_in_one_line(command, error, code):
    with patch.object(L, "train", side_effect=error):
        found, _, [line] = command(NOPE)
    assert found == code and "--from" in line
    with patch.object(L, "train", side_effect=ZeroDivisionError), raises(ZeroDivisionError):
        command(NOPE)  # a bug ends in its traceback

def test_an_interrupted_run_is_finished_from_its_folder(command):
    with patch.object(L, "train", side_effect=KeyboardInterrupt):
        assert command(f"{NOPE} --out=run")[2] == ["lengen: interrupted; go on by --from run"]
    assert_refused(command("--from=run --ask=1"), "not finished")
    assert_refused(command(f"{SHORT} --out=run"), "File exists")
    assert command(f"--from=run {QUIET} --lengths=1,5")[0] == 0  # not those that it started with
    assert not load("run")[0].training
    assert json.loads(Path("run/result.json").read_text())

def test_a_finished_run_is_tested_and_proved_again_and_stays_as_it_is(trained, command):
    folder, record = trained["successor"]
    out = command(f"--from={folder} --lengths=30,2100 --samples=20 --json")[1]
    rows = json.loads(out)["tests"]["rows"]
    assert {row["digits"] for row in rows} == {30, 2100}
    assert all(row["correct"] == row["n"] for row in rows)
    assert json.loads((folder / "result.json").read_text()) == record
    config, parts = read_checkpoint(folder)
    parts["model"]["weights"]["head.weight"] *= -1
    del parts["model"]["logits"]  # which are of the other weights
    assert "not proved" in L.execute(Run(config, parts))["proof"]["why"]

def test_a_full_disk_costs_one_line_and_leaves_no_part(command):
    with patch.object(Path, "replace", side_effect=OSError("disk full")):
        assert_refused(command(f"{NOPE} --out=run"), "disk full")
    assert os.listdir("run") == []

def process(arguments, **how):
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | how
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(HERE))
    return subprocess.Popen([sys.executable] + arguments, env=environment, **how)

def test_output_that_cannot_be_written_is_one_line_and_a_closed_reader_none(tmp_path):
    trains = f"-m lengen {NOPE} --out={tmp_path}/run".split()
    with open("/dev/full", "w") as full:
        listed = process(["-m", "lengen", "--list"], stdout=full)
        trained = process(trains, stdout=full)
    closed = process(["-m", "lengen", "--list"])
    closed.stdout.close()
    for refused in listed, trained:
        assert refused.stderr.read().count("\n") == 1
    assert closed.stderr.read() == ""
    assert (listed.wait(), trained.wait(), closed.wait()) == (2, 2, 0)
    assert json.loads((tmp_path / "run/result.json").read_text())["tests"]["rows"]

@parametrize("task, answers", [
    ("successor", {" 0041 ": 42, "9" * 60: 10 ** 60}),
    ("addition", {"9 + 0001": 10}), ("nx1", {"7*0": 0}), ("parity", {"0010": 1110})])
def test_the_newest_run_answers_as_pythons_integers_do_after_symbols_were_added(
        trained, command, monkeypatch, task, answers):
    monkeypatch.setattr(L, "VOCAB", L.VOCAB + "-")
    Path("runs/older").mkdir(parents=True)
    Path("runs/older/result.json").touch()
    shutil.copytree(trained[task][0], "runs/newer")
    os.utime("runs/newer/result.json")
    _, out, _ = command("--ask", answers)
    assert out.split() == list(map(str, answers.values()))
    model, config, _ = load("runs/newer")
    assert [L.ask(model, config, question) for question in answers] == out.split()

@parametrize("arguments, values", [
    ("--from=x --ask=1", "'steps': 350,"),
    ("--model=encoder", "'steps': 8000,"),  # of addition, its first task
    ("--task=addition --model=universal --preset=paper", "'steps': 2343750,")])
def test_help_names_options_and_their_values(command, arguments, values):
    """Jelassi, Sec. 2.2, has 15,000 epochs of 5,000 examples, 32 a step."""
    out = command(f"{arguments} --help")[1]
    assert values in out and "\n--lr " in out and "\n--ask " in out

@parametrize("arguments", [f"addition --method={x}" for x in METHODS if x != "abc"] + [
    "consecutive", "addition --model=universal", "multiplication --lengths=1 --train-digits=1",
    "addition --model=encoder --method=rpe-kq --finetune=6 --retrain-steps=2"])
def test_a_record_makes_its_run_again(command, capsys, arguments):
    """And leaves the caller's random state."""
    _, out, _ = command(f"{SHORT} --json --task={arguments}")
    record = json.loads(out)
    assert record.keys() >= {"config", "train", "lines", "proof", "tests"}
    state = torch.get_rng_state()
    L.execute(Run(Config(**record["config"]), {}), as_json=True)
    assert torch.equal(torch.get_rng_state(), state)
    again = json.loads(capsys.readouterr().out)
    assert again["tests"]["rows"] == record["tests"]["rows"]
    assert again["train"]["model"]["curve"] == record["train"]["model"]["curve"]

def test_default_runs_are_exact_and_say_so_and_others_say_what_to_try(trained):
    for task, (_, record) in copy.deepcopy(trained).items():
        text = "\n".join(L.summary(record))
        question, answer = re.search(f"{task}, abc, seed 0: (.*) -> (.*)\n", text).groups()
        base = TASKS[task].base
        numbers = [int(x, base) for x in re.split(r"\D", question)]
        assert answer_of(task, 20, *numbers) == int(answer, base)
        assert "exact at every" in text and " 60  100.0%" in text
        assert all(row["correct"] == row["n"] for row in record["tests"]["rows"])
    record["proof"].update(proved=False, why="so")
    record["train"]["vanilla"]["curve"][-1][2] = 0.6
    record["lines"] = [STRAY._replace(layer=layer, offset=offset)._asdict()
                       for layer, offset in product(range(6), range(50))]
    found = "\n".join(L.summary(record))
    assert "60.0%; raise --steps\n" in found
    assert "\n  layer 1,2,3,4,5,6 cross head 1: anti-diagonal" in found
    assert found.count("\n  layer ") == 40
    assert "\n  10 more in result.json\nproof     so; kappa" in found

@parametrize("task, pattern", [("nx1", r"\d+\*\d -> \d+"), ("addition", r"\d+\+\d+ -> \d+")])
def test_an_interleaved_example_is_shown_as_it_is_asked(task, pattern):
    config = Config(task, method="window-nope")
    text = L.example_as_numbers(Run(config, dict(example=L.example_of(config))))
    assert re.fullmatch(pattern, text)

def test_shares_right_are_counted_without_rounding():
    """In float32, 997 of 1,000 is below .997, so that 99.6% would be printed."""
    data = data_of(small(task="successor"), 9)
    with patch.object(L, "right_tokens", return_value=torch.arange(1000)[:, None] > 2):
        [share] = data.check(None)
    assert L.percent(share) == "99.7%" and L.percent(1999 / 2000) == "99.9%"

# README and the scripts in results/, imported late, as they add methods ---------------------------

README = (HERE / "README.md").read_text(encoding="utf-8")

def test_commands_of_the_readme_and_of_recorded_runs_are_valid():
    from results import schemes  # whose lists are in runs.txt, too
    listed = README + (HERE / "results/runs.txt").read_text()
    commands = re.findall(r"(?:lengen.py|[a-z]+ [0-9]-[0-9]+) (--[^`\n>]*)", listed)
    assert len(commands) > 140 and schemes
    for text in commands:
        text = text.replace("seed N", "seed 7").replace("--msd ", "")  # of results/machines.py
        given, options = L.parse(text.split())
        assert options["from"] or options["list"] or Config(**given)

def test_scripts_of_the_readme_run_as_printed(tmp_path, trained):
    runs = []
    shutil.copytree(trained["addition"][0], tmp_path / "runs/addition")
    for script in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        script = script.replace("main([", f"main([*{NOPE.split()}, ")
        runs.append(process(["-c", script], cwd=tmp_path))
    expected = [f"1{'0' * 300}\n", "'proved': True", "4 steps", "4 steps", "4 steps"]
    for run, printed in zip(runs, expected, strict=True):
        out, errors = run.communicate()
        assert printed in out and errors == ""

def test_readmes_say_what_the_records_make(monkeypatch, tmp_path):
    """A changed number in a list, in a sentence or in a table is found; --write mends a table."""
    from results import report
    assert report.main([]) == 0
    shutil.copytree(HERE / "results", tmp_path / "results")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    changes = {"(69.4": "README.md", ", 1 of 10 of a": "README.md",
               "| 100 -> ": "results/README.md", "| 25 of 25 |": "results/README.md"}
    for number, name in changes.items():
        for page in "README.md", "results/README.md":
            text = (HERE / page).read_text(encoding="utf-8")
            (tmp_path / page).write_text(text.replace(number, "?") if page == name else text)
        assert report.main([]) == 1
    assert report.main(["--write"]) == report.main([]) == 0

def test_verdicts_follow_from_the_seeds(monkeypatch):
    """A claim of 99% by three seeds; what a smaller model does not show is undecided."""
    from results import report
    for rights, verdicts in [((99, 100, 100), ["reproduced", "in part", "in part"]),
                             ((99, 100, 0), ["in part"] * 3),
                             ((100, 98, 98), ["not reproduced", "not reproduced", "undecided"])]:
        rows = [dict(digits=6, set="random", correct=right, n=100) for right in rights]
        records = [dict(config=dict(task="nx1", seed=seed), tests=dict(rows=[row]))
                   for seed, row in enumerate(rows)]
        monkeypatch.setattr(report, "load", Mock(return_value=records))
        kinds = report.grade, report.grade_failure, report.grade_smaller
        assert [kind("6>99 of file") for kind in kinds] == verdicts

def test_records_that_differ_in_an_option_are_kept_apart(capsys, monkeypatch):
    from results import pictures, report
    records, pyplot = [], Mock()
    for seed, n_layer, digits, correct in (0, 1, 6, 10), (1, 1, 6, 8), (0, 6, 6, 0), (0, 1, 9, 5):
        config = dict(task="nx1", method="t5", seed=seed, n_layer=n_layer, lengths=[digits])
        tests = dict(rows=[dict(digits=digits, set="random", n=10, correct=correct)])
        records.append(dict(config=config, tests=tests))
    monkeypatch.setattr(report, "read_lines", Mock(return_value=records))
    assert report.main(["file"]) == 0
    assert capsys.readouterr().out.splitlines()[5:] == [
        "| t5 | n_layer=1 lengths=[6] | 90 (80 - 100) | - | 0 | 2 | 10 |",
        "| t5 | n_layer=6 lengths=[6] | 0 | - | 0 | 1 | 10 |",
        "| t5 | n_layer=1 lengths=[9] | - | 50 | 0 | 1 | 10 |"]
    assert raises(ValueError, report.cells, "6 of file")
    axes = Mock()
    pyplot.subplots.return_value = Mock(), axes
    axes.plot.return_value = [Mock()]
    pictures.draw_accuracy(pyplot, records)
    assert [x.args for x in axes.plot.mock_calls] == [([6], [90]), ([6], [0]), ([9], [50])]

class Oracle:
    """Answers to a calculator's questions, by Python's integers."""
    def ask(self, task, pairs):
        answers = [answer_of(task, 0, int(a), int(b)) for a, b in pairs]
        assert min(answers) >= 0
        assert task in ("addition", "subtraction") or all(len(b) == 1 for _, b in pairs)
        return list(map(str, answers))

def test_a_calculator_agrees_with_pythons_integers():
    from results import calculator
    draw, right = random.Random(0), Counter()
    for number in range(400):
        text = calculator.draw_expression(draw, number % 4, "0123456789" if number % 3 else "09")
        text = text.replace("/", "//", number % 2)
        plain = re.sub(r"\b0+(?=\d)", "", text.replace("//", "/")).replace("/", "//")
        try:
            expected = str(eval(plain))
        except ZeroDivisionError:
            with raises(BadInput, match="division by 0"):
                calculator.calculate(Oracle(), text)
            expected = "none"
        else:
            assert calculator.calculate(Oracle(), text) == expected
        right[expected[0]] += 1
    assert right["-"] > 50 and right["n"] > 2

@parametrize("text", ["1/0", "2**3", "1.5", "1 +", "(" * 999])
def test_what_cannot_be_calculated_costs_one_line(capsys, monkeypatch, text):
    from results import calculator
    monkeypatch.setattr(calculator, "Models", Mock)
    assert calculator.main([text]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1

def test_a_calculator_asks_models_in_batches(trained, monkeypatch):
    """Of any length. What is no number is refused."""
    from results import calculator
    monkeypatch.setattr(calculator, "define_tasks", Mock())
    monkeypatch.setattr(calculator, "train", lambda task: load(trained[task][0])[:2])
    models = calculator.Models()
    a, b = "37" * 25, "73" * 25
    assert calculator.calculate(models, f"{a} * {b} + 0") == str(int(a) * int(b))
    assert models.questions < 60 and models.batches == 1 + 6 + 1
    with patch.object(L, "generate", return_value=encode("$1+2&")[None]):
        with raises(RunFailed, match="addition: the model wrote '1[+]2', not 7 digits"):
            models.ask("addition", [("1", "2")])

@parametrize("task, method, option, most", [
    ("successor", "abacus", "width", 924), ("addition", "coupling", "lengths", 1021),
    ("nx1", "randomized", "width", 1020), ("addition", "randomized", "width", 510)])
def test_numbers_beyond_the_positions_are_refused(command, task, method, option, most):
    from results import schemes  # as many digits as are allowed have positions, from any start on
    config = Config(task, method=method, **{option: most})
    model = Transformer(config).train(option == "width")
    source, target = draw_questions(config, draw_exact, max(config.lengths), 1)
    with patch.object(torch, "randint", return_value=torch.tensor(99)):
        assert schemes and model(source, target[:, :-1]).isfinite().all()
    for wrong in f"--{option}={most + 1} --task={task}", f"--method=x {ENCODER}":
        assert_refused(command(f"{SHORT} {wrong} --method={method}"), wrong[:7])

def textbook_norm(layer, x):
    """Layer norm in one pass, by the mean of squares less the squared mean, and scaled before the
    mean is subtracted: of the usual ways, the one that loses most digits."""
    mean = x.mean(-1, keepdim=True)
    scale = ((x * x).mean(-1, keepdim=True) - mean * mean + layer.eps).rsqrt()
    return x * scale * layer.weight + (layer.bias - mean * scale * layer.weight)

def allow(monkeypatch, spread=0.0, most_open=8):
    """A bound for rows that differ in shares by this at most, with as many open keys at most."""
    from results import rounding
    monkeypatch.setattr(rounding, "SPREAD", spread)
    monkeypatch.setattr(rounding, "MOST_OPEN", most_open)
    return rounding

@torch.no_grad()
@parametrize("part, change", [*product(["add", "linear", "norm", "attend"], ["rounded", "moved"]),
                              ("attend", "spread")])
def test_a_radius_is_large_enough_and_a_hundredth_of_it_is_not(monkeypatch, part, change):
    """The worst of many draws. Numbers are rounded to float32, whose UNIT is taken, or inputs move
    by their radii, or shares of keys by SPREAD."""
    spread = 1e-5 * (change == "spread")
    rounding = allow(monkeypatch, spread, most_open=2)
    C = dict(norm=8, attend=1).get(part, 2)
    layer = dict(norm=nn.LayerNorm(C), attend=L.MultiHeadAttention(C, 1)).get(part, nn.Linear(C, C))
    for weight in layer.parameters():
        nn.init.normal_(weight)
    x, y = 5 * torch.randn(20_000, 1, C), 5 * torch.randn(20_000, 2, C)
    bias = torch.tensor([[[0.0, -1.0]]])
    evaluate, bound = dict(
        add=(torch.add, rounding.add),
        linear=(lambda x, y: layer(x), lambda x, y: rounding.linear(layer, x)),
        norm=(lambda x, y: textbook_norm(layer, x), lambda x, y: rounding.norm(layer, x)),
        attend=(lambda x, y: layer(x, y, bias)[0],
                lambda x, y: rounding.attend(layer, x, y, bias)))[part]
    if change == "rounded":
        monkeypatch.setattr(rounding, "UNIT", 2.0 ** -23)
        if part == "norm":  # little of the mean of squares is variance
            x = x + 150 + 4 * (torch.arange(8) % 3)
            layer.bias[0] *= 1e5
        bias = bias + 1000
        found = evaluate(x, y).double()
    layer, x, y = layer.double(), x.double(), y.double()
    most = {"norm": 1e-5}.get(part, 1) * (change == "moved")
    r, s = (most * torch.rand_like(z) ** 4 for z in (x, y))  # some large, some small
    center, radius, _ = bound(rounding.ball(x, r), rounding.ball(y, s))
    if change != "rounded":
        bias = (bias.double().softmax(2) + torch.tensor([spread, -spread])).log()
        found = evaluate(x + r * torch.randn_like(x).sign(), y + s * torch.randn_like(y).sign())
    worst = ((found - center).abs() / radius).max()
    assert 0.01 < worst <= 1

def test_a_norm_has_no_radius_where_the_variance_may_vanish():
    from results import rounding
    x = torch.ones(64).double()
    x[::2] = -1
    near = rounding.norm(nn.LayerNorm(64).double(), rounding.ball(x, torch.full_like(x, 0.1)))
    far = rounding.norm(nn.LayerNorm(64).double(), rounding.ball(x, torch.full_like(x, 0.9)))
    assert near.radius.isfinite().all() and far.radius.isnan().all()

def exact(x):
    """A tensor -> an array of decimals, equal to its numbers."""
    return np.vectorize(decimal.Decimal, otypes=[object])(x.detach().double().numpy())

def exact_logits(model, source, target):
    """source (S,), target (T,) -> logits (T, V) by textbook formulas, as decimals."""
    def linear(layer, x):
        return x @ exact(layer.weight).T + exact(layer.bias)
    def norm(layer, x):
        off = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((off * off).mean(-1, keepdims=True) + decimal.Decimal(layer.eps))
        return off / scale * exact(layer.weight) + exact(layer.bias)
    def attend(layer, x, memory, kind):
        q, k, v = (linear(way, y).reshape(len(y), layer.n_head, -1).transpose(1, 0, 2)
                   for way, y in ((layer.q, x), (layer.k, memory), (layer.v, memory)))
        bias = exact(L.bias_between(model.bias, kind, len(x), len(memory)))
        weights = np.exp(q @ k.transpose(0, 2, 1) / decimal.Decimal(q.shape[2]).sqrt() + bias)
        mixed = weights / weights.sum(2, keepdims=True) @ v
        return linear(layer.out, mixed.transpose(1, 0, 2).reshape(len(x), -1))
    x, memory = (exact(model.embed(tokens[None], side)[0])
                 for tokens, side in ((target, "target"), (source, "source")))
    [layer], y = model.decoder, norm(model.decoder[0].norms[0], x)
    x = x + attend(layer.self_attention, y, y, "self")
    x = x + attend(layer.cross_attention, norm(layer.norms[1], x), memory, "cross")
    hidden = np.maximum(linear(layer.feed_forward[0], norm(layer.norms[2], x)), 0)
    return linear(model.head, norm(model.norm, x + linear(layer.feed_forward[3], hidden)))

@torch.no_grad()
@parametrize("method", ["abc", "window-cyclic", "window-nope"])
def test_logits_are_as_near_to_exact_ones_as_the_radius_says(monkeypatch, method):
    """Those of float64, of 60 digits; those of float32 are farther away."""
    rounding = allow(monkeypatch)
    model = drawn_model(method=method, n_layer=1, n_encoder=0, d_model=8)
    source, target = encode("$0123+0748&")[None], encode("$1780")[None]
    logits = [model(source, target), model.double()(source, target)]
    with decimal.localcontext(decimal.Context(prec=60)):
        expected = exact_logits(model, source[0], target[0])
        center, radius, _ = rounding.logits(model, source, target)
        far, *near = (np.abs(exact(x[0]) - expected) > exact(radius[0]) for x in (*logits, center))
    assert far.any(1).all() and not np.any(near) and radius.max() < 1e-5

@torch.no_grad()
@parametrize("task", ["successor", "addition", "nx1", "parity"])
def test_other_orders_more_closed_keys_and_other_norms_stay_within_the_radii(
        trained, monkeypatch, task):
    rounding = allow(monkeypatch)
    model, config, _ = load(trained[task][0])
    attend = L.MultiHeadAttention.forward
    def among_closed_keys(layer, x, memory, bias):
        closed = 1e6 * torch.randn(len(memory), 300, memory.shape[2]).to(memory)
        order = torch.randperm(memory.shape[1] + 300)
        bias = F.pad(bias, (0, 300), value=-INF)[:, :, order]
        return attend(layer, x, torch.cat([memory, closed], 1)[:, order], bias)
    for source, target, _ in enumerate_windows(config, model.bias).questions[::9]:
        source, target = source[:20], target[:20, :-1]
        in_float32 = model.float()(source, target)
        center, radius, _ = rounding.logits(model.double(), source, target)
        assert ((in_float32 - center).abs() > 2 * radius).any()
        with monkeypatch.context() as changed:
            changed.setattr(L.MultiHeadAttention, "forward", among_closed_keys)
            changed.setattr(nn.LayerNorm, "forward", textbook_norm)
            found = torch.cat([model(s[None], t[None]) for s, t in zip(source, target)])
        assert ((found - center).abs() <= 2 * radius).all() and not torch.equal(found, center)
    torch.set_num_threads(2)  # on the last questions, in larger matrices
    found = model(source.repeat(500 // len(source), 1), target.repeat(500 // len(source), 1))
    torch.set_num_threads(1)
    found = found[-len(source):]
    assert ((found - center).abs() <= 2 * radius).all() and not torch.equal(found, center)

def test_runs_are_exact_with_rounding_or_it_is_said_why_not(trained, command, capsys, monkeypatch):
    from results import rounding
    folders = [str(folder) for folder, _ in trained.values()]
    assert rounding.main(folders) == 0
    assert capsys.readouterr().out.count("exact at every length in float64, rounding") == 4
    logits, margin = rounding.logits, trained["successor"][1]["proof"]["margin"]
    for share in 0, 0.2, 0.3:  # radius of all logits, as a share of the least lead
        def exactly(*given):
            found = logits(*given)
            return found._replace(radius=torch.full_like(found.radius, share * margin))
        monkeypatch.setattr(rounding, "logits", exactly if share else logits)
        assert rounding.main(folders[:1] + ["--json"]) == (share > 0.25)
        record = json.loads(capsys.readouterr().out)
        assert record["windows"] == 212 and record["lead"] == approx((1 - 4 * share) * margin, 0.02)
    refused = dict(nope=NOPE, paper=f"{SHORT} --preset=paper --method=window-nope --n-layer=1 "
                   "--n-encoder=0", pairs=f"{SHORT} --task=consecutive --lengths=8")
    whys = ("nope", "keys open at any"), ("paper", "preset paper"), ("pairs", "for pairs")
    for name, why in whys:
        assert command(f"{refused[name]} --out={name}")[0] == 0
        assert rounding.main([name]) == 1 and why in capsys.readouterr().out
    for words in [], ["--what"], ["none"]:
        assert rounding.main(words) == 2
    monkeypatch.setattr(rounding, "logits", logits)
    monkeypatch.setattr(rounding, "UNIT", 2.0 ** -23)
    assert rounding.main(folders[:1]) == 1  # float32 has no such bound

def test_a_list_fails_by_its_own_lines_alone(tmp_path):
    shutil.copy(HERE / "run_all.sh", tmp_path)
    stub = 'echo {}; case "$*" in *fails*) exit 1;; *meanwhile*) ./run_all.sh good;; esac'
    lists = "good 0-1 a\nbad 0-0 fails\nbad 0-0 meanwhile\n"
    (tmp_path / "results").mkdir()
    for name, text in ("runs.txt", lists), ("python", f"#!/bin/sh\n{stub}\n"):
        (tmp_path / "results" / name).write_text(text)
    (tmp_path / "results/python").chmod(0o755)
    there = os.environ | dict(PATH=f"{tmp_path}/results:{os.environ['PATH']}")
    run = subprocess.run([tmp_path / "run_all.sh", "bad"], env=there, cwd=tmp_path)
    assert run.returncode == 1
    assert (tmp_path / "runs/records/good.jsonl").stat().st_size == 6

# The long checks: python -m pytest -q -m check ----------------------------------------------------

@pytest.mark.check
def test_long_numbers_take_less_than_three_gigabytes(trained):
    """A dense bias of 10,000 digits has 4 * 10^8 entries, 1.6 GB, for each attention."""
    folder, _ = trained["successor"]
    arguments = f"-m lengen --from={folder} --lengths=10000,1000000 --samples=1 --json"
    run = process(arguments.split())
    rows = json.loads(run.communicate()[0])["tests"]["rows"]
    assert [row["correct"] for row in rows] == [1, 1]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 3 * 2 ** 20
