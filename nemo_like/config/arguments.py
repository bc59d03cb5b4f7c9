"""The arguments of a command line: checked against the schema and the files, and rewritten as Hydra takes
them.

Arguments follow Hydra's grammar. Three rules are more lenient than Hydra's, so that nobody must read the
files before writing an argument: ``key=value`` also sets a key that only the schema has; ``group=name`` also
chooses from a group that the file's defaults do not name; ``~key`` sets a key or group to null where the
schema allows null. One rule is stricter: a mapping or list replaces the earlier value instead of merging with
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, get_origin

from hydra.errors import HydraException

from nemo_like.config import fields
from nemo_like.config.composition import Composition, Layer, nested
from nemo_like.config.earlier_keys import newer_keys
from nemo_like.config.grammar import Override, alternatives
from nemo_like.config.keys import MISSING
from nemo_like.config.problems import ConfigError, Problem

_REMOVED = object()  # stands in a layer for the value of a key that was removed
_ABSENT = object()  # the layer does not mention the key
_FORMS = "key=value, +key=value, ++key=value or ~key"
_SEARCH_PATH = "hydra.searchpath"


@dataclass(slots=True)
class Arguments:
    """The arguments of one run or sweep after reading them.

    ``root`` is the class of the whole configuration. ``given`` has, for each argument, the arguments that
    Hydra takes for it; ``values`` has all of these that set or remove a value. ``files`` has one layer per
    file; ``layers`` continues it with one layer per argument, and a later layer wins. ``problems`` has what
    is wrong with the files and the arguments.
    """

    root: type
    given: list[list[str]] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    files: list[Layer] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def for_hydra(self) -> list[str]:
        """All arguments as Hydra takes them, in the order of the command line."""
        return [text for texts in self.given for text in texts]

    def source_of(self, key: str, otherwise: str) -> str:
        """Return the file or argument that set a full key last, or ``otherwise`` when none set it."""
        names = key.partition("=")[0].partition("[")[0].split(".")
        found = (layer.where for layer in reversed(self.layers) if _at(layer.tree, names) is not _ABSENT)
        return next(found, otherwise)

    def was_replaced(self, key: str, naming: str, name: str) -> bool:
        """Return whether a file set ``key`` last, while the key ``naming`` had another value than its present
        ``name``.

        For example, a file sets a key of ``loss_fn.kind=a``, and a later file or an argument sets
        ``loss_fn.kind=b``.
        """
        path, naming_path = key.split("."), naming.split(".")
        indexes = [index for index, one in enumerate(self.layers) if _at(one.tree, path) is not _ABSENT]
        if not indexes or indexes[-1] >= len(self.files):
            return False
        named = [_at(layer.tree, naming_path) for layer in self.layers[: indexes[-1] + 1]]
        return next((one for one in reversed(named) if one is not _ABSENT), name) != name

    def is_removed(self, group: str) -> bool:
        """Return whether the last file or argument that set the group ``group`` made it null."""
        return _current(group, self.layers) is None


def read_arguments(
    files: Composition, texts: Sequence[str], root: type, *, is_sweep: bool = False
) -> Arguments:
    """Read and check the arguments ``texts`` of one run or, with ``is_sweep``, of several runs.

    In a sweep an argument may give a key several alternatives. Raises ConfigError when Hydra cannot compose
    the files with the chosen groups, or an entry lacks its name; other problems are in the result.
    """
    read = Arguments(root)
    parsed = list(_parsed(texts, files, read.problems))
    read.given = [[] for _ in parsed]
    pairs = list(zip(parsed, read.given, strict=True))
    for argument, given in pairs:
        if argument.is_hydra_override():
            given.extend(_read_hydra(argument, read, files, is_sweep))
    for argument, given in pairs:
        if _is_removal(argument, root):
            given.extend(_read_removal(argument, read, files, is_sweep))
        elif _is_choice(argument, files):
            given.extend(_read_choice(argument, read, files, is_sweep))
    if unnamed := list(_unnamed_entries(files, root)):
        raise ConfigError(unnamed)
    read.files = files.layers(files.first_alternatives(read.for_hydra))
    if len(read.files) == 1:
        (file,) = read.files
        newer = newer_keys(file.tree, root, file.where, files.default_of)
        read.files.insert(0, Layer(file.where, newer))
    read.layers = [*read.files]
    values = [one for one, _ in pairs if not (one.is_hydra_override() or one.is_delete())]
    set_by_values = (nested(one.key_or_group, value) for one in values for value in alternatives(one))
    for tree in (*(layer.tree for layer in read.files), *set_by_values):
        fields.load_kinds(tree, root)
    for layer in read.layers:
        read.problems += fields.check_tree(layer.tree, root, layer.where, root=root)
    for argument, given in pairs:
        if _is_removal(argument, root):
            read.layers.append(Layer(_where(argument.input_line), {argument.key_or_group: None}))
        elif not argument.is_hydra_override() and not _is_choice(argument, files):
            given.extend(_read_value(argument, read, is_sweep))
            read.values.extend(given)
    return read


def _parsed(texts: Sequence[str], files: Composition, problems: list[Problem]) -> Iterator[Override]:
    for text in texts:
        try:
            if not text.partition("=")[0]:
                raise HydraException("no key")
            yield files.parse(text)
        except HydraException:
            remedy = f"write {_FORMS}, without spaces around =, and quote values with special characters"
            problems.append(Problem(key=_where(text), rule="cannot be read", remedy=remedy))


def _where(text: str | None) -> str:
    return f"argument {text!r}"


# Hydra's own settings


def _read_hydra(argument: Override, read: Arguments, files: Composition, is_sweep: bool) -> list[str]:
    key, value = argument.key_or_group, argument.value()
    if (
        key == _SEARCH_PATH
        and isinstance(value, list)
        and all(isinstance(location, str) for location in value)
    ):
        files.search(value)
        return []
    if key == _SEARCH_PATH:
        rule, remedy = f"cannot be {value!r}", f"give a list of folders: {_SEARCH_PATH}=[/path/to/folder]"
    elif is_sweep:
        return [str(argument.input_line)]
    else:
        rule, remedy = "is a setting of Hydra's for several runs", "add --multirun"
    read.problems.append(Problem(key=key, rule=rule, remedy=remedy, where=_where(argument.input_line)))
    return []


# Choices among groups


def _is_choice(argument: Override, files: Composition) -> bool:
    """Return whether the argument chooses a configuration of a group: policy=fsdp, env@env.math=f1."""
    if argument.is_hydra_override():
        return False
    if argument.package is not None or "/" in argument.key_or_group:
        return True
    if argument.is_delete() or "." in argument.key_or_group:
        return False
    is_name = all(isinstance(value, str) for value in alternatives(argument))
    return is_name and bool(files.options(argument.key_or_group))


def _read_choice(argument: Override, read: Arguments, files: Composition, is_sweep: bool) -> list[str]:
    if found := _refuse_choice(argument, files, read.root, is_sweep):
        read.problems += found
        return []
    text = str(argument.input_line).lstrip("+")
    group = argument.key_or_group + (f"@{argument.package}" if argument.package else "")
    is_known = argument.is_delete() or group in files.choices()
    return [text if is_known else f"+{text}"]


def _refuse_choice(argument: Override, files: Composition, root: type, is_sweep: bool) -> list[Problem]:
    group, where = argument.key_or_group, _where(argument.input_line)
    if argument.is_sweep_override() and not is_sweep:
        return [_one_value(argument)]
    options = files.options(group)
    if not options:
        rule = "is not a group of configurations"
        return [Problem(key=group, rule=rule, remedy="choose one that configs/ has", where=where)]
    if argument.package is None and _is_mapping(fields.find(root, group)):
        rule = "has entries with names of their own"
        remedy = f"choose for one of them: {group}@{group}.NAME=..."
        return [Problem(key=group, rule=rule, remedy=remedy, where=where)]
    problems = []
    for name in [] if argument.is_delete() else alternatives(argument):
        for each in name if isinstance(name, list) else [name]:
            if each not in options:
                close = get_close_matches(str(each), options, n=1, cutoff=0.6)
                remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(options)}"
                remedy = _meant(group, str(each), root) or remedy
                rule = f"must be a configuration of the group {group}"
                problems.append(Problem(key=f"{group}={each}", rule=rule, remedy=remedy, where=where))
    return problems


def _meant(group: str, name: str, root: type) -> str:
    """Return what is written for a kind that the field calls ``name``; empty for a name that it has not."""
    annotation = fields.find(root, group)
    kinds = fields.kinds_of(annotation) if fields.is_group(annotation) else None
    return kinds.meant(name) if kinds else ""


def _unnamed_entries(files: Composition, root: type) -> Iterator[Problem]:
    """Yield a problem for each configuration that defaults put where entries have names: `- env: f1`."""
    for group in (name for name, annotation in fields.hints(root).items() if fields.entry_group(annotation)):
        for config_path, file in files.placed_at(group):
            name = config_path.rpartition("/")[2]
            rule = "in the defaults gives no name to its entry"
            remedy = f"write `- {group}@{group}.NAME: {name}`, and NAME as you like"
            yield Problem(key=f"`- {group}: {name}`", rule=rule, remedy=remedy, where=str(file))


def _is_removal(argument: Override, root: type) -> bool:
    """Return whether the argument removes an optional group: ~value, value=null."""
    key = argument.key_or_group
    annotation = None if argument.package or "." in key else fields.find(root, key)
    is_group = fields.is_group(fields.without_none(annotation)) and fields.is_optional(annotation)
    return is_group and (argument.is_delete() or list(alternatives(argument)) == [None])


def _read_removal(argument: Override, read: Arguments, files: Composition, is_sweep: bool) -> list[str]:
    """Return the arguments that make Hydra remove a group.

    Hydra removes only groups that the defaults chose. Keys of the group in the file itself become null later.
    """
    group = argument.key_or_group
    is_chosen = group in files.choices()
    if is_sweep and not is_chosen and any(group in layer.tree for layer in files.layers([])):
        rule = "cannot be removed in a sweep, since the file itself has its keys"
        remedy = "leave the group out of the file, or start single runs"
        problem = Problem(key=group, rule=rule, remedy=remedy, where=_where(argument.input_line))
        read.problems.append(problem)
    return [f"~{group}"] if is_chosen else []


# Values


def _read_value(argument: Override, read: Arguments, is_sweep: bool) -> list[str]:
    """Check an argument that sets or removes a value, add its layer to ``read``, and return Hydra's form."""
    key, where = argument.key_or_group, _where(argument.input_line)
    annotation = fields.find(read.root, key)
    if annotation is None:
        found = [fields.unknown_key(key, where, root=read.root)]
    elif argument.is_sweep_override() and not is_sweep:
        found = [_one_value(argument)]
    else:
        found = _refuse_value(argument, annotation, read)
    if found:
        read.problems += found
        return []
    given = _value(argument, annotation, read.layers)
    is_removed = argument.is_delete() and not fields.is_optional(annotation)
    value = _REMOVED if is_removed else None if argument.is_delete() else next(alternatives(argument))
    read.layers.append(Layer(where, nested(key, value)))
    return given


def _refuse_value(argument: Override, annotation: Any, read: Arguments) -> list[Problem]:
    """Return the problems of an argument that sets or removes a value; empty when it may."""
    layers, root = read.layers, read.root
    key, where = argument.key_or_group, _where(argument.input_line)
    if (whole := _list_above(key, layers)) is not None:
        remedy = f"give the whole list: {whole}=[{{...}}, {{...}}]"
        rule = f"cannot be set, because {whole} is a list"
        return [Problem(key=key, rule=rule, remedy=remedy, where=where)]
    current = _current(key, layers)
    if argument.is_delete():
        return _refuse_removal(argument, annotation, current, root)
    if argument.is_add() and current not in (_REMOVED, None, MISSING):
        remedy = f"write {key}=... to change it, or ++{key}=... to set it in any case"
        return [Problem(key=key, rule=f"already has the value {current!r}", remedy=remedy, where=where)]
    checked = (
        fields.check_value(key, value, annotation, where, root)
        or fields.unknown_kinds(root, key, value, where)
        for value in alternatives(argument)
    )
    return [problem for problems in checked for problem in problems]


def _refuse_removal(argument: Override, annotation: Any, current: Any, root: type) -> list[Problem]:
    key, expected, where = argument.key_or_group, argument.value(), _where(argument.input_line)
    if not (fields.is_optional(annotation) or _is_removable(key, annotation, root)):
        rule, remedy = "must have a value and cannot be removed", f"give it another with {key}=..."
    elif current is _REMOVED and not fields.is_optional(annotation):
        rule, remedy = "is not there and cannot be removed", ""
    elif expected is not None and expected != current:
        rule, remedy = f"is {current!r}, not {expected!r}", f"write ~{key}"
    else:
        return []
    return [Problem(key=key, rule=rule, remedy=remedy, where=where)]


def _is_removable(key: str, annotation: Any, root: type) -> bool:
    """Return whether ``~key`` may delete a key: a mapping, an entry of one, or a list of groups."""
    above = fields.find(root, key.rpartition(".")[0]) if "." in key else root
    is_entry = above is Any or _is_mapping(above)
    return is_entry or _is_mapping(annotation) or fields.item_group(annotation) is not None


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def _value(argument: Override, annotation: Any, layers: Sequence[Layer]) -> list[str]:
    """Return an argument that sets or removes a value, as one or two arguments that Hydra takes."""
    key, text = argument.key_or_group, str(argument.input_line).lstrip("+")
    current = _current(key, layers)
    if argument.is_delete():
        return [f"++{key}=null"] if fields.is_optional(annotation) else [f"~{key}"]
    if any(map(partial(_is_replaced_by, annotation, current), alternatives(argument))):
        return [*([f"~{key}"] if current not in (_REMOVED, None) else []), f"+{text}"]
    is_merged = isinstance(next(alternatives(argument)), Mapping)
    return [f"++{text}" if current is _REMOVED or is_merged else text]


def _is_replaced_by(annotation: Any, current: Any, value: Any) -> bool:
    """Return whether a value replaces the current one as a whole, where Hydra would merge the two."""
    if fields.item_group(annotation):
        return isinstance(value, list) or isinstance(current, list)
    return isinstance(value, list | Mapping) and (_is_mapping(annotation) or annotation is Any)


def _current(key: str, layers: Sequence[Layer]) -> Any:
    """Return the value of a key in the last layer that has the key; _REMOVED when no layer has it."""
    values = (_at(layer.tree, key.split(".")) for layer in reversed(layers))
    return next((value for value in values if value is not _ABSENT), _REMOVED)


def _at(tree: Any, names: Sequence[str]) -> Any:
    """Return the value of a key in the tree of one layer.

    Returns _ABSENT when the layer does not mention the key, and _REMOVED when the layer sets a group above
    the key to something without keys, such as null.
    """
    for name in names:
        if not isinstance(tree, Mapping):
            return _REMOVED
        if name not in tree:
            return _ABSENT
        tree = tree[name]
    return tree


def _list_above(key: str, layers: Sequence[Layer]) -> str | None:
    """Return the full key of the list that contains ``key``; None when no list does."""
    names = key.split(".")
    for depth in range(1, len(names)):
        whole = ".".join(names[:depth])
        if isinstance(_current(whole, layers), list):
            return whole
    return None


def _one_value(argument: Override) -> Problem:
    rule, remedy = "takes one value here, not a sweep", "add --multirun for a run with each of them"
    return Problem(key=argument.key_or_group, rule=rule, remedy=remedy, where=_where(argument.input_line))
