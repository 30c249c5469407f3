"""``python -m simulation``: play schedules, or one again."""

from __future__ import annotations

import sys

from simulation.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
