"""What parts declare of their keys, and the files that are written from it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from nemo_like.config import fields
from nemo_like.config.keys import MISSING, Key, beyond_limits, keys
from nemo_like.configuration import Config
from nemo_like.environments.options import ENVIRONMENT_KINDS
from scripts.write_configs import ROOT, written


@dataclass(kw_only=True, slots=True)
class Inner:
    share: Annotated[float, Key("a share", 0.5, at_least=0, below=1, remedy="try 0.5")]


@dataclass(kw_only=True, slots=True)
class Outer:
    count: Annotated[int, Key("a count", 1, at_least=1)]
    limit: Annotated[float | None, Key("a limit", None, above=0)]
    inner: Annotated[Inner, Key("more")]
    several: list[Inner]


def outer(count: int = 1, limit: float | None = None, share: float = 0.0) -> Outer:
    return Outer(count=count, limit=limit, inner=Inner(share=share), several=[Inner(share=9.0)])


def test_numbers_beyond_their_limits_are_named_wherever_they_are() -> None:
    assert list(beyond_limits(outer())) == []
    found = [str(problem) for problem in beyond_limits(outer(count=0, limit=0.0, share=1.0))]
    assert found == [
        "count=0 must be at least 1",
        "limit=0.0 must be above 0",
        "inner.share=1.0 must be at least 0 and below 1; try 0.5",
    ]


@pytest.mark.parametrize("share", [math.nan, -math.inf, -1e-9, math.inf])
def test_what_is_no_number_or_infinite_is_beyond_limits(share: float) -> None:
    (problem,) = beyond_limits(outer(share=share), "a.")
    assert problem.key == f"a.inner.share={share}"


def declared(group: type, prefix: str = "") -> Iterator[tuple[str, Any, Key]]:
    """Yield every key below a group with its type."""
    for name, (annotation, key) in keys(group).items():
        yield f"{prefix}{name}", annotation, key
        inner = fields.without_none(annotation)
        below = (
            inner
            if fields.is_group(inner)
            else fields.item_group(annotation) or fields.entry_group(annotation)
        )
        if below is not None:
            yield from declared(below, f"{prefix}{name}.")


OPTIONS = [
    one
    for kind in ENVIRONMENT_KINDS.names()
    for one in declared(ENVIRONMENT_KINDS.load(kind).options, f"env.{kind}.options.")
]
DECLARED = [*declared(Config), *OPTIONS]


def test_every_key_has_a_sentence() -> None:
    assert len(DECLARED) > 400
    nothing = [name for name, _, key in DECLARED if "." in name and not key.about]
    assert nothing == []


def test_every_default_is_a_value_of_its_key() -> None:
    wrong = [
        problem
        for name, annotation, key in DECLARED
        if key.default != MISSING
        for problem in fields.check_value(name, key.default, annotation, "", Config)
    ]
    assert wrong == []


def test_the_default_files_are_as_the_script_writes_them() -> None:
    command = [sys.executable, "scripts/write_configs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    there = {path.relative_to(ROOT) for path in (ROOT / "configs").glob("*/*.yaml")}
    by_hand = {"fsdp.yaml", "fsdp_lora.yaml", "megatron_lora.yaml", "mooncake_cpu.yaml"}
    assert {path.name for path in there - written().keys()} == by_hand
