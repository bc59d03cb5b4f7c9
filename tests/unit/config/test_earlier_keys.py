"""Files of an earlier version: what runs of then left in ``config.yaml`` loads as what it is now."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_like.config.earlier_keys import with_todays_keys
from nemo_like.config.loader import to_dict
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_config

CONFIGS = Path(__file__).parents[3] / "configs"
EARLIER = sorted((Path(__file__).parent / "earlier_runs").iterdir())


@pytest.mark.parametrize("config", EARLIER, ids=lambda path: path.stem)
def test_the_configuration_that_an_earlier_run_left_is_that_of_such_a_run_now(config: Path) -> None:
    assert to_dict(load_config(config)) == to_dict(load_config(CONFIGS / config.name))


def test_what_is_read_otherwise_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes((Path(__file__).parent / "earlier_runs" / "distill_arithmetic_cpu.yaml").read_bytes())
    for _ in range(2):
        load_config(path)
    told = capsys.readouterr().err
    assert (
        told.count(f"note: {path}: teacher.lora of an earlier version is left out: a teacher does not") == 1
    )
    assert told.count("note: ") == 16


def test_a_key_with_another_name_now_keeps_its_value_unless_the_file_has_that_name_too() -> None:
    earlier = {"cluster": {"num_gpus": 4, "num_nodes": 2}}
    assert with_todays_keys(earlier, "x.yaml") == {"cluster": {"gpus_per_node": 4, "num_nodes": 2}}
    both = {"cluster": {"num_gpus": 4, "gpus_per_node": 8}}
    assert with_todays_keys(both, "y.yaml") == {"cluster": {"gpus_per_node": 8}}
    assert earlier == {"cluster": {"num_gpus": 4, "num_nodes": 2}}


def test_an_argument_by_an_earlier_name_is_an_error_that_names_todays() -> None:
    arguments = ["teacher=default", "teacher.model_name=here", "teacher.optimizer.lr=1"]
    with pytest.raises(
        ConfigError, match=r"earlier version's teacher\.optimizer has no effect here: a teach"
    ):
        load_config(CONFIGS / "grpo_arithmetic_cpu.yaml", arguments)


def test_the_fixtures_are_whole_configurations() -> None:
    assert len(EARLIER) == 5
    for path in EARLIER:
        assert "defaults" not in yaml.safe_load(path.read_text())
