"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from kvstore.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1048576", 1 << 20),
        ("1kib", 1024),
        (" 2TiB ", 2 << 40),
        ("7b", 7),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 G", "1e9", "0x10", "1,5GiB", "4GiB!", "inf", "nan"])
def test_a_size_that_is_none_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="a size of") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value) and "512MiB" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_shown_for_people(size: int, text: str) -> None:
    assert format_size(size) == text
