"""Checkpoints that are named as on the Hugging Face hub, with a cache and without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.data.interface import Message
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.models.hub_models import is_hub_name
from nemo_like.models.model_info import read_model_info
from nemo_like.preflight.downloads import with_downloaded, with_downloads
from scripts.demo_model.tiny_tokenizer import save_tokenizer
from tests.unit.config.checkpoints import hub_snapshot

UNLIKE = ("policy.model_overrides={rope_theta: 500.0}",)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "nemo_like"


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


def test_a_revision_is_that_of_the_cache(demo: Callable[..., Config], cache: Path) -> None:
    tiny = hub_snapshot(cache, "Me/tiny")
    found = with_downloaded(demo("policy.model_name='Me/tiny@main'"))
    assert found.policy.model_name == str(tiny)
    other = "Me/tiny@" + "f" * 40
    assert with_downloaded(demo(f"policy.model_name='{other}'")).policy.model_name == other


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


def test_a_model_with_changes_is_a_directory_of_links_that_all_parts_read(
    demo: Callable[..., Config], checkpoint: Path, changed: Path
) -> None:
    cfg = demo("+value=default", "policy.model_overrides={rope_theta: 500.0, max_position_embeddings: 64}")
    found = with_downloads(cfg)
    directory = Path(found.policy.model_name)
    assert directory.parent == changed and found.value is not None
    assert found.value.model_name == str(directory)  # it follows the policy
    before, after = (json.loads((each / "config.json").read_text()) for each in (checkpoint, directory))
    assert after == {**before, "rope_theta": 500.0, "max_position_embeddings": 64}
    assert (directory / "model.safetensors").samefile(checkpoint / "model.safetensors")
    assert with_downloaded(cfg).policy.model_name == str(directory)  # a plan has it too
    assert with_downloads(demo("+value=default", *UNLIKE)).policy.model_name != str(directory)
    assert (
        read_model_info(str(directory), None).vocab_size == read_model_info(str(checkpoint), None).vocab_size
    )


def test_a_model_takes_another_tokenizer(
    demo: Callable[..., Config], checkpoint: Path, changed: Path, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = with_downloads(demo(f"policy.tokenizer={tmp_path / 'other'}"))
    tokenizer = Tokenizer(found.policy.model_name)
    assert tokenizer.decode(tokenizer.encode_prompt((Message("user", "1+1="),))) == "1+1="
    assert (Path(found.policy.model_name) / "config.json").read_text() != ""


def test_a_tokenizer_that_is_none_or_has_too_many_ids_is_refused(
    demo: Callable[..., Config], checkpoint: Path, changed: Path, tmp_path: Path
) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"policy\.tokenizer=.* holds no tokenizer"):
        with_downloads(demo(f"policy.tokenizer={tmp_path / 'none'}"))
    save_tokenizer(tmp_path / "other")
    shutil.copytree(checkpoint, tmp_path / "shrunk")
    config = json.loads((checkpoint / "config.json").read_text()) | {"vocab_size": 8}
    (tmp_path / "shrunk" / "config.json").write_text(json.dumps(config))
    given = (f"policy.tokenizer={tmp_path / 'other'}", f"policy.model_name={tmp_path / 'shrunk'}")
    with pytest.raises(ConfigError, match=r"has \d+ token ids, and the model has 8; name a tokenizer"):
        with_downloads(demo(*given))
