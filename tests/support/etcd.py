"""A real etcd on this machine."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
from typing import TYPE_CHECKING

import attrs
import httpx2
import pytest

from support import peers
from support.processes import Child, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VARIABLE = "TRIO_SIDECAR_ETCD"


def etcd_binary() -> str:
    """Where etcd is; skips the test if it is nowhere."""
    found = os.environ.get(VARIABLE) or shutil.which("etcd")
    if found is None:
        pytest.skip(f"etcd is neither on PATH nor named by {VARIABLE}; nox -s e2e fetches it where apt-get can")
    return found


@attrs.frozen(slots=True)
class Etcd:
    """A running etcd."""

    process: Child
    url: str

    def keys(self, prefix: str) -> list[str]:
        """The keys under a prefix, through its HTTP gateway."""

        def encoded(text: bytes) -> str:
            return base64.b64encode(text).decode()

        start = prefix.encode()
        query = {"key": encoded(start), "range_end": encoded(start[:-1] + bytes([start[-1] + 1])), "keys_only": True}
        answer = httpx2.post(f"{self.url}/v3/kv/range", json=query, timeout=5, trust_env=False).raise_for_status()
        return [base64.b64decode(entry["key"]).decode() for entry in answer.json().get("kvs", [])]


@contextlib.contextmanager
def running_etcd(directory: Path) -> Iterator[Etcd]:
    """Start one that keeps its data in the directory; ready once it answers."""
    url, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    flags = {
        "--data-dir": directory / "etcd-data",
        "--listen-client-urls": url,
        "--advertise-client-urls": url,
        "--listen-peer-urls": peer,
        "--initial-advertise-peer-urls": peer,
        "--initial-cluster": f"default={peer}",
    }
    argv = [etcd_binary(), *(f"{flag}={value}" for flag, value in flags.items())]
    etcd = Etcd(Child("etcd", argv, env=peers.environment(), log_dir=directory), url)
    try:
        etcd.process.wait_until(lambda: _healthy(url), "healthy", seconds=30)
        yield etcd
    finally:
        etcd.process.close(seconds=2)


def _healthy(url: str) -> bool:
    try:
        answer = httpx2.get(f"{url}/health", timeout=5, trust_env=False)
    except httpx2.TransportError:
        return False
    return bool(answer.json().get("health") == "true")
