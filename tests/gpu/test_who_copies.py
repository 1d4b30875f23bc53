"""Which code makes a device's copies: vLLM's functions if they can be used, and otherwise calls of the CUDA driver that
replace them."""

from __future__ import annotations

import importlib
import types
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it is imported
    torch = pytest.importorskip("torch")
    from benchmarks.gpu import driver
    from kvstore_client.engine.paged import device
    from kvstore_client.vllm.connector import vllm_parts


class Calls:
    """Replaces the driver on a machine without one."""

    how = "the CUDA driver"

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (name, *arguments)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(driver, "Driver", Calls)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(name=name))
    return monkeypatch


def with_vllm(patch: pytest.MonkeyPatch, *, imported: bool = True, operator: bool = True) -> None:
    """Simulate an installed vLLM. imported: whether its modules can be imported. operator: whether it has the copy
    operator."""
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> types.ModuleType | types.SimpleNamespace:
        if not name.startswith("vllm"):
            return real(name, package)
        if not imported:
            raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi")
        return types.SimpleNamespace(__version__="0.32.0")

    patch.setattr(importlib, "import_module", import_module)
    operators = {"swap_blocks_batch": object()} if operator else {}
    patch.setattr(torch.ops, "_C_cache_ops", types.SimpleNamespace(**operators))


def test_vllm_makes_the_copies_if_it_can(patch: pytest.MonkeyPatch) -> None:
    with_vllm(patch)
    before = device.batched_copy, device.host_register
    with driver.installed() as copies:
        assert copies.how == "vLLM 0.32.0"
        assert (device.batched_copy, device.host_register) == (vllm_parts.batched_copy, vllm_parts.host_register)
    assert (device.batched_copy, device.host_register) == before


def test_without_vllm_the_driver_copies_and_locks_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.util, "find_spec", lambda name: None)
    before = device.batched_copy, device.host_register
    with driver.installed() as copies:
        assert copies.how == "the CUDA driver"
        assert device.batched_copy()(1) == ("copy_batch", 1)  # type: ignore[call-arg,arg-type,func-returns-value]
        register, unregister = device.host_register()
        assert register(4096, 1) == ("host_register", 4096, 1)  # type: ignore[comparison-overlap]
        assert unregister(4096) == ("host_unregister", 4096)  # type: ignore[func-returns-value]
    assert (device.batched_copy, device.host_register) == before


@pytest.mark.parametrize("imported", [False, True], ids=["cannot be imported", "has no operators"])
def test_a_vllm_built_for_another_torch_makes_no_copies(patch: pytest.MonkeyPatch, imported: bool) -> None:
    with_vllm(patch, imported=imported, operator=False)
    why = "no operator swap_blocks_batch" if imported else "undefined symbol"
    assert driver.why_not_vllm().startswith("vLLM cannot be used: ") and why in driver.why_not_vllm()
    with driver.installed() as copies:
        assert copies.how == "the CUDA driver"
