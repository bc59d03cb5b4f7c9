"""Which functions tests call, and which tests need more than values."""

from __future__ import annotations

import pytest

from nemo_like.environments.sandboxed.called_functions import functions_called
from nemo_like.environments.sandboxed.remote_program import RefusedTests


@pytest.mark.parametrize(
    ("tests", "names"),
    [
        ("assert double(3) == 6", {"double"}),
        ("import math\nassert f(math.pi) == max(1, 2)", {"f"}),
        ("def check(candidate):\n    x = 3\n    assert candidate(x)\ncheck(g)", {"g"}),
        ("for case, want in [(1, 2)]:\n    assert f(case) == want", {"f"}),
        ("assert [f(x) for x in range(3)] == [g(y) for y in map(h, 'ab')]", {"f", "g", "h"}),
        ("class T:\n    limit = 3\n    def test(self):\n        assert f(self.limit)\nT().test()", {"f"}),
        ("def a():\n    global limit\n    limit = 3\na()\nassert f(limit)", {"f"}),
        ("try:\n    f(1)\nexcept ValueError as error:\n    assert str(error)", {"f"}),
        ("import re, unittest\nassert re.compile('a').match(f()).group(0).upper()", {"f"}),
        ("x = f(1)\nassert x.strip() == 'a' and f(2).items() and x.__class__ is str", {"f"}),
        ("import pytest\nwith pytest.raises(ValueError):\n    f(x := 3)\nxs = [1]\n_ = f(xs)\nf(3)", {"f"}),
        ("assert all(callable(g) for g in (f, g)) and sorted([2], key=f) == [2]", {"f", "g"}),
        ("assert isinstance(f(1), int) and type(f(1)) is int and hasattr(f(1), 'real')", {"f"}),
    ],
)
def test_the_programs_functions_are_the_names_that_nobody_else_defines(tests: str, names: set[str]) -> None:
    assert functions_called(tests) == names


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (
            "with pytest.raises(ValueError):\n    f(3)",
            "line 1: they use pytest.raises, and pytest is not theirs",
        ),
        ("import pytest\nwith pytest.raises(TooSmall):\n    f(3)", "line 2: they give TooSmall to raises"),
        ("x: List[int] = f()", "they use List otherwise than by calling it"),
        ("assert f() % MODULUS == 1", "they use MODULUS otherwise than by calling it"),
        ("async def a():\n    assert await f() == 1", "they await what a function returns"),
        ("with open('a', 'w') as file:\n    file.write('b')\nassert f('a')", "line 1: they use open"),
        ("import os\nos.environ['A'] = 'b'\nassert f()", "line 2: they change os.environ['A']"),
        ("from contextlib import redirect_stdout\nassert f()", "they import contextlib.redirect_stdout"),
        ("import contextlib\nwith contextlib.redirect_stdout(None):\n    f()", "they use redirect_stdout"),
        ("g = f\nxs = []\nwhile True:\n    g(xs)", "line 4: they call g for what it does to its argument"),
        ("assert f(key=lambda x: x) == 1", "they pass a function or class to f"),
        ("assert f(\x00)", "they are no Python program"),
        ("(" * 5000, "they are no Python program"),
    ],
)
def test_tests_that_need_more_than_values_are_refused_with_the_line(tests: str, reason: str) -> None:
    with pytest.raises(RefusedTests) as refused:
        functions_called(tests)
    assert reason in str(refused.value)
