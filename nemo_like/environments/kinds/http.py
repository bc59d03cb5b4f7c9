"""The kind ``http``: rewards from a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.environments.kind import Kind


@dataclass(kw_only=True, slots=True)
class HttpOptions:
    url: Annotated[str, Key("of the server, which gets a POST for each batch of turns")]
    request_timeout_s: Annotated[float, Key("deadline of one attempt", 30.0, above=0)]
    max_attempts: Annotated[
        int,
        Key(
            "tried again after a refused or broken connection, a timeout, or a status of 429 or 5xx",
            3,
            above=0,
        ),
    ]
    retry_pause_s: Annotated[
        float, Key("pause before the second attempt; it doubles with every further attempt", 0.5, at_least=0)
    ]
    max_parallel: Annotated[int, Key("requests that one actor has under way at once", 8, above=0)]


KIND = Kind(
    about="A server gives the rewards. It is sent batches of turns; docs/how_to/environments.md has the "
    "format.",
    reward="what a server answers",
    example="`{url: 'http://judge:8000/score'}`",
    options=HttpOptions,
    base={
        "timeout_s": Key("deadline of all attempts together", 120.0),
        "max_concurrency": Key("", 8),
        "batch_size": Key("turns of one request", 64),
    },
    judge="nemo_like.environments.remote:HttpEnvironment",
    start_remedy="start the server or correct env.{env}.options.url; docs/how_to/environments.md has the "
    "format",
)
