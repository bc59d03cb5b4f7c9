"""``SyncRolloutActor``: prompts in, metadata out.

    prompts ──▶ requests ──▶ engines ──▶ on_groups (a callback per finished group)
                                             │ decode, environment
                                             ▼
                       all groups rewarded: flatten ──▶ one put ──▶ data plane

A group is rewarded as soon as it is finished, while the engines go on with the others. Nothing
polls: the engines call back, the last reward resolves a future, and that future has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.config.recordings import RecordingManifest
from nemo_like.config.schema import Config
from nemo_like.data.datasets import build_dataset
from nemo_like.data.interface import Prompt, PromptExample
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.data_plane.factory import DataPlaneSpec, connect
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.meta import KVBatchMeta
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.generation.interface import GroupRequest, GroupResult, Response, SamplingSettings
from nemo_like.observability.metrics import Metric, maximum, mean, summed
from nemo_like.observability.summary import SampleAnswer
from nemo_like.observability.trace import span
from nemo_like.rollout.components import component_tags
from nemo_like.rollout.flatten import FlatBatch, flatten
from nemo_like.rollout.prompts import PromptBatch, RolloutMode, RolloutResult
from nemo_like.rollout.recorder import RolloutRecorder
from nemo_like.rollout.seeds import response_seeds


@dataclass(slots=True)
class _ActiveRollout:
    """State of the one rollout in progress; position = index into the prompt batch."""

    prompts: PromptBatch
    examples: list[PromptExample]
    prompt_ids: list[tuple[int, ...]]
    finished: asyncio.Future[None]
    started_s: float
    groups: dict[int, GroupResult] = field(default_factory=dict)
    feedback: dict[int, list[Feedback]] = field(default_factory=dict)
    last_group_s: float = 0.0
    reward_tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def check_version(self, result: GroupResult) -> None:
        """Fail the rollout when a group was sampled by other weights than it should."""
        expected = self.prompts.policy_version
        if result.policy_version != expected:
            self.fail(
                RuntimeError(
                    f"group {result.request_id!r} was sampled by policy version {result.policy_version}, "
                    f"not by {expected}"
                )
            )

    def fail(self, error: BaseException) -> None:
        """End the wait for the rollout with an error; the first one counts."""
        if not self.finished.done():
            self.finished.set_exception(error)

    def on_rewarded(self, task: asyncio.Task[None]) -> None:
        """The last reward resolves the rollout, one that raised fails it."""
        self.reward_tasks.discard(task)
        if task.cancelled():
            return
        if error := task.exception():
            self.fail(error)
        elif len(self.feedback) == len(self.prompts) and not self.finished.done():
            self.finished.set_result(None)

    @property
    def rollout_id(self) -> str:
        return f"{self.prompts.mode.name}/{self.prompts.step}/{self.prompts.first_group}"


class SyncRolloutActor:
    """Owns datasets and tokenizer; runs one rollout at a time. To be hosted by an asyncio actor."""

    def __init__(
        self,
        *,
        cfg: Config,
        engines: Sequence[ActorHandle],
        environments: Sequence[ActorHandle],
        data_plane: DataPlaneSpec,
        run_directory: str,
    ) -> None:
        self._cfg = cfg
        self._recorder = _recorder(cfg, Path(run_directory)) if cfg.rollout.record else None
        self._engines = list(engines)
        self._environments = list(environments)
        self._tokenizer = Tokenizer(cfg.policy.model_name)
        self._datasets = {
            RolloutMode.training: build_dataset(cfg.data.train, split="train"),
            RolloutMode.validation: build_dataset(cfg.data.validation, split="validation"),
        }
        self._data_plane: DataPlane = connect(data_plane)
        self._active: _ActiveRollout | None = None
        self._sink: ActorHandle | None = None
        self._sample_answers: list[SampleAnswer] = []

    def attach(self, own_handle: ActorHandle) -> dict[RolloutMode, int]:
        """Learn the handle the engines shall call back; returns the number of prompts per dataset."""
        self._sink = own_handle
        return {mode: len(dataset) for mode, dataset in self._datasets.items()}

    async def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        """Generate, reward, flatten and put; rows ordered by (prompt, generation).

        Raises RuntimeError when a rollout is already running or an engine reports an error, and
        TimeoutError, naming the missing prompts, when cluster.stage_timeout_s passes.
        """
        active = self._start(prompts)
        try:
            with span("generation"):
                await asyncio.gather(*self._submit_requests(active))
                await asyncio.wait_for(active.finished, timeout=self._cfg.cluster.stage_timeout_s)
        except TimeoutError:
            missing = [i for i in range(len(prompts)) if i not in active.feedback]
            raise TimeoutError(
                f"rollout of step {prompts.step}: no finished group for prompts {missing}"
            ) from None
        finally:
            self._active = None
            for task in set(active.reward_tasks):
                task.cancel()
        rewarded_s = time.monotonic()
        with span("flatten"):
            flat = self._flatten(active)
        batch = await self._put(flat, partition)
        metrics = _length_metrics(batch)
        if prompts.mode is RolloutMode.validation:
            self._keep_sample_answers(active)
        elif self._recorder is not None:
            await asyncio.to_thread(self._recorder.write, prompts, flat, metrics)
        return RolloutResult(
            batch=batch,
            metrics=metrics,
            generation_s=active.last_group_s - active.started_s,
            reward_s=rewarded_s - active.last_group_s,
            put_s=time.monotonic() - rewarded_s,
            operations=self._data_plane.take_operations(),
        )

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        """Called by an engine with the groups that just finished."""
        active = self._active
        if active is None:
            return
        try:
            self._accept(active, results)
        except Exception as error:
            # The engine does not wait for an answer: the rollout has to know.
            active.fail(error)

    def _accept(self, active: _ActiveRollout, results: Sequence[GroupResult]) -> None:
        """Keep the groups of this rollout and start rewarding them."""
        positions = []
        for result in results:
            rollout_id, _, position = result.request_id.rpartition("/")
            if rollout_id == active.rollout_id:
                active.check_version(result)
                active.groups[int(position)] = result
                positions.append(int(position))
        if len(active.groups) == len(active.prompts):
            active.last_group_s = time.monotonic()
        if positions:
            task = asyncio.get_running_loop().create_task(self._reward(active, positions))
            task.add_done_callback(active.on_rewarded)
            active.reward_tasks.add(task)

    def on_engine_error(self, engine: str, message: str) -> None:
        """Called by an engine whose step thread failed."""
        if self._active is not None:
            self._active.fail(RuntimeError(f"generation engine {engine!r} failed: {message}"))

    async def discard(self, batches: Sequence[KVBatchMeta]) -> None:
        """Free the bytes of samples that will not train."""
        for batch in batches:
            await asyncio.to_thread(self._data_plane.clear, batch)

    def sample_answers(self) -> list[SampleAnswer]:
        """A few answers of the latest validation, for a person to read."""
        return self._sample_answers

    def _start(self, prompts: PromptBatch) -> _ActiveRollout:
        if self._active is not None:
            raise RuntimeError(f"rollout of step {self._active.prompts.step} is still running")
        dataset = self._datasets[prompts.mode]
        examples = [dataset[index] for index in prompts.indices]
        self._active = _ActiveRollout(
            prompts=prompts,
            examples=examples,
            prompt_ids=[tuple(self._tokenizer.encode_prompt(example.prompt)) for example in examples],
            finished=asyncio.get_running_loop().create_future(),
            started_s=time.monotonic(),
        )
        return self._active

    def _submit_requests(self, active: _ActiveRollout) -> list[Call]:
        """Deal the prompts round robin, one call per engine."""
        prompts = active.prompts
        requests = [
            GroupRequest(
                request_id=f"{active.rollout_id}/{position}",
                prompt_ids=prompt_ids,
                seeds=response_seeds(
                    self._cfg.grpo.seed,
                    prompts.mode,
                    prompts.step,
                    prompts.first_group + position,
                    prompts.num_generations,
                ),
            )
            for position, prompt_ids in enumerate(active.prompt_ids)
        ]
        sampling = self._sampling(prompts.mode)
        num_engines = len(self._engines)
        return [
            engine.submit("submit", requests[i::num_engines], sampling, self._sink)
            for i, engine in enumerate(self._engines)
            if requests[i::num_engines]
        ]

    def _sampling(self, mode: RolloutMode) -> SamplingSettings:
        generation = self._cfg.generation
        is_training = mode is RolloutMode.training
        return SamplingSettings(
            temperature=generation.temperature if is_training else self._cfg.grpo.val_temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=(self._tokenizer.eos_token_id,),
        )

    async def _reward(self, active: _ActiveRollout, positions: Sequence[int]) -> None:
        """Reward finished groups in one environment call; the last one resolves the rollout."""
        turns = [
            self._turn(active.examples[position], response)
            for position in positions
            for response in active.groups[position].responses
        ]
        environment = self._environments[positions[0] % len(self._environments)]
        feedback = await environment.submit("step", turns)
        size = active.prompts.num_generations
        for i, position in enumerate(positions):
            active.feedback[position] = feedback[i * size : (i + 1) * size]

    def _turn(self, example: PromptExample, response: Response) -> Turn:
        return Turn(
            prompt=example.prompt,
            response=self._tokenizer.decode(response.token_ids),
            answer=example.answer,
            is_truncated=response.is_truncated,
            data=example.data,
        )

    def _flatten(self, active: _ActiveRollout) -> FlatBatch:
        order = range(len(active.prompts))
        flat = flatten(
            prompts=active.prompt_ids,
            groups=[active.groups[i] for i in order],
            rewards=[[feedback.reward for feedback in active.feedback[i]] for i in order],
            first_group=active.prompts.first_group,
        )
        components = [feedback.rewards for i in order for feedback in active.feedback[i]]
        flat.tags.update(component_tags(self._cfg.grpo.adv_estimator.reward_weights, components))
        return flat

    async def _put(self, flat: FlatBatch, partition: str) -> KVBatchMeta:
        with span("put"):
            return await asyncio.to_thread(
                self._data_plane.put,
                partition,
                flat.columns,
                lengths=flat.lengths,
                chunk_sizes=flat.chunk_sizes,
                tags=flat.tags,
            )

    def _keep_sample_answers(self, active: _ActiveRollout) -> None:
        self._sample_answers = [
            SampleAnswer(
                prompt=_as_text(example.prompt),
                response=self._tokenizer.decode(active.groups[i].responses[0].token_ids),
                answer=example.answer,
                reward=active.feedback[i][0].reward or 0.0,
            )
            for i, example in enumerate(active.examples[: self._cfg.logger.num_sample_answers])
        ]


def _recorder(cfg: Config, run_directory: Path) -> RolloutRecorder:
    manifest = RecordingManifest(
        num_prompts_per_step=cfg.grpo.num_prompts_per_step,
        num_generations_per_prompt=cfg.grpo.num_generations_per_prompt,
    )
    return RolloutRecorder(run_directory / "recorded", manifest)


def _as_text(prompt: Prompt) -> str:
    """What a person reads: of a conversation, the last message."""
    return prompt if isinstance(prompt, str) else prompt[-1].content


def _length_metrics(batch: KVBatchMeta) -> dict[str, Metric]:
    """Names of the reference list, without prefix."""
    num_samples = len(batch)
    num_prompt, num_response = (
        sum(batch.numbers("num_prompt_tokens")),
        sum(batch.numbers("num_response_tokens")),
    )
    num_truncated = sum(batch.numbers("is_truncated"))
    return {
        "mean_prompt_length": mean(num_prompt, num_samples),
        "mean_gen_tokens_per_sample": mean(num_response, num_samples),
        "max_gen_tokens_per_sample": maximum(max(batch.numbers("num_response_tokens"))),
        "total_num_tokens": summed(num_prompt + num_response),
        "truncation_rate": mean(num_truncated, num_samples),
        "natural_termination_rate": mean(num_samples - num_truncated, num_samples),
        "num_failed_rewards": summed(num_samples - sum(batch.numbers("sample_mask"))),
    }
