# SPDX-License-Identifier: MIT
"""ABC on tasks that nobody chose: python -m results.machines --seed N OPTION... learns machine N.

A machine is drawn at random: one or two numbers in base 2 to 4, two or three rests, and a table of
totals for each rest and column of digits. The last rest is dropped. Its record also says whether a
window of finitely many places can determine the answers at all, and why a run was refused.
"""

import json
import random
import sys
from itertools import product

import torch

import lengen as L

class Total:
    """The total of a place, looked up in a table (rests, columns)."""
    def __init__(self, base, table):
        self.base, self.table = base, torch.tensor(table)

    def __call__(self, rest, *digits):
        column = torch.zeros_like(rest)
        for digit in digits:
            column = column * self.base + digit
        return self.table[rest, column]

def draw(number):
    """-> the task of this number."""
    rng = random.Random(f"machine {number}")
    base, operands = rng.randint(2, 4), rng.randint(1, 2)
    rests = rng.randint(2, 3)
    table = []
    for _ in range(rests):
        table.append([rng.randrange(base * rests) for _ in range(base ** operands)])
    about = f"{operands} numbers in base {base}, {rests} rests"
    numbers = ("number",) * operands
    return L.Task(about, Total(base, table), numbers, "+", base, headroom=0)

def has_finite_window(task):
    """Do the digits and tokens of finitely many places determine each token? Not if two rests can
    stay different forever, by columns that write the same tokens, before they make a difference."""
    machine = L.Machine(task)
    token, after = machine.token, machine.after  # (R, C)
    R, C = token.shape
    follows = torch.zeros(R * R, R * R)  # pairs of different rests
    for a, b, c in product(range(R), range(R), range(C)):
        same_token = token[a, c] == token[b, c]
        if a != b and same_token and after[a, c] != after[b, c]:
            follows[a * R + b, after[a, c] * R + after[b, c]] = 1
    paths = follows
    for _ in range(R * R):
        paths = (paths + paths @ follows).clamp(max=1)
    differ = (token[:, None] != token).any(2).flatten()
    return not (paths.diagonal().bool() & paths[:, differ].any(1)).any()

def main(argv):
    parser = L.Parser(add_help=False)
    parser.add_argument("--seed", nargs="?", default="0")  # L.main reports a missing one
    seed = parser.parse_known_args(argv)[0].seed
    name, make_record, fail = f"machine-{seed}", L.make_record, L.fail
    L.TASKS[name] = task = draw(seed)
    more = dict(about=task.about, finite=has_finite_window(task))
    L.make_record = lambda run, tests: make_record(run, tests) | more

    def record_failure(error, code):
        if code != 1:
            return fail(error, code)
        config = dict(task=name, seed=int(seed))
        print(json.dumps(dict(config=config, failed=str(error), **more)))
        return 0

    L.fail = record_failure
    return L.main(["--task", name, *argv])

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
