#!/usr/bin/env bash
# ./run_all.sh quick   ABC on the four tasks and other methods on successor, one seed
# ./run_all.sh LIST    a list of results/runs.txt: abc, widths, methods, rules, changes, ...
# ./run_all.sh full    all of them but quick: many hours
#
# Records go to runs/records/LIST.jsonl; what has one is not run again. JOBS=2: two at a time.
set -euo pipefail
CDPATH= cd "$(dirname "$0")"
export OMP_NUM_THREADS=1
export records=runs/records

run() {  # run LIST OPTION...
    local part failed=0 command="lengen.py ${*:2}"
    case "$1" in
        schemes | changes | readings | positions | windows | short | control | deep | planted | \
        encoders)
            command="-m results.schemes ${*:2}" ;;
        machines)
            command="-m results.machines ${*:2}" ;;
    esac
    if grep -qxF -- "$1: $command" "$records/done"; then
        return
    fi
    part=$(mktemp "$records/XXXXXX")
    if python $command --quiet --json > "$part" && cat "$part" >> "$records/$1.jsonl"; then
        echo "$1: $command" >> "$records/done"
    else
        echo "FAILED: $command" >&2
        failed=1
    fi
    rm -f "$part"
    return $failed
}
export -f run

wanted=${1:-none}
lines=()
while read -r list seeds options; do
    if [ "$wanted" = full ] && [ "$list" != quick ] || [ "$list" = "$wanted" ]; then
        for seed in $(seq ${seeds/-/ }); do
            lines+=("$list $options --seed $seed")
        done
    fi
done < <(grep '^[a-z]' results/runs.txt)
if [ ${#lines[@]} = 0 ]; then
    echo "usage: ./run_all.sh quick|full|LIST, a list of results/runs.txt" >&2
    exit 2
fi
mkdir -p "$records"
touch "$records/done"
code=0
printf '%s\n' "${lines[@]}" | xargs -P "${JOBS:-1}" -I LINE bash -c 'run LINE' || code=1
python -m results.report "$records"/*.jsonl || code=1
exit $code
