"""What the tests of a CUDA device need. Most of them also run on the CPU, where the same classes copy host tensors.

A test that takes `device` runs on both, one that takes `cuda` on a CUDA device alone; what runs there is marked `gpu`,
and skipped if there is none, but not by `make gpu-test`. Without torch, everything here is skipped. Nothing here needs
vLLM: where it is missing, or was built for another torch, calls of the driver do what it does for the connector.
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
    """Why no device can be used; empty if one can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about itself while it is imported
        import torch
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device"


@pytest.fixture(scope="session")
def copies() -> Iterator[Copies]:
    """Who makes the copies of a device."""
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

        torch.cuda.synchronize()  # raises what an access to memory that was not there has left


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the two."""
    yield from _device(request)


@pytest.fixture(params=[CUDA])
def cuda(request: pytest.FixtureRequest) -> Iterator[str]:
    """A CUDA device."""
    yield from _device(request)


@pytest.fixture
def start_rank(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rank]]:
    """``start_rank(endpoint, cache, slots=...)``: a rank of an engine, with a namespace of its own."""
    from tests.gpu.rank import Rank  # with torch: only when a test needs it

    ranks: list[Rank] = []

    def start(endpoint: str, cache: PagedCache, **arguments: Any) -> Rank:
        ranks.append(Rank(endpoint, cache, request.node.name, **arguments))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.close()
