"""Options that several kinds of environments have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar

from nemo_like.config.keys import Key
from nemo_like.policy.options import Device, Precision

# The field of a prompt's data from which a hub begins the episode.
EPISODE_KEY = "episode"


class SandboxMode(Enum):
    """Whether programs that are judged, or that judge, run in a sandbox.

    With ``required`` they do, and a run refuses to start when no sandbox can be made. With ``none`` they run
    without one, as the run's user.
    """

    required = "required"
    none = "none"


@dataclass(kw_only=True, slots=True)
class NoOptions:
    pass


@dataclass(kw_only=True, slots=True)
class MatchOptions:
    """The option of kinds that look for an answer in the response."""

    answer_pattern: Annotated[
        str | None,
        Key(
            "for example '<answer>(.*?)</answer>': group 1 of its last match is the answer; null: the whole "
            "response",
            None,
        ),
    ]


@dataclass(kw_only=True, slots=True)
class EndpointOptions:
    """A model behind an OpenAI-compatible API, and the question that it is asked.

    A question must contain ``needed_words`` in braces, and may contain ``other_words``.
    """

    needed_words: ClassVar[tuple[str, ...]]
    other_words: ClassVar[tuple[str, ...]]

    prompt: Annotated[
        str,
        Key(
            "What the judge is asked. {prompt}, {response} and {answer} (the reference "
            "answer) stand for the sample's.",
            (
                "Rate how well the response answers the question, from 0 (useless) to 10 (perfect).\n"
                "\n"
                "Question:\n"
                "{prompt}\n"
                "\n"
                "Response:\n"
                "{response}\n"
                "\n"
                "A good answer:\n"
                "{answer}\n"
                "\n"
                'End with one line of the form "score: N".'
            ),
        ),
    ]
    base_url: Annotated[str, Key("the API's root, for example http://judge:8000/v1")]
    model: Annotated[str, Key("the name under which the server has it")]
    api_key_variable: Annotated[
        str | None,
        Key("the environment variable that holds the API key; null: the server asks for none", None),
    ]
    max_tokens: Annotated[int | None, Key("of a verdict; null: the server's own limit", 512, above=0)]
    temperature: Annotated[float | None, Key("null: the server's own", 0.0)]
    extra_body: Annotated[
        dict[str, Any],
        Key(
            "further fields of every request, for example {chat_template_kwargs: {enable_thinking: false}}",
            {},
        ),
    ]
    default_reward: Annotated[
        float | None, Key("the reward where a verdict cannot be read; null: the sample fails", None)
    ]
    request_timeout_s: Annotated[float, Key("deadline of one attempt", 90.0, above=0)]
    max_attempts: Annotated[
        int,
        Key(
            "tried again after a refused or broken connection, a timeout, or a status of 409, 429 or 5xx",
            3,
            above=0,
        ),
    ]


@dataclass(kw_only=True, slots=True)
class HubOptions:
    """The options of kinds whose package runs in a separate process.

    ``module`` is the package's module, which the interpreter must have; ``adapter`` names the class in
    ``hubs`` that adapts the package, as "module:class". ``prompt_options`` are the options that decide which
    prompts the package makes; other options say how it is reached, shown and judged. ``counts_tasks``:
    prompts have numbers instead of seeds.
    """

    module: ClassVar[str]
    adapter: ClassVar[str]
    prompt_options: ClassVar[tuple[str, ...]]
    counts_tasks: ClassVar[bool] = False

    python: Annotated[
        str | None,
        Key(
            "the interpreter that has the package (scripts/setup.sh --hubs); null: that of the run",
            ".venv-hubs/bin/python",
        ),
    ]


@dataclass(kw_only=True, slots=True)
class ModelOptions:
    """A sequence-classification checkpoint with one label, whose output is the reward."""

    model_name: Annotated[str, Key("a checkpoint's directory, or its name on the hub", is_path=True)]
    device: Annotated[
        Device, Key("cuda: each actor has a GPU of its own, which it shares with nothing", Device.cpu)
    ]
    precision: Annotated[Precision, Key("or bfloat16, the usual one on a GPU", Precision.float32)]
    max_length: Annotated[
        int | None,
        Key("a conversation of more tokens fails; null: the positions that the model has", None, above=0),
    ]


class Credit(Enum):
    """Which branches of an agent's session train with its reward."""

    session = "session"  # all of them
    last = "last"  # the branch with the last call


@dataclass(kw_only=True, slots=True)
class AgentOptions:
    """An agent: a function, a class with tools, or a command, which calls the policy at an endpoint."""

    agent: Annotated[
        str | None,
        Key("package.module:name: a function of (task, base_url, api_key), plain or async, or a class", None),
    ]
    arguments: Annotated[dict[str, Any], Key("further arguments of the function, or those of the class", {})]
    command: Annotated[
        list[str],
        Key(
            "a program and its arguments: the task on its input, the reward on the last line of its output",
            [],
        ),
    ]
    variables: Annotated[dict[str, str], Key("further environment variables of the command", {})]
    credit: Annotated[
        Credit,
        Key(
            "which branches of a session train: session: all; last: the one with the last call",
            Credit.session,
        ),
    ]
    tool_parser: Annotated[
        str | None,
        Key("vLLM's parser for the calls that the checkpoint writes; null: tools are refused", "hermes"),
    ]
    tool_choice: Annotated[
        str, Key("of a class with tools: auto; or required, with which it must say when it is done", "auto")
    ]
    max_calls: Annotated[int, Key("to the endpoint, in one session; more fail the sample", 64, above=0)]
    timeout_s: Annotated[float, Key("deadline of one session", 120.0, above=0)]
    memory_mib: Annotated[int, Key("limit for each process of a command", 1024, above=0)]
    max_processes: Annotated[
        int, Key("limit for the processes and threads of one command together, in a sandbox", 64, above=0)
    ]
    max_output_kib: Annotated[int, Key("that a command may print; more fails the sample", 1024, above=0)]
    sandbox: Annotated[
        SandboxMode,
        Key(
            "commands run under bubblewrap, with the endpoint as their only network; none: without",
            SandboxMode.required,
        ),
    ]
    readable_paths: Annotated[
        list[str],
        Key("files and folders of the machine that commands in a sandbox may read", [], is_path=True),
    ]
