"""The fields of INFO: documents name every field and metric, and a field that a shard does not send has its default."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import pytest

from kvstore.node.status import COLUMNS, DiskRow, ShardRow
from kvstore.wire import DiskInfo, NamespaceInfo, ShardInfo
from kvstore.wire.status import Counter, Field, RequestTimes, TenantInfo, fields_of, report
from tests.support.harness import ROOT


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows_of(text: str) -> dict[str, str]:
    """Return each name in the first cells of a table, with its row."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return {name: row for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def members_of(text: str, begins: str) -> set[str]:
    """Return the names in the paragraph or list that begins with these words."""
    assert begins in text
    return set(re.findall(r"`(\w+)`", re.split(r"\n\n(?![*])", text.partition(begins)[2])[0]))


@pytest.mark.parametrize(
    ("struct", "begins", "ends"),
    [(ShardInfo, "### INFO `", "The members of `disk`"), (DiskInfo, "The members of `disk`", "### PING")],
)
def test_the_protocol_names_every_field(struct: type[msgspec.Struct], begins: str, ends: str) -> None:
    section = text_of("protocol.md").partition(begins)[2].partition(ends)[0]
    assert rows_of(section).keys() == set(struct.__struct_fields__)


@pytest.mark.parametrize(
    ("struct", "key"), [(NamespaceInfo, "namespaces"), (TenantInfo, "tenants"), (RequestTimes, "requests")]
)
def test_the_protocol_names_every_member_of_a_field(struct: type[msgspec.Struct], key: str) -> None:
    section = text_of("protocol.md").partition("### INFO `")[2]
    assert set(struct.__struct_fields__) <= members_of(section, f"A map of `{key}`:")


def test_the_metrics_are_documented() -> None:
    documented = set(re.findall(r"`(kvstore_\w+)`", text_of("monitoring.md")))
    structs = (ShardInfo, NamespaceInfo, TenantInfo, DiskInfo)
    fields = [field for struct in structs for field in fields_of(struct) if field.metric]
    names = [f"{field.metric}_total" if field.counter else field.metric for field in fields]
    assert len(set(names)) == len(names) and all(field.help for field in fields)
    assert set(names) <= documented


def test_the_keys_of_the_status_page_are_documented() -> None:
    section = text_of("monitoring.md").partition("### status.json")[2].partition("## Log")[0]
    keys = {*ShardRow.__struct_fields__, *DiskRow.__struct_fields__, *(field.name for field in COLUMNS)} - {"shard"}
    assert keys <= members_of(section, "An object of `shards`:")


def test_a_field_that_a_shard_lacks_keeps_its_default() -> None:
    class Info(msgspec.Struct, frozen=True):
        sets: Annotated[int, Counter("state.sets")]
        read: Annotated[int, Counter("disk.fetching.blocks")] = -1
        given: Annotated[str, Field(info="shards: given")] = ""

    class State:
        sets = 7

    class Shard:
        state = State()
        disk = None

    assert report(Info, Shard(), given="yes") == Info(7, -1, "yes")
