"""The layers that LoRA shall adapt: does the model have them? Asked of the model itself, built without
weights in a child process."""

from __future__ import annotations

from pathlib import Path

from nemo_like.config.schema import LoraConfig


def problem_of(model_directory: str, lora: LoraConfig) -> str | None:
    """Why adapters cannot be put beside the layers that ``lora`` names; None when they can."""
    from nemo_like.policy.fsdp.lora import add_adapters
    from nemo_like.policy.fsdp.model import empty_model

    model = empty_model(Path(model_directory))
    try:
        add_adapters(model, lora)
    except ValueError as error:
        return str(error)
    return None
