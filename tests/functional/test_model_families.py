"""Whole runs with tokenizers, chat templates and ends of real model families: several turns with a tool."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from nemo_like.data.interface import Message
from nemo_like.data.tokenizer import Tokenizer
from scripts.demo_model.warm_start import tiny_config
from tests.functional.answering import RESULT
from tests.functional.test_tasks import run_task
from tests.unit.data.families.families import FAMILIES, Family

pytestmark = [pytest.mark.timeout(400), pytest.mark.whole_run]

# The one whose responses may end with most tokens.
QUICK = "llama3_1"


def untrained_model(family: Family, directory: Path) -> Tokenizer:
    """Save an untrained model with the family's tokenizer, chat template and generation_config.json."""
    family.save(directory)
    tokenizer = Tokenizer(directory)
    torch.manual_seed(0)
    config = tiny_config()
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = 1024
    config.eos_token_id = tokenizer.eos_token_id
    ends = (directory / "generation_config.json").read_text()
    Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "generation_config.json").write_text(ends)
    return tokenizer


def samples_of(recording: Path) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield the passages of each sample: whether the policy generated it, and its tokens."""
    with np.load(recording) as rollout:
        ends = np.cumsum(rollout["lengths"])[:-1]
        columns = (np.split(rollout[f"column/{name}"], ends) for name in ("input_ids", "response_mask"))
        for input_ids, mask in zip(*columns, strict=True):
            marked = zip(mask.tolist(), input_ids.tolist(), strict=True)
            yield [
                (generated, [token for _, token in passage])
                for generated, passage in groupby(marked, key=lambda one: one[0])
            ]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, id=one.name, marks=[] if one.name == QUICK else [pytest.mark.slow])
        for one in FAMILIES
    ],
)
def test_every_turn_reads_as_the_familys_template_writes_it(family: Family, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tokenizer = untrained_model(family, model)
    problems = [{"prompt": f"{number}+1", "answer": ""} for number in range(16)]
    settings = {
        "grpo": {"num_prompts_per_step": 16, "num_generations_per_prompt": 4, "max_num_steps": 1},
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": 512,
            "train_global_batch_size": 64,
        },
        "generation": {"max_new_tokens": 96},
        "data": {"default": {"use_chat_template": True}},
        "env": {
            "task": {
                "max_turns": 3,
                "observation_role": family.role,
                "check_at_start": False,
                "options": {"target": "tests.functional.answering:Answering", "arguments": {}},
            }
        },
        "rollout": {"record": True},
    }
    run = run_task(tmp_path, "custom", settings, problems)
    (record,) = run.records()
    assert record["train/token_mult_prob_error"] < 1.01
    (recording,) = (run.run_dir / "recorded").glob("step_1-*.npz")
    prompts = [tokenizer.encode_prompt((Message("user", one["prompt"]),)) for one in problems]
    num_observed = 0
    for (_, prompt), *said in samples_of(recording):
        assert prompt in prompts
        for (_, response), (is_generated, observed), _ in zip(
            said[::2], said[1::2], said[2::2], strict=False
        ):
            assert not is_generated
            asked = (Message("user", "?"),)
            assert response[-1] in tokenizer.end_token_ids
            assert observed == tokenizer.encode_observation(asked, RESULT, family.role, response[-1])
            num_observed += 1
    assert num_observed > 0
