"""Debian's Chromium without a window, driven over a pipe by the DevTools protocol: no driver, no port, no library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 100


def find() -> str | None:
    """The browser's command, or None where there is none."""
    return next((path for name in COMMANDS if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """What the browser answered instead of a result."""


class Browser:
    """A browser with one page. Messages are JSON with a zero byte behind, on descriptors 3 and 4 of the browser."""

    def __init__(self, command: str) -> None:
        self.profile = tempfile.mkdtemp(prefix="narrowcast-browser-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # the shell puts the pipes where the browser wants them
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser} 2>/dev/null'
        options = [
            *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
            *("--force-color-profile=srgb", f"--user-data-dir={self.profile}"),
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, command, *options, "about:blank"],
            pass_fds=(to_browser, from_browser),
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None

    def __enter__(self) -> Browser:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise BrowserError("the browser ended" if ready else f"no answer within {SECONDS} s")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, keep the events that come meanwhile, and return the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            found = self._message(until)
            if found.get("id") == self._number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']['message']}")
                return dict(found["result"])
            self.events.append(found)

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        until = time.monotonic() + SECONDS
        while not any(wanted(event) for event in self.events):
            self.events.append(self._message(until))

    def open(self, path: Path) -> None:
        """Load a file, and wait until it is there."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for(lambda event: event["method"] == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression; of a promise, what it resolves to."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"].get("exception", answer["exceptionDetails"])))
        return answer["result"].get("value")

    def scheme(self, name: str) -> None:
        """light or dark, as if the system said so."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def scripts(self, on: bool) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path, whole: bool = True) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def paper(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    @property
    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    @property
    def complaints(self) -> list[str]:
        """What the console and the log would show."""
        wanted = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in wanted]
