"""Which code of others a process may run, and what it imports before it loads a model."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.models.remote_code import (
    allowing_code,
    brings_code,
    code_environment,
    import_external_libs,
    loading_arguments,
)
from nemo_like.policy.options import PolicyConfig
from tests.functional.policy_fixtures import policy_config


@pytest.fixture
def policy(tmp_path: Path) -> PolicyConfig:
    return policy_config(tmp_path)


def test_by_default_a_process_gets_no_variable_and_loads_without_arguments(policy: PolicyConfig) -> None:
    assert code_environment(policy, Path("/run/code")) == {}
    assert loading_arguments() == {}


def test_trust_is_an_argument_of_whatever_is_loaded_and_ends_with_the_block(policy: PolicyConfig) -> None:
    before = dict(os.environ)
    with allowing_code(replace(policy, trust_remote_code=True)):
        assert loading_arguments() == {"trust_remote_code": True}
        with allowing_code(policy):
            assert loading_arguments() == {}
        assert loading_arguments() == {"trust_remote_code": True}
    assert dict(os.environ) == before


def test_only_trusted_code_has_a_directory_for_its_copies(policy: PolicyConfig) -> None:
    trusted = code_environment(replace(policy, trust_remote_code=True), Path("/run/code"))
    assert trusted["HF_MODULES_CACHE"] == "/run/code"
    assert "HF_MODULES_CACHE" not in code_environment(
        replace(policy, external_lib=["one"]), Path("/run/code")
    )


def test_external_libs_are_imported_in_order_before_the_arguments_are_there(
    policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first_of_two.py").write_text("")
    (tmp_path / "second_of_two.py").write_text("import sys\nassert 'first_of_two' in sys.modules\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with allowing_code(replace(policy, external_lib=["first_of_two", "second_of_two"])):
        assert loading_arguments() == {}
    assert "second_of_two" in sys.modules


def test_a_library_that_is_not_there_is_named(policy: PolicyConfig) -> None:
    with (
        allowing_code(replace(policy, external_lib=["no_such_library"])),
        pytest.raises(ModuleNotFoundError, match="no_such_library"),
    ):
        import_external_libs()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_model_or_tokenizer_is_named_by_auto_map(name: str, tmp_path: Path) -> None:
    assert not brings_code(tmp_path)
    (tmp_path / name).write_text("no JSON")
    assert not brings_code(tmp_path)
    (tmp_path / name).write_text(json.dumps({"model_type": "qwen3"}))
    assert not brings_code(tmp_path)
    (tmp_path / name).write_text(json.dumps({"auto_map": {"AutoConfig": "own.Config"}}))
    assert brings_code(tmp_path)
