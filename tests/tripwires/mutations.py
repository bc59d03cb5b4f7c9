"""Bugs that other frameworks of this field had, each as a small change of this one, in the order of a step.

Every mutation names the fix, pull request or issue of another project in which its bug was found. It replaces
one function of ``nemo_like``, and mostly changes what is trained without any error. ``planting`` plants one
of them in every process of a run. All are in this one file, so that whoever adds a bug sees whether it is
here already.

Importing this module loads nothing beyond the standard library: every process of a planted run does that at
its start. A plant imports what it needs when it is called, after the module of its target was loaded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Group(Enum):
    """The part of the framework in which a bug lies."""

    weight_sync = "weight sync"
    sampling = "sampling"
    rollout = "rollout and rewards"
    batching = "batching and data plane"
    advantages = "advantages"
    loss = "loss"
    optimizer = "optimizer and checkpoints"
    gradients = "gradients and updates"
    stored = "what checkpoints hold"
    critic = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One bug. ``plant`` takes the original object at ``target`` and returns the one that replaces it."""

    name: str
    group: Group
    bug: str  # in one sentence, what goes wrong
    source: str  # where it was found: owner/repository#number
    target: str  # module:qualified.name
    plant: Callable[[Any], Any]
    overrides: tuple[str, ...] = ()  # settings without which a run never comes to the bug
    needs_resume: bool = False  # whether the bug shows only in a run that continues from a checkpoint


MUTATIONS: dict[str, Mutation] = {}

# At this temperature many samples of the demo go on to the token limit.
_TRUNCATES = ("generation.temperature=2.0",)
_FILTERS = (*_TRUNCATES, "grpo.overlong_filtering=true")
# An answer that begins with a small digit is taken for a call of the calculator, which answers it.
_TWO_TURNS = (
    "env.arithmetic.kind=calculator",
    "env.arithmetic.max_turns=2",
    "env.arithmetic.check_at_start=false",
    "+env.arithmetic.options.call_pattern='^([0-4])'",
    "+env.arithmetic.options.result_template='{result}+'",
    "+env.arithmetic.options.answer_pattern=null",
)
_CRITIC = (
    "value=default",
    "grpo.adv_estimator.name=gae",
    "grpo.skip_idle_samples=false",
    "value.optimizer.lr=2.0e-3",
)
_SAVES = ("checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.export_final_hf=false")


def mutation(
    group: Group,
    bug: str,
    source: str,
    target: str,
    *overrides: str,
    needs_resume: bool = False,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register the decorated plant as a mutation under its own name."""

    def register(plant: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = plant.__name__
        if name in MUTATIONS:
            raise ValueError(f"there are two mutations named {name!r}; find another name for one of them")
        MUTATIONS[name] = Mutation(
            name=name,
            group=group,
            bug=bug,
            source=source,
            target=target,
            plant=plant,
            overrides=overrides,
            needs_resume=needs_resume,
        )
        return plant

    return register


# ---------------------------------------------------------------------- weight sync

_PACK = "nemo_like.weight_transport.packing:pack"


@mutation(
    Group.weight_sync,
    "The engines are told of every new version, but go on sampling with the first weights they got.",
    "huggingface/trl#5312",
    _PACK,
)
def weights_not_synced(pack: Any) -> Any:
    first: dict[str, Any] = {}

    def old(values: Any) -> Iterator[tuple[str, Any]]:
        for name, value in values:
            yield name, first.setdefault(name, value.detach().clone())

    return lambda values, next_buffer: pack(old(values), next_buffer)


@mutation(
    Group.weight_sync,
    "A step's samples come from the policy version before the one they are meant to come from.",
    "PrimeIntellect-ai/prime-rl#3050",
    _PACK,
)
def weights_one_version_behind(pack: Any) -> Any:
    held: dict[str, Any] = {}

    def late(values: Any) -> Iterator[tuple[str, Any]]:
        for name, value in values:
            present = value.detach().clone()
            yield name, held.get(name, present)
            held[name] = present

    return lambda values, next_buffer: pack(late(values), next_buffer)


@mutation(
    Group.weight_sync,
    "One tensor of the engines' model keeps its first values while all others are updated.",
    "NVIDIA-NeMo/RL#2895",
    _PACK,
)
def one_tensor_stale(pack: Any) -> Any:
    held: dict[str, Any] = {}

    def stale(values: Any) -> Iterator[tuple[str, Any]]:
        for name, value in values:
            if name.endswith("layers.0.mlp.down_proj.weight"):
                yield name, held.setdefault(name, value.detach().clone())
            else:
                yield name, value

    return lambda values, next_buffer: pack(stale(values), next_buffer)


@mutation(
    Group.weight_sync,
    "The engines get float32 weights after a rounding to bfloat16.",
    "NVIDIA-NeMo/RL#3540",
    _PACK,
)
def weights_rounded_on_the_way(pack: Any) -> Any:
    def rounded(values: Any) -> Iterator[tuple[str, Any]]:
        for name, value in values:
            yield name, value.bfloat16().to(value.dtype)

    return lambda values, next_buffer: pack(rounded(values), next_buffer)


@mutation(
    Group.weight_sync,
    "A tied output layer of the engine keeps its old weight when the embedding is updated.",
    "PrimeIntellect-ai/prime-rl#2823",
    "nemo_like.generation.weight_receiver:TrainerWeightReceiver._repack_tied_output_layer",
)
def tied_head_stale(repack: Any) -> Any:
    return lambda self: None


@mutation(
    Group.weight_sync,
    "The parts of the fused query, key and value weight are sent in a wrong order.",
    "NVIDIA-NeMo/RL#2802",
    "nemo_like.policy.megatron.weight_conversion:hf_tensors",
)
def keys_and_values_swapped(hf_tensors: Any) -> Any:
    def mutated(*args: Any) -> Iterator[tuple[str, Any]]:
        key: tuple[str, Any] = ("", None)
        for name, tensor in hf_tensors(*args):
            if name.endswith("k_proj.weight"):
                key = name, tensor
            elif name.endswith("v_proj.weight"):
                yield key[0], tensor
                yield name, key[1]
            else:
                yield name, tensor

    return mutated


@mutation(
    Group.weight_sync,
    "A square weight is sent by its memory, which lies transposed, and not by its values.",
    "NVIDIA-NeMo/RL#2418",
    _PACK,
)
def memory_order_ignored(pack: Any) -> Any:
    def transposed(values: Any) -> Iterator[tuple[str, Any]]:
        for name, value in values:
            is_square = value.dim() == 2 and value.shape[0] == value.shape[1]
            yield name, value.t() if is_square else value

    return lambda values, next_buffer: pack(transposed(values), next_buffer)


@mutation(
    Group.weight_sync,
    "An engine whose weight update failed reports success and serves its old weights as the new version.",
    "NVIDIA-NeMo/RL#398",
    "nemo_like.generation.engine_weights:VllmWeights.load",
    "generation.num_engines=2",
)
def one_engine_stale(load_weights: Any) -> Any:
    def mutated(self: Any, version: int, groups: Any) -> int:
        weights = self._vllm.weights
        if weights.policy_version < 0 or not self._vllm.name.endswith("1"):
            return load_weights(self, version, groups)
        weights.policy_version, weights.paused_for = version, None
        return version

    return mutated


@mutation(
    Group.weight_sync,
    "The engine's cache of prefixes holds keys and values that older weights computed.",
    "PrimeIntellect-ai/prime-rl#1650",
    "nemo_like.generation.engine_weights:VllmWeights.load",
    "policy.max_total_sequence_length=128",
    "policy.sequence_packing.train_mb_tokens=128",
    f"data.default.prompt_template='{'a' * 64}{{prompt}}'",  # the cache is of blocks of 32 tokens
)
def prefix_cache_stale(load_weights: Any) -> Any:
    def mutated(self: Any, version: int, groups: Any) -> int:
        self._vllm.llm.reset_prefix_cache = lambda *args, **options: True
        try:
            return load_weights(self, version, groups)
        finally:
            del self._vllm.llm.reset_prefix_cache

    return mutated


# ---------------------------------------------------------------------- sampling


@mutation(
    Group.sampling,
    "The trainer scores tokens at temperature 1, whatever the temperature of the sampling.",
    "huggingface/trl#3029",
    "nemo_like.algorithms.logprobs:linear_scores",
)
def trainer_ignores_temperature(linear_scores: Any) -> Any:
    def mutated(hidden: Any, weight: Any, token_ids: Any, shard: Any, settings: Any, *topk_ids: Any) -> Any:
        settings = replace(settings, temperature=1.0)
        return linear_scores(hidden, weight, token_ids, shard, settings, *topk_ids)

    return mutated


@mutation(
    Group.sampling,
    "The engine reports log-probs of the raw logits, before temperature.",
    "huggingface/trl#4159",
    "nemo_like.generation.engine_args:engine_args",
)
def engine_reports_raw_logprobs(engine_args: Any) -> Any:
    def mutated(*args: Any) -> Any:
        made = engine_args(*args)
        made.logprobs_mode = "raw_logprobs"
        return made

    return mutated


@mutation(
    Group.sampling,
    "The engine samples with its own temperature, and not with the configured one.",
    "NVIDIA-NeMo/RL#3537",
    "nemo_like.generation.vllm_engine:sampling_params",
)
def engine_ignores_temperature(sampling_params: Any) -> Any:
    def mutated(request: Any, sampling: Any, added_tokens: Any) -> Any:
        return sampling_params(request, replace(sampling, temperature=1.0), added_tokens)

    return mutated


@mutation(
    Group.sampling,
    "All responses of a group are sampled with one seed, so they are the same.",
    "vllm-project/vllm#11898",
    "nemo_like.rollout.turn_loop:TurnLoop._first_requests",
)
def one_seed_for_a_group(first_requests: Any) -> Any:
    def mutated(self: Any, group: Any) -> list[Any]:
        return [self._request(f"{c.position}/{c.generation}/1", (c,), (group[0].seed,)) for c in group]

    return mutated


@mutation(
    Group.sampling,
    "All groups of a step are sampled with the same seeds.",
    "volcengine/verl#5179",
    "nemo_like.rollout.prompts:response_seeds",
)
def same_seeds_for_all_groups(response_seeds: Any) -> Any:
    def mutated(run_seed: int, mode: Any, step: int, position: int, num_generations: int) -> Any:
        return response_seeds(run_seed, mode, step, 0, num_generations)

    return mutated


@mutation(
    Group.sampling,
    "The log-prob that comes with a token is that of its neighbour.",
    "NVIDIA-NeMo/RL#3297",
    "nemo_like.generation.request_loop:as_response",
)
def logprob_of_another_token(response: Any) -> Any:
    def mutated(*args: Any, **options: Any) -> Any:
        import numpy as np

        made = response(*args, **options)
        return replace(made, logprobs=np.roll(made.logprobs, 1))

    return mutated


# ---------------------------------------------------------------------- rollout and rewards

_FLATTEN = "nemo_like.rollout.flatten:flatten"


def _with_response_mask(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return a plant that changes the response mask of a flattened batch: ``change(mask, lengths)``."""

    def plant(flatten: Any) -> Any:
        def mutated(*args: Any, **options: Any) -> Any:
            flat = flatten(*args, **options)
            mask = flat.columns["response_mask"]
            return replace(flat, columns={**flat.columns, "response_mask": change(mask, flat.lengths)})

        return mutated

    return plant


@mutation(
    Group.rollout,
    "A sample gets the reward of its neighbour in the environment's batch.",
    "NVIDIA-NeMo/RL#3794",
    "nemo_like.environments.pool:EnvironmentPool.step",
)
def reward_of_another_sample(step: Any) -> Any:
    async def mutated(self: Any, turns: Any) -> list[Any]:
        answers = list(await step(self, turns))
        return answers[-1:] + answers[:-1]

    return mutated


@mutation(
    Group.rollout,
    "A reward of 0 is taken for a missing one, so wrong answers do not train.",
    "OpenRLHF/OpenRLHF#1219",
    _FLATTEN,
)
def zero_reward_taken_for_missing(flatten: Any) -> Any:
    def mutated(*args: Any, **options: Any) -> Any:
        flat = flatten(*args, **options)
        flat.tags["is_judged"] = [bool(reward) for reward in flat.tags["reward"]]
        return flat

    return mutated


@mutation(
    Group.rollout,
    "A response that ran into the token limit is not recognised as truncated.",
    "THUDM/slime#203",
    "nemo_like.generation.request_loop:as_response",
    *_TRUNCATES,
)
def truncation_not_noticed(response: Any) -> Any:
    return lambda *args, **options: replace(response(*args, **options), is_truncated=False)


@mutation(
    Group.rollout,
    "Truncated samples train although they should be masked.",
    "huggingface/trl#4976",
    "nemo_like.algorithms.sample_filters:mask_truncated",
    *_FILTERS,
)
def truncated_not_masked(mask_truncated: Any) -> Any:
    return lambda sample_mask, is_truncated: mask_truncated(sample_mask, [False] * len(sample_mask))


@mutation(
    Group.rollout,
    "The response mask is one token early: the prompt's last token trains, the response's last does not.",
    "modelscope/ms-swift#8427",
    _FLATTEN,
)
def mask_shifted_by_one(flatten: Any) -> Any:
    def shifted(mask: Any, lengths: Any) -> Any:
        import numpy as np

        return np.roll(mask, -1)  # the first token of the next sample, which moves to this one's end, is 0

    return _with_response_mask(shifted)(flatten)


@mutation(
    Group.rollout,
    "The token that ends a response is not in the response mask, so stopping is never trained.",
    "huggingface/trl#6357",
    _FLATTEN,
)
def end_of_response_masked(flatten: Any) -> Any:
    def shortened(mask: Any, lengths: Any) -> Any:
        import numpy as np

        return mask & np.roll(mask, -1)

    return _with_response_mask(shortened)(flatten)


@mutation(
    Group.rollout,
    "The first token of every response is not in the response mask, so it is never trained.",
    "volcengine/verl#3287",
    _FLATTEN,
)
def start_of_response_masked(flatten: Any) -> Any:
    def shortened(mask: Any, lengths: Any) -> Any:
        import numpy as np

        return mask & np.roll(mask, 1)

    return _with_response_mask(shortened)(flatten)


@mutation(
    Group.rollout,
    "What the environment said between two responses trains as though the policy had said it.",
    "volcengine/verl#2543",
    _FLATTEN,
    *_TWO_TURNS,
)
def observations_trained(flatten: Any) -> Any:
    def filled(mask: Any, lengths: Any) -> Any:
        import numpy as np

        samples = np.split(mask, np.cumsum(lengths)[:-1])
        return np.concatenate([np.maximum.accumulate(sample) for sample in samples])

    return _with_response_mask(filled)(flatten)


@mutation(
    Group.rollout,
    "Every step gets the prompts of the first one.",
    "huggingface/trl#3725",
    "nemo_like.data.sampler:MixtureSampler.next",
)
def prompts_do_not_advance(next_indices: Any) -> Any:
    def mutated(self: Any, count: int) -> tuple[int, ...]:
        if "first_indices" not in vars(self):
            self.first_indices = next_indices(self, count)
        return self.first_indices[:count]

    return mutated


# ---------------------------------------------------------------------- batching and data plane

_ASSEMBLE = "nemo_like.batch.sharding:_assemble"


def _with_schedule_of(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a plant that schedules shards as though ``change`` had been applied to their batch."""

    def plant(assemble: Any) -> Any:
        def mutated(meta: Any, *args: Any) -> tuple[Any, ...]:
            shards, others = assemble(meta, *args), assemble(change(meta), *args)
            return tuple(
                shard.with_schedule(other.schedule) for shard, other in zip(shards, others, strict=True)
            )

        return mutated

    return plant


@mutation(
    Group.batching,
    "When the batch is reordered, rewards and advantages stay in the old order.",
    "volcengine/verl#2185",
    "nemo_like.batch.meta:KVBatchMeta.subset",
)
def tags_not_reordered(subset: Any) -> Any:
    def mutated(self: Any, positions: Any) -> Any:
        chosen = subset(self, positions)
        return chosen.with_tags({name: values[: len(positions)] for name, values in self.tags.items()})

    return mutated


@mutation(
    Group.batching,
    "The log-probs under the old weights come back one token late.",
    "PrimeIntellect-ai/prime-rl#606",
    "nemo_like.policy.backends.scoring_backend:ScoringBackend.logprobs",
)
def scored_logprobs_shifted(logprobs: Any) -> Any:
    def mutated(self: Any, batch: Any, schedule: Any) -> Any:
        packed = logprobs(self, batch, schedule)
        is_scored = batch.columns["response_mask"].bool()
        packed[is_scored] = packed[is_scored].roll(1)
        return packed

    return mutated


@mutation(
    Group.batching,
    "Samples that are packed into one row attend to each other.",
    "huggingface/trl#2708",
    "nemo_like.policy.batch.policy_batch:PolicyBatch._packed",
)
def samples_attend_to_each_other(packed: Any) -> Any:
    def mutated(self: Any, *args: Any) -> Any:
        import torch

        from nemo_like.policy.batch.policy_batch import Packing

        inputs = packed(self, *args)
        num_tokens = inputs.input_ids.shape[1]
        whole = torch.tensor([0, num_tokens], dtype=torch.int32)
        return replace(inputs, packing=Packing(cu_seqlens=whole, lengths=(num_tokens,)))

    return mutated


@mutation(
    Group.batching,
    "The padding behind a short response trains.",
    "volcengine/verl#213",
    "nemo_like.policy.batch.policy_batch:PolicyBatch._padded",
    "policy.sequence_packing.enabled=false",
)
def padding_trained(padded: Any) -> Any:
    def mutated(self: Any, spec: Any, schedule: Any) -> Any:
        import torch

        inputs = padded(self, spec, schedule)
        lengths = self._model_lengths[inputs.rows]
        (short,) = (lengths < spec.padded_length).nonzero(as_tuple=True)
        last = self.offsets[inputs.rows] + self.lengths[inputs.rows] - 1
        return replace(
            inputs,
            token_ids=torch.cat((inputs.token_ids, torch.zeros_like(short))),
            output_index=torch.cat((inputs.output_index, lengths[short] * len(inputs.rows) + short)),
            sample_index=torch.cat((inputs.sample_index, short)),
            packed_index=torch.cat((inputs.packed_index, last[short])),
        )

    return mutated


@mutation(
    Group.batching,
    "The tokens that the loss is divided by include some that the policy did not generate.",
    "THUDM/slime#365",
    _ASSEMBLE,
)
def prompt_tokens_counted(assemble: Any) -> Any:
    def counted(meta: Any) -> Any:
        return meta.with_tags({"num_response_tokens": meta.lengths})

    return _with_schedule_of(counted)(assemble)


@mutation(
    Group.batching,
    "Masked samples count among the tokens that the loss is divided by.",
    "huggingface/trl#6439",
    _ASSEMBLE,
    *_FILTERS,
)
def masked_samples_counted(assemble: Any) -> Any:
    def counted(meta: Any) -> Any:
        return meta.with_tags({"sample_mask": [1.0] * len(meta)})

    return _with_schedule_of(counted)(assemble)


@mutation(
    Group.batching,
    "Each rank divides its loss by its own number of tokens instead of the global one.",
    "PrimeIntellect-ai/prime-rl#2562",
    _ASSEMBLE,
)
def normalised_by_rank(assemble: Any) -> Any:
    def mutated(*args: Any) -> tuple[Any, ...]:
        shards = assemble(*args)
        return tuple(shard.with_schedule(of_rank(shard, len(shards))) for shard in shards)

    def of_rank(shard: Any, num_ranks: int) -> Any:
        kept, tokens = shard.tags["sample_mask"], shard.tags["num_response_tokens"]
        batches = []
        for batch in shard.schedule.global_batches:
            rows = [row for one in batch.micro_batches for row in one.rows if kept[row]]
            num_tokens = num_ranks * sum(tokens[row] for row in rows)
            batches.append(replace(batch, num_samples=num_ranks * len(rows), num_tokens=num_tokens))
        return replace(shard.schedule, global_batches=tuple(batches))

    return mutated


@mutation(
    Group.batching,
    "Each micro-batch's loss is divided by its own number of tokens.",
    "PrimeIntellect-ai/prime-rl#583",
    "nemo_like.algorithms.losses:token_weights",
)
def normalised_per_micro_batch(token_weights: Any) -> Any:
    def mutated(sample_index: Any, sample_mask: Any, lengths: Any, counts: Any, cfg: Any) -> Any:
        num_tokens = int(sample_mask[sample_index].sum())
        own = replace(counts, num_tokens=num_tokens, num_samples=int(sample_mask.sum()))
        return token_weights(sample_index, sample_mask, lengths, own, cfg)

    return mutated


@mutation(
    Group.batching,
    "Gradients of a loss that is normalised over all ranks are averaged over the ranks once more.",
    "THUDM/slime#987",
    "nemo_like.policy.megatron.pipeline:Pipeline.forward_backward",
)
def gradients_averaged_over_ranks(forward_backward: Any) -> Any:
    def mutated(self: Any, batch: Any, schedule: Any, specs: Any, loss: Any) -> None:
        from torch.distributed import get_world_size

        def averaged(scores: Any, inputs: Any) -> Any:
            return loss(scores, inputs) / get_world_size()

        forward_backward(self, batch, schedule, specs, averaged)

    return mutated


# ---------------------------------------------------------------------- advantages

_GRPO_ADVANTAGES = "nemo_like.algorithms.advantages:group_relative_advantages"


@mutation(
    Group.advantages,
    "Samples are compared with those of a neighbouring prompt's group.",
    "NVIDIA-NeMo/RL#2176",
    _GRPO_ADVANTAGES,
    "grpo.mix_groups_in_updates=false",  # mixed, the groups would only change their names
)
def wrong_group(advantages: Any) -> Any:
    def mutated(rewards: Any, group_ids: Any, **options: Any) -> list[float]:
        return advantages(rewards, [*group_ids[1:], group_ids[0]], **options)

    return mutated


@mutation(
    Group.advantages,
    "All prompts' samples are compared with each other, as though they were one group.",
    "NVIDIA-NeMo/RL#3882",
    _GRPO_ADVANTAGES,
)
def whole_batch_is_one_group(advantages: Any) -> Any:
    def mutated(rewards: Any, group_ids: Any, **options: Any) -> list[float]:
        return advantages(rewards, [0] * len(rewards), **options)

    return mutated


@mutation(
    Group.advantages,
    "Advantages are divided by the standard deviation of the whole batch, not of the group.",
    "huggingface/trl#3992",
    _GRPO_ADVANTAGES,
)
def standard_deviation_of_the_batch(advantages: Any) -> Any:
    def mutated(rewards: Any, group_ids: Any, **options: Any) -> list[float]:
        import statistics

        centred = advantages(rewards, group_ids, **{**options, "normalize_rewards": False})
        spread = statistics.stdev(rewards) + 1e-6
        return [value / spread for value in centred]

    return mutated


@mutation(
    Group.advantages,
    "With a leave-one-out baseline, a sample whose others are equal is divided by next to nothing.",
    "NVIDIA-NeMo/RL#1519",
    _GRPO_ADVANTAGES,
    "grpo.use_leave_one_out_baseline=true",
)
def divided_by_no_deviation(advantages: Any) -> Any:
    def mutated(rewards: Any, group_ids: Any, **options: Any) -> list[float]:
        from nemo_like.algorithms.advantages import group_baselines

        options = {name: value for name, value in options.items() if name != "normalize_rewards"}
        baselines = group_baselines(rewards, group_ids, **options)
        values = zip(rewards, baselines.mean, baselines.std, strict=True)
        return [(reward - mean) / (std + 1e-6) for reward, mean, std in values]

    return mutated


@mutation(
    Group.advantages,
    "Masked samples count in the mean and the deviation of their group.",
    "huggingface/trl#3248",
    _GRPO_ADVANTAGES,
    *_FILTERS,
)
def masked_samples_in_baseline(advantages: Any) -> Any:
    def mutated(rewards: Any, group_ids: Any, **options: Any) -> list[float]:
        mask = options.pop("sample_mask")
        values = advantages(rewards, group_ids, **options)
        return [value if kept else 0.0 for value, kept in zip(values, mask, strict=True)]

    return mutated


@mutation(
    Group.advantages,
    "Dynamic sampling judges groups by shaped rewards, so it keeps groups that differ in length alone.",
    "NVIDIA-NeMo/RL#2478",
    "nemo_like.driver.collection:_groups_to_train",
    "grpo.use_dynamic_sampling=true",
    "grpo.reward_shaping.enabled=true",
    "grpo.reward_shaping.overlong_buffer_length=3",
)
def groups_chosen_by_shaped_rewards(groups_to_train: Any) -> Any:
    def mutated(batch: Any, cfg: Any) -> Any:
        return groups_to_train(batch.with_tags({"reward": batch.tags["shaped_reward"]}), cfg)

    return mutated


# ---------------------------------------------------------------------- loss

_POLICY_GRADIENT = "nemo_like.algorithms.losses:policy_gradient"
_TOKEN_WEIGHTS = "nemo_like.algorithms.losses:token_weights"


@mutation(
    Group.loss,
    "The KL to the reference is subtracted from a loss that is minimised.",
    "volcengine/verl#179",
    _POLICY_GRADIENT,
)
def kl_sign_flipped(policy_gradient: Any) -> Any:
    def mutated(tokens: Any, cfg: Any, **clips: Any) -> Any:
        flipped = replace(cfg, reference_policy_kl_penalty=-cfg.reference_policy_kl_penalty)
        return policy_gradient(tokens, flipped, **clips)

    return mutated


@mutation(
    Group.loss,
    "The KL is reported, but has no gradient.",
    "NVIDIA-NeMo/RL#2506",
    "nemo_like.algorithms.losses:kl_to_reference",
)
def kl_without_gradient(kl_to_reference: Any) -> Any:
    return lambda *args: kl_to_reference(*args).detach()


@mutation(
    Group.loss,
    "The reference policy is the policy itself, so the KL to it is 0.",
    "huggingface/trl#3397",
    "nemo_like.policy.megatron.backend:MegatronBackend.reference_logprobs",
)
def reference_is_the_policy(reference_logprobs: Any) -> Any:
    return lambda self, batch, schedule: self.logprobs(batch, schedule)


@mutation(
    Group.loss,
    "After the reference has scored, its weights stay in the policy, whose training so far is lost.",
    "THUDM/slime#780",
    "nemo_like.policy.backends.kept_weights:KeptWeights.in_model",
)
def reference_left_in_the_policy(in_model: Any) -> Any:
    @contextlib.contextmanager
    def mutated(self: Any) -> Iterator[None]:
        import torch

        with torch.no_grad():
            for parameter, held in zip(self._parameters(), self.held, strict=True):
                parameter.copy_(held)
        yield

    return mutated


@mutation(
    Group.loss,
    "The setting that forces the ratio to 1 is not read: the ratio is 1 with it or without it.",
    "NVIDIA-NeMo/RL#3087",
    _POLICY_GRADIENT,
)
def ratio_always_one(policy_gradient: Any) -> Any:
    def mutated(tokens: Any, cfg: Any, **clips: Any) -> Any:
        return policy_gradient(replace(tokens, prev_logprobs=tokens.logprobs.detach()), cfg, **clips)

    return mutated


@mutation(
    Group.loss,
    "The upper bound of the clipping is set by the lower one's key.",
    "huggingface/trl#6019",
    _POLICY_GRADIENT,
    "loss_fn.ratio_clip_max=0.5",
)
def clipped_by_the_wrong_bound(policy_gradient: Any) -> Any:
    def mutated(tokens: Any, cfg: Any, **clips: Any) -> Any:
        return policy_gradient(tokens, cfg, **{**clips, "ratio_clip_max": clips["ratio_clip_min"]})

    return mutated


@mutation(
    Group.loss,
    "The bound of the dual clip is configured, but never reaches the loss.",
    "THUDM/slime#2247",
    "nemo_like.algorithms.losses:clipped_policy_gradient",
    "loss_fn.ratio_clip_c=1.01",
)
def dual_clip_ignored(clipped_policy_gradient: Any) -> Any:
    def mutated(*args: Any, **options: Any) -> Any:
        return clipped_policy_gradient(*args, **{**options, "dual_clip": None})

    return mutated


@mutation(
    Group.loss,
    "The entropy is that of logits which the log-probs have overwritten, and so nearly uniform.",
    "volcengine/verl#1672",
    "nemo_like.algorithms.logprobs:linear_scores",
    "loss_fn.entropy_coef=0.05",
)
def entropy_of_overwritten_logits(linear_scores: Any) -> Any:
    def mutated(*args: Any) -> Any:
        hidden, weight, token_ids, shard, settings, *topk_ids = args
        settings = replace(settings, temperature=20.0)
        flat = linear_scores(hidden, weight, token_ids, shard, settings, *topk_ids)
        return replace(linear_scores(*args), entropy=flat.entropy)

    return mutated


@mutation(
    Group.loss,
    "The configured way of averaging is ignored: the mean is over samples, and not over tokens.",
    "volcengine/verl#945",
    _TOKEN_WEIGHTS,
)
def averaging_ignored(token_weights: Any) -> Any:
    def mutated(*args: Any) -> Any:
        *others, cfg = args
        return token_weights(*others, replace(cfg, token_level_loss=not cfg.token_level_loss))

    return mutated


@mutation(
    Group.loss,
    "Masked samples get no advantage, but their KL still trains.",
    "THUDM/slime#1372",
    "nemo_like.policy.loss.objective:_loss_tokens",
    *_FILTERS,
    "grpo.skip_idle_samples=false",
)
def masked_samples_get_kl(loss_tokens: Any) -> Any:
    def mutated(scores: Any, inputs: Any, batch: Any, *others: Any) -> Any:
        import torch

        values = batch.sample_values
        batch.sample_values = {**values, "sample_mask": torch.ones_like(values["sample_mask"])}
        try:
            return loss_tokens(scores, inputs, batch, *others)
        finally:
            batch.sample_values = values

    return mutated


@mutation(
    Group.loss,
    "The advantages are handed to the loss a second time, where its mask belongs.",
    "volcengine/verl#2513",
    _POLICY_GRADIENT,
)
def advantages_in_place_of_mask(policy_gradient: Any) -> Any:
    def mutated(tokens: Any, cfg: Any, **clips: Any) -> Any:
        multiplied = replace(tokens, weights=tokens.weights * tokens.advantages)
        return policy_gradient(multiplied, cfg, **clips)

    return mutated


@mutation(
    Group.loss,
    "The loss is divided by at most 1 instead of at least 1, so it is a sum over tokens.",
    "PrimeIntellect-ai/prime-rl#816",
    _TOKEN_WEIGHTS,
)
def loss_not_normalised(token_weights: Any) -> Any:
    def mutated(sample_index: Any, sample_mask: Any, lengths: Any, counts: Any, cfg: Any) -> Any:
        ones = replace(counts, num_tokens=1, num_samples=1)
        return token_weights(sample_index, sample_mask, lengths, ones, cfg)

    return mutated


# ---------------------------------------------------------------------- optimizer and checkpoints

_LEARNING_RATE = "nemo_like.policy.backends.learning_rate:learning_rate"


@mutation(
    Group.optimizer,
    "The schedule's counter counts samples, while its lengths are configured in updates.",
    "NVIDIA-NeMo/RL#685",
    _LEARNING_RATE,
)
def schedule_counts_samples(learning_rate: Any) -> Any:
    return lambda update, peak, cfg: learning_rate(16 * update, peak, cfg)


@mutation(
    Group.optimizer,
    "The first update has a learning rate of 0, and every other one the rate of the update before.",
    "volcengine/verl#1463",
    _LEARNING_RATE,
)
def schedule_one_update_late(learning_rate: Any) -> Any:
    return lambda update, peak, cfg: learning_rate(update - 1, peak, cfg)


@mutation(
    Group.optimizer,
    "The learning rate decays to 0 although a least rate is configured.",
    "volcengine/verl#1400",
    _LEARNING_RATE,
    "policy.scheduler.warmup_updates=0",
    "policy.scheduler.decay_updates=4",
    "policy.scheduler.min_lr=1.0e-3",
)
def least_rate_ignored(learning_rate: Any) -> Any:
    return lambda update, peak, cfg: learning_rate(update, peak, replace(cfg, min_lr=0.0))


@mutation(
    Group.optimizer,
    "Gradients are not clipped although a norm is configured.",
    "NVIDIA-NeMo/RL#1158",
    "nemo_like.policy.megatron.optimizer:build_optimizer",
    "policy.max_grad_norm=0.02",
)
def gradients_not_clipped(build_optimizer: Any) -> Any:
    def mutated(cfg: Any, *others: Any) -> Any:
        return build_optimizer(replace(cfg, max_grad_norm=0.0), *others)

    return mutated


@mutation(
    Group.optimizer,
    "A run that continues begins with an empty optimizer state.",
    "NVIDIA-NeMo/RL#3171",
    "nemo_like.policy.megatron.checkpoint:load_checkpoint",
    needs_resume=True,
)
def resume_without_optimizer(load_checkpoint: Any) -> Any:
    def mutated(path: Any, model: Any, optimizer: Any, *others: Any) -> Any:
        optimizer.load_state_dict = lambda state: None
        try:
            return load_checkpoint(path, model, optimizer, *others)
        finally:
            del optimizer.load_state_dict

    return mutated


@mutation(
    Group.optimizer,
    "A run that continues begins its learning-rate schedule anew.",
    "THUDM/slime#1152",
    "nemo_like.policy.megatron.backend:MegatronBackend.load_checkpoint",
    needs_resume=True,
)
def resume_restarts_schedule(load_checkpoint: Any) -> Any:
    def mutated(self: Any, *asked: Any) -> None:
        load_checkpoint(self, *asked)
        self.num_updates = 0

    return mutated


@mutation(
    Group.optimizer,
    "A run that continues trains again on the prompts that it began with.",
    "volcengine/verl#4156",
    "nemo_like.data.sampler:MixtureSampler.load_state_dict",
    needs_resume=True,
)
def resume_restarts_prompts(load_state_dict: Any) -> Any:
    return lambda self, state: None


@mutation(
    Group.optimizer,
    "The reference policy of a run that continues is the policy of its checkpoint, not the first one.",
    "NVIDIA-NeMo/RL#2955",
    "nemo_like.policy.megatron.backend:MegatronBackend.load_checkpoint",
    needs_resume=True,
)
def resume_moves_reference(load_checkpoint: Any) -> Any:
    def mutated(self: Any, *asked: Any) -> None:
        load_checkpoint(self, *asked)
        if self._reference is not None:
            self._reference = type(self._reference)(
                lambda: [*self._model.parameters()], self.cfg.reference_placement
            )

    return mutated


# ---------------------------------------------------------------------- gradients and updates

_BACKEND = "nemo_like.policy.megatron.backend:MegatronBackend"
_STEP = f"{_BACKEND}._step"
_COMPUTE = f"{_BACKEND}._compute_gradients"
_GROUPS = "nemo_like.policy.megatron.optimizer:configure_groups"
_MATRIX = "layers.0.mlp.linear_fc2.weight"


def _before_step(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Return a plant that calls ``change(backend)`` between the gradients and the optimizer's update."""

    def plant(step: Any) -> Any:
        def mutated(self: Any, rate: float) -> float:
            change(self)
            return step(self, rate)

        return mutated

    return plant


def _with_groups(change: Callable[[dict[str, Any], Any], None]) -> Callable[[Any], Any]:
    """Return a plant that calls ``change(group, cfg)`` for every configured group of the optimizer."""

    def plant(configure_groups: Any) -> Any:
        def mutated(optimizer: Any, cfg: Any) -> None:
            configure_groups(optimizer, cfg)
            for group in optimizer.param_groups:
                change(group, cfg)

        return mutated

    return plant


def _without_gradient(module_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a plant that passes no gradient back through the output of one module of the model."""

    def plant(compute: Any) -> Any:
        def mutated(self: Any, *args: Any) -> None:
            # A gradient of 0: data parallelism waits for a gradient of every parameter.
            handle = module_of(self).register_forward_hook(lambda _, __, given: given.detach() + 0 * given)
            try:
                compute(self, *args)
            finally:
                handle.remove()

        return mutated

    return plant


def _matrix(backend: Any) -> Any:
    """Return one matrix of a backend's model."""
    return next(one for name, one in backend._model[-1].named_parameters() if name.endswith(_MATRIX))


@mutation(
    Group.gradients,
    "The gradients of an update are added to those of the update before.",
    "huggingface/trl#583",
    f"{_BACKEND}._clear_gradients",
)
def gradients_not_cleared(clear: Any) -> Any:
    return lambda self: None


@mutation(
    Group.gradients,
    "One matrix never gets a gradient, so it keeps its first values.",
    "verl-project/verl#7495",
    _STEP,
)
def one_matrix_is_frozen(step: Any) -> Any:
    return _before_step(lambda backend: _matrix(backend).main_grad.zero_())(step)


@mutation(
    Group.gradients,
    "A tied embedding gets the output layer's part of its gradient alone.",
    "paiml/entrenar#314",
    _COMPUTE,
)
def embedding_loses_its_own_gradient(compute: Any) -> Any:
    return _without_gradient(lambda backend: backend._model[0].embedding)(compute)


@mutation(
    Group.gradients,
    "Attention passes no gradient back to queries, keys and values.",
    "paiml/aprender#2203",
    _COMPUTE,
)
def attention_without_gradient(compute: Any) -> Any:
    def attention(backend: Any) -> Any:
        return backend._model[-1].decoder.layers[0].self_attention.core_attention

    return _without_gradient(attention)(compute)


@mutation(
    Group.gradients,
    "One matrix's gradient is not averaged over the replicas, which so drift apart.",
    "OpenTSLM/OpenTSLM#49",
    _STEP,
    "policy.megatron_cfg.use_distributed_optimizer=false",
)
def replicas_drift_apart(step: Any) -> Any:
    def change(backend: Any) -> None:
        if backend.coordinates.dp:  # as though its own part of the sum were twice the other's, turned round
            _matrix(backend).main_grad.neg_()

    return _before_step(change)(step)


@mutation(
    Group.gradients,
    "Adam's epsilon is so large that weights hardly move.",
    "tensorflow/models#779",
    _GROUPS,
)
def epsilon_too_large(configure_groups: Any) -> Any:
    return _with_groups(lambda group, cfg: group.update(eps=1.0))(configure_groups)


@mutation(
    Group.gradients,
    "Adam's two betas are exchanged.",
    "mila-iqia/blocks#1159",
    _GROUPS,
)
def betas_exchanged(configure_groups: Any) -> Any:
    return _with_groups(lambda group, cfg: group.update(betas=group["betas"][::-1]))(configure_groups)


@mutation(
    Group.gradients,
    "Biases and norms decay as matrices do.",
    "ServiceNow/Fast-LLM#542",
    _GROUPS,
    "policy.optimizer.weight_decay=0.1",
)
def norms_decay(configure_groups: Any) -> Any:
    def change(group: dict[str, Any], cfg: Any) -> None:
        group["weight_decay"] = cfg.optimizer.weight_decay

    return _with_groups(change)(configure_groups)


@mutation(
    Group.gradients,
    "The second of four updates changes nothing, and counts.",
    "huggingface/transformers#29561",
    _STEP,
)
def one_update_is_lost(step: Any) -> Any:
    return lambda self, rate: 1.0 if self.num_updates % 4 == 2 else step(self, rate)


@mutation(
    Group.gradients,
    "Advantages reach the loss in the order of other samples.",
    "kvablack/ddpo-pytorch#29",
    "nemo_like.policy.loss.token_advantages:TokenAdvantages.__init__",
)
def advantages_of_other_samples(init: Any) -> Any:
    def mutated(self: Any, batch: Any, loss: Any) -> None:
        if not getattr(batch, "has_moved_advantages", False):
            values, batch.has_moved_advantages = batch.sample_values, True
            batch.sample_values = {**values, "advantage": values["advantage"].roll(1)}
        init(self, batch, loss)

    return mutated


@mutation(
    Group.gradients,
    "Advantages are rounded to bfloat16 on their way to the loss.",
    "OpenRLHF/OpenRLHF#1334",
    "nemo_like.policy.loss.token_advantages:TokenAdvantages.__init__",
)
def advantages_rounded(init: Any) -> Any:
    def mutated(self: Any, batch: Any, loss: Any) -> None:
        values = batch.sample_values
        batch.sample_values = {**values, "advantage": values["advantage"].bfloat16().float()}
        init(self, batch, loss)

    return mutated


@mutation(
    Group.gradients,
    "Entropies stand one token late.",
    "PrimeIntellect-ai/prime-rl#1525",
    "nemo_like.algorithms.logprobs:linear_scores",
    "loss_fn.entropy_coef=0.05",
)
def entropies_shifted(linear_scores: Any) -> Any:
    def mutated(*args: Any) -> Any:
        scores = linear_scores(*args)
        return scores if scores.entropy is None else replace(scores, entropy=scores.entropy.roll(1))

    return mutated


# ---------------------------------------------------------------------- what checkpoints hold

_SAVE = "nemo_like.policy.megatron.checkpoint:save_checkpoint"
_LOAD = "nemo_like.policy.megatron.checkpoint:load_checkpoint"


@contextlib.contextmanager
def _with_values(parameters: Any, values: Any) -> Iterator[None]:
    """Have parameters hold other values within the block."""
    present = [parameter.detach().clone() for parameter in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, present, strict=True):
            parameter.data.copy_(value)


def _states(optimizer: Any) -> list[dict[str, Any]]:
    """Return Adam's state of every parameter, in the optimizer's order."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [state for part in chained for state in part.optimizer.state.values() if "exp_avg" in state]


def _after_loading(change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Return a plant that calls ``change(optimizer)`` once a checkpoint was loaded into the optimizer."""

    def plant(load_checkpoint: Any) -> Any:
        def mutated(path: Any, model: Any, optimizer: Any, *others: Any) -> Any:
            counters = load_checkpoint(path, model, optimizer, *others)
            change(optimizer)
            return counters

        return mutated

    return plant


@mutation(
    Group.stored,
    "Every checkpoint after the first holds the weights of the first.",
    "NVIDIA-NeMo/RL#3312",
    _SAVE,
    *_SAVES,
)
def checkpoint_repeats_the_first(save_checkpoint: Any) -> Any:
    first: list[Any] = []

    def mutated(path: Any, model: Any, *others: Any) -> None:
        parameters = [*model.parameters()]
        if not first:
            first.extend(parameter.detach().clone() for parameter in parameters)
        with _with_values(parameters, first):
            save_checkpoint(path, model, *others)

    return mutated


@mutation(
    Group.stored,
    "A checkpoint holds the weights from before the step's updates.",
    "ViperEkura/AstrAI#27",
    "nemo_like.policy.backends.updating_backend:UpdatingBackend.train",
    *_SAVES,
)
def checkpoint_is_a_step_late(train: Any) -> Any:
    def mutated(self: Any, *args: Any) -> Any:
        before = [parameter.detach().clone() for parameter in self._all_parameters()]

        def save_checkpoint(*asked: Any) -> None:
            with _with_values(self._all_parameters(), before):
                type(self).save_checkpoint(self, *asked)

        self.save_checkpoint = save_checkpoint
        return train(self, *args)

    return mutated


@mutation(
    Group.stored,
    "One tensor of a run that continues keeps the values of the first model.",
    "NVIDIA-NeMo/Megatron-Bridge#3397",
    _LOAD,
    needs_resume=True,
)
def one_tensor_is_not_resumed(load_checkpoint: Any) -> Any:
    def mutated(path: Any, model: Any, *others: Any) -> Any:
        matrix = next(one for name, one in model.named_parameters() if name.endswith(_MATRIX))
        before = matrix.detach().clone()
        counters = load_checkpoint(path, model, *others)
        matrix.data.copy_(before)
        return counters

    return mutated


@mutation(
    Group.stored,
    "A run that continues has the moments of two tensors of one shape exchanged.",
    "OpenNMT/OpenNMT-py#617",
    _LOAD,
    needs_resume=True,
)
def moments_of_other_tensors(load_checkpoint: Any) -> Any:
    def change(optimizer: Any) -> None:
        by_shape: dict[Any, Any] = {}
        for state in _states(optimizer):
            other = by_shape.setdefault(state["exp_avg"].shape, state)
            if other is not state:
                for name in ("exp_avg", "exp_avg_sq"):
                    kept = state[name].clone()
                    state[name].copy_(other[name])
                    other[name].copy_(kept)
                return

    return _after_loading(change)(load_checkpoint)


@mutation(
    Group.stored,
    "A run that continues has second moments of 0.",
    "pytorch/rl#4188",
    _LOAD,
    needs_resume=True,
)
def second_moments_not_resumed(load_checkpoint: Any) -> Any:
    def change(optimizer: Any) -> None:
        for state in _states(optimizer):
            state["exp_avg_sq"].zero_()

    return _after_loading(change)(load_checkpoint)


@mutation(
    Group.stored,
    "A run that continues has moments that were rounded to bfloat16.",
    "vllm-project/speculators#899",
    _LOAD,
    needs_resume=True,
)
def moments_rounded_on_resume(load_checkpoint: Any) -> Any:
    def change(optimizer: Any) -> None:
        for state in _states(optimizer):
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())

    return _after_loading(change)(load_checkpoint)


# ---------------------------------------------------------------------- critic

_GAE = "nemo_like.algorithms.generalised_advantages:generalised_advantages"
_VALUE_LOSS = "nemo_like.algorithms.critic:value_loss"


@mutation(
    Group.critic,
    "A token's value is that of the token before it.",
    "verl-project/verl#1960",
    "nemo_like.policy.workers.value_worker:ValueWorker._advantages_and_returns",
    *_CRITIC,
)
def values_one_token_late(advantages_and_returns: Any) -> Any:
    return lambda self, batch, values, ends: advantages_and_returns(self, batch, values.roll(1), ends)


@mutation(
    Group.critic,
    "The configured lambda is not read: advantages are those of 1.",
    "medipixel/rl_algorithms#179",
    _GAE,
    *_CRITIC,
    "value.gae_lambda=0.9",
)
def gae_lambda_ignored(generalised_advantages: Any) -> Any:
    return lambda *args, **options: generalised_advantages(*args, **{**options, "gae_lambda": 1.0})


@mutation(
    Group.critic,
    "The critic learns the advantages, and not the returns.",
    "vwxyzjn/cleanrl#337",
    _GAE,
    *_CRITIC,
)
def returns_are_advantages(generalised_advantages: Any) -> Any:
    def mutated(*args: Any, **options: Any) -> Any:
        estimates = generalised_advantages(*args, **options)
        return replace(estimates, returns=estimates.advantages)

    return mutated


@mutation(
    Group.critic,
    "A sample's reward stands at the token before its last.",
    "openai/spinningup#50",
    "nemo_like.policy.workers.value_worker:ValueWorker._rewards",
    *_CRITIC,
)
def reward_one_token_early(rewards: Any) -> Any:
    return lambda self, batch: rewards(self, batch).roll(-1)


@mutation(
    Group.critic,
    "Samples that were cut off end with a value of 0, although they should end with their own.",
    "automl/Mighty#126",
    _GAE,
    *_CRITIC,
    "value.bootstrap_truncated=true",
    *_TRUNCATES,
)
def truncated_samples_end_at_zero(generalised_advantages: Any) -> Any:
    def mutated(*args: Any, **options: Any) -> Any:
        *others, end_values = args
        return generalised_advantages(*others, end_values * 0, **options)

    return mutated


@mutation(
    Group.critic,
    "The value behind a sample's end counts, though the sample has ended.",
    "alibaba/ROLL#447",
    "nemo_like.policy.workers.value_worker:ValueWorker._advantages_and_returns",
    *_CRITIC,
)
def ended_samples_go_on(advantages_and_returns: Any) -> Any:
    def mutated(self: Any, batch: Any, values: Any, ends: Any) -> Any:
        configured, is_truncated = self._value, batch.sample_values["is_truncated"]
        self._value = replace(configured, bootstrap_truncated=True)
        batch.sample_values["is_truncated"] = is_truncated.new_ones(len(is_truncated))
        try:
            return advantages_and_returns(self, batch, values, ends)
        finally:
            self._value, batch.sample_values["is_truncated"] = configured, is_truncated

    return mutated


@mutation(
    Group.critic,
    "Tokens of the environment between two turns count as the policy's in the advantages.",
    "radixark/miles#1827",
    _GAE,
    *_CRITIC,
    *_TWO_TURNS,
)
def observations_in_gae(generalised_advantages: Any) -> Any:
    def mutated(*args: Any, **options: Any) -> Any:
        import torch

        values, rewards, mask, lengths, ends = args
        parts = [part.cummax(0).values for part in mask.split(lengths.tolist())]
        return generalised_advantages(values, rewards, torch.cat(parts), lengths, ends, **options)

    return mutated


@mutation(
    Group.critic,
    "Of the clipped and the plain loss of a value the smaller counts.",
    "ray-project/ray#19291",
    _VALUE_LOSS,
    *_CRITIC,
    "value.clip_range=0.01",
)
def clipped_values_take_the_minimum(value_loss: Any) -> Any:
    def mutated(values: Any, old_values: Any, returns: Any, *, clip_range: Any) -> Any:
        kept = old_values + (values - old_values).clamp(-clip_range, clip_range)
        plain, clipped = (values - returns).square(), (kept - returns).square()
        given = value_loss(values, old_values, returns, clip_range=clip_range)
        return replace(given, per_token=plain.minimum(clipped) / 2)

    return mutated


@mutation(
    Group.critic,
    "Values are clipped around what they are, and not around what they were, which clips nothing.",
    "tensorflow/agents#352",
    _VALUE_LOSS,
    *_CRITIC,
    "value.clip_range=0.01",
)
def old_values_are_the_present(value_loss: Any) -> Any:
    return lambda values, old_values, *args, **options: value_loss(values, values.detach(), *args, **options)


@mutation(
    Group.critic,
    "The critic's output layer gets no gradient: it is beside what the optimizer trains.",
    "NVIDIA-NeMo/RL#2825",
    _STEP,
    *_CRITIC,
)
def critic_head_is_frozen(step: Any) -> Any:
    def change(backend: Any) -> None:
        if backend.objective.scoring is None:
            backend._model[-1].output_layer.weight.main_grad.zero_()

    return _before_step(change)(step)


@mutation(
    Group.critic,
    "The critic's learning rate is the peak in every update, whatever the schedule.",
    "NVIDIA-NeMo/RL#2530",
    _STEP,
    *_CRITIC,
)
def critic_ignores_schedule(step: Any) -> Any:
    def mutated(self: Any, rate: float) -> float:
        is_critic = self.objective.scoring is None
        return step(self, self.cfg.optimizer.lr if is_critic else rate)

    return mutated


@mutation(
    Group.critic,
    "Masked samples train the critic.",
    "alibaba/ROLL#444",
    "nemo_like.policy.loss.value_objective:ValueObjective.loss_of_update",
    *_CRITIC,
    *_FILTERS,
)
def critic_trains_on_masked_samples(loss_of_update: Any) -> Any:
    def mutated(self: Any, batch: Any, *others: Any) -> Any:
        import copy

        import torch

        unmasked, values = copy.copy(batch), batch.sample_values
        unmasked.sample_values = {**values, "sample_mask": torch.ones_like(values["sample_mask"])}
        return loss_of_update(self, unmasked, *others)

    return mutated


def planted(one: Mutation, original: Any) -> Any:
    """Return what replaces ``original``; a function keeps the original's name, by which it is pickled."""
    replacement = one.plant(original)
    return functools.wraps(original)(replacement) if callable(original) else replacement
