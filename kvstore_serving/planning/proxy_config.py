"""A plan as `kvstore proxy` takes it: the file of its `--pools`, with an entry for each engine."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvstore_serving.planning.document import Placed, Plan


def pools_file(plan: Plan, model: str, prefill_url: str, decode_url: str) -> str:
    """-> the text of the file. The URLs have `{}` where the number of the engine goes, from 0."""
    lines = [
        f"# {plan.placement.prefill.instances} prefill and {plan.placement.decode.instances} decode engines for "
        f"{plan.goodput_rps:.3g} requests/s: `kvstore proxy --pools FILE`",
        *_entries("prefill", plan.placement.prefill, model, prefill_url),
        *_entries("decode", plan.placement.decode, model, decode_url),
    ]
    return "\n".join(lines) + "\n"


def _entries(role: str, placed: Placed, model: str, url: str) -> Iterator[str]:
    for number in range(placed.instances):
        yield ""
        yield "[[engines]]"
        yield f"url = {_quoted(url.format(number))}"
        yield f'roles = ["{role}"]'
        yield f"model = {_quoted(model)}"
        yield f"tensor_parallel_size = {placed.tp}"


def _quoted(text: str) -> str:
    """A string of TOML, which is one of JSON."""
    return msgspec.json.encode(text).decode()
