"""The filter on system calls for programs in a sandbox, in the kernel's form (classic BPF; seccomp(2)).

The filter denies calls that an ordinary user may make but no honest program needs: making new namespaces,
whose capabilities expose further bugs of the kernel; accessing other processes' memory; using memory that no
limit counts (System V and memfd segments); tracing, key rings and io_uring; lowering its own CPU priority, as
if others took the CPUs; and kinds of sockets that a network namespace does not confine, such as sockets
between a virtual machine and its host.
"""

from __future__ import annotations

import errno
import platform
import struct

_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in struct seccomp_data; the last is that of the first argument's lower half.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEW_NAMESPACES = 0x7E020000
_SOCKET_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK

# The architecture's number for audits, then the numbers of the calls socket, clone and clone3.
_X86_64 = (0xC000003E, 41, 56, 435)
_AARCH64 = (0xC00000B7, 198, 220, 435)
DENIED = {  # name: (x86_64, aarch64)
    "add_key": (248, 217),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "shmget": (29, 194),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
# The first number of x86_64's second table of the same calls, whose numbers the filter does not know.
_X32 = 0x40000000

_Instruction = tuple[int, int, int, int]  # code, jump when true, jump when false, value


def filter_program() -> bytes:
    """Return the filter for this machine. Raises RuntimeError when this module does not know its system
    calls."""
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise RuntimeError(f"system calls of {machine} cannot be filtered")
    column = ("x86_64", "aarch64").index(machine)
    architecture, socket, clone, clone3 = (_X86_64, _AARCH64)[column]
    refuse = _ERROR | errno.EPERM
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *([(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, refuse)] if machine == "x86_64" else []),
        # clone3 has its flags in memory, where a filter cannot look; without it the C library uses clone.
        *_if_equal(clone3, [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]),
    ]
    for numbers in DENIED.values():
        program += _if_equal(numbers[column], [(_RETURN, 0, 0, refuse)])
    families = [step for family in _SOCKET_FAMILIES for step in _if_equal(family, [(_RETURN, 0, 0, _ALLOW)])]
    program += _if_equal(
        socket,
        [(_LOAD, 0, 0, _FIRST_ARGUMENT), *families, (_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT)],
    )
    program += _if_equal(
        clone,
        [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, refuse)],
    )
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def _if_equal(value: int, body: list[_Instruction]) -> list[_Instruction]:
    return [(_EQUAL, 0, len(body), value), *body]
