"""docs/ is ordered by what a reader wants, its pages are short and begin alike, and the paths that the
repository names are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.documented import ROOT

DOCS = ROOT / "docs"
FOLDERS = {"tutorials", "how_to", "reference", "explanation"}
PAGES = sorted(DOCS.rglob("*.md"))
MOST_WORDS, MOST_WORDS_OF_THE_FIRST = 2500, 250
# What a script writes on a page, by the page; it does not count.
GENERATED = {
    "reference/conformance.md": r".*",
    **{f"reference/from_{name}.md": r"^## Key by key\n.*" for name in ("nemo_rl", "verl", "trl")},
    "reference/layout_runs.md": r"<!-- matrix of whole runs: begin -->.*<!-- matrix of whole runs: end -->",
    "how_to/environments.md": r"^\| kind \| reward \|[^\n]*\n(?:\|[^\n]*\n)+",
    "reference/models.md": r"^\| `model_type` \|[^\n]*\n(?:\|[^\n]*\n)+",
    "explanation/scaling.md": r"(?:^\|[^\n]*\n)+",
}
PARTS = ("nemo_like", "nemo_like_tools", "configs", "recipes", "scripts", "tests", "docs", "requirements")
SUFFIXES = {".py", ".md", ".yaml", ".toml", ".sh", ".sbatch", ".json", ".js", ".ipynb", ".css", ".txt"}
# A path in docs/, or a pattern of some; not that of a file in another project's docs/, after an address.
NAMED = re.compile(r"(?<![\w.-])(?<![\w:]/)docs/([\w*/.-]+\.(?:md|ipynb|png|css))")
# The same in code: "docs" / "folder" / "page.md".
JOINED = re.compile(r'"docs"((?: / "[\w.]+")* / "[\w]+\.\w+")')
# Of NeMo-RL and verl, whose documentation has a folder docs/ too.
FOREIGN = {
    "about/performance-summary.md",
    "performance-summary.md",
    "advance/fully_async.md",
}


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def test_every_page_is_in_one_of_the_folders() -> None:
    outside = {name_of(page) for page in PAGES if page.parent not in {DOCS / folder for folder in FOLDERS}}
    assert outside == {"index.md"}
    assert {path.name for path in DOCS.iterdir() if path.is_dir()} <= FOLDERS
    assert len({page.name for page in PAGES}) == len(PAGES) > 60


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short(page: Path) -> None:
    text, name = page.read_text(encoding="utf-8"), name_of(page)
    written = re.sub(GENERATED[name], "", text, flags=re.M | re.S) if name in GENERATED else text
    assert name not in GENERATED or written != text
    most = MOST_WORDS_OF_THE_FIRST if name == "index.md" else MOST_WORDS
    assert len(written.split()) <= most, f"{name} has {len(written.split())} words: split it by topic"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_begins_with_what_it_is_for_and_what_it_needs(page: Path) -> None:
    """In one paragraph of one or two sentences; a tutorial has its needs in the next paragraph."""
    title, opening, second, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert re.fullmatch(r"# [^\n]+", title)
    assert re.match(r"[A-Za-z*`\[]", opening) and "\n" not in opening and not opening.startswith("```")
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", opening)
    assert 1 <= len(re.findall(r"[.:](?= [A-Z]|$)", plain)) <= 2, opening
    if page.parent.name == "tutorials":
        assert second.startswith("You need ")
    else:
        assert re.search(r"\bneeds?\b", plain), f"{name_of(page)} does not say what it needs"


def files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in SUFFIXES)
    for part in PARTS:
        yield from (path for path in (ROOT / part).rglob("*") if path.suffix in SUFFIXES and path.is_file())


def named_in(text: str) -> list[str]:
    joined = ["/".join(re.findall(r'"([^"]+)"', path)) for path in JOINED.findall(text)]
    return [*NAMED.findall(text), *joined]


def test_paths_are_found_in_prose_and_in_code() -> None:
    text = 'see docs/how_to/a.md, ../docs/b.png and https://x.org/docs/c.md; (ROOT / "docs" / "d" / "e.md").x'
    assert named_in(text) == ["how_to/a.md", "b.png", "d/e.md"]


def test_every_path_in_docs_that_the_repository_names_is_there() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in files()
        if path != Path(__file__)
        for name in named_in(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    assert {place for place in named if place[1] not in FOREIGN and not any(DOCS.glob(place[1]))} == set()
