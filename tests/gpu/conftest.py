"""Fixtures for the tests of a CUDA device. Most of these tests also run on the CPU, where the same classes copy host
tensors.

A test that takes `device` runs on both; one that takes `cuda` runs only on a CUDA device. Tests on a device are marked
`gpu` and skipped on machines without one; `make gpu-test` runs them. Without torch, everything here is skipped. Nothing
here needs vLLM: if it is missing, or was built for another torch, the connector uses calls of the CUDA driver instead.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.gpu.driver import Copies, installed

if TYPE_CHECKING:
    from tests.gpu.paged_caches import PagedCache
    from tests.gpu.rank import Rank

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def why_not() -> str:
    """Return why no device can be used, or an empty text if one can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about itself while it is imported
        import torch
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


@pytest.fixture(scope="session")
def copies() -> Iterator[Copies]:
    """The code that makes the device's copies: vLLM's, or calls of the driver."""
    if reason := why_not():
        pytest.skip(reason)
    with installed() as found:
        yield found


def _device(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name == "cuda":
        request.getfixturevalue("copies")
    yield name
    if name == "cuda":
        import torch

        torch.cuda.synchronize()  # raises a pending error, such as that of an invalid memory access


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device: each test runs on the CPU and on a CUDA device."""
    yield from _device(request)


@pytest.fixture(params=[CUDA])
def cuda(request: pytest.FixtureRequest) -> Iterator[str]:
    """A CUDA device."""
    yield from _device(request)


@pytest.fixture
def start_rank(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rank]]:
    """``start_rank(endpoint, cache, slots=...)`` makes a rank of an engine, with a namespace of its own."""
    from tests.gpu.rank import Rank  # imports torch, so only when a test needs it

    ranks: list[Rank] = []

    def start(endpoint: str, cache: PagedCache, **arguments: Any) -> Rank:
        ranks.append(Rank(endpoint, cache, request.node.name, **arguments))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.close()
