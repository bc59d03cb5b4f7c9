"""What one worker's backend holds and does, whatever the numbers: memory, precision, reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from nemo_like.batch.columns import Column, Layout
from nemo_like.batch.meta import Chunk, KVBatchMeta, Schedule
from nemo_like.batch.sharding import shard_for_training
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.storage_errors import DataPlaneError, MissingData, StorageFailed
from nemo_like.models.model_info import read_model_info
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.fsdp.backend import FSDPBackend
from nemo_like.policy.groups.layout import length_multiple
from nemo_like.policy.groups.parallelism import parallel_layout, train_strategy
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.megatron.backend import MegatronBackend
from nemo_like.policy.megatron.model import transformer_config
from nemo_like.policy.options import (
    BACKEND_KINDS,
    Fp8Format,
    Fp8Recipe,
    LRDecayStyle,
    PolicyConfig,
    Precision,
)
from nemo_like.policy.workers.replica import Replica
from tests.functional.policy_fixtures import (
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    random_batch,
)
from tests.functional.worlds import WorldPool
from tests.unit.data_plane.fields import frozen

NUM_SAMPLES = 16
VOCAB_SIZE = 4096


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    with WorldPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3")


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def schedule_of(cfg: PolicyConfig, batch: dict[str, Any]) -> Schedule:
    """All samples in one update."""
    lengths = tuple(batch["lengths"])
    meta = KVBatchMeta(
        partition="step",
        chunks=(Chunk("all", lengths),),
        rows=tuple((0, row) for row in range(len(lengths))),
        columns=frozenset(),
        tags={name: tuple(values) for name, values in batch["tags"].items()},
    )
    (shard,) = shard_for_training(
        meta, num_shards=1, global_batch_size=len(lengths), strategy=train_strategy(cfg)
    )
    assert shard.schedule is not None
    return shard.schedule


def policy_batch(batch: dict[str, Any], **columns: Tensor) -> PolicyBatch:
    values = {name: batch["tags"][name] for name in ("advantage", "sample_mask")}
    return PolicyBatch({**batch["columns"], **columns}, batch["lengths"], values, torch.device("cpu"))


def largest_tensor_of_a_step(
    coordinates: Coordinates, cfg: PolicyConfig, max_chunk_bytes: int
) -> tuple[int, int]:
    """Elements of the largest tensor while a policy scores and trains, and of all logits."""
    backend = {"megatron": MegatronBackend, "fsdp": FSDPBackend}[cfg.backend]
    policy = backend(cfg, PolicyObjective(loss_config(entropy_coef=0.01), 1.0), coordinates)
    model = policy._model
    model.logprob_settings = replace(model.logprob_settings, max_chunk_bytes=max_chunk_bytes)
    batch = random_batch(4 * NUM_SAMPLES)
    schedule = schedule_of(cfg, batch)
    with LargestTensor() as largest:
        prev = policy.logprobs(policy_batch(batch), schedule)
        policy.train(policy_batch(batch, prev_logprobs=prev), schedule)
    return largest.num_elements, sum(batch["tags"]["num_response_tokens"]) * VOCAB_SIZE


@pytest.mark.parametrize("backend", BACKEND_KINDS.names())
def test_logits_of_all_tokens_never_exist_at_once(backend: str, pool: WorldPool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", vocab_size=VOCAB_SIZE)
    cfg = policy_config(model, micro_batching=MicroBatching.packed, backend=backend)
    # One micro-batch with every sample, so that only the chunks keep the logits small.
    cfg.sequence_packing.train_mb_tokens = cfg.sequence_packing.logprob_mb_tokens = 2048
    chunk = 16 * VOCAB_SIZE
    ((largest, logits),) = pool.run(largest_tensor_of_a_step, parallel_layout(cfg), cfg, 4 * chunk)
    # The buffer of all gradients is larger than a chunk.
    assert chunk < largest < 0.15 * logits


def host_copies(coordinates: Coordinates, cfg: PolicyConfig, kl_penalty: float) -> tuple[bool, str]:
    """Whether a policy holds reference weights, and what it says when asked for their log-probs."""
    policy = MegatronBackend(cfg, PolicyObjective(loss_config(kl_penalty=kl_penalty), 1.0), coordinates)
    batch = random_batch(NUM_SAMPLES)
    try:
        policy.reference_logprobs(policy_batch(batch), schedule_of(cfg, batch))
        said = ""
    except RuntimeError as error:
        said = str(error)
    return policy._reference is not None, said


def fetch_with_failures_on_rank_1(coordinates: Coordinates) -> list[str]:
    """What each rank raises; the world goes on after each."""
    replica = Replica(coordinates, timeout_s=30.0)
    raised = []
    for failure in (StorageFailed("gone"), MissingData("not written"), DataPlaneError("odd"), None):
        try:
            replica.agree(failure if coordinates.rank == 1 else None)
            raised.append("nothing")
        except DataPlaneError as error:
            raised.append(type(error).__name__)
    return raised


def test_when_one_worker_cannot_fetch_none_computes(pool: WorldPool) -> None:
    layout = parallel_layout(policy_config(Path(), dp=2))
    others, own = pool.run(fetch_with_failures_on_rank_1, layout)
    assert own == ["StorageFailed", "MissingData", "DataPlaneError", "nothing"]
    assert others == ["StorageFailed", "DeadlineExceeded", "DataPlaneError", "nothing"]


SHARED = (
    Column("credit", "float32", Layout.per_token, inner_shape=(2,)),
    Column("score", "bool", Layout.per_sample),
    Column("state", "bfloat16", Layout.per_token),
    Column("level", "float64", Layout.per_sample, inner_shape=(3,), per_prompt=True),
    Column("images", "", Layout.ragged, per_prompt=True),
    Column("notes", "", Layout.objects),
)


def share_all_layouts(coordinates: Coordinates) -> Any:
    """What each worker of a replica gets of the leader's columns, in a form that compares."""
    meta = KVBatchMeta("p", (Chunk("a", (2, 3)), Chunk("b", (1,))), ((0, 0), (0, 1), (1, 0)), frozenset())
    fetched = {
        "credit": np.arange(12, dtype=np.float32).reshape(6, 2),
        "score": np.array([True, False, True]),
        "state": torch.arange(6).to(torch.bfloat16),
        "level": np.arange(6.0).reshape(2, 3),
        "images": [[np.ones((2, 2), np.uint8), torch.zeros(3)], []],
        "notes": [{"said": "é"}, None, [1, 2]],
    }
    replica = Replica(coordinates, timeout_s=30.0)
    return frozen(replica.share(SHARED, meta, fetched if coordinates.is_leader else None))


def test_a_leader_shares_columns_of_every_layout(pool: WorldPool) -> None:
    leader, other = pool.run(share_all_layouts, parallel_layout(policy_config(Path(), tp=2)))
    assert leader == other
    assert len(leader[1]) == len(SHARED)
    (alone,) = pool.run(share_all_layouts, parallel_layout(policy_config(Path())))
    assert dict(leader[1]) == dict(alone[1])


def test_without_a_kl_term_there_is_no_second_model(pool: WorldPool, model: Path) -> None:
    cfg = policy_config(model)
    ((holds, said),) = pool.run(host_copies, parallel_layout(cfg), cfg, 0.0)
    assert not holds
    assert "reference_policy_kl_penalty=0 keeps no reference policy" in said
    assert pool.run(host_copies, parallel_layout(cfg), cfg, 0.1) == [(True, "")]


def train_for(coordinates: Coordinates, cfg: PolicyConfig, num_updates: int, export: str) -> Tensor:
    """Log-probs before any update; the weights after all of them are exported."""
    policy = MegatronBackend(cfg, PolicyObjective(loss_config(), 1.0), coordinates)
    batch = random_batch(NUM_SAMPLES)
    schedule = schedule_of(cfg, batch)
    prev = policy.logprobs(policy_batch(batch), schedule)
    for _ in range(num_updates):
        policy.train(policy_batch(batch, prev_logprobs=prev), schedule)
    policy.export_hf(Path(export))
    return prev


def test_bfloat16_trains_on_float32_master_weights(pool: WorldPool, model: Path, tmp_path: Path) -> None:
    """Each update is smaller than half the spacing of bfloat16 at most weights, so it would be lost."""
    cfg = policy_config(model, micro_batching=MicroBatching.packed)
    cfg.optimizer.lr, num_updates = 1e-4, 12
    cfg.scheduler.warmup_updates, cfg.scheduler.decay_style = 0, LRDecayStyle.constant
    logprobs, moved = [], []
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    for precision in Precision:
        cfg.precision = precision
        export = tmp_path / precision.value
        (prev,) = pool.run(train_for, parallel_layout(cfg), cfg, num_updates, str(export))
        logprobs.append(prev)
        end = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).state_dict()
        name = "model.layers.0.mlp.down_proj.weight"
        is_large = start[name].abs() > 0.0625  # spacing 2**-11 there, five times an update
        moved.append((end[name] - start[name])[is_large].abs().mean())
    torch.testing.assert_close(logprobs[1], logprobs[0], rtol=0, atol=0.2)
    assert moved[0] > 5e-4
    assert moved[1] == pytest.approx(float(moved[0]), rel=0.3)


def gradient_bytes_between_phases(
    coordinates: Coordinates, cfg: PolicyConfig, num_updates: int, export: str
) -> list[int]:
    """Bytes of the gradient buffers after construction and after training; exports the weights."""
    policy = MegatronBackend(cfg, PolicyObjective(loss_config(), 1.0), coordinates)
    batch = random_batch(NUM_SAMPLES)
    schedule = schedule_of(cfg, batch)

    def num_bytes() -> int:
        return sum(
            buffer.grad_data.untyped_storage().size() for ddp in policy._ddps for buffer in ddp.buffers
        )

    seen = [num_bytes()]
    prev = policy.logprobs(policy_batch(batch), schedule)
    for _ in range(num_updates):
        policy.train(policy_batch(batch, prev_logprobs=prev), schedule)
    seen.append(num_bytes())
    policy.export_hf(Path(export))
    return seen


def test_gradients_that_leave_the_device_between_phases_change_no_weight(
    pool: WorldPool, model: Path, tmp_path: Path
) -> None:
    exported = []
    for offloads in (False, True):
        cfg = policy_config(model)
        cfg.offload_optimizer_for_logprob = offloads
        export = tmp_path / f"offloads-{offloads}"
        (num_bytes,) = pool.run(gradient_bytes_between_phases, parallel_layout(cfg), cfg, 2, str(export))
        assert [size == 0 for size in num_bytes] == [offloads, offloads]
        exported.append(AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).state_dict())
    for name, weight in exported[0].items():
        torch.testing.assert_close(weight, exported[1][name], rtol=0, atol=0)


def kept_bytes(compute: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result, and the bytes of what is kept for the backward pass."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return compute(), sum(sizes)


def test_megatron_core_is_told_the_8_bits_of_linear_layers(model: Path) -> None:
    cfg = policy_config(model)
    info, layout = read_model_info(model, cfg.backend), parallel_layout(cfg)
    assert transformer_config(info, cfg, layout).fp8 is None
    cfg.megatron_cfg.fp8, cfg.megatron_cfg.fp8_recipe = Fp8Format.hybrid, Fp8Recipe.mxfp8
    config = transformer_config(info, cfg, layout)
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("hybrid", "mxfp8", False)
    # What Megatron-core itself pads to is no more than what rows are padded to here.
    for recipe in Fp8Recipe:
        cfg.megatron_cfg.fp8_recipe = recipe
        assert length_multiple(cfg) % get_fp8_align_size(recipe.value) == 0


def test_the_activation_beside_transformer_engine_is_megatrons_which_keeps_its_input_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halves of F each, where the memory's plan counts 4 F for it and what the next layer keeps."""
    monkeypatch.setattr("nemo_like.policy.megatron.model.uses_transformer_engine", lambda device: True)
    # Megatron-core's own refuses what needs Transformer Engine where that is not installed.
    monkeypatch.setattr("nemo_like.policy.megatron.model.TransformerConfig", SimpleNamespace)
    cfg = policy_config(model)
    config = transformer_config(read_model_info(model, cfg.backend), cfg, parallel_layout(cfg))
    assert config.bias_activation_fusion and not config.use_te_activation_func

    torch.manual_seed(0)
    num_tokens, width = 8, 32
    halves = torch.randn(num_tokens, 1, 2 * width, requires_grad=True)
    with torch.compiler.set_stance("force_eager"):
        fused, num_bytes = kept_bytes(lambda: bias_swiglu_impl(halves, None))
        (gradient,) = torch.autograd.grad(fused.square().sum(), halves)
    assert num_bytes == 4 * num_tokens * 2 * width
    gate, up = halves.chunk(2, dim=-1)
    plain = silu(gate) * up
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.square().sum(), halves)[0])
