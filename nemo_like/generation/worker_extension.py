"""``WorkerExtension``: all methods that this project adds to vLLM's workers; vLLM takes one class only."""

from __future__ import annotations

import multiprocessing

from nemo_like.compat.draft_sampling import DraftSamplingExtension
from nemo_like.compat.route_recorder import RouteRecorderExtension
from nemo_like.compat.stage_buffers import StageBuffersExtension
from nemo_like.compat.unmasked_logprobs import UnmaskedLogprobsExtension
from nemo_like.generation.weight_receiver import WeightReceiverExtension
from nemo_like.models.remote_code import import_external_libs

# vLLM imports this module in each process of a worker, before the worker builds its part of the model. An
# engine's own process imports the libraries when it makes vLLM's arguments.
if multiprocessing.parent_process() is not None:
    import_external_libs()


class WorkerExtension(
    WeightReceiverExtension,
    RouteRecorderExtension,
    UnmaskedLogprobsExtension,
    DraftSamplingExtension,
    StageBuffersExtension,
):
    """The methods that vLLM mixes into every worker, by its argument ``worker_extension_cls``."""
