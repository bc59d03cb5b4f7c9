"""Checks recording and replaying of rollouts, and runs that only generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_like.batch.recordings import ROUTED_EXPERTS, RecordingManifest, read_manifest, recorded_steps
from nemo_like.config.problems import Problem
from nemo_like.configuration import Config


def rollout_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every reason why rollouts could not be recorded or replayed as configured."""
    rollout = cfg.rollout
    if rollout.dump_period < 0:
        yield Problem(key=f"rollout.dump_period={rollout.dump_period}", rule="must be at least 0", remedy="")
    if rollout.replay is None:
        return
    key = f"rollout.replay={rollout.replay}"
    for name, value in (
        ("rollout.generate_only", rollout.generate_only),
        ("rollout.record", rollout.record),
        ("rollout.dump_period", rollout.dump_period),
        ("rollout.dump_validation", rollout.dump_validation),
        ("rollout.keep_messages", rollout.keep_messages),
    ):
        if value:
            yield Problem(
                key=f"{name}={str(value).lower()}",
                rule=f"cannot be together with {key}, where nothing is generated",
                remedy="the recorded run has it already",
            )
    yield from _no_validation(cfg, key)
    yield from _recording(cfg, key)


def _no_validation(cfg: Config, key: str) -> Iterator[Problem]:
    off = {"val_period": 0, "val_at_start": False, "val_at_end": False}
    on = [f"grpo.{name}" for name, value in off.items() if getattr(cfg.grpo, name) != value]
    if on:
        remedy = " ".join(f"grpo.{name}={str(value).lower()}" for name, value in off.items())
        yield Problem(
            key=key,
            rule=f"has no engines to validate with, but {', '.join(on)} asks for it",
            remedy=f"set {remedy}",
        )


def _recording(cfg: Config, key: str) -> Iterator[Problem]:
    directory = Path(str(cfg.rollout.replay))
    try:
        manifest = read_manifest(directory)
    except ValueError as error:
        yield Problem(
            key=key,
            rule=f"must be a recording: {error}",
            remedy="give RUN_DIR/recorded of a run with rollout.record=true",
        )
        return
    asked_by_key = cfg.grpo.step_shape.by_key
    for name, recorded in manifest.step_shape.by_key.items():
        if recorded != (asked := asked_by_key[name]):
            yield Problem(
                key=f"grpo.{name}={asked}",
                rule=f"must be {recorded}, as in the recording {cfg.rollout.replay}",
                remedy="",
            )
    yield from _routed_experts(cfg, manifest)
    if (epochs := cfg.grpo.max_num_epochs) is not None:
        rule = "counts passes over data.train, and a replay reads its recording"
        yield Problem(key=f"grpo.max_num_epochs={epochs:g}", rule=rule, remedy="set it to null")
    missing = sorted(set(range(1, cfg.grpo.max_num_steps + 1)) - recorded_steps(directory))
    if missing:
        yield Problem(
            key=f"grpo.max_num_steps={cfg.grpo.max_num_steps}",
            rule=f"needs step {missing[0]}, which the recording {cfg.rollout.replay} lacks",
            remedy=f"try {missing[0] - 1}" if missing[0] > 1 else "",
        )


def _routed_experts(cfg: Config, manifest: RecordingManifest) -> Iterator[Problem]:
    """Yield a problem when routers should replay experts that the recording does not have."""
    recorded = {column["name"] for column in manifest.columns or ()}
    if cfg.policy.megatron_cfg.router_replay and ROUTED_EXPERTS not in recorded:
        yield Problem(
            key="policy.megatron_cfg.router_replay=true",
            rule=f"needs the column {ROUTED_EXPERTS!r}, which the recording {cfg.rollout.replay} lacks",
            remedy="set it to false, or record with it",
        )
