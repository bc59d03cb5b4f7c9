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
