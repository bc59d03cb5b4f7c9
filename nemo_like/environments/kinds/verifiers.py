"""The kind ``verifiers``: environments of verifiers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.hub_rules import hub_kind
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import options_of
from nemo_like.environments.shared_options import HubOptions


@dataclass(kw_only=True, slots=True)
class VerifiersOptions(HubOptions):
    """An environment of verifiers with a single seat, which the policy takes."""

    module = "verifiers.v1"
    adapter = "verifiers_hub:VerifiersHub"
    prompt_options = ("env",)
    counts_tasks = True

    env: Annotated[
        dict[str, Any],
        Key("verifiers' own configuration of an environment, for example {taskset: {id: my_taskset}}", {}),
    ]


def _taskset(name: str, envs: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    options: VerifiersOptions = options_of(envs[name])
    if not options.env.get("taskset"):
        yield Problem(
            key=f"env.{name}.options.env",
            rule="names no taskset, whose tasks are the problems",
            remedy="for example env={taskset: {id: my_taskset}}",
        )


KIND = hub_kind(
    about="An environment of verifiers (version 1 of its interface) with one seat, which "
    "the policy has. Its tasks are problems: data.train={kind: environment, env: "
    "NAME, options: {size: 1000, seed: 0}}, where seed is the number of the first.",
    reward="the weighted rewards of a task of [verifiers](hubs.md#hubs)",
    example="`{env: {taskset: {id: my_taskset}}}`",
    options=VerifiersOptions,
    base={
        "max_turns": Key("", 16),
        "max_concurrency": Key("calls that one actor has under way at once", 64),
        "batch_size": Key("no turn waits for another's answer", 1),
        "timeout_s": Key("", 120.0),
    },
    problems=_taskset,
)
