"""What Dynamo offers of an engine beside requests: controls, updates, adapters and KV events (spec 12, 13, 14)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import structlog

from trio_sidecar.bridge import aio_shielded, run_aio
from trio_sidecar.bridge.loop import current_loop
from trio_sidecar.config import DisaggregationMode
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.errors import EngineShutdown, InvalidRequest, SidecarError
from trio_sidecar.kv_events import aio_list_sources
from trio_sidecar.lora import AdapterGate, LoraManager, LoraSettings
from trio_sidecar.requests.ranks import RankGate
from trio_sidecar.rl import RlClient, check_control_body, supported_controls, supported_updates, worker_metadata
from trio_sidecar.worker.etcd import discovery_backend
from trio_sidecar.worker.kv_publishers import KvPublishers
from trio_sidecar.worker.lora import DynamoPublisher, aio_downloader
from trio_sidecar.worker.registration import check_registration, component_of, registration
from trio_sidecar.worker.rl import RouteDescriber, own_system_port, rl_endpoint_name, system_url

if TYPE_CHECKING:
    from typing import TypeAlias

    import trio

    from trio_sidecar.config import WorkerSettings
    from trio_sidecar.discovery import DiscoveredModel
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.kv_events import KvSource
    from trio_sidecar.worker.binding import Binding

    Answer: TypeAlias = dict[str, object]

__all__ = ["Management"]

WITHDRAW_SECONDS = 5.0
"""How long the adapters' records may take to go when the worker shuts down, in seconds."""

LOOPBACK = "127.0.0.1"
"""Where an engine is that is reached through a file."""

UNREGISTERING = frozenset({"pause_generation", "sleep"})
"""Controls before which Dynamo withdraws the worker, and after whose failure it leaves it withdrawn."""

log = structlog.get_logger("trio_sidecar.worker")


class Management:
    """One worker's; made before the engine starts, and told when it has.

    Args:
        binding: Dynamo.
        settings: What the worker serves as.
        model: What the look at the engine has found.

    Raises:
        InvalidConfig: RL is wanted and a setting for it is missing or wrong (spec 6.4).
        IncompatibleEngine: RL is wanted and the engine does not say what a trainer must know.
    """

    def __init__(self, binding: Binding, settings: WorkerSettings, model: DiscoveredModel) -> None:
        self._binding = binding
        self._settings = settings
        self._engine: Engine | None = None
        self._endpoint: Any = None
        self._rl_endpoint: Any = None
        self._kv_sources: tuple[KvSource, ...] = ()
        self._kv_publishers = KvPublishers(binding)
        self._nursery: trio.Nursery | None = None
        self._describer = self._describe(model) if settings.enable_rl else None
        self._take(None, model)

    def _take(self, engine: Engine | None, model: DiscoveredModel) -> None:
        self._engine, self._model = engine, model
        self._rl = RlClient(model.rl_capabilities, engine)
        lora = LoraSettings(
            enabled=self._settings.lora_enabled,
            supported=model.supports_lora,
            max_loras=model.max_loras,
            base_names=model.base_names,
            hot_swap=self._settings.lora_hot_swap,
        )
        self._lora = LoraManager(engine, lora, aio_downloader(self._binding))

    def attach(self, engine: Engine, model: DiscoveredModel) -> Engine:
        """The engine has started.

        Returns:
            The engine for requests, which lets them select published adapters and this worker's ranks only.
        """
        self._take(engine, model)
        gate = AdapterGate(engine, self._lora.records, self._lora.locks)
        return gate if self._settings.dp_ranks is None else RankGate(gate, model.ranks)

    def work_in(self, nursery: trio.Nursery) -> None:
        """Where tasks that outlive a call of Dynamo's run; it ends when the worker does."""
        self._nursery = nursery

    # -- Controls and updates ---------------------------------------------------------------------------------------

    def controls(self) -> list[str]:
        """The controls to offer (called from another thread)."""
        return list(supported_controls(self._model.rl_capabilities))

    def updates(self) -> list[str]:
        """The updates to offer, those of adapters first (R12.4; called from another thread)."""
        return [*self._lora.supported_updates(), *supported_updates(self._model.rl_capabilities)]

    async def aio_control(self, name: str, body: object) -> Answer:
        """Run a control; a body that is not allowed gets an envelope, as it does from the Rust sidecar.

        Raises:
            SidecarError: It failed.
        """
        if name in self.controls():
            try:
                check_control_body(name, body)
            except InvalidRequest as error:
                refusal: Answer = {"status": "error", "message": str(error)}
            else:
                return await self._rl.aio_control(name, body)
            if name in UNREGISTERING:
                # Dynamo has withdrawn the worker already, though nothing will happen to it.
                await self._endpoint.register_endpoint_instance()
            return refusal
        return await self._rl.aio_control(name, body)

    async def aio_update(self, name: str, body: object) -> Answer:
        """Run an update.

        Raises:
            SidecarError: It failed.
        """
        if name in self._lora.supported_updates():
            return await self._lora.aio_update(name, body)
        return await self._rl.aio_update(name, body)

    # -- KV events --------------------------------------------------------------------------------------------------

    async def aio_check_kv_sources(self) -> None:
        """Find the sources: one per rank; none of an encode worker (R14.1). They are followed as the endpoint is ready.

        Raises:
            SidecarError: The engine did not say, or said what cannot be (spec 14).
        """
        if self._settings.disaggregation_mode is DisaggregationMode.ENCODE:
            return
        if self._engine is None:
            reason = "the worker has not started"
            raise EngineShutdown(reason)
        endpoint = self._settings.transport.grpc_endpoint
        host = endpoint.host if isinstance(endpoint, GrpcEndpoint) else LOOPBACK
        listed = await aio_list_sources(self._engine, self._model.local_ranks, host)
        self._kv_sources = tuple(source for source in listed if source.dp_rank in self._model.ranks)

    def _follow_kv_sources(self) -> None:
        self._kv_publishers.follow(
            self._endpoint, self._kv_sources, registration(self._model, self._settings).kv_cache_block_size
        )

    # -- Registration -----------------------------------------------------------------------------------------------

    async def aio_endpoint_ready(self, endpoint: Any) -> None:
        """The worker's endpoint exists, but nothing is registered there yet."""
        self._endpoint = endpoint
        self._attach_publisher()
        self._follow_kv_sources()

    def _attach_publisher(self) -> None:
        publisher = DynamoPublisher(
            binding=self._binding,
            endpoint=self._endpoint,
            settings=self._settings,
            facts=registration(self._model, self._settings),
        )
        self._lora.records.attach(publisher)

    async def aio_before_serving(self) -> None:
        """The base model has its record, and requests come next: adapters that are there get theirs (R13.28)."""
        await self._lora.aio_reconcile()
        if self._describer is not None:
            self._serve_rl(self._describer)

    async def aio_withdraw(self) -> None:
        """Remove the records of all adapters; those stay in the engine (R11.5). Tell nobody of blocks any more."""
        try:
            await aio_shielded(WITHDRAW_SECONDS, self._lora.records.aio_withdraw)
        except TimeoutError as error:
            log.warning("lora_records_not_removed", reason=str(error))
        endpoint, self._rl_endpoint = self._rl_endpoint, None
        await _aio_unregister(endpoint, "rl_endpoint_not_withdrawn")
        self._kv_publishers.stop()

    @property
    def paused(self) -> bool:
        """Whether an operator has the engine rest."""
        return self._rl.quieted

    # -- Recovery ---------------------------------------------------------------------------------------------------

    async def aio_withdraw_for_recovery(self) -> None:
        """The engine is away: unpublish the adapters, then the worker, for requests and for trainers (R15.4)."""
        await self._lora.aio_unpublish_all()
        if not self._rl.quieted:  # before a pause Dynamo has withdrawn it
            await _aio_unregister(self._endpoint, "worker_not_withdrawn", effect="requests are refused one by one")
        await _aio_unregister(self._rl_endpoint, "rl_endpoint_not_withdrawn")

    async def aio_return_from_recovery(self, now: DiscoveredModel, *, replaced: bool) -> None:
        """The engine is back: what is known of its blocks first, then the adapters, then the worker (R15.6, R15.15).

        The worker stays withdrawn if it was paused (R12.8).

        Raises:
            IncompatibleEngine: It is not what the worker is registered as, and the record cannot be written anew.
            SidecarError: The sources of KV events are not what they should be, or the adapters could not be reconciled.
            EngineShutdown: Dynamo does not take the worker back.
        """
        if replaced:
            self._model = check_registration(self._model, now.standing_for(self._settings.dp_ranks), self._settings)
            if self._endpoint is not None:
                await self.aio_check_kv_sources()
                self._attach_publisher()
                self._follow_kv_sources()
        await self._lora.aio_reconcile_or_fail()
        if self._rl.quieted:
            await self._aio_stay_quiet()
        else:
            await _aio_register(self._endpoint)
        await _aio_register(self._rl_endpoint)

    async def _aio_stay_quiet(self) -> None:
        """Dynamo brings the worker back after the operator's resume; until then the engine is to rest as ordered."""
        try:
            await self._rl.aio_quiet_again()
        except SidecarError as error:
            log.warning("pause_not_ordered_again", reason=str(error), effect="the worker stays withdrawn all the same")
        else:
            log.info("stays_paused", effect="the worker stays withdrawn until it is resumed")

    # -- RL ---------------------------------------------------------------------------------------------------------

    def _describe(self, model: DiscoveredModel) -> RouteDescriber:
        metadata = worker_metadata(
            model,
            configured_world_size=self._settings.vllm_rl_world_size,
            http_endpoint=self._settings.vllm_http_endpoint,
        )
        rl_endpoint_name(os.environ, self._settings.endpoint)
        routes = [f"control/{name}" for name in supported_controls(model.rl_capabilities)]
        routes += [f"update/{name}" for name in supported_updates(model.rl_capabilities)]
        return RouteDescriber(routes=routes, url=system_url(os.environ), metadata=metadata)

    def _serve_rl(self, describer: RouteDescriber) -> None:
        """Open the endpoint that describes this worker to trainers.

        The worker's own runtime has no way to add one, so it hangs on a second one and has another instance id.
        """
        if self._binding.open_runtime is None or self._nursery is None:
            return
        settings = self._settings
        backend = discovery_backend(settings.discovery_backend, os.environ)
        plane = settings.request_plane or os.environ.get("DYN_REQUEST_PLANE", "tcp")
        with own_system_port(os.environ):
            runtime = self._binding.open_runtime(current_loop(), backend, plane)
        name = rl_endpoint_name(os.environ, settings.endpoint)
        self._rl_endpoint = runtime.endpoint(f"{settings.namespace}.{component_of(settings)}.{name}")
        self._nursery.start_soon(run_aio, self._aio_serve_rl, describer)

    async def _aio_serve_rl(self, describer: RouteDescriber) -> None:
        try:
            await self._rl_endpoint.serve_endpoint(describer.aio_generate, graceful_shutdown=True)
        except Exception as error:  # noqa: BLE001 - Dynamo raises plain exceptions
            log.error("rl_endpoint_failed", reason=str(error))


async def _aio_unregister(endpoint: Any, failed: str, **why: str) -> None:
    """Let nobody find what is behind it; a failure is logged under that name. None has nothing behind it."""
    if endpoint is None:
        return
    try:
        await aio_shielded(WITHDRAW_SECONDS, endpoint.unregister_endpoint_instance)
    except Exception as error:  # noqa: BLE001 - Dynamo raises plain exceptions
        log.warning(failed, reason=str(error), **why)


async def _aio_register(endpoint: Any) -> None:
    """Let it be found again; None has nothing behind it.

    Raises:
        EngineShutdown: Dynamo refuses.
    """
    if endpoint is None:
        return
    try:
        await endpoint.register_endpoint_instance()
    except Exception as error:
        reason = f"the worker could not be registered again: {error}"
        raise EngineShutdown(reason) from error
