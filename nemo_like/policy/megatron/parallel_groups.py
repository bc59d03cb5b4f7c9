"""Makes Megatron-core's process groups so that they agree with the coordinates by which the driver
dispatches."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from nemo_like.cluster.coordinates import Coordinates


def initialise_parallel_state(coordinates: Coordinates) -> None:
    """Make Megatron-core's process groups, unless this process has them.

    Raises ValueError when they give this rank other coordinates than ``coordinates``.
    """
    layout = coordinates.layout
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=True,  # over which checkpoints are gathered in host memory
        )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    actual = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    expected = (
        *(coordinates.tp, coordinates.cp, coordinates.dp, coordinates.pp),
        *(coordinates.ep, coordinates.etp),
    )
    if actual != expected:
        raise ValueError(
            f"rank {dist.get_rank()} is at (tp, cp, dp, pp, ep, etp)={actual}, not at {expected}"
        )
