"""Compares how engines and trainer score a fixed sequence of tokens, the canary, after a weight update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.policy.groups.group import PolicyWorkerGroup
from nemo_like.tripwires.canary_checks import canary_gap


class Canary:
    """A fixed sequence of tokens that every engine and the policy workers score."""

    def __init__(
        self,
        cluster: Cluster,
        engines: Callable[[], Sequence[ActorHandle]],
        policy: PolicyWorkerGroup,
        token_ids: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Score ``token_ids``. ``engines()`` returns the present engines, since any may be replaced."""
        self._cluster, self._engines, self._policy = cluster, engines, policy
        self._token_ids, self._timeout_s = tuple(token_ids), timeout_s

    def gap(self) -> float:
        """Return how far the worst engine is from the trainer, nats per token.

        Raises the errors of ``Cluster.gather``.
        """
        calls = [engine.submit("canary_logprobs", self._token_ids) for engine in self._engines()]
        trainer = self._policy.canary_logprobs(self._token_ids)
        answers = self._cluster.gather(calls, stage="canary", timeout_s=self._timeout_s)
        return canary_gap(trainer, answers)
