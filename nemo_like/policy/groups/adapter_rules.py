"""Rules on the keys of low-rank adapters that hold with every backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_like.config.problems import Problem
from nemo_like.models.adapter_layers import (
    EXPERT_LAYERS,
    GATE_AND_UP_PAIRS,
    PEFT_CONFIG,
    adapted_experts,
    adapts_all_linear,
    layers_of_experts,
    named_layers,
)
from nemo_like.policy.options import LoraConfig


def adapter_problems(name: str, lora: LoraConfig) -> Iterator[Problem]:
    """Yield every problem of the adapters of the worker group ``name``: without layers, or begun from others
    than those that would train."""
    if not named_layers(lora):
        yield Problem(
            key=f"{name}.lora.target_modules=[{', '.join(lora.target_modules)}]",
            rule="leaves no layer, so nothing would train",
            remedy=f"[all-linear] is usual, with {name}.lora.exclude_modules=[]",
        )
    if lora.adapter_path is None:
        return
    key = f"{name}.lora.adapter_path={lora.adapter_path}"
    try:
        saved = json.loads((Path(lora.adapter_path) / PEFT_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        rule = f"has no {PEFT_CONFIG} of peft: {error}"
        yield Problem(key=key, rule=rule, remedy="name a directory of peft, such as adapter/ of an export")
        return
    yield from _differences(key, f"{name}.lora", lora, saved)


def adapted_expert_problems(name: str, lora: LoraConfig) -> Iterator[Problem]:
    """Yield every problem of the adapters of the worker group ``name`` with the experts of a mixture."""
    if not adapted_experts(lora):
        return
    shown = f"[{', '.join(named_layers(lora))}]"
    for pair in GATE_AND_UP_PAIRS:
        named, missing = ([x for x in pair if (x in named_layers(lora)) is is_in] for is_in in (True, False))
        if named and missing:
            yield Problem(
                key=f"{name}.lora.target_modules={shown}",
                rule=f"has {named[0]} without {missing[0]}, and in a mixture each expert has one adapter for "
                "both",
                remedy="name both or neither",
            )
    if lora.dropout:
        yield Problem(
            key=f"{name}.lora.dropout={lora.dropout}",
            rule=f"must be 0 with adapters beside experts, which {name}.lora.target_modules={shown} asks "
            "for: peft has none with dropout",
            remedy="set it to 0",
        )


def _differences(key: str, group: str, lora: LoraConfig, saved: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each setting in which the adapters of ``saved`` are others than those of ``lora``,
    and for each part of them that is not supported."""
    settings = {"r": ("rank", lora.rank), "lora_alpha": ("alpha", lora.alpha)}
    settings |= {"use_rslora": ("use_rslora", lora.use_rslora)}
    for leaf, (ours, value) in settings.items():
        if (given := saved.get(leaf, False)) != value:
            rule = f"has {leaf}={given}, and {group}.{ours}={value}"
            yield Problem(key=key, rule=rule, remedy=f"set {group}.{ours}={str(given).lower()}")
    layers = _saved_layers(saved)
    excluded, is_all = {*layers} & {*lora.exclude_modules}, adapts_all_linear(lora)
    expected = {*named_layers(lora)}
    if saved.get("target_parameters"):
        is_all = False
        expected = {*layers_of_experts(adapted_experts(lora))} | (expected - EXPERT_LAYERS.keys())
    if excluded or not (is_all or {*layers} == expected):
        rule = f"has adapters beside {', '.join(sorted(layers))}, and {group} names others"
        yield Problem(
            key=key,
            rule=rule,
            remedy=f"set {group}.target_modules=[{','.join(sorted(layers))}] and {group}.exclude_modules=[]",
        )
    for leaf in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if saved.get(leaf):
            yield Problem(
                key=key, rule=f"has {leaf}, which adapters here do not have", remedy="merge it first"
            )


def _saved_layers(saved: dict[str, Any]) -> list[str]:
    """Return the layers that peft's saved configuration names, with experts' layers in place of the
    parameters that stack them."""
    layers = saved.get("target_modules") or []
    if isinstance(layers, str):
        layers = [layers]
    parameters = [name.rpartition(".")[2] for name in saved.get("target_parameters") or []]
    return [*layers, *layers_of_experts(parameters)]
