from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config.nodes import config_of, merged

VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["a", "${b.c}"])
)
TREES = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner)
    ),
)


def plain(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=False)


@given(TREES)
def test_nodes_are_those_that_omegaconf_makes(tree: dict[str, Any]) -> None:
    for _ in range(2):  # made, and read
        assert plain(config_of(tree)) == plain(OmegaConf.create(tree)) == tree


@given(st.lists(TREES, max_size=3))
def test_a_merge_is_that_of_omegaconf(trees: list[dict[str, Any]]) -> None:
    def outcome(make: Callable[[], Any]) -> Any:
        try:
            return plain(make())
        except OmegaConfBaseException as error:  # as where a list is in the place of a group
            return str(error)

    expected = outcome(lambda: OmegaConf.unsafe_merge({}, *map(OmegaConf.create, trees)))
    assert outcome(lambda: merged(trees)) == outcome(lambda: merged(trees)) == expected


def test_groups_are_parts_of_the_whole() -> None:
    config = config_of({"a": {"b": "${c.d}", "e": "${.b}"}, "c": {"d": [1]}, "f": "${c.d}"})
    assert OmegaConf.to_container(config, resolve=True) == {
        "a": {"b": [1], "e": [1]},
        "c": {"d": [1]},
        "f": [1],
    }


def test_a_change_of_one_is_not_in_the_next() -> None:
    tree = {"a": {"b": [1]}}
    for make in (config_of, lambda one: merged([one])):
        changed = make(tree)
        changed.a.b.append(2)
        changed.a.c = 3
        assert plain(make(tree)) == {"a": {"b": [1]}}
