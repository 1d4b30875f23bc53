"""What files hold, in a few characters: the same on every machine, wherever they lie and whatever they are called."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
SAMPLES = 256
SAMPLE_BYTES = 4096


def weight_files(path: Path) -> list[Path]:
    """The files with weights in a folder, or the one file that is the model, by name."""
    candidates = [path] if path.is_file() else path.iterdir()
    return sorted(file for file in candidates if file.suffix in WEIGHT_SUFFIXES)


def files_fingerprint(files: Iterable[Path]) -> str:
    """A digest of files: their names, sizes and the bytes at ``SAMPLES`` places of each.

    Sampling keeps it under a second for weights of any size; that other weights agree in every sampled place of
    every file, with equal names and sizes, is as good as excluded even for merged adapters.
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
    """Where to sample a file of ``size`` bytes: everywhere when it is small, else evenly from start to end."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return range(0, size, SAMPLE_BYTES)
    return [index * (size - SAMPLE_BYTES) // (SAMPLES - 1) for index in range(SAMPLES)]
