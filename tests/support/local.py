"""A raw client at a server's Unix socket, with direct access to the memory that the server lends and that the client
shares."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from pathlib import Path
from typing import Any

from tests.support.harness import ANSWER_S, EXTENT, GET, PART, RETIRED, SHARE, Closed, RawClient, pack, zmtp_frame

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memfd(nbytes: int, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class RawLocal(RawClient):
    """A `RawClient` at a Unix socket. `files`: number -> received descriptor. `retired`: the numbers of retired
    files."""

    def __init__(self, path: Path | str, handshake: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(str(path))
        self.files: dict[int, int] = {}
        self.retired: list[int] = []
        self._descriptors: list[int] = []
        self._data = b""
        if handshake:
            self._shake_hands()

    def read(self, size: int) -> bytes:
        while len(self._data) < size:
            try:
                data, came, _, _ = socket.recv_fds(self.sock, 1 << 16, 250)
            except ConnectionError:
                data, came = b"", []
            self._descriptors += came
            if not data:
                raise Closed(self._data)
            self._data += data
        data, self._data = self._data[:size], self._data[size:]
        return data

    def reply(self) -> tuple[list[Any], list[bytes]]:
        while True:
            fields, frames = super().reply()
            if fields[0] == EXTENT:
                self.files[fields[2]] = self._descriptors.pop(0)
            elif fields[0] == RETIRED:
                self.retired += array.array("Q", fields[2]).tolist()
            else:
                return fields, frames

    def close(self) -> None:
        for descriptor in (*self.files.values(), *self._descriptors):
            os.close(descriptor)
        self.files, self._descriptors = {}, []
        super().close()

    def get(self, request_id: int, keys: list[bytes], deadline_ms: int = 5000) -> None:
        """Request blocks by reference, without waiting."""
        header = pack(GET, request_id, deadline_ms, len(keys), len(keys[0]), 0, True, False, False, True)
        self.send(header, b"".join(keys))

    def lent(self) -> tuple[dict[int, tuple[int, int]], bool]:
        """Receive the next PART. Returns position -> file and offset of each block in it, and whether it is the last
        PART."""
        fields, _ = self.reply()
        assert fields[0] == PART, fields
        places = array.array("Q", fields[9]).tolist()
        positions = array.array("I", fields[2]).tolist()
        pairs = zip(places[::2], places[1::2], strict=True)
        return dict(zip(positions, pairs, strict=True)) if places else {}, fields[4]

    def all_lent(self) -> dict[int, tuple[int, int]]:
        """Receive all PARTs of the GET in progress. Returns position -> file and offset of each block."""
        found: dict[int, tuple[int, int]] = {}
        last = False
        while not last:
            some, last = self.lent()
            found.update(some)
        return found

    def bytes_at(self, place: tuple[int, int], nbytes: int) -> bytes:
        """Return the current bytes at a place in the shared memory."""
        number, offset = place
        size = os.fstat(self.files[number]).st_size
        with mmap.mmap(self.files[number], size, prot=mmap.PROT_READ) as memory:
            return memory[offset : offset + nbytes]

    def share(self, request_id: int, number: int, nbytes: int, *descriptors: int) -> list[Any]:
        """Send SHARE with these descriptors. Returns the header of the reply."""
        data = zmtp_frame(pack(SHARE, request_id, number, nbytes), 0)
        socket.send_fds(self.sock, [data], list(descriptors))
        return self.reply()[0]
