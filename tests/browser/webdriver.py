"""A headless Chromium, driven through chromedriver by the WebDriver protocol (W3C): JSON over HTTP.

Debian has both programs, of the same version. Selenium would add a dozen packages and a program that downloads drivers,
for the ten commands that the tests use; Playwright brings a Node runtime, and wants the browser of its own version.
"""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.waiting import until_true

PATIENCE_S = 120.0
MISSING = "chromedriver or chromium is missing: apt-get install chromium chromium-driver"
TAB, ENTER, SPACE = "\ue004", "\ue007", " "


class Browser:
    """One window."""

    def __init__(self, port: int, width: int, height: int) -> None:
        self._port = port
        arguments = [
            "--headless=new",
            "--disable-gpu",
            "--no-sandbox",  # the tests may run as root
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            f"--window-size={width},{height}",
            # No name leads anywhere: the pages need addresses of this machine only.
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ]
        options = {"binary": shutil.which("chromium"), "args": arguments}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        self._session = ""
        self._session = (
            f"/session/{self._ask('POST', '/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
        )

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            data = None if method == "GET" else json.dumps(body or {})
            connection.request(method, self._session + path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            value = json.loads(answer.read())["value"]
            assert answer.status == 200, (path, body, value)
            return value
        finally:
            connection.close()

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    @property
    def address(self) -> str:
        return str(self._ask("GET", "/url"))

    def run(self, script: str, *arguments: object) -> Any:
        """Return the result of a function body of JavaScript."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def devtools(self, command: str, **parameters: object) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def text(self, selector: str = "body") -> str:
        """Return the text of the first such element; empty if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def click(self, selector: str) -> None:
        """Click on the middle of the element, as a mouse does. The page may replace it at any time."""
        until_true(lambda: self._clicked(selector), PATIENCE_S)

    def _clicked(self, selector: str) -> bool:
        found = self.run(
            "const e = document.querySelector(arguments[0]); e?.scrollIntoView({block: 'center'});"
            "const r = e?.getBoundingClientRect(); return r && [r.x + r.width / 2, r.y + r.height / 2]",
            selector,
        )
        if not found:
            return False
        x, y = (round(each) for each in found)
        actions = [
            {"type": "pointerMove", "duration": 0, "x": x, "y": y},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        self._ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})
        return True

    def press(self, *keys: str) -> None:
        """Press keys, at the focused element."""
        actions = [{"type": kind, "value": key} for key in "".join(keys) for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def until(self, selector: str, *words: str) -> str:
        """Wait until the element has all words, without loading the page again; return its text."""
        text = ""

        def has_all() -> bool:
            nonlocal text
            text = self.text(selector)
            return all(word in text for word in words)

        try:
            until_true(has_all, PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"{selector} lacks one of {words}: {text}") from None
        return text

    def log(self, kind: str) -> list[Any]:
        """Return the new entries of the log `browser` or `performance`."""
        return list(self._ask("POST", "/se/log", {"type": kind}))

    def requests(self) -> list[str]:
        """Return the addresses that were requested since the last call."""
        messages = (json.loads(entry["message"])["message"] for entry in self.log("performance"))
        return [
            str(each["params"]["request"]["url"]) for each in messages if each["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, whole: bool = False) -> bytes:
        taken = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])

    def close(self) -> None:
        self._ask("DELETE", "")


@contextmanager
def running_browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    if shutil.which("chromedriver") is None or shutil.which("chromium") is None:
        raise FileNotFoundError(MISSING)
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert driver.stdout is not None
        line = next(each for each in driver.stdout if "started successfully on port" in each)
        browser = Browser(int(line.strip().rstrip(".").rpartition(" ")[2]), width, height)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.communicate()
