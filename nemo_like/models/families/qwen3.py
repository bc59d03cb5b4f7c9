"""Qwen3, dense: queries and keys are normalised head by head."""

from nemo_like.models.family import Family

KIND = Family(about="Qwen3: normed queries and keys", model_types=("qwen3",), has_qk_norm=True)
