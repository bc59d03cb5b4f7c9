"""Finds the library that draws the page's curves: Bokeh's scripts for browsers, as its Python package has
them.

A page holds them compressed, and Bokeh's licence as readable text, which the licence asks for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from nemo_like_tools.report.sample_files import ReportProblem, packed_text

_SCRIPTS = ("bokeh.min.js", "bokeh-api.min.js")


@dataclass(frozen=True, slots=True)
class ChartLibrary:
    """The scripts of the library, compressed, its version and its licence."""

    version: str
    packed: tuple[str, ...]
    licence: str  # as it may stand within a comment of HTML


@cache
def chart_library() -> ChartLibrary:
    """Return the installed library. Does not import it, which would take a second. Raises ReportProblem when
    it is not installed."""
    spec = find_spec("bokeh")
    if spec is None or not spec.submodule_search_locations:
        raise ReportProblem("bokeh, which draws the curves, is not installed; bash scripts/setup.sh does it")
    folder = Path(spec.submodule_search_locations[0]) / "server" / "static" / "js"
    found = distribution("bokeh")
    licence = (found.read_text("licenses/LICENSE.txt") or found.read_text("LICENSE.txt") or "").strip()
    scripts = [(folder / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    # Parts of other projects bring their notices along.
    notices = [notice for script in scripts for notice in re.findall(r"/\*!\s(.*?)\*/", script, re.DOTALL)]
    parts = [notice for notice in notices if "Anaconda" not in notice]
    text = "\n\n".join([licence, *("\n".join(map(str.strip, part.strip().splitlines())) for part in parts)])
    return ChartLibrary(found.version, tuple(map(packed_text, scripts)), text.replace("--", "- -"))
