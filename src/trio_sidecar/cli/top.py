"""The command that shows what running processes do."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from trio_sidecar.cli.flags import UsageError
from trio_sidecar.config import TopSettings, resolve
from trio_sidecar.endpoint import HttpEndpoint
from trio_sidecar.errors import InvalidConfig, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Flags = Mapping[str, str | bool]
    Environ = Mapping[str, str]

COMMAND = "trio-sidecar top"
SYSTEM_PORT = "DYN_SYSTEM_PORT"
URL = "URL"
ONCE_FLAG = "--once"
THIS, EXTRA = "this command", "top"
EXAMPLE = "http://127.0.0.1:9090"


def top(flags: Flags, environ: Environ, rest: Sequence[str] = ()) -> int:
    """Show what running workers and engines do, live, from their metrics; each URL is that of a metrics port."""
    settings = resolve(TopSettings, flags=flags, environ=environ)
    endpoints = targets(rest, environ)
    try:
        from trio_sidecar.top.run import run_once, run_top  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        raise MissingExtra(THIS, EXTRA) from error
    import trio  # noqa: PLC0415

    if settings.once:
        return trio.run(partial(run_once, settings, endpoints, out=sys.stdout))
    if not sys.stdout.isatty():
        raise InvalidConfig(ONCE_FLAG, "is needed where stdout is no terminal")
    trio.run(partial(run_top, settings, endpoints, out=sys.stdout, keys=sys.stdin))
    return 0


def targets(rest: Sequence[str], environ: Environ) -> list[HttpEndpoint]:
    """Where to ask: the URLs, or the system port of a worker that has this environment.

    Raises:
        UsageError: A flag that nobody knows.
        InvalidConfig: A URL that is none, or none at all.
    """
    flag = next((part for part in rest if part.startswith("-")), None)
    if flag is not None:
        raise UsageError(COMMAND, f"unknown flag {flag.partition('=')[0]}")
    urls = list(rest)
    if not urls and (port := environ.get(SYSTEM_PORT, "").strip()).isdigit():
        urls = [f"http://127.0.0.1:{port}"]
    if not urls:
        raise InvalidConfig(URL, f"is missing; name a worker's or an engine's metrics port, such as {EXAMPLE}")
    found = [HttpEndpoint.parse(url if "://" in url else f"http://{url}", URL) for url in urls]
    if any(endpoint.scheme != "http" for endpoint in found):
        raise InvalidConfig(URL, f"https is not supported; metrics ports speak plain HTTP, such as {EXAMPLE}")
    return found
