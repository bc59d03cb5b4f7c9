"""Judges whether each step gets new prompts and whether rewards vary. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nemo_like.tripwires.alarm import Alarm

# When all rewards in this many first steps are equal, a warning is due.
_UNIFORM_STEPS = 3


def prompt_alarms(prompts: Sequence[int], earlier: Sequence[int] | None, num_prompts: int) -> Iterator[Alarm]:
    """Yield a warning when a step has exactly the prompts of the previous step, in the same order.

    ``num_prompts`` is the size of the training data; data of no more prompts than a step takes must repeat.
    """
    if earlier is not None and tuple(prompts) == tuple(earlier) and num_prompts > len(prompts):
        yield Alarm(
            tripwire="repeated_prompts",
            wrong=f"all {len(prompts)} prompts are those of the step before, of {num_prompts} in the data",
            look_at="the sampler of prompts (data/sampler.py)",
            ends_run=False,
        )


def reward_alarms(num_uniform_steps: int, reward: float) -> Iterator[Alarm]:
    """Yield a warning at the run's third step when in every step so far all samples had the same reward.

    ``num_uniform_steps`` counts these steps, and ``reward`` is the reward in the latest. Rewards that become
    equal later only show that the task was learnt.
    """
    if num_uniform_steps == _UNIFORM_STEPS:
        yield Alarm(
            tripwire="constant_reward",
            wrong=f"in each of the first {_UNIFORM_STEPS} steps all rewards were equal, at last {reward:g}",
            look_at="the environment, and whether prompts are too hard or too easy for the policy",
            ends_run=False,
        )


def resume_alarms(restored: object, saved: object) -> Iterator[Alarm]:
    """Yield an alarm when a resumed run continues elsewhere in the order of prompts than its checkpoint
    says."""
    if restored != saved:
        yield Alarm(
            tripwire="resumed_prompts",
            wrong=f"the prompts continue at {restored}, and the checkpoint has {saved}",
            look_at="the sampler's load_state_dict (data/sampler.py)",
        )
