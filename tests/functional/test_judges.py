"""Generative judges: a real vLLM server, and servers that answer in other ways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_like.environments.interface import FailureKind, Feedback
from nemo_like.environments.server import EnvironmentServer
from tests.functional.judge_servers import KEY, MODEL, JudgeServer, judge_server
from tests.functional.test_environment_services import serving
from tests.unit.environments.asking import ask, turn
from tests.unit.environments.configs import env_config

pytestmark = pytest.mark.timeout(600)

VARIABLE = "KEY_OF_THE_JUDGE"
# What the tiny model says is random, but for its form.
SCORE = {"score_pattern": "score=(.)", "max_score": 9.0, "max_tokens": 12}
SCORED = {**SCORE, "extra_body": {"structured_outputs": {"regex": "score=[0-9]"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeServer]:
    with judge_server(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


def options(server: JudgeServer, **others: Any) -> dict[str, Any]:
    there = {"base_url": f"{server.url}/v1", "model": MODEL, "api_key_variable": VARIABLE}
    return {**there, "request_timeout_s": 60.0, **others}


def failure_of(feedback: Feedback) -> tuple[FailureKind, str]:
    assert feedback.failure is not None
    return feedback.failure.kind, feedback.failure.reason


@pytest.mark.usefixtures("key")
def test_verdicts_of_a_served_model_become_rewards_in_order(server: JudgeServer) -> None:
    turns = [turn(text, "46", prompt="12+34=") for text in ("46", "", "h\u00e9llo \u2603", "47", "46")]
    feedback = ask("judge", *turns, **options(server, **SCORED))
    assert [one.failure for one in feedback] == [None] * len(turns)
    assert all(one.reward in {score / 9 for score in range(10)} for one in feedback)
    assert feedback[0] == feedback[-1]  # the likeliest verdict on the same question
    assert ask("judge", turns[0], **options(server, **SCORED)) == [feedback[0]]


@pytest.mark.usefixtures("key")
def test_a_verdict_that_cannot_be_read_fails_its_sample_or_earns_the_default(server: JudgeServer) -> None:
    unreadable = {**SCORE, "extra_body": {"structured_outputs": {"choice": ["no idea"]}}}
    (failed,) = ask("judge", turn("46", "46"), **options(server, **unreadable))
    kind, reason = failure_of(failed)
    assert kind is FailureKind.malformed
    assert reason.endswith("options.score_pattern=score=(.) finds nothing in it; it ends with 'no idea'")
    (default,) = ask("judge", turn("46", "46"), **options(server, **unreadable, default_reward=0.25))
    assert (default.rewards, default.metrics) == ({"judge": 0.25}, {"has_verdict": 0.0})


@pytest.mark.usefixtures("key")
def test_a_question_longer_than_the_judge_reads_costs_its_sample_alone(server: JudgeServer) -> None:
    asked = options(server, **SCORED, default_reward=0.0)
    good, long = ask("judge", turn("46", "46"), turn("x" * 5000, "46"), **asked)
    assert good.failure is None
    kind, reason = failure_of(long)
    assert kind is FailureKind.unreachable
    assert f"the judge {MODEL} at {server.url}/v1 gave BadRequestError: Error code: 400" in reason
    assert "maximum context length is 1024 tokens" in reason


@pytest.mark.usefixtures("key")
def test_a_pair_is_judged_in_both_orders(server: JudgeServer) -> None:
    def preferred(verdict: str) -> Feedback:
        forced = {"choice": [f"answer {verdict}"]}
        asked = {"verdict_pattern": "answer (.)", "extra_body": {"structured_outputs": forced}}
        (feedback,) = ask("preference", turn("46", "64", prompt="q"), **options(server, **asked))
        return feedback

    # Whichever answer is named first wins: each answer wins one of two comparisons.
    for always in ("a", "b"):
        assert preferred(always).rewards == {"judge": 0.5}
        assert preferred(always).metrics == {"has_verdict": 1.0, "is_consistent": 0.0}
    assert preferred("c").metrics == {"has_verdict": 1.0, "is_consistent": 1.0}
    assert preferred("c").rewards == {"judge": 0.5}


def test_a_pair_is_won_by_the_better_answer() -> None:
    def answer(body: Any) -> tuple[int, Any]:
        first, second = json.loads(body["messages"][0]["content"])
        verdict = "A" if len(first) > len(second) else "B" if len(first) < len(second) else "C"
        return 200, {"choices": [{"message": {"role": "assistant", "content": f"[[{verdict}]]"}}]}

    turns = [turn("long", "s"), turn("s", "long"), turn("s", "t")]
    asked = {"prompt": '["{first}", "{second}"]', "model": "m"}
    with serving(answer) as url:
        feedback = ask("preference", *turns, base_url=url, **asked)
    assert [one.reward for one in feedback] == [1.0, 0.0, 0.5]
    assert [one.metrics["is_consistent"] for one in feedback] == [1.0, 1.0, 1.0]


def test_a_wrong_key_is_told_but_never_shown(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sk-wrong")
    (refused,) = ask("judge", turn("46"), **options(server, **SCORED))
    kind, reason = failure_of(refused)
    assert kind is FailureKind.unreachable
    assert "AuthenticationError: Error code: 401" in reason
    with serving(lambda body: (401, {"error": {"message": "no such key: sk-wrong"}})) as url:
        (repeated,) = ask("judge", turn("46"), base_url=url, model=MODEL, api_key_variable=VARIABLE)
    assert "no such key: ***" in failure_of(repeated)[1]
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match=f"options.api_key_variable={VARIABLE} is no environment variable"):
        ask("judge", turn("46"), **options(server))


@pytest.mark.parametrize(
    ("status", "content", "kind", "reason"),
    [
        (200, {"choices": []}, FailureKind.malformed, "gave no chat completion"),
        (200, {"feedback": [1.0]}, FailureKind.malformed, "gave no chat completion"),
        (200, [], FailureKind.malformed, "gave no chat completion"),
        (200, b"{half of it", FailureKind.malformed, f"the judge {MODEL} at http"),
        (200, b"{half of it", FailureKind.malformed, "gave no JSON: "),
        (
            200,
            {"choices": [{"message": {"content": None}, "finish_reason": "length"}]},
            FailureKind.malformed,
            "gave a verdict without text (finish_reason=length)",
        ),
        (404, {"error": "no such model"}, FailureKind.unreachable, "gave NotFoundError: Error code: 404"),
        (503, {}, FailureKind.unreachable, "gave InternalServerError: Error code: 503"),
    ],
)
def test_a_server_that_answers_otherwise_fails_the_sample(
    status: int, content: Any, kind: FailureKind, reason: str
) -> None:
    with serving(lambda body: (status, content)) as url:
        (feedback,) = ask("judge", turn("46"), base_url=url, model=MODEL, max_attempts=1)
    failed, why = failure_of(feedback)
    assert failed is kind
    assert reason in why


def test_an_overloaded_judge_is_asked_again() -> None:
    good = {"choices": [{"message": {"content": "score: 10"}}]}
    answers = iter([(503, {}), (429, {}), (200, good)])
    with serving(lambda body: next(answers)) as url:
        (feedback,) = ask("judge", turn("46"), base_url=url, model=MODEL)
    assert feedback.reward == 1.0
    assert list(answers) == []


@pytest.mark.usefixtures("key")
def test_a_judge_that_hangs_or_dies_fails_its_samples_and_is_used_again(server: JudgeServer) -> None:
    """The last test of the server, which it ends. Its deadline is kept by the requests: a call of the
    environment that were late itself would say ``timed_out``."""
    asked = options(server, **{**SCORED, "max_attempts": 2, "request_timeout_s": 2.0})
    cfg = env_config("judge", options=asked, timeout_s=100.0)
    turns = [turn("46", "46"), turn("47", "46")]

    async def use() -> list[list[Feedback]]:
        environment = EnvironmentServer("judge", cfg)
        try:
            before = await environment.step(turns)
            with server.stopped():
                hung = await environment.step(turns)
            again = await environment.step(turns)
            server.end()
            return [before, hung, again, await environment.step(turns)]
        finally:
            await environment.close()

    ask("judge", *turns, **options(server, **SCORED))  # the first request may take longer than the deadline
    before, hung, again, dead = asyncio.run(use())
    assert [one.failure for one in before + again] == [None] * 4
    assert before == again
    for feedback, reason in ((hung, "Timeout"), (dead, "APIConnectionError")):
        for kind, why in map(failure_of, feedback):
            assert kind is FailureKind.unreachable
            assert reason in why
