"""Predicts step times, idle shares and staleness of a recorded run under other settings, and formats them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nemo_like.algorithms.options import StepShape, WeightUpdates
from nemo_like.cluster.options import Placement
from nemo_like.configuration import Config
from nemo_like.generation.options import KvCacheAfterUpdate
from nemo_like.policy.groups.layout import policy_world_size
from nemo_like_tools.what_if.calibration import RecordedRun, UnfitRun, read_run
from nemo_like_tools.what_if.simulation import Simulation
from nemo_like_tools.what_if.workload import Mode, Pauses, Simulated, Split, StepWork

_STALENESSES = (1, 2, 4)
_MOST_SPLITS = 8
# The number of samples that a simulated run should have, and the least number of steps.
_NUM_SAMPLES, _LEAST_STEPS, _MOST_STEPS = 30_000, 12, 60

ASSUMPTIONS = (
    "Engines and policy workers have devices of their own: none is slower because the other works.",
    "A running sequence gets its tokens at the pace that was fitted to the recorded requests: a time per "
    "token, and a time per token and sequence that runs. Prompts cost a constant time per request.",
    "Environments answer in the recorded times, however many conversations ask at once.",
    "Scoring and training take the recorded seconds, divided among groups by tokens, and are inversely "
    "proportional to the replicas; with exact overlap every part costs the calls once more, and a tenth of "
    "the first update, the optimizer's part, comes after the last group.",
    "Bringing weights takes a constant time, in which the engines stand still. The trainer waits, also while "
    "engines drain between samples. In flight, kv_cache_after_update=recompute takes a request's constant "
    "time more.",
    "A validation takes the recorded time, in which rollouts that are ahead go on. No rollout begins before "
    "a checkpoint of an earlier step; saving takes no time.",
    "Samples have the recorded lengths, whatever the policy learns.",
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulated run with one mode and one split of the devices."""

    mode: Mode
    split: Split
    result: Simulated

    def as_json(self) -> dict[str, Any]:
        mode = {**asdict(self.mode), "weight_updates": self.mode.weight_updates.value, "name": self.mode.name}
        result = {name: value for name, value in asdict(self.result).items() if name != "ends_s"}
        return {"mode": mode, "split": asdict(self.split), **result}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A recorded run, its simulation, and predictions by split and mode, with the configured split first."""

    run: RecordedRun
    as_recorded: Prediction
    configured: Split
    predictions: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction:
        """The prediction with the shortest step; among equal ones the first, which is the least stale."""
        return min(self.predictions, key=lambda one: one.result.step_s)

    def as_json(self) -> dict[str, Any]:
        """Return everything as values for JSON."""
        return {
            "run": str(self.run.path),
            "calibration": {
                "num_steps": len(self.run.works),
                "engine": asdict(self.run.engine),
                "trainer": asdict(self.run.trainer),
                "measured_step_s": self.run.measured_step_s,
                "as_recorded": self.as_recorded.as_json(),
            },
            "assumptions": list(ASSUMPTIONS),
            "predictions": [one.as_json() for one in self.predictions],
            "best": self.best.as_json(),
        }


def what_if(cfg: Config, path: Path) -> WhatIf:
    """Predict the run of ``cfg`` from the records of the run in ``path``. Raises UnfitRun."""
    if cfg.cluster.placement is not Placement.separate:
        raise UnfitRun(
            f"--what-if: with cluster.placement={cfg.cluster.placement.name} engines and policy workers take "
            "turns, so nothing can overlap; set cluster.placement=separate"
        )
    run = read_run(path)
    _check_shape(cfg, run)
    configured = Split(cfg.generation.num_engines, cfg.policy.data_parallel_size)
    recorded = Split(run.num_engines, run.trainer.num_replicas)
    engine = replace(run.engine, max_num_seqs=cfg.generation.vllm_cfg.max_num_seqs)
    recomputes = cfg.generation.kv_cache_after_update is KvCacheAfterUpdate.recompute
    trainer = replace(run.trainer, recompute_s=engine.request_s if recomputes else 0.0)
    num_steps = num_simulated_steps(run.works)
    saved = cfg.checkpointing.save_period if cfg.checkpointing.enabled else 0
    pauses = Pauses(validation_period=cfg.grpo.val_period, checkpoint_period=saved)

    def predicted(mode: Mode, split: Split, paused: Pauses = pauses) -> Prediction:
        simulation = Simulation(run.works, engine, trainer, mode=mode, split=split, pauses=paused)
        return Prediction(mode, split, simulation.run(num_steps))

    return WhatIf(
        run=run,
        as_recorded=predicted(run.mode, recorded, Pauses()),
        configured=configured,
        predictions=tuple(predicted(mode, split) for split in splits(cfg) for mode in modes(cfg)),
    )


def num_simulated_steps(works: Sequence[StepWork]) -> int:
    """Return how many steps to simulate; few small recorded steps are simulated several times over."""
    num_samples = sum(len(group.samples) for work in works for group in work.groups) / len(works)
    return min(_MOST_STEPS, max(_LEAST_STEPS, round(_NUM_SAMPLES / max(1.0, num_samples))))


def modes(cfg: Config) -> list[Mode]:
    """Return the modes to compare, the least stale first."""
    stale = sorted({*_STALENESSES, *([cfg.grpo.max_staleness] if cfg.grpo.max_staleness else [])})
    budgets = sorted({None, cfg.rollout.max_tokens_per_step}, key=lambda budget: budget or 0)
    return [
        Mode(),
        Mode(is_exact_overlap=True),
        *(
            Mode(max_staleness=k, weight_updates=updates, max_tokens_per_step=budget)
            for k in stale
            for updates in WeightUpdates
            for budget in budgets
        ),
    ]


def splits(cfg: Config) -> list[Split]:
    """Return the configured split, then other splits of the same devices; of many, evenly chosen ones."""
    per_engine = cfg.generation.vllm_cfg.num_workers
    replicas = cfg.policy.data_parallel_size
    per_replica = policy_world_size(cfg.policy) // replicas
    configured = Split(cfg.generation.num_engines, replicas)
    num_devices = configured.num_engines * per_engine + replicas * per_replica
    others = [
        Split(num_engines, num_replicas)
        for num_replicas in range(1, num_devices // per_replica + 1)
        for num_engines in [(num_devices - num_replicas * per_replica) // per_engine]
        if num_engines >= 1
        and num_engines * per_engine + num_replicas * per_replica == num_devices
        and cfg.policy.train_global_batch_size % num_replicas == 0
        and Split(num_engines, num_replicas) != configured
    ]
    apart = max(1, -(-len(others) // _MOST_SPLITS))
    return [configured, *others[::apart]]


def format_what_if(found: WhatIf) -> str:
    """Return the predictions as text for a terminal: all of the configured split, the best of each other."""
    synchronous = found.predictions[0].result.step_s
    of_configured = [one for one in found.predictions if one.split == found.configured]
    other_splits = dict.fromkeys(one.split for one in found.predictions if one.split != found.configured)
    best_of_others = [
        min((one for one in found.predictions if one.split == split), key=lambda one: one.result.step_s)
        for split in other_splits
    ]
    error = found.as_recorded.result.step_s / found.run.measured_step_s - 1
    engine = found.run.engine
    lines = [
        f"calibrated by {len(found.run.works)} steps of {found.run.path}: a request takes "
        f"{engine.request_s:.4g} s, a token {engine.token_s:.4g} s, and for each running sequence "
        f"{engine.token_per_sequence_s:.4g} s more",
        f"as recorded ({found.as_recorded.mode.name}), steps took {found.run.measured_step_s:.3f} s; the "
        f"simulation takes {found.as_recorded.result.step_s:.3f} s ({error:+.1%})",
        "",
        _HEADER,
        *(_row(one, synchronous) for one in of_configured),
        *(
            ["", "other splits of as many devices, each with its fastest mode", _HEADER]
            if best_of_others
            else []
        ),
        *(_row(one, synchronous) for one in best_of_others),
        "",
        f"shortest step: {found.best.mode.name} with {found.best.split.num_engines} engines and "
        f"{found.best.split.num_replicas} replicas, {found.best.result.step_s:.3f} s",
        "",
        "assumptions",
        *(f"- {assumption}" for assumption in ASSUMPTIONS),
    ]
    return "\n".join(lines)


_WIDTH = 48
_HEADER = (
    f"{'mode':<{_WIDTH}}{'engines':>8}{'replicas':>9}{'s/step':>9}{'speed-up':>9}{'engines idle':>13}"
    f"{'trainer idle':>13}{'staleness':>16}{'wasted':>8}"
)


def _row(one: Prediction, synchronous_s: float) -> str:
    result = one.result
    staleness = f"{result.mean_staleness:.2f}, max {result.max_staleness}"
    return (
        f"{one.mode.name:<{_WIDTH}}{one.split.num_engines:>8}{one.split.num_replicas:>9}{result.step_s:>9.3f}"
        f"{synchronous_s / result.step_s:>8.2f}x{result.engine_idle_share:>13.0%}"
        f"{result.trainer_idle_share:>13.0%}{staleness:>16}{result.wasted_share:>8.0%}"
    )


def _check_shape(cfg: Config, run: RecordedRun) -> None:
    """Raise UnfitRun unless the recorded steps have as many samples as the configuration asks for."""
    first = run.works[0].rollouts[0]
    asked, found = cfg.grpo.step_shape, StepShape(len(first), len(first[0].samples))
    if asked != found:
        keys = " and ".join(f"grpo.{name}={value}" for name, value in asked.by_key.items())
        raise UnfitRun(
            f"--what-if={run.path}: its steps have {found.num_prompts} prompts of {found.num_generations} "
            f"samples, and {keys} ask for others; use its numbers, or name a run with these"
        )
