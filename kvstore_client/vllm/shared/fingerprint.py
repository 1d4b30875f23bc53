"""Fingerprints of files: a few characters that are the same on every machine, whatever folder the files lie in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
SAMPLES = 256
SAMPLE_BYTES = 4096


def weight_files(path: Path) -> list[Path]:
    """The files with weights in a folder, sorted by name, or the single file that is the model."""
    candidates = [path] if path.is_file() else path.iterdir()
    return sorted(file for file in candidates if file.suffix in WEIGHT_SUFFIXES)


def files_fingerprint(files: Iterable[Path]) -> str:
    """A digest of files: their names, their sizes and the bytes at ``SAMPLES`` places of each file; 16 characters.

    Sampling takes less than a second for weights of any size. It is practically impossible, even for merged adapters,
    that other weights have equal names and sizes and also agree at every sampled place of every file.
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
    """The offsets of the samples in a file of ``size`` bytes: all of a small file, else evenly from start to end."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return range(0, size, SAMPLE_BYTES)
    return [index * (size - SAMPLE_BYTES) // (SAMPLES - 1) for index in range(SAMPLES)]
