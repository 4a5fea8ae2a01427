# SPDX-License-Identifier: MIT
"""Position schemes side by side: one architecture, the same data, steps and seeds.

python -m results.scheme_runs          # run what has no record yet (JOBS=2: two at a time)
python -m results.scheme_runs --table  # print the tables

Rates are chosen on held-out training numbers, for each scheme from the same three, by seed 100
alone, which is in no table. The four schemes that carry furthest on seeds 0 to 2 are run again on
seeds 3 to 5: with an encoder layer and six decoder layers, and at nine widths. ABC has the recipe
of its own, whose rates and steps were chosen on held-out training numbers, too.
"""

import dataclasses
import json
import multiprocessing
import os
import sys
from pathlib import Path
from statistics import median

import torch

import lengen as L
from results.schemes import SCHEMES
from results.shares import parse, percents, span

RECORDS = Path(__file__).parent / "schemes.jsonl"
STEPS = {"successor": 1500, "addition": 3000}
RATES = (2e-3, 4e-3, 8e-3)
OTHERS = ("vanilla", "nope", "alibi", "rope", "rpe-k")  # of the file itself, on the same terms
SEEDS, FRESH_SEEDS = (0, 1, 2), (3, 4, 5)
LENGTHS = (6, 10, 20, 60)
DEEP = dict(n_encoder=1, n_layer=6)

def job(method, task, seed, lr, lengths=LENGTHS, **more):
    """Options of a run. n_width: widths to train at, in place of the method's."""
    return dict(method=method, task=task, seed=seed, lr=lr, steps=STEPS[task], lengths=lengths,
                **more)

def numbers(config):
    """-> how many numbers a model learns."""
    return sum(weight.numel() for weight in L.Transformer(config).parameters())

def execute(options):
    """-> the record of a run, with the numbers that its scheme learns."""
    torch.set_num_threads(1)
    given = dict(options)
    n_width = given.pop("n_width", 0)
    if n_width:
        method = L.METHODS[given["method"]]
        L.METHODS[given["method"]] = method._replace(n_width=n_width)
    config = L.Config(**given)
    run, learn = L.Run(config), L.learn_abc if config.method == "abc" else L.learn_method
    model, proof = learn(run)
    run.keep("proof", proof)
    run.keep("tests", L.evaluate(model, config))
    learned = numbers(config) - numbers(dataclasses.replace(config, method="nope"))
    return L.make_record(run) | dict(config=options, learned=learned)

def read():
    """Records by their options."""
    found = {}
    if RECORDS.exists():
        for line in RECORDS.read_text(encoding="utf-8").splitlines():
            kept = parse(line)
            found[json.dumps(kept["config"])] = kept
    return found

def finish(jobs):
    """Run those that have no record."""
    done = read()
    missing = [options for options in jobs if json.dumps(options) not in done]
    with multiprocessing.Pool(int(os.environ.get("JOBS", 1)), maxtasksperchild=1) as pool:
        for kept in pool.imap_unordered(execute, missing):
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept) + "\n")
            print(kept["config"], held_out(kept), flush=True)
    return read()

def held_out(kept):
    """-> share of held-out training numbers that are exact at the end, and minus the loss."""
    step, loss, share = kept["train"]["model"]["curve"][-1]
    return share, -loss

def best_rate(found, method, task):
    """-> the rate with most held-out numbers right at seed 100; of equal ones the lowest loss."""
    def came_to(lr):
        return held_out(found[json.dumps(job(method, task, 100, lr, (6,)))])
    return max(RATES, key=came_to)

def variant(kept):
    """-> what a run has other than one layer and its method's widths, in words."""
    if "n_layer" in kept["config"]:
        return "1 + 6 layers"
    return "nine widths" if "n_width" in kept["config"] else "one layer"

def groups(found):
    """-> tested runs by (variant, task, method)."""
    parted = {}
    for kept in found.values():
        options = kept["config"]
        if options["seed"] in SEEDS + FRESH_SEEDS:
            key = variant(kept), options["task"], options["method"]
            parted.setdefault(key, []).append(kept)
    return parted

# What a table shows: digits of each task. Of sums of 60 digits none but ABC has 1% right.
SHOWN = {"successor": (6, 10, 20, 60), "addition": (6, 10, 20)}

def row(variant, method, parted):
    """-> a row of a table: a scheme, how many numbers it learns, percent exact."""
    cells = []
    for task, lengths in SHOWN.items():
        runs = parted[variant, task, method]
        cells += [span(percents(runs, n)) for n in lengths]
    return f"| {method} | {runs[0]['learned']:,} | {' | '.join(cells)} |"

def learned(parted, name, method):
    """-> whether a scheme has 99% of 6 digits of some task, the median seed."""
    shares = []
    for task in SHOWN:
        shares.append(median(percents(parted[name, task, method], 6)))
    return max(shares) >= 99

def table(found, variants=("one layer", "1 + 6 layers", "nine widths")):
    """-> lines: a row a variant and method, and which methods learned neither task."""
    parted = groups(found)
    for name in variants:
        yield f"\n{name}:\n"
        yield "| scheme | learned numbers | n + 1: 6 | 10 | 20 | 60 | a + b: 6 | 10 | 20 |"
        yield "|" + "---|" * 9
        failed = []
        for method in sorted({method for variant, _, method in parted if variant == name}):
            if learned(parted, name, method):
                yield row(name, method, parted)
            else:
                failed.append(method)
        if failed:
            yield f"\nBelow 99 at 6 digits of both, the median seed: {', '.join(failed)}."

def furthest(found):
    """-> the four schemes with most right at 10 and 20 digits of both tasks, the median seed; where
    these are equal, at 60."""
    parted = groups(found)

    def reach(method):
        shares = []
        for n in 10, 20, 60:
            for task in STEPS:
                shares.append(median(percents(parted["one layer", task, method], n)))
        return sum(shares[:4]), sum(shares[4:])

    return sorted([*SCHEMES, *OTHERS], key=reach)[-4:]

def main(argv):
    if argv == ["--table"]:
        print("\n".join(table(read())))
        return 0
    if argv:
        print("scheme_runs: the only option is --table", file=sys.stderr)
        return 2
    pairs = [(method, task) for task in STEPS for method in (*SCHEMES, *OTHERS)]
    found = finish([job(*pair, 100, lr, (6,)) for pair in pairs for lr in RATES])
    rates = {pair: best_rate(found, *pair) for pair in pairs}
    jobs = [job(*pair, seed, rates[pair]) for seed in SEEDS for pair in pairs]
    jobs += [dict(method="abc", task=task, seed=seed, lengths=LENGTHS)
             for seed in SEEDS + FRESH_SEEDS for task in STEPS]
    found = finish(jobs)
    chosen = [(method, task) for task in STEPS for method in furthest(found)]
    jobs = [job(*pair, seed, rates[pair], n_width=9) for seed in FRESH_SEEDS for pair in chosen]
    jobs += [job(*pair, seed, rates[pair], **DEEP) for seed in FRESH_SEEDS for pair in chosen]
    finish(jobs)
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
