"""A headless Chromium for tests of pages, driven by its debugging protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EXECUTABLE = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-component-update --remote-debugging-pipe"
)
VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""
SECONDS = 30.0

needs_browser = pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")


class Browser:
    """One page of a browser."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._held, self._last = read, write, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        self.added: dict[str, Any] = {}
        """Fields added to the bodies of chat requests on their way to the server."""
        self.bodies: list[dict[str, Any]] = []
        """Bodies of chat requests, as the page sent them."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=VIOLATIONS)
        self.call("Fetch.enable", patterns=[{"urlPattern": "*/v1/chat/completions"}])
        self.resize(1200, 800)

    # The protocol

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = self._send(method, params)
        deadline = time.monotonic() + SECONDS
        while True:
            message = self._receive(deadline)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._last

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not respond"
            self._held += os.read(self._read, 1 << 16)
        content, _, self._held = self._held.partition(b"\0")
        message = json.loads(content)
        if message.get("method") == "Fetch.requestPaused":
            self._continue(message["params"])
        elif "method" in message:
            self.events.append(message)
        return message

    def _continue(self, params: dict[str, Any]) -> None:
        self.bodies.append(json.loads(params["request"]["postData"]))
        data = base64.b64encode(json.dumps({**self.bodies[-1], **self.added}).encode()).decode()
        self._send("Fetch.continueRequest", {"requestId": params["requestId"], "postData": data})

    # The page

    def open(self, url: str) -> None:
        """Open a page and wait until its scripts have run."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """Return the value of an expression, or of its promise."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = SECONDS) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, (
                f"{expression}\n{self.run('document.body.innerText')}"
            )
            time.sleep(0.03)
        return value

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def click(self, selector: str) -> None:
        """Click at the middle of an element."""
        at = self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def hover(self, selector: str) -> dict[str, float]:
        """Move the pointer to the middle of an element."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const r = e.getClientRects()[0];"
            "return {x: r.x + r.width / 2, y: r.y + r.height / 2}; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **box)
        return box

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.run("document.activeElement.select?.()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                *("Input.dispatchKeyEvent",),
                **{"type": kind, "key": key, "windowsVirtualKeyCode": code, **typed},
            )

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window and the preferred colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Save the page as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    # What happened

    def urls(self) -> list[str]:
        """Return the addresses of all requests since the page was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def errors(self) -> list[str]:
        """Return uncaught exceptions, and violations of the security policy."""
        thrown = [
            event["params"]["exceptionDetails"].get("exception", {}).get("description", "error")
            for event in self.events
            if event["method"] == "Runtime.exceptionThrown"
        ]
        return thrown + self.run("window.violations")


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Run a browser; `folder` is for its profile."""
    from_browser, browser_writes = os.pipe()
    browser_reads, to_browser = os.pipe()
    assert EXECUTABLE is not None
    # Chromium reads commands from descriptor 3 and writes to 4.
    command = f'exec "$0" {FLAGS} --user-data-dir="$1" 3<&{browser_reads} 4>&{browser_writes}'
    process = subprocess.Popen(
        ["bash", "-c", command, EXECUTABLE, str(folder)],
        pass_fds=(browser_reads, browser_writes),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(browser_reads)
    os.close(browser_writes)
    try:
        yield Browser(from_browser, to_browser)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(from_browser)
        os.close(to_browser)
