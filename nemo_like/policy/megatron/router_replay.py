"""Has a mixture's routers choose the experts that the engine's routers chose for the same tokens.

    ModelInputs.routes ──▶ this rank's tokens and layers ──▶ each router: the engine's choice
                                                                  └── or, for a token without a route, its own

The weights of the chosen experts are the trainer's own and have gradients, as in rollout routing replay
(arXiv 2510.11370). Megatron-core's ``RouterReplay`` keeps its instances in one list for all models of a
process, and does not handle tokens without a route. So a class here derives from it, and each router gets an
instance that knows its layer and asks this rank's ``RouteReplay``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_like.observability.metrics import Metric, mean
from nemo_like.policy.batch.policy_batch import ModelInputs
from nemo_like.policy.megatron.modules import mixture_layers

# Returns the values and the indexes of the k highest scores.
_TopK = Callable[..., tuple[Tensor, Tensor]]


class RouteReplay:
    """Holds the choices to replay on one rank: of the micro-batch that is in the model, and with activation
    recompute of the micro-batches whose backward pass is still to come."""

    def __init__(
        self, model: torch.nn.Module | None, config: TransformerConfig, device: torch.device
    ) -> None:
        """Take over the routers of ``model``; with None every router makes its own choice."""
        routers = [one for one in model.modules() if isinstance(one, TopKRouter)] if model else []
        self._recomputes = config.recompute_granularity is not None
        self._is_sequence_parallel = config.sequence_parallel
        self._is_on = model is not None  # also on a rank none of whose layers has experts
        self._num_layers = len(routers)
        # The place of this rank's first layer among the layers with experts; the rest follow.
        num_dense = mixture_layers(config).count(0) if routers else 0
        self._first_layer = routers[0].layer_number - 1 - num_dense if routers else 0
        for layer_index, router in enumerate(routers):
            router.router_replay = _LayerReplay(self, layer_index)
        self._routes: Tensor | None = None  # [tokens of this rank, layers of this rank, k]
        self._is_forward = False
        self._is_suspended = self._is_comparing = False
        # By layer, the routes of each recomputation that is still to come.
        self._kept: list[deque[Tensor | None]] = [deque() for _ in routers]
        # [2]: pairs of a token and a layer with a different choice, and all compared pairs.
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Forget the routes that an interrupted run of micro-batches has left."""
        for kept in self._kept:
            kept.clear()

    @contextmanager
    def replaying(self, inputs: ModelInputs) -> Iterator[None]:
        """Have the routers replay the routes of this micro-batch within the block, which is its forward pass.

        With activation recompute they replay the routes again in the backward pass, where micro-batches come
        in the order of their forward passes.
        """
        if not self._num_layers:
            yield
            return
        self._routes = None if self._is_suspended else self._of_this_rank(inputs)
        if self._recomputes and torch.is_grad_enabled():
            for kept in self._kept:
                kept.append(self._routes)
        self._is_forward = True
        try:
            yield
        finally:
            self._routes, self._is_forward = None, False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Have every router make its own choice within the block."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Count within the block how often a router's own choice differs from the engine's."""
        self._is_comparing = True
        try:
            yield
        finally:
            self._is_comparing = False

    def metrics(self) -> dict[str, Metric]:
        """Return the share of tokens and layers for which the router's own choice was another set of experts,
        over all ranks of the replica, and reset the counts. All these ranks call this."""
        if not self._is_on:
            return {}
        counts, self._counts = self._counts, torch.zeros_like(self._counts)
        for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
            dist.all_reduce(counts, group=group)
        different, compared = counts.tolist()
        return {"routing_disagreement": mean(different, compared)} if compared else {}

    def forget(self) -> None:
        """Forget the counts since the last call of ``metrics``."""
        self._counts.zero_()

    def choose(self, layer_index: int, scores: Tensor, own: Tensor) -> Tensor:
        """Return the experts of one layer's tokens, [tokens, k] int64 from 0: the routes to replay, and the
        router's ``own`` choice for tokens without a route."""
        routes = self._routes if self._is_forward else self._kept[layer_index].popleft()
        if routes is None:
            return own
        if len(routes) != len(scores):
            raise ValueError(f"{len(routes)} tokens have routes to replay, and a router got {len(scores)}")
        replayed = routes[:, layer_index].to(torch.int64) - 1
        has_route = replayed[:, 0] >= 0
        if self._is_forward and self._is_comparing:
            differs = (replayed.sort(dim=1).values != own.sort(dim=1).values).any(dim=1) & has_route
            self._counts += torch.stack((differs, has_route)).sum(dim=1)
        return torch.where(has_route[:, None], replayed, own)

    def _of_this_rank(self, inputs: ModelInputs) -> Tensor | None:
        """Return the routes of the tokens and layers that this rank computes, [tokens, layers, k]. Tokens are
        ordered by position, then by sample, as the layers see them."""
        if inputs.routes is None:
            return None
        last = self._first_layer + self._num_layers
        routes = inputs.routes[:, :, self._first_layer : last].transpose(0, 1)
        if self._is_sequence_parallel:
            num_ranks = parallel_state.get_tensor_model_parallel_world_size()
            routes = routes.chunk(num_ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return routes.flatten(0, 1)


class _LayerReplay(RouterReplay):
    """Takes the place of Megatron-core's replay in one router."""

    def __init__(self, replay: RouteReplay, layer_index: int) -> None:
        # Megatron-core's own constructor would add this to a list of all models in the process.
        self._replay, self._layer_index = replay, layer_index

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: _TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the experts to use, and the experts, both [tokens, topk]. scores: [tokens,
        experts]."""
        assert default_compute_topk is not None
        with torch.no_grad():
            _, own = default_compute_topk(scores, topk, num_groups, group_topk)
            chosen = self._replay.choose(self._layer_index, scores, own)
        return scores.gather(1, chosen), chosen
