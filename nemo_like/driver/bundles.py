"""What a run reserves on each node, as bundles for ``cluster.placement``."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.cluster.placement import Bundle
from nemo_like.config.places import Place, gpus_by_node
from nemo_like.config.roles import Role, RoleNeeds, actor_name, roles
from nemo_like.config.schema import Config


def bundles(cfg: Config, places: Sequence[Place]) -> list[Bundle]:
    """Return a bundle for each node that any of ``places`` is on."""
    needs = roles(cfg)
    num_cpus = _cpus(needs[Role.policy_worker], Role.policy_worker) | _cpus(needs[Role.engine], Role.engine)
    return [
        Bundle(
            actors={place.actor: place.gpus for place in places if place.node == node},
            num_cpus=sum(num_cpus[place.actor] for place in places if place.node == node),
            num_gpus=num_gpus,
        )
        for node, num_gpus in gpus_by_node(places).items()
    ]


def _cpus(needs: RoleNeeds, role: Role) -> dict[str, float]:
    return {actor_name(role, needs, index): needs.num_cpus for index in range(needs.count)}
