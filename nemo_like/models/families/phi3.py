"""Phi-3 and Phi-4: checkpoints have queries, keys and values in one tensor, and gate and up in another."""

from nemo_like.models.family import SWIGLU, Family
from nemo_like.models.weight_names import Cut, Merge, Rule

KIND = Family(
    about="Phi-3 and Phi-4: fused layers in checkpoints",
    model_types=("phi3",),
    trained_values=(SWIGLU,),
    has_partial_rotation=True,
    has_window=True,
    layer_rules={
        "self_attention.linear_qkv.weight": Rule(("self_attn.qkv_proj.weight",), Cut.rows, Merge.fused_qkv),
        "mlp.linear_fc1.weight": Rule(("mlp.gate_up_proj.weight",), Cut.gated_rows),
    },
)
