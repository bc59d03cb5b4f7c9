#!/usr/bin/env python
"""Peak memory of scoring and training on one long sample, by its length and by the size of the vocabulary.

    python scripts/bench/long_samples.py [--lengths 8192,16384,32768] [--vocabularies 64,151936]
        [--kinds megatron,megatron_checkpointing,fsdp,fsdp_checkpointing,plain] [key=value ...]

Each kind scores and trains on a sample of random tokens, half of it prompt, with a tiny Qwen3 on the CPU:
the two backends, each also with activation checkpointing, and a plain loop of transformers that makes all
logits. The loop's lengths are --plain-lengths, since its logits alone take 20 GB at 32,768 tokens and
151,936 words.

A process per kind and vocabulary measures every length: the peak of its resident memory during a phase,
less what it had before, once the optimizer has its state. Prints JSON: these peaks, what each further token
takes from one length to the next, and ``growth``, the last of these figures over the first. It is 1 where
memory grows with the length, and nears 2 for lengths that double where memory grows with their square.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from nemo_like.batch.columns import PREV_LOGPROBS
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.batch.tags import ADVANTAGE, SAMPLE_MASK
from nemo_like.configuration import Config, load_config
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.fsdp.backend import FSDPBackend
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.megatron.backend import MegatronBackend
from scripts.bench.plain_model import PlainModel
from scripts.bench.random_inputs import Samples, random_model, random_samples

REPOSITORY = Path(__file__).resolve().parents[2]
BACKENDS = {
    "megatron": [],
    "megatron_checkpointing": [
        "policy.backend=megatron",
        "policy.megatron_cfg.activation_checkpointing=true",
    ],
    "fsdp": ["policy.backend=fsdp"],
    "fsdp_checkpointing": ["policy.backend=fsdp", "policy.fsdp_cfg.activation_checkpointing=true"],
}
PLAIN = "plain"
WARM_UP_TOKENS = 256
# Larger blocks are given back to the system when they are freed, so that every length begins with as little.
MMAP_THRESHOLD_BYTES = 1 << 18


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=_numbers, default=_numbers("8192,16384,32768"), help="tokens")
    parser.add_argument("--plain-lengths", type=_numbers, default=_numbers("512,1024,2048"), help="tokens")
    parser.add_argument("--vocabularies", type=_numbers, default=_numbers("64,151936"), help="words")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=[*BACKENDS, PLAIN])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    if unknown := set(options.kinds) - {*BACKENDS, PLAIN}:
        parser.error(f"--kinds: no {', '.join(sorted(unknown))}; choose of {', '.join([*BACKENDS, PLAIN])}")
    if min(len(options.lengths), len(options.plain_lengths)) < 2:
        parser.error("--lengths and --plain-lengths need two lengths at least")
    if options.one_process:
        print(json.dumps(measure(options)))
        return 0
    report = {
        f"vocabulary {words}": {kind: in_a_process(kind, words, options) for kind in options.kinds}
        for words in options.vocabularies
    }
    print(json.dumps(report, indent=2))
    return 0


def in_a_process(kind: str, words: int, options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Measure one kind and vocabulary in a process of its own."""
    lengths = options.plain_lengths if kind == PLAIN else options.lengths
    command = [sys.executable, __file__, "--one-process", "--kinds", kind, "--vocabularies", str(words)]
    command += ["--lengths", ",".join(map(str, lengths)), "--layers", str(options.layers)]
    command += ["--threads", str(options.threads), *options.overrides]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES)}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    peaks: dict[str, list[int]] = json.loads(run.stdout.splitlines()[-1])
    found = {phase: summary(lengths, of_lengths) for phase, of_lengths in peaks.items()}
    print(f"{kind}, vocabulary {words}: {found}", file=sys.stderr)
    return found


def summary(lengths: list[int], peaks: list[int]) -> dict[str, object]:
    """Return what is printed of a phase's peaks in bytes, one per length."""
    further = [
        (more - less) / (longer - shorter)
        for (shorter, less), (longer, more) in itertools.pairwise(zip(lengths, peaks, strict=True))
    ]
    return {
        "peak_mib": {length: round(peak / 2**20) for length, peak in zip(lengths, peaks, strict=True)},
        "bytes_per_further_token": [round(each) for each in further],
        "growth": round(further[-1] / further[0], 3) if further[0] else None,
    }


def measure(options: argparse.Namespace) -> dict[str, list[int]]:
    """Measure the only kind and vocabulary of ``options``; return each phase's peaks in bytes, by length."""
    torch.set_num_threads(options.threads)
    (kind,), (words,) = options.kinds, options.vocabularies
    longest = max(*options.lengths, WARM_UP_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        model = random_model(Path(directory), longest, words, options.layers)
        cfg = configuration(model, longest, [*BACKENDS.get(kind, []), *options.overrides])
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        subject = PlainLoop(cfg) if kind == PLAIN else Backend(cfg)
        phases = {"logprobs": subject.logprobs, "train": subject.train}
        peaks: dict[str, list[int]] = {phase: [] for phase in phases}
        for length in (WARM_UP_TOKENS, *options.lengths):
            samples = random_samples(model, [length], length // 2, group_size=1)
            subject.take(samples)
            for phase, run in phases.items():
                peaks[phase].append(peak_bytes(run))
        dist.destroy_process_group()
    return {phase: of_lengths[1:] for phase, of_lengths in peaks.items()}  # not the warm-up's


def configuration(model: Path, longest: int, overrides: list[str]) -> Config:
    """The demo's, for this model and one sample in a micro-batch."""
    fixed = {
        "policy.model_name": model,
        "policy.data_parallel_size": 1,
        "policy.max_total_sequence_length": longest,
        "policy.sequence_packing.share_prompts": "false",
        "policy.sequence_packing.train_mb_tokens": longest,
        "policy.sequence_packing.logprob_mb_tokens": longest,
        "loss_fn.use_generation_logprobs_as_prev": "false",
    }
    return load_config(
        REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml",
        [*(f"{key}={value}" for key, value in fixed.items()), *overrides],
    )


class Backend:
    """A training backend with a batch to work on."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg.policy
        kind = FSDPBackend if cfg.policy.backend == "fsdp" else MegatronBackend
        objective = PolicyObjective(cfg.loss_fn, temperature=1.0)
        self._policy = kind(cfg.policy, objective, parallel_layout(cfg.policy).coordinates(0))

    def take(self, samples: Samples) -> None:
        """Work on this batch from now on."""
        meta, columns = samples
        columns = {**columns, PREV_LOGPROBS.name: np.zeros(sum(meta.lengths), np.float32)}
        sizes: dict[str, Any] = {"num_shards": 1, "global_batch_size": len(meta)}
        (scored,) = shard_for_logprobs(meta, strategy=logprob_strategy(self._cfg), **sizes)
        (trained,) = shard_for_training(meta, strategy=train_strategy(self._cfg), **sizes)
        assert scored.schedule is not None and trained.schedule is not None
        self._scored, self._trained = scored.schedule, trained.schedule
        values = {tag.name: list(meta.tag(tag)) for tag in (ADVANTAGE, SAMPLE_MASK)}
        self._batch = PolicyBatch(columns, meta.lengths, values, torch.device("cpu"))

    def logprobs(self) -> None:
        """Score the batch."""
        self._policy.logprobs(self._batch, self._scored)

    def train(self) -> None:
        """Make one update on the batch."""
        self._policy.train(self._batch, self._trained)


class PlainLoop:
    """transformers and torch's AdamW, with the logits of all tokens."""

    def __init__(self, cfg: Config) -> None:
        self._plain = PlainModel(cfg.policy, cfg.loss_fn)

    def take(self, samples: Samples) -> None:
        """Work on this batch from now on."""
        _, columns = samples
        self._ids = torch.from_numpy(columns["input_ids"].astype(np.int64))[None]

    @torch.no_grad()
    def logprobs(self) -> None:
        """Score the batch."""
        self._score()

    def train(self) -> None:
        """Make one update on the batch."""
        logprobs = self._score()
        self._plain.clipped_loss(logprobs, torch.zeros_like(logprobs), torch.ones(())).mean().backward()
        self._plain.update()

    def _score(self) -> torch.Tensor:
        logits = self._plain.model(input_ids=self._ids, use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, self._ids[0, 1:, None])[:, 0]


def peak_bytes(run: Callable[[], None]) -> int:
    """Call ``run``; return the most resident memory that it took beyond what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident_bytes("VmRSS")
    run()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:")) << 10


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
