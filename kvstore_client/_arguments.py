"""Checks of the arguments of public calls. Every error has one style: the argument, the given value, the expectation.

`TypeError` for a value of a wrong type, `ValueError` for a value outside its range.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final

_MAX_NUMBER: Final = (1 << 63) - 1


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as an int. It may be an int or any type with `__index__`, such as NumPy's integers, but no bool."""
    expected = f"expected {least} to {most}" if most is not None else f"expected at least {least}"
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: {expected}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: a {type(value).__name__}: expected a whole number") from None
    if not least <= number <= (_MAX_NUMBER if most is None else most):
        raise ValueError(f"{name}={value!r}: {expected}")
    return number


def seconds(name: str, value: Any, most: float, zero: bool = False) -> float:
    """`value` as a float: more than 0 (or 0, if `zero`), at most `most`."""
    if type(value) is float and (value > 0 or (zero and value == 0)) and value <= most:  # the usual case
        return value
    expected = f"expected {'0 or more' if zero else 'more than 0'}, at most {most:g} seconds"
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{name}={value!r}: a {type(value).__name__}: {expected}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r}: a {type(value).__name__}: {expected}") from None
    if not (number >= 0 if zero else number > 0) or not number <= most:
        raise ValueError(f"{name}={value!r}: {expected}")
    return number


def whole_numbers(name: str, values: Iterable[int]) -> list[int]:
    """`values` as ints of any size."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(f"{name}: {error}: expected whole numbers") from None


def slots(values: Iterable[int], keys: int, rows: int) -> list[int]:
    """`values` as a row of its own, of `rows`, for each of so many keys. Raises `IndexError` for one that is not."""
    places = whole_numbers("slots", values)
    if len(places) != keys:
        raise ValueError(f"{keys} keys and {len(places)} slots: expected as many slots as keys")
    if places and not 0 <= min(places) <= max(places) < rows:
        wrong = next(place for place in places if not 0 <= place < rows)
        raise IndexError(f"slot {wrong}: out has {rows} rows")
    if len(set(places)) != len(places):
        raise ValueError("slots: one is named twice: expected a row of its own for each block")
    return places
