from __future__ import annotations

from typing import Any

import pytest

from support.conversion import dig, refused, wire
from support.samples import minimal_request, model_facts
from trio_sidecar.convert.struct import json_from_struct


def with_extras(extra_args: Any, **changes: Any) -> dict[str, Any]:
    return minimal_request(extra_args=extra_args, **changes)


@pytest.mark.rule("7.7")
@pytest.mark.parametrize(
    ("extra_args", "bypass"),
    [
        ({}, False),
        (None, False),
        ({"bypass_prefix_cache": True}, True),
        ({"bypass_prefix_cache": False}, False),
        ({"skip_reading_prefix_cache": True}, True),
        ({"skip_reading_prefix_cache": False}, False),
        ({"bypass_prefix_cache": False, "skip_reading_prefix_cache": True}, False),
        ({"bypass_prefix_cache": True, "skip_reading_prefix_cache": False}, True),
    ],
    ids=str,
)
def test_prefix_cache_bypass(extra_args: object, bypass: bool) -> None:
    """The bypass is read under both names, and the canonical one wins."""
    assert bypass is dig(wire(with_extras(extra_args)), "kv.bypass_prefix_cache")


@pytest.mark.rule("7.7", "R7.21", "R7.22", "R7.23", "R7.27", "R7.32")
@pytest.mark.parametrize(
    ("extra_args", "named"),
    [
        ({"bypass_prefix_cache": 0}, "extra_args.bypass_prefix_cache must be a boolean, got 0"),
        (
            {"bypass_prefix_cache": True, "skip_reading_prefix_cache": "x"},
            "extra_args.skip_reading_prefix_cache must be a boolean",
        ),
        ([], "extra_args must be a JSON object, got an array"),
        (
            {"unknown": True},
            (
                "extra_args.unknown is not supported by vLLM gRPC; allowed are bypass_prefix_cache, "
                "skip_reading_prefix_cache, kv_transfer_params, nvext"
            ),
        ),
        ({"messages": []}, "extra_args.messages"),
        ({"formatted_prompt": "x"}, "extra_args.formatted_prompt"),
        ({"mm_hashes": []}, "extra_args.mm_hashes"),
        ({"nvext": "x"}, "extra_args.nvext is not supported"),
        ({"nvext": None}, "extra_args.nvext is not supported"),
        ({"kv_transfer_params": []}, "kv_transfer_params must be a JSON object, got an array"),
        ({"kv_transfer_params": None}, "kv_transfer_params must be a JSON object, got null"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_the_engine_would_not_see_is_refused(extra_args: object, named: str) -> None:
    """Whatever is not on the whitelist, or not of its type, is refused by name."""
    assert named in refused(with_extras(extra_args))


@pytest.mark.rule("7.10")
def test_a_callers_handoff_passes_as_it_is() -> None:
    """In aggregated mode the caller's payload reaches the engine unchanged."""
    payload = {"do_remote_decode": False, "remote_port": 5600, "blocks": [7, None]}
    struct = dig(wire(with_extras({"kv_transfer_params": payload})), "kv.kv_transfer_params")
    assert payload == json_from_struct(struct, label="kv")  # type: ignore[arg-type]


@pytest.mark.rule("R7.24", "R7.25", "R7.26", "R7.28")
@pytest.mark.parametrize(
    "nvext",
    [
        {},
        {"cache_salt": "cache-salt"},
        {"token_in": True},
        {"extra_fields": []},
        {"extra_fields": ["worker_id", "timing"]},
        {"cache_salt": "cache-salt", "token_in": True, "extra_fields": ["timing"]},
    ],
    ids=str,
)
def test_consumed_nvext_leaves_no_trace(nvext: dict[str, Any]) -> None:
    """What the extension may hold is honoured elsewhere and changes nothing on the wire."""
    routing = {"cache_namespace": "cache-salt"}
    assert wire(minimal_request(routing=routing)) == wire(with_extras({"nvext": nvext}, routing=routing))


@pytest.mark.rule("R7.24", "R7.25", "R7.26", "R7.28")
@pytest.mark.parametrize(
    ("nvext", "named"),
    [
        ({"cache_salt": "other"}, "extra_args.nvext.cache_salt does not match"),
        ({"cache_salt": ""}, "extra_args.nvext.cache_salt must be a non-empty string"),
        ({"cache_salt": 1}, "extra_args.nvext.cache_salt must be a non-empty string, got 1"),
        ({"token_in": False}, "token_in must be true, got false"),
        ({"token_in": 1}, "token_in must be true, got 1"),
        (
            {"extra_fields": ["engine_data"]},
            (
                "extra_args.nvext.extra_fields: the text 'engine_data' is not supported by vLLM gRPC; allowed are "
                "timing, worker_id"
            ),
        ),
        ({"extra_fields": [1]}, "extra_args.nvext.extra_fields: 1 is not supported"),
        (
            {"agent_hints": {}},
            (
                "extra_args.nvext.agent_hints is not supported by vLLM gRPC; allowed are cache_salt, token_in, "
                "extra_fields"
            ),
        ),
    ],
    ids=str,
)
def test_refused_nvext(nvext: dict[str, Any], named: str) -> None:
    """Anything else in the extension is refused by name."""
    assert named in refused(with_extras({"nvext": nvext}, routing={"cache_namespace": "cache-salt"}))


@pytest.mark.rule("R7.24")
def test_a_salt_without_a_namespace_is_refused() -> None:
    """A salt that the router did not turn into a namespace would not isolate anything."""
    assert "does not match" in refused(with_extras({"nvext": {"cache_salt": "cache-salt"}}))


@pytest.mark.rule("R7.29")
def test_extra_fields_must_be_an_array() -> None:
    """The message has exactly this text."""
    message = refused(with_extras({"nvext": {"extra_fields": "worker_id"}}))
    assert "InvalidRequest: extra_args.nvext.extra_fields must be an array" == message


@pytest.mark.rule("R7.30")
@pytest.mark.parametrize("hints", [{"reasoning_parser_kwargs": {"a": 1}}, {"reasoning_ended": False}], ids=str)
def test_reasoning_hints(hints: dict[str, Any]) -> None:
    """Hints for a reasoning parser are dropped when the engine has none, and refused when it has one."""
    for blank in ("", "  "):
        assert wire(minimal_request()) == wire(with_extras(hints), model_facts(reasoning_parser=blank))
    message = refused(with_extras(hints))
    assert "is not supported by vLLM gRPC" in message
    assert f"extra_args.{next(iter(hints))}" in message
