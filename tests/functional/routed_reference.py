"""A dense mixture of experts whose routers choose what a batch says, and batches that say it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from nemo_like.algorithms.options import SurrogateLossConfig
from nemo_like.batch.columns import Column, Layout
from nemo_like.batch.routed_experts import routed_experts_column
from nemo_like.models.model_info import read_model_info
from nemo_like.policy.options import PolicyConfig
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import GROUP_SIZE, random_batch

NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 2, 4, 2  # of the mixture in policy_fixtures, without dense layers
COLUMN = Column("routed_experts", "uint8", Layout.per_token, inner_shape=(NUM_LAYERS, NUM_CHOSEN))


def routed_batch(num_samples: int, seed: int = 5) -> dict[str, Any]:
    """A random batch with random routes: of all tokens but each sample's last, and of no token of the third
    group. Samples of a group have the same routes in their prompt."""
    batch = random_batch(num_samples, seed)
    rng = np.random.default_rng(seed)
    lengths = batch["lengths"]
    scores = rng.random((sum(lengths), NUM_LAYERS, NUM_EXPERTS))
    routes = (scores.argsort(-1)[..., :NUM_CHOSEN] + 1).astype(np.uint8)
    starts = np.cumsum(lengths) - lengths
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        first = starts[row // GROUP_SIZE * GROUP_SIZE]
        routes[start : start + 3] = routes[first : first + 3]
        routes[start + length - 1] = 0
        if row // GROUP_SIZE == 2:
            routes[start : start + length] = 0
    batch["columns"][COLUMN.name] = routes
    batch["more_columns"] = [COLUMN]
    return batch


class RoutedReference(DenseReference):
    """Its routers follow the batch's routes, and count how often they would have chosen otherwise."""

    def __init__(self, cfg: PolicyConfig, loss: SurrogateLossConfig, temperature: float) -> None:
        super().__init__(cfg, loss, temperature)
        column = routed_experts_column(read_model_info(cfg.model_name, "megatron"))
        assert column == COLUMN
        self.num_different = self.num_compared = 0
        self._routes: Tensor | None = None  # [T, layers, k]
        # By layer, of the latest sample: the weights of the experts that were used, and the experts.
        self._used = [(torch.zeros(0), torch.zeros(0))] * NUM_LAYERS
        kinds = (Qwen3MoeTopKRouter, DeepseekV3TopkRouter, GptOssTopKRouter)
        routers = [one for one in self.model.modules() if isinstance(one, kinds)]
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._replay(layer))

    def logits(self, batch: dict[str, Any], row: int, ids: Tensor) -> Tensor:
        routes = torch.from_numpy(batch["columns"][COLUMN.name]).split(batch["lengths"])[row]
        self._routes = routes.long()
        return super().logits(batch, row, ids)

    def reference_logprobs(self, batch: dict[str, Any]) -> list[Tensor]:
        """The reference policy's own routers choose."""
        own = {**batch, "columns": {**batch["columns"], COLUMN.name: 0 * batch["columns"][COLUMN.name]}}
        return super().reference_logprobs(own)

    @torch.no_grad()
    def choices(self, batch: dict[str, Any], rows: Iterable[int]) -> Tensor:
        """Of the experts that were used."""
        sums = torch.zeros(NUM_LAYERS, NUM_EXPERTS + 1, dtype=torch.float64)
        ids, masks = (
            torch.from_numpy(batch["columns"][name]).split(batch["lengths"])
            for name in ("input_ids", "response_mask")
        )
        for row in rows:
            self.logits(batch, row, ids[row][None].long())
            scored = masks[row][1:].nonzero()[:, 0]
            for layer, (weights, experts) in enumerate(self._used):
                sums[layer, :-1] += torch.bincount(experts[scored].flatten(), minlength=NUM_EXPERTS)
                sums[layer, -1] += weights[scored].amax(-1).sum()
        return sums

    def _replay(self, layer: int) -> Any:
        def replay(router: Any, inputs: Any, outputs: Any) -> Any:
            logits, _, own = outputs
            assert self._routes is not None
            routes = self._routes[:, layer]
            has_route = routes[:, 0] > 0
            differs = ((routes - 1).sort(-1).values != own.sort(-1).values).any(-1)
            self.num_different += int((differs & has_route).sum())
            self.num_compared += int(has_route.sum())
            chosen = torch.where(has_route[:, None], routes - 1, own)
            is_sigmoid = isinstance(router, DeepseekV3TopkRouter)
            scores = logits.float().sigmoid() if is_sigmoid else logits.float().softmax(-1)
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
            weights = weights * router.routed_scaling_factor if is_sigmoid else weights
            self._used[layer] = (weights, chosen)
            return logits, weights, chosen

        return replay
