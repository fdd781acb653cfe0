"""Debian's Chromium, driven through chromedriver's own HTTP interface."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

PATIENCE = 60  # seconds that a test waits for what must happen
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name for a reference
_ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


class Browser:
    """One page in one window."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        options = {"args": _ARGUMENTS, "binary": shutil.which("chromium")}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self.session = self._call("POST", "/session", wanted)["sessionId"]

    def open(self, url: str) -> None:
        self._do("POST", "/url", {"url": url})

    def run(self, script: str, *arguments):
        """What a function body returns in the page."""
        return self._do("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script: str, *arguments):
        """What a function body returns, once that is true of it."""
        give_up = time.monotonic() + PATIENCE
        while not (found := self.run(f"return ({script})", *arguments)):
            assert time.monotonic() < give_up, f"never came true: {script}"
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def click(self, selector: str) -> None:
        self._do("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, keys: str) -> None:
        """Keys to an element; a path to a file's input."""
        self._do("POST", f"/element/{self._find(selector)}/value", {"text": keys})

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._do("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def drop(self, data: bytes, name: str, kind: str) -> None:
        """Drop a file on the page, as a person does with the mouse."""
        self.run(_DROP, "drop", base64.b64encode(data).decode(), name, kind)

    def paste(self, data: bytes, name: str, kind: str) -> None:
        self.run(_DROP, "paste", base64.b64encode(data).decode(), name, kind)

    def resize(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """Light or dark."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self._devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    def picture(self) -> bytes:
        """The whole page as a PNG."""
        options = {"captureBeyondViewport": True, "format": "png"}
        return base64.b64decode(self._devtools("Page.captureScreenshot", options)["data"])

    def close(self) -> None:
        self._do("DELETE", "")

    def _find(self, selector: str) -> str:
        found = self._do("POST", "/element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]

    def _devtools(self, command: str, options: dict):
        return self._do("POST", "/goog/cdp/execute", {"cmd": command, "params": options})

    def _do(self, method: str, path: str, body: dict | None = None):
        return self._call(method, f"/session/{self.session}{path}", body)

    def _call(self, method: str, path: str, body: dict | None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.driver + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{path}: {json.load(error)['value']['message']}") from None


_DROP = """
const [kind, data, name, type] = arguments;
const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], name, { type }));
const target = document.getElementById("drop");
const options = { bubbles: true, cancelable: true };
target.dispatchEvent(kind === "paste"
  ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
  : new DragEvent("drop", { ...options, dataTransfer: transfer }));
"""


@contextmanager
def chromium():
    """A browser, or the reason why there is none."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed; apt-get install chromium chromium-driver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}", "--silent"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port)
        browser = Browser(f"http://127.0.0.1:{port}")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(PATIENCE)


def _wait_for(port: int) -> None:
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < give_up, "chromedriver does not answer"
            time.sleep(0.05)
