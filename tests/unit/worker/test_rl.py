"""What trainers are told of a worker (spec 6.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trio_sidecar.bridge import run_aio
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.rl import RlWorkerMetadata
from trio_sidecar.worker.rl import RouteDescriber, local_address, own_system_port, rl_endpoint_name, system_url

if TYPE_CHECKING:
    import asyncio


def describer(url: str | None = "http://worker:8120/") -> RouteDescriber:
    return RouteDescriber(
        routes=["update/b", "control/a", "control/a"],
        url="http://10.0.0.7:9000",
        metadata=RlWorkerMetadata(world_size=4, admin_base_url=url),
    )


@pytest.mark.rule("R6.16")
async def test_routes_are_described(aio_loop: asyncio.AbstractEventLoop) -> None:
    """Sorted, each once, with the addresses and the world size; without an admin URL there is no such member."""

    async def aio_ask(one: RouteDescriber) -> list[dict[str, Any]]:
        return [answer async for answer in one.aio_generate({"method": "routes"}, context=None)]

    expected = {
        "status": "ok",
        "routes": ["control/a", "update/b"],
        "system_url": "http://10.0.0.7:9000",
        "world_size": 4,
    }
    assert [expected] == await run_aio(aio_ask, describer(None))
    assert [expected | {"admin_base_url": "http://worker:8120/"}] == await run_aio(aio_ask, describer())


@pytest.mark.parametrize("question", [{"method": "control/sleep"}, {}, {"method": 1}, None, []])
def test_nothing_is_executed(question: object) -> None:
    """Whatever else is asked for gets an error envelope."""
    assert "error" == describer().answer(question)["status"]


def test_the_endpoint_has_a_name_of_its_own() -> None:
    """``rl``, or what the variable says, but not the serving endpoint's name."""
    assert "rl" == rl_endpoint_name({}, "generate")
    assert "trainers-1" == rl_endpoint_name({"DYN_RL_ENDPOINT": " trainers-1 "}, "generate")
    for name in ("", "a.b", "generate"):
        with pytest.raises(InvalidConfig, match="DYN_RL_ENDPOINT"):
            rl_endpoint_name({"DYN_RL_ENDPOINT": name}, "generate")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("worker", "http://worker:9000"),
        ("10.0.0.7", "http://10.0.0.7:9000"),
        ("2001:db8::1", "http://[2001:db8::1]:9000"),
        ("0.0.0.0", f"http://{local_address()}:9000"),
        ("::", f"http://{local_address()}:9000"),
        ("", f"http://{local_address()}:9000"),
    ],
)
def test_the_system_server_is_named_as_others_reach_it(host: str, url: str) -> None:
    """A wildcard is replaced by this machine's address."""
    assert url == system_url({"DYN_SYSTEM_HOST": host, "DYN_SYSTEM_PORT": "9000"})


@pytest.mark.parametrize("port", ["", "0", "-1", "x"])
def test_a_port_that_nobody_knows_is_refused(port: str) -> None:
    """Trainers need an address; the message says what to set."""
    with pytest.raises(InvalidConfig, match=r"DYN_SYSTEM_PORT.*--enable-rl"):
        system_url({"DYN_SYSTEM_PORT": port})


@pytest.mark.parametrize("before", [{}, {"DYN_SYSTEM_PORT": "9000"}])
def test_a_second_runtime_opens_no_second_server(before: dict[str, str]) -> None:
    """The variable is another one inside, and what it was afterwards."""
    environment = dict(before)
    with own_system_port(environment):
        assert {"DYN_SYSTEM_PORT": "-1"} == environment
    assert before == environment
