# SPDX-License-Identifier: MIT
"""Is the file that is being rewritten still the same to the bit: python .ci/same.py OLD NEW [WORDS]

OLD and NEW are folders that each hold a lengen.py. Every command of COMMANDS is run by both, once
(a finished run stays), and curves, weights, lines, windows, margins and rows of tests are compared.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

TASKS = "successor", "addition", "nx1", "parity"
COMMANDS = [f"--task {task} --seed {seed}" for seed in range(5) for task in TASKS]
for method in ("vanilla", "nope", "ape", "alibi", "alibi-decoder", "rope", "rpe-k", "rpe-kq",
               "window", "window-cyclic", "window-nope"):
    COMMANDS.append(f"--task addition --method {method} --steps 300 --seed 1")
COMMANDS += [
    "--task successor --method window-cyclic", "--task parity --method window-nope",
    "--task parity-label --steps 100 --retrain-steps 30",
    "--task nx1 --n-encoder 1 --n-layer 2 --n-head 2 --steps 300 --retrain-steps 100",
    "--task successor --rules v1 --retrain-steps 60",
    "--task nx1 --rules v2 --width 61 --steps 300 --retrain-steps 30",
    "--task successor --rules v2 --retrain-steps 60",
    "--task successor --rules code --n-layer 2 --retrain-steps 60",
    "--task nx1 --method vanilla --preset paper --steps 10 --lengths 6 --samples 20 --batch 20",
    "--task consecutive --dummy --steps 1000", "--task consecutive --d-vocab 5 --steps 500",
    "--task addition --model universal --steps 300 --prime 50",
    "--task multiplication --model encoder --method rpe-kq --steps 200 --finetune 50 "
    "--retrain-steps 50",
    "--task elementwise-addition --model encoder --method rope --modulus 100 --steps 100",
    "--task addition --model universal --preset paper --steps 3 --samples 20 --d-model 64 "
    "--n-head 4 --lengths 5,6",
    "--task successor --seed 7 --dropout 0.1 --retrain-steps 60 STOP 100 STOP 130",
    "--task addition --model encoder --steps 120 --finetune 50 --retrain-steps 30 STOP 40 STOP 90",
    "--task addition --method window-cyclic --steps 200 STOP 77",
]
RUNNER = """
import sys
sys.path.insert(0, ".")
import lengen
command, *stops = sys.argv[2].split(" STOP ")
out, take_step = sys.argv[1], lengen.take_step
lengen.SECONDS = -1 if stops else 3
arguments = command.split() + ["--out", out]
for stop in stops:
    count = 0
    def counted(*given):
        global count
        count += 1
        if count == int(stop):
            raise KeyboardInterrupt
        return take_step(*given)
    lengen.take_step = counted
    assert lengen.main(arguments + ["--quiet"]) == 130
    arguments = ["--from", out]
lengen.take_step = take_step
sys.exit(lengen.main(arguments + ["--quiet", "--json"]))
"""

def result(folder, command):
    """Run a command in this folder, unless it has been -> its record and all weights."""
    name = "runs/" + command.replace("--", "").replace(" ", "-").replace(",", "-")
    out = folder / name
    if not (out / "result.json").exists() and not (folder / f"{name}.failed").exists():
        run = subprocess.run([sys.executable, "-c", RUNNER, name, command], cwd=folder,
                             capture_output=True, text=True)
        if run.returncode:
            Path(f"{out}.failed").write_text(run.stderr.strip().split("\n")[-1])
    if Path(f"{out}.failed").exists():
        return dict(failed=Path(f"{out}.failed").read_text())
    record = json.loads((out / "result.json").read_text())
    parts = torch.load(out / "checkpoint.pt", weights_only=True)["parts"]
    for name, part in record["train"].items():
        weights = parts[name]["weights"]
        part["weights"] = {x: y.tolist() for x, y in weights.items() if torch.is_tensor(y)}
        part.pop("seconds")
    kept = dict(train=record["train"], lines=record["lines"], proof=record["proof"])
    for tests in "before", "tests":
        kept[tests] = record[tests] and record[tests]["rows"]
    if "attention" in parts:
        kept["attention"] = [maps.tolist() for maps in parts["attention"]]
    return kept

def differences(old, new, path=""):
    """Where two records differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({**old, **new}):
            yield from differences(old.get(key), new.get(key), f"{path}/{key}")
    elif old != new:
        yield f"{path}: {str(old)[:60]} -> {str(new)[:60]}"

def main(old, new, wanted=""):
    different = 0
    for command in COMMANDS:
        if wanted in command:
            found = list(differences(*(result(Path(x), command) for x in (old, new))))
            different += bool(found)
            print("different" if found else "equal    ", command, *found[:8], sep="\n    ")
            sys.stdout.flush()
    print(different, "differ")
    return different > 0

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
