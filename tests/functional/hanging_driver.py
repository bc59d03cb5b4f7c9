"""A driver of its own that stores something and then only waits to be killed.

python -m tests.functional.hanging_driver RAY_ADDRESS BACKEND RUN_ID
"""

from __future__ import annotations

import sys
import threading

import ray

from nemo_like.batch.columns import ROLLOUT_COLUMNS
from nemo_like.compat.lean_ray import few_services
from tests.functional.data_plane_fixtures import TransferQueuePlanes, data_plane_config
from tests.unit.data_plane.contract import put


def main(address: str, backend: str, run_id: str) -> None:
    with few_services():  # which has Ray on loopback, where it otherwise looks at the machine's address
        ray.init(address=address, log_to_driver=False)
    planes = TransferQueuePlanes(run_id, data_plane_config(backend, timeout_s=20.0))
    planes.start()
    planes.open("train-1", ROLLOUT_COLUMNS)
    put(planes.client(), "train-1")
    print("stored", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
