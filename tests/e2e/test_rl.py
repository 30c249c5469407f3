"""RL controls through a real Dynamo's system server, and what a trainer learns of the worker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx2
import pytest

from support import peers
from support.managed import MODEL, SECONDS, Managed, managed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

PROMPT = [10, 11, 12]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Managed]:
    arguments = ("--enable-rl", "--vllm-http-endpoint=http://worker:8120")
    with managed(tmp_path, flags={"--rl-controls": "true"}, arguments=arguments) as running:
        yield running


def wait_for_instances(service: Managed, count: int) -> None:
    service.workers[0].wait_until(lambda: service.instances() == count, f"{count} in discovery", seconds=SECONDS)


@pytest.mark.rule("R12.7")
def test_a_paused_worker_gets_no_requests_until_it_is_resumed(service: Managed) -> None:
    """Dynamo withdraws the worker before the pause and brings it back after the resume."""
    assert {"is_paused": False} == service.control("is_paused")
    assert {"status": "paused"} == service.control("pause_generation", mode="keep", clear_cache=False)
    assert 0 == service.instances()
    assert {"is_paused": True} == service.control("is_paused")
    assert {"status": "resumed"} == service.control("resume_generation")
    wait_for_instances(service, 1)
    service.wait_for_models(MODEL)
    service.workers[0].wait_until(lambda: service.complete(PROMPT)[0] == httpx2.codes.OK, "an answer", seconds=SECONDS)


@pytest.mark.rule("R12.3")
def test_a_worker_sleeps_and_wakes_up(service: Managed) -> None:
    """In parts, if asked to."""
    assert {"status": "sleeping"} == service.control("sleep", level=1)
    assert {"is_sleeping": True} == service.control("is_sleeping")
    answer = service.control("wake_up", tags=["weights"])
    assert {"status": "partially_awake", "is_sleeping": True} == answer
    assert {"status": "awake"} == service.control("wake_up")
    wait_for_instances(service, 1)


def test_weights_are_updated(service: Managed) -> None:
    """The steps of a transfer, and the version that they end with."""
    info = {"master_addr": "trainer", "master_port": 1234}
    assert {"message": "Weight transfer initialized"} == service.update("init_weight_transfer_engine", init_info=info)
    assert {"message": "Weight update started"} == service.update("start_weight_update")
    assert {"message": "Draft weight update started"} == service.update("start_draft_weight_update")
    assert {"message": "Weights updated"} == service.update("update_weights", update_info={"names": ["layer"]})
    assert {"message": "Weight update finished"} == service.update("finish_weight_update", weight_version="step-42")
    assert {"weight_version": "step-42"} == service.control("get_weight_version")
    answer = service.update("update_weight_version", new_version="step-43")
    assert {"success": True, "new_version": "step-43"} == answer


@pytest.mark.rule("R12.6")
@pytest.mark.parametrize("name", ["pause_generation", "sleep"])
def test_a_body_that_is_not_allowed_leaves_the_worker_where_it_was(service: Managed, name: str) -> None:
    """The answer says what is wrong, and the worker goes on serving."""
    answer = service.control(name, mode="stop")
    assert "error" == answer["status"]
    assert "abort, wait, or keep" in answer["message"]
    assert 1 == service.instances()
    assert {"is_paused": False} == service.control("is_paused")
    service.workers[0].wait_until(lambda: service.complete(PROMPT)[0] == httpx2.codes.OK, "an answer", seconds=SECONDS)


@pytest.mark.rule("R6.16")
def test_trainers_find_the_worker(service: Managed) -> None:
    """The request-plane endpoint ``rl`` tells routes, addresses and the world size; and nothing else."""
    done = subprocess.run(
        [sys.executable, str(peers.HERE / "raw_client_main.py"), "dynamo.backend.rl"],
        input=json.dumps([{"method": "routes"}, {"method": "control/sleep"}]),
        capture_output=True,
        check=True,
        text=True,
        timeout=SECONDS,
        env=peers.dynamo_environment(service.discovery),
    )
    routes, other = (json.loads(line)["chunks"][0] for line in done.stdout.splitlines())
    assert ("ok", 1, "http://worker:8120/") == (routes["status"], routes["world_size"], routes["admin_base_url"])
    assert f":{service.ports[0]}" in routes["system_url"]
    assert {"control/pause_generation", "control/sleep", "update/update_weights"} <= set(routes["routes"])
    assert "error" == other["status"]
    service.workers[0].send(signal.SIGTERM)
    assert 0 == service.workers[0].wait(seconds=SECONDS)
    assert [] == list((service.discovery / "v1" / "instances").iterdir())
