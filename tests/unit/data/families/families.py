"""The families, one entry each. Templates are those that TRL ships, read from its package, or short ones
written down from a family's documentation; tokens are those of the family's public checkpoints."""
# ruff: noqa: RUF001 - DeepSeek's tokens have bars of full width

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.unit.data.families.tiny_vocabulary import byte_level, sentence_piece, with_bos

HERE = Path(__file__).parent

SYSTEM, QUESTION, RESULTS = "Be brief.", "What is 12+30, doubled?", ("42", "84")
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass(frozen=True)
class Family:
    """A family as its checkpoints are.

    ``template`` names a template of TRL's, or, with a dot, a file beside this one. ``responses`` are two
    calls of the tool and an answer, as the family's models write them, without what ends them.
    """

    name: str
    template: str
    vocabulary: Any  # of tiny_vocabulary, called with texts and special tokens
    special: Sequence[str]  # tokens
    eos: str  # of tokenizer_config.json
    ends: Sequence[str]  # of generation_config.json
    responses: tuple[str, str, str]
    role: str = "tool"  # of observations
    called_by: str | None = None  # the token that ends calls of tools; None: ``eos``
    system: bool = True  # whether it takes a system message
    bos: str | None = None
    plain: Sequence[str] = ()  # further tokens that a text is never cut within, which are not special
    swallows: Sequence[str] = ()  # special tokens that take the spaces after them
    replaced: tuple[tuple[str, str], ...] = ()  # in the template, such as the current date

    def source(self) -> str:
        """Return the text of the chat template."""
        file = HERE / self.template if "." in self.template else trl_templates() / f"{self.template}.jinja"
        text = file.read_text(encoding="utf-8")
        for old, new in self.replaced:
            assert old in text
            text = text.replace(old, new)
        return text

    def save(self, directory: Path) -> None:
        """Write a checkpoint directory without weights."""
        source = self.source()
        special = [*self.special, *self.plain]
        words = (source, SYSTEM, QUESTION, json.dumps(ADD), *self.responses)
        tokenizer = self.vocabulary(words, special)
        tokenizer.add_special_tokens(
            [
                AddedToken(one, special=True, normalized=False, rstrip=one in self.swallows)
                for one in self.special
            ]
        )
        tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in self.plain])
        if self.bos is not None:
            with_bos(tokenizer, self.bos)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=self.bos, eos_token=self.eos, chat_template=source
        ).save_pretrained(directory)
        ends = [tokenizer.token_to_id(end) for end in self.ends]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def trl_templates() -> Path:
    """Return the folder of TRL's chat templates. TRL itself is not imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations, "pip install -r requirements/dev.txt"
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def hermes(a: int, b: int) -> str:
    """Return a call as Hermes and Qwen write it."""
    return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def _calls(pattern: str, answer: str = "84.") -> tuple[str, str, str]:
    return pattern % (12, 30), pattern % (42, 42), answer


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN = {
    "vocabulary": partial(byte_level, digits=1),
    "special": _CHATML,
    "eos": "<|im_end|>",
    "ends": ("<|im_end|>", "<|endoftext|>"),
}
_GEMMA = {
    "vocabulary": partial(sentence_piece, prefix="never"),
    "special": ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    "bos": "<bos>",
    "eos": "<eos>",
    "ends": ("<eos>", "<end_of_turn>"),
    "called_by": "<end_of_turn>",
    "role": "user",
    "responses": _calls("```tool_code\nadd(a=%d, b=%d)\n```"),
}
_COHERE = {
    "vocabulary": byte_level,
    "special": (
        *("<PAD>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        *(
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
    ),
    "bos": "<BOS_TOKEN>",
    "eos": "<|END_OF_TURN_TOKEN|>",
    "ends": ("<|END_OF_TURN_TOKEN|>",),
    "role": "user",
}
_DEEPSEEK = {
    "vocabulary": byte_level,
    "special": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>"),
        *("<｜tool▁output▁end｜>", "<｜tool▁sep｜>"),
    ),
    "plain": ("<think>", "</think>"),
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "ends": ("<｜end▁of▁sentence｜>",),
    "responses": (
        *(
            "I add.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
            f'```json\n{{"a": {a}, "b": {b}}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            for a, b in ((12, 30), (42, 42))
        ),
        "84.",
    ),
}

FAMILIES = (
    Family(
        "qwen2_5",
        "qwen2_5",
        **_QWEN,
        plain=("<tool_call>", "</tool_call>"),
        responses=(hermes(12, 30), hermes(42, 42), "84."),
    ),
    Family(
        "qwen3",
        "qwen3",
        **_QWEN,
        plain=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        responses=(
            f"<think>\nI add.\n</think>\n\n{hermes(12, 30)}",
            f"<think>\nI double.\n</think>\n\n{hermes(42, 42)}",
            "<think>\nDone.\n</think>\n\n84.",
        ),
    ),
    Family(
        "llama3_1",
        "llama3_1",
        byte_level,
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        eos="<|eot_id|>",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        called_by="<|eom_id|>",
        responses=_calls('{"name": "add", "parameters": {"a": %d, "b": %d}}'),
    ),
    Family(
        "mistral",
        "mistral_v3.jinja",
        partial(sentence_piece, prefix="first"),
        (
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        eos="</s>",
        ends=("</s>",),
        bos="<s>",
        responses=_calls(
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": %d, "b": %d}, "id": "call00001"}]'
        ),
    ),
    Family("gemma2", "gemma", **_GEMMA, system=False),
    Family("gemma3", "gemma3", **_GEMMA),
    Family(
        "phi3",
        "phi3",
        partial(sentence_piece, prefix="always"),
        ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        eos="<|endoftext|>",
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        called_by="<|end|>",
        swallows=("<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        role="user",
        responses=_calls("add(%d, %d)"),
    ),
    Family("cohere_aya", "cohere", **_COHERE, responses=_calls("add(%d, %d)")),
    Family(
        "cohere2",
        "cohere2",
        **_COHERE,
        responses=tuple(f"{said}<|END_RESPONSE|>" for said in _calls("add(%d, %d)")),
    ),
    Family("deepseek_v3", "deepseekv3", **_DEEPSEEK),
    Family("deepseek_r1_distill", "deepseek_r1_distill", **_DEEPSEEK),
    Family(
        "glm4_5",
        "glm4moe",
        byte_level,
        (
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
            "<|observation|>",
        ),
        eos="<|endoftext|>",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        called_by="<|observation|>",
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        responses=_calls(
            "\n<think>I add.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%d</arg_value>\n"
            "<arg_key>b</arg_key>\n<arg_value>%d</arg_value>\n</tool_call>",
            "\n<think>Done.</think>\n84.",
        ),
    ),
    Family(
        "gpt_oss",
        "gptoss",
        byte_level,
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
            *("<|end|>", "<|message|>", "<|call|>"),
        ),
        eos="<|return|>",
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        called_by="<|call|>",
        role="user",
        responses=_calls(
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": %d, "b": %d}',
            "<|channel|>final<|message|>84.",
        ),
        replaced=(('strftime_now("%Y-%m-%d")', '"2025-08-05"'),),
    ),
    Family(
        "granite",
        "granite.jinja",
        byte_level,
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        eos="<|end_of_text|>",
        ends=("<|end_of_text|>",),
        responses=_calls('<|tool_call|>[{"name": "add", "arguments": {"a": %d, "b": %d}}]'),
    ),
    Family(
        "lfm2",
        "lfm2_v2",
        byte_level,
        (
            *("<|startoftext|>", *_CHATML, "<|tool_list_start|>", "<|tool_list_end|>"),
            *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
        ),
        eos="<|im_end|>",
        ends=("<|im_end|>",),
        bos="<|startoftext|>",
        responses=_calls("<|tool_call_start|>[add(a=%d, b=%d)]<|tool_call_end|>"),
    ),
    Family(
        "nemotron_3",
        "nemotron_3_nano",
        byte_level,
        ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        eos="<|im_end|>",
        ends=("</s>", "<|im_end|>"),
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        responses=_calls(
            "I add.\n</think>\n<tool_call>\n<function=add>\n<parameter=a>\n%d\n</parameter>\n<parameter=b>\n"
            "%d\n</parameter>\n</function>\n</tool_call>\n",
            "Done.\n</think>\n84.",
        ),
    ),
)
