"""``env.<name>.options``: the options that each kind of environment has. Defaults are in ``configs/env``."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any

from nemo_like.config import fields
from nemo_like.config.keys import Key, beyond_limits
from nemo_like.config.problems import Problem
from nemo_like.environments.options import EnvConfig, EnvironmentKind
from nemo_like.policy.options import Device, Precision


class SandboxMode(Enum):
    """Where the programs run that kind=code judges.

    With ``required`` they run in a sandbox, and a run refuses to start where none can be made. With ``none``
    they run without one, as the run's user.
    """

    required = "required"
    none = "none"


class Credit(Enum):
    """Which branches of an agent's session train with its reward."""

    session = "session"  # all of them
    last = "last"  # the one with the last call


@dataclass(kw_only=True, slots=True)
class NoOptions:
    pass


@dataclass(kw_only=True, slots=True)
class MatchOptions:
    """The options of kinds f1, math_verify and reasoning_gym."""

    answer_pattern: Annotated[
        str | None,
        Key(
            "for example '<answer>(.*?)</answer>': group 1 of its last match is the answer; null: the whole "
            "response",
            None,
        ),
    ]


@dataclass(kw_only=True, slots=True)
class ExactMatchOptions:
    answer_pattern: Annotated[
        str | None,
        Key("e.g. 'answer: (.*)': the last match's group 1 is compared; null: the whole response", None),
    ]
    ignore_case: Annotated[bool, Key("of letters", False)]
    must_end: Annotated[bool, Key("a response that ran into a token limit earns nothing", True)]


@dataclass(kw_only=True, slots=True)
class RegexOptions:
    pattern: Annotated[str, Key('^ and $ anchor it to the whole response, "." matches newlines too')]


@dataclass(kw_only=True, slots=True)
class JsonSchemaOptions:
    schema: Annotated[
        dict[str, Any] | None, Key("JSON schema for every answer; null: each example has its own", None)
    ]
    schema_key: Annotated[str, Key("the example's field with its schema, a mapping or text", "schema")]
    answer_pattern: Annotated[
        str | None,
        Key("e.g. '```json(.*?)```': the last match's group 1 is parsed; null: the whole response", None),
    ]


@dataclass(kw_only=True, slots=True)
class FunctionOptions:
    """A reward function: ``function(turn, **arguments)`` returns a number, a mapping of named numbers, or a
    ``Feedback``."""

    function: Annotated[str, Key("package.module:name")]
    arguments: Annotated[dict[str, Any], Key("of the function, by name", {})]


@dataclass(kw_only=True, slots=True)
class CustomOptions:
    """A class of the user's: ``target(**arguments)`` makes an ``Environment``."""

    target: Annotated[str, Key("package.module:Class")]
    arguments: Annotated[dict[str, Any], Key("of the class, by name", {})]


@dataclass(kw_only=True, slots=True)
class CodeOptions:
    program_pattern: Annotated[
        str | None,
        Key("the last match's group 1 is run; null: the whole response", "```(?:python)?\\n(.*?)```"),
    ]
    tests_key: Annotated[
        str, Key("the example's field with tests: asserts, or a list of {input: ..., output: ...}", "tests")
    ]
    timeout_s: Annotated[float, Key("deadline of one program", 5.0, above=0)]
    memory_mib: Annotated[int, Key("limit for each process of a program", 512, above=0)]
    max_processes: Annotated[
        int, Key("limit for the processes and threads of one program together", 16, above=0)
    ]
    max_parallel: Annotated[int, Key("programs that one actor runs at the same time", 2, above=0)]
    share_objects: Annotated[
        bool,
        Key(
            "true: tests run in the program's own process, so that they can use its classes "
            "and callables; the program can then deceive them.",
            False,
        ),
    ]
    sandbox: Annotated[
        SandboxMode,
        Key(
            "programs run under bubblewrap; none: they can do whatever the run's user can",
            SandboxMode.required,
        ),
    ]
    readable_paths: Annotated[
        list[str],
        Key("files and folders of the machine that programs may read, besides Python's own and /usr", []),
    ]


@dataclass(kw_only=True, slots=True)
class HttpOptions:
    url: Annotated[str, Key("of the server, which gets a POST for each batch of turns")]
    request_timeout_s: Annotated[float, Key("deadline of one attempt", 30.0, above=0)]
    max_attempts: Annotated[
        int,
        Key(
            "tried again after a refused or broken connection, a timeout, or a status of 429 or 5xx",
            3,
            above=0,
        ),
    ]
    retry_pause_s: Annotated[
        float, Key("pause before the second attempt; it doubles with every further attempt", 0.5, at_least=0)
    ]
    max_parallel: Annotated[int, Key("requests that one actor has under way at once", 8, above=0)]


@dataclass(kw_only=True, slots=True)
class RewardModelOptions:
    """A sequence-classification checkpoint with one label, whose output is the reward."""

    model_name: Annotated[str, Key("Hugging Face checkpoint directory")]
    device: Annotated[
        Device, Key("cuda: each actor has a GPU of its own, which it shares with nothing", Device.cpu)
    ]
    precision: Annotated[Precision, Key("or bfloat16, the usual one on a GPU", Precision.float32)]
    max_length: Annotated[
        int | None,
        Key("a conversation of more tokens fails; null: the positions that the model has", None, above=0),
    ]


@dataclass(kw_only=True, slots=True)
class EndpointOptions:
    """A model behind an OpenAI-compatible API, and how it is asked."""

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
class JudgeOptions(EndpointOptions):
    """A judge that gives each response a score.

    ``{prompt}``, ``{response}`` and ``{answer}`` in its question stand for the sample's.
    """

    score_pattern: Annotated[
        str, Key("group 1 of its last match in the verdict is the score", "score: (-?\\d+(?:\\.\\d+)?)")
    ]
    min_score: Annotated[float, Key("a verdict with a score beyond these two counts as unreadable", 0.0)]
    max_score: Annotated[float, Key("gives the reward 1", 10.0)]


@dataclass(kw_only=True, slots=True)
class PreferenceOptions(EndpointOptions):
    """A judge that says which of two answers is better: the response, or the reference answer.

    ``{prompt}``, ``{first}`` and ``{second}`` in its question stand for the problem and the two answers.
    """

    prompt: Annotated[
        str,
        Key(
            "What the judge is asked. {prompt} stands for the sample's, {first} and {second} "
            "for the two answers.",
            (
                "Which answer to the question is better?\n"
                "\n"
                "Question:\n"
                "{prompt}\n"
                "\n"
                "Answer A:\n"
                "{first}\n"
                "\n"
                "Answer B:\n"
                "{second}\n"
                "\n"
                "End with [[A]], with [[B]], or, when both are equally good, with [[C]]."
            ),
        ),
    ]
    verdict_pattern: Annotated[
        str, Key("group 1 of its last match in the verdict is A, B, or C for a tie", "\\[\\[([ABC])\\]\\]")
    ]


@dataclass(kw_only=True, slots=True)
class WeightedSumOptions:
    """Other environments, all of which judge every response."""

    components: Annotated[
        dict[str, float],
        Key("the weights by the environments' names, for example {math: 1.0, quality: 0.1}", {}),
    ]


@dataclass(kw_only=True, slots=True)
class CalculatorOptions:
    call_pattern: Annotated[
        str,
        Key(
            "A call; group 1 is the expression: numbers, + - * / % ** and parentheses.",
            "<calculator>(.*?)</calculator>",
        ),
    ]
    result_template: Annotated[
        str,
        Key(
            "the observation that follows a call; {result} stands for the result", "<result>{result}</result>"
        ),
    ]
    answer_pattern: Annotated[
        str | None,
        Key("e.g. 'answer: (.*)': the last match's group 1 is compared; null: the whole response", None),
    ]


@dataclass(kw_only=True, slots=True)
class SlidingPuzzleOptions:
    board_key: Annotated[
        str, Key('the example\'s field with the first board: rows of text, the blank as "-"', "board")
    ]
    solved_reward: Annotated[float, Key("of a board that is solved", 1.0)]
    progress_reward: Annotated[
        float, Key("is multiplied by the share of the misplaced tiles that came to their places", 0.0)
    ]


@dataclass(kw_only=True, slots=True)
class HubOptions:
    """The options of kinds whose package runs in a process of its own."""

    python: Annotated[
        str | None,
        Key(
            "the interpreter that has the package (scripts/setup.sh --hubs); null: that of the run",
            ".venv-hubs/bin/python",
        ),
    ]


@dataclass(kw_only=True, slots=True)
class GymnasiumOptions(HubOptions):
    """An environment with Gymnasium's interface; its observations are text, or rendered as text."""

    env_id: Annotated[str, Key("for example FrozenLake-v1; module:id imports the module first")]
    arguments: Annotated[
        dict[str, Any], Key("of gymnasium.make, for example {render_mode: ansi, is_slippery: false}", {})
    ]
    action_pattern: Annotated[
        str | None,
        Key("regex: group 1 of its last match is the action; null: the whole response, spaces aside", None),
    ]
    actions: Annotated[
        dict[str, Any],
        Key(
            "actions by the words for them, for example {left: 0, down: 1}; {}: numbers, or the text itself",
            {},
        ),
    ]
    invalid_reward: Annotated[
        float, Key("of a response that names no action; nothing happens, and the turn counts", 0.0)
    ]
    prompt_template: Annotated[str, Key("{observation} stands for the first one", "{observation}")]
    observation_template: Annotated[
        str, Key("{observation} stands for the observation", ("\n{observation}\n"))
    ]


@dataclass(kw_only=True, slots=True)
class TextArenaOptions(HubOptions):
    """A game of TextArena, in which the policy is player 0."""

    env_id: Annotated[str, Key("for example TowerOfHanoi-v0")]
    arguments: Annotated[dict[str, Any], Key("of textarena.make", {})]
    num_players: Annotated[int, Key("the policy among them", 1, above=0)]
    opponent: Annotated[
        str | None,
        Key(
            "with several players, module:function, which returns a player's move for what that player sees",
            None,
        ),
    ]


@dataclass(kw_only=True, slots=True)
class OpenEnvOptions(HubOptions):
    """An environment behind a server of OpenEnv."""

    base_url: Annotated[str, Key("of the server, for example http://localhost:8000")]
    action: Annotated[
        dict[str, Any],
        Key("what is sent; {response} in its texts stands for the response", {"message": "{response}"}),
    ]
    action_pattern: Annotated[
        str | None,
        Key("regex: group 1 of its last match stands for the response; null: the whole response", None),
    ]
    reset_arguments: Annotated[dict[str, Any], Key("of a reset, besides seed", {})]
    observation_key: Annotated[
        str | None, Key("the field of observations that the policy sees; null: all of them, as JSON", None)
    ]
    prompt_template: Annotated[str, Key("{observation} stands for the first one", "{observation}")]
    observation_template: Annotated[
        str, Key("{observation} stands for the observation", ("\n{observation}\n"))
    ]
    message_timeout_s: Annotated[float, Key("for one answer of the server", 60.0, above=0)]


@dataclass(kw_only=True, slots=True)
class VerifiersOptions(HubOptions):
    """An environment of verifiers with one seat, which the policy has."""

    env: Annotated[
        dict[str, Any],
        Key("verifiers' own configuration of an environment, for example {taskset: {id: my_taskset}}", {}),
    ]


@dataclass(kw_only=True, slots=True)
class McpOptions:
    """Tools of MCP servers, which responses call; a response without a call is judged by ``judge``."""

    servers: Annotated[
        dict[str, Any],
        Key(
            "programs that speak MCP, by name, for example {tools: {command: [python, -m, "
            "my_server], env: {}}}",
            {},
        ),
    ]
    judge: Annotated[str, Key("the environment, a key of env, that judges the last response")]
    call_pattern: Annotated[
        str,
        Key(
            'group 1 of each match: {"name": ..., "arguments": {...}}',
            "<tool_call>\\s*(\\{.*?\\})\\s*</tool_call>",
        ),
    ]
    result_template: Annotated[
        str, Key("what the policy sees of each result; {result} stands for the text", "{result}")
    ]
    max_result_characters: Annotated[int, Key("of one result; more is cut", 8192, above=0)]
    call_timeout_s: Annotated[float, Key("deadline of one call", 30.0, above=0)]


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
        list[str], Key("files and folders of the machine that commands in a sandbox may read", [])
    ]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of environment: its options, and what it is, as the head of its file in ``configs/env``.

    ``base`` has the keys of ``EnvConfig`` for which it has other defaults.
    """

    options: type
    about: str
    base: Mapping[str, Key] = field(default_factory=dict)


KINDS: Mapping[EnvironmentKind, Kind] = {
    EnvironmentKind.arithmetic: Kind(
        NoOptions,
        "The reward is 1 when the response is exactly the reference answer and ended properly; else 0.",
    ),
    EnvironmentKind.exact_match: Kind(
        ExactMatchOptions,
        "The reward is 1 when the response is the reference answer, spaces around it aside; else 0.",
    ),
    EnvironmentKind.f1: Kind(
        MatchOptions,
        "The reward is the F1 of the words that the response shares with the reference "
        "answer, from 0 to 1, with SQuAD's normalisation.",
    ),
    EnvironmentKind.regex: Kind(
        RegexOptions, "The reward is 1 when the response contains a match of a regular expression; else 0."
    ),
    EnvironmentKind.json_schema: Kind(
        JsonSchemaOptions,
        "The reward is 1 when the response is JSON that a schema accepts; else 0. The "
        "metric `parses` says whether it is JSON at all.",
    ),
    EnvironmentKind.math_verify: Kind(
        MatchOptions,
        "The reward is 1 when math-verify finds the response's last expression equal to "
        "the reference answer; else 0.",
        {"timeout_s": Key("each symbolic comparison may take seconds", 60.0), "batch_size": Key("", 16)},
    ),
    EnvironmentKind.reasoning_gym: Kind(
        MatchOptions,
        "The reward is the score, from 0 to 1, that the problem's reasoning-gym dataset gives the response.",
    ),
    EnvironmentKind.function: Kind(
        FunctionOptions,
        "A function of your own gives the reward: function(turn, **arguments) returns a "
        "number, named numbers, a Feedback, or None for a response that it does not "
        "judge.",
        {"batch_size": Key("", 16)},
    ),
    EnvironmentKind.custom: Kind(
        CustomOptions,
        "An environment of your own: target(**arguments) implements "
        "nemo_like.environments.interface.Environment.",
        {"batch_size": Key("", 16)},
    ),
    EnvironmentKind.code: Kind(
        CodeOptions,
        "The response has a Python program, which runs in a sandbox. The reward is the "
        "share of tests that it passes.",
        {"timeout_s": Key("", 120.0), "max_concurrency": Key("", 4), "batch_size": Key("", 8)},
    ),
    EnvironmentKind.http: Kind(
        HttpOptions,
        "A server gives the rewards. It is sent batches of turns; docs/environments.md has the format.",
        {
            "timeout_s": Key("deadline of all attempts together", 120.0),
            "max_concurrency": Key("", 8),
            "batch_size": Key("turns of one request", 64),
        },
    ),
    EnvironmentKind.reward_model: Kind(
        RewardModelOptions,
        "A reward model's output is the reward: a sequence-classification checkpoint of "
        "transformers with one label, which reads the whole conversation with its own "
        "tokenizer and chat template.",
        {"timeout_s": Key("", 120.0), "batch_size": Key("conversations of one forward pass", 32)},
    ),
    EnvironmentKind.judge: Kind(
        JudgeOptions,
        "A generative judge, behind any OpenAI-compatible API, gives each response a "
        "score. The reward is 0 at min_score, 1 at max_score, and linear between them.",
        {
            "timeout_s": Key("above request_timeout_s x max_attempts", 300.0),
            "max_concurrency": Key("requests that one actor has under way at once", 32),
            "batch_size": Key("no response waits for the verdict on another", 1),
        },
    ),
    EnvironmentKind.preference: Kind(
        PreferenceOptions,
        "A generative judge, behind any OpenAI-compatible API, says whether the response "
        "or the reference answer is better. It is asked twice, with the two in either "
        "order; the reward is the share that the response wins, a tie being half.",
        {
            "timeout_s": Key("above request_timeout_s x max_attempts", 300.0),
            "max_concurrency": Key("responses that one actor has compared at once, by two requests each", 16),
            "batch_size": Key("no response waits for the verdict on another", 1),
        },
    ),
    EnvironmentKind.weighted_sum: Kind(
        WeightedSumOptions,
        "Other environments of the configuration judge every response; the reward is the "
        "weighted sum of theirs. Each keeps its own actors, batches, concurrency and "
        "deadline.",
        {"num_actors": Key("it has none of its own", 0)},
    ),
    EnvironmentKind.calculator: Kind(
        CalculatorOptions,
        "The environment answers calls of a calculator. A response without a call is the "
        "final answer: the reward is 1 when it is the reference answer; else 0.",
        {
            "batch_size": Key("no conversation waits for another", 1),
            "max_turns": Key("", 4),
            "observation_role": Key("", "tool"),
            "sampling": Key("a call of the calculator ends the turn", {"stop_strings": ["</calculator>"]}),
        },
    ),
    EnvironmentKind.sliding_puzzle: Kind(
        SlidingPuzzleOptions,
        "A board of sliding tiles: each response moves tiles, and the environment answers "
        "with the new board. It is solved when the tiles read 1 2 3 ... and the blank "
        "comes last.",
        {"batch_size": Key("no conversation waits for another", 1), "max_turns": Key("", 8)},
    ),
    EnvironmentKind.gymnasium: Kind(
        GymnasiumOptions,
        "A game with the interface of Gymnasium, whose observations are text, or are "
        "rendered as text. An episode is as many turns as it has steps. Its problems are "
        "made by data.train={kind: environment, env: NAME, options: {size: 1000}}.",
        {
            "max_turns": Key("", 16),
            "max_concurrency": Key("calls under way at once; the package answers one after the other", 32),
            "batch_size": Key("", 32),
            "timeout_s": Key("", 120.0),
        },
    ),
    EnvironmentKind.textarena: Kind(
        TextArenaOptions,
        "A game of TextArena, in which the policy is player 0. Its problems are made by "
        "data.train={kind: environment, env: NAME, options: {size: 1000}}.",
        {
            "max_turns": Key("", 16),
            "max_concurrency": Key("calls under way at once; the package answers one after the other", 32),
            "batch_size": Key("", 32),
            "timeout_s": Key("", 120.0),
        },
    ),
    EnvironmentKind.openenv: Kind(
        OpenEnvOptions,
        "An environment of OpenEnv behind its server, which must allow as many sessions "
        "as there are conversations at once. Its problems are made by data.train={kind: "
        "environment, env: NAME, options: {size: 1000}}: resets with seeds.",
        {
            "max_turns": Key("", 16),
            "max_concurrency": Key("calls that one actor has under way at once", 32),
            "batch_size": Key("no turn waits for another's answer", 1),
            "timeout_s": Key("above message_timeout_s", 120.0),
        },
    ),
    EnvironmentKind.verifiers: Kind(
        VerifiersOptions,
        "An environment of verifiers (version 1 of its interface) with one seat, which "
        "the policy has. Its tasks are problems: data.train={kind: environment, env: "
        "NAME, options: {size: 1000, seed: 0}}, where seed is the number of the first.",
        {
            "max_turns": Key("", 16),
            "max_concurrency": Key("calls that one actor has under way at once", 64),
            "batch_size": Key("no turn waits for another's answer", 1),
            "timeout_s": Key("", 120.0),
        },
    ),
    EnvironmentKind.mcp: Kind(
        McpOptions,
        "Tools of MCP servers. A response may call them; one that does not is the answer, "
        "which another environment judges. The chat template describes the tools to the "
        "policy; a prompt of plain text must do so itself.",
        {
            "max_turns": Key("responses, calls and answer together", 4),
            "observation_role": Key("the role under which a chat template renders results", "tool"),
            "max_concurrency": Key("calls that one actor has under way at once", 32),
            "batch_size": Key("no turn waits for another's tools", 1),
            "timeout_s": Key("above call_timeout_s times the calls of one response", 120.0),
        },
    ),
    EnvironmentKind.agent: Kind(
        AgentOptions,
        "An agent of your own calls the policy at an endpoint, as it would call OpenAI or "
        "Anthropic: docs/agents.md. Either `agent` names a function or a class with "
        "tools, or `command` a program.",
        {
            "batch_size": Key("no session waits for another", 1),
            "max_concurrency": Key(
                "sessions that one process has under way at once; a command takes a process of its own", 512
            ),
            "timeout_s": Key(
                "must be above options.timeout_s: a process that does not keep that deadline "
                "itself is replaced",
                150.0,
            ),
            "check_at_start": Key("there is no response that could be judged without the policy", False),
        },
    ),
}
# Kinds whose package runs in a process of its own, and the module that it must have.
HUB_MODULES = {
    EnvironmentKind.gymnasium: "gymnasium",
    EnvironmentKind.textarena: "textarena",
    EnvironmentKind.openenv: "openenv.core",
    EnvironmentKind.verifiers: "verifiers.v1",
}
_NEEDED_MODULES = {
    EnvironmentKind.math_verify: ("math_verify", "math-verify[antlr4_9_3]"),
    EnvironmentKind.reasoning_gym: ("reasoning_gym", "reasoning-gym"),
    EnvironmentKind.mcp: ("mcp", "mcp"),
}
_IMPORT_PATHS = ("function", "target", "opponent", "agent")


def options_of(env: EnvConfig) -> Any:
    """Return an environment's options as an instance of its kind's options class."""
    return fields.typed(_current(env), KINDS[env.kind].options)


def replaced_options(name: str, env: EnvConfig) -> Iterator[str]:
    """Yield a sentence for every option that has another name now, with what to write instead."""
    if _has_network_option(env):
        yield (
            f"env.{name}.options.network={env.options['network']} is now env.{name}.options.sandbox="
            f"{_current(env)['sandbox']}; a sandbox has no network, and where there can be none only "
            "sandbox=none runs programs"
        )


def _has_network_option(env: EnvConfig) -> bool:
    return env.kind is EnvironmentKind.code and env.options.get("network") in ("required", "preferred")


def _current(env: EnvConfig) -> dict[str, Any]:
    """Return the options under their present names."""
    if not _has_network_option(env):
        return env.options
    others = {key: value for key, value in env.options.items() if key != "network"}
    return {"sandbox": SandboxMode.required.value, **others}


def option_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield every problem with the options of the environment ``name``."""
    prefix, kind = f"env.{name}.options", KINDS[env.kind].options
    options = _current(env)
    found = fields.check_tree(options, kind, "", root=kind)
    yield from (replace(problem, key=f"{prefix}.{problem.key}") for problem in found)
    missing = [key for key in fields.hints(kind) if options.get(key, "???") == "???"]
    for key in missing:
        yield Problem(
            key=f"{prefix}.{key}",
            rule=f"has no value, and kind={env.kind.name} needs one",
            remedy=f"set it; configs/env/{env.kind.name}.yaml has the others",
        )
    if not found and not missing:
        yield from beyond_limits(fields.typed(options, kind), f"{prefix}.")
        yield from _value_problems(prefix, options)
    if module := _NEEDED_MODULES.get(env.kind):
        yield from _module_problems(name, env, *module)


def _value_problems(prefix: str, options: dict[str, Any]) -> Iterator[Problem]:
    for key, value in options.items():
        full_key = f"{prefix}.{key}={value}"
        if key.endswith("pattern") and value is not None:
            yield from _pattern_problems(full_key, key, value)
        elif key in ("url", "base_url") and not str(value).startswith(("http://", "https://")):
            yield Problem(key=full_key, rule="must start with http:// or https://", remedy="")
        elif key in _IMPORT_PATHS and value is not None and ":" not in str(value):
            yield Problem(key=full_key, rule="is no import path", remedy="write package.module:name")
        elif key == "result_template" and "{result}" not in str(value):
            yield Problem(key=full_key, rule="must contain {result}", remedy='for example "= {result}"')


def _pattern_problems(full_key: str, key: str, pattern: str) -> Iterator[Problem]:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        yield Problem(key=full_key, rule=f"is no regular expression: {error}", remedy="")
        return
    if key != "pattern" and num_groups < 1:
        yield Problem(
            key=full_key, rule="has no group 1", remedy="put parentheses around the part that is wanted"
        )


def _module_problems(name: str, env: EnvConfig, module: str, package: str) -> Iterator[Problem]:
    if importlib.util.find_spec(module) is None:
        yield Problem(
            key=f"env.{name}.kind={env.kind.name}",
            rule=f"needs the Python package {module}, which is not installed",
            remedy=f"pip install '{package}'",
        )
