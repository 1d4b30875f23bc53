"""`scripts/vllm_surface.py` finds what another release of vLLM would break, with made-up projects and wheels. The
recorded surface is that of the installed vLLM, whose files are read but not imported."""

from __future__ import annotations

import functools
import importlib.util
import json
import textwrap
import zipfile
from pathlib import Path

import pytest

from scripts import vllm_surface
from scripts.surface.uses import Uses
from scripts.vllm_surface import RECORD, Row, compare, installed

PROJECT = {
    "kvstore_client/__init__.py": "",
    "kvstore_client/vllm/__init__.py": "",
    "kvstore_client/vllm/shared/__init__.py": "",
    "kvstore_client/vllm/shared/releases.py": """
        from typing import Final, TypeVar
        from vllm.base import Base
        T = TypeVar("T")
        HAS_POOL: Final = hasattr(Base, "bind_pool")
        def _found(module, name):
            try:
                return getattr(importlib.import_module(module), name, None)
            except ModuleNotFoundError:
                return None
        Source: Final = _found("vllm.request", "Source")
        def made(struct: type[T], **fields: object) -> T:
            return struct(**{name: value for name, value in fields.items() if name in struct.__struct_fields__})
        """,
    "kvstore_client/vllm/connector.py": """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from vllm.base import Base
        from vllm.messages import Stored, count
        from kvstore_client.vllm.shared.releases import HAS_POOL, Source, made
        if TYPE_CHECKING:
            from vllm.request import Config, Request

        class Connector(Base):
            def __init__(self, config: Config) -> None:
                super().__init__(config)
                self.block_tokens = config.cache.block_size

            def finished(self, request: Request, blocks: list[int]) -> bool:
                source = Source.HOST if Source else None
                return bool(count(request.tokens) and self._config.caches["x"].block_size and source)

            def bind_pool(self, pool: object) -> None:
                if HAS_POOL:
                    self._pool_of_base(pool)

            def events(self) -> list[Stored]:
                return [made(Stored, hashes=[1], size=2)]
        """,
}
VLLM = {
    "vllm/__init__.py": "raise ImportError('this module is only read')",
    "vllm/_version.py": "__version__ = version = '9.1.0'",
    "vllm/base.py": """
        from abc import ABC, abstractmethod
        from vllm.request import Config, Request

        class Base(ABC):
            def __init__(self, config: Config) -> None:
                self._config = config

            @abstractmethod
            def finished(self, request: Request, blocks: list[int]) -> bool: ...

            def bind_pool(self, pool: object) -> None: ...

            def _pool_of_base(self, pool: object) -> None: ...
        """,
    "vllm/messages.py": """
        import msgspec

        class Stored(msgspec.Struct):
            hashes: list[int]
            size: int | None = None

        def count(tokens: list[int]) -> int: ...
        """,
    "vllm/request.py": """
        from dataclasses import dataclass, field
        from enum import Enum

        class Source(Enum):
            HOST = "host"

        @dataclass
        class Cache:
            block_size: int = 16

        @dataclass
        class Config:
            cache: Cache = field(default_factory=Cache)
            caches: dict[str, Cache] = field(default_factory=dict)

        class Request:
            def __init__(self, tokens: list[int]) -> None:
                self.tokens = tokens
        """,
}
CONNECTOR = "kvstore_client/vllm/connector.py"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return root


def wheel(folder: Path, *changes: tuple[str, str, str], version: str = "9.1.0") -> Path:
    """Write a wheel of a made-up vLLM. `changes`: in which module which text becomes which."""
    files = {name: textwrap.dedent(text) for name, text in VLLM.items()}
    for module, before, after in [*changes, ("_version", "9.1.0", version)]:
        name = f"vllm/{module}.py"
        files.setdefault(name, "")
        assert before in files[name]
        files[name] = files[name].replace(before, after) if before else textwrap.dedent(after)
    about = f"vllm-{version}.dist-info"
    files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    folder.mkdir(exist_ok=True)
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    return path


def differences(project: Path, *changes: tuple[str, str, str], version: str = "9.2.0") -> list[Row]:
    """Return what differs between the made-up vLLM and one with these changes."""
    before = Uses(wheel(project.parent / "wheels"), root=project)
    assert before.surface.not_followed == {} and all(each.handled for each in before.problems.values())
    assert compare(before.surface, before) == []
    return compare(before.surface, Uses(wheel(project.parent / "wheels", *changes, version=version), root=project))


def states(rows: list[Row]) -> dict[str, str]:
    return {row.what: row.state for row in rows}


def test_a_name_that_is_gone_is_missing(project: Path) -> None:
    [row] = differences(project, ("messages", "def count(", "def number_of("))
    assert (row.state, row.what, row.places) == ("missing", "vllm.messages.count", [f"{CONNECTOR}:5"])


def test_a_name_that_moved_is_missing_and_its_new_place_is_told(project: Path) -> None:
    moved = ("counting", "", "def count(tokens: list[int]) -> int: ...\n")
    [row] = differences(project, ("messages", "def count(tokens: list[int]) -> int: ...", ""), moved)
    assert (row.state, row.what, row.now) == ("missing", "vllm.messages.count", "it is in vllm/counting.py")


@pytest.mark.parametrize("names", ["count", "*"])
def test_a_name_that_is_imported_from_its_new_place_is_not_missing(project: Path, names: str) -> None:
    moved = ("counting", "", "def count(tokens: list[int]) -> int: ...\n")
    imported = ("messages", "def count(tokens: list[int]) -> int: ...", f"from .counting import {names}")
    assert differences(project, imported, moved) == []


def test_attributes_are_followed_through_annotations(project: Path) -> None:
    rows = differences(project, ("request", "block_size", "tokens_per_block"), ("request", "self.tokens", "self.ids"))
    assert states(rows) == {"Cache.block_size": "missing", "Request.tokens": "missing"}
    assert rows[0].places == [f"{CONNECTOR}:13", f"{CONNECTOR}:17"]  # also as an element of a dict


def test_a_value_whose_type_no_longer_shows_is_listed(project: Path) -> None:
    rows = differences(
        project, ("request", "cache: Cache =", "cache: Any ="), ("request", "[str, Cache]", "[str, Any]")
    )
    found = states(rows)
    assert found["Cache.block_size"] == "not followed" and found["Config.caches[]"] == "not followed"
    assert set(found.values()) == {"changed", "not followed"}


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ("blocks: list[int], reason: str)", "too many positional arguments"),
        ("blocks: list[int], reason: str = '')", "too many positional arguments"),  # vLLM may pass it
        ("blocks: list[int], *, reason: str)", "got an unexpected keyword argument 'reason'"),
        ("blocks: list[int], **more: object)", "it has no **arguments"),
        ("block_ids: list[int])", "missing a required argument: 'blocks'"),
    ],
)
def test_an_overriding_method_must_take_every_parameter(project: Path, after: str, why: str) -> None:
    rows = differences(project, ("base", "blocks: list[int])", after))
    assert [(row.state, row.what) for row in rows] == [
        ("missing", "Base.finished"),
        ("changed", "Base.finished (hook)"),
    ]
    assert rows[0].now == f"Connector.finished: {why}" and rows[0].places == [f"{CONNECTOR}:15"]


def test_an_overriding_method_must_be_of_the_same_kind(project: Path) -> None:
    rows = differences(project, ("base", "def bind_pool(self,", "@classmethod\n    def bind_pool(cls,"))
    assert rows[0].state == "missing" and rows[0].now == "Connector.bind_pool: expected a classmethod def"


def test_a_hook_that_is_no_longer_called_is_missing(project: Path) -> None:
    rows = differences(project, ("base", "def finished(", "def request_finished("))
    assert states(rows) == {"Base.finished (hook)": "missing", "Base.request_finished": "missing"}
    assert rows[1].now == "new abstract method"


def test_a_new_method_of_a_base_class_is_news(project: Path) -> None:
    [row] = differences(
        project, ("base", "    def _pool_of_base(", "    def sleep(self) -> None: ...\n    def _pool_of_base(")
    )
    assert (row.state, row.what) == ("new", "Base.sleep (hook)")


def test_a_call_must_fit_the_new_signature(project: Path) -> None:
    [row] = differences(project, ("messages", "tokens: list[int])", "tokens: list[int], first: int = 0)"))
    assert (row.state, row.what) == ("changed", "vllm.messages.count")
    rows = differences(project, ("messages", "tokens: list[int])", "tokens: list[int], first: int)"))
    assert states(rows) == {"vllm.messages.count": "changed", "count()": "missing"}
    rows = differences(project, ("base", "__init__(self, config: Config)", "__init__(self, config: Config, role: int)"))
    assert states(rows)["Base.__init__()"] == "missing"


def test_a_message_may_lack_fields_but_must_not_require_new_ones(project: Path) -> None:
    rows = differences(project, ("messages", "    size: int | None = None\n", ""))
    assert states(rows) == {"Stored.size": "handled", "Stored()": "changed"}
    rows = differences(project, ("messages", "hashes: list[int]\n", "hashes: list[int]\n    group: int\n"))
    assert [(row.state, row.what) for row in rows] == [("missing", "Stored()"), ("changed", "Stored()")]
    assert rows[0].now == "missing a required argument: 'group'"


def test_what_releases_py_looks_for_is_handled(project: Path) -> None:
    rows = differences(project, ("request", 'class Source(Enum):\n    HOST = "host"\n', ""))
    assert states(rows) == {"vllm.request.Source": "handled"}  # and HOST is not used
    gone = ("base", "def bind_pool(self, pool: object) -> None: ...", "")
    rows = differences(project, gone, ("base", "def _pool_of_base(self, pool: object) -> None: ...", ""))
    assert set(states(rows).values()) == {"handled"}
    rows = differences(project, ("base", "def _pool_of_base(self, pool: object) -> None: ...", ""))
    assert states(rows) == {"Base._pool_of_base": "missing"}  # this release takes the branch


def test_tests_for_features_may_be_functions_and_look_at_objects(project: Path) -> None:
    releases, connector = project / "kvstore_client/vllm/shared/releases.py", project / CONNECTOR
    releases.write_text(
        releases.read_text().replace("HAS_POOL: Final = has", "def has_pool() -> bool:\n    return has")
        + textwrap.dedent("""
            def ids_of(request: Request) -> list[int]:
                if not hasattr(request, "tokens"):
                    return request.ids
                return request.tokens
            """)
    )
    releases.write_text("from vllm.request import Request\n" + releases.read_text())
    text = connector.read_text().replace("HAS_POOL", "has_pool").replace("if has_pool:", "if has_pool():")
    connector.write_text(text.replace("count(request.tokens)", "count([])"))
    gone = ("base", "def bind_pool(self, pool: object) -> None: ...", "")
    rows = differences(project, gone, ("base", "def _pool_of_base(self, pool: object) -> None: ...", ""))
    assert set(states(rows).values()) == {"handled"}
    [row] = [row for row in differences(project, ("request", "self.tokens", "self.ids")) if row.state == "handled"]
    assert (row.what, row.recorded) == ("Request.tokens", "looked up; not used with this release")
    assert states(differences(project, ("request", "self.tokens", "self.names")))["Request.ids"] == "missing"


def test_a_package_that_refuses_a_release_breaks_nothing_with_it(project: Path) -> None:
    gone = ("base", "def _pool_of_base(self, pool: object) -> None: ...", "")
    count = ("messages", "def count(", "def number_of(")
    assert set(states(differences(project, gone, count)).values()) == {"missing"}
    refusal = 'if not hasattr(Base, "_pool_of_base"):\n            raise ValueError("use another release")\n        '
    connector = project / CONNECTOR
    connector.write_text(connector.read_text().replace("super().__init__(", f"{refusal}super().__init__("))
    assert set(states(differences(project, gone, count)).values()) == {"handled"}
    assert states(differences(project, count)) == {"vllm.messages.count": "missing"}


def test_a_name_of_another_class_is_not_handled(project: Path) -> None:
    releases = project / "kvstore_client/vllm/shared/releases.py"
    releases.write_text(releases.read_text() + 'OTHER: Final = hasattr(Base, "tokens")\n')
    assert states(differences(project, ("request", "self.tokens", "self.ids"))) == {"Request.tokens": "missing"}


def test_the_commands_record_compare_and_download(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_surface, "Uses", functools.partial(Uses, root=project))
    monkeypatch.setattr(vllm_surface, "RECORD", project / "surface.json")
    wheels = project.parent / "wheels"
    first = str(wheel(wheels))
    bad = str(wheel(wheels, ("messages", "def count(", "def number_of("), version="9.2.0"))
    assert vllm_surface.main(["record", first]) == 0
    assert vllm_surface.main(["compare", first]) == 0
    capsys.readouterr()
    assert vllm_surface.main(["compare", first, bad]) == 1
    text = capsys.readouterr().out
    assert "vLLM 9.2.0, compared with 9.1.0: 1 missing, 0 handled" in text
    assert f"missing      vllm.messages.count at {CONNECTOR}:5" in text
    assert vllm_surface.main(["compare", "--json", bad]) == 1
    [found] = json.loads(capsys.readouterr().out)
    assert found["release"] == "9.2.0" and [row["what"] for row in found["rows"]] == ["vllm.messages.count"]
    with pytest.raises(SystemExit, match="expected a wheel of vLLM"):
        vllm_surface.main(["compare", str(project)])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert vllm_surface.main(["compare", "--download", "9.2.0"]) == 1
    with pytest.raises(SystemExit, match="pip could not download vllm==9"):
        vllm_surface.main(["compare", "--download", "9.3.0"])


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_recorded_surface_is_that_of_the_installed_vllm() -> None:
    uses = Uses(installed())
    assert uses.surface.as_json() == RECORD.read_text(), (
        "run scripts/run.sh full python scripts/vllm_surface.py record, and read what differs"
    )
    missing = {what: each.places for what, each in uses.problems.items() if each.handled is None}
    assert missing == {}
