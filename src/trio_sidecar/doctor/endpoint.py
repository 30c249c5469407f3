"""From an engine's address to what it serves: a layer is looked at only if the one below carries (Trio-flavoured)."""

from __future__ import annotations

import os
import socket
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trio_sidecar.bridge import run_aio
from trio_sidecar.discovery import DiscoveredModel
from trio_sidecar.doctor.report import Finding, Mark, failed, fine, skipped, warned
from trio_sidecar.endpoint import UnixAddress
from trio_sidecar.engines.remote import open_remote
from trio_sidecar.errors import (
    IncompatibleEngine,
    InvalidConfig,
    NoGrpcAnswer,
    RpcError,
    SidecarError,
    StatusCode,
    cause_chain,
)
from trio_sidecar.tls import client_context, handshake_fault
from trio_sidecar.transport.dial import aio_connect, connection_settings
from trio_sidecar.wire import (
    GenerateRequest,
    GetKvEventSourcesRequest,
    GetModelInfoRequest,
    GetServerInfoRequest,
    GetWeightVersionRequest,
    HealthCheckResponseServingStatus,
    IsPausedRequest,
    IsSleepingRequest,
    ListLorasRequest,
)
from trio_sidecar.wire.methods import (
    GENERATE,
    GET_KV_EVENT_SOURCES,
    GET_MODEL_INFO,
    GET_SERVER_INFO,
    GET_WEIGHT_VERSION,
    IS_PAUSED,
    IS_SLEEPING,
    LIST_LORAS,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio_sidecar.config import TransportSettings
    from trio_sidecar.engines.contract import Engine

__all__ = ["examine_endpoint"]

LAYERS = (
    *("address", "DNS", "socket", "TCP", "TLS", "HTTP/2", "gRPC"),
    *("health", "vllm.Inference", "vllm.Control", "model"),
)
SERVICES = ("vllm.Inference", "vllm.Control")
OPTIONAL_CALLS: tuple[tuple[Any, Any], ...] = (
    (GET_KV_EVENT_SOURCES, GetKvEventSourcesRequest),
    (IS_PAUSED, IsPausedRequest),
    (IS_SLEEPING, IsSleepingRequest),
    (GET_WEIGHT_VERSION, GetWeightVersionRequest),
    (LIST_LORAS, ListLorasRequest),
)
"""Calls that change nothing and that not every engine has."""

NO_GRPC = (StatusCode.UNKNOWN, StatusCode.INTERNAL, StatusCode.UNAVAILABLE)


@attrs.define(eq=False)
class _Walk:
    """The way from layer to layer.

    Attributes:
        seconds: For each layer.
        findings: So far.
    """

    settings: TransportSettings
    seconds: float
    findings: list[Finding] = attrs.field(factory=list)
    addresses: list[tuple[Any, ...]] = attrs.field(factory=list)

    @property
    def broken(self) -> bool:
        return any(finding.mark is Mark.FAILED for finding in self.findings)

    async def step(self, name: str, look: Callable[[], Awaitable[Finding]]) -> None:
        """Look at one layer, within its time; what takes longer has failed."""
        started_at = trio.current_time()
        with trio.move_on_after(self.seconds):
            try:
                finding = await look()
            except InvalidConfig as error:  # a TLS file that cannot be used
                finding = failed(name, str(error))
            if finding.mark is Mark.FINE:
                finding = attrs.evolve(finding, seconds=trio.current_time() - started_at)
            self.findings.append(finding)
            return
        self.findings.append(failed(name, f"no answer within {self.seconds:g} s", _SILENCE.get(name, "")))

    # -- Below gRPC

    async def look_at_address(self) -> Finding:
        endpoint = self.settings.grpc_endpoint
        if not endpoint.stays_here and not self.settings.tls.enabled:
            return warned("address", f"{endpoint.label}, in plaintext to another machine", "use --grpc-tls if you can")
        return fine("address", f"{endpoint.label}, {'TLS' if self.settings.tls.enabled else 'plaintext'}")

    async def look_up(self) -> Finding:
        endpoint = self.settings.grpc_endpoint
        assert not isinstance(endpoint, UnixAddress)  # noqa: S101
        try:
            found = await trio.socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except OSError as error:
            return failed("DNS", f"{endpoint.host!r}: {error}", "check the host name, or give an IP address")
        self.addresses = [(family, address) for family, _, _, _, address in found]
        return fine("DNS", ", ".join(dict.fromkeys(str(address[0]) for _, _, _, _, address in found)))

    async def look_at_socket(self) -> Finding:
        endpoint = self.settings.grpc_endpoint
        assert isinstance(endpoint, UnixAddress)  # noqa: S101
        path = Path(endpoint.path)
        try:
            mode = path.stat().st_mode  # noqa: ASYNC240 - one call on a local path
        except OSError as error:
            return failed(
                "socket", f"{path}: {error.strerror}", "start the engine with --listen unix://PATH, or check it"
            )
        if not stat.S_ISSOCK(mode):
            return failed("socket", f"{path} is no socket", "check the path")
        if not os.access(path, os.W_OK):
            return failed("socket", f"{path}: no permission to write", "run as its owner, or set --listen-mode")
        return fine("socket", str(path))

    async def connect(self) -> Finding:
        endpoint = self.settings.grpc_endpoint
        if isinstance(endpoint, UnixAddress):
            try:
                await trio.aclose_forcefully(await trio.open_unix_socket(endpoint.path))
            except OSError as error:
                return failed("TCP", f"{endpoint.path}: {_words(error)}", "is the engine running?")
            return fine("TCP", "connected")
        faults = []
        for family, address in self.addresses:
            sock = trio.socket.socket(family)
            with sock:
                try:
                    await sock.connect(address)
                except OSError as error:
                    faults.append(f"{address[0]}: {_words(error)}")
        if len(faults) == len(self.addresses):
            hint = "is the engine running, and on this port?"
            return failed("TCP", f"port {endpoint.port} of {'; '.join(faults)}", hint)
        if faults:
            return warned("TCP", f"connected, but not to {'; '.join(faults)}", "name an address instead of the host")
        return fine("TCP", f"port {endpoint.port} accepts connections")

    async def shake_hands(self) -> Finding:
        endpoint, tls = self.settings.grpc_endpoint, self.settings.tls
        name = tls.server_name or (endpoint.authority if isinstance(endpoint, UnixAddress) else endpoint.host)
        if isinstance(endpoint, UnixAddress):
            stream: trio.SocketStream = await trio.open_unix_socket(endpoint.path)
        else:
            stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
        fault: OSError | None = None
        shaken = False
        try:
            secure = trio.SSLStream(stream, client_context(tls), server_hostname=name)
            await secure.do_handshake()
            shaken = True
            # A server may refuse our certificate after the handshake; a good one greets.
            with trio.move_on_after(self.seconds / 2):
                if not await secure.receive_some(1):
                    fault = ConnectionResetError()
        except trio.BrokenResourceError as error:
            cause = error.__cause__
            fault = cause if isinstance(cause, ssl.SSLError) else ConnectionResetError()
        finally:
            await trio.aclose_forcefully(stream)
        if fault is not None:
            why = handshake_fault(fault, shows_certificate=tls.cert is not None)
            if shaken and not isinstance(fault, ssl.SSLError):
                why = (
                    "the server ended the connection after the handshake: it wants a client certificate, or another one"
                )
            return failed("TLS", why, _TLS_HINT)
        return fine("TLS", f"the certificate is good for {name}")

    async def greet(self) -> Finding:
        settings = connection_settings(self.settings)
        try:
            connection = await run_aio(aio_connect, settings, lambda _: None)
        except (SidecarError, OSError) as error:
            hint = (
                "" if self.settings.tls.enabled else "is it TLS (--grpc-tls), or an HTTP port instead of the gRPC port?"
            )
            return failed("HTTP/2", cause_chain(error), hint)
        limit = connection.stream_limit
        connection.close("the doctor has seen it")
        return fine("HTTP/2", f"greeted; {limit} streams at once on each connection")


_SILENCE = {
    "DNS": "the resolver does not answer",
    "TCP": "a firewall or a wrong address: packets are lost on the way",
    "TLS": "it accepts connections and says nothing: is it a TLS server, and does it still run?",
    "HTTP/2": "it accepts connections and says nothing: is it frozen, or another kind of server?",
    "gRPC": "it is there and does not answer: is it frozen?",
}
_TLS_HINT = "check --grpc-tls, --grpc-tls-ca, --grpc-tls-cert and --grpc-tls-server-name"


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


async def examine_endpoint(settings: TransportSettings, *, seconds: float) -> tuple[Finding, ...]:
    """Walk up the layers of an engine's endpoint.

    Args:
        settings: As a worker would use them.
        seconds: For each layer.
    """
    walk = _Walk(settings, seconds)
    unix = isinstance(settings.grpc_endpoint, UnixAddress)
    steps: list[tuple[str, Callable[[], Awaitable[Finding]]]] = [("address", walk.look_at_address)]
    steps.append(("socket", walk.look_at_socket) if unix else ("DNS", walk.look_up))
    steps.append(("TCP", walk.connect))
    if settings.tls.enabled:
        steps.append(("TLS", walk.shake_hands))
    steps.append(("HTTP/2", walk.greet))
    for name, look in steps:
        if not walk.broken:
            await walk.step(name, look)
    if not walk.broken:
        quick = attrs.evolve(settings, grpc_startup_deadline_secs=seconds, grpc_connect_attempt_timeout_secs=seconds)
        async with open_remote(quick, bootstrap=True) as engine:
            walk.findings.extend(await _examine_calls(engine, seconds))
    reached = {finding.name for finding in walk.findings}
    applies = {"socket": unix, "DNS": not unix, "TLS": settings.tls.enabled}
    missing = [name for name in LAYERS if name not in reached and applies.get(name, True)]
    if missing:
        broken = next(finding.name for finding in walk.findings if finding.mark is Mark.FAILED)
        walk.findings.extend(skipped(missing, f"not reached, because of {broken}"))
    return tuple(walk.findings)


# -- gRPC and above


async def _examine_calls(engine: Engine, seconds: float) -> list[Finding]:
    findings = [*await _check_health(engine, seconds)]
    if any(finding.mark is Mark.FAILED and finding.name == "gRPC" for finding in findings):
        return findings
    findings.append(await _check_inference(engine, seconds))
    answers: dict[str, Any] = {}
    for method, request in ((GET_SERVER_INFO, GetServerInfoRequest), (GET_MODEL_INFO, GetModelInfoRequest)):
        answer, took = await _timed(engine.aio_call, method, request(), seconds=seconds)
        if isinstance(answer, SidecarError):
            hint = "is it a server of vLLM's gRPC contract, and new enough?"
            findings.append(failed("vllm.Control", f"{method.name}: {_status(answer)}", hint))
            return findings
        answers[method.name] = answer
        findings.append(fine(f"vllm.Control {method.name}", "answered", seconds=took))
    for method, request in OPTIONAL_CALLS:
        findings.append(await _optional(engine, method, request(), seconds))
    findings.append(fine("vllm.Control", "serves what a worker needs"))
    findings.append(_describe(answers[GET_MODEL_INFO.name], answers[GET_SERVER_INFO.name]))
    return findings


async def _check_health(engine: Engine, seconds: float) -> list[Finding]:
    findings, wrong = [], []
    for service in SERVICES:
        answer, took = await _timed(engine.aio_check_health, service, seconds=seconds)
        if isinstance(answer, NoGrpcAnswer) or (isinstance(answer, RpcError) and answer.status in NO_GRPC):
            return [failed("gRPC", _status(answer), "HTTP/2 answers, but not as gRPC: is this the gRPC port?")]
        if isinstance(answer, SidecarError) and not isinstance(answer, RpcError):
            return [failed("gRPC", _status(answer), _SILENCE["gRPC"])]
        if isinstance(answer, RpcError):
            wrong.append(f"{service}: {_status(answer)}")
            continue
        if answer != HealthCheckResponseServingStatus.SERVING:
            wrong.append(f"{service} is {HealthCheckResponseServingStatus(answer).name or answer}")
        findings.append(fine(f"health {service}", "answered", seconds=took))
    reached = fine("gRPC", "answers calls")
    if wrong:
        hint = "wait until the model has loaded; a server without grpc.health.v1 cannot be watched"
        return [reached, *findings, failed("health", "; ".join(wrong), hint)]
    return [reached, *findings, fine("health", "SERVING")]


async def _check_inference(engine: Engine, seconds: float) -> Finding:
    """An empty request is refused by whoever knows the call, before anything is generated."""
    answer, took = await _timed(engine.aio_call, GENERATE, GenerateRequest(), seconds=seconds)
    if isinstance(answer, RpcError) and answer.status in (StatusCode.UNIMPLEMENTED, StatusCode.UNAUTHENTICATED):
        return failed("vllm.Inference", f"Generate: {_status(answer)}", "is it a server of vLLM's gRPC contract?")
    if isinstance(answer, SidecarError) and not isinstance(answer, RpcError):
        return failed("vllm.Inference", f"Generate: {_status(answer)}", _SILENCE["gRPC"])
    return fine("vllm.Inference", "knows Generate", seconds=took)


async def _optional(engine: Engine, method: Any, request: Any, seconds: float) -> Finding:
    name = f"vllm.Control {method.name}"
    answer, took = await _timed(engine.aio_call, method, request, seconds=seconds)
    if isinstance(answer, RpcError):
        offered = answer.status not in (StatusCode.UNIMPLEMENTED, StatusCode.FAILED_PRECONDITION)
        if offered:
            return warned(name, _status(answer))
        return fine(name, f"not offered ({answer.status.name})", seconds=took)
    if isinstance(answer, SidecarError):
        return warned(name, _status(answer))
    return fine(name, "answered", seconds=took)


def _describe(model: Any, server: Any) -> Finding:
    try:
        found = DiscoveredModel.from_messages(model, server)
        found.registration()
    except IncompatibleEngine as error:
        return failed("model", str(error), "this engine cannot be served by a worker")
    able = [
        name
        for name, has in (
            (f"LoRA ({found.max_loras})", found.supports_lora),
            ("media", found.supports_multimodal),
            ("RL", bool(found.rl_capabilities and found.rl_capabilities.weight_transfer_enabled)),
        )
        if has
    ]
    ranks = f", ranks {found.local_ranks.start} to {found.local_ranks.stop - 1}" if len(found.local_ranks) > 1 else ""
    version = f"engine {found.engine_version}, contract {server.proto_version or 'unknown'}"
    capabilities = f"; {', '.join(able)}" if able else ""
    return fine("model", f"{found.served_model_name} ({found.model_id}), {version}{ranks}{capabilities}")


async def _timed(aio_call: Callable[..., Awaitable[Any]], *arguments: Any, seconds: float) -> tuple[Any, float]:
    """The answer, or the error instead of it, and the time it took."""
    started_at = trio.current_time()
    answer: Any = None
    with trio.move_on_after(seconds) as scope:
        try:
            answer = await run_aio(aio_call, *arguments)
        except SidecarError as error:
            answer = error
    if scope.cancelled_caught:
        answer = SidecarError(f"no answer within {seconds:g} s")
    return answer, trio.current_time() - started_at


def _status(error: SidecarError) -> str:
    return f"{error.status.name}: {error.detail}" if isinstance(error, RpcError) else str(error)
