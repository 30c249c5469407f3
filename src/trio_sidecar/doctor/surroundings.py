"""What a worker finds around it: packages, Dynamo's planes, ports, proxies, limits (Trio-flavoured if it connects)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from trio_sidecar import __version__
from trio_sidecar.doctor.report import Finding, failed, fine, mask, warned
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.transport import fastpath
from trio_sidecar.worker.etcd import DISCOVERY, ENDPOINTS, connect_fault, discovery_backend, parse_addresses
from trio_sidecar.worker.probes import DEFAULT_HOST, HOST, PORT, system_port

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["examine_discovery", "examine_process"]

DYNAMO = "ai-dynamo-runtime"
FILE_DIRECTORY = "DYN_FILE_KV"
EVENT_PLANE, REQUEST_PLANE, NATS_SERVER = "DYN_EVENT_PLANE", "DYN_REQUEST_PLANE", "NATS_SERVER"
KUBERNETES_HOST = "KUBERNETES_SERVICE_HOST"
NATS = "nats"
NATS_DEFAULT = "nats://localhost:4222"
NATS_PORT = 4222
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
NO_PROXY = "no_proxy"
FEW_FILES, ENOUGH_FILES = 256, 4096
"""Open files: below the first a worker soon fails; below the second a busy one may."""


def examine_process(environment: Mapping[str, str]) -> tuple[Finding, ...]:
    """This process and its machine."""
    return (
        fine("trio-sidecar", f"{__version__}, Python {platform.python_version()}, {platform.system()}"),
        _transport(),
        _dynamo(),
        _open_files(),
        _proxies(environment),
    )


def _transport() -> Finding:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("trio", "grpclib", "h2"))
    if (why := fastpath.unsupported()) is not None:
        return warned("transport", f"{versions}; the fast path is off: {why}", "install versions that it knows")
    return fine("transport", versions)


def _dynamo() -> Finding:
    try:
        return fine("Dynamo", f"{DYNAMO} {importlib.metadata.version(DYNAMO)}")
    except importlib.metadata.PackageNotFoundError:
        hint = "pip install 'trio-sidecar[dynamo]'; the engines do without it"
        return warned("Dynamo", f"{DYNAMO} is not installed, which worker, frontend and up need", hint)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{_count(soft)} at once, at most {_count(hard)}"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        tell = failed if soft < FEW_FILES else warned
        return tell("open files", detail, f"ulimit -n {ENOUGH_FILES}, or LimitNOFILE= in a unit")
    return fine("open files", detail)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _proxies(environment: Mapping[str, str]) -> Finding:
    names = [name for base in PROXIES for name in (base, base.upper()) if environment.get(name)]
    if not names:
        return fine("proxies", "no proxy variable is set")
    excluded = environment.get(NO_PROXY) or environment.get(NO_PROXY.upper())
    detail = ", ".join(f"{name}={mask(environment[name])}" for name in names)
    hint = "the connection to the engine ignores them; downloads and other HTTP clients do not: set no_proxy"
    if excluded:
        return warned("proxies", f"{detail}; not for {excluded}", hint)
    return warned("proxies", detail, hint)


async def examine_discovery(environment: Mapping[str, str], *, seconds: float) -> tuple[Finding, ...]:
    """How a worker would be found, and the ports it needs.

    Args:
        environment: The variables that Dynamo's runtime reads.
        seconds: For each connection.
    """
    return (
        await _discovery(environment, seconds),
        await _plane("event plane", EVENT_PLANE, "zmq", environment, seconds),
        await _plane("request plane", REQUEST_PLANE, "tcp", environment, seconds),
        _system_port(environment),
    )


async def _discovery(environment: Mapping[str, str], seconds: float) -> Finding:
    backend = discovery_backend(None, environment)
    match backend:
        case "etcd":
            return await _etcd(environment, seconds)
        case "file":
            return _directory(environment)
        case "kubernetes":
            if environment.get(KUBERNETES_HOST):
                return fine("discovery", "Kubernetes")
            return failed("discovery", "Kubernetes, but this is no pod", "run it in a pod, or choose another backend")
        case "mem":
            hint = "only parts in one process find each other; use file or etcd"
            return warned("discovery", "in this process's memory", hint)
    allowed = "use etcd, file, kubernetes or mem"
    return failed("discovery", f"{DISCOVERY[0]} is {backend!r}, which Dynamo does not know", allowed)


async def _etcd(environment: Mapping[str, str], seconds: float) -> Finding:
    text = environment.get(*ENDPOINTS)
    try:
        addresses = parse_addresses(text)
    except InvalidConfig as error:
        return failed("discovery", str(error), "")
    faults = [fault for host, port in addresses if (fault := await connect_fault(host, port, seconds))]
    if not faults:
        return fine("discovery", f"etcd at {text}")
    hint = "start etcd or set ETCD_ENDPOINTS; on one machine: DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=DIRECTORY"
    chosen = any(environment.get(name) for name, _ in (DISCOVERY, ENDPOINTS))
    tell = failed if chosen and len(faults) == len(addresses) else warned  # who runs no worker here needs no etcd
    return tell("discovery", f"etcd: {'; '.join(faults)}", hint)


def _directory(environment: Mapping[str, str]) -> Finding:
    text = environment.get(FILE_DIRECTORY, "")
    if not text:
        hint = f"set {FILE_DIRECTORY} for all parts"
        return warned("discovery", f"a directory that Dynamo chooses: {FILE_DIRECTORY} is not set", hint)
    path = Path(text)
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        return failed("discovery", f"{nearest} is no directory", f"set {FILE_DIRECTORY} to a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        return failed("discovery", f"{nearest}: no permission to write", f"set {FILE_DIRECTORY} to another directory")
    return fine("discovery", f"files in {path}")


async def _plane(name: str, variable: str, default: str, environment: Mapping[str, str], seconds: float) -> Finding:
    plane = environment.get(variable) or default
    if plane != NATS:
        return fine(name, plane)
    text = environment.get(NATS_SERVER) or NATS_DEFAULT
    faults = []
    for part in text.split(","):
        try:
            ((host, port),) = parse_addresses(part, NATS_SERVER, NATS_PORT)
        except InvalidConfig as error:
            return failed(name, str(error), "")
        if fault := await connect_fault(host, port, seconds):
            faults.append(fault)
    if faults:
        return failed(
            name, f"NATS: {'; '.join(faults)}", f"start NATS or set {NATS_SERVER}; {variable}={default} needs none"
        )
    return fine(name, f"NATS at {text}")


def _system_port(environment: Mapping[str, str]) -> Finding:
    try:
        port = system_port(environment)
    except InvalidConfig as error:
        return failed("system port", str(error), "")
    if port is None:
        return fine("system port", f"none: {PORT} is not set, so there are no probes and no metrics")
    host = environment.get(HOST) or DEFAULT_HOST
    try:
        with socket.create_server((host, port)):
            return fine("system port", f"{host}:{port} is free")
    except OSError as error:
        hint = f"another process has it (perhaps this worker, already running); or set {PORT}"
        return failed("system port", f"{host}:{port}: {error.strerror}", hint)
