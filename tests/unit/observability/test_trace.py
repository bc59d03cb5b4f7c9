from __future__ import annotations

import threading
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from nemo_like.observability.trace import (
    Span,
    add_annotation,
    chrome_trace,
    remove_annotation,
    span,
    start_trace,
    take_trace,
    tracks,
)


def test_nothing_is_recorded_before_a_trace_starts_or_after_it_was_taken():
    with span("early"):
        pass
    start_trace()
    with span("fetch"):
        pass
    assert [item.name for item in take_trace()] == ["fetch"]
    with span("late"):
        pass
    assert take_trace() == []


def test_spans_nest_and_name_their_thread():
    start_trace()

    def work():
        with span("outer"), span("inner"):
            pass

    thread = threading.Thread(target=work, name="engine-0-step")
    thread.start()
    thread.join()
    inner, outer = take_trace()
    assert (inner.name, outer.name) == ("inner", "outer")
    assert {inner.thread, outer.thread} == {"engine-0-step"}
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_a_block_that_raises_is_recorded_too():
    start_trace()
    try:
        with span("train"):
            raise ValueError
    except ValueError:
        pass
    assert [item.name for item in take_trace()] == ["train"]


def test_a_profiler_sees_the_names_while_it_is_added():
    seen = []

    @contextmanager
    def annotation(name):
        seen.append(name)
        yield

    add_annotation("test", annotation)
    with span("compute"):
        pass
    remove_annotation("test")
    with span("write"):
        pass
    assert seen == ["compute"]


def test_times_count_in_microseconds_from_the_first_span_of_any_process():
    driver = [Span("train", "MainThread", 5_000, 9_000)]
    worker = [Span("compute", "MainThread", 6_000, 8_500)]
    trace = chrome_trace({"driver": driver, "policy_worker-0": worker})
    events = trace["traceEvents"]
    drawn = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (drawn["train"]["ts"], drawn["train"]["dur"], drawn["train"]["pid"]) == (0.0, 4.0, 0)
    assert (drawn["compute"]["ts"], drawn["compute"]["dur"], drawn["compute"]["pid"]) == (1.0, 2.5, 1)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["driver", "policy_worker-0"]
    assert trace["otherData"] == {"origin_ns": 5_000}


def test_coroutines_that_overlap_get_tracks_of_their_own():
    first, second = Span("step", "loop", 0, 10), Span("step", "loop", 5, 15)
    assert tracks([second, first]) == {"loop": [first], "loop 2": [second]}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_two_spans_of_a_track_are_apart_or_one_holds_the_other(bounds):
    spans = [Span("x", "loop", min(pair), max(pair)) for pair in bounds]
    by_track = tracks(spans)
    key = lambda item: (item.start_ns, item.end_ns)  # noqa: E731
    assert sorted((item for track in by_track.values() for item in track), key=key) == sorted(spans, key=key)
    for track in by_track.values():
        for i, first in enumerate(track):
            for second in track[i + 1 :]:
                assert second.start_ns >= first.end_ns or second.end_ns <= first.end_ns
