# SPDX-License-Identifier: MIT
"""Tests of lengen.py, in its order. Oracles: torch, published numbers, loops, every question."""

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
from itertools import count, cycle, product
from pathlib import Path
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

def running(width, a, base, modulus):
    """Digit i is the sum of the last i + 1 digits of a, modulo `modulus`."""
    digits = [a // base ** i % base for i in range(width)]
    return sum(sum(digits[:i + 1]) % modulus * base ** i for i in range(width))

ANSWERS = {  # width and numbers -> the answer; where it is negative, there is no question
    "successor": lambda width, a: a + 1,
    "addition": lambda width, a, b: a + b,
    "nx1": lambda width, a, b: a * b,
    "parity": lambda width, a: running(width, a, 2, 2),
    "parity-label": lambda width, a: bin(a).count("1") % 2,
    "subtraction": lambda width, a, b: a - b,
    "remainders": lambda width, a: running(width, a, 4, 3),
    "division": lambda width, a, b: a // b if b else -1,
    "copy": lambda width, a: a,
}

@pytest.fixture
def more_tasks(monkeypatch):
    """Adds the last four of these tasks. One overwrites digits, and returns digit and carry."""
    monkeypatch.setattr(L, "VOCAB", L.VOCAB + "-/")
    monkeypatch.setitem(TASKS, "subtraction", TASKS["addition"]._replace(
        total=lambda carry, a, b: a - b + carry, sign="-"))
    def remainders(carry, a):
        carry += a
        carry %= 3
        a += 1
        return carry, carry
    monkeypatch.setitem(TASKS, "remainders", Task("", remainders, base=4, headroom=0))
    def divide(carry, a, b):
        a, divisor = TASKS["division"].base * carry + a, b.clamp(min=1)
        return torch.where(b == 0, -1, a // divisor), a % divisor
    monkeypatch.setitem(TASKS, "division", Task("", divide, ("number", "digit"), "/",
                                                msd_first=True))
    monkeypatch.setitem(TASKS, "copy", Task("", lambda carry, a: (a, 0), msd_first=True,
                                            headroom=0))

def written(task, width, numbers, align=False):
    spec, texts = TASKS[task], []
    for number, kind in zip(numbers, spec.operands):
        digits = width if kind == "number" else 1
        texts.append(np.base_repr(number, spec.base).rjust(digits, "0"))
    answer = np.base_repr(ANSWERS[task](width, *numbers), spec.base)
    answer = answer.rjust(1 if spec.label else width, "0")
    question = spec.sign.join(texts)
    if align:
        pairs = zip(texts[0], cycle(texts[1]))
        question = spec.sign + "".join(map("".join, pairs))
    return f"${question}&", f"${answer if spec.msd_first else answer[::-1]}&"

def every_question(task, width, least=0):
    spec = TASKS[task]
    numbers = range(least, spec.base ** (width - spec.headroom))
    ranges = dict(number=numbers, digit=range(spec.base))
    found = product(*map(ranges.get, spec.operands))
    return [x for x in found if ANSWERS[task](width, *x) >= 0]

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

@parametrize("base", [10, 4])
@parametrize("draw", [draw_exact, draw_hard])
@parametrize("task", ANSWERS)
def test_drawn_questions_are_distinct_and_answered_as_by_pythons_integers(
        more_tasks, monkeypatch, task, draw, base):
    """Of few all are found. Training numbers keep all digits; exact ones have no zeros in front."""
    spec = TASKS[task]
    base, n_number = min(base, spec.base), spec.operands.count("number")
    monkeypatch.setitem(TASKS, task, spec._replace(base=base))
    config, least = small(task=task), L.LIMIT - 1000
    for width in config.widths:
        config = config.replace(width=width)
        learned = batch_of(config, 50, torch.arange(least, L.LIMIT))
        smallest = [min(x[:n_number]) for x in numbers_answered(task, *learned)]
        assert len(smallest) == 50 and min(smallest) >= least
    for length, n in (1, 500), (6, 100), (200, 10):
        drawn = numbers_answered(task, *draw_questions(config, draw, length, n))
        least = base ** (length - 1) if draw == draw_exact else 0
        if length == 1:
            assert set(drawn) == set(every_question(task, 1 + spec.headroom, least))
        assert len(set(drawn)) == len(drawn)
        assert all(min(numbers[:n_number]) >= least for numbers in drawn)

def test_a_batch_is_full_even_if_half_of_the_questions_have_no_answer(more_tasks):
    config = small(task="subtraction")
    data = data_of(config, 300)
    for step, n in (1, 8), (150, 8), (300, 1000):
        assert len(numbers_answered("subtraction", *data.batch(step, n))) == n
    config.spec = config.spec._replace(first=-1)  # 0 - 0 - 1 has none
    with raises(BadInput, match="gave no question; has it headroom"):
        data_of(config, 300).batch(1, 8, torch.tensor([0]))

def test_hard_numbers_are_short_and_tie_and_carry_far():
    first, second = (draw_hard(10, 60, 10_000) for _ in range(2))
    short = (first[:, 40:] == 0) & (first[:, :1] % 9 > 0)  # zeros before other digits
    tied = first[:, 40:] == second[:, 40:]
    carried = (first + second)[:, 20:40] == 9
    for places in short, tied, carried:
        assert places.all(1).any()

@parametrize("task, operands, why", [
    ("logarithm", ["1"], "is not a question"), ("successor", [], "is not a question"),
    ("subtraction", ["5", "7"], "^5 - 7 has no answer"), ("division", ["7", "0"], "^7 / 0 has no"),
    ("nx1", ["7", "12"], "not a base-10 digit"),
    ("odd", ["91"], "a digit that base 10 does not have")])
def test_what_is_no_question_is_refused(more_tasks, monkeypatch, task, operands, why):
    monkeypatch.setitem(TASKS, "odd", Task("a + 4", lambda carry, a: (a + 4, carry)))
    with raises(BadInput, match=why):
        example(task, *operands)

@parametrize("total", [
    lambda carry, a: ((a + carry) % 10, carry + (a == 9) > 1),
    lambda carry, a: (a + carry).int(), lambda carry, a: ((a + carry).byte() % 10, a + carry > 9)])
def test_results_of_any_integer_type_are_integers(monkeypatch, total):
    monkeypatch.setitem(TASKS, "next", Task("n + 1", total, first=1))
    for number in 0, 9, 199, 999_999:
        answer = str(number + 1).zfill(len(str(number)) + 1)
        assert example("next", str(number))[1] == f"${answer[::-1]}&"
    monkeypatch.setitem(TASKS, "nines", Task("9 - a", lambda carry, a: (9 - a, 0)))
    assert example("nines", "108") == ("$0108&", "$1989&")

@parametrize("total", [
    lambda carry, a: a / 2, lambda carry, a: (a, carry, a), lambda carry, a: a[:1],
    lambda carry, a: a + max(a, carry), lambda carry: carry, lambda carry, a: (a, None)])
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
    channels = torch.arange(0, 8, 2).double()
    numbers = torch.view_as_complex(x.unflatten(3, (4, 2)))
    for positions in torch.tensor([0, 1, 5, 77, 999_999]), torch.arange(5):
        waves = torch.exp(1j * positions[:, None] * 10000 ** (-channels / 8))
        sinusoids = torch.stack([waves.imag, waves.real], 2).flatten(1)
        assert_close(L.sinusoidal(positions, 8), sinusoids.float())
        rotated = torch.view_as_real(numbers * waves).flatten(3).float()
        assert_close(L.rope(x, positions), rotated)
    scores = METHODS["rope"].scores(None, "self", x, x)
    assert_close(scores, rotated @ rotated.mT)

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
    bias = alibi_bias(14, 4, 6)
    for i, j in product(range(4), range(6)):
        expected = [-slope * abs(i - j) for slope in slopes]
        assert bias[:, i, j].tolist() == approx(expected, abs=1e-5)
    ours, causal = alibi_bias(2, 6, 6), causal_bias(6)
    for method, others in ("alibi", ours), ("alibi-decoder", None):
        model = Transformer(small(method=method))
        for kind, expected in ("encoder", others), ("self", causal + ours), ("cross", others):
            bias = model.bias_of(0, kind, 6, 6)
            assert bias is expected or torch.equal(bias, expected)

# 3. Attention: torch's own ------------------------------------------------------------------------

def copy_weights(ours, theirs):
    parts = ours.q, ours.k, ours.v
    theirs.in_proj_weight.data = torch.cat([part.weight for part in parts])
    theirs.in_proj_bias.data = torch.cat([part.bias for part in parts])
    theirs.out_proj.load_state_dict(ours.out.state_dict())

def test_attention_with_a_bias_a_head_is_torchs(double):
    """Also with scores of a method. A row that sees nothing is zero with finite gradients."""
    ours = L.MultiHeadAttention(12, 3)
    oracle = nn.MultiheadAttention(12, 3, batch_first=True)
    copy_weights(ours, oracle)
    x = torch.randn(2, 4, 12)
    memory = torch.randn(2, 6, 12)
    bias = torch.randn(3, 4, 6)
    bias[1, 2, 3] = -INF
    mask = bias.repeat(2, 1, 1)  # of each question and head
    expected = oracle(x, memory, memory, attn_mask=mask, average_attn_weights=False)
    for scores in None, lambda q, k: q @ k.mT:
        ours.scores = scores
        assert_close(ours(x, memory, bias), expected)
        assert_close(ours.weights, expected[1])
    bias[0, 1] = -INF
    weights = ours(x, memory, bias)[1]
    weights.square().sum().backward()
    assert weights[:, 0, 1].eq(0).all()
    assert ours.q.weight.grad.isfinite().all()

# 4. Transformer: torch's own layers, and a greedy loop --------------------------------------------

def crossing_lines():
    """In two layers of two heads: an anti-diagonal and a vertical that cross, and a diagonal."""
    lines = []
    kinds = [("cross", -1), ("cross", 0), ("self", 1)]
    for layer, head, (attention, direction) in product((0, 1), (0, 1), kinds):
        block = head if attention == "cross" else 0
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

def as_torchs(ours, kind):
    theirs = kind(16, 2, 64, 0.0, batch_first=True, norm_first=ours.norm_first)
    theirs.linear1 = ours.feed_forward[0]
    theirs.linear2 = ours.feed_forward[3]
    copy_weights(ours.self_attention, theirs.self_attn)
    if kind == nn.TransformerDecoderLayer:
        copy_weights(ours.cross_attention, theirs.multihead_attn)
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
        theirs = as_torchs(layer, nn.TransformerEncoderLayer)
        theirs.activation = F.relu if kind == "seq2seq" else F.gelu
        memory = theirs(memory, n * mask)
    x = model.embedding(target) + waves[:5] if kind == "seq2seq" else memory[:, :5]
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for n, layer in enumerate(model.decoder, 1):
        theirs = as_torchs(layer, nn.TransformerDecoderLayer)
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

def test_a_method_is_given_its_window_and_the_indices_of_one_period(monkeypatch):
    position = Mock(wraps=L.sinusoids)
    scheme = METHODS["window-cyclic"]._replace(window=2, position=position)
    monkeypatch.setitem(METHODS, "wide", scheme)
    model, tokens = drawn_model(task="parity", method="wide"), drawn_tokens(1, 9)
    model(tokens, tokens)
    assert {len(index) for (_, _, index), _ in position.call_args_list} == {3}
    assert (model.bias(0, "cross", 9, 10) == 0).sum(2).amax() == 3

# 5. Attention Bias Calibration: the papers' formulas as loops over every element ------------------

def offset_of(direction, i, j, width):
    offsets = {1: j - i, 0: j, -1: width - 1 - j - i}
    return offsets[direction]

def drawn_bias(lines, M, blocks):
    bias = torch.full((2, M, sum(blocks)), -INF)
    for line in lines:
        width = blocks[line.block]
        start = sum(blocks[:line.block])
        for i, j in np.ndindex(M, width):
            if offset_of(line.direction, i, j, width) == line.offset:
                place = line.head, i, start + j
                bias[place] = max(bias[place], line.bias)
    return bias

def literal_lines(attention, kappa, groups=((1,), (0,), (-1,)), total=False):
    """The lines of attention (H, m, n), by v1, Eqs. 1 and 2."""
    lines = []
    for (h, weights), group in product(enumerate(attention), groups):
        elements = defaultdict(list)
        for way, (i, j) in product(group, np.ndindex(weights.shape)):
            line = way, offset_of(way, i, j, weights.shape[1])
            elements[line].append(float(weights[i, j]))
        d = {line: sum(x) if total else np.mean(x) for line, x in elements.items()}
        values = list(d.values())
        for (way, offset), value in d.items():
            z = (value - np.mean(values)) / np.std(values)
            if z > kappa:
                lines.append(Line(h, way, 0, offset, value - max(values), z))
    return lines

@parametrize("M", [5, 12])
@parametrize("rules, of_self, of_cross", [
    ("v1", dict(kappa=4), dict(kappa=4)),
    ("v2", dict(kappa=0.87, groups=((1, 0, -1),)),
     dict(kappa=4.5, groups=((1, 0, -1),))),
    ("code", dict(kappa=0.87, groups=((1,),), total=True),
     dict(kappa=4.5, groups=((-1,),), total=True))])
def test_lines_are_those_of_the_papers_at_any_size(double, rules, of_self, of_cross, M):
    """In a run, those of the last layer's first 8 rows. Rows without a line see every key."""
    own = torch.rand(2, 2, 62, 62)
    cross = torch.rand(2, 2, 62, 124)
    own[1, 0, range(8), range(8)] += 1
    cross[1, 1, range(8), range(120, 112, -1)] += 1
    config = small(rules=rules)
    bias = L.CalibratedBias(config, list(L.calibrate(config, (own, cross))))
    for kind, maps, rule in ("self", own, of_self), ("cross", cross, of_cross):
        attention, N = maps[1, :, :8], M if kind == "self" else 2 * M
        plain = drawn_bias(literal_lines(attention, **rule), M, [N])
        assert plain.isfinite().any()
        causal = plain + (causal_bias(M) if kind == "self" else 0)
        for expected in plain, causal:
            expected[expected.isneginf().all(2)] = 0
        assert_close(abc_bias(attention, M, N, rules, **rule), plain)
        for layer in 0, 1:
            assert_close(bias(layer, kind, M, N), causal, atol=0.005, rtol=0)

def test_uniform_attention_opens_the_first_key_alone():
    for n in 23, 3:  # of three columns, no diagonal counts
        bias = abc_bias(torch.full((2, 11, n), 1 / n), 20, 30)
        assert bias[:, :, 0].isfinite().all()
        assert bias.isfinite().sum() == 40

def test_what_cannot_be_calibrated_is_refused():
    attention = torch.rand(2, 3, 7)
    for bad in attention[0], attention / 0, (9 * attention).long():
        with raises(ValueError, match="attention is"):
            abc_bias(bad, 5, 11)
    for blocks in [(3, 5), (4, 5)], [(0, 1), (7, 10)], [(8, 12), (-1, -1)]:
        with raises(ValueError, match="blocks add up to 7 and 11"):
            abc_bias(attention, 5, 11, blocks=blocks)
    with raises(ValueError, match="rules: 'v9' is none of"):
        abc_bias(attention, 5, 11, "v9")
    config, own = one_layer("addition", n_head=4), torch.rand(1, 4, 8, 8)
    for cross, why in ((torch.rand(1, 4, 8, 18), "no 18 columns of cross-attention"),
                       (torch.rand(1, 4, 8, 19) / 0, "of finite floats")):
        with raises(BadInput, match=why):
            choose_lines(config, (own, cross))
    with raises(BadInput, match="no examples to average"):
        average_attention(None, torch.zeros(0, 9), torch.zeros(0, 9))

@parametrize("T", [20, 101, 130])
@parametrize("task", TASKS)
def test_biases_of_a_run_are_its_lines_at_every_length(double, task, T):
    """Rows without a line see the first key alone. Beyond 100 rows there are pieces."""
    ones = ["1"] * len(TASKS[task].operands)
    question, _ = example(task, *ones, width=T - 1)
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
        found = bias(layer, kind, T, sum(sizes))
        joined = torch.full_like(expected, -INF)
        for rows, keys, piece in bias.in_pieces(layer, kind, T, sum(sizes)):
            joined[:, rows[:, None], keys] = piece
        assert torch.equal(found, expected) and torch.equal(joined, expected)

def test_layers_and_numbers_have_lines_of_their_own(monkeypatch):
    """They run as the task's places do. A vertical inside a number means nothing. Attention is of
    `$0123456789+0123456789&`."""
    own = torch.full((2, 2, 11, 11), 0.01)
    cross = torch.full((2, 2, 11, 23), 0.01)
    own[0, 0].diagonal(-1).fill_(1)
    own[0, 1, 8:].fill_diagonal_(1)  # in rows that training never fills
    cross[0, 1, range(9), range(19, 10, -1)] = 1  # in the second number
    cross[1, 1, :, 5] = 1  # inside the first number
    cross[1, 1, :, 11] = 1  # at the sign, where the second number begins
    expected = [(0, 0, "self", 1, 0, -1), (0, 1, "cross", -1, 1, 2), (1, 1, "cross", 0, 1, 0)]
    lines = L.calibrate(small(width=10), (own, cross))
    assert [(line.layer, line.head) + line.path for line in lines] == expected
    monkeypatch.setitem(TASKS, "addition", TASKS["addition"]._replace(msd_first=True))
    cross[0, 0, range(9), range(2, 11)] = 1  # it runs as the places do now
    lines = L.calibrate(small(width=10), (own, cross))
    found = {(line.layer, line.head) + line.path for line in lines}
    assert found >= {expected[0], (0, 0, "cross", 1, 0, 2), expected[2]}
    assert not any(direction == -1 for _, _, _, direction, *_ in found)

def test_attention_is_averaged_over_right_examples_alone(double):
    model, source = drawn_model(dropout=0.5), drawn_tokens(7, 19)
    target, own, cross = L.generate(model, source, 9), [], []
    target[2:5, 3] += 1
    for n in 0, 1, 5, 6:
        model(source[n, None], target[n, None, :-1])
        own.append(torch.cat([layer.self_attention.weights for layer in model.decoder]))
        cross.append(torch.cat([layer.cross_attention.weights for layer in model.decoder]))
    expected = torch.stack(own).mean(0), torch.stack(cross).mean(0)
    assert_close(average_attention(model.train(), source, target), expected)
    targets = torch.cat([target[:1], target[:, [0] * 10].repeat(30, 1)])  # one is right
    with raises(BadInput, match="an answer has 8 rows or more"):
        list(L.calibrate(one_layer(n_head=2), [torch.ones(1, 2, 7, 7)] * 2))
    with raises(RunFailed, match="fewer than 1% of examples"):
        average_attention(model, source.repeat(31, 1)[:211], targets)

# 6. Proof: what a row sees, told by random weights; every short question, one by one --------------

def one_layer(task="successor", method="abc", **options):
    given = dict(task=task, method=method, n_layer=1, n_encoder=0)
    return small(**given | options)

def windows_of(config, lines):
    return enumerate_windows(config, make_bias(config, lines))

def deciding(task):
    """Lines of two heads, which look at a place and at the one below it, of every number."""
    lines, operands, offset = [], TASKS[task].operands, 0
    if TASKS[task].msd_first:
        offset = 1  # a number has the symbol on its left
    for head in 0, 1:
        if task != "addition":  # the token before a row is in its window anyway
            lines.append(Line(head, 1, 0, 0, 0.0, 3.0, attention="self"))
        for block in range(operands.count("number")):
            bias = -0.2 if block and task == "subtraction" else -0.1  # tells the second apart
            lines.append(Line(head, 2 * offset - 1, block, offset - head, bias, 3.0))
    if "digit" in operands:
        lines.append(Line(offset, 0, 2, 0, -0.3, 3.0))
    return lines

# Lines that no task needs; one crosses the first of `deciding` in the last row, one is in row 1.
STRAY = [Line(0, -1, 0, 1, -0.2, 9.0), Line(0, 1, 0, -1, -0.1, 2.5, attention="self")]
CROSSING = [Line(0, 0, 0, 0, -0.05, 2.0), Line(1, -1, 1, -1, -0.1, 2.0)]
AVERAGING = [Line(1, -1, 0, -2, -0.1, 2.0)]  # of two digits; equal ones look like one

@pytest.fixture
def narrow(more_tasks, monkeypatch):
    """All tasks in base 4, or 3, with training numbers of 2 or 3 digits: few questions."""
    monkeypatch.setattr(L, "LIMIT", 5)
    for task, spec in TASKS.items():
        base = min(spec.base, 5 - len(spec.operands))
        monkeypatch.setitem(TASKS, task, spec._replace(base=base))

def reader(config, lines):
    """A model with random weights. Its logits, in float64, tell every key that a row sees."""
    model = drawn_model(**config.values).double()
    for name, weight in model.named_parameters():
        if ".q." in name or ".k." in name:
            weight.data *= 0.1
    if lines is not None:
        model.bias.lines = lines
    return model

def tokens_to_write(model, questions):
    """-> of each view, told by its logits, the tokens that rows which have it must write."""
    found = defaultdict(set)
    for source, target, *_ in questions:
        views = model(source, target[:, :-1]).detach().round(decimals=6).flatten(0, 1)
        for view, token in zip(views.tolist(), target[:, 1:].flatten().tolist()):
            found[tuple(view)].add(token)
    return found

def encoded(config, width, questions):
    texts = [written(config.task, width, numbers, config.align) for numbers in questions]
    return [torch.stack(list(map(encode, side))) for side in zip(*texts)]

@parametrize("task, method, stray", [(x, "abc", []) for x in ANSWERS if x != "parity-label"] + [
    ("successor", "abc", STRAY), ("successor", "abc", CROSSING), ("successor", "abc", AVERAGING),
    ("successor", "window-cyclic", None), ("nx1", "window-cyclic", None),
    ("parity", "window-nope", None)])
def test_windows_are_those_that_all_short_questions_show(narrow, task, method, stray):
    """At each width that is enumerated every question, one by one. Longer ones show no others."""
    config = one_layer(task, method)
    lines = None if stray is None else deciding(task) + stray
    model, windows = reader(config, lines), windows_of(config, lines)
    assert windows.why == ""
    tokens = tokens_to_write(model, windows.questions)
    assert len(tokens) == len(windows.seen)  # none is there twice
    assert {len(needed) for needed in tokens.values()} == {1}
    every = []
    for width in {target.shape[1] - 2 for _, target, _ in windows.questions}:
        every.append(encoded(config, width, every_question(task, width)))
    assert tokens_to_write(model, every) == tokens
    for length, draw in product((8, 20, 60), (draw_exact, draw_hard)):
        drawn = draw_questions(config, draw, length, 60)
        assert tokens_to_write(model, [drawn]).items() <= tokens.items()

def shown(config, bias, questions):
    """-> the views, as bytes, of all rows of questions."""
    views = set()
    for source, target, rows in questions:
        found = L.views_of_rows(config, bias, source, target, rows)
        views |= {view.tobytes() for view in found.flatten(0, 1).numpy()}
    return views

def test_windows_of_random_tasks_are_those_that_longer_questions_show(monkeypatch):
    """200 of each width that is enumerated and of the next seven, or all; tasks are tables, of both
    orders, half with columns without an answer. Heads may tell numbers apart or not."""
    monkeypatch.setattr(L, "LIMIT", 4)
    schemes = [METHODS["window-nope"]._replace(window=2), METHODS["window-cyclic"],
               METHODS["abc"], METHODS["abc"]._replace(position=L.sinusoids, period=2)]
    checked = Counter()
    for number in range(80):
        draw = random.Random(number)
        operands = ("number",) * draw.randint(1, 2)
        base, n_carry = draw.randint(2, 4 - len(operands)), draw.randint(1, 3)
        n_number, scheme = len(operands), schemes[number % 4]
        operands += ("digit",) * draw.randint(0, 2)
        table = torch.randint(base * n_carry, [n_carry] + [base] * len(operands))
        if number % 5 == 0:  # carries take turns
            for carry in range(n_carry):
                table[carry] = (carry + 1) % n_carry * base + carry % base
        holes = torch.rand(table.shape) < 0.2 * (number % 8 > 3)
        msd_first = scheme.calibrated and draw.random() < 0.5
        monkeypatch.setitem(TASKS, "random", Task(
            "", lambda *given: (torch.where(holes[given], -1, table[given] % base),
                                table[given] // base),
            operands, "+", base, headroom=draw.randint(0, 2), msd_first=msd_first))
        monkeypatch.setitem(METHODS, "drawn", scheme._replace(n_width=1))
        config, short, lines = one_layer("random", "drawn"), set(), []
        for head, block in product((0, 1), range(n_number)):
            offset = draw.randint(-2, 2) + msd_first
            lines.append(Line(head, 2 * msd_first - 1, block, offset, -0.1 * head, 1.0))
        bias = make_bias(config, lines)
        questions = list(L.short_questions(config, bias))
        with contextlib.suppress(BadInput):  # no answer
            widest = max([target.shape[1] - 2 for _, target, _ in questions], default=0)
            short = shown(config, bias, questions)
            for width in range(config.widths[0], widest + 8):
                length = width - config.spec.headroom
                source, target = draw_questions(config, draw_hard, length, 200)
                assert shown(config, bias, [(source, target, range(width + 1))]) <= short
            checked[msd_first, number % 4] += 1
    assert min(checked.values()) > 3 and len(checked) == 6

@parametrize("n_number, n_digit", list(product((1, 2), (0, 1, 2, 6))))
def test_windows_of_an_own_bias_are_those_of_the_places_that_it_opens(
        monkeypatch, n_number, n_digit):
    """Which are two of each number, wherever it stands, and single digits; by each question."""
    monkeypatch.setattr(L, "LIMIT", 2)
    operands = ("number",) * n_number + ("digit",) * n_digit
    monkeypatch.setitem(TASKS, "sum", Task(
        "", lambda carry, *digits: carry + sum(digits), operands, "+", base=2, headroom=0))
    def own(config, layer, attention, T, S):
        bias = torch.full((2, T, S), -INF)
        last = S - 2 - 2 * n_digit  # column of the last digit of the last number
        for row, head, block in product(range(T), (0, 1), range(n_number)):
            column = last - block * T - row + head
            if attention == "self":
                column = row
            if column > 0:
                bias[head, row, column] = -0.1 * block
        if attention == "cross":
            bias[1, :, last + 2::2] = 0
        return bias
    monkeypatch.setitem(METHODS, "own", L.Method("", bias=own, window=1))
    config = one_layer("sum", "own")
    config.align = False
    bias = make_bias(config, ())
    questions = list(L.short_questions(config, bias))
    widest = max(target.shape[1] - 2 for _, target, _ in questions)
    short, every = shown(config, bias, questions), set()
    for width in range(config.widths[0], widest + 3):
        bits = torch.arange(width * n_number + n_digit)
        numbers = torch.arange(2 ** len(bits))
        if len(bits) > 12:
            numbers = torch.randint(2 ** len(bits), (5000,))
        columns = numbers[:, None] >> bits & 1
        numbers = columns[:, n_digit:].view(-1, width, n_number)
        single = columns[:, None, :n_digit].expand(-1, width, -1)
        source, target = L.arrange(config.spec, torch.cat([numbers, single], 2))
        every |= shown(config, bias, [(source, target, range(width + 1))])
    assert every == short if n_number + n_digit < 4 else every <= short

def anywhere(row, T, S):
    return range(S)

def at_its_place(row, T, S):
    return [S - 2 - row]

@parametrize("opened", [
    anywhere, lambda row, T, S: [S - 2 - row // 2], lambda row, T, S: [1 + row],
    lambda row, T, S: [S - 2 - row] + [S - 1] * (row == 15),
    lambda row, T, S: [S - 2 - row + T % 2], lambda row, T, S: [S - 2 - row, max(0, S - 40)],
    lambda row, T, S: [S - 2 - row] + [S // 2] * (T == 33)])
def test_a_bias_that_shows_no_fixed_places_is_not_enumerated(monkeypatch, opened):
    def own(config, layer, attention, T, S):
        bias = torch.full((1, T, S), -INF)
        if attention == "cross":
            for row in range(T):
                bias[0, row, opened(row, T, S)] = 0
        return bias
    monkeypatch.setitem(METHODS, "own", L.Method("", bias=own, window=1))
    config = one_layer(method="own")
    why = enumerate_windows(config, make_bias(config, ())).why
    assert why.startswith("no proof: keys are open at no fixed distance from the row, or farther")
    opened = at_its_place
    assert "look the same" in enumerate_windows(config, make_bias(config, ())).why

def test_rows_near_an_end_may_see_other_places(monkeypatch):
    """The first row sees one place more; a class that changes a calibrated bias; another shape."""
    class Dims(L.CalibratedBias):
        def forward(self, layer, attention, T, S):
            bias = super().forward(layer, attention, T, S).clone()
            bias[:, :, :S // 2] -= 0.5
            return bias
    def sees_more(config, layer, attention, T, S):
        bias = L.window_bias(1, T, S, attention == "cross")
        if attention == "cross":
            bias[0, 0, S - 3] = 0
        return bias[0]
    monkeypatch.setattr(L, "LIMIT", 5)
    addition = TASKS["addition"]._replace(base=2)
    monkeypatch.setitem(TASKS, "addition", addition)
    monkeypatch.setitem(METHODS, "more", METHODS["window-nope"]._replace(bias=sees_more))
    monkeypatch.setitem(METHODS, "dims", METHODS["abc"]._replace(bias=Dims))
    lines = [Line(0, -1, block, -n, -0.1 * n, 1.0) for block in (0, 1) for n in (0, 1)]
    for task, method in ("successor", "more"), ("addition", "dims"):
        config = one_layer(task, method)
        bias = make_bias(config, lines)
        short = shown(config, bias, L.short_questions(config, bias))
        for length in 6, 7, 8, 20, 60:
            source, target = draw_questions(config, draw_hard, length, 2000 // length)
            assert shown(config, bias, [(source, target, range(target.shape[1] - 1))]) <= short
    monkeypatch.setitem(METHODS, "more", METHODS["window-nope"]._replace(bias=lambda *given: [()]))
    config = one_layer(method="more")
    assert "in pieces" in enumerate_windows(config, make_bias(config, ())).why

def test_what_follows_no_answer_does_not_count(monkeypatch):
    """Here a carry of 5, with which 9 would be 14. Other negative digits are none."""
    def total(carry, a):
        return torch.where(a == 7, -1, a + carry), torch.where(a == 7, 5, 0)
    monkeypatch.setitem(TASKS, "odd", Task("a copy without 7", total))
    source, _ = draw_questions(one_layer("odd"), draw_exact, 3, 50)
    assert len(source) == 50 and not (source == 7).any()
    monkeypatch.setitem(TASKS, "odd", Task("odd", lambda carry, a: (a - 3, 0)))
    with raises(BadInput, match="odd: an answer has a digit that base 10 does not have"):
        L.follow_carries(TASKS["odd"], ())

def test_shares_that_rounding_hides_are_refused():
    """A hand-set model can attend to a key that has a bias of -40."""
    for bias in -40.0, -13.0:
        lines = deciding("successor") + [Line(0, -1, 0, 3, bias, 1.0)]
        why = windows_of(one_layer(), lines).why
        assert why == ("no proof: a bias leaves an open key less than 1e-06 of the attention"
                       if bias == -40 else "")
    for path in (-1, 1, -9), (1, 0, 0), (0, 0, 2):  # in one row; as the places do not run; in them
        line = Line(0, *path, 0.0, 1.0)
        assert "at no fixed distance" in windows_of(one_layer(), deciding("successor") + [line]).why

def test_lines_are_dealt_to_heads_and_numbers_may_share_one(monkeypatch):
    """In a + b + c; in a + b - c the order of numbers matters."""
    crowd = [Line(h, -1, block, offset, -0.3, 1.0 + h - block - 5 * offset)
             for h in (0, 1) for block in (0, 1) for offset in (0, -1)]
    crowd += [Line(3, 0, 2, 0, -0.2, 9.0), Line(3, 1, 0, 0, -0.2, 2.0, attention="self")]
    vertical, diagonal = (0, "cross", 0, 2, 0, 0.0), (0, "self", 1, 0, 0, 0.0)
    found = {(line.head, *line.path, line.bias) for line in L.deal_lines(crowd, 2)}
    assert found == {vertical, diagonal, (1, "cross", -1, 0, -1, 0.0),
                     (0, "cross", -1, 1, -1, -1.1), (1, "cross", -1, 0, 0, -1.1),
                     (0, "cross", -1, 1, 0, -2.2)}
    found = {(line.head, *line.path, line.bias) for line in L.deal_lines(crowd, 2, share=True)}
    assert found == {vertical, diagonal, (1, "cross", -1, 0, -1, 0.0), (1, "cross", -1, 1, -1, 0.0),
                     (0, "cross", -1, 0, 0, -1.1), (0, "cross", -1, 1, 0, -1.1)}
    monkeypatch.setattr(L, "TOO_MANY", 2 ** 15)
    own, cross = torch.full((1, 4, 12, 12), 0.1), torch.full((1, 4, 12, 37), 0.1)
    for block, head, row in product(range(3), (0, 1), range(12)):
        cross[0, head, row, 12 * block + min(11 - row + head, 11)] += 1 + 0.2 * block
    for sign, clash in (1, False), (-1, True):
        three = Task("", lambda carry, a, b, c: a + b + sign * c + carry, ("number",) * 3, "+", 4)
        monkeypatch.setitem(TASKS, "three", three)
        _, lines, windows = choose_lines(one_layer("three", n_head=4), (own, cross))
        assert ("too many" in windows.why) == ("look the same" in windows.why) == clash
        assert clash or len(windows.seen) == 1223

@parametrize("task, method, n_line", [
    ("successor", "abc", 3), ("addition", "abc", 3),  # lines, too few
    ("addition", "window-cyclic", 0), ("successor", "window-nope", 0)])
def test_two_questions_that_look_the_same_to_a_row_are_named(narrow, task, method, n_line):
    config = one_layer(task, method)
    lines = deciding(task)[:n_line] or None
    source, target = draw_questions(config, draw_exact, 8, 300)
    pool = [(source, target, range(target.shape[1] - 1))]
    pooled = L.collect_windows(config, make_bias(config, lines), pool)
    for windows in windows_of(config, lines), pooled:
        tokens = tokens_to_write(reader(config, lines), windows.clash)
        words = windows.why.split()
        assert words[0:3:2] == [decode(source[0]) for source, _ in windows.clash]
        named = set(encode(words[-3] + words[-1]).tolist())
        assert len(named) == 2
        assert any(named <= needed for needed in tokens.values())

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
    monkeypatch.setattr(L, "TOO_MANY", 9999)
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

def test_the_fewest_lines_that_determine_the_answer_are_kept_or_a_run_fails(monkeypatch):
    """What stands out most is not needed, the weakest is. A small pool misleads at first."""
    monkeypatch.setattr(L, "draw_questions", lambda *given: draw_questions(*given[:3], 1))
    maps = planted({1: 0.6, 0: 0.503, -1: 0.3})
    kappa, lines, windows = choose_lines(one_layer(), maps)
    paths = {("cross", -1, 0, 0), ("cross", -1, 0, -1), ("self", 1, 0, 0)}  # of a row's own token
    assert {line.path for line in lines} == paths
    assert kappa == 0.15  # below (0.4 - 0.3) / 0.6, as mu is 0.3 and sigma * sqrt(7 - 1) is 0.6
    assert all(line.bias == round(line.bias, 2) for line in lines)
    assert len(windows.seen) == 212
    maps = planted({0: 5.0, -1: 0.02})  # one line lifts the mean above the other
    kappa, lines, _ = choose_lines(one_layer(), maps)
    assert kappa == -0.2 and {line.path for line in lines} == paths
    monkeypatch.setattr(L, "KAPPAS", L.KAPPAS[:5])
    with raises(RunFailed, match=r"the answer: \S+ and \S+ look the same to a row"):
        choose_lines(one_layer(), maps)
    with raises(BadInput, match="--n-head"):
        choose_lines(one_layer(n_head=4), maps)

@parametrize("rows, margin", [
    ([[5.0, 3.0, 4.0], [3.0, 0.0, 0.0]], 1.0),  # the least lead over all others
    ([[0.51, 0.0], [0.49, 0.0], [0.1, 0.0]], 0.49),  # the first in doubt ends it
    ([[500.0, 499.0]], 1.0),
    ([[900.0, 899.0]], 0.6),  # less what a thousandth of the largest logit has above 0.5
    ([[9.0, 0.0, -INF]], 9.0),  # a token that is ruled out
    ([], None), ([[9.0, math.nan]], None), ([[9.0, 0.0, INF]], None)])
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

def test_the_proof_of_a_model_agrees_with_every_question_of_three_digits(trained):
    """Also if a weight is spoiled. A question that is named with a negative lead is wrong."""
    folder, record = trained["successor"]
    model, config, _ = load(folder)
    windows, found = enumerate_windows(config, model.bias), Counter()
    assert prove(model, windows).items() <= record["proof"].items()
    questions = encoded(config, 7, product(range(1000)))
    for digit, change in product(range(10), (0.1, 9.0)):
        other = copy.deepcopy(model)
        other.embedding.weight.data[digit, 5] += change
        proof = prove(other, windows)
        found[proof["proved"]] += 1
        if proof["proved"]:
            assert L.right_tokens(other, *questions).all()
        elif proof["margin"] < 0:
            number = int(re.search(r"\$(\d+)&", proof["why"])[1])
            assert L.ask(other, config, str(number)) != str(number + 1)
            found["wrong"] += 1
    assert min(found[True], found[False], found["wrong"]) >= 4

def test_a_proof_says_what_stands_in_its_way(trained, monkeypatch):
    """Two questions that no weights tell apart; none that can be drawn; a key that is all but
    closed. What is printed is JSON, also if a row shows a window that was not listed."""
    model, config, _ = load(trained["successor"][0])
    windows = enumerate_windows(config, model.bias)
    clash = enumerate_windows(config, make_bias(config, model.bias.lines[:1]))
    assert prove(model, clash)["why"].startswith("refuted for any weights: $")
    for error in BadInput("none"), RunFailed("none"):
        with patch.object(L, "draw_questions", side_effect=error):
            assert prove(model, windows)["why"].startswith("not proved: none; more steps")
    windows.seen.popitem()
    proof = json.loads(json.dumps(prove(model, windows), allow_nan=False))
    assert proof["drift"] is None and "windows that were not listed" in proof["why"]

def test_tests_that_fail_end_a_proof(trained, command):
    """A model that is right on windows and wrong on numbers has been proved by wrong code."""
    wrong = dict(rows=[dict(digits=60, set="random", n=9, correct=7, places=[])], seconds=1)
    shutil.copytree(trained["parity"][0], "run")
    Path("run/result.json").unlink()
    with patch.object(L, "evaluate", return_value=wrong):
        assert "proof     right on all windows, but wrong in 2 tests" in command("--from=run")[1]
    assert not load("run")[2]["proof"]["proved"]
    assert not json.loads(Path("run/result.json").read_text())["proof"]["proved"]

class Learned(nn.Module):
    """A bias inside a window that is learned, as README lets methods have."""
    def __init__(self, config):
        super().__init__()
        self.inside = nn.Parameter(torch.zeros(2))

    def forward(self, layer, attention, T, S):
        if attention == "self":  # the model makes it causal
            near = torch.arange(T)[:, None] - torch.arange(T)
            return torch.zeros(1, T, T).masked_fill(near.abs() > 1, -INF)
        bias = L.window_bias(1, T, S, True)
        here = torch.arange(T)[:, None] + torch.arange(S) == S - 2
        return bias + torch.where(here, *self.inside)

def test_a_bias_that_is_learned_is_read_again_after_training(monkeypatch):
    monkeypatch.setitem(METHODS, "learned", L.Method("", bias=Learned, window=1))
    config = one_layer("parity", "learned")
    def learn(run, model, *given):
        nn.init.constant_(model.bias.inside[:1], 0.5)
        return dict(proved=False, why="not proved: drift")
    proofs = []
    def prove_again(model, windows):
        views = set(windows.seen)
        proofs.append(views)
        return dict(proved=True)
    with patch.object(L, "train", learn), patch.object(L, "prove", prove_again):
        assert L.learn_method(Run(config, {}))["proved"]
    model = Transformer(config)
    before = enumerate_windows(config, model.bias)
    assert before.why == "" and len(before.seen) == len(proofs[0]) and set(before.seen) != proofs[0]

def test_a_proof_looks_at_longer_questions(trained):
    """Other pieces, weights or NaN, a bias of the length or another at odd lengths are seen."""
    model, config, _ = load(trained["successor"][0])
    windows = enumerate_windows(config, model.bias)
    logits = torch.cat([model(source, target[:, :-1])[:, row].detach()
                        for source, target, [row] in windows.questions])
    assert measure_drift(model, windows, logits) < 1e-5
    pieces, forward = model.bias.in_pieces, model.bias.forward
    def shifted(*given, size=None):
        for rows, keys, bias in pieces(*given, size=size):
            yield rows, keys, bias if size else bias.roll(1, 2)
    def uneven(layer, kind, T, S):
        return forward(layer, kind, T, S).roll(T % 2, 2)
    for name, changed, lengths in (
            ("in_pieces", shifted, (20, 60)), ("forward", uneven, (20, 60, 1000))):
        with patch.object(model.bias, name, changed):
            assert measure_drift(model, windows, logits) == INF
            assert measure_drift(model, windows, logits, lengths) < 1e-5
    with patch.object(model.bias, "forward", lambda *given: forward(*given) * math.log(given[2])):
        assert "windows that were not listed" in prove(model, windows)["why"]
    for factor in 1.01, math.nan:
        model.embedding.weight.data *= factor
        assert measure_drift(model, windows, logits) > 0.05

# 7. Training and evaluation: torch's optimizers, a step that is replayed, killed runs -------------

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
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
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

@parametrize("only_matrices", [False, True])
def test_weights_that_are_frozen_later_stay(only_matrices):
    run, model, data = new_run("seq2seq")
    for weight in model.parameters():
        weight.requires_grad_(weight.dim() == 2 or not only_matrices)
    model.embedding.requires_grad_(not only_matrices)
    model.head.requires_grad_(not only_matrices)
    optimizer, batch = Optimizer(model, run.config), data.batch(1)
    take_step(model, optimizer, *batch)
    model.decoder.requires_grad_(False)
    frozen = copy.deepcopy(model.decoder.state_dict())
    other = model.encoder[0].feed_forward[0].weight.clone()
    for _ in range(3):
        take_step(model, optimizer, *batch)
    assert_close(model.decoder.state_dict(), frozen, rtol=0, atol=0)
    assert not torch.allclose(model.encoder[0].feed_forward[0].weight, other)

@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_keeps_its_latest_attention():
    model, first, second = drawn_model(one_layer, method="vanilla"), *drawn_tokens(2, 2, 9)
    model(second, second)
    expected = model.decoder[0].self_attention.weights
    model(first, first)
    model.compile(backend="eager")
    model(second, second)
    assert_close(model.decoder[0].self_attention.weights, expected)

def test_matrices_are_those_of_linear_layers_by_any_name():
    run, model, _ = new_run("seq2seq")
    model.other = model.decoder
    model.other[0].inner = nn.Embedding(16, 16)
    del model.decoder
    stacks = Optimizer(model, run.config).stacks
    assert len(stacks[16, 16]) == 4 + 2 * 8

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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    draws, hard, state = [], [], L.RANDOM.getstate()
    config = small(lengths=(60,), samples=9)
    for names in "0a1", "0a2", "0b1", "1a1", "0a1":
        with seeded(*names):
            draws.append(torch.rand(1).item())
            hard.append(L.draw_tests(config, 60)["hard"][0])
    assert len(set(draws)) == 4
    assert draws[0] == draws[4]
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
    run = Run(config.replace(**options), given)
    return run, L.learn_abc(run)

def test_rates_rise_then_fall_and_short_numbers_come_first():
    """Half of the first numbers are below 1.6% of the range; a retraining draws uniformly."""
    config = small(task="successor", batch=4000)
    first, again = data_of(config, 300), data_of(config, 300, first=False)
    for data, step, half in (first, 0, 2 ** 14), (first, 300, 2 ** 19), (again, 0, 2 ** 19):
        assert np.median(numbers_of(data.batch(step)[0])) == approx(half, rel=0.3)
    torch.set_default_dtype(torch.bfloat16)
    numbers = numbers_of(again.batch(0)[0])
    torch.set_default_dtype(torch.float32)
    assert len(set(numbers)) > 3900
    assert [first.rate(n) for n in (15, 181, 241)] == [0.5, 1, 0.5]
    assert [again.rate(n) for n in (31, 151)] == [0.9, 0.5]
    assert data_of(small(preset="paper"), 300).rate(1) == 1
    pairs, data = new_run("pairs")[2], encoder_data(encoder(), 1, 0, 400)
    assert pairs.rate(9) == 1
    assert pairs.batch(1)[0].shape == (8, 5)
    assert [data.rate(n) for n in (50, 200, 400)] == approx([0.481, 0.5, 0], abs=1e-3)

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
    average = Mock(wraps=average_attention)
    monkeypatch.setattr(L, "average_attention", average)
    def watch(module, inputs):
        if isinstance(module, Transformer):
            seen[module.training].update(numbers_of(inputs[0]))
    with nn.modules.module.register_module_forward_pre_hook(watch):
        abc_run(trained, ["attention"], steps=5, retrain_steps=5, batch=300)
        abc_run(trained, ["vanilla"], retrain_steps=1)
    seen[True].update(numbers_of(average.call_args.args[1]))
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
    parts, options = {"attention": parts["attention"]}, dict(retrain_steps=5, dropout=0.1)
    learn, config = L.learn_abc, config.replace(steps=6, **options)
    if kind == "encoder":
        learn, config = L.learn_encoder, encoder(batch=8, steps=9, finetune=6, **options)
    parts["example"] = L.example_of(config)
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

def test_a_run_that_has_lines_keeps_them(trained):
    """Windows are theirs: with one line more there are 2,122; without a needed one some clash."""
    chosen = trained["successor"][1]["lines"]
    fewer = [line for line in chosen if line["offset"] != -1]
    for lines, windows in ([STRAY[0]._asdict()] + chosen, 2122), (fewer, None):
        more = dict(lines=dict(kappa=0.7, lines=lines))
        run, proof = abc_run(trained, ["vanilla", "attention"], more, retrain_steps=1)
        assert (proof["kappa"], proof.get("windows")) == (0.7, windows)
        assert run.parts["lines"]["lines"] == lines
        assert ("look the same to a row" in proof["why"]) == (windows is None)
        if windows is None:  # there is no second attempt
            assert proof["lines"] == lines and proof["attempt"] == 1
        run.parts["proof"] = proof
        kept = L.build(run).bias.lines
        assert [line._asdict() for line in kept] == proof["lines"]

class Adds(nn.Module):
    """It is right, but for the last but one digit of the answer where a number ends in 7."""
    right = ()
    def forward(self, source, target):
        answer = F.pad(target[:, 1:], (0, 1), value=L.VOCAB.index("&"))
        wrong = source[:, -2] == 7
        answer[wrong, 1] += 1
        self.right += (len(wrong) - wrong.sum().item(),)
        return F.one_hot(answer)

def test_right_answers_and_places_are_counted():
    model = Adds()
    rows = L.evaluate(model, small(task="successor", lengths=(9, 5), samples=300))["rows"]
    assert [(row["digits"], row["set"]) for row in rows] == [
        (9, "random"), (9, "hard"), (5, "random")]
    for row, right in zip(rows, model.right, strict=True):
        assert row["correct"] == right and row["n"] == 300
        assert row["places"][:2] == [1, approx(right / 300, abs=1e-4)]
        assert len(row["places"]) == max(7, row["digits"] + 1)  # END has none
    [long] = L.evaluate(model, small(task="successor", lengths=(101,), samples=201))["rows"]
    assert long["n"] == 200 and L.percent(1999 / 2000) == "99.9%"

@parametrize("method", ["rope", "abc"])
def test_a_model_trains_after_inference_mode_autocast_and_export(method):
    @torch.inference_mode()
    def infer(model, batch):
        model(batch[0], batch[1])
    autocast = torch.autocast("cpu", torch.bfloat16)(infer)
    for width, use in (40, infer), (41, torch.export.export), (42, autocast):
        model = drawn_model(method=method, width=width)
        source, target = batch_of(model.config, 8, torch.arange(1000))
        use(model, (source, target[:, :-1]))
        optimizer = Optimizer(model, model.config)
        assert take_step(model, optimizer, source, target).isfinite()

def test_the_callers_random_state_is_as_without_the_call(trained):
    model, config, parts = load(trained["successor"][0])
    encoders, numbers = (new_run(x, steps=2)[0] for x in ("encoder", "seq2seq"))
    before = torch.get_rng_state()
    L.evaluate(model, config)
    L.build(Run(config, parts))
    L.learn_encoder(encoders)
    L.learn_method(numbers)
    abc_run(trained, ["vanilla"])
    assert torch.equal(torch.get_rng_state(), before)

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
    for same in model, restored, loaded, copy.deepcopy(model):
        assert torch.equal(same(tokens, tokens), expected)
    with raises(RuntimeError):
        other = "nope" if method == "abc" else "abc"
        drawn_model(method=other).load_state_dict(model.state_dict())

# 8. Consecutive pairs: labels by brute force, both hypotheses of the source -----------------------

@parametrize("d_vocab, B, length", [(16, 500, 5), (2 ** 16, 1, 40_000)])
def test_labels_say_whether_a_neighbor_is_there(d_vocab, B, length):
    config = Config("consecutive", d_vocab=d_vocab, dummy=True)
    source, target = L.draw_pairs(config, B, length)
    for row, labels in zip(source.tolist(), target[:, 1:].tolist()):
        dummy, *integers = row
        there = set(integers)
        assert dummy == d_vocab
        assert labels == [x - 1 in there or x + 1 in there for x in integers]

@parametrize("V", [5, 32])
@parametrize("hypothesis", ["1a", "2"])
@torch.no_grad()
def test_hypotheses_of_the_source_are_solutions(double, hypothesis, V):
    """1a: a query is 1 at both neighbors, a key at itself. 2: even queries, odd keys in order on
    half a circle, others opposite. Each neighbor outweighs the dummy, which outweighs all else."""
    integers = torch.arange(V)
    near = (integers - integers[:, None]).abs() == 1
    query, key = near.double(), torch.eye(V)
    if hypothesis == "2":
        angle = integers * math.pi * (1 + 1 / (V + 1))  # a bit more than half a turn each time
        query = torch.stack([angle.cos(), angle.sin()], 1)
        key = -query
    scores, D = query @ key.T, query.shape[1]
    low, high = scores[near].min(), scores[~near].max()
    sharp = 8 / (low - high)
    config = Config("consecutive", d_vocab=V, d_model=V + 1, d_head=D, dummy=True)
    model = L.PairsHead(config)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    nn.init.eye_(model.embedding.weight)  # the last is the dummy
    head = model.attention
    head.q.weight[:, :V] = query.T * math.sqrt(D)
    head.k.weight[:, :V] = key.T * sharp
    head.v.weight[0, :V] = 1
    head.v.weight[0, V] = -(sharp * (low + high) / 2).exp()
    head.out.weight[0, 0] = 1
    source, target = L.draw_pairs(config, 5000, 5)
    assert L.right_tokens(model, source, target).all()

# 9. Encoders: Python's integers, Jelassi's examples, torch's layers -------------------------------

@parametrize("modulus", [None, 2, 100, 101, 10 ** 9])
@parametrize("task, width, most", [
    ("addition", 7, 8), ("elementwise-addition", 36, 36),
    ("multiplication", 5, 10), ("multiplication", 36, 72)])
def test_questions_of_encoders_are_answered_by_pythons_integers(task, width, most, modulus):
    """As 12@+39@ and $51@@."""
    config = encoder(task=task, width=width, lengths=(width,), train_digits=1, modulus=modulus)
    pairs = [(10 ** width - 1, 10 ** width - 1), (7, 3)]
    with seeded("pairs"):
        pairs += L.draw_integers(config, [width] * 60)
    source, target = L.arrange_encoder(config, pairs)
    sign = "*" if task == "multiplication" else "+"
    for (a, b), question, found in zip(pairs, source, target):
        answer, least, size = a * b if sign == "*" else a + b, 1, most
        if task == "elementwise-addition":
            least = len(str(max(a, b)))
            units = [10 ** n for n in range(least)]
            answer = sum((a // unit + b // unit) % 10 * unit for unit in units)
        if modulus:
            answer, least, size = answer % modulus, len(str(modulus - 1)), 0
        assert decode(question) == f"{a:@<{width}}{sign}{b:@<{width}}"
        assert decode(found) == "$" + str(answer).zfill(least).ljust(size, "@")

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
    assert abs(len(long) - 500) < 100
    assert len(set(long)) == 10
    assert 0 < sum(a > 999_999 for a, _ in set(long)) < 10
    drawn = {b for a, b in questions if a <= 999}
    assert max(drawn) <= second <= 3 * len(drawn)
    assert min(taught(config, 0, 6))[0] > 999  # of fine-tuning
    with patch.object(L, "encoder_data", side_effect=RunFailed) as drawn, raises(RunFailed):
        L.learn_encoder(Run(config.replace(examples=40, prime=10), {}))
    assert drawn.call_args.args[1:3] == (30, 10)
    for preset, share in ("fast", 1 / 3), ("paper", 9 / 999):  # lengths, or numbers, are uniform
        short = [a for a, _ in taught(encoder(preset=preset), 2000) if a < 10]
        assert len(short) / 2000 == approx(share, abs=0.05)
    data = encoder_data(config, 5, 5, 9)
    with patch.object(L, "evaluate", return_value=dict(rows=[])) as evaluated:
        data.check(None)
    assert evaluated.call_args.args[1].width == config.width  # it is not derived again

# 10. Command line: exit codes, one line for bad input ---------------------------------------------

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
    for wrong in (dict(sign=""), dict(sign="&"), dict(base=12), dict(operands=("digit", "number")),
                  dict(base=2, headroom=44)):  # numbers are drawn as integers of 64 bits
        monkeypatch.setitem(TASKS, "odd", TASKS["addition"]._replace(**wrong))
        with raises(BadInput, match="--task: odd"):
            Config("odd")
    monkeypatch.setitem(TASKS, "odd", TASKS["successor"]._replace(msd_first=True))
    with raises(BadInput, match="--method: window-nope reads from the last digit on"):
        Config("odd", method="window-nope")

@parametrize("task, answer", [("division", "43"), ("subtraction", "126"), ("copy", "00129")])
def test_answers_are_read_in_the_order_of_the_task(more_tasks, task, answer):
    def generate(model, source, limit):
        return written_target
    question = dict(division="00129/3", subtraction="129 - 3", copy="00129")[task]
    config = Config(task)
    operands = re.split(r"\W+", question)
    written_target = encode(example(task, *operands, width=config.widths[0])[1])[None]
    with patch.object(L, "generate", generate):
        assert L.ask(None, config, question) == answer

def test_the_list_names_all_tasks_methods_and_models(command, monkeypatch):
    monkeypatch.setitem(TASKS, "a%b", TASKS["successor"]._replace(about="100% n"))
    listed = set(command("--list")[1].split())
    assert listed >= {"consecutive", *TASKS, *L.ENCODER_TASKS, *METHODS, *L.KINDS}
    assert command("--task=a%b --help")[0] == 0

def test_positions_that_are_not_there_cost_one_line(command):
    command(f"{SHORT} --method=ape --out=run")
    assert len(L.LearnedPositions(small())("source", torch.arange(4096))) == 4096
    assert_refused(command("--from=run --quiet --ask=" + "9" * 5000), "4096 learned positions")

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

def test_weights_that_are_no_numbers_and_other_precisions(trained, monkeypatch):
    """A run whose weights became NaN in its last step fails; one is loaded in any precision."""
    folder, _ = trained["parity"]
    torch.set_default_dtype(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), raises(BadInput, match="answers otherwise|damaged"):
        config, parts = read_checkpoint(folder)
        parts["logits"] = None
        parts["model"]["weights"]["head.weight"] *= 2
        L.build(Run(config, parts))
    torch.set_default_dtype(torch.float32)
    config, parts = read_checkpoint(folder)
    parts["model"]["weights"]["head.bias"][0] = math.nan
    with raises(RunFailed, match="the weights are not finite"):
        L.build(Run(config, parts))

def test_a_redefinition_that_few_questions_show_is_seen(tmp_path):
    """Of addition at one of 200 combinations of a carry and two digits, which no example has."""
    config = Config("addition")
    source, target, *others = L.example_of(config)
    Run(config, {}, tmp_path).keep(example=[source, target, *others])
    seen = set()
    for question in map(decode, source):
        a, b = question[1:-1].split("+")
        seen |= set(zip(a, b))
    a, b = next(pair for pair in product("987654321", repeat=2) if pair not in seen)
    def total(carry, x, y):
        return x + y + carry + ((x == int(a)) & (y == int(b)) & (carry == 1)).long()
    with patch.dict(TASKS, addition=TASKS["addition"]._replace(total=total)):
        assert torch.equal(target, L.example_of(config)[1])
        with raises(BadInput, match="addition had other questions or answers"):
            read_checkpoint(tmp_path)
    for change in dict(headroom=2), dict(first=1), dict(total=lambda carry, a, b: (a, carry + 1)):
        with patch.dict(TASKS, addition=TASKS["addition"]._replace(**change)):
            with raises(BadInput, match="addition had other|gave no question"):
                read_checkpoint(tmp_path)
    Run(config, {}, tmp_path).keep(example=[source, target, *others])
    read_checkpoint(tmp_path)

def test_a_checkpoint_is_of_the_task_that_was_trained(tmp_path):
    """Values that were derived when the run was made, such as widths, are not derived again."""
    for task in "successor", "multiplication", "consecutive", "addition":
        config = Config(task)
        Run(config, {}, tmp_path).keep(example=L.example_of(config), part=1)
        assert read_checkpoint(tmp_path)[1]["part"] == 1
    for changes in dict(sign="*"), dict(total=TASKS["nx1"].total):
        with patch.dict(TASKS, addition=TASKS["addition"]._replace(**changes)):
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
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    state["parts"]["model"]["weights"]["head.weight"] *= -1
    del state["parts"]["model"]["logits"]  # which are of the other weights
    torch.save(state, "checkpoint.pt")
    assert "not proved" in command(f"--from=. --samples=5 {QUIET}")[1]

def test_a_full_disk_costs_one_line_and_no_output(command, monkeypatch):
    make_record, (_, most) = L.make_record, resource.getrlimit(resource.RLIMIT_FSIZE)
    def fill(run, tests):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        return make_record(run, tests)
    monkeypatch.setattr(L, "make_record", fill)
    code, out, lines = command(f"{NOPE} --out=run")
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert "tests" in out and not Path("run/result.json").exists()
    assert_refused((code, "", lines), "File too large")

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
    ("successor", {0: 1, " 0041 ": 42, "9" * 60: 10 ** 60}),
    ("addition", {"0+0": 0, "9 + 0001": 10, "9" * 60 + "+1": 10 ** 60}),
    ("nx1", {"7*0": 0, "0012 * 7": 84, "9" * 60 + "*9": 9 * 10 ** 60 - 9}),
    ("parity", {"1011": 1001, "0010": 1110})])
def test_the_newest_run_answers_as_pythons_integers_do_after_symbols_were_added(
        trained, command, monkeypatch, task, answers):
    monkeypatch.setattr(L, "VOCAB", L.VOCAB + "-")
    Path("runs/older").mkdir(parents=True)
    Path("runs/older/result.json").touch()
    shutil.copytree(trained[task][0], "runs/newer")
    os.utime("runs/newer/result.json")
    _, out, _ = command("--ask", answers)
    assert out.split() == list(map(str, answers.values()))
    assert L.ask(*load("runs/newer")[:2], list(map(str, answers))) == out.split()

@parametrize("arguments, values", [
    ("--from=x --ask=1", dict(steps=350)),
    ("--model=encoder", dict(steps=16_000)),  # of addition, its first task
    ("--task=addition --model=universal --preset=paper",
     dict(steps=2343750, retrain_steps=1000, width=20))])
def test_help_names_options_and_their_values(command, arguments, values):
    """Jelassi, Sec. 2.2, has 15,000 epochs of 5,000 examples, 32 a step."""
    out = command(f"{arguments} --help")[1]
    for name, value in values.items():
        assert f"'{name}': {value}," in out
    assert "\n--lr " in out and "\n--ask " in out

@parametrize("arguments", [f"addition --method={x}" for x in METHODS if x != "abc"] + [
    "consecutive", "addition --model=universal",
    "addition --model=encoder --method=rpe-kq --finetune=6 --retrain-steps=2"])
def test_a_record_makes_its_run_again(command, capsys, arguments):
    _, out, _ = command(f"{SHORT} --json --task={arguments}")
    record = json.loads(out)
    assert record.keys() >= {"config", "train", "lines", "proof", "tests"}
    L.execute(Run(Config(**record["config"]), {}), as_json=True)
    again = json.loads(capsys.readouterr().out)
    assert again["tests"]["rows"] == record["tests"]["rows"]
    assert again["train"]["model"]["curve"] == record["train"]["model"]["curve"]

def test_default_runs_are_exact_and_say_so_and_others_say_what_to_try(trained):
    for task, (_, record) in copy.deepcopy(trained).items():
        text = "\n".join(L.summary(record))
        question, answer = re.search(f"{task}, abc, seed 0: (.*) -> (.*)\n", text).groups()
        base = TASKS[task].base
        numbers = [int(x, base) for x in re.split(r"\D", question)]
        assert ANSWERS[task](20, *numbers) == int(answer, base)
        assert "exact at every" in text
        assert " 60  100.0%" in text
        assert all(row["correct"] == row["n"] for row in record["tests"]["rows"])
    record["proof"].update(proved=False, why="so")
    record["train"]["vanilla"]["curve"][-1][2] = 0.6
    found = "\n".join(L.summary(record))
    assert "60.0%; raise --steps\n" in found
    assert "proof     so; kappa" in found

def test_the_summary_shows_its_example_as_it_is_asked_and_few_rows_of_lines(trained):
    for task, pattern in ("nx1", r"\d+\*\d -> \d+"), ("addition", r"\d+\+\d+ -> \d+"):
        config = Config(task, method="window-nope")
        text = L.example_as_numbers(Run(config, dict(example=L.example_of(config))))
        assert re.fullmatch(pattern, text)
    record = copy.deepcopy(trained["successor"][1])
    record["lines"] = [Line(0, 1, 0, offset, 0.0, 1.0, layer)._asdict()
                       for layer in range(6) for offset in range(50)]
    rows = [row for row in L.summary(record) if row.startswith("  ")]
    assert rows[0].startswith("  layer 1,2,3,4,5,6 cross head 1: diagonal")
    assert rows[40] == "  10 more in result.json" and "  layer" not in rows[41]

def test_shares_right_are_counted_without_rounding():
    """In float32, 997 of 1,000 is below .997, so that 99.6% would be printed."""
    data = data_of(small(task="successor"), 9)
    with patch.object(L, "right_tokens", return_value=torch.arange(1000)[:, None] > 2):
        [share] = data.check(None)
    assert L.percent(share) == "99.7%"

@parametrize("arguments", [
    "--task=multiplication --lengths=1", "--task=multiplication --lengths=3"])
def test_encoders_of_few_digits_run(command, arguments):
    options = "--d-model=16 --n-head=2 --batch=8 --steps=2 --samples=5 --examples=9"
    assert command(f"{options} --train-digits=1 {QUIET} {arguments}")[0] == 0

def test_a_run_whose_method_changed_is_refused(trained, command, monkeypatch):
    folder, _ = trained["parity"]
    assert command(f"--from={folder} --ask=101")[1] == "011\n"
    monkeypatch.setitem(METHODS, "abc", METHODS["abc"]._replace(position=L.sinusoids))
    assert_refused(command(f"--from={folder} --ask=101 --quiet"), "has its method changed?")
    monkeypatch.setitem(METHODS, "abc", METHODS["abc"]._replace(position=L.LearnedPositions))
    assert_refused(command(f"--from={folder} --ask=101 --quiet"), "method or VOCAB changed?")

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
    changes = {"(69.4": "README.md", ", 1 of 10 of a": "README.md", "985 were right": "README.md",
               "| 100 -> ": "results/README.md", "| 25 of 25 |": "results/README.md"}
    for number, name in changes.items():
        for page in "README.md", "results/README.md":
            text = (HERE / page).read_text(encoding="utf-8")
            (tmp_path / page).write_text(text.replace(number, "?") if page == name else text)
        assert report.main([]) == 1
    assert report.main(["--write"]) == report.main([]) == 0

def test_records_that_differ_in_an_option_are_kept_apart(capsys, monkeypatch):
    from results import pictures, report
    records, pyplot, axes = [], Mock(), Mock()
    for seed, n_layer, digits, correct in (0, 1, 6, 10), (1, 1, 6, 8), (0, 6, 6, 0), (0, 1, 9, 5):
        config = dict(task="nx1", method="t5", seed=seed, n_layer=n_layer, lengths=[digits])
        tests = dict(rows=[dict(digits=digits, set="random", n=10, correct=correct)])
        records.append(dict(config=config, tests=tests))
    monkeypatch.setattr(report, "read_lines", lambda path: records)
    assert report.main(["file"]) == 0
    assert capsys.readouterr().out.splitlines()[5:] == [
        "| t5 | n_layer=1 lengths=[6] | 90 (80 - 100) | - | 0 | 2 | 10 |",
        "| t5 | n_layer=6 lengths=[6] | 0 | - | 0 | 1 | 10 |",
        "| t5 | n_layer=1 lengths=[9] | - | 50 | 0 | 1 | 10 |"]
    assert raises(ValueError, report.cells, "6 of file")
    axes.plot.return_value = [Mock()]
    pyplot.subplots.return_value = Mock(), axes
    pictures.draw_accuracy(pyplot, records)
    assert [x.args for x in axes.plot.mock_calls] == [([6], [90]), ([6], [0]), ([9], [50])]

class Oracle:
    """Answers to a calculator's questions, by Python's integers."""
    def ask(self, task, pairs):
        of = dict(addition=int.__add__, subtraction=int.__sub__, nx1=int.__mul__,
                  division=int.__floordiv__)
        numbers = [(int(a), int(b)) for a, b in pairs]
        assert task != "subtraction" or all(a >= b for a, b in numbers)
        assert task not in ("nx1", "division") or all(len(b) == 1 for _, b in pairs)
        return [str(of[task](a, b)) for a, b in numbers]

def drawn_expression(draw, depth):
    if depth == 0 or draw.random() < 0.2:
        digits = "".join(draw.choices(draw.choice(["0123456789", "09"]), k=draw.randint(1, 20)))
        return draw.choice(["", "-"]) + digits
    left, right = (drawn_expression(draw, depth - 1) for _ in range(2))
    return f"({left}) {draw.choice(['+', '-', '*', '//', '/', '%'])} ({right})"

def test_a_calculator_agrees_with_pythons_integers():
    from results import calculator
    draw, right = random.Random(0), Counter()
    for _ in range(400):
        text = drawn_expression(draw, 3)
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
    assert right["-"] > 50 and right["n"] > 5

@parametrize("text", [
    "1/0", "2**3", "1.5", "a", "__import__('os')", "1 +", "(" * 999, "1 2", "0x1F"])
def test_what_cannot_be_calculated_costs_one_line(capsys, monkeypatch, text):
    from results import calculator
    monkeypatch.setattr(calculator, "define_tasks", lambda: None)
    monkeypatch.setattr(calculator, "train", Mock(side_effect=AssertionError))
    assert calculator.main([text]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1

def test_a_calculator_asks_models_in_batches(trained, monkeypatch):
    """Of any length. What is no number is refused."""
    from results import calculator
    monkeypatch.setattr(calculator, "define_tasks", lambda: None)
    monkeypatch.setattr(calculator, "train", lambda task: load(trained[task][0])[:2])
    models = calculator.Models()
    assert models.ask("addition", [("7", "0005"), ("9" * 80, "1")]) == ["12", "1" + "0" * 80]
    a, b = "37" * 25, "73" * 25
    assert calculator.calculate(models, f"{a} * {b} + 0") == str(int(a) * int(b))
    assert models.questions < 60 and models.batches == 1 + 1 + 6 + 1
    with patch.object(L, "generate", lambda model, source, limit: encode("$1+2&")[None]):
        with raises(RunFailed, match="addition: the model wrote '1[+]2', not 7 digits"):
            models.ask("addition", [("1", "2")])

@parametrize("task, method, option, most", [
    ("successor", "abacus", "width", 924), ("parity", "abacus", "lengths", 1023),
    ("nx1", "coupling", "width", 923), ("addition", "coupling", "lengths", 1021),
    ("nx1", "randomized", "width", 1020), ("addition", "randomized", "width", 510)])
def test_numbers_beyond_the_positions_are_refused(command, task, method, option, most):
    from results import schemes  # as many digits as are allowed have positions, from any start on
    config = Config(task, method=method, **{option: most})
    model = Transformer(config).train(option == "width")
    source, target = draw_questions(config, draw_exact, max(config.lengths), 1)
    with patch.object(torch, "randint", lambda n, size: torch.tensor(n - 1)):
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

@parametrize("start", ["", "unset BASHPID"])  # which macOS lacks
def test_a_list_fails_by_its_own_lines_alone(tmp_path, start):
    shutil.copy(HERE / "run_all.sh", tmp_path)
    stub = 'echo {}; case "$*" in *fails*) exit 1;; *meanwhile*) ./run_all.sh good;; esac'
    lists = "good 0-1 a\nbad 0-0 fails\nbad 0-0 meanwhile\n"
    (tmp_path / "results").mkdir()
    for name, text in ("runs.txt", lists), ("start", start), ("python", f"#!/bin/sh\n{stub}\n"):
        (tmp_path / "results" / name).write_text(text)
    (tmp_path / "results/python").chmod(0o755)
    there = dict(PATH=f"{tmp_path}/results:{os.environ['PATH']}", BASH_ENV="results/start")
    run = subprocess.run([tmp_path / "run_all.sh", "bad"], env=os.environ | there, cwd=tmp_path)
    assert run.returncode == 1
    assert (tmp_path / "runs/records/good.jsonl").stat().st_size == 6

# The long checks: python -m pytest -q -m check ----------------------------------------------------

@pytest.mark.check
def test_25_kills_and_the_same_weights(tmp_path):
    draw, folder, gone_on = random.Random(0), tmp_path / "killed", 0
    flags = f"-m lengen {QUIET}"
    start = f"{flags} --task=addition --method=nope --steps=6000 --samples=5"
    whole = process(f"{start} --out={tmp_path / 'whole'}".split())
    for seconds in [draw.uniform(3, 8) for _ in range(25)] + [None]:
        arguments = f"{flags} --from={folder}"
        if (folder / "checkpoint.pt").exists():
            gone_on += not (folder / "result.json").exists()
        else:
            shutil.rmtree(folder, ignore_errors=True)
            arguments = f"{start} --out={folder}"
        run = process(arguments.split())
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(seconds)
        run.kill()
        run.wait()
    whole.wait()
    found, expected = (load(tmp_path / x)[0].state_dict() for x in ("killed", "whole"))
    assert_close(found, expected, rtol=0, atol=0)
    assert gone_on >= 10

@pytest.mark.check
def test_long_numbers_take_less_than_three_gigabytes(trained):
    """A dense bias of 10,000 digits has 4 * 10^8 entries, 1.6 GB, for each attention."""
    folder, _ = trained["successor"]
    arguments = f"-m lengen --from={folder} --lengths=10000,1000000 --samples=1 --json"
    run = process(arguments.split())
    rows = json.loads(run.communicate()[0])["tests"]["rows"]
    assert [row["correct"] for row in rows] == [1, 1]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 3 * 2 ** 20
