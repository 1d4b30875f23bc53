"""Host names are resolved within a deadline, whatever the system's resolver does."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore_client._links import resolving
from kvstore_client._links.resolving import resolve

FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 7070))]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event; the resolver answers only after the test has set it."""
    answers = threading.Event()

    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        answers.wait(10)
        return FOUND

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield answers
    answers.set()


def test_a_silent_resolver_costs_the_deadline_and_its_answer_is_kept(
    silent: threading.Event,
) -> None:
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=r"silent-host: the resolver did not answer within 0\.1 s"):
        resolve("silent-host", 7070, 0.1)
    assert time.monotonic() - before < 5
    silent.set()
    assert resolve("silent-host", 7070, 10.0) == [(socket.AF_INET, ("127.0.0.1", 7070))]


@pytest.mark.parametrize("failure", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")])
def test_a_failing_resolver_is_an_error_and_keeps_the_last_answer(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> list[Any]:
        raise failure

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(OSError, match=r"not known|is not a host name"):
        resolve("failing-host", 7070, 10.0)
    monkeypatch.setitem(resolving._last, ("failing-host", 7070), [(socket.AF_INET, ("127.0.0.1", 7070))])
    assert resolve("failing-host", 7070, 10.0) == [(socket.AF_INET, ("127.0.0.1", 7070))]


def test_a_process_can_end_while_its_resolver_is_silent() -> None:
    program = """
import socket, time
from kvstore_client._links.resolving import resolve
socket.getaddrinfo = lambda *_, **__: time.sleep(60)
try:
    resolve("silent-host", 7070, 0.05)
except TimeoutError:
    print("in time")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "in time\n"
