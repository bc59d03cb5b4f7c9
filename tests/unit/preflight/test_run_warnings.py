from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_like.configuration import Config
from nemo_like.models.model_info import planned_shape
from nemo_like.policy.backend_kinds import megatron
from nemo_like.preflight.run_warnings import code_warnings, missing_kernels

GPU = ("policy.device=cuda", "policy.precision=bfloat16", "cluster.placement=separate")


@pytest.fixture
def without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_transformer_engine")
def test_a_gpu_run_without_transformer_engine_hears_what_it_lacks(demo: Callable[..., Config]) -> None:
    (line,) = missing_kernels(demo(*GPU))
    assert line.startswith("Transformer Engine is not installed")
    assert "scripts/setup.sh --gpu" in line


@pytest.mark.usefixtures("without_transformer_engine")
@pytest.mark.parametrize("other", [(), (*GPU, "policy=fsdp")])
def test_the_cpu_and_fsdp_lack_nothing(demo: Callable[..., Config], other: tuple[str, ...]) -> None:
    assert list(missing_kernels(demo(*other))) == []


def test_who_has_transformer_engine_hears_nothing(
    demo: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda name: object())
    assert list(missing_kernels(demo(*GPU))) == []


@pytest.mark.usefixtures("without_transformer_engine")
def test_a_mixture_in_float32_hears_that_its_experts_take_turns(
    demo: Callable[..., Config],
) -> None:
    cfg = demo("policy.device=cuda", "policy.precision=float32")
    cfg.policy.model_name = str(planned_shape("Qwen3-30B-A3B"))
    _, line = missing_kernels(cfg)
    assert "experts run one after the other" in line


def test_trusted_code_is_warned_of_in_one_sentence(demo: Callable[..., Config]) -> None:
    assert list(code_warnings(demo())) == []
    assert list(code_warnings(demo("policy.trust_remote_code=true"))) == [
        "policy.trust_remote_code=true: Python files of the checkpoints run in this run's processes, with "
        "all that you may do on these machines; read them first"
    ]
