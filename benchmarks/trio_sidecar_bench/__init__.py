"""Benchmarks: this worker beside the Rust sidecar, a naive Python worker and the floor that Dynamo's binding sets.

Run them with ``trio-sidecar bench`` or ``nox -s bench``; ``docs/performance.md`` says what the figures mean.
"""
