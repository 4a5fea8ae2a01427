# SPDX-License-Identifier: MIT
"""What the records beside this file hold: which runs have some options, and what is right."""

import json
import math
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent

# Options that records leave out.
USUAL = dict(n_encoder=0, n_layer=1)

# Older records have these values under other names, and 0 in place of None.
RENAMED = {"rules": {"robust": "ours", "paper": "v1"}, "model": {"head": "pairs"}}
ZEROS = "width", "second_digits", "modulus", "finetune"

def parse(line):
    """JSON -> a record with the options, values and parts of today's lengen.py."""
    record = json.loads(line)
    config, train = record.get("config", {}), record.get("train", {})
    for name, values in RENAMED.items():
        if config.get(name) in values:
            config[name] = values[config[name]]
    for name in ZEROS:
        if name in config:
            config[name] = config[name] or None
    for name in "optimizer", "uniform":
        config.pop(name, None)
    if "teacher" in train:
        record["train"] = {"vanilla": train.pop("teacher")} | train
    return record

@cache
def read(file):
    return [*map(parse, (HERE / f"{file}.jsonl").read_text(encoding="utf-8").splitlines())]

def records(file, **config):
    """Records of a file whose config has these values. Raises: ValueError when there is none."""
    found = []
    for r in read(file):
        options = USUAL | r["config"] | dict(changed=r.get("changed"))
        if all(options.get(name) == value for name, value in config.items()):
            found.append(r)
    if not found:
        raise ValueError(f"{file}.jsonl has no record of {config}")
    return found

def percents(runs, digits, name="random"):
    """Percent exact of each run that was tested so."""
    rows = [row for r in runs for row in r["tests"]["rows"]
            if (row["digits"], row.get("set", "random")) == (digits, name)]
    return [100 * Fraction(row["correct"], row["n"]) for row in rows]

def share(file, digits, **config):
    """Percent exact of each record of a file whose config has these values."""
    return percents(records(file, **config), digits)

def all_right(run):
    return all(row["correct"] == row["n"] for row in run["tests"]["rows"])

def span(values):
    """Median (least - most), rounded down to a decimal, or the one value that all have."""
    down = lambda x: f"{math.floor(10 * x) / 10:g}"
    ends = f" ({down(min(values))} - {down(max(values))})" if min(values) < max(values) else ""
    return down(median(values)) + ends

def compare(argv, readme, tables, sentences=()):
    """A command that compares the tables of a README, which stand between marks with their names,
    and sentences anywhere in it with what the records make; by --write it writes the tables."""
    options = sys.argv[1:] if argv is None else argv
    if options not in ([], ["--write"]):
        print("the only option is --write", file=sys.stderr)
        return 2
    text, wrong = readme.read_text(encoding="utf-8"), []
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        old, after = rest.split(end)
        new = "".join(f"{row}\n" for row in table)
        if old != new:
            wrong += [line for line in new.splitlines() if line not in old] or [f"order of {name}"]
        text = before + start + new + end + after
    if options:
        readme.write_text(text, encoding="utf-8")
        wrong = []
    wrong += [f"missing: {words}" for words in sentences if words not in text]
    print("".join(f"{line}\n" for line in wrong), end="")
    return bool(wrong)
