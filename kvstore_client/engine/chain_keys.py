"""The keys that an engine passes to its lookups and to its CPU tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore_client.keys import KeyArray


def key_list(keys: Sequence[bytes] | KeyArray) -> Sequence[bytes]:
    """Return the keys as a sequence of `bytes`. A sequence is returned unchanged, and only its first key is checked.

    * `keys`: `bytes` objects, or an array with a key in each row.

    Raises TypeError for keys of another type.
    """
    if isinstance(keys, np.ndarray):
        if keys.ndim != 2 or keys.dtype != np.uint8:
            raise TypeError(
                f"keys is an array of shape {keys.shape} and type {keys.dtype}; expected a list of bytes, or an array "
                "of uint8 with a key in each row (Namespace.keys)"
            )
        return [row.tobytes() for row in keys]
    if len(keys) and not isinstance(keys[0], bytes):
        raise TypeError(
            f"keys is a {type(keys).__name__} whose first item is of type {type(keys[0]).__name__}; expected a list of "
            "bytes, such as [row.tobytes() for row in namespace.keys(tokens)]"
        )
    return keys
