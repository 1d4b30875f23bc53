"""Both clients have the same interface: the same calls, options and types."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore_client import AsyncKVStoreClient, AsyncPromise, GetResult, KVStoreClient, Namespace, Promise
from kvstore_client.client import ClientKeywords
from kvstore_client.engine.client_store import ClientOptions

ROOT = Path(__file__).parents[2]
# Only for the asynchronous client: it cannot connect when it is made, and its other attributes are properties.
OWN = {"connect", "namespace", "fail_open", "replicas"}
PUBLIC = sorted(name for name in vars(KVStoreClient) if not name.startswith("_"))


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def test_both_clients_have_the_same_members() -> None:
    assert {name for name in vars(AsyncKVStoreClient) if not name.startswith("_")} - OWN == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_call_has_one_signature(name: str) -> None:
    sync, asynchronous = vars(KVStoreClient)[name], vars(AsyncKVStoreClient)[name]
    assert type(sync) is type(asynchronous)
    if isinstance(sync, property):
        assert sync.fget is not None and asynchronous.fget is not None
        sync, asynchronous = sync.fget, asynchronous.fget
    assert parameters(sync) == parameters(asynchronous)
    returned = inspect.signature(sync).return_annotation
    expected = returned.replace("Generator", "AsyncGenerator").replace(", None, None]", ", None]")
    expected = re.sub(r"^Promise$", "AsyncPromise", expected)
    assert inspect.signature(asynchronous).return_annotation == expected
    assert asynchronous.__doc__


def test_both_promises_have_the_same_members() -> None:
    for name in ("renew", "withdraw"):
        sync, asynchronous = vars(Promise)[name], vars(AsyncPromise)[name]
        assert parameters(sync) == parameters(asynchronous) and inspect.iscoroutinefunction(asynchronous)
    assert {name for name in vars(AsyncPromise) if not name.startswith("_")} == {"renew", "withdraw"}


def test_the_clients_options_differ_only_in_threads() -> None:
    options = [each for each in parameters(KVStoreClient.__init__) if each.kind is each.KEYWORD_ONLY]
    keywords = {name: hint.__forward_arg__ for name, hint in ClientKeywords.__annotations__.items()}
    assert keywords == {each.name: each.annotation for each in options}
    shown = parameters(AsyncKVStoreClient)  # as `help` and editors show the signature
    assert [each for each in shown if each.name != "concurrency"] == parameters(KVStoreClient)
    assert "concurrency" in [each.name for each in shown]
    AsyncKVStoreClient("a:1", fail_open=True, timeout_s=3.0)
    with pytest.raises(TypeError, match="retries, timeout: expected options of KVStoreClient"):
        AsyncKVStoreClient("a:1", timeout=3.0, retries=1)  # type: ignore[call-arg]


def test_an_engine_passes_its_clients_options_through() -> None:
    own = {each.name: each for each in parameters(KVStoreClient.__init__)}
    for option in dataclasses.fields(ClientOptions):
        assert (option.type, option.default) == (own[option.name].annotation, own[option.name].default), option.name


def test_an_engines_secrets_are_not_in_the_text_of_its_options() -> None:
    assert "secret" not in repr(ClientOptions(token="secret of mine", block_secret="secret of ours"))


@pytest.mark.parametrize("name", PUBLIC)
def test_options_after_the_data_are_keywords(name: str) -> None:
    call = vars(KVStoreClient)[name]
    if not isinstance(call, property):
        data = {"self", "keys", "key", "blocks", "out", "slots", "name", "value"}
        named = [each for each in parameters(call) if each.name not in data]
        assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in named)
        talks = name not in ("close", "why_unanswered")
        assert any(each.name == "timeout_s" for each in named) == talks


def test_calls_are_awaited_and_streams_iterated() -> None:
    for name, member in vars(AsyncKVStoreClient).items():
        call = inspect.unwrap(member) if name == "borrow" else member  # `borrow` returns a context manager
        if inspect.isfunction(call) and not name.startswith("_") and name != "why_unanswered":
            assert inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call), name
    assert AsyncGenerator.__name__ in str(inspect.signature(AsyncKVStoreClient.stream_get).return_annotation)


def test_a_client_that_cannot_be_pickled_says_so_and_shows_where_it_connects() -> None:
    client = AsyncKVStoreClient("a:1")
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(
            TypeError, match="an AsyncKVStoreClient cannot be pickled or copied: make one in each process"
        ):
            copied(client)
    assert repr(client) == "<AsyncKVStoreClient>"


def test_a_result_with_blocks_cannot_be_pickled_and_says_what_can() -> None:
    for blocks in ([memoryview(b"block")], [None]):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(
                TypeError, match=r"^a GetResult cannot be pickled .*: take bytes\(block\) of each block"
            ):
                copied(GetResult(1, 1, 0, 0, blocks))


def wrong_lines(program: str, folder: Path) -> list[int]:
    """Return the lines of a program in which mypy finds an error."""
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program))
    settings = folder / "mypy.ini"
    settings.write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    arguments = ["--config-file", str(settings), "--cache-dir", str(Path(sys.prefix, "mypy-cache")), str(file)]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert checked.returncode in (0, 1), checked.stdout + checked.stderr
    return sorted({int(line.split(":")[1]) for line in checked.stdout.splitlines() if ": error:" in line})


def test_a_type_checker_finds_blocks_that_are_no_buffers(tmp_path: Path) -> None:
    program = """
        import array

        import numpy as np
        import torch
        from kvstore_client import KVStoreClient

        def use(client: KVStoreClient, keys: list[bytes]) -> None:
            for out in (np.zeros((2, 8)), torch.zeros(2, 8), bytearray(16), memoryview(b"")):
                client.get_into(keys, out)
            client.set(keys, np.zeros((2, 8)))
            client.set(keys, torch.zeros(2, 8))
            client.set(keys, [b"", bytearray(), memoryview(b""), array.array("b"), np.zeros(8), torch.zeros(8)])
            client.set(keys, (bytes(8) for key in keys))
            client.set(keys, "abc")
            client.set(keys, b"abc")
            client.set(keys, ["abc"])
            client.set(keys, [1, 2])
            client.get_into(keys, "abc")
            client.get_into(keys, [bytearray(8)])
        """
    assert wrong_lines(program, tmp_path) == [15, 16, 17, 18, 19, 20]


def test_a_type_checker_knows_the_dtypes_of_a_namespace(tmp_path: Path) -> None:
    program = """
        import numpy as np

        from kvstore_client import DTYPES, Namespace

        class dtype:  # as torch declares its own
            is_floating_point: bool
            is_complex: bool
            is_signed: bool
            itemsize: int

        def name(dtype: str | np.dtype[np.float16] | type[np.float16] | dtype) -> str:
            made = Namespace(model="m", dtype=dtype, block_tokens=16, block_bytes=DTYPES["float16"])
            Namespace.for_model("m", layers=1, kv_heads=1, head_size=8, dtype=dtype, block_tokens=16)
            return made.dtype

        Namespace(model="m", dtype=2, block_tokens=16, block_bytes=4096)
        Namespace(model="m", dtype=float, block_tokens=16, block_bytes=4096)
        Namespace(model="m", dtype="float16", block_tokens=16)
        Namespace(model="m", dtype="float16", block_tokens=16, block_bytes=4096, worlds=2)
        """
    assert wrong_lines(program, tmp_path) == [17, 18, 19, 20]


def test_a_type_checker_finds_a_client_without_a_namespace(tmp_path: Path) -> None:
    program = """
        from kvstore_client import KVStoreClient, Namespace

        def use(namespace: Namespace) -> None:
            KVStoreClient("a:1", namespace)
            KVStoreClient(["a:1", "b:1"], namespace, timeout_s=3, replicas=2)
            KVStoreClient(namespace=namespace, fail_open=True)
            KVStoreClient(endpoint=None, namespace=namespace)
            KVStoreClient("a:1")
            KVStoreClient()
            KVStoreClient("a:1", "b:1", namespace)
            KVStoreClient("a:1", namespace, timeout=3)
        """
    assert wrong_lines(program, tmp_path) == [9, 10, 11, 12]


def test_a_type_checker_gets_the_fields_of_a_namespace() -> None:
    """`Namespace.__init__` exists only for type checkers, and repeats the fields."""
    source = ast.parse(inspect.getsource(Namespace))
    (made,) = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert [each.arg for each in made.args.kwonlyargs] == list(Namespace.__struct_fields__)
    named = zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True)
    optional = {each.arg for each, default in named if default is not None}
    fields = msgspec.structs.fields(Namespace)
    assert optional == {each.name for each in fields if not each.required}
