"""On a GPU vLLM itself returns the experts of every token, by an option that its CPU build lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.batch.recordings import ROUTED_EXPERTS
from nemo_like.batch.routed_experts import routed_experts_column
from nemo_like.cluster.cluster import Cluster
from nemo_like.generation.interface import GroupRequest, GroupResult
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.models.model_info import read_model_info
from nemo_like.policy.options import Device
from tests.functional.generation_fixtures import TIMEOUT_S, collector_spec, make_checkpoint
from tests.gpu.engine_fixtures import bf16_engine_spec

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.timeout(300)]

SAMPLED = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12, stop_token_ids=())
PROMPT = tuple(range(2, 50))


@pytest.mark.usefixtures("private_ray")
def test_vllms_own_option_returns_what_the_routers_chose(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, tied=False, num_experts=8, num_layers=3)
    column = routed_experts_column(read_model_info(str(checkpoint), "megatron"))
    cluster = Cluster()
    try:
        engine = cluster.start(bf16_engine_spec(checkpoint, "routed", Device.cuda, routed_experts=column))
        sink = cluster.start(collector_spec())
        results: list[GroupResult] = []
        for name in ("first", "cached"):  # the second time the prompt is in the prefix cache
            asked = [GroupRequest(name, PROMPT, (0, 1))]
            for call in (
                engine.submit("submit", asked, SAMPLED, sink),
                sink.submit("wait_for", [name], TIMEOUT_S),
            ):
                [answer] = cluster.gather([call], stage="test", timeout_s=TIMEOUT_S)
            results += answer
    finally:
        cluster.stop()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    differs = []
    for response in (response for result in results for response in result.responses):
        ids = torch.tensor([[*PROMPT, *response.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids, output_router_logits=True).router_logits
        expected = torch.stack([one.topk(2, dim=-1).indices.sort(-1).values for one in logits], 1).numpy() + 1
        returned = (response.context_columns[ROUTED_EXPERTS], response.columns[ROUTED_EXPERTS][:-1])
        differs.append((np.sort(np.concatenate(returned), -1) != expected[:-1]).any(-1).mean())
    # The engine rounds to bfloat16, so that a few routers choose otherwise; by chance 96 % would.
    assert max(differs) < 0.2
