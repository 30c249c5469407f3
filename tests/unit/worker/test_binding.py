"""Telling a missing Dynamo from a broken one."""

from __future__ import annotations

import pytest

from trio_sidecar.worker.binding import missing_dynamo


@pytest.mark.parametrize("name", ["dynamo", "dynamo._core"])
def test_missing(name: str) -> None:
    """A missing package is an error that names the extra."""
    assert "dynamo" == missing_dynamo(ImportError("no module", name=name)).extra


@pytest.mark.parametrize("name", [None, "pydantic", "dynamology"])
def test_broken(name: str | None) -> None:
    """A package that is there but cannot be imported keeps its own error: installing the extra would not help."""
    error = ImportError("broken", name=name)
    with pytest.raises(ImportError, match="broken") as caught:
        missing_dynamo(error)
    assert error is caught.value
