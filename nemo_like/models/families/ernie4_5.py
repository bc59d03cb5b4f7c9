"""ERNIE 4.5, dense: neighbouring values of a head rotate together."""

from nemo_like.models.family import Family, without

KIND = Family(
    about="ERNIE 4.5, dense: interleaved rotary positions",
    model_types=("ernie4_5",),
    trained_values=without("use_bias"),
    megatron={"rotary_interleaved": True},
)
