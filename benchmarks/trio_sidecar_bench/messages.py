"""The wire messages of the fast server, encoded in advance but for what changes."""

from __future__ import annotations

import attrs

from trio_sidecar import wire
from trio_sidecar.wire.codec import decode, encode
from trio_sidecar_bench.stamps import stamp

__all__ = ["LOCKSTEP", "Ask", "first_message", "last_message", "read_request", "token_message"]

LOCKSTEP = 1 << 40
"""Set in a request's seed: all such streams get their tokens at the same moments, as from one engine's steps."""

TEXT = " tok"
_CONTINUED = bytes(range(0x80, 0x100))
_PROMPT_FIELD = 4


@attrs.frozen(slots=True, kw_only=True)
class Ask:
    """What a request asks of the server.

    Attributes:
        prompt_tokens: Length of the prompt.
        tokens: How many tokens to send.
        interval_us: Time between two tokens of this stream; 0 sends as fast as the reader takes them.
        lockstep: Whether the tokens are due at whole multiples of the interval on the clock.
        candidates: Alternatives beside each token, with logprobs; None for no logprobs.
    """

    prompt_tokens: int
    tokens: int
    interval_us: int
    lockstep: bool
    candidates: int | None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _cut_prompt(data: bytes) -> tuple[int, bytes]:
    """The number of prompt ids, and the request without them: decoding 100,000 ids would hold the server up."""
    count = at = 0
    kept = []
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        if tag & 7 == 2:
            size, at = _varint(data, at)
            if tag >> 3 == _PROMPT_FIELD:
                ids, inner = _varint(data, at + 1)
                count = len(data[inner : inner + ids].translate(None, _CONTINUED))
                at += size
                continue
            at += size
        elif tag & 7 == 0:
            _, at = _varint(data, at)
        else:
            at += 4 if tag & 7 == 5 else 8
        kept.append(data[start:at])
    return count, b"".join(kept)


def read_request(data: bytes) -> Ask:
    """What a ``GenerateRequest`` asks for; its seed is the pace."""
    prompt_tokens, rest = _cut_prompt(data)
    request = decode(wire.GenerateRequest, rest)
    seed = (request.sampling.seed or 0) if request.sampling else 0
    response, stopping = request.response, request.stopping
    candidates = None
    if response is not None and response.output_logprobs:
        wanted = response.output_candidates
        candidates = (wanted.top_n or 0) if wanted is not None else 0
    return Ask(
        prompt_tokens=prompt_tokens,
        tokens=(stopping.max_new_tokens if stopping is not None else 0) or 1,
        interval_us=seed & (LOCKSTEP - 1),
        lockstep=bool(seed & LOCKSTEP),
        candidates=candidates,
    )


def _framed(message: wire.GenerateResponse) -> bytes:
    data = encode(message)
    return b"\0" + len(data).to_bytes(4, "big") + data


def _output(token_id: int, candidates: int | None) -> wire.SequenceOutput:
    output = wire.SequenceOutput(text=TEXT, num_tokens=1, token_ids=[token_id])
    if candidates is not None:
        others = [
            wire.CandidateTokenInfoTokenInfo(id=1000 + n, logprob=-1.5 - n, rank=n + 2) for n in range(candidates)
        ]
        output.logprobs = [-0.25]
        output.ranks = [1]
        output.candidate_tokens = [wire.CandidateTokenInfo(tokens=others)]
    return output


def first_message(prompt_tokens: int) -> bytes:
    """What comes before the tokens, with its gRPC prefix."""
    return _framed(wire.GenerateResponse(prompt_info=wire.PromptInfo(num_prompt_tokens=prompt_tokens)))


def token_message(at_us: int, candidates: int | None) -> bytes:
    """One token that carries that moment, with its gRPC prefix."""
    return _framed(wire.GenerateResponse(outputs=_output(stamp(at_us), candidates)))


def last_message(at_us: int, candidates: int | None, tokens: int) -> bytes:
    """The last of that many tokens, with the end."""
    output = _output(stamp(at_us), candidates)
    output.finish_info = wire.FinishInfo(num_output_tokens=tokens, finish_reason=wire.FinishInfoFinishReason.LENGTH)
    return _framed(wire.GenerateResponse(outputs=output))
