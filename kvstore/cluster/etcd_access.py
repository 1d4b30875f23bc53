"""How a directory connects to etcd: either without TLS, or with TLS, a client certificate and a user's token.

For `etcds://`, the files and the user come from the URL, or from environment variables if the URL has none. A password
comes only from a file or a variable, so that no list of processes shows it. It is sent only over TLS. A token lasts for
some minutes. When etcd no longer accepts the token, the request is repeated with a new one. A process has one token per
user of a cluster, because etcd deliberately takes a tenth of a second to check a password. Thread-safe.
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
_API: Final = "/v3"  # the API of etcd 3.4 and later
_UNAUTHORIZED: Final = 401
_AUTHENTICATE_S: Final = 2.0  # etcd has at least this long to check a password
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
        """Return the server at HOST:PORT, with a new session."""
        session = requests.Session()
        session.trust_env = False  # use no proxy, because it could delay the renewal of a lease
        options = self._options
        if options is not None:
            session.mount("https://", _Adapter())
            session.verify = options.ca or True
            session.cert = (options.cert, options.key) if options.cert else None
        return Endpoint(address, session)

    def post(self, endpoint: Endpoint, path: str, body: Any, **options: Any) -> requests.Response:
        """Return the answer of one endpoint.
        `options`: the options of `Session.post`.
        Raises the errors of `Session.post`, and `ValueError` if etcd refuses the user or the password."""
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
        """Return a token of the user other than `old`."""
        with _lock:
            token = _tokens.get(self._url, "")
            if token == old:
                token = _tokens[self._url] = self._new_token(endpoint)
            return token

    def _new_token(self, endpoint: Endpoint) -> str:
        body = {"name": self._user, "password": self._password()}
        response = self._send(endpoint, "/auth/authenticate", body, "", timeout=_AUTHENTICATE_S)
        if not response.ok:
            if "CommonName" in response.text:  # etcd's HTTP gateway accepts one name: the user's or the certificate's
                raise ValueError(f"issue the certificate without a Common Name: etcd answers {response.text.strip()!r}")
            raise ValueError(f"etcd refuses the user {self._user!r}: {response.text.strip()}")
        return str(response.json()["token"])

    def _password(self) -> str:
        """Return the password. It is read for each call, because it may have changed."""
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


_lock = threading.Lock()  # held while a token is requested
_tokens: dict[EtcdURL, str] = {}

os.register_at_fork(after_in_child=_after_fork_in_child)


def _is_old(response: requests.Response) -> bool:
    return response.status_code == _UNAUTHORIZED or any(text in response.text for text in _OLD_TOKEN)


def _completed(url: EtcdURL, environment: Mapping[str, str]) -> EtcdOptions | None:
    """Return the options of a URL. Options that the URL leaves out are taken from environment variables. Return
    None without TLS."""
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
        raise DirectoryError(f"{url}: cert={options.cert!r} and key={options.key!r}: expected both or neither")
    if options.user and not options.password_file and PASSWORD_VARIABLE not in environment:
        raise DirectoryError(
            f"{url}: no password for the user {options.user!r}: expected it in the environment variable "
            f"{PASSWORD_VARIABLE}, or in a file (?password_file=FILE)"
        )
    return options
