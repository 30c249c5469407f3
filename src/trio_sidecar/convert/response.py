"""An engine's answers to the chunks that Dynamo's Python binding takes (spec 8).

``convert`` runs once per token message. The common case, a delta without logprobs, is a handful of comparisons and one
dict literal; all that is rare lives in functions of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from trio_sidecar.convert.handoff import EC_PARAMS, KV_PARAMS, PROMPT_IDS_KEY
from trio_sidecar.convert.modes import RULES, Terminal
from trio_sidecar.convert.struct import Json, json_from_struct
from trio_sidecar.errors import ProtocolError
from trio_sidecar.wire import FinishInfoFinishReason

if TYPE_CHECKING:
    from trio_sidecar.convert.request import ResponseOptionsState
    from trio_sidecar.wire import (
        CandidateTokenInfo,
        FinishInfo,
        GenerateResponse,
        PromptInfo,
        SequenceOutput,
    )

__all__ = ["LOGPROB_FLOOR", "Candidate", "Chunk", "ResponseConverter", "merge_chunks"]

LOGPROB_FLOOR = -9999.0
"""Stands for every logprob that JSON cannot carry, and for everything below it (R8.22)."""


class Candidate(TypedDict):
    """One entry of a row of top logprobs; Dynamo's front end adds token text and bytes from its tokenizer (R8.21)."""

    rank: int
    token_id: int
    logprob: float


class PromptTokensDetails(TypedDict):
    """How the prompt tokens came about."""

    cached_tokens: int


class Usage(TypedDict, total=False):
    """Token counts of a whole request, on its terminal chunk only."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Chunk(TypedDict, total=False):
    """One message to Dynamo, with the keys of its ``LLMEngineOutput``; absent keys mean None."""

    token_ids: list[int]
    index: int
    text: str
    log_probs: list[float]
    top_logprobs: list[list[Candidate]]
    finish_reason: str
    stop_reason: int | str
    completion_usage: Usage
    disaggregated_params: dict[str, Json]
    encoder_result: dict[str, Json]
    engine_data: dict[str, Json]


_CANCELLED = "cancelled"
_FINISH_REASONS = {
    int(FinishInfoFinishReason.LENGTH): "length",
    int(FinishInfoFinishReason.STOP): "stop",
    int(FinishInfoFinishReason.ABORTED): _CANCELLED,
}

_PromptRows: TypeAlias = "list[Json]"


class ResponseConverter:
    """Converts the answers to one request, in order.

    Text and logprobs: a chunk that carries text makes Dynamo's front end skip its own detokeniser, and with it the
    token strings without which it drops every logprob. Chunks of a request that asked for logprobs therefore leave the
    text to the front end, which applies the same stop strings. Every other chunk carries the engine's text, also an
    empty one (R8.4).

    Attributes:
        finished: The terminal chunk has been handed out; later answers are ignored (R10.18).
        aborted_by_engine: The engine ended the request as ABORTED. The chunk says cancelled (R8.12); whether anybody
            asked for that is for the session to know.
        completion_tokens: Tokens counted so far.
    """

    __slots__ = (
        "_emit_text",
        "_generates",
        "_options",
        "_prompt_ids",
        "_prompt_rows",
        "_prompt_tokens",
        "_terminal",
        "_want_logprobs",
        "_want_rows",
        "aborted_by_engine",
        "completion_tokens",
        "finished",
    )

    def __init__(self, options: ResponseOptionsState) -> None:
        self._options = options
        self._generates = RULES[options.mode].generates
        self._terminal = RULES[options.mode].terminal
        self._prompt_tokens = options.prompt_tokens
        self._prompt_ids: list[int] | None = None
        self._want_logprobs = options.logprobs is not None and self._generates
        self._want_rows = self._want_logprobs and bool(options.logprobs)
        self._emit_text = self._generates and not self._want_logprobs
        self._prompt_rows: _PromptRows | None = None
        self.finished = False
        self.aborted_by_engine = False
        self.completion_tokens = 0

    def convert(self, response: GenerateResponse) -> Chunk | None:
        """The chunk for one answer, None if there is nothing to tell.

        Raises:
            ProtocolError: The answer contradicts itself or the request; the message names what does (spec 8.2).
        """
        if self.finished:
            return None
        if response.prompt_info is not None:
            self._take_prompt_info(response.prompt_info)
        outputs = response.outputs
        if outputs is None:
            return None
        ids = outputs.token_ids
        count = len(ids)
        if outputs.index:
            reason = f"sequence index {outputs.index}, expected 0"
            raise ProtocolError(reason)
        if outputs.num_tokens != count:
            reason = f"num_tokens {outputs.num_tokens}, but {count} token ids"
            raise ProtocolError(reason)
        if count and self._terminal is Terminal.EC_HANDOFF:
            reason = f"an encode response produced output tokens: {count}"
            raise ProtocolError(reason)
        if self._want_logprobs and not (
            len(outputs.logprobs) == len(outputs.ranks) == len(outputs.candidate_tokens) == count
        ):
            raise _unequal_lengths(outputs, count)
        self.completion_tokens += count
        finish = outputs.finish_info
        if finish is None and (not count or not self._generates):
            return None
        chunk: Chunk
        if self._emit_text:
            chunk = {"token_ids": ids, "text": outputs.text, "index": 0}
        elif self._generates:
            chunk = {"token_ids": ids, "index": 0}
            self._add_logprobs(chunk, outputs)
        else:
            chunk = {"token_ids": [], "index": 0}
        if finish is not None:
            self._finish(chunk, finish)
        return chunk

    def cancelled(self) -> Chunk:
        """The terminal chunk of a request that was cancelled: no tokens, usage so far (spec 10)."""
        self.finished = True
        return {
            "token_ids": [],
            "index": 0,
            "finish_reason": _CANCELLED,
            "completion_usage": self._usage(),
        }

    def _finish(self, chunk: Chunk, finish: FinishInfo) -> None:
        if finish.num_output_tokens != self.completion_tokens:
            counted = f"{self.completion_tokens} were counted"
            reason = f"terminal num_output_tokens {finish.num_output_tokens}, but {counted}"
            raise ProtocolError(reason)
        reason = _finish_reason(finish)
        chunk["finish_reason"] = reason
        stop = self._stop_reason(finish)
        if stop is not None:
            chunk["stop_reason"] = stop
        usage = self._usage()
        if finish.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": finish.num_cached_tokens}
        chunk["completion_usage"] = usage
        aborted = reason == _CANCELLED
        # What an aborted prefill or encode left behind is no handoff (R8.32, R8.38); its prompt data are still good.
        if not (aborted and self._terminal is not Terminal.ANSWER):
            self._add_payload(chunk, finish)
        if self._prompt_rows is not None:
            chunk["engine_data"] = {"prompt_logprobs": self._prompt_rows}
        self.aborted_by_engine = aborted
        self.finished = True

    def _add_payload(self, chunk: Chunk, finish: FinishInfo) -> None:
        """What the terminal hands over to another worker or to a connector (R8.16, 8.8, 8.9)."""
        if self._terminal is Terminal.EC_HANDOFF:
            chunk["encoder_result"] = _encoder_result(finish)
            return
        if finish.kv_transfer_params is not None:
            params = json_from_struct(finish.kv_transfer_params, label=KV_PARAMS)
        elif self._terminal is Terminal.KV_HANDOFF:
            reason = f"a prefill terminal is missing {KV_PARAMS}"
            raise ProtocolError(reason)
        else:
            return
        if self._terminal is Terminal.KV_HANDOFF and self._options.expands_prompt:
            if self._prompt_ids is None:
                reason = "a multimodal prefill did not return the expanded prompt's token ids"
                raise ProtocolError(reason)
            params[PROMPT_IDS_KEY] = list(self._prompt_ids)
        chunk["disaggregated_params"] = params

    def _stop_reason(self, finish: FinishInfo) -> int | str | None:
        """What the user may learn of the stop (8.4): a string, or an id unless only the model chose it."""
        if finish.stop_string is not None:
            return finish.stop_string
        user = self._options.user_stop_ids
        token = finish.stop_token_id
        if token is not None:
            return None if token in self._options.hidden_stop_ids and token not in user else token
        eos = finish.eos_token_id
        return eos if eos is not None and eos in user else None

    def _usage(self) -> Usage:
        prompt = self._prompt_tokens
        completion = self.completion_tokens if self._generates else 0
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _add_logprobs(self, chunk: Chunk, outputs: SequenceOutput) -> None:
        logprobs = [_finite(logprob) for logprob in outputs.logprobs]
        chunk["log_probs"] = logprobs
        if self._want_rows:
            chunk["top_logprobs"] = [
                _row(*position)
                for position in zip(outputs.token_ids, logprobs, outputs.ranks, outputs.candidate_tokens, strict=True)
            ]

    def _take_prompt_info(self, info: PromptInfo) -> None:
        count = info.num_prompt_tokens
        if count != self._prompt_tokens:
            if not self._options.expands_prompt:
                reason = f"prompt token count {count}, but {self._prompt_tokens} were sent"
                raise ProtocolError(reason)
            self._prompt_tokens = count
        if self._options.expands_prompt and self._terminal is Terminal.KV_HANDOFF and info.token_ids:
            if len(info.token_ids) != count:
                reason = f"a multimodal prefill returned {len(info.token_ids)} prompt token ids, but counted {count}"
                raise ProtocolError(reason)
            self._prompt_ids = info.token_ids
        if self._options.prompt_logprobs is None:
            return
        lengths = [len(column) for column in (info.token_ids, info.logprobs, info.ranks, info.candidate_tokens)]
        if any(length != count for length in lengths):
            names = "token_ids, logprobs, ranks, candidate_tokens"
            reason = f"prompt logprob array lengths {lengths} ({names}), expected {count} each"
            raise ProtocolError(reason)
        self._prompt_rows = _prompt_rows(info)


def _encoder_result(finish: FinishInfo) -> dict[str, Json]:
    """The payload of an encode terminal, which has to be a stop and to bring one (R8.34 to R8.36)."""
    if int(finish.finish_reason) != int(FinishInfoFinishReason.STOP):
        reason = f"an encode terminal has the invalid finish reason {finish.finish_reason!r}; expected is a stop"
        raise ProtocolError(reason)
    if finish.ec_transfer_params is None:
        reason = f"an encode terminal is missing valid {EC_PARAMS}"
        raise ProtocolError(reason)
    return json_from_struct(finish.ec_transfer_params, label=EC_PARAMS)


def _finish_reason(finish: FinishInfo) -> str:
    number = int(finish.finish_reason)
    name = _FINISH_REASONS.get(number)
    if name is None:
        reason = "a terminal with finish reason NOT_FINISHED" if number == 0 else f"unknown finish reason {number}"
        raise ProtocolError(reason)
    return name


def _finite(logprob: float) -> float:
    # NaN fails both comparisons.
    return logprob if LOGPROB_FLOOR <= logprob < math.inf else LOGPROB_FLOOR


def _row(token_id: int, logprob: float, rank: int, candidates: CandidateTokenInfo) -> list[Candidate]:
    """The selected token, then the candidates in wire order; neither sorted nor deduplicated (R8.20)."""
    row: list[Candidate] = [{"rank": rank, "token_id": token_id, "logprob": logprob}]
    row.extend(
        {"rank": other.rank, "token_id": other.id, "logprob": _finite(other.logprob)} for other in candidates.tokens
    )
    return row


def _prompt_rows(info: PromptInfo) -> _PromptRows:
    """Per position a map from token id to logprob and rank; the first position was never scored (R8.24, R8.25)."""
    rows: _PromptRows = [None]
    for position in range(1, info.num_prompt_tokens):
        row: dict[str, Json] = {
            str(info.token_ids[position]): {"logprob": _finite(info.logprobs[position]), "rank": info.ranks[position]}
        }
        for other in info.candidate_tokens[position].tokens:
            row[str(other.id)] = {"logprob": _finite(other.logprob), "rank": other.rank}
        rows.append(row)
    return rows


def _unequal_lengths(outputs: SequenceOutput, count: int) -> ProtocolError:
    lengths = [len(outputs.logprobs), len(outputs.ranks), len(outputs.candidate_tokens)]
    names = "logprobs, ranks, candidate_tokens"
    return ProtocolError(f"output logprob array lengths {lengths} ({names}), expected {count} each")


def merge_chunks(first: Chunk, *later: Chunk) -> Chunk:
    """Adjacent chunks of one request as one: ids, text, logprobs and rows concatenated, terminal fields kept.

    No argument is changed.

    Raises:
        ValueError: A chunk follows the terminal one.
    """
    chunks = (first, *later)
    if any("finish_reason" in chunk for chunk in chunks[:-1]):
        reason = "nothing may follow a terminal chunk"
        raise ValueError(reason)
    merged = chunks[-1].copy()
    merged["token_ids"] = [token_id for chunk in chunks for token_id in chunk["token_ids"]]
    texts = [chunk["text"] for chunk in chunks if "text" in chunk]
    if texts:
        merged["text"] = "".join(texts)
    if any("log_probs" in chunk for chunk in chunks):
        merged["log_probs"] = [logprob for chunk in chunks for logprob in chunk.get("log_probs", ())]
    if any("top_logprobs" in chunk for chunk in chunks):
        merged["top_logprobs"] = [row for chunk in chunks for row in chunk.get("top_logprobs", ())]
    return merged
