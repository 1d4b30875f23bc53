"""How a directory talks to etcd: plainly, or with TLS, a client certificate, and a user's token.

`etcds://` takes files and the user from the URL, else from variables. A password comes from a file or a variable only,
so that no list of processes shows it, and it is sent over TLS only. A token lasts for some minutes; when etcd does not
know it any more, the request is made again with a new one. A process has one token for a user of a cluster: etcd takes
a tenth of a second to check a password, on purpose. Thread-safe.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import requests
from requests.adapters import HTTPAdapter

from kvstore.cluster.members import DirectoryError
from kvstore.cluster.url import EtcdOptions, EtcdURL

VARIABLE_PREFIX: Final = "KVSTORE_ETCD_"
PASSWORD_VARIABLE: Final = f"{VARIABLE_PREFIX}PASSWORD"
_API: Final = "/v3"  # of etcd 3.4 and later
_UNAUTHORIZED: Final = 401
_AUTHENTICATE_S: Final = 2.0  # for etcd to check a password, at least
_OLD_TOKEN: Final = ("invalid auth token", "revision of auth store is old")


class Endpoint(NamedTuple):
    """One etcd server."""

    address: str  # HOST:PORT
    session: requests.Session


class _Adapter(HTTPAdapter):
    """Speaks TLS 1.3 only."""

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Make the pool of connections."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        super().init_poolmanager(*args, ssl_context=context, **options)


class EtcdAccess:
    """Requests to one etcd cluster. Raises `DirectoryError` for options that cannot be used."""

    def __init__(self, url: EtcdURL) -> None:
        self._url = url
        self._options = _completed(url, os.environ)
        self._scheme = "http" if self._options is None else "https"
        self._user = self._options.user if self._options is not None else ""

    def endpoint(self, address: str) -> Endpoint:
        """-> the server at HOST:PORT, with a session of its own."""
        session = requests.Session()
        session.trust_env = False  # no proxy: it could delay the renewal of a lease
        options = self._options
        if options is not None:
            session.mount("https://", _Adapter())
            session.verify = options.ca or True
            session.cert = (options.cert, options.key) if options.cert else None
        return Endpoint(address, session)

    def post(self, endpoint: Endpoint, path: str, body: Any, **options: Any) -> requests.Response:
        """-> the answer of one endpoint. `options`: of `Session.post`. Raises as that does, and `ValueError` if etcd
        refuses user or password."""
        token = self._authenticate(endpoint) if self._user else ""
        response = self._send(endpoint, path, body, token, **options)
        if token and not response.ok and _is_old(response):
            response.close()
            token = self._authenticate(endpoint, old=token)
            response = self._send(endpoint, path, body, token, **options)
        return response

    def _send(self, endpoint: Endpoint, path: str, body: Any, token: str, **options: Any) -> requests.Response:
        headers = {"Authorization": token} if token else None
        url = f"{self._scheme}://{endpoint.address}{_API}{path}"
        return endpoint.session.post(url, json=body, headers=headers, **options)

    def _authenticate(self, endpoint: Endpoint, old: str = "") -> str:
        """-> the user's token, another one than `old`."""
        with _lock:
            token = _tokens.get(self._url, "")
            if token == old:
                token = _tokens[self._url] = self._new_token(endpoint)
            return token

    def _new_token(self, endpoint: Endpoint) -> str:
        body = {"name": self._user, "password": self._password()}
        response = self._send(endpoint, "/auth/authenticate", body, "", timeout=_AUTHENTICATE_S)
        if not response.ok:
            if "CommonName" in response.text:  # its HTTP gateway wants one name only, and that is the user's
                raise ValueError(f"issue the certificate without a Common Name: etcd says {response.text.strip()}")
            raise ValueError(f"etcd refuses the user {self._user!r}: {response.text.strip()}")
        return str(response.json()["token"])

    def _password(self) -> str:
        """-> the password, read anew, because it may have been changed."""
        assert self._options is not None
        file = self._options.password_file
        if not file:
            return os.environ[PASSWORD_VARIABLE]
        try:
            return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the password file {file} cannot be read: {error}") from None


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


_lock = threading.Lock()  # held to make a token
_tokens: dict[EtcdURL, str] = {}

os.register_at_fork(after_in_child=_after_fork_in_child)


def _is_old(response: requests.Response) -> bool:
    return response.status_code == _UNAUTHORIZED or any(text in response.text for text in _OLD_TOKEN)


def _completed(url: EtcdURL, environment: Mapping[str, str]) -> EtcdOptions | None:
    """-> the options of a URL, with those that it leaves out taken from variables; None: without TLS."""
    if url.options is None:
        return None
    given = url.options._asdict()
    options = EtcdOptions(
        **{name: value or environment.get(f"{VARIABLE_PREFIX}{name.upper()}", "") for name, value in given.items()}
    )
    for name in ("ca", "cert", "key", "password_file"):
        file = getattr(options, name)
        if file and not os.access(file, os.R_OK):
            raise DirectoryError(f"{url}: {name}: {file} cannot be read: expected a file that this user can read")
    if bool(options.cert) != bool(options.key):
        raise DirectoryError(f"{url}: cert={options.cert!r} and key={options.key!r}: expected both, or none")
    if options.user and not options.password_file and PASSWORD_VARIABLE not in environment:
        raise DirectoryError(
            f"{url}: no password for the user {options.user!r}: expected it in the variable {PASSWORD_VARIABLE}, or in "
            "a file (?password_file=FILE)"
        )
    return options
