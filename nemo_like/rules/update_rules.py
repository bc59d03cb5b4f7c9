"""Checks what the loss requires of sampling and of the size of an update."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.policy.options import Device, Precision
from nemo_like.rollout.tasks import response_limit, task_with_limit_of_a_turn

# vLLM's names of KV caches that round no more than the model.
_FULL_CACHES = ("auto", "float16", "bfloat16", "float32")


def update_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem of the loss with how samples are drawn, and with how many train in one update."""
    yield from _normaliser(cfg)
    yield from _quantized_engines(cfg)
    if cfg.loss_fn.reference_policy_sync_steps is not None and cfg.policy.lora.enabled:
        yield Problem(
            key=f"loss_fn.reference_policy_sync_steps={cfg.loss_fn.reference_policy_sync_steps}",
            rule="needs a reference with weights of its own, and with policy.lora.enabled=true it is the "
            "model without adapters",
            remedy="set it to null",
        )
    if cfg.loss_fn.force_on_policy_ratio:
        yield from _on_policy(cfg)


def _normaliser(cfg: Config) -> Iterator[Problem]:
    """Yield a problem when Dr.GRPO's constant is the limit of one turn, but samples have several turns."""
    normaliser = cfg.loss_fn.sequence_length_normalizer
    if normaliser is None or (task := task_with_limit_of_a_turn(cfg, normaliser)) is None:
        return
    limit = response_limit(cfg, task)
    yield Problem(
        key=f"loss_fn.sequence_length_normalizer={normaliser}",
        rule=f"is max_new_tokens, the limit of one turn, and divides the sum over all turns: samples of "
        f"env.{task} may have {limit} tokens",
        remedy=f"set it to {limit}, which keeps the loss as large as with one turn",
    )


def _on_policy(cfg: Config) -> Iterator[Problem]:
    """Yield a problem unless a step has one update: later updates have ratios other than 1."""
    key = "loss_fn.force_on_policy_ratio=true"
    num_samples = cfg.grpo.num_samples_per_step
    batch = cfg.policy.train_global_batch_size
    if num_samples != batch:
        yield Problem(
            key=key,
            rule=(
                "needs one update per rollout, because from the second on the weights are not those that "
                f"sampled: policy.train_global_batch_size={batch}, a rollout has {num_samples} samples"
            ),
            remedy=f"set policy.train_global_batch_size={num_samples}",
        )
    if cfg.grpo.num_epochs_per_rollout > 1:
        yield Problem(
            key=key,
            rule=(
                "needs one update per rollout, but "
                f"grpo.num_epochs_per_rollout={cfg.grpo.num_epochs_per_rollout} repeats it"
            ),
            remedy="set grpo.num_epochs_per_rollout=1",
        )


def _quantized_engines(cfg: Config) -> Iterator[Problem]:
    """Yield the problems of engines that sample with coarser weights, keys or values than training has."""
    quantization, loss = cfg.generation.vllm_cfg.quantization, cfg.loss_fn
    cache = cfg.generation.vllm_kwargs.get("kv_cache_dtype", "auto")
    if cfg.rollout.replay is not None or (quantization is None and cache in _FULL_CACHES):
        return
    key = f"generation.vllm_kwargs.kv_cache_dtype={cache}"
    if quantization is not None:
        key = f"generation.vllm_cfg.quantization={quantization.value}"
        if cfg.policy.device is not Device.cuda or cfg.policy.precision is not Precision.bfloat16:
            yield Problem(
                key=key,
                rule="needs policy.device=cuda and policy.precision=bfloat16, for its kernels",
                remedy="set it to null",
            )
    is_corrected = loss.use_importance_sampling_correction or loss.use_generation_logprobs_as_prev
    if not is_corrected and not cfg.rollout.generate_only:
        yield Problem(
            key=key,
            rule="samples from another policy than trains, and nothing in the loss corrects that",
            remedy="set loss_fn.use_importance_sampling_correction=true, best with "
            "truncated_importance_sampling_type=tis, or leave the key out",
        )
