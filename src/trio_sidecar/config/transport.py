"""Settings of the connections to the engine (spec 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_sidecar.config.fields import (
    Option,
    check_duration,
    check_range,
    duration,
    nested,
    setting,
    whole_number,
    whole_seconds,
)
from trio_sidecar.config.tls import ClientTlsSettings
from trio_sidecar.endpoint import NEEDS_TLS, GrpcEndpoint, UnixAddress, parse_engine_endpoint
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable

ENDPOINT_FLAG = "--grpc-endpoint"
MAX_CONNECTIONS = 65535
MAX_MESSAGE_BYTES = 2**31 - 1


def nonnegative_seconds(value: object, source: str) -> None:
    """Check a number of seconds that may be 0."""
    check_duration(value, source, zero=True)  # type: ignore[arg-type]


def count(least: int, most: int) -> Callable[[object, str], None]:
    """A check that a number, if there is one, lies between two others."""

    def check(value: object, source: str) -> None:
        if value is not None:
            check_range(value, source, least, most)  # type: ignore[arg-type]

    return check


def _seconds(flag: str, env: str, default: float, text: str) -> float:
    option = Option(flag=flag, env=env, parse=whole_seconds, help=text, metavar="SECONDS")
    return setting(option, default=default, check=check_duration)  # type: ignore[no-any-return]


def _check_endpoint(value: object, source: str) -> None:
    if not isinstance(value, GrpcEndpoint | UnixAddress):
        raise InvalidConfig(source, f"must be a GrpcEndpoint or a UnixAddress, not {type(value).__name__}")


@attrs.frozen(slots=True, kw_only=True)
class TransportSettings:
    """Connections to the engine; durations in seconds.

    Attributes:
        grpc_endpoint: On TCP, its ``tls`` is what ``tls.enabled`` says; a scheme cannot turn TLS on by itself, because
            the Rust sidecar refuses such schemes.
    """

    grpc_endpoint: GrpcEndpoint | UnixAddress = setting(
        Option(
            flag=ENDPOINT_FLAG,
            env="DYN_SIDECAR_GRPC_ENDPOINT",
            parse=parse_engine_endpoint,
            metavar="HOST:PORT",
            help="Engine's gRPC endpoint, as HOST:PORT, an http:// or grpc:// URL, or unix:///PATH.",
        ),
        check=_check_endpoint,
    )
    grpc_connections: int = setting(
        Option(
            flag="--grpc-connections",
            env="DYN_SIDECAR_GRPC_CONNECTIONS",
            parse=whole_number(1, MAX_CONNECTIONS),
            metavar="COUNT",
            help="Number of parallel gRPC connections.",
        ),
        default=8,
        check=count(1, MAX_CONNECTIONS),
    )
    grpc_connect_attempt_timeout_secs: float = _seconds(
        "--grpc-connect-attempt-timeout-secs",
        "DYN_SIDECAR_GRPC_CONNECT_ATTEMPT_TIMEOUT_SECS",
        30.0,
        "Longest time one connection attempt may take.",
    )
    grpc_retry_interval_secs: float = _seconds(
        "--grpc-retry-interval-secs", "DYN_SIDECAR_GRPC_RETRY_INTERVAL_SECS", 1.0, "Pause between connection attempts."
    )
    grpc_startup_deadline_secs: float = _seconds(
        "--grpc-startup-deadline-secs",
        "DYN_SIDECAR_GRPC_STARTUP_DEADLINE_SECS",
        1800.0,
        "Longest time each start-up phase may take; every phase has a fresh budget.",
    )
    max_message_bytes: int = setting(
        Option(
            flag="--max-message-bytes",
            env="TRIO_SIDECAR_MAX_MESSAGE_BYTES",
            parse=whole_number(1, MAX_MESSAGE_BYTES),
            metavar="BYTES",
            help="Largest gRPC message that is sent or accepted.",
        ),
        default=64 << 20,
        check=count(1, MAX_MESSAGE_BYTES),
    )
    keepalive_secs: float = setting(
        Option(
            flag="--keepalive-secs",
            env="TRIO_SIDECAR_KEEPALIVE_SECS",
            parse=duration,
            metavar="SECONDS",
            help="Ping a connection that carries requests and brought nothing for this long; 0 never does.",
        ),
        default=30.0,
        check=nonnegative_seconds,
    )
    keepalive_timeout_secs: float = setting(
        Option(
            flag="--keepalive-timeout-secs",
            env="TRIO_SIDECAR_KEEPALIVE_TIMEOUT_SECS",
            parse=duration,
            metavar="SECONDS",
            help="How long the answer to such a ping may take before the connection counts as lost.",
        ),
        default=20.0,
        check=check_duration,
    )
    tls: ClientTlsSettings = nested(ClientTlsSettings, default=ClientTlsSettings())

    def __attrs_post_init__(self) -> None:
        """Let endpoint and TLS settings agree."""
        endpoint = self.grpc_endpoint
        if isinstance(endpoint, GrpcEndpoint) and endpoint.tls != self.tls.enabled:
            if endpoint.tls:
                raise InvalidConfig(ENDPOINT_FLAG, NEEDS_TLS)
            object.__setattr__(self, "grpc_endpoint", attrs.evolve(endpoint, tls=True))
