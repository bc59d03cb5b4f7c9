"""A trainer on what a real engine sampled, watched from inside its experts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from safetensors.torch import load_file, save_file

from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.batch.policy_columns import scored_columns
from nemo_like.policy.groups.parallelism import logprob_strategy, train_strategy
from nemo_like.policy.options import PolicyConfig
from tests.functional.policy_fixtures import loss_config, put_samples, ready_worker


@dataclass
class Watched:
    """What a step's phases measured, and which experts each token met.

    ``used[pass, layer]`` has, for every token of every forward pass in its order, the token's place in the
    batch's packed columns and its experts, numbered from 1.
    """

    metrics: dict[str, float]
    used: dict[tuple[str, int], list[tuple[int, frozenset[int]]]]


class ExpertWatch:
    """Sees which rows of hidden states come to which expert, and whose they are."""

    def __init__(self, model: torch.nn.Module, batch_offsets: Sequence[int]) -> None:
        self.used: dict[tuple[str, int], list[tuple[int, frozenset[int]]]] = {}
        self.phase = ""
        self._offsets, self._inputs = batch_offsets, None
        self._hidden: torch.Tensor
        make = PolicyBatch.micro_batch

        def remembered(batch: PolicyBatch, *args: Any) -> ModelInputs:
            self._inputs = make(batch, *args)
            return self._inputs

        PolicyBatch.micro_batch = remembered  # in a process of its own
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        for number, layer in enumerate(layers):
            assert isinstance(layer.experts, SequentialMLP)
            layer.register_forward_pre_hook(self._keep_hidden)
            layer.experts.register_forward_pre_hook(self._watch(number))

    def _keep_hidden(self, layer: Any, args: tuple[Any, ...]) -> None:
        self._hidden = args[0].detach()  # [T, B, hidden]

    def _watch(self, number: int) -> Any:
        def watch(experts: Any, args: tuple[Any, ...]) -> None:
            rows, counts = args[0].detach(), args[1].tolist()
            of_row = np.repeat(np.arange(len(counts)), counts) + 1
            met: dict[bytes, set[int]] = {}
            for row, expert in zip(rows, of_row.tolist(), strict=True):
                met.setdefault(row.numpy().tobytes(), set()).add(expert)
            seen = self.used.setdefault((self.phase, number), [])
            inputs = self._inputs
            assert inputs is not None
            for place, sample in enumerate(inputs.rows.tolist()):
                start, end = self._offsets[sample], self._offsets[sample + 1]
                for position in range(end - start - 1):
                    hidden = self._hidden[position, place].numpy().tobytes()
                    seen.append((start + position, frozenset(met[hidden])))

        return watch


def watched_step(coordinates: Coordinates, cfg: PolicyConfig, batch: dict[str, Any]) -> Watched:
    """One rank, padded micro-batches: log-probs and training of a step."""
    plane = InMemoryDataPlane()
    meta = put_samples(plane, "step", batch, batch["chunk_size"])
    loss = loss_config()
    worker = ready_worker(cfg, loss, coordinates, plane)
    offsets = [0, *np.cumsum(batch["lengths"]).tolist()]
    watch = ExpertWatch(worker._backend._model, offsets)
    sizes = {"num_shards": 1, "global_batch_size": len(batch["lengths"])}
    watch.phase = "logprobs"
    [scoring] = shard_for_logprobs(meta, strategy=logprob_strategy(cfg), **sizes)
    assert scoring.sample_ids == meta.sample_ids
    scores = worker.compute_logprobs(scoring, scored_columns(loss))
    watch.phase = "training"
    [training] = shard_for_training(meta, strategy=train_strategy(cfg), **sizes)
    assert training.sample_ids == meta.sample_ids
    update = worker.train(training)
    assert scores is not None
    assert update is not None
    metrics = {name: one.value for name, one in {**update.metrics, **scores.metrics}.items()}
    return Watched(metrics, watch.used)


class RoundedChoice:
    """Has a router choose by scores that are rounded to bfloat16, and leaves the rest as it was."""

    def __init__(self, router: TopKRouter) -> None:
        self._replay = router.router_replay

    def get_replay_topk(self, scores: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *how, choose = how

        def rounded(scores: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
            _, places = choose(scores.bfloat16().float(), *how)
            return scores.gather(1, places), places

        if self._replay is None:
            return rounded(scores, *how)
        return self._replay.get_replay_topk(scores, *how, rounded)


class Routers(Enum):
    """What of the trainer's routers is of low precision."""

    choice = "choice"
    nothing_here = "nothing_here"  # but in the checkpoint


def scored_step(
    coordinates: Coordinates, cfg: PolicyConfig, batch: dict[str, Any], routers: Routers
) -> dict[str, float]:
    """One rank: the metrics of a step's log-probs."""
    plane = InMemoryDataPlane()
    meta = put_samples(plane, "step", batch, batch["chunk_size"])
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    if routers is Routers.choice:
        for module in worker._backend._model.modules():
            if isinstance(module, TopKRouter):
                module.router_replay = RoundedChoice(module)
    sizes = {"num_shards": 1, "global_batch_size": len(batch["lengths"])}
    [scoring] = shard_for_logprobs(meta, strategy=logprob_strategy(cfg), **sizes)
    scores = worker.compute_logprobs(scoring, scored_columns(loss_config()))
    assert scores is not None
    return {name: one.value for name, one in scores.metrics.items()}


def with_low_precision_routers(checkpoint: Path, path: Path) -> Path:
    """The same checkpoint with the routers' weights rounded to bfloat16."""
    shutil.copytree(checkpoint, path)
    tensors = load_file(path / "model.safetensors")
    rounded = {
        name: tensor.bfloat16().float() if name.endswith("mlp.gate.weight") else tensor
        for name, tensor in tensors.items()
    }
    assert any(not torch.equal(rounded[name], tensors[name]) for name in tensors)
    save_file(rounded, path / "model.safetensors", metadata={"format": "pt"})
    return path
