"""Ask a worker as a router does, and print what comes back: ``python raw_client_main.py ENDPOINT`` with JSON on stdin.

Standard input holds a list of requests as the front end's preprocessor makes them; per request, one line of JSON is
printed: ``{"chunks": [...], "error": null or text}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dynamo.runtime import DistributedRuntime


async def ask(client: Any, request: dict[str, Any]) -> dict[str, Any]:
    """All chunks of one request, and the error that ended it."""
    chunks: list[Any] = []
    try:
        async for chunk in await client.generate(request):
            chunks.append(chunk.data())  # noqa: PERF401 - those before an error are kept
    except Exception as error:  # noqa: BLE001 - the binding raises bare exceptions
        return {"chunks": chunks, "error": str(error)}
    return {"chunks": chunks, "error": None}


async def main(endpoint: str) -> None:
    """Ask one after another."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint(endpoint).client()
    await client.wait_for_instances()
    for request in json.load(sys.stdin):
        print(json.dumps(await ask(client, request)), flush=True)  # noqa: T201
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
