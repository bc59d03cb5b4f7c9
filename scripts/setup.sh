#!/usr/bin/env bash
# Makes .venv with everything that a run needs; does nothing when that is already done.
#   scripts/setup.sh         what the main job needs on CPUs
#   scripts/setup.sh --gpu   what it needs on NVIDIA GPUs; later calls keep to that
#   scripts/setup.sh --dev   also what the tests need
#   scripts/setup.sh --hubs  also .venv-hubs, with the packages of hubs: Gymnasium, TextArena, OpenEnv, verifiers
# As root on Debian and Ubuntu, packages of the system are installed too; elsewhere those that are missing are named.
# PYTHON=/path/to/python chooses the interpreter, VENV=folder another place than .venv; pip's settings and the usual
# PIP_* variables choose where packages come from. uv installs them, or pip where uv cannot follow those settings.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${VENV:-.venv}
readonly STAMP=$VENV/installed
readonly FOR_GPUS=$VENV/for_gpus  # this file is there when the environment is for GPUs
readonly LOG=$VENV/setup.log
readonly HUBS=.venv-hubs
readonly HUBS_LOG=$HUBS/setup.log HUBS_REQUIREMENTS=requirements/hubs.txt

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

for_tests=0
for_hubs=0
asks_for_gpus=0
uv_variables=()  # pip's settings for uv
hubs_job=  # the process that makes the environment of hubs, while it does
for argument; do
    case "$argument" in
        --dev) for_tests=1 ;;
        --hubs) for_hubs=1 ;;
        --gpu) asks_for_gpus=1 ;;
        *) fail "unknown argument $argument; usage: scripts/setup.sh [--gpu] [--dev] [--hubs]" ;;
    esac
done

# Which requirement files this call is about: --gpu chooses, and what is there already.
for_gpus=$asks_for_gpus
[[ ! -f $FOR_GPUS ]] || for_gpus=1
if ((for_gpus)); then
    requirements=(requirements/gpu.txt)
    readonly NEEDED_GB=16 SIZES="about 4.2 GB to fetch; several minutes"
else
    requirements=(requirements/cpu.txt)
    readonly NEEDED_GB=5 SIZES="about 1 GB to fetch; two to three minutes"
fi
if ((for_tests)); then requirements+=(requirements/dev.txt requirements/reasoning.txt); fi

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
    case "$(uname -s)-$(uname -m)" in
        Linux-x86_64) ;;
        Linux-aarch64) tell_of_aarch64 ;;
        *) fail "the pinned packages are for Linux on x86_64 and aarch64; this is $(uname -s) on $(uname -m)." ;;
    esac
    local free_kb
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    ((free_kb >= NEEDED_GB * 1000000)) \
        || fail "$NEEDED_GB GB of free disk are needed here, $((free_kb / 1000000)) GB are free in $PWD."
}

# The versions are the same there, and so is what follows; what may go wrong is said before.
tell_of_aarch64() {
    local glibc
    glibc=$(getconf GNU_LIBC_VERSION | awk '{ print $2 }')
    echo "setup: this is aarch64: all pinned packages have wheels for it, but nothing has been tested there"
    if ((for_gpus)) && [[ $(printf '%s\n' "$glibc" 2.34 | sort -V | head -n 1) != 2.34 ]]; then
        echo "setup: tilelang, which vLLM asks for, has a wheel from glibc 2.34 on; this is $glibc: pip will compile it"
    fi
}

has_nvidia_gpus() {
    command -v nvidia-smi >/dev/null && [[ $(timeout 30 nvidia-smi -L 2>/dev/null) == "GPU "* ]]
}

make_venv() {
    local python
    python=$(find_python)
    echo "setup: making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" 2>&1 || fail "$python cannot make a virtual environment (output above)." \
        "On Debian and Ubuntu the package python3-venv is missing."
}

# Fetches uv, which installs the packages in a fifth of the time of pip. It is left alone where it has no variable for
# one of pip's settings, and where it cannot be fetched.
provide_uv() {
    [[ -z ${uv_is_provided:-} ]] || return 0
    uv_is_provided=yes
    local python=$VENV/bin/python settings
    # What it keeps takes no further space where links lead to it, for which it must be on the same disk.
    [[ $(stat -c %d ~ 2>/dev/null) == $(stat -c %d .) ]] || export UV_CACHE_DIR=${UV_CACHE_DIR:-$PWD/.cache/uv}
    settings=$("$python" scripts/uv_settings.py 2>>"$LOG") || { rm -f "$VENV/bin/uv"; return 0; }
    [[ -z $settings ]] || readarray -t uv_variables <<<"$settings"
    [[ -x $VENV/bin/uv ]] || quiet_pip "$python" "$LOG" uv==0.13.9 || true
}

# quiet_pip python log arguments...
quiet_pip() {
    local python=$1 log=$2
    shift 2
    "$python" -m pip install --quiet --no-deps --no-compile --disable-pip-version-check --no-input "$@" \
        >>"$log" 2>&1
}

# install_packages python log arguments...: what uv cannot install, pip is asked for, and says why it cannot either.
install_packages() {
    local python=$1 log=$2
    shift 2
    if [[ -x $VENV/bin/uv ]] && env "${uv_variables[@]}" "$VENV/bin/uv" pip install --python "$python" --no-deps \
        --no-config --no-progress --index-strategy unsafe-best-match "$@" 2>&1; then
        return
    fi
    # Python brings a pip of its own age, which takes three times as long to find packages.
    quiet_pip "$python" "$log" pip==26.3 || true
    "$python" -m pip install --no-deps --no-compile --disable-pip-version-check --no-input --progress-bar off "$@" 2>&1
}

# Packages for CPUs and for GPUs are not to be mixed.
drop_cpu_environment() {
    [[ -f $STAMP && ! -L $VENV ]] || fail "$VENV holds an environment that is not for GPUs, and this script did not" \
        "finish it. Delete it, or name another folder with VENV=.venv-gpu, then run this again."
    echo "setup: $VENV is for machines without a GPU; making it anew"
    rm -rf "$VENV"
}

# install_files "what it is" files...: how far it is on the terminal, everything else in the log.
install_files() {
    local what=$1
    shift
    local arguments=()
    for file in "$@"; do arguments+=(-r "$file"); done
    if ! install_packages "$VENV/bin/python" "$LOG" "${arguments[@]}" | tee -a "$LOG" | show_progress "$what"; then
        tail -n 5 "$LOG" >&2
        fail "the packages could not be installed; the end of $LOG is above." \
            "Check the network, proxy and disk, then run this again: it continues where it stopped."
    fi
}

# Of what uv or pip prints: each package that is fetched (uv names the large ones) and the unpacking.
show_progress() {
    local live=0
    [[ -t 1 ]] && live=1
    awk -v what="$1" -v live="$live" '
        /^ *Downloaded |^Collecting / { sub(/==.*/, "", $2); if (live) line("fetched " $2) }
        /^Prepared |^Installing collected packages/ { line("unpacking") }
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
    if ((for_gpus)); then
        [[ $cuda == 13.0 ]] || fail "the PyTorch that pip found is ${cuda:+a build for CUDA }${cuda:-the CPU build}" \
            "(torch $version); requirements/gpu.txt is for CUDA 13.0, as PyPI has it." \
            "Look for another index in pip's settings (pip config list) and in the PIP_* variables."
        return
    fi
    [[ -z $cuda ]] || fail "the PyTorch that pip found is a build for CUDA $cuda (torch $version)." \
        "This installation is for machines without a GPU and needs the CPU build." \
        "Point pip at PyTorch's CPU wheel index with the variable PIP_EXTRA_INDEX_URL (pytorch.org, \"Get Started\"," \
        "shows the address: choose Linux, Pip, CPU), then run this again." \
        "On a machine with NVIDIA GPUs run: bash scripts/setup.sh --gpu"
}

check_torch_import() {
    "$VENV/bin/python" -c 'import torch; torch.ones(2) @ torch.ones(2)' >>"$LOG" 2>&1 && return
    tail -n 3 "$LOG" >&2
    local remedy=("If a library is missing, install it with the system's package manager; if CUDA is mentioned,"
        "delete $VENV and point pip at PyTorch's CPU wheel index (see pytorch.org, \"Get Started\").")
    if ((for_gpus)); then remedy=("If a library is missing, delete $VENV and run this again."); fi
    fail "PyTorch is installed but cannot be imported (reason above, more in $LOG)." "${remedy[@]}"
}

# Once, on all cores: what is not compiled is compiled again by every process of every run where
# Python may not write its cache. Left out is what no run imports.
readonly NEVER_IMPORTED='/tests?/|/transformers/models/(?!auto/|llama/|qwen)|/ray/(rllib|data|serve|tune|train|llm)/'\
'|/vllm/(model_executor/models/(?!qwen)|models/(?!deepseek)|benchmarks/)|/sympy/(physics|stats|parsing)/'\
'|/torch/(testing/_internal|_vendor)/|/pygments/lexers/|/pip/_internal/commands/|/litellm/proxy/'\
'|/site-packages/(databricks|dns|fontTools|git|google/cloud|mcp|mypyc?|sentry_sdk|setuptools|torchgen|werkzeug)/'\
'|/site-packages/(alembic|bokeh|jedi|prompt_toolkit|pyasn1(_modules)?|sqlalchemy|textual|trl|wcwidth)/'\
'|/site-packages/(backrefs|cmd2|distlib|llvmlite|material|numba|optuna|pymdownx|supervisor|virtualenv)/'\
'|/debugpy/_vendored/|/openai/resources/(admin|beta)/|/huggingface_hub/(cli|inference)/|/transformers/pipelines/'\
'|/(mlflow/(server|gateway)|numpy/distutils|google/(api_core|auth)|reasoning_gym/arc|sqlparse)/'

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
    local mooncake sandbox=() slurm=() browser=()
    mooncake=$("$VENV/bin/python" -c '
from nemo_like.data_plane.storage_kinds.mooncake_cpu import missing_mooncake_libraries
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
    is_program chromium || browser=(chromium)
    system_packages "the tests of report.html" "${browser[@]}"
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
    [[ -z $(missing_for_compiling "$python") ]] || requirements=("${requirements[@]:0:2}")
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

# Triton compiles C when an engine starts on a GPU, so nothing runs there without.
require_compiler() {
    local python=$VENV/bin/python missing
    # shellcheck disable=SC2046  # several packages
    system_packages "engines on GPUs" $(missing_for_compiling "$python")
    missing=$(missing_for_compiling "$python" | tr '\n' ' ')
    [[ -z $missing ]] || fail "vLLM does not start on a GPU without a C compiler and Python's headers:" \
        "install the system packages $missing, or what they are called here, then run this again."
}

# A part of Transformer Engine is compiled. Where that is not possible, training goes on without.
provide_transformer_engine() {
    local python=$VENV/bin/python packages why=
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    [[ -z $(compgen -G "$packages/transformer_engine_torch-*.dist-info") ]] || return 0
    # shellcheck disable=SC2046  # perhaps none
    system_packages "Transformer Engine" $(is_program g++ || echo g++)
    if ! is_program g++; then
        why="there is no C++ compiler"
    else
        echo "setup: compiling Transformer Engine (some minutes)"
        # The compiler of CUDA and the headers that gpu.txt brings, not those of the system.
        env CUDA_HOME="$packages/nvidia/cu13" NVTE_FRAMEWORK=pytorch \
            CPLUS_INCLUDE_PATH="$packages/nvidia/cudnn/include:$packages/nvidia/nccl/include" \
            "$python" -m pip install --no-deps --no-build-isolation --disable-pip-version-check --no-input \
            -r requirements/transformer_engine.txt >>"$LOG" 2>&1 || why="it could not be compiled, see the end of $LOG"
    fi
    [[ -z $why ]] || echo "setup: Transformer Engine is left out: $why. Megatron-core's own layers are used."
}

install_python_packages() {
    if ((! for_gpus)) && [[ $VENV == .venv ]] && has_nvidia_gpus; then
        echo "setup: this machine has NVIDIA GPUs; bash scripts/setup.sh --gpu installs what uses them"
    fi
    check_machine
    if ((for_gpus)) && [[ -x $VENV/bin/python && ! -f $FOR_GPUS ]]; then drop_cpu_environment; fi
    [[ -x $VENV/bin/python ]] && is_usable_python "$VENV/bin/python" || make_venv
    rm -f "$STAMP"
    provide_uv
    begin_hubs
    if ((for_gpus)); then touch "$FOR_GPUS"; fi
    echo "setup: installing into $VENV ($SIZES)"
    local torch_only
    torch_only=$(mktemp)
    grep '^torch==' "${requirements[0]}" >"$torch_only"
    install_files PyTorch "$torch_only"
    rm -f "$torch_only"
    check_torch_build
    install_files "all packages" "${requirements[@]}"
    quiet_pip "$VENV/bin/python" "$LOG" --no-build-isolation -e . \
        || { tail -n 5 "$LOG" >&2; fail "the project itself could not be installed (see $LOG)."; }
    compile_packages
    check_torch_import
    # What covers a call for less, too: one line for each number of files that a call may be about.
    local count
    for count in $(seq "${#requirements[@]}"); do
        fingerprint "${requirements[@]:0:count}"
    done >"$STAMP"
    echo "setup: done"
}

# In an environment of their own, since their requirements do not fit beside those of a run. It is made beside the
# other one: pip uses one core, and waits for the network.
begin_hubs() {
    ((for_hubs)) && [[ -z $hubs_job ]] || return 0
    local stamp=$HUBS/installed
    if [[ -x $HUBS/bin/python && -f $stamp ]] && grep -qx "$(fingerprint "$HUBS_REQUIREMENTS")" "$stamp"; then
        return
    fi
    echo "setup: installing the packages of hubs into $HUBS"
    provide_uv
    # A process group of its own, which ends with this script, also when the rest fails or is interrupted.
    trap '[[ -z $hubs_job ]] || kill -- "-$hubs_job" 2>/dev/null || true' EXIT
    set -m
    make_hubs &
    hubs_job=$!
    set +m
}

make_hubs() {
    rm -rf "$HUBS"
    mkdir "$HUBS"
    "$VENV/bin/python" -m venv "$HUBS" >>"$HUBS_LOG" 2>&1
    install_packages "$HUBS/bin/python" "$HUBS_LOG" -r "$HUBS_REQUIREMENTS" >>"$HUBS_LOG"
    # The processes that import them write nothing there.
    "$HUBS/bin/python" -m compileall -q -x "$NEVER_IMPORTED|/site-packages/(transformers|rich_rst|cyclopts)/" \
        "$HUBS/lib" >>"$HUBS_LOG" 2>&1 || true
    fingerprint "$HUBS_REQUIREMENTS" >"$HUBS/installed"
}

finish_hubs() {
    begin_hubs
    [[ -n $hubs_job ]] || return 0
    if ! wait "$hubs_job"; then
        hubs_job=
        tail -n 5 "$HUBS_LOG" >&2
        fail "the packages of hubs could not be installed (see $HUBS_LOG)."
    fi
    hubs_job=
    echo "setup: done"
}

main() {
    # Where everything else is there, a call for the main job alone only says what is missing: it is quick.
    may_install=$for_tests
    local looks_at_gpus=$asks_for_gpus
    if ! is_installed; then
        may_install=1 looks_at_gpus=1
        rm -f "$LOG"
        if ((for_tests)); then provide_compiler; fi
        is_installed || install_python_packages
    fi
    if ((for_gpus && looks_at_gpus)); then
        may_install=1
        require_compiler
        provide_transformer_engine
        has_nvidia_gpus || echo "setup: nvidia-smi finds no GPU here; CUDA 13.0 needs NVIDIA's driver 580 or newer"
    fi
    provide_system_packages
    finish_hubs
}

main
