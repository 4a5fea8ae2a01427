# SPDX-License-Identifier: MIT
"""Rounding, bounded at every length: python -m results.rounding RUN... prints a record of each.

lengen.py reduces rows of all lengths to finitely many windows. Here these pass through the model in
float64 as balls, centers with radii (Moore 1966; Rump 1999). A radius bounds how far any evaluation
is from the exact value. The center is one, so others are within two radii of it, and a lead above
four radii is enough: center - 2 radius of the right logit exceeds center + 2 radius of any other.

An evaluation computes a row of any length that shows the window, by lengen's layers in float64. The
number is padded with zeros to the training width or more. Assumed is:

- A sum, difference or product errs by one unit in the last place at most, a factor within 1 +-
  UNIT; exp, a root or a quotient by four. Nothing overflows; underflow adds less than TINY.
- A sum of n products, in any order, fused or not, errs by at most gamma_n = n UNIT / (1 - n UNIT)
  times the sum of their sizes (Higham, Accuracy and Stability of Numerical Algorithms, Secs. 3.1
  and 4.2; his u is UNIT / 2). This excludes Strassen's method and emulated products.
- Mean and variance of C numbers up to M err by (4C + 40) UNIT times M and M^2: our count for the
  algorithms of his Sec. 1.9, two passes, updates, or the mean of squares less the squared mean. Of
  the 4C + 40, norms need no more than C + 10 for the mean, and 30 to subtract it and to scale.
- Weights and biases are the float32 numbers that this machine computes. The biases are those of
  lines, the same at any width.

A closed key has a finite score and value, and the weight exp(-inf) = 0. It adds exact zeros, so
only open keys count, of which there are at most MOST_OPEN. Rows with one window give the same share
to each token, to 9 decimals: shares differ by 1e-9 at most, and their logarithms by SPREAD / share,
with a tenth for the rounding of shares and for curvature. Zero queries and keys score exactly 0."""

import json
import math
import sys
from typing import NamedTuple

import torch

import lengen as L

UNIT = 2.0 ** -52
TINY = 1e-290
SAFE = 2.0 ** -16  # share of a radius, for its own rounding and for 1 / (1 - n UNIT)
SPREAD = 1.1e-9
MOST_OPEN = 1e6  # more than any model has lines

class Ball(NamedTuple):
    center: torch.Tensor
    radius: torch.Tensor
    size: torch.Tensor  # at least that of the exact value and of any computed one

    def apply(self, change):
        return Ball(*map(change, self))

def ball(center, radius):
    radius = radius * (1 + SAFE) + TINY
    return Ball(center, radius, center.abs() + 2 * radius)

def add(x, y):
    rounded = UNIT * (x.size + y.size)
    return ball(x.center + y.center, x.radius + y.radius + rounded)

def linear(layer, x):
    """x (..., C) -> weight x + bias (..., n)."""
    weight = layer.weight.abs().T
    rounded = (len(weight) + 1) * UNIT * (x.size @ weight + layer.bias.abs())
    return ball(layer(x.center), x.radius @ weight + rounded)

def mean(x):
    return x.mean(-1, keepdim=True)

def norm(layer, x):
    """x (..., C) -> (..., C). Where a computed variance may be negative, the radius is NaN."""
    center, radius, size = x
    counted = (4 * center.shape[-1] + 40) * UNIT
    largest = size.amax(-1, keepdim=True)
    off = center - mean(center)
    off_error = radius + mean(radius) + counted * largest
    off_size = off.abs() + 2 * off_error
    # If entries move by d, their variance moves by mean(2 off d) and the variance of d.
    moved = mean(2 * off_size * radius + radius ** 2)
    variance = mean(off * off) + layer.eps
    variance_error = moved + counted * largest ** 2
    scale = (variance * (1 - SAFE) - 2 * variance_error).rsqrt()  # the largest of any evaluation
    scale_error = variance_error * scale ** 3 / 2
    error = off_error * scale + off_size * scale_error
    return ball(off / variance.sqrt() * layer.weight + layer.bias,
                error * layer.weight.abs() + 4 * UNIT * layer.bias.abs())

def attend(layer, x, memory, bias):
    """x (B, T, C), memory (B, S, C), bias (1 or H, T, S) -> (B, T, C)."""
    def heads(y):
        return y.unflatten(-1, (layer.n_head, -1)).transpose(1, 2)
    q = linear(layer.q, x).apply(heads)  # (B, H, T, D)
    k = linear(layer.k, memory).apply(heads)
    v = linear(layer.v, memory).apply(heads)
    D = q.center.shape[3]
    closed = bias.isneginf()
    scores = q.center @ k.center.mT / D ** 0.5
    rounded = (D + 8) * UNIT * q.size @ k.size.mT
    score_error = (q.size @ k.radius.mT + q.radius @ k.size.mT + rounded) / D ** 0.5
    score_size = scores.abs() + 2 * score_error + bias.masked_fill(closed, 0).abs().max()
    shares = L.masked_softmax(0 * scores, bias).masked_fill(closed, 1)
    # A weight errs by its score's error and by that of the sum over all keys that it is divided by,
    # whose logarithm errs as much as the worst score. Adding the bias and subtracting the maximum
    # take three of the 4 UNIT; the 16 is for exp, above and below the line, and for the quotient.
    worst = score_error.amax(3, True) + SPREAD / shares.amin(3, True)
    worst = worst + 4 * UNIT * score_size.amax(3, True)
    log_error = 2 * worst + (MOST_OPEN + 16) * UNIT
    weights = L.masked_softmax(scores, bias)
    weights_size = weights * (2 * log_error).exp()
    rounded = weights_size * (log_error.expm1() + MOST_OPEN * UNIT)
    mixed = ball(weights @ v.center, weights_size @ v.radius + rounded @ v.size)
    return linear(layer.out, mixed.apply(lambda y: y.transpose(1, 2).flatten(2)))

def logits(model, source, target):
    """source (B, S), target (B, T) -> (B, T, V)."""
    [layer] = model.decoder
    T = target.shape[1]
    x = model.embed(target, "target")
    x = ball(x, UNIT * x.abs())  # positions are added
    y = norm(layer.norms[0], x)
    bias = model.bias(0, "self", T, T)  # causal, as no line shows a later token
    x = add(x, attend(layer.self_attention, y, y, bias))
    y = norm(layer.norms[1], x)
    memory = model.embed(source, "source")
    memory = ball(memory, UNIT * memory.abs())
    bias = model.bias(0, "cross", T, source.shape[1])
    x = add(x, attend(layer.cross_attention, y, memory, bias))
    hidden = linear(layer.feed_forward[0], norm(layer.norms[2], x))
    hidden = ball(hidden.center.relu(), hidden.radius)
    x = add(x, linear(layer.feed_forward[3], hidden))
    return linear(model.head, norm(model.norm, x))

@torch.no_grad()
def bound(folder):
    """The folder of a run -> its record; proved is a lead above 0. Raises: BadInput."""
    model, config, parts = L.load(folder)
    record = dict(task=config.task, seed=config.seed, proved=False)
    if (config.model, config.preset) != ("seq2seq", "fast"):  # others have norms elsewhere, or GELU
        return record | dict(why=f"no bound for {config.model}, preset {config.preset}")
    if not parts["proof"]["proved"]:
        return record | dict(why=parts["proof"]["why"])
    windows, found = L.enumerate_windows(config, model.double().bias.lines), []
    for source, target, _ in windows.questions:
        center, error, _ = logits(model, source, target[:, :-1])
        far = 2 * error + 4 * UNIT * center.abs()  # 4, as the lead is rounded, too
        right = target[:, 1:, None]
        lowest = (center - far).gather(2, right)
        highest = (center + far).scatter(2, right, -math.inf).amax(2, keepdim=True)
        found.append(torch.stack([(highest - lowest).max(), error.max()]))
    # A radius that is not a number bounds nothing. It counts as 1e308, as JSON has no NaN.
    behind, error = torch.stack(found).amax(0).nan_to_num(1e308).tolist()
    return record | dict(proved=behind < 0, windows=len(windows.seen), lead=round(-behind, 3),
                         error=round(error, 9))

def main(words):
    """-> exit code: 0 all runs are proved, 1 not all are, 2 bad input."""
    try:
        L.demand(words, "the arguments are RUN...")
        records = [bound(word) for word in words]
    except (L.BadInput, OSError) as error:
        print(f"rounding: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(json.dumps, records)))
    return int(not all(record["proved"] for record in records))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
