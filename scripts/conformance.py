"""Compare the losses of nemo_like, and of other frameworks, with the golden cases of tests/conformance, and
write docs/reference/conformance.md.

    python scripts/conformance.py                              # nemo_like alone, printed
    python scripts/conformance.py --against trl verl           # writes docs/reference/conformance.md
    python scripts/conformance.py --against trl==1.16.0 --output /tmp/page.md

Each framework is installed from PyPI into an environment of its own, which is deleted afterwards. It shares
the packages of this one, torch among them, and gets only those that are missing.

Uses modules of tests/, and so needs what they need: bash scripts/setup.sh --dev.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "conformance.md"
# What the functions that are called import, beside the packages of nemo_like.
_NEEDED = {"trl": ("trl",), "verl": ("verl", "codetiming", "orjson")}
_INSTALL_S, _ASK_S = 600, 1800


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, compare, write. Returns 0 when every case of nemo_like passed, else 1."""
    options = _parse(arguments)
    sys.path.insert(0, str(ROOT))
    from scripts.tests_packages import packages_of_the_tests

    with packages_of_the_tests():
        from tests.conformance.own_results import own_results
        from tests.conformance.report import report

    own = own_results()
    print(f"nemo_like: {own['passed']} of {own['total']} pass; the worst deviates by {own['worst']:.1g}")
    frameworks = []
    for requirement in options.against:
        frameworks.append(answers_of(requirement))
        print(_in_short(frameworks[-1]))
    if frameworks:
        options.output.write_text(report(own, frameworks), encoding="utf-8")
        print(f"written to {options.output}")
    return 0 if own["passed"] == own["total"] else 1


def answers_of(requirement: str) -> dict[str, Any]:
    """Install a framework, such as "trl" or "trl==1.16.0", in a new environment; return what it answers."""
    name = re.split(r"[=<>!~]", requirement)[0]
    packages = [requirement, *_NEEDED[name][1:]]
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=_INSTALL_S)
        python = Path(directory) / "bin" / "python"
        shared = (
            Path(directory)
            / "lib"
            / f"python{sysconfig.get_python_version()}"
            / "site-packages"
            / "shared.pth"
        )
        shared.write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *packages]
        subprocess.run(install, check=True, timeout=_INSTALL_S)
        output = Path(directory) / "answers.json"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        ask = [str(python), "-m", "tests.conformance.ask", name, str(output)]
        subprocess.run(ask, check=True, timeout=_ASK_S, cwd=ROOT, env=environment)
        answers: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return answers


def _in_short(framework: dict[str, Any]) -> str:
    statuses = [answer["status"] for answer in framework["answers"]]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses)))
    return f"{framework['framework']} {framework['version']}: {counts}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--against",
        nargs="*",
        default=[],
        metavar="FRAMEWORK",
        help=f"{' or '.join(_NEEDED)}, also with ==VERSION",
    )
    parser.add_argument("--output", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args(arguments)
    for requirement in options.against:
        if re.split(r"[=<>!~]", requirement)[0] not in _NEEDED:
            parser.error(f"there is no adapter for {requirement}; there are {', '.join(_NEEDED)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
