"""docs/ as a site: it builds without a warning, holds every page whole, and loads nothing from
elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.site_pages import uri_of
from tests.unit.documented import PAGES, ROOT

# Without what finds a proxy or a name server, so that whatever asks for a network fails.
ENVIRONMENT = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9"}


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(
        command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target


class Elements(HTMLParser):
    """The elements of a page that matter here."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        wanted = attributes.items()
        return [found for name, found in self.found if name == tag and wanted <= found.items()]


def built(site: Path, page: Path) -> Path:
    address = (site / uri_of(page)).with_suffix(".html")
    return address.with_stem("index") if page.name == "README.md" else address


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_all_its_blocks_and_tables_and_is_led_to(site: Path, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    without_blocks = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.M | re.S)
    elements = Elements(built(site, page))
    assert len(elements.of("pre")) == len(re.findall(r"^ *```", text, re.M)) / 2
    assert len(elements.of("table")) == len(re.findall(r"^\|[-:| ]*-[-:| ]*\|$", without_blocks, re.M))
    of_the_first = Elements(site / "index.html").of("a")
    address = built(site, page).relative_to(site).as_posix()
    assert any(link.get("href") == address for link in of_the_first) or page.name == "index.md"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loading = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
    addresses = [
        str(attributes.get(loading[tag]))
        for page in site.rglob("*.html")
        for tag, attributes in Elements(page).found
        if tag in loading
    ]
    assert len(addresses) > 200
    assert [address for address in addresses if re.match(r"(https?:)?//", address)] == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?https?:[^)]*|@import[^;]*", styles) == []


def test_what_lies_outside_docs_is_shown_too(site: Path) -> None:
    assert "num_prompts_per_step" in (site / "code" / "configs.html").read_text(encoding="utf-8")
    assert (site / "code" / "nemo_like" / "driver" / "sync_grpo.py.html").is_file()
    assert "The driver carries" in (site / "code/nemo_like/data_plane/index.html").read_text(encoding="utf-8")


def test_links_that_lead_nowhere_fail_it(tmp_path: Path) -> None:
    links = ("nowhere.md", "../explanation/losses.md#nowhere", "../../configs/nowhere.yaml")
    copy = tmp_path / "repository"
    ignored = shutil.ignore_patterns(".*", "runs", "site", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    with (copy / "docs" / "reference" / "glossary.md").open("a") as glossary:
        glossary.write("".join(f"\n[x]({link})\n" for link in links))
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == len(links)
    for said in ("nowhere.md", "#nowhere", "../../configs/nowhere.yaml"):
        assert any("glossary.md" in warning and f"'{said}'" in warning for warning in warnings), said
