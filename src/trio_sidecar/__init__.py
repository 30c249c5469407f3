"""A Dynamo worker for vLLM's gRPC contract, built on structured concurrency.

Layers, top to bottom; a module imports only from strictly lower ones, and a test draws the graph:

    cli
    doctor, top, up
    worker, server, testing
    recovery
    lifecycle
    requests
    discovery, kv_events, lora, rl
    engines, health_wait
    transport
    bridge, observe
    convert, tls
    config
    wire
    endpoint, deadline, http, metrics, tracing
    errors

Two faces (``worker`` beside Dynamo, ``server`` for vLLM's gRPC API), any engine (``engines``), one contract between
them (``engines.contract``, made of the messages in ``wire``). Only ``bridge`` imports asyncio; functions that must be
awaited from asyncio are called ``aio_*``. Only ``worker`` imports Dynamo.
"""

__version__ = "0.1.0"
