"""The child's end of the calls that a ``parent_side.Child`` makes.

    parent ── (call id, arguments) ────────────────────▶ stdin     child
           ◀── (call id, whether it returned, content) ── stdout

Each message is a frame: its length, and a pickle, or JSON where the two interpreters share no classes. The
content is the result of the call, or the text of the error that it raised. The first call prepares the child
and runs in its main thread; later calls run side by side on an event loop, until the parent's end is closed.
Standard library only, since a child may have an interpreter that finds nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class FrameCodec:
    """How messages become bytes, and bytes messages."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


PICKLE = FrameCodec(pickle.dumps, pickle.loads)
JSON = FrameCodec(lambda content: json.dumps(content).encode(), json.loads)


def frame(content: bytes) -> bytes:
    """Return ``content`` after its length, an unsigned big-endian integer."""
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


def next_frame(stream: BinaryIO) -> bytes:
    """Read the content of the next frame. Raises EOFError where the stream ends before the frame does."""
    length = int.from_bytes(header := stream.read(_LENGTH_BYTES), "big")
    content = stream.read(length)
    if len(header) < _LENGTH_BYTES or len(content) < length:
        raise EOFError
    return content


class ParentCalls:
    """Receives the calls of the parent and answers them."""

    def __init__(self, codec: FrameCodec = PICKLE) -> None:
        """Move the frames to descriptors of their own, which no program that a call starts inherits.

        From then on stdin is empty, and prints go to stderr, so that none gets between frames.
        """
        self._codec = codec
        self._calls, self._answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        # References to tasks that nobody awaits, so that they are not garbage-collected while they run.
        self._running: set[asyncio.Task[None]] = set()

    def answer_first(self, function: Callable[..., Any]) -> bool:
        """Answer the first call with what ``function`` returns; return whether it returned."""
        call_id, arguments = self._next_call()
        try:
            self._write(call_id, True, function(*arguments))
        except Exception as error:
            self._write_error(call_id, error)
            return False
        return True

    def serve(self, function: Callable[..., Awaitable[Any]]) -> None:
        """Answer calls with what ``function`` returns, side by side, until the parent's end is closed."""
        try:
            asyncio.run(self._serve(function))
        except SystemExit as ended:
            # An orderly exit would close ``_calls``, whose lock the reading thread holds, and abort.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(ended.code if isinstance(ended.code, int) else 1)

    async def _serve(self, function: Callable[..., Awaitable[Any]]) -> None:
        loop, waiting = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(waiting.put_nowait, self._next_call())
            except (EOFError, OSError):
                # The parent is gone: exit at once, even if a call blocks the loop.
                os._exit(0)

        threading.Thread(target=read, name="calls", daemon=True).start()
        while True:
            task = loop.create_task(self._answer(function, *await waiting.get()))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _answer(
        self, function: Callable[..., Awaitable[Any]], call_id: int, arguments: Sequence[Any]
    ) -> None:
        try:
            self._write(call_id, True, await function(*arguments))
        except Exception as error:
            self._write_error(call_id, error)

    def _next_call(self) -> Any:
        return self._codec.decode(next_frame(self._calls))

    def _write_error(self, call_id: int, error: Exception) -> None:
        traceback.print_exc()
        self._write(call_id, False, f"{type(error).__name__}: {error}")

    def _write(self, call_id: int, has_returned: bool, content: Any) -> None:
        self._answers.write(frame(self._codec.encode((call_id, has_returned, content))))
        self._answers.flush()
