"""Faults planted in single modules of an engine, each of which the search must name.

    python -m pytest -q tests/functional/test_mismatch_faults.py

The last line says of how many faults the first sentence named the right module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from nemo_like.mismatch.search import NOTHING
from tests.functional.engine_families import make_engine_checkpoint
from tests.functional.generation_fixtures import make_checkpoint
from tests.functional.mismatch_pairs import Pair, config, parties_of, planted, points

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]

_OTHER = "the engine has another weight (model.{}) than the trainer"
_EQUAL = "weights are equal, {}"


@dataclass(frozen=True)
class Fault:
    """A fault of one module of an engine's model, and what the search must say."""

    fault: str
    where: str
    named: list[str]  # all points that differ, in the order of the computation
    said: str  # of the first; "..." stands for the tokens or experts in which it differs
    is_loaded: bool = False  # whether it is in what is loaded, so that weights must be sent
    heads: tuple[int, ...] | None = None  # that the first finding names


def _layer(number: int, *names: str) -> list[str]:
    return [f"layers.{number}.{name}" for name in names]


_ROTATED = ("self_attn.rotated_q", "self_attn.rotated_k")
_QWEN3 = [
    Fault(
        "rope_base",
        "model.layers.1.self_attn.rotary_emb",
        _layer(1, *_ROTATED),
        _EQUAL.format("rotated_q differs from position 1 on"),
    ),
    Fault(  # which all layers share
        "short_table",
        "model.layers.0.self_attn.rotary_emb",
        _layer(0, *_ROTATED) + _layer(1, *_ROTATED),
        _EQUAL.format("rotated_q differs from position 40 on"),
    ),
    Fault(
        "epsilon",
        "model.layers.1.self_attn.k_norm",
        _layer(1, "self_attn.k_norm"),
        _EQUAL.format("k_norm differs"),
    ),
    Fault("epsilon", "model.norm", ["norm"], _EQUAL.format("norm differs")),
    Fault(
        "swap",
        "model.layers.0.mlp.gate_up_proj",
        _layer(0, "mlp.gate_proj", "mlp.up_proj"),
        _OTHER.format("layers.0.mlp.gate_proj.weight"),
    ),
    Fault(
        "swap",
        "model.layers.1.self_attn.o_proj",
        _layer(1, "self_attn.o_proj"),
        _OTHER.format("layers.1.self_attn.o_proj.weight"),
    ),
    Fault(
        "attention_scale",
        "model.layers.1.self_attn.attn",
        _layer(1, "self_attn.attention"),
        _EQUAL.format("attention differs from position 1 on"),
    ),
    Fault(
        "left_out",
        "model.layers.0.self_attn.q_norm",
        _layer(0, "self_attn.q_norm"),
        "it differs; the engine's weights of it are not known",
    ),
    Fault(
        "gelu",
        "model.layers.1.mlp.act_fn",
        _layer(1, "mlp.activation"),
        _EQUAL.format("activation differs"),
    ),
    Fault(
        "logit_scale",
        "logits_processor",
        ["logprobs"],
        "it differs; the engine's weights of it are not known",  # they are the embedding's
    ),
]
_QWEN2 = [
    Fault(
        "bias_of_head_1",
        "model.layers.0.self_attn.qkv_proj",
        _layer(0, "self_attn.q_proj"),
        _OTHER.format("layers.0.self_attn.q_proj.bias"),
        heads=(1,),
    ),
]
_MIXTURE = [
    Fault(
        "transpose",
        "model.layers.1.mlp.experts.2.down_proj.weight",
        _layer(1, "mlp.experts"),
        _EQUAL.format("experts differs in expert 2"),
        is_loaded=True,
    ),
    Fault(
        "exchange",
        "model.layers.0.mlp.experts.{}.down_proj.weight",
        _layer(0, "mlp.experts"),
        _EQUAL.format("experts differs in experts 1, 2"),
        is_loaded=True,
    ),
]
_GEMMA3 = [
    Fault(
        "window",
        "model.layers.0.self_attn.attn",
        _layer(0, "self_attn.attention"),
        _EQUAL.format("attention differs from position 4 on"),
    ),
    Fault(
        "epsilon",
        "model.layers.0.post_feedforward_layernorm",
        _layer(0, "post_feedforward_layernorm"),
        _EQUAL.format("post_feedforward_layernorm differs"),
    ),
    Fault(
        "scaled",
        "model.layers.1.pre_feedforward_layernorm.weight",
        _layer(1, "pre_feedforward_layernorm"),
        _OTHER.format("layers.1.pre_feedforward_layernorm.weight"),
    ),
    Fault("scaled", "model.normalizer", _layer(0, "input"), _EQUAL.format("input differs")),
]
_GPT_OSS = [
    Fault(
        "no_sinks",
        "model.layers.1.attn.attn",
        _layer(1, "self_attn.attention"),
        _EQUAL.format("attention differs"),
    ),
    Fault(
        "zero",
        "model.layers.0.mlp.router.bias",
        _layer(0, "mlp.gate", "mlp.experts"),
        _OTHER.format("layers.0.mlp.router.bias"),
    ),
]
_GLM4 = [
    Fault(
        "zero",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        _layer(1, "mlp.experts"),
        "it differs...",
    ),
]
_DEEPSEEK = [
    Fault(
        "epsilon",
        "model.layers.1.self_attn.kv_a_layernorm",
        _layer(1, "self_attn.kv_a_layernorm"),
        _EQUAL.format("kv_a_layernorm differs"),
    ),
]
FAULTS = {
    "qwen3": _QWEN3,
    "qwen2": _QWEN2,
    "mixture": _MIXTURE,
    "gemma3_text": _GEMMA3,
    "gpt_oss": _GPT_OSS,
    "glm4_moe": _GLM4,
    "deepseek_v3": _DEEPSEEK,
}
_QUICK = ("qwen3", "mixture")


def _with_biases(path: Path) -> Path:
    """Qwen2, whose queries, keys and values have biases."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.15,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return path


_MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3": partial(make_checkpoint, tied=True),
    "qwen2": _with_biases,
    "mixture": partial(make_checkpoint, tied=False, num_experts=4, expert_size=64),
}


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Give an engine and a trainer of the model with this name: Qwen3 by FSDP, others by Megatron-core. They
    run until those of another model are asked for."""
    with ExitStack() as running:

        @lru_cache(maxsize=1)
        def pair(name: str) -> Pair:
            running.close()
            path = tmp_path_factory.mktemp(name)
            make = _MODELS.get(name, partial(make_engine_checkpoint, family=name))
            backend = "fsdp" if name == "qwen3" else "megatron"
            cfg = config(make(path / "model"), f"policy.backend={backend}")
            return Pair(cfg, running.enter_context(parties_of(cfg, path)))

        yield pair


@pytest.fixture(scope="module")
def rightly(request: pytest.FixtureRequest) -> Iterator[list[bool]]:
    """For each fault whether its module was named; how many were is said at the end."""
    named: list[bool] = []
    yield named
    if (terminal := request.config.pluginmanager.getplugin("terminalreporter")) is not None:
        terminal.write_line(f"\nnamed rightly: {sum(named)} of {len(named)}")


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        pytest.param(model, one, id=f"{model} {one.fault} {one.where}", marks=marks)
        for model, faults in FAULTS.items()
        for marks in [() if model in _QUICK else pytest.mark.slow]
        for one in faults
    ],
)
def test_a_fault_of_one_module_is_named(
    pair_of: Callable[[str], Pair], model: str, fault: Fault, rightly: list[bool]
) -> None:
    pair = pair_of(model)
    with planted(pair, fault.fault, fault.where):
        if fault.is_loaded:
            pair.push()
        found = pair.find()
    rightly.append(points(found)[0] == fault.named[0])
    said, dots, _ = f"{fault.named[0]}: {fault.said}".partition("...")
    assert found.sentences[0] == said or (dots and found.sentences[0].startswith(said))
    assert points(found) == fault.named
    assert fault.heads in (None, found.compared.findings[0].heads)
    if fault.is_loaded:
        pair.push()
    assert pair.find().sentences == [NOTHING]
