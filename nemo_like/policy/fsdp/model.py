"""A transformers model that scores tokens by itself, and how it is spread over ranks.

    checkpoint ──▶ model without values ──▶ adapters ──▶ tensor parallel ──▶ fully_shard ──▶ values

Values come last, one tensor at a time, so that no rank but the first, on its host, holds the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_like.algorithms.logprobs import LogprobSettings, TokenScores, VocabularyShard, linear_scores
from nemo_like.config.schema import FsdpConfig
from nemo_like.policy.batch import ModelInputs
from nemo_like.policy.fsdp.attention import has_plain_attention, use_causal_attention
from nemo_like.policy.fsdp.tensor_parallel import sum_gradient

DATA_AXIS, TENSOR_AXIS = "dp", "tp"


class ScoringCausalLM(nn.Module):
    """A causal language model that gives the scores of chosen tokens instead of logits.

    ``vocabulary_group`` are the ranks that hold the output layer's rows between them, None where each
    has all.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        settings: LogprobSettings,
        vocabulary_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.logprob_settings, self._vocabulary_group = settings, vocabulary_group
        self._has_plain_attention = has_plain_attention(causal_lm)
        if self._has_plain_attention:
            use_causal_attention(causal_lm)

    def scale_logits(self, factor: float) -> None:
        """The model's logits are ``factor`` times what its output layer gives; 1 if never called."""
        self.logprob_settings = replace(
            self.logprob_settings, temperature=self.logprob_settings.temperature / factor
        )

    def scores(self, inputs: ModelInputs) -> TokenScores:
        """Of the micro-batch's M scored tokens; the entropy in training only, which reports it."""
        logprobs, entropy = self(inputs)
        return TokenScores(logprobs=logprobs, entropy=entropy)

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor | None]:
        # Log-probs and entropy by themselves, since FSDP looks for tensors in what a module returns.
        hidden = self.causal_lm.get_decoder()(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            **self._packing(inputs),
        ).last_hidden_state
        num_rows = len(hidden)
        scored = hidden[inputs.output_index % num_rows, inputs.output_index // num_rows]
        weight = self.causal_lm.get_output_embeddings().weight
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        group = self._vocabulary_group
        if group is not None:
            scored = sum_gradient(scored, group)
        shard = VocabularyShard(
            first=0 if group is None else group.rank() * len(weight), num_valid=len(weight), group=group
        )
        settings = (
            self.logprob_settings if self.training else replace(self.logprob_settings, with_entropy=False)
        )
        scores = linear_scores(scored, weight, inputs.token_ids, shard, settings)
        return scores.logprobs, scores.entropy

    def _packing(self, inputs: ModelInputs) -> dict[str, Any]:
        """What tells the attention where samples end. transformers' own sees it from the position ids."""
        if inputs.packing is None and inputs.sharing is None:
            return {}
        if self._has_plain_attention:
            return {"packing": inputs.packing, "sharing": inputs.sharing}
        if inputs.sharing is not None:
            raise ValueError(
                f"the attention of {type(self.causal_lm).__name__} is not plain and causal, so cannot share "
                "prompts; set policy.sequence_packing.share_prompts=false"
            )
        if not self.causal_lm.is_backend_compatible():
            raise ValueError(
                f"the attention of {type(self.causal_lm).__name__} cannot keep packed samples apart; set "
                "policy.sequence_packing.enabled=false"
            )
        return {}


def empty_model(path: Path) -> PreTrainedModel:
    """The checkpoint's model with its buffers, but parameters without values.

    Dropout is off: the log-probs of the policy that trains must be those of the policy that sampled.
    """
    config = AutoConfig.from_pretrained(path)
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # empty weights were made one by one
    return model


def set_dtypes(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Master weights in float32; frozen ones, which no update rounds, as they are computed with."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else compute_dtype)


def shard(model: ScoringCausalLM, mesh: DeviceMesh, cfg: FsdpConfig, compute_dtype: torch.dtype) -> None:
    """Spread every layer's parameters over the data-parallel ranks, and the rest as one more unit.

    Gradients are summed over the ranks, never averaged: the loss arrives normalised by global counts.
    """
    if cfg.activation_checkpointing:
        model.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    options: dict[str, Any] = {
        "mesh": mesh[DATA_AXIS],
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        "offload_policy": OffloadPolicy(),
    }
    if cfg.cpu_offload:
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
    """The modules whose parameters are gathered together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def materialise(model: nn.Module, device: torch.device, cfg: FsdpConfig) -> None:
    """Memory for this rank's part of every parameter; the buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=torch.device("cpu") if cfg.cpu_offload else device)
    for name, value in buffers.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, value.to(device))
    for unit in units(model):
        # Settles which memory the parameters lie in: it may change when a unit is first gathered.
        unit.unshard()
        unit.reshard()
