"""Renders each kind of conversation that a run will hold, before the run.

So a chat template is found that refuses a conversation, or leaves out what a speaker says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_like.config.problems import Problem
from nemo_like.data.interface import Message, TaskPrompt
from nemo_like.data.options import DatasetConfig
from nemo_like.data.template_turns import (
    MADE_UP_CALL_ID,
    MADE_UP_TEXT,
    TurnError,
    check_role,
    rendered_roles,
)
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import kind_of, options_of
from nemo_like.preflight.notes import Note, NoteStatus

if TYPE_CHECKING:
    from nemo_like.data.tokenizer import Tokenizer

_TEMPLATE = "name a template in data.chat_template that does"
_TOOL = "count_quokkas"  # of a made-up conversation; no template writes this name by itself


class ConversationCheck:
    """The check of one source: renders one prompt of each kind, and what follows the responses to it."""

    def __init__(self, key: str, cfg: DatasetConfig, env: EnvConfig | None, tokenizer: Tokenizer) -> None:
        """Prepare the check of the source ``key``, such as data.train.

        ``env`` is the environment of its problems, and None when several environments judge single responses.
        """
        self._key, self._cfg, self._env, self._tokenizer = key, cfg, env, tokenizer
        self._seen: set[tuple[str, ...]] = set()  # the roles of each kind of prompt
        self.has_refused = False  # the template has refused a prompt
        self.notes: list[Note] = []

    def check_made_up_prompt(self) -> Iterator[Problem]:
        """Yield the problems of a conversation from a made-up prompt, if the source uses the chat
        template."""
        if not self._cfg.use_chat_template:
            return
        prompt = [Message("user", MADE_UP_TEXT)]
        if self._cfg.system_prompt is not None:
            prompt.insert(0, Message("system", self._cfg.system_prompt))
        template = self._cfg.chat_template_kwargs
        yield from self.check_prompt("a made-up problem", TaskPrompt(tuple(prompt), "", template=template))

    def check_prompt(self, where: str, example: TaskPrompt) -> Iterator[Problem]:
        """Yield the problems of a conversation that begins with ``example``, unless its kind was checked."""
        if isinstance(example.prompt, str) or not self._tokenizer.has_chat_template:
            return
        roles = tuple(message.role for message in example.prompt)
        if roles in self._seen:
            return
        is_first = not self._seen
        self._seen.add(roles)
        if is_first:
            yield from self._arguments(example.template)
        yield from self._prompt(where, example.prompt, example.tools)
        if is_first and self._env is not None and self._env.max_turns > 1:
            yield from self._observation(self._env.observation_role)

    def check_agent(self) -> Iterator[Problem]:
        """Yield the problems of the conversations of an agent, which makes its own messages."""
        is_agent = self._env is not None and kind_of(self._env).calls_policy
        if self._env is not None and is_agent and self._tokenizer.has_chat_template:
            yield from _agent_problems(self._cfg.env, options_of(self._env).tool_parser, self._tokenizer)
            if not _lists_tools(self._tokenizer):
                text = "the chat template does not describe tools, so an agent that has some must do so"
                self.notes.append(Note(NoteStatus.assumed, f"env.{self._cfg.env}: {text}"))

    def _arguments(self, template: Mapping[str, Any]) -> Iterator[Problem]:
        known = self._tokenizer.template_arguments if template else frozenset()
        for name in sorted(template.keys() - known):
            yield Problem(
                key=f"{self._key}.chat_template_kwargs.{name}",
                rule="would change nothing: the chat template takes no argument of this name",
                remedy=f"it takes {', '.join(sorted(known)) or 'none'}; leave it out, or {_TEMPLATE}",
            )

    def _prompt(
        self, where: str, prompt: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]
    ) -> Iterator[Problem]:
        try:
            rendered = self._tokenizer.checked_prompt(prompt, tools, self._cfg.chat_template_kwargs)
        except ValueError as error:
            self.has_refused = True
            yield self._refused(where, prompt, tools, str(error))
        else:
            yield from self._tools(tools, rendered)

    def _refused(
        self, where: str, prompt: tuple[Message, ...], tools: Sequence[Mapping[str, Any]], why: str
    ) -> Problem:
        is_given = prompt[0] == Message("system", self._cfg.system_prompt or "")
        if is_given and self._is_rendered(prompt[1:], tools):
            return Problem(
                key=f"{self._key}.system_prompt",
                rule=f"makes messages of {', '.join(message.role for message in prompt)} of {where}: {why}",
                remedy=f"set it to null and write the text into {self._key}.prompt_template, or {_TEMPLATE}",
            )
        return Problem(
            key=f"{self._key}.path={self._cfg.path}",
            rule=f"cannot be used: {where}: {why}",
            remedy="change the messages, or the template (data.chat_template)",
        )

    def _is_rendered(self, prompt: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._tokenizer.checked_prompt(prompt, tools, self._cfg.chat_template_kwargs)
        except ValueError:
            return False
        return True

    def _tools(self, tools: Sequence[Mapping[str, Any]], rendered: str) -> Iterator[Problem]:
        missing = [name for tool in tools if (name := tool["function"]["name"]) not in rendered]
        if missing:
            yield Problem(
                key=f"env.{self._cfg.env}",
                rule=f"has tools of which nothing tells the policy: the chat template does not write "
                f"{', '.join(missing)}",
                remedy=f"describe them in {self._key}.system_prompt, or {_TEMPLATE}",
            )

    def _observation(self, role: str) -> Iterator[Problem]:
        key, render = f"env.{self._cfg.env}.observation_role={role}", self._tokenizer.render
        try:
            check_role(render, role)
        except TurnError as error:
            known = rendered_roles(render)
            yield Problem(
                key=key,
                rule=f"does not go with the chat template, which {error}",
                remedy=f"set it to {known[0]}, or {_TEMPLATE}" if known else _TEMPLATE,
            )
            return
        self.notes.append(Note(NoteStatus.checked, f"{key}: the chat template writes such an observation"))


def _agent_problems(env: str, tool_parser: str | None, tokenizer: Tokenizer) -> Iterator[Problem]:
    """Yield the problems of an agent's second call.

    Tries a call that continues the conversation and, if responses may call tools, one with a tool's result.
    """
    import numpy as np

    from nemo_like.generation.interface import Response
    from nemo_like.rollout.agents.agent_prompts import AgentPrompts
    from nemo_like.rollout.agents.agent_request import BadRequest
    from nemo_like.rollout.agents.agent_session import AgentCall

    prompts = AgentPrompts(tokenizer)
    ended = Response(
        np.array([tokenizer.eos_token_id], np.int32), np.zeros(1, np.float32), is_truncated=False
    )
    asked = AgentCall(0, None, (), "", ended, "", 0)
    question = {"role": "user", "content": "?"}
    function = {"name": _TOOL, "arguments": {}}
    calling = {"id": MADE_UP_CALL_ID, "type": "function", "function": function}
    answered: list[dict[str, Any]] = [
        question,
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": MADE_UP_TEXT},
    ]
    called: list[dict[str, Any]] = [
        *(question, {"role": "assistant", "content": "", "tool_calls": [calling]}),
        {"role": "tool", "tool_call_id": MADE_UP_CALL_ID, "content": MADE_UP_TEXT},
    ]
    wanted = {f"env.{env}.kind=agent": ("has agents that go on after a response", answered)}
    if tool_parser is not None:
        key = f"env.{env}.options.tool_parser={tool_parser}"
        wanted[key] = ("lets the policy call tools, whose results it must read", called)
    for key, (why, messages) in wanted.items():
        try:
            prompts.after(asked, messages, 2, {})
        except BadRequest as error:
            yield Problem(key=key, rule=f"{why}, and {error}", remedy=_TEMPLATE)


def _lists_tools(tokenizer: Tokenizer) -> bool:
    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": _TOOL, "description": MADE_UP_TEXT, "parameters": parameters}
    try:
        tools = [{"type": "function", "function": function}]
        question = [{"role": "user", "content": "?"}]
        return _TOOL in tokenizer.render(question, add_generation_prompt=True, tools=tools)
    except Exception:  # whatever a template raises
        return False
