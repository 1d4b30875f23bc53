"""A shard's process: reads its configuration, serves, and ends.

A node's supervisor starts this process with an inherited listening socket, the configuration as JSON on standard input,
and a pipe to which the shard writes when it is ready. The shard dies with its supervisor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import socket
import sys
from typing import Final

import msgspec

from kvstore.auth.policy import AuthFileError
from kvstore.logs import configure as configure_logs
from kvstore.shard.configuring import LOG_LEVEL
from kvstore.shard.loop import Shard
from kvstore.shard.setup import ShardConfig
from kvstore.tls.handing import Handed

log = logging.getLogger("kvstore.server")

_PR_SET_PDEATHSIG: Final = 1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_THRESHOLD_BYTES: Final = 256 << 10


def main() -> None:
    """Entry point of a shard process."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Without this call, glibc raises this threshold after the first large free. From then on, pieces of the index of a
    # segment stay in the heap for ever after the index is freed. In a measurement, each of 1 000 namespaces that came
    # and went left 1 MiB.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ShardConfig)
    changed = {change.name: change.value for change in config.changed}
    configure_logs(changed.get(LOG_LEVEL, config.log_level), f"shard={config.shard}", config.log_format)
    listener = socket.socket(fileno=config.listen_fd)
    listener.setblocking(False)
    local = None
    if config.unix_fd >= 0:
        local = socket.socket(fileno=config.unix_fd)
        local.setblocking(False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a descriptor for each connection, segment and segment file
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        shard = Shard(config, Handed(listener) if config.handed else listener, local)
    except AuthFileError as error:
        log.error("%s", error)
        sys.exit(1)
    except (OSError, OverflowError) as error:
        log.error("%d bytes of memory cannot be reserved for blocks: %s; lower --memory", config.memory_bytes, error)
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: shard.drain())
    signal.signal(signal.SIGHUP, lambda *_: shard.reload())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when its shards end
    os.write(config.ready_fd, b"1")
    os.close(config.ready_fd)
    shard.run()
