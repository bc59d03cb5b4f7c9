"""A real engine computes every model family as transformers does, also with weights that it was sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.config import CUDAGraphMode

from nemo_like.generation.engine_args import engine_args
from nemo_like.generation.options import WeightTransport
from nemo_like.models.family import FAMILIES
from nemo_like.policy.options import Device
from tests.functional.engine_families import ENGINES, make_engine_checkpoint
from tests.functional.generation_fixtures import engine_kwargs
from tests.functional.policy_fixtures import make_checkpoint
from tests.functional.weight_setup import Processes

pytestmark = [pytest.mark.timeout(300), pytest.mark.engine]

QUICK = ("mixtral", "phi3")
# Rounding: an engine multiplies latent attention in another order, which makes differences of some 1e-5.
TOLERANCE = 2e-5


@pytest.fixture
def processes(ray_of_engines: None, request: pytest.FixtureRequest) -> Iterator[Processes]:
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
    checkpoint = make_engine_checkpoint(tmp_path_factory.mktemp(family), family)
    engine = {"target": ENGINES[family]} if family in ENGINES else {}
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
