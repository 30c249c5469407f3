"""Bound sockets for a listen address (Trio-flavoured)."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, NoReturn

import structlog
import trio

from trio_sidecar.endpoint import ListenAddress
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bind", "bound_addresses", "check_free"]

SETTING = "--listen"

log = structlog.get_logger("trio_sidecar.server")


async def check_free(address: ListenAddress) -> None:
    """Find out early whether the address can be had: an engine may take minutes to open.

    Raises:
        InvalidConfig: It cannot.
    """
    if address.port:
        for sock in await bind(address, warn=False):
            sock.close()


async def bind(address: ListenAddress, *, warn: bool = True) -> list[socket.socket]:
    """Sockets bound to each address that the host stands for, all on one port.

    A plaintext address that other machines can reach is warned about: the service has no authentication.

    Raises:
        InvalidConfig: The host is unknown, or the address is in use, not ours or not allowed.
    """
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
    for bound in bound_addresses(sockets) if warn else ():
        if not ipaddress.ip_address(bound.host).is_loopback:
            log.warning("plaintext_without_authentication", address=str(bound), advice="listen on a loopback address")
    return sockets


def bound_addresses(sockets: Sequence[socket.socket]) -> tuple[ListenAddress, ...]:
    """Where the sockets listen, port 0 resolved."""
    names = [sock.getsockname() for sock in sockets]
    return tuple(ListenAddress(host=name[0], port=name[1]) for name in names)


def _refuse(address: ListenAddress, error: OSError) -> NoReturn:
    if error.errno == errno.EADDRINUSE:
        reason = f"{address} is in use by another socket; choose another port, or 0 for a free one"
    elif error.errno == errno.EADDRNOTAVAIL:
        reason = f"{address} is not an address of this machine"
    else:
        reason = f"cannot listen on {address}: {os.strerror(error.errno) if error.errno else error}"
    raise InvalidConfig(SETTING, reason) from error
