"""Trio and asyncio on one thread: the only package that imports asyncio, trio-asyncio or uvloop."""

from trio_sidecar.bridge.aio import (
    AioCancelled,
    AioEvent,
    AioInterrupted,
    AioLock,
    AioSignal,
    AioTaskGroup,
    aio_checkpoint,
    aio_in_thread,
    aio_now,
    aio_shielded,
    aio_sleep,
    aio_timeout,
    aio_unless,
)
from trio_sidecar.bridge.call import AioTaskCancelled, aio_run_trio, run_aio, run_aio_limited
from trio_sidecar.bridge.host import Host, open_aio_loop, run
from trio_sidecar.bridge.loop import count_aio_tasks
from trio_sidecar.bridge.signals import SignalReceiver, open_signals

__all__ = [
    "AioCancelled",
    "AioEvent",
    "AioInterrupted",
    "AioLock",
    "AioSignal",
    "AioTaskCancelled",
    "AioTaskGroup",
    "Host",
    "SignalReceiver",
    "aio_checkpoint",
    "aio_in_thread",
    "aio_now",
    "aio_run_trio",
    "aio_shielded",
    "aio_sleep",
    "aio_timeout",
    "aio_unless",
    "count_aio_tasks",
    "open_aio_loop",
    "open_signals",
    "run",
    "run_aio",
    "run_aio_limited",
]
