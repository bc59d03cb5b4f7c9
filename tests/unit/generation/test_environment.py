"""What an engine's process needs before it imports anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.generation.environment import engine_environment, unused_by_engines
from nemo_like.policy.options import Device

ROOT = Path(__file__).resolve().parents[3]


def test_an_engine_that_compiles_has_all_of_the_compiler() -> None:
    assert "torch._inductor.lowering" in unused_by_engines(Device.cpu)
    assert not unused_by_engines(Device.cuda)


def test_packages_that_need_an_absent_one_are_absent_too(tmp_path: Path) -> None:
    """Transformers takes scikit-learn where it finds it, and scikit-learn needs scipy."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("import scipy.sparse\n")
    (tmp_path / "sklearn" / "metrics.py").write_text("roc_curve = None\n")
    code = (
        "from nemo_like.cluster.imports import load_target\n"
        "from nemo_like.generation.environment import unused_by_engines\n"
        "from nemo_like.policy.options import Device\n"
        "load_target('transformers.generation.candidate_generator:is_sklearn_available',"
        " unused_by_engines(Device.cpu))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_the_cpu_settings_do_not_reach_a_gpu_engine() -> None:
    assert engine_environment(Device.cpu)["OMP_NUM_THREADS"] == "1"
    assert engine_environment(Device.cpu)["TORCHDYNAMO_DISABLE"] == "1"
    assert (
        not {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "GLOO_SOCKET_IFNAME"}
        & engine_environment(Device.cuda).keys()
    )


def test_the_engine_cache_is_kept_in_the_users_cache_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert engine_environment(Device.cpu)["VLLM_CACHE_ROOT"] == str(tmp_path / "nemo_like" / "vllm")


def test_a_cache_directory_of_the_users_choice_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "mine"))
    assert engine_environment(Device.cuda)["VLLM_CACHE_ROOT"] == str(tmp_path / "mine")
