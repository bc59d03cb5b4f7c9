"""What MkDocs adds to docs/ (mkdocs.yml): a page for everything outside docs/ that a page links to. So the
site is whole, wherever it is put."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from posixpath import relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "code"  # of the site, with the pages for what is outside docs/
LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".toml": "toml"}
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for everything outside docs/ that pages lead to."""
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        if not path.is_relative_to(ROOT / "docs"):
            files.append(File.generated(config, uri_of(path), content=_text_of(path)))
        if path.suffix == ".md":
            waiting += [target for target in _targets(path) if not target.is_relative_to(ROOT / "docs")]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where their targets are in the site, and read Markdown inside <details>."""
    path = path_of(page.file.src_uri)
    if path.suffix != ".md":
        return markdown
    folder = str(PurePosixPath(page.file.src_uri).parent)

    def moved(link: re.Match[str]) -> str:
        target = (path.parent / link[1]).resolve()
        return f"]({relpath(uri_of(target), folder)}{link[2] or ''})" if target.exists() else link[0]

    def changed(text: str) -> str:
        return _LINK.sub(moved, text).replace("<details>", "<details markdown>")

    return _outside_fences(markdown, changed)


def uri_of(path: Path) -> str:
    """Return where in the site a file or folder of the repository is."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    inside = path.relative_to(ROOT).as_posix()
    return f"{FOLDER}/{inside}" if path.suffix == ".md" else f"{FOLDER}/{inside}.md"


def path_of(uri: str) -> Path:
    """Return which file or folder of the repository a page of the site shows."""
    if not uri.startswith(f"{FOLDER}/"):
        return ROOT / "docs" / uri
    path = ROOT / uri.removeprefix(f"{FOLDER}/")
    return path if path.exists() else path.with_suffix("")


def _targets(page: Path) -> Iterator[Path]:
    """Yield what a page links to and is there; what is not there is for MkDocs to complain of."""
    text = "".join(_FENCED.split(page.read_text(encoding="utf-8"))[::2])
    for link in _LINK.finditer(text):
        target = (page.parent / link[1]).resolve()
        if target.exists():
            yield target


def _text_of(path: Path) -> str:
    """Return a page that shows a file, or the files of a folder."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    if path.is_file():
        return f"# {path.relative_to(ROOT)}\n\n{_code(path)}"
    shown = sorted(file for file in path.rglob("*") if file.suffix in LANGUAGES)
    sections = [f"## {file.relative_to(path)}\n\n{_code(file)}" for file in shown]
    return "\n\n".join([f"# {path.relative_to(ROOT)}/", *sections])


def _code(path: Path) -> str:
    return f"````{LANGUAGES.get(path.suffix, '')}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    parts = _FENCED.split(markdown)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))
