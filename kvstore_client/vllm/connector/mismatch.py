"""Makes the text of a WARNING at the start of an engine. It explains why the engine does not find another engine's
blocks of the same model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from kvstore_client import Namespace

# The advice for a difference, by field of the namespace. Fields that only depend on other fields come last.
ADVICE: Mapping[str, str] = {
    "hash": "set the same PYTHONHASHSEED (or none) and --prefix-caching-hash-algo for every engine",
    "model": "load the same --revision",
    "weights": "give the same weights_version",
    "pages": "run versions of vLLM that lay out their pages alike",
    "block_tokens": "set the same --block-size",
    "dtype": "set the same --dtype",
    "kv_dtype": "set the same --kv-cache-dtype",
    "parallel": "set the same --tensor-parallel-size and --pipeline-parallel-size, or the same head_shards",
    "layer_parts": "give the same layer_parts",
    "config": "set the same --quantization, --hf-overrides and other options of the model",
    "loaded": "set the same --load-format",
    "draft": "use the same drafting model",
    "world": "store the same parts",
    "layers": "split the layers alike",
    "groups": "set --disable-hybrid-kv-cache-manager for all engines or for none",
    "layout": "use the same attention backend and kind of processor",
    "block_bytes": "store blocks of one size",
}
CAUSES = ("block_tokens", "dtype", "kv_dtype", "parallel", "layer_parts", "draft", "model", "config")
CONSEQUENCES = ("world", "layers", "layout", "pages", "block_bytes")


def explain_mismatch(mine: Namespace, store_namespaces: Iterable[str]) -> str | None:
    """Return the reason why another engine's blocks of the same model will not be found. Return None if there is
    nothing to explain.

    `mine`: the namespace of rank 0. `store_namespaces`: the canonical JSON of the namespaces in the store, some of
    which may not belong to an engine. Namespaces of other tenants are separate on purpose, so they are not explained.
    If the store also has blocks of this engine's namespace, only a different hash is explained, because engines should
    never differ in it.
    """
    own = _flat(mine.canonical())
    differences = []
    for text in store_namespaces:
        other = _flat(text)
        if other is not None and own is not None and _same_model(own, other):
            differences.append((other, [name for name in ADVICE if other.get(name) != own.get(name)]))
    familiar = any(not names for _, names in differences)
    nearest = min(
        ((other, names) for other, names in differences if names and (names == ["hash"] or not familiar)),
        key=lambda found: len(found[1]),
        default=None,
    )
    if nearest is None:
        return None
    other, names = nearest
    if set(names) & set(CAUSES):
        names = [name for name in names if name not in CONSEQUENCES]
    told = ", ".join(f"{name}={other.get(name)}, this one uses {own.get(name) if own else None}" for name in names)
    return (
        f"another engine stores the same model with {told}: the two do not share blocks. "
        f"If they should, {'; '.join(ADVICE[name] for name in names)}"
    )


def _flat(canonical: str | bytes) -> dict[str, object] | None:
    """Return a namespace's fields and its extra fields in one dict, or None if it is not the namespace of a vLLM
    engine."""
    try:
        fields = json.loads(canonical)
        extra = fields.pop("extra")
        return {**fields, **extra} if "pages" in extra else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _same_model(own: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return whether the two namespaces seem to belong to one deployment and have the same fields. Models from the hub
    are compared only by name, so that the revision may differ. Local models are compared by the fingerprint of their
    files."""
    mine, theirs = str(own["model"]), str(other.get("model"))
    same = mine == theirs or ("/" in mine and mine.partition("@")[0] == theirs.partition("@")[0])
    return same and own.keys() == other.keys() and all(own[name] == other.get(name) for name in ("tenant", "rank"))
