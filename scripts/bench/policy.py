#!/usr/bin/env python
"""Tokens per second of the policy's log-prob and training phases against a plain Hugging Face loop.

    python scripts/bench/policy.py [--rounds 7] [--samples 64] [--prompt-tokens 16] [key=value ...]

One batch with lengths like those of rollouts (log-normal, cut at the limit), scored and trained on in
turn by plain loops and by one Megatron-core worker under several configurations of its micro-batches:

    padded    micro_batch_order=as_sampled: neighbours in the batch, padded to their longest
    sorted    micro_batch_order=by_length, the default: samples of like length, padded to their longest
    dynamic   dynamic_batching: samples of like length, as many as a token budget holds once padded
    packed    sequence_packing: as many samples as the budget holds end to end
    shared    the same with share_prompts: groups of eight hold their prompt once

The budget is what padded may need: micro-batch size x the longest that a sample may be. Each plain loop
has the micro-batches of its namesake. Prints JSON: medians over the rounds, and ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import PREV_LOGPROBS
from nemo_like.batch.meta import MicroBatch, Schedule
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.batch.tags import ADVANTAGE, SAMPLE_MASK
from nemo_like.configuration import Config, load_config
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.megatron.backend import MegatronBackend
from nemo_like.policy.options import PolicyConfig
from scripts.bench.arguments import at_least
from scripts.bench.plain_model import PlainModel
from scripts.bench.random_inputs import Samples, random_model, random_samples

REPOSITORY = Path(__file__).resolve().parents[2]
GROUP_SIZE = 8
# Of the response lengths: most are short, a few reach the limit.
MEDIAN_TOKENS, SIGMA = 90, 1.0
TEMPERATURE = 1.0
# Of the micro-batches, each with what it sets under policy.
KINDS = {
    "padded": ["micro_batch_order=as_sampled"],
    "sorted": ["micro_batch_order=by_length"],
    "dynamic": ["dynamic_batching.enabled=true"],
    "packed": ["sequence_packing.enabled=true"],
    "shared": ["sequence_packing.enabled=true", "sequence_packing.share_prompts=true"],
}
ONE_ROW = ("packed", "shared")
PHASES = ("logprobs", "train")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: a random small Qwen3)")
    parser.add_argument(
        "--rounds", type=at_least(1), default=7, help="turns of each, after one that is not counted"
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=1024, help="prompt and response of the longest")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples of a padded micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or random_model(Path(directory), options.max_tokens, 1024, num_layers=4)
        cfgs = {kind: configuration(model, options, keys) for kind, keys in KINDS.items()}
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        samples = random_samples(model, sample_lengths(options), options.prompt_tokens, GROUP_SIZE)
        contest = Contest(cfgs, samples)
        print(json.dumps(contest.run(options.rounds), indent=2))
        dist.destroy_process_group()
    return 0


def configuration(model: Path, options: argparse.Namespace, keys: list[str]) -> Config:
    """The demo's, for this model, sizes and micro-batches."""
    budget = options.micro_batch * options.max_tokens
    policy = {
        "model_name": model,
        "data_parallel_size": 1,
        "max_total_sequence_length": options.max_tokens,
        "train_micro_batch_size": options.micro_batch,
        "logprob_batch_size": options.micro_batch,
        "sequence_packing.enabled": "false",
        "sequence_packing.share_prompts": "false",
        **{
            f"{kind}.{name}": budget
            for kind in ("dynamic_batching", "sequence_packing")
            for name in ("train_mb_tokens", "logprob_mb_tokens")
        },
    }
    fixed = [f"{key}={value}" for key, value in policy.items()]
    overrides = [f"policy.{setting}" for setting in (*fixed, *keys)]
    overrides.append("loss_fn.use_generation_logprobs_as_prev=false")
    return load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml", [*overrides, *options.overrides])


def sample_lengths(options: argparse.Namespace) -> list[int]:
    """Tokens of every sample, prompt included."""
    rng, prompt = np.random.default_rng(0), options.prompt_tokens
    response = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, options.samples)).astype(int)
    return [int(n) for n in np.clip(response, 1, options.max_tokens - prompt) + prompt]


class Contest:
    """Everyone scores and trains on the same batch, one update over all of it per turn."""

    def __init__(self, cfgs: dict[str, Config], samples: Samples) -> None:
        self._meta, columns = samples
        cfg = cfgs["padded"]
        coordinates = parallel_layout(cfg.policy).coordinates(0)
        ours = MegatronBackend(cfg.policy, PolicyObjective(cfg.loss_fn, TEMPERATURE), coordinates)
        plain = PlainLoop(cfg.policy, cfg.loss_fn)
        self._schedules = {kind: self._both_schedules(cfg.policy) for kind, cfg in cfgs.items()}
        self._contestants: dict[str, tuple[MegatronBackend | PlainLoop, str]] = {
            "plain_loop": (plain, "padded"),
            "plain_loop_sorted": (plain, "sorted"),
            **{kind: (ours, kind) for kind in cfgs},
        }
        prev = ours.logprobs(self._batch(columns), self._schedules["padded"]["logprobs"])
        self._train_batch = self._batch({**columns, PREV_LOGPROBS.name: prev.numpy()})

    def run(self, num_rounds: int) -> dict[str, object]:
        """Medians of tokens per second, prompt tokens included, and how they compare."""
        seconds: dict[str, dict[str, list[float]]] = {
            phase: {name: [] for name in self._contestants} for phase in PHASES
        }
        for _ in range(num_rounds + 1):
            for name in self._contestants:
                for phase in PHASES:
                    seconds[phase][name].append(self._seconds(name, phase))
        num_tokens = sum(self._meta.lengths)
        micro_batches = {kind: self._micro_batches(kind) for kind in self._schedules}
        return {
            "samples": len(self._meta),
            "tokens": num_tokens,
            "longest": max(self._meta.lengths),
            "micro_batches": {kind: len(specs) for kind, specs in micro_batches.items()},
            "computed_tokens": {
                kind: sum(spec.padded_length * (1 if kind in ONE_ROW else len(spec.rows)) for spec in specs)
                for kind, specs in micro_batches.items()
            },
            **{phase: _comparison(times, num_tokens) for phase, times in seconds.items()},
        }

    def _seconds(self, name: str, phase: str) -> float:
        who, kind = self._contestants[name]
        schedule = self._schedules[kind][phase]
        start = time.perf_counter()
        (who.train if phase == "train" else who.logprobs)(self._train_batch, schedule)
        return time.perf_counter() - start

    def _both_schedules(self, cfg: PolicyConfig) -> dict[str, Schedule]:
        sizes: dict[str, Any] = {"num_shards": 1, "global_batch_size": len(self._meta)}
        shards = {
            "logprobs": shard_for_logprobs(self._meta, strategy=logprob_strategy(cfg), **sizes),
            "train": shard_for_training(self._meta, strategy=train_strategy(cfg), **sizes),
        }
        return {phase: meta.schedule for phase, (meta,) in shards.items() if meta.schedule is not None}

    def _micro_batches(self, kind: str) -> tuple[MicroBatch, ...]:
        return self._schedules[kind]["train"].global_batches[0].micro_batches

    def _batch(self, columns: dict[str, np.ndarray]) -> PolicyBatch:
        values = {tag.name: list(self._meta.tag(tag)) for tag in (ADVANTAGE, SAMPLE_MASK)}
        return PolicyBatch(columns, self._meta.lengths, values, torch.device("cpu"))


class PlainLoop:
    """Scores and trains with one micro-batch after the other, written down directly."""

    def __init__(self, cfg: PolicyConfig, loss: LossConfig) -> None:
        self._plain = PlainModel(cfg, loss)

    @torch.no_grad()
    def logprobs(self, batch: PolicyBatch, schedule: Schedule) -> None:
        """Score every micro-batch."""
        for spec in schedule.global_batches[0].micro_batches:
            self._score(batch.micro_batch(spec, schedule))

    def train(self, batch: PolicyBatch, schedule: Schedule) -> None:
        """One update."""
        (update,) = schedule.global_batches
        for spec in update.micro_batches:
            inputs = batch.micro_batch(spec, schedule)
            prev = batch.columns[PREV_LOGPROBS.name][inputs.packed_index]
            advantages = batch.sample_values[ADVANTAGE.name][inputs.rows][inputs.sample_index]
            losses = self._plain.clipped_loss(self._score(inputs), prev, advantages)
            (losses.sum() / update.num_tokens).backward()
        self._plain.update()

    def _score(self, inputs: ModelInputs) -> torch.Tensor:
        """Log-probs of the scored tokens, from the logits of all."""
        logits = self._plain.model(input_ids=inputs.input_ids, use_cache=False).logits / TEMPERATURE
        logprobs = logits.log_softmax(-1).transpose(0, 1).flatten(0, 1)
        return logprobs[inputs.output_index, inputs.token_ids]


def _comparison(times: dict[str, list[float]], num_tokens: int) -> dict[str, object]:
    """The first round is warm-up."""
    median = {name: statistics.median(values[1:]) for name, values in times.items()}

    def ratio(of: str, to: str) -> float:
        return round(median[of] / median[to], 3)

    return {
        "tokens_per_s": {name: round(num_tokens / value) for name, value in median.items()},
        "time_over_plain": {
            "padded": ratio("padded", "plain_loop"),
            "sorted": ratio("sorted", "plain_loop_sorted"),
        },
        "speed_over_padded": {kind: ratio("padded", kind) for kind in KINDS},
        "speed_over_sorted": {kind: ratio("sorted", kind) for kind in KINDS},
    }


if __name__ == "__main__":
    sys.exit(main())
