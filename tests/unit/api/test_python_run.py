"""``GRPO`` refuses what cannot run before anything starts, and makes the configuration that was asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_like import GRPO
from nemo_like.api.base_configuration import InputFiles, ProgramArguments, local_model, quoted
from nemo_like.cluster.options import Placement
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.environments.own_reward import WeightedRewards
from nemo_like.plan.memory_timetable import memory_problems
from nemo_like.plan.run_models import run_models
from nemo_like.policy.options import Device
from tests.unit.config.checkpoints import DEMO, REPOSITORY, hub_snapshot, write_checkpoint

ROWS = [{"prompt": "1+1=", "answer": "2"}]
FILES = InputFiles(Path("/in/reward.pickle"), Path("/in/train.jsonl"), Path("/in/held out.parquet"))


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def refusal(*overrides: str, **arguments: Any) -> str:
    given = {"reward": exact, "train": ROWS, "num_steps": 3, "overrides": overrides, **arguments}
    with pytest.raises(ConfigError) as raised:
        GRPO("models/tiny", **given)
    return str(raised.value)


def test_a_program_that_wants_no_run_loads_nothing_heavy() -> None:
    program = (
        "import sys; import nemo_like; assert 'hydra' not in sys.modules\n"
        "from nemo_like import GRPO, RunResult\n"
        "print(*{'torch', 'ray', 'pandas', 'transformers', 'vllm'} & sys.modules.keys())"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert (told.stdout, told.stderr) == ("\n", "")


def test_a_name_that_the_package_lacks_is_an_error() -> None:
    import nemo_like

    with pytest.raises(AttributeError, match="no attribute 'GPRO'"):
        nemo_like.GPRO  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"reward": None}, "reward is NoneType and cannot be called"),
        ({"reward": [exact, exact]}, "reward[1] has the name 'exact' of another function"),
        ({"reward": [exact], "reward_weights": []}, "reward_weights=[] must be a list of 1 numbers"),
        ({"train": []}, "train has no rows"),
        ({"validation": [{}]}, "validation[0] has no 'prompt'"),
        ({"on_step": 3}, "on_step is int and cannot be called"),
        ({"overrides": "grpo.seed=2"}, "overrides is a text; give a list: ['grpo.seed=2']"),
        ({"overrides": ["policy.lr=1e-4"]}, "did you mean policy.optimizer.lr?"),
        ({"overrides": {"policy": {"lr": 1e-4}}}, "did you mean policy.optimizer.lr?"),
        ({"overrides": {"grpo.seed": "many"}}, "argument \"grpo.seed='many'\": grpo.seed='many' "),
        ({"num_steps": "many"}, "num_steps=many must be a whole number of at least 1"),
        ({"num_steps": 0}, "num_steps=0 must be"),
        ({"config": "grpo_gpus"}, "did you mean"),
    ],
)
def test_arguments_with_which_no_run_can_start_are_refused(arguments: Any, told: str) -> None:
    assert told in refusal(**arguments)


def test_the_prompt_may_be_another_field() -> None:
    assert "train[0] has no 'question'" in refusal("data.default.prompt_key=question")


def configured(config: str | Path | None = None, *overrides: str, files: InputFiles = FILES) -> Config:
    return ProgramArguments(30, config, overrides).configuration("/models/tiny", files)


def test_the_configuration_names_the_programs_objects() -> None:
    cfg = configured()
    assert (cfg.policy.model_name, cfg.grpo.max_num_steps, cfg.policy.device) == (
        "/models/tiny",
        30,
        Device.cpu,
    )
    ((train,), (held_out,)) = cfg.data.train, cfg.data.validation
    assert (train.path, train.kind, train.env) == ("/in/train.jsonl", "jsonl", "reward")
    assert (held_out.path, held_out.kind) == ("/in/held out.parquet", "huggingface")
    assert cfg.env["reward"].options["arguments"] == {"path": "/in/reward.pickle"}
    assert cfg.policy.train_global_batch_size == 256
    assert (cfg.rollout.dump_period, cfg.rollout.dump_validation) == (3, True)


@pytest.mark.parametrize(
    ("positions", "expected", "new"), [(256, 256, 128), (1024, 1024, 512), (40960, 1024, 512)]
)
def test_samples_are_no_longer_than_the_model_has_positions(
    positions: int, expected: int, new: int, tmp_path: Path
) -> None:
    model = str(write_checkpoint(tmp_path / "model", max_position_embeddings=positions))
    cfg = ProgramArguments(3, None, ()).configuration(model, FILES)
    assert (cfg.policy.max_total_sequence_length, cfg.generation.max_new_tokens) == (expected, new)
    given = ("policy.max_total_sequence_length=2048",)
    cfg = ProgramArguments(3, None, given).configuration(model, FILES)
    assert cfg.policy.max_total_sequence_length == 2048  # which the rules refuse, where it is too much
    cfg = ProgramArguments(3, "grpo_cpu", ()).configuration(model, FILES)
    assert cfg.policy.max_total_sequence_length == 1024


def test_any_configuration_may_be_the_base_and_keeps_its_keys() -> None:
    cfg = configured(DEMO, "grpo.seed=7")
    assert (cfg.policy.data_parallel_size, cfg.grpo.seed, cfg.rollout.dump_period) == (2, 7, 0)
    assert [source.env for source in (*cfg.data.train, *cfg.data.validation)] == ["reward", "reward"]
    assert configured("ppo_arithmetic_cpu").value is not None


def test_without_held_out_rows_nothing_is_validated_whatever_overrides_say() -> None:
    files = InputFiles(FILES.reward, FILES.train, None)
    cfg = configured(None, "grpo.val_period=10", files=files)
    assert (cfg.grpo.val_period, cfg.grpo.val_at_start, cfg.grpo.val_at_end) == (0, False, False)
    assert cfg.checkpointing.metric_name is None
    assert configured(None, "grpo.val_period=10").grpo.val_period == 10


def test_gpus_are_used_where_they_are_and_vllm_can(monkeypatch: pytest.MonkeyPatch) -> None:
    base = "nemo_like.api.base_configuration"
    monkeypatch.setattr(f"{base}.present_gpus", lambda: 2)
    assert configured().policy.device is Device.cpu  # this vLLM is the build for CPUs
    monkeypatch.setattr(f"{base}._is_for_gpus", lambda: True)
    cfg = configured()
    assert (cfg.policy.device, cfg.cluster.gpus_per_node) == (Device.cuda, 2)
    assert (cfg.cluster.placement, cfg.policy.data_parallel_size) == (Placement.colocated, 2)
    assert not cfg.data.train[0].use_chat_template


@pytest.mark.parametrize(
    ("model", "num_gpus", "gpu_gb"), [("Qwen2.5-1.5B-Instruct", 1, 40), ("Qwen3-8B", 8, 80)]
)
def test_what_is_said_to_fit_on_shared_gpus_does(model: str, num_gpus: int, gpu_gb: int) -> None:
    counts = f"cluster.gpus_per_node={num_gpus}"
    cfg = ProgramArguments(30, "grpo_gpu_shared", (counts,)).configuration(
        str(REPOSITORY / "recipes" / "shapes" / model), FILES
    )
    assert [*memory_problems(cfg, run_models(cfg), int(0.98e9 * gpu_gb))] == []


@pytest.mark.parametrize("text", ["/a b/c", "a,b=c", "it's", '"x"', "${y}", "[1]{2}", "a\\b", " ", "#1:2"])
def test_a_quoted_text_stands_for_itself(text: str) -> None:
    cfg = configured(None, f"logger.run_name={quoted(text)}")
    assert cfg.logger.run_name == text


def test_a_text_that_the_grammar_cannot_express_is_refused() -> None:
    with pytest.raises(ConfigError, match="no configuration can hold"):
        quoted("a\\'b")


def test_a_model_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="model=Nobody/none is no directory, and does not come from"):
        local_model("Nobody/none")
    for path in ("/no/such/model", "../no_such_model", "models/no/such"):
        with pytest.raises(ConfigError, match=f"model={path} is not a directory; give a checkpoint's"):
            local_model(path)


def test_a_model_of_the_hub_comes_from_its_cache(tmp_path: Path) -> None:
    """As the hub's library lays it out, in a process that has no network."""
    snapshot = hub_snapshot(tmp_path, "Somebody/tiny")
    program = "from nemo_like.api.base_configuration import local_model; print(local_model('Somebody/tiny'))"
    told = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == str(snapshot)


def test_a_run_needs_the_main_thread(checkpoint: Path) -> None:
    raised: list[BaseException] = []

    def train() -> None:
        try:
            GRPO(checkpoint, reward=exact, train=ROWS, num_steps=1).train()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(timeout=60)
    assert "another thread than the main one" in str(raised[0])


def test_a_process_that_uses_ray_is_refused_and_its_ray_goes_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"call ray\.shutdown\(\) first"):
        GRPO(checkpoint, reward=exact, train=ROWS, num_steps=1).train()


def test_a_refused_run_has_no_directory_and_leaves_signals_as_they_were(
    checkpoint: Path, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    settings = [f"logger.log_dir={tmp_path / 'runs'}", "policy.train_global_batch_size=7"]
    run = GRPO(checkpoint, reward=exact, train=ROWS, num_steps=1, overrides=settings)
    with pytest.raises(ConfigError, match=r"policy\.train_global_batch_size=7"):
        run.train()
    assert not (tmp_path / "runs").exists()
    assert signal.getsignal(signal.SIGTERM) is before


Failing = Callable[..., Any]


def fails(response: str, answer: str) -> float:
    raise KeyError("no such thing")


def words(response: str) -> str:
    return response


def short(completions: list[str]) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (fails, "gave none: the reward raised KeyError: 'no such thing' (line "),
        (words, "words returned str, not a number, mapping or Feedback"),
        (WeightedRewards({"fails": fails}, {"fails": 1.0}), "component fails: the reward raised KeyError"),
        (short, "gave none: it gave 0 answers to 1 response"),
        (lambda response: float("nan"), "the reward 'reward' is nan"),
    ],
)
def test_a_reward_that_cannot_judge_the_first_row_is_refused(
    reward: Failing, told: str, tmp_path: Path
) -> None:
    from nemo_like.api.first_reward import check_first_reward
    from nemo_like.api.run_inputs import write_reward, write_rows

    files = InputFiles(write_reward(tmp_path, reward), write_rows(tmp_path, "train", ROWS), None)
    with pytest.raises(ConfigError) as raised:
        check_first_reward(configured(files=files))
    assert told in str(raised.value)
    check_first_reward(configured(None, "env.reward.check_at_start=false", files=files))
    good = InputFiles(write_reward(tmp_path, exact), files.train, None)
    check_first_reward(configured(files=good))
