"""Measures how evenly a mixture's routers spread tokens over experts while the policy trains.

A hook on each router gets the experts that it chose for each token, and their weights. A response token
counts once, at the position that predicts it. Padding does not count, and a shared prompt's last token counts
for each of its samples, so the figures do not depend on how micro-batches are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo_like.models.model_info import ModelInfo
from nemo_like.observability.metrics import Metric, mean
from nemo_like.policy.batch.policy_batch import ModelInputs

# The names of the metrics, in the order in which ``load_metrics`` computes them.
EXPERT_METRICS = ("moe/max_load", "moe/load_entropy", "moe/idle_experts", "moe/top_expert_weight")


def freeze_routers(model: torch.nn.Module) -> None:
    """Keep the routers' weights as they are: no gradient is computed for them."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.requires_grad_(False)


class ExpertLoad:
    """Counts, for every layer of the whole model, the tokens of each expert, until ``result`` is called."""

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        info: ModelInfo,
        device: torch.device,
        *,
        recomputes: bool,
    ) -> None:
        """Register hooks on the routers of this rank's chunks of the model, if they have any.

        With ``recomputes`` each layer computes twice, first without gradients.
        """
        self._recomputes = recomputes
        self._inputs: ModelInputs | None = None
        self._num_chosen, self._num_dense = info.num_experts_per_token, info.num_dense_layers
        # [layers with experts, experts + 1]: tokens of each expert, and the sum of the weights of first
        # choices; no layers in a dense model.
        shape = (info.num_mixture_layers, (info.num_experts or 0) + 1)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)
        if info.num_experts is None:
            return
        for chunk in chunks:
            chunk.register_forward_pre_hook(self._remember, with_kwargs=True)
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._count)

    def _remember(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._inputs = kwargs["labels"]

    def _count(self, router: TopKRouter, args: Any, output: tuple[Tensor, Tensor]) -> None:
        """Add one layer's choices of a micro-batch. output: weights [n, experts], and [n, experts] bool."""
        if not router.training or torch.is_grad_enabled() is self._recomputes or self._inputs is None:
            return
        weights, chosen = output[0].detach(), output[1]
        indexes = self._inputs.output_index
        if router.config.sequence_parallel:  # this rank has one of equal pieces of the row
            indexes = indexes - parallel_state.get_tensor_model_parallel_rank() * len(chosen)
            indexes = indexes[(indexes >= 0) & (indexes < len(chosen))]
        row = self._sums[router.layer_number - 1 - self._num_dense]
        row[:-1] += chosen.index_select(0, indexes).sum(dim=0)
        row[-1] += weights.index_select(0, indexes).amax(dim=1).sum()

    def forget(self) -> None:
        """Forget the counts since the last call of ``result``."""
        self._sums.zero_()

    def result(self, num_replicas: int) -> dict[str, Metric]:
        """Return this replica's part of the metrics since the last call; nothing for a dense model.

        Collective over all ranks of the policy.
        """
        if not len(self._sums):
            return {}
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        dist.all_reduce(sums)
        values = load_metrics(sums[:, :-1], sums[:, -1], self._num_chosen)
        return {name: mean(value / num_replicas, 1 / num_replicas) for name, value in values.items()}


def load_metrics(counts: Tensor, first_weights: Tensor, num_chosen: int) -> dict[str, float]:
    """Return the metrics of a mixture, as means over its layers; empty where no token was counted.

    counts: [layers, experts] float64, tokens that chose each expert; first_weights: [layers] float64, the sum
    over tokens of the greatest weight of an expert; num_chosen: experts per token.
    """
    choices = counts.sum(dim=1)
    if not bool((choices > 0).all()):
        return {}
    num_experts = counts.shape[1]
    shares = counts / choices[:, None]
    entropy = torch.special.entr(shares).sum(dim=1) / torch.tensor(num_experts).double().log()
    values = (
        shares.amax(dim=1) * num_experts,
        entropy,
        (counts == 0).double().mean(dim=1),
        first_weights / (choices / num_chosen),
    )
    return {name: value.mean().item() for name, value in zip(EXPERT_METRICS, values, strict=True)}
