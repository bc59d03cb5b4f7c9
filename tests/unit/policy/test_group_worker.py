from __future__ import annotations

import pytest

from nemo_like.policy.group_worker import told_of_group


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError])
def test_what_a_backend_says_of_the_policy_is_said_of_the_workers_own_group(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^set value\.fsdp_cfg\.tensor_parallel_size=1$"), told_of_group("value"):
        raise kind("set policy.fsdp_cfg.tensor_parallel_size=1")


def test_an_error_that_names_no_key_is_raised_as_it_is() -> None:
    error = ValueError("odd")
    with pytest.raises(ValueError, match="odd") as caught, told_of_group("teacher"):
        raise error
    assert caught.value is error
