"""Estimates the time of driver, data plane and rollout actor.

The estimates come from the measurements of docs/explanation/performance.md. They were made
on two CPU cores; a node's cores are assumed to be as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like_tools.scale_plan.recipe_workload import Workload

# "The driver at scale": 131,072 samples on 64 replicas take 1.88 s, 65,536 take 0.97 s; 1,024 samples take
# 0.17 s on 512 replicas. From eight replicas on the table is met within a quarter.
DRIVER_SAMPLE_S = 15e-6
DRIVER_REPLICA_S = 3e-4
# Ray's part of a call: 8,038 calls a second to several actors, by its release tests
# (ray-project/ray, release/perf_metrics/microbenchmark.json, 1_n_actor_calls_async).
RAY_CALL_S = 1 / 8038
# Weight sync, log-probs and training; the driver asks every worker once in each.
CALLS_PER_WORKER = 3

# "The data plane", ours_as_used, `simple`: a step of 2048 x 4096 spends 48 ms on memcpy and transport of
# 136 MB, and its bookkeeping takes 14 ms more than that of 512 x 2048, which has 1,536 rows fewer. The round
# trips of two replicas and one producer take 27 to 31 ms; a request takes 2 ms on two busy cores.
PLANE_BYTES_PER_S = 2.8e9
PLANE_ROW_S = 14e-3 / 1536
PLANE_FIXED_S = 35e-3
PLANE_REQUEST_S = 2e-3
REQUESTS_PER_REPLICA = 3  # to the host: one for a fetch, two for a write-back
PUT_BYTES_PER_TOKEN = 4 + 1 + 4  # input_ids, response_mask, generation_logprobs
WRITTEN_BYTES_PER_TOKEN = 4  # of each column of log-probs

# A step of the demo takes 1.26 s for 1,024 samples; 15 % of it is neither generation nor workers' compute.
# This includes everything that the rollout actor does, and more.
ROLLOUT_SAMPLE_S = 0.15 * 1.26 / 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Seconds on hosts. The rollout actor works beside the engines; the other two add to the step."""

    driver_s: float
    data_plane_s: float
    rollout_actor_s: float
    moved_bytes: float  # bytes through the data plane, over all processes
    put_bytes: float  # the part of ``moved_bytes`` that the rollout actor puts


def host_cost(workload: Workload) -> HostCost:
    """Return the cost of a step outside of GPUs."""
    train = workload.train
    driver_s = DRIVER_SAMPLE_S * workload.num_samples + DRIVER_REPLICA_S * train.dp
    driver_s += CALLS_PER_WORKER * train.num_gpus * RAY_CALL_S
    put = PUT_BYTES_PER_TOKEN * workload.num_tokens
    written = workload.logprob_phases * WRITTEN_BYTES_PER_TOKEN * workload.num_tokens
    streams = min(train.dp, workload.storage_units)
    # One process puts; the replicas fetch what was put and write back, as many at once as there are units.
    bytes_s = (put + (put + written) / streams) / PLANE_BYTES_PER_S
    requests_s = PLANE_REQUEST_S * REQUESTS_PER_REPLICA * max(0, train.dp - 2)
    return HostCost(
        driver_s=driver_s,
        data_plane_s=PLANE_FIXED_S + PLANE_ROW_S * workload.num_samples + bytes_s + requests_s,
        rollout_actor_s=ROLLOUT_SAMPLE_S * workload.num_samples,
        moved_bytes=2 * put + written,
        put_bytes=put,
    )
