"""What is done to a run, and when: drawn from a seed, so that a campaign can be repeated and continued."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from tests.chaos.victims import Role

VARIANTS = ("demo", "fsdp", "tensor_parallel", "turns", "mooncake")
NUM_STEPS = 16  # grpo.max_num_steps of variants/small.yaml

# How often each is hit; what a variant lacks is replaced by any process of the run.
_WEIGHTS = {
    Role.driver: 3.0,
    Role.terminal: 1.0,
    Role.engine: 3.0,
    Role.engine_child: 1.5,
    Role.policy_worker: 3.0,
    Role.rollout: 3.0,
    Role.environment: 3.0,
    Role.environment_child: 2.0,
    Role.data_plane: 2.0,
    Role.data_plane_child: 1.0,
    Role.controller: 2.0,
    Role.storage_unit: 2.0,
    Role.gcs: 0.5,
    Role.raylet: 0.5,
    Role.agent: 1.0,
    Role.helper: 0.5,
}
# Whoever gets these of a driver expects it to end.
_DRIVER_SIGNALS = ("SIGKILL", "SIGKILL", "SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
_TERMINAL_SIGNALS = ("SIGINT", "SIGQUIT", "SIGHUP")
_OTHER_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGABRT", "SIGSEGV")


class Phase(Enum):
    """What a moment is counted from."""

    start = "start"  # of the command
    step = "step"  # the line that reports this step or a later one
    end = "end"  # the line that reports the last step
    disturbance = "disturbance"  # the one before


@dataclass(frozen=True, slots=True)
class Moment:
    """``share`` of what the phase lasts in the undisturbed run; of a disturbance's consequences, of 12 s."""

    phase: Phase
    share: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class Blow:
    """``pick`` in [0, 1) chooses among the processes of the role; a paused process goes on after so long."""

    role: Role
    pick: float
    signal: str
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One process that is hit, or two at once."""

    moment: Moment
    blows: tuple[Blow, ...]

    @property
    def ends_driver(self) -> bool:
        return any(
            blow.role in (Role.driver, Role.terminal) and blow.signal != "SIGSTOP" for blow in self.blows
        )


def draw_plan(seed: int, run: int, *, num_disturbances: int) -> tuple[Disturbance, ...]:
    """The disturbances of one run, in the order in which they happen."""
    dice = random.Random(f"{seed}/{run}")
    steps = iter(sorted(dice.choices(range(1, NUM_STEPS - 1), k=num_disturbances)))
    plan: list[Disturbance] = []
    for number in range(num_disturbances):
        step = next(steps)
        is_after_driver = bool(plan) and plan[-1].ends_driver
        if dice.random() < (0.25 if not plan else 0.4 if is_after_driver else 0.0):
            moment = Moment(Phase.start, dice.random())
        elif plan and dice.random() < 0.15:
            moment = Moment(Phase.disturbance, dice.random())
        elif number == num_disturbances - 1 and dice.random() < 0.25:
            moment = Moment(Phase.end, dice.random())
        else:
            moment = Moment(Phase.step, dice.random(), step)
        num_blows = 2 if dice.random() < 0.15 else 1
        plan.append(Disturbance(moment, tuple(_draw_blow(dice) for _ in range(num_blows))))
    return tuple(plan)


def _draw_blow(dice: random.Random) -> Blow:
    [role] = dice.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))
    pick, kind = dice.random(), dice.random()
    if role is Role.terminal:
        return Blow(role, pick, dice.choice(_TERMINAL_SIGNALS))
    if kind < 0.15:
        # Shorter than any deadline, or longer than most.
        pause_s = dice.uniform(0.2, 5.0) if dice.random() < 0.7 else dice.uniform(15.0, 30.0)
        return Blow(role, pick, "SIGSTOP", pause_s)
    if role is Role.driver:  # nobody else would notice that it stands still
        return Blow(role, pick, dice.choice(_DRIVER_SIGNALS))
    if kind < 0.25:
        return Blow(role, pick, "SIGSTOP")
    return Blow(role, pick, "SIGKILL" if kind < 0.7 else dice.choice(_OTHER_SIGNALS))
