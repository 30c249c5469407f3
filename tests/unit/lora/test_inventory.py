"""What an engine may list, and what may be loaded beside it (spec 13.2, 13.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.lora import BASE_NAMES, lora
from trio_sidecar.errors import ErrorKind, InvalidRequest, ProtocolError
from trio_sidecar.lora.inventory import (
    Adapter,
    check_adapter,
    check_new_name,
    check_publishable,
    discovery_suffix,
    validated_inventory,
)

if TYPE_CHECKING:
    from trio_sidecar.wire import LoraAdapter


def test_adapters_are_sorted_by_name() -> None:
    """Whatever the engine's order."""
    inventory = validated_inventory([lora("b", 2, "/b"), lora("a", 1, "/a")])
    assert [
        ("a", Adapter(name="a", adapter_id=1, path="/a")),
        ("b", Adapter(name="b", adapter_id=2, path="/b")),
    ] == list(inventory.items())


@pytest.mark.rule("R13.8")
@pytest.mark.parametrize(
    ("listed", "named"),
    [
        ([lora(" ")], "blank lora_name"),
        ([lora("a", 0)], "lora_id 0"),
        ([lora("a", -1)], "lora_id -1"),
        ([lora("a", path=" ")], "blank source_path"),
        ([lora("a", 1), lora("a", 2)], "'a' twice"),
        ([lora("a", 1), lora("b", 1)], "id 1 twice"),
        ([lora("___")], "no usable discovery suffix"),
        ([lora("é")], "no usable discovery suffix"),
        ([lora("math-r8", 1), lora("Math-R8", 2)], "same discovery suffix 'math-r8'"),
    ],
)
def test_impossible_inventories_are_refused(listed: list[LoraAdapter], named: str) -> None:
    """A malformed adapter and two that cannot be told apart are the engine's fault, and are named."""
    with pytest.raises(ProtocolError, match=named) as caught:
        validated_inventory(listed)
    assert ErrorKind.UNKNOWN == caught.value.kind


@pytest.mark.rule("R13.5")
def test_a_trailing_space_makes_another_suffix() -> None:
    """Both names can be published side by side."""
    assert {"math-r8", "math-r8 "} == set(validated_inventory([lora("math-r8", 1), lora("math-r8 ", 2)]))


@pytest.mark.rule("R13.5", "FR-087")
@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("Math-R8", "math-r8"),
        ("math-r8 ", "math-r8_"),
        ("org/name", "org_name"),
        ("__a_b", "a_b"),
        ("/../a", "a"),
        ("Ünïcode-9", "n_code-9"),
        ("²", ""),
        ("...", ""),
    ],
)
def test_suffixes_are_dynamos(name: str, suffix: str) -> None:
    """Lower case, other characters as underscores, none of them at the front."""
    assert suffix == discovery_suffix(name)


@pytest.mark.rule("R13.8")
@pytest.mark.parametrize(
    ("adapter", "named"),
    [(None, "without an adapter"), (lora("b"), "expected 'a'"), (lora("a", 0), "lora_id 0")],
)
def test_answers_without_the_adapter_are_refused(adapter: LoraAdapter | None, named: str) -> None:
    """An answer has to hold the adapter that was asked for, with the engine's id."""
    with pytest.raises(ProtocolError, match=named):
        check_adapter(adapter, "LoadLora", name="a")


@pytest.mark.rule("R13.6")
@pytest.mark.parametrize("name", sorted(BASE_NAMES))
def test_base_names_cannot_be_loaded(name: str) -> None:
    """Source, served name and every alias belong to the base model."""
    with pytest.raises(InvalidRequest, match="conflicts with the base model"):
        check_new_name(name, [], BASE_NAMES)


@pytest.mark.rule("R13.7")
def test_a_taken_suffix_is_refused() -> None:
    """The message names the suffix and who has it; the same name again is no clash."""
    with pytest.raises(InvalidRequest, match="suffix 'math-r8', which the adapter 'math-r8' has"):
        check_new_name("Math-R8", ["other", "math-r8"], BASE_NAMES)
    check_new_name("math-r8", ["math-r8"], BASE_NAMES)


@pytest.mark.rule("R13.7")
def test_a_name_without_a_suffix_is_refused() -> None:
    """Its record would be the base model's."""
    with pytest.raises(InvalidRequest, match="no usable discovery suffix"):
        check_new_name("//", [], BASE_NAMES)


@pytest.mark.rule("R13.30")
def test_an_adapter_called_like_the_base_cannot_be_published() -> None:
    """The base model's requests would reach it."""
    with pytest.raises(ProtocolError, match="'model-alias', which is a name of the base model"):
        check_publishable(validated_inventory([lora("a", 1), lora("model-alias", 2)]), BASE_NAMES)
    check_publishable(validated_inventory([lora("a", 1)]), BASE_NAMES)
