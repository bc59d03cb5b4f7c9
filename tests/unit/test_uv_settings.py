"""``scripts/uv_settings.py``: pip's settings, as the variables by which uv does the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.uv_settings import uv_settings

SCRIPT = Path(__file__).parents[2] / "scripts" / "uv_settings.py"


@pytest.mark.parametrize(
    ("listed", "variables"),
    [
        ("", {}),
        ("global.index-url='https://a.example/simple'", {"UV_DEFAULT_INDEX": "https://a.example/simple"}),
        ("global.extra-index-url='\\nhttps://a.example\\nhttps://b.example'",
         {"UV_INDEX": "https://a.example https://b.example"}),
        (":env:.find-links='/wheels /more'", {"UV_FIND_LINKS": "/wheels,/more"}),
        ("global.no-cache-dir='1'\nglobal.cert='/ca.pem'", {"UV_NO_CACHE": "1", "SSL_CERT_FILE": "/ca.pem"}),
        ("global.timeout='15'\nglobal.root-user-action='ignore'", {"UV_HTTP_TIMEOUT": "15"}),
    ],
    ids=["none", "one index", "more of them", "folders", "cache and certificates", "of no consequence"],
)  # fmt: skip
def test_settings_of_pip_are_variables_of_uv(listed: str, variables: dict[str, str]) -> None:
    assert uv_settings(listed, {}) == variables


def test_a_variable_counts_for_more_than_a_file_and_a_command_for_more_than_all() -> None:
    lines = [":env:.index-url='https://c.example'", "global.index-url='https://a.example'"]
    assert uv_settings("\n".join(lines), {}) == {"UV_DEFAULT_INDEX": "https://c.example"}
    lines[0] = "install.index-url='https://b.example'"
    assert uv_settings("\n".join(lines), {}) == {"UV_DEFAULT_INDEX": "https://b.example"}
    # What other commands of pip are told is none of an installation.
    assert uv_settings("download.index-url='https://d.example'", {}) == {}


def test_a_variable_of_uv_is_left_as_it_is() -> None:
    assert (
        uv_settings("global.index-url='https://a.example'", {"UV_DEFAULT_INDEX": "https://b.example"}) == {}
    )


@pytest.mark.parametrize("setting", ["no-index", "client-cert", "proxy", "only-binary", "a-later-one"])
def test_a_setting_that_uv_has_no_variable_for_leaves_the_installation_to_pip(setting: str) -> None:
    assert uv_settings(f"global.index-url='https://a.example'\nglobal.{setting}='x'", {}) is None


@pytest.mark.parametrize(
    ("name", "value", "code", "printed"),
    [
        ("PIP_INDEX_URL", "https://a.example", 0, "UV_DEFAULT_INDEX=https://a.example\n"),
        ("PIP_NO_INDEX", "true", 1, ""),
    ],
)
def test_the_script_prints_what_pip_is_set_to(name: str, value: str, code: int, printed: str) -> None:
    kept = {other: given for other, given in os.environ.items() if not other.startswith(("PIP_", "UV_"))}
    environment = {**kept, "PIP_CONFIG_FILE": os.devnull, name: value}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, printed), done.stderr
