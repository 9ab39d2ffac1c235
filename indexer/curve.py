"""ZMQ CURVE on the picker's side: whom it takes for an engine, and who it says it is.

An engine is the CURVE server and the picker its client, whichever of them connects: so the picker always knows whom it
hears. Key files are those of `zmq.auth.create_certificates`: `NAME.key` has the public half, `NAME.key_secret` both.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Curve:
    """Keys in Z85."""

    server_key: bytes
    """The public key of all engines."""
    public_key: bytes
    secret_key: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """To a socket that is neither connected nor bound yet."""
        socket.curve_serverkey = self.server_key
        socket.curve_publickey = self.public_key
        socket.curve_secretkey = self.secret_key


def load_curve(server_key_file: str, secret_key_file: str = "") -> Curve:
    """Without `secret_key_file` the picker makes a key for itself, which no engine has been told.

    Raises:
        ValueError: a file is not what it should be; names the file, and nothing that is in it.
    """
    if not zmq.has("curve"):
        raise ValueError(f"{server_key_file}: this libzmq was built without CURVE")
    server_key, _ = _read(server_key_file)
    if not secret_key_file:
        return Curve(server_key, *zmq.curve_keypair())
    public_key, secret_key = _read(secret_key_file)
    if secret_key is None:
        raise ValueError(f"{secret_key_file}: there is no secret key in it")
    if zmq.curve_public(secret_key) != public_key:
        raise ValueError(f"{secret_key_file}: its two keys do not belong together")
    return Curve(server_key, public_key, secret_key)


def _read(path: str) -> tuple[bytes, bytes | None]:
    """Public and, where there is one, secret key."""
    try:
        public_key, secret_key = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a CURVE key file: {error}") from error
    if not all(map(_is_key, filter(None, (public_key, secret_key)))):
        raise ValueError(f"{path}: not a CURVE key file: a key is 40 characters of Z85")
    return public_key, secret_key


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (KeyError, ValueError):
        return False
