"""Describes what a simulated run does: samples with lengths and latencies, stages, settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_like.algorithms.options import WeightUpdates


@dataclass(frozen=True, slots=True)
class TurnWork:
    """One response, and the seconds that the environment takes to answer it."""

    num_tokens: int
    judge_s: float


@dataclass(frozen=True, slots=True)
class SampleWork:
    """The turns of a sample. ``num_tokens`` also counts prompt and observations."""

    num_tokens: int
    turns: tuple[TurnWork, ...]


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The samples of a prompt. With ``is_one_request``, an engine delivers all their responses together."""

    samples: tuple[SampleWork, ...]
    is_one_request: bool

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step.

    ``rollouts`` follow each other: the second and later ones are the refills of dynamic sampling. Seconds are
    measured with ``TrainerSpeed.num_replicas`` replicas.
    """

    rollouts: tuple[tuple[GroupWork, ...], ...]
    begin_s: float  # before the first request, and other time that samples' times do not show
    put_s: float  # flattening and writing its samples
    scoring_s: float  # inside the models: log-probs, values, a teacher's scores
    training_s: float  # inside the models
    calls_s: float  # the rest of scoring and training: calls, fetches, writes
    driver_s: float  # the driver's work between the stages
    wasted_share: float = 0.0  # share of the generated samples that dynamic sampling drops

    @property
    def groups(self) -> tuple[GroupWork, ...]:
        return tuple(group for rollout in self.rollouts for group in rollout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """How fast one engine samples.

    A request takes ``request_s`` before its first token. Then each of the r running sequences gets a token
    every ``token_s + token_per_sequence_s x r`` seconds.
    """

    request_s: float
    token_s: float
    token_per_sequence_s: float
    max_num_seqs: int

    def token_time_s(self, num_running: int) -> float:
        """Return the seconds between two tokens of a sequence when ``num_running`` sequences run."""
        return self.token_s + self.token_per_sequence_s * num_running


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpeed:
    """The layout in which the seconds of ``StepWork`` were measured, and costs that these do not include."""

    num_replicas: int
    updates_per_step: int  # over all epochs
    optimizer_share: float  # share of an update's time after the last gradient
    weight_sync_s: float  # from the pause of the engines until they resume
    num_stage_calls: int  # of scoring and training, per step
    recompute_s: float = 0.0  # with in-flight updates: the KV cache of running samples, after new weights
    validation_s: float = 0.0
    checkpoint_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How rollouts and training overlap: the settings that a prediction is for."""

    is_exact_overlap: bool = False
    max_staleness: int = 0
    weight_updates: WeightUpdates = WeightUpdates.between_samples
    max_tokens_per_step: int | None = None  # of a sample, in each step that its rollout is ahead

    @property
    def name(self) -> str:
        if self.max_staleness == 0:
            return "exact overlap" if self.is_exact_overlap else "synchronous"
        exact = ", exact overlap" if self.is_exact_overlap else ""
        budget = "" if self.max_tokens_per_step is None else f", {self.max_tokens_per_step} tokens"
        return f"max_staleness={self.max_staleness} {self.weight_updates.value}{budget}{exact}"


@dataclass(frozen=True, slots=True)
class Split:
    """How the devices are divided between engines and replicas of the policy."""

    num_engines: int
    num_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """The steps after which the run validates, and the steps after which it saves.

    No rollout of a later step begins before a save.
    """

    validation_period: int = 0  # 0: never
    checkpoint_period: int = 0

    def validates_after(self, step: int) -> bool:
        return bool(self.validation_period) and step % self.validation_period == 0

    def saves_after(self, step: int) -> bool:
        return bool(self.checkpoint_period) and step % self.checkpoint_period == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The result of a simulated run of ``num_steps`` steps."""

    num_steps: int
    total_s: float  # until the last step is trained
    step_s: float  # per step, once the first steps have filled the pipeline
    engine_idle_share: float  # share of the engines' time without anything to decode
    trainer_idle_share: float  # share of the trainer's time outside of scoring, training and weight sync
    mean_staleness: float  # policy versions, over tokens
    max_staleness: int
    wasted_share: float  # share of the generated tokens that do not train
    ends_s: tuple[float, ...] = field(repr=False, default=())  # of the steps' training
