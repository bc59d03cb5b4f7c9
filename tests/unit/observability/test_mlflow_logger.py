from __future__ import annotations

import pytest
from mlflow import MlflowClient

from nemo_like.observability.background import BackgroundLogger
from nemo_like.observability.logger_kinds.mlflow import MlflowConfig, MlflowRecorder, mlflow_name

METRICS = {
    "train/env/sums/reward": 0.5,
    "train/env/sums/reward/exact_match": 0.25,
    "validation/pass@4": 0.75,
    "train/env/sums/speed (per s)": 2.0,
    "train/loss": float("nan"),
}


@pytest.fixture
def uri(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    return str(tmp_path / "mlruns")


def test_a_directory_gets_every_metric_also_where_one_name_continues_another(uri):
    cfg = MlflowConfig(enabled=True, tracking_uri=uri, experiment_name="tests")
    logger = BackgroundLogger("MLflow", lambda: MlflowRecorder(cfg, "demo", {"grpo": {"seed": 1}}))
    logger.log(1, METRICS)
    assert logger.finish(timeout_s=60.0) is None
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.data.params == {"grpo.seed": "1"}
    assert run.data.metrics == {
        "train/env.sums.reward": 0.5,
        "train/env.sums.reward.exact_match": 0.25,
        "validation/pass_at_4": 0.75,
        "train/env.sums.speed _per s_": 2.0,
    }


def test_a_server_gets_the_names_as_they_are_but_for_what_it_refuses():
    names = [mlflow_name(name, is_directory=False) for name in METRICS]
    assert names[:3] == ["train/env/sums/reward", "train/env/sums/reward/exact_match", "validation/pass_at_4"]
