"""DeepSeek-V3 and R1, Kimi-K2 and Moonlight: latent attention, and routers that choose groups of experts
first."""

from nemo_like.models.family import SIGMOID_ROUTER, SWIGLU, Family, Mixture, Part, TrainedValues, without

KIND = Family(
    about="DeepSeek-V3 and R1, Kimi-K2, Moonlight: latent attention, groups of experts",
    model_types=("deepseek_v3", "kimi_k2"),
    trained_values=(
        *without("attention_bias"),
        SWIGLU,
        TrainedValues("norm_topk_prob", (True,), missing=True, remedy="set {group}.backend=fsdp"),
        TrainedValues("scoring_func", ("sigmoid",), missing="sigmoid"),
        TrainedValues("topk_method", ("noaux_tc",), missing="noaux_tc"),
        TrainedValues("moe_layer_freq", (1,), missing=1),
        TrainedValues("rope_interleave", (True,), missing=True, remedy="set {group}.backend=fsdp"),
    ),
    parts=frozenset({Part.mla}),
    defaults={
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
    mixture=Mixture(
        num_experts="n_routed_experts",
        num_dense_layers="first_k_dense_replace",
        num_shared="n_shared_experts",
        scale="routed_scaling_factor",
        num_groups="n_group",
        num_chosen_groups="topk_group",
    ),
    megatron={"rotary_interleaved": True, **SIGMOID_ROUTER},
    engine_config={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    # vLLM's kernel for rotations on CPUs is wrong for these heads where there is no YaRN.
    cpu_engine={
        "attention_backend": "CPU_MLA",
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        "block_size": 16,
    },
)
