#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, types, import rules, unit and functional tests.
#   scripts/test.sh          without the tests marked slow
#   scripts/test.sh --lint   only what reads the code
#   scripts/test.sh --all    the slow ones too
# It says how long each part took, and all of them. With CI=true a skipped test is a failure (docs/testing.md).
set -euo pipefail
cd "$(dirname "$0")/.."

failed=()
timings=()

# check "what it is" command...: goes on when the command fails, and notes that and the time.
check() {
    local what=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$*"
    "$@" || failed+=("$*")
    note "$what" "$start"
}

# note "what it is" start: how long it took, in minutes and seconds.
note() {
    local duration=$((SECONDS - $2))
    timings+=("$(printf '%3d:%02d  %s' $((duration / 60)) $((duration % 60)) "$1")")
}

# vLLM's build for GPUs does not run on CPUs: beside an environment for GPUs there is one for the tests on CPUs.
VENV=.venv
if [[ -f .venv/for_gpus ]]; then
    bash scripts/setup.sh --dev --hubs
    VENV=.venv-cpu
fi
VENV=$VENV bash scripts/setup.sh --dev --hubs
note set-up 0
export PATH="$PWD/$VENV/bin:$PATH"

check "lint" ruff check .
check "format" ruff format --check .
check "types" mypy
check "import rules" lint-imports

case "${1:-}" in
    --lint) ;;
    "" | --all)
        chosen="not slow"
        [[ "${1:-}" == --all ]] && chosen="slow or not slow"
        check "unit tests" pytest -q --numprocesses=auto -m "$chosen" tests/unit
        # One process more than cores, since many of these tests wait; those that need a GPU are shown as
        # skipped where there is none.
        check "functional tests" pytest -q --numprocesses="$(($(nproc) + 1))" --maxprocesses=4 --dist=loadfile \
            -m "($chosen) and not whole_run" tests/conformance tests/functional tests/gpu
        check "whole runs" pytest -q -m "($chosen) and whole_run" tests/functional
        if [[ $VENV != .venv ]]; then
            check "tests on GPUs" .venv/bin/python -m pytest -q -m "($chosen) and gpu" tests/gpu
        fi
        ;;
    *)
        echo "test: unknown argument $1; usage: scripts/test.sh [--lint | --all]" >&2
        exit 2
        ;;
esac

note "in all" 0
printf '\ntook (minutes:seconds)\n'
printf '%s\n' "${timings[@]}"

if ((${#failed[@]})); then
    printf '\nfailed:\n' >&2
    printf '  %s\n' "${failed[@]}" >&2
    exit 1
fi
printf '\nall checks passed\n'
