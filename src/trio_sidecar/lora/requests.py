"""Requests of the lifecycle and where adapters come from (spec 13.1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import attrs

from trio_sidecar.convert.fields import check_text, describe
from trio_sidecar.errors import InvalidRequest, SidecarError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["LoadRequest", "LoraError", "aio_resolve", "read_load", "read_unload"]

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_ALLOWED = "file:///PATH, hf://ORG/NAME or s3://BUCKET/KEY"


class LoraError(SidecarError):
    """An adapter could not be fetched, published or reconciled; nobody's request is at fault."""


@attrs.frozen(slots=True, kw_only=True)
class LoadRequest:
    """What is to be loaded: the name for requests, and where it comes from."""

    name: str
    uri: str


def read_load(body: object) -> LoadRequest:
    """The body of a load (R13.1 to R13.3).

    Raises:
        InvalidRequest: Names the member and what is allowed.
    """
    fields = _object(body)
    name = _name(fields).strip()
    source = fields.get("source")
    if not isinstance(source, Mapping):
        reason = f"source must be a JSON object with a uri, got {describe(source)}"
        raise InvalidRequest(reason)
    uri = source.get("uri")
    if not isinstance(uri, str) or not uri.strip():
        reason = f"source.uri must be a non-blank string, got {describe(uri)}"
        raise InvalidRequest(reason)
    return LoadRequest(name=name, uri=_checked_uri(check_text(uri, "source.uri").strip()))


def read_unload(body: object) -> str:
    """The body of an unload: the name exactly as given, because that is how the engine may know it (R13.3).

    Raises:
        InvalidRequest: There is none.
    """
    return _name(_object(body))


def _object(body: object) -> Mapping[str, object]:
    if not isinstance(body, Mapping):
        reason = f"the body must be a JSON object, got {describe(body)}"
        raise InvalidRequest(reason)
    return body


def _name(fields: Mapping[str, object]) -> str:
    name = fields.get("lora_name")
    if not isinstance(name, str) or not name.strip():
        reason = f"lora_name must be a non-blank string, got {describe(name)}"
        raise InvalidRequest(reason)
    return check_text(name, "lora_name")


def _checked_uri(uri: str) -> str:
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        reason = f"source.uri is no URI: {error}; allowed are {_ALLOWED}"
        raise InvalidRequest(reason) from error
    # Queries and fragments may hold secrets, so the URI is not repeated.
    if "?" in uri or "#" in uri:
        reason = f"source.uri must not have a query or a fragment; allowed are {_ALLOWED}"
        raise InvalidRequest(reason)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
            reason = "source.uri must name a local directory by its absolute path, as file:///PATH does"
            raise InvalidRequest(reason)
    elif parts.scheme not in ("hf", "s3") or not parts.netloc or not parts.path.strip("/"):
        reason = f"source.uri is of no known kind; allowed are {_ALLOWED}"
        raise InvalidRequest(reason)
    return uri


async def aio_resolve(uri: str, aio_download: Callable[[str], Awaitable[str]]) -> str:
    """Bring an adapter to this machine and check that it is one (R13.4; asyncio-flavoured).

    Args:
        uri: From :func:`read_load`.
        aio_download: Fetches it unless it is here, and returns its directory.

    Returns:
        The canonical absolute path, which is what vLLM gets.

    Raises:
        LoraError: It could not be fetched or looked at.
        InvalidRequest: The directory holds no adapter.
    """
    try:
        path, names = _look_into(await aio_download(uri))
    except SidecarError:
        raise
    except Exception as error:
        reason = f"failed to resolve the LoRA source: {error}"
        raise LoraError(reason) from error
    if "adapter_config.json" not in names:
        reason = "source.uri holds no adapter: adapter_config.json is missing"
        raise InvalidRequest(reason)
    if not names & set(_WEIGHTS):
        reason = f"source.uri holds no adapter weights: expected one of {', '.join(_WEIGHTS)}"
        raise InvalidRequest(reason)
    return path


def _look_into(directory: str) -> tuple[str, set[str]]:
    """The canonical path, and the names in it."""
    path = Path(directory).resolve()
    return str(path), {entry.name for entry in path.iterdir()}
