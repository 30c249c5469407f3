"""Requests of the adapter lifecycle and their sources (spec 13.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.lora import make_adapter
from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.errors import ErrorKind, InvalidRequest
from trio_sidecar.lora.requests import LoadRequest, LoraError, aio_resolve, read_load, read_unload

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path


def body(uri: object = "file:///models/adapter", name: object = "adapter-a") -> dict[str, Any]:
    return {"lora_name": name, "source": {"uri": uri}}


@pytest.mark.rule("R13.1")
@pytest.mark.parametrize(
    "uri", ["file:///models/adapter", "hf://org/adapter", "hf://org/X", "s3://bucket/adapter", "s3://bucket/a/b/"]
)
def test_known_sources_are_accepted(uri: str) -> None:
    """A local directory, a Hugging Face repository and an object store are sources; spaces around are dropped."""
    assert LoadRequest(name="adapter-a", uri=uri) == read_load(body(f"  {uri}\n"))


@pytest.mark.rule("R13.1", "R13.2")
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (None, "JSON object"),
        ([], "JSON object"),
        ({}, "lora_name"),
        ({"lora_name": " "}, "lora_name"),
        (body(name=1), "lora_name"),
        ({"lora_name": "a"}, "source"),
        ({"lora_name": "a", "source": "file:///x"}, "source"),
        (body(None), "source.uri"),
        (body(""), "source.uri"),
        (body("  "), "source.uri"),
        (body("https://example.com/adapter"), "no known kind"),
        (body("/models/adapter"), "no known kind"),
        (body("hf://"), "no known kind"),
        (body("hf://org"), "no known kind"),
        (body("s3://bucket/"), "no known kind"),
        (body("file://host/adapter"), "absolute path"),
        (body("file:///"), "absolute path"),
        (body("file:adapter"), "absolute path"),
        (body("file:///adapter?query=1"), "query or a fragment"),
        (body("file:///adapter?"), "query or a fragment"),
        (body("file:///adapter#fragment"), "query or a fragment"),
        (body("hf://org/adapter#"), "query or a fragment"),
        (body("hf://[org/adapter"), "no URI"),
    ],
)
def test_other_load_requests_are_refused(wrong: Any, named: str) -> None:
    """What is missing or of another kind is an invalid argument that says what is allowed."""
    with pytest.raises(InvalidRequest, match=named) as caught:
        read_load(wrong)
    assert ErrorKind.INVALID_ARGUMENT == caught.value.kind


ALLOWED = "allowed are file:///PATH, hf://ORG/NAME or s3://BUCKET/KEY"


@pytest.mark.rule("R13.1", "R13.2")
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([], "the body must be a JSON object, got an array"),
        ({"lora_name": 7}, "lora_name must be a non-blank string, got 7"),
        ({"lora_name": "a\udc80"}, "lora_name must be valid Unicode, got a lone surrogate at position 1"),
        ({"lora_name": "a", "source": "s"}, "source must be a JSON object with a uri, got the text 's'"),
        (body(8), "source.uri must be a non-blank string, got 8"),
        (body("s3://\udc80"), "source.uri must be valid Unicode, got a lone surrogate at position 5"),
        (body("s3://b"), f"source.uri is of no known kind; {ALLOWED}"),
        (body("s3://b/?k"), f"source.uri must not have a query or a fragment; {ALLOWED}"),
        (body("s3://b/#k"), f"source.uri must not have a query or a fragment; {ALLOWED}"),
        (body("hf://[o/a"), f"source.uri is no URI: Invalid IPv6 URL; {ALLOWED}"),
        (body("file:x"), "source.uri must name a local directory by its absolute path, as file:///PATH does"),
    ],
)
def test_refusals_name_member_value_and_what_is_allowed(wrong: Any, sentence: str) -> None:
    """Whoever sent it can put it right from the message alone."""
    with pytest.raises(InvalidRequest) as caught:
        read_load(wrong)
    assert f"InvalidRequest: {sentence}" == str(caught.value)


def test_a_source_is_never_repeated() -> None:
    """People put secrets into queries; messages must not carry them on."""
    with pytest.raises(InvalidRequest) as caught:
        read_load(body("s3://bucket/key?token=hunter2"))
    assert "hunter2" not in str(caught.value)


@pytest.mark.rule("R13.3")
def test_loading_trims_the_name_and_unloading_does_not() -> None:
    """So that an adapter whose resident name has a space can be removed."""
    assert "math-r8" == read_load(body(name=" math-r8 ")).name
    assert "math-r8 " == read_unload({"lora_name": "math-r8 "})


@pytest.mark.rule("R13.2")
@pytest.mark.parametrize("wrong", [None, {}, {"lora_name": " "}, {"lora_name": None}])
def test_unloading_needs_a_name(wrong: Any) -> None:
    """Nothing is unloaded without one."""
    with pytest.raises(InvalidRequest):
        read_unload(wrong)


# -- Directories


async def resolve(directory: object) -> str:
    async def aio_download(uri: str) -> str:
        await aio_checkpoint()
        assert "file:///any" == uri
        if isinstance(directory, Exception):
            raise directory
        return str(directory)

    return await run_aio(aio_resolve, "file:///any", aio_download)


@pytest.mark.rule("R13.4")
async def test_the_engine_gets_the_canonical_path(aio_loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """Links are followed, and relative parts are gone."""
    adapter = make_adapter(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(adapter, target_is_directory=True)
    assert str(adapter.resolve()) == await resolve(tmp_path / "adapter" / ".." / "link")


@pytest.mark.rule("R13.4")
@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("adapter_config.json", "source.uri holds no adapter: adapter_config.json is missing"),
        (
            "adapter_model.safetensors",
            (
                "source.uri holds no adapter weights: "
                "expected one of adapter_model.safetensors, adapter_model.bin, adapter_model.pt"
            ),
        ),
    ],
)
async def test_a_directory_without_an_adapter_is_refused(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, missing: str, sentence: str
) -> None:
    """Configuration and weights are both needed; the message names what is missing."""
    adapter = make_adapter(tmp_path)
    (adapter / missing).unlink()
    with pytest.raises(InvalidRequest) as caught:
        await resolve(adapter)
    assert f"InvalidRequest: {sentence}" == str(caught.value)


@pytest.mark.rule("R13.4")
@pytest.mark.parametrize("weights", ["adapter_model.bin", "adapter_model.pt"])
async def test_weights_may_be_of_an_older_format(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, weights: str
) -> None:
    """Safetensors are not the only weights that vLLM reads."""
    adapter = make_adapter(tmp_path)
    (adapter / "adapter_model.safetensors").rename(adapter / weights)
    assert str(adapter.resolve()) == await resolve(adapter)


@pytest.mark.rule("R13.4")
@pytest.mark.parametrize("what", ["download", "missing", "file"])
async def test_what_cannot_be_fetched_or_looked_at_is_nobodys_fault(
    aio_loop: asyncio.AbstractEventLoop, tmp_path: Path, what: str
) -> None:
    """A failed download, a directory that is not there and one that is none are of kind Unknown."""
    file = tmp_path / "file"
    file.write_text("")
    source = {"download": RuntimeError("no network"), "missing": tmp_path / "nowhere", "file": file}[what]
    with pytest.raises(LoraError, match="failed to resolve the LoRA source") as caught:
        await resolve(source)
    assert ErrorKind.UNKNOWN == caught.value.kind
