"""Who is compared, and how each is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trio_sidecar.engines.mock_tokenizer import MOCK_MODEL_DIR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CONTENDERS", "DEFAULT", "Contender"]


@attrs.frozen(slots=True, kw_only=True)
class Contender:
    """One way to serve a model with Dynamo.

    Attributes:
        name: For tables and ``--contenders``.
        text: What it is.
        argv: Arguments for Python, from the namespace to register in, the engine's address and the connections.
        paced: Whether its engine keeps the pace that a request asks for; the mock engine keeps its own.
    """

    name: str
    text: str
    argv: Callable[[str, str, int], Sequence[str]]
    paced: bool = True


def _ours(*flags: str) -> Callable[[str, str, int], Sequence[str]]:
    def argv(namespace: str, endpoint: str, connections: int) -> Sequence[str]:
        return (
            *("-m", "trio_sidecar", "worker", "--log-level=warning", f"--grpc-connections={connections}"),
            *(f"--grpc-endpoint={endpoint}", f"--namespace={namespace}", *flags),
        )

    return argv


def _rust(namespace: str, endpoint: str, connections: int) -> Sequence[str]:
    return (
        *("-m", "trio_sidecar", "worker-rust", "--grpc-endpoint", endpoint, "--namespace", namespace),
        *("--grpc-connections", str(connections)),
    )


def _naive(namespace: str, endpoint: str, connections: int) -> Sequence[str]:  # noqa: ARG001 - it has its own number
    return ("-m", "trio_sidecar_bench.naive_worker", namespace, str(MOCK_MODEL_DIR), endpoint)


def _floor(namespace: str, endpoint: str, connections: int) -> Sequence[str]:  # noqa: ARG001 - it has no engine
    return ("-m", "trio_sidecar_bench.floor_worker", namespace, str(MOCK_MODEL_DIR))


def _inproc(kind: str) -> Callable[[str, str, int], Sequence[str]]:
    def argv(namespace: str, endpoint: str, connections: int) -> Sequence[str]:  # noqa: ARG001 - it has no connection
        return ("-m", "trio_sidecar_bench.inproc_worker", namespace, kind)

    return argv


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(name="ours", text="trio-sidecar worker", argv=_ours()),
        Contender(name="ours-off", text="trio-sidecar worker --coalesce off", argv=_ours("--coalesce=off")),
        Contender(name="rust", text="the Rust sidecar", argv=_rust),
        Contender(name="naive", text="asyncio + grpclib + betterproto2", argv=_naive),
        Contender(name="floor", text="Dynamo's Python boundary alone", argv=_floor),
        Contender(name="inproc", text="trio-sidecar around the mock engine", argv=_inproc("trio"), paced=False),
        Contender(name="inproc-aio", text="asyncio around the mock engine", argv=_inproc("asyncio"), paced=False),
    )
}

DEFAULT = tuple(CONTENDERS)
