"""Calls every worker of an engine, and raises a worker's error only when all workers have answered.

vLLM's executor raises the first error among its workers' answers and leaves the later answers unread; the
next call would then read them as its own (``vllm/v1/executor/multiproc_executor.py``). So a worker that
raises returns its error as an answer here.

It works around a fault of vllm 0.32.0: the public ``collective_rpc`` has it. This module can go with a vLLM
that reads all answers before it raises.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_log = logging.getLogger(__name__)


class Workers(Protocol):
    """The method of vLLM's ``LLMEngine`` that is used here."""

    def collective_rpc(
        self, method: Callable[..., Any], *, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class _Failed:
    """The answer of a worker that raised."""

    error: Exception


def call_workers(engine: Workers, method: str, arguments: Mapping[str, Any]) -> Any:
    """Call a method of every worker, and return the first worker's answer when all have answered.

    Raises the error of the first worker that failed; RuntimeError with its text if it cannot be pickled.
    """
    answers = engine.collective_rpc(_answer, args=(method,), kwargs=dict(arguments))
    for answer in answers:
        if isinstance(answer, _Failed):
            raise answer.error
    return answers[0]


def _answer(worker: Any, method: str, **arguments: Any) -> Any:
    """Call the method in the worker's process, and return the result or the error."""
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
