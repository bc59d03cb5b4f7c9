"""What models of real families read of a conversation with two calls of a tool: golden tokens, looked at by
hand.

``python -m tests.unit.data.families.transcript`` writes the golden files anew.
"""
# ruff: noqa: RUF001 - DeepSeek's tokens have bars of full width

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.data.interface import Message
from nemo_like.data.template_turns import TurnError, rendered_roles
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.generation.interface import Response
from nemo_like.rollout.agents.agent_prompts import AgentPrompts, plain_messages
from nemo_like.rollout.agents.agent_session import AgentCall
from tests.unit.data.families.families import ADD, FAMILIES, Family, trl_templates
from tests.unit.data.families.transcript import GOLDEN, transcript

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The directories of the families whose transcript has been made, by name."""
    directory = tmp_path_factory.mktemp("families")
    return {family.name: directory / family.name for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_two_turns_with_a_tool_are_the_golden_tokens(family: Family, checkpoints: Mapping[str, Path]) -> None:
    golden = (GOLDEN / f"{family.name}.txt").read_text(encoding="utf-8")
    assert transcript(family, checkpoints[family.name]) + "\n" == golden


def test_the_golden_files_are_those_of_the_families() -> None:
    assert sorted(file.stem for file in GOLDEN.iterdir()) == sorted(BY_NAME)


def tokenizer_of(name: str, directory: Path) -> Tokenizer:
    BY_NAME[name].save(directory)
    return Tokenizer(directory)


def test_spaces_that_the_end_of_a_turn_takes_are_no_tokens(tmp_path: Path) -> None:
    """Phi's <|end|> takes the line break after it, and so it does where a text begins with that break."""
    tokenizer = tokenizer_of("phi3", tmp_path)
    end = tokenizer.encode_text("<|end|>")[-1]
    asked = (Message("user", "1+1"),)
    observed = tokenizer.encode_observation(asked, "42", "user", end)
    whole = tokenizer.encode_text("<|end|>\n<|user|>\n42<|end|>\n<|assistant|>\n")
    assert observed == whole[whole.index(end) + 1 :]


def test_a_text_after_a_response_begins_with_no_space_that_nobody_wrote(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("mistral", tmp_path)
    assert tokenizer.token_texts(tokenizer.encode_text("42"))[0] == " "
    last = tokenizer.encode_text("+")[-1]
    for before in (last, tokenizer.eos_token_id):
        assert tokenizer.token_texts(tokenizer.encode_observation("1+", "42", "user", before)) == ["4", "2"]


ARGUMENTS = '{"a": 12, "b": 30}'
CALLING = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
SESSION: list[dict[str, Any]] = [
    {"role": "user", "content": "12+30?"},
    {"role": "assistant", "content": None, "tool_calls": [CALLING]},
    {"role": "tool", "tool_call_id": "abc123def", "content": "42"},
    {"role": "assistant", "content": None, "tool_calls": [CALLING]},
    {"role": "tool", "tool_call_id": "abc123def", "content": "seven"},
]
# What an agent's messages add after a response that ends as the family's calls do.
ADDED = {
    "qwen2_5": "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": '[TOOL_RESULTS] {"content": 42, "call_id": "abc123def"}[/TOOL_RESULTS]',
    "glm4_5": "\n<tool_response>\n42\n</tool_response><|assistant|>",
    "gpt_oss": '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|>'
    "<|start|>assistant",
    "deepseek_v3": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>42<｜tool▁output▁end｜>"
    "<｜tool▁outputs▁end｜>",
}


@pytest.mark.parametrize("name", ADDED)
def test_an_agents_result_of_a_tool_is_written_as_the_family_writes_it(name: str, tmp_path: Path) -> None:
    prompts = AgentPrompts(tokenizer_of(name, tmp_path))
    family, messages = BY_NAME[name], plain_messages(SESSION)
    ended = prompts.encode(family.called_by or family.eos)[-1:]
    call = AgentCall(
        0,
        None,
        (),
        "",
        Response(np.array(ended, np.int32), np.zeros(1, np.float32), is_truncated=False),
        "",
        0,
    )
    template = {"tools": [ADD]}
    assert prompts.after(call, messages[:3], 2, template) == ADDED[name]
    assert "seven" in prompts.after(call, messages, 4, template)


# The roles of observations that a template of TRL's renders, where they are not user, tool and system.
ROLES = {
    **dict.fromkeys(("cohere", "cohere2", "gemma", "gemma3", "gptoss"), ("user",)),
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3", "qwen3_vl"), ("user", "tool")),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"), ("user", "tool")),
    **dict.fromkeys(("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), ("user", "system")),
    **dict.fromkeys(("phi3", "phi3_5"), ("user", "system")),
    # Their content is a list of parts, never text.
    **dict.fromkeys(("idefics3", "llava_next", "smolvlm"), ()),
}


def test_every_template_that_trl_ships_renders_observations_or_is_refused(tmp_path: Path) -> None:
    BY_NAME["llama3_1"].save(tmp_path)
    files = [one for one in sorted(trl_templates().glob("*.jinja")) if not one.stem.endswith("_training")]
    assert len(files) >= 40
    for file in files:
        tokenizer = Tokenizer(tmp_path, file)
        roles = tuple(rendered_roles(tokenizer.render))
        assert roles == ROLES.get(file.stem, ("user", "tool", "system")), file.stem
        asked = (Message("user", "1+1"),)
        for role in {"user", "tool", "system"} - {*roles}:
            with pytest.raises(TurnError, match="it renders observations of the role"):
                tokenizer.encode_observation(asked, "42", role, tokenizer.eos_token_id)
