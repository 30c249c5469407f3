"""Waiting for etcd before Dynamo's runtime does.

Dynamo's runtime would wait too, for two minutes, but holds the interpreter meanwhile: no signal could end the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog
import trio

from trio_sidecar.config.fields import check_duration, duration
from trio_sidecar.deadline import Deadline, format_seconds
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.worker.errors import RuntimeFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DISCOVERY", "ENDPOINTS", "connect_fault", "discovery_backend", "parse_addresses", "wait_for_etcd"]

DISCOVERY = ("DYN_DISCOVERY_BACKEND", "etcd")
"""The variable that chooses where workers are found, and Dynamo's default."""

ENDPOINTS = ("ETCD_ENDPOINTS", "http://localhost:2379")
STARTUP_SECS = ("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "120")
"""Variables of Dynamo's runtime, with their defaults."""

ADVICE = "processes on one machine find each other without it: DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=DIRECTORY"
DEFAULT_PORT = 2379
RETRY_SECS = 0.5
ATTEMPT_SECS = 5.0

log = structlog.get_logger("trio_sidecar.worker.etcd")


def discovery_backend(setting: str | None, environment: Mapping[str, str]) -> str:
    """The backend that Dynamo's runtime will use: the setting, else the variable, else etcd."""
    return setting or environment.get(*DISCOVERY)


async def wait_for_etcd(environment: Mapping[str, str]) -> None:
    """Wait until one of etcd's endpoints accepts connections (Trio-flavoured, may be cancelled).

    Raises:
        InvalidConfig: A variable makes no sense.
        RuntimeFailed: None did within ``ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS``.
    """
    text = environment.get(*ENDPOINTS)
    addresses = parse_addresses(text)
    seconds = duration(environment.get(*STARTUP_SECS), STARTUP_SECS[0])
    check_duration(seconds, STARTUP_SECS[0], zero=True)
    deadline = Deadline.after(seconds)
    told = False
    while True:
        for host, port in addresses:
            if not await connect_fault(host, port, ATTEMPT_SECS):
                return
        if deadline.expired():
            reason = f"etcd at {text} accepted no connection within {format_seconds(seconds)}"
            raise RuntimeFailed(reason)
        if not told:
            remaining = round(deadline.remaining(), 3)
            log.warning("waiting_for_etcd", endpoints=text, remaining_secs=remaining, advice=ADVICE)
            told = True
        await trio.sleep(deadline.sooner_of(RETRY_SECS))


def parse_addresses(text: str, variable: str = ENDPOINTS[0], default_port: int = DEFAULT_PORT) -> list[tuple[str, int]]:
    """Hosts and ports of a list of URLs or addresses.

    Raises:
        InvalidConfig: One of them is neither.
    """
    addresses = []
    for endpoint in text.split(","):
        url = endpoint.strip()
        try:
            parts = urlsplit(url if "://" in url else f"//{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host:
            reason = f"{endpoint!r} is no address; use a list such as http://host1:2379,http://host2:2379"
            raise InvalidConfig(variable, reason)
        addresses.append((host, default_port if port is None else port))
    return addresses


async def connect_fault(host: str, port: int, seconds: float) -> str:
    """Why nobody accepts a connection there within that time; empty if somebody does (Trio-flavoured)."""
    stream: trio.SocketStream | None = None
    with trio.move_on_after(seconds):
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError as error:
            return f"{host}:{port} {error.strerror or error}"
    if stream is None:
        return f"{host}:{port} does not answer within {seconds:g} s"
    await trio.aclose_forcefully(stream)
    return ""
