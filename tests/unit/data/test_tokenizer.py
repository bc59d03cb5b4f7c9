from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer

from nemo_like.data.interface import Message
from nemo_like.data.tokenizer import Tokenizer, UnreadablePrompt
from nemo_like.models.end_tokens import shown_end_tokens
from scripts.demo_model.tiny_tokenizer import save_tokenizer, vocabulary


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer(checkpoint)


def test_the_vocabulary_is_padded_to_64_with_pad_and_eos_first():
    tokens = vocabulary()
    assert sorted(tokens.values()) == list(range(64))
    assert (tokens["<pad>"], tokens["<eos>"]) == (0, 1)


def test_special_ids_are_those_of_the_checkpoint(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 64)


def test_a_prompt_becomes_one_id_per_character_and_nothing_else(tokenizer):
    tokens = vocabulary()
    assert tokenizer.encode_prompt("21+43=") == [tokens[c] for c in "21+43="]


def test_prompts_encoded_together_are_those_encoded_one_by_one(tokenizer, chat):
    prompts = ["21+43=", "1", "a  b\n= 1"]
    assert tokenizer.encode_prompts(prompts, [()] * len(prompts)) == [
        tokenizer.encode_prompt(prompt) for prompt in prompts
    ]
    mixed = ["1+1", (Message("user", "1+1"),)]
    assert chat.encode_prompts(mixed, [()] * len(mixed)) == [chat.encode_prompt(prompt) for prompt in mixed]


def test_spaces_and_line_breaks_survive(tokenizer):
    text = "a  b\n= 1"
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text


def test_a_response_is_decoded_without_the_stop_token_that_ended_it(tokenizer):
    tokens = vocabulary()
    response = np.array([tokens["6"], tokens["4"], tokens["0"], 1], dtype=np.int32)
    assert tokenizer.decode_response(response, tokenizer.end_token_ids) == "640"
    assert tokenizer.decode_response(response, (1, 63)) == "640"
    assert tokenizer.decode_response([*response[:3], 63], (1, 63)) == "640"
    assert tokenizer.decode_response([*response[:3], 63], (1,)) == "640<unused17>"
    assert tokenizer.decode(response) == "640<eos>"


def test_stray_special_tokens_stay_visible(tokenizer):
    tokens = vocabulary()
    response = [tokens["6"], 0, tokens["4"], 1, tokens["0"], 63, 1]
    assert tokenizer.decode_response(response, (1,)) == "6<pad>4<eos>0<unused17>"


def test_an_empty_response_is_empty_text(tokenizer):
    assert tokenizer.decode_response([1], (1,)) == ""
    assert tokenizer.decode_response([], (1,)) == ""


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, None, (1,)),
        ([5, 1, 7], None, (1, 5, 7)),
        (9, {"eos_token_id": [5, 9]}, (1, 9, 5)),
        (None, {"text_config": {"eos_token_id": 6}}, (1, 6)),
    ],
)
def test_every_eos_of_the_checkpoints_files_ends_a_response(checkpoint, tmp_path, generation, config, ends):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps(config or {}))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.end_token_ids, tokenizer.eos_token_id) == (ends, 1)
    ids = [shown.split("(")[-1].strip(")") for shown in shown_end_tokens(tmp_path)]
    assert [*map(int, ids)] == [*ends]


def test_messages_need_a_chat_template(tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_prompt((Message("user", "1+1"),))


def test_messages_go_through_the_chat_template_up_to_the_assistant(checkpoint, tmp_path):
    with_template = AutoTokenizer.from_pretrained(checkpoint)
    with_template.chat_template = (
        "{% for m in messages %}{{ m.role }}-{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant-{% endif %}"
    )
    with_template.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode_prompt((Message("user", "1+1"), Message("assistant", "2"), Message("user", "2+2")))
    assert tokenizer.decode(ids) == "user-1+1\nassistant-2\nuser-2+2\nassistant-"


def test_a_directory_without_a_tokenizer_is_an_error_with_its_path(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer \(tokenizer_config.json\)"):
        Tokenizer(tmp_path)


def test_a_tokenizer_without_eos_is_refused(checkpoint, tmp_path):
    without_eos = AutoTokenizer.from_pretrained(checkpoint)
    without_eos.eos_token = None
    without_eos.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names an eos token"):
        Tokenizer(tmp_path)


# Like Qwen's: a turn ends with eos and a line break, and the next one opens.
TURNS = (
    "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)


@pytest.fixture(scope="module")
def chat(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 63]}))
    return Tokenizer(directory)


def test_an_observation_after_a_text_prompt_is_its_own_tokens(tokenizer):
    tokens = vocabulary()
    assert tokenizer.encode_observation("p", "42\n", "user", 1) == [tokens[c] for c in "42\n"]


@pytest.mark.parametrize(
    ("response", "between"),
    [
        ([11, 1], "\nt=42<eos>\na="),  # its eos is there already
        ([11, 63], "\nt=42<eos>\na="),  # another eos than the template's
        ([11, 12], "<eos>\nt=42<eos>\na="),  # a stop string ended it: the template's end of turn is missing
    ],
)
def test_an_observation_after_messages_is_framed_by_the_chat_template(chat, response, between):
    prompt = (Message("user", "12+30"),)
    added = chat.encode_observation(prompt, "42", "tool", response[-1])
    assert chat.decode([*added, 0]) == f"{between}<pad>"


def test_a_conversation_in_turns_reads_as_the_template_renders_it(chat):
    prompt = (Message("user", "12+30"),)
    response = [*chat.encode_prompt("calc 12+30"), 1]
    tokens = [*chat.encode_prompt(prompt), *response, *chat.encode_observation(prompt, "42", "tool", 1)]
    said = (*prompt, Message("assistant", "calc 12+30"), Message("tool", "42"))
    assert tokens == chat.encode_prompt(said)


def test_a_response_that_continues_the_prompts_last_message_reads_as_one_message(chat):
    begun = (Message("user", "12+30"), Message("assistant", "it is"))
    assert chat.decode(chat.encode_prompt(begun)) == "u=12+30<eos>\na=it is"
    response = [*chat.encode_text(" 42"), 1]
    tokens = [*chat.encode_prompt(begun), *response, *chat.encode_observation(begun, "no", "tool", 1)]
    assert tokens == chat.encode_prompt((begun[0], Message("assistant", "it is 42"), Message("tool", "no")))


def test_a_prompt_that_cannot_be_read_is_named_by_its_place(chat):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    called = (Message("user", "1"), Message("assistant", "", {"tool_calls": [call]}), Message("tool", "2"))
    with pytest.raises(UnreadablePrompt, match="leaves out the call of 'add' of message 2") as caught:
        chat.encode_prompts(["1", (Message("user", "1"),), called], [(), (), ()])
    assert caught.value.index == 2


def test_each_token_has_a_text_of_its_own(tokenizer):
    ids = [*tokenizer.encode_prompt("a =1"), tokenizer.eos_token_id]
    assert tokenizer.token_texts(ids) == ["a", " ", "=", "1", "<eos>"]
    assert "".join(tokenizer.token_texts(ids)) == "a =1<eos>"


def test_the_template_of_prompts_and_observations_gets_the_arguments_of_their_source(checkpoint, tmp_path):
    template = tmp_path / "thinking.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role[0] }}={{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a={{ '' if enable_thinking else '==' }}"
        "{% endif %}"
    )
    tokenizer, prompt = Tokenizer(checkpoint, template), (Message("user", "1+1"),)
    assert tokenizer.template_arguments == {"enable_thinking"}
    asked = tokenizer.encode_prompts([prompt, prompt], [(), ()], [{"enable_thinking": True}, {}])
    assert [tokenizer.decode(ids) for ids in asked] == ["u=1+1\na=", "u=1+1\na==="]
    added = tokenizer.encode_observation(prompt, "42", "tool", 12, {"enable_thinking": True})
    assert tokenizer.decode(added) == "\nt=42\na="
