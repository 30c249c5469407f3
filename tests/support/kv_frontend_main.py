"""A Dynamo front end that routes by KV blocks: ``python kv_frontend_main.py PORT``."""

from __future__ import annotations

import asyncio
import signal
import sys

from dynamo.llm import (  # type: ignore[attr-defined]
    EngineType,
    EntrypointArgs,
    KvRouterConfig,
    RouterConfig,
    RouterMode,
    make_engine,
    run_input,
)
from dynamo.runtime import DistributedRuntime


async def serve(port: int) -> None:
    """Serve HTTP until SIGTERM."""
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp")
    loop.add_signal_handler(signal.SIGTERM, runtime.shutdown)
    router = RouterConfig(RouterMode.KV, KvRouterConfig(use_kv_events=True))
    arguments = EntrypointArgs(EngineType.Dynamic, http_host="127.0.0.1", http_port=port, router_config=router)
    await run_input(runtime, "http", await make_engine(runtime, arguments))


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
