"""The rooms of the tree: imports go one way, nothing heavy is imported by accident, and files stay short.

What is checked is the text of the shipped packages, so an import inside a function or for types alone counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.harness import ROOT, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = ("kvstore", "kvstore_client", "kvstore_serving", "kvstore_cli")

# From the lowest room to the highest: a file imports from its own room and from rooms before it. A file belongs to the
# longest name here that it starts with. `kvstore` itself is what every room may use: the version, sizes, logs.
SERVER = [
    *("kvstore", "kvstore._cext", "kvstore.wire", "kvstore.cluster", "kvstore.auth", "kvstore.store", "kvstore.disk"),
    *("kvstore.shard", "kvstore.moving", "kvstore.node", "kvstore.__main__"),
]
CLIENT = [
    *("kvstore_client.errors", "kvstore_client._arguments", "kvstore_client.endpoints", "kvstore_client.keys"),
    *("kvstore_client.results", "kvstore_client.memory", "kvstore_client._links"),
    *("kvstore_client._calls", "kvstore_client", "kvstore_client.engine", "kvstore_client.vllm.shared"),
    *("kvstore_client.vllm.tier", "kvstore_client.vllm.connector", "kvstore_client.vllm"),
]
SERVING = ["kvstore_serving", "kvstore_serving.load", "kvstore_serving.proxy", "kvstore_serving.planning"]
SHARED = ["kvstore", "kvstore._cext", "kvstore.wire", "kvstore.cluster"]  # what the client may use of the server's
ORDER = {
    **{room: SERVER[: at + 1] for at, room in enumerate(SERVER)},
    **{room: [*SHARED, *CLIENT[: at + 1]] for at, room in enumerate(CLIENT)},
    **{room: [*SHARED, *CLIENT, "kvstore_serving", room] for room in ("kvstore_serving.load", "kvstore_serving.proxy")},
    "kvstore_serving.planning": [*SHARED, *CLIENT, *SERVING],
    "kvstore_serving": [*SHARED, *CLIENT, "kvstore_serving"],
    "kvstore_cli": [*SERVER, *CLIENT, *SERVING, "kvstore_cli"],
}

LINES = 400
REASON = "Over 400 lines because"
DISTRIBUTIONS = {
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
    "opentelemetry": "opentelemetry-sdk",  # and its exporters
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
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: relative imports hide which room is meant"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                if full in modules() or full == "kvstore._cext":
                    yield full
                else:
                    yield node.module if node.module.startswith(PACKAGES) else node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield name.name if name.name.startswith(PACKAGES) else name.name.partition(".")[0]


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


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {
        module: {each for each in imports(file) if each in modules() and each != module}
        for module, file in modules().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_only_the_vllm_package_imports_torch_and_vllm() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, file in modules().items()
        for imported in imports(file)
        if imported in ("torch", "vllm", "transformers") and not room_of(module).startswith("kvstore_client.vllm")
    ]
    assert not wrong, "\n".join(wrong)


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


def test_importing_the_client_loads_little() -> None:
    """The bound on its time is 150 ms; what it loads tells the same on a busy machine. numpy, msgspec and xxhash are
    about three quarters of it."""
    code = (
        "import sys, numpy; before = set(sys.modules); import kvstore_client; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    loaded = done.stdout.split()
    heavy = {"asyncio", "lmdb", "prometheus_client", "requests", "rich", "torch", "typer", "urllib3", "vllm"}
    assert not heavy & set(loaded), f"import kvstore_client loads {sorted(heavy & set(loaded))}"
    assert len(loaded) < 140, f"import kvstore_client loads {len(loaded)} modules besides numpy's: {loaded}"


def test_a_server_starts_without_what_only_its_shards_need() -> None:
    """The supervisor of shards on one host moves no bytes. numpy would be half of the time that it takes to start."""
    code = "import sys, kvstore.node.cli, kvstore.node.supervisor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"asyncio", "kvstore._cext", "lmdb", "numpy", "prometheus_client", "requests", "rich"}
    assert not heavy & set(done.stdout.split())


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
