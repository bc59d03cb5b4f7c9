"""OLMo 3: OLMo 2 with a window in three of four layers, which rotate without the scaling of the others."""

from dataclasses import replace

from nemo_like.models.families.olmo2 import KIND as OLMO2
from nemo_like.models.family import Part

KIND = replace(
    OLMO2,
    about="OLMo 3: OLMo 2 with windows in some layers, and YaRN in the others",
    model_types=("olmo3",),
    has_window=True,
    parts=OLMO2.parts | {Part.mixed_windows, Part.two_ropes},
    defaults={
        **OLMO2.defaults,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,
    },
)
