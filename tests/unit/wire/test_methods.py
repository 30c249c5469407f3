"""The tables of calls against the services in protos/."""

from __future__ import annotations

from typing import Any

from trio_sidecar.wire import methods


def _tables() -> dict[str, methods.Method[Any, Any]]:
    """Every call that the module describes."""
    return {value.path: value for value in vars(methods).values() if isinstance(value, methods.Method)}


def test_every_rpc_of_the_contract_is_described_and_no_other(contract: Any) -> None:
    """Paths, message types and streaming of all calls are those of the .proto files."""
    classes = {google.DESCRIPTOR.full_name: ours for ours, google in contract.pairs}
    expected = {
        f"/{file.package}.{service.name}/{rpc.name}": (
            classes[rpc.input_type.lstrip(".")],
            classes[rpc.output_type.lstrip(".")],
            rpc.server_streaming,
            rpc.client_streaming,
        )
        for file in contract.files
        for service in file.service
        for rpc in service.method
    }
    actual = {
        path: (method.request, method.response, method.server_streaming, False) for path, method in _tables().items()
    }
    assert expected == actual


def test_control_methods_are_all_unary_calls_of_control(contract: Any) -> None:
    """The table for Control holds each of its calls once, in the order of the .proto file."""
    control = [
        rpc.name
        for file in contract.files
        for service in file.service
        if service.name == "Control"
        for rpc in service.method
    ]
    assert control == [method.name for method in methods.CONTROL_METHODS]
    assert {methods.CONTROL} == {method.service for method in methods.CONTROL_METHODS}
    assert not any(method.server_streaming for method in methods.CONTROL_METHODS)
