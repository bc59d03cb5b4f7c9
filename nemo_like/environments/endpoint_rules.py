"""Rules on environments that ask a model behind an OpenAI-compatible API."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from nemo_like.config.problems import Problem
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import options_of
from nemo_like.environments.shared_options import EndpointOptions

START_REMEDY = (
    "start the server, or correct env.{env}.options (base_url, model, api_key_variable, the pattern)"
)
_WORD_IN_BRACES = re.compile(r"\{([a-z_]+)\}")


def endpoint_problems(name: str, envs: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    """Yield every problem with the question, the numbers and the deadlines of the judge ``envs[name]``."""
    env = envs[name]
    prefix, options = f"env.{name}.options", options_of(env)
    if options.base_url.rstrip("/").endswith("/completions"):
        yield Problem(
            key=f"{prefix}.base_url={options.base_url}",
            rule="is the address of one method",
            remedy="name the API's root, which usually ends in /v1",
        )
    yield from _question(prefix, options)
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


def api_key_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield a problem when this machine's environment variables lack the API key of a judge."""
    variable = env.options.get("api_key_variable")
    if variable is not None and not os.environ.get(str(variable)):
        yield Problem(
            key=f"env.{name}.options.api_key_variable={variable}",
            rule="is no environment variable, or an empty one",
            remedy=f"export {variable} before the run, or null for a server that asks for no key",
        )


def _question(prefix: str, options: EndpointOptions) -> Iterator[Problem]:
    needed, others = options.needed_words, options.other_words
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
