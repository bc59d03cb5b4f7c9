"""A chat template that refuses a conversation, or leaves out what somebody says, is told before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.configuration import Config
from nemo_like.data.interface import Message, TaskPrompt
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.environments.options import EnvConfig
from nemo_like.preflight.conversations import ConversationCheck
from scripts.demo_model.tiny_tokenizer import save_tokenizer
from tests.unit.environments.configs import env_config

# As Gemma's: no system message, and user and assistant in turns.
ALTERNATING = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}
{%- endif -%}
<{{ m.role }}>{{ m.content | trim }}<eos>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
# As Phi's: roles that it does not know are left out.
SILENT = """\
{%- for m in messages if m.role in ('system', 'user', 'assistant') -%}
<{{ m.role }}>{{ m.content }}<eos>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
LISTS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
TOOL = {"type": "function", "function": {"name": "add_up", "description": "", "parameters": {}}}
ASKED = TaskPrompt((Message("user", "1+1"),), "2")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[[str], Tokenizer]:
    """``tokenizer(template)``"""
    save_tokenizer(tmp_path)

    def tokenizer(template: str) -> Tokenizer:
        file = tmp_path / "template.jinja"
        file.write_text(template, encoding="utf-8")
        return Tokenizer(tmp_path, file)

    return tokenizer


@pytest.fixture
def check(
    demo: Callable[..., Config], tokenizer: Callable[[str], Tokenizer]
) -> Callable[..., ConversationCheck]:
    """``check(template, environment, *arguments)``: of the demo's training source with these arguments."""

    def check(template: str, env: EnvConfig, *arguments: str) -> ConversationCheck:
        cfg = demo("data.train.use_chat_template=true", *arguments)
        return ConversationCheck("data.train", cfg.data.train[0], env, tokenizer(template))

    return check


Check = Callable[..., ConversationCheck]


def turns(role: str) -> EnvConfig:
    return replace(env_config("calculator"), max_turns=3, observation_role=role)


@pytest.mark.parametrize("role", ["tool", "system", "nobody"])
def test_a_role_that_the_template_refuses_is_told_with_one_that_works(check: Check, role: str) -> None:
    (problem,) = check(ALTERNATING, turns(role)).check_prompt("file:1", ASKED)
    assert str(problem) == (
        f"env.arithmetic.observation_role={role} does not go with the chat template, which refuses a "
        f"conversation of user, assistant, {role} (TemplateError: roles must alternate); it renders "
        "observations of the role user; set it to user, or name a template in data.chat_template that does"
    )


def test_an_observation_that_would_never_be_read_is_told(check: Check) -> None:
    (problem,) = check(SILENT, turns("tool")).check_prompt("file:1", ASKED)
    assert "which leaves out the text of a message of the role tool" in problem.rule
    assert problem.rule.endswith("it renders observations of the role user and system")
    assert problem.remedy.startswith("set it to user, or")


@pytest.mark.parametrize("template", [ALTERNATING, SILENT])
def test_a_role_that_is_rendered_is_noted(check: Check, template: str) -> None:
    checked = check(template, turns("user"))
    assert [*checked.check_prompt("file:1", ASKED)] == []
    assert [str(note) for note in checked.notes] == [
        "checked      env.arithmetic.observation_role=user: the chat template writes such an observation"
    ]


def test_one_turn_and_prompts_of_text_need_no_role(check: Check) -> None:
    one_turn = replace(turns("tool"), max_turns=1)
    assert [*check(ALTERNATING, one_turn).check_prompt("file:1", ASKED)] == []
    assert [*check(ALTERNATING, turns("tool")).check_prompt("file:1", TaskPrompt("1+1", "2"))] == []


def test_a_system_prompt_that_the_template_refuses_is_told_by_its_key(check: Check) -> None:
    refused = check(ALTERNATING, env_config("exact_match"), "data.train.system_prompt='be brief'")
    (problem,) = refused.check_made_up_prompt()
    assert problem.key == "data.train.system_prompt"
    assert (
        "makes messages of system, user of a made-up problem: the chat template refuses the messages"
        in problem.rule
    )
    assert "System role not supported" in problem.rule
    assert "write the text into data.train.prompt_template" in problem.remedy


def test_messages_of_a_record_that_are_left_out_are_told_once_by_file_and_line(check: Check) -> None:
    checked = check(SILENT, env_config("exact_match"))
    seen = TaskPrompt((Message("user", "1+1"), Message("assistant", "?"), Message("tool", "seven")), "2")
    (problem,) = checked.check_prompt("problems.jsonl:7", seen)
    told = "problems.jsonl:7: the chat template leaves out the content of message 3 (role 'tool')"
    assert problem.rule.startswith(f"cannot be used: {told}")
    assert [*checked.check_prompt("problems.jsonl:8", seen)] == []


def test_tools_of_which_nothing_tells_the_policy_are_told(check: Check) -> None:
    asked = replace(ASKED, tools=(TOOL,))
    (problem,) = check(SILENT, turns("user")).check_prompt("file:1", asked)
    assert "the chat template does not write add_up" in problem.rule
    assert "describe them in data.train.system_prompt" in problem.remedy
    assert [*check(LISTS + SILENT, turns("user")).check_prompt("file:1", asked)] == []
    told = (Message("system", "call add_up"), *ASKED.prompt)
    assert [*check(SILENT, turns("user")).check_prompt("file:1", replace(asked, prompt=told))] == []


def agent(tool_parser: str | None) -> EnvConfig:
    return env_config("agent", options={"agent": "own:agent", "tool_parser": tool_parser})


def test_an_agent_needs_a_template_that_writes_results_of_tools(check: Check) -> None:
    (problem,) = check(SILENT, agent("hermes")).check_agent()
    assert problem.key == "env.arithmetic.options.tool_parser=hermes"
    assert "the chat template leaves out the text of a message of the role tool" in problem.rule
    without = check(SILENT, agent(None))
    assert [*without.check_agent()] == []
    assert "the chat template does not describe tools" in str(*without.notes)
    (problem,) = check(ALTERNATING, agent("hermes")).check_agent()
    assert "roles must alternate" in problem.rule


def test_an_argument_that_the_template_does_not_read_is_refused(
    check: Callable[..., ConversationCheck],
) -> None:
    template = f"{SILENT}{{% if enable_thinking %}}<think>{{% endif %}}"
    given = "data.train.chat_template_kwargs={enable_thinking: true, thinking: true}"
    told = [str(one) for one in check(template, env_config("exact_match"), given).check_made_up_prompt()]
    assert told == [
        "data.train.chat_template_kwargs.thinking would change nothing: the chat template takes no argument "
        "of this name; it takes enable_thinking; leave it out, or name a template in data.chat_template that "
        "does"
    ]
