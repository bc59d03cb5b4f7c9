from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.interface import Message
from nemo_like.data.special_tokens import SpecialTokens
from nemo_like.data.tokenizer import Tokenizer
from scripts.demo_model.tiny_tokenizer import vocabulary
from tests.unit.data.tokenizers_at_tiny_size import BOS, BOS_ID, with_post_processor

IDS = vocabulary((BOS,))
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}="
EOS_ID = 1


def ids(text: str) -> list[int]:
    return [IDS[character] for character in text]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_post_processor(tmp_path_factory.mktemp("llama"), f"{BOS} $A", TEMPLATE)


@pytest.fixture(scope="module")
def with_both(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_post_processor(tmp_path_factory.mktemp("both"), f"{BOS} $A <eos>", TEMPLATE)


def test_a_text_prompt_gets_the_bos_that_its_tokenizer_adds_and_never_two(llama: Tokenizer) -> None:
    assert llama.encode_prompt("1+1=") == [BOS_ID, *ids("1+1=")]
    assert llama.encode_prompt(f"{BOS}1+1=") == [BOS_ID, *ids("1+1=")]
    assert llama.encode_prompt(f"1{BOS}") == [BOS_ID, *ids("1"), BOS_ID]


def test_an_eos_that_the_tokenizer_appends_does_not_stand_before_the_response(with_both: Tokenizer) -> None:
    assert with_both.encode_prompt("1+1=") == [BOS_ID, *ids("1+1=")]
    assert with_both.encode_prompt(f"{BOS}1+1=") == [BOS_ID, *ids("1+1=")]
    # One that the prompt itself ends with was written there.
    assert with_both.encode_prompt("1<eos>") == [BOS_ID, *ids("1"), EOS_ID]


def test_an_eos_alone_is_left_out(tmp_path: Path) -> None:
    tokenizer = with_post_processor(tmp_path, "$A <eos>")
    assert tokenizer.encode_prompts(["1+1=", ""], [(), ()]) == [ids("1+1="), []]


def test_what_a_template_renders_has_the_special_tokens_that_it_writes(with_both: Tokenizer) -> None:
    prompts = [(Message("user", "1+1"),), f"{BOS}2", "3"]
    assert with_both.encode_prompts(prompts, [(), (), ()]) == [
        [BOS_ID, *ids("1+1=")],
        [BOS_ID, *ids("2")],
        [BOS_ID, *ids("3")],
    ]
    assert with_both.encode_text("1") == ids("1")


def test_a_server_gets_a_text_without_the_tokens_that_it_adds_itself(llama: Tokenizer) -> None:
    assert llama.for_server(f"{BOS}1+1=") == "1+1="
    assert llama.for_server("1+1=") == "1+1="


def test_no_prompts_are_no_tokens(llama: Tokenizer) -> None:
    assert llama.encode_prompts([], []) == []


@given(
    before=st.lists(st.integers(100, 102), max_size=2),
    after=st.lists(st.integers(200, 202), max_size=2),
    own=st.lists(st.integers(0, 9), max_size=5),
)
def test_special_tokens_are_there_once_however_often_they_are_put(
    before: list[int], after: list[int], own: list[int]
) -> None:
    around = SpecialTokens(tuple(before), tuple(after), "")
    assert around.prompt(own) == [*before, *own]
    assert around.prompt(around.prompt(own)) == around.prompt(own)
    assert around.whole_text(own) == [*before, *own, *after]
    assert around.whole_text(around.whole_text(own)) == around.whole_text(own)
