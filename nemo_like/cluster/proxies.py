"""Keeps a proxy of the environment out of the way between a run's own processes. Standard library only.

HTTP clients take HTTP_PROXY and HTTPS_PROXY for every host that NO_PROXY does not name, loopback included: a
call of an agent to its run, or of a run to a judge on the same machine, would go to the proxy, which cannot
reach it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def no_proxy(environment: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return NO_PROXY and no_proxy, which name ``hosts`` beside the hosts that ``environment`` names.

    Some clients read one, some the other. "*", which stands for every host, stays alone.
    """
    named = [one.strip() for name in ("NO_PROXY", "no_proxy") for one in environment.get(name, "").split(",")]
    value = "*" if "*" in named else ",".join(dict.fromkeys(one for one in (*named, *hosts) if one))
    return {"NO_PROXY": value, "no_proxy": value}


def bypass_proxies(hosts: Iterable[str] = LOOPBACK) -> None:
    """Let this process, and every process that it starts later, reach ``hosts`` without a proxy."""
    os.environ.update(no_proxy(os.environ, hosts))
