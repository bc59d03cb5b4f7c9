"""A transformers model that returns scores instead of logits, and the functions that spread it over ranks.

    checkpoint ──▶ model without values ──▶ adapters ──▶ tensor parallel ──▶ fully_shard ──▶ values

Parameters get their values last, one tensor at a time, so that only the first rank holds the whole model, on
its host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from nemo_like.algorithms.critic import TokenValues, linear_values
from nemo_like.algorithms.logprobs import (
    LogprobSettings,
    TokenScores,
    VocabularyShard,
    linear_scores,
    scores_with_most_likely,
)
from nemo_like.models.remote_code import loading_arguments
from nemo_like.policy.backends.context_scores import of_all_context_ranks
from nemo_like.policy.batch.forest_attention import ForestAttention
from nemo_like.policy.batch.policy_batch import ModelInputs
from nemo_like.policy.fsdp.attention import has_plain_attention, use_causal_attention
from nemo_like.policy.fsdp.context_parallel import ContextExchange
from nemo_like.policy.fsdp.image_text import auto_class, hidden_states, reads_images
from nemo_like.policy.fsdp.lora import ADAPTER_DROPOUT
from nemo_like.policy.fsdp.tensor_parallel import sum_gradient
from nemo_like.policy.groups.layout import recomputes_layers
from nemo_like.policy.options import FsdpModelConfig, WorkerGroupConfig

# The axes of the mesh over which parameters are spread. The first has the context-parallel ranks too.
DATA_AXIS, TENSOR_AXIS = "dp", "tp"


class ScoringCausalLM(nn.Module):
    """A causal language model that returns the scores of chosen tokens instead of logits. Without
    ``settings`` its output layer is a value head, and it returns the tokens' values.

    The ranks of ``vocabulary_group`` each hold some rows of the output layer; it is None where every rank has
    all rows. The ranks of ``context_group`` each get some tokens of a row; it is None where a rank gets whole
    rows. Raises ValueError with such a group for a model whose attention is its own.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        settings: LogprobSettings | None,
        vocabulary_group: dist.ProcessGroup | None,
        context_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.logprob_settings, self._vocabulary_group = settings, vocabulary_group
        self._context_group = context_group
        self._has_plain_attention = has_plain_attention(causal_lm)
        if context_group is not None and not self._has_plain_attention:
            raise ValueError(
                f"the attention of {type(causal_lm).__name__} is not plain and causal, so its rows cannot be "
                "divided; set fsdp_cfg.context_parallel_size=1 of its worker group"
            )
        if self._has_plain_attention:
            use_causal_attention(causal_lm)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Begin to train, or with ``mode`` False to score: only recomputation and adapters' dropout differ.

        All other modules of transformers' model stay in evaluation mode: in training mode some models draw
        noise for their routers, or leave whole layers out, and so would give other log-probs than those that
        sampled.
        """
        super().train(False)
        self.training = mode
        for name, module in self.causal_lm.named_modules():
            if isinstance(module, GradientCheckpointingLayer) or ADAPTER_DROPOUT in name:
                module.training = mode
        return self

    def scale_logits(self, factor: float) -> None:
        """Set the factor by which the model multiplies its output layer's result to get logits; it is 1 until
        this call, which must happen at most once."""
        assert self.logprob_settings is not None, "values have no logits"
        self.logprob_settings = replace(
            self.logprob_settings, temperature=self.logprob_settings.temperature / factor
        )

    def scores(self, inputs: ModelInputs) -> TokenScores | TokenValues:
        """Return the scores of the micro-batch's M scored tokens, or from a critic's model the tokens'
        values."""
        kind = TokenValues if self.logprob_settings is None else TokenScores
        scores = kind.of(self(inputs))
        group = self._context_group
        return scores if group is None else of_all_context_ranks(scores, inputs, group)

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, ...]:
        # A tuple of tensors, not TokenScores, since FSDP looks for tensors in what a module returns.
        hidden = self._hidden_states(inputs)
        num_rows = len(hidden)
        scored = hidden[inputs.output_index % num_rows, inputs.output_index // num_rows]
        weight = self.causal_lm.get_output_embeddings().weight
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        if self.logprob_settings is None:
            return linear_values(scored, weight).tensors
        group = self._vocabulary_group
        if group is not None:
            scored = sum_gradient(scored, group)
        shard = VocabularyShard(
            first=0 if group is None else group.rank() * len(weight), num_valid=len(weight), group=group
        )
        settings, ids = self.logprob_settings, inputs.token_ids
        if self.training:
            return linear_scores(scored, weight, ids, shard, settings, inputs.topk_ids).tensors
        return scores_with_most_likely(scored, weight, ids, shard, settings).tensors

    def _hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Return the last hidden states, [B, T, hidden size]."""
        if reads_images(self.causal_lm.config):
            return hidden_states(self.causal_lm, inputs, self._packing(inputs))
        hidden: Tensor = self.causal_lm.get_decoder()(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            **self._packing(inputs),
        ).last_hidden_state
        return hidden

    def _packing(self, inputs: ModelInputs) -> dict[str, Any]:
        """Return the arguments that tell ``causal_attention`` where samples end. transformers' own attention
        infers it from the position ids.

        Raises ValueError for a model whose attention cannot keep the samples apart or share prompts.
        """
        group = self._context_group
        if group is not None:
            exchange = ContextExchange(inputs, group)
            return {
                "packing": inputs.packing,
                "forest": _attention(inputs, group.size()),
                "context": exchange,
            }
        if inputs.packing is None and inputs.forest is None:
            return {}
        if self._has_plain_attention:
            return {"packing": inputs.packing, "forest": _attention(inputs)}
        if inputs.forest is not None:
            raise ValueError(
                f"the attention of {type(self.causal_lm).__name__} is not plain and causal, so samples "
                "cannot have tokens in common; set sequence_packing.share_prompts=false of its worker group, "
                "and use environments that are no agents"
            )
        if not self.causal_lm.is_backend_compatible():
            raise ValueError(
                f"the attention of {type(self.causal_lm).__name__} cannot keep packed samples apart; set "
                "sequence_packing.enabled=false of its worker group"
            )
        return {}


def _attention(inputs: ModelInputs, num_ranks: int = 1) -> ForestAttention | None:
    """Return the attention of a row that is a forest and that ``num_ranks`` ranks divide; None for others."""
    if inputs.forest is None:
        return None
    return ForestAttention(inputs.forest, inputs.input_ids.shape[1] * num_ranks)


# The arguments that transformers takes besides a configuration; all others belong to the configuration.
BUILT_WITH = ("attn_implementation", "experts_implementation")


def empty_model(path: Path, arguments: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedModel:
    """Build the checkpoint's model with its buffers, but with parameters that have no values.

    ``arguments`` has the values of ``fsdp_cfg.model_kwargs``.

    Dropout is off: the policy that trains must give the same log-probs as the policy that sampled. Every row
    of an embedding trains, also the padding token's row, which transformers would leave out: no token of a
    sample is padding, and an end-of-sequence token often doubles as the padding token.
    """
    own_code = loading_arguments()
    config = AutoConfig.from_pretrained(path, **own_code)
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in filter(None, parts):
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)
    beside = {name: value for name, value in arguments.items() if name in BUILT_WITH}
    for name in arguments.keys() - beside.keys():
        setattr(config, name, arguments[name])
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class(config).from_config(config, **beside, **own_code)
    model.tie_weights()  # init_empty_weights made each of the tied parameters anew
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def give_value_head(model: PreTrainedModel) -> str:
    """Replace the model's output layer by a value head without values; return the name of its weight, [1,
    hidden size]."""
    hidden_size = model.get_input_embeddings().weight.shape[1]
    head = nn.Linear(hidden_size, 1, bias=False, device="meta")
    model.set_output_embeddings(head)
    return next(name for name, parameter in model.named_parameters() if parameter is head.weight)


def set_dtypes(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Set trained parameters, the master weights, to float32, and frozen parameters to ``compute_dtype``,
    since no update can round them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else compute_dtype)


def shard(
    model: ScoringCausalLM, mesh: DeviceMesh, cfg: WorkerGroupConfig, compute_dtype: torch.dtype
) -> None:
    """Spread the parameters over the ranks of all axes but TP: each layer is a unit, and the rest another.

    Gradients are summed over the ranks, never averaged: the loss arrives normalised by global counts.
    """
    if recomputes_layers(cfg):
        model.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    options: dict[str, Any] = {
        "mesh": mesh[DATA_AXIS],
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        "offload_policy": OffloadPolicy(),
    }
    if cfg.fsdp_cfg.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    layer_types = set(model.causal_lm._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layer_types:
            fully_shard(module, **options)
    fully_shard(model, **options)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """Return the modules that are FSDP units; the parameters of a unit are gathered together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reduce_gradients(model: nn.Module, is_wanted: bool) -> None:
    """Have later backward passes sum gradients over the data-parallel ranks if ``is_wanted``, else leave them
    on this rank."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_wanted)


def materialise(model: nn.Module, device: torch.device, cfg: FsdpModelConfig) -> None:
    """Allocate memory for this rank's part of every parameter; the buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=torch.device("cpu") if cfg.cpu_offload else device)
    for name, value in buffers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, value.to(device))
    for unit in units(model):
        # The parameters' memory may change when a unit is first gathered; from here on it stays the same.
        unit.unshard()
        unit.reshard()
