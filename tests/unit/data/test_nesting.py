from __future__ import annotations

from typing import Any

import pytest

from nemo_like.data.messages import BadMessage, plain_call
from nemo_like.data.nesting import MAX_LEVELS, is_shallow


def nested(levels: int, *, key: str | None = None) -> Any:
    value: Any = [] if key is None else {}
    for _ in range(levels - 1):
        value = [value] if key is None else {key: value}
    return value


@pytest.mark.parametrize("key", [None, "a"])
def test_as_many_levels_as_are_allowed_are_shallow_and_one_more_is_not(key: str | None) -> None:
    assert is_shallow(nested(MAX_LEVELS, key=key))
    assert not is_shallow(nested(MAX_LEVELS + 1, key=key))
    assert not is_shallow([1, {"b": nested(MAX_LEVELS, key=key)}])


@pytest.mark.parametrize("value", [None, "[[[", 1, [], {}, [1, "a", None], {"a": [1]}])
def test_what_is_hardly_nested_is_shallow(value: Any) -> None:
    assert is_shallow(value)


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 100_000])
def test_arguments_of_a_call_that_are_nested_too_deeply_are_a_bad_message(levels: int) -> None:
    call = {"function": {"name": "add", "arguments": "[" * levels + "]" * levels}}
    with pytest.raises(BadMessage, match=f"nested deeper than {MAX_LEVELS} levels"):
        plain_call(call)
