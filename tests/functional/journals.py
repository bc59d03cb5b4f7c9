"""Journals of engines, written by hand: weights then come at a known token, whatever the machine's speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm

from nemo_like.generation.engine_journal import journal_settings, request_digest
from nemo_like.generation.interface import GroupRequest
from nemo_like.generation.sampling import SamplingSettings


def added(step: int, sampling: SamplingSettings, *requests: GroupRequest) -> dict[str, Any]:
    entries = [[one.request_id, request_digest(one, sampling)] for one in requests]
    return {"step": step, "event": "add", "requests": entries}


def taken(step: int, version: int) -> dict[str, Any]:
    return {"step": step, "event": "weights", "version": version, "running": []}


def write_journal(path: Path, engine: Mapping[str, Any], events: Sequence[dict[str, Any]]) -> str:
    """Write the journal of an engine that was started with these arguments, and return its path."""
    spec = engine["spec"]
    others = {
        "seed": spec.seed,
        "max_total_sequence_length": spec.max_total_sequence_length,
        "device": spec.device.value,
        "precision": spec.precision.value,
    }
    settings = journal_settings(vllm.__version__, spec.generation, spec.weight_updates, others)
    start = {"event": "start", "engine": engine["name"], "settings": settings}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [start, *events]))
    return str(path)


def events_of(path: Path) -> list[dict[str, Any]]:
    """Every line but the first, which names the engine."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]
