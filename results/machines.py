# SPDX-License-Identifier: MIT
"""ABC on tasks that nobody chose: python -m results.machines --seed N OPTION... learns machine N.

A machine is drawn at random: one or two numbers in base 2 to 4, two or three carries, and a table
of totals for each carry and column of digits. The final carry is dropped. With --msd, other
machines are drawn, which read numbers from the most significant digit on. A record also says
whether a window of finitely many places can determine the answers at all, and why a run was
refused."""

import json
import random
import sys
from itertools import permutations, product

import torch

sys.path.append(sys.path[0] + "/..")  # for a start as a file
import lengen as L

def draw(name, msd_first):
    """-> the task of this name."""
    rng = random.Random(name)
    base, operands = rng.randint(2, 4), rng.randint(1, 2)
    carries = rng.randint(2, 3)
    table = []
    for _ in range(carries):
        table.append([rng.randrange(base * carries) for _ in range(base ** operands)])
    totals = torch.tensor(table)

    def total(carry, *digits):
        column = torch.zeros_like(carry)
        for digit in digits:
            column = column * base + digit
        return totals[carry, column]

    about = f"{operands} numbers in base {base}, {carries} carries"
    return L.Task(about, total, ("number",) * operands, "+", base, headroom=0,
                  msd_first=msd_first)

def has_finite_window(task):
    """Do the digits and tokens of finitely many places determine each token? Not if two carries can
    stay different forever, by columns that write the same tokens, before they make a difference."""
    table = L.follow_carries(task, ())
    reached, differ = {}, set()  # of pairs of different carries
    for pair in permutations(table, 2):
        reached[pair] = set()
        for (_, token, after), (_, other, other_after) in zip(*map(table.get, pair)):
            if token != other:
                differ.add(pair)
            elif after != other_after:
                reached[pair].add((after, other_after))
    for middle, pair in product(reached, repeat=2):
        if middle in reached[pair]:
            reached[pair] |= reached[middle]
    return not any(pair in later and later & differ for pair, later in reached.items())

def main(argv):
    parser = L.Parser(add_help=False)
    parser.add_argument("--seed", nargs="?", default="0")  # L.main reports a missing one
    parser.add_argument("--msd", action="store_true")
    given, argv = parser.parse_known_args(argv)
    seed = (given.seed or "").lstrip("0") or "0"  # --seed 05 is --seed 5
    name = f"msd machine {seed}" if given.msd else f"machine {seed}"
    task = draw(name, given.msd)
    name, make_record, fail = name.replace(" ", "-"), L.make_record, L.fail
    L.TASKS[name] = task
    more = dict(about=task.about, finite=has_finite_window(task))
    L.make_record = lambda run, tests: make_record(run, tests) | more

    def record_failure(error, code):
        if code != 1:
            return fail(error, code)
        config = dict(task=name, seed=int(seed))
        print(json.dumps(dict(config=config, failed=str(error), **more)))
        return 0

    L.fail = record_failure
    return L.main(["--task", name, "--seed", given.seed or "", *argv])

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
