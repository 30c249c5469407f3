"""The Containerfile, as far as it can be checked without building it."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch

import attrs
import pytest

from support.deployment import DEPLOY, MANIFESTS, containers, understood

ROOT = DEPLOY.parent
CONTAINERFILE = DEPLOY / "Containerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VENV = "/opt/trio-sidecar"
IMAGES = ("engine", "worker")
INSTRUCTIONS = frozenset(["CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "STOPSIGNAL", "USER", "WORKDIR"])


@attrs.frozen(slots=True, kw_only=True)
class Stage:
    """A stage: its name, what it begins from, and its instructions with their arguments."""

    name: str
    origin: str
    steps: list[tuple[str, str]] = attrs.field(factory=list)

    def all(self, instruction: str) -> list[str]:
        """The arguments of all instructions of a kind."""
        return [arguments for kind, arguments in self.steps if kind == instruction]


def stages() -> dict[str, Stage]:
    """The stages by name, in order."""
    text = re.sub(r"^\s*#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    current = None
    for line in filter(None, text.splitlines()):
        instruction, arguments = line.split(maxsplit=1)
        assert instruction in INSTRUCTIONS, line
        if instruction == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", arguments)
            assert match, line
            current = Stage(name=match[2], origin=match[1])
            found[current.name] = current
        else:
            assert current is not None, line
            current.steps.append((instruction, arguments))
    return found


def lineage(name: str) -> list[Stage]:
    """A stage, and those that it begins from, nearest first."""
    known = stages()
    found = []
    while name in known:
        found.append(known[name])
        name = known[name].origin
    return found


def test_stages_begin_from_what_is_there() -> None:
    """Each stage begins from an earlier one or from the one base image, of a Python that the project supports."""
    known: set[str] = set()
    bases = set()
    for stage in stages().values():
        if stage.origin not in known:
            bases.add(stage.origin)
        known.add(stage.name)
    (base,) = bases
    match = re.fullmatch(r"docker\.io/library/python:(3\.\d+)-slim-bookworm", base)
    assert match
    assert f"Programming Language :: Python :: {match[1]}" in PROJECT["project"]["classifiers"]


def test_what_is_copied_is_there_and_is_enough_to_build() -> None:
    """The build stage has all that the wheel is made of, and nothing that does not exist."""
    sources = [source for line in stages()["build"].all("COPY") for source in line.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = ["pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], *wheel]
    assert all(any(fnmatch(path, source) or path.startswith(f"{source}/") for source in sources) for path in needed)


def test_extras_exist() -> None:
    """What pip is asked for is an extra of the project; vLLM goes into the engine's image alone."""
    asked = {
        name: {
            extra
            for run in stage.all("RUN")
            for found in re.findall(r"\[([\w,-]+)\]", run)
            for extra in found.split(",")
        }
        for name, stage in stages().items()
    }
    assert {extra for extras in asked.values() for extra in extras} <= set(PROJECT["project"]["optional-dependencies"])
    assert {"dynamo", "kv-events", "traces"} == asked["build"]
    assert "vllm" in asked["build-engine"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_holds_the_environment_of_its_build(image: str) -> None:
    """The virtual environment is copied to the path at which it was made: its scripts name that path."""
    (copied,) = stages()[image].all("COPY")
    match = re.fullmatch(rf"--from=(\S+) {VENV} {VENV}", copied)
    assert match
    assert any(f"venv {VENV}" in run for stage in lineage(match[1]) for run in stage.all("RUN"))
    assert ("vllm" in " ".join(stages()[match[1]].all("RUN"))) == (image == "engine")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_our_program_as_nobody_in_particular(image: str) -> None:
    """The entry point is in exec form, so that SIGTERM reaches the program, and the user is the manifests' number."""
    stage = stages()[image]
    (entry,) = stage.all("ENTRYPOINT")
    assert [f"{VENV}/bin/trio-sidecar"] == json.loads(entry)
    assert ["SIGTERM"] == stage.all("STOPSIGNAL")
    users = {one.pod["securityContext"]["runAsUser"] for one in containers(*MANIFESTS)}
    (user,) = stage.all("USER")
    assert {user} == {f"{number}:{number}" for number in users}
    created = " ".join(run for part in lineage(image) for run in part.all("RUN"))
    assert all(f"--uid {number} " in created for number in users)
    last = [kind for kind, _ in stage.steps]
    assert last.index("USER") > max(index for index, kind in enumerate(last) if kind in {"RUN", "COPY"})


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_without_arguments_says_what_there_is(image: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The default command is one that our program understands."""
    (command,) = stages()[image].all("CMD")
    with pytest.raises(SystemExit) as ended:
        understood(json.loads(command), {})
    assert 0 == ended.value.code
    assert "trio-sidecar" in capsys.readouterr().out


def test_the_plain_build_makes_the_workers_image() -> None:
    """The last stage is what `podman build` makes unless it is told otherwise."""
    assert "worker" == list(stages())[-1]


def test_manifests_use_the_images() -> None:
    """Engines run in the image with vLLM, everything else in the other; the tags are those in the comment."""
    tags = dict(re.findall(r"^#\s+podman build (.*)-t (\S+) \.$", CONTAINERFILE.read_text(), flags=re.MULTILINE))
    with_target = {"engine" if "--target engine" in flags else "worker": tag for flags, tag in tags.items()}
    for container in containers(*MANIFESTS):
        assert with_target["engine" if container.name == "engine" else "worker"] == container.spec["image"]
