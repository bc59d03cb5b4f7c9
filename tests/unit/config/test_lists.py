from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.config.loader import to_yaml
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_config
from tests.unit.config.checkpoints import DEMO

TWO = "data.train=[{name: easy, digits: 1}, {name: hard, weight: 3, options: {size: 9}}]"


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, overrides)
    return str(caught.value)


def test_a_single_source_is_a_list_of_one_completed_from_the_default() -> None:
    data = load_config(DEMO, ["data.train.digits=1", "data.default.weight=2"]).data
    assert [source.digits for source in data.train] == [1]
    assert [source.digits for source in data.validation] == [2]
    assert data.train[0].weight == data.validation[0].weight == 2.0


def test_every_source_of_a_list_is_completed_from_the_default() -> None:
    easy, hard = load_config(DEMO, [TWO, "data.default.prompt_key=question"]).data.train
    assert (easy.name, easy.digits, easy.weight, easy.prompt_key) == ("easy", 1, 1.0, "question")
    assert (hard.name, hard.digits, hard.weight, hard.options) == ("hard", 2, 3.0, {"size": 9})


def test_a_later_list_replaces_a_source_and_a_later_source_a_list(tmp_path: Path) -> None:
    listed = tmp_path / "listed.yaml"
    listed.write_text(f"defaults: {DEMO}\ndata: {{train: [{{name: a}}, {{name: b}}]}}")
    assert [source.name for source in load_config(listed).data.train] == ["a", "b"]
    single = tmp_path / "single.yaml"
    single.write_text("defaults: listed\ndata: {train: {name: c}}")
    assert [source.name for source in load_config(single).data.train] == ["c"]


@pytest.mark.parametrize("overrides", [(), (TWO,), ("data.train=[{name: only}]",)])
def test_the_resolved_configuration_reads_back_equal(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    cfg = load_config(DEMO, overrides)
    path = tmp_path / "resolved.yaml"
    path.write_text(to_yaml(cfg))
    assert load_config(path) == cfg


def test_a_source_in_a_list_may_refer_to_other_keys() -> None:
    (source,) = load_config(DEMO, ["data.train=[{name: 'seed-${grpo.seed}'}]"]).data.train
    assert source.name == "seed-1"
    assert "data.train[0].name=${nowhere} cannot be resolved" in message("data.train=[{name: '${nowhere}'}]")


def test_a_misspelt_key_in_a_list_names_the_source_and_the_key_that_was_meant() -> None:
    assert "data.train[0].digts is not a key of the configuration; did you mean data.train" in message(
        "data.train=[{digts: 2}]"
    )


def test_a_key_within_a_list_cannot_be_set_alone() -> None:
    text = message(TWO, "data.train.digits=3")
    assert "data.train.digits cannot be set, because data.train is a list; give the whole list" in text


def test_null_is_an_empty_list() -> None:
    data = load_config(DEMO, ["data.validation=null"]).data
    assert data.validation == [] and len(data.train) == 1
    assert "data.validation=5 must be a group of keys or a list of such groups" in message(
        "data.validation=5"
    )
