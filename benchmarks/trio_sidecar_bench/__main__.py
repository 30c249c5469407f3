"""``python -m trio_sidecar_bench``."""

from __future__ import annotations

import sys

from trio_sidecar_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
