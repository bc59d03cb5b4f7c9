"""Mistral, dense; older ones have a sliding window in every layer."""

from nemo_like.models.family import SWIGLU, Family

KIND = Family(
    about="Mistral, also with a sliding window",
    model_types=("mistral",),
    trained_values=(SWIGLU,),
    has_window=True,
    defaults={"sliding_window": 4096},
)
