"""`make check-image` runs these tests after building the images; elsewhere they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.podman import Network, unavailable


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    if "KVSTORE_IMAGES" not in os.environ:
        pytest.skip("make check-image runs it")
    if reason := unavailable():
        pytest.fail(reason)  # a run that requests these tests must not mistake skips for success


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as network:
        yield network
