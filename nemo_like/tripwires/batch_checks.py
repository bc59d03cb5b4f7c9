"""Judges a step's tags: groups, advantages, masks, and the counts by which the loss is normalised.

Standard library only; the driver has all these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.measured import Measured

# Advantages are floats of Python on both sides, so rounding alone is some 1e-15.
_ADVANTAGE_TOLERANCE = 1e-6

Counts = tuple[int, int]  # (response tokens, samples) that train in one update


def group_alarms(group_ids: Sequence[Hashable], prompt_index: Sequence[int]) -> Iterator[Alarm]:
    """Yield an alarm unless all samples of a ``group_id`` have the same prompt in the data plane, and no
    other samples have it.

    ``prompt_index`` gives the number of each sample's prompt, by where the prompt's tokens are stored.
    """
    num_pairs = len(set(zip(group_ids, prompt_index, strict=True)))
    num_groups, num_prompts = len(set(group_ids)), len(set(prompt_index))
    if not num_pairs == num_groups == num_prompts:
        yield Alarm(
            tripwire="groups",
            wrong=(
                f"{num_prompts} prompts and {num_groups} group ids occur in {num_pairs} combinations: tags "
                "have another order than the samples that they belong to"
            ),
            look_at="what reorders batches (batch/meta.py, batch/sharding.py)",
        )


def advantage_alarms(given: Sequence[float], expected: Sequence[float] | None) -> Iterator[Alarm]:
    """Yield an alarm where an advantage differs from ``expected``, which is None for a user's own
    estimator."""
    if expected is None:
        return
    gaps = [abs(one - other) / (1 + abs(other)) for one, other in zip(given, expected, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    # "not <=" in place of ">": NaN counts as wrong.
    if not gaps[worst] <= _ADVANTAGE_TOLERANCE:
        num_wrong = sum(not gap <= _ADVANTAGE_TOLERANCE for gap in gaps)
        yield Alarm(
            tripwire="advantages",
            wrong=(
                f"{num_wrong} of {len(gaps)} advantages are not what the estimator's formula gives: sample "
                f"{worst} has {given[worst]:.6g}, not {expected[worst]:.6g}"
            ),
            look_at="the estimator, the groups, the shaped rewards and masks that it gets "
            "(docs/explanation/rewards.md)",
        )


def mask_alarms(
    sample_mask: Sequence[float], is_judged: Sequence[bool], reasons: Sequence[str | None]
) -> Iterator[Alarm]:
    """Yield an alarm when a sample trains that was not judged, or when a sample's mask contradicts its
    reason.

    ``reasons`` has for each sample why it does not train, or None where it trains.
    """
    num_unjudged = sum(bool(kept) and not judged for kept, judged in zip(sample_mask, is_judged, strict=True))
    num_wrong = sum(bool(kept) != (reason is None) for kept, reason in zip(sample_mask, reasons, strict=True))
    wrong = []
    if num_unjudged:
        wrong.append(f"{num_unjudged} samples train that were not judged")
    if num_wrong:
        wrong.append(f"{num_wrong} samples are masked without a reason, or train in spite of one")
    if wrong:
        yield Alarm(
            tripwire="masks",
            wrong="; ".join(wrong),
            look_at="what masks samples (driver/stages.py, driver/tag_functions.py)",
        )


def truncation_alarms(is_truncated: Sequence[bool], sample_mask: Sequence[float]) -> Iterator[Alarm]:
    """Yield an alarm when truncated samples train; the caller checks this only with
    grpo.overlong_filtering."""
    num_wrong = sum(bool(cut and kept) for cut, kept in zip(is_truncated, sample_mask, strict=True))
    if num_wrong:
        yield Alarm(
            tripwire="masks",
            wrong=f"{num_wrong} truncated samples train, with grpo.overlong_filtering=true",
            look_at="the overlong filter (algorithms/sample_filters.py)",
        )


def uniform_group_alarms(
    rewards: Sequence[float], prompt_index: Sequence[int], sample_mask: Sequence[float]
) -> Iterator[Alarm]:
    """Yield an alarm when all raw rewards of a group that trains are equal.

    The caller checks this only with grpo.use_dynamic_sampling, and before further filters.
    """
    seen: dict[int, set[float]] = {index: set() for index in prompt_index}
    for reward, index, kept in zip(rewards, prompt_index, sample_mask, strict=True):
        if kept and not math.isnan(reward):
            seen[index].add(reward)
    num_uniform = sum(len(values) < 2 for values in seen.values())
    if num_uniform:
        yield Alarm(
            tripwire="dynamic_sampling",
            wrong=f"{num_uniform} of {len(seen)} groups that train have equal raw rewards",
            look_at="by which reward dynamic sampling chooses groups (driver/collection.py)",
        )


def expected_counts(
    num_tokens: Sequence[int], sample_mask: Sequence[float], global_batch_size: int
) -> list[Counts]:
    """Return for every update the (response tokens, samples) that train; an update has ``global_batch_size``
    samples."""
    counts = []
    for start in range(0, len(num_tokens), global_batch_size):
        part = slice(start, start + global_batch_size)
        kept = [tokens for tokens, mask in zip(num_tokens[part], sample_mask[part], strict=True) if mask]
        counts.append((sum(kept), len(kept)))
    return counts


def count_alarms(planned: Sequence[Sequence[Counts]], expected: Sequence[Counts]) -> Iterator[Alarm]:
    """Yield an alarm when a replica's schedule normalises the loss by other counts than the tags give.

    ``planned[replica]`` has the counts of every update of one epoch.
    """
    for replica, counts in enumerate(planned):
        if list(counts) != list(expected):
            pairs = zip(counts, expected, strict=False)
            wrong = next((number for number, (one, other) in enumerate(pairs) if one != other), len(expected))
            seen = counts[wrong] if wrong < len(counts) else (0, 0)
            due = expected[wrong] if wrong < len(expected) else (0, 0)
            yield Alarm(
                tripwire="denominators",
                wrong=(
                    f"update {wrong + 1} of replica {replica} is normalised by {seen[0]} tokens and "
                    f"{seen[1]} samples; {due[0]} and {due[1]} train"
                ),
                look_at="the counts of the schedule (batch/sharding.py)",
            )
            return


def trained_token_alarms(measured: float | None, at_least: int, at_most: int) -> Iterator[Alarm]:
    """Yield an alarm when the loss saw another number of tokens that train than the tags give.

    Samples without a gradient may be left out, so the tags give two bounds. ``measured`` is None if nobody
    counted.
    """
    if measured is not None and not at_least <= measured <= at_most:
        due = f"{at_most}" if at_least == at_most else f"{at_least} to {at_most}"
        yield Alarm(
            tripwire="token_count",
            wrong=f"{measured:g} tokens trained; by the tags it should be {due}",
            look_at="response masks and the making of micro-batches (policy/batch/policy_batch.py)",
        )


def sample_alarms(num_wrong: float) -> Iterator[Alarm]:
    """Yield an alarm when a worker got samples whose columns do not fit their tags."""
    if num_wrong:
        yield Alarm(
            tripwire="samples",
            wrong=(
                f"on a worker {num_wrong:g} samples have columns that do not fit their tags: other tokens "
                "than were sampled, or a response mask that is not on the responses' tokens"
            ),
            look_at="rollout/flatten.py, the order of tags (batch/meta.py), data_plane/",
        )


def advantage_digest_alarms(measured: Mapping[str, float]) -> Iterator[Alarm]:
    """Yield an alarm when the loss got samples with another advantage than the driver estimated."""
    if count := measured.get(Measured.num_wrong_advantages):
        yield Alarm(
            tripwire="advantages",
            wrong=f"on a worker {count:g} samples had another advantage in the loss than the driver "
            "estimated for their tokens",
            look_at="the order of tags (batch/meta.py), and policy/loss/token_advantages.py",
        )
