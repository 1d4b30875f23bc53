"""The tables of docs/python.md show the signatures and docstrings of the client's public names.

Run this file as a program to write the tables again.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec
import pytest

import kvstore_client
from kvstore_client import AsyncKVStoreClient, KVStoreClient, Namespace, Promise, memory, prefix_keys
from kvstore_client.errors import KVStoreError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"
SHARED: Final = ("self", "cls", "keys", "timeout_s")  # the page describes `keys` and `timeout_s` once, for all calls
RESULTS: Final = [
    *(kvstore_client.SetResult, kvstore_client.GetResult, kvstore_client.Lookup, kvstore_client.StoreInfo),
    *(kvstore_client.ShardStatus, kvstore_client.ShardSettings, kvstore_client.RunningSetting),
    *(kvstore_client.Location, kvstore_client.PurgeReply, kvstore_client.ConnectedClient),
    *(kvstore_client.SlowlogReply, kvstore_client.SlowRequest, kvstore_client.ClientStats),
]
# Reports of shards, whose members protocol.md describes.
REPORTS: Final = [
    *(kvstore_client.ShardInfo, kvstore_client.NamespaceInfo, kvstore_client.TenantInfo, kvstore_client.DiskInfo),
    kvstore_client.RequestTimes,
]
FUNCTIONS: Final = [Namespace.for_model, prefix_keys, memory.host_memory, memory.memory_of_process]
MOST_CELL: Final = 120
ALIASES: Final = {"DType": "str | dtype", "SharedMemory": '"auto" | bool', "Parent": "bytes | Sequence | None"}
ARRAYS: Final = {"npt.NDArray[np.bool_]": "ndarray", "npt.NDArray[np.uint8]": "ndarray", "KeyArray": "ndarray"}


class Text(NamedTuple):
    """The parts of a docstring. `summary`: the first paragraph. `more`: the other paragraphs. `items`: name -> text."""

    summary: str
    more: list[str]
    items: dict[str, str]
    returns: str
    raises: str


def parse(subject: Any) -> Text:
    """Parse the docstring of an object. Each paragraph or item becomes one line."""
    summary, more, items, tagged = "", [], {}, {"Returns": "", "Raises": ""}
    for paragraph in re.split(r"\n\s*\n|\n(?=\* )", inspect.getdoc(subject) or ""):
        text = " ".join(paragraph.split())
        if item := re.fullmatch(r"\* `(\w+)`: (.*)", text):
            items[item[1]] = item[2]
        elif (tag := text.split(":")[0]) in tagged:
            tagged[tag] = text.removeprefix(f"{tag}: ")
        elif not summary:
            summary = text
        else:
            more.append(text)
    return Text(summary, more, items, tagged["Returns"], tagged["Raises"])


def cut(text: str) -> tuple[str, str]:
    """Split a text into its first sentence, for a cell, and the rest."""
    end = re.search(r"[.:] (?=[A-Z`\"])", text) if len(text) > MOST_CELL else re.search(r"\. (?=[A-Z`\"])", text)
    first, rest = (text[: end.start() + 1], text[end.end() :]) if end else (text, "")
    return plain(first.rstrip(".:")), plain(rest)


def plain(text: str) -> str:
    """Return Markdown for this page: names are in single backticks, as in the other documents."""
    return text.replace("``", "`")


def typed(annotation: Any) -> str:
    """Return an annotation in the form for readers: `str` or `None`."""
    text = annotation if isinstance(annotation, str) else annotation.__forward_arg__
    text = ALIASES.get(text, text)
    for long, short in ARRAYS.items():
        text = text.replace(long, short)
    if several := re.fullmatch(r"(\w+)\[(.*\|.*)\]", text):  # a table's cell cannot contain `|`
        return f"`{several[1]}` of {typed(several[2])}"
    return " or ".join(f"`{part}`" for part in re.split(r" \| (?![^\[]*\])", text))


def table(*head: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        for cell in row:
            assert len(cell) <= MOST_CELL, f"a cell of {len(cell)} characters: {cell}"
            assert "|" not in cell, cell
        yield f"| {' | '.join(row)} |"


def parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(call).parameters.values() if each.name not in SHARED]


def default(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return "none"
    return "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"


def with_notes(rows: Iterable[tuple[str, ...]], head: tuple[str, ...], notes: dict[str, str]) -> Iterator[str]:
    """Return a table, followed by the text that did not fit in its last column."""
    yield from table(*head, rows=rows)
    if notes:
        yield ""
        for name, note in notes.items():
            yield from wrapped(f"* `{name}`: {note}")


def wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def options() -> Iterator[str]:
    """Return the options of both clients' constructors."""
    rows, notes = [], {}
    text = parse(KVStoreClient)
    shown = inspect.signature(KVStoreClient.__init__).parameters
    assert [*text.items] == [name for name in shown if name != "self"]
    for name, what in text.items.items():
        first, rest = cut(what)
        fixed = "required" if name == "namespace" else default(shown[name])
        kind = typed(str(shown[name].annotation)) if name != "namespace" else "`Namespace`"
        rows.append((f"`{name}`", kind, fixed, first))
        notes |= {name: rest} if rest else {}
    concurrency = inspect.signature(AsyncKVStoreClient.__init__).parameters["concurrency"]
    what, rest = cut(parse(vars(AsyncKVStoreClient)["__init__"]).items["concurrency"])
    rows.append(
        ("`concurrency`", typed(concurrency.annotation), default(concurrency), f"{what}; only `AsyncKVStoreClient`")
    )
    notes |= {"concurrency": rest} if rest else {}
    yield from with_notes(rows, ("option", "type", "default", "meaning"), notes)
    yield ""
    yield from (line.strip() for line in wrapped(f"The constructor raises {plain(text.raises)}"))


def public(kind: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in vars(KVStoreClient).items() if not name.startswith("_") and kind(each)]


def calls() -> Iterator[str]:
    rows = []
    for name, call in public(inspect.isfunction):
        text = parse(call)
        result, _ = cut(text.returns) if text.returns else (typed(inspect.signature(call).return_annotation), "")
        rows.append((f"[`{name}`](#{name})", cut(text.summary)[0], result))
    yield from table("call", "what it does", "returns", rows=rows)


def signature(name: str, call: Callable[..., Any]) -> Iterator[str]:
    """Return the signature as in a call: names and defaults."""
    given = [each for each in inspect.signature(call).parameters.values() if each.name not in ("self", "cls")]
    words, starred = [], False
    for each in given:
        if each.kind is each.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        if each.kind is each.VAR_KEYWORD:
            words.append(f"**{each.name}")
        else:
            words.append(each.name if each.default is each.empty else f"{each.name}={each.default!r}")
    line = f"{name}({', '.join(words)})"
    yield "```text"
    yield from textwrap.wrap(line, 110, subsequent_indent="    ", break_on_hyphens=False)
    yield "```"


def described(name: str, call: Callable[..., Any], given: list[str]) -> Iterator[str]:
    """Return a call's section without its heading."""
    text = parse(call)
    assert [*text.items] == given, f"{name}: its docstring has {[*text.items]}: expected {given}"
    yield ""
    yield from signature(name, call)
    yield ""
    for paragraph in [text.summary, *text.more]:
        if "::" not in paragraph and not paragraph.startswith("key[-1]"):
            yield from (line.strip() for line in wrapped(plain(paragraph)))
            yield ""
    if given:
        found = inspect.signature(call).parameters
        rows, notes = [], {}
        for each in given:
            first, rest = cut(text.items[each])
            rows.append((f"`{each}`", typed(str(found[each].annotation)), default(found[each]), first))
            notes |= {each: rest} if rest else {}
        yield from with_notes(rows, ("argument", "type", "default", "meaning"), notes)
        yield ""
    for label, what in (("Returns", text.returns), ("Raises", text.raises)):
        if what:
            yield from (line.strip() for line in wrapped(f"**{label}**: {plain(what)}"))
            yield ""


def each_call() -> Iterator[str]:
    for name, call in public(inspect.isfunction):
        yield f"### {name}"
        yield from described(name, call, [each.name for each in parameters(call)])


def properties() -> Iterator[str]:
    rows, notes = [], {}
    for name, each in public(lambda member: isinstance(member, property)):
        first, rest = cut(parse(each.fget).summary)
        rows.append((f"`{name}`", typed(inspect.signature(each.fget).return_annotation), first))
        notes |= {name: rest} if rest else {}
    yield from with_notes(rows, ("property", "type", "meaning"), notes)


def fields_of(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [each.name for each in dataclasses.fields(kind)]
    if issubclass(kind, msgspec.Struct):
        return [name for name in kind.__struct_fields__ if name != "id"]  # the number of the request
    return list(kind._fields)  # type: ignore[attr-defined]


def results() -> Iterator[str]:
    for kind in RESULTS:
        text = parse(kind)
        assert [*text.items] == fields_of(kind), kind
        yield f"### Fields of {kind.__name__}"
        yield ""
        for paragraph in [text.summary, *text.more]:
            yield from (line.strip() for line in wrapped(plain(paragraph)))
            yield ""
        rows, notes = [], {}
        for name, what in text.items.items():
            first, rest = cut(what)
            rows.append((f"`{name}`", typed(kind.__annotations__[name]), first))
            notes |= {name: rest} if rest else {}
        yield from with_notes(rows, ("field", "type", "meaning"), notes)
        yield ""


def reports() -> Iterator[str]:
    for kind in REPORTS:
        hints = {name: inspect.formatannotation(hint) for name, hint in get_type_hints(kind).items()}
        members = [f"{name}: {hints[name]}".replace(" ", "\0") for name in kind.__struct_fields__]
        line = f"{kind.__name__}({', '.join(members)})".replace(f"{kind.__module__}.", "")
        yield "```text"
        for each in textwrap.wrap(line, 110, subsequent_indent="    ", break_on_hyphens=False):
            yield each.replace("\0", " ")  # no line ends within a member
        yield "```"
        yield ""


def errors() -> Iterator[str]:
    kinds = [getattr(kvstore_client, name) for name in kvstore_client.__all__]
    rows = [
        (
            f"`{kind.__name__}`",
            " and ".join(f"`{base.__name__}`" for base in kind.__bases__),
            cut(parse(kind).summary)[0],
        )
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, KVStoreError)
    ]
    yield from table("error", "is also a", "raised when", rows=rows)


def namespace() -> Iterator[str]:
    text = parse(Namespace)
    found = msgspec.structs.fields(Namespace)
    assert [*text.items] == [each.name for each in found]
    rows, notes = [], {}
    for each in found:
        first, rest = cut(text.items[each.name])
        value = each.default if each.default is not msgspec.NODEFAULT else each.default_factory
        fixed = "required" if value is msgspec.NODEFAULT else f"`{value() if callable(value) else value!r}`"
        rows.append((f"`{each.name}`", typed(Namespace.__annotations__[each.name]), fixed, first))
        notes |= {each.name: rest} if rest else {}
    yield from with_notes(rows, ("field", "type", "default", "meaning"), notes)
    yield ""
    yield from (line.strip() for line in wrapped(f"Raises {plain(text.raises)}"))


def functions() -> Iterator[str]:
    for call in FUNCTIONS:
        name = call.__qualname__
        yield f"### {name}"
        given = [each.name for each in inspect.signature(call).parameters.values() if each.name not in ("cls", "self")]
        yield from described(name, call, given)


def promise() -> Iterator[str]:
    text = parse(Promise)
    rows, notes = [], {}
    for name, what in text.items.items():
        first, rest = cut(what)
        rows.append((f"`{name}`", "`ndarray`", first))
        notes |= {name: rest} if rest else {}
    for name in ("renew", "withdraw"):
        call = vars(Promise)[name]
        first, rest = cut(parse(call).summary)
        rows.append((f"`{name}({'ttl_s=None' if name == 'renew' else ''})`", "`None`", first))
    yield from with_notes(rows, ("member", "type", "meaning"), notes)


TABLES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "options": options,
    "calls": calls,
    "each_call": each_call,
    "properties": properties,
    "promise": promise,
    "results": results,
    "reports": reports,
    "errors": errors,
    "namespace": namespace,
    "functions": functions,
}


def filled(page: str) -> str:
    """Return the page with every table generated from the code."""
    for name, made in TABLES.items():
        begin, end = f"<!-- from the code: {name} -->\n", f"<!-- end: {name} -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n" + "\n".join(made()).rstrip() + f"\n\n{end}{after}"
    return page


def test_the_page_matches_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == filled(page), "run python tests/unit/test_python_page.py to write its tables anew"


def test_every_public_name_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in kvstore_client.__all__:
        assert re.search(rf"`[^`\n]*\b{name}\b", page, re.MULTILINE), f"docs/python.md lacks {name}"


def named_types(annotation: str) -> set[str]:
    """Return the names of classes in an annotation."""
    return {*re.findall(r"\b[A-Z]\w*", re.sub(r'"[^"]*"|\'[^\']*\'', "", annotation))}


def test_every_type_that_a_call_returns_can_be_imported_from_the_package() -> None:
    found = set()
    for _, member in public(lambda member: inspect.isfunction(member) or isinstance(member, property)):
        call = member.fget if isinstance(member, property) else member
        found |= named_types(str(inspect.signature(call).return_annotation))
    for kind in [*RESULTS, *REPORTS]:
        for hint in get_type_hints(kind).values():
            found |= named_types(inspect.formatannotation(hint))
    foreign = {"NDArray", "Generator", "Sequence", "None"}
    assert {"ShardInfo", "SlowRequest", "ClientStats", "TenantInfo"} <= found, "the search itself works"
    kinds = {name for name in found - foreign if name not in kvstore_client.__all__}
    assert not kinds, "types that programs cannot name in annotations"
    assert {each.__name__ for each in [*RESULTS, *REPORTS]} <= {*kvstore_client.__all__}


def test_every_variable_that_the_client_reads_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    folder = ROOT / "kvstore_client"
    files = [*folder.glob("*.py"), *(folder / "_links").glob("*.py"), *(folder / "_calls").glob("*.py")]
    read = {name for file in files for name in re.findall(r"\bKVSTORE_[A-Z_]+\b", file.read_text(encoding="utf-8"))}
    assert len(read) >= 8, "the search itself works"
    for name in sorted(read):
        assert re.search(rf"^\| `{name}` \|", page, re.MULTILINE), f"docs/python.md lacks {name}"


@pytest.mark.parametrize(
    "text, first", [("One. Two.", "One"), ("PEM file, or `system`. None.", "PEM file, or `system`")]
)
def test_a_cell_has_only_the_first_sentence(text: str, first: str) -> None:
    assert cut(text)[0] == first


if __name__ == "__main__":
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
