"""vLLM's outputs → GenerateResponse (wire-and-server 4); no I/O and no import of vLLM.

vLLM hands out one output per engine step. Those that have queued up become one message, so that a reader that is slow
gets few messages rather than many, and a reader that keeps up gets one message per step. vLLM would merge queued
outputs too, but loses candidates over it: it files them by token id, and the sampled token is often listed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from trio_sidecar.convert.struct import MAX_EXACT_INTEGER, struct_from_json
from trio_sidecar.errors import InvalidRequest, RpcError, StatusCode
from trio_sidecar.wire import (
    CandidateTokenInfo,
    CandidateTokenInfoTokenInfo,
    FinishInfo,
    FinishInfoFinishReason,
    GenerateResponse,
    PromptInfo,
    SequenceOutput,
    Struct,
    TokenIds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_sidecar.engines.sampling import VllmJob

__all__ = ["FlatLogprobs", "OutputConverter"]

UNSCORED = (0.0, 0, CandidateTokenInfo)
"""What stands for a prompt position that has no score: the first one, always."""

FINISH_REASONS = {
    "stop": FinishInfoFinishReason.STOP,
    "length": FinishInfoFinishReason.LENGTH,
    "abort": FinishInfoFinishReason.ABORTED,
    "repetition": FinishInfoFinishReason.ABORTED,
}


INCOMPLETE = "\ufffd"
"""What a decoder gives for bytes that are no character, or not yet."""

PROMPT_TAIL = 8
"""How many of the prompt's tokens may matter for how the output is decoded."""


class FlatLogprobs(Protocol):
    """vLLM's flat form of scores: column lists over all positions, and where each position begins and ends.

    The first column of a position is the token itself, with its true rank; the others are candidates in order.
    """

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]


class OutputConverter:
    """Converts the outputs of one request, in order.

    Args:
        job: The request.
        decode: Token ids → text, special tokens skipped as the request says; None to give vLLM's text as it is.

    Attributes:
        num_tokens: Output tokens so far.
        finished: Whether the terminal message was made.
    """

    __slots__ = ("_decode", "_ids", "_job", "_masks", "_prompt_info_made", "_said", "finished", "num_tokens")

    def __init__(self, job: VllmJob, decode: Callable[[list[int]], str] | None = None) -> None:
        self._job = job
        self._decode = decode if job.want_text else None
        self._ids: list[int] = []
        self._said: list[str] = []
        self._prompt_info_made = False
        self._masks: list[TokenIds] = []
        self.num_tokens = 0
        self.finished = False

    def convert(self, outputs: Sequence[Any]) -> list[GenerateResponse]:
        """The messages for outputs of vLLM that have arrived together: the prompt's, if it is the first, then one more.

        Args:
            outputs: vLLM's ``RequestOutput`` objects, at least one, in DELTA mode.

        Raises:
            RpcError: INTERNAL, the engine ended the request with an error, or its answer cannot be expressed.
        """
        answers = self.prompt_info(outputs[0].prompt_logprobs)
        merged = SequenceOutput()
        texts: list[str] = []
        for output in outputs:
            self._add(merged, texts, output)
        merged.text = "".join(texts)
        answers.append(GenerateResponse(outputs=merged))
        return answers

    def prompt_info(self, logprobs: FlatLogprobs | None = None) -> list[GenerateResponse]:
        """The first message; nothing if it was made already."""
        if self._prompt_info_made:
            return []
        self._prompt_info_made = True
        job = self._job
        info = PromptInfo(num_prompt_tokens=len(job.prompt))
        if job.want_prompt_ids:
            info.token_ids = list(job.prompt)
        if job.prompt_candidates is not None:
            if logprobs:
                _append_scores(info, logprobs)
            # An abort before the prompt was scored leaves positions without a score.
            for _ in range(len(job.prompt) - len(info.logprobs)):
                _append_unscored(info)
        return [GenerateResponse(prompt_info=info)]

    def _add(self, merged: SequenceOutput, texts: list[str], output: Any) -> None:
        completion = output.outputs[0]
        tokens: Sequence[int] = completion.token_ids
        job = self._job
        if job.want_text:
            texts.append(completion.text)
        self.num_tokens += len(tokens)
        merged.num_tokens += len(tokens)
        if job.want_ids:
            merged.token_ids.extend(tokens)
        if job.candidates is not None and completion.logprobs:
            _append_scores(merged, completion.logprobs)
        mask = getattr(completion, "sampling_mask", None)
        if mask is not None:
            self._masks.extend(TokenIds(ids=list(row)) for row in mask.token_ids)
        if completion.finish_reason is not None:
            merged.finish_info = self._finish(output, completion, tokens)
            merged.sampling_mask = self._masks
            self.finished = True
        if self._decode is not None:
            self._ids.extend(tokens)
            self._said.append(completion.text)
            if completion.finish_reason is not None:
                texts.append(self._unsaid(self._decode, completion))

    def _unsaid(self, decode: Callable[[list[int]], str], completion: Any) -> str:
        """Bytes at the end that never became a character: vLLM waits for the rest of it, and drops them."""
        if isinstance(completion.stop_reason, str):
            return ""
        hidden = completion.finish_reason == "stop" and not self._job.params.get("include_stop_str_in_output")
        ids = self._ids[:-1] if hidden else self._ids
        last = next((text for text in (decode([token]) for token in reversed(ids)) if text), "")
        if not last.endswith(INCOMPLETE):
            return ""
        said = "".join(self._said)
        # vLLM decodes in the prompt's light: a space may depend on it, and the prompt may end within a character.
        prompt = self._job.prompt[-PROMPT_TAIL:]
        start = len(decode(prompt).rstrip(INCOMPLETE))
        for whole in (decode(ids), decode([*prompt, *ids])[start:]):
            if whole.startswith(said):
                return whole[len(said) :]
        return ""

    def _finish(self, output: Any, completion: Any, tokens: Sequence[int]) -> FinishInfo:
        reason = FINISH_REASONS.get(completion.finish_reason)
        if reason is None:
            message = f"the engine ended the request with {completion.finish_reason!r}"
            raise RpcError(StatusCode.INTERNAL, message)
        finish = FinishInfo(
            num_output_tokens=self.num_tokens,
            finish_reason=reason,
            num_cached_tokens=int(output.num_cached_tokens or 0),
        )
        if reason is FinishInfoFinishReason.STOP:
            stop = completion.stop_reason
            if isinstance(stop, str):
                finish.stop_string = stop
            elif stop is not None:
                finish.stop_token_id = int(stop)
            elif tokens:
                finish.eos_token_id = tokens[-1]
        finish.kv_transfer_params = _transfer(output.kv_transfer_params, "kv_transfer_params")
        finish.ec_transfer_params = _transfer(getattr(output, "ec_transfer_params", None), "ec_transfer_params")
        return finish


def _append_scores(target: SequenceOutput | PromptInfo, scores: FlatLogprobs) -> None:
    """Add every position of vLLM's flat scores."""
    ids, logprobs, ranks = scores.token_ids, scores.logprobs, scores.ranks
    for start, end in zip(scores.start_indices, scores.end_indices, strict=True):
        if start == end:
            _append_unscored(target)
            continue
        target.logprobs.append(logprobs[start])
        target.ranks.append(ranks[start] or 0)
        target.candidate_tokens.append(
            CandidateTokenInfo(
                tokens=[
                    CandidateTokenInfoTokenInfo(id=ids[at], logprob=logprobs[at], rank=ranks[at] or 0)
                    for at in range(start + 1, end)
                ]
            )
        )


def _append_unscored(target: SequenceOutput | PromptInfo) -> None:
    target.logprobs.append(UNSCORED[0])
    target.ranks.append(UNSCORED[1])
    target.candidate_tokens.append(UNSCORED[2]())


def _transfer(value: object, label: str) -> Struct | None:
    """A connector's result, if it is a JSON object; anything else counts as none."""
    if not isinstance(value, dict):
        return None
    try:
        return struct_from_json(_as_json(value), label=label)
    except InvalidRequest as error:
        raise RpcError(StatusCode.INTERNAL, error.reason) from error


def _as_json(value: object) -> object:
    """Tuples as lists, and integers that a double cannot hold as the nearest double, as JSON readers do."""
    match value:
        case dict():
            return {key: _as_json(member) for key, member in value.items()}
        case list() | tuple():
            return [_as_json(member) for member in value]
        case int() if not isinstance(value, bool) and abs(value) > MAX_EXACT_INTEGER:
            return float(value)
        case _:
            return value
