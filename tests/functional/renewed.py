"""Objects one after the other in the process of one actor, since most of an actor's start is imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_like.cluster.actors import ActorHandle, ActorSpec, Call
from nemo_like.cluster.imports import load_target


class Renewed:
    """To be hosted in the place of other targets: it is the one that was built last.

    The one before stays idle, and has only the process in common with it.
    """

    def __init__(self, target: str, kwargs: Mapping[str, Any]) -> None:
        self.renew(target, kwargs)

    def renew(self, target: str, kwargs: Mapping[str, Any]) -> None:
        self._target = load_target(target)(**kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def renewable(spec: ActorSpec) -> ActorSpec:
    """Describe the same process, which can become another object's."""
    kwargs = {"target": spec.target, "kwargs": spec.kwargs}
    return replace(spec, target="tests.functional.renewed:Renewed", kwargs=kwargs)


def renew(actor: ActorHandle, spec: ActorSpec) -> Call:
    """Build what the description says in a process that is there."""
    return actor.submit("renew", spec.target, spec.kwargs)
