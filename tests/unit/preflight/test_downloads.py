"""Checkpoints that are named as on the Hugging Face hub, with a cache and without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.models.hub_models import is_hub_name
from nemo_like.preflight.downloads import with_downloaded, with_downloads
from tests.unit.config.checkpoints import hub_snapshot


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_name_on_the_hub_is_no_directory_and_no_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    names = ("Qwen/Qwen3-8B", "gpt2", "here", "here/model", "./a/b/c", "/a", "../a", "~/a", "")
    assert [name for name in names if is_hub_name(name)] == ["Qwen/Qwen3-8B", "gpt2"]


@pytest.mark.parametrize("fetch", [with_downloads, with_downloaded])
def test_every_model_is_found_in_the_cache(
    demo: Callable[..., Config], cache: Path, fetch: Callable[[Config], Config]
) -> None:
    tiny, judge, taught = (str(hub_snapshot(cache, f"Me/{name}")) for name in ("tiny", "judge", "taught"))
    cfg = demo(
        *("policy.model_name=Me/tiny", "+value=default", "+teacher=default", "teacher.model_name=Me/taught"),
        *("teacher.models={arithmetic: Me/judge}", "env@env.likes=reward_model"),
        "env.likes.options.model_name=Me/judge",
    )
    found = fetch(cfg)
    assert found.value is not None and found.teacher is not None
    assert (found.policy.model_name, found.value.model_name) == (tiny, tiny)
    assert (found.teacher.model_name, found.teacher.models) == (taught, {"arithmetic": judge})
    assert found.env["likes"].options["model_name"] == judge
    assert cfg.policy.model_name == "Me/tiny"


def test_a_model_that_is_not_on_the_hub_is_refused_by_a_run_and_left_by_a_plan(
    demo: Callable[..., Config],
) -> None:
    cfg = demo("policy.model_name=Qwen/none")
    assert with_downloaded(cfg).policy.model_name == "Qwen/none"
    with pytest.raises(ConfigError) as refused:
        with_downloads(cfg)
    assert "policy.model_name=Qwen/none is not a directory, and does not come from the" in str(refused.value)
    assert "download it: hf download Qwen/none" in str(refused.value)


def test_a_directory_stays_as_it_is_written(demo: Callable[..., Config], checkpoint: Path) -> None:
    assert with_downloads(demo()).policy.model_name == str(checkpoint)
