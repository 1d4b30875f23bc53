"""`kvstore size`: its options and its output. `kvstore_cli.sizing` does the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.sizes import format_size
from kvstore_cli.options import JsonOption, takes
from kvstore_cli.output import example, fail, printable, show
from kvstore_cli.plain_table import columns, print_table, scaled
from kvstore_cli.plan_options import check_finite, check_positive

if TYPE_CHECKING:
    from kvstore_cli.sizing import Network, Sizing
    from kvstore_serving.planning.model_config import KVShape

SIZE_EXAMPLES: Final = example(
    "kvstore size --model Llama-3.1-8B --context 8192 --users 200",
    "kvstore size --model Qwen2.5-32B --context 16384 --users 500 --shared-tokens 2048 \\",
    "    --turns-per-hour 12 --new-tokens 400 --ttft 0.5 --nodes 4 --replicas 2",
    "kvstore size --layers 32 --kv-heads 8 --head-size 128 --dtype fp8 --context 8192 --users 200",
)
# fmt: off
_SIZE_COLUMNS: Final = columns(("", "0"), ("tokens", "1", ","), ("blocks", "2", ","), ("size", "3", format_size))
_RATE_COLUMNS: Final = columns(("", "0"), ("GB/s", "1", scaled(1e-9, ".3g")), ("Gb/s", "1", scaled(8e-9, ".3g")))
# fmt: on


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """The options of `kvstore size`."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="A known model, such as Llama-3.1-8B, a config.json of Hugging Face, or a folder with one. An unknown "
            "name lists the known models.",
        ),
    ] = None
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Instead of --model: layers with keys and values.")
    ] = None
    kv_heads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Instead of --model: KV heads of a layer.")
    ] = None
    head_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Instead of --model: elements of a head.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Type of the KV cache, such as fp8. Default: the model's own, or bfloat16."),
    ] = None
    context: Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Context of each user.")] = None
    users: Annotated[int | None, typer.Option(min=1, metavar="N", help="Users whose context is kept.")] = None
    shared_tokens: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="The beginning that all contexts share; it is stored once.")
    ] = 0
    turns_per_hour: Annotated[
        float | None,
        typer.Option(metavar="N", help="Turns of each user in an hour; each turn reads the whole context."),
    ] = None
    new_tokens: Annotated[int, typer.Option(min=0, metavar="TOKENS", help="Tokens that a turn adds.")] = 0
    ttft: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="Time in which one context must be loaded.")
    ] = None
    replicas: Annotated[int, typer.Option(min=1, metavar="N", help="Copies of each block, on as many nodes.")] = 1
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Servers that share the blocks.")] = 1
    shards: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Shard processes of each server.")] = 1
    block_tokens: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens in each block of the engine.")] = 16
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Tensor parallelism of the engines.")] = 1
    as_json: JsonOption = False


@takes(SizeOptions)
def size(given: SizeOptions) -> None:
    """Compute how much memory and network the contexts of users need. No server is contacted.

    It prints the command that starts each server. Reads are counted as if engines had no part of any context in their
    own memory.
    """
    from kvstore_cli.sizing import FleetSize, SizeError
    from kvstore_cli.sizing import size as compute

    missing = [f"--{name}" for name in ("context", "users") if getattr(given, name) is None]
    if missing:
        fail("usage", f"{' and '.join(missing)} not given; for example, give --context 8192 --users 200")
    if given.turns_per_hour is not None:
        check_finite("--turns-per-hour", given.turns_per_hour, most=1e6)
    if given.ttft is not None:
        check_positive("--ttft", given.ttft, "a number of seconds")
    assert given.context is not None and given.users is not None
    try:
        name, shape = _shape(given)
        fleet = FleetSize(
            context=given.context,
            users=given.users,
            shared_tokens=given.shared_tokens,
            turns_per_hour=given.turns_per_hour,
            new_tokens=given.new_tokens,
            ttft_s=given.ttft,
            replicas=given.replicas,
            nodes=given.nodes,
            shards=given.shards,
            block_tokens=given.block_tokens,
            tp=given.tp,
        )
        found = compute(name, shape, fleet)
    except SizeError as error:
        fail("usage", str(error))
    show(found, given.as_json, lambda: print_size(found))


def _shape(given: SizeOptions) -> tuple[str, KVShape]:
    from kvstore_cli.sizing import find_shape
    from kvstore_serving.planning.model_config import KVShape

    shape = {"layers": given.layers, "kv-heads": given.kv_heads, "head-size": given.head_size}
    there = [f"--{name}" for name, value in shape.items() if value is not None]
    if given.model is not None:
        if there:
            fail("usage", f"--model and {', '.join(there)} were given: expected either a model or its shape")
        name, found = find_shape(given.model)
        return name, found if given.dtype is None else replace(found, dtype=given.dtype)
    if given.layers is None or given.kv_heads is None or given.head_size is None:
        missing = ", ".join(f"--{name}" for name in shape if f"--{name}" not in there)
        fail("usage", f"{missing} not given; expected --model NAME, or --layers, --kv-heads and --head-size")
    return "model", KVShape(given.layers, given.kv_heads, given.head_size, given.dtype or "bfloat16")


def print_size(found: Sizing) -> None:
    """Print what the contexts need."""
    heads = "one latent vector" if found.once else f"{found.kv_heads} KV heads"
    print(f"{printable(found.model)}: {found.layers} layers, {heads} of {found.head_size}, {found.dtype}\n")
    print_table("", _SIZE_COLUMNS, _sizes(found))
    each = "the server" if found.nodes == 1 else f"each of {found.nodes} servers"
    print(
        f"\nOn {each}:\n\n  {found.command}\n\n"
        f"It takes up to {format_size(found.resident_bytes)}. Limit of its container or unit: "
        f"{format_size(found.limit_bytes)}."
    )
    network = found.network
    rates = [row for row in _rates(network) if row[1] is not None]
    if rates:
        print()
        print_table("", _RATE_COLUMNS, rates)
        print(f"\n{_link(network)}")


def _sizes(found: Sizing) -> Iterator[tuple[str, int | None, int | None, int]]:
    yield "token", 1, None, found.token_bytes
    yield "block", found.block_tokens, 1, found.block_bytes
    if found.parts > 1:
        yield f"  on each of {found.parts} ranks", None, None, found.part_bytes
    yield "context", found.context_blocks * found.block_tokens, found.context_blocks, found.context_bytes
    yield "all contexts", found.blocks * found.block_tokens, found.blocks, found.blocks_bytes
    if found.replicas > 1:
        copies = found.blocks * found.replicas
        yield f"{found.replicas} copies of them", None, copies, found.blocks_bytes * found.replicas


def _rates(network: Network) -> Iterator[tuple[str, float | None]]:
    yield "reads from all servers, mean", network.read_bytes_per_s
    yield "writes to all servers, mean", network.write_bytes_per_s
    yield "one context within --ttft", network.context_bytes_per_s


def _link(network: Network) -> str:
    from kvstore_cli.sizing import LINKS_GBITS, MOST_BUSY

    link = network.link
    if link is None:
        slow = network.context_bytes_per_s is not None
        return (
            f"{LINKS_GBITS[-1]} Gb/s a host are not enough: a link would be more than {MOST_BUSY:.0%} busy in the mean"
            f"{', or too slow for --ttft' if slow else ''}. Raise --nodes{' or --ttft' if slow else ''}."
        )
    busy = f", and a server's is {max(link.read_share, link.write_share):.0%} busy in the mean"
    return (
        f"One link of {link.gbits} Gb/s a host suffices: it carries one context in {link.context_s:.2g} s"
        f"{'' if network.read_bytes_per_s is None else busy}."
    )
