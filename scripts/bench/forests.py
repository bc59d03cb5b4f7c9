#!/usr/bin/env python
"""What it saves that tokens which samples have in common enter the model once.

    python scripts/bench/forests.py [--rounds 5] [--groups 8] [--prompts 16,128,512] [--answer-tokens 128]

Each case is a batch of random tokens that one Megatron-core worker scores and trains on in two ways, in turn:
``once`` as a forest, and ``apart`` with every path as a sample of its own:

    prompt P     groups of four samples of a prompt of P tokens, with answers of --answer-tokens
    sessions     sessions of an agent with six calls: two calls; two sub-agents with the system prompt and a
                 task of their own; and after a compaction, which keeps system prompt and task, two more

Both train on the same tokens. Prints JSON by case: tokens that enter the model (``distinct`` is the least
there could be), seconds of scoring and of training (medians), peak memory, and ``gained``: by how much
training is faster, as a part of what there are fewer tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from nemo_like.batch.columns import INPUT_IDS, PARENT_GAPS, PREV_LOGPROBS, RESPONSE_MASK
from nemo_like.batch.forest import ROOT, Forest, TokenRun
from nemo_like.batch.meta import Chunk, KVBatchMeta, Schedule
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.batch.tags import ADVANTAGE, GROUP_ID, NUM_PROMPT_TOKENS, NUM_RESPONSE_TOKENS, SAMPLE_MASK
from nemo_like.configuration import Config
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.megatron.backend import MegatronBackend
from scripts.bench.arguments import at_least
from scripts.bench.long_samples import configuration, peak_bytes
from scripts.bench.random_inputs import random_model

VOCABULARY = 1024
SAMPLES_PER_GROUP = 4
SYSTEM, TASK, RESULT, ANSWER = 200, 100, 60, 40  # tokens of sessions
PHASES = ("logprobs", "train")


@dataclass(frozen=True)
class Sample:
    """A sample's forest, which of its tokens train, and with how many it begins that its group has in
    common."""

    forest: Forest
    trains: list[bool]
    num_common: int


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, help="turns of each, after one that is not counted"
    )
    parser.add_argument("--groups", type=at_least(1), default=8)
    parser.add_argument("--prompts", type=lambda text: [int(one) for one in text.split(",")], default=None)
    parser.add_argument("--answer-tokens", type=at_least(1), default=128)
    parser.add_argument("--threads", type=at_least(1), default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = {
        f"prompt {tokens}": SAMPLES_PER_GROUP * [answered(tokens, options.answer_tokens)]
        for tokens in options.prompts or (16, 128, 512)
    }
    cases["sessions"] = [session()]
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        longest = 2 * max(sample.forest.num_tokens for group in cases.values() for sample in group)
        contest = Contest(random_model(Path(directory), longest, VOCABULARY, num_layers=4), longest)
        report = {
            name: contest.compare(group, options.groups, options.rounds) for name, group in cases.items()
        }
        print(json.dumps(report, indent=2))
        dist.destroy_process_group()
    return 0


def answered(prompt_tokens: int, answer_tokens: int) -> Sample:
    """Return a sample of a prompt and an answer."""
    trains = [False] * prompt_tokens + [True] * answer_tokens
    return Sample(Forest((TokenRun(len(trains)),)), trains, prompt_tokens)


def session() -> Sample:
    """Return an agent's session of six calls."""
    call = ([False] * RESULT + [True] * ANSWER) * 2
    of_system, of_prompt = SYSTEM - 1, SYSTEM + TASK - 1  # last tokens
    sub_agent = [False] * TASK + [True] * ANSWER
    runs = [
        (ROOT, [False] * (SYSTEM + TASK) + call[RESULT:]),
        (of_system, sub_agent),
        (of_system, sub_agent),
        (of_prompt, call),  # the summary takes the place of what the calls brought
    ]
    forest = Forest(tuple(TokenRun(len(trains), parent) for parent, trains in runs))
    return Sample(forest, [one for _, trains in runs for one in trains], SYSTEM + TASK)


def apart(sample: Sample) -> list[Sample]:
    """Return a sample for each run, with its whole path, of which the run's own tokens train."""
    found = []
    for run, path in zip(sample.forest.runs, sample.forest.paths(), strict=True):
        places = [token for piece in path for token in range(*piece)]
        trains = [sample.trains[token] and token >= path[-1].start for token in places]
        assert len(places) >= run.length
        found.append(Sample(Forest((TokenRun(len(places)),)), trains, 0))
    return found


class Contest:
    """One worker, which scores and trains on the same tokens in both ways."""

    def __init__(self, model: Path, longest: int) -> None:
        sharing = {"once": "true", "apart": "false"}
        self._cfgs: dict[str, Config] = {
            name: configuration(model, 4 * longest, [f"policy.sequence_packing.share_prompts={value}"])
            for name, value in sharing.items()
        }
        cfg = self._cfgs["once"]
        coordinates = parallel_layout(cfg.policy).coordinates(0)
        self._policy = MegatronBackend(cfg.policy, PolicyObjective(cfg.loss_fn, 1.0), coordinates)

    def compare(self, group: list[Sample], num_groups: int, num_rounds: int) -> dict[str, Any]:
        """Return what both ways take for a batch of groups like this one."""
        ways = {
            "once": self._work("once", [group] * num_groups),
            "apart": self._work("apart", [[one for sample in group for one in apart(sample)]] * num_groups),
        }
        seconds: dict[str, dict[str, list[float]]] = {way: {phase: [] for phase in PHASES} for way in ways}
        peaks: dict[str, dict[str, int]] = {way: dict.fromkeys(PHASES, 0) for way in ways}
        for _ in range(num_rounds + 1):
            for way, work in ways.items():
                for phase in PHASES:
                    start = time.perf_counter()
                    peak = peak_bytes(partial(self._run, phase, work))
                    seconds[way][phase].append(time.perf_counter() - start)
                    peaks[way][phase] = max(peaks[way][phase], peak)
        entering = {way: _num_entering(work["train"]) for way, work in ways.items()}
        common = group[0].num_common * (len(group) - 1)
        distinct = num_groups * (sum(sample.forest.num_tokens for sample in group) - common)
        median = {
            way: {phase: statistics.median(values[1:]) for phase, values in phases.items()}
            for way, phases in seconds.items()
        }
        fewer = entering["apart"] / entering["once"]
        faster = {phase: median["apart"][phase] / median["once"][phase] for phase in PHASES}
        return {
            "tokens": {"distinct": distinct, **entering},
            "seconds": median,
            "peak_mib": {
                way: {phase: round(peak / 2**20) for phase, peak in of_way.items()}
                for way, of_way in peaks.items()
            },
            "fewer_tokens": round(fewer, 3),
            "faster": {phase: round(value, 3) for phase, value in faster.items()},
            "gained": round(faster["train"] / fewer, 3),
        }

    def _run(self, phase: str, work: dict[str, Any]) -> None:
        getattr(self._policy, phase)(work["batch"], work[phase])

    def _work(self, way: str, groups: list[list[Sample]]) -> dict[str, Any]:
        """Return the batch of these groups, and its schedules."""
        samples = [sample for group in groups for sample in group]
        meta, columns = _batch(groups)
        values = {tag.name: list(meta.tag(tag)) for tag in (ADVANTAGE, SAMPLE_MASK)}
        policy = self._cfgs[way].policy
        sizes: dict[str, Any] = {"num_shards": 1, "global_batch_size": len(samples)}
        (scored,) = shard_for_logprobs(meta, strategy=logprob_strategy(policy), **sizes)
        (trained,) = shard_for_training(meta, strategy=train_strategy(policy), **sizes)
        batch = PolicyBatch(columns, meta.lengths, values, torch.device("cpu"))
        return {"batch": batch, "logprobs": scored.schedule, "train": trained.schedule}


def _batch(groups: list[list[Sample]]) -> tuple[KVBatchMeta, dict[str, np.ndarray]]:
    """Return random tokens of these samples; those of a group begin alike."""
    rng = np.random.default_rng(0)
    samples = [sample for group in groups for sample in group]
    lengths = tuple(sample.forest.num_tokens for sample in samples)
    ids = []
    for group in groups:
        common = rng.integers(0, VOCABULARY, max(sample.num_common for sample in group))
        for sample in group:
            own = rng.integers(0, VOCABULARY, sample.forest.num_tokens)
            own[: sample.num_common] = common[: sample.num_common]
            ids.append(own)
    gaps = [
        [token - 1 - parent for token, parent in enumerate(sample.forest.parents())] for sample in samples
    ]
    columns: dict[str, np.ndarray] = {
        INPUT_IDS.name: np.concatenate(ids).astype(np.int32),
        RESPONSE_MASK.name: np.concatenate([sample.trains for sample in samples]).astype(np.uint8),
        PREV_LOGPROBS.name: np.zeros(sum(lengths), np.float32),
    }
    if any(map(any, gaps)):
        columns[PARENT_GAPS.name] = np.concatenate(gaps).astype(np.int32)
    numbers = [number for number, group in enumerate(groups) for _ in group]
    tags: dict[str, tuple[Any, ...]] = {
        SAMPLE_MASK.name: (1.0,) * len(samples),
        NUM_RESPONSE_TOKENS.name: tuple(sum(sample.trains) for sample in samples),
        NUM_PROMPT_TOKENS.name: tuple(sample.num_common for sample in samples),
        GROUP_ID.name: tuple(numbers),
        ADVANTAGE.name: tuple(float(value) for value in rng.normal(size=len(samples))),
    }
    meta = KVBatchMeta(
        partition="bench",
        chunks=(Chunk("all", lengths),),
        rows=tuple((0, row) for row in range(len(samples))),
        columns=frozenset(),
        tags=tags,
    )
    return meta, columns


def _num_entering(schedule: Schedule) -> int:
    return sum(one.padded_length for update in schedule.global_batches for one in update.micro_batches)


if __name__ == "__main__":
    sys.exit(main())
