"""Rules on speculative decoding: how engines may draft, and what of a run that does not go with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like.environments.options import EnvironmentKind
from nemo_like.generation.speculation import ARGUMENT, KEY, DraftMethod, Speculation, speculation
from nemo_like.models.model_arithmetic import CPU_BLOCK_TOKENS, kv_bytes_per_token, value_bytes
from nemo_like.models.model_info import ModelInfo, has_vision_tower, read_model_info
from nemo_like.policy.options import Device, PolicyBackend
from nemo_like.rollout.tasks import (
    task_environments,
    training_sampling,
    used_environments,
    validation_sampling,
)

_METHODS = {
    Device.cpu: (DraftMethod.ngram, DraftMethod.draft_model),
    Device.cuda: (
        *(DraftMethod.ngram_gpu, DraftMethod.draft_model),
        *(DraftMethod.eagle, DraftMethod.eagle3, DraftMethod.mtp),
    ),
}
_BY_BATCH = "has the length of a draft depend on what else is in the batch, so that a seed fixes no sample"
_OTHER_RUNNER = "has vLLM take its first model runner, which nothing here has looked at on GPUs"
# By name, the values that change nothing, and why others are refused.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rejection_sample_method": (("standard",), "keeps drafts by another rule than the policy's probability"),
    "synthetic_acceptance_rates": ((None,), "keeps drafts whatever the policy's probability is"),
    "synthetic_acceptance_length": ((None,), "keeps drafts whatever the policy's probability is"),
    "num_speculative_tokens_per_batch_size": ((None,), _BY_BATCH),
    "enable_adaptive_verification": ((False,), _BY_BATCH),
    "parallel_drafting": ((False,), _OTHER_RUNNER),
    "use_heterogeneous_vocab": ((False,), _OTHER_RUNNER),
}


def speculation_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem with speculative decoding."""
    given = cfg.generation.vllm_kwargs.get(ARGUMENT)
    if given is None or cfg.rollout.replay is not None:
        return
    drafts = speculation(cfg.generation)
    if drafts is None:
        yield from _shape(cfg, given)
        return
    yield from _method(cfg, drafts)
    for name, (neutral, why) in REFUSED.items():
        if name in given and given[name] not in neutral:
            yield Problem(key=f"{KEY}.{name}={given[name]}", rule=why, remedy="leave it out")
    if cfg.policy.device is Device.cpu:
        yield from _on_cpu(cfg, given)
    yield from _budget(cfg, drafts)
    yield from _features(cfg)


def cache_problems(cfg: Config, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem where engines on CPUs may run out of their KV cache while they draft.

    A sample that loses its place there begins its drafts elsewhere when it comes back, and so draws other
    random numbers than without the others that took its place.
    """
    drafts = speculation(cfg.generation)
    if drafts is None or cfg.policy.device is not Device.cpu or cfg.rollout.replay is not None:
        return
    cache, num_seqs = cfg.generation.vllm_cfg.kv_cache_gib, cfg.generation.vllm_cfg.max_num_seqs
    if cache is None:
        return
    models = [model]
    if drafts.model is not None:
        try:
            models.append(read_model_info(drafts.model, PolicyBackend.fsdp))
        except ConfigError as error:
            yield from error.problems
            return
    kwargs = cfg.generation.vllm_kwargs
    token_bytes = sum(kv_bytes_per_token(one, value_bytes(cfg.policy.precision)) for one in models)
    block = int(kwargs.get("block_size", CPU_BLOCK_TOKENS))
    blocks = num_seqs * -(-(cfg.policy.max_total_sequence_length + drafts.num_slots) // block)
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
            f"{cfg.policy.max_total_sequence_length} tokens do not fit, what a seed gives depends on the "
            "other samples",
            remedy="raise it, or lower generation.vllm_cfg.max_num_seqs",
        )


def _shape(cfg: Config, given: Any) -> Iterator[Problem]:
    methods = [one.value for one in _METHODS[cfg.policy.device]]
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


def _method(cfg: Config, drafts: Speculation) -> Iterator[Problem]:
    """Yield the problems of what drafts, where it is to run."""
    method, device = drafts.method, cfg.policy.device
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


def _on_cpu(cfg: Config, given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what has a seed fix no sample with vLLM's first model runner."""
    if given.get("draft_sample_method", "greedy") != "greedy":
        yield Problem(
            key=f"{KEY}.draft_sample_method={given['draft_sample_method']}",
            rule="draws drafts without a seed with policy.device=cpu",
            remedy="leave it out: drafts are then the most likely tokens",
        )
    if cfg.generation.vllm_kwargs.get("enable_prefix_caching"):
        yield Problem(
            key="generation.vllm_kwargs.enable_prefix_caching=true",
            rule=f"has a seed fix no sample with {KEY} and policy.device=cpu: how a sample begins depends on "
            "whether others have its prompt",
            remedy="leave it out",
        )


def _budget(cfg: Config, drafts: Speculation) -> Iterator[Problem]:
    batched = cfg.generation.vllm_kwargs.get("max_num_batched_tokens")
    num_seqs = cfg.generation.vllm_cfg.max_num_seqs
    needed = num_seqs * drafts.num_slots
    if isinstance(batched, int) and batched < needed:
        yield Problem(
            key=f"generation.vllm_kwargs.max_num_batched_tokens={batched}",
            rule=f"must be at least {needed} with {KEY}, {drafts.num_slots} for each of "
            f"generation.vllm_cfg.max_num_seqs={num_seqs}: drafts would be cut as the batch leaves room",
            remedy="raise it, or leave it out",
        )


def _features(cfg: Config) -> Iterator[Problem]:
    """Yield what of a run speculative decoding does not go with."""
    agents = [name for name, env in used_environments(cfg).items() if env.kind is EnvironmentKind.agent]
    refused = {
        f"env.{', '.join(agents)}.kind=agent": (
            bool(agents),
            "has log-probs corrected for what masked a token, one token at a time",
        ),
        "policy.megatron_cfg.router_replay=true": (
            cfg.policy.megatron_cfg.router_replay,
            "records the experts of every token, and those of a draft may be of tokens that are not kept",
        ),
        f"policy.model_name={cfg.policy.model_name}": (
            has_vision_tower(cfg.policy.model_name),
            "reads images: what keeps their tokens from being sampled is a logits processor, which vLLM's "
            "first model runner refuses beside drafts, and nothing here has looked at its second",
        ),
    }
    for key, (is_there, why) in refused.items():
        if is_there:
            yield Problem(key=key, rule=why, remedy=f"leave {KEY} out")
    told = set()
    for env in task_environments(cfg):
        for sourced in (training_sampling(cfg, env), validation_sampling(cfg, env)):
            key = f"{sourced.keys['min_p']}={sourced.sampling.min_p:g}"
            if sourced.sampling.min_p > 0 and key not in told:
                told.add(key)
                rule = f"is refused by vLLM beside {KEY}, since drafts are kept without it"
                yield Problem(key=key, rule=rule, remedy=f"set it to 0, or leave {KEY} out")
