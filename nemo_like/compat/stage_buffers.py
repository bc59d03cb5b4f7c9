"""Gives the later pipeline stages of an engine on CPUs the buffers for what the earlier ones send.

vLLM makes these buffers while it measures memory at the start. It measures nothing on CPUs where the KV cache
has a given size, and a later stage then fails at its first batch.

Private part: ``GPUModelRunner.intermediate_tensors`` of vllm 0.32.0, which is set as vLLM's own
``_dummy_run`` sets it. This module can go with a vLLM whose CPU workers make the buffers themselves.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group


class StageBuffersExtension:
    """A method that vLLM mixes into every worker."""

    model_runner: Any  # vLLM's worker has it

    def make_stage_buffers(self) -> None:
        """Make the buffers of this worker's pipeline stage, if it is not the first."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
