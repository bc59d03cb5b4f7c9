"""``SyncRolloutActor``: takes prompts, puts their samples into the data plane, and returns the metadata.

    prompts ──▶ conversations ──▶ turn loop (engines and environments, by callback)
                                      │
                                      ▼
                    all have ended: flatten ──▶ one put ──▶ data plane

Nothing polls: engines call back, and the last reward resolves a future, for which the rollout waits with a
deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nemo_like.batch.columns import INPUT_IDS, MESSAGES, ROLLOUT_COLUMNS, Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import ANSWER_ID, SAMPLE_DIGEST, TASK
from nemo_like.cluster.actors import ActorHandle
from nemo_like.config.derived import Stage, deadline_s
from nemo_like.config.recordings import RecordingManifest
from nemo_like.config.schema import Config, DatasetConfig, Tripwires
from nemo_like.config.tasks import (
    max_prompt_tokens,
    task_environments,
    training_sampling,
    training_tasks,
    validation_sampling,
)
from nemo_like.data.datasets import Sources, build_sources
from nemo_like.data.encoder import PromptEncoder
from nemo_like.data.interface import Encoded, PromptExample, Split
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.environments.interface import Failure, FailureKind
from nemo_like.environments.pool import EnvironmentPool
from nemo_like.environments.weighted_pool import weighted_pools
from nemo_like.generation.interface import GroupResult
from nemo_like.observability.metrics import Metric
from nemo_like.observability.summary import SampleAnswer
from nemo_like.observability.trace import span
from nemo_like.rollout.conversation import Conversation, Limits
from nemo_like.rollout.data_plane_user import DataPlaneUser
from nemo_like.rollout.dump import StepSamples
from nemo_like.rollout.dumped_tokens import fetch_scores
from nemo_like.rollout.environment_check import check_environments
from nemo_like.rollout.flatten import FlatBatch, flatten
from nemo_like.rollout.message_log import messages_of
from nemo_like.rollout.prompts import (
    FailedReward,
    ProblemPlace,
    PromptBatch,
    RolloutMode,
    RolloutParts,
    RolloutResult,
    problem_place,
    response_seeds,
)
from nemo_like.rollout.record_check import check_records
from nemo_like.rollout.recorder import RolloutRecorder
from nemo_like.rollout.rollout_columns import rollout_declarations, written_down
from nemo_like.rollout.rollout_metrics import rollout_metrics
from nemo_like.rollout.rollout_watch import measured_rollout
from nemo_like.rollout.sample_answers import sample_answer
from nemo_like.rollout.sample_tags import answer_ids, component_tags
from nemo_like.rollout.turn_loop import Judge, Task, TurnLoop
from nemo_like.tripwires.dues import is_due
from nemo_like.tripwires.sample_checks import sample_digests

_log = logging.getLogger(__name__)


class SyncRolloutActor(DataPlaneUser):
    """Owns datasets and tokenizer, and runs one rollout at a time; an asyncio actor hosts it."""

    def __init__(
        self,
        *,
        cfg: Config,
        engines: Sequence[ActorHandle],
        environments: Mapping[str, Sequence[ActorHandle]],
        data_plane: DataPlaneSpec,
        run_directory: str,
    ) -> None:
        """Read the datasets and check their records. ``environments`` has the actors of each environment."""
        self._cfg = cfg
        self._run_directory = Path(run_directory)
        self._recorder: RolloutRecorder | None = None
        self._columns: tuple[Column, ...] = ()  # what conversations bring besides log-probs
        self._engines = list(engines)
        self._pools = {name: EnvironmentPool(actors) for name, actors in environments.items() if actors}
        self._judges: dict[str, Judge] = {**self._pools, **weighted_pools(cfg.env, self._pools)}
        self._encoder = PromptEncoder(cfg.policy.model_name, cfg.data.chat_template, max_prompt_tokens(cfg))
        self._tokenizer = self._encoder.tokenizer
        self._samples = StepSamples(self._tokenizer.token_texts)
        self._sources = {
            RolloutMode.training: self._read(cfg.data.train, split="train"),
            RolloutMode.validation: self._read(cfg.data.validation, split="validation"),
        }
        super().__init__(data_plane)
        self._running = asyncio.Lock()
        self._num_abandoned = 0
        self._num_rollouts = 0  # for training
        self._loop: TurnLoop | None = None
        self._sink: ActorHandle | None = None
        self._sample_answers: list[SampleAnswer] = []

    async def attach(self, own_handle: ActorHandle) -> RolloutParts:
        """Take the handle that the engines shall call back, and ask the environments for their columns.

        Return what the datasets hold, and which columns the rollout writes. Raises RuntimeError when an
        environment does not start.
        """
        self._sink = own_handle
        await self._meet_environments()
        environments = {name: pool.columns for name, pool in self._pools.items()}
        declarations = rollout_declarations(self._cfg, environments)
        written = {column.name: column for part in declarations for column in part.writes}
        self._columns = tuple(column for column in written.values() if column not in ROLLOUT_COLUMNS)
        if self._cfg.rollout.record:
            self._recorder = _recorder(self._cfg, self._run_directory, written.values())
        sources = {mode: read.reports for mode, read in self._sources.items()}
        return RolloutParts(sources, declarations)

    async def check_environments(self) -> None:
        """Ask each environment with ``check_at_start`` about its first problem's reference answer.

        Raises EnvironmentCheckFailed when one gives no reward.
        """
        data = self._cfg.data
        sections = [(data.train, RolloutMode.training), (data.validation, RolloutMode.validation)]
        sources = [(section, self._sources[mode]) for section, mode in sections]
        await self._meet_environments()
        await check_environments(self._cfg, sources, self._judges, self._tokenizer.encode_prompt)

    async def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        """Generate, reward, flatten and put the samples of ``prompts``, in rows by (prompt, generation).

        Raises RuntimeError when a rollout is already running or an engine reports an error, and Overdue,
        naming the missing samples, when the deadline of the stage passes.
        """
        if self._running.locked():
            raise RuntimeError(f"a rollout is still running, so that of step {prompts.step} cannot start")
        async with self._running:
            return await self._run(prompts, partition)

    async def abandon(self) -> None:
        """Abandon the rollout that is under way, if there is one; return once it has ended."""
        self._num_abandoned += 1
        if self._loop is not None:
            self._loop.fail(RuntimeError("the rollout was given up"))
        async with self._running:
            self._data_plane.take_operations()

    def reconnect(
        self,
        engines: Sequence[ActorHandle],
        environments: Mapping[str, Sequence[ActorHandle]],
        data_plane: DataPlaneSpec,
    ) -> None:
        """Use these processes from now on, of which some may be new."""
        self._engines = list(engines)
        for name, pool in self._pools.items():
            pool.move_to(environments[name])
        self._move_to(data_plane)

    async def _run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        dataset = self._sources[prompts.mode].problems
        examples = [dataset[index] for index in prompts.indices]
        encoded = await asyncio.to_thread(self._encoder.encode, examples)
        self._loop = loop = self._turn_loop(prompts, examples, encoded)
        stage = Stage.generation if prompts.mode is RolloutMode.training else Stage.validation
        try:
            with span("generation"):
                await loop.run(self._engines, self._sink, deadline_s(self._cfg.cluster, stage))
        finally:
            self._loop = None
        ended_s = time.monotonic()
        failed = _failed_rewards(prompts, loop.groups)
        _log_failures(prompts, failed)
        if self._cfg.rollout.keep_messages:
            self._keep_messages(loop.groups)
        with span("flatten"):
            flat = self._flatten(prompts, loop.groups)
        batch = await self._put(flat, partition)
        metrics = rollout_metrics(loop.groups)
        if prompts.mode is RolloutMode.validation:
            self._keep_sample_answers(loop.groups)
            if self._cfg.rollout.dump_validation:
                await asyncio.to_thread(self._dump_validation, prompts, batch, loop.groups)
        else:
            if self._cfg.rollout.dump_period:
                self._samples.remember(prompts.step, batch, loop.groups, self._places(prompts), self._columns)
            if self._recorder is not None:
                await asyncio.to_thread(self._recorder.write, prompts, flat, metrics)
        return RolloutResult(
            batch=batch,
            metrics=metrics,
            generation_s=loop.generated_s - loop.started_s,
            reward_s=ended_s - loop.generated_s,
            put_s=time.monotonic() - ended_s,
            operations=self._data_plane.take_operations(),
            failed=list({(one.env, one.failure.kind): one for one in reversed(failed)}.values()),
            measured=self._measured(prompts, loop),
        )

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        """Take the groups that just finished; an engine calls this."""
        if self._loop is not None:
            self._loop.on_groups(results)

    def on_engine_error(self, engine: str, message: str) -> None:
        """Fail the rollout under way; an engine calls this when its step thread has failed."""
        if self._loop is not None:
            self._loop.fail(RuntimeError(f"generation engine {engine!r} failed: {message}"))

    async def dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        """Write ``rollouts/step_N.jsonl``: the conversations of the ledger's samples, with their tags and
        with what the trainer wrote of their tokens."""
        await asyncio.to_thread(self._dump, step, ledger)

    def sample_answers(self) -> list[SampleAnswer]:
        """Return a few answers of the latest validation, as text for people."""
        return self._sample_answers

    def _dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        scores = fetch_scores(self._data_plane, ledger)
        self._data_plane.take_operations()  # not reported: they are no part of a step that dumps nothing
        self._samples.write(self._rollouts_path / f"step_{step}.jsonl", step, ledger, scores)

    def _dump_validation(
        self, prompts: PromptBatch, batch: KVBatchMeta, groups: Sequence[Sequence[Conversation]]
    ) -> None:
        samples = StepSamples(self._tokenizer.token_texts)
        samples.remember(prompts.step, batch, groups, self._places(prompts), self._columns)
        samples.write(self._rollouts_path / f"validation_{prompts.step}.jsonl", prompts.step, [batch])

    @property
    def _rollouts_path(self) -> Path:
        return self._run_directory / "rollouts"

    def _places(self, prompts: PromptBatch) -> list[ProblemPlace]:
        reports = self._sources[prompts.mode].reports
        return [problem_place(index, reports) for index in prompts.indices]

    async def _meet_environments(self) -> None:
        await asyncio.gather(*(pool.meet() for pool in self._pools.values()))

    def _read(self, sources: Sequence[DatasetConfig], split: Split) -> Sources:
        read = build_sources(
            sources,
            split,
            prompt_lengths=self._encoder.lengths,
            max_prompt_tokens=max_prompt_tokens(self._cfg),
        )
        check_records(sources, read, self._encoder.lengths)
        return read

    def _turn_loop(
        self, prompts: PromptBatch, examples: Sequence[PromptExample], encoded: Sequence[Encoded]
    ) -> TurnLoop:
        groups = [
            self._conversations(prompts, position, example, prompt)
            for position, (example, prompt) in enumerate(zip(examples, encoded, strict=True))
        ]
        envs = {group[0].example.env for group in groups}
        # An engine may still deliver groups of an abandoned rollout: another id keeps them apart.
        again = [f"again-{self._num_abandoned}"] if self._num_abandoned else []
        place = [prompts.mode.name, str(prompts.step), str(prompts.first_group)]
        return TurnLoop(
            rollout_id="/".join([*place, *again]),
            groups=groups,
            tasks={env: self._task(prompts.mode, env) for env in envs},
            codec=self._encoder,
            policy_version=prompts.policy_version,
        )

    def _conversations(
        self, prompts: PromptBatch, position: int, example: PromptExample, prompt: Encoded
    ) -> list[Conversation]:
        """Begin the conversations of one prompt's samples, or end them where its images cannot be read."""
        env = self._cfg.env[example.env]
        limits = Limits(
            max_turns=env.max_turns,
            max_tokens=env.max_conversation_tokens or self._cfg.policy.max_total_sequence_length,
        )
        seeds = response_seeds(
            self._cfg.grpo.seed,
            prompts.mode,
            prompts.step,
            prompts.first_group + position,
            prompts.num_generations,
        )
        example = replace(example, columns={**example.columns, **prompt.columns})
        conversations = [
            Conversation(example, prompt.token_ids, position, generation, limits, seed, prompt.images)
            for generation, seed in enumerate(seeds)
        ]
        if prompt.failure is not None:
            for conversation in conversations:
                conversation.fail(Failure(FailureKind.bad_image, prompt.failure), prompts.policy_version)
        return conversations

    def _task(self, mode: RolloutMode, env: str) -> Task:
        cfg = self._cfg.env[env]
        resolved = training_sampling if mode is RolloutMode.training else validation_sampling
        return Task(
            judge=self._judges[env],
            sampling=replace(
                resolved(self._cfg, env).sampling, stop_token_ids=(self._tokenizer.eos_token_id,)
            ),
            max_turns=cfg.max_turns,
            batch_size=cfg.batch_size,
            observation_role=cfg.observation_role,
        )

    def _keep_messages(self, groups: Sequence[Sequence[Conversation]]) -> None:
        """Give each sample its conversation as a column; one that has no response has nothing to keep."""
        for sample in (sample for group in groups for sample in group if sample.passages):
            role = self._cfg.env[sample.example.env].observation_role
            sample.passages[-1].columns[MESSAGES.name] = messages_of(sample, role)

    def _flatten(self, prompts: PromptBatch, groups: Sequence[Sequence[Conversation]]) -> FlatBatch:
        flat = flatten(groups, self._columns, first_group=prompts.first_group)
        components = [
            sample.rewards if sample.failure is None else {} for group in groups for sample in group
        ]
        if prompts.mode is RolloutMode.validation:
            flat.tags[ANSWER_ID.name] = [
                number
                for group in groups
                for number in answer_ids([sample.latest_response for sample in group])
            ]
        if self._names_tasks(prompts):
            flat.tags[TASK.name] = [sample.example.env for group in groups for sample in group]
        if self._is_watched(prompts):
            flat.tags[SAMPLE_DIGEST.name] = sample_digests(
                np.asarray(flat.columns[INPUT_IDS.name]), flat.lengths
            )
        flat.tags.update(component_tags(self._cfg.grpo.adv_estimator.reward_weights, components))
        return flat

    def _names_tasks(self, prompts: PromptBatch) -> bool:
        """Return whether samples get the tag task: a teacher's models need it, also of a run that replays."""
        teacher = self._cfg.teacher
        is_read = self._cfg.rollout.record or (teacher is not None and bool(teacher.models))
        return is_read and prompts.mode is RolloutMode.training

    def _is_watched(self, prompts: PromptBatch) -> bool:
        return self._cfg.debug.tripwires is not Tripwires.off and prompts.mode is RolloutMode.training

    def _measured(self, prompts: PromptBatch, loop: TurnLoop) -> Mapping[str, Metric]:
        """Measure a training rollout for the tripwires, if it is one that they look at."""
        if prompts.mode is not RolloutMode.training:
            return {}
        self._num_rollouts += 1
        is_watched = is_due(self._num_rollouts, self._cfg.debug.tripwires)
        return measured_rollout(loop, self._ends()) if is_watched else {}

    def _ends(self) -> dict[str, int]:
        """Return the token that ends a response, of the environments without stop strings."""
        sampling = {env: training_sampling(self._cfg, env).sampling for env in task_environments(self._cfg)}
        return {env: self._tokenizer.eos_token_id for env, one in sampling.items() if not one.stop_strings}

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

    def _keep_sample_answers(self, groups: Sequence[Sequence[Conversation]]) -> None:
        count = self._cfg.logger.num_sample_answers
        apart = max(1, len(groups) // max(1, count))  # spread over all groups, so over validation sets
        self._sample_answers = [
            sample_answer(group[0], self._cfg.grpo.val_solved_reward) for group in groups[::apart][:count]
        ]


def _recorder(cfg: Config, run_directory: Path, columns: Iterable[Column]) -> RolloutRecorder:
    manifest = RecordingManifest(
        num_prompts_per_step=cfg.grpo.num_prompts_per_step,
        num_generations_per_prompt=cfg.grpo.num_generations_per_prompt,
        columns=written_down(columns),
        tasks=training_tasks(cfg),
    )
    return RolloutRecorder(run_directory / "recorded", manifest)


def _failed_rewards(prompts: PromptBatch, groups: Sequence[Sequence[Conversation]]) -> list[FailedReward]:
    """Return every sample without a reward, by (prompt, generation)."""
    return [
        FailedReward(sample.example.env, sample.failure, prompts.indices[sample.position], sample.generation)
        for group in groups
        for sample in group
        if sample.failure is not None
    ]


def _log_failures(prompts: PromptBatch, failed: Sequence[FailedReward]) -> None:
    """Log which samples have no reward, and why, to this process's log."""
    for one in failed:
        _log.warning(
            "%s step %d, prompt %d, sample %d, environment %s: %s",
            *(prompts.mode.name, prompts.step, one.prompt, one.generation, one.env, one.failure.reason),
        )
