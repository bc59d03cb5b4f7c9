"""Which tokens a reward model reads; the model itself is not loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from nemo_like.data.interface import Message, Prompt
from nemo_like.data.messages import conversation_of
from nemo_like.environments.registry import options_of
from nemo_like.environments.reward_model import ConversationEncoder
from nemo_like.environments.shared_options import ModelOptions
from scripts.demo_model.tool_tokenizer import save_tokenizer as save_tool_tokenizer
from tests.unit.data.tokenizers_at_tiny_size import BOS, BOS_ID, save_with_post_processor
from tests.unit.environments.configs import env_config

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CALLED = conversation_of(
    [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
    ]
)


def encoder(directory: Path) -> ConversationEncoder:
    LlamaConfig(num_labels=1, architectures=["LlamaForSequenceClassification"]).save_pretrained(directory)
    options = options_of(env_config("reward_model", options={"model_name": str(directory)}))
    assert isinstance(options, ModelOptions)
    return ConversationEncoder(options)


def text(encoder: ConversationEncoder, prompt: Prompt, response: str) -> str:
    return encoder.tokenizer.decode(encoder.encode(prompt, response))


def test_a_text_has_the_special_tokens_of_the_models_tokenizer_once(tmp_path: Path) -> None:
    save_with_post_processor(tmp_path, f"{BOS} $A <eos>")
    read = encoder(tmp_path)
    own = read.tokenizer("1+1=2", add_special_tokens=False)["input_ids"]
    for prompt in ("1+1=", f"{BOS}1+1="):
        assert read.encode(prompt, "2") == [BOS_ID, *own, 1]


def test_the_template_gets_whole_messages_and_a_response_continues_the_last(tmp_path: Path) -> None:
    save_tool_tokenizer(tmp_path)
    read = encoder(tmp_path)
    called = '? 1+2?\n> <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos>\n= 3\n> '
    assert text(read, CALLED, "3") == f"{called}3<eos>\n"
    assert text(read, (*CALLED, Message("assistant", "It is")), " 3") == f"{called}It is 3<eos>\n"


def test_calls_that_the_models_template_leaves_out_are_refused(tmp_path: Path) -> None:
    save_tool_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    reason = r"leaves out the call of 'add' of message 2 .* in chat_template.jinja in "
    with pytest.raises(ValueError, match=reason):
        encoder(tmp_path).rendered(CALLED, "3")
