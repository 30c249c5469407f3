"""The configuration file under flags and variables, and what --print-config says about all three."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trio_sidecar.cli import commands, main
from trio_sidecar.cli.flags import Parser, add_options, add_plain
from trio_sidecar.cli.layers import Layered, commands_of, layered, table_name, table_of
from trio_sidecar.cli.main import build_parser
from trio_sidecar.cli.show import shown
from trio_sidecar.config import Option, WorkerSettings, options_of, resolve
from trio_sidecar.config.fields import OptionSource, parse_text
from trio_sidecar.config.file import key_of
from trio_sidecar.errors import InvalidConfig
from trio_sidecar.up.run import child_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER = '[worker]\ngrpc_endpoint = "file:1"\nnamespace = "from-file"\n'


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIO_SIDECAR_CONFIG", raising=False)
    for source in options_of(WorkerSettings):
        if source.option.env:
            monkeypatch.delenv(source.option.env, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file for the worker."""
    path = tmp_path / "trio.toml"
    path.write_text(WORKER, encoding="utf-8")
    return path


def command(name: str) -> Parser:
    return next(each for each in commands_of(build_parser()) if table_name(each) == name)


def layers(path: Path, flags: Mapping[str, str | bool], environ: Mapping[str, str]) -> Layered:
    root = build_parser()
    return layered(root, command("worker"), {"--config": str(path), **flags}, environ)


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(config: Path) -> None:
    """Each source is heard only where no stronger one speaks."""

    def namespace(flags: Mapping[str, str | bool], environ: Mapping[str, str]) -> str:
        made = layers(config, flags, environ)
        return resolve(WorkerSettings, flags=made.flags, environ=made.environ).namespace

    variable = {"DYN_NAMESPACE": "from-variable"}
    assert "from-flag" == namespace({"--namespace": "from-flag"}, variable)
    assert "from-flag" == namespace({"--namespace": "from-flag"}, {})
    assert "from-variable" == namespace({}, variable)
    assert "from-file" == namespace({}, {})
    config.write_text('[worker]\ngrpc_endpoint = "file:1"\n', encoding="utf-8")
    assert "dynamo" == namespace({}, {})


def test_an_empty_variable_wins_unless_it_counts_as_absent(config: Path) -> None:
    """The rules of empty variables are the same with a file as without one."""
    config.write_text(WORKER + 'dyn_tool_call_parser = "hermes"\n', encoding="utf-8")

    made = layers(config, {}, {"DYN_TOOL_CALL_PARSER": "", "DYN_NAMESPACE": ""})

    assert "hermes" == made.flags["--dyn-tool-call-parser"]
    assert "--namespace" not in made.flags


def test_what_only_a_variable_sets_can_be_in_the_file(config: Path) -> None:
    """It reaches the settings, and a variable still wins over it."""
    config.write_text(WORKER + "lora_enabled = true\n", encoding="utf-8")

    for environ, expected in (({}, True), ({"DYN_LORA_ENABLED": "false"}, False)):
        made = layers(config, {}, environ)
        assert expected is resolve(WorkerSettings, flags=made.flags, environ=made.environ).lora_enabled


def test_the_variable_names_a_file_and_the_flag_another(config: Path, tmp_path: Path) -> None:
    """--config wins over TRIO_SIDECAR_CONFIG, and a file that is missing is named by whoever named it."""
    environ = {"TRIO_SIDECAR_CONFIG": str(tmp_path / "missing")}
    made = layers(config, {}, environ)

    assert "from-file" == made.flags["--namespace"]
    with pytest.raises(InvalidConfig, match=r"^TRIO_SIDECAR_CONFIG: cannot read"):
        layered(build_parser(), command("worker"), {}, environ)


def test_the_parts_of_up_do_not_read_the_file_of_up() -> None:
    """They get what `up` was told as flags; a file for a real deployment would place them elsewhere."""
    assert "TRIO_SIDECAR_CONFIG" not in child_environment({"TRIO_SIDECAR_CONFIG": "x"}, Path())


def test_a_switch_that_the_file_has_off_is_not_handed_on() -> None:
    """A child's flag takes no value."""
    from trio_sidecar.config import VllmSettings  # noqa: PLC0415

    assert () == commands.flags_again({"--debug": False}, VllmSettings)
    assert ("--debug",) == commands.flags_again({"--debug": True}, VllmSettings)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("drain_secs = -1", "[worker] drain_secs: -1 is not allowed; use 0 or more seconds"),
        ('grpc_endpoint = "h:0"', "[worker] grpc_endpoint: port 0 is not allowed"),
        ('grpc_tls_ca = "x"', "[worker] grpc_tls_ca: has no effect without --grpc-tls"),
        ("drain_sec = 1", "[worker] drain_sec: unknown key (did you mean drain_secs?)"),
        ('engine = "vlm"', "[worker] engine: 'vlm' is not allowed"),
    ],
)
def test_errors_name_the_place_in_the_file(
    config: Path, text: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that came from the file is not blamed on a flag that nobody gave; exit code 2, one line."""
    endpoint = "" if "grpc_endpoint" in text else 'grpc_endpoint = "h:1"\n'
    config.write_text(f"[worker]\n{endpoint}{text}\n", encoding="utf-8")

    assert 2 == main(["worker", "--config", str(config)])
    assert f"{config} {line}" in capsys.readouterr().err.splitlines()[-1]


def test_every_command_takes_a_file() -> None:
    """Every command that has settings has a table, --config and --print-config; neither is a key of the file."""
    tables = {table_name(each): table_of(each) for each in commands_of(build_parser()) if table_of(each)}

    assert {"up", "worker", "engine.mock", "engine.vllm", "frontend", "doctor", "top"} == tables.keys()
    for name, keys in tables.items():
        assert {"--config", "--print-config"} < command(name).offered.keys()
        assert not {"config", "print_config"} & keys.keys()


def test_print_config_says_where_each_value_comes_from(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """File, variable, flag and default are told apart, and the command itself does not run."""
    monkeypatch.setattr(commands, "worker", lambda *_: pytest.fail("it ran"))
    monkeypatch.setenv("DYN_COMPONENT", "c")

    assert 0 == main(["worker", "--config", str(config), "--drain-secs=7", "--print-config"])

    origins = {line.partition(" ")[0]: line.rpartition("  # ")[2] for line in capsys.readouterr().out.splitlines()}
    assert f"{config} [worker] namespace" == origins["namespace"]
    assert "variable DYN_COMPONENT" == origins["component"]
    assert "flag --drain-secs" == origins["drain_secs"]
    assert "default" == origins["endpoint"]


@pytest.mark.parametrize("name", ["up", "worker", "engine.mock", "engine.vllm", "frontend", "doctor"])
def test_what_is_printed_is_a_file_that_says_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is TOML that the same command reads back to the same values."""
    given = ["--grpc-endpoint=h:1", "--endpoint-types=chat, images", "--coalesce=off"] if name == "worker" else []
    assert 0 == main([*name.split("."), *given, "--print-config"])
    first = capsys.readouterr().out
    path = tmp_path / "again.toml"
    path.write_text(first, encoding="utf-8")

    assert 0 == main([*name.split("."), "--config", str(path), "--print-config"])
    assert tomllib.loads(first) == tomllib.loads(capsys.readouterr().out)


def test_a_required_setting_that_is_missing_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config helps most where a command does not run yet."""
    assert 0 == main(["worker", "--print-config"])
    assert "# grpc_endpoint =" in (out := capsys.readouterr().out)
    assert "# required, not set" in out


def test_secrets_are_masked() -> None:
    """Neither a secret setting nor the credentials in a URL are shown."""
    option = Option(flag="--token", env=None, parse=parse_text, help="Token.", secret=True)
    token = key_of(flag="--token", source=OptionSource(name="token", option=option, default=None))
    url = key_of(flag="--url", source=None)
    made = Layered(
        flags={"--token": "hush", "--url": "http://me:hush@host"},
        environ={},
        places={},
        table={"token": token, "url": url},
        shown=True,
    )

    text = shown("worker", made)

    assert "hush" not in text
    assert {"worker": {"token": "***", "url": "http://***@host"}} == tomllib.loads(text)


def test_after_two_dashes_everything_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both have a flag, such as --config, two dashes decide."""
    from trio_sidecar.cli import vllm  # noqa: PLC0415

    seen: list[list[str]] = []

    def engine(_flags: object, _environ: object, rest: list[str]) -> int:
        seen.append(rest)
        return 0

    monkeypatch.setattr(vllm, "engine_vllm", engine)

    assert 0 == main(["engine", "vllm", "model", "--max-model-len", "9", "--", "--config", "x.yaml"])
    assert [["model", "--max-model-len", "9", "--config", "x.yaml"]] == seen


def test_two_dashes_do_not_hide_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing is vLLM's, what comes after them is refused."""
    assert 2 == main(["frontend", "--", "--bogus"])
    assert "unknown flag --bogus" in capsys.readouterr().err


def test_plain_flags_are_keys_too() -> None:
    """A flag that belongs to no settings class, such as --engine, can be in the file."""
    parser = Parser(prog="trio-sidecar x")
    add_plain(parser, "--some-thing", metavar="X", text="Some.")
    add_options(parser, WorkerSettings)

    assert "--some-thing" == table_of(parser)["some_thing"].flag
