"""A headless Chromium for tests, driven over a pipe by its DevTools protocol.

with Browser() as browser:
    browser.open(path)
    browser.run("document.title")
"""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time

REPORT = "document.querySelector('#main [role=tabpanel], #main .bad') !== null"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser():
    """The path of one that is installed, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page.

    Attributes:
        problems: exceptions and errors that the page logged.
        requests: addresses that it asked for.
    """

    def __init__(self, width=1280, height=900):
        self.size, self.problems, self.requests = (width, height), [], []
        self._number, self._buffer = 0, b""

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(
            prefix="jaxrl_browser_", ignore_cleanup_errors=True
        )
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"]
        flags.append(f"--user-data-dir={self._profile.name}")
        # it reads commands from 3 and answers on 4
        redirect = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, find_browser(), *flags],
            pass_fds=(to_browser, from_browser),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self._call("Target.createTarget", url="about:blank", session=None)["targetId"]
        self._session = None
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.resize(*self.size)
        return self

    def __exit__(self, *_):
        try:
            self._call("Browser.close", session=None)
            self._process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)  # with its children
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def resize(self, width, height, *, dark=False):
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path, hash="", drawn=REPORT):
        """Open a file and wait until the page is drawn: by default one of `jaxrl.report`."""
        self.open_address(f"file://{path}{hash}", drawn)

    def open_address(self, address, drawn=REPORT):
        """Open an address and wait until the page is drawn."""
        self._call("Page.navigate", url="about:blank")  # another hash alone would not load it
        self._call("Page.navigate", url=address)
        self.wait(drawn)

    def run(self, expression):
        """The value of a JavaScript expression, awaited."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self._call("Runtime.evaluate", **given)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:800])
        return found["result"].get("value")

    def wait(self, expression, seconds=60):
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(expression):
            if time.monotonic() > until:
                raise TimeoutError(expression)
            time.sleep(0.05)

    def press(self, key, code):
        """A key, on what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def move(self, x, y, *, click=False):
        """The mouse, to a place in the window."""
        kinds = ["mouseMoved", *(["mousePressed", "mouseReleased"] if click else [])]
        for kind in kinds:
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def screenshot(self, path):
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method, session="own", **params):
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._heed(answer)

    def _heed(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:800])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _read(self):
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
