"""Reads the arguments that a shell script gives to a trainer, without starting any program.

A restricted bash runs the script with an empty search path, so that variables, arrays, conditions and loops
mean what they mean to a shell, and every program is a name that is not found. What bash hands to such a name
is read; nothing is written, and nothing leaves the folder of the script. The values that stay unknown are
named: the output of a program, and a variable that the script reads and does not set. ``$HOME`` stays a
mark, HOME.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemo_like.config.problems import ConfigError

# Stands for the home directory; Hydra's grammar allows no "~" in a bare value.
HOME = "@HOME@"
_TIMEOUT_S = 20
_CALL = re.compile(
    r"(?:\w+\.)+main_\w+|(?:.*/)?main_\w+\.py|(?:.*/)?\w*(?:grpo|ppo)\w*\.py|trl\.scripts\.grpo"
)
# What a word has instead of a text that is unknown: the command, or the name of the variable.
_OUTPUT, _UNSET = re.compile(r"@OUTPUT:([^@]*)@"), re.compile(r"@UNSET:(\w+)@")
_BLANK = "\x1f"  # stands for a blank in the command of _OUTPUT, so that it stays one word
_END = "\x1e"  # ends a call
_PREAMBLE = r"""
trap '' PIPE
command_not_found_handle() {
    [[ $1 == python* && $2 == -c && $3 == import* && $3 != *print* ]] && return 1
    case " $* " in *main_[a-z]*|*" trl "*|*trl.scripts*|*grpo*.py*|*ppo*.py*)
        printf '%s\0' "$@" $'\x1e' >&FD ;;
    esac
    local IFS=$'\x1f'
    printf '@OUTPUT:%s@' "${*//[ @]/$'\x1f'}" || :
}
cd() { :; }; source() { :; }; .() { :; }; exec() { "$@"; }; kill() { :; }
sleep() { :; }; ulimit() { :; }; mkdir() { :; }; tee() { :; }; nproc() { printf 1; }
dirname() { [[ $1 == */* ]] && printf '%s' "${1%/*}" || printf .; }
basename() { local name=${1##*/}; printf '%s' "${name%"$2"}"; }
"""
_WORD = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\$\([^)]*\)|[^\s;|&<>()"'])+"""
# What stays as it is, then what a restricted shell refuses: output into files, here-documents, search paths.
_PARTS = re.compile(
    rf"""
    (?P<kept> \(\(.*?\)\) | \[\[.*?\]\] | "(?:\\.|[^"\\])*" | '[^']*' | (?:^|(?<=\s))\#[^\n]* | \\. | <<< )
    | (?P<document> <<-?[ \t]*['"]?(\w+)['"]?[^\n]*\n(?:.*\n)*?[ \t]*\3[ \t]*(?:\n|\Z) )
    | (?:(?<=\s)\d|&)?>>?\|?[ \t]*(?:>\([^)]*\)|(?![&(]){_WORD})
    | ^[ \t]*(?:export[ \t]+)?(?:PATH|SHELL|ENV|BASH_ENV)=\S*[ \t]*$
    | (?:^|(?<=\s))[\w./~${{}}-]*/(?=(?:python[\d.]*|torchrun|accelerate|trl)\s)
    """,
    re.VERBOSE | re.MULTILINE,
)
_READ = re.compile(r"\$\{?([A-Za-z_]\w*)(:?[-+=])?")
_SET = re.compile(
    r"(?:^|[\s;(])(?:for\s+|read\s+|local\s+|declare\s+)?([A-Za-z_]\w*)(?:\+?=|\s+in\s)", re.MULTILINE
)
_CONDITION = re.compile(r"^\s*(?:if|elif|case|while|until)\b[^\n]*|\[\[? [^\n]*", re.MULTILINE)
_ARGUMENT = re.compile(r"[+~]*[A-Za-z_][\w.@/]*=")
_BASHS_OWN = re.compile(
    r"BASH\w*|RANDOM|SECONDS|PWD|OLDPWD|HOME|UID|EUID|PPID|OSTYPE|HOSTNAME|LINENO|IFS|PATH|SHELL"
)


@dataclass(slots=True)
class Script:
    """The call of a trainer in a script.

    ``program`` is the module or file that is called. ``arguments`` are its ``key=value`` words, ``options``
    its ``--name value …`` words by name, with "_" for "-"; ``launcher`` has those of the program that starts
    it, such as torchrun. ``unknown`` has the words whose value is not known, by their text, with the reason.
    """

    program: str
    arguments: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    launcher: dict[str, list[str]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def read_script(path: Path) -> Script:
    """Return the one call of a trainer, such as ``python3 -m verl.trainer.main_ppo …``.

    Raises ConfigError when the script has no such call, or several, or cannot be run through.
    """
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(str(path), f"cannot be read: {error}") from error
    unset = _unset(text)
    deciding = "\n".join(_CONDITION.findall(text))
    plain = _PARTS.sub(lambda part: part["kept"] or "\n" * bool(part["document"]), text)
    said, commands = _run(path, plain, unset)
    calls = [call for command in commands if (call := read_call(command))]
    if len(calls) != 1:
        rule = f"has {len(calls) or 'no'} calls of a trainer such as python3 -m verl.trainer.main_ppo"
        rule += f" where bash ends with: {said}" if said and not calls else ""
        remedy = "keep the one call in a copy" if calls else "give the script with the call, or a YAML file"
        remedy = (
            "put NAME=VALUE of what the script needs before the command" if said and not calls else remedy
        )
        raise ConfigError.of(str(path), rule, remedy)
    for name in unset:
        if re.search(rf"\$\{{?{name}\b", deciding):
            calls[0].unknown[f"${name}"] = "the script decides by it and does not set it"
    return calls[0]


def read_call(words: Sequence[str]) -> Script | None:
    """Return the call of a trainer in the words of a command; None when they have none."""
    for index, word in enumerate(words):
        is_trl = word == "trl" and words[index + 1 : index + 2] == ["grpo"]
        if is_trl or _CALL.fullmatch(word):
            found = script_of(word, words[index + 1 + is_trl :])
            found.launcher = _processes(script_of("", words[:index]).options)
            return found
    return None


def _processes(options: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return how many processes and machines accelerate or torchrun start, by accelerate's names."""
    numbers = {name: int(values[-1]) for name, values in options.items() if values and values[-1].isdigit()}
    machines = numbers.get("num_machines", numbers.get("nnodes"))
    each = numbers.get("nproc_per_node", 0) * (machines or 1)
    found = {"num_processes": numbers.get("num_processes") or each, "num_machines": machines}
    return {name: [str(number)] for name, number in found.items() if number}


def script_of(program: str, words: Sequence[str]) -> Script:
    """Return the call of a program with these words after its name."""
    found = Script(program)
    values: list[str] | None = None
    for word in words:
        if why := _unknown(word):
            is_value = values is not None and "=" not in word
            found.unknown[_readable(f"--{[*found.options][-1]}={word}" if is_value else word)] = why
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values = found.options.setdefault(name.replace("-", "_"), [])
            values += [value] if equals else []
        elif values is None or _ARGUMENT.match(word):
            found.arguments.append(word)
        else:
            values.append(word)
    return found


def _unknown(word: str) -> str:
    """Return why the value of a word is not known; empty when it is known."""
    if output := _OUTPUT.search(word):
        return f"$({output[1].replace(_BLANK, ' ')}), the output of a command"
    if unset := _UNSET.search(word):
        return f"${unset[1]}, which the script does not set"
    return ""


def _readable(word: str) -> str:
    """Return a word as the script may have it, with the commands and variables whose value is not known."""
    word = _OUTPUT.sub(lambda output: f"$({output[1].replace(_BLANK, ' ')})", word)
    return _UNSET.sub(r"$\1", word)


def _unset(text: str) -> list[str]:
    """Return the variables that a script reads, without a default, and neither it nor the shell sets."""
    has_default = {name for name, operator in _READ.findall(text) if operator}
    is_set = set(_SET.findall(text)) | has_default | os.environ.keys()
    names = dict.fromkeys(name for name, _ in _READ.findall(text))
    return [name for name in names if name not in is_set and not _BASHS_OWN.fullmatch(name)]


def _run(path: Path, text: str, unset: Sequence[str]) -> tuple[str, list[list[str]]]:
    """Return what bash said last of a script, and the words of the commands that may call a trainer."""
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError.of(str(path), "needs bash, which is not here", "give the key=value arguments alone")
    environment = {name: os.environ[name] for name, _ in _READ.findall(text) if name in os.environ}
    environment |= {name: f"@UNSET:{name}@" for name in unset}
    environment |= {"HOME": HOME, "PATH": os.devnull}
    with tempfile.TemporaryFile() as found, tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        script.write(f"{_PREAMBLE.replace('FD', str(found.fileno()))}\n{text}")
        script.flush()
        try:
            done = subprocess.run(
                [bash, "-r", script.name], check=False,
                cwd=path.resolve().parent, env=environment, pass_fds=(found.fileno(),), timeout=_TIMEOUT_S,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            rule = f"has not ended after {_TIMEOUT_S} s in a shell that starts no programs"
            raise ConfigError.of(str(path), rule, "keep the one call in a copy") from error
        found.seek(0)
        words = found.read().decode(errors="replace")
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if not line.startswith("+")]
    return (re.sub(r"^\S+: line \d+: ", "", lines[-1]) if lines else ""), list(_commands(words.split("\0")))


def _commands(words: Sequence[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in words:
        if word == _END:
            yield command
            command = []
        else:
            command.append(word)
