"""Saves in a checkpoint which data a run has, and compares them when a run continues.

Prompts are drawn by their numbers, so other data under the same numbers would go on as if nothing had
happened: the prompts of an epoch would come twice or never, and a curve would join two tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_like.data.interface import SourceReport
from nemo_like.rollout.prompts import RolloutMode, SourceReports

# By section of the configuration: name, num_prompts and digest of each source. Plain data, for JSON.
SavedData = Mapping[str, Sequence[Mapping[str, Any]]]

_SECTIONS = {RolloutMode.training: "train", RolloutMode.validation: "validation"}


def saved_data(sources: SourceReports) -> dict[str, list[dict[str, Any]]]:
    """Return the facts on the sources that a checkpoint saves."""
    return {
        _SECTIONS[mode]: [
            {"name": one.name, "num_prompts": one.num_prompts, "digest": one.digest} for one in reports
        ]
        for mode, reports in sources.items()
    }


def training_digests(sources: SourceReports) -> list[str]:
    """Return the digests of the training sources in their order."""
    return [source.digest for source in sources[RolloutMode.training]]


def other_training_data(saved: SavedData, sources: SourceReports) -> str | None:
    """Return how the training sources differ from the checkpoint's; None when they are the same.

    Sources are compared by position, since the mixture draws from them by position; a file may have a new
    name.
    """
    before, now = saved["train"], sources[RolloutMode.training]
    if len(before) != len(now):
        return f"it was made with {_names(before)} in data.train, and this run has {_own_names(now)}"
    differences = [
        _difference(one, source) for one, source in zip(before, now, strict=True) if _differs(one, source)
    ]
    return "; ".join(differences) or None


def other_held_out_data(saved: SavedData, sources: SourceReports) -> str | None:
    """Return how the validation sources differ from the checkpoint's, by name; None when they are the same
    data, even under other names."""
    if sorted(one["digest"] for one in saved["validation"]) == sorted(
        one.digest for one in sources[RolloutMode.validation]
    ):
        return None
    return "; ".join(_held_out_differences(saved["validation"], sources[RolloutMode.validation])) or None


def _held_out_differences(before: Sequence[Mapping[str, Any]], now: Sequence[SourceReport]) -> Iterator[str]:
    by_name = {one["name"]: one for one in before}
    if by_name.keys() != {source.name for source in now}:
        yield f"data.validation had {_names(before)}, and now has {_own_names(now)}"
    for source in now:
        if source.name in by_name and _differs(by_name[source.name], source):
            yield _difference(by_name[source.name], source)


def _differs(before: Mapping[str, Any], now: SourceReport) -> bool:
    return (before["num_prompts"], before["digest"]) != (now.num_prompts, now.digest)


def _difference(before: Mapping[str, Any], now: SourceReport) -> str:
    if before["num_prompts"] != now.num_prompts:
        return f"{now.name} had {before['num_prompts']} problems and has {now.num_prompts}"
    return (
        f"{now.name} has {now.num_prompts} problems as before, but others, or in another order (their digest "
        f"was {before['digest'][:12]} and is {now.digest[:12]})"
    )


def _names(saved: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(one["name"] for one in saved) or "nothing"


def _own_names(sources: Sequence[SourceReport]) -> str:
    return ", ".join(source.name for source in sources) or "nothing"
