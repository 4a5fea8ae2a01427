# SPDX-License-Identifier: MIT
"""Tables of finished runs, in Markdown: python -m results.tables FILE_OR_DIR... [--published]

Arguments are folders of runs and .jsonl files of records. Runs are grouped by task, method and
changed options; of equal group and seed the last counts. Seeds are never pooled.
"""

import dataclasses
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from statistics import mean, median

import torch

import lengen as L

down = lambda share: f"{math.floor(1000 * share) / 10:.1f}"
# Percent at 6 / 10 / 15 / 20 / 50 / 60 digits, of parity at 20 to 200 bits. ABC v2, Tables 1, 3;
# 50 digits, of "abc" and "rpe-k" (quoted from Jelassi) also 15: ABC v1, Tables 1, 3.
ALL, NONE = "100 at each", "100, then 0"
MOST = {"window": ALL, "window-cyclic": ALL, "window-nope": ALL, "abc": ALL}
PUBLISHED = {
    "successor": MOST | {"vanilla": NONE, "rope": NONE, "alibi": "1.3, then 0"},
    "addition": MOST | {"vanilla": NONE, "rope": NONE, "window": NONE, "alibi": "0 at each",
                        "window-nope": "99.95 / 99.81 / 99.84 / 99.76 / 99.35 / 99.35",
                        "rpe-k": "100 / 99.9 / 97.2 / 21.3 / - / -",
                        "abc": "100 / 100 / 99.9 / 99.9 / 99.8 / 99.8"},
    "nx1": MOST | {"vanilla": NONE, "rope": NONE, "window": "100 / 6.0 / 0.19 / 0 / 0 / 0",
                   "window-nope": "99.89 / 99.63 / 99.49 / 99.39 / 98.31 / 98.31"},
    "parity": MOST | {"vanilla": "29.23 / 0.29 / 0 / 0 / - / 0", "abc": "does not interpolate"},
    "parity-label": {"vanilla": "52.0 to 52.6"}}


def query_key(model):
    """Pairs: query and key of every integer, (V, D) each; scores = queries @ keys.T."""
    a, x = model.attention, model.embedding.weight[:model.config.d_vocab]
    return a.q(x).detach(), a.k(x).detach() / a.d_head ** 0.5


def score_patterns(scores):
    """Scores (V, V) -> mean of neighbours less all others; of other odd distances less even."""
    distance = (torch.arange(len(scores))[:, None] - torch.arange(len(scores))).abs()
    near, odd = distance == 1, distance % 2 == 1
    contrast = lambda high, low: float(scores[high].mean() - scores[low].mean())
    return dict(neighbour_gap=contrast(near, ~near), checkerboard=contrast(odd & ~near, ~odd))


def circle_order(vectors):
    """Vectors (V, 2), V >= 6 -> of even and odd integers the rank correlation of angle and value,
    without its sign; the circle is cut at its widest gap."""
    found = []
    for points in (vectors[0::2], vectors[1::2]):
        angle, value = torch.atan2(points[:, 1], points[:, 0]).sort()
        gap = (angle.roll(-1) - angle) % (2 * torch.pi)
        met = torch.stack([value.roll(-1 - int(gap.argmax())), torch.arange(len(value))])
        found.append(abs(float(torch.corrcoef(met.double())[0, 1])))
    return found


# Defaults of options that older records have.
FORMER = dict(base=10, precision="float32", kappa_cross=0.3, kappa_self=0.5, method="nope")


def changed_options(config):
    """Options of a record that are not the defaults, as flags, but for what was tested."""
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in config.items()}
    pick = lambda *names: {name: given[name] for name in names if name in given}
    names = ("task", "model", "preset") + ("method",) * (given["task"] not in L.PAIRS)
    key, first = pick(*names), L.Config(given["task"]).model
    leading = ("size", "width", "n_train", "prime", "finetune")      # others follow from these
    plain, usual = (dataclasses.asdict(L.Config(**key, **more))
                    for more in ({}, pick("lengths", *leading)))
    usual |= FORMER | dict(preset="fast", model=first)
    usual |= {name: plain[name] for name in leading if name in plain}
    text = lambda x: ",".join(map(str, x)) if isinstance(x, tuple) else str(x)
    return " ".join(L.flag(name) + f" {text(x)}" * (x is not True) for name, x in given.items()
                    if name not in ("task", "method", "seed", "lengths", "samples")
                    and x != usual.get(name)) or "-"


def wilson(correct, n, z=1.959964):
    """95% interval of a share (Wilson 1927)."""
    centre, half = correct + z * z / 2, z * math.sqrt(correct * (n - correct) / n + z * z / 4)
    return max(0.0, (centre - half) / (n + z * z)), min(1.0, (centre + half) / (n + z * z))


def read_record(line, folder):
    """A line of JSON -> records with "key" (task, method, changed options), seed and "columns"
    {(digits, set): row}, one more of tests before fine-tuning. Older ones may lack the rest."""
    record, found = dict(train={}, before=None) | json.loads(line), []
    config = dict(method="abc") | record["config"]
    if "source" not in record and config["task"] not in L.TASKS:
        # Older records have tasks of their own for remainders, and --modulus without effect.
        modulus = config.pop("modulus", 100)
        if config["task"].startswith("modular-"):
            config |= dict(task=config["task"].removeprefix("modular-"), modulus=modulus)
    stages = {" (before)": record["before"], "": record["tests"]}
    if record["train"]:
        parts = *record["train"].values(), *filter(None, stages.values())
        record["seconds"] = sum(part["seconds"] for part in parts)
    if config["task"] == "consecutive" and folder and (folder / "checkpoint.pt").exists():
        queries, keys = query_key(L.load(folder)[0])
        record |= score_patterns(queries @ keys.T)
        if queries.shape[1] == 2 and len(queries) >= 6:
            record["circle_order"] = mean(circle_order(queries) + circle_order(keys))
    for stage, rows in [(name, tests["rows"]) for name, tests in stages.items() if tests]:
        columns = {(row["digits"], row.get("set", "random")): row | dict(
            interval=wilson(row["correct"], row["n"])) for row in rows}
        key = config["task"], config["method"], changed_options(config) + stage
        found.append(record | dict(key=key, seed=config["seed"], columns=columns))
    return found


def read(paths):
    """Files and folders -> {key: records}, of each seed the last. Raises: ValueError."""
    groups, order = {}, [task for system in L.SYSTEMS.values() for task in system.tasks]
    for path in map(Path, paths):
        for file in sorted(path.rglob("result.json")) or [path]:
            with L.kept_right(f"a finished run in {str(file)!r}"):
                lines = file.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines or [""], 1):
                with L.kept_right(f"line {number} of {str(file)!r}"):
                    for record in read_record(line, path.is_dir() and file.parent):
                        groups.setdefault(record["key"], {})[record["seed"]] = record
    return {key: [groups[key][seed] for seed in sorted(groups[key])]
            for key in sorted(groups, key=lambda key: order.index(key[0]))}


def span(values, show="{:,.1f}".format):
    """Median (least-most), or the only value; "-" where none is known."""
    values = [x for x in values if x is not None]
    ends = f" ({show(min(values))}-{show(max(values))})" if len(values) > 1 else ""
    return show(median(values)) + ends if values else "-"


def cell(rows):
    """Rows of one column, one a seed -> percent exact."""
    shares = [Fraction(row["correct"], row["n"]) for row in rows]
    if len(rows) == 1:
        return f"{down(shares[0])} ({'-'.join(f'{100 * x:.1f}' for x in rows[0]['interval'])})"
    return span(shares, down) + f", {shares.count(1)}/{len(rows)}" * bool(rows)


def accuracy(key, runs, columns, published):
    """-> cells of one group, {column: cell}."""
    (task, method, change), cells = key, {}
    for digits, name in columns:
        rows = [r["columns"][digits, name] for r in runs if (digits, name) in r["columns"]]
        label = f"{digits} {name}".removesuffix(" random")
        if task == "consecutive":
            label, soft = f"{name}, hard", [mean(x["places"]) for x in rows if x.get("places")]
            cells[f"{name}, soft"] = span([Fraction(round(1e6 * x), 10 ** 6) for x in soft], down)
        cells[label] = cell(rows)
    for name in ("neighbour_gap", "checkerboard", "circle_order") * (task == "consecutive"):
        cells[name.replace("_", " ")] = span([r.get(name) for r in runs], "{:.2f}".format)
    if published:
        cells["papers"] = PUBLISHED.get(task, {}).get(method, "-")
    n = sorted({row["n"] for r in runs for row in r["columns"].values()})
    return {"method": method, "changed": change, **cells, "s": span(r.get("seconds") for r in runs),
            "seeds": ", ".join(str(r["seed"]) for r in runs), "n": ", ".join(f"{x:,}" for x in n)}


def cost(key, runs):
    """-> cells of what the stages of ABC took."""
    stages = [(r["train"]["teacher"], r["train"]["model"]) for r in runs]
    first, again = ([part["seconds"] for part in parts] for parts in zip(*stages))
    steps = dict.fromkeys(f"{a['steps']:,} + {b['steps']:,}" for a, b in stages)
    ratios = [b / a for a, b in zip(first, again) if a]
    return {"task": key[0], "changed": key[2], "seeds": len(runs), "teacher, s": span(first),
            "retraining, s": span(again), "tests, s": span(r["tests"]["seconds"] for r in runs),
            "whole, s": span(r["seconds"] for r in runs), "steps": ", ".join(steps),
            "retraining / teacher": span(ratios, "{:.2f}".format),
            "device": "; ".join(dict.fromkeys(r.get("device", "-") for r in runs))}


def tables(groups, published):
    """-> title and rows {column: cell} of every table."""
    for task in dict.fromkeys(key[0] for key in groups):
        chosen = {key: runs for key, runs in groups.items() if key[0] == task}
        places = {place for runs in chosen.values() for r in runs for place in r["columns"]}
        columns = sorted(places, key=lambda place: (place[1] != "random", place))
        yield task, [accuracy(*item, columns, published) for item in chosen.items()]
    abc = {key: runs for key, runs in groups.items() if L.METHODS[key[1]].calibrated}
    yield "Cost of ABC", [cost(key, staged) for key, runs in abc.items()
                          if (staged := [r for r in runs if "teacher" in r["train"]])]
    yield "ABC, seeds that failed", [
        {"task": key[0], "changed": key[2], "seed": r["seed"], "digits": digits, "set": name,
         "right": f"{row['correct']:,} of {row['n']:,}"} for key, runs in abc.items() for r in runs
        for (digits, name), row in r["columns"].items() if row["correct"] < row["n"]]


def main(argv=None):
    parser = L.Parser(prog="tables", description="Tables of finished runs, in Markdown.")
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_DIR", help="runs, files of records")
    parser.add_argument("--published", action="store_true", help="with the papers' percentages")
    try:
        options = parser.parse_args(argv)
        groups = read(options.paths)
    except ValueError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    print("Percent exact by digits: median seed (least-most), exact seeds/seeds, or (Wilson 95%\n"
          "interval); s: training and tests."
          + " Papers: at 6 / 10 / 15 / 20 / 50 / 60 digits." * options.published)
    for title, rows in tables(groups, options.published):
        if rows:
            lines = [rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)]
            print(f"\n### {title}\n", *(f"| {' | '.join(map(str, x))} |" for x in lines), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
