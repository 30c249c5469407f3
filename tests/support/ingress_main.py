"""A client of one worker that lives as long as its input: ``python ingress_main.py ENDPOINT``.

Each line of standard input is ``{"id": request id, "request": preprocessed request}``; each is answered, in the order
in which they end, by a line ``{"id": …, "chunks": […], "error": null or text}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dynamo.runtime import Context, DistributedRuntime

REQUEST_SECONDS = 15


async def ask(client: Any, instance: int, request_id: str, request: dict[str, Any]) -> None:
    """Print all chunks of one request, and the error that ended it."""
    chunks: list[Any] = []
    error = None
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            # Directly, or an instance that failed a stream would be shunned for some seconds.
            async for chunk in await client.direct(request, instance, context=Context(id=request_id)):
                chunks.append(chunk.data())  # noqa: PERF401 - those before an error are kept
    except TimeoutError:
        error = f"no end within {REQUEST_SECONDS} s"
    except Exception as failure:  # noqa: BLE001 - the binding raises bare exceptions
        error = f"{type(failure).__name__}: {failure}"
    print(json.dumps({"id": request_id, "chunks": chunks, "error": error}), flush=True)  # noqa: T201


async def main(endpoint: str) -> None:
    """Ask whatever comes, as it comes."""
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp")
    client = await runtime.endpoint(endpoint).client()
    (instance,) = await client.wait_for_instances()
    print("ready", flush=True)  # noqa: T201
    async with asyncio.TaskGroup() as group:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            entry = json.loads(line)
            group.create_task(ask(client, instance, entry["id"], entry["request"]))
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
