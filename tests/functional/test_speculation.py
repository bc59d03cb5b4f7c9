"""Real vLLM engines that draft: what they sample is the policy's, with its log-probs, whatever is drafted.

On CPUs vLLM's first model runner drafts; the second one, on GPUs, is read by
``unit/generation/test_vllm_internals.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.generation.interface import EngineStats, GroupRequest, GroupResult, PromptScores, Response
from nemo_like.generation.options import WeightTransport
from nemo_like.generation.sampling import SamplingSettings
from scripts.demo_model.tiny_tokenizer import save_tokenizer
from tests.functional.generation_fixtures import (
    TIMEOUT_S,
    VOCAB_SIZE,
    collector_spec,
    engine_spec,
    make_checkpoint,
    reference_logprobs,
    stage_spec,
)

# The first test of the module also waits for its engines.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nobody_dies")]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
PROMPT = (4, 9, 13, 21, 8, 30, 4, 9)
# Nothing ends a response early.
SAMPLED = SamplingSettings(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=24)
GREEDY = dataclasses.replace(SAMPLED, temperature=0.0)


@dataclasses.dataclass
class Drafting:
    """An engine that drafts by the sample's own tokens, one that drafts by a model, and a trainer that is
    connected to the second one."""

    cluster: Cluster
    by_tokens: ActorHandle
    by_model: ActorHandle
    trainer: ActorHandle
    sink: ActorHandle

    def generate(
        self, engine: ActorHandle, requests: Sequence[GroupRequest], sampling: SamplingSettings = SAMPLED
    ) -> list[GroupResult]:
        self.call(engine.submit("submit", requests, sampling, self.sink))
        return self.call(self.sink.submit("wait_for", [one.request_id for one in requests], TIMEOUT_S))

    def stats(self, engine: ActorHandle) -> EngineStats:
        return self.call(engine.submit("stats"))

    def call(self, call: Call) -> Any:
        return self.cluster.gather([call], stage="test", timeout_s=TIMEOUT_S)[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("tied"), tied=True)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def drafting(ray_of_engines: None, checkpoint: Path) -> Iterator[Drafting]:
    # The policy's own checkpoint drafts, so that many drafts are kept.
    by_model = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(checkpoint)}
    cluster = Cluster()
    try:
        one = Drafting(
            cluster,
            cluster.start(spec(checkpoint, "by-tokens", NGRAM, tokenizer_name=str(checkpoint))),
            cluster.start(spec(checkpoint, "by-model", by_model)),
            cluster.start(stage_spec(checkpoint, "trainer", 0, 1, WeightTransport.auto)),
            cluster.start(collector_spec()),
        )
        one.call(one.trainer.submit("connect", [one.by_model]))
        yield one
    finally:
        cluster.stop()


@pytest.fixture(params=["by_tokens", "by_model"])
def engine(request: pytest.FixtureRequest, drafting: Drafting) -> ActorHandle:
    return getattr(drafting, request.param)


def spec(checkpoint: Path, name: str, drafts: Mapping[str, Any], **options: Any) -> Any:
    return engine_spec(checkpoint, name, vllm_kwargs={"speculative_config": drafts}, **options)


def requests(name: str, num_requests: int, num_responses: int = 8) -> list[GroupRequest]:
    """Prompts of different lengths; one has all its tokens but one in a whole block of the KV cache."""
    rng = np.random.default_rng(num_requests)
    lengths = [33, *(3 + i for i in range(num_requests - 1))]
    return [
        GroupRequest(
            f"{name}-{i}",
            tuple(rng.integers(2, VOCAB_SIZE, size=length).tolist()),
            tuple(range(1000 * i, 1000 * i + num_responses)),
        )
        for i, length in enumerate(lengths)
    ]


def kept_and_drafted(before: EngineStats, after: EngineStats) -> tuple[int, int]:
    return (
        after.num_kept_draft_tokens - before.num_kept_draft_tokens,
        after.num_draft_tokens - before.num_draft_tokens,
    )


def test_every_token_has_the_policys_logprob_whether_it_was_drafted_or_not(
    drafting: Drafting, engine: ActorHandle, model: torch.nn.Module
) -> None:
    before = drafting.stats(engine)
    asked = requests(f"logprobs-{engine.name}", 12)
    results = drafting.generate(engine, asked)
    for request, result in zip(asked, results, strict=True):
        for response in result.responses:
            expected = reference_logprobs(model, request.prompt_ids, response.token_ids, temperature=0.7)
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)
    kept, drafted = kept_and_drafted(before, drafting.stats(engine))
    assert 0 < kept < drafted


def test_the_most_likely_tokens_are_those_without_drafts(
    drafting: Drafting, engine: ActorHandle, model: torch.nn.Module
) -> None:
    asked = requests(f"greedy-{engine.name}", 6, num_responses=1)
    for request, result in zip(asked, drafting.generate(engine, asked, GREEDY), strict=True):
        ids = list(request.prompt_ids)
        for _ in range(GREEDY.max_new_tokens):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert result.responses[0].token_ids.tolist() == ids[len(request.prompt_ids) :]


def test_a_seed_gives_the_same_samples_whatever_else_is_in_the_batch(
    drafting: Drafting, engine: ActorHandle
) -> None:
    crowd = requests(f"crowd-{engine.name}", 24)
    together = drafting.generate(engine, crowd)
    for place in (0, 5, 23):
        again = dataclasses.replace(crowd[place], request_id=f"alone-{engine.name}-{place}")
        [alone] = drafting.generate(engine, [again])
        for one, other in zip(alone.responses, together[place].responses, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


def places_in_the_distribution(
    model: torch.nn.Module, prompt: Sequence[int], response: Response, rng: np.random.Generator
) -> np.ndarray:
    """[L], of each token a random place in the part of [0, 1] that it has, when the tokens are laid out from
    the most likely one on, each as long as its probability is great.

    If tokens come from this distribution, the places are uniform and independent.
    """
    ids = torch.tensor([[*prompt, *response.token_ids.tolist()]])
    with torch.no_grad():
        probs = (model(ids).logits[0, len(prompt) - 1 : -1] / SAMPLED.temperature).softmax(-1).double()
    own = probs.gather(1, ids[0, len(prompt) :, None])
    below = torch.where(probs > own, probs, 0.0).sum(-1)
    return (below + own[:, 0] * torch.from_numpy(rng.random(len(below)))).numpy()


def test_samples_are_drawn_from_the_policys_distribution(
    drafting: Drafting, engine: ActorHandle, model: torch.nn.Module
) -> None:
    """With right samples this chi-square is above the limit once in ten thousand seeds, and the seed is
    fixed."""
    rng = np.random.default_rng(0)
    # Repeats, so that the samples' own tokens propose something from the start.
    asked = [GroupRequest(f"drawn-{engine.name}", PROMPT, tuple(range(256)))]
    before = drafting.stats(engine)
    [result] = drafting.generate(engine, asked)
    places = np.concatenate(
        [places_in_the_distribution(model, PROMPT, response, rng) for response in result.responses]
    )
    assert len(places) == 256 * SAMPLED.max_new_tokens
    counts, _ = np.histogram(places, bins=40, range=(0.0, 1.0))
    assert chisquare(counts).pvalue > 1e-4
    kept, drafted = kept_and_drafted(before, drafting.stats(engine))
    assert kept > 100
    assert drafted - kept > 1000


def test_a_response_ends_with_its_stop_string_and_the_tokens_drafted_after_it_are_dropped(
    drafting: Drafting, model: torch.nn.Module
) -> None:
    free = drafting.generate(drafting.by_tokens, requests("free", 6))
    stopping = dataclasses.replace(SAMPLED, stop_strings=("5", "+", "11"))
    stopped = drafting.generate(drafting.by_tokens, requests("stopped", 6), stopping)
    shorter = 0
    for plain, cut in zip(free, stopped, strict=True):
        for whole, response in zip(plain.responses, cut.responses, strict=True):
            length = len(response.token_ids)
            np.testing.assert_array_equal(response.token_ids, whole.token_ids[:length])
            np.testing.assert_array_equal(response.logprobs, whole.logprobs[:length])
            shorter += length < len(whole.token_ids)
    assert shorter > 10


def test_an_engine_that_drafts_scores_given_tokens_as_the_policy_does(
    drafting: Drafting, engine: ActorHandle, model: torch.nn.Module
) -> None:
    sequence = [*PROMPT, 3, 40, 17]
    scores: PromptScores = drafting.call(engine.submit("score", [sequence], 0))
    expected = reference_logprobs(model, sequence[:1], np.array(sequence[1:]))
    np.testing.assert_allclose(scores.logprobs[1:], expected, atol=1e-4)


def test_a_draft_of_its_own_weights_goes_stale_and_the_samples_follow_the_policy(drafting: Drafting) -> None:
    engine, trainer = drafting.by_model, drafting.trainer
    shares = []
    for version in range(3):
        if version:
            drafting.call(trainer.submit("update", version))
            drafting.call(trainer.submit("push_weights", version))
        before = drafting.stats(engine)
        sampling = dataclasses.replace(SAMPLED, temperature=1.0)
        request = GroupRequest(f"version-{version}", PROMPT, tuple(range(32)))
        [result] = drafting.generate(engine, [request], sampling)
        kept, drafted = kept_and_drafted(before, drafting.stats(engine))
        shares.append(kept / drafted)
        token_ids = [response.token_ids for response in result.responses]
        expected = drafting.call(trainer.submit("logprobs", PROMPT, token_ids))
        for response, own in zip(result.responses, expected, strict=True):
            np.testing.assert_allclose(response.logprobs, own, atol=1e-4)
    assert shares[2] < shares[0]


@pytest.mark.slow
def test_an_engine_of_two_workers_drafts_as_one_of_one_worker(drafting: Drafting, checkpoint: Path) -> None:
    """Logits that were added up in another order differ by rounding, so not every sample need be the same."""
    cluster = Cluster()
    try:
        pair = cluster.start(spec(checkpoint, "pair", NGRAM, tensor_parallel_size=2))
        results = []
        for engine in (drafting.by_tokens, pair):
            results += drafting.generate(
                engine, [GroupRequest(f"{engine.name}-tp", PROMPT, tuple(range(64)))]
            )
        same = [
            np.array_equal(one.token_ids, other.token_ids)
            and np.allclose(one.logprobs, other.logprobs, atol=1e-4)
            for one, other in zip(results[0].responses, results[1].responses, strict=True)
        ]
        assert sum(same) > 60
    finally:
        cluster.stop()
