"""Metrics: which families there are, and how their values become Prometheus' text.

Nothing here counts by itself. What happens is counted where it happens, in plain numbers; a collector reads them when
somebody asks, which may be on another thread.
"""

from trio_sidecar.metrics.calls import CallMeter
from trio_sidecar.metrics.exposition import TEXT_FORMAT, FamilyCollector, exposition, passed_on
from trio_sidecar.metrics.families import ENGINE_FAMILIES, WORKER_FAMILIES, Family, Kind
from trio_sidecar.metrics.histogram import Histogram
from trio_sidecar.metrics.lag import watch_lag
from trio_sidecar.metrics.pool import PoolMeter
from trio_sidecar.metrics.requests import RequestMeter, TokenClock

__all__ = [
    "ENGINE_FAMILIES",
    "TEXT_FORMAT",
    "WORKER_FAMILIES",
    "CallMeter",
    "Family",
    "FamilyCollector",
    "Histogram",
    "Kind",
    "PoolMeter",
    "RequestMeter",
    "TokenClock",
    "exposition",
    "passed_on",
    "watch_lag",
]
