"""Trainer stages, engines and a sink, connected: one setup after the other in the same processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.cluster.actors import ActorHandle, ActorSpec, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.generation.interface import GroupRequest, GroupResult
from nemo_like.generation.options import WeightTransport
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.observability.metrics import Metric, merge
from tests.functional.generation_fixtures import TIMEOUT_S, collector_spec, engine_spec, stage_spec
from tests.functional.renewed import renew, renewable

# Two blocks of the KV cache and more: keys and values that outlive an update would show.
PROMPT = tuple(2 + (7 * i) % 60 for i in range(70))
NO_OPTIONS: Mapping[str, Any] = {}


@dataclass
class Setup:
    """Trainer stages, engines and a sink, connected."""

    cluster: Cluster
    engines: list[ActorHandle]
    stages: list[ActorHandle]
    sink: ActorHandle

    def all(self, calls: Sequence[Call]) -> list:
        return self.cluster.gather(calls, stage="test", timeout_s=TIMEOUT_S)

    def connect(self) -> None:
        """Connect every stage to all engines, anew if need be."""
        self.all([stage.submit("connect", self.engines) for stage in self.stages])

    def update(self, seed: int) -> None:
        """One optimizer step's worth of change, the same in every stage."""
        self.all([stage.submit("update", seed) for stage in self.stages])

    def version(self) -> int:
        """What every engine serves."""
        found = {stats.policy_version for stats in self.all([one.submit("stats") for one in self.engines])}
        (version,) = found
        return version

    def push(self, version: int) -> dict[str, Metric]:
        return merge(self.all([stage.submit("push_weights", version) for stage in self.stages]))

    def submit(self, name: str) -> list[str]:
        """One group on every engine; returns the request ids."""
        sampling = SamplingSettings(1.0, 1.0, 0, 8, ())
        ids = [f"{name}/{engine.name}" for engine in self.engines]
        self.all(
            [
                engine.submit("submit", [GroupRequest(id_, PROMPT, tuple(range(4)))], sampling, self.sink)
                for engine, id_ in zip(self.engines, ids, strict=True)
            ]
        )
        return ids

    def generate(self, name: str) -> list[GroupResult]:
        [results] = self.all([self.sink.submit("wait_for", self.submit(name), TIMEOUT_S)])
        return results

    def logprob_error(self, results: Sequence[GroupResult]) -> float:
        """Largest difference in nats between what an engine sampled with and the trainer's own log-probs."""
        errors = []
        for result in results:
            token_ids = [response.token_ids for response in result.responses]
            [expected] = self.all([self.stages[0].submit("logprobs", PROMPT, token_ids)])
            errors += [
                np.abs(response.logprobs - own).max()
                for response, own in zip(result.responses, expected, strict=True)
            ]
        return float(max(errors))


class Processes:
    """Those of engines, trainer stages and a sink; ``prefix`` begins their names."""

    def __init__(self, prefix: str) -> None:
        self._cluster, self._prefix = Cluster(), prefix
        self._actors: dict[str, ActorHandle] = {}

    def setup(
        self,
        checkpoint: Path,
        transport: WeightTransport,
        *,
        num_engines: int = 1,
        num_stages: int = 1,
        engine: Mapping[str, Any] = NO_OPTIONS,
        stage: Mapping[str, Any] = NO_OPTIONS,
    ) -> Setup:
        """Build these in the place of those before, and connect them. ``engine`` and ``stage`` are options of
        ``engine_spec`` and ``stage_spec``.

        An engine of several workers must be the first of its process, where the workers of others would stay.
        """
        engines = [
            self._built(engine_spec(checkpoint, f"{self._prefix}-engine-{i}", **engine))
            for i in range(num_engines)
        ]
        stages = [
            self._built(stage_spec(checkpoint, f"{self._prefix}-trainer", i, num_stages, transport, **stage))
            for i in range(num_stages)
        ]
        sink = self._built(collector_spec(f"{self._prefix}-collector"))
        setup = Setup(self._cluster, engines, stages, sink)
        setup.connect()
        return setup

    def stop(self) -> None:
        self._cluster.stop()

    def _built(self, spec: ActorSpec) -> ActorHandle:
        if spec.name not in self._actors:
            # All setups of a module may be there at the same time.
            self._actors[spec.name] = self._cluster.start(replace(renewable(spec), num_cpus=0))
        else:
            call = renew(self._actors[spec.name], spec)
            self._cluster.gather([call], stage="start", timeout_s=TIMEOUT_S)
        return self._actors[spec.name]


def start(
    checkpoint: Path,
    prefix: str,
    transport: WeightTransport,
    *,
    num_stages: int,
    tensor_parallel_size: int = 1,
) -> Setup:
    """Start one engine and its trainer in processes of their own, which end with the setup's cluster."""
    engine = {"tensor_parallel_size": tensor_parallel_size}
    return Processes(prefix).setup(checkpoint, transport, num_stages=num_stages, engine=engine)
