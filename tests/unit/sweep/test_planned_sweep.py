"""What is said of a sweep before any of its jobs runs: the jobs, their plans, and plugins that lack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

import run_grpo
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_sweep

EXTRA = "pip install -e '.[sweep]'"
Outcome = tuple[int, str, str]


@pytest.fixture
def planned(
    resolved_demo: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Return what a dry run of a sweep ends with and prints."""
    from scripts.demo_model.tiny_tokenizer import save_tokenizer

    save_tokenizer(checkpoint)

    def plan(*arguments: str, config: Path = resolved_demo) -> Outcome:
        there = [f"policy.model_name={checkpoint}", f"logger.log_dir={tmp_path / 'runs'}"]
        code = run_grpo.main(["--config", str(config), "--multirun", "--dry-run", *there, *arguments])
        return code, *capsys.readouterr()

    return plan


def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Hydra know its own launcher and sweeper only."""
    Plugins.instance()
    known = ConfigStore.instance().repo["hydra"]
    for group in ("launcher", "sweeper"):
        monkeypatch.setitem(known, group, {"basic.yaml": known[group]["basic.yaml"]})


def test_a_dry_run_prints_the_plan_of_every_job_and_makes_nothing(
    planned: Callable[..., Outcome], tmp_path: Path
) -> None:
    code, out, _ = planned("grpo.max_num_steps=7,9", "policy.data_parallel_size=1,2")
    assert code == 0
    plans = out.split("job ")[1:]
    assert [plan.splitlines()[0].split()[-2:] for plan in plans] == [
        [f"grpo.max_num_steps={steps}", f"policy.data_parallel_size={workers}"]
        for steps in (7, 9)
        for workers in (1, 2)
    ]
    for plan, steps, workers in zip(plans, (7, 7, 9, 9), (1, 2, 1, 2), strict=True):
        assert f"rows; {steps} steps" in plan and f"policy TP1 x PP1 x DP{workers}" in plan
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_names_each_job_that_cannot_run_and_checks_the_others_too(
    planned: Callable[..., Outcome],
) -> None:
    code, out, err = planned("grpo.seed=1,2", "policy.data_parallel_size=3,2")
    assert code == 2
    assert [line.split()[1] for line in out.splitlines() if line.startswith("job ")] == ["1:", "3:"]
    for number, seed in ((0, 1), (2, 2)):
        heading, _, problem = err.partition(f"job {number}: ")[2].splitlines()[:3]
        assert heading.endswith(f" grpo.seed={seed} policy.data_parallel_size=3")
        assert "policy.train_global_batch_size=128 must divide" in problem
    assert err.endswith("2 of 4 jobs cannot run: 0, 2\n")


def test_a_dry_run_of_a_sweeper_that_chooses_checks_every_value_and_both_ends(
    planned: Callable[..., Outcome],
) -> None:
    swept = ["policy.optimizer.lr=interval(1e-6,1e-5)", "policy.data_parallel_size=choice(1,2,3)"]
    code, out, err = planned("hydra/sweeper=optuna", *swept)
    assert code == 2
    assert out.startswith("the sweeper chooses values as it goes")
    jobs = [line.split()[-2:] for line in (out + err).splitlines() if line.startswith("job ")]
    assert sorted(jobs) == [
        ["policy.optimizer.lr=1e-05", "policy.data_parallel_size=1"],
        ["policy.optimizer.lr=1e-06", "policy.data_parallel_size=1"],
        ["policy.optimizer.lr=1e-06", "policy.data_parallel_size=2"],
        ["policy.optimizer.lr=1e-06", "policy.data_parallel_size=3"],
    ]
    assert err.endswith("1 of 4 jobs cannot run: 3\n")


def test_a_dry_run_checks_what_a_file_sweeps(planned: Callable[..., Outcome], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("""
defaults: [grpo_arithmetic_cpu]
hydra: {sweeper: {params: {policy.data_parallel_size: "2,3"}}}
""")
    code, out, err = planned("grpo.seed=1,2", config=path)
    assert code == 2
    assert out.count("job ") == 2
    assert err.endswith("2 of 4 jobs cannot run: 2, 3\n")


def test_a_sweep_in_a_file_that_cannot_be_read_is_refused(
    planned: Callable[..., Outcome], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [grpo_arithmetic_cpu]\nhydra: {sweeper: {params: {grpo.seed: '1,[2'}}}")
    code, _, err = planned("grpo.max_num_steps=1,2", config=path)
    assert code == 2
    assert "hydra.sweeper.params: grpo.seed=1,[2 is not a value or a sweep of Hydra's grammar" in err


@pytest.mark.parametrize("mode", [["--cfg"], ["--what-if", "RUN_DIR"]])
def test_other_modes_than_a_dry_run_do_not_go_with_a_sweep(
    mode: list[str], resolved_demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_grpo.main(["--config", str(resolved_demo), "--multirun", *mode, "grpo.seed=1,2"])
    assert ended.value.code == 2
    assert "only --dry-run goes with --multirun" in capsys.readouterr().err


def test_an_interval_needs_a_sweeper_that_chooses(resolved_demo: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"lr=interval\(1e-6,1e-5\) gives no values .*add hydra/sweeper=optuna"
    ):
        load_sweep(resolved_demo, ["policy.optimizer.lr=interval(1e-6,1e-5)"])


@pytest.mark.parametrize("choice", ["hydra/launcher=joblib", "hydra/sweeper=optuna"])
def test_a_sweep_that_needs_a_plugin_which_is_not_there_names_the_extra(
    choice: str, planned: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_extra(monkeypatch)
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [grpo_arithmetic_cpu, override {choice.replace('=', ': ')}]")
    for code, _, err in (planned(choice, "grpo.seed=1,2"), planned("grpo.seed=1,2", config=path)):
        assert code == 2
        problem = (
            f"  - {choice} is a plugin of Hydra's that is not installed; the extra `sweep` has it: {EXTRA}"
        )
        assert err.splitlines()[1:] == [problem]


def test_a_plugin_that_nobody_has_is_refused_with_those_that_there_are(
    resolved_demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"nothing is not among .* there are basic, joblib, sub"):
        load_sweep(resolved_demo, ["hydra/launcher=nothing", "grpo.seed=1,2"])
    without_extra(monkeypatch)
    with pytest.raises(ConfigError, match=r"hydra/sweeper=optunna is not among .*; did you mean optuna\?"):
        load_sweep(resolved_demo, ["hydra/sweeper=optunna", "grpo.seed=1,2"])
