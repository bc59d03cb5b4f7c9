#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, types, import rules, unit and functional tests.
#   scripts/test.sh                     without the tests marked slow
#   scripts/test.sh --lint              only what reads the code
#   scripts/test.sh --all               the slow ones too, which takes hours
#   scripts/test.sh --all --from PIECE  the same from this piece on; what ran before stays in the report
# It says before each piece what is left, and at the end how long each took, the slowest tests and what failed.
# With CI=true a skipped test is a failure (docs/explanation/testing.md).
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    echo "test: $1; usage: scripts/test.sh [--lint | --all [--from PIECE]]" >&2
    exit 2
}

what=quick
from=
while (($#)); do
    case "$1" in
        --lint) what=lint ;;
        --all) what=all ;;
        --from)
            [[ $what == all && $# -gt 1 ]] || usage "--from needs --all before it and the name of a piece"
            from=$2
            shift
            ;;
        *) usage "unknown argument $1" ;;
    esac
    shift
done
chosen="not slow"
[[ $what != all ]] || chosen="slow or not slow"

# vLLM's build for GPUs does not run on CPUs: beside an environment for GPUs there is one for the tests on CPUs.
VENV=.venv
if [[ -f .venv/for_gpus ]]; then
    bash scripts/setup.sh --dev --hubs
    VENV=.venv-cpu
fi
VENV=$VENV bash scripts/setup.sh --dev --hubs
export PATH="$PWD/$VENV/bin:$PATH"

# Tests that compute run beside others, and so each on one core.
export OMP_NUM_THREADS=1
# They start thousands of processes of Python, each of which would compile the package anew without its cache.
unset PYTHONDONTWRITEBYTECODE

# The pieces, and their commands by name.
pieces=()
declare -A commands
piece() {
    pieces+=("$1")
    commands[$1]=$2
}

# slowest_first NAME topics...: puts the files of tests/functional into the variable, those with these topics first.
slowest_first() {
    local -n listed=$1
    local topic
    shift
    listed=$(printf 'tests/functional/test_%s.py ' "$@")
    for topic in $(basename -a tests/functional/test_*.py | sed 's/^test_//; s/\.py$//'); do
        [[ " $* " == *" $topic "* ]] || listed+="tests/functional/test_$topic.py "
    done
}

# One line for each piece that has run: seconds, exit code, name.
readonly REPORT=.cache/test_report.$what
readonly SLOWEST=.cache/test_slowest.$what

piece lint "ruff check ."
piece format "ruff format --check ."
piece types mypy
piece imports lint-imports
if [[ $what != lint ]]; then
    tests="pytest -q --durations=20 --durations-min=1"
    # One process more than cores, since many of these tests wait.
    processes="--numprocesses=$(($(nproc --all) + 1)) --maxprocesses=4"
    in_order="$processes --dist=loadfile --no-loadscope-reorder"
    # The longest files first, since nothing would run beside their ends.
    first="tests/unit/test_*.py tests/unit/sweep tests/unit/observability tests/unit/preflight"
    piece unit "$tests $in_order -m '$chosen' $first tests/unit"
    # Those that need a GPU are shown as skipped where there is none.
    slowest_first files main_job agents hubs private_ray data_plane_faults data_plane slurm run_matrix weight_sync \
        policy_parity notebook evaluate watch record_replay
    functional="$tests $in_order $files tests/conformance tests/gpu"
    if [[ $what == quick ]]; then
        piece functional "$functional -m '$chosen'"
    else
        piece functional "$functional -m '($chosen) and not whole_run'"
        for file in $(grep -lw whole_run tests/functional/test_*.py); do
            name=${file##*/test_}
            two_at_once="--numprocesses=auto --maxprocesses=2 --dist=loadgroup"
            piece "${name%.py}" "$tests $two_at_once -m '($chosen) and whole_run' $file"
        done
    fi
    if [[ $VENV != .venv ]]; then
        piece gpu ".venv/bin/python -m pytest -q -m '($chosen) and gpu' tests/gpu"
    fi
fi
[[ -z $from || -v commands[$from] ]] || usage "there is no piece $from; there are ${pieces[*]}"

mkdir -p .cache
touch "$REPORT" "$SLOWEST" # in a new clone one may begin with any piece
if [[ -z $from ]]; then
    printf '%d\t0\tset-up\n' "$SECONDS" >"$REPORT"
    : >"$SLOWEST"
fi

# Runs a piece, goes on when it fails, and notes how it went.
run_piece() {
    local start=$SECONDS code=0
    printf '\n== %s: %s\n' "$1" "${commands[$1]}"
    eval "${commands[$1]}" 2>&1 | tee "$SLOWEST.now" || code=$?
    # A piece that is run again replaces what the report has of it.
    sed -i "/\t$1\$/d" "$REPORT"
    printf '%d\t%d\t%s\n' $((SECONDS - start)) "$code" "$1" >>"$REPORT"
    grep -E '^ *[0-9.]+s (call|setup|teardown) ' "$SLOWEST.now" >>"$SLOWEST" || true
    rm -f "$SLOWEST.now"
}

is_running=
[[ -n $from ]] || is_running=1
for index in "${!pieces[@]}"; do
    name=${pieces[$index]}
    [[ $name != "$from" ]] || is_running=1
    [[ -n $is_running ]] || continue
    printf '\n== piece %d of %d; left: %s\n' $((index + 1)) ${#pieces[@]} "${pieces[*]:$index}"
    run_piece "$name"
done

printf '\nthe slowest tests\n'
sort -rn "$SLOWEST" | sed -n 1,10p # which reads to the end: nobody is told that the pipe broke
printf '\ntook (minutes:seconds)\n'
awk -F'\t' '{ all += $1; printf "%3d:%02d  %s\n", $1 / 60, $1 % 60, $3 }
            END { printf "%3d:%02d  in all\n", all / 60, all % 60 }' "$REPORT"
failed=$(awk -F'\t' '$2 { print $3 }' "$REPORT")
if [[ -n $failed ]]; then
    printf '\nfailed:\n' >&2
    for name in $failed; do printf '  %s: %s\n' "$name" "${commands[$name]:-}" >&2; done
    [[ $what != all ]] || echo "to go on from a piece: scripts/test.sh --all --from PIECE" >&2
    exit 1
fi
printf '\nall checks passed\n'
