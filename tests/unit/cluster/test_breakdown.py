"""What makes a process count as dead although it lives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest
from ray.exceptions import RayActorError

from nemo_like.cluster import breakdown
from nemo_like.cluster.actor_errors import Overdue
from nemo_like.cluster.breakdown import Breakdown, break_down, breaking_down, in_short, is_out_of_memory
from nemo_like.data_plane.storage_errors import StorageFailed


class OutOfMemoryError(RuntimeError):
    """As torch has one."""


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of which nothing has broken down."""
    monkeypatch.setattr(breakdown, "_breakdown", Future())


def raised(error: Exception, counts: Callable[[Exception], bool] = lambda error: True) -> Breakdown | None:
    """What the process says of itself once ``error`` has come out of a block."""
    with pytest.raises(type(error)), breaking_down(counts):
        raise error
    said = breakdown.breakdown_future()
    return said.result() if said.done() else None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        OSError(5, "Input/output error"),
    ],
)
def test_what_machine_and_libraries_raise_breaks_a_process_down(error: Exception) -> None:
    assert raised(error) == Breakdown(type(error).__name__, in_short(error))


def caused_by(cause: Exception) -> Exception:
    error = RuntimeError("it was not sent")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ValueError("must be positive"), id="a mistake in code"),
        pytest.param(StorageFailed("a storage unit died"), id="an error of the project"),
        pytest.param(caused_by(RayActorError()), id="another process's death"),
        pytest.param(Overdue("not in time"), id="a deadline"),
        pytest.param(TimeoutError(), id="a library's deadline"),
    ],
)
def test_other_errors_leave_a_process_of_use(error: Exception) -> None:
    assert raised(error) is None


def test_where_others_may_be_to_blame_only_missing_memory_counts() -> None:
    assert raised(RuntimeError("connection closed by peer"), is_out_of_memory) is None
    assert raised(RuntimeError("DefaultCPUAllocator: can't allocate memory"), is_out_of_memory) is not None


def test_the_first_error_of_a_process_is_the_one_that_is_told() -> None:
    break_down(RuntimeError("one"), "loading broke off: ")
    break_down(RuntimeError("two"))
    assert breakdown.breakdown_future().result() == Breakdown(
        "RuntimeError", "loading broke off: RuntimeError: one"
    )


def test_an_error_is_told_in_one_line_that_a_terminal_can_show() -> None:
    assert in_short(RuntimeError("a\n  b\x1b[2J")) == "RuntimeError: a b\\x1b[2J"
    assert in_short(MemoryError()) == "MemoryError"
    assert in_short(RuntimeError("x" * 400)) == f"RuntimeError: {'x' * 300}..."
