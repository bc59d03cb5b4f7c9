"""What a simulated run does: its samples with their lengths and latencies, its stages, its settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_like.algorithms.options import WeightUpdates


@dataclass(frozen=True, slots=True)
class TurnWork:
    """One response, and how long the environment takes to answer it."""

    num_tokens: int
    judge_s: float


@dataclass(frozen=True, slots=True)
class SampleWork:
    """A sample's turns; ``num_tokens`` counts prompt and observations too."""

    num_tokens: int
    turns: tuple[TurnWork, ...]


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The samples of a prompt. With ``is_one_request`` an engine delivers their only responses together."""

    samples: tuple[SampleWork, ...]
    is_one_request: bool

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one step has to do. ``rollouts`` follow each other: the second and later ones are the refills of
    dynamic sampling. Seconds are those with ``TrainerSpeed.num_replicas`` replicas."""

    rollouts: tuple[tuple[GroupWork, ...], ...]
    begin_s: float  # until its first request, and whatever else its samples' times do not show
    put_s: float  # flattening and writing its samples
    scoring_s: float  # log-probs, values, a teacher's scores: inside the models
    training_s: float  # inside the models
    calls_s: float  # what scoring and training took besides: calls, fetches, writes
    driver_s: float  # what the driver does between the stages
    wasted_share: float = 0.0  # of the generated samples, those that dynamic sampling drops

    @property
    def groups(self) -> tuple[GroupWork, ...]:
        return tuple(group for rollout in self.rollouts for group in rollout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """How fast one engine samples: a request takes ``request_s`` before its first token, and then every
    running sequence gets a token each ``token_s + token_per_sequence_s x (running sequences)``."""

    request_s: float
    token_s: float
    token_per_sequence_s: float
    max_num_seqs: int

    def token_time_s(self, num_running: int) -> float:
        """Return the seconds between two tokens of a sequence when so many run."""
        return self.token_s + self.token_per_sequence_s * num_running


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpeed:
    """What the steps' seconds refer to, and what they do not say."""

    num_replicas: int
    updates_per_step: int  # over all epochs
    optimizer_share: float  # of an update's time, what comes after the last gradient
    weight_sync_s: float  # from the pause of the engines to their going on
    num_stage_calls: int  # of scoring and training, per step
    recompute_s: float = 0.0  # in flight: for the KV cache of what runs, after new weights
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
    """After which steps the run validates, and after which it saves, before which no later rollout begins."""

    validation_period: int = 0  # 0: never
    checkpoint_period: int = 0

    def validates_after(self, step: int) -> bool:
        return bool(self.validation_period) and step % self.validation_period == 0

    def saves_after(self, step: int) -> bool:
        return bool(self.checkpoint_period) and step % self.checkpoint_period == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulated run of ``num_steps`` steps came to."""

    num_steps: int
    total_s: float  # until the last step is trained
    step_s: float  # per step, once the first ones have filled the pipeline
    engine_idle_share: float  # of the engines' time, that without anything to decode
    trainer_idle_share: float  # of the trainer's time, that outside of scoring, training and weight sync
    mean_staleness: float  # policy versions, over tokens
    max_staleness: int
    wasted_share: float  # of the generated tokens, those that do not train
    ends_s: tuple[float, ...] = field(repr=False, default=())  # of the steps' training
