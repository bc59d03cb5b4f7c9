"""What an engine's process needs before it imports anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.generation.environment import engine_environment, unused_by_engines
from nemo_like.policy.options import Device


def test_an_engine_that_compiles_has_all_of_the_compiler() -> None:
    compiler = "torch._inductor.lowering"
    assert compiler in unused_by_engines(Device.cpu)
    assert compiler not in unused_by_engines(Device.cuda)


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
