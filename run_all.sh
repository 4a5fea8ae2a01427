#!/usr/bin/env bash
# ./run_all.sh quick   successor, addition, nx1, parity by every method at small size, and the headline runs
# ./run_all.sh full    every run of the tables in results/, those not yet run among them: many hours
# ./run_all.sh alone   ABC on the four tasks, seeds 0 to 9, for their times: 50 minutes, nothing beside it
# ./run_all.sh check   25 kills, memory, signals, two processes: five minutes
#
# A run is one record, one line in results/*.jsonl; what is there already for the same source is not run again, but the
# test on 10,000 digits of "full". The tables are printed at the end. JOBS=2 runs two at a time on half the threads
# each; seconds then mean little. With several GPUs, runs take turns on them; JOBS says how many run at once.
set -euo pipefail
cd "$(dirname "$0")"
mode=${1:-quick}
jobs=${JOBS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / jobs > 0 ? $(nproc) / jobs : 1))}
mkdir -p results
records=results/results.jsonl

if [ "$mode" = check ]; then
    exec python -m pytest -q -s -m check
fi
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l || true)
started=0

start() {                                   # start FILE ARGUMENTS: as soon as fewer than $jobs are running
    local file=$1
    shift
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
    echo "lengen.py $*" >&2
    if [ "$gpus" -gt 1 ]; then export CUDA_VISIBLE_DEVICES=$((started++ % gpus)); fi
    (python lengen.py --quiet --record "$file" "$@" > /dev/null || echo "FAILED: lengen.py $*" >&2) &
}
record() { start "$records" "$@"; }
small() { start results/quick.jsonl "$@"; }
pairs() { start results/pairs.jsonl --task consecutive "$@"; }
encoder() { start results/encoder.jsonl "$@"; }
ablate() {                                  # with the teacher of the run in runs/full, if it is there
    local folder=runs/full/$2-$4
    if [ -e "$folder/checkpoint.pt" ]; then record --teacher "$folder" "$@"; else record "$@"; fi
}

if [ "$mode" = quick ]; then
    for task in successor addition nx1 parity; do
        small --task "$task" --method abc --lengths 6,10,20,60 --hard 60 --samples 1000
    done
    for method in vanilla nope ape alibi rope rpe-k rpe-kq window window-cyclic window-nope; do
        for task in successor addition nx1 parity; do
            small --task "$task" --method "$method" --n-layer 1 --steps 600 --lengths 6,10,20 --hard 20 --samples 200
        done
    done
    wait
    python lengen.py --report results/quick.jsonl
    exit
fi
if [ "$mode" = alone ]; then
    for task in addition successor nx1 parity; do
        for seed in 0 1 2 3 4 5 6 7 8 9; do
            start results/alone.jsonl --task "$task" --method abc --seed "$seed"
        done
    done
    wait
    python lengen.py --report results/alone.jsonl
    exit
fi
[ "$mode" = full ] || { echo "usage: ./run_all.sh quick|full|alone|check" >&2; exit 2; }

# ABC on every seed
for task in successor addition nx1 parity; do
    record --task "$task" --method abc --seed 0 --out "runs/full/$task-0" --overwrite --samples 10000 --lengths 6,10,15,20,50,60,100,200,500,1000 --hard 60,1000
done
for seed in 1 2 3 4 5 6 7 8 9; do
    for task in successor addition nx1 parity; do
        record --task "$task" --method abc --seed "$seed" --out "runs/full/$task-$seed" --overwrite --lengths 6,10,15,20,50,60,100,200,500,1000
    done
done
wait

# The papers' tables, natural width; those with a number of steps would take all 8,000
papers() {                                  # their 60 digits are 200 bits
    local lengths=6,10,15,20,50,60
    if [ "$2" = parity ]; then lengths+=,200; set -- "$@" --long-samples 1000; fi
    record "$@" --lengths "$lengths" --samples 10000
}
for method in window-cyclic window-nope vanilla rope rpe-k rpe-kq ape; do
    for task in successor addition nx1 parity; do
        papers --task "$task" --method "$method"
    done
done
for method in window alibi nope; do
    for task in successor addition nx1 parity; do
        papers --task "$task" --method "$method" --steps 3000
    done
done
for task in successor addition nx1 parity; do
    for more in "window-cyclic" "window-nope" "window --steps 3000" "vanilla"; do
        papers --task "$task" --seed 1 --method $more
    done
done
record --task parity-label --method vanilla --steps 3000 --lengths 6,10,15,20,50,60 --samples 10000
record --task addition --method rope --n-encoder 1 --lengths 6,10,15,20,50,60
record --task parity --method rpe-k --n-encoder 1 --lengths 6,10,15,20,50,60
record --task parity --method vanilla --lr 1e-5 --lengths 6,10,15,20,50,60
record --task parity --method vanilla --lr 1e-4 --lengths 6,10,15,20,50,60

# Parts of the calibration, taken out one by one, with the teachers of the first runs
for task in successor addition nx1 parity; do
    for seed in 0 1 2 3 4; do
        for change in "--directions-cross=-1" "--directions-cross=1,0,-1" "--directions-self 1,0,-1" "--support 0" "--floor 0" "--kappa-cross 0.1" "--kappa-cross 0.3" "--kappa-self 0.2" "--layer last" "--empty all" "--no-blocks" "--calibrate-on scores" "--line sum" "--penalty 10" "--spread 0" "--cooldown 0"; do
            ablate --task "$task" --seed "$seed" $change --method abc --lengths 6,20,60,200
        done
    done
done

# Other bases
for base in 2 4 8; do
    for task in successor addition; do
        record --task "$task" --method abc --base "$base" --lengths 6,10,15,20,50,60,200
    done
done

# The authors' fixed width, where a step takes seven to eleven times as long
for method in vanilla rope window window-cyclic window-nope rpe-k ape; do
    record --task successor --method "$method" --width 61 --spread 0 --steps 800 --lengths 6,10,15,20,50,60
done
record --task successor --method abc --width 61 --spread 0 --lengths 6,10,15,20,50,60
for method in rpe-kq alibi nope; do
    record --task successor --method "$method" --width 61 --spread 0 --steps 800 --lengths 6,10,15,20,50,60
done
record --task addition --method vanilla --width 61 --spread 0 --steps 2000 --lengths 6,10,15,20,50,60
record --task addition --method abc --width 61 --spread 0 --lengths 6,10,15,20,50,60     # refused if it does not interpolate

# Encoder-only models
sums="--lengths 5,6,7,8,10 --width 12"
wide="--model encoder --n-layer 2 --d-model 256 --n-head 8 --init 0.02 --dropout 0 --precision bf16 --steps 5000 --every 500"
encoder --task addition $sums $wide --method rpe-k
encoder --task addition $sums $wide --method rpe-k --seed 1
patient="--task addition --even --lengths 5,6,7,8,10 --width 10 --dropout 0 --every 250"        # half an hour to two hours each on one core
encoder $patient --model universal --n-layer 6 --d-model 256 --n-head 8 --precision bf16 --steps 21000 --warmup 1000
encoder $patient --model encoder --n-layer 3 --d-model 256 --n-head 8 --init 0.02 --precision bf16 --steps 33000 --warmup 500
encoder $patient --model encoder --n-layer 3 --d-model 128 --n-head 4 --init 0.02 --steps 21000 --warmup 500
deep="--task addition --even --model universal --n-layer 6 --every 250 --precision bf16 --dropout 0.1"   # the next ten: 75 minutes to two and a half hours each
encoder $deep --lengths 5,6,7,8,9,10 --width 10 --clip 12 --d-model 256 --n-head 8 --steps 15000 --warmup 1000
encoder $deep --lengths 5,6,7,8,9,10 --width 12 --clip 14 --d-model 256 --n-head 8 --steps 10000 --warmup 1000
encoder $deep --lengths 5,6,7,8,9,10 --width 14 --clip 16 --d-model 256 --n-head 8 --steps 10000 --warmup 1000
encoder $deep --lengths 5,6,7,8,9,10 --width 18 --clip 20 --d-model 256 --n-head 8 --steps 10000 --warmup 1000
encoder $deep --lengths 5,6,7,8,9,10 --width 12 --clip 14 --d-model 256 --n-head 8 --n-train 50000 --batch 32 --every 500 --steps 20000 --warmup 1000
encoder $deep --lengths 5,6,7,8,9,10 --width 14 --clip 16 --d-model 256 --n-head 8 --n-train 50000 --batch 32 --every 500 --steps 15000 --warmup 1000
encoder $deep --lengths 5,6,7,8,9,10 --width 14 --clip 16 --d-model 256 --n-head 8 --n-train 50000 --batch 32 --every 500 --steps 21000 --warmup 1000
encoder $deep --lengths 5,6,7,8,9,10 --width 14 --clip 16 --d-model 256 --n-head 8 --n-train 50000 --batch 32 --every 500 --steps 21000 --warmup 1000 --seed 1
encoder $deep --lengths 5,6,7,8,9,10 --width 14 --clip 16 --d-model 256 --n-head 8 --n-train 50000 --batch 32 --every 500 --steps 21000 --warmup 1000 --method rpe-kq
encoder $deep --lengths 5,6,7,8,9,10 --width 16 --clip 18 --d-model 256 --n-head 8 --n-train 50000 --batch 32 --every 500 --steps 18500 --warmup 1000
encoder $deep --lengths 5,6,7,8,9,10 --width 12 --clip 14 --d-model 128 --n-head 4 --steps 24000 --warmup 500
three="$deep --train-digits 3 --lengths 3,4,5,6 --d-model 128 --n-head 4 --steps 4000 --warmup 300"
for change in "--width 6" "--width 6 --precision float32" "--width 6 --precision float32 --init 0.02" "--width 6 --norm post --init 0.02" "--width 12" "--width 6 --clip 8" "--width 12 --clip 14"; do
    encoder $three $change --dropout 0
done
for change in "--width 6" "--width 6 --clip 6" "--width 6 --clip 8" "--width 6 --clip 8 --dropout 0.2" "--width 12 --clip 14"; do
    encoder $three $change
done
encoder --task addition --model universal $sums --lr 2e-3 --n-layer 3 --method rpe-k --steps 7000 --every 1000
encoder --task addition --model universal $sums --lr 2e-3 --n-layer 3 --method ape --steps 4000 --every 100
for method in rpe-k ape; do
    for more in "--every 100" "--every 500 --even"; do
        encoder --task elementwise-addition $sums --lr 2e-3 --method "$method" --steps 2000 $more
    done
done
encoder --task elementwise-addition $sums --lr 2e-3 --method ape --steps 6000 --every 1000
for seed in 1 2; do
    for method in rpe-k ape; do
        encoder --task elementwise-addition $sums --lr 2e-3 --method "$method" --steps 2000 --every 100 --seed "$seed"
    done
done
encoder --task elementwise-addition $sums --lr 2e-3 --method vanilla --steps 6000 --every 1000
twenty="--lengths 5,6,10,15,20 --width 22"      # the paper's lengths, and places for the longest
for seed in 0 1 2; do
    for method in rpe-k ape; do
        encoder --task elementwise-addition $twenty --lr 2e-3 --method "$method" --steps 2000 --every 100 --seed "$seed"
    done
done
encoder --task addition --model universal $sums --lr 2e-3 --n-layer 3 --method vanilla --steps 4000 --every 500
digit="--task multiplication --second-digits 1 --n-layer 3 --lr 2e-3 --dropout 0 --steps 6000 --every 500"
for lengths in 10 6,7,8,9,10 6,8,10; do
    encoder $digit --lengths 5,6,7,8,9,10 --width 11 --prime-lengths "$lengths" --prime 500
done
encoder $digit --lengths 5,6,7,10,15,19,20,21 --width 22 --prime-lengths 20 --prime 500 --every 100
for more in "--n-train 1000 --prime 100" "--n-train 1000 --prime 250" "--n-train 20000 --prime 500" "--n-train 20000 --prime 1000" "--finetune 100" "--finetune 1000"; do
    encoder $digit --lengths 5,6,7,8 --width 9 --prime-lengths 7 $more
done
for more in "6 --prime 50" "6 --prime 100" "10 --prime 100" "10 --prime 250" "10 --prime 500 --method ape"; do
    encoder $digit --lengths 5,6,7,8,9,10 --width 11 --prime-lengths $more
done
for more in "--prime 50" "--prime 100" "--prime 250" "--prime 500" "--prime 500 --method ape" "--finetune 500"; do
    encoder $digit --lengths 5,6,7,8 --width 9 --prime-lengths 7 $more
done
for more in "--method ape --every 100" "--method rpe-kq" "--prime-lengths 6,7 --prime 500" "--model encoder"; do
    encoder $digit --lengths 5,6,7,8 --width 9 $more
done
for more in "" "--d-model 128 --lr 1e-3 --precision bf16 --steps 5000" "--method rpe-kq"; do
    encoder $digit --lengths 5,6,7,8 --width 9 --prime-lengths 7 --prime 500 --model encoder $more
done
encoder --task multiplication --second-digits 2 --n-layer 3 --d-model 128 --lr 1e-3 --dropout 0 --precision bf16 --lengths 5,6,7,8 --width 9 --steps 8000 --every 250
encoder --task multiplication --second-digits 2 --n-layer 3 --d-model 128 --lr 1e-3 --dropout 0 --precision bf16 --lengths 5,6,7,8,9,10,11 --width 12 --prime-lengths 10 --prime 500 --steps 50000 --every 1000   # an hour
modular="--task modular-addition --dropout 0 --lr 3e-3 --lengths 5,6,10"
encoder $modular --width 10 --batch 512 --method rpe-kq --steps 1800 --every 200
encoder $modular --width 10 --batch 512 --method ape --steps 2500 --every 250
even="--even --width 12 --batch 256 --every 150 --precision bf16"
for more in "--method rpe-kq --clip 3" "--method rpe-kq --clip 3 --seed 1" "--method rpe-kq --clip 3 --modulus 101" "--method rpe-kq --clip 3 --modulus 128" "--method rpe-k --clip 3" "--method ape"; do
    encoder $modular $even --model encoder --steps 2400 $more
done
encoder $modular $even --model encoder --steps 3000 --method rpe-kq --clip 4 --modulus 1000
encoder $modular $even --model encoder --steps 5000 --method rpe-k --clip 4 --modulus 1000
encoder $modular $even --model encoder --steps 4000 --method rpe-kq --clip 3 --seed 1
for more in "--model encoder --method vanilla" "--model encoder --method vanilla --seed 1" "--n-layer 3 --method vanilla" "--model encoder --method rpe-k --clip 3" "--model encoder --method rpe-k --clip 3 --seed 1"; do
    encoder $modular $even --steps 5000 $more
done
encoder $modular $even --model encoder --steps 2400 --method rpe-kq --clip 3 --seed 2
for seed in 2 3; do
    encoder $modular $even --model encoder --steps 5000 --method vanilla --seed "$seed"
done
for seed in 0 1 2; do
    encoder $modular $even $twenty --model encoder --steps 2400 --method rpe-kq --clip 3 --seed "$seed"
    encoder $modular $even $twenty --model encoder --steps 5000 --method vanilla --seed "$seed"
done
encoder $modular $even $twenty --model encoder --steps 2400 --method rpe-kq
for seed in 0 1 2 3 4; do
    encoder $modular $even --model encoder --steps 4000 --method rpe-kq --clip 3 --dropout 0.1 --seed "$seed"
done
encoder $modular $even --model encoder --steps 5000 --method ape --modulus 1000
for seed in 0 1 2; do
    encoder $modular $even --n-layer 3 --steps 1800 --method rpe-kq --clip 3 --seed "$seed"
    encoder $modular $even --n-layer 3 --steps 1800 --method rpe-kq --clip 3 --n-train 50000 --seed "$seed"
    encoder $modular $even --n-layer 3 --steps 3000 --method rpe-kq --clip 3 --dropout 0.1 --seed "$seed"
    encoder $modular $even $twenty --n-layer 3 --steps 2400 --method rpe-kq --clip 3 --dropout 0.1 --seed "$seed"
done
encoder $modular $even $twenty --model encoder --steps 5000 --method rpe-kq --clip 3 --seed 1
for seed in 1 2; do
    encoder $modular $even --n-layer 3 --d-model 128 --n-head 8 --steps 1500 --method rpe-kq --clip 3 --seed "$seed"
done
encoder $modular $even --model encoder --steps 2400 --method ape --norm post --init 0.02 --lr 1e-3
for method in ape rpe-kq; do
    encoder --task modular-multiplication --even --width 10 --batch 256 --lr 3e-3 --dropout 0 --every 150 --precision bf16 --steps 2400 --lengths 5,6,10 --method "$method"
done
products="--task modular-multiplication --dropout 0 --lr 3e-3 --lengths 5,6,10"
encoder $products $even --model encoder --steps 8000 --method rpe-kq --clip 3
encoder $products $even --model encoder --steps 8000 --method rpe-kq --clip 3 --seed 1
encoder $products $even --model encoder --steps 8000 --method ape

# Consecutive pairs
pairs --d-vocab 16 --d-head 32 --seeds 4
pairs --d-vocab 16 --d-head 32 --dummy --seeds 4
pairs --d-vocab 256 --d-head 32 --dummy --plant 0.5 --lr 1e-3 --steps 8000 --seeds 4
pairs --d-vocab 5 --d-head 2 --dummy --lr 1e-3 --batch 300 --steps 3000 --seeds 8
pairs --d-vocab 8 --d-head 2 --dummy --lr 1e-3 --batch 300 --steps 4000 --seeds 8
pairs --d-vocab 8 --d-head 2 --dummy --lr 1e-3 --batch 300 --steps 10000 --seeds 4
pairs --d-vocab 16 --d-head 2 --dummy --lr 1e-3 --batch 300 --steps 16000 --seeds 4
pairs --d-vocab 16 --d-head 4 --dummy --lr 1e-3 --batch 300 --steps 6000 --seeds 4
wait

python lengen.py --eval runs/full/addition-0 --lengths 10000 --long-samples 20 --hard 10000 --record results/long.jsonl || echo "FAILED: 10,000 digits" >&2
python lengen.py --benchmark --json > results/benchmark.json
for name in results encoder pairs; do python lengen.py --report "results/$name.jsonl" | tee "results/$name.md"; done
