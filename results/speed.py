# SPDX-License-Identifier: MIT
"""How fast a step of training is here: python -m results.speed prints a record on each line.

On a GPU, steps are launched kernel by kernel and as a graph. Their batches are drawn, too.
"""

import json
import os
import time

import torch

import lengen as L

def seconds_of_step(task, take, device, n):
    """-> seconds, the mean of n steps, after two that warm up and capture."""
    config = L.Config(task, method="vanilla")
    with L.seeded("speed", task):
        model = L.Transformer(config).to(device)
    optimizer, numbers = L.Optimizer(model, config), L.split_numbers(0)
    data = L.numbers_data(config, numbers, n + 2, first_training=True)
    for step in range(1, n + 3):
        if step == 3:
            start = time.perf_counter()
        with L.seeded("speed", step):
            loss = take(model, optimizer, *data.batch(step))
        loss.item()  # waits for the GPU
    return (time.perf_counter() - start) / n

def main(n=200):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as lengen.py does for small models
    for task in "successor", "addition", "nx1", "parity":
        for take in (L.take_step, L.graphed_step)[:1 + (device == "cuda")]:
            seconds = seconds_of_step(task, take, device, n)
            what = f"{take.__name__} of {task}"
            print(json.dumps(dict(what=what, device=device, seconds=seconds)), flush=True)
    print(json.dumps(dict(torch=torch.__version__, source=L.SOURCE)))

if __name__ == "__main__":
    main()
