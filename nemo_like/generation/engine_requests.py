"""Translates requests into vLLM's terms, and its completions into responses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from nemo_like.batch.columns import POLICY_VERSIONS
from nemo_like.compat.unmasked_logprobs import FORCED_RANK
from nemo_like.data.images import decoded
from nemo_like.generation.engine_journal import request_digest
from nemo_like.generation.engine_routes import ResponseRoutes
from nemo_like.generation.interface import (
    FORCED,
    TOP_LOGPROBS,
    TOP_TOKEN_IDS,
    CallSampling,
    GenerationError,
    GroupRequest,
    Response,
    ResultSink,
)
from nemo_like.generation.sampling import SamplingSettings


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that vLLM does not have yet, as vLLM will get it."""

    request: GroupRequest
    sampling: SamplingSettings
    params: SamplingParams
    sink: ResultSink

    @property
    def num_responses(self) -> int:
        return len(self.request.seeds)

    @property
    def is_masked(self) -> bool:
        """Whether its responses are sampled under the mask of structured outputs."""
        return self.params.structured_outputs is not None

    @property
    def digest(self) -> int:
        """A digest of everything on which its responses depend besides the weights."""
        return request_digest(self.request, self.sampling)


def sampling_params(
    request: GroupRequest, sampling: SamplingSettings, added_tokens: Mapping[str, int]
) -> SamplingParams:
    """Return vLLM's sampling parameters for the request.

    ``added_tokens`` are the ids of the tokens that the tokenizer never splits, by text. A stop string that is
    one of them becomes that token, for which no response need be decoded.

    Raises ValueError for several greedy responses.
    """
    num_responses = len(request.seeds)
    if sampling.temperature == 0 and num_responses > 1:
        raise ValueError(
            f"request {request.request_id!r}: {num_responses} greedy responses would be the same; ask for one"
        )
    stop_tokens = [added_tokens[text] for text in sampling.stop_strings if text in added_tokens]
    stop_strings = [text for text in sampling.stop_strings if text not in added_tokens]
    params = SamplingParams(
        n=num_responses,
        seed=request.seeds[0],
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=[*sampling.stop_token_ids, *stop_tokens],
        stop=stop_strings,
        ignore_eos=True,  # only the stop tokens and strings of the settings end a response
        logprobs=0,  # only the sampled token's log-prob
        flat_logprobs=True,
        detokenize=bool(stop_strings),  # only where needed: it takes a fifth of the time
        skip_special_tokens=False,  # a stop string may contain special tokens
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # vLLM need not copy an object that was made for this one request
    )
    if isinstance(sampling, CallSampling):
        params.logprobs = sampling.num_top_logprobs
    if sampling.structured_outputs is not None:
        params.structured_outputs = StructuredOutputsParams(**json.loads(sampling.structured_outputs))
    return params


def as_prompt(request: GroupRequest, model: Any) -> Any:
    """Return the request's prompt in vLLM's form; ``model`` is the Hugging Face configuration. A run of an
    image's token is cut to one token, since vLLM repeats it itself."""
    if not request.images:
        return tokens_input(list(request.prompt_ids))
    token = model.image_token_id
    ids = [
        one
        for one, before in zip(request.prompt_ids, (None, *request.prompt_ids), strict=False)
        if (one, before) != (token, token)
    ]
    images = [decoded(file) for file in request.images]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


def check_places(request: GroupRequest, output: RequestOutput) -> None:
    """Raise GenerationError when the engine's prompt, with the tokens of its images, differs from the
    request's prompt, which the trainer will read."""
    if request.images and tuple(output.prompt_token_ids or ()) != request.prompt_ids:
        raise GenerationError(
            f"request {request.request_id!r}: the engine's prompt has {len(output.prompt_token_ids or ())} "
            f"tokens with its images, and the request's {len(request.prompt_ids)}; both must come from the "
            "checkpoint's image processor"
        )


def as_response(
    completion: CompletionOutput, routes: ResponseRoutes, *, with_versions: bool, is_masked: bool = False
) -> Response:
    """Return a finished response. ``with_versions`` adds the column of each token's policy version, and
    ``is_masked`` the column of the tokens that a mask of structured outputs forced."""
    logprobs, top = _logprobs(completion)
    columns = {**routes.columns, **top}
    if is_masked:
        ranks = np.asarray(completion.logprobs.ranks).reshape(len(completion.token_ids), -1)[:, 0]
        columns[FORCED] = (ranks == FORCED_RANK).astype(np.uint8)
    if with_versions:
        spans = version_spans(completion)
        ends = [start for _, start in spans[1:]] + [len(completion.token_ids)]
        lengths = [end - start for (_, start), end in zip(spans, ends, strict=True)]
        versions = np.repeat(np.asarray([version for version, _ in spans], np.int32), lengths)
        columns = {**columns, POLICY_VERSIONS.name: versions}
    return Response(
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=logprobs,
        is_truncated=completion.finish_reason == "length",
        columns=columns,
        context_columns=routes.context_columns,
    )


def _logprobs(completion: CompletionOutput) -> tuple[np.ndarray, Mapping[str, Any]]:
    """Return the log-probs of the sampled tokens, and columns of the most likely tokens if asked for.

    vLLM gives a row per token: the sampled token first, then the most likely tokens.
    """
    num_tokens = len(completion.token_ids)
    rows = np.asarray(completion.logprobs.logprobs, dtype=np.float32).reshape(num_tokens, -1)
    if rows.shape[1] == 1:
        return rows[:, 0], {}
    ids = np.asarray(completion.logprobs.token_ids, dtype=np.int32).reshape(num_tokens, -1)
    return np.ascontiguousarray(rows[:, 0]), {TOP_TOKEN_IDS: ids[:, 1:], TOP_LOGPROBS: rows[:, 1:]}


def version_spans(completion: CompletionOutput) -> list[tuple[int, int]]:
    """Return the (version, index of its first token) of each policy version that sampled the response."""
    return [(int(span.version), span.start) for span in completion.weight_versions or ()]
