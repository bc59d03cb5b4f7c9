"""How a training backend scores, whatever library computes: the part that all backends share.

logprobs, scores, values ──▶ _token_outputs, the backend's own forward passes
reference_logprobs, weights_of, at_temperature_one ──▶ the same, with other weights or at another temperature
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from nemo_like.algorithms.logprobs import LogprobSettings, TokenScores
from nemo_like.batch.meta import Schedule
from nemo_like.policy.backends.kept_weights import KeptWeights, reference_in_model
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.objective import Objective
from nemo_like.policy.options import WorkerGroupConfig


class ScoringModel(Protocol):
    """A model that scores tokens by its ``logprob_settings``."""

    logprob_settings: LogprobSettings | None  # None: a critic's model, which gives values in place of scores


@contextmanager
def at_temperature_one(model: ScoringModel, sampling_temperature: float) -> Iterator[None]:
    """Have the model score at temperature 1, and with no token forbidden, within the block.

    The temperature in the model's settings is ``sampling_temperature`` times a factor that some models need;
    the factor stays.
    """
    own = model.logprob_settings
    assert own is not None, "values have no temperature"
    model.logprob_settings = replace(
        own, temperature=own.temperature / sampling_temperature, forbidden_ids=()
    )
    try:
        yield
    finally:
        model.logprob_settings = own


@contextmanager
def scoring_entropy(model: ScoringModel, *, is_wanted: bool) -> Iterator[None]:
    """Have the model compute the entropy with its scores within the block if ``is_wanted``, else not,
    whatever training needs."""
    own = model.logprob_settings
    if own is not None:
        model.logprob_settings = replace(own, with_entropy=is_wanted)
    try:
        yield
    finally:
        model.logprob_settings = own


class AdapterSwitch(Protocol):
    """The adapters of a model, which can be disabled; false where the model has none."""

    def __bool__(self) -> bool: ...

    def disabled(self) -> AbstractContextManager[None]:
        """Make the model compute without its adapters within the block."""


class ScoringBackend(ABC):
    """One rank's part of a model that scores; a subclass sets the attributes in its constructor."""

    cfg: WorkerGroupConfig
    objective: Objective
    _source: Path  # of the weights that the run began with
    _model: ScoringModel
    _adapters: AdapterSwitch
    _reference: KeptWeights | None
    _reference_is_new = False
    _kept: Mapping[str, KeptWeights]  # the objective's further models, by their names
    _weights_in_use: Callable[[], AbstractContextManager[None]]  # within it the weights are on the device

    @abstractmethod
    def _token_outputs(
        self, batch: PolicyBatch, schedule: Schedule, *, with_entropy: bool = False
    ) -> list[Tensor]:
        """Return the model's outputs for each scored token, packed, on the CPU of every rank.

        They are the log-prob, or a critic's value; then the entropy if ``with_entropy``; then the log-probs
        and ids of the most likely tokens if the objective asks for any.
        """

    @abstractmethod
    def _load_weights(self, path: Path) -> object:
        """Give the model the weights of a checkpoint directory; every rank calls it."""

    @property
    def model(self) -> ScoringModel:
        """This rank's part of the model, for programs that look into it."""
        return self._model

    def logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch; every rank returns all log-probs, packed [sum of lengths] float32 on the CPU, in
        nats; 0 where response_mask is 0."""
        return self._token_outputs(batch, schedule)[0]

    def scores(self, batch: PolicyBatch, schedule: Schedule) -> TokenScores:
        """Score the batch as ``logprobs`` does, and find the ``top_k`` most likely tokens in place of each
        token if the objective asks for any: topk_logprobs float32 and topk_ids int32, packed [T, k]."""
        return TokenScores.of(self._token_outputs(batch, schedule))

    def scores_with_entropy(self, batch: PolicyBatch, schedule: Schedule) -> TokenScores:
        """Score the batch as ``scores`` does, and compute the entropy of the distribution that each token was
        drawn from, packed [sum of lengths] float32 on the CPU, in nats; 0 where response_mask is 0."""
        return TokenScores.of(self._token_outputs(batch, schedule, with_entropy=True))

    def values(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Value the batch with a critic's model; every rank returns all values, packed [sum of lengths]
        float32 on the CPU, laid out as column values."""
        return self._token_outputs(batch, schedule)[0]

    def at_temperature_one(self) -> AbstractContextManager[None]:
        """Have ``logprobs`` score at temperature 1 within the block."""
        assert self.objective.scoring is not None, "values have no temperature"
        return at_temperature_one(self._model, self.objective.scoring.temperature)

    def reference_logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch as ``logprobs`` does, under the weights that the run started from.

        With adapters these are the frozen weights, so the adapters are disabled for the call; else the
        reference's weights are put into the model for the call. Raises RuntimeError when there are no
        adapters and the loss has no KL term, since then no reference is kept.
        """
        if self._adapters:
            with self._adapters.disabled():
                return self.logprobs(batch, schedule)
        with self._weights_in_use(), reference_in_model(self._reference):
            return self.logprobs(batch, schedule)

    def renew_reference(self, weight: float) -> None:
        """Move the reference's weights towards the model's."""
        assert self._reference is not None, "the rules ask for a reference with weights of its own"
        with self._weights_in_use():
            self._reference.mix(weight)
        self._reference_is_new = True

    @property
    def has_new_reference(self) -> bool:
        """Whether the reference's weights differ from those that the run began with."""
        return self._reference_is_new

    def _reference_has_come(self, is_stored: bool) -> None:
        """Note whether the checkpoint that is loaded has a reference; one that it lacks is the first again.

        The model's weights are lost.
        """
        assert self._reference is not None
        if self._reference_is_new and not is_stored:
            self._load_weights(self._source)
            self._reference.take()
        self._reference_is_new = is_stored

    def reference_weights(self) -> Sequence[Tensor]:
        """Return this rank's part of the reference's weights on the host; empty where no copy is kept."""
        return () if self._reference is None else self._reference.held

    @contextmanager
    def weights_of(self, model: str) -> Iterator[None]:
        """Have the model score with the weights of ``model`` within the block: its own checkpoint, or one of
        the objective's ``further_models``."""
        if model == self.cfg.model_name:
            yield
            return
        with self._weights_in_use(), self._kept[model].in_model():
            yield
