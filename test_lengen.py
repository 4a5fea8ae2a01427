# SPDX-License-Identifier: MIT
"""Tests of lengen.py, in its order. What is right is told by others: Python's integers, torch's
layers and optimizers, plain loops over the papers' formulas, and examples that papers print, which
are those of lengen.py's head. Runs are made and resumed through the command line."""

import copy
import inspect
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
from collections import defaultdict
from decimal import Decimal
from itertools import compress, product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import approx, raises
from torch import nn, randn

import lengen as L
from lengen import METHODS, TASKS, VOCAB, BadInput, Config, Line, Run, RunFailed
from lengen import Transformer, abc_bias, alibi_bias, causal_bias, choose_lines, decode
from lengen import draw_exact, draw_hard, draw_questions, encode, enumerate_windows, example
from lengen import learn_abc, load, prove, train, views_of_rows
from results import calculator, machines, own, report, rounding

torch.set_num_threads(1)
INF = math.inf
parametrize, assert_close = pytest.mark.parametrize, torch.testing.assert_close
HERE = Path(__file__).parent
QUIET = "--quiet --device=cpu"
SHORT = f"--d-model=16 --batch=8 --steps=4 --lengths=2,3 --samples=5 {QUIET}"
NOPE = f"{SHORT} --method=nope"

def small(task="addition", model="seq2seq", **options):
    """The configuration of a model that takes milliseconds."""
    given = dict(method="vanilla", d_model=16, n_head=2, n_encoder=1)
    given |= dict(dropout=0, batch=8)
    if model == "seq2seq":
        given["n_layer"] = 2
    return Config(task, model, **given | options)

def add_task(monkeypatch, total, **fields):
    monkeypatch.setitem(TASKS, "own", L.Task("a task of our own", total, **fields))

def logits(model, source, target):
    """The logits (T, V) of texts: of a question, and of an answer without its last symbol."""
    source, target = encode(source), encode(target)
    return model(source[None], target[None])[0]

@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)

@pytest.fixture
def double():
    """Numbers are float64, to compare many digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run a command line in an empty folder -> exit code, output, lines of standard error."""
    monkeypatch.chdir(tmp_path)
    def run(arguments):
        try:
            code = L.main(shlex.split(arguments))
        except SystemExit as stop:  # of argparse
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err.splitlines()
    return run

@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The four tasks, trained by the defaults -> {task: (folder, record)}."""
    runs = {}
    for task in "successor", "addition", "nx1", "parity":
        folder = tmp_path_factory.mktemp("runs") / task
        arguments = f"--task={task} --lengths=6,60 --samples=200 --quiet --device=cpu"
        assert L.main(arguments.split() + [f"--out={folder}"]) == 0
        record = Path(folder, "result.json").read_text()
        runs[task] = folder, json.loads(record)
    return runs

# 1. Tasks, and questions of them that are drawn (section 4) --------------------------------------

def operands_of(task, question):
    """Tokens of a question -> the texts of its operands."""
    return decode(question)[1:-1].split(TASKS[task].sign or None)

def answer_to(task, question):
    """Tokens of a question -> tokens of the answer, by Python's integers."""
    texts = operands_of(task, question)
    a, b = int(texts[0]), int(texts[-1])
    known = dict(successor=a + 1, addition=a + b, nx1=a * b)
    if task in known:
        text = str(known[task]).rjust(len(texts[0]), "0")[::-1]
    else:  # how many of the bits so far are 1, modulo 2
        text = decode(question[1:-1].flip(0).cumsum(0) % 2)
    if task == "parity-label":
        text = text[-1]
    return encode(f"${text}&")

@parametrize("draw", [draw_exact, draw_hard])
@parametrize("task", ["successor", "addition", "nx1", "parity", "parity-label"])
def test_draw_questions_have_the_answers_of_pythons_integers(task, draw):
    """So are those of Task.step, xor and arrange."""
    for length in 1, 40, 200:
        source, target = draw_questions(small(task), draw, length, 30)
        for question, answer in zip(source, target):
            assert answer.equal(answer_to(task, question))

def test_encode_and_decode_number_the_symbols_of_vocab():
    """By hand: digits first, then `+*$&@`."""
    tokens = [12, 0, 1, 9, 10, 11, 13, 14]
    assert encode("$019+*&@").tolist() == tokens
    assert decode(torch.tensor(tokens + [15])) == "$019+*&@?"

@parametrize("task, operands, shown", [
    ("successor", "129", "$0129& $0310&"), ("addition", "123 748", "$0123+0748& $1780&"),
    ("addition", "0 999", "$0000+0999& $9990&"), ("addition", "123 748", "$+00172438& $1780&"),
    ("nx1", "123 6", "$0123*6& $8370&"), ("nx1", "123 6", "$*06162636& $8370&"),
    ("parity", "1011", "$1011& $1001&"), ("parity-label", "1011", "$1011& $1&")])
def test_example_is_written_as_in_the_papers(task, operands, shown):
    """v2, App. D.1, where 0123 + 0748 gives 1780, and App. C.4, where operands are interleaved."""
    align = shown[1] in "+*"
    texts = example(task, *operands.split(), width=4, align=align)
    assert " ".join(texts) == shown

def test_arrange_takes_digits_from_place_0_on():
    """v2, App. D.1."""
    digits = torch.tensor([[[3, 8], [2, 4], [1, 7], [0, 0]]])
    [source], [target] = L.arrange(TASKS["addition"], digits)
    assert decode(source) == "$0123+0748&"
    assert decode(target) == "$1780&"

@parametrize("question", ["logarithm 1", "successor", "nx1 7 12", "successor 1_0"])
def test_example_refuses_what_is_no_question(question):
    with raises(BadInput):
        example(*question.split())

def test_draw_questions_leaves_out_those_without_an_answer(monkeypatch):
    """A difference below 0 has none, as Python's integers tell."""
    add_task(monkeypatch, lambda carry, a, b: a - b + carry, operands=("number", "number"),
             sign="+")
    source, target = draw_questions(small("own"), draw_exact, 6, 200)
    assert len(source) == 200
    for question, answer in zip(source, target):
        a, b = map(int, operands_of("own", question))
        assert int(decode(answer)[-2:0:-1]) == a - b >= 0

def divide(carry, a, b):
    a += 10 * carry
    divisor = b.clamp(min=1)
    return torch.where(b == 0, -1, a // divisor), a % divisor

def test_draw_questions_computes_the_first_digit_first_with_msd_first(monkeypatch):
    """Long division, by Python's integers. Task.step takes pairs; a digit of -1 is no answer."""
    add_task(monkeypatch, divide, operands=("number", "digit"), sign="*", msd_first=True)
    source, target = draw_questions(small("own"), draw_exact, 6, 200)
    for question, answer in zip(source, target):
        a, b = map(int, operands_of("own", question))
        assert int(decode(answer)[1:-1]) == a // b
    with raises(BadInput):
        example("own", "7", "0")

@parametrize("change", [4, -2])
def test_arrange_refuses_digits_outside_the_base(monkeypatch, change):
    add_task(monkeypatch, lambda carry, a: (a + change, carry))
    with raises(ValueError, match="0 to 9"):
        draw_questions(small("own"), draw_exact, 6, 200)

@parametrize("task, n", [("successor", 9), ("nx1", 90)])
def test_draw_questions_are_distinct_and_all_if_they_are_few(task, n):
    """There are 9 numbers of one digit without a leading zero, and 10 single digits."""
    source, _ = draw_questions(small(task), draw_exact, 1, 500)
    assert len(source) == len(source.unique(dim=0)) == n

@parametrize("task, base, n", [("addition", 10, 7), ("addition", 2, 21), ("parity", 2, 20)])
def test_width_of_a_task_fits_the_answers_of_training_numbers(task, base, n):
    """They are below 2^20, which has seven digits, and a sum one bit more."""
    assert TASKS[task]._replace(base=base).width == n

def test_draw_exact_has_all_digits_but_no_leading_zero():
    digits = draw_exact(10, 2, 2000)
    assert digits.amin(0).tolist() == [0, 1]
    assert digits.amax(0).tolist() == [9, 9]

def test_draw_hard_has_short_and_equal_numbers_and_long_carries():
    """Of uniform numbers, one in 10^20 would be such."""
    a, b = draw_hard(10, 60, 20_000).split(10_000)
    for places in a == 0, a == b, a + b == 9:
        assert places[:, 20:40].all(1).any()

# 2. Attention and biases --------------------------------------------------------------------------

def attention_of_torch(ours):
    theirs = nn.MultiheadAttention(ours.out.in_features, ours.n_head, batch_first=True)
    projections = ours.q, ours.k, ours.v
    theirs.in_proj_weight.data = torch.cat([x.weight for x in projections])
    theirs.in_proj_bias.data = torch.cat([x.bias for x in projections])
    theirs.out_proj = ours.out
    return theirs

@parametrize("scores", [None, lambda q, k: q @ k.mT])
def test_attention_equals_torchs_with_a_bias_per_head(double, scores):
    """MultiHeadAttention gives its outputs and weights, also if a method computes the products."""
    ours = L.MultiHeadAttention(12, 3, scores=scores)
    x, memory = randn(2, 5, 12), randn(2, 7, 12)
    bias = randn(3, 5, 7)
    expected = attention_of_torch(ours)(
        x, memory, memory, attn_mask=bias.repeat(2, 1, 1), average_attn_weights=False)
    assert_close(ours(x, memory, bias), expected)

def test_masked_softmax_is_0_with_finite_gradients_where_all_keys_are_closed():
    scores = randn(2, 5, requires_grad=True)
    weights = L.masked_softmax(scores, torch.tensor([[-INF], [0.0]]))
    weights.square().sum().backward()
    assert weights[0].eq(0).all()
    assert scores.grad.isfinite().all()
    assert_close(weights[1], scores[1].softmax(0))

@parametrize("position", [7, 999_999])
def test_sinusoidal_is_the_formula_of_vaswani(position):
    """Sec. 3.5, by NumPy, as float32 has too few digits for large angles."""
    waves = L.sinusoidal(torch.tensor([position]), 6)
    angles = position / 10000 ** (np.array([0, 2, 4]) / 6)
    expected = np.stack([np.sin(angles), np.cos(angles)], 1)
    assert waves[0].tolist() == approx(expected.flatten(), abs=1e-6)

def test_rope_equals_torchs_rotary_embedding():
    """That of ONNX, with the interleaved channels of Su et al."""
    x, positions = randn(2, 3, 5, 8), torch.arange(5)
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angles = positions[:, None] * frequencies
    tables = angles.cos(), angles.sin(), positions.expand(2, 5)
    rotated = torch.onnx.ops.rotary_embedding(x, *tables, interleaved=True)
    assert_close(L.rope(x), rotated)
    scores = METHODS["rope"].scores(None, "cross", x[:, :, :3], x)  # by `rotary`
    assert_close(scores, rotated[:, :, :3] @ rotated.mT)

@parametrize("method", ["rpe-k", "rpe-kq"])
def test_relative_scores_are_the_sums_of_shaw_and_huang(double, method):
    """RelativeScores by a loop: Shaw et al. 2018, Eq. 4; Huang et al. 2020, method 4."""
    config = small(method=method, d_model=8, clip=2)  # a table for offsets -2 to 2
    relative = METHODS[method].scores(config, "cross")
    q, k = randn(2, 3, 5, 4), randn(2, 3, 8, 4)
    a = torch.zeros(5, 8, 4)
    for i, j in product(range(5), range(8)):
        a[i, j] = relative.table[max(-2, min(j - i, 2)) + 2]
    expected = q @ k.mT + (q[:, :, :, None] * a).sum(4)
    if method == "rpe-kq":
        expected += (k[:, :, None] * a).sum(4)
    assert_close(relative(q, k), expected)

def test_alibi_slopes_are_those_of_press():
    """Sec. 3 prints 1/2 to 1/256 for 8 heads. For 12, its code adds every second one of 16."""
    printed = [1 / 2 ** h for h in range(1, 9)]
    added = [0.707107, 0.353553, 0.176777, 0.088388]
    assert L.alibi_slopes(8).tolist() == printed
    assert L.alibi_slopes(12).tolist() == approx(printed + added, abs=1e-6)

def test_alibi_bias_falls_to_both_sides():
    """By hand; of two heads, the second has a slope of 1/256."""
    distances = torch.tensor([[0, 1, 2], [1, 0, 1]])
    assert alibi_bias(2, 2, 3)[1].equal(-distances / 256)

def test_causal_bias_is_torchs_mask():
    assert causal_bias(6)[0].equal(nn.Transformer.generate_square_subsequent_mask(6))

@parametrize("w", [0, 2, 5])
def test_window_bias_opens_a_row_and_w_tokens_before_it(w):
    """v2, App. C.4."""
    bias = L.window_bias(w, 6, 6)[0]
    for i, row in enumerate(bias):
        opened = row.eq(0).nonzero().flatten()
        assert opened.tolist() == list(range(max(0, i - w), i + 1))

def shown_to_rows(bias, text):
    """A bias (T, S) and a text of S symbols -> the symbols that each row sees, as words."""
    rows = bias.isfinite().tolist()
    return " ".join("".join(compress(text, row)) for row in rows)

# 3. Transformer and the table of methods ----------------------------------------------------------

LINES = [
    Line(0, -1, 0, 1, -0.2, 3.0),
    Line(0, 0, 1, 0, -0.1, 3.0),
    Line(1, -1, 1, -1, 0.0, 3.0),
    Line(1, 1, 0, -1, 0.0, 3.0, attention="self")]

def drawn_model(config, *lines):
    """A model that is not trained, with weights large enough to see a difference."""
    model = Transformer(config, *lines).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.5)
    return model

def drawn_tokens(*shape):
    return torch.randint(10, shape)

def growing_alibi(config, layer, attention, T, S):
    return (1 + layer) * alibi_bias(2, T, S)

def layer_of_torch(kind, ours, preset):
    theirs = kind(16, 2, 64, 0.0, batch_first=True, norm_first=preset == "fast")
    theirs.linear1 = ours.feed_forward[0]
    theirs.linear2 = ours.feed_forward[3]
    theirs.self_attn = attention_of_torch(ours.self_attention)
    if kind == nn.TransformerDecoderLayer:
        theirs.multihead_attn = attention_of_torch(ours.cross_attention)
    return theirs

@parametrize("preset", ["fast", "paper"])
def test_transformer_equals_torchs_layers(double, monkeypatch, preset):
    """Transformer (bias_of), Layer (residual), sinusoids: an encoder layer, two of a decoder."""
    monkeypatch.setitem(METHODS, "own", METHODS["vanilla"]._replace(bias=growing_alibi))
    model = drawn_model(small(method="own", preset=preset))
    source, target = drawn_tokens(3, 7), drawn_tokens(3, 5)
    waves = L.sinusoidal(torch.arange(7), 16)
    mask = alibi_bias(2, 7, 7).repeat(3, 1, 1)
    encoder = layer_of_torch(nn.TransformerEncoderLayer, model.encoder[0], preset)
    memory = encoder(model.embedding(source) + waves, mask)
    x = model.embedding(target) + waves[:5]
    for n, layer in enumerate(model.decoder, 1):
        theirs = layer_of_torch(nn.TransformerDecoderLayer, layer, preset)
        own = n * mask[:, :5, :5] + causal_bias(5)
        x = theirs(x, memory, own, n * mask[:, :5])
    expected = model.head(F.layer_norm(x, (16,)))
    assert_close(model(source, target), expected)

@parametrize("kind, n_layer", [("universal", 1), ("encoder", 3)])
def test_transformer_equals_torchs_encoder_layers(double, monkeypatch, kind, n_layer):
    """By Transformer. A universal one repeats a layer. Answers are read at the first tokens."""
    monkeypatch.setitem(METHODS, "own", METHODS["vanilla"]._replace(bias=growing_alibi))
    model = drawn_model(small(model=kind, method="own", n_encoder=3))
    assert len(set(model.encoder)) == n_layer
    source = drawn_tokens(3, 7)
    x = model.embedding(source) + L.sinusoidal(torch.arange(7), 16)
    for n, layer in enumerate(model.encoder, 1):
        theirs = layer_of_torch(nn.TransformerEncoderLayer, layer, "fast")
        theirs.activation = F.gelu
        x = theirs(x, n * alibi_bias(2, 7, 7).repeat(3, 1, 1))
    expected = model.head(F.layer_norm(x, (16,)))
    assert_close(model(source, drawn_tokens(3, 5)), expected[:, :5])

@parametrize("method, limit", [("abc", 103)] + [(method, 12) for method in METHODS])
def test_generate_equals_the_greedy_loop(double, method, limit):
    """For all methods, such as LearnedPositions. Beyond 100 rows, it has a bias in pieces."""
    lines = [LINES] * (method == "abc")
    model = drawn_model(small(method=method, n_encoder=int(limit == 12)), *lines)
    source = drawn_tokens(3, 19)
    expected = torch.full((3, 1), VOCAB.index("$"))
    for _ in range(limit):
        token = model(source, expected)[:, -1:].argmax(2)
        expected = torch.cat([expected, token], 1)
    assert len(expected.unique()) > 2  # not one token again and again
    assert L.generate(model.train(), source, limit).equal(expected)

def test_pieces_are_on_the_device_of_their_rows():
    """Also if another device is the default one when they are made."""
    bias = L.CalibratedBias(one_layer(), lines_at(one_layer(), "0 -1"))
    rows = torch.arange(300)
    with torch.device("meta"):
        devices = {x.device for piece in bias.pieces(0, "cross", rows, 302) for x in piece}
    assert devices == {rows.device}

@parametrize("rules, scores", [("ours", None), ("ours", L.rotary), ("v1", None)])
def test_pieces_give_the_logits_of_the_whole_bias(double, monkeypatch, rules, scores):
    """As in training; beyond 100 rows, by our rules, they come unless a method has own scores."""
    monkeypatch.setitem(METHODS, "own", METHODS["abc"]._replace(scores=scores))
    config = small(method="own", rules=rules, n_encoder=0)
    model = drawn_model(config, [LINES[0], LINES[0]._replace(offset=5)])
    source, target = drawn_tokens(1, 303), drawn_tokens(1, 151)
    assert_close(model(source, target), model.train()(source, target))

@parametrize("side, index", [("target", "0120120"), ("source", "0210210")])
def test_embed_repeats_positions_after_a_period(side, index):
    """v2, App. C.4; a source is counted from its end."""
    model, tokens = Transformer(small(method="window-cyclic")), drawn_tokens(1, 7)
    waves = L.sinusoidal(encode(index), 16)
    assert_close(model.embed(tokens, side), model.embedding(tokens) + waves)

@parametrize("task, question, shown", [
    ("successor", "$0129&", "9& 29 12 01"), ("addition", "$+00172438&", "38& 2438 1724 0017")])
def test_window_bias_of_methods_shows_a_place_and_the_one_before_it(task, question, shown):
    """By hand, rows 0 to 3. Two operands have two columns a place. See make_bias, bind, banded."""
    bias = L.make_bias(small(task, method="window"))
    found = bias(0, "cross", 4, len(question))
    assert shown_to_rows(found[0], question) == shown

@parametrize("method, biased", [("alibi", "encoder self cross"), ("alibi-decoder", "self")])
def test_alibi_is_in_all_attentions_or_the_decoders_own(method, biased):
    """The function `alibi`, by the methods' descriptions."""
    bias = L.make_bias(small(method=method))
    for attention in "encoder", "self", "cross":
        found = bias(0, attention, 5, 6)
        assert (found is not None) == (attention in biased)
        assert found is None or found.equal(alibi_bias(2, 5, 6))

# 4. Questions, training and tests -----------------------------------------------------------------

def fit(model, batches):
    """Train at half the peak rate, a batch in each step -> what the run keeps."""
    run = Run(model.config, {})
    data = SimpleNamespace(steps=len(batches), batch=lambda step: batches[step - 1],
                           rate=lambda step: 0.5, check=lambda model: [])
    train(run, model, "model", data)
    return run.parts["model"]

def drawn_batches(n):
    return [(drawn_tokens(8, 7), drawn_tokens(8, 6)) for _ in range(n)]

@parametrize("kind, beta, decay", [("seq2seq", 0.98, 0.0), ("encoder", 0.999, 0.01)])
def test_take_step_equals_torchs_adamw_in_the_paper_preset(double, kind, beta, decay):
    """Optimizer: a loop with AdamW and clipping at norm 1. `fit` calls take_step by `train`."""
    ours = drawn_model(small(model=kind, preset="paper", lr=0.01))
    theirs, batches = copy.deepcopy(ours), drawn_batches(6)
    weights = list(theirs.parameters())
    adam = torch.optim.AdamW(weights, 0.005, (0.9, beta), weight_decay=decay)
    for source, target in batches:
        found = theirs(source, target[:, :-1])
        loss = F.cross_entropy(found.mT, target[:, 1:])
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
    assert fit(ours, batches)["curve"] == [[6, approx(loss.item())]]
    for found, expected in zip(ours.parameters(), weights):
        assert_close(found, expected, atol=1e-6, rtol=0)

def test_optimizer_gives_muon_the_matrices_of_layers_and_adam_the_others():
    """Optimizer's first step: Adam moves numbers by a quarter of the rate, here 0.01, at most."""
    model = drawn_model(small(method="rpe-k", lr=0.02))
    before = copy.deepcopy(model.state_dict())
    fit(model, drawn_batches(1))
    for name, weight in model.named_parameters():
        matrix = "coder" in name and weight.dim() == 2 and "table" not in name
        moved = (weight - before[name]).abs() / 0.01
        assert (moved.max() > 0.2501) == matrix

def test_graphed_step_equals_take_step():
    """On a GPU, if there is one, the first step is executed and the others are replayed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    share, batches = torch.ones((), device=device), drawn_batches(4)
    def losses_of(step, *graphs):
        model = L.new_model(Run(small(), {}, None, device), "model")
        optimizer = L.Optimizer(model, small())
        return [step(model, optimizer, *graphs, share, *batch).item() for batch in batches]
    assert_close(losses_of(L.graphed_step, {}), losses_of(L.take_step))

def test_muon_equals_torchs():
    """Over steps with momentum, as nearly as torch's, which computes with three digits."""
    weight = nn.Parameter(torch.zeros(16, 64))
    theirs = torch.optim.Muon([weight], 1.0, weight_decay=0)
    momentum, moved = torch.zeros(1, 16, 64), 0
    for gradient in randn(4, 1, 16, 64):
        weight.grad = gradient[0]
        theirs.step()
        moved = moved - L.muon(gradient, momentum)[0]
    assert (moved - weight).norm() < 0.02 * weight.norm()

@parametrize("method", ["vanilla", "rope", "rpe-kq", "window-cyclic"])
def test_take_step_reads_no_value(method):
    """So graphed_step can capture it on a GPU. On torch's meta device, no value can be read."""
    with torch.device("meta"):
        model, share = Transformer(small(method=method)), torch.ones(())
        source, target = drawn_tokens(8, 7), drawn_tokens(8, 6)
    optimizer = L.Optimizer(model, model.config)
    assert L.take_step(model, optimizer, share, source, target).is_meta

@parametrize("preset, first, rates", [
    ("fast", True, {15: 0.5, 241: 0.5}),
    ("fast", False, {15: 0.5, 151: 0.5}),
    ("paper", True, {1: 1.0, 300: 1.0})])
def test_numbers_data_has_rates_that_rise_then_fall(preset, first, rates):
    """By hand: up in 30 of 300 steps, and down in the last 40% or all along."""
    data = L.numbers_data(small(preset=preset), 300, first)
    for step, share in rates.items():
        assert data.rate(step) == approx(share)

def integers_of(source):
    return [int(decode(question)[1:-1]) for question in source]

@parametrize("first, step, power", [
    (True, 1, 14), (True, 300, 19), (False, 1, 19)])
def test_numbers_data_begins_with_small_numbers(first, step, power):
    """Half of the first are below 1.6% of the range; later draws are uniform."""
    data = L.numbers_data(small("successor", batch=4000), 300, first)
    source, _ = data.batch(step)
    assert np.median(integers_of(source)) == approx(2 ** power, rel=0.3)

class Counter(nn.Module):
    """A model that adds 1 by Python's integers, wrongly where a number ends in 7."""
    def forward(self, source, target):
        self.asked = integers_of(source)
        answers = torch.stack([answer_to("successor", question) for question in source])
        answers[:, 2] += source[:, -2] == 7
        return F.one_hot(answers[:, 1:], len(VOCAB)).float()

def training_of(seed):
    """Data of successor, and all its training numbers."""
    data = L.numbers_data(small("successor", batch=1000, seed=seed), 300, True)
    return data, set(inspect.signature(data.batch).parameters["pool"].default.tolist())

def test_numbers_data_trains_and_checks_on_different_numbers():
    """Training has seven eighths of those below 2^20: v2, App. B."""
    (data, training), model = training_of(0), Counter()
    [share] = data.check(model)
    assert 0.8 < share < 0.99
    assert training.isdisjoint(model.asked)
    for step in 1, 300:
        source, _ = data.batch(step)
        assert set(integers_of(source)) <= training
    assert len(training) == 7 * 2 ** 17 and training < set(range(2 ** 20))
    assert training != training_of(1)[1]

def test_train_tries_a_proof_every_25_steps_from_50_on(monkeypatch):
    """So the fourth, which succeeds, is that of step 125. Every 100th step is reported, too."""
    proofs = [dict(proved=n == 3) for n in range(4)]
    rest = iter(proofs)
    run = Run(small(method="nope", d_model=4), {})
    monkeypatch.setattr(L, "prove", lambda model, windows: next(rest))
    model, data = Transformer(run.config), L.numbers_data(run.config, 300, True)
    assert train(run, model, "model", data, ["a window"]) is proofs[3]
    assert [step for step, *_ in run.parts["model"]["curve"]] == [100, 125]

def test_train_fails_if_the_loss_is_not_finite():
    model = Transformer(small())
    nn.init.constant_(model.embedding.weight, math.nan)
    with raises(RunFailed, match="step 3"):
        fit(model, drawn_batches(3))

def test_evaluate_counts_right_answers_and_places():
    """END, always right to right_tokens, is no place. draw_tests has hard ones up to 60 digits."""
    config = small("successor", lengths=(60, 5, 101), samples=201)
    rows = L.evaluate(Counter(), config)["rows"]
    kinds = [f"{row['digits']} {row['set']} {row['n']}" for row in rows]
    assert kinds == ["60 random 201", "60 hard 201", "5 random 201", "101 random 200"]
    for row, width in zip(rows, [61, 61, 7, 102]):
        share = row["correct"] / row["n"]
        assert 0.8 < share < 0.99
        assert row["places"] == [1, approx(share, abs=1e-4)] + [1] * (width - 2)

@parametrize("question, answer", [
    ("129", "130"), (" 0099", "100"), ("9999999", "10000000")])
def test_ask_writes_the_first_digit_first(question, answer):
    assert L.ask(Counter(), small("successor"), question) == answer

@parametrize("method, steps", [("window-nope", 150), ("rpe-k", 300)])
def test_learn_method_reaches_numbers_that_are_held_out(method, steps):
    """By a new_model. A guess is right on one in 10^6."""
    run = Run(Config("successor", method=method, steps=steps), {})
    L.learn_method(run)
    assert run.parts["model"]["curve"][-1][2] > 0.5

# 5. ABC: lines, bias, calibration -----------------------------------------------------------------

def index_of(direction, i, j, n):
    """Which line in this direction an element of n columns is on: v1, Sec. 5, counted from 0."""
    return direction, {1: j - i, 0: j, -1: n - 1 - (i + j)}[direction]

def bias_of_papers(attention, M, N, kappa, of, groups, total):
    """(m, n) -> (M, N) by Eqs. 1 and 2 of v1, element by element. No row sees later tokens."""
    m, n = attention.shape
    bias = torch.full((M, N), -INF)
    for group in groups:
        d = defaultdict(list)
        for direction, i, j in product(group, range(m), range(n)):
            line = index_of(direction, i, j, n)
            d[line].append(attention[i, j].item())
        for line, elements in d.items():
            d[line] = sum(elements) if total else np.mean(elements)
        values = list(d.values())
        threshold = np.mean(values) + kappa * np.std(values)
        for direction, i, j in product(group, range(M), range(N)):
            value = d.get(index_of(direction, i, j, N), -INF)
            if value > threshold and (of == "cross" or j <= i):
                bias[i, j] = max(bias[i, j], value - max(values))
    bias[bias.isneginf().all(1)] = 0  # transparent
    return bias

@parametrize("m, n, kappa", [(6, 9, 0.5), (9, 6, 1.0)])
@parametrize("rules, of, groups, total", [
    ("v1", "cross", [[1], [0], [-1]], False),
    ("v2", "self", [[1, 0, -1]], False),
    ("code", "cross", [[-1]], True), ("code", "self", [[1]], True)])
def test_abc_bias_is_that_of_the_papers_equations(double, rules, of, groups, total, m, n, kappa):
    """So are `find_lines`, `bias_of_lines`. By a loop over v1, Eqs. 1, 2; v2, Eq. 1; the code."""
    attention = randn(2, m, n).softmax(2)
    found = abc_bias(attention, 12, 15, rules, of, kappa=kappa)
    for head, bias in zip(attention, found):
        expected = bias_of_papers(head, 12, 15, kappa, of, groups, total)
        assert_close(bias, expected)

def test_find_lines_gives_those_of_its_example():
    """Of six means, .44 and .31 exceed mu + 0.44 * .377 = .309, and .31 - .44 is -.13."""
    attention = torch.zeros(1, 5, 6)
    for offset, mean in enumerate([.02, .31, .44, .05, .03, .01], -2):
        attention[0].diagonal(offset).fill_(mean)
    lines = L.find_lines(attention, "self", [6], 0.44, directions=(1,), ours=True)
    found = {line.offset: line.bias for line in lines}
    assert found == {-1: approx(-.13), 0: 0}

def test_abc_bias_continues_lines_within_their_block():
    """An anti-diagonal of the first of two blocks of 5, which become two of 8."""
    attention = F.pad(torch.eye(5).flip(1), (0, 5))[None]
    blocks = [(5, 8), (5, 8)]
    bias = abc_bias(attention, 8, 16, blocks=blocks, directions=(-1,))
    expected = F.pad(torch.eye(8).flip(1), (0, 8))
    assert bias[0].exp().equal(expected)

@parametrize("task, keys, attention, path, shown", [
    ("successor", "$3456&", "cross", "-1 0 0", "6543$$"),
    ("successor", "$3456&", "cross", "-1 0 -1", "$6543$"),
    ("successor", "$3456&", "cross", "1 0 1", "3456$$"),
    ("addition", "$123+456&", "cross", "-1 0 1", "21$$$$"),
    ("addition", "$123+456&", "cross", "-1 1 0", "654+$$"),
    ("nx1", "$123*6&", "cross", "0 2 0", "666666"),
    ("nx1", "$123*6&", "cross", "-1 0 0", "321$$$"),
    ("successor", "$abcde", "self", "1 0 -1", "$$abcd"),
    ("successor", "$abcde", "self", "1 0 1", "$$$$$$")])
def test_bias_of_lines_shows_a_place_to_each_row(task, keys, attention, path, shown):
    """By hand, by section 5's table. CalibratedBias leaves out other layers (by arguments)."""
    direction, block, offset = map(int, path.split())
    line = Line(0, direction, block, offset, 0.0, 1.0, attention=attention)
    lines = [line, line._replace(layer=1, offset=3)]
    bias = L.CalibratedBias(small(task), lines)
    found = bias(0, attention, 6, len(keys))
    assert shown_to_rows(found[0], keys) == " ".join(shown)

@parametrize("task, blocks", [
    ("successor", "$0129 &"), ("addition", "$0123 +0748 &"), ("nx1", "$0123 * 7 &")])
def test_blocks_of_are_numbers_with_the_symbol_before_them_and_single_columns(task, blocks):
    sizes = list(map(len, blocks.split()))
    assert L.blocks_of(small(task), "cross", sum(sizes)) == sizes

def paths_of(own, cross, **options):
    """Averaged attentions -> layer, head and path of the lines that are found."""
    lines = L.calibrate(small(width=10, **options), (own, cross))
    return [(line.layer, line.head) + line.path for line in lines]

@pytest.fixture
def maps():
    """Attentions of two layers and heads between `$0123456789` and `$0123456789+0123456789&`."""
    own = torch.full((2, 2, 11, 11), 0.01)
    return own, torch.full((2, 2, 11, 23), 0.01)

def test_calibrate_gives_each_layer_and_number_lines_of_its_own(maps):
    """By hand. A vertical inside means nothing, nor do rows that are never filled."""
    own, cross = maps
    own[0, 0].diagonal(-1).fill_(1)
    own[0, 1, 8:, 8:].fill_diagonal_(1)  # beyond seven digits and END
    cross[0, 1, :9, 11:20] += torch.eye(9).flip(1)  # in the second number
    cross[1, 1, :, [5, 11]] = 1  # inside the first number; at the sign of the second
    assert paths_of(own, cross) == [
        (0, 0, "self", 1, 0, -1),
        (0, 1, "cross", -1, 1, 2),
        (1, 1, "cross", 0, 1, 0)]

@parametrize("msd_first", [False, True])
def test_calibrate_looks_for_diagonals_if_the_first_digit_is_place_0(monkeypatch, maps, msd_first):
    spec = TASKS["addition"]._replace(msd_first=msd_first)
    monkeypatch.setitem(TASKS, "addition", spec)
    own, cross = maps
    cross[0, 0, :9, 2:11] += torch.eye(9)  # in the first number
    path = 0, 0, "cross", 1, 0, 2
    assert (path in paths_of(own, cross)) == msd_first

def test_average_attention_is_the_mean_over_right_answers(double):
    """Two of five answers are made wrong, and the others given one by one."""
    model = drawn_model(small(n_layer=1))
    source, own, cross = drawn_tokens(5, 19), 0, 0
    target = L.generate(model, source, 9)
    target[1:3, 3] += 1
    for n in 0, 3, 4:
        model(source[n, None], target[n, None, :-1])
        own += model.decoder[0].self_attention.weights / 3
        cross += model.decoder[0].cross_attention.weights / 3
    assert_close(L.average_attention(model, source, target), (own, cross))

def test_average_attention_fails_if_fewer_than_1_percent_are_right():
    model = drawn_model(small())
    source = drawn_tokens(1, 19).repeat(101, 1)
    target = L.generate(model, source, 9)
    target[1:, 3] += 1
    L.average_attention(model, source[:100], target[:100])
    with raises(RunFailed, match="1%"):
        L.average_attention(model, source, target)

@parametrize("start, end, needs, use", [
    ("# 1. ", "# 2. ", "itertools torch Callable NamedTuple",
     "arrange(TASKS['addition'], torch.arange(8).view(1, 4, 2) % 5)[1]"),
    ("# 2. ", "# 3. ", "math torch nn Iterator", "MultiHeadAttention(6, 2)(x, x, causal_bias(5))"),
    ("# 5. ", "def blocks_of", "math torch NamedTuple", "abc_bias(x, 8, 9)"),
    ("class Optimizer", "def take_step", "math torch F",
     "[ours := Optimizer(model, config), model.norm.bias.grad.add_(1), ours.step(x[0, 0, 0]),"
     " *model.parameters()][3:]")])
def test_parts_can_be_copied_as_they_stand(start, end, needs, use):
    """With what they say that they need, they do in an empty file what they do in lengen.py."""
    text, x, config = inspect.getsource(L), randn(2, 5, 6), small()
    copied = {name: getattr(L, name) for name in needs.split()}
    exec(text[text.index(start):text.index(end)], copied)
    found = []
    for names in copied, vars(L):
        torch.manual_seed(0)
        model = Transformer(config)
        found.append(eval(use, names | dict(x=x, model=model, config=config)))
    assert_close(*found)

# 6. Proof -----------------------------------------------------------------------------------------

def one_layer(task="successor", **options):
    """The configuration of a model that can be proved."""
    given = dict(method="abc", n_layer=1, n_encoder=0)
    return small(task, **given | options)

def line(path, head=0, bias=0.0, z=3.0):
    """line("cross -1 0 1") has this attention, direction, block and offset."""
    attention, *numbers = path.split()
    return Line(head, *map(int, numbers), bias, z, attention=attention)

def lines_at(config, places):
    """Lines by which row t sees place t + n of each number, for each n of `places`, a text."""
    lines = []
    for n, place in enumerate(map(int, places.split())):
        path = f"cross 1 %d {place + 1}" if config.spec.msd_first else f"cross -1 %d {place}"
        for block in range(config.spec.operands.count("number")):
            lines.append(line(path % block, n % 2, -0.1 * n - block))
    return lines

def windows_of(task, places, **options):
    config = one_layer(task, **options)
    return enumerate_windows(config, lines_at(config, places))

def printed(title):
    """What the header of section 6 prints beside a title."""
    [row] = re.findall(rf"#     {title}  +(.+)", inspect.getsource(L))
    return re.split("  +", row)

def test_calibrated_bias_shows_what_the_header_prints():
    """Tokens before rows and at rows, and symbols that lines of one head show."""
    source, target = example("successor", "129", width=4)
    lines = [line("cross -1 0 0"), line("cross -1 0 -1")]
    bias = L.CalibratedBias(one_layer(), lines)
    shown = shown_to_rows(bias(0, "cross", 5, 6)[0], source)
    assert list(target[:-1]) == printed("token before the row")
    assert list(target[1:]) == printed("token that it must write")
    titled = "  ".join(printed("tokens that the lines show"))
    assert shown.split() == re.sub(r"(\S) (\S)", r"\2\1", titled).split()

def test_follow_places_takes_the_moves_of_the_printed_walk():
    """Those of the digits 9, 2, 1, 0, if numbers have 4 digits or more."""
    moves, tails = L.follow_places(TASKS["successor"], least=4)
    state, walk, carries = next(iter(moves)), [], []
    for digit in 9, 2, 1, 0:
        assert tails[state] != ()
        carries.append(str(state.carry))
        [(token, state)] = [move[1:] for move in moves[state] if move[0] == (digit,)]
        walk.append(f"{digit} -> {token}")
    assert tails[state] == ()
    assert carries + [str(state.carry)] == printed("carry before move t")
    assert ["missing"] + walk == printed("move t - 1")
    assert walk + ["(the end)"] == printed("move t")

@parametrize("task", ["addition", "nx1", "parity"])
def test_views_of_rows_are_equal_where_logits_of_random_weights_are(double, task):
    """Rows are grouped by the logits of a model with random weights."""
    config = one_layer(task)
    lines = lines_at(config, "1 0 0")
    lines += [line("self 1 0 -1", 1), line("cross 0 0 0", 1, -0.3)]
    model, groups = drawn_model(config, lines), []
    source, target = draw_questions(config, draw_hard, 12, 300)
    found = model(source, target[:, :-1])
    for rows in found.detach().round(decimals=6), views_of_rows(model.bias, source, target):
        _, group = rows.flatten(0, 1).unique(dim=0, return_inverse=True)
        groups.append(group.tolist())
    pairs = set(zip(*groups))
    first, second = map(set, groups)
    assert len(pairs) == len(first) == len(second) > 20

@parametrize("task, places, start, middle, end", [
    ("successor", "-1 0", 10, 200, 2),
    ("successor", "-1 0 1", 100, 2000 + 20, 2),  # 20 show the last digit, and START
    ("parity", "0", 2, 4, 2),
    ("addition", "-1 0", 100, 20_000, 2)])
def test_enumerate_windows_counts_digits_and_carries(task, places, start, middle, end):
    """By hand: 200 = 10 digits * 10 before them * 2 carries, which the token before a row tells."""
    kinds = {}
    for _, target, indexes in windows_of(task, places).questions:
        is_end = target[:, 1:] > 9
        rows = torch.arange(indexes.shape[1]).clamp(max=1) + is_end
        kinds |= zip(indexes.flatten().tolist(), rows.flatten().tolist())
    kinds = list(kinds.values())
    assert [kinds.count(n) for n in range(3)] == [start, middle, end]

def test_collect_windows_finds_the_clash_of_the_header():
    """That of 129 and 205, which section 6 shows, without the line of offset -1."""
    config = one_layer()
    pool = []
    for number in "129", "205":
        texts = example("successor", number, width=4)
        pool.append([encode(text)[None] for text in texts])
    assert L.collect_windows(config, lines_at(config, "0"), pool).clash
    assert not L.collect_windows(config, lines_at(config, "0 -1"), pool).clash

def test_enumerate_windows_gives_two_questions_that_clash():
    """Rows with the same logits of random weights must write different tokens."""
    windows = windows_of("nx1", "0 -1")  # none shows the single digit
    model, rows, tokens = drawn_model(one_layer("nx1"), windows.bias.lines), [], []
    for source, target in windows.clash:
        rows.append(model(source, target[:, :-1])[0])
        tokens.append(target[0, 1:])
    same = torch.cdist(*rows) < 1e-4
    assert (same & (tokens[0][:, None] != tokens[1])).any()
    assert "refuted" in prove(model, windows)["why"]

def random_task(draw):
    """A table of any carries and digits, half of the time with some that have no answer."""
    names = "number", "number", "digit"
    operands = names[draw.randint(0, 1):draw.randint(2, 3)]
    base, n_carry = draw.randint(2, 5 - len(operands)), draw.randint(1, 3)
    shape = [n_carry] + [base] * len(operands)
    digits, carries = torch.randint(base, shape), torch.randint(n_carry, shape)
    digits[torch.rand(shape) < draw.choice([0, 0.3])] = -1
    headroom, msd_first = draw.randint(0, 2), draw.random() < 0.5
    return L.Task("", lambda *given: (digits[given], carries[given]), operands, "+", base,
                  headroom=headroom, msd_first=msd_first)

def all_questions(spec, length):
    """Those whose numbers have up to `length` digits."""
    numbers = torch.tensor(list(product(range(spec.base), repeat=length))).long()
    numbers = F.pad(numbers, (spec.headroom, 0))
    if not spec.msd_first:
        numbers = numbers.flip(1)
    singles = torch.arange(spec.base)[:, None].expand(-1, numbers.shape[1])
    choices = [numbers if operand == "number" else singles for operand in spec.operands]
    digits = [torch.stack(columns, 1) for columns in product(*choices)]
    return L.arrange(spec, torch.stack(digits))

def tokens_of_views(bias, questions):
    found = defaultdict(set)
    for source, target in questions:
        views = views_of_rows(bias, source, target).flatten(0, 1).numpy()
        for view, token in zip(views, target[:, 1:].flatten().tolist()):
            found[view.tobytes()].add(token)
    return found

@parametrize("number", range(40))
def test_short_questions_show_all_windows(monkeypatch, number):
    """Of random tasks and lines, by brute force, unless two of the questions clash."""
    monkeypatch.setattr(L, "LIMIT", 4)
    torch.manual_seed(number)
    draw = random.Random(number)
    monkeypatch.setitem(TASKS, "own", random_task(draw))
    config, before = one_layer("own"), -draw.randint(0, 2)
    places = draw.sample(["-2", "-1", "0", "1", "2"], draw.randint(1, 3))
    lines = lines_at(config, " ".join(places))
    lines.append(line(f"self 1 0 {before}"))
    windows = enumerate_windows(config, lines)
    least = config.widths[0] - config.spec.headroom
    questions = [all_questions(config.spec, length) for length in range(least, least + 3)]
    bias = L.CalibratedBias(config, lines)
    found = tokens_of_views(bias, questions + list(windows.clash))
    listed = {view: {token} for view, (token, *_) in windows.seen.items()}
    clash = any(len(tokens) > 1 for tokens in found.values())
    assert clash == bool(windows.clash)
    assert clash or found.items() <= listed.items()

def copy_digits(carry, a):
    return a

@parametrize("msd_first", [False, True])
def test_collect_windows_keeps_a_question_that_shows_each(monkeypatch, msd_first):
    """Of the fewest digits, one of which is the headroom."""
    add_task(monkeypatch, copy_digits, base=3, msd_first=msd_first)
    windows = windows_of("own", "1 0", width=15)
    for view, (token, source, target, _) in windows.seen.items():
        [rows] = views_of_rows(windows.bias, source[None], target[None]).numpy()
        row = [row.tobytes() for row in rows].index(view)
        assert target[row + 1] == token
        assert len(source) == 17 and source[1] == 0

@parametrize("headroom, last, first", [
    (0, "2 4 8 4", "2 4 8 4"), (1, "2 4 8 2", "1 2 8 4"), (2, "2 4 8 1", "1 1 8 4")])
def test_short_questions_keep_the_headroom_zero(monkeypatch, headroom, last, first):
    """In a copy of bits, rows see bits t, t - 2, and t - 1 as a token: rows 0, 1, middle, END."""
    for msd_first, counts in enumerate([last, first]):
        add_task(monkeypatch, copy_digits, base=2, headroom=headroom, msd_first=msd_first)
        windows = windows_of("own", "0 -2")
        assert len(windows.seen) == sum(map(int, counts.split()))

def test_follow_places_finds_what_carries_do_late(monkeypatch):
    """They count places, and 31 digits are needed to tell that this is no copy."""
    def total(carry, a):
        return (a + (carry == 30)) % 10, (carry + 1).clamp(max=40)
    add_task(monkeypatch, total, headroom=0)
    clash = windows_of("own", "0").clash
    widths = [target.shape[1] - 2 for _, target in clash]
    assert min(widths) == 7 and max(widths) == 31

@parametrize("headroom, most", [(0, 9), (1, 6)])
def test_short_questions_have_no_digit_after_which_none_can_end(monkeypatch, headroom, most):
    """By follow_places: after 7, 8 or 9, the carry stays 1; with headroom, the last must be 0."""
    add_task(monkeypatch, lambda carry, a: (a, carry | (a > 6)), headroom=headroom)
    config = one_layer("own")
    questions = L.short_questions(config, lines_at(config, "0"))
    assert max(source[:, 1:-1].max() for source, _ in questions) == most

@parametrize("task, places, most, why", [("successor", "0 -1", 212, "^$"),
    ("successor", "0 -1", 211, "windows .limit 211."), ("addition", "0", 200, "^refuted")])
def test_enumerate_windows_ends_at_most_windows(monkeypatch, task, places, most, why):
    """Successor has 212. The line of addition shows no carry: a clash is found before that."""
    monkeypatch.setattr(L, "MOST_WINDOWS", most)
    assert re.search(why, windows_of(task, places).why)

@parametrize("msd_first, path", [(False, "cross 1 0 1"), (False, "cross -1 1 -1"),
    (True, "cross -1 0 1"), (False, "cross 0 0 2"), (False, "self -1 0 2")])
def test_length_of_sight_refuses_lines_that_move_with_the_width(monkeypatch, msd_first, path):
    add_task(monkeypatch, copy_digits, msd_first=msd_first)
    assert "width" in enumerate_windows(one_layer("own"), [line(path)]).why

@parametrize("option, value", [
    ("task", "parity-label"), ("n_layer", 2), ("n_encoder", 1), ("rules", "v1"),
    ("method", "nope"), ("method", "position"), ("method", "scores")])
def test_prove_says_what_has_no_proof(monkeypatch, option, value):
    """What config.provable leaves out."""
    abc = METHODS["abc"]
    monkeypatch.setitem(METHODS, "position", abc._replace(position=L.sinusoids))
    monkeypatch.setitem(METHODS, "scores", abc._replace(scores=L.rotary))
    windows = enumerate_windows(one_layer(**{option: value}), [])
    assert prove(nn.Module(), windows) == dict(proved=False, why=L.NO_PROOF)

@parametrize("rows, margin", [("5 3 4, 3 0 0", 1), ("9 0 -inf", 9), ("9 0, 1 2", -1),
                              ("0.51 0, 0.49 0, 0.6 0", 0.49), ("9 nan", -1e9)])
def test_prove_takes_the_least_lead_of_a_right_token(monkeypatch, rows, margin):
    """That of token 0 in any row. Below half a logit, it is in doubt."""
    monkeypatch.setattr(L, "measure_drift", lambda *given: (0.0, 1000))
    rows = [list(map(float, row.split())) for row in rows.split(",")]
    rows, model = torch.tensor(rows), nn.Module()
    easy = 99 * F.one_hot(torch.tensor(0), rows.shape[1])
    model.forward = lambda source, target: torch.stack([rows, easy.expand_as(rows)], 1)
    tokens = torch.zeros(len(rows), 2).long()
    questions = tokens, F.pad(tokens, (1, 0)), tokens
    proof = prove(model, L.Windows(None, rows, [questions]))
    assert proof["margin"] == approx(margin)
    assert proof["proved"] == (margin > 0.5)

class Reader(nn.Module):
    """A model that is right on windows, by 9 logits, in long questions multiplied by `factor`."""
    def __init__(self, windows, factor=1):
        super().__init__()
        self.windows, self.factor = windows, factor

    def forward(self, source, target):
        seen, bias = self.windows.seen, self.windows.bias
        tokens, views = [], views_of_rows(bias, source, F.pad(target, (0, 1)))
        for view in views.flatten(0, 1).numpy():
            token, *_ = seen.get(view.tobytes(), [0])
            tokens.append(token)
        tokens = torch.tensor(tokens).long().view(target.shape)
        lead = 9.0 if target.shape[1] < 40 else 9 * self.factor
        return lead * F.one_hot(tokens, len(VOCAB))

@parametrize("factor, proved", [
    (1.005, True), (1.006, False),
    (-1, False), (math.nan, False)])
def test_measure_drift_compares_longer_questions(factor, proved):
    """By `prove` of a fake model. Of 9 logits, 0.5% are 0.045; MARGIN / 10 = 0.05 is too much."""
    windows = windows_of("successor", "0 -1")
    proof = prove(Reader(windows, factor), windows)
    assert proof["proved"] == proved
    assert not proved or proof["drift"] == approx(0.045, abs=1e-5)

def test_measure_drift_fails_if_a_window_was_not_listed():
    """That of END, whose token is the greatest."""
    windows = windows_of("successor", "0 -1")
    other = {}
    for view, shown in windows.seen.items():
        other[view + b"x" * (shown[0] > 9)] = shown
    assert prove(Reader(windows), windows)["proved"]
    assert not prove(Reader(windows), windows._replace(seen=other))["proved"]

@parametrize("total, base, digits", [
    (lambda carry, a: (torch.where(a < 5, -1, (a + carry) % 10), a), 10, 60),
    (lambda carry, a: (torch.where(a + carry == 2, -1, a ^ carry), a), 2, 1000),
    (lambda carry, a: (torch.where(a == 7, a, -1), 0 * a), 10, 0)])
def test_prove_says_up_to_which_length_it_compared(monkeypatch, total, base, digits):
    """Hardly any long random number lacks digits below 5, or two ones in a row; none is all 7."""
    add_task(monkeypatch, total, base=base, msd_first=base == 2, headroom=0)
    windows = windows_of("own", "0 -1")
    proof = prove(Reader(windows), windows)
    assert proof["proved"]
    assert proof["drift_digits"] == digits

def test_execute_takes_back_a_proof_if_tests_fail(monkeypatch, trained):
    """A model that is right on windows and wrong on numbers was proved by wrong code."""
    rows = [dict(digits=60, set="random", n=9, correct=7)]
    monkeypatch.setattr(L, "evaluate", lambda *given: dict(rows=rows, seconds=1))
    run = L.read_run(trained["parity"][0])._replace(folder=None)
    assert not L.execute(run)["proof"]["proved"]
    assert not run.parts["proof"]["proved"]

# 7. ABC from end to end ---------------------------------------------------------------------------

def planted(strengths):
    """Averaged attention in which anti-diagonals stand out: {offset: by how much}."""
    mirrored = torch.full((1, 2, 8, 8), 0.1)
    for offset, strength in strengths.items():
        mirrored[0, 0].diagonal(offset).add_(strength)
    cross = F.pad(mirrored.flip(3), (0, 1), value=0.1)
    return torch.eye(8).expand(1, 2, 8, 8), cross

@parametrize("strengths, kappa", [
    ({1: 0.6, 0: 0.503, -1: 0.3}, 0.15),
    ({0: 5, -1: 0.02}, -0.2)])
def test_choose_lines_lets_kappa_fall_and_keeps_the_fewest(monkeypatch, strengths, kappa):
    """Offsets 0 and -1 are needed, 1 is not, although it may stand out most. By hand, as below."""
    question = encode("$00&")[None], encode("$10&")[None]
    monkeypatch.setattr(L, "draw_questions", lambda *given: question)
    # Of 7 lines, mu is 0.3 and sigma * sqrt(6) 0.6, so kappa must be below (0.4 - 0.3) / 0.6; in
    # the second case, 0.82 and 4.28, so below (0.12 - 0.82) / 4.28. 212 = 200 + 10 + 2 windows.
    found, lines, windows = choose_lines(one_layer(), planted(strengths))
    offsets = [line.offset for line in lines if line.direction == -1]
    assert sorted(offsets) == [-1, 0]
    assert found == kappa
    assert len(windows.seen) == 212

def test_choose_lines_fails_with_two_questions_if_no_lines_help(monkeypatch):
    monkeypatch.setattr(L, "KAPPAS", (0.8, 0.7))
    with raises(RunFailed, match=r"\$\d+& and \$\d+&"):
        choose_lines(one_layer(), planted({0: 5, -1: 0.02}))

def test_drop_lines_keeps_what_a_pool_needs_and_the_main_diagonal():
    """By Line.path, a line goes from all heads, however strong, if others tell the answer."""
    config = one_layer()
    needed = lines_at(config, "0 -1") + [line("self 1 0 0")]
    stray = [line("cross -1 0 1", head, z=9.0) for head in (0, 1)]
    pool = [draw_questions(config, draw_exact, 6, 300)]
    assert L.drop_lines(config, stray + needed, pool) == needed

def test_deal_lines_gives_each_head_different_lines():
    """By hand: the strongest first, and a third of the weight to the second of a head."""
    lines = [line("cross -1 0 0", 1, -0.3, 4.0), line("cross -1 0 0", 0, -0.3, 1.0),
             line("cross -1 0 -1", 1, -0.3, 3.0), line("cross 0 1 0", 1, -0.2, 9.0),
             line("self 1 0 0", 1, -0.2, 2.0)]
    assert L.deal_lines(lines, 2) == [
        line("cross 0 1 0", 0, 0.0, 9.0), line("cross -1 0 0", 1, 0.0, 4.0),
        line("cross -1 0 -1", 0, -1.1, 3.0), line("self 1 0 0", 0, 0.0, 2.0)]

def test_learn_abc_proves_the_four_tasks(trained):
    """And all tests are right, of 60 digits as of 6."""
    for _, record in trained.values():
        assert record["proof"]["proved"]
        assert record["proof"]["drift_digits"] == 1000
        for row in record["tests"]["rows"]:
            assert row["correct"] == row["n"] > 0

def abc_run(trained, **options):
    """A run of parity that has the vanilla part and the attention of the trained one."""
    config, parts, *_ = L.read_run(trained["parity"][0])
    kept = {name: parts[name] for name in ("vanilla", "attention")}
    return Run(Config(**config.values | options), kept)

def test_retrain_starts_from_vanilla_weights_but_for_queries_and_keys(trained, monkeypatch):
    """These stay zero. A step moves no weight by more than the rate."""
    monkeypatch.setattr(L, "prove", lambda *given: dict(proved=True))
    run = abc_run(trained, retrain_steps=1)
    learn_abc(run)
    for name, weight in run.parts["model"]["weights"].items():
        if ".q." in name or ".k." in name:
            assert not weight.any()
        elif torch.is_tensor(weight):
            assert_close(weight, run.parts["vanilla"]["weights"][name], atol=0.01, rtol=0)

@parametrize("rules", ["v1", "v2", "code"])
def test_learn_abc_starts_from_random_weights_by_other_rules(trained, rules):
    run = abc_run(trained, rules=rules, retrain_steps=1)
    assert learn_abc(run)["why"] == L.NO_PROOF
    heads = [run.parts[name]["weights"]["head.weight"] for name in ("vanilla", "model")]
    assert not torch.allclose(*heads, atol=0.01)

def fake_training(monkeypatch, proved, unseen):
    """An attempt is proved, or none; the first has an accuracy of 0.5 -> {name: (model, steps)}"""
    made = {}
    def train(run, model, name, data, windows=None):
        made[name] = model, data.steps
        run.parts[name] = dict(curve=[[1, 0.0, unseen if name == "attempt 2" else 0.5]])
        return dict(proved=name == f"attempt {proved}")
    monkeypatch.setattr(L, "train", train)
    return made

@parametrize("proved, unseen, kept", [
    (1, 0.9, 1), (2, 0.4, 2),
    (None, 0.6, 2), (None, 0.5, 1)])
def test_learn_abc_keeps_the_better_attempt(trained, monkeypatch, proved, unseen, kept):
    """The second, if it is proved or better on unseen numbers."""
    made, run = fake_training(monkeypatch, proved, unseen), abc_run(trained)
    assert learn_abc(run)["attempt"] == kept
    assert run.parts["model"]["curve"][0][2] == (0.5 if kept == 1 else unseen)
    assert ("attempt 2" in made) == (proved != 1)

def test_learn_abc_deals_lines_to_a_second_attempt(trained, monkeypatch):
    """Which starts from random weights, and is twice as long."""
    made = fake_training(monkeypatch, 2, 0.9)
    proof = learn_abc(abc_run(trained, retrain_steps=50))
    (vanilla, _), (first, steps), (second, twice) = made.values()
    assert first.head.weight.equal(vanilla.head.weight)
    assert not torch.allclose(second.head.weight, vanilla.head.weight, atol=0.01)
    assert second.bias.lines == L.deal_lines(first.bias.lines, 4) != first.bias.lines
    assert proof["lines"] == [line._asdict() for line in second.bias.lines]
    assert (steps, twice) == (50, 100)

def test_learn_abc_only_tests_a_task_with_a_label(command):
    """Guesses are right half of the time, so that training may be short."""
    code, out, _ = command("--task=parity-label --steps=100 --retrain-steps=3 --d-model=16 "
                           "--lengths=3 --samples=5 --json --quiet --device=cpu")
    record = json.loads(out)
    assert code == 0 and record["proof"]["why"] == L.NO_PROOF
    assert [part["steps"] for part in record["train"].values()] == [100, 3]
    assert [row["n"] for row in record["tests"]["rows"]] == [4, 5]

# 8. Consecutive pairs -----------------------------------------------------------------------------

@parametrize("dummy", [False, True])
def test_draw_pairs_says_whether_a_neighbor_is_there(dummy):
    """By brute force. A dummy, token 9, is in front, and the target starts with a 0."""
    config = Config("consecutive", d_vocab=9, dummy=dummy)
    source, target = L.draw_pairs(config, 200, 4)
    for row, labels in zip(source.tolist(), target.tolist()):
        tokens = row[dummy:]
        assert row == [9] * dummy + tokens
        assert labels == [0] + [x - 1 in tokens or x + 1 in tokens for x in tokens]

def test_pairs_head_equals_torchs_attention(double):
    """PairsHead, with the same weights."""
    config = Config("consecutive", dummy=True, d_model=12, d_head=12)
    model = L.PairsHead(config, ())
    source, target = L.draw_pairs(config, 9, 5)
    x = model.embedding(source)
    z, _ = attention_of_torch(model.attention)(x, x, x)
    assert_close(model(source, target[:, 1:]), F.pad(z[:, 1:], (1, 0)))

def rows_of_trained(config):
    run = Run(config, dict(examples=L.draw_examples(config)))
    config.kind.learn(run)
    return L.evaluate(L.build(run), config)["rows"]

@parametrize("dummy", [False, True])
def test_pairs_head_finds_all_pairs_with_a_dummy_alone(dummy):
    """Pairs, Observations 1 and 2, by learn_pairs and PairsHead."""
    [row] = rows_of_trained(Config(
        "consecutive", dummy=dummy, d_vocab=8, batch=100, steps=400, lr=5e-3))
    assert (row["correct"] == row["n"] == 10_000) == dummy

# 9. Encoders --------------------------------------------------------------------------------------

def encoder(task="addition", **options):
    given = dict(d_model=16, n_head=2, n_encoder=1, train_digits=3, lengths=(4, 7))
    return Config(task, "encoder", **given | options)

@parametrize("modulus", [None, 2, 101, 10 ** 9])
@parametrize("task, answer, n", [
    ("addition", int.__add__, 8), ("multiplication", int.__mul__, 14)])
def test_arrange_encoder_has_the_answers_of_pythons_integers(task, answer, n, modulus):
    config = encoder(task, width=7, modulus=modulus)
    pairs = [(9_999_999, 9_999_999), (7, 3), (5, 5)]
    pairs += L.draw_integers(config, [7] * 50)
    for (a, b), source, target in zip(pairs, *L.arrange_encoder(config, pairs)):
        expected = str(answer(a, b)).ljust(n, "@")
        if modulus:
            expected = str(int(answer(a, b)) % modulus).zfill(len(str(modulus - 1)))
        assert decode(source) == f"{a:@<7}{config.spec.sign}{b:@<7}"
        assert decode(target) == f"${expected}"

@parametrize("a, b, shown", [(12, 39, "12@+39@ $51@@"), (999, 345, "999+345 $1344")])
def test_arrange_encoder_writes_the_examples_that_jelassi_prints(a, b, shown):
    """Sec. 2.1. START is ours, and so is the last PAD of the first answer."""
    config = encoder(train_digits=2, lengths=(3,), width=3)
    found = L.arrange_encoder(config, [(a, b)])
    assert " ".join(decode(tokens[0]) for tokens in found) == shown

def questions_of(data):
    """A batch of Data, its padding removed -> pairs of integers."""
    texts = [decode(question).replace("@", "") for question in data.batch(1)[0]]
    return [tuple(map(int, re.split("[+*]", text))) for text in texts]

@parametrize("task, second", [("addition", 999), ("multiplication", 9)])
def test_encoder_data_has_a_few_long_questions_that_stay_the_same(task, second):
    """Jelassi, Sec. 5. Of 40 first operands, draw_integers draws ten, with their second."""
    config = encoder(task, prime_lengths=(6, 7), batch=4000)
    questions = questions_of(L.encoder_data(config, 30, 10, 9))
    long = [pair for pair in questions if pair[0] > 999]
    assert len(long) == approx(1000, abs=150)
    assert len(set(long)) == 10
    assert 0.98 * second < max(b for a, b in questions if a <= 999) <= second

@parametrize("preset, share", [("fast", 1 / 3), ("paper", 9 / 999)])
def test_encoder_data_draws_lengths_equally_or_in_the_paper_preset_numbers(preset, share):
    """Of numbers of up to three digits, a third has one, or 9 of 999."""
    config = encoder(preset=preset, batch=4000)
    for operands in zip(*questions_of(L.encoder_data(config, 4000, 0, 9))):
        assert np.mean([x < 10 for x in operands]) == approx(share, abs=0.05)

@parametrize("model", ["encoder", "universal"])
def test_encoder_learns_sums_of_single_digits(model):
    """Right in its tests: guesses would not be."""
    [row] = rows_of_trained(Config("addition", model, n_encoder=2, train_digits=1, lengths=(1,),
                                   steps=400, width=2))
    assert row["correct"] > 0.98 * row["n"]

# 10. Options, checkpoints, command line -----------------------------------------------------------

@parametrize("name, given, value", [
    ("seed", "successor", 0),
    ("method", "addition encoder", "rpe-k"),
    ("model", "multiplication", "universal"), ("lr", "successor", 4e-3),
    ("lr", "nx1 seq2seq method=rope", 3e-3),
    ("steps", "nx1 seq2seq method=rope", 6000),
    ("lr", "nx1 seq2seq method=rope preset=paper", 1e-5),
    ("lr", "nx1 seq2seq method=rope preset=paper lr=0.5", 0.5),
    ("width", "addition encoder", 12)])
def test_config_takes_the_last_of_its_defaults(name, given, value):
    """Of the kind of model, task, method (rope: ten times the steps), and preset; what is given."""
    words = given.split()
    options = dict(word.split("=") for word in words[2:])
    assert getattr(Config(*words[:2], **options), name) == value

def test_config_brings_values_to_plain_types():
    """Those of NumPy and of the command line. None is as if it were not given."""
    plain = Config("nx1", seed=3, lengths=(5, 6), lr=0.001, method="ape").values
    given = dict(seed=np.int64(3), lengths=np.arange(5, 7))
    given |= dict(lr="1e-3", batch=None, method=np.str_("ape"))
    found = Config(np.str_("nx1"), **given).values
    assert json.dumps(found) == json.dumps(plain)

@parametrize("given", [
    "lengths=()", "lengths=6", "lengths='6,x'", "lengths=[6.0]", "lengths=[0]",
    "seed=True", "seed=1.0", "seed=-1", "seed=10 ** 400", "samples=0", "steps=0.5", "n_layer=0",
    "lr=math.nan", "lr=math.inf", "lr=-0.1", "lr=1.1", "lr=True", "dropout=1.1",
    "n_head=3", "n_head=0", "n_head=4, method='rope', d_model=36", "width=6", "width=2001",
    "method='no'", "method=['abc']", "rules='v3'", "preset='slow'", "task='no'", "task=['nx1']",
    "task='nx1', model='encoder'", "foo=1", "d_vocab=9", "prime=9", "dummy=True",
    "lengths=[2001], method='ape'", "lengths=[2001], n_encoder=1", "lengths=[2001], rules='v1'",
    *[f"{given}, task='addition', model='encoder'" for given in (
        "n_encoder=0", "n_layer=1", "method='abc'", "method='window'", "prime=6000", "modulus=0",
        "prime_lengths=()", "width=12, lengths=[20]", "width=4, lengths=[1], modulus=10 ** 9")]])
def test_config_refuses_a_bad_value(given):
    """By demand, as a BadInput that names the option; those of encoders by settle_encoder."""
    name = given.split("=")[0].replace("_", "-")
    with raises(BadInput, match=f"--{name}"):
        Config(**eval(f"dict({given})"))

@parametrize("option, fields", [
    *product(["task"], ["base=1", "base=20", "sign='5'", "sign='&'", "sign=''", "sign='+*'",
                        "headroom=-1", "headroom=100", "base=2, headroom=44", "operands=()",
                        "operands=('digit', 'number')"]),
    *product(["method"], ["msd_first=True", "operands=('number',) * 3"])])
def test_config_refuses_a_task_that_cannot_be_written(monkeypatch, option, fields):
    """By settle_seq2seq: of 64 bits; bands follow one or two operands, from the last digit on."""
    changed = TASKS["addition"]._replace(**eval(f"dict({fields})"))
    monkeypatch.setitem(TASKS, "own", changed)
    with raises(BadInput, match=f"--{option}"):
        Config("own", method=dict(task="abc", method="window")[option])

@parametrize("arguments", [
    "--seed=x", "--lengths=2001 --method=nope", "--dummy", "--from=none", "--from=none --ask=1",
    "--from=none --steps=9", "--ask=1", "--ask=1 --out=x", "--ask=1 --seed=1",
    "--task=no", "--seed", "--device=gpu", "--foo", "--meth=nope", "nx1"])
def test_main_refuses_bad_input(command, arguments):
    """By make_parser, Config or later."""
    code, out, lines = command(f"{arguments} --quiet")
    assert (code, out) == (2, "")
    assert lines[-1].startswith("lengen")
    assert len(lines) == 1 or lines[0].startswith("usage")
    assert not os.listdir()

class Hostile:
    def __reduce__(self):  # makes a folder when it is loaded
        return os.mkdir, ("owned",)

@parametrize("changes", [
    "parts=Hostile()", "parts={}", "config=3", "",
    "config=dict(task='successor')", "config=dict(task='parity', width=30)"])
def test_read_run_refuses_another_checkpoint(trained, command, changes):
    """By --from, which calls read_run. "" is cut off. The code in Hostile is not run."""
    state = torch.load(trained["parity"][0] / "checkpoint.pt", weights_only=True)
    Path("run").mkdir()
    torch.save(state | eval(f"dict({changes})"), "run/checkpoint.pt")
    if not changes:
        os.truncate("run/checkpoint.pt", 99_999)
    code, out, [line] = command("--from=run --ask=1")
    assert (code, out) == (2, "")
    assert os.listdir() == ["run"]

@parametrize("change", [
    "total=TASKS['successor'].total", "headroom=1", "msd_first=True", "position=L.sinusoids",
    "position=L.LearnedPositions"])
def test_read_run_refuses_a_run_whose_task_or_method_has_changed(trained, monkeypatch, change):
    """draw_examples are others, or build finds other logits than those kept at training."""
    table, name = (METHODS, "abc") if "position" in change else (TASKS, "parity")
    changed = table[name]._replace(**eval(f"dict({change})"))
    monkeypatch.setitem(table, name, changed)
    with raises(BadInput):
        load(trained["parity"][0])

@parametrize("vocab", ["0123456789AB+*$&@", "01+*$&@"])
def test_load_refuses_a_run_whose_symbols_were_moved(trained, monkeypatch, vocab):
    monkeypatch.setattr(L, "VOCAB", vocab)
    with raises(BadInput, match="VOCAB"):
        load(trained["parity"][0])

def test_load_refuses_a_run_of_another_default_type(trained, double):
    with raises(BadInput, match="Double"):
        load(trained["parity"][0])

@parametrize("then, now", [("", "-"), ("-/", "")])
def test_load_reads_a_run_after_symbols_were_added_or_left_out(command, monkeypatch, then, now):
    monkeypatch.setattr(L, "VOCAB", VOCAB + then)
    command(f"{NOPE} --out=run")
    monkeypatch.setattr(L, "VOCAB", VOCAB + now)
    assert command("--from=run --ask=7")[::2] == (0, [f"lengen: {L.NO_PROOF}"])

def test_load_returns_a_model_with_its_lines(trained):
    """Else it errs at 200 digits. The other has them by get_extra_state and set_extra_state."""
    model, config, _ = load(trained["parity"][0])
    other = Transformer(config)
    other.load_state_dict(model.state_dict())
    source, _ = draw_questions(config, draw_exact, 200, 9)
    target = torch.stack([answer_to("parity", question) for question in source])
    assert L.right_tokens(model, source, target).all()
    assert L.right_tokens(other, source, target).all()

def killed_after(n, keep=Run.keep):
    calls = itertools.count(1)
    def keep_or_stop(run, **parts):
        keep(run, **parts)
        if next(calls) == n:
            raise KeyboardInterrupt
    return keep_or_stop

@parametrize("n, folder, options", [
    (2, "run", "successor"), (5, "--out=new", "successor"), (7, "run", "successor"),
    (4, "run", "addition --model=encoder --finetune=6 --train-digits=1 --n-encoder=1")])
def test_train_goes_on_to_the_same_bits_after_it_was_killed(
        command, monkeypatch, n, folder, options):
    """At the n-th save, 7 that before the record, in its own or a new folder. By make_run, read_run
    and seed_draws. All answers count as right."""
    monkeypatch.setattr(
        L, "right_tokens", lambda model, source, target: model.eval() and target[:, 1:] >= 0)
    options = f"{SHORT} --dropout=0.1 --steps=110 --retrain-steps=15 --task={options}"
    command(f"{options} --out=whole")
    monkeypatch.setattr(Run, "keep", killed_after(n))
    assert command(f"{options} --out=run")[0] == 130
    if n == 7:  # nothing is left to train
        monkeypatch.setattr(L, "take_step", None)
    assert command(f"--from=run {QUIET} {folder.replace('run', '')}")[0] == 0
    folder = folder.replace("--out=", "")
    assert set(os.listdir()) == {"run", folder, "whole"}
    parts, expected = load(folder)[2], load("whole")[2]
    for name, part in expected.items():
        if "curve" in part:
            assert parts[name]["curve"] == part["curve"]
            for key, weight in part["weights"].items():
                found = parts[name]["weights"][key]
                assert found.equal(weight) if torch.is_tensor(weight) else found == weight

def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

def test_make_run_tests_a_finished_run_in_a_new_folder(trained, command):
    """It is proved again, whatever its file says. Long numbers have a bias in pieces."""
    folder = Path("run")
    shutil.copytree(trained["successor"][0], folder)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    state["parts"]["proof"] |= dict(windows=7)
    torch.save(state, folder / "checkpoint.pt")
    before = contents(folder)
    _, out, _ = command("--from=run --lengths=30,2100 --samples=20 --json --quiet --device=cpu")
    record = json.loads(out)
    assert [row["correct"] for row in record["tests"]["rows"]] == [20, 20, 20]
    assert record["proof"]["proved"] and record["proof"]["windows"] == 212
    assert before == contents(folder)

def test_make_run_nests_no_folders_whatever_the_task_is_called(command, monkeypatch):
    monkeypatch.setitem(TASKS, "n/1", TASKS["successor"])
    command(f"{NOPE} --task=n/1")
    assert len(list(Path("runs").glob("*/result.json"))) == 1

def test_run_that_is_finished_stays_so_when_another_process_saves(command):
    command(f"{NOPE} --out=run")
    before = contents(Path("run"))
    with raises(BadInput, match="run"):
        Run(Config(), {}, Path("run")).keep()
    assert contents(Path("run")).items() >= before.items()

@parametrize("error, code", [
    (KeyboardInterrupt(), 130), (RunFailed("--from"), 1), (BadInput("--from"), 2),
    (OSError("--from"), 2)])
def test_main_says_in_one_line_how_a_run_ended_or_goes_on(command, monkeypatch, error, code):
    def stop(*given):
        raise error
    monkeypatch.setattr(L, "take_step", stop)
    found, out, [line] = command(f"{NOPE} --out=run")
    assert (found, out) == (code, "")
    assert "--from" in line
    assert os.listdir("run") == ["checkpoint.pt"]

def test_ask_takes_the_newest_finished_run(trained, command):
    for task, time in ("successor", 9), ("addition", 5):
        shutil.copytree(trained[task][0], f"runs/{task}")
        os.utime(f"runs/{task}/result.json", (time, time))
    assert command("--ask 99 ' 0041 '") == (0, "100\n42\n", [])
    assert command("--from=runs/addition --ask '9 + 0001'") == (0, "10\n", [])
    assert command("--ask 99 --json")[0] == 2

@parametrize("share, shown", [(1, "100.0%"), (0.9999, "99.9%"), (0.29, "29.0%")])
def test_percent_is_rounded_down_so_that_100_means_all(share, shown):
    assert L.percent(share) == shown

def test_summary_shows_the_proof_and_the_tests(trained):
    """That execute prints. The question is answered as by Python's integers, last digit first."""
    first, *lines = L.summary(trained["successor"][1])
    question, answer = re.findall(r"[$](\d+)&", first)
    assert int(answer[::-1]) == int(question) + 1
    for words in "vanilla +350 steps", "proof .* 212 windows", " 60  100.0%  hard +200":
        assert re.search(words, "\n".join(lines))

def test_execute_prints_pairs_with_all_their_labels(command):
    _, out, _ = command(f"{SHORT} --task=consecutive --d-vocab=9 --dummy")
    [(question, answer)] = re.findall(r"(\[.*\]) -> (\[.*\])", out)
    dummy, *tokens = json.loads(question)
    assert dummy == 9
    assert json.loads(answer)[1:] == [x - 1 in tokens or x + 1 in tokens for x in tokens]

def test_learn_encoder_trains_on_short_numbers_then_on_long_ones(command):
    """Jelassi, Sec. 5. By hand: 4 steps, tests of 2 and 3 digits, 3 steps. Python adds, too."""
    options = "--task=addition --model=encoder --finetune=6 --retrain-steps=3 --train-digits=1"
    _, out, _ = command(f"{SHORT} {options} --out=run")
    [(a, b, answer)] = re.findall(r"(\d+)@*[+](\d+)@* -> [$](\d+)@*\n", out)
    assert int(answer) == int(a) + int(b)
    assert re.search(r"short numbers +4 steps.*\nmodel +3 steps.*% .*%\n", out)
    before = json.loads(Path("run/result.json").read_text())["before"]
    assert [row["digits"] for row in before["rows"]] == [2, 3]

def test_execute_has_a_row_without_questions_where_there_are_none(command, monkeypatch):
    """A number needs three digits that are not 0, each of which takes 1 from the carry."""
    add_task(monkeypatch, lambda carry, a: (a, (carry - (a > 0).long()).clamp(0)), first=3)
    _, out, _ = command(f"{NOPE} --task=own --lengths=1,6")
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert [row[3] for row in rows] == ["0", "5", "5"]

# README and the companions ------------------------------------------------------------------------
README = (HERE / "README.md").read_text(encoding="utf-8")

def test_readme_and_the_list_of_runs_have_valid_commands():
    from results import schemes  # late, as it adds methods
    runs = (HERE / "results/runs.txt").read_text()
    text = README.replace("\\\n", " ") + re.sub(r"(?m)^\w+ \d+-\d+", "python lengen.py", runs)
    commands = re.findall(r"python (?:-m )?(lengen|results\.\w+)(?:\.py)?([^`\n|&>;]*)", text)
    options = L.SEQ2SEQ.options | L.ENCODER.options | L.PAIRS.options
    for script, words in commands:
        assert (HERE / script.replace(".", "/")).with_suffix(".py").exists()
        if script in ("lengen", "results.schemes", "results.machines") and "--help" not in words:
            words = words.replace("$seed", "7").replace("--msd ", "")
            given = vars(L.make_parser().parse_args(shlex.split(words, True)))
            Config(**{name: given[name] for name in options if name in given})
    assert len(commands) > 140 and schemes

@parametrize("a, b, total", [(99, 35, "24"), (15, 995, "900"), (1, 2, "3")])
def test_schemes_add_digits_drops_carries(a, b, total):
    """The first is printed in Jelassi, Sec. 6."""
    from results import schemes
    assert schemes.add_digits(a, b) == total

@parametrize("script", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_has_python_that_runs(trained, monkeypatch, tmp_path, script):
    shutil.copytree(trained["addition"][0], tmp_path / "runs/addition")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(L, "VOCAB", VOCAB)
    main, codes = L.main, [0]
    monkeypatch.setattr(L, "main", lambda words: codes.append(
        main([*NOPE.split(), *words] if "--ask" not in words else words)))
    with patch.dict(TASKS), patch.dict(METHODS):
        exec(script, {})
    assert set(codes) == {0}

@parametrize("page, old, code", [
    ("README.md", "| 100 |", 0), ("results/README.md", "| 100 |", 0),
    ("results/claims.md", "| in part |", 0), ("results/README.md", "2.03e-06", 1)])
def test_report_finds_a_changed_number_and_mends_tables(monkeypatch, tmp_path, page, old, code):
    shutil.copytree(HERE / "results", tmp_path / "results")
    shutil.copy(HERE / "README.md", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    text = (tmp_path / page).read_text(encoding="utf-8")
    assert report.main([]) == 0
    (tmp_path / page).write_text(text.replace(old, "?"), encoding="utf-8")
    assert report.main([]) == 1
    assert report.main(["--write"]) == report.main([]) == code

def record_of(seed, correct, n=100, **options):
    config = dict(task="nx1", method="t5", seed=seed, **options)
    row = dict(digits=6, set="random", correct=correct, n=n)
    return dict(config=config, tests=dict(rows=[row]))

@parametrize("correct, verdicts", [
    ([99, 100, 100], "reproduced; reproduced, smaller; reproduced, smaller"),
    ([99, 100, 0], "in part; in part; in part"),
    ([100, 98, 98], "not reproduced; not reproduced; undecided")])
def test_report_gives_verdicts_that_follow_from_the_seeds(monkeypatch, correct, verdicts):
    """Of a claim of 99%: by each seed, or by their median."""
    monkeypatch.setattr(report, "load", lambda name: list(map(record_of, range(3), correct)))
    kinds = report.grade, report.grade_failure, report.grade_smaller
    assert "; ".join(kind("6>99 of file") for kind in kinds) == verdicts

def test_report_keeps_records_apart_and_names_a_torn_file(capsys, tmp_path):
    """Tests without questions do not count. All good records are printed."""
    records = [record_of(0, 100, layers=1), record_of(1, 80, layers=1),
               record_of(0, 0, layers=6),
               record_of(2, 0, n=0, layers=1)]
    file = tmp_path / "file"
    file.write_text("\n".join(map(json.dumps, records)) + '\n{"config": {"ta')
    assert report.main([str(file)]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[5:] == [
        "| t5 | layers=1 | 90 (80 - 100) | 0 | 3 | 100 |", "| t5 | layers=6 | 0 | 0 | 1 | 100 |"]
    assert str(file) in err

def test_own_model_of_torchs_layers_is_proved():
    proof, rows = own.main()
    assert proof["proved"] and all(row["correct"] == row["n"] for row in rows)

def test_machines_give_a_run_that_fails_a_record(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert machines.main(f"{SHORT} --seed=3 --json".split()) == 0
    assert {"failed", "finite"} <= json.loads(capsys.readouterr().out).keys()

def exact(x):  # a tensor as an array of decimals
    return np.vectorize(Decimal, otypes=[object])(x.detach().double().numpy())

def exact_linear(layer, x):
    return x @ exact(layer.weight).T + exact(layer.bias)

def exact_norm(layer, x):
    off = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((off * off).mean(-1, keepdims=True) + Decimal(layer.eps))
    return off / scale * exact(layer.weight) + exact(layer.bias)

def exact_attend(layer, x, memory, bias):
    def heads(part, y):
        y = exact_linear(part, y).reshape(len(y), layer.n_head, -1)
        return y.transpose(1, 0, 2)
    q, k = heads(layer.q, x), heads(layer.k, memory)
    scores = q @ k.transpose(0, 2, 1) / Decimal(q.shape[2]).sqrt()
    weights = np.exp(scores + exact(bias))
    weights = weights / weights.sum(2, keepdims=True)
    mixed = weights @ heads(layer.v, memory)
    return exact_linear(layer.out, mixed.transpose(1, 0, 2).reshape(len(x), -1))

@torch.no_grad()
@parametrize("moved", [0, 1e-3])
@parametrize("part, layer, expected, least", [
    ("linear", nn.Linear(4, 4), exact_linear, 0.1),
    ("norm", nn.LayerNorm(4), exact_norm, 0.005),
    ("attend", L.MultiHeadAttention(4, 2), exact_attend, 0.005)])
def test_rounding_bounds_parts(monkeypatch, part, layer, expected, least, moved):
    """By 28 decimals, in float32. Inputs and shares move by as much as their radii allow."""
    for name, value in ("UNIT", 2.0 ** -23), ("SPREAD", moved / 10), ("MOST_OPEN", 3):
        monkeypatch.setattr(rounding, name, value)
    for weight in layer.parameters():
        nn.init.normal_(weight)
    x, radius = randn(200, 4), moved * torch.rand(200, 4)
    bias = randn(2, 200, 3) / 3
    inputs = [rounding.ball(x, radius)]
    changed = [exact(x) + exact(radius * randn(200, 4).sign())]
    if part == "attend":
        memory = rounding.ball(x[None, :3], 0 * x[:3])
        inputs = [inputs[0].apply(lambda y: y[None]), memory, bias]
        shares = bias.double().softmax(2) + moved / 10 * torch.tensor([1, -1, 0])
        changed += [exact(x[:3]), shares.log()]
    center, radius, _ = getattr(rounding, part)(layer, *inputs)
    error = np.abs(exact(center.view(200, 4)) - expected(layer, *changed))
    assert least < np.max(error / exact(radius.view(200, 4))) <= 1

@parametrize("share, code", [(0.2, 0), (0.3, 1), (math.nan, 1)])
def test_rounding_needs_a_lead_of_four_radii(trained, monkeypatch, share, code):
    """Here radii are shares of the least lead."""
    (folder, record), logits = trained["parity"], rounding.logits
    def with_radius(*batch):
        found = logits(*batch)
        return found._replace(radius=0 * found.radius + share * record["proof"]["margin"])
    monkeypatch.setattr(rounding, "logits", with_radius)
    assert rounding.main([str(folder)]) == code

class Oracle:
    """Answers to a calculator's questions by Python's integers."""
    def ask(self, task, pairs):
        assert task in ("addition", "subtraction") or all(len(b) == 1 for _, b in pairs)
        operator = dict(addition="+", subtraction="-", nx1="*", division="//")[task]
        answers = [eval(f"{a} {operator} {b}") for a, b in pairs]
        assert min(answers) >= 0
        return list(map(str, answers))

@parametrize("seed", range(400))
def test_a_calculator_agrees_with_pythons_integers(seed):
    draw = random.Random(seed)
    text = calculator.draw_expression(draw, seed % 4, "0123456789" if seed % 3 else "09")
    text = re.sub("[()]" if seed % 2 else "$", "", text)  # without parentheses, levels count
    try:
        expected = str(eval(re.sub("//?", "//", re.sub(r"\b0+(?=[0-9])", "", text))))
    except ZeroDivisionError:
        raises(BadInput, calculator.calculate, Oracle(), text).match("division by 0")
    else:
        assert calculator.calculate(Oracle(), text) == expected

@parametrize("text, value", [
    ("1+" * 3000 + "1", "3001"), ("-(" * 10001 + "7" + ")" * 10001, "-7"), ("- -+-5", "-5"),
    ("-7//2*2 + -7%2", "-7"), ("2*-3", "-6"), ("100//7%5*3-2-1", "9"), ("-(0)", "0")])
def test_sums_parentheses_and_signs_of_any_number_are_calculated(text, value):
    assert calculator.calculate(Oracle(), text) == value

@parametrize("words", [
    ["1/0"], ["2**3"], ["1.5"], ["(" * 999], ["5 5"], ["()"], [], ["1)+(2"],
    ["1+" * 3001], ["-x"], ["--check"], ["--check", "x"], ["--check", "-3"], ["1", "--check", "1"]])
def test_what_cannot_be_calculated_costs_one_line(capsys, monkeypatch, words):
    monkeypatch.setattr(calculator, "Models", Oracle)
    assert calculator.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err) < 150

def test_a_folder_that_holds_another_run_is_not_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/calculator/addition-0").mkdir(parents=True)
    (tmp_path / "runs/calculator/addition-0/result.json").touch()
    monkeypatch.setattr(L, "load", lambda folder: (0, SimpleNamespace(task="nx1", seed=0), {}))
    raises(BadInput, calculator.train, "addition").match("addition-0: it holds another run")
