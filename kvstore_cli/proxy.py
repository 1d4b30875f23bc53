"""`kvstore proxy`: its options. `kvstore_serving.proxy` does the work, which needs the extra `serving`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvstore_cli.options import need_modules, takes
from kvstore_cli.output import fail

Seconds = Annotated[float, typer.Option(metavar="SECONDS", min=0.001)]


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """The options of `kvstore proxy`."""

    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address for users; port 0 picks a free one.")
    ]
    store: Annotated[
        list[str],
        typer.Option("--store", metavar="ENDPOINT", help="The store that the engines share, as for --endpoint."),
    ]
    prefill: Annotated[
        list[str] | None, typer.Option("--prefill", metavar="URL", help="A prefill engine; repeatable.")
    ] = None
    decode: Annotated[
        list[str] | None,
        typer.Option("--decode", metavar="URL", help="A decode engine; repeatable. One URL may have both roles."),
    ] = None
    pools: Annotated[
        str,
        typer.Option("--pools", metavar="FILE", help="A TOML file that lists the engines; read again when it changes."),
    ] = ""
    engines: Annotated[
        str, typer.Option("--engines", metavar="URL", help="etcd://HOST:PORT/NAME where engines register themselves.")
    ] = ""
    events: Annotated[
        list[str] | None,
        typer.Option("--events", metavar="ENGINE=EVENTS[,REPLAY]", help="The KV events of an engine; repeatable."),
    ] = None
    policy: Annotated[str, typer.Option(help="auto, colocate or split.")] = "auto"
    split_tokens: Annotated[
        str,
        typer.Option(
            metavar="N|auto", help="The fewest uncached tokens for which P and D share a prompt; auto: measured."
        ),
    ] = "auto"
    drain_seconds: Annotated[
        float, typer.Option(min=0.001, help="How long running requests may take after SIGTERM.")
    ] = 60.0
    retries: Annotated[int, typer.Option(min=0, help="How many other decode engines a request may try.")] = 2
    connect_seconds: Annotated[float, typer.Option(min=0.001, help="Longest time to connect to an engine.")] = 2.0
    first_byte_seconds: Annotated[float, typer.Option(min=0.001, help="Longest time to an engine's first event.")] = (
        300.0
    )
    idle_seconds: Annotated[float, typer.Option(min=0.001, help="Longest time between two events.")] = 60.0
    answer_seconds: Annotated[float, typer.Option(min=0.001, help="Longest time for an unstreamed answer.")] = 1800.0
    check_seconds: Annotated[float, typer.Option(min=0.001, help="Time between two health checks of an engine.")] = 2.0
    check_timeout_seconds: Annotated[float, typer.Option(min=0.001, help="Longest time for a health check.")] = 2.0
    backoff_seconds: Annotated[float, typer.Option(min=0.001, help="Pause of an engine after its first failure.")] = 1.0
    user_stall_seconds: Annotated[float, typer.Option(min=0.001, help="How long a user may stop reading.")] = 120.0
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest body of a request.")] = "32MiB"
    max_bodies: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for the bodies of all requests; others get status 503.")
    ] = "256MiB"
    max_in_flight: Annotated[int, typer.Option(min=1, help="The most requests at a time; others get status 503.")] = (
        1024
    )
    access_log: Annotated[
        str, typer.Option(metavar="FILE", help="A JSON object for each request; - is stdout, '' is off.")
    ] = "-"
    trace_file: Annotated[
        str, typer.Option(metavar="FILE", help="Write each request's times, for a trace viewer; see kvstore trace.")
    ] = ""
    otlp_endpoint: Annotated[
        str, typer.Option(metavar="URL", help="Send spans to an OpenTelemetry collector, such as http://HOST:4318.")
    ] = ""
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info"
    log_format: Annotated[str, typer.Option(help="text or json, on standard error.")] = "text"


@takes(ProxyOptions)
def proxy(given: ProxyOptions) -> None:
    """Serve one OpenAI-compatible address for prefill and decode engines that share a store."""
    need_modules("proxy", "uvicorn", "starlette", "aiohttp")
    from kvstore import logs
    from kvstore.sizes import parse_size
    from kvstore_serving.proxy.server import run
    from kvstore_serving.proxy.settings import Settings, SettingsError, parse_events, parse_listen, parse_split_tokens

    for name, value, allowed in (
        ("level", given.log_level, logs.LEVELS),
        ("format", given.log_format, logs.LOG_FORMATS),
    ):
        if value not in allowed:
            fail("usage", f"--log-{name} is {value!r}; expected one of {', '.join(allowed)}")
    try:
        host, port = parse_listen(given.listen)
        settings = Settings(
            host, port, tuple(given.store), tuple(given.prefill or ()), tuple(given.decode or ()), given.pools,
            given.engines, tuple(parse_events(each) for each in given.events or ()),
            given.policy,  # type: ignore[arg-type] # `Settings` checks it
            parse_split_tokens(given.split_tokens),
            drain_s=given.drain_seconds, retries=given.retries, connect_s=given.connect_seconds,
            first_byte_s=given.first_byte_seconds, idle_s=given.idle_seconds, answer_s=given.answer_seconds,
            check_interval_s=given.check_seconds, check_timeout_s=given.check_timeout_seconds,
            backoff_s=given.backoff_seconds, user_stall_s=given.user_stall_seconds,
            max_body_bytes=parse_size(given.max_body), max_bodies_bytes=parse_size(given.max_bodies),
            max_in_flight=given.max_in_flight,
            access_log=given.access_log, trace_file=given.trace_file, otlp_endpoint=given.otlp_endpoint,
        )  # fmt: skip
        logs.configure(given.log_level, "proxy", given.log_format)
        run(settings)
    except (SettingsError, ValueError) as error:
        fail("usage", str(error))
