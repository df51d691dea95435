"""A headless Chromium that a test drives by the DevTools protocol, over a pipe."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_S = 60.0
POLL_S = 0.2


class Page:
    """The one page of a browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._numbers, self._unread = commands, answers, itertools.count(1), b""
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Return the answer to a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while True:
            *messages, self._unread = self._unread.split(b"\0")
            for answer in map(json.loads, messages):
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"{method} was not answered within {WAIT_S:.0f} s")
            self._unread += os.read(self._answers, 1 << 20)

    def open(self, url: str, dark: bool = False, width: int = 1200) -> None:
        """Load ``url`` and wait until it has been read."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=1600, deviceScaleFactor=1, mobile=False)
        self.send("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self.value(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{expression}: not within {WAIT_S:.0f} s; shown: {self.value('document.body.innerText')}"
                )
            time.sleep(POLL_S)
        return found

    def key(self, key: str) -> None:
        """Press a key."""
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            shown = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **shown)

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Run Chromium, which must be installed."""
    assert CHROMIUM is not None
    for_commands, commands = os.pipe()
    answers, for_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = f"--headless --no-sandbox --disable-gpu --user-data-dir={profile} --remote-debugging-pipe about:blank"
        command = f'exec "{CHROMIUM}" {options} 3<&{for_commands} 4>&{for_answers}'
        process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(for_commands, for_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(for_commands)
        os.close(for_answers)
        try:
            yield Page(commands, answers)
        finally:
            os.close(commands)
            process.kill()
            process.wait()
            os.close(answers)
