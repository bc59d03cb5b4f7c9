"""A headless Chromium without a network, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LACKING = "there is no chromium; scripts/setup.sh --dev installs it as root on Debian and Ubuntu"
_TIMEOUT_S = 240.0
# Ends when the expression is true; the page itself waits.
_UNTIL = """new Promise((resolve) => {
  const look = () => { if (%s) resolve(true); else setTimeout(look, 20); };
  look();
})"""
_PLACE = """(() => {
  const found = [...document.querySelectorAll(%s)].find((one) => one.textContent.includes(%s));
  if (!found) return null;
  found.scrollIntoView({ block: "center" });
  const { x, y, width, height } = found.getBoundingClientRect();
  return [x + Math.min(width, 40) / 2, y + height / 2];
})()"""


class Browser:
    """One page of a browser, with everything that it complained of or asked the network for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.addresses: list[str] = []  # of what it loaded
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, page: Path | str, ready: str) -> None:
        """Open a file, or an address of this machine, and wait until ``ready``, an expression, is true."""
        address = page.as_uri() if isinstance(page, Path) else page
        self._call("Page.navigate", url=address)
        self.wait(f"location.href.startsWith({json.dumps(address)}) && ({ready})")

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        assert self.evaluate(_UNTIL % condition)

    def click(self, selector: str, text: str = "", *, meanwhile: str = "") -> None:
        """Click, with the mouse, the first element of ``selector`` that contains ``text``; the expression
        ``meanwhile`` is evaluated between press and release."""
        place = self.evaluate(_PLACE % (json.dumps(selector), json.dumps(text)))
        assert place, f"no {selector} with {text!r}: {self.text('main')[:600]}"
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1
            )
            if meanwhile and kind == "mousePressed":
                self.evaluate(meanwhile)

    def choose(self, selector: str, value: str) -> None:
        """Set a field of a form, as a user would."""
        self.evaluate(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
            f" field.value = {json.dumps(value)}; field.dispatchEvent(new Event('change')); }})()"
        )

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector: str) -> list[str]:
        return self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)"
        )

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"the browser did not answer within {_TIMEOUT_S:.0f} s"
            received = os.read(self._answers, 1 << 20)
            assert received, "the browser has ended"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["entry"]))
        elif event == "Network.requestWillBeSent":
            self.addresses.append(params["request"]["url"])


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile in ``profile``; it is ended with the block."""
    program = shutil.which("chromium")
    assert program, LACKING
    to_browser, from_browser = os.pipe(), os.pipe()
    # The browser reads commands from its file descriptor 3 and writes answers to 4.
    reads, writes = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser[0], from_browser[1]))
    command = [
        *("bash", "-c", f'exec "$0" "$@" 3<&{reads} 4>&{writes}', program),
        *(
            "--headless",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        *(f"--user-data-dir={profile}", "--window-size=1280,900"),
    ]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=(reads, writes), stdout=log, stderr=log)
    for fd in (reads, writes, to_browser[0], from_browser[1]):
        os.close(fd)
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        process.kill()
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
