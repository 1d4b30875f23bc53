"""What can be plugged in, by kind and name.

The kinds at the end of this file name the plug-ins that come with kvstore. Other packages add theirs with an entry
point in the group of the kind. A plug-in is imported when it is first asked for, and entry points are looked at only
for a name that does not come with kvstore, so that importing the client or the supervisor loads none of them.
No state; any thread.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Kind(NamedTuple):
    """One kind of plug-ins. `what`: its name in errors. `group`: of the entry points. `own`: where those that come with
    kvstore are, as ``module:object``, by name."""

    what: str
    group: str
    own: Mapping[str, str]

    def find(self, name: str) -> Any:
        """-> the plug-in. Raises `ValueError`, which lists the names there are, and what importing it raises."""
        where = self.own.get(name) or self._others().get(name)
        if where is None:
            raise ValueError(f"{self.what} {name!r}: expected one of {', '.join(self.names())}")
        module, _, attribute = where.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def has(self, name: str) -> bool:
        """Whether there is a plug-in of this name."""
        return name in self.own or name in self._others()

    def names(self) -> list[str]:
        """-> the names of all plug-ins of this kind."""
        return sorted({*self.own, *self._others()})

    def _others(self) -> dict[str, str]:
        from importlib.metadata import entry_points  # takes longer than most clients' imports together

        return {each.name: each.value for each in entry_points(group=self.group)}


def _modules_of(package: str, attribute: str) -> dict[str, str]:
    """-> the same object of each module of a package of kvstore, by the module's name."""
    folder = os.path.join(os.path.dirname(__file__), *package.split(".")[1:])
    names = [file.removesuffix(".py") for file in os.listdir(folder) if file.endswith(".py") and file[0] != "_"]
    return {name: f"{package}.{name}:{attribute}" for name in names}


SCHEMES: Final = Kind(
    "scheme",
    "kvstore.schemes",
    {
        "dns": "kvstore.cluster.dns:SCHEME",
        "etcd": "kvstore.cluster.etcd:SCHEME",
        "etcds": "kvstore.cluster.etcd:SCHEME",
    },
)
TRANSPORTS: Final = Kind("transport", "kvstore.transports", _modules_of("kvstore.wire.transports", "sharing"))
