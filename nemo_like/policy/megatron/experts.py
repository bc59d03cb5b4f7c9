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

# How checkpoints of Megatron-core's other experts name these parameters; biases have their names.
_STORED_AS = {"weight1": "linear_fc1.weight", "weight2": "linear_fc2.weight"}


class GroupedExperts(MegatronModule):
    """The E experts of one rank: gated MLPs, with SwiGLU or another ``activation`` of both halves.

    ``weight1`` is [E, 2 x FFN, hidden], each expert's gate above its up projection; ``weight2`` is [E,
    hidden, FFN]. In models with biases ``linear_fc1.bias`` is [E, 2 x FFN], and ``linear_fc2.bias`` [E,
    hidden]; under these names Megatron-core's optimizer does not decay them.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        activation: Callable[[Tensor], Tensor] = SwiGLUFunction.apply,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self._activation = activation
        self._expert_parallel, self._copies = pg_collection.ep, pg_collection.expt_dp
        hidden, size = config.hidden_size, config.moe_ffn_hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()

        def parameter(*shape: int) -> torch.nn.Parameter:
            values = torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=device)
            made: Any = torch.nn.Parameter(values)
            # Megatron-core's mark: whether every data-parallel rank has a copy.
            made.allreduce = self._expert_parallel.size() == 1
            return made

        self.weight1, self.weight2 = parameter(2 * size, hidden), parameter(hidden, size)
        self._has_biases = config.add_bias_linear
        if self._has_biases:
            self.linear_fc1 = torch.nn.ParameterDict({"bias": parameter(2 * size)})
            self.linear_fc2 = torch.nn.ParameterDict({"bias": parameter(hidden)})
        # What adds adapters' outputs to those of a linear layer, by its name in Megatron-core's other
        # experts. It takes the layer's input, the ends of the experts' tokens, and the layer's output.
        self.additions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
        self.register_load_state_dict_post_hook(_ignore_extra_states)

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute the experts. hidden: [tokens, hidden], expert by expert; tokens_per_expert: [E] int64;
        weights: [tokens], from the router. Returns [tokens, hidden], and None in place of a bias."""
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32)
        halves, chosen = self._linear("linear_fc1", hidden, self.weight1, ends), weights[:, None]
        if self._has_biases:
            numbers = torch.arange(self.num_local_experts, device=hidden.device)
            experts = numbers.repeat_interleave(tokens_per_expert.to(hidden.device), output_size=len(hidden))
            halves = halves + self.linear_fc1["bias"][experts]
        activated = (self._activation(halves) * chosen).to(hidden.dtype)
        outputs = self._linear("linear_fc2", activated, self.weight2, ends)
        if self._has_biases:
            outputs = outputs + (self.linear_fc2["bias"][experts] * chosen).to(hidden.dtype)
        return outputs, None

    def _linear(self, layer: str, tokens: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        output = grouped_products(tokens, weight, ends)
        add = self.additions.get(layer)
        return output if add is None else add(tokens, ends, output)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the parameters under the names and places of Megatron-core's other experts, so that each
        kind of experts reads checkpoints of the other."""
        axis, rank, size = len(sharded_offsets), self._expert_parallel.rank(), self._expert_parallel.size()
        replica = (0, 0, self._copies.rank())
        state: ShardedStateDict = {}
        for name, parameter in self.named_parameters():
            state[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{_STORED_AS.get(name, name)}",
                parameter,
                *sharded_offsets,
                (axis, rank, size),
                replica_id=replica,
                prepend_axis_num=axis,
            )
        for layer in ("linear_fc1", "linear_fc2"):
            key = f"{prefix}experts.{layer}"
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
