"""The keys of an encrypted folder: what is derived from the operator's key, and how a folder knows its own.

The operator's key is 32 random bytes. Of it and the folder's random salt, HKDF-SHA256 makes a check value, which the
folder's mark holds, and one AES-256-GCM key for each shard. So no two folders have a key in common, a wrong key is
noticed at the start, and shards never have the operator's key.

Nonces: 8 random bytes, drawn by each run of a shard, and a counter of 4 bytes; when the counter is used up, 8 others.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shlex
import subprocess
import threading
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvstore.disk.format import Encryption
from kvstore.disk.sealing import NONCE_BYTES, TAG_BYTES
from kvstore.secret_files import read_secret

KEY_BYTES: Final = 32
COMMAND_S: Final = 30.0
_EXPECTED: Final = f"expected {2 * KEY_BYTES} hexadecimal digits, such as the output of: openssl rand -hex {KEY_BYTES}"


class DiskKey:
    """The operator's key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def new_encryption(self) -> Encryption:
        """-> the mark of a new folder."""
        salt = secrets.token_hex(32)
        return Encryption(salt, self._derive(salt, "check").hex())

    def is_key_of(self, encryption: Encryption) -> bool:
        """Whether the folder was made with this key."""
        return hmac.compare_digest(self._derive(encryption.salt, "check").hex(), encryption.check)

    def shard_key(self, encryption: Encryption, shard: int) -> bytes:
        """-> the key of one shard's blocks."""
        return self._derive(encryption.salt, f"shard {shard}")

    def _derive(self, salt: str, use: str) -> bytes:
        info = f"kvstore disk 1 {use}".encode()
        return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=bytes.fromhex(salt), info=info).derive(self._key)


class AESGCMCipher:
    """Encrypts and decrypts blocks with one shard's key. Thread-safe; large blocks without the GIL."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._lock = threading.Lock()
        self._prefix = b""
        self._left = 0  # nonces with this prefix

    def seal(self, block: memoryview, name: bytes, out: memoryview) -> None:
        """Write to `out` the ciphertext, its tag and its nonce. `name`: what the block is bound to."""
        nonce = self._next_nonce()
        end = len(block) + TAG_BYTES
        self._aead.encrypt_into(nonce, block, name, out[:end])
        out[end : end + NONCE_BYTES] = nonce

    def unseal(self, sealed: memoryview, name: bytes, out: memoryview) -> bool:
        """Write to `out` the block in `sealed`. -> whether `seal` has written that, for this name."""
        end = len(out) + TAG_BYTES
        try:
            self._aead.decrypt_into(bytes(sealed[end : end + NONCE_BYTES]), sealed[:end], name, out)
        except InvalidTag:
            return False
        return True

    def _next_nonce(self) -> bytes:
        with self._lock:
            if not self._left:
                self._prefix, self._left = os.urandom(8), 1 << 32
            self._left -= 1
            return self._prefix + self._left.to_bytes(4, "big")


def read_key(file: str | None, command: str | None) -> DiskKey | None:
    """-> the operator's key, from a file or from what a command prints; None: neither is given.

    The command is run without a shell and may take `COMMAND_S`. Nothing of what it prints is in a message. Blocks.
    Raises `ValueError`.
    """
    if file is not None and command is not None:
        raise ValueError("both --disk-key-file and --disk-key-command: expected one of them")
    if file is not None:
        return _parse(read_secret(file, "--disk-key-file"), f"--disk-key-file {file}")
    return _parse(_run(command), "--disk-key-command: what it printed") if command is not None else None


def _parse(text: bytes, what: str) -> DiskKey:
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        raise ValueError(f"{what} is not a key: {_EXPECTED}") from None
    if len(key) != KEY_BYTES:
        raise ValueError(f"{what} is a key of {len(key)} bytes: {_EXPECTED}")
    return DiskKey(key)


def _run(command: str) -> bytes:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--disk-key-command: {error}: expected a program and its arguments") from None
    if not words:
        raise ValueError("--disk-key-command is empty: expected a program and its arguments")
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it may tell of the key, and this process's own goes to the log
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"--disk-key-command: {words[0]} did not end within {COMMAND_S:g} s") from None
    except OSError as error:
        raise ValueError(f"--disk-key-command: {words[0]}: {error.strerror or error}") from None
    if done.returncode:
        raise ValueError(
            f"--disk-key-command: {words[0]} ended with status {done.returncode}: expected 0, and the key; "
            "what it printed is not shown"
        )
    return done.stdout.strip()
