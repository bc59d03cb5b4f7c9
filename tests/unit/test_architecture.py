"""The house is as docs/explanation/architecture.md and docs/reference/glossary.md say."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nemo_like"
TOOLS = ROOT / "nemo_like_tools"
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for package in (PACKAGE, TOOLS)
    for path in sorted(package.rglob("*.py"))
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in TREES
}
ARCHITECTURE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
MAX_FUNCTION_LINES = 60


def imported(tree: ast.Module) -> set[str]:
    """Modules of the packages that are imported anywhere in the file, also for type checking alone."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def test_no_modules_import_each_other_in_a_circle_not_even_inside_functions() -> None:
    graph = {module: imported(TREES[path]) - {module} for module, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 500
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_file_name_occurs_twice_but_those_that_the_glossary_allows() -> None:
    section = GLOSSARY.split("## File names that occur more than once")[1]
    allowed = {"__init__.py", *re.findall(r"`(\w+\.py)`", section)}
    paths: dict[str, list[str]] = defaultdict(list)
    for path in TREES:
        if not path.parent.name.endswith("kinds"):
            paths[path.name].append(str(path.relative_to(ROOT)))
    several = {name: found for name, found in paths.items() if len(found) > 1}
    assert several.keys() <= allowed, several
    assert allowed <= several.keys(), "the glossary allows a name that occurs once"


def test_no_public_name_has_a_word_that_the_glossary_forbids() -> None:
    table = GLOSSARY.split("## Words in names")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([a-z][\w, ]*) \| ", table, re.MULTILINE)
    forbidden = {word for cell in cells if cell != "word" for word in cell.split(", ")}
    assert len(forbidden) > 15
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = {
        f"{path.relative_to(ROOT)}:{name}"
        for path, tree in TREES.items()
        for name in (path.stem, *(node.name for node in ast.walk(tree) if isinstance(node, defined)))
        if forbidden & {word.lower() for word in re.findall(r"[a-z]+\d*|[A-Z][a-z]*\d*", name)}
    }
    assert names == set()


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": node.end_lineno - node.lineno + 1
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_the_drawing_has_every_room() -> None:
    drawing = ARCHITECTURE.split("```")[1]
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - set(re.findall(r"\b(\w+)/", drawing)) == set()


@pytest.mark.parametrize("page", ["explanation/architecture.md", "reference/glossary.md"])
def test_every_file_and_folder_of_a_page_is_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.])((?:\w+/)+(?:\w+\.py)?)", text.split("## ", 1)[1]))
    assert len(named) > 4
    assert {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()} == set()


ANSWERS = [
    (question.strip(), answer)
    for question, answer in re.findall(r"^\| ([^|]*\?) \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
]


def test_eleven_questions_are_answered() -> None:
    assert len(ANSWERS) == 11


@pytest.mark.parametrize(("question", "answer"), ANSWERS)
def test_every_name_in_an_answer_is_in_one_of_its_files(question: str, answer: str) -> None:
    files = re.findall(r"[\w/]+/\w+\.py", answer)
    assert files, question
    sources = "".join(
        (path if (path := PACKAGE / name).exists() else ROOT / name).read_text(encoding="utf-8")
        for name in files
    )
    names = re.findall(r"`(\w+)`", answer)
    assert names, question
    assert {name for name in names if not re.search(rf"\b{name}\b", sources)} == set()
