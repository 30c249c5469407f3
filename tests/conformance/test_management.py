"""Our worker and the Rust sidecar answer the same calls of the system server alike, in all but the wording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from support.lora import make_adapter
from support.managed import SECONDS, start_engine, start_worker
from support.processes import free_port
from support.stack import WorkerKind

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(120)]

RL_CALLS: list[tuple[str, Any]] = [
    ("control/is_paused", {}),
    ("control/get_weight_version", {}),
    ("control/is_sleeping", {}),
    ("control/wake_up", {"tags": ["unknown"]}),
    ("control/wake_up", {"tags": "weights"}),
    ("control/wake_up", {"tags": [1]}),
    ("control/pause_generation", {"clear_cache": 1}),
    ("control/pause_generation", {"mode": "stop"}),
    ("control/sleep", {"level": 3}),
    ("control/sleep", {"level": 1.5}),
    ("control/sleep", {"level": -1}),
    ("control/sleep", {"level": True}),
    ("control/sleep", {"level": 2**32}),
    ("control/sleep", []),
    ("control/pause_generation", {"mode": "keep", "clear_cache": False}),
    ("control/is_paused", {}),
    ("control/resume_generation", {"anything": 1}),
    ("control/pause_generation", {"mode": None, "clear_cache": None}),
    ("control/resume_generation", {}),
    ("control/sleep", {}),
    ("control/resume_generation", {}),
    ("control/wake_up", {"tags": ["weights"]}),
    ("control/wake_up", {}),
    ("update/init_weight_transfer_engine", {"init_info": {"a": 1}}),
    ("update/init_weight_transfer_engine", {"init_info": []}),
    ("update/start_weight_update", {}),
    ("update/start_draft_weight_update", {}),
    ("update/update_weights", {"update_info": {"names": []}}),
    ("update/update_weights", {}),
    ("update/finish_weight_update", {"weight_version": "step-1"}),
    ("update/finish_weight_update", {"weight_version": None}),
    ("update/finish_weight_update", {"weight_version": 1}),
    ("update/finish_weight_update", {"weight_version": " "}),
    ("control/get_weight_version", {}),
    ("update/update_weight_version", {"new_version": "step-2"}),
    ("update/update_weight_version", {"new_version": ""}),
    ("update/update_weight_version", {}),
    ("update/update_weight_version", []),
    ("control/unknown", {}),
    ("update/unknown", {}),
]


def lora_calls(adapter: Path) -> list[tuple[str, Any]]:
    """A life of adapters, with everything that can be wrong in it."""
    good = f"file://{adapter}"

    def load(name: Any, uri: Any = good) -> tuple[str, Any]:
        return "update/load_lora", {"lora_name": name, "source": {"uri": uri}}

    def unload(name: Any) -> tuple[str, Any]:
        return "update/unload_lora", {"lora_name": name}

    listing: tuple[str, Any] = ("update/list_loras", {})
    wrong = ["https://x/y", "file://host/x", "file:///x?q=1", "file:///x#f", "", " ", None, 1, "/x", "file:///nowhere"]
    return [
        listing,
        load("Math-R8"),
        load("Math-R8", "file:///nowhere"),
        load("math-r8"),
        load("mocker-model"),
        load("___"),
        *[load("c", uri) for uri in wrong],
        load("c", f"file://{adapter.parent}"),
        load(" b "),
        load("c"),
        load(1),
        load(" "),
        ("update/load_lora", {}),
        ("update/load_lora", {"lora_name": "c"}),
        ("update/load_lora", {"lora_name": "c", "source": 1}),
        ("update/load_lora", []),
        listing,
        unload("unknown"),
        unload("b "),
        unload("b"),
        unload(" "),
        unload(None),
        listing,
        unload("Math-R8"),
        listing,
    ]


def answers(kind: WorkerKind, calls: list[tuple[str, Any]], directory: Path, environment: dict[str, str]) -> list[Any]:
    """What each call is answered with: status, body without wording, and how many workers and models there are then."""
    directory.mkdir()
    discovery, port = directory / "discovery", free_port()
    engine = start_engine({"--max-loras": 2, "--rl-controls": "true"}, log_dir=directory, environment=environment)
    try:
        worker = start_worker(
            engine, discovery=discovery, log_dir=directory, port=port, environment=environment, kind=kind
        )
        try:
            instances = discovery / "v1" / "instances"
            worker.wait_until(lambda: any(instances.glob("*")), "a worker in discovery", seconds=SECONDS)
            found = []
            for path, body in calls:
                url = f"http://127.0.0.1:{port}/engine/{path}"
                answer = httpx2.post(url, json=body, timeout=SECONDS, trust_env=False)
                members = answer.json()
                if "message" in members and ("status" in members or "error" in members):
                    members["message"] = bool(members["message"])
                records = [len(list((discovery / "v1" / part).glob("*"))) for part in ("instances", "mdc")]
                found.append((answer.status_code, members, records))
            return found
        finally:
            worker.close(seconds=3)
    finally:
        engine.close()


@pytest.mark.rule("R12.5", "R12.6", "R12.7", "R13.1", "R13.2", "R13.6", "R13.7", "R13.10", "R13.11")
@pytest.mark.parametrize("what", ["rl", "lora"])
def test_system_servers_answer_alike(tmp_path: Path, what: str) -> None:
    """Every call has the same status, the same members and the same effect on discovery."""
    adapter = make_adapter(tmp_path)
    calls = RL_CALLS if what == "rl" else lora_calls(adapter)
    environment = {"DYN_LORA_ENABLED": "true", "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(tmp_path)}
    ours, rust = (answers(kind, calls, tmp_path / kind.value, environment) for kind in WorkerKind)
    for call, our_answer, rust_answer in zip(calls, ours, rust, strict=True):
        assert (call, rust_answer) == (call, our_answer)
