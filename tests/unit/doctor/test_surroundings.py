"""What is broken around a worker: planes, ports, proxies, limits."""

from __future__ import annotations

import os
import resource
import socket
from typing import TYPE_CHECKING

import pytest
import trio

from trio_sidecar.doctor import surroundings
from trio_sidecar.doctor.report import Finding, Mark
from trio_sidecar.doctor.surroundings import examine_discovery, examine_process
from trio_sidecar.transport import fastpath

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE = {"DYN_DISCOVERY_BACKEND": "file"}
NOBODY = "127.0.0.1:1"


async def around(environment: Mapping[str, str], name: str) -> Finding:
    """One finding about an environment."""
    found = {finding.name: finding for finding in await examine_discovery(environment, seconds=1)}
    return found[name]


@pytest.mark.parametrize(
    ("environment", "name", "mark", "words"),
    [
        ({"ETCD_ENDPOINTS": f"http://{NOBODY}"}, "discovery", Mark.FAILED, "etcd: 127.0.0.1:1"),
        ({"ETCD_ENDPOINTS": "http://:x"}, "discovery", Mark.FAILED, "ETCD_ENDPOINTS"),
        ({}, "discovery", Mark.WARNED, "etcd: localhost:2379"),
        ({"DYN_DISCOVERY_BACKEND": "zookeeper"}, "discovery", Mark.FAILED, "'zookeeper', which Dynamo does not know"),
        ({"DYN_DISCOVERY_BACKEND": "kubernetes"}, "discovery", Mark.FAILED, "this is no pod"),
        (
            {"DYN_DISCOVERY_BACKEND": "kubernetes", "KUBERNETES_SERVICE_HOST": "h"},
            *("discovery", Mark.FINE, "Kubernetes"),
        ),
        ({"DYN_DISCOVERY_BACKEND": "mem"}, "discovery", Mark.WARNED, "memory"),
        (FILE, "discovery", Mark.WARNED, "DYN_FILE_KV is not set"),
        ({**FILE, "DYN_FILE_KV": "/dev/null/x"}, "discovery", Mark.FAILED, "is no directory"),
        (
            {"DYN_EVENT_PLANE": "nats", "NATS_SERVER": f"nats://{NOBODY}"},
            "event plane",
            Mark.FAILED,
            "NATS: 127.0.0.1:1",
        ),
        ({"DYN_EVENT_PLANE": "zmq"}, "event plane", Mark.FINE, "zmq"),
        ({"DYN_REQUEST_PLANE": "nats", "NATS_SERVER": "nats://:"}, "request plane", Mark.FAILED, "NATS_SERVER"),
        ({}, "request plane", Mark.FINE, "tcp"),
        ({}, "system port", Mark.FINE, "no probes"),
        ({"DYN_SYSTEM_PORT": "many"}, "system port", Mark.FAILED, "DYN_SYSTEM_PORT"),
    ],
)
async def test_planes_and_ports(environment: dict[str, str], name: str, mark: Mark, words: str) -> None:
    """Each plane that cannot carry is named, with its variable."""
    finding = await around(environment, name)
    assert mark is finding.mark
    assert words in finding.detail
    assert bool(finding.hint) == (
        mark is not Mark.FINE and "must" not in finding.detail and "no address" not in finding.detail
    )


async def test_one_etcd_of_several_is_enough_to_work_and_too_few_to_be_content() -> None:
    """An endpoint that is down beside one that is up is a warning."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, trio.aclose_forcefully, [listener])
        up = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        assert Mark.FINE is (await around({"ETCD_ENDPOINTS": up}, "discovery")).mark
        assert Mark.WARNED is (await around({"ETCD_ENDPOINTS": f"{up},{NOBODY}"}, "discovery")).mark
        nursery.cancel_scope.cancel()


async def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that can be made is as good as one that is there; one without permission is not."""
    for path in (tmp_path, tmp_path / "new" / "deep"):
        assert Mark.FINE is (await around({**FILE, "DYN_FILE_KV": str(path)}, "discovery")).mark
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "no permission" in (await around({**FILE, "DYN_FILE_KV": str(tmp_path)}, "discovery")).detail


async def test_a_system_port_that_is_taken() -> None:
    """It is named before Dynamo's runtime would fail on it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        where = {"DYN_SYSTEM_PORT": port, "DYN_SYSTEM_HOST": "127.0.0.1"}
        finding = await around(where, "system port")
    assert Mark.FAILED is finding.mark
    assert port in finding.detail
    assert Mark.FINE is (await around(where, "system port")).mark


def process(environment: Mapping[str, str], name: str) -> Finding:
    """One finding about this process."""
    return {finding.name: finding for finding in examine_process(environment)}[name]


@pytest.mark.rule("FR-106")
def test_proxy_variables_are_warned_about_without_their_credentials() -> None:
    """They cannot reach the engine's connection, but everything else."""
    finding = process({"HTTPS_PROXY": "http://user:secret@proxy:3128", "no_proxy": "localhost"}, "proxies")
    assert Mark.WARNED is finding.mark
    assert "HTTPS_PROXY=http://***@proxy:3128; not for localhost" == finding.detail
    assert Mark.FINE is process({"no_proxy": "x", "http_proxy": ""}, "proxies").mark


@pytest.mark.rule("FR-108")
@pytest.mark.parametrize(
    ("limit", "mark"),
    [(64, Mark.FAILED), (1024, Mark.WARNED), (4096, Mark.FINE), (resource.RLIM_INFINITY, Mark.FINE)],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, mark: Mark) -> None:
    """Too few of them is told before the first EMFILE."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert mark is process({}, "open files").mark


def test_what_is_not_installed_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Dynamo's runtime the engines work and the worker does not; with unknown versions it is slow."""
    monkeypatch.setattr(surroundings, "DYNAMO", "no-such-distribution")
    monkeypatch.setattr(fastpath, "unsupported", lambda: "grpclib 9")
    assert "trio-sidecar[dynamo]" in process({}, "Dynamo").hint
    assert "the fast path is off: grpclib 9" in process({}, "transport").detail
