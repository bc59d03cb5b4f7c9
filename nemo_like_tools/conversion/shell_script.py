"""Reads the arguments that a shell script gives to verl's trainer, without running the script.

Variables and arrays that the script sets to plain values are put in, also by ``${NAME:-default}`` and
``$((arithmetic))``. What only a shell can know is named: the output of a command, a variable of the
environment, one that is set under a condition. ``$HOME`` stays a mark, HOME.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

from nemo_like.config.problems import ConfigError

# Stands for the home directory; Hydra's grammar allows no "~" in a bare value.
HOME = "@HOME@"
_CALL = re.compile(r"(?:\w+\.)+main_\w+|(?:.*/)?main_\w+\.py")
_REDIRECTION = re.compile(r"\d*(?:>&\d|(?:&>>?|>>|>|<<<|<(?!<))[ \t]*)")
_HERE = re.compile(r"<<-?[ \t]*['\"]?(\w+)['\"]?[^\n]*\n(?:.*\n)*?[ \t]*\1[ \t]*(?:\n|$)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"([A-Za-z_]\w*|[@*#?!$]|\d+)(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_BLANK, _SEPARATORS = " \t\r", "\n;&|()"
_OPENING, _CLOSING = ("if", "for", "while", "until", "case", "select", "{"), ("fi", "done", "esac", "}")
_BEFORE_A_COMMAND = ("if", "then", "else", "elif", "do", "while", "until", "!", "{", "exec", "eval")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


class _Unknown(Exception):
    """A value that only running the script would tell. The text says which."""


# The words of variables by name; one whose value cannot be known has an _Unknown.
_Scope = dict[str, list[str] | _Unknown]


@dataclass(slots=True)
class Script:
    """The call of a trainer in a script: its key=value arguments, the name of its configuration, and the
    words whose value cannot be known, by their text with the reason."""

    arguments: list[str] = field(default_factory=list)
    config_name: str = ""
    unknown: dict[str, str] = field(default_factory=dict)


def read_script(path: Path) -> Script:
    """Return the arguments of the one call of a trainer, ``python3 -m verl.trainer.main_ppo …``.

    Raises ConfigError when the script has no such call, or several.
    """
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(str(path), f"cannot be read: {error}") from error
    scope: _Scope = {"HOME": [HOME]}
    calls: list[Script] = []
    depth = 0
    for command in _commands(text):
        depth += (command[0] in _OPENING) - (command[0] in _CLOSING)
        words = list(dropwhile(_BEFORE_A_COMMAND.__contains__, command))
        if all(_ASSIGNMENT.fullmatch(word) for word in words) or words[0] in _DECLARING:
            for word in words:
                _assign(word, scope, is_certain=depth == 0)
        elif call := _call(words, scope):
            calls.append(call)
    if len(calls) != 1:
        rule = f"has {len(calls) or 'no'} calls of a trainer such as python3 -m verl.trainer.main_ppo"
        remedy = "keep the one call in a copy" if calls else "give the script with the call, or a YAML file"
        raise ConfigError.of(str(path), rule, remedy)
    return calls[0]


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, with their quotes and variables as they are written."""
    words: list[str] = []
    at = 0
    while at < len(text):
        if (here := _HERE.match(text, at)) or (here := _REDIRECTION.match(text, at)):
            is_file = here.re is _REDIRECTION and not here[0][-1].isdigit()
            at = _end_of_word(text, here.end()) if is_file else here.end()
        elif text[at] in _SEPARATORS:
            if words:
                yield words
            words, at = [], at + 1
        elif text[at] in _BLANK or _is_comment(text, at):
            at = _after(text, at)
        else:
            end = _end_of_word(text, at)
            words.append(text[at:end])
            at = end
    if words:
        yield words


def _is_comment(text: str, at: int) -> bool:
    return text[at] == "#" and (at == 0 or text[at - 1] in f"{_BLANK}{_SEPARATORS}")


def _end_of_word(text: str, at: int) -> int:
    start = at
    while at < len(text) and text[at] not in f"{_BLANK}\n;&|)<>":
        if text[at] != "(":
            at = _after(text, at)
        elif at > start and text[at - 1] == "=":
            at = _closed(text, at + 1, "(", ")")
        else:
            break
    return at


def _after(text: str, at: int) -> int:
    """Return the place after one character, or after the quoted text, expansion or comment that begins."""
    rest = text[at : at + 2]
    if rest[0] == "\\":
        return min(at + 2, len(text))
    if rest[0] == '"':
        at += 1
        while at < len(text) and text[at] != '"':
            at = _after(text, at) if text[at] in "\\$`" else at + 1
        return min(at + 1, len(text))
    if rest[0] in "'`":
        return (text.find(rest[0], at + 1) + 1) or len(text)
    if rest in ("$(", "${"):
        return _closed(text, at + 2, rest[1], ")" if rest[1] == "(" else "}")
    if rest[0] == "$" and (name := re.compile(r"[A-Za-z_]\w*|[@*#?!$\d]").match(text, at + 1)):
        return name.end()
    if _is_comment(text, at):
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    return at + 1


def _closed(text: str, at: int, opening: str, closing: str) -> int:
    """Return the place after the bracket that closes the one before ``at``."""
    depth = 1
    while at < len(text) and depth:
        depth += (text[at] == opening) - (text[at] == closing)
        at = _after(text, at)
    return at


def _assign(word: str, scope: _Scope, *, is_certain: bool) -> None:
    match = _ASSIGNMENT.fullmatch(word)
    if match is None:
        return
    name, is_appended, text = match[1], bool(match[2]), match[3]
    before = scope.get(name, []) if is_appended else []
    try:
        if not is_certain:
            raise _Unknown(f"${name}, which the script sets under a condition")
        if isinstance(before, _Unknown):
            raise before
        if text.startswith("("):
            words = [each for line in _commands(text[1:-1]) for each in line]
            scope[name] = [*before, *(part for each in words for part in _expanded(each, scope))]
        else:
            whole = "".join(before) + " ".join(_expanded(text, scope, splits=False))
            scope[name] = [f"{HOME}{whole[1:]}" if whole.startswith("~/") else whole]
    except _Unknown as error:
        scope[name] = error


def _call(words: list[str], scope: _Scope) -> Script | None:
    """Return a call of a trainer in a command, or None when the command is something else."""
    parts: list[str | _Unknown] = []
    unknown: dict[str, str] = {}
    for word in words:
        try:
            parts += _expanded(word, scope)
        except _Unknown as error:
            unknown[word] = str(error)
    start = next((at for at, part in enumerate(parts) if _CALL.fullmatch(str(part))), None)
    if start is None:
        return None
    script = Script(unknown={word: why for word, why in unknown.items() if "=" in word or "$" in word[:2]})
    given = iter(map(str, parts[start + 1 :]))
    for part in given:
        option, equals, value = part.partition("=")
        if option in ("--config-name", "--config-path", "-cn", "-cp"):
            value = value if equals else next(given, "")
            script.config_name = value if option in ("--config-name", "-cn") else script.config_name
        elif (equals and not part.startswith("-")) or part.startswith("~"):
            script.arguments.append(part)
    return script


def _expanded(word: str, scope: _Scope, *, splits: bool = True) -> list[str]:
    """Return the words that the shell makes of a word: one, none, or several of an array.

    With ``splits``, the value of a variable outside of quotes is divided at its blanks.
    """
    found = [""]
    for unit in _units(word):
        if unit[0] == '"':
            parts = [""]
            for inner in _units(unit[1:-1], quotes="\\$`"):
                _append(parts, _value(inner, scope) if _is_expansion(inner) else [_bare(inner)])
        elif _is_expansion(unit):
            parts = _value(unit, scope)
            parts = [each for part in parts for each in part.split()] if splits else parts
        else:
            parts = [unit[1:-1] if unit[0] == "'" else _bare(unit)]
        _append(found, parts)
    return [text for text in found if text]


def _append(found: list[str], parts: list[str]) -> None:
    """Continue the last of the words found with the first part; further parts are further words."""
    found[-1] += "".join(parts[:1])
    found += parts[1:]


def _units(text: str, quotes: str = "\\$`\"'") -> Iterator[str]:
    """Yield the characters of a text; one of ``quotes`` begins a longer unit."""
    at = 0
    while at < len(text):
        end = _after(text, at) if text[at] in quotes else at + 1
        yield text[at:end]
        at = end


def _is_expansion(unit: str) -> bool:
    return len(unit) > 1 and unit[0] in "$`"


def _bare(unit: str) -> str:
    """Return a unit without the backslash that protects a character from the shell."""
    return unit[1:] if unit[0] == "\\" and unit[1:] in ("\\", '"', "$", "`", "'", " ") else unit


def _value(unit: str, scope: _Scope) -> list[str]:
    """Return the words for which an expansion stands. Raises _Unknown when only a shell can tell."""
    if unit.startswith("$((") and unit.endswith("))"):
        return [str(_computed(unit[3:-2], scope))]
    if unit.startswith(("$(", "`")):
        raise _Unknown(f"{unit}, the output of a command")
    reference = _REFERENCE.fullmatch(unit[2:-1] if unit.startswith("${") else unit[1:])
    if reference is None:
        raise _Unknown(f"{unit}, which only a shell expands")
    name, _, kind, default = reference.groups()
    if name in ("@", "*"):
        return []
    value = scope.get(name)
    if kind and kind.endswith(("-", "=")) and (value is None or value in ([], [""])):
        return [" ".join(_expanded(default, scope, splits=False))]
    if isinstance(value, _Unknown):
        raise value
    if value is None:
        raise _Unknown(f"{unit}, which the script does not set")
    return list(value) if reference[2] else value[:1]


def _computed(text: str, scope: _Scope) -> int:
    """Return the value of an arithmetic expression of whole numbers and variables."""

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return int(_ARITHMETIC[type(node.op)](of(node.left), of(node.right)))
        if isinstance(node, ast.Name):
            return of(ast.parse("".join(_value(f"${node.id}", scope)), mode="eval").body)
        raise _Unknown(f"$(({text})), which is no arithmetic of whole numbers")

    try:
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()
        return of(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError) as error:
        raise _Unknown(f"$(({text})), which is no arithmetic of whole numbers") from error
