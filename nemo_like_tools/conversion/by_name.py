"""Finds the conversions that the tables of frameworks name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from nemo_like.config.other_frameworks import Here
from nemo_like_tools.conversion import nemo_rl, nemo_rl_data, values, verl
from nemo_like_tools.conversion.values import Theirs

# The modules with conversions for one framework, by its name.
_OWN: dict[str, tuple[ModuleType, ...]] = {"NeMo-RL": (nemo_rl, nemo_rl_data), "verl": (verl,)}


def conversion_of(framework: str, here: Here) -> Callable[[Any, Theirs], Any]:
    """Return the function that computes the value of a key here, given their value and configuration."""
    modules = (*_OWN.get(framework, ()), values)
    found = next(vars(module)[here.by] for module in modules if here.by in vars(module))
    return partial(found, **here.arguments)
