# SPDX-License-Identifier: MIT
"""The tables and measured numbers of README.md and of the pages here, made from results/records.

python -m results.report                 # compare; exit code 1, and what differs, if a page does
python -m results.report --write         # put tables and lists between their marks
python -m results.report FILE.jsonl...   # print a table of any records, such as those of run_all.sh

A record is a line of records/LIST.jsonl: one run, with the options that matter for its tables.

    {"config": {"task": "nx1", "method": "rope", "seed": 0, "steps": 6000},
     "tests": {"rows": [{"digits": 6, "set": "random", "correct": 1000, "n": 1000}]}}

numbers.txt has what the pages say, with a field in braces for each number: a name, which FIELDS
gives a function, and that function's argument. The argument mostly ends with the words of `runs`,
which choose records by the name of the list and by values or options of the config.

    {proved abc nx1}                       100 of 100
    {6, 10 of methods nx1 rope}            100 | 0
    {grade 6>99 10<20 of methods nx1 rope}   reproduced

To add a table, put its records into a list and its rows into numbers.txt and a page, between the
same marks, and start this with --write. "Median (least - most)" is over seeds, which are never
pooled; percentages are rounded down, so that 100 is all."""

import json
import math
import re
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parent.parent

# Records
def read_lines(path, torn=None):
    """A file with a record on each line -> list of dicts. Another line is named in `torn` or,
    without this list, by a ValueError."""
    found = []
    for n, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            if torn is None:
                raise ValueError(f"{path}, line {n}: {error}") from None
            torn.append(f"{path}, line {n}: {error}")
    return found

@cache
def load(name):
    """-> the records of one list."""
    return read_lines(ROOT / "results/records" / f"{name}.jsonl")

def runs(words):
    """"methods addition n_layer=1" -> the records of methods.jsonl whose config has the value
    "addition" and this option. Raises: ValueError if there are none."""
    name, *wanted = words.split()
    found = load(name)
    for word in wanted:
        option, _, value = word.rpartition("=")
        if option:
            found = [r for r in found if str(r["config"].get(option)).replace(" ", "") == value]
        else:
            found = [r for r in found if value in r["config"].values()]
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
            options = [f"{name}={value}".replace(" ", "") for name, value in r["config"].items()
                       if name != "seed" and value is not None
                       and any(other["config"].get(name) != value for other in found)]
            groups.setdefault((*kind, " ".join(options)), {})[r["config"]["seed"]] = r
    return {name: list(by_seed.values()) for name, by_seed in groups.items()}

def runs_of_one_kind(words):
    """As `runs`. Raises: ValueError if they differ in more than the seed, as they are not pooled."""
    [found] = grouped(runs(words)).values()
    return found

def test_rows(found):
    """-> the rows of all tests of these records that have questions."""
    tests = [r["tests"]["rows"] for r in found if "tests" in r]
    return [row for row in sum(tests, []) if row["n"]]

def percents(found, digits, name="random"):
    """Percent exact of each of these records that was tested so."""
    rows = [row for row in test_rows(found) if (row["digits"], row["set"]) == (digits, name)]
    return [Fraction(100 * row["correct"], row["n"]) for row in rows]

def longest_right(found):
    """-> the largest length at which each of these records is right on 75% (Jelassi, Fig. 2a)."""
    right = [[row["digits"] for row in test_rows([r]) if row["correct"] >= 0.75 * row["n"]]
             for r in found]
    return [max(digits, default=0) for digits in right]

def proved(found):
    return [r for r in found if r.get("proof", {}).get("proved")]

# Numbers as text
def down(value):
    """12.39 -> "12.3", 100 -> "100"."""
    return f"{math.floor(10 * value) / 10:g}"

def plain(value):
    """12000 -> "12,000", 0.1268 -> "0.127"."""
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,g}"

def span(values, show=down):
    """-> "median (least - most)", or the one value that all have."""
    least, most = show(min(values)), show(max(values))
    ends = f" ({least} - {most})" if min(values) < max(values) else ""
    return show(median(values)) + ends

# Fields: functions of the text after their name in braces
def cells(text):
    """"100, 2 -> 6, 60 of abc nx1" -> a cell for each length, with the source's percentage, if any,
    before ours; they are said once if they are the same, and "-" is untested."""
    published, _, ours = text.rpartition(" -> ")
    lengths, words = ours.split(" of ")
    lengths, row, found = lengths.split(", "), [], runs_of_one_kind(words)
    published = published.split(", ") if published else [""] * len(lengths)
    for length, number in zip(lengths, published, strict=True):
        cell = number if number == "-" else span(percents(found, int(length)))
        row.append(cell if number in ("", cell) else f"{number} -> {cell}")
    return " | ".join(row)

def holds(clause, low, high):
    """Does "6>99 10<20 of RECORDS" hold, at least 99% at 6 digits and less than 20% at 10, or "8 of
    RECORDS > 10 of OTHERS"? low, high: min and max for every seed, or median."""
    sides = [side.split(" of ") for side in clause.split(" > ")]
    if len(sides) == 2:
        more, less = (percents(runs_of_one_kind(words), int(length)) for length, words in sides)
        return low(more) > high(less)
    [(claims, words)] = sides
    held = []
    for length, sign, bound in re.findall(r"(\d+)([<>])([\d.]+)", claims):
        shares, bound = percents(runs_of_one_kind(words), int(length)), Fraction(bound)
        held.append(low(shares) >= bound if sign == ">" else high(shares) < bound)
    return all(held)

def grade(text):
    """The verdict on a claim, whose clauses are joined by "; ": "reproduced" if they hold of every
    seed, "in part" if of medians, else "not reproduced"."""
    for verdict, low, high in ("reproduced", min, max), ("in part", median, median):
        if all(holds(clause, low, high) for clause in text.split("; ")):
            return verdict
    return "not reproduced"

def grade_failure(text):
    """The same in a smaller task or model, of a claim that includes a failure."""
    verdict = grade(text)
    return "reproduced, smaller" if verdict == "reproduced" else verdict

def grade_smaller(text):
    """The same of a success or an order: a smaller task or model that lacks it decides nothing."""
    verdict = grade_failure(text)
    return "undecided" if verdict == "not reproduced" else verdict

def count_proved(words):
    found = runs(words)
    return f"{len(proved(found))} of {len(found)}"

def count_right(words):
    """How many of these runs are exact in all tests."""
    right = [all(row["correct"] == row["n"] for row in test_rows([r])) for r in runs(words)]
    return f"{sum(right)} of {len(right)}"

def numbers(words):
    """"proof.kappa abc nx1" -> this number of those of these records that have it."""
    path, words = words.split(" ", 1)
    found = runs(words)
    for name in path.split("."):
        found = [r[name] for r in found if r.get(name) is not None]
    return found

def places(words):
    """"1 5 20 words" -> percent right of digits 1 to 5 of answers to 20, averaged in each record."""
    first, last, digits, words = words.split(" ", 3)
    rows = [row for row in test_rows(runs(words)) if row["digits"] == int(digits)]
    return span([100 * mean(row["places"][int(first) - 1:int(last)]) for row in rows])

FIELDS = {  # by the first word
    "proved": count_proved, "right": count_right, "grade": grade, "smaller": grade_smaller,
    "failure": grade_failure, "places": places,
    "each": lambda words: span(numbers(words), plain),
    "least": lambda words: plain(min(numbers(words))),
    "most": lambda words: plain(max(numbers(words))),
    "count": lambda words: str(len(runs(words)))}

# Pages
def fill(text):
    """-> text with the values of its fields."""
    def value(match):
        name, _, words = match[1].partition(" ")
        return FIELDS[name](words) if name in FIELDS else cells(match[1])

    text = re.sub(r"\{([^#]+?)\}", value, text)
    claims = text[text.index("\n# results/claims"):]  # rows of its tables end with a verdict
    return re.sub(r"\{# (.+?)\}", lambda match: str(
        len(re.findall(rf"\| ({match[1]}) \|\n", claims))), text)

def compare(name, said, write):
    """Write the tables of a page, if wanted -> lines and tables of numbers.txt that it lacks."""
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- .*?<!-- end of .*? -->\n", said, re.DOTALL)
    if write:
        for block in blocks:
            first, *_, last = block.splitlines()
            text = re.sub(f"{first}.*?{last}\n", lambda was: block, text, flags=re.DOTALL)
        path.write_text(text, encoding="utf-8")
    lines = [line for line in said.splitlines() if line not in text]
    lacks = lines or [block for block in blocks if block not in text]
    return [f"{name} lacks: {x}" for x in lacks]

def print_records(records):
    """A table for each task: a row for each method and other options."""
    tasks = {}
    for (task, *kind), found in grouped(records).items():
        tasks.setdefault(task, []).append((kind, found))
    for task, rows in tasks.items():
        every = sum([test_rows(found) for _, found in rows], [])
        columns = sorted({(row["set"] != "random", row["digits"], row["set"]) for row in every})
        heads = [f"{digits} {name}".removesuffix(" random") for _, digits, name in columns]
        heads = ["method", "options that differ", *heads, "proved", "seeds", "n"]
        print(f"\n{task}, percent exact\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
        for (method, options), found in rows:
            shares = [percents(found, digits, name) for _, digits, name in columns]
            n = {row["n"] for row in test_rows(found)}
            line = [method, options or "-", *(span(x) if x else "-" for x in shares),
                    len(proved(found)), len(found), ", ".join(map(plain, sorted(n)))]
            print(f"| {' | '.join(map(str, line))} |")

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--help"]:
        return print(__doc__)
    if argv not in ([], ["--write"]):
        torn = []
        try:
            print_records(sum([read_lines(path, torn) for path in argv], []))
        except (OSError, ValueError, KeyError, TypeError) as error:
            torn.append(f"no file of records: {error!r}")
        print("".join(f"report: {line}\n" for line in torn), end="", file=sys.stderr)
        return 2 if torn else 0
    differ, text = [], (ROOT / "results/numbers.txt").read_text(encoding="utf-8")
    for page in fill(text[text.index("\n# "):]).split("\n# ")[1:]:
        name, said = page.split("\n", 1)
        differ += compare(name, said, argv == ["--write"])
    print("".join(f"{line}\n" for line in differ), end="")
    return bool(differ)

if __name__ == "__main__":
    sys.exit(main())
