"""The keys of an encrypted folder: how they are derived from the operator's key, and how a folder recognizes that key.

The operator's key is 32 random bytes. From this key and the folder's random salt, HKDF-SHA256 derives a check value and
one AES-256-GCM key for each shard. The check value is kept in the folder's mark. So no two folders have a key in
common, a wrong key is noticed at the start, and shards never see the operator's key.

A nonce is 8 random bytes, drawn at each start of a shard, and then a counter of 4 bytes. When the counter is used up, 8
new random bytes are drawn.
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

AES_KEY_BYTES: Final = 32
COMMAND_S: Final = 30.0
_KEY_EXPECTED: Final = (
    f"expected {2 * AES_KEY_BYTES} hexadecimal digits, such as the output of: openssl rand -hex {AES_KEY_BYTES}"
)


class DiskKey:
    """The operator's key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def new_encryption(self) -> Encryption:
        """Return the mark of a new folder."""
        salt = secrets.token_hex(32)
        return Encryption(salt, self._derive(salt, "check").hex())

    def is_key_of(self, encryption: Encryption) -> bool:
        """Return whether the folder was made with this key."""
        return hmac.compare_digest(self._derive(encryption.salt, "check").hex(), encryption.check)

    def shard_key(self, encryption: Encryption, shard: int) -> bytes:
        """Return the key of one shard's blocks."""
        return self._derive(encryption.salt, f"shard {shard}")

    def _derive(self, salt: str, use: str) -> bytes:
        info = f"kvstore disk 1 {use}".encode()
        return HKDF(algorithm=SHA256(), length=AES_KEY_BYTES, salt=bytes.fromhex(salt), info=info).derive(self._key)


class AESGCMCipher:
    """Encrypts and decrypts blocks with one shard's key. Thread-safe. For large blocks it does not hold the GIL."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._lock = threading.Lock()
        self._prefix = b""
        self._left = 0  # the number of unused nonces with this prefix

    def seal(self, block: memoryview, name: bytes, out: memoryview) -> None:
        """Write to `out` the ciphertext, its tag and its nonce. `name`: the name to which the block is bound."""
        nonce = self._next_nonce()
        end = len(block) + TAG_BYTES
        self._aead.encrypt_into(nonce, block, name, out[:end])
        out[end : end + NONCE_BYTES] = nonce

    def unseal(self, sealed: memoryview, name: bytes, out: memoryview) -> bool:
        """Write to `out` the block in `sealed`. Return False if `seal` did not write it for this name."""
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
    """Return the operator's key, from a file or from the output of a command, or None if neither is given.

    The command is run without a shell and may take `COMMAND_S` seconds. No message contains any of its output. Blocks.
    Raises `ValueError`.
    """
    if file is not None and command is not None:
        raise ValueError("both --disk-key-file and --disk-key-command are given: expected one of them")
    if file is not None:
        return _parse(read_secret(file, "--disk-key-file"), f"--disk-key-file {file}")
    return _parse(_run(command), "--disk-key-command: what it printed") if command is not None else None


def _parse(text: bytes, what: str) -> DiskKey:
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        raise ValueError(f"{what} is not a key: {_KEY_EXPECTED}") from None
    if len(key) != AES_KEY_BYTES:
        raise ValueError(f"{what} is a key of {len(key)} bytes: {_KEY_EXPECTED}")
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
            stderr=subprocess.DEVNULL,  # it may reveal the key, and this process's own stderr goes to the log
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"--disk-key-command: {words[0]} has not ended after {COMMAND_S:g} s") from None
    except OSError as error:
        raise ValueError(f"--disk-key-command: {words[0]}: {error.strerror or error}") from None
    if done.returncode:
        raise ValueError(
            f"--disk-key-command: {words[0]} ended with status {done.returncode}: expected status 0 and the key as "
            "its output. Its output is not shown here, because it may be secret"
        )
    return done.stdout.strip()
