# SPDX-License-Identifier: MIT
"""What the records beside this file hold: which runs have some options, and what is right."""

import json
import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent

# Options that records leave out.
USUAL = dict(n_encoder=0, n_layer=1)

@cache
def read(file):
    return [*map(json.loads, (HERE / f"{file}.jsonl").read_text(encoding="utf-8").splitlines())]

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
