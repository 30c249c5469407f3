"""A configuration file: what it may hold, and what is said about the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trio_sidecar.config import MockSettings, ServerSettings, WorkerSettings, options_of
from trio_sidecar.config.file import Key, as_text, key_of, read_tables
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

    import attrs

    from trio_sidecar.config.file import Table


def table(*classes: type[attrs.AttrsInstance]) -> Table:
    keys = [key_of(flag=source.option.flag, source=source) for cls in classes for source in options_of(cls)]
    return {key.name: key for key in keys}


TABLES = {"worker": table(WorkerSettings), "engine.mock": table(ServerSettings, MockSettings)}


def read(path: Path, text: str) -> dict[str, dict[str, object]]:
    path.write_text(text, encoding="utf-8")
    return read_tables(str(path), TABLES, source="--config")


def key(name: str, table_name: str = "worker") -> Key:
    return TABLES[table_name][name]


def test_tables_of_all_commands_are_read(tmp_path: Path) -> None:
    """One file serves several commands; a table that it lacks is empty."""
    found = read(tmp_path / "a.toml", "[engine.mock]\nitl_ms = 2.5\nlisten = '127.0.0.1:0'\n")

    assert {"worker": {}, "engine.mock": {"itl_ms": 2.5, "listen": "127.0.0.1:0"}} == found


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("[worker]\ndrain_sec = 1", "[worker] drain_sec", "unknown key (did you mean drain_secs?)"),
        ("[worker]\ndrain-secs = 1", "[worker] drain-secs", "unknown key (did you mean drain_secs?)"),
        ("[worker]\nzzz = 1", "[worker] zzz", "unknown key; --print-config lists those that there are"),
        ("[wroker]", "[wroker]", "unknown table 'wroker' (did you mean worker?); tables are [engine], [worker]"),
        ("[engine.mcok]", "[engine.mcok]", "unknown table 'mcok' (did you mean mock?); tables are [engine.mock]"),
        ("drain_secs = 1", "[drain_secs]", "unknown key, outside of every table, 'drain_secs'; tables are"),
        ("worker = 1", "[worker]", "1 is a whole number; use a table"),
        ("[engine]\nmock = true", "[engine.mock]", "true is a boolean; use a table"),
        ("[worker]\ndrain_secs = '1'", "[worker] drain_secs", "'1' is a text; use a number"),
        ("[worker]\ndrain_secs = true", "[worker] drain_secs", "true is a boolean; use a number"),
        ("[worker]\ngrpc_connections = 1.5", "[worker] grpc_connections", "1.5 is a number with a fraction; use a who"),
        ("[worker]\nenable_rl = 1", "[worker] enable_rl", "1 is a whole number; use true or false"),
        ("[worker]\ncoalesce = 'on'", "[worker] coalesce", "'on' is a text; use true or false"),
        ("[worker]\nnamespace = 2026-01-01", "[worker] namespace", "is a date or a time; use a text"),
        ("[worker]\nendpoint_types = 'chat'", "[worker] endpoint_types", "'chat' is a text; use an array of texts"),
        ("[worker]\nendpoint_types = [1]", "[worker] endpoint_types", "[1] is an array; use an array of texts"),
        (
            "[worker]\ndisaggregation_mode = 1",
            "[worker] disaggregation_mode",
            "1 is a whole number; use one of agg, prefill, decode, encode",
        ),
        ("[engine.mock]\nlisten_mode = 600", "[engine.mock] listen_mode", "600 is a whole number; use a text"),
    ],
)
def test_refusals_name_file_table_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, where: str, reason: str
) -> None:
    """Whoever wrote the file can mend it from the message alone, whichever command's table it is."""
    path = tmp_path / "a.toml"

    with pytest.raises(InvalidConfig) as caught:
        read(path, text)

    assert f"{path} {where}" == caught.value.setting
    assert reason in caught.value.reason


def test_a_file_that_cannot_be_read_is_named_with_its_source(tmp_path: Path) -> None:
    """The message names the flag or variable that led to the file, and why it cannot be used."""
    with pytest.raises(InvalidConfig, match=r"--config: cannot read '.*': No such file"):
        read_tables(str(tmp_path / "none.toml"), TABLES, source="--config")
    with pytest.raises(InvalidConfig, match=r"--config: '.*' is not valid TOML: .*line 2"):
        read(tmp_path / "a.toml", "[worker]\nx\n")


@pytest.mark.parametrize(
    ("value", "made_for", "text"),
    [
        (12.0, key("drain_secs"), "12"),
        (0.25, key("drain_secs"), "0.25"),
        (30, key("grpc_retry_interval_secs"), "30"),
        (["chat", "completions"], key("endpoint_types"), "chat,completions"),
        (False, key("coalesce"), "off"),
        (True, key("coalesce"), "on"),
        (True, key("exclude_tools_when_tool_choice_none"), "true"),
        (False, key("enable_rl"), False),
        (True, key("lora_enabled"), "true"),
        ("660", key("listen_mode", "engine.mock"), "660"),
    ],
)
def test_values_become_what_a_flag_would_hold(value: object, made_for: Key, text: str | bool) -> None:
    """So that one set of parsers and checks serves flags, variables and files."""
    assert text == as_text(value, made_for)


def test_every_option_has_a_key_of_its_own() -> None:
    """No two options of a command share a key, and keys are the flags' names with underscores."""
    sources = list(options_of(WorkerSettings))

    assert len(sources) == len(TABLES["worker"])
    assert "grpc_tls_ca" in TABLES["worker"]
    assert "lora_enabled" in TABLES["worker"], "only a variable sets it, so it goes by the field's name"
