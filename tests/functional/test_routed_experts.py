"""The experts that a real engine says its routers chose are those that Hugging Face's model chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.batch.columns import Column, Layout
from nemo_like.batch.recordings import ROUTED_EXPERTS
from nemo_like.batch.routed_experts import routed_experts_column
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.compat import route_recorder
from nemo_like.compat.route_recorder import RouteRecorder
from nemo_like.environments.interface import Feedback
from nemo_like.generation.engine_routes import EngineRoutes, ResponseRoutes
from nemo_like.generation.interface import GenerationError, GroupRequest, GroupResult, Response
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.models.model_info import read_model_info
from nemo_like.policy.options import Device
from nemo_like.rollout.flatten import flatten
from tests.functional.generation_fixtures import (
    MAX_LENGTH,
    TIMEOUT_S,
    VOCAB_SIZE,
    collector_spec,
    engine_spec,
    make_checkpoint,
)
from tests.functional.policy_fixtures import policy_config
from tests.functional.watched_experts import (
    Routers,
    scored_step,
    watched_step,
    with_low_precision_routers,
)
from tests.functional.worlds import WorldPool
from tests.unit.rollout.conversations import conversation

pytestmark = pytest.mark.timeout(300)

NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 8, 2, 3
ENDLESS = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12, stop_token_ids=())
BLOCK = 32  # tokens, of the engine's KV cache
# Room for 16 blocks, of which a request has up to three.
SMALL_CACHE_GIB = 16 * BLOCK * NUM_LAYERS * 2 * 2 * 32 * 4 / 2**30
KL_FIGURES = ("gen_kl_error", "policy_kl_error", "js_divergence_error")
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
    checkpoint: Path
    column: Column

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
    column = routed_experts_column(read_model_info(str(checkpoint), "megatron"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    cluster = Cluster()
    try:
        engine = cluster.start(engine_spec(checkpoint, "routed", routed_experts=column, **options))
        yield Engine(cluster, engine, cluster.start(collector_spec()), model, checkpoint, column)
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def engine(ray_of_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
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
    long = dataclasses.replace(ENDLESS, max_new_tokens=60)
    calls = [  # at once, since the engine may have finished the request before it has answered
        engine.handle.submit("submit", [request("aborted", tokens(9)), kept], long, engine.sink),
        engine.handle.submit("abort", ["aborted"]),
    ]
    engine.cluster.gather(calls, stage="test", timeout_s=TIMEOUT_S)
    later = request("later", tokens(9))
    [result] = engine.generate([later])
    for response in result.responses:
        engine.assert_routes(later, response)


def test_tokens_of_a_preempted_request_keep_the_experts_with_which_they_were_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand, since a request that is computed anew mostly chooses the same again."""
    capture: list[Any] = []
    layer = SimpleNamespace(layer_id=0, router=SimpleNamespace(set_capture_fn=capture.append))
    runner = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=2),
        kv_cache_config=SimpleNamespace(num_blocks=8),
        requests={},
        execute_model=lambda scheduled: None,
    )
    recorder = RouteRecorder(runner, [layer], (1, 1), "uint8")

    def computed(blocks: list[int], slots: list[int], experts: list[int], *, num_tokens: int) -> None:
        runner.requests["a"] = SimpleNamespace(block_ids=(blocks,), num_tokens=num_tokens)
        context = SimpleNamespace(slot_mapping={"attention": torch.tensor([*slots, -1])})  # and padding
        monkeypatch.setattr(route_recorder, "get_forward_context", lambda: context)
        capture[0](torch.tensor([*experts, 99])[:, None])

    def scheduled(finished: set[str], preempted: set[str] | None) -> None:
        runner.execute_model(SimpleNamespace(finished_req_ids=finished, preempted_req_ids=preempted))

    computed([1, 2], [2, 3, 4], [10, 11, 12], num_tokens=4)
    scheduled(set(), {"a"})
    computed([5, 6], [10, 11, 12, 13], [20, 21, 22, 23], num_tokens=5)
    scheduled({"a"}, None)
    del runner.requests["a"]
    taken = recorder.take({"a": (1, 4)}, dropped=[])["a"]
    assert taken[:, 0, 0].tolist() == [12, 13, 24]  # from 1
    # Most are taken before the workers hear that they have ended; nothing of them is kept.
    computed([1], [2, 3], [30, 31], num_tokens=3)
    assert recorder.take({"a": (0, 2)}, dropped=[])["a"][:, 0, 0].tolist() == [31, 32]
    scheduled({"a"}, None)
    del runner.requests["a"]
    with pytest.raises(KeyError):
        recorder.take({"a": (0, 2)}, dropped=[])


def native(column: Column, experts: np.ndarray | None) -> dict[tuple[str, int], ResponseRoutes]:
    """What is made of vLLM's own option: of a prompt of four tokens, one of them known, a response of two."""
    routes = EngineRoutes(column, Device.cuda)
    one = request("native", (4, 5, 6, 7), num_responses=1, num_known=1)
    routes.add(one, "native-0")
    completion: Any = SimpleNamespace(index=0, token_ids=[8, 9], routed_experts=experts)
    output: Any = SimpleNamespace(outputs=[completion])
    return routes.take([(one, output)])


def test_experts_that_vllm_itself_returns_are_numbered_from_one_and_divided() -> None:
    column = Column("routed_experts", "uint8", Layout.per_token, inner_shape=(1, 2))
    taken = native(column, np.array([[[0, 3]], [[1, 2]], [[4, 0]], [[7, 6]]], np.uint8))["native", 0]
    assert taken.context_columns["routed_experts"][:, 0].tolist() == [[1, 4], [2, 3], [5, 1]]
    assert taken.columns["routed_experts"][:, 0].tolist() == [[8, 7], [0, 0]]


def test_an_engine_that_returns_no_experts_or_too_few_ends_the_run() -> None:
    column = Column("routed_experts", "uint8", Layout.per_token, inner_shape=(1, 2))
    with pytest.raises(GenerationError, match=r"router_replay=true needs .* vLLM returned none for .*native"):
        native(column, None)
    with pytest.raises(GenerationError, match=r"has 4 tokens .* the engine returned \[3, 1, 2\]"):
        native(column, np.zeros((3, 1, 2), np.uint8))


def sampled(engine: Engine, num_prompts: int, num_responses: int) -> dict[str, Any]:
    """A batch of what the engine samples, flattened as a rollout does it."""
    prompts = [tokens(4 + number % 5) for number in range(num_prompts)]
    requests = [request(f"sampled-{number}", prompt, num_responses) for number, prompt in enumerate(prompts)]
    groups = []
    long = dataclasses.replace(ENDLESS, max_new_tokens=20)
    for one, result in zip(requests, engine.generate(requests, long), strict=True):
        groups.append([conversation(one.prompt_ids, max_tokens=MAX_LENGTH) for _ in result.responses])
        for sample, response in zip(groups[-1], result.responses, strict=True):
            sample.add_response(response, "", 0)
            sample.add_feedback(Feedback({"varied": float(response.token_ids[0])}, is_done=True))
    flat = flatten(groups, [engine.column])
    rewards = np.array(flat.tags["reward"])
    return {
        "lengths": flat.lengths,
        "columns": flat.columns,
        "more_columns": [engine.column],
        "tags": {
            **flat.tags,
            "sample_mask": [1.0] * len(rewards),
            "advantage": (rewards - rewards.mean()).tolist(),
        },
        "chunk_size": num_responses,
    }


def test_the_trainers_experts_get_the_tokens_that_the_engines_got(engine: Engine) -> None:
    """Token by token, in the pass that scores, and in training with its recomputation."""
    batch = sampled(engine, num_prompts=4, num_responses=3)
    model = with_low_precision_routers(engine.checkpoint, engine.checkpoint.parent / "perturbed")
    routes = batch["columns"][ROUTED_EXPERTS]
    with WorldPool() as pool:
        for replays in (True, False):
            cfg = policy_config(model, router_replay=replays, activation_checkpointing=True)
            [watched] = pool.run(watched_step, ParallelLayout(tp=1, cp=1, dp=1, pp=1), cfg, batch)
            assert {phase for phase, _ in watched.used} == {"logprobs", "training"}
            wrong = 0
            for (phase, layer), seen in watched.used.items():
                passes = 2 if phase == "training" else 1
                assert len(seen) == passes * (len(routes) - len(batch["lengths"]))
                wrong += sum(experts != frozenset(routes[place, layer].tolist()) for place, experts in seen)
            assert (wrong == 0) == replays


def test_replay_takes_the_mismatch_of_routers_of_low_precision_away(engine: Engine) -> None:
    """The trainer's routers choose by rounded scores; or their weights are rounded, which changes the weights
    of the chosen experts too."""
    batch = sampled(engine, num_prompts=64, num_responses=4)
    rounded = with_low_precision_routers(engine.checkpoint, engine.checkpoint.parent / "rounded")
    gaps: dict[tuple[Routers, bool], dict[str, float]] = {}
    with WorldPool() as pool:
        for model, routers in ((engine.checkpoint, Routers.choice), (rounded, Routers.nothing_here)):
            for replays in (True, False):
                cfg = policy_config(model, router_replay=replays, micro_batch_size=32)
                layout = ParallelLayout(tp=1, cp=1, dp=1, pp=1)
                [metrics] = pool.run(scored_step, layout, cfg, batch, routers)
                assert ("routing_disagreement" in metrics) == replays
                gaps[routers, replays] = {
                    "token_mult_prob_error": metrics["token_mult_prob_error"] - 1,
                    **{name: abs(metrics[name]) for name in KL_FIGURES},
                }
    for routers in Routers:
        print(routers.name, "replayed", gaps[routers, True], "own", gaps[routers, False])
        for name in KL_FIGURES:
            assert 10 * gaps[routers, True][name] < gaps[routers, False][name]
    choice, weights = (
        {replays: gaps[routers, replays]["token_mult_prob_error"] for replays in (True, False)}
        for routers in Routers
    )
    assert 10 * choice[True] < choice[False]
    # What is left of the rounded weights is no choice.
    assert 1.5 * weights[True] < weights[False]
