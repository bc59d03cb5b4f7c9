"""Switches and arguments from before there were kinds of losses are read as today's keys, with a note."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_like.algorithms.loss_kind import OwnLossConfig
from nemo_like.algorithms.options import LossConfig
from nemo_like.config.earlier_keys import note
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from tests.unit.config.checkpoints import DEMO

EARLIER_RUN = Path(__file__).parents[1] / "config" / "earlier_runs" / "grpo_arithmetic_cpu.yaml"
Keys = Mapping[str, Any]
Load = Callable[[Keys, Path], Config]


@pytest.fixture(autouse=True)
def not_noted_yet() -> None:
    note.cache_clear()  # a note is written once in the life of a process


def arguments_of(keys: Keys) -> Iterator[str]:
    for name, value in keys.items():
        if isinstance(value, Mapping):
            yield from (f"++loss_fn.{name}.{inner}={json.dumps(one)}" for inner, one in value.items())
        else:
            yield f"loss_fn.{name}={json.dumps(value)}"


@cache
def demo_with(*arguments: str) -> LossConfig:
    return load_config(DEMO, arguments).loss_fn


def by_arguments(keys: Keys, path: Path) -> Config:
    return load_config(DEMO, [*arguments_of(keys)])


def by_a_file(keys: Keys, path: Path) -> Config:
    """Keys over the demo's, which come from its defaults."""
    path.write_text(yaml.safe_dump({"defaults": ["grpo_arithmetic_cpu"], "loss_fn": dict(keys)}))
    return load_config(path)


def by_what_a_run_left(keys: Keys, path: Path) -> Config:
    """A whole configuration, with every key that any loss had then."""
    whole = yaml.safe_load(EARLIER_RUN.read_text())
    path.write_text(yaml.safe_dump({**whole, "loss_fn": {**whole["loss_fn"], **keys}}))
    return load_config(path)


DIVERGENCE = {"divergence": "jensen_shannon", "weight": 0.5, "reward_weight": 1.0, "beta": 0.3, "top_k": 5}
SWITCHES = {
    "disable_ppo_ratio": "reinforce",
    "use_cispo": "cispo",
    "sequence_level_importance_ratios": "gspo",
}
CASES: dict[str, tuple[Keys, Keys, list[str]]] = {
    **{
        switch: ({switch: True}, {"kind": kind}, [f"loss_fn.{switch}=true is now loss_fn.kind={kind}"])
        for switch, kind in SWITCHES.items()
    },
    "GSPO-token": (
        {"kind": "gspo_token", "sequence_level_importance_ratios": True, "ratio_clip_c": 3.0},
        {"kind": "gspo_token", "ratio_clip_c": 3.0},
        ["loss_fn.sequence_level_importance_ratios=true is now a part of loss_fn.kind=gspo_token"],
    ),
    "SAPO": ({"kind": "sapo"}, {"kind": "sapo"}, []),
    "SAPO with arguments": (
        {"kind": "sapo", "arguments": {"tau_pos": 2.0, "tau_neg": 3.0}},
        {"kind": "sapo", "tau_pos": 2.0, "tau_neg": 3.0},
        [f"loss_fn.arguments.{name} is now loss_fn.{name}" for name in ("tau_pos", "tau_neg")],
    ),
    "distillation with arguments": (
        {"kind": "distillation", "arguments": DIVERGENCE},
        {"kind": "distillation", **DIVERGENCE},
        [f"loss_fn.arguments.{name} is now loss_fn.{name}" for name in DIVERGENCE],
    ),
    **{
        f"distillation with {switch}": (
            {"kind": "distillation", switch: True},
            {"kind": "distillation", "policy_loss": kind},
            [f"loss_fn.{switch}=true is now loss_fn.policy_loss={kind}"],
        )
        for switch, kind in SWITCHES.items()
    },
}


def told_of_the_loss(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Notes about keys of the loss, without those of keys that the earlier run did not have yet."""
    told = capsys.readouterr().err.splitlines()
    return [line for line in told if "loss_fn" in line and "is newer than this file" not in line]


@pytest.mark.parametrize("load", [by_arguments, by_a_file, by_what_a_run_left])
@pytest.mark.parametrize(("earlier", "today", "notes"), CASES.values(), ids=CASES)
def test_what_was_written_earlier_is_the_section_of_todays_keys_with_a_note_of_both(
    earlier: Keys,
    today: Keys,
    notes: list[str],
    load: Load,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = demo_with(*arguments_of(today))
    assert "loss_fn" not in capsys.readouterr().err
    assert load(earlier, tmp_path / "earlier.yaml").loss_fn == expected
    assert sorted(told_of_the_loss(capsys)) == sorted(f"note: {sentence}" for sentence in notes)


def test_a_note_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for load in (by_arguments, by_a_file, by_a_file):
        load({"use_cispo": True}, tmp_path / "earlier.yaml")
    assert capsys.readouterr().err.count("loss_fn.use_cispo=true is now loss_fn.kind=cispo") == 1


@pytest.mark.parametrize("load", [by_arguments, by_a_file, by_what_a_run_left])
def test_switches_that_are_off_say_nothing(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = dict.fromkeys(SWITCHES, False)
    assert load(off, tmp_path / "earlier.yaml").loss_fn == demo_with()
    assert not told_of_the_loss(capsys)


@pytest.mark.parametrize("load", [by_arguments, by_a_file, by_what_a_run_left])
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"use_cispo": True, "disable_ppo_ratio": True},
            "loss_fn.use_cispo=True is no key of loss_fn.kind=reinforce",
        ),
        ({"kind": "sapo", "use_cispo": True}, "loss_fn.use_cispo=True is no key of loss_fn.kind=sapo"),
        (
            {"kind": "gspo_token", "disable_ppo_ratio": True},
            "loss_fn.disable_ppo_ratio=True is no key of loss_fn.kind=gspo_token",
        ),
        (
            {"kind": "distillation", "use_cispo": True, "sequence_level_importance_ratios": True},
            "loss_fn.sequence_level_importance_ratios=True is no key of loss_fn.kind=distillation",
        ),
        ({"use_cispo": 1}, "loss_fn.use_cispo=1 must be true or false"),
    ],
)
def test_switches_that_excluded_each_other_or_the_kind_are_still_refused(
    keys: Keys, said: str, load: Load, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(keys, tmp_path / "earlier.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize("load", [by_arguments, by_a_file, by_what_a_run_left])
def test_a_function_of_ones_own_keeps_its_arguments_and_may_have_one_ratio_per_sample(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"kind": "mine:loss", "arguments": {"tau": 2.0}, "sequence_level_importance_ratios": True}
    loss = load(keys, tmp_path / "earlier.yaml").loss_fn
    assert isinstance(loss, OwnLossConfig)
    assert (loss.arguments, loss.sequence_level_importance_ratios) == ({"tau": 2.0}, True)
    assert not told_of_the_loss(capsys)


@pytest.mark.parametrize(
    ("in_file", "argument", "today"),
    [
        ({"use_cispo": True}, "loss_fn.use_cispo=false", {}),
        ({"use_cispo": True}, "loss_fn.ratio_clip_max=0.3", {"kind": "cispo", "ratio_clip_max": 0.3}),
        (
            {"kind": "sapo", "arguments": {"tau_pos": 2.0}},
            "loss_fn.arguments.tau_pos=3.0",
            {"kind": "sapo", "tau_pos": 3.0},
        ),
        (
            {"kind": "sapo", "arguments": {"tau_pos": 2.0}},
            "loss_fn.tau_pos=3.0",
            {"kind": "sapo", "tau_pos": 3.0},
        ),
    ],
)
def test_an_argument_is_over_what_a_file_says_by_an_earlier_key(
    in_file: Keys, argument: str, today: Keys, tmp_path: Path
) -> None:
    path = tmp_path / "earlier.yaml"
    by_a_file(in_file, path)
    assert load_config(path, [argument]).loss_fn == demo_with(*arguments_of(today))
