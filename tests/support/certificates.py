"""Certificates that live as long as a test run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trustme

from trio_sidecar.config import ClientTlsSettings, ServerTlsSettings

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("localhost", "127.0.0.1")


@attrs.frozen(slots=True)
class Certificates:
    """Two CAs that do not know each other, and what the first has signed.

    Attributes:
        ca: The first CA's certificate.
        other_ca: The second's.
        server: Certificate and key of a server on this machine, in one file.
        server_key: The key alone.
        elsewhere: The same for another name.
        client: A client's certificate and key.
        stranger: A client's, signed by the second CA.
    """

    ca: str
    other_ca: str
    server: str
    server_key: str
    elsewhere: str
    client: str
    stranger: str

    def serving(self, **changes: object) -> ServerTlsSettings:
        """Settings of a server on this machine."""
        return ServerTlsSettings(certfile=self.server, **changes)  # type: ignore[arg-type]

    def mutual(self) -> ServerTlsSettings:
        """Settings of a server that demands a client certificate."""
        return self.serving(ca_certs=self.ca, cert_reqs=2)

    def trusting(self, **changes: object) -> ClientTlsSettings:
        """Settings of a client that trusts that server."""
        return ClientTlsSettings(**{"enabled": True, "ca": self.ca, **changes})  # type: ignore[arg-type]


def make_certificates(directory: Path) -> Certificates:
    """Make all of them, as PEM files."""
    ca, other = trustme.CA(), trustme.CA()

    def write(name: str, pem: bytes) -> str:
        path = directory / f"{name}.pem"
        path.write_bytes(pem)
        return str(path)

    server = ca.issue_cert(*NAMES)
    return Certificates(
        ca=write("ca", ca.cert_pem.bytes()),
        other_ca=write("other-ca", other.cert_pem.bytes()),
        server=write("server", server.private_key_and_cert_chain_pem.bytes()),
        server_key=write("server-key", server.private_key_pem.bytes()),
        elsewhere=write("elsewhere", ca.issue_cert("elsewhere.example").private_key_and_cert_chain_pem.bytes()),
        client=write("client", ca.issue_cert("client.example").private_key_and_cert_chain_pem.bytes()),
        stranger=write("stranger", other.issue_cert("stranger.example").private_key_and_cert_chain_pem.bytes()),
    )
