"""Rules on environments, and on how each task's responses are sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from nemo_like.config.problems import Problem
from nemo_like.data.sources import data_sources
from nemo_like.environments.option_rules import option_problems
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import kind_of, needs_gpu
from nemo_like.generation.options import MAX_TEMPERATURE
from nemo_like.policy.options import Device
from nemo_like.rollout.tasks import (
    SourcedSampling,
    TaskConfigGroups,
    task_environments,
    training_sampling,
    used_environments,
    validation_sampling,
)

# The forms of a grammar, with the type of each.
_GRAMMARS: Mapping[str, type] = {"regex": str, "json": dict, "choice": list, "grammar": str}
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def task_problems(cfg: TaskConfigGroups) -> Iterator[Problem]:
    """Yield every problem with the environments, with the data sources that name them, and with sampling."""
    yield from _named_environments(cfg)
    for name, env in used_environments(cfg).items():
        yield from _counts(name, env)
        wrong_options, of_kind = [*option_problems(name, env)], kind_of(env).problems
        yield from wrong_options
        if not wrong_options and of_kind is not None:
            yield from of_kind(name, cfg.env)
        if needs_gpu(env) and cfg.policy.device is Device.cpu:
            yield Problem(
                key=f"env.{name}.options.device=cuda",
                rule="needs policy.device=cuda, without which a run reserves no GPUs",
                remedy="set it to cpu",
            )
    for name, env in task_environments(cfg).items():
        training, validation = training_sampling(cfg, name), validation_sampling(cfg, name)
        yield from _unique(_ranges(training), _ranges(validation))
        yield from _unique(_grammars(training), _grammars(validation))
        yield from _same_distribution(cfg, training)
        yield from _lengths(cfg, name, env, training)


def _unique(*groups: Iterator[Problem]) -> Iterator[Problem]:
    """Yield each problem once. Validation takes sampling values from training unless it sets its own, so a
    wrong one would be reported for both."""
    yield from dict.fromkeys(problem for group in groups for problem in group)


def _named_environments(cfg: TaskConfigGroups) -> Iterator[Problem]:
    known = ", ".join(cfg.env) or "none"
    for key, data in data_sources(cfg.data):
        if data.env not in cfg.env:
            close = get_close_matches(data.env, cfg.env, n=1)
            yield Problem(
                key=f"{key}.env={data.env}",
                rule=f"is not an environment of this configuration, which has {known}",
                remedy=f"did you mean {close[0]}?"
                if close
                else f"add `- env@env.{data.env}: KIND` to its defaults; the kinds are in configs/env",
            )


def _counts(name: str, env: EnvConfig) -> Iterator[Problem]:
    key = f"env.{name}.num_actors={env.num_actors}"
    if not kind_of(env).judge:
        if env.num_actors != 0:
            yield Problem(
                key=key,
                rule="must be 0 for a weighted sum, whose components have the actors",
                remedy="set num_actors of its components",
            )
    elif env.num_actors == 0:
        yield Problem(key=key, rule="must be at least 1", remedy="")


def _ranges(sourced: SourcedSampling) -> Iterator[Problem]:
    values = sourced.sampling
    # Every comparison is false for NaN, so NaN is out of range.
    limits = {
        "temperature": (
            0 <= values.temperature <= MAX_TEMPERATURE,
            f"at least 0 and at most {MAX_TEMPERATURE:g}",
        ),
        "top_p": (0 < values.top_p <= 1, "above 0 and at most 1"),
        "top_k": (values.top_k >= 0, "at least 0"),
        "min_p": (0 <= values.min_p <= 1, "at least 0 and at most 1"),
        "max_new_tokens": (values.max_new_tokens >= 1, "at least 1"),
        "stop_strings": (all(values.stop_strings), "without an empty string"),
        "stop_token_ids": (all(token >= 0 for token in values.stop_token_ids), "ids, at least 0"),
    }
    for name, (holds, rule) in limits.items():
        if not holds:
            yield Problem(
                key=f"{sourced.keys[name]}={getattr(values, name)}", rule=f"must be {rule}", remedy=""
            )


def _grammars(sourced: SourcedSampling) -> Iterator[Problem]:
    """Yield every problem of the grammar that a task's responses shall follow."""
    if sourced.sampling.structured_outputs is None:
        return
    key, given = sourced.keys["structured_outputs"], json.loads(sourced.sampling.structured_outputs)
    if len(given) != 1 or not given.keys() <= _GRAMMARS.keys():
        rule = f"has {', '.join(given)}, and must have one of {', '.join(_GRAMMARS)}"
        yield Problem(key=key, rule=rule, remedy="for example {regex: '[0-9]+'}")
        return
    ((form, grammar),) = given.items()
    if not isinstance(grammar, _GRAMMARS[form]) or not grammar:
        kind = _GRAMMARS[form].__name__
        yield Problem(key=f"{key}.{form}", rule=f"must be a {kind} that is not empty", remedy="")
    elif form == "regex":
        try:
            re.compile(str(grammar))
        except re.error as error:
            yield Problem(
                key=f"{key}.regex={grammar!r}", rule=f"is no regular expression: {error}", remedy=""
            )


def _same_distribution(cfg: TaskConfigGroups, training: SourcedSampling) -> Iterator[Problem]:
    """Yield a problem when training samples are drawn from another distribution than the trainer scores.

    The trainer's log-probs are of the full distribution at one temperature. With top_p, top_k or min_p the
    engine renormalises its log-probs over the tokens that are left, so the two differ even with equal
    weights.
    """
    values, keys = training.sampling, training.keys
    for name, neutral in _NEUTRAL.items():
        if getattr(values, name) != neutral:
            shown = "null" if keys[name] == "generation.top_k" else neutral
            yield Problem(
                key=f"{keys[name]}={getattr(values, name)}",
                rule=(
                    f"must be {shown} in training: the engine's log-probs would be renormalised over "
                    "the tokens that are left, while the trainer's are of the full distribution"
                ),
                remedy=(
                    f"set it to {shown} and use generation.temperature to sharpen, or set it for validation"
                ),
            )
    if values.temperature != cfg.generation.temperature:
        yield Problem(
            key=f"{keys['temperature']}={values.temperature:g}",
            rule=(
                f"must be generation.temperature={cfg.generation.temperature:g} in training: the "
                "trainer scores every sample at that one temperature"
            ),
            remedy="change generation.temperature for all tasks, or set it for validation",
        )


def _lengths(
    cfg: TaskConfigGroups, name: str, env: EnvConfig, training: SourcedSampling
) -> Iterator[Problem]:
    limit, total = env.max_conversation_tokens, cfg.policy.max_total_sequence_length
    if limit is not None and not 2 <= limit <= total:
        yield Problem(
            key=f"env.{name}.max_conversation_tokens={limit}",
            rule=f"must be from 2 to policy.max_total_sequence_length={total}",
            remedy="null is the latter",
        )
    new, key = training.sampling.max_new_tokens, training.keys["max_new_tokens"]
    if new >= (limit or total) and key != "generation.max_new_tokens":
        yield Problem(
            key=f"{key}={new}",
            rule=f"must be below the {limit or total} tokens of a conversation, which hold the prompt too",
            remedy="",
        )
