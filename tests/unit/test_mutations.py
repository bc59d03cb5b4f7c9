"""The catalogue of mutations: every one names its source, and can be planted where it says."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from tests.tripwires.mutations import MUTATIONS, Group, Mutation, mutation, planted

SOURCE = re.compile(r"[\w.-]+/[\w.-]+#[1-9][0-9]*")


def owner_of(target: str) -> tuple[Any, str]:
    """Return the module or class that holds the target, and the target's name in it."""
    module, path = target.split(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for one in owners:
        owner = getattr(owner, one)
    return owner, name


@pytest.fixture(params=MUTATIONS.values(), ids=MUTATIONS)
def one(request: pytest.FixtureRequest) -> Mutation:
    return request.param


def test_there_are_at_least_forty_mutations_and_some_of_every_group() -> None:
    assert len(MUTATIONS) >= 40
    assert {one.group for one in MUTATIONS.values()} == set(Group)


def test_no_two_mutations_have_one_name_or_one_bug() -> None:
    with pytest.raises(ValueError, match="two mutations named 'wrong_group'"):
        mutation(Group.loss, "", "", "")(MUTATIONS["wrong_group"].plant)
    assert len({one.bug for one in MUTATIONS.values()}) == len(MUTATIONS)


def test_a_mutation_cites_a_repository_and_a_number(one: Mutation) -> None:
    assert SOURCE.fullmatch(one.source)
    assert one.bug.endswith(".")


def test_the_target_exists_and_its_replacement_keeps_its_name(one: Mutation) -> None:
    owner, name = owner_of(one.target)
    original = vars(owner)[name]
    replacement = planted(one, original)
    assert callable(replacement)
    assert replacement is not original
    assert (replacement.__module__, replacement.__qualname__) == (original.__module__, original.__qualname__)


def test_overrides_are_assignments(one: Mutation) -> None:
    assert all(re.fullmatch(r"\+?[\w.]+=\S+", override) for override in one.overrides)
