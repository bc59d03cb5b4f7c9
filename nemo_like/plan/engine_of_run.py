"""Specifies the engines of a run. The checks of the installed packages and the run itself read it."""

from __future__ import annotations

from pathlib import Path

from nemo_like.batch.routed_experts import replayed_columns
from nemo_like.configuration import Config
from nemo_like.generation.engine_spec import EngineSpec, Sleeps
from nemo_like.plan.derived import engine_adapter, keeps_weights_asleep, shares_gpus
from nemo_like.rollout.tasks import has_grammars, has_stop_strings


def engine_of_run(cfg: Config) -> EngineSpec:
    """Return the specification of each engine of a run. An engine begins with the policy's checkpoint."""
    policy, grpo = cfg.policy, cfg.grpo
    model_name = str(Path(policy.model_name).absolute())
    return EngineSpec(
        model_name=model_name,
        generation=cfg.generation,
        device=policy.device,
        precision=policy.precision,
        max_total_sequence_length=policy.max_total_sequence_length,
        seed=grpo.seed,
        tokenizer_name=model_name if has_stop_strings(cfg) or has_grammars(cfg) else None,
        structured_outputs=has_grammars(cfg),
        adapter=engine_adapter(cfg),
        routed_experts=next(iter(replayed_columns(policy)), None),
        weight_updates=grpo.weight_updates if grpo.max_staleness > 0 else None,
        sleeps=_sleeps(cfg),
    )


def _sleeps(cfg: Config) -> Sleeps:
    if not shares_gpus(cfg):
        return Sleeps.never
    return Sleeps.keeping_weights if keeps_weights_asleep(cfg) else Sleeps.losing_weights
