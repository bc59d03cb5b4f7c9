"""Rules on the teacher of loss_fn.kind=distillation, the group teacher.

Most of its keys are those of the policy, so most of its rules are the policy's too: they are asked of the
configuration in which the teacher is the policy, and their answers are told of the teacher.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_like.config.derived import has_teacher, is_own_loss, policy_world_size
from nemo_like.config.model_info import read_model_info
from nemo_like.config.policy_rules import beside_policy
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.config.schema import Config, Device, Placement, TeacherConfig, TeacherScoring

_BY_ENGINE = "teacher.scored_by=engine"


def teacher_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem with whether there is a teacher, and with keys that it does not go with."""
    if cfg.teacher is None:
        if has_teacher(cfg.loss_fn):
            yield Problem(
                key=f"loss_fn.kind={cfg.loss_fn.kind}",
                rule="needs a teacher, which the student is compared with",
                remedy="add `- teacher: default` to the defaults, or teacher=default to the command line, "
                "and set teacher.model_name",
            )
        return
    if not (has_teacher(cfg.loss_fn) or is_own_loss(cfg.loss_fn)):
        yield Problem(
            key="teacher",
            rule=f"is a teacher, which nobody asks with loss_fn.kind={cfg.loss_fn.kind}",
            remedy="set loss_fn.kind=distillation, or leave the group teacher out",
        )
    yield from _of_the_group(cfg, cfg.teacher)
    if has_teacher(cfg.loss_fn) and cfg.loss_fn.arguments.get("reward_weight", 0) == 0:
        yield from _without_rewards(cfg)
    if cfg.teacher.scored_by is TeacherScoring.engine:
        yield from _of_the_engine(cfg, cfg.teacher)


def _without_rewards(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for every key on the way from rewards to advantages, which such a loss leaves out."""
    chosen = {
        "value": cfg.value is not None,
        "loss_fn.use_kl_in_reward=true": cfg.loss_fn.use_kl_in_reward,
        "grpo.use_leave_one_out_baseline=true": cfg.grpo.use_leave_one_out_baseline,
        "grpo.reward_scaling.enabled=true": cfg.grpo.reward_scaling.enabled,
        "grpo.reward_shaping.enabled=true": cfg.grpo.reward_shaping.enabled,
    }
    for key in (key for key, is_chosen in chosen.items() if is_chosen):
        yield Problem(
            key=key,
            rule="has no effect with loss_fn.arguments.reward_weight=0: the policy learns from its teacher "
            "alone",
            remedy="set loss_fn.arguments.reward_weight above 0, or "
            + ("leave the group value out" if key == "value" else "this to false"),
        )


def _of_the_group(cfg: Config, teacher: TeacherConfig) -> Iterator[Problem]:
    if teacher.lora.enabled:
        yield Problem(
            key="teacher.lora.enabled=true",
            rule="trains nothing: a teacher is frozen",
            remedy="set it to false",
        )
    if teacher.device is Device.cuda and cfg.cluster.placement is Placement.colocated:
        yield Problem(
            key="teacher",
            rule="needs GPUs of its own, and cluster.placement=colocated gives it the policy's",
            remedy="set cluster.placement=separate",
        )
    yield from beside_policy("teacher", "teacher", teacher, cfg.policy)


def _of_the_engine(cfg: Config, teacher: TeacherConfig) -> Iterator[Problem]:
    """Yield a problem for all that one engine of vLLM cannot do, and a group of workers can."""
    if cfg.generation.temperature != 1:
        yield Problem(
            key=_BY_ENGINE,
            rule="needs generation.temperature=1, at which vLLM scores given tokens; it is "
            f"{cfg.generation.temperature:g}",
            remedy="set the temperature to 1, or teacher.scored_by=workers",
        )
    if (size := policy_world_size(teacher)) > 1:
        yield Problem(
            key=_BY_ENGINE,
            rule=f"is one process, and the teacher's layout has {size}",
            remedy="set teacher.data_parallel_size and every parallel size of its backend to 1",
        )


def with_teacher_as_policy(cfg: Config, teacher: TeacherConfig) -> Config:
    """Return the configuration in which the teacher is the policy."""
    return replace(cfg, policy=teacher, value=None, teacher=None)


def teacher_model_problems(cfg: Config, teacher: TeacherConfig) -> Iterator[Problem]:
    """Yield every problem of the teacher's checkpoint beside the policy's. Both are there and can be read."""
    key = f"teacher.model_name={teacher.model_name}"
    try:
        own = read_model_info(teacher.model_name, teacher.backend)
        theirs = read_model_info(cfg.policy.model_name, cfg.policy.backend)
    except ConfigError:  # told elsewhere
        return
    if own.has_vision_tower or theirs.has_vision_tower:
        yield Problem(
            key=key,
            rule="does not go with images: neither a teacher nor its student can be a model that reads them",
            remedy="use language models, for data without images",
        )
        return
    if own.vocab_size < theirs.vocab_size:
        yield Problem(
            key=key,
            rule=f"has {own.vocab_size} tokens, but the policy samples from {theirs.vocab_size}: a teacher "
            "scores the policy's own tokens",
            remedy="use a model with the policy's tokenizer",
        )
    elif own.vocab_size > theirs.vocab_size and teacher.scored_by is TeacherScoring.engine:
        yield Problem(
            key=_BY_ENGINE,
            rule=f"needs a model of the policy's {theirs.vocab_size} tokens, and the teacher's has "
            f"{own.vocab_size}: an engine may name one that the policy has not",
            remedy="set teacher.scored_by=workers, which leave these out",
        )
    yield from _other_tokenizer(key, Path(teacher.model_name), Path(cfg.policy.model_name))


def _other_tokenizer(key: str, teacher: Path, policy: Path) -> Iterator[Problem]:
    try:
        files = [(path / "tokenizer.json").read_bytes() for path in (teacher, policy)]
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
            "teacher would be asked for other tokens than the student sampled",
            remedy="use a teacher with the policy's tokenizer",
        )


def _tokens(file: bytes) -> dict[str, int]:
    """Return the ids of all tokens of a tokenizer.json, by their text."""
    content: dict[str, Any] = json.loads(file)
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a unigram model: [text, score], by id
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    return {**vocabulary, **added}
