"""Llama 2 to 3.3, and models of the same architecture."""

from nemo_like.models.family import Family

KIND = Family(about="Llama 2 to 3.3", model_types=("llama",))
