"""Fixtures for all tests: asyncio code in Trio tests, both hosts, certificates, and logging as it was."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import structlog
import structlog.testing

from support.certificates import Certificates, make_certificates
from trio_sidecar.bridge import Host, open_aio_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterator, MutableMapping
    from typing import Any


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Whatever a test configures, also through a command that it runs, the next one finds logging as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()


@pytest.fixture
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """What is logged while the test runs, each line as its event, level and values; nothing is written."""
    with structlog.testing.capture_logs() as lines:
        yield lines


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
