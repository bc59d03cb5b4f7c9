from __future__ import annotations

import pytest

from nemo_like.data.datasets import build_sources
from nemo_like.data.interface import Message, Prompt, SourceReport, TaskPrompt
from nemo_like.data.mixture import MixedDataset, Selection, TemplatedDataset, short_enough
from nemo_like.data.options import DatasetConfig


class Listed:
    """Problems as they are listed."""

    def __init__(self, *prompts: Prompt) -> None:
        self._examples = [TaskPrompt(prompt, "42", {"level": 1}) for prompt in prompts]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> TaskPrompt:
        return self._examples[index]


def source(**changes: object) -> DatasetConfig:
    values = {
        "name": None,
        "kind": "arithmetic",
        "path": None,
        "split": None,
        "subset": None,
        "prompt_key": "prompt",
        "answer_key": "answer",
        "images_key": None,
        "digits": 1,
        "options": {},
        "weight": 1.0,
        "prompt_template": None,
        "use_chat_template": False,
        "chat_template_kwargs": {},
        "system_prompt": None,
        "env": "sums",
        "difficulty_key": None,
        "columns": {},
    }
    return DatasetConfig(**{**values, **changes})  # type: ignore[arg-type]


def templated(prompt: Prompt, **changes: object) -> Prompt:
    return TemplatedDataset(Listed(prompt), source(**changes))[0].prompt


def test_a_plain_source_only_names_its_judge() -> None:
    example = TemplatedDataset(Listed("1+1="), source())[0]
    assert example == TaskPrompt("1+1=", "42", {"level": 1}, env="sums")


def test_a_template_replaces_its_place_and_no_other_brace() -> None:
    template = "Simplify {prompt} into \\boxed{x} or {y}."
    assert templated("\\frac{1}{2}", prompt_template=template) == (
        "Simplify \\frac{1}{2} into \\boxed{x} or {y}."
    )


def test_a_chat_source_makes_messages_of_the_templated_text() -> None:
    chat = {"use_chat_template": True, "prompt_template": "Q: {prompt}", "system_prompt": "Be brief."}
    assert templated("1+1", **chat) == (Message("system", "Be brief."), Message("user", "Q: 1+1"))


def test_messages_stay_as_they_are_but_for_a_missing_system_message() -> None:
    chat = {"use_chat_template": True, "prompt_template": "Q: {prompt}", "system_prompt": "Be brief."}
    user, own = Message("user", "1+1"), Message("system", "Be long.")
    assert templated((user,), **chat) == (Message("system", "Be brief."), user)
    assert templated((own, user), **chat) == (own, user)


def test_indices_count_through_all_sources() -> None:
    mixed = MixedDataset([Listed("a", "b"), Listed("c"), Listed("d", "e")])
    assert [mixed[index].prompt for index in range(len(mixed))] == ["a", "b", "c", "d", "e"]
    for index in (-1, 5):
        with pytest.raises(IndexError, match=f"no problem {index} in 3 sources of 5"):
            mixed[index]


def test_a_selection_renumbers_what_it_keeps() -> None:
    selection = Selection(Listed("a", "b", "c"), [2, 0])
    assert [selection[index].prompt for index in range(len(selection))] == ["c", "a"]
    with pytest.raises(IndexError, match="no problem 2 in a selection of 2"):
        selection[2]


def character_lengths(examples: list[TaskPrompt]) -> list[int]:
    return [len(example.prompt) for example in examples]


def test_a_prompt_of_no_tokens_is_an_error_that_shows_it() -> None:
    with pytest.raises(ValueError, match="makes no token of the prompt ''"):
        short_enough(Listed("ab", ""), character_lengths, 3)


def test_prompts_up_to_the_limit_are_short_enough() -> None:
    assert short_enough(Listed("ab", "abc", "abcd", "a"), character_lengths, 3) == [0, 1, 3]


def test_lengths_are_asked_for_in_portions() -> None:
    portions = []

    def lengths(examples: list[TaskPrompt]) -> list[int]:
        portions.append(len(examples))
        return character_lengths(examples)

    assert len(short_enough(Listed(*["ab"] * 2100), lengths, 5)) == 2100
    assert portions == [1000, 1000, 100]


def test_sources_say_how_many_problems_they_have_and_how_many_were_too_long() -> None:
    def lengths(examples: list[TaskPrompt]) -> list[int]:
        # Those that add to 0 or from 0 are too long.
        return [9 if "0" in example.prompt else 1 for example in examples]

    built = build_sources(
        [source(), source(name="again")], "train", prompt_lengths=lengths, max_prompt_tokens=5
    )
    first, second = built.reports
    assert (first.name, second.name) == ("arithmetic", "again")
    assert first.num_prompts == second.num_prompts > 0
    assert len(built.prompts) == 2 * first.num_prompts
    assert all("0" not in built.prompts[index].prompt for index in range(len(built.prompts)))
    whole = build_sources([source()], "train", prompt_lengths=lengths, max_prompt_tokens=9)
    num_prompts = first.num_prompts + first.num_too_long
    (report,) = whole.reports
    assert report == SourceReport(
        name="arithmetic", num_prompts=num_prompts, num_too_long=0, digest=first.digest
    )


def test_a_source_without_any_short_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts of arithmetic are longer than 3 tokens"):
        build_sources([source()], "train", prompt_lengths=character_lengths, max_prompt_tokens=3)
