"""Qwen2 and Qwen2.5, dense: queries, keys and values have biases."""

from nemo_like.models.family import Family

KIND = Family(
    about="Qwen2 and Qwen2.5: biases of queries, keys and values", model_types=("qwen2",), has_qkv_bias=True
)
