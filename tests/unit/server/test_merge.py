"""One answer made of many."""

from __future__ import annotations

import pytest

from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.server.merge import Merger
from trio_sidecar.wire import (
    CandidateTokenInfo,
    FinishInfo,
    FinishInfoFinishReason,
    GenerateResponse,
    PromptInfo,
    SequenceOutput,
    TokenIds,
)


def test_deltas_are_concatenated() -> None:
    """Texts, ids and rows follow each other; the finish and its sampling mask are kept."""
    info = PromptInfo(num_prompt_tokens=3)
    finish = FinishInfo(num_output_tokens=3, finish_reason=FinishInfoFinishReason.STOP, stop_string="x")
    merger = Merger()
    merger.add([GenerateResponse(prompt_info=info)])
    row = CandidateTokenInfo()
    first = SequenceOutput(
        text="a", num_tokens=2, token_ids=[1, 2], logprobs=[-1, -2], ranks=[1, 3], candidate_tokens=[row] * 2
    )
    last = SequenceOutput(
        text="b",
        num_tokens=1,
        token_ids=[3],
        logprobs=[-3],
        ranks=[2],
        candidate_tokens=[row],
        finish_info=finish,
        sampling_mask=[TokenIds(ids=[9])],
    )
    merger.add([GenerateResponse(outputs=first), GenerateResponse(outputs=last)])
    expected = SequenceOutput(
        text="ab",
        num_tokens=3,
        token_ids=[1, 2, 3],
        logprobs=[-1, -2, -3],
        ranks=[1, 3, 2],
        candidate_tokens=[row] * 3,
        finish_info=finish,
        sampling_mask=[TokenIds(ids=[9])],
    )
    assert GenerateResponse(prompt_info=info, outputs=expected) == merger.result()


def test_a_stream_without_a_finish_is_an_error() -> None:
    """Half an answer is not an answer."""
    merger = Merger()
    merger.add([GenerateResponse(outputs=SequenceOutput(text="a", num_tokens=1))])
    with pytest.raises(RpcError, match="finish_info") as caught:
        merger.result()
    assert StatusCode.INTERNAL == caught.value.status
