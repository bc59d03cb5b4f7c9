from __future__ import annotations

import os

import pytest

from nemo_like.cluster.stacks import Frame, ProcessDump, Thread, faulthandler_threads

SHELL = "/somewhere/nemo_like/cluster/actors.py"
WATCH = Thread("watch", (Frame("wait", "/lib/threading.py", 1), Frame("watch", SHELL, 2)))
IDLE = Thread("MainThread", (Frame("main_loop", "/lib/ray/worker.py", 3),))
CALL = Thread(
    "actor",
    (
        Frame("recv", "/lib/torch/distributed.py", 4),
        Frame("Worker.train", "/somewhere/nemo_like/policy/workers/worker.py", 5),
        Frame("_Shell._call", SHELL, 6),
        Frame("_SerialShell.call", SHELL, 7),
    ),
)
LOOP = Thread("engine", (Frame("_step", "/somewhere/nemo_like/generation/vllm_engine.py", 8),))


def dump(*threads: Thread, problem: str = "") -> ProcessDump:
    return ProcessDump("worker-1", 4711, "sleeping", "ray::call", threads, problem)


@pytest.mark.parametrize(
    ("threads", "summary"),
    [
        (
            (IDLE, WATCH, LOOP, CALL),
            "recv (torch/distributed.py:4) < Worker.train (workers/worker.py:5)",
        ),
        ((IDLE, WATCH, LOOP), "_step (generation/vllm_engine.py:8)"),
        ((IDLE, WATCH), "main_loop (ray/worker.py:3)"),
    ],
)
def test_the_thread_with_the_call_tells_most_then_our_own_code(
    threads: tuple[Thread, ...], summary: str
) -> None:
    assert dump(*threads).summary() == f"worker-1 (process 4711, sleeping): {summary}"


def test_a_process_is_in_a_call_when_one_of_its_threads_carries_one_out() -> None:
    assert dump(IDLE, CALL).is_in_call
    assert not dump(IDLE, WATCH, LOOP).is_in_call


def test_a_process_without_stacks_says_why() -> None:
    assert dump(problem="py-spy is not installed").summary().endswith(": py-spy is not installed")


def test_the_whole_text_has_every_thread() -> None:
    assert dump(IDLE, LOOP).text() == os.linesep.join(
        [
            "worker-1: process 4711, sleeping: ray::call",
            "  thread MainThread",
            "    main_loop (ray/worker.py:3)",
            "  thread engine",
            "    _step (generation/vllm_engine.py:8)",
        ]
    )


def test_what_faulthandler_writes_is_read_between_other_output() -> None:
    text = (
        "step 3\n"
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/lib/threading.py", line 324 in wait\n'
        '  File "/lib/own.py", line 7 in hang\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/lib/main.py", line 1 in <module>\n'
    )
    assert list(faulthandler_threads(text)) == [
        Thread("0x00007f01", (Frame("wait", "/lib/threading.py", 324), Frame("hang", "/lib/own.py", 7))),
        Thread("0x00007f02", (Frame("<module>", "/lib/main.py", 1),)),
    ]
