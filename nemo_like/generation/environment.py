"""How an engine's process is started: with which environment variables, and which methods in threads.

The driver imports this module to build actor specs, so nothing heavy is imported here.
"""

from __future__ import annotations

import os
from pathlib import Path

from nemo_like.cluster.cpu_environment import CPU_ENVIRONMENT
from nemo_like.compat.worker_start import MAY_BE_FORKED
from nemo_like.observability.caches import INDUCTOR, cache_directory
from nemo_like.policy.options import Device

# An engine that takes weights while samples are under way runs these in threads (``ActorSpec.in_threads``),
# since other calls must get through meanwhile.
WAITING_METHODS = ("pause",)


# What an engine on CPUs imports when it starts.
CPU_IMPORTS = ("nemo_like.generation.vllm_engine", "vllm.v1.worker.cpu_worker")


def engine_environment(device: Device, num_nodes: int = 1) -> dict[str, str]:
    """Return the variables to set before a process of an engine over ``num_nodes`` nodes imports torch or
    vLLM, for ``ActorSpec.env``."""
    common = {
        # The engine core runs in the actor's own process, so no second process has to start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # This cache is kept between runs: filling an empty one costs about ten seconds at every start.
        "VLLM_CACHE_ROOT": str(_cache_root()),
        # This one is kept too; by default it lies among the temporary files, which are removed with the run.
        INDUCTOR: os.environ.get(INDUCTOR, str(_cache_root() / "inductor")),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        # Checkpoints are directories; nothing is ever looked up on a network.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device is Device.cpu:
        common |= _CPU | (_ON_ONE_NODE if num_nodes == 1 else {})
    return common


def unused_by_engines(device: Device) -> tuple[str, ...]:
    """Return optional packages that an engine's process shall not import, for ``ActorSpec.without``.

    On CPUs vLLM imports them if it can, which takes three quarters of a second. It needs scipy for sound,
    which no engine reads, and a part of torch's compiler only to compile, which happens on GPUs alone.
    Transformers imports scikit-learn if it is installed, and that needs scipy. On GPUs nothing is left out,
    since vLLM's start takes far longer there anyway.
    """
    return ("scipy", "sklearn", "torch._inductor.lowering") if device is Device.cpu else ()


_CPU = {
    **CPU_ENVIRONMENT,
    **MAY_BE_FORKED,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# Else ``cluster.actors`` and ``started_vllm`` say which interface and address other nodes reach.
_ON_ONE_NODE = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def _cache_root() -> Path:
    return Path(os.environ.get("VLLM_CACHE_ROOT") or cache_directory() / "vllm")
