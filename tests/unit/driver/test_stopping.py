from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.driver.run_failures import CallbackFailed
from nemo_like.driver.stopping import StopRequests, ignore_first_interrupt


def requests_config(limit: str | None = None, *, enabled: bool = True) -> Any:
    return SimpleNamespace(enabled=enabled, checkpoint_must_save_by=limit)


def requests(limit: str | None = None, *, enabled: bool = True, **environment: str) -> StopRequests:
    cfg = requests_config(limit, enabled=enabled)
    return StopRequests(cfg, environment=environment, clock=lambda: 1000.0, stopwatch=lambda: 20.0)


def test_nothing_stops_a_run_that_nobody_asked_to_stop() -> None:
    assert requests().reason(next_step_s=1e9) is None


@pytest.mark.parametrize(("next_step_s", "stops"), [(59.0, False), (61.0, True)])
def test_the_last_step_is_the_one_that_still_fits(next_step_s: float, stops: bool) -> None:
    reason = requests("00:00:01:00").reason(next_step_s)
    assert (reason is not None) is stops
    if reason:
        assert "checkpoint_must_save_by=00:00:01:00" in reason


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_somebody_sets_moves_no_limit_on_how_long_a_run_may_take(jump_s: float) -> None:
    now_s = {"clock": 1000.0, "stopwatch": 20.0}
    stop = StopRequests(
        requests_config("00:00:01:00"),
        environment={},
        clock=lambda: now_s["clock"],
        stopwatch=lambda: now_s["stopwatch"],
    )
    now_s |= {"clock": 1030.0 + jump_s, "stopwatch": 50.0}
    assert stop.reason(next_step_s=29.0) is None
    assert "checkpoint_must_save_by=00:00:01:00" in (stop.reason(next_step_s=31.0) or "")


def test_the_end_of_the_slurm_job_counts_too() -> None:
    stop = requests(SLURM_JOB_END_TIME="1030")
    assert stop.reason(next_step_s=29.0) is None
    assert "Slurm" in (stop.reason(next_step_s=31.0) or "")


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Tests in the background of a shell ignore SIGINT."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


CTRL_C_AGAIN = "finishing the step under way, then saving and stopping; a second Ctrl-C stops at once"
CTRL_C = "finishing the step under way, then saving and stopping; Ctrl-C stops at once"


@pytest.mark.parametrize(
    ("signum", "name", "then"),
    [
        (signal.SIGINT, "SIGINT (Ctrl-C)", CTRL_C_AGAIN),
        (signal.SIGTERM, "SIGTERM", CTRL_C),
        (signal.SIGUSR1, "SIGUSR1", CTRL_C),
    ],
)
def test_a_signal_asks_for_a_stop_and_one_line_says_so(signum: signal.Signals, name: str, then: str) -> None:
    stop, told = requests(), list[str]()
    with stop.listening(told.append):
        signal.raise_signal(signum)
        assert stop.reason(next_step_s=0.0) == f"received {name}"
        signal.raise_signal(signal.SIGUSR1)  # a scheduler may ask twice
        assert stop.reason(next_step_s=0.0) == f"received {name}"
    assert told == [f"received {name}: {then}"]


def test_the_line_is_told_by_another_thread_since_a_signal_may_come_while_a_line_is_printed() -> None:
    told: list[threading.Thread] = []
    with requests().listening(lambda line: told.append(threading.current_thread())):
        signal.raise_signal(signal.SIGINT)
    assert [thread is threading.main_thread() for thread in told] == [False]
    assert not told[0].is_alive()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_interrupts(first: signal.Signals, second: signal.Signals) -> None:
    told: list[str] = []
    with requests().listening(told.append):
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    assert len(told) == 1


def handlers() -> list[Any]:
    return [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def test_handlers_are_put_back() -> None:
    before = handlers()
    with requests().listening(pytest.fail):
        assert not any(one is other for one, other in zip(handlers(), before, strict=True))
    assert handlers() == before


def test_a_run_in_the_background_goes_on_ignoring_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = requests()
    with stop.listening(pytest.fail):
        signal.raise_signal(signal.SIGINT)
        assert stop.reason(next_step_s=0.0) is None


def test_without_checkpoints_signals_stay_what_they_are() -> None:
    before = handlers()
    stop = requests("00:00:00:01", enabled=False)
    with stop.listening(pytest.fail):
        assert handlers() == before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.reason(next_step_s=100.0) is None


def test_when_all_is_done_only_a_second_interrupt_ends_the_process() -> None:
    previous = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        ignore_first_interrupt()
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def test_what_is_false_but_not_none_asks_for_a_stop_even_without_checkpoints() -> None:
    told: list[tuple[int, dict[str, float]]] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> bool | None:
        told.append((step, dict(metrics)))
        return None if step == 1 else metrics["train/reward"] < 0.5

    stop = StopRequests(requests_config(enabled=False), on_step, environment={})
    for step, reward in enumerate([0.9, 0.4], start=1):
        stop.after_step(step, {"train/reward": reward})
        assert stop.reason(next_step_s=0.0) is None
    stop.after_step(3, {"train/reward": 0.6})
    assert stop.reason(next_step_s=0.0) == stop.by_callback == "on_step returned False after step 3"
    assert told[1] == (2, {"train/reward": 0.4})


def test_a_callback_cannot_change_what_the_run_goes_on_with() -> None:
    def on_step(step: int, metrics: Any) -> None:
        metrics["train/reward"] = 1.0

    metrics = {"train/reward": 0.0}
    with pytest.raises(CallbackFailed, match="on_step raised TypeError after step 1") as raised:
        StopRequests(requests_config(), on_step, environment={}).after_step(1, metrics)
    assert isinstance(raised.value.__cause__, TypeError)
    assert metrics == {"train/reward": 0.0}


def test_a_ctrl_c_in_a_callback_interrupts() -> None:
    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StopRequests(requests_config(), on_step, environment={}).after_step(1, {})
