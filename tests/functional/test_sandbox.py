"""What the sandbox promises of the programs in it, each promise tried from inside.

A program here prints what it achieved. As root and as an ordinary user the promises are the same.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from nemo_like.environments.programs import MAX_OUTPUT_BYTES, run_program
from nemo_like.environments.sandbox import (
    FOLDER_MIB,
    SHARED_MEMORY_MIB,
    ProgramLimits,
    Sandbox,
    _absent,
    check_sandbox,
    data_file,
)
from nemo_like.environments.syscalls import DENIED
from tests.functional.sandboxes import SANDBOX, needs_sandbox

pytestmark = needs_sandbox

# ``tried(call)``: whether it is permitted. ``system(name, ...)``: a call of the C library, 0 where it worked.
HELPERS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def tried(function, *arguments):
    try: function(*arguments)
    except OSError as error: return False
    return True
def system(name, *arguments):
    return getattr(libc, name)(*arguments)
"""


def says(program: str, sandbox: Sandbox = SANDBOX) -> str:
    result = asyncio.run(run_program(HELPERS + program, "", sandbox))
    assert result.exit_code == 0, result
    return result.stdout.strip()


def test_a_program_has_no_user_of_the_host_no_capability_and_cannot_get_one() -> None:
    program = """
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(os.getuid() == 0, os.geteuid() == 0, os.getgroups())
print([int(lines[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")], int(lines["NoNewPrivs"]))
print(tried(os.setuid, 0), tried(os.setgid, 0))
"""
    lines = says(program).splitlines()
    assert lines[0].startswith("False False")
    assert lines[1:] == ["[0, 0, 0] 1", "False False"]


def test_nothing_of_the_host_can_be_mounted_or_written() -> None:
    program = """
print(system("mount", b"none", b"/tmp", b"tmpfs", 0, None) == 0)
print(system("mount", b"/usr", b"/tmp", None, 4096, None) == 0)
print(system("mount", None, b"/", None, 32, None) == 0, system("umount2", b"/usr", 2) == 0)
print(tried(os.chroot, "/tmp"), tried(os.mknod, "/tmp/disk", 0o60600, os.makedev(8, 0)))
mounts = [line.split() for line in open("/proc/self/mountinfo")]
writable = [words[4] for words in mounts if "rw" in words[5].split(",")]
print(sorted(path for path in writable if not path.startswith("/dev/")))
paths = ("/", "/usr", "/dev", "/proc/sys/kernel/hostname", sys.prefix)
print([path for path in paths if os.access(path, os.W_OK)])
"""
    lines = says(program).splitlines()
    assert lines[:4] == ["False", "False", "False False", "False False"]
    assert lines[4:] == ["['/proc', '/program', '/tmp']", "[]"]


def test_no_other_namespace_can_be_made_or_entered() -> None:
    program = """
flags = [0x10000000, 0x10000000 | 0x20000, 0x10000000 | 0x40000000, 0x20000000]
print([system("unshare", flag) == 0 for flag in flags])
print(system("syscall", 56, 0x10000000 | 17, None, None, None, None) >= 0)  # clone on x86_64
descriptors = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ("net", "mnt", "pid", "user")]
print([system("setns", fd, 0) == 0 for fd in descriptors])
"""
    assert says(program).splitlines() == [str([False] * 4), "False", str([False] * 4)]


def test_its_namespaces_are_its_own() -> None:
    names = ("mnt", "pid", "net", "ipc", "uts")
    inside = says(f"print(*[os.readlink('/proc/self/ns/' + name) for name in {names!r}])").split()
    assert not set(inside) & {os.readlink(f"/proc/self/ns/{name}") for name in names}


def test_no_process_of_the_host_is_seen_and_no_environment_is_read() -> None:
    token = secrets.token_hex()
    with subprocess.Popen(["sleep", "600"], env={"RAY_TOKEN": token}) as other:
        program = f"""
found = []
pids = [name for name in os.listdir("/proc") if name.isdigit()]
for name in pids:
    for part in ("environ", "cmdline", "maps"):
        try: found.append(open(f"/proc/{{name}}/{{part}}", "rb").read())
        except OSError: pass
print(len(pids) <= 2, {token!r}.encode() in b"".join(found), tried(os.kill, {other.pid}, 0))
"""
        try:
            assert says(program) == "True False False"
        finally:
            other.kill()


def test_the_environment_of_the_run_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "123")
    expected = "['HOME', 'LC_CTYPE', 'OMP_NUM_THREADS', 'PATH', 'PWD']"
    assert says("print(sorted(os.environ))") == expected


def test_files_of_the_run_of_ray_and_of_the_user_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    seen = [
        str(tmp_path),
        str(Path(__file__)),
        "/etc/passwd",
        "/etc/shadow",
        "/tmp/ray",
        "/sys",
        "/run",
        "/var",
    ]
    program = f"""
print([path for path in {seen!r} if os.path.exists(path)])
print(os.listdir("/tmp"), os.listdir("/dev/shm"))
"""
    lines = says(program).splitlines()
    assert lines[0] == "[]"
    # Python itself has to be there, also where it lies among the temporary files.
    pythons = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    names = sorted({path.parts[2] for path in pythons if path.is_relative_to("/tmp")})
    assert lines[1] == f"{names} []"


def test_no_descriptor_of_the_run_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        program = "print(len([fd for fd in os.listdir('/proc/self/fd') if int(fd) > 2]))"
        assert says(program) == "1"  # the one of the listing


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
import socket
print([tried(socket.create_connection, place, 5) for place in (("127.0.0.1", {port}), ("192.0.2.1", 80))])
print([name for _, name in socket.if_nameindex() if name != "lo"], tried(socket.socket, socket.AF_VSOCK))
print(tried(socket.getaddrinfo, "example.com", 80))
"""
        assert says(program).splitlines() == ["[False, False]", "[] False", "False"]


def test_abstract_and_shared_ipc_of_the_host_are_out_of_reach() -> None:
    name = f"\0{secrets.token_hex()}"
    memory = shared_memory.SharedMemory(create=True, size=16)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        program = f"""
import socket
print(tried(socket.socket(socket.AF_UNIX).connect, {name!r}), os.path.exists("/dev/shm/{memory.name}"))
"""
        try:
            assert says(program) == "False False"
        finally:
            memory.close()
            memory.unlink()


def test_its_folder_is_empty_wherever_what_it_may_read_lies(tmp_path: Path) -> None:
    folders = [tmp_path / "checkout", tmp_path / "program"]
    for folder in folders:
        folder.mkdir()
    sandbox = Sandbox(SANDBOX.limits, readable_paths=tuple(map(str, folders)))
    program = f"print(os.listdir('.'), all(map(os.path.isdir, {[*map(str, folders)]})), os.getcwd())"
    assert says(program, sandbox) == "[] True /program"


def test_a_path_of_its_own_is_one_that_the_machine_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.lexists", {"/there", "/there-1"}.__contains__)
    assert _absent("there") == "/there-2" and _absent("elsewhere") == "/elsewhere"


def test_its_file_systems_and_files_have_a_size() -> None:
    program = """
def filled(folder):
    total = 0
    for index in range(200):
        try:
            with open(f"{folder}/{index}", "wb", buffering=0) as file: total += file.write(bytes(2**20))
        except OSError: break
    return total >> 20
print(filled("."), filled("/tmp"), filled("/dev/shm"))
"""
    used = shutil.disk_usage("/dev/shm").used
    in_folder, in_temporary, in_memory = (int(word) for word in says(program).split())
    for filled in (in_folder, in_temporary):
        assert FOLDER_MIB - 2 <= filled <= FOLDER_MIB
    assert SHARED_MEMORY_MIB - 2 <= in_memory <= SHARED_MEMORY_MIB
    assert shutil.disk_usage("/dev/shm").used <= used + SHARED_MEMORY_MIB * 2**20 // 2


def test_memory_is_limited_and_there_is_none_that_no_limit_counts() -> None:
    program = """
import mmap
def taken():
    try: bytearray(2 * 2**30)
    except MemoryError: return False
    return True
print(taken(), tried(mmap.mmap, -1, 2 * 2**30), tried(os.memfd_create, "more"))
print([system(name, 0, size, 0o1600) >= 0 for name, size in (("shmget", 2**20), ("semget", 1))])
"""
    assert says(program).splitlines() == ["False False False", "[False, False]"]


def test_limits_cannot_be_raised() -> None:
    program = """
import resource
for name in ("AS", "NPROC", "FSIZE", "CPU", "NOFILE"):
    limit = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(limit)
    try: resource.setrlimit(limit, (hard + 1, hard + 1)); print(name)
    except (ValueError, OSError): pass
print(resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_FSIZE)[1] >> 20)
"""
    assert says(program) == f"128 {FOLDER_MIB}"


def test_the_number_of_processes_is_limited() -> None:
    program = """
import signal, time
children = []
for _ in range(100):
    try: child = os.fork()
    except OSError: break
    if child == 0: time.sleep(60); os._exit(0)
    children.append(child)
print(len(children))
"""
    assert 5 <= int(says(program)) < 16


def test_no_process_can_be_traced() -> None:
    program = """
child = os.fork()
if child == 0:
    __import__("time").sleep(60)
print([system("ptrace", 16, pid, 0, 0) == 0 for pid in (1, child)], tried(open, "/proc/1/mem", "rb"))
buffer = ctypes.create_string_buffer(8)
print(system("process_vm_readv", child, buffer, 1, buffer, 1, 0) >= 0)
os.kill(child, 9)
"""
    lines = says(program).splitlines()
    assert lines[0].startswith("[False, False]")
    assert lines[1] == "False"


def test_system_calls_that_no_program_needs_are_refused() -> None:
    column = ("x86_64", "aarch64").index(platform.machine())
    numbers = {name: both[column] for name, both in DENIED.items()}
    program = f"""
for name, number in {numbers!r}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1: print(name)
"""
    assert len(numbers) >= 15
    assert says(program) == ""


def test_what_it_prints_is_read_up_to_a_size() -> None:
    result = asyncio.run(run_program("print('x' * 50_000_000)", "", SANDBOX))
    assert result.exit_code != 0
    assert len(result.stdout) <= 2 * MAX_OUTPUT_BYTES


@pytest.fixture
def marker() -> Iterator[str]:
    yield f"86400.{secrets.randbelow(10**9)}"


def sleeping(marker: str) -> list[psutil.Process]:
    """Processes that were started as ``sleep marker``."""
    return [
        process for process in psutil.process_iter(["cmdline"]) if marker in (process.info["cmdline"] or ())
    ]


@pytest.mark.parametrize("last", ["print('done')", "import time; time.sleep(3600)"], ids=["ends", "is ended"])
def test_what_it_started_ends_with_it(marker: str, last: str) -> None:
    program = f"""
import subprocess
for _ in range(3): subprocess.Popen(["sleep", "{marker}"], start_new_session=True)
{last}
"""
    limits = ProgramLimits(timeout_s=2.0, memory_mib=512, max_processes=16)
    asyncio.run(run_program(program, "", Sandbox(limits)))
    _, alive = psutil.wait_procs(sleeping(marker), timeout=30)
    assert alive == []


def test_it_ends_with_whoever_started_it(marker: str) -> None:
    script = f"""
import subprocess, sys
from nemo_like.environments.sandbox import ProgramLimits, Sandbox
program = '''
import subprocess, time
subprocess.Popen(["sleep", "{marker}"])
print("started", flush=True)
time.sleep(600)
'''
with Sandbox(ProgramLimits(600.0, 512, 16)).program("stdin", program) as start:
    subprocess.Popen(start.command, pass_fds=start.pass_fds, cwd=start.cwd, env=start.env).wait()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        # What was just started may not show its arguments yet: the kernel sets them after it lets go of the
        # descriptor that the starting process waits for.
        while not (started := sleeping(marker)):
            assert parent.poll() is None
        parent.kill()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []


def test_files_of_the_machine_are_readable_where_the_configuration_says_so(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("known")
    program = f"print(open('{tmp_path}/words').read(), os.access('{tmp_path}', os.W_OK))"
    tmp_path.chmod(0o755)
    assert says(program, Sandbox(SANDBOX.limits, (str(tmp_path),))) == "known False"
    with pytest.raises(RuntimeError, match="no-such"):
        check_sandbox(Sandbox(SANDBOX.limits, ("/no-such",)))


@pytest.mark.parametrize("limits", [ProgramLimits(30.0, 20, 16), ProgramLimits(30.0, 512, 1)])
def test_limits_under_which_no_program_could_run_are_refused(limits: ProgramLimits) -> None:
    with pytest.raises(RuntimeError, match=r"options\.memory_mib and options\.max_processes must suffice"):
        check_sandbox(Sandbox(limits))


# For an ordinary user all other tests here run as one.
if os.geteuid() == 0:

    def test_an_ordinary_user_gets_the_same_sandbox() -> None:
        """Root becomes the user nobody, for whom what only root may reach is mounted where nobody may."""
        repository = Path(__file__).parents[2]
        needed = [*map(os.path.realpath, (sys.base_prefix, sys.prefix)), str(repository)]
        hidden = {f"/{Path(path).parts[1]}" for path in needed} - {"/usr", "/tmp"}
        command = ["bwrap", "--dev-bind", "/", "/", "--perms", "1777", "--tmpfs", "/tmp"]
        for folder in sorted(hidden):
            command += ["--perms", "0755", "--tmpfs", folder]
        for path in needed:
            for parent in reversed(Path(path).parents[:-1]):
                command += ["--perms", "0755", "--dir", str(parent)]
            command += ["--ro-bind", path, path]
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        env = {**os.environ, "HOME": "/tmp"}
        done = subprocess.run(
            [*command, *nobody, *tests], capture_output=True, text=True, cwd=repository, env=env
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert "skipped" not in done.stdout


def test_without_a_sandbox_the_folder_is_removed_whatever_is_in_it() -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    program = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nprint(7)"
    result = asyncio.run(run_program(program, "", Sandbox(SANDBOX.limits, is_real=False)))
    assert result.stdout == "7\n"
    left = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in left if name.startswith("program-")]


def test_a_file_in_memory_reads_as_its_content() -> None:
    with data_file("né") as descriptor:
        assert os.read(descriptor, 100) == "né".encode()
