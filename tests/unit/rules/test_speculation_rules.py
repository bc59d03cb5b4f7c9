from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.generation.speculation import (
    DraftMethod,
    Speculation,
    draft_bytes,
    speculation,
    with_absolute_draft,
)
from nemo_like.plan.derived import keeps_weights_asleep
from nemo_like.plan.host_memory import host_memory
from nemo_like.plan.memory_timetable import GIB, memory_timetable
from nemo_like.rules.feature_rules import speculation_problems
from nemo_like.rules.rules import validate
from tests.unit.plan.test_memory_timetable import COLOCATED, qwen3_8b

Demo = Callable[..., Config]

ON_GPU = ("policy.device=cuda", "generation.vllm_cfg.kv_cache_gib=null")
NGRAM = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 3}"
KEY = "generation.vllm_kwargs.speculative_config"


def drafting(config: str, *more: str) -> str:
    return f"generation.vllm_kwargs={{speculative_config: {config}{''.join(f', {one}' for one in more)}}}"


def told(cfg: Config) -> list[str]:
    """The problems of speculative decoding that a whole validation finds."""
    try:
        validate(cfg)
    except ConfigError as error:
        return [text for problem in error.problems if "spec" in (text := str(problem)) or "draft" in text]
    return []


def test_drafts_by_the_samples_own_tokens_pass(demo: Demo) -> None:
    cfg = demo(drafting(NGRAM))
    assert told(cfg) == []
    assert speculation(cfg.generation) == Speculation(DraftMethod.ngram, 3, None)
    assert speculation(demo().generation) is None


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("ngram", f"{KEY}=ngram must name a method; such as {{method: ngram, num_speculative_tokens: 3"),
        ("{method: [ngram]}", f"{KEY}.method=['ngram'] is none of those whose log-probs"),
        ("{num_speculative_tokens: 3}", f"{KEY}={{'num_speculative_tokens': 3}} must name a method"),
        (
            "{method: ngarm, num_speculative_tokens: 3}",
            f"{KEY}.method=ngarm is none of those whose log-probs and seeds were looked at here: ngram, "
            "draft_model; did you mean ngram?",
        ),
        (
            "{method: suffix, num_speculative_tokens: 3}",
            f"{KEY}.method=suffix is none of those whose log-probs and seeds were looked at here",
        ),
        ("{method: ngram}", f"{KEY}.num_speculative_tokens=None must be at least 1"),
        ("{method: ngram, num_speculative_tokens: 0}", f"{KEY}.num_speculative_tokens=0 must be at least 1"),
        (
            "{method: eagle, model: /draft, num_speculative_tokens: 3}",
            f"{KEY}.method=eagle does not go with policy.device=cpu, where engines draft by ngram, draft_m",
        ),
        (
            "{method: draft_model, num_speculative_tokens: 3}",
            f"{KEY}.method=draft_model needs the checkpoint of a draft; set {KEY}.model",
        ),
        (
            "{method: ngram, num_speculative_tokens: 3, rejection_sample_method: synthetic}",
            f"{KEY}.rejection_sample_method=synthetic keeps drafts by another rule",
        ),
        (
            "{method: ngram, num_speculative_tokens: 3, num_speculative_tokens_per_batch_size: [[1, 8, 3]]}",
            f"{KEY}.num_speculative_tokens_per_batch_size=[[1, 8, 3]] has the length of a draft depend on",
        ),
        (
            "{method: ngram, num_speculative_tokens: 3, draft_sample_method: probabilistic}",
            f"{KEY}.draft_sample_method=probabilistic draws drafts without a seed with policy.device=cpu",
        ),
    ],
)
def test_drafts_that_cannot_be_had_or_change_what_is_sampled_are_refused(
    demo: Demo, config: str, problem: str
) -> None:
    assert any(one.startswith(problem) for one in map(str, speculation_problems(demo(drafting(config)))))


def test_what_engines_on_cpus_draft_by_is_refused_on_gpus_and_the_other_way_round(demo: Demo) -> None:
    (problem,) = map(str, speculation_problems(demo(*ON_GPU, drafting(NGRAM))))
    assert problem.startswith(f"{KEY}.method=ngram does not go with policy.device=cuda, where engines draft")
    assert problem.endswith("set it to ngram_gpu")
    for method in ("ngram_gpu", "mtp"):
        config = f"{{method: {method}, num_speculative_tokens: 1, draft_sample_method: probabilistic}}"
        assert list(speculation_problems(demo(*ON_GPU, drafting(config)))) == []
    for method in ("eagle", "eagle3", "draft_model"):
        config = f"{{method: {method}, num_speculative_tokens: 1, model: /draft}}"
        assert list(speculation_problems(demo(*ON_GPU, drafting(config)))) == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "generation.validation.min_p=0.1",
            f"generation.validation.min_p=0.1 is refused by vLLM beside {KEY}",
        ),
        (
            "policy.megatron_cfg.router_replay=true",
            "policy.megatron_cfg.router_replay=true records the experts of every token",
        ),
    ],
)
def test_what_drafts_do_not_go_with_is_refused(demo: Demo, override: str, problem: str) -> None:
    (found,) = map(str, speculation_problems(demo(drafting(NGRAM), override)))
    assert found.startswith(problem)
    assert found.endswith(f"leave {KEY} out")


def test_agents_are_refused(demo: Demo) -> None:
    agent = "env.arithmetic={kind: agent, options: {entry: 'tests.nothing:run'}}"
    (found,) = map(str, speculation_problems(demo(drafting(NGRAM), agent)))
    assert found.startswith("env.arithmetic.kind=agent has log-probs corrected for what masked a token")


def test_adapters_pass(demo: Demo) -> None:
    adapters = ("policy.lora.enabled=true", "generation.lora_sync=adapter")
    assert list(speculation_problems(demo(drafting(NGRAM), *adapters))) == []


def test_a_model_that_reads_images_is_refused(demo: Demo) -> None:
    cfg = demo(drafting(NGRAM))
    config = Path(cfg.policy.model_name) / "config.json"
    config.write_text(json.dumps({"model_type": "qwen2_5_vl"}), encoding="utf-8")
    (found,) = map(str, speculation_problems(cfg))
    assert "reads images: what keeps their tokens from being sampled is a logits processor" in found


def test_a_recording_needs_no_drafts(demo: Demo, tmp_path: Path) -> None:
    assert list(speculation_problems(demo(drafting("ngram"), f"rollout.replay={tmp_path}"))) == []


def test_what_would_have_a_seed_give_other_samples_beside_others_is_refused(demo: Demo) -> None:
    num_seqs = "generation.vllm_cfg.max_num_seqs=256"
    (budget,) = told(demo(drafting(NGRAM, "max_num_batched_tokens: 1279"), num_seqs))
    assert "must be at least 1280" in budget  # 256 samples with a draft of 3, a token before it and one more
    assert told(demo(drafting(NGRAM, "max_num_batched_tokens: 1280"), num_seqs)) == []
    (shared,) = told(demo(drafting(NGRAM, "enable_prefix_caching: true")))
    assert "how a sample begins depends on whether others have its prompt" in shared


def test_an_engine_that_drafts_on_a_cpu_has_room_for_all_its_samples(demo: Demo) -> None:
    """2 layers with 2 heads of 32 keys and values of 4 bytes are 1 KiB a token, 5 blocks of 32 a sample."""
    sizes = ("policy.max_total_sequence_length=128", "generation.vllm_cfg.max_num_seqs=64")
    needed = 64 * 160 * 2**10 / 2**30
    fits = demo(drafting(NGRAM), *sizes, f"generation.vllm_cfg.kv_cache_gib={needed}")
    assert told(fits) == []
    too_small = f"generation.vllm_cfg.kv_cache_gib={needed * 0.99}"
    (problem,) = told(demo(drafting(NGRAM), *sizes, too_small))
    assert f"must be at least {needed:.3g} with {KEY}: where 64 samples of 128 tokens do not fit" in problem
    assert told(demo(*sizes, too_small)) == []
    with_own = f"{{method: draft_model, model: {fits.policy.model_name}, num_speculative_tokens: 3}}"
    (doubled,) = told(demo(drafting(with_own), *sizes, f"generation.vllm_cfg.kv_cache_gib={needed}"))
    assert f"must be at least {2 * needed:.3g}" in doubled
    (blocks,) = told(demo(drafting(NGRAM, "num_gpu_blocks_override: 319"), *sizes))
    assert "num_gpu_blocks_override=319 must be at least 320" in blocks


def draft_checkpoint(path: Path, num_bytes: int) -> Path:
    save_file({"weight": torch.zeros(num_bytes, dtype=torch.uint8)}, path / "model.safetensors")
    return path


def test_engines_keep_the_weights_of_a_draft_while_they_sleep(demo: Demo, tmp_path: Path) -> None:
    by_method = {"ngram_gpu": False, "mtp": True, "eagle": True, "draft_model": True}
    for method, keeps in by_method.items():
        config = f"{{method: {method}, num_speculative_tokens: 2, model: {tmp_path}}}"
        assert keeps_weights_asleep(demo(*ON_GPU, drafting(config))) is keeps
    assert not keeps_weights_asleep(demo(*ON_GPU))


def test_the_weights_of_a_draft_count_on_the_gpu_and_on_the_host(tmp_path: Path) -> None:
    draft = drafting(
        f"{{method: eagle, num_speculative_tokens: 2, model: {draft_checkpoint(tmp_path, 4096)}}}"
    )
    plain, with_draft = (qwen3_8b(*COLOCATED, *more) for more in ([], [draft]))
    num_bytes = draft_bytes(with_draft[0].generation)
    assert 4096 <= num_bytes < 4096 + 200
    table = memory_timetable(*with_draft, 79 * GIB)
    (gpu, *_) = table.by_gpu
    held = [one.num_bytes for stage in table.by_gpu[gpu].values() for one in stage if one.what == "draft"]
    assert set(held) == {num_bytes}
    asleep = "weights of engines that sleep"
    assert all(asleep not in parts for parts in host_memory(*plain).values())
    assert any(asleep in parts for parts in host_memory(*with_draft).values())


def test_a_draft_is_found_from_the_folder_in_which_an_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    kwargs = {"speculative_config": {"method": "draft_model", "model": "draft"}, "block_size": 32}
    assert with_absolute_draft(kwargs) == {
        "speculative_config": {"method": "draft_model", "model": str(tmp_path / "draft")},
        "block_size": 32,
    }
    elsewhere = {"speculative_config": {"method": "draft_model", "model": "owner/draft"}}
    assert with_absolute_draft(elsewhere) == elsewhere
