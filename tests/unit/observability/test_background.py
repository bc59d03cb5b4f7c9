from __future__ import annotations

import threading

from nemo_like.observability.background import BackgroundLogger


class Recorder:
    """Keeps what it is given; may be told to wait."""

    def __init__(self, release=None):
        self.logged, self.is_closed, self.release = [], False, release

    def log(self, step, metrics):
        if self.release:
            self.release.wait(60.0)
        self.logged.append((step, dict(metrics)))

    def close(self):
        self.is_closed = True


def test_the_recorder_gets_everything_in_order_and_is_closed():
    recorder = Recorder()
    logger = BackgroundLogger("memory", lambda: recorder)
    for step in range(3):
        logger.log(step, {"train/reward": step / 2})
    assert logger.finish(timeout_s=60.0) is None
    assert recorder.logged == [(step, {"train/reward": step / 2}) for step in range(3)]
    assert recorder.is_closed


def test_no_call_waits_for_the_back_end_to_start():
    release = threading.Event()

    def start():
        release.wait(60.0)
        return recorder

    recorder = Recorder()
    logger = BackgroundLogger("memory", start)
    logger.log(1, {"train/reward": 0.5})
    assert recorder.logged == []  # and this line was reached
    release.set()
    assert logger.finish(timeout_s=60.0) is None
    assert recorder.logged == [(1, {"train/reward": 0.5})]


def test_what_goes_wrong_is_told_at_the_end_and_raises_nowhere():
    def start():
        raise PermissionError("no key")

    logger = BackgroundLogger("W&B", start)
    logger.log(1, {"train/reward": 0.5})
    assert logger.finish(timeout_s=60.0) == "W&B failed: PermissionError: no key"


def test_an_expired_deadline_is_reported_and_not_waited_for():
    release = threading.Event()
    recorder = Recorder(release)
    logger = BackgroundLogger("MLflow", lambda: recorder)
    logger.log(1, {"train/reward": 0.5})
    problem = logger.finish(timeout_s=0.2)
    assert not recorder.is_closed
    release.set()
    assert problem is not None
    assert "MLflow did not finish within 0.2 s" in problem


def test_finishing_twice_waits_once():
    logger = BackgroundLogger("memory", Recorder)
    assert logger.finish(timeout_s=60.0) is None
    assert logger.finish(timeout_s=60.0) is None
