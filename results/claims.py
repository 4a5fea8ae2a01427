# SPDX-License-Identifier: MIT
"""The measured numbers of README.md, made from the records beside this file.

python -m results.claims           # compare; exit code 1 where README says something else
python -m results.claims --write   # put the tables into README
"""

import json
import math
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
TASKS = {"successor": "successor, n + 1", "addition": "addition, a + b",
         "nx1": "nx1, a times one digit", "parity": "parity, bit by bit"}


def read(file):
    return [*map(json.loads, (HERE / f"{file}.jsonl").read_text(encoding="utf-8").splitlines())]


def records(file, **config):
    """Records of a file whose config has these values. Raises: ValueError when there is none."""
    found = [r for r in read(file) if all(r["config"].get(x) == config[x] for x in config)]
    if not found:
        raise ValueError(f"{file}.jsonl has no record of {config}")
    return found


def percents(runs, digits, name="random", stage="tests"):
    """Percent exact of each run that was tested so."""
    rows = [row for r in runs for row in r[stage]["rows"]
            if (row["digits"], row.get("set", "random")) == (digits, name)]
    return [100 * Fraction(row["correct"], row["n"]) for row in rows]


def share(file, digits, stage="tests", **config):
    """Percent exact of each record of a file whose config has these values."""
    return percents(records(file, **config), digits, stage=stage)


def all_right(run):
    return all(row["correct"] == row["n"] for row in run["tests"]["rows"])


def span(values):
    """Median (least - most), rounded down to a decimal, or the one value that all have."""
    down = lambda x: f"{math.floor(10 * x) / 10:g}"
    ends = f" ({down(min(values))} - {down(max(values))})" if min(values) < max(values) else ""
    return down(median(values)) + ends


def row(claim, source, here, *shares):
    """A claim, its source, and what came out: `here` with a field for each list of shares."""
    seeds = ", ".join(dict.fromkeys(str(len(values)) for values in shares))
    return f"| {claim} | {source} | {here.format(*map(span, shares))} ({seeds}) |"


def proved(runs):
    """How many of these runs are proved exact."""
    return sum(r["proof"]["proved"] for r in runs)


def most_common(values):
    return f"{max(values, key=values.count):,}"


def main_table():
    """ABC: a row a task, a column a length, what the proof took."""
    columns = [*((n, "random") for n in (6, 20, 60, 1000)), (60, "hard")]
    heads = [f"{n:,}" if name == "random" else f"{name}, {n}" for n, name in columns]
    yield f"| task | {' | '.join(heads)} | proved exact | windows | retraining steps |"
    yield "|" + "---|" * 9
    for task, title in TASKS.items():
        runs = records("abc", task=task)
        cells = [span(percents(runs, *column)) for column in columns]
        windows = most_common([r["proof"]["windows"] for r in runs])
        steps = span([r["train"]["model"]["steps"] for r in runs])
        yield (f"| {title} | {' | '.join(cells)} | {proved(runs)} of {len(runs)} seeds | "
               f"{windows} | {steps} |")


def claims_of_abc():
    """-> rows of the table of claims, from "Attention Bias Calibration" (v1 and v2)."""
    yield from ("| claim | source | here |", "|---|---|---|")
    by, sums, four = partial(share, "methods"), ("successor", "addition"), tuple(TASKS)
    flat = dict(n_layer=None, width=None, preset="fast")
    deep = dict(n_encoder=1, n_layer=6)
    yield row("ABC: 100 / 99.8 / 100 at 60", "v2 Table 3", "{} / {} / {}, at 1,000 {} / {} / {}",
              *(share("abc", n, task=task) for n in (60, 1000) for task in four[:3]))
    runs = read("abc")
    yield (f"| ABC generalizes to any length | v1, v2 | {proved(runs)} of {len(runs)} runs are "
           "proved exact at every length |")
    yield row("parity is not interpolated, so no ABC", "v2 Table 2, Sec. 4",
              "ABC has {} at 1,000 bits", share("abc", 1000, task="parity"))
    parts = [[r["train"] for r in records("abc", task=task)] for task in four]
    ratio = [median(p["model"]["seconds"] / p["teacher"]["seconds"] for p in x) for x in parts]
    yield ("| retraining takes 1/100 to 1/10 of the first training's time | v2 App. D.1 | "
           f"{min(ratio):.1f} to {max(ratio):.1f} ({len(parts[0])}) |")
    vanilla = partial(by, method="vanilla", **flat)
    yield row("`vanilla`: 100 at 6, 0 at 10; parity 29 at 6", "v2 Table 1",
              "{} / {} / {}, {} / {} / {}; parity {} at 20 bits, {} at 60",
              *(vanilla(n, task=task) for n in (6, 10) for task in four[:3]),
              vanilla(20, task="parity"), vanilla(60, task="parity"))
    cyclic = partial(by, 60, method="window-cyclic")
    yield row("`window-cyclic`: 100 at 60", "v2 Table 1",
              "{} / {} / {} / {}; addition by 1 + 6: {}",
              *(cyclic(task=task, **flat) for task in four), cyclic(task="addition", **deep))
    yield row("`window-nope`: 100 / 99.4 / 98.3 / 100 at 60", "v2 Table 1",
              "1 + 6: {} / {} / {} / {}",
              *(by(60, method="window-nope", task=task, **deep) for task in four))
    paper = dict(preset="paper", optimizer="muon", n_encoder=None)
    window = partial(by, 60, method="window", n_layer=None)
    plain, steps = flat | dict(steps=1500), (("successor", 300), ("parity", 200))
    yield row("`window`: 100 / 0 / 0 / 100 at 60", "v2 Table 1",
              "{} / {} / {} / {}; `--preset paper` by Muon: successor {}, parity {}",
              *(window(task=task, **plain) for task in four),
              *(window(task=task, steps=n, **paper) for task, n in steps))
    rules = partial(by, 60, method="abc", rules="paper", width=61, n_head=8)
    yield row("ABC, `--rules paper`, width 61", "v1 Sec. 5, v2 App. D", "{} / {} / {} at 60",
              *(rules(task=task, steps=n) for task, n in zip(four, (1000, 2000, 2000))))
    yield row("RoPE: 100 / 100 at 6, 0 / 0 at 10", "v2 Table 1, App. C.2",
              "1 + 6: {} / {}, {} / {}",
              *(by(n, method="rope", task=task, **deep) for n in (6, 10) for task in sums))
    alibi = [partial(by, method="alibi", **deep), partial(by, method="alibi-decoder", **flat)]
    yield row("ALiBi: 1.3 / 0 at 6", "v2 Table 1",
              "1 + 6: {} / {}, at 10 {} / {}; authors' `alibi-decoder`: {} / {}, at 10 {} / {}",
              *(kind(n, task=task) for kind in alibi for n in (6, 10) for task in sums))


def claims_of_others():
    """-> rows of the table of claims, from Jelassi et al. and the pairs."""
    sums = partial(share, "encoders", task="addition", model="universal")
    far, ape = dict(method="rpe-k", steps=21_000, width=14), dict(method="ape", steps=4000)
    yield row("sums, `rpe-k`: 92.1 to 100 at 6, 70.6 to 99.9 at 10; `ape`: 2 to 3.1 at 6",
              "Jelassi, Table 1", "* {}, {}; {}", sums(6, **far), sums(10, **far), sums(6, **ape))
    places = partial(share, "encoders", task="elementwise-addition", method="rpe-k", width=22,
                     lr=0.002, even=None)
    yield row("element-wise sums, `rpe-k`: 100 / 90.5 / 86.2 / 78.1 at 5 / 10 / 15 / 20",
              "Jelassi, Table 6", "{} / {} / {} / {}: unequal lengths are not learned",
              *map(places, (5, 10, 15, 20)))
    modular = partial(share, "encoders", task="modular-addition", optimizer="muon", steps=2200)
    yield row("sums modulo 100, `rpe-kq`: 100 at 10; modulo 101, 128 not learned",
              "Jelassi, Sec. 4", "`encoder`: {}, at 5 {}; 101, 128: {}, {}",
              modular(10, modulus=None), *(modular(5, modulus=m) for m in (None, 101, 128)))
    digit = partial(share, "encoders", task="multiplication", model="universal", method="rpe-k",
                    second_digits=1, lr=0.002, dropout=0.0, steps=6000, n_train=5000)
    yield row("priming by 50 of 5,000 gives 35 x 3 digits", "Jelassi, Sec. 5.2",
              "n x 3 not learned; * 7 x 1: {} with 500, {} without",
              digit(7, prime=500, prime_lengths=[7], width=9),
              digit(7, "before", finetune=500, width=9))
    yield row("priming helps at its length alone", "Jelassi, Sec. 5.3",
              "* 500 of 20 x 1: {} at 10, {} at 20, {} at 21",
              *(digit(n, prime=500, prime_lengths=[20], width=22) for n in (10, 20, 21)))
    yield row("fine-tuning needs 1,000 and forgets", "Jelassi, Sec. 5.1",
              "* 7 x 1: {} with 1,000; 5 x 1 falls to {} from {}", digit(7, finetune=1000, width=9),
              digit(5, finetune=1000, width=9), digit(5, "before", finetune=1000, width=9))
    head = partial(share, "pairs", 5, d_vocab=16, d_head=32, plant=0.0, steps=10_000)
    yield row("a head finds consecutive pairs with a dummy: 100; without 46, the best of four",
              "Pairs, Obs. 1, 2",
              "* {}; {}", head(dummy=True), head(dummy=False))
    yield "| full-size runs at the papers' rates | all | **not run**: needs a GPU |"


def sentences():
    """-> what README's text says in numbers."""
    runs = read("abc")
    rows = [row for r in runs for row in r["tests"]["rows"]]
    short, long = (max(row["n"] for row in rows if row["digits"] == n) for n in (60, 1000))
    hard = {row["n"] for row in rows if row["set"] == "hard"}
    yield f"n {short:,} a seed or all there are, {long} at 1,000 digits"
    yield f'"hard": {max(hard):,} questions'
    exact = [r for r in runs if all_right(r)]
    yield f"{proved(runs)} of {len(runs)} runs are proved, and {len(exact)} are exact in every test"
    later = sum(r["proof"]["attempt"] > 1 for r in runs)
    yield f"{later} of the {len(runs)} runs needed a later attempt"
    minus, own = read("subtraction"), read("own")
    yield f"{proved(minus)} of {len(minus)} seeds are proved"
    quiet = [r for r in read("times") if r["commit"] != "c6a9b5d" and r["task"] in TASKS]
    seconds = [median(r["seconds"] for r in quiet if r["task"] == task) for task in TASKS]
    yield "a run takes {:.0f}, {:.0f}, {:.0f} and {:.0f} s".format(*seconds)
    short = sum(min(percents(r, 6) + percents(r, 60)) == 100 for r in zip(own))
    yield (f"On {short} of {len(own)} seeds it has 1,000 of 1,000 at 6 to 60 digits, "
           f"on {sum(map(all_right, own))} of them")


def check(write):
    """-> what README says otherwise; tables are no difference when they are written there."""
    text, wrong = README.read_text(encoding="utf-8"), []
    for name, rows in (("abc", main_table()), ("claims", (*claims_of_abc(), *claims_of_others()))):
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        old, after = rest.split(end)
        new = "".join(f"{row}\n" for row in rows)
        wrong += [line for line in old.splitlines() if line not in new.splitlines()]
        wrong += [f"missing: {line}" for line in new.splitlines() if line not in old.splitlines()]
        text = before + start + new + end + after
    if write:
        README.write_text(text, encoding="utf-8")
    missing = [f"missing: {words}" for words in sentences() if words not in text]
    return missing if write else wrong + missing


def main(argv=None):
    options = sys.argv[1:] if argv is None else argv
    if options not in ([], ["--write"]):
        print("claims: the only option is --write", file=sys.stderr)
        return 2
    wrong = check(bool(options))
    print("".join(f"{line}\n" for line in wrong), end="")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
