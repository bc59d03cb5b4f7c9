"""Confines a process, as every process in a sandbox does first: it gives up its user id, and sets its
limits."""

from __future__ import annotations

import os
import resource

# Means: keep the user id, since the user who started the process has no rights to give up.
KEEP_USER = -1


def confine(user_id: int, limits: str) -> None:
    """Become ``user_id`` for good, unless it is KEEP_USER, and set limits such as ``AS=1000,CPU=5``.

    A process that leaves user id 0 loses every capability, and so can raise no hard limit.
    """
    if user_id != KEEP_USER:
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)
    for limit in limits.split(","):
        name, _, value = limit.partition("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
