#!/usr/bin/env bash
# Everything that must hold before a change goes in: lint, types, import rules, unit and functional tests.
#   scripts/test.sh          without the tests marked slow
#   scripts/test.sh --lint   only what reads the code
#   scripts/test.sh --all    the slow ones too
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh --dev
export PATH="$PWD/.venv/bin:$PATH"

failed=()
check() {
    printf '\n== %s\n' "$*"
    "$@" || failed+=("$*")
}

check ruff check .
check ruff format --check .
check mypy
check lint-imports

case "${1:-}" in
    --lint) ;;
    "" | --all)
        check pytest -q --numprocesses=auto tests/unit
        chosen="not slow"
        [[ "${1:-}" == --all ]] && chosen="slow or not slow"
        # One process more than cores, since many of these tests wait; those that need a GPU are shown as
        # skipped where there is none.
        check pytest -q --numprocesses="$(($(nproc) + 1))" --maxprocesses=4 --dist=loadfile -m "($chosen) and not whole_run" tests/functional tests/gpu
        check pytest -q -m "($chosen) and whole_run" tests/functional
        ;;
    *)
        echo "test: unknown argument $1; usage: scripts/test.sh [--lint | --all]" >&2
        exit 2
        ;;
esac

if ((${#failed[@]})); then
    printf '\nfailed:\n' >&2
    printf '  %s\n' "${failed[@]}" >&2
    exit 1
fi
printf '\nall checks passed\n'
