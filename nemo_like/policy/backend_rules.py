"""Rules on the keys of the two training backends.

A backend reads only its own group of keys. In the other backend's group, keys must not ask for anything,
since nobody would do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import reduce

from nemo_like.config.problems import Problem
from nemo_like.models.adapter_layers import ADAPTABLE_LAYERS, ALL_LINEAR, adapts_all_linear
from nemo_like.policy.library_arguments import worker_argument_problems
from nemo_like.policy.options import Device, PolicyBackend, PolicyConfig

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
        "megatron_cfg.router_replay": False,
        "megatron_cfg.model_kwargs": {},
        "megatron_cfg.optimizer_kwargs": {},
    },
    PolicyBackend.fsdp: {
        "fsdp_cfg.tensor_parallel_size": 1,
        "fsdp_cfg.activation_checkpointing": False,
        "fsdp_cfg.cpu_offload": False,
        "fsdp_cfg.reduce_gradients_once": False,
        "fsdp_cfg.model_kwargs": {},
    },
}


def backend_problems(name: str, group: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem for every key of the worker group ``name`` that asks the backend that is not chosen for
    something, and for what the chosen backend cannot do."""
    yield from _other_backend(name, group)
    yield from worker_argument_problems(name, group)
    if group.backend is PolicyBackend.fsdp:
        yield from _fsdp(name, group)
    if group.lora.enabled:
        yield from _adapters(name, group)


def _other_backend(name: str, group: PolicyConfig) -> Iterator[Problem]:
    for backend, keys in _NEUTRAL.items():
        if backend is group.backend:
            continue
        for key, neutral in keys.items():
            value: object = reduce(getattr, key.split("."), group)
            if value != neutral:
                yield Problem(
                    key=f"{name}.{key}={_shown(value)}",
                    rule=f"is for {name}.backend={backend.value}, but that is {group.backend.value}",
                    remedy=f"set it to {_shown(neutral)}, or {name}.backend={backend.value}",
                )


def _fsdp(name: str, group: PolicyConfig) -> Iterator[Problem]:
    fsdp = group.fsdp_cfg
    if fsdp.cpu_offload and group.device is Device.cpu:
        yield Problem(
            key=f"{name}.fsdp_cfg.cpu_offload=true",
            rule=f"moves nothing with {name}.device=cpu",
            remedy="set it to false",
        )
    for key in ("offload_parameters_between_phases", "offload_optimizer_for_logprob"):
        if fsdp.cpu_offload and getattr(group, key):
            yield Problem(
                key=f"{name}.{key}=true",
                rule=f"moves nothing with {name}.fsdp_cfg.cpu_offload=true: all of it is on the host already",
                remedy="set it to false",
            )


def _adapters(name: str, group: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem where nothing is adapted, or with Megatron-core a layer that no model there has. What
    a model of transformers has is looked up in the model, later."""
    lora = group.lora
    shown = f"{name}.lora.target_modules=[{', '.join(lora.target_modules)}]"
    if not lora.target_modules:
        yield Problem(
            key=shown, rule="names no layer, so nothing would train", remedy="[all-linear] is usual"
        )
    elif group.backend is PolicyBackend.megatron and not adapts_all_linear(lora):
        unknown = [layer for layer in lora.target_modules if layer not in ADAPTABLE_LAYERS]
        if unknown:
            close = get_close_matches(unknown[0], ADAPTABLE_LAYERS, n=1)
            yield Problem(
                key=shown,
                rule=f"names {', '.join(unknown)}, and {name}.backend=megatron has adapters for "
                f"{', '.join(ADAPTABLE_LAYERS)}, or for [{ALL_LINEAR}]",
                remedy=f"did you mean {close[0]}?" if close else "",
            )


def _shown(value: object) -> str:
    """Return a scalar as it is written in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
