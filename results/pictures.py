# SPDX-License-Identifier: MIT
"""Pictures of runs: python -m results.pictures FILE_OR_DIR... [--out DIR] [--question 123+748]

accuracy.png has all runs; a folder of a run gets training.png and what its model has of bias.png,
attention.png, places.png and pairs.png. They go to --out, or to where this is run.
"""

import dataclasses
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import lengen as L
from results import records
from results.panels import COLOURS, draw_shares, heat_maps, pyplot

def title(config):
    return f"{config.task}, {config.model}, seed {config.seed}"

def accuracy(plt, groups):
    """Percent exact by digits, a panel a task."""
    tasks = list(dict.fromkeys(key[0] for key in groups))
    figure, grid = plt.subplots(len(tasks), squeeze=False, figsize=(8, 4 * len(tasks)))
    for (task, method, change), runs in groups.items():
        axes = grid[tasks.index(task), 0]
        draw_shares(axes, runs, f"{method} {change}".removesuffix(" -"))
        base = L.TASKS[task].base if task in L.TASKS else 10
        largest = math.ceil(math.log(L.LIMIT, base))
        axes.axvspan(0.1, runs[0]["config"].get("train_digits") or largest, color="0.92", zorder=0)
        ticks = set()
        for line in axes.lines:
            ticks |= set(line.get_xdata())
        ticks = sorted(ticks)
        axes.set(xscale="log", title=task, xlabel="digits of each number (shaded: trained on)",
                 ylabel="exact, percent", ylim=(-3, 103), xlim=(min(4, ticks[0]), 1.1 * ticks[-1]))
        axes.set_xticks(ticks, ticks)
        axes.set_xticks([], minor=True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False)
    return figure

def vanilla_of(config, parts):
    """-> the vanilla model that ABC looked at."""
    vanilla = L.Transformer(dataclasses.replace(config, method="vanilla", lengths=(6,)))
    vanilla.load_state_dict(parts["vanilla"]["weights"])
    return vanilla

def bias(plt, config, model, parts, record, question):
    """The vanilla model's last averaged attention, and the bias made from it, for 20 digits."""
    heads, last = [f"head {h + 1}" for h in range(config.n_head)], config.n_layer - 1
    figure, grid = plt.subplots(4, len(heads), squeeze=False, figsize=(2.5 * len(heads) + 1.5, 10))
    source, target = L.test_questions(config, 20)["random"]
    T, output = target.shape[1] - 1, "output position"
    own, cross = parts["attention"]
    for kind, averaged, S, keys, pair in [
            ("self", own, T, output, grid[:2]),
            ("cross", cross, source.shape[1], "input position", grid[2:])]:
        made = model.bias(last, kind, T, S)
        low = min(float(made[made.isfinite()].min()), -0.1)
        heat_maps(pair[0], heads, averaged[last], keys, output, f"averaged {kind}-attention", 0, 1)
        heat_maps(pair[1], heads, made, keys, output, f"{kind} bias (grey: closed)", low, 0)
    return figure

def attend(model, texts):
    """Source, target -> self- and cross-attention (H, T, S) of the last layer, wrong rows."""
    seen, hooks, layer = [], [], model.decoder[-1]

    def keep(module, inputs, outputs):
        seen.append(outputs[1][0])

    for part in layer.self_attention, layer.cross_attention:
        hooks.append(part.register_forward_hook(keep))
    source, target = (L.encode(text)[None] for text in texts)
    right = L.right_tokens(model, source, target)
    for hook in hooks:
        hook.remove()
    return seen, (~right[0]).nonzero().flatten().tolist()

def question_and_answer(config, question):
    """A question, or one of 20 digits -> it, and source and target as text."""
    spec = L.TASKS[config.task]
    if not question:
        with L.seeded(config.seed, "picture"):
            drawn = L.draw_questions(config, L.draw_exact, 20, 1)
        texts = [L.decode(tokens[0]) for tokens in drawn]
        return texts[0][1:-1], texts
    operands = [text.lstrip("0") or "0" for text in question.split(spec.sign or None)]
    width = max(config.widths[0], max(map(len, operands)) + spec.headroom)
    texts = L.example(config.task, *operands, width=width, align=config.align)
    if len(texts[1]) > 100:
        raise ValueError(f"--question: {len(texts[1])} tokens are too many for a picture")
    return question, texts

def label_tokens(axes, keys, answer, wrong, S):
    """Tokens along both axes; wrong rows are marked on the right."""
    axes.set_xticks(range(S), list(keys)[:S], fontsize=6)
    axes.set_yticks(range(len(answer) - 1), list(answer)[1:], fontsize=6)
    axes.autoscale(False)
    axes.barh(wrong, 0.6, 1, S - 0.5, color=COLOURS[1], clip_on=False)

def attention(plt, config, model, parts, record, question):
    """Of the last layer for one question, a row a head, the vanilla model beside it."""
    question, texts = question_and_answer(config, question)
    H, models = config.n_head, [model]
    if "vanilla" in parts:
        models = [vanilla_of(config, parts), model]
    figure, grid = plt.subplots(H, 2 * len(models), squeeze=False, figsize=(8 * len(models), 3 * H),
                                width_ratios=[1, 1.7] * len(models))
    for model, columns in zip(models, (grid.T[:2], grid.T[2:])):
        weights, wrong = attend(model, texts)
        heads = [f"{model.config.method}, head {h + 1}" for h in range(H)]
        for panels, name, keys, part in zip(columns, ("output", "input"), texts[::-1], weights):
            heat_maps(panels, heads, part, f"{name} position", "output position", "weight", 0, 1)
            for axes in panels:
                label_tokens(axes, keys, texts[1], wrong, part.shape[2])
    figure.suptitle(f"{title(config)}: answer to\n{question}, orange on the right: wrong")
    return figure

def training(plt, config, model, parts, record, question):
    """Loss of every part by steps."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for name, part in record["train"].items():
        steps = [point[0] for point in part["curve"]]
        axes.plot(steps, [point[1] for point in part["curve"]], label=name)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title=title(config))
    axes.legend()
    return figure

def wrong_by_carries(config, model, length):
    """-> {carries: for each question of the test with so many, 100 where it is wrong}."""
    spec = L.ENCODER_TASKS[config.task]
    with L.seeded(config.seed, "test", length):  # as in the test
        a, b = L.draw_encoder(config, length, config.samples)
    source, target = L.arrange_encoder(config.task, a, b, config.modulus)
    wrong = 100.0 * ~L.right_tokens(model, source, target).all(1)
    if "digit" in spec.operands:
        b = b @ 10 ** torch.arange(config.width)[:, None]  # (B, 1)
    a, b = F.pad(a, (0, config.width)), F.pad(b, (0, config.width * (b.shape[1] > 1)))
    alone = spec.total(0 * a, a, b) % 10  # each place without what comes from below
    carries = (L.answer_digits(spec, (a, b))[0] != alone).sum(1)
    return {n: wrong[carries == n] for n in carries.unique().tolist()}

def places(plt, config, model, parts, record, question):
    """Digits right by place and during training, answers wrong by carries (Jelassi, Fig. 6a)."""
    figure, panels = plt.subplots(1, 3, figsize=(14, 4))
    for (digits, _), row in record["columns"].items():
        shares = [100 * share for share in row["places"]]
        panels[0].plot(range(1, len(shares) + 1), shares, label=f"{digits} digits")
    curve = record["train"]["model"]["curve"]
    checks = [[100 * share for share in point[2:]] for point in curve]
    panels[1].plot([point[0] for point in curve], checks, label=range(1, 1 + len(checks[0])))
    length = max(config.lengths)
    found = wrong_by_carries(config, model, length)
    bars = panels[2].bar(list(found), [float(wrong.mean()) for wrong in found.values()])
    panels[2].bar_label(bars, [len(wrong) for wrong in found.values()], fontsize=7)
    panels[0].set(xlabel="place from the left", ylabel="digits right, percent", ylim=(-3, 108))
    panels[1].set(xlabel=f"step, at {config.train_digits} digits", ylim=(-3, 108))
    panels[2].set(xlabel=f"carries at {length} digits (above: questions)", ylim=(0, 108),
                  ylabel="answers wrong, percent", title=title(config))
    panels[0].legend()
    panels[1].legend(title="place")
    return figure

def pairs(plt, config, model, parts, record, question):
    """The scores of all integers, and their vectors where they have two dimensions."""
    queries, keys = records.query_key(model)
    n_panel = 2 if config.d_head == 2 else 1
    figure, [panels] = plt.subplots(1, n_panel, figsize=(0.5 + 4.5 * n_panel, 4.2), squeeze=False)
    heat_maps(panels[:1], [title(config)], [queries @ keys.T], "key", "query", "score")
    if n_panel == 2:
        for name, points in ("query", queries), ("key", keys):
            panels[1].plot(*points.T.numpy(), linestyle="none", label=name)
            for integer, point in enumerate(points.tolist()):
                panels[1].annotate(integer, point, (3, 3), textcoords="offset points", fontsize=7)
        panels[1].legend()
    return figure

OF_A_MODEL = {"seq2seq": attention, "pairs": pairs, "encoder": places}

def draw_all(plt, paths, question):
    """-> {name: figure}"""
    groups, figures = records.read(paths), {}
    groups = {key: runs for key, runs in groups.items() if key[0] != "consecutive"}
    if groups:
        figures["accuracy"] = accuracy(plt, groups)
    folders = [path for path in paths if (path / "checkpoint.pt").exists()]
    for folder in folders:
        record = records.read_record((folder / "result.json").read_text(), None)[-1]
        model, config, parts = L.load(folder)
        kinds = [training, OF_A_MODEL[config.kind]]
        if "vanilla" in parts:
            kinds.append(bias)
        for draw in kinds:
            name = draw.__name__
            if len(folders) > 1:
                name = f"{folder.name}-{name}"
            figures[name] = draw(plt, config, model, parts, record, question)
    return figures

def main(argv=None):
    parser = L.Parser(prog="pictures", description="Pictures of finished runs.")
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_DIR", help="runs, files of records")
    parser.add_argument("--out", default=".", help="folder; by default where this is run")
    parser.add_argument("--question", help="of attention.png; by default one of 20 digits")
    try:
        options = parser.parse_args(argv)
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        figures = draw_all(pyplot(), list(map(Path, options.paths)), options.question)
        for name, figure in figures.items():
            figure.savefig(out / f"{name}.png")
            print(out / f"{name}.png", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main())
