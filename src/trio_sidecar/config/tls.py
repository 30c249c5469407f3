"""Settings of TLS: the server's have vLLM's names, the client's are our own, since the Rust sidecar has no TLS."""

from __future__ import annotations

import attrs

from trio_sidecar.config.fields import Option, check_range, none_if_empty, parse_bool, parse_text, setting, whole_number
from trio_sidecar.errors import InvalidConfig

__all__ = ["ClientTlsSettings", "ServerTlsSettings"]

KEY_FLAG = "--grpc-tls-key"
CA_CERTS_FLAG = "--ssl-ca-certs"
CERT_REQS_FLAG = "--ssl-cert-reqs"
MAX_CERT_REQS = 2


def _optional(flag: str, env: str, text: str, metavar: str = "PATH") -> str | None:
    option = Option(flag=flag, env=env, parse=parse_text, help=text, metavar=metavar, empty_is_unset=True)
    return setting(option, default=None, converter=none_if_empty)  # type: ignore[no-any-return]


def _check_cert_reqs(value: int, source: str) -> None:
    check_range(value, source, 0, MAX_CERT_REQS)


@attrs.frozen(slots=True, kw_only=True)
class ClientTlsSettings:
    """TLS to the engine; nothing of it without ``enabled``.

    Attributes:
        enabled: Whether connections are encrypted.
        ca: Whom to trust; None trusts what the system trusts.
        cert: What we show to a server that asks; None shows nothing.
        key: Of ``cert``; None if it is in the same file.
        server_name: The name that the certificate must have; None is the endpoint's host.
    """

    enabled: bool = setting(
        Option(
            flag="--grpc-tls",
            env="TRIO_SIDECAR_GRPC_TLS",
            parse=parse_bool,
            choices=("true", "false"),
            switch=True,
            help="Connect to the engine with TLS.",
        ),
        default=False,
    )
    ca: str | None = _optional(
        "--grpc-tls-ca",
        "TRIO_SIDECAR_GRPC_TLS_CA",
        "PEM file of the CAs to trust; the system's own unless given.",
    )
    cert: str | None = _optional(
        "--grpc-tls-cert", "TRIO_SIDECAR_GRPC_TLS_CERT", "PEM file of our certificate, for mutual TLS."
    )
    key: str | None = _optional(
        KEY_FLAG, "TRIO_SIDECAR_GRPC_TLS_KEY", "PEM file of its private key; --grpc-tls-cert unless given."
    )
    server_name: str | None = _optional(
        "--grpc-tls-server-name",
        "TRIO_SIDECAR_GRPC_TLS_SERVER_NAME",
        "Name that the engine's certificate must have; the endpoint's host unless given.",
        "NAME",
    )

    def __attrs_post_init__(self) -> None:
        """Refuse what would have no effect, since it was meant to have one."""
        for value, flag in (
            (self.ca, "--grpc-tls-ca"),
            (self.cert, "--grpc-tls-cert"),
            (self.key, KEY_FLAG),
            (self.server_name, "--grpc-tls-server-name"),
        ):
            if value is not None and not self.enabled:
                raise InvalidConfig(flag, "has no effect without --grpc-tls")
        if self.key is not None and self.cert is None:
            raise InvalidConfig(KEY_FLAG, "has no effect without --grpc-tls-cert")


@attrs.frozen(slots=True, kw_only=True)
class ServerTlsSettings:
    """TLS of the server; nothing of it without a certificate.

    Attributes:
        certfile: The certificate and its chain; None serves in plaintext.
        keyfile: Of ``certfile``; None if it is in the same file.
        ca_certs: Whose client certificates are accepted.
        cert_reqs: 0 asks clients for no certificate, 1 checks one that is shown, 2 demands one.
        ciphers: For TLS 1.2, in OpenSSL's notation; None is Python's choice.
    """

    certfile: str | None = _optional(
        "--ssl-certfile", "TRIO_SIDECAR_SSL_CERTFILE", "PEM file of the server's certificate; serves with TLS."
    )
    keyfile: str | None = _optional(
        "--ssl-keyfile", "TRIO_SIDECAR_SSL_KEYFILE", "PEM file of its private key; --ssl-certfile unless given."
    )
    ca_certs: str | None = _optional(
        CA_CERTS_FLAG, "TRIO_SIDECAR_SSL_CA_CERTS", "PEM file of the CAs that client certificates must come from."
    )
    cert_reqs: int = setting(
        Option(
            flag=CERT_REQS_FLAG,
            env="TRIO_SIDECAR_SSL_CERT_REQS",
            parse=whole_number(0, MAX_CERT_REQS),
            metavar="{0,1,2}",
            help="Client certificates: 0 not asked for, 1 checked if shown, 2 demanded (mutual TLS).",
        ),
        default=0,
        check=_check_cert_reqs,
    )
    ciphers: str | None = _optional(
        "--ssl-ciphers", "TRIO_SIDECAR_SSL_CIPHERS", "Ciphers of TLS 1.2, in OpenSSL's notation.", "LIST"
    )

    def __attrs_post_init__(self) -> None:
        """Refuse what would have no effect, since it was meant to have one."""
        for value, flag in (
            (self.keyfile, "--ssl-keyfile"),
            (self.ca_certs, CA_CERTS_FLAG),
            (self.cert_reqs, CERT_REQS_FLAG),
            (self.ciphers, "--ssl-ciphers"),
        ):
            if value and self.certfile is None:
                raise InvalidConfig(flag, "has no effect without --ssl-certfile")
        if self.cert_reqs and self.ca_certs is None:
            raise InvalidConfig(CERT_REQS_FLAG, f"{self.cert_reqs} needs --ssl-ca-certs, to know whom to trust")
        if self.ca_certs is not None and not self.cert_reqs:
            raise InvalidConfig(
                CA_CERTS_FLAG, "has no effect with --ssl-cert-reqs 0; use 2 to demand a client certificate, or 1"
            )
