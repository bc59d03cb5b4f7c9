"""What the endpoint answers to requests that no client of these APIs sends by itself, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import pytest

from nemo_like.algorithms.message_flags import NO_FLAG, MessageFlag
from nemo_like.data.interface import Message
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.environments.interface import UNSAID_SHARE, Failure, FailureKind, Feedback
from nemo_like.rollout.agents import agent_endpoint
from nemo_like.rollout.agents.agent_work import RequestWork
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.response_form import ResponseForm
from scripts.demo_model.tool_tokenizer import TEMPLATE, save_tokenizer
from tests.unit.rollout.agent_server import MAX_LENGTH, Server, serving

T = TypeVar("T")

USER = {"role": "user", "content": "1+2?"}
CHAT = {"messages": [USER]}
DEEP = b"[" * 100_000 + b"]" * 100_000
LONG = "1" * (MAX_LENGTH + 1)  # a token each


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer(folder)


def with_template(folder: Path, template: str) -> Tokenizer:
    save_tokenizer(folder)
    (folder / "own.jinja").write_text(template)
    return Tokenizer(folder, folder / "own.jinja")


def served(tokenizer: Tokenizer, scenario: Callable[[Server], Awaitable[T]]) -> T:
    async def run() -> T:
        async with serving(tokenizer) as server:
            return await scenario(server)

    return asyncio.run(run())


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    called = {"id": "1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "1", "content": "3"}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [called]}, result]}


# The path, and what no request may have.
BAD: dict[str, tuple[str, Any]] = {
    "deep JSON": ("chat/completions", b'{"messages": ' + DEEP + b"}"),
    "deeper than is allowed": ("chat/completions", b'{"metadata": ' + b"[" * 300 + b"]" * 300 + b"}"),
    "deep arguments": ("chat/completions", calling(DEEP.decode())),
    "deeper arguments than are allowed": (
        "chat/completions",
        calling('{"a": ' + "[" * 300 + "]" * 300 + "}"),
    ),
    "a negative token": ("completions", {"prompt": [1, -1]}),
    "a token that there is not": ("completions", {"prompt": [1, 128]}),
    "a huge token": ("completions", {"prompt": [10**30]}),
    "truth as a token": ("completions", {"prompt": [True]}),
    "half a pair": ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "half a pair in a text prompt": ("completions", b'{"prompt": "\\ud800"}'),
    "half a pair in UTF-8": ("completions", b'{"prompt": "\xed\xa0\x80"}'),
    "half a pair in arguments": ("chat/completions", calling('{"a": "\\ud800"}')),
    "other encodings": ("completions", '{"prompt": "1"}'.encode("utf-16")),
    "text for the template": ("chat/completions", {**CHAT, "chat_template_kwargs": "x"}),
    "another template": ("chat/completions", {**CHAT, "chat_template_kwargs": {"chat_template": "x"}}),
    "text as options of a stream": ("chat/completions", {**CHAT, "stream": True, "stream_options": "x"}),
    "such options for a text": ("completions", {"prompt": "1", "stream": True, "stream_options": [1]}),
    "a number of calls": ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": 5}, USER]}),
    "the name of a call": (
        "chat/completions",
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": [], "arguments": ""}}]},
                USER,
            ]
        },
    ),
    "many ends": ("chat/completions", {**CHAT, "stop": ["x"] * 1000}),
    "OpenAI's former tools": ("chat/completions", {**CHAT, "functions": [{"name": "add"}]}),
    "what follows a text": ("completions", {"prompt": "1", "suffix": "2"}),
    "a number of tools": ("messages", {"messages": [USER], "tools": 5}),
    "a list as a choice": ("messages", {"messages": [USER], "tools": [{}], "tool_choice": {"type": []}}),
    "a list as input of a tool": (
        "messages",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "add", "input": [1]}]}]},
    ),
    "tools of a server": ("messages", {"messages": [USER], "mcp_servers": [{"url": "x"}]}),
    "a list as an id": ("responses", {"input": "1", "previous_response_id": []}),
    "text for the form of a text": ("responses", {"input": "1", "text": "x"}),
    "text for that form itself": ("responses", {"input": "1", "text": {"format": "x"}}),
    "a number of tools of responses": ("responses", {"input": "1", "tools": 5}),
    "a number as reasoning": ("responses", {"input": [{"type": "reasoning", "content": 5}, USER]}),
    "a stored conversation": ("responses", {"input": "1", "conversation": "conv_1"}),
    "a stored prompt": ("responses", {"input": "1", "prompt": {"id": "pmpt_1"}}),
    "an answer for later": ("responses", {"input": "1", "background": True}),
    "a list as a reward": ("reward", {"reward": [1]}),
    "half a pair as a name": ("reward", b'{"reward": {"\\ud800": 1}}'),
    "a list as a body": ("chat/completions", b"[1]"),
}


def test_bad_requests_are_the_clients_mistake_and_say_what_is_wrong(tokenizer: Tokenizer) -> None:
    async def scenario(server: Server) -> dict[str, httpx.Response]:
        session = server.open(max_calls=1000)
        return {name: await server.post(session, *sent) for name, sent in BAD.items()}

    answers = served(tokenizer, scenario)
    assert {name: one.status_code for name, one in answers.items()} == dict.fromkeys(BAD, 400)
    assert all(one.json()["error"]["message"] for one in answers.values())
    assert "'chat_template'" in answers["another template"].json()["error"]["message"]
    assert "previous_response_id" in answers["a stored conversation"].json()["error"]["message"]


def test_a_template_gets_the_variables_that_it_reads_and_no_other(tmp_path: Path) -> None:
    """Among the others are those that transformers takes, and those of the tokenizer."""
    read = (
        "{{ style }}{{ bos_token }}{{ range(1) }}{% set own = 1 %}{{ own }}{% generation %}{{ x }}"
        "{% endgeneration %}{{ tokenize }}{{ documents }}"
    )
    tokenizer = with_template(tmp_path, read + TEMPLATE)

    async def scenario(server: Server) -> list[httpx.Response]:
        session = server.open()
        names = ("style", "x", "own", "bos_token", "range", "messages", "tools", "tokenize", "documents", "z")
        return [
            await server.post(session, "chat/completions", {**CHAT, "chat_template_kwargs": {name: "brief"}})
            for name in names
        ]

    answers = served(tokenizer, scenario)
    assert [one.status_code for one in answers] == [200, 200, *[400] * 8]
    assert "'z'" in answers[-1].json()["error"]["message"]
    assert "it takes style, x" in answers[-1].json()["error"]["message"]


def test_a_large_request_holds_up_no_call_of_another_session(tokenizer: Tokenizer) -> None:
    """Each piece of its work waits until another session's call is answered; the loop does none of it."""
    num_messages = 100_000
    num_others, num_calls, most_calls = 0, 0, 0

    def count_call(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    async def watch_loop() -> None:
        """Count the functions that the loop's thread calls and leaves before others have their turn."""
        nonlocal num_calls, most_calls
        sys.setprofile(count_call)
        try:
            while True:
                num_calls = 0
                await asyncio.sleep(0.005)
                most_calls = max(most_calls, num_calls)
        finally:
            sys.setprofile(None)

    async def scenario(server: Server) -> list[httpx.Response]:
        bodies = (
            {**CHAT, "metadata": [[]] * 1_000_000},
            {"messages": [{"role": "user", "content": "1"}] * num_messages},
            {"messages": [{"role": "user", "content": "1 " * 4_000_000}]},
        )
        others, loop = server.open(max_calls=10**6), asyncio.get_running_loop()
        work, run = server.agents._work, server.agents._work.run

        async def call() -> None:
            nonlocal num_others
            (await server.post(others, "chat/completions", CHAT)).raise_for_status()
            num_others += 1

        async def held(num_bytes: int, function: Callable[..., Any], *arguments: Any) -> Any:
            def do() -> Any:
                if num_bytes > 1 << 20:
                    asyncio.run_coroutine_threadsafe(call(), loop).result(timeout=30)
                return function(*arguments)

            return await run(num_bytes, do)

        work.run = held
        watch = asyncio.create_task(watch_loop())
        contents = [json.dumps(body).encode() for body in bodies]
        answers = [await server.post(server.open(), "chat/completions", content) for content in contents]
        watch.cancel()
        return answers

    answers = served(tokenizer, scenario)
    assert [one.status_code for one in answers] == [200, 400, 400]
    assert num_others >= 2 * len(answers)  # each is parsed, and then read
    assert 0 < most_calls < num_messages  # a look at each message takes one at least


def test_what_takes_too_long_to_render_is_refused_and_leaves_its_thread(tmp_path: Path) -> None:
    inner = "{% for other in messages %}{% if other.role == 'x' %}{% endif %}{% endfor %}"
    loops = f"{{% for one in messages %}}{inner}{{% endfor %}}"
    tokenizer = with_template(tmp_path, loops + TEMPLATE)
    many = {"messages": [{"role": "user", "content": ""}] * MAX_LENGTH}

    async def scenario(server: Server) -> list[httpx.Response]:
        server.agents._work._max_cpu_s = 0.1
        slow, other = server.open(), server.open()
        answers = [await server.post(slow, "chat/completions", many) for _ in range(2)]
        return [*answers, await server.post(other, "chat/completions", CHAT)]

    answers = served(tokenizer, scenario)
    assert [one.status_code for one in answers] == [400, 400, 200]
    assert "takes more than 0.1 s of a processor's time" in answers[0].json()["error"]["message"]


def test_small_work_does_not_wait_for_large_work() -> None:
    async def scenario() -> None:
        work, is_free = RequestWork(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def waits() -> str:
            asyncio.run_coroutine_threadsafe(is_free.wait(), loop).result(timeout=30)
            return "large"

        large = asyncio.create_task(work.run(2**30, waits))
        assert await work.run(10, lambda: "small") == "small"
        assert not large.done()
        is_free.set()
        assert await large == "large"
        work.close()

    asyncio.run(scenario())


def test_connections_on_which_no_request_comes_are_closed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_endpoint, "_KEEP_ALIVE_S", 0.4)
    monkeypatch.setattr(agent_endpoint, "_MAX_SILENCE_S", 0.4)

    async def scenario(server: Server) -> list[bytes]:
        url, key = urlsplit(server.base_url), server.open().key
        head = f"POST /v1/reward HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
        body = '{"reward": 1}'
        whole = f"{head}content-length: {len(body)}\r\n\r\n{body}"
        # Nothing; a header that does not end; the same after an answer; a body that does not end.
        beginnings = ("", head, f"{whole}GET / HT", f"{head}content-length: 100\r\n\r\nx")

        async def answer(sent: str) -> bytes:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(sent.encode())
            try:
                async with asyncio.timeout(10):
                    return await reader.read()
            finally:
                writer.close()

        return await asyncio.gather(*map(answer, beginnings))

    nothing, no_header, after_answer, no_body = served(tokenizer, scenario)
    assert (nothing, no_header) == (b"", b"")
    assert after_answer.startswith(b"HTTP/1.1 200")
    assert no_body.startswith(b"HTTP/1.1 408")


def test_a_call_that_takes_longer_than_a_connection_may_be_silent_is_answered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_endpoint, "_KEEP_ALIVE_S", 0.2)

    async def scenario(server: Server) -> httpx.Response:
        submit = server.engine.submit

        async def late(*args: Any) -> None:
            await asyncio.sleep(1)
            await submit(*args)

        server.engine.submit = late  # type: ignore[method-assign]
        return await server.post(server.open(), "chat/completions", CHAT)

    assert served(tokenizer, scenario).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": LONG}]},
            {
                "message": "This model's maximum context length is 1000 tokens. However, your messages "
                "resulted in 1006 tokens. Please reduce the length of the messages.",
                "type": "invalid_request_error",
                "param": "messages",
                "code": "context_length_exceeded",
            },
        ),
        (
            "completions",
            {"prompt": LONG},
            {
                "message": "This model's maximum context length is 1000 tokens. However, your prompt "
                "resulted in 1001 tokens. Please reduce the length of the prompt.",
                "type": "invalid_request_error",
                "param": "prompt",
                "code": "context_length_exceeded",
            },
        ),
        (
            "responses",
            {"input": LONG},
            {
                "message": "Your input exceeds the context window of this model. This model's maximum "
                "context length is 1000 tokens. However, your input resulted in 1006 tokens. Please reduce "
                "the length of the input.",
                "type": "invalid_request_error",
                "param": "input",
                "code": "context_length_exceeded",
            },
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5},
            {"type": "invalid_request_error", "message": "prompt is too long: 1006 tokens > 999 maximum"},
        ),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_each_api(
    tokenizer: Tokenizer, path: str, body: Any, error: dict[str, Any]
) -> None:
    async def scenario(server: Server) -> httpx.Response:
        return await server.post(server.open(), path, body)

    answer = served(tokenizer, scenario)
    assert (answer.status_code, answer.json()["error"]) == (400, error)


def test_a_text_that_no_tokens_could_hold_is_refused_before_it_is_rendered(tokenizer: Tokenizer) -> None:
    async def scenario(server: Server) -> list[httpx.Response]:
        session = server.open()
        # The longest token of this tokenizer is 43 characters long.
        long = {"role": "user", "content": "x" * 44 * MAX_LENGTH}
        thought = {"role": "assistant", "content": f"<think>{'x' * 44 * MAX_LENGTH}</think>3"}
        server.agents._endpoint._answerer._prompts.encode = None  # type: ignore[assignment, method-assign]
        refused = await server.post(session, "chat/completions", {"messages": [long]})
        thoughtful = await server.post(session, "chat/completions", {"messages": [USER, thought, USER]})
        return [refused, thoughtful]

    refused, thoughtful = served(tokenizer, scenario)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert (
        "'NoneType' object is not callable" in thoughtful.json()["error"]["message"]
    )  # it was to be encoded


def test_a_call_too_many_is_refused_for_good_and_floods_the_sample_of_an_agent_that_raises(
    tokenizer: Tokenizer,
) -> None:
    statuses: list[int] = []

    async def agent(base_url: str, api_key: str) -> Feedback:
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            for _ in range(3):
                answer = await client.post("/chat/completions", headers={"x-api-key": api_key}, json=CHAT)
                statuses.append(answer.status_code)
        return Feedback.failed(FailureKind.raised, "the agent raised PermissionDeniedError")

    sample = served(tokenizer, lambda server: server.play(agent, max_calls=2))
    assert statuses == [200, 200, 403]
    assert sample.failure == Failure(
        FailureKind.flooded,
        "the agent made more than max_calls=2 calls; then: the agent raised PermissionDeniedError",
    )


@pytest.mark.parametrize("ends", [Feedback(), Feedback.failed(FailureKind.raised, "it raised")])
def test_a_first_prompt_that_is_too_long_is_said_to_be_that(tokenizer: Tokenizer, ends: Feedback) -> None:
    async def agent(base_url: str, api_key: str) -> Feedback:
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            headers = {"x-api-key": api_key}
            await client.post("/completions", headers=headers, json={"prompt": LONG})
        return ends

    failure = served(tokenizer, lambda server: server.play(agent)).failure
    assert failure is not None
    assert failure.kind is FailureKind.flooded
    assert "first call was refused: the prompt has 1001 tokens" in failure.reason


FOREIGN = {"messages": [USER, {"role": "assistant", "content": "It is 3"}, USER]}


@pytest.mark.parametrize(
    ("bodies", "prompt", "share"),
    [
        ([FOREIGN], "p", 1.0),
        ([CHAT, FOREIGN], "p", 0.0),  # an edited history is no sign of a cache
        ([CHAT], "p", 0.0),
        ([{"messages": [USER, {"role": "assistant", "content": "It is"}]}], "p", 0.0),  # begun for the policy
        ([FOREIGN], (Message("user", "1+2?"), Message("assistant", "It is 3"), Message("user", "?")), 0.0),
    ],
)
def test_a_session_that_begins_with_what_the_policy_never_said_is_noticed(
    tokenizer: Tokenizer, bodies: list[Any], prompt: Any, share: float
) -> None:
    async def agent(base_url: str, api_key: str) -> Feedback:
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            for body in bodies:
                answer = await client.post("/chat/completions", headers={"x-api-key": api_key}, json=body)
                answer.raise_for_status()
        return Feedback({"reward": 1.0})

    sample = served(tokenizer, lambda server: server.play(agent, prompt=prompt))
    assert sample.failure is None
    assert sample.metric_sums[UNSAID_SHARE] == share


def test_tokens_of_a_prompt_are_counted_and_count_as_no_call(tokenizer: Tokenizer) -> None:
    async def scenario(server: Server) -> list[httpx.Response]:
        session = server.open(max_calls=1)
        body = {"messages": [USER], "system": "be brief"}
        counts = [await server.post(session, "messages/count_tokens", body) for _ in range(3)]
        counts.append(await server.post(session, "v1/messages/count_tokens", body))
        return [*counts, await server.post(session, "messages", {**body, "max_tokens": 5})]

    *counts, said = served(tokenizer, scenario)
    assert [one.json() for one in counts] == [{"input_tokens": len("# be brief\n? 1+2?\n> ")}] * 4
    assert said.json()["usage"]["input_tokens"] == len("# be brief\n? 1+2?\n> ")


def test_a_model_of_any_name_is_the_policy(tokenizer: Tokenizer) -> None:
    async def scenario(server: Server) -> list[httpx.Response]:
        return [await server.http.get(f"/models{name}") for name in ("", "/policy", "/openai/policy")]

    listed, own, other = (one.json() for one in served(tokenizer, scenario))
    assert listed["data"] == [own]
    assert (own["id"], own["object"], own["type"]) == ("policy", "model", "model")
    assert other == {**own, "id": "openai/policy", "display_name": "openai/policy"}


def test_a_stream_is_the_same_answer(tokenizer: Tokenizer) -> None:
    async def scenario(server: Server) -> httpx.Response:
        return await server.post(server.open(), "chat/completions", {**CHAT, "stream": True})

    answer = served(tokenizer, scenario)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last, end = answer.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    told = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
    assert "".join(one["delta"].get("content", "") for one in told) == "yes"
    assert told[-1]["finish_reason"] == "stop"


def test_a_call_that_could_not_be_read_is_flagged_on_the_tokens_of_its_response(tokenizer: Tokenizer) -> None:
    form = ResponseForm(MessageFlag.invalid_tool_call, NO_FLAG, ["<tool>"], ["<think>", "</think>"])

    async def scenario() -> Conversation:
        async with serving(tokenizer, form) as server:

            async def agent(base_url: str, api_key: str) -> Feedback:
                messages = [USER]
                async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
                    for server.engine.text in ("<tool> add", "3"):
                        headers = {"x-api-key": api_key}
                        body = {"messages": messages}
                        answer = await client.post("/chat/completions", headers=headers, json=body)
                        messages = [*messages, answer.json()["choices"][0]["message"], USER]
                return Feedback({"reward": 1.0})

            return await server.play(agent)

    sample = asyncio.run(scenario())
    flagged, _, plain = sample.passages
    assert flagged.columns["message_flags"].tolist() == [1] * len(flagged.token_ids)
    assert "message_flags" not in plain.columns
    assert sample.metric_sums["invalid_tool_call_share"] == 1.0
    assert sample.metric_counts["invalid_tool_call_share"] == 2.0
