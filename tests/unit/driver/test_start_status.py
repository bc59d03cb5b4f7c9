from __future__ import annotations

from typing import Any

from nemo_like.driver.start_status import StartStatus


class Shown:
    """A logger that keeps what it is told; the clock is the test's."""

    def __init__(self) -> None:
        self.now_s = 500.0
        self.lines: list[str] = []
        self.refreshed: list[str] = []

    def status(self, text: str) -> None:
        self.lines.append(text)

    def refresh_status(self, text: str) -> None:
        self.refreshed.append(text)


def start_status(shown: Any) -> StartStatus:
    return StartStatus(shown, clock=lambda: shown.now_s)


def test_a_short_start_shows_nothing() -> None:
    shown = Shown()
    status = start_status(shown)
    for seconds in range(10):
        status.show(["engine-0"], seconds)
    assert not shown.lines and not shown.refreshed


def test_a_long_start_names_who_has_not_answered_in_a_line_per_quarter_of_a_minute() -> None:
    shown = Shown()
    status = start_status(shown)
    for second in range(30):
        shown.now_s = 500.0 + second
        status.show(["engine-0", "engine-1"] if second < 20 else ["engine-1"], second + 0.4)
    assert shown.lines == ["waiting for engine-0, engine-1 (10 s)", "waiting for engine-1 (25 s)"]
    assert len(shown.refreshed) == 18  # each other second since the tenth
    assert shown.refreshed[0] == "waiting for engine-0, engine-1 (11 s)"


def test_a_wait_that_follows_another_prints_no_line_sooner() -> None:
    """Engines that share a GPU start one after the other."""
    shown = Shown()
    status = start_status(shown)
    status.show(["engine-0"], 12.0)
    shown.now_s += 11.0
    status.show(["engine-1"], 10.5)
    assert shown.lines == ["waiting for engine-0 (12 s)"]
    assert shown.refreshed == ["waiting for engine-1 (10 s)"]


def test_of_many_processes_the_first_are_named() -> None:
    shown = Shown()
    start_status(shown).show([f"engine-{index}" for index in range(9)], 10.0)
    names = ", ".join(f"engine-{index}" for index in range(6))
    assert shown.lines == [f"waiting for {names} and 3 more (10 s)"]
