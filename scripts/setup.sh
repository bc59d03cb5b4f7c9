#!/usr/bin/env bash
# Makes .venv with everything that a run on CPUs needs; does nothing when that is already done.
#   scripts/setup.sh         what the main job needs
#   scripts/setup.sh --dev   also what the tests need
# As root on Debian and Ubuntu, packages of the system are installed too; elsewhere those that are missing are named.
# PYTHON=/path/to/python chooses the interpreter; the usual PIP_* variables choose where packages come from.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=.venv
readonly STAMP=$VENV/installed
readonly LOG=$VENV/setup.log
readonly NEEDED_DISK_KB=5000000

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Which requirement files this call is about.
requirements=(requirements/cpu.txt)
for_tests=0
case "${1:-}" in
    "") ;;
    --dev)
        requirements+=(requirements/dev.txt requirements/reasoning.txt)
        for_tests=1
        ;;
    *) fail "unknown argument $1; usage: scripts/setup.sh [--dev]" ;;
esac

fingerprint() {
    cat "$@" | sha256sum | cut -d' ' -f1
}

# True when an earlier call installed exactly this, or more.
is_installed() {
    [[ -x $VENV/bin/python && -f $STAMP ]] && grep -qx "$(fingerprint "${requirements[@]}")" "$STAMP"
}

is_usable_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate found=()
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        command -v "$candidate" >/dev/null || continue
        if is_usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
        found+=("$candidate is $("$candidate" --version 2>&1 | head -n 1 || true)")
    done
    fail "Python 3.11 or newer is needed, and was not found." \
        "Found: $(IFS=';'; echo "${found[*]:-no Python at all}")" \
        "Install Python 3.11, or name one with PYTHON=/path/to/python3.11."
}

check_machine() {
    [[ "$(uname -s)-$(uname -m)" == Linux-x86_64 ]] \
        || fail "the pinned packages are for Linux on x86_64; this is $(uname -s) on $(uname -m)."
    local free_kb
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    ((free_kb >= NEEDED_DISK_KB)) \
        || fail "5 GB of free disk are needed here, $((free_kb / 1000000)) GB are free in $PWD."
}

make_venv() {
    local python
    python=$(find_python)
    echo "setup: making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" 2>&1 || fail "$python cannot make a virtual environment (output above)." \
        "On Debian and Ubuntu the package python3-venv is missing."
}

# pip_install "what it is" files...: a running count of packages on the terminal, everything else in the log.
pip_install() {
    local what=$1 total
    shift
    total=$(cat "$@" | grep -c '==') || true
    local arguments=()
    for file in "$@"; do arguments+=(-r "$file"); done
    if ! "$VENV/bin/python" -m pip install --no-deps --no-compile --disable-pip-version-check --no-input \
        --progress-bar off "${arguments[@]}" 2>&1 | tee -a "$LOG" | show_progress "$what" "$total"; then
        tail -n 5 "$LOG" >&2
        fail "pip could not install the packages; the end of $LOG is above." \
            "Check the network, proxy and disk, then run this again: it continues where it stopped."
    fi
}

show_progress() {
    local live=0
    [[ -t 1 ]] && live=1
    awk -v what="$1" -v total="$2" -v live="$live" '
        /^Collecting |^Requirement already satisfied/ { n++; if (live) line("fetching " n " of " total) }
        /^Installing collected packages/ { line("unpacking") }
        END { if (live) print "" }
        function line(text) { printf (live ? "\r  %s: %-40s" : "  %s: %s\n"), what, text; fflush() }'
}

# PyPI offers PyTorch for Linux with CUDA, which does not start without several GB more.
check_torch_build() {
    local version cuda
    version=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')
    cuda=$("$VENV/bin/python" - <<'PYTHON'
import runpy, sysconfig
print(runpy.run_path(sysconfig.get_path("purelib") + "/torch/version.py")["cuda"] or "")
PYTHON
    )
    [[ -z $cuda ]] || fail "the PyTorch that pip found is a build for CUDA $cuda (torch $version)." \
        "This installation is for machines without a GPU and needs the CPU build." \
        "Point pip at PyTorch's CPU wheel index with the variable PIP_EXTRA_INDEX_URL (pytorch.org, \"Get Started\"," \
        "shows the address: choose Linux, Pip, CPU), then run this again." \
        "On a machine with GPUs install the project with: pip install -e '.[gpu]'"
}

check_torch_import() {
    "$VENV/bin/python" -c 'import torch; torch.ones(2) @ torch.ones(2)' >>"$LOG" 2>&1 && return
    tail -n 3 "$LOG" >&2
    fail "PyTorch is installed but cannot be imported (reason above, more in $LOG)." \
        "If a library is missing, install it with the system's package manager; if CUDA is mentioned," \
        "delete $VENV and point pip at PyTorch's CPU wheel index (see pytorch.org, \"Get Started\")."
}

# Once, on all cores: what is not compiled is compiled again by every process of every run where
# Python may not write its cache. Left out is what no run imports.
readonly NEVER_IMPORTED='/tests?/|/transformers/models/(?!auto/|llama/|qwen)|/ray/(rllib|data|serve|tune|train|llm)/'\
'|/vllm/(model_executor/models/(?!qwen)|models/(?!deepseek)|benchmarks/)|/sympy/(physics|stats|parsing)/'\
'|/torch/(testing/_internal|_vendor)/|/pygments/lexers/|/pip/_internal/commands/'\
'|/site-packages/(databricks|dns|fontTools|git|google/cloud|mcp|mypyc?|sentry_sdk|setuptools|torchgen|werkzeug)/'

compile_packages() {
    echo "setup: compiling"
    local packages
    packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$VENV/bin/python" -m compileall -q -j 0 -x "$NEVER_IMPORTED" "$packages" >>"$LOG" 2>&1 || true
}

# system_packages "who needs them" packages...: installs packages of the system where this user and this call may,
# and otherwise says who will need them.
system_packages() {
    local who=$1
    shift
    (($#)) || return 0
    if ((may_install)) && (($(id -u) == 0)) && command -v apt-get >/dev/null; then
        echo "setup: installing $*"
        mkdir -p "$VENV"
        if { update_package_lists && apt_get install --no-install-recommends "$@"; } >>"$LOG" 2>&1; then
            return
        fi
        echo "setup: the system's package manager could not install them (see $LOG)"
    fi
    echo "setup: $who will need these system packages: $*"
}

apt_get() {
    env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y -o Acquire::Retries=1 -o DPkg::Lock::Timeout=60 "$@"
}

# Once in a call, whatever comes of it.
update_package_lists() {
    if [[ -z ${lists_updated:-} ]]; then
        lists_updated=yes
        apt_get update || lists_updated=no
    fi
    [[ $lists_updated == yes ]]
}

# Each group by itself, since a distribution may have some of them only.
provide_system_packages() {
    local mooncake sandbox=() slurm=()
    mooncake=$("$VENV/bin/python" -c '
from nemo_like.config.data_plane_rules import missing_mooncake_libraries
print(*missing_mooncake_libraries().values())')
    # shellcheck disable=SC2086  # several packages
    system_packages data_plane.backend=mooncake_cpu $mooncake
    is_program bwrap || sandbox=(bubblewrap)
    system_packages "environments of kind=code" "${sandbox[@]}"
    ((for_tests)) || return 0
    is_program munged || slurm+=(munge)
    is_program slurmctld || slurm+=(slurmctld)
    is_program slurmd || slurm+=(slurmd)
    is_program sbatch || slurm+=(slurm-client)
    system_packages "the tests of scripts/slurm" "${slurm[@]}"
}

# True for daemons too, which are where an ordinary user's PATH does not look.
is_program() {
    PATH="$PATH:/usr/sbin:/usr/local/sbin" command -v "$1" >/dev/null
}

# reasoning-gym needs a package that is compiled from C; where that is not possible, it is left out.
provide_compiler() {
    local python=$VENV/bin/python
    is_usable_python "$python" || python=$(find_python)
    # shellcheck disable=SC2046  # several packages
    system_packages "the tests of reasoning-gym" $(missing_for_compiling "$python")
    [[ -z $(missing_for_compiling "$python") ]] || requirements=(requirements/cpu.txt requirements/dev.txt)
}

# Prints the packages without which pip cannot compile for this Python.
missing_for_compiling() {
    local compiler include
    compiler=${CC:-$("$1" -c 'import sysconfig; print(sysconfig.get_config_var("CC"))')}
    include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    # shellcheck disable=SC2086  # a program and its options
    $compiler -fsyntax-only -I"$include" -x c - <<<'#include <Python.h>' >/dev/null 2>&1 && return
    echo gcc libc6-dev
    [[ -f $include/Python.h ]] || "$1" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])'
}

install_python_packages() {
    check_machine
    [[ -x $VENV/bin/python ]] && is_usable_python "$VENV/bin/python" || make_venv
    rm -f "$STAMP"
    echo "setup: installing into $VENV (about 1 GB to fetch; two to three minutes)"
    local torch_only
    torch_only=$(mktemp)
    grep '^torch==' requirements/cpu.txt >"$torch_only"
    pip_install PyTorch "$torch_only"
    rm -f "$torch_only"
    check_torch_build
    pip_install "all packages" "${requirements[@]}"
    "$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check -e . \
        >>"$LOG" 2>&1 || { tail -n 5 "$LOG" >&2; fail "the project itself could not be installed (see $LOG)."; }
    compile_packages
    check_torch_import
    # What covers a call for less, too: one line for each number of files that a call may be about.
    local count
    for count in $(seq "${#requirements[@]}"); do
        fingerprint "${requirements[@]:0:count}"
    done >"$STAMP"
    echo "setup: done"
}

main() {
    # Where everything else is there, a call for the main job alone only says what is missing: it is quick.
    may_install=$for_tests
    if ! is_installed; then
        may_install=1
        rm -f "$LOG"
        if ((for_tests)); then provide_compiler; fi
        is_installed || install_python_packages
    fi
    provide_system_packages
}

main
