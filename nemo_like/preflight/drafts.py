"""Checks speculative decoding before a run, and notes what it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec

from nemo_like.configuration import Config
from nemo_like.generation.speculation import ARGUMENT, KEY, DraftMethod, speculation
from nemo_like.policy.options import Device
from nemo_like.preflight.notes import Note, NoteStatus


def draft_notes(cfg: Config) -> Iterator[Note]:
    """Yield a note on what engines draft, if they do."""
    drafts = speculation(cfg.generation)
    if drafts is None or cfg.rollout.replay is not None:
        return
    how = f"{drafts.num_tokens} tokens by {drafts.method.value}"
    text = f"{KEY}: engines draft {how}; samples stay the policy's"
    if drafts.method.has_weights:
        text += (
            ", and the draft's own weights stay as loaded, so that fewer of its tokens are kept as the "
            "policy trains (performance/draft_acceptance_rate)"
        )
    if cfg.policy.device is Device.cpu:
        yield Note(NoteStatus.checked, text)
    else:
        yield Note(NoteStatus.not_checked, f"{text}; no test of this project has run it on a GPU")


def draft_problem(cfg: Config) -> str | None:
    """Return why vLLM cannot draft as configured; None when it can, or drafts nothing. Loads vLLM."""
    drafts = speculation(cfg.generation)
    if drafts is None:
        return None
    if drafts.method is DraftMethod.ngram and find_spec("numba") is None:
        return "has drafts by ngram, for which vLLM needs numba; pip install numba"
    from vllm.config import SpeculativeConfig

    known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    return unknown_argument(cfg.generation.vllm_kwargs[ARGUMENT], known, "vLLM's SpeculativeConfig")


def unknown_argument(given: Iterable[str], known: Collection[str], taker: str) -> str | None:
    """Return what is wrong with the first argument that ``taker`` does not know; None when it knows all."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}?" if close else ""
            return f"has {name}, which is no argument of {taker}{hint}"
    return None
