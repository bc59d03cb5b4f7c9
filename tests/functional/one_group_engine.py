"""An engine on CPUs whose routers choose among all experts by sigmoids and with a bias.

vLLM's router on CPUs does so for groups of experts only: it refuses sigmoids without groups. One group of all
experts is the same choice.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from nemo_like.generation.vllm_engine import VllmEngine


class OneGroupEngine(VllmEngine):
    def __init__(self, **options: Any) -> None:
        make = CPURouter.__init__

        def with_one_group(router: CPURouter, *args: Any, **given: Any) -> None:
            make(router, *args, **given)
            if not router.use_grouped_topk:
                router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

        CPURouter.__init__ = with_one_group
        super().__init__(**options)
