"""``vllm.Control`` and health on both servers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from support.deviations import deviation
from support.parity import read, refusal, request
from support.vllm_servers import ALIAS, CONTEXT_LENGTH, MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.parity import Pair, Server

HELLO = "Hello"
BAD, MISSING, EXISTS, NOT_NOW = "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION"
OK: tuple[str, dict[str, Any]] = ("OK", {})
SERVICES = ("", "vllm.Inference", "vllm.Control")
LONG = {"max_new_tokens": 120, "ignore_eos": True}
QUEUED_SECONDS = 0.3


@pytest.mark.parametrize("service", [*SERVICES, "nobody", "grpc.health.v1.Health"])
def test_health(both: Pair, service: str) -> None:
    """The three names are served from the start; others are unknown, to a watch as well."""
    expected = "SERVING" if service in SERVICES else MISSING
    for server in both:
        assert expected == server.health(service)
        watch = server.watch(service)
        if service in SERVICES:
            assert 1 == next(watch).status
            watch.cancel()
            continue
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
        assert MISSING == refusal(caught.value).code


@pytest.mark.parametrize("name", ["both", "plain"])
def test_server_info(name: str, request: pytest.FixtureRequest) -> None:
    """Everything that is not the instance's own, or newer than vllm-rs 0.32.0."""
    pair: Pair = request.getfixturevalue(name)
    (code, ours), (_, theirs) = (server.control("GetServerInfo") for server in pair)
    deviation("proto-version")
    assert ("0.6.0", None) == (ours.pop("proto_version"), theirs.pop("proto_version", "") or None)
    assert ours.pop("instance_id") != theirs.pop("instance_id")
    assert ("OK", theirs) == (code, ours)
    assert ("vllm", CONTEXT_LENGTH) == (ours["api_version"], ours["max_model_len"])


@pytest.mark.parametrize("name", ["both", "plain"])
def test_model_info(name: str, request: pytest.FixtureRequest) -> None:
    """The model's names and abilities."""
    pair: Pair = request.getfixturevalue(name)
    code, info = pair.control("GetModelInfo")
    aliases = [ALIAS] if name == "both" else []
    assert ("OK", MODEL, aliases) == (code, info["served_model_name"], info["served_model_aliases"])
    assert (name == "both") == info["supports_lora"]


def test_kv_event_sources(both: Pair, plain: Pair) -> None:
    """One per rank with the port that was bound, if events are on; none otherwise."""
    found = []
    for server in both:
        code, answer = server.control("GetKvEventSources")
        (source,) = answer["sources"]
        source["host"], _, port = source.pop("endpoint").rpartition(":")
        assert "OK" == code
        assert int(port) > 0
        found.append(source)
    assert found[0] == found[1]
    assert ("zmq", "msgpack", "kv", 1) == tuple(
        found[0][name] for name in ("transport", "encoding", "topic", "schema_version")
    )
    assert ("OK", {"sources": []}) == plain.control("GetKvEventSources")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Sleep", {}),
        ("Sleep", {"level": 7, "mode": 9}),
        ("WakeUp", {}),
        ("WakeUp", {"tags": ["nobody"]}),
        ("InitWeightTransferEngine", {"init_info_json": b"{}"}),
        ("InitWeightTransferEngine", {"init_info_json": b"x"}),
        ("UpdateWeights", {"update_info_json": b"{}"}),
        ("UpdateWeights", {"update_info_json": b""}),
        ("StartWeightUpdate", {}),
        ("StartDraftWeightUpdate", {}),
        ("FinishWeightUpdate", {}),
        ("FinishWeightUpdate", {"weight_version": ""}),
    ],
    ids=str,
)
def test_what_the_engine_cannot(both: Pair, name: str, fields: dict[str, Any]) -> None:
    """An engine without sleep mode or weight transfer says so before it looks at arguments."""
    assert (NOT_NOW, {}) == both.control(name, **fields)


def test_weight_version(both: Pair) -> None:
    """It has a name from the start, takes another, and no blank one."""
    assert ("OK", {"weight_version": "default"}) == both.control("GetWeightVersion")
    assert OK == both.control("UpdateWeightVersion", weight_version="v2")
    assert [(BAD, {})] * 2 == [both.control("UpdateWeightVersion", weight_version=blank) for blank in ("", " ")]
    assert ("OK", {"weight_version": "v2"}) == both.control("GetWeightVersion")
    assert OK == both.control("UpdateWeightVersion", weight_version="default")


def paused(server: Server) -> tuple[Any, Any]:
    """What the server says of itself."""
    return server.control("IsPaused")[1]["paused"], server.control("IsSleeping")[1]["sleeping"]


@pytest.mark.parametrize("mode", [0, 1, 2, 3], ids=["unspecified", "abort", "wait", "keep"])
def test_pause(both: Pair, mode: int) -> None:
    """What runs ends, is waited for, or freezes; what comes waits; health stays; both calls may be repeated."""
    for server in both:
        stream = server.open(request(HELLO, stopping=LONG))
        found = [next(stream) for _ in range(4)]
        try:
            assert OK == server.control("PauseGeneration", mode=mode)
            assert (True, True) == paused(server)
            assert ["SERVING"] * 3 == [server.health(service) for service in SERVICES]
            if mode != 3:
                finish = read([*found, *stream]).finish
                ended = mode == 2
                assert ("LENGTH" if ended else "ABORTED") == finish["finish_reason"]
                assert ended == (LONG["max_new_tokens"] == finish["num_output_tokens"])
            late = server.open(request(HELLO, stopping={"max_new_tokens": 3, "ignore_eos": True}))
            late.initial_metadata()
            time.sleep(QUEUED_SECONDS)
            assert late.is_active()
            assert OK == server.control("PauseGeneration", mode=3)
        finally:
            assert [OK, OK] == [server.control("ResumeGeneration") for _ in range(2)]
        assert (False, False) == paused(server)
        assert ("LENGTH", "", None) == read(late).end
        if mode == 3:
            assert LONG["max_new_tokens"] == read([*found, *stream]).finish["num_output_tokens"]


def test_unknown_pause_mode(both: Pair) -> None:
    """A number that the enum does not have is refused, and pauses nothing."""
    assert (BAD, {}) == both.control("PauseGeneration", mode=9)
    assert [(False, False)] * 2 == [paused(server) for server in both]


@pytest.fixture
def adapters(both: Pair) -> Iterator[None]:
    """Leave no adapter behind."""
    yield
    for name in [adapter["lora_name"] for adapter in both.ours.control("ListLoras")[1]["adapters"]]:
        both.ours.control("UnloadLora", lora_name=name)


def places(root: Path) -> list[tuple[str, str, str]]:
    """Loads that fail: status, name, path; ``model`` is a folder without an adapter."""
    good = str(root / "adapter")
    return [
        (BAD, "", good),
        (BAD, " ", good),
        (BAD, "poet", ""),
        (BAD, "poet", " "),
        (BAD, "poet", "./adapter"),
        (BAD, "poet", "~/adapter"),
        (BAD, "poet", "a/../adapter"),
        (BAD, "poet", str(root / "missing")),
        (BAD, "poet", "/etc"),
        ("INTERNAL", "poet", str(root / "model")),
        ("INTERNAL", "poet", "somebody/something"),
        (EXISTS, MODEL, good),
        (EXISTS, ALIAS, good),
    ]


def test_adapters_that_cannot_be_loaded(both: Pair, model: Any, adapters: None) -> None:
    """Each row of the table, but those that need an adapter that is loaded."""
    for code, name, path in places(model.root):
        assert (code, {}) == both.control("LoadLora", lora_name=name, source_path=path), (name, path)
    assert (BAD, {}) == both.control("UnloadLora", lora_name=" ")
    assert (MISSING, {}) == both.control("UnloadLora", lora_name="nobody")
    assert ("OK", {"adapters": []}) == both.control("ListLoras")


def test_adapters(both: Pair, model: Any, adapters: None) -> None:
    """Ours loads, serves and unloads an adapter; the engine of vllm-rs 0.32.0 refuses what its server asks for."""
    load = {"lora_name": "poet", "source_path": str(model.adapter)}
    deviation("lora-load")
    assert "INTERNAL" == both.theirs.control("LoadLora", **load)[0]
    code, answer = both.ours.control("LoadLora", **load)
    adapter = answer["adapter"]
    assert ("OK", load) == (code, {name: adapter[name] for name in load})
    assert int(adapter["lora_id"]) > 0
    assert (EXISTS, {}) == both.ours.control("LoadLora", **load)
    assert ("OK", {"adapters": [adapter]}) == both.ours.control("ListLoras")
    stopping = {"max_new_tokens": 8, "ignore_eos": True}
    base = both.ours.stream(request(HELLO, stopping=stopping)).said["text"]
    adapted = both.ours.stream(request(HELLO, stopping=stopping, lora_name="poet")).said["text"]
    assert base != adapted
    assert MISSING == both.ours.unary(request(HELLO, model="poet", stopping=stopping)).code
    assert ("OK", {"adapter": adapter}) == both.ours.control("UnloadLora", lora_name="poet")
    assert (MISSING, {}) == both.ours.control("UnloadLora", lora_name="poet")
    assert MISSING == both.ours.unary(request(HELLO, lora_name="poet", stopping=stopping)).code
    code, answer = both.ours.control("LoadLora", **load)
    assert int(answer["adapter"]["lora_id"]) > int(adapter["lora_id"])


def test_a_server_without_adapters(plain: Pair) -> None:
    """It cannot, whatever the name, but for a blank one to unload."""
    for call in ("LoadLora", "UnloadLora"):
        assert (NOT_NOW, {}) == plain.control(call, lora_name="poet")
    assert (NOT_NOW, {}) == plain.control("LoadLora", lora_name="")
    assert (BAD, {}) == plain.control("UnloadLora", lora_name="")
    assert (NOT_NOW, {}) == plain.control("ListLoras")
