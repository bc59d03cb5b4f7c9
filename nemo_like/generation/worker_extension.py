"""What this project adds to vLLM's workers, in one class, since vLLM takes one."""

from __future__ import annotations

from nemo_like.compat.draft_sampling import DraftSamplingExtension
from nemo_like.compat.route_recorder import RouteRecorderExtension
from nemo_like.compat.unmasked_logprobs import UnmaskedLogprobsExtension
from nemo_like.generation.weight_receiver import WeightReceiverExtension


class WorkerExtension(
    WeightReceiverExtension, RouteRecorderExtension, UnmaskedLogprobsExtension, DraftSamplingExtension
):
    """Methods that vLLM mixes into every worker."""
