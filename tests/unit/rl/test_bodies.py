"""What bodies of controls and updates may hold (spec 12.2, 12.3)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from trio_sidecar.errors import ErrorKind, InvalidRequest
from trio_sidecar.rl import bodies, check_control_body
from trio_sidecar.wire import PauseMode

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("text", "mode"), [("abort", PauseMode.ABORT), ("wait", PauseMode.WAIT), ("keep", PauseMode.KEEP)]
)
def test_modes_have_names(text: str, mode: PauseMode) -> None:
    """Each way to pause has its word, for a pause and for sleep alike."""
    assert mode == bodies.read_pause({"mode": text}).mode
    assert mode == bodies.read_sleep({"mode": text}).mode


@pytest.mark.rule("R12.5")
@pytest.mark.parametrize("body", [{}, {"mode": None, "clear_cache": None}])
def test_a_bare_pause_aborts_and_leaves_the_cache_to_the_engine(body: dict[str, object]) -> None:
    """Without members, or with null for them, a pause aborts and says nothing about the cache."""
    request = bodies.read_pause(body)
    assert (PauseMode.ABORT, None) == (request.mode, request.clear_cache)


@pytest.mark.parametrize("value", [True, False])
def test_clear_cache_is_sent_as_given(value: bool) -> None:
    """An explicit false differs from absence."""
    assert bodies.read_pause({"clear_cache": value}).clear_cache is value


@pytest.mark.rule("R12.5")
@pytest.mark.parametrize("body", [{}, {"level": None, "mode": None}])
def test_a_bare_sleep_leaves_the_level_to_the_engine(body: dict[str, object]) -> None:
    """Without members, or with null for them, sleep aborts and names no level."""
    request = bodies.read_sleep(body)
    assert (None, PauseMode.ABORT) == (request.level, request.mode)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_has_three_levels(level: int) -> None:
    """Each level is sent as given, zero too."""
    assert level == bodies.read_sleep({"level": level}).level


@pytest.mark.rule("R12.5")
@pytest.mark.parametrize(
    ("body", "tags"),
    [
        ({}, []),
        ({"tags": None}, []),
        ({"tags": []}, []),
        ({"tags": ["weights"]}, ["weights"]),
        ({"tags": ["scheduling", "kv_cache", "weights"]}, ["scheduling", "kv_cache", "weights"]),
    ],
)
def test_wake_up_tags_are_sent_in_order(body: dict[str, object], tags: list[str]) -> None:
    """Tags keep their order; without any the engine wakes everything."""
    assert tags == bodies.read_wake_up(body).tags


def read_init_info(body: Any) -> bytes:
    return bodies.read_inner_object(body, "init_info")


def read_update_info(body: Any) -> bytes:
    return bodies.read_inner_object(body, "update_info")


MODES = "mode must be abort, wait, or keep, got"
LEVEL = "sleep: level must be a uint32, got"
VERSION = "new_version must be a non-empty string, got"

REFUSED: list[tuple[Callable[[Any], Any], Any, str]] = [
    (bodies.read_pause, {"mode": "stop"}, f"pause_generation: {MODES} the text 'stop'"),
    (bodies.read_pause, {"mode": 1}, f"pause_generation: {MODES} 1"),
    (bodies.read_sleep, {"mode": "stop"}, f"sleep: {MODES} the text 'stop'"),
    (bodies.read_pause, {"clear_cache": 1}, "pause_generation: clear_cache must be a boolean, got 1"),
    (
        bodies.read_pause,
        {"clear_cache": "true"},
        "pause_generation: clear_cache must be a boolean, got the text 'true'",
    ),
    (bodies.read_sleep, {"level": 3}, "sleep: level must be one of 0, 1, or 2, got 3"),
    (bodies.read_sleep, {"level": 2**32 - 1}, "sleep: level must be one of 0, 1, or 2, got 4294967295"),
    (bodies.read_sleep, {"level": -1}, f"{LEVEL} -1"),
    (bodies.read_sleep, {"level": 1.5}, f"{LEVEL} 1.5"),
    (bodies.read_sleep, {"level": 1.0}, f"{LEVEL} 1.0"),
    (bodies.read_sleep, {"level": "1"}, f"{LEVEL} the text '1'"),
    (bodies.read_sleep, {"level": True}, f"{LEVEL} true"),
    (bodies.read_sleep, {"level": 2**32}, f"{LEVEL} 4294967296"),
    (
        bodies.read_wake_up,
        {"tags": ["weights", "unknown"]},
        "wake_up: a tag must be weights, kv_cache, or scheduling, got the text 'unknown'",
    ),
    (bodies.read_wake_up, {"tags": "weights"}, "wake_up: tags must be an array of strings, got the text 'weights'"),
    (bodies.read_wake_up, {"tags": [1]}, "wake_up: tags must hold only strings, got 1"),
    (bodies.read_version, {}, f"{VERSION} null"),
    (bodies.read_version, {"new_version": ""}, f"{VERSION} the text ''"),
    (bodies.read_version, {"new_version": 1}, f"{VERSION} 1"),
    (bodies.read_finish, {"weight_version": 1}, "weight_version must be a string, got 1"),
    (read_init_info, {}, "init_info must be a JSON object, got null"),
    (read_init_info, {"init_info": None}, "init_info must be a JSON object, got null"),
    (read_update_info, {"update_info": ["a"]}, "update_info must be a JSON object, got an array"),
    (
        read_update_info,
        {"update_info": {"a": float("nan")}},
        "update_info must be a JSON object: Out of range float values are not JSON compliant",
    ),
    (
        read_update_info,
        {"update_info": {"a": object()}},
        "update_info must be a JSON object: Object of type object is not JSON serializable",
    ),
    (lambda body: bodies.read_object("sleep", body), 7, "sleep: the body must be a JSON object, got 7"),
    (
        lambda body: bodies.read_object("sleep", body),
        "text",
        "sleep: the body must be a JSON object, got the text 'text'",
    ),
    (lambda body: bodies.read_object("sleep", body), None, "sleep: the body must be a JSON object, got null"),
]


@pytest.mark.rule("R12.6")
@pytest.mark.parametrize(("read", "body", "said"), REFUSED)
def test_what_is_not_allowed_is_refused_by_name(read: Callable[[Any], Any], body: object, said: str) -> None:
    """A member that is not allowed makes an invalid argument whose message names it, its value and what is allowed."""
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    # json says which value is out of range since Python 3.12.
    assert said == caught.value.reason.partition(": nan")[0]
    assert ErrorKind.INVALID_ARGUMENT == caught.value.kind


def test_inner_objects_become_json() -> None:
    """The engine gets the member itself, not the body around it."""
    info = {"master_addr": "trainer", "master_port": 1234, "shape": [4, 8]}
    assert info == json.loads(bodies.read_inner_object({"init_info": info}, "init_info"))


@pytest.mark.rule("R12.5")
def test_a_weight_version_may_be_left_out() -> None:
    """Finishing without a version, or with null, keeps the engine's; an explicit one is sent."""
    assert [None, None, "step-42"] == [
        bodies.read_finish(body).weight_version
        for body in ({}, {"weight_version": None}, {"weight_version": "step-42"})
    ]


@pytest.mark.rule("R12.6")
@pytest.mark.parametrize(
    ("name", "body"),
    [("pause_generation", {"mode": "stop"}), ("sleep", {"level": 3}), ("wake_up", {"tags": "weights"})],
)
def test_bodies_can_be_checked_without_an_engine(name: str, body: dict[str, object]) -> None:
    """The pure check refuses what the control itself would refuse."""
    with pytest.raises(InvalidRequest, match=name):
        check_control_body(name, body)
    check_control_body(name, {})


@pytest.mark.rule("R12.6")
@pytest.mark.parametrize("name", ["resume_generation", "is_paused", "is_sleeping", "get_weight_version", "anything"])
def test_other_controls_only_need_an_object(name: str) -> None:
    """The pure check looks into no other body, but refuses one that is no object."""
    check_control_body(name, {"mode": "stop", "level": 9, "tags": 1})
    with pytest.raises(InvalidRequest, match=f": {name}: the body must be a JSON object"):
        check_control_body(name, [])
