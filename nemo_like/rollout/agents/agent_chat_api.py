"""OpenAI's chat completions and completions: their requests, answers and streams.

Engines deliver whole responses, so a stream's events are made once the response is complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_like.data.tokenizer import Tokenizer
from nemo_like.generation.interface import TOP_LOGPROBS, TOP_TOKEN_IDS, Response
from nemo_like.rollout.agents.agent_calls import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    CallAnswer,
    CallRequest,
    Choice,
    tool_calls,
)
from nemo_like.rollout.agents.agent_prompts import plain_messages
from nemo_like.rollout.agents.agent_request import (
    BadRequest,
    an_object,
    objects,
    refuse_fields,
    stop_strings,
    whole_number,
)
from nemo_like.rollout.agents.agent_tools import ToolUse

MODEL = "policy"
# OpenAI's former way to call tools, and what to send in its place.
_INSTEAD = {"functions": "send tools", "function_call": "send tool_choice"}


def read_chat_request(body: Mapping[str, Any], tools: ToolUse | None) -> CallRequest:
    """Read a request to /v1/chat/completions. Raises BadRequest when it is malformed."""
    refuse_fields(body, _INSTEAD)
    an_object(body, "stream_options")
    limit = whole_number(body, "max_completion_tokens", None, 1)
    return CallRequest(
        messages=plain_messages(body.get("messages")),
        template=an_object(body, "chat_template_kwargs"),
        tool_schemas=objects(body, "tools") if tools is not None and tools.parser is not None else (),
        tools=tools,
        n=whole_number(body, "n", 1, 1, MAX_CHOICES) or 1,
        max_tokens=whole_number(body, "max_tokens", None, 1) if limit is None else limit,
        stop=stop_strings(body),
        seed=whole_number(body, "seed", None, None),
        top_logprobs=whole_number(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS) or 0,
    )


def read_completion_request(body: Mapping[str, Any], tools: ToolUse | None) -> CallRequest:
    """Read a request to /v1/completions, whose prompt is one text or one list of tokens. Raises BadRequest
    when it is malformed."""
    refuse_fields(body, {"suffix": "the policy only continues texts"})
    an_object(body, "stream_options")
    prompt = _completion_prompt(body)
    return CallRequest(
        text=prompt if isinstance(prompt, str) else None,
        token_ids=tuple(prompt) if isinstance(prompt, list) else None,
        tools=tools,
        n=whole_number(body, "n", 1, 1, MAX_CHOICES) or 1,
        max_tokens=whole_number(body, "max_tokens", 16, 1),
        stop=stop_strings(body),
        seed=whole_number(body, "seed", None, None),
        top_logprobs=whole_number(body, "logprobs", 0, 0, MAX_TOP_LOGPROBS) or 0,
    )


def _completion_prompt(body: Mapping[str, Any]) -> str | list[int]:
    """Return the prompt as text or as tokens. Raises BadRequest for several prompts and for any other
    value."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(one) is int for one in prompt):
        raise BadRequest("prompt must be one text or one list of token ids")
    return prompt


def usage(answered: CallAnswer) -> dict[str, Any]:
    """Return the numbers of tokens in the form of OpenAI's completion APIs."""
    return {
        "prompt_tokens": answered.num_prompt_tokens,
        "completion_tokens": answered.num_response_tokens,
        "total_tokens": answered.num_prompt_tokens + answered.num_response_tokens,
        "prompt_tokens_details": {"cached_tokens": answered.num_continued},
    }


def chat_answer(answered: CallAnswer, body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the JSON answer of /v1/chat/completions."""
    return {
        **_head("chatcmpl", "chat.completion", answered, body),
        "choices": [
            {
                "index": choice.index,
                "message": _message(choice),
                "logprobs": _chat_logprobs(choice.response, tokenizer) if body.get("logprobs") else None,
                "finish_reason": choice.finish_reason,
            }
            for choice in answered.choices
        ],
        "usage": usage(answered),
    }


def chat_events(
    answered: CallAnswer, body: Mapping[str, Any], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed chat completion: for each choice its role, text, tool calls and end."""
    head = _head("chatcmpl", "chat.completion.chunk", answered, body)
    for choice in answered.choices:
        message = _message(choice)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in pieces(message["content"] or "")]
        deltas += [
            {"tool_calls": [{"index": number, **call}]}
            for number, call in enumerate(message.get("tool_calls") or ())
        ]
        for place, delta in enumerate(deltas):
            logprobs = (
                _chat_logprobs(choice.response, tokenizer) if body.get("logprobs") and not place else None
            )
            yield _chunk(head, choice.index, {"delta": delta, "logprobs": logprobs, "finish_reason": None})
        yield _chunk(
            head, choice.index, {"delta": {}, "logprobs": None, "finish_reason": choice.finish_reason}
        )
    yield from _usage_event(head, answered, body)


def completion_answer(answered: CallAnswer, body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the JSON answer of /v1/completions."""
    echoed = ""
    if body.get("echo"):
        prompt = _completion_prompt(body)
        echoed = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    return {
        **_head("cmpl", "text_completion", answered, body),
        "choices": [
            {
                "index": choice.index,
                "text": echoed + choice.text,
                "logprobs": _text_logprobs(choice.response, tokenizer)
                if body.get("logprobs") is not None
                else None,
                "finish_reason": choice.finish_reason,
            }
            for choice in answered.choices
        ],
        "usage": usage(answered),
    }


def completion_events(
    answered: CallAnswer, body: Mapping[str, Any], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed completion."""
    whole = completion_answer(answered, body, tokenizer)
    head = {key: value for key, value in whole.items() if key not in ("choices", "usage")}
    for choice in whole["choices"]:
        for piece in pieces(choice["text"]):
            yield _chunk(head, choice["index"], {"text": piece, "logprobs": None, "finish_reason": None})
        yield _chunk(head, choice["index"], {**choice, "text": ""})
    yield from _usage_event(head, answered, body)


def pieces(text: str, size: int = 32) -> list[str]:
    """Split a text into pieces of at most ``size`` characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def _head(prefix: str, kind: str, answered: CallAnswer, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{answered.name}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
    }


def _chunk(head: Mapping[str, Any], index: int, content: Mapping[str, Any]) -> dict[str, Any]:
    return {**head, "choices": [{**content, "index": index}]}


def _usage_event(
    head: Mapping[str, Any], answered: CallAnswer, body: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": usage(answered)}


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.parsed.content}
    if choice.parsed.calls:
        message["tool_calls"] = tool_calls(choice.parsed, choice.call_ids)
    return message


def _chat_logprobs(response: Response, tokenizer: Tokenizer) -> dict[str, Any]:
    tops = _tops(response, tokenizer)
    sampled = _named(response.token_ids.tolist(), response.logprobs.tolist(), tokenizer)
    return {"content": [{**one, "top_logprobs": top} for one, top in zip(sampled, tops, strict=True)]}


def _text_logprobs(response: Response, tokenizer: Tokenizer) -> dict[str, Any]:
    texts = tokenizer.token_texts(response.token_ids.tolist())
    starts = [sum(map(len, texts[:place])) for place in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": response.logprobs.tolist(),
        "top_logprobs": [{one["token"]: one["logprob"] for one in top} for top in _tops(response, tokenizer)],
        "text_offset": starts,
    }


def _tops(response: Response, tokenizer: Tokenizer) -> list[list[dict[str, Any]]]:
    """Return, for each token of a response, the most likely tokens at its position, with their log-probs."""
    if TOP_TOKEN_IDS not in response.columns:
        return [[] for _ in response.token_ids]
    rows = zip(response.columns[TOP_TOKEN_IDS].tolist(), response.columns[TOP_LOGPROBS].tolist(), strict=True)
    return [_named(ids, logprobs, tokenizer) for ids, logprobs in rows]


def _named(ids: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    texts = tokenizer.token_texts(ids)
    return [
        # JSON has no infinity: -9999 stands for a token that a mask forbids, as in vLLM's server.
        {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]
