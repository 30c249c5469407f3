"""Addresses: gRPC endpoints, HTTP base URLs (spec 1), Unix sockets, and where a server of ours listens.

Both are parsed once, at the edge, into one normal form; nothing below looks at the user's text again. Messages never
repeat user information, paths or queries, because that is where people put secrets.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
from typing import TYPE_CHECKING, NoReturn

import attrs

from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from typing import Self

MAX_PORT = 65535
MAX_UNIX_PATH_BYTES = 107
"""The longest path that Linux takes for a socket."""

UNIX_SCHEME = "unix://"
UNIX_FORM = "a Unix socket is written as unix:///PATH, with the absolute path of the socket"
_DEFAULT_PORTS = {"http": 80, "https": 443}
NEEDS_TLS = "TLS endpoints (https://, grpcs://) need --grpc-tls; without TLS use http://, grpc:// or HOST:PORT"
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_MAX_HOST_CHARS = 253
MAX_SHOWN = 60
"""How much of a wrong text a message repeats, in characters."""


@attrs.frozen(slots=True, kw_only=True)
class GrpcEndpoint:
    """A gRPC server on TCP (spec 1.1); ``str()`` is the normalised text, ``http://HOST[:PORT]``, ``https`` with TLS.

    Attributes:
        host: Name or address, without brackets, in lower case.
        port: 1 to 65535; the scheme's own where the text names none (R1.4).
        tls: Whether the connection is encrypted.
    """

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str, argument: str = "--grpc-endpoint", *, allow_tls: bool = False) -> Self:
        """Read ``host:port``, ``http://host:port`` or ``grpc://host:port``.

        Args:
            text: What the user wrote; surrounding spaces are ignored.
            argument: The flag or variable to name in messages (R1.1).
            allow_tls: Whether ``https://`` and ``grpcs://`` are read too.

        Raises:
            InvalidConfig: Anything else, also user information, paths, and IPv6 zones (FR-107).
        """
        trimmed = text.strip()
        if not trimmed:
            raise InvalidConfig(argument, "is required and must be a gRPC server address such as HOST:PORT")
        rest, tls = _without_grpc_scheme(trimmed, argument)
        if tls and not allow_tls:
            raise InvalidConfig(argument, NEEDS_TLS)
        authority, tail = _split_authority(rest)
        if "@" in authority:
            raise InvalidConfig(argument, "must not include user information")
        if authority == "unix:":
            raise InvalidConfig(argument, UNIX_FORM)
        if tail not in ("", "/"):
            shown = f"{trimmed.removesuffix(tail)}…"  # what follows the authority may be a secret
            reason = f"{shown!r} must contain only a plaintext scheme and authority: no path, query or fragment"
            raise InvalidConfig(argument, reason)
        host, port = _host_and_port(authority, argument)
        return cls(host=host, port=_DEFAULT_PORTS["https" if tls else "http"] if port is None else port, tls=tls)

    @property
    def scheme(self) -> str:
        """The scheme of URLs."""
        return "https" if self.tls else "http"

    @property
    def authority(self) -> str:
        """The ``:authority`` of requests: an IPv6 host in brackets, the default port left out."""
        return _join_authority(self.host, self.port, self.scheme)

    @property
    def label(self) -> str:
        """The name for messages and logs."""
        return self.authority

    @property
    def stays_here(self) -> bool:
        """Whether what is sent there cannot leave this machine; a name other than localhost may mean anything."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.removesuffix(".") == "localhost"

    def http(self, port: int, path: str = "/", *, argument: str = "port") -> HttpEndpoint:
        """The HTTP endpoint on the same host, at another port (R1.6 to R1.8).

        Raises:
            InvalidConfig: The port is out of range.
        """
        return HttpEndpoint(scheme=self.scheme, host=self.host, port=check_port(port, argument), path=path)

    def __str__(self) -> str:
        """The normalised text (R1.3)."""
        return f"{self.scheme}://{self.authority}"


@attrs.frozen(slots=True)
class UnixAddress:
    """A Unix socket, to connect to or to listen on; ``str()`` is ``unix:///PATH``.

    Attributes:
        path: Absolute.
    """

    path: str

    @classmethod
    def parse(cls, text: str, argument: str) -> Self:
        """Read ``unix:///PATH``.

        Raises:
            InvalidConfig: The path is not absolute, or longer than a socket's may be.
        """
        path = text.strip().removeprefix(UNIX_SCHEME)
        if not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise InvalidConfig(argument, UNIX_FORM)
        if (size := len(os.fsencode(path))) > MAX_UNIX_PATH_BYTES:
            raise InvalidConfig(
                argument, f"the path of the Unix socket has {size} bytes; at most {MAX_UNIX_PATH_BYTES} are allowed"
            )
        return cls(path)

    @property
    def authority(self) -> str:
        """The ``:authority`` of requests, as gRPC's own libraries have it."""
        return "localhost"

    @property
    def label(self) -> str:
        """The name for messages and logs."""
        return str(self)

    @property
    def stays_here(self) -> bool:
        """Whether what is sent there cannot leave this machine."""
        return True

    def __str__(self) -> str:
        """The text that :meth:`parse` reads."""
        return f"{UNIX_SCHEME}{self.path}"


@attrs.frozen(slots=True, kw_only=True)
class HttpEndpoint:
    """An HTTP base URL (spec 1.2); ``str()`` is the normalised URL.

    Attributes:
        scheme: ``http`` or ``https``.
        host: Name or address, without brackets, in lower case.
        port: 1 to 65535; the scheme's own where the text names none.
        path: Begins with a slash; a prefix for every request.
    """

    scheme: str
    host: str
    port: int
    path: str = "/"

    @classmethod
    def parse(cls, text: str, argument: str = "--vllm-http-endpoint") -> Self:
        """Read an absolute ``http`` or ``https`` URL.

        Args:
            text: What the user wrote; surrounding spaces are ignored.
            argument: The flag or variable to name in messages.

        Raises:
            InvalidConfig: Another scheme, no host, user information, a query or a fragment.
        """
        trimmed = text.strip()
        if not trimmed:
            raise InvalidConfig(argument, "is required and must be an HTTP server address such as http://HOST:PORT")
        scheme, separator, rest = trimmed.partition("://")
        scheme = scheme.lower()
        if not separator or scheme not in _DEFAULT_PORTS:
            raise InvalidConfig(argument, "must be an absolute URL that begins with http:// or https://")
        authority, tail = _split_authority(rest)
        if "@" in authority:
            raise InvalidConfig(argument, "must not include user information")
        if "?" in tail or "#" in tail:
            raise InvalidConfig(argument, "must not include a query or a fragment")
        if re.search(r"[\s\\\x00-\x1f\x7f]", tail):
            raise InvalidConfig(argument, "the path must not contain spaces, backslashes or control characters")
        host, port = _host_and_port(authority, argument)
        return cls(scheme=scheme, host=host, port=_DEFAULT_PORTS[scheme] if port is None else port, path=tail or "/")

    @property
    def authority(self) -> str:
        """Host and port, an IPv6 host in brackets, the scheme's own port left out."""
        return _join_authority(self.host, self.port, self.scheme)

    def __str__(self) -> str:
        """The normalised URL."""
        return f"{self.scheme}://{self.authority}{self.path}"


@attrs.frozen(slots=True, kw_only=True)
class ListenAddress:
    """Where a server of ours listens; ``str()`` is ``HOST:PORT``.

    Attributes:
        host: Name or address, without brackets.
        port: 0 to 65535; 0 lets the system choose.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, argument: str = "--listen") -> Self:
        """Read ``HOST:PORT``; unlike an endpoint it may name port 0, and must name one.

        Raises:
            InvalidConfig: No host, no port, or either is malformed.
        """
        trimmed = text.strip()
        host, port = _host_and_port(trimmed, argument, lowest=0)
        if port is None:
            raise InvalidConfig(
                argument, f"{trimmed!r} names no port; write HOST:PORT, port 0 to let the system choose"
            )
        return cls(host=host, port=port)

    def __str__(self) -> str:
        """The text that :meth:`parse` reads."""
        return f"{_bracketed(self.host)}:{self.port}"


def parse_engine_endpoint(text: str, argument: str = "--grpc-endpoint") -> GrpcEndpoint | UnixAddress:
    """Read any address that a client of ours connects to: what :meth:`GrpcEndpoint.parse` reads, with TLS, or a socket.

    Raises:
        InvalidConfig: Anything else.
    """
    if text.strip().startswith(UNIX_SCHEME):
        return UnixAddress.parse(text, argument)
    return GrpcEndpoint.parse(text, argument, allow_tls=True)


def parse_listen_address(text: str, argument: str = "--listen") -> ListenAddress | UnixAddress:
    """Read any address that a server of ours listens on.

    Raises:
        InvalidConfig: Anything else than ``HOST:PORT`` and ``unix:///PATH``.
    """
    if text.strip().startswith(UNIX_SCHEME):
        return UnixAddress.parse(text, argument)
    return ListenAddress.parse(text, argument)


def cannot_listen(error: OSError, address: object) -> InvalidConfig:
    """The error for an HTTP address that cannot be had, under the flag that has to change, the port's or the host's."""
    if error.errno == errno.EADDRINUSE:
        return InvalidConfig("--http-port", f"{address} is in use by another socket; choose another port")
    if error.errno == errno.EADDRNOTAVAIL:
        return InvalidConfig("--http-host", f"{address} is not an address of this machine")
    setting = "--http-port" if error.errno == errno.EACCES else "--http-host"
    return InvalidConfig(setting, f"cannot listen on {address}: {error.strerror or error}")


def check_port(port: int, argument: str, *, lowest: int = 1) -> int:
    """The port itself, if it is one.

    Raises:
        InvalidConfig: It is outside ``lowest`` to 65535 (R1.8).
    """
    if not lowest <= port <= MAX_PORT:
        raise InvalidConfig(argument, f"port {port} is not allowed; ports are {lowest} to {MAX_PORT}")
    return port


def _without_grpc_scheme(text: str, argument: str) -> tuple[str, bool]:
    """What follows the scheme, and whether that means TLS; scheme tests are literal lower-case prefixes (R1.5)."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text, False
    if scheme in ("http", "grpc", "https", "grpcs"):
        return rest, scheme.endswith("s")
    # Where the "scheme" is no word, the text may be anything, a secret included, so it is not repeated.
    shown = f" {scheme}://" if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,31}", scheme) else ""
    raise InvalidConfig(argument, f"unsupported endpoint scheme{shown}; use http://, grpc:// or HOST:PORT")


def _split_authority(rest: str) -> tuple[str, str]:
    """Authority, and whatever follows it with its delimiter."""
    end = re.search(r"[/?#\\]", rest)
    return (rest[: end.start()], rest[end.start() :]) if end else (rest, "")


def _host_and_port(authority: str, argument: str, *, lowest: int = 1) -> tuple[str, int | None]:
    if authority.startswith("["):
        inside, bracket, after = authority[1:].partition("]")
        if not bracket or (after and not after.startswith(":")):
            _refuse(argument, authority, "write an IPv6 address as [ADDRESS]:PORT")
        return _ipv6(inside, argument), _port(after, f"[{inside}]", argument, lowest)
    if authority.count(":") > 1:
        _refuse(argument, authority, "write an IPv6 address in brackets, [ADDRESS]:PORT")
    host, colon, port = authority.partition(":")
    if not host:
        raise InvalidConfig(argument, f"{authority!r} names no host; write HOST:PORT")
    return _name_or_ipv4(host, argument), _port(colon + port, host, argument, lowest)


def _port(text: str, host: str, argument: str, lowest: int) -> int | None:
    if not text:
        return None
    digits = text[1:]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_PORT))):
        shown = digits if len(digits) <= MAX_SHOWN else f"{digits[:MAX_SHOWN]}…"
        raise InvalidConfig(argument, f"port {shown!r} of {host!r} is not a number from {lowest} to {MAX_PORT}")
    return check_port(int(digits), argument, lowest=lowest)


def _ipv6(text: str, argument: str) -> str:
    if "%" in text:
        _refuse(argument, text, "IPv6 zone ids are not supported; use an address that is valid without one")
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        _refuse(argument, text, "not an IPv6 address")
    # Spelled out, because Python versions disagree on how they print mapped addresses.
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else address.compressed


def _name_or_ipv4(text: str, argument: str) -> str:
    if text.isascii():
        host = text.lower()
    else:
        try:
            host = text.encode("idna").decode("ascii").lower()
        except UnicodeError:
            _refuse(argument, text, "not a host name")
    labels = host.removesuffix(".").split(".")
    if len(host) > _MAX_HOST_CHARS or not all(_LABEL.fullmatch(label) for label in labels):
        _refuse(argument, text, "not a host name")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        # A name cannot end in a number, and short or octal forms of IPv4 mean different things to different resolvers.
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            _refuse(argument, text, "not an IPv4 address in dotted decimal form")
    return host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _join_authority(host: str, port: int, scheme: str) -> str:
    return _bracketed(host) if port == _DEFAULT_PORTS[scheme] else f"{_bracketed(host)}:{port}"


def _refuse(argument: str, text: str, reason: str) -> NoReturn:
    raise InvalidConfig(argument, f"{text!r}: {reason}")
