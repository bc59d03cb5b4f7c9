"""Rules on the keys of the two training backends.

A backend reads only its own group of keys. In the other backend's group, keys must not ask for anything,
since nobody would do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from nemo_like.config.keys import keys
from nemo_like.config.problems import Problem
from nemo_like.models.adapter_layers import ADAPTABLE_LAYERS, ALL_LINEAR, adapts_all_linear
from nemo_like.policy.layout import adapters_of
from nemo_like.policy.library_arguments import worker_argument_problems
from nemo_like.policy.options import Device, LoraConfig, PolicyBackend, WorkerGroupConfig


def backend_problems(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield a problem for every key of the worker group ``name`` that asks the backend that is not chosen for
    something, and for what the chosen backend cannot do."""
    yield from _other_backend(name, group)
    yield from worker_argument_problems(name, group)
    if group.backend is PolicyBackend.fsdp:
        yield from _fsdp(name, group)
    if (lora := adapters_of(group)) is not None:
        yield from _adapters(name, group.backend, lora)


def _other_backend(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield a problem for every key of the backend that is not chosen whose value is not its default, with
    which it asks for nothing."""
    is_fsdp = group.backend is PolicyBackend.fsdp
    backend = PolicyBackend.megatron if is_fsdp else PolicyBackend.fsdp
    part = f"{backend.value}_cfg"
    of_part = getattr(group, part)
    kind: type = type(of_part)
    for leaf, (_, key) in keys(kind).items():
        if (value := getattr(of_part, leaf)) != key.default:
            yield Problem(
                key=f"{name}.{part}.{leaf}={_shown(value)}",
                rule=f"is for {name}.backend={backend.value}, but that is {group.backend.value}",
                remedy=f"set it to {_shown(key.default)}, or {name}.backend={backend.value}",
            )


def _fsdp(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
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


def _adapters(name: str, backend: PolicyBackend, lora: LoraConfig) -> Iterator[Problem]:
    """Yield a problem where nothing is adapted, or with Megatron-core a layer that no model there has. What
    a model of transformers has is looked up in the model, later."""
    shown = f"{name}.lora.target_modules=[{', '.join(lora.target_modules)}]"
    if not lora.target_modules:
        yield Problem(
            key=shown, rule="names no layer, so nothing would train", remedy="[all-linear] is usual"
        )
    elif backend is PolicyBackend.megatron and not adapts_all_linear(lora):
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
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
