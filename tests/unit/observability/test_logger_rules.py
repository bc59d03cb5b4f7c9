from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nemo_like.configuration import Config
from nemo_like.observability.logger_rules import logger_machine_problems, logger_problems

Demo = Callable[..., Config]
MLFLOW = "logger.mlflow.enabled=true"


@pytest.fixture(autouse=True)
def without_a_tracking_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server that asks everybody who he is."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def problems(cfg: Config) -> list[str]:
    return [str(problem) for problem in (*logger_problems(cfg.logger), *logger_machine_problems(cfg.logger))]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "logger.wandb.project=team/project",
            "logger.wandb.project=team/project must have 1 to 128 characters and none of / \\ # ? % :; "
            "whose project it is says logger.wandb.entity",
        ),
        ("logger.wandb.tags=[good,'']", "logger.wandb.tags[1]= must have 1 to 64 characters"),
        (f"logger.wandb.tags=[{'a' * 65}]", "longer texts belong in logger.wandb.notes"),
        (f"logger.wandb.group={'a' * 129}", "must have 1 to 128 characters; null leaves it out"),
    ],
)
def test_what_wandb_would_refuse_after_the_start_is_refused_before(
    demo: Demo, override: str, message: str
) -> None:
    (problem,) = problems(demo("logger.wandb.mode=offline", override))
    assert message in problem
    assert not problems(demo("logger.wandb.mode=disabled", override))


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_for_prometheus_is_one(demo: Demo, port: int) -> None:
    (problem,) = problems(demo(f"logger.prometheus.port={port}"))
    assert problem == f"logger.prometheus.port={port} must be from 1 to 65535; null switches it off"


def test_a_port_that_is_in_use_is_refused_before_the_start(demo: Demo) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (problem,) = problems(demo(f"logger.prometheus.port={port}"))
        assert problem == (
            f"logger.prometheus.port={port} is in use on 127.0.0.1; another run may have it; "
            "choose another port"
        )
        assert not problems(demo(f"logger.prometheus.port={port}", "logger.prometheus.host=127.0.0.2"))
    assert not problems(demo(f"logger.prometheus.port={port}"))


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])  # of RFC 5737 and RFC 2606: nobody's
def test_prometheus_is_waited_for_at_an_address_of_this_machine(demo: Demo, host: str) -> None:
    (problem,) = problems(demo("logger.prometheus.port=9400", f"logger.prometheus.host={host}"))
    assert problem.startswith(f"logger.prometheus.host={host} is no address of this machine: ")
    assert problem.endswith("127.0.0.1 is for this machine alone, 0.0.0.0 for all")


def test_a_directory_for_mlflow_must_be_one(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for uri in (tmp_path / "mlruns", (tmp_path / "mlruns").as_uri(), "mlruns"):
        assert not problems(demo(MLFLOW, f"logger.mlflow.tracking_uri={uri}"))
    (problem,) = problems(demo(MLFLOW, f"logger.mlflow.tracking_uri={tmp_path / 'file' / 'mlruns'}"))
    assert f"cannot be written, because {tmp_path / 'file'} is not a directory or not writable" in problem


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "postgresql+psycopg2://host/runs", "null"])
def test_a_database_for_mlflow_needs_the_whole_package(
    demo: Demo, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with mlflow-skinny alone; a sweep by Optuna brings sqlalchemy too."""
    assert not problems(demo(MLFLOW, f"logger.mlflow.tracking_uri={uri}"))
    found = {"sqlalchemy": None, "mlflow": importlib.util.find_spec("mlflow")}
    monkeypatch.setattr(importlib.util, "find_spec", found.__getitem__)
    (problem,) = problems(demo(MLFLOW, f"logger.mlflow.tracking_uri={uri}"))
    assert f"logger.mlflow.tracking_uri={uri} keeps the runs in" in problem
    assert "pip install mlflow (mlflow-skinny lacks it), or name a directory or a server" in problem


def test_a_server_for_mlflow_must_answer_whatever_it_says(demo: Demo, server: str) -> None:
    assert not problems(demo(MLFLOW, f"logger.mlflow.tracking_uri={server}"))
    (problem,) = problems(demo(MLFLOW, "logger.mlflow.tracking_uri=http://127.0.0.1:9"))
    assert "logger.mlflow.tracking_uri=http://127.0.0.1:9 does not answer within 5 s:" in problem
    assert "start it (mlflow server)" in problem


def test_the_environments_tracking_uri_is_judged_where_the_key_is_null(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqllite:///runs.db")
    (problem,) = problems(demo(MLFLOW))
    assert "begins with sqllite:, which no installed part of MLflow understands" in problem
    assert not problems(demo())
