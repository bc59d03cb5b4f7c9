"""Mistral, dense, without sliding windows. A missing key means a window of 4,096 to transformers."""

from dataclasses import replace

from nemo_like.models.family import WINDOW_OFF, Family

KIND = Family(
    about="Mistral, without sliding windows",
    model_types=("mistral",),
    trained_values=(replace(WINDOW_OFF, missing=4096),),
)
