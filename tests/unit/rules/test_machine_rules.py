from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_like.configuration import Config
from nemo_like.data_plane.storage_kinds import mooncake_cpu
from nemo_like.plan.machine_rules import Machine, machine_problems

Demo = Callable[..., Config]


def problems(cfg: Config) -> list[str]:
    return [str(problem) for problem in machine_problems(cfg)]


def test_too_few_cpus_say_how_many_are_needed_and_for_what(demo: Demo) -> None:
    (problem,) = problems(demo("cluster.num_cpus=5", "generation.num_engines=2"))
    assert problem == (
        "cluster.num_cpus=5 must be at least 7: "
        "TransferQueue controller 1 x 1, TransferQueue storage unit 1 x 1, "
        "environment actor 1 x 0.1, vLLM engines 2 x 1, policy workers 2 x 1; "
        "try 7 or null; these are logical CPUs and may exceed the machine's cores"
    )
    assert not problems(demo("cluster.num_cpus=7", "generation.num_engines=2"))


def test_the_resources_of_a_cluster_that_is_joined_are_not_guessed(demo: Demo) -> None:
    assert not problems(demo("cluster.num_cpus=1", "cluster.address=auto", "policy.device=cuda"))


def test_more_gpus_than_the_machine_has_are_refused(demo: Demo) -> None:
    text = "\n".join(problems(demo("policy.device=cuda", "cluster.gpus_per_node=1000")))
    assert "cluster.gpus_per_node=1000 is more than the" in text


def test_mooncake_names_the_packages_that_hold_missing_libraries(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = {"libno-such.so.1": "libno-such1", "libc.so.6": "libc6", "libneither.so.2": "libneither2"}
    monkeypatch.setattr(mooncake_cpu, "_MOONCAKE_LIBRARIES", libraries)
    cfg = demo("data_plane.backend=mooncake_cpu")
    assert problems(cfg) == [
        "data_plane.backend=mooncake_cpu needs system libraries that are not installed: "
        "libno-such.so.1, libneither.so.2; on Debian and Ubuntu: apt-get install libno-such1 libneither2; "
        "or use data_plane.backend=simple"
    ]
    assert not problems(demo("data_plane.backend=simple"))
    assert not problems(demo("data_plane.backend=mooncake_cpu", "cluster.address=auto"))


def test_mooncake_cannot_lend_more_memory_than_there_is(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_cpu, "_MOONCAKE_LIBRARIES", {})
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 4096}.__getitem__)
    mooncake = ("data_plane.backend=mooncake_cpu", "data_plane.num_storage_units=2")
    assert not problems(demo(*mooncake, "data_plane.mooncake_cfg.segment_gib=2"))
    (problem,) = problems(demo(*mooncake, "data_plane.mooncake_cfg.segment_gib=2.5"))
    assert problem == (
        "data_plane.mooncake_cfg.segment_gib=2.5 times data_plane.num_storage_units=2 is more than this "
        "machine's 4.0 GiB of memory; try at most 1.0"
    )


def test_rdma_needs_the_devices_that_are_named(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_cpu, "_MOONCAKE_LIBRARIES", {})
    monkeypatch.setattr(mooncake_cpu, "_RDMA_DEVICES", tmp_path / "infiniband")
    rdma = ("data_plane.backend=mooncake_cpu", "data_plane.mooncake_cfg.protocol=rdma")
    (problem,) = problems(demo(*rdma))
    assert problem.startswith("data_plane.mooncake_cfg.protocol=rdma needs an RDMA device")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert not problems(demo(*rdma))
    assert not problems(demo(*rdma, "data_plane.mooncake_cfg.rdma_devices=mlx5_0"))
    (problem,) = problems(demo(*rdma, "data_plane.mooncake_cfg.rdma_devices='mlx5_0,mlx5_7'"))
    assert problem == (
        "data_plane.mooncake_cfg.rdma_devices=mlx5_0,mlx5_7 names mlx5_7, which this machine does not have; "
        "it has mlx5_0; null takes them all"
    )


def test_a_log_directory_below_a_file_is_refused(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = problems(demo(f"logger.log_dir={tmp_path / 'file' / 'runs'}"))
    assert "cannot be written, because" in problem
    assert "choose another directory" in problem


def test_a_full_disk_says_how_much_is_needed(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000_000))
    (problem,) = problems(demo())
    assert "needs 0.1 GB, but its disk has 0.1 GB free" in problem or "0.0 GB free" in problem
    assert "free some space" in problem


def test_online_wandb_needs_a_key(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    cfg = demo("logger.wandb.mode=online")
    (problem,) = problems(cfg)
    assert "logger.wandb.mode=online needs an API key" in problem
    assert "logger.wandb.mode=offline" in problem
    netrc.write_text("machine other.example login user password key\n")
    assert problems(cfg)
    netrc.write_text("machine api.wandb.ai login user password key\n")
    netrc.chmod(0o600)
    assert not problems(cfg)
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert not problems(cfg)


def test_mlflow_needs_its_package(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = problems(demo("logger.mlflow.enabled=true"))
    assert problem == (
        "logger.mlflow.enabled=true needs the package mlflow, which is not installed; "
        "pip install mlflow, or use W&B or TensorBoard"
    )


def test_a_plan_for_another_machine_does_not_judge_this_ones_gpus_and_disk(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    cfg = demo("policy.device=cuda", "cluster.gpus_per_node=1000")
    assert not list(machine_problems(cfg, Machine.another))
    assert len(list(machine_problems(cfg, Machine.this))) == 2


def test_a_dataset_from_a_file_needs_its_path(demo: Demo) -> None:
    train, validation = problems(demo("data.train.kind=jsonl", "data.validation.kind=jsonl"))
    line = 'give a file with one object per line, {"prompt": ..., "answer": ...}'
    assert train == f"data.train.path=null must be set for data.train.kind=jsonl; {line}"
    assert validation.startswith(
        f"data.validation.path=null must be set for data.validation.kind=jsonl; {line}; a run without "
    )


def test_what_the_message_says_about_a_run_without_validation_is_accepted(demo: Demo, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    jsonl = ("data.train.kind=jsonl", f"data.train.path={path}", "data.validation.kind=jsonl")
    (problem,) = problems(demo(*jsonl))
    *_, keys = problem.split(" with ")
    assert not problems(demo(*jsonl, f"data.validation.path={path}", *keys.split()))


@pytest.mark.parametrize(
    ("path", "kind"), [("mine.jsonl", "jsonl"), ("mine.parquet", "huggingface"), ("mine.json", "huggingface")]
)
def test_a_file_that_nobody_would_read_names_the_kind_that_reads_it(demo: Demo, path: str, kind: str) -> None:
    (problem,) = problems(demo(f"data.train.path={path}"))
    assert problem == (
        f"data.train.path={path} would not be read: data.train.kind=arithmetic makes its problems itself; "
        f"for the problems of a file set data.train.kind={kind}, or data.default.kind for all sources; "
        "for sums set data.train.path=null"
    )


def test_a_hugging_face_dataset_needs_its_split(demo: Demo) -> None:
    (problem,) = problems(demo("data.validation.kind=huggingface", "data.validation.path=a/b"))
    assert problem.startswith("data.validation.split=null must be set for data.validation.kind=huggingface")


def test_a_jsonl_file_that_is_not_there_is_named(demo: Demo) -> None:
    (problem,) = problems(demo("data.validation.kind=jsonl", "data.validation.path=/nowhere.jsonl"))
    assert problem.startswith("data.validation.path=/nowhere.jsonl is not a file")


def test_a_field_that_the_records_lack_proposes_those_they_have(demo: Demo, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('\n{"question": "1+1=", "answer": "2"}\n')
    there = ("data.validation.kind=jsonl", f"data.validation.path={path}")
    (problem,) = problems(demo(*there))
    assert problem == (
        f"data.validation.prompt_key=prompt is not a field of {path}, "
        "whose first record has answer, question; name one of them"
    )
    assert not problems(demo(*there, "data.validation.prompt_key=question"))
