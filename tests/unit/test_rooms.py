"""The layers of the source tree, called rooms: imports go in one direction, nothing heavy is imported by accident, and
files stay short.

The test reads the text of the shipped packages, so an import inside a function or for types alone counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import kvstore_client
from tests.support.harness import ROOT, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = ("kvstore", "kvstore_client", "kvstore_serving", "kvstore_cli")

# From the lowest room to the highest: a file imports from its own room and from the rooms before it. A file belongs to
# the longest name here that it starts with. Every room may use `kvstore` itself: the version, sizes, logs.
SERVER = [
    *("kvstore", "kvstore._cext", "kvstore._index", "kvstore.wire", "kvstore.cluster", "kvstore.auth"),
    *("kvstore.store", "kvstore.disk", "kvstore.shard", "kvstore.moving", "kvstore.node", "kvstore.__main__"),
]
CLIENT = [
    *("kvstore_client.errors", "kvstore_client._arguments", "kvstore_client.endpoints", "kvstore_client.keys"),
    *("kvstore_client.results", "kvstore_client.memory", "kvstore_client._links"),
    *("kvstore_client._calls", "kvstore_client", "kvstore_client.engine", "kvstore_client.engine.paged"),
    "kvstore_client.vllm.shared",
    *("kvstore_client.vllm.tier", "kvstore_client.vllm.connector", "kvstore_client.vllm"),
]
SERVING = ["kvstore_serving", "kvstore_serving.load", "kvstore_serving.proxy", "kvstore_serving.planning"]
EXTENSIONS = {"kvstore._cext", "kvstore._index"}
SHARED = ["kvstore", *EXTENSIONS, "kvstore.wire", "kvstore.cluster"]  # the server's modules that the client may use
ORDER = {
    **{room: SERVER[: at + 1] for at, room in enumerate(SERVER)},
    **{room: [*SHARED, *CLIENT[: at + 1]] for at, room in enumerate(CLIENT)},
    **{room: [*SHARED, *CLIENT, "kvstore_serving", room] for room in ("kvstore_serving.load", "kvstore_serving.proxy")},
    "kvstore_serving.planning": [*SHARED, *CLIENT, *SERVING],
    "kvstore_serving": [*SHARED, *CLIENT, "kvstore_serving"],
    "kvstore_cli": [*SERVER, *CLIENT, *SERVING, "kvstore_cli"],
}

LINES = 400
FUNCTION_LINES = 70
REASON = "Over 400 lines because"
DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
    "opentelemetry": "opentelemetry-sdk",  # and its exporters
    "google": "opentelemetry-exporter-otlp-proto-http",  # which brings protobuf
}  # imports whose names differ from their distribution's


@cache
def modules() -> dict[str, Path]:
    """Return every module of the shipped packages: dotted name -> file."""
    found = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path) -> Iterator[str]:
    """Yield the imports of a file: our own modules with their full names, others with their top-level names."""
    yield from imported_by(ast.walk(ast.parse(file.read_text(encoding="utf-8"))), file)


def imported_by(nodes: Iterable[ast.AST], file: Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: relative imports hide which room is meant"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                if full in modules() or full in EXTENSIONS:
                    yield full
                else:
                    yield node.module if node.module.startswith(PACKAGES) else node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield name.name if name.name.startswith(PACKAGES) else name.name.partition(".")[0]


def imports_at_once(module: str) -> Iterator[str]:
    """Yield the modules that are imported together with a module, without imports in functions and imports only for
    types."""

    def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                yield from statements(node.orelse)
                continue
            yield node
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from statements(handler.body)

    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    yield from imported_by(statements(tree.body), modules()[module])


def all_imports(module: str) -> dict[str, str]:
    """Return everything that is imported with a module, directly or not: name -> the module of ours that imports it."""
    found = {module: ""}
    ahead = [module]
    while ahead:
        each = ahead.pop()
        parents = [each.rpartition(".")[0]] if "." in each else []
        for name in (*parents, *(imports_at_once(each) if each in modules() else ())):
            if name not in found:
                found[name] = each
                ahead.append(name)
    return found


def room_of(module: str) -> str:
    return max((room for room in ORDER if f"{module}.".startswith(f"{room}.")), key=len)


def test_rooms_import_only_from_lower_rooms() -> None:
    wrong = [
        f"{module} imports {imported}: {room_of(module)} is below {room_of(imported)}, or does not know it"
        for module, file in modules().items()
        for imported in imports(file)
        if imported.startswith(PACKAGES) and room_of(imported) not in ORDER[room_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


# The internals of a disk tier, of the store's side of it, and of a namespace's blocks on disk:
PARTS = ("volume", "writing", "fetching", "scrubbing", "index", "blocks")
INSIDE = {"memory": "kvstore.store", "disk": "kvstore.disk", "_disk": "kvstore.disk"}  # the packages that may use them


def reaches_through(text: str, module: str) -> Iterator[str]:
    """Yield the places where a file uses internals of a namespace's memory or of a disk tier that only their own
    packages may use."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            part = node.attr == "index" if owner == "memory" else node.attr in PARTS
            rooms = (INSIDE.get(owner, module), "kvstore.store")  # the store has the indexes of both tiers
            if part and owner in INSIDE and not module.startswith(rooms):
                yield f"{module}:{node.lineno}: {ast.unparse(node)}"


def test_only_their_packages_use_internals_of_disk_tiers_and_indexes() -> None:
    server = {module: file for module, file in modules().items() if module.startswith("kvstore.")}
    wrong = [each for module, file in server.items() for each in reaches_through(file.read_text("utf-8"), module)]
    assert not wrong, "\n".join(wrong)
    known = "self._disk.volume.off, store.disk.blocks.quotas, namespace.memory.index.ready, memory.index"
    assert len(list(reaches_through(known, "kvstore.shard.loop"))) == 4, "this test sees such uses"
    assert len(list(reaches_through(known, "kvstore.disk.tier"))) == 2


def test_no_imports_are_circular() -> None:
    graph = {
        module: {each for each in imports(file) if each in modules() and each != module}
        for module, file in modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_only_engine_packages_import_torch_and_vllm() -> None:
    allowed = {"torch": ("kvstore_client.vllm", "kvstore_client.engine.paged"), "vllm": ("kvstore_client.vllm",)}
    allowed["transformers"] = allowed["vllm"]
    wrong = [
        f"{module} imports {imported}"
        for module, file in modules().items()
        for imported in imports(file)
        if imported in allowed and not room_of(module).startswith(allowed[imported])
    ]
    assert not wrong, "\n".join(wrong)


def test_code_for_any_paged_cache_imports_no_vllm() -> None:
    """Without vLLM, this code can be used and measured where only torch is installed."""
    loaded = all_imports("kvstore_client.engine.paged.worker")
    assert "torch" in loaded and "kvstore_client.engine.paged.plan" in loaded
    assert "vllm" not in loaded, f"{loaded['vllm']} imports vllm"
    assert "vllm" in all_imports("kvstore_client.vllm.connector.kv_connector"), "this test sees such imports"


@pytest.mark.parametrize("own", [False, True], ids=["vLLM's alone", "for all loggers"])
def test_in_an_engine_log_lines_go_where_the_engines_go(own: bool) -> None:
    """vLLM sets up logging only for its own loggers. If the root logger is set up as well, each line appears only
    once."""
    code = (
        "import logging, sys; say = logging.StreamHandler(sys.stdout); theirs = logging.getLogger('vllm'); "
        "say.setFormatter(logging.Formatter('engine: %(message)s')); theirs.addHandler(say); theirs.setLevel('INFO'); "
        + ("logging.basicConfig(level='INFO', stream=sys.stdout, format='all: %(message)s'); " if own else "")
        + "import kvstore_client.vllm; logging.getLogger('kvstore_client').info('told')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ("all: told\n" if own else "engine: told\n")


def test_dependencies_match_the_packages_imports() -> None:
    """Every imported package is a dependency, and every base dependency is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {Requirement(line).name for line in project["dependencies"]}
    extras = {
        Requirement(line).name
        for name in ("cluster", "vllm", "torch", "routing", "serving", "tracing")
        for line in project["optional-dependencies"][name]
    }
    imported = {
        DISTRIBUTIONS.get(name, name)
        for file in modules().values()
        for name in imports(file)
        if not name.startswith(PACKAGES) and name not in sys.stdlib_module_names
    }
    assert imported <= base | extras, f"imported, but no dependency: {sorted(imported - base - extras)}"
    assert base <= imported, f"base dependencies that nothing imports: {sorted(base - imported)}"


def _loaded_by(statement: str) -> list[str]:
    """Return the modules that a statement loads, without those that numpy loads."""
    code = f"import sys, numpy; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_importing_the_client_loads_little() -> None:
    """The test counts loaded modules instead of measuring time, which varies on a busy machine. numpy, msgspec and
    xxhash take most of the import time."""
    loaded = _loaded_by("from kvstore_client import KVStoreClient")
    heavy = {"asyncio", "lmdb", "prometheus_client", "requests", "rich", "torch", "typer", "urllib3", "vllm"}
    heavy.add("kvstore._index")
    assert not heavy & set(loaded), f"importing the client loads {sorted(heavy & set(loaded))}"
    assert len(loaded) < 140, f"importing the client loads {len(loaded)} modules besides numpy's: {loaded}"


def test_importing_the_package_loads_nothing_until_a_name_is_used() -> None:
    loaded = _loaded_by("import kvstore_client")
    assert [name for name in loaded if name.startswith("kvstore")] == ["kvstore_client"] and len(loaded) < 10, loaded
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from kvstore_client import Timeout; print('numpy' in sys.modules)"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "False\n", "who catches an error needs no numpy"


def test_every_name_of_the_package_exists() -> None:
    assert set(kvstore_client.__all__) <= set(dir(kvstore_client))
    for name in kvstore_client.__all__:
        value = getattr(kvstore_client, name)
        if value is not Any:  # it is an alias that only type checkers see
            assert getattr(value, "__name__", name) == name
    assert kvstore_client.errors.Timeout is kvstore_client.Timeout
    with pytest.raises(AttributeError, match="has no attribute 'KVStore'"):
        _ = kvstore_client.KVStore


def test_a_server_starts_without_modules_that_only_shards_need() -> None:
    """The supervisor of shards on one host moves no bytes. numpy would take half of its start-up time."""
    code = "import sys, kvstore.node.cli, kvstore.node.supervisor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"asyncio", *EXTENSIONS, "lmdb", "numpy", "prometheus_client", "requests", "rich"}
    assert not heavy & set(done.stdout.split())


def test_the_commands_help_loads_little() -> None:
    """Modules that take long to import are imported only by the commands that need them."""
    code = "import sys, kvstore_cli.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    loaded = [name for name in done.stdout.split() if name.partition(".")[0] != "numpy"]
    heavy = {"aiohttp", "asyncio", "lmdb", "matplotlib", "requests", "simpy", "starlette", "torch"}
    assert not heavy & set(loaded), f"import kvstore_cli.main loads {sorted(heavy & set(loaded))}"
    assert len(loaded) < 350, f"import kvstore_cli.main loads {len(loaded)} modules besides numpy's: {loaded}"


def test_few_files_mention_a_transport_by_name() -> None:
    """Only a transport's module, its options and its fields in messages name it; all other code works with any
    transport."""
    named = {file for file in sources() if "nixl" in file.read_text(encoding="utf-8").lower()}
    assert {str(file.relative_to(ROOT)) for file in named} == {
        "kvstore/node/config.py",
        "kvstore/wire/messages.py",
        "kvstore/wire/status.py",
        "kvstore/wire/transports/nixl.py",
        "kvstore_client/client.py",
        "kvstore_client/vllm/shared/store_options.py",
    }


def test_plugins_are_imported_only_when_requested() -> None:
    code = "import sys, kvstore_client, kvstore.node.supervisor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert "kvstore.plugins" in done.stdout
    assert not {"kvstore.wire.transports.nixl", "importlib.metadata"} & set(done.stdout.split())


def sources() -> Iterator[Path]:
    for folder, *endings in (*((package, "py", "pyi") for package in PACKAGES), ("cext", "pyx", "pxi", "h")):
        for ending in endings:
            yield from (ROOT / folder).rglob(f"*.{ending}")


def is_too_long(file: Path) -> bool:
    """Whether a file has too many lines and gives no reason in its first 40 lines. `.pyi` files may be as long as the
    code that they describe."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return len(lines) > LINES and file.suffix != ".pyi" and not any(REASON in line for line in lines[:40])


def test_long_files_give_a_reason() -> None:
    long = {str(file.relative_to(ROOT)) for file in sources() if is_too_long(file)}
    assert not long, (
        f"more than {LINES} lines: {sorted(long)}. Split the file where it has two ideas, or say "
        f'"{REASON} ..." in the first 40 lines.'
    )


def test_functions_are_short_enough_to_read() -> None:
    long = {
        f"{file.relative_to(ROOT)} {node.name}": length
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    }
    assert not long, f"more than {FUNCTION_LINES} lines: {long}"
