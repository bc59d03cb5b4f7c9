from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from nemo_like.configuration import Config
from nemo_like.preflight import engine_features
from nemo_like.preflight.engine_features import missing_engine_features

KEY = "policy.megatron_cfg.router_replay=true"
GPU = ("policy.device=cuda", "policy.precision=bfloat16", "cluster.placement=separate")


def problems(cfg: Config) -> list[str]:
    return [str(problem) for problem in missing_engine_features(cfg)]


@pytest.mark.parametrize("device", [(), GPU])
def test_the_installed_vllm_returns_experts(demo: Callable[..., Config], device: tuple[str, ...]) -> None:
    assert problems(demo(KEY, *device)) == []


@pytest.mark.parametrize(
    ("device", "feature"), [((), "set_capture_fn"), (GPU, "enable_return_routed_experts")]
)
def test_another_vllm_is_refused_where_routers_replay(
    demo: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: tuple[str, ...],
    feature: str,
) -> None:
    old = ModuleSpec("vllm", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(engine_features, "find_spec", lambda name: old)
    monkeypatch.setattr(engine_features, "installed_version", lambda name: "0.9.0")
    assert problems(demo(*device)) == []
    assert problems(demo(KEY, *device)) == [
        f"{KEY} needs engines that return the experts of every token ({feature}), and vllm 0.9.0 has none; "
        "install the version of requirements/, or set it to false"
    ]


def test_a_replay_has_no_engines_to_ask(
    demo: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_features, "find_spec", lambda name: None)
    assert problems(demo(KEY)) != []
    assert problems(demo(KEY, f"rollout.replay={tmp_path}")) == []


def test_the_first_model_runner_cannot_return_experts_on_a_gpu(
    demo: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert problems(demo(KEY)) == []
    (problem,) = problems(demo(KEY, *GPU))
    assert problem == (
        f"{KEY} needs vLLM's model runner V2, and the environment has VLLM_USE_V2_MODEL_RUNNER=0; unset "
        "VLLM_USE_V2_MODEL_RUNNER, or set the key to false"
    )


def test_on_a_gpu_seeds_of_what_is_drafted_need_the_second_model_runner(
    demo: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = "{method: ngram_gpu, num_speculative_tokens: 2}"
    drafts = f"generation.vllm_kwargs={{speculative_config: {config}}}"
    assert problems(demo(drafts, *GPU)) == []
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    (problem,) = problems(demo(drafts, *GPU))
    assert problem == (
        "generation.vllm_kwargs.speculative_config needs vLLM's model runner V2, and the environment has "
        "VLLM_USE_V2_MODEL_RUNNER=0; unset VLLM_USE_V2_MODEL_RUNNER, or leave the key out"
    )
    assert problems(demo(*GPU)) == []
