from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.checkpoint.digests import share_digests
from nemo_like.checkpoint.state import TrainingState
from nemo_like.checkpoint.store import (
    CheckpointError,
    CheckpointStore,
    Retention,
    read_checkpoint,
    verify_group_files,
)
from nemo_like.observability.disk import DiskFull
from tests.disks import fill, small_disk

ACCURACY = "validation/accuracy"
BEST_TWO = Retention(keep_top_k=2, metric=ACCURACY, is_higher_better=True)
ALL = Retention(keep_top_k=None, metric=None, is_higher_better=True)


def state(step: int, **metrics: float) -> TrainingState:
    return TrainingState(
        step=step,
        policy_version=step,
        epoch=0,
        consumed_samples=8 * step,
        valid_tokens=100 * step,
        sampler={"offset": step},
        metrics=metrics,
        wandb_run_id=None,
    )


def digests_of(path: Path, *groups: str) -> dict[str, str]:
    return {
        f"{group}/{name}": digest
        for group in groups
        for name, digest in share_digests(path / group, rank=0, world_size=1).items()
    }


class Checkpoints:
    """A store with the warnings it gave."""

    def __init__(self, root: Path, retention: Retention = ALL) -> None:
        self.root = root
        self.warnings: list[str] = []
        self.store = CheckpointStore(root, retention, self.warnings.append, expected_bytes=100)

    def save(self, step: int, **metrics: float) -> None:
        with self.store.writing(step) as path:
            (path / "policy" / "weights").write_bytes(b"x" * 100)
            self.store.finish(state(step, **metrics), digests_of(path, "policy"))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_a_checkpoint_comes_back_as_it_was_written(saved: Checkpoints) -> None:
    saved.save(3, **{ACCURACY: 0.5})
    latest = saved.store.latest()
    assert latest is not None
    assert latest.state == state(3, **{ACCURACY: 0.5})
    assert (latest.path_of("policy") / "weights").read_bytes() == b"x" * 100


def test_every_group_has_files_and_digests_of_its_own(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, ALL, print, expected_bytes=100, groups=("policy", "value"))
    with store.writing(1) as path:
        (path / "policy" / "weights").write_bytes(b"p")
        (path / "value" / "weights").write_bytes(b"v")
        store.finish(state(1), digests_of(path, "policy", "value"))
    found = read_checkpoint(tmp_path / "step_1")
    assert found.digests_of("value") == share_digests(found.path_of("value"), rank=0, world_size=1)
    assert found.digests_of("value") != found.digests_of("policy")
    (found.path_of("value") / "weights").write_bytes(b"w")
    verify_group_files(found, "policy")
    with pytest.raises(CheckpointError, match="value/weights is not what was written"):
        verify_group_files(found, "value")


def test_there_is_no_latest_checkpoint_before_the_first(saved: Checkpoints) -> None:
    assert saved.store.latest() is None


def test_the_latest_is_by_number_not_by_name(saved: Checkpoints) -> None:
    for step in (9, 10):
        saved.save(step)
    latest = saved.store.latest()
    assert latest is not None
    assert latest.state.step == 10


def test_a_save_that_raises_leaves_nothing_and_harms_nothing(saved: Checkpoints) -> None:
    saved.save(1)
    with pytest.raises(KeyError), saved.store.writing(2) as path:
        (path / "policy" / "weights").write_bytes(b"half")
        raise KeyError("worker")
    assert saved.names() == ["step_1"]


def test_what_a_killed_run_left_unfinished_is_never_read_and_can_be_removed(saved: Checkpoints) -> None:
    saved.save(1)
    (saved.root / "tmp_step_2" / "policy").mkdir(parents=True)
    latest = saved.store.latest()
    assert latest is not None
    assert latest.state.step == 1
    saved.store.remove_unfinished()
    assert saved.names() == ["step_1"]


@pytest.mark.parametrize("damage", ["cut", "delete", "state", "manifest"])
def test_a_broken_checkpoint_is_set_aside_with_a_warning(saved: Checkpoints, damage: str) -> None:
    saved.save(1)
    saved.save(2)
    newest = saved.root / "step_2"
    if damage == "cut":
        (newest / "policy" / "weights").write_bytes(b"x" * 99)
    elif damage == "delete":
        (newest / "policy" / "weights").unlink()
    else:
        (newest / ("training_state.json" if damage == "state" else "manifest.json")).write_text("{")
    latest = saved.store.latest()
    assert latest is not None
    assert latest.state.step == 1
    assert len(saved.warnings) == 1
    assert "step_2 is broken" in saved.warnings[0]
    assert saved.names() == ["step_1", "step_2.corrupt"]


@pytest.mark.parametrize(
    ("name", "written", "found"),
    [("training_state.json", '"valid_tokens": 100', '"valid_tokens": 900'), ("policy/weights", "xxx", "xyx")],
)
def test_contents_that_changed_at_an_equal_size_are_found(
    saved: Checkpoints, name: str, written: str, found: str
) -> None:
    saved.save(1)
    file = saved.root / "step_1" / name
    file.write_text(file.read_text().replace(written, found, 1))
    with pytest.raises(CheckpointError, match=f"step_1 is corrupt: {name} is not what was written"):
        verify_group_files(read_checkpoint(saved.root / "step_1"))


@pytest.mark.parametrize("entry", ['"x"', '{"bytes": 100}', '{"bytes": 100, "sha255": "0"}', "[]"])
def test_a_manifest_of_another_kind_is_a_broken_checkpoint(saved: Checkpoints, entry: str) -> None:
    saved.save(1)
    manifest = '{"policy/weights": ' + entry + ', "training_state.json": {"bytes": 1, "sha256": "0"}}'
    (saved.root / "step_1" / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match="does not give size and sha256 of every file"):
        read_checkpoint(saved.root / "step_1")


def test_a_second_corrupt_checkpoint_of_a_step_gets_a_name_of_its_own(saved: Checkpoints) -> None:
    saved.save(1)
    for _ in range(2):
        saved.save(2)
        (saved.root / "step_2" / "policy" / "weights").unlink()
        assert saved.store.latest() is not None
    assert saved.names() == ["step_1", "step_2.corrupt", "step_2.corrupt-2"]


def test_files_that_only_the_workers_see_are_an_error_not_a_checkpoint_without_them(
    saved: Checkpoints,
) -> None:
    with (
        pytest.raises(CheckpointError, match=r"different files in .*: policy/__1_0\.distcp\. Every node"),
        saved.store.writing(1) as path,
    ):
        (path / "policy" / "__0_0.distcp").write_bytes(b"x")
        saved.store.finish(state(1), {"policy/__0_0.distcp": "0", "policy/__1_0.distcp": "0"})
    assert saved.names() == []


def test_the_best_are_kept_and_always_the_latest(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "checkpoints", BEST_TWO)
    for step, accuracy in enumerate([0.5, 0.9, 0.7, 0.8, 0.1], start=1):
        saved.save(step, **{ACCURACY: accuracy})
    assert saved.names() == ["step_2", "step_4", "step_5"]


def test_ties_keep_the_newer(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "checkpoints", BEST_TWO)
    for step in range(1, 5):
        saved.save(step, **{ACCURACY: 0.5})
    assert saved.names() == ["step_3", "step_4"]


def test_a_checkpoint_without_the_metric_is_the_worst(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "checkpoints", BEST_TWO)
    saved.save(1, **{ACCURACY: 0.1})
    saved.save(2)
    saved.save(3, **{ACCURACY: 0.2})
    assert saved.names() == ["step_1", "step_3"]


def test_lower_can_be_better(tmp_path: Path) -> None:
    retention = Retention(keep_top_k=1, metric="train/loss", is_higher_better=False)
    saved = Checkpoints(tmp_path / "checkpoints", retention)
    for step, loss in enumerate([0.3, 0.1, 0.2], start=1):
        saved.save(step, **{"train/loss": loss})
    assert saved.names() == ["step_2", "step_3"]


def test_a_step_saved_again_replaces_the_earlier_one(saved: Checkpoints) -> None:
    saved.save(1, **{ACCURACY: 0.1})
    saved.save(1, **{ACCURACY: 0.2})
    latest = saved.store.latest()
    assert latest is not None
    assert latest.state.metrics == {ACCURACY: 0.2}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1 << 20) as path:
        yield path


def test_a_checkpoint_that_has_no_space_is_told_before_anything_is_written(disk: Path) -> None:
    saved = Checkpoints(disk / "checkpoints")
    saved.save(1)
    filler = fill(disk)
    with pytest.raises(DiskFull, match=r"step 2: 0 B are free in .*it needs \d+ B.* whole.*checkpoint_dir"):
        saved.save(2)
    assert saved.names() == ["step_1"]
    filler.unlink()
    saved.save(2)


def test_the_first_checkpoint_needs_what_is_expected_of_it(disk: Path) -> None:
    store = CheckpointStore(disk / "checkpoints", ALL, print, expected_bytes=2 << 20)
    with (
        pytest.raises(DiskFull, match=r"step 1: 1\.049 MB are free in .*it needs 2\.097 MB"),
        store.writing(1),
    ):
        pass


def test_a_disk_that_gets_full_while_saving_is_told_and_the_last_checkpoint_stays(disk: Path) -> None:
    saved = Checkpoints(disk / "checkpoints")
    saved.save(1)
    with (
        pytest.raises(DiskFull, match="no space for the checkpoint of step 2: 0 B are free in "),
        saved.store.writing(2) as path,
    ):
        (path / "policy" / "weights").write_bytes(b"half")
        fill(disk)
        raise RuntimeError("a worker's write failed for a reason that it does not tell")
    assert saved.names() == ["step_1"]
    verify_group_files(read_checkpoint(disk / "checkpoints" / "step_1"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 99}', '{"format_version": 1}'])
def test_a_state_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|format_version|keys"):
        TrainingState.from_json(text)
