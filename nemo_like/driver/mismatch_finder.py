"""``MismatchFinder``: has the run's own engines and policy workers compared module by module at an alarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.options import deadline_s
from nemo_like.cluster.stage import Stage
from nemo_like.configuration import Config
from nemo_like.mismatch.sides import divided_samples
from nemo_like.policy.groups.group import PolicyWorkerGroup
from nemo_like.weight_sync.sync import EngineWeights


@dataclass(frozen=True, slots=True)
class _RunSides:
    """The ``Sides`` of a live run: one of its engines, and its policy workers."""

    cluster: Cluster
    engine: ActorHandle
    policy: PolicyWorkerGroup
    end_generation: Callable[[], object]
    timeout_s: float

    def ask_engine(self, method: str, *args: Any) -> Any:
        calls = [self.engine.submit(method, *args)]
        return self.cluster.gather(calls, stage="find_mismatch", timeout_s=self.timeout_s)[0]

    def ask_trainer(self, method: str, *args: Any) -> list[Any]:
        self.end_generation()
        return self.policy.ask_all(method, *args)


class MismatchFinder:
    """Finds the module in which engines and trainer differ, between two steps of a run."""

    def __init__(
        self,
        cfg: Config,
        cluster: Cluster,
        engines: Callable[[], Sequence[ActorHandle]],
        policy: PolicyWorkerGroup,
        weight_sync: EngineWeights,
        status: Callable[[str], object],
    ) -> None:
        """Compare what ``engines()`` returns, since any engine may be replaced. ``status`` gets a line when a
        search begins."""
        self._cfg, self._cluster, self._engines = cfg, cluster, engines
        self._policy, self._weight_sync, self._status = policy, weight_sync, status

    def sentence(self) -> str:
        """Compare, and say what differs, or why nothing could be compared."""
        if (reason := _not_live(self._cfg)) is not None:
            return f"the module was not looked for in the run, since {reason}"
        self._status("engines and trainer disagree, so they are compared module by module")
        # Only now: this loads numpy, and values pass through this process, which no step lets in.
        from nemo_like.mismatch.live import live_mismatch

        timeout_s = deadline_s(self._cfg.cluster, Stage.generation)
        sides = [
            _RunSides(self._cluster, engine, self._policy, self._weight_sync.end_generation, timeout_s)
            for engine in self._engines()
        ]
        served, send = self._weight_sync.version, self._weight_sync.ensure_version
        try:
            return live_mismatch(self._cfg, sides, served, self._policy.version, send)
        except Exception as error:  # the alarm must be told, whatever becomes of the search
            return f"the module could not be found: {type(error).__name__}: {error}"


def _not_live(cfg: Config) -> str | None:
    """Return why nothing can be compared between two steps; None where it can be."""
    if cfg.grpo.max_staleness or cfg.rollout.max_tokens_per_step is not None:
        return "samples are under way in the engines"
    if not cfg.generation.vllm_cfg.enforce_eager:
        return "the engines compute compiled graphs (generation.vllm_cfg.enforce_eager=false)"
    return divided_samples(cfg)
