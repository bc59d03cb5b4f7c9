"""Qwen3-MoE: Qwen3 with experts in every layer."""

from nemo_like.models.family import Family, Mixture, TrainedValues, without

_ALL_LAYERS = (
    "has layers without experts (mlp_only_layers or decoder_sparse_step), which is not supported",
    "use a checkpoint with experts in every layer",
)

KIND = Family(
    about="Qwen3-MoE: normed queries and keys, experts in every layer",
    model_types=("qwen3_moe",),
    trained_values=(
        *without("attention_bias", "mlp_bias", "use_sliding_window"),
        TrainedValues("mlp_only_layers", ([], None), *_ALL_LAYERS),
        TrainedValues("decoder_sparse_step", (1,), *_ALL_LAYERS),
    ),
    has_qk_norm=True,
    mixture=Mixture(),
)
