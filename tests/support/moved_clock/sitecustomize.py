"""In processes that are started with `tests.support.clock`, `time.time` and `time.monotonic` are ahead by the test's
offset.

Python imports this module when it starts, before another module imports a function of `time`. The file has the offset
in nanoseconds, in 8 bytes. Child processes inherit the variable, so all have the same time.
"""

import mmap
import os
import struct
import time

_ahead: list[mmap.mmap] = []


def follow(path: str) -> None:
    """Take the offset from this file. A fork of a process that has imported this module calls this with another
    file."""
    with open(path, "rb") as file:
        _ahead[:] = [mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)]


follow(os.environ.get("KVSTORE_TESTS_CLOCK", "/dev/zero"))
_number = struct.Struct("<q")
_monotonic_ns, _time_ns = time.monotonic_ns, time.time_ns


def monotonic_ns() -> int:
    return _monotonic_ns() + int(_number.unpack_from(_ahead[0])[0])


def time_ns() -> int:
    return _time_ns() + int(_number.unpack_from(_ahead[0])[0])


time.monotonic_ns, time.time_ns = monotonic_ns, time_ns
time.monotonic, time.time = lambda: monotonic_ns() / 1e9, lambda: time_ns() / 1e9
