"""Controls and updates of an engine that reinforcement learning drives (spec 12), and what a worker says of it (6.4).

A trainer pauses generation, moves new weights into the engine and lets it go on. Dynamo's system server hands such
calls over as a name and a JSON body; here they become calls of ``vllm.Control``. A body is checked completely before
the engine hears of it.
"""

from trio_sidecar.rl.bodies import check_control_body
from trio_sidecar.rl.client import RlClient, supported_controls, supported_updates, unsupported
from trio_sidecar.rl.metadata import RlWorkerMetadata, worker_metadata

__all__ = [
    "RlClient",
    "RlWorkerMetadata",
    "check_control_body",
    "supported_controls",
    "supported_updates",
    "unsupported",
    "worker_metadata",
]
