"""GLM-4.5 to 4.7: dense first layers, shared experts, sigmoid routers with a bias, half of a head rotates."""

from nemo_like.models.family import SIGMOID_ROUTER, Family, Mixture, TrainedValues

KIND = Family(
    about="GLM-4.5 to 4.7: dense first layers, shared experts, sigmoid routers with a bias",
    model_types=("glm4_moe",),
    trained_values=(
        TrainedValues("attention_bias", (True,), missing=False, remedy="use a checkpoint with these biases"),
        TrainedValues("norm_topk_prob", (True,), missing=True, remedy="set {group}.backend=fsdp"),
        TrainedValues("n_group", (1,), missing=1, remedy="set {group}.backend=fsdp"),
    ),
    has_qkv_bias=True,
    has_qk_norm=True,
    qk_norm_key="use_qk_norm",
    has_partial_rotation=True,
    mixture=Mixture(
        num_experts="n_routed_experts",
        num_dense_layers="first_k_dense_replace",
        num_shared="n_shared_experts",
        scale="routed_scaling_factor",
    ),
    megatron=SIGMOID_ROUTER,
)
