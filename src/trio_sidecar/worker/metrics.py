"""The worker's metrics: what its parts have counted, read when Dynamo's system server is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

import trio_sidecar
from trio_sidecar.engines.remote import RemoteEngine
from trio_sidecar.metrics import WORKER_FAMILIES, FamilyCollector, Histogram, exposition, passed_on
from trio_sidecar.metrics.families import LATENCY_BOUNDS

if TYPE_CHECKING:
    from trio_sidecar.discovery import DiscoveredModel
    from trio_sidecar.engines.contract import Engine
    from trio_sidecar.lifecycle import StopRequest
    from trio_sidecar.metrics.exposition import Labels, Reading, Value
    from trio_sidecar.recovery import Recovery
    from trio_sidecar.requests.sessions import Sessions
    from trio_sidecar.transport.pool import Pool

__all__ = ["WorkerMetrics"]

ENGINE_PREFIX = "vllm:"
"""The metrics of a vLLM in this process."""


@attrs.define(eq=False, kw_only=True)
class WorkerMetrics:
    """Reads the parts of one worker.

    :meth:`text` may be called from any thread: it reads numbers, and containers whose size does not change.

    Attributes:
        sessions: The requests.
        stop: The wish that the worker end.
        role: The disaggregation mode.
        lag: How late the loop was; :func:`~trio_sidecar.metrics.watch_lag` fills it.
    """

    sessions: Sessions
    stop: StopRequest
    role: str
    lag: Histogram = attrs.field(factory=lambda: Histogram(LATENCY_BOUNDS))
    _model: DiscoveredModel | None = attrs.field(default=None, init=False)
    _recovery: Recovery | None = attrs.field(default=None, init=False)
    _pool: Pool | None = attrs.field(default=None, init=False)

    def attach(self, engine: Engine, model: DiscoveredModel, recovery: Recovery) -> None:
        """The engine has started, as that model, and is watched."""
        self._model, self._recovery = model, recovery
        self._pool = engine.pool if isinstance(engine, RemoteEngine) else None

    @property
    def state(self) -> str:
        """What the worker does: ``draining``, or the state that its engine is in."""
        return "draining" if self.stop.requested else self._engine_state()

    def text(self) -> str:
        """All families in Prometheus' text format, those of a vLLM in this process included; never raises."""
        return exposition(FamilyCollector(WORKER_FAMILIES, self.read, {"role": self.role}), passed_on(ENGINE_PREFIX))

    def read(self) -> Reading:
        """The values now."""
        return {
            "build_info": {(trio_sidecar.__version__,): 1},
            "loop_lag_seconds": self.lag,
            "draining": int(self.stop.requested),
            **self._requests(),
            **self._engine(),
            **(_pool(self._pool) if self._pool is not None else {}),
        }

    def _requests(self) -> Reading:
        meter, role = self.sessions.meter, self.role

        def by_reason(counts: dict[str, int]) -> dict[Labels, Value]:
            return {(role, reason): count for reason, count in counts.items()}

        return {
            "requests_in_flight": {(role,): self.sessions.statistics().open},
            "requests_accepted": {(role,): meter.accepted},
            "requests_refused": by_reason(meter.refused),
            "requests_ended": by_reason(meter.ended),
            "prompt_tokens": {(role,): meter.prompt_tokens},
            "output_tokens": {(role,): meter.output_tokens},
            "chunks": {(role,): meter.chunks},
            "first_response_seconds": {(role,): meter.first_response},
            "time_to_first_token_seconds": {(role,): meter.first_token},
            "inter_token_latency_seconds": {(role,): meter.inter_token},
            "request_duration_seconds": {(role,): meter.duration},
        }

    def _engine(self) -> Reading:
        recovery, model = self._recovery, self._model
        state: Reading = {"engine_state": {(self._engine_state(),): 1}}
        if recovery is None or model is None:
            return state
        return {
            **state,
            "engine_info": {(model.served_model_name, model.engine_version, recovery.instance_id): 1},
            "engine_recoveries": recovery.recoveries,
        }

    def _engine_state(self) -> str:
        if self._recovery is None:
            return "starting"
        return "stopped" if self.sessions.closed else "away" if self._recovery.away else "serving"


def _pool(pool: Pool) -> Reading:
    now = pool.statistics()
    places = [str(slot.number) for slot in pool.slots]
    return {
        "pool_connections": {
            ("active",): now.active,
            ("idle",): now.idle,
            ("draining",): now.draining,
            ("down",): now.connections - now.active - now.idle,
        },
        "pool_streams": {(place,): slot.open_streams for place, slot in zip(places, pool.slots, strict=True)},
        "pool_stream_limit": {(place,): cap for place, cap in zip(places, now.stream_caps, strict=True)},
        "pool_waiters": now.queued,
        "pool_wait_seconds": pool.meter.wait,
        "pool_reconnects": now.reconnects,
        "pool_reconnect_failures": now.failed_reconnects,
        "pool_stream_resets": {(code,): count for code, count in pool.meter.resets.items()},
    }
