from __future__ import annotations

import asyncio
import ssl

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from epp import tls


def write(directory, pair):
    (directory / "tls.key").write_bytes(pair[0])
    (directory / "tls.crt").write_bytes(pair[1])


@pytest.fixture
def directory(tmp_path):
    write(tmp_path, tls.self_signed())
    return tmp_path


@pytest.fixture
async def handshake():
    """What a client sees of a server with these credentials: certificate (PEM) and protocol, at every call."""
    servers = []

    async def serve(credentials):
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        servers.append(server)

        async def handshake(alpn=("h2",), version=ssl.TLSVersion.TLSv1_3):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.maximum_version = version
            context.set_alpn_protocols(list(alpn))
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            seen = writer.get_extra_info("ssl_object")
            certificate = ssl.DER_cert_to_PEM_cert(seen.getpeercert(binary_form=True))
            writer.transport.abort()
            return certificate, seen.selected_alpn_protocol()

        return handshake

    yield serve
    for server in servers:
        await server.stop(None)


def test_the_self_signed_certificate_is_an_ec_one_of_ours():
    key, chain = tls.self_signed()
    certificate = x509.load_pem_x509_certificate(chain)
    assert certificate.subject.rfc4514_string() == "O=tierpick"
    assert isinstance(serialization.load_pem_private_key(key, None), ec.EllipticCurvePrivateKey)
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc > tls.VALIDITY


async def test_http_2_is_what_is_offered(handshake):
    seen = await handshake(tls.credentials())
    _, protocol = await seen(alpn=("http/1.1", "h2"))
    assert protocol == "h2"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
async def test_nothing_older_than_tls_1_2(handshake):
    seen = await handshake(tls.credentials())
    await seen(version=ssl.TLSVersion.TLSv1_2)
    with pytest.raises(OSError):  # noqa: PT011
        await seen(version=ssl.TLSVersion.TLSv1_1)


async def test_a_directory_is_served(directory, handshake):
    seen = await handshake(tls.credentials(str(directory)))
    certificate, _ = await seen()
    assert certificate == (directory / "tls.crt").read_text()


def test_a_missing_file_is_named(directory):
    (directory / "tls.crt").unlink()
    with pytest.raises(OSError, match=r"tls\.crt"):
        tls.credentials(str(directory))


def encrypted():
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = serialization.BestAvailableEncryption(b"secret")
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


@pytest.mark.parametrize("key", [tls.self_signed()[0], encrypted(), b"no key"], ids=["another", "encrypted", "none"])
def test_a_key_that_does_not_open_the_certificate_is_refused(directory, key):
    (directory / "tls.key").write_bytes(key)
    with pytest.raises(ValueError, match="not a key and its certificate"):
        tls.credentials(str(directory))


@pytest.mark.parametrize("chain", [b"", b"half a certificate"])
def test_what_is_no_certificate_is_refused(directory, chain):
    (directory / "tls.crt").write_bytes(chain)
    with pytest.raises(ValueError, match="not a key and its certificate"):
        tls.credentials(str(directory))


class TestReload:
    async def test_changed_files_are_served(self, directory, handshake):
        seen = await handshake(tls.credentials(str(directory), reload=True))
        first = await seen()
        assert await seen() == first
        write(directory, tls.self_signed())
        second, protocol = await seen()
        assert second == (directory / "tls.crt").read_text() != first[0]
        assert protocol == "h2"
        assert (await seen())[0] == second

    async def test_without_it_they_are_not(self, directory, handshake):
        seen = await handshake(tls.credentials(str(directory)))
        first = await seen()
        write(directory, tls.self_signed())
        assert await seen() == first

    @pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"half a fi"), lambda file: file.unlink()])
    async def test_bad_files_leave_the_previous_certificate(self, directory, handshake, caplog, damage):
        seen = await handshake(tls.credentials(str(directory), reload=True))
        first = await seen()
        damage(directory / "tls.crt")
        assert await seen() == first
        assert "not reloaded" in caplog.text
