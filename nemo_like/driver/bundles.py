"""Which processes of a run must share a node, as bundles for ``cluster.placement``."""

from __future__ import annotations

import math

from nemo_like.cluster.placement import Bundle
from nemo_like.config.plan import Role, RoleNeeds, roles
from nemo_like.config.schema import Config, Placement
from nemo_like.policy.parallelism import parallel_layout


def actor_name(role: Role, needs: RoleNeeds, index: int | str) -> str:
    """Return the name of process ``index`` of a role, which is the role's own name where it has one process.

    An environment's index is its name and its number, such as ``math-0``.
    """
    return role.name if needs.count == 1 else f"{role.name}-{index}"


def bundles(cfg: Config) -> list[list[Bundle]]:
    """Return the ways to place a run, the best first; each is a list of bundles, and a bundle is on one node.

    A tensor- and context-parallel group of policy workers must share a node, since every layer waits for
    their exchanges. So must all of an engine. An expert-parallel group should: the first way has it on one
    node, and a second, for nodes that are too small for that, need not.
    """
    layout = parallel_layout(cfg.policy)
    group_size = layout.tp * layout.cp  # the fastest axes: consecutive ranks, as those of experts are
    sizes = dict.fromkeys([math.lcm(group_size, layout.ep), group_size])
    return [_placed(cfg, size) for size in sizes]


def _placed(cfg: Config, group_size: int) -> list[Bundle]:
    """Return one bundle per ``group_size`` policy workers and one per engine.

    Colocated engines get no bundle of their own: they are dealt to the groups of workers, where there are
    any, and share their bundles and GPUs.
    """
    needs = roles(cfg)
    workers, engines = needs[Role.policy_worker], needs[Role.engine]
    groups = [
        _bundle(workers, Role.policy_worker, range(first, min(first + group_size, workers.count)))
        for first in range(0, workers.count, group_size)
    ]
    own = [_bundle(engines, Role.engine, range(index, index + 1)) for index in range(engines.count)]
    if cfg.cluster.placement is Placement.separate or not groups:
        return groups + own
    return [_shared(group, own[index :: len(groups)]) for index, group in enumerate(groups)]


def _bundle(needs: RoleNeeds, role: Role, indices: range) -> Bundle:
    count = len(indices)
    names = tuple(actor_name(role, needs, index) for index in indices)
    return Bundle(names, num_cpus=count * needs.num_cpus, num_gpus=count * needs.num_gpus)


def _shared(group: Bundle, guests: list[Bundle]) -> Bundle:
    return Bundle(
        group.actors + tuple(name for guest in guests for name in guest.actors),
        num_cpus=group.num_cpus + sum(guest.num_cpus for guest in guests),
        num_gpus=math.ceil(group.num_gpus),
    )
