"""The typed configuration of a run: the groups of keys of all parts.

A part's ``options.py`` gives each of its keys a type, limits, a default and a sentence.
``scripts/write_configs.py`` writes them into ``configs/``, one commented default file per group, on which
configurations build. ``load_config`` merges YAML and overrides into these classes and checks each value by
its key; ``rules`` checks what spans several keys.

A key that NeMo-RL also has gets NeMo-RL's name for it, so that runs can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf

from nemo_like.algorithms.options import GRPOConfig, LossConfig
from nemo_like.checkpoint.options import CheckpointingConfig
from nemo_like.cluster.options import ClusterConfig
from nemo_like.config import loader
from nemo_like.config.fields import ByKind
from nemo_like.config.keys import Key
from nemo_like.data.options import DataConfig
from nemo_like.data_plane.options import DataPlaneConfig
from nemo_like.driver.options import EvaluationConfig
from nemo_like.environments.options import EnvConfig
from nemo_like.generation.options import GenerationConfig
from nemo_like.observability.options import LoggerConfig
from nemo_like.policy.options import PolicyConfig, TeacherConfig, ValueConfig
from nemo_like.rollout.options import RolloutConfig
from nemo_like.tripwires.options import DebugConfig


@dataclass(kw_only=True, slots=True)
class Config:
    grpo: GRPOConfig
    loss_fn: Annotated[LossConfig, ByKind()]
    policy: PolicyConfig
    generation: GenerationConfig
    rollout: RolloutConfig
    data: DataConfig
    env: Annotated[dict[str, EnvConfig], Key("by name; a run starts those that its sources in data name")]
    logger: LoggerConfig
    checkpointing: CheckpointingConfig
    cluster: ClusterConfig
    data_plane: DataPlaneConfig
    debug: DebugConfig
    value: Annotated[ValueConfig | None, Key("left out where there is no critic")]
    teacher: Annotated[TeacherConfig | None, Key("left out where there is no teacher")]
    evaluation: Annotated[EvaluationConfig | None, Key("left out in runs that train or generate")]
    vars: Annotated[
        dict[str, Any], Key("a configuration's own variables, for its interpolations: ${vars.name}", {})
    ]


def _updates_of_run(group: str, *, _root_: DictConfig) -> int:
    """Return how many updates of ``policy`` or ``value`` a run makes: ${updates_of_run:GROUP}.

    It is more where a run ends in its warm-up, so that a decay could begin after it; and 1 where a key that
    counts them has no value or is no positive number, of which other checks speak.
    """
    keys = ("grpo.max_num_steps", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt")
    epochs = "grpo" if group == "policy" else group
    names = (*keys, f"{group}.train_global_batch_size", f"{epochs}.num_epochs_per_rollout")
    found = [OmegaConf.select(_root_, name, default=None) for name in names]
    of_critic = "value.warmup_steps" if group == "policy" else ""  # it trains alone in them
    less = [
        OmegaConf.select(_root_, name, default=0) if name else 0
        for name in (of_critic, f"{group}.scheduler.warmup_updates")
    ]
    if not all(isinstance(value, int) for value in (*found, *less)) or min(found) < 1:
        return 1
    (steps, prompts, generations, batch, num_epochs), (alone, warmup) = found, less
    return max((steps - alone) * (prompts * generations // batch) * num_epochs, warmup + 1)


OmegaConf.register_new_resolver("updates_of_run", _updates_of_run, replace=True)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the file ``path`` with the arguments ``overrides`` applied.

    Raises ConfigError, which lists the problems found.
    """
    return loader.load(path, overrides, Config)


def load_sweep(path: str | Path, overrides: Sequence[str]) -> loader.Sweep:
    """Return the runs that the arguments ``overrides`` ask for.

    Raises ConfigError, which lists the problems found. Problems of some combinations only are left to those
    runs.
    """
    return loader.load_sweep(path, overrides, Config)
