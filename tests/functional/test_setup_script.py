"""``scripts/setup.sh`` on machines that lack something, in a copy of the checkout without an environment."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("setup.sh", "uv_settings.py"):
        shutil.copy(REPOSITORY / "scripts" / name, root / "scripts")
    shutil.copytree(REPOSITORY / "requirements", root / "requirements")
    return root


@pytest.fixture
def setup(checkout: Path, tmp_path: Path) -> Setup:
    """``setup({"tool": "what it prints"}, ...)``: the script with these programs ahead on PATH, and without
    the settings that this machine has for pip and uv."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    own["PIP_CONFIG_FILE"] = os.devnull

    def run(programs: Mapping[str, str], *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "programs"
        folder.mkdir(exist_ok=True)
        for name, body in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        path = f"{folder}{os.pathsep}{env.pop('PATH', os.environ['PATH'])}"
        return subprocess.run(
            ["bash", "scripts/setup.sh", *arguments],
            cwd=checkout,
            env={**own, "PATH": path, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_an_old_python_is_named_with_the_version_that_is_needed(setup: Setup) -> None:
    old = 'case "$1" in --version) echo "Python 3.9.2" ;; *) exit 1 ;; esac'
    done = setup({"old-python": old}, PYTHON="old-python")
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed, and was not found." in done.stderr
    assert "Found: old-python is Python 3.9.2" in done.stderr


def test_no_python_at_all_is_said(setup: Setup) -> None:
    done = setup({}, PYTHON="no-such-python")
    assert done.returncode == 1
    assert "Found: no Python at all" in done.stderr


def test_a_full_disk_says_how_much_is_needed_and_free(setup: Setup) -> None:
    df = "echo Filesystem 1024-blocks Used Available Capacity Mounted; echo disk 9 9 2100000 9% /"
    done = setup({"df": df})
    assert done.returncode == 1
    assert "5 GB of free disk are needed here, 2 GB are free" in done.stderr


def test_another_kind_of_machine_is_refused(setup: Setup) -> None:
    done = setup({"uname": 'case "$1" in -s) echo Darwin ;; *) echo arm64 ;; esac'})
    assert done.returncode == 1
    assert "packages are for Linux on x86_64 and aarch64; this is Darwin on arm64." in done.stderr


def on_aarch64(glibc: str) -> dict[str, str]:
    uname = 'case "$1" in -s) echo Linux ;; *) echo aarch64 ;; esac'
    return {**NO_DISK, "uname": uname, "getconf": f"echo glibc {glibc}"}


@pytest.mark.parametrize(
    ("arguments", "glibc", "is_compiled"),
    [((), "2.31", False), (("--gpu",), "2.35", False), (("--gpu",), "2.31", True)],
)
def test_aarch64_hears_what_differs_and_goes_on(
    setup: Setup, arguments: Sequence[str], glibc: str, is_compiled: bool
) -> None:
    done = setup(on_aarch64(glibc), *arguments)
    assert "GB of free disk are needed" in done.stderr  # the next check
    assert "this is aarch64: all pinned packages have wheels for it, but nothing has been" in done.stdout
    assert ("has a wheel from glibc 2.34 on; this is 2.31: pip will compile it" in done.stdout) is is_compiled


def test_an_unknown_argument_shows_the_usage(setup: Setup) -> None:
    done = setup({}, "--everything")
    assert done.returncode == 1
    assert "unknown argument --everything; usage: scripts/setup.sh [--gpu] [--dev] [--hubs]" in done.stderr


@pytest.mark.parametrize(
    ("found", "arguments", "said"),
    [
        ("'13.0'", (), ["a build for CUDA 13.0 (torch 9.9.9)", "PIP_EXTRA_INDEX_URL", "setup.sh --gpu"]),
        ("None", ("--gpu",), ["is the CPU build\n", "is for CUDA 13.0"]),
        ("'12.8'", ("--gpu",), ["is a build for CUDA 12.8\n", "is for CUDA 13.0"]),
    ],
    ids=["CUDA without GPUs", "CPU for GPUs", "another CUDA"],
)
def test_another_build_of_pytorch_says_where_to_point_pip(
    setup: Setup, checkout: Path, found: str, arguments: Sequence[str], said: Sequence[str]
) -> None:
    packages = checkout / ".venv" / "lib"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "version.py").write_text(f"__version__ = '9.9.9'\ncuda = {found}\n")
    (packages / "torch-9.9.9.dist-info").mkdir()
    (packages / "torch-9.9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9.9\n")
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir()
    if arguments:
        (checkout / ".venv" / "for_gpus").touch()
    # An environment in which pip does nothing and site-packages is the folder above.
    python.write_text(
        f"""#!/bin/sh
[ "$1 $2" = "-m pip" ] && exit 0
exec env PYTHONPATH={packages} {sys.executable} -c '
import io, sys, sysconfig
sysconfig.get_path = lambda name: "{packages}"
source = sys.argv[2] if sys.argv[1:2] == ["-c"] else sys.stdin.read()
exec(source)' "$@"
"""
    )
    python.chmod(0o755)
    done = setup(MUCH_DISK, *arguments)
    assert done.returncode == 1
    assert [line for line in said if line not in done.stderr] == []


def with_hubs(checkout: Path, pip_of_hubs: str) -> None:
    """Have the environment make one of hubs, whose pip is these lines of shell."""
    python = checkout / ".venv" / "bin" / "python"
    first, _, rest = python.read_text().partition("\n")
    makes = f"""case "$1 $2" in "-m venv")
    mkdir -p "$3/bin"
    printf '%s\\n' '#!/bin/sh' '{pip_of_hubs}' >"$3/bin/python"
    chmod +x "$3/bin/python"
    exit 0 ;;
esac"""
    python.write_text(f"{first}\n{makes}\n{rest}")


def with_uv(checkout: Path, body: str) -> None:
    """Have the environment a uv that is these lines of shell."""
    uv = checkout / ".venv" / "bin" / "uv"
    uv.write_text(f"#!/bin/sh\n{body}\n")
    uv.chmod(0o755)


def test_packages_of_hubs_are_installed_once(setup: Setup, checkout: Path) -> None:
    install(checkout, ALL)
    with_hubs(checkout, 'echo "$*" >>.venv-hubs/asked')
    done = setup(EVERY_PROGRAM, "--dev", "--hubs", **COMPILER)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "setup: installing the packages of hubs into .venv-hubs\nsetup: done\n"
    again = setup(EVERY_PROGRAM, "--dev", "--hubs", **COMPILER)
    assert (again.returncode, again.stdout) == (0, "")
    of_pip, asked, compiled = (checkout / ".venv-hubs" / "asked").read_text().splitlines()
    assert re.fullmatch(r"-m pip install .* pip==[0-9.]+", of_pip)
    assert asked.startswith("-m pip install ") and asked.endswith(" -r requirements/hubs.txt")
    assert compiled.startswith("-m compileall ")


@pytest.mark.parametrize("uv_can", [True, False], ids=["uv can", "uv cannot"])
def test_uv_installs_with_the_settings_of_pip(setup: Setup, checkout: Path, uv_can: bool) -> None:
    install(checkout, ALL)
    with_hubs(checkout, 'echo "$*" >>.venv-hubs/asked')
    with_uv(checkout, f'echo "$UV_INDEX $*" >>.venv-hubs/asked_of_uv; {str(uv_can).lower()}')
    index = "https://wheels.example/cpu"
    done = setup(EVERY_PROGRAM, "--dev", "--hubs", PIP_EXTRA_INDEX_URL=index, **COMPILER)
    assert done.returncode == 0, done.stderr
    (asked,) = (checkout / ".venv-hubs" / "asked_of_uv").read_text().splitlines()
    assert asked.startswith(f"{index} pip install --python .venv-hubs/bin/python --no-deps ")
    assert asked.endswith(" -r requirements/hubs.txt")
    of_pip = (checkout / ".venv-hubs" / "asked").read_text()
    assert (" -r requirements/hubs.txt\n" in of_pip) is not uv_can


@pytest.mark.parametrize(
    ("of_home", "given", "keeps"),
    [("1", {}, ""), ("2", {}, "{checkout}/.cache/uv"), ("2", {"UV_CACHE_DIR": "/kept"}, "/kept")],
    ids=["one disk", "another disk", "as asked"],
)
def test_uv_keeps_packages_on_the_disk_of_the_environment(
    setup: Setup, checkout: Path, of_home: str, given: Mapping[str, str], keeps: str
) -> None:
    install(checkout, ALL)
    with_hubs(checkout, "exit 1")
    with_uv(checkout, 'echo "keeps: $UV_CACHE_DIR"')
    stat = f'case "$3" in .) echo 1 ;; *) echo {of_home} ;; esac'
    done = setup({**EVERY_PROGRAM, "stat": stat}, "--dev", "--hubs", **COMPILER, **given)
    assert done.returncode == 0, done.stderr
    log = (checkout / ".venv-hubs" / "setup.log").read_text()
    assert f"keeps: {keeps.format(checkout=checkout)}\n" in log


def test_pip_installs_where_uv_has_no_variable_for_a_setting(setup: Setup, checkout: Path) -> None:
    install(checkout, ALL)
    with_hubs(checkout, 'echo "$*" >>.venv-hubs/asked')
    with_uv(checkout, "touch uv_was_called")
    done = setup(EVERY_PROGRAM, "--dev", "--hubs", PIP_NO_INDEX="1", **COMPILER)
    assert done.returncode == 0, done.stderr
    assert not (checkout / "uv_was_called").exists()
    assert " -r requirements/hubs.txt\n" in (checkout / ".venv-hubs" / "asked").read_text()


def test_packages_of_hubs_that_cannot_be_installed_are_tried_again(setup: Setup, checkout: Path) -> None:
    install(checkout, ALL)
    with_hubs(checkout, "echo no network; exit 1")
    for _ in range(2):
        done = setup(EVERY_PROGRAM, "--dev", "--hubs", **COMPILER)
        assert done.returncode == 1
        said = "setup: the packages of hubs could not be installed (see .venv-hubs/setup.log)."
        assert done.stderr.splitlines() == ["no network", "no network", said]  # pip itself, then the packages


def test_nothing_goes_on_with_hubs_when_the_other_packages_cannot_be_installed(
    setup: Setup, checkout: Path
) -> None:
    install(checkout, CPU)
    python = checkout / ".venv" / "bin" / "python"
    wait = "until [ -e .venv-hubs/pid ]; do sleep 0.1; done"
    of_pip = f'case "$*" in *" uv=="*) exit 1 ;; "-m pip "*) {wait}; exit 1 ;; esac'
    python.write_text(f"#!/bin/sh\n{of_pip}\n{python.read_text()}")
    with_hubs(checkout, "echo $$ >.venv-hubs/pid; exec sleep 600")
    done = setup({**MUCH_DISK, "a-compiler": "exit 0"}, "--dev", "--hubs", **COMPILER)
    assert done.returncode == 1
    assert "the packages could not be installed" in done.stderr
    hubs = int((checkout / ".venv-hubs" / "pid").read_text())
    psutil.wait_procs([psutil.Process(hubs)] if psutil.pid_exists(hubs) else [], timeout=30)
    assert not psutil.pid_exists(hubs)


GPU, GPU_ALL = ("gpu.txt",), ("gpu.txt", "dev.txt", "reasoning.txt")
CPU, DEV, ALL = ("cpu.txt",), ("cpu.txt", "dev.txt"), ("cpu.txt", "dev.txt", "reasoning.txt")
SLURM = ("munged", "slurmctld", "slurmd", "sbatch")
# Anything still to do would stop at the disk check.
NO_DISK = {"df": "echo header; echo disk 9 9 0 9% /"}
MUCH_DISK = {"df": "echo header; echo disk 9 9 99000000 9% /"}
EVERY_PROGRAM = {**NO_DISK, **dict.fromkeys(("bwrap", "a-compiler", "chromium", *SLURM), "exit 0")}
COMPILER, NO_COMPILER = {"CC": "a-compiler"}, {"CC": "no-such-compiler"}


def install(checkout: Path, files: Sequence[str], mooncake: str = "") -> None:
    """Make an environment as the script leaves it where there is no uv; Mooncake lacks these packages."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/bin/sh
case "$*" in
    *missing_mooncake_libraries*) echo {mooncake} ;;
    *" uv=="*) exit 1 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    contents = [(checkout / "requirements" / name).read_bytes() for name in files]
    stamps = [hashlib.sha256(b"".join(contents[: i + 1])).hexdigest() for i in range(len(contents))]
    (checkout / ".venv" / "installed").write_text("".join(f"{stamp}\n" for stamp in stamps))
    if files[0] == "gpu.txt":
        (checkout / ".venv" / "for_gpus").touch()


@pytest.mark.parametrize(
    ("installed", "asked", "is_done"),
    [
        (CPU, (), True),
        (ALL, (), True),
        (ALL, ("--dev",), True),
        (CPU, ("--dev",), False),
        (GPU, (), True),
        (GPU_ALL, ("--dev",), True),
        (GPU, ("--dev",), False),
        (ALL, ("--gpu",), False),
    ],
    ids=[
        "the same",
        "more than asked",
        "with the tools",
        "without the tools",
        "for GPUs, kept",
        "for GPUs with the tools",
        "for GPUs without the tools",
        "for CPUs",
    ],
)
def test_what_is_installed_already_is_left_alone(
    setup: Setup, checkout: Path, installed: Sequence[str], asked: Sequence[str], is_done: bool
) -> None:
    install(checkout, installed)
    done = setup(EVERY_PROGRAM, *asked, **COMPILER)
    assert (done.returncode == 0) is is_done
    assert done.stdout == ""


def test_gpus_need_more_disk_and_make_the_environment_anew(setup: Setup, checkout: Path) -> None:
    install(checkout, CPU)
    assert "16 GB of free disk are needed here, 0 GB are free" in setup(NO_DISK, "--gpu").stderr
    # Stops at the search for a Python to make it with.
    done = setup(MUCH_DISK, "--gpu", PYTHON="no-such-python")
    assert "setup: .venv is for machines without a GPU; making it anew" in done.stdout
    assert not (checkout / ".venv").exists()


def test_an_environment_that_this_script_did_not_make_is_not_deleted(setup: Setup, checkout: Path) -> None:
    install(checkout, CPU)
    (checkout / ".venv" / "installed").unlink()
    done = setup(MUCH_DISK, "--gpu")
    assert done.returncode == 1
    assert "Delete it, or name another folder with VENV=.venv-gpu" in done.stderr
    assert (checkout / ".venv" / "bin" / "python").exists()


def test_a_machine_with_gpus_hears_how_to_use_them(setup: Setup) -> None:
    machine = {**NO_DISK, "nvidia-smi": "echo GPU 0: NVIDIA H200"}
    said = "this machine has NVIDIA GPUs; bash scripts/setup.sh --gpu installs what uses them"
    assert said in setup(machine).stdout
    # Not beside an environment for GPUs, and not where the driver finds none.
    assert said not in setup(machine, VENV=".venv-cpu").stdout
    assert said not in setup({**machine, "nvidia-smi": "echo No devices found"}).stdout


def test_engines_on_gpus_need_a_c_compiler(setup: Setup, checkout: Path, bare: dict[str, str]) -> None:
    install(checkout, GPU)
    done = setup({**EVERY_PROGRAM, "id": "echo 1000"}, "--gpu", **bare, **NO_COMPILER)
    assert done.returncode == 1
    assert "setup: engines on GPUs will need these system packages: gcc libc6-dev" in done.stdout
    assert "vLLM does not start on a GPU without a C compiler and Python's headers:" in done.stderr
    assert "install the system packages gcc libc6-dev" in done.stderr


def test_without_a_cplusplus_compiler_transformer_engine_is_left_out(
    setup: Setup, checkout: Path, bare: dict[str, str]
) -> None:
    install(checkout, GPU)
    done = setup({**EVERY_PROGRAM, "id": "echo 1000"}, "--gpu", **bare, **COMPILER)
    assert done.returncode == 0, done.stderr
    assert "setup: Transformer Engine will need these system packages: g++" in done.stdout
    assert "Transformer Engine is left out: there is no C++ compiler" in done.stdout
    assert "nvidia-smi finds no GPU here; CUDA 13.0 needs NVIDIA's driver 580 or newer" in done.stdout


def test_a_compiler_that_fails_leaves_transformer_engine_out(setup: Setup, checkout: Path) -> None:
    install(checkout, GPU)
    python = checkout / ".venv" / "bin" / "python"
    fails = "*transformer_engine.txt*) env >&2; exit 1 ;; *) exec"
    python.write_text(python.read_text().replace("*) exec", fails))
    done = setup({**EVERY_PROGRAM, "g++": "exit 0"}, "--gpu", **COMPILER)
    assert done.returncode == 0, done.stderr
    assert "Transformer Engine is left out: it could not be compiled" in done.stdout
    assert re.search(r"^CUDA_HOME=.*/nvidia/cu13$", (checkout / ".venv" / "setup.log").read_text(), re.M)


def test_a_change_of_the_requirements_installs_again(setup: Setup, checkout: Path) -> None:
    install(checkout, CPU)
    requirements = checkout / "requirements" / "cpu.txt"
    requirements.write_text(requirements.read_text() + "another==1.0\n")
    assert "5 GB of free disk are needed" in setup(EVERY_PROGRAM).stderr


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine without bubblewrap, apt-get, chromium, g++ and Slurm's commands."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name not in ("bwrap", "apt-get", "chromium", "g++", *SLURM):
            (folder / program.name).symlink_to(program)
    return {"PATH": str(folder)}


# Notes what it is asked to install, and does it unless that is to fail.
APT_GET = 'for last; do :; done; echo "$*" >>apt.log; case "$*" in *{fails}*) exit 100 ;; esac'
ROOT = {"id": "echo 0"}
ANY_SLURM = "slurm-client"  # the daemons may be on this machine


def asked_of_apt(checkout: Path) -> list[str]:
    """The packages of each call, or "update"."""
    log = checkout / "apt.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split("--no-install-recommends ")[-1].split("=60 ")[-1] for line in lines]


def test_root_gets_what_a_machine_that_is_set_up_lacks(
    setup: Setup, checkout: Path, bare: dict[str, str]
) -> None:
    install(checkout, ALL, mooncake="libone libtwo")
    done = setup({**NO_DISK, **ROOT, "apt-get": APT_GET.format(fails="nothing")}, "--dev", **bare)
    assert done.returncode == 0, done.stderr
    update, mooncake, sandbox, slurm, browser = asked_of_apt(checkout)
    assert (update, mooncake, sandbox) == ("update", "libone libtwo", "bubblewrap")
    assert slurm.endswith(ANY_SLURM)
    assert browser == "chromium"
    assert "will need" not in done.stdout


def test_a_distribution_without_one_of_them_gives_the_others(
    setup: Setup, checkout: Path, bare: dict[str, str]
) -> None:
    install(checkout, ALL, mooncake="libone")
    done = setup({**ROOT, "apt-get": APT_GET.format(fails="libone")}, "--dev", **bare)
    assert done.returncode == 0, done.stderr
    assert asked_of_apt(checkout)[:3] == ["update", "libone", "bubblewrap"]
    assert "setup: data_plane.backend=mooncake_cpu will need these system packages: libone\n" in done.stdout
    assert "environments of kind=code will need" not in done.stdout


@pytest.mark.parametrize(
    ("programs", "num_calls"),
    [
        ({"id": "echo 1000", "apt-get": APT_GET.format(fails="nothing")}, 0),
        (ROOT, 0),
        ({**ROOT, "apt-get": APT_GET.format(fails="update")}, 1),
    ],
    ids=["without rights", "without apt-get", "without a network"],
)
def test_what_cannot_be_installed_is_named_and_the_set_up_goes_on(
    setup: Setup, checkout: Path, bare: dict[str, str], programs: dict[str, str], num_calls: int
) -> None:
    install(checkout, DEV, mooncake="libone libtwo")
    done = setup({**NO_DISK, **programs}, "--dev", **bare, **NO_COMPILER)
    assert done.returncode == 0, done.stderr
    assert len(asked_of_apt(checkout)) == num_calls
    named = [line.partition(" will need these system packages: ") for line in done.stdout.splitlines()]
    missing = {who.removeprefix("setup: "): packages for who, _, packages in named if packages}
    assert missing.pop("the tests of scripts/slurm").endswith(ANY_SLURM)
    assert missing.pop("the tests of reasoning-gym").startswith("gcc libc6-dev")
    assert missing == {
        "data_plane.backend=mooncake_cpu": "libone libtwo",
        "environments of kind=code": "bubblewrap",
        "the tests of report.html": "chromium",
    }


def test_who_only_trains_hears_what_is_missing_and_needs_no_slurm(
    setup: Setup, checkout: Path, bare: dict[str, str]
) -> None:
    install(checkout, CPU)
    done = setup({**ROOT, "apt-get": APT_GET.format(fails="nothing")}, **bare)
    assert done.returncode == 0, done.stderr
    assert asked_of_apt(checkout) == []
    assert done.stdout == "setup: environments of kind=code will need these system packages: bubblewrap\n"


def test_root_gets_a_compiler_for_what_is_compiled(
    setup: Setup, checkout: Path, bare: dict[str, str]
) -> None:
    install(checkout, DEV)
    # A compiler that is there once it is installed.
    compiler = {"a-compiler": "[ -e compiler-is-installed ]"}
    apt_get = APT_GET.format(fails="nothing") + '; case "$*" in *gcc*) touch compiler-is-installed ;; esac'
    done = setup({**NO_DISK, **ROOT, **compiler, "apt-get": apt_get}, "--dev", **bare, **COMPILER)
    update, packages = asked_of_apt(checkout)
    assert update == "update"
    assert packages.startswith("gcc libc6-dev")
    assert "5 GB of free disk are needed" in done.stderr  # reasoning-gym is installed next
