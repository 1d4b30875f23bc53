"""Makes structs of INFO for tests that use only some of their fields."""

from __future__ import annotations

from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)


def zeros(kind: type[Struct], **known: Any) -> Struct:
    """Return a struct with these fields. Other fields have their defaults; without a default, they are 0 or empty."""
    types = get_type_hints(kind)
    missing = {
        field.name: (get_origin(types[field.name]) or types[field.name])()
        for field in msgspec.structs.fields(kind)
        if field.required and field.name not in known
    }
    return kind(**missing, **known)
