"""LoRA adapters of the mock engine (wire-and-server 6.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.lora import make_adapter
from support.mock_engine import mock_settings, request_of
from trio_sidecar.bridge import run_aio
from trio_sidecar.engines.mock import MockEngine, open_mock
from trio_sidecar.engines.vllm_lora import PREFIXES_VARIABLE
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import GetModelInfoRequest, GetServerInfoRequest, LoraAdapter, methods

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path


async def call(engine: MockEngine, method: methods.Method[Any, Any], **fields: Any) -> Any:
    return await run_aio(engine.aio_call, method, method.request(**fields))


async def load(engine: MockEngine, name: str, path: Path | str) -> LoraAdapter:
    adapter: LoraAdapter = (await call(engine, methods.LOAD_LORA, lora_name=name, source_path=str(path))).adapter
    return adapter


async def names(engine: MockEngine) -> list[str]:
    return [adapter.lora_name for adapter in (await call(engine, methods.LIST_LORAS)).adapters]


async def ask(engine: MockEngine, adapter: str) -> None:
    async def aio_ask() -> None:
        async with engine.aio_generate(request_of([100], lora_name=adapter), {}):
            pass

    await run_aio(aio_ask)


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that the engine may load from."""
    monkeypatch.setenv(PREFIXES_VARIABLE, str(tmp_path))
    return make_adapter(tmp_path)


async def test_adapters_come_and_go(aio_loop: asyncio.AbstractEventLoop, adapter: Path) -> None:
    """Ids are never used twice; only loaded adapters can be asked for."""
    async with open_mock(mock_settings(max_loras=2)) as engine:
        assert (await call(engine, methods.GET_MODEL_INFO)).supports_lora
        assert 2 == (await call(engine, methods.GET_SERVER_INFO)).max_loras
        assert [1, 2] == [(await load(engine, name, adapter)).lora_id for name in ("b", "a")]
        assert ["a", "b"] == await names(engine)
        await ask(engine, "a")
        assert 2 == (await call(engine, methods.UNLOAD_LORA, lora_name="a")).adapter.lora_id
        with pytest.raises(RpcError, match="'a' is not loaded") as caught:
            await ask(engine, "a")
        assert StatusCode.NOT_FOUND == caught.value.status
        assert 3 == (await load(engine, "a", adapter)).lora_id
        assert 1 == (await load_from_repository(engine)).count("INTERNAL")


async def load_from_repository(engine: MockEngine) -> list[str]:
    try:
        await load(engine, "c", "org/adapter")
    except RpcError as error:
        return [error.status.name]
    return []


@pytest.mark.parametrize("what", ["full", "no adapter"])
async def test_an_engine_can_refuse_an_adapter(
    aio_loop: asyncio.AbstractEventLoop, adapter: Path, tmp_path: Path, what: str
) -> None:
    """If there is no room, or nothing in the directory: INTERNAL, as any failure inside vLLM."""
    async with open_mock(mock_settings(max_loras=1)) as engine:
        if what == "full":
            await load(engine, "a", adapter)
        with pytest.raises(RpcError) as caught:
            await load(engine, "b", adapter if what == "full" else tmp_path)
        assert StatusCode.INTERNAL == caught.value.status


@pytest.mark.rule("R16.3", "R16.4")
async def test_without_room_there_is_no_lora(aio_loop: asyncio.AbstractEventLoop) -> None:
    """The default engine knows none of the calls, and refuses requests for adapters."""
    async with open_mock(mock_settings()) as engine:
        assert not (await run_aio(engine.aio_call, methods.GET_MODEL_INFO, GetModelInfoRequest())).supports_lora
        assert 0 == (await run_aio(engine.aio_call, methods.GET_SERVER_INFO, GetServerInfoRequest())).max_loras
        with pytest.raises(RpcError, match="lora_name is not supported") as caught:
            await ask(engine, "a")
        assert StatusCode.UNIMPLEMENTED == caught.value.status
