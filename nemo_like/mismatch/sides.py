"""``Sides``: the engine and the policy workers that are compared, and the configuration of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from nemo_like.configuration import Config
from nemo_like.policy.backends.backend_kind import axis_size
from nemo_like.tripwires.options import Tripwires

_ENGINE, _WORKER = "nemo_like.mismatch.traced_engine", "nemo_like.mismatch.traced_worker"
# What both are asked for by ``look``: paths, so that only their processes load what the functions need.
SAMPLE, TRACE = f"{_ENGINE}:sample", f"{_ENGINE}:trace"
HELD_WEIGHTS, ARRIVED_WEIGHTS = f"{_ENGINE}:held", f"{_ENGINE}:arrived"
SUBSTITUTED, WEIGHT_WORDS = f"{_WORKER}:substituted", f"{_WORKER}:weight_words"


class Sides(Protocol):
    """An engine and all policy workers. Every call waits until it is answered."""

    def ask_engine(self, method: str, *args: Any) -> Any:
        """Return the engine's answer to a call."""

    def ask_trainer(self, method: str, *args: Any) -> list[Any]:
        """Return every worker's answer to the same call, by rank."""


def divided_samples(cfg: Config) -> str | None:
    """Return why no sample can be compared where ranks have parts of it; None where each has all of it."""
    if (cp := axis_size(cfg.policy, "cp")) == 1:
        return None
    return (
        f"the policy divides each sample over {cp} context-parallel ranks, whose values are not put together "
        "here"
    )


def as_sides(cfg: Config) -> Config:
    """Return a configuration with one engine and, unless experts are spread over replicas, one replica.

    The engine computes without compiled graphs, in which nothing could be recorded, and takes weights only
    between requests. Raises ValueError for a trainer that spreads a sample over ranks.
    """
    if (reason := divided_samples(cfg)) is not None:
        raise ValueError(f"{reason}; compare with a context-parallel size of 1")
    is_whole = axis_size(cfg.policy, "ep") == 1
    generation = replace(
        cfg.generation,
        num_engines=1,
        vllm_cfg=replace(cfg.generation.vllm_cfg, enforce_eager=True),
    )
    policy = replace(cfg.policy, data_parallel_size=1) if is_whole else cfg.policy
    return replace(
        cfg,
        generation=generation,
        policy=policy,
        grpo=replace(cfg.grpo, max_staleness=0),
        rollout=replace(cfg.rollout, replay=None, generate_only=False),
        debug=replace(cfg.debug, tripwires=Tripwires.all),
        value=None,
        teacher=None,
        evaluation=None,
    )
