"""The mock engine's answers to one request, message by message; no I/O and no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.engines.mock_encoder import encoder_result
from trio_sidecar.engines.mock_handoff import handoff
from trio_sidecar.engines.mock_reply import HashReply, Reply, TextReply
from trio_sidecar.engines.mock_stop import StopStrings
from trio_sidecar.engines.mock_tokenizer import Detokenizer
from trio_sidecar.wire import (
    CandidateTokenInfo,
    CandidateTokenInfoTokenInfo,
    FinishInfo,
    FinishInfoFinishReason,
    GenerateResponse,
    PromptInfo,
    SequenceOutput,
)

if TYPE_CHECKING:
    from trio_sidecar.engines.mock_facts import MockFacts
    from trio_sidecar.engines.mock_request import Candidates, MockJob

__all__ = ["MockOutput"]

NOT_SAMPLED_RANK = 0
"""Rank of the first prompt position, which no model scores."""


class MockOutput:
    """Writes the messages of one stream: prompt info first, one token per message, the last one with the finish.

    Attributes:
        num_tokens: Output tokens so far.
    """

    __slots__ = ("_detokenizer", "_facts", "_finished", "_job", "_reply", "_stops", "num_tokens")

    def __init__(self, job: MockJob, facts: MockFacts) -> None:
        self._finished = False
        self.num_tokens = 0
        self._job = job
        self._facts = facts
        self._detokenizer: Detokenizer | None = None
        self._stops: StopStrings | None = None
        self._reply: Reply
        if facts.tokenizer is None:
            self._reply = HashReply(facts.seed, job.request_id)
        else:
            self._reply = TextReply(job, facts.tokenizer, facts.seed)
            self._detokenizer = Detokenizer(facts.tokenizer, skip_special_tokens=job.skip_special)
            if job.stop_strings:
                self._stops = StopStrings(job.stop_strings, include=job.include_stop)

    def is_finished(self) -> bool:
        """Whether the last message was written."""
        return self._finished

    def prompt_info(self) -> GenerateResponse:
        """The first message."""
        job = self._job
        info = PromptInfo(num_prompt_tokens=len(job.prompt))
        if job.want_prompt_ids:
            info.token_ids = list(job.prompt)
        if job.prompt_candidates is not None:
            scored = job.prompt[1:]
            info.logprobs = [0.0, *map(_logprob, scored)]
            info.ranks = [NOT_SAMPLED_RANK, *(1 for _ in scored)]
            info.candidate_tokens = [
                CandidateTokenInfo(),
                *(self._others(token, job.prompt_candidates) for token in scored),
            ]
        return GenerateResponse(prompt_info=info)

    def step(self) -> GenerateResponse:
        """The next token; of an encode server the end, since it makes none."""
        job = self._job
        if self._facts.mode is DisaggregationMode.ENCODE:
            result = encoder_result(job.encoded, job.request_id)
            end = FinishInfo(finish_reason=FinishInfoFinishReason.STOP, ec_transfer_params=result)
            return GenerateResponse(outputs=SequenceOutput(finish_info=self._terminal(end)))
        token = self._reply.next(self.num_tokens)
        self.num_tokens += 1
        output = SequenceOutput(num_tokens=1)
        finish = self._finish_by_token(token)
        text = self._text_of(token, hidden=finish is not None and not job.include_stop)
        if self._stops is None:
            if finish is None and self.num_tokens >= job.max_tokens:
                finish = FinishInfo(finish_reason=FinishInfoFinishReason.LENGTH)
            if finish is not None and self._detokenizer is not None:
                text += self._detokenizer.finish()
        else:
            finish, text = self._apply_stops(self._stops, finish, text)
        if job.want_text:
            output.text = text
        if job.want_ids:
            output.token_ids = [token]
        if job.candidates is not None:
            output.logprobs = [_logprob(token)]
            output.ranks = [1]
            output.candidate_tokens = [self._best(token, job.candidates)]
        if finish is not None:
            output.finish_info = self._terminal(finish)
        return GenerateResponse(outputs=output)

    def aborted(self) -> GenerateResponse:
        """The last message of an aborted request: no token, the text that was held back, no handoff (R16.5)."""
        output = SequenceOutput(finish_info=self._terminal(FinishInfo(finish_reason=FinishInfoFinishReason.ABORTED)))
        if self._job.want_text and self._stops is not None:
            output.text = self._stops.flush()
        return GenerateResponse(outputs=output)

    def _terminal(self, finish: FinishInfo) -> FinishInfo:
        self._finished = True
        finish.num_output_tokens = self.num_tokens
        finish.num_cached_tokens = self._job.cached_tokens
        if self._facts.mode is DisaggregationMode.PREFILL and finish.finish_reason != FinishInfoFinishReason.ABORTED:
            finish.kv_transfer_params = handoff(len(self._job.prompt), self._job.request_id)
        return finish

    def _finish_by_token(self, token: int) -> FinishInfo | None:
        """Token mode knows no end token, but honours stop ids (R16.9)."""
        job, tokenizer = self._job, self._facts.tokenizer
        if tokenizer is not None and token == tokenizer.eos_id and not job.ignore_eos:
            return FinishInfo(finish_reason=FinishInfoFinishReason.STOP, eos_token_id=token)
        if token in job.stop_ids and self.num_tokens >= job.min_tokens:
            return FinishInfo(finish_reason=FinishInfoFinishReason.STOP, stop_token_id=token)
        return None

    def _text_of(self, token: int, *, hidden: bool) -> str:
        if hidden:
            return ""
        if self._detokenizer is None:
            return f"<token:{token}>"
        return self._detokenizer.push(token)

    def _apply_stops(self, stops: StopStrings, finish: FinishInfo | None, text: str) -> tuple[FinishInfo | None, str]:
        """A stop string found in this step wins over the length limit; without one, the end lets held text go."""
        if finish is None and self.num_tokens >= self._job.max_tokens:
            finish = FinishInfo(finish_reason=FinishInfoFinishReason.LENGTH)
        if finish is not None and self._detokenizer is not None:
            text += self._detokenizer.finish()
        released, found = stops.push(text, match=self.num_tokens > self._job.min_tokens)
        if found is not None:
            return FinishInfo(finish_reason=FinishInfoFinishReason.STOP, stop_string=found), released
        return finish, released if finish is None else released + stops.flush()

    def _best(self, token: int, wanted: Candidates) -> CandidateTokenInfo:
        """Candidates of an output position.

        vLLM's server lists the sampled token again among the best; Dynamo's mocker lists only others (R16.12).
        """
        if self._facts.tokenizer is None:
            return self._others(token, wanted)
        if wanted.ids:
            pairs = [
                (each, _logprob(token) - (0.0 if each == token else 0.1 * (at + 1)))
                for at, each in enumerate(wanted.ids)
            ]
            return _info([(each, logprob, at + 1) for at, (each, logprob) in enumerate(pairs)])
        if wanted.count == 0:
            return CandidateTokenInfo()
        rest = self._others(token, wanted).tokens[: wanted.count - 1]
        return CandidateTokenInfo(
            tokens=[CandidateTokenInfoTokenInfo(id=token, logprob=_logprob(token), rank=1), *rest]
        )

    def _others(self, token: int, wanted: Candidates) -> CandidateTokenInfo:
        """The next ids, or the wanted ones, each 0.1 less likely, ranks from 2."""
        tokenizer = self._facts.tokenizer
        size = 2**32 if tokenizer is None else tokenizer.vocab_size
        ids = wanted.ids or [(token + each) % size for each in range(1, wanted.count + 1)]
        first = _logprob(token)
        return _info([(each, first - 0.1 * at, at + 1) for at, each in enumerate(ids, 1)])


def _info(rows: list[tuple[int, float, int]]) -> CandidateTokenInfo:
    return CandidateTokenInfo(
        tokens=[CandidateTokenInfoTokenInfo(id=token, logprob=logprob, rank=rank) for token, logprob, rank in rows]
    )


def _logprob(token: int) -> float:
    """R16.12."""
    return -0.1 * (token % 10 + 1)
