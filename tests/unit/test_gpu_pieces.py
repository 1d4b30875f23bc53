"""The pieces of vLLM's wheel: each fits into one call, and they are joined only when all pieces are complete."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.harness import ROOT, environment

WHEEL = "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
NOISE = bytes(range(256))  # compresses to almost nothing


def incompressible(size: int) -> bytes:
    import numpy as np

    return np.random.default_rng(0).bytes(size)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "version = 1\n")
        archive.writestr("vllm/configs/tuned.json", "{}")
        archive.writestr("vllm-0.32.0.dist-info/METADATA", "Name: vllm\n")
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", incompressible(3 << 20))
        archive.writestr("vllm/small.abi3.so", b"small")
        archive.writestr("vllm/_moe_C_stable_libtorch.abi3.so", NOISE * 4096)
        archive.writestr("vllm/third_party/header.h", "// not for an engine\n")
    return path


def pieces(*arguments: object, call_mib: float = 64) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_pieces.py"), *map(str, arguments)],
        check=False,
        env=environment(KVSTORE_CALL_MIB=str(call_mib)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def tree_mib() -> float:
    said = subprocess.run(
        [sys.executable, "-c", "from scripts.gpu_pieces import tree_bytes; print(tree_bytes())"],
        check=True, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return int(said.stdout) / 2**20


def test_pieces_fit_their_calls_and_give_the_engines_files(wheel: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "one.whl").write_bytes(incompressible(1 << 20))
    call = tree_mib() + 2.9  # the reserve, the wheels, and a part of the archive
    cut = pieces("cut", wheel, tmp_path, wheels, call_mib=call)
    assert cut.returncode == 0, cut.stderr
    lines = cut.stdout.splitlines()
    assert len(lines) == 3 and "wheels 1.0" in lines[0]
    assert all("checkout" in line and "piece" in line for line in lines)
    assert all(float(line.split(" = ")[1].split(" of ")[0]) <= call for line in lines)
    target = tmp_path / "there"
    for number, line in ((2, "1 of 3 pieces are here; missing: "), (1, "2 of 3"), (3, "vLLM is in")):
        joined = pieces("join", tmp_path / str(number), target)
        assert joined.returncode == 0 and line in joined.stdout
        assert (target / "site").exists() == (number == 3)
    names = {str(path.relative_to(target / "site")) for path in (target / "site").rglob("*") if path.is_file()}
    assert names == {
        "vllm/__init__.py",
        "vllm/configs/tuned.json",
        "vllm-0.32.0.dist-info/METADATA",
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/small.abi3.so",
    }
    with zipfile.ZipFile(wheel) as archive:
        assert all((target / "site" / name).read_bytes() == archive.read(name) for name in names)


def test_a_damaged_piece_counts_as_missing_until_it_is_complete(wheel: Path, tmp_path: Path) -> None:
    assert pieces("cut", wheel, tmp_path).returncode == 0
    [part] = [path for path in (tmp_path / "1").iterdir() if path.name != "parts.json"]
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = pieces("join", tmp_path / "1", tmp_path / "there").stdout
    assert f"0 of 1 pieces are here; missing: {part.name}" in said and not (tmp_path / "there" / "site").exists()
    part.write_bytes(whole)
    assert "vLLM is in" in pieces("join", tmp_path / "1", tmp_path / "there").stdout


def test_a_checkout_that_leaves_no_room_is_reported(wheel: Path, tmp_path: Path) -> None:
    cut = pieces("cut", wheel, tmp_path, call_mib=2)
    assert cut.returncode == 1 and "which leaves no room in a call of 2 MiB" in cut.stderr


def test_a_folder_as_a_piece_is_refused(tmp_path: Path) -> None:
    joined = pieces("join", tmp_path, tmp_path / "there")
    assert joined.returncode == 1 and "expected a piece that `gpu_vllm.sh prepare` made" in joined.stderr


def test_parts_are_read_as_one_file(tmp_path: Path) -> None:
    from scripts.gpu_pieces import Joined

    for number, text in enumerate((b"first ", b"", b"last")):
        (tmp_path / str(number)).write_bytes(text)
    assert io.BufferedReader(Joined(sorted(tmp_path.iterdir())), 4).read() == b"first last"
