"""Ten configurations in the shapes that people have of each framework convert, load and can be planned.

Of the models there are the config.json files alone, and of the data nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.configuration import load_config
from nemo_like.plan.machine_rules import Machine
from nemo_like.rules.rules import validate
from nemo_like_tools.conversion.their_files import read_theirs
from nemo_like_tools.conversion.translation import convert_configuration, framework_of
from nemo_like_tools.conversion.writing import conversion_yaml

EXAMPLES = Path(__file__).parent / "examples"
SCRIPT = Path(__file__).parents[3] / "scripts" / "convert_config.py"
FRAMEWORKS = {"verl": "verl", "nemo_rl": "NeMo-RL", "trl": "TRL"}
FILES = sorted(path for folder in FRAMEWORKS for path in (EXAMPLES / folder).iterdir())
# What the base of NeMo-RL's examples names and a conversion cannot know.
OF_THE_BASE = ("data.validation", "data.default.prompt_file")
# What is lost of an example, by key, with the remedy; nothing else is.
LOST: dict[str, dict[str, str]] = {
    "verl/dapo_8b.sh": {
        "data.truncation=left": "a prompt that is too long is left out, not cut",
    },
    "verl/multi_turn_tools.sh": {
        "actor_rollout_ref.rollout.name=sglang": "vLLM generates; leave it out",
        "actor_rollout_ref.rollout.multi_turn.enable=true": "mcp has the tools of MCP servers, agent runs",
    },
    "verl/ppo_critic_7b.sh": {
        "trainer.experiment_name=ppo_gsm8k_$(date +%m%d)": "add the argument trainer.experiment_name=VALUE",
    },
    "verl/reward_model_8b.sh": {
        "reward_model.enable=true": "choose `- env@env.NAME: reward_model`, see docs/how_to/reward_models.md",
    },
    "nemo_rl/fp8_reward_model.yaml": {
        "data.default.env_name=reward_model": "set data.default.env=reward_model",
        "env.reward_model.": "and name it in data.default.env",
    },
    "nemo_rl/sliding_puzzle.yaml": {
        "grpo.max_rollout_turns=50": "set env.NAME.max_turns",
        "data.default.env_name=sliding_puzzle_game": "set data.default.env=sliding_puzzle_game",
        "env.sliding_puzzle_game.": "and name it in data.default.env",
    },
    "nemo_rl/vision_3b.yaml": {
        "data.train=": "write its problems into JSON lines and name the file in path",
        "data.validation=": "write its problems into JSON lines and name the file in path",
        "data.default.env_name=clevr-cogent": "set data.default.env=clevr-cogent",
        "env.clevr-cogent.": "and name it in data.default.env",
    },
    "trl/own_rewards_cispo.yaml": {
        "reward_funcs=": "my_rewards.brevity is Python of yours, and math judges instead; write it",
    },
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in that has the models' config.json files where a conversion expects the models."""
    (tmp_path / "models").symlink_to(EXAMPLES / "models")
    for name, value in {"WANDB_API_KEY": "0" * 40, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_ten_of_each_framework() -> None:
    counts = {folder: len([path for path in FILES if path.parent.name == folder]) for folder in FRAMEWORKS}
    # A file of TRL belongs to the script beside it.
    assert counts == {"verl": 10, "nemo_rl": 10, "trl": 11}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_example_converts_and_can_be_planned(path: Path, models: Path) -> None:
    theirs, unresolved = read_theirs(path, [])
    framework = framework_of(theirs.tree, None, str(path))
    assert framework.name == FRAMEWORKS[path.parent.name]
    conversion = convert_configuration(framework, theirs, str(path))
    output = models / "mine.yaml"
    output.write_text(conversion_yaml(conversion, framework.name, path.name))
    validate(load_config(output), Machine.another)
    expected = LOST.get(f"{path.parent.name}/{path.name}", {})
    problems = [*unresolved, *conversion.lost]
    for key, text in expected.items():
        assert any(problem.key.startswith(key) and text in str(problem) for problem in problems), key
    known = (*expected, *(OF_THE_BASE if path.parent.name == "nemo_rl" else ()))
    assert not [str(problem) for problem in problems if not problem.key.startswith(known)]


@pytest.mark.parametrize(
    "name", ["verl/gspo_8b.sh", "nemo_rl/moe_megatron_30b.yaml", "trl/server_two_nodes.sh"]
)
def test_the_command_ends_with_what_a_dry_run_finds(name: str, models: Path) -> None:
    output = models / "mine.yaml"
    command = [sys.executable, str(SCRIPT), str(EXAMPLES / name), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    planned = f"{output} loads and can be planned: python run_grpo.py --config {output} --dry-run"
    assert planned in done.stderr
    assert "policy.model_name: weights and tokenizer of models/" in done.stderr.partition(planned)[2]
    assert output.read_text().partition("defaults:")[0].count("Taken for granted") == 1
