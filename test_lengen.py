# SPDX-License-Identifier: MIT
"""Tests of lengen.py against oracles that are not lengen.py: Python integers, torch's own modules, published numbers,
and the literal loops of the papers. Run: python -m pytest -q"""

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import lengen as L

HERE = Path(__file__).resolve().parent
INF = float("inf")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def double_precision():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tiny(**options):
    return L.Config(**{**dict(n_layer=2, n_head=2, d_model=16, d_ff=32, task="addition", method="vanilla"), **options})


# --- 1. tasks -------------------------------------------------------------------------

def in_base(number, base):
    digits = ""
    while number or not digits:
        digits, number = str(number % base) + digits, number // base
    return digits


def expected_answer(task, numbers, width, base):
    """The target by Python's integers, never lengen's arithmetic."""
    if task == "parity-label":
        return str(in_base(numbers[0], 2).count("1") % 2)
    if task == "parity":
        bits = in_base(numbers[0], 2).rjust(width, "0")[::-1]
        return "".join(str(bits[:i + 1].count("1") % 2) for i in range(width))
    value = {"successor": lambda a: a + 1, "addition": lambda a, b: a + b, "nx1": lambda a, b: a * b}[task](*numbers)
    return in_base(value, base).rjust(width, "0")[::-1]


def test_papers_worked_example():
    assert L.example("addition", "123", "748", width=4) == ("$0123+0748&", "$1780&")        # ABC v2, Sec. 2
    assert L.example("addition", "123", "748", width=4, align=True) == ("$+00172438&", "$1780&")
    assert L.example("nx1", "123", "6", width=4, align=True)[0] == "$*06162636&"
    assert L.example("parity", "1011") == ("$1011&", "$1001&")
    assert L.decode(L.encode(L.VOCAB)) == "0123456789+*$&@"


@pytest.mark.parametrize("task", L.TASKS)
@pytest.mark.parametrize("base", [2, 7, 10])
def test_examples_equal_python_integers(task, base):
    spec, rng = L.TASKS[task], random.Random(1)
    base = spec.base or base
    for length in (1, 2, 5, 20, 200):
        top = base ** length
        for number in (0, 1, top - 1, rng.randrange(top), rng.randrange(top)):
            second = {"addition": rng.randrange(base ** rng.randint(1, length)), "nx1": rng.randrange(base)}.get(task)
            operands = [number] if second is None else [number, second]
            source, target = L.example(task, *[in_base(n, base) for n in operands], width=length + 1, base=base)
            padded = [in_base(operands[0], base).rjust(length + 1, "0")]
            padded += [in_base(n, base).rjust(length + 1 if task == "addition" else 1, "0") for n in operands[1:]]
            assert source == "$" + {"addition": "+", "nx1": "*"}.get(task, "").join(padded) + "&"
            assert target == "$" + expected_answer(task, operands, length + 1, base) + "&"


def test_longest_carry_and_ten_thousand_digits():
    assert L.example("successor", "9" * 10_000)[1] == "$" + "0" * 10_000 + "1&"
    assert L.example("addition", "9" * 200, "1", width=201)[1] == "$" + "0" * 200 + "1&"


@pytest.mark.parametrize("arguments, options", [
    (("division", "1"), {}), (("successor", "1", "2"), {}), (("successor", "12a"), {}), (("successor", ""), {}),
    (("successor", "8"), dict(base=8)), (("addition", "123", "7"), dict(width=2)), (("successor", "999"), dict(width=3)),
    (("nx1", "12", "34"), {}), (("successor", "1"), dict(base=-3)), (("successor", "1"), dict(base=11))])
def test_bad_examples_are_refused(arguments, options):
    with pytest.raises(ValueError):
        L.example(*arguments, **options)


def test_split_is_a_seven_to_one_partition():
    a, b = L.split_numbers(3)
    assert sorted(torch.cat([a, b]).tolist()) == list(range(2 ** 20 + 1)) and abs(len(a) / len(b) - 7) < 1e-4
    assert not torch.equal(a, L.split_numbers(4)[0])


def test_test_numbers_have_exactly_their_length():
    draw = lambda *a: L.draw_test(*a, torch.Generator().manual_seed(0))
    number = lambda digits: [int("".join(map(str, row))) for row in digits.flip(1).tolist()]
    for length, samples in ((2, 10_000), (5, 100_000)):                                 # all, each once
        assert sorted(number(draw("successor", length, samples, 10)[0])) == list(range(10 ** (length - 1), 10 ** length))
    for length in (5, 30):
        for operand in draw("addition", length, 50, 10):
            assert all(10 ** (length - 1) <= n < 10 ** length for n in number(operand))
    assert len(draw("nx1", 30, 50, 10)[1][0]) == 1
    assert L.draw_test("parity", 10_000, 3, 2, torch.Generator())[0].shape == (3, 10_000)


def test_training_numbers_are_those_given_and_independent():
    drawn = L.draw_training("addition", torch.tensor([5, 17, 99]), 300, 8, 10, L.seeded(0))
    assert set(integers(drawn, 10)) == set(itertools.product((5, 17, 99), repeat=2))


@pytest.mark.parametrize("task, base, trained, tested", [("addition", 10, 0, 1), ("addition", 2, 2, 2), ("addition", 8, 1, 1),
                                                         ("successor", 2, 1, 1), ("nx1", 10, 0, 1), ("parity", 2, 1, 0)])
def test_zeros_in_front_of_questions(task, base, trained, tested):
    text = {2: "1" * 20, 8: "3777777", 10: "1048575"}[base]                               # 2^20 - 1
    source, _ = L.example(task, *[text, "1"][:len(L.TASKS[task].operands)], width=L.Config(task=task, base=base).width, base=base)
    assert source[1:].index(text) == trained and L.width_for(task, 60, base) == 60 + tested


@pytest.mark.parametrize("base", [2, 4, 8, 10])
@pytest.mark.parametrize("task", L.TASKS)
def test_natural_width_is_the_narrowest_that_holds_every_number_and_answer(task, base):
    base, top = L.TASKS[task].base or base, 2 ** 20
    answer = {"successor": top + 1, "addition": top + top, "nx1": top * (base - 1)}.get(task, top)
    assert L.natural_width(task, base) == len(in_base(answer, base))


def carries_of(task, operands, base):
    """Which columns carry, told from Python integers: the partial sum of the columns up to there is too large."""
    reach = 1 + max(len(in_base(n, base)) for n in operands)
    low = [[n % base ** (i + 1) for n in operands] for i in range(reach)]
    value = {"successor": lambda a: a + 1, "addition": lambda a, b: a + b, "nx1": lambda a, b: a * operands[1]}[task]
    return "".join("01"[value(*part) >= base ** (i + 1)] for i, part in enumerate(low))


def integers(operands, base):
    return list(zip(*[[int("".join("0123456789"[d] for d in row), base) for row in a.flip(1).tolist()] for a in operands]))


@pytest.mark.parametrize("task", ["successor", "addition", "nx1"])
@pytest.mark.parametrize("base", [3, 10])
def test_longest_carry_chain(task, base):
    operands = L.draw_test(task, 6, 400, base, torch.Generator().manual_seed(0))
    expected = [max(map(len, carries_of(task, numbers, base).split("0"))) for numbers in integers(operands, base)]
    assert L.carry_chains(task, operands, base).tolist() == expected and max(expected) > 2
    assert L.carry_chains("parity", [torch.zeros(1, 3)], 2) is None


@pytest.mark.parametrize("base", [4, 10])
@pytest.mark.parametrize("length", [4, 60])
def test_hard_sets_are_what_their_names_say(base, length):
    draw = lambda task: {name: (integers(operands, base), operands) for name, operands in
                         L.draw_hard(task, length, 50, base, torch.Generator().manual_seed(0)).items()}
    nines, digits = base ** length - 1, lambda n: len(in_base(n, base))
    for task in ("successor", "addition", "nx1"):
        for name, (rows, operands) in draw(task).items():
            assert all(a.max() < base and a.min() >= 0 for a in operands)
            carried = [carries_of(task, row, base) for row in rows]
            if name == "carry-through":
                assert all("1" * length in c for c in carried)
            if name == "all-carry":
                assert all(d * operands[1][0, -1] >= base if task == "nx1" else True for d in operands[0].flatten())
                assert all("1" * length in c for c in carried)
            if name == "no-carry":
                assert not any("1" in c for c in carried)
            if name == "zeros":
                assert any(0 in row for row in rows)
            if name == "trailing-nines":                                                  # of random numbers, few or half
                assert sum(row[0] % base == base - 1 for row in rows) > 0.65 * len(rows)
    addition, nx1 = draw("addition"), draw("nx1")
    assert draw("successor")["zeros"][0] == [(base ** (length - 1),), (0,)]
    assert all(min(map(digits, row)) <= 3 for row in addition["unequal"][0])
    assert addition["99...9+1"][0] == [(nines, 1)] and addition["1+99...9"][0] == [(1, nines)]
    assert {b for _, b in nx1["digit 0"][0]} == {0} and {b for _, b in nx1[f"digit {base - 1}"][0]} == {base - 1}
    assert {a for a, _ in nx1["99...9"][0]} == {nines}
    parity = L.draw_hard("parity", length, 50, 2, torch.Generator().manual_seed(0))
    assert parity["all-ones"][0].sum() == length and set(parity["one-one"][0].sum(1).tolist()) == {1}


def test_batches_depend_on_the_seed_and_not_on_the_method():
    numbers, _ = L.split_numbers(0)
    draw = lambda method, seed: next(L.batches(tiny(method=method), numbers, 8, [8, 9, 10], L.seeded(seed)))
    for a, b in zip(draw("vanilla", 5), draw("rope", 5)):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert not torch.equal(draw("vanilla", 5)[1], draw("vanilla", 6)[1])


def test_drawn_digits_are_uniform_and_operands_independent():
    even = lambda digits, values: (digits.flatten().bincount(minlength=10)[values] - 1000).abs().max() < 5 * math.sqrt(1000)
    n = 10_000
    for a, b in (L.draw_training("nx1", torch.arange(99), n, 8, 10, L.seeded(0)), L.draw_test("nx1", 30, n, 10, L.seeded(0))):
        assert even(b, range(10))
    a, _ = L.draw_test("addition", 30, n, 10, L.seeded(0))
    assert even(a[:, 7], range(10)) and even(a[:9000, -1], range(1, 10)) and not (a[:, -1] == 0).any()
    for length in (4, 30):
        a, b = L.draw_test("addition", length, 1000, 10, L.seeded(0))
        assert (a == b).all(1).sum() < 5
    four = [x for x, in integers(L.draw_test("successor", 4, 1000, 10, L.seeded(0)), 10)]
    assert len(set(four)) == 1000 and {x // 1000 for x in four} == set(range(1, 10))     # no number twice, from the whole range


def test_hard_sets_have_both_sides():
    draw = lambda task: L.draw_hard(task, 20, 50, 10, L.seeded(0))
    sets = {name: integers(operands, 10) for name, operands in draw("addition").items()}
    assert {(a == 0, b == 0) for a, b in sets["zeros"]} == {(True, False), (False, True)}
    short = [(a < 1000, b < 1000) for a, b in sets["unequal"]]
    assert short.count((False, True)) > 40 and short.count((True, False)) > 40
    assert sum(a % 1000 == b % 1000 for a, b in sets["unequal"]) < 5
    assert max(int(x) for a, b in sets["no-carry"] for x in str(b)) == 9
    assert len(draw("parity")["one-one"][0].unique(dim=0)) > 10


# --- 2. positions and biases ----------------------------------------------------------

def test_sinusoid_is_the_formula():
    table = L.sinusoidal(torch.arange(50), 6)
    for t, channel in [(0, 0), (7, 0), (7, 1), (49, 4), (49, 5), (31, 3)]:
        angle = t / 10000 ** (channel // 2 * 2 / 6)
        assert table[t, channel] == pytest.approx(math.sin(angle) if channel % 2 == 0 else math.cos(angle), abs=1e-12)


def test_cyclic_rows_stay_in_phase_with_their_windows_at_every_width():
    model = L.Transformer(tiny(method="window-cyclic", period=3))
    phases = set()
    for S in range(11, 20):
        source, target = (model.indices(torch.zeros(1, T), side) for T, side in ((S, 0), (S - 2, 1)))
        phases.add(tuple((source.flip(0)[:S - 2] - target).tolist()))                       # column S - 1 - i of row i
    assert all(set(row) == {0} for row in phases)


def test_rope_equals_onnx_reference():
    x, positions = torch.randn(2, 3, 5, 8, dtype=torch.float32), torch.tensor([0, 1, 5, 77, 9999])
    angles = torch.arange(10_000).double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8.0)
    oracle = torch.onnx.ops.rotary_embedding(x, angles.cos().float(), angles.sin().float(), positions.expand(2, 5),
                                             interleaved=True)
    torch.testing.assert_close(L.rope(x, positions), oracle, atol=2e-6, rtol=0)


def test_rope_scores_ignore_a_common_shift():
    q, k, at = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8), torch.arange(6)
    scores = lambda shift: L.rope(q, at + shift) @ L.rope(k, at + shift).transpose(2, 3)
    torch.testing.assert_close(scores(0), scores(1000))
    assert not torch.allclose(scores(0), q @ k.transpose(2, 3))
    with pytest.raises(ValueError, match="odd"):
        L.rope(torch.randn(1, 1, 6, 7), at)


def test_relative_scores_equal_the_papers_sums():
    B, H, T, S, D, K = 2, 2, 5, 7, 4, 2
    q, k, table = torch.randn(B, H, T, D), torch.randn(B, H, S, D), torch.randn(2 * K + 1, D)
    keys, both = torch.zeros(B, H, T, S), torch.zeros(B, H, T, S)
    for i in range(T):
        for j in range(S):
            a_ij = table[max(-K, min(K, j - i)) + K]
            keys[:, :, i, j] = q[:, :, i] @ a_ij
            both[:, :, i, j] = (q[:, :, i] + k[:, :, j]) @ a_ij
    torch.testing.assert_close(L.relative_scores(q, table, S=S), keys)
    torch.testing.assert_close(L.relative_scores(q, table, k=k), both)


def test_alibi_slopes_are_the_published_ones():
    assert L.alibi_slopes(8).tolist() == [2.0 ** -h for h in range(1, 9)]
    twelve = [.5, .25, .125, .0625, .03125, .015625, .0078125, .00390625, .707107, .353553, .176777, .088388]
    assert L.alibi_slopes(12).tolist() == pytest.approx(twelve, abs=1e-6)


def test_alibi_bias_is_minus_slope_times_distance():
    small, large = L.alibi_bias(3, 4, 6), L.alibi_bias(3, 9, 9)
    assert torch.equal(small, large[:, :4, :6])
    for h, slope in enumerate([0.0625, 0.00390625, 0.25]):
        assert small[h, 3, 0] == -3 * slope and small[h, 0, 5] == -5 * slope and small[h, 2, 2] == 0


def test_window_bias():
    opened = lambda bias: [[int(j) for j in row.isfinite().nonzero()] for row in bias[0]]
    assert [len(row) for row in opened(L.window_bias(2, 6, 6))] == [min(i + 1, 3) for i in range(6)]
    assert torch.equal(L.window_bias(5, 6, 6), L.causal_bias(6))
    # `$123&` has columns 0 - 4, rows 0 - 3 write 3, 2, 1 and the end
    assert opened(L.window_bias(1, 4, 5, cross=True)) == [[3, 4], [2, 3, 4], [1, 2, 3], [0, 1, 2]]
    # `$+a2b2a1b1&` has columns 0 - 6; two digits a row, one column on either side
    assert opened(L.window_bias(1, 3, 7, cross=True, step=2)) == [[4, 5, 6], [2, 3, 4, 5], [0, 1, 2, 3]]
    assert set(L.window_bias(1, 4, 5, cross=True).unique().tolist()) == {0.0, -INF}


# --- 3. attention ---------------------------------------------------------------------

def test_attention_equals_torch_with_gradients():
    B, T, S, C, H = 3, 4, 6, 12, 3
    ours, oracle = L.MultiHeadAttention(C, H), nn.MultiheadAttention(C, H, batch_first=True)
    with torch.no_grad():
        oracle.in_proj_weight.copy_(torch.cat([ours.q.weight, ours.k.weight, ours.v.weight]))
        oracle.in_proj_bias.copy_(torch.cat([ours.q.bias, ours.k.bias, ours.v.bias]))
        oracle.out_proj.weight.copy_(ours.out.weight), oracle.out_proj.bias.copy_(ours.out.bias)
    x, memory, bias = torch.randn(B, T, C), torch.randn(B, S, C), torch.randn(H, T, S)
    bias[1, 2, 3] = -INF
    results = []
    for attend in (lambda a, b: ours(a, b, bias),
                   lambda a, b: oracle(a, b, b, attn_mask=bias[None].expand(B, H, T, S).reshape(B * H, T, S),
                                       average_attn_weights=False)):
        a, b = x.clone().requires_grad_(), memory.clone().requires_grad_()
        output, weights = attend(a, b)
        output.square().sum().backward()
        results.append((output, weights, a.grad, b.grad))
    torch.testing.assert_close(*results)


def test_relative_term_is_scaled_with_the_scores():
    attention = L.MultiHeadAttention(8, 2, relative="kq", clip=2)
    x = torch.randn(1, 5, 8)
    q, k, v = (layer(x).view(1, 5, 2, 4).transpose(1, 2) for layer in (attention.q, attention.k, attention.v))
    term = torch.stack([torch.stack([(q[:, :, i] + k[:, :, j]) @ attention.table[max(-2, min(2, j - i)) + 2]
                                     for j in range(5)], -1) for i in range(5)], -2)
    oracle = F.scaled_dot_product_attention(q, k, v, attn_mask=term / 2)       # sqrt(D) = 2
    torch.testing.assert_close(attention(x, x)[0], attention.out(oracle.transpose(1, 2).flatten(2)))


def test_rows_without_an_open_key_are_zero_and_never_nan():
    attention, x = L.MultiHeadAttention(8, 2), torch.randn(2, 4, 8, requires_grad=True)
    bias = torch.zeros(2, 4, 4)
    bias[0, 1] = -INF
    output, weights = attention(x, x, bias)
    output.sum().backward()
    assert weights[:, 0, 1].eq(0).all() and weights[:, 1, 1].sum(-1).allclose(torch.ones(2))
    assert output.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attention.parameters())
    q, k, v = (layer(x).view(2, 4, 2, 4).transpose(1, 2) for layer in (attention.q, attention.k, attention.v))
    oracle = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)           # a closed row gives 0 there, too
    torch.testing.assert_close(output, attention.out(oracle.transpose(1, 2).flatten(2)))


# --- 4. transformer -------------------------------------------------------------------

@pytest.mark.parametrize("norm", ["pre", "post"])
def test_transformer_equals_torch_transformer(norm):
    config = tiny(method="nope", norm=norm, n_encoder=2, n_layer=3)
    model = L.Transformer(config).eval()
    oracle = nn.Transformer(16, 2, 2, 3, 32, 0.0, batch_first=True, norm_first=norm == "pre").eval()
    if norm == "post":
        oracle.encoder.norm = oracle.decoder.norm = nn.Identity()
    else:
        oracle.encoder.norm = nn.Identity()
        oracle.decoder.norm.load_state_dict(model.norm.state_dict())
    attention = {"in_proj_weight": lambda a: torch.cat([a.q.weight, a.k.weight, a.v.weight]),
                 "in_proj_bias": lambda a: torch.cat([a.q.bias, a.k.bias, a.v.bias]),
                 "out_proj.weight": lambda a: a.out.weight, "out_proj.bias": lambda a: a.out.bias}
    for ours, theirs in [*zip(model.encoder, oracle.encoder.layers), *zip(model.decoder, oracle.decoder.layers)]:
        theirs.self_attn.load_state_dict({name: pick(ours.self_attention) for name, pick in attention.items()})
        theirs.linear1.load_state_dict(ours.feed_forward[0].state_dict())
        theirs.linear2.load_state_dict(ours.feed_forward[3].state_dict())
        if ours.cross_attention:
            theirs.multihead_attn.load_state_dict({name: pick(ours.cross_attention) for name, pick in attention.items()})
        for i, norm_ in enumerate(ours.norms, 1):
            nn.init.normal_(norm_.weight)
            getattr(theirs, f"norm{i}").load_state_dict(norm_.state_dict())
    source, target = torch.randint(10, (2, 7)), torch.randint(10, (2, 5))
    cross = torch.randn(1, 5, 7)
    bias = L.Bias(None, [(L.causal_bias(5), cross)] * 3)
    hidden = oracle(model.embedding(source), model.embedding(target), tgt_mask=L.causal_bias(5)[0], memory_mask=cross[0])
    torch.testing.assert_close(model(source, target, bias), model.head(hidden))


@pytest.mark.parametrize("method", [m for m in L.METHODS if m != "abc"])
def test_later_targets_never_change_earlier_logits(method):
    config = tiny(method=method, n_encoder=1)
    model, bias = L.Transformer(config).eval(), L.make_bias(config, 8)
    source, target = torch.randint(10, (2, 19)), torch.randint(10, (2, 9))
    other = target.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 10
    a, b = model(source, target, bias), model(source, other, bias)
    assert torch.equal(a[:, :5], b[:, :5]) and not torch.allclose(a[:, 5:], b[:, 5:])


@pytest.mark.parametrize("method", ["nope", "vanilla", "ape", "rope", "rpe-k", "rpe-kq", "alibi"])
def test_only_positions_break_the_permutation_symmetry_of_the_source(method):
    config = tiny(method=method, n_encoder=1)
    model, bias = L.Transformer(config).eval(), L.make_bias(config, 8)
    source, target = torch.randperm(10)[None, :], torch.randint(10, (1, 9))
    source = torch.cat([source, source.flip(1)[:, :9]], 1)
    shuffled = source[:, torch.randperm(19)]
    same = torch.allclose(model(source, target, bias), model(shuffled, target, bias))
    assert same == (method == "nope")


@pytest.mark.parametrize("method", ["vanilla", "window-cyclic"])
def test_one_pass_decides_exact_match_as_greedy_decoding_does(method):
    config = tiny(method=method, base=2, task="successor")
    torch.manual_seed(2)
    model = L.Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    numbers = torch.arange(64)
    bias = L.make_bias(config, 22)
    stream = L.batches(config, numbers, 32, [22], L.seeded(0))
    for _ in range(200):                          # trained a little, so that some are right and some are wrong
        _, source, target = next(stream)
        loss = F.cross_entropy(model(source, target[:, :-1], bias).flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    _, source, target = next(stream)
    greedy = L.generate(model, source, 23, bias)
    width = target.shape[1]
    greedy = F.pad(greedy, (0, width - greedy.shape[1]), value=L.TOKEN["@"])
    same = L.exact_match(model, source, target, bias)
    assert torch.equal(same, (greedy == target).all(1))
    assert 0 < same.sum() < len(same)


def test_rope_turns_queries_and_keys_before_the_softmax():
    attention, x, y = L.MultiHeadAttention(8, 2), torch.randn(1, 4, 8), torch.randn(1, 6, 8)
    at = lambda shift, pre: attention(x, y, None, (torch.arange(4) + shift, torch.arange(6) + shift), pre)[1]
    torch.testing.assert_close(at(0, True), at(50, True))
    torch.testing.assert_close(at(0, True).softmax(-1), at(0, False))
    assert not torch.allclose(at(0, False), attention(x, y)[1])


def test_make_bias_by_hand():
    opened = lambda bias, text: ["".join(c for c, x in zip(text, row) if x == 0) for row in bias[0]]
    own, cross = L.make_bias(tiny(method="window"), 4).decoder[0]
    assert opened(own, "abcde") == ["a", "ab", "bc", "cd", "de"]
    assert opened(cross, "$+dDcCbBaA&") == ["aA&", "bBaA", "cCbB", "dDcC", "$+dD"]
    alibi = L.make_bias(tiny(method="alibi"), 8)
    assert alibi.decoder[0][1][0, 2, 5] == alibi.encoder[0, 2, 5] == -3 / 16
    config = tiny(task="successor", method="abc", penalty=5.0)
    x = F.pad(torch.eye(8).flip(1), (0, 1)).expand(2, 2, 8, 9)
    bias = L.make_bias(config, 7, L.calibrate(config, x[..., :8], x))
    assert set(bias.decoder[0][1].unique().tolist()) == {-5.0, 0.0}


def test_alibi_is_in_every_attention_of_every_layer():
    decoder = L.make_bias(tiny(method="alibi", n_layer=3), 8).decoder
    assert len(decoder) == 3
    for own, cross in decoder:
        for h, slope in enumerate((1 / 16, 1 / 256)):
            assert own[h, 5, 2] == cross[h, 5, 2] == -3 * slope and own[h, 2, 5] == -INF


@pytest.mark.parametrize("method", ["nope", "rope", "rpe-k", "rpe-kq"])
def test_relative_positions_are_in_every_attention(method):
    """Each attention of the model, given its own inputs: only without positions may its keys change places."""
    model, calls = L.Transformer(tiny(method=method, n_encoder=1, clip=5)).eval(), []
    for module in model.modules():
        if isinstance(module, L.MultiHeadAttention):
            module.register_forward_pre_hook(lambda module, given: calls.append((module, given)))
            assert method[:3] != "rpe" or module.table.shape == (11, 8)
    model(torch.randint(10, (2, 7)), torch.randint(10, (2, 5)))
    assert len(calls) == 5                                                              # encoder; self and cross twice
    for attention, (x, memory, _, *rest) in calls:
        a, b = (attention.forward(x, keys, None, *rest)[0] for keys in (memory, memory.flip(1)))
        assert torch.allclose(a, b) == (method == "nope")


def test_rpe_kq_has_a_term_of_the_keys():
    models = [L.Transformer(tiny(method=method)).eval() for method in ("rpe-k", "rpe-kq")]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        for attention in (m for model in models for m in model.modules() if isinstance(m, L.MultiHeadAttention)):
            attention.q.weight.zero_(), attention.q.bias.zero_()                        # no queries: only k_j . a_ij is left
    trace = [[], []]
    for model, found in zip(models, trace):
        model(torch.arange(7)[None], torch.arange(5)[None], trace=found, pre_softmax=True)
    assert trace[0][0][1].eq(0).all() and trace[1][0][1].abs().min() > 0


@pytest.mark.parametrize("method", L.METHODS)
def test_absolute_positions_are_added_on_both_sides(method):
    model = L.Transformer(tiny(method=method, table=200))
    tokens = torch.randint(10, (2, 7))
    wave = lambda t: [(math.cos if c % 2 else math.sin)(t / 10000 ** (c // 2 * 2 / 16)) for c in range(16)]
    for side in (0, 1):
        places = range(7) if method != "window-cyclic" else [t % 3 for t in (range(7) if side else range(6, -1, -1))]
        expected = {"vanilla": [wave(t) for t in places], "ape": model.tables[side].weight[:7].tolist() if method == "ape" else 0}
        expected["window"] = expected["window-cyclic"] = expected["vanilla"]
        torch.testing.assert_close(model.embed(tokens, side), model.embedding(tokens) + torch.tensor(expected.get(method, 0.0)))


def test_dropout_is_where_torchs_layers_have_it(monkeypatch):
    seen = []
    monkeypatch.setattr(F, "dropout", lambda x, p, training, inplace: seen.append((*x.shape, p, training)) or x)
    L.Transformer(tiny(dropout=0.3, n_layer=1)).train()(torch.randint(10, (2, 7)), torch.randint(10, (2, 5)))
    shapes = [(2, 2, 5, 5), (2, 5, 16), (2, 2, 5, 7), (2, 5, 16), (2, 5, 32), (2, 5, 16)]
    assert seen == [(*shape, 0.3, True) for shape in shapes]
    seen.clear()
    L.Encoder(small_encoder(dropout=0.3, n_layer=1)).train()(torch.randint(10, (2, 13)), 7)
    assert seen == [(*shape, 0.3, True) for shape in [(2, 13, 16), (2, 2, 13, 13), (2, 13, 16), (2, 13, 64), (2, 13, 16)]]


def test_dropout_is_off_where_nothing_is_learned():
    """Checks, calibration and decoding give the same twice with half of everything dropped in training."""
    config = tiny(task="successor", dropout=0.5)
    model = L.Transformer(config)
    source = torch.randint(10, (40, 10))
    target = F.pad(model.eval()(source, torch.full((40, 1), L.TOKEN["$"])).argmax(-1), (1, 0), value=L.TOKEN["$"])
    for call in (lambda: L.exact_match(model, source, target), lambda: L.collect_attention(model, source, target)[1],
                 lambda: L.generate(model, source, 5)):
        assert torch.equal(*[(model.train(), call())[1] for _ in "ab"])
    encoder = L.Encoder(small_encoder(dropout=0.5))
    question, answer = torch.randint(10, (40, 13)), torch.randint(10, (40, 7))
    assert torch.equal(*[(encoder.train(), L.right_digits(encoder, question, answer))[1] for _ in "ab"])


def test_starting_deviations():
    model = L.Transformer(tiny(d_model=256, n_head=2, method="rpe-k", clip=64))
    assert float(model.embedding.weight.detach().std()) == pytest.approx(0.3, rel=0.1)
    assert float(model.decoder[0].cross_attention.table.detach().std()) == pytest.approx(128 ** -0.5, rel=0.1)


def test_paper_preset_is_appendix_b_and_d():
    c = L.make_config("paper")
    assert (c.n_encoder, c.n_layer, c.n_head, c.d_model, c.d_ff, c.dropout, c.norm) == (1, 6, 8, 128, 512, 0.3, "post")
    assert (c.lr, c.kappa_cross, c.kappa_self, c.kappa_unit, c.samples) == (1e-5, 4.5, 0.87, "sigma", 10_000)


# --- 5. attention bias calibration ----------------------------------------------------

@pytest.mark.parametrize("directions", [(1,), (0,), (-1,), (1, 0, -1)])
@pytest.mark.parametrize("kappa", [-9.0, 0.5, 1.5, 99.0])
def test_abc_bias_equals_the_literal_loops(directions, kappa):
    attention = torch.rand(2, 5, 7).square()
    for M, N in [(5, 7), (9, 16), (12, 8)]:
        torch.testing.assert_close(L.abc_bias(attention, M, N, directions, kappa),
                                   L.literal_abc_bias(attention, M, N, directions, kappa))


def pattern(kind, m=8, n=8):
    i, j = torch.arange(m)[:, None], torch.arange(n)
    return {"anti": j == n - 2 - i, "sub": j == i - 1, "column": (j == 2).expand(m, n)}[kind]


@pytest.mark.parametrize("kind, direction", [("anti", -1), ("sub", 1), ("column", 0)])
def test_abc_recovers_a_known_pattern_at_any_size(kind, direction):
    attention = torch.where(pattern(kind), 0.9, 0.01)[None]
    bias = L.abc_bias(attention, 30, 30, (direction,), kappa=2)[0]
    expected = pattern(kind, 30, 30)
    reached = expected.any(1)                                # other rows are left unbiased
    assert torch.equal(bias[reached] == 0, expected[reached]) and (bias[~reached] == 0).all()
    assert bias[reached][~expected[reached]].isneginf().all()


def test_abc_symmetries():
    attention = torch.rand(3, 6, 9).square()
    a = lambda x, *directions, M=14, N=20: L.abc_bias(x, M, N, directions, kappa=1.0)
    torch.testing.assert_close(a(attention, -1), a(attention.flip(2), 1).flip(2))                      # mirror
    torch.testing.assert_close(L.abc_bias(attention.transpose(1, 2), 20, 14, (1,), -9.0),                # transpose
                               L.abc_bias(attention, 14, 20, (1,), -9.0).transpose(1, 2))
    for direction in (1, 0, -1):                                                                         # nesting
        small, large = a(attention, direction), a(attention, direction, M=25, N=40)
        assert torch.equal(small, large[:, :14, 20:] if direction == -1 else large[:, :14, :20])
        assert (small.amax((1, 2)) == 0).all()                                                           # best line is 0


def test_uniform_attention_is_transparent():
    for m, n in [(8, 10), (62, 63)]:
        assert torch.equal(L.abc_bias(torch.full((2, m, n), 1 / n), 20, 30), torch.zeros(2, 20, 30))
        assert torch.equal(L.abc_bias(torch.full((2, m, n), 1 / n).float(), 20, 30), torch.zeros(2, 20, 30).float())


def test_kappa_beyond_reach_opens_nothing_and_reach_makes_it_relative():
    attention = torch.where(pattern("anti"), 1.0, 0.0)[None]                  # 15 anti-diagonals: z at most sqrt(14)
    assert (L.abc_bias(attention, 8, 8, (-1,), kappa=3.75) == 0).all()
    assert L.abc_bias(attention, 8, 8, (-1,), kappa=3.73).isneginf().any()
    assert L.abc_bias(attention, 8, 8, (-1,), kappa=0.99, kappa_unit="reach").isneginf().any()
    assert (L.abc_bias(attention, 8, 8, (-1,), kappa=1.01, kappa_unit="reach") == 0).all()


def test_corner_lines_do_not_count_with_support():
    uniform = torch.ones(62, 62).tril()
    uniform = (uniform / uniform.sum(1, keepdim=True))[None]                  # causal and uniform: corner (0, 0) is 1
    corner = L.find_lines(uniform, (-1,), kappa=4.5)
    assert corner.mean[-1][0][0, -1] == 1 and corner.z[-1][0][0, -1] > 4.5 and corner.values[-1][0][0, -1] == 0
    assert L.find_lines(uniform, (-1,), kappa=-99, support=0.5).values[-1][0][0, -1] == -INF


def test_a_line_that_only_crosses_a_strong_one_is_closed_by_the_floor():
    attention = torch.zeros(1, 9, 9)
    attention[0, torch.arange(9), 8 - torch.arange(9)] = 1.0           # one anti-diagonal, crossed by every diagonal
    attention[0, torch.arange(5), torch.arange(5) + 4] += 0.05         # a faint diagonal, once crossed: mean 0.25
    kept = lambda floor: (~L.find_lines(attention, (1,), 0.1, support=0.5, floor=floor).values[1][0].isneginf()).sum()
    mean = lambda: float(L.line_values(attention, 1)[0][0, 8 + 4])
    assert kept(-L.INF) > 0 and kept(0.2) == 0 and mean() == pytest.approx(0.25)
    attention[0, torch.arange(5), torch.arange(5) + 4] = 0.25          # the same mean, filled along its length
    assert kept(0.2) == 1 and mean() == pytest.approx(0.25)


def test_blocks_continue_each_operand_by_itself():
    # `$dd|+dd|&` to `$dddd|+dddd|&`: row i reads digit i of both numbers, right to left
    attention = torch.full((1, 3, 7), 0.01)
    for i in range(2):
        attention[0, i, 2 - i] = attention[0, i, 5 - i] = 0.48
    attention[0, 2, 0] = attention[0, 2, 3] = 0.48
    bias = L.abc_bias(attention, 5, 11, (-1,), kappa=1, blocks=[(3, 5), (3, 5), (1, 1)])[0]
    assert [[int(j) for j in row.isfinite().nonzero()] for row in bias] == [[4, 9], [3, 8], [2, 7], [1, 6], [0, 5]]
    with pytest.raises(ValueError, match="add up"):
        L.abc_bias(attention, 5, 11, blocks=[(3, 5), (3, 5)])


def test_empty_rows_open_the_first_column_on_request():
    attention = torch.where(pattern("sub"), 1.0, 0.0)[None]
    assert L.abc_bias(attention, 8, 8, (1,), kappa=2)[0, 0].tolist() == [0.0] * 8
    assert L.abc_bias(attention, 8, 8, (1,), kappa=2, empty="first")[0, 0].tolist() == [0.0] + [-INF] * 7
    nothing = L.abc_bias(torch.ones(1, 4, 4), 6, 6, empty="first")
    assert (nothing[..., 0] == 0).all() and nothing[..., 1:].isneginf().all()


@pytest.mark.parametrize("pieces, call", [
    ("line_offsets line_values continue_lines Lines find_lines extend_lines abc_bias", "abc_bias(torch.rand(2, 5, 7), 9, 12)"),
    ("alibi_slopes alibi_bias", "alibi_bias(12, 3, 4)"), ("window_bias", "window_bias(1, 4, 4)"),
    ("rope", "rope(torch.rand(1, 1, 3, 4), torch.arange(3))"), ("relative_scores", "relative_scores(torch.rand(1, 1, 3, 4), torch.rand(5, 4))")])
def test_pieces_can_be_lifted_out_with_nothing_but_torch(pieces, call):
    torch.manual_seed(3)
    expected = eval(call, {"torch": torch, **vars(L)})
    lifted = dict(torch=torch, F=F, math=math, functools=functools, NamedTuple=NamedTuple, INF=INF)
    for name in pieces.split():
        exec(inspect.getsource(getattr(L, name)), lifted)
    torch.manual_seed(3)
    torch.testing.assert_close(eval(call, lifted), expected)


def test_what_a_new_task_or_method_lacks_is_said(monkeypatch):
    """A task whose answer is one digit, in any base, needs nothing but its entry; hard sets and a layout are asked for."""
    largest = L.Task(("number",), "", 1, None, "largest digit", solve=lambda a: a.amax(1, keepdim=True), length=1)
    monkeypatch.setitem(L.TASKS, "largest", largest)
    monkeypatch.setitem(L.METHODS, "wide", L.Method("none", "nowhere", "nobody", bias="wide"))
    assert L.example("largest", "3719") == ("$03719&", "$9&") and L.target_length("largest", 30) == 2
    config = L.Config(task="largest", method="nope", n_layer=1, d_model=16, n_head=2, d_ff=16)
    source, target = L.arrange("largest", L.draw_test("largest", 9, 5, 10, torch.Generator().manual_seed(0)))
    bias = L.make_bias(config, 9)
    assert L.exact_match(L.Transformer(config), source, target, bias).shape == (5,) and bias.decoder[0][0].shape == (1, 2, 2)
    with pytest.raises(ValueError, match="largest has no hard sets"):
        L.draw_hard("largest", 9, 5, 10, torch.Generator())
    with pytest.raises(ValueError, match="'wide'"):
        L.make_bias(dataclasses.replace(config, method="wide"), 9)
    with pytest.raises(ValueError, match="layer at a time"):
        L.abc_bias(torch.rand(2, 4, 8, 8), 20, 20)


def test_the_readme_calibrates_as_a_run_does():
    """Its example code, on random attention with lines in it, against the biases of a default run of addition."""
    config = L.Config(task="addition", method="abc", n_layer=1)
    self_attention, cross_attention = torch.rand(4, 8, 8), torch.rand(4, 8, 17)
    for i in range(8):
        self_attention[:3, i, i] += 4
        cross_attention[:3, i, [max(0, 7 - i), max(8, 15 - i)]] += 6
        cross_attention[2:, i, [3, 8]] += 9                                               # verticals in a number and at +
    code, = re.findall("```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    found = {**vars(L), "self_attention": self_attention, "cross_attention": cross_attention}
    exec(code, found)
    calibration = L.calibrate(config, self_attention[None], cross_attention[None])
    expected = L.make_bias(config, 61, calibration).decoder[0]
    opened = {direction: sum(int(v.isfinite().sum()) for v in values) for direction, values in calibration[0][1].values.items()}
    assert opened[0] and opened[-1]                                                       # or equality would say little
    torch.testing.assert_close((found["self_bias"], found["cross_bias"]), expected)


def test_column_blocks_match_the_source():
    for task, blocks, markers in [("addition", "$000|+000|&", "x...x...x"), ("nx1", "$000|*0&", "x...xxx"),
                                  ("parity", "$000|&", "x...x")]:
        found, marked = L.column_blocks(task, 3)
        assert found == [len(part) for part in blocks.split("|")] and marked.tolist() == [m == "x" for m in markers]


def test_only_correct_examples_are_averaged():
    config = tiny(task="successor", n_layer=1)
    model = L.Transformer(config).eval()
    source = torch.randint(10, (6, 10))
    target = torch.cat([torch.full((6, 1), L.TOKEN["$"]), torch.zeros(6, 9, dtype=torch.long)], 1)
    for t in range(9):                                   # targets: the model's own greedy answers, so all are right
        target[:, t + 1] = model(source, target[:, :t + 1])[:, -1].argmax(-1)
    wrong = target.clone()
    wrong[::2, 3] = (wrong[::2, 3] + 1) % 10
    self_, cross, correct = L.collect_attention(model, source, wrong, batch=4)
    trace = []
    model(source[1::2], target[1::2, :-1], trace=trace)
    assert correct == 3 and cross.shape == (1, 2, 9, 10)
    torch.testing.assert_close(cross[0], trace[0][1].mean(0))
    torch.testing.assert_close(self_[0], trace[0][0].mean(0))
    with pytest.raises(ValueError, match="no example"):
        L.collect_attention(model, source[:1], wrong[:1])


def test_counted_lines_set_the_scale_and_markers_hold_verticals():
    a = torch.rand(8, 8)
    a[7, 0] = a[0, 7] = 9
    d = torch.stack([a.diagonal(o).mean() for o in range(-3, 4)])
    lines = L.find_lines(a[None], (1,), -99, support=0.5)
    torch.testing.assert_close(lines.values[1][0][0, 4:11], d - d.max())
    torch.testing.assert_close(lines.z[1][0][0, 4:11], (d - d.mean()) / d.std(unbiased=False))
    columns = torch.zeros(1, 6, 8)
    columns[..., 3], columns[..., 6] = .5, .4
    lines = L.find_lines(columns, (0,), 0.1, "sum", markers=torch.arange(8) == 6)
    assert lines.values[0][0].isfinite().nonzero().tolist() == [[0, 6]] and lines.mean[0][0][0, 3] == 3


def test_calibration_passes_its_rules_on(monkeypatch):
    seen = []
    monkeypatch.setattr(L, "find_lines", lambda a, *b, **c: seen.append((*b, c["support"], c["kappa_unit"], c.get("floor"))))
    L.calibrate(tiny(kappa_cross=.7, kappa_self=.4, support=.3, floor=.25), torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 9))
    assert seen == [((1,), .4, .3, "reach", None), ((0, -1), .7, .3, "reach", .25)]


@pytest.mark.parametrize("task, rows, digits", [("successor", 8, 20), ("addition", 8, 20), ("parity", 22, 40)])
def test_calibration_at_a_fixed_width_reads_the_rows_that_training_fills(task, rows, digits):
    config = tiny(task=task, width=digits, method="abc")
    t, blocks = digits + 1, L.column_blocks(task, digits)[0]
    self_attention, cross = torch.zeros(1, 1, t, t), torch.zeros(1, 1, t, sum(blocks))
    for i in range(t):                                      # true lines above, others below
        self_attention[..., i, i if i < rows else i - 4] = .9
        cross[..., i, blocks[0] - 1 - i if i < rows else digits - 1 - i] = .9
    [(own, other)] = L.calibrate(config, self_attention, cross)
    found = [(r["attention"], r["line"], r["block"], r["offset"]) for r in L.line_table([(own, other)])]
    assert found == [("self", "diagonal", 1, 0), ("cross", "anti-diagonal", 1, 0)]
    bias = L.make_bias(config, 30, [(own, other)]).decoder[0][1][0]
    assert [row.isfinite().nonzero().flatten().tolist() for row in bias] == [[30 - i] for i in range(31)]


@pytest.mark.parametrize("empty, penalty", [("first", 0.0), ("all", 0.0), ("first", 5.0)])
def test_lines_behind_the_query_leave_no_row_without_a_key(empty, penalty):
    """A line two places after the query, and a vertical at key 3: rows that reach neither see key 0, or all before them."""
    config = tiny(task="successor", method="abc", n_head=2, empty=empty, penalty=penalty)
    t = L.target_length("successor", config.width)
    attention = torch.zeros(2, t, t)
    attention[0, :-2, 2:], attention[1, :, 3] = torch.eye(t - 2), 1.0
    lines = L.find_lines(attention, (1, 0), 0.9, kappa_unit="reach")
    bias = L.make_bias(config, config.width, [(lines, lines)] * config.n_layer).decoder[0][0]
    for head, reached in ((0, t), (1, 3)):
        for i, row in enumerate(bias[head]):
            everything = range(i + 1) if empty == "all" else [0]
            expected = everything if i < reached else [3]
            assert (row[:i + 1] == 0).nonzero().flatten().tolist() == list(expected)
            assert row[i + 1:].isneginf().all() and set(row[:i + 1].tolist()) <= {0.0, -penalty or -INF}


def test_scores_after_the_query_are_no_line():
    config = tiny(task="successor", method="abc", calibrate_on="scores")
    t, s = L.target_length("successor", config.width), sum(L.column_blocks("successor", config.width)[0])
    scores = torch.zeros(1, config.n_head, t, t).double()
    scores[..., range(t), range(t)], scores[..., range(t - 1), range(1, t)] = 2.0, 9.0
    [(own, _)] = L.calibrate(config, scores, torch.rand(1, config.n_head, t, s).double())
    assert {(r["line"], r["offset"]) for r in L.line_table([(own, own)])} == {("diagonal", 0)}


def test_calibration_has_the_lines_value_blocks_and_scores_of_its_head():
    config = tiny(task="addition", method="abc", calibrate_on="scores", line="sum", blocks=False, n_layer=1, directions_self=(0,), kappa_self=-99.0, support=0.0)
    own, cross = torch.rand(1, 2, 8, 8), torch.rand(1, 2, 8, 17)
    own[0, 1] += 5
    [(a, b)] = L.calibrate(config, own, cross)
    for h in range(2):                                      # what is after the query counts as the least of its head
        low = torch.where(torch.ones(8, 8).triu(1).bool(), own[0, h].min(), own[0, h])
        torch.testing.assert_close(a.mean[0][0][h], low.sum(0))
    torch.testing.assert_close(b.mean[0][0], cross[0].sum(1))
    assert [len(v) for v in b.values.values()] == [1, 1]
    assert L.make_bias(config, 11, [(a, b)]).decoder[0][1].shape == (2, 12, 25)


def test_scores_have_no_floor():
    config = tiny(task="successor", method="abc", calibrate_on="scores", n_layer=1)
    scores = torch.full((1, 2, 8, 9), -9.0)
    scores[..., range(8), range(7, -1, -1)] = -3.0
    [(_, cross)] = L.calibrate(config, torch.rand(1, 2, 8, 8), scores)
    assert cross.values[-1][0].isfinite().any()


# --- 6. sparse decoding ---------------------------------------------------------------

def random_lines(config, seed, share=0.7):
    """A calibration in which lines of all directions stay open, so that some cross; about a third of the heads lose all."""
    torch.manual_seed(seed)
    blocks, markers = L.column_blocks(config.task, config.width)
    t = L.target_length(config.task, config.width)

    def lines(n, directions, **options):
        found = L.find_lines(torch.rand(config.n_head, t, n), directions, share, **options)
        for parts in found.values.values():
            for part in parts:
                part[torch.rand(len(part)) < 0.3] = -INF
        return found
    return [(lines(t, (1, 0)), lines(sum(blocks), (1, 0, -1), blocks=blocks, markers=markers)) for _ in range(config.n_layer)]


@pytest.mark.parametrize("task", ["successor", "addition", "nx1", "parity", "parity-label"])
@pytest.mark.parametrize("seed", range(3))
def test_sparse_decoding_equals_the_dense_one(task, seed):
    config = tiny(task=task, method="abc", norm=("pre", "post")[seed % 2], layer=("own", "last")[seed % 2])
    calibration = random_lines(config, seed)
    model, width = L.Transformer(config), config.width + 9
    bias, keys = L.make_bias(config, width, calibration), L.make_keys(config, width, calibration)
    _, source, target = next(L.batches(config, torch.arange(100), 5, [width], L.seeded(0)))
    for dense, sparse in zip(bias.decoder, keys):
        for matrix, part in zip(dense, sparse):
            laid = torch.full((config.n_head, *matrix.shape[1:]), -INF)
            for h, i, k in (~part.values.isneginf()).nonzero().tolist():
                assert laid[h, i, part.columns[i, k]] == -INF                            # no key twice
                laid[h, i, part.columns[i, k]] = part.values[h, i, k]
            torch.testing.assert_close(laid, matrix)
    with torch.no_grad():
        torch.testing.assert_close(L.sparse_logits(model, source, target[:, :-1], keys), model(source, target[:, :-1], bias))
    limit = target.shape[1] - 1
    answers = L.generate(model, source, limit, bias)
    assert torch.equal(L.generate_sparse(model, source, limit, keys), answers)
    target[:3, :answers.shape[1]] = answers[:3]
    right = L.exact_match(model, source, target, None, keys)
    assert torch.equal(right, L.exact_match(model, source, target, bias)) and (right[:3].all() or answers.shape[1] <= limit)


def test_sparse_decoding_is_left_where_something_sees_everything():
    assert L.make_keys(tiny(method="abc"), 20, random_lines(tiny(method="abc"), 0)) is not None
    for options, share in ((dict(empty="all"), 9), (dict(penalty=5.0), 0.7), (dict(n_encoder=1), 0.7)):
        config = tiny(method="abc", **options)
        assert L.make_keys(config, 20, random_lines(config, 0, share)) is None
    assert L.make_keys(tiny(method="vanilla"), 20, None) is None


def test_long_questions_are_answered_over_the_open_keys():
    """101 digits, by a run's own lines: evaluation over the open keys against the same over the dense bias."""
    config = tiny(task="successor", method="abc", lengths=(101,), hard=(101,), long_samples=20, n_layer=1)
    own, cross = torch.eye(8).expand(1, 2, 8, 8), F.pad(torch.eye(8).flip(1), (0, 1)).expand(1, 2, 8, 9)
    calibration, model = L.calibrate(config, own, cross), L.Transformer(config)
    model.head = nn.Linear(16, 15)
    found = []
    for keys in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not keys:
                patch.setattr(L, "make_keys", lambda *a: None)
            found.append(L.evaluate(model, config, calibration))
    assert found[0] == found[1]


# --- 8. training and evaluation -------------------------------------------------------

@pytest.mark.parametrize("correct, n, low, high", [(0, 100, 0, .036993), (50, 100, .403832, .596168),
                                                   (100, 100, .963007, 1), (10_000, 10_000, .999616, 1)])
def test_wilson_interval(correct, n, low, high):
    assert L.wilson(correct, n) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize("method", L.METHODS)
def test_bias_fits_the_tokens_of_every_task(method):
    for task in L.TASKS:
        config = tiny(task=task, method=method)
        _, source, target = next(L.batches(config, torch.arange(100), 2, [config.width + 3], L.seeded(0)))
        T, S = target.shape[1] - 1, source.shape[1]
        calibration = None
        if method == "abc":
            n = sum(L.column_blocks(task, config.width)[0])
            t = T if task == "parity-label" else config.width + 1
            calibration = L.calibrate(config, torch.rand(2, 2, t, t), torch.rand(2, 2, t, n))
        for self_bias, cross in L.make_bias(config, config.width + 3, calibration).decoder:
            assert self_bias.shape[1:] == (T, T) and (cross is None or cross.shape[1:] == (T, S))
            assert self_bias.broadcast_to(2, T, T)[:, torch.ones(T, T).triu(1).bool()].isneginf().all()


@pytest.mark.parametrize("goal, cooldown, steps, taken", [(0.0, 0.0, 40, 5), (0.0, 1.0, 40, 10), (0.0, 3.0, 40, 20),
                                                          (1.0, 1.0, 12, 12), (0.0, 9.0, 20, 20)])
def test_training_stops_after_the_goal_and_the_cool_down(goal, cooldown, steps, taken):
    config = tiny(task="successor", every=5, goal=goal, batch=4)
    result = L.train(L.Transformer(config), config, L.Plan(steps, [8], cooldown))
    assert (result["steps"], result["examples"], result["tokens"]) == (taken, 4 * taken, 4 * taken * (10 + 9))


def test_training_without_success_is_given_up_before_the_cool_down():
    config = tiny(task="successor", every=5, goal=1.0, batch=4)
    for give_up, taken in ((False, 40), (True, 20)):
        result = L.train(L.Transformer(config), config, L.Plan(40, [8], 1.0, give_up))
        assert result["steps"] == taken and not result["exact"]
    config = tiny(task="successor", every=5, goal=0.0, batch=4)
    assert L.train(L.Transformer(config), config, L.Plan(40, [8], 1.0, True))["exact"]


@pytest.mark.parametrize("accuracies, taken", [([0] * 40, 100), ([.2] + [.1] * 39, 30), ([0, 0, .2] + [.1] * 39, 40),
                                               ([.1, .2, .3, .4, .5, .6, .7, 1.0] + [.9] * 40, 80),
                                               ([.1, .2, .3, .4, .4, .4, .4, .4, .5, .4, .4, .4, .4, .4], 70)])
def test_training_that_is_stuck_is_given_up(accuracies, taken, monkeypatch):
    """Checks every 5 steps that return these accuracies: given up after five that bring no better, success stays."""
    config = tiny(task="successor", every=5, goal=1.0, batch=4)
    shares = iter(accuracies)
    monkeypatch.setattr(L, "held_out_checks", lambda *a, **k: [(8, torch.ones(1), torch.ones(1))])
    monkeypatch.setattr(L, "exact_match", lambda model, s, t, bias: torch.tensor([next(shares)]))
    assert L.train(L.Transformer(config), config, L.Plan(200, [8], 1.0, True))["steps"] == taken


def test_checks_of_training_hold_numbers_of_the_training_range_only():
    for task in L.TASKS:
        config = tiny(task=task)
        _, held_out = L.split_numbers(0)
        checks = L.held_out_checks(config, held_out, [config.width, config.width + 5], hard=True)
        assert len(checks) == 3 and checks[-1][0] == config.width
        for _, source, _ in checks:
            for row in source:
                text = L.decode(row).strip("$&").split(L.TASKS[task].operator or None)[0]
                assert int(text, config.base) <= 2 ** 20
        assert len(L.held_out_checks(config, held_out, [config.width], hard=False)) == 1


def test_evaluation_counts_what_a_perfect_and_a_wrong_model_get():
    class Oracle(nn.Module):
        def __init__(self, config, mistakes):
            super().__init__()
            self.config, self.mistakes, self.p = config, mistakes, nn.Parameter(torch.zeros(1))

        def forward(self, source, target, bias=None):
            logits = torch.zeros(*target.shape, len(L.VOCAB))
            for b, row in enumerate(source):
                text = L.decode(row)
                right = str(int(text[1:-1]) + 1).rjust(len(text) - 2, "0")[::-1] + "&"
                right = "&" + right[1:] if self.mistakes and text[-2] == "7" else right
                logits[b, torch.arange(len(right)), [L.TOKEN[c] for c in right]] = 1
            return logits
    config = tiny(task="successor", method="nope")
    asked = dict(task="successor", method="nope", lengths=(2, 30, 101), long_samples=7)
    found = L.evaluate(Oracle(config, False), tiny(**asked, samples=64, hard=(30,)))
    assert [found["accuracy"][length]["correct"] for length in ("30", "101")] == [64, 7]
    assert [a["correct"] for a in found["hard"]["30"].values()] == [1, 6, 6, 2]
    found = L.evaluate(Oracle(config, True), tiny(**asked, samples=1000, hard=(2,)))
    result = found["accuracy"]["2"]
    assert (result["correct"], result["n"]) == (81, 90)              # of 10 .. 99 nine end in 7
    assert found["chains"]["2"] == {"0": [72, 81], "1": [8, 8], "2": [1, 1]}


def test_rates_and_the_average_kept(monkeypatch):
    rates, mean, step = [], [], L.train_step
    def spy(model, optimizer, lr, *a):
        loss, w = step(model, optimizer, lr, *a), model.head.bias.detach().clone()
        rates.append(lr), mean.append((mean[-1] + w) / 2 if mean else w)
        return loss
    monkeypatch.setattr(L, "train_step", spy)
    config = tiny(every=4, goal=0.5, batch=4, warmup=2, lr=0.1, average=0.5)
    model, shares = L.Transformer(config), {"accuracy": 1.0}
    monkeypatch.setattr(L, "check_shares", lambda *a: shares)
    L.train(model, config, L.Plan(40, [8], 1.0))
    assert rates == pytest.approx([.05, .1, .1, .1, .08, .06, .04, .02])
    torch.testing.assert_close(model.head.bias.detach(), mean[-1])
    shares["hard"] = 0.0
    assert L.train(model, config, L.Plan(12, [8], 1.0))["steps"] == 12


@pytest.mark.parametrize("exact, expected", [(2, [(0.8, True), (0.4, True)]), (9, [(0.8, True), (0.4, True), (0.2, True), (0.15, False)])])
def test_tries_halve_kappa_until_exact_or_no_line_more_opens(exact, expected, monkeypatch):
    trained = []
    monkeypatch.setattr(L, "calibrate", lambda config, *a: [max(config.kappa_cross, 0.15)])       # 0.1 and 0.05 open no more
    monkeypatch.setattr(L, "line_table", list)
    monkeypatch.setattr(L, "train", lambda model, config, plan, calibration, *a:
                        trained.append((*calibration, plan.give_up)) or {"exact": len(trained) == exact})
    L.retrain(tiny(method="abc", tries=5, kappa_cross=0.8), torch.device("cpu"), ())
    assert trained == expected


def test_a_second_teacher_that_fails_leaves_the_first_retraining(monkeypatch):
    config, shares, kept = tiny(method="abc", teachers=2), iter([1.0, 0.5]), object()
    monkeypatch.setattr(L, "train", lambda *a: {"steps": 7})
    monkeypatch.setattr(L, "exact_match", lambda *a: torch.arange(100) < 100 * next(shares))
    monkeypatch.setattr(L, "collect_attention", lambda *a: (torch.zeros(1), torch.zeros(1), 1))
    monkeypatch.setattr(L, "retrain", lambda *a: (kept, "lines", [{"exact": False}]))
    model, calibration, teacher, results, accuracy, _ = L.learn(config, torch.device("cpu"))
    assert (model, calibration, accuracy) == (kept, "lines", 1.0) and [len(results[name]) for name in results] == [2, 1]
    torch.manual_seed(config.seed)
    first = L.Transformer(dataclasses.replace(config, method="vanilla"))
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), first.parameters()))
    shares = iter([0.5])
    with pytest.raises(ValueError, match="answers 50.0% of held-out"):
        L.learn(config, torch.device("cpu"))


def test_evaluation_keeps_the_training_width_and_uses_keys_when_long(monkeypatch):
    config, seen = tiny(task="successor", method="abc", width=20, lengths=(6, 30, 101), hard=(6,)), set()
    monkeypatch.setattr(L, "exact_match", lambda model, source, target, bias, keys:
                        seen.add((source.shape[1], bias is None, keys is None)) or torch.ones(len(source)).bool())
    L.evaluate(nn.Linear(1, 1), config, random_lines(config, 0))
    assert seen == {(22, False, True), (33, False, True), (104, True, False)}


@pytest.mark.parametrize("method", ["window", "vanilla"])
@pytest.mark.parametrize("base", [3, 10])
def test_every_question_is_put_as_in_training(method, base, monkeypatch):
    """Tests, checks of training and --ask, told from Python integers: aligned for windows, in the base asked for."""
    config, seen = tiny(method=method, base=base, lengths=(14,), hard=(14,), samples=100), []
    monkeypatch.setattr(L, "exact_match", lambda model, source, target, *a: seen.append((source, target)) or torch.ones(len(source)).bool())
    L.evaluate(nn.Linear(1, 1), config)
    assert any(str(base - 1) * 14 in text or f"{base - 1}0" * 13 in text for text in (L.decode(row) for source, _ in seen[1:] for row in source))     # 99...9 + 1
    seen += [(s, t) for _, s, t in L.held_out_checks(config, torch.arange(500), [config.width], True)]
    seen.append([L.encode(text)[None] for text in L.pose(config, "12+21")[1:]])
    assert len(seen) == 1 + 7 + 2 + 1
    for source, target in [pair for s, t in seen for pair in zip(s, t)]:
        text = L.decode(source)[1:-1]
        a, b = (text[1::2], text[2::2]) if text.startswith("+") else text.split("+")
        assert text.startswith("+") == (method == "window")
        assert L.decode(target) == "$" + in_base(int(a, base) + int(b, base), base).rjust(len(a), "0")[::-1] + "&"


def test_a_short_question_is_asked_at_the_training_width():
    assert L.pose(tiny(task="successor", width=12), "5")[:2] == (12, "$000000000005&")


def test_questions_of_a_test_depend_on_the_seed(monkeypatch):
    def asked(**options):
        seen = []
        monkeypatch.setattr(L, "exact_match", lambda model, source, *a: seen.append(source) or torch.ones(len(source)).bool())
        L.evaluate(nn.Linear(1, 1), tiny(lengths=(30,), hard=(30,), samples=100, **options))
        return seen
    first, again, other = asked(seed=1), asked(seed=1, method="alibi"), asked(seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert [torch.equal(a, b) for a, b in zip(first, other)] == [False, False, True, True, False, False, False, False]


def test_a_tests_size_changes_above_100_digits(monkeypatch):
    monkeypatch.setattr(L, "exact_match", lambda model, source, *a: torch.ones(len(source)).bool())
    found = L.evaluate(nn.Linear(1, 1), tiny(lengths=(100, 101), hard=(6,), samples=30, long_samples=7))["accuracy"]
    assert (found["100"]["n"], found["101"]["n"]) == (30, 7)


def test_what_a_step_of_training_is(monkeypatch):
    """`train` against a loop written out: batches, loss, clipping, Adam with the betas of Vaswani et al., rate, average."""
    config = tiny(method="window", spread=2, lr=0.02, warmup=3, average=0.5, every=4, goal=1.0, batch=8, seed=5, n_layer=1)
    torch.manual_seed(1)
    model = L.Transformer(config)
    ours, checked = [], []
    mean = [x.detach().clone() for x in model.parameters()]
    torch.manual_seed(1)
    oracle = L.Transformer(config)
    optimizer = torch.optim.Adam(oracle.parameters(), betas=(0.9, 0.98))
    pool, _ = L.split_numbers(5)
    stream = L.batches(config, pool, 8, [8, 9, 10], L.seeded(7))
    for step in range(1, 9):
        width, source, target = next(stream)
        logits = oracle(source, target[:, :-1], L.make_bias(config, width))
        loss = -logits.float().log_softmax(-1).gather(2, target[:, 1:, None]).mean()
        optimizer.zero_grad(), loss.backward()
        norm = sum(float(x.grad.square().sum()) for x in oracle.parameters()) ** 0.5
        for x in oracle.parameters():
            x.grad /= max(1.0, norm)
        ours.append(norm)
        optimizer.param_groups[0]["lr"] = 0.02 * min(1, step / 3)
        optimizer.step()
        mean = [x.detach().clone() if step == 1 else (m + x.detach()) / 2 for m, x in zip(mean, oracle.parameters())]
    monkeypatch.setattr(L, "check_shares", lambda model, *a: checked.append([x.clone() for x in model.parameters()]) or {"accuracy": 0.0})
    L.train(model, config, L.Plan(8, [8, 9, 10]))
    assert max(ours) > 1.2
    for x, m, c in zip(model.parameters(), mean, checked[-1]):
        torch.testing.assert_close(x.detach(), m, atol=1e-5, rtol=0), torch.testing.assert_close(c.detach(), m, atol=1e-5, rtol=0)


def test_a_step_down_has_its_rate_and_is_clipped():
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([w], 99.0)
    L.descend(optimizer, 0.5, 2 * w.square().sum())                                     # gradient (12, 16), clipped to (0.6, 0.8)
    assert w.tolist() == pytest.approx([2.7, 3.6])
    L.descend(optimizer, 0.25, 0.1 * w.sum())                                           # short enough
    assert w.tolist() == pytest.approx([2.675, 3.575])


def test_models_learn_in_training_mode():
    seen = []
    models = [L.Transformer(tiny(every=1, goal=1.0, batch=4)), L.Encoder(small_encoder(steps=3, every=1, n_train=9))]
    for model in models:
        model.register_forward_pre_hook(lambda model, given: seen.append((model.training, torch.is_grad_enabled())))
    L.train(models[0], models[0].config, L.Plan(3, [8]))
    L.train_encoder(models[1], models[1].config, "train", 2)
    assert set(seen) == {(True, True), (False, False)} and seen.count((True, True)) == 6


def test_shares_of_the_checks(monkeypatch):
    x, right = torch.zeros(1), [[True, False], [True, True], [False]]
    for hard, expected in ((True, {"hard": 0.0, "accuracy": 0.75}), (False, {"accuracy": 0.6})):
        answers = iter(map(torch.tensor, right))
        monkeypatch.setattr(L, "exact_match", lambda *a: next(answers))
        assert L.check_shares(nn.Linear(1, 1), [(7, x, x), (8, x, x), (7, x, x)], {7: None, 8: None}, hard) == pytest.approx(expected)


@pytest.mark.parametrize("method, cooldown, expected", [("window", 1.0, True), ("window", 0.0, False), ("vanilla", 1.0, False), ("alibi", 1.0, False)])
def test_hard_numbers_are_asked_of_methods_with_lines(method, cooldown, expected, monkeypatch):
    seen, checks = [], L.held_out_checks
    monkeypatch.setattr(L, "held_out_checks", lambda config, numbers, widths, hard: seen.append(hard) or checks(config, numbers, widths, hard))
    config = tiny(method=method, every=1, goal=0.0, batch=4, spread=3)
    L.train(L.Transformer(config), config, L.Plan(2, [8], cooldown))
    assert seen == [expected]
    assert L.widths_of(config) == ([7, 8, 9, 10] if method == "window" else [7])


def test_checks_are_of_the_least_the_middle_and_the_greatest_width():
    config, widths = tiny(method="window"), list(range(8, 17))
    found = [(width, len(source)) for width, source, _ in L.held_out_checks(config, torch.arange(500), widths, True)]
    assert found[:3] == [(8, 256), (12, 256), (16, 256)]
    _, source, _ = L.held_out_checks(config, torch.arange(500), widths, True)[-1]
    assert max(len(L.decode(row)[2:-1:2].lstrip("0")) for row in source) == 6
    stream = L.batches(config, torch.arange(500), 2, widths, L.seeded(0))
    drawn = torch.tensor([next(stream)[0] for _ in range(900)]).bincount()[8:]
    assert len(drawn) == 9 and (drawn - 100).abs().max() < 5 * 10


def test_the_training_stream_depends_on_the_seed(monkeypatch):
    first = []
    monkeypatch.setattr(L, "train_step", lambda model, optimizer, lr, source, *a: first.append(source) or torch.tensor(0.0))
    for seed in (1, 2):
        monkeypatch.setattr(L, "split_numbers", lambda seed: (torch.arange(9999), torch.arange(99)))
        config = tiny(seed=seed, goal=0.0, every=1, batch=4)
        L.train(L.Transformer(config), config, L.Plan(1, [8]))
    assert not torch.equal(*first)


def test_no_held_out_number_is_learned_from_and_no_other_asked(monkeypatch):
    """All of `learn`, with every number that training, calibration and checks see: the two sets must stay apart."""
    pool, held = torch.arange(10, 20), torch.arange(50, 60)
    seen = {"train": [], "check": [], "calibrate": []}
    keep = lambda name, source: seen[name].append(source) or torch.ones(len(source)).bool()
    t = 8
    monkeypatch.setattr(L, "split_numbers", lambda seed: (pool, held) if seed == 0 else (held, pool))
    monkeypatch.setattr(L, "train_step", lambda model, optimizer, lr, source, *a: keep("train", source) is None or torch.tensor(0.0))
    monkeypatch.setattr(L, "exact_match", lambda model, source, *a: keep("check", source))
    monkeypatch.setattr(L, "collect_attention", lambda model, source, *a: keep("calibrate", source) is None or
                        (torch.eye(t).expand(2, 2, t, t), F.pad(torch.eye(t).flip(1), (0, 1)).expand(2, 2, t, t + 1), 1))
    config = tiny(task="successor", method="abc", every=5, batch=32, steps=10, retrain_steps=10, calibration_samples=50)
    L.learn(config, CPU)
    numbers = {name: {int(L.decode(row).strip("$&")) for source in sources for row in source if len(source) != 103}     # 103: the hard ones
               for name, sources in seen.items()}
    assert numbers == {"train": set(pool.tolist()), "check": set(held.tolist()), "calibrate": set(pool.tolist())}
    assert {len(source) for source in seen["calibrate"]} == {50} and max(map(len, seen["check"])) == 2000


def learned(monkeypatch, exact=1.0, **options):
    """What `learn` trains: (method, plan, first weights) of each training, with the trainings themselves left out."""
    trained, share, modes = [], iter([exact] * 9), []
    monkeypatch.setattr(L, "train", lambda model, config, plan, *a: trained.append((config.method, plan, model.head.weight.detach().clone())) or
                        {"exact": not trained[-1][0] == "abc", "steps": 7})
    monkeypatch.setattr(L, "exact_match", lambda *a: torch.arange(1000) < 1000 * next(share))
    t = 8
    monkeypatch.setattr(L, "collect_attention", lambda model, source, target, bias, pre_softmax=False, *a: modes.append(pre_softmax) or
                        (torch.eye(t).expand(2, 2, t, t), F.pad(torch.eye(t).flip(1), (0, 1)).expand(2, 2, t, t + 1), 1))
    L.learn(tiny(task="successor", steps=50, retrain_steps=30, cooldown=2.0, spread=1, tries=1, teachers=2, **options), CPU)
    return trained, modes


def test_what_learn_trains(monkeypatch):
    trained, modes = learned(monkeypatch, method="abc")
    assert [method for method, _, _ in trained] == ["vanilla", "abc"] * 2 and modes == [False, False]
    assert [plan[:3] for _, plan, _ in trained] == [(50, [7], 0.0), (30, [7, 8], 2.0)] * 2
    first, retrained, second, _ = [weights for _, _, weights in trained]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations((first, retrained, second), 2))
    (_, plan, _), = learned(monkeypatch, method="window")[0]
    assert plan[:3] == (50, [7, 8], 2.0)
    assert learned(monkeypatch, method="abc", calibrate_on="scores")[1] == [True, True]
    with pytest.raises(ValueError, match="98.9%"):
        learned(monkeypatch, 0.989, method="abc")
    learned(monkeypatch, 0.99, method="abc")


def test_a_record_sums_what_all_teachers_took(monkeypatch):
    done = dict(steps=3, seconds=2.0, examples=10, tokens=100)
    monkeypatch.setattr(L, "learn", lambda *a: (L.Transformer(tiny()), None, None, {"interpolate": [done, done], "retrain": [done]}, 1.0, 0.0))
    monkeypatch.setattr(L, "evaluate", lambda *a: {"accuracy": {}})
    record = L.run(tiny(), CPU).record
    assert record["examples"] == {"interpolate": 20, "retrain": 10} and record["tokens"]["interpolate"] == 200
    assert record["seconds"]["interpolate"] == 4 and (record["teachers"], record["tries"]) == (2, 1)


# --- 9. consecutive pairs -------------------------------------------------------------

@pytest.mark.parametrize("plant, share", [(0.0, 0.031), (0.5, 0.42)])
def test_labels_say_whether_a_neighbour_is_there(plant, share):
    ends, inner = 2 / 16 * (1 - (15 / 16) ** 4), 14 / 16 * (1 - (14 / 16) ** 4)          # uniform, V = 16: 39%
    _, small = L.draw_pairs(20_000, 5, 16, torch.Generator().manual_seed(0))
    assert float(small.double().mean()) == pytest.approx(ends + inner, abs=0.01)
    tokens, labels = L.draw_pairs(4000, 5, 256, torch.Generator().manual_seed(0), plant)
    padded, marked = L.draw_pairs(4000, 5, 256, torch.Generator().manual_seed(0), plant, dummy=True)
    assert torch.equal(padded[:, 1:], tokens) and (padded[:, 0] == 256).all() and not marked[:, 0].any()
    assert labels.tolist() == [[a - 1 in row or a + 1 in row for a in row] for row in tokens.tolist()]
    assert tokens.min() >= 0 and tokens.max() < 256 and float(labels.double().mean()) == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("dummy", [False, True])
def test_pairs_model_is_one_head_of_attention(dummy):
    model = L.PairsModel(L.PairsConfig(d_vocab=9, d_head=3, d_model=6, dummy=dummy))
    tokens = torch.randint(9 + dummy, (4, 5))
    x = model.embedding(tokens)
    a = model.attention
    heads = F.scaled_dot_product_attention(*(layer(x)[:, None] for layer in (a.q, a.k, a.v)))[:, 0]
    torch.testing.assert_close(model(tokens), (heads @ a.out.weight.T + a.out.bias)[..., 0])
    queries, keys = L.query_key(model)
    torch.testing.assert_close(queries @ keys.T, a.q(model.embedding.weight[:9]) @ a.k(model.embedding.weight[:9]).T / 3 ** 0.5)


def test_pair_measures_on_matrices_worked_out_by_hand():
    scores = torch.tensor([[0., 5, 1, 3], [5, 0, 5, 1], [1, 5, 0, 5], [3, 1, 5, 0]])
    found = L.score_patterns(scores)
    assert found["neighbour_gap"] == pytest.approx(5 - (0 * 4 + 1 * 4 + 3 * 2) / 10)
    assert found["checkerboard"] == pytest.approx(3 - (0 * 4 + 1 * 4) / 8)             # the stripes apart


def test_circle_order():
    value = torch.arange(20).double()
    circle = lambda angle: torch.stack([angle.cos(), angle.sin()], 1)
    assert L.circle_order(circle(0.2 * value + 2)) == pytest.approx([1, 1])              # crosses the cut of atan2
    assert L.circle_order(circle(-0.2 * value)) == pytest.approx([1, 1])
    assert L.circle_order(circle(0.2 * value[:5]))[1] is None
    shuffled = value[torch.randperm(20)]
    assert max(L.circle_order(circle(0.2 * shuffled))) < 0.9


def cyclic_construction(d_vocab):
    """Hypothesis 2 by hand: unit queries and keys (V, 2) in which every query's nearest keys are its neighbours.

    q_0 k_1 q_2 k_3 ... lie in order on one quarter of the circle, k_0 q_1 k_2 q_3 ... on the opposite one.
    """
    index = torch.arange(d_vocab, dtype=torch.float64)
    angle = index * math.pi / (2 * d_vocab)
    point = lambda a: torch.stack([a.cos(), a.sin()], 1)
    return point(angle + math.pi * (index % 2)), point(angle + math.pi * ((index + 1) % 2))


@pytest.mark.parametrize("d_vocab", [3, 5, 16, 256, 1000])
def test_hypothesis_2_attends_to_exactly_the_neighbours(d_vocab):
    queries, keys = cyclic_construction(d_vocab)
    assert queries.norm(dim=1).allclose(torch.ones(d_vocab)) and keys.norm(dim=1).allclose(torch.ones(d_vocab))
    scores = queries @ keys.T
    for i, row in enumerate(scores):
        neighbours = {j for j in (i - 1, i + 1) if 0 <= j < d_vocab}
        assert set(row.topk(len(neighbours)).indices.tolist()) == neighbours
        near, values = [j in neighbours for j in range(d_vocab)], row.tolist()
        assert min(itertools.compress(values, near)) > max(x for x, is_near in zip(values, near) if not is_near)


def test_two_dimensions_learn_a_small_vocabulary_completely():
    """Observation 4, on every sequence there is."""
    torch.set_default_dtype(torch.float32)
    config = L.PairsConfig(d_vocab=4, d_head=2, d_model=32, dummy=True, lr=3e-3, batch=100, steps=1000)
    model, _ = L.train_pairs(config, 0, torch.device("cpu"))
    rows = torch.tensor([[4, *row] for row in itertools.product(range(4), repeat=5)])
    wanted = [[a - 1 in row[1:] or a + 1 in row[1:] for a in row[1:]] for row in rows.tolist()]
    assert ((model(rows) > 0)[:, 1:] == torch.tensor(wanted)).all()


def test_pairs_of_long_sequences_are_measured_in_parts():
    torch.set_default_dtype(torch.float32)
    model = L.PairsModel(L.PairsConfig(d_vocab=2000, d_model=8, d_head=4, length=1000))
    parts, forward = [], model.forward
    model.forward = lambda tokens: parts.append(len(tokens)) or forward(tokens)
    found = L.pairs_accuracy(model, 0.0, 40)
    tokens, labels = L.draw_pairs(40, 1000, 2000, L.seeded(10 ** 6))
    with torch.no_grad():
        right = (forward(tokens) > 0) == labels
    assert sum(parts) == found["n"] == 40 and max(parts) < 20 and 0.01 < found["soft"] < 0.99
    assert found["soft"] == pytest.approx(float(right.double().mean()))


@pytest.mark.parametrize("task, config", [("pairs", L.PairsConfig(steps=1, batch=8)),
                                          ("encoder", L.make_encoder_config(steps=1, batch=8, samples=10, n_layer=1))])
def test_seconds_before_an_interruption_count(task, config):
    run, name, result = {"pairs": (L.run_pairs, "seed 0", {"seconds": 500.0}),
                         "encoder": (L.run_encoder, "train", {"curve": [[1, [0.0]]], "seconds": 500.0})}[task]
    model = L.PairsModel(config) if task == "pairs" else L.Encoder(config)
    finished = {name: dict(model=model.state_dict(), result=result)}
    record, _ = run(config, torch.device("cpu"), keeper=L.Keeper(state=dict(finished=finished)))
    assert record["seconds"]["total"] >= 500


def test_consecutive_run_leaves_a_record(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    assert L.main(shlex.split("--task consecutive --d-vocab 5 --d-head 2 --d-model 16 --dummy --seeds 2 --steps 200 --lr 0.01 "
                              "--json --quiet --device cpu") + ["--out", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"soft", "hard"} <= set(record["accuracy"]) and [run["seed"] for run in record["runs"]] == [0, 1]
    assert record["accuracy"]["hard"] == max(run["accuracy"]["hard"] for run in record["runs"])
    assert {"checkerboard", "neighbour_gap", "circle_order"} <= set(record)


def test_planted_pairs_are_as_many_as_asked_and_of_both_kinds():
    tokens, _ = L.draw_pairs(20_000, 5, 10_000, L.seeded(0), 0.3)
    step = tokens[:, [1, 3]] - tokens[:, [0, 2]]
    near = step.abs() == 1
    n, sd = 20_000, math.sqrt(20_000 * 0.3 * 0.7)
    assert (near.sum(0) - 0.3 * n).abs().max() < 5 * sd and abs(int(near.all(1).sum()) - 0.09 * n) < 5 * math.sqrt(n * 0.09 * 0.91)
    assert abs(int((step == 1).sum()) - int((step == -1).sum())) < 5 * math.sqrt(2 * n * 0.3)
    assert near[(step.abs() != 1).any(1)].any()


def test_every_integer_starts_by_voting_yes():
    for seed in range(5):
        torch.manual_seed(seed)
        assert (L.PairsModel(L.PairsConfig(d_vocab=64))(torch.randint(64, (50, 5))) > 2).all()


def test_pairs_are_trained_as_asked(monkeypatch):
    drawn, losses, plateau = [], [], []
    draw, bce = L.draw_pairs, F.binary_cross_entropy_with_logits
    monkeypatch.setattr(L, "draw_pairs", lambda *a: drawn.append((a, draw(*a))) or drawn[-1][1])
    monkeypatch.setattr(F, "binary_cross_entropy_with_logits", lambda *a: losses.append(bce(*a)) or losses[-1])

    class Plateau:
        def __init__(self, optimizer, mode="min", factor=0.1, patience=10):
            plateau.append((mode, factor, patience))
        def step(self, value):
            plateau.append(value)
        def state_dict(self):
            return {}
    monkeypatch.setattr(torch.optim.lr_scheduler, "ReduceLROnPlateau", Plateau)
    config = L.PairsConfig(steps=250, batch=4, d_model=8, d_head=4, plant=0.5)
    models = [L.train_pairs(config, seed, CPU)[0] for seed in (1, 2)]
    assert {(a[0], a[1], a[2], a[4]) for a, _ in drawn} == {(4, 5, 16, 0.5)} and not torch.equal(drawn[0][1][0], drawn[250][1][0])
    values = [x.item() for x in losses]
    assert plateau[0] == ("min", 0.1, 100) and plateau[1:3] == pytest.approx([sum(values[:100]) / 100, sum(values[100:200]) / 100])
    starts = [(torch.manual_seed(seed), L.PairsModel(config))[1].embedding.weight for seed in (1, 2)]
    assert not torch.equal(*starts) and not torch.equal(models[0].embedding.weight, models[1].embedding.weight)
    assert all((model.embedding.weight - start).abs().max() < 250 * 1e-4 * 2 for model, start in zip(models, starts))


def test_the_dummy_is_no_token_that_is_right():
    config = L.PairsConfig(d_vocab=256, d_model=8, d_head=4, dummy=True)
    model = L.PairsModel(config)
    model.forward = lambda tokens: torch.full(tokens.shape, 0.25)                         # always yes
    found = L.pairs_accuracy(model, 0.5, 2000)
    tokens, _ = L.draw_pairs(2000, 5, 256, L.seeded(10 ** 6), 0.5, True)
    yes = [[a - 1 in row or a + 1 in row for a in row] for row in tokens[:, 1:].tolist()]
    assert found["soft"] == pytest.approx(sum(map(sum, yes)) / 10_000, abs=1e-6)
    assert found["hard"] == sum(map(all, yes)) / 2000 and found["hard_interval"] == L.wilson(sum(map(all, yes)), 2000)
    model.forward = lambda tokens: torch.where(torch.arange(6) == 1, -0.1, 0.25).expand(tokens.shape)
    assert L.pairs_accuracy(model, 0.5, 2000)["hard"] == sum(not row[0] and all(row[1:]) for row in yes) / 2000


def test_pairs_are_tested_as_planted_and_uniform(monkeypatch):
    monkeypatch.setattr(L, "pairs_accuracy", lambda model, plant: {"hard": plant, "soft": plant})
    record, _ = L.run_pairs(L.PairsConfig(steps=1, batch=4, plant=0.75), CPU)
    assert record["accuracy"]["hard"] == 0.75 and record["accuracy_uniform"]["hard"] == 0


def test_the_best_run_has_most_whole_sequences(monkeypatch):
    shares = iter([(0.5, 0.9), (0.5, 0.9), (0.6, 0.8), (0.6, 0.8)])
    monkeypatch.setattr(L, "pairs_accuracy", lambda model, plant: dict(zip(("hard", "soft"), next(shares))))
    record, _ = L.run_pairs(L.PairsConfig(steps=1, batch=4, seeds=2, seed=3), CPU)
    assert record["seed"] == 4


def test_the_orders_around_the_circle_are_of_queries_and_of_keys():
    record, model = L.run_pairs(L.PairsConfig(steps=1, batch=4, d_head=2, d_model=8), CPU)
    x, a = model.embedding.weight, model.attention
    assert record["circle_order"]["queries"] == pytest.approx(L.circle_order((x @ a.q.weight.T + a.q.bias).detach()))
    assert record["circle_order"]["keys"] == pytest.approx(L.circle_order((x @ a.k.weight.T + a.k.bias).detach()))


# --- 14. command line, and 11. report ------------------------------------------------------------------

def lengen(*arguments, **options):
    return subprocess.run([sys.executable, str(HERE / "lengen.py"), *map(str, arguments)], capture_output=True, text=True,
                          **options)


QUICK = ["--task", "successor", "--d-model", "32", "--d-ff", "64", "--n-layer", "1", "--steps", "20", "--every", "10",
         "--batch", "8", "--lengths", "2,9", "--samples", "20", "--device", "cpu"]


@pytest.mark.parametrize("task, operands", [("successor", ["9" * 30]), ("addition", ["9" * 30] * 2), ("nx1", ["9" * 30, "9"])])
def test_a_learned_table_has_to_hold_the_longest_question(task, operands):
    longest = max(map(len, L.example(task, *operands)))
    make = lambda table: L.Config(task=task, method="ape", lengths=(30,), hard=(30,), table=table)
    make(longest)
    with pytest.raises(ValueError, match=f"--table: .* {longest} of 30"):
        make(longest - 1)


@pytest.mark.parametrize("arguments, named", [
    ("--task division", "addition"), ("--method none", "vanilla"), ("--n-head 3", "--n-head"),
    ("--method rope --d-model 12 --n-head 4", "even"), ("--lengths 0", "--lengths"), ("--lengths -3", "--lengths"),
    ("--lengths six", "--lengths"), ("--lengths 6,,7", "--lengths"), ("--samples 0", "--samples"), ("--width 3", "--width"),
    ("--device tpu", "--device"), ("--lr nan", "--lr"), ("--lr inf", "--lr"), ("--lr -1", "--lr"), ("--lr 0", "--lr"),
    ("--window -1", "--window"), ("--period 0", "--period"), ("--kappa-cross nan", "--kappa-cross"),
    ("--method ape --table 50 --lengths 60", "--table"), ("--tas successor", "--tas"), ("--base 11", "--base"),
    ("--task consecutive --method abc", "--method"), ("--task addition --d-vocab 5", "--d-vocab"),
    ("--task consecutive --d-vocab 3", "--d-vocab"), ("--from nowhere --ask 1", "nowhere"), ("--ask 1", "--from"), ("--preset slow", "--preset"), ("--steps 1.5", "--steps")])
def test_bad_input_is_one_line_and_exit_2(arguments, named, capsys):
    assert L.main(shlex.split(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err


def test_a_run_leaves_a_record_and_answers_questions(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    out = tmp_path / "run"
    assert L.main([*QUICK, "--method", "vanilla", "--out", str(out), "--json", "--quiet"]) == 0
    printed = capsys.readouterr().out
    record = json.loads(printed)
    assert printed.count("\n") == 1 and record == json.loads((out / "result.json").read_text())
    assert {"task", "method", "preset", "seed", "config", "device", "torch", "source_sha256", "seconds", "examples",
            "tokens", "teachers", "tries", "interpolation_accuracy", "lines", "accuracy", "chains", "hard"} == set(record)
    assert record["examples"]["interpolate"] == 160 and record["tokens"]["interpolate"] == 160 * (9 + 8)
    assert record["accuracy"]["2"]["n"] == 20 and record["config"]["d_model"] == 32
    assert [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert L.main([*QUICK, "--out", str(out)]) == 2 and "already holds a run" in capsys.readouterr().err
    assert L.main(["--from", str(out), "--ask", "123", "12+3", ""]) == 2
    answers, errors = capsys.readouterr()
    assert answers.count("\n") == 1 and errors.count("\n") == 2 and "12+3" in errors
    (out / "checkpoint.pt").write_bytes(b"not a checkpoint")
    assert L.main(["--from", str(out), "--ask", "123"]) == 2
    assert "weights_only" not in capsys.readouterr().err


def test_abc_is_refused_below_interpolation(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    assert L.main([*QUICK, "--task", "parity-label", "--average", "0", "--warmup", "1", "--lr", "0.01", "--retrain-steps", "5", "--teachers", "1",
                   "--out", str(tmp_path), "--quiet"]) == 2
    assert re.search(r"99% at least.* \d\d\.\d%", capsys.readouterr().err) and not (tmp_path / "result.json").exists()
    go_on = ["--resume", str(tmp_path), "--quiet", "--device", "cpu"]                     # the training is not lost
    assert L.main(go_on) == 2 and L.main([*go_on, "--force", "--lengths", "9", "--samples", "7"]) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert list(record["accuracy"]) == ["9"] and record["accuracy"]["9"]["n"] == 7 and record["config"]["force"]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(L.F, "cross_entropy", lambda logits, target: logits.sum() * float("nan"))
        assert L.main([*QUICK, "--out", str(tmp_path), "--quiet"]) == 1
    assert "step 1" in capsys.readouterr().err


def test_script_runs_and_lists():
    done = lengen("--list")
    assert done.returncode == 0 and all(name in done.stdout for name in [*L.TASKS, *L.METHODS])
    named = [line for line in done.stdout.splitlines() if line.strip().startswith("addition") and "encoder-only" in line]
    assert len(named) == 1 and "--model encoder" in named[0] and type(L.read_config({"task": "addition"})) is L.Config
    assert lengen("--samples", "-5").returncode == 2


def documented_commands(tmp_path):
    """Arguments of every command in the README, and of every one that run_all.sh starts, caught by a false python."""
    for line in (HERE / "README.md").read_text().splitlines():
        yield from (shlex.split(found) for found in re.findall(r"python lengen\.py ([^`|;&#>]+)", line))
        yield from (shlex.split("--task consecutive " + found) for found in re.findall(r"`(--d-vocab[^`]+)`", line))
    shutil.copy(HERE / "run_all.sh", tmp_path)
    (tmp_path / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {shlex.quote(str(tmp_path / "log"))}\n')
    (tmp_path / "python").chmod(0o755)
    for mode in ("quick", "alone", "full"):
        done = subprocess.run(["bash", "run_all.sh", mode], cwd=tmp_path, capture_output=True, text=True,
                              env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "JOBS": "4"})
        assert done.returncode == 0, done.stderr[-300:]
    for line in (tmp_path / "log").read_text().splitlines():
        if line.startswith("lengen.py"):
            yield shlex.split(line)[1:]


def test_documented_commands_are_accepted(tmp_path):
    commands = list(documented_commands(tmp_path))
    assert len(commands) > 300 and any("window-nope" in command for command in commands)
    for command in commands:
        L.read_config(vars(L.parser().parse_args(command)))


def test_published_tables_are_those_of_the_records():
    for name in ("results", "encoder", "pairs"):
        assert (HERE / f"results/{name}.md").read_text() == L.report(HERE / f"results/{name}.jsonl")
    main_table, _, _ = (HERE / "results/results.md").read_text().partition("### Cost")
    assert main_table in (HERE / "README.md").read_text()


def fake_record(seed, right, **config):
    config = json.loads(json.dumps(dataclasses.asdict(L.make_config(seed=seed, **config))))
    tally = dict(zip(("low", "high"), L.wilson(right, 200)), correct=right, n=200)
    return dict(task=config["task"], method=config["method"], preset=config["preset"], seed=seed, config=config,
                device="cpu", seconds=dict(interpolate=10, calibrate=1, retrain=5, evaluate=4, total=20),
                interpolation_accuracy=0.999, examples=dict(interpolate=6000), tokens=dict(interpolate=10 ** 6, retrain=10 ** 6), source_sha256=L.source_sha256(L.Config),
                accuracy={"6": tally, "60": tally}, chains={"60": {"2": [right, 200]}}, hard={"60": {"no-carry": tally}})


@pytest.mark.parametrize("kappa, said", [(4.5, True), (0.6, False)])
def test_a_run_says_that_no_line_can_open(kappa, said):
    """A clean line among 17, in sigmas: its z is at most 4, so a kappa of 4.5 opens nothing."""
    config = tiny(method="abc", task="successor", kappa_unit="sigma", kappa_cross=kappa, support=0.0)
    t, s = L.target_length("successor", config.width), sum(L.column_blocks("successor", config.width)[0])
    attention = [torch.zeros(1, config.n_head, t, n) for n in (t, s)]
    attention[0][..., range(t), range(t)] = attention[1][..., range(t), range(s - 1, s - 1 - t, -1)] = 1.0
    record = fake_record(0, 200, task="successor")
    record["examples"]["retrain"], record["tries"] = 1, 1
    record["lines"] = L.line_table(L.calibrate(config, *attention))
    text = L.summary(record)
    record["config"].update(layer="last", n_layer=1)
    assert "layer 1" in L.summary(record)
    record["config"]["n_layer"] = 2                          # the lines in use would be those of layer 2
    assert "layer 1" not in L.summary(record)
    assert ("no line in cross-attention" in text) == said and "no line in self" not in text


def test_what_a_preset_sets_is_no_changed_option():
    paper = dict(preset="paper", task="addition", method="rope")
    assert L.changed_options(fake_record(0, 9, **paper)) == "--preset paper"
    assert L.changed_options(fake_record(0, 9, **paper, d_model=128)) == "--preset paper --d-model 128"


def test_report_counts_by_hand(tmp_path, capsys):
    records = [fake_record(0, 200), fake_record(1, 199), fake_record(1, 200), fake_record(2, 199),
               fake_record(0, 100, layer="last"), fake_record(0, 7, method="rope"),
               fake_record(2, 99, layer="last", task="addition"),
               fake_record(0, 150, width=61, spread=0), fake_record(3, 200, base=4, lengths=(3,), samples=9)]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert L.main(["--report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| 60 | 99.83 (99.06-99.98), 2/3 |" in out           # 599 of 600, the later seed 1; bounds rounded outwards
    assert "Seeds with a mistake: successor seed 2 99.5 at 6 (n = 200); successor seed 2 99.5 at 60 (n = 200)." in out
    assert ("| successor | cpu | 3 | 10 (10-10) | 5 (5-5) | 4 (4-4) | 16 (16-16) | 20 (20-20) | 0.50 (0.50-0.50) | 2.00 (2.00-2.00) "
            "| 1 / 7,340 |") in out                                       # 128 * 1792 * 512 * 125 / 2e6
    assert "| successor, 60 | no-carry | 99.83" in out and "| successor | 60 | 0 / 0 | 599 / 600 |" in out
    assert "| `abc` | `--layer last` | 6 | 50 (43.13-56.87) | 49.5 (" in out and "| 0, 2 | 200 |" in out and "`--layer last` | 200" not in out
    assert "| successor | `rope` | 6 | 99.9 | 3.5 (" in out and out.count("not run") == 2
    fixed = out[out.index("the authors' fixed width"):out.index("### Other settings")]
    assert "75 (" in fixed and "3.5 (" not in fixed
    assert L.percent(9999, 10_000) == 99.9 and L.percent(9999, 10_000, 2) == L.percent(99_999, 100_000, 2) == 99.99 and L.percent(3, 3) == 100


def test_report_of_encoders_counts_by_hand(tmp_path, capsys):
    tally = lambda right: dict(zip(("low", "high"), L.wilson(right, 200)), correct=right, n=200)
    def record(seed, right, **options):
        config = json.loads(json.dumps(dataclasses.asdict(L.make_encoder_config(seed=seed, **options))))
        return dict(task=config["task"], method=config["method"], preset="fast", seed=seed, config=config, device="cpu", seconds={"total": 7.0 + seed},
                    accuracy={"5": tally(200), "6": tally(right)}, carries={"nc": {"1": [3, 9], "2": [1, 4], "3": [0, 1]}, "mc": {"8": [4, 14]}})
    tuned = dict(record(0, 20, task="multiplication", finetune=9), before=dict(accuracy={"5": tally(200), "6": tally(2)}))
    del tuned["carries"]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (
        record(0, 100, lengths=(5, 6), width=9, steps=40), record(1, 50, lengths=(5, 6), width=9, steps=40),
        record(0, 7, lengths=(5, 6), model="encoder"), tuned, fake_record(0, 150))))
    assert L.main(["--report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| addition | `rpe-k` | `--model universal --width 9 --steps 40` | 100 (99.04-100), 2/2 | 37.5 (32.89-42.35), 0/2 |" in out and "| 8 | 0, 1 | 200 |" in out
    assert "| addition | `rpe-k` | `--model encoder --width 6` | 100 (" in out and out.count("| 3.5 (") == 1
    assert "finetune 9, before` | 100 (98.11-100) | 1 (" in out and "finetune 9` | 100 (98.11-100) | 10 (" in out
    assert "| `rpe-k` | `--model encoder --width 6` | 6 | carries | 3 / 9 | 1 / 5 | 0 / 0 | 0 / 0 | 0 / 0 |" in out
    assert "--width 9 --steps 40` | 6 | longest run of carries | 0 / 0 | 0 / 0 | 0 / 0 | 8 / 28 |" in out
    assert "### ABC, default settings" in out and out.count("`--model") == 8
    again = {key: value for key, value in record(1, 30, task="multiplication", finetune=9).items() if key != "carries"}     # as --eval has it
    for pair in ((again, tuned), (dict(tuned, config=tuned["config"] | {"seed": 2}, seed=2), again)):
        path.write_text("".join(json.dumps(r) + "\n" for r in pair))
        assert L.main(["--report", str(path)]) == 0
        out = capsys.readouterr().out
        assert "finetune 9, before` | 100 (98.11-100) | 1 (" in out and "finetune 9` | 100 (99.04-100), 2/2 | 12.5 (" in out      # 50 of 400
    longer = record(1, 60, lengths=(5, 6, 8), width=9, steps=40)
    longer["accuracy"]["8"] = tally(0)
    path.write_text("".join(json.dumps(r) + "\n" for r in (record(0, 100, lengths=(5, 6), width=9, steps=40), longer,
                    record(0, 9, lengths=(5, 6)), record(0, 8, lengths=(5, 7)), record(1, 8, lengths=(5, 7), even=True))))
    assert L.main(["--report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| 6 | carries | 3 / 9 |" in out and "| 8 | carries | 3 / 9 |" in out                # not 6 / 18 at 8 digits
    assert "`--model universal --width 6`" in out and "`--model universal --width 7`" in out and "`--model universal --even --width 7`" in out


def test_a_given_teacher_and_switches_are_named_in_the_report():
    assert L.changed_options(fake_record(0, 150)) == ""
    assert L.changed_options(dict(fake_record(0, 150), teachers=0)) == "--teacher DIR"
    assert L.changed_options(dict(fake_record(0, 150, blocks=False, force=True), teachers=0)) == "--no-blocks --force"


def test_report_of_pairs_counts_by_hand(tmp_path, capsys):
    run = lambda hard, board: {"accuracy": {"soft": 0.75, "hard": hard, "n": 200, "hard_interval": L.wilson(int(200 * hard), 200)}, "checkerboard": board}
    config = json.loads(json.dumps(dataclasses.asdict(L.PairsConfig(d_vocab=8, seeds=2))))
    (tmp_path / "a").write_text(json.dumps(dict(run(0.5, 1.0), task="consecutive", device="cpu", seed=1, config=config, runs=[run(0.5, 1.0), run(1.0, 4.0)])))
    assert L.main(["--report", str(tmp_path / "a")]) == 0
    assert "| `--seeds 2 --d-vocab 8` | 75.00, 50.00 (43.13-56.87); 75.00, 100.00 (98.11-100) | 200 | 2.5 |" in capsys.readouterr().out
    one = dict(run(1.0, 2.0), task="consecutive", device="cpu", seed=1, config=config, runs=[run(1.0, 2.0)])        # the best of seeds 0, 1 and of 1, 2
    (tmp_path / "a").write_text("".join(json.dumps(dict(one, config=config | {"seed": seed})) + "\n" for seed in (0, 1)))
    assert L.main(["--report", str(tmp_path / "a")]) == 0 and capsys.readouterr().out.count("| `--seeds 2 --d-vocab 8` |") == 2


def test_report_rounds_pairs_down(tmp_path, capsys):
    """One label of 50,000 wrong is not 100%, nor is one sequence of 10,000."""
    measured = {"soft": 0.99998, "hard": 0.9999, "n": 10_000, "hard_interval": L.wilson(9999, 10_000)}
    record = {"task": "consecutive", "device": "cpu", "seed": 0, "config": json.loads(json.dumps(dataclasses.asdict(L.PairsConfig()))),
              "runs": [{"seed": 0, "accuracy": measured, "accuracy_uniform": measured, "checkerboard": 1.0, "neighbour_gap": 1.0, "circle_order": None}]}
    record |= {"seconds": {"total": 1.0}, **record["runs"][0]}
    (tmp_path / "a").write_text(json.dumps(record))
    assert L.main(["--report", str(tmp_path / "a")]) == 0 and "| 99.99, 99.99 (" in capsys.readouterr().out
    assert L.pairs_summary(record).count(" 99.99%") == 4


def test_report_has_every_length(tmp_path, capsys):
    """Also those that are not in the papers."""
    record = fake_record(0, 150, method="vanilla")
    record["accuracy"] = {"7": record["accuracy"]["6"], "8": record["accuracy"]["60"]}
    (tmp_path / "a").write_text(json.dumps(record))
    assert L.main(["--report", str(tmp_path / "a")]) == 0
    assert "| held-out | 7 | 8 | papers |" in capsys.readouterr().out


def test_report_says_what_it_leaves_out(tmp_path, capsys):
    records = [json.dumps(fake_record(0, 150, steps=steps)) for steps in (10, 20)]
    (tmp_path / "a").write_text("\n".join([*records, json.dumps(fake_record(1, 150))]))
    assert L.main(["--report", str(tmp_path / "a")]) == 0 and capsys.readouterr().err.startswith("lengen: records left out: 1;")
    (tmp_path / "a").write_text("\n".join([records[0], json.dumps(fake_record(1, 150))]))
    assert L.main(["--report", str(tmp_path / "a")]) == 0 and capsys.readouterr().err == ""


def test_report_of_no_records_is_one_line(tmp_path, capsys):
    (tmp_path / "a").write_text('{"task": "successor"}\n')
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    names = ("hard", "chains", "examples", "interpolation_accuracy", "tokens", "accuracy", "seed")
    for name in names:
        broken = {key: value for key, value in fake_record(0, 9).items() if key != name}
        (tmp_path / name).write_text(json.dumps(fake_record(0, 9)) + "\n" + json.dumps(broken))
    for name, said in (("a", "line 1"), ("b", "can be read"), ("c", "can be read"), *((name, "line 2") for name in names)):
        assert L.main(["--report", str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and said in err


def test_only_the_first_process_publishes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(L, "processes", lambda: (1, 2))
    L.publish({}, {"record": str(tmp_path / "a"), "json": True}, "text")
    assert capsys.readouterr().out == "" and not (tmp_path / "a").exists()


def test_a_recorded_run_is_not_run_again(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    path = str(tmp_path / "records.jsonl")
    once = [*QUICK, "--method", "vanilla", "--record", path]
    for folder, extra in (("a", []), ("b", []), ("c", ["--seed", "1"])):
        assert L.main([*once, "--out", str(tmp_path / folder), *extra]) == 0
    assert [json.loads(line)["seed"] for line in open(path)] == [0, 1] and not (tmp_path / "b").exists()
    capsys.readouterr()
    for number, shown in ((0, 1), (1, 0)):                                      # of several processes the first says it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(L, "processes", lambda: (number, 2))
            assert L.main([*once, "--json"]) == 0
        assert [text.count("\n") for text in capsys.readouterr()] == [shown, shown]
    assert L.main(["--report", path]) == 0 and "| `vanilla` |" in capsys.readouterr().out
    (tmp_path / "odd.jsonl").write_text(open(path).read() + "\n")
    (tmp_path / "half.jsonl").write_text('{"task": "consecutive", "config": {"task": "consecutive"}}\n')
    for n, changed in enumerate([{"n": 0, "correct": 0}, {"n": 10, "correct": 11}, {"n": 10}]):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(json.loads(open(path).readline()) | {"accuracy": {"6": changed}}))
        assert L.main(["--report", str(tmp_path / f"{n}.jsonl")]) == 2 and "line 1" in capsys.readouterr().err
    for record, said in ((tmp_path / "no" / "such.jsonl", "cannot be written"), (tmp_path / "odd.jsonl", "line 3"),
                         (tmp_path / "half.jsonl", "line 1")):
        assert L.main([*QUICK, "--method", "vanilla", "--record", str(record), "--out", str(tmp_path / "d")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "d").exists()


@pytest.mark.parametrize("arguments, said", [("--attend 12", "--attend"), ("--report x --eval y", "--eval"), ("--list --json", "--json"),
    ("--eval x --plot", "--plot"), ("--resume x --overwrite", "--overwrite"), ("--from x --ask 1 --steps 5", "--steps"),
    ("--benchmark --record x", "--record"), ("--plot-from x --out y", "--out"), ("--model foo", "seq2seq, encoder, universal"),
    ("--from x --ask 1 --device cpu", "--device"), ("--list --quiet", "--quiet"), ("--eval x --save-every 9", "--save-every"),
    ("--task consecutive --lengths 6", "--task consecutive has no such option"),
    ("--task multiplication --prime-lengths 6 --steps 5", "--prime-lengths: goes with --prime"),
    ("--lengths 6,", "--lengths: '6,' is not whole numbers with commas")])
def test_options_without_effect_are_refused(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert L.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err and not list(tmp_path.iterdir())


def test_a_teacher_is_calibrated_on_again(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    run = lambda name, *more: L.main([*QUICK, "--task", "parity-label", "--average", "0", "--warmup", "1", "--lr", "0.01", "--retrain-steps", "5",
                                      "--force", "--json", "--quiet", "--out", str(tmp_path / name), *more])
    assert run("a") == 0 and run("b", "--teacher", str(tmp_path / "a")) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["lines"] == second["lines"] and first["accuracy"] == second["accuracy"]
    assert first["examples"]["interpolate"] > 0 == second["examples"]["interpolate"]
    assert (first["teachers"], first["tries"], second["teachers"], second["tries"]) == (2, 2, 0, 1)     # kappa does not change its one line
    for other, said in ((["--seed", "1"], "--seed 0, not 1"), (["--lr", "0.02"], "--lr 0.01, not 0.02"), (["--method", "rope"], "only --method abc")):
        assert run("c", "--teacher", str(tmp_path / "a"), *other) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "own.jsonl").write_text(json.dumps(first) + "\n")                          # a run with a teacher is another run
    assert run("d", "--teacher", str(tmp_path / "a"), "--record", str(tmp_path / "own.jsonl")) == 0
    assert run("e", "--record", str(tmp_path / "own.jsonl")) == run("f", "--teacher", str(tmp_path / "a"), "--record", str(tmp_path / "own.jsonl")) == 0
    assert (tmp_path / "own.jsonl").read_text().count("\n") == 2 and not (tmp_path / "e").exists() and not (tmp_path / "f").exists()


def test_help_is_not_an_error(capsys):
    assert L.main(["--help"]) == 0
    said = capsys.readouterr().out
    for name, choices in (("line", "mean,sum"), ("norm", "pre,post"), ("size", "small,base,standard,large"), ("model", "encoder,universal")):
        assert f"--{name} {{{choices}}}" in said


def test_nothing_is_imported_but_torch():
    code = "import sys, lengen; print(sorted({m.split('.')[0] for m in sys.modules} & {'matplotlib', 'scipy', 'pandas'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_tiny_abc_run_is_exact_far_beyond_training(tmp_path, capsys):
    """End to end: the default run but for a kappa that needs one retraining alone, exact at 60 digits, then asked a carry through 40."""
    torch.set_default_dtype(torch.float32)
    assert L.main(["--task", "successor", "--out", str(tmp_path), "--json", "--quiet", "--lengths", "6,60",
                   "--samples", "200", "--kappa-cross", "0.3", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["accuracy"]["60"]["correct"] == 200
    assert any(line["line"] == "anti-diagonal" for line in record["lines"])
    assert L.main(["--from", str(tmp_path), "--ask", "9" * 40, "03611451449241919819"]) == 0
    assert capsys.readouterr().out.split() == [str(10 ** 40), "3611451449241919820"]


@pytest.mark.parametrize("task, question, written, answer", [("successor", "0199", "$0020000&", "200"),
    ("addition", "7+5", "$21000000&", "12"), ("nx1", "12*0", "$00&", "0"), ("parity", "100", "$001&", "1"), ("successor", "1", "$2", "no"), ("parity", "1", "$&", "no")])
def test_written_answers_are_read(task, question, written, answer, monkeypatch):
    monkeypatch.setattr(L, "generate", lambda *a: L.encode(written)[None])
    assert L.ask(L.Transformer(tiny(task=task)), tiny(task=task), None, question).startswith(answer)


# --- 12. pictures ----------------------------------------------------------------------

def test_pictures_without_matplotlib_are_one_line_and_exit_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    torch.set_default_dtype(torch.float32)
    run = [*QUICK, "--quiet", "--retrain-steps", "5", "--force", "--task", "parity-label", "--average", "0", "--warmup", "1", "--lr", "0.01"]
    assert L.main([*run, "--out", str(tmp_path / "done")]) == 0
    capsys.readouterr()
    for arguments, text in (([*run, "--plot", "--out", str(tmp_path / "run")], ""), (["--plot-from", str(tmp_path / "done")], "layer 1 self, heads")):
        assert L.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out.startswith(text) and bool(out) == bool(text) and err.count("\n") == 1 and "pip install matplotlib" in err
    assert not (tmp_path / "run").exists()


def test_a_question_is_not_ignored_where_there_is_no_model(capsys):
    assert L.main(["--plot-from", str(HERE / "results/long.jsonl"), "--attend", "12"]) == 2
    assert capsys.readouterr().err.startswith("lengen: --attend: ")


def test_files_of_records_share_a_picture(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(L, "pyplot", lambda: None)
    monkeypatch.setattr(L, "accuracy_picture", lambda plt, groups, task: {key[1]: len(runs) for key, runs in groups.items()})
    monkeypatch.setattr(L, "save_picture", lambda figure, path: drawn.append((path, figure)))
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).write_text(json.dumps(fake_record(seed, 9)) + "\n" + json.dumps(fake_record(seed, 9, method=f"rpe-k{'q' * seed}")))
    assert L.main(["--plot-from", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert drawn == [(tmp_path / "accuracy-successor.png", {"abc": 2, "rpe-k": 1, "rpe-kq": 1})]


def test_character_map_shows_the_open_entries():
    config = tiny(task="successor", method="abc", n_head=1, n_layer=1)
    attention = torch.eye(8)[None, None]                      # self: the diagonal; cross: the anti-diagonal of block 1
    cross = F.pad(torch.eye(8).flip(1), (0, 1))[None, None]
    drawn = L.character_map(config, L.calibrate(config, attention, cross)).splitlines()
    assert drawn[0] == "layer 1 self, heads 1 to 1" and drawn[9] == "layer 1 cross, heads 1 to 1"
    assert [line.strip() for line in drawn[1:9]] == ["." * i + "#" + "." * (7 - i) for i in range(8)]
    assert [line.strip() for line in drawn[10:]] == ["." * (7 - i) + "#" + "." * i + "." for i in range(8)]
    leaky = dataclasses.replace(config, penalty=10.0)         # closed entries are finite, and closed all the same
    assert L.character_map(leaky, L.calibrate(leaky, attention, cross)).splitlines() == drawn


def test_attention_of_one_question():
    torch.manual_seed(0)
    config = tiny(task="addition", method="vanilla")
    weights, source, answer, wrong = L.attend(L.Transformer(config), config, None, "78+4")
    assert (source, answer) == ("$0000078+0000004&", "2800000&")
    assert weights.shape == (config.n_head, 8, 17) and torch.allclose(weights.sum(-1), torch.ones(config.n_head, 8))
    assert set(wrong) <= set(range(8)) and len(wrong) > 3     # an untrained model


def test_every_picture_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    torch.set_default_dtype(torch.float32)
    small = [*QUICK, "--quiet", "--average", "0", "--warmup", "1", "--lr", "0.01", "--retrain-steps", "5", "--force"]
    runs = {"a": ["--task", "parity-label"], "b": ["--task", "addition", "--method", "window"],
            "c": ["--task", "consecutive", "--d-head", "2", "--steps", "1", "--batch", "8"],
            "d": ["--task", "addition", "--model", "encoder", "--steps", "20", "--every", "10", "--samples", "50"],
            "e": ["--task", "multiplication", "--prime", "3", "--steps", "20", "--every", "10", "--samples", "50"]}
    common = {"a": small, "b": small, **dict.fromkeys("cde", ["--quiet", "--device", "cpu"])}
    for name, arguments in runs.items():
        assert L.main([*common[name], *arguments, "--plot", "--out", str(tmp_path / name)]) == 0
    drawn = {name: {path.stem for path in (tmp_path / name).glob("*.png")} for name in runs}
    assert drawn["a"] == {"accuracy", "training", "errors", "attention", "bias-layer1"}
    assert drawn["b"] == {"accuracy", "training", "errors", "attention", "window"} and drawn["c"] == {"pairs"}
    assert drawn["d"] == drawn["e"] == {"encoder"}
    for path in tmp_path.glob("*/*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and 5_000 < path.stat().st_size < 200_000
    capsys.readouterr()
    assert L.main(["--plot-from", *(str(tmp_path / name) for name in runs), "--attend", "12+3"]) == 2
    assert L.main(["--plot-from", *(str(tmp_path / name) for name in "ac"), "--attend", "12"]) == 2
    assert L.main(["--plot-from", *(str(tmp_path / name) for name in "acde")]) == 0
    assert "layer 1 cross, heads" in capsys.readouterr().out
    first = json.loads((tmp_path / "d" / "result.json").read_text())
    alike = first | {"config": first["config"] | {"even": True}}
    names = [x.get_text() for x in L.encoder_picture(L.pyplot(), [first, alike]).legends[0].get_texts()]
    assert len(set(names)) == 3 and "--even" in names[2]
    plain = fake_record(0, 150)
    wide = L.accuracy_picture(L.pyplot(), {("successor", "abc", "--option 10 " * 12): [plain]}, "successor")
    wide.canvas.draw()
    assert wide.axes[0].get_position().width * wide.get_figwidth() > 5
    drawn = []
    with pytest.MonkeyPatch.context() as patch:                 # a run has its own figures, whatever runs of its setting are beside it
        patch.setattr(L, "accuracy_picture", lambda plt, groups, task: drawn.append(groups))
        patch.setattr(L, "save_picture", lambda figure, path: None)
        record, = [r for r, _ in L.records_in(tmp_path / "b")]
        key = L.records_in(tmp_path / "b")[0][1]
        L.draw_pictures(tmp_path / "b", L.load(tmp_path / "b"), {key: [dict(record, note="another"), dict(record, seed=8)]})
    assert drawn == [{key: [record, dict(record, seed=8)]}]
    perfect = json.loads((tmp_path / "d" / "result.json").read_text()) | {"wrong_digits": {}}
    assert not list(L.encoder_picture(L.pyplot(), [perfect]).axes[3].patches)
    uncarried = {name: value for name, value in perfect.items() if name != "carries"} | {"places": {n: [0.5, 1] for n in perfect["accuracy"]}}
    assert [list(line.get_ydata()) for line in L.encoder_picture(L.pyplot(), [uncarried]).axes[1].lines] == [[50, 100]]
    earlier = {name: value for name, value in uncarried.items() if name != "places"}         # by a version without places
    assert not L.encoder_picture(L.pyplot(), [earlier]).axes[1].get_visible()
    worst = json.loads((tmp_path / "e" / "result.json").read_text()) | {"wrong_digits": {"3": 4, "19": 1}}
    axes = L.encoder_picture(L.pyplot(), [worst]).axes[3]
    assert [x.get_text() for x in axes.get_xticklabels()] == ["3", "19"] and [bar.get_height() for bar in axes.patches] == [4, 1]
    log = [dict(stage="interpolate"), dict(step=1, seconds=1, loss=1, accuracy=0), dict(stage="retrain"), dict(step=1, seconds=2, loss=1, accuracy=0),
           dict(stage="interpolate"), dict(step=1, seconds=3, loss=1, accuracy=0)]
    assert [list(line.get_xdata()) for line in L.training_picture(L.pyplot(), tiny(), log).axes[0].lines] == [[1], [2], [3]]
    (tmp_path / "mixed.jsonl").write_text("".join(" ".join((tmp_path / name / "result.json").read_text().split()) + "\n" for name in "dc"))
    assert L.main(["--plot-from", str(tmp_path / "mixed.jsonl"), str(tmp_path / "b")]) == 2      # nothing of decoders in it
    assert L.main([*small, "--method", "ape", "--table", "12", "--hard", "9", "--plot", "--out", str(tmp_path / "f")]) == 0
    assert len(list((tmp_path / "f").glob("*.png"))) == 4
    capsys.readouterr()
    for more in (["--attend", "12x"], ["--method", "ape", "--table", "12", "--hard", "9", "--attend", "1" * 20],
                 ["--task", "addition", "--model", "encoder", "--attend", "1+2"]):
        given = common["d"] if "encoder" in more else small
        assert L.main([*given, *more, "--plot", "--out", str(tmp_path / "g")]) == 2 and not (tmp_path / "g").exists()
        assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "records.jsonl").write_text(" ".join((tmp_path / "b" / "result.json").read_text().split()))
    assert L.main(["--plot-from", str(tmp_path / "records.jsonl")]) == 2                  # only changed settings in it


# --- 10. encoder-only models ----------------------------------------------------------

def encoder_strings(task, a, b, width, modulus):
    """Question and answer of two Python integers."""
    sign = dict(zip(L.OPERATIONS, "+$&*+"))[task]
    long = max(len(str(a)), len(str(b)))
    digits = [str((int(x) + int(y)) % 10) for x, y in zip(str(a).zfill(long), str(b).zfill(long))]
    rest = lambda x: str(x % modulus).zfill(len(str(modulus - 1)))
    answer = {"addition": a + b, "multiplication": a * b, "modular-addition": rest(a + b),
              "modular-multiplication": rest(a * b), "elementwise-addition": "".join(digits)}[task]
    n_out = {"addition": width + 1, "multiplication": 2 * width, "elementwise-addition": width}.get(task, len(str(modulus - 1)))
    return f"{str(a).ljust(width, '@')}{sign}{str(b).ljust(width, '@')}", str(answer).ljust(n_out, "@")


def encoder_arranged(task, a, b, width, modulus=100):
    question, answer = L.arrange_encoder(task, *(L.read_digits(str(x), width, 10) for x in (a, b)), modulus)
    return L.decode(question[0]), L.decode(answer[0])


def encoder_batches(config, n, n_long, seed):
    """Endless batches from n examples, n_long of them long."""
    config, generator = dataclasses.replace(config, n_train=n, prime=n_long), L.seeded(seed)
    examples = L.draw_examples(config, generator)
    while True:
        yield L.draw_encoder_batch(config, examples, generator)


def small_encoder(**options):
    return L.make_encoder_config(**{**dict(n_layer=3, d_model=16, n_head=2, lengths=(4, 6), train_digits=3, second_digits=2), **options})


@pytest.mark.parametrize("task", ["addition", "modular-addition", "multiplication", "modular-multiplication", "elementwise-addition"])
def test_encoder_questions_equal_python_integers(task):
    draw = random.Random(0)
    for first, second, width in [(1, 1, 1), (5, 5, 5), (5, 3, 7), (3, 5, 20), (20, 20, 20), (35, 3, 35), (35, 35, 36)]:
        for modulus in (2, 7, 100, 101, 128, 1000, 10 ** 9):
            a, b = draw.choice([draw.randrange(10 ** first), 10 ** first - 1, 0]), draw.randrange(10 ** second)
            assert encoder_arranged(task, a, b, width, modulus) == encoder_strings(task, a, b, width, modulus)


def test_encoder_examples_of_the_paper():
    assert encoder_arranged("addition", 12, 39, 3) == ("12@+39@", "51@@")
    assert encoder_arranged("addition", 999, 345, 3) == ("999+345", "1344")
    assert encoder_arranged("elementwise-addition", 99, 45, 2)[1] == "34"
    assert encoder_arranged("multiplication", 535, 257, 3) == ("535&257", "137495")
    assert encoder_arranged("modular-addition", 98, 7, 3, 1000)[1] == "105" and encoder_arranged("modular-addition", 98, 7, 3)[1] == "05"


@pytest.mark.parametrize("model, norm", [("universal", "post"), ("universal", "pre"), ("encoder", "post")])
def test_encoder_equals_torchs(model, norm):
    ours = L.Encoder(small_encoder(method="ape", model=model, norm=norm)).eval()
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=norm == "pre"), 3,
                                   enable_nested_tensor=False).eval()
    if model == "universal":
        theirs.layers = nn.ModuleList([theirs.layers[0]] * 3)
    assert len(ours.layers) == (1 if model == "universal" else 3)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    for a, b in zip(ours.layers, theirs.layers):
        parts = [a.self_attention.q, a.self_attention.k, a.self_attention.v]
        b.self_attn.in_proj_weight.data = torch.cat([part.weight for part in parts])
        b.self_attn.in_proj_bias.data = torch.cat([part.bias for part in parts])
        for x, y in [(a.self_attention.out, b.self_attn.out_proj), (a.feed_forward[0], b.linear1), (a.feed_forward[3], b.linear2),
                     (a.norms[0], b.norm1), (a.norms[1], b.norm2)]:
            y.load_state_dict(x.state_dict())
    tokens = torch.randint(15, (4, 13))
    x = ours.embedding(tokens) + ours.table.weight
    expected = ours.norm(theirs(x)) if norm == "pre" else theirs(ours.norm(x))
    torch.testing.assert_close(ours(tokens, 7), ours.head(expected)[:, :7])


def test_encoder_sinusoids_are_added_to_the_embeddings():
    """A token's vector, before any layer, is its embedding plus sin(t / 10000^(2p/C)) and the cosine, by channel pairs."""
    model, seen = L.Encoder(small_encoder(method="vanilla")).eval(), []
    model.layers[0].register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    tokens = torch.randint(15, (4, 13))
    model(tokens, 7)
    wave = lambda t, c: (math.cos if c % 2 else math.sin)(t / 10000 ** (c // 2 * 2 / 16))
    waves = torch.tensor([[wave(t, c) for c in range(16)] for t in range(13)])
    x = model.embedding(tokens) + waves
    torch.testing.assert_close(seen[0], x if model.config.norm == "pre" else model.norm(x))


@pytest.mark.parametrize("method", ["vanilla", "ape", "rpe-k", "rpe-kq"])
def test_encoder_positions_tell_operands_apart(method):
    model = L.Encoder(small_encoder(method=method)).eval()
    for layer in model.layers:                                  # from 0.02, attention would be too even to see anything
        nn.init.normal_(layer.self_attention.q.weight), nn.init.normal_(layer.self_attention.k.weight)
    tokens = torch.arange(13)[None]
    swapped = tokens[:, [1, 0, *range(2, 13)]]
    assert (model(tokens, 13)[:, 2:] - model(swapped, 13)[:, 2:]).abs().max() > 1e-6
    assert model(tokens, 7).shape == (1, 7, 15)


def test_training_examples_are_primed_as_asked():
    config = small_encoder(n_train=40, prime=10, prime_lengths=(5, 6), batch=500)
    stream = encoder_batches(config, 40, 10, 1)
    pairs = [L.decode(question).replace("@", "").split("+") for _ in range(8) for question in next(stream)[0]]
    long = {(a, b) for a, b in pairs if len(a) > 3}
    for count in (0, 1, 2):                                     # fewer than there are lengths
        a, _ = L.draw_examples(small_encoder(prime=count, prime_lengths=(4, 5, 6), n_train=9), torch.Generator())
        assert L.n_digits(a)[:count].tolist() == [4, 5, 6][:count] and (L.n_digits(a)[count:] <= 3).all()
    assert sorted(len(a) for a, _ in long) == [5] * 5 + [6] * 5 and all(len(a) == len(b) for a, b in long)
    assert abs(sum(len(a) > 3 for a, _ in pairs) - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75)
    short = [(int(a), int(b)) for a, b in pairs if len(a) <= 3]
    assert len({a for a, _ in short}) in (29, 30) and len({b for _, b in short}) > 900     # one may be there twice
    assert all(0 < x < 1000 for pair in short for x in pair)
    tuned = next(encoder_batches(config, 10, 10, 2))[0]
    assert {tuple(L.decode(q).replace("@", "").split("+")) for q in tuned} == long         # the same ones, and no other
    short_second = next(encoder_batches(small_encoder(task="multiplication", prime=5, n_train=5), 5, 5, 1))[0]
    assert {len(L.decode(q).replace("@", "").split("&")[0]) for q in short_second} == {6}
    assert all(0 < int(L.decode(q).replace("@", "").split("&")[1]) < 100 for q in short_second)


def test_training_numbers_are_uniform_below_their_bound():
    drawn = L.draw_short(small_encoder(train_digits=5), 0, 20_000, torch.Generator().manual_seed(0))
    full = int((drawn[:, 4] > 0).sum())
    assert abs(full - 18_000) < 5 * math.sqrt(20_000 * 0.09) and not drawn[:, 5:].any()


def test_even_training_numbers_have_every_length_equally_often():
    drawn = L.draw_short(small_encoder(train_digits=4, even=True), 0, 36_000, torch.Generator().manual_seed(0))
    numbers = (drawn * 10 ** torch.arange(drawn.shape[1])).sum(1)
    counts = torch.stack([((10 ** n <= numbers) & (numbers < 10 ** (n + 1))).sum() for n in range(4)])
    assert counts.sum() == 36_000 and (counts - 9000).abs().max() < 5 * math.sqrt(9000)
    for n in range(4):                                          # uniform between 10^n and 10^(n + 1): nine leading digits, the mean
        chosen = numbers[(10 ** n <= numbers) & (numbers < 10 ** (n + 1))].double()
        assert ((chosen // 10 ** n).long().bincount()[1:] - 1000).abs().max() < 160
        assert abs(chosen.mean() - (11 * 10 ** n - 1) / 2) < 5 * 10 ** n * math.sqrt(81 / 12 / 9000)


def test_questions_of_a_product_are_uniform_with_even_training_numbers_too():
    config = small_encoder(task="multiplication", train_digits=3, second_digits=2, even=True)
    first, second = ((part * 10 ** torch.arange(part.shape[1])).sum(1) for part in L.draw_long(config, 6, 20_000, torch.Generator().manual_seed(0)))
    assert first.min() >= 10 ** 5 and first.max() < 10 ** 6 and second.min() == 1 and second.max() == 99
    assert abs(int((second < 10).sum()) - 20_000 * 9 / 99) < 5 * math.sqrt(20_000 * 9 / 99 * 90 / 99)


def test_failures_are_grouped_by_carries(monkeypatch):
    config = small_encoder(lengths=(4, 6), samples=300)
    carries = lambda a, b: [int(int(a[-n:]) + int(b[-n:]) >= 10 ** n) for n in range(1, 7)]

    class Model(nn.Module):
        """Right unless three columns carry; then the leftmost digit is 0."""
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 1)

        def forward(self, question, n_out):
            answers = []
            for a, b in (L.decode(q).replace("@", "").split("+") for q in question):
                answer = str(int(a) + int(b))
                answers.append(L.encode(("0" + answer[1:] if sum(carries(a, b)) >= 3 else answer).ljust(n_out, "@")))
            return F.one_hot(torch.stack(answers), 15).float()

    told = []
    found = L.evaluate_encoder(Model(), config, lambda digits: told.append(digits))        # where a run looks for signals
    assert told == [4, 6]
    wrong = found["accuracy"]["6"]["n"] - found["accuracy"]["6"]["correct"]
    assert found["wrong_places"] == {"1": wrong} and found["wrong_digits"] == {"1": wrong} and 0 < wrong < 300
    assert found["places"]["6"] == [round(1 - wrong / 300, 4)] + 6 * [1] and len(found["places"]["4"]) == 5
    assert all(right == (n if int(count) < 3 else 0) for count, (right, n) in found["carries"]["nc"].items())
    assert sum(n for _, n in found["carries"]["mc"].values()) == 300 and found["carries"]["mc"]["0"][0] == found["carries"]["nc"]["0"][0]
    assert all(right == 0 for run, (right, n) in found["carries"]["mc"].items() if int(run) >= 3)


def test_encoder_sizes_are_the_papers():
    shape = lambda config: (config.n_layer, config.d_model, config.n_head, config.d_ff)
    assert [shape(L.EncoderConfig(size=size)) for size in ("base", "standard", "large")] == [
        (6, 512, 8, 2048), (6, 1024, 16, 4096), (10, 1024, 16, 4096)]
    paper = L.make_encoder_config("paper", task="multiplication")
    assert shape(paper) == (6, 1024, 16, 4096) and paper.steps * paper.batch == 15_000 * 5000 and paper.width == 35
    assert (paper.norm, paper.dropout, paper.lr, paper.decay) == ("post", 0.1, 1e-4, 0.01)
    for task, lengths in (("modular-addition", (5, 6, 10, 15, 20)), ("modular-multiplication", (5, 10, 20, 30, 35))):
        table2 = L.make_encoder_config("paper", task=task)
        assert shape(table2) == (6, 512, 8, 2048) and (table2.n_train, table2.lengths) == (5000, lengths)
    table6 = L.make_encoder_config("paper", task="elementwise-addition")
    assert shape(table6) == (6, 512, 8, 2048) and (table6.n_train, table6.lengths) == (50_000, (5, 6, 10, 15, 20))
    assert table6.steps * table6.batch == 15_000 * 50_000


def test_paper_preset_is_as_wide_as_training_needs():
    width = lambda **options: L.make_config("paper", **options).width
    assert [width(), width(lengths=(3,)), width(task="parity", lengths=(6, 10)), width(lengths=(20,), width=30)] == [61, 7, 21, 30]


def test_no_question_of_a_test_is_a_priming_example():
    for seed in range(9):
        for length in (1, 2, 3, 4, 5, 9):
            config = L.EncoderConfig(task="multiplication", seed=seed, train_digits=3, lengths=(length,), prime=100, prime_lengths=(length,))
            primed, _ = L.draw_examples(config, L.seeded(seed + 2))
            asked, _ = L.draw_long(config, length, 100, L.seeded(seed * 1_000_003 + length))
            assert not torch.equal(primed[:100], asked)


def test_paper_preset_widens_addition_by_rope_alone():
    width = lambda **options: L.make_config("paper", **options).d_model
    assert [width(task="addition", method="rope"), width(task="addition", method="rope", d_model=64),
            width(task="addition", method="vanilla"), width(task="nx1", method="rope"), width()] == [512, 64, 128, 128, 128]


def test_encoder_starts_from_the_deviation_asked_for():
    deviations = lambda **more: {name: x.std().item() for name, x in L.Encoder(L.EncoderConfig(init=0.02, d_model=128, **more)).named_parameters()
                                 if x.dim() == 2}
    for norm, embedding in (("post", 0.02), ("pre", 0.3)):
        for method in ("rpe-k", "ape"):
            found = deviations(norm=norm, method=method)
            expected = {name: embedding if name in ("embedding.weight", "table.weight") else 0.02 for name in found}
            assert len(found) == 9 and found == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("precision, dtype", [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_that_of_the_products(precision, dtype):
    torch.set_default_dtype(torch.float32)
    seen, encoder = [], small_encoder(precision=precision, steps=1, n_train=50)
    models = [L.Encoder(encoder), L.Transformer(tiny(method="vanilla", precision=precision))]
    for model in models:
        layer = model.layers[0] if model is models[0] else model.decoder[0]
        layer.feed_forward[0].register_forward_hook(lambda module, given, out: seen.append(out.dtype) if module.training else None)
        assert all(x.dtype == torch.float32 for x in model.parameters())
    L.train_encoder(models[0], encoder, "train", 2)
    L.train(models[1], models[1].config, L.Plan(1, [7]))
    assert seen == [dtype] * (encoder.n_layer + 1)


ENCODER = ("--model universal --d-model 16 --n-head 2 --n-layer 2 --train-digits 2 --second-digits 1 --lengths 2,4 --steps 6 --every 3 "
           "--batch 8 --samples 20 --n-train 50 --lr 0.1 --warmup 1 --quiet --device cpu")


@pytest.mark.parametrize("task", ["addition", "multiplication"])
def test_encoder_run_leaves_a_record(task, tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    arguments = shlex.split(f"--task {task} {ENCODER} --prime 5 --finetune 4 --finetune-steps 2") + ["--out", str(tmp_path)]
    assert L.main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"task", "method", "seed", "config", "device", "torch", "source_sha256", "seconds", "accuracy", "curve", "before",
            "wrong_digits", "wrong_places"} <= set(record) and ("carries" in record) == (task == "addition")
    assert [step for step, _ in record["curve"]] == [2] and [step for step, _ in record["before"]["curve"]] == [3, 6]
    assert len(record["before"]["curve"][0][1]) == 3
    assert set(record["accuracy"]) == set(record["before"]["accuracy"]) == {"2", "4"}
    assert record["seconds"]["total"] == round(sum(record["seconds"][name] for name in ("train", "finetune", "evaluate")), 2)
    model, config, _, _ = L.load(tmp_path)
    assert isinstance(model, L.Encoder) and dataclasses.asdict(config)["prime_lengths"] == (4,)
    assert L.main(["--from", str(tmp_path), "--ask", "1+1"]) == 2 and "--ask" in capsys.readouterr().err
    assert L.evaluate_encoder(model, config)["wrong_digits"] == record["wrong_digits"] != record["before"]["wrong_digits"]
    assert "longest run of carries" in L.encoder_summary(record) or task == "multiplication"
    measured = record | {"places": {"2": [0.0], "10": [0.9995, 1.0]}}
    assert "percent right by place, 10 digits  99.95 100\n" in L.encoder_summary(measured)
    capsys.readouterr()
    assert L.main(["--eval", str(tmp_path), "--lengths", "3,4", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert list(again["accuracy"]) == ["3", "4"] and again["accuracy"]["4"] == record["accuracy"]["4"] and "before" not in again
    assert L.main(["--eval", str(tmp_path), "--lengths", "3"]) == 0 and "     3 " in capsys.readouterr().out
    for wrong in (["--lengths", "5"], ["--hard", "3"]):
        assert L.main(["--eval", str(tmp_path), *wrong]) == 2
    assert "--lengths: 5 digits do not fit the width of the run, 4" in (said := capsys.readouterr().err) and "--hard: encoder-only" in said


def test_the_model_follows_from_the_task():
    kind = lambda text: L.read_config(vars(L.parser().parse_args(shlex.split(text))))
    assert kind("--task modular-addition").model == "universal" and kind("--task multiplication --model encoder").model == "encoder"
    assert isinstance(kind("--task addition"), L.Config) and isinstance(kind("--task addition --model seq2seq"), L.Config)
    assert kind("--task addition --model universal").method == "rpe-k" and isinstance(kind(""), L.Config)


@pytest.mark.parametrize("arguments, named", [
    ("--model encoder --task successor", "--task"), ("--model universal --method abc", "--method"),
    ("--model encoder --task addition --method rope", "--method"), ("--model rnn", "--model"),
    ("--model seq2seq --task multiplication", "--task"), ("--task consecutive --model universal", "--model"),
    ("--task addition --prime 5", "--prime"), ("--task multiplication --kappa-cross 1", "--kappa-cross"),
    ("--task multiplication --modulus 1", "--modulus"), ("--model universal --width 4", "--width"),
    ("--model universal --prime 6 --n-train 5", "--prime"), ("--model universal --n-head 3", "--n-head"),
    ("--model universal --size huge", "--size"), ("--model universal --prime-lengths -1", "--prime-lengths"),
    ("--model universal --train-digits 19", "--train-digits")])
def test_bad_encoder_input_is_one_line_and_exit_2(arguments, named, capsys):
    assert L.main(shlex.split(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err


def test_encoder_numbers_have_every_digit():
    a, b = L.draw_long(small_encoder(), 6, 9000, L.seeded(0))
    for digits in (a, b):
        assert (digits[:, 2].bincount(minlength=10) - 900).abs().max() < 5 * 30
        assert (digits[:, 5].bincount(minlength=10)[1:] - 1000).abs().max() < 5 * 32
    assert set(L.draw_short(small_encoder(train_digits=1), 0, 500, L.seeded(0))[:, 0].tolist()) == set(range(1, 10))


def test_relative_tables_of_encoders_cover_every_offset():
    model = L.Encoder(small_encoder(lengths=(6,)))
    assert len(model.layers[0].self_attention.table) == 2 * 12 + 1                        # 13 tokens: offsets -12 to 12


def test_priming_examples_depend_on_the_seed():
    draw = lambda seed: L.draw_examples(small_encoder(prime=5, n_train=9, seed=seed), L.seeded(0))[0][:5]
    assert not torch.equal(draw(0), draw(1))


def test_what_a_step_of_an_encoder_is():
    """`train_encoder` against a loop written out: AdamW, warm-up times half a cosine, every answer token, clipping."""
    config = small_encoder(task="modular-addition", modulus=7, lr=0.03, decay=0.3, warmup=4, steps=9, batch=8, n_train=20, prime=3, dropout=0.0, every=3)
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(L.Encoder(config))
    L.train_encoder(models[0], config, "train", 5)
    model = models[1]
    optimizer, stream = torch.optim.AdamW(model.parameters(), weight_decay=0.3), L.seeded(5)
    examples = L.draw_examples(config, stream)
    for step in range(1, 10):
        question, answer = L.draw_encoder_batch(config, examples, stream)
        for q, a in zip(question, answer):
            x, y = map(int, L.decode(q).replace("@", "").split("$"))
            assert L.decode(a) == str((x + y) % 7)
        loss = -model(question, 1).float().log_softmax(-1).gather(2, answer[:, :, None]).mean()
        optimizer.zero_grad(), loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.03 * min(1, step / 4) * 0.5 * (1 + math.cos(math.pi * step / 9))
        optimizer.step()
    for a, b in zip(models[0].parameters(), model.parameters()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_padding_of_an_answer_is_learned(monkeypatch):
    config = small_encoder(steps=1, n_train=9)
    model, seen = L.Encoder(config), []
    monkeypatch.setattr(L, "descend", lambda optimizer, lr, loss: seen.append(loss) or loss)
    model.head.register_forward_hook(lambda module, given, out: F.one_hot(torch.full(out.shape[:2], L.TOKEN["@"]), 15).to(out) * 50.0)
    L.train_encoder(model, config, "train", 2)
    share = float(seen[0]) / 50                              # of the answer tokens that are digits, for 2 to 4 of 7
    assert 2 / 7 < share < 4 / 7


def test_the_learning_curve_is_of_fresh_questions_of_the_training_length(monkeypatch):
    asked = []
    monkeypatch.setattr(L, "right_digits", lambda model, question, answer: asked.append((question, answer)) or torch.ones(answer.shape).bool())
    config = small_encoder(task="modular-addition", modulus=7, steps=1, n_train=9)
    for seed in (2, 3):
        L.train_encoder(L.Encoder(config), config, "train", seed)
    pairs = [L.decode(q).replace("@", "").split("$") for q in asked[0][0]]
    assert {len(x) for pair in pairs for x in pair} == {3} and len(pairs) == 200
    assert [L.decode(a) for a in asked[0][1]] == [str((int(x) + int(y)) % 7) for x, y in pairs]
    assert torch.equal(asked[0][0], asked[1][0])


def test_every_answer_digit_counts(monkeypatch):
    monkeypatch.setattr(L, "right_digits", lambda model, question, answer: torch.ones(answer.shape).bool() & (torch.arange(answer.shape[1]) < answer.shape[1] - 1))
    found = L.evaluate_encoder(None, small_encoder(samples=50))
    assert [a["correct"] for a in found["accuracy"].values()] == [0, 0] and found["wrong_places"] == {"7": 50}


def test_what_run_encoder_trains_and_asks(monkeypatch):
    trained, asked = [], []
    monkeypatch.setattr(L, "train_encoder", lambda model, config, name, seed, *a: trained.append((name, config, seed, model)) or {"curve": [], "seconds": 0.0})
    monkeypatch.setattr(L, "right_digits", lambda model, question, answer: asked.append((question, answer)) or torch.ones(answer.shape).bool())
    for seed in (0, 1):
        config = small_encoder(task="modular-addition", modulus=7, lengths=(4,), seed=seed, n_train=50, prime=5, prime_lengths=(6,), finetune=8, finetune_steps=3)
        L.run_encoder(config, CPU)
    first, tuned = trained[:2]
    assert first[:2] == ("train", small_encoder(task="modular-addition", modulus=7, lengths=(4,), n_train=50, prime=5, prime_lengths=(6,), finetune=8, finetune_steps=3))
    assert (tuned[1].n_train, tuned[1].prime, tuned[1].steps) == (8, 8, 3) and tuned[3] is first[3]
    assert len({seed for _, _, seed, _ in trained}) > 2 and trained[0][2] != trained[2][2]
    assert torch.equal(asked[0][0], asked[1][0]) and not torch.equal(asked[0][0], asked[2][0])
    for q, a in zip(*asked[0]):
        x, y = map(int, L.decode(q).replace("@", "").split("$"))
        assert L.decode(a) == str((x + y) % 7)


# --- 13. benchmark ------------------------------------------------------------------------

def test_benchmark_counts_the_products_of_a_step(monkeypatch):
    """The floor is made of the work of a step, counted here from the shapes, at the rate of the product timed."""
    torch.set_default_dtype(torch.float32)
    config = tiny(batch=3)
    monkeypatch.setattr(L, "interleaved", lambda calls, *a: [call() and None or 1.0 for call in calls[:2]] + [1.0])
    C, T, S, H = config.d_model, config.width + 1, 2 * config.width + 3, config.d_ff
    layer = (6 * T + 2 * S) * C * C + 2 * T * (T + S) * C + 2 * T * C * H                # projections, attention, feed-forward
    forward = config.batch * (config.n_layer * layer + T * C * len(L.VOCAB))
    *_, floor = L.step_times(config, torch.device("cpu"), 1)
    assert floor == pytest.approx(2 * 3 * forward / (2 * 1024 ** 3), rel=1e-6)            # once forward, twice backward


def test_benchmark_of_decoding_and_its_table(monkeypatch):
    torch.set_default_dtype(torch.float32)
    sparse, dense = L.decoding_times(torch.device("cpu"), (12, 30))
    assert all(0 < x < 10 for x in (*sparse.values(), *dense.values()))
    rows = [("a", "first", 2.0, 1.0), ("b", "second", None, 1.0), ("c", "third", 1e-4, 5e-4)]
    table = L.benchmark_summary(dict(rows=rows, peak_bytes=2 ** 30, device="cpu", torch="2"))
    assert "| 2.0 s | 1.0 s | 2.00 |" in table and "| not run | 1.0 s | not run |" in table and "1.00 GiB" in table
    assert "| 0.1 ms | 0.5 ms | 0.20 |" in table


# --- everything, on another device -----------------------------------------------------------------

class Elsewhere(torch.Tensor):
    """A tensor that says it is on the device "meta", while one on the CPU does its work. As on a GPU, an operation on
    tensors of two devices fails, but for numbers and for indices. `read` counts what is brought back."""
    read = 0

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="meta",
                                                   storage_offset=inner.storage_offset())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Devices.carry_out(function, args, kwargs or {})


class Devices(TorchDispatchMode):
    """Makes what is created on "meta" an Elsewhere."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.carry_out(function, args, kwargs or {})

    @staticmethod
    def carry_out(function, args, kwargs):
        flat = [y for x in (*args, *kwargs.values()) for y in (x if isinstance(x, (list, tuple)) else [x])]
        given, name = [x for x in flat if isinstance(x, torch.Tensor)], str(function)
        away = {id(x.inner): x for x in given if isinstance(x, Elsewhere)}
        there = kwargs["device"].type == "meta" if kwargs.get("device") else bool(away)
        if not there and not away:
            return function(*args, **kwargs)
        moving = name.startswith(("aten._to_copy", "aten.copy_")) or name.startswith("aten.index") and isinstance(args[0], Elsewhere)
        if there and not moving and any(x.dim() and not isinstance(x, Elsewhere) for x in given):
            raise RuntimeError(f"{name} mixes devices")
        if there and kwargs.get("generator"):
            raise RuntimeError(f"{name} draws there with a generator of the CPU")
        Elsewhere.read += bool(away) and (not there or name.startswith("aten._local_scalar_dense"))
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Elsewhere) else x, (args, kwargs | dict(device=None)))
        if not kwargs["device"]:
            del kwargs["device"]
        wrap = lambda x: away.get(id(x), Elsewhere(x)) if isinstance(x, torch.Tensor) else x
        made = function(*args, **kwargs)
        return tree_map(wrap, made) if there else made


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())       # it knows no such device
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield torch.device("meta")
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_two_devices_cannot_be_mixed_by_mistake(elsewhere):
    with Devices():
        there, here = torch.arange(3.0, device=elsewhere), torch.arange(3.0)
    assert there.device == elsewhere and (there + 1).device == elsewhere and torch.equal((2 * there).cpu(), 2 * here)
    for mixed in (lambda: there + here, lambda: here @ there, lambda: torch.where(there > 1, here, 0.0), lambda: here[there.long()]):
        with pytest.raises(RuntimeError, match="mixes devices"):
            mixed()
    before = Elsewhere.read
    assert float(there.sum()) == 3 and bool(there[0] == 0) and Elsewhere.read == before + 2


def assert_as_on_the_cpu(elsewhere, run, *configuration):
    """A run on each device, whose weights have to be equal -> what it returned there."""
    with Devices():
        there = run(*configuration, elsewhere)
    here = run(*configuration, CPU)
    for name, weight in there[1].state_dict().items():
        assert weight.device == elsewhere, name
        torch.testing.assert_close(weight.cpu(), here[1].state_dict()[name], msg=name)
    return there


BRIEF = dict(task="addition", n_layer=1, n_head=2, d_model=8, d_ff=8, steps=2, every=2, retrain_steps=1, tries=1, teachers=1, batch=4,
             samples=4, long_samples=2, hard=(7,), force=True)


@pytest.mark.parametrize("method, n_encoder, length", [*((method, 1, 6) for method in ("ape", "alibi", "rope", "rpe-kq", "window-cyclic", "abc")),
                                                       ("abc", 0, 101)])
def test_runs_elsewhere_are_those_of_the_cpu(elsewhere, monkeypatch, method, n_encoder, length):
    def answers(model, source, target, *rest):              # whatever the model says is right, or "abc" would find nothing
        for t in range(target.shape[1] - 1):
            target[:, t + 1] = model(source, target[:, :-1], *rest[:1])[:, t].argmax(-1)
        return collect(model, source, target, *rest)

    collect = L.collect_attention
    monkeypatch.setattr(L, "collect_attention", answers)
    rules = dict(kappa_cross=0.1, floor=0.0) if method == "abc" else {}
    config = L.make_config(method=method, n_encoder=n_encoder, lengths=(length,), **BRIEF, **rules)
    record, model, calibration, _ = assert_as_on_the_cpu(elsewhere, L.run, config)
    with Devices():
        assert L.ask(model, config, calibration, "12+34")
    if method == "abc":
        assert any(line["line"] for line in record["lines"])
        assert (L.make_keys(config, 102, calibration) is None) == (n_encoder > 0)


@pytest.mark.parametrize("method", ["vanilla", "alibi", "rpe-kq", "window-cyclic"])
def test_a_training_step_brings_nothing_back(elsewhere, method):
    config = L.make_config(method=method, **BRIEF)
    _, *examples = next(L.batches(config, L.split_numbers(0)[0], 4, [config.width], L.seeded(0)))
    with Devices():
        model, bias = L.Transformer(config).to(elsewhere), L.to_device(L.make_bias(config, config.width), elsewhere)
        before = Elsewhere.read
        loss = L.train_step(model, torch.optim.Adam(model.parameters()), 1e-3, *examples, bias)
    assert Elsewhere.read == before and loss.device == elsewhere


@pytest.mark.parametrize("task, method", [*zip(L.OPERATIONS, ("vanilla", "ape", "rpe-k", "rpe-kq", "rpe-k"))])
def test_encoder_runs_elsewhere_are_those_of_the_cpu(elsewhere, task, method):
    config = L.make_encoder_config(task=task, method=method, d_model=8, n_head=2, steps=2, every=2, batch=4, samples=4, n_train=9, prime=2,
                                   lengths=(5, 6), finetune=3 if method == "ape" else 0, finetune_steps=2)
    assert_as_on_the_cpu(elsewhere, L.run_encoder, config)


def test_pairs_run_elsewhere_as_on_the_cpu(elsewhere):
    assert_as_on_the_cpu(elsewhere, L.run_pairs, L.PairsConfig(steps=3, batch=4, d_head=2, d_vocab=5, dummy=True))


# --- 7. and 14. command line: what happens to runs ----------------------------------------------

TINY = ["--task", "successor", "--n-layer", "1", "--d-model", "16", "--d-ff", "16", "--n-head", "2", "--dropout", "0.1", "--batch",
        "4", "--steps", "30", "--retrain-steps", "20", "--every", "10", "--tries", "2", "--teachers", "1", "--force", "--average", "0.9",
        "--calibration-samples", "2000", "--lengths", "1,9", "--hard", "9", "--samples", "20", "--save-every", "7", "--quiet", "--device", "cpu"]


def tiny_run(folder, *more):
    """A run of a second: vanilla, so that nothing has to interpolate."""
    torch.set_default_dtype(torch.float32)
    return L.main([*TINY, "--method", "vanilla", "--out", str(folder), *more])


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def result_of(folder):
    record = json.loads((Path(folder) / "result.json").read_text())
    del record["seconds"]
    state = L.read_checkpoint(Path(folder) / "checkpoint.pt")
    return record, {**state["model"], **{f"teacher.{name}": x for name, x in (state["teacher"] or {}).items()}}


def same(a, b):
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


KILLED = {"abc": [*TINY, "--method", "abc", "--seed", "3"],
          "pairs": shlex.split("--task consecutive --d-vocab 5 --d-head 2 --d-model 8 --batch 10 --seeds 2 --steps 230"),
          "encoder": shlex.split("--task multiplication --n-layer 2 --d-model 8 --n-head 2 --batch 8 --steps 40 --every 10 --prime 3 "
                                 "--finetune 5 --finetune-steps 30 --lengths 3,5 --train-digits 3 --samples 10 --n-train 50 --lr 0.1")}


@pytest.mark.parametrize("command, places", [*((command, [1, 3, 8, 9, 30, 10, 30]) for command in KILLED), ("encoder", [60])])
def test_a_killed_run_goes_on_to_the_same_weights(command, places, tmp_path, monkeypatch):
    """Every kind of run, interrupted in each training, against the uninterrupted run, bit for bit."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(L, "collect_attention", lambda model, *a: (torch.rand(1, 2, 8, 8, generator=L.seeded(0)),
                                                                  torch.rand(1, 2, 8, 9, generator=L.seeded(1))))
    command = [*KILLED[command], "--save-every", "7", "--quiet", "--device", "cpu"]
    assert L.main([*command, "--out", str(tmp_path / "whole")]) == 0
    step = L.Keeper.step

    def killed(self, name, parts, generator, counters):
        step(self, name, parts, generator, counters)
        self.left -= 1
        if self.left == 0:
            raise Killed
    monkeypatch.setattr(L.Keeper, "step", killed)
    commands = iter([[*command, "--out", str(tmp_path / "killed")]] + [["--resume", str(tmp_path / "killed"), "--save-every", "7",
                                                                       "--quiet", "--device", "cpu"]] * 20)
    kills = 0
    for place in [*places, 10 ** 9]:
        L.Keeper.left = place
        try:
            assert L.main(next(commands)) == 0
            break
        except Killed:
            kills += 1
    assert kills >= min(3, len(places)) and same(result_of(tmp_path / "whole"), result_of(tmp_path / "killed"))
    assert [json.loads(line) for line in (tmp_path / "killed" / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_saves_and_says_how_to_go_on(number, code, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(L, "check_shares", lambda *a: os.kill(os.getpid(), getattr(L.signal, number)) or {"accuracy": 0.0})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tmp_path = tmp_path / "a run"
    assert L.main([*(word for word in TINY if word != "--quiet"), "--method", "vanilla", "--out", str(tmp_path)]) == code
    assert f"\nlengen: interrupted; go on with: python lengen.py --resume '{tmp_path}'\n" in capsys.readouterr().err      # behind the live line
    assert L.read_checkpoint(tmp_path / "checkpoint.pt")["current"]["counters"]["step"] == 10
    monkeypatch.undo()
    torch.set_default_dtype(torch.float32)
    assert L.main(["--resume", str(tmp_path), "--lr", "0.5"]) == 2 and "--lr" in capsys.readouterr().err
    assert L.main(["--resume", str(tmp_path), "--width", "9"]) == 2 and "has 7, not 9" in capsys.readouterr().err
    assert L.main(["--resume", str(tmp_path), "--quiet", "--device", "cpu", "--width", "0"]) == 0          # 0: the natural one
    assert L.main(["--resume", str(tmp_path)]) == 2 and "finished" in capsys.readouterr().err


def test_a_half_written_line_of_the_log_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(L, "check_shares", lambda *a: os.kill(os.getpid(), L.signal.SIGINT) or {"accuracy": 0.0})
    assert tiny_run(tmp_path) == 130
    monkeypatch.undo()
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"seconds": 100.5, "stage": "x"}\n{"seconds": 333.1, "sta')
    assert L.main(["--resume", str(tmp_path), "--quiet", "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum("step" in line for line in lines) == 3 and (tmp_path / "log.jsonl").read_bytes().endswith(b"\n")
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and 100.5 < seconds[-1] < 200                      # the clock goes on


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path, capsys, monkeypatch):
    step, loss = L.train_step, iter([1.0] * 17 + [INF])
    monkeypatch.setattr(L, "train_step", lambda *a: step(*a) * next(loss))
    assert tiny_run(tmp_path) == 1 and "step 18" in capsys.readouterr().err
    kept = L.read_checkpoint(tmp_path / "checkpoint.pt")["current"]
    assert kept["counters"]["step"] == 14 and all(x.isfinite().all() for x in kept["parts"]["model"].values())


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def spoiled_checkpoints(path, folder):
    """{what was done to a good checkpoint: a function that does it}, each a way a file goes bad."""
    good, state = path.read_bytes(), L.read_checkpoint(path)
    weights = state["model"]
    first = next(iter(weights))
    write = lambda **changed: L.write_checkpoint(path, {**{k: v for k, v in state.items() if k != "format"}, **changed})
    flip = lambda at: path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1:])

    def signed(data):
        body = data[:-2] + (64).to_bytes(2, "little")
        path.write_bytes(body + L.hashlib.sha256(body).hexdigest().encode())

    def saved(value, digest=signed):
        buffer = L.io.BytesIO()
        torch.save(value, buffer)
        digest(buffer.getvalue())

    def other_zip():
        path.unlink()
        shutil.make_archive(str(path.with_suffix("")), "zip", HERE / ".ci")
        path.with_suffix(".zip").rename(path)

    def is_folder():
        path.unlink()
        path.mkdir()

    def newer():
        state_now = {**state, "format": L.FORMAT + 1}
        saved(state_now)
    rng = random.Random(0)
    return {
        "empty": lambda: path.write_bytes(b""), "half": lambda: path.write_bytes(good[:len(good) // 2]),
        "a byte short": lambda: path.write_bytes(good[:-1]), "random": lambda: path.write_bytes(rng.randbytes(len(good))),
        "text": lambda: path.write_text("hello\n" * 100), "json": lambda: path.write_text(json.dumps({"config": {}})),
        "another zip": other_zip, "a folder": is_folder, "absent": path.unlink, "no folder": lambda: shutil.rmtree(folder),
        "another program's": lambda: saved({"state_dict": weights}), "a list": lambda: saved([1, 2]),
        "a bare pickle": lambda: signed(L.json.dumps({}).encode() * 20), "newer": newer,
        "no config": lambda: write(config=None), "a missing option": lambda: write(config={"task": "successor"}),
        "an extra option": lambda: write(config={**state["config"], "colour": 3}),
        "huge": lambda: write(config={**state["config"], "n_layer": 10 ** 9}),
        "wide": lambda: write(config={**state["config"], "d_model": 65536, "d_ff": 2 ** 20, "n_layer": 100}),
        "text for a number": lambda: write(config={**state["config"], "n_layer": "two"}),
        "a missing weight": lambda: write(model={name: x for name, x in weights.items() if name != first}),
        "an extra weight": lambda: write(model={**weights, "more": torch.zeros(2)}),
        "a wrong shape": lambda: write(model={**weights, first: torch.zeros(3, 3)}),
        "nan": lambda: write(model={**weights, first: weights[first] * float("nan")}),
        "no weights": lambda: write(model=None), "bad lines": lambda: write(calibration=[[{"rows": 1}]]),
        "hostile zip": lambda: saved({"config": Hostile(folder / "owned")}),
        "hostile raw": lambda: path.write_bytes(__import__("pickle").dumps(Hostile(folder / "owned"))),
        **{f"bit at {at}": functools.partial(flip, at) for at in [0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(40))]}}


def test_files_that_are_no_checkpoint_cost_one_line(tmp_path, capsys):
    assert tiny_run(tmp_path / "good") == 0
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    names = list(spoiled_checkpoints(tmp_path / "bad" / "checkpoint.pt", tmp_path / "bad"))
    for name in names:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        spoiled_checkpoints(tmp_path / "bad" / "checkpoint.pt", tmp_path / "bad")[name]()
        for command in (["--resume"], ["--eval"], ["--ask", "12", "--from"]):
            capsys.readouterr()
            assert L.main([*command, str(tmp_path / "bad")]) == 2, name
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1 and "weights_only" not in err and len(err) < 500, (name, err)
        assert not (tmp_path / "bad" / "owned").exists()
    assert len(names) > 60


def test_an_unfinished_run_that_does_not_fit_costs_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(L, "check_shares", lambda *a: os.kill(os.getpid(), L.signal.SIGINT) or {"accuracy": 0.0})
    assert tiny_run(tmp_path) == 130
    state = L.read_checkpoint(tmp_path / "checkpoint.pt")
    weights = state["current"]["parts"]["model"]
    first = next(iter(weights))
    for bad in ({**weights, first: torch.zeros(3, 3)}, {**weights, "more": torch.zeros(1)}, {**weights, first: weights[first] * INF},
                {name: x for name, x in weights.items() if name != first}, None):
        changed = {**state, "current": {**state["current"], "parts": {**state["current"]["parts"], "model": bad}}}
        L.write_checkpoint(tmp_path / "checkpoint.pt", {key: value for key, value in changed.items() if key != "format"})
        capsys.readouterr()
        assert L.main(["--resume", str(tmp_path)]) == 2 and capsys.readouterr().err.count("\n") == 1


def bad_values():
    """Every option at values it must refuse: text, nothing, nan, inf, a fraction of an integer, beyond its limits."""
    for kind, start in ((L.Config, []), (L.PairsConfig, ["--task", "consecutive"]), (L.EncoderConfig, ["--task", "multiplication"])):
        for field in dataclasses.fields(kind):
            meta, name = field.metadata, L.flag(field.name)
            if field.name == "task" and start:
                continue
            if meta["choices"]:
                values = ["", "no-such", "0"]
            elif isinstance(field.default, bool):
                yield [*start, name + "=3"], name
                continue
            else:
                values = ["text", "", "nan", "inf", "-inf", "1e400", "0x10", str(meta["low"] - 1), str(meta["high"] * 10 + 1)]
                values += ["1.5"] * isinstance(field.default, (int, tuple)) + ["1,,2", "1,text", ","] * isinstance(field.default, tuple)
            yield from (([*start, f"{name}={value}"], name) for value in values)
            if len(name) > 5 and name[:-1] not in L.parser()._option_string_actions:
                yield [*start, name[:-1], "1"], name[:-1]
    for name, value in (("--save-every", "0"), ("--save-every", "-3"), ("--save-every", "x"), ("--device", "gpu"), ("--lenghts", "6"),
                        ("--resume", "nowhere"), ("--eval", "nowhere"), ("--report", "nowhere"),
                        ("--teacher", "nowhere"), ("--from", "nowhere")):
        yield [f"{name}={value}"] + ["--ask=1"] * (name == "--from"), name


@pytest.mark.parametrize("options", [dict(lengths=[6]), dict(lengths=6), dict(lengths=(6.5,)), dict(seed="3"), dict(lr=None), dict(n_head=4.0),
                                     dict(blocks="no"), dict(task=["addition"])])
def test_a_config_takes_values_of_the_right_kind_alone(options):
    assert L.make_config(lr=1).lr == 1
    with pytest.raises(ValueError, match=L.flag(*options)):
        L.make_config(**options)


def test_functions_refuse_what_they_cannot_do():
    config = tiny(method="vanilla", task="successor")
    model, attention = L.Transformer(config), torch.rand(2, 8, 9)
    source, bias = torch.zeros(1, config.width + 2, dtype=torch.int64), L.make_bias(config, config.width)
    short = bias._replace(decoder=[(a, torch.zeros(1, 1, source.shape[1])) for a, _ in bias.decoder])
    lines = L.calibrate(dataclasses.replace(config, method="abc"), *[x[None].expand(config.n_layer, -1, -1, -1) for x in (attention[..., :8], attention)])
    keys = L.make_keys(config, config.width, lines)
    for call, said in [(lambda: L.generate(model, source, 5, short), "1 rows"), (lambda: L.generate_sparse(model, source, 0, keys), "0 tokens"),
                       (lambda: L.generate_sparse(model, source, 99, keys), "99 tokens"),
                       (lambda: L.make_bias(dataclasses.replace(config, method="abc"), 7), "calibration"),
                       (lambda: L.abc_bias(attention, 9, 11, kappa_unit="Reach"), "Reach"), (lambda: L.abc_bias(attention, 9, 11, line="max"), "max"),
                       (lambda: L.abc_bias(attention, 9, 11, empty="none"), "none"), (lambda: L.abc_bias(attention + L.causal_bias(9)[:, :8], 9, 11), "inf")]:
        with pytest.raises(ValueError, match=said):
            call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_attention_keeps_its_dtype_whatever_the_bias(dtype):
    attention, x = L.MultiHeadAttention(16, 2).to(dtype), torch.randn(3, 8, 16, dtype=dtype)
    other = torch.float32 if dtype == torch.float64 else torch.float64
    expected = attention.double()(x.double(), x.double(), L.causal_bias(8).double())[0]
    y, _ = attention.to(dtype)(x, x, L.causal_bias(8).to(other))
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.02)


def test_every_flag_refuses_bad_values(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = list(bad_values())
    for arguments, name in cases:
        assert L.main(arguments) == 2, arguments
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and (name in err or "nowhere" in err), (arguments, err)
    assert len(cases) > 400 and not any(tmp_path.iterdir())


def test_compile_is_left_out_where_it_cannot_be(tmp_path, capsys, monkeypatch):
    def broken(model, **options):
        raise NotImplementedError("no compiler\nhere")
    monkeypatch.setattr(torch, "compile", broken)
    assert tiny_run(tmp_path, "--compile") == 0 and capsys.readouterr().err == "lengen: --compile is left out: NotImplementedError\n"
    assert json.loads((tmp_path / "result.json").read_text())["config"]["compile"] is False


def test_one_run_a_folder(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    (tmp_path / "checkpoint.pt.part").write_bytes(b"left by a killed save")
    with L.locked(tmp_path):
        assert not list(tmp_path.glob("*.part"))
        assert tiny_run(tmp_path) == 2
        assert f"process {os.getpid()}" in capsys.readouterr().err
    (tmp_path / "lengen.lock").write_text("999999")                                             # left by a dead process
    assert tiny_run(tmp_path) == 0
    first = result_of(tmp_path)
    assert tiny_run(tmp_path) == 2 and tiny_run(tmp_path, "--overwrite") == 0
    assert same(result_of(tmp_path), first)                                              # same seed, same record


def test_a_folder_keeps_what_the_user_has_in_it(tmp_path, capsys, monkeypatch):
    for name in ("film.part", "lock", "notes"):
        (tmp_path / name).write_text(name)
    assert tiny_run(tmp_path) == 0 and tiny_run(tmp_path) == 2
    for name in ("mine.png", "bias-layer2.png", "pairs.png"):
        (tmp_path / name).write_text(name)
    assert tiny_run(tmp_path, "--overwrite") == 0
    assert all((tmp_path / name).read_text() == name for name in ("film.part", "lock", "notes", "mine.png"))
    assert not (tmp_path / "bias-layer2.png").exists() and not (tmp_path / "pairs.png").exists()    # of the earlier run
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.jsonl").write_text("mine")
    assert tiny_run(tmp_path / "other") == 2 and (tmp_path / "other" / "log.jsonl").read_text() == "mine"
    monkeypatch.chdir(tmp_path / "other")
    assert tiny_run("") == 2 and [path.name for path in Path().iterdir() if path.suffix != ".lock"] == ["log.jsonl"]


def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(sys, "stderr", Gone())
    assert L.main([*(word for word in TINY if word != "--quiet"), "--method", "vanilla", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["accuracy"]


def test_a_record_has_a_line_of_its_own(tmp_path):
    path = tmp_path / "records"
    path.write_text("1")                                                                  # an editor left no last newline
    L.append_line(path, "2")
    L.append_line(path, "3")
    assert path.read_text() == "1\n2\n3\n"
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))                            # stands for a full disk
    try:
        with pytest.raises(OSError, match="space"):
            L.append_line(path, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "1\n2\n3\n"


def test_spaces_around_a_sign_are_no_part_of_a_question(monkeypatch):
    asked = []
    monkeypatch.setattr(L, "load", lambda folder: (None, tiny(), None, None))
    monkeypatch.setattr(L, "ask", lambda model, config, calibration, question: asked.append(question) or "15")
    assert L.main(["--from", "x", "--ask", " 12 + 3", "4* 5", "1 1"]) == 0 and asked == ["12+3", "4*5", "1 1"]


def test_questions_on_a_closed_or_odd_input(tmp_path, capsys, monkeypatch):
    assert tiny_run(tmp_path) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", None)
    assert L.main(["--from", str(tmp_path), "--ask", "-"]) == 0 and capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"12\n\xff\n34\n"), encoding="utf-8"))
    assert L.main(["--from", str(tmp_path), "--ask", "-"]) == 2
    out, err = capsys.readouterr()
    assert out.count("\n") == 2 and err.count("\n") == 1 and "xff" in err


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path):
    resource = pytest.importorskip("resource")
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))           # the first save fits, weights do not
    done = lengen(*TINY, "--method", "vanilla", "--d-model", "64", "--out", tmp_path, preexec_fn=full)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "too large" in done.stderr, done.stderr
    assert L.read_run(tmp_path, "")[1].d_model == 64
    torch.set_default_dtype(torch.float32)
    assert L.main(["--resume", str(tmp_path), "--quiet", "--device", "cpu"]) == 0


def test_odd_surroundings_change_nothing(tmp_path, capsys):
    """A path with spaces and accents, LANG=C, python -O, a closed stdout, stderr into a file, another directory."""
    torch.set_default_dtype(torch.float32)
    place = tmp_path / "à côté, 二"
    place.mkdir()
    assert tiny_run(tmp_path / "plain") == 0
    quiet = [word for word in TINY if word != "--quiet"]
    command = " ".join(map(shlex.quote, [sys.executable, "-O", str(HERE / "lengen.py"), *quiet, "--method", "vanilla", "--out", "run"]))
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(f"{command} >&- 2> err", shell=True, cwd=place, env={**os.environ, **threads, "LANG": "C", "LC_ALL": "C"})
    said = (place / "err").read_text()
    assert done.returncode == 0 and "\r" not in said and "\x1b" not in said
    assert same(result_of(place / "run"), result_of(tmp_path / "plain"))


def test_a_finished_run_is_tested_on_other_lengths(tmp_path, capsys, monkeypatch):
    assert tiny_run(tmp_path) == 0
    monkeypatch.setattr(L, "source_sha256", lambda config: "another source")
    monkeypatch.setattr(L, "device_name", lambda device: "another device")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    record = tmp_path.with_suffix(".jsonl")
    assert L.main(["--eval", str(tmp_path), "--lengths", "1,30", "--hard", "5", "--json", "--record", str(record)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["accuracy"]) == ["1", "30"] and list(found["hard"]) == ["5"] and found["config"]["lengths"] == [1, 30]
    assert json.loads(record.read_text()) == found
    trained = json.loads(before["result.json"])
    assert all(found[name] == trained[name] for name in ("device", "source_sha256")) and found["accuracy"]["1"] == trained["accuracy"]["1"]
    assert found["evaluated"] == dict(device="another device", source_sha256="another source")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    total = found["seconds"].pop("total")
    assert total == pytest.approx(sum(found["seconds"].values()), abs=0.006)
    for other in ("--lr", "--modulus"):
        assert L.main(["--eval", str(tmp_path), other, "1"]) == 2 and other in capsys.readouterr().err


# --- checks of a few minutes: python -m pytest -m check -s ---------------------------------

@pytest.mark.check
def test_25_kills_and_the_same_weights(tmp_path):
    command = [*TINY, "--method", "vanilla", "--d-model", "32", "--steps", "3000", "--every", "500", "--save-every", "20"]
    assert lengen(*command, "--out", tmp_path / "whole").returncode == 0
    rng, unreadable, resumed, arguments = random.Random(0), 0, 0, [*command, "--out", str(tmp_path / "killed")]
    kills = 0
    while kills < 25:
        process = subprocess.Popen([sys.executable, str(HERE / "lengen.py"), *arguments])
        while process.poll() is None and not (tmp_path / "killed" / "checkpoint.pt").exists():
            time.sleep(0.05)
        time.sleep(rng.uniform(2, 5) if kills else rng.uniform(0, 1))
        finished = process.poll() is not None
        process.kill()
        process.wait()
        try:
            L.read_checkpoint(tmp_path / "killed" / "checkpoint.pt")
        except ValueError:
            unreadable += 1
        if finished:                                                                     # once more from the start
            assert same(result_of(tmp_path / "whole"), result_of(tmp_path / "killed"))
            shutil.rmtree(tmp_path / "killed")
            arguments = [*command, "--out", str(tmp_path / "killed")]
            continue
        kills += 1
        arguments = ["--resume", str(tmp_path / "killed"), "--save-every", "20", "--quiet", "--device", "cpu"]
    assert lengen(*arguments).returncode == 0
    print(f"\n{kills} kills, {unreadable} unreadable checkpoints")
    assert unreadable == 0 and same(result_of(tmp_path / "whole"), result_of(tmp_path / "killed"))


@pytest.mark.check
def test_out_of_memory_is_one_line(tmp_path):
    done = lengen("--task", "successor", "--method", "vanilla", "--batch", 10 ** 6, "--d-model", 4096, "--quiet", "--device", "cpu",
                  "--out", tmp_path)
    print("\n" + done.stderr)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "--batch" in done.stderr


@pytest.mark.check
def test_the_reader_may_leave_early(tmp_path):
    done = subprocess.run(f"{shlex.quote(sys.executable)} {HERE / 'lengen.py'} {' '.join(TINY)} --method vanilla --out {tmp_path}/a | head -1; "
                          "exit ${PIPESTATUS[0]}", shell=True, executable="/bin/bash", capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and (tmp_path / "a" / "result.json").exists()


@pytest.mark.check
@pytest.mark.parametrize("number, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_from_outside(number, code, tmp_path):
    process = subprocess.Popen([sys.executable, str(HERE / "lengen.py"), *TINY, "--method", "vanilla", "--steps", "100000", "--every",
                                "100000", "--out", str(tmp_path)], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "checkpoint.pt").exists():
        time.sleep(0.1)
    time.sleep(2)
    process.send_signal(getattr(L.signal, number))
    assert process.wait(20) == code and "--resume" in process.stderr.read()


@pytest.mark.check
def test_two_processes_learn_as_one(tmp_path):
    """torchrun against one process with the same global batch, one thread each: the losses agree to rounding."""
    command = [str(HERE / "lengen.py"), "--task", "addition", "--method", "vanilla", "--steps", "200", "--every", "20", "--lengths", "6",
               "--hard", "6", "--samples", "20", "--quiet", "--device", "cpu"]
    losses = {}
    for name, start in (("one", []), ("two", ["-m", "torch.distributed.run", "--nproc-per-node=2"])):
        done = subprocess.run([sys.executable, *start, *command, "--out", str(tmp_path / name)], capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        log = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        losses[name] = torch.tensor([line["loss"] for line in log if "loss" in line])
    print(f"\nlargest difference of the losses {float((losses['one'] - losses['two']).abs().max()):.1e} of {losses['one'].tolist()}")
    assert len(losses["one"]) == 10
    torch.testing.assert_close(losses["one"], losses["two"], rtol=0, atol=1e-4)
