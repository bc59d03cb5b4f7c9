"""scripts/plan_scale.py: what it computes, worked by hand for small sizes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_like.configuration import load_config
from nemo_like.models.model_arithmetic import forward_flops_per_token, weights_read
from nemo_like.models.model_info import ModelInfo, planned_shape, read_model_info
from nemo_like.policy.groups.layout import policy_world_size
from nemo_like_tools.scale_plan.generation import decode, decode_step, kv_tokens, slowest_engine_lengths
from nemo_like_tools.scale_plan.hardware import GPUS, Assumptions, GpuDataSheet
from nemo_like_tools.scale_plan.host_costs import DRIVER_REPLICA_S, DRIVER_SAMPLE_S, host_cost
from nemo_like_tools.scale_plan.lengths import Lengths
from nemo_like_tools.scale_plan.published import shape
from nemo_like_tools.scale_plan.recipe_workload import LayoutError, Scaling, TrainLayout, Workload, scaled
from nemo_like_tools.scale_plan.step import STAGES, StepCost, step_cost
from nemo_like_tools.scale_plan.training import bubble, busiest_tokens, forward_s, training_cost
from nemo_like_tools.scale_plan.weight_costs import num_tensors, weight_cost
from scripts import plan_scale

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PERFORMANCE = (ROOT / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")

# Every rate is reached in full, and nothing takes time but what a test asks for.
IDEAL = Assumptions(
    matmul_share=1,
    expert_share=1,
    attention_share=1,
    decode_matmul_share=1,
    hbm_share=1,
    nvlink_share=1,
    network_share=1,
    host_share=1,
    decode_host_s=0,
    decode_layer_s=0,
    decode_expert_layer_s=0,
    decode_sequence_s=0,
    allreduce_s=0,
    network_allreduce_s=0,
    reserved_hbm_bytes=0,
    load_tensor_s=0,
)
# One byte or operation a second everywhere, and a memory of a megabyte.
SLOW = GpuDataSheet(
    name="slow",
    bf16_flops_per_s=1,
    hbm_bytes=1e6,
    hbm_bytes_per_s=1,
    nvlink_bytes_per_s=1,
    network_bytes_per_s=1,
    host_bytes_per_s=1,
)
FAST = 1e30  # a rate that takes no time


def tiny(**changes: Any) -> ModelInfo:
    """2 layers, hidden 4, 2 heads of 3, 1 KV head, feed-forward 5, vocabulary 7: 340 parameters."""
    sizes: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 4,
        "intermediate_size": 5,
        "num_experts": None,
        "num_experts_per_token": 0,
        "normalises_chosen_experts": False,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 3,
        "vocab_size": 7,
        "max_position_embeddings": 64,
        "has_tied_embeddings": False,
        "norm_epsilon": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling_factor": None,
        "num_stored_scalars": None,
    }
    return ModelInfo(**(sizes | changes))


def workload(**changes: Any) -> Workload:
    """One GPU trains and one samples: 4 prompts of 2 tokens, 2 responses of about 8 tokens to each."""
    return replace(
        Workload(
            model=tiny(),
            num_gpus=2,
            train=TrainLayout(dp=1),
            num_engines=1,
            engine_tp=1,
            num_prompts=4,
            group_size=2,
            prompt_tokens=2,
            lengths=Lengths(mean=8, longest=9, sigma=0.001),
            updates=2,
            logprob_phases=1,
        ),
        **changes,
    )


# Lengths


@pytest.mark.parametrize("mean", [100, 1000, 3000])
def test_the_lengths_have_their_mean_and_none_is_over_the_maximum(mean: float) -> None:
    lengths = Lengths(mean=mean, longest=4096, sigma=0.8)
    values = [lengths.quantile((index + 0.5) / 20_000) for index in range(20_000)]
    assert max(values) <= 4096
    assert sum(values) / len(values) == pytest.approx(mean, rel=1e-3)
    assert sum(value**2 for value in values) / len(values) == pytest.approx(lengths.mean_square, rel=5e-3)


def test_a_mean_above_the_maximum_is_refused() -> None:
    with pytest.raises(ValueError, match="a mean of 50 tokens must lie between 0 and the maximum, 40"):
        Lengths(mean=50, longest=40, sigma=1)


# Generation


def unit_step(num_sequences: int, context_tokens: float) -> tuple[float, float, float]:
    return 1.0, context_tokens, float(num_sequences)


def test_responses_that_fit_decode_together_until_the_longest_ends() -> None:
    decoded = decode([3, 1], 8, 100, 10, unit_step)
    assert (decoded.steps, decoded.seconds) == (3, 3)
    assert decoded.link_bytes == 2 + 1 + 1  # sequences of each step
    # The first step begins with two prompts of 10, each of its middle is a token longer by half a step.
    assert decoded.hbm_bytes == (20 + 1) + 2 * (11 + 1)


def test_a_response_without_room_follows_the_one_that_ends() -> None:
    assert decode([3, 1], 1, 100, 10, unit_step).steps == 4
    assert decode([2, 2, 2], 2, 100, 10, unit_step).steps == 4


def test_when_the_cache_is_full_the_last_one_waits_with_what_it_has() -> None:
    # Both have 6 of 12 tokens after 6 steps; one ends after 10, and the other has 4 more to go.
    assert decode([10, 10], 8, 12, 0, unit_step).steps == 14


def test_a_decoding_step_reads_the_weights_and_the_cache() -> None:
    load, gpu = workload(), replace(SLOW, bf16_flops_per_s=FAST)
    seconds, hbm_bytes, link_bytes = decode_step(load, gpu, IDEAL, 3, 50)
    # 340 parameters, without 28 of the input embedding, in bf16; a token's keys and values are 24 bytes.
    assert hbm_bytes == 2 * (340 - 28) + 50 * 24
    assert (seconds, link_bytes) == (hbm_bytes, 0)


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    seconds, _, _ = decode_step(workload(), replace(SLOW, hbm_bytes_per_s=FAST), IDEAL, 3, 50)
    # Per sequence 528 of the layers and 56 of the logits; per token of context 48.
    assert seconds == 3 * (528 + 56) + 50 * 48


def test_an_engine_over_two_gpus_reads_half_and_reduces_twice_per_layer() -> None:
    load = workload(engine_tp=2)
    gpu = replace(SLOW, bf16_flops_per_s=FAST, hbm_bytes_per_s=FAST)
    seconds, hbm_bytes, link_bytes = decode_step(load, gpu, replace(IDEAL, allreduce_s=10), 3, 0)
    assert hbm_bytes == 340 - 28
    # 2 x 2 layers of 3 sequences x 4 values x 2 bytes, of which a ring of two sends all once.
    assert link_bytes == 4 * 24
    assert seconds == 4 * 24 + 4 * 10


def test_a_mixtures_step_reads_the_experts_that_its_tokens_reach() -> None:
    model = tiny(model_type="qwen3_moe", num_experts=4, num_experts_per_token=1)
    gpu = replace(SLOW, bf16_flops_per_s=FAST)
    _, few, _ = decode_step(workload(model=model), gpu, IDEAL, 1, 0)
    _, many, _ = decode_step(workload(model=model), gpu, IDEAL, 100, 0)
    assert few == pytest.approx(2 * weights_read(model, 1))
    assert many - few == pytest.approx(2 * 2 * 3 * 60)  # three more experts in both layers


def test_the_cache_gets_what_weights_leave_and_an_engine_without_room_is_refused() -> None:
    load = workload(hbm_utilization=0.5)
    assert kv_tokens(load, SLOW, IDEAL) == int((0.5e6 - 680) / 24)
    with pytest.raises(LayoutError, match="leave no room"):
        kv_tokens(load, replace(SLOW, hbm_bytes=1500), IDEAL)


def test_linear_layers_of_8_bits_take_half_and_embeddings_do_not() -> None:
    load = workload(hbm_utilization=0.5, linear_bytes=1)
    # Of 340 parameters 28 are in the input embedding and 28 in the output layer.
    assert kv_tokens(load, SLOW, IDEAL) == int((0.5e6 - (340 - 56) - 2 * 56) / 24)
    _, hbm_bytes, _ = decode_step(load, SLOW, IDEAL, 3, 0)
    assert hbm_bytes == (340 - 56) + 2 * 28


def test_the_last_engine_has_the_longest_of_its_neighbours() -> None:
    load = workload(num_engines=2, lengths=Lengths(mean=50, longest=1000, sigma=0.8))
    quantiles = [round(load.lengths.quantile((index + 0.5) / 8)) for index in range(8)]
    assert slowest_engine_lengths(load) == quantiles[1::2]


def test_engines_beyond_the_prompts_have_nothing_to_do() -> None:
    few = slowest_engine_lengths(workload(num_engines=4))
    assert slowest_engine_lengths(workload(num_engines=100)) == few
    assert len(few) == 2  # one group


# Training


def test_a_forward_pass_takes_the_flops_of_the_model() -> None:
    load = workload()
    assert forward_s(load, SLOW, IDEAL) == pytest.approx(
        forward_flops_per_token(load.model, load.mean_context)
    )


def test_the_mean_context_is_half_the_length_where_all_are_equally_long() -> None:
    assert workload().mean_context == pytest.approx((2 + 8) / 2, rel=1e-3)


def test_a_replica_has_its_share_of_the_tokens_or_the_longest_sample() -> None:
    assert busiest_tokens(workload(), updates=2) == pytest.approx(8 * 10 / 2)
    alone = workload(train=TrainLayout(dp=8))
    assert busiest_tokens(alone, updates=1) == pytest.approx(10, rel=0.01)
    assert busiest_tokens(alone, updates=4) == pytest.approx(10, rel=0.01)


def test_a_pipeline_fills_and_drains() -> None:
    train = TrainLayout(pp=4, dp=1)
    assert bubble(train, 100, 100) == 4
    assert bubble(train, 300, 100) == 2
    assert bubble(replace(train, pp=1), 300, 100) == 1


def test_without_links_and_memory_a_step_is_arithmetic() -> None:
    gpu = replace(SLOW, hbm_bytes_per_s=FAST, nvlink_bytes_per_s=FAST, network_bytes_per_s=FAST)
    load = workload()
    forward = 80 * forward_flops_per_token(load.model, load.mean_context)
    cost = training_cost(load, gpu, IDEAL)
    assert (cost.logprobs_s, cost.training_s) == (pytest.approx(forward), pytest.approx(3 * forward))
    assert cost.model_flops_share == pytest.approx(1)
    recomputed = training_cost(workload(train=TrainLayout(dp=1, recomputes=True)), gpu, IDEAL)
    assert recomputed.training_s == pytest.approx(4 * forward)
    assert recomputed.model_flops_share == pytest.approx(3 / 4)


def test_tensor_parallelism_sends_two_reductions_per_layer_and_pass() -> None:
    cost = training_cost(workload(train=TrainLayout(tp=2, dp=1)), SLOW, IDEAL)
    # 80 tokens x 2 layers x 2 reductions x 4 values x 2 bytes, in a scoring, a forward and a backward pass.
    assert cost.nvlink_bytes == pytest.approx(3 * 80 * 2 * 2 * 8)
    assert cost.network_bytes == 0


def test_experts_of_more_than_a_node_get_tokens_over_the_network() -> None:
    model = tiny(model_type="qwen3_moe", num_experts=16, num_experts_per_token=1)
    load = workload(model=model, num_prompts=64, train=TrainLayout(dp=16, ep=16), updates=1, logprob_phases=0)
    cost = training_cost(load, SLOW, IDEAL)
    tokens = busiest_tokens(load, updates=1)
    copies = 2 * tokens * 2 * (2 * 4 * 2)  # there and back, in 2 passes, in 2 layers, of 4 values of 2 bytes
    assert cost.nvlink_bytes == pytest.approx(copies * 7 / 16)
    others = model.num_parameters - 2 * 16 * 60
    between_replicas = (4 + 2) * others * 15 / 16  # each expert is on one GPU only
    assert cost.network_bytes == pytest.approx(copies * 8 / 16 + between_replicas)


def test_gradients_hide_behind_the_last_backward_pass_and_weights_do_not() -> None:
    train = TrainLayout(dp=16)
    load = workload(num_prompts=64, train=train, updates=1)
    fast = replace(SLOW, hbm_bytes_per_s=FAST, nvlink_bytes_per_s=FAST)
    assert training_cost(load, fast, IDEAL).exposed_gradients_s == pytest.approx(2 * 340 * 15 / 16)
    slow = replace(fast, bf16_flops_per_s=FAST)
    assert training_cost(load, slow, IDEAL).exposed_gradients_s == pytest.approx(6 * 340 * 15 / 16)


# Weights and hosts


def test_an_update_has_as_many_tensors_as_the_checkpoint() -> None:
    # 36 layers of 11 and 48 of 8, a router and 128 experts of 3; embedding, last norm and output layer.
    assert num_tensors(workload(model=shape("Qwen3-8B"))) == 399
    assert num_tensors(workload(model=shape("Qwen3-30B-A3B"))) == 18_867


def test_weights_cross_the_network_once_and_stay_on_shared_gpus() -> None:
    assert weight_cost(workload(), SLOW, IDEAL).seconds == 680
    apart = weight_cost(workload(num_gpus=16), replace(SLOW, nvlink_bytes_per_s=FAST), IDEAL)
    assert (apart.seconds, apart.over_network) == (680, True)
    shared = weight_cost(workload(num_gpus=16, shares_gpus=True), SLOW, IDEAL)
    # And 18 bytes of a parameter leave for the host and come back.
    assert (shared.seconds, shared.over_network) == (680 + 2 * 18 * 340, False)


def test_the_drivers_figures_are_those_of_the_performance_page() -> None:
    table = PERFORMANCE.split("## The driver at scale")[1].split("## ")[0]
    pattern = r"^\| \d+ \(DP (\d+)[^)]*\) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"
    rows = re.findall(pattern, table, re.MULTILINE)
    assert len(rows) > 6
    for dp, samples, *seconds in rows:
        planned = DRIVER_SAMPLE_S * int(samples.replace(",", "")) + DRIVER_REPLICA_S * int(dp)
        if int(dp) >= 8:
            assert planned == pytest.approx(sum(map(float, seconds)), rel=0.25)


@pytest.mark.parametrize(("rows", "longest", "measured_ms"), [(512, 2048, 42), (2048, 4096, 103)])
def test_the_data_planes_figures_are_those_of_the_performance_page(
    rows: int, longest: int, measured_ms: float
) -> None:
    assert re.search(rf"^\| `ours_as_used` \|.* {measured_ms} \|", PERFORMANCE, re.MULTILINE)
    load = workload(
        num_prompts=rows // 16,
        group_size=16,
        prompt_tokens=0,
        lengths=Lengths(mean=0.625 * longest, longest=longest, sigma=0.4),
        logprob_phases=2,
        train=TrainLayout(dp=2),
    )
    assert host_cost(load).data_plane_s == pytest.approx(measured_ms / 1000, rel=0.1)


# Recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_at_its_own_size_is_the_recipe(recipe: Path) -> None:
    cfg = load_config(recipe)
    model = shape(Path(cfg.policy.model_name).name)
    for scaling in Scaling:
        load = scaled(cfg, model, cfg.cluster.num_nodes * cfg.cluster.gpus_per_node, scaling, Assumptions())
        assert load.train.num_gpus == policy_world_size(cfg.policy)
        assert load.num_engines == cfg.generation.num_engines
        assert load.num_prompts == cfg.grpo.num_prompts_per_step
        assert load.updates == load.num_samples // cfg.policy.train_global_batch_size


def planned(recipe: str, num_gpus: int, scaling: Scaling = Scaling.weak) -> StepCost | LayoutError:
    cfg = load_config(ROOT / "recipes" / f"{recipe}.yaml")
    return plan_scale.planned_step(cfg, num_gpus, scaling, GPUS["h100-sxm"], Assumptions())


def test_more_gpus_have_more_replicas_and_engines_and_the_batch_grows_if_it_shall() -> None:
    grown, constant = (planned("grpo-qwen3-8b-1n8g", 64, scaling) for scaling in Scaling)
    assert isinstance(grown, StepCost) and isinstance(constant, StepCost)
    for cost in (grown, constant):
        assert (cost.workload.train.dp, cost.workload.train.tp, cost.workload.num_engines) == (8, 4, 32)
    assert (grown.workload.num_prompts, constant.workload.num_prompts) == (512, 64)


@pytest.mark.parametrize("name", ["glm4.5-air-12n8g", "gpt-oss-20b-2n8g", "mistral-small-24b-2n8g"])
def test_a_recipe_of_several_nodes_is_planned_on_multiples_of_its_gpus(name: str) -> None:
    path = ROOT / "recipes" / f"grpo-{name}.yaml"
    steps = plan_scale.plan([path], None, GPUS["h100-sxm"], Assumptions())
    assert len(steps) == 8 and all(isinstance(cost, StepCost) for cost in steps.values())
    num_nodes = int(name.rsplit("-", maxsplit=1)[-1].removesuffix("n8g"))
    assert {num for _, _, num in steps} == {8 * num_nodes * factor for factor in (1, 2, 4, 8)}


def test_engines_of_8_bits_hold_deepseek_v3_on_the_gpus_of_its_recipe_alone() -> None:
    path = ROOT / "recipes" / "grpo-deepseek-v3-24n8g.yaml"
    steps = plan_scale.plan([path], None, GPUS["h200"], Assumptions())
    assert len(steps) == 8 and all(isinstance(cost, StepCost) for cost in steps.values())
    refused = str(planned("grpo-deepseek-v3-24n8g", 192))
    assert "84 GB a GPU, leave no room for a KV cache on h100-sxm; try another --gpu" in refused


def test_too_few_gpus_for_the_experts_are_no_layout() -> None:
    assert "experts need 8 training GPUs" in str(planned("grpo-qwen3-30b-a3b-4n8g", 8))


def test_what_does_not_train_with_megatron_on_gpus_is_not_planned() -> None:
    cfg = load_config(ROOT / "configs" / "grpo_arithmetic_cpu.yaml")
    with pytest.raises(LayoutError, match="only recipes of Megatron-core on GPUs"):
        scaled(cfg, tiny(), 8, Scaling.weak, Assumptions())


def test_a_batch_that_grows_takes_as_long_on_gpus_and_longer_on_hosts() -> None:
    small, large = planned("grpo-llama3.1-8b-1n8g", 64), planned("grpo-llama3.1-8b-1n8g", 1024)
    assert isinstance(small, StepCost) and isinstance(large, StepCost)
    assert tuple(large.seconds) == STAGES
    assert large.generation.seconds == pytest.approx(small.generation.seconds, rel=0.01)
    assert large.seconds["training"] == pytest.approx(small.seconds["training"], rel=0.01)
    assert large.seconds["driver"] > 10 * small.seconds["driver"]


def test_a_step_off_waits_for_the_slower_side_only() -> None:
    cost = step_cost(workload(), SLOW, IDEAL)
    seconds = cost.seconds
    trainer = seconds["log-probs"] + seconds["training"]
    assert cost.total_s - cost.overlapped_s == pytest.approx(min(seconds["generation"], trainer))


@pytest.mark.parametrize(
    ("name", "billions", "active"), [("Qwen3-235B-A22B", 235, 22), ("Qwen2.5-Math-7B", 7.6, 7.6)]
)
def test_the_shapes_of_published_models_have_their_sizes(name: str, billions: float, active: float) -> None:
    counts = shape(name).parameters
    assert planned_shape(name) is None  # no recipe names it
    assert counts.total / 1e9 == pytest.approx(billions, rel=0.01)
    assert counts.active / 1e9 == pytest.approx(active, rel=0.02)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plan_scale.py", *arguments])
    return plan_scale.main()


def test_json_has_steps_and_what_is_behind_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(ROOT / "recipes" / "grpo-qwen3-30b-a3b-4n8g.yaml")
    assert run(monkeypatch, "--config", recipe, "--gpus", "8,32", "--gpu", "h200", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"]["name"] == "h200"
    assert report["assumptions"]["prompt_tokens"] == 200
    too_few, step = report["steps"][:2]
    assert "no_layout" in too_few
    assert step["layout"]["ep"] == 8 and step["layout"]["engines"] == 8
    assert step["step_s"] == pytest.approx(sum(step["seconds"].values()))


def test_longer_responses_take_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(ROOT / "recipes" / "grpo-qwen3-8b-1n8g.yaml")
    seconds = []
    for share in ("0.2", "0.6"):
        run(monkeypatch, "--config", recipe, "--gpus", "8", "--mean-response", share, "--json")
        seconds.append(json.loads(capsys.readouterr().out)["steps"][0]["step_s"])
    assert seconds[1] > 1.5 * seconds[0]


def test_a_configuration_that_is_not_there_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "--config", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--gpus", "0,8"), ("--mean-response", "1.5"), ("--gpu", "tpu")])
def test_arguments_that_mean_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)


def test_recipes_models_are_those_whose_shapes_are_shipped() -> None:
    for path in plan_scale.DEFAULT_CONFIGS:
        cfg = load_config(path)
        directory = planned_shape(cfg.policy.model_name)
        assert directory is not None
        assert read_model_info(str(directory), "megatron").num_parameters > 1e9
