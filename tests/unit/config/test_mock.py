"""Settings of the mock engine (spec 16.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trio_sidecar.config import DisaggregationMode, MockReply, MockSettings, parse_engine_args, resolve
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path


def mock(**flags: str) -> MockSettings:
    given: dict[str, str | bool] = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return resolve(MockSettings, flags=given, environ={})


def test_defaults() -> None:
    """The defaults are those of the reference mocker, and a reply that people can read."""
    settings = mock()

    assert ("mocker-model", None, DisaggregationMode.AGGREGATED, 42, 256, MockReply.TEXT) == (
        settings.model,
        settings.served_model_name,
        settings.disaggregation_mode,
        settings.seed,
        settings.max_concurrent_requests,
        settings.reply,
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_concurrent_requests": "0"}, "--max-concurrent-requests: 0 is not allowed"),
        ({"model": " "}, "--model: must not be empty"),
        ({"disaggregation_mode": "router"}, "use agg, prefill, decode, encode"),
        ({"multimodal": "some"}, "--multimodal: 'some' is not allowed; use true, false"),
        ({"ttft_ms": "-1"}, "--ttft-ms: -1.0 is not allowed; use a number of at least 0"),
        ({"itl_ms": "inf"}, "--itl-ms: 'inf' is not a finite number"),
        ({"speedup_ratio": "0"}, "--speedup-ratio: 0 is not allowed; use a number greater than 0"),
        ({"speedup_ratio": "-1"}, "--speedup-ratio: -1 is not allowed; use a number greater than 0"),
        ({"reply": "poem"}, "--reply: 'poem' is not allowed; use text, tokens"),
        ({"num_gpu_blocks": "0"}, "--num-gpu-blocks: 0 is not allowed"),
        ({"seed": "9223372036854775808"}, "--seed"),
    ],
)
def test_refusals_name_the_flag(flags: dict[str, str], words: str) -> None:
    """A value out of range is refused with the flag, the value and what is allowed."""
    with pytest.raises(InvalidConfig, match=words):
        mock(**flags)


@pytest.mark.rule("R16.2")
def test_engine_args_are_flat_or_nested() -> None:
    """Older and newer builds of the reference nest differently."""
    expected = {"block_size": 32, "speedup_ratio": 2.0, "enable_prefix_caching": False}

    assert expected == parse_engine_args('{"block_size": 32, "speedup_ratio": 2, "enable_prefix_caching": false}')
    assert expected == parse_engine_args(
        ' {"engine": {"block_size": 32, "enable_prefix_caching": false}, "speedup_ratio": 2, "engine_type": "vllm"}'
    )


def test_engine_args_from_a_file(tmp_path: Path) -> None:
    """Text that does not begin with a brace is a path."""
    path = tmp_path / "args.json"
    path.write_text('{"max_model_len": 8, "dp_size": 1}')

    assert {"max_model_len": 8} == parse_engine_args(str(path))


def test_flags_win_over_engine_args() -> None:
    """A file is weaker than a flag."""
    settings = resolve(
        MockSettings,
        flags={"--block-size": "8"},
        environ={},
        fallback=parse_engine_args('{"block_size": 32, "max_model_len": 9}'),
    )

    assert (8, 9) == (settings.block_size, settings.max_model_len)


@pytest.mark.rule("R16.1")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"engine_type": "sglang"}', "engine_type 'sglang'"),
        ('{"dp_size": 2}', "dp_size 2"),
        ('{"dp_size": true}', "dp_size True"),
        ('{"worker_type": "prefill"}', "worker_type 'prefill'"),
        ('{"num_gpu_blocks": 0}', "num_gpu_blocks: 0 is not allowed"),
        ('{"block_size": 1.5}', "block_size: 1.5 is not a whole number"),
        ('{"block_size": true}', "block_size: True is not a whole number"),
        ("[]", "must hold a JSON object, not an array"),
        ('{"speedup_ratio": "fast"}', "speedup_ratio: 'fast' is not a number"),
        ('{"enable_prefix_caching": 1}', "enable_prefix_caching: 1 is not allowed; use true or false"),
        ('{"blocksize": 1}', "member 'blocksize' is unknown; allowed are block_size"),
        ('{"engine": 1}', "member 'engine' must be an object"),
        ('{"engine": {"block_size": 1}, "block_size": 2}', "'block_size' is given twice"),
        ('{"block_size": ', "the inline JSON is not valid JSON"),
        ("/nowhere/args.json", "cannot read the file '/nowhere/args.json'"),
    ],
)
def test_engine_args_refusals_name_the_member(text: str, words: str) -> None:
    """A member that is unknown, out of range or for another engine is refused by name."""
    with pytest.raises(InvalidConfig) as caught:
        parse_engine_args(text)

    assert words in str(caught.value)


def test_engine_args_file_must_hold_an_object(tmp_path: Path) -> None:
    """A list is no set of arguments."""
    path = tmp_path / "args.json"
    path.write_text("[1]")
    with pytest.raises(InvalidConfig, match="must hold a JSON object, not an array"):
        parse_engine_args(str(path))
