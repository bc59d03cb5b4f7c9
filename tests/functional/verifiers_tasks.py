"""A taskset of verifiers: sums, whose wrong answers may be corrected. Runs in the hubs' interpreter."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def is_short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 2)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for number in range(20):
            data = SumData(prompt=f"{number}+1=", answer=str(number + 1), system_prompt="Add.")
            yield SumTask(data, self.config.task)


class CorrectedEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CorrectedEnv(vf.Env[CorrectedEnvConfig]):
    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                segment = await interaction.turn("wrong, again")


__all__ = ["CorrectedEnv", "SumTaskset"]
