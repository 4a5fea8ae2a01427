# SPDX-License-Identifier: MIT
"""Pictures, by matplotlib: python -m results.pictures FOLDER_OR_FILE... [--out DIR]

The folder of a finished run of the name RUN gets, by ABC,
    bias-RUN.png     the averaged attention of its vanilla model, and the bias calibrated from it
    lines-RUN.png    the open keys of all heads for one question, and one window
or else attention-RUN.png (of pairs, pairs-RUN.png). Files of records together get one picture, of
median seeds in bands from least to most:
    accuracy.png     percent exact by length
    by-OPTION.png    with --by OPTION, such as prime: percent exact by its values, a line a length,
                     and the largest length that is right in 75% of its questions"""

import argparse
import math
import sys
from pathlib import Path
from statistics import median

import torch

import lengen as L
from results.report import grouped, longest_right, percents, read_lines, test_rows

COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999"

def pyplot():
    """-> matplotlib.pyplot that draws to files."""
    import matplotlib
    matplotlib.use("agg")  # before pyplot looks for a screen
    import matplotlib.pyplot as plt
    cycle = plt.cycler(color=COLOURS, marker=list("osv^DPX<"))
    cycle = plt.cycler(linestyle=["-", "--", ":", "-."]) * cycle
    plt.rcParams.update({"axes.prop_cycle": cycle, "font.size": 9, "image.aspect": "auto",
                         "savefig.dpi": 80, "figure.constrained_layout.use": True,
                         "figure.max_open_warning": 0})
    return plt

def draw_attention(plt, model, config, parts):
    """The attention of the last layer, averaged over questions of six digits; by ABC that of the
    vanilla model, and the bias that was made from it, for 20 digits (grey: closed)."""
    rows, names, layer = [], ("self", "cross"), [*model.encoder, *model.decoder][-1]
    if "attention" in parts:
        source, target = L.draw_questions(config, L.draw_exact, 20, 1)
        T = target.shape[1] - 1
        for name, size, maps in zip(names, (T, source.shape[1]), parts["attention"]):
            bias = model.bias(config.n_layer - 1, name, T, size)
            low = min(bias[bias.isfinite()].min().item(), -0.1)
            rows += [(f"averaged {name}-attention", maps[-1], 0, 1), (f"{name} bias", bias, low, 0)]
    else:
        tests = dict(config.kind.draw_tests(config, min(6, *config.lengths), config.samples))
        model(tests["random"][0], tests["random"][1][:, :-1])
        modules = [x for x in layer.modules() if isinstance(x, L.MultiHeadAttention)]
        for name, module in zip(names, modules):
            rows.append((f"averaged {name}-attention", module.weights.mean(0), 0, 1))
    figure, grid = plt.subplots(len(rows), config.n_head, squeeze=False,
                                figsize=(11.5, 2.5 * len(rows)))
    for panels, (name, maps, low, high) in zip(grid, rows):  # maps (H, T, S) on one scale
        for h, axes in enumerate(panels):
            image = axes.imshow(maps[h].numpy(), vmin=low, vmax=high)
            axes.set(title=f"head {h}", xlabel="key", ylabel="output position",
                     facecolor="0.8")
        figure.colorbar(image, ax=list(panels), label=name, aspect=30)
    return figure

def draw_lines(plt, model, config, parts):
    """How many heads open each key, on one question of five digits, and the window of a row."""
    source, target = L.draw_questions(config, L.draw_exact, 5, 1)
    question, answer = L.decode(source[0]), L.decode(target[0])
    T, seen = len(answer) - 1, []
    row = min(3, T - 1)
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), width_ratios=[T, len(question)])
    for axes, name, tokens in zip(panels, ("self", "cross"), (answer[:-1], question)):
        heads = model.bias(0, name, T, len(tokens)) > -math.inf  # (H, T, S)
        axes.imshow(heads.sum(0).numpy(), cmap="Blues", vmin=0, vmax=config.n_head)
        axes.axhspan(row - 0.5, row + 0.5, fill=False, color=COLOURS[1], linewidth=2)
        axes.set(title=f"{name}-attention (darker: more heads)", ylabel="token to write")
        axes.set_xticks(range(len(tokens)), list(tokens))
        axes.set_yticks(range(T), list(answer[1:]))
        keys = heads[:, row].any(0).nonzero().flatten().tolist()
        seen.append(" ".join([tokens[key] for key in keys]))
    figure.suptitle(f"{question} -> {answer}: to write {answer[row + 1]}, the marked row sees "
                    f"{seen[0]} of the answer and {seen[1]} of the question", parse_math=False)
    return figure

def draw_pairs(plt, model, config):
    """Queries and keys of the tokens of a head with D = 2, joined in the order of every other token
    (Pairs, Observation 4)."""
    L.demand(config.d_head == 2, "only a head of --d-head 2 can be drawn")
    figure, axes = plt.subplots(figsize=(3.6, 3.6))
    x = model.embedding.weight
    for name, points in ("query", model.attention.q(x)), ("key", model.attention.k(x)):
        for first in 0, 1:
            xs, ys = points[first:config.d_vocab:2].T
            axes.plot(xs, ys, label=f"{name}, {('even', 'odd')[first]}")
        for token in range(config.d_vocab):
            axes.annotate(str(token), points[token].tolist())
    axes.legend()
    return figure

def draw_band(axes, x, values, name):
    """A line through the medians of values, lists of a number for each seed, in a band."""
    middle, low, high = ([float(of(seeds)) for seeds in values] for of in (median, min, max))
    [line] = axes.plot(x, middle, label=name, markersize=4)
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2)

def draw_accuracy(plt, records):
    """A line for each task, method and options that differ."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for (task, method, options), found in grouped(records).items():
        lengths = sorted({row["digits"] for row in test_rows(found)})
        shares = [percents(found, n) for n in lengths]
        draw_band(axes, lengths, shares, f"{task}, {method} {options}".strip())
    axes.axvspan(1, 6, color="0.92", zorder=0)
    axes.set(xlabel="digits (shaded: mainly trained on)", ylabel="percent exact", xscale="log",
             ylim=(-2, 102))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure

def draw_by_option(plt, records, option):
    """As Jelassi's Figs. 4a and 2a."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.5, 2.5))
    values = sorted({r["config"][option] for r in records})
    kinds = [[r for r in records if r["config"][option] == value] for value in values]
    x = [str(value) for value in values]
    for n in sorted({row["digits"] for row in test_rows(records)}):
        draw_band(left, x, [percents(kind, n) for kind in kinds], f"{n} digits")
    draw_band(right, x, [longest_right(kind) for kind in kinds], None)
    left.set(xlabel=option, ylabel="percent exact", ylim=(-2, 102))
    left.legend(fontsize=7)
    right.set(xlabel=option, ylabel="largest length with 75% exact", ylim=0)
    return figure

@torch.no_grad()
def draw_run(plt, path, name):
    """The pictures of the folder of a run -> {their name: figure}."""
    model, config, parts = L.load(path)
    L.seed_draws("picture")
    if config.model == "pairs":
        return {f"pairs-{name}": draw_pairs(plt, model, config)}
    attention = draw_attention(plt, model, config, parts)
    if "attention" not in parts:
        return {f"attention-{name}": attention}
    return {f"bias-{name}": attention, f"lines-{name}": draw_lines(plt, model, config, parts)}

def main(argv=None):
    parser = argparse.ArgumentParser("pictures", description="Pictures of runs and records.")
    parser.add_argument("paths", nargs="+", type=Path, help="folders of runs, files of records")
    parser.add_argument("--out", default="runs/pictures", help="folder of the pictures")
    parser.add_argument("--by", help="option that records are drawn by")
    options = parser.parse_args(argv)
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        plt, figures, records = pyplot(), {}, []
        for path in options.paths:
            if path.is_dir():
                figures |= draw_run(plt, path, path.name)
            else:
                records += read_lines(path)
        if records and options.by:
            figures[f"by-{options.by}"] = draw_by_option(plt, records, options.by)
        elif records:
            figures["accuracy"] = draw_accuracy(plt, records)
        for name, figure in figures.items():
            path = Path(options.out, f"{name}.png")
            figure.savefig(path)
            print(path)
    except (ImportError, OSError, ValueError, KeyError) as error:  # of JSON, too; no record
        print(f"pictures: {error}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main())
