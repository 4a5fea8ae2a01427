# SPDX-License-Identifier: MIT
"""Rounding, bounded at every length: python -m results.rounding RUN... [--json]

Windows, to which lengen.py reduces rows of every length, pass through a model in float64 as balls,
centers with radii (Moore 1966; Rump 1999). A radius bounds how far the exact value is from the
center and from what any evaluation computes, so two evaluations differ by twice the radius at
most. In all, the right token leads if center - 2 radius of its logit > center + 2 radius of all
others. An evaluation computes a row of any length that shows the window, by lengen's layers in
float64. An operation errs by a unit in the last place at most, a factor within 1 +- UNIT, and exp,
roots and divisions by four. Nothing overflows; underflow adds less than TINY. A sum of n products,
in any order, fused or not, errs by gamma_n = n UNIT / (1 - n UNIT) times the sum of their sizes
(Higham, Accuracy and Stability of Numerical Algorithms, Secs. 3.1, 4.2; UNIT is twice his u), but
not by Strassen's method or emulation. Mean and variance of C numbers up to M err by gamma_(4C +
40) times M and M^2, by two passes, Welford's updates or the mean of squares less the squared mean
(Sec. 1.9). A closed key has the weight exp(-inf) = 0, exactly, and a finite value. It adds zeros:
only open keys count. Weights, biases and positions are float32 numbers that this machine computes
(torch's default type), exact in float64. Windows are equal to 9 decimals, so shares may differ by
SPREAD; `rounding` is the largest error without this. Only runs that lengen.py has proved, long
numbers measured, are bounded, for numbers padded with zeros to the training width."""

import json
import math
import sys

import torch

sys.path.append(sys.path[0] + "/..")  # for a start as a file
import lengen as L

UNIT, TINY, SPREAD, SAFE = 2.0 ** -52, 1e-290, 1.1e-9, 2.0 ** -16

def ball(center, radius):
    radius = radius * (1 + SAFE) + TINY  # for 1 / (1 - n UNIT), and as it is rounded itself
    return center, radius, center.abs() + 2 * radius  # bounds the exact value and any computed one

def add(x, y):
    return ball(x[0] + y[0], x[1] + y[1] + UNIT * (x[2] + y[2]))

def linear(layer, x):
    """A ball x of center (..., C) -> that of weight x + bias (..., n)."""
    rounded = (x[0].shape[-1] + 1) * UNIT * (x[2] @ layer.weight.abs().T + layer.bias.abs())
    return ball(layer(x[0]), x[1] @ layer.weight.abs().T + rounded)

def norm(layer, x):
    """x (..., C) -> (..., C). A radius is not a number where a computed variance may be below 0."""
    mean, (center, radius, size) = lambda y: y.mean(-1, keepdim=True), x
    most, share = size.amax(-1, keepdim=True), (4 * center.shape[-1] + 40) * UNIT
    off, off_radius = center - mean(center), radius + mean(radius) + share * most
    off_size, variance = off.abs() + 2 * off_radius, mean(off * off) + layer.eps
    # Entries that move by d move the variance by mean(2 off d) and the variance of d. 40 is for any
    # order of subtracting, scaling, multiplying and adding numbers of at most 2 most scale.
    moved = mean(2 * off_size * radius + radius * radius) + share * most ** 2
    scale = (variance * (1 - SAFE) - 2 * moved).rsqrt()  # the largest of any evaluation
    moved = off_radius * scale + off_size * moved * scale ** 3 / 2 + 40 * UNIT * most * scale
    return ball(off / variance.sqrt() * layer.weight + layer.bias,
                moved * layer.weight.abs() + 4 * UNIT * layer.bias.abs())

def attend(layer, x, memory, bias, row, spread):
    """x (B, 1, C) attends to memory (B, S, C) by one row of bias (1 or H, T, S) -> (B, 1, C)."""
    q, k, v = ([part.unflatten(-1, (layer.n_head, -1)).transpose(1, 2) for part in linear(way, y)]
               for way, y in ((layer.q, x), (layer.k, memory), (layer.v, memory)))
    n, D = (bias > -math.inf).sum(2).max().item(), q[0].shape[3]
    bias = bias[:, row:row + 1].double()
    scores = q[0] @ k[0].mT / D ** 0.5
    moved = q[2] @ k[1].mT + q[1] @ k[2].mT + (D + 8) * UNIT * q[2] @ k[2].mT
    moved, shares = moved / D ** 0.5, L.masked_softmax(0 * scores, bias)  # by the bias alone
    moved = moved + 4 * UNIT * (scores.abs() + 2 * moved + bias.abs()) + spread / shares
    # If scores move by d at most, so does the logarithm of what a weight is divided by.
    moved = 2 * moved.masked_fill(bias.isneginf(), 0).amax(3, keepdim=True) + (n + 16) * UNIT
    weights = L.masked_softmax(scores, bias)
    most = weights * (2 * moved).exp()
    mixed = ball(weights @ v[0], most @ v[1] + most * (moved.expm1() + n * UNIT) @ v[2])
    return linear(layer.out, [part.transpose(1, 2).flatten(2) for part in mixed])

def logits(model, source, target, row, spread):
    """source (B, S), target (B, T) -> center and radius (B, V) of the logits of one row."""
    x, memory = (ball(y, UNIT * y.abs() * bool(model.position)) for y in (
        model.embed(target, "target"), model.embed(source, "source")))
    [layer], T, S = model.decoder, target.shape[1], source.shape[1]
    y, bias = norm(layer.norms[0], x), L.bias_between(model.bias, "self", T, T)
    x, here = ([part[:, row:row + 1] for part in whole] for whole in (x, y))
    x = add(x, attend(layer.self_attention, here, y, bias, row, spread))
    y, bias = norm(layer.norms[1], x), L.bias_between(model.bias, "cross", T, S)
    x = add(x, attend(layer.cross_attention, y, memory, bias, row, spread))
    center, radius, _ = linear(layer.feed_forward[0], norm(layer.norms[2], x))
    x = add(x, linear(layer.feed_forward[3], ball(center.relu(), radius)))
    return [part[:, 0] for part in linear(model.head, norm(model.norm, x))[:2]]

@torch.no_grad()
def bound(folder):
    """The folder of a run -> its record. Raises: BadInput."""
    model, config, parts = L.load(folder)
    record, found = dict(task=config.task, seed=config.seed, proved=False), []
    kind = f"{config.model}, preset {config.preset}"  # others have norms elsewhere, or GELU
    windows = kind == "seq2seq, preset fast" and L.enumerate_windows(config, model.double().bias)
    if not windows or windows.why:
        return record | dict(verdict=windows.why if windows else f"no bound for {kind}")
    if not parts["proof"]["proved"]:
        return record | dict(verdict="not proved by lengen.py, rounding aside")
    for source, target, [row] in windows.questions:
        right, target = target[:, row + 1, None], target[:, :-1]
        center, rounding = logits(model, source, target, row, 0.0)
        error = logits(model, source, target, row, SPREAD)[1]
        far = 2 * error + 4 * UNIT * center.abs()  # 4, as the lead is rounded, too
        lead = (center - far).gather(1, right) - (center + far).scatter(1, right, -math.inf)
        found.append(torch.stack([(-lead.amin(1)).max(), error.max(), rounding.max()]))
    found = torch.stack(found).amax(0).nan_to_num(1e308)
    behind, error, rounding = [float(f"{x:.4g}") for x in found.tolist()]
    verdict = "exact at every length in float64, rounding included" if behind < 0 else "not proved"
    return record | dict(proved=behind < 0, windows=len(windows.seen), lead=-behind,
                         error=error, rounding=rounding, verdict=verdict)

def main(words):
    """-> exit code: 0 all runs are proved, 1 not all are, 2 bad input."""
    try:
        records = [bound(word) for word in words if word != "--json"]
        L.demand(records, "the arguments are RUN... [--json]")
    except L.BadInput as error:
        print(f"rounding: {error}", file=sys.stderr)
        return 2
    for record in records:
        L.show(json.dumps(record) if "--json" in words else str(record)[1:-1].replace("'", ""))
    return int(not all(record["proved"] for record in records))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
