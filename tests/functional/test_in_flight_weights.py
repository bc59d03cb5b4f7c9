"""Weights that come while samples are under way: which version sampled which token, and by which values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.batch.columns import POLICY_VERSIONS
from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.generation.interface import EngineJournal, EngineStats, GroupRequest, GroupResult, VersionSpan
from nemo_like.generation.options import KvCacheAfterUpdate, WeightTransport
from nemo_like.generation.sampling import SamplingSettings
from tests.functional.generation_fixtures import (
    TIMEOUT_S,
    collector_spec,
    engine_kwargs,
    engine_spec,
    make_checkpoint,
    move_weights,
    reference_logprobs,
    stage_spec,
)
from tests.functional.journals import added, events_of, taken, write_journal
from tests.functional.renewed import renew, renewable

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nobody_dies")]

# Longer than a block of the KV cache: keys and values that outlive an update would show.
PROMPT = tuple(2 + (7 * i) % 60 for i in range(33))
NUM_TOKENS = 60  # nothing ends a response earlier
SAMPLING = SamplingSettings(1.0, 1.0, 0, NUM_TOKENS, ())


def request(name: str, first_seed: int = 0, num_responses: int = 4) -> GroupRequest:
    return GroupRequest(name, PROMPT, tuple(range(first_seed, first_seed + num_responses)))


@dataclasses.dataclass
class Run:
    """An engine, its trainer and its sink."""

    cluster: Cluster
    engine: ActorHandle
    trainer: ActorHandle
    sink: ActorHandle

    def all(self, calls: Sequence[Call]) -> list:
        return self.cluster.gather(calls, stage="test", timeout_s=TIMEOUT_S)

    def call(self, method: str, *args: Any) -> Any:
        return self.all([self.engine.submit(method, *args)])[0]

    def submit(self, *requests: GroupRequest) -> None:
        self.call("submit", requests, SAMPLING, self.sink)

    def push(self, *versions: int) -> list[Call]:
        """Train and send these versions, one after the other; return without waiting."""
        methods = [(method, version) for version in versions for method in ("update", "push_weights")]
        return [self.trainer.submit(*call) for call in methods]

    def wait_for(self, *requests: GroupRequest) -> list[GroupResult]:
        names = [one.request_id for one in requests]
        return self.all([self.sink.submit("wait_for", names, TIMEOUT_S)])[0]

    def received(self) -> list[str]:
        return self.all([self.sink.submit("received")])[0]

    def stats(self) -> EngineStats:
        return self.call("stats")


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def versions(checkpoint: Path) -> list[torch.nn.Module]:
    """The policy as version 0, 1 and 2."""
    models = []
    for version in range(3):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        for seed in range(version + 1):
            move_weights(model, seed)
        models.append(model)
    return models


@pytest.fixture(scope="module")
def run(ray_of_engines: None, checkpoint: Path) -> Iterator[Run]:
    """The actors, of which the engine is another for each test."""
    cluster = Cluster()
    options = {"weight_updates": WeightUpdates.in_flight}
    engine = renewable(engine_spec(checkpoint, "renewed", **options))
    trainer = stage_spec(checkpoint, "trainer", 0, 1, WeightTransport.auto)
    yield Run(cluster, *(cluster.start(one) for one in (engine, trainer, collector_spec("sink"))))
    cluster.stop()


@pytest.fixture
def start(run: Run, checkpoint: Path) -> Start:
    """Starts an engine in the place of the one before, with a trainer at version 0 and an empty sink."""

    def started(name: str, journal: EngineJournal | None = None, **options: Any) -> Run:
        run.all([renew(run.engine, engine_spec(checkpoint, name, **options))])
        run.all([run.trainer.submit("reset"), run.sink.submit("forget")])
        run.all([run.trainer.submit("connect", [run.engine])])
        if journal is not None:
            run.call("open_journal", journal)
        return run

    return started


def expected_logprobs(
    models: Sequence[torch.nn.Module], cache: KvCacheAfterUpdate, token_ids: np.ndarray, first: Sequence[int]
) -> np.ndarray:
    """What Hugging Face says of a response when ``models[i]`` goes on at its token ``first[i]``."""
    if cache is KvCacheAfterUpdate.recompute:
        parts = np.split(np.arange(len(token_ids)), first[1:])
        scores = [reference_logprobs(model, PROMPT, token_ids) for model in models]
        return np.concatenate([score[part] for score, part in zip(scores, parts, strict=True)])
    ids = torch.tensor([[*PROMPT, *token_ids.tolist()]])
    values, logits, begin = None, [], 0
    for model, end in zip(models, [*first[1:], len(token_ids)], strict=True):
        stop = len(PROMPT) + end - 1
        with torch.no_grad():
            output = model(ids[:, begin:stop], past_key_values=values, use_cache=True)
        values, begin = output.past_key_values, stop
        logits.append(output.logits[0])
    logprobs = torch.cat(logits)[len(PROMPT) - 1 :].log_softmax(-1)
    return logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()


def assert_same(first: Sequence[GroupResult], second: Sequence[GroupResult]) -> None:
    """Bit for bit: tokens, log-probs and versions."""
    for one, other in zip(first, second, strict=True):
        assert (one.request_id, one.policy_version) == (other.request_id, other.policy_version)
        for got, expected in zip(one.responses, other.responses, strict=True):
            assert got.token_ids.tobytes() == expected.token_ids.tobytes()
            assert got.logprobs.tobytes() == expected.logprobs.tobytes()
            versions = [sample.columns[POLICY_VERSIONS.name].tobytes() for sample in (got, expected)]
            assert versions[0] == versions[1]


EARLY, LATE = request("early"), request("late", 100)


def updated_under_way(
    start: Start,
    checkpoint: Path,
    versions: Sequence[torch.nn.Module],
    folder: Path,
    cache: KvCacheAfterUpdate,
) -> tuple[Run, dict[str, Any], list[GroupResult]]:
    """Have an engine take versions at given steps of ``EARLY`` and ``LATE``, and check what it sampled.

    Its journal is ``first.jsonl`` in the folder. Returns the run, the engine's options and the results.
    """
    options = {
        "weight_updates": WeightUpdates.in_flight,
        "kv_cache_after_update": cache,
        "max_num_seqs": 8,
    }
    by_hand = write_journal(
        folder / "by_hand.jsonl",
        engine_kwargs(checkpoint, "first", **options),
        [taken(0, 0), added(0, SAMPLING, EARLY), taken(20, 1), added(20, SAMPLING, LATE), taken(45, 2)],
    )
    run = start("first", journal=EngineJournal(str(folder / "first.jsonl"), by_hand), **options)
    run.submit(LATE, EARLY)
    run.all(run.push(0, 1, 2))
    results = run.wait_for(EARLY, LATE)
    for result, first in zip(results, ([0, 20, 45], [0, 25]), strict=True):
        models, numbers = versions[-len(first) :], range(3)[-len(first) :]
        lengths = np.diff([*first, NUM_TOKENS])
        assert result.policy_version == 2
        assert result.version_spans() == (VersionSpan(numbers[0], 2),) * 4
        for response in result.responses:
            assert response.columns[POLICY_VERSIONS.name].tolist() == np.repeat(numbers, lengths).tolist()
            expected = expected_logprobs(models, cache, response.token_ids, first)
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
    assert run.stats().tokens_by_version == {0: 4 * 20, 1: 4 * (25 + 25), 2: 4 * (15 + 35)}
    return run, options, results


def test_samples_under_way_keep_what_older_weights_computed(
    start: Start, checkpoint: Path, versions: list[torch.nn.Module], tmp_path: Path
) -> None:
    updated_under_way(start, checkpoint, versions, tmp_path, KvCacheAfterUpdate.keep)


@pytest.mark.parametrize(
    "cache",
    [KvCacheAfterUpdate.recompute, pytest.param(KvCacheAfterUpdate.keep, marks=pytest.mark.slow)],
    ids=lambda cache: cache.value,
)
def test_samples_under_way_go_on_with_new_weights_and_a_replay_repeats_them(
    start: Start, checkpoint: Path, versions: list[torch.nn.Module], tmp_path: Path, cache: KvCacheAfterUpdate
) -> None:
    run, options, results = updated_under_way(start, checkpoint, versions, tmp_path, cache)

    # The journal is over: what comes now happens when it comes, and is written too.
    lost = request("lost", 200)
    more = [request(f"more-{i}", 300 + 10 * i) for i in range(6)]
    run.submit(*more[:3], lost)
    update = run.push(3)
    run.submit(*more[3:])
    run.call("abort", ["lost"])
    run.all(update)
    results += run.wait_for(*more)
    run.call("flush_journal")

    own = tmp_path / "first.jsonl"
    again = start("second", journal=EngineJournal(str(tmp_path / "second.jsonl"), str(own)), **options)
    updates = again.push(0, 1, 2, 3)
    for one in reversed([EARLY, LATE, *more, lost]):
        again.submit(one)
    again.call("abort", ["lost"])
    assert_same(again.wait_for(EARLY, LATE, *more), results)
    again.all(updates)
    again.call("flush_journal")
    assert events_of(tmp_path / "second.jsonl") == events_of(own)
    assert "lost" not in again.received()


@pytest.mark.slow
@pytest.mark.parametrize("cache", KvCacheAfterUpdate, ids=lambda cache: cache.value)
def test_samples_under_way_whose_tokens_are_drafted_go_on_with_new_weights_and_a_replay_repeats_them(
    start: Start, checkpoint: Path, versions: list[torch.nn.Module], tmp_path: Path, cache: KvCacheAfterUpdate
) -> None:
    """The draft, which keeps its weights and reads with keys and values of its own, changes no log-prob."""
    drafts = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(checkpoint)}
    options: dict[str, Any] = {
        "weight_updates": WeightUpdates.in_flight,
        "kv_cache_after_update": cache,
        "max_num_seqs": 8,
        "vllm_kwargs": {"speculative_config": drafts},
    }
    by_hand = write_journal(
        tmp_path / "by_hand.jsonl",
        engine_kwargs(checkpoint, "drafts", **options),
        [taken(0, 0), added(0, SAMPLING, EARLY), taken(15, 1), taken(25, 2)],
    )
    run = start("drafts", journal=EngineJournal(str(tmp_path / "first.jsonl"), by_hand), **options)
    run.submit(EARLY)
    run.all(run.push(0, 1, 2))
    results = run.wait_for(EARLY)
    for response in results[0].responses:
        numbers, first = np.unique(response.columns[POLICY_VERSIONS.name], return_index=True)
        assert numbers.tolist() == [0, 1, 2]
        expected = expected_logprobs(versions, cache, response.token_ids, first.tolist())
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
    of_first = [int(np.sum(one.columns[POLICY_VERSIONS.name] == 0)) for one in results[0].responses]
    assert sum(of_first) > 4 * 15  # tokens of 15 steps
    assert 0 < run.stats().num_kept_draft_tokens < run.stats().num_draft_tokens
    run.call("flush_journal")

    own = tmp_path / "first.jsonl"
    again = start("again", journal=EngineJournal(str(tmp_path / "second.jsonl"), str(own)), **options)
    updates = again.push(0, 1, 2)
    again.submit(EARLY)
    assert_same(again.wait_for(EARLY), results)
    again.all(updates)


FIRST, SECOND = request("first"), request("second", 50)
WAITING = [request(f"waiting-{i}", 100 + 10 * i) for i in range(10)]
NOT_ABORTED = [FIRST, SECOND, *(one for one in WAITING if one.request_id != "waiting-4")]


def updated_between_samples(
    start: Start, checkpoint: Path, folder: Path
) -> tuple[Run, dict[str, Any], list[GroupResult]]:
    """Have an engine take version 0 at step 70 and version 1 when no sample is under way.

    Its journal is ``between.jsonl`` in the folder. Returns the run, the engine's options and the results of
    ``NOT_ABORTED``.
    """
    options: dict[str, Any] = {"weight_updates": WeightUpdates.between_samples, "max_num_seqs": 8}
    by_hand = write_journal(
        folder / "by_hand.jsonl",
        engine_kwargs(checkpoint, "between", **options),
        [added(0, SAMPLING, FIRST), added(10, SAMPLING, SECOND), taken(70, 0)],
    )
    run = start("between", journal=EngineJournal(str(folder / "between.jsonl"), by_hand), **options)
    # The pause is granted after step 70, to which the engine gets by calls that come while the trainer waits.
    update = run.push(0)
    assert run.stats().policy_version == -1
    run.submit(FIRST)
    run.submit(*WAITING, SECOND)
    run.call("abort", ["waiting-4", "unknown"])
    run.all(update)

    # Now requests wait for others to end.
    update = run.push(1)
    results = run.wait_for(*NOT_ABORTED)
    run.all(update)
    return run, options, results


def test_between_samples_no_sample_has_two_versions_and_calls_come_through_or_are_refused(
    start: Start, checkpoint: Path, tmp_path: Path
) -> None:
    run, _, results = updated_between_samples(start, checkpoint, tmp_path)
    assert [result.policy_version for result in results[:2]] == [-1, -1]
    for result in results:
        assert set(result.version_spans()) == {VersionSpan(result.policy_version, result.policy_version)}
    assert {result.policy_version for result in results} == {-1, 0, 1}
    assert "waiting-4" not in run.received()
    stats = run.stats()
    assert stats.policy_version == 1
    assert sum(stats.tokens_by_version.values()) == stats.num_generated_tokens == 11 * 4 * NUM_TOKENS
    assert 0 < stats.draining_s < stats.generation_s
    assert stats.paused_s > 0
    assert stats.idle_s > 0

    # It refuses at once what it could not serve later.
    with pytest.raises(ActorFailed, match="has 96 tokens, which leaves no room for a response in 96"):
        run.submit(request("fine"), GroupRequest("too-long", (5,) * 96, (0,)))
    with pytest.raises(ActorFailed, match="'twice' is unfinished already"):
        run.submit(request("twice"), request("twice"))
    run.submit(request("twice"))
    run.wait_for(request("twice"))
    assert not {"fine", "too-long"} & set(run.received())


@pytest.mark.slow
def test_a_replay_of_updates_between_samples_repeats_them(
    start: Start, checkpoint: Path, tmp_path: Path
) -> None:
    run, options, results = updated_between_samples(start, checkpoint, tmp_path)
    run.call("flush_journal")
    journal = EngineJournal(str(tmp_path / "again.jsonl"), str(tmp_path / "between.jsonl"))
    again = start("again", journal=journal, **options)
    # The engine may have begun what was aborted.
    again.submit(*WAITING, SECOND, FIRST)
    again.call("abort", ["waiting-4"])
    again.all(again.push(0, 1))
    assert_same(again.wait_for(*NOT_ABORTED), results)
