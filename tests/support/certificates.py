"""Real certificates for tests, made with `cryptography`: a CA, and the certificates that it signs.

authority = Authority(tmp_path)
server = authority.issue("server", hosts=("127.0.0.1", "localhost"))
server.cert, server.key, authority.file
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HERE = ("127.0.0.1", "localhost")
_DAY = datetime.timedelta(days=1)


class Issued(NamedTuple):
    """The PEM files of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """A CA; its certificate is in `file`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(self._name, self._key, (), ca=True)
        self.file = str(folder / f"{name}.pem")
        Path(self.file).write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = HERE,
        days: float = 30,
        own: bool = False,
        password: bytes | None = None,
        common_name: bool = True,
    ) -> Issued:
        """Issue a certificate for hosts, valid from a year ago until `days` from now, which may be negative. `own`:
        sign it with its own key. `password`: encrypt the key. `common_name`: put `name` in the certificate. Existing
        files of the same name are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name(name) if common_name else x509.Name([]), key, hosts, days, key if own else None)
        issued = Issued(str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key"))
        for file, data in (
            (issued.cert, certificate.public_bytes(serialization.Encoding.PEM)),
            (
                issued.key,
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption(),
                ),
            ),
        ):
            made = Path(f"{file}.new")
            made.write_bytes(data)
            made.replace(file)
        return issued

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        hosts: Sequence[str],
        days: float = 30,
        by: ec.EllipticCurvePrivateKey | None = None,
        ca: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name if by else self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 365 * _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if hosts:
            names = [_general_name(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(by or self._key, hashes.SHA256())


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
