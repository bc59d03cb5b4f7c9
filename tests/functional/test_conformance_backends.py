"""The conformance kit on the real backends: loss, gradient norm and weights of every layout are those of the
dense float64 reference on the same model.

The golden batches keep their tokens, masks, advantages and the gaps between log-probs; the model's own
log-probs take the place of the table's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.batch.columns import ENTROPIES, MESSAGE_FLAGS, POLICY_COLUMNS, ROLLOUT_COLUMNS
from nemo_like.batch.sharding import shard_for_training
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.observability.metrics import merge
from nemo_like.policy.groups.parallelism import parallel_layout, train_strategy
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.options import LRDecayStyle, PolicyConfig
from tests.conformance import generate, ours, reference
from tests.functional.dense_reference import with_all_rows
from tests.functional.policy_fixtures import MicroBatching, make_checkpoint, policy_config, ready_worker
from tests.functional.worlds import run_world

BATCHES = {one["name"]: one for one in generate.load("batches")}
CASES = {case["name"]: case for case in generate.load("cases")}
QUICK = (
    *("ppo/token/none", "ppo_dual_clip/sample/tis", "gspo/sample/icepop", "gspo_token/constant/plain"),
    *("cispo/token/seq_mask", "reinforce/constant/icepop", "sapo/sample/none", "on_policy/token/tis"),
    *("engine_ratio/sample/none", "ppo/token/k3", "gspo/sample/k3", "ppo/sample/entropy"),
    *("ppo/token/moving_entropy", "ppo/token/kl_in_reward", "ppo/token/top_entropy"),
    *("sapo/sample/likelihood", "gspo/sample/penalties"),
)
# What the cases that read such tags have in common.
FURTHER = {"entropy": 0.2, "likelihood": 0.3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"micro_batch_size": 3},
    "packed": {"micro_batching": MicroBatching.packed},
    "shared": {"micro_batching": MicroBatching.shared},
    "dynamic": {"micro_batching": MicroBatching.dynamic},
    "DP2": {"dp": 2, "micro_batch_size": 1},
    "DP2, packed": {"dp": 2, "micro_batching": MicroBatching.packed},
    "TP2 with sequence parallelism": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2, "micro_batch_size": 1},
    "CP2": {"cp": 2, "micro_batching": MicroBatching.packed},
    "FSDP": {"backend": "fsdp"},
    "FSDP2 over two": {"dp": 2, "backend": "fsdp", "micro_batching": MicroBatching.packed},
    "FSDP2 with TP2": {"tp": 2, "backend": "fsdp"},
}
QUICK_LAYOUTS = ("DP2", "FSDP2 over two")
# Updates of the quick cases, one after the other.
RATE, BETAS, EPSILON = 1e-2, (0.9, 0.99), 1e-3


def settings(model: Path, layout: dict[str, Any], rate: float) -> PolicyConfig:
    cfg = policy_config(model, **layout)
    return replace(
        cfg,
        max_grad_norm=1e30,
        optimizer=replace(
            cfg.optimizer,
            lr=rate,
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPSILON,
        ),
        scheduler=replace(cfg.scheduler, warmup_updates=0, decay_style=LRDecayStyle.constant, min_lr=0.0),
    )


@dataclass(frozen=True)
class Work:
    """Batches whose columns are for the model, and the names of the cases to train with, in this order."""

    batches: dict[str, list[dict[str, Any]]]
    cases: tuple[str, ...]
    export: str | None = None


def train(coordinates: Coordinates, cfg: PolicyConfig, work: Work) -> dict[tuple[str, str], Any]:
    """One rank: an update per batch and case, by the worker's own method; the leaders' metrics."""
    plane, found = InMemoryDataPlane(), {}
    # A backend is built with or without the entropy, so it is reported for every case.
    losses = {
        case: replace(ours.loss_config(CASES[case]), entropy_coef=CASES[case]["entropy"])
        for case in work.cases
    }
    worker = ready_worker(cfg, losses[work.cases[0]], coordinates, plane)
    for name, samples in work.batches.items():
        shard = _shard(plane, name, samples, cfg, coordinates.dp)
        for case, loss in losses.items():
            worker.loss, worker._backend.objective = loss, PolicyObjective(loss, 1.0)
            update = worker.train(shard)
            if update is not None:
                found[name, case] = dict(update.metrics)
    if work.export is not None:
        worker.export_hf(work.export)
    return found


def _shard(
    plane: InMemoryDataPlane, name: str, samples: list[dict[str, Any]], cfg: PolicyConfig, dp: int
) -> Any:
    further = ours.further_columns(samples, range(len(samples)))
    columns = ours.packed_columns(samples) | {column.name: values for column, values in further.items()}
    groups = [sample["group"] for sample in samples]
    put, scored = (*ROLLOUT_COLUMNS, MESSAGE_FLAGS), (*POLICY_COLUMNS, ENTROPIES)
    plane.open_partition(name, [*put, *scored])
    meta = plane.put(
        name,
        {column.name: columns[column.name] for column in put},
        lengths=[len(sample["ids"]) for sample in samples],
        chunk_sizes=[groups.count(group) for group in dict.fromkeys(groups)],
        tags={
            "advantage": [sample["advantage"] for sample in samples],
            "sample_mask": [float(sample["trains"]) for sample in samples],
            "num_response_tokens": [sum(sample["generated"]) for sample in samples],
            "num_prompt_tokens": [ours.PROMPT] * len(samples),
            "group_id": groups,
            **ours.further_tags(samples, FURTHER),
        },
    )
    meta = plane.write(meta, {column.name: columns[column.name] for column in scored})
    shards = shard_for_training(
        meta,
        num_shards=cfg.data_parallel_size,
        global_batch_size=len(samples),
        strategy=train_strategy(cfg),
    )
    return shards[dp]


class Dense:
    """The model in float64, sample by sample."""

    def __init__(self, path: Path) -> None:
        self.model = with_all_rows(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64))
        self.parameters = list(self.model.parameters())

    def scores(self, samples: list[dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
        logprobs, entropies = [], []
        for sample in samples:
            ids = torch.tensor(sample["ids"])
            at = torch.tensor(sample["generated"]).nonzero()[:, 0]
            rows = self.model(ids[None]).logits[0].log_softmax(-1)[at - 1]
            logprobs.append(rows.gather(1, ids[at, None])[:, 0])
            entropies.append(-(rows.exp() * rows).sum(-1))
        return logprobs, entropies

    @torch.no_grad()
    def samples(self, one: dict[str, Any]) -> list[dict[str, Any]]:
        """The batch's samples with log-probs as far from the model's own as they are from the table's."""
        table = torch.tensor(one["table"], dtype=torch.float64)
        of_table, _ = reference.table_scores(table, one["samples"])
        own, _ = self.scores(one["samples"])
        moved = []
        for sample, before, now in zip(one["samples"], of_table, own, strict=True):
            columns = {
                name: (torch.tensor(sample[name], dtype=torch.float64) - before + now).tolist()
                for name in ("prev", "generation", "reference")
            }
            moved.append({**sample, **columns})
        return moved

    def expected(
        self, samples: list[dict[str, Any]], cases: tuple[str, ...]
    ) -> dict[str, tuple[float, float]]:
        """Loss and gradient norm by case, from the derivative of each score by each weight."""
        scores = self.scores(samples)
        flat = torch.cat([*scores[0], *scores[1]])
        rows = []
        for value in flat:
            gradients = torch.autograd.grad(value, self.parameters, retain_graph=True)
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
        by_weight = torch.stack(rows)
        found = {}
        for case in cases:
            terms = reference.loss_terms(*scores, samples, CASES[case])
            slopes = torch.cat((terms.gradient, terms.entropy_gradient))
            found[case] = (terms.loss.sum().item(), (slopes @ by_weight).norm().item())
        return found

    def trained(self, samples: list[dict[str, Any]], cases: tuple[str, ...]) -> dict[str, Tensor]:
        """The weights after an update with each of the cases."""
        optimizer = torch.optim.AdamW(self.parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=0.0)
        for case in cases:
            optimizer.zero_grad()
            scores = self.scores(samples)
            terms = reference.loss_terms(*scores, samples, CASES[case])
            reference.with_gradients(terms, *scores).backward()
            optimizer.step()
        return dict(self.model.state_dict())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("conformance") / "model")


@dataclass(frozen=True)
class Problem:
    """Samples by batch, and what each batch and case must give."""

    work: Work
    expected: dict[tuple[str, str], tuple[float, float]]


def problem(checkpoint: Path, batches: tuple[str, ...], cases: tuple[str, ...]) -> Problem:
    dense = Dense(checkpoint)
    samples = {name: dense.samples(BATCHES[name]) for name in batches}
    expected = {
        (name, case): values
        for name, of_batch in samples.items()
        for case, values in dense.expected(of_batch, cases).items()
    }
    return Problem(Work(samples, cases), expected)


@pytest.fixture(scope="module")
def some(checkpoint: Path) -> Problem:
    return problem(checkpoint, ("all",), QUICK)


@pytest.fixture(scope="module")
def everything(checkpoint: Path) -> Problem:
    return problem(checkpoint, tuple(BATCHES), tuple(CASES))


def check(given: Problem, cfg: PolicyConfig) -> None:
    ranks = run_world(train, parallel_layout(cfg), cfg, given.work, timeout_s=600.0)
    leaders = [rank for rank in ranks if rank]
    assert len(leaders) == cfg.data_parallel_size
    for key, (loss, norm) in given.expected.items():
        metrics = merge(leader[key] for leader in leaders)
        # Of a loss that nearly cancels, float32 leaves a share of the gradient's size.
        assert metrics["loss"].value == pytest.approx(loss, rel=2e-5, abs=1e-5 + 1e-6 * norm), key
        assert metrics["grad_norm"].value == pytest.approx(norm, rel=2e-4, abs=1e-6), key


@pytest.mark.parametrize("layout", QUICK_LAYOUTS)
def test_a_layout_gives_what_the_reference_gives(layout: str, checkpoint: Path, some: Problem) -> None:
    check(some, settings(checkpoint, LAYOUTS[layout], 1e-12))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_on_every_batch_what_the_reference_gives(
    layout: str, checkpoint: Path, everything: Problem
) -> None:
    check(everything, settings(checkpoint, LAYOUTS[layout], 1e-12))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "DP2, packed" else pytest.mark.slow) for name in LAYOUTS],
)
def test_updates_move_the_weights_as_the_reference_s_do(
    layout: str, checkpoint: Path, tmp_path: Path
) -> None:
    cfg, dense = settings(checkpoint, LAYOUTS[layout], RATE), Dense(checkpoint)
    before = {name: value.clone() for name, value in dense.model.state_dict().items()}
    samples = dense.samples(BATCHES["ragged"])
    run_world(train, parallel_layout(cfg), cfg, Work({"ragged": samples}, QUICK, str(tmp_path / "weights")))
    expected = dense.trained(samples, QUICK)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float64).state_dict()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        moved = (expected[name] - before[name]).abs().max()
        assert (weight - expected[name]).abs().max() <= 2e-3 * moved + 1e-6, name
        assert moved > RATE / 2, name
