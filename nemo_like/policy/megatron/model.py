"""A Megatron-core GPT model whose last pipeline stage returns scores instead of logits.

It returns the log-probs of the tokens that it is asked for; a critic's model returns their values.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from nemo_like.algorithms.critic import TokenValues, linear_values
from nemo_like.algorithms.logprobs import (
    LogprobSettings,
    TokenScores,
    VocabularyShard,
    linear_scores,
    scores_with_most_likely,
)
from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.models.family import Part
from nemo_like.models.model_info import ModelInfo
from nemo_like.models.weight_names import Cut
from nemo_like.policy.backends.context_scores import of_all_context_ranks
from nemo_like.policy.backends.devices import DTYPES
from nemo_like.policy.batch.policy_batch import ModelInputs
from nemo_like.policy.groups.layout import num_chunks, recomputes_layers
from nemo_like.policy.megatron.layer_parts import add_parts, angles_of, embedding_scale
from nemo_like.policy.megatron.library_values import megatron_values
from nemo_like.policy.megatron.lora import without_fused_norms
from nemo_like.policy.megatron.modules import (
    groups_experts,
    layer_spec,
    uses_transformer_engine,
)
from nemo_like.policy.megatron.weight_conversion import ModelPart, rule_for, single_experts
from nemo_like.policy.options import Precision, TrainedGroupConfig, WorkerGroupConfig


def transformer_config(model: ModelInfo, cfg: WorkerGroupConfig, layout: ParallelLayout) -> TransformerConfig:
    """Return Megatron-core's configuration of this model under this layout.

    Raises Megatron-core's errors about arguments in ``megatron_cfg.model_kwargs``.
    """
    device = torch.device(cfg.device.name)
    # Transformer Engine's layers have none of the parts that some families need.
    is_fused = uses_transformer_engine(device) and not model.family.parts
    dtype = DTYPES[cfg.precision]
    given = megatron_values(TransformerConfig, cfg.megatron_cfg.model_kwargs)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.dense_ffn_size or model.intermediate_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        **_attention_options(model, cfg),
        add_bias_linear=model.family.has_linear_biases,
        gated_linear_unit=True,
        activation_func=functional.gelu if Part.gelu_gate in model.family.parts else functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=cfg.precision is Precision.bfloat16,
        fp16=cfg.precision is Precision.float16,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        **_pipeline_options(cfg, layout),
        **{
            **model.family.megatron,
            **_mixture_options(model, cfg, layout, is_fused=is_fused),
            **_recompute_options(cfg),
            **_fp8_options(cfg),
            **given,
        },
        sequence_parallel=cfg.megatron_cfg.sequence_parallel and layout.tp > 1,
        # Weights come from a checkpoint, so nothing is drawn at random.
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        # The loss arrives normalised by global counts: gradients are summed, never averaged.
        calculate_per_token_loss=True,
        # No fused kernels of Apex. Transformer Engine brings its own, except for the activation of an MLP:
        # with it that is Megatron-core's, compiled, and without it TorchSwiGLU, which the layer spec names.
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=is_fused,
        use_te_activation_func=not is_fused,
        bias_dropout_fusion=False,
        apply_rope_fusion=is_fused,
    )


def _pipeline_options(cfg: WorkerGroupConfig, layout: ParallelLayout) -> dict[str, Any]:
    chunks = num_chunks(cfg)
    return {
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "num_layers_in_first_pipeline_stage": cfg.megatron_cfg.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": cfg.megatron_cfg.num_layers_in_last_pipeline_stage,
        "deallocate_pipeline_outputs": True,
        # Of two stages each is before and after the other. Batched messages of an interleaved pipeline would
        # then be taken for one another.
        "batch_p2p_comm": chunks == 1,
        "overlap_p2p_comm": False,
    }


def _attention_options(model: ModelInfo, cfg: WorkerGroupConfig) -> dict[str, Any]:
    window = model.window_within(cfg.max_total_sequence_length)
    options: dict[str, Any] = {
        # With this mark Megatron-core would sum the gradients of different heads' weights over the ranks.
        "qk_layernorm": model.has_qk_norm and not model.normalises_whole,
        "add_qkv_bias": model.has_qkv_bias,
        "window_size": None if window is None else (window - 1, 0),
        "softmax_type": "learnable" if Part.sinks in model.family.parts else "vanilla",
        "attention_softmax_in_fp32": True,
    }
    if model.full_layers:
        layers = range(model.num_layers)
        options["window_attn_skip_freq"] = [int(layer not in model.full_layers) for layer in layers]
    if model.query_scale is not None:
        options["softmax_scale"] = model.query_scale
    return options


def _mixture_options(
    model: ModelInfo, cfg: WorkerGroupConfig, layout: ParallelLayout, *, is_fused: bool
) -> dict[str, Any]:
    if model.num_experts is None:
        return {}
    # A list makes Megatron-core store every layer under a name of its own in checkpoints.
    dense, mixture = [0] * model.num_dense_layers, [1] * model.num_mixture_layers
    return {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": [*dense, *mixture] if dense else 1,
        "moe_ffn_hidden_size": model.intermediate_size,
        "moe_shared_expert_intermediate_size": model.shared_ffn_size or None,
        "moe_router_topk_scaling_factor": model.routed_scale,
        "moe_router_topk": model.num_experts_per_token,
        **_expert_groups(model),
        # Softmax over the chosen experts alone makes their weights sum to 1.
        "moe_router_pre_softmax": not model.normalises_chosen_experts,
        "moe_router_load_balancing_type": "none",
        # Not every dispatcher allows micro-batches of different lengths.
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": groups_experts(cfg, is_fused=is_fused),
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _expert_groups(model: ModelInfo) -> dict[str, Any]:
    if model.num_expert_groups == 1:
        return {}
    return {
        "moe_router_num_groups": model.num_expert_groups,
        "moe_router_group_topk": model.num_chosen_groups,
    }


def _recompute_options(cfg: WorkerGroupConfig) -> dict[str, Any]:
    if not recomputes_layers(cfg):
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _fp8_options(cfg: WorkerGroupConfig) -> dict[str, Any]:
    if not isinstance(cfg, TrainedGroupConfig) or cfg.megatron_cfg.fp8 is None:
        return {}
    return {"fp8": cfg.megatron_cfg.fp8.value, "fp8_recipe": cfg.megatron_cfg.fp8_recipe.value}


class ScoringGPTModel(GPTModel):
    """A GPT whose last pipeline stage returns scores of chosen tokens, or without ``settings`` their values;
    earlier stages return hidden states. It is a stage's whole model, or with an interleaved pipeline one
    ``chunk`` of it, from 0.

    It is called as ``forward(input_ids, position_ids, None, labels=inputs)``. Megatron-core passes ``labels``
    through to the end of the model, so the ModelInputs, which say what to score, travel there.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelInfo,
        settings: LogprobSettings | None,
        part: ModelPart,
        chunk: int | None = None,
        *,
        has_adapters: bool,
    ) -> None:
        tp, num_chunks = config.tensor_model_parallel_size, config.virtual_pipeline_model_parallel_size
        spec = layer_spec(config, chunk)
        if model.family.parts:
            add_parts(spec, model, config)
        if has_adapters:
            without_fused_norms(spec)
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=model.padded_vocab_size(tp),
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage() and is_vp_first_stage(chunk, num_chunks),
            post_process=parallel_state.is_pipeline_last_stage() and is_vp_last_stage(chunk, num_chunks),
            vp_stage=chunk,
            share_embeddings_and_output_weights=model.has_tied_embeddings,
            position_embedding_type="rope",
            rotary_percent=model.rotated_share,
            rotary_base=model.rope_theta,
            rope_scaling=model.rope_scaling_factor is not None,
            rope_scaling_factor=model.rope_scaling_factor or 1.0,
        )
        if model.ropes:
            rotation = self.rotary_pos_emb
            rotation.inv_freq = angles_of(model.ropes, model.rotated_size).to(rotation.inv_freq.device)
        self._embedding_scale = embedding_scale(model, config.params_dtype)
        self._mark_parameters(part)
        self.logprob_settings = settings
        if settings is None:
            if self.post_process:
                # Every tensor-parallel rank has a copy, while the output layer that it replaces is cut.
                options: dict[str, Any] = {"bias": False, "dtype": config.params_dtype}
                self.output_layer = torch.nn.Linear(model.hidden_size, 1, **options)
            return
        rows = model.padded_vocab_size(tp) // tp
        first = parallel_state.get_tensor_model_parallel_rank() * rows
        self.vocabulary_shard = VocabularyShard(
            first=first,
            num_valid=max(0, min(rows, model.vocab_size - first)),
            group=parallel_state.get_tensor_model_parallel_group() if tp > 1 else None,
        )

    @property
    def value_head(self) -> torch.nn.Linear | None:
        """The output layer of a critic's last pipeline stage; None elsewhere."""
        return self.output_layer if self.logprob_settings is None and self.post_process else None

    def _mark_parameters(self, part: ModelPart) -> None:
        """Mark the parameters that are parts of larger ones; Megatron-core marks them only when it draws
        initial values.

        Without the mark Megatron-core would take the parts on other ranks for copies and leave them out of
        the gradient norm. Its marks do not fit whole experts. With several expert-parallel ranks
        the experts of different ranks are different parameters. With one such rank they are copies, and each
        tensor-parallel rank's copy sees that rank's part of the sequence, as a norm's weight does.
        """
        for name, parameter in self.named_parameters():
            (one, _), *_ = single_experts([(name, parameter)])
            rule = rule_for(one, part)
            if rule.is_expert and part.etp_size == 1:
                parameter.tensor_model_parallel = part.ep_size > 1
                parameter.sequence_parallel = part.ep_size == 1 and self.config.sequence_parallel
            elif rule.cut is not Cut.replicated:
                parameter.tensor_model_parallel = True
                parameter.partition_dim = 1 if rule.cut is Cut.columns else 0
                parameter.partition_stride = 1

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        """Preprocess as Megatron-core does, with three changes.

        Some families scale the embeddings. Where layers are recomputed, the input of the layers requires a
        gradient. In a row of several samples that Megatron-core takes for one, each token gets the rotation
        of its position in its sample, not in the row.
        """
        decoder_input, rotations, *rest = super()._preprocess(input_ids, position_ids, *args, **options)
        if decoder_input is not None and self._embedding_scale != 1.0:
            decoder_input = decoder_input * self._embedding_scale
        if decoder_input is not None and self.config.recompute_granularity and torch.is_grad_enabled():
            # A recomputed layer passes gradients on to its parameters only if its input requires a gradient,
            # which the output of frozen embeddings does not.
            decoder_input.requires_grad_(True)
        packed = options.get("packed_seq_params")
        if packed is not None and packed.qkv_format == "sbhd" and rotations is not None:
            if self.config.context_parallel_size > 1:  # Megatron-core has left only a part of the positions
                rotations = self.rotary_pos_emb(packed.max_seqlen_q, packed_seq=True)
            rotations = rotations[position_ids[0]]  # [T, 1, 1, d]
        return (decoder_input, rotations, *rest)

    def _postprocess(
        self, hidden_states: Tensor, *, labels: ModelInputs, **_: Any
    ) -> Tensor | TokenScores | TokenValues:
        if not self.post_process:
            return hidden_states
        settings = self.logprob_settings
        outputs: TokenScores | TokenValues = (
            self._values(hidden_states, labels)
            if settings is None
            else self._scores(hidden_states, labels, settings)
        )
        if labels.context_index is None:
            return outputs
        return of_all_context_ranks(outputs, labels, parallel_state.get_context_parallel_group())

    def _values(self, hidden_states: Tensor, labels: ModelInputs) -> TokenValues:
        if self.config.sequence_parallel:
            # Every rank computes the whole gradient of the hidden states, and needs only its own part.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        valued = hidden_states.flatten(0, 1).index_select(0, labels.output_index)
        return linear_values(valued, self.output_layer.weight)

    def _scores(self, hidden_states: Tensor, labels: ModelInputs, settings: LogprobSettings) -> TokenScores:
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        # Each rank's vocabulary gives a part of the hidden gradient; both mappings sum it.
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True
            )
        elif self.vocabulary_shard.group is not None:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states)
        scored = hidden_states.flatten(0, 1).index_select(0, labels.output_index)
        shard, ids = self.vocabulary_shard, labels.token_ids
        if self.training:
            return linear_scores(scored, weight, ids, shard, settings, labels.topk_ids)
        return scores_with_most_likely(scored, weight, ids, shard, settings)
