"""Rules on the server that answers an evaluation in place of engines."""

from __future__ import annotations

import os
from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.driver.options import EvaluationConfig


def server_problems(asked: EvaluationConfig) -> Iterator[Problem]:
    """Yield every problem with the keys that name the server of an evaluation."""
    if (asked.base_url is None) != (asked.model is None):
        given, lacking = ("base_url", "model") if asked.model is None else ("model", "base_url")
        yield Problem(
            key=f"evaluation.{given}={getattr(asked, given)}",
            rule=f"says nothing without evaluation.{lacking}",
            remedy="give --endpoint URL and --model NAME, or neither",
        )
    if asked.base_url is not None:
        key = f"evaluation.base_url={asked.base_url}"
        if not asked.base_url.startswith(("http://", "https://")):
            yield Problem(key=key, rule="must start with http:// or https://", remedy="")
        if asked.base_url.rstrip("/").endswith("/completions"):
            remedy = "name the API's root, which usually ends in /v1"
            yield Problem(key=key, rule="is the address of one method", remedy=remedy)


def api_key_problems(asked: EvaluationConfig) -> Iterator[Problem]:
    """Yield a problem when the environment variable with the server's API key is not set here."""
    variable = asked.api_key_variable
    if variable is not None and not os.environ.get(variable):
        yield Problem(
            key=f"evaluation.api_key_variable={variable}",
            rule="is no environment variable, or an empty one",
            remedy=f"export {variable} before, or null for a server that asks for no key",
        )
