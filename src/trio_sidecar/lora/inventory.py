"""The adapters that an engine holds, as it lists them (spec 13.2, 13.3); pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_sidecar.errors import InvalidRequest, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from trio_sidecar.wire import LoraAdapter

__all__ = [
    "Adapter",
    "check_adapter",
    "check_new_name",
    "check_publishable",
    "discovery_suffix",
    "validated_inventory",
]


@attrs.frozen(slots=True, kw_only=True)
class Adapter:
    """One adapter in the engine.

    Attributes:
        name: What requests call it.
        adapter_id: The engine's id for it, which is opaque.
        path: Where the engine loaded it from.
    """

    name: str
    adapter_id: int
    path: str


def discovery_suffix(name: str) -> str:
    """How Dynamo's discovery names an adapter: in lower case, whatever is no letter, digit or dash as an underscore.

    Adapters whose suffixes are the same overwrite each other in discovery. An empty suffix would be the base model's.
    """
    kept = (
        character if character.isascii() and (character.isalnum() or character in "-_") else "_"
        for character in name.lower()
    )
    return "".join(kept).lstrip("_")


def check_adapter(adapter: LoraAdapter | None, rpc: str, *, name: str | None = None) -> Adapter:
    """An adapter as an answer describes it (R13.8).

    Args:
        adapter: From the answer.
        rpc: The call, for messages.
        name: What it has to be called; None allows any name.

    Raises:
        ProtocolError: It is missing, has another name, or lacks a name, an id or a path.
    """
    if adapter is None:
        reason = f"{rpc} answered without an adapter"
        raise ProtocolError(reason)
    if not adapter.lora_name.strip():
        reason = f"{rpc} returned an adapter with a blank lora_name"
        raise ProtocolError(reason)
    if name is not None and adapter.lora_name != name:
        reason = f"{rpc} returned the adapter {adapter.lora_name!r}; expected {name!r}"
        raise ProtocolError(reason)
    if adapter.lora_id <= 0:
        reason = f"{rpc} returned the adapter {adapter.lora_name!r} with lora_id {adapter.lora_id}; ids begin at 1"
        raise ProtocolError(reason)
    if not adapter.source_path.strip():
        reason = f"{rpc} returned the adapter {adapter.lora_name!r} with a blank source_path"
        raise ProtocolError(reason)
    return Adapter(name=adapter.lora_name, adapter_id=adapter.lora_id, path=adapter.source_path)


def validated_inventory(adapters: Iterable[LoraAdapter]) -> dict[str, Adapter]:
    """The whole list by name, in the order of names.

    Raises:
        ProtocolError: An adapter is malformed, or two of them have the same name, id or discovery suffix.
    """
    checked = [check_adapter(adapter, "ListLoras") for adapter in adapters]
    names: dict[str, Adapter] = {}
    ids: dict[int, str] = {}
    suffixes: dict[str, str] = {}
    for adapter in sorted(checked, key=lambda one: one.name):
        if adapter.name in names:
            reason = f"ListLoras returned the adapter name {adapter.name!r} twice"
            raise ProtocolError(reason)
        if adapter.adapter_id in ids:
            reason = f"ListLoras returned the adapter id {adapter.adapter_id} twice, for {ids[adapter.adapter_id]!r} "
            reason += f"and {adapter.name!r}"
            raise ProtocolError(reason)
        suffix = discovery_suffix(adapter.name)
        if not suffix:
            reason = f"ListLoras returned the adapter {adapter.name!r}, whose name has no usable discovery suffix"
            raise ProtocolError(reason)
        if suffix in suffixes:
            reason = f"the adapters {suffixes[suffix]!r} and {adapter.name!r} have the same discovery suffix {suffix!r}"
            raise ProtocolError(reason)
        names[adapter.name] = adapter
        ids[adapter.adapter_id] = suffixes[suffix] = adapter.name
    return names


def check_publishable(inventory: Mapping[str, Adapter], base_names: Collection[str]) -> None:
    """Refuse to publish an inventory in which an adapter is called like the base model (R13.30).

    Raises:
        ProtocolError: Names the adapter.
    """
    for name in inventory:
        if name in base_names:
            reason = f"the engine holds an adapter called {name!r}, which is a name of the base model"
            raise ProtocolError(reason)


def check_new_name(name: str, loaded: Iterable[str], base_names: Collection[str]) -> None:
    """Refuse a name that could not be published (R13.6, R13.7).

    Args:
        name: Of the adapter to load.
        loaded: Names of the other adapters.
        base_names: Every name of the base model.

    Raises:
        InvalidRequest: It is a name of the base model, has no suffix, or has another adapter's.
    """
    if name in base_names:
        reason = f"lora_name {name!r} conflicts with the base model, which has that name"
        raise InvalidRequest(reason)
    suffix = discovery_suffix(name)
    if not suffix:
        reason = f"lora_name {name!r} has no usable discovery suffix; it needs a letter, a digit or a dash"
        raise InvalidRequest(reason)
    for other in loaded:
        if other != name and discovery_suffix(other) == suffix:
            reason = f"lora_name {name!r} has the discovery suffix {suffix!r}, which the adapter {other!r} has already"
            raise InvalidRequest(reason)
