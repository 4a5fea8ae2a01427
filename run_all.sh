#!/usr/bin/env bash
# ./run_all.sh quick   ABC on the four tasks and the other methods on successor, one seed
# ./run_all.sh full    the tables' runs, but those marked as of earlier versions: many hours
# ./run_all.sh check   25 kills, 10,000 digits, two processes
#
# A line below is a file and the options of a run, as a reader would type them; its record goes into
# runs/records/FILE.jsonl, and what has one is not run again. JOBS=2 runs two at a time.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1
records=runs/records
mkdir -p "$records"
touch "$records/done"
rm -f "$records/failed"
long=6,10,15,20,50,60,100,200,500,1000

abc() { for task in successor addition nx1 parity; do for seed in "$@"; do
    echo "abc --task $task --seed $seed --lengths $long"
done; done; }

methods() { for task in successor addition nx1 parity; do for seed in "$@"; do
    for method in vanilla nope ape alibi alibi-decoder rope rpe-k rpe-kq; do
        echo "methods --task $task --method $method --seed $seed --lengths 6,10,20,60"
    done
    for method in window window-cyclic window-nope; do
        echo "methods --task $task --method $method --seed $seed --steps 1500 --lengths 6,10,20,60"
    done
done; done; }

papers() { for task in successor addition; do for method in vanilla rope alibi rpe-k; do
    echo "methods --task $task --method $method --n-encoder 1 --n-layer 6 --lengths 6,10,20,60"
done; done
size="--preset paper --optimizer muon --lr 4e-3 --batch 64 --samples 1000"
for seed in 0 1 2; do
    echo "methods --task successor --method rope --steps 1500 --seed $seed --lengths 6,10,20,60"
    echo "methods --task successor --method window $size --steps 300 --seed $seed"
    echo "methods --task parity --method window $size --steps 200 --seed $seed"
    rules="--rules paper --width 61 --n-head 8 --seed $seed"
    echo "methods --task successor --steps 1000 --batch 64 $rules"
    echo "methods --task nx1 $rules"
    echo "methods --task addition $rules"
done; }

encoders() { for seed in 0 1 2 3; do
    sums="--lengths 5,6,10,15,20 --width 22 --lr 2e-3 --seed $seed"
    echo "encoders --task elementwise-addition --method rpe-k $sums"
    echo "encoders --task elementwise-addition --method ape $sums"
    even="--model encoder --method rpe-kq --clip 3 --dropout 0 --lr 3e-3 --even --batch 256"
    even="$even --precision bf16 --width 12 --optimizer muon --steps 2200 --seed $seed"
    for modulus in 100 101 128; do
        echo "encoders --task modular-addition --modulus $modulus $even"
    done
    digit="--task multiplication --second-digits 1 --n-encoder 3 --lr 2e-3 --dropout 0 --steps 6000"
    digit="$digit --lengths 5,6,7,8 --width 9 --seed $seed"
    echo "encoders $digit --prime 500 --prime-lengths 7"
    echo "encoders $digit --finetune 1000 --prime-lengths 7"
done; }

pairs() { for seed in 0 1 2 3; do
    echo "pairs --task consecutive --seed $seed"
    echo "pairs --task consecutive --dummy --seed $seed"
    echo "pairs --task consecutive --dummy --d-vocab 256 --plant 0.5 --lr 1e-3 --steps 8000 --seed $seed"
    echo "pairs --task consecutive --dummy --d-head 2 --batch 300 --lr 1e-3 --steps 16000 --seed $seed"
    echo "pairs --task consecutive --dummy --d-head 4 --batch 300 --lr 1e-3 --steps 6000 --seed $seed"
done; }

run() {
    local file=$records/$1.jsonl part=$records/$BASHPID
    shift
    if grep -qxF -- "$*" "$records/done"; then return; fi
    if python lengen.py "$@" --quiet --json > "$part"; then
        cat "$part" >> "$file"
        echo "$*" >> "$records/done"
    else
        echo "FAILED: lengen.py $*" | tee -a "$records/failed" >&2
    fi
    rm -f "$part"
}

case ${1:-} in
    quick) runs() { abc 0; methods 0 | grep "task successor"; } ;;
    full) runs() { abc 0 1 2 3 4 5 6 7 8 9 30 31 32 33 34; methods 0 1 2; papers; encoders; pairs; } ;;
    check) exec python -m pytest -q -s -m check ;;
    *) echo "usage: ./run_all.sh quick|full|check" >&2 && exit 2 ;;
esac
while read -r line; do
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n || true; done
    run $line &
done < <(runs)
wait
python -m results.tables "$records"/*.jsonl
test ! -e "$records/failed"
