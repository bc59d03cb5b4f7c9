"""The keys of the algorithm, ``grpo``, and of the loss, ``loss_fn``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple

from nemo_like.config.keys import Key
from nemo_like.config.kinds import Kinds


class StepShape(NamedTuple):
    """How many prompts a step has, and how many responses to each of them."""

    num_prompts: int
    num_generations: int

    @classmethod
    def read(cls, grpo: Mapping[str, Any]) -> StepShape:
        """Return the shape by the keys of the group grpo, as a file has them."""
        return cls(grpo["num_prompts_per_step"], grpo["num_generations_per_prompt"])

    @property
    def by_key(self) -> dict[str, int]:
        """The shape by the keys of the group grpo."""
        return {
            "num_prompts_per_step": self.num_prompts,
            "num_generations_per_prompt": self.num_generations,
        }

    @property
    def num_samples(self) -> int:
        """N, the samples on which one step trains."""
        return self.num_prompts * self.num_generations


class Overlap(Enum):
    """What a step computes while its last samples are still generated."""

    off = "off"  # nothing: scoring and training begin when all samples are there
    exact = "exact"  # groups that have ended are scored, and their gradients accumulated


class WeightUpdates(Enum):
    """What happens to samples under way when an engine gets new weights; unused with max_staleness=0."""

    between_samples = "between_samples"  # they end first, and no other begins before the weights are there
    in_flight = "in_flight"  # they stop, and go on with the new weights


class KLType(Enum):
    """Estimator of KL(policy || reference) per token, J. Schulman, "Approximating KL divergence"."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class ImportanceSamplingType(Enum):
    """What happens to importance weights outside [min, max]."""

    tis = "tis"  # they are clamped
    icepop = "icepop"  # they are set to 0
    seq_mask = "seq_mask"  # all weights of a sample are set to 0 when their geometric mean is outside


ESTIMATOR_KINDS = Kinds(
    "nemo_like.algorithms.advantage_estimators",
    "estimator",
    "nemo_like.algorithms.estimator_kind:EstimatorKind",
    of_function="nemo_like.algorithms.estimator_kind:own_estimator",
    otherwise_called={
        "ppo": "gae, with a critic: - value: default in the defaults",
        "dapo": "grpo, with grpo.use_dynamic_sampling=true and loss_fn.ratio_clip_max=0.28",
        "dr_grpo": "grpo, with grpo.normalize_rewards=false",
        "reinforce++": "reinforce_plus_plus",
        "remax": "not here, since it decodes greedily beside sampling; rloo has a baseline without that",
    },
)
FILTER_KINDS = Kinds(
    "nemo_like.algorithms.filter_kinds",
    "filter",
    "nemo_like.algorithms.sample_filters:FilterKind",
    of_function="nemo_like.algorithms.sample_filters:own_filter",
)


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    name: Annotated[
        str,
        Key(
            "grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo, gae with "
            "the group value (docs/how_to/ppo.md), or package.module:function.",
            "grpo",
            kinds=ESTIMATOR_KINDS,
        ),
    ]
    arguments: Annotated[
        dict[str, Any], Key("of the function that name chooses; the shipped ones have none", {})
    ]
    reward_weights: Annotated[
        dict[str, float],
        Key("gdpo: weight of each named reward component, for example {correct: 1.0, format: 0.2}", {}),
    ]


@dataclass(kw_only=True, slots=True)
class RewardScalingConfig:
    """A linear map of rewards from [source_min, source_max] to [target_min, target_max]."""

    enabled: Annotated[bool, Key("whether rewards are mapped", False)]
    source_min: Annotated[float, Key("becomes target_min", 0.0)]
    source_max: Annotated[float, Key("becomes target_max; above source_min", 1.0)]
    target_min: Annotated[float, Key("of the rewards that train", 0.0)]
    target_max: Annotated[float, Key("above target_min", 1.0)]
    clamp: Annotated[
        bool, Key("rewards outside the source range are mapped to the nearer end of the target range", True)
    ]


@dataclass(kw_only=True, slots=True)
class RewardShapingConfig:
    """What long and truncated responses lose: DAPO's overlong penalty, then the stop-properly penalty."""

    enabled: Annotated[bool, Key("whether responses lose anything", False)]
    max_response_length: Annotated[
        int | None,
        Key(
            "Tokens of all turns that get the full penalty; null: the most that a sample may "
            "have, max_new_tokens x max_turns of its task, and no more than a conversation "
            "holds.",
            None,
            at_least=1,
        ),
    ]
    overlong_buffer_length: Annotated[
        int | None,
        Key(
            "over so many tokens before max_response_length the penalty grows from 0; null: no penalty", None
        ),
    ]
    overlong_buffer_penalty: Annotated[
        float,
        Key(
            "the full penalty for an overlong response, reward units",
            1.0,
            at_least=0,
            remedy="it is subtracted",
        ),
    ]
    stop_properly_penalty_coef: Annotated[
        float | None,
        Key(
            "a truncated response keeps this share of a reward above 0; null: all",
            None,
            at_least=0,
            at_most=1,
            remedy="it is the share of its reward that a truncated response keeps",
        ),
    ]


@dataclass(kw_only=True, slots=True)
class GRPOConfig:
    """The algorithm: one step samples P prompts x G responses, and trains on all N = P x G of them."""

    num_prompts_per_step: Annotated[int, Key("P", 32, at_least=1)]
    num_generations_per_prompt: Annotated[
        int,
        Key(
            "G, the group whose rewards are compared; at least 2, or 1 with gae or reinforce_plus_plus",
            16,
            at_least=1,
        ),
    ]
    max_num_steps: Annotated[
        int,
        Key(
            "steps of the run; each makes N / policy.train_global_batch_size updates per epoch",
            1000,
            at_least=1,
        ),
    ]
    max_num_epochs: Annotated[
        float | None,
        Key(
            "passes over every source of data.train after which a run ends, where that is before "
            "max_num_steps; null: steps alone (docs/how_to/data.md)",
            None,
            above=0,
        ),
    ]
    num_epochs_per_rollout: Annotated[
        int, Key("how often a step trains on each of its samples", 1, at_least=1)
    ]
    overlap: Annotated[
        Overlap,
        Key(
            "exact: groups that have ended are scored, and their gradients accumulated, while "
            "others are still generated; the update is that of off, where scoring and "
            "training begin when all groups are there (docs/explanation/async.md).",
            Overlap.off,
        ),
    ]
    max_staleness: Annotated[
        int,
        Key(
            "policy versions by which rollouts may be ahead of training; 0: rollouts and training alternate",
            0,
            at_least=0,
        ),
    ]
    weight_updates: Annotated[
        WeightUpdates,
        Key(
            "With max_staleness above 0, what happens to samples under way when new weights "
            "come. between_samples: they end first, and others wait; in_flight: they go on "
            "with the new weights, see generation.kv_cache_after_update.",
            WeightUpdates.between_samples,
        ),
    ]
    seed: Annotated[int, Key("prompts, sampling and initialisation derive from it", 1, at_least=0)]
    adv_estimator: Annotated[
        AdvantageConfig,
        Key(
            "computes one advantage per sample from the rewards; docs/explanation/rewards.md has the formulas"
        ),
    ]
    normalize_rewards: Annotated[
        bool, Key("grpo: divide the advantage by the group's standard deviation", True)
    ]
    advantage_clip_low: Annotated[
        float | None,
        Key(
            "no advantage is below this, e.g. -5; null: not clipped",
            None,
            at_most=0,
            remedy="null does not clip",
        ),
    ]
    advantage_clip_high: Annotated[
        float | None,
        Key(
            "no advantage is above this, e.g. 5; null: not clipped",
            None,
            at_least=0,
            remedy="null does not clip",
        ),
    ]
    mix_groups_in_updates: Annotated[
        bool, Key("an optimizer update takes few samples of many prompts, not all samples of a few", True)
    ]
    samples_kept_together: Annotated[
        int,
        Key(
            "With mixed groups, an update takes this many samples of each of its prompts; see "
            "policy.sequence_packing.share_prompts, which lets them share the prompt.",
            1,
            at_least=1,
        ),
    ]
    use_leave_one_out_baseline: Annotated[
        bool, Key("grpo: the baseline is the mean of the other G - 1 rewards, not of all G", False)
    ]
    reward_scaling: Annotated[
        RewardScalingConfig, Key("comes first: a linear map of one range of rewards to another")
    ]
    reward_shaping: Annotated[
        RewardShapingConfig, Key("comes second: what a long or truncated response loses")
    ]
    use_dynamic_sampling: Annotated[
        bool, Key("comes third: sample other prompts for groups whose raw rewards are all equal", False)
    ]
    dynamic_sampling_component: Annotated[
        str | None,
        Key("compare a group by this part of the reward, by its name in reward/NAME; null: by all", None),
    ]
    dynamic_sampling_max_gen_batches: Annotated[
        int, Key("rollouts that one step may need at most", 10, at_least=1)
    ]
    dynamic_sampling_num_prompts: Annotated[
        int | None,
        Key(
            "Prompts of each such rollout, P or more: with more of them fewer rollouts follow one another; "
            "null: P.",
            None,
            at_least=1,
        ),
    ]
    overlong_filtering: Annotated[bool, Key("comes last: truncated samples do not train", False)]
    sample_filters: Annotated[
        list[str],
        Key(
            "Functions that say which samples train: different_rewards, not_truncated, or "
            "package.module:function. They come before dynamic sampling, which replaces "
            "groups of which they leave nothing to compare.",
            [],
            kinds=FILTER_KINDS,
        ),
    ]
    skip_idle_samples: Annotated[
        bool, Key("leave samples without a gradient (advantage 0, or masked) out of training passes", False)
    ]
    seq_logprob_error_threshold: Annotated[
        float | None,
        Key(
            "e.g. 1.5 masks samples on which engine and trainer disagree that much, as the "
            "mean of exp|generation - prev|",
            None,
            above=1,
            remedy="it bounds a mean of exp|difference|, which is never below 1; null switches it off",
        ),
    ]
    max_token_mult_prob_error: Annotated[
        float | None,
        Key(
            "For example 1.2 ends the run at a step at which engine and trainer disagree that "
            "much; null: a warning only.",
            None,
            above=1,
            remedy="it bounds a mean of exp|difference|, which is never below 1; null never ends a run",
        ),
    ]
    val_period: Annotated[
        int, Key("validate every so many steps; 0: only as val_at_start and val_at_end say", 10, at_least=0)
    ]
    val_start_at: Annotated[
        int, Key("the first step after which val_period validates; earlier periods pass", 0, at_least=0)
    ]
    val_at_start: Annotated[bool, Key("validate before the first step", True)]
    val_at_end: Annotated[bool, Key("validate after the last step", True)]
    max_val_samples: Annotated[int, Key("held-out prompts per validation and source", 256, at_least=1)]
    num_val_generations_per_prompt: Annotated[
        int, Key("responses to each of them; above 1 gives pass@k, mean@k and majority@k", 1, at_least=1)
    ]
    val_solved_reward: Annotated[float, Key("a response with at least this reward solves its prompt", 1.0)]
    val_stop_metric: Annotated[
        str, Key("the run ends when this metric of a validation ...", "validation/accuracy")
    ]
    val_stop_threshold: Annotated[float | None, Key("... is at least this; null: never", None)]

    @property
    def step_shape(self) -> StepShape:
        """The prompts of a step and the responses to each."""
        return StepShape(self.num_prompts_per_step, self.num_generations_per_prompt)

    @property
    def num_samples_per_step(self) -> int:
        """N, the samples on which one step trains."""
        return self.step_shape.num_samples

    @property
    def rollout_shape(self) -> StepShape:
        """The prompts of one rollout and the responses to each."""
        num_prompts = self.dynamic_sampling_num_prompts or self.num_prompts_per_step
        return StepShape(num_prompts, self.num_generations_per_prompt)


LOSS_KINDS = Kinds(
    "nemo_like.algorithms.loss_kinds",
    "loss",
    "nemo_like.algorithms.loss_kind:LossKind",
    of_function="nemo_like.algorithms.loss_kind:own_loss",
    earlier="nemo_like.algorithms.earlier_losses:EARLIER",
    otherwise_called={
        "grpo": "policy_gradient, whose ratio is clipped",
        "ppo": "policy_gradient, whose ratio is clipped, with grpo.adv_estimator.name=gae",
        "vanilla": "policy_gradient, whose ratio is clipped",
        "dapo": "policy_gradient, with loss_fn.ratio_clip_max=0.28 and grpo.use_dynamic_sampling=true",
        "dr_grpo": "policy_gradient, with loss_fn.sequence_length_normalizer, grpo.normalize_rewards=false",
        "dpo": "not here: it learns from pairs of given responses, and a run samples its own",
        "sft": "not here: it learns from given responses, and a run samples its own",
    },
)


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """The loss; docs/explanation/losses.md has the formulas. Each kind has keys of its own beside these,
    which get their defaults after composition: those of policy_gradient, PPO's clipped surrogate, are
    ratio_clip_min, ratio_clip_max and ratio_clip_c.
    """

    kind: Annotated[
        str,
        Key(
            "the loss, with keys of its own (docs/explanation/losses.md); or package.module:function "
            "(docs/how_to/own_loss.md)",
            "policy_gradient",
            kinds=LOSS_KINDS,
        ),
    ]
    arguments: Annotated[dict[str, Any], Key("of a function of your own, by name", {})]
    force_on_policy_ratio: Annotated[
        bool, Key("the ratio is 1, without a log-prob pass; allows one update per rollout only", False)
    ]
    use_generation_logprobs_as_prev: Annotated[
        bool, Key("the ratio uses the engine's log-probs, without a log-prob pass either", False)
    ]
    token_level_loss: Annotated[
        bool, Key("mean over all response tokens; false: over each sample's tokens, then over samples", True)
    ]
    sequence_length_normalizer: Annotated[
        int | None,
        Key(
            "Dr.GRPO: divides a sample's token sum, of all turns; e.g. "
            "${generation.max_new_tokens} where there is one turn.",
            None,
            at_least=1,
        ),
    ]
    entropy_coef: Annotated[
        float | None,
        Key(
            "entropy bonus, e.g. 0.001; 0 only reports the exact entropy, null does not compute it",
            None,
            at_least=0,
        ),
    ]
    entropy_target: Annotated[
        float | None,
        Key(
            "nats; entropy_coef is the beginning of a coefficient that moves by entropy_coef_delta after "
            "every step, up below this entropy, down above it; null: it stays",
            None,
            above=0,
        ),
    ]
    entropy_coef_delta: Annotated[float, Key("of entropy_target", 0.005, above=0)]
    entropy_coef_min: Annotated[float, Key("of entropy_target: the least coefficient", 0.0, at_least=0)]
    entropy_coef_max: Annotated[float, Key("of entropy_target: the greatest", 1.0, at_least=0)]
    use_importance_sampling_correction: Annotated[
        bool,
        Key(
            "Weigh token losses by w = exp(prev - generation log-prob), for the difference "
            "between the engine that sampled and the trainer; GSPO: a sample's loss by the "
            "product of its w.",
            False,
        ),
    ]
    truncated_importance_sampling_type: Annotated[
        ImportanceSamplingType | None,
        Key("tis clamps w, icepop sets it to 0, seq_mask masks whole samples", None),
    ]
    truncated_importance_sampling_ratio: Annotated[
        float | None, Key("upper bound of w, e.g. 2", None, at_least=1)
    ]
    truncated_importance_sampling_ratio_min: Annotated[
        float | None, Key("lower bound of w, e.g. 0.5", None, at_least=0, at_most=1)
    ]
    reference_policy_kl_penalty: Annotated[
        float, Key("beta of the KL term; 0 keeps no reference model", 0.0, at_least=0)
    ]
    reference_policy_kl_type: Annotated[KLType, Key("estimator of the KL: k1, k2 or k3", KLType.k3)]
    use_kl_in_reward: Annotated[
        bool,
        Key(
            "Subtract the KL from the tokens' returns, not add it to the loss; for "
            "reinforce_plus_plus and gae.",
            False,
        ),
    ]
    reference_policy_sync_steps: Annotated[
        int | None,
        Key(
            "Every so many steps the reference moves towards the policy; null: it stays the model that the "
            "run began with.",
            None,
            at_least=1,
        ),
    ]
    reference_policy_sync_weight: Annotated[
        float,
        Key(
            "a: the new reference is a x policy + (1 - a) x reference",
            0.6,
            above=0,
            at_most=1,
            remedy="with 1 the policy takes the reference's place",
        ),
    ]
    use_on_policy_kl_approximation: Annotated[
        bool,
        Key(
            "Weigh each token's KL in the loss by pi / pi_engine, for tokens that another policy sampled.",
            False,
        ),
    ]
    off_policy_mask_threshold: Annotated[
        float | None,
        Key(
            "Tokens with a negative advantage do not train where their sample's mean of log pi_engine - log "
            "pi is above this, e.g. 0.5 nats; null: all train.",
            None,
            above=0,
            remedy="null leaves none out",
        ),
    ]
    top_entropy_quantile: Annotated[
        float,
        Key(
            "This share of a step's tokens, those of highest entropy, has a policy gradient, e.g. 0.2; the "
            "entropies come with the log-prob pass.",
            1.0,
            above=0,
            at_most=1,
        ),
    ]
    positive_example_nll_weight: Annotated[
        float,
        Key(
            "mu of mu x the mean negative log-prob of right answers, those of at least "
            "grpo.val_solved_reward; e.g. 0.1",
            0.0,
            at_least=0,
        ),
    ]
    invalid_tool_call_advantage: Annotated[
        float | None,
        Key(
            "The advantage of all tokens of a response with a tool call that cannot be read, in place of "
            "their own, e.g. -5; null: they keep their own (docs/explanation/rewards.md).",
            None,
            below=0,
            remedy="it punishes; null leaves the tokens their own advantages",
        ),
    ]
    malformed_thinking_advantage: Annotated[
        float | None,
        Key(
            "the same of a response whose thought is malformed; a call that cannot be read comes first",
            None,
            below=0,
            remedy="it punishes; null leaves the tokens their own advantages",
        ),
    ]


@dataclass(kw_only=True, slots=True)
class ClippedLossConfig(LossConfig):
    """The keys of losses whose ratio is clipped."""

    ratio_clip_min: Annotated[
        float, Key("the ratio is clipped below at 1 - ratio_clip_min", 0.2, above=0, below=1)
    ]
    ratio_clip_max: Annotated[
        float,
        Key(
            'the ratio is clipped above at 1 + ratio_clip_max; larger than ratio_clip_min is "clip-higher"',
            0.2,
            above=0,
        ),
    ]


@dataclass(kw_only=True, slots=True)
class SurrogateLossConfig(ClippedLossConfig):
    """The keys of PPO's pessimistic surrogate."""

    ratio_clip_c: Annotated[
        float | None,
        Key(
            "dual clip, e.g. 3: where the advantage A < 0 the loss is at most -A * c",
            None,
            above=1,
            remedy="3 is usual; null switches the dual clip off",
        ),
    ]
