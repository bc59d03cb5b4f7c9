"""Print pip's settings as variables of uv, one ``NAME=value`` in a line; ``scripts/setup.sh`` reads them.

It ends with 1 and prints nothing where uv has no variable for one of pip's settings: pip installs then.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

# What chooses the packages and how they are fetched: pip's setting, uv's variable, and what separates values.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "no-cache-dir": ("UV_NO_CACHE", " "),
}
# What only changes what pip says, or how it works inside.
OF_NO_CONSEQUENCE = {
    "break-system-packages",
    "cache-dir",
    "config-file",
    "disable-pip-version-check",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}
SECTIONS = ("global", "install", ":env:")  # a later one counts for more


def uv_settings(listed: str, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the variables of uv for what ``pip config list`` printed.

    A variable that the environment has already is left out. The result is None where uv would not follow a
    setting.
    """
    settings: dict[str, str] = {}
    for section in SECTIONS:
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                settings[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    settings = {name: value for name, value in settings.items() if name not in OF_NO_CONSEQUENCE}
    if not settings.keys() <= VARIABLES.keys():
        return None
    variables = {}
    for name, value in settings.items():
        variable, separator = VARIABLES[name]
        if variable not in environment:
            variables[variable] = separator.join(value.split())
    return variables


def main() -> int:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    variables = uv_settings(listed.stdout, os.environ)
    if variables is None:
        return 1
    for name, value in variables.items():
        print(f"{name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
