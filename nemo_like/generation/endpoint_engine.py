"""``EndpointEngine``: a server behind an OpenAI-compatible API that answers in place of an engine.

A prompt of plain text goes to ``/completions``, a prompt of messages to ``/chat/completions``, with a request
and a seed for each response. The server answers with text. The policy's tokenizer makes tokens of it, which
are there to be counted and have no log-probs: this engine serves evaluations, and no training.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import openai

from nemo_like.batch.tags import AS_LOADED
from nemo_like.cluster.stage import EngineHolds
from nemo_like.config.secrets import as_written
from nemo_like.data.messages import as_openai, is_begun
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.driver.options import EvaluationConfig
from nemo_like.generation.interface import EngineStats, GroupRequest, GroupResult, Response, ResultSink
from nemo_like.generation.sampling import SamplingSettings

_MAX_SHOWN_CHARACTERS = 500
# The key for a server that asks for none; without it the client would take OPENAI_API_KEY.
_NO_KEY = "none"
# The fields by which vLLM, SGLang and other servers continue a last message of the assistant.
_CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


class EndpointEngine:
    """A ``GenerationEngine`` (its methods are described there), hosted by an asyncio actor."""

    def __init__(self, *, name: str, cfg: EvaluationConfig, tokenizer_name: str) -> None:
        """Prepare the client; nothing is sent yet.

        Raises ValueError when the environment variable with the API key is not set.
        """
        self._name, self._cfg = name, cfg
        self._tokenizer = Tokenizer(tokenizer_name)
        self._key = _NO_KEY
        if (variable := cfg.api_key_variable) is not None:
            self._key = os.environ.get(variable, "")
            if not self._key:
                raise ValueError(f"evaluation.api_key_variable={variable} is no environment variable here")
        self._client = openai.AsyncOpenAI(
            base_url=cfg.base_url,
            api_key=self._key,
            timeout=cfg.request_timeout_s,
            max_retries=cfg.max_attempts - 1,
        )
        self._free = asyncio.Semaphore(cfg.max_parallel)
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._num_tokens = 0

    async def submit(
        self, requests: Sequence[GroupRequest], sampling: SamplingSettings, sink: ResultSink
    ) -> None:
        for request in requests:
            if request.images:
                raise ValueError(
                    f"request {request.request_id!r} has images, which are not sent to a server; evaluate "
                    "the checkpoint itself"
                )
            task = asyncio.get_running_loop().create_task(self._serve(request, sampling, sink))
            self._under_way[request.request_id] = task

    async def abort(self, request_ids: Sequence[str]) -> None:
        tasks = [task for name in request_ids if (task := self._under_way.get(name)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def abort_all(self) -> None:
        await self.abort([*self._under_way])

    async def stats(self) -> EngineStats:
        return EngineStats(AS_LOADED, 0.0, self._num_tokens)

    async def hold(self, what: EngineHolds) -> None:
        """Do nothing: the server does not share its memory with a run."""

    async def _serve(self, request: GroupRequest, sampling: SamplingSettings, sink: ResultSink) -> None:
        """Request all responses to one prompt and give them to the sink; tell the sink of a failure."""
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._response(request, seed, sampling)) for seed in request.seeds]
            responses = tuple(one.result() for one in asked)
            self._num_tokens += sum(len(response.token_ids) for response in responses)
            sink.submit("on_groups", [GroupResult(request.request_id, responses, AS_LOADED)])
        except* Exception as errors:
            sink.submit("on_engine_error", self._name, self._described(errors.exceptions[0]))
        finally:
            del self._under_way[request.request_id]

    async def _response(self, request: GroupRequest, seed: int, sampling: SamplingSettings) -> Response:
        async with self._free:
            choice, text = await self._choice(request, seed, sampling)
        # Servers leave out what ended a response; vLLM says which stop string or token it was.
        ended_by = _extra_field(choice, "stop_reason") if choice.finish_reason == "stop" else None
        if isinstance(ended_by, int) and ended_by not in sampling.stop_token_ids:
            ended_by = self._tokenizer.token(ended_by)
        if isinstance(ended_by, str):
            text += ended_by
        is_truncated = choice.finish_reason == "length"
        ids = self._tokenizer.encode_text(text)
        if not is_truncated or not ids:
            ids.append(ended_by if isinstance(ended_by, int) else self._tokenizer.eos_token_id)
        token_ids = np.asarray(ids, np.int32)
        return Response(token_ids, np.zeros(len(ids), np.float32), is_truncated, text=text)

    async def _choice(self, request: GroupRequest, seed: int, sampling: SamplingSettings) -> tuple[Any, str]:
        """Request one response; return the server's choice and its text. Raises openai.OpenAIError after
        ``max_attempts``, and ValueError for an answer without a choice."""
        more = {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        if stop_token_ids := self._stop_token_ids(sampling):
            more["stop_token_ids"] = stop_token_ids
        if sampling.structured_outputs is not None:
            more["structured_outputs"] = json.loads(sampling.structured_outputs)
        asked: dict[str, Any] = {
            "model": self._cfg.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            "stop": list(sampling.stop_strings) or openai.omit,
            "extra_body": {**more, **self._cfg.extra_body} or None,
        }
        said = request.said
        if said is None:
            raise ValueError(f"request {request.request_id!r} does not say what its tokens encode")
        if isinstance(said, str):
            # The server puts its special tokens before the text.
            prompt = self._tokenizer.for_server(said)
            answer = await self._client.completions.create(prompt=prompt, **asked)
        else:
            messages: Any = [as_openai(one) for one in said]
            if is_begun(said):
                asked["extra_body"] = {**_CONTINUED, **(asked["extra_body"] or {})}
            answer = await self._client.chat.completions.create(messages=messages, **asked)
        # A server of another kind may answer anything; the client hands that on unchecked.
        choices = getattr(answer, "choices", None)
        if not choices:
            raise ValueError(f"no completion: {answer}")
        choice = choices[0]
        return choice, (choice.text if isinstance(said, str) else choice.message.content) or ""

    def _stop_token_ids(self, sampling: SamplingSettings) -> list[int]:
        """Return the stop tokens that a server must be told. It knows its checkpoint's own, and finds no stop
        string that is a special token, since its texts leave special tokens out."""
        own = [token for token in sampling.stop_token_ids if token not in self._tokenizer.end_token_ids]
        added = self._tokenizer.added_tokens
        return [*own, *(added[text] for text in sampling.stop_strings if text in added)]

    def _described(self, error: Exception) -> str:
        """Describe an error and the server that gave it, without the API key, which some servers repeat."""
        came_back = f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error.__cause__, Exception):
            came_back += f" ({type(error.__cause__).__name__}: {error.__cause__})"
        shown = came_back if self._key == _NO_KEY else came_back.replace(self._key, "***")
        where = f"the server at {as_written(self._cfg.base_url or '')} (model {self._cfg.model})"
        return f"{where} gave {shown[:_MAX_SHOWN_CHARACTERS]}"


def _extra_field(choice: Any, name: str) -> Any:
    """Return a field that the API of OpenAI does not have; None where the server sends none."""
    return (choice.model_extra or {}).get(name)
