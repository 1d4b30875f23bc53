"""In the processes that tests.support.clock starts: `time.time` and `time.monotonic` run ahead by what the test says.

Python imports this module when it starts, before any other takes a function out of `time`. The file's 8 bytes are
nanoseconds; processes that a process starts inherit the variable, so they keep one time.
"""

import mmap
import os
import struct
import time

with open(os.environ["KVSTORE_TESTS_CLOCK"], "rb") as _file:
    _ahead = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
_number = struct.Struct("<q")
_monotonic_ns, _time_ns = time.monotonic_ns, time.time_ns


def monotonic_ns() -> int:
    return _monotonic_ns() + int(_number.unpack_from(_ahead)[0])


def time_ns() -> int:
    return _time_ns() + int(_number.unpack_from(_ahead)[0])


time.monotonic_ns, time.time_ns = monotonic_ns, time_ns
time.monotonic, time.time = lambda: monotonic_ns() / 1e9, lambda: time_ns() / 1e9
