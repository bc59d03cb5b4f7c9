"""Shows a run's latest metrics at an HTTP address, from which Prometheus fetches them."""

from __future__ import annotations

import errno
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.observability.logger_kind import LoggerKind
from nemo_like.observability.metric_meanings import meaning_of
from nemo_like.observability.summary import SampleAnswer

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import GaugeMetricFamily

_PREFIX = "nemo_like_"
_LABELS = ("run", "metric")
_MAX_SILENCE_S = 30.0  # of a client
_OF_THE_RUN = {
    "max_num_steps": "steps of the whole run, grpo.max_num_steps",
    "latest_step": "the latest step that ended",
    "latest_step_timestamp_seconds": "when it ended, seconds since 1970 by the clock of the driver's node",
    "latest_validation_step": "the step after which the latest validation was",
}


@dataclass(kw_only=True, slots=True)
class PrometheusConfig:
    port: Annotated[int | None, Key("e.g. 9400; null: off", None)]
    host: Annotated[
        str,
        Key(
            "of the driver's node; 0.0.0.0: all its addresses, and whoever reaches them may read", "127.0.0.1"
        ),
    ]


class PrometheusRecorder:
    """A ``Recorder`` that serves the metrics of the latest step and of the latest validation as gauges.

    ``train/reward`` is ``nemo_like_train_reward{run="NAME",metric="train/reward"}``: names in Prometheus have
    only letters, digits, ":" and "_", so the label ``metric`` has the usual name.
    """

    def __init__(
        self,
        cfg: PrometheusConfig,
        run_name: str,
        max_num_steps: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Listen at ``cfg.host``, port ``cfg.port``. Raises OSError when that fails.

        ``clock`` returns seconds since 1970.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        assert cfg.port is not None
        self._run_name, self._clock = run_name, clock
        self._lock = threading.Lock()  # a server's thread reads while the recorder's writes
        self._of_run = {"max_num_steps": float(max_num_steps)}
        self._of_step: dict[str, float] = {}
        self._of_validation: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(cfg.port, cfg.host, registry)
        _end_silence(self._server)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show these metrics instead of the earlier step's, or instead of the earlier validation's."""
        is_validation = any(name.startswith("validation/") for name in metrics)
        with self._lock:
            if is_validation:
                self._of_validation = dict(metrics)
                self._of_run["latest_validation_step"] = float(step)
            else:
                self._of_step = dict(metrics)
                self._of_run |= {"latest_step": float(step), "latest_step_timestamp_seconds": self._clock()}

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """Do nothing: Prometheus keeps only numbers."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; prometheus_client's registry calls this for each request."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            of_run, metrics = dict(self._of_run), {**self._of_step, **self._of_validation}
        for name, value in of_run.items():
            family = GaugeMetricFamily(_PREFIX + name, _OF_THE_RUN[name], labels=_LABELS[:1])
            family.add_metric([self._run_name], value)
            yield family
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in metrics.items():
            name = _PREFIX + re.sub(r"[^a-zA-Z0-9_:]", "_", metric)
            if name not in families:
                families[name] = GaugeMetricFamily(name, meaning_of(metric) or metric, labels=_LABELS)
            families[name].add_metric([self._run_name, metric], value)
        yield from families.values()


def _end_silence(server: WSGIServer) -> None:
    """Have a server close the connections of silent clients: each connection holds a thread."""
    own: Any = server.RequestHandlerClass
    server.RequestHandlerClass = type(own.__name__, (own,), {"timeout": _MAX_SILENCE_S})
    tell = server.handle_error

    def handle_error(request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), TimeoutError):
            tell(request, client_address)

    server.handle_error = handle_error  # type: ignore[method-assign]


def _problems(at: str, prometheus: PrometheusConfig) -> Iterator[Problem]:
    if prometheus.port is not None and not _is_port(prometheus.port):
        yield Problem(
            key=f"{at}.port={prometheus.port}",
            rule="must be from 1 to 65535",
            remedy="null switches it off",
        )


def _machine_problems(at: str, prometheus: PrometheusConfig) -> Iterator[Problem]:
    """Try to listen at Prometheus' address, and yield a problem when that fails."""
    if prometheus.port is None or not _is_port(prometheus.port):
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            prometheus.host, prometheus.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # As the server itself does: connections of a run that has just ended do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        port, host = f"{at}.port={prometheus.port}", f"{at}.host={prometheus.host}"
        if error.errno == errno.EADDRINUSE:
            rule, remedy = f"is in use on {prometheus.host}", "another run may have it; choose another port"
            yield Problem(key=port, rule=rule, remedy=remedy)
        elif error.errno == errno.EACCES:
            yield Problem(key=port, rule="may not be used by this user", remedy="choose one above 1023")
        else:
            rule = f"is no address of this machine: {error.strerror or error}"
            yield Problem(key=host, rule=rule, remedy="127.0.0.1 is for this machine alone, 0.0.0.0 for all")


def _is_port(number: int) -> bool:
    return 1 <= number <= 65535


KIND = LoggerKind(
    about="http://HOST:PORT/metrics has the latest metrics, for as long as the run lasts",
    label="Prometheus",
    options=PrometheusConfig,
    start=lambda prometheus, run: PrometheusRecorder(prometheus, run.directory.name, run.max_num_steps),
    is_on=lambda prometheus: prometheus.port is not None,
    position=4,
    problems=_problems,
    machine_problems=_machine_problems,
)
