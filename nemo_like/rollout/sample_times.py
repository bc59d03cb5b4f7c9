"""The times of a rollout's conversations, in the form of ``rollout_times.jsonl``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import starmap

from nemo_like.observability.rollout_times import RolloutTimes, SampleTimes, TurnTimes
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.prompts import PromptBatch


def times_of(
    prompts: PromptBatch, groups: Sequence[Sequence[Conversation]], started_s: float
) -> RolloutTimes:
    """Return when each response of an ended rollout was requested and came; ``started_s`` is when the rollout
    started, on the monotonic clock."""
    return RolloutTimes(
        step=prompts.step,
        first_group=prompts.first_group,
        began_s=time.time() - (time.monotonic() - started_s),
        groups=tuple(tuple(_times_of(sample, started_s) for sample in group) for group in groups),
    )


def _times_of(sample: Conversation, started_s: float) -> SampleTimes:
    """Return the times of a sample's turns. An agent's session has none: its calls may run side by side and
    are no turns."""
    if not sample.moments_s:
        return SampleTimes(sample.num_tokens, ())
    lengths = [len(passage.token_ids) for passage in sample.passages if passage.logprobs is not None]
    after_s = [moment_s - started_s for moment_s in sample.moments_s]
    turns = zip(after_s[0::3], lengths, after_s[1::3], after_s[2::3], strict=True)
    return SampleTimes(sample.num_tokens, tuple(starmap(TurnTimes, turns)))
