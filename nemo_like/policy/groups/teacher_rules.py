"""Rules on a teacher: what an engine in the place of workers can do, and which models a teacher may have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.generation.engine_rules import without_cpu_attention
from nemo_like.models.model_info import model_of
from nemo_like.policy.groups.layout import policy_world_size
from nemo_like.policy.options import Device, PolicyConfig, TeacherConfig

_BY_ENGINE = "teacher.scored_by=engine"


_WORKERS = "set teacher.scored_by=workers"


# The keys of a config.json that do not change how a frozen model scores.
_NO_ARCHITECTURE = frozenset(
    {
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout"),
    }
)


def teaching_engine_problems(teacher: TeacherConfig, temperature: float) -> Iterator[Problem]:
    """Yield a problem for each setting that a group of workers supports and one vLLM engine does not."""
    if temperature != 1:
        yield Problem(
            key=_BY_ENGINE,
            rule=f"needs generation.temperature=1, at which vLLM scores given tokens; it is {temperature:g}",
            remedy="set the temperature to 1, or teacher.scored_by=workers",
        )
    if (size := policy_world_size(teacher)) > 1:
        yield Problem(
            key=_BY_ENGINE,
            rule=f"is one process, and the teacher's layout has {size}",
            remedy="set teacher.data_parallel_size and every parallel size of its backend to 1",
        )
    if teacher.models:
        yield Problem(
            key=_BY_ENGINE,
            rule=f"holds one model, and teacher.models has {', '.join(teacher.models)}",
            remedy="set teacher.scored_by=workers, which put one model after the other in place",
        )


def architecture_problems(key: str, model: Path, other: Path) -> Iterator[Problem]:
    """Yield a problem unless the checkpoint ``other``, which ``key`` names, has the architecture of
    ``model``, since its weights are put into that model."""
    try:
        ours, theirs = _architecture(model), _architecture(other)
    except (OSError, ValueError, AttributeError):  # another rule reports an unreadable config.json
        return
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield Problem(
                key=key,
                rule="must have the architecture of teacher.model_name, in whose model its weights are put: "
                f"config.json has {name}={json.dumps(theirs.get(name))} and not {json.dumps(ours.get(name))}",
                remedy="use a checkpoint of the same architecture, saved by the same version of transformers",
            )
            return


def _architecture(path: Path) -> dict[str, Any]:
    """Return the entries of a config.json that decide how a model computes."""
    content: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in content.items() if name not in _NO_ARCHITECTURE}


def teaching_model_problems(teacher: TeacherConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Yield every reason why an engine cannot score by the teacher's model."""
    try:
        own, theirs = model_of(teacher), model_of(policy)
    except ConfigError:  # another rule reports it
        return
    if own.vocab_size > theirs.vocab_size:
        yield Problem(
            key=_BY_ENGINE,
            rule=f"needs a model of the policy's {theirs.vocab_size} tokens, and the teacher's has "
            f"{own.vocab_size}: an engine may name one that the policy has not",
            remedy=_WORKERS,
        )
    length = policy.max_total_sequence_length
    if own.max_position_embeddings <= length:
        yield Problem(
            key=_BY_ENGINE,
            rule=f"needs a model of more than policy.max_total_sequence_length={length} positions, and the "
            f"teacher's has {own.max_position_embeddings}: an engine generates one token more than it scores",
            remedy=f"shorten the sequences, or {_WORKERS}",
        )
    if teacher.device is Device.cpu and (found := without_cpu_attention(own)):
        what, size, known = found
        rule = f"needs {what} of another size than {size}: vLLM has attention on the CPU only for {known}"
        yield Problem(key=_BY_ENGINE, rule=rule, remedy=_WORKERS)
