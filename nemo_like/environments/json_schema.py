"""The environment that rewards JSON which follows a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jsonschema
from jsonschema.protocols import Validator

from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.kind_options import JsonSchemaOptions
from nemo_like.environments.per_turn import PerTurnEnvironment, extract_answer


def json_schema(options: JsonSchemaOptions) -> PerTurnEnvironment:
    """Make the environment. Raises jsonschema.SchemaError when ``options.schema`` is no schema."""
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

    Raises ValueError for text that is no JSON, jsonschema.SchemaError for what is no schema.
    """
    return _validator(json.dumps(schema) if isinstance(schema, Mapping) else str(schema))


@cache
def _validator(schema: str) -> Validator:
    parsed: Any = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed)
    kind.check_schema(parsed)
    return kind(parsed)
