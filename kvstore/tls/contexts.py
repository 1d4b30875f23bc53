"""The TLS settings of both sides: only version 1.3, certificates from files, and errors that say what to do.

A key that needs a password is refused, because no user is there to type the password. Nothing here logs or keeps a
key's content.
"""

from __future__ import annotations

import os
import ssl
from typing import Final

from kvstore.secret_files import open_regular
from kvstore.tls import SYSTEM, TLSError, TLSOptions

_EXPIRED: Final = 10
_NOT_YET: Final = 9
_UNKNOWN_CA: Final = (2, 18, 19, 20, 21)
_OTHER_HOST: Final = (62, 64)


def server_context(cert: str, key: str, client_ca: str) -> ssl.SSLContext:
    """Return the context of a server. Raises `TLSError`.

    `client_ca`: the file of a CA. Clients must have a certificate that this CA signed. If `client_ca` is empty, clients
    need no certificate.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # connections live long, so resuming sessions would save nothing
    _load_own(context, cert, key)
    if client_ca:
        _load_ca(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(options: TLSOptions) -> ssl.SSLContext:
    """Return the context of a client, which verifies the server's certificate and name. Raises `TLSError`."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if options.ca in ("", SYSTEM):
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _load_ca(context, options.ca)
    if options.cert:
        _load_own(context, options.cert, options.key)
    return context


def signature(*files: str) -> tuple[tuple[int, ...], ...]:
    """Return a value that changes when one of the files is written or replaced."""
    found: list[tuple[int, ...]] = []
    for file in files:
        try:
            state = os.stat(file)
            found.append((state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size))
        except OSError:
            found.append(())
    return tuple(found)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load_own(context: ssl.SSLContext, cert: str, key: str) -> None:
    def no_password() -> str:
        raise ValueError("the key needs a password")

    for file in (cert, key):
        _readable(file)
    try:
        context.load_cert_chain(cert, key, no_password)
    except ValueError as error:
        raise TLSError(f"{key}: {error}: expected a key without a password, readable by its user only") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TLSError(f"{key} is not the key of the certificate in {cert}: expected its private key") from None
        raise TLSError(
            f"{cert} and {key} cannot be used ({error.reason or error}): expected PEM files: the first with the "
            "certificate and any intermediate certificates, the second with the certificate's private key"
        ) from None


def _load_ca(context: ssl.SSLContext, ca: str) -> None:
    _readable(ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise TLSError(f"{ca} holds no CA ({error.reason or error}): expected a PEM file of CA certificates") from None


def _readable(file: str) -> None:
    """Raise `TLSError` for a file that OpenSSL cannot read, or for which it would wait, such as a pipe."""
    try:
        with open_regular(file):
            pass
    except OSError as error:
        raise TLSError(f"{file}: {error.strerror}: expected a PEM file that this user can read") from None


def explain(error: OSError, host: str, ca: str) -> str:
    """Return a text that says why the connection to a server failed, and what to do. `host`: the expected name. `ca`:
    see `TLSOptions`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message
        if error.verify_code == _EXPIRED:
            return "the server's certificate has expired: renew it on the server"
        if error.verify_code == _NOT_YET:
            return "the server's certificate is not valid yet: compare the clocks of both hosts"
        if error.verify_code in _UNKNOWN_CA:
            known = f"the CA in {ca}" if ca not in ("", SYSTEM) else "a CA that this system trusts"
            return (
                f"the server's certificate is not signed by {known} ({said}): give the CA that signed it (tls_ca, "
                "--tls-ca)"
            )
        if error.verify_code in _OTHER_HOST:
            return (
                f"the server's certificate is not for {host}: connect to a name that is in it, or make one whose "
                "subject alternative names have this one"
            )
        return f"the server's certificate cannot be used: {said}"
    reason = getattr(error, "reason", None) or ""
    if reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return "it does not speak TLS: is it a server without --tls-cert? Plain connections are made with tcp://"
    if reason in ("TLSV1_ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL"):
        return "it does not speak TLS 1.3, the only version that is used"
    if reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED":
        return (
            "the server asks for a certificate: give one that its --tls-client-ca signed (tls_cert and tls_key; "
            "--tls-cert and --tls-key)"
        )
    if reason in ("TLSV1_ALERT_UNKNOWN_CA", "TLSV1_ALERT_DECRYPT_ERROR"):
        return (
            "the server refuses this client's certificate: expected one that its --tls-client-ca signed (tls_cert, "
            "--tls-cert)"
        )
    if reason == "SSLV3_ALERT_CERTIFICATE_EXPIRED":
        return "this client's certificate has expired: renew it (tls_cert, --tls-cert)"
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError):
        return "it closed the connection during the TLS handshake"
    return reason or error.strerror or str(error)
