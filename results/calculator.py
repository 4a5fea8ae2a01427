# SPDX-License-Identifier: MIT
"""A calculator whose digits come from proved models: python -m results.calculator "12 * 34 - 5"

It knows + - * / % and parentheses of integers of any length; / is the quotient rounded down and %
the remainder, both with Python's signs. It trains up to four models when they are first needed, of
addition, subtraction, nx1 and division by one digit, in runs/calculator, about a quarter of a
minute each, and takes the first seed of each that is proved. Python shifts, compares, keeps signs
and loops, and in long division by more than one digit takes the largest multiple that fits.

python -m results.calculator --check N compares N random expressions with Python's integers and
prints a record."""

import ast
import contextlib
import io
import json
import random
import re
import sys
import time
from pathlib import Path

import torch

sys.path.append(sys.path[0] + "/..")  # for a start as a file
import lengen as L

def divide_place(carry, a, d):
    """The carry of long division is the remainder."""
    n, divisor = 10 * carry + a, d.clamp(min=1)
    return torch.where(d == 0, -1, n // divisor), n % divisor

def define_tasks():
    for sign in "-/":
        if sign not in L.VOCAB:
            L.VOCAB += sign
    L.TASKS["subtraction"] = L.Task(
        "a - b", lambda carry, a, b: a - b + carry, ("number", "number"), "-")
    L.TASKS["division"] = L.Task("n / d, rounded down", divide_place, ("number", "digit"), "/",
                                 msd_first=True, retrain_steps=450, batch=128, lr=8e-3)

class Models:
    """Answers of trained models to questions about digits, such as "0129", and counts of them."""
    def __init__(self):
        define_tasks()
        self.known, self.questions, self.batches, self.seconds = {}, 0, 0, 0.0

    def ask(self, task, pairs):
        """Ask all questions (a, b) of a task as one batch -> their answers, without leading zeros.
        Raises: RunFailed if what a model writes is no number."""
        if task not in self.known:
            self.known[task] = train(task)
        start = time.perf_counter()
        model, config = self.known[task]
        spec, longest = config.spec, max(len(text) for pair in pairs for text in pair)
        width = max(config.widths[0], longest + spec.headroom)
        sources = []
        for a, b in pairs:
            if spec.operands[1] == "number":
                b = b.rjust(width, "0")
            sources.append(L.encode(f"{L.START}{a.rjust(width, '0')}{spec.sign}{b}{L.END}"))
        self.questions += len(pairs)
        self.batches += 1
        answers = []
        for tokens in L.generate(model, torch.stack(sources), width + 1):
            digits, end, _ = L.decode(tokens)[1:].partition(L.END)
            if not end or not re.fullmatch(f"[0-9]{{{width}}}", digits):
                raise L.RunFailed(f"{task}: the model wrote {digits!r}, not {width} digits")
            if not spec.msd_first:
                digits = digits[::-1]
            answers.append(plain(digits))
        self.seconds += time.perf_counter() - start
        return answers

def train(task):
    """-> model, config of the first seed that is proved, from its folder if there is one."""
    for seed in range(10):
        folder = Path("runs/calculator", f"{task}-{seed}")
        arguments = ["--task", task, "--seed", seed, "--lengths", "6,60", "--out", folder]
        if (folder / "checkpoint.pt").exists():
            arguments = ["--from", folder]  # it was interrupted
        if not (folder / "result.json").exists():
            with contextlib.redirect_stdout(io.StringIO()):
                code = L.main(arguments)
            if code == 130:
                raise KeyboardInterrupt
        with contextlib.suppress(L.BadInput):  # a folder that cannot be used
            model, config, parts = L.load(folder)
            if parts["proof"].get("proved"):
                return model, config
    raise L.RunFailed(f"{task}: none of ten seeds in runs/calculator is proved")

def plain(digits):
    return digits.lstrip("0") or "0"

def size(digits):
    """A key by which numbers without leading zeros compare."""
    return len(digits), digits

def add(models, a, b):
    [total] = models.ask("addition", [(a, b)])
    return total

def subtract(models, a, b):
    """a - b of a >= b."""
    [difference] = models.ask("subtraction", [(a, b)])
    return difference

def multiply(models, a, b):
    """Multiples of a by the digits of b are one batch; so is each level of a tree of sums."""
    if size(a) < size(b):
        a, b = b, a
    digits = sorted(set(b))
    multiple = dict(zip(digits, models.ask("nx1", [(a, digit) for digit in digits])))
    terms = [multiple[digit] + "0" * place for place, digit in enumerate(reversed(b))]
    while len(terms) > 1:
        pairs = list(zip(terms[::2], terms[1::2]))
        rest = terms[2 * len(pairs):]
        terms = models.ask("addition", pairs) + rest
    return plain(terms[0])

def divide(models, a, b):
    """-> quotient and remainder of a and b > 0. By more than one digit, it is long division: the
    digit is that of the largest multiple of b that does not exceed the remainder."""
    if len(b) == 1:
        [quotient] = models.ask("division", [(a, b)])
        [product] = models.ask("nx1", [(quotient, b)])
        return quotient, subtract(models, a, product)
    multiples = ["0"] + models.ask("nx1", [(b, digit) for digit in "123456789"])
    quotient, rest = "", "0"
    for digit in a:
        rest = plain(rest + digit)
        fitting = [n for n, multiple in enumerate(multiples) if size(multiple) <= size(rest)]
        quotient += str(fitting[-1])
        if fitting[-1] > 0:
            rest = subtract(models, rest, multiples[fitting[-1]])
    return plain(quotient), rest

# Signed integers are (negative?, digits).

def add_signed(models, a, b):
    if a[0] == b[0]:
        return a[0], add(models, a[1], b[1])
    larger, smaller = sorted([a, b], key=lambda x: size(x[1]), reverse=True)
    return larger[0], subtract(models, larger[1], smaller[1])

def divide_signed(models, a, b):
    L.demand(b[1] != "0", "division by 0")
    quotient, rest = divide(models, a[1], b[1])
    if a[0] != b[0] and rest != "0":  # rounded down, away from 0
        quotient, rest = add(models, quotient, "1"), subtract(models, b[1], rest)
    return (a[0] != b[0], quotient), (b[0], rest)

def evaluate(models, node, numbers):
    """A node of Python's syntax tree -> a signed integer. Raises: BadInput."""
    if isinstance(node, ast.Name):
        return False, plain(numbers[node.id])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        negative, digits = evaluate(models, node.operand, numbers)
        return negative != isinstance(node.op, ast.USub), digits
    L.demand(isinstance(node, ast.BinOp), "this is no expression of integers and + - * / %")
    a = evaluate(models, node.left, numbers)
    b = evaluate(models, node.right, numbers)
    if isinstance(node.op, ast.Add):
        return add_signed(models, a, b)
    if isinstance(node.op, ast.Sub):
        return add_signed(models, a, (not b[0], b[1]))
    if isinstance(node.op, ast.Mult):
        return a[0] != b[0], multiply(models, a[1], b[1])
    L.demand(isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)), "only + - * / % are known")
    quotient, rest = divide_signed(models, a, b)
    return rest if isinstance(node.op, ast.Mod) else quotient

def calculate(models, text):
    """An expression -> its value as text. Raises: BadInput."""
    L.demand(re.fullmatch(r"[0-9+*/%() -]+", text), f"{text!r} has other symbols than 0-9+-*/%()")
    numbers = {}
    def name(match):  # Python would turn long numbers into integers
        numbers[f"n{len(numbers)}"] = match[0]
        return f"n{len(numbers) - 1}"
    try:
        tree = ast.parse(re.sub("[0-9]+", name, text).strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise L.BadInput(f"{text!r} is no expression") from None
    negative, digits = evaluate(models, tree.body, numbers)
    return f"-{digits}" if negative and digits != "0" else digits

def draw_expression(draw, n_operation, symbols):
    """Of integers of 1 to 60 digits out of these symbols, in parentheses."""
    if n_operation == 0:
        return draw.choice(["", "-"]) + "".join(draw.choices(symbols, k=draw.randint(1, 60)))
    n_left = draw.randrange(n_operation)
    left = draw_expression(draw, n_left, symbols)
    right = draw_expression(draw, n_operation - 1 - n_left, symbols)
    return f"({left}) {draw.choice('+-*/%')} ({right})"

def check(models, n):
    """-> a record: how many of n random expressions of up to three operations, half of them hard,
    of zeros and nines alone, have Python's value, and how many are refused as divisions by 0."""
    draw, right, refused = random.Random("calculator"), 0, 0
    for number in range(n):
        symbols = ("0123456789", "09")[number % 2]
        text = draw_expression(draw, draw.randint(1, 3), symbols)
        found = expected = None  # of a division by 0
        with contextlib.suppress(L.BadInput):
            found = calculate(models, text)
        with contextlib.suppress(ZeroDivisionError):  # Python knows neither / nor zeros in front
            expected = str(eval(re.sub(r"\b0+(?=[0-9])", "", text).replace("/", "//")))
        if expected is None:
            refused += found is None
        else:
            right += found == expected
    return dict(asked=n, right=right, refused=refused, questions=models.questions,
                batches=models.batches, seconds=round(models.seconds, 1))

def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv in (["--help"], []):
        print(__doc__)
        return 2 * (not argv)
    torch.set_num_threads(1)  # of small kernels, more are slower
    try:
        models = Models()
        if argv[0] == "--check":
            print(json.dumps(check(models, int(argv[1]))))
            return 0
        print(calculate(models, " ".join(argv)), flush=True)
        print(f"{models.questions:,} questions in {models.batches:,} batches, "
              f"{models.seconds:.1f} s", file=sys.stderr)
        return 0
    except KeyboardInterrupt:
        error, code = "interrupted", 130
    except L.RunFailed as failure:
        error, code = failure, 1
    except (L.BadInput, OSError, RecursionError) as failure:
        error, code = failure, 2
    print(f"calculator: {error}", file=sys.stderr)
    return code

if __name__ == "__main__":
    sys.exit(main())
