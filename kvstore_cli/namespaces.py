"""Which namespaces of a store a command means: by their JSON, the beginning of their ids, or their model."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from kvstore_cli.output import fail, printable

if TYPE_CHECKING:
    from kvstore.wire import NamespaceInfo, ShardInfo
    from kvstore_client import KVStoreClient

SHOWN: Final = 10  # the most namespaces that are listed
_ID_DIGITS: Final = 32


def check_id(given: str) -> str:
    """Return the beginning of an id that --namespace-id gives. Ends the command if it is invalid."""
    prefix = given.lower()
    if not 0 < len(prefix) <= _ID_DIGITS or set(prefix) - set("0123456789abcdef"):
        fail("usage", f"--namespace-id {given!r}: expected 1 to {_ID_DIGITS} hexadecimal digits, as in `kvstore info`")
    return prefix


def id_of(client: KVStoreClient, shards: Sequence[ShardInfo]) -> str:
    """Return the id that the server gives the client's namespace. On the server, the namespace may belong to the
    token's tenant."""
    import msgspec

    tenant = next((shard.tenant for shard in shards), "")
    wanted = client.namespace  # its id depends on the block secret, if there is one
    return (msgspec.structs.replace(wanted, tenant=tenant) if tenant else wanted).id


def of_id(infos: Sequence[NamespaceInfo], wanted: str) -> list[NamespaceInfo]:
    """Return the reports about the namespace with this id."""
    return [info for info in infos if info.id == wanted]


def matching(infos: Sequence[NamespaceInfo], model: str | None, prefix: str) -> list[NamespaceInfo]:
    """Return the reports about the namespaces whose model fits the pattern `model`, if it is not None, and whose id
    begins with `prefix`."""
    return [
        info for info in infos if info.id.startswith(prefix) and (model is None or fnmatchcase(model_of(info), model))
    ]


def model_of(info: NamespaceInfo) -> str:
    """Return the model's name in full."""
    import msgspec

    return str(msgspec.json.decode(info.namespace).get("model", ""))


class Content:
    """The content of a namespace, summed over all shards."""

    def __init__(self, parts: Sequence[NamespaceInfo]) -> None:
        from kvstore.node.status import tenant_of

        self.id = parts[0].id
        self.model, self.tenant = model_of(parts[0]), tenant_of(parts[0])
        self.blocks = sum(part.blocks for part in parts)
        self.disk_blocks = sum(part.disk_blocks for part in parts)
        self.bytes = self.blocks * parts[0].block_bytes
        self.disk_bytes = self.disk_blocks * parts[0].block_bytes

    @property
    def title(self) -> str:
        """Its model and its tenant, as a text to print."""
        return printable(self.model) + (f", tenant {printable(self.tenant)}" if self.tenant else "")


def contents_of(infos: Sequence[NamespaceInfo]) -> list[Content]:
    """Return the contents of the namespaces that have blocks."""
    by_id: dict[str, list[NamespaceInfo]] = {}
    for part in infos:
        if part.blocks or part.disk_blocks:
            by_id.setdefault(part.id, []).append(part)
    return [Content(parts) for _, parts in sorted(by_id.items())]


def named(contents: Sequence[Content]) -> str:
    """Return a text with the namespaces' ids, models and tenants."""
    shown = [f"{content.id[:12]} ({content.title})" for content in contents[:SHOWN]]
    return ", ".join(shown) + (f" and {len(contents) - SHOWN} more" if len(contents) > SHOWN else "")


def no_such_namespace(infos: Sequence[NamespaceInfo]) -> str:
    """Return the message that names the namespaces that exist."""
    contents = contents_of(infos)
    tenants = any(content.tenant for content in contents)
    hint = '; the JSON of --namespace names the tenant, too: "tenant": "NAME"' if tenants else ""
    return f"there is no such namespace; the store has {named(contents) or 'none'}{hint}"
