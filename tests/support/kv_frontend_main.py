"""Our front end, routing by KV blocks: ``python kv_frontend_main.py PORT``."""

from __future__ import annotations

import sys

from trio_sidecar.cli import main

if __name__ == "__main__":
    sys.exit(main(["frontend", f"--http-port={sys.argv[1]}", "--router-mode=kv"]))
