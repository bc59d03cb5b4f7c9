"""Files that build on each other, and the origins of their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.config.other_frameworks import Missing, NoEffect, table_of
from nemo_like.config.problems import ConfigError
from nemo_like_tools.conversion.inheritance import Origins, inherited
from nemo_like_tools.conversion.their_files import read_theirs
from nemo_like_tools.conversion.translation import convert_configuration, framework_of
from nemo_like_tools.conversion.writing import conversion_yaml


def write(tmp_path: Path, **texts: str) -> None:
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)


def test_a_comment_names_the_file_in_which_a_value_stands(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 8, seed: 3}\n",
        middle="defaults: base.yaml\ngrpo: {num_generations_per_prompt: 4}\n",
        mine="defaults: middle.yaml\ngrpo: {seed: 5}\npolicy: {model_name: a/b}\n",
    )
    path = tmp_path / "mine.yaml"
    theirs, _ = read_theirs(path, ["grpo.max_num_steps=7"])
    conversion = convert_configuration(framework_of(theirs.tree, None, "mine"), theirs, "mine")
    text = conversion_yaml(conversion, "NeMo-RL", "mine.yaml")
    assert "num_prompts_per_step: 16 # grpo.num_prompts_per_step in base.yaml\n" in text
    assert "num_generations_per_prompt: 4 # grpo.num_generations_per_prompt in middle.yaml\n" in text
    assert "seed: 5 # grpo.seed\n" in text
    assert "max_num_steps: 7 # grpo.max_num_steps\n" in text


def test_a_group_comes_from_the_highest_file_that_has_a_part_of_it() -> None:
    origins = Origins()
    origins.add("by default", ["data.train.path", "data.shuffle"])
    origins.add("in a.yaml", ["data.train.split"])
    assert origins("data.train") == "in a.yaml"
    assert origins("data.shuffle") == "by default"
    assert origins("data.other") == ""


def test_nemo_rls_base_is_built_in_where_it_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, mine="defaults: ../../grpo_math_1B.yaml\ngrpo: {num_prompts_per_step: 64}\n")
    origins = Origins()
    cfg = inherited(tmp_path / "mine.yaml", origins)
    assert (cfg.grpo.num_prompts_per_step, cfg.grpo.num_generations_per_prompt) == (64, 16)
    assert cfg.policy.generation.max_new_tokens == 512
    assert origins("grpo.num_generations_per_prompt") == "by default"
    assert origins("grpo.num_prompts_per_step") == ""


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"mine": "defaults: other.yaml\n"}, "other.yaml is not a file"),
        ({"mine": "defaults: mine.yaml\n"}, "is reached from itself by its defaults"),
    ],
)
def test_a_missing_file_and_a_circle_are_named(tmp_path: Path, texts: dict[str, str], expected: str) -> None:
    write(tmp_path, **texts)
    with pytest.raises(ConfigError, match=expected):
        inherited((tmp_path / "mine.yaml").resolve(), Origins())


@pytest.mark.parametrize("name", ["nemo_rl", "trl"])
def test_every_default_is_of_a_key_that_the_table_leads_somewhere(name: str) -> None:
    framework = table_of(name)
    nowhere = [key for key in framework.defaults if isinstance(framework.keys.get(key), NoEffect | Missing)]
    assert not [key for key in nowhere if key != "use_vllm"]  # which other conversions read
