"""Result files of commands are written as a whole, or not at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvstore_serving.files import check_writable, replace_file


def test_a_check_leaves_no_file(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        check_writable(tmp_path / "nix" / "new")
    with pytest.raises(IsADirectoryError):
        check_writable(tmp_path)


def test_a_file_is_replaced_and_keeps_its_mode_and_its_links(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    replace_file(file, b"old")
    os.umask(mask := os.umask(0))
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    file.chmod(0o640)
    link.symlink_to("file")
    with file.open("rb") as opened:
        replace_file(link, b"new")
        assert opened.read() == b"old", "a reader sees the old content or the new one"
    assert file.read_bytes() == b"new" and file.stat().st_mode & 0o777 == 0o640 and link.is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"file", "link"}


def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(OSError, match="file") as raised:
        replace_file(tmp_path / "nix" / "file", b"new")
    assert raised.value.filename == str(tmp_path / "nix" / "file")
    with pytest.raises(TypeError):
        replace_file(file, None)  # type: ignore[arg-type] # fails between opening and replacing
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_a_mount_is_written_and_stays(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for file in (outside, inside):
        file.write_bytes(b"old")
    if os.geteuid() or subprocess.run(["mount", "--bind", outside, inside], check=False).returncode:
        pytest.skip("this user may not mount files")
    try:
        check_writable(inside)
        replace_file(inside, b"new")
    finally:
        subprocess.run(["umount", inside], check=True)
    assert (outside.read_bytes(), inside.read_bytes()) == (b"new", b"old")
    assert {each.name for each in tmp_path.iterdir()} == {"outside", "inside"}


def test_what_is_no_regular_file_is_written_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        replace_file(pipe, b"through")
        assert os.read(reading, 16) == b"through" and pipe.is_fifo()
    finally:
        os.close(reading)
