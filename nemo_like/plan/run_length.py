"""The number of steps that ``grpo.max_num_epochs`` comes to, once the training prompts are counted."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.configuration import Config
from nemo_like.data.sampler import steps_within_epochs


def steps_of_epochs(cfg: Config, sizes: Sequence[int]) -> int | None:
    """Return how many steps lie within ``grpo.max_num_epochs``; None where that is null.

    ``sizes`` are the numbers of prompts of the training sources that are short enough. A step counts the
    prompts with which it begins; prompts that dynamic sampling draws later are not counted.
    """
    if cfg.grpo.max_num_epochs is None:
        return None
    weights = [source.weight for source in cfg.data.train]
    return steps_within_epochs(cfg.grpo.max_num_epochs, sizes, weights, cfg.grpo.rollout_shape.num_prompts)


def too_many_steps(cfg: Config, sizes: Sequence[int]) -> str | None:
    """Return why a run that found ``sizes`` prompts cannot make its ``grpo.max_num_steps`` steps within
    ``grpo.max_num_epochs``; None when it can."""
    num_steps = steps_of_epochs(cfg, sizes)
    if num_steps is None or cfg.grpo.max_num_steps <= num_steps:
        return None
    return (
        f"grpo.max_num_epochs={cfg.grpo.max_num_epochs:g} comes to {num_steps} steps of the {sum(sizes)} "
        f"training prompts that the run found, and it was planned with {cfg.grpo.max_num_steps}; the data "
        "changed since they were counted, or nobody counted them: start the run with run_grpo.py"
    )
