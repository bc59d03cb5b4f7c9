"""Rules on the keys of the two training backends.

A backend reads only its own group of keys. In the other backend's group, keys must not ask for anything,
since nobody would do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from nemo_like.config.problems import Problem
from nemo_like.config.schema import Config, Device, PolicyBackend, PolicyConfig

# Keys that ask a backend for something, each with the value that asks for nothing.
_NEUTRAL = {
    PolicyBackend.megatron: {
        "megatron_cfg.tensor_model_parallel_size": 1,
        "megatron_cfg.pipeline_model_parallel_size": 1,
        "megatron_cfg.context_parallel_size": 1,
        "megatron_cfg.expert_model_parallel_size": 1,
        "megatron_cfg.activation_checkpointing": False,
        "megatron_cfg.sequence_parallel": False,
        "megatron_cfg.use_distributed_optimizer": False,
    },
    PolicyBackend.fsdp: {
        "fsdp_cfg.tensor_parallel_size": 1,
        "fsdp_cfg.activation_checkpointing": False,
        "fsdp_cfg.cpu_offload": False,
        "fsdp_cfg.lora.enabled": False,
    },
}


def backend_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for every key that asks the backend that is not chosen for something, and for what the
    chosen backend cannot do."""
    yield from _other_backend(cfg.policy)
    if cfg.policy.backend is PolicyBackend.fsdp:
        yield from _fsdp(cfg.policy)


def _other_backend(policy: PolicyConfig) -> Iterator[Problem]:
    for backend, keys in _NEUTRAL.items():
        if backend is policy.backend:
            continue
        for name, neutral in keys.items():
            value: object = reduce(getattr, name.split("."), policy)
            if value != neutral:
                yield Problem(
                    key=f"policy.{name}={_shown(value)}",
                    rule=f"is for policy.backend={backend.value}, but that is {policy.backend.value}",
                    remedy=f"set it to {_shown(neutral)}, or policy.backend={backend.value}",
                )


def _fsdp(policy: PolicyConfig) -> Iterator[Problem]:
    fsdp = policy.fsdp_cfg
    if fsdp.cpu_offload and policy.device is Device.cpu:
        yield Problem(
            key="policy.fsdp_cfg.cpu_offload=true",
            rule="moves nothing with policy.device=cpu",
            remedy="set it to false",
        )
    for name in ("offload_parameters_between_phases", "offload_optimizer_for_logprob"):
        if fsdp.cpu_offload and getattr(policy, name):
            yield Problem(
                key=f"policy.{name}=true",
                rule="moves nothing with policy.fsdp_cfg.cpu_offload=true: all of it is on the host already",
                remedy="set it to false",
            )
    if fsdp.lora.enabled and not fsdp.lora.target_modules:
        yield Problem(
            key="policy.fsdp_cfg.lora.target_modules=[]",
            rule="names no layer, so nothing would train",
            remedy="[all-linear] is usual",
        )


def _shown(value: object) -> str:
    """Return a scalar as it is written in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
