from __future__ import annotations

import math

import pytest

from support.conversion import convert, run, two_tokens
from support.samples import candidates, finished, prompt_info, rich_request, tokens
from trio_sidecar.convert.response import LOGPROB_FLOOR, ResponseConverter
from trio_sidecar.wire import FinishInfoFinishReason, GenerateResponse


@pytest.mark.rule("R8.19", "FR-056")
@pytest.mark.parametrize(
    ("count", "log_probs", "rows"), [(None, False, False), (0, True, False), (1, True, True), (2, True, True)]
)
def test_which_logprobs_are_emitted(count: int | None, log_probs: bool, rows: bool) -> None:
    """Absent means none even if the engine sent some, 0 the selected token's, more also the rows."""
    (chunk,) = run([two_tokens()], logprobs=count)
    assert log_probs is ("log_probs" in chunk)
    assert rows is ("top_logprobs" in chunk)
    if log_probs:
        assert [-0.25, -0.75] == chunk["log_probs"]


@pytest.mark.rule("R8.20")
def test_rows_start_with_the_selected_token() -> None:
    """The selected token leads with its own rank; candidates follow in wire order, neither sorted nor cut."""
    (chunk,) = run([two_tokens()], logprobs=1)
    rows = [[(entry["token_id"], entry["rank"], entry["logprob"]) for entry in row] for row in chunk["top_logprobs"]]
    assert [[(42, 1, -0.25), (43, 2, -0.5)], [(50, 3, -0.75), (51, 1, -0.5)]] == rows


@pytest.mark.rule("R8.20", "D16")
def test_rows_are_not_deduplicated() -> None:
    """A candidate that repeats the selected token stays, and so do more candidates than were asked for."""
    many = candidates((42, -0.25, 1), (43, -0.5, 2), (44, -0.6, 3))
    (chunk,) = run([two_tokens(candidate_tokens=[many, candidates()])], logprobs=1)
    assert [[42, 42, 43, 44], [50]] == [[entry["token_id"] for entry in row] for row in chunk["top_logprobs"]]


@pytest.mark.rule("R8.22", "E9")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (math.nan, LOGPROB_FLOOR),
        (math.inf, LOGPROB_FLOOR),
        (-math.inf, LOGPROB_FLOOR),
        (-10000.0, LOGPROB_FLOOR),
        (-9999.0, -9999.0),
        (-9998.5, -9998.5),
        (0.0, 0.0),
        (0.5, 0.5),
    ],
)
def test_logprobs_that_json_cannot_carry(given: float, expected: float) -> None:
    """NaN, infinities and everything below the floor become the floor, each in its own place."""
    response = two_tokens(logprobs=[given, -0.5], candidate_tokens=[candidates((43, given, 2)), candidates()])
    (chunk,) = run([response], logprobs=1)
    assert [expected, -0.5] == chunk["log_probs"]
    first, second = chunk["top_logprobs"]
    assert [(42, expected), (43, expected)] == [(entry["token_id"], entry["logprob"]) for entry in first]
    assert [(50, -0.5)] == [(entry["token_id"], entry["logprob"]) for entry in second]


def test_chunks_with_logprobs_leave_the_text_to_the_front_end() -> None:
    """Dynamo's front end drops the logprobs of a chunk that carries text without token strings."""
    chunks = run([two_tokens(), tokens(text="tail", finish=finished(2))], logprobs=0)
    assert all("text" not in chunk for chunk in chunks)
    assert [] == chunks[-1]["log_probs"]


def scored_prompt() -> GenerateResponse:
    return prompt_info(
        token_ids=[11, 22, 33],
        logprobs=[-math.inf, -0.25, -0.5],
        ranks=[0, 1, 2],
        candidate_tokens=[candidates(), candidates((23, -0.75, 2)), candidates()],
    )


EXPECTED_ROWS = [
    None,
    {"22": {"logprob": -0.25, "rank": 1}, "23": {"logprob": -0.75, "rank": 2}},
    {"33": {"logprob": -0.5, "rank": 2}},
]


@pytest.mark.rule("R8.23", "R8.24", "FR-072")
@pytest.mark.parametrize("together", [False, True])
def test_prompt_logprobs_come_once_with_the_terminal(together: bool) -> None:
    """Whether alone or with tokens, the prompt's logprobs wait for the terminal chunk."""
    info = scored_prompt()
    if together:
        info.outputs = tokens(42).outputs
        stream = [info, tokens(43, finish=finished(2))]
    else:
        stream = [info, tokens(42), tokens(43, finish=finished(2))]
    first, last = run(stream, prompt_logprobs=1)
    assert "engine_data" not in first
    assert {"prompt_logprobs": EXPECTED_ROWS} == last["engine_data"]


@pytest.mark.rule("R8.25", "R8.26")
def test_prompt_candidates() -> None:
    """A candidate with the prompt token's id replaces its entry; values are made finite as elsewhere."""
    info = prompt_info(
        2,
        token_ids=[11, 22],
        logprobs=[0.0, math.nan],
        ranks=[0, 5],
        candidate_tokens=[candidates((1, 0.0, 1)), candidates((22, -0.125, 1), (9, -math.inf, 2))],
    )
    (last,) = run([info, tokens(finish=finished(0))], prompt_tokens=2, prompt_logprobs=2)
    rows = [None, {"22": {"logprob": -0.125, "rank": 1}, "9": {"logprob": LOGPROB_FLOOR, "rank": 2}}]
    assert {"prompt_logprobs": rows} == last["engine_data"]


@pytest.mark.rule("R8.27")
def test_prompt_logprobs_that_nobody_asked_for() -> None:
    """Without a request for them the prompt's arrays are neither checked nor emitted."""
    (last,) = run([prompt_info(logprobs=[0.0]), tokens(42, finish=finished(1))])
    assert "engine_data" not in last


@pytest.mark.rule("8.5", "8.6")
def test_a_rich_request_from_end_to_end() -> None:
    """The state that the request converter leaves is what the response converter needs."""
    target = ResponseConverter(convert(rich_request()).response)
    assert target.convert(scored_prompt()) is None
    chunk = target.convert(tokens(42, scored=True, finish=finished(1, FinishInfoFinishReason.STOP, stop_token_id=2)))
    assert {
        "token_ids": [42],
        "index": 0,
        "log_probs": [-0.25],
        "top_logprobs": [[{"rank": 1, "token_id": 42, "logprob": -0.25}, {"rank": 2, "token_id": 43, "logprob": -0.5}]],
        "finish_reason": "stop",
        "completion_usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        "engine_data": {"prompt_logprobs": EXPECTED_ROWS},
    } == chunk
