"""`kvstore`: the command line that shows and uses a running store. `kvstore_cli.output` defines the exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import typer
import typer.core

from kvstore import __version__
from kvstore_cli import output
from kvstore_cli.auth import auth_app
from kvstore_cli.blocks import contains, delete, get, keys, set_
from kvstore_cli.clients import clients
from kvstore_cli.cluster import cluster_app, drain
from kvstore_cli.config import config_app
from kvstore_cli.connection import add_connection_options, set_endpoint
from kvstore_cli.load import load
from kvstore_cli.options import EndpointOption, JsonOption, TimeoutOption, connected, endpoints_of, size_option
from kvstore_cli.output import CommandFailed, example, fail, print_json, show
from kvstore_cli.plan import plan_app
from kvstore_cli.proxy import proxy
from kvstore_cli.purge import purge
from kvstore_cli.size import SIZE_EXAMPLES, size
from kvstore_cli.slowlog import slowlog
from kvstore_cli.top import top
from kvstore_cli.trace import trace
from kvstore_cli.verify import verify

# The base class of all usage errors, which Typer does not export.
_UsageError: Final = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


def _show_version(value: bool) -> None:
    if value:
        print(f"kvstore {__version__}")
        raise typer.Exit(0)


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]

# The content of `kvstore --help`: every command under a heading, with a line that fits 80 columns.
COMMAND_GROUPS: Final = {
    "See what a store does": {
        "info": "Nodes, tenants and namespaces: memory, disk, hit rates.",
        "top": "The same and more, live.",
        "slowlog": "The last requests that took long, and where in a shard.",
        "ping": "Whether all shards answer, and how fast.",
        "clients": "The connections: traffic, requests, what waits to be sent.",
        "cluster": "The nodes of a cluster, and the shards that own a key.",
        "trace": "Merge trace files of the proxy and engines into one.",
    },
    "Use blocks": {
        "keys": "The most recently used keys of a namespace.",
        "contains": "Which keys have a block.",
        "get": "Write a block to a file or to standard output.",
        "set": "Store a block from a file or from standard input.",
        "delete": "Delete blocks.",
        "sync": "Wait until all blocks sent before are stored.",
    },
    "Look after a store": {
        "purge": "Remove all blocks of a namespace, a model or the store.",
        "verify": "Check every block on disk against its checksum.",
        "drain": "Move a node's blocks to the other nodes before it stops.",
        "auth": "The principals and tokens of a server's --auth file.",
        "config": "Show and change settings of a running server.",
    },
    "Measure and plan": {
        "bench": "Throughput and latency of a running server.",
        "load": "Send requests to an engine or a proxy, and measure SLOs.",
        "size": "The memory and network that the contexts of users need.",
        "plan": "Plan a fleet with disaggregated prefill and decode.",
    },
    "Serve engines": {
        "proxy": "One OpenAI-compatible address for prefill and decode engines.",
    },
}


class _Grouped(typer.core.TyperGroup):
    """A group of commands whose help lists them under headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, commands in COMMAND_GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(8), line) for name, line in commands.items()])


app = typer.Typer(
    cls=_Grouped,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=output.HELP,
)


@app.callback()
def _main(version: VersionOption = False, endpoint: EndpointOption = None) -> None:
    """Inspect and use a running kvstore server."""
    set_endpoint(endpoint)


@app.command(epilog=example("kvstore ping --endpoint cache-1:7070"))
def ping(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Show whether all shards answer, and how fast."""
    with connected(endpoint, None, timeout) as client:
        seconds, shards = client.ping(), client.shard_count
        show(
            {"ok": True, "shards": shards, "seconds": seconds},
            as_json,
            lambda: print(f"{shards} shard(s) answered in {seconds * 1000:.2f} ms"),
        )


@app.command(epilog=example("kvstore info --endpoint cache-1:7070 --endpoint cache-2:7070"))
def info(
    shards: Annotated[
        bool, typer.Option("--shards", help="Show also every shard: processes, memory, requests, disk; with a legend.")
    ] = False,
    endpoint: EndpointOption = None,
    timeout: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show nodes, tenants and namespaces: use of memory and disk, hit rates, times of requests.

    If some shards do not answer, the others are shown, and the exit status is 1. With --json, the document has every
    shard in full, with or without --shards.
    """
    from kvstore_cli.info_summary import print_summary
    from kvstore_cli.info_tables import print_tables
    from kvstore_cli.store_state import store_state

    with connected(endpoint, None, timeout, fail_open=True) as client:
        state = store_state(client)

    def tables() -> None:
        print_summary(state)
        if shards:
            print_tables(state)

    show(state, as_json, tables, state.failure)


@app.command(epilog=example("kvstore sync --endpoint cache-1:7070"))
def sync(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Wait until every shard has stored all blocks that were sent to it before this command."""
    with connected(endpoint, None, timeout) as client:
        client.sync()
        show({"ok": True}, as_json, lambda: print("all shards have stored what they were sent"))


app.command(epilog=example("kvstore top --endpoint cache-1:7070", "kvstore top --once --sort out --by shard"))(top)
app.command(epilog=example("kvstore clients --endpoint cache-1:7070", "kvstore clients --by address --limit 10"))(
    clients
)
app.command(epilog=example("kvstore slowlog --endpoint cache-1:7070"))(slowlog)
app.command(epilog=example("kvstore keys --hottest 10 --namespace @ns.json", "kvstore keys --model 'Qwen/*'"))(keys)
app.command(epilog=example("kvstore contains 00112233445566778899aabbccddeeff --namespace @ns.json"))(contains)
app.command(epilog=example("kvstore get 00112233445566778899aabbccddeeff --namespace @ns.json --output block"))(get)
app.command(
    "set",
    epilog=example(
        "kvstore set 00112233445566778899aabbccddeeff block --namespace @ns.json",
        "head -c 4096 /dev/urandom | kvstore set 00112233445566778899aabbccddeeff - --namespace @ns.json",
    ),
)(set_)
app.command(epilog=example("kvstore delete 00112233445566778899aabbccddeeff --namespace @ns.json"))(delete)


app.command(
    epilog=example(
        "kvstore purge --namespace @ns.json --endpoint cache-1:7070",
        "kvstore purge --model 'Qwen/*' --yes --endpoint cache-1:7070",
        "kvstore purge --all --yes --endpoint cache-1:7070",
    )
)(purge)


@app.command(epilog=example("kvstore bench --endpoint cache-1:7070 --blocks 256 --rounds 3"))
def bench(
    endpoint: EndpointOption = None,
    block_bytes: Annotated[int, size_option("Size of a block, such as 64KiB.")] = 917_504,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks in each round; by default as many as are free, at most 512.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Blocks in each call.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each operation, interleaved.")] = 7,
    evict: Annotated[bool, typer.Option("--evict", help="Run even if other users' blocks must be evicted.")] = False,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Measure the throughput and latency of a running server.

    It measures set, get_into, stream_get, contains and match_prefix from the host on which it runs. A round before the
    others warms up and is not measured.

    It is safe on a server in use. Its blocks are in a namespace of their own, have the lowest priority, and are removed
    at the end, also after Ctrl-C. It refuses to start if its blocks would evict other users' blocks, or if the token
    may not ask how much is free; --evict allows both.
    """
    from kvstore_cli.bench import Bench, WouldEvict, print_bench
    from kvstore_cli.options import store_errors
    from kvstore_cli.store_state import need_all_answers

    with connected(endpoint, None, timeout, fail_open=True) as client:
        need_all_answers(client)
    measurement = Bench(endpoints_of(endpoint), block_bytes, blocks, batch, rounds, timeout)
    with store_errors():
        try:
            report = measurement.run(evict, shown=not as_json)
        except (WouldEvict, ValueError) as error:
            fail("usage", str(error))
    show(report, as_json, lambda: print_bench(report))


app.command(epilog=example("kvstore verify /var/lib/kvstore", "kvstore verify --endpoint cache-1:7070"))(verify)
app.command(
    epilog=example(
        "kvstore proxy --listen 0.0.0.0:8000 --store cache-1:7070 --prefill http://gpu-1:8000 --decode http://gpu-2:8000"
    )
)(proxy)
app.add_typer(auth_app, name="auth")
app.add_typer(cluster_app, name="cluster")
app.add_typer(config_app, name="config")
app.add_typer(plan_app, name="plan")
app.command(
    epilog=example(
        "kvstore load --url http://engine-1:8000 --model M --rate 4 --input-tokens 1000 --output-tokens 200 \\",
        "    --requests 400 --slo-ttft 0.5 --slo-tpot 0.05",
        "kvstore load --url http://engine-1:8000 --model M --trace conversation.jsonl --speed 2 \\",
        "    --slo-ttft 0.5 --slo-tpot 0.05 --chart load.svg",
    )
)(load)
app.command(epilog=SIZE_EXAMPLES)(size)
app.command(epilog=example("kvstore trace proxy.json p.json d.json --output request.json"))(trace)
app.command(epilog=example("kvstore drain node-1 --endpoint etcd://etcd-1:2379/prod --seconds 120"))(drain)


def main() -> None:
    """The entry point of `kvstore`."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise numpy starts a thread for every core
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status. Prints errors for people, and with --json also for programs."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        command = typer.main.get_command(app)
        add_connection_options(command)
        status = command.main(list(arguments), prog_name="kvstore", standalone_mode=False)
        return int(status or 0)
    except CommandFailed as error:
        failure = error
        failure.print()
    except _UsageError as error:
        if missing := _all_missing(error, options):
            error = _UsageError(missing, error.ctx)
        error.show()
        failure = CommandFailed("usage", error.format_message())
    if "--json" in options:
        print_json(failure.document)
    return failure.status


def _all_missing(error: typer.BadParameter, options: Sequence[str]) -> str:
    """Return the text for an error about a missing option, which names all missing options; empty for other errors."""
    if type(error).__name__ != "MissingParameter" or error.ctx is None:
        return ""
    given = {word.partition("=")[0] for word in options}
    missing = [
        parameter.opts[0]
        for parameter in error.ctx.command.params
        if parameter.required and parameter.opts[0].startswith("-") and not given & set(parameter.opts)
    ]
    return f"Missing options: {', '.join(missing)}." if len(missing) > 1 else ""


if __name__ == "__main__":
    main()
