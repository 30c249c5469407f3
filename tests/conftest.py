"""Fixtures for asyncio code in Trio tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.certificates import Certificates, make_certificates
from trio_sidecar.bridge import Host, open_aio_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator


@pytest.fixture
async def aio_loop() -> AsyncIterator[asyncio.AbstractEventLoop]:
    """An asyncio loop on the test's Trio; its time follows ``autojump_clock`` where the test asks for that.

    Take it as an argument: pytest-trio does not see fixtures that are named by ``usefixtures``.
    """
    async with open_aio_loop() as loop:
        yield loop


@pytest.fixture(params=list(Host), ids=lambda host: host.value)
def host(request: pytest.FixtureRequest) -> Host:
    """Each host in turn, for plain ``def`` tests that call ``bridge.run(…, host=host)``."""
    value = request.param
    assert isinstance(value, Host)
    return value


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates for TLS, made once."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))
