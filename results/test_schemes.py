# SPDX-License-Identifier: MIT
"""Tests of other people's position schemes: each formula as a plain loop, in Python's floats."""

import itertools
import math

import pytest
import torch
import torch.nn as nn

import lengen as L
from results import schemes

for added in schemes.SCHEMES:  # on import; tests of lengen.py run over the methods it has itself
    L.METHODS.pop(added)

@pytest.fixture
def methods(monkeypatch):
    """METHODS with the schemes, for one test."""
    for name, method in schemes.SCHEMES.items():
        monkeypatch.setitem(L.METHODS, name, method)

@pytest.fixture
def double():
    """Tensors have float64 by default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)

def small():
    """Options of a small model with two heads of width 8."""
    return L.Config("successor", method="nope", n_encoder=1, n_head=2, d_model=16)

def softplus(x):
    return math.log(1 + math.exp(x))

def sigmoid(x):
    return 1 / (1 + math.exp(-x))

def network(layers, head, x):
    """A number through a layer, ReLU and a layer -> the output of a head."""
    first, _, second = layers
    total = float(second.bias[head])
    for n in range(len(first.bias)):
        hidden = float(first.weight[n, 0]) * x + float(first.bias[n])
        if hidden > 0:
            total += float(second.weight[head, n]) * hidden
    return total

def t5(part, head, d, largest):
    bucket = d
    if d >= 16:
        octaves = math.log(d / 16) / math.log(8)
        bucket = min(31, 16 + int(16 * octaves))
    return float(part.weight[bucket, head])

def kerple(part, head, d, largest):
    r1, r2 = map(softplus, part.r[:, head, 0, 0].tolist())
    return -r1 * math.log(1 + r2 * d)

def learned_alibi(part, head, d, largest):
    return -math.exp(float(part.log_slope[head, 0, 0])) * d

def sandwich(part, head, d, largest):
    waves = sum(math.cos(d / 10000 ** (2 * k / 128)) for k in range(64))
    return waves / (8 * (head + 1) / 2)

def dynamic(part, head, d, largest):
    return network(part, head, math.log(1 + d))

def fire(part, head, d, largest):
    c, limit = abs(float(part.c)), abs(float(part.limit))
    most = math.log(c * max(limit, largest) + 1)
    return network(part, head, math.log(c * d + 1) / most)

@pytest.mark.parametrize("kind, T, S", [("self", 20, 20), ("cross", 5, 40), ("encoder", 9, 9)])
@pytest.mark.parametrize("name, formula", [
    ("t5", t5), ("kerple", kerple), ("learned-alibi", learned_alibi), ("sandwich", sandwich),
    ("dynamic", dynamic), ("fire", fire)])
@torch.no_grad()
def test_biases_are_the_formulas(double, name, formula, kind, T, S):
    bias = schemes.SCHEMES[name].bias(small()).double()
    for weight in bias.parameters():
        nn.init.normal_(weight, mean=0.5)
    found = bias(0, kind, T, S)
    for h, i, j in itertools.product(range(2), range(T), range(S)):
        if kind == "self" and j > i:
            continue  # the causal mask closes it
        # How far key j lies behind query i; keys of the source are counted from its end.
        behind = [i - key for key in range(S)]
        if kind == "cross":
            behind = [i - key for key in reversed(range(S))]
        side, largest = kind, max(behind)
        if kind != "self":
            side = f"{kind} behind"
        if behind[j] < 0:
            side, largest = f"{kind} ahead", -min(behind)
        expected = formula(bias.parts[side], h, abs(behind[j]), largest)
        assert float(found[h, i, j]) == pytest.approx(expected, abs=1e-5)

def test_digits_of_one_place_share_an_index(methods):
    """Also with the row that has just written that place."""
    config = L.Config("addition", method="abacus")
    question, answer = L.example("addition", "123", "45")
    assert (question, answer) == ("$0123+0045&", "$8610&")
    of = schemes.places(config, "source", len(question)).tolist()
    assert of == [0, 4, 3, 2, 1, 0, 4, 3, 2, 1, 0]
    of = schemes.coupled(config, "source", len(question)).tolist()
    assert of == [5, 4, 3, 2, 1, 5, 4, 3, 2, 1, 0]
    for index in schemes.places, schemes.coupled:
        assert index(config, "target", len(answer)).tolist() == [0, 1, 2, 3, 4, 5]

@pytest.mark.parametrize("name, markers_shift", [("abacus", False), ("coupling", True)])
def test_a_random_start_is_shared_and_of_training_alone(methods, name, markers_shift):
    config = L.Config("addition", method=name)
    model = schemes.SCHEMES[name].position(config)
    for training in True, False:
        model.train(training)
        torch.manual_seed(3)
        start = int(torch.randint(100, ())) if training else 0
        assert (start > 0) == training
        torch.manual_seed(3)
        for side in "source", "target":
            rows = []
            for n in model.index(config, side, 11).tolist():
                rows.append(n + start if n or markers_shift else n)
            assert torch.equal(model(side, 11), model.weight[rows])

def test_random_positions_of_both_sides_are_one_subset():
    model = schemes.Randomized(small())
    waves = L.sinusoidal(torch.arange(schemes.MOST), 16)

    def positions(side, T):
        return [int((waves - row).abs().sum(1).argmin()) for row in model(side, T)]

    for training in True, False:
        model.train(training)
        source, target = positions("source", 12), positions("target", 9)
        assert source[::-1][:9] == target == sorted(set(target))
        assert (target == list(range(9))) == (not training)

def cope(module, kind, h, q, k, i, j):
    """The score of query i (D,) at key j, before it is divided by sqrt(D)."""
    last = i if kind == "self" else len(k) - 1
    gates = [sigmoid(float(q[i] @ k[l])) for l in range(j, last + 1)]
    count = min(63, sum(gates))
    share = count - math.floor(count)
    below, above = module.vectors[math.floor(count)], module.vectors[math.ceil(count)]
    return float(q[i] @ (k[j] + (1 - share) * below + share * above))

def forgetting(module, kind, h, q, k, i, j):
    """The same; what is forgotten is added after the division by sqrt(D)."""
    def log_f(side, l):
        return math.log(sigmoid(float(k[l] @ module.w[side, h, :, 0] + module.b[side, h])))

    if kind == "self":
        forgotten = sum(log_f(0, l) for l in range(j + 1, i + 1))
    else:
        here = len(k) - 1 - i  # the column of place i
        forgotten = sum(log_f(0, l) for l in range(here, j))
        forgotten += sum(log_f(1, l) for l in range(j, here))
    return float(q[i] @ k[j]) + math.sqrt(q.shape[1]) * forgotten

@pytest.mark.parametrize("kind, T, S", [("self", 5, 5), ("cross", 5, 7)])
@pytest.mark.parametrize("name, formula", [("cope", cope), ("forgetting", forgetting)])
@torch.no_grad()
def test_scores_are_the_formulas(double, name, formula, kind, T, S):
    q, k = torch.randn(1, 2, T, 8), torch.randn(1, 2, S, 8)
    module = schemes.SCHEMES[name].scores(small(), kind)
    for weight in module.parameters():
        nn.init.normal_(weight)
    found = module(q, k)
    for h, i, j in itertools.product(range(2), range(T), range(S)):
        if kind == "self" and j > i:
            continue  # the causal mask closes it
        expected = formula(module, kind, h, q[0, h], k[0, h], i, j)
        assert float(found[0, h, i, j]) == pytest.approx(expected)
