"""Workers of an engine answer a call all, also where some of them fail."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from nemo_like.compat.worker_calls import call_workers


class Unsendable(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, *, what: str) -> None:
        super().__init__(what)


class Worker:
    def __init__(self, error: Exception | None = None) -> None:
        self._error, self.asked = error, 0

    def share(self, of: int) -> int:
        self.asked += 1
        if self._error is not None:
            raise self._error
        return of // 2


class Engine:
    """Sends calls and answers as vLLM's executor does."""

    def __init__(self, *workers: Worker) -> None:
        self._workers = workers

    def collective_rpc(
        self, method: Callable[..., Any], *, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        called = pickle.loads(pickle.dumps(method))
        return [pickle.loads(pickle.dumps(called(one, *args, **kwargs))) for one in self._workers]


def test_the_first_workers_answer_is_returned() -> None:
    assert call_workers(Engine(Worker(), Worker()), "share", {"of": 6}) == 3


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_is_raised_once_all_have_answered(place: int) -> None:
    workers = [Worker(), Worker(), Worker()]
    workers[place] = Worker(ValueError("no such tensor"))
    with pytest.raises(ValueError, match="no such tensor"):
        call_workers(Engine(*workers), "share", {"of": 6})
    assert [one.asked for one in workers] == [1, 1, 1]


def test_an_error_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(RuntimeError, match="Unsendable: no memory"):
        call_workers(Engine(Worker(Unsendable(what="no memory"))), "share", {"of": 6})
