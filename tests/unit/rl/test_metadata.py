"""What a worker says of itself to a trainer (spec 6.4)."""

from __future__ import annotations

from typing import Any

import pytest

from trio_sidecar import wire
from trio_sidecar.discovery import DiscoveredModel
from trio_sidecar.endpoint import HttpEndpoint
from trio_sidecar.errors import ErrorKind, IncompatibleEngine, InvalidConfig
from trio_sidecar.rl import RlWorkerMetadata, worker_metadata


def model(**parallelism: int) -> DiscoveredModel:
    """The fixture of spec 0.3, with changes to its parallelism."""
    fields = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 2, "world_size": 2}
    return described(wire.ParallelismInfo(**(fields | parallelism)))


def described(parallelism: wire.ParallelismInfo | None) -> DiscoveredModel:
    return DiscoveredModel.from_messages(
        wire.ModelInfo(model_id="model-source", served_model_name="served-model", supports_token_ids_input=True),
        wire.ServerInfo(api_version="vllm", parallelism=parallelism),
    )


def metadata(found: DiscoveredModel, world_size: int | None = None, url: str | None = None) -> RlWorkerMetadata:
    endpoint = None if url is None else HttpEndpoint.parse(url)
    return worker_metadata(found, configured_world_size=world_size, http_endpoint=endpoint)


@pytest.mark.parametrize(
    ("changes", "configured", "total"),
    [
        ({}, None, 4),
        ({}, 8, 4),
        ({"data_parallel_size": 8, "data_parallel_rank": 4, "data_parallel_size_local": 4}, None, 16),
        ({"world_size": 0}, 8, 8),
        ({"world_size": 0}, 4, 4),
        ({"world_size": 6, "pipeline_parallel_size": 3}, None, 12),
        ({"world_size": 2**31 - 2, "data_parallel_size": 2}, None, 2**32 - 4),
        ({"world_size": 2**32 - 1, "tensor_parallel_size": 1, "data_parallel_size": 1}, None, 2**32 - 1),
    ],
)
def test_world_size(changes: dict[str, int], configured: int | None, total: int) -> None:
    """The engine's own size wins, times the whole data-parallel group; without one the configured size counts."""
    assert total == metadata(model(**changes), configured).world_size


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_parallel_size": 0}, "vLLM reports a tensor-parallel size of zero"),
        ({"pipeline_parallel_size": 0}, "vLLM reports a pipeline-parallel size of zero"),
        (
            {"world_size": 3},
            (
                "vLLM reports an invalid engine world size of 3; expected a multiple of TP * PP = 2 that fits "
                "uint32 when multiplied by DP = 2"
            ),
        ),
        (
            {"world_size": 2**31, "data_parallel_size": 2},
            (
                "vLLM reports an invalid engine world size of 2147483648; expected a multiple of TP * PP = 2 that fits "
                "uint32 when multiplied by DP = 2"
            ),
        ),
    ],
)
def test_impossible_engines_are_refused(changes: dict[str, int], said: str) -> None:
    """A size of zero, one that does not divide and one that overflows are the engine's fault, and are named."""
    with pytest.raises(IncompatibleEngine) as caught:
        metadata(model(**changes), 8)
    assert said == str(caught.value)
    assert ErrorKind.UNKNOWN == caught.value.kind


def test_an_engine_without_parallelism_is_refused() -> None:
    """The transfer group cannot be known without it."""
    with pytest.raises(IncompatibleEngine, match=r"^RL needs the engine's parallelism, which it does not report$"):
        metadata(described(None), 8)


@pytest.mark.parametrize(
    ("configured", "said"),
    [
        (None, "--vllm-rl-world-size: is required, because the engine does not report its world size"),
        (7, "--vllm-rl-world-size: 7 must be divisible by TP * PP * DP = 4"),
    ],
)
def test_a_wrong_configured_size_is_refused(configured: int | None, said: str) -> None:
    """Where the engine reports no size, the flag is required and must divide."""
    with pytest.raises(InvalidConfig) as caught:
        metadata(model(world_size=0), configured)
    assert said == str(caught.value)
    assert ErrorKind.INVALID_ARGUMENT == caught.value.kind


@pytest.mark.rule("R6.16")
def test_the_admin_url_is_optional_and_normalised() -> None:
    """Without the flag there is no URL; with it, it ends in a slash."""
    shown: list[Any] = [metadata(model(), url=url).admin_base_url for url in (None, "http://worker:8120")]
    assert [None, "http://worker:8120/"] == shown
