"""Looks for the module in which the engines and the trainer of a live run differ, once a tripwire has found
that they do.

    engines          digests of their weights, as sampled with; a prompt is answered, and so cached
    trainer ──▶ engines    the present weights, once more
    engines          the prompt is answered by what is cached
    engines, trainer       compared module by module (``search``)
    trainer          a sample is scored alone, and beside another in one micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_like.configuration import Config
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.mismatch.certificate import random_prompts
from nemo_like.mismatch.search import (
    NOTHING,
    EngineMismatch,
    History,
    engine_words,
    find_mismatch,
    sampling_of,
)
from nemo_like.mismatch.sides import SAMPLE, Sides
from nemo_like.plan.derived import shares_gpus
from nemo_like.tripwires.canary_checks import canary_gap, canary_limit

_FEW_TOKENS = 8  # enough that not all of them are certain
_STALE_CACHE = (
    f"prefix cache: under new weights it still has keys and values of earlier ones; {NOTHING} in modules"
)
_BESIDE_OTHERS = (
    "micro-batches: the trainer gives a sample other log-probs beside another sample than alone; "
    f"{NOTHING} for a sample alone"
)


def live_mismatch(
    cfg: Config, engines: Sequence[Sides], served: int | None, version: int, send: Callable[[int], object]
) -> str:
    """Compare one engine after the other with the trainer, and say in a sentence what differs first.

    The engines serve policy version ``served``, None where that is not known. The trainer is at ``version``,
    which ``send`` brings to the engines. No sample may be under way.
    """
    # Engines that share GPUs with the trainer sleep, and hold no weights that could be read.
    asleep = shares_gpus(cfg)
    before = [None if asleep else engine_words(cfg, one) for one in engines]
    trained = History()
    trained.note(engines[0], version)
    prompt, sampling = random_prompts(cfg)[-1], sampling_of(cfg, cfg.generation.max_new_tokens)
    few = SamplingSettings(1.0, 1.0, 0, max_new_tokens=min(_FEW_TOKENS, cfg.generation.max_new_tokens))
    if not asleep:
        for sides in engines:
            sides.ask_engine("look", SAMPLE, prompt, few, 0)  # the engine caches the prompt
    for number, (sides, words) in enumerate(zip(engines, before, strict=True)):
        earlier = {} if words is None or served is None else {served: words}
        history = History(earlier | trained.words, of_engine=frozenset(earlier))
        send(version)  # or wake the engines, which the trainer's part of the last search has put to sleep
        gap = 0.0 if asleep else _gap_of_cached(sides, prompt, few)
        found = find_mismatch(cfg, sides, prompt, sampling, history)
        if not found.agrees:
            return f"engine {number}: {_said(found)}"
        if not gap <= canary_limit(cfg.policy):
            return f"engine {number}: {_STALE_CACHE}"
    if not _gap_beside_another(engines[0], prompt) <= canary_limit(cfg.policy):
        return _BESIDE_OTHERS
    return f"{NOTHING} on random tokens, now that the engines have got the weights once more"


def _gap_of_cached(sides: Sides, prompt: Sequence[int], sampling: SamplingSettings) -> float:
    """Return how far the log-probs of an answer by what is cached of the prompt are from those that the same
    tokens have without a cache, nats per token."""
    answer = sides.ask_engine("look", SAMPLE, prompt, sampling, 0, True)
    scored = sides.ask_engine("canary_logprobs", [*prompt, *answer.token_ids])
    return canary_gap(scored[len(prompt) - 1 :], [answer.logprobs])


def _gap_beside_another(sides: Sides, tokens: Sequence[int]) -> float:
    """Return how far the trainer's log-probs of a sample are from those that it gives two such samples
    together, nats per token."""
    alone = sides.ask_trainer("sample_logprobs", tokens)[0]
    return canary_gap(alone, sides.ask_trainer("samples_logprobs", [tokens, tokens])[0])


def _said(found: EngineMismatch) -> str:
    first, *others = found.sentences
    if not others:
        return first
    points = ", ".join(one.partition(":")[0] for one in others[:3])
    return f"{first}; also {points}" + (f" and {len(others) - 3} more" if len(others) > 3 else "")
