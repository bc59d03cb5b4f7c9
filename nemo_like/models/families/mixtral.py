"""Mixtral: experts in every layer, under names of their own."""

from nemo_like.models.family import SWIGLU, Family, Mixture
from nemo_like.models.weight_names import Cut, Merge, Rule

KIND = Family(
    about="Mixtral: experts in every layer",
    model_types=("mixtral",),
    trained_values=(SWIGLU,),
    has_window=True,
    mixture=Mixture(expert_size="intermediate_size", normalises=""),
    layer_rules={"mlp.router.weight": Rule(("block_sparse_moe.gate.weight",))},
    expert_rules={
        "linear_fc1.weight": Rule(("w1.weight", "w3.weight"), Cut.gated_rows, Merge.stacked, is_expert=True),
        "linear_fc2.weight": Rule(("w2.weight",), Cut.columns, is_expert=True),
    },
    experts_at="block_sparse_moe.experts",
)
