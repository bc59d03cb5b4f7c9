"""docs/explanation/testing.md says which test covers which kind; each of them is in ``make test``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nemo_like.data_plane.options import STORAGE_KINDS
from nemo_like.policy.options import BACKEND_KINDS
from tests.unit.forked import collected

ROOT = Path(__file__).resolve().parents[2]
KILLED = (
    *("an engine", "the rollout actor", "an environment actor", "a policy worker", "the driver"),
    *("a storage unit", "TransferQueue's controller", "the data plane's host", "Mooncake's master"),
    *("gcs_server", "raylet"),
)
LAYOUTS = (
    "tensor parallelism 2",
    "pipeline parallelism 2",
    "context parallelism 2",
    "expert parallelism 2",
    "FSDP with data parallelism 2",
)
RUNS = (
    *("Ray on two nodes", "a Slurm job of two nodes", "an array of Slurm jobs"),
    "a run that `ray job submit` starts",
)
BACKENDS = (
    *(f"policy.backend={backend}" for backend in BACKEND_KINDS.names()),
    *(f"data_plane.backend={backend}" for backend in STORAGE_KINDS.names()),
)


@pytest.fixture(scope="module")
def covering() -> dict[str, str]:
    """Tests by the kind that they cover, from the page."""
    page = (ROOT / "docs" / "explanation" / "testing.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| (.+) \| `(test_\w+\.py::.+)` \|$", page, re.MULTILINE))


@pytest.mark.parametrize("kind", [*LAYOUTS, *RUNS, *BACKENDS])
def test_the_page_names_a_test_of_each_kind(covering: dict[str, str], kind: str) -> None:
    assert any(re.search(rf"{re.escape(kind)}\b", row) for row in covering)


@pytest.mark.parametrize("process", KILLED)
def test_the_page_names_a_test_that_kills_each_kind_of_process(
    covering: dict[str, str], process: str
) -> None:
    kills = [row.replace("`", "") for row in covering if row.startswith("kill of ")]
    assert any(process in re.split(r", |kill of ", row) for row in kills)


def test_each_of_them_is_quick(covering: dict[str, str], tmp_path: Path) -> None:
    files = {f"tests/functional/{test.partition('::')[0]}" for test in covering.values()}
    code, said = collected("-q", "-m", "not slow", *sorted(files), directory=ROOT, output=tmp_path / "said")
    assert code == 0, said
    assert {f"tests/functional/{test}" for test in covering.values()} <= set(said.splitlines())
