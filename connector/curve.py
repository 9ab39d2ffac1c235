"""ZMQ CURVE on the engine's side: what the engine proves itself by, and which pickers it lets in.

The engine is the CURVE server on both of its sockets. Key files are those of `zmq.auth.create_certificates`: `NAME.key`
has the public half, `NAME.key_secret` both.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import zmq
from zmq.auth import load_certificate, load_certificates
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

logger = logging.getLogger(__name__)

KEY_BYTES = 32
DOMAIN = "tierpick"
STOP_PATIENCE_MS = 1000


@dataclass(frozen=True, slots=True)
class Curve:
    """Keys in Z85."""

    public_key: bytes
    secret_key: bytes
    client_keys_dir: str = ""
    """Where the `*.key` files of those who may connect are; "" = whoever knows `public_key` may."""

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """To a socket that is neither connected nor bound yet."""
        socket.curve_server = True
        socket.curve_publickey = self.public_key
        socket.curve_secretkey = self.secret_key
        if self.client_keys_dir:  # without an answer of the doorkeeper nobody gets in
            socket.zap_domain = DOMAIN.encode()
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Doorkeeper:
    """Says which clients may connect to the sockets of a context, from a thread of its own, until closed. Asks the
    directory each time, so that keys come and go without a restart."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_keys_dir: str) -> None:
        self._client_keys_dir = client_keys_dir
        self._readable = True
        self._authenticator = ThreadAuthenticator(context, log=logger)
        self._authenticator.configure_curve_callback(DOMAIN, self)
        self._authenticator.start()
        self._authenticator.pipe.sndtimeo = STOP_PATIENCE_MS

    def callback(self, domain: str, key: bytes) -> bool:
        """What the authenticator asks of every client that has proven to have `key`."""
        try:
            known = load_certificates(self._client_keys_dir)
        except (OSError, ValueError) as error:
            if self._readable:
                logger.warning("nobody can be let in: %s", error)
            self._readable = False
            return False
        self._readable = True
        return key in known

    def close(self) -> None:
        try:
            self._authenticator.stop()
        except zmq.ZMQError as error:
            logger.warning("the authenticator does not stop: %s", error)


def load_curve(secret_key_file: str, client_keys_dir: str = "") -> Curve | None:
    """None without files.

    Raises:
        ValueError: a file is not what it should be, or missing; names it, and nothing that is in it.
    """
    if not secret_key_file:
        if client_keys_dir:
            raise ValueError(f"{client_keys_dir}: clients have keys, but the engine has none: name its secret key file")
        return None
    if not zmq.has("curve"):
        raise ValueError(f"{secret_key_file}: this libzmq was built without CURVE")
    public_key, secret_key = _read(secret_key_file)
    if client_keys_dir:
        _check_clients(client_keys_dir)
    return Curve(public_key, secret_key, client_keys_dir)


def _read(path: str) -> tuple[bytes, bytes]:
    try:
        public_key, secret_key = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a CURVE key file: {error}") from error
    if secret_key is None:
        raise ValueError(f"{path}: there is no secret key in it")
    if not (_is_key(public_key) and _is_key(secret_key)):
        raise ValueError(f"{path}: not a CURVE key file: a key is 40 characters of Z85")
    if zmq.curve_public(secret_key) != public_key:
        raise ValueError(f"{path}: its two keys do not belong together")
    return public_key, secret_key


def _check_clients(directory: str) -> None:
    try:
        keys = load_certificates(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory}: not a directory of CURVE key files: {error}") from error
    if not keys:
        raise ValueError(f"{directory}: there is no *.key file in it, so nobody could connect")
    for key in keys:
        if not _is_key(key):
            raise ValueError(f"{directory}: one of its *.key files holds no key: a key is 40 characters of Z85")


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (KeyError, ValueError):
        return False
