"""``python -m trio_sidecar``."""

import sys

from trio_sidecar.cli import main

if __name__ == "__main__":
    sys.exit(main())
