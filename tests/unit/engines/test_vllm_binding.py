"""Which vLLM can be used, found out from what it has; its modules are stand-ins."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from trio_sidecar.engines import vllm_binding
from trio_sidecar.engines.vllm_binding import (
    NEEDED_OF_ADD_REQUEST,
    NEEDED_OF_ENGINE,
    NEEDED_OF_PARAMS,
    load_binding,
)
from trio_sidecar.errors import IncompatibleEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES = {
    "vllm.distributed.weight_transfer.base": ("WeightTransferInitRequest", "WeightTransferUpdateRequest"),
    "vllm.engine.arg_utils": ("AsyncEngineArgs",),
    "vllm.inputs.engine": ("tokens_input",),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.sampling_params": ("StructuredOutputsParams",),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
    "vllm.v1.engine.async_llm": (),
    "vllm.v1.kv_hints": ("KvHintAction", "KvHintsEnvelope"),
}
ENGINE = frozenset(NEEDED_OF_ENGINE)
# What a later release may have added is in the way of nothing.
LATER = {"engine": {"another_call"}, "request": {"another_argument"}, "params": {"another_knob"}}
NEEDS = r"needed is vLLM 0\.32 or 0\.33"


def taking(parameters: Iterable[str]) -> Any:
    """A callable with these parameters."""

    def called(**_: Any) -> None:
        """Never called."""

    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parameters])
    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a vLLM with some calls, some arguments of ``add_request`` and some sampling parameters."""

    def install(
        *,
        version: str = "0.32.0",
        engine: Iterable[str] = ENGINE,
        request: Iterable[str] = NEEDED_OF_ADD_REQUEST,
        params: Iterable[str] = NEEDED_OF_PARAMS,
        without: str = "",
    ) -> dict[str, Any]:
        monkeypatch.setattr(vllm_binding, "_version", lambda: version)
        modules = {path: ModuleType(path) for name in NAMES for path in packages(name)}
        for name, members in NAMES.items():
            for member in members:
                setattr(modules[name], member, object())
        llm = SimpleNamespace(**dict.fromkeys(engine), add_request=taking(request))
        vars(modules["vllm.v1.engine.async_llm"])["AsyncLLM"] = llm
        vars(modules["vllm.sampling_params"])["SamplingParams"] = taking(params)
        vars(modules["vllm.sampling_params"])["RequestOutputKind"] = SimpleNamespace(DELTA="delta")
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, None if name == without else module)
        return {"llm": llm, "modules": modules}

    return install


def packages(name: str) -> list[str]:
    """A module's name and those of its packages."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


@pytest.mark.parametrize(
    ("version", "more"),
    [("0.32.0", {}), ("0.33.0", LATER), ("of unknown version", {})],
    ids=["0.32", "0.33", "unknown"],
)
def test_what_has_all_that_is_needed_is_taken(installed: Any, version: str, more: dict[str, set[str]]) -> None:
    """Whatever its version says, and with whatever else it has."""
    made = installed(
        version=version,
        engine=ENGINE | more.get("engine", set()),
        request=NEEDED_OF_ADD_REQUEST | more.get("request", set()),
        params=NEEDED_OF_PARAMS | more.get("params", set()),
    )
    binding = load_binding()
    assert (version, made["llm"], "delta") == (binding.version, binding.async_llm, binding.delta)


@pytest.mark.parametrize("missing", sorted(ENGINE))
def test_a_missing_call_is_named(installed: Any, missing: str) -> None:
    """Each one, with the version that was found and those that are needed."""
    installed(version="0.31.1", engine=ENGINE - {missing})
    with pytest.raises(IncompatibleEngine, match=rf"vLLM 0\.31\.1 cannot be used: it lacks {missing}; {NEEDS}"):
        load_binding()


@pytest.mark.parametrize("missing", sorted(NEEDED_OF_ADD_REQUEST))
def test_a_missing_argument_is_named(installed: Any, missing: str) -> None:
    """Each one of those that a request needs."""
    installed(version="0.31.1", request=NEEDED_OF_ADD_REQUEST - {missing})
    with pytest.raises(IncompatibleEngine, match=rf"it lacks {missing}; {NEEDS}"):
        load_binding()


@pytest.mark.parametrize("missing", sorted(NEEDED_OF_PARAMS))
def test_a_missing_sampling_parameter_is_named(installed: Any, missing: str) -> None:
    """Each one whose lack would change answers."""
    installed(version="0.31.1", params=NEEDED_OF_PARAMS - {missing})
    with pytest.raises(IncompatibleEngine, match=rf"it lacks {missing}; {NEEDS}"):
        load_binding()


def test_all_that_is_missing_is_named_at_once(installed: Any) -> None:
    """Calls first, then arguments, then sampling parameters."""
    installed(
        engine=ENGINE - {"abort"},
        request=NEEDED_OF_ADD_REQUEST - {"kv_hints"},
        params=NEEDED_OF_PARAMS - {"watermarking"},
    )
    with pytest.raises(IncompatibleEngine, match="it lacks abort, kv_hints, watermarking;"):
        load_binding()


@pytest.mark.parametrize("module", sorted(NAMES))
def test_a_missing_module_is_named(installed: Any, module: str) -> None:
    """As in releases that are too old, or have moved it."""
    installed(version="0.34.0", without=module)
    with pytest.raises(IncompatibleEngine, match=rf"vLLM 0\.34\.0 cannot be used: .*{module}.*; {NEEDS}"):
        load_binding()
