"""MiniMax-M2: norms of whole queries and keys, sigmoid routers with a bias, a part of each head rotates."""

from nemo_like.models.families.mixtral import KIND as MIXTRAL
from nemo_like.models.families.olmo2 import KIND as OLMO2
from nemo_like.models.family import SIGMOID_ROUTER, SWIGLU, Family, Part, TrainedValues, without
from nemo_like.models.weight_names import Rule

KIND = Family(
    about="MiniMax-M2: norms of whole queries and keys, sigmoid routers with a bias",
    model_types=("minimax_m2",),
    trained_values=(
        *without("attention_bias", "shared_intermediate_size", "router_jitter_noise"),
        SWIGLU,
        TrainedValues("scoring_func", ("sigmoid",), missing="sigmoid"),
        TrainedValues("use_qk_norm", (True,), missing=True, remedy="use a checkpoint with these norms"),
        TrainedValues("use_routing_bias", (True,), missing=True, remedy="use a checkpoint with this bias"),
    ),
    has_qk_norm=True,
    has_partial_rotation=True,
    parts=frozenset({Part.whole_qk_norm}),
    defaults={"head_dim": 128, "rope_theta": 5e6},
    mixture=MIXTRAL.mixture,
    megatron=SIGMOID_ROUTER,
    layer_rules={
        **OLMO2.layer_rules,
        **MIXTRAL.layer_rules,
        "mlp.router.expert_bias": Rule(("block_sparse_moe.e_score_correction_bias",)),
    },
    expert_rules=MIXTRAL.expert_rules,
    experts_at=MIXTRAL.experts_at,
)
