"""What ends an answer, and what the end looks like, on both servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support import tiny_model, vllm_model
from support.parity import request

if TYPE_CHECKING:
    from support.parity import Answer, Pair

HELLO = "Hello"
RESPONSE = {"output_token_ids": True, "output_logprobs": True}
EOS, SECOND_EOS = tiny_model.EOS, vllm_model.SECONDARY_EOS
HALF = 134
BOTH_WAYS = pytest.mark.parametrize("include", [False, True], ids=["hidden", "shown"])


def ask(both: Pair, *, decoding: dict[str, Any] | None = None, **stopping: Any) -> Answer:
    """At most 30 tokens."""
    stopping = {"max_new_tokens": 30} | stopping
    return both.agree(request(HELLO, stopping=stopping, decoding=decoding, response=RESPONSE))


@pytest.fixture(scope="module")
def full(both: Pair) -> Answer:
    """The answer that nothing cuts."""
    return ask(both)


@BOTH_WAYS
@pytest.mark.parametrize("least", [0, 12])
@pytest.mark.parametrize(
    "stop",
    ["today", "her", "rwa", "weatherway", "6v", "t", "never said"],
    ids=["token", "within-token", "two-tokens", "two-whole", "inside", "char", "none"],
)
def test_stop_string(both: Pair, full: Answer, stop: str, least: int, *, include: bool) -> None:
    """Text, tokens and scores end at the stop string, at the earliest after ``min_new_tokens``."""
    answer = ask(both, stop_strings=[stop], include_stop_strings=include, min_new_tokens=least)
    if answer.end == ("STOP", "stop_string", stop):
        assert answer.said["num_tokens"] > least
        assert include == answer.said["text"].endswith(stop)
        assert full.said["text"].startswith(answer.said["text"])
    else:
        assert ("LENGTH", full.said["text"]) == (answer.end[0], answer.said["text"])


@BOTH_WAYS
def test_the_earliest_stop_string_wins(both: Pair, *, include: bool) -> None:
    """Not the first of the list; of two that end together, the first of the list."""
    earliest = ask(both, stop_strings=["weather", "6v"], include_stop_strings=include)
    together = ask(both, stop_strings=["6v", "v"], include_stop_strings=include)
    assert [("STOP", "stop_string", "6v")] * 2 == [earliest.end, together.end]


@BOTH_WAYS
def test_stop_token(both: Pair, full: Answer, *, include: bool) -> None:
    """The stop token is counted and listed; its text is hidden unless asked for."""
    ids = full.said["token_ids"]
    stop = ids[8]
    answer = ask(both, stop_token_ids=[ids[20], stop], include_stop_strings=include)
    assert (("STOP", "stop_token_id", stop), ids[:9]) == (answer.end, answer.said["token_ids"])


@BOTH_WAYS
@pytest.mark.parametrize("ignore", [False, True], ids=["eos", "ignored"])
@pytest.mark.parametrize("wanted", [[], [EOS], [SECOND_EOS]], ids=["none", "eos", "second"])
@pytest.mark.parametrize("token", [EOS, SECOND_EOS])
def test_end_of_sequence(both: Pair, token: int, wanted: list[int], *, ignore: bool, include: bool) -> None:
    """The model's own end, its second one, and the same as stop tokens, each with the stop reason of its kind."""
    answer = ask(
        both,
        decoding={"logit_bias": {token: 100.0}},
        max_new_tokens=6,
        min_new_tokens=3,
        stop_token_ids=wanted,
        ignore_eos=ignore,
        include_stop_strings=include,
    )
    if ignore and token not in wanted:
        assert ("LENGTH", "", None) == answer.end
    elif token == EOS and not ignore:
        assert ("STOP", "eos_token_id", EOS) == answer.end
    else:
        assert ("STOP", "stop_token_id", token) == answer.end
    assert (6 if answer.end[0] == "LENGTH" else 4) == answer.said["num_tokens"]


def test_a_server_without_the_models_config_knows_one_end(plain: Pair) -> None:
    """Which of the two ends count depends on the server's configuration, not on the server."""
    for token in (EOS, SECOND_EOS):
        ask(plain, decoding={"logit_bias": {token: 100.0}}, max_new_tokens=6, min_new_tokens=3)


@BOTH_WAYS
@pytest.mark.parametrize("token", [EOS, HALF])
def test_an_incomplete_character_before_the_end(both: Pair, token: int, *, include: bool) -> None:
    """It is shown, unless the token that holds it is the hidden one."""
    ask(
        both,
        decoding={"logit_bias": {HALF: 50.0, EOS: 100.0 if token == EOS else 0.0}},
        max_new_tokens=9,
        min_new_tokens=3,
        stop_token_ids=[HALF] if token == HALF else [],
        include_stop_strings=include,
    )


def test_text_that_was_held_back_comes_at_the_end(both: Pair) -> None:
    """What might have begun a stop string is not lost when the answer ends."""
    answer = ask(both, decoding={"regex": "üüü"}, stop_strings=["üüüüü"])
    assert "üüü" == answer.said["text"]


def test_stop_strings_work_without_text(both: Pair) -> None:
    """They are looked for also if the caller does not want the text."""
    options = {"output_text": False, "output_token_ids": True}
    stopping = {"max_new_tokens": 30, "stop_strings": ["6v"]}
    answer = both.agree(request(HELLO, stopping=stopping, response=options))
    assert (("STOP", "stop_string", "6v"), "") == (answer.end, answer.said["text"])
