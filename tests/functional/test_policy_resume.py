"""A policy that was saved and loaded trains on as if nothing had been, under any layout."""

from __future__ import annotations

import functools
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import load_file

from nemo_like.batch.columns import PREV_LOGPROBS
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.models.model_info import read_model_info
from nemo_like.plan.plan import checkpoint_bytes
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.options import OptimizerKind, PolicyConfig, Precision
from nemo_like.policy.workers.worker import PolicyWorker
from nemo_like.tripwires.measured import Measured
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.worlds import WorldPool, run_world

Rounds = Callable[[Coordinates, PolicyConfig, Path, Path | None], list[float]]
Whole = Callable[[str, Path], tuple[Path, list[float]]]
BATCH = random_batch(16)
WRITING = CheckpointWriting.background
REPLICATED = {"use_distributed_optimizer": False}
FSDP = {"backend": "fsdp"}
ADAPTERS = {"adapts": ("all-linear",)}
MUON = {"optimizer_kind": OptimizerKind.muon, **REPLICATED}
EXPERT_ADAPTERS = {"adapts": ("o_proj", "gate_proj", "up_proj", "down_proj")}
# What no tripwire may count, before a checkpoint and after it.
NEVER = (
    Measured.num_unlike_saved,
    Measured.num_unlike_moments,
    Measured.num_wrong_updates,
    Measured.num_still_tensors,
    Measured.num_unequal_copies,
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "DP2 with sharded optimizer": {"dp": 2},
    "DP2 with replicated optimizer": {"dp": 2, **REPLICATED},
    "DP2 in bfloat16": {"dp": 2, "precision": Precision.bfloat16},
    "DP2 in float16": {"dp": 2, "precision": Precision.float16},
    "EP2 in float16": {"ep": 2, "dp": 2, "precision": Precision.float16, **REPLICATED},
    "FSDP, DP2 in float16": {"dp": 2, "precision": Precision.float16, **FSDP},
    "adapters, TP2 in float16": {"tp": 2, "precision": Precision.float16, **ADAPTERS},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "PP2 with two chunks": {"pp": 2, "vpp": 2},
    "PP2 with two chunks, DP2": {"pp": 2, "vpp": 2, "dp": 2},
    "adapters, PP2 with two chunks": {"pp": 2, "vpp": 2, **ADAPTERS},
    "FSDP, one": FSDP,
    "FSDP, DP2": {"dp": 2, **FSDP},
    "FSDP, TP2": {"tp": 2, **FSDP},
    "TP2 with replicated optimizer": {"tp": 2, **REPLICATED},
    "TP2 x PP2 with replicated optimizer": {"tp": 2, "pp": 2, **REPLICATED},
    "adapters, DP2": {"dp": 2, **ADAPTERS},
    "adapters, TP2": {"tp": 2, **ADAPTERS},
    "adapters, PP2": {"pp": 2, **ADAPTERS},
    "adapters, TP2 with replicated optimizer": {"tp": 2, **ADAPTERS, **REPLICATED},
    "FSDP, adapters, DP2": {"dp": 2, **ADAPTERS, **FSDP},
    "FSDP, adapters, TP2": {"tp": 2, **ADAPTERS, **FSDP},
    "EP2": {"ep": 2, "dp": 2},
    "EP2 with replicated optimizer": {"ep": 2, "dp": 2, **REPLICATED},
    "EP2 x TP2": {"ep": 2, "tp": 2, "sequence_parallel": True},
    "EP2 x TP2 with replicated optimizer": {"ep": 2, "tp": 2, "sequence_parallel": True, **REPLICATED},
    "EP4 x TP2": {"ep": 4, "tp": 2, "dp": 2, "sequence_parallel": True},
    "adapters of experts": EXPERT_ADAPTERS,
    "adapters of experts, TP2": {"tp": 2, "sequence_parallel": True, **EXPERT_ADAPTERS},
    "adapters of experts, PP2": {"pp": 2, **EXPERT_ADAPTERS},
    "adapters of experts, EP2": {"ep": 2, "dp": 2, **EXPERT_ADAPTERS},
    "adapters of experts, EP2 with replicated optimizer": {"ep": 2, "dp": 2, **EXPERT_ADAPTERS, **REPLICATED},
    "adapters of experts, divided over TP2": {
        "etp": 2,
        "tp": 2,
        "sequence_parallel": True,
        **EXPERT_ADAPTERS,
    },
    "FSDP, adapters of experts": {**EXPERT_ADAPTERS, **FSDP},
    "FSDP, adapters of experts, DP2": {"dp": 2, **EXPERT_ADAPTERS, **FSDP},
    "one with replicated optimizer": REPLICATED,
    "EP2 with experts in one matrix product": {"ep": 2, "dp": 2, "moe_grouped_gemm": True},
    "experts in one matrix product": {"moe_grouped_gemm": True},
    "Muon, TP2": {"tp": 2, **MUON},
    "Muon, PP2": {"pp": 2, **MUON},
    "Muon, DP2 in float16": {"dp": 2, "precision": Precision.float16, **MUON},
    "Muon, EP2 with experts in one matrix product": {"ep": 2, "dp": 2, "moe_grouped_gemm": True, **MUON},
    "Muon, one": MUON,
    "FSDP, Muon, DP2": {"dp": 2, **FSDP, **MUON},
    "FSDP, Muon, TP2": {"tp": 2, **FSDP, **MUON},
    "FSDP, Muon, DP2 in bfloat16": {"dp": 2, "precision": Precision.bfloat16, **FSDP, **MUON},
}


@contextmanager
def nothing_is_written() -> Iterator[None]:
    """In the block; what is written in the background is written after it, whatever the block changed."""
    left, save = threading.Event(), torch_checkpoint.save

    def late(*args: Any, **kwargs: Any) -> Any:
        assert left.wait(60)
        return save(*args, **kwargs)

    torch_checkpoint.save = late
    try:
        yield
    finally:
        torch_checkpoint.save = save
        left.set()


def train_rounds(
    coordinates: Coordinates, cfg: PolicyConfig, path: Path, resume_from: Path | None
) -> list[float]:
    """Two rounds of two updates, a checkpoint in between; or the second one alone, from a checkpoint.

    Returns this rank's gradient norm of the last round, and in float16 the loss's scale; exports the weights.
    """
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    with nothing_is_written():
        if resume_from is None:
            train(worker, put_samples(plane, "first", BATCH))
            worker.save_checkpoint(str(path / "checkpoint"), WRITING)
        else:
            worker.load_checkpoint(str(resume_from / "checkpoint"), version=1)
        norms = train(worker, put_samples(plane, "second", BATCH))
    worker.wait_for_checkpoint()
    assert worker.version == 2
    worker.export_hf(str(path / "export"))
    return norms


def train_after_saving(
    coordinates: Coordinates, cfg: PolicyConfig, path: Path, resume_from: Path | None
) -> list[float]:
    """A checkpoint before any update, then a round of two updates; or the round alone, from the checkpoint.

    Returns this rank's gradient norms; exports the weights.
    """
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    if resume_from is None:
        worker.save_checkpoint(str(path / "checkpoint"), CheckpointWriting.blocking)
        worker.wait_for_checkpoint()
    else:
        worker.load_checkpoint(str(resume_from / "checkpoint"), version=0)
    return trained_and_exported(worker, plane, path)


def train_without_saving(
    coordinates: Coordinates, cfg: PolicyConfig, path: Path, resume_from: Path | None
) -> list[float]:
    """The same round without a checkpoint."""
    plane = InMemoryDataPlane()
    return trained_and_exported(ready_worker(cfg, loss_config(), coordinates, plane), plane, path)


def measured_with_other_settings(
    coordinates: Coordinates, cfg: PolicyConfig, path: Path, resume_from: Path | None
) -> list[float]:
    """The weight decay with which a policy trains that goes on from a checkpoint of another one."""
    cfg.optimizer.weight_decay = 0.3
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    worker.load_checkpoint(str(resume_from / "checkpoint"), version=1)
    meta = put_samples(plane, "second", BATCH)
    sizes = {"num_shards": coordinates.layout.dp, "global_batch_size": 8, "strategy": train_strategy(cfg)}
    worker.compute_logprobs(shard_for_logprobs(meta, **sizes)[coordinates.dp], [PREV_LOGPROBS])
    update = worker.train(shard_for_training(meta, **sizes)[coordinates.dp])
    return [] if update is None else [update.measured[Measured.weight_decay].value]


def trained_and_exported(worker: PolicyWorker, plane: InMemoryDataPlane, path: Path) -> list[float]:
    norms = train(worker, put_samples(plane, "first", BATCH))
    worker.export_hf(str(path / "export"))
    return norms


def train(worker: PolicyWorker, meta: KVBatchMeta) -> list[float]:
    coordinates = worker.coordinates
    sizes = {"num_shards": coordinates.layout.dp, "global_batch_size": 8}
    worker.compute_logprobs(
        shard_for_logprobs(meta, strategy=logprob_strategy(worker.cfg), **sizes)[coordinates.dp],
        [PREV_LOGPROBS],
    )
    update = worker.train(
        shard_for_training(meta, strategy=train_strategy(worker.cfg), **sizes)[coordinates.dp]
    )
    if update is None:
        return []
    assert {name: update.measured[name].value for name in NEVER} == dict.fromkeys(NEVER, 0.0), update.named
    return [update.metrics[name].value for name in ("grad_norm", "loss_scale") if name in update.metrics]


def run(
    path: Path, layout: str, model: Path, resume_from: Path | None = None, rounds: Rounds = train_rounds
) -> list[float]:
    cfg = policy_config(model, **LAYOUTS[layout])
    (path / "checkpoint").mkdir(parents=True)
    (norms, *_) = [
        norms for norms in run_world(rounds, parallel_layout(cfg), cfg, path, resume_from) if norms
    ]
    return norms


@pytest.mark.parametrize(
    "layout",
    [
        *("DP2 with sharded optimizer", "FSDP, DP2", "adapters, TP2"),
        pytest.param("DP2 in bfloat16", marks=pytest.mark.slow),
        pytest.param("one", marks=pytest.mark.slow),
        pytest.param("TP2 x PP2 with replicated optimizer", marks=pytest.mark.slow),
        pytest.param("EP2", marks=pytest.mark.slow),
        pytest.param("one with replicated optimizer", marks=pytest.mark.slow),
        pytest.param("EP2 with replicated optimizer", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_from_before_the_first_update_is_continued(
    layout: str, model: Path, mixture: Path, tmp_path: Path
) -> None:
    """As one is that was saved while a critic warmed up."""
    source = mixture if layout.startswith("EP") else model
    norms = run(tmp_path / "saved", layout, source, rounds=train_after_saving)
    again = run(tmp_path / "resumed", layout, source, tmp_path / "saved", rounds=train_after_saving)
    plain = run(tmp_path / "plain", layout, source, rounds=train_without_saving)
    assert norms == again == plain
    expected = weights(tmp_path / "plain")
    for path in ("saved", "resumed"):
        found = weights(tmp_path / path)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("four_layers"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.fixture(scope="module")
def dense_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With shared experts, and routers with a bias that does not train."""
    return make_checkpoint(tmp_path_factory.mktemp("dense_first"), "glm4_moe", tied=False)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With projections to latents, which tensor-parallel ranks have whole."""
    return make_checkpoint(tmp_path_factory.mktemp("latent"), "deepseek_v3", tied=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """``whole(layout, model)``: two rounds in a layout, made once for all tests that go on from them.

    Returns where checkpoint and export are, and the gradient norms.
    """

    @functools.cache
    def trained(layout: str, model: Path) -> tuple[Path, list[float]]:
        path = tmp_path_factory.mktemp("whole")
        return path, run(path, layout, model)

    return trained


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted((path / "export").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "tolerance"),
    [
        pytest.param("one", "one", 0.0, marks=pytest.mark.slow),
        ("DP2 with sharded optimizer", "DP2 with sharded optimizer", 0.0),
        pytest.param(
            *("DP2 with replicated optimizer", "TP2 with replicated optimizer", 1e-5), marks=pytest.mark.slow
        ),
        ("TP2 x PP2 with replicated optimizer", "DP2 with replicated optimizer", 1e-5),
        ("FSDP, DP2", "FSDP, TP2", 1e-5),
        ("adapters, TP2", "adapters, TP2", 0.0),
        ("DP2 in float16", "DP2 in float16", 0.0),
        pytest.param(*["FSDP, DP2 in float16"] * 2, 0.0, marks=pytest.mark.slow),
        ("Muon, TP2", "Muon, TP2", 0.0),
        pytest.param(*["FSDP, Muon, DP2"] * 2, 0.0, marks=pytest.mark.slow),
        pytest.param("Muon, TP2", "Muon, PP2", 1e-5, marks=pytest.mark.slow),
        pytest.param(*["Muon, DP2 in float16"] * 2, 0.0, marks=pytest.mark.slow),
        pytest.param(*["FSDP, Muon, DP2 in bfloat16"] * 2, 0.0, marks=pytest.mark.slow),
        pytest.param("FSDP, Muon, DP2", "FSDP, Muon, TP2", 1e-5, marks=pytest.mark.slow),
        pytest.param(*["adapters, TP2 in float16"] * 2, 0.0, marks=pytest.mark.slow),
        pytest.param("adapters, TP2", "adapters, PP2", 1e-5, marks=pytest.mark.slow),
        pytest.param("adapters, DP2", "adapters, TP2", 1e-5, marks=pytest.mark.slow),
        pytest.param(*["adapters, TP2 with replicated optimizer"] * 2, 0.0, marks=pytest.mark.slow),
        pytest.param("FSDP, adapters, DP2", "FSDP, adapters, TP2", 1e-5, marks=pytest.mark.slow),
        pytest.param("FSDP, DP2", "FSDP, DP2", 0.0, marks=pytest.mark.slow),
        pytest.param("FSDP, TP2", "FSDP, one", 1e-5, marks=pytest.mark.slow),
        pytest.param("PP2", "one", 1e-5, marks=pytest.mark.slow),
        pytest.param("TP2", "PP2", 1e-5, marks=pytest.mark.slow),
        pytest.param("DP2 with sharded optimizer", "TP2", 1e-5, marks=pytest.mark.slow),
        pytest.param("one", "DP2 with sharded optimizer", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_policy_trains_on_as_if_never_stopped(
    saved_by: str, resumed_by: str, tolerance: float, model: Path, whole: Whole, tmp_path: Path
) -> None:
    check_resumption(whole(saved_by, model), resumed_by, tolerance, model, tmp_path)


@pytest.mark.parametrize("layout", ["one", "DP2 with sharded optimizer", "FSDP, DP2"])
def test_a_resumed_policy_trains_with_the_weight_decay_that_is_configured_now(
    layout: str, model: Path, whole: Whole, tmp_path: Path
) -> None:
    path, _ = whole(layout, model)
    assert run(tmp_path / "resumed", layout, model, path, rounds=measured_with_other_settings) == [0.3]


def test_a_tied_embedding_behind_padding_is_stored_whole(tmp_path: Path) -> None:
    """On the first stage its bucket begins behind others, whose sizes are no multiple of 128 here."""
    model = make_checkpoint(tmp_path / "model", "seed_oss")
    whole = tmp_path / "whole"
    check_resumption((whole, run(whole, "PP2", model)), "one", 1e-5, model, tmp_path / "resumed")


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "tolerance"),
    [
        ("PP2 with two chunks", "PP2 with two chunks", 0.0),
        pytest.param("PP2 with two chunks", "one", 1e-5, marks=pytest.mark.slow),
        pytest.param("PP2", "PP2 with two chunks, DP2", 1e-5, marks=pytest.mark.slow),
        pytest.param("PP2 with two chunks, DP2", "TP2", 1e-5, marks=pytest.mark.slow),
        pytest.param("adapters, PP2 with two chunks", "adapters, TP2", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_chunks_of_stages_are_the_same_in_every_checkpoint(
    saved_by: str, resumed_by: str, tolerance: float, four_layers: Path, whole: Whole, tmp_path: Path
) -> None:
    check_resumption(whole(saved_by, four_layers), resumed_by, tolerance, four_layers, tmp_path)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [("TP2", "PP2"), pytest.param("one", "TP2", marks=pytest.mark.slow)],
)
def test_norms_of_which_ranks_have_parts_are_stored_whole(
    saved_by: str, resumed_by: str, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", "olmo3")
    whole = tmp_path / "whole"
    check_resumption((whole, run(whole, saved_by, model)), resumed_by, 1e-5, model, tmp_path / "resumed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ("EP2 x TP2", "experts in one matrix product"),
        ("EP2 with experts in one matrix product", "EP2 x TP2"),
    ],
)
def test_sinks_and_biases_of_experts_are_stored_whole(saved_by: str, resumed_by: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "gpt_oss", tied=False)
    whole = tmp_path / "whole"
    check_resumption((whole, run(whole, saved_by, model)), resumed_by, 1e-5, model, tmp_path / "resumed")


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ("EP2 with experts in one matrix product", "EP2"),
        pytest.param("EP2", "EP2 with experts in one matrix product", marks=pytest.mark.slow),
        pytest.param("experts in one matrix product", "one", marks=pytest.mark.slow),
        pytest.param("one", "experts in one matrix product", marks=pytest.mark.slow),
        pytest.param("Muon, EP2 with experts in one matrix product", "Muon, one", marks=pytest.mark.slow),
        pytest.param("Muon, one", "Muon, EP2 with experts in one matrix product", marks=pytest.mark.slow),
    ],
)
def test_experts_are_the_same_in_every_checkpoint(
    saved_by: str, resumed_by: str, mixture: Path, whole: Whole, tmp_path: Path
) -> None:
    check_resumption(whole(saved_by, mixture), resumed_by, 1e-5, mixture, tmp_path)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ("EP2", "one"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [
                ("one with replicated optimizer", "EP2 with replicated optimizer"),
                ("one", "EP2"),
                ("EP2", "EP2 x TP2"),
                ("EP2 in float16", "EP2 in float16"),
                ("EP2 x TP2", "EP2"),
                ("EP2", "EP4 x TP2"),
                ("EP2 with replicated optimizer", "one with replicated optimizer"),
                ("EP2 with replicated optimizer", "EP2 x TP2 with replicated optimizer"),
            ]
        ),
    ],
)
def test_a_mixture_trains_on_under_other_expert_parallelism(
    saved_by: str, resumed_by: str, mixture: Path, whole: Whole, tmp_path: Path
) -> None:
    check_resumption(whole(saved_by, mixture), resumed_by, 1e-5, mixture, tmp_path)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "tolerance"),
    [
        ("adapters of experts", "adapters of experts", 0.0),
        pytest.param(*["FSDP, adapters of experts"] * 2, 0.0, marks=pytest.mark.slow),
        *(
            pytest.param(
                *(f"adapters of experts, {layout}" for layout in (saved, resumed)),
                tolerance,
                marks=pytest.mark.slow,
            )
            for saved, resumed, tolerance in [
                ("EP2", "EP2", 0.0),
                ("TP2", "TP2", 0.0),
                ("divided over TP2", "divided over TP2", 0.0),
                ("EP2 with replicated optimizer", "EP2 with replicated optimizer", 0.0),
                ("EP2", "divided over TP2", 1e-5),
                ("divided over TP2", "PP2", 1e-5),
                ("PP2", "TP2", 1e-5),
                ("TP2", "EP2", 1e-5),
            ]
        ),
        pytest.param(*["FSDP, adapters of experts, DP2"] * 2, 0.0, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_experts_train_on_as_if_never_stopped(
    saved_by: str, resumed_by: str, tolerance: float, mixture: Path, whole: Whole, tmp_path: Path
) -> None:
    check_resumption(whole(saved_by, mixture), resumed_by, tolerance, mixture, tmp_path)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        pytest.param("EP2", "PP2", marks=pytest.mark.slow),
        pytest.param("PP2", "EP2 x TP2", marks=pytest.mark.slow),
        pytest.param("EP2 with experts in one matrix product", "one", marks=pytest.mark.slow),
    ],
)
def test_a_mixture_whose_first_layer_is_dense_trains_on_under_another_layout(
    saved_by: str, resumed_by: str, dense_first: Path, whole: Whole, tmp_path: Path
) -> None:
    check_resumption(whole(saved_by, dense_first), resumed_by, 1e-5, dense_first, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "resumed_by"), [("EP2 x TP2", "PP2"), ("one", "EP2 x TP2")])
def test_layers_of_which_every_rank_has_a_copy_are_stored_once(
    saved_by: str, resumed_by: str, latent: Path, whole: Whole, tmp_path: Path
) -> None:
    check_resumption(whole(saved_by, latent), resumed_by, 1e-5, latent, tmp_path)


def test_an_older_checkpoint_of_experts_is_refused_under_other_expert_parallelism(
    mixture: Path, whole: Whole, tmp_path: Path
) -> None:
    older = Path(shutil.copytree(whole("EP2", mixture)[0], tmp_path / "older"))
    common = older / "checkpoint" / "common.pt"
    state = torch.load(common, weights_only=False)
    del state["content_metadata"]["chained_optim_avoid_prefix"]
    torch.save(state, common)
    with pytest.raises(AssertionError, match=r"saved by an older version.*expert_model_parallel_size"):
        run(tmp_path / "resumed", "one", mixture, resume_from=older)


def check_resumption(
    saved: tuple[Path, list[float]], resumed_by: str, tolerance: float, model: Path, tmp_path: Path
) -> None:
    path, norms = saved
    resumed_norms = run(tmp_path, resumed_by, model, resume_from=path)
    assert resumed_norms == pytest.approx(norms, abs=tolerance)
    expected, got = weights(path), weights(tmp_path)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=tolerance)


def test_an_optimizer_of_the_other_kind_is_refused(model: Path, whole: Whole, tmp_path: Path) -> None:
    saved, _ = whole("DP2 with sharded optimizer", model)
    with pytest.raises(AssertionError, match=r"was saved with .*use_distributed_optimizer=true"):
        run(tmp_path, "TP2 with replicated optimizer", model, resume_from=saved)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "was"),
    [
        ("Muon, TP2", "TP2 with replicated optimizer", "muon"),
        ("FSDP, Muon, DP2", "FSDP, DP2", "muon"),
        pytest.param("TP2 with replicated optimizer", "Muon, TP2", "adamw", marks=pytest.mark.slow),
        pytest.param("FSDP, DP2", "FSDP, Muon, DP2", "adamw", marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_of_the_other_rule_is_refused(
    saved_by: str, resumed_by: str, was: str, model: Path, whole: Whole, tmp_path: Path
) -> None:
    saved, _ = whole(saved_by, model)
    with pytest.raises(AssertionError, match=rf"was saved with policy.optimizer.kind={was}"):
        run(tmp_path, resumed_by, model, resume_from=saved)


def save_on_a_full_disk(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> tuple[bool, str]:
    """Whether training went on meanwhile, and what came of the checkpoint."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    train(worker, put_samples(plane, "first", BATCH))
    # A file may hold the small parts of a checkpoint, which are written at once, and no more.
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 * 1024, resource.RLIM_INFINITY))
    worker.save_checkpoint(str(path), WRITING)
    train(worker, put_samples(plane, "second", BATCH))
    try:
        worker.wait_for_checkpoint()
    except RuntimeError as error:
        return worker.version == 2, str(error)
    return False, "it was written"


@pytest.mark.parametrize(
    "layout", ["DP2 with sharded optimizer", pytest.param("FSDP, DP2", marks=pytest.mark.slow)]
)
def test_every_worker_knows_when_writing_in_the_background_failed(
    layout: str, model: Path, tmp_path: Path
) -> None:
    cfg = policy_config(model, **LAYOUTS[layout])
    for trained_on, problem in run_world(save_on_a_full_disk, parallel_layout(cfg), cfg, tmp_path):
        assert trained_on
        assert re.match(r"rank \d: \w+: ", problem)


def verify_damaged(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> tuple[list[str], list[str]]:
    """What this rank finds in a checkpoint as it was written, and after a flipped byte in another's file."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    train(worker, put_samples(plane, "first", BATCH))
    worker.save_checkpoint(str(path), WRITING)
    shares: list[dict[str, str]] = [{}] * coordinates.layout.world_size
    dist.all_gather_object(shares, worker.wait_for_checkpoint())
    digests = {name: digest for share in shares for name, digest in share.items()}
    assert digests.keys() == {file.name for file in path.iterdir()}
    before = worker.corrupt_checkpoint_files(str(path), digests)
    dist.barrier()
    if coordinates.rank == 0:
        damaged = path / "__1_0.distcp"
        damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    dist.barrier()
    return before, worker.corrupt_checkpoint_files(str(path), digests)


@pytest.mark.parametrize("layout", ["TP2", pytest.param("FSDP, DP2", marks=pytest.mark.slow)])
def test_the_worker_that_reads_a_corrupt_file_names_it(layout: str, model: Path, tmp_path: Path) -> None:
    cfg = policy_config(model, **LAYOUTS[layout])
    found = run_world(verify_damaged, parallel_layout(cfg), cfg, tmp_path)
    assert found == [([], []), ([], ["__1_0.distcp"])]


_STORED: list[dict[str, Any]] = [
    {},
    REPLICATED,
    {"precision": Precision.bfloat16},
    FSDP,
    {"precision": Precision.bfloat16, **ADAPTERS},
    {**REPLICATED, **ADAPTERS},
    {**FSDP, **ADAPTERS},
    MUON,
    {"precision": Precision.bfloat16, **MUON},
    {**FSDP, **MUON},
]


def saved_bytes(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> int:
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    train(worker, put_samples(plane, "first", BATCH))
    worker.save_checkpoint(str(path), WRITING)
    worker.wait_for_checkpoint()
    return sum(file.stat().st_size for file in path.iterdir())


def test_a_checkpoint_takes_the_space_that_was_expected_of_it(tmp_path: Path) -> None:
    # Large enough for names and places to be a few per cent.
    model = make_checkpoint(tmp_path / "model", vocab_size=4096)
    with WorldPool() as pool:
        for number, options in enumerate(_STORED):
            cfg = policy_config(model, **options)
            cfg.lora.rank = 1024
            path = tmp_path / str(number)
            path.mkdir()
            (found,) = pool.run(saved_bytes, parallel_layout(cfg), cfg, path)
            expected = checkpoint_bytes(cfg, read_model_info(str(model), cfg.backend))
            assert expected < found < 1.06 * expected, options
