"""Fingerprints of files: a few characters that do not depend on the machine or on the folder of the files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
FILE_SAMPLES = 256
SAMPLE_BYTES = 4096


def weight_files(path: Path) -> list[Path]:
    """Return the files with weights in the folder `path`, sorted by name. If `path` is a file, return that file."""
    candidates = [path] if path.is_file() else path.iterdir()
    return sorted(file for file in candidates if file.suffix in WEIGHT_SUFFIXES)


def files_fingerprint(files: Iterable[Path]) -> str:
    """Return a digest of files as 16 characters. It covers their names, their sizes, and the bytes at ``FILE_SAMPLES``
    places of each file.

    Sampling takes less than a second for weights of any size. Different weights may have equal names and sizes. But it
    is practically impossible, even for merged adapters, that they are also equal at every sampled place of every file.
    """
    digest = xxhash.xxh3_128()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for offset in sample_offsets(size):
                stream.seek(offset)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def sample_offsets(size: int) -> Iterable[int]:
    """Return the offsets of the samples in a file of ``size`` bytes. They are spread evenly, and cover all of a small
    file."""
    if size <= FILE_SAMPLES * SAMPLE_BYTES:
        return range(0, size, SAMPLE_BYTES)
    return [index * (size - SAMPLE_BYTES) // (FILE_SAMPLES - 1) for index in range(FILE_SAMPLES)]
