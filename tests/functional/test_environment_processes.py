"""Real processes: a bad reward costs one sample."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from nemo_like.environments.interface import FailureKind, Turn
from nemo_like.environments.server import EnvironmentServer
from tests.unit.environments.configs import env_config

TIMEOUT_S = 1.0
MODULE = "tests.functional.misbehaving"


def turn(response):
    return Turn(prompt="", response=response, answer="", is_truncated=False)


def server(target="Misbehaving", timeout_s=TIMEOUT_S, **arguments):
    options = {"target": f"{MODULE}:{target}", "arguments": arguments}
    return EnvironmentServer(
        "sums", env_config("custom", timeout_s=timeout_s, max_concurrency=4, options=options)
    )


def run(use, **options):
    """What ``use(server)`` returns; the server's process is ended."""

    async def used():
        shared = server(**options)
        try:
            return await asyncio.wait_for(use(shared), 60 * TIMEOUT_S)
        finally:
            await shared.close()

    return asyncio.run(used())


def ask(*responses, **options):
    return run(lambda shared: shared.step([turn(r) for r in responses]), **options)


def test_the_environment_is_the_one_that_the_config_names():
    turns = [Turn(prompt="21+43=", response=r, answer="640", is_truncated=False) for r in ("640", "641")]
    feedback = asyncio.run(EnvironmentServer("sums", env_config("arithmetic")).step(turns))
    assert [item.reward for item in feedback] == [1.0, 0.0]


def test_columns_that_do_not_fit_or_cannot_travel_fail_their_own_sample():
    async def use(shared):
        columns = await shared.columns()
        responses = ("good", "unreadable", "undeclared", "too long", "good")
        turns = [replace(turn(response), response_ids=(1, 2)) for response in responses]
        return columns, await shared.step(turns)

    columns, feedback = run(use, target="Columns", timeout_s=4.0)
    assert [column.name for column in columns] == ["notes", "credit"]
    assert [item.reward for item in feedback] == [1.0, None, None, None, 1.0]
    assert feedback[0].columns["notes"] == ["good"]
    assert feedback[0].columns["credit"].tolist() == [0.5, 0.5]
    unreadable, undeclared, too_long = (item.failure for item in feedback[1:4])
    assert unreadable.kind is FailureKind.raised
    assert "invalid literal for int()" in unreadable.reason
    assert (undeclared.kind, too_long.kind) == (FailureKind.malformed, FailureKind.malformed)
    assert "column 'credit' has shape [3], where [2] is declared for 2 tokens" in too_long.reason


def test_every_kind_of_failure_fails_its_own_sample_with_its_reason_and_no_other():
    # Long enough for the processes that have to be started again within it.
    feedback = ask("good", "raise", "wait", "block", "kill", "exit", "nan", "inf", "good", timeout_s=4.0)
    assert [item.reward for item in feedback] == [1.0, *[None] * 7, 1.0]
    failures = [(item.failure.kind, item.failure.reason) for item in feedback if item.failure]
    assert failures == [
        (FailureKind.raised, "the reward raised KeyError: 'no such answer'"),
        (FailureKind.timed_out, "the reward took longer than env.sums.timeout_s=4 s"),
        (FailureKind.timed_out, "the reward took longer than env.sums.timeout_s=4 s"),
        (FailureKind.died, "the reward ended its process (signal SIGKILL)"),
        (FailureKind.died, "the reward ended its process (exit code 3)"),
        (FailureKind.not_finite, "the reward 'score' is nan"),
        (FailureKind.not_finite, "the reward 'score' is inf"),
    ]


def test_a_call_with_too_many_hanging_rewards_gives_up_on_the_rest_in_time():
    failures = [item.failure for item in ask(*["block"] * 200)]
    assert {failure.kind for failure in failures} == {FailureKind.timed_out}
    assert failures[-1].reason == "not judged: the rewards before it took too long, or hung"


def test_a_call_beside_a_blocking_one_is_answered_all_the_same():
    async def both(shared):
        slow = asyncio.create_task(shared.step([turn("block")]))
        quick = asyncio.create_task(shared.step([turn("good"), turn("good")]))
        return await slow, await quick

    slow, quick = run(both)
    assert slow[0].reward is None
    assert [item.reward for item in quick] == [1.0, 1.0]


@pytest.mark.parametrize("before", ["block", "kill"])
def test_the_server_works_on_after_a_process_was_lost(before):
    async def twice(shared):
        await shared.step([turn(before)])
        return await shared.step([turn("good")])

    assert run(twice)[0].reward == 1.0


def test_processes_of_bad_rewards_are_gone_once_their_call_is_answered():
    others = psutil.Process().children()

    async def children(shared):
        await shared.step([turn(r) for r in ("block", "good", "kill", "raise")])
        started = [child for child in psutil.Process().children() if child not in others]
        alive = [child for child in started if child.status() != psutil.STATUS_ZOMBIE]
        return await asyncio.to_thread(psutil.wait_procs, alive, 5.0)

    _, alive = run(children)
    assert alive == []


def test_a_malformed_answer_costs_its_own_sample_in_the_batch_that_it_is_in():
    feedback = ask(
        *("good", "no feedback", "none", "metric", "surrogate", "unpicklable", "numpy", "good"),
        target="Malformed",
        timeout_s=20.0,
    )
    assert [item.reward for item in feedback] == [1.0, *[None] * 5, 0.5, 1.0]
    failures = [(item.failure.kind, item.failure.reason) for item in feedback if item.failure]
    assert failures[:4] == [
        (FailureKind.malformed, "the environment gave 1.0, not a Feedback"),
        (
            FailureKind.abstained,
            "the reward is None (a), so nothing judged the sample; a function without a return statement "
            "returns None too",
        ),
        (FailureKind.malformed, "the metric 'seen' is 'twice', not a number"),
        (FailureKind.malformed, r"the observation is '\udc80', which UTF-8 cannot encode"),
    ]
    assert failures[4][0] is FailureKind.raised
    assert "pickle" in failures[4][1]


def test_what_a_conversation_keeps_need_be_readable_by_the_environment_alone():
    async def two_turns(shared):
        first, second = await shared.step([turn("unreadable"), turn("good")])
        # The rollout gives it back as it came.
        later = replace(turn("good"), state=first.state)
        return second, *await shared.step([later, turn("good")])

    first, unreadable, beside = run(two_turns, target="Malformed", timeout_s=20.0)
    assert (first.reward, beside.reward) == (1.0, 1.0)
    assert unreadable.failure is not None
    assert "ValueError" in unreadable.failure.reason


@pytest.mark.parametrize("how", ["closed", "killed", "relay killed"])
@pytest.mark.parametrize("start", ["session", "orphan"])
def test_whatever_a_reward_started_ends_with_its_process(start, how):
    async def started(shared):
        (feedback,) = await shared.step([turn(start)])
        process = psutil.Process(int(feedback.reward))
        assert process.is_running()
        if how == "killed":
            await shared.step([turn("kill")])
        elif how == "relay killed":
            # Ray does so with the children of an actor that it ends; its own end closes the descriptors.
            (relay,) = [child for child in psutil.Process().children() if child.pid == os.getsid(child.pid)]
            relay.kill()
        await shared.close()
        return await asyncio.to_thread(psutil.wait_procs, [process], 10.0)

    gone, alive = run(started, target="Parental", timeout_s=20.0)
    assert (len(gone), alive) == (1, [])


def test_a_killed_server_takes_everything_that_its_rewards_started_along():
    code = (
        "import asyncio, sys\n"
        "from tests.functional.test_environment_processes import server, turn\n"
        "async def main():\n"
        "    shared = server('Parental', 20.0)\n"
        "    answers = await shared.step([turn('session'), turn('orphan')])\n"
        "    print(*(int(item.reward) for item in answers), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        below = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.communicate(timeout=20)
    assert len(started) == 2
    assert set(started) <= set(below)
    _, alive = psutil.wait_procs(below, 10.0)
    assert alive == []


def test_what_a_reward_reads_from_standard_input_is_nothing_and_takes_no_call_away():
    read, after = ask("read", "good", target="Parental", timeout_s=20.0)
    assert (read.reward, after.reward) == (0.0, 1.0)


def test_what_a_reward_prints_does_not_disturb_its_answers():
    assert [item.reward for item in ask("print", "good")] == [1.0, 1.0]


def test_a_wrong_number_of_answers_is_settled_turn_by_turn():
    assert [item.reward for item in ask("a", "b", "c", target="Forgetful")] == [1.0, 1.0, 1.0]


def test_no_turns_give_no_feedback():
    assert ask() == []


def test_arguments_reach_the_environment():
    assert ask("good", score=0.25)[0].reward == 0.25


def test_an_environment_that_cannot_be_built_is_an_error_at_the_start():
    with pytest.raises(RuntimeError, match="kind=custom: OSError: no licence file"):
        run(EnvironmentServer.start, target="Unbuildable")


def test_an_import_path_that_leads_nowhere_is_an_error_at_the_start():
    with pytest.raises(RuntimeError, match=r"kind=custom: ValueError: .* has no 'Missing'"):
        run(EnvironmentServer.start, target="Missing")
