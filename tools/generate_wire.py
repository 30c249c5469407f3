"""Generate the message classes from protos/ and compare them with those in the tree, or replace them.

Usage: python tools/generate_wire.py TARGET [--write]

Needs the dependency group ``protos``; ``nox -s protos`` brings it.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent.parent / "protos"
OPTIONS = "client_generation=none,server_generation=none"


def generate(target: Path) -> None:
    """Run protoc with betterproto2's plugin."""
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    command += [f"--python_betterproto2_out={target}", f"--python_betterproto2_opt={OPTIONS}", *sources]
    # The plugin is a script beside the interpreter, and so is the formatter that it calls. The formatter would follow
    # the settings of the directory that it runs in; there are none in the target.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, check=True, cwd=target, env=environment)  # noqa: S603 - our own arguments


def contents(directory: Path) -> dict[str, str]:
    """Every generated file by its path."""
    return {
        str(path.relative_to(directory)): path.read_text(encoding="utf-8")
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def report(present: dict[str, str], generated: dict[str, str]) -> list[str]:
    """The lines of a unified diff; empty if nothing differs."""
    lines: list[str] = []
    for name in sorted(present.keys() | generated.keys()):
        if name not in generated:
            lines.append(f"{name}: is in the tree, but not generated")
        elif name not in present:
            lines.append(f"{name}: is generated, but not in the tree")
        else:
            old, new = present[name].splitlines(), generated[name].splitlines()
            lines += difflib.unified_diff(old, new, f"in the tree: {name}", f"generated: {name}", lineterm="")
    return lines


def main() -> int:
    """Exit code 1 if the tree differs from what protos/ gives."""
    parser = argparse.ArgumentParser(description="Generate the message classes, and compare or replace them.")
    parser.add_argument("target", type=Path, help="directory of the generated files in the tree")
    parser.add_argument("--write", action="store_true", help="replace the files instead of comparing them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        generated = Path(directory)
        generate(generated)
        if arguments.write:
            shutil.rmtree(arguments.target, ignore_errors=True)
            shutil.copytree(generated, arguments.target)
            print(f"wrote {len(contents(generated))} files to {arguments.target}")  # noqa: T201
            return 0
        differences = report(contents(arguments.target), contents(generated))
    if differences:
        print("\n".join(differences))  # noqa: T201
        print(f"{arguments.target} is not what protos/ gives: run nox -s protos -- --write")  # noqa: T201
        return 1
    print(f"{arguments.target} is what protos/ gives")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
