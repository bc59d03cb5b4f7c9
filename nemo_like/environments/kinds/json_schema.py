"""The kind ``json_schema``: JSON that follows a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

import jsonschema
from jsonschema.protocols import Validator

from nemo_like.config.keys import Key
from nemo_like.data.interface import TaskPrompt
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.kind import Kind, RecordCheck
from nemo_like.environments.per_turn import PerTurnEnvironment, extract_answer
from nemo_like.environments.record_needs import field_of


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


def has_schema(options: JsonSchemaOptions) -> RecordCheck:
    def check(task_prompt: TaskPrompt) -> None:
        schema = options.schema
        if schema is None:
            schema = field_of(task_prompt, options.schema_key, "options.schema_key")
        try:
            schema_validator(schema)
        except Exception as error:
            raise ValueError(f"no JSON schema: {error}") from error

    return check


KIND = Kind(
    about="The reward is 1 when the response is JSON that a schema accepts; else 0. The "
    "metric `parses` says whether it is JSON at all.",
    reward="1 for JSON that the schema accepts",
    example="`{schema: {type: object, required: [age]}}`, or `{schema_key: schema}` for one per example",
    options=JsonSchemaOptions,
    judge="nemo_like.environments.kinds.json_schema:json_schema",
    record_check="nemo_like.environments.kinds.json_schema:has_schema",
)


def json_schema(options: JsonSchemaOptions) -> PerTurnEnvironment:
    """Make the environment. Raises jsonschema.SchemaError when ``options.schema`` is no valid schema."""
    if options.schema is not None:
        schema_validator(options.schema)
    return PerTurnEnvironment(partial(_judge, options=options))


def _judge(turn: Turn, options: JsonSchemaOptions) -> Feedback:
    """Give the reward ``valid``, 1 when the schema accepts the answer, and the metric ``parses``."""
    schema = turn.data[options.schema_key] if options.schema is None else options.schema
    validator = schema_validator(schema)
    found = extract_answer(turn.response, options.answer_pattern)
    try:
        answer = json.loads(found or "")
        is_valid = validator.is_valid(answer)
    except (json.JSONDecodeError, RecursionError):  # no JSON, or nested too deeply to be read or compared
        return Feedback({"valid": 0.0}, metrics={"parses": 0.0})
    return Feedback({"valid": float(is_valid)}, metrics={"parses": 1.0})


def schema_validator(schema: Any) -> Validator:
    """Return the validator of a schema, which is a mapping or JSON text.

    Raises ValueError for text that is no JSON, jsonschema.SchemaError for an invalid schema.
    """
    return _validator(json.dumps(schema) if isinstance(schema, Mapping) else str(schema))


@cache
def _validator(schema: str) -> Validator:
    parsed: Any = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed)
    kind.check_schema(parsed)
    return kind(parsed)
