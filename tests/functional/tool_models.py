"""A model that was shown how to call the tools of the demo with an agent, and calls them with any numbers."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from scripts.demo_model.tool_tokenizer import save_tokenizer
from scripts.demo_model.warm_start_tools import batches, tool_config
from tests.functional.taught_models import learn

# The demo's own learns for longer, until it adds some of the numbers.
_NUM_STEPS = 30


def calling_model(directory: Path) -> str:
    """Save it; return its path."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tool_config())
    learn(model, islice(batches(seed=1), _NUM_STEPS))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)
