"""What else has to be fixed so that a seed means one run: Trio's order of tasks, and the order of sets.

Trio shuffles the tasks that are due, on purpose, and iterates over sets of tasks when it cancels; our own code keeps
sessions and connections in sets. Objects are hashed by their address, which differs from run to run. With one hash for
all of them, a set's order follows from its history. The names are private, and the same that Trio's own plugin for
Hypothesis sets.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import trio

from trio_sidecar.requests.session import Session
from trio_sidecar.transport.fastconnection import FastConnection
from trio_sidecar.transport.faststream import FastStream

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["determined"]

_run: Any = trio._core._run
_IN_SETS: tuple[Any, ...] = (
    _run.Task,
    _run.CancelStatus,
    trio.CancelScope,
    Session,
    FastConnection,
    FastStream,
)


def _same_hash(self: object) -> int:
    del self
    return 1


@contextlib.contextmanager
def determined(seed: object) -> Iterator[None]:
    """Fix them for the length of the block; garbage is collected at the end of it, not at some moment within."""
    state = _run._r.getstate()
    allowed = _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._r.seed(f"trio {seed}")
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True
    for kind in _IN_SETS:
        kind.__hash__ = _same_hash
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        for kind in _IN_SETS:
            kind.__hash__ = object.__hash__
        _run._ALLOW_DETERMINISTIC_SCHEDULING = allowed
        _run._r.setstate(state)
