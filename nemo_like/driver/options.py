"""The keys of a run that only evaluates, ``evaluation``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from nemo_like.config.keys import Key


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """An evaluation: it samples the prompts of data.validation as a validation does, and trains nothing.

    scripts/evaluate.py adds this group; runs that train or generate leave it out.
    """

    step: Annotated[
        int,
        Key("the answers are sampled with the seeds that a validation after this step has", 0, at_least=0),
    ]
    base_url: Annotated[
        str | None,
        Key(
            "of an OpenAI-compatible API that answers in place of engines, "
            "http://host:8000/v1; null: engines",
            None,
        ),
    ]
    model: Annotated[str | None, Key("the name under which that server has the model", None)]
    api_key_variable: Annotated[
        str | None,
        Key("the environment variable that holds the server's API key; null: the server asks for none", None),
    ]
    max_parallel: Annotated[int, Key("requests to the server that are under way at once", 64, at_least=1)]
    request_timeout_s: Annotated[float, Key("deadline of one attempt", 600.0, above=0, below=math.inf)]
    max_attempts: Annotated[
        int,
        Key(
            "tried again after a refused or broken connection, a timeout, or a status of 409, 429 or 5xx",
            5,
            at_least=1,
        ),
    ]
    extra_body: Annotated[
        dict[str, Any], Key("further fields of every request, for example {skip_special_tokens: false}", {})
    ]


def asks_endpoint(evaluation: EvaluationConfig | None) -> bool:
    """Return whether a server behind an OpenAI-compatible API samples instead of engines."""
    return evaluation is not None and evaluation.base_url is not None
