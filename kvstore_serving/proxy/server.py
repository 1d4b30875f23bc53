"""The proxy's process, from its settings to its ready line, and from SIGTERM to exit status 0.

SIGTERM makes the proxy drain: it refuses new requests, but keeps the port open, so that a load balancer learns of this
from /readyz. Running requests have `drain_s` seconds to finish; those that do not finish end with an error event. A
second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore_serving.proxy.app import Proxy
from kvstore_serving.proxy.checks import Checks
from kvstore_serving.proxy.decision import Decider
from kvstore_serving.proxy.describing import Describing
from kvstore_serving.proxy.engine_events import EngineEvents
from kvstore_serving.proxy.following import Following
from kvstore_serving.proxy.metrics import Metrics
from kvstore_serving.proxy.pairs import Pairs
from kvstore_serving.proxy.pools import Pools
from kvstore_serving.proxy.prefixes import Prefixes
from kvstore_serving.proxy.record import AccessLog
from kvstore_serving.proxy.serving import Serving
from kvstore_serving.proxy.settings import Settings, SettingsError
from kvstore_serving.proxy.store import StoreWatch
from kvstore_serving.proxy.tracing import Tracing
from kvstore_serving.proxy.upstream import Upstream

log = logging.getLogger(__name__)

_READY_POLL_S: Final = 0.05
_CANCELLED_S: Final = 5.0  # how long cancelled requests may take to end


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises `SettingsError` for settings that cannot be used, such as a port in use."""
    asyncio.run(_run(settings))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _NoUpgrades(H11Protocol):
    """uvicorn's HTTP without its two warnings for each request with `Upgrade`, such as Java's clients send for HTTP/2.
    HTTP allows serving them without the upgrade, and uvicorn does so."""

    def _unsupported_upgrade_warning(self) -> None:
        log.debug("a request asks for another protocol; it is served as HTTP/1.1")


async def _run(settings: Settings) -> None:
    tracing = Tracing(settings)
    try:
        access_log = AccessLog(settings.access_log)
        sock = _listen(settings.host, settings.port)
    except OSError as error:
        raise SettingsError(f"{error}; expected a free port in --listen, and a writable file in --access-log") from None
    try:
        store = StoreWatch(settings.store, settings.check_interval_s, settings.check_timeout_s)
    except ValueError as error:
        raise SettingsError(f"--store: {error}") from None
    pools = Pools(settings.backoff_s)
    upstream = Upstream(settings, os.environ.get("KVSTORE_ENGINE_API_KEY", ""))  # its sessions must be closed
    describing = Describing(pools, upstream, store, settings.check_timeout_s)
    checks = Checks(pools, upstream, describing, settings.check_interval_s, settings.check_timeout_s)
    events = EngineEvents()
    following = Following(settings, pools, checks, events)
    pairs = Pairs(settings.backoff_s)
    decider = Decider(settings, pools, upstream, Prefixes(events, store), store, pairs, describing)
    metrics = Metrics(pools, store, decider.split_from)
    serves = Serving(settings, pools, upstream, metrics, decider, tracing.on)
    proxy = Proxy(
        serves,
        access_log,
        tracing,
        lambda: {"store": store.status(), "not_arriving": pairs.status()},
        checks.look_again,
    )
    stop = asyncio.Event()
    _on_signals(stop)
    try:
        await following.start()
        await asyncio.gather(checks.first(), store.check())
        store.follow()
        server = _Server(_config(settings, proxy))
        serving = asyncio.create_task(server.serve([sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        host, port = sock.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        _say("listens", f"http://{name}:{port}", pools)
        ready = asyncio.create_task(_say_ready(proxy, f"http://{name}:{port}", pools))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        ready.cancel()
        await _drain(proxy, settings.drain_s, stop)
        server.should_exit = True
        await serving
    finally:
        await following.close()
        await checks.close()
        await describing.close()
        await store.close()
        await upstream.close()
        access_log.close()
        await asyncio.to_thread(tracing.close)
        await events.close()
        sock.close()


def _say(state: str, url: str, pools: Pools) -> None:
    print(f"kvstore proxy {state} {url} prefill={pools.count('prefill')} decode={pools.count('decode')}", flush=True)


async def _say_ready(proxy: Proxy, url: str, pools: Pools) -> None:
    """Print the ready line once /readyz succeeds."""
    while not proxy.ready:
        await asyncio.sleep(_READY_POLL_S)
    _say("ready", url, pools)


def _on_signals(stop: asyncio.Event) -> None:
    """Make the first SIGTERM or SIGINT set `stop`, and the next one end the process as if there were no handler."""
    loop = asyncio.get_running_loop()

    def handle(number: int) -> None:
        stop.set()
        loop.remove_signal_handler(number)
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)


async def _drain(proxy: Proxy, drain_s: float, stop: asyncio.Event) -> None:
    proxy.draining = True
    proxy.serving.metrics.draining.set(1)
    running = set(proxy.in_flight)
    log.info("draining: %d requests may finish within %g s", len(running), drain_s)
    if running:
        _, late = await asyncio.wait(running, timeout=drain_s)
        for task in late:
            task.cancel()
        if late:
            log.warning("%d requests were not finished after %g s: they are cut off", len(late), drain_s)
            await asyncio.wait(late, timeout=_CANCELLED_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets whose protocol is given as TCP, and accepted sockets inherit
    # this socket's protocol. With Nagle's algorithm, the body of each answer would wait 40 ms until the client has
    # acknowledged the headers.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _config(settings: Settings, proxy: Proxy) -> uvicorn.Config:
    options: dict[str, Any] = {
        "http": _NoUpgrades,  # h11 limits the size of a request's headers
        "h11_max_incomplete_event_size": settings.max_header_bytes,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": 2,
        "backlog": 2048,
    }
    return uvicorn.Config(proxy, **options)
