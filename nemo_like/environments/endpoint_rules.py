"""Rules on environments that ask a model behind an OpenAI-compatible API: judge and preference."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from nemo_like.config.problems import Problem
from nemo_like.environments.kind_options import EndpointOptions, JudgeOptions, options_of
from nemo_like.environments.options import EnvConfig, EnvironmentKind

# What a question may have in braces: first what it must have, then what it may.
PLACEHOLDERS = {
    EnvironmentKind.judge: (("response",), ("prompt", "answer")),
    EnvironmentKind.preference: (("first", "second"), ("prompt",)),
}
_WORD_IN_BRACES = re.compile(r"\{([a-z_]+)\}")


def endpoint_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield every problem with the question, the scores and the deadlines of a judge.

    The options have the right types. Environments of other kinds have no problem here.
    """
    if env.kind not in PLACEHOLDERS:
        return
    prefix, options = f"env.{name}.options", options_of(env)
    if options.base_url.rstrip("/").endswith("/completions"):
        yield Problem(
            key=f"{prefix}.base_url={options.base_url}",
            rule="is the address of one method",
            remedy="name the API's root, which usually ends in /v1",
        )
    yield from _question(prefix, env.kind, options)
    yield from _numbers(prefix, options)
    longest_s = options.request_timeout_s * options.max_attempts
    if not longest_s < env.timeout_s:
        yield Problem(
            key=f"env.{name}.timeout_s={env.timeout_s:g}",
            rule=(
                f"must be above options.request_timeout_s x options.max_attempts = {longest_s:g}: a sample "
                "whose judge is late fails alone; a call that is late ends the process with all its samples"
            ),
            remedy=f"try {math.ceil(1.1 * longest_s)}, or fewer attempts",
        )


def endpoint_machine_problems(used: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    """Yield a problem for each API key that this machine's environment variables lack."""
    for name, env in used.items():
        variable = env.options.get("api_key_variable") if env.kind in PLACEHOLDERS else None
        if variable is not None and not os.environ.get(str(variable)):
            yield Problem(
                key=f"env.{name}.options.api_key_variable={variable}",
                rule="is no environment variable, or an empty one",
                remedy=f"export {variable} before the run, or null for a server that asks for no key",
            )


def _question(prefix: str, kind: EnvironmentKind, options: EndpointOptions) -> Iterator[Problem]:
    needed, others = PLACEHOLDERS[kind]
    found = _WORD_IN_BRACES.findall(options.prompt)
    for word in needed:
        if word not in found:
            yield Problem(
                key=f"{prefix}.prompt",
                rule=f"must contain {{{word}}}, or the judge does not see it",
                remedy=f"a question may have {_listed((*needed, *others))}",
            )
    for word in found:
        known = (*needed, *others)
        if word not in known and (close := get_close_matches(word, known, n=1, cutoff=0.7)):
            yield Problem(
                key=f"{prefix}.prompt",
                rule=f"has {{{word}}}, which stands for nothing",
                remedy=f"did you mean {{{close[0]}}}?",
            )


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(f"{{{word}}}" for word in words)


def _numbers(prefix: str, options: EndpointOptions) -> Iterator[Problem]:
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        key = f"{prefix}.temperature={options.temperature:g}"
        yield Problem(key=key, rule="must be at least 0 and finite", remedy="0 gives the likeliest verdict")
    if options.default_reward is not None and not math.isfinite(options.default_reward):
        key = f"{prefix}.default_reward={options.default_reward:g}"
        yield Problem(key=key, rule="must be finite", remedy="null fails the sample")
    if isinstance(options, JudgeOptions) and not -math.inf < options.min_score < options.max_score < math.inf:
        yield Problem(
            key=f"{prefix}.max_score={options.max_score:g}",
            rule=f"must be above min_score={options.min_score:g}, and both finite",
            remedy="they are the scores that give the rewards 0 and 1",
        )
