"""Where a policy computes, and in which numbers."""

from __future__ import annotations

import torch

from nemo_like.config.schema import Device, Precision

DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}


def compute_device(device: Device) -> torch.device:
    """This process's: the host, or the CUDA device that is current."""
    if device is Device.cpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
