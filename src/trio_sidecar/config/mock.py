"""Settings of the mock engine (spec 16.1)."""

from __future__ import annotations

import enum
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trio_sidecar.config.fields import (
    Option,
    check_at_least_zero,
    check_not_empty,
    check_range,
    decimal,
    enum_option,
    none_if_empty,
    parse_bool,
    parse_text,
    setting,
    whole_number,
)
from trio_sidecar.config.worker import DisaggregationMode, parse_mode
from trio_sidecar.endpoint import MAX_PORT
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_COUNT = 2**31 - 1
_JSON_NAMES = {
    list: "an array",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
_FIXED_ENGINE_ARGS: dict[str, object] = {"engine_type": "vllm", "dp_size": 1, "worker_type": "aggregated"}


class MockReply(enum.Enum):
    """What the mock engine says: an intelligible text, or ``<token:ID>`` for ids made from seed and position."""

    TEXT = "text"
    TOKENS = "tokens"


def _count(flag: str, env: str, default: int, text: str, least: int = 1) -> int:
    def check(value: int, source: str) -> None:
        check_range(value, source, least, MAX_COUNT)

    option = Option(flag=flag, env=env, parse=whole_number(least, MAX_COUNT), help=text, metavar="COUNT")
    return setting(option, default=default, check=check)  # type: ignore[no-any-return]


def _number(flag: str, env: str, default: float, text: str, metavar: str) -> float:
    option = Option(flag=flag, env=env, parse=decimal, help=text, metavar=metavar)
    return setting(option, default=default, check=check_at_least_zero)  # type: ignore[no-any-return]


def _check_above_zero(value: float, source: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidConfig(source, f"{value:g} is not allowed; use a number greater than 0")


@attrs.frozen(slots=True, kw_only=True)
class MockSettings:
    """The mock engine: what it claims to be, what it says, and how fast.

    Attributes:
        served_model_name: None serves the model under its own name.
        seed: Any signed 64-bit number; decides the tokens.
        max_concurrent_requests: Beyond it requests are refused; there is no queue.
        ttft_ms: Time to the first token, in milliseconds, before the speedup.
        itl_ms: Time between tokens, in milliseconds, before the speedup.
        speedup_ratio: Divides both times.
        max_num_seqs: Requests that run at once; further ones wait, up to ``max_concurrent_requests``.
        num_gpu_blocks: Size of the simulated KV cache, in blocks of ``block_size`` tokens.
        zmq_kv_events_port: Where KV events are published, one port per rank from here on; 0 lets the system choose;
            None publishes none.
        zmq_replay_port: Where they can be asked for again; likewise; None keeps none.
    """

    model: str = setting(
        Option(
            flag="--model", env="TRIO_SIDECAR_MOCK_MODEL", parse=parse_text, metavar="NAME", help="Model id to report."
        ),
        default="mocker-model",
        check=check_not_empty,
    )
    served_model_name: str | None = setting(
        Option(
            flag="--served-model-name",
            env="TRIO_SIDECAR_MOCK_SERVED_MODEL_NAME",
            parse=parse_text,
            metavar="NAME",
            help="Name that clients use; the model id unless given.",
            empty_is_unset=True,
        ),
        default=None,
        converter=none_if_empty,
    )
    disaggregation_mode: DisaggregationMode = setting(
        Option(
            flag="--disaggregation-mode",
            env="DYN_DISAGGREGATION_MODE",
            parse=parse_mode,
            choices=("agg", "prefill", "decode", "encode"),
            help="Role to play.",
        ),
        default=DisaggregationMode.AGGREGATED,
    )
    seed: int = setting(
        Option(
            flag="--seed",
            env="TRIO_SIDECAR_MOCK_SEED",
            parse=whole_number(-(2**63), 2**63 - 1),
            metavar="NUMBER",
            help="Seed of the generated tokens.",
        ),
        default=42,
    )
    max_concurrent_requests: int = _count(
        "--max-concurrent-requests",
        "TRIO_SIDECAR_MOCK_MAX_CONCURRENT_REQUESTS",
        256,
        "Requests beyond this are refused.",
    )
    reply: MockReply = setting(
        enum_option(
            MockReply,
            flag="--reply",
            env="TRIO_SIDECAR_MOCK_REPLY",
            help="An intelligible text, or <token:ID> for every token.",
        ),
        default=MockReply.TEXT,
    )
    ttft_ms: float = _number("--ttft-ms", "TRIO_SIDECAR_MOCK_TTFT_MS", 20.0, "Time to the first token.", "MILLISECONDS")
    itl_ms: float = _number("--itl-ms", "TRIO_SIDECAR_MOCK_ITL_MS", 10.0, "Time between tokens.", "MILLISECONDS")
    speedup_ratio: float = setting(
        Option(
            flag="--speedup-ratio",
            env="TRIO_SIDECAR_MOCK_SPEEDUP_RATIO",
            parse=decimal,
            metavar="FACTOR",
            help="Divides both times.",
        ),
        default=1.0,
        check=_check_above_zero,
    )
    block_size: int = _count("--block-size", "TRIO_SIDECAR_MOCK_BLOCK_SIZE", 16, "Tokens per KV block.")
    num_gpu_blocks: int = _count("--num-gpu-blocks", "TRIO_SIDECAR_MOCK_NUM_GPU_BLOCKS", 16384, "KV blocks.")
    max_num_seqs: int = _count("--max-num-seqs", "TRIO_SIDECAR_MOCK_MAX_NUM_SEQS", 256, "Requests that run at once.")
    max_num_batched_tokens: int = _count(
        "--max-num-batched-tokens", "TRIO_SIDECAR_MOCK_MAX_NUM_BATCHED_TOKENS", 8192, "Tokens per step, as reported."
    )
    max_model_len: int = _count(
        "--max-model-len", "TRIO_SIDECAR_MOCK_MAX_MODEL_LEN", 32768, "Longest prompt and answer together, in tokens."
    )
    enable_prefix_caching: bool = setting(
        Option(
            flag="--enable-prefix-caching",
            env="TRIO_SIDECAR_MOCK_ENABLE_PREFIX_CACHING",
            parse=parse_bool,
            choices=("true", "false"),
            help="Whether the simulated cache is shared between requests.",
        ),
        default=True,
    )
    max_loras: int = _count(
        "--max-loras", "TRIO_SIDECAR_MOCK_MAX_LORAS", 0, "LoRA adapters that fit; 0 makes an engine without LoRA.", 0
    )
    rl_controls: bool = setting(
        Option(
            flag="--rl-controls",
            env="TRIO_SIDECAR_MOCK_RL_CONTROLS",
            parse=parse_bool,
            choices=("true", "false"),
            help="Whether it can be paused, put to sleep and given new weights.",
        ),
        default=False,
    )
    multimodal: bool = setting(
        Option(
            flag="--multimodal",
            env="TRIO_SIDECAR_MOCK_MULTIMODAL",
            parse=parse_bool,
            choices=("true", "false"),
            help="Whether it takes images and videos; an encode server always does.",
        ),
        default=False,
    )
    data_parallel_size: int = _count(
        "--data-parallel-size",
        "TRIO_SIDECAR_MOCK_DATA_PARALLEL_SIZE",
        1,
        "Data-parallel ranks, each with its own cache.",
    )
    zmq_kv_events_port: int | None = attrs.field(default=None)
    zmq_replay_port: int | None = attrs.field(default=None)


def _whole(least: int) -> Callable[[object, str], object]:
    return lambda value, source: check_range(value, source, least, MAX_COUNT)  # type: ignore[arg-type]


def _port(value: object, source: str) -> object:
    return check_range(value, source, 0, MAX_PORT)  # type: ignore[arg-type]


def _ratio(value: object, source: str) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidConfig(source, f"{value!r} is not a number")
    _check_above_zero(value, source)
    return float(value)


def _boolean(value: object, source: str) -> object:
    if not isinstance(value, bool):
        raise InvalidConfig(source, f"{value!r} is not allowed; use true or false")
    return value


_ENGINE_ARGS: dict[str, Callable[[object, str], object]] = {
    "block_size": _whole(1),
    "enable_prefix_caching": _boolean,
    "max_model_len": _whole(1),
    "max_num_batched_tokens": _whole(1),
    "max_num_seqs": _whole(1),
    "num_gpu_blocks": _whole(1),
    "speedup_ratio": _ratio,
    "zmq_kv_events_port": _port,
    "zmq_replay_port": _port,
}


def parse_engine_args(text: str, source: str = "--extra-engine-args") -> dict[str, object]:
    """Fields of :class:`MockSettings` from inline JSON, or from a JSON file.

    Args:
        text: An object if it begins with a brace, else a path. Members may be nested under ``engine``.
        source: The flag to name in messages.

    Raises:
        InvalidConfig: The file cannot be read, the JSON is broken, a member is unknown or out of range, or it describes
            another engine than one aggregated vLLM without data parallelism (R16.1).
    """
    flat = _load_object(text, source)
    inner = flat.pop("engine", None)
    if inner is not None:
        if not isinstance(inner, dict):
            raise InvalidConfig(source, "member 'engine' must be an object")
        twice = sorted(flat.keys() & inner.keys())
        if twice:
            raise InvalidConfig(source, f"member '{twice[0]}' is given twice, once under 'engine'")
        flat |= inner
    for name, only in _FIXED_ENGINE_ARGS.items():
        given = flat.pop(name, only)
        if given != only or isinstance(given, bool):
            raise InvalidConfig(source, f"{name} {given!r} is not supported; the mock engine allows only {only!r}")
    values: dict[str, object] = {}
    for name, value in flat.items():
        if name not in _ENGINE_ARGS:
            allowed = ", ".join([*_ENGINE_ARGS, *_FIXED_ENGINE_ARGS])
            raise InvalidConfig(source, f"member {name!r} is unknown; allowed are {allowed}")
        values[name] = _ENGINE_ARGS[name](value, f"{source} {name}")
    return values


def _load_object(text: str, source: str) -> dict[str, Any]:
    inline = text.lstrip()[:1] in ("{", "[", '"')  # the last two are JSON of the wrong kind rather than a path
    try:
        loaded = json.loads(text if inline else Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(source, f"cannot read the file {text!r}: {error.strerror or error}") from error
    except ValueError as error:
        where = "the inline JSON" if inline else repr(text)
        raise InvalidConfig(source, f"{where} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise InvalidConfig(source, f"must hold a JSON object, not {_JSON_NAMES[type(loaded)]}")
    return loaded
