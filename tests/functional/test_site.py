"""docs/ as a site, in a real browser."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.functional.browser import LACKING, Browser, chromium
from tests.functional.runs import ROOT

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason=LACKING)

LOADED = "document.readyState === 'complete'"


class Silent(SimpleHTTPRequestHandler):
    """Serves files, and does not say so."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=120)
    return folder


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    profile = tmp_path / "profile"
    profile.mkdir()
    with chromium(profile) as browser:
        yield browser


# For each block of code: the lower edge of its copy button less the upper edge of its text.
COPY_BUTTON_OVER_CODE = """[...document.querySelectorAll('.highlight pre')].map((block) => {
  const button = block.parentElement.querySelector('.md-code__button, .md-clipboard');
  const text = document.createRange();
  text.selectNodeContents(block.querySelector('code'));
  return button.getBoundingClientRect().bottom - text.getBoundingClientRect().top;
})"""


def from_elsewhere(browser: Browser, *own: str) -> list[str]:
    return [address for address in browser.addresses if not address.startswith(("data:", "blob:", *own))]


def test_it_opens_from_the_disk_and_links_lead_on(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html", LOADED)
    (linked,) = browser.evaluate(
        "[...new Set([...document.links].map((a) => a.href))]"
        ".filter((address) => address.endsWith('/report.html'))"
    )
    browser.open(linked, LOADED)
    assert browser.text("h1").startswith("The report")
    assert browser.evaluate("[...document.images].every((image) => image.naturalWidth > 300)")
    assert browser.complaints == []
    assert from_elsewhere(browser, "file:") == []


def test_a_reader_chooses_the_theme(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html", LOADED)
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert browser.evaluate(scheme) == "default"
    browser.click("label[title='To the dark theme']")
    browser.wait(f"{scheme} === 'slate'")
    browser.click("label[title='To the light theme']")
    browser.wait(f"{scheme} === 'default'")


def test_on_a_narrow_screen_no_copy_button_lies_over_code(browser: Browser, site: Path) -> None:
    browser.resize(400, 800)
    browser.open(site / "how_to" / "sweeps.html", LOADED)
    browser.wait("document.querySelector('.highlight .md-code__button, .highlight .md-clipboard')")
    over = browser.evaluate(COPY_BUTTON_OVER_CODE)
    assert len(over) == 2 and max(over) <= 0


def test_a_search_finds_a_key_and_leads_to_its_page(browser: Browser, site: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        here = f"http://127.0.0.1:{server.server_port}/"
        browser.open(here + "index.html?q=seq_logprob_error_threshold", LOADED)
        browser.wait("document.querySelector('.md-search-result__link')")
        assert any("From rewards to advantages" in text for text in browser.texts(".md-search-result__link"))
        assert from_elsewhere(browser, here) == []
        assert browser.complaints == []
    finally:
        server.shutdown()
        server.server_close()
