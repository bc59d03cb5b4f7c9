"""Conversions that the tables of several frameworks name.

A conversion is a function of another framework's value, of the whole configuration of that framework, and of
arguments in the table (``by: item, index: 0``). It returns the value for the key here; or LEFT_OUT, when
another key says it or nothing asks for it; or Noted. It may raise Untranslatable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from shlex import quote
from typing import Any, Final, NamedTuple

from nemo_like.policy.backends.backend_kind import Library
from nemo_like.policy.backends.library_arguments import KEYS, RELIED_ON


class Untranslatable(Exception):
    """A value of another framework has no counterpart. The text says why, and what to do instead."""


class LeftOut:
    """Stands for a value that is not set here, because another key says it or nothing asks for it."""


LEFT_OUT: Final = LeftOut()
# For grpo.max_num_steps of a run that its epochs shall end.
UNLIMITED_STEPS: Final = 1_000_000
# Layers that Megatron names, by their names in transformers.
MEGATRON_LAYERS: Final = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


class Noted(NamedTuple):
    """A converted value with a note for the user."""

    value: Any
    note: str


class Theirs:
    """A configuration of another framework, as a tree of plain values without interpolations.

    ``texts`` returns the text of a file that the configuration names, and None when there is no such file.
    ``origin`` says of a full key who set it: "by default", "in FILE" of a file on which the named one builds,
    or nothing. ``rows`` returns the number of problems in a data file, and None when the file is not here or
    cannot be counted.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        texts: Callable[[str], str | None] = lambda name: None,
        origin: Callable[[str], str] = lambda key: "",
        rows: Callable[[str], int | None] = lambda name: None,
    ) -> None:
        self.tree, self.texts, self.origin, self.rows = tree, texts, origin, rows

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return the value of a full key; ``default`` when the key is missing or null."""
        value: Any = self.tree
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return default if value is None or value == "???" else value


def unchanged(value: Any, theirs: Theirs) -> Any:
    """Return the value as it is."""
    return value


def elsewhere(value: Any, theirs: Theirs) -> Any:
    """Leave the value out: the conversion of another key reads it."""
    return LEFT_OUT


def either(value: Any, theirs: Theirs, then: Any, otherwise: Any = LEFT_OUT) -> Any:
    """Return ``then`` for a true value, and ``otherwise`` for any other."""
    return then if value else otherwise


def one_of(value: Any, theirs: Theirs, values: Mapping[Any, Any], remedy: str) -> Any:
    """Return the entry of ``values`` for the value; ``remedy`` is for a value without an entry."""
    if value not in values:
        raise Untranslatable(f"only {', '.join(map(str, values))} can be translated; {remedy}")
    return values[value]


def of_muon(value: Any, theirs: Theirs, key: str, otherwise: Any) -> Any:
    """Return the value of ``key``, by default ``otherwise``, where the optimizer is Muon; else leave it
    out."""
    return theirs(key, otherwise) if "muon" in str(value) else LEFT_OUT


def is_on(value: Any, theirs: Theirs, key: str) -> bool:
    """Return whether another key of their configuration is true, whatever this value is."""
    return bool(theirs(key, False))


def above_zero(value: Any, theirs: Theirs) -> bool:
    """Return whether a number is above 0; null counts as 0."""
    return int(value or 0) > 0


def positive_or(value: Any, theirs: Theirs, otherwise: int) -> int:
    """Return a number that is above 0, and ``otherwise`` for any other number or null."""
    return int(value) if above_zero(value, theirs) else otherwise


def or_no_item(value: Any, theirs: Theirs) -> Any:
    """Return a list; null becomes an empty list."""
    return value or []


def or_no_mapping(value: Any, theirs: Theirs) -> Any:
    """Return a mapping; null becomes an empty one."""
    return value or {}


def excluded(value: Any, theirs: Theirs) -> list[str]:
    """Return the layers without adapters, by the last part of their names."""
    names = [value] if isinstance(value, str) else list(value or [])
    if patterns := [name for name in names if not name.replace("_", "").isalnum()]:
        raise Untranslatable(f"{', '.join(patterns)} is a pattern; set policy.lora.exclude_modules")
    return names


def megatron_targets(value: Any, theirs: Theirs) -> list[str]:
    """Return the layers that get adapters, from Megatron's names."""
    if not value:
        return ["all-linear"]
    return [name for module in value for name in MEGATRON_LAYERS.get(module, (module,))]


def experts_divided(value: Any, theirs: Theirs, key: str, default: int) -> Any:
    """Return whether the GPUs of an engine divide its experts among them.

    ``key`` has the number of these GPUs, or else it is ``default``. Raises Untranslatable for another number
    of parts.
    """
    num_gpus = int(theirs(key, default))
    if value in (None, 1):
        return LEFT_OUT
    if int(value) != num_gpus:
        raise Untranslatable(
            f"experts are divided over the {num_gpus} GPUs of an engine or not at all; set "
            f"generation.vllm_cfg.tensor_parallel_size={value}, or leave experts whole"
        )
    return True


def by_hand(value: Any, theirs: Theirs, remedy: str, neutral: Sequence[Any] = (None, False)) -> Any:
    """Leave out a value in ``neutral``; any other must be written anew, as ``remedy`` says."""
    if value in neutral:
        return LEFT_OUT
    raise Untranslatable(remedy)


def unless_null(value: Any, theirs: Theirs) -> Any:
    """Return the value; null is left out."""
    return LEFT_OUT if value is None else value


def engine_arguments(value: Any, theirs: Theirs) -> Any:
    """Return vLLM's arguments without those that keys here set, or that a run here settles itself."""
    given = dict(value or {})
    keys, reasons = KEYS[Library.vllm], RELIED_ON[Library.vllm]
    left_out = [f"{name} is set by {keys[name]}" for name in given if name in keys]
    left_out += [f"{name} {reasons[name]}" for name in given if name in reasons]
    kept = {name: each for name, each in given.items() if name not in keys and name not in reasons}
    if left_out:
        return Noted(kept, f"without what has no place here: {'; '.join(left_out)}")
    return kept or LEFT_OUT


def null_without(value: Any, theirs: Theirs) -> Any:
    """Return a coefficient; 0 becomes null, with which its term is not computed."""
    return value or None


def unless_equal(value: Any, theirs: Theirs, key: str) -> Any:
    """Return the value; it is left out when it equals the value of another key."""
    return LEFT_OUT if value == theirs(key) else value


def unless_set(value: Any, theirs: Theirs, key: str) -> Any:
    """Return the value; it is left out when another key, which would win, has a value."""
    return LEFT_OUT if theirs(key) is not None else value


def without(value: Any, theirs: Theirs, key: str) -> Any:
    """Return the value; it is left out when it is null, and when another key is true."""
    return LEFT_OUT if value is None or theirs(key, False) else value


def item(value: Any, theirs: Theirs, index: int) -> Any:
    """Return one item of a list."""
    return value[index]


def is_listed(value: Any, theirs: Theirs, name: str, then: Any, otherwise: Any) -> Any:
    """Return ``then`` when a list, or a single name, contains ``name``; else ``otherwise``."""
    names = [value] if isinstance(value, str) else value or []
    return then if name in names else otherwise


def period(value: Any, theirs: Theirs) -> int:
    """Return a period in steps; 0 means never, for which they write null or a number below 1."""
    return max(0, int(value or 0))


def all_tokens(value: Any, theirs: Theirs) -> int | None:
    """Return top_k; null means all tokens, for which they write null, 0 or -1."""
    return None if value is None or int(value) < 1 else int(value)


def several_nodes(value: Any, theirs: Theirs) -> Any:
    """Return the address of the Ray cluster that a run on several nodes joins; one node needs none."""
    return "auto" if int(value) > 1 else LEFT_OUT


def other_checkpoint(value: Any, theirs: Theirs) -> Any:
    """Return nothing where no checkpoint is named. Raises Untranslatable for one, whose form is theirs."""
    if isinstance(value, str):
        raise Untranslatable(
            f"{value} is a checkpoint of another form; name one that a run here wrote, or begin from its "
            "weights as a Hugging Face directory in policy.model_name"
        )
    return LEFT_OUT


def path(value: Any, theirs: Theirs) -> str:
    """Return a path; a leading "~" becomes the environment variable HOME, which any machine can resolve."""
    text = str(value)
    return f"${{oc.env:HOME}}{text[1:]}" if text.startswith("~/") else text


def model_directory(value: Any, theirs: Theirs, revision: str = "") -> Any:
    """Return the directory of a model; for a name on the hub, the directory that recipes here use for it.

    ``revision`` is the key of their configuration that names a branch, tag or commit on the hub.
    """
    name = str(value)
    if len(PurePath(name).parts) != 2 or name.startswith((".", "/", "~")):
        return path(name, theirs)
    directory = f"models/{PurePath(name).name}"
    chosen = str(theirs(revision, "main")) if revision else "main"
    option, at = ("", "") if chosen == "main" else (f" --revision {quote(chosen)}", f"@{chosen}")
    download = f"hf download {quote(name)}{option} --local-dir {quote(directory)}"
    return Noted(
        directory, f"get it by {download} (for a plan its config.json is enough), or write {name}{at}"
    )
