"""Seed-OSS: biases of queries, keys and values, and none elsewhere."""

from nemo_like.models.family import Family, TrainedValues, without

KIND = Family(
    about="Seed-OSS: biases of queries, keys and values",
    model_types=("seed_oss",),
    trained_values=(
        TrainedValues("attention_bias", (True,), missing=True, remedy="use a checkpoint with these biases"),
        *without("attention_out_bias", "mlp_bias"),
    ),
    has_qkv_bias=True,
)
