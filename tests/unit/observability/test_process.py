"""The switches of a process, with real torch."""

from __future__ import annotations

import gzip
import json
import threading

from nemo_like.observability.process import ProcessObserver
from nemo_like.observability.trace import span


def test_a_profile_holds_operators_of_every_thread_and_our_spans(tmp_path):
    import torch

    def work():
        with span("compute"):
            torch.ones(64, 64) @ torch.ones(64, 64)

    observer = ProcessObserver()
    observer.start_profile()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    path = tmp_path / "profiles" / "step_1" / "policy_worker-0.json.gz"
    observer.stop_profile(str(path))
    with gzip.open(path, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "compute"} <= names
    with span("compute"):  # is not profiled any more, and works
        pass


def test_a_profile_of_a_step_that_was_given_up_is_dropped(tmp_path):
    observer = ProcessObserver()
    observer.start_profile()
    observer.start_profile()
    observer.stop_profile(str(tmp_path / "worker.json.gz"))
    assert (tmp_path / "worker.json.gz").stat().st_size > 0
