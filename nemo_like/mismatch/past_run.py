"""Finds a sample of a run that is over, and the checkpoint whose weights sampled it.

RUN_DIR/recorded/step_S-0.npz   tokens as they are (rollout.record)
RUN_DIR/rollouts/step_S.jsonl   texts of prompt and tokens (rollout.dump_period, or an excerpt)
RUN_DIR/checkpoints/step_N      of N = S - 1, which sampled step S; policy.model_name for step 1
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.batch.columns import GENERATION_LOGPROBS, INPUT_IDS, PARENT_GAPS, RESPONSE_MASK
from nemo_like.batch.recordings import recorded_steps
from nemo_like.checkpoint.store import POLICY_GROUP, checkpoint_paths
from nemo_like.configuration import Config
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.rollout.recorder import read_step

_DUMP = re.compile(r"step_(\d+)\.jsonl")
_ROLE = re.compile(r"\[\w+\] ")  # of a message, before its text
_REMEDY = "rollout.record=true keeps the tokens of later runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSample:
    """A sample of a run, or the first branch of an agent's session, and the weights with which it was
    sampled."""

    name: str  # of the sample, for people
    token_ids: list[int]
    # [T - 1] float32, the log-probs that the engine gave of all tokens but the first; NaN where it gave none.
    reported: np.ndarray
    checkpoint: Path | None  # a step_N/policy; None: policy.model_name
    version: int
    has_its_weights: bool  # whether the checkpoint is that which sampled; else it is the nearest there is


def past_sample(run: Path, cfg: Config, step: int | None, index: int) -> PastSample:
    """Return the ``index``-th sample of a step of the run in this directory; of the last step whose weights
    there are, where ``step`` is None.

    Raises ValueError, which says what there is, when there is no such sample, or when its tokens cannot be
    told from their texts.
    """
    recorded = recorded_steps(run / "recorded") if (run / "recorded").is_dir() else set()
    dumped = {int(found[1]) for one in run.glob("rollouts/*") if (found := _DUMP.fullmatch(one.name))}
    checkpoints = _checkpoints(run, cfg)
    step = _chosen(run, step, recorded | dumped, checkpoints)
    if step in recorded:
        token_ids, reported = _recorded(run / "recorded", step, index)
    else:
        token_ids, reported = _dumped(run / "rollouts" / f"step_{step}.jsonl", cfg, index)
    version = step - 1
    has_its_weights = version == 0 or version in checkpoints
    if not has_its_weights and checkpoints:
        version = min(checkpoints, key=lambda one: (abs(one - step + 1), one))
    checkpoint = checkpoints[version] / POLICY_GROUP if version in checkpoints else None
    return PastSample(
        name=f"sample {index} of step {step}",
        token_ids=token_ids,
        reported=reported if has_its_weights else np.full_like(reported, np.nan),
        checkpoint=checkpoint,
        version=version if checkpoint is not None else 0,
        has_its_weights=has_its_weights,
    )


def _checkpoints(run: Path, cfg: Config) -> dict[int, Path]:
    elsewhere = cfg.checkpointing.checkpoint_dir
    paths = checkpoint_paths(run / "checkpoints" if elsewhere is None else Path(elsewhere))
    return {int(path.name.removeprefix("step_")): path for path in paths}


def _chosen(run: Path, step: int | None, steps: set[int], checkpoints: dict[int, Path]) -> int:
    if not steps:
        raise ValueError(f"{run} has no samples in rollouts/step_N.jsonl and none in recorded/; {_REMEDY}")
    if step is None:
        return max((one for one in steps if one - 1 in checkpoints), default=max(steps))
    if step not in steps:
        there = ", ".join(map(str, sorted(steps)[-12:]))
        raise ValueError(f"--step {step}: {run} has no samples of it; it has those of steps {there}")
    return step


def _recorded(directory: Path, step: int, index: int) -> tuple[list[int], np.ndarray]:
    flat = read_step(directory, step)
    _check_index(index, len(flat.lengths), step)
    start = sum(flat.lengths[:index])
    own = slice(start, start + flat.lengths[index])
    columns = [
        np.asarray(flat.columns[one.name])[own] for one in (INPUT_IDS, GENERATION_LOGPROBS, RESPONSE_MASK)
    ]
    gaps = flat.columns.get(PARENT_GAPS.name)
    length = _before_branches(np.zeros(flat.lengths[index]) if gaps is None else np.asarray(gaps)[own])
    token_ids, logprobs, mask = (column[:length] for column in columns)
    return token_ids.tolist(), np.where(mask > 0, logprobs, np.nan)[1:].astype(np.float32)


def _dumped(path: Path, cfg: Config, index: int) -> tuple[list[int], np.ndarray]:
    lines = path.read_text(encoding="utf-8").splitlines()
    _check_index(index, len(lines), int(path.stem.removeprefix("step_")))
    sample: dict[str, Any] = json.loads(lines[index])
    tokens = sample.get("tokens") or {}
    if sample.get("images") or not tokens.get("text"):
        raise ValueError(f"{path}: sample {index} has images, or no tokens; {_REMEDY}")
    tokenizer = Tokenizer(cfg.policy.tokenizer or cfg.policy.model_name)
    prompt_ids = tokenizer.encode_prompt(sample["prompt"])
    response_ids = _ids_of(tokenizer, tokens["text"])
    if response_ids is None or _ROLE.match(sample["prompt"]):
        raise ValueError(f"{path}: the tokens of sample {index} cannot be told from their texts; {_REMEDY}")
    length = _before_branches(np.array(tokens.get(PARENT_GAPS.name, [0] * len(response_ids))))
    given = [np.nan if value is None else value for value in tokens[GENERATION_LOGPROBS.name][:length]]
    reported = np.array([*[np.nan] * (len(prompt_ids) - 1), *given], np.float32)
    return [*prompt_ids, *response_ids[:length]], reported


def _before_branches(gaps: np.ndarray) -> int:
    """Return how many tokens the first branch of a session has; ``gaps`` are those of its tokens."""
    return int(np.flatnonzero(gaps)[0]) if gaps.any() else len(gaps)


def _ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int] | None:
    """Return the ids of the tokens with these texts; None where a text is that of no token or of several."""
    ids = sorted(tokenizer.hf_tokenizer.get_vocab().values())
    by_text: dict[str, list[int]] = {}
    for token_id, text in zip(ids, tokenizer.token_texts(ids), strict=True):
        by_text.setdefault(text, []).append(token_id)
    found = [by_text.get(text, []) for text in texts]
    return [one[0] for one in found] if all(len(one) == 1 for one in found) else None


def _check_index(index: int, count: int, step: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"--sample {index}: step {step} has samples 0 to {count - 1}")
