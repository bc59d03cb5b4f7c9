"""``env.<name>.options``: the options that each kind of environment has. Defaults are in ``configs/env``."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from nemo_like.config import fields
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

    answer_pattern: str | None  # regex: group 1 of its last match is the answer; null: the whole response


@dataclass(kw_only=True, slots=True)
class ExactMatchOptions:
    answer_pattern: str | None  # regex: group 1 of its last match is the answer; null: the whole response
    ignore_case: bool
    must_end: bool  # a truncated response earns nothing


@dataclass(kw_only=True, slots=True)
class RegexOptions:
    pattern: str  # searched in the response; ^ and $ anchor it, "." matches newlines too


@dataclass(kw_only=True, slots=True)
class JsonSchemaOptions:
    schema: dict[str, Any] | None  # the schema of every answer; null: each example has its own
    schema_key: str  # the field of an example that holds its schema, used where schema is null
    answer_pattern: str | None  # regex: group 1 of its last match is the JSON; null: the whole response


@dataclass(kw_only=True, slots=True)
class FunctionOptions:
    """A reward function: ``function(turn, **arguments)`` returns a number, a mapping of named numbers, or a
    ``Feedback``."""

    function: str  # package.module:name
    arguments: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class CustomOptions:
    """A class of the user's: ``target(**arguments)`` makes an ``Environment``."""

    target: str  # package.module:Class
    arguments: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class CodeOptions:
    program_pattern: str | None  # regex: group 1 of its last match is the program; null: the whole response
    tests_key: str  # the field of an example that holds its tests
    timeout_s: float  # for one program
    memory_mib: int  # address space of each process of a program
    max_processes: int  # processes and threads of one program
    max_parallel: int  # programs that run at the same time in one actor
    share_objects: bool  # tests run in the program's own process, where the program can deceive them
    sandbox: SandboxMode
    readable_paths: list[str]  # files and folders of the machine that programs may read, besides Python's


@dataclass(kw_only=True, slots=True)
class HttpOptions:
    url: str
    request_timeout_s: float  # for one attempt
    max_attempts: int
    retry_pause_s: float  # before the second attempt; doubles with every further one
    max_parallel: int  # requests that one actor makes at the same time


@dataclass(kw_only=True, slots=True)
class RewardModelOptions:
    """A sequence-classification checkpoint with one label, whose output is the reward."""

    model_name: str  # Hugging Face checkpoint directory
    device: Device  # cuda: each actor has a GPU of its own
    precision: Precision
    max_length: int | None  # tokens of a conversation; null: as many as the model's positions


@dataclass(kw_only=True, slots=True)
class EndpointOptions:
    """A model behind an OpenAI-compatible API, and how it is asked."""

    prompt: str  # the question to the model; its kind says what stands in braces
    base_url: str  # of the API, such as http://judge:8000/v1
    model: str  # the name under which the server has it
    api_key_variable: str | None  # the environment variable that holds the API key; null: no key
    max_tokens: int | None  # of a verdict; null: the server's own limit
    temperature: float | None  # null: the server's own
    extra_body: dict[str, Any]  # further fields of every request
    default_reward: float | None  # where a verdict cannot be read; null: the sample fails
    request_timeout_s: float  # for one attempt
    max_attempts: int


@dataclass(kw_only=True, slots=True)
class JudgeOptions(EndpointOptions):
    """A judge that gives each response a score.

    ``{prompt}``, ``{response}`` and ``{answer}`` in its question stand for the sample's.
    """

    score_pattern: str  # regular expression: group 1 of its last match in the verdict is the score
    min_score: float  # gives the reward 0
    max_score: float  # gives the reward 1


@dataclass(kw_only=True, slots=True)
class PreferenceOptions(EndpointOptions):
    """A judge that says which of two answers is better: the response, or the reference answer.

    ``{prompt}``, ``{first}`` and ``{second}`` in its question stand for the problem and the two answers.
    """

    verdict_pattern: str  # regular expression: group 1 of its last match is A, B, or C for a tie


@dataclass(kw_only=True, slots=True)
class WeightedSumOptions:
    """Other environments, all of which judge every response."""

    components: dict[str, float]  # weights by the environments' names in env


@dataclass(kw_only=True, slots=True)
class CalculatorOptions:
    call_pattern: str  # regular expression that a call matches; group 1 is the expression to compute
    result_template: str  # the observation that follows a call; {result} stands for the result
    answer_pattern: str | None  # regex: group 1 of its last match is the answer; null: the whole response


@dataclass(kw_only=True, slots=True)
class SlidingPuzzleOptions:
    board_key: str  # the field of an example that holds its board: rows of text, the blank as "-"
    solved_reward: float
    progress_reward: float  # multiplied by the share of tiles that came to their places by the end


@dataclass(kw_only=True, slots=True)
class HubOptions:
    """The options of kinds whose package runs in a process of its own."""

    python: str | None  # the interpreter that has the package; null: that of the run


@dataclass(kw_only=True, slots=True)
class GymnasiumOptions(HubOptions):
    """An environment with Gymnasium's interface; its observations are text, or rendered as text."""

    env_id: str  # module:id imports the module first, which registers it
    arguments: dict[str, Any]  # of gymnasium.make
    action_pattern: str | None  # regex: group 1 of its last match is the action; null: the whole response
    actions: dict[str, Any]  # actions by the words for them; {}: a number, or the text itself
    invalid_reward: float  # of a response that names no action, which does nothing
    prompt_template: str  # {observation} stands for the first one
    observation_template: str  # {observation} stands for the observation


@dataclass(kw_only=True, slots=True)
class TextArenaOptions(HubOptions):
    """A game of TextArena, in which the policy is player 0."""

    env_id: str
    arguments: dict[str, Any]  # of textarena.make
    num_players: int
    opponent: str | None  # module:function, which returns the move of another player for what that one sees


@dataclass(kw_only=True, slots=True)
class OpenEnvOptions(HubOptions):
    """An environment behind a server of OpenEnv."""

    base_url: str
    action: dict[str, Any]  # what is sent; {response} in its texts stands for the response
    action_pattern: str | None  # regex: group 1 of its last match takes its place; null: the whole response
    reset_arguments: dict[str, Any]  # of a reset, besides seed
    observation_key: str | None  # the field of observations that the policy sees; null: all, as JSON
    prompt_template: str  # {observation} stands for the first one
    observation_template: str  # {observation} stands for the observation
    message_timeout_s: float  # for one answer of the server


@dataclass(kw_only=True, slots=True)
class VerifiersOptions(HubOptions):
    """An environment of verifiers with one seat, which the policy has."""

    env: dict[str, Any]  # verifiers' own configuration of it, such as {taskset: {id: my_taskset}}


@dataclass(kw_only=True, slots=True)
class McpOptions:
    """Tools of MCP servers, which responses call; a response without a call is judged by ``judge``."""

    servers: dict[str, Any]  # by name: {command: [...], env: {...}} of a program that speaks MCP
    judge: str  # the environment, a key of env, that judges the last response
    call_pattern: str  # regex: group 1 of each match is a call, {"name": ..., "arguments": {...}} in JSON
    result_template: str  # what follows a call; {result} stands for the tool's result
    max_result_characters: int  # a longer result is cut
    call_timeout_s: float  # of one call of a tool


@dataclass(kw_only=True, slots=True)
class AgentOptions:
    """An agent: a function, a class with tools, or a command, which calls the policy at an endpoint."""

    agent: str | None  # package.module:name of a function or class; null: ``command``
    arguments: dict[str, Any]  # of the function after its own three, or of the class
    command: list[str]  # a program and its arguments; empty: ``agent``
    variables: dict[str, str]  # further environment variables of the command
    credit: Credit
    tool_parser: str | None  # vLLM's, for the calls of tools that the checkpoint writes; null: no tools
    tool_choice: str  # of a class with tools: auto, or required until it is done
    max_calls: int  # to the endpoint, in one session
    timeout_s: float  # for one session
    memory_mib: int  # address space of each process of a command
    max_processes: int  # processes and threads of one command; only a sandbox counts them
    max_output_kib: int  # that a command may print
    sandbox: SandboxMode  # of commands
    readable_paths: list[str]  # files and folders of the machine that a command in a sandbox may read


_OPTIONS: dict[EnvironmentKind, type] = {
    EnvironmentKind.arithmetic: NoOptions,
    EnvironmentKind.exact_match: ExactMatchOptions,
    EnvironmentKind.f1: MatchOptions,
    EnvironmentKind.regex: RegexOptions,
    EnvironmentKind.json_schema: JsonSchemaOptions,
    EnvironmentKind.math_verify: MatchOptions,
    EnvironmentKind.reasoning_gym: MatchOptions,
    EnvironmentKind.function: FunctionOptions,
    EnvironmentKind.custom: CustomOptions,
    EnvironmentKind.code: CodeOptions,
    EnvironmentKind.http: HttpOptions,
    EnvironmentKind.reward_model: RewardModelOptions,
    EnvironmentKind.judge: JudgeOptions,
    EnvironmentKind.preference: PreferenceOptions,
    EnvironmentKind.weighted_sum: WeightedSumOptions,
    EnvironmentKind.calculator: CalculatorOptions,
    EnvironmentKind.sliding_puzzle: SlidingPuzzleOptions,
    EnvironmentKind.gymnasium: GymnasiumOptions,
    EnvironmentKind.textarena: TextArenaOptions,
    EnvironmentKind.openenv: OpenEnvOptions,
    EnvironmentKind.verifiers: VerifiersOptions,
    EnvironmentKind.mcp: McpOptions,
    EnvironmentKind.agent: AgentOptions,
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
_POSITIVE = (
    "timeout_s",
    "memory_mib",
    "max_processes",
    "max_parallel",
    "request_timeout_s",
    "max_attempts",
    "max_length",
    "max_tokens",
    "num_players",
    "message_timeout_s",
    "max_result_characters",
    "call_timeout_s",
    "max_calls",
    "max_output_kib",
)


def options_of(env: EnvConfig) -> Any:
    """Return an environment's options as an instance of its kind's options class."""
    return fields.typed(_current(env), _OPTIONS[env.kind])


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
    prefix, kind = f"env.{name}.options", _OPTIONS[env.kind]
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
        yield from _value_problems(prefix, options)
    if module := _NEEDED_MODULES.get(env.kind):
        yield from _module_problems(name, env, *module)


def _value_problems(prefix: str, options: dict[str, Any]) -> Iterator[Problem]:
    for key, value in options.items():
        full_key = f"{prefix}.{key}={value}"
        if key.endswith("pattern") and value is not None:
            yield from _pattern_problems(full_key, key, value)
        elif key in _POSITIVE and value is not None and not value > 0:
            yield Problem(key=full_key, rule="must be above 0", remedy="")
        elif key == "retry_pause_s" and not value >= 0:
            yield Problem(key=full_key, rule="must be at least 0", remedy="")
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
