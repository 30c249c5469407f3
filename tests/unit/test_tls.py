"""TLS settings and contexts: what is refused, and in which words."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from trio_sidecar.config import ClientTlsSettings, ServerTlsSettings, TransportSettings, resolve
from trio_sidecar.endpoint import GrpcEndpoint, UnixAddress
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.tls import check_client, client_context, handshake_fault, server_context

if TYPE_CHECKING:
    from pathlib import Path

    from support.certificates import Certificates


def refusal(settings: ClientTlsSettings | ServerTlsSettings) -> str:
    def check() -> None:
        if isinstance(settings, ClientTlsSettings):
            check_client(settings)
        else:
            server_context(settings)

    with pytest.raises(InvalidConfig) as caught:
        check()
    return str(caught.value)


def test_contexts(certificates: Certificates) -> None:
    """Both sides want TLS 1.2 at least; the client checks names, the server what it is told to."""
    client, server = client_context(certificates.trusting()), server_context(certificates.mutual())
    assert server is not None
    assert [ssl.TLSVersion.TLSv1_2] * 2 == [client.minimum_version, server.minimum_version]
    assert (True, ssl.CERT_REQUIRED) == (client.check_hostname, client.verify_mode)
    assert ssl.CERT_REQUIRED is server.verify_mode
    optional = server_context(certificates.serving(ca_certs=certificates.ca, cert_reqs=1, ciphers="ECDHE+AESGCM"))
    assert optional is not None
    assert ssl.CERT_OPTIONAL is optional.verify_mode
    assert server_context(ServerTlsSettings()) is None
    check_client(ClientTlsSettings())


def test_files_that_cannot_be_used(certificates: Certificates, tmp_path: Path) -> None:
    """Each message names the flag, the file, and what is wrong with it."""
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    certificate_only = certificates.ca
    assert f"--grpc-tls-ca: '{text}' holds no certificates in PEM format" == refusal(
        ClientTlsSettings(enabled=True, ca=str(text))
    )
    assert f"--grpc-tls-cert: '{tmp_path}' cannot be read: Is a directory" == refusal(
        certificates.trusting(cert=str(tmp_path))
    )
    assert f"--ssl-certfile: '{text}' holds no certificate in PEM format" == refusal(
        ServerTlsSettings(certfile=str(text))
    )
    assert "holds no private key in PEM format; --ssl-keyfile names the file that does" in refusal(
        ServerTlsSettings(certfile=certificate_only)
    )
    assert f"--ssl-keyfile: '{text}' holds no private key in PEM format" == refusal(
        certificates.serving(keyfile=str(text))
    )
    assert "--ssl-ciphers: 'NONSENSE' names no cipher that OpenSSL has" == refusal(
        certificates.serving(ciphers="NONSENSE")
    )


def test_a_key_of_another_certificate(certificates: Certificates, tmp_path: Path) -> None:
    """A mismatch is told from a key that cannot be read, whatever the kinds of key."""
    for kind in trustme.KeyType:
        other = tmp_path / f"{kind.name}.pem"
        other.write_bytes(trustme.CA().issue_cert("x.example", key_type=kind).private_key_pem.bytes())
        assert f"--ssl-keyfile: '{other}' is not the key of the certificate '{certificates.server}'" == refusal(
            certificates.serving(keyfile=str(other))
        )


def test_an_encrypted_key(certificates: Certificates, tmp_path: Path) -> None:
    """A key with a password is refused instead of asking at the terminal."""
    with open(certificates.server_key, "rb") as file:  # noqa: PTH123 - the fixture holds texts
        key = load_pem_private_key(file.read(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    assert f"--ssl-keyfile: '{locked}' is encrypted; give a key without a password" == refusal(
        certificates.serving(keyfile=str(locked))
    )


@pytest.mark.parametrize(
    ("settings", "flags", "words"),
    [
        (ClientTlsSettings, {"--grpc-tls-ca": "x"}, "--grpc-tls-ca: has no effect without --grpc-tls"),
        (ClientTlsSettings, {"--grpc-tls-server-name": "x"}, "--grpc-tls-server-name: has no effect"),
        (ClientTlsSettings, {"--grpc-tls": True, "--grpc-tls-key": "x"}, "without --grpc-tls-cert"),
        (ServerTlsSettings, {"--ssl-keyfile": "x"}, "--ssl-keyfile: has no effect without --ssl-certfile"),
        (ServerTlsSettings, {"--ssl-cert-reqs": "2"}, "--ssl-cert-reqs: has no effect without --ssl-certfile"),
        (ServerTlsSettings, {"--ssl-certfile": "x", "--ssl-cert-reqs": "2"}, "2 needs --ssl-ca-certs"),
        (ServerTlsSettings, {"--ssl-certfile": "x", "--ssl-ca-certs": "y"}, "--ssl-ca-certs: has no effect"),
        (ServerTlsSettings, {"--ssl-cert-reqs": "3"}, "3 is not allowed; use a whole number from 0 to 2"),
    ],
)
def test_settings_that_would_have_no_effect(settings: type, flags: dict[str, Any], words: str) -> None:
    """Whoever asks for protection gets it, or an error."""
    with pytest.raises(InvalidConfig) as caught:
        resolve(settings, flags=flags, environ={})
    assert words in str(caught.value)


def test_the_flag_decides_about_tls() -> None:
    """A TLS scheme needs the flag; with the flag every scheme means TLS, and https:// has its own default port."""

    def endpoint(text: str, **environ: str) -> GrpcEndpoint | UnixAddress:
        return resolve(TransportSettings, flags={"--grpc-endpoint": text}, environ=environ).grpc_endpoint

    for scheme in ("https", "grpcs"):
        with pytest.raises(InvalidConfig, match=r"--grpc-endpoint: TLS endpoints .* need --grpc-tls"):
            endpoint(f"{scheme}://engine:1")
    tls = {"TRIO_SIDECAR_GRPC_TLS": "true"}
    for scheme in ("https://", "grpcs://", "http://", "grpc://", ""):
        assert "https://engine:1" == str(endpoint(f"{scheme}engine:1", **tls))
    assert GrpcEndpoint(host="engine", port=443, tls=True) == endpoint("https://engine", **tls)
    assert UnixAddress("/run/s") == endpoint("unix:///run/s", **tls) == endpoint("unix:///run/s")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "the server demands a client certificate (--grpc-tls-cert)"),
        ("TLSV1_ALERT_UNKNOWN_CA", "the server does not trust the CA of our certificate"),
        ("WRONG_VERSION_NUMBER", "the server does not speak TLS"),
        ("TLSV1_ALERT_NO_APPLICATION_PROTOCOL", "the server does not offer HTTP/2 (ALPN h2)"),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "tlsv1 alert protocol version"),
    ],
)
def test_alerts_in_words(reason: str, words: str) -> None:
    """What OpenSSL calls a fault is said in words; a name that we have no words for is passed on."""
    error = ssl.SSLError(1, reason)
    error.reason = reason
    assert words == handshake_fault(error, shows_certificate=True)
