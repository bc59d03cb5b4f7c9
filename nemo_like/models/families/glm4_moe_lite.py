"""GLM-4.7-Flash: the layers of DeepSeek-V3, in which experts have no groups."""

from dataclasses import replace

from nemo_like.models.families.deepseek_v3 import KIND as DEEPSEEK_V3
from nemo_like.models.family import SWIGLU, TrainedValues, without

KIND = replace(
    DEEPSEEK_V3,
    about="GLM-4.7-Flash: latent attention, a dense first layer, shared experts",
    model_types=("glm4_moe_lite",),
    trained_values=(
        *without("attention_bias"),
        SWIGLU,
        TrainedValues("norm_topk_prob", (True,), missing=True, remedy="set {group}.backend=fsdp"),
        TrainedValues("first_k_dense_replace", (1,), missing=1),
        TrainedValues("rope_interleave", (True,), missing=True, remedy="set {group}.backend=fsdp"),
    ),
    defaults={
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    engine_config={"first_k_dense_replace": 1},
)
