"""Overrides of a dictionary become the arguments that a list would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.api.given_overrides import override_texts
from nemo_like.config.grammar import parse
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_config
from tests.unit.config.checkpoints import DEMO


def test_a_list_stays_as_it_is() -> None:
    assert override_texts(["a=1", "~b"]) == ("a=1", "~b")
    assert override_texts(()) == override_texts({}) == ()


def test_keys_may_be_nested_have_dots_or_both() -> None:
    lr = ("policy.optimizer.lr=1e-05",)
    assert override_texts({"policy.optimizer.lr": 1e-5}) == lr
    assert override_texts({"policy": {"optimizer": {"lr": 1e-5}}}) == lr
    assert override_texts({"policy.optimizer": {"lr": 1e-5}}) == lr
    assert override_texts({"a": {"b": 1, "c": {"d": 2}}, "a.b": 3}) == ("a.b=1", "a.c.d=2", "a.b=3")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 3, -1, 1e-5, 2.0, float("inf"), "fsdp", "", "null", "1", "a, b=[c]", "it's"),
        *([], {}, [1, None, "x"], [[1], {"a b": "null", "c": [None]}]),
    ],
)
def test_every_value_stands_for_itself(value: Any) -> None:
    (text,) = override_texts({"key": value})
    read = parse(text).value()
    assert (read, type(read)) == (value, type(value))


def test_a_configuration_gets_groups_lists_null_and_values() -> None:
    overrides = {
        "policy": "fsdp",
        "policy.optimizer": {"lr": 2e-6},
        "data": {"max_input_seq_length": None},
        "generation": {"stop_strings": ["</a>", "b, c"]},
        "logger.log_dir": Path("/some where"),
    }
    cfg = load_config(DEMO, override_texts(overrides))
    assert (cfg.policy.backend, cfg.policy.optimizer.lr) == ("fsdp", 2e-6)
    assert (cfg.data.max_input_seq_length, cfg.generation.stop_strings) == (None, ["</a>", "b, c"])
    assert cfg.logger.log_dir == "/some where"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("grpo.seed=2", "overrides is a text; give a list: ['grpo.seed=2']"),
        (["grpo.seed=2", 3], "overrides=['grpo.seed=2', 3] is neither a list of texts nor a dict; write"),
        (3, "overrides=3 is neither"),
        ({"a": {1: 2}}, "overrides: a.1 is no text, and keys are texts"),
        ({"a": {"b": [1, {2}]}}, "overrides: a.b[1] is set, which no configuration can hold; give a text"),
        ({"a": "${b}\\${c}"}, "has the characters \\${, which no configuration can hold"),
    ],
)
def test_what_no_argument_can_say_is_refused(overrides: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        override_texts(overrides)
    assert told in str(raised.value)
