"""vLLM's outputs as messages."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from support.vllm_fakes import Scores, output
from trio_sidecar.convert.struct import json_from_struct
from trio_sidecar.engines.sampling import Candidates, VllmJob
from trio_sidecar.engines.vllm_output import OutputConverter
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import (
    CandidateTokenInfo,
    CandidateTokenInfoTokenInfo,
    FinishInfo,
    FinishInfoFinishReason,
    GenerateResponse,
    PromptInfo,
    SequenceOutput,
    TokenIds,
)

PROMPT = [1, 2, 3]


def job(**changes: Any) -> VllmJob:
    """A job that wants text and ids."""
    plain: dict[str, Any] = {"request_id": "r", "prompt": PROMPT, "params": {}, "want_ids": True}
    return VllmJob(**(plain | changes))


def infos(*columns: tuple[int, float, int]) -> CandidateTokenInfo:
    return CandidateTokenInfo(
        tokens=[CandidateTokenInfoTokenInfo(id=token, logprob=logprob, rank=rank) for token, logprob, rank in columns]
    )


def test_the_prompt_comes_first_and_alone() -> None:
    """The first output gives two messages: the prompt's, once, then its own."""
    converter = OutputConverter(job(want_prompt_ids=True))
    first = converter.convert([output("a", [5])])
    second = converter.convert([output("b", [6])])
    assert [
        GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=3, token_ids=PROMPT)),
        GenerateResponse(outputs=SequenceOutput(text="a", num_tokens=1, token_ids=[5])),
    ] == first
    assert [GenerateResponse(outputs=SequenceOutput(text="b", num_tokens=1, token_ids=[6]))] == second


def test_outputs_that_have_queued_up_become_one_message() -> None:
    """Texts, ids and scores are joined in order, none is lost, also where the sampled token is its own candidate."""
    converter = OutputConverter(job(candidates=Candidates(2)))
    outputs = [
        output(text, [token], logprobs=Scores.of([[(token, -0.5, 1), (token, -0.5, 1), (9, -1.0, 2)]]))
        for text, token in (("a", 5), ("b", 6))
    ]
    merged = converter.convert(outputs)[1].outputs
    assert merged is not None
    assert ("ab", 2, [5, 6], [-0.5, -0.5], [1, 1]) == (
        merged.text,
        merged.num_tokens,
        merged.token_ids,
        merged.logprobs,
        merged.ranks,
    )
    assert [infos((5, -0.5, 1), (9, -1.0, 2)), infos((6, -0.5, 1), (9, -1.0, 2))] == merged.candidate_tokens


def test_the_shape_of_a_message_follows_the_options() -> None:
    """Without ids and text only counts remain; without logprobs no array at all."""
    converter = OutputConverter(job(want_ids=False, want_text=False))
    answer = converter.convert([output("a", [5, 6], logprobs=Scores.of([[(5, -1.0, 1)], [(6, -1.0, 1)]]))])[1]
    assert GenerateResponse(outputs=SequenceOutput(num_tokens=2)) == answer


def test_prompt_scores_have_one_entry_per_token() -> None:
    """Index 0 is a placeholder; a position lists candidates apart from the token itself."""
    converter = OutputConverter(job(prompt_candidates=Candidates(1)))
    scores = Scores.of([[], [(2, -3.0, 7), (9, -1.0, 1)], [(3, -2.0, 4), (8, -1.5, 1)]])
    info = converter.convert([output("a", [5], prompt_logprobs=scores)])[0].prompt_info
    assert info is not None
    assert ([0.0, -3.0, -2.0], [0, 7, 4]) == (info.logprobs, info.ranks)
    assert [infos(), infos((9, -1.0, 1)), infos((8, -1.5, 1))] == info.candidate_tokens


def test_an_abort_before_the_prompt_was_scored_keeps_the_lengths() -> None:
    """Positions without a score are placeholders, so that the arrays still match the prompt."""
    converter = OutputConverter(job(prompt_candidates=Candidates(0)))
    info = converter.convert([output(finish_reason="abort", prompt_logprobs=Scores.of([[]]))])[0].prompt_info
    assert info is not None
    assert ([0.0] * 3, [0] * 3, 3) == (info.logprobs, info.ranks, len(info.candidate_tokens))


@pytest.mark.parametrize(
    ("reason", "stop", "tokens", "expected"),
    [
        ("length", None, [5], FinishInfo(finish_reason=FinishInfoFinishReason.LENGTH)),
        ("stop", 0, [0], FinishInfo(finish_reason=FinishInfoFinishReason.STOP, stop_token_id=0)),
        ("stop", "end", [5], FinishInfo(finish_reason=FinishInfoFinishReason.STOP, stop_string="end")),
        ("stop", None, [5, 7], FinishInfo(finish_reason=FinishInfoFinishReason.STOP, eos_token_id=7)),
        ("stop", None, [], FinishInfo(finish_reason=FinishInfoFinishReason.STOP)),
        ("abort", None, [], FinishInfo(finish_reason=FinishInfoFinishReason.ABORTED)),
        ("repetition", None, [5], FinishInfo(finish_reason=FinishInfoFinishReason.ABORTED)),
    ],
)
def test_finish_reasons(reason: str, stop: int | str | None, tokens: list[int], expected: FinishInfo) -> None:
    """Stop token, stop string and end token are told apart (FR-058); the end token is the last message's last."""
    converter = OutputConverter(job())
    converter.convert([output("a", [5])])
    final = output("", tokens, finish_reason=reason, stop_reason=stop)
    final.num_cached_tokens = 16
    (answer,) = converter.convert([final])
    assert answer.outputs is not None
    expected.num_output_tokens = 1 + len(tokens)
    expected.num_cached_tokens = 16
    assert expected == answer.outputs.finish_info
    assert converter.finished


def test_the_end_token_is_that_of_the_last_step_when_steps_are_merged() -> None:
    """A step without tokens that ends the request names no end token, though the merged message has tokens."""
    converter = OutputConverter(job())
    answer = converter.convert([output("a", [5]), output("", [], finish_reason="stop")])[1]
    assert answer.outputs is not None
    assert answer.outputs.finish_info is not None
    assert None is answer.outputs.finish_info.eos_token_id


def test_an_engine_error_is_a_status() -> None:
    """A request that the engine ended with an error has no terminal message (FR-019)."""
    with pytest.raises(RpcError, match="'error'") as caught:
        OutputConverter(job()).convert([output(finish_reason="error")])
    assert StatusCode.INTERNAL == caught.value.status


def test_transfer_parameters_are_objects_or_nothing() -> None:
    """Tuples become lists, integers beyond a double's reach the nearest double; no object is no parameter."""
    converter = OutputConverter(job())
    final = output("", [5], finish_reason="length")
    final.kv_transfer_params = {"blocks": (1, 2), "big": 2**60 + 1}
    final.ec_transfer_params = ["no object"]
    finish = converter.convert([final])[1].outputs
    assert finish is not None
    assert finish.finish_info is not None
    struct = finish.finish_info.kv_transfer_params
    assert struct is not None
    assert {"blocks": [1, 2], "big": float(2**60)} == json_from_struct(struct, label="kv")
    assert None is finish.finish_info.ec_transfer_params


def test_the_sampling_mask_comes_with_the_terminal() -> None:
    """One row per output token of the whole request."""

    @attrs.define
    class Mask:
        token_ids: list[list[int]]

    converter = OutputConverter(job())
    early = converter.convert([output("a", [5], sampling_mask=Mask([[5, 6]]))])
    (last,) = converter.convert([output("b", [6], sampling_mask=Mask([[6]]), finish_reason="length")])
    assert early[1].outputs is not None
    assert last.outputs is not None
    assert [] == early[1].outputs.sampling_mask
    assert [TokenIds(ids=[5, 6]), TokenIds(ids=[6])] == last.outputs.sampling_mask


def half(ids: list[int]) -> str:
    """Decodes 90 as the first half of a character, ids above as the second, 80 to nothing, the others as letters."""
    text = "".join("<" if token == 90 else ">" if token > 90 else chr(96 + token) for token in ids if token != 80)
    return text.replace("<>", "\u00fc").replace("<", "\ufffd").replace(">", "\ufffd")


@pytest.mark.parametrize(
    ("text", "tokens", "ending", "expected"),
    [
        ("a", [1, 91], {"finish_reason": "length"}, "a\ufffd"),
        ("a\u00fc", [1, 90, 92, 93, 80], {"finish_reason": "length"}, "a\u00fc\ufffd"),
        ("", [91], {"finish_reason": "abort"}, "\ufffd"),
        ("a", [1, 91, 3], {"finish_reason": "stop", "stop_reason": 3}, "a\ufffd"),
        ("a", [1, 91], {"finish_reason": "stop", "stop_reason": 91}, "a"),
        ("", [91], {"finish_reason": "stop"}, ""),
        ("a", [1, 91], {"finish_reason": "stop", "stop_reason": "b"}, "a"),
        ("a", [1], {"finish_reason": "length"}, "a"),
        ("other", [1, 91], {"finish_reason": "length"}, "other"),
    ],
)
def test_bytes_of_an_incomplete_character_come_at_the_end(
    text: str, tokens: list[int], ending: dict[str, Any], expected: str
) -> None:
    """What vLLM holds back until a character is whole is not lost, unless a stop string or a hidden token cut it."""
    converter = OutputConverter(job(), half)
    converter.convert([output()])
    (last,) = converter.convert([output(text, tokens, **ending)])
    assert last.outputs is not None
    assert expected == last.outputs.text


def test_an_incomplete_character_of_the_prompt_is_completed() -> None:
    """The prompt's last bytes and the output's first go together; what is left over still comes."""
    converter = OutputConverter(job(prompt=[1, 90]), half)
    _, last = converter.convert([output("\u00fc", [91, 92], finish_reason="length")])
    assert last.outputs is not None
    assert "\u00fc\ufffd" == last.outputs.text


def test_incomplete_characters_are_left_alone_before_the_end_and_without_text() -> None:
    """Only the terminal message may tell that a character will not become whole, and only to who wants text."""
    converter = OutputConverter(job(), half)
    assert "" == converter.convert([output("", [91])])[1].outputs.text  # type: ignore[union-attr]
    silent = OutputConverter(job(want_text=False), half)
    assert "" == silent.convert([output("", [91], finish_reason="length")])[1].outputs.text  # type: ignore[union-attr]
