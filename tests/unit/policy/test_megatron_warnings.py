from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import warnings
import nemo_like.policy.megatron
warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
warnings.warn("Apex is not installed. Falling back to Torch Norm")
warnings.warn("something else")
"""


def test_a_start_does_not_repeat_which_kernels_megatron_core_does_without() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stderr
    assert "something else" in told and "Apex" not in told
