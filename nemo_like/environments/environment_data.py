"""Prompts that environments make for a data source, and the tools that their responses may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.config.import_path import load_by_path
from nemo_like.data.interface import Split, TaskPrompt
from nemo_like.data.messages import BadMessage, conversation_of
from nemo_like.data.options import DatasetConfig
from nemo_like.environments.hub import listed_prompts
from nemo_like.environments.options import ENVIRONMENT_KINDS, EnvConfig
from nemo_like.environments.registry import kind_of, options_of
from nemo_like.environments.shared_options import EPISODE_KEY, HubOptions

# Seeds so far apart that training and validation share no prompt. Tasks of a taskset are counted instead.
_DEFAULT_SEEDS: dict[Split, int] = {"train": 0, "validation": 1_000_000_000}


class EnvironmentPrompts:
    """The ``EnvironmentData`` of a configuration's environments. It lists the tools of an environment only
    once."""

    def __init__(self, env: Mapping[str, EnvConfig]) -> None:
        self._env = env
        self._tools: dict[str, tuple[Mapping[str, Any], ...]] = {}

    def prompts(self, cfg: DatasetConfig, split: Split) -> HubPrompts:
        """Return the prompts that the package of the source's environment makes.

        Raises ValueError when its kind makes none, or the package cannot make them.
        """
        env = self._env[cfg.env]
        if not kind_of(env).is_hub:
            kinds = ", ".join(
                name for name in ENVIRONMENT_KINDS.names() if ENVIRONMENT_KINDS.load(name).is_hub
            )
            raise ValueError(
                f"data.{split}.kind=environment: env.{cfg.env} (kind={env.kind}) makes no problems; the "
                f"kinds that do are {kinds}"
            )
        options: HubOptions = options_of(env)
        seed = cfg.options.get("seed", 0 if options.counts_tasks else _DEFAULT_SEEDS[split])
        try:
            made = listed_prompts(options, cfg.options["size"], seed)
        except ValueError as error:
            raise ValueError(f"env.{cfg.env} (kind={env.kind}) makes no problems: {error}") from error
        if not made:
            raise ValueError(f"env.{cfg.env} (kind={env.kind}) has no problems from {seed} on")
        return HubPrompts(made, f"env.{cfg.env} (kind={env.kind})")

    def settings(self, cfg: DatasetConfig) -> Mapping[str, Any]:
        """Return the kind of the source's environment, and the options that decide which prompts it makes."""
        env = self._env[cfg.env]
        options: HubOptions = options_of(env)
        return {"kind": env.kind} | {name: getattr(options, name) for name in options.prompt_options}

    def tools(self, env: str) -> tuple[Mapping[str, Any], ...]:
        """Return the tools of an environment; empty for kinds without tools.

        Raises ValueError when a server does not list them.
        """
        cfg = self._env.get(env)
        lists_tools = None if cfg is None else kind_of(cfg).tools
        if cfg is None or lists_tools is None:
            return ()
        if env not in self._tools:
            try:
                self._tools[env] = load_by_path(lists_tools)(options_of(cfg))
            except ValueError as error:
                raise ValueError(f"env.{env} (kind={cfg.kind}): {error}") from error
        return self._tools[env]


class HubPrompts:
    """Prompts that a hub's package made."""

    def __init__(self, made: Sequence[Mapping[str, Any]], origin: str) -> None:
        """Keep the prompts; ``origin`` names their maker in errors."""
        self._made, self._origin = made, origin

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: int) -> TaskPrompt:
        """Return prompt ``index``. Raises IndexError outside 0 .. len - 1, and ValueError for malformed
        messages."""
        if not 0 <= index < len(self):
            raise IndexError(f"no problem {index} among {len(self)}")
        problem, where = self._made[index], f"{self._origin}, problem {index}"
        prompt = problem["prompt"]
        if not isinstance(prompt, str):
            try:
                prompt = conversation_of(prompt)
            except BadMessage as error:
                raise ValueError(f"{where}: {error}") from error
        return TaskPrompt(prompt, problem["answer"], {EPISODE_KEY: problem["data"]}, where=where)
