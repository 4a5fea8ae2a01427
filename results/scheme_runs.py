# SPDX-License-Identifier: MIT
"""Position schemes side by side: one architecture, the same data, steps and seeds.

python -m results.scheme_runs          # run what has no record yet (JOBS=2: two at a time)
python -m results.scheme_runs --table  # print the tables

Rates are chosen on held-out training numbers, for each scheme from the same three, by seed 100
alone, which is not tested.
"""

import json
import math
import multiprocessing
import os
import sys
from pathlib import Path
from statistics import median

import torch
import torch.nn as nn

import lengen as L
from results.schemes import SCHEMES

RECORDS = Path(__file__).parent / "schemes.jsonl"
STEPS = {"successor": 1500, "addition": 3000}
RATES = (2e-3, 4e-3, 8e-3)
OTHERS = ("vanilla", "nope", "alibi", "rope", "rpe-k")  # of the file itself, on the same terms
SEEDS = (0, 1, 2)

def job(method, task, seed, lr, lengths=(6, 10, 20, 60)):
    """Options of a run."""
    return dict(method=method, task=task, seed=seed, lr=lr, steps=STEPS[task], lengths=lengths)

def execute(options):
    """-> the record of a run, with the numbers that its scheme learns."""
    torch.set_num_threads(1)
    config = L.Config(**options)
    run = L.Run(config)
    L.learn(run)
    model = L.build(config, run.parts)
    learned = 0
    for part in model.position, model.bias:
        if isinstance(part, nn.Module):
            learned += sum(weight.numel() for weight in part.parameters())
    return dict(options=options, learned=learned, record=L.make_record(run))

def read():
    """Records by their options."""
    found = {}
    if RECORDS.exists():
        for line in RECORDS.read_text(encoding="utf-8").splitlines():
            kept = json.loads(line)
            found[json.dumps(kept["options"])] = kept
    return found

def finish(jobs):
    """Run those that have no record."""
    done = read()
    missing = [options for options in jobs if json.dumps(options) not in done]
    with multiprocessing.Pool(int(os.environ.get("JOBS", 1)), maxtasksperchild=1) as pool:
        for kept in pool.imap_unordered(execute, missing):
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept) + "\n")
            print(line_of([kept]), flush=True)
    return read()

def held_out(kept):
    """-> share of held-out training numbers that are exact at the end, and minus the loss."""
    step, loss, share = kept["record"]["train"]["model"]["curve"][-1]
    return share, -loss

def best_rate(found, method, task):
    """-> the rate with most held-out numbers right at seed 100; of equal ones the lowest loss."""
    def came_to(lr):
        return held_out(found[json.dumps(job(method, task, 100, lr, (6,)))])
    return max(RATES, key=came_to)

def exact(kept, digits):
    """-> percent of random questions."""
    for row in kept["record"]["tests"]["rows"]:
        if (row["digits"], row["set"]) == (digits, "random"):
            return 100 * row["correct"] / row["n"]

def span(values):
    """-> median (least - most), rounded down."""
    ends = min(values), median(values), max(values)
    low, middle, high = (math.floor(10 * x) / 10 for x in ends)
    return f"{middle:g}" if low == high else f"{middle:g} ({low:g} - {high:g})"

def line_of(group):
    """-> a row of a table, of runs that differ in their seeds."""
    options, steps = group[0]["options"], group[0]["record"]["train"]["model"]["steps"]
    cells = [span([100 * held_out(kept)[0] for kept in group])]
    cells += [span([exact(kept, n) for kept in group]) for n in options["lengths"]]
    seconds = median(kept["record"]["train"]["model"]["seconds"] for kept in group)
    return (f"| {options['task']} | {options['method']} | {group[0]['learned']:,} | "
            f"{options['lr']:g} | {' | '.join(cells)} | {steps:,} | {seconds:.0f} | {len(group)} |")

def table(found):
    """-> lines: a row a task and method; the seeds that were tested."""
    yield ("| task | scheme | learned numbers | rate | held-out | 6 | 10 | 20 | 60 | steps | "
           "seconds | seeds |")
    yield "|" + "---|" * 12
    groups = {}
    for kept in found.values():
        options = kept["options"]
        if options["seed"] in SEEDS:
            groups.setdefault((options["task"], options["method"]), []).append(kept)
    for task, method in sorted(groups):
        yield line_of(groups[task, method])

def main(argv):
    if argv == ["--table"]:
        print("\n".join(table(read())))
        return 0
    if argv:
        print("scheme_runs: the only option is --table", file=sys.stderr)
        return 2
    pairs = [(method, task) for task in STEPS for method in (*SCHEMES, *OTHERS)]
    found = finish([job(*pair, 100, lr, (6,)) for pair in pairs for lr in RATES])
    finish([job(*pair, seed, best_rate(found, *pair)) for seed in SEEDS for pair in pairs])
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
