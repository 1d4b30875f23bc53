"""Finds plug-ins by their kind and name.

The kinds at the end of this file name the plug-ins that come with kvstore. Other packages add their own with an entry
point in the group of the kind. A plug-in is imported when it is first requested, so importing the client or the
supervisor loads no plug-in. Entry points are read only for a name that does not come with kvstore. No state;
thread-safe.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Kind(NamedTuple):
    """One kind of plug-in.

    `what`: its name in error messages. `group`: the group of its entry points. `own`: the plug-ins that come with
    kvstore, as ``module:object``, by name.
    """

    what: str
    group: str
    own: Mapping[str, str]

    def find(self, name: str) -> Any:
        """Return a plug-in. Raises `ValueError`, which lists the valid names, or any error of the import."""
        where = self.own.get(name) or self._others().get(name)
        if where is None:
            raise ValueError(f"{self.what} {name!r}: expected one of {', '.join(self.names())}")
        module, _, attribute = where.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def has(self, name: str) -> bool:
        """Return whether a plug-in of this name exists."""
        return name in self.own or name in self._others()

    def names(self) -> list[str]:
        """Return the names of all plug-ins of this kind."""
        return sorted({*self.own, *self._others()})

    def _others(self) -> dict[str, str]:
        from importlib.metadata import entry_points  # takes longer than all imports of most clients

        return {each.name: each.value for each in entry_points(group=self.group)}


def _modules_of(package: str, attribute: str) -> dict[str, str]:
    """Return a dict with ``module:attribute`` for each module of a package of kvstore, by the module's name."""
    folder = os.path.join(os.path.dirname(__file__), *package.split(".")[1:])
    names = [file.removesuffix(".py") for file in os.listdir(folder) if file.endswith(".py") and file[0] != "_"]
    return {name: f"{package}.{name}:{attribute}" for name in names}


SCHEMES: Final = Kind(
    "scheme",
    "kvstore.schemes",
    {
        "dns": "kvstore.cluster.dns:DNS_CLUSTERS",
        "etcd": "kvstore.cluster.etcd:ETCD_CLUSTERS",
        "etcds": "kvstore.cluster.etcd:ETCD_CLUSTERS",
    },
)
TRANSPORTS: Final = Kind("transport", "kvstore.transports", _modules_of("kvstore.wire.transports", "sharing"))
