"""Listening sockets for an address (Trio-flavoured)."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, NoReturn

import attrs
import structlog
import trio

from trio_sidecar.endpoint import ListenAddress, UnixAddress
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.server.unixsocket import SocketFile, bind_unix
from trio_sidecar.tls import server_context

if TYPE_CHECKING:
    from trio_sidecar.config import ServerSettings

__all__ = ["Bound", "bind", "check_free"]

SETTING = "--listen"

log = structlog.get_logger("trio_sidecar.server")


@attrs.frozen(slots=True)
class Bound:
    """Listening sockets.

    Attributes:
        sockets: On a Unix socket it is one, on a host one for each of its addresses.
        files: Of Unix sockets.
        addresses: Where they listen, port 0 resolved.
    """

    sockets: tuple[socket.socket, ...]
    addresses: tuple[ListenAddress | UnixAddress, ...]
    files: tuple[SocketFile, ...] = ()

    def close(self) -> None:
        """Close the sockets and remove the files."""
        for sock in self.sockets:
            sock.close()
        self.remove_files()

    def remove_files(self) -> None:
        """Remove the files, after whoever took the sockets over has closed them."""
        for file in self.files:
            file.remove()


async def check_free(settings: ServerSettings) -> None:
    """Find out early whether the address and the TLS files can be had: an engine may take minutes to open.

    Raises:
        InvalidConfig: They cannot.
    """
    server_context(settings.tls)
    if isinstance(settings.listen, UnixAddress) or settings.listen.port:
        (await bind(settings, warn=False)).close()


async def bind(settings: ServerSettings, *, warn: bool = True) -> Bound:
    """Listen on each address that the host stands for, all on one port, or on a Unix socket.

    A plaintext address that other machines can reach is warned about: the service has no authentication.

    Raises:
        InvalidConfig: The host is unknown, or the address is in use, not ours or not allowed.
    """
    address = settings.listen
    if isinstance(address, UnixAddress):
        sock, file = bind_unix(address, settings.listen_mode, SETTING)
        return Bound((sock,), (address,), (file,))
    sockets = await _bind_tcp(address)
    names = [sock.getsockname() for sock in sockets]
    addresses = tuple(ListenAddress(host=name[0], port=name[1]) for name in names)
    for bound in addresses if warn and settings.tls.certfile is None else ():
        if not ipaddress.ip_address(bound.host).is_loopback:
            advice = "use --ssl-certfile, or listen on a loopback address"
            log.warning("plaintext_without_authentication", address=str(bound), advice=advice)
    return Bound(tuple(sockets), addresses)


async def _bind_tcp(address: ListenAddress) -> list[socket.socket]:
    try:
        found = await trio.socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise InvalidConfig(SETTING, f"host {address.host!r} is unknown: {error.strerror or error}") from error
    sockets: list[socket.socket] = []
    port = address.port
    try:
        for family, _, _, _, place in dict.fromkeys(found):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Where the system chose a port, the other addresses of the host get the same.
            sock.bind((place[0], port, *place[2:]))
            port = sock.getsockname()[1]
            sock.listen()
    except OSError as error:
        for sock in sockets:
            sock.close()
        _refuse(address, error)
    return sockets


def _refuse(address: ListenAddress, error: OSError) -> NoReturn:
    if error.errno == errno.EADDRINUSE:
        reason = f"{address} is in use by another socket; choose another port, or 0 for a free one"
    elif error.errno == errno.EADDRNOTAVAIL:
        reason = f"{address} is not an address of this machine"
    else:
        reason = f"cannot listen on {address}: {os.strerror(error.errno) if error.errno else error}"
    raise InvalidConfig(SETTING, reason) from error
