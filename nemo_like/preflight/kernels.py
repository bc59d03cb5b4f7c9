"""Says which kernels a GPU run does without, since a package is missing or none serves its precision."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from nemo_like.configuration import Config
from nemo_like.models.model_info import read_model_info
from nemo_like.policy.options import Device, PolicyBackend, Precision


def missing_kernels(cfg: Config) -> Iterator[str]:
    """Yield a line for each kernel that training would have and lacks, with what that costs.

    It looks at the packages of this machine, and imports none.
    """
    policy = cfg.policy
    if policy.device is not Device.cuda or policy.backend is not PolicyBackend.megatron:
        return
    if cfg.rollout.generate_only or find_spec("transformer_engine") is not None:
        return
    yield (
        "Transformer Engine is not installed, so Megatron-core's own layers train: norms, rotary positions "
        "and SwiGLU pass over the activations more often, which takes time and memory; "
        "scripts/setup.sh --gpu installs it where there is a C++ compiler"
    )
    if policy.precision is Precision.float32 and _has_experts(policy.model_name):
        yield (
            "policy.precision=float32 has no grouped matrix product without Transformer Engine, so a "
            "mixture's experts run one after the other, each on few tokens; policy.precision=bfloat16 has one"
        )


def _has_experts(model_name: str) -> bool:
    is_here = (Path(model_name) / "config.json").is_file()
    return is_here and read_model_info(model_name, PolicyBackend.megatron).num_experts is not None
