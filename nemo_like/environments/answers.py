"""Finding the answer in a response."""

from __future__ import annotations

import re


def extract_answer(response: str, pattern: str | None) -> str | None:
    """Group 1 of the last match, "." matching newlines too; without a pattern the whole response.

    None when nothing matches.
    """
    if pattern is None:
        return response
    matches = list(re.finditer(pattern, response, re.DOTALL))
    return matches[-1].group(1) if matches else None
