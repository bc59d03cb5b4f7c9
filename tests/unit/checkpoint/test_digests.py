from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from nemo_like.checkpoint.digests import differing_files, share_digests, share_of_rank

FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "__10_0.distcp", "common.pt", "random_state_1_of_2.pt"]


def test_a_worker_hashes_what_it_wrote_and_the_first_what_nobody_in_particular_wrote() -> None:
    assert share_of_rank(FILES, 1, 16) == ["__1_0.distcp", "random_state_1_of_2.pt"]
    assert share_of_rank(FILES, 0, 16) == [".metadata", "__0_0.distcp", "common.pt"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_every_file_is_hashed_by_one_worker_whatever_the_layout_that_reads(world_size: int) -> None:
    shares = [share_of_rank(FILES, rank, world_size) for rank in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(FILES)


def test_digests_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_bytes(b"abc")
    digests = share_digests(tmp_path, rank=0, world_size=1)
    assert digests == {"common.pt": hashlib.sha256(b"abc").hexdigest()}
    assert differing_files(tmp_path, digests) == []


def test_one_flipped_bit_is_a_difference(tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_bytes(b"abc")
    digests = share_digests(tmp_path, rank=0, world_size=1)
    (tmp_path / "common.pt").write_bytes(b"abb")
    assert differing_files(tmp_path, digests) == ["common.pt"]


def test_a_file_that_a_worker_cannot_reach_is_not_called_corrupt(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"common\.pt"):
        differing_files(tmp_path, {"common.pt": "0"})
