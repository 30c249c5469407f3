"""Put one request to a worker and stop it: ``python stopping_client_main.py ENDPOINT STOP_FILE``, the request on stdin.

The request is stopped, as a router does it, once the file exists. Prints one line of JSON: the chunks that came.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from dynamo.runtime import Context, DistributedRuntime

POLL_SECONDS = 0.01


async def stop_when_told(context: Context, told: Path) -> None:
    """Stop the request once the file is there."""
    while not told.exists():  # noqa: ASYNC110, ASYNC240 - another process makes the file
        await asyncio.sleep(POLL_SECONDS)
    context.stop_generating()


async def main(endpoint: str, told: Path) -> None:
    """Ask once."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    client = await runtime.endpoint(endpoint).client()
    await client.wait_for_instances()
    context = Context()
    stopping = asyncio.create_task(stop_when_told(context, told))
    chunks: list[Any] = []
    async for chunk in await client.round_robin(json.load(sys.stdin), context=context):
        chunks.append(chunk.data())  # noqa: PERF401 - all of them
    await stopping
    print(json.dumps(chunks), flush=True)  # noqa: T201
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
