"""Qwen3-MoE: Qwen3 with experts in every layer."""

from nemo_like.models.family import Family, Mixture, TrainedValues, without

_GAPS = {
    "rule": "has layers without experts (mlp_only_layers or decoder_sparse_step), which is not supported",
    "remedy": "use a checkpoint with experts in every layer",
}

KIND = Family(
    about="Qwen3-MoE: normed queries and keys, experts in every layer",
    model_types=("qwen3_moe",),
    trained_values=(
        *without("attention_bias", "mlp_bias", "use_sliding_window"),
        TrainedValues("mlp_only_layers", ([], None), **_GAPS),
        TrainedValues("decoder_sparse_step", (1,), missing=1, **_GAPS),
    ),
    has_qk_norm=True,
    mixture=Mixture(),
)
