"""Cuts the files of vLLM's CUDA wheel that an engine needs into pieces that are sent one by one, and joins the pieces:
see gpu_vllm.sh.

A piece is a folder with one part of an archive (tar, xz), and a list of all parts with their sizes and SHA-256 sums.
Every piece has the same list, so any piece shows which parts are missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MIB: Final = 1 << 20
LIST: Final = "parts.json"
# The only libraries of at least `SMALL_BYTES` that are sent; all smaller ones are sent.
LARGE_LIBRARIES: Final = ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
SMALL_BYTES: Final = 300_000
SUFFIXES: Final = (".py", ".json", ".jinja", ".so", ".typed")
SPARE_MIB: Final = 1.5


def wanted(entry: zipfile.ZipInfo) -> bool:
    """Return whether a file of the wheel is sent."""
    if ".dist-info/" in entry.filename or entry.filename in LARGE_LIBRARIES:
        return True
    return entry.filename.endswith(SUFFIXES) and (not entry.filename.endswith(".so") or entry.file_size < SMALL_BYTES)


def pack(wheel: Path, archive: Path) -> None:
    """Write those files of the wheel that are sent into an archive."""
    part = archive.with_suffix(".part")
    with (
        zipfile.ZipFile(wheel) as source,
        lzma.open(part, "wb", preset=9) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for entry in filter(wanted, source.infolist()):
            info = tarfile.TarInfo(entry.filename)
            info.size = entry.file_size
            info.mode = 0o755 if entry.filename.endswith(".so") else 0o644
            tar.addfile(info, io.BytesIO(source.read(entry)))
    part.rename(archive)


def tree_bytes() -> int:
    """Return the bytes of the checkout's files that git does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.split(b"\0")
    paths = [ROOT / os.fsdecode(name) for name in names if name]
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.exists())


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def cut(wheel: Path, folder: Path, wheels: Path | None) -> None:
    """Make the pieces, and print what is sent in each call."""
    archive = folder / f"{wheel.name.removesuffix('.whl')}.tar.xz"
    if not archive.exists():
        print("gpu-vllm: packing what an engine needs (two to three minutes)", file=sys.stderr)
        pack(wheel, archive)
    call = float(os.environ.get("KVSTORE_CALL_MIB", "64"))
    tree, first = tree_bytes(), folder_bytes(wheels) if wheels else 0
    rooms = [call * MIB - tree - SPARE_MIB * MIB - first, call * MIB - tree - SPARE_MIB * MIB]
    if rooms[1] < MIB:
        sys.exit(f"gpu-vllm: the checkout has {tree / MIB:.1f} MiB, which leaves no room in a call of {call:g} MiB")
    data = archive.read_bytes()
    parts: list[bytes] = []
    while data:
        room = max(0, int(rooms[min(len(parts), 1)]))
        parts.append(data[:room])
        data = data[room:]
    names = [f"{archive.name}.{number:02}" for number in range(len(parts))]
    listed = [
        {"name": name, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
        for name, part in zip(names, parts, strict=True)
    ]
    for number, (name, part) in enumerate(zip(names, parts, strict=True), 1):
        piece = folder / str(number)
        shutil.rmtree(piece, ignore_errors=True)
        piece.mkdir()
        (piece / name).write_bytes(part)
        (piece / LIST).write_text(json.dumps(listed, indent=1) + "\n")
        sizes = {"checkout": tree, "wheels": first if number == 1 else 0, "piece": folder_bytes(piece)}
        said = " + ".join(f"{what} {size / MIB:.1f}" for what, size in sizes.items() if size)
        print(f"gpu-vllm: call {number} of {len(parts)}: {said} = {sum(sizes.values()) / MIB:.1f} of {call:g} MiB")


def missing(listed: list[dict[str, object]], folder: Path) -> Iterator[str]:
    """Yield the names of parts that are not in the folder, or are incomplete."""
    for part in listed:
        path = folder / str(part["name"])
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != part["sha256"]:
            yield path.name


class Joined(io.RawIOBase):
    """The parts as one file, to be read from beginning to end."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [path.open("rb") for path in paths]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._files:
            if count := self._files[0].readinto(buffer):
                return count
            self._files.pop(0).close()
        return 0


def join(piece: Path, target: Path) -> None:
    """Add a piece, and unpack vLLM when all pieces are there."""
    listing = piece / LIST
    if not listing.exists():
        sys.exit(f"gpu-vllm: {piece} has no {LIST}; expected a piece that `gpu_vllm.sh prepare` made")
    listed = json.loads(listing.read_text())
    parts, site = target / "parts", target / "site"
    parts.mkdir(parents=True, exist_ok=True)
    for path in piece.iterdir():
        shutil.copyfile(path, parts / path.name)
    if lacking := list(missing(listed, parts)):
        print(f"gpu-vllm: {len(listed) - len(lacking)} of {len(listed)} pieces are here; missing: {', '.join(lacking)}")
        return
    scratch = target / "unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    paths = [parts / str(part["name"]) for part in listed]
    with lzma.open(io.BufferedReader(Joined(paths), MIB)) as archive, tarfile.open(fileobj=archive, mode="r|") as tar:
        tar.extractall(scratch, filter="data")
    shutil.rmtree(site, ignore_errors=True)
    scratch.rename(site)
    print(f"gpu-vllm: vLLM is in {site}, {folder_bytes(site) / MIB:.0f} MiB")


def main() -> None:
    match sys.argv[1:]:
        case ["cut", wheel, folder]:
            cut(Path(wheel), Path(folder), None)
        case ["cut", wheel, folder, wheels]:
            cut(Path(wheel), Path(folder), Path(wheels))
        case ["join", piece, target]:
            join(Path(piece), Path(target))
        case arguments:
            sys.exit(f"gpu_pieces.py: got {arguments}; expected cut WHEEL FOLDER [WHEELS], or join PIECE TARGET")


if __name__ == "__main__":
    main()
