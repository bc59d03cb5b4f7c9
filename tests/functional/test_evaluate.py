"""A run with several held-out sets, which ends early; evaluations of its policy, of its checkpoint and of a
server that has it, against its validation."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_like.configuration import load_config
from nemo_like.generation.endpoint_engine import EndpointEngine
from nemo_like.generation.interface import GroupRequest
from nemo_like.generation.sampling import SamplingSettings
from tests.functional.judge_servers import KEY, MODEL, JudgeServer, model_server
from tests.functional.runs import (
    CONFIG,
    ROOT,
    FinishedRun,
    read_metrics,
    run_grpo,
    running,
    temporary_files,
    wait_until_gone,
)
from tests.functional.validated_run import NUM_ANSWERS, NUM_PROBLEMS, SECRET, TOKEN, held_out

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]

NUM_STEPS = 1  # after which the run has reached its goal
VARIABLE = "KEY_OF_THE_SERVER"
SHOWN = ("accuracy", "reward", "pass@1", "pass@2", "pass@4", "mean@4", "majority@4", "avg_length")


def test_the_run_stops_when_a_validation_reaches_its_goal(validated: FinishedRun) -> None:
    (record,) = validated.records()
    assert record["validation/pairs/pass@4"] >= 0.01
    assert "stopped after step 1: grpo.val_stop_threshold is reached" in validated.output


def test_the_ratio_is_to_what_the_engine_sampled_with(validated: FinishedRun) -> None:
    (record,) = validated.records()
    assert 1 <= record["train/token_mult_prob_error"] < 1.001
    assert record["train/probs_ratio"] == pytest.approx(1, abs=1e-4)  # one update
    assert "data_plane/write/prev_logprobs/bytes" not in record


def test_every_set_has_metrics_of_its_own_beside_those_of_all(validated: FinishedRun) -> None:
    (record,) = validated.records()
    sizes = [record[f"validation/{name}num_samples"] for name in ("pairs/", "file/", "")]
    assert sizes == [NUM_PROBLEMS * NUM_ANSWERS, NUM_PROBLEMS * NUM_ANSWERS, 2 * NUM_PROBLEMS * NUM_ANSWERS]
    for key in ("accuracy", "pass@1", "pass@2", "pass@4", "mean@4", "majority@4"):
        parts = [record[f"validation/{name}/{key}"] for name in ("pairs", "file")]
        assert record[f"validation/{key}"] == pytest.approx(sum(parts) / 2)
    assert record["validation/pass@1"] == pytest.approx(record["validation/mean@4"])
    assert record["validation/pass@1"] < record["validation/pass@4"]


def test_training_prompts_are_mixed_by_weight_and_too_long_ones_are_left_out(validated: FinishedRun) -> None:
    lines = (validated.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) == 32
    assert sum(prompt.endswith("1+21=") for prompt in prompts) == 8
    assert max(map(len, prompts)) == 6
    assert "data.train file: 30 problems, 10 too long" in validated.output


def test_validation_answers_are_in_the_files_of_wandb(validated: FinishedRun) -> None:
    tables = list(
        (validated.run_dir / "wandb").glob("offline-run-*/files/media/table/validation/answers*.json")
    )
    assert len(tables) == 1
    assert len(json.loads(tables[0].read_text())["data"]) == 4


@pytest.fixture(scope="module")
def settings(problems: Path) -> list[str]:
    return held_out(problems)


def evaluate(directory: Path, settings: list[str], *arguments: str) -> FinishedRun:
    return run_grpo(directory, settings, program=("scripts/evaluate.py", *arguments))


def found(run: FinishedRun) -> dict[str, float]:
    """The metrics of the last validation, but for those of time."""
    record = run.records()[-1]
    return {name: value for name, value in record.items() if name.startswith("validation/")}


def groups(run: FinishedRun) -> dict[tuple[str, str], Any]:
    contents = json.loads((run.run_dir / "evaluation.json").read_text())
    return {(one["by"], one["name"]): one for one in contents["groups"]}


def answers(run: FinishedRun) -> list[tuple[Any, ...]]:
    lines = (run.run_dir / "rollouts" / f"validation_{NUM_STEPS}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(one["source"], one["index"], one["turns"], one["reward"]) for one in records]


@pytest.fixture(scope="module")
def evaluated(
    validated: FinishedRun, settings: list[str], tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    run = evaluate(tmp_path_factory.mktemp("evaluated"), settings, "--checkpoint", str(validated.run_dir))
    assert run.returncode == 0, run.output
    return run


def test_the_numbers_and_answers_are_those_of_the_runs_last_validation(
    validated: FinishedRun, evaluated: FinishedRun
) -> None:
    assert found(evaluated) == found(validated)
    assert {f"validation/{name}" for name in SHOWN} <= found(validated).keys()
    assert answers(evaluated) == answers(validated)
    assert len(answers(validated)) == 2 * NUM_PROBLEMS * NUM_ANSWERS


def test_no_file_of_a_run_has_what_an_environment_variable_said(validated: FinishedRun) -> None:
    files = [path for path in validated.run_dir.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    asked = f"${{oc.env:{SECRET}}}"
    assert f"token: {asked}\n" in (validated.run_dir / "config.yaml").read_text()
    assert any(path.suffix == ".wandb" and asked.encode() in path.read_bytes() for path in files)
    assert TOKEN not in validated.output


def test_numbers_have_errors_and_are_told_by_set_and_difficulty(evaluated: FinishedRun) -> None:
    by = groups(evaluated)
    names = [name for kind, name in by if kind == "difficulty"]
    assert names == ["", "easy", "hard"]  # the problems of the other set have none
    assert [name for kind, name in by if kind == "set"] == ["pairs", "file"]
    assert by["difficulty", "easy"]["num_problems"] + by["difficulty", "hard"]["num_problems"] == NUM_PROBLEMS
    for name in ("accuracy", "pass@4"):
        metric = by["set", "file"]["metrics"][name]
        assert metric["value"] == found(evaluated)[f"validation/file/{name}"]
        assert metric["interval"][0] <= metric["value"] <= metric["interval"][1]
    assert "problems  accuracy" in evaluated.output
    assert "difficulty hard" in evaluated.output


def test_the_answers_are_in_the_report(evaluated: FinishedRun) -> None:
    page = (evaluated.run_dir / "report.html").read_text()
    assert "shard-0-0" in page


@pytest.mark.slow
def test_a_checkpoint_is_converted_once_and_gives_the_same(
    validated: FinishedRun, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, TOKEN)  # which the run's configuration refers to
    saved = validated.run_dir / "checkpoints" / f"step_{NUM_STEPS}"
    run = evaluate(tmp_path, settings, "--checkpoint", str(saved))
    assert run.returncode == 0, run.output
    assert f"converting {saved}" in run.output
    assert found(run) == found(validated)
    assert (validated.run_dir / f"hf_step_{NUM_STEPS}" / "config.json").is_file()


@pytest.fixture(scope="module")
def server(validated: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeServer]:
    """vLLM's own server, with the model that the run exported."""
    directory = tmp_path_factory.mktemp("server")
    shutil.copytree(validated.run_dir / "final_hf", directory / "model")
    with model_server(directory / "model", directory, max_tokens=32) as one:
        yield one


@pytest.fixture
def asked(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments with which a server is asked what the run's last validation asked."""
    monkeypatch.setenv(VARIABLE, KEY)
    return [*settings, f"evaluation.step={NUM_STEPS}", f"evaluation.api_key_variable={VARIABLE}"]


def test_a_server_with_the_same_weights_gives_the_same_answers(
    validated: FinishedRun, server: JudgeServer, asked: list[str], tmp_path: Path
) -> None:
    run = evaluate(tmp_path, asked, "--endpoint", f"{server.url}/v1", "--model", MODEL)
    assert run.returncode == 0, run.output
    assert answers(run) == answers(validated)
    assert found(run) == found(validated)


def refusal(server: JudgeServer) -> str:
    """What is told of a server that does not have the model which it is asked for."""
    return f"the server at {server.url}/v1 (model another) gave NotFoundError"


def test_a_refusal_of_the_server_is_told_without_the_key(
    validated: FinishedRun, server: JudgeServer, asked: list[str]
) -> None:
    where = [f"evaluation.base_url={server.url}/v1", "evaluation.model=another"]
    cfg = load_config(ROOT / CONFIG, ["+evaluation=default", *asked, *where]).evaluation

    async def ask() -> tuple[Any, ...]:
        told = Told()
        engine = EndpointEngine(name="e", cfg=cfg, tokenizer_name=str(validated.run_dir / "final_hf"))
        request = GroupRequest("r", (3,), (7,), said="1")
        await engine.submit([request], SamplingSettings(1.0, 1.0, 0, 4), told)
        return await told.queue.get()

    method, _, message = asyncio.run(ask())
    assert method == "on_engine_error"
    assert message.startswith(refusal(server))
    assert KEY not in message


class Told:
    """A ``ResultSink`` that queues what it is told."""

    def __init__(self) -> None:
        self.queue = asyncio.Queue[tuple[Any, ...]]()

    def submit(self, method: str, *arguments: Any) -> None:
        self.queue.put_nowait((method, *arguments))


@pytest.mark.slow
def test_a_refusal_of_the_server_ends_the_evaluation(
    server: JudgeServer, asked: list[str], tmp_path: Path
) -> None:
    run = evaluate(tmp_path, asked, "--endpoint", f"{server.url}/v1", "--model", "another")
    assert run.returncode == 1
    assert refusal(server) in run.output
    assert KEY not in run.output


def test_an_interrupt_ends_an_evaluation_and_leaves_no_process(
    validated: FinishedRun, settings: list[str], tmp_path: Path
) -> None:
    """While its processes start, as those of a run do."""
    program = ("scripts/evaluate.py", "--checkpoint", str(validated.run_dir))
    with running(tmp_path, settings, program=program) as (process, mark, run_dir):
        for line in process.stdout or ():
            if "starting the data plane" in line:
                os.killpg(process.pid, signal.SIGINT)
                break
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 130, output
        assert wait_until_gone(mark) == []
        assert temporary_files(mark) == []
    assert not (run_dir / "evaluation.json").exists()


def test_metrics_are_read_like_those_of_a_run(evaluated: FinishedRun) -> None:
    (record,) = read_metrics(evaluated.run_dir)
    assert record["step"] == NUM_STEPS
    assert (ROOT / "scripts" / "report.py").is_file()
