"""The problems of a configuration, reported all at once, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_like.config.secrets import masked, referring_texts, without_referred


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One broken rule. ``where`` is the file or argument that sets the key; empty when it is not known."""

    key: str  # full key, "policy.device"; empty when it concerns a whole file or argument
    rule: str  # what must hold, and the value that breaks it
    remedy: str  # what to do about it; empty when the rule says it all
    where: str = ""

    def __str__(self) -> str:
        subject = f"{self.key} {self.rule}".strip()
        prefix = f"{self.where}: " if self.where else ""
        return masked(f"{prefix}{subject}" + (f"; {self.remedy}" if self.remedy else ""))


def without_secrets(problems: Iterable[Problem], cfg: Any) -> Iterator[Problem]:
    """Yield the problems with interpolations in place of texts that environment variables gave to ``cfg``."""
    given = {key: (value, reference) for key, value, reference in referring_texts(cfg)}
    for one in problems:
        key, equals, value = one.key.partition("=")
        if key in given and value == given[key][0]:
            value = given[key][1]
        rule, remedy = (without_referred(text, cfg) for text in (one.rule, one.remedy))
        yield replace(one, key=f"{key}{equals}{value}", rule=rule, remedy=remedy)


class ConfigError(ValueError):
    """The configuration cannot run. The message lists every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        if not problems:
            raise ValueError("a ConfigError needs at least one problem")
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"{count} in the configuration:", *(f"  - {problem}" for problem in problems)]
        super().__init__("\n".join(lines))

    @classmethod
    def of(cls, key: str, rule: str, remedy: str = "") -> ConfigError:
        """Return the error of one problem, with these fields of ``Problem``."""
        return cls([Problem(key=key, rule=rule, remedy=remedy)])
