"""Log-probs of what an engine samples under a grammar's mask are those of the policy, which knows no mask.

Which of vLLM's model runners samples depends on the device, and each is watched at doors of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from nemo_like.cluster.cluster import Cluster
from nemo_like.generation.interface import FORCED, CallSampling, GroupRequest
from nemo_like.policy.options import Device
from tests.functional.generation_fixtures import TIMEOUT_S, collector_spec
from tests.gpu.engine_fixtures import World, bf16_engine_spec, trainer_spec

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# Nats, and nats in the mean: rounding of two layers in bfloat16, which has 8 bits.
TOLERANCE, MEAN_TOLERANCE = 0.25, 0.05
THREE_LETTERS_OF_TWO = CallSampling(1.0, 1.0, 0, 8, (), structured_outputs=json.dumps({"regex": "[12]{3}"}))


@pytest.mark.parametrize(
    "device",
    [pytest.param(Device.cpu, marks=pytest.mark.slow), pytest.param(Device.cuda, marks=pytest.mark.gpu)],
)
def test_logprobs_under_a_mask_are_those_of_the_policy_without_it(
    private_ray: None, arithmetic_model: str, device: Device
) -> None:
    model, cluster = Path(arithmetic_model), Cluster()
    try:
        spec = bf16_engine_spec(model, "masked", device, tokenizer_name=str(model), structured_outputs=True)
        engine, trainer = cluster.start(spec), cluster.start(trainer_spec(model, "trainer", device))
        world = World(cluster, [engine], trainer, cluster.start(collector_spec()))
        prompt = AutoTokenizer.from_pretrained(model)("12+7=").input_ids
        request = GroupRequest("masked", tuple(prompt), tuple(range(16)))
        world.ask(engine, "submit", [request], THREE_LETTERS_OF_TWO, world.sink)
        [result] = world.ask(world.sink, "wait_for", ["masked"], TIMEOUT_S)
        forced = []
        for response in result.responses:
            ids = response.token_ids.tolist()
            dense = np.asarray(world.ask(trainer, "canary_logprobs", [*prompt, *ids])[-len(ids) :])
            difference = np.abs(dense - response.logprobs)
            assert difference.max() < TOLERANCE
            assert difference.mean() < MEAN_TOLERANCE
            forced += response.columns[FORCED].tolist()
        # Nothing but the two letters may be sampled, which the policy would often not have chosen.
        assert set(forced) == {0, 1}
    finally:
        cluster.stop()
