"""The endpoint as Prometheus sees it: over HTTP, read by the parser of Prometheus' own client."""

from __future__ import annotations

import math
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from nemo_like.observability.logger_kinds import prometheus
from nemo_like.observability.logger_kinds.prometheus import PrometheusConfig, PrometheusRecorder


def free_address() -> PrometheusConfig:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return PrometheusConfig(port=probe.getsockname()[1], host="127.0.0.1")


@pytest.fixture
def address() -> PrometheusConfig:
    return free_address()


@pytest.fixture
def recorder(address: PrometheusConfig) -> Iterator[PrometheusRecorder]:
    recorder = PrometheusRecorder(address, "demo", 80, clock=lambda: 1234.5)
    yield recorder
    recorder.close()


def fetched(address: PrometheusConfig) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://{address.host}:{address.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(address: PrometheusConfig) -> dict[str, float]:
    """Values by the names that metrics have everywhere else; those of the run by Prometheus' names."""
    found = fetched(address).values()
    return {sample.labels.get("metric", sample.name): sample.value for one in found for sample in one.samples}


def test_before_the_first_step_there_is_the_run(
    recorder: PrometheusRecorder, address: PrometheusConfig
) -> None:
    assert values(address) == {"nemo_like_max_num_steps": 80.0}


def test_a_client_that_asks_nothing_is_left_and_nobody_hears_of_it(
    address: PrometheusConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prometheus, "_MAX_SILENCE_S", 0.2)
    recorder = PrometheusRecorder(address, "demo", 80)
    for begun in (b"", b"GET / HTTP/1.1\r\n"):
        with socket.create_connection((address.host, address.port), timeout=30) as client:
            client.sendall(begun)
            assert client.recv(1) == b""
    recorder.close()
    assert capfd.readouterr().err == ""


def test_a_metric_has_its_name_its_run_and_its_meaning(
    recorder: PrometheusRecorder, address: PrometheusConfig
) -> None:
    recorder.log(3, {"train/reward": 0.5})
    reward = fetched(address)["nemo_like_train_reward"]
    assert reward.type == "gauge"
    assert reward.documentation.startswith("mean raw reward of all samples of the step")
    assert reward.samples[0].labels == {"run": "demo", "metric": "train/reward"}
    assert values(address) == {
        "nemo_like_max_num_steps": 80.0,
        "nemo_like_latest_step": 3.0,
        "nemo_like_latest_step_timestamp_seconds": 1234.5,
        "train/reward": 0.5,
    }


def test_metrics_stay_until_the_next_step_or_the_next_validation(
    recorder: PrometheusRecorder, address: PrometheusConfig
) -> None:
    recorder.log(2, {"train/reward": 0.5, "train/entropy": 1.0})
    recorder.log(2, {"validation/accuracy": 0.25, "validation/pass@4": 0.75})
    recorder.log(3, {"train/reward": 0.625})
    found = values(address)
    assert "train/entropy" not in found  # step 3 did not measure it
    assert (found["train/reward"], found["validation/pass@4"]) == (0.625, 0.75)
    assert found["nemo_like_latest_validation_step"] == 2.0
    recorder.log(4, {"validation/accuracy": 0.5})
    assert "validation/pass@4" not in values(address)


def test_names_that_prometheus_writes_alike_are_told_apart(
    recorder: PrometheusRecorder, address: PrometheusConfig
) -> None:
    recorder.log(1, {"train/env/a b/x": 1.0, "train/env/a/b/x": math.nan, 'train/env/a"b/x': math.inf})
    samples = fetched(address)["nemo_like_train_env_a_b_x"].samples
    assert {sample.labels["metric"]: str(sample.value) for sample in samples} == {
        "train/env/a b/x": "1.0",
        "train/env/a/b/x": "nan",
        'train/env/a"b/x': "inf",
    }


def test_a_run_that_has_ended_is_no_longer_there_and_its_port_is_free(address: PrometheusConfig) -> None:
    PrometheusRecorder(address, "demo", 80).close()
    with pytest.raises(urllib.error.URLError):
        fetched(address)
    PrometheusRecorder(address, "demo", 80).close()


def test_a_port_that_is_in_use_raises(recorder: PrometheusRecorder, address: PrometheusConfig) -> None:
    with pytest.raises(OSError, match="in use"):
        PrometheusRecorder(address, "another", 80)
