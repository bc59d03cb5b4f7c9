"""The task that all sides of ``against_others.py`` train on, at its two sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_like.configuration import Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "configs/grpo_arithmetic_cpu.yaml"
RANDOM_MODEL = Path(".cache/models/random-17m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size of the task: what it changes of the demo, and the goal of its accuracy, if the model learns."""

    about: str
    overrides: tuple[str, ...]
    exact_overlap: tuple[str, ...]  # further keys that grpo.overlap=exact needs
    learns: bool


SIZES = {
    "demo": Size(
        about="the demo: 402k parameters, 128 prompts x 8 samples of at most 4 tokens, 8 updates a step",
        overrides=(),
        exact_overlap=("grpo.samples_kept_together=1", "policy.sequence_packing.share_prompts=false"),
        learns=True,
    ),
    "17m": Size(
        about="17M random parameters, 16 prompts x 4 samples of at most 96 tokens, one update a step",
        overrides=(
            f"policy.model_name={RANDOM_MODEL}",
            *("grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=4"),
            "grpo.samples_kept_together=4",
            # No answer of a random model is right, and nothing would be left to train on.
            "grpo.skip_idle_samples=false",
            *("policy.train_global_batch_size=64", "policy.max_total_sequence_length=128"),
            *("policy.optimizer.lr=1.0e-7", "policy.scheduler.decay_updates=1000"),
            *("generation.max_new_tokens=96", "grpo.max_num_steps=1000"),
        ),
        exact_overlap=(),
        learns=False,
    ),
}


def make_random_model() -> None:
    """Write the model of 17M random parameters, with the demo's tokenizer, unless it is there."""
    if RANDOM_MODEL.exists():
        return
    import torch
    from transformers import AutoModelForCausalLM

    from scripts.demo_model.making import whole_directory
    from scripts.demo_model.tiny_tokenizer import save_tokenizer
    from scripts.demo_model.warm_start import tiny_config

    torch.manual_seed(1)
    config = tiny_config(hidden_size=448)
    config.num_hidden_layers, config.layer_types = 7, ["full_attention"] * 7
    with whole_directory(RANDOM_MODEL) as aside:
        AutoModelForCausalLM.from_config(config).save_pretrained(aside)
        save_tokenizer(aside)


def updates_per_step(cfg: Config) -> int:
    """Return the optimizer's updates in a step of GRPO."""
    return cfg.grpo.num_samples_per_step // cfg.policy.train_global_batch_size


def held_out_accuracy(model: PreTrainedModel, cfg: Config) -> float:
    """Return the share of held-out problems that the model answers right, as this framework's validation
    does: one sample each at the temperature 1."""
    from nemo_like.data.arithmetic import ArithmeticDataset
    from scripts.demo_model.warm_start import sampled_accuracy

    held_out = ArithmeticDataset(cfg.data.train[0].digits, "validation")
    wanted = cfg.grpo.max_val_samples or len(held_out)
    problems = [held_out[index] for index in range(min(wanted, len(held_out)))]
    return sampled_accuracy(model, problems, cfg.grpo.seed)
