"""The CPUs and GPUs that a run reserves on each node, as bundles for ``cluster.placement``."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.cluster.placement import Bundle
from nemo_like.configuration import Config
from nemo_like.plan.places import Place, gpus_by_node
from nemo_like.plan.roles import roles


def bundles(cfg: Config, places: Sequence[Place]) -> list[Bundle]:
    """Return one bundle for each node that has at least one of ``places``."""
    needs = roles(cfg)
    return [
        Bundle(
            actors={place.actor: place.gpus for place in places if place.node == node},
            num_cpus=sum(needs[place.role].num_cpus for place in places if place.node == node),
            num_gpus=num_gpus,
        )
        for node, num_gpus in gpus_by_node(places).items()
    ]
