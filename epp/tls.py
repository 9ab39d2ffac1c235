"""TLS of the ext_proc port: a self-signed certificate, or one from a directory, re-read when it changes.

Gateways connect to a picker without verifying its certificate; the self-signed one is there to encrypt, not to prove.
"""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

logger = logging.getLogger(__name__)

VALIDITY = datetime.timedelta(days=3650)

KeyPair = tuple[bytes, bytes]
"""Private key and certificate chain, PEM: as `grpc.ssl_server_credentials` takes them."""


def self_signed() -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "tierpick")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoded_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return encoded_key, certificate.public_bytes(serialization.Encoding.PEM)


def load(directory: Path) -> KeyPair:
    """`tls.key` and `tls.crt`, as Kubernetes mounts a TLS secret.

    Raises:
        OSError: a file cannot be read.
        ValueError: the files are not a key and its certificate.
    """
    key, chain = (directory / "tls.key").read_bytes(), (directory / "tls.crt").read_bytes()
    try:
        public_key = serialization.load_pem_private_key(key, password=None).public_key()
        matching = x509.load_pem_x509_certificates(chain)[0].public_key() == public_key
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key is encrypted
        raise ValueError(f"{directory}: not a key and its certificate: {error}") from error
    if not matching:
        raise ValueError(f"{directory}: not a key and its certificate: tls.crt belongs to another key")
    return key, chain


def credentials(cert_path: str = "", *, reload: bool = False) -> grpc.ServerCredentials:
    """`cert_path` "" = self-signed. With `reload`, connections made after the files have changed see the new ones.

    Raises:
        OSError, ValueError: as `load`.
    """
    if not cert_path:
        return grpc.ssl_server_credentials([self_signed()])
    directory = Path(cert_path)
    pair = load(directory)
    if not reload:
        return grpc.ssl_server_credentials([pair])
    return grpc.dynamic_ssl_server_credentials(
        grpc.ssl_server_certificate_configuration([pair]), Reloader(directory, pair)
    )


class Reloader:
    """Called by gRPC at every handshake: a new configuration if the files have changed and are good, else None."""

    def __init__(self, directory: Path, current: KeyPair) -> None:
        self._directory = directory
        self._current = current

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            pair = load(self._directory)
        except (OSError, ValueError) as error:
            logger.warning("certificate not reloaded, the previous one stays: %s", error)
            return None
        if pair == self._current:
            return None
        self._current = pair
        logger.info("certificate reloaded from %s", self._directory)
        return grpc.ssl_server_certificate_configuration([pair])
