#!/usr/bin/env bash
# Every run behind the README's tables, one record a line in results/*.jsonl (about an hour on two CPU cores).
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

: > results/pairs.jsonl
pairs() {
    echo "lengen.py --task consecutive $*" >&2
    python lengen.py --task consecutive --json --quiet "$@" >> results/pairs.jsonl
}
pairs --d-vocab 16 --d-head 32 --seeds 4
pairs --d-vocab 16 --d-head 32 --dummy --seeds 4
pairs --d-vocab 256 --d-head 32 --dummy --plant 0.5 --lr 1e-3 --steps 4000 --seeds 4
pairs --d-vocab 5 --d-head 2 --dummy --lr 1e-3 --batch 300 --steps 3000 --seeds 8
pairs --d-vocab 16 --d-head 2 --dummy --lr 1e-3 --batch 300 --steps 4000 --seeds 8
pairs --d-vocab 16 --d-head 4 --dummy --lr 1e-3 --batch 300 --steps 6000 --seeds 4
