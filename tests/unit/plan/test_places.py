from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.cluster.options import Placement
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.plan.places import Place, gpus_by_node, placement, weight_replicas
from nemo_like.plan.roles import Role
from tests.unit.config.checkpoints import DEMO

Demo = Callable[..., Config]
GPU = ("policy.device=cuda", "cluster.gpus_per_node=8", "cluster.address=auto")
COLOCATED = "cluster.placement=colocated"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    model = tmp_path_factory.mktemp("model")
    return lambda *overrides: load_config(DEMO, [f"policy.model_name={model}", *overrides])


def megatron(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> list[str]:
    sizes = {"tensor_model": tp, "pipeline_model": pp, "context": cp, "expert_model": ep}
    return [f"policy.megatron_cfg.{axis}_parallel_size={size}" for axis, size in sizes.items()]


def engines(count: int, tp: int = 1) -> list[str]:
    return [f"generation.num_engines={count}", f"generation.vllm_cfg.tensor_parallel_size={tp}"]


def over_nodes(count: int, tp: int = 2) -> list[str]:
    return [*engines(1, tp), f"generation.vllm_cfg.num_nodes={count}"]


def nodes_of(places: list[Place], role: str) -> list[int]:
    return [place.node for place in places if place.actor.startswith(role)]


def gpus_of(places: list[Place], role: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(place.node, place.gpus) for place in places if place.actor.startswith(role)]


def test_separate_engines_take_the_gpus_after_the_workers(demo: Demo) -> None:
    places = placement(demo(*GPU, *megatron(tp=2), "policy.data_parallel_size=2", *engines(2, tp=2)))
    assert places == [
        *(Place(f"policy_worker-{rank}", Role.policy_worker, 0, (rank,)) for rank in range(4)),
        Place("engine-0", Role.engine, 0, (4, 5)),
        Place("engine-1", Role.engine, 0, (6, 7)),
    ]
    assert gpus_by_node(places) == {0: 8}


def test_a_group_that_does_not_fit_beside_others_goes_to_the_next_node(demo: Demo) -> None:
    # 4 + 4 workers fill the first node but for what is left by groups of 3: 3 x 2 fit, the third goes on.
    cfg = demo(*GPU, *megatron(tp=3), "policy.data_parallel_size=3", *engines(2), "cluster.num_nodes=2")
    places = placement(cfg)
    assert nodes_of(places, "policy_worker") == [0] * 6 + [1] * 3
    assert gpus_of(places, "engine") == [(0, (6,)), (0, (7,))]  # the first node's rest


def test_an_engine_over_several_nodes_has_equally_many_gpus_on_each(demo: Demo) -> None:
    # The worker takes a GPU of the first node, so that 8 are free on the second and the third only.
    alone = placement(demo(*GPU, *over_nodes(2, tp=16), "cluster.num_nodes=3", "policy.data_parallel_size=1"))
    assert alone[1:] == [
        Place("engine", Role.engine, 1, tuple(range(8))),
        Place("engine_part", Role.engine_part, 2, tuple(range(8))),
    ]
    # A node with room for two parts gets one of each engine.
    places = placement(demo(*GPU, *over_nodes(2, tp=4), "generation.num_engines=2", "cluster.num_nodes=2"))
    assert gpus_of(places, "engine-") == [(0, (2, 3)), (0, (4, 5))]
    assert gpus_of(places, "engine_part-") == [(1, (0, 1)), (1, (2, 3))]


def test_an_engine_over_several_nodes_is_on_different_ones_on_cpus(demo: Demo) -> None:
    places = placement(demo(*over_nodes(2), "generation.num_engines=2", "cluster.num_nodes=2"))
    at = [(place.actor, place.node) for place in places if place.role is not Role.policy_worker]
    assert at == [("engine-0", 0), ("engine_part-0-1", 1), ("engine-1", 1), ("engine_part-1-1", 0)]


def test_colocated_engines_are_spread_over_the_workers_gpus(demo: Demo) -> None:
    workers = (*GPU, COLOCATED, *megatron(tp=4), "policy.data_parallel_size=2")
    assert gpus_of(placement(demo(*workers, *engines(2))), "engine") == [(0, (0,)), (0, (4,))]
    assert gpus_of(placement(demo(*workers, *engines(2, tp=4))), "engine") == [
        (0, (0, 1, 2, 3)),
        (0, (4, 5, 6, 7)),
    ]
    two_nodes = placement(demo(*workers, "cluster.num_nodes=2", "policy.data_parallel_size=4", *engines(2)))
    assert gpus_of(two_nodes, "engine") == [(0, (0,)), (1, (0,))]


def test_more_engines_than_gpus_share_them_evenly(demo: Demo) -> None:
    places = placement(demo(*GPU, COLOCATED, "policy.data_parallel_size=2", *engines(4)))
    assert gpus_of(places, "engine") == [(0, (0,)), (0, (1,)), (0, (0,)), (0, (1,))]


def test_the_ranks_of_an_expert_group_share_a_node_that_is_large_enough(demo: Demo) -> None:
    layout = (*megatron(tp=2, ep=4), "policy.data_parallel_size=4", *engines(1), "cluster.num_nodes=4")
    assert nodes_of(placement(demo(*GPU, *layout)), "policy_worker") == [0] * 8
    small = placement(demo(*GPU, *layout, "cluster.gpus_per_node=3"))
    assert nodes_of(small, "policy_worker") == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            megatron(tp=4, cp=4),
            "tensor_model_parallel_size=4 x context_parallel_size=4 must be at most cluster.gpus_per_node=8",
        ),
        (engines(1, tp=16), "vllm_cfg.tensor_parallel_size=16 must be at most cluster.gpus_per_node=8"),
        (
            [*engines(4, tp=2), "policy.data_parallel_size=2"],
            "cluster.num_nodes=1 must be at least 2: 2 policy workers of 1 GPU and 4 engines of 2 do not fit",
        ),
        (
            [COLOCATED, *engines(1, tp=4), "policy.data_parallel_size=2"],
            "tensor_parallel_size=4 must be at most 2 with cluster.placement=colocated",
        ),
        (
            [*over_nodes(2), "cluster.num_nodes=1"],
            "vllm_cfg.num_nodes=2 must be at most cluster.num_nodes=1",
        ),
        (
            [*over_nodes(2), COLOCATED, "cluster.num_nodes=2"],
            "vllm_cfg.num_nodes=2 must be 1 with cluster.placement=colocated",
        ),
        (
            [*engines(1, tp=32), "generation.vllm_cfg.num_nodes=2", "cluster.num_nodes=4"],
            "tensor_parallel_size=32 over num_nodes=2 must be at most cluster.gpus_per_node=8, since its 16 "
            "GPUs share a node; divide it over fewer GPUs, or set cluster.gpus_per_node to what a node has, "
            "or generation.vllm_cfg.num_nodes to more",
        ),
        (["cluster.gpus_per_node=0"], "must be at most cluster.gpus_per_node=0"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(demo: Demo, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match="1 problem") as caught:
        placement(demo(*GPU, *overrides))
    assert message in str(caught.value)


def test_on_cpus_groups_and_engines_are_spread_over_the_nodes(demo: Demo) -> None:
    layout = [*megatron(tp=2), "policy.data_parallel_size=2", "cluster.num_nodes=2"]
    separate = placement(demo(*layout, *engines(2)))
    assert [(place.actor, place.node) for place in separate] == [
        *((f"policy_worker-{rank}", rank // 2) for rank in range(4)),
        ("engine-0", 0),
        ("engine-1", 1),
    ]
    assert nodes_of(placement(demo(*layout, *engines(3), COLOCATED)), "engine") == [0, 1, 0]
    assert gpus_by_node(separate) == {0: 0, 1: 0}


def test_a_single_worker_or_engine_has_no_number(demo: Demo) -> None:
    places = placement(demo("policy.data_parallel_size=1", *engines(1)))
    assert [place.actor for place in places] == ["policy_worker", "engine"]


@pytest.fixture(scope="module")
def gpu_demo(demo: Demo) -> Config:
    return demo(*GPU, "cluster.num_nodes=100")


@settings(max_examples=60)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    dp=st.integers(1, 6),
    pp=st.sampled_from([1, 2]),
    engine_tp=st.sampled_from([1, 2, 4, 8]),
    num_engines=st.integers(1, 6),
    colocated=st.booleans(),
)
def test_groups_are_whole_and_separate_processes_share_nothing(
    gpu_demo: Config, tp: int, dp: int, pp: int, engine_tp: int, num_engines: int, colocated: bool
) -> None:
    cfg = copy.deepcopy(gpu_demo)
    cfg.policy.megatron_cfg.tensor_model_parallel_size = tp
    cfg.policy.megatron_cfg.pipeline_model_parallel_size = pp
    cfg.policy.data_parallel_size = dp
    cfg.generation.num_engines = num_engines
    cfg.generation.vllm_cfg.tensor_parallel_size = engine_tp
    cfg.cluster.placement = Placement.colocated if colocated else Placement.separate
    try:
        places = placement(cfg)
    except ConfigError:
        assert colocated
        assert engine_tp > min(8, tp * dp * pp)
        return
    workers = gpus_of(places, "policy_worker")
    assert all(
        len({node for node, _ in workers[first : first + tp]}) == 1 for first in range(0, len(workers), tp)
    )
    assert all(len(set(gpus)) == engine_tp for _, gpus in gpus_of(places, "engine"))
    users = Counter((place.node, gpu) for place in places for gpu in place.gpus)
    assert max(users.values()) == 1 or colocated
    assert all(0 <= gpu < 8 for _, gpu in users)
    if colocated:
        assert set(users) == {(node, gpu) for node, (gpu,) in workers}


def replicas(cfg: Config) -> tuple[int, ...]:
    return weight_replicas(cfg, placement(cfg))


def test_one_replica_sends_unless_engines_map_memory_on_several_nodes(demo: Demo) -> None:
    two_nodes = (*GPU, "cluster.num_nodes=2", *megatron(tp=4), "policy.data_parallel_size=4")
    assert replicas(demo(*two_nodes, "cluster.num_nodes=3", *engines(4))) == (0,)
    assert replicas(demo(*two_nodes, COLOCATED, *engines(4))) == (0, 2)
    assert replicas(demo(*two_nodes, COLOCATED, *engines(1, tp=8))) == (0,)
    assert replicas(demo("rollout.generate_only=true", "generation.weight_transport=shared_memory")) == (0,)


def test_the_pipeline_stages_of_a_replica_share_a_node_with_colocated_engines(demo: Demo) -> None:
    layout = (*GPU, "cluster.num_nodes=2", *megatron(tp=2, pp=2), "policy.data_parallel_size=4", *engines(4))
    colocated = demo(*layout, COLOCATED)
    # Stage 0 is ranks 0 to 7, stage 1 ranks 8 to 15.
    assert nodes_of(placement(colocated), "policy_worker") == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert replicas(colocated) == (0, 2)
    separate = placement(demo(*layout, "cluster.num_nodes=3"))
    assert nodes_of(separate, "policy_worker") == [0] * 8 + [1] * 8


def test_engines_that_map_memory_without_a_replica_on_their_node_are_refused(demo: Demo) -> None:
    layout = (*megatron(pp=2), "policy.data_parallel_size=1", "cluster.num_nodes=2", *engines(2))
    cfg = demo(*layout, "generation.weight_transport=shared_memory")
    with pytest.raises(ConfigError, match=r"shared_memory needs a whole replica .*; node 0 has none"):
        replicas(cfg)


CRITIC = ("value=default", "grpo.adv_estimator.name=gae")
TWO = ("policy.data_parallel_size=2", *CRITIC)


def test_a_critic_has_gpus_of_its_own_between_policy_and_engines(demo: Demo) -> None:
    cfg = demo(*GPU, *TWO, "value.data_parallel_size=3", *engines(2))
    places = placement(cfg)
    assert gpus_of(places, "policy_worker") == [(0, (0,)), (0, (1,))]
    assert gpus_of(places, "value_worker") == [(0, (2,)), (0, (3,)), (0, (4,))]
    assert gpus_of(places, "engine") == [(0, (5,)), (0, (6,))]
    assert gpus_by_node(places) == {0: 7}
    assert [place.actor for place in places][2:5] == [f"value_worker-{rank}" for rank in range(3)]


def test_a_colocated_critic_has_the_gpus_of_the_policys_ranks(demo: Demo) -> None:
    cfg = demo(*GPU, COLOCATED, *CRITIC, *megatron(tp=2), "policy.data_parallel_size=2", *engines(4))
    places = placement(cfg)
    assert gpus_of(places, "value_worker") == gpus_of(places, "policy_worker")
    fewer = placement(
        demo(
            *GPU,
            COLOCATED,
            *CRITIC,
            *megatron(tp=4),
            "value.megatron_cfg.tensor_model_parallel_size=1",
            "value.data_parallel_size=1",
            *engines(1),
        )
    )
    assert gpus_of(fewer, "value_worker") == [(0, (0,))]
    assert gpus_by_node(fewer) == {0: 8}


def test_a_critic_of_one_worker_is_named_without_a_number(demo: Demo) -> None:
    places = placement(demo(*GPU, *TWO, "value.data_parallel_size=1", *engines(1)))
    assert [place.actor for place in places] == [
        "policy_worker-0",
        "policy_worker-1",
        "value_worker",
        "engine",
    ]


def test_on_cpus_a_critic_is_spread_like_a_group_of_its_own(demo: Demo) -> None:
    nodes = ("cluster.address=auto", "cluster.num_nodes=2")
    places = placement(demo(*nodes, *TWO, "value.data_parallel_size=4", *engines(2)))
    assert nodes_of(places, "policy_worker") == [0, 1]
    assert nodes_of(places, "value_worker") == [0, 0, 1, 1]
    assert nodes_of(places, "engine") == [0, 1]


def test_a_run_without_training_places_no_critic(demo: Demo) -> None:
    places = placement(demo(*GPU, *TWO, "rollout.generate_only=true", *engines(2)))
    assert [place.actor for place in places] == ["engine-0", "engine-1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [COLOCATED, "value.data_parallel_size=4"],
            "value.data_parallel_size=4 makes 4 value workers, but with cluster.placement=colocated they "
            "share the GPUs of 2 policy workers; use a layout of at most as many, or "
            "cluster.placement=separate",
        ),
        (
            ["value.megatron_cfg.tensor_model_parallel_size=16"],
            "value.megatron_cfg.tensor_model_parallel_size=16 must be at most cluster.gpus_per_node=8, since "
            "its 16 GPUs share a node; divide it over fewer GPUs, or set cluster.gpus_per_node to what a "
            "node has",
        ),
        (
            ["value.data_parallel_size=6"],
            "cluster.num_nodes=1 must be at least 2: 2 policy workers of 1 GPU and 6 value workers of 1 "
            "and 2 engines of 1 do not fit on fewer nodes of cluster.gpus_per_node=8; use fewer engines or "
            "policy workers, or cluster.num_nodes=2",
        ),
        (
            [
                COLOCATED,
                "cluster.gpus_per_node=1",
                "cluster.num_nodes=2",
                "value.megatron_cfg.tensor_model_parallel_size=2",
                "value.data_parallel_size=1",
            ],
            "value.megatron_cfg.tensor_model_parallel_size=2 puts workers that exchange something in every "
            "layer on several nodes",
        ),
    ],
)
def test_a_critic_that_has_no_place_is_told_by_its_own_keys(
    demo: Demo, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        placement(demo(*GPU, *TWO, *engines(2), *overrides))
    assert message in str(caught.value)


def reward_model(num_actors: int, device: str = "cuda") -> list[str]:
    options = f"{{model_name: /rm, device: {device}, precision: bfloat16, max_length: null}}"
    return [
        "env.arithmetic.kind=reward_model",
        f"++env.arithmetic.options={options}",
        f"env.arithmetic.num_actors={num_actors}",
    ]


def test_each_actor_of_a_reward_model_has_the_next_gpu_for_itself(demo: Demo) -> None:
    placed = placement(demo(*GPU, "policy.data_parallel_size=2", *engines(1), *reward_model(2)))
    assert gpus_of(placed, "reward_model") == [(0, (3,)), (0, (4,))]
    shared = placement(demo(*GPU, COLOCATED, "policy.data_parallel_size=2", *engines(2), *reward_model(1)))
    assert shared[-1] == Place("reward_model", Role.reward_model, 0, (2,))
    on_cpu = placement(demo(*GPU, "policy.data_parallel_size=2", *engines(1), *reward_model(2, "cpu")))
    assert gpus_of(on_cpu, "reward_model") == []


def test_reward_models_that_do_not_fit_on_the_nodes_are_counted(demo: Demo) -> None:
    with pytest.raises(ConfigError, match=r"2 engines of 1 and 6 reward models of 1 do not fit on fewer"):
        placement(demo(*GPU, "policy.data_parallel_size=2", *engines(2), *reward_model(6)))


def test_a_teacher_that_has_no_place_is_told_by_its_own_key(demo: Demo) -> None:
    given = (
        "teacher=default",
        "teacher.model_name=none",
        "teacher.megatron_cfg.tensor_model_parallel_size=16",
    )
    with pytest.raises(ConfigError, match=r"teacher\.megatron_cfg\.tensor_model_parallel_size=16 must be at"):
        placement(demo(*GPU, "policy.data_parallel_size=2", *engines(1), *given))
