# SPDX-License-Identifier: MIT
"""How fast a step of training is here: python -m results.speed prints a record on each line.

On a GPU, steps are launched kernel by kernel and as a graph. Their batches are drawn, too."""

import json
import sys
import time

import torch

sys.path.append(sys.path[0] + "/..")  # for a start as a file
import lengen as L

def seconds_of_step(task, take, device, n=200):
    """-> seconds, the mean of n steps, after two that warm up and capture."""
    config = L.Config(task, method="vanilla")
    model = L.Transformer(config).to(device)
    optimizer, data = L.Optimizer(model, config), L.numbers_data(config, n + 2, first_training=True)
    for step in range(1, n + 3):
        if step == 3:
            start = time.perf_counter()
        share = torch.ones((), device=device)
        loss = take(model, optimizer, share, *data.batch(step))
    loss.item()  # waits for the GPU
    return (time.perf_counter() - start) / n

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for task in "successor", "addition", "nx1", "parity":
        steps = dict(eager=L.take_step)
        if device == "cuda":
            graphs = {}
            steps["graph"] = lambda model, optimizer, *batch: L.graphed_step(
                model, optimizer, graphs, *batch)
        for name, take in steps.items():
            seconds = seconds_of_step(task, take, device)
            print(json.dumps(dict(task=task, step=name, device=device, seconds=seconds)))
