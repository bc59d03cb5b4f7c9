"""Tells functions with the signature of verl's rewards from others; it imports nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# The names by which verl calls a function of one response, and a function of many.
OF_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
OF_A_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def names_of_verl(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names by which verl calls the function; empty when it does not have verl's signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()
    return next((names for names in (OF_ONE, OF_A_BATCH) if names[1] in parameters), ())
