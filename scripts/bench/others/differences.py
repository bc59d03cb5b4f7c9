"""What is not equal between the sides of ``against_others.py``; its output and performance.md say so."""

from __future__ import annotations

from collections.abc import Sequence

_ALL = (
    "Processes: here two engines and two policy workers of one thread each, and processes for rollouts, "
    "rewards and data; the others are one process, with as many threads as the result says.",
    "Work: the demo here trains four samples of a problem with one copy of its prompt and leaves out samples "
    "without a gradient, which a random model's cannot be; the others compute every padded row.",
    "Lengths are drawn, so they differ between sides and steps: compare new tokens per second.",
    "The seconds to the goal are the steps until then, in whole turns, times the side's median step.",
)
_TRL = (
    "TRL computes log-probs for the ratio by a further forward pass where a step has several updates (the "
    "demo's size); here they are the engine's.",
    "TRL's learning rate falls from its peak after the warm-up; here warm-up and decay apply together. Both "
    "end at the same update.",
    "TRL checks nothing of what it trains on; here the cheap tripwires are on.",
)
_TRL_VLLM = (
    "TRL names vLLM up to 0.31 as supported; its processes use the version that this project pins. Its "
    "correction for vLLM's log-probs is off, since that computes them once more.",
    "On CPUs TRL's sync of weights fails, since vLLM has packed them; in its place stands vLLM's own reload, "
    "as here. vLLM computes with torch.compile there, since TRL has no argument against it.",
)
_EXACT = (
    "At the demo's size exact overlap needs a single sample of each problem in an update, so prompts are not "
    "shared.",
)
_AHEAD = ("One version ahead trains on samples of earlier weights, here without a correction.",)
_BARE = ("The bound sends no weights to vLLM, so it samples from the first ones throughout.",)


def differences(sides: Sequence[str]) -> list[str]:
    """Return a sentence for everything that is not equal between these sides."""
    has_trl = "trl" in sides or "trl_vllm" in sides
    return [
        *_ALL,
        *(_TRL if has_trl else ()),
        *(_TRL_VLLM if "trl_vllm" in sides else ()),
        *(_EXACT if "exact" in sides else ()),
        *(_AHEAD if "ahead" in sides else ()),
        *(_BARE if "bare" in sides else ()),
    ]
