#!/usr/bin/env bash
# ./run_all.sh quick   ABC on the four tasks and the other methods on successor, one seed
# ./run_all.sh full    README's runs, but for position schemes and scripts: many hours
# ./run_all.sh NAME    one of its lists: abc, widths, methods, rules, encoders, pairs
#
# Records go to runs/records/LIST.jsonl; what has one is not run again. JOBS=2: two at a time.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1
export records=runs/records
lines=()

seeds() {  # seeds "0 1 2" LIST OPTION...: a run a seed
    for seed in $1; do
        lines+=("${*:2} --seed $seed")
    done
}

list_abc() {
    for task in successor addition nx1 parity; do
        seeds "${1:-$(seq -s ' ' 0 99)}" abc --task $task --lengths 6,10,20,60,1000
    done
}

list_widths() {  # how small a model of addition may be
    local small="--retrain-steps 1000 --lengths 6,60 --samples 200 --d-model"
    for size in "32 --steps 3000" "16 --steps 10000" "12 --steps 10000" "8 --steps 10000"; do
        seeds "0 1 2" widths --task addition $small $size
    done
}

list_methods() {
    local at="--lengths 6,10,20,60,200" deep="--n-encoder 1 --n-layer 6"
    local successor="--task successor" addition="--task addition --steps 2000 --lr 4e-3"
    local nx1="--task nx1 --steps 1200 --lr 4e-3 --batch 64" parity="--task parity --steps 320"
    for task in "$successor" "$addition" "$nx1" "$parity"; do
        for method in vanilla nope ape alibi alibi-decoder; do
            seeds "0 1 2" methods $task --method $method $at
        done
        seeds "0 1 2" methods $task --steps 1500 --method window-nope $deep $at
    done
    seeds "0 1 2" methods --task parity --method window --width 201 --steps 300 $at
    for task in successor addition nx1 parity; do
        for method in window window-cyclic window-nope rope rpe-k rpe-kq; do
            seeds "0 1 2" methods --task $task --method $method $at
        done
    done
    seeds "0 1 2" methods --task parity-label --method vanilla --steps 2000
    seeds "0 1 2" methods $addition --steps 1500 --method window-cyclic $deep $at
    for method in vanilla rope alibi rpe-k; do
        seeds 0 methods $successor --method $method --steps 350 $deep $at
        seeds 0 methods $addition --method $method $deep $at
    done
}

list_rules() {
    local size="--width 61 --n-head 8 --lr 4e-3 --batch 64" long="--steps 2000 --retrain-steps 1000"
    for rules in paper v2 code; do
        for task in "successor --steps 1000" "addition $long" "nx1 $long"; do
            seeds "0 1 2" rules --rules $rules $size --task $task
        done
    done
}

list_encoders() {
    local product="--task multiplication --lengths 5,6,7,8,9,10"
    local addition="--model universal --task addition" modular="--modulus 100 --clip 3"
    for method in rpe-k rpe-kq ape; do
        seeds "0 1 2" encoders $product --method $method
        seeds "0 1 2" encoders $addition --method $method --lengths 5,6,8,10
        seeds "0 1 2" encoders $addition --method $method $modular --steps 8000
        seeds "0 1 2" encoders $product --method $method $modular --second-digits 3
    done
    for method in rpe-k ape; do
        seeds "0 1 2" encoders --task elementwise-addition --method $method --lengths 5,6,10,15,20
    done
    local ten="--prime-lengths 10"
    for more in "--prime 10 $ten" "--prime 25 $ten" "--prime 50 $ten" "--prime 100 $ten" \
            "--prime 500 $ten" "--prime 500 --prime-lengths 6,7,8,9,10" \
            "--prime 500 --prime-lengths 6,8,10" "--finetune 100 $ten" "--finetune 1000 $ten"; do
        seeds "0 1 2" encoders $product $more
    done
    for modulus in 101 128; do
        seeds "0 1 2" encoders $addition --method rpe-kq --modulus $modulus --steps 8000
    done
    seeds "0 1 2" encoders $product --second-digits 2 --d-model 128 --lr 2e-3 --steps 20000
}

list_pairs() {
    for more in "" --dummy "--dummy --d-head 4" "--dummy --d-head 2 --steps 16000" \
            "--dummy --d-head 2 --d-vocab 5 --steps 3000" \
            "--dummy --d-vocab 256 --plant 0.5 --batch 1000 --steps 8000"; do
        seeds "0 1 2 3" pairs --task consecutive $more
    done
}

run() {  # run LIST OPTION...
    local part=$records/$BASHPID options=${*:2}
    if grep -qxF -- "$options" "$records/done"; then return; fi
    if python lengen.py $options --quiet --json > "$part"; then
        cat "$part" >> "$records/$1.jsonl"
        echo "$options" >> "$records/done"
    else
        echo "FAILED: lengen.py $options" | tee -a "$records/failed" >&2
    fi
    rm -f "$part"
}

case ${1:-} in
    quick)
        list_abc 0
        for method in vanilla nope ape alibi rope rpe-k window window-cyclic; do
            seeds 0 methods --task successor --method $method
        done ;;
    full)
        for name in abc widths methods rules encoders pairs; do list_$name; done ;;
    abc|widths|methods|rules|encoders|pairs) list_$1 ;;
    *) echo "usage: ./run_all.sh quick|full|abc|widths|methods|rules|encoders|pairs" >&2; exit 2 ;;
esac
mkdir -p "$records"
touch "$records/done" && rm -f "$records/failed"
export -f run
printf '%s\n' "${lines[@]}" | xargs -P "${JOBS:-1}" -I LINE bash -c 'run LINE'
python -m results.tables "$records"/*.jsonl
test ! -e "$records/failed"
