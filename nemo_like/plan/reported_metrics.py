"""Lists the metrics by which checkpoints and runs may be judged.

docs/reference/metrics.md says what each means. Timings and similar metrics are not listed: they do not say
how good a checkpoint is.
"""

from __future__ import annotations

from nemo_like.configuration import Config
from nemo_like.data.options import source_name
from nemo_like.policy.options import Precision, TrainedGroupConfig
from nemo_like.rollout.tasks import task_environments

_OF_VALIDATION = (
    *("accuracy", "reward", "avg_length", "truncation_rate", "num_samples"),
    *("num_failed_rewards", "failed_reward_share"),
)


_OF_TRAINING = (
    *("reward", "filtered_reward", "shaped_reward"),
    *("reward_std", "baseline_reward/pct_0", "baseline_reward/pct_1"),
    *("baseline_reward/pct_mixed", "baseline_reward/pct_uniform"),
    *("dynamic_sampling_num_gen_batches", "dynamic_sampling_num_uniform", "dynamic_sampling_num_surplus"),
    *("num_filtered", "num_overlong_filtered", "num_masked_seqs_by_logprob_error", "num_skipped_samples"),
    *("loss", "grad_norm", "lr", "weights_moved", "kl_penalty", "entropy", "approx_entropy", "is_oob_ratio"),
    *("off_policy_masked", "entropy_coef"),
    *("probs_ratio", "probs_ratio_min", "probs_ratio_max"),
    *("probs_ratio_clamped", "probs_ratio_clamped_min", "probs_ratio_clamped_max"),
    *("clip_fraction_low", "clip_fraction_high"),
    *("token_mult_prob_error", "mean_seq_mult_prob_error", "max_seq_mult_prob_error"),
    *("gen_kl_error", "policy_kl_error", "js_divergence_error", "sampling_importance_ratio"),
    "routing_disagreement",
    *("advantages/mean", "advantages/max", "advantages/min"),
    *("global_valid_seqs", "global_valid_toks", "policy_version", "staleness", "max_staleness"),
    "num_continued_samples",
    *("mean_prompt_length", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample", "total_num_tokens"),
    *("avg_turns_per_sample", "truncation_rate", "turn_limit_rate", "natural_termination_rate"),
    *("num_failed_rewards", "failed_reward_share"),
    *("moe/max_load", "moe/load_entropy", "moe/idle_experts", "moe/top_expert_weight"),
)


_OF_CRITIC = (
    *("loss", "grad_norm", "lr", "num_skipped_samples"),
    *("mean", "error", "clip_fraction", "returns", "explained_variance"),
)


_OF_FLOAT16 = ("loss_scale", "skipped_updates", "skipped_in_a_row")


_ENVIRONMENT = "train/env/"


def validation_metrics(cfg: Config) -> list[str]:
    """Return the metrics of a validation: over all its data sources and, with several, of each source."""
    size = cfg.grpo.num_val_generations_per_prompt
    names = [*_OF_VALIDATION]
    if size > 1:
        powers = [1 << exponent for exponent in range(size.bit_length()) if 1 << exponent < size]
        names += [f"pass@{k}" for k in (*powers, size)] + [f"mean@{size}", f"majority@{size}"]
    sets = [source_name(source) for source in cfg.data.validation]
    own = [f"{each}/{name}" for each in sets for name in names] if len(sets) > 1 else []
    return [f"validation/{name}" for name in (*names, *own)]


def training_metrics(cfg: Config) -> list[str]:
    """Return the metrics that a training step may report.

    An entry ``train/env/NAME/`` stands for all metrics that the environment NAME reports.
    """
    of_policy = [*_OF_TRAINING, *_of_precision(cfg.policy)]
    of_critic = [] if cfg.value is None else [*_OF_CRITIC, *_of_precision(cfg.value)]
    return [
        *(f"train/{name}" for name in of_policy),
        *(f"train/value/{name}" for name in of_critic),
        *(f"{_ENVIRONMENT}{name}/" for name in task_environments(cfg)),
    ]


def _of_precision(group: TrainedGroupConfig) -> tuple[str, ...]:
    return _OF_FLOAT16 if group.precision is Precision.float16 else ()
