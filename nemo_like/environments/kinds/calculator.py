"""A tool in text: calls of a calculator are found in the response and answered; the rest is an answer.

Expressions are evaluated by this module. The package simpleeval takes twice the time (20 against 10 µs), and
would need the same bounds around it: it computes ``9 ** 999999`` (157 ms), takes True for 1, and compares.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.kind import Kind
from nemo_like.environments.latex_quantities import plain_quantity
from nemo_like.environments.per_turn import PerTurnEnvironment, extract_answer

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_MAX_CHARACTERS = 200
_MAX_EXPONENT = 64
_MAX_MAGNITUDE = 1e100


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


KIND = Kind(
    about="The environment answers calls of a calculator. A response without a call is the "
    "final answer: the reward is 1 when it is the reference answer; else 0.",
    reward="1 for the right answer in the last turn; calls of the tool before it are answered",
    example="`{call_pattern: '<calculator>(.*?)</calculator>'}`",
    options=CalculatorOptions,
    base={
        "batch_size": Key("no conversation waits for another", 1),
        "max_turns": Key("", 4),
        "observation_role": Key("", "tool"),
        "sampling": Key("a call of the calculator ends the turn", {"stop_strings": ["</calculator>"]}),
    },
    judge="nemo_like.environments.kinds.calculator:calculator",
    answers=True,
    record_check="nemo_like.environments.record_needs:answer",
)


def calculator(options: CalculatorOptions) -> PerTurnEnvironment:
    """Make the environment; configs/env/calculator.yaml explains its options."""
    return PerTurnEnvironment(partial(_judge, options=options))


def _judge(turn: Turn, options: CalculatorOptions) -> Feedback:
    """Answer the last call of the calculator in a response, or judge a response without a call."""
    expression = extract_answer(turn.response, options.call_pattern)
    if expression is not None:
        result = options.result_template.replace("{result}", evaluate(expression))
        return Feedback(
            {"correct": 0.0}, observation=result, is_done=turn.is_last, metrics={"calls_per_turn": 1.0}
        )
    answer = extract_answer(turn.response, options.answer_pattern)
    is_correct = (
        not turn.is_truncated
        and answer is not None
        and plain_quantity(answer.strip()) == plain_quantity(turn.answer.strip())
    )
    return Feedback({"correct": float(is_correct)}, metrics={"calls_per_turn": 0.0})


def evaluate(expression: str) -> str:
    """Return an expression's value as text, or "error: ..."; whole numbers have no decimal point."""
    try:
        if len(expression) > _MAX_CHARACTERS:
            raise ValueError(f"more than {_MAX_CHARACTERS} characters")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError) as error:
        return f"error: {'no expression' if isinstance(error, SyntaxError) else error}"
    return str(int(value)) if value == int(value) else repr(value)


def _value(node: ast.expr) -> Number:
    """Compute a node's value.

    Raises ValueError for anything but bounded numbers and operators, ArithmeticError as Python does.
    """
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_EXPONENT:
            raise ValueError(f"an exponent above {_MAX_EXPONENT}")
        value = _BINARY[type(node.op)](left, right)
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses")
    if isinstance(value, complex) or abs(value) > _MAX_MAGNITUDE:
        raise ValueError("the result is out of range")
    return value
