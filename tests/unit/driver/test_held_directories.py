from __future__ import annotations

import shutil
import threading

import pytest

from nemo_like.driver.held_directories import HeldDirectories
from nemo_like.observability.run_lock import DirectoryInUse, DirectoryLock

RENEW_S = 0.01
LONG_S = 30.0


def test_a_run_that_lost_its_directory_is_interrupted_and_knows_why(tmp_path):
    held = HeldDirectories([tmp_path / "run"], RENEW_S)
    with pytest.raises(KeyboardInterrupt), held.renewing(pytest.fail):
        shutil.rmtree(tmp_path / "run")
        threading.Event().wait(LONG_S)
    assert "1.json is gone" in held.lost


def test_a_run_that_is_left_alone_keeps_its_directories_until_it_lets_go(tmp_path):
    directories = [tmp_path / "run", tmp_path / "checkpoints"]
    held = HeldDirectories([*directories, directories[0]], RENEW_S)
    with held.renewing(pytest.fail):
        for directory in directories:
            with pytest.raises(DirectoryInUse):
                DirectoryLock(directory)
    assert held.lost is None
    held.release()
    for directory in directories:
        DirectoryLock(directory)


def test_what_was_taken_is_given_back_when_another_directory_is_in_use(tmp_path):
    DirectoryLock(tmp_path / "checkpoints")
    with pytest.raises(DirectoryInUse, match="checkpoints is in use"):
        HeldDirectories([tmp_path / "run", tmp_path / "checkpoints"], RENEW_S)
    DirectoryLock(tmp_path / "run")


def test_a_sign_of_life_that_fails_is_a_warning_and_the_run_goes_on(tmp_path):
    held = HeldDirectories([tmp_path], RENEW_S)
    warnings, warned = [], threading.Event()

    def warn(text):
        warnings.append(text)
        warned.set()

    with held.renewing(warn):
        (tmp_path / "starts").rename(tmp_path / "aside")
        (tmp_path / "starts").touch()  # a file where a directory should be
        assert warned.wait(LONG_S)
    assert held.lost is None
    assert "could not give a sign of life in its directory" in warnings[0]
