"""``SyncRolloutActor``: takes prompts, puts their samples into the data plane, and returns the metadata.

    prompts ──▶ conversations ──▶ turn loop (engines and environments, by callback)
                                      │
                                      ▼
      all groups have ended, or some: flatten ──▶ one put ──▶ data plane

Nothing polls: engines call back, and the rollout waits for groups to end, with a deadline.
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
from nemo_like.batch.recordings import RecordingManifest
from nemo_like.batch.tags import ANSWER_ID, DIFFICULTY, MAX_RESPONSE_TOKENS, SAMPLE_DIGEST, TASK
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.breakdown import breaking_down, is_out_of_memory
from nemo_like.cluster.options import deadline_s
from nemo_like.cluster.placement import node_address
from nemo_like.data.datasets import Sources, build_sources
from nemo_like.data.encoder import PromptEncoder
from nemo_like.data.interface import Encoded, Split, TaskPrompt
from nemo_like.data.options import DatasetConfig
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.driver.options import asks_endpoint
from nemo_like.environments.environment_data import EnvironmentPrompts
from nemo_like.environments.interface import Failure, FailureKind
from nemo_like.environments.pool import EnvironmentPool
from nemo_like.environments.registry import call_pattern, kind_of, options_of
from nemo_like.environments.tool_pool import tool_pools
from nemo_like.environments.weighted_pool import weighted_pools
from nemo_like.generation.interface import GroupResult
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.observability.metrics import Metric
from nemo_like.observability.printable import printable
from nemo_like.observability.rollout_times import append_rollout_times
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import SampleAnswer
from nemo_like.observability.trace import span
from nemo_like.rollout.agents.agents import AgentPlayer, Agents
from nemo_like.rollout.begun_rollout import BegunRollout, EndedGroups
from nemo_like.rollout.conversation import Conversation, Limits
from nemo_like.rollout.data_plane_user import DataPlaneUser
from nemo_like.rollout.dump import StepSamples
from nemo_like.rollout.dumped_tokens import fetch_scores
from nemo_like.rollout.engine_load import EngineLoad
from nemo_like.rollout.excerpt import KeptGroups, excerpt_of
from nemo_like.rollout.flatten import FlatBatch, flatten
from nemo_like.rollout.message_log import messages_of
from nemo_like.rollout.options import dumps_rollouts_of
from nemo_like.rollout.prompts import (
    FailedReward,
    PromptBatch,
    PromptOrigin,
    RolloutMode,
    RolloutParts,
    RolloutResult,
    WantedGroups,
    prompt_origin,
    response_seeds,
)
from nemo_like.rollout.recorder import RolloutRecorder
from nemo_like.rollout.response_form import ResponseForm
from nemo_like.rollout.rollout_columns import rollout_declarations, written_down
from nemo_like.rollout.rollout_measures import measure_rollout
from nemo_like.rollout.rollout_metrics import continued_metrics, rollout_metrics, staleness_metrics
from nemo_like.rollout.sample_answers import sample_answer
from nemo_like.rollout.sample_tags import answer_ids, component_tags
from nemo_like.rollout.sample_times import times_of
from nemo_like.rollout.start_checks import check_environments, check_records
from nemo_like.rollout.tasks import (
    RolloutConfigGroups,
    has_agents,
    max_prompt_tokens,
    response_limit,
    session_limit,
    task_environments,
    training_sampling,
    training_tasks,
    used_environments,
    validation_sampling,
)
from nemo_like.rollout.token_allowance import TokenAllowance
from nemo_like.rollout.turn_loop import Judge, Task, TurnLoop
from nemo_like.tripwires.measured import is_due
from nemo_like.tripwires.options import Tripwires
from nemo_like.tripwires.sample_checks import sample_digests

_log = logging.getLogger(__name__)


class SyncRolloutActor(DataPlaneUser):
    """Owns the datasets and the tokenizer, and runs the rollouts under way; an asyncio actor hosts it."""

    def __init__(
        self,
        *,
        cfg: RolloutConfigGroups,
        engines: Sequence[ActorHandle],
        environments: Mapping[str, Sequence[ActorHandle]],
        data_plane: DataPlaneSpec,
        run_directory: str,
    ) -> None:
        """Read the datasets and check their records. ``environments`` has the actors of each environment by
        name."""
        self._cfg = cfg
        self._run_directory = Path(run_directory)
        self._recorder: RolloutRecorder | None = None
        self._columns: tuple[Column, ...] = ()  # columns of conversations besides tokens and log-probs
        self._engines = list(engines)
        self._pools = {
            name: EnvironmentPool(actors, keeps_episodes=kind_of(cfg.env[name]).is_hub)
            for name, actors in environments.items()
            if actors
        }
        self._judges: dict[str, Judge] = {**self._pools, **weighted_pools(cfg.env, self._pools)}
        self._judges |= tool_pools(cfg.env, self._judges)
        self._encoder = PromptEncoder(cfg.policy.model_name, cfg.data.chat_template, max_prompt_tokens(cfg))
        self._tokenizer = self._encoder.tokenizer
        self._samples = StepSamples(self._tokenizer.token_texts)
        self._sources = {
            RolloutMode.training: self._read(cfg.data.train, split="train"),
            RolloutMode.validation: self._read(cfg.data.validation, split="validation"),
        }
        super().__init__(data_plane)
        self._rollouts: dict[str, BegunRollout] = {}  # rollouts under way, by name
        self._load = EngineLoad()
        self._step = 0  # the latest step that began, with rollout.max_tokens_per_step
        self._num_abandoned = 0
        self._num_rollouts = 0  # for training
        self._sink: ActorHandle | None = None
        self._agents: Agents | None = None  # where the run has any
        self._form = ResponseForm.of(cfg.loss_fn, cfg.rollout)
        self._sample_answers: list[SampleAnswer] = []

    async def attach(self, own_handle: ActorHandle) -> RolloutParts:
        """Take the handle that the engines will call back, and ask the environments for their columns.

        Return the reports of the data sources, and the columns that the rollout writes. Raises RuntimeError
        when an environment does not start.
        """
        self._sink = own_handle
        await asyncio.gather(self._meet_environments(), self._start_agents())
        environments = {name: pool.columns for name, pool in self._pools.items()}
        declarations = rollout_declarations(self._cfg, environments)
        written = {column.name: column for part in declarations for column in part.writes}
        self._columns = tuple(column for column in written.values() if column not in ROLLOUT_COLUMNS)
        if self._cfg.rollout.record:
            self._recorder = _recorder(self._cfg, self._run_directory, written.values())
        sources = {mode: read.reports for mode, read in self._sources.items()}
        return RolloutParts(sources, declarations)

    async def check_environments(self) -> None:
        """Ask each environment with ``check_at_start`` about its first prompt's reference answer.

        Raises EnvironmentCheckFailed when one gives no reward.
        """
        data = self._cfg.data
        sections = [(data.train, RolloutMode.training), (data.validation, RolloutMode.validation)]
        sources = [(section, self._sources[mode]) for section, mode in sections]
        await self._meet_environments()
        await check_environments(self._cfg, sources, self._judges, self._tokenizer.encode_text)

    async def begin(self, prompts: PromptBatch, partition: str) -> None:
        """Begin the rollout of ``prompts``, whose samples will go into ``partition``.

        Raises RuntimeError while a rollout of the same step and groups is under way.
        """
        if prompts.name in self._rollouts:
            raise RuntimeError(f"the rollout {prompts.name} is still running, so it cannot begin again")
        rollout = self._rollouts[prompts.name] = BegunRollout(prompts, partition)
        with rollout.at_work():
            try:
                dataset = self._sources[prompts.mode].prompts
                task_prompts = [dataset[index] for index in prompts.indices]
                encoded = await asyncio.to_thread(self._encoder.encode, task_prompts)
                loop = self._turn_loop(prompts, task_prompts, encoded)
                rollout.start(loop, self._engines, self._sink, self._load)
            except Exception as error:
                rollout.fail(error)

    def begin_step(self, step: int) -> None:
        """Grant the samples of rollouts under way their tokens of ``step``
        (``rollout.max_tokens_per_step``)."""
        self._step = step
        for rollout in self._rollouts.values():
            rollout.begin_step(step)

    async def next_part(self, prompts: PromptBatch, wanted: WantedGroups) -> RolloutResult:
        """Wait until the wanted groups have ended; flatten and put them, ordered by (prompt, generation).

        Raises the error that failed the rollout: an error of ``begin``, RuntimeError when an engine reports
        an error, or Overdue, naming the missing samples, when the stage's deadline has passed since the first
        call for this rollout.
        """
        rollout = self._rollouts[prompts.name]
        timeout_s = deadline_s(self._cfg.cluster, prompts.mode.stage)
        is_over = True
        try:
            with rollout.at_work(), breaking_down(is_out_of_memory):
                part = await rollout.next_groups(wanted, timeout_s)
                is_over = part.is_last
                return await self._result(rollout, part)
        finally:
            if is_over:
                self._rollouts.pop(prompts.name, None)  # it may have been abandoned meanwhile

    async def abandon(self) -> None:
        """Abandon the rollouts that are under way; return once they have ended."""
        self._num_abandoned += 1
        error = RuntimeError("the rollout was given up")
        for rollout in self._rollouts.values():
            rollout.fail(error)
        if self._agents is not None:
            self._agents.fail(error)
        await asyncio.gather(*(rollout.ended() for rollout in [*self._rollouts.values()]))
        self._rollouts.clear()
        self._data_plane.take_operations()

    def reconnect(
        self,
        engines: Sequence[ActorHandle],
        environments: Mapping[str, Sequence[ActorHandle]],
        data_plane: DataPlaneSpec,
    ) -> None:
        """Use these processes from now on; some may be new."""
        self._engines = list(engines)
        if self._agents is not None:
            self._agents.move_to(self._engines)
        for name, pool in self._pools.items():
            pool.move_to(environments[name])
        self._move_to(data_plane)

    async def _result(self, rollout: BegunRollout, part: EndedGroups) -> RolloutResult:
        """Put the groups of a part into the data plane and return its result; the last part's also describes
        the whole rollout."""
        prompts, loop = rollout.prompts, rollout.loop
        ends_training = part.is_last and prompts.mode is RolloutMode.training
        groups, ended_s = [loop.groups[position] for position in part.positions], time.monotonic()
        failed = _failed_rewards(prompts, groups)
        _log_failures(prompts, failed)
        if self._cfg.rollout.keep_messages:
            self._keep_messages(groups)
        with span("flatten"):
            flat = self._flatten(prompts, groups)
        batch = await self._put(flat, rollout.partition)
        metrics = self._metrics(prompts, groups)
        kept = excerpt_of(prompts, self._cfg.rollout).of(batch, groups, part.positions)
        if prompts.mode is RolloutMode.validation:
            self._keep_sample_answers(groups)
            if kept.groups:
                await asyncio.to_thread(self._dump_validation, prompts, kept, len(batch))
        elif dumps_rollouts_of(prompts.step, self._cfg.rollout):
            self._remember(self._samples, prompts, kept)
        if ends_training and self._recorder is not None:
            whole = flat if part.is_whole else self._flatten(prompts, loop.groups)
            await asyncio.to_thread(self._recorder.write, prompts, whole, self._metrics(prompts, loop.groups))
        if ends_training and self._cfg.rollout.record_times:
            times = times_of(prompts, loop.groups, loop.started_s)
            await asyncio.to_thread(append_rollout_times, self._times_path, times)
        return RolloutResult(
            batch=batch,
            metrics=metrics,
            generation_s=loop.generated_s - loop.started_s if part.is_last else 0.0,
            reward_s=ended_s - loop.generated_s if part.is_last else 0.0,
            put_s=time.monotonic() - ended_s,
            operations=self._data_plane.take_operations(),
            failed=list({(one.env, one.failure.kind): one for one in reversed(failed)}.values()),
            measured=self._measured(prompts, loop) if part.is_last else {},
            engines=await self._load.metrics(self._engines) if ends_training else {},
            is_last=part.is_last,
        )

    def _metrics(self, prompts: PromptBatch, groups: Sequence[Sequence[Conversation]]) -> dict[str, Metric]:
        metrics = rollout_metrics(groups)
        if self._cfg.grpo.max_staleness and prompts.mode is RolloutMode.training:
            metrics |= staleness_metrics(groups, prompts.newest_version)
        if self._cfg.rollout.max_tokens_per_step and prompts.mode is RolloutMode.training:
            metrics |= continued_metrics(groups)
        return metrics

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        """Hand groups that have just finished to the rollouts, each of which picks out its own; an engine
        calls this."""
        for rollout in self._rollouts.values():
            rollout.on_groups(results)
        if self._agents is not None:
            self._agents.on_groups(results)

    def on_engine_error(self, engine: str, message: str) -> None:
        """Fail the rollouts under way; an engine calls this when its step thread has failed."""
        error = RuntimeError(f"generation engine {engine!r} failed: {message}")
        for rollout in self._rollouts.values():
            rollout.fail(error)
        if self._agents is not None:
            self._agents.fail(error)

    async def dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        """Write ``rollouts/step_N.jsonl``: the conversations of the ledger's samples, with their tags and the
        trainer's numbers for their tokens."""
        await asyncio.to_thread(self._dump, step, ledger)

    def sample_answers(self) -> list[SampleAnswer]:
        """Return a few answers of the latest validation, as text for people."""
        return self._sample_answers

    def _dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        kept = self._samples.remembered(step, ledger)
        scores = fetch_scores(self._data_plane, kept)
        self._data_plane.take_operations()  # not reported: they are no part of a step that dumps nothing
        path, num_samples = self._rollouts_path / f"step_{step}.jsonl", sum(map(len, ledger))
        self._samples.write(path, step, kept, scores, num_samples=num_samples)

    def _dump_validation(self, prompts: PromptBatch, kept: KeptGroups, num_samples: int) -> None:
        samples = StepSamples(self._tokenizer.token_texts)
        self._remember(samples, prompts, kept)
        path = self._rollouts_path / f"validation_{prompts.step}.jsonl"
        samples.write(path, prompts.step, [kept.batch], num_samples=num_samples)

    def _remember(self, samples: StepSamples, prompts: PromptBatch, kept: KeptGroups) -> None:
        origins = self._origins(prompts, kept.positions)
        samples.remember(prompts.step, kept.batch, kept.groups, origins, self._columns)

    @property
    def _times_path(self) -> Path:
        return RunDirectory(self._run_directory).rollout_times_path

    @property
    def _rollouts_path(self) -> Path:
        return self._run_directory / "rollouts"

    def _origins(self, prompts: PromptBatch, positions: Sequence[int]) -> list[PromptOrigin]:
        reports = self._sources[prompts.mode].reports
        return [prompt_origin(prompts.indices[position], reports) for position in positions]

    async def _meet_environments(self) -> None:
        await asyncio.gather(*(pool.meet() for pool in self._pools.values()))

    async def _start_agents(self) -> None:
        """Start the endpoint of the agents, if the run has any."""
        if not has_agents(self._cfg) or self._agents is not None:
            return
        envs = used_environments(self._cfg).values()
        options = [options_of(env) for env in envs if kind_of(env).calls_policy]
        self._agents = Agents(
            self._tokenizer,
            self._engines,
            self._sink,
            self._cfg.policy.max_total_sequence_length,
            self._form,
        )
        host = "127.0.0.1" if self._cfg.cluster.address is None else node_address()
        await self._agents.start(host, [one.tool_parser for one in options if one.tool_parser is not None])

    def _player(self, env: str, sampling: SamplingSettings) -> AgentPlayer | None:
        """Return the player of an agent environment, or None for another environment."""
        cfg = self._cfg.env[env]
        if not kind_of(cfg).calls_policy:
            return None
        assert self._agents is not None, "attach starts the agents"
        limit = session_limit(self._cfg)
        return AgentPlayer(self._agents, self._pools[env], options_of(cfg), sampling, limit)

    def _read(self, sources: Sequence[DatasetConfig], split: Split) -> Sources:
        read = build_sources(
            sources,
            split,
            prompt_lengths=self._encoder.lengths,
            max_prompt_tokens=max_prompt_tokens(self._cfg),
            environments=EnvironmentPrompts(self._cfg.env),
        )
        check_records(sources, read, self._encoder.lengths)
        return read

    def _turn_loop(
        self, prompts: PromptBatch, task_prompts: Sequence[TaskPrompt], encoded: Sequence[Encoded]
    ) -> TurnLoop:
        groups = [
            self._conversations(prompts, position, task_prompt, prompt)
            for position, (task_prompt, prompt) in enumerate(zip(task_prompts, encoded, strict=True))
        ]
        envs = {group[0].task_prompt.env for group in groups}
        # An engine may still deliver groups of an abandoned rollout: another id keeps them apart.
        again = f"/again-{self._num_abandoned}" if self._num_abandoned else ""
        return TurnLoop(
            rollout_id=f"{prompts.name}{again}",
            groups=groups,
            tasks={env: self._task(prompts.mode, env) for env in envs},
            codec=self._encoder,
            versions=range(prompts.policy_version, prompts.newest_version + 1),
            allowance=self._allowance(prompts),
        )

    def _allowance(self, prompts: PromptBatch) -> TokenAllowance:
        begun_in = prompts.step - prompts.num_steps_ahead
        limit = self._cfg.rollout.max_tokens_per_step
        allowance = TokenAllowance(limit, begun_in=begun_in, step=prompts.step)
        allowance.begin_step(self._step)  # a step may have begun while the prompts were encoded
        return allowance

    def _conversations(
        self, prompts: PromptBatch, position: int, task_prompt: TaskPrompt, prompt: Encoded
    ) -> list[Conversation]:
        """Begin the conversations of one prompt's samples; end them at once when an image of the prompt
        cannot be read."""
        env = self._cfg.env[task_prompt.env]
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
        task_prompt = replace(task_prompt, columns={**task_prompt.columns, **prompt.columns})
        conversations = [
            Conversation(task_prompt, prompt.token_ids, position, generation, limits, seed, prompt.images)
            for generation, seed in enumerate(seeds)
        ]
        if prompt.failure is not None:
            for conversation in conversations:
                conversation.fail(Failure(FailureKind.bad_image, prompt.failure), prompts.policy_version)
        return conversations

    def _task(self, mode: RolloutMode, env: str) -> Task:
        cfg = self._cfg.env[env]
        resolved = training_sampling if mode is RolloutMode.training else validation_sampling
        sampling = self._with_ends(resolved(self._cfg, env).sampling)
        return Task(
            judge=self._judges[env],
            sampling=sampling,
            player=self._player(env, sampling),
            max_turns=cfg.max_turns,
            batch_size=cfg.batch_size,
            observation_role=cfg.observation_role,
            is_said=asks_endpoint(self._cfg.evaluation),
            form=self._form,
            call_pattern=call_pattern(cfg),
        )

    def _with_ends(self, sampling: SamplingSettings) -> SamplingSettings:
        """Return the settings with the checkpoint's stop tokens added to the configured ones."""
        ends = dict.fromkeys((*self._tokenizer.end_token_ids, *sampling.stop_token_ids))
        return replace(sampling, stop_token_ids=tuple(ends))

    def _keep_messages(self, groups: Sequence[Sequence[Conversation]]) -> None:
        """Store each sample's conversation as a column; a sample without a response is left out."""
        for sample in (sample for group in groups for sample in group if sample.passages):
            role = self._cfg.env[sample.task_prompt.env].observation_role
            sample.passages[-1].columns[MESSAGES.name] = messages_of(sample, role)

    def _flatten(self, prompts: PromptBatch, groups: Sequence[Sequence[Conversation]]) -> FlatBatch:
        flat = flatten(groups, self._columns, first_group=prompts.first_group)
        components = [
            sample.rewards if sample.failure is None else {} for group in groups for sample in group
        ]
        tasks = [sample.task_prompt.env for group in groups for sample in group]
        if prompts.mode is RolloutMode.validation:
            flat.tags[ANSWER_ID.name] = [
                number
                for group in groups
                for number in answer_ids([sample.latest_response for sample in group])
            ]
        else:
            limits = {task: response_limit(self._cfg, task) for task in set(tasks)}
            flat.tags[MAX_RESPONSE_TOKENS.name] = [limits[task] for task in tasks]
        if self._cfg.evaluation is not None:
            flat.tags[DIFFICULTY.name] = [
                sample.task_prompt.difficulty for group in groups for sample in group
            ]
        if self._names_tasks(prompts):
            flat.tags[TASK.name] = tasks
        if self._cfg.debug.tripwires is not Tripwires.off and prompts.mode is RolloutMode.training:
            flat.tags[SAMPLE_DIGEST.name] = sample_digests(
                np.asarray(flat.columns[INPUT_IDS.name]), flat.lengths
            )
        flat.tags.update(component_tags(self._cfg.grpo.adv_estimator.reward_weights, components))
        return flat

    def _names_tasks(self, prompts: PromptBatch) -> bool:
        """Return whether samples get the tag task. An evaluation reports by task; a teacher with several
        models chooses by task, also in a replay of this run's recording."""
        if self._cfg.evaluation is not None:
            return True
        teacher = self._cfg.teacher
        is_read = self._cfg.rollout.record or (teacher is not None and bool(teacher.models))
        return is_read and prompts.mode is RolloutMode.training

    def _measured(self, prompts: PromptBatch, loop: TurnLoop) -> Mapping[str, Metric]:
        """Measure a rollout for the tripwires, if it is for training and a check of it is due."""
        if prompts.mode is not RolloutMode.training:
            return {}
        self._num_rollouts += 1
        is_watched = is_due(self._num_rollouts, self._cfg.debug.tripwires)
        return measure_rollout(loop, self._ends()) if is_watched else {}

    def _ends(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens that end a response, for each environment without stop strings. Agents are left
        out: they choose stop strings and limits for each call."""
        sampling = {env: training_sampling(self._cfg, env).sampling for env in task_environments(self._cfg)}
        return {
            env: self._with_ends(one).stop_token_ids
            for env, one in sampling.items()
            if not one.stop_strings and not kind_of(self._cfg.env[env]).calls_policy
        }

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


def _recorder(cfg: RolloutConfigGroups, run_directory: Path, columns: Iterable[Column]) -> RolloutRecorder:
    manifest = RecordingManifest(
        step_shape=cfg.grpo.step_shape,
        columns=written_down(columns),
        tasks=training_tasks(cfg),
    )
    return RolloutRecorder(run_directory / "recorded", manifest)


def _failed_rewards(prompts: PromptBatch, groups: Sequence[Sequence[Conversation]]) -> list[FailedReward]:
    """Return every sample without a reward, ordered by (prompt, generation)."""
    return [
        FailedReward(
            sample.task_prompt.env, sample.failure, prompts.indices[sample.position], sample.generation
        )
        for group in groups
        for sample in group
        if sample.failure is not None
    ]


def _log_failures(prompts: PromptBatch, failed: Sequence[FailedReward]) -> None:
    """Log which samples have no reward, and why, in this process's log."""
    for one in failed:
        _log.warning(
            "%s step %d, prompt %d, sample %d, environment %s: %s",
            *(prompts.mode.name, prompts.step, one.prompt, one.generation, one.env),
            printable(one.failure.reason),
        )
