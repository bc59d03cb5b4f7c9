"""Run directories with hand-made samples, written by what writes those of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.data.interface import TaskPrompt
from nemo_like.environments.interface import Exchange, Failure, FailureKind
from nemo_like.observability.jsonl import MetricsFile
from nemo_like.rollout.conversation import Conversation, Limits, Passage
from nemo_like.rollout.dump import StepSamples
from nemo_like.rollout.prompts import PromptOrigin

# Every fourth group is of an environment whose reward raises. Group 1 gets worse, all others get better.
BROKEN, WORSE = 3, 1
NUM_TOKENS = 8  # of a response
STRANGE = "</script><b>é"


def write_run(directory: Path, *, num_steps: int, num_groups: int, group_size: int) -> Path:
    """Write metrics, the samples of every step, and of validations before the first and after the last."""
    directory.mkdir(parents=True)
    metrics = MetricsFile(directory / "metrics.jsonl")
    for step in range(1, num_steps + 1):
        metrics.write(step, {"train/reward": step / num_steps, **TIMES})
        write_step(directory, f"step_{step}", step, num_groups, group_size, step / num_steps)
    for step in (0, num_steps):
        write_step(directory, f"validation_{step}", step, num_groups, 1, step / num_steps)
    metrics.close()
    return directory


TIMES = {
    "timing/train/total_step_time": 4.0,
    "timing/train/generation": 2.0,
    "timing/train/policy_training": 1.0,
    "performance/generation_s": 1.0,
    "performance/worker_compute_s": 0.5,
    "performance/overhead_share": 0.625,
}


def write_step(
    directory: Path, name: str, step: int, num_groups: int, group_size: int, solved: float
) -> None:
    groups = [
        [conversation(group, generation, group_size, solved) for generation in range(group_size)]
        for group in range(num_groups)
    ]
    rewards = [sample.reward or 0.0 for group in groups for sample in group]
    chunks = tuple(Chunk(f"{name}-{group}", (NUM_TOKENS + 5,) * group_size) for group in range(num_groups))
    batch = KVBatchMeta(
        partition=name,
        chunks=chunks,
        rows=tuple(product(range(num_groups), range(group_size))),
        columns=frozenset(),
        tags={
            "group_id": tuple(group for group in range(num_groups) for _ in range(group_size)),
            "reward": tuple(rewards),
            "advantage": tuple(reward - 0.5 for reward in rewards),
            "num_prompt_tokens": (2,) * len(rewards),
            "num_response_tokens": tuple(sample.num_response_tokens for group in groups for sample in group),
            "policy_version": (step,) * len(rewards),
        },
    )
    if name.startswith("step"):
        failed = [sample.failure is not None for group in groups for sample in group]
        batch = batch.with_tags({"outcome": ["reward_failed" if one else "trained" for one in failed]})
    samples = StepSamples(texts)
    samples.remember(step, batch, groups, [PromptOrigin("pairs", group) for group in range(num_groups)])
    generated = np.full(NUM_TOKENS + 5, -0.75, np.float32)
    # Of the tokens after the prompt 0, 0.1, 0.2, ...
    entropies = np.arange(-2, NUM_TOKENS + 3, dtype=np.float32) / 10
    scored = {"prev_logprobs": generated, "entropies": entropies}
    scores = dict.fromkeys(batch.sample_ids, scored) if name.startswith("step") else {}
    samples.write(directory / "rollouts" / f"{name}.jsonl", step, [batch], scores)


def conversation(group: int, generation: int, group_size: int, solved: float) -> Conversation:
    """Two turns: a response of four tokens, an observation of three, a response of four or of three."""
    is_broken = group % 4 == BROKEN
    env = "broken" if is_broken else "sums"
    share = 1.0 - solved if group == WORSE else solved
    sample = Conversation(
        TaskPrompt(f"{group}+1=", str(group), env=env),
        (1, 2), 0, generation, Limits(max_turns=2, max_tokens=64), seed=0,
    )  # fmt: skip
    half, last = NUM_TOKENS // 2, NUM_TOKENS // 2 - generation % 2
    logprobs = -0.25 * np.arange(1, half + 1, dtype=np.float32)
    sample.passages = [
        Passage(np.arange(half, dtype=np.int32), logprobs),
        Passage(np.arange(3, dtype=np.int32), None),
        Passage(np.arange(last, dtype=np.int32), logprobs[:last]),
    ]
    sample.history = [Exchange("first try", "no, again")]
    sample.latest_response, sample.num_turns = STRANGE, 2
    if is_broken:
        sample.failure = Failure(FailureKind.raised, f"KeyError: 'answer' of problem {group}")
    else:
        sample.rewards = {"exact": float(generation < share * group_size), "brevity": 0.0}
    return sample


def texts(token_ids: Sequence[int]) -> list[str]:
    return [f"t{token} " for token in token_ids]
