"""Coverage-guided fuzzing of one target with atheris: ``fuzz_main.py TARGET CORPUS [libFuzzer arguments]``."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["trio_sidecar", "h2", "hpack", "hyperframe", "grpclib"]):
    from fuzz.seeds import seeds
    from fuzz.targets import TARGETS, quiet


def main() -> None:
    """Fuzz until the arguments say stop or an input fails."""
    target, corpus, *rest = sys.argv[1:]
    quiet()
    Path(corpus).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (Path(corpus) / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], corpus, *rest], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
