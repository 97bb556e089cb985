"""Headless Chromium over a pipe, with nothing but the standard library."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    def __init__(self) -> None:
        assert CHROMIUM
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        command = f'exec "{CHROMIUM}" {flags} --user-data-dir="{self._home.name}" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._out)
        os.close(self._in)
        self._home.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Show a page of a width, light or dark, until it has drawn its charts."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.run("new Promise(r => document.readyState === 'complete' ? r() : window.onload = r)")
        self.settle()

    def settle(self) -> None:
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def run(self, script: str) -> Any:
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        button = {"button": "left", "buttons": 1, "clickCount": clicks} if kind != "Moved" else {"buttons": 1}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **button)

    def key(self, key: str) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + 60
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            got = os.read(self._in, 1 << 20) if ready else b""
            assert got, "the browser does not answer"
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(line)
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:400])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"])[:400])
            case "Log.entryAdded":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case _:
                pass
        return event
