"""The vLLM gRPC face: Inference, Control and health over any engine of the contract."""

from trio_sidecar.server.serve import run_server, serve
from trio_sidecar.server.server import GrpcServer, ServerStatistics

__all__ = ["GrpcServer", "ServerStatistics", "run_server", "serve"]
