"""Tools and structured outputs of a call, by vLLM's tool parsers: what may be sampled, and what it calls.

vLLM's modules take ten seconds to load. They are loaded in a thread, when a run has agents.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_like.data.tokenizer import Tokenizer
from nemo_like.rollout.agent_prompts import BadRequest

_MAX_KNOWN = 256
_PROTOCOL = "vllm.entrypoints.openai.chat_completion.protocol"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a call as vLLM knows them, and the mask under which its response is sampled."""

    parser: Any  # None without tools
    request: Any  # vLLM's ChatCompletionRequest
    structured_outputs: str | None  # as ``CallSampling`` has it


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A response's text, and the calls of tools in it: name and arguments, as text."""

    content: str | None
    calls: tuple[tuple[str, str], ...] = ()


class AgentTools:
    """Reads tools and structured outputs for the tool parsers that environments name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._loading: asyncio.Task[Any] | None = None
        self._known: dict[str, ToolUse] = {}  # agents ask for the same again and again

    def load(self) -> None:
        """Begin to load vLLM's modules, on a running event loop."""
        if self._loading is None:
            work = asyncio.to_thread(_load)
            self._loading = asyncio.get_running_loop().create_task(work)

    async def check(self, parser: str) -> None:
        """Raise ValueError when vLLM has no such tool parser, or none for this tokenizer."""
        _, parsers = await self._modules()
        try:
            parsers.get_tool_parser(parser)(self._tokenizer.hf_tokenizer)
        except Exception as error:
            known = ", ".join(parsers.list_registered())
            raise ValueError(f"tool_parser={parser}: {error}; vLLM has {known}") from error

    async def of_request(self, body: Mapping[str, Any], parser: str | None) -> ToolUse | None:
        """Return the tools and the mask of a chat completion; None where it has neither.

        Raises BadRequest where they are not as OpenAI's API has them.
        """
        if not any(body.get(key) for key in ("tools", "response_format", "structured_outputs")):
            return None
        protocol, parsers = await self._modules()
        kept = ("tools", "tool_choice", "response_format", "structured_outputs", "parallel_tool_calls")
        own = {key: body[key] for key in kept if body.get(key) is not None}
        name = json.dumps([parser, own], sort_keys=True, default=str)
        if (known := self._known.get(name)) is None:
            known = self._known[name] = self._read(own, parser, protocol, parsers)
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return known

    def _read(self, own: dict[str, Any], parser: str | None, protocol: Any, parsers: Any) -> ToolUse:
        try:
            request = protocol.ChatCompletionRequest(messages=[{"role": "user", "content": ""}], **own)
            found = None
            if request.tools and request.tool_choice != "none":
                if parser is None:
                    raise ValueError("env.*.options.tool_parser is null, so no tools are served")
                found = parsers.get_tool_parser(parser)(self._tokenizer.hf_tokenizer, request.tools)
            return ToolUse(found, request, _structured_outputs(request, found))
        except Exception as error:  # pydantic's, vLLM's and the parsers' own
            raise BadRequest(f"tools or response_format: {error}") from error

    async def _modules(self) -> tuple[Any, Any]:
        self.load()
        assert self._loading is not None
        modules: tuple[Any, Any] = await asyncio.shield(self._loading)
        return modules


def parsed(text: str, use: ToolUse | None) -> ParsedText:
    """Return what a response says, and which tools it calls.

    A response is text throughout where the arguments of a call are no JSON object, which harnesses take for
    granted. Beside calls, text of blanks is none: many clients leave it out of what they send back, and some
    servers refuse it.
    """
    if use is None or use.parser is None:
        return ParsedText(text)
    found = _of_json(text, use.request) if _is_plain_json(use) else _of_parser(text, use)
    if not found.calls or not all(_is_object(arguments) for _, arguments in found.calls):
        return ParsedText(text)
    return found if (found.content or "").strip() else replace(found, content=None)


def _of_parser(text: str, use: ToolUse) -> ParsedText:
    found = use.parser.extract_tool_calls(text, use.request)
    return ParsedText(
        found.content, tuple((call.function.name, call.function.arguments) for call in found.tool_calls)
    )


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _load() -> tuple[Any, Any]:
    return importlib.import_module(_PROTOCOL), importlib.import_module("vllm.tool_parsers").ToolParserManager


def _structured_outputs(request: Any, parser: Any) -> str | None:
    """Return what may be sampled: calls in the parser's own form where the tools must be called, or as the
    request says."""
    tag = None
    if parser is not None:
        # Tools that must be called get arguments of their schemas, also where they are not declared strict.
        levels = importlib.import_module("vllm.tool_parsers.tool_strict_level").ToolStrictLevel
        is_forced = request.tool_choice not in ("auto", "none", None)
        tag = parser.get_structural_tag(request, strict_level=levels.PARAMETER if is_forced else levels.AUTO)
    if tag is not None:
        if request.parallel_tool_calls is False:
            registry = importlib.import_module("vllm.tool_parsers.structural_tag_registry")
            tag = registry.limit_to_single_tool_call(tag)
        return json.dumps({"structural_tag": json.dumps(_with_few_spaces(tag.model_dump()))})
    if parser is not None:
        request = parser.adjust_request(request)
    outputs = request.extract_structured_outputs()
    if outputs is None:
        return None
    names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = {name: value for name in names if (value := getattr(outputs, name, None)) is not None}
    return json.dumps(given) if given else None


def _with_few_spaces(tag: Any) -> Any:
    """Return a structural tag in whose JSON no two spaces follow each other: a policy that is bad at JSON
    would fill its response with them."""
    if isinstance(tag, list):
        return [_with_few_spaces(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    own = {"max_whitespace_cnt": 1} if tag.get("type") == "json_schema" and "json_schema" in tag else {}
    return {key: part if key == "json_schema" else _with_few_spaces(part) for key, part in tag.items()} | own


def _is_plain_json(use: ToolUse) -> bool:
    """Whether tools must be called and the parser has no form of its own for that: then a list of calls, or
    the arguments of the one tool, are sampled as JSON."""
    is_forced = use.request.tool_choice not in ("auto", "none", None)
    return is_forced and use.parser.supports_required_and_named


def _of_json(text: str, request: Any) -> ParsedText:
    if request.tool_choice != "required":
        return ParsedText(None, ((request.tool_choice.function.name, text),))
    try:
        calls = json.loads(text)
        return ParsedText(None, tuple((one["name"], json.dumps(one["parameters"])) for one in calls))
    except (ValueError, KeyError, TypeError, RecursionError):  # such as one that is cut short
        return ParsedText(text)
