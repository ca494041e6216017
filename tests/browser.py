"""A headless Chromium for tests, controlled over its debugging pipe, without a driver or a network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--disable-background-networking", "--disable-component-update", "--no-first-run", "--mute-audio",
    "--disable-extensions", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One tab. `events` are the page's console messages, exceptions and requests so far."""

    def __init__(self) -> None:
        (read, self._write), (self._read, write) = os.pipe(), os.pipe()

        def place() -> None:
            os.dup2(os.dup(read), 3), os.dup2(os.dup(write), 4)  # Chromium reads and writes these descriptors

        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"], preexec_fn=place,
            close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read), os.close(write)
        self._waiting, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{name}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._read), os.close(self._write)
        self._profile.cleanup()

    def _receive(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, "Chromium did not answer in time"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            self._waiting += data
        message, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, timeout_s: float = 60.0, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + timeout_s
        while (answer := self._receive(until_s)).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def evaluate(self, expression: str) -> Any:
        given = {"returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", expression=expression, **given)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> Any:
        until_s = time.monotonic() + timeout_s
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < until_s, f"never true: {expression}"
            time.sleep(0.05)
        return found

    def open(
        self, address: str, width: int = 1440, dark: bool = False,
        ready: str = "document.documentElement?.dataset.ready === '1'",
    ) -> None:  # fmt: skip
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait_for(ready)

    def find_complaints(self) -> list[str]:
        """Console errors, console warnings and exceptions."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"])[:500] for event in self.events if event.get("method") in kinds]

    def list_requests(self) -> list[str]:
        found = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [address for e in found if not (address := e["params"]["request"]["url"]).startswith(("data:", "blob:"))]

    def save_screenshot(self, path: Path, height: int | None = None) -> None:
        clip = {} if height is None else {"height": height}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"] | clip
        area = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=area, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
