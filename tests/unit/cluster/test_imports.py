from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like.cluster.imports import lasting_imports, load_target


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that can do without colorsys, which nothing else here imports."""
    (tmp_path / "made_for_the_test.py").write_text(
        "import gc\n"
        "is_collecting = gc.isenabled()\n"
        "try:\n    import colorsys\nexcept ImportError:\n    colorsys = None\n"
        "class Thing:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    yield "made_for_the_test"
    sys.modules.pop("made_for_the_test", None)
    gc.unfreeze()


def test_nothing_is_collected_while_modules_are_imported_and_they_are_never_looked_through_again(
    package: str,
) -> None:
    frozen = gc.get_freeze_count()
    assert load_target(f"{package}:Thing").__name__ == "Thing"
    assert not sys.modules[package].is_collecting
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen


def test_where_all_is_loaded_already_whatever_else_there_is_can_be_collected() -> None:
    frozen = gc.get_freeze_count()
    with lasting_imports():
        importlib.import_module("gc")
    assert gc.get_freeze_count() == frozen


def test_a_failed_import_leaves_collections_on() -> None:
    with pytest.raises(ModuleNotFoundError), lasting_imports():
        importlib.import_module("there_is_no_such_module")
    assert gc.isenabled()


def test_a_package_to_do_without_is_absent_only_inside(package: str) -> None:
    with lasting_imports(without=["colorsys"]):
        module = importlib.import_module(package)
    assert module.colorsys is None
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_a_package_that_is_loaded_already_stays(package: str) -> None:
    importlib.import_module("colorsys")
    with lasting_imports(without=["colorsys"]):
        module = importlib.import_module(package)
    assert module.colorsys is sys.modules["colorsys"]


def test_a_target_can_be_loaded_without_a_package(package: str) -> None:
    load_target(f"{package}:Thing", without=["colorsys"])
    assert sys.modules[package].colorsys is None


def test_storage_is_imported_without_the_compiler_which_can_mark_functions_afterwards() -> None:
    program = """
import sys
from nemo_like.data_plane.storage_import import import_storage
import_storage()
assert "tensordict" in sys.modules
assert "torch._dynamo" not in sys.modules
import torch
assert torch.compiler.allow_in_graph(len) is len
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
