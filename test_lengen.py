# SPDX-License-Identifier: MIT
"""Tests of lengen.py against oracles that are not lengen.py: Python's integers, torch's own modules
and optimizers, published numbers, and the formulas of the papers written as plain loops.

Sections are those of lengen.py. Tests run over L.TASKS, L.METHODS and L.SYSTEMS: a new entry is
tested by being there; give a new task its line in ANSWERS."""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
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
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.testing import assert_close

import lengen as L

HERE = Path(__file__).resolve().parent
README = (HERE / "README.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
INF = float("inf")
torch.set_num_threads(1)  # the models are small
ANSWERING = list(L.TASKS)
ENCODING = list(L.ENCODER_TASKS)
CALIBRATED = [method for method in L.METHODS if L.METHODS[method].calibrated]

BOTH = dict(n_head=2, d_model=16, batch=4, steps=3, samples=4)
SMALL = {
    "seq2seq": dict(BOTH, method="vanilla", n_encoder=1, n_layer=2, lengths=(3,)),
    "encoder": dict(BOTH, n_encoder=2, dropout=0.0, lengths=(4,), n_train=20, train_digits=3),
    "head": dict(d_model=8, d_head=4, batch=8, steps=3, samples=5)}

def small(model="seq2seq", **options):
    """Options of a small model; its task is the first that the model learns: `--list` names it."""
    options.setdefault("task", next(iter(L.SYSTEMS[model].tasks)))
    options = SMALL["encoder" if model == "universal" else model] | options
    if model != "head":
        options.setdefault("retrain_steps", 3)
    if options["task"] == "multiplication":
        options.setdefault("second_digits", 2)
    return L.Config(model=model, **options)

def learned(config, parts=None, **more):
    """A run of these options, done."""
    run = L.Run(config, None, parts, **more)
    L.SYSTEMS[config.model].learn(run)
    return run

def as_flags(options):
    """A Config, or some options, as arguments of the command line."""
    given = options if isinstance(options, dict) else dataclasses.asdict(options)
    flags = []
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if value is True:
            flags.append(L.flag(name))
        elif value is not False and text:
            flags.append(f"{L.flag(name)}={text}")
    return flags

@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)

@pytest.fixture
def double():
    """Tensors have float64 by default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """A command of the command line, in an empty folder -> exit code, output, lines of errors but
    the one that small models have learned little."""
    def run(*arguments):
        capsys.readouterr()
        code = L.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        told = [line for line in err.splitlines() if not line.endswith("right; raise --steps")]
        return code, out, told
    monkeypatch.chdir(tmp_path)
    return run

def assert_refused(result, named=""):
    """Exit code 2 and one line that names what is wrong."""
    code, out, err = result
    assert code == 2 and out == "", result
    assert len(err) == 1 and len(err[0]) < 600, result
    assert err[0].startswith("lengen: ") and named in err[0], result

# -----
# 1. Tasks: answers are those of Python's integers, at 1 to 200 digits and in every base

def running(modulus):
    """-> function: digit i of the answer is the sum of the last i + 1 digits, modulo `modulus`."""
    def answer(width, a, base=10):
        digits = [a // base ** i % base for i in range(width)]
        return sum(sum(digits[:i + 1]) % modulus * base ** i for i in range(width))
    return answer

ANSWERS = {  # width, numbers -> the answer as an integer; a question with a negative one is none
    "successor": lambda width, a: a + 1,
    "addition": lambda width, a, b: a + b,
    "nx1": lambda width, a, b: a * b,
    "parity": lambda width, a: running(2)(width, a, 2),
    "parity-label": lambda width, a: bin(a).count("1") % 2,
    "subtraction": lambda width, a, b: a - b,
    "triple": lambda width, a: 3 * a,
    "remainders": lambda width, a: running(3)(width, a, 4)}
EVERY_TASK = list(ANSWERS)

@pytest.fixture
def more_tasks(monkeypatch):
    """README's subtraction, and two tasks of these tests."""
    monkeypatch.setattr(L, "VOCAB", L.VOCAB)  # what README changes is undone after the test
    monkeypatch.setitem(L.TASKS, "subtraction", None)
    exec(SCRIPTS[1], {})
    monkeypatch.setitem(L.TASKS, "triple", L.Task("3 * a", lambda rest, a: 3 * a + rest))
    monkeypatch.setitem(L.TASKS, "remainders", L.Task(
        "running sum of the digits, modulo 3", lambda rest, a: 5 * ((a + rest) % 3), base=4,
        headroom=0))

def in_base(number, base, width=1):
    """Python integer -> its digits, most significant first."""
    return np.base_repr(number, base).rjust(width, "0")

def written(task, width, *numbers, align=False):
    """The question and its answer as text, from Python integers."""
    spec = L.TASKS[task]
    texts = []
    for number, kind in zip(numbers, spec.operands):
        texts.append(in_base(number, spec.base, width if kind == "number" else 1))
    places = 1 if task == "parity-label" else width
    answer = in_base(ANSWERS[task](width, *numbers), spec.base, places)
    question = spec.sign.join(texts)
    if align:
        question = spec.sign + "".join(map("".join, zip(texts[0], itertools.cycle(texts[1]))))
    return f"${question}&", f"${answer[::-1]}&"

def every_question(task, digits, least=0):
    """-> the numbers of all questions that there are, from `least` to so many digits."""
    base, limits = L.TASKS[task].base, []
    for kind in L.TASKS[task].operands:
        limits.append(range(least, base ** digits) if kind == "number" else range(base))
    return [numbers for numbers in itertools.product(*limits)
            if ANSWERS[task](digits, *numbers) >= 0]

def test_a_digit_is_its_own_token():
    assert L.encode("90&").tolist() == [9, 0, 13]

def test_an_example_of_the_paper():
    assert L.example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&")

def test_aligned_operands_take_turns():
    aligned = L.example("addition", "123", "748", width=4, align=True)
    assert aligned == ("$+00172438&", "$1780&")

def test_an_aligned_digit_is_repeated():
    assert L.example("nx1", "123", "6", width=4, align=True) == ("$*06162636&", "$8370&")

@pytest.mark.parametrize("length", [1, 6, 200])
@pytest.mark.parametrize("base", [4, 10])
@pytest.mark.parametrize("task", EVERY_TASK)
def test_examples_equal_pythons_integers(more_tasks, monkeypatch, task, base, length):
    spec = L.TASKS[task]
    base = min(base, spec.base)
    monkeypatch.setitem(L.TASKS, task, spec._replace(base=base))
    limits = [base ** length if kind == "number" else base for kind in spec.operands]
    largest = [limit - 1 for limit in limits]
    draw = random.Random(length)
    drawn = [draw.randrange(limit) for limit in limits]
    if task == "subtraction":
        drawn.sort(reverse=True)
    for numbers in [0] * len(limits), largest, drawn:
        texts = [in_base(number, base) for number in numbers]
        width = max(map(len, texts)) + spec.headroom
        assert L.example(task, *texts) == written(task, width, *numbers)

@pytest.mark.parametrize("task, operands, width", [
    ("division", ["1"], None),
    ("successor", ["1", "2"], None),
    ("successor", [""], None),
    ("successor", ["+"], None),
    ("parity", ["2"], None),
    ("nx1", ["12", "34"], None),
    ("addition", ["123", "7"], 2),
    ("successor", ["999"], 3),
    ("subtraction", ["5", "7"], None)])
def test_bad_examples_are_refused(more_tasks, task, operands, width):
    with pytest.raises(L.BadInput):
        L.example(task, *operands, width=width)

def test_integers_become_digits():
    assert L.to_digits(torch.tensor([129]), 4).tolist() == [[9, 2, 1, 0]]

@pytest.mark.parametrize("task", ANSWERING)
def test_a_task_is_as_wide_as_its_largest_training_number_and_answer(task):
    spec = L.TASKS[task]
    number = 2 ** 20 - 1
    operands = [number if kind == "number" else 9 for kind in spec.operands]
    answer = ANSWERS[task](20, *operands)
    assert spec.width == len(in_base(max(number, answer), spec.base))

def test_numbers_below_two_to_the_twenty_are_parted_seven_to_one():
    training, held_out = L.split_numbers(3)
    times = torch.bincount(torch.cat([training, held_out]))
    assert times.tolist() == [1] * 2 ** 20
    assert len(training) == 7 * len(held_out)
    assert training.diff().min() > 0  # sorted
    assert held_out.diff().min() > 0

def test_numbers_are_parted_by_the_seed_alone():
    training, _ = L.split_numbers(3)
    assert training.equal(L.split_numbers(3)[0])
    assert not training.equal(L.split_numbers(4)[0])

def numbers_of(task, source):
    """Questions -> their numbers, Python integers."""
    spec, found = L.TASKS[task], []
    for row in source:
        texts = L.decode(row)[1:-1].split(spec.sign or None)
        found.append(tuple(int(text, spec.base) for text in texts))
    return found

@pytest.mark.parametrize("length", [1, 2, 60])
@pytest.mark.parametrize("draw, least", [(L.draw_exact, 1), (L.draw_hard, 0)])
@pytest.mark.parametrize("task", EVERY_TASK)
def test_drawn_questions_are_distinct_and_have_right_answers(more_tasks, task, draw, least, length):
    """Of few questions all are found. The first digit of exact ones is not 0."""
    config, base = small(task=task), L.TASKS[task].base
    source, target = L.draw_questions(config, draw, length, 500)
    numbers = numbers_of(task, source)
    if length < 3:
        least = least * base ** (length - 1)
        exist = every_question(task, length, least)
        assert len(set(numbers)) == min(500, len(exist))
        assert set(numbers) <= set(exist)
    assert len(set(numbers)) == len(numbers) == len(target)
    width = max(config.widths[0], length + L.TASKS[task].headroom)
    for question, answer, given in zip(source, target, numbers):
        assert (L.decode(question), L.decode(answer)) == written(task, width, *given)

@pytest.mark.parametrize("task", EVERY_TASK)
def test_questions_are_learned_with_right_answers(more_tasks, task):
    """What is no question is drawn again."""
    source, target = L.training_batch(small(task=task), torch.arange(1000), 300)
    assert len(source) == 300
    for question, answer, given in zip(source, target, numbers_of(task, source)):
        width = L.TASKS[task].width
        assert (L.decode(question), L.decode(answer)) == written(task, width, *given)

def hard_numbers(task):
    """Of 500 hard questions of 60 digits the first numbers as text, the second ones, ..."""
    found = []
    for kind, digits in zip(L.TASKS[task].operands, L.draw_hard(L.TASKS[task], 60, 500)):
        if kind == "number":
            found.append([L.decode(row) for row in digits.flip(1)])
    return found

@pytest.mark.parametrize("task", ANSWERING)
def test_hard_numbers_have_long_runs_and_zeros_in_front(task):
    zeros = "0" * 30
    highest = str(L.TASKS[task].base - 1) * 30
    for texts in hard_numbers(task):
        assert sum(zeros in text for text in texts) >= 20
        assert sum(highest in text for text in texts) >= 20
        assert sum(text.startswith(zeros) for text in texts) >= 10

def test_hard_numbers_tie_and_carry_through_random_digits():
    alike, nines = [], []
    for first, second in zip(*hard_numbers("addition")):
        if len(set(first)) > 5:  # not of zeros and nines alone
            alike.append(sum(x == y for x, y in zip(first, second)))
            nines.append(sum(int(x) + int(y) == 9 for x, y in zip(first, second)))
    assert max(alike) >= 59
    assert max(nines) >= 59

THREE_NUMBERS = L.Task("a + b + c", lambda rest, a, b, c: a + b + c + rest, ("number",) * 3, "+")

def test_a_task_may_have_three_numbers(monkeypatch):
    monkeypatch.setitem(L.TASKS, "three", THREE_NUMBERS)
    assert L.example("three", "1", "22", "977") == ("$0001+0022+0977&", "$0001&")

@pytest.mark.parametrize("wrong", [dict(sign="?"), dict(operands=("numbr",))])
def test_entries_of_tasks_are_checked_by_name(monkeypatch, wrong):
    monkeypatch.setitem(L.TASKS, "odd", L.TASKS["successor"]._replace(**wrong))
    with pytest.raises(L.BadInput, match="--task: odd"):
        L.Config("odd")

# -----
# 2. Positions and biases: plain loops and published numbers

def test_sinusoids_are_the_formula():
    """Also at positions that have few digits left in float32."""
    positions = [0, 1, 7, 999_999]
    waves = L.sinusoidal(torch.tensor(positions), 5)
    assert waves.dtype == torch.float32
    for t, row in zip(positions, waves.tolist()):
        for channel, found in enumerate(row):
            angle = t / 10000 ** (channel // 2 * 2 / 5)
            wave = math.cos if channel % 2 else math.sin
            assert found == pytest.approx(wave(angle), abs=1e-7)

def test_rope_multiplies_by_complex_numbers(double):
    """Su et al. 2021, Eq. 12: channels 2p and 2p + 1 are one complex number."""
    x = torch.randn(2, 3, 5, 8)
    positions = torch.tensor([0, 1, 5, 77, 9999])
    angles = positions[:, None] * 10000 ** (-torch.arange(0, 8, 2) / 8)
    numbers = torch.view_as_complex(x.unflatten(3, (4, 2)))
    rotated = torch.view_as_real(numbers * torch.exp(1j * angles))
    assert_close(L.rope(x, positions), rotated.flatten(3))

@pytest.mark.parametrize("given", ["q", "q and k"])
def test_relative_scores_are_the_papers_sums(double, given):
    q = torch.randn(2, 3, 5, 4)
    k = torch.randn(2, 3, 8, 4)
    table = torch.randn(5, 4)
    if given == "q":
        k = torch.zeros_like(k)
        found = L.relative_scores(q, table, S=8)
    else:
        found = L.relative_scores(q, table, k)
    for i, j in itertools.product(range(5), range(8)):
        a = table[max(-2, min(2, j - i)) + 2]
        assert_close(found[:, :, i, j], (q[:, :, i] + k[:, :, j]) @ a)

def test_slopes_of_alibi_are_as_published():
    """Those of 14 heads are in the authors' code alone."""
    eight = [2.0 ** -h for h in range(1, 9)]
    more = [0.707107, 0.353553, 0.176777, 0.088388, 0.044194, 0.022097]
    assert L.alibi_slopes(14).tolist() == pytest.approx(eight + more, abs=1e-6)

def test_alibi_falls_with_distance_to_both_sides():
    bias = L.alibi_bias(4, 4, 6)
    for h, slope in enumerate([1 / 4, 1 / 16, 1 / 64, 1 / 256]):
        for i, j in itertools.product(range(4), range(6)):
            assert bias[h, i, j] == -slope * abs(i - j)

def opened(bias):
    """(M, N) -> the open columns of each row."""
    return [row.gt(-INF).nonzero().flatten().tolist() for row in bias]

def test_the_causal_bias_closes_what_comes_later():
    bias = L.causal_bias(3)[0].tolist()
    assert bias == [[0, -INF, -INF], [0, 0, -INF], [0, 0, 0]]

def test_a_window_opens_a_token_and_those_before_it():
    bias = L.window_bias(2, 5, 5)[0]
    assert opened(bias) == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]

def test_a_window_on_the_question_opens_a_digit_and_those_behind_it():
    """Of `$123&`, where rows write 3, 2, 1 and the end."""
    bias = L.window_bias(1, 4, 5, cross=True)[0]
    assert opened(bias) == [[3, 4], [2, 3], [1, 2], [0, 1]]

def test_a_window_on_aligned_operands_opens_pairs():
    """Of `$+a2b2a1b1&`."""
    bias = L.window_bias(1, 3, 7, cross=True, step=2)[0]
    assert opened(bias) == [[4, 5, 6], [2, 3, 4, 5], [0, 1, 2, 3]]

# -----
# 3. Attention: nn.MultiheadAttention and F.scaled_dot_product_attention

def into_torch(ours, theirs):
    """Copy the weights of our attention into nn.MultiheadAttention."""
    parts = ours.q, ours.k, ours.v
    theirs.in_proj_weight.data = torch.cat([part.weight.data for part in parts])
    theirs.in_proj_bias.data = torch.cat([part.bias.data for part in parts])
    theirs.out_proj.load_state_dict(ours.out.state_dict())

def test_attention_with_a_bias_a_head_equals_torchs(double):
    ours = L.MultiHeadAttention(12, 3)
    oracle = nn.MultiheadAttention(12, 3, batch_first=True)
    into_torch(ours, oracle)
    x = torch.randn(2, 4, 12, requires_grad=True)
    memory = torch.randn(2, 6, 12, requires_grad=True)
    bias = torch.randn(3, 4, 6)
    bias[1, 2, 3] = -INF
    mask = bias.repeat(2, 1, 1)  # of each question and head
    expected = oracle(x, memory, memory, attn_mask=mask, average_attn_weights=False)
    found = ours(x, memory, bias)
    assert_close(found, expected)
    gradients = torch.autograd.grad(found[0].square().sum(), [x, memory])
    of_oracle = torch.autograd.grad(expected[0].square().sum(), [x, memory])
    assert_close(gradients, of_oracle)

def in_heads(layer, x):
    """Output of a layer (B, T, 2 * D) -> (B, 2, T, D)."""
    return layer(x).unflatten(2, (2, -1)).transpose(1, 2)

def test_heads_may_have_any_width(double):
    ours = L.MultiHeadAttention(8, 2, d_head=3)
    assert ours.q.out_features == 6
    x = torch.randn(2, 5, 8)
    q, k, v = in_heads(ours.q, x), in_heads(ours.k, x), in_heads(ours.v, x)
    y = F.scaled_dot_product_attention(q, k, v)
    assert_close(ours(x, x)[0], ours.out(y.transpose(1, 2).flatten(2)))

@pytest.mark.parametrize("method", ["rope", "rpe-k", "rpe-kq"])
def test_scores_of_methods_stand_for_the_products_and_are_scaled(double, method):
    ours = L.Transformer(small(method=method)).decoder[0].cross_attention
    x = torch.randn(3, 4, 16)
    memory = torch.randn(3, 5, 16)
    q, k = in_heads(ours.q, x), in_heads(ours.k, memory)
    if method == "rope":
        scores = L.rope(q, torch.arange(4)) @ L.rope(k, torch.arange(5)).mT
    else:
        keys = k if method == "rpe-kq" else None
        scores = q @ k.mT + L.relative_scores(q, ours.scores.table, keys, S=5)
    weights = (scores / math.sqrt(8)).softmax(3)
    assert_close(ours(x, memory)[1], weights)

def test_a_row_that_sees_nothing_is_zero_with_finite_gradients():
    scores = torch.randn(1, 1, 2, 3, requires_grad=True)
    bias = torch.zeros(2, 3)
    bias[1] = -INF
    weights = L.masked_softmax(scores, bias)
    weights.square().sum().backward()
    assert weights[0, 0, 1].eq(0).all()
    assert scores.grad.isfinite().all()

def test_a_bool_mask_is_no_bias():
    with pytest.raises(ValueError, match="-inf closes"):
        L.masked_softmax(torch.zeros(1, 1, 2, 2), torch.ones(2, 2).bool())

def test_open_keys_are_the_dense_bias(double):
    """Some keys are closed, one row has none open, and rows come in two pieces."""
    T, S = 4100, 9
    ours = L.MultiHeadAttention(8, 2)
    x = torch.randn(3, T, 8)
    memory = torch.randn(3, S, 8)
    columns = torch.rand(T, S).argsort(1)[:, :4]
    values = torch.randn(2, T, 4)
    values[torch.rand(2, T, 4) < 0.3] = -INF
    values[1, 2] = -INF
    dense = torch.full((2, T, S), -INF).scatter(2, columns.expand(2, T, 4), values)
    expected, weights = ours(x, memory, dense)
    found, of_keys = ours(x, memory, L.OpenKeys(columns, values))
    assert_close(found, expected)
    assert_close(of_keys, weights.gather(3, columns.expand(3, 2, T, 4)))

# -----
# 4. Transformer: nn.TransformerEncoderLayer and DecoderLayer, and a greedy loop

def some_lines(config):
    """Lines at random: in each layer and head an anti-diagonal, a vertical and a diagonal."""
    draw = random.Random(0)
    blocks = len(L.column_blocks(config.task, 30))
    lines = []

    def add(layer, attention, head, direction, block, offset):
        bias = -draw.random() * draw.choice([0, 1])
        lines.append(L.Line(head, direction, block, offset, bias, 3.0, layer, attention))

    for layer in range(config.n_layer):
        for head in range(config.n_head):
            add(layer, "cross", head, -1, draw.randrange(blocks), draw.randint(-1, 1))
            add(layer, "cross", head, 0, draw.randrange(blocks), 0)
            add(layer, "self", head, 1, 0, draw.randint(-2, 1))
    return lines

def build(config):
    """A model of the method, in evaluation, with weights large enough to see a difference."""
    bias = None
    if config.method in CALIBRATED:
        bias = L.calibrated_bias(config, some_lines(config))
    model = L.Transformer(config, bias).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.5)
    return model

def layer_into_torch(ours, theirs):
    """Copy the weights of our layer into torch's; those of norms are drawn first."""
    into_torch(ours.self_attention, theirs.self_attn)
    if ours.cross_attention:
        into_torch(ours.cross_attention, theirs.multihead_attn)
    theirs.linear1.load_state_dict(ours.feed_forward[0].state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward[3].state_dict())
    for number, norm in enumerate(ours.norms, 1):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())

@pytest.mark.parametrize("preset", ["fast", "paper"])
def test_transformer_equals_torchs_layers(double, preset):
    """With a bias in every attention, another one in each layer."""
    model = build(small(method="nope", n_encoder=2, preset=preset))
    nn.init.normal_(model.norm.weight)

    def bias(layer, kind, T, S):
        return L.alibi_bias(2, T, S) * (1 + layer)

    def mask(layer, T, S):
        return bias(layer, None, T, S).repeat(3, 1, 1)  # for each example

    def as_torchs(ours, kind):
        theirs = kind(16, 2, 64, 0.0, batch_first=True, norm_first=preset == "fast")
        layer_into_torch(ours, theirs)
        return theirs

    source = torch.randint(10, (3, 7))
    memory = model.embedding(source)
    for n, ours in enumerate(model.encoder):
        layer = as_torchs(ours, nn.TransformerEncoderLayer)
        memory = layer(memory, mask(n, 7, 7))
    target = torch.randint(10, (3, 5))
    x = model.embedding(target)
    for n, ours in enumerate(model.decoder):
        layer = as_torchs(ours, nn.TransformerDecoderLayer)
        own = mask(n, 5, 5) + L.causal_bias(5)
        x = layer(x, memory, own, mask(n, 5, 7))
    x = F.layer_norm(x, (16,), model.norm.weight, model.norm.bias)

    model.bias = bias
    assert_close(model(source, target), model.head(x))

def test_long_rows_pass_the_feed_forward_in_pieces(double):
    layer, rows = L.Transformer(small()).encoder[0], []
    x = torch.randn(1, 5000, 16)
    expected = layer.feed_forward(x)
    layer.feed_forward.register_forward_hook(lambda part, given, made: rows.append(len(made[0])))
    assert_close(layer.feed(x), expected)
    assert rows == [4096, 904]

@pytest.mark.parametrize("method", L.METHODS)
def test_scores_of_a_method_are_those_of_every_attention(method):
    for part in L.Transformer(small(method=method)).modules():
        if isinstance(part, L.MultiHeadAttention):
            assert bool(part.scores) == bool(L.METHODS[method].scores)

def test_matrices_start_as_in_the_authors_code():
    """Xavier's bounds, which a uniform draw nearly reaches; embeddings times sqrt(C)."""
    model = L.Transformer(L.Config(preset="paper", n_layer=1))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            bound = math.sqrt(6 / sum(weight.shape))
            if name == "embedding.weight":
                bound *= math.sqrt(128)
            assert 0.95 * bound < weight.abs().max().item() <= bound, name

def test_embeddings_start_as_wide_as_the_method_has_them():
    model = L.Transformer(small(method="window", d_model=512))
    assert model.embedding.weight.std().item() == pytest.approx(1.33, rel=0.05)

def test_dropout_is_on_embeddings_weights_and_sublayers(monkeypatch):
    """Seen in the last axes of what is dropped from: 7 is the source's length, 5 the target's."""
    sizes = []

    def dropout(x, p, *more):
        assert p == 0.5
        sizes.append(x.shape[-1])
        return x

    monkeypatch.setattr(F, "dropout", dropout)
    model = L.Transformer(small(dropout=0.5, n_encoder=0, n_layer=1))
    tokens = torch.ones(2, 7).long()
    model(tokens, tokens[:, :5])
    self_attention, cross_attention, feed_forward = [5, 16], [7, 16], [64, 16]
    assert sizes == [16, 16] + self_attention + cross_attention + feed_forward

@pytest.mark.parametrize("method", L.METHODS)
def test_later_targets_never_change_earlier_logits(double, method):
    model = build(small(method=method))
    source = torch.randint(10, (1, 19))
    target = torch.randint(5, (1, 9))
    before = model(source, target)
    target[:, 5:] += 1
    after = model(source, target)
    assert_close(after[:, :5], before[:, :5], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, 5:], before[:, 5:])

@pytest.mark.parametrize("method", L.METHODS)
def test_only_positions_tell_tokens_of_the_source_apart(double, method):
    spec = L.METHODS[method]
    places = spec.position or spec.scores or spec.bias or spec.calibrated
    model = build(small(method=method))
    source = torch.randint(10, (1, 19))
    target = source[:, :9]
    same = torch.allclose(model(source, target), model(source.flip(1), target))
    assert same == (not places)

@pytest.mark.parametrize("method, side, index", [
    ("vanilla", "source", [0, 1, 2, 3, 4]),
    ("vanilla", "target", [0, 1, 2, 3, 4]),
    # The last column, the end marker, goes with the first row.
    ("window-cyclic", "source", [1, 0, 2, 1, 0]),
    ("window-cyclic", "target", [0, 1, 2, 0, 1]),
])
def test_sinusoids_are_added_to_embeddings(method, side, index):
    model = L.Transformer(small(method=method))
    tokens = torch.arange(5)[None]
    expected = model.embedding(tokens) + L.sinusoidal(torch.tensor(index), 16)
    assert torch.equal(model.eval().embed(tokens, side), expected)

def test_learned_positions_are_added_to_embeddings():
    model = L.Transformer(small(method="ape"))
    tokens = torch.tensor([7, 3, 3])
    expected = model.embedding.weight[tokens] + model.position.weight[:3]
    assert torch.equal(model.embed(tokens[None], "target")[0], expected)

CAUSAL = L.causal_bias(4)

@pytest.mark.parametrize("method, kind, expected", [
    ("nope", "self", CAUSAL),
    ("alibi", "encoder", L.alibi_bias(2, 4, 7)),
    ("alibi", "self", L.alibi_bias(2, 4, 4) + CAUSAL),
    ("alibi", "cross", L.alibi_bias(2, 4, 7)),
    ("alibi-decoder", "encoder", None),
    ("alibi-decoder", "self", L.alibi_bias(2, 4, 4) + CAUSAL),
    ("alibi-decoder", "cross", None),
    ("window", "encoder", None),
    ("window", "self", L.window_bias(1, 4, 4)),
    ("window", "cross", L.window_bias(1, 4, 7, cross=True, step=2)),
])
def test_methods_have_their_bias_of_section_2(method, kind, expected):
    """Windows interleave the numbers of an addition."""
    model = L.Transformer(small(method=method, task="addition"))
    found = model.bias_of(1, kind, 4, 4 if kind == "self" else 7)
    assert_close(found, expected)

@pytest.mark.parametrize("kind, shape", [
    ("self", (2, 4, 4)),
    ("cross", (3, 5, 7)),
    ("cross", (5, 7)),
])
def test_biases_that_do_not_fit_are_named(kind, shape):
    model = L.Transformer(small(method="alibi"), lambda *place: torch.zeros(shape))
    with pytest.raises(ValueError, match=f"{kind} bias of layer 1"):
        model.bias_of(1, kind, 5, 5 if kind == "self" else 7)

MODELS = [("head", {})]
for name in "seq2seq", "encoder":
    for method in L.SYSTEMS[name].options.choices["method"]:
        MODELS.append((name, dict(method=method)))

@pytest.mark.parametrize("model, options", MODELS)
def test_every_model_runs_on_another_device(model, options):
    """torch's meta device, which refuses most operations with tensors of the CPU. With so many
    rows calibrated biases are OpenKeys."""
    config = small(model, **options)
    made = build(config) if model == "seq2seq" else L.SYSTEMS[model].model(config)
    tokens = torch.zeros(2, 110).long()
    logits = made.to("meta")(tokens, tokens[:, :103])
    assert logits.device.type == "meta"
    assert logits.shape[:2] == (2, 103)
    logits.sum().backward()

def greedy(model, source, limit):
    """As everybody writes it: one token after the other."""
    target = torch.full((len(source), 1), L.VOCAB.index("$"))
    for _ in range(limit):
        token = model(source, target)[:, -1].argmax(-1, keepdim=True)
        target = torch.cat([target, token], 1)
    return target

def random_sources(config, n=6):
    return L.draw_questions(config, L.draw_exact, 8, n)[0]

DECODED = [(method, 12) for method in L.METHODS]
DECODED += [(method, 103) for method in CALIBRATED]  # by OpenKeys

@pytest.mark.parametrize("method, limit", DECODED)
def test_decoding_equals_the_greedy_loop(double, method, limit):
    """Without dropout, though the model was left in training."""
    config = small(method=method, dropout=0.5)
    model, source = build(config), random_sources(config, 3)
    expected = greedy(model, source, limit)
    assert len(expected.unique()) > 2  # not one token again and again
    assert torch.equal(L.generate(model.train(), source, limit), expected)

class Counting(nn.Module):
    """A token is the one before it plus 1, from `$`, which is 12, up to 16; a pass settles one."""
    passes = 0

    def forward(self, source, target):
        self.passes += 1
        return F.one_hot((target + 1).clamp(max=16), 20)

def test_decoding_tells_how_far_it_is_and_ends_when_no_token_changes(monkeypatch):
    """Every two seconds; by this clock a pass takes one, and a report another one."""
    clock, told, model = itertools.count(), [], Counting()
    monkeypatch.setattr(L.time, "perf_counter", lambda: next(clock))
    found = L.generate(model, torch.ones(1, 3).long(), 1000, told.append)
    assert found[0, :6].tolist() == [12, 13, 14, 15, 16, 16]
    assert model.passes == 5  # the last changes nothing
    assert told == ["3 tokens of 1,000"]

# -----
# 5. Calibration: Eqs. 1 and 2 of v1, written as loops over every element

def offset_of(direction, i, j, width):
    """The offset of the line through row i and column j."""
    if direction == 1:
        return j - i
    if direction == 0:
        return j
    return width - 1 - j - i

def planted(rows, width, direction, offset):
    """Attention (rows, width) with one strong line."""
    attention = torch.full((rows, width), 0.01)
    for i, j in itertools.product(range(rows), range(width)):
        if offset_of(direction, i, j, width) == offset:
            attention[i, j] = 0.9
    return attention

def draw_lines(lines, H, M, blocks):
    """Lines -> dense bias (H, M, N), element by element."""
    bias = torch.full((H, M, sum(blocks)), -INF)
    for line in lines:
        width, start = blocks[line.block], sum(blocks[:line.block])
        for i, j in itertools.product(range(M), range(width)):
            if offset_of(line.direction, i, j, width) == line.offset:
                place = line.head, i, start + j
                bias[place] = max(bias[place], line.bias)
    return bias

def literal_lines(attention, directions, kappa, together=False, total=False):
    """The lines of attention (H, m, n), element by element in Python's floats."""
    H, m, n = attention.shape
    lines = []
    for h in range(H):
        elements = defaultdict(list)
        for i, j, direction in itertools.product(range(m), range(n), directions):
            line = direction, offset_of(direction, i, j, n)
            elements[line].append(float(attention[h, i, j]))
        d = {}
        for line, values in elements.items():
            d[line] = sum(values) if total else np.mean(values)
        for direction, offset in d:
            others = [x for (way, _), x in d.items() if together or way == direction]
            value = d[direction, offset]
            z = (value - np.mean(others)) / np.std(others)
            if z > kappa:
                lines.append(L.Line(h, direction, 0, offset, value - max(others), z))
    return lines

def assert_same_lines(found, expected):
    """All of each line is the same, but for its layer and attention."""
    for ours, theirs in zip(sorted(found), sorted(expected), strict=True):
        assert ours[:6] == pytest.approx(theirs[:6])

EVERY = (1, 0, -1)

@pytest.mark.parametrize("kappa", [-9, 0.2, 0.5, 1.5, 99])
@pytest.mark.parametrize("directions", [(1,), (0,), (-1,), EVERY])
def test_lines_equal_the_loops_of_the_paper(double, directions, kappa):
    attention = torch.rand(2, 5, 7).square()
    found = L.find_lines(attention, kappa, directions)
    assert_same_lines(found, literal_lines(attention, directions, kappa))

@pytest.mark.parametrize("kappa, offsets", [(0.99, [3]), (1.01, [])])
def test_kappa_is_a_share_of_the_largest_z(kappa, offsets):
    """Of 7 columns one is not 0; it has the largest z that there is, sqrt(7 - 1)."""
    attention = torch.zeros(1, 5, 7)
    attention[:, :, 3] = 1
    lines = L.find_lines(attention, kappa, (0,), of_largest=True)
    assert [line.offset for line in lines] == offsets

@pytest.mark.parametrize("M, N", [(5, 7), (9, 16), (12, 8), (4, 5)])
@pytest.mark.parametrize("kappa", [-9, 1.5])
def test_abc_continues_lines_to_any_size(double, kappa, M, N):
    """Rows without any line see every key by the papers' rules."""
    attention = torch.rand(2, 5, 7)
    lines = literal_lines(attention, EVERY, kappa)
    expected = draw_lines(lines, 2, M, [N])
    expected[expected.isneginf().all(2)] = 0
    found = L.abc_bias(attention, M, N, "paper", kappa=kappa)
    assert_close(found, expected)

def test_lines_of_few_rows_are_not_supported():
    """The mean of a corner is high by chance. Beyond offset 30 lines cross half of the rows or
    fewer."""
    attention = torch.rand(1, 62, 62)
    lines = L.find_lines(attention, -99, (-1,), support=0.5)
    assert [line.offset for line in lines] == list(range(-30, 31))

def test_blocks_continue_each_operand_by_itself():
    """`$dd|+dd|&` to `$dddd|+dddd|&`: row i reads digit i of both numbers, right to left."""
    number = planted(3, 3, -1, 0)
    attention = torch.cat([number, number, torch.zeros(3, 1)], 1)
    blocks = [(3, 5), (3, 5), (1, 1)]
    rule = dict(directions=(-1,), blocks=blocks)
    [bias] = L.abc_bias(attention[None], 5, 11, **rule)
    assert opened(bias) == [[4, 9], [3, 8], [2, 7], [1, 6], [0, 5]]

def test_uniform_attention_has_no_lines():
    """Then the first key is open, by the papers' rules every key that the mask leaves."""
    uniform = torch.full((2, 11, 23), 1 / 23)
    first = L.abc_bias(uniform, 20, 30)
    assert opened(first[1]) == [[0]] * 20
    every = L.abc_bias(uniform, 4, 4, "paper", mask=CAUSAL)
    assert torch.equal(every[1:], CAUSAL)

@pytest.mark.parametrize("options, said", [
    (dict(attention=torch.rand(3, 7)), "attention is"),
    (dict(attention=torch.full((2, 3, 7), INF)), "attention is"),
    (dict(blocks=[(3, 5), (4, 5)]), "blocks add up to"),
    (dict(blocks=[(3, 5), (3, 6)]), "blocks add up to"),
])
def test_calibration_refuses_what_it_cannot_read(options, said):
    given = dict(attention=torch.rand(2, 3, 7)) | options
    with pytest.raises(ValueError, match=said):
        L.abc_bias(M=5, N=11, **given)

def drawn_bias(lines, layer, kind, T, blocks):
    """The lines of one attention as a dense bias (2, T, N), with the causal mask."""
    chosen = [x for x in lines if (x.layer, x.attention) == (layer, kind)]
    bias = draw_lines(chosen, 2, T, blocks)
    if kind == "self":
        bias = bias + L.causal_bias(T)
    return bias

def blocks_of(task, kind, T):
    """Widths of the parts of the columns, where answers have T rows."""
    if kind == "self":
        return [T]
    numbers = [1] * len(L.TASKS[task].operands)
    question, _ = written(task, T - 1, *numbers)
    return L.column_blocks(task, len(question))

@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("T", [20, 100, 101])
@pytest.mark.parametrize("task", ANSWERING)
def test_bias_of_a_run_is_its_lines_at_every_length(double, task, T, kind, layer):
    """Rows without any see the first key. Beyond 100 rows there are OpenKeys, none twice."""
    config = small(task=task, method="abc")
    lines = some_lines(config)[1:]
    blocks = blocks_of(task, kind, T)
    expected = drawn_bias(lines, layer, kind, T, blocks)
    expected[:, :, 0][expected.isneginf().all(2)] = 0
    bias = L.calibrated_bias(config, lines)
    found = bias(layer, kind, T, sum(blocks))
    if T > 100:
        counts = expected.isfinite().sum(2)
        assert torch.equal(found.values.isfinite().sum(2), counts)
        found = L.dense_bias(found.columns, found.values, sum(blocks))
    assert torch.equal(found, expected)

def test_encoders_are_not_calibrated():
    config = small(method="abc")
    bias = L.calibrated_bias(config, some_lines(config))
    assert bias(0, "encoder", 9, 9) is None

@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind, N", [("self", 9), ("cross", 11)])
def test_layers_share_the_last_ones_bias_by_the_papers_rules(layer, kind, N):
    """Without blocks. Rows without any line see every key."""
    config = small(method="abc", rules="paper")
    lines = [x for x in some_lines(config) if x.block == 0]
    expected = drawn_bias(lines, 1, kind, 9, [N])
    expected[expected.isneginf().all(2)] = 0
    bias = L.calibrated_bias(config, lines)
    assert torch.equal(bias(layer, kind, 9, N), expected)

@pytest.mark.parametrize("task, parts", [
    ("addition", "$012|+074|&"),
    ("nx1", "$0123|*|7|&"),
    ("parity", "$0101|&"),
])
def test_columns_are_blocks_of_operands(task, parts):
    expected = [len(part) for part in parts.split("|")]
    assert L.column_blocks(task, sum(expected)) == expected

def test_attention_is_averaged_over_right_examples_alone(double):
    """The weights of the right ones, each asked alone. Without dropout, as in `generate`."""
    model, source = build(small(dropout=0.5)), random_sources(small(), 7)
    target = greedy(model, source, 9)
    target[2:5, 3] += 1
    weights = []  # self, cross of layer 0, self, cross of layer 1; then of the next example

    def keep(part, given, made):
        weights.append(made[1])

    for layer in model.decoder:
        layer.self_attention.register_forward_hook(keep)
        layer.cross_attention.register_forward_hook(keep)
    for row in (0, 1, 5, 6):
        model(source[row:row + 1], target[row:row + 1, :-1])
    own = torch.cat(weights[0::2]).unflatten(0, (4, 2)).mean(0)
    cross = torch.cat(weights[1::2]).unflatten(0, (4, 2)).mean(0)
    found = L.collect_attention(model.train(), source, target, batch=3)
    assert_close(found, (own, cross))

def test_without_a_right_example_there_is_no_attention():
    target = torch.full((6, 10), L.VOCAB.index("@"))
    with pytest.raises(L.RunFailed, match="no example"):
        L.collect_attention(build(small()), random_sources(small()), target)

def planted_maps():
    """Attention of two layers and heads on `$0123456789+0123456789&`, with some lines."""
    own = torch.full((2, 2, 11, 11), 0.01)
    cross = torch.full((2, 2, 11, 23), 0.01)
    own[0, 0] = planted(11, 11, 1, -1)
    own[1, 0] = planted(11, 11, 1, 1)  # closed by the causal mask
    own[1, 1] = planted(11, 11, 0, 2) + planted(11, 11, -1, 0)  # neither are directions here
    cross[0, 0, :, :11] = planted(11, 11, 1, 3)  # nor is this one
    cross[0, 1, :, 11:22] = planted(11, 11, -1, 2)  # in the second number
    cross[1, 1, :, 5] = 0.9  # inside a number
    cross[1, 1, :, 11] = 0.9  # the sign, where the second number begins
    return own, cross

def found_lines(maps):
    """-> (layer, attention, head, direction, block, offset) of each line of an addition."""
    config = small(task="addition", method="abc", width=10)
    found = set()
    for line in L.calibrate(config, maps, 0.5):
        found.add((line.layer, line.attention) + line[:4])
    return found

def test_layers_and_numbers_have_lines_of_their_own():
    assert found_lines(planted_maps()) >= {
        (0, "self", 0, 1, 0, -1),
        (0, "cross", 1, -1, 1, 2),
        (1, "cross", 1, 0, 1, 0),
    }

def test_a_vertical_inside_a_number_means_nothing():
    verticals = [line for line in found_lines(planted_maps()) if line[3] == 0]
    assert verticals == [(1, "cross", 1, 0, 1, 0)]

def test_rows_that_training_never_fills_do_not_count():
    """Numbers below 2^20 have 7 digits and less: 8 rows."""
    own, cross = planted_maps()
    before = found_lines((own, cross))
    own[0, 1, 8:] = torch.eye(11)[8:]
    assert found_lines((own, cross)) == before

@pytest.mark.parametrize("rules, kind, rule", [
    ("paper", "cross", dict(kappa=4, directions=EVERY)),
    ("paper", "self", dict(kappa=4, directions=EVERY)),
    ("v2", "cross", dict(kappa=4.5, directions=EVERY, together=True)),
    ("v2", "self", dict(kappa=0.87, directions=EVERY, together=True)),
    ("code", "cross", dict(kappa=4.5, directions=(-1,), total=True)),
    ("code", "self", dict(kappa=0.87, directions=(1,), total=True)),
])
def test_rules_of_the_sources(double, rules, kind, rule):
    """The lines of the last layer, as the loops find them in the 8 rows that training fills."""
    own = torch.rand(2, 2, 62, 62)
    cross = torch.rand(2, 2, 62, 124)
    filled = dict(self=own, cross=cross)[kind][1, :, :8]
    direction = rule["directions"][-1]
    filled[0] += planted(8, filled.shape[2], direction, 3)
    expected = literal_lines(filled, **rule)
    assert expected
    config = small(task="addition", method="abc", rules=rules)
    lines = L.calibrate(config, (own, cross), None)
    found = [line for line in lines if line.attention == kind]
    assert {line.layer for line in found} == {1}
    assert_same_lines(found, expected)

@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind, N, options", [
    ("self", 20, dict(directions=(1,), mask=L.causal_bias(20))),
    ("cross", 41, dict(directions=(0, -1), blocks=[(11, 20), (11, 20), (1, 1)])),
])
def test_other_models_get_the_bias_of_a_run(layer, kind, N, options):
    """By `abc_bias`, from the 8 rows that training fills, continued to 20."""
    own, cross = planted_maps()
    config = small(task="addition", method="abc", width=10)
    lines = L.calibrate(config, (own, cross), 0.5)
    expected = L.calibrated_bias(config, lines)(layer, kind, 20, N)
    filled = dict(self=own, cross=cross)[kind][layer, :, :8]
    found = L.abc_bias(filled, 20, N, kappa=0.5, **options)
    assert torch.equal(found, expected)

# -----
# 6. Proof: what a row sees, written out in Python; every short question, one by one

PROVABLE = [task for task in EVERY_TASK if task != "parity-label"]

def deciding(task):
    """Two heads; each looks at a place or at the one below it, of every number, with one bias, so
    that it cannot tell which number a digit is of, but with two for a difference."""
    numbers = L.TASKS[task].operands.count("number")
    apart = 0.1 * (task == "subtraction")
    lines = [L.Line(head, 1, 0, 0, 0.0, 3.0, attention="self") for head in (0, 1)]
    for block, head in itertools.product(range(numbers), (0, 1)):
        lines.append(L.Line(head, -1, block, -head, -0.1 - apart * block, 3.0))
    if "digit" in L.TASKS[task].operands:
        lines.append(L.Line(0, 0, numbers + 1, 0, -0.3, 3.0))
    return lines

# Lines that n + 1 does not need.
STRAY = [L.Line(0, -1, 0, 1, -0.2, 9.0), L.Line(1, -1, 0, 2, -0.3, 1.0),
         L.Line(1, 0, 1, 0, 0.0, 2.0), L.Line(0, 1, 0, -1, -0.1, 2.5, attention="self")]

def one_layer(task, method="abc", **options):
    """Options of a small model; by default it has one decoder layer and no encoder."""
    return small(**dict(task=task, method=method, n_layer=1, n_encoder=0) | options)

@pytest.fixture
def narrow(more_tasks, monkeypatch):
    """Training numbers have two or three digits, of base 4, or 3 where there are two operands, so
    that fewer questions are enumerated."""
    monkeypatch.setattr(L, "LIMIT", 5)
    for task, spec in L.TASKS.items():
        base = min(spec.base, 5 - len(spec.operands))
        monkeypatch.setitem(L.TASKS, task, spec._replace(base=base))

def keys_of_lines(config, lines, kind, T, S):
    """-> for each row and head the keys that lines open, as (column, bias)."""
    blocks = [T] if kind == "self" else L.column_blocks(config.task, S)
    chosen = [line for line in lines if line.attention == kind]
    bias = draw_lines(chosen, config.n_head, T, blocks)
    found = []
    for row in range(T):
        last = row if kind == "self" else S - 1
        heads = []
        for head in range(config.n_head):
            keys = [(j, float(bias[head, row, j])) for j in range(last + 1)]
            heads.append([key for key in keys if key[1] > -INF] or [(0, 0.0)])
        found.append(heads)
    return found

PERIODS = {"window-cyclic": 3, "window-nope": 1}  # rows after which positions repeat

def keys_of_window(config, kind, T, S):
    """-> for each row, as if of one head, the last two tokens, or the digits at its place and the
    one before, or the pairs of digits; as (column, index), as far as positions tell the index."""
    step = len(L.TASKS[config.task].operands)
    period = PERIODS[config.method]
    found = []
    for row in range(T):
        if kind == "self":
            keys = [(j, j % period) for j in (row - 1, row) if j >= 0]
        else:  # counted from the end: `&` is 0, the last digit 1
            first = 1 + step * (row - 1)
            inside = range(max(0, first), min(first + 2 * step, S))
            keys = [(S - 1 - j, j % period) for j in inside]
        found.append([keys])
    return found

def views(keys, source, target):
    """-> of each row of each question its view: the token before it, and the tokens at its open
    keys with what goes with these, sorted, of each head. Row 1 of n + 1 on `$12&`, which writes the
    tens behind `$3` and sees its digit, with bias 0, has (3, ((3, 0.0),), ((1, 0.0),)). Windows are
    the views that there can be."""
    T, S = target.shape[1] - 1, source.shape[1]
    own, cross = keys("self", T, T), keys("cross", T, S)
    found = []
    for question, answer in zip(source.tolist(), target.tolist()):
        for row in range(T):
            view = [answer[row]]
            for tokens, heads in (answer, own[row]), (question, cross[row]):
                for visible in heads:
                    view.append(tuple(sorted((tokens[j], mark) for j, mark in visible)))
            found.append(tuple(view))
    return found

def windows_and_keys(config, lines):
    """-> Windows of these lines, or of the method; their open keys, a function of kind, T, S."""
    if config.method in PERIODS:
        return L.windows_of_method(config), functools.partial(keys_of_window, config)
    return L.enumerate_windows(config, lines), functools.partial(keys_of_lines, config, lines)

def tokens_to_write(keys, questions):
    """-> of each view the tokens that rows which have it must write."""
    found = defaultdict(set)
    for source, target in questions:
        tokens = target[:, 1:].flatten().tolist()
        for view, token in zip(views(keys, source, target), tokens):
            found[view].add(token)
    return found

def tokens_of(config, width, questions):
    """Questions, as Python's integers -> source, target."""
    texts = [written(config.task, width, *numbers, align=config.align) for numbers in questions]
    return tuple(torch.stack(list(map(L.encode, side))) for side in zip(*texts))

def assert_clash(config, keys, windows):
    """The two questions of a clash look the same to a row that must write the tokens named."""
    *questions, one, other = re.fullmatch(
        "(.*) and (.*) look the same to a row that must write (.) or (.)", windows.why).groups()
    named, tokens = set(L.encode(one + other).tolist()), tokens_to_write(keys, windows.clash)
    assert len(named) == 2 and any(named <= needed for needed in tokens.values())
    for question, (source, target) in zip(questions, windows.clash, strict=True):
        operands = question.split(L.TASKS[config.task].sign or None)
        texts = L.example(config.task, *operands, width=len(operands[0]), align=config.align)
        assert texts == (L.decode(source[0]), L.decode(target[0]))

DECIDED = [(task, "abc", []) for task in PROVABLE]
DECIDED += [
    ("successor", "abc", STRAY),
    ("successor", "window-cyclic", []),
    ("parity", "window-cyclic", []),
    ("nx1", "window-cyclic", []),
    ("parity", "window-nope", []),
]

@pytest.mark.parametrize("task, method, stray", DECIDED)
def test_windows_are_those_of_all_questions(narrow, task, method, stray):
    """At each width that is enumerated every question, one by one; longer ones show no others."""
    config = one_layer(task, method)
    windows, keys = windows_and_keys(config, deciding(task) + stray)
    assert windows.clash == [] and windows.why == ""
    tokens = tokens_to_write(keys, windows.questions)
    assert len(tokens) == len(windows.views)  # all are told apart, and none is there twice
    assert {len(needed) for needed in tokens.values()} == {1}
    every = []
    for width in {target.shape[1] - 2 for _, target in windows.questions}:
        numbers = every_question(task, width - L.TASKS[task].headroom)
        every.append(tokens_of(config, width, numbers))
    assert tokens_to_write(keys, every) == tokens
    for length, draw in itertools.product((8, 20, 60), (L.draw_exact, L.draw_hard)):
        source, target = L.draw_questions(config, draw, length, 60)
        assert tokens.keys() >= set(views(keys, source, target))

@pytest.mark.parametrize("task", ["successor", "triple"])
def test_in_base_ten_all_short_questions_show_enumerated_windows(more_tasks, task):
    """With zeros in front, at the narrowest width of training."""
    config = one_layer(task)
    windows, keys = windows_and_keys(config, deciding(task))
    every = tokens_to_write(keys, [tokens_of(config, 7, every_question(task, 4))])
    assert every.items() <= tokens_to_write(keys, windows.questions).items()

def shifted(rest, a):
    """Two digits are handed on; the digit of two places below is written."""
    return rest % 4 + 4 * (rest // 4 + 4 * a)

@pytest.mark.parametrize("task, method, left_out", [
    ("successor", "abc", 1),
    ("addition", "abc", 1),
    ("nx1", "abc", 1),
    ("parity", "abc", 2),
    ("shifted", "abc", 0),
    ("addition", "window-cyclic", 0),
    ("addition", "window-nope", 0),
    ("successor", "window-nope", 0),
    ("nx1", "window-nope", 0),
])
def test_two_questions_that_look_the_same_are_named(narrow, monkeypatch, task, method, left_out):
    monkeypatch.setitem(L.TASKS, "shifted", L.Task("16 * n", shifted, base=4, headroom=2))
    config = one_layer(task, method)
    lines = deciding(task)
    windows, keys = windows_and_keys(config, lines[:len(lines) - left_out])
    pool = [L.draw_questions(config, L.draw_exact, 8, 300)]
    assert_clash(config, keys, windows)
    assert_clash(config, keys, L.determine(config, windows.lines, pool))
    assert L.until_proved(windows) is None

def late(base):
    """A machine whose rests settle after one place from the last on, but from the first down only
    after `base` - 2."""
    def total(rest, a):
        return (a + rest) % base + base * torch.where(rest == 0, a, rest - 1)
    return L.Task("rests that fall by one a place", total, base=base)

def write_late(width, n):
    """Its answer in base 4; -1 if it has none."""
    answer = rest = 0
    for place in range(width):
        digit = n // 4 ** place % 4
        answer += (digit + rest) % 4 * 4 ** place
        rest = digit if rest == 0 else rest - 1
    return answer if rest == 0 else -1

def test_windows_of_rests_that_settle_late(narrow, monkeypatch):
    monkeypatch.setitem(L.TASKS, "late", late(4))
    monkeypatch.setitem(ANSWERS, "late", write_late)
    config, every = one_layer("late"), []
    windows, keys = windows_and_keys(config, deciding("late"))
    for width in range(2, 8):
        numbers = [(n,) for n in range(4 ** (width - 1)) if write_late(width, n) >= 0]
        every.append(tokens_of(config, width, numbers))
    assert tokens_to_write(keys, every) == tokens_to_write(keys, windows.questions)

def test_wide_questions_show_windows_of_rests_that_settle_late(monkeypatch):
    """Sets of rests, followed place by place in another program, give these two numbers."""
    monkeypatch.setitem(L.TASKS, "late", late(10))
    assert L.places_to_settle(late(10)) == (1, 8)
    windows = L.enumerate_windows(one_layer("late"), deciding("late"))
    assert len(windows.views) == 1012
    assert sum(len(source) for source, target in windows.questions if target.shape[1] < 10) == 625

@pytest.mark.parametrize("count, why", [
    (lambda rest: (rest + 1) % 3, "the rests that a place can get never settle"),
    (lambda rest: rest + 1, "more than 1,000 rests can be handed on"),
])
def test_a_counter_that_goes_on_is_not_proved(monkeypatch, count, why):
    monkeypatch.setitem(L.TASKS, "counter", L.Task("n", lambda rest, a: a + 10 * count(rest)))
    windows = L.enumerate_windows(one_layer("counter"), deciding("counter"))
    assert L.prove(None, windows) == dict(proved=False, why=why)

@pytest.mark.parametrize("most, why", [
    (199, "a row has more than 199 windows"),
    (211, "there are more than 211 windows"),
])
def test_too_many_windows_are_not_enumerated(monkeypatch, most, why):
    """n + 1 has 212 windows; a row shows up to 200 of them."""
    monkeypatch.setattr(L, "TOO_MANY", most)
    windows = L.enumerate_windows(one_layer("successor"), deciding("successor"))
    assert windows.why == why and not windows.clash

@pytest.fixture
def untrained(monkeypatch):
    """Steps train nothing, and every calibration finds lines that decide n + 1."""
    skip_steps(monkeypatch)
    monkeypatch.setattr(L, "average_attention", lambda *given: ())
    monkeypatch.setattr(L, "calibrate", lambda *given: deciding("successor"))

@pytest.mark.parametrize("asked", [300, 1])
def test_the_fewest_lines_that_determine_the_answer_are_kept(monkeypatch, asked):
    """At the first kappa at which the lines do; also where a pool of few questions misleads."""
    def calibrate(config, attention, kappa):
        return STRAY + deciding("successor")[:3 if kappa > 0.6 else None]

    def draw_questions(config, draw, length, n, drawn=L.draw_questions):
        return drawn(config, draw, length, asked)

    monkeypatch.setattr(L, "calibrate", calibrate)
    monkeypatch.setattr(L, "draw_questions", draw_questions)
    kappa, lines, windows = L.choose_lines(one_layer("successor"), ())
    assert (kappa, lines) == (0.6, deciding("successor"))
    assert windows.lines == lines and windows.why == "" and len(windows.views) == 212

def test_a_run_ends_where_no_lines_determine_the_answer(monkeypatch):
    monkeypatch.setattr(L, "calibrate", lambda *given: STRAY)
    with pytest.raises(L.RunFailed, match=r"the answer: \d+ and \d+ look the same to a row"):
        L.choose_lines(one_layer("successor"), ())

@pytest.mark.parametrize("method, options", [
    (dict(position=L.sinusoids), {}),
    (dict(scores=L.rotary), {}),
    ({}, dict(n_layer=2)),
    ({}, dict(n_encoder=1)),
    ({}, dict(rules="paper")),
    ({}, dict(task="parity-label")),
])
def test_other_models_are_calibrated_once_and_not_proved(monkeypatch, method, options):
    monkeypatch.setattr(L, "calibrate", lambda config, attention, kappa: [kappa])
    monkeypatch.setitem(L.METHODS, "abc", L.METHODS["abc"]._replace(**method))
    config = one_layer(**dict(task="successor") | options)
    kappa, lines, windows = L.choose_lines(config, ())
    assert kappa == {"robust": 0.5, "paper": 4.0}[config.rules]
    assert lines == windows.lines == [kappa]
    assert "one decoder layer, no encoder, no positions" in windows.why
    assert L.until_proved(windows) is None

class Given(nn.Module):
    """A model that has these logits, piece by piece, whatever it is asked."""
    def __init__(self, pieces):
        super().__init__()
        self.pieces = iter(pieces)

    def forward(self, source, target):
        return next(self.pieces)

def margin_of(rows):
    """The margin of pieces of one question and one row each, which must write token 0."""
    question = L.encode("$12&")[None], L.encode("$0")[None]
    logits = torch.tensor(rows)[:, None, None]
    margin, _ = L.least_lead(Given(logits), [question] * len(rows))
    return margin

@pytest.mark.parametrize("rows, margin", [
    ([[5.0, 3.0, 4.0], [3.0, 0.0, 0.0]], 1.0),  # the least lead over all others
    ([[0.51, 0.0], [0.49, 0.0], [0.1, 0.0]], 0.49),  # the first in doubt ends it
    ([[-3.0, -2.0]], -1.0),
    ([[500.0, 499.0]], 1.0),
    ([[900.0, 899.0]], 0.6),  # less what a thousandth of the largest logit has above 0.5
    ([[-899.0, -900.0]], 0.6),
])
def test_a_margin(rows, margin):
    assert margin_of(rows) == pytest.approx(margin, abs=1e-4)

@pytest.mark.parametrize("row", [
    [math.nan, 0.0, 0.0],
    [9.0, 0.0, math.nan],
    [INF, 0.0, 0.0],
    [9.0, 0.0, -INF],
    [9.0, 0.0, -1e30],
])
def test_what_is_no_number_or_beyond_precision_is_not_proved(row):
    assert margin_of([row]) < 0

def load_with_windows(finished):
    """-> model, proof and Windows of a finished run."""
    model, config, parts = L.load(finished[0])
    lines = [L.Line(**line) for line in parts["proof"]["lines"]]
    return model, parts["proof"], L.enumerate_windows(config, lines)

def test_a_proof_tells_its_windows_and_its_margin(finished):
    model, proof, windows = load_with_windows(finished)
    margin, _ = L.least_lead(model, windows.questions)
    assert proof["proved"] and proof["why"] == ""
    assert proof["windows"] == len(windows.views)
    assert proof["margin"] == pytest.approx(margin, abs=1e-3) and margin > 0.5

def test_the_proof_agrees_with_every_short_question(finished, monkeypatch):
    """All numbers of three digits, one by one, with one weight after the other spoiled. The
    question that has the margin is wrong if one is."""
    model, _, windows = load_with_windows(finished)
    texts = [written("successor", 7, n) for n in range(1000)]
    source = torch.stack([L.encode(question) for question, _ in texts])
    answers = [answer for _, answer in texts]
    monkeypatch.setattr(L, "MARGIN", 1e-9)  # it ends at what is wrong, not before
    found_exact = Counter()
    for digit, change in itertools.product((1, 5, 9), (0.1, 9.0)):
        spoiled = copy.deepcopy(model)
        spoiled.embedding.weight.data[digit, 5] += change
        exact = [L.decode(tokens) for tokens in greedy(spoiled, source, 8)] == answers
        margin, worst = L.least_lead(spoiled, windows.questions)
        assert (margin > 0) == exact
        number = L.decode(worst[1:-1])
        _, answer = written("successor", len(number), int(number))
        found = greedy(spoiled, worst[None], len(number) + 1)[0]
        assert (L.decode(found) == answer) == exact
        found_exact[exact] += 1
    assert found_exact[True] >= 2 and found_exact[False] >= 2

def test_no_lead_of_a_long_question_is_below_the_proved_margin(finished):
    """Dense or by open keys the logits of a window are the same."""
    model, proof, _ = load_with_windows(finished)
    for length, draw in (20, L.draw_hard), (60, L.draw_exact), (1000, L.draw_exact):
        questions = L.draw_questions(model.config, draw, length, 20)
        assert L.least_lead(model, [questions])[0] > proof["margin"] - 1e-3

@pytest.mark.parametrize("right, attempt, steps", [
    (1, 1, 50),
    (4, 2, 75),
    (99, 2, 120),  # never
])
def test_attempts_end_with_a_proof(untrained, monkeypatch, right, attempt, steps):
    """The first starts with the vanilla model's weights, the second is a new model. The first look
    that finds a model right is given: the first attempt looks at step 50 and at its end, 60, the
    second at 50, 75, 100 and its end, 120."""
    looks = []

    def least_lead(model, questions):
        looks.append(model)
        return 9.0 if len(looks) >= right else -1.0, L.encode("$0000123&")

    monkeypatch.setattr(L, "least_lead", least_lead)
    parts = learned(one_layer("successor", retrain_steps=60)).parts
    proof = parts["proof"]
    assert (proof["attempt"], proof["kappa"], parts["model"]["steps"]) == (attempt, 0.8, steps)
    assert ("attempt 1" in parts) == (attempt == 2)
    assert is_taken_over(parts["model"], parts["teacher"]) == (attempt == 1)
    assert proof["proved"] == (right < 99)
    assert proof["proved"] or proof["why"] == "0000123 is wrong or in doubt"

def test_a_window_method_is_trained_until_it_is_proved():
    parts = learned(L.Config("parity", method="window-cyclic", n_layer=1, d_model=32, steps=300,
                             batch=32, lr=4e-3, lengths=(60,), samples=100)).parts
    assert parts["proof"]["proved"] and parts["model"]["steps"] < 300
    assert all(row["correct"] == row["n"] for row in parts["tests"]["rows"])

def test_windows_of_two_layers_are_not_proved():
    windows = L.windows_of_method(one_layer("parity", "window-cyclic", n_layer=2))
    assert "one decoder layer" in windows.why
    assert L.prove(None, windows) == dict(proved=False, why=windows.why)

def test_windows_with_sinusoids_have_no_proof():
    assert "proof" not in learned(small(task="parity", method="window", width=20)).parts

def test_a_window_method_that_cannot_be_exact_says_so_at_first():
    told = []
    L.learn(L.Run(one_layer("successor", "window-nope"), report=told.append))
    assert re.fullmatch(r"no training makes it exact: \d+ and \d+ look the same .*", told[0])

# -----
# 7. Training and evaluation: torch's optimizers by hand, interrupted runs, damaged files

def spy_on_steps(monkeypatch):
    """Steps as (model, source, target) from now on, and each model as before its first step."""
    steps, starts, take = [], [], L.take_step

    def step(model, optimizers, source, target, *more):
        if not steps or steps[-1][0] is not model:
            starts.append(copy.deepcopy(model))
        steps.append((model, source, target))
        return take(model, optimizers, source, target, *more)

    monkeypatch.setattr(L, "take_step", step)
    return steps, starts

def skip_steps(monkeypatch, loss=1.0):
    """Steps as (model, source, share of the peak rate) from now on; they train nothing."""
    steps = []

    def step(model, optimizers, source, target, share):
        steps.append((model, source, share))
        return torch.tensor(loss)

    monkeypatch.setattr(L, "take_step", step)
    return steps

def parted(model, optimizer):
    """Weights that Muon moves, the matrices of layers but for tables of scores; and all others."""
    matrices, others = [], []
    for name, weight in model.named_parameters():
        of_layer = name.startswith(("encoder.", "decoder.")) and not name.endswith("table")
        if optimizer == "muon" and of_layer and weight.dim() == 2:
            matrices.append(weight)
        else:
            others.append(weight)
    return matrices, others

def step_by_torch(model, optimizers, source, target, share):
    """Cross-entropy, gradients cut at norm 1, and a step of each (optimizer, peak rate)."""
    logits = model(source, target[:, :-1]).float()
    F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()).backward()
    squares = [float(weight.grad.square().sum()) for weight in model.parameters()]
    for weight in model.parameters():
        weight.grad *= min(1.0, 1 / (math.sqrt(sum(squares)) + 1e-6))
    for optimizer, peak in optimizers:
        optimizer.param_groups[0]["lr"] = peak * share
        optimizer.step()
        optimizer.zero_grad()

def constant(step):
    return 1.0

def trapezoid(step):
    """Up over 30 steps; down over the last 16 of 40, which are two fifths."""
    return min(1.0, step / 30, (41 - step) / 16)

def cosine(step):
    """Down to zero over 40 steps; the first 100 are warm-up."""
    return step / 100 * (1 + math.cos(math.pi * step / 40)) / 2

RECIPES = [  # model, optimizer, share of the peak rate, Adam's second beta and weight decay
    ("head", "adam", constant, 0.999, 0.0),
    ("seq2seq", "adam", constant, 0.98, 0.0),
    ("seq2seq", "muon", trapezoid, 0.98, 0.0),
    ("universal", "muon", cosine, 0.999, 0.01),
    ("encoder", "adam", cosine, 0.999, 0.01),
    ("encoder", "muon", cosine, 0.999, 0.01),
]

@pytest.mark.parametrize("model, optimizer, rate, beta, decay", RECIPES)
def test_training_is_torchs_own(double, monkeypatch, model, optimizer, rate, beta, decay):
    """A run's batches once more, by torch's optimizers, give its weights."""
    options = {} if model == "head" else dict(optimizer=optimizer)
    steps, starts = spy_on_steps(monkeypatch)
    weights = learned(small(model, lr=0.02, steps=40, **options)).parts["model"]["weights"]
    theirs = starts[0].train()
    matrices, others = parted(theirs, optimizer)
    adam = torch.optim.AdamW(others, 1.0, (0.9, beta), weight_decay=decay)
    optimizers = [(adam, 0.02)]
    if optimizer == "muon":
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # it would be coarse
        muon = torch.optim.Muon(matrices, 1.0, 0.0, adjust_lr_fn="match_rms_adamw")
        optimizers = [(adam, 0.02 / 4), (muon, 0.02)]
    for step, (_, source, target) in enumerate(steps, 1):
        step_by_torch(theirs, optimizers, source, target, rate(step))
    assert len(steps) == 40
    for name, expected in theirs.state_dict().items():
        assert_close(weights[name], expected, rtol=1e-5, atol=1e-7)

def test_a_compiled_model_has_the_same_optimizers():
    config = small(optimizer="muon")
    model = L.Transformer(config)
    compiled = nn.ModuleDict({"_orig_mod": model})  # as torch.compile names its weights
    found = []
    for optimizer in L.make_optimizers(model, config) + L.make_optimizers(compiled, config):
        found.append((type(optimizer), len(optimizer.param_groups[0]["params"])))
    assert found[:2] == found[2:] and found[0] != found[1]

def test_dropout_acts_in_steps_and_not_in_tests():
    config = small(dropout=0.5)
    model = L.Transformer(config)
    batch = L.training_batch(config, torch.arange(1000), 100)
    losses = {float(L.take_step(model.eval(), [], *batch)) for _ in range(3)}
    assert len(losses) == 3
    assert torch.equal(L.right_tokens(model, *batch), L.right_tokens(model, *batch))

def test_a_loss_that_is_no_number_ends_the_run(monkeypatch):
    skip_steps(monkeypatch, loss=math.nan)
    with pytest.raises(L.RunFailed, match="the loss is nan at step 3 of model"):
        learned(small())

@pytest.mark.parametrize("done_at, asked, curve", [
    (None, [50, 75, 100, 125], [100, 125]),
    (75, [50, 75], [75]),
])
def test_a_training_ends_when_it_is_done(monkeypatch, done_at, asked, curve):
    """That is asked every 25 steps from 50 on. The curve has every 100th step and the last."""
    steps, looks = skip_steps(monkeypatch), []
    run = L.Run(small())

    def done(model):
        looks.append(len(steps))
        return len(steps) == done_at

    L.fit(run, L.Transformer(run.config), "name", 125, done=done)
    part = run.parts["name"]
    assert looks == asked
    assert part["steps"] == len(steps) == curve[-1]
    assert [point[:2] for point in part["curve"]] == [[step, 1.0] for step in curve]
    assert "optimizers" not in part  # which are kept of a training that goes on

def first_draw(state, *names):
    torch.manual_seed(state)
    L.seed_by_name(*names)
    return float(torch.rand(()))

def test_what_is_drawn_depends_on_names_alone():
    draw = first_draw(5, 0, "a", 1)
    assert first_draw(77, 0, "a", 1) == draw
    assert draw not in (first_draw(5, 0, "a", 2), first_draw(5, 1, "a", 1))

def questions_learned(monkeypatch, **options):
    """Questions of all steps of a run, four a step."""
    steps = skip_steps(monkeypatch)
    learned(small(**options))
    return torch.cat([source for _, source, _ in steps])

@pytest.mark.parametrize("method", ["ape", "alibi", "rope", "rpe-kq"])
def test_methods_learn_from_the_same_questions(monkeypatch, method):
    """But those that have several widths."""
    questions = questions_learned(monkeypatch, method="vanilla")
    assert torch.equal(questions, questions_learned(monkeypatch, method=method))

def test_every_seed_and_every_step_draws_anew(monkeypatch):
    """Even of the same numbers, all of them equally often."""
    numbers = torch.arange(10 ** 6)
    monkeypatch.setattr(L, "split_numbers", lambda seed: (numbers, numbers))
    questions = questions_learned(monkeypatch, preset="paper")
    assert not torch.equal(questions, questions_learned(monkeypatch, preset="paper", seed=1))
    assert not torch.equal(questions[:4], questions[4:8])

def numbers_asked(source):
    """Questions `$0123&` -> Python integers."""
    return [int(L.decode(row)[1:-1]) for row in source]

def skip_training(monkeypatch, **options):
    """A run of ABC with 4 and 60 steps, which train nothing -> its parts and steps."""
    maps = torch.rand(2, 2, 8, 8)
    monkeypatch.setattr(L, "collect_attention", lambda *given: (maps, maps))
    steps = skip_steps(monkeypatch)
    options = dict(task="successor", method="abc", steps=4, retrain_steps=60) | options
    return learned(small(**options)).parts, steps

@pytest.mark.parametrize("preset, powers", [
    ("fast", [4.75, 3.5, 2.25, 1, 1, 1]),
    ("paper", [1, 1, 1, 1, 1, 1]),
])
def test_short_numbers_come_first_until_retraining(monkeypatch, preset, powers):
    """With a power p a share q ** (1 / p) is below the q-th of numbers; p = 6 - 5 * step / 4."""
    _, steps = skip_training(monkeypatch, preset=preset, width=7, batch=2000, retrain_steps=2)
    for (_, source, _), power in zip(steps, powers, strict=True):
        below = np.mean(np.array(numbers_asked(source)) < 2 ** 20 / 100)
        assert below == pytest.approx(0.01 ** (1 / power), abs=0.03)

def test_rates_of_retraining_fall_from_the_first_step_on(monkeypatch):
    _, steps = skip_training(monkeypatch)
    expected = [min(1.0, step / 30, (61 - step) / 60) for step in range(1, 61)]
    assert [share for _, _, share in steps[4:]] == pytest.approx(expected)

def is_taken_over(model, vanilla):
    """Does a part hold the vanilla model's weights, with queries and keys at zero? A new one has
    none of the two."""
    found = set()
    for name, weight in model["weights"].items():
        expected = vanilla["weights"][name]
        if re.search(r"attention\.[qk]\.", name):
            expected = torch.zeros_like(expected)
        if "norm" not in name:
            found.add(torch.equal(weight, expected))
    [same] = found
    return same

def test_by_the_sources_rules_the_only_retrained_model_is_new(monkeypatch):
    parts, _ = skip_training(monkeypatch, rules="paper")
    assert not is_taken_over(parts["model"], parts["teacher"])
    assert parts["proof"]["attempt"] == 1

@pytest.fixture
def taught_and_checked(monkeypatch):
    """A run with windows -> its steps, and the numbers of its check."""
    checked, right_tokens = [], L.right_tokens

    def check(model, source, target):
        checked.extend(numbers_asked(source))
        return right_tokens(model, source, target)

    monkeypatch.setattr(L, "right_tokens", check)
    monkeypatch.setattr(L, "evaluate", lambda *given: None)
    steps = skip_steps(monkeypatch)
    learned(small(task="successor", method="window-nope", batch=1000, steps=8))
    return steps, set(checked)

def test_no_held_out_number_is_learned_from(taught_and_checked):
    steps, held_out = taught_and_checked
    taught = set()
    for _, source, _ in steps:
        taught.update(numbers_asked(source))
    assert len(taught) > 7000 and len(held_out) > 950
    assert not taught & held_out
    assert 2 ** 19 < max(taught) < 2 ** 20

def test_a_method_with_windows_learns_at_several_widths(taught_and_checked):
    widths = {source.shape[1] - 2 for _, source, _ in taught_and_checked[0]}  # `$` and `&`
    assert len(widths) > 2 and widths <= set(range(7, 16))

def test_attention_is_averaged_over_the_same_training_numbers_each_time(monkeypatch):
    monkeypatch.setattr(L, "collect_attention", lambda model, source, target: source)
    model = L.Transformer(small(task="successor"))
    source = L.average_attention(model)
    assert torch.equal(source, L.average_attention(model))
    held_out = L.split_numbers(0)[1].tolist()
    assert not set(held_out) & set(numbers_asked(source))

class Echo(nn.Module):
    """Answers n + 1, but n + 11 where n ends in 7; keeps what it was asked."""
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))  # for those who look for its device
        self.asked = []

    def forward(self, source, target):
        answers, width = [], source.shape[1] - 2
        for n in numbers_asked(source):
            answer = n + 11 if n % 10 == 7 else n + 1
            answers.append(L.encode(f"{answer:0{width}}"[::-1] + "&"))
            self.asked.append(n)
        return F.one_hot(torch.stack(answers), len(L.VOCAB)).float()

def rows_of_echo(*lengths, seed=0):
    """Rows of its tests, each with the numbers that it was asked."""
    model, found, at = Echo(), [], 0
    config = small(task="successor", samples=300, lengths=lengths, seed=seed)
    for row in L.evaluate(model, config)["rows"]:
        found.append((row, model.asked[at:at + row["n"]]))
        at += row["n"]
    assert at == len(model.asked)
    return found

def test_every_length_is_tested_once_and_the_longest_up_to_60_with_hard_questions():
    sets = [(row["digits"], row["set"]) for row, _ in rows_of_echo(61, 5, 9, 5)]
    assert sets == [(5, "random"), (9, "random"), (9, "hard"), (61, "random")]

def test_right_answers_are_counted():
    for row, asked in rows_of_echo(5, 9):
        wrong = [n for n in asked if n % 10 == 7]
        assert wrong and row["correct"] == len(asked) - len(wrong)

@pytest.mark.parametrize("digits, width", [(5, 7), (9, 10)])
def test_the_share_right_of_each_place_is_counted(digits, width):
    """The last digits of n + 1 and n + 11 are the same, the last but one always differ."""
    row, asked = rows_of_echo(digits)[0]
    wrong = sum(n % 10 == 7 for n in asked)
    assert row["places"][:2] == [1, pytest.approx(1 - wrong / 300, abs=1e-4)]
    assert len(row["places"]) == width

def test_places_count_digits_alone():
    """A model that writes PAD alone has no digit right, though most of the target is PAD."""
    class Pads(Echo):
        def forward(self, source, target):
            pads = torch.full(target.shape, L.VOCAB.index("@"))
            return F.one_hot(pads, len(L.VOCAB)).float()

    row = L.evaluate(Pads(), small("encoder"))["rows"][0]
    assert set(row["places"]) == {0} and row["correct"] == 0

def test_questions_of_a_test_depend_on_the_seed():
    """And on their length, but on no other length that is tested."""
    assert rows_of_echo(5, 9)[1:] == rows_of_echo(9)
    assert rows_of_echo(9) != rows_of_echo(9, seed=1)

def test_above_100_digits_at_most_200_questions_are_asked():
    config = small(task="successor", samples=300)
    assert len(L.test_questions(config, 100)["random"][0]) == 300
    assert len(L.test_questions(config, 101)["random"][0]) == 200

class Killed(BaseException):
    """Raised where a process is killed; the run does not catch it."""

def killed_every(n, config, folder, monkeypatch, kills=99):
    """Run, be killed at the n-th report, go on from the file, until it is done -> parts, kills."""
    monkeypatch.setattr(L, "SECONDS", -1)  # every step is reported and saved
    parts = None
    for killed in range(kills):
        reports = itertools.count(1)

        def report(text):
            if next(reports) == n:
                raise Killed

        run = L.Run(config, folder, parts, report=report)
        try:
            L.SYSTEMS[config.model].learn(run)
            return run.parts, killed
        except Killed:
            again, parts = L.read_checkpoint(folder)
            parts.pop("before", None)  # as where --lengths are given
            assert again == config

def plain(parts):
    """Parts of a run without the time that they took, tensors as lists."""
    found = {}
    for name in parts.keys() - {"attention"}:
        weights = parts[name].get("weights", {})
        lists = {key: weight.tolist() for key, weight in weights.items()}
        found[name] = parts[name] | dict(weights=lists, seconds=0)
    return found

KILLED = [(model, {}) for model in L.SYSTEMS] + [
    ("encoder", dict(finetune=6, dropout=0.1)),
    ("seq2seq", dict(method="abc", dropout=0.1)),
    ("seq2seq", dict(optimizer="adam")),
]

@pytest.mark.parametrize("model, options", KILLED)
def test_a_killed_run_goes_on_to_the_same_bits(model, options, tmp_path, monkeypatch):
    maps = torch.rand(2, 2, 8, 8).tril().softmax(3), torch.rand(2, 2, 8, 17).softmax(3)
    monkeypatch.setattr(L, "collect_attention", lambda *given: maps)
    config = small(model, steps=6, **options)
    whole = learned(config).parts
    parts, kills = killed_every(3, config, tmp_path, monkeypatch)
    same = plain(parts) == plain(whole)
    assert same and kills >= 2

def test_a_run_killed_between_looks_is_proved_by_the_same_model(tmp_path, monkeypatch):
    """With lines that decide, looks at windows, and a new attempt after one that failed; killed
    in the first step of the second attempt, after 2 and 50 and the 8 rows of all windows, then
    between looks."""
    maps = torch.rand(1, 2, 8, 8).tril().softmax(3), torch.rand(1, 2, 8, 9).softmax(3)
    monkeypatch.setattr(L, "collect_attention", lambda *given: maps)
    monkeypatch.setattr(L, "calibrate", lambda *given: deciding("successor"))
    config = small(task="successor", method="abc", n_layer=1, n_encoder=0, steps=2,
                   retrain_steps=50, samples=2)
    whole = learned(config).parts
    parts, kills = killed_every(61, config, tmp_path, monkeypatch)
    same = plain(parts) == plain(whole)
    assert same and kills == 2
    assert list(parts) == ["teacher", "attention", "attempt 1", "model", "proof", "tests"]
    assert parts["model"]["steps"] == 100  # twice the first's

@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """One run of ABC with the default recipe -> its folder and its record."""
    folder = tmp_path_factory.mktemp("abc") / "run"
    flags = ["--task=successor", "--method=abc", "--lengths=6,60", "--samples=99", "--json",
             "--quiet", "--device=cpu", f"--out={folder}"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = L.main(flags)
    assert code == 0
    return folder, json.loads(out.getvalue())

def assert_all_right(rows, lengths):
    assert {row["digits"] for row in rows} == set(lengths)
    for row in rows:
        assert row["correct"] == row["n"] > 0, row

def test_abc_is_exact_at_ten_times_the_length(finished):
    """Trained on numbers below 2^20."""
    assert_all_right(finished[1]["tests"]["rows"], [6, 60])

def right_answers(model, task, questions):
    """How many questions, (width, *numbers), a model answers as Python's integers do."""
    right = 0
    for question in questions:
        source, target = [L.encode(text)[None] for text in written(task, *question)]
        right += int(L.right_tokens(model, source, target).all())
    return right

def test_the_vanilla_teacher_fails_where_the_calibrated_model_is_exact(finished):
    """A control: it has learned held-out numbers of 6 digits and answers none or few of 20."""
    model, config, parts = L.load(finished[0])
    teacher = L.Transformer(dataclasses.replace(config, method="vanilla"))
    teacher.load_state_dict(parts["teacher"]["weights"])
    held_out = L.split_numbers(config.seed)[1].tolist()
    short = [(7, n) for n in held_out[::600] if n >= 10 ** 5]
    long = [(21, random.Random(i).randrange(10 ** 19, 10 ** 20)) for i in range(200)]
    assert right_answers(teacher, "successor", short) > 0.98 * len(short) > 150
    assert right_answers(teacher, "successor", long) <= 2
    assert right_answers(model, "successor", long) == 200

def test_the_model_answers_as_pythons_integers_do(finished, command):
    questions = ["0", "999", "9" * 60, "12345678901234567890"]
    code, out, err = command("--from", finished[0], "--ask", *questions)
    assert code == 0 and out.split() == [str(int(x) + 1) for x in questions]

def test_a_finished_run_is_tested_at_other_lengths_and_stays_as_it_is(finished, command):
    folder, record = finished
    code, out, _ = command("--from", folder, "--lengths=30,2100", "--samples=50", "--json")
    assert_all_right(json.loads(out)["tests"]["rows"], [30, 2100])
    assert json.loads((folder / "result.json").read_text()) == record

def test_every_head_looks_at_the_digits_place(finished, command):
    code, out, _ = command("--from", finished[0], "--lengths=3")
    heads = re.findall("cross head (.): anti-diagonal, block 1, offset 0,", out)
    assert heads == ["1", "2", "3", "4"]

def test_zeros_in_front_of_operands_do_not_count():
    config = small(task="nx1")
    model = L.Transformer(config)
    assert L.ask(model, config, "0012*07") == L.ask(model, config, "12*7")

def test_an_answer_that_does_not_end_is_no_number(finished):
    model, config, _ = L.load(finished[0])
    with torch.no_grad():
        model.head.bias[L.VOCAB.index("&")] -= 1e4
    assert "no number" in L.ask(model, config, "199")

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two runs, one done and one stopped in training."""
    base = tmp_path_factory.mktemp("runs")
    flags = [*as_flags(small()), "--quiet", f"--out={base / 'done'}"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert L.main(flags) == 0
    (base / "stopped").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        killed_every(3, small(), base / "stopped", patch, kills=1)
    return base

GONE = object()
DAMAGE = [  # which run, where in its file, and what stands there instead
    ("done", "config", None),
    ("done", "config/n_layer", -1),
    ("done", "config/d_model", 8),
    ("done", "config/colour", 3),
    ("done", "parts", 7),
    ("done", "parts/model", {}),
    ("done", "parts/model/weights", None),
    ("done", "parts/model/weights/head.weight", torch.zeros(14, 16)),  # of 15 symbols
    ("done", "parts/model/weights/head.weight", GONE),
    ("done", "parts/model/weights/more", torch.zeros(2)),
    ("stopped", "parts/model/weights", {}),
    ("stopped", "parts/model/curve", GONE),
    ("stopped", "parts/model/optimizers", []),
    ("stopped", "parts/model/steps", 3),  # all that it shall have
    ("stopped", "parts/model/steps", "x"),
]

@pytest.mark.parametrize("folder", ["done", "stopped"])
def test_files_as_they_were_written_are_read(runs, command, folder):
    """A control of the tests below."""
    shutil.copytree(runs / folder, "good")
    assert command("--from", "good", "--quiet")[0] == 0

@pytest.mark.parametrize("folder, path, value", DAMAGE)
def test_files_that_do_not_fit_cost_one_line(runs, command, folder, path, value):
    shutil.copytree(runs / folder, "bad")
    state = torch.load("bad/checkpoint.pt", weights_only=True)
    keys, inner = path.split("/"), state
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    if value is GONE:
        del inner[keys[-1]]
    torch.save(state, "bad/checkpoint.pt")
    assert_refused(command("--from", "bad", "--quiet"), "cannot be used")
    if folder == "done":  # of others nothing can be asked, anyway
        assert_refused(command("--from", "bad", "--ask", "1+1"), "cannot be used")

@pytest.mark.parametrize("keep", [slice(0), slice(1000), slice(-1)])
def test_a_file_that_is_cut_costs_one_line(runs, command, keep):
    shutil.copytree(runs / "done", "bad")
    path = Path("bad/checkpoint.pt")
    path.write_bytes(path.read_bytes()[keep])
    assert_refused(command("--from", "bad", "--ask", "1+1"), "bad")

class Hostile:
    """Makes a folder when it is unpickled."""
    def __reduce__(self):
        return os.mkdir, ("owned",)

def test_no_code_in_a_file_is_run(command):
    Path("bad").mkdir()
    torch.save({"config": Hostile(), "parts": {}}, "bad/checkpoint.pt")
    assert_refused(command("--from", "bad", "--ask", "1+1"), "bad")
    assert not Path("owned").exists()

def test_a_flipped_bit_is_refused_or_changes_nothing(runs, tmp_path):
    good = (runs / "done" / "checkpoint.pt").read_bytes()
    before, draw = L.load(runs / "done")[0].state_dict(), random.Random(0)
    for at in [0, len(good) - 1] + draw.sample(range(len(good)), 60):
        data = bytearray(good)
        data[at] ^= 4
        (tmp_path / "checkpoint.pt").write_bytes(data)
        with contextlib.suppress(L.BadInput):
            model, config, _ = L.load(tmp_path)
            after = model.state_dict()
            assert config == small()
            for name, weight in before.items():
                assert torch.equal(weight, after[name]), name

@pytest.mark.parametrize("task, question, tokens, answer", [
    ("successor", "179", "$081000&", "180"),
    ("addition", "7+0", "$7000&", "7"),
    ("addition", "0+0", "$0000&", "0"),
    ("parity", "1011", "$1001&", "1001"),
    ("parity-label", "1011", "$1&", "1"),
    ("successor", "179", "$0@1000&", "no number; the model wrote '0@1000&'"),
    ("successor", "179", "$08100@", "no number; the model wrote '08100@'")])
def test_an_answer_is_read_from_the_tokens(monkeypatch, task, question, tokens, answer):
    monkeypatch.setattr(L, "generate", lambda *given: L.encode(tokens)[None])
    assert L.ask(None, L.Config(task), question) == answer

@pytest.mark.parametrize("question, tokens", [("179", 8), ("9" * 30, 32)])
def test_no_more_tokens_are_made_than_the_answer_has(monkeypatch, question, tokens):
    """7 digits or one more than the question, and the end."""
    def generate(model, source, limit, report):
        assert limit == tokens
        return L.encode("$0&")[None]

    monkeypatch.setattr(L, "generate", generate)
    assert L.ask(None, L.Config("successor"), question) == "0"

def test_a_task_of_three_numbers_is_trained_and_tested(monkeypatch):
    monkeypatch.setitem(L.TASKS, "three", THREE_NUMBERS)
    rows = learned(small(task="three")).parts["tests"]["rows"]
    assert [row["n"] for row in rows] == [4, 4]

# -----
# 8. Consecutive pairs: labels by brute force, shares counted, the head as one formula

def test_labels_say_whether_a_neighbour_is_there():
    source, target = L.draw_pairs(500, 5, 16)
    labels = target[:, 1:].tolist()
    for row, found in zip(source.tolist(), labels, strict=True):
        assert len(row) == 5
        assert found == [x - 1 in row or x + 1 in row for x in row]

@pytest.mark.parametrize("plant", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("d_vocab", [4, 256])
def test_planted_pairs_go_up_as_often_as_down(d_vocab, plant):
    """Others do so by chance; of V * V pairs V - 1 go up."""
    source, _ = L.draw_pairs(20_000, 5, d_vocab, plant)
    assert source.unique().tolist() == list(range(d_vocab))
    share = plant / 2 + (1 - plant) * (d_vocab - 1) / d_vocab ** 2
    for first in 0, 2:
        step = source[:, first + 1] - source[:, first]
        for side in 1, -1:
            assert (step == side).float().mean() == pytest.approx(share, abs=0.015)

def test_tests_have_planted_pairs_as_asked_and_none():
    sets = L.pairs_questions(small("head", plant=1.0, d_vocab=256, dummy=True), 4)
    for name, share in ("random", 1), ("uniform", 0):
        source, target = sets[name]
        assert source.shape == target.shape == (5, 5)
        assert source[:, 0].tolist() == [256] * 5  # the dummy
        assert target[:, 1:].float().mean() == share

@pytest.mark.parametrize("dummy", [False, True])
def test_the_head_is_one_formula(double, dummy):
    model = L.PairsHead(small("head", dummy=dummy))
    source, target = L.draw_pairs(4, 5, 16, 0, dummy)
    head = model.attention
    x = model.embedding.weight[source]
    scores = head.q(x) @ head.k(x).transpose(1, 2) / 2  # sqrt(4) = 2
    z = head.out(scores.softmax(2) @ head.v(x))
    logits = torch.cat([0 * z, z], 2)
    assert_close(model(source, target[:, :-1]), logits[:, dummy:])

def test_every_integer_starts_by_voting_yes():
    model = L.PairsHead(small("head"))
    alone = torch.arange(16)[:, None]
    assert (model(alone, alone)[:, :, 1] > 3).all()

def test_the_embedding_of_the_dummy_alone_is_long():
    lengths = L.PairsHead(small("head", dummy=True, d_model=128)).embedding.weight.norm(dim=1)
    assert lengths[:16].mean() < 2 and lengths[16] > 8  # 0.1 and 1 times sqrt(128)

def neighbours_in_many_dimensions(V):
    """Hypothesis 1a -> queries and keys (V, V), lowest score of a neighbour, highest of another: a
    query is 1 at both neighbours, a key at its own integer."""
    key, integer = torch.eye(V), torch.arange(V)
    query = ((integer - integer[:, None]).abs() == 1).double()
    return query, key, 1.0, 0.0

def neighbours_in_two_dimensions(V):
    """Hypothesis 2 -> queries and keys (V, 2) and the same scores: queries of even integers and
    keys of odd ones lie in order on half a circle, all others in order opposite to them."""
    step = math.pi / (V + 1)
    angle = torch.arange(V) * (math.pi + step)  # a bit more than half a turn each time
    query = torch.stack([angle.cos(), angle.sin()], 1)
    return query, -query, math.cos(step), math.cos(2 * step)

@pytest.mark.parametrize("V", [5, 16, 32])
@pytest.mark.parametrize("scheme", [neighbours_in_many_dimensions, neighbours_in_two_dimensions])
def test_hypotheses_of_the_source_are_solutions(double, scheme, V):
    """A head made by hand is right: a neighbour's vote outweighs that of the dummy, whose score is
    0, and the dummy's those of all others."""
    query, key, neighbour, other = scheme(V)
    sharp = 8 / (neighbour - other)
    model = L.PairsHead(small("head", d_vocab=V, d_model=V + 1, d_head=query.shape[1], dummy=True))
    for weight in model.parameters():
        nn.init.zeros_(weight)
    head = model.attention
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(V + 1))  # the last is the dummy
        head.q.weight[:, :V] = query.T * math.sqrt(head.d_head)
        head.k.weight[:, :V] = key.T * sharp
        head.v.weight[0, :V] = 1
        head.v.weight[0, V] = -math.exp(sharp * (neighbour + other) / 2)
        head.out.weight[0, 0] = 1
    source, target = L.draw_pairs(5000, 5, V, 0.2, True)
    assert L.right_tokens(model, source, target).all()

# -----
# 9. Encoders: Python's integers, Jelassi's example, nn.TransformerEncoder

def sums_without_carries(a, b):
    answer = ""
    for place in range(max(len(str(a)), len(str(b)))):
        answer = str((a // 10 ** place + b // 10 ** place) % 10) + answer
    return answer

def encoder_text(task, a, b, width, modulus):
    """Question and answer of two Python integers."""
    sign, answer, room = {
        "addition": ("+", str(a + b), width + 1),
        "multiplication": ("*", str(a * b), 2 * width),
        "elementwise-addition": ("+", sums_without_carries(a, b), width),
    }[task]
    if modulus:
        room = len(str(modulus - 1))
        answer = str(int(answer) % modulus).zfill(room)
    question = str(a).ljust(width, "@") + sign + str(b).ljust(width, "@")
    return question, "$" + answer.ljust(room, "@")

def arranged(task, pairs, width, modulus=0):
    """Questions and answers as lengen.py makes them, all at once."""
    operands = []
    for numbers in zip(*pairs):
        rows = [L.encode(str(n).zfill(width)[::-1]) for n in numbers]
        operands.append(torch.stack(rows))
    questions, targets = L.arrange_encoder(task, *operands, modulus)
    return list(zip(map(L.decode, questions), map(L.decode, targets)))

@pytest.mark.parametrize("modulus", [0, 2, 7, 100, 101, 10 ** 9])
@pytest.mark.parametrize("task", ENCODING)
@pytest.mark.parametrize("width", [1, 7, 20, 36])
def test_encoder_answers_equal_pythons_integers(task, modulus, width):
    draw = random.Random(width)
    highest = 10 ** width - 1
    pairs = [(0, 0), (highest, 1), (highest, highest)]
    for digits in range(1, width + 1):
        pairs.append((draw.randrange(10 ** digits), draw.randrange(highest)))
        pairs.append((draw.randrange(highest), draw.randrange(10 ** digits)))
    expected = [encoder_text(task, a, b, width, modulus) for a, b in pairs]
    assert arranged(task, pairs, width, modulus) == expected

@pytest.mark.parametrize("task, a, b, modulus, question, answer", [
    ("addition", 12, 39, 0, "12@+39@", "$51@@"),  # Jelassi's
    ("multiplication", 12, 9, 100, "12@*9@@", "$08"),
    ("elementwise-addition", 15, 27, 0, "15@+27@", "$32@")])
def test_examples_of_encoders(task, a, b, modulus, question, answer):
    assert arranged(task, [(a, b)], 3, modulus) == [(question, answer)]

@pytest.mark.parametrize("preset", ["fast", "paper"])
@pytest.mark.parametrize("model", ["universal", "encoder"])
def test_encoder_equals_torchs(double, model, preset):
    ours = L.Encoder(small(model, method="vanilla", preset=preset, n_encoder=3)).eval()
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, "gelu", batch_first=True,
                                       norm_first=preset == "fast")
    theirs = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    if model == "universal":  # one layer again and again
        theirs.layers = nn.ModuleList([theirs.layers[0]] * 3)
    for weight in ours.parameters():
        nn.init.normal_(weight, std=0.3)
    for our_layer, their_layer in zip(ours.encoder, theirs.layers, strict=True):
        layer_into_torch(our_layer, their_layer)
    tokens = torch.randint(15, (4, 13))
    x = ours.embedding(tokens) + L.sinusoidal(torch.arange(13), 16)
    if preset == "fast":
        x = ours.norm(theirs(x))
    else:
        embedding_norm = ours.dropout[0]
        x = theirs(embedding_norm(x))
    assert_close(ours(tokens, tokens[:, :7]), ours.head(x)[:, :7])

def test_matrices_of_the_paper_preset_start_as_berts():
    model = L.Encoder(small("encoder", preset="paper", d_model=64))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert weight.std().item() == pytest.approx(0.02, rel=0.2), name

@pytest.mark.parametrize("model, options, clip", [
    ("encoder", dict(clip=3), 3),
    ("encoder", dict(width=9), 18),
    ("seq2seq", dict(method="rpe-k"), 16)])
def test_clip_is_the_reach_of_relative_tables(model, options, clip):
    """By default of encoders twice the width, of encoder-decoders 16."""
    made = L.SYSTEMS[model].model(small(model, **options))
    assert made.encoder[0].self_attention.scores.table.shape == (2 * clip + 1, 8)

def questions_taught(monkeypatch, **options):
    """For each step of training the questions as pairs of integers. Nothing is learned."""
    steps, found = skip_steps(monkeypatch), []
    learned(small("encoder", **options))
    for _, source, _ in steps:
        texts = [L.decode(row).replace("@", "") for row in source]
        found.append([tuple(map(int, re.split(r"[+*]", text))) for text in texts])
    return found

PRIMED = dict(n_train=40, prime=10, prime_lengths=(6, 7), batch=2000, steps=1, uniform=True)

def test_primes_are_a_few_long_questions(monkeypatch):
    """10 of 40, of 6 and 7 digits in turn, though one number in ten is shorter."""
    [questions] = questions_taught(monkeypatch, **PRIMED)
    long = [pair for pair in questions if pair[0] > 999]
    assert len(long) == pytest.approx(2000 * 10 / 40, abs=100)
    digits = Counter(len(str(a)) for a, _ in set(long))
    assert digits.total() == 10
    assert digits[7] in (4, 5)
    assert digits[6] in (4, 5, 6)

@pytest.mark.parametrize("task", ENCODING)
def test_short_questions_draw_their_second_operand_anew(monkeypatch, task):
    [questions] = questions_taught(monkeypatch, task=task, **PRIMED)
    short = [pair for pair in questions if pair[0] <= 999]
    second = {b for _, b in short}
    top = 99 if task == "multiplication" else 999  # second_digits=2
    assert len({a for a, _ in short}) <= 30
    assert len(second) > 0.6 * top
    assert min(second) > 0 and max(second) <= top

def test_finetuning_takes_a_few_long_questions(monkeypatch):
    options = dict(prime_lengths=(6, 7), finetune=6, batch=200, retrain_steps=2, steps=1)
    short, *tuned = questions_taught(monkeypatch, **options)
    assert max(short)[0] <= 999
    assert len(tuned) == 2
    for questions in tuned:
        assert len(set(questions)) == 6
        assert min(questions)[0] > 9999

@pytest.mark.parametrize("options, lengths", [
    ({}, [3]),
    (dict(prime=2, prime_lengths=(6, 4)), [3, 6]),
    (dict(finetune=2), [3, 4])])
def test_long_questions_are_asked_during_training(monkeypatch, options, lengths):
    """The curve has the shares of each digit of short ones, of long ones the share exact."""
    def tested(model, config, *given):
        rows = [dict(correct=n, n=config.samples, places=[0.5] * n) for n in config.lengths]
        return dict(rows=rows)

    monkeypatch.setattr(L, "evaluate", tested)
    curve = learned(small("encoder", **options)).parts["model"]["curve"]
    assert curve[-1][2:] == [0.5] * 3 + [n / 200 for n in lengths[1:]]

def test_examples_do_not_depend_on_the_model(monkeypatch):
    first = questions_taught(monkeypatch, method="rpe-k")
    assert questions_taught(monkeypatch, method="vanilla") == first

@pytest.mark.parametrize("uniform, shares", [
    (False, (1 / 4, 1 / 4, 1 / 4, 1 / 4)),
    (True, (9 / 9999, 90 / 9999, 900 / 9999, 9000 / 9999))])
def test_training_numbers_have_every_length_equally_often(monkeypatch, uniform, shares):
    """Or are uniform below 10,000."""
    options = dict(uniform=uniform, train_digits=4, n_train=9999, batch=9999, steps=1)
    [questions] = questions_taught(monkeypatch, **options)
    for numbers in zip(*questions):
        lengths = Counter(len(str(n)) for n in numbers)
        for digits, share in enumerate(shares, 1):
            assert lengths[digits] == pytest.approx(9999 * share, abs=200)

# -----
# 10. Command line: exit codes, one line for bad input, every option from its own limits

BAD = [  # the first option is the one that the line names
    # No such value
    "--task nothing",
    "--method x",
    "--model x",
    "--preset slow",
    "--rules loose",
    "--optimizer sgd",
    "--device gpu",
    "--size tiny --task addition --model encoder",
    "--method nothing --task addition --model encoder",
    # No number, or one out of its limits
    "--steps",
    "--steps x",
    "--steps 1.5",
    "--samples 1e3",
    "--seeds x",
    "--seeds 0",
    "--seed -1",
    "--seed 4294967296 --seeds 2",
    "--lr -1",
    "--dropout 1.5",
    "--width 3",
    "--width 2001",
    "--lengths ,",
    "--lengths 6,x",
    "--lengths 1000000001",
    "--lengths 2001 --method window",
    "--width 3 --task addition --model encoder",
    "--width 2001 --task addition --model encoder",
    "--prime-lengths 0 --prime 2 --task addition --model encoder",
    "--d-vocab 3 --task consecutive",
    "--d-vocab 65537 --task consecutive",
    # No such option, or none of this task, model or command
    "--foo",
    "--tas addition",
    "--base 7",
    "--json=1",
    "--clip 4",
    "--prime 5",
    "--size base",
    "--dummy",
    "--uniform",
    "--plant 0.5",
    "--modulus 5",
    "--d-head 4",
    "--finetune 3",
    "--n-layer 2 --task addition --model encoder",
    "--rules paper --task addition --model encoder",
    "--n-layer 2 --task consecutive",
    "--dropout 0.1 --task consecutive",
    "--width 9 --task consecutive",
    "--clip 3 --task consecutive",
    "--n-head 2 --task consecutive",
    "--method nope --task consecutive",
    "--optimizer adam --task consecutive",
    "--method window --task addition --model encoder",
    "--method alibi-decoder --task addition --model encoder",
    "--json --list",
    "--json --ask 1",
    "--out=x --from=y",
    # What does not go together
    "--model head --task addition",
    "--model encoder --task successor",
    "--model seq2seq --task multiplication",
    "--n-head 3",
    "--n-head 3 --task addition --model encoder",
    "--n-head 4 --d-model 36 --method rope",
    "--prime 9 --n-train 5 --task addition --model encoder",
    # Nothing to ask
    "--ask",
    "--ask 1+1",
]

@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_line_and_exit_2(command, arguments):
    named = re.match("--[a-z-]+", arguments)[0]
    assert_refused(command(*arguments.split()), named)
    assert not list(Path().rglob("checkpoint.pt"))

def test_a_folder_without_a_run_is_bad_input(command):
    assert_refused(command("--from=nowhere"), "'nowhere' cannot be used")
    assert_refused(command("--from=", "--ask=1"), "'' cannot be used")

def test_a_device_that_is_not_there_is_refused_before_a_folder_is_made(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(command("--device=cuda"), "--device")
    assert not Path("runs").exists()

def test_several_processes_are_refused(command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused(command("--steps=3"), "WORLD_SIZE")

@pytest.mark.parametrize("task, model, preset", [
    ("successor", "seq2seq", "fast"),
    ("successor", "seq2seq", "paper"),
    ("addition", "universal", "paper")])
def test_help_has_a_word_and_the_default_of_each_option(capsys, task, model, preset):
    with pytest.raises(SystemExit):
        L.main(["--task", task, "--model", model, "--preset", preset, "--help"])
    entries = {}
    for text in capsys.readouterr().out.split("\n  --"):
        name, _, about = " ".join(text.split()).partition(" ")
        entries["--" + name] = about
    for name, value in dataclasses.asdict(L.Config(task, model, preset)).items():
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        about = entries[L.flag(name)]
        assert re.fullmatch(rf"([A-Z_]+ )?[a-z].* \({re.escape(str(value))}\)", about), about

@pytest.mark.parametrize("method", L.METHODS)
def test_options_of_a_run_make_it_again(method):
    config = small(method=method)
    assert L.Config(**dataclasses.asdict(config)) == config

def test_window_brings_layers_a_width_and_dropout_for_one_operand():
    one = L.Config(method="window")
    assert (one.n_layer, one.width, one.dropout) == (3, 61, 0.3)
    two = L.Config("addition", method="window")
    assert (two.n_layer, two.width, two.dropout) == (1, 0, 0.0)

def test_methods_bring_rates_and_multiples_of_the_steps(monkeypatch):
    window = L.Config(method="window")
    assert (window.lr, window.steps) == (4e-3, 3 * 350)
    rope = L.Config("addition", method="rope")
    assert (rope.lr, rope.steps) == (3e-3, 10 * 600)
    monkeypatch.setitem(L.METHODS, "rope", L.Method("", defaults=dict(lr=5e-3)))
    assert L.Config("addition", method="rope").lr == 5e-3
    assert L.Config("addition", "encoder", method="rope").lr == 3e-3  # of encoder-decoders alone

def test_options_and_the_paper_preset_go_before_what_methods_bring():
    given = L.Config(method="window", n_layer=1, dropout=0.0, steps=5)
    assert (given.n_layer, given.dropout, given.width, given.steps) == (1, 0.0, 61, 5)
    paper = L.Config(method="window", preset="paper")
    assert (paper.n_layer, paper.lr, paper.steps) == (6, 1e-5, 460_000)

def test_the_paper_preset_of_encoder_decoders():
    """v2, App. B and D, and the authors' code."""
    c = L.Config(preset="paper")
    assert (c.n_encoder, c.n_layer, c.n_head, c.d_model, c.dropout) == (1, 6, 8, 128, 0.3)
    assert (c.lr, c.optimizer, c.rules, c.width) == (1e-5, "adam", "v2", 61)

def test_the_paper_preset_of_encoders():
    """Jelassi, Sec. 2.2: 15,000 epochs of 5,000 examples."""
    c = L.Config("addition", "universal", preset="paper")
    assert (c.n_encoder, c.d_model, c.n_head) == (6, 1024, 16)
    assert (c.lr, c.batch, c.steps) == (1e-4, 32, 15_000 * 5000 // 32)
    assert (c.optimizer, c.uniform, c.width) == ("adam", True, 20)
    assert c.lengths == (5, 6, 10, 15, 20)

def test_defaults():
    c = L.Config()
    assert (c.lengths, c.widths) == ((6, 10, 20, 60), range(7, 16))
    c = L.Config("elementwise-addition")
    assert (c.n_train, c.train_digits, c.width, c.uniform) == (5000, 5, 12, False)
    assert (c.lr, c.batch, c.steps, c.retrain_steps) == (3e-3, 32, 6000, 1000)
    assert L.Config("multiplication").second_digits == 1
    c = L.Config("consecutive")
    assert (c.d_vocab, c.d_model, c.d_head) == (16, 128, 32)
    assert (c.lr, c.batch, c.steps) == (1e-3, 300, 6000)
    assert L.Config("addition", "encoder", prime=5, n_train=5).prime == 5  # all may be primes

def random_value(draw, field, choices):
    """Of an option, for a short run; it may be out of its limits."""
    if choices:
        return draw.choice(list(choices))
    if field.type is float:
        return draw.choice([1e-3, 0.5])
    most = dict(d_model=24, width=30).get(field.name, 5)
    number = draw.randint(1, most)
    if field.type is tuple:
        return (number, 3)
    return field.type(number)

def is_valid(options):
    """Whatever else is raised fails the test."""
    try:
        L.Config(**L.parse(as_flags(options)))
    except L.BadInput as error:
        assert "--" in str(error)
        return False
    return True

def random_options(draw):
    """A random model and task, and random options that go with them."""
    model = draw.choice(list(L.SYSTEMS))
    system = L.SYSTEMS[model]
    options = dict(SMALL.get(model, SMALL["encoder"]), model=model)
    options["task"] = draw.choice(list(system.tasks))
    if model != "head":
        options["retrain_steps"] = 1
    for field in dataclasses.fields(system.options)[2:]:  # after task and model
        if draw.random() < 0.3:
            value = random_value(draw, field, system.options.choices.get(field.name))
            more = options | {field.name: value}
            if is_valid(more):
                options = more
    return options

# What a few steps of training cannot do.
UNTRAINED = "answers no example|the loss is|no lines determine"

@pytest.mark.parametrize("seed", range(40))
def test_random_options_run_or_fail_in_one_line(command, seed):
    options = random_options(random.Random(seed))
    code, out, err = command(*as_flags(options), "--quiet", "--json", "--device=cpu")
    assert (code, len(err)) in [(0, 0), (1, 1)]
    [folder] = Path("runs").iterdir()
    config, parts = L.read_checkpoint(folder)
    assert config == L.Config(**options)
    if code == 0:
        assert parts["tests"] == json.loads(out)["tests"]
    else:
        assert config.method in CALIBRATED
        assert re.match(f"lengen: .*({UNTRAINED})", err[0])

@pytest.fixture
def flags():
    """A run of less than a second, as arguments."""
    return as_flags(small(samples=8)) + ["--quiet", "--device=cpu"]

def test_each_seed_has_a_folder_and_weights_of_its_own(command, flags):
    assert command(*flags, "--seeds=2", "--out=here")[0] == 0
    assert set(os.listdir("here")) == {"seed0", "seed1"}
    first = L.load("here/seed0")[0].head.weight
    second = L.load("here/seed1")[0].head.weight
    assert not torch.equal(first, second)

def test_a_run_that_has_learned_little_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert L.main([*as_flags(small("encoder", lengths=(3,))), "--quiet"]) == 0
    told = capsys.readouterr().err
    assert re.fullmatch(r"lengen: the model has [0-9.]+% of 3 digits right; raise --steps\n", told)

def test_a_run_reports_its_steps(command):
    code, _, err = command(*as_flags(small()))
    assert code == 0
    assert any("step 3 of 3" in line for line in err)

def test_a_folder_that_is_there_is_refused(command, flags):
    os.mkdir("here")
    assert_refused(command(*flags, "--out=here"), "--out")

def test_the_list_names_all_tasks_methods_and_models(command):
    code, out, err = command("--list")
    assert (code, err) == (0, [])
    listed = set(re.split(r"[\s:]+", out))
    for names in L.TASKS, L.ENCODER_TASKS, L.PAIRS, L.METHODS, L.SYSTEMS:
        assert listed >= set(names)

def test_the_newest_run_answers_line_by_line(finished, command):
    for age, name in enumerate(["runs/b", "runs/a", "runs/c"]):
        shutil.copytree(finished[0], name)
        os.utime(f"{name}/result.json", (1e9, 1e9 - age))
    code, out, err = command("--ask", "41", " 1 2 ", "99")
    assert code == 0
    assert out.split() == ["42", "13", "100"]
    assert "runs/b: successor by abc" in err[0]

def fail_with(monkeypatch, error):
    """Let each training step fail."""
    def step(*given):
        raise error
    monkeypatch.setattr(L, "take_step", step)

@pytest.mark.parametrize("error, code, said", [
    (KeyboardInterrupt(), 130, "--from"),
    (L.RunFailed("why"), 1, "why"),
    (L.BadInput("why"), 2, "why")])
def test_a_failure_is_one_line(command, flags, monkeypatch, error, code, said):
    fail_with(monkeypatch, error)
    found, _, err = command(*flags)
    assert found == code
    assert len(err) == 1
    assert err[0].startswith("lengen: ") and said in err[0]

@pytest.mark.parametrize("method", ["alibi", "window-nope"])  # fails in training, before it
@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyError("why"), MemoryError()])
def test_other_errors_end_in_their_traceback(command, monkeypatch, method, error):
    """As those of a method that somebody writes."""
    def broken(config, layer, kind, T, S):
        raise error

    monkeypatch.setitem(L.METHODS, "broken", L.METHODS[method]._replace(bias=broken))
    with pytest.raises(type(error)) as raised:
        command("--method=broken", "--steps=1", "--quiet")
    assert raised.value is error

def test_a_reader_that_goes_away_is_no_failure(command, monkeypatch):
    """As in `lengen.py --list | head -1`. What is still to be printed goes nowhere."""
    def leave(options):
        raise BrokenPipeError

    replaced = []
    monkeypatch.setattr(os, "dup2", lambda new, old: replaced.append(old))
    monkeypatch.setitem(L.MODES, "list", (leave, ("list",)))
    assert command("--list") == (0, "", [])
    assert replaced == [1]  # standard output

def test_a_full_disk_costs_no_result(command, flags, monkeypatch):
    def full(path, data):
        with open(path, "wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    code, out, err = command(*flags)
    assert code == 0
    assert "digits   exact" in out
    names = {re.search(r"([a-z.]+) cannot be written: No space left", line)[1] for line in err}
    assert names == {"checkpoint.pt", "result.json"}
    assert not list(Path().rglob("checkpoint.*"))

def test_a_seed_that_fails_leaves_the_others(command, flags, monkeypatch):
    take = L.take_step

    def step(model, *given):
        loss = take(model, *given)
        return loss * INF if model.config.seed == 1 else loss

    monkeypatch.setattr(L, "take_step", step)
    code, out, err = command(*flags, "--seeds=3")
    assert code == 1
    assert out.count("tests") == 2
    assert len(err) == 1 and "the loss is inf" in err[0]

@pytest.fixture
def interrupted(command, flags, monkeypatch):
    """A folder of a run that was interrupted in its first step."""
    with monkeypatch.context() as patch:
        fail_with(patch, KeyboardInterrupt())
        assert command(*flags, "--out=run")[0] == 130
    return "run"

def test_an_interrupted_run_goes_on(command, interrupted):
    code, out, _ = command("--from", interrupted, "--json", "--lengths=5")
    record = json.loads(out)
    assert code == 0
    assert {row["digits"] for row in record["tests"]["rows"]} == {5}
    assert json.loads(Path(interrupted, "result.json").read_text()) == record

def test_an_interrupted_run_cannot_be_changed(command, interrupted):
    assert_refused(command("--from", interrupted, "--steps=9"), "--steps")

def test_an_interrupted_run_cannot_be_asked(command, interrupted):
    assert_refused(command("--from", interrupted, "--ask", "1"), "not finished")

def test_other_lengths_are_tested_before_finetuning_too(command):
    command(*as_flags(small("encoder", finetune=6)), "--quiet", "--out=run")
    _, out, _ = command("--from=run", "--lengths=2", "--json", "--quiet")
    record = json.loads(out)
    for name in "before", "tests":
        assert [row["digits"] for row in record[name]["rows"]] == [2]

def said_of_a_run(model, share=1.0, digits=0):
    """The teacher has this share right; of tests 989 of 1,000 at 5 digits, and 990 at 6."""
    train = {"teacher": dict(curve=[[100, 0.1, share]]), "attempt 1": dict(curve=[[9, 1.0, 0.0]])}
    rows = [dict(digits=5, correct=989, n=1000), dict(digits=6, correct=990, n=1000)]
    config = dict(model=model, train_digits=digits)
    return list(L.unlearned(dict(config=config, train=train, tests=dict(rows=rows))))

def test_what_is_not_learned_at_its_length_is_said():
    assert said_of_a_run("seq2seq", 0.989) == ["the teacher has 98.9% of held-out right"]
    assert said_of_a_run("seq2seq", 0.99) == []
    assert said_of_a_run("encoder", digits=5) == ["the model has 98.9% of 5 digits right"]
    assert said_of_a_run("encoder", digits=6) == []

# -----
# The long checks: python -m pytest -q -m check

def process(*arguments):
    """lengen.py with these arguments, in a process of its own."""
    command = [sys.executable, str(HERE / "lengen.py")] + [str(x) for x in arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})

def assert_same_weights(folder, other):
    found = L.load(other)[0].state_dict()
    for name, weight in L.load(folder)[0].state_dict().items():
        assert torch.equal(weight, found[name]), name

@pytest.mark.check
def test_25_kills_and_the_same_weights(tmp_path):
    """Killed 25 times at random moments, a run is never unreadable and ends with the same bits."""
    whole, killed, draw = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    flags = [*as_flags(small(steps=6000)), "--quiet", "--device=cpu"]
    start, go_on = flags + [f"--out={killed}"], ["--from", killed, "--quiet", "--device=cpu"]
    assert process(*flags, f"--out={whole}").wait() == 0
    arguments, gone_on = start, 0
    for _ in range(25):
        run = process(*arguments)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(draw.uniform(3, 9))
        run.kill()
        run.wait()
        if run.returncode == 0:  # it was done before; the next one begins anew
            assert_same_weights(whole, killed)
            shutil.rmtree(killed)
            arguments = start
        elif (killed / "checkpoint.pt").exists():  # otherwise it had not begun
            L.read_checkpoint(killed)
            arguments = go_on
            gone_on += 1
    assert process(*arguments).wait() == 0
    assert_same_weights(whole, killed)
    assert gone_on >= 10

@pytest.mark.check
@pytest.mark.parametrize("task, operands", [
    ("successor", [(10 ** 59, 10 ** 60)]),
    ("addition", [(10 ** 59, 10 ** 60), (10 ** 59, 10 ** 60)]),
    ("nx1", [(10 ** 59, 10 ** 60), (0, 10)]),
    ("parity", [(2 ** 59, 2 ** 60)]),
])
def test_abc_is_proved_and_exact_at_60_digits(task, operands):
    """By the default recipe; operands are drawn from these ranges."""
    config = L.Config(task, samples=200)
    parts = learned(config).parts
    assert parts["proof"]["proved"]
    assert_all_right(parts["tests"]["rows"], [6, 10, 20, 60])
    draw, width = random.Random(0), 60 + L.TASKS[task].headroom
    questions = [(width, *[draw.randrange(*limits) for limits in operands]) for _ in range(50)]
    assert right_answers(L.build(config, parts), task, questions) == 50

@pytest.mark.check
@pytest.mark.parametrize("digits, samples, most", [
    (10_000, 5, 1.5e6),
    (1_000_000, 1, 3e6),
])
def test_long_numbers_in_little_memory(finished, digits, samples, most):
    """In kB. A dense bias of 10,000 digits has 4 * 10^8 entries, 1.6 GB, for each attention."""
    run = process("--from", finished[0], f"--lengths={digits}", f"--samples={samples}", "--json",
                  "--quiet")
    [row] = json.loads(run.communicate()[0])["tests"]["rows"]
    assert row["correct"] == row["n"] == samples
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < most  # of the largest so far
