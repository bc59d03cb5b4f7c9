"""Log-probs of what an engine samples with drafts are those of the policy, and a seed fixes what that is.

Which of vLLM's model runners drafts, and keeps drafts, depends on the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.stage import EngineHolds
from nemo_like.generation.interface import EngineStats, GroupRequest, GroupResult
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.policy.options import Device
from tests.functional.generation_fixtures import TIMEOUT_S, collector_spec
from tests.gpu.engine_fixtures import World, bf16_engine_spec, trainer_spec

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

# Nats; in the mean for the trainer, which in bfloat16 differs from an engine, drafts or none, by up to 0.6 in
# tokens of which the demo's model is unsure.
ENGINE_TOLERANCE, TRAINER_MEAN_TOLERANCE = 0.1, 0.05
SAMPLING = SamplingSettings(1.0, 1.0, 0, 12)
BY_TOKENS = {"num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
BY_MODEL = {"method": "draft_model", "num_speculative_tokens": 3}


@pytest.mark.parametrize("drafts", [BY_TOKENS, BY_MODEL], ids=["by its tokens", "by a model"])
@pytest.mark.parametrize(
    "device",
    [Device.cpu, pytest.param(Device.cuda, marks=pytest.mark.gpu)],
)
def test_what_is_sampled_with_drafts_is_the_policys_and_the_same_again(
    private_ray: None, arithmetic_model: str, device: Device, drafts: dict[str, Any]
) -> None:
    model, cluster = Path(arithmetic_model), Cluster()
    by_device = {Device.cpu: "ngram", Device.cuda: "ngram_gpu"}
    how = {"model": str(model), **drafts} if "method" in drafts else {"method": by_device[device], **drafts}
    try:
        engine = cluster.start(
            bf16_engine_spec(model, "drafting", device, vllm_kwargs={"speculative_config": how})
        )
        trainer = cluster.start(trainer_spec(model, "trainer", device))
        world = World(cluster, [engine], trainer, cluster.start(collector_spec()))
        prompt = AutoTokenizer.from_pretrained(model)("12+7=").input_ids
        first = sampled(world, "first", prompt)
        for response in first.responses:
            ids = response.token_ids.tolist()
            for scorer, measure, tolerance in (
                (engine, np.max, ENGINE_TOLERANCE),  # scoring a prompt takes no drafts
                (trainer, np.mean, TRAINER_MEAN_TOLERANCE),
            ):
                dense = np.asarray(world.ask(scorer, "canary_logprobs", [*prompt, *ids])[-len(ids) :])
                assert measure(np.abs(dense - response.logprobs)) < tolerance
        kept = world.ask(engine, "stats").num_kept_draft_tokens
        if device is Device.cuda:  # asleep and awake again, with the weights of the draft
            for holds in (EngineHolds.nothing, EngineHolds.everything):
                world.hold(holds)
        again = sampled(world, "again", prompt)
        for one, other in zip(first.responses, again.responses, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
        stats: EngineStats = world.ask(engine, "stats")
        assert 0 < kept < stats.num_kept_draft_tokens < stats.num_draft_tokens
        assert stats.num_kept_draft_tokens == 2 * kept
    finally:
        cluster.stop()


def sampled(world: World, name: str, prompt: list[int]) -> GroupResult:
    request = GroupRequest(name, tuple(prompt), tuple(range(16)))
    world.ask(world.engines[0], "submit", [request], SAMPLING, world.sink)
    [result] = world.ask(world.sink, "wait_for", [name], TIMEOUT_S)
    return result
