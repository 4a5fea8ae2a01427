# SPDX-License-Identifier: MIT
"""The tables of results/README.md: one for each table of the four sources that was run, the paper's
percentage -> ours, and one of position schemes.

python -m results.papers           # compare results/README.md with the records; exit code 1 if not
python -m results.papers --write   # put the tables into it
"""

import sys
from pathlib import Path

from results import claims, scheme_runs

README = Path(__file__).parent / "README.md"
ALL, NONE = "100 100 100 100", "100 0 0 0"

# Percent exact at 6, 10, 20 and 60 digits. v1 has the same numbers but for vanilla parity, and at
# 50 digits those of 60. Numbers that v2 takes from others are left out.
V2_TABLE_1 = {
    "successor": {"vanilla": NONE, "window": ALL, "window-cyclic": ALL, "window-nope": ALL,
                  "alibi": "1.3 0 0 0", "rope": NONE},
    "addition": {"vanilla": NONE, "window": NONE, "window-cyclic": ALL,
                 "window-nope": "99.95 99.81 99.76 99.35", "alibi": "0 0 0 0", "rope": NONE},
    "nx1": {"vanilla": NONE, "window": "100 6 0 0", "window-cyclic": ALL,
            "window-nope": "99.89 99.63 99.39 98.31", "rope": NONE},
}
# Of numbers of 6 and of 60 digits, which have up to 20 and 200 bits.
PARITY = {"vanilla": ("29.23", "0"), "window": ("100", "100"), "window-cyclic": ("100", "100"),
          "window-nope": ("100", "100")}
V2_TABLE_3 = {"successor": ALL, "addition": "100 100 99.9 99.8", "nx1": ALL}

# Rows of Jelassi's tables: options as printed, the paper's percentages, records beside them.
UNI = dict(model="universal")
SUMS = UNI | dict(task="addition", even=True, n_train=50_000, width=14, steps=21_000)
MODULAR = dict(even=True, batch=256, dropout=0.0, width=12, n_train=5000, lr=0.003)
SHARED = UNI | MODULAR | dict(n_encoder=3)
DIGIT = UNI | dict(task="multiplication", second_digits=1, n_encoder=3, width=9, steps=6000,
                   lr=0.002, dropout=0.0, n_train=5000, prime=0, finetune=0)
ELEMENTS = dict(task="elementwise-addition", width=22, lr=0.002, even=False)
JELASSI = {
    "Table 1, sums; UTransformer, base and large": ((5, 6, 10, 15, 20), [
        ("`ape`, 2 rounds", ("", "2 to 3.1", "0", "0", "0"),
         UNI | dict(task="addition", method="ape", steps=4000)),
        ("`rpe-k`, 6 rounds of width 256", ("", "92.1 to 100", "70.6 to 99.9", "31.2 to 98.3",
         "0.1 to 18.2"), SUMS | dict(method="rpe-k")),
        ("`rpe-kq`, the same", ("", "90.8 to 99.7", "22.5 to 58", "0 to 31.1", "0 to 1.4"),
         SUMS | dict(method="rpe-kq"))]),
    "Table 2a, sums modulo 100": ((5, 6, 10, 15, 20), [
        ("`ape`", ("100", "99.5", "73.3", "43.4", "21.3"),
         MODULAR | dict(task="modular-addition", model="encoder", method="ape", steps=2400)),
        ("`rpe-k`", ("100", "100", "86.9", "36", "3.4"),
         MODULAR | dict(task="modular-addition", model="encoder", method="rpe-k", steps=5000)),
        ("`rpe-kq`, 3 rounds", ("100", "100", "100", "99.4", "84.5"),
         SHARED | dict(task="modular-addition", method="rpe-kq", clip=3, steps=1800))]),
    "Table 2b, products modulo 100": ((5, 10, 20), [
        ("`ape`", ("100", "98.8", "96.2"),
         MODULAR | dict(task="modular-multiplication", model="encoder", method="ape", steps=8000)),
        ("`rpe-kq`", ("100", "100", "100"),
         MODULAR | dict(task="modular-multiplication", model="encoder", method="rpe-kq", clip=3,
                        steps=8000))]),
    "Table 3, products of one digit": ((5, 6, 7), [
        ("`ape`", ("100", "1.5", "0"), DIGIT | dict(method="ape")),
        ("`rpe-k`", ("100", "12.2", "0"), DIGIT | dict(method="rpe-k", finetune=500)),
        ("`rpe-kq`", ("100", "9.2", "0"), DIGIT | dict(method="rpe-kq"))]),
    "Table 6, element-wise sums": ((5, 6, 10, 15, 20), [
        ("`ape`", ("100", "5.3", "0", "0", "0"), ELEMENTS | dict(method="ape")),
        ("`rpe-k`", ("100", "97.5", "90.5", "86.2", "78.1"), ELEMENTS | dict(method="rpe-k"))]),
}

def matching(file, **wanted):
    """Of each seed the last record whose options are these; None: an option that is not there."""
    found = {}
    for record in claims.read(file):
        config = claims.USUAL | record["config"] | dict(changed=record.get("changed"))
        if all(config.get(name) == value for name, value in wanted.items()):
            found[config["seed"]] = record
    return list(found.values())

def cell(published, values):
    """The paper's percentage -> ours."""
    ours = claims.span(values) if values else "not run"
    return f"{published} -> {ours}" if published else ours

def row(heads, published, runs, lengths):
    """heads, a cell a length, and how many seeds; of runs with fine-tuning the tests before it."""
    stage = "before" if runs and runs[0].get("before") else "tests"
    cells = []
    for number, n in zip(published, lengths):
        cells.append(cell(number, claims.percents(runs, n, stage=stage)))
    return f"| {' | '.join([*heads, *cells])} | {len(runs) or '-'} |"

def head(names):
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]

def settings(task, method):
    """-> layers, steps and runs of each recorded way to train a method, the deepest last."""
    groups = {}
    for record in claims.read("methods"):
        config = claims.USUAL | record["config"]
        padded = config["width"] in (0, 61, 201)
        if padded and (config["task"], config["method"]) == (task, method):
            steps = config.get("steps") or record["train"]["model"]["steps"]
            layers = f"1 + {config['n_layer']}" if config["n_encoder"] else str(config["n_layer"])
            groups.setdefault((layers, steps), {})[config["seed"]] = record
    for layers, steps in sorted(groups):
        yield layers, steps, list(groups[layers, steps].values())

def method_rows(task, methods, lengths):
    """A row a method and way to train it; methods: {name: percentages}."""
    for method, published in methods.items():
        for layers, steps, runs in settings(task, method):
            heads = [task, f"`{method}`", layers, f"{steps:,}"]
            yield row(heads, published or [""] * len(lengths), runs, lengths)

def scaffolding_tables():
    """v2, Table 1; parity by bits."""
    yield from head(["task", "method", "layers", "steps", "6", "10", "20", "60", "seeds"])
    for task, methods in V2_TABLE_1.items():
        numbers = {method: text.split() for method, text in methods.items()}
        yield from method_rows(task, numbers, (6, 10, 20, 60))
    yield from method_rows("parity-label", {"vanilla": None}, (6, 10, 20, 60))
    yield ""
    yield from head(["task", "method", "layers", "steps", "20 bits", "60", "200", "seeds"])
    numbers = {method: (short, "", long) for method, (short, long) in PARITY.items()}
    yield from method_rows("parity", numbers, (20, 60, 200))

CHANGES = (None, "start", "start+mean", "start+all", "start+vertical", "start+vertical+self")

def calibration_table():
    """v2, Table 3: ABC by the defaults, and by the sources' rules."""
    lengths = (6, 10, 20, 60)
    yield from head(["task", "rules", "hard, 60", *map(str, lengths), "seeds"])
    for task in (*V2_TABLE_3, "parity"):
        published = V2_TABLE_3.get(task, "- - - -").split()
        groups = [("robust", claims.records("abc", task=task))]
        for rules in "paper", "v2", "code":
            for changed in CHANGES:
                runs = matching("rules", task=task, rules=rules, changed=changed)
                if runs:
                    groups.append((f"{rules}, {changed}" if changed else rules, runs))
        for rules, runs in groups:
            hard = claims.span(claims.percents(runs, 60, "hard"))
            yield row([task, rules, hard], published, runs, lengths)

def jelassi_tables():
    """A table each; what was not run says so."""
    for title, (lengths, rows) in JELASSI.items():
        yield f"\n{title}:\n"
        yield from head(["model", *map(str, lengths), "seeds"])
        for name, published, wanted in rows:
            yield row([name], published, matching("encoders", **wanted), lengths)

def scheme_tables():
    return scheme_runs.table(scheme_runs.read())

TABLES = {"v2 table 1": scaffolding_tables, "v2 table 3": calibration_table,
          "jelassi": jelassi_tables, "schemes": scheme_tables}

def check(write):
    """-> lines in which results/README.md differs from the records; none that it has now."""
    text, wrong = README.read_text(encoding="utf-8"), []
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        old, after = rest.split(end)
        new = "".join(f"{line}\n" for line in table())
        if old != new:
            wrong.append(name)
        text = before + start + new + end + after
    if write:
        README.write_text(text, encoding="utf-8")
        return []
    return wrong

def main(argv=None):
    options = sys.argv[1:] if argv is None else argv
    if options not in ([], ["--write"]):
        print("papers: the only option is --write", file=sys.stderr)
        return 2
    wrong = check(bool(options))
    print("".join(f"{name} differs\n" for name in wrong), end="")
    return bool(wrong)

if __name__ == "__main__":
    sys.exit(main())
