"""From configuration to what an engine is asked for."""

from __future__ import annotations

from nemo_like.config.schema import Config
from nemo_like.config.tasks import training_sampling, validation_sampling
from nemo_like.generation.interface import SamplingSettings
from nemo_like.rollout.prompts import RolloutMode


def sampling_settings(cfg: Config, mode: RolloutMode, env: str, eos_token_id: int) -> SamplingSettings:
    """How responses of the task with environment ``env`` are sampled."""
    resolve = training_sampling if mode is RolloutMode.training else validation_sampling
    sampling = resolve(cfg, env).sampling
    return SamplingSettings(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=(eos_token_id,),
        stop_strings=sampling.stop_strings,
    )
