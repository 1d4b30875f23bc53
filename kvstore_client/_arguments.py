"""Checks of the arguments of public calls. Every error text names the argument, the given value and what was expected.

A value of a wrong type raises `TypeError`; a value outside its range raises `ValueError`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final

_MAX_NUMBER: Final = (1 << 63) - 1


def flag(name: str, value: Any) -> bool:
    """Return `value`, which must be True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: expected True or False")
    return value


def text(name: str, value: Any) -> str:
    """Return `value`, which must be a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: expected a string")
    return value


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value` as an int. Any type with `__index__` is accepted, such as NumPy's integers, but not bool."""
    expected = f"expected {least} to {most}" if most is not None else f"expected at least {least}"
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: {expected}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: expected a whole number") from None
    if not least <= number <= (_MAX_NUMBER if most is None else most):
        raise ValueError(f"{name}={value!r}: {expected}")
    return number


def seconds(name: str, value: Any, most: float, zero: bool = False) -> float:
    """Return `value` as a float. It must be above 0 and at most `most`; with `zero`, it may also be 0."""
    if type(value) is float and (value > 0 or (zero and value == 0)) and value <= most:  # the usual case
        return value
    expected = f"expected {'0 or more' if zero else 'more than 0'}, at most {most:g} seconds"
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: {expected}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: {expected}") from None
    if not (number >= 0 if zero else number > 0) or not number <= most:
        raise ValueError(f"{name}={value!r}: {expected}")
    return number


def whole_numbers(name: str, values: Iterable[int]) -> list[int]:
    """Return `values` as a list of ints. Each may be of any size."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(f"{name}: {error}: expected whole numbers") from None


def slots(values: Iterable[int], keys: int, rows: int) -> list[int]:
    """Return `values` as a list. It must have one row number for each of the `keys` keys, and no number twice. Raises
    `IndexError` for a number that is not 0 to `rows` - 1."""
    places = whole_numbers("slots", values)
    if len(places) != keys:
        raise ValueError(f"{keys} keys and {len(places)} slots: expected as many slots as keys")
    if places and not 0 <= min(places) <= max(places) < rows:
        wrong = next(place for place in places if not 0 <= place < rows)
        raise IndexError(f"slot {wrong} does not exist: out has {rows} rows")
    if len(set(places)) != len(places):
        raise ValueError("slots: one of them is given twice: expected a different slot for each key")
    return places
