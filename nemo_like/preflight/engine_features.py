"""Says when the installed vLLM lacks what a configuration asks of its engines; vLLM is not imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.generation.speculation import KEY, speculation
from nemo_like.observability.software import installed_version
from nemo_like.policy.options import Device

_ROUTER_REPLAY = "policy.megatron_cfg.router_replay=true"
# By device, a file of vLLM, and text in it that shows that engines can return the experts of their routers.
_RETURNS_EXPERTS = {
    Device.cuda: ("engine/arg_utils.py", "enable_return_routed_experts"),
    Device.cpu: ("model_executor/layers/fused_moe/router/base_router.py", "def set_capture_fn"),
}
_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def missing_engine_features(cfg: Config) -> Iterator[Problem]:
    """Yield a problem when the installed vLLM cannot return experts, or would use the wrong model runner."""
    if cfg.rollout.replay is not None:
        return
    returns_experts = cfg.policy.megatron_cfg.router_replay
    if returns_experts:
        yield from _experts(cfg)
    needing = {
        _ROUTER_REPLAY: (returns_experts, "set the key to false"),
        KEY: (speculation(cfg.generation) is not None, "leave the key out"),
    }
    for key, (is_asked, remedy) in needing.items():
        is_refused = os.environ.get(_MODEL_RUNNER, "1").lower() in ("0", "false")
        if is_asked and is_refused and cfg.policy.device is Device.cuda:
            yield Problem(
                key=key,
                rule=f"needs vLLM's model runner V2, and the environment has {_MODEL_RUNNER}="
                f"{os.environ[_MODEL_RUNNER]}",
                remedy=f"unset {_MODEL_RUNNER}, or {remedy}",
            )


def _experts(cfg: Config) -> Iterator[Problem]:
    file, feature = _RETURNS_EXPERTS[cfg.policy.device]
    spec = find_spec("vllm")
    root = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if root is None or not (root / file).is_file() or feature not in (root / file).read_text("utf-8"):
        has = f"vllm {installed_version('vllm')} has none" if root is not None else "vllm is not installed"
        yield Problem(
            key=_ROUTER_REPLAY,
            rule=f"needs engines that return the experts of every token ({feature.split()[-1]}), and {has}",
            remedy="install the version of requirements/, or set it to false",
        )
