# SPDX-License-Identifier: MIT
"""ABC on tasks that nobody chose: python -m results.machines --seed N OPTION... learns machine N.

A machine is drawn at random: one or two numbers in base 2 to 4, two or three carries, and a table
of totals for each carry and column of digits. The final carry is dropped. With --msd, other
machines are drawn, which read numbers from the most significant digit on. A record also says
whether a window of finitely many places can determine the answers at all, and why a run was
refused."""

import contextlib
import io
import json
import random
import sys
from itertools import permutations, product

import torch

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
    table, _ = L.follow_places(task, 0)
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
    """As of lengen.py, but a run that fails has a record, too, and exit code 0."""
    parser = L.make_parser()
    parser.add_argument("--msd", action="store_true")
    given = vars(parser.parse_args(argv))
    out, msd, as_json, device, quiet, source, questions = map(
        given.pop, ("out", "msd", "json", "device", "quiet", "from", "ask"))
    seed = given.get("seed", "0")
    if not seed.isdecimal() or source or questions:
        parser.error("--seed takes a number, and there is no --from or --ask")
    name = f"msd machine {int(seed)}" if msd else f"machine {int(seed)}"
    task = draw(name, msd)
    given["task"] = name.replace(" ", "-")
    L.TASKS[given["task"]] = task
    more = dict(about=task.about, finite=has_finite_window(task))
    try:
        run = L.make_run(given, out=out, device=device)
        with contextlib.redirect_stdout(io.StringIO() if as_json else sys.stdout):
            record = L.execute(run)
    except L.RunFailed as error:
        record = dict(config=dict(task=given["task"], seed=int(seed)), failed=str(error))
    except (L.BadInput, OSError) as error:
        print(f"machines: {error}", file=sys.stderr)
        return 2
    print(json.dumps(record | more) if as_json else f"{task.about}: {more}")
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
