"""Compares TLS with plain TCP for get_into and set, and with two limits: a plain socket, and a socket of Python's ssl
(OpenSSL).

Moves 512 blocks (8192 tokens of Qwen2.5-7B) in calls of 64. With TLS there are four processes: the client, its TLS
process, the shard's TLS process, and the shard. OpenSSL's limit has only two, one on each side, so on two cores each
process has its own core. The processor time of the shard's TLS process alone shows what one core of a server can do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import tempfile
from pathlib import Path
from typing import Final

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.remote_kv_cache.harness import Benchmark, Operation
from benchmarks.remote_kv_cache.plain import PlainSocket, plain_peer
from benchmarks.remote_kv_cache.processes import kvstore_server, processor_seconds
from benchmarks.remote_kv_cache.shapes import HEADLINE
from benchmarks.remote_kv_cache.transfers import (
    PLAIN_GET,
    PLAIN_SET,
    Blocks,
    connect,
    get_into_operation,
    plain_operations,
    set_operation,
)

OPENSSL_SET: Final = "OpenSSL socket set"
OPENSSL_GET: Final = "OpenSSL socket get"


def _certificate(folder: Path) -> tuple[str, str]:
    """Write a self-signed certificate for 127.0.0.1, and its key. Return both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(cert_file), str(key_file)


class Processor:
    """The processor time of the TLS processes of one side, for each operation. `module`: the module that they run."""

    def __init__(self, module: str) -> None:
        self._processes = [
            each for each in psutil.Process().children(recursive=True) if module in " ".join(each.cmdline())
        ]
        assert self._processes, f"no process runs {module}"
        self.gb_per_s: dict[str, list[float]] = {}  # rates by its own processor time

    def counted(self, operation: Operation) -> Operation:
        """Return the same operation, with its processor time counted."""

        def run() -> float | None:
            before = processor_seconds(self._processes)
            taken = operation.run()
            rate = operation.moved / 1e9 / (processor_seconds(self._processes) - before)
            self.gb_per_s.setdefault(operation.name, []).append(rate)
            return taken

        return dataclasses.replace(operation, run=run)


def main() -> None:
    benchmark = Benchmark(__spec__.name, __doc__)
    blocks = Blocks(benchmark.batch, HEADLINE.block_bytes)
    with contextlib.ExitStack() as stack:
        cert, key = _certificate(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        plain_port = stack.enter_context(plain_peer(benchmark.batch.blocks, HEADLINE.block_bytes))
        tls_port = stack.enter_context(plain_peer(benchmark.batch.blocks, HEADLINE.block_bytes, (cert, key)))
        plain = stack.enter_context(contextlib.closing(PlainSocket(plain_port)))
        openssl = stack.enter_context(contextlib.closing(PlainSocket(tls_port, cert)))
        operations: list[Operation] = plain_operations(plain, blocks)
        for operation, name, limit in zip(
            plain_operations(openssl, blocks), (OPENSSL_SET, OPENSSL_GET), (PLAIN_SET, PLAIN_GET), strict=True
        ):
            operations.append(
                Operation(name, operation.run, operation.moved, limit, before=operation.before, after=operation.after)
            )
        for name, flags, ca, limits in (
            ("TCP", (), None, (PLAIN_SET, PLAIN_GET)),
            ("TLS", ("--tls-cert", cert, "--tls-key", key), cert, (OPENSSL_SET, OPENSSL_GET)),
        ):
            endpoint = stack.enter_context(kvstore_server(blocks.total_bytes, flags=flags))
            client = stack.enter_context(connect(endpoint, "tls", HEADLINE.block_bytes, tls_ca=ca))
            operations.append(set_operation(client, blocks, f"set, {name}", limits[0]))
            operations.append(get_into_operation(client, blocks, f"get_into, {name}", limits[1]))
        processor = Processor("kvstore.tls.accepting")
        operations[-2:] = map(processor.counted, operations[-2:])
        benchmark.measure("tls", operations, block_bytes=HEADLINE.block_bytes)
    benchmark.finish(shards=1, shard_tls_process_gb_per_s=processor.gb_per_s)


if __name__ == "__main__":
    main()
