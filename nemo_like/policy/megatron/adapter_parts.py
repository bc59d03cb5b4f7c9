"""What adapters of Megatron-core's layers have in common: their settings, and a rank's part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from nemo_like.models.weight_names import Cut, Rule
from nemo_like.policy.megatron.weight_conversion import Geometry, ModelPart, full_shape, join
from nemo_like.policy.options import LoraConfig

# The axis along which a tensor of each kind is cut, for Megatron-core.
AXES = {Cut.rows: 0, Cut.columns: 1}


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The settings that the adapters of all layers share."""

    lora: LoraConfig
    geometry: Geometry
    part: ModelPart
    sequence_parallel: bool


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One rank's part of an A or a B; ``rule`` has peft's name of the full tensor."""

    rule: Rule
    parameter: nn.Parameter
    part: ModelPart

    @property
    def name(self) -> str:
        return self.rule.hf_names[0]

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full tensor, as peft saves it."""
        return full_shape(self.rule, self.parameter.shape, self.part.tp_size)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the full tensor of all ranks' parts, as peft saves it."""
        return join(self.rule, parts)

    def sharded(self) -> ShardedTensor:
        """Return the part with its place in the full tensor, as Megatron-core's checkpoints take it."""
        if self.rule.cut is Cut.replicated:
            return make_sharded_tensor_for_checkpoint(self.parameter, self.name)
        return make_tp_sharded_tensor_for_checkpoint(self.parameter, self.name, AXES[self.rule.cut])
