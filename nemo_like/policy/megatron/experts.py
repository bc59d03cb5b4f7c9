"""Computes the experts of a mixture in one grouped matrix product, for GPUs without Transformer Engine.

PyTorch has such a product in bfloat16 on GPUs. Megatron-core's own grouped layer needs another package, which
is compiled at installation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor
from torch.nn import functional

from nemo_like.policy.megatron.functions import SwiGLUFunction

# For each parameter, the layer under which checkpoints of Megatron-core's other experts store it.
_LAYERS = {"weight1": "linear_fc1", "weight2": "linear_fc2"}


class GroupedExperts(MegatronModule):
    """The E experts of one rank: gated MLPs with SwiGLU and without biases.

    ``weight1`` is [E, 2 x FFN, hidden], each expert's gate above its up projection; ``weight2`` is [E,
    hidden, FFN].
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self._expert_parallel, self._copies = pg_collection.ep, pg_collection.expt_dp
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for name, shape in {"weight1": (2 * size, hidden), "weight2": (hidden, size)}.items():
            weight = torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=device)
            parameter = torch.nn.Parameter(weight)
            # Megatron-core's mark: whether every data-parallel rank has a copy.
            parameter.allreduce = self._expert_parallel.size() == 1
            self.register_parameter(name, parameter)
        # What adds adapters' outputs to those of a linear layer, by its name in Megatron-core's other
        # experts. It takes the layer's input, the ends of the experts' tokens, and the layer's output.
        self.additions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
        self.register_load_state_dict_post_hook(_ignore_extra_states)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute the experts. hidden: [tokens, hidden], expert by expert; tokens_per_expert: [E] int64;
        weights: [tokens], from the router. Returns [tokens, hidden], and None in place of a bias."""
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32)
        activated = SwiGLUFunction.apply(self._linear("weight1", hidden, ends))
        activated = (activated * weights[:, None]).to(hidden.dtype)
        return self._linear("weight2", activated, ends), None

    def _linear(self, name: str, tokens: Tensor, ends: Tensor) -> Tensor:
        output = grouped_products(tokens, getattr(self, name), ends)
        add = self.additions.get(_LAYERS[name])
        return output if add is None else add(tokens, ends, output)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the parameters under the names and places of Megatron-core's other experts, so that each
        kind of experts reads checkpoints of the other."""
        axis, rank, size = len(sharded_offsets), self._expert_parallel.rank(), self._expert_parallel.size()
        replica = (0, 0, self._copies.rank())
        state: ShardedStateDict = {}
        for name, layer in _LAYERS.items():
            key = f"{prefix}experts.{layer}"
            state[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{key}.weight",
                getattr(self, name),
                *sharded_offsets,
                (axis, rank, size),
                replica_id=replica,
                prepend_axis_num=axis,
            )
            for local in range(self.num_local_experts):
                place = (axis, rank * self.num_local_experts + local, size * self.num_local_experts)
                # Megatron-core's other experts ask for this entry, although it is empty.
                state[f"{prefix}{layer}.{local}._extra_state"] = make_sharded_object_for_checkpoint(
                    None, f"{key}._extra_state", (*sharded_offsets, place), replica
                )
        return state


def grouped_products(tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's tokens by its matrix. tokens: [tokens, in]; weight: [E, out, in]; ends: [E]
    int32, one past each expert's last token. Returns [tokens, out]."""
    if not len(tokens):  # the kernel takes no empty input; here all experts' gradients are 0
        return functional.linear(tokens, weight[0])
    return functional.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)


def _ignore_extra_states(module: torch.nn.Module, incompatible: Any) -> None:
    """Let a checkpoint have the entries that only other kinds of experts need."""
    kept = [key for key in incompatible.unexpected_keys if not key.endswith("_extra_state")]
    incompatible.unexpected_keys[:] = kept
