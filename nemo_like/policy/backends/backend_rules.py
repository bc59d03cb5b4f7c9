"""Rules on the keys of the training backends.

A backend reads only its own config group. A key that is set in another backend's group is a problem, since
nobody reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.keys import keys
from nemo_like.config.problems import Problem
from nemo_like.policy.backends.backend_kind import backend_kind_of
from nemo_like.policy.backends.library_arguments import worker_argument_problems
from nemo_like.policy.groups.adapter_rules import adapter_problems
from nemo_like.policy.groups.layout import adapters_of
from nemo_like.policy.options import BACKEND_KINDS, WorkerGroupConfig


def backend_problems(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield every problem of the worker group ``name`` with its backend: keys of another backend that are
    set, and keys that the chosen backend does not support."""
    yield from _other_backends(name, group)
    yield from worker_argument_problems(name, group)
    if (lora := adapters_of(group)) is not None:
        yield from adapter_problems(name, lora)
    of_kind = backend_kind_of(group).problems
    if of_kind is not None:
        yield from of_kind(name, group)


def _other_backends(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield a problem for every key of a backend that is not chosen, if the key is not at its default."""
    parts = {backend: BACKEND_KINDS.load(backend).part for backend in BACKEND_KINDS.names()}
    own = backend_kind_of(group).part
    for backend, part in parts.items():
        of_part = getattr(group, part)
        kind: type = type(of_part)
        for leaf, (_, key) in keys(kind).items():
            if part != own and (value := getattr(of_part, leaf)) != key.default:
                yield Problem(
                    key=f"{name}.{part}.{leaf}={_shown(value)}",
                    rule=f"is for {name}.backend={backend}, but that is {group.backend}",
                    remedy=f"set it to {_shown(key.default)}, or {name}.backend={backend}",
                )


def _shown(value: object) -> str:
    """Return a scalar as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
