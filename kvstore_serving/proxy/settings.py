"""The proxy's options, checked once at the start.

All limits of the proxy are here: how long it waits for engines and users, and how much memory it uses for their data.
All times are in seconds, and all sizes in bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from kvstore_client.engine.directory import EngineRecord

Policy: TypeAlias = Literal["auto", "colocate", "split"]
PROXY_POLICIES: Final = get_args(Policy)
_LISTEN_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s\[\]:/]*)):([0-9]{1,5})")
_DURATIONS: Final = {
    "drain_s": "--drain-seconds",
    "connect_s": "--connect-seconds",
    "first_byte_s": "--first-byte-seconds",
    "idle_s": "--idle-seconds",
    "answer_s": "--answer-seconds",
    "check_interval_s": "--check-seconds",
    "user_stall_s": "--user-stall-seconds",
}


class SettingsError(ValueError):
    """An option cannot be used. The message names the given value, the expected one, and what to do."""


@dataclass(frozen=True)
class Settings:
    """All options. `events`: for each engine its URL, and the publisher and replay address of its KV events."""

    host: str
    port: int
    store: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    pools: str = ""
    engines: str = ""
    events: tuple[tuple[str, str, str], ...] = ()
    policy: Policy = "auto"
    split_tokens: int | None = None  # None to measure it, see `pace`
    drain_s: float = 60.0
    retries: int = 2  # retries of one request, on other decode engines
    connect_s: float = 2.0
    first_byte_s: float = 300.0  # until an engine's first byte; its queue may be long
    idle_s: float = 60.0  # between two pieces of an engine's stream
    answer_s: float = 1800.0  # for an answer that is not streamed
    tokenize_s: float = 2.0
    backoff_s: float = 1.0  # an engine's pause after its first failure; doubled after each further failure
    check_interval_s: float = 2.0
    check_timeout_s: float = 2.0
    user_stall_s: float = 120.0  # how long a user may stop reading
    max_body_bytes: int = 32 << 20
    max_bodies_bytes: int = 256 << 20  # the bodies of all requests, those that are arriving and those being served
    max_answer_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    max_in_flight: int = 1024
    access_log: str = "-"
    trace_file: str = ""
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        for url in (*self.prefill, *self.decode):
            check_engine_url(url)
        known = {*self.prefill, *self.decode}
        for url, _, _ in self.events:
            if url not in known:
                raise SettingsError(
                    f"--events names {url!r}, which is not a URL of --prefill or --decode; expected one of them"
                )
        flags = {"--prefill or --decode": known, "--pools": self.pools, "--engines": self.engines}
        ways = [name for name, given in flags.items() if given]
        if len(ways) > 1:
            raise SettingsError(f"{' and '.join(ways)} were given; expected only one of them")
        if not ways:
            raise SettingsError(
                "no engines were given; expected --prefill URL and --decode URL, --pools FILE, or --engines etcd://…"
            )
        if self.policy not in PROXY_POLICIES:
            raise SettingsError(f"--policy is {self.policy!r}; expected one of {', '.join(PROXY_POLICIES)}")
        for name, flag in _DURATIONS.items():
            if not 0 < getattr(self, name) < 86_400:
                raise SettingsError(f"{flag} is {getattr(self, name)!r}; expected more than 0 and less than a day")
        if self.otlp_endpoint:
            parts = urlsplit(self.otlp_endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise SettingsError(f"--otlp-endpoint is {self.otlp_endpoint!r}; expected http://HOST:PORT")
        if self.split_tokens is not None and self.split_tokens < 1:
            raise SettingsError(f"--split-tokens is {self.split_tokens!r}; expected auto, or 1 or more")
        for name, flag in (("max_in_flight", "--max-in-flight"), ("max_body_bytes", "--max-body")):
            if getattr(self, name) < 1:
                raise SettingsError(f"{flag} is {getattr(self, name)!r}; expected 1 or more")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise SettingsError(
                f"--max-bodies is {self.max_bodies_bytes} bytes; expected at least --max-body, which is "
                f"{self.max_body_bytes} bytes"
            )

    def named(self) -> list[EngineRecord]:
        """The engines that are given by flags."""
        events = {url: addresses for url, *addresses in self.events}
        records = []
        for url in dict.fromkeys((*self.prefill, *self.decode)):
            roles: list[Literal["prefill", "decode"]] = []
            if url in self.prefill:
                roles.append("prefill")
            if url in self.decode:
                roles.append("decode")
            publisher, replay = events.get(url, ("", ""))
            records.append(EngineRecord(url, tuple(roles), events=publisher, replay=replay))
        return records


def check_engine_url(url: str) -> None:
    """Raise `SettingsError` unless `url` is of the form http://HOST:PORT, without a slash, query or fragment at its
    end."""
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or url.endswith("/")
    ):
        raise SettingsError(f"the engine's address {url!r}: expected http://HOST:PORT without a slash at the end")


def parse_listen(text: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT. Raises `SettingsError`."""
    match = _LISTEN_ADDRESS.fullmatch(text)
    if match is None or int(match[3]) >= 1 << 16:
        raise SettingsError(f"--listen is {text!r}; expected HOST:PORT with a port from 0 to 65535")
    return match[1] or match[2] or "127.0.0.1", int(match[3])


def parse_split_tokens(text: str) -> int | None:
    """Return the number of tokens, or None if it is to be measured. Raises `SettingsError`."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise SettingsError(f"--split-tokens is {text!r}; expected auto, or a number of tokens")
    return int(text)


def parse_events(text: str) -> tuple[str, str, str]:
    """Return the URL, publisher and replay address of URL=EVENTS[,REPLAY]. Raises `SettingsError`."""
    url, separator, rest = text.partition("=")
    addresses = rest.split(",")
    if not separator or not addresses[0] or len(addresses) > 2:
        raise SettingsError(f"--events is {text!r}; expected ENGINE_URL=EVENTS[,REPLAY], as in --kv-events-config")
    return url, addresses[0], addresses[1] if len(addresses) == 2 else ""
