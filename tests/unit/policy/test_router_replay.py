"""Which expert a router takes: the one to replay, or its own where there is none; worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from nemo_like.policy.batch.policy_batch import ModelInputs
from nemo_like.policy.megatron import router_replay
from nemo_like.policy.megatron.router_replay import RouteReplay

CPU = torch.device("cpu")
# Three tokens, four experts: on its own a router takes experts 3 and 2, 0 and 1, 1 and 2 (from 0).
SCORES = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0], [0.0, 2.0, 1.0, -1.0]])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without others, so that counts are summed over nobody."""
    for name in ("get_model_parallel_group", "get_context_parallel_group"):
        monkeypatch.setattr(router_replay.parallel_state, name, lambda: None)
    monkeypatch.setattr(router_replay.dist, "all_reduce", lambda *args, **kwargs: None)


def routers(*layers: int) -> torch.nn.ModuleList:
    """Routers of these layers, numbered from 1 as Megatron-core does."""
    made = []
    for layer in layers:
        router = TopKRouter.__new__(TopKRouter)
        torch.nn.Module.__init__(router)
        router.layer_number, router.router_replay = layer, None
        made.append(router)
    return torch.nn.ModuleList(made)


def settings(**changes: Any) -> Any:
    usual = {"recompute_granularity": None, "sequence_parallel": False}
    layers = {"num_layers": 4, "num_moe_experts": 4, "moe_layer_freq": 1}
    return SimpleNamespace(**{**usual, **layers, **changes})


def inputs(*routes: list[list[int]]) -> ModelInputs:
    """One row; ``routes[layer][token]`` are experts from 1."""
    nothing = torch.zeros(0)
    stacked = torch.tensor(routes, dtype=torch.uint8).transpose(0, 1)[None]
    return ModelInputs(*(nothing for _ in range(7)), routes=stacked)


def topk(scores: Tensor, count: int, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.topk(scores, count, dim=1)


def chosen(router: Any, scores: Tensor = SCORES) -> list[list[int]]:
    """The experts that it takes, from 1."""
    values, places = router.router_replay.get_replay_topk(scores, 2, None, None, topk)
    torch.testing.assert_close(values, scores.gather(1, places))
    return (places + 1).tolist()


def test_a_token_without_a_route_gets_what_the_router_chooses() -> None:
    model = routers(1)
    replay = RouteReplay(model, settings(), CPU)
    with replay.replaying(inputs([[1, 4], [0, 0], [2, 3]])):
        assert chosen(model[0]) == [[1, 4], [1, 2], [2, 3]]


def test_a_stage_replays_its_own_layers() -> None:
    model = routers(2, 3)
    replay = RouteReplay(model, settings(), CPU)
    layers = ([[1, 2]] * 3, [[1, 3]] * 3, [[1, 4]] * 3, [[2, 4]] * 3)
    with replay.replaying(inputs(*layers)):
        assert chosen(model[0]) == [[1, 3]] * 3
        assert chosen(model[1]) == [[1, 4]] * 3


def test_rows_are_ordered_by_position_then_by_sample() -> None:
    model = routers(1)
    replay = RouteReplay(model, settings(), CPU)
    routes = torch.tensor([[[1, 2], [1, 3]], [[1, 4], [2, 3]]], dtype=torch.uint8)[:, :, None]
    two = ModelInputs(*(torch.zeros(0) for _ in range(7)), routes=routes)  # two rows of two tokens
    with replay.replaying(two):
        assert chosen(model[0], torch.zeros(4, 4)) == [[1, 2], [1, 4], [1, 3], [2, 3]]


def test_routes_are_those_of_layers_with_experts_alone() -> None:
    model = routers(3, 4)  # the first two layers have no experts
    replay = RouteReplay(model, settings(moe_layer_freq=[0, 0, 1, 1]), CPU)
    with replay.replaying(inputs([[1, 2]] * 3, [[1, 3]] * 3)):
        assert [chosen(router) for router in model] == [[[1, 2]] * 3, [[1, 3]] * 3]


def test_a_stage_without_experts_takes_part_in_the_sums_of_all_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums: list[Any] = []
    monkeypatch.setattr(router_replay.dist, "all_reduce", lambda counts, **_: sums.append(counts))
    RouteReplay(torch.nn.ModuleList(), settings(moe_layer_freq=[0, 0, 1, 1]), CPU).metrics()
    RouteReplay(None, settings(), CPU).metrics()
    assert len(sums) == 2  # over the replica's model ranks and its context ranks, once


def test_sequence_parallel_ranks_replay_their_part_of_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"get_tensor_model_parallel_world_size": 2, "get_tensor_model_parallel_rank": 1}
    for name, value in ranks.items():
        monkeypatch.setattr(router_replay.parallel_state, name, lambda value=value: value)
    model = routers(1)
    replay = RouteReplay(model, settings(sequence_parallel=True), CPU)
    with replay.replaying(inputs([[1, 2], [1, 3], [1, 4], [2, 3]])):
        assert chosen(model[0], SCORES[:2]) == [[1, 4], [2, 3]]


def test_recomputation_replays_micro_batches_in_the_order_of_their_forward_passes() -> None:
    model = routers(1)
    replay = RouteReplay(model, settings(recompute_granularity="full"), CPU)
    for routes in ([[1, 2]] * 3, [[1, 3]] * 3):
        with replay.replaying(inputs(routes)):
            chosen(model[0])
    assert chosen(model[0]) == [[1, 2]] * 3
    replay.begin()  # a run that broke off leaves nothing to the next
    with replay.replaying(inputs([[1, 4]] * 3)):
        chosen(model[0])
    assert chosen(model[0]) == [[1, 4]] * 3
    with torch.no_grad(), replay.replaying(inputs([[2, 4]] * 3)):
        chosen(model[0])
    with pytest.raises(IndexError):  # scoring keeps nothing, since it has no backward pass
        chosen(model[0])


def test_the_share_of_other_choices_counts_sets_of_experts_of_tokens_with_a_route() -> None:
    model = routers(1, 2)
    replay = RouteReplay(model, settings(), CPU)
    same_set, other, none = [3, 4], [1, 4], [0, 0]
    with replay.replaying(inputs([same_set, other, none], [same_set, none, none])):
        chosen(model[0])
    assert replay.metrics() == {}  # counted only where it is asked for
    with replay.comparing(), replay.replaying(inputs([same_set, other, none], [same_set, none, none])):
        chosen(model[0])
        chosen(model[1])
    share = replay.metrics()["routing_disagreement"]
    assert (share.total, share.weight) == (1, 3)
    assert replay.metrics() == {}


def test_every_router_chooses_for_itself_where_replay_is_suspended_or_has_nothing() -> None:
    model = routers(1)
    replay = RouteReplay(model, settings(), CPU)
    own = [[4, 3], [1, 2], [2, 3]]
    with replay.comparing(), replay.suspended(), replay.replaying(inputs([[1, 4]] * 3)):
        assert chosen(model[0]) == own
    with replay.replaying(ModelInputs(*(torch.zeros(0) for _ in range(7)))):
        assert chosen(model[0]) == own
    assert replay.metrics() == {}


def test_without_replay_routers_stay_as_they_are() -> None:
    model = routers(1)
    replay = RouteReplay(None, settings(), CPU)
    with replay.replaying(inputs([[1, 4]] * 3)):
        assert model[0].router_replay is None
    assert replay.metrics() == {}


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    model = routers(1)
    replay = RouteReplay(model, settings(), CPU)
    with (
        replay.replaying(inputs([[1, 4]] * 2)),
        pytest.raises(ValueError, match="2 tokens have routes to replay, and a router got 3"),
    ):
        chosen(model[0])


def test_no_model_joins_megatron_cores_list_of_all_models() -> None:
    before = len(RouterReplay.global_router_replay_instances)
    RouteReplay(routers(1, 2), settings(), CPU)
    assert len(RouterReplay.global_router_replay_instances) == before


def test_gradients_reach_the_scores_of_the_replayed_experts() -> None:
    model = routers(1)
    replay = RouteReplay(model, settings(), CPU)
    scores = SCORES.clone().requires_grad_(True)
    with replay.replaying(inputs([[1, 4], [0, 0], [2, 3]])):
        values, _ = model[0].router_replay.get_replay_topk(scores, 2, None, None, topk)
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0]]
