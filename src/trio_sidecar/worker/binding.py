"""Dynamo's Python binding, as one value: what the worker needs of it, so that tests can put something else there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.errors import ErrorKind, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

__all__ = ["Binding", "RequestContext", "load_binding", "missing_dynamo"]


class RequestContext(Protocol):
    """What Dynamo hands over beside a request; the methods that the worker uses."""

    def id(self) -> str:
        """The request's id, chosen by the front end or the client; not necessarily unique."""
        ...

    def is_stopped(self) -> bool:
        """Whether the request was cancelled."""
        ...

    def trace_headers(self) -> Mapping[str, str] | None:
        """The request's trace context, as headers, and other headers beside it."""
        ...

    def async_killed_or_stopped(self) -> Any:
        """An asyncio future that is done when the request has been cancelled."""
        ...

    def notify_first_token(self) -> None:
        """Tell Dynamo that a decode request has its first token; until then Dynamo holds ``abort`` back."""
        ...


@attrs.frozen(slots=True, kw_only=True)
class Binding:
    """The classes of ``dynamo._core`` that the worker makes.

    Attributes:
        worker: ``Worker(engine, config, event_loop, raw)``; its ``run()`` must be awaited.
        worker_config: Where and how to register.
        engine_config: What ``start`` returns.
        llm_registration: Limits and capacities in it.
        runtime_config: Discovery and transports.
        modes: Dynamo's name of each role.
        errors: The exception class for each kind of error.
        run_vllm_sidecar: Runs the Rust sidecar with the given arguments until it ends.
        llm: ``dynamo.llm``: registers models one by one, and fetches adapters.
        open_runtime: ``DistributedRuntime(loop, discovery_backend, request_plane)``: one beside the worker's own, for
            an endpoint that the worker does not have.
        kv_event_publisher: ``dynamo.llm.KvEventPublisher``: publishes what a source of KV events says.
        waits_for_etcd: Whether its runtime waits for etcd without a word and without letting signals through, so that
            the worker had better wait before.
    """

    worker: Callable[..., Any]
    worker_config: Callable[..., Any]
    engine_config: Callable[..., Any]
    llm_registration: Callable[..., Any]
    runtime_config: Callable[..., Any]
    modes: Mapping[DisaggregationMode, Any]
    errors: Mapping[ErrorKind, Callable[[str], Exception]]
    run_vllm_sidecar: Callable[[Sequence[str]], None]
    llm: Any = None
    open_runtime: Callable[..., Any] | None = None
    kv_event_publisher: Callable[..., Any] | None = None
    waits_for_etcd: bool = False

    def aio_run(self, engine: object, config: object, loop: object) -> Awaitable[None]:
        """Run a worker on that loop until Dynamo ends it (must be awaited from asyncio)."""
        run: Awaitable[None] = self.worker(engine, config, loop, raw=False).run()
        return run


def missing_dynamo(error: ImportError) -> MissingExtra:
    """The error that says what to install.

    Raises:
        ImportError: Dynamo is installed but broken; that message says more than ours would.
    """
    if error.name is None or error.name.partition(".")[0] != "dynamo":
        raise error
    return MissingExtra("Dynamo's runtime", "dynamo")


def load_binding() -> Binding:
    """Import Dynamo's runtime.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        from dynamo import _core, llm  # noqa: PLC0415 - an optional extra
        from dynamo._core import backend  # noqa: PLC0415
    except ImportError as error:
        raise missing_dynamo(error) from error
    mode = backend.DisaggregationMode
    return Binding(
        worker=backend.Worker,
        worker_config=backend.WorkerConfig,
        engine_config=backend.EngineConfig,
        llm_registration=backend.LlmRegistration,
        runtime_config=backend.RuntimeConfig,
        modes={
            DisaggregationMode.AGGREGATED: mode.Aggregated,
            DisaggregationMode.PREFILL: mode.Prefill,
            DisaggregationMode.DECODE: mode.Decode,
            DisaggregationMode.ENCODE: mode.Encode,
        },
        errors={kind: getattr(_core, kind.value) for kind in ErrorKind},
        run_vllm_sidecar=lambda arguments: backend._run_vllm_sidecar(list(arguments)),  # noqa: SLF001
        llm=llm,
        open_runtime=_core.DistributedRuntime,
        kv_event_publisher=llm.KvEventPublisher,
        waits_for_etcd=True,
    )
