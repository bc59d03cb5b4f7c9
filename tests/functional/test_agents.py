"""Agents with real clients against the endpoint, an engine, and the processes in which environments run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.cluster.actors import ActorSpec, Concurrency
from nemo_like.cluster.cluster import Cluster
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.shared_options import Credit
from nemo_like.generation.environment import engine_environment
from nemo_like.policy.options import Device
from tests.functional.agent_host import POLICY_VERSION
from tests.functional.generation_fixtures import AS_IN_TRAINING, TIMEOUT_S, engine_spec
from tests.functional.runs import ROOT
from tests.functional.tool_models import calling_model

# The first test also waits for the engine, and for the clients' modules.
pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]

MAX_LENGTH = 8192
HARNESSES = "tests.functional.harnesses"


def environment(agent: str | None = None, *, max_failed_share: float = 1.0, **options: Any) -> EnvConfig:
    """The environment of a harness, or of a command, with a few options of its own."""
    return EnvConfig(
        kind="agent",
        options={
            "agent": None if agent is None else f"{HARNESSES}:{agent}",
            "arguments": {},
            "command": [],
            "variables": {},
            "credit": Credit.session,
            "tool_parser": "hermes",
            "tool_choice": "auto",
            "max_calls": 32,
            "timeout_s": 120.0,
            "memory_mib": 2048,
            "max_processes": 64,
            "max_output_kib": 64,
            "sandbox": "required",
            "readable_paths": [],
            **options,
        },
        num_actors=1,
        max_concurrency=512,
        batch_size=1,
        timeout_s=options.get("timeout_s", 120.0) + 30,
        max_failed_share=max_failed_share,
        check_at_start=False,
        max_turns=1,
        observation_role="user",
        max_conversation_tokens=None,
        sampling=AS_IN_TRAINING,
        validation_sampling=AS_IN_TRAINING,
    )


class Host:
    """An engine with a log, and the actor that has agents call it."""

    def __init__(self, cluster: Cluster, checkpoint: str) -> None:
        self._cluster, self.checkpoint = cluster, checkpoint
        spec = engine_spec(
            Path(checkpoint),
            "logged",
            "tests.functional.agent_engine:LoggingEngine",
            tokenizer_name=checkpoint,
            structured_outputs=True,
            max_length=MAX_LENGTH,
        )
        self._engine = cluster.start(spec)
        self._host = cluster.start(
            ActorSpec(
                name="agent-host",
                target="tests.functional.agent_host:AgentHost",
                kwargs={"checkpoint": checkpoint, "max_length": MAX_LENGTH},
                concurrency=Concurrency.asyncio,
                env=engine_environment(Device.cpu),
            )
        )
        self._call(self._engine, "stats")
        self._call(self._host, "attach", self._host, [self._engine])

    def play(self, *arguments: Any) -> list[dict[str, Any]]:
        """``AgentHost.play``."""
        played: list[dict[str, Any]] = self._call(self._host, "play", *arguments)
        return played

    def play_named(self, agent: str, prompt: str, num_generations: int = 1) -> list[dict[str, Any]]:
        """Play an agent of those that share one process."""
        return self.play(environment("named"), [prompt], num_generations, agent)

    def play_side_by_side(self, *arguments: tuple[Any, ...]) -> list[list[dict[str, Any]]]:
        """``AgentHost.play`` with each of these, at the same time."""
        calls = [self._host.submit("play", *one) for one in arguments]
        played: list[list[dict[str, Any]]] = self._cluster.gather(calls, stage="test", timeout_s=TIMEOUT_S)
        return played

    def memory_mib(self) -> float:
        """Of the host and of the processes in which agents run."""
        return float(self._call(self._host, "memory_mib"))

    def take_log(self) -> list[dict[str, Any]]:
        """What the engine read and sampled since the last call."""
        log: list[dict[str, Any]] = self._call(self._engine, "take_log")
        return log

    def close(self) -> None:
        self._call(self._host, "close")

    def _call(self, actor: Any, method: str, *arguments: Any) -> Any:
        call = actor.submit(method, *arguments)
        return self._cluster.gather([call], stage="test", timeout_s=TIMEOUT_S)[0]


@pytest.fixture(scope="module")
def host(ray_of_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    cluster = Cluster()
    try:
        host = Host(cluster, calling_model(tmp_path_factory.mktemp("agents") / "model"))
        yield host
        host.close()
    finally:
        cluster.stop()


def trained_tokens(played: list[dict[str, Any]]) -> list[int]:
    """All tokens that train, of all branches."""
    branches = [one for session in played for one in session["branches"]]
    return [
        token
        for branch in branches
        for token, trains in zip(branch["ids"], branch["mask"], strict=True)
        if trains
    ]


def chosen_tokens(log: list[dict[str, Any]]) -> list[int]:
    """All tokens that the engine sampled, but for those that a grammar forced."""
    found: list[int] = []
    for entry in log:
        for ids, ranks in zip(entry["responses"], entry["ranks"], strict=True):
            first = np.asarray(ranks).reshape(len(ids), -1)[:, 0]
            found += [token for token, rank in zip(ids, first.tolist(), strict=True) if rank != 0]
    return found


@pytest.mark.parametrize(
    ("agent", "num_calls", "num_branches"),
    [
        ("openai_sync", 4, 2),
        ("openai_async", 5, 4),
        ("openai_streaming", 3, 2),
        ("anthropic_messages", 2, 1),
        ("smolagents_tools", None, None),
        ("mini_swe_agent", None, None),
    ],
)
def test_an_unchanged_client_completes_an_episode_and_the_branches_hold_what_the_engine_sampled(
    host: Host, agent: str, num_calls: int | None, num_branches: int | None
) -> None:
    host.take_log()
    (session,) = host.play_named(agent, "12+34+56")
    log = host.take_log()
    assert session["failure"] is None, session["reason"]
    assert session["policy_version"] == POLICY_VERSION
    assert session["metrics"]["num_calls"] == num_calls or num_calls is None
    assert len(session["branches"]) == num_branches or num_branches is None
    # Each generated token trains once, and none is another than the engine's.
    assert sorted(trained_tokens([session])) == sorted(chosen_tokens(log))
    sampled = [[*entry["prompt"], *ids] for entry in log for ids in entry["responses"]]
    for branch in session["branches"]:
        assert branch["ids"] in sampled  # the last call of a branch has all of it, byte for byte
    for ids in sampled:
        assert any(branch["ids"][: len(ids)] == ids for branch in session["branches"])


def test_recorded_logprobs_are_those_of_the_checkpoint_without_any_mask(host: Host) -> None:
    (session,) = host.play_named("openai_sync", "21+43+65")
    model = AutoModelForCausalLM.from_pretrained(host.checkpoint)
    branch = session["branches"][0]
    with torch.no_grad():
        logprobs = model(torch.tensor([branch["ids"]])).logits[0].log_softmax(-1)
    ids, mask = torch.tensor(branch["ids"]), torch.tensor(branch["mask"])
    expected = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    gaps = (expected - torch.tensor(branch["logprobs"])[1:])[mask[1:]]
    assert gaps.abs().max() < 2e-5
    assert 0 < int(mask.sum()) < len(ids)


def test_a_compaction_and_two_sub_agents_are_branches_in_which_each_token_trains_once(host: Host) -> None:
    host.take_log()
    (session,) = host.play_named("compacting", "12+34+56")
    log = host.take_log()
    assert session["metrics"] == {"num_calls": 10, "num_branches": 4, "unsaid_share": 0}
    assert sorted(trained_tokens([session])) == sorted(chosen_tokens(log))
    assert [sum(branch["mask"]) > 0 for branch in session["branches"]] == [True] * 4


@pytest.mark.parametrize(("credit", "num_trained"), [("session", 4), ("last", 1)])
def test_credit_says_which_branches_train(host: Host, credit: str, num_trained: int) -> None:
    (session,) = host.play(environment("named", credit=Credit[credit]), ["21+43+65"], 1, "compacting")
    assert session["metrics"]["num_branches"] == 4
    assert len(session["branches"]) == num_trained


def test_a_reward_can_be_reported_to_the_endpoint(host: Host) -> None:
    (session,) = host.play_named("reporting", "12+34+56")
    assert session["rewards"] == {"right": 0.5, "short": 0.25}


def test_the_methods_of_a_class_are_tools(host: Host) -> None:
    (session,) = host.play(
        environment("Adder", tool_choice="required", arguments={"bonus": 0.5}), ["12+34+56"]
    )
    assert session["failure"] is None, session["reason"]
    assert session["reward"] >= 2.5  # two calls of the tool, and the bonus
    assert session["metrics"]["num_branches"] == 1


def test_the_samples_of_a_group_differ_and_a_second_run_is_the_same(host: Host) -> None:
    def branches() -> list[Any]:
        return [one["branches"] for one in host.play_named("openai_sync", "12+34+56", 4)]

    first = branches()
    assert len({str(one) for one in first}) == 4
    assert branches() == first


MISBEHAVING_COMMANDS = {
    "crash": ("raised", "the command broke"),
    "flood": ("flooded", "64 KiB"),
    "hang": ("timed_out", "timeout_s"),
    "nonsense": ("malformed", "a good reward"),
    "memory": ("raised", "MemoryError"),
}


@pytest.fixture(scope="module")
def mishaps(host: Host) -> dict[str, list[dict[str, Any]]]:
    """What became of agents and commands that misbehave, side by side, since several wait for a deadline."""
    misbehaving = environment("misbehaving", timeout_s=20.0, max_calls=8, arguments={"late_s": 1.0})
    plays = {
        "misbehaving": (misbehaving, ["12+34+56"] * 10),
        "crashing": (environment("crashing", timeout_s=20.0), ["12+34+56"] * 2),
        "stuck": (environment("stuck", timeout_s=15.0), ["12+34+56"] * 2),
        "commands": (
            command(*MISBEHAVING_COMMANDS, timeout_s=20.0),
            ["12+34+56"] * len(MISBEHAVING_COMMANDS),
        ),
    }
    return dict(zip(plays, host.play_side_by_side(*plays.values()), strict=True))


def test_each_way_to_misbehave_is_named_and_costs_its_own_sample(
    mishaps: dict[str, list[dict[str, Any]]],
) -> None:
    played = mishaps["misbehaving"]
    assert [one["failure"] for one in played] == [
        *("raised", "timed_out", "raised", "flooded", "malformed", "malformed", "not_finite"),
        *(None, None, None),
    ]
    assert "the harness broke" in played[0]["reason"]
    assert "max_calls=8 calls; then: the agent raised PermissionDeniedError" in played[3]["reason"]
    assert "no call" in played[4]["reason"]
    assert "after it had ended" in played[5]["reason"]
    assert [*played[7]["rewards"].values()] == [403]
    assert played[7]["metrics"]["num_calls"] == 1


def test_a_crash_costs_its_own_sample_and_a_thread_that_hangs_its_own(
    mishaps: dict[str, list[dict[str, Any]]],
) -> None:
    assert [one["failure"] for one in mishaps["crashing"]] == [None, "died"]
    assert [one["failure"] for one in mishaps["stuck"]] == ["timed_out", None]


def test_a_command_runs_in_a_sandbox_whose_only_network_is_the_endpoint(host: Host) -> None:
    (session,) = host.play(command(), ["12+34+56"])
    assert session["failure"] is None, session["reason"]
    assert session["rewards"] == {"files": 1.0, "uid": 1.0, "others": 0.0, "refused": 1.0}
    assert session["metrics"] == {"num_calls": 2, "num_branches": 1, "unsaid_share": 0}


@pytest.mark.parametrize("how", MISBEHAVING_COMMANDS)
def test_a_command_that_misbehaves_is_named(mishaps: dict[str, list[dict[str, Any]]], how: str) -> None:
    failure, reason = MISBEHAVING_COMMANDS[how]
    session = mishaps["commands"][list(MISBEHAVING_COMMANDS).index(how)]
    assert session["failure"] == failure
    assert reason in session["reason"]


@pytest.mark.slow
def test_hundreds_of_sessions_at_once_end_and_leave_memory_as_it_was(host: Host) -> None:
    sessions = (environment("calculator_loop", max_calls=4), ["12+34+56"] * 32, 8)
    commands = (command(timeout_s=240.0), ["12+34+56"] * 32)
    memory = []
    for _ in range(5):
        functions, programs = host.play_side_by_side(sessions, commands)
        assert len(functions) == 256
        assert len(programs) == 32
        assert {one["failure"] for one in (*functions, *programs)} == {None}
        memory.append(host.memory_mib())
    # The first step loads what later ones use.
    assert memory[-1] < 1.05 * memory[1], memory


def command(*ways: str, **options: Any) -> EnvConfig:
    """The environment of a program that needs nothing but Python's own library, and behaves in these ways by
    the place of the problem."""
    source = (ROOT / "tests/functional/programs/agent_command.txt").read_text()
    python = os.path.realpath(sys.executable)
    return environment(None, command=[python, "-c", source, *ways], **options)
