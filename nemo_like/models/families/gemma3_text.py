"""Gemma 3, of text alone: norms before and after both parts of a layer, and a window in most layers."""

from nemo_like.models.family import Family, Part, TrainedValues, without
from nemo_like.models.weight_names import Rule

_GATE = "gelu_pytorch_tanh"

KIND = Family(
    about="Gemma 3, of text alone: windows in some layers, norms before and after both parts",
    model_types=("gemma3_text",),
    trained_values=(
        *without("attention_bias", "use_bidirectional_attention"),
        TrainedValues("hidden_activation", (_GATE,), missing=_GATE),
        TrainedValues("attn_logit_softcapping", (None,)),
        TrainedValues("final_logit_softcapping", (None,)),
    ),
    has_qk_norm=True,
    has_window=True,
    parts=frozenset(
        {Part.post_norms, Part.mixed_windows, Part.two_ropes, Part.gelu_gate, Part.scaled_embeddings}
    ),
    query_scale_key="query_pre_attn_scalar",
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    megatron={"layernorm_zero_centered_gamma": True},
    layer_rules={"pre_mlp_layernorm.weight": Rule(("pre_feedforward_layernorm.weight",))},
)
