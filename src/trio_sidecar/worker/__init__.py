"""The face beside Dynamo; the only package that imports it."""

from trio_sidecar.worker.dynamo import OpenEngine, run_worker

__all__ = ["OpenEngine", "run_worker"]
