from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nemo_like.configuration import Config
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.run_journal import RunJournal, Stretch
from nemo_like.rollout.prompts import PromptBatch, RolloutMode, WantedGroups

EXACT = ("grpo.overlap=exact", "grpo.samples_kept_together=1")


def prompts(step: int = 1, indices: tuple[int, ...] = (3, 1, 2)) -> PromptBatch:
    return PromptBatch(
        mode=RolloutMode.training, step=step, policy_version=step - 1, indices=indices, num_generations=2
    )


class Opened:
    """A journal that has begun its first stretch, and what it told engines and people."""

    def __init__(
        self, cfg: Config, run: Path, after_step: int = 0, data: Sequence[str] = ("digest",)
    ) -> None:
        self.stretches: list[Stretch] = []
        self.notes: list[str] = []
        self.journal = RunJournal(cfg, run / "journal", self.stretches.append, self.notes.append, data)
        self.journal.begin_stretch(after_step)

    def writes(self, *parts: tuple[int, ...]) -> None:
        self.journal.begun(prompts())
        for part in parts:
            self.journal.took(prompts(), part)


@pytest.fixture
def opened(demo: Callable[..., Config], tmp_path: Path) -> Callable[..., Opened]:
    def make(name: str, *overrides: str, after_step: int = 0) -> Opened:
        return Opened(demo(*EXACT, *overrides), tmp_path / name, after_step)

    return make


def test_only_runs_whose_metrics_depend_on_timing_have_a_journal(
    demo: Callable[..., Config], tmp_path: Path
) -> None:
    for overrides, is_on in [
        ((), False),
        (EXACT, True),
        (("grpo.max_staleness=1",), True),
        ((*EXACT, "rollout.journal=false"), False),
    ]:
        assert RunJournal(demo(*overrides), tmp_path, print, print, []).is_on is is_on


def test_a_continued_run_takes_groups_in_the_order_of_its_earlier_process(
    opened: Callable[..., Opened],
) -> None:
    opened("run").writes((2,), (0, 1))
    again = opened("run")
    again.journal.begun(prompts())
    wanted = [again.journal.wanted(prompts(), 1) for _ in range(3)]
    assert wanted == [WantedGroups(1, (2,)), WantedGroups(1, (0, 1)), WantedGroups(1)]
    assert again.stretches[0].followed == again.stretches[0].path.with_name("after-00000.earlier")


def test_a_line_that_a_kill_cut_short_is_left_out(opened: Callable[..., Opened], tmp_path: Path) -> None:
    opened("run").writes((2,))
    with (tmp_path / "run/journal/after-00000/driver.jsonl").open("a") as file:
        file.write('{"event": "part", "rollout": "train')
    again = opened("run")
    assert again.journal.wanted(prompts(), 1) == WantedGroups(1, (2,))
    assert again.journal.wanted(prompts(), 1) == WantedGroups(1)


def test_another_runs_journal_is_followed_by_its_name(opened: Callable[..., Opened], tmp_path: Path) -> None:
    opened("first").writes((1, 2), (0,))
    second = opened("second", f"rollout.follow_journal={tmp_path / 'first'}")
    assert second.stretches[0].followed == tmp_path / "first/journal/after-00000"
    second.writes(*[second.journal.wanted(prompts(), 1).positions for _ in range(2)])
    lines = [(tmp_path / run / "journal/after-00000/driver.jsonl").read_text() for run in ("first", "second")]
    assert lines[0] == lines[1]


def test_a_stretch_begins_after_each_checkpoint(opened: Callable[..., Opened], tmp_path: Path) -> None:
    run = opened("run", after_step=0)
    run.journal.begin_stretch(10)
    run.journal.trained(11)
    (start, trained) = (tmp_path / "run/journal/after-00010/driver.jsonl").read_text().splitlines()
    assert json.loads(start)["settings"]["grpo.overlap"] == "exact"
    assert json.loads(trained) == {"event": "trained", "step": 11}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("grpo.seed=7",), "its run had grpo.seed=1, here 7"),
        (("grpo.num_generations_per_prompt=4",), "its run had grpo.num_generations_per_prompt=8, here 4"),
    ],
)
def test_a_journal_of_a_run_with_other_settings_is_refused(
    opened: Callable[..., Opened], tmp_path: Path, overrides: tuple[str, ...], told: str
) -> None:
    opened("first")
    with pytest.raises(RunFailed, match=told):
        opened("second", f"rollout.follow_journal={tmp_path / 'first'}", *overrides)


def test_a_journal_of_a_run_with_other_data_is_refused(demo: Callable[..., Config], tmp_path: Path) -> None:
    Opened(demo(*EXACT), tmp_path / "first", data=["0a"])
    follow = demo(*EXACT, f"rollout.follow_journal={tmp_path / 'first'}")
    with pytest.raises(RunFailed, match=r"its run had the digests of data\.train=\['0a'\], here \['0b'\]"):
        Opened(follow, tmp_path / "second", data=["0b"])


def test_a_journal_from_before_there_were_digests_is_followed(
    opened: Callable[..., Opened], tmp_path: Path
) -> None:
    opened("run").writes((2,))
    path = tmp_path / "run/journal/after-00000/driver.jsonl"
    start, *others = path.read_text().splitlines(keepends=True)
    event = json.loads(start)
    del event["settings"]["the digests of data.train"]
    path.write_text("".join([json.dumps(event) + "\n", *others]))
    assert opened("run").journal.wanted(prompts(), 1) == WantedGroups(1, (2,))


def test_a_run_without_a_journal_cannot_be_followed(opened: Callable[..., Opened], tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="cannot be followed: FileNotFoundError"):
        opened("second", f"rollout.follow_journal={tmp_path / 'first'}")


def test_a_rollout_with_other_prompts_is_refused(opened: Callable[..., Opened], tmp_path: Path) -> None:
    opened("first").writes((0, 1, 2))
    second = opened("second", f"rollout.follow_journal={tmp_path / 'first'}")
    with pytest.raises(RunFailed, match=r"began with policy version 0 and the prompts \[3, 1, 2\]"):
        second.journal.begun(prompts(indices=(4, 5, 6)))


def test_nobody_follows_a_run_in_which_samples_began_again(
    opened: Callable[..., Opened], tmp_path: Path
) -> None:
    first = opened("first")
    first.writes((0,))
    first.journal.abandoned("step 1")
    with pytest.raises(RunFailed, match="a process died in step 1 of the run"):
        opened("second", f"rollout.follow_journal={tmp_path / 'first'}")
    again = opened("first")
    assert "from here on this run goes its own way" in again.notes[0]
    assert again.journal.wanted(prompts(), 1) == WantedGroups(1)
    assert again.stretches[0].followed is None


def _steps_of(journal: RunJournal, first: int, last: int) -> list[tuple[int, ...]]:
    """Make these steps, each in the parts that the journal names or else in one; return the parts' groups."""
    made = []
    for step in range(first, last + 1):
        journal.begun(prompts(step))
        taken: list[int] = []
        while len(taken) < 3:
            made.append(journal.wanted(prompts(step), 3).positions or (0, 1, 2))
            journal.took(prompts(step), made[-1])
            taken += made[-1]
        journal.trained(step)
    return made


def _first_parts(journal: RunJournal, first: int, last: int) -> list[tuple[int, ...]]:
    """Make these steps with group 1 before the others, which no other run here does."""
    for step in range(first, last + 1):
        journal.begun(prompts(step))
        for part in ((1,), (0, 2)):
            journal.wanted(prompts(step), 1)
            journal.took(prompts(step), part)
        journal.trained(step)
    return [(1,), (0, 2)] * (last + 1 - first)


def test_a_process_that_was_killed_while_it_followed_does_not_shorten_what_the_next_one_follows(
    opened: Callable[..., Opened],
) -> None:
    expected = _first_parts(opened("run").journal, 1, 4)
    assert _steps_of(opened("run").journal, 1, 2) == expected[:4]
    opened("run")  # killed at once
    assert _steps_of(opened("run").journal, 1, 4) == expected


def test_a_stretch_in_which_nothing_began_is_not_followed(
    opened: Callable[..., Opened], tmp_path: Path
) -> None:
    """Its process may have been killed before the engines' files were there."""
    opened("run")
    assert opened("run").stretches[0].followed is None
    (tmp_path / "run/journal/after-00000/driver.jsonl").unlink()
    assert opened("run").stretches[0].followed is None


def test_a_later_stretch_is_followed_by_a_run_that_has_followed_all_before(
    opened: Callable[..., Opened], tmp_path: Path
) -> None:
    first = opened("run").journal
    _first_parts(first, 1, 2)
    first.begin_stretch(2)
    expected = _first_parts(first, 3, 4)
    again = opened("run")
    _steps_of(again.journal, 1, 2)
    again.journal.begin_stretch(2)
    assert again.stretches[1].followed == tmp_path / "run/journal/after-00002.earlier"
    assert _steps_of(again.journal, 3, 4) == expected


@pytest.mark.parametrize("how", ["a process died", "the journal ended"])
def test_a_later_stretch_is_not_followed_by_a_run_that_went_its_own_way(
    opened: Callable[..., Opened], tmp_path: Path, how: str
) -> None:
    """The stretch of the earlier process is of other weights: its responses have other lengths."""
    first = opened("run").journal
    _first_parts(first, 1, 2)
    first.begin_stretch(2)
    _first_parts(first, 3, 4)
    if how == "the journal ended":
        path = tmp_path / "run/journal/after-00000/driver.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    again = opened("run")
    again.journal.begun(prompts())
    if how == "a process died":
        again.journal.abandoned("step 1")
    _steps_of(again.journal, 1, 2)
    again.journal.begin_stretch(2)
    assert again.stretches[1].followed is None


def test_a_stretch_that_begins_again_follows_what_it_was_to_follow(opened: Callable[..., Opened]) -> None:
    """A death that is noticed while a stretch begins undoes nothing."""
    expected = _first_parts(opened("run").journal, 1, 2)
    again = opened("run")
    again.journal.abandoned("the weight sync after step 0")
    again.journal.begin_stretch(0)
    assert again.notes == []
    assert _steps_of(again.journal, 1, 2) == expected


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b"{\n", b"[1]\n", b"[" * 100_000 + b"\n"])
def test_a_journal_that_is_damaged_is_refused_with_a_remedy(
    opened: Callable[..., Opened], tmp_path: Path, damage: bytes
) -> None:
    opened("run").writes((0, 1), (2,))
    (path,) = (tmp_path / "run" / "journal").glob("*/driver.jsonl")
    path.write_bytes(path.read_bytes() + damage + b"\n")
    with pytest.raises(RunFailed, match=r"cannot be followed: .*rollout\.journal=false"):
        opened("run")
