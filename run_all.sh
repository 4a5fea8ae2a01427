#!/usr/bin/env bash
# Every run behind the README's tables, one record a line in results/results.jsonl (about half an hour on two CPU cores).
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p results
records=results/results.jsonl

record() {
    echo "lengen.py $*" >&2
    python lengen.py --json --quiet "$@" >> "$records"
}

: > "$records"
for seed in 0 1 2; do
    for task in successor addition nx1 parity; do
        record --task "$task" --method abc --seed "$seed" --lengths 6,10,20,60,200
    done
done
for method in vanilla nope ape alibi rope rpe-k rpe-kq window window-cyclic window-nope; do
    record --task successor --method "$method"
done
record --task successor --method window --width 61 --spread 0
python -m pytest -m timing -s -q | grep ratio | tee results/timing.txt
