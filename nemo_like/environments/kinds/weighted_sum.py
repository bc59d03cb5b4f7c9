"""The kind ``weighted_sum``: a weighted sum of other environments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.kind import Kind
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import component_weights, kind_of


@dataclass(kw_only=True, slots=True)
class WeightedSumOptions:
    """Other environments, all of which judge every response."""

    components: Annotated[
        dict[str, float],
        Key("the weights by the environments' names, for example {math: 1.0, quality: 0.1}", {}),
    ]


def _problems(name: str, envs: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    env = envs[name]
    weights = component_weights(env)
    if not weights:
        yield Problem(
            key=f"env.{name}.options.components",
            rule="names no environment, so there is no reward",
            remedy="name environments with their weights, for example {math: 1.0, quality: 0.1}",
        )
    if env.max_turns > 1:
        yield Problem(
            key=f"env.{name}.max_turns={env.max_turns}",
            rule="must be 1 for a weighted sum, whose components judge one response",
            remedy="a conversation of several turns is judged by the environment that answers it",
        )
    for component, weight in weights.items():
        key = f"env.{name}.options.components.{component}"
        other = envs.get(component)
        if other is None:
            close = get_close_matches(component, envs.keys() - {name}, n=1)
            yield Problem(
                key=key,
                rule=f"is not an environment of this configuration, which has {', '.join(envs)}",
                remedy=f"did you mean {close[0]}?" if close else f"add `- env@env.{component}: KIND`",
            )
        elif kind_of(other).answers or kind_of(other).components is not None:
            yield Problem(
                key=key,
                rule=f"is of kind {other.kind}, which judges no single response",
                remedy="a component is an environment of another kind, such as math_verify or reward_model",
            )
        elif isinstance(weight, int | float) and not math.isfinite(weight):
            yield Problem(key=f"{key}={weight}", rule="must be finite", remedy="")


KIND = Kind(
    about="Other environments of the configuration judge every response; the reward is the "
    "weighted sum of theirs. Each keeps its own actors, batches, concurrency and "
    "deadline.",
    reward="the [weighted sum](#several-rewards-at-once) of what other environments give",
    example="`{components: {math: 1.0, quality: 0.1}}`",
    options=WeightedSumOptions,
    base={"num_actors": Key("it has none of its own", 0)},
    components="components",
    problems=_problems,
    start_remedy="correct the component or its options, or the problem",
)
