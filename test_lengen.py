# SPDX-License-Identifier: MIT
"""Tests of lengen.py, in its order. What is right is told by others: Python's integers, torch's
layers and optimizers, plain loops over the papers' formulas, and examples that papers print."""

import copy
import inspect
import math
from collections import defaultdict
from itertools import compress, product
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest import approx, raises
from torch import nn, randn

import lengen as L
from lengen import METHODS, TASKS, VOCAB, BadInput, Config, Line, Run, RunFailed
from lengen import Transformer, abc_bias, alibi_bias, causal_bias, decode
from lengen import draw_exact, draw_hard, draw_questions, encode, example, split_numbers, train

torch.set_num_threads(1)
INF = math.inf
parametrize, assert_close = pytest.mark.parametrize, torch.testing.assert_close

def small(task="addition", model="seq2seq", **options):
    """The configuration of a model that takes milliseconds."""
    given = dict(method="vanilla", d_model=16, n_head=2, n_encoder=1)
    given |= dict(dropout=0, batch=8)
    if model == "seq2seq":
        given["n_layer"] = 2
    return Config(task, model, **given | options)

def add_task(monkeypatch, total, **fields):
    """For the time of a test, add the task "own"."""
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

# 1. Tasks -----------------------------------------------------------------------------------------

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
    for length in 1, 6, 40, 200:
        source, target = draw_questions(small(task), draw, length, 30)
        for question, answer in zip(source, target):
            assert answer.equal(answer_to(task, question))

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

@parametrize("question", ["logarithm 1", "successor", "nx1 7 12", "successor 1_0"])
def test_example_refuses_what_is_no_question(question):
    with raises(BadInput):
        example(*question.split())

def test_encode_and_decode_are_inverse():
    """The token of a digit is its value. Other symbols are refused."""
    assert encode("0123456789").tolist() == list(range(10))
    assert decode(encode("$0123+0748&")) == "$0123+0748&"
    with raises(ValueError):
        encode("a")

def subtract(carry, a, b):
    return a - b + carry

def test_draw_questions_leaves_out_those_without_an_answer(monkeypatch):
    """A difference below 0 has none, as Python's integers tell."""
    add_task(monkeypatch, subtract, operands=("number", "number"), sign="+")
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
    """Long division, by Python's integers. A question with a digit of -1 has no answer."""
    add_task(monkeypatch, divide, operands=("number", "digit"), sign="*", msd_first=True)
    source, target = draw_questions(small("own"), draw_exact, 6, 200)
    for question, answer in zip(source, target):
        a, b = map(int, operands_of("own", question))
        assert int(decode(answer)[1:-1]) == a // b
    with raises(BadInput):
        example("own", "7", "0")

@parametrize("task, n", [("successor", 9), ("nx1", 90)])
def test_draw_questions_are_distinct_and_all_if_they_are_few(task, n):
    """There are 9 numbers of one digit without a leading zero, and 10 single digits."""
    source, _ = draw_questions(small(task), draw_exact, 1, 500)
    assert len(source) == len(source.unique(dim=0)) == n

def test_draw_exact_has_all_digits_but_no_leading_zero():
    digits = draw_exact(10, 2, 2000)
    assert digits.amin(0).tolist() == [0, 1]
    assert digits.amax(0).tolist() == [9, 9]

def test_draw_hard_has_short_and_equal_numbers_and_long_carries():
    """Of uniform numbers, one in 10^20 would be such."""
    a, b = draw_hard(10, 60, 20_000).split(10_000)
    for places in a == 0, a == b, a + b == 9:
        assert places[:, 20:40].all(1).any()

def test_split_numbers_parts_all_below_the_limit_seven_to_one():
    """v2, App. B."""
    training, held_out = split_numbers(3)
    together = torch.cat([training, held_out]).sort().values
    assert together.equal(torch.arange(2 ** 20))
    assert len(training) == 7 * len(held_out)
    assert not training.equal(split_numbers(4)[0])

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
    """Outputs and weights, also if a method computes the products."""
    ours = L.MultiHeadAttention(12, 3)
    ours.scores = scores
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

def test_attention_in_pieces_equals_that_of_the_whole_bias():
    """Here keys are in another order, and two that are closed are left out."""
    ours = L.MultiHeadAttention(12, 3)
    x, bias = randn(2, 5, 12), randn(3, 5, 5)
    bias[:, :, ::3] = -INF
    keys, pieces = torch.tensor([4, 2, 1]), []
    for rows in torch.arange(5).split(2):
        piece = bias[:, rows][:, :, keys]
        pieces.append((rows, keys, piece))
    found, expected = ours(x, x, iter(pieces)), ours(x, x, bias)
    assert_close(found[0], expected[0])

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
    scores = METHODS["rope"].scores(None, "self", x, x)
    assert_close(scores, rotated @ rotated.mT)

@parametrize("method", ["rpe-k", "rpe-kq"])
def test_relative_scores_are_the_sums_of_shaw_and_huang(double, method):
    """Shaw et al. 2018, Eq. 4; Huang et al. 2020, method 4. The table is for offsets -2 to 2."""
    config = small(method=method, d_model=8, clip=2)
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
    """v2, App. C.4. From w = T - 1 on, it is the causal mask."""
    bias = L.window_bias(w, 6, 6)[0]
    for i, row in enumerate(bias):
        assert (row == 0).sum() == min(i, w) + 1
    assert bias.equal(causal_bias(6)[0]) == (w >= 5)

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
    """One of an encoder, and two of a decoder that have different biases."""
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

@parametrize("method, limit", [("abc", 103)] + [(method, 12) for method in METHODS])
def test_generate_equals_the_greedy_loop(double, method, limit):
    """Which later targets cannot change. Beyond 100 rows, one side has a bias in pieces."""
    lines = [LINES] * METHODS[method].calibrated
    model = drawn_model(small(method=method), *lines)
    source = drawn_tokens(3, 19)
    expected = torch.full((3, 1), VOCAB.index("$"))
    for _ in range(limit):
        token = model(source, expected)[:, -1:].argmax(2)
        expected = torch.cat([expected, token], 1)
    assert len(expected.unique()) > 2  # not one token again and again
    assert L.generate(model.train(), source, limit).equal(expected)

@parametrize("method", ["nope", "vanilla", "ape", "alibi", "rope", "rpe-k", "rpe-kq"])
def test_all_methods_but_nope_tell_orders_apart(double, method):
    """An encoder without positions only permutes its output."""
    model = drawn_model(small(model="encoder", method=method))
    source, order = drawn_tokens(2, 9), torch.randperm(9)
    found = model(source, source)[:, order]
    permuted = model(source[:, order], source)
    assert torch.allclose(found, permuted) == (method == "nope")

@parametrize("side, index", [("target", "0120120"), ("source", "0210210")])
def test_embed_repeats_positions_after_a_period(side, index):
    """v2, App. C.4; a source is counted from its end."""
    model, tokens = Transformer(small(method="window-cyclic")), drawn_tokens(1, 7)
    waves = L.sinusoidal(encode(index), 16)
    assert_close(model.embed(tokens, side), model.embedding(tokens) + waves)

@parametrize("task, question, shown", [
    ("successor", "$0129&", "9& 29 12 01"), ("addition", "$+00172438&", "38& 2438 1724 0017")])
def test_banded_methods_show_a_place_and_the_one_before_it(task, question, shown):
    """By hand, for rows 0 to 3. A place of two operands has two columns."""
    bias = L.make_bias(small(task, method="window"))
    found = bias(0, "cross", 4, len(question))
    assert shown_to_rows(found[0], question) == shown

# 4. Training and tests ----------------------------------------------------------------------------

def fit(model, batches):
    """Train at half the peak rate, a batch in each step -> what the run keeps."""
    run = Run(model.config, {})
    data = SimpleNamespace(steps=len(batches), batch=lambda step: batches[step - 1],
                           rate=lambda step: 0.5, check=lambda model: [])
    train(run, model, "model", data)
    return run.parts["model"]

def drawn_batches(n):
    return [(drawn_tokens(8, 7), drawn_tokens(8, 6)) for _ in range(n)]

@parametrize("kind, beta, decay", [
    ("seq2seq", 0.98, 0.0), ("encoder", 0.999, 0.01)])
def test_train_equals_torchs_adamw_in_the_paper_preset(double, kind, beta, decay):
    """At gradients of norm 1 or less. The last loss is kept."""
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
    """The first step of Adam moves no number by more than a quarter of the rate."""
    model = drawn_model(small(method="rpe-k", lr=0.02))
    before = copy.deepcopy(model.state_dict())
    fit(model, drawn_batches(1))
    for name, weight in model.named_parameters():
        matrix = "coder" in name and weight.dim() == 2 and "table" not in name
        moved = (weight - before[name]).abs() / 0.01
        assert (moved.max() > 0.2501) == matrix

@parametrize("shape", [(16, 64), (64, 16)])
def test_muon_orthogonalizes_a_gradient(shape):
    """By torch.linalg.svd, g = u s v. All s become nearly 1, so that u v remains."""
    gradients = randn(3, *shape)
    u, _, v = torch.linalg.svd(gradients, full_matrices=False)
    found = L.muon(gradients, torch.zeros(3, *shape))
    assert (found - u @ v).norm() < 0.25 * found.norm()

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
    """So it can be a CUDA graph. On torch's meta device, no value can be read."""
    with torch.device("meta"):
        model, share = Transformer(small(method=method)), torch.ones(())
        source, target = drawn_tokens(8, 7), drawn_tokens(8, 6)
    optimizer = L.Optimizer(model, model.config)
    loss = L.take_step(model, optimizer, share, source, target)
    assert loss.is_meta

def data_of(config, steps, first=True):
    return L.numbers_data(config, split_numbers(0), steps, first)

@parametrize("preset, first, rates", [
    ("fast", True, {15: 0.5, 241: 0.5}),
    ("fast", False, {15: 0.5, 151: 0.5}),
    ("paper", True, {1: 1.0, 300: 1.0})])
def test_numbers_data_has_rates_that_rise_then_fall(preset, first, rates):
    """By hand: up in 30 of 300 steps, and down in the last 40% or all along."""
    data = data_of(small(preset=preset), 300, first)
    for step, share in rates.items():
        assert data.rate(step) == approx(share)

def integers_of(source):
    return [int(decode(question)[1:-1]) for question in source]

@parametrize("first, step, power", [
    (True, 1, 14), (True, 300, 19), (False, 1, 19)])
def test_numbers_data_begins_with_small_numbers(first, step, power):
    """Half of the first are below 1.6% of the range; later draws are uniform."""
    data = data_of(small("successor", batch=4000), 300, first)
    source, _ = data.batch(step)
    assert np.median(integers_of(source)) == approx(2 ** power, rel=0.3)

class Counter(nn.Module):
    """A model that adds 1 by Python's integers, wrongly where a number ends in 7."""
    def forward(self, source, target):
        self.asked = integers_of(source)
        answers = torch.stack([answer_to("successor", question) for question in source])
        answers[:, 2] += source[:, -2] == 7
        return F.one_hot(answers[:, 1:], len(VOCAB)).float()

def test_numbers_data_trains_and_checks_on_different_numbers():
    training, held_out = map(torch.Tensor.tolist, split_numbers(0))
    data, model = data_of(small("successor", batch=1000), 300), Counter()
    [share] = data.check(model)
    assert 0.8 < share < 0.99
    assert set(model.asked) <= set(held_out)
    for step in 1, 300:
        source, _ = data.batch(step)
        assert set(integers_of(source)) <= set(training)

def test_train_fails_if_the_loss_is_not_finite():
    model = Transformer(small())
    nn.init.constant_(model.embedding.weight, math.nan)
    with raises(RunFailed, match="step 3"):
        fit(model, drawn_batches(3))

class Killed(Run):
    """A run that is killed as soon as something is saved."""
    def keep(self, **parts):
        super().keep(**parts)
        raise KeyboardInterrupt

def test_keep_leaves_the_last_checkpoint_if_saving_fails(tmp_path):
    """A local function cannot be saved. No other file is left."""
    run = Run(small(), {}, tmp_path)
    run.keep(first=torch.arange(3))
    with raises(Exception, match="local"):
        run.keep(second=lambda: None)
    [file] = tmp_path.iterdir()
    kept = torch.load(file, weights_only=True)
    assert list(kept["parts"]) == ["first"]

def test_evaluate_counts_right_answers_and_places():
    """END, which is always right, is no place. Up to 60 digits, there are hard questions."""
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

@parametrize("method, steps", [
    ("vanilla", 250), ("window-nope", 150), ("rpe-k", 400)])
def test_training_of_a_method_reaches_numbers_that_are_held_out(method, steps):
    """By positions, a bias or scores. A guess is right on one in a million."""
    run = Run(Config("successor", method=method), {})
    model = L.new_model(run, "model", run.config)
    train(run, model, "model", data_of(run.config, steps))
    assert run.parts["model"]["curve"][-1][2] > 0.8

# 5. ABC: lines, bias, calibration -----------------------------------------------------------------

def index_of(direction, i, j, n):
    """Which line in this direction an element of n columns is on: v1, Sec. 5, counted from 0."""
    return direction, {1: j - i, 0: j, -1: n - 1 - (i + j)}[direction]

def bias_of_papers(attention, M, N, kappa, groups=((1,), (0,), (-1,)), total=False):
    """(m, n) -> (M, N) by Eqs. 1 and 2 of v1, element by element."""
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
            if value > threshold:
                bias[i, j] = max(bias[i, j], value - max(values))
    bias[bias.isneginf().all(1)] = 0  # transparent
    return bias

@parametrize("m, n, kappa", [(6, 9, 0.5), (9, 6, 1.0)])
@parametrize("rules, changes", [
    ("v1", {}),
    ("v2", dict(groups=((1, 0, -1),))),
    ("code", dict(groups=((-1,),), total=True))])
def test_abc_bias_is_that_of_the_papers_equations(double, rules, changes, m, n, kappa):
    """In v2 (Eq. 1), directions are compared with one another; in the authors' code, sums."""
    attention = randn(2, m, n).softmax(2)
    found = abc_bias(attention, 12, 15, rules, kappa=kappa)
    for head, bias in zip(attention, found):
        expected = bias_of_papers(head, 12, 15, kappa, **changes)
        assert_close(bias, expected)

def test_find_lines_gives_those_of_its_example():
    """Of six means, .44 and .31 exceed mu + 0.44 * .377 = .309, and .31 - .44 is -.13."""
    attention = torch.zeros(1, 5, 6)
    for offset, mean in enumerate([.02, .31, .44, .05, .03, .01], -2):
        attention[0].diagonal(offset).fill_(mean)
    lines = L.find_lines(attention, [6], 0.44, groups=((1,),), ours=True)
    found = {line.offset: line.bias for line in lines}
    assert found == {-1: approx(-.13), 0: 0}

def test_abc_bias_of_uniform_attention_is_transparent_or_opens_the_first_key():
    """v1, step 2.3; by our rules, a row without a line sees the first key alone."""
    uniform = torch.full((2, 11, 23), 1 / 23)
    assert abc_bias(uniform, 20, 30, "v1").equal(torch.zeros(2, 20, 30))
    first_alone = torch.eye(30)[0].expand(2, 20, 30)
    assert abc_bias(uniform, 20, 30).exp().equal(first_alone)

def test_abc_bias_continues_lines_within_their_block():
    """An anti-diagonal of the first of two blocks of 5, which become two of 8."""
    attention = F.pad(torch.eye(5).flip(1), (0, 5))[None]
    blocks = [(5, 8), (5, 8)]
    bias = abc_bias(attention, 8, 16, blocks=blocks, groups=((-1,),))
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
def test_a_line_shows_a_place_to_each_row(task, keys, attention, path, shown):
    """By the table of section 5, not by lines of other layers. A row without a line sees START."""
    direction, block, offset = map(int, path.split())
    line = Line(0, direction, block, offset, 0.0, 1.0, attention=attention)
    lines = [line, line._replace(layer=1, offset=3)]
    bias = L.CalibratedBias(small(task), lines)
    found = bias(0, attention, 6, len(keys))
    assert shown_to_rows(found[0], keys) == " ".join(shown)

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
    """A vertical inside a number means nothing, nor do rows that training never fills."""
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

@parametrize("rules", ["v1", "v2"])
def test_calibrate_by_the_papers_gives_all_layers_the_lines_of_the_last(rules):
    """v2, App. D: the same as if all layers had the attention of the last."""
    own = torch.rand(2, 2, 8, 8) ** 20
    cross = torch.rand(2, 2, 8, 99) ** 20
    found = paths_of(own, cross, rules=rules)
    assert found == paths_of(own[[1, 1]], cross[[1, 1]], rules=rules) != []

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

@parametrize("start, end", [("# 2. ", "# 3. "), ("# 5. ", "\ndef blocks_of")])
def test_sections_can_be_copied_as_they_stand(start, end):
    """Into a file that has the imports that their first lines ask for."""
    text = inspect.getsource(L)
    names = dict(torch=torch, math=math, nn=nn, F=F, NamedTuple=NamedTuple)
    exec(text[text.index(start):text.index(end)], names)
    x = torch.rand(2, 5, 6)
    if "MultiHeadAttention" in names:
        names["MultiHeadAttention"](6, 2)(x, x, bias=x[:, :, :5])
    else:
        assert names["abc_bias"](x, 8, 9).equal(abc_bias(x, 8, 9))
