from collections.abc import Callable, Iterable, Sequence
from socket import socket
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvstore.wire.zmtp import FrameSink

# hashing

_Buffer: TypeAlias = Buffer | npt.NDArray[Any]  # before Python 3.12, mypy knows no array as a Buffer

def checksum(buffer: _Buffer) -> int: ...
def checksum_into(buffers: Iterable[_Buffer], out: _Buffer) -> None: ...
def checksum_blocks(base: _Buffer, block_bytes: int, out: _Buffer) -> None: ...
def checksum_at(base: _Buffer, offsets: npt.NDArray[np.int64], block_bytes: int) -> npt.NDArray[np.uint64]: ...
def prefix_keys(
    tokens: _Buffer, block_tokens: int, seed: bytes = b"", parent: _Buffer | None = None
) -> npt.NDArray[np.uint8]: ...
def _xxh3_variants() -> list[str]: ...
def _xxh3_64(buffer: _Buffer, seed: int, variant: str) -> int: ...
def _xxh3_128(buffer: _Buffer, seed: int, variant: str) -> bytes: ...

# copying

def gather(views: Iterable[_Buffer], block_ids: _Buffer, out: _Buffer, slots: _Buffer | None = None) -> None: ...
def scatter(src: _Buffer, views: Iterable[_Buffer], block_ids: _Buffer, slots: _Buffer | None = None) -> None: ...

# blocks between processes of one host

def copy_blocks(
    sources: Iterable[_Buffer],
    files: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    block_bytes: int,
    out: _Buffer,
    places: npt.NDArray[np.int64],
    in_all: int = 0,
) -> npt.NDArray[np.uint64]: ...
def _copy_and_hash_with(source: _Buffer, out: _Buffer, place: int, stream: bool, variant: str) -> int: ...
def memory_fence() -> None: ...
def outcomes_of(slots: npt.NDArray[np.int32], codes: bytes) -> bytes: ...
def slot_offsets(
    slots: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], slots_per_segment: int, block_bytes: int
) -> npt.NDArray[np.int64]: ...
def references_to(
    offsets: npt.NDArray[np.int64],
    segment_bytes: int,
    numbers: npt.NDArray[np.uint64],
    told: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.uint64], list[int]]: ...
def all_inside(
    offsets: npt.NDArray[np.int64], size: int, which: npt.NDArray[np.int64], pieces: npt.NDArray[np.int64]
) -> bool: ...
def distinct_files(numbers: npt.NDArray[np.uint64]) -> tuple[list[int], npt.NDArray[np.int64]]: ...

@final
class Parts:
    part_sent: bool
    def __init__(
        self,
        id: int,
        positions: _Buffer,
        sums: _Buffer,
        memory: _Buffer,
        offsets: npt.NDArray[np.int64],
        block_bytes: int,
        per_part: int,
        last: bool,
        hit: int,
        miss: int,
        attributes: bytes = b"",
    ) -> None: ...
    def send(self, sock: socket) -> int: ...

@final
class IdRing:
    NBYTES: ClassVar[int]
    def __init__(self, memory: _Buffer) -> None: ...
    def put(self, id: int) -> bool: ...
    def take(self, waits: bool = False) -> list[int]: ...

@final
class LentBlocks:
    def __init__(
        self,
        sources: Iterable[_Buffer],
        files: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        block_bytes: int,
    ) -> None: ...
    def views(self) -> list[memoryview]: ...

class ReusableMemory:
    in_use: bool
    def __init__(self, nbytes: int, lend: bool = False) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

# receiving

@final
class Payload:
    arrived: int
    def __init__(self, memory: _Buffer, offsets: npt.NDArray[np.int64], block_bytes: int, per_frame: int) -> None: ...

@final
class Landing:
    def __init__(
        self, id: int, rows: _Buffer, places: npt.NDArray[np.int64], block_bytes: int, verify: bool, most: int
    ) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def began_at(self) -> float: ...
    def outcomes(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]: ...
    def sums(self) -> npt.NDArray[np.uint64]: ...

@final
class Receiver:
    paused: bool
    slice_end: float
    received: int
    def __init__(
        self, sock: socket, sink: FrameSink, on_descriptors: Callable[[list[int]], None] | None = None
    ) -> None: ...
    @property
    def landing(self) -> bool: ...
    def land(self, landing: Landing) -> None: ...
    def forget(self, id: int) -> None: ...
    def receive(self, budget: int, wake_fd: int = -1, wait_s: float = 0.0) -> bool: ...
    def discard_rest(self) -> None: ...
    def arm(self) -> None: ...

# sending

def send_views(sock: socket, views: Sequence[_Buffer]) -> int: ...

@final
class BlockFrames:
    sent: int
    def __init__(
        self,
        head: bytes,
        blocks: Iterable[_Buffer] | _Buffer,
        block_bytes: int,
        per_frame: int,
        sums: npt.NDArray[np.uint64] | None = None,
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> None: ...
    def send(self, sock: socket, wait_s: float = 0.0) -> bool: ...

# blocks to and from a segment file

_Places: TypeAlias = npt.NDArray[np.int64]

def read_blocks(
    fd: int,
    memory: _Buffer,
    places: _Places,
    offsets: _Places,
    block_bytes: int,
    sums: npt.NDArray[np.uint64] | None,
    found: npt.NDArray[np.uint64] | None = None,
) -> npt.NDArray[np.int32]: ...
def write_blocks(fd: int, memory: _Buffer, places: _Places, offsets: _Places, block_bytes: int) -> int: ...

# placement

_Shards: TypeAlias = npt.NDArray[np.int64]

def rendezvous(
    keys: npt.NDArray[np.uint8],
    seeds: npt.NDArray[np.uint64],
    weights: npt.NDArray[np.float64],
    ranks: _Shards,
    nodes: _Shards,
    zones: _Shards,
    columns: int,
) -> npt.NDArray[np.intp]: ...
def first_of_each(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]: ...
def group_by_owner(owners: npt.NDArray[np.intp], count: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]: ...
