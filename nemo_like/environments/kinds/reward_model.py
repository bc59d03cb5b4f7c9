"""The kind ``reward_model``: a reward model."""

from __future__ import annotations

from nemo_like.config.keys import Key
from nemo_like.environments.kind import Kind
from nemo_like.environments.shared_options import ModelOptions

KIND = Kind(
    about="A reward model's output is the reward: a sequence-classification checkpoint of "
    "transformers with one label, which reads the whole conversation with its own "
    "tokenizer and chat template.",
    reward="what a [reward model](reward_models.md#reward-models) says",
    example="`{model_name: models/my-reward-model, max_length: 4096}`",
    options=ModelOptions,
    base={"timeout_s": Key("", 120.0), "batch_size": Key("conversations of one forward pass", 32)},
    judge="nemo_like.environments.reward_model:RewardModelEnvironment",
    record_check="nemo_like.environments.reward_model:is_rendered",
    max_processes=1,
    start_timeout_s=1200.0,  # tens of GB of weights take minutes
)
