"""Adds up the cost of a step: its stages one after the other, or generation beside training."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like_tools.scale_plan.generation import GenerationCost, generation_cost
from nemo_like_tools.scale_plan.hardware import Assumptions, GpuDataSheet
from nemo_like_tools.scale_plan.host_costs import HostCost, host_cost
from nemo_like_tools.scale_plan.recipe_workload import Workload
from nemo_like_tools.scale_plan.training import TrainingCost, training_cost
from nemo_like_tools.scale_plan.weight_costs import WeightCost, weight_cost

STAGES = ("weight sync", "generation", "log-probs", "training", "data plane", "driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The cost of one step."""

    workload: Workload
    weights: WeightCost
    generation: GenerationCost
    training: TrainingCost
    host: HostCost

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage, in the order of STAGES."""
        stages = (
            self.weights.seconds,
            max(self.generation.seconds, self.host.rollout_actor_s),
            self.training.logprobs_s,
            self.training.training_s,
            self.host.data_plane_s,
            self.host.driver_s,
        )
        return dict(zip(STAGES, stages, strict=True))

    @property
    def total_s(self) -> float:
        """Seconds of a synchronous step."""
        return sum(self.seconds.values())

    @property
    def overlapped_s(self) -> float:
        """Seconds of a step that trains on the previous step's samples while it samples."""
        seconds = self.seconds
        trainer = seconds["log-probs"] + seconds["training"]
        others = seconds["weight sync"] + seconds["data plane"] + seconds["driver"]
        return max(seconds["generation"], trainer) + others

    @property
    def tokens_per_gpu_s(self) -> float:
        """Tokens per second and GPU of a synchronous step, including prompts."""
        return self.workload.num_tokens / self.total_s / self.workload.num_gpus

    @property
    def link_bytes(self) -> dict[str, float]:
        """Bytes of the step by link, of one GPU; the data plane's bytes are of all processes."""
        generation, weights, training = self.generation, self.weights, self.training
        nvlink = network = 0.0
        for num_bytes, is_network in (
            (generation.link_bytes, generation.spans_nodes),
            (weights.received_bytes, weights.over_network),
        ):
            nvlink += 0.0 if is_network else num_bytes
            network += num_bytes if is_network else 0.0
        return {
            "HBM, generating GPU": generation.hbm_bytes,
            "NVLink, generating GPU": nvlink,
            "NVLink, training GPU": training.nvlink_bytes,
            "network, generating GPU": network,
            "network, training GPU": training.network_bytes,
            "host, data plane": self.host.moved_bytes,
            "host, put by the rollout actor": self.host.put_bytes,
        }


def step_cost(workload: Workload, gpu: GpuDataSheet, assumptions: Assumptions) -> StepCost:
    """Return the cost of a step. Raises LayoutError when an engine does not hold its weights."""
    return StepCost(
        workload=workload,
        weights=weight_cost(workload, gpu, assumptions),
        generation=generation_cost(workload, gpu, assumptions),
        training=training_cost(workload, gpu, assumptions),
        host=host_cost(workload),
    )
