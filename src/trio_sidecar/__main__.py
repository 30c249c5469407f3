"""``python -m trio_sidecar``, and the console script: no import that takes time may precede what catches Ctrl-C."""

import sys


def main() -> int:
    """Run the command line; 130 after a Ctrl-C, also while it is still being imported."""
    try:
        from trio_sidecar.cli import main as run  # noqa: PLC0415 - see above

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
