# SPDX-License-Identifier: MIT
"""How fast lengen.py is here: python -m results.speed [--quick] [--from DIR]

Prints a record on each line; a ratio is to the line that it stands under, and of medians of
repetitions in turn, so that a slow moment hits both sides. If there is a GPU, steps and long
numbers are measured on it; all else is measured on the CPU.
"""

import json
import math
import os
import sys
import time
from functools import partial
from itertools import product
from statistics import mean, median, pstdev

import torch

import lengen as L

def interleaved(rounds, *calls):
    """Functions called in turn, once to warm up, then `rounds` times -> median seconds of each."""
    taken = [[] for _ in calls]
    for _ in range(1 + rounds):
        for call, times in zip(calls, taken):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [median(times[1:]) for times in taken]

class TorchTransformer(L.Transformer):
    """Ours with torch's decoder layers in the same shape."""
    def __init__(self, config):
        super().__init__(config)
        shape = config.d_model, config.n_head, 4 * config.d_model, config.dropout
        layer = torch.nn.TransformerDecoderLayer(*shape, batch_first=True, norm_first=True)
        self.decoder = torch.nn.TransformerDecoder(layer, config.n_layer)

    def forward(self, source, target):
        x, mask = self.embed(target, "target"), L.causal_bias(target.shape[1])[0]
        y = self.decoder(x, self.embed(source, "source"), tgt_mask=mask, tgt_is_causal=True)
        return self.head(self.norm(y))

def training_step(rounds):
    """-> seconds of a step of the default model, and with torch's layers."""
    config, steps = L.Config(task="successor", method="vanilla"), []
    data = L.numbers_data(config, L.split_numbers(0), config.steps, first_training=True)
    batch = data.batch(data.steps)
    for model_class in L.Transformer, TorchTransformer:
        model = model_class(config)
        steps.append(partial(L.take_step, model, L.Optimizer(model, config), *batch))
    return interleaved(rounds, *steps)

def literal_bias(attention, M, N, kappa):
    """Eq. 1 of ABC v2 as Algorithm 1 writes it: each element adds up its line anew."""
    H, m, n = attention.shape
    A, out = attention.tolist(), torch.full((H, M, N), -math.inf)
    for h, delta in product(range(H), (1, 0, -1)):
        lines, shift = {}, N - n if delta == -1 else 0  # a line is named by its place in row 0
        for i, j in product(range(m), range(n)):
            along = [A[h][i + k][j + k * delta] for k in range(-m, m + 1)
                     if 0 <= i + k < m and 0 <= j + k * delta < n]
            lines[j - i * delta] = sum(along) / len(along)
        d = list(lines.values())
        threshold = mean(d) + kappa * pstdev(d)
        for i, j in product(range(M), range(N)):
            value = lines.get(j - shift - i * delta, -math.inf)
            if value > threshold:
                out[h, i, j] = max(out[h, i, j], value - max(d))
    out[out.isneginf().all(2)] = 0
    return out

def calibration(shape, rounds):
    """-> seconds of the loops, once, and of `abc_bias`, which must agree."""
    attention, sizes, start = torch.rand(shape), shape[1:], time.perf_counter()
    expected, loop = literal_bias(attention, *sizes, 1.5), time.perf_counter() - start
    ours = partial(L.abc_bias, attention, *sizes, "v1", kappa=1.5)
    torch.testing.assert_close(ours(), expected, atol=1e-5, rtol=0)
    return loop, *interleaved(rounds, ours)

def steps_on_cuda(task, take, n):
    """-> losses of 50 steps, seconds of each of n more, drawing the batches included."""
    config = L.Config(task=task, method="vanilla")
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

def measure_cuda(n, model, questions):
    """-> rows on a GPU. Graphed and eager steps must have the same losses."""
    for task in "successor", "addition", "nx1", "parity":
        losses, eager = steps_on_cuda(task, L.take_step, n)
        replayed, graph = steps_on_cuda(task, L.graphed_step, n)
        torch.testing.assert_close(replayed, losses)
        yield f"a step of {task} on the GPU, as a graph", graph, None
        yield "- launched kernel by kernel", eager, eager / graph
    model.to("cuda")
    for digits in 1000, 100_000, 1_000_000:
        test = partial(L.right_tokens, model, *questions(digits, 1))
        yield f"test of a question of {digits:,} digits on the GPU", *interleaved(1, test), None

def untrained():
    """-> a model of sums with random weights and lines such as addition has, its config."""
    config, lines = L.Config(task="addition", method="abc"), []
    for h in range(config.n_head):
        lines.append(L.Line(h, 1, 0, 0, 0.0, 0.0, attention="self"))
        lines.append(L.Line(h, -1, h % 2, 0, 0.0, 0.0))
    return L.Transformer(config, lines), config

def measure(quick, folder):
    """-> rows (what, seconds, None or its ratio to what it stands under)."""
    model, config = L.load(folder)[:2] if folder else untrained()
    ours, theirs = training_step(10 if quick else 200)
    yield "a step of training, default model", ours, None
    yield "- with torch.nn.TransformerDecoderLayer", theirs, theirs / ours
    shape = (2, 8, 17) if quick else (8, 62, 125)
    loop, ours = calibration(shape, 5 if quick else 50)
    yield f"abc_bias, {' x '.join(map(str, shape))}", ours, None
    yield "- the loops of Eq. 1", loop, loop / ours
    questions = partial(L.draw_questions, config, L.draw_exact)
    if torch.cuda.is_available():
        yield from measure_cuda(20 if quick else 200, model, questions)

def main(argv=None):
    parser = L.Parser(prog="speed", description="How fast lengen.py is here.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--from", dest="folder", help="a finished run; by default random weights")
    try:
        options = parser.parse_args(argv)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # as lengen.py does for small models
        with L.seeded("speed"):
            for what, seconds, ratio in measure(options.quick, options.folder):
                print(json.dumps(dict(what=what, seconds=seconds, ratio=ratio)), flush=True)
    except L.BadInput as error:
        print(f"speed: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dict(what="torch", name=torch.__version__, source=L.SOURCE)))
    return 0

if __name__ == "__main__":
    sys.exit(main())
