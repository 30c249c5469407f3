"""The command line: parses, calls, and turns errors into exit codes and one line each; no logic of its own."""

from trio_sidecar.cli.main import main

__all__ = ["main"]
