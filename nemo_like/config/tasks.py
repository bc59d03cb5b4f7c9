"""What a task, that is a named environment, makes of the general settings."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nemo_like.config.schema import Config, EnvConfig, SamplingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the responses of one task are sampled."""

    temperature: float  # 0 is greedy
    top_p: float
    top_k: int  # 0: all tokens
    min_p: float
    max_new_tokens: int  # per turn
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourcedSampling:
    """``keys[name]`` is the full configuration key that decided field ``name``."""

    sampling: Sampling
    keys: dict[str, str]


def used_environments(cfg: Config) -> dict[str, EnvConfig]:
    """The environments that data sources name, in the order of ``env``; unknown names are left out."""
    named = {cfg.data.train.env, cfg.data.validation.env}
    return {name: env for name, env in cfg.env.items() if name in named}


def training_sampling(cfg: Config, env: str) -> SourcedSampling:
    """``generation``, then ``env.<name>.sampling``."""
    return _resolve(cfg, [(f"env.{env}.sampling", cfg.env[env].sampling)])


def validation_sampling(cfg: Config, env: str) -> SourcedSampling:
    """As in training, then ``generation.validation``, then ``env.<name>.validation_sampling``."""
    return _resolve(
        cfg,
        [
            (f"env.{env}.sampling", cfg.env[env].sampling),
            ("generation.validation", cfg.generation.validation),
            (f"env.{env}.validation_sampling", cfg.env[env].validation_sampling),
        ],
    )


def has_stop_strings(cfg: Config) -> bool:
    """Whether any task's responses may end with a string, for which an engine needs the tokenizer."""
    return any(
        resolve(cfg, env).sampling.stop_strings
        for env in used_environments(cfg)
        for resolve in (training_sampling, validation_sampling)
    )


def _resolve(cfg: Config, layers: list[tuple[str, SamplingConfig]]) -> SourcedSampling:
    names = [field.name for field in fields(Sampling)]
    values = {name: getattr(cfg.generation, name) for name in names}
    keys = {name: f"generation.{name}" for name in names}
    for prefix, layer in layers:
        for name in names:
            if (value := getattr(layer, name)) is not None:
                values[name], keys[name] = value, f"{prefix}.{name}"
    values["top_k"] = values["top_k"] or 0
    values["stop_strings"] = tuple(values["stop_strings"])
    return SourcedSampling(Sampling(**values), keys)
