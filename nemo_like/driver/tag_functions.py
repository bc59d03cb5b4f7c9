"""Calls the estimator and the filters that the configuration names on a batch's tags.

    tags ──▶ without_refused: each of grpo.sample_filters ──▶ sample_mask, outcome
    tags ──▶ with_estimated_advantages: grpo.adv_estimator.name      ──▶ advantage, kl_scale

An error in one of them ends the run with a sentence that names the function, the step and the line of its
file. A function of the user's own has a deadline, since it may wait for something.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from nemo_like.algorithms.estimators import KLToGo, build_estimator
from nemo_like.algorithms.options import ESTIMATOR_KINDS, FILTER_KINDS, GRPOConfig
from nemo_like.algorithms.rewards import Outcome
from nemo_like.algorithms.sample_filters import RolledOut, build_filter
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import (
    GROUP_ID,
    IS_TRUNCATED,
    NUM_RESPONSE_TOKENS,
    REWARD,
    SAMPLE_MASK,
    SHAPED_REWARD,
    tags_read_by,
)
from nemo_like.config.kinds import Kinds
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.stages import masked, token_sums, with_advantages

T = TypeVar("T")
R = TypeVar("R")

# These functions compute on a few numbers per sample, which takes moments.
_DEADLINE_S = 600.0


def with_estimated_advantages(batch: KVBatchMeta, cfg: GRPOConfig, kl: KLToGo | None = None) -> KVBatchMeta:
    """Return the batch with the tag advantage and, when the reward has a KL term, the tag kl_scale.

    ``kl`` is None without a KL term. Raises RunFailed when the estimator fails.
    """
    name, components = cfg.adv_estimator.name, list(cfg.adv_estimator.reward_weights)
    with _errors_as_run_failed(f"grpo.adv_estimator.name={name}", batch):
        tags = _tags(ESTIMATOR_KINDS, name, batch)
        estimator = _in_time(ESTIMATOR_KINDS, name, build_estimator(cfg))
        return with_advantages(batch, estimator, components, kl, token_sums(batch), tags)


def without_refused(batch: KVBatchMeta, cfg: GRPOConfig) -> KVBatchMeta:
    """Return a rollout's batch with the samples masked that one of ``grpo.sample_filters`` refuses.

    Raises RunFailed when a filter fails.
    """
    for name in cfg.sample_filters:
        with _errors_as_run_failed(f"grpo.sample_filters: {name}", batch):
            kept = kept_by_filter(name, batch, cfg)
        mask = [float(old) if keep else 0.0 for old, keep in zip(batch.tag(SAMPLE_MASK), kept, strict=True)]
        batch = masked(batch, mask, Outcome.filtered)
    return batch


def kept_by_filter(name: str, batch: KVBatchMeta, cfg: GRPOConfig) -> Sequence[bool]:
    """Return for each sample whether the filter ``name`` lets it train."""
    num_tokens = batch.tag(NUM_RESPONSE_TOKENS)
    return _in_time(FILTER_KINDS, name, build_filter(name, cfg))(
        RolledOut(
            rewards=batch.tag(REWARD),
            shaped_rewards=batch.tag(SHAPED_REWARD),
            group_ids=batch.tag(GROUP_ID),
            sample_mask=batch.tag(SAMPLE_MASK),
            num_response_tokens=num_tokens,
            is_truncated=batch.tag(IS_TRUNCATED),
            tags=_tags(FILTER_KINDS, name, batch),
        )
    )


def _in_time(kinds: Kinds, name: str, function: Callable[[T], R]) -> Callable[[T], R]:
    """Return ``function``. If it is the user's own, wrap it: the wrapper raises ValueError when the call has
    not returned by its deadline. The call then goes on in a thread, which ends with this process."""
    if not kinds.is_own(name):
        return function

    def bounded(values: T) -> R:
        answer: Future[R] = Future()

        def call() -> None:
            try:
                answer.set_result(function(values))
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=call, name=name, daemon=True).start()
        if not wait([answer], timeout=_DEADLINE_S).done:
            raise ValueError(f"did not return within {_DEADLINE_S:g} s")
        return answer.result()

    return bounded


def _tags(kinds: Kinds, name: str, batch: KVBatchMeta) -> Mapping[str, Sequence[Any]]:
    """Return the values of the tags that the function declares to read, by name. Raises ValueError when no
    sample has one of them."""
    found = {}
    for tag in tags_read_by(kinds.function(name)):
        if not batch.has_tag(tag):
            raise ValueError(
                f"reads the tag {tag.name!r}, which no sample has; there are {sorted(batch.tags)}"
            )
        found[tag.name] = batch.tags[tag.name]
    return found


@contextmanager
def _errors_as_run_failed(what: str, batch: KVBatchMeta) -> Iterator[None]:
    """Turn an error of the block into RunFailed, which names the function, the step and the line."""
    try:
        yield
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(last.filename).name}:{last.lineno}, in {last.name})"
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}{where}"
        raise RunFailed(f"{what} failed at {batch.occasion}: {reason}") from error
