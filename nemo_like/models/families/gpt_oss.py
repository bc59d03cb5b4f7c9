"""gpt-oss: attention with sinks, a window in every other layer, experts with biases and a clamped SwiGLU."""

from nemo_like.models.family import SWIGLU, Family, Mixture, Part, TrainedValues
from nemo_like.models.weight_names import Cut, Merge, Rule


def _fixed(key: str, value: float) -> TrainedValues:
    rule = f"has another {key} than {value}, and vLLM computes with that whatever config.json says"
    return TrainedValues(key, (value,), missing=value, rule=rule, remedy="use a checkpoint with this value")


KIND = Family(
    about="gpt-oss: sinks, windows in every other layer, experts with biases",
    model_types=("gpt_oss",),
    trained_values=(
        TrainedValues("attention_bias", (True,), missing=True, remedy="use a checkpoint with these biases"),
        SWIGLU,
        _fixed("swiglu_alpha", 1.702),
        _fixed("swiglu_limit", 7.0),
        _fixed("rms_norm_eps", 1e-5),
    ),
    has_qkv_bias=True,
    has_window=True,
    parts=frozenset({Part.sinks, Part.mixed_windows, Part.yarn, Part.clamped_swiglu, Part.linear_biases}),
    defaults={
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 1.5e5,
        "rms_norm_eps": 1e-5,
    },
    mixture=Mixture(expert_size="intermediate_size", normalises=""),
    layer_rules={
        "self_attention.linear_proj.bias": Rule(("self_attn.o_proj.bias",)),
        "self_attention.core_attention.sinks": Rule(("self_attn.sinks",), Cut.rows),
        "mlp.router.weight": Rule(("mlp.router.weight",)),
        "mlp.router.bias": Rule(("mlp.router.bias",)),
    },
    expert_rules={
        "linear_fc1.weight": Rule(("gate_up_proj",), Cut.gated_rows, Merge.alternating, is_expert=True),
        "linear_fc1.bias": Rule(("gate_up_proj_bias",), Cut.gated_rows, Merge.alternating, is_expert=True),
        "linear_fc2.weight": Rule(("down_proj",), Cut.columns, Merge.transposed, is_expert=True),
        "linear_fc2.bias": Rule(("down_proj_bias",), is_expert=True),
    },
    stacks_experts=True,
)
