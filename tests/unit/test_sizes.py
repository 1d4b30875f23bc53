"""Sizes in a form that people write and read."""

from __future__ import annotations

import pytest

from kvstore.sizes import format_size, parse_size, spell_size


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
        ("512Mi", 512 << 20),
        ("4Gi", 4 << 30),
        ("1Ti", 1 << 40),
        ("64Ki", 64 << 10),
        ("500M", 500_000_000),
        ("4 G", 4_000_000_000),
        ("2k", 2000),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4g", "512m", "4GI", "1e9", "0x10", "1,5GiB", "4GiB!", "inf", "nan"])
def test_an_invalid_size_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value) and "512MiB" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_shown_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (1023, "1023"), (1536, "1536"), (4 << 30, "4GiB"), (1536 << 20, "1536MiB"), (3 << 40, "3TiB")],
)
def test_an_exact_size_reads_back_exactly(size: int, text: str) -> None:
    assert spell_size(size) == text
    assert parse_size(text) == size
