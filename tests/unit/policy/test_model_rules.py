from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.policy.groups.model_rules import external_lib_problems
from tests.functional.policy_fixtures import policy_config


@pytest.mark.parametrize("name", ["own.py", "folder/own", "own:Model", "", "pkg://own"])
def test_an_external_library_has_the_name_of_a_module(name: str, tmp_path: Path) -> None:
    (problem,) = external_lib_problems(replace(policy_config(tmp_path), external_lib=["a.b", name]))
    assert problem.key == f"policy.external_lib[1]={name}"
    assert problem.remedy == "write package.module, without a folder and without .py"


def test_names_of_modules_are_fine(tmp_path: Path) -> None:
    assert [*external_lib_problems(replace(policy_config(tmp_path), external_lib=["own", "a.b_c.d1"]))] == []
