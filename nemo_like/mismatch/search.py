"""Finds the module in which an engine and a trainer differ, for one sample.

engine   samples the sample's tokens, or reads them, while its modules' values are recorded
trainer  computes every module on these values
         weights of both, by digests
──▶ EngineMismatch: what differs, in the order in which a model computes, and one sentence
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_like.configuration import Config
from nemo_like.generation.options import LoraSync
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.mismatch.comparison import Compared, Finding, Sizes, compared, stale_weights
from nemo_like.mismatch.past_run import PastSample
from nemo_like.mismatch.points import EMBEDDING, LOGPROBS, Law, in_order, point, point_of_weight
from nemo_like.mismatch.sides import (
    ARRIVED_WEIGHTS,
    HELD_WEIGHTS,
    SUBSTITUTED,
    TRACE,
    WEIGHT_WORDS,
    Sides,
)
from nemo_like.mismatch.substitution import joined
from nemo_like.mismatch.weight_words import WeightWords
from nemo_like.models.model_info import read_model_info
from nemo_like.tripwires.canary_checks import canary_limit

if TYPE_CHECKING:
    from nemo_like.mismatch.traced_engine import EngineTrace

NOTHING = "nothing differs beyond rounding"
_THROUGHOUT = 0.9  # of the weights that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightComparison:
    """Which weights of the engine differ from the trainer's, by their Hugging Face names."""

    differing: Mapping[str, int | None]  # with the version that the engine has, if it is known
    compared: frozenset[str]
    version: int  # of the trainer
    # Whether the engine has every weight that changed since an earlier version as that version had it.
    is_earlier_version: bool

    @property
    def differ_throughout(self) -> bool:
        """Whether so many weights differ that none of them is the cause."""
        return len(self.differing) > max(1, _THROUGHOUT * len(self.compared))

    @property
    def share(self) -> str:
        """How many of the weights differ."""
        return f"{len(self.differing)} of {len(self.compared)} weights"

    def sentence(self, name: str) -> str:
        """Say what is wrong with a weight."""
        had = self.differing[name]
        if had is None:
            return f"the engine has another weight ({name}) than the trainer"
        return f"the engine has the weight that it had at version {had}, the trainer is at {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMismatch:
    """What differs between engine and trainer."""

    compared: Compared
    weights: WeightComparison
    settings: str | None  # the sampling settings by which log-probs differ; "" for none that is known
    num_tokens: int
    is_past: bool = False  # whether the log-probs of sampled tokens are those that a run's engine gave

    @property
    def agrees(self) -> bool:
        return not (self.compared.findings or self.weights.differing or self.settings is not None)

    @property
    def sentences(self) -> list[str]:
        """One sentence per difference, the first of the computation first."""
        if self.weights.is_earlier_version:
            return [f"every weight: {self.weights.sentence(next(iter(self.weights.differing)))}"]
        if self.weights.differ_throughout:
            return [f"every weight: the engine has other values of {self.weights.share} than the trainer"]
        findings = {one.name: one for one in self.compared.findings}
        by_point = {point_of_weight(name): name for name in reversed([*self.weights.differing])}
        names = [one.name for one in in_order({*findings, *filter(None, by_point)})]
        said = [self._sentence(name, findings.get(name), by_point.get(name)) for name in names]
        elsewhere = [name for name in self.weights.differing if point_of_weight(name) is None]
        said += [f"{_module_of(name)}: {self.weights.sentence(name)}" for name in elsewhere]
        if not said and self.settings is not None:
            said = [f"{NOTHING}; {self._of_log_probs(self.settings)}"]
        return said or [NOTHING]

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "agrees": self.agrees,
            "sentences": self.sentences,
            "num_tokens": self.num_tokens,
            "num_weights": len(self.weights.compared),
            "weights": dict(self.weights.differing),
            "settings": self.settings,
            "findings": [asdict(one) for one in self.compared.findings],
            "excess": self.compared.excess,
        }

    def _of_log_probs(self, settings: str) -> str:
        if settings:
            return f"the sampling settings do: {settings}"
        whose = "the run's engine" if self.is_past else "the engine"
        return f"the log-probs that {whose} gave do, and no sampling setting explains them"

    def _sentence(self, name: str, finding: Finding | None, weight: str | None) -> str:
        if weight is not None:
            return f"{name}: {self.weights.sentence(weight)}"
        assert finding is not None
        law, known = point(name).kind.law, {point_of_weight(one) for one in self.weights.compared}
        has_weights = law in (Law.norm, Law.linear, Law.experts) or name == EMBEDDING
        if name in known or (known and not has_weights):
            return f"{name}: weights are equal, {name.rpartition('.')[2]} differs{_where(finding)}"
        return f"{name}: it differs{_where(finding)}; the engine's weights of it are not known"


def _where(finding: Finding) -> str:
    where = ""
    if finding.heads:
        where += f" in head{'s' * (len(finding.heads) > 1)} {', '.join(map(str, finding.heads))}"
    if finding.experts:
        where += f" in expert{'s' * (len(finding.experts) > 1)} {', '.join(map(str, finding.experts))}"
    first = finding.first_position
    if finding.num_positions < finding.num_compared and not finding.experts:
        is_to_the_end = finding.num_positions == finding.num_compared - first
        where += f" from position {first} on" if is_to_the_end else f", first at position {first}"
    return where


def _module_of(weight: str) -> str:
    return weight.removeprefix("model.").rpartition(".")[0]


@dataclass(slots=True)
class History:
    """Digests of the trainer's weights by version; for earlier versions an engine's take their place, where
    the trainer's were not noted."""

    words: dict[int, WeightWords] = field(default_factory=dict)
    of_engine: frozenset[int] = frozenset()  # versions whose digests are an engine's

    def note(self, sides: Sides, version: int) -> None:
        """Take the digests of the trainer's present weights, as those of ``version``."""
        words = WeightWords({}, {})
        for rank in sides.ask_trainer("look", WEIGHT_WORDS):
            words.values.update(rank.values)
            words.sent.update(rank.sent)
        self.words[version] = words


def sampling_of(cfg: Config, max_new_tokens: int) -> SamplingSettings:
    """Return the sampling settings of a run's training rollouts."""
    own = cfg.generation
    return SamplingSettings(
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k or 0,
        min_p=own.min_p,
        max_new_tokens=max_new_tokens,
    )


def engine_words(cfg: Config, sides: Sides) -> WeightWords | None:
    """Return digests of the weights that the engine computes with, and of the bytes that arrived of those
    that cannot be read from it; None where it has weights and adapters apart."""
    if cfg.generation.lora_sync is LoraSync.adapter:
        return None
    held = sides.ask_engine("look", HELD_WEIGHTS)
    arrived = sides.ask_engine("look", ARRIVED_WEIGHTS)
    return WeightWords(held, {name: word for name, word in arrived.items() if name not in held})


def find_mismatch(
    cfg: Config,
    sides: Sides,
    prompt_ids: Sequence[int],
    sampling: SamplingSettings,
    history: History,
    reported: np.ndarray | None = None,
) -> EngineMismatch:
    """Have the engine sample a response to the prompt, and find out where the trainer differs.

    The trainer is at the newest version of ``history``. With ``reported`` the prompt is a sample of a run, of
    which the engine only reads the tokens: [T - 1] the log-probs that the run's engine gave of all T tokens
    but the first, NaN for those that it did not sample.
    """
    if reported is not None:
        sampling = replace(sampling, max_new_tokens=1)
    # The engine is asked before the trainer, since one of them sleeps where both share GPUs.
    trace: EngineTrace = sides.ask_engine("look", TRACE, prompt_ids, sampling, 0)
    words = engine_words(cfg, sides)
    if reported is None:
        reported = np.full(len(trace.token_ids) - 1, np.nan)
        reported[-len(trace.sampled) :] = trace.sampled
        is_past = False
    else:
        reported, is_past = np.append(reported, np.nan), True
    given = {**trace.points, LOGPROBS: trace.logprobs[""][:, None]}
    ranks = sides.ask_trainer("look", SUBSTITUTED, trace.token_ids, given)
    own: dict[str, np.ndarray] = {}
    for stage in range(ranks[0].coordinates.layout.pp):
        tensor_ranks = [one for one in ranks if (one.coordinates.pp, one.coordinates.dp) == (stage, 0)]
        own |= joined({one.coordinates.tp: one.points for one in tensor_ranks}, ranks[0].divides_rows)
    return EngineMismatch(
        compared=compared(given, own, (trace.dtype, ranks[0].dtype), _sizes(cfg), trace.logit_sizes),
        weights=compare_weights(words, history),
        settings=_settings(
            trace.logprobs,
            np.array(sides.ask_trainer("sample_logprobs", trace.token_ids)[0]),
            reported,
            canary_limit(cfg.policy),
        ),
        num_tokens=len(trace.token_ids) - 1,
        is_past=is_past,
    )


def past_mismatch(cfg: Config, sides: Sides, sample: PastSample) -> EngineMismatch:
    """Load the weights that sampled a sample of a run into both sides, and find out where they differ on
    it."""
    if sample.checkpoint is not None:
        sides.ask_trainer("load_checkpoint", str(sample.checkpoint.absolute()), sample.version)
        sides.ask_trainer("push_weights", sample.version)
    history = History()
    history.note(sides, sample.version)
    return find_mismatch(cfg, sides, sample.token_ids, sampling_of(cfg, 1), history, reported=sample.reported)


def compare_weights(engine: WeightWords | None, history: History) -> WeightComparison:
    """Compare an engine's weights with the trainer's newest."""
    version = max(history.words)
    if engine is None:
        return WeightComparison(differing={}, compared=frozenset(), version=version, is_earlier_version=False)
    held, arrived, current = engine.values, engine.sent, history.words[version]
    differing = dict(
        stale_weights(held, current.values, {v: words.values for v, words in history.words.items()})
    ) | dict(stale_weights(arrived, current.sent, {v: words.sent for v, words in history.words.items()}))
    # A tied output layer is no weight of the trainer's; one that the engine has apart may differ.
    compared = frozenset((held | arrived).keys() & current.values.keys() | differing.keys())
    if not _shows_versions(differing, compared, history):
        differing = {name: None if had in history.of_engine else had for name, had in differing.items()}
    return WeightComparison(
        differing=differing,
        compared=compared,
        version=version,
        is_earlier_version=_is_earlier_version(differing, history, held.keys() | arrived.keys()),
    )


def _shows_versions(differing: Collection[str], compared: Collection[str], history: History) -> bool:
    """Return whether what engines had earlier shows that a weight did not come: the trainer's weights must
    have changed since, so that others came, or all differ. Else a weight that always comes wrongly looks the
    same."""
    now = history.words[max(history.words)]
    has_changed = any(
        before.get(name, word) != word
        for version in history.of_engine
        for before, after in (
            (history.words[version].values, now.values),
            (history.words[version].sent, now.sent),
        )
        for name, word in after.items()
        if name not in differing
    )
    return has_changed or len(differing) > _THROUGHOUT * len(compared)


def _is_earlier_version(
    differing: Mapping[str, int | None], history: History, known: Collection[str]
) -> bool:
    versions = set(differing.values())
    if len(versions) != 1 or None in versions:
        return False
    (had,) = versions
    assert had is not None
    before, now = history.words[had].values, history.words[max(history.words)].values
    changed = {name for name in now if name in known and now[name] != before.get(name, now[name])}
    return len(changed) > 1 and changed <= differing.keys()


def _settings(
    by_settings: Mapping[str, np.ndarray], trained: np.ndarray, reported: np.ndarray, limit: float
) -> str | None:
    """Return which sampling settings make the reported log-probs other than the trainer's, or "" where none
    of them explains it; None where they are no others. All are [T]; NaN was not reported."""
    sampled = ~np.isnan(reported)

    def gap(values: np.ndarray) -> float:
        return float(np.abs(values[sampled] - reported[sampled]).mean())

    if not sampled.any() or gap(trained) <= limit:
        return None
    explained = [name for name, values in by_settings.items() if gap(values) <= limit]
    return (explained[0] or "temperature") if explained else ""


def _sizes(cfg: Config) -> Sizes:
    model = read_model_info(cfg.policy.model_name, cfg.policy.backend)
    return Sizes(
        head_size=model.head_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        intermediate_size=model.intermediate_size,
        num_experts_per_token=model.num_experts_per_token,
    )
