"""What a front end finds of a worker in each role: the same card and place, whether ours or the Rust sidecar."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from support import peers
from support.fake_engine import FakeEngine, default_model, default_server, fake_engine
from support.stack import WorkerKind
from trio_sidecar import wire
from trio_sidecar.engines.mock_tokenizer import MOCK_MODEL_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from support.processes import Child

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(90)]

PLACES = {"agg": "own", "prefill": "prefill", "decode": "backend", "encode": "encode"}
NEEDS: dict[tuple[str, bool], Any] = {
    ("agg", False): [],
    ("agg", True): [["encode"]],
    ("prefill", False): [["decode"]],
    ("prefill", True): [["decode", "encode"]],
    ("decode", False): [["prefill"]],
    ("encode", False): [["prefill", "decode"], ["aggregated"]],
}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    """An engine that could play any role, with several local ranks."""
    model, server = default_model(), default_server()
    model.model_id = str(MOCK_MODEL_DIR)
    model.served_model_aliases = ["alias"]
    model.supports_multimodal = True
    model.supports_lora = True
    server.max_loras = 3
    server.parallelism = wire.ParallelismInfo(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=8,
        data_parallel_rank=4,
        data_parallel_size_local=4,
        world_size=1,
    )
    with fake_engine(FakeEngine(model=model, server=server)) as running:
        yield running


@contextlib.contextmanager
def starting(engine: FakeEngine, kind: WorkerKind, directory: Path, arguments: Sequence[str]) -> Iterator[Child]:
    """A worker that has been started and no more."""
    start = peers.start_worker if kind is WorkerKind.OURS else peers.start_rust_sidecar
    worker = start(engine.endpoint, discovery=directory / "discovery", log_dir=directory, arguments=arguments)
    try:
        yield worker
    finally:
        worker.close(seconds=0)


def registration(engine: FakeEngine, kind: WorkerKind, directory: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The worker's card and instance, without what differs between any two processes."""
    buckets = {name: directory / "discovery" / "v1" / name for name in ("mdc", "instances")}
    with starting(engine, kind, directory, arguments) as worker:
        worker.wait_until(lambda: all(any(place.glob("*")) for place in buckets.values()), "registered", seconds=30)
        return {name: _only(place) for name, place in buckets.items()}


def _only(place: Path) -> dict[str, Any]:
    (file,) = place.iterdir()
    found: dict[str, Any] = json.loads(file.read_text())
    return {key: value for key, value in found.items() if key not in {"instance_id", "transport"}}


@pytest.mark.rule("2.1", "6.2", "R2.12", "R2.13", "R6.7", "FR-075")
@pytest.mark.parametrize(("role", "to_encoder"), NEEDS)
def test_same_registration(engine: FakeEngine, tmp_path: Path, role: str, to_encoder: bool) -> None:
    """Name, component, worker type, what it needs, and every limit are what the Rust sidecar registers."""
    arguments = [f"--disaggregation-mode={role}", "--component=own", "--endpoint=answers", "--namespace=space"]
    arguments += ["--route-to-encoder"] if to_encoder else []
    ours = registration(engine, WorkerKind.OURS, tmp_path / "ours", arguments)
    rust = registration(engine, WorkerKind.RUST, tmp_path / "rust", arguments)
    assert rust == ours
    card = ours["mdc"]["card_json"]
    assert ("space", PLACES[role], "answers") == tuple(
        ours["instances"][key] for key in ("namespace", "component", "endpoint")
    )
    assert ("aggregated" if role == "agg" else role) == card["worker_type"]
    assert NEEDS[role, to_encoder] == card["needs"]


@pytest.mark.rule("R2.13", "R11.12")
@pytest.mark.parametrize("kind", list(WorkerKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("role", ["decode", "encode"])
def test_roles_that_need_no_encoder(engine: FakeEngine, tmp_path: Path, kind: WorkerKind, role: str) -> None:
    """Dynamo 1.6 refuses a decode or encode worker that declares it needs an encoder; nothing is registered."""
    arguments = [f"--disaggregation-mode={role}", "--route-to-encoder"]
    with starting(engine, kind, tmp_path, arguments) as worker:
        assert 1 == worker.wait(seconds=30)
        assert "--route-to-encoder is meaningful only for --disaggregation-mode agg|prefill" in worker.log
    assert [] == [path for path in (tmp_path / "discovery").rglob("*") if path.is_file()]
