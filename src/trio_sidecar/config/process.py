"""Settings that belong to a process rather than to a role: listening, logging, the host loop, the front end."""

from __future__ import annotations

import enum
import ipaddress
import re

import attrs

from trio_sidecar.config.fields import (
    Option,
    check_duration,
    check_not_empty,
    check_range,
    duration,
    enum_option,
    nested,
    parse_bool,
    parse_text,
    setting,
    whole_number,
)
from trio_sidecar.config.tls import ServerTlsSettings
from trio_sidecar.endpoint import MAX_PORT, ListenAddress, UnixAddress, parse_listen_address
from trio_sidecar.errors import InvalidConfig

MAX_MODE = 0o777


class HostKind(enum.Enum):
    """Which loop is outermost: uvloop with Trio as its guest, or Trio with trio-asyncio's loop inside."""

    UVLOOP = "uvloop"
    TRIO = "trio"


class LogLevel(enum.Enum):
    """Least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.Enum):
    """``auto`` is ``console`` on a terminal and ``json`` elsewhere."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


@attrs.frozen(slots=True, kw_only=True)
class LogSettings:
    """What is logged to stderr, and how."""

    level: LogLevel = setting(
        enum_option(LogLevel, flag="--log-level", env="TRIO_SIDECAR_LOG_LEVEL", help="Least severe level to log."),
        default=LogLevel.INFO,
    )
    format: LogFormat = setting(
        enum_option(
            LogFormat,
            flag="--log-format",
            env="TRIO_SIDECAR_LOG_FORMAT",
            help="Log format; auto is console on a terminal and json elsewhere.",
        ),
        default=LogFormat.AUTO,
    )


@attrs.frozen(slots=True, kw_only=True)
class HostSettings:
    """Which loop runs the process."""

    host_loop: HostKind = setting(
        enum_option(
            HostKind,
            flag="--host-loop",
            env="TRIO_SIDECAR_HOST_LOOP",
            help="Outermost loop; uvloop is the fast one, trio is for debugging.",
        ),
        default=HostKind.UVLOOP,
    )


def _parse_http_host(text: str, source: str) -> str:
    """An IP address, because that is what Dynamo's HTTP service takes; ``localhost`` stands for 127.0.0.1."""
    host = text.strip()
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        allowed = "an IP address such as 127.0.0.1, 0.0.0.0 or ::1, or localhost"
        reason = f"{text[:60]!r} is not allowed; use {allowed}" if host else f"must not be empty; use {allowed}"
        raise InvalidConfig(source, reason) from None


def _check_http_host(value: str, source: str) -> None:
    check_not_empty(value, source)
    _parse_http_host(value, source)


def _check_question(value: str | None, source: str) -> None:
    if value is not None:
        check_not_empty(value, source)


def _check_drain(value: float, source: str) -> None:
    check_duration(value, source, zero=True)


def _check_http_port(value: int, source: str) -> None:
    check_range(value, source, 1, MAX_PORT)


def _check_metrics_port(value: int | None, source: str) -> None:
    if value is not None:
        check_range(value, source, 0, MAX_PORT)


def _parse_mode(text: str, source: str) -> int:
    if not re.fullmatch("[0-7]{3,4}", text):
        raise InvalidConfig(source, f"{text[:60]!r} is not allowed; use three octal digits such as 600 or 660")
    return int(text, 8)


def _show_mode(mode: int) -> str:
    return f"{mode:03o}"


def _check_mode(value: int, source: str) -> None:
    if not 0 <= value <= MAX_MODE:
        raise InvalidConfig(source, f"{value:o} is not allowed; use three octal digits such as 600 or 660")


@attrs.frozen(slots=True, kw_only=True)
class ServerSettings:
    """The gRPC server over an engine.

    Attributes:
        listen: Port 0 lets the system choose.
        listen_mode: Permission bits of the file, if that is a Unix socket.
        tls: Plaintext unless it names a certificate.
        max_message_bytes: Of a request; as in vLLM's own server, answers have no limit.
        withdraw_grace_secs: At shutdown, how long calls are still taken after health says NOT_SERVING.
        drain_secs: After that, how long accepted calls may take to end before they are answered with UNAVAILABLE.
        metrics_port: Where ``/live``, ``/health`` and ``/metrics`` are; 0 lets the system choose, None is nowhere.
    """

    listen: ListenAddress | UnixAddress = setting(
        Option(
            flag="--listen",
            env="TRIO_SIDECAR_LISTEN",
            parse=parse_listen_address,
            metavar="HOST:PORT",
            help="Address to listen on, or unix:///PATH; port 0 lets the system choose.",
        ),
        default=ListenAddress(host="127.0.0.1", port=50051),
    )
    listen_mode: int = setting(
        Option(
            flag="--listen-mode",
            env="TRIO_SIDECAR_LISTEN_MODE",
            parse=_parse_mode,
            metavar="OCTAL",
            help="Permissions of the Unix socket; whoever may write to it may use the engine.",
            show=_show_mode,
        ),
        default=0o600,
        check=_check_mode,
    )
    tls: ServerTlsSettings = nested(ServerTlsSettings, default=ServerTlsSettings())
    max_message_bytes: int = setting(
        Option(
            flag="--max-message-bytes",
            env="TRIO_SIDECAR_MAX_MESSAGE_BYTES",
            parse=whole_number(1, 2**31 - 1),
            metavar="BYTES",
            help="Largest gRPC message that is accepted.",
        ),
        default=32 << 20,
    )
    withdraw_grace_secs: float = setting(
        Option(
            flag="--withdraw-grace-secs",
            env="TRIO_SIDECAR_SERVER_GRACE_SECS",
            parse=duration,
            metavar="SECONDS",
            help="At shutdown, how long calls are still taken after health says NOT_SERVING.",
        ),
        default=0.0,
        check=_check_drain,
    )
    drain_secs: float = setting(
        Option(
            flag="--drain-secs",
            env="TRIO_SIDECAR_SERVER_DRAIN_SECS",
            parse=duration,
            metavar="SECONDS",
            help="At shutdown, how long accepted calls may take to end.",
        ),
        default=30.0,
        check=_check_drain,
    )
    metrics_port: int | None = setting(
        Option(
            flag="--metrics-port",
            env="TRIO_SIDECAR_METRICS_PORT",
            parse=whole_number(0, MAX_PORT),
            metavar="PORT",
            help="Serve /live, /health and /metrics there, on the host of --listen; 0 lets the system choose.",
            empty_is_unset=True,
        ),
        default=None,
        check=_check_metrics_port,
    )


class RouterMode(enum.Enum):
    """How a front end chooses a worker; the value is its name in Dynamo's own front end."""

    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    KV = "kv"


@attrs.frozen(slots=True, kw_only=True)
class FrontendSettings:
    """Dynamo's front end: the OpenAI HTTP service."""

    http_host: str = setting(
        Option(
            flag="--http-host",
            env="DYN_HTTP_HOST",
            parse=_parse_http_host,
            metavar="ADDRESS",
            help="IP address that the HTTP service listens on, or localhost.",
        ),
        default="127.0.0.1",
        check=_check_http_host,
    )
    http_port: int = setting(
        Option(
            flag="--http-port",
            env="DYN_HTTP_PORT",
            parse=whole_number(1, MAX_PORT),
            metavar="PORT",
            help="Port of the HTTP service.",
        ),
        default=8000,
        check=_check_http_port,
    )
    router_mode: RouterMode = setting(
        enum_option(
            RouterMode,
            flag="--router-mode",
            env="DYN_ROUTER_MODE",
            help="How a worker is chosen; kv takes the one whose engine holds the longest part of the prompt.",
        ),
        default=RouterMode.ROUND_ROBIN,
    )


class WorkerKind(enum.Enum):
    """Whose worker stands between front end and engine."""

    TRIO = "trio"
    RUST = "rust"


def _check_free_or_port(value: int | None, source: str) -> None:
    if value is not None:
        check_range(value, source, 1, MAX_PORT)


@attrs.frozen(slots=True, kw_only=True)
class UpSettings:
    """Engine, worker and front end in one command.

    Attributes:
        http_port: None takes a free one.
        ask: A question to put once; None serves until a signal comes.
        startup_secs: How long all parts together may take until the first answer.
        system_port: Where the worker's system server shows its metrics; None is nowhere.
    """

    http_host: str = setting(
        Option(
            flag="--http-host",
            env=None,
            parse=_parse_http_host,
            metavar="ADDRESS",
            help="IP address of the HTTP service, or localhost.",
        ),
        default="127.0.0.1",
        check=_check_http_host,
    )
    http_port: int | None = setting(
        Option(
            flag="--http-port",
            env=None,
            parse=whole_number(1, MAX_PORT),
            metavar="PORT",
            help="Port of the HTTP service; a free one unless given.",
        ),
        default=None,
        check=_check_free_or_port,
    )
    worker: WorkerKind = setting(
        enum_option(WorkerKind, flag="--worker", env=None, help="Our worker, or the Rust sidecar in its place."),
        default=WorkerKind.TRIO,
    )
    ask: str | None = setting(
        Option(
            flag="--ask",
            env=None,
            parse=parse_text,
            metavar="TEXT",
            help="Put one question, stream the answer to stdout, and end.",
        ),
        default=None,
        check=_check_question,
    )
    startup_secs: float = setting(
        Option(
            flag="--startup-secs",
            env=None,
            parse=duration,
            metavar="SECONDS",
            help="How long all parts together may take until the first answer.",
        ),
        default=120.0,
        check=check_duration,
    )
    system_port: int | None = setting(
        Option(
            flag="--system-port",
            env=None,
            parse=whole_number(1, MAX_PORT),
            metavar="PORT",
            help="Port of the worker's system server, with its metrics, for trio-sidecar top.",
        ),
        default=None,
        check=_check_free_or_port,
    )
    verbose: bool = setting(
        Option(flag="--verbose", env=None, parse=parse_bool, switch=True, help="Show the output of the parts."),
        default=False,
    )


@attrs.frozen(slots=True, kw_only=True)
class DoctorSettings:
    """What the doctor may take.

    Attributes:
        json: Write JSON instead of a tree.
        timeout_secs: For each layer of the endpoint and each service around it.
        engine_timeout_secs: For starting an engine in this process and for a short generation.
    """

    json: bool = setting(
        Option(flag="--json", env=None, parse=parse_bool, switch=True, help="Write JSON instead of a tree."),
        default=False,
    )
    timeout_secs: float = setting(
        Option(
            flag="--timeout-secs", env=None, parse=duration, metavar="SECONDS", help="For each layer that is looked at."
        ),
        default=5.0,
        check=check_duration,
    )
    engine_timeout_secs: float = setting(
        Option(
            flag="--engine-timeout-secs",
            env=None,
            parse=duration,
            metavar="SECONDS",
            help="For starting the engine of --engine and generating 16 tokens.",
        ),
        default=600.0,
        check=check_duration,
    )
