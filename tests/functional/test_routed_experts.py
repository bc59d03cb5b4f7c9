"""The experts that a real engine says its routers chose are those that Hugging Face's model chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.batch.routed_experts import routed_experts_column
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.config.model_info import read_model_info
from nemo_like.config.recordings import ROUTED_EXPERTS
from nemo_like.config.schema import PolicyBackend
from nemo_like.config.tasks import SamplingSettings
from nemo_like.generation.interface import GroupRequest, GroupResult, Response
from tests.functional.generation_fixtures import (
    TIMEOUT_S,
    VOCAB_SIZE,
    collector_spec,
    engine_spec,
    make_checkpoint,
)

pytestmark = pytest.mark.timeout(300)

NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 8, 2, 3
ENDLESS = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12, stop_token_ids=())
BLOCK = 32  # tokens, of the engine's KV cache
# Room for 16 blocks, of which a request has up to three.
SMALL_CACHE_GIB = 16 * BLOCK * NUM_LAYERS * 2 * 2 * 32 * 4 / 2**30
RNG = np.random.default_rng(3)


def tokens(count: int) -> tuple[int, ...]:
    return tuple(RNG.integers(2, VOCAB_SIZE, size=count).tolist())


@dataclasses.dataclass
class Engine:
    """An engine that returns experts, and the same model in one process."""

    cluster: Cluster
    handle: ActorHandle
    sink: ActorHandle
    model: torch.nn.Module

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingSettings = ENDLESS) -> None:
        self.call("submit", requests, sampling, self.sink)

    def generate(
        self, requests: Sequence[GroupRequest], sampling: SamplingSettings = ENDLESS
    ) -> list[GroupResult]:
        self.submit(requests, sampling)
        call = self.sink.submit("wait_for", [one.request_id for one in requests], TIMEOUT_S)
        [results] = self.cluster.gather([call], stage="test", timeout_s=TIMEOUT_S)
        return results

    def call(self, method: str, *arguments: Any) -> Any:
        [answer] = self.cluster.gather(
            [self.handle.submit(method, *arguments)], stage="test", timeout_s=TIMEOUT_S
        )
        return answer

    def chosen(self, token_ids: Sequence[int]) -> np.ndarray:
        """[T, layers, k] from 1, sorted: what Hugging Face's routers choose."""
        with torch.no_grad():
            out = self.model(torch.tensor([token_ids]), output_router_logits=True)
        places = [logits.topk(NUM_CHOSEN, dim=-1).indices for logits in out.router_logits]
        return torch.stack(places, 1).sort(-1).values.numpy() + 1

    def assert_routes(self, request: GroupRequest, response: Response) -> None:
        """Those of the whole response but its last token, and of the prompt but what was known."""
        sample = [*request.prompt_ids, *response.token_ids.tolist()]
        context, own = response.context_columns[ROUTED_EXPERTS], response.columns[ROUTED_EXPERTS]
        assert (context.dtype, own.dtype) == (np.uint8, np.uint8)
        assert len(own) == len(response.token_ids)
        assert not own[-1].any()
        rows = np.sort(np.concatenate([context, own[:-1]]), -1)
        np.testing.assert_array_equal(rows, self.chosen(sample)[request.num_known : -1])


def start(path: Path, **options: Any) -> Iterator[Engine]:
    checkpoint = make_checkpoint(path, tied=False, num_experts=NUM_EXPERTS, num_layers=NUM_LAYERS)
    column = routed_experts_column(read_model_info(str(checkpoint), PolicyBackend.megatron))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    cluster = Cluster()
    try:
        engine = cluster.start(engine_spec(checkpoint, "routed", routed_experts=column, **options))
        yield Engine(cluster, engine, cluster.start(collector_spec()), model)
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def engine(private_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target = "tests.functional.preempting_engine:PreemptingEngine"
    yield from start(tmp_path_factory.mktemp("routed"), target=target, kv_cache_gib=SMALL_CACHE_GIB)


def request(name: str, prompt: Sequence[int], num_responses: int = 3, num_known: int = 0) -> GroupRequest:
    return GroupRequest(name, tuple(prompt), tuple(range(num_responses)), num_known=num_known)


def test_every_token_but_the_last_has_the_experts_that_were_chosen_for_it(engine: Engine) -> None:
    requests = [request(f"lengths-{count}", tokens(count)) for count in (1, 5, 31, 32, 33)]
    stopping = dataclasses.replace(ENDLESS, stop_token_ids=tuple(range(20)))  # responses of different lengths
    lengths = set()
    for one, result in zip(requests, engine.generate(requests, stopping), strict=True):
        for response in result.responses:
            engine.assert_routes(one, response)
            lengths.add(len(response.token_ids))
    assert len(lengths) > 1


def test_tokens_from_the_prefix_cache_have_the_experts_of_when_they_were_computed(engine: Engine) -> None:
    prompt = tokens(70)
    for turn in range(2):
        one = request(f"cached-{turn}", prompt)
        [result] = engine.generate([one])
        for response in result.responses:
            engine.assert_routes(one, response)


def test_a_later_turn_brings_the_experts_of_what_came_since(engine: Engine) -> None:
    first = request("turn-1", tokens(40), num_responses=1)
    [result] = engine.generate([first])
    [response] = result.responses
    so_far = (*first.prompt_ids, *response.token_ids.tolist())
    second = request("turn-2", (*so_far, *tokens(6)), num_responses=1, num_known=len(so_far) - 1)
    [result] = engine.generate([second])
    assert len(result.responses[0].context_columns[ROUTED_EXPERTS]) == 7
    engine.assert_routes(second, result.responses[0])


def test_a_preempted_request_has_the_experts_of_all_its_tokens(engine: Engine) -> None:
    before = engine.call("num_preemptions")
    requests = [request(f"crowded-{number}", tokens(20), num_responses=2) for number in range(8)]
    long = dataclasses.replace(ENDLESS, max_new_tokens=70)
    for one, result in zip(requests, engine.generate(requests, long), strict=True):
        for response in result.responses:
            engine.assert_routes(one, response)
    assert engine.call("num_preemptions") > before


def test_an_aborted_request_leaves_others_their_experts(engine: Engine) -> None:
    kept = request("kept", tokens(9))
    engine.submit([request("aborted", tokens(9)), kept], dataclasses.replace(ENDLESS, max_new_tokens=60))
    engine.call("abort", ["aborted"])
    later = request("later", tokens(9))
    [result] = engine.generate([later])
    for response in result.responses:
        engine.assert_routes(later, response)
