"""What is counted of a pool."""

from __future__ import annotations

from trio_sidecar.metrics import PoolMeter


def test_resets_by_code() -> None:
    """A code has its name where it is one that peers use; all else, known or not, is other."""
    meter = PoolMeter()
    for code in (8, 8, 7, 0xD, 999):
        meter.note_reset(code)
    assert {"CANCEL": 2, "REFUSED_STREAM": 1, "other": 2} == {
        name: count for name, count in meter.resets.items() if count
    }
