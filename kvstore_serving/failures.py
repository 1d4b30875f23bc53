"""Errors of connections to other servers, in words."""

from __future__ import annotations

import os
import socket

import aiohttp


def in_words(error: Exception) -> str:
    """Return what went wrong. aiohttp's own message of a failed connection speaks of its TLS settings, even without
    TLS."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if cause.errno is None or isinstance(cause, (socket.gaierror, aiohttp.ClientSSLError)):
            return f"cannot connect to {error.host}:{error.port}: {cause.strerror or cause}"
        return f"cannot connect to {error.host}:{error.port}: {os.strerror(cause.errno)}"
    if type(error).__module__ == "builtins" and isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)  # asyncio's own message repeats the address
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
