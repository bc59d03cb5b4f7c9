"""A real engine computes every model family as transformers does, also with weights that it was sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from nemo_like.generation.engine_args import engine_args
from nemo_like.generation.options import WeightTransport
from nemo_like.models.family import FAMILIES, Part
from nemo_like.policy.options import Device
from tests.functional.generation_fixtures import engine_kwargs
from tests.functional.policy_fixtures import make_checkpoint
from tests.functional.weight_setup import Processes

pytestmark = [pytest.mark.timeout(300), pytest.mark.engine]

QUICK = ("mixtral", "phi3")
TOLERANCE = 1e-5
# vLLM's attention on CPUs has no smaller heads, and its experts are multiples of 32 wide.
SIZES = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64}
# Its kernel for latent attention has one size of latents.
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.fixture
def processes(private_ray: None, request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Of one family: what vLLM sets up for dense models and for mixtures differs by process."""
    processes = Processes(request.node.callspec.id)
    yield processes
    processes.stop()


@pytest.mark.parametrize(
    "family",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES.names()],
)
def test_an_engine_computes_what_transformers_does_before_and_after_an_update(
    family: str, processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kind = FAMILIES.load(family)
    sizes = SIZES | (EXPERTS if kind.mixture and kind.mixture.expert_size in EXPERTS else {})
    engine: dict[str, Any] = {}
    if Part.mla in kind.parts:
        sizes = {**sizes, **LATENTS, "head_dim": LATENTS["qk_rope_head_dim"]}
    if family == "minimax_m2":
        sizes = {**sizes, "rotary_dim": 16}
        engine = {"target": "tests.functional.one_group_engine:OneGroupEngine"}
    is_tied = kind.defaults.get("tie_word_embeddings", False)
    checkpoint = make_checkpoint(tmp_path_factory.mktemp(family), family, tied=is_tied, **sizes)
    setup = processes.setup(checkpoint, WeightTransport.shared_memory, engine=engine)
    assert setup.logprob_error(setup.generate("first")) < TOLERANCE
    setup.update(seed=1)
    stale = setup.logprob_error(setup.generate("stale"))
    setup.push(1)
    assert setup.logprob_error(setup.generate("updated")) < TOLERANCE < 1e-2 < stale


def test_an_engine_gets_what_config_json_lacks_and_on_a_cpu_the_arguments_of_the_family(
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(tmp_path, "deepseek_v3", tied=False)
    spec = engine_kwargs(checkpoint, "engine")["spec"]
    asked = engine_args(spec)
    assert asked.hf_overrides == {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert (asked.attention_backend, asked.block_size) == ("CPU_MLA", 16)
    given = {"compilation_config": {"custom_ops": ["-rms_norm"], "cudagraph_mode": "NONE"}, "block_size": 32}
    more = engine_args(replace(spec, generation=replace(spec.generation, vllm_kwargs=given)))
    assert more.block_size == 32
    assert more.compilation_config.custom_ops == ["-rotary_embedding", "-rms_norm"]
    assert more.compilation_config.cudagraph_mode is CUDAGraphMode.NONE
    content = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**content, **asked.hf_overrides}))
    on_gpu = engine_args(replace(spec, device=Device.cuda))
    assert not on_gpu.hf_overrides and on_gpu.attention_backend is None
