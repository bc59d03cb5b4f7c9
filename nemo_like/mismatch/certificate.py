"""The certificate: log-probs of engine and trainer beside those of transformers, for one checkpoint.

    checkpoint ──▶ engine samples ──▶ engine, trainer and transformers score what it sampled   "as loaded"
        │ the trainer makes updates, sends its weights to the engine and exports them
        ▼
    export ──▶ the engine samples again ──▶ all three score that                     "after 2 updates"

Both times the layers are compared too (``search``).

transformers computes in float32, whatever the precision of the two others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_like.configuration import Config
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.mismatch.search import NOTHING, EngineMismatch, History, find_mismatch, sampling_of
from nemo_like.mismatch.sides import SAMPLE, Sides
from nemo_like.models.model_info import read_model_info
from nemo_like.models.remote_code import loading_arguments
from nemo_like.tripwires.canary_checks import canary_limit, canary_tokens

_PROMPT_LENGTHS = (5, 17, 40, 90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far one side's log-probs are from those of transformers."""

    weights: str  # "as loaded", or "after 2 updates"
    what: str  # whose log-probs of which tokens
    num_tokens: int
    mean_gap: float  # nats per token
    largest_gap: float
    limit: float  # of the mean

    @property
    def agrees(self) -> bool:
        # Not ">": NaN counts as beyond every limit.
        return self.mean_gap <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """All comparisons, and how far the updates moved the log-probs, nats per token; None without updates."""

    comparisons: Sequence[Comparison]
    moved: float | None
    limit: float
    mismatches: Mapping[str, EngineMismatch] = field(default_factory=dict)  # by the weights

    @property
    def was_reload_tested(self) -> bool:
        """Whether an engine that kept its first weights would have shown."""
        return self.moved is not None and self.moved > self.limit

    @property
    def holds(self) -> bool:
        """Whether all sides agree, and the reload was tested if there was one."""
        agree: list[Comparison | EngineMismatch] = [*self.comparisons, *self.mismatches.values()]
        return all(one.agrees for one in agree) and (self.moved is None or self.was_reload_tested)

    @property
    def sentence(self) -> str:
        """What was found first, in one sentence."""
        for weights, one in self.mismatches.items():
            if not one.agrees:
                return f"{weights}: {one.sentences[0]}"
        if not all(one.agrees for one in self.comparisons):
            return (
                "engine, trainer and transformers do not agree, and no module of engine and trainer differs"
            )
        if self.moved is not None and not self.was_reload_tested:
            return "the updates moved log-probs by less than the limit, so the reload was not tested"
        return NOTHING

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        rows = [asdict(one) | {"agrees": one.agrees} for one in self.comparisons]
        layers = {weights: one.as_json() for weights, one in self.mismatches.items()}
        return {
            "holds": self.holds,
            "sentence": self.sentence,
            "moved": self.moved,
            "comparisons": rows,
            "layers": layers,
        }


def certificate(
    cfg: Config, sides: Sides, prompts: Sequence[Sequence[int]], num_updates: int, scratch: Path
) -> Certificate:
    """Compare both sides with transformers, as loaded and after ``num_updates`` updates of the trainer.

    ``scratch`` gets the trained model, which transformers then reads.
    """
    limit, history = canary_limit(cfg.policy), History()
    history.note(sides, 0)
    first = Path(cfg.policy.model_name)
    seen, samples, before = _compared(cfg, sides, prompts, "as loaded", first, limit)
    sampling = sampling_of(cfg, cfg.generation.max_new_tokens)
    found = {"as loaded": find_mismatch(cfg, sides, prompts[-1], sampling, history)}
    if not num_updates:
        return Certificate(comparisons=seen, moved=None, limit=limit, mismatches=found)
    for _ in range(num_updates):
        sides.ask_trainer("train_on", samples, 1)
    history.note(sides, num_updates)
    sides.ask_trainer("push_weights", num_updates)
    export = scratch / "trained"
    sides.ask_trainer("export_hf", str(export))
    weights = f"after {num_updates} update{'s' * (num_updates > 1)}"
    moved, _ = _gaps([sides.ask_trainer("canary_logprobs", one)[0] for one in samples], before)
    more, *_ = _compared(cfg, sides, prompts, weights, export, limit)
    found[weights] = find_mismatch(cfg, sides, prompts[-1], sampling, history)
    return Certificate(comparisons=[*seen, *more], moved=moved, limit=limit, mismatches=found)


def random_prompts(cfg: Config) -> list[list[int]]:
    """Return prompts of several lengths whose tokens look random, for a model of any vocabulary."""
    vocab_size = read_model_info(cfg.policy.model_name, cfg.policy.backend).vocab_size
    longest = cfg.policy.max_total_sequence_length - cfg.generation.max_new_tokens - 1
    tokens = canary_tokens(vocab_size, max(_PROMPT_LENGTHS)) * 3
    return [
        list(tokens[start : start + min(length, longest)]) for start, length in enumerate(_PROMPT_LENGTHS)
    ]


def _compared(
    cfg: Config, sides: Sides, prompts: Sequence[Sequence[int]], weights: str, model: Path, limit: float
) -> tuple[list[Comparison], list[list[int]], list[list[float]]]:
    """Let the engine answer the prompts, and compare all sides on prompts and answers.

    Returns the comparisons, the tokens of prompts with their answers, and the trainer's log-probs of them.
    """
    sampling = SamplingSettings(
        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=cfg.generation.max_new_tokens
    )
    answers = [
        sides.ask_engine("look", SAMPLE, prompt, sampling, seed) for seed, prompt in enumerate(prompts)
    ]
    samples = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    reference = reference_logprobs(model, samples)
    scored = [sides.ask_engine("canary_logprobs", sample) for sample in samples]
    trained = [sides.ask_trainer("canary_logprobs", sample)[0] for sample in samples]
    of_answers = [one[-len(answer.token_ids) :] for one, answer in zip(reference, answers, strict=True)]
    found = {
        "engine, tokens that it samples": ([answer.logprobs for answer in answers], of_answers),
        "engine, given tokens": (scored, reference),
        "trainer, given tokens": (trained, reference),
    }
    comparisons = []
    for what, (given, expected) in found.items():
        mean, largest = _gaps(given, expected)
        comparisons.append(
            Comparison(
                weights=weights,
                what=what,
                num_tokens=sum(map(len, given)),
                mean_gap=mean,
                largest_gap=largest,
                limit=limit,
            )
        )
    return comparisons, samples, trained


def _gaps(given: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean and the largest difference over all tokens; NaN counts as infinite."""
    gaps = [
        abs(one - other)
        for values, others in zip(given, expected, strict=True)
        for one, other in zip(values, others, strict=True)
    ]
    gaps = [math.inf if math.isnan(gap) else gap for gap in gaps]
    return sum(gaps) / len(gaps), max(gaps)


def reference_logprobs(model: Path, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return transformers' log-probs of all tokens but the first of each sequence, computed in float32 on
    this process's CPU."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **loading_arguments()).eval()
    found = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            logprobs = loaded(ids).logits[0, :-1].log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found
