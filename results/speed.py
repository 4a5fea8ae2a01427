# SPDX-License-Identifier: MIT
"""How fast lengen.py is here: python -m results.speed [--quick]

Prints a record on each line; a ratio is to the line that it stands under, and of medians of
repetitions in turn, so that a slow moment hits both sides. If there is a GPU, steps and long
numbers are measured on it; all else is measured on the CPU.
"""

import argparse
import json
import os
import time
from functools import partial
from statistics import median

import torch

import lengen as L
from results import own

def interleaved(rounds, *calls):
    """Functions called in turn, once to warm up, then `rounds` times -> median seconds of each."""
    taken = [[] for _ in calls]
    for _ in range(1 + rounds):
        for call, times in zip(calls, taken):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [median(times[1:]) for times in taken]

def steps_on_cuda(task, take, n):
    """-> losses of 50 steps, seconds of each of n more, drawing the batches included."""
    config = L.Config(task, method="vanilla")
    with L.seeded("speed", task):
        model = L.Transformer(config).to("cuda")
    data = L.numbers_data(config, L.split_numbers(0), 50 + n, first_training=True)
    optimizer, losses = L.Optimizer(model, config), []
    for number in range(1, 51 + n):
        with L.seeded("speed", number):
            losses.append(take(model, optimizer, *data.batch(number)).clone())
        if number == 50:
            torch.cuda.synchronize()
            start = time.perf_counter()
    torch.cuda.synchronize()
    return torch.stack(losses[:50]), (time.perf_counter() - start) / n

def measure_cuda(n):
    """-> rows on a GPU. Graphed and eager steps must have the same losses. Long questions are sums,
    by random weights and lines such as addition has."""
    for task in "successor", "addition", "nx1", "parity":
        losses, eager = steps_on_cuda(task, L.take_step, n)
        replayed, graph = steps_on_cuda(task, L.graphed_step, n)
        torch.testing.assert_close(replayed, losses)
        yield f"a step of {task} on the GPU, as a graph", graph, None
        yield "- launched kernel by kernel", eager, eager / graph
    config, lines = L.Config("addition"), []
    for h in range(config.n_head):
        lines.append(L.Line(h, 1, 0, 0, 0.0, 0.0, attention="self"))
        lines.append(L.Line(h, -1, h % 2, 0, 0.0, 0.0))
    model = L.Transformer(config, lines).to("cuda")
    for digits in 1000, 100_000, 1_000_000:
        question = L.draw_questions(config, L.draw_exact, digits, 1)
        test = partial(L.right_tokens, model, *question)
        yield f"test of a question of {digits:,} digits on the GPU", *interleaved(1, test), None

def measure(n):
    """-> rows (what, seconds, None or its ratio to what it stands under)."""
    config, steps = L.Config("successor", method="vanilla"), []
    data = L.numbers_data(config, L.split_numbers(0), config.steps, first_training=True)
    batch = data.batch(data.steps)
    for model in L.Transformer(config), own.Model():  # in the same shape
        steps.append(partial(L.take_step, model, L.Optimizer(model, config), *batch))
    ours, theirs = interleaved(n, *steps)
    yield "a step of training, default model", ours, None
    yield "- with torch.nn.TransformerDecoderLayer", theirs, theirs / ours
    if torch.cuda.is_available():
        yield from measure_cuda(n)

def main(argv=None):
    parser = argparse.ArgumentParser(prog="speed", description="How fast lengen.py is here.")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    n = 10 if parser.parse_args(argv).quick else 200
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as lengen.py does for small models
    with L.seeded("speed"):
        for what, seconds, ratio in measure(n):
            print(json.dumps(dict(what=what, seconds=seconds, ratio=ratio)), flush=True)
    print(json.dumps(dict(what="torch", name=torch.__version__, source=L.SOURCE)))

if __name__ == "__main__":
    main()
