"""argparse, derived from the settings classes."""

from __future__ import annotations

import pytest

from trio_sidecar.cli.flags import FLAGS, Parser, UsageError, add_options, add_plain, suggestion
from trio_sidecar.config import LogSettings, UpSettings, WorkerSettings, options_of


@pytest.fixture
def parser() -> Parser:
    """A parser with the worker's flags."""
    made = Parser(prog="prog")
    add_options(made, WorkerSettings)
    return made


def collected(parser: Parser, *arguments: str) -> object:
    known, rest = parser.parse_known_args(arguments)
    parser.refuse_rest(rest)
    return getattr(known, FLAGS, {})


def test_flags_are_collected_as_texts(parser: Parser) -> None:
    """Parsing does not judge values; making the settings does."""
    assert {"--grpc-endpoint": "junk", "--enable-rl": True} == collected(parser, "--grpc-endpoint=junk", "--enable-rl")


def test_every_option_is_offered_and_documented(parser: Parser) -> None:
    """Each flag of the class is in the help, with its variable and its default."""
    text = " ".join(parser.format_help().split())

    for source in options_of(WorkerSettings):
        if source.option.flag:
            assert f"{source.option.flag}" in text
        if source.option.flag and source.option.env:
            assert f"env: {source.option.env}" in text
    assert "default: 1800" in text
    assert "DYN_SIDECAR_GRPC_ENDPOINT; required" in text


def test_a_negative_number_is_a_value() -> None:
    """A value may begin with a dash if it is a number."""
    parser = Parser(prog="prog")
    add_plain(parser, "--seed", metavar="N", text="Seed.")

    assert {"--seed": "-5"} == collected(parser, "--seed", "-5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grpc-conections=3"], "prog: unknown flag --grpc-conections (did you mean --grpc-connections?)"),
        (["--grpc-conn", "3"], "prog: unknown flag --grpc-conn (did you mean --grpc-connections?)"),
        (["--zzz=secret"], "prog: unknown flag --zzz"),
        (["stray"], "prog: unexpected argument 'stray'"),
        (["--namespace"], "prog: --namespace needs a value"),
        (["--enable-rl=1"], "prog: --enable-rl takes no value"),
        (["--namespace=a", "--namespace=b"], "prog: --namespace is given twice"),
    ],
)
def test_refusals_are_one_plain_line(parser: Parser, arguments: list[str], message: str) -> None:
    """Each names what is wrong and, where it can, what was meant; abbreviations do not count, secrets do not show."""
    with pytest.raises(UsageError) as caught:
        collected(parser, *arguments)

    assert message == str(caught.value)


def test_skipped_and_repeated_flags_are_not_offered_twice() -> None:
    """A command leaves out what it decides itself; two classes may share a flag."""
    parser = Parser(prog="prog")
    add_options(parser, UpSettings, skip=("--ask",))
    add_options(parser, UpSettings, LogSettings)

    assert 1 == parser.format_help().count("\n  --ask TEXT")


def test_suggestions_must_be_near() -> None:
    """Nothing is suggested for a word that resembles none."""
    assert (" (did you mean worker?)", "") == (suggestion("wroker", ["worker"]), suggestion("xyz", ["worker"]))
