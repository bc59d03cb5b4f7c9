from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from nemo_like.driver.stopping import StopRequests, ignore_first_interrupt


def requests(limit: str | None = None, *, enabled: bool = True, **environment: str) -> StopRequests:
    cfg = SimpleNamespace(enabled=enabled, checkpoint_must_save_by=limit)
    return StopRequests(cfg, environment=environment, clock=lambda: 1000.0)


def test_nothing_stops_a_run_that_nobody_asked_to_stop() -> None:
    assert requests().reason(next_step_s=1e9) is None


@pytest.mark.parametrize(("next_step_s", "stops"), [(59.0, False), (61.0, True)])
def test_the_last_step_is_the_one_that_still_fits(next_step_s: float, stops: bool) -> None:
    reason = requests("00:00:01:00").reason(next_step_s)
    assert (reason is not None) is stops
    if reason:
        assert "checkpoint_must_save_by=00:00:01:00" in reason


def test_the_end_of_the_slurm_job_counts_too() -> None:
    stop = requests(SLURM_JOB_END_TIME="1030")
    assert stop.reason(next_step_s=29.0) is None
    assert "Slurm" in (stop.reason(next_step_s=31.0) or "")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop(signum: signal.Signals) -> None:
    stop = requests()
    with stop.listening():
        os.kill(os.getpid(), signum)
        assert stop.reason(next_step_s=0.0) == f"received {signum.name}"


def test_a_second_sigterm_interrupts() -> None:
    stop = requests()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with requests().listening():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_checkpoints_signals_stay_what_they_are() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = requests("00:00:00:01", enabled=False)
    with stop.listening():
        assert signal.getsignal(signal.SIGTERM) is before
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
