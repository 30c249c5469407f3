"""A Dynamo front end and nothing else: ``python frontend_main.py PORT``; independent of the project's own command."""

from __future__ import annotations

import asyncio
import signal
import sys

from dynamo.llm import (  # type: ignore[attr-defined]
    EngineType,
    EntrypointArgs,
    make_engine,
    run_input,
)
from dynamo.runtime import DistributedRuntime


async def serve(port: int) -> None:
    """Serve HTTP until SIGTERM."""
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp")
    loop.add_signal_handler(signal.SIGTERM, runtime.shutdown)
    engine = await make_engine(runtime, EntrypointArgs(EngineType.Dynamic, http_host="127.0.0.1", http_port=port))
    await run_input(runtime, "http", engine)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
