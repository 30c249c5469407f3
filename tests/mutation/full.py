"""Run mutmut over whole packages and compare what survives with ``survivors.toml``: ``full.py [--again] [PACKAGE…]``.

Exit code 1 if a survivor is not listed there, if a mutant was not tried, or if under 95 % of a package's mutants are
killed, equivalent ones not counted. Which packages there are, and with which tests they are tried, ``pyproject.toml``
says; mutmut works in ``mutants/``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
WORK = ROOT / "mutants"
LISTED = Path(__file__).parent / "survivors.toml"
SOURCE = "src/trio_sidecar/"
EQUIVALENT = "equivalent"
FLOOR = 0.95

Key = tuple[str, str, str]
"""Function, lines before, lines after: no number of mutmut's and no line number, so that other edits leave it alone."""


@attrs.frozen
class Mutant:
    """A mutant of a package, and what became of it."""

    package: str
    name: str
    path: Path
    outcome: str


@attrs.define
class Score:
    """How the mutants of a package fared."""

    outcomes: Counter[str] = attrs.field(factory=Counter)
    equivalent: int = 0

    @property
    def killed(self) -> int:
        """Mutants that a test noticed, also by not coming to its end."""
        return self.outcomes["killed"] + self.outcomes["timeout"]

    @property
    def of_all(self) -> float:
        """Share of the killed among all mutants."""
        return self.killed / max(1, self.outcomes.total())

    @property
    def of_others(self) -> float:
        """Share of the killed among the mutants that are not listed as equivalent."""
        return self.killed / max(1, self.outcomes.total() - self.equivalent)


def outcome(code: int | None) -> str:
    """What an exit code that mutmut noted means; ours for a survivor that no test calls is the same as for others."""
    match code:
        case None | 2:  # 2: interrupted
            return "not tried"
        case 1 | 3:
            return "killed"
        case 0 | 5 | 33:
            return "survived"
        case 24 | 36 | 152 | 255 | -24 | -9:
            return "timeout"
        case _:
            return f"ended with {code}"


def packages() -> dict[str, str]:
    """Name and path of each package or module that is to be mutated."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    paths = [path.removesuffix("/*") for path in config["only_mutate"]]
    return {path.removeprefix(SOURCE).removesuffix(".py"): path for path in paths}


def mutants(package: str, path: str) -> list[Mutant]:
    """All mutants of a package that mutmut has made."""
    where = WORK / path
    metas = sorted(where.rglob("*.meta")) if where.is_dir() else [where.with_suffix(".py.meta")]
    return [
        Mutant(package, name, meta.with_suffix("").relative_to(WORK), outcome(code))
        for meta in metas
        if meta.exists()
        for name, code in json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"].items()
    ]


def function(name: str) -> str:
    """A function's name: of ``trio_sidecar.rl.client.xǁClientǁget__mutmut_3``, it is ``rl.client.Client.get``."""
    module, _, mangled = re.sub(r"__mutmut_\d+$", "", name.removeprefix("trio_sidecar.")).rpartition(".")
    return ".".join([module, *(mangled.split("ǁ")[1:] if "ǁ" in mangled else [mangled.removeprefix("x_")])])


def key(mutant: Mutant) -> Key:
    """What names a mutant in the list."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant  # noqa: PLC0415 - only this session has it

    lines = get_diff_for_mutant(mutant.name, path=mutant.path).splitlines()[2:]
    before = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    after = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return function(mutant.name), before, after


def listed() -> dict[str, dict[Key, str]]:
    """Each package's known survivors, with the reason.

    Raises:
        ValueError: One is listed twice, or has no reason.
    """
    found: dict[str, dict[Key, str]] = {}
    for package, groups in tomllib.loads(LISTED.read_text(encoding="utf-8")).items():
        known = found.setdefault(package, {})
        for group in groups:
            for entry in group["mutants"]:
                if not group["reason"] or tuple(entry) in known:
                    reason = f"{LISTED.name}, {package}: listed twice or without a reason: {entry}"
                    raise ValueError(reason)
                known[tuple(entry)] = group["reason"]
    return found


def literal(text: str) -> str:
    """A string as TOML, in the form that needs no escapes where there is one."""
    if "'" not in text:
        return f"'{text}'"
    return f"'''{text}'''" if "'''" not in text and not text.endswith("'") else json.dumps(text, ensure_ascii=False)


def run_mutmut(names: list[str]) -> None:
    """Try mutants, all that have no result yet or those with given names; mutmut's own output is shown."""
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children=2", *names]
    subprocess.run(command, cwd=ROOT, check=True)


def compare(package: str, path: str, known: dict[Key, str]) -> tuple[Score, bool]:
    """Count a package's mutants and print what is new about it; the second is whether all survivors are listed."""
    score = Score()
    new: list[Key] = []
    met: set[Key] = set()
    for mutant in mutants(package, path):
        score.outcomes[mutant.outcome] += 1
        if mutant.outcome != "survived":
            continue
        named = key(mutant)
        met.add(named)
        if named not in known:
            new.append(named)
        elif known[named].startswith(EQUIVALENT):
            score.equivalent += 1
    if new:
        sys.stdout.write(f"\n{package}: {len(new)} survivors are not listed:\n")
        sys.stdout.writelines(f"  [{', '.join(map(literal, entry))}],\n" for entry in sorted(set(new)))
    for entry in sorted(known.keys() - met):
        sys.stdout.write(f"{package}: listed, but killed or no longer made: [{', '.join(map(literal, entry))}]\n")
    return score, not new


def main() -> int:
    """Try the mutants of all packages, or of those that are given."""
    there = packages()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(there)}; by default all")
    parser.add_argument("--again", action="store_true", help="try only those that survived or were not tried before")
    parser.add_argument("--compare", action="store_true", help="try none, only compare what is there")
    arguments = parser.parse_args()
    if unknown := set(arguments.packages) - there.keys():
        parser.error(f"{min(unknown)!r} is not mutated, only {', '.join(there)}")
    chosen = {name: there[name] for name in arguments.packages or there}
    known = listed()
    if arguments.again:
        made = [mutant for name, path in chosen.items() for mutant in mutants(name, path)]
        again = [mutant.name for mutant in made if mutant.outcome not in {"killed", "timeout"}]
        if again:
            run_mutmut(again)
    elif not arguments.compare:
        shutil.rmtree(WORK, ignore_errors=True)
        # Named, so that mutmut's run without a mutant names the tests too and fails if pytest does not know one again:
        # else a test that cannot be found counts as one that has noticed a mutant.
        run_mutmut([f"trio_sidecar.{name}.*" for name in chosen])
    good = True
    total = Score()
    rows = []
    for name, path in chosen.items():
        score, all_listed = compare(name, path, known.get(name, {}))
        tried = score.outcomes.total() == score.killed + score.outcomes["survived"] > 0
        good = good and all_listed and tried and score.of_others >= FLOOR
        total.outcomes += score.outcomes
        total.equivalent += score.equivalent
        rows.append((name, score))
    sys.stdout.write("\npackage: killed of all mutants, killed of those not equivalent\n")
    for name, score in [*rows, ("all", total)]:
        counts = ", ".join(f"{count} {what}" for what, count in score.outcomes.most_common())
        shares = f"{score.of_all:.1%}, {score.of_others:.1%}"
        sys.stdout.write(f"{name}: {shares} ({counts}; {score.equivalent} of the survivors equivalent)\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
