#!/usr/bin/env python
"""Tokens per second of the policy's log-prob and training phases against a plain Hugging Face loop.

    python scripts/bench/policy.py [--model DIR] [--rounds 7] [--samples 64] [key=value ...]

One batch with lengths like those of rollouts (log-normal, cut at the limit), scored and trained on in
turn by the plain loop and by one Megatron-core worker with several kinds of micro-batches:

    in_order  so many samples as they come, padded to their longest
    padded    so many samples of like length, padded to their longest: the default
    dynamic   samples of like length, as many as a token budget holds once padded
    packed    as many samples as the budget holds end to end

The budget is what in_order and padded may need: micro-batch size x longest sample. The plain loop has the
micro-batches of padded. Prints JSON: medians over the rounds, and ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from nemo_like.config.loader import load_config
from nemo_like.config.schema import LossConfig, PolicyConfig
from nemo_like.data_plane.batching import Strategy, dynamic_batches, fixed_size, sequence_packing
from nemo_like.data_plane.columns import INPUT_IDS, PREV_LOGPROBS, RESPONSE_MASK
from nemo_like.data_plane.meta import Chunk, KVBatchMeta, Schedule
from nemo_like.data_plane.sharding import shard_for_logprobs, shard_for_training
from nemo_like.policy.batch import ModelInputs, PolicyBatch
from nemo_like.policy.interfaces import ADVANTAGE, SAMPLE_MASK
from nemo_like.policy.layout import parallel_layout
from nemo_like.policy.megatron.backend import MegatronPolicy

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 16
# Of the response lengths: most are short, a few reach the limit.
MEDIAN_TOKENS, SIGMA = 90, 1.0
TEMPERATURE = 1.0
# The plain loop's place among what is measured.
PLAIN = "plain_loop"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: a random small Qwen3)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, after one that is not counted")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=1024, help="prompt and response of the longest")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples of a padded micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or random_model(Path(directory), options.max_tokens)
        arguments = [f"policy.model_name={model}", "policy.data_parallel_size=1", *options.overrides]
        cfg = load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml", arguments)
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        contest = Contest(cfg.policy, cfg.loss_fn, random_samples(model, options), options.micro_batch)
        print(json.dumps(contest.run(options.rounds), indent=2))
        dist.destroy_process_group()
    return 0


def random_model(directory: Path, max_tokens: int) -> Path:
    """A Qwen3 of a million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    return directory / "model"


def random_samples(model: Path, options: argparse.Namespace) -> tuple[KVBatchMeta, dict[str, np.ndarray]]:
    """A batch of random tokens and its columns."""
    rng = np.random.default_rng(0)
    response = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, options.samples)).astype(int)
    lengths = [int(n) for n in np.clip(response, 1, options.max_tokens - PROMPT_TOKENS) + PROMPT_TOKENS]
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    mask = np.concatenate([np.r_[np.zeros(PROMPT_TOKENS), np.ones(n - PROMPT_TOKENS)] for n in lengths])
    meta = KVBatchMeta(
        partition="bench",
        chunks=(Chunk("all", tuple(lengths)),),
        rows=tuple((0, row) for row in range(len(lengths))),
        columns=frozenset(),
        tags={
            SAMPLE_MASK: (1.0,) * len(lengths),
            "num_response_tokens": tuple(n - PROMPT_TOKENS for n in lengths),
            ADVANTAGE: tuple(float(value) for value in rng.normal(size=len(lengths))),
        },
    )
    ids = rng.integers(0, vocabulary, sum(lengths)).astype(np.int32)
    return meta, {INPUT_IDS.name: ids, RESPONSE_MASK.name: mask.astype(np.uint8)}


class Contest:
    """Everyone scores and trains on the same batch, one update over all of it per turn."""

    def __init__(
        self,
        cfg: PolicyConfig,
        loss: LossConfig,
        samples: tuple[KVBatchMeta, dict[str, np.ndarray]],
        micro_batch_size: int,
    ) -> None:
        self._meta, columns = samples
        self._policy = MegatronPolicy(cfg, loss, parallel_layout(cfg).coordinates(0), TEMPERATURE)
        self._plain = PlainLoop(cfg, loss)
        longest = max(self._meta.lengths)
        budget = micro_batch_size * longest
        self._strategies: dict[str, Strategy] = {
            "in_order": Strategy(
                lambda lengths: [_in_order(len(rank), micro_batch_size) for rank in lengths]
            ),
            "padded": fixed_size(micro_batch_size),
            "dynamic": dynamic_batches(budget),
            "packed": sequence_packing(budget),
        }
        batch = self._batch(columns)
        prev = self._policy.logprobs(batch, self._schedule("padded", shard_for_logprobs))
        self._train_batch = self._batch({**columns, PREV_LOGPROBS.name: prev.numpy()})

    def run(self, num_rounds: int) -> dict[str, object]:
        """Medians of tokens per second, prompt tokens included, and how they compare."""
        seconds: dict[str, dict[str, list[float]]] = {
            phase: {name: [] for name in (PLAIN, *self._strategies)} for phase in ("logprobs", "train")
        }
        for _ in range(num_rounds + 1):
            for name in (PLAIN, *self._strategies):
                seconds["logprobs"][name].append(_seconds(self._scoring(name)))
                seconds["train"][name].append(_seconds(self._training(name)))
        num_tokens = sum(self._meta.lengths)
        return {
            "samples": len(self._meta),
            "tokens": num_tokens,
            "longest": max(self._meta.lengths),
            "micro_batches": {
                name: self._schedule(name, shard_for_training).num_microbatches[0]
                for name in self._strategies
            },
            **{phase: _comparison(times, num_tokens) for phase, times in seconds.items()},
        }

    def _scoring(self, name: str) -> Callable[[], object]:
        if name == PLAIN:
            schedule = self._schedule("padded", shard_for_logprobs)
            return lambda: self._plain.logprobs(self._train_batch, schedule)
        schedule = self._schedule(name, shard_for_logprobs)
        return lambda: self._policy.logprobs(self._train_batch, schedule)

    def _training(self, name: str) -> Callable[[], object]:
        if name == PLAIN:
            schedule = self._schedule("padded", shard_for_training)
            return lambda: self._plain.train(self._train_batch, schedule)
        schedule = self._schedule(name, shard_for_training)
        return lambda: self._policy.train(self._train_batch, schedule)

    def _schedule(self, name: str, shard: Callable[..., tuple[KVBatchMeta, ...]]) -> Schedule:
        strategy = self._strategies[name]
        (meta,) = shard(self._meta, num_shards=1, global_batch_size=len(self._meta), strategy=strategy)
        assert meta.schedule is not None
        return meta.schedule

    def _batch(self, columns: dict[str, np.ndarray]) -> PolicyBatch:
        values = {name: list(self._meta.numbers(name)) for name in (ADVANTAGE, SAMPLE_MASK)}
        return PolicyBatch(columns, self._meta.lengths, values, torch.device("cpu"))


class PlainLoop:
    """A Hugging Face model, torch's AdamW, and the clipped loss, written down directly."""

    def __init__(self, cfg: PolicyConfig, loss: LossConfig) -> None:
        self._cfg, self._loss = cfg, loss
        self._model = AutoModelForCausalLM.from_pretrained(cfg.model_name, dtype=torch.float32)
        adam = cfg.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            weight_decay=adam.weight_decay,
        )

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
            advantages = batch.sample_values[ADVANTAGE][inputs.rows][inputs.sample_index]
            ratio = (self._score(inputs) - prev).exp()
            clipped = ratio.clamp(1 - self._loss.ratio_clip_min, 1 + self._loss.ratio_clip_max)
            (-torch.minimum(ratio * advantages, clipped * advantages).sum() / update.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._cfg.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _score(self, inputs: ModelInputs) -> torch.Tensor:
        """Log-probs of the scored tokens, from the logits of all."""
        logits = self._model(input_ids=inputs.input_ids, use_cache=False).logits / TEMPERATURE
        logprobs = logits.log_softmax(-1)
        scored = logprobs[:, :-1].gather(2, inputs.input_ids[:, 1:, None])[..., 0]
        return scored.t().flatten()[inputs.output_index]


def _in_order(num_samples: int, size: int) -> list[list[int]]:
    return [list(range(first, min(first + size, num_samples))) for first in range(0, num_samples, size)]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _comparison(times: dict[str, list[float]], num_tokens: int) -> dict[str, object]:
    """The first round is warm-up."""
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        "tokens_per_s": {name: round(num_tokens / value) for name, value in median.items()},
        "padded_time_over_plain": round(median["padded"] / median[PLAIN], 3),
        "dynamic_speed_over_padded": round(median["padded"] / median["dynamic"], 3),
        "packed_speed_over_padded": round(median["padded"] / median["packed"], 3),
        "packed_speed_over_in_order": round(median["in_order"] / median["packed"], 3),
    }


if __name__ == "__main__":
    sys.exit(main())
