# SPDX-License-Identifier: MIT
"""The tables of README.md that hold measured numbers, made from the records beside this file.

python -m results.claims           # compare; exit code 1 where README says something else
python -m results.claims --write   # put them into README
"""

import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
TASKS = {"successor": "successor, n + 1", "addition": "addition, a + b",
         "nx1": "nx1, a times one digit", "parity": "parity, bit by bit"}


def records(file, **config):
    """Records of a file whose config has these values. Raises: ValueError when there is none."""
    lines = (HERE / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    found = [r for r in map(json.loads, lines)
             if all(r["config"].get(name) == x for name, x in config.items())]
    if not found:
        raise ValueError(f"{file}.jsonl has no record of {config}")
    return found


def shares(runs, digits, name="random", stage="tests"):
    """Percent exact of each run that was tested so."""
    rows = [row for r in runs for row in r[stage]["rows"]
            if (row["digits"], row.get("set", "random")) == (digits, name)]
    return [100 * Fraction(row["correct"], row["n"]) for row in rows]


def span(values):
    """Median (least - most), rounded down to a decimal, or the one value that all have."""
    down = lambda x: f"{math.floor(10 * x) / 10:g}"
    ends = f" ({down(min(values))} - {down(max(values))})" if min(values) < max(values) else ""
    return down(median(values)) + ends


class Row:
    """A claim: what was claimed, by whom, and what came out, in a template whose fields are
    filled in turn: (digits, config) is a share, a function is called."""

    def __init__(self, claim, source, here, file, *fields, old=False, **common):
        self.start, self.here, self.old = f"| {claim} | {source} |", here, old
        self.file, self.fields, self.common = file, fields, common

    def __str__(self):
        cells, seeds = [], {}
        for field in self.fields:
            digits, config = field[0], dict(field[1] if len(field) > 1 else {})
            place = dict(name=config.pop("set", "random"), stage=config.pop("stage", "tests"))
            found = shares(records(self.file, **self.common | config), digits, **place)
            seeds[len(found)] = None
            cells.append(span(found))
        mark = "* " if self.old else ""
        return f"{self.start} {mark}{self.here.format(*cells)} ({', '.join(map(str, seeds))}) |"


def main_table():
    """ABC: a row a task, a column a length."""
    columns = [(6, "random"), (10, "random"), (20, "random"), (60, "random"), (1000, "random"),
               (60, "hard")]
    heads = [f"{n:,}" if name == "random" else f"{name}, {n}" for n, name in columns]
    yield f"| task | {' | '.join(heads)} | seeds exact in every column |"
    yield "|" + "---|" * 8
    for task, title in TASKS.items():
        runs = records("abc", task=task)
        exact = sum(all(row["correct"] == row["n"] for row in r["tests"]["rows"]) for r in runs)
        cells = [span(shares(runs, *column)) for column in columns]
        yield f"| {title} | {' | '.join(cells)} | {exact} of {len(runs)} |"


def ratios():
    """Seconds of retraining over those of interpolation: least and most of the tasks' medians."""
    medians = []
    for task in TASKS:
        parts = [r["train"] for r in records("abc", task=task)]
        medians.append(median(p["model"]["seconds"] / p["teacher"]["seconds"] for p in parts))
    return f"{min(medians):.1f} to {max(medians):.1f}"


def claims():
    """-> the rows of the table of claims."""
    modular = dict(task="modular-addition", method="rpe-kq", optimizer="muon", steps=2200)
    digit = dict(task="multiplication", model="universal", method="rpe-k", second_digits=1,
                 width=9, steps=6000, n_train=5000, lr=0.002, dropout=0.0)
    head = dict(d_vocab=16, d_head=32, plant=0.0, steps=10_000)
    plain = dict(width=None, n_layer=None)
    yield "| claim | source | here |"
    yield "|---|---|---|"
    yield Row("ABC: 100 / 99.8 / 100 at 60 digits", "v2 Table 3",
              "{} / {} / {} at 60, {} / {} / {} at 1,000", "abc",
              *((n, dict(task=task)) for n in (60, 1000) for task in list(TASKS)[:3]))
    yield Row("parity is not interpolated even with a scratchpad, so ABC does not apply",
              "v2 Table 2, Sec. 4", "it is, and ABC has {} at 200 bits", "abc", (200,),
              task="parity")
    yield (f"| retraining takes 1/100 to 1/10 of interpolation | v2 App. D.1 | {ratios()} times "
           f"({len(records('abc', task='nx1'))}) |")
    yield Row("`vanilla`: 100 at 6, 0 at 10; parity 29 at 6, 20 bits",
              "v2 Table 1", "{} / {} / {} at 6, {} / {} / {} at 10; parity {} at 20 bits, {} at 60",
              "methods", *((n, dict(task=task)) for n in (6, 10) for task in list(TASKS)[:3]),
              (20, dict(task="parity")), (60, dict(task="parity")), method="vanilla", **plain)
    deep, sixty = dict(n_encoder=1, n_layer=6), [(60, dict(task=task)) for task in TASKS]
    yield Row("`window-cyclic`: 100 at 60, parity, too", "v2 Table 1",
              "{} / {} / {}; parity {} at 60 bits; by 1 + 6 layers addition {}", "methods",
              *((n, config | dict(n_layer=None)) for n, config in sixty),
              (60, deep | dict(task="addition")), method="window-cyclic")
    yield Row("`window-nope`: 100 / 99.4 / 98.3 at 60, parity 100", "v2 Table 1",
              "by 1 + 6 layers {} / {} / {}; parity {} at 60 bits",
              "methods", *sixty, method="window-nope", **deep)
    fast = dict(preset="fast", width=None, steps=1500, n_layer=None)
    size = dict(preset="paper", n_layer=None, n_encoder=None, optimizer="muon")
    successor, parity = dict(task="successor"), dict(task="parity")
    yield Row("`window`: 100 at 60 on successor, parity", "v2 Table 1",
              "{} at 10, {} at 20; parity {} at 60 bits; `--preset paper` by Muon {}, parity {}",
              "methods",
              (10, fast | successor), (20, fast | successor), (60, fast | parity),
              (60, size | successor | dict(steps=300)), (60, size | parity | dict(steps=200)),
              method="window")
    yield Row("ABC by its own rules, at width 61", "v1 Sec. 5, v2 App. D", "{} / {} / {} at 60",
              "methods", (60, dict(task="successor", steps=1000)),
              (60, dict(task="addition", steps=2000)), (60, dict(task="nx1", steps=2000)),
              method="abc", rules="paper", width=61, n_head=8)
    two = [dict(task="successor"), dict(task="addition")]
    yield Row("RoPE: 100 / 100 at 6, 0 / 0 at 10", "v2 Table 1, App. C.2",
              "{} / {} at 6, {} / {} at 10 with 1 + 6 layers; one of width 64 learns no addition",
              "methods", *((n, config) for n in (6, 10) for config in two), method="rope", **deep)
    yield Row("ALiBi: 1.3 / 0 at 6", "v2 Table 1", "`alibi` {} / {}, with 1 + 6 layers {} / {}, "
              "at 10 {} / {}; the authors' `alibi-decoder` {} / {}, at 10 {} / {}", "methods",
              *((n, config | dict(method=method, n_layer=None) | more) for n, method, more in (
                  (6, "alibi", {}), (6, "alibi", deep), (10, "alibi", deep),
                  (6, "alibi-decoder", {}), (10, "alibi-decoder", {})) for config in two))
    yield Row("element-wise sums by `rpe-k`: 90.5 / 86.2 / 78.1 at 10 / 15 / 20",
              "Jelassi, Table 6", "{} / {} / {}; {} at 5", "encoders", (10,), (15,), (20,), (5,),
              task="elementwise-addition", method="rpe-k", width=22, lr=0.002, even=None)
    yield Row("sums modulo 100 by `rpe-kq`: 100 at 10; 101 and 128 are not learned",
              "Jelassi, Sec. 4", "`encoder`: {} at 10, {} at 5; 101 and 128: {} and {}", "encoders",
              (10, dict(modulus=None)), (5, dict(modulus=None)), (5, dict(modulus=101)),
              (5, dict(modulus=128)), **modular)
    yield Row("35 x 3 digits with 50 primed of 5,000", "Jelassi, Sec. 5.2", "n x 3 not learned; * "
              "n x 1: {} at 7 with 500, {} without", "encoders",
              (7, dict(prime=500, prime_lengths=[7])), (7, dict(finetune=500, stage="before")),
              **digit)
    yield Row("priming helps at the primed length alone", "Jelassi, Sec. 5.3",
              "n x 1, 500 primed with 20: {} at 10, {} at 20, {} at 21", "encoders", (10,), (20,),
              (21,), old=True, prime=500, prime_lengths=[20], **digit | dict(width=22))
    yield Row("fine-tuning needs 1,000 examples and forgets", "Jelassi, Sec. 5.1",
              "n x 1: {} at 7 with 1,000; {} of {} left at 5", "encoders",
              (7, dict(finetune=1000)), (5, dict(finetune=1000)),
              (5, dict(finetune=1000, stage="before")), old=True, **digit)
    yield Row("a head finds consecutive integers once there is a dummy", "Pairs, Obs. 1 and 2",
              "{} without, {} with", "pairs", (5, dict(dummy=False)),
              (5, dict(dummy=True)), **head)
    yield "| full-size runs at the papers' rates | all | **not run**: needs a GPU |"


def check(write):
    """-> what README says otherwise; nothing when it is written there."""
    text, wrong = README.read_text(encoding="utf-8"), []
    for name, rows in (("abc", main_table()), ("claims", claims())):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        old, after = rest.split(end)
        new = "".join(f"{row}\n" for row in rows)
        wrong += [line for line in old.splitlines() if line not in new.splitlines()]
        wrong += [f"missing: {line}" for line in new.splitlines() if line not in old.splitlines()]
        text = before + start + new + end + after
    if write:
        README.write_text(text, encoding="utf-8")
    return [] if write else wrong


def main(argv=None):
    options = sys.argv[1:] if argv is None else argv
    if options not in ([], ["--write"]):
        print("claims: the only option is --write", file=sys.stderr)
        return 2
    wrong = check(bool(options))
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
