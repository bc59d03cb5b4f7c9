"""Checks the options of a kind that have a group of their own and are still plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_like.config import fields
from nemo_like.config.keys import MISSING, beyond_limits
from nemo_like.config.problems import Problem


def kind_option_problems(
    at: str, options: Mapping[str, Any], group: type, chosen: str, defaults: str = ""
) -> list[Problem]:
    """Return the problems of a kind's options against their class ``group``.

    Problems are unknown keys, wrong types, keys without a value and numbers beyond their limits. ``at`` is
    the full key of the options, ``chosen`` is the key that names the kind with its value, and ``defaults`` is
    the file with the kind's defaults.
    """
    found = fields.check_tree(options, group, "", root=group)
    wrong = [replace(problem, key=f"{at}.{problem.key}") for problem in found]
    remedy = f"set it; {defaults} has the others" if defaults else "set it"
    wrong += (
        Problem(key=f"{at}.{key}", rule=f"has no value, and {chosen} needs one", remedy=remedy)
        for key in fields.hints(group)
        if options.get(key, MISSING) == MISSING
    )
    return wrong or [*beyond_limits(fields.typed(options, group), f"{at}.")]
