from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.cluster import private_ray
from nemo_like.cluster.actor_errors import ClusterError
from nemo_like.cluster.private_ray import PrivateRay, failed_import

REASON = "ImportError: cannot import name 'CardinalityLimits' from 'opentelemetry.sdk.metrics.export' (x.py)"


def write_log(directory: Path, *lines: str) -> None:
    log = directory / "session_2026-01-01_1" / "logs" / "dashboard_agent.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("last", "found"),
    [
        (REASON, REASON),
        ("ModuleNotFoundError: No module named 'grpc'.", "ModuleNotFoundError: No module named 'grpc'"),
        ("2026-01-01 INFO agent.py:1 -- Agent started", None),
        ("RuntimeError: the raylet has died", None),
    ],
)
def test_the_import_that_ended_rays_agent_is_in_its_log(tmp_path: Path, last: str, found: str | None) -> None:
    write_log(tmp_path, "Traceback (most recent call last):", last)
    assert failed_import(tmp_path) == found


def test_a_ray_without_a_log_failed_by_something_else(tmp_path: Path) -> None:
    assert failed_import(tmp_path) is None
    write_log(tmp_path)
    assert failed_import(tmp_path) is None


def test_a_ray_whose_agent_cannot_be_loaded_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_ray.tempfile, "mkdtemp", lambda prefix: str(tmp_path))

    def init(**options: object) -> None:
        write_log(tmp_path, "Traceback (most recent call last):", REASON)
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(private_ray.ray, "init", init)
    said: list[str] = []
    ray = PrivateRay(num_cpus=1, num_gpus=0, last_words=said.append)
    with pytest.raises(ClusterError, match="its agent could not be loaded: ImportError: cannot import name"):
        ray.start(60.0, said.append)
    assert said == []
