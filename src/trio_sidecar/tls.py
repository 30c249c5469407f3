"""TLS contexts from settings, and what a failed handshake means in words.

Files are read once, when a context is made. TLS 1.2 is the least, and both sides speak HTTP/2 only (ALPN ``h2``).
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from typing import NoReturn

    from trio_sidecar.config import ClientTlsSettings, ServerTlsSettings

__all__ = ["check_client", "client_context", "handshake_fault", "server_context"]

ALPN = "h2"
CIPHERS_FLAG = "--ssl-ciphers"
_NAME_MISMATCH = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH
_UNKNOWN_ISSUER = (18, 19, 20, 21)  # a self-signed certificate, itself or in the chain; no issuer, locally or at all
# The last is what OpenSSL says of a key of another kind, as if there were no certificate yet.
_OTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_FAULTS = {
    "WRONG_VERSION_NUMBER": "the {peer} does not speak TLS",
    "RECORD_LAYER_FAILURE": "the {peer} does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "the {peer} does not speak TLS",
    "HTTP_REQUEST": "the {peer} does not speak TLS",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server demands a client certificate (--grpc-tls-cert)",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client has shown no certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the {peer} refuses our certificate as bad",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the {peer} refuses our certificate as expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the {peer} refuses our certificate as revoked",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the {peer} refuses our certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "the {peer} refuses our certificate as forged",
    "TLSV1_ALERT_UNKNOWN_CA": "the {peer} does not trust the CA of our certificate",
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "the {peer} does not offer HTTP/2 (ALPN h2)",
}
"""OpenSSL's names of faults, in words."""

log = structlog.get_logger("trio_sidecar.tls")


class _NoHttp2(ssl.SSLError):
    """The handshake succeeded, but without ALPN ``h2``."""


class _Side(ssl.SSLObject):
    """Ends TLS without waiting for the peer to end it too, as a peer that is dead or busy would not."""

    def unwrap(self) -> None:
        with suppress(ssl.SSLWantReadError):
            super().unwrap()


class _ClientSide(_Side):
    """Refuses a server that has not chosen HTTP/2, before anything is sent to it."""

    def do_handshake(self) -> None:
        super().do_handshake()
        if self.selected_alpn_protocol() != ALPN:
            raise _NoHttp2


class _ServerSide(_Side):
    """Tells the log about clients whose handshake fails; the event loop keeps silent about them."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.info("tls_handshake_failed", reason=handshake_fault(error, shows_certificate=True, peer="client"))
            raise


def client_context(settings: ClientTlsSettings) -> ssl.SSLContext:
    """The context for connections to an engine.

    Raises:
        InvalidConfig: A file cannot be read, or holds something else than it should; names the flag.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.sslobject_class = _ClientSide
    if settings.ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _load_ca(context, settings.ca, "--grpc-tls-ca")
    if settings.cert is not None:
        _load_chain(context, (settings.cert, "--grpc-tls-cert"), (settings.key, "--grpc-tls-key"))
    return context


def check_client(settings: ClientTlsSettings) -> None:
    """Find out before anything starts whether the files can be used.

    Raises:
        InvalidConfig: They cannot.
    """
    if settings.enabled:
        client_context(settings)


def server_context(settings: ServerTlsSettings) -> ssl.SSLContext | None:
    """The context for a server; None serves in plaintext.

    Raises:
        InvalidConfig: A file cannot be read, or holds something else than it should; names the flag.
    """
    if settings.certfile is None:
        return None
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _ServerSide
    _load_chain(context, (settings.certfile, "--ssl-certfile"), (settings.keyfile, "--ssl-keyfile"))
    if settings.ca_certs is not None:
        _load_ca(context, settings.ca_certs, "--ssl-ca-certs")
    context.verify_mode = ssl.VerifyMode(settings.cert_reqs)
    if settings.ciphers is not None:
        try:
            context.set_ciphers(settings.ciphers)
        except ssl.SSLError as error:
            raise InvalidConfig(CIPHERS_FLAG, f"{settings.ciphers!r} names no cipher that OpenSSL has") from error
    return context


def handshake_fault(error: BaseException | None, *, shows_certificate: bool, peer: str = "server") -> str:
    """Why a handshake failed, in words that say which side has to change what.

    Args:
        error: What the handshake, or the first read after it, raised; None if the other side just closed.
        shows_certificate: Whether we have shown a certificate.
        peer: ``server`` or ``client``, whichever the other side is.
    """
    reason = getattr(error, "reason", None) or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrust(error, peer)
    if isinstance(error, _NoHttp2):
        reason = "TLSV1_ALERT_NO_APPLICATION_PROTOCOL"
    if reason in _FAULTS:
        return _FAULTS[reason].format(peer=peer)
    if isinstance(error, ssl.SSLError) and reason and not isinstance(error, ssl.SSLEOFError):
        return _in_words(reason)
    hint = "it may be a plaintext server" + ("" if shows_certificate else ", or demand a client certificate")
    return f"the {peer} closed the connection; {hint}"


def _distrust(error: ssl.SSLCertVerificationError, peer: str) -> str:
    found = error.verify_message.rstrip(".")
    if error.verify_code in _NAME_MISMATCH:
        return f"the certificate is for another name ({found}); --grpc-tls-server-name is the name to expect"
    advice = (
        "; --grpc-tls-ca names the CAs to trust" if peer == "server" and error.verify_code in _UNKNOWN_ISSUER else ""
    )
    return f"the certificate of the {peer} is not trusted ({found}){advice}"


def _in_words(reason: str) -> str:
    return reason.lower().replace("_", " ")


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([ALPN])
    return context


def _load_ca(context: ssl.SSLContext, path: str, setting: str) -> None:
    _read(path, setting)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise InvalidConfig(setting, f"{path!r} holds no certificates in PEM format") from error


def _load_chain(context: ssl.SSLContext, cert: tuple[str, str], key: tuple[str | None, str]) -> None:
    """Load a certificate and its key, each given with its flag; without a file of its own, the key is in the other."""
    cert_path, cert_setting = cert
    key_path, key_setting = (key[0], key[1]) if key[0] is not None else cert
    if b"-----BEGIN CERTIFICATE-----" not in _read(cert_path, cert_setting):
        raise InvalidConfig(cert_setting, f"{cert_path!r} holds no certificate in PEM format")
    if b"PRIVATE KEY-----" not in _read(key_path, key_setting):
        elsewhere = "" if key[0] is not None else f"; {key[1]} names the file that does"
        raise InvalidConfig(key_setting, f"{key_path!r} holds no private key in PEM format{elsewhere}")

    def refuse_password() -> NoReturn:  # without it, OpenSSL would ask at the terminal
        raise InvalidConfig(key_setting, f"{key_path!r} is encrypted; give a key without a password")

    try:
        context.load_cert_chain(cert_path, key_path, refuse_password)
    except ssl.SSLError as error:
        if error.reason in _OTHER_KEY:
            raise InvalidConfig(key_setting, f"{key_path!r} is not the key of the certificate {cert_path!r}") from error
        raise InvalidConfig(
            cert_setting, f"OpenSSL refuses {cert_path!r} with the key {key_path!r}: {_in_words(error.reason or 'SSL')}"
        ) from error


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(setting, f"{path!r} cannot be read: {error.strerror or error}") from error
