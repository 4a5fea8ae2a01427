#!/usr/bin/env bash
# ./run_all.sh quick   ABC on the four tasks and the other methods on successor, one seed
# ./run_all.sh full    README's runs, but rows marked * and n x 3: many hours
# ./run_all.sh check   25 kills, 10,000 digits, two processes
#
# A line of the lists has the options of runs; braces stand for all of their values. Records go to
# runs/records/LIST.jsonl, and what has one is not run again. JOBS=2 runs two at a time.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=1
records=runs/records
mkdir -p "$records"
touch "$records/done" && rm -f "$records/failed"

long="--lengths 6,10,15,20,50,60,100,200,500,1000"
abc=("--task "{successor,addition,nx1,parity}" --seed "{{0..9},{30..34}}" $long")
at="--lengths 6,10,20,60,200"
size="--method window --preset paper --optimizer muon --lr 4e-3 --batch 64 --samples 1000"
rules="--rules paper --width 61 --n-head 8 --lr 4e-3 --batch 64"
deep="--n-encoder 1 --n-layer 6"
methods=(
    "--task successor --steps 1500 --method rope --seed "{0..2}" $at"
    "--task "{successor,"addition --steps 2000 --lr 4e-3"}" --method "{vanilla,rope,alibi,rpe-k}" $deep $at"
    "--task addition --lr 4e-3 --steps 1500 --method window-cyclic $deep $at --seed "{0..2}
    "--task "{"successor --steps 300","parity --steps 200"}" $size --seed "{0..2}
    "--task successor --steps 1000 --retrain-steps 350 $rules --seed "{0..2}
    "--task "{addition,nx1}" --steps 2000 --retrain-steps 1000 $rules"
)
for task in successor "addition --steps 2000 --lr 4e-3" "nx1 --steps 1200 --lr 4e-3 --batch 64" \
    "parity --steps 320"; do
    methods+=("--task $task --method "{vanilla,nope,ape,alibi,rope,rpe-k}" --seed "{0..2}" $at")
    methods+=("--task $task --method "{rpe-kq,alibi-decoder}" --seed "{0..2}" $at")
done
for task in successor "addition --lr 4e-3" "nx1 --lr 4e-3 --batch 64" parity; do
    methods+=("--task $task --steps 1500 --method window"{,-cyclic,-nope}" --seed "{0..2}" $at")
    methods+=("--task $task --steps 1500 --method window-nope $deep $at --seed "{0..2})
done
sums="--lengths 5,6,10,15,20 --width 22 --lr 2e-3"
modular="--model encoder --method rpe-kq --clip 3 --dropout 0 --even --width 12 --precision bf16"
muon="--optimizer muon --lr 3e-3 --batch 256 --steps 2200"
digit="--second-digits 1 --n-encoder 3 --lr 2e-3 --dropout 0 --steps 6000 --width 9 --prime-lengths 7"
encoders=(
    "--task elementwise-addition --method "{rpe-k,ape}" $sums --seed "{0..3}
    "--task modular-addition --modulus "{100,101,128}" $modular $muon --seed "{0..2}
    "--task multiplication $digit --lengths 5,6,7,8 --"{"prime 500","finetune 1000"}" --seed "{0..3}
)
dummy="--dummy --lr 1e-3"
pairs=(
    "--task consecutive "{,--dummy}" --seed "{0..3}
    "--task consecutive $dummy --d-vocab 256 --plant 0.5 --steps 8000 --seed "{0..3}
    "--task consecutive $dummy --batch 300 --d-head "{"2 --steps 16000","4 --steps 6000"}" --seed "{0..3}
)
every=("${abc[@]/#/abc }" "${methods[@]/#/methods }"
    "${encoders[@]/#/encoders }" "${pairs[@]/#/pairs }")

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
    quick) wanted="^(abc|methods --task successor) .*--seed 0 --lengths" ;;
    full) wanted="" ;;
    check) exec python -m pytest -q -s -m check ;;
    *) echo "usage: ./run_all.sh quick|full|check" >&2 && exit 2 ;;
esac
while read -r line; do
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n || true; done
    run $line &
done < <(printf '%s\n' "${every[@]}" | grep -E -- "$wanted")
wait
python -m results.tables "$records"/*.jsonl
test ! -e "$records/failed"
