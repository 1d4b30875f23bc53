"""A real headless Chromium with one page, driven through its DevTools protocol.

A thread reads the browser's messages; calls wait for their answers. It keeps the page's requests, the errors of its
scripts and the messages of its console.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
import urllib.request
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.support.harness import wait_until
from tests.support.network import need

PROGRAM: Final = "chromium"
START_S: Final = 30.0
ANSWER_S: Final = 20.0
_FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",  # root cannot use the sandbox; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--mute-audio",
    "--no-first-run",
    "--password-store=basic",
    "--remote-debugging-port=0",
)


def need_browser() -> None:
    """Skip the test if Chromium, which requirements/programs.txt lists, is not installed. In continuous integration,
    fail instead."""
    need("" if shutil.which(PROGRAM) else f"{PROGRAM} is not installed")


class Browser:
    """A browser, which must be closed at the end. Raises `AssertionError` if it does not answer in time."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []  # URLs that the page requested
        self.errors: list[str] = []  # errors of scripts, of the console and of the network
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loaded = threading.Event()
        command = [PROGRAM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        with (folder.parent / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._reader = self._start(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> Future[None]:
        port_file = folder / "DevToolsActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n"), START_S, "the browser starts")
        port = port_file.read_text().split()[0]
        url = wait_until(lambda: _page_url(port), START_S, "the browser has a page")
        opened = threading.Event()
        reader = asyncio.run_coroutine_threadsafe(self._read(url, opened), self._loop)
        assert opened.wait(ANSWER_S), "the browser does not answer"
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return reader

    def close(self) -> None:
        """End the browser."""
        os.killpg(self._process.pid, signal.SIGKILL)  # the browser runs many processes
        self._process.wait()
        reader = getattr(self, "_reader", None)
        if reader is not None:
            reader.result(ANSWER_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- the protocol --------------------------------------------------------------------------------------------

    async def _read(self, url: str, opened: threading.Event) -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=64 << 20) as self._socket:
            opened.set()
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._take(json.loads(message.data))

    def _take(self, said: Any) -> None:
        if "id" in said:
            self._waiting.pop(said["id"]).set_result(said)
            return
        event, told = said["method"], said["params"]
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded.set()
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"].get("exception", told)))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled":
            self.errors.append(f"console.{told['type']}: {told['args']}")

    async def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = self._loop.create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await answer

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol. Returns its result."""
        said = asyncio.run_coroutine_threadsafe(self._call(method, parameters), self._loop).result(ANSWER_S)
        assert "error" not in said, (method, said["error"])
        return said["result"]

    # ---- the page ------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a page, and wait until it is loaded."""
        self._loaded.clear()
        self.call("Page.navigate", url=url)
        assert self._loaded.wait(ANSWER_S), f"{url} was not loaded"

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, (expression, result)
        return result["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Return the visible text of the first element that matches a selector."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Set the page's size in pixels, and the colors that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return a screenshot of the page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def _page_url(port: str) -> str | None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=ANSWER_S) as answer:
        pages = [each for each in json.load(answer) if each["type"] == "page"]
    return str(pages[0]["webSocketDebuggerUrl"]) if pages else None
