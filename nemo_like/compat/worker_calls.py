"""Calls of every worker of an engine, which all answer before an error is raised.

vLLM's executor raises the first error among the answers of its workers and leaves those behind it unread;
the next call would then take them for its own (``vllm/v1/executor/multiproc_executor.py``). So an error is an
answer here.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_log = logging.getLogger(__name__)


class Workers(Protocol):
    """What is needed of vLLM's ``LLMEngine``."""

    def collective_rpc(
        self, method: Callable[..., Any], *, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class _Failed:
    """The answer of a worker that raised."""

    error: Exception


def call_workers(engine: Workers, method: str, arguments: Mapping[str, Any]) -> Any:
    """Call a method of every worker, and return the first worker's answer when all have answered.

    Raises what the first worker raised that failed; where that cannot be sent, RuntimeError with its text.
    """
    answers = engine.collective_rpc(_answer, args=(method,), kwargs=dict(arguments))
    for answer in answers:
        if isinstance(answer, _Failed):
            raise answer.error
    return answers[0]


def _answer(worker: Any, method: str, **arguments: Any) -> Any:
    """Return a worker's answer; in the worker's process."""
    try:
        return getattr(worker, method)(**arguments)
    except Exception as error:
        _log.exception("%s failed", method)
        return _Failed(_sendable(error))


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
