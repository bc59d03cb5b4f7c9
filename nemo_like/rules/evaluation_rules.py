"""Checks runs that only evaluate."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.driver.options import asks_endpoint
from nemo_like.generation.server_rules import api_key_problems, server_problems
from nemo_like.plan.machine_rules import Machine


def evaluation_problems(cfg: Config, machine: Machine) -> Iterator[Problem]:
    """Yield every problem of the group ``evaluation`` and of the keys on which an evaluation depends."""
    asked = cfg.evaluation
    if asked is None:
        return
    if not cfg.rollout.generate_only or cfg.rollout.replay is not None:
        yield Problem(
            key="evaluation",
            rule="is of runs that only evaluate (rollout.generate_only=true, without rollout.replay)",
            remedy="start it with scripts/evaluate.py, or leave the group out",
        )
    if not cfg.data.validation:
        yield Problem(
            key="data.validation",
            rule="has no source, and an evaluation answers its problems",
            remedy="name one, for example data.validation={kind: jsonl, path: test.jsonl}",
        )
    yield from server_problems(asked)
    if asks_endpoint(cfg.evaluation) and machine is Machine.this and cfg.cluster.address is None:
        yield from api_key_problems(asked)
