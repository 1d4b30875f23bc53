"""The old names of the classes and functions in `kvstore_client.engine.slices`. Using them causes a warning, and the
next release removes them."""

from __future__ import annotations

import warnings
from typing import Any, Final

from kvstore_client.engine import slices

_NAMES: Final = {
    "GroupParts": "GroupSlices",
    "HeadParts": "HeadSlices",
    "PartialBlocks": "PartialBlocks",
    "PartsStore": "SlicedStore",
    "SlicedStore": "SlicedStore",
    "part_keys": "slice_keys",
}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is kvstore_client.engine.slices.{_NAMES[name]} now", DeprecationWarning, stacklevel=2
    )
    return getattr(slices, _NAMES[name])
