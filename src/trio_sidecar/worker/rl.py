"""The request-plane endpoint through which Dynamo's front end finds workers that a trainer can drive (spec 6.4).

The front end asks it for ``{"method": "routes"}`` and lists the answers under ``/v1/rl/workers``. It executes nothing:
controls and updates go to the worker's system server.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping, Sequence

    from trio_sidecar.rl import RlWorkerMetadata

__all__ = ["RouteDescriber", "own_system_port", "rl_endpoint_name", "system_url"]

ENDPOINT_VARIABLE = "DYN_RL_ENDPOINT"
PORT_VARIABLE = "DYN_SYSTEM_PORT"
HOST_VARIABLE = "DYN_SYSTEM_HOST"


def rl_endpoint_name(environment: Mapping[str, str], serving: str) -> str:
    """The endpoint's name: ``rl`` unless ``DYN_RL_ENDPOINT`` says another.

    Raises:
        InvalidConfig: It is no name, or the serving endpoint's.
    """
    name = environment.get(ENDPOINT_VARIABLE, "rl").strip()
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise InvalidConfig(ENDPOINT_VARIABLE, f"{name!r} is not allowed; use letters, digits, '-' and '_'")
    if name == serving:
        raise InvalidConfig(ENDPOINT_VARIABLE, f"{name!r} is the serving endpoint; use another name")
    return name


def system_url(environment: Mapping[str, str]) -> str:
    """Where other machines reach the worker's system server.

    Raises:
        InvalidConfig: There is none, or its port is chosen by the system and so not known to us.
    """
    port = environment.get(PORT_VARIABLE, "").strip()
    if not port.isdecimal() or int(port) == 0:
        reason = f"{port!r} is not enough for --enable-rl, which advertises the system server; use a port of its own"
        raise InvalidConfig(PORT_VARIABLE, reason)
    host = environment.get(HOST_VARIABLE, "").strip() or "0.0.0.0"  # noqa: S104 - what Dynamo binds by default
    try:
        if ipaddress.ip_address(host).is_unspecified:
            host = local_address()
    except ValueError:
        pass  # a name
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def own_system_port(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Keep a runtime that is made inside from opening the worker's system server a second time."""
    port = environment.get(PORT_VARIABLE)
    environment[PORT_VARIABLE] = "-1"
    try:
        yield
    finally:
        if port is None:
            del environment[PORT_VARIABLE]
        else:
            environment[PORT_VARIABLE] = port


def local_address() -> str:
    """This machine's address as others see it; the loopback one if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; this only picks a route
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
    return address


@attrs.frozen(slots=True, kw_only=True)
class RouteDescriber:
    """Answers the front end's questions.

    Attributes:
        routes: Names of the worker's routes, as ``control/NAME`` and ``update/NAME``.
        url: Where the system server is.
        metadata: What a trainer must know.
    """

    routes: Sequence[str]
    url: str
    metadata: RlWorkerMetadata

    async def aio_generate(self, request: object, context: object = None) -> AsyncIterator[dict[str, Any]]:  # noqa: ARG002
        """Answer one question; Dynamo calls this."""
        yield self.answer(request)

    def answer(self, request: object) -> dict[str, Any]:
        """The description, or an error envelope for any other question."""
        method = request.get("method") if isinstance(request, dict) else None
        if not isinstance(method, str):
            return {"status": "error", "message": "rl_dispatch: missing 'method' (str)"}
        if method != "routes":
            message = "rl request-plane endpoint only supports method='routes'"
            return {"status": "error", "method": method, "message": message}
        answer = {
            "status": "ok",
            "routes": sorted(set(self.routes)),
            "system_url": self.url,
            "world_size": self.metadata.world_size,
        }
        if self.metadata.admin_base_url is not None:
            answer["admin_base_url"] = self.metadata.admin_base_url
        return answer
