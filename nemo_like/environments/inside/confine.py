"""What every process in a sandbox does first: give up the user id that it came with, and set its limits."""

from __future__ import annotations

import os
import resource

# The user who started this already has no rights to give up.
KEEP_USER = -1


def confine(user_id: int, limits: str) -> None:
    """Become ``user_id`` for good, unless that is KEEP_USER, and take limits such as ``AS=1000,CPU=5``.

    Leaving user id 0 takes every capability away; without capabilities a hard limit cannot be raised.
    """
    if user_id != KEEP_USER:
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)
    for limit in limits.split(","):
        name, _, value = limit.partition("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
