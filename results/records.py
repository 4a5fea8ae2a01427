# SPDX-License-Identifier: MIT
"""Records of finished runs: read, grouped by task, method and changed options."""

import dataclasses
import math
import sys
from pathlib import Path
from statistics import mean

import torch

import lengen as L
from results import shares

def query_key(model):
    """Pairs: query and key of every integer, (V, D) each; scores = queries @ keys.T."""
    attention = model.attention
    x = model.embedding.weight[:model.config.d_vocab]
    return attention.q(x).detach(), attention.k(x).detach() / attention.d_head ** 0.5

def score_patterns(scores):
    """Scores (V, V) -> mean of neighbors less all others; of other odd distances less even."""
    integers = torch.arange(len(scores))
    distance = (integers[:, None] - integers).abs()
    near, odd = distance == 1, distance % 2 == 1

    def contrast(high, low):
        return float(scores[high].mean() - scores[low].mean())

    return dict(neighbour_gap=contrast(near, ~near), checkerboard=contrast(odd & ~near, ~odd))

def circle_order(vectors):
    """Vectors (V, 2), V >= 6 -> of even and odd integers the rank correlation of angle and value,
    without its sign; the circle is cut at its widest gap."""
    found = []
    for points in vectors[0::2], vectors[1::2]:
        angle, value = torch.atan2(points[:, 1], points[:, 0]).sort()
        gap = (angle.roll(-1) - angle) % (2 * torch.pi)
        value = value.roll(-1 - int(gap.argmax()))
        both = torch.stack([value, torch.arange(len(value))]).double()
        found.append(abs(float(torch.corrcoef(both)[0, 1])))
    return found

def wilson(correct, n, z=1.959964):
    """95% interval of a share (Wilson 1927)."""
    centre = correct + z * z / 2
    half = z * math.sqrt(correct * (n - correct) / n + z * z / 4)
    return max(0.0, (centre - half) / (n + z * z)), min(1.0, (centre + half) / (n + z * z))

def usual_options(given):
    """Defaults of a run like this one. Options that decide others are taken from it, as far as the
    others go."""
    def defaults(*names):
        return dataclasses.asdict(L.Config(**{x: given[x] for x in names if x in given}))

    same, leading = ("task", "model", "preset", "method"), ("size", "width", "n_train", "prime")
    plain, first = defaults(*same), L.Config(given["task"]).model
    usual = defaults(*same, "lengths", *leading) | {name: plain[name] for name in leading}
    return usual | dict(preset="fast", model=first)

def changed_options(config):
    """Options of a record that are not the defaults, as flags, but for what was tested."""
    given, flags = {}, []
    for name, value in config.items():
        if value is not None:
            given[name] = tuple(value) if isinstance(value, list) else value
    usual = usual_options(given)
    for name, value in given.items():
        if name in ("task", "method", "seed", "lengths", "samples") or value == usual.get(name):
            continue
        flags.append(L.flag(name))
        if isinstance(value, tuple):
            flags.append(",".join(map(str, value)))
        elif value is not True:
            flags.append(str(value))
    return " ".join(flags) or "-"

def look_at_pairs(folder):
    """What the scores of a head of pairs look like."""
    queries, keys = query_key(L.load(folder)[0])
    found = score_patterns(queries @ keys.T)
    if queries.shape[1] == 2 and len(queries) >= 6:
        found["circle_order"] = mean(circle_order(queries) + circle_order(keys))
    return found

def read_record(line, folder):
    """A line of JSON -> records with "key" (task, method, changed options), seed and "columns"
    {(digits, set): row}, one more of tests before fine-tuning. Older ones may lack the rest."""
    record, found = dict(train={}, before=None) | shares.parse(line), []
    config = record["config"]
    stages = {" (before)": record["before"], "": record["tests"]}
    if record["train"]:
        seconds = [part["seconds"] for part in record["train"].values()]
        seconds += [tests["seconds"] for tests in stages.values() if tests]
        record["seconds"] = sum(seconds)
    if config["task"] == "consecutive" and folder and (folder / "checkpoint.pt").exists():
        record |= look_at_pairs(folder)
    for stage, tests in stages.items():
        if tests:
            columns = {}
            for row in tests["rows"]:
                interval = wilson(row["correct"], row["n"])
                columns[row["digits"], row.get("set", "random")] = row | dict(interval=interval)
            changed = changed_options(config)
            if "changed" in record:  # from outside
                changed += f" ({record['changed']})"
            key = config["task"], config.get("method") or "-", changed + stage
            found.append(record | dict(key=key, seed=config["seed"], columns=columns))
    return found

def read(paths):
    """Files and folders -> {key: records}, of each seed the last. Raises: ValueError."""
    files = []
    for path in map(Path, paths):
        finished = sorted(path.rglob("result.json"))
        if path.is_dir() and not finished:
            print(f"no finished run in {str(path)!r}", file=sys.stderr)
        files += finished or ([] if path.is_dir() else [path])
    by_seed = {}
    for file in files:
        folder = file.parent if file.name == "result.json" else None
        with L.reading(f"{str(file)!r}"):
            for line in file.read_text(encoding="utf-8").splitlines():
                for record in read_record(line, folder):
                    by_seed.setdefault(record["key"], {})[record["seed"]] = record
    tasks = [task for tasks in L.TASKS_OF.values() for task in tasks]
    return {key: [found[seed] for seed in sorted(found)]
            for key, found in sorted(by_seed.items(), key=lambda item: tasks.index(item[0][0]))}
