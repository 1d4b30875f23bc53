"""`kvstore`: the command line that shows and uses a running store. `kvstore_cli.output` defines the exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from kvstore import __version__
from kvstore_cli import output
from kvstore_cli.auth import auth_app
from kvstore_cli.blocks import contains, delete, get, set_
from kvstore_cli.cluster import cluster_app, drain
from kvstore_cli.load import load
from kvstore_cli.options import EndpointOption, JsonOption, TimeoutOption, connected, endpoints_of
from kvstore_cli.output import CommandFailed, example, fail, print_json, show
from kvstore_cli.plan import plan_app
from kvstore_cli.proxy import proxy
from kvstore_cli.purge import purge
from kvstore_cli.tls import add_tls_options
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

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=output.HELP,
)


TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the token for servers that want one. [env vars: KVSTORE_TOKEN, KVSTORE_TOKEN_FILE]",
    ),
]


@app.callback()
def _main(version: VersionOption = False, token_file: TokenFileOption = None) -> None:
    """Look at and use a running kvstore server."""
    if token_file is not None:  # whatever client the command makes reads them
        os.environ.pop("KVSTORE_TOKEN", None)
        os.environ["KVSTORE_TOKEN_FILE"] = str(token_file)


@app.command(epilog=example("kvstore ping --endpoint cache-1:7070"))
def ping(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Say whether all shards answer, and how fast."""
    with connected(endpoint, None, timeout) as client:
        seconds = client.ping()
        shards = len(client.info().shards)
        show(
            {"ok": True, "shards": shards, "seconds": seconds},
            as_json,
            lambda: print(f"{shards} shard(s) answered in {seconds * 1000:.2f} ms"),
        )


@app.command(epilog=example("kvstore info --endpoint cache-1:7070 --endpoint cache-2:7070"))
def info(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Show shards, memory, disk and namespaces.

    If some shards do not answer, the others are shown and the status is 1.
    """
    from kvstore_cli.info_tables import print_info
    from kvstore_cli.store_state import store_state

    with connected(endpoint, None, timeout, fail_open=True) as client:
        state = store_state(client)
    show(state, as_json, lambda: print_info(state), state.failure)


@app.command(epilog=example("kvstore sync --endpoint cache-1:7070"))
def sync(endpoint: EndpointOption = None, timeout: TimeoutOption = 5.0, as_json: JsonOption = False) -> None:
    """Wait until every shard has stored what it was sent before."""
    with connected(endpoint, None, timeout) as client:
        client.sync()
        show({"ok": True}, as_json, lambda: print("all shards have stored what they were sent"))


app.command(epilog=example("kvstore top --endpoint cache-1:7070", "kvstore top --once --sort out --by shard"))(top)
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
    block_bytes: Annotated[int, typer.Option(min=1, help="Size of a block.")] = 917_504,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks a round.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Blocks a call.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each operation, interleaved.")] = 7,
    evict: Annotated[bool, typer.Option("--evict", help="Run even if blocks of others have to be evicted.")] = False,
    timeout: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Measure the throughput and latency of a running server.

    Measured are set, get_into, stream_get, contains and match_prefix, from where the command runs.

    It is safe on a server in use: its blocks are in a namespace of its own and have the lowest priority, it removes
    them at the end, also after Ctrl-C, and it refuses to start if they would evict the blocks of others.
    """
    from kvstore_cli.bench import Bench, NoRoom, print_bench
    from kvstore_cli.options import store_errors

    measurement = Bench(endpoints_of(endpoint), block_bytes, blocks, batch, rounds, timeout)
    with store_errors():
        try:
            report = measurement.run(evict, shown=not as_json)
        except (NoRoom, ValueError) as error:
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
app.add_typer(plan_app, name="plan")
app.command(
    epilog=example(
        "kvstore load --url http://engine-1:8000 --model M --rate 4 --input-tokens 1000 --output-tokens 200 \\",
        "    --requests 400 --slo-ttft 0.5 --slo-tpot 0.05",
        "kvstore load --url http://engine-1:8000 --model M --trace conversation.jsonl --speed 2 \\",
        "    --slo-ttft 0.5 --slo-tpot 0.05 --chart load.svg",
    )
)(load)
app.command(epilog=example("kvstore trace proxy.json p.json d.json --output request.json"))(trace)
app.command(epilog=example("kvstore drain node-1 --endpoint etcd://etcd-1:2379/prod --seconds 120"))(drain)


def main() -> None:
    """Entry point of `kvstore`."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy else starts a thread for every core
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command. -> its exit status. Prints the error, for people and with --json also for programs."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        command = typer.main.get_command(app)
        add_tls_options(command)
        status = command.main(list(arguments), prog_name="kvstore", standalone_mode=False)
        return int(status or 0)
    except CommandFailed as error:
        failure = error
        failure.print()
    except _UsageError as error:
        error.show()
        failure = CommandFailed("usage", error.format_message())
    if "--json" in options:
        print_json(failure.document)
    return failure.status


if __name__ == "__main__":
    main()
