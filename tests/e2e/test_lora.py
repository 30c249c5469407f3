"""LoRA adapters through a real Dynamo: loaded, listed, used, unloaded; and found again by the next worker."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from support.lora import make_adapter
from support.managed import MODEL, SECONDS, Managed, managed, start_worker
from support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

PROMPT = [10, 11, 12]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Adapters are wanted, and the engine may load them from there."""
    return {"DYN_LORA_ENABLED": "true", "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(tmp_path)}


@pytest.fixture
def service(tmp_path: Path, environment: dict[str, str]) -> Iterator[Managed]:
    with managed(tmp_path / "service", flags={"--max-loras": 2}, environment=environment) as running:
        yield running


def load(service: Managed, name: str, path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = service.update("load_lora", lora_name=name, source={"uri": f"file://{path}"})
    return answer


@pytest.mark.rule("R13.1", "R13.12", "R13.26", "R7.75")
def test_an_adapter_is_loaded_used_listed_and_unloaded(service: Managed, tmp_path: Path) -> None:
    """From nothing to a model that clients can ask for, and back."""
    assert {"status": "success", "count": 0, "loras": {}} == service.update("list_loras")
    answer = load(service, "Math-R8", make_adapter(tmp_path))
    assert ("success", "Math-R8", 1, False) == tuple(
        answer[key] for key in ("status", "lora_name", "lora_id", "hot_swap")
    )
    service.wait_for_models(MODEL, "Math-R8")
    status, body = service.complete(PROMPT, "Math-R8")
    assert (httpx2.codes.OK, "Math-R8", 3) == (status, body["model"], body["usage"]["completion_tokens"])
    assert {"status": "success", "count": 1, "loras": {"Math-R8": 1}} == service.update("list_loras")
    assert "suffix" in load(service, "math-r8", tmp_path / "adapter")["message"]
    assert "success" == service.update("unload_lora", lora_name="Math-R8")["status"]
    service.wait_for_models(MODEL)
    assert httpx2.codes.NOT_FOUND == service.complete(PROMPT, "Math-R8")[0]
    assert httpx2.codes.OK == service.complete(PROMPT)[0]


@pytest.mark.rule("R13.21")
def test_an_adapters_record_is_the_base_models_in_all_but_name(service: Managed, tmp_path: Path) -> None:
    """What differs is what the adapter is; and what the binding cannot say, which is listed here."""
    load(service, "adapter-a", make_adapter(tmp_path))
    cards = service.cards()
    base, adapter = cards[MODEL], cards["adapter-a"]
    for card in (base, adapter):
        card["runtime_config"].pop("runtime_data", None)  # the binding takes no flags there
        card["runtime_config"].pop("max_gpu_lora_count", None)  # the binding has it in the adapter's section only
        for name in ("model_info", "tokenizer", "prompt_formatter", "gen_config", "chat_template_file"):
            for part in (card.get(name) or {}).values():
                part.pop("path")  # where this worker's own server offers the same file
    expected = base | {
        "display_name": "adapter-a",
        "slug": "adapter-a",
        "lora": {"name": "adapter-a", "max_gpu_lora_count": 2},
        "user_data": {"lora_adapter": True, "lora_id": 1},
    }
    expected.pop("aliases", None)
    assert expected == adapter


@pytest.mark.rule("R13.28", "R11.5", "R11.6")
def test_the_next_worker_finds_what_is_loaded(service: Managed, tmp_path: Path, environment: dict[str, str]) -> None:
    """A worker that ends takes its records with it and leaves the adapters; its successor publishes them again."""
    load(service, "adapter-a", make_adapter(tmp_path))
    service.wait_for_models(MODEL, "adapter-a")
    service.workers[0].send(signal.SIGTERM)
    assert 0 == service.workers[0].wait(seconds=SECONDS)
    assert "adapter-a" not in service.cards()
    successor = start_worker(
        service.engines[0],
        discovery=service.discovery,
        log_dir=tmp_path / "successor",
        port=free_port(),
        environment=environment,
    )
    try:
        service.wait_for_models(MODEL, "adapter-a")
        successor.wait_until(
            lambda: service.complete(PROMPT, "adapter-a")[0] == httpx2.codes.OK, "an answer", seconds=SECONDS
        )
    finally:
        successor.close(seconds=3)


@pytest.mark.rule("R13.24")
def test_replicas_publish_independently(tmp_path: Path, environment: dict[str, str]) -> None:
    """Two workers have a record each; an adapter that one of them unloads is still served by the other."""
    path = make_adapter(tmp_path)
    flags = {"--max-loras": 2}
    with managed(tmp_path / "service", flags=flags, workers=2, environment=environment) as service:
        body = {"lora_name": "adapter-a", "source": {"uri": f"file://{path}"}}
        for worker in range(2):
            assert "success" == service.post("update/load_lora", body, worker=worker)[1]["status"]
        assert 2 == service.records("adapter-a")
        assert "success" == service.post("update/unload_lora", {"lora_name": "adapter-a"}, worker=1)[1]["status"]
        assert 1 == service.records("adapter-a")
        service.wait_for_models(MODEL, "adapter-a")
        # The front end takes a moment to hear of it.
        service.frontend.process.wait_until(
            lambda: all(service.complete(PROMPT, "adapter-a")[0] == httpx2.codes.OK for _ in range(6)),
            "six answers in a row",
            seconds=SECONDS,
        )
