from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.conversion import converter, run, two_tokens
from support.samples import finished, tokens
from trio_sidecar.convert.response import Chunk, merge_chunks
from trio_sidecar.wire import FinishInfoFinishReason


def test_merging_concatenates_what_streams() -> None:
    """Ids, text, logprobs and rows of neighbours become one chunk; the terminal's own fields stay."""
    stream = [two_tokens(), tokens(7, scored=True), tokens(finish=finished(3, FinishInfoFinishReason.LENGTH))]
    first, second, last = run(stream, logprobs=1)
    merged = merge_chunks(first, second, last)
    assert [42, 50, 7] == merged["token_ids"]
    assert [-0.25, -0.75, -0.25] == merged["log_probs"]
    assert [*first["top_logprobs"], *second["top_logprobs"]] == merged["top_logprobs"]
    assert "length" == merged["finish_reason"]
    assert last["completion_usage"] == merged["completion_usage"]
    assert merged == merge_chunks(merge_chunks(first, second), last)


def test_merging_text_with_the_cancelled_terminal() -> None:
    """A terminal without text does not take the text of the chunks before it away."""
    target = converter()
    delta = target.convert(tokens(42, text="a"))
    assert delta is not None
    merged = merge_chunks(delta, target.cancelled())
    assert "a" == merged["text"]
    assert "cancelled" == merged["finish_reason"]


def test_merging_logprobs_with_the_cancelled_terminal() -> None:
    """A terminal without logprobs and rows does not take those of the chunks before it away."""
    target = converter(logprobs=1)
    delta = target.convert(two_tokens())
    assert delta is not None
    merged = merge_chunks(delta, target.cancelled())
    assert (delta["log_probs"], delta["top_logprobs"]) == (merged["log_probs"], merged["top_logprobs"])


def test_nothing_merges_behind_a_terminal() -> None:
    """A chunk after the terminal is a mistake of the caller."""
    target = converter()
    with pytest.raises(ValueError, match=r"^nothing may follow a terminal chunk$"):
        merge_chunks(target.cancelled(), {"token_ids": [1], "index": 0})


_delta = st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.text(max_size=3))


# A loaded machine is no reason to fail.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    deltas=st.lists(_delta, min_size=1, max_size=8),
    cuts=st.sets(st.integers(1, 8)),
    logprobs=st.sampled_from([None, 0, 2]),
)
def test_any_split_merges_to_the_same_stream(
    deltas: list[tuple[list[int], str]], cuts: set[int], logprobs: int | None
) -> None:
    """However a stream is cut into groups, merging each group keeps the whole, and the terminal comes last."""
    stream = [tokens(*ids, text=text, scored=True) for ids, text in deltas]
    stream.append(tokens(finish=finished(sum(len(ids) for ids, _ in deltas))))
    chunks = run(stream, logprobs=logprobs)
    before = [dict(chunk) for chunk in chunks]
    bounds = sorted({0, len(chunks), *(cut for cut in cuts if cut < len(chunks))})
    groups = [
        merge_chunks(*chunks[start:end]) if logprobs else _fold(chunks[start:end])
        for start, end in itertools.pairwise(bounds)
    ]
    assert before == chunks, "merging must not change its arguments"
    assert all("finish_reason" not in group for group in groups[:-1])
    assert _concatenated(chunks) == _concatenated(groups)
    for key in ("finish_reason", "completion_usage"):
        assert chunks[-1].get(key) == groups[-1].get(key)


def _fold(chunks: list[Chunk]) -> Chunk:
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged = merge_chunks(merged, chunk)
    return merged


def _concatenated(chunks: list[Chunk]) -> tuple[list[int], str, list[float], list[object]]:
    return (
        [token_id for chunk in chunks for token_id in chunk["token_ids"]],
        "".join(chunk.get("text", "") for chunk in chunks),
        [logprob for chunk in chunks for logprob in chunk.get("log_probs", ())],
        [row for chunk in chunks for row in chunk.get("top_logprobs", ())],
    )
