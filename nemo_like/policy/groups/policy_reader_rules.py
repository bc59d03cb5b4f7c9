"""Rules that critic and teacher share: each is a worker group with its own model, and reads the policy's
samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.models.model_info import model_of
from nemo_like.policy.groups.layout import replays_routes
from nemo_like.policy.options import WorkerGroupConfig


def reader_problems(
    name: str, noun: str, group: WorkerGroupConfig, policy: WorkerGroupConfig
) -> Iterator[Problem]:
    """Yield every problem of the worker group ``name`` with reading the policy's samples, from its keys
    alone.

    Messages call the group a ``noun``, for example a critic.
    """
    if replays_routes(group):
        yield Problem(
            key=f"{name}.megatron_cfg.router_replay=true",
            rule=f"replays nothing: the engines sample with the policy's routers, and a {noun} has its own",
            remedy="set it to false",
        )
    for key in ("device", "max_total_sequence_length"):
        own, theirs = getattr(group, key), getattr(policy, key)
        if own != theirs:
            yield Problem(
                key=f"{name}.{key}={getattr(own, 'name', own)}",
                rule=f"must be that of the policy, {getattr(theirs, 'name', theirs)}",
                remedy="leave it out",
            )


def reader_model_problems(
    name: str, noun: str, group: WorkerGroupConfig, policy: WorkerGroupConfig
) -> Iterator[Problem]:
    """Yield every problem of the model of the worker group ``name`` with reading the policy's samples.

    A model that cannot be read is reported by another rule.
    """
    key = f"{name}.model_name={group.model_name}"
    try:
        own, theirs = model_of(group), model_of(policy)
    except ConfigError:
        return
    if own.has_vision_tower or theirs.has_vision_tower:
        yield Problem(
            key=key,
            rule=f"does not go with images: neither a {noun} nor its policy can be a model that reads them",
            remedy="use language models, for data without images",
        )
        return
    if own.vocab_size < theirs.vocab_size:
        yield Problem(
            key=key,
            rule=f"has {own.vocab_size} tokens, but the policy samples from {theirs.vocab_size}: a {noun} "
            "reads the policy's own tokens",
            remedy="use a model with the policy's tokenizer",
        )
    yield from vocabulary_problems(key, noun, Path(group.model_name), Path(policy.model_name))


def vocabulary_problems(key: str, noun: str, other: Path, policy: Path) -> Iterator[Problem]:
    """Yield a problem unless the checkpoints ``other`` and ``policy`` give each token the same id.

    Nothing is checked while one of them is not a directory on this machine.
    """
    if other == policy or not (other.is_dir() and policy.is_dir()):
        return
    try:
        files = [(path / "tokenizer.json").read_bytes() for path in (other, policy)]
        if files[0] == files[1]:
            return
        own, theirs = map(_tokens, files)
    except (OSError, ValueError, LookupError, TypeError) as error:
        yield Problem(
            key=key,
            rule=f"and policy.model_name each need a tokenizer.json, to compare their vocabularies: {error}",
            remedy="save fast tokenizers there with save_pretrained",
        )
        return
    if own != theirs:
        different = min(own.items() ^ theirs.items(), key=lambda entry: entry[1])
        yield Problem(
            key=key,
            rule=f"has another vocabulary than policy.model_name, for example at id {different[1]}: the "
            f"{noun} would read other tokens than the policy sampled",
            remedy=f"use a {noun} with the policy's tokenizer",
        )


def _tokens(file: bytes) -> dict[str, int]:
    """Return the ids of all tokens of a tokenizer.json, by their text."""
    content: dict[str, Any] = json.loads(file)
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a unigram model: [text, score], by id
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    return {**vocabulary, **added}
