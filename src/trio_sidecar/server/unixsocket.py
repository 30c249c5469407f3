"""Unix sockets to listen on: permissions, files that a dead server has left, and removal."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import attrs

from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from trio_sidecar.endpoint import UnixAddress

__all__ = ["SocketFile", "bind_unix"]


@attrs.frozen(slots=True)
class SocketFile:
    """The file of a bound socket."""

    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """Remove the file, unless it is gone or another server has put its own in its place."""
        with suppress(FileNotFoundError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                self.path.unlink()


def bind_unix(address: UnixAddress, mode: int, setting: str) -> tuple[socket.socket, SocketFile]:
    """A listening socket and its file.

    Nobody can connect before the permissions are set, because the socket does not listen until then. A socket file that
    nobody listens on is what a killed server leaves; it is replaced. Any other file is not touched.

    Args:
        address: Where.
        mode: Permission bits of the file.
        setting: The flag to name in messages.

    Raises:
        InvalidConfig: The path is taken, or cannot be written.
    """
    path = Path(address.path)
    _clear(path, address, setting)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(address.path)
        path.chmod(mode)
        found = path.lstat()
        sock.listen()
    except OSError as error:
        sock.close()
        _refuse(address, error, setting)
    return sock, SocketFile(path, found.st_dev, found.st_ino)


def _clear(path: Path, address: UnixAddress, setting: str) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        _refuse(address, error, setting)
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidConfig(setting, f"{address}: there is a file of that name, and it is no socket")
    if _answers(address.path):
        raise InvalidConfig(setting, f"{address} is in use by another server")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _refuse(address, error, setting)


def _answers(path: str) -> bool:
    """Whether somebody listens; one that is too busy or not for us does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT)


def _refuse(address: UnixAddress, error: OSError, setting: str) -> NoReturn:
    reason = os.strerror(error.errno) if error.errno else str(error)
    raise InvalidConfig(setting, f"cannot listen on {address}: {reason}") from error
