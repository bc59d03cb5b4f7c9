from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_like.checkpoint.digests import differing_files, file_digest, share_digests
from nemo_like.checkpoint.options import CheckpointWriting, ResumeParts
from nemo_like.checkpoint.store import CheckpointError
from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.configuration import Config
from nemo_like.data.interface import SourceReport
from nemo_like.data.sampler import MixtureSampler
from nemo_like.driver.checkpoints import RunCheckpoints, RunPosition, continuation, kept
from nemo_like.driver.final_export import PolicyExport
from nemo_like.observability.disk import DiskFull
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.rollout.prompts import RolloutMode, SourceReports


def test_a_step_counts_every_rollout_it_needed() -> None:
    metrics = {"train/dynamic_sampling_num_gen_batches": 3.0, "train/global_valid_toks": 70.0}
    before = RunPosition(step=4, policy_version=4, consumed_samples=100, valid_tokens=900)
    after = before.after(5, 5, metrics, num_samples=16)
    assert after == RunPosition(step=5, policy_version=5, consumed_samples=148, valid_tokens=970)


class Policy:
    """Remembers what it was asked. In the background it writes when the test says so."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []
        self.path = Path()
        self.is_written = False
        self.error: Exception | None = None

    def save_checkpoint(self, path: str, writing: CheckpointWriting) -> None:
        self.path, self.is_written = Path(path), False
        if writing is CheckpointWriting.blocking:
            self.write()

    def write(self) -> None:
        (self.path / "weights").write_text("w")
        self.is_written = True

    def has_written_checkpoint(self) -> bool:
        if self.error:
            raise self.error
        return self.is_written

    def wait_for_checkpoint(self) -> dict[str, str]:
        if not self.has_written_checkpoint():
            self.write()
        return share_digests(self.path, rank=0, world_size=1)

    def corrupt_checkpoint_files(self, path: str, digests: Mapping[str, str]) -> list[str]:
        return differing_files(Path(path), digests)

    def load_checkpoint(self, path: str, version: int, parts: ResumeParts) -> None:
        self.loaded.append((path, version))
        self.parts = parts


def config(**changes: object) -> SimpleNamespace:
    values = {
        "enabled": True,
        "resume_if_exists": True,
        "checkpoint_dir": None,
        "resume_from_path": None,
        "resume_parts": ResumeParts.all,
        "save_period": 5,
        "writing": CheckpointWriting.blocking,
        "keep_top_k": None,
        "metric_name": None,
        "higher_is_better": True,
    }
    return SimpleNamespace(**{**values, **changes})


def exports(path: str) -> None:
    (Path(path) / "adapter").mkdir(parents=True)
    (Path(path) / "tokenizer_config.json").write_text("{}")
    (Path(path) / "adapter" / "adapter_model.safetensors").write_text("a")


def sampler(seed: int = 1) -> MixtureSampler:
    return MixtureSampler([20], [1.0], seed=seed, shuffle=True)


def run_checkpoints(directory: RunDirectory, cfg: SimpleNamespace | None = None) -> RunCheckpoints:
    return RunCheckpoints(cfg or config(), directory, expected_bytes=100)


def saved_run(tmp_path: Path) -> tuple[RunDirectory, MixtureSampler]:
    """A run that stopped after step 5, and its prompt order."""
    directory, order = RunDirectory.create(str(tmp_path), "run"), sampler()
    order.next(7)
    position = RunPosition(step=5, policy_version=5, consumed_samples=40, valid_tokens=300)
    run_checkpoints(directory).save(
        position, {"train/reward": 0.5}, {"policy": Policy()}, order, "wandb-1", exports
    )
    return directory, order


def test_a_run_continues_where_it_was_saved(tmp_path: Path) -> None:
    directory, order = saved_run(tmp_path)
    found, policy, again = run_checkpoints(directory), Policy(), sampler()
    assert found.last_step == 5
    assert found.wandb_run_id == "wandb-1"
    assert found.resume({"policy": policy}, again) == RunPosition(5, 5, 40, 300)
    assert policy.loaded == [(str(directory.checkpoints_path / "step_5" / "policy"), 5)]
    assert again.next(5) == order.next(5)


def test_a_run_goes_on_from_another_runs_checkpoint_until_it_has_its_own(tmp_path: Path) -> None:
    other, order = saved_run(tmp_path)
    step = other.checkpoints_path / "step_5"
    directory, cfg = RunDirectory.create(str(tmp_path), "next"), config(resume_from_path=str(step))
    found, policy, again = run_checkpoints(directory, cfg), Policy(), sampler()
    found.verify({"policy": policy})
    assert (found.last_step, found.wandb_run_id) == (5, None)
    position = found.resume({"policy": policy}, again)
    assert position == RunPosition(5, 5, 40, 300)
    assert policy.loaded == [(str(step / "policy"), 5)]
    assert again.next(5) == order.next(5)
    found.save(replace(position, step=6), {}, {"policy": policy}, again, "wandb-2", exports)
    own = run_checkpoints(directory, cfg)
    assert (own.last_step, own.wandb_run_id) == (6, "wandb-2")
    assert step.is_dir()


@pytest.mark.parametrize("parts", [ResumeParts.weights, ResumeParts.weights_and_optimizer])
def test_a_run_begins_at_step_0_with_parts_of_another_runs_checkpoint(
    parts: ResumeParts, tmp_path: Path
) -> None:
    other, _ = saved_run(tmp_path)
    step = other.checkpoints_path / "step_5"
    cfg = config(resume_from_path=str(step), resume_parts=parts)
    directory = RunDirectory.create(str(tmp_path), "next")
    new, policy, order = run_checkpoints(directory, cfg), Policy(), sampler(seed=2)
    new.verify({"policy": policy})
    new.meet_data(dict.fromkeys(RolloutMode, ()))
    assert (new.last_step, new.wandb_run_id, new.found) == (-1, None, None)
    assert new.resume({"policy": policy}, order) == RunPosition()
    assert (policy.loaded, policy.parts) == ([(str(step / "policy"), 0)], parts)
    assert order.next(5) == sampler(seed=2).next(5)
    new.save(RunPosition(step=5, policy_version=5), {}, {"policy": policy}, order, "wandb-2", exports)
    # Of its own checkpoints it takes all.
    own, again = run_checkpoints(directory, cfg), Policy()
    assert own.begun_with is None
    assert own.resume({"policy": again}, sampler(seed=2)).step == 5
    assert again.parts is ResumeParts.all


def test_a_corrupt_checkpoint_of_another_run_is_refused_and_stays(tmp_path: Path) -> None:
    other, _ = saved_run(tmp_path)
    step = other.checkpoints_path / "step_5"
    directory, cfg = RunDirectory.create(str(tmp_path), "next"), config(resume_from_path=str(step))

    class Changed(Policy):
        def corrupt_checkpoint_files(self, path: str, digests: Mapping[str, str]) -> list[str]:
            return ["weights"]

    for parts in (ResumeParts.all, ResumeParts.weights):
        cfg.resume_parts = parts
        with pytest.raises(CheckpointError, match="step_5 is corrupt"):
            run_checkpoints(directory, cfg).verify({"policy": Changed()})
    assert step.is_dir()
    away = config(resume_from_path=str(tmp_path / "away"))
    with pytest.raises(
        CheckpointError, match=r"resume_from_path=.*away must be a whole checkpoint, RUN_DIR/"
    ):
        run_checkpoints(directory, away)


def test_every_checkpoint_has_an_export_that_no_run_needs(tmp_path: Path) -> None:
    directory, order = RunDirectory.create(str(tmp_path), "run"), sampler()
    cfg = config(keep_top_k=1, writing=CheckpointWriting.background)
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    checkpoints = RunCheckpoints(cfg, directory, 100, export=PolicyExport(template))
    policy = Policy()
    for step in (5, 10):
        checkpoints.save(RunPosition(step=step), {}, {"policy": policy}, order, "wandb-1", exports)
        # It is there, and counts once the rest is.
        assert (directory.checkpoints_path / f"tmp_step_{step}" / "hf" / "run.json").is_file()
    checkpoints.finish()
    path = directory.checkpoints_path / "step_10"
    assert [one.name for one in directory.checkpoints_path.iterdir()] == ["step_10"]
    assert json.loads((path / "hf" / "run.json").read_text()) == {"step": 10}
    assert (path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (path / "hf" / "adapter" / "adapter_model.safetensors").is_file()
    shutil.rmtree(path / "hf")
    found = run_checkpoints(directory)
    found.verify({"policy": policy})
    assert found.last_step == 10 and not found.warnings


def test_an_export_that_fails_takes_its_checkpoint_with_it(tmp_path: Path) -> None:
    directory, order = saved_run(tmp_path)

    def fails(path: str) -> None:
        Path(path).mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = RunCheckpoints(config(), directory, 100, export=PolicyExport())
    with pytest.raises(DiskFull, match="no space for the checkpoint of step 10"):
        checkpoints.save(RunPosition(step=10), {}, {"policy": Policy()}, order, "wandb-1", fails)
    assert [one.name for one in directory.checkpoints_path.iterdir()] == ["step_5"]


def test_a_critic_continues_beside_the_policy(tmp_path: Path) -> None:
    directory, order = RunDirectory.create(str(tmp_path), "run"), sampler()
    names = ("policy", "value")
    groups = {name: Policy() for name in names}
    checkpoints = RunCheckpoints(config(), directory, 100, names)
    checkpoints.save(RunPosition(step=5, policy_version=3), {}, groups, order, "wandb-1", exports)
    found, again = RunCheckpoints(config(), directory, 100, names), {name: Policy() for name in names}
    found.verify(again)
    assert found.resume(again, sampler()).policy_version == 3
    step = directory.checkpoints_path / "step_5"
    assert again["policy"].loaded == [(str(step / "policy"), 3)]
    assert again["value"].loaded == [(str(step / "value"), 5)]


def test_a_checkpoint_without_the_critic_that_the_run_has_is_refused(tmp_path: Path) -> None:
    directory, _ = saved_run(tmp_path)
    found = RunCheckpoints(config(), directory, 100, ("policy", "value"))
    with pytest.raises(CheckpointError, match=r"step_5 has no value/.*another logger\.run_name"):
        found.resume({"policy": Policy(), "value": Policy()}, sampler())


def test_another_seed_is_refused(tmp_path: Path) -> None:
    directory, _ = saved_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"step_5 cannot be continued: .*seed=1, this run 2"):
        run_checkpoints(directory).resume({"policy": Policy()}, sampler(seed=2))


def data(*digests: str, held_out: Mapping[str, str] | None = None) -> SourceReports:
    """Training sources with these digests, and held-out ones by name."""

    def source(name: str, digest: str) -> SourceReport:
        return SourceReport(name=name, num_prompts=20, num_too_long=0, digest=digest)

    return {
        RolloutMode.training: tuple(source(f"source{n}", digest) for n, digest in enumerate(digests)),
        RolloutMode.validation: tuple(source(*one) for one in (held_out or {"amc": "v1"}).items()),
    }


def saved_with(tmp_path: Path, sources: SourceReports) -> RunDirectory:
    directory = RunDirectory.create(str(tmp_path), "run")
    checkpoints = run_checkpoints(directory)
    checkpoints.meet_data(sources)
    checkpoints.save(RunPosition(step=5), {}, {"policy": Policy()}, sampler(), "wandb-1", exports)
    return directory


def test_the_same_data_continue_in_silence(tmp_path: Path) -> None:
    found = run_checkpoints(saved_with(tmp_path, data("a1", "b1")))
    found.meet_data(data("a1", "b1"))
    assert found.warnings == []
    assert found.resume({"policy": Policy()}, sampler()).step == 5


def test_other_training_data_of_equal_length_are_refused_by_name_with_a_remedy(tmp_path: Path) -> None:
    found = run_checkpoints(saved_with(tmp_path, data("a1", "b1")))
    with pytest.raises(
        CheckpointError,
        match=r"step_5 cannot be continued: its training data were others: source1 has 20 problems "
        r"as before, but others, or in another order \(their digest was b1 and is b2\).*"
        r"convert_checkpoint\.py .*step_5 --output DIR, then policy\.model_name=DIR with another "
        r"logger\.run_name",
    ):
        found.meet_data(data("a1", "b2"))


def test_sources_in_another_order_or_number_are_refused(tmp_path: Path) -> None:
    directory = saved_with(tmp_path, data("a1", "b1"))
    with pytest.raises(CheckpointError, match=r"source0 has 20 .*source1 has 20"):
        run_checkpoints(directory).meet_data(data("b1", "a1"))
    with pytest.raises(CheckpointError, match=r"made with source0, source1 in data\.train, .* has source0"):
        run_checkpoints(directory).meet_data(data("a1"))


def test_a_file_under_another_name_with_the_same_contents_is_continued(tmp_path: Path) -> None:
    found, sources = run_checkpoints(saved_with(tmp_path, data("a1"))), data("a1")
    moved = {mode: (replace(reports[0], name="moved"),) for mode, reports in sources.items()}
    found.meet_data(moved)
    assert found.warnings == []


@pytest.mark.parametrize(
    ("held_out", "told"),
    [
        ({"amc": "v2"}, "amc has 20 problems as before, but others"),
        ({"amc": "v1", "aime": "v1"}, "data.validation had amc, and now has amc, aime"),
    ],
)
def test_other_held_out_problems_are_warned_of(tmp_path: Path, held_out: dict[str, str], told: str) -> None:
    found = run_checkpoints(saved_with(tmp_path, data("a1")))
    found.meet_data(data("a1", held_out=held_out))
    (warning,) = found.warnings
    assert told in warning
    assert "cannot be compared" in warning


def test_a_checkpoint_that_does_not_name_its_data_is_continued_with_one_warning(tmp_path: Path) -> None:
    directory, _ = saved_run(tmp_path)
    state = directory.checkpoints_path / "step_5" / "training_state.json"
    values = json.loads(state.read_text())
    assert values.pop("data") is None
    state.write_text(json.dumps(values))
    manifest = state.with_name("manifest.json")
    entries = json.loads(manifest.read_text())
    entries[state.name] = {"bytes": state.stat().st_size, "sha256": file_digest(state)}
    manifest.write_text(json.dumps(entries))
    found = run_checkpoints(directory)
    found.meet_data(data("a1"))
    (warning,) = found.warnings
    assert "step_5 does not say of which data it is" in warning
    assert found.resume({"policy": Policy()}, sampler()).step == 5


@pytest.mark.parametrize("switch", ["enabled", "resume_if_exists"])
def test_a_run_that_does_not_resume_starts_anew(tmp_path: Path, switch: str) -> None:
    directory, _ = saved_run(tmp_path)
    checkpoints = run_checkpoints(directory, config(**{switch: False}))
    assert checkpoints.last_step == -1
    assert checkpoints.resume({"policy": Policy()}, sampler()) == RunPosition()


def test_nothing_is_saved_where_checkpoints_are_not_enabled(tmp_path: Path) -> None:
    directory = RunDirectory.create(str(tmp_path), "run")
    checkpoints = run_checkpoints(directory, config(enabled=False))
    checkpoints.save(RunPosition(step=1), {}, Policy(), sampler(), "wandb-1", exports)
    assert not directory.checkpoints_path.exists()


@pytest.mark.parametrize(("period", "due"), [(5, [5, 10]), (0, [])])
def test_saving_falls_on_the_period(tmp_path: Path, period: int, due: list[int]) -> None:
    checkpoints = run_checkpoints(RunDirectory.create(str(tmp_path), "run"), config(save_period=period))
    assert [step for step in range(1, 12) if checkpoints.is_due(step)] == due


BACKGROUND = config(writing=CheckpointWriting.background)


def saving_run(tmp_path: Path) -> tuple[RunDirectory, RunCheckpoints, Policy]:
    """A run with a checkpoint of step 5, while its policy workers write that of step 10."""
    directory, order = saved_run(tmp_path)
    checkpoints, policy = run_checkpoints(directory, BACKGROUND), Policy()
    checkpoints.save(RunPosition(step=10), {}, {"policy": policy}, order, "wandb-1", exports)
    return directory, checkpoints, policy


def names(directory: RunDirectory) -> set[str]:
    return {path.name for path in directory.checkpoints_path.iterdir()}


def test_a_checkpoint_in_the_background_counts_once_all_of_it_is_written(tmp_path: Path) -> None:
    directory, checkpoints, policy = saving_run(tmp_path)
    checkpoints.settle()
    assert names(directory) == {"step_5", "tmp_step_10"}
    policy.write()
    checkpoints.settle()
    assert names(directory) == {"step_5", "step_10"}
    checkpoints.settle()
    assert run_checkpoints(directory, BACKGROUND).last_step == 10


def test_a_run_that_ends_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    directory, checkpoints, _ = saving_run(tmp_path)
    checkpoints.finish()
    assert names(directory) == {"step_5", "step_10"}


def test_the_next_checkpoint_waits_for_the_one_before_it(tmp_path: Path) -> None:
    directory, checkpoints, policy = saving_run(tmp_path)
    checkpoints.save(RunPosition(step=15), {}, {"policy": policy}, sampler(), "wandb-1", exports)
    assert names(directory) == {"step_5", "step_10", "tmp_step_15"}


def test_a_run_that_ends_while_one_is_written_continues_from_the_one_before(tmp_path: Path) -> None:
    directory, _, _ = saving_run(tmp_path)
    assert run_checkpoints(directory, BACKGROUND).last_step == 5
    assert names(directory) == {"step_5"}


def test_what_goes_wrong_in_the_background_is_an_error_of_the_next_step_that_names_the_path(
    tmp_path: Path,
) -> None:
    directory, checkpoints, policy = saving_run(tmp_path)
    cause = OSError("input/output error")
    policy.error = ActorFailed("policy_worker-1", "has_written_checkpoint", "checkpoint", cause, None)
    with pytest.raises(
        CheckpointError, match=r"checkpoints/step_10 could not be written: policy_worker-1.*input/output"
    ):
        checkpoints.settle()
    assert names(directory) == {"step_5"}


def damage(directory: RunDirectory, step: int) -> None:
    """One flipped bit: names and sizes stay."""
    file = directory.checkpoints_path / f"step_{step}" / "policy" / "weights"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]))


def test_a_corrupt_checkpoint_is_set_aside_by_name_and_the_one_before_it_is_continued(tmp_path: Path) -> None:
    directory, checkpoints, _ = saving_run(tmp_path)
    checkpoints.finish()
    damage(directory, 10)
    checkpoints, policy = run_checkpoints(directory, BACKGROUND), Policy()
    assert checkpoints.last_step == 10
    checkpoints.verify({"policy": policy})
    assert checkpoints.last_step == 5
    assert names(directory) == {"step_5", "step_10.corrupt"}
    (warning,) = checkpoints.warnings
    assert "step_10 is corrupt: policy/weights is not what was written" in warning
    assert "set aside as step_10.corrupt; what came after step 5 is lost and done again" in warning
    assert checkpoints.resume({"policy": policy}, sampler()).step == 5


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    directory, _ = saved_run(tmp_path)
    damage(directory, 5)
    with pytest.raises(CheckpointError, match=r"policy/weights is not .*No checkpoint in .* is whole"):
        run_checkpoints(directory, BACKGROUND).verify({"policy": Policy()})
    with pytest.raises(CheckpointError, match=r"there is step_5\.corrupt\. Restore one .* or begin anew"):
        run_checkpoints(directory, BACKGROUND)


def test_a_checkpoint_without_digests_is_continued_with_one_warning(tmp_path: Path) -> None:
    directory, _ = saved_run(tmp_path)
    manifest = directory.checkpoints_path / "step_5" / "manifest.json"
    sizes = {name: entry["bytes"] for name, entry in json.loads(manifest.read_text()).items()}
    manifest.write_text(json.dumps(sizes))
    checkpoints, policy = run_checkpoints(directory, BACKGROUND), Policy()
    checkpoints.verify({"policy": policy})
    assert checkpoints.resume({"policy": policy}, sampler()).step == 5
    (warning,) = checkpoints.warnings
    assert "step_5 was written without digests" in warning


def test_a_checkpoint_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    class Unlucky(Policy):
        def load_checkpoint(self, path: str, version: int, parts: ResumeParts) -> None:
            raise ActorFailed("policy_worker-0", "load_checkpoint", "checkpoint", EOFError("short"), None)

    directory, _ = saved_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoints/step_5 cannot be loaded: .*EOFError: short"):
        run_checkpoints(directory, BACKGROUND).resume({"policy": Unlucky()}, sampler())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["logger.run_name=sums"], ". The same command continues it"),
        ([], ". The same command with logger.run_name=demo-1 continues it"),
        (["logger.run_name=sums", "checkpointing.resume_if_exists=false"], ""),
        (["logger.run_name=sums", "checkpointing.enabled=false"], ""),
    ],
)
def test_a_run_without_a_name_continues_under_that_of_its_directory(
    demo: Callable[..., Config], tmp_path: Path, arguments: list[str], told: str
) -> None:
    directory = RunDirectory.create(str(tmp_path / "runs"), "demo-1")
    assert continuation(demo(*arguments), directory) == told
    assert kept(demo(*arguments), directory, 7) == f". Step 7 is saved{told}"
