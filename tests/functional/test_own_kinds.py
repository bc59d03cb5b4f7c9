"""A package with one kind of each, one file for each, in a whole run: an environment, a loss, an estimator, a
filter, a data source, a logger and a training backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import run_grpo as program
from tests.functional.runs import FEWEST_PROCESSES, ROOT, run_grpo

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]

FILES = {
    "__init__.py": "",
    # The reward falls with the distance of the answer.
    "near.py": """
from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.environments.interface import Feedback
from nemo_like.environments.kind import Kind
from nemo_like.environments.per_turn import PerTurnEnvironment


@dataclass(kw_only=True, slots=True)
class NearOptions:
    scale: Annotated[float, Key("distance at which half of the reward is left", 10.0, above=0)]


def near(options):
    def judge(turn):
        if not turn.response.isdigit():
            return Feedback({"near": 0.0})
        distance = abs(int(turn.response[::-1]) - int(turn.answer[::-1]))
        return Feedback({"near": options.scale / (options.scale + distance)})

    return PerTurnEnvironment(judge)


KIND = Kind(
    about="The reward falls with the distance of the answer.",
    options=NearOptions,
    judge="one_of_each.near:near",
    record_check="nemo_like.environments.record_needs:answer",
)
""",
    "tempered.py": """
from dataclasses import dataclass
from typing import Annotated

from nemo_like.algorithms.loss_kind import LossKind
from nemo_like.algorithms.options import LossConfig
from nemo_like.config.keys import Key


@dataclass(kw_only=True, slots=True)
class TemperedConfig(LossConfig):
    strength: Annotated[float, Key("of the loss", 0.5, above=0)]


def tempered(tokens, cfg, strength):
    from nemo_like.algorithms.losses import loss_terms, policy_ratio

    ratio = policy_ratio(tokens, cfg)
    return loss_terms(-strength * tokens.advantages * ratio, ratio, ratio, tokens, cfg)


KIND = LossKind(about="a weaker one", options=TemperedConfig, function="one_of_each.tempered:tempered")
""",
    "centred.py": """
from nemo_like.algorithms.estimator_kind import EstimatorKind


def centred(inputs, cfg):
    mean = sum(inputs.rewards) / len(inputs.rewards)
    return [reward - mean for reward in inputs.rewards]


KIND = EstimatorKind(
    about="against the batch", function="one_of_each.centred:centred", judges_in_groups=False
)
""",
    "brief.py": """
from nemo_like.algorithms.sample_filters import FilterKind


def brief(samples, cfg):
    return [place % 2 == 0 for place in range(len(samples.rewards))]


KIND = FilterKind(about="every second one", function="one_of_each.brief:brief")
""",
    "doubles.py": """
from nemo_like.data.interface import TaskPrompt
from nemo_like.data.source_kind import SourceKind


class Doubles:
    def __len__(self):
        return 90

    def __getitem__(self, index):
        if not 0 <= index < 90:
            raise IndexError(index)
        number = str(index + 10)[::-1]
        return TaskPrompt(f"{number}+{number}=", str(2 * (index + 10)).zfill(3)[::-1])


def doubles(cfg, split, environments):
    return Doubles()


KIND = SourceKind(about="a number and itself", problems="one_of_each.doubles:doubles")
""",
    "trainer.py": """
from dataclasses import replace

from nemo_like.policy.backend_kinds import fsdp

KIND = replace(fsdp.KIND, about="FSDP2, and a count of updates", backend="one_of_each.counting:Counting")
""",
    "untrained.py": """
from dataclasses import replace

from nemo_like.policy.backend_kinds import fsdp

KIND = replace(fsdp.KIND, backend="one_of_each.counting:Counted")
""",
    # What is heavy, which the workers alone import.
    "counting.py": """
from nemo_like.observability.metrics import mean
from nemo_like.policy.fsdp.backend import FSDPBackend


class Counting(FSDPBackend):
    def train(self, batch, schedule):
        before = self.num_updates
        metrics = super().train(batch, schedule)
        return {**metrics, "counted_updates": mean(self.num_updates - before)}
""",
    "lines.py": """
import json
from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.observability.logger_kind import LoggerKind


@dataclass(kw_only=True, slots=True)
class LinesOptions:
    file: Annotated[str, Key("in the run directory", "lines.json")]
    fails_at: Annotated[int, Key("a step; 0: none", 0, at_least=0)]


class LinesRecorder:
    def __init__(self, options, run):
        self.options, self.path, self.steps = options, run.directory.path / options.file, []

    def log(self, step, metrics):
        if step == self.options.fails_at:
            raise RuntimeError("no paper left")
        self.steps.append([step, metrics["train/reward"]])

    def log_answers(self, step, answers):
        pass

    def close(self):
        self.path.write_text(json.dumps({"steps": self.steps, "has_ended": True}))


KIND = LoggerKind(
    about="lines on paper",
    options=LinesOptions,
    start=LinesRecorder,
    results=lambda options, run: {"lines": options.file},
)
""",
}
CONFIG = """
defaults:
  - grpo_arithmetic_cpu
  - env@env.near: default
env:
  near: {kind: "one_of_each.near:KIND"}
data:
  default: {kind: "one_of_each.doubles:KIND", env: near}
policy: {backend: "one_of_each.trainer:KIND"}
loss_fn: {kind: "one_of_each.tempered:KIND"}
grpo:
  adv_estimator: {name: "one_of_each.centred:KIND"}
  sample_filters: ["one_of_each.brief:KIND"]
logger:
  own:
    mine: {kind: "one_of_each.lines:KIND"}
    torn: {kind: "one_of_each.lines:KIND", options: {file: torn.json, fails_at: 2}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    package = folder / "one_of_each"
    package.mkdir()
    for name, text in FILES.items():
        (package / name).write_text(text)
    (folder / "own.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield folder / "own.yaml"


def test_one_kind_of_each_of_ones_own_trains_together(
    arithmetic_model: str, config: Path, tmp_path: Path
) -> None:
    options = [
        *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=2"),
        *("grpo.samples_kept_together=1", "policy.sequence_packing.share_prompts=false"),
        *("policy.train_global_batch_size=32", "grpo.val_at_start=false", "grpo.val_period=0"),
        *("grpo.val_at_end=false", *FEWEST_PROCESSES),
        "env.near.options.scale=5.0",
    ]
    run = run_grpo(tmp_path, options, config=str(config))
    assert run.returncode == 0, run.output
    assert all(0 < reward < 1 for reward in run.metrics("train/reward"))
    assert run.metrics("train/num_filtered") == [16, 16]
    assert min(run.metrics("train/grad_norm")) > 0
    assert run.metrics("train/counted_updates") == [1, 1]
    written = (run.run_dir / "config.yaml").read_text()
    assert "strength: 0.5" in written and "scale: 5.0" in written
    rewards = run.metrics("train/reward")
    assert json.loads((run.run_dir / "lines.json").read_text()) == {
        "steps": [[1, rewards[0]], [2, rewards[1]]],
        "has_ended": True,
    }
    # One that raises is closed, ends nothing, and is told of.
    assert json.loads((run.run_dir / "torn.json").read_text())["steps"] == [[1, rewards[0]]]
    assert "warning: torn failed: RuntimeError: no paper left" in run.output


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("loss_fn.strength=0", "loss_fn.strength=0.0 must be above 0"),
        ("loss_fn.ratio_clip_min=0.1", "is no key of loss_fn.kind=one_of_each.tempered:KIND"),
        (
            "env.near.options.scael=1",
            "env.near.options.scael is not a key of the configuration; did you mean scale?",
        ),
        ("env.near.kind=one_of_each.tempered:KIND", "is no Kind of nemo_like.environments.kind"),
        (
            "logger.own.mine.options.fails_at=-1",
            "logger.own.mine.options.fails_at=-1 must be at least 0",
        ),
        (
            "logger.own.mine.options.flie=x",
            "logger.own.mine.options.flie is not a key of the configuration; did you mean file?",
        ),
        (
            "logger.own.mine.kind=wandb",
            "logger.own.mine.kind=wandb is a shipped logger, whose keys are those of logger.wandb",
        ),
        (
            "policy.backend=one_of_each.counting:Counting",
            "is no BackendKind of nemo_like.policy.backends.backend_kind",
        ),
        ("policy.backend=one_of_each.untrained:KIND", "module 'one_of_each.counting' has no 'Counted'"),
        (
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "is for policy.backend=megatron, but that is one_of_each.trainer:KIND",
        ),
        ("policy.fsdp_cfg.tensor_parallel_size=3", "policy.fsdp_cfg.tensor_parallel_size=3 must divide"),
        ("data.default.kind=one_of_each.no_such:KIND", "there is no module 'one_of_each.no_such'"),
    ],
)
def test_what_does_not_fit_a_kind_of_ones_own_is_refused(
    arithmetic_model: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    message: str,
) -> None:
    monkeypatch.chdir(ROOT)
    assert program.main(["--config", str(config), option, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
