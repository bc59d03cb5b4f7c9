"""Named parts of the rewards as tags, for the estimators that ask for them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nemo_like.batch.tags import reward_component


def component_tags(names: Iterable[str], rewards: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """One tag per name; ``rewards[i]`` are sample i's components. What a sample lacks is 0.

    Raises ValueError for a name that no sample has, as long as any has components at all.
    """
    there = sorted({name for components in rewards for name in components})
    for name in names:
        if there and name not in there:
            raise ValueError(
                f"grpo.adv_estimator.reward_weights.{name}: no environment gives a component {name!r}; "
                f"there are {', '.join(there)}"
            )
    return {
        reward_component(name).name: [float(components.get(name, 0.0)) for components in rewards]
        for name in names
    }
