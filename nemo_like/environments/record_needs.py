"""What each kind of environment needs of a problem, so that data that lack it are found before a run.

Kinds that are not here need nothing that could be checked: f1 takes an empty reference, and nobody knows what
other people's functions, classes and servers need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nemo_like.data.interface import PromptExample
from nemo_like.environments.hub import EPISODE_KEY
from nemo_like.environments.kind_options import (
    HUB_MODULES,
    JudgeOptions,
    RewardModelOptions,
    options_of,
)
from nemo_like.environments.options import EnvConfig, EnvironmentKind

Check = Callable[[PromptExample], None]

# How many answers or tests a check parses: each takes milliseconds, and a mistake is usually in all of them.
_NUM_PARSED = 1000


def check_of(env: EnvConfig) -> Check:
    """Return a function that raises ValueError for a problem that this environment could not judge."""
    make = _CHECKS.get(env.kind)
    return _needs_nothing if make is None else make(options_of(env))


def _needs_nothing(example: PromptExample) -> None:
    """Accept every problem."""


def _answer(options: Any) -> Check:
    def check(example: PromptExample) -> None:
        if not example.answer.strip():
            raise ValueError("the reference answer is empty")

    return check


def _expression(options: Any) -> Check:
    from nemo_like.environments.verifiers import reference_expression

    has_answer, num_parsed = _answer(options), 0

    def check(example: PromptExample) -> None:
        nonlocal num_parsed
        has_answer(example)
        if num_parsed < _NUM_PARSED:
            num_parsed += 1
            reference_expression(example.answer)

    return check


def _answer_if_asked(options: JudgeOptions) -> Check:
    return _answer(options) if "{answer}" in options.prompt else _needs_nothing


def _conversation(options: RewardModelOptions) -> Check:
    """Render the reference answers as responses, since chat templates refuse or leave out some roles.

    Nothing is checked with a reward model that cannot be used: another check tells why.
    """
    from nemo_like.environments.reward_model import ConversationEncoder

    try:
        encoder = ConversationEncoder(options)
    except ValueError:
        return _needs_nothing
    num_rendered = 0

    def check(example: PromptExample) -> None:
        nonlocal num_rendered
        if num_rendered < _NUM_PARSED:
            num_rendered += 1
            encoder.rendered(example.prompt, example.answer)

    return check


def _tests(options: Any) -> Check:
    from nemo_like.environments.inside.by_value import functions_called
    from nemo_like.environments.inside.remote_program import RefusedTests

    num_parsed = 0

    def check(example: PromptExample) -> None:
        nonlocal num_parsed
        tests = _value(example, options.tests_key, "options.tests_key")
        if not tests:
            raise ValueError(f"the field {options.tests_key!r} (options.tests_key) has no tests")
        if isinstance(tests, str) and not options.share_objects and num_parsed < _NUM_PARSED:
            num_parsed += 1
            try:
                functions_called(tests)
            except RefusedTests as refused:
                raise ValueError(
                    f"the tests in the field {options.tests_key!r} cannot be run by value: {refused}; change "
                    "them, or set options.share_objects=true"
                ) from None

    return check


def _schema(options: Any) -> Check:
    from nemo_like.environments.json_schema import schema_validator

    def check(example: PromptExample) -> None:
        schema = options.schema
        if schema is None:
            schema = _value(example, options.schema_key, "options.schema_key")
        try:
            schema_validator(schema)
        except Exception as error:
            raise ValueError(f"no JSON schema: {error}") from error

    return check


def _metadata(options: Any) -> Check:
    def check(example: PromptExample) -> None:
        metadata = _value(example, "metadata", "reasoning-gym's own")
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            raise ValueError("the field 'metadata' does not name its reasoning-gym dataset (source_dataset)")

    return check


def _board(options: Any) -> Check:
    from nemo_like.environments.sliding_puzzle import slide

    def check(example: PromptExample) -> None:
        slide(str(_value(example, options.board_key, "options.board_key")), "")

    return check


def _episode(options: Any) -> Check:
    def check(example: PromptExample) -> None:
        _value(example, EPISODE_KEY, "which data.*.kind=environment makes")

    return check


def _value(example: PromptExample, key: str, meaning: str) -> Any:
    if key not in example.data:
        there = ", ".join(map(repr, sorted(example.data))) or "none besides prompt and answer"
        raise ValueError(f"no field {key!r} ({meaning}), which the environment needs; there are: {there}")
    return example.data[key]


_CHECKS: dict[EnvironmentKind, Callable[[Any], Check]] = {
    EnvironmentKind.arithmetic: _answer,
    EnvironmentKind.exact_match: _answer,
    EnvironmentKind.calculator: _answer,
    EnvironmentKind.math_verify: _expression,
    EnvironmentKind.reasoning_gym: _metadata,
    EnvironmentKind.json_schema: _schema,
    EnvironmentKind.code: _tests,
    EnvironmentKind.reward_model: _conversation,
    EnvironmentKind.judge: _answer_if_asked,
    EnvironmentKind.preference: _answer,
    EnvironmentKind.sliding_puzzle: _board,
    **dict.fromkeys(HUB_MODULES, _episode),
}
