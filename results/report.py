# SPDX-License-Identifier: MIT
"""The tables and measured numbers of both READMEs, made from results/records.

python -m results.report                 # compare; exit code 1, and what differs, if a README does
python -m results.report --write         # put tables and lists between their marks
python -m results.report FILE.jsonl...   # print a table of any records, such as those of run_all.sh

What the READMEs say is in numbers.txt, with fields in braces. "Median (least - most)" is over
seeds, which are never pooled; percentages are rounded down, so that 100 is all."""

import json
import math
import re
import sys
from difflib import unified_diff
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import mean, median

sys.path.append(sys.path[0] + "/..")  # for a start as a file
import lengen as L
from results import schemes  # whose methods are in records

ROOT = Path(__file__).parent.parent

def read_lines(path):
    """A file with a record on each line -> list of dicts."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]

@cache
def load(name):
    """-> the records of one list."""
    return read_lines(ROOT / "results/records" / f"{name}.jsonl")

def about(name, key, text):
    """-> those records of a list that have this text under a key."""
    return [r for r in load(name) if text in r.get(key, "")]

def has(config, word):
    """Does the config of a record have this value, "addition", or this option, "n_layer=1"?"""
    name, _, value = word.rpartition("=")
    if not name:
        return value in config.values()
    return str(config.get(name)).replace(" ", "") == value

def runs(words):
    """"methods addition n_layer=1" -> the records of methods.jsonl whose config has these. Raises:
    ValueError if there are none."""
    name, *wanted = words.split()
    found = load(name)
    for word in wanted:
        found = [r for r in found if has(r["config"], word)]
    if not found:
        raise ValueError(f"there is no record of {words}")
    return found

def grouped(records):
    """-> {(task, method, options): records}; those of a group differ in the seed alone. Options are
    the ones that differ within a task and method. Of two records of one run, the last is taken."""
    kinds, groups = {}, {}
    for r in records:
        config = r["config"]
        kind = config["task"], config.get("method") or config.get("model") or "-"
        kinds.setdefault(kind, []).append(r)
    for kind, found in kinds.items():
        for r in found:
            options = []
            for name, value in r["config"].items():
                differs = any(other["config"].get(name) != value for other in found)
                if differs and name != "seed" and value is not None:
                    options.append(f"{name}={value}".replace(" ", ""))
            groups.setdefault((*kind, " ".join(options)), {})[r["config"]["seed"]] = r
    return {name: list(by_seed.values()) for name, by_seed in groups.items()}

def test_rows(found):
    """-> the rows of all tests of these records."""
    return sum([r["tests"]["rows"] for r in found if "tests" in r], [])

def percents(found, digits, name="random"):
    """Percent exact of each of these records that was tested so."""
    shares = []
    for row in test_rows(found):
        if (row["digits"], row["set"]) == (digits, name):
            shares.append(Fraction(100 * row["correct"], row["n"]))
    return shares

def all_right(record):
    return all(row["correct"] == row["n"] for row in test_rows([record]))

def proved(found):
    return [r for r in found if r.get("proof", {}).get("proved")]

def parameters(method="nope", **options):
    """-> how many parameters a model with these options has."""
    model = L.Transformer(L.Config(method=method, **options))
    return sum(weight.numel() for weight in model.parameters())

def down(value):
    """12.39 -> "12.3", 100 -> "100"."""
    return f"{math.floor(10 * value) / 10:g}"

def span(values, show=down):
    """-> "median (least - most)", or the one value that all have."""
    least, most = show(min(values)), show(max(values))
    ends = f" ({least} - {most})" if min(values) < max(values) else ""
    return show(median(values)) + ends

def between(values, places=1):
    """-> "least to most", rounded."""
    return f"{round(float(min(values)), places):g} to {round(float(max(values)), places):g}"

def listed(values, show="{:.1f}"):
    return ", ".join(show.format(value) for value in values)

def cells(text):
    """"100, 2 -> 6, 60 of abc nx1" -> a cell for each length, with the source's percentage, if any,
    before ours; they are said once if they are the same, and "-" is untested."""
    published, _, ours = text.rpartition(" -> ")
    lengths, words = ours.split(" of ")
    lengths, row = lengths.split(", "), []
    [found] = grouped(runs(words)).values()  # different runs are never pooled
    published = published.split(", ") if published else [""] * len(lengths)
    for length, number in zip(lengths, published, strict=True):
        cell = number
        if number != "-":
            cell = span(percents(found, int(length)))
        row.append(cell if number in ("", cell) else f"{number} -> {cell}")
    return " | ".join(row)

def grade(text):
    """"6>99 10<20 of methods nx1 rope" -> the verdict on a claim of at least 99% at 6 digits and of
    less than 20% at 10: "reproduced" by all records, "in part" by the median, "not reproduced"."""
    claims, words = text.split(" of ")
    ends = {"reproduced": (min, max), "in part": (median, median)}
    for length, sign, bound in re.findall(r"(\d+)([<>])([\d.]+)", claims):
        shares, bound = percents(runs(words), int(length)), Fraction(bound)
        ends = {verdict: (low, high) for verdict, (low, high) in ends.items()
                if (low(shares) >= bound if sign == ">" else high(shares) < bound)}
    return next(iter(ends), "not reproduced")

def count_proved(words):
    found = runs(words)
    return f"{len(proved(found))} of {len(found)}"

def count_right(words):
    found = runs(words)
    return f"{sum(map(all_right, found))} of {len(found)}"

def each(words):
    """"steps control parity abc" -> the median and range of this number of these records."""
    name, words = words.split(" ", 1)
    known = [r[name] for r in runs(words) if r.get(name) is not None]
    return span(known, "{:g}".format)

def windows(words):
    """The usual number of windows of proved models."""
    counts = [r["proof"]["windows"] for r in proved(runs(words))]
    return f"{max(counts, key=counts.count):,}"

def time_share(task):
    """Time of retraining, as a share of that of the first training."""
    trains = [r["train"] for r in proved(runs(f"abc {task}"))]
    return f"{median(x['model']['seconds'] / x['vanilla']['seconds'] for x in trains):.1f}"

def proofs(task):
    """A row of the table of proofs. Attempts: by the vanilla model's weights, by new ones."""
    found = runs(f"abc {task}")
    known = [r["proof"] for r in proved(found)]
    attempts = [proof["attempt"] for proof in known]
    return " | ".join([f"{len(known)} of {len(found)}",
                       f"{attempts.count(1)}, {attempts.count(2)}",
                       span([proof["kappa"] for proof in known], "{:g}".format),
                       listed(sorted({proof["windows"] for proof in known}), "{:,}"),
                       span([proof["margin"] for proof in known]),
                       span([r["train"]["model"]["steps"] for r in proved(found)])])

def bounded(words):
    """A row of the table of rounding: of all windows of runs, in float64."""
    found = runs(f"rounding {words}")
    lead, error = min(r["lead"] for r in found), max(r["error"] for r in found)
    seconds = span([r["seconds"] for r in found])
    return (f"{count_proved(f'rounding {words}')} | {windows(f'rounding {words}')} | {lead:.2f} | "
            f"{error:.1e} | {seconds}")

def gpu(words, unit=1):
    """"seconds as a graph" -> these seconds, of the records of gpu.jsonl about this."""
    name, text = words.split(" ", 1)
    return [unit * r[name] for r in about("gpu", "what", text)]

def gpu_tests(text):
    """Percent exact of a run on a GPU."""
    [rows] = gpu(f"tests {text}")
    return ", ".join(down(Fraction(100 * correct, n)) for _, _, correct, n in rows)

FIELDS = {  # by the first word
    "proved": count_proved, "right": count_right, "windows": windows, "proofs": proofs,
    "count": lambda words: str(len(runs(words))),
    "bounded": bounded, "each": each, "tests": gpu_tests, "grade": grade, "share": time_share,
    "learned": lambda name: f"{parameters(method=name) - parameters():,}",
    "parameters": lambda width: f"{parameters(task='addition', d_model=width):,}",
    "checkerboard": lambda words: between([r["checkerboard"] for r in runs(f"pairs {words}")]),
    "gpu": lambda words: listed(gpu(words), "{:.3g}"),
    "calculator": lambda name: f"{load('calculator')[0][name]:,}",
    "ms": lambda text: listed(gpu(f"seconds {text}", 1e3), "{:.3g}")}

def failed_schemes():
    """-> the schemes whose median seed is below 99% at 6 digits of both tasks."""
    failed, methods = [], {r["config"]["method"] for r in load("schemes")}
    for method in sorted(x for x in methods if not x.endswith("-9")):
        found = [runs(f"schemes {task} {method} n_layer=1") for task in ("successor", "addition")]
        if max(median(percents(records, 6)) for records in found) < 99:
            failed.append(method)
    return ", ".join(failed)

def on_runs():
    """-> fields without an argument."""
    most = {row["digits"]: row["n"] for row in test_rows(load("abc"))}
    without = runs("pairs dummy=False")
    sequences = percents(without, 5)
    labels = [100 * mean(row["places"]) for row in test_rows(without)]
    moduli = runs("encoders modulus=101") + runs("encoders modulus=128")
    [places] = [r["places"] for r in about("leads", "what", "share right")]
    wide = [r["right_at_6"] for r in about("trials", "trial", "window, two layers")]
    return {
        "most at 60": f"{most[60]:,}", "most at 1000": str(most[1000]),
        "failed schemes": failed_schemes(),
        "pairs worst": down(min(sequences)), "pairs best": down(max(sequences)),
        "labels worst": down(min(labels)), "labels best": down(max(labels)),
        "other moduli": down(max(percents(moduli, 5))),
        "vanilla places": between([100 * share for share in places[7:20]]),
        "two layers": listed(wide),
        "drift": f"{max(r['proof']['drift'] for r in load('drift')):.0e}"}

def fill(text):
    """-> text with the values of its fields."""
    known = on_runs()

    def value(match):
        name, _, words = match[1].partition(" ")
        if name in FIELDS:
            return FIELDS[name](words)
        return cells(match[1]) if " of " in match[1] else known[match[1]]

    def count(match):
        return str(len(re.findall(rf"\| ({match[1]}) \|\n", claims)))

    text = re.sub(r"\{([^#]+?)\}", value, text)
    claims = text[text.index("\n# results/"):]  # rows of its tables end with a verdict
    return re.sub(r"\{# (.+?)\}", count, text)

def compare(name, said, write):
    """Compare a README with what numbers.txt says, or write its tables -> lines that differ."""
    path, differ = ROOT / name, []
    text = old = path.read_text(encoding="utf-8")
    for block in re.findall(r"<!-- .*?<!-- end of .*? -->\n", said, re.DOTALL):
        said = said.replace(block, "")
        lines = block.splitlines()
        was = re.search(f"{lines[0]}.*?{lines[-1]}\n", text, re.DOTALL)[0]
        differ += unified_diff(was.splitlines(), lines, name, "numbers.txt", n=0, lineterm="")
        text = text.replace(was, block)
    if write and text != old:
        path.write_text(text, encoding="utf-8")
        differ = []
    return differ + [f"{name} lacks: {x}" for x in said.splitlines() if x not in text]

def print_records(paths):
    """A table for each task: a row for each method and other options."""
    tasks = {}
    for (task, *kind), found in grouped(sum(map(read_lines, paths), [])).items():
        tasks.setdefault(task, []).append((kind, found))
    for task, rows in tasks.items():
        every = sum([test_rows(found) for _, found in rows], [])
        columns = sorted({(row["set"] != "random", row["digits"], row["set"]) for row in every})
        heads = [f"{digits} {name}".removesuffix(" random") for _, digits, name in columns]
        heads = ["method", "options that differ", *heads, "proved", "seeds", "n"]
        print(f"\n{task}, percent exact\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        for (method, options), found in rows:
            line = [method, options or "-"]
            for _, digits, name in columns:
                shares = percents(found, digits, name)
                line.append(span(shares) if shares else "-")
            n = {row["n"] for row in test_rows(found)}
            line += [len(proved(found)), len(found), listed(sorted(n), "{:,}")]
            print(f"| {' | '.join(map(str, line))} |")

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--help"]:
        return print(__doc__)
    if argv not in ([], ["--write"]):
        try:
            print_records(argv)
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"report: no file of records: {error!r}", file=sys.stderr)
            return 2
    differ, text = [], (ROOT / "results/numbers.txt").read_text(encoding="utf-8")
    for page in fill(text[text.index("\n# "):]).split("\n# ")[1:]:
        name, said = page.split("\n", 1)
        differ += compare(name, said, argv == ["--write"])
    print("".join(f"{line}\n" for line in differ), end="")
    return bool(differ)

if __name__ == "__main__":
    sys.exit(main())
