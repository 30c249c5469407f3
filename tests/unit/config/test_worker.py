"""Settings of the worker and its connections (spec 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trio_sidecar.config import DisaggregationMode, TransportSettings, WorkerSettings, namespace_with_suffix, resolve
from trio_sidecar.config.fields import options_of
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ENDPOINT = {"--grpc-endpoint": "127.0.0.1:50051"}
TRANSPORT_FLAGS = (
    "--grpc-connections",
    "--grpc-connect-attempt-timeout-secs",
    "--grpc-retry-interval-secs",
    "--grpc-startup-deadline-secs",
)
# The whole option list of the Rust sidecar 1.6.1, from its --help: flag, variable, default.
RUST_OPTIONS = {
    "--discovery-backend": ("DYN_DISCOVERY_BACKEND", None),
    "--request-plane": ("DYN_REQUEST_PLANE", None),
    "--response-plane": ("DYN_RESPONSE_PLANE", None),
    "--event-plane": ("DYN_EVENT_PLANE", None),
    "--namespace": ("DYN_NAMESPACE", "dynamo"),
    "--component": ("DYN_COMPONENT", "backend"),
    "--endpoint": ("DYN_ENDPOINT", "generate"),
    "--endpoint-types": ("DYN_ENDPOINT_TYPES", ("chat", "completions")),
    "--custom-jinja-template": ("DYN_CUSTOM_JINJA_TEMPLATE", None),
    "--dyn-tool-call-parser": ("DYN_TOOL_CALL_PARSER", None),
    "--dyn-reasoning-parser": ("DYN_REASONING_PARSER", None),
    "--exclude-tools-when-tool-choice-none": ("DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", True),
    "--disaggregation-mode": ("DYN_DISAGGREGATION_MODE", DisaggregationMode.AGGREGATED),
    "--route-to-encoder": ("DYN_ROUTE_TO_ENCODER", False),
    "--enable-rl": ("DYN_ENABLE_RL", False),
    "--grpc-endpoint": ("DYN_SIDECAR_GRPC_ENDPOINT", "required"),
    "--grpc-connections": ("DYN_SIDECAR_GRPC_CONNECTIONS", 8),
    "--grpc-connect-attempt-timeout-secs": ("DYN_SIDECAR_GRPC_CONNECT_ATTEMPT_TIMEOUT_SECS", 30.0),
    "--grpc-retry-interval-secs": ("DYN_SIDECAR_GRPC_RETRY_INTERVAL_SECS", 1.0),
    "--grpc-startup-deadline-secs": ("DYN_SIDECAR_GRPC_STARTUP_DEADLINE_SECS", 1800.0),
    "--vllm-http-endpoint": ("VLLM_HTTP_ENDPOINT", None),
    "--vllm-rl-world-size": ("DYN_VLLM_RL_WORLD_SIZE", None),
}


def worker(flags: Mapping[str, str | bool] | None = None, **env: str) -> WorkerSettings:
    return resolve(WorkerSettings, flags={**ENDPOINT, **(flags or {})}, environ=env)


def test_every_option_of_the_rust_sidecar_is_there() -> None:
    """Same flag, same variable, same default: a deployment can swap the one for the other."""
    ours = {
        source.option.flag: (source.option.env, "required" if source.required else source.default)
        for source in options_of(WorkerSettings)
        if source.option.flag in RUST_OPTIONS
    }

    assert RUST_OPTIONS == ours


@pytest.mark.rule("R2.1")
def test_transport_defaults() -> None:
    """Only the endpoint has to be given."""
    assert TransportSettings(
        grpc_endpoint=GrpcEndpoint(host="127.0.0.1", port=50051),
        grpc_connections=8,
        grpc_connect_attempt_timeout_secs=30.0,
        grpc_retry_interval_secs=1.0,
        grpc_startup_deadline_secs=1800.0,
        max_message_bytes=64 << 20,
    ) == (worker().transport)


@pytest.mark.rule("R2.2")
def test_transport_overrides() -> None:
    """Each of the four numbers can be given."""
    transport = worker(dict(zip(TRANSPORT_FLAGS, ["2", "7", "3", "11"], strict=True))).transport

    assert (2, 7.0, 3.0, 11.0) == (
        transport.grpc_connections,
        transport.grpc_connect_attempt_timeout_secs,
        transport.grpc_retry_interval_secs,
        transport.grpc_startup_deadline_secs,
    )


@pytest.mark.rule("R2.3")
@pytest.mark.parametrize("flag", TRANSPORT_FLAGS)
def test_zero_is_refused_for_the_transport_flags(flag: str) -> None:
    """Zero connections or seconds make no sense."""
    with pytest.raises(InvalidConfig, match=f"{flag}: 0 is not allowed"):
        worker({flag: "0"})


@pytest.mark.rule("R2.4")
def test_rl_world_size_zero_is_refused() -> None:
    """The message names the flag."""
    with pytest.raises(InvalidConfig, match="--vllm-rl-world-size: 0 is not allowed"):
        worker({"--vllm-rl-world-size": "0"})


def test_rl_world_size_is_an_unsigned_32_bit_number() -> None:
    """The largest is 4294967295."""
    assert 4294967295 == worker({"--vllm-rl-world-size": "4294967295"}).vllm_rl_world_size
    with pytest.raises(InvalidConfig, match="4294967295"):
        worker({"--vllm-rl-world-size": "4294967296"})


@pytest.mark.rule("R2.9")
def test_startup_deadline_beyond_the_clock_is_refused() -> None:
    """The largest number that the Rust tool's type holds is refused by naming the clock range, as there."""
    with pytest.raises(InvalidConfig, match=r"DYN_SIDECAR_GRPC_STARTUP_DEADLINE_SECS: .* monotonic clock range"):
        worker(DYN_SIDECAR_GRPC_STARTUP_DEADLINE_SECS="18446744073709551615")


@pytest.mark.rule("R2.10")
def test_bad_http_endpoint_names_its_flag() -> None:
    """A relative URL is no base URL."""
    with pytest.raises(InvalidConfig, match="--vllm-http-endpoint"):
        worker({"--vllm-http-endpoint": "x"})


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("agg", DisaggregationMode.AGGREGATED),
        ("aggregated", DisaggregationMode.AGGREGATED),
        ("prefill", DisaggregationMode.PREFILL),
        ("decode", DisaggregationMode.DECODE),
        ("encode", DisaggregationMode.ENCODE),
    ],
)
def test_modes_by_name(text: str, mode: DisaggregationMode) -> None:
    """Four roles, and one long name."""
    assert mode is worker({"--disaggregation-mode": text}).disaggregation_mode


@pytest.mark.parametrize("text", ["AGG", "", "x"])
def test_unknown_mode_lists_the_known_ones(text: str) -> None:
    """The message says what is allowed."""
    with pytest.raises(InvalidConfig, match="use agg, prefill, decode, encode"):
        worker({"--disaggregation-mode": text})


@pytest.mark.parametrize(
    ("namespace", "suffix", "full"),
    [
        ("dynamo", "", "dynamo"),
        ("dynamo", "a1", "dynamo-a1"),
        ("dynamo-a1", "a1", "dynamo-a1"),
        ("dynamoa1", "a1", "dynamoa1-a1"),
    ],
)
def test_namespace_suffix_is_appended_once(namespace: str, suffix: str, full: str) -> None:
    """The suffix of rolling updates is appended unless it is empty or already there."""
    assert full == namespace_with_suffix(namespace, suffix)
    assert full == worker({"--namespace": namespace}, DYN_NAMESPACE_WORKER_SUFFIX=suffix).namespace


@pytest.mark.parametrize("variable", ["DYN_NAMESPACE", "DYN_COMPONENT", "DYN_ENDPOINT"])
def test_names_must_not_be_empty(variable: str) -> None:
    """An empty name would register nowhere."""
    with pytest.raises(InvalidConfig, match=f"{variable}: must not be empty"):
        resolve(WorkerSettings, flags=ENDPOINT, environ={variable: ""})


def test_endpoint_types_keep_their_order_and_lose_their_spaces() -> None:
    """A comma-separated list."""
    assert ("completions", "chat") == worker({"--endpoint-types": "completions, chat"}).endpoint_types


def test_endpoint_types_are_those_that_dynamo_knows() -> None:
    """In any case of letters; another is refused before anything starts."""
    assert ("chat", "embeddings") == worker({"--endpoint-types": "Chat,embeddings"}).endpoint_types
    with pytest.raises(InvalidConfig, match="--endpoint-types: 'foo' is not allowed; use chat, completions, embedding"):
        worker({"--endpoint-types": "chat,foo"})


def test_a_template_must_be_a_file_that_is_there(tmp_path: Path) -> None:
    """Dynamo would look only after the engine has come up; an empty variable means none."""
    path = tmp_path / "template.jinja"
    with pytest.raises(InvalidConfig, match=r"--custom-jinja-template: cannot read .*: No such file"):
        worker({"--custom-jinja-template": str(path)})
    with pytest.raises(InvalidConfig, match=r"--custom-jinja-template: cannot read .*: Is a directory"):
        worker({"--custom-jinja-template": str(tmp_path)})
    path.write_text("{{ messages }}", encoding="utf-8")
    assert str(path) == worker({"--custom-jinja-template": str(path)}).custom_jinja_template
    assert resolve(WorkerSettings, flags=ENDPOINT, environ={"DYN_CUSTOM_JINJA_TEMPLATE": ""})


@pytest.mark.parametrize("text", ["", ",", "chat,", "chat,,completions"])
def test_endpoint_types_must_not_be_empty(text: str) -> None:
    """An empty entry is a mistake."""
    with pytest.raises(InvalidConfig, match="--endpoint-types: must be a comma-separated list"):
        worker({"--endpoint-types": text})


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [
        ("--discovery-backend", "kubernetes, etcd, file, mem"),
        ("--request-plane", "tcp, nats"),
        ("--response-plane", "tcp, quic"),
        ("--event-plane", "nats, zmq"),
        ("--exclude-tools-when-tool-choice-none", "true, false"),
        ("--coalesce", "on, off"),
    ],
)
def test_choices_are_listed(flag: str, allowed: str) -> None:
    """A word that is not known is answered with those that are."""
    with pytest.raises(InvalidConfig, match=f"{flag}: 'http' is not allowed; use {allowed}"):
        worker({flag: "http"})


def test_empty_optional_names_are_unset() -> None:
    """Empty variables, as deployment templates write them, ask for no parser and no template."""
    settings = worker(DYN_TOOL_CALL_PARSER="", DYN_REASONING_PARSER="", DYN_CUSTOM_JINJA_TEMPLATE="")

    assert (None, None, None) == (
        settings.dyn_tool_call_parser,
        settings.dyn_reasoning_parser,
        settings.custom_jinja_template,
    )


def test_shutdown_times_come_from_dynamos_variables() -> None:
    """Zero is allowed: it means not to wait."""
    settings = worker(DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0", DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="2.5")

    assert (0.0, 2.5) == (settings.withdraw_grace_secs, settings.drain_secs)


@pytest.mark.rule("R2.11")
def test_adapters_are_switched_by_dynamos_variables() -> None:
    """Off, unless the variable says so."""
    assert (False, False) == (worker().lora_enabled, worker().lora_hot_swap)
    settings = worker(DYN_LORA_ENABLED="true", DYN_LORA_HOTSWAP_ENABLED="1")
    assert (True, True) == (settings.lora_enabled, settings.lora_hot_swap)


@pytest.mark.parametrize("bad", ["x", None, 5])
def test_endpoint_must_be_parsed(bad: object) -> None:
    """Code cannot pass an unparsed endpoint."""
    with pytest.raises(InvalidConfig, match="--grpc-endpoint: must be a GrpcEndpoint"):
        TransportSettings(grpc_endpoint=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0-3", range(4)), ("4-4", range(4, 5)), ("7", range(7, 8)), ("4294967295", range(2**32 - 1, 2**32))],
)
def test_dp_ranks(text: str, ranks: range) -> None:
    """Both ends belong to the range; one number is one rank; a variable says the same."""
    assert ranks == worker({"--dp-ranks": text}).dp_ranks
    assert ranks == worker(TRIO_SIDECAR_DP_RANKS=text).dp_ranks
    assert worker().dp_ranks is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no range of ranks; allowed are A-B and A"),
        ("1-", "no range of ranks"),
        ("-1", "no range of ranks"),
        ("1-2-3", "no range of ranks"),
        ("a-b", "no range of ranks"),
        ("٣", "no range of ranks"),
        ("3-2", "ends before it begins"),
        ("0-4294967296", "4294967295"),
    ],
)
def test_dp_ranks_that_are_none(text: str, reason: str) -> None:
    """The error names the flag and what is allowed."""
    with pytest.raises(InvalidConfig, match="--dp-ranks") as caught:
        worker({"--dp-ranks": text})
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "value", [range(0), range(0, 4, 2), range(-1, 2), range(3, 0, -1), range(2**32, 2**32 + 1), (0, 3)]
)
def test_dp_ranks_in_code(value: object) -> None:
    """A settings object holds an ascending, non-empty range or nothing."""
    with pytest.raises(InvalidConfig, match=r"dp_ranks|--dp-ranks"):
        WorkerSettings(transport=worker().transport, dp_ranks=value)  # type: ignore[arg-type]
