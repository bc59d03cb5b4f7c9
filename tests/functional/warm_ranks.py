"""What every rank of a world would do first, done once in the process that they are forked from.

It is the last module that this process imports.
"""

from __future__ import annotations

import gc

import peft  # noqa: F401 - FSDP's adapters load it when they are made
import torch

# PyTorch prepares its operators for tensors without values when the first one is filled.
torch.nn.Linear(1, 1, device="meta")

# A rank never goes through these objects when it looks for garbage, which some checkpoints ask for.
gc.collect()
gc.freeze()
