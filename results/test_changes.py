# SPDX-License-Identifier: MIT
"""Tests of changes of the authors' rules. Oracle: attention whose lines are known."""

import json
import re

import pytest
import torch

import lengen as L
from results import changes

@pytest.fixture
def unchanged(monkeypatch):
    """What `changes` sets is put back after a test."""
    monkeypatch.setattr(L, "fill_empty", L.fill_empty)
    monkeypatch.setattr(L, "make_record", L.make_record)
    for rules in L.RULES, L.SELF_RULES:
        monkeypatch.setitem(rules, "code", dict(rules["code"]))

def test_changes_of_the_rules(unchanged):
    config = L.Config(method="abc", rules="code", width=21, n_head=1)
    vertical = torch.eye(22)[:1].expand(1, 1, 22, 22)  # each row sees the first key
    attention = vertical, vertical

    def heads():
        return {line.attention for line in L.calibrate(config, attention, None)}

    def open_keys():
        bias = L.calibrated_bias(config, [])(0, "cross", 22, 22)[0]
        return [row.isfinite().nonzero().flatten().tolist() for row in bias]

    # Short diagonals through the first key have z above 0.87, none has 4.5.
    assert heads() == {"self"}
    assert open_keys() == [[*range(22)]] * 22
    changes.CHANGES["start"]()
    assert heads() == {"self"}
    assert open_keys() == [[0]] * 22
    changes.CHANGES["vertical"]()
    assert heads() == {"self", "cross"}
    changes.CHANGES["self"]()
    assert heads() == {"cross"}

def test_a_record_names_its_changes(unchanged, capsys):
    assert changes.main(["start+none"]) == 2
    assert re.fullmatch(".*start, vertical, self.*\n", capsys.readouterr().err)
    options = "--method nope --steps 3 --samples 2 --lengths 6 --quiet --json"
    assert changes.main(["start+self", *options.split()]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["changed"], record["config"]["rules"]) == ("start+self", "code")
