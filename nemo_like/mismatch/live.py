"""Looks for the module in which the engines and the trainer of a live run differ, once a tripwire has found
that they do.

    engines          digests of their weights, as sampled with
    trainer ──▶ engines    the present weights, once more
    engines, trainer       compared module by module (``search``)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_like.configuration import Config
from nemo_like.mismatch.certificate import random_prompts
from nemo_like.mismatch.search import (
    NOTHING,
    EngineMismatch,
    History,
    engine_words,
    find_mismatch,
    sampling_of,
)
from nemo_like.mismatch.sides import Sides
from nemo_like.plan.derived import shares_gpus


def live_mismatch(
    cfg: Config, engines: Sequence[Sides], served: int | None, version: int, send: Callable[[int], object]
) -> str:
    """Compare one engine after the other with the trainer, and say in a sentence what differs first.

    The engines serve policy version ``served``, None where that is not known. The trainer is at ``version``,
    which ``send`` brings to the engines. No sample may be under way.
    """
    # Engines that share GPUs with the trainer sleep, and hold no weights that could be read.
    before = [None if shares_gpus(cfg) else engine_words(cfg, one) for one in engines]
    trained = History()
    trained.note(engines[0], version)
    prompt, sampling = random_prompts(cfg)[-1], sampling_of(cfg, cfg.generation.max_new_tokens)
    for number, (sides, words) in enumerate(zip(engines, before, strict=True)):
        earlier = {} if words is None or served is None else {served: words}
        history = History(earlier | trained.words)
        send(version)  # or wake the engines, which the trainer's part of the last search has put to sleep
        found = find_mismatch(cfg, sides, prompt, sampling, history)
        if not found.agrees:
            return f"engine {number}: {_said(found)}"
    return f"{NOTHING} on random tokens, now that the engines have got the weights once more"


def _said(found: EngineMismatch) -> str:
    first, *others = found.sentences
    if not others:
        return first
    points = ", ".join(one.partition(":")[0] for one in others[:3])
    return f"{first}; also {points}" + (f" and {len(others) - 3} more" if len(others) > 3 else "")
