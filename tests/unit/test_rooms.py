"""The rooms of the tree: imports go one way, nothing heavy is imported by accident, and files stay short.

What is checked is the text of the shipped packages, so an import inside a function or for types alone counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kvstore_client
from tests.support.harness import ROOT, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = ("kvstore", "kvstore_client", "kvstore_serving", "kvstore_cli")

# From the lowest room to the highest: a file imports from its own room and from rooms before it. A file belongs to the
# longest name here that it starts with. `kvstore` itself is what every room may use: the version, sizes, logs.
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
SHARED = ["kvstore", *EXTENSIONS, "kvstore.wire", "kvstore.cluster"]  # what the client may use of the server's
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
}  # where an import has another name than its distribution


@cache
def modules() -> dict[str, Path]:
    """Every module of the shipped packages, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path) -> Iterator[str]:
    """What a file imports: modules of ours by their full name, others by their top name."""
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
    """What importing a module imports: what is in no function, and not for types alone."""

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
    """Everything that is imported with a module, and by which of our modules, its packages included."""
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


def test_rooms_import_from_rooms_below_them() -> None:
    wrong = [
        f"{module} imports {imported}: {room_of(module)} is below {room_of(imported)}, or does not know it"
        for module, file in modules().items()
        for imported in imports(file)
        if imported.startswith(PACKAGES) and room_of(imported) not in ORDER[room_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


# Of a disk tier, of the store's side of it, and of a namespace's blocks on disk:
PARTS = ("volume", "writing", "fetching", "scrubbing", "index", "blocks")
INSIDE = {"memory": "kvstore.store", "disk": "kvstore.disk", "_disk": "kvstore.disk"}  # who may know their parts


def reaches_through(text: str, module: str) -> Iterator[str]:
    """Where a file takes a part of a namespace's memory or of a disk tier, that only their own packages know."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            part = node.attr == "index" if owner == "memory" else node.attr in PARTS
            rooms = (INSIDE.get(owner, module), "kvstore.store")  # the store has the indexes of both tiers
            if part and owner in INSIDE and not module.startswith(rooms):
                yield f"{module}:{node.lineno}: {ast.unparse(node)}"


def test_only_their_own_packages_know_the_parts_of_a_disk_tier_and_a_namespaces_index() -> None:
    server = {module: file for module, file in modules().items() if module.startswith("kvstore.")}
    wrong = [each for module, file in server.items() for each in reaches_through(file.read_text("utf-8"), module)]
    assert not wrong, "\n".join(wrong)
    known = "self._disk.volume.off, store.disk.blocks.quotas, namespace.memory.index.ready, memory.index"
    assert len(list(reaches_through(known, "kvstore.shard.loop"))) == 4, "this test sees such uses"
    assert len(list(reaches_through(known, "kvstore.disk.tier"))) == 2


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {
        module: {each for each in imports(file) if each in modules() and each != module}
        for module, file in modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_only_packages_of_engines_import_torch_and_vllm() -> None:
    allowed = {"torch": ("kvstore_client.vllm", "kvstore_client.engine.paged"), "vllm": ("kvstore_client.vllm",)}
    allowed["transformers"] = allowed["vllm"]
    wrong = [
        f"{module} imports {imported}"
        for module, file in modules().items()
        for imported in imports(file)
        if imported in allowed and not room_of(module).startswith(allowed[imported])
    ]
    assert not wrong, "\n".join(wrong)


def test_what_serves_any_paged_cache_imports_nothing_of_vllm() -> None:
    """It can be used, and measured, where only torch is."""
    loaded = all_imports("kvstore_client.engine.paged.worker")
    assert "torch" in loaded and "kvstore_client.engine.paged.plan" in loaded
    assert "vllm" not in loaded, f"{loaded['vllm']} imports vllm"
    assert "vllm" in all_imports("kvstore_client.vllm.connector.kv_connector"), "this test sees such imports"


@pytest.mark.parametrize("own", [False, True], ids=["vLLM's alone", "for all loggers"])
def test_in_an_engine_log_lines_go_where_its_own_go(own: bool) -> None:
    """vLLM sets up logging for its own loggers alone. Whoever has set it up for all gets each line once."""
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


def test_dependencies_are_what_the_packages_import() -> None:
    """No import without a dependency, and no base dependency that nothing imports."""
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
    """The modules that a statement loads, without those that numpy has loaded before."""
    code = f"import sys, numpy; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_importing_the_client_loads_little() -> None:
    """What it loads tells of its time, on a busy machine too. numpy, msgspec and xxhash take most of it."""
    loaded = _loaded_by("from kvstore_client import KVStoreClient")
    heavy = {"asyncio", "lmdb", "prometheus_client", "requests", "rich", "torch", "typer", "urllib3", "vllm"}
    heavy.add("kvstore._index")
    assert not heavy & set(loaded), f"importing the client loads {sorted(heavy & set(loaded))}"
    assert len(loaded) < 140, f"importing the client loads {len(loaded)} modules besides numpy's: {loaded}"


def test_importing_the_package_loads_nothing_before_a_name_is_used() -> None:
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


def test_each_name_of_the_package_is_there() -> None:
    assert set(kvstore_client.__all__) <= set(dir(kvstore_client))
    for name in kvstore_client.__all__:
        assert getattr(kvstore_client, name).__name__ == name
    assert kvstore_client.errors.Timeout is kvstore_client.Timeout
    with pytest.raises(AttributeError, match="has no attribute 'KVStore'"):
        _ = kvstore_client.KVStore


def test_a_server_starts_without_what_only_its_shards_need() -> None:
    """The supervisor of shards on one host moves no bytes. numpy would be half of the time that it takes to start."""
    code = "import sys, kvstore.node.cli, kvstore.node.supervisor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"asyncio", *EXTENSIONS, "lmdb", "numpy", "prometheus_client", "requests", "rich"}
    assert not heavy & set(done.stdout.split())


def test_the_commands_help_loads_little() -> None:
    """What takes long to import is imported by the command that needs it."""
    code = "import sys, kvstore_cli.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    loaded = [name for name in done.stdout.split() if name.partition(".")[0] != "numpy"]
    heavy = {"aiohttp", "asyncio", "lmdb", "matplotlib", "requests", "simpy", "starlette", "torch"}
    assert not heavy & set(loaded), f"import kvstore_cli.main loads {sorted(heavy & set(loaded))}"
    assert len(loaded) < 350, f"import kvstore_cli.main loads {len(loaded)} modules besides numpy's: {loaded}"


def test_few_files_know_a_transport_by_name() -> None:
    """Its module, its options, and its fields in messages; all else takes whatever transport was chosen."""
    named = {file for file in sources() if "nixl" in file.read_text(encoding="utf-8").lower()}
    assert {str(file.relative_to(ROOT)) for file in named} == {
        "kvstore/node/config.py",
        "kvstore/wire/messages.py",
        "kvstore/wire/status.py",
        "kvstore/wire/transports/nixl.py",
        "kvstore_client/client.py",
        "kvstore_client/vllm/shared/store_options.py",
    }


def test_plugins_are_imported_when_they_are_asked_for() -> None:
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
    """More lines than a file may have, without a reason in its first 40 lines. `.pyi` files are as long as what they
    describe."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return len(lines) > LINES and file.suffix != ".pyi" and not any(REASON in line for line in lines[:40])


def test_long_files_say_why_they_are_long() -> None:
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
