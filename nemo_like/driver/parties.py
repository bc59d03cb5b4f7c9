"""``Parties``: an engine and the policy workers of one replica, as a run starts them, without rollouts.

started_parties ──▶ Ray, placement, ``Starter`` ──▶ engine, TracedWorker per rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.janitor import swept_directory
from nemo_like.cluster.options import longest_deadline_s
from nemo_like.cluster.private_ray import temporary_parent
from nemo_like.cluster.runtime import ray_runtime
from nemo_like.configuration import Config
from nemo_like.driver.bundles import bundles
from nemo_like.driver.processes import OWN_TARGETS, Starter, ray_needs
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.plan.places import placement
from nemo_like.plan.roles import Role

TARGETS = {**OWN_TARGETS, Role.policy_worker: "nemo_like.mismatch.traced_worker:TracedWorker"}


@dataclass(slots=True)
class Parties:
    """The ``Sides`` of a comparison without a run."""

    cluster: Cluster
    engine: ActorHandle
    workers: list[ActorHandle]  # by rank
    timeout_s: float

    def ask_engine(self, method: str, *args: Any) -> Any:
        """Return the engine's answer to a call."""
        return self._answers([self.engine.submit(method, *args)])[0]

    def ask_trainer(self, method: str, *args: Any) -> list[Any]:
        """Return every worker's answer to the same call, by rank."""
        return self._answers([worker.submit(method, *args) for worker in self.workers])

    def _answers(self, calls: list[Call]) -> list[Any]:
        return self.cluster.gather(calls, stage="find_mismatch", timeout_s=self.timeout_s)


@contextmanager
def started_parties(
    cfg: Config,
    directory: RunDirectory,
    warn: Callable[[str], None],
    targets: dict[Role, str] = TARGETS,
) -> Iterator[Parties]:
    """Start both sides of ``cfg``, which is one of ``as_sides``, and connect them; end all processes when
    the block is left. ``directory`` gets their logs. Raises the errors of ``Cluster.gather``."""
    places = placement(cfg)
    needs = ray_needs(cfg, places, directory)
    patience_s = max(cfg.cluster.start_timeout_s, longest_deadline_s(cfg.cluster))
    with swept_directory(temporary_parent()), ray_runtime(needs, warn) as ray_failure:
        cluster = Cluster(directory.logs_path, ray_failure)
        try:
            cluster.reserve(bundles(cfg, places), timeout_s=cfg.cluster.start_timeout_s)
            starter = Starter(cfg, cluster, directory, places, targets=targets)
            workers = starter.workers(Role.policy_worker, None)
            # Also on a GPU that both share: of a checkpoint, what the engine has read is compared first.
            (engine,) = starter.engines([0], then_sleep=False)
            parties = Parties(cluster, engine, workers, patience_s)
            parties.ask_trainer("setup")
            parties.ask_engine("stats")
            parties.ask_trainer("connect_weights", [engine])
            yield parties
        finally:
            cluster.stop()
