"""From settings to a connection: which kind, and with what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trio_sidecar.bridge import aio_checkpoint, run_aio
from trio_sidecar.config import TransportSettings
from trio_sidecar.config.tls import ClientTlsSettings
from trio_sidecar.endpoint import GrpcEndpoint
from trio_sidecar.transport import fastconnection, fastpath, publicpath
from trio_sidecar.transport.connection import ConnectionSettings, NotProcessed
from trio_sidecar.transport.dial import aio_connect, connection_settings

if TYPE_CHECKING:
    import asyncio

    from support.certificates import Certificates

ENDPOINT = GrpcEndpoint.parse("engine:50051")


def test_a_plaintext_connection_needs_little() -> None:
    """The endpoint and the limit on messages; the windows are ours."""
    settings = TransportSettings(grpc_endpoint=ENDPOINT, max_message_bytes=12345)
    assert ConnectionSettings(endpoint=ENDPOINT, max_message_bytes=12345) == connection_settings(settings)


def test_an_encrypted_connection_has_a_context_and_a_name(certificates: Certificates) -> None:
    """And says whether we have something to show, because that decides what a refusal can mean."""
    plain = ClientTlsSettings(enabled=True, ca=certificates.ca, server_name="engine.internal")
    made = connection_settings(TransportSettings(grpc_endpoint=ENDPOINT, tls=plain))
    assert made.tls is not None
    assert ("engine.internal", False) == (made.server_name, made.shows_certificate)
    mutual = ClientTlsSettings(enabled=True, ca=certificates.ca, cert=certificates.client)
    made = connection_settings(TransportSettings(grpc_endpoint=ENDPOINT, tls=mutual))
    assert (None, True) == (made.server_name, made.shows_certificate)


@pytest.mark.parametrize(
    ("fast", "unsupported", "kind"),
    [
        (True, "too new", fastconnection),
        (False, None, publicpath),
        (None, None, fastconnection),
        (None, "too new", publicpath),
    ],
)
async def test_the_kind_of_a_connection(
    aio_loop: asyncio.AbstractEventLoop,
    monkeypatch: pytest.MonkeyPatch,
    fast: bool | None,
    unsupported: str | None,
    kind: Any,
) -> None:
    """As asked for, and else what the installed versions allow; both get settings and listener."""
    given: list[object] = []

    async def aio_made(*arguments: object) -> object:
        await aio_checkpoint()
        given.extend(arguments)
        return "connection"

    def on_change(connection: object) -> None:
        """Never called."""

    monkeypatch.setattr(fastpath, "unsupported", lambda: unsupported)
    monkeypatch.setattr(kind, "aio_connect", aio_made)
    settings = ConnectionSettings(endpoint=ENDPOINT)

    async def aio_main() -> object:
        return await aio_connect(settings, on_change, fast=fast)

    assert "connection" == await run_aio(aio_main)
    assert [settings, on_change] == given


def test_a_call_that_was_not_begun_keeps_its_kind() -> None:
    """Also when it is named after its call, which makes no copy if it has that name already."""
    error = NotProcessed("draining")
    assert "call: draining (Unavailable)" == str(error)
    named = error.named("Health.Check")
    assert "Health.Check: draining (Unavailable)" == str(named)
    assert isinstance(named, NotProcessed)
    assert named is named.named("Health.Check")
