#!/usr/bin/env python
"""Write the default files in ``configs/``, the JSON schemas and the table of kinds in
docs/how_to/environments.md and docs/reference/models.md.

    python scripts/write_configs.py            # after a key was added or changed
    python scripts/write_configs.py --check    # only say which files would change

The parts declare what they say, with keys and kinds. A key's sentence becomes the comment beside its default
(``nemo_like.config.keys``). The configurations that build on these files are written by hand; each names its
schema in its first line, for editors.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nemo_like.algorithms.loss_kind import LossKind, OwnLossConfig  # noqa: E402
from nemo_like.algorithms.options import LOSS_KINDS, LossConfig  # noqa: E402
from nemo_like.config import fields  # noqa: E402
from nemo_like.config.file_schemas import definitions, file_schema  # noqa: E402
from nemo_like.config.keys import MISSING, Key, keys  # noqa: E402
from nemo_like.configuration import Config  # noqa: E402
from nemo_like.environments.kind import Kind  # noqa: E402
from nemo_like.environments.options import ENVIRONMENT_KINDS, EnvConfig  # noqa: E402
from nemo_like.models.family import FAMILIES, Family  # noqa: E402

SCHEMAS = Path("configs/schemas")
_ENVIRONMENTS_PAGE = Path("docs/how_to/environments.md")
_MODELS_PAGE = Path("docs/reference/models.md")
_FAMILIES_HEAD = "| `model_type` | models | what `config.json` must say |\n|---|---|---|\n"
_KINDS_HEAD = "| kind | reward | `options` in an example |\n|---|---|---|\n"
_WIDTH = 118
# Groups whose keys are as in another group, where they have it, unless their ``otherwise`` says more.
_FOLLOWS = {"value": "policy", "teacher": "policy"}


def written() -> dict[Path, str]:
    """Return the text of every file, by its path below the repository."""
    groups = {name: fields.without_none(annotation) for name, (annotation, _) in keys(Config).items()}
    groups = {name: group for name, group in groups.items() if fields.is_group(group)} | {"env": EnvConfig}
    files = {Path("configs", name, "default.yaml"): _file(name, group) for name, group in groups.items()}
    kinds = {name: ENVIRONMENT_KINDS.load(name) for name in ENVIRONMENT_KINDS.names()}
    for kind, what in kinds.items():
        files[Path("configs/env", f"{kind}.yaml")] = _kind_file(kind, what)
    rows = [f"| `{name}` | {kind.reward} | {kind.example} |\n" for name, kind in kinds.items()]
    files[_ENVIRONMENTS_PAGE] = _with_rows(_ENVIRONMENTS_PAGE, _KINDS_HEAD, rows)
    families = [_family_row(FAMILIES.load(name)) for name in FAMILIES.names()]
    files[_MODELS_PAGE] = _with_rows(_MODELS_PAGE, _FAMILIES_HEAD, families)
    for name in LOSS_KINDS.names():
        files[Path("configs/loss_fn", f"{name}.yaml")] = _loss_file(name, LOSS_KINDS.load(name))
    schemas = {name: _schema(group) for name, group in {"configuration": Config, **groups}.items()}
    for name, schema in schemas.items():
        files[SCHEMAS / f"{name}.json"] = json.dumps(schema, indent=1) + "\n"
    return files


def schema_line(file: Path) -> str:
    """Return the first line of a YAML file of ``configs`` or ``recipes``, given below the repository."""
    is_of_group = file.parts[0] == "configs" and len(file.parts) == 3
    name = file.parts[1] if is_of_group else "configuration"
    return f"# yaml-language-server: $schema={os.path.relpath(SCHEMAS / f'{name}.json', file.parent)}"


def _schema(group: type) -> dict[str, Any]:
    """Return the schema of files of a group. Where an environment's kind is named, its options are those."""
    schema = file_schema(group, {"hydra": {"type": "object"}} if group is Config else None)
    if group is EnvConfig or "EnvConfig" in schema["definitions"]:
        of_env = schema if group is EnvConfig else schema["definitions"]["EnvConfig"]
        kinds = {name: ENVIRONMENT_KINDS.load(name) for name in ENVIRONMENT_KINDS.names()}
        of_env["allOf"] = [_if_kind(kind, what.options.__name__) for kind, what in kinds.items()]
        for what in kinds.values():
            schema["definitions"] |= definitions(what.options)
    if group is LossConfig or "LossConfig" in schema["definitions"]:
        of_loss = schema if group is LossConfig else schema["definitions"]["LossConfig"]
        for options in (OwnLossConfig, *(LOSS_KINDS.load(name).options for name in LOSS_KINDS.names())):
            own = definitions(options)[options.__name__]["properties"]
            of_loss["properties"] = {**own, **of_loss["properties"]}
    return schema


def _if_kind(kind: str, options: str) -> dict[str, Any]:
    is_kind = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
    return {"if": is_kind, "then": {"properties": {"options": {"$ref": f"#/definitions/{options}"}}}}


def _file(name: str, group: type) -> str:
    otherwise: Mapping[str, Key] = getattr(group, "otherwise", {})
    lines = [
        schema_line(Path("configs", name, "default.yaml")),
        *_above(group.__doc__ or "", ""),
        *_group_lines(group, "", "", _FOLLOWS.get(name), otherwise),
    ]
    return "\n".join(lines) + "\n"


def _kind_file(name: str, kind: Kind) -> str:
    first = schema_line(Path("configs/env", f"{name}.yaml"))
    lines = [first, *_above(kind.about, ""), "defaults:", "  - default", f"kind: {name}"]
    for key, what in kind.base.items():
        lines += _leaf(key, what, "")
    if keys(kind.options):
        lines += ["options:", *_group_lines(kind.options, "  ", "", None, {})]
    return "\n".join(lines) + "\n"


def _loss_file(name: str, kind: LossKind) -> str:
    first = schema_line(Path("configs/loss_fn", f"{name}.yaml"))
    lines = [
        first,
        *_above(f"{kind.about}; docs/explanation/losses.md", ""),
        "defaults:",
        "  - default",
        f"kind: {name}",
    ]
    for key, (_, what) in keys(kind.options).items():
        if key not in keys(LossConfig):
            lines += _leaf(key, what, "")
    return "\n".join(lines) + "\n"


def _with_rows(page: Path, head: str, rows: Sequence[str]) -> str:
    """Return a page with these rows in the table that ``head`` begins."""
    before, _, after = (ROOT / page).read_text(encoding="utf-8").partition(head)
    return f"{before}{head}{''.join(rows)}\n{after.partition(chr(10) * 2)[2]}"


def _family_row(family: Family) -> str:
    values = [f"`{one.key}`: {json.dumps(one.values[0])}" for one in family.trained_values]
    types = ", ".join(f"`{model_type}`" for model_type in family.model_types)
    return f"| {types} | {family.about} | {', '.join(values)} |\n"


def _group_lines(
    group: type, indent: str, path: str, follows: str | None, otherwise: Mapping[str, Key]
) -> Iterator[str]:
    """Yield the lines of a group's keys. ``path`` is its key below the group that ``follows`` another."""
    own = _own_keys(group) if follows and not path else set()
    for name, (annotation, key) in keys(group).items():
        inner = fields.without_none(annotation)
        full = f"{path}{name}"
        if fields.is_group(inner):
            yield from _with_comment(f"{indent}{name}:", key.about if not follows else "", indent)
            yield from _group_lines(inner, f"{indent}  ", f"{full}.", follows, otherwise)
        elif fields.item_group(annotation):
            yield from _leaf(name, Key(key.about, {}), indent)
        elif follows and name not in own:
            yield from _leaf(name, otherwise.get(full, Key("", f"${{{follows}.{full}}}")), indent)
        else:
            yield from _leaf(name, key, indent)


def _own_keys(group: type) -> set[str]:
    return {name for name in keys(group) if all(name not in keys(base) for base in group.__bases__)}


def _leaf(name: str, key: Key, indent: str) -> Iterator[str]:
    value = key.default
    if isinstance(value, str) and "\n" in value.strip("\n") and value == value.strip("\n"):
        yield from _above(key.about, indent)
        yield f"{indent}{name}: |-"
        yield from (f"{indent}  {line}" if line else "" for line in value.splitlines())
    else:
        yield from _with_comment(f"{indent}{name}: {_scalar(value)}", key.about, indent)


def _with_comment(line: str, about: str, indent: str) -> Iterator[str]:
    """Yield a line with a comment behind it, or above it where it would be too long."""
    beside = f"{line} # {about}" if about else line
    if len(beside) <= _WIDTH:
        yield beside
    else:
        yield from _above(about, indent)
        yield line


def _above(about: str, indent: str) -> Sequence[str]:
    text = " ".join(about.replace("``", "`").split())
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    plain = value.name if isinstance(value, Enum) else value
    if isinstance(plain, float) and "e" in repr(plain):
        mantissa, exponent = repr(plain).split("e")
        return f"{float(mantissa)}e{int(exponent)}"
    if isinstance(plain, str) and (plain == MISSING or plain.startswith("${")):
        return plain
    if isinstance(plain, str) and "\n" in plain:
        return json.dumps(plain)
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file would change"
    )
    only_checks = parser.parse_args(arguments).check
    changed = {path: text for path, text in written().items() if _present(path) != text}
    for path, text in changed.items():
        print(f"{path} {'would change' if only_checks else 'is written'}")
        if not only_checks:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")
    return 1 if changed and only_checks else 0


def _present(path: Path) -> str | None:
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.is_file() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
