"""Rules on the keys of low-rank adapters that hold with every backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_like.config.problems import Problem
from nemo_like.models.adapter_layers import PEFT_CONFIG, adapts_all_linear, named_layers
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


def _differences(key: str, group: str, lora: LoraConfig, saved: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each setting in which the adapters of ``saved`` are others than those of ``lora``,
    and for each part of them that is not supported."""
    expected = {"r": ("rank", lora.rank), "lora_alpha": ("alpha", lora.alpha)}
    expected |= {"use_rslora": ("use_rslora", lora.use_rslora)}
    for leaf, (ours, value) in expected.items():
        if (given := saved.get(leaf, False)) != value:
            rule = f"has {leaf}={given}, and {group}.{ours}={value}"
            yield Problem(key=key, rule=rule, remedy=f"set {group}.{ours}={str(given).lower()}")
    layers = saved.get("target_modules") or []
    if isinstance(layers, str):
        layers = [layers]
    excluded, is_all = {*layers} & {*lora.exclude_modules}, adapts_all_linear(lora)
    if excluded or not (is_all or {*layers} == {*named_layers(lora)}):
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
