# SPDX-License-Identifier: MIT
"""A calculator whose digits come from proved models: python -m results.calculator "12 * 34 - 5".

It knows + - * / // % and parentheses of integers of any length, by Python's rules, and / is //. Of
each model that it needs, addition, subtraction, nx1 and division by one digit, it takes the first
seed that is proved, trained in runs/calculator in about a quarter of a minute. Python shifts,
compares, keeps signs, loops, and in long division chooses the largest multiple that fits."""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import sys
from itertools import accumulate
from pathlib import Path

import torch

import lengen as L

FOLDER = Path("runs/calculator")
BINDS = {"(": 0, ")": 1, "+": 2, "-": 2, "*": 3, "/": 3, "//": 3, "%": 3, "~": 4}  # ~ is a sign

def say(message):
    print(f"calculator: {message}", file=sys.stderr)

def divide_place(carry, a, d):
    n, divisor = 10 * carry + a, d.clamp(min=1)  # the carry is the remainder
    return torch.where(d == 0, -1, n // divisor), n % divisor

def define_tasks():
    L.VOCAB += "".join(sign for sign in "-/" if sign not in L.VOCAB)
    L.TASKS["subtraction"] = L.Task(
        "a - b", lambda carry, a, b: a - b + carry, ("number", "number"), "-")
    L.TASKS["division"] = L.Task("n / d, rounded down", divide_place, ("number", "digit"), "/",
                                 msd_first=True, retrain_steps=450, batch=128, lr=8e-3)

def finish(folder, task, seed):
    """Train the run of a folder, or resume it, alone -> exit code of lengen."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{task}.lock", "w") as file, contextlib.redirect_stdout(sys.stderr):
        try:
            if hasattr(os, "lockf"):  # not on Windows; a lock ends with its process
                os.lockf(file.fileno(), os.F_TLOCK, 0)
        except BlockingIOError:
            say(f"waiting for another calculator, which is training {task}")
            os.lockf(file.fileno(), os.F_LOCK, 0)
        if (folder / "result.json").exists():  # the other one has finished it
            return 0
        shutil.rmtree(folder, ignore_errors=True)  # the rest of a process that was killed
        return L.main(f"--task {task} --seed {seed} --lengths 6,60 --out {folder}".split())

def train(task):
    """-> model, config of the first seed that is proved, from its folder if there is one."""
    for seed in range(10):
        folder = FOLDER / f"{task}-{seed}"
        code = 0 if (folder / "result.json").exists() else finish(folder, task, seed)
        if code > 1:
            sys.exit(code)  # lengen has said why
        if code == 0:
            try:
                model, config, parts = L.load(folder)
                L.demand(folder.name == f"{config.task}-{config.seed}", "it holds another run")
            except L.BadInput as error:
                raise L.BadInput(f"{folder}: {error}; move it away to train it anew") from None
            if parts["proof"].get("proved"):
                return model, config
        say(f"{folder} is not proved")
    raise L.RunFailed(f"{task}: none of ten seeds in {FOLDER} is proved")

class Models:
    """Answers of trained models to questions about digits, such as "0129", and counts of them."""
    def __init__(self):
        define_tasks()
        self.known, self.questions, self.batches = {}, 0, 0

    def ask(self, task, pairs):
        """-> answers to all questions (a, b) of a task, as one batch. Raises: RunFailed."""
        if task not in self.known:
            self.known[task] = train(task)
        model, config = self.known[task]
        spec, longest = config.spec, max(len(digits) for pair in pairs for digits in pair)
        width = max(config.widths[0], longest + spec.headroom)
        width_b = width if spec.operands[1] == "number" else 1
        questions = [a.rjust(width, "0") + spec.sign + b.rjust(width_b, "0") for a, b in pairs]
        sources = torch.stack([L.encode(L.START + question + L.END) for question in questions])
        answers = []
        for tokens in L.generate(model, sources, width + 1):
            digits, end, _ = L.decode(tokens)[1:].partition(L.END)
            if not (end and digits.isdigit() and len(digits) == width):
                raise L.RunFailed(f"{task}: the model wrote {digits[:40]!r}, not {width} digits")
            answers.append(plain(digits if spec.msd_first else digits[::-1]))
        self.questions += len(pairs)
        self.batches += 1
        return answers

def plain(digits):
    return digits.lstrip("0") or "0"

def size(digits):
    return len(digits), digits  # a key by which numbers without leading zeros compare

def multiply(models, a, b):
    """Multiples of a by the digits of b are one batch; so is each level of a tree of sums."""
    a, b = sorted([a, b], key=size, reverse=True)
    digits = sorted(set(b))
    multiple = dict(zip(digits, models.ask("nx1", [(a, digit) for digit in digits])))
    terms = [multiple[digit] + "0" * place for place, digit in enumerate(reversed(b))]
    while len(terms) > 1:
        pairs = list(zip(terms[::2], terms[1::2]))
        terms = models.ask("addition", pairs) + terms[2 * len(pairs):]
    return plain(terms[0])

def divide(models, a, b):
    """-> quotient and remainder of a and b > 0, by long division if b has several digits."""
    if len(b) == 1:
        [quotient] = models.ask("division", [(a, b)])
        [product] = models.ask("nx1", [(quotient, b)])
        return quotient, *models.ask("subtraction", [(a, product)])
    multiples = ["0"] + models.ask("nx1", [(b, digit) for digit in "123456789"])
    quotient, rest = "", "0"
    for digit in a:
        rest = plain(rest + digit)
        n = max(n for n in range(10) if size(multiples[n]) <= size(rest))
        quotient += str(n)
        if n > 0:
            [rest] = models.ask("subtraction", [(rest, multiples[n])])
    return plain(quotient), rest

def operate(models, operator, x, y):
    """x and y are signed integers, (negative?, digits), and so is the result. Raises: BadInput."""
    (x_negative, a), (y_negative, b) = x, y
    if operator == "*":
        return x_negative != y_negative, multiply(models, a, b)
    if operator in "+-":
        y_negative ^= operator == "-"
        task = "addition" if x_negative == y_negative else "subtraction"
        if size(a) < size(b):
            x_negative, a, b = y_negative, b, a
        return x_negative, *models.ask(task, [(a, b)])
    L.demand(b != "0", "division by 0")
    quotient, rest = divide(models, a, b)
    if x_negative != y_negative and rest != "0":  # rounded down, away from 0
        [quotient] = models.ask("addition", [(quotient, "1")])
        [rest] = models.ask("subtraction", [(b, rest)])
    return (y_negative, rest) if operator == "%" else (x_negative != y_negative, quotient)

def calculate(models, text):
    """An expression -> its value as text. Operators wait for tighter ones. Raises: BadInput."""
    term = "[ (+-]*[0-9]+[ )]*"
    depths = list(accumulate((symbol == "(") - (symbol == ")") for symbol in text))
    valid = re.fullmatch(f"{term}((//|[-+*/%]){term})*", text) and min(depths) == depths[-1] == 0
    L.demand(valid, f"{text[:40]!r} is no expression of integers, + - * / // % and parentheses")
    text = re.sub(r"(?<![0-9)])-", "~", text.replace(" ", ""))
    text = re.sub(r"(?<![0-9)])[+]", "", text)
    values, waiting = [], []
    for token in re.findall("[0-9]+|//|.", f"({text})"):
        if token.isdigit():
            values.append((False, plain(token)))
        elif token in "(~":
            waiting.append(token)
        else:
            while BINDS[waiting[-1]] >= BINDS[token]:
                operator, (negative, digits) = waiting.pop(), values.pop()
                if operator == "~":
                    values.append((not negative, digits))
                else:
                    values.append(operate(models, operator, values.pop(), (negative, digits)))
            waiting.append(token)
            if token == ")":
                del waiting[-2:]  # it and its "("
    [(negative, digits)] = values
    return f"-{digits}" if negative and digits != "0" else digits

def draw_expression(draw, n_operation, symbols):
    if n_operation == 0:
        return draw.choice(["", "-"]) + "".join(draw.choices(symbols, k=draw.randint(1, 60)))
    n_left = draw.randrange(n_operation)
    left, right = (draw_expression(draw, n, symbols) for n in (n_left, n_operation - 1 - n_left))
    return f"({left}) {draw.choice('+ - * / // %'.split())} ({right})"

def check(models, n):
    """-> how many of n random expressions, half of them of zeros and nines, have Python's value."""
    draw, record = random.Random("calculator"), dict(asked=n, right=0, refused=0)
    for number in range(n):
        text = draw_expression(draw, draw.randint(1, 3), ("0123456789", "09")[number % 2])
        found = expected = None  # of a division by 0
        with contextlib.suppress(L.BadInput):
            found = calculate(models, text)
        with contextlib.suppress(ZeroDivisionError):  # Python knows neither / nor zeros in front
            expected = str(eval(re.sub("//?", "//", re.sub(r"\b0+(?=[0-9])", "", text))))
        record["refused" if expected is None else "right"] += found == expected
    return record | dict(questions=models.questions, batches=models.batches)

def main(argv=None):
    """-> exit code: 0 done, 1 no seed is proved, 2 bad input or a file error, 130 interrupted."""
    parser = argparse.ArgumentParser("calculator [EXPRESSION]", None, __doc__, exit_on_error=False)
    parser.add_argument("--check", type=int, metavar="N", help="draw N expressions, ask Python too")
    torch.set_num_threads(1)
    try:
        given, words = parser.parse_known_args(argv)  # an expression may start with a minus sign
        models = Models()
        if given.check is None:
            print(calculate(models, " ".join(words)), flush=True)
            say(f"{models.questions:,} questions in {models.batches:,} batches")
        else:
            L.demand(given.check > 0 and not words, "--check needs one number, 1 or more")
            print(json.dumps(check(models, given.check)))
        return 0
    except (KeyboardInterrupt, L.RunFailed, L.BadInput, OSError, argparse.ArgumentError) as error:
        say(str(error) or "interrupted")
        return {KeyboardInterrupt: 130, L.RunFailed: 1}.get(type(error), 2)

if __name__ == "__main__":
    sys.exit(main())
