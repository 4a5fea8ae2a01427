# SPDX-License-Identifier: MIT
"""Tests of README's scripts, of the scripts beside this file, and of what they make of records.
Oracles: formulas as plain loops, records made by hand, published intervals."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lengen as L
from results import claims, papers, records, shares, speed, tables

RESULTS = Path(__file__).resolve().parent
README = (RESULTS.parent / "README.md").read_text(encoding="utf-8")
torch.set_num_threads(1)

@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)

# -----
# README's scripts, run as printed, and results/own.py

SHORT_RUN = "lengen.main(['--steps=3', '--samples=2', '--lengths=6', '--quiet', '{}'])"
ENDINGS = [  # what is run behind each script
    "",
    SHORT_RUN.format("--task=subtraction', '--method=nope"),
    SHORT_RUN.format("--method=learned-cyclic"),
]

@pytest.fixture(scope="session", autouse=True)
def started(request, tmp_path_factory):
    """Processes of results/own.py and of each script. They run beside the tests; the last test
    waits for them."""
    if not any("scripts_run" in item.name for item in request.session.items):
        return []
    commands = [["-m", "results.own"]]
    scripts = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for script, ending in zip(scripts, ENDINGS, strict=True):
        commands.append(["-c", f"{script}\n{ending}"])
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(RESULTS.parent))
    processes = []
    for command in commands:
        processes.append(subprocess.Popen(
            [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=tmp_path_factory.mktemp("script")))
    return processes

# -----
# Records and tables

def record_by_hand(seed, correct, n=1000, **options):
    """A record as an older file may hold it: config and counts, nothing else."""
    config = dataclasses.asdict(L.Config(task="successor", seed=seed, **options))
    rows = [dict(digits=20, set="random", correct=correct, n=n),
            dict(digits=60, set="hard", correct=n - seed, n=n)]
    return dict(config=config, device="hand", tests=dict(rows=rows), seconds=10.0 * seed)

def write_lines(path, found):
    path.write_text("\n".join(map(json.dumps, found)))
    return str(path)

@pytest.mark.parametrize("correct, n, low, high, shown", [
    (0, 100, 0, .036993, "0.0%"),
    (50, 100, .403832, .596168, "50.0%"),
    (100, 100, .963007, 1, "100.0%"),
    (9999, 10000, .999434, .999982, "99.9%")])
def test_shares_and_their_intervals(correct, n, low, high, shown):
    assert records.wilson(correct, n) == pytest.approx((low, high), abs=1e-6)
    assert L.percent(correct / n) == shown

def cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]

def test_a_table_has_a_row_for_runs_that_differ_in_seeds(tmp_path, capsys):
    first = record_by_hand(1, 5)  # run again later; the last record counts
    group = [record_by_hand(seed, correct)
             for seed, correct in ((1, 1000), (2, 707), (3, 999), (4, 333))]
    other = record_by_hand(1, 777, method="vanilla", d_model=32)
    assert tables.main([write_lines(tmp_path / "runs.jsonl", [first, *group, other])]) == 0
    out = capsys.readouterr().out
    head, _, abc, plain = [cells(line) for line in out.splitlines() if "|" in line][:4]
    abc, plain = dict(zip(head, abc)), dict(zip(head, plain))
    assert head[:4] == ["method", "changed", "20", "60 hard"]
    assert abc["seeds"] == "1, 2, 3, 4"
    assert abc["20"] == "85.3 (33.3-100.0), 1/4"  # median of 33.3, 70.7, 99.9 and 100
    assert abc["60 hard"] == "99.7 (99.6-99.9), 0/4"  # 99.75, rounded down
    assert (plain["method"], plain["changed"]) == ("vanilla", "--d-model 32")
    assert plain["20"] == "77.7 (75.0-80.2)"  # Wilson's interval
    assert "| 3 | 20 | random | 999 of 1,000 |" in out  # of the seeds that failed

def test_a_table_has_seconds(tmp_path, capsys):
    record = record_by_hand(1, 1000)
    record["train"] = {"teacher": dict(steps=2, seconds=2.0, curve=[]),
                       "model": dict(steps=2, seconds=5.0, curve=[])}
    record["tests"]["seconds"] = 1.5
    assert tables.main([write_lines(tmp_path / "runs.jsonl", [record])]) == 0
    assert "| 1 | 2.0 | 5.0 | 1.5 | 8.5 | 2 + 2 | 2.50 | hand |" in capsys.readouterr().out

def test_tables_leave_out_a_run_that_is_not_finished(tmp_path, capsys):
    assert tables.main([str(tmp_path / "missing")]) == 2
    assert re.fullmatch(".*missing.*\n", capsys.readouterr().err)
    (tmp_path / "failed").mkdir()
    assert tables.main([str(tmp_path / "failed")]) == 2
    assert re.fullmatch(".*no finished run.*\n", capsys.readouterr().err)
    runs = write_lines(tmp_path / "runs.jsonl", [record_by_hand(1, 1000)])
    assert tables.main([str(tmp_path / "failed"), runs]) == 0
    assert "no finished run" in capsys.readouterr().err

def test_patterns_of_a_pairs_head():
    index = torch.arange(8)
    neighbours = ((index[:, None] - index).abs() == 1).float()
    assert records.score_patterns(neighbours) == dict(neighbour_gap=1.0, checkerboard=0.0)
    angle = torch.arange(16) // 2 * 0.7  # two integers at each place of a circle
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    assert records.circle_order(circle) == pytest.approx([1, 1])

def test_the_readme_has_the_claims_that_records_make(tmp_path, monkeypatch):
    assert claims.main([]) == 0
    monkeypatch.setattr(claims, "README", tmp_path / "README.md")
    for number in "98.1 (95.5", "1,000 questions", "of 5 seeds", "of 20 seeds":
        (tmp_path / "README.md").write_text(README.replace(number, number[:-1] + "?"))
        assert claims.main([]) == 1

def test_recorded_runs_of_abc_had_the_defaults():
    for record in shares.records("abc"):
        config = L.Config(task=record["config"]["task"])
        assert (record["config"]["batch"], record["config"]["lr"]) == (config.batch, config.lr)
        assert record["train"]["teacher"]["steps"] == config.steps
        assert 50 <= record["train"]["model"]["steps"] <= 2 * config.retrain_steps

def test_tables_of_the_papers_are_those_that_records_make(tmp_path, monkeypatch, capsys):
    assert papers.main([]) == 0
    monkeypatch.setattr(papers, "README", tmp_path / "README.md")
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(text.replace("| 100 -> ", "| 100 > ", 1), encoding="utf-8")
    assert papers.main([]) == 1
    assert papers.main(["--write"]) == 0
    assert papers.main([]) == 0

def test_a_row_of_a_paper_is_median_and_range():
    runs = [record_by_hand(seed, correct) for seed, correct in ((1, 1000), (2, 707), (3, 998))]
    assert papers.row(["n + 1"], ["93.5"], runs, (20,)) == "| n + 1 | 93.5 -> 99.8 (70.7 - 100) |"
    line = papers.row(["n + 1"], ["100"], runs[:1], (20,))
    assert line == "| n + 1, 1 seed | 100 |"  # the paper's and ours
    assert [*papers.name_once(["| a | b |", "| a | c |", "", "| a | d |"])] == [
        "| a | b |", "| | c |", "", "| a | d |"]

def test_records_are_chosen_by_their_options(tmp_path, monkeypatch):
    options = dict(method="abc"), dict(method="abc", n_layer=2), dict(method="vanilla")
    runs = [record_by_hand(seed, 1, **given) for seed, given in enumerate(options)]
    del runs[0]["config"]["n_layer"]  # left out: the default
    write_lines(tmp_path / "some.jsonl", runs)
    monkeypatch.setattr(shares, "HERE", tmp_path)
    [found] = shares.records("some", method="abc", n_layer=1)
    assert found["config"]["seed"] == 0
    with pytest.raises(ValueError, match="some"):
        shares.records("some", method="nope")

def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from results import pictures
    short = ["--steps=10", "--samples=20", "--quiet", "--device=cpu"]
    runs = {"run": ["--task=successor", "--steps=150", "--lengths=6"],
            "sums": ["--task=addition", "--model=universal", "--n-train=50"],
            "pairs": ["--task=consecutive", "--d-head=2"]}
    for name, options in runs.items():
        assert L.main([*short, *options, f"--out={tmp_path / name}"]) == 0
    folders = [str(tmp_path / name) for name in runs]
    capsys.readouterr()
    assert pictures.main([*folders, "--out", str(tmp_path / "out"), "--question", "129"]) == 0
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert names == {"accuracy", "run-training", "run-bias", "run-attention", "sums-training",
                     "sums-places", "pairs-training", "pairs-pairs"}
    assert capsys.readouterr().err.count("\n") == len(names)
    assert pictures.main([folders[0], "--question", "12x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1

def test_what_speed_times_is_equal(capsys):
    """It compares the results of the two sides that it times."""
    assert speed.main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(seconds > 0 for _, seconds, _ in rows)

def test_scripts_run(started):
    own, bias, task, method = started
    printed, _ = own.communicate()
    assert min(map(int, re.findall(r"random (\d+)", printed))) >= 990  # of 1,000 questions
    assert bias.communicate() == ("", "") and bias.returncode == 0
    for run in task, method:
        printed, told = run.communicate()
        assert " 3 steps" in printed
        assert all("raise --steps" in line for line in told.splitlines())
