"""What the installed libraries say of arguments that are passed on to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.plan.machine_rules import Machine
from nemo_like.policy.backends.library_arguments import passed_to_engines, passed_to_workers
from nemo_like.policy.fsdp.model import empty_model
from nemo_like.policy.megatron.library_values import megatron_values
from nemo_like.preflight import drafts
from nemo_like.preflight.checks import preflight
from nemo_like.preflight.drafts import draft_notes
from nemo_like.preflight.taken_arguments import engine_argument_problem, worker_argument_problem

Demo = Callable[..., Config]


def of_engines(cfg: Config) -> str | None:
    (passed,) = passed_to_engines(cfg.generation)
    return engine_argument_problem(cfg, passed, builds_config=True)


def of_workers(cfg: Config) -> str | None:
    (passed,) = passed_to_workers("policy", cfg.policy)
    return worker_argument_problem(cfg.policy, passed)


def test_vllm_knows_names_and_judges_values(demo: Demo) -> None:
    save_file({"weight": torch.zeros(1)}, Path(demo().policy.model_name) / "model.safetensors")

    def told(arguments: str) -> str | None:
        return of_engines(demo(f"generation.vllm_kwargs={arguments}"))

    assert told("{max_num_batched_token: 5}") == (
        "has max_num_batched_token, which is no argument of vLLM's EngineArgs; did you mean "
        "max_num_batched_tokens?"
    )
    refused = told("{kv_cache_dtype: fp9}")
    assert refused is not None and refused.startswith("is refused by vLLM: ") and "fp9" in refused
    assert told("{max_num_batched_tokens: 4096}") is None


def test_vllm_knows_what_belongs_to_speculative_decoding(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"weight": torch.zeros(1)}, Path(demo().policy.model_name) / "model.safetensors")

    def told(more: str) -> str | None:
        given = f"method: ngram, num_speculative_tokens: 2, {more}"
        return of_engines(demo(f"generation.vllm_kwargs={{speculative_config: {{{given}}}}}"))

    assert told("prompt_lookup_max: 3") is None
    assert told("prompt_lokup_max: 3") == (
        "has prompt_lokup_max, which is no argument of vLLM's SpeculativeConfig; did you mean "
        "prompt_lookup_max?"
    )
    refused = told("prompt_lookup_max: 1, prompt_lookup_min: 3")
    assert refused is not None and refused.startswith("is refused by vLLM: ")
    monkeypatch.setattr(drafts, "find_spec", lambda name: None)
    assert (
        told("prompt_lookup_max: 3") == "has drafts by ngram, for which vLLM needs numba; pip install numba"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "model_kwargs={recompute_granularty: selective}",
            "has recompute_granularty, which is no argument of Megatron-core's TransformerConfig; did you "
            "mean recompute_granularity?",
        ),
        (
            "model_kwargs={attention_backend: flish}",
            "is refused by Megatron-core: attention_backend=flish is",
        ),
        ("optimizer_kwargs={exp_avg_dtype: bfloat17}", "is refused by Megatron-core: exp_avg_dtype=bfloat17"),
        ("model_kwargs={recompute_granularity: selective}", None),
        ("optimizer_kwargs={decoupled_weight_decay: false}", None),
    ],
)
def test_megatron_core_knows_names_and_judges_values(demo: Demo, arguments: str, problem: str | None) -> None:
    told = of_workers(demo(f"policy.megatron_cfg.{arguments}"))
    assert told == problem or (told is not None and problem is not None and told.startswith(problem))


def test_the_plan_shows_what_is_passed_on_and_that_no_test_covers_it(demo: Demo) -> None:
    passed = "policy.megatron_cfg.optimizer_kwargs={decoupled_weight_decay: false}"
    notes = preflight(demo(passed), Machine.this, say=print).notes
    (note,) = [str(note) for note in notes if "kwargs" in note.text]
    assert note.startswith(
        "not checked  policy.megatron_cfg.optimizer_kwargs: decoupled_weight_decay=False; megatron-core "
    )
    assert note.endswith(" takes them, and no test of this project covers what they do")
    with pytest.raises(ConfigError, match=r"optimizer_kwargs=\{betas=1\} has betas, which is no argument"):
        preflight(demo("policy.megatron_cfg.optimizer_kwargs={betas: 1}"), Machine.this, say=print)


def test_the_plan_says_what_is_drafted_and_that_a_draft_goes_stale(demo: Demo) -> None:
    def told(*overrides: str) -> list[str]:
        notes = [*draft_notes(demo(*overrides))]
        return [str(note) for note in notes]

    def given(method: str) -> str:
        config = f"method: {method}, num_speculative_tokens: 3, model: /draft"
        return f"generation.vllm_kwargs={{speculative_config: {{{config}}}}}"

    assert told() == []
    (of_ngrams,) = told(given("ngram"))
    assert of_ngrams.startswith("checked      generation.vllm_kwargs.speculative_config: engines draft 3 tok")
    assert of_ngrams.endswith("by ngram; samples stay the policy's")
    (of_a_head,) = told(given("eagle3"), "policy.device=cuda")
    assert of_a_head.startswith("not checked  ")
    assert "fewer of its tokens are kept as the policy trains" in of_a_head
    assert of_a_head.endswith("no test of this project has run it on a GPU")


def test_names_of_enumerations_and_dtypes_become_what_they_name() -> None:
    assert megatron_values(TransformerConfig, {"attention_backend": "flash", "fp8": "e4m3"}) == {
        "attention_backend": AttnBackend.flash,
        "fp8": "e4m3",
    }
    assert megatron_values(OptimizerConfig, {"exp_avg_dtype": "bfloat16"}) == {
        "exp_avg_dtype": torch.bfloat16
    }


def test_transformers_gets_what_belongs_to_no_checkpoint(demo: Demo) -> None:
    def told(arguments: dict[str, Any]) -> str | None:
        given = ", ".join(f"{name}: {value}" for name, value in arguments.items())
        return of_workers(demo("policy.backend=fsdp", f"policy.fsdp_cfg.model_kwargs={{{given}}}"))

    assert told({"attn_implementation": "eager"}) is None
    assert str(told({"attn_implmentation": "eager"})).endswith("; did you mean attn_implementation?")
    assert str(told({"attn_implementation": "eagre"})).startswith("is refused by transformers: ")
    assert str(told({"hidden_size": 3})).startswith("has hidden_size, which ")
    directory = demo().policy.model_name
    model = empty_model(Path(directory), {"attn_implementation": "eager", "output_attentions": True})
    assert (model.config._attn_implementation, model.config.output_attentions) == ("eager", True)
