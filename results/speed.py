# SPDX-License-Identifier: MIT
"""How fast lengen.py is here: python -m results.speed [--quick] [--json] [--from DIR]

Ratios are of medians of repetitions in turn, so that a slow moment hits both sides. Where there is
a GPU, steps and far numbers are measured on it; all else is measured on the CPU.
"""

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from statistics import mean, median, pstdev

import torch
from torch.utils.flop_counter import FlopCounterMode

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

def time_to_exact(seed, folder):
    """-> rows (what, seconds, None) of a run of successor into a folder, a process of its own."""
    start, command = time.perf_counter(), [sys.executable, L.__file__, "--task=successor"]
    command += [f"--seed={seed}", "--quiet", "--json", f"--out={folder}"]
    record = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    whole = time.perf_counter() - start
    parts = record["train"] | {"tests": record["tests"]}
    parts = {name: part["seconds"] for name, part in parts.items()}
    parts["all else: import, calibration"] = whole - sum(parts.values())
    exact = all(row["correct"] == row["n"] for row in record["tests"]["rows"])
    yield f"successor, seed {seed}, the process: {'' if exact else 'not '}exact", whole, None
    for name, seconds in parts.items():
        yield f"- {name}", seconds, None

class TorchTransformer(L.Transformer):
    """Ours with torch's decoder layers in the same shape."""
    def __init__(self, config):
        super().__init__(config)
        shape = config.d_model, config.n_head, 4 * config.d_model, config.dropout
        layers = torch.nn.TransformerDecoderLayer(*shape, batch_first=True, norm_first=True)
        self.decoder = torch.nn.TransformerDecoder(layers, config.n_layer)

    def forward(self, source, target):
        x, mask = self.embed(target, "target"), L.causal_bias(target.shape[1])[0]
        y = self.decoder(x, self.read(source), tgt_mask=mask, tgt_is_causal=True)
        return self.head(self.norm(y))

def training_step(rounds):
    """-> seconds of a step of the default model, of torch's layers, of its products alone."""
    config = L.Config(task="successor", method="vanilla")
    batch = L.training_batch(config, L.split_numbers(0)[0], config.batch)
    models = [kind(config) for kind in (L.Transformer, TorchTransformer)]
    steps = [partial(L.take_step, model, L.Optimizer(model, config.lr), *batch) for model in models]
    with FlopCounterMode(display=False) as counter:
        models[0](batch[0], batch[1][:, :-1]).sum().backward()
    square = torch.rand(1024, 1024)
    ours, theirs, one = interleaved(rounds, *steps, lambda: square @ square)
    return ours, theirs, counter.get_total_flops() / (2 * 1024 ** 3) * one

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

def synthetic():
    """-> model of sums with random weights and lines such as addition has, config."""
    config = L.Config(task="addition", method="abc")
    lines = [L.Line(h, *place, 0.0, 0.0, attention=kind) for h in range(config.n_head)
             for kind, place in (("self", (1, 0, 0)), ("cross", (-1, h % 2, 0)))]
    model = L.Transformer(config)
    model.bias = L.CalibratedBias(config, lines)
    return model, config

@torch.no_grad()
def greedy(model, source, limit):
    """Greedy decoding as it is written everywhere: a token at a time, all before it read again."""
    model.eval()
    target = torch.full((len(source), 1), L.VOCAB.index(L.START))
    for _ in range(limit):
        target = torch.cat([target, model(source, target).argmax(-1)[:, -1:]], 1)
    return target

def evaluation(model, source, target, rounds):
    """-> seconds of greedy decoding and of `right_tokens`, which must agree."""
    slow = partial(greedy, model, source, target.shape[1] - 1)
    written = slow()
    assert L.right_tokens(model, source, written).all(), "not what greedy decoding writes"
    return interleaved(rounds, slow, lambda: L.right_tokens(model, source, written))

def decoding(model, source, target, rounds):
    """-> seconds of an answer, passes it took."""
    passes = []
    with model.norm.register_forward_hook(lambda *_: passes.append(1)):
        [taken] = interleaved(rounds, lambda: L.generate(model, source, target.shape[1] - 1))
    return taken, len(passes) // (rounds + 1)

def steps_on_cuda(task, graphed, n):
    """-> losses of 50 steps, seconds of each of n more, drawing the batches included."""
    config = L.Config(task=task, method="vanilla")
    with L.seeded("speed", task):
        model = L.Transformer(config).to("cuda")
    data, losses = L.Numbers(config, 50 + n, first=True), []
    step = L.GraphedStep(model, L.make_optimizer(model, config), graphed)
    for number in range(1, 51 + n):
        with L.seeded("speed", number):
            losses.append(step(*data.batch(number)).clone())
        if number == 50:
            torch.cuda.synchronize()
            start = time.perf_counter()
    torch.cuda.synchronize()
    return torch.stack(losses[:50]), (time.perf_counter() - start) / n

def measure_cuda(quick, model, config):
    """-> rows on a GPU. Graphed and eager steps must have the same losses."""
    for task in "successor", "addition", "nx1", "parity":
        losses, eager = steps_on_cuda(task, False, 20 if quick else 200)
        replayed, graph = steps_on_cuda(task, True, 20 if quick else 200)
        torch.testing.assert_close(replayed, losses)
        yield f"a step of {task} on the GPU, as a graph", graph, None
        yield "- launched kernel by kernel", eager, eager / graph
    model.to("cuda")
    for digits in 1000, 100_000, 1_000_000:
        source, target = L.draw_questions(config, L.draw_exact, digits, 1)
        [taken] = interleaved(1, lambda: L.right_tokens(model, source, target))
        yield f"test of a question of {digits:,} digits on the GPU", taken, None

def measure(quick, seed, trained):
    """-> rows (what, seconds, None or its ratio to what it stands under)."""
    if quick and not trained:
        model, config = synthetic()
    else:
        with tempfile.TemporaryDirectory() as out:
            yield from () if quick else time_to_exact(seed, f"{out}/run")
            model, config, _ = L.load(trained or f"{out}/run")
    if config.model != "seq2seq":
        raise L.BadInput("--from: only encoder-decoders answer digit by digit")
    ours, theirs, floor = training_step(10 if quick else 200)
    yield "a step of training, default model", ours, None
    yield "- with torch.nn.TransformerDecoderLayer", theirs, theirs / ours
    yield "- matrix products alone, at the rate of 1024 x 1024", floor, floor / ours
    shape = (2, 8, 17) if quick else (8, 62, 125)
    loop, ours = calibration(shape, 5 if quick else 50)
    yield f"abc_bias, {' x '.join(map(str, shape))}", ours, None
    yield "- the loops of Eq. 1", loop, loop / ours
    digits, B = (10, 4) if quick else (60, 64)
    questions = partial(L.draw_questions, config, L.draw_exact)
    slow, ours = evaluation(model, *questions(digits, B), 1 if quick else 5)
    yield f"test of {B} questions of {digits} digits in one pass", ours, None
    yield "- greedy decoding, token by token", slow, slow / ours
    for digits in (100, 200) if quick else (1000, 10_000):
        taken, passes = decoding(model, *questions(digits, 1), rounds=1)
        yield f"a digit of an answer of {digits:,}, {passes} passes", taken / digits, None
    if torch.cuda.is_available():
        yield from measure_cuda(quick, model, config)

def main(argv=None):
    parser = L.Parser(prog="speed", description="How fast lengen.py is here.")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the run of successor")
    parser.add_argument("--from", dest="trained", metavar="DIR", help="what answers, else that run")
    try:
        options = parser.parse_args(argv)
        L.pick_device(L.Config(), "cpu")  # sets the threads
        with L.seeded("speed"):
            rows = list(measure(options.quick, options.seed, options.trained))
    except L.BadInput as error:
        print(f"speed: {error}", file=sys.stderr)
        return 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    place = dict(threads=torch.get_num_threads(), torch=torch.__version__, gpu=None,
                 peak_gib=round(peak / 2 ** 20, 3))
    if torch.cuda.is_available():
        place["gpu"] = torch.cuda.get_device_name()
    if options.json:
        print(json.dumps(dict(rows=rows, **place)))
        return 0
    print("| what | time | ratio |\n| --- | --- | --- |")
    for what, seconds, ratio in rows:
        print(f"| {what} | {1e3 * seconds:,.2f} ms | {f'{ratio:.3g}' if ratio else '-'} |")
    print("", ", ".join(f"{name}: {x}" for name, x in place.items()), sep="\n")
    return 0

if __name__ == "__main__":
    sys.exit(main())
