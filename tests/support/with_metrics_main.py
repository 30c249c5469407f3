"""``python with_metrics_main.py PORT ARGUMENTS``: the project's command, with vLLM's own numbers at that port."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from prometheus_client import start_http_server

    from trio_sidecar.cli import main

    start_http_server(int(sys.argv[1]), "127.0.0.1")
    sys.exit(main(sys.argv[2:]))
