"""Settings of the Dynamo worker (spec 2).

Every flag and variable that the Rust sidecar has means the same here; ``--caller-handoff``, ``--coalesce``,
``--dp-ranks``, ``--max-message-bytes``, ``--drain-secs``, ``--withdraw-grace-secs`` and the TLS settings are our own.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.config.fields import (
    Option,
    check_not_empty,
    duration,
    nested,
    none_if_empty,
    parse_bool,
    parse_choice,
    parse_on_off,
    parse_text,
    setting,
    whole_number,
)
from trio_sidecar.config.model import check_endpoint_types, parse_endpoint_types, parse_template
from trio_sidecar.config.transport import TransportSettings, count, nonnegative_seconds
from trio_sidecar.endpoint import MAX_PORT, HttpEndpoint
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_U32 = 2**32 - 1


class DisaggregationMode(enum.Enum):
    """A worker's role; the value is its name in Dynamo and on the command line."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


_MODES = {mode.value: mode for mode in DisaggregationMode}


def parse_mode(text: str, source: str) -> DisaggregationMode:
    """A role by name; the long name ``aggregated`` is understood too.

    Raises:
        InvalidConfig: It is none.
    """
    return parse_choice("agg" if text == "aggregated" else text, source, _MODES)


def namespace_with_suffix(namespace: str, suffix: str) -> str:
    """The namespace with ``-{suffix}`` appended, unless the suffix is empty or already there."""
    return namespace if not suffix or namespace.endswith(f"-{suffix}") else f"{namespace}-{suffix}"


def parse_ranks(text: str, source: str) -> range:
    """Data-parallel ranks, ``A-B`` with both ends or a single ``A``.

    Raises:
        InvalidConfig: They are no numbers, or the second is lower than the first.
    """
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidConfig(source, f"{text!r} is no range of ranks; allowed are A-B and A, such as 0-3")
    first, last = (whole_number(0, MAX_U32)(part, source) for part in (parts[0], parts[-1]))
    if last < first:
        raise InvalidConfig(source, f"{text!r} ends before it begins; allowed are A-B with A at most B")
    return range(first, last + 1)


def check_ranks(value: object, source: str) -> None:
    """Refuse anything but None and an ascending range of ranks."""
    if value is None:
        return
    if not isinstance(value, range):
        raise InvalidConfig(source, f"must be a range, not {type(value).__name__}")
    if not value or value.step != 1 or value.start < 0 or value.stop > MAX_U32 + 1:
        raise InvalidConfig(source, f"{value!r} is not an ascending, non-empty range of ranks from 0 to {MAX_U32}")


def _is(cls: type) -> Callable[[object, str], None]:
    def check(value: object, source: str) -> None:
        if not isinstance(value, cls):
            raise InvalidConfig(source, f"must be a {cls.__name__}, not {type(value).__name__}")

    return check


def _text(flag: str, env: str, default: str, text: str, converter: object = None) -> str:
    option = Option(flag=flag, env=env, parse=parse_text, help=text, metavar="NAME")
    return setting(option, default=default, check=check_not_empty, converter=converter)  # type: ignore[no-any-return]


def _optional_text(flag: str, env: str, text: str) -> str | None:
    option = Option(flag=flag, env=env, parse=parse_text, help=text, metavar="NAME", empty_is_unset=True)
    return setting(option, default=None, converter=none_if_empty)  # type: ignore[no-any-return]


def _plane(flag: str, env: str, choices: tuple[str, ...], text: str, absent: str = "") -> str | None:
    known = {choice: choice for choice in choices}

    def parse(value: str, source: str) -> str:
        return parse_choice(value, source, known)

    def check(value: object, source: str) -> None:
        if value is not None:
            parse(str(value), source)

    option = Option(flag=flag, env=env, parse=parse, choices=choices, help=text, absent=absent)
    return setting(option, default=None, check=check)  # type: ignore[no-any-return]


def _switch(flag: str, env: str, text: str) -> bool:
    option = Option(flag=flag, env=env, parse=parse_bool, help=text, choices=("true", "false"), switch=True)
    return setting(option, default=False, check=_is(bool))  # type: ignore[no-any-return]


def _unless_off(flag: str, env: str, text: str) -> bool:
    option = Option(flag=flag, env=env, parse=parse_on_off, help=text, choices=("on", "off"))
    return setting(option, default=True, check=_is(bool))  # type: ignore[no-any-return]


def _truthy(text: str, source: str) -> bool:
    """A switch as Dynamo's own variables spell it."""
    words = {word: value for value, words in _TRUTH.items() for word in words}
    return parse_choice(text.strip().lower(), source, words)


_TRUTH = {True: ("true", "1", "on", "yes"), False: ("false", "0", "off", "no")}


def _variable(env: str, text: str) -> bool:
    option = Option(flag=None, env=env, parse=_truthy, help=text, choices=("true", "false"), empty_is_unset=True)
    return setting(option, default=False, check=_is(bool))  # type: ignore[no-any-return]


@attrs.frozen(slots=True, kw_only=True)
class WorkerSettings:
    """The worker beside Dynamo.

    Attributes:
        namespace: Already carries the suffix of ``DYN_NAMESPACE_WORKER_SUFFIX``.
        endpoint_types: In the order given.
        discovery_backend: None leaves the choice to Dynamo's runtime; so do the planes.
        dp_ranks: The absolute data-parallel ranks that this worker stands for; None for all behind the endpoint.
        caller_handoff: Whether a request may bring KV transfer parameters of its own (FR-082).
        coalesce: Whether adjacent deltas may be merged into one message when a reader is slower than the engine.
        withdraw_grace_secs: After withdrawal from discovery, how long requests that are already under way to us are
            still taken.
        drain_secs: After that, how long accepted requests may take to end.
        metrics_port: Where ``/live``, ``/health`` and ``/metrics`` are, whatever Dynamo's runtime does; 0 lets the
            system choose, None is nowhere.
    """

    transport: TransportSettings = nested(TransportSettings)
    namespace_worker_suffix: str = setting(
        Option(
            flag=None,
            env="DYN_NAMESPACE_WORKER_SUFFIX",
            parse=parse_text,
            help="Appended to the namespace as -SUFFIX unless it is empty or already present.",
        ),
        default="",
    )
    namespace: str = _text(
        "--namespace",
        "DYN_NAMESPACE",
        "dynamo",
        "Dynamo namespace for discovery.",
        attrs.Converter(
            lambda value, self: namespace_with_suffix(value, self.namespace_worker_suffix) if value else value,
            takes_self=True,
        ),
    )
    component: str = _text("--component", "DYN_COMPONENT", "backend", "Component name within the namespace.")
    endpoint: str = _text("--endpoint", "DYN_ENDPOINT", "generate", "Endpoint name that this worker exposes.")
    endpoint_types: tuple[str, ...] = setting(
        Option(
            flag="--endpoint-types",
            env="DYN_ENDPOINT_TYPES",
            parse=parse_endpoint_types,
            metavar="TYPES",
            help="Comma-separated endpoint types that Dynamo knows, such as chat, completions, embeddings.",
        ),
        default=("chat", "completions"),
        check=check_endpoint_types,
    )
    custom_jinja_template: str | None = setting(
        Option(
            flag="--custom-jinja-template",
            env="DYN_CUSTOM_JINJA_TEMPLATE",
            parse=parse_template,
            metavar="PATH",
            help="Jinja chat template to use instead of the model's own.",
            empty_is_unset=True,
        ),
        default=None,
        converter=none_if_empty,
    )
    dyn_tool_call_parser: str | None = _optional_text(
        "--dyn-tool-call-parser",
        "DYN_TOOL_CALL_PARSER",
        "Tool-call parser that the Dynamo front end uses for this model.",
    )
    dyn_reasoning_parser: str | None = _optional_text(
        "--dyn-reasoning-parser",
        "DYN_REASONING_PARSER",
        "Reasoning parser that the Dynamo front end uses for this model.",
    )
    exclude_tools_when_tool_choice_none: bool = setting(
        Option(
            flag="--exclude-tools-when-tool-choice-none",
            env="DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
            parse=parse_bool,
            choices=("true", "false"),
            help="Leave tools out of the chat template when tool_choice is none.",
        ),
        default=True,
        check=_is(bool),
    )
    disaggregation_mode: DisaggregationMode = setting(
        Option(
            flag="--disaggregation-mode",
            env="DYN_DISAGGREGATION_MODE",
            parse=parse_mode,
            choices=tuple(_MODES),
            help="Role of this worker.",
        ),
        default=DisaggregationMode.AGGREGATED,
        check=_is(DisaggregationMode),
    )
    route_to_encoder: bool = _switch(
        "--route-to-encoder", "DYN_ROUTE_TO_ENCODER", "Declare that this worker needs an encode worker upstream."
    )
    enable_rl: bool = _switch("--enable-rl", "DYN_ENABLE_RL", "Publish the engine's control and update routes.")
    vllm_http_endpoint: HttpEndpoint | None = setting(
        Option(
            flag="--vllm-http-endpoint",
            env="VLLM_HTTP_ENDPOINT",
            parse=HttpEndpoint.parse,
            metavar="URL",
            help="vLLM's HTTP base URL, for RL operations.",
        ),
        default=None,
        check=_is((HttpEndpoint, type(None))),  # type: ignore[arg-type]
    )
    vllm_rl_world_size: int | None = setting(
        Option(
            flag="--vllm-rl-world-size",
            env="DYN_VLLM_RL_WORLD_SIZE",
            parse=whole_number(1, MAX_U32),
            metavar="COUNT",
            help="RL world size, for engines that do not report it.",
        ),
        default=None,
        check=count(1, MAX_U32),
    )
    lora_enabled: bool = _variable("DYN_LORA_ENABLED", "Load, unload and publish LoRA adapters at run time.")
    lora_hot_swap: bool = _variable(
        "DYN_LORA_HOTSWAP_ENABLED", "Replace resident adapters; refused, because the engine contract cannot."
    )
    discovery_backend: str | None = _plane(
        "--discovery-backend",
        "DYN_DISCOVERY_BACKEND",
        ("kubernetes", "etcd", "file", "mem"),
        "How workers and front ends find each other: in the cluster, etcd, a directory (DYN_FILE_KV), or one process.",
        "etcd",
    )
    request_plane: str | None = _plane(
        "--request-plane", "DYN_REQUEST_PLANE", ("tcp", "nats"), "Request transport.", "tcp"
    )
    response_plane: str | None = _plane(
        "--response-plane",
        "DYN_RESPONSE_PLANE",
        ("tcp", "quic"),
        "Response transport; the same on front end and workers.",
        "tcp",
    )
    event_plane: str | None = _plane("--event-plane", "DYN_EVENT_PLANE", ("nats", "zmq"), "Event transport.")
    first_response_secs: float = setting(
        Option(
            flag="--first-response-timeout-secs",
            env="TRIO_SIDECAR_FIRST_RESPONSE_TIMEOUT_SECS",
            parse=duration,
            metavar="SECONDS",
            help="How long the engine may take to a request's first message, queueing included; 0 is no limit.",
        ),
        default=1800.0,
        check=nonnegative_seconds,
    )
    idle_secs: float = setting(
        Option(
            flag="--idle-timeout-secs",
            env="TRIO_SIDECAR_IDLE_TIMEOUT_SECS",
            parse=duration,
            metavar="SECONDS",
            help="How long the engine may be silent between two messages of a request; 0 is no limit.",
        ),
        default=600.0,
        check=nonnegative_seconds,
    )
    hang_check_secs: float = setting(
        Option(
            flag="--hang-check-secs",
            env="TRIO_SIDECAR_HANG_CHECK_SECS",
            parse=duration,
            metavar="SECONDS",
            help="After so much silence towards all who wait, the engine is asked for one token; if that takes as long "
            "again, the worker leaves service until the engine answers; 0 asks never.",
        ),
        default=60.0,
        check=nonnegative_seconds,
    )
    max_inflight_requests: int = setting(
        Option(
            flag="--max-inflight-requests",
            env="TRIO_SIDECAR_MAX_INFLIGHT_REQUESTS",
            parse=whole_number(0, MAX_U32),
            metavar="COUNT",
            help="Requests open at once; further ones are refused, for another worker to take; 0 is no limit.",
        ),
        default=10_000,
        check=count(0, MAX_U32),
    )
    dp_ranks: range | None = setting(
        Option(
            flag="--dp-ranks",
            env="TRIO_SIDECAR_DP_RANKS",
            parse=parse_ranks,
            metavar="A-B",
            help="Stand for these data-parallel ranks of the engine only, so that several workers can share it.",
            absent="all that are behind the endpoint",
        ),
        default=None,
        check=check_ranks,
    )
    caller_handoff: bool = _unless_off(
        "--caller-handoff",
        "TRIO_SIDECAR_CALLER_HANDOFF",
        "Take KV transfer parameters that a client has put into its request; off refuses such requests.",
    )
    coalesce: bool = _unless_off(
        "--coalesce", "TRIO_SIDECAR_COALESCE", "Merge deltas that have queued up into one message."
    )
    withdraw_grace_secs: float = setting(
        Option(
            flag="--withdraw-grace-secs",
            env="DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
            parse=duration,
            metavar="SECONDS",
            help="At shutdown, how long to go on taking requests after withdrawing from discovery.",
        ),
        default=5.0,
        check=nonnegative_seconds,
    )
    drain_secs: float = setting(
        Option(
            flag="--drain-secs",
            env="DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT",
            parse=duration,
            metavar="SECONDS",
            help="At shutdown, how long accepted requests may take to end.",
        ),
        default=30.0,
        check=nonnegative_seconds,
    )
    metrics_port: int | None = setting(
        Option(
            flag="--metrics-port",
            env="TRIO_SIDECAR_WORKER_METRICS_PORT",
            parse=whole_number(0, MAX_PORT),
            metavar="PORT",
            help="Serve /live, /health and /metrics there too, from the first moment on; 0 lets the system choose.",
            empty_is_unset=True,
        ),
        default=None,
        check=count(0, MAX_PORT),
    )
