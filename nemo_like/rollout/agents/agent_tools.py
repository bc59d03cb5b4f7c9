"""Tools and structured outputs of a call, by vLLM's tool parsers: the mask for sampling, and the tool calls
in a response.

vLLM's modules take ten seconds to load. They are loaded in a thread, when a run has agents.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from nemo_like.data.messages import is_shallow
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.rollout.agents.agent_request import BadRequest, an_object, objects, text_of

_MAX_KNOWN = 256
# Fields of a request that say what may be sampled.
_READ = ("tools", "tool_choice", "response_format", "structured_outputs", "parallel_tool_calls")
_PROTOCOL = "vllm.entrypoints.openai.chat_completion.protocol"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a call as vLLM knows them, and the mask under which its response is sampled."""

    parser: Any  # None without tools
    request: Any  # vLLM's ChatCompletionRequest
    structured_outputs: str | None  # as ``CallSampling`` has it
    allowed: frozenset[str] | None = None  # tools that may be called; None: all tools of the prompt


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A response's text, and its tool calls, each a name and arguments as text."""

    content: str | None
    calls: tuple[tuple[str, str], ...] = ()


class AgentTools:
    """Reads tools and structured outputs of requests, with the tool parsers that environments name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._loading: asyncio.Task[Any] | None = None
        # Agents ask for the same again and again.
        self._read_once = lru_cache(_MAX_KNOWN)(self._read)

    def load(self) -> None:
        """Begin to load vLLM's modules, on a running event loop."""
        if self._loading is None:
            work = asyncio.to_thread(_load)
            self._loading = asyncio.get_running_loop().create_task(work)

    async def check(self, parser: str) -> None:
        """Raise ValueError when vLLM has no such tool parser, or when the parser does not work with this
        tokenizer."""
        _, parsers = await self._modules()
        try:
            parsers.get_tool_parser(parser)(self._tokenizer.hf_tokenizer)
        except Exception as error:
            known = ", ".join(parsers.list_registered())
            raise ValueError(f"tool_parser={parser}: {error}; vLLM has {known}") from error

    async def prepare(self, body: Mapping[str, Any]) -> None:
        """Wait until vLLM's modules are loaded, if ``of_request`` will need them for ``body``."""
        if _has_tools_or_mask(body):
            await self._modules()

    def of_request(self, body: Mapping[str, Any], parser: str | None) -> ToolUse | None:
        """Return the tools and the mask of a chat completion, or None when it has neither. Call ``prepare``
        before.

        May be called in any thread. Raises BadRequest when tools or mask do not follow OpenAI's API.
        """
        if not _has_tools_or_mask(body):
            return None
        own = {key: body[key] for key in _READ if body.get(key) is not None}
        return self._read_once(json.dumps([parser, own], sort_keys=True))

    def _read(self, asked: str) -> ToolUse:
        """Read tools and mask; ``asked`` is JSON with the tool parser's name and the request's fields."""
        assert self._loading is not None
        protocol, parsers = self._loading.result()
        parser, own = json.loads(asked)
        own, allowed = narrowed(own)
        try:
            request = protocol.ChatCompletionRequest(messages=[{"role": "user", "content": ""}], **own)
            found = None
            if request.tools and request.tool_choice != "none":
                if parser is None:
                    raise ValueError("env.*.options.tool_parser is null, so no tools are served")
                found = parsers.get_tool_parser(parser)(self._tokenizer.hf_tokenizer, request.tools)
            return ToolUse(found, request, _structured_outputs(request, found), allowed)
        except Exception as error:  # pydantic's, vLLM's and the parsers' own
            raise BadRequest(f"tools or response_format: {error}") from error

    async def _modules(self) -> tuple[Any, Any]:
        self.load()
        assert self._loading is not None
        modules: tuple[Any, Any] = await asyncio.shield(self._loading)
        return modules


def parsed(text: str, use: ToolUse | None) -> ParsedText:
    """Return the text of a response, and its tool calls.

    The whole response counts as text when it calls a tool that the request does not allow, or when arguments
    of a call are not a JSON object, since harnesses expect one. Blank text beside tool calls is dropped: many
    clients leave it out of the history that they send back, and some servers refuse it.
    """
    if use is None or use.parser is None:
        return ParsedText(text)
    found = _of_json(text, use.request) if _is_plain_json(use) else _of_parser(text, use)
    if not found.calls or not all(_is_call(name, arguments, use) for name, arguments in found.calls):
        return ParsedText(text)
    return found if (found.content or "").strip() else replace(found, content=None)


def _of_parser(text: str, use: ToolUse) -> ParsedText:
    found = use.parser.extract_tool_calls(text, use.request)
    return ParsedText(
        found.content, tuple((call.function.name, call.function.arguments) for call in found.tool_calls)
    )


def _is_call(name: str, arguments: str, use: ToolUse) -> bool:
    if use.allowed is not None and name not in use.allowed:
        return False
    try:
        given = json.loads(arguments)
        json.dumps(given, allow_nan=False)  # JSON has no infinity, though Python reads it
    except (ValueError, RecursionError):
        return False
    return isinstance(given, dict) and is_shallow(given)


def _has_tools_or_mask(body: Mapping[str, Any]) -> bool:
    return any(body.get(key) for key in ("tools", "response_format", "structured_outputs"))


def narrowed(own: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str] | None]:
    """Return a request's fields with only the tools that its tool_choice of type allowed_tools allows, and
    the names of these tools. For another tool_choice, return the fields unchanged and None.

    The prompt still describes all tools. Raises BadRequest when the choice is malformed, or allows a tool
    that the request lacks.
    """
    choice = own.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return own, None
    given = an_object(choice, "allowed_tools")
    names = frozenset(text_of(an_object(one, "function"), "name") or "" for one in objects(given, "tools"))
    tools = {text_of(an_object(one, "function"), "name") or "": one for one in objects(own, "tools")}
    if given.get("mode") not in ("auto", "required") or not names or names - tools.keys():
        raise BadRequest(
            "tool_choice of the type allowed_tools needs a mode, auto or required, and some of the tools of "
            f"the request ({', '.join(sorted(tools))})"
        )
    kept = [one for name, one in tools.items() if name in names]
    return {**own, "tools": kept, "tool_choice": given["mode"]}, names


def _load() -> tuple[Any, Any]:
    return importlib.import_module(_PROTOCOL), importlib.import_module("vllm.tool_parsers").ToolParserManager


def _structured_outputs(request: Any, parser: Any) -> str | None:
    """Return the mask for sampling as JSON: the parser's own form of tool calls where it has one, else the
    mask that the request asks for. None: no mask."""
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
    """Return a structural tag whose JSON allows no two spaces in a row: a policy that is bad at JSON would
    fill its response with them."""
    if isinstance(tag, list):
        return [_with_few_spaces(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    own = {"max_whitespace_cnt": 1} if tag.get("type") == "json_schema" and "json_schema" in tag else {}
    return {key: part if key == "json_schema" else _with_few_spaces(part) for key, part in tag.items()} | own


def _is_plain_json(use: ToolUse) -> bool:
    """Return whether tools must be called although the parser has no form of its own for that. Then a list of
    calls, or the arguments of the one tool, is sampled as JSON."""
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
