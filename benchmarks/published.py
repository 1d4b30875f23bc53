"""Figures of others, measured elsewhere; those of transfers as multiples of a memcpy of the same bytes in their run.

The remote KV cache that kvstore follows published seconds for copies, multiples of block-to-block naive row copies for
transfers, and prompts a second of the engine that used it. The peers were run on a two-core machine over loopback TCP
with 512 blocks of 917504 bytes.
"""

from __future__ import annotations

from typing import Final

# Seconds for 512 blocks: layer-to-layer naive, block-to-block naive, fancy index, index_copy_, cython memcpy.
MEMORY_IO: Final = {
    "Qwen2.5-32B": (0.277, 0.130, 0.335, 0.336, 0.165),
    "Qwen2.5-7B": (0.088, 0.033, 0.077, 0.077, 0.059),
    "Qwen2.5-3B": (0.090, 0.024, 0.049, 0.049, 0.031),
    "glm-4-9b": (0.126, 0.045, 0.107, 0.108, 0.056),
    "Llama-3.1-8B": (0.140, 0.065, 0.160, 0.161, 0.082),
}

# Multiples of block-to-block naive: set deferred=False, set deferred=True, get, stream_get.
SERVER: Final = {
    "Qwen2.5-32B": (4.01, 3.16, 5.9, 2.53),
    "Qwen2.5-7B": (3.76, 2.72, 8.0, 2.10),
    "Qwen2.5-3B": (3.08, 2.15, 8.5, 2.61),
    "glm-4-9b": (3.33, 2.31, 7.3, 2.06),
    "Llama-3.1-8B": (4.17, 3.19, 8.3, 1.96),
}

ZMQ_TRANSFER: Final = {"tcp": "3.6 - 4.6", "ipc": "2.9 - 4.5", "inproc": "1.0 - 1.2"}

# System, writing, reading, remark. 1 memcpy was about 18 GB/s; GB/s were turned into multiples of it.
PEERS: Final = (
    ("plain socket", "3.3 - 4.4", "3.3 - 4.4", "`sendall` → `recv_into`, one thread a side"),
    ("pyzmq, ROUTER → DEALER", "", "2.6 - 4.0", "`recv_into`; 0.8 - 0.9 of its plain socket, with I/O threads"),
    ("the system this one follows", "5.8 - 8", "6.6 - 8.4", "set deferred, stream_get; its get: 9 - 17"),
    ("Redis 7, redis-py", "10.7", "5.6", ""),
    ("Redis 7, LMCache's C++ client, 8 threads", "4.4", "5.6 - 6.2", "4.1 GB/s and 2.9 - 3.2 GB/s"),
    ("Mooncake Store 0.3.13, TCP", "55", "14", "`exist` of 512 keys: 0.31 ms"),
    ("kvblockd", "", "", "its own claim: 102 % of iperf3 on 100 GbE, checksums on"),
)

# Prompts a second with transfer_out ÷ those without: lowest and highest of eight batch sizes, cache on and off.
TRANSFER_OUT: Final = (0.94, 1.02)

# Prompts a second of 1000 prompts at prefix hit rates from 0 %: the fill run at 0 %, and the read run, from … to.
TRANSFER_IN_FILL: Final = 20.0
TRANSFER_IN_READ: Final = (50.0, 60.0)

# Prompts a second of ten prompts of 10240 tokens with two tokens of output, by who answers.
LONG_PREFILL: Final = {"compute": 0.88, "engine's cache": 48.0, "store": 5.5, "CPU tier": 9.3}
