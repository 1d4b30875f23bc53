"""The tables that commands print, compared character by character. The tests fill the documents from their types.

`cli_tables.txt` has the expected output. Run this file as a program to write it again, and review the difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest import mock

import msgspec
import pytest

from kvstore.auth.policy import Policy
from kvstore.disk.verify import VerifyReport
from kvstore_cli import (
    auth,
    bench,
    blocks,
    clients,
    cluster_status,
    config,
    load_tables,
    plan_tables,
    size,
    slowlog,
    verify,
)
from kvstore_cli.bench import BenchReport
from kvstore_cli.blocks import HotKeys
from kvstore_cli.clients import ShownClients
from kvstore_cli.cluster_status import ClusterStatus
from kvstore_cli.sizing import Sizing
from kvstore_cli.slowlog import SlowLog
from kvstore_serving.load.report import LoadReport
from kvstore_serving.load.sweep import RateSweep
from kvstore_serving.planning.document import PlanDocument
from kvstore_serving.planning.profile import Contention, Profile, Residual, StoreTimes, read_profile
from kvstore_serving.planning.queueing import Queue
from kvstore_serving.planning.verify import Verified

GOLDEN = Path(__file__).with_suffix("").with_name("cli_tables.txt")
CASES: dict[str, tuple[type, Callable[[Any], None]]] = {
    "auth": (Policy, lambda policy: auth._print(auth._rows(policy))),
    "bench": (BenchReport, bench.print_bench),
    "verify": (VerifyReport, verify.print_verified),
    "keys": (HotKeys, blocks.print_keys),
    "slowlog": (SlowLog, slowlog.print_slow_requests),
    "clients": (ShownClients, lambda found: clients.print_clients(msgspec.structs.replace(found, by="connection"))),
    "clients, grouped": (
        ShownClients,
        lambda found: clients.print_clients(msgspec.structs.replace(found, by="client", clients=[])),
    ),
    "size": (Sizing, size.print_size),
    "cluster": (ClusterStatus, cluster_status.print_status),
    "config get": (config.SettingRows, config.print_settings),
    "config set": (config.SettingChanged, config.print_changed),
    "load": (LoadReport, load_tables.print_report),
    "sweep": (RateSweep, load_tables.print_sweep),
    "queue": (Queue, plan_tables.print_queue),
    "plan": (PlanDocument, plan_tables.print_plan),
    "profile": (Profile, plan_tables.print_profile),
    "plan verify": (Verified, plan_tables.print_verified),
}
ALWAYS = ("rate_rps",)  # optional fields that are always present in printed documents


class Filler:
    """Makes documents of a type, in which all values differ. `whole`: whether optional parts are present."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._count = 0

    def of(self, kind: Any) -> Any:
        """Return a value of this type."""
        origin, args = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            return self.of(args[0]) if self._whole or type(None) not in args else None
        if origin is Literal:
            return args[0]
        if origin is None:
            return self._plain(kind)
        if issubclass(origin, Mapping):
            return {key: self.of(args[1]) for key in ("one", "two")}
        fixed = origin is tuple and args[-1] is not Ellipsis
        many = [self.of(each) for each in (args if fixed else (args[0], args[0]))]
        return tuple(many) if origin is tuple else frozenset(many) if origin is frozenset else many

    def _field(self, name: str, kind: Any) -> Any:
        if name in ("message", "reason"):
            return "a text that is longer than a line of a terminal and has [brackets], " * 2
        return self.of(next(iter(get_args(kind)), kind) if name in ALWAYS else kind)

    def _plain(self, kind: type) -> Any:
        self._count += 1
        if kind is Profile:
            return self._profile()
        if issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind):
            hints = get_type_hints(kind)
            names = (
                kind.__struct_fields__
                if issubclass(kind, msgspec.Struct)
                else [each.name for each in dataclasses.fields(kind) if each.init]
            )
            return kind(**{name: self._field(name, hints[name]) for name in names})
        values = {
            bool: self._whole,
            int: 37 * self._count,
            float: 1.37 * self._count,
            str: f"text{self._count}",
            bytes: b"x",
        }
        return values[kind]

    def _profile(self) -> Profile:
        """Return a valid profile, because one with arbitrary values would be refused."""
        made, replace = read_profile("opt-13b-a100-80g"), msgspec.structs.replace
        degree = made.degrees[0]
        measured = replace(degree, prefill=replace(degree.prefill, residuals=self.of(list[Residual])))
        return replace(
            made,
            degrees=[measured, *made.degrees[1:]],
            store=self.of(StoreTimes | None),
            contention=self.of(Contention),
        )


def printed(names: Iterable[str] = CASES, widths: Sequence[int] = (80, 160)) -> str:
    """Return the output of cases, each for terminals of these widths."""
    out = io.StringIO()
    for name in names:
        kind, show = CASES[name]
        for whole in (True, False):
            for columns in widths:
                document = Filler(whole).of(kind)
                with mock.patch.dict(os.environ, COLUMNS=str(columns)), contextlib.redirect_stdout(out):
                    print(f"==== {name}, {'whole' if whole else 'least'}, {columns} columns")
                    show(document)
    return out.getvalue()


def test_tables_are_unchanged() -> None:
    assert printed() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["load", "sweep", "queue", "plan", "profile", "plan verify"])
def test_no_cell_is_cut_at_80_columns(name: str) -> None:
    lines = printed([name], [80]).splitlines()
    assert max(len(line) for line in lines if line.startswith("─")) <= 80
    assert not [line for line in lines if re.search(r"\S…", line)], "a cell is cut"


if __name__ == "__main__":
    GOLDEN.write_text(printed(), encoding="utf-8")
