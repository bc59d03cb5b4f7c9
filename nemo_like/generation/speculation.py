"""Speculative decoding, as ``generation.vllm_kwargs.speculative_config`` asks for it.

    draft of the next tokens ──▶ the policy computes all of them at once ──▶ each is kept, or replaced

A token is kept or replaced so that the sample is one of the policy, whatever was drafted. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from nemo_like.generation.options import GenerationConfig

ARGUMENT = "speculative_config"
KEY = f"generation.vllm_kwargs.{ARGUMENT}"


class DraftMethod(Enum):
    """What makes the drafts, by vLLM's names."""

    ngram = "ngram"  # what followed the last tokens where they stand earlier in the sample; on CPUs
    ngram_gpu = "ngram_gpu"  # the same on GPUs
    draft_model = "draft_model"  # a smaller model
    eagle = "eagle"  # a head on the policy's hidden states
    eagle3 = "eagle3"
    mtp = "mtp"  # the layers of the policy's checkpoint that predict further tokens

    @property
    def has_weights(self) -> bool:
        """Whether an engine holds weights for it that no trainer sends."""
        return self not in (DraftMethod.ngram, DraftMethod.ngram_gpu)

    @property
    def has_checkpoint(self) -> bool:
        """Whether its weights have a checkpoint of their own."""
        return self.has_weights and self is not DraftMethod.mtp


@dataclass(frozen=True, slots=True)
class Speculation:
    """How engines draft."""

    method: DraftMethod
    num_tokens: int  # of one draft
    model: str | None  # checkpoint of the draft, where it has one of its own

    @property
    def num_slots(self) -> int:
        """How many tokens a sample takes of a step's budget: its draft, the token before it, and one more
        that a draft model reads."""
        return self.num_tokens + 2


def speculation(generation: GenerationConfig) -> Speculation | None:
    """Return how engines draft; None where they do not, or where the rules refuse how they are to."""
    given = generation.vllm_kwargs.get(ARGUMENT)
    if not isinstance(given, Mapping) or given.get("method") not in [one.value for one in DraftMethod]:
        return None
    num_tokens, model = given.get("num_speculative_tokens"), given.get("model")
    if type(num_tokens) is not int or num_tokens < 1 or not isinstance(model, str | None):
        return None
    method = DraftMethod(given["method"])
    return Speculation(method, num_tokens, model if method.has_checkpoint else None)


def has_draft_weights(generation: GenerationConfig) -> bool:
    """Return whether an engine holds weights of a draft, which no trainer sends."""
    drafts = speculation(generation)
    return drafts is not None and drafts.method.has_weights


def draft_bytes(generation: GenerationConfig) -> int:
    """Return the bytes of the draft's checkpoint; 0 where there is none, or none on this machine."""
    drafts = speculation(generation)
    if drafts is None or drafts.model is None:
        return 0
    return sum(file.stat().st_size for file in Path(drafts.model).glob("*.safetensors"))


def with_absolute_draft(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the absolute path of a draft that is on this machine, since engines run in
    another folder."""
    given = kwargs.get(ARGUMENT)
    if not isinstance(given, Mapping) or not Path(str(given.get("model"))).is_dir():
        return dict(kwargs)
    return {**kwargs, ARGUMENT: {**given, "model": str(Path(str(given["model"])).absolute())}}
