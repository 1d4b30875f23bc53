"""Changes the roles of a proxy's engines in the file that the proxy follows. Engines can change roles at any time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvstore_client.engine.directory import EngineRecord
from kvstore_serving.files import replace_file
from kvstore_serving.proxy.pools_file import read_pools
from kvstore_serving.proxy.settings import SettingsError


class RolesError(ValueError):
    """The file cannot be used or lists too few engines; the message says what is wrong."""


class Shifted(msgspec.Struct, frozen=True):
    """The result of `shift_roles`. `changed`: the URL, the old roles and the new roles of each engine that changed."""

    prefill: int
    decode: int
    changed: list[tuple[str, str, str]]


def shift_roles(path: Path, prefill: int, decode: int) -> Shifted:
    """Give each engine in the file one role. `prefill` and `decode` are the numbers of engines for each role; the file
    must list exactly as many engines as both together.

    The file is replaced as a whole, so the proxy reads either the old file or the new one. Raises `RolesError`.
    """
    try:
        engines = read_pools(path)
    except SettingsError as error:
        raise RolesError(str(error)) from error
    if prefill + decode != len(engines):
        raise RolesError(
            f"{path} names {len(engines)} engines, but --prefill {prefill} and --decode {decode} are "
            f"{prefill + decode} together"
        )

    # Engines that only prefill come first, and those that only decode come last, so that the fewest engines change.
    def place(number: int) -> int:
        roles = engines[number].roles
        return 1 if len(roles) > 1 else 0 if roles == ("prefill",) else 2

    order = sorted(range(len(engines)), key=place)
    fresh = list(engines)
    for rank, number in enumerate(order):
        role = ("prefill",) if rank < prefill else ("decode",)
        fresh[number] = msgspec.structs.replace(engines[number], roles=role)
    changed = [
        (old.url, "+".join(old.roles), "+".join(new.roles))
        for old, new in zip(engines, fresh, strict=True)
        if old.roles != new.roles
    ]
    if changed:
        text = "\n".join(line for engine in fresh for line in _entry(engine)) + "\n"
        try:
            replace_file(path, text.encode())
        except OSError as error:
            raise RolesError(f"{path}: {error.strerror}") from error
    return Shifted(prefill, decode, changed)


def _entry(engine: EngineRecord) -> Iterator[str]:
    yield "[[engines]]"
    for name, value in msgspec.to_builtins(engine).items():
        if value != "":
            yield f"{name} = {msgspec.json.encode(value).decode()}"
    yield ""
