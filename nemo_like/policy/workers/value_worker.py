"""One worker of a critic: it values samples, estimates the advantages of their tokens, and trains on the
returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_like.algorithms.generalised_advantages import (
    TokenEstimates,
    generalised_advantages,
    length_adaptive_lambda,
)
from nemo_like.algorithms.losses import kl_to_reference
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    INPUT_IDS,
    RESPONSE_MASK,
    RETURNS,
    TOKEN_ADVANTAGES,
    VALUES,
    Column,
    Declaration,
)
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import (
    IS_TRUNCATED,
    SAMPLE_MASK,
    SHAPED_REWARD,
    TOKEN_ADVANTAGE_SQUARE_SUM,
    TOKEN_ADVANTAGE_SUM,
)
from nemo_like.cluster.breakdown import breaking_down
from nemo_like.observability.metrics import Metric, mean
from nemo_like.observability.trace import span
from nemo_like.policy.backends.interface import WorkerConnections
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.batch.policy_columns import kl_reads, value_declarations
from nemo_like.policy.groups.results import WorkerScores
from nemo_like.policy.loss.value_objective import ValueObjective
from nemo_like.policy.loss.value_watch import ValueWatch, estimated
from nemo_like.policy.options import ValueConfig
from nemo_like.policy.workers.group_worker import Stopwatch, schedule_of
from nemo_like.policy.workers.training_worker import TrainingWorker
from nemo_like.policy.workers.worker_watch import WorkerWatch
from nemo_like.tripwires.options import Tripwires


class ValueWorker(TrainingWorker):
    """One worker of a critic."""

    def __init__(
        self,
        *,
        cfg: ValueConfig,
        loss: LossConfig,
        connections: WorkerConnections,
        tripwires: Tripwires = Tripwires.off,
    ) -> None:
        """Keep the settings; ``setup`` loads the model and connects. ``loss`` is the policy's loss, which
        decides whether rewards have a KL term; ``tripwires`` decides what is also measured for them."""
        super().__init__(
            cfg=cfg,
            objective=ValueObjective(cfg),
            connections=connections,
        )
        self._value, self._loss = cfg, loss
        self._of_kl, self._tripwires = kl_reads(loss), tripwires

    def setup(self) -> None:
        """Join the other workers, load the model and connect to the data plane; return when this worker is
        ready."""
        super().setup()
        if self._tripwires is not Tripwires.off:

            def losses(sees_losses: bool) -> ValueWatch:
                return ValueWatch(self._value, sees_losses=sees_losses)

            self._watch = WorkerWatch(self.cfg, losses, self.coordinates, lambda: (), self._tripwires)
            self._backend.watch = self._watch

    def declarations(self) -> tuple[Declaration, ...]:
        """Return the columns that the critic writes and reads."""
        return value_declarations(self._loss, self._connections.inputs)

    def training_reads(self) -> Sequence[Column]:
        """Return the columns that ``train`` fetches."""
        return INPUT_IDS, RESPONSE_MASK, *self._connections.inputs, VALUES, RETURNS

    @breaking_down()
    def compute_values(self, meta: KVBatchMeta) -> WorkerScores | None:
        """Value the shard's samples, estimate advantages and returns of their tokens, and start to write all
        three columns; needs tags shaped_reward, is_truncated and sample_mask.

        The leader returns the sums of the advantages as tags, and sums from which the driver computes the
        critic's explained variance; the other ranks return None.
        """
        inputs = self._connections.inputs
        batch = self._batches.batch(meta, (INPUT_IDS, RESPONSE_MASK, *inputs, *self._of_kl))
        with span("compute"), Stopwatch() as compute:
            outputs = self._backend.values(batch, schedule_of(meta))
            values, ends = outputs.split((batch.num_tokens, len(batch.runs)))
            columns = self._advantages_and_returns(batch, values, ends)
        batch.add(columns)
        if self._watch is not None:
            self._watch.note(estimated(batch, ends, self._value, self._loss))
        if not self.coordinates.is_leader:
            return None
        self._batches.write(meta, columns)
        return WorkerScores(
            _advantage_sums(batch, columns), _explained_variance_sums(batch, columns), compute.seconds
        )

    def _advantages_and_returns(
        self, batch: PolicyBatch, values: Tensor, ends: Tensor
    ) -> dict[Column, Tensor]:
        """Estimate along each token run; ``ends`` [runs] has the values after their last tokens."""
        cfg, runs = self._value, batch.runs
        mask = batch.columns[RESPONSE_MASK.name]
        is_cut_off = runs.of_samples(batch.sample_values[IS_TRUNCATED.name].cpu() > 0)
        rewards = self._rewards(batch)
        end_values = torch.where(is_cut_off & cfg.bootstrap_truncated, ends, 0.0)

        def estimated(gae_lambda: float | Tensor) -> TokenEstimates:
            return generalised_advantages(
                values, rewards, mask, runs.lengths, end_values, gamma=cfg.gae_gamma, gae_lambda=gae_lambda
            )

        of_critic = of_policy = estimated(cfg.gae_lambda)
        if cfg.gae_length_adaptive_alpha is not None:
            num_tokens = runs.sums(mask)
            of_policy = estimated(length_adaptive_lambda(num_tokens, cfg.gae_length_adaptive_alpha))
        elif cfg.gae_lambda_policy is not None:
            of_policy = estimated(cfg.gae_lambda_policy)
        return {VALUES: values, RETURNS: of_critic.returns, TOKEN_ADVANTAGES: of_policy.advantages}

    def _rewards(self, batch: PolicyBatch) -> Tensor:
        """Return each token's reward, packed [sum of lengths] float64 on the host.

        The last response token of each token run gets the sample's reward. Where the reward has a KL term,
        every response token also gets its own part of the term.
        """
        mask, runs = batch.columns[RESPONSE_MASK.name], batch.runs
        rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
        if self._of_kl:
            prev, reference = (batch.columns[column.name].cpu() for column in self._of_kl)
            kl = kl_to_reference(prev, reference, self._loss.reference_policy_kl_type)
            rewards -= self._loss.reference_policy_kl_penalty * kl.masked_fill(mask == 0, 0.0).double()
        counts = runs.sums(mask)
        has_response = counts > 0
        last = mask.nonzero().squeeze(1)[counts.cumsum(0)[has_response] - 1]
        of_runs = runs.of_samples(batch.sample_values[SHAPED_REWARD.name].cpu().double())
        rewards[last] += of_runs[has_response]
        return rewards


def _advantage_sums(batch: PolicyBatch, columns: dict[Column, Tensor]) -> dict[str, list[float]]:
    advantages = columns[TOKEN_ADVANTAGES].double()
    return {
        TOKEN_ADVANTAGE_SUM.name: batch.sum_per_sample(advantages).tolist(),
        TOKEN_ADVANTAGE_SQUARE_SUM.name: batch.sum_per_sample(advantages.square()).tolist(),
    }


def _explained_variance_sums(batch: PolicyBatch, columns: dict[Column, Tensor]) -> dict[str, Metric]:
    """Return means over the response tokens of samples that train; the driver computes from them how much of
    the variance of the returns the values explain."""
    trains = torch.repeat_interleave(batch.sample_values[SAMPLE_MASK.name].cpu() > 0, batch.lengths)
    chosen = trains & batch.columns[RESPONSE_MASK.name].bool()
    if not bool(chosen.any()):
        return {}
    returns = columns[RETURNS][chosen].double()
    errors = returns - columns[VALUES][chosen].double()
    count = float(chosen.sum())
    named = {
        "returns": returns,
        "square_returns": returns.square(),
        "errors": errors,
        "square_errors": errors.square(),
    }
    return {name: mean(float(values.sum()), count) for name, values in named.items()}
