"""Speculative decoding, as ``generation.vllm_kwargs.speculative_config`` asks for it.

    draft of the next tokens ──▶ the policy computes all of them at once ──▶ each is kept, or replaced

The rule of keeping and replacing leaves the samples distributed as the policy's, whatever is drafted.
Standard library only.
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
    """How drafts are made; the values are vLLM's names."""

    ngram = "ngram"  # copies what followed the last few tokens earlier in the sample; on CPUs
    ngram_gpu = "ngram_gpu"  # the same on GPUs
    draft_model = "draft_model"  # a smaller model
    eagle = "eagle"  # a head on the policy's hidden states
    eagle3 = "eagle3"
    mtp = "mtp"  # the layers of the policy's checkpoint that predict further tokens

    @property
    def has_weights(self) -> bool:
        """Whether an engine holds weights for this method, which no trainer sends."""
        return self not in (DraftMethod.ngram, DraftMethod.ngram_gpu)

    @property
    def has_checkpoint(self) -> bool:
        """Whether the method's weights have a checkpoint of their own."""
        return self.has_weights and self is not DraftMethod.mtp


@dataclass(frozen=True, slots=True)
class Speculation:
    """How engines draft."""

    method: DraftMethod
    num_tokens: int  # of one draft
    model: str | None  # checkpoint of the draft, where it has one of its own

    @property
    def num_slots(self) -> int:
        """The tokens of a step's budget that one sample takes: its draft, the token before the draft, and one
        more that a draft model reads."""
        return self.num_tokens + 2


def speculation(generation: GenerationConfig) -> Speculation | None:
    """Return how engines draft; None where they do not, or where ``draft_rules`` refuses the settings."""
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
    """Return vLLM's arguments, with the path of a draft's local checkpoint made absolute, since engines run
    in another folder."""
    given = kwargs.get(ARGUMENT)
    if not isinstance(given, Mapping) or not Path(str(given.get("model"))).is_dir():
        return dict(kwargs)
    return {**kwargs, ARGUMENT: {**given, "model": str(Path(str(given["model"])).absolute())}}
