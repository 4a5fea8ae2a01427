# SPDX-License-Identifier: MIT
"""Tables of finished runs, in Markdown: python -m results.tables FILE_OR_DIR...

Arguments are folders of runs and .jsonl files of records. Runs are grouped by task, method and
changed options; of equal group and seed the last counts. Seeds are never pooled.
"""

import math
import sys
from fractions import Fraction
from statistics import mean, median

import lengen as L
from results import records

def down(share):
    """Percent, rounded down: 100.0 is all."""
    return f"{math.floor(1000 * share) / 10:.1f}"

def span(values, show="{:,.1f}".format):
    """Median (least-most), or the only value; "-" where none is known."""
    values = [x for x in values if x is not None]
    if not values:
        return "-"
    if len(values) == 1:
        return show(values[0])
    return f"{show(median(values))} ({show(min(values))}-{show(max(values))})"

def cell(rows):
    """Rows of one column, one a seed -> percent exact."""
    if not rows:
        return "-"
    shares = [Fraction(row["correct"], row["n"]) for row in rows]
    if len(rows) == 1:
        low, high = rows[0]["interval"]
        return f"{down(shares[0])} ({100 * low:.1f}-{100 * high:.1f})"
    return f"{span(shares, down)}, {shares.count(1)}/{len(rows)}"

def soft_share(row):
    """Mean share right of all places."""
    return Fraction(round(1e6 * mean(row["places"])), 10 ** 6)

def accuracy(key, runs, columns):
    """-> cells of one group, {column: cell}."""
    task, method, change = key
    cells, n = {"method": method, "changed": change}, set()
    for digits, name in columns:
        rows = [r["columns"][digits, name] for r in runs if (digits, name) in r["columns"]]
        label = f"{digits} {name}".removesuffix(" random")
        if task == "consecutive":
            label = f"{name}, hard"
            soft = [soft_share(row) for row in rows if row.get("places")]
            cells[f"{name}, soft"] = span(soft, down)
        cells[label] = cell(rows)
    if task == "consecutive":
        for name in "neighbour_gap", "checkerboard", "circle_order":
            cells[name.replace("_", " ")] = span([r.get(name) for r in runs], "{:.2f}".format)
    for r in runs:
        n |= {row["n"] for row in r["columns"].values()}
    cells["s"] = span([r.get("seconds") for r in runs])
    cells["seeds"] = ", ".join(str(r["seed"]) for r in runs)
    cells["n"] = ", ".join(f"{x:,}" for x in sorted(n))
    return cells

def cost(key, runs):
    """-> cells of what the stages of ABC took."""
    first = [r["train"]["vanilla"] for r in runs]
    again = [r["train"]["model"] for r in runs]
    ratios, steps = [], {}
    for a, b in zip(first, again):
        steps[f"{a['steps']:,} + {b['steps']:,}"] = True
        if a["seconds"]:
            ratios.append(b["seconds"] / a["seconds"])
    devices = dict.fromkeys(r.get("device", "-") for r in runs)
    return {"task": key[0], "changed": key[2], "seeds": len(runs),
            "vanilla, s": span([a["seconds"] for a in first]),
            "retraining, s": span([b["seconds"] for b in again]),
            "tests, s": span([r["tests"]["seconds"] for r in runs]),
            "whole, s": span([r["seconds"] for r in runs]), "steps": ", ".join(steps),
            "retraining / vanilla": span(ratios, "{:.2f}".format), "device": "; ".join(devices)}

def failures(key, runs):
    """-> cells of each test of ABC that is not all right."""
    for r in runs:
        for (digits, name), row in r["columns"].items():
            if row["correct"] < row["n"]:
                yield {"task": key[0], "changed": key[2], "seed": r["seed"], "digits": digits,
                       "set": name, "right": f"{row['correct']:,} of {row['n']:,}"}

def random_first(column):
    return column[1] != "random", column

def tables(groups):
    """-> title and rows {column: cell} of every table."""
    for task in dict.fromkeys(key[0] for key in groups):
        same_task = {key: runs for key, runs in groups.items() if key[0] == task}
        columns = set()
        for runs in same_task.values():
            for r in runs:
                columns |= r["columns"].keys()
        columns = sorted(columns, key=random_first)
        yield task, [accuracy(key, runs, columns) for key, runs in same_task.items()]
    costs, failed = [], []
    for key, runs in groups.items():
        if key[1] == "abc":
            staged = [r for r in runs if "vanilla" in r["train"]]
            if staged:
                costs.append(cost(key, staged))
            failed += failures(key, runs)
    yield "Cost of ABC", costs
    yield "ABC, seeds that failed", failed

def print_row(cells):
    print(f"| {' | '.join(map(str, cells))} |")

def main(argv=None):
    parser = L.Parser(prog="tables", description="Tables of finished runs, in Markdown.")
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_DIR", help="runs, files of records")
    try:
        options = parser.parse_args(argv)
        groups = records.read(options.paths)
    except ValueError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    if not groups:
        return 2
    print("Percent exact by digits: median seed (least-most), exact seeds/seeds, or (Wilson 95%")
    print("interval); s: training and tests.")
    for title, rows in tables(groups):
        if rows:
            print(f"\n### {title}\n")
            print_row(rows[0])
            print_row(["---"] * len(rows[0]))
            for row in rows:
                print_row(row.values())
    return 0

if __name__ == "__main__":
    sys.exit(main())
