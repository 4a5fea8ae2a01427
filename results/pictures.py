# SPDX-License-Identifier: MIT
"""Pictures of runs: python -m results.pictures FILE_OR_DIR... [--out DIR] [--question 123+748]

accuracy.png has all runs; a folder of a run gets training.png and what its model has of bias.png,
attention.png, places.png and pairs.png. Colours: Okabe and Ito.
"""

import dataclasses
import math
import sys
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import lengen as L
from results import records

title = lambda config: f"{config.task}, {config.model}, seed {config.seed}"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def pyplot():
    """matplotlib.pyplot that draws to files. Raises: ValueError where it is missing."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("matplotlib is missing: pip install matplotlib") from None
    plt.switch_backend("agg")
    cycle = plt.cycler(color=COLOURS * 2, marker=list("osv^DPX<>phd*8"))
    plt.rcParams.update({"axes.prop_cycle": cycle, "font.size": 9, "image.aspect": "auto",
                         "savefig.dpi": 80, "figure.constrained_layout.use": True})
    return plt


def heat_maps(panels, names, matrices, keys, rows, unit, low=None, high=None):
    """Matrices (T, S) on one scale of colours, grey where -inf."""
    for axes, name, matrix in zip(panels, names, matrices):
        image = axes.imshow(matrix.numpy(), vmin=low, vmax=high)
        axes.set(title=name, xlabel=keys, ylabel=rows, facecolor="0.8")
    panels[0].figure.colorbar(image, ax=list(panels), label=unit, aspect=30)


def accuracy(plt, groups):
    """Percent exact by digits, a panel a task: the median seed in a band from least to most."""
    tasks = list(dict.fromkeys(key[0] for key in groups))
    figure, grid = plt.subplots(len(tasks), squeeze=False, figsize=(8, 4 * len(tasks)))
    for (task, method, change), runs in groups.items():
        axes, config = grid[tasks.index(task), 0], runs[0]["config"]
        found = [(n, 100 * row["correct"] / row["n"]) for r in runs
                 for (n, name), row in r["columns"].items() if name == "random"]
        shares = {n: [share for m, share in found if m == n] for n, _ in sorted(found)}
        low, middle, high = (list(map(f, shares.values())) for f in (min, median, max))
        [line] = axes.plot(list(shares), middle, label=f"{method} {change}".removesuffix(" -"))
        axes.fill_between(list(shares), low, high, color=line.get_color(), alpha=0.2)
        base = L.TASKS[task].base if task in L.TASKS else 10
        largest = math.ceil(math.log(L.LIMIT, base))
        axes.axvspan(0.1, config.get("train_digits", largest), color="0.92")
        ticks = sorted({x for line in axes.lines for x in line.get_xdata()})
        axes.set(xscale="log", title=task, xlabel="digits of each number (shaded: trained on)",
                 ylabel="exact, percent", ylim=(-3, 103), xlim=(min(4, *ticks), 1.1 * ticks[-1]))
        axes.set_xticks(ticks, ticks)
        axes.set_xticks([], minor=True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)
    return figure


def teacher_of(config, parts):
    """-> the vanilla model that ABC looked at."""
    teacher = L.Transformer(dataclasses.replace(config, method="vanilla"))
    teacher.load_state_dict(parts["teacher"]["weights"])
    return teacher


def bias(plt, config, model, parts, record, question):
    """The teacher's last averaged attention, and the bias made from it, laid out for 20 digits."""
    heads, last = [f"head {h + 1}" for h in range(config.n_head)], config.n_layer - 1
    figure, grid = plt.subplots(4, len(heads), squeeze=False, figsize=(2.5 * len(heads) + 1.5, 10))
    S, T = (tokens.shape[1] for tokens in L.test_questions(config, 20)["random"])
    for kind, averaged, pair in zip(("self", "cross"), parts["attention"], (grid[:2], grid[2:])):
        made = model.bias(last, kind, T - 1, S if kind == "cross" else T - 1)
        low = min(float(made[made.isfinite()].min()), -0.1)
        places = "input position" if kind == "cross" else "output position", "output position"
        heat_maps(pair[0], heads, averaged[last], *places, f"averaged {kind}-attention", 0, 1)
        heat_maps(pair[1], heads, made, *places, f"{kind} bias (grey: closed)", low, 0)
    return figure


def attend(model, texts):
    """Source, target -> self- and cross-attention (H, T, S) of the last layer, wrong rows."""
    seen, layer = [], model.decoder[-1]
    hooks = [part.register_forward_hook(lambda module, given, out: seen.append(out[1][0]))
             for part in (layer.self_attention, layer.cross_attention)]
    right = L.right_tokens(model, *(L.encode(text)[None] for text in texts))
    for hook in hooks:
        hook.remove()
    return seen, (~right[0]).nonzero().flatten().tolist()


def attention(plt, config, model, parts, record, question):
    """Of the last layer for one question, a row a head, the teacher beside the model."""
    sign, H = L.TASKS[config.task].sign, config.n_head
    L.seed_by_name(config.seed, "picture")
    numbers = L.draw_test(config.task, 20, 1)
    question = question or sign.join(L.decode(a[0].flip(0)) for a in numbers)
    operands = question.split(sign or None)
    width = max(map(len, operands)) + L.TASKS[config.task].headroom
    texts = L.example(config.task, *operands, width=max(config.widths[0], width),
                      align=config.align)
    if len(texts[1]) > 100:
        raise ValueError(f"--question: {len(texts[1])} tokens are too many for a picture")
    models = [teacher_of(config, parts), model] if "teacher" in parts else [model]
    figure, grid = plt.subplots(H, 2 * len(models), squeeze=False, figsize=(8 * len(models), 3 * H),
                                width_ratios=[1, 1.7] * len(models))
    for model, columns in zip(models, (grid.T[:2], grid.T[2:])):
        weights, wrong = attend(model, texts)
        for panels, name, keys, part in zip(columns, ("output", "input"), texts[::-1], weights):
            heads = [f"{model.config.method}, head {h + 1}" for h in range(H)]
            heat_maps(panels, heads, part, f"{name} position", "output position", "weight", 0, 1)
            for axes in panels:
                axes.set_xticks(range(part.shape[2]), list(keys)[:part.shape[2]], fontsize=6)
                axes.set_yticks(range(part.shape[1]), list(texts[1])[1:], fontsize=6)
                axes.autoscale(False)
                axes.barh(wrong, 0.6, 1, part.shape[2] - 0.5, color=COLOURS[1], clip_on=False)
    figure.suptitle(f"{title(config)}: answer to\n{question}, orange on the right: wrong")
    return figure


def training(plt, config, model, parts, record, question):
    """Loss of every part by steps."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for name, part in record["train"].items():
        steps, losses, *_ = zip(*part["curve"])
        axes.plot(steps, losses, label=name)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title=title(config))
    axes.legend()
    return figure


def places(plt, config, model, parts, record, question):
    """Digits right by place and during training, answers wrong by carries (Jelassi, Fig. 6)."""
    figure, panels = plt.subplots(1, 3, figsize=(14, 4))
    for (digits, _), row in record["columns"].items():
        shares = [100 * share for share in row["places"]]
        panels[0].plot(range(1, len(shares) + 1), shares, label=f"{digits} digits")
    steps, _, *checks = zip(*record["train"]["model"]["curve"])
    panels[1].plot(steps, 100 * torch.tensor(checks).T.numpy(), label=range(1, 1 + len(checks)))
    L.seed_by_name(config.seed, "test", length := max(config.lengths))       # those of the test
    operands = L.draw_encoder(config, length, config.samples)
    asked = L.arrange_encoder(config.task, *operands, config.modulus)
    wrong = 100.0 * ~L.right_tokens(model, *asked).all(1)
    sums = L.ENCODER_TASKS[config.task].columns(*(F.pad(x, (0, config.width)) for x in operands))
    carries = (L.carry(sums, 10) != sums % 10).sum(1)        # into each place
    found = {n: wrong[carries == n] for n in carries.unique().tolist()}
    bars = panels[2].bar(list(found), [float(x.mean()) for x in found.values()])
    panels[2].bar_label(bars, [len(x) for x in found.values()], fontsize=7)
    panels[0].set(xlabel="place from the left", ylabel="digits right, percent", ylim=(-3, 108))
    panels[1].set(xlabel=f"step, at {config.train_digits} digits", ylim=(-3, 108))
    panels[2].set(xlabel=f"carries at {length} digits (above: questions)", ylim=(0, 108),
                  ylabel="answers wrong, percent", title=title(config))
    panels[0].legend()
    panels[1].legend(title="place")
    return figure


def pairs(plt, config, model, parts, record, question):
    """The scores of all integers, and their vectors where they have two dimensions."""
    vectors, flat = records.query_key(model), config.d_head == 2
    figure, [panels] = plt.subplots(1, 1 + flat, figsize=(5 + 4.5 * flat, 4.2), squeeze=False)
    heat_maps(panels[:1], [title(config)], [vectors[0] @ vectors[1].T], "key", "query", "score")
    for name, points in zip(("query", "key"), vectors if flat else ()):
        panels[1].plot(*points.T.numpy(), linestyle="none", label=name)
        for integer, point in enumerate(points.tolist()):
            panels[1].annotate(integer, point, (3, 3), textcoords="offset points", fontsize=7)
        panels[1].legend()
    return figure


def main(argv=None):
    parser = L.Parser(prog="pictures", description="Pictures of finished runs.")
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_DIR", help="runs, files of records")
    parser.add_argument("--out", help="folder; by default that of the first argument")
    parser.add_argument("--question", help="of attention.png; by default one of 20 digits")
    try:
        options = parser.parse_args(argv)
        plt, paths = pyplot(), list(map(Path, options.paths))
        groups = {key: x for key, x in records.read(paths).items() if key[0] != "consecutive"}
        folders = [path for path in paths if (path / "checkpoint.pt").exists()]
        out = Path(options.out or (paths[0] if paths[0].is_dir() else paths[0].parent))
        out.mkdir(parents=True, exist_ok=True)
        figures = {"accuracy": accuracy(plt, groups)} if groups else {}
        for folder in folders:
            record = records.read_record((folder / "result.json").read_text(), None)[-1]
            model, config, parts = L.load(folder)
            own = {"seq2seq": attention, "head": pairs}.get(config.model, places)
            for draw in (training, own, bias) if "teacher" in parts else (training, own):
                name = f"{folder.name}-" * (len(folders) > 1) + draw.__name__
                figures[name] = draw(plt, config, model, parts, record, options.question)
        for name, figure in figures.items():
            figure.savefig(out / f"{name}.png")
            print(out / f"{name}.png", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
