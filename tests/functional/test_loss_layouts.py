"""Every loss on every layout: the same number, gradient norm and metrics as one dense process by the book.

One world of processes per layout trains with one loss after the other. The learning rate is too small
to move a weight, so that each sees the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.options import ImportanceSamplingType, KLType, LossConfig
from nemo_like.batch.columns import ENTROPIES, POLICY_COLUMNS
from nemo_like.batch.sharding import shard_for_training
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.observability.metrics import Metric, merge
from nemo_like.policy.groups.group import with_epochs
from nemo_like.policy.groups.parallelism import parallel_layout, train_strategy
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.options import PolicyConfig
from tests.functional.dense_reference import dense_kl, with_all_rows
from tests.functional.policy_fixtures import (
    MicroBatching,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.worlds import run_world
from tests.unit.algorithms.loss_cases import of_kind

NUM_SAMPLES = 8
TEMPERATURE = 0.8
KL_SCALE = 0.7
LIKELIHOOD = [0.01 * (row % 2) for row in range(NUM_SAMPLES)]
CORRECTED = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 1.25,
    "truncated_importance_sampling_ratio_min": 0.8,
}
# A sample's product is further from 1 than a token's ratio.
CORRECTED_SAMPLES = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 20.0,
    "truncated_importance_sampling_ratio_min": 0.05,
}


def plain(kind: str = "policy_gradient", **changes: Any) -> LossConfig:
    """The loss of a kind without dual clip, that reports the entropy."""
    return of_kind(kind, **{"entropy_coef": 0.0, **changes})


LOSSES = {
    "GSPO with KL": plain("gspo", token_level_loss=False, reference_policy_kl_penalty=0.2),
    "k1": plain(reference_policy_kl_penalty=0.2, reference_policy_kl_type=KLType.k1),
    "k2": plain(reference_policy_kl_penalty=0.2, reference_policy_kl_type=KLType.k2),
    "CISPO with tis": plain(
        "cispo", truncated_importance_sampling_type=ImportanceSamplingType.tis, **CORRECTED
    ),
    "REINFORCE with seq_mask and entropy bonus": plain(
        "reinforce",
        entropy_coef=0.3,
        truncated_importance_sampling_type=ImportanceSamplingType.seq_mask,
        **CORRECTED,
    ),
    "on-policy with icepop": plain(
        force_on_policy_ratio=True,
        truncated_importance_sampling_type=ImportanceSamplingType.icepop,
        **CORRECTED,
    ),
    "ratio to what was sampled with": plain(use_generation_logprobs_as_prev=True),
    "KL in the reward": plain(use_kl_in_reward=True, reference_policy_kl_penalty=0.2),
    "GSPO with icepop": plain(
        "gspo",
        token_level_loss=False,
        truncated_importance_sampling_type=ImportanceSamplingType.icepop,
        **CORRECTED_SAMPLES,
    ),
    "GSPO with tis": plain(
        "gspo",
        token_level_loss=False,
        truncated_importance_sampling_type=ImportanceSamplingType.tis,
        **CORRECTED_SAMPLES,
    ),
    "SAPO": plain("sapo", tau_pos=0.8, tau_neg=2.0, token_level_loss=False),
    "GSPO-token with KL in the reward": plain(
        "gspo_token", token_level_loss=False, use_kl_in_reward=True, reference_policy_kl_penalty=0.2
    ),
    "highest entropies and likelihood": plain(
        top_entropy_quantile=0.4, positive_example_nll_weight=0.2, reference_policy_kl_penalty=0.2
    ),
    "off-policy mask and weighed KL": plain(
        off_policy_mask_threshold=0.1,
        use_on_policy_kl_approximation=True,
        reference_policy_kl_penalty=0.2,
        reference_policy_kl_type=KLType.k1,
    ),
    "Dr.GRPO": plain(token_level_loss=False, sequence_length_normalizer=21),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process, packed": {"micro_batching": MicroBatching.packed},
    "DP2, prompts shared": {"dp": 2, "micro_batching": MicroBatching.shared},
    "TP2 x DP2": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2, "micro_batch_size": 3},
    "FSDP2 over two": {"dp": 2, "backend": "fsdp"},
}
QUICK = ("DP2, prompts shared", "FSDP2 over two")


def train_with_every_loss(
    coordinates: Coordinates, cfg: PolicyConfig, batch: dict[str, Any]
) -> dict[str, dict[str, Metric]]:
    """One rank: a training phase per loss, by the worker's own method; the leaders' metrics by loss."""
    plane = InMemoryDataPlane()
    tags = {**batch["tags"], "kl_scale": [KL_SCALE] * NUM_SAMPLES, "likelihood_weight": LIKELIHOOD}
    meta = put_samples(plane, "step", {**batch, "tags": tags})
    scored = (*POLICY_COLUMNS, ENTROPIES)
    meta = plane.write(meta, {column.name: batch["columns"][column.name] for column in scored})
    worker = ready_worker(cfg, LOSSES["GSPO with KL"], coordinates, plane, TEMPERATURE)
    shards = shard_for_training(
        meta, num_shards=cfg.data_parallel_size, global_batch_size=NUM_SAMPLES, strategy=train_strategy(cfg)
    )
    # Two epochs: with weights that do not move, the second says what the first does.
    shard = with_epochs(shards[coordinates.dp], 2)
    found = {}
    for name, loss in LOSSES.items():
        worker.loss, worker._backend.objective = loss, PolicyObjective(loss, TEMPERATURE)
        update = worker.train(shard)
        if update is not None:
            found[name] = dict(update.metrics)
    return found


@dataclass(frozen=True)
class Token:
    """What the dense model says of one response token, and what it is compared with; scalars."""

    logprob: Tensor
    entropy: Tensor
    prev: float
    generation: float
    reference: float
    likelihood: float  # the weight of its log-prob


class DenseLoss:
    """One loss over the whole global batch, token by token in plain Python."""

    def __init__(self, loss: Any, samples: list[list[Token]], advantages: list[float]) -> None:
        self.loss, self.samples, self.advantages = loss, samples, advantages
        self.low = loss.truncated_importance_sampling_ratio_min
        self.high = loss.truncated_importance_sampling_ratio
        self.is_by_sample = loss.kind in ("gspo", "gspo_token")

    def value(self) -> Tensor:
        num_tokens = sum(len(sample) for sample in self.samples)
        total = torch.zeros(())
        for sample, advantage in zip(self.samples, self.advantages, strict=True):
            if self.loss.token_level_loss:
                share = 1 / num_tokens
            else:
                share = 1 / len(self.samples) / (self.loss.sequence_length_normalizer or len(sample))
            for token in sample:
                total = total + share * self.token(token, sample, advantage)
                if self.loss.positive_example_nll_weight:
                    total = total - token.likelihood * token.logprob
        return total

    def trains(self, token: Token, sample: list[Token], advantage: float) -> bool:
        """Whether the token has a policy gradient."""
        if self.loss.off_policy_mask_threshold is not None and advantage < 0:
            gaps = [other.generation - other.logprob.item() for other in sample]
            return sum(gaps) / len(gaps) <= self.loss.off_policy_mask_threshold
        every = sorted((other.entropy.item() for each in self.samples for other in each), reverse=True)
        share = self.loss.top_entropy_quantile
        return token.entropy.item() >= every[math.ceil(share * len(every)) - 1] - 1e-6

    def token(self, token: Token, sample: list[Token], advantage: float) -> Tensor:
        cfg = self.loss
        if cfg.use_kl_in_reward:
            position = next(place for place, other in enumerate(sample) if other is token)
            gaps = torch.tensor([other.reference - other.prev for other in sample[position:]])
            advantage -= KL_SCALE * dense_kl(gaps, cfg.reference_policy_kl_type).clamp(-10, 10).sum().item()
        ratio = self.ratio(token)
        if self.is_by_sample:
            ratio = math.prod((self.ratio(other) for other in sample), start=torch.ones(())) ** (
                1 / len(sample)
            )
            if cfg.kind == "gspo_token":
                ratio = ratio.item() * (token.logprob - token.logprob.item()).exp()
        if cfg.kind == "sapo":
            tau = cfg.tau_pos if advantage > 0 else cfg.tau_neg
            value = -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
        elif cfg.kind == "reinforce":
            value = -advantage * token.logprob
        else:
            clipped = ratio.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
            value = torch.max(-advantage * ratio, -advantage * clipped)
            if cfg.kind == "cispo":
                value = -advantage * clipped.item() * token.logprob
        value = value * self.weight(token, sample) * self.trains(token, sample, advantage)
        if cfg.reference_policy_kl_penalty and not cfg.use_kl_in_reward:
            kl = dense_kl(token.reference - token.logprob, cfg.reference_policy_kl_type)
            score = (token.logprob - token.logprob.item()).exp()
            kl = (kl * score).clamp(-10, 10)
            if cfg.use_on_policy_kl_approximation:
                kl = kl * math.exp(token.logprob.item() - token.generation)
            value = value + cfg.reference_policy_kl_penalty * kl
        return value - (cfg.entropy_coef or 0.0) * token.entropy

    def prev(self, token: Token) -> float:
        if self.loss.use_generation_logprobs_as_prev:
            return token.generation
        return token.logprob.item() if self.loss.force_on_policy_ratio else token.prev

    def ratio(self, token: Token) -> Tensor:
        return (token.logprob - self.prev(token)).exp()

    def weight(self, token: Token, sample: list[Token]) -> float:
        """The importance weight."""
        if not self.loss.use_importance_sampling_correction:
            return 1.0
        own = self.ratio_to_engine(sample if self.is_by_sample else [token])
        if self.loss.truncated_importance_sampling_type is ImportanceSamplingType.tis:
            return min(max(own, self.low), self.high)
        return 0.0 if self.is_out_of_bounds(token, sample) else own

    def ratio_to_engine(self, tokens: list[Token]) -> float:
        """The geometric mean over the tokens; with GSPO their product."""
        gaps = [self.prev(token) - token.generation for token in tokens]
        return math.exp(sum(gaps) / (1 if self.is_by_sample else len(gaps)))

    @property
    def judges_samples(self) -> bool:
        kind = self.loss.truncated_importance_sampling_type
        return kind is ImportanceSamplingType.seq_mask or self.is_by_sample

    def is_out_of_bounds(self, token: Token, sample: list[Token]) -> bool:
        """Of the token, or of its sample."""
        return not self.low <= self.ratio_to_engine(sample if self.judges_samples else [token]) <= self.high

    def oob_ratio(self) -> float:
        if self.judges_samples:
            return sum(self.is_out_of_bounds(sample[0], sample) for sample in self.samples) / len(
                self.samples
            )
        flags = [self.is_out_of_bounds(token, sample) for sample in self.samples for token in sample]
        return sum(flags) / len(flags)


@dataclass(frozen=True)
class Model:
    """The dense model and a batch whose other log-probs are near its own, but for some of the reference's,
    which are so far off that every estimator of the KL is limited on some."""

    path: str
    batch: dict[str, Any]
    dense: torch.nn.Module

    def samples(self) -> tuple[list[list[Token]], list[float]]:
        """The samples that train, with their advantages."""
        columns = {
            name: torch.from_numpy(values).split(self.batch["lengths"])
            for name, values in self.batch["columns"].items()
        }
        samples, advantages = [], []
        for row, trains in enumerate(self.batch["tags"]["sample_mask"]):
            if not trains:
                continue
            ids = columns["input_ids"][row].long()
            logprobs = (self.dense(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            sample = []
            for position in range(3, len(ids)):
                row_logprobs = logprobs[position - 1]
                sample.append(
                    Token(
                        logprob=row_logprobs[ids[position]],
                        entropy=-(row_logprobs.exp() * row_logprobs).sum(),
                        prev=float(columns["prev_logprobs"][row][position]),
                        generation=float(columns["generation_logprobs"][row][position]),
                        reference=float(columns["reference_logprobs"][row][position]),
                        likelihood=LIKELIHOOD[row],
                    )
                )
            samples.append(sample)
            advantages.append(self.batch["tags"]["advantage"][row])
        return samples, advantages


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_checkpoint(tmp_path_factory.mktemp("losses") / "model")
    batch = random_batch(NUM_SAMPLES)
    dense = with_all_rows(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    columns, mask = batch["columns"], torch.from_numpy(batch["columns"]["response_mask"])
    own, entropies = torch.zeros(len(mask)), torch.zeros(len(mask))
    start = 0
    for length in batch["lengths"]:
        ids = torch.from_numpy(columns["input_ids"][start : start + length]).long()
        with torch.no_grad():
            logprobs = (dense(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        own[start + 1 : start + length] = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        entropies[start + 1 : start + length] = -(logprobs[:-1].exp() * logprobs[:-1]).sum(-1)
        start += length
    # On every third sample the engine is further off, as a whole.
    row = torch.repeat_interleave(torch.arange(NUM_SAMPLES), torch.tensor(batch["lengths"]))
    token = torch.arange(len(mask))
    offsets = {
        "generation_logprobs": 0.3 * (row % 3 == 0),
        "reference_logprobs": 5.0 * (token % 5 == 0) - 17.0 * (token % 7 == 0),
    }
    generator = torch.Generator().manual_seed(7)
    for name in ("prev_logprobs", "generation_logprobs", "reference_logprobs"):
        noise = 0.2 * torch.randn(len(mask), generator=generator)
        columns[name] = ((own + noise + offsets.get(name, 0.0)) * mask).numpy()
    columns["entropies"] = (entropies * mask).numpy()
    return Model(str(path), batch, dense)


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def trained(request: pytest.FixtureRequest, model: Model) -> Iterator[dict[str, dict[str, Metric]]]:
    """Merged metrics by loss, of one layout."""
    cfg = policy_config(model.path, **LAYOUTS[request.param])
    cfg = replace(
        cfg,
        train_global_batch_size=NUM_SAMPLES,
        optimizer=replace(cfg.optimizer, lr=1e-12, weight_decay=0.0),
        scheduler=replace(cfg.scheduler, min_lr=0.0),
    )
    ranks = run_world(train_with_every_loss, parallel_layout(cfg), cfg, model.batch)
    leaders = [rank for rank in ranks if rank]
    yield {name: merge(leader[name] for leader in leaders) for name in LOSSES}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_and_metrics_are_those_of_the_formulas(
    name: str, trained: dict[str, dict[str, Metric]], model: Model
) -> None:
    metrics = {key: metric.value for key, metric in trained[name].items()}
    samples, advantages = model.samples()
    dense = DenseLoss(LOSSES[name], samples, advantages)
    model.dense.zero_grad()
    loss = dense.value()
    loss.backward()
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in model.dense.parameters() if parameter.grad is not None]
    )
    tokens = [token for sample in samples for token in sample]
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(
        sum(token.entropy.item() for token in tokens) / len(tokens), rel=1e-5
    )
    if LOSSES[name].use_importance_sampling_correction:
        # Something is outside the bounds, and not everything.
        assert 0 < dense.oob_ratio() < 1
        assert metrics["is_oob_ratio"] == pytest.approx(dense.oob_ratio())
    if LOSSES[name].force_on_policy_ratio:
        gaps = [token.logprob.item() - token.generation for token in tokens]
        expected = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
        assert metrics["gen_kl_error"] == pytest.approx(expected, rel=1e-3)
        assert metrics["probs_ratio_max"] == 1.0
