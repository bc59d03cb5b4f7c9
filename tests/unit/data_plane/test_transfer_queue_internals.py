"""What of TransferQueue and Mooncake would be missed in silence."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from nemo_like.data_plane import mooncake
from nemo_like.data_plane.storage_import import TRANSFER_QUEUE_ENVIRONMENT


def package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.parametrize("name", [*TRANSFER_QUEUE_ENVIRONMENT, *mooncake.environment("127.0.0.1")])
def test_a_variable_that_is_set_is_read(name: str) -> None:
    if name.startswith("TQ_"):
        assert any(f'"{name}"' in path.read_text() for path in package("transfer_queue").rglob("*.py"))
    else:
        assert name.encode() in (package("mooncake") / "store.so").read_bytes()
