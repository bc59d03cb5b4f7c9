"""Rules on ``speculative_config``: by which methods and settings engines may draft tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.generation.options import GenerationConfig
from nemo_like.generation.speculation import ARGUMENT, KEY, DraftMethod, Speculation, speculation
from nemo_like.models.model_arithmetic import CPU_BLOCK_TOKENS, kv_bytes_per_token, value_bytes
from nemo_like.models.model_info import ModelInfo, read_model_info
from nemo_like.policy.options import Device, PolicyConfig

_METHODS = {
    Device.cpu: (DraftMethod.ngram, DraftMethod.draft_model),
    Device.cuda: (
        *(DraftMethod.ngram_gpu, DraftMethod.draft_model),
        *(DraftMethod.eagle, DraftMethod.eagle3, DraftMethod.mtp),
    ),
}


_BY_BATCH = "has the length of a draft depend on what else is in the batch, so that a seed fixes no sample"


_OTHER_RUNNER = "has vLLM take its first model runner, which nothing here has looked at on GPUs"


# By argument of vLLM, the values that change nothing, and why any other value is refused.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rejection_sample_method": (("standard",), "keeps drafts by another rule than the policy's probability"),
    "synthetic_acceptance_rates": ((None,), "keeps drafts whatever the policy's probability is"),
    "synthetic_acceptance_length": ((None,), "keeps drafts whatever the policy's probability is"),
    "num_speculative_tokens_per_batch_size": ((None,), _BY_BATCH),
    "enable_adaptive_verification": ((False,), _BY_BATCH),
    "parallel_drafting": ((False,), _OTHER_RUNNER),
    "use_heterogeneous_vocab": ((False,), _OTHER_RUNNER),
}


def draft_problems(generation: GenerationConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Yield every problem with the way in which engines of the policy's model are to draft."""
    given = generation.vllm_kwargs.get(ARGUMENT)
    if given is None:
        return
    drafts = speculation(generation)
    if drafts is None:
        yield from _shape(policy.device, given)
        return
    yield from _method(policy.device, drafts)
    for name, (neutral, why) in REFUSED.items():
        if name in given and given[name] not in neutral:
            yield Problem(key=f"{KEY}.{name}={given[name]}", rule=why, remedy="leave it out")
    if policy.device is Device.cpu:
        yield from _on_cpu(generation, given)
    yield from _budget(generation, drafts)


def cache_problems(generation: GenerationConfig, policy: PolicyConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem where engines on CPUs may run out of their KV cache while they draft.

    A sample that is evicted from the cache begins its drafts elsewhere when it comes back. It then draws
    other random numbers, so that its result depends on the samples that evicted it.
    """
    drafts = speculation(generation)
    if drafts is None or policy.device is not Device.cpu:
        return
    cache, num_seqs = generation.vllm_cfg.kv_cache_gib, generation.vllm_cfg.max_num_seqs
    if cache is None:
        return
    models = [model]
    if drafts.model is not None:
        try:
            models.append(read_model_info(drafts.model, None))
        except ConfigError as error:
            yield from error.problems
            return
    kwargs = generation.vllm_kwargs
    token_bytes = sum(kv_bytes_per_token(one, value_bytes(policy.precision)) for one in models)
    block = int(kwargs.get("block_size", CPU_BLOCK_TOKENS))
    blocks = num_seqs * -(-(policy.max_total_sequence_length + drafts.num_slots) // block)
    needed = blocks * block * token_bytes / 2**30
    if (has := kwargs.get("num_gpu_blocks_override")) is not None and has < blocks:
        yield Problem(
            key=f"generation.vllm_kwargs.num_gpu_blocks_override={has}",
            rule=f"must be at least {blocks} with {KEY}: else what a seed gives depends on the other samples",
            remedy="raise it, or leave it out",
        )
    if needed > cache:
        yield Problem(
            key=f"generation.vllm_cfg.kv_cache_gib={cache:g}",
            rule=f"must be at least {needed:.3g} with {KEY}: where {num_seqs} samples of "
            f"{policy.max_total_sequence_length} tokens do not fit, what a seed gives depends on the "
            "other samples",
            remedy="raise it, or lower generation.vllm_cfg.max_num_seqs",
        )


def _shape(device: Device, given: Any) -> Iterator[Problem]:
    methods = [one.value for one in _METHODS[device]]
    example = f"{{method: {methods[0]}, num_speculative_tokens: 3, prompt_lookup_max: 3}}"
    if not isinstance(given, Mapping) or "method" not in given:
        yield Problem(key=f"{KEY}={given}", rule="must name a method", remedy=f"such as {example}")
        return
    method, known = str(given["method"]), [one.value for one in DraftMethod]
    if method not in known:
        close = get_close_matches(method, known, n=1, cutoff=0.6)
        yield Problem(
            key=f"{KEY}.method={method}",
            rule="is none of those whose log-probs and seeds were looked at here: " + ", ".join(methods),
            remedy=f"did you mean {close[0]}?" if close else "use one of them, or leave it out",
        )
        return
    if not isinstance(given.get("model"), str | None):
        yield Problem(key=f"{KEY}.model={given['model']}", rule="must be a checkpoint", remedy="")
    num_tokens = given.get("num_speculative_tokens")
    if type(num_tokens) is not int or num_tokens < 1:
        yield Problem(
            key=f"{KEY}.num_speculative_tokens={num_tokens}",
            rule="must be at least 1",
            remedy=f"such as {example}",
        )


def _method(device: Device, drafts: Speculation) -> Iterator[Problem]:
    """Yield every problem with the drafting method: that the device lacks it, or that its checkpoint is
    missing."""
    method = drafts.method
    if method not in _METHODS[device]:
        names = ", ".join(one.value for one in _METHODS[device])
        yield Problem(
            key=f"{KEY}.method={method.value}",
            rule=f"does not go with policy.device={device.name}, where engines draft by {names}",
            remedy=f"set it to {_METHODS[device][0].value}",
        )
    if method.has_checkpoint and drafts.model is None:
        yield Problem(
            key=f"{KEY}.method={method.value}",
            rule="needs the checkpoint of a draft",
            remedy=f"set {KEY}.model",
        )


def _on_cpu(generation: GenerationConfig, given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each setting with which a seed fixes no sample in vLLM's first model runner."""
    if given.get("draft_sample_method", "greedy") != "greedy":
        yield Problem(
            key=f"{KEY}.draft_sample_method={given['draft_sample_method']}",
            rule="draws drafts without a seed with policy.device=cpu",
            remedy="leave it out: drafts are then the most likely tokens",
        )
    if generation.vllm_kwargs.get("enable_prefix_caching"):
        yield Problem(
            key="generation.vllm_kwargs.enable_prefix_caching=true",
            rule=f"has a seed fix no sample with {KEY} and policy.device=cpu: how a sample begins depends on "
            "whether others have its prompt",
            remedy="leave it out",
        )


def _budget(generation: GenerationConfig, drafts: Speculation) -> Iterator[Problem]:
    batched = generation.vllm_kwargs.get("max_num_batched_tokens")
    num_seqs = generation.vllm_cfg.max_num_seqs
    needed = num_seqs * drafts.num_slots
    if isinstance(batched, int) and batched < needed:
        yield Problem(
            key=f"generation.vllm_kwargs.max_num_batched_tokens={batched}",
            rule=f"must be at least {needed} with {KEY}, {drafts.num_slots} for each of "
            f"generation.vllm_cfg.max_num_seqs={num_seqs}: drafts would be cut as the batch leaves room",
            remedy="raise it, or leave it out",
        )
