"""Judges whether rewards give a run anything to learn from, and if not, says why. Standard library only.

A group of samples teaches by its advantages. Where all of them are 0, the group is *idle*: its rewards are
equal, or become equal by scaling and shaping, or masks leave too few of its samples. A run that does well has
idle groups too, because it solves their prompts. So idle groups cause a warning when they are there from the
start, or when they are not solved and rewards have not risen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.data_checks import reward_alarms

# The latest steps are judged together: at least _NUM_STEPS, with at least _NUM_GROUPS groups between them. Of
# fewer groups nearly all may be idle by chance.
_NUM_GROUPS = 64
_NUM_STEPS = 3
_IDLE_SHARE = 0.95
FLAT_PER_CENT = 95.0  # of a component's judged samples in groups without two different values of it
# Rounding gives advantages of some 1e-10 where rewards are sums of the same parts in another order.
_LEAST_ADVANTAGE = 1e-6
# From this share of truncated responses on, truncation is the first thing to change.
_TRUNCATED_SHARE = 0.5
# Responses that solve their prompts, or that do not, count as rare up to this share.
_RARE_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignal:
    """How much a step's samples, in whole groups, give to learn from."""

    num_groups: int
    num_idle: int  # groups all of whose advantages are 0
    num_solved: int  # idle groups each of whose judged samples solves the prompt
    num_masked: int  # idle groups whose rewards differ, but not among the samples that train
    num_levelled: int  # idle groups whose rewards differ among the samples that train
    num_samples: int
    num_truncated: int
    rewards: Sequence[float]  # of all judged samples, as their environments gave them
    # The means of the reward's components that differ within nearly no group, by their names in messages.
    flat_components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSamples:
    """The samples of a step's groups, in any order; every sequence has one entry per sample."""

    group_ids: Sequence[int]
    advantages: Sequence[float]
    rewards: Sequence[float]
    is_judged: Sequence[bool]
    trains: Sequence[bool]  # judged, and not masked
    is_truncated: Sequence[bool]


def step_signal(
    samples: SignalSamples, flat_components: Mapping[str, float], *, solved_reward: float
) -> StepSignal:
    """Summarise a step's samples. A reward of at least ``solved_reward`` solves its prompt."""
    largest: dict[int, float] = {}  # by group, the greatest magnitude of an advantage
    for group, advantage in zip(samples.group_ids, samples.advantages, strict=True):
        largest[group] = max(largest.get(group, 0.0), abs(advantage))
    judged, training = (_different(samples, chosen) for chosen in (samples.is_judged, samples.trains))
    idle = [group for group, advantage in largest.items() if advantage < _LEAST_ADVANTAGE]
    different = [group for group in idle if len(judged[group]) > 1]
    num_levelled = sum(len(training[group]) > 1 for group in different)
    return StepSignal(
        num_groups=len(largest),
        num_idle=len(idle),
        num_solved=sum(bool(judged[group]) and min(judged[group]) >= solved_reward for group in idle),
        num_masked=len(different) - num_levelled,
        num_levelled=num_levelled,
        num_samples=len(samples.group_ids),
        num_truncated=sum(samples.is_truncated),
        rewards=[one for one, counts in zip(samples.rewards, samples.is_judged, strict=True) if counts],
        flat_components=flat_components,
    )


def _different(samples: SignalSamples, is_chosen: Sequence[bool]) -> dict[int, set[float]]:
    """Return for each group the set of its chosen samples' rewards."""
    found: dict[int, set[float]] = {group: set() for group in samples.group_ids}
    for group, reward, counts in zip(samples.group_ids, samples.rewards, is_chosen, strict=True):
        if counts:
            found[group].add(reward)
    return found


class LearningSignal:
    """Follows a run's learning signal step by step, and warns at most once."""

    def __init__(self, *, solved_reward: float) -> None:
        """Start before the first step. A reward of at least ``solved_reward`` solves its prompt."""
        self._solved_reward = solved_reward
        self._latest: deque[StepSignal] = deque()
        self._num_constant_steps: int | None = 0  # None once rewards have varied within a step
        self._first_reward: float | None = None  # mean over the first steps that were judged together
        self._is_resumed = self._has_warned = False

    def resume(self) -> None:
        """Note that the run began in an earlier process, which has given any warning about the run's first
        steps."""
        self._is_resumed, self._num_constant_steps = True, None

    def alarms(self, step: StepSignal) -> Iterator[Alarm]:
        """Yield a warning, once in a run, when the step's rewards show that there is nothing to learn.

        This is so when each of the run's first three steps has one reward for all samples. It is also so when
        nearly all of at least 64 groups are idle: in the first steps, or later if the groups are not solved
        and rewards are no higher than in the first steps.
        """
        self._latest.append(step)
        while len(self._latest) > _NUM_STEPS and self._num_groups - self._latest[0].num_groups >= _NUM_GROUPS:
            self._latest.popleft()
        found = [*self._constant(step), *self._idle()]
        if found and not self._has_warned:
            self._has_warned = True
            yield found[0]

    def _constant(self, step: StepSignal) -> Iterator[Alarm]:
        if len(set(step.rewards)) > 1:
            self._num_constant_steps = None
        if step.rewards and self._num_constant_steps is not None:
            self._num_constant_steps += 1
            for alarm in reward_alarms(self._num_constant_steps, step.rewards[-1]):
                yield replace(alarm, wrong=f"{alarm.wrong}; {self._remedies()}")

    def _idle(self) -> Iterator[Alarm]:
        rewards = self._rewards
        if len(self._latest) < _NUM_STEPS or self._num_groups < _NUM_GROUPS or not rewards:
            return
        mean = sum(rewards) / len(rewards)
        is_first = self._first_reward is None
        if self._first_reward is None:
            self._first_reward = mean
        num_idle = sum(step.num_idle for step in self._latest)
        if not is_first:
            num_idle -= sum(step.num_solved for step in self._latest)
        if num_idle < _IDLE_SHARE * self._num_groups or mean > self._first_reward:
            return
        if is_first and self._is_resumed:
            self._has_warned = True
            return
        yield Alarm(
            tripwire="constant_reward",
            wrong=(
                f"{num_idle / self._num_groups:.1%} of the groups ({num_idle} of {self._num_groups} in the "
                f"latest {len(self._latest)} steps) have {self._why(num_idle)}, and nothing is learned from "
                f"them; {self._remedies()}"
            ),
            look_at="the responses: rollout.dump_period=1 writes them, scripts/show_rollouts.py shows them",
            ends_run=False,
        )

    def _why(self, num_idle: int) -> str:
        """Return what most of the idle groups have, such as "equal rewards"."""
        if 2 * sum(step.num_masked for step in self._latest) > num_idle:
            return "no advantage but 0, since masks leave nothing to compare"
        if 2 * sum(step.num_levelled for step in self._latest) > num_idle:
            return "no advantage but 0, since grpo.reward_scaling or reward_shaping makes their rewards equal"
        return "equal rewards"

    def _remedies(self) -> str:
        """Return what the latest steps show, and for each finding what to change."""
        num_truncated = sum(step.num_truncated for step in self._latest)
        share = num_truncated / sum(step.num_samples for step in self._latest)
        found = []
        if share >= _TRUNCATED_SHARE:
            found.append(f"{share:.0%} of the responses are truncated: raise generation.max_new_tokens")
        else:
            found.append(_of_rewards(self._rewards, self._solved_reward))
        if flat := self._flat_components():
            named = ", ".join(f"{name} (mean {mean:.4g})" for name, mean in flat.items())
            found.append(
                f"components of the reward that differ within nearly no group: {named}: see whether "
                "responses can earn more, and whether the functions notice"
            )
        return "; ".join(found)

    def _flat_components(self) -> dict[str, float]:
        """Return the latest means of the components that were flat in each of the latest steps."""
        *earlier, latest = self._latest
        return {
            name: mean
            for name, mean in latest.flat_components.items()
            if all(name in step.flat_components for step in earlier)
        }

    @property
    def _num_groups(self) -> int:
        return sum(step.num_groups for step in self._latest)

    @property
    def _rewards(self) -> list[float]:
        return [reward for step in self._latest for reward in step.rewards]


def _of_rewards(rewards: Sequence[float], solved_reward: float) -> str:
    mean, share = sum(rewards) / len(rewards), sum(one >= solved_reward for one in rewards) / len(rewards)
    if share >= 1 - _RARE_SHARE:
        remedy = "take harder prompts"
    elif share <= _RARE_SHARE:
        remedy = "see whether the environment recognises right answers, or take easier prompts"
    else:
        remedy = (
            "take prompts that the policy solves sometimes, or more responses to each "
            "(grpo.num_generations_per_prompt)"
        )
    return f"the mean reward is {mean:.4g}, and {share:.0%} of the responses solve their prompts: {remedy}"
