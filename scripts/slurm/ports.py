"""Claim a range of TCP ports on this machine for one Ray node: several jobs may share the machine.

Prints the first port of the range, and holds the claim until standard input ends. The claim is the range's
last port, bound. It ends with the process that holds it, however that ends, and it holds between users and
between containers that share the machine's network.
"""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack

RANGES = 20  # that are tried, one after the other


def bind(port: int) -> socket.socket:
    """Return a socket that keeps everyone else from using the port. Raises OSError when somebody does."""
    own = socket.socket()
    try:
        own.bind(("", port))
    except OSError:
        own.close()
        raise
    return own


def claim(base: int, width: int) -> tuple[int, socket.socket]:
    """Return the first port of the first range from ``base`` on that nobody uses, and what holds it."""
    for first in range(base, base + RANGES * width, width):
        with ExitStack() as probes:
            try:
                held = probes.enter_context(bind(first + width - 1))
                for port in range(first, first + width - 1):
                    bind(port).close()
            except OSError:
                continue
            probes.pop_all()
            return first, held
    raise SystemExit(
        f"no {width} ports in a row are free between {base} and {base + RANGES * width - 1}; "
        "PORT_BASE names another place to look from"
    )


def main() -> None:
    base, width = int(sys.argv[1]), int(sys.argv[2])
    if not 1024 <= base <= 65536 - RANGES * width:
        raise SystemExit(f"PORT_BASE={base} must be between 1024 and {65536 - RANGES * width}")
    first, held = claim(base, width)
    with held:
        print(first, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
