"""Losses that do not combine are refused before anything starts, with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import SCORED

Demo = Callable[..., Config]

AS_PREV = "loss_fn.use_generation_logprobs_as_prev=true"
ONE_UPDATE = "policy.train_global_batch_size=1024"
KL_IN_REWARD = (
    "loss_fn.use_kl_in_reward=true",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "grpo.adv_estimator.name=reinforce_plus_plus",
)
BOUNDS = (
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    "loss_fn.truncated_importance_sampling_ratio_min=0.5",
)

BY_SAMPLE = "loss_fn.token_level_loss=false"
GSPO = ("loss_fn.kind=gspo", BY_SAMPLE)

DISTILLATION = ("loss_fn.kind=distillation", "teacher=default", "teacher.model_name=${policy.model_name}")
EXACT = ("grpo.overlap=exact", "grpo.samples_kept_together=1")
FORWARD = (*DISTILLATION, "loss_fn.divergence=forward")


def problems(cfg: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    "arguments",
    [
        ("loss_fn.kind=cispo",),
        ("loss_fn.kind=reinforce", "loss_fn.entropy_coef=0.01"),
        GSPO,
        (BY_SAMPLE, "loss_fn.sequence_length_normalizer=4"),
        ("loss_fn.force_on_policy_ratio=true", ONE_UPDATE),
        (AS_PREV,),
        ("loss_fn.use_importance_sampling_correction=true",),
        KL_IN_REWARD,
        (*BOUNDS[:2], "loss_fn.truncated_importance_sampling_type=tis"),
        (*BOUNDS, "loss_fn.truncated_importance_sampling_type=icepop"),
        (*BOUNDS, "loss_fn.truncated_importance_sampling_type=seq_mask"),
        (*BOUNDS, *GSPO, "loss_fn.truncated_importance_sampling_type=tis"),
        (*BOUNDS, *GSPO, "loss_fn.truncated_importance_sampling_type=icepop"),
        (*BOUNDS[:1], *GSPO),
        ("loss_fn.kind=sapo", BY_SAMPLE),
        ("loss_fn.kind=sapo", "loss_fn.tau_neg=1.5"),
        ("loss_fn.kind=gspo_token", BY_SAMPLE),
        ("loss_fn.use_on_policy_kl_approximation=true", "loss_fn.reference_policy_kl_penalty=0.01"),
        ("loss_fn.off_policy_mask_threshold=0.5",),
        ("loss_fn.top_entropy_quantile=0.2",),
        ("loss_fn.entropy_target=0.3", "loss_fn.entropy_coef=0"),
        ("loss_fn.positive_example_nll_weight=0.1",),
        DISTILLATION,
        (*DISTILLATION, "loss_fn.weight=0.5", "loss_fn.reward_weight=1"),
        (*DISTILLATION, "loss_fn.divergence=jensen_shannon", "loss_fn.beta=0.1", "loss_fn.top_k=64"),
        (*FORWARD, "loss_fn.reward_weight=1", "loss_fn.policy_loss=gspo", BY_SAMPLE),
        (*DISTILLATION, "loss_fn.policy_loss=cispo", "loss_fn.ratio_clip_max=0.3"),
        ("loss_fn.kind=my_losses:own", "loss_fn.ratio_clip_c=3", "++loss_fn.arguments={tau: 2}"),
    ],
)
def test_every_loss_can_be_asked_for(demo: Demo, arguments: tuple[str, ...]) -> None:
    validate(demo(SCORED, *arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("loss_fn.kind=sapo", "loss_fn.tau_pos=0"),
            "loss_fn.tau_pos=0.0 must be above 0; 1.0 for tau_pos and 1.05 for tau_neg are usual",
        ),
        (("loss_fn.kind=sapo", "loss_fn.tau_neg=-1"), "loss_fn.tau_neg=-1.0 must be above 0"),
        (
            (*DISTILLATION, "loss_fn.divergence=kl"),
            "loss_fn.divergence=kl must be one of reverse, reverse_topk, forward, jensen_shannon",
        ),
        ((*DISTILLATION, "loss_fn.top_k=8"), "loss_fn.top_k=8 has no effect with divergence=reverse"),
        ((*FORWARD, "loss_fn.beta=0.3"), "loss_fn.beta=0.3 has no effect with divergence=forward"),
        (
            (*DISTILLATION, "loss_fn.divergence=jensen_shannon", "loss_fn.beta=1"),
            "loss_fn.beta=1.0 must be above 0 and below 1",
        ),
        (
            ("loss_fn.use_on_policy_kl_approximation=true",),
            "loss_fn.use_on_policy_kl_approximation=true weighs a KL in the loss, and there is none: "
            "reference_policy_kl_penalty=0, use_kl_in_reward=false",
        ),
        (
            (*KL_IN_REWARD, "loss_fn.use_on_policy_kl_approximation=true"),
            "loss_fn.use_on_policy_kl_approximation=true weighs a KL in the loss, and there is none: "
            "reference_policy_kl_penalty=0.01, use_kl_in_reward=true",
        ),
        (
            (*DISTILLATION, "loss_fn.off_policy_mask_threshold=0.5"),
            "loss_fn.off_policy_mask_threshold=0.5 leaves out a part of a policy gradient",
        ),
        (("loss_fn.off_policy_mask_threshold=0",), "loss_fn.off_policy_mask_threshold=0.0 must be above 0"),
        (
            (*DISTILLATION, "loss_fn.top_entropy_quantile=0.2"),
            "loss_fn.top_entropy_quantile=0.2 leaves out a part of a policy gradient",
        ),
        (("loss_fn.top_entropy_quantile=0",), "loss_fn.top_entropy_quantile=0.0 must be above 0"),
        (
            (AS_PREV, "loss_fn.top_entropy_quantile=0.2"),
            "reads entropies, which come with prev_logprobs, which use_generation_logprobs_as_prev=true",
        ),
        (
            (*EXACT, "loss_fn.top_entropy_quantile=0.2"),
            "loss_fn.top_entropy_quantile=0.2 needs all samples of an update, and grpo.overlap=exact",
        ),
        (
            ("loss_fn.reference_policy_sync_steps=4",),
            "reference_policy_sync_steps=4 has no effect with reference_policy_kl_penalty=0",
        ),
        (
            (
                *("loss_fn.reference_policy_sync_steps=4", "loss_fn.reference_policy_kl_penalty=0.1"),
                "policy.lora.enabled=true",
            ),
            "with policy.lora.enabled=true it is the model without adapters",
        ),
        (
            ("loss_fn.entropy_target=0.3",),
            "loss_fn.entropy_target=0.3 moves loss_fn.entropy_coef, which is null",
        ),
        (
            ("loss_fn.entropy_target=0.3", "loss_fn.entropy_coef=0", "loss_fn.entropy_coef_min=2"),
            "loss_fn.entropy_coef_min=2 must be at most entropy_coef_max=1",
        ),
        (
            (*EXACT, "loss_fn.positive_example_nll_weight=0.1"),
            "loss_fn.positive_example_nll_weight=0.1 needs all samples of an update",
        ),
        (
            ("loss_fn.positive_example_nll_weight=-1",),
            "loss_fn.positive_example_nll_weight=-1.0 must be at least 0",
        ),
        ((*FORWARD, "loss_fn.top_k=0"), "loss_fn.top_k=0 must be at least 1"),
        ((*DISTILLATION, "loss_fn.weight=0"), "loss_fn.weight=0.0 must be above 0"),
        ((*DISTILLATION, "loss_fn.reward_weight=-1"), "loss_fn.reward_weight=-1.0 must be at least 0"),
        (
            (*DISTILLATION, "loss_fn.policy_loss=gspo", BY_SAMPLE),
            "loss_fn.policy_loss=gspo spreads the gradient evenly over a sample",
        ),
        (
            (*DISTILLATION, "loss_fn.policy_loss=gspo_token"),
            "loss_fn.policy_loss=gspo_token needs token_level_loss=false",
        ),
        (
            (*DISTILLATION, "loss_fn.policy_loss=sapo"),
            "loss_fn.policy_loss=sapo must be one of cispo, gspo, gspo_token, policy_gradient, reinforce",
        ),
        (
            (*DISTILLATION, "loss_fn.policy_loss=cispo", "loss_fn.ratio_clip_c=3.0"),
            "loss_fn.ratio_clip_c=3 bounds a loss that loss_fn.policy_loss=cispo replaces",
        ),
        (
            (*FORWARD, "loss_fn.policy_loss=reinforce"),
            "loss_fn.policy_loss=reinforce has no effect with divergence=forward and reward_weight=0",
        ),
        (
            (*FORWARD, "loss_fn.use_importance_sampling_correction=true"),
            "loss_fn.use_importance_sampling_correction=true has no effect with divergence=forward",
        ),
        (
            (*FORWARD, "loss_fn.ratio_clip_c=3.0"),
            "loss_fn.ratio_clip_c=3.0 has no effect with divergence=forward and reward_weight=0",
        ),
        (
            ("loss_fn.kind=cispo", "++loss_fn.arguments.clip=0.3"),
            "loss_fn.arguments={'clip': 0.3} are those of a function of your own, and loss_fn.kind=cispo has",
        ),
        (("loss_fn.kind=gspo_token",), "loss_fn.kind=gspo_token needs token_level_loss=false"),
        (("loss_fn.kind=gspo",), "loss_fn.kind=gspo needs token_level_loss=false"),
        (
            ("loss_fn.kind=my_losses:own", "loss_fn.sequence_level_importance_ratios=true"),
            "loss_fn.sequence_level_importance_ratios=true needs token_level_loss=false",
        ),
        (
            ("loss_fn.sequence_length_normalizer=4",),
            "which token_level_loss=true never forms",
        ),
        (
            ("loss_fn.force_on_policy_ratio=true",),
            "policy.train_global_batch_size=128, a rollout has 1024 samples",
        ),
        (
            ("loss_fn.force_on_policy_ratio=true", ONE_UPDATE, "grpo.num_epochs_per_rollout=2"),
            "grpo.num_epochs_per_rollout=2 repeats it",
        ),
        (
            ("loss_fn.force_on_policy_ratio=true", ONE_UPDATE, "grpo.seq_logprob_error_threshold=2.0"),
            "masks samples by prev_logprobs",
        ),
        (
            (*BOUNDS[:2], "loss_fn.truncated_importance_sampling_type=icepop"),
            "truncated_importance_sampling_type=icepop needs a lower bound",
        ),
        (
            (*BOUNDS[:1], "loss_fn.truncated_importance_sampling_type=tis"),
            "truncated_importance_sampling_type=tis needs an upper bound",
        ),
        (
            (*BOUNDS, *GSPO, "loss_fn.truncated_importance_sampling_type=seq_mask"),
            "truncated_importance_sampling_type=seq_mask excludes loss_fn.kind=gspo: ",
        ),
        (
            BOUNDS[:2],
            "truncated_importance_sampling_ratio=2 has no effect",
        ),
        (
            ("loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.01"),
            "needs an estimator that whitens over tokens, not grpo.adv_estimator.name=grpo",
        ),
        (
            (*KL_IN_REWARD, "grpo.advantage_clip_high=5"),
            "grpo.advantage_clip_high=5 clips a sample's advantage, and with loss_fn.use_kl_in_reward=true",
        ),
        (
            (*KL_IN_REWARD, "loss_fn.reference_policy_kl_penalty=0"),
            "has no effect with reference_policy_kl_penalty=0",
        ),
        (
            (*KL_IN_REWARD, "loss_fn.force_on_policy_ratio=true", ONE_UPDATE),
            "needs prev_logprobs, which force_on_policy_ratio=true does not compute",
        ),
        (
            (*KL_IN_REWARD, AS_PREV),
            "needs prev_logprobs, which use_generation_logprobs_as_prev=true does not compute",
        ),
        (
            (AS_PREV, "grpo.seq_logprob_error_threshold=2.0"),
            "masks samples by prev_logprobs, which use_generation_logprobs_as_prev=true does not compute",
        ),
        (
            (AS_PREV, "loss_fn.force_on_policy_ratio=true", ONE_UPDATE),
            "use_generation_logprobs_as_prev=true excludes loss_fn.force_on_policy_ratio=true",
        ),
        (
            (AS_PREV, "loss_fn.use_importance_sampling_correction=true"),
            "leaves use_importance_sampling_correction nothing to correct",
        ),
        (
            (*BOUNDS[1:], "loss_fn.truncated_importance_sampling_type=tis"),
            "has no effect with use_importance_sampling_correction=false",
        ),
    ],
)
def test_a_combination_that_would_train_something_else_is_refused(
    demo: Demo, arguments: tuple[str, ...], said: str
) -> None:
    assert said in "\n".join(problems(demo(SCORED, *arguments)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("loss_fn.use_cispo=true", "loss_fn.disable_ppo_ratio=true"),
            "loss_fn.use_cispo=True is no key of loss_fn.kind=reinforce",
        ),
        (
            ("loss_fn.kind=sappo",),
            "loss_fn.kind='sappo' must be one of cispo, distillation, gspo, gspo_token, policy_gradient, "
            "reinforce, sapo, or your own loss, package.module:function; did you mean sapo?",
        ),
        (
            ("loss_fn.kind=sapo", "loss_fn.use_cispo=true"),
            "loss_fn.use_cispo=True is no key of loss_fn.kind=sapo",
        ),
        (
            ("loss_fn.kind=gspo_token", "loss_fn.disable_ppo_ratio=true"),
            "loss_fn.disable_ppo_ratio=True is no key of loss_fn.kind=gspo_token",
        ),
        (
            ("loss_fn.kind=sapo", "loss_fn.ratio_clip_min=0.1"),
            "loss_fn.ratio_clip_min=0.1 is no key of loss_fn.kind=sapo; leave it out; it belongs to cispo, ",
        ),
        (
            ("loss_fn.kind=sapo", "loss_fn.ratio_clip_c=3.0"),
            "loss_fn.ratio_clip_c=3.0 is no key of loss_fn.kind=sapo",
        ),
        (
            ("loss_fn.kind=cispo", "loss_fn.ratio_clip_c=3"),
            "loss_fn.ratio_clip_c=3 is no key of loss_fn.kind=cispo; leave it out; it belongs to distil",
        ),
        (
            ("loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3.0"),
            "loss_fn.ratio_clip_c=3.0 is no key of loss_fn.kind=cispo",
        ),
        (
            ("loss_fn.kind=reinforce", "loss_fn.ratio_clip_max=0.3"),
            "loss_fn.ratio_clip_max=0.3 is no key of loss_fn.kind=reinforce",
        ),
        (
            ("loss_fn.tau_pos=2",),
            "loss_fn.tau_pos=2 is no key of loss_fn.kind=policy_gradient; leave it out; it belongs to sapo",
        ),
        (
            ("loss_fn.kind=my_losses:own", "loss_fn.tau_pos=2"),
            "loss_fn.tau_pos=2 is no key of loss_fn.kind=my_losses:own",
        ),
    ],
)
def test_a_key_of_another_kind_is_refused(demo: Demo, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        demo(SCORED, *arguments)
    assert said in str(caught.value)


def test_the_learning_rate_schedule_counts_the_updates_of_every_epoch(demo: Demo) -> None:
    [problem] = problems(demo("grpo.num_epochs_per_rollout=2"))
    assert "reaches a learning rate of 0 before the last of 1280 updates" in problem
    validate(demo("grpo.num_epochs_per_rollout=2", "policy.scheduler.decay_updates=1280"))


FP8 = ("generation.vllm_cfg.quantization=fp8", "policy.device=cuda", "policy.precision=bfloat16")


def about_fp8(cfg: Config) -> list[str]:
    """What is said of it; this machine has no GPU."""
    return [problem for problem in problems(cfg) if problem.startswith("generation.vllm_cfg.quantization")]


def test_engines_that_round_weights_need_a_correction_of_the_mismatch(demo: Demo) -> None:
    uncorrected = (SCORED, "loss_fn.use_importance_sampling_correction=false")
    (problem,) = about_fp8(demo(*FP8, *uncorrected))
    assert "nothing in the loss corrects that" in problem
    assert "use_importance_sampling_correction=true" in problem
    for corrected in ((SCORED, "loss_fn.use_importance_sampling_correction=true"), (AS_PREV,)):
        assert about_fp8(demo(*FP8, *corrected)) == []
    assert about_fp8(demo(*FP8, *uncorrected, "rollout.generate_only=true")) == []


@pytest.mark.parametrize("other", ["policy.device=cpu", "policy.precision=float32"])
def test_engines_round_weights_on_gpus_in_half_precision_only(demo: Demo, other: str) -> None:
    (problem,) = about_fp8(demo(*FP8, other, AS_PREV))
    assert "needs policy.device=cuda and policy.precision=bfloat16" in problem
