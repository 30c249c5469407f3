"""What our server over a real vLLM answers to requests for text."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from support.plain_vllm_model import CONTEXT, SECOND_EOS
from support.tiny_model import EOS
from support.vllm_server import MODEL_NAME, request
from trio_sidecar import wire
from trio_sidecar.wire import FinishInfoFinishReason as Reason
from trio_sidecar.wire import methods

if TYPE_CHECKING:
    from support.vllm_server import VllmServer

pytestmark = pytest.mark.timeout(240)

FORCE = 100.0


def stops(count: int = 8, **fields: Any) -> wire.StoppingCriteria:
    """So many tokens at most."""
    return wire.StoppingCriteria(max_new_tokens=count, **fields)


def force(token: int) -> wire.DecodingParameters:
    """Make greedy decoding choose a token."""
    return wire.DecodingParameters(logit_bias={token: FORCE})


def outputs(answer: wire.GenerateResponse) -> wire.SequenceOutput:
    assert answer.outputs is not None
    return answer.outputs


def finish(answer: wire.GenerateResponse) -> wire.FinishInfo:
    found = outputs(answer).finish_info
    assert found is not None
    return found


def test_a_stream_is_prompt_then_deltas_then_a_finish(server: VllmServer) -> None:
    """The prompt's message is first and alone; sums agree; the unary answer is the same text and tokens."""
    whole = server.generate()
    first, *deltas = server.stream(request())
    assert first.outputs is None
    assert first.prompt_info.num_prompt_tokens == len(server.tokenizer.encode("The harbour").ids)
    assert all(delta.prompt_info is None for delta in deltas)
    assert [None] * (len(deltas) - 1) == [delta.outputs.finish_info for delta in deltas[:-1]]
    ids = [token for delta in deltas for token in delta.outputs.token_ids]
    assert (ids, "".join(delta.outputs.text for delta in deltas)) == (outputs(whole).token_ids, outputs(whole).text)
    last = deltas[-1].outputs.finish_info
    assert (8, Reason.LENGTH, 8) == (
        last.num_output_tokens,
        last.finish_reason,
        sum(delta.outputs.num_tokens for delta in deltas),
    )
    assert whole.prompt_info == first.prompt_info
    assert server.tokenizer.decode(ids, skip_special_tokens=True) == outputs(whole).text


def test_token_ids_and_text_prompts_agree(server: VllmServer) -> None:
    """A prompt of ids is taken as it is, and truncation keeps its end."""
    ids = server.tokenizer.encode("The harbour").ids
    by_ids = server.generate(text=None, token_ids=wire.TokenIds(ids=ids))
    assert outputs(server.generate()).token_ids == outputs(by_ids).token_ids
    cut = server.generate(
        text=None,
        token_ids=wire.TokenIds(ids=[5, 6, 7, *ids]),
        truncate_prompt_tokens=len(ids),
        response=wire.ResponseOptions(prompt_token_ids=True, output_token_ids=True),
    )
    assert cut.prompt_info is not None
    assert ids == cut.prompt_info.token_ids
    assert outputs(by_ids).token_ids == outputs(cut).token_ids


def test_no_temperature_is_greedy_and_no_limit_is_the_context(server: VllmServer) -> None:
    """Two bare requests say the same; without a limit the answer fills the context."""
    stopping = wire.StoppingCriteria(ignore_eos=True)
    first, second = (server.generate(stopping=stopping) for _ in range(2))
    assert first.prompt_info is not None
    assert outputs(first).token_ids == outputs(second).token_ids
    assert CONTEXT - first.prompt_info.num_prompt_tokens == finish(first).num_output_tokens
    sampled = {
        tuple(outputs(server.generate(temperature=1.0, sampling=wire.RandomSampling(seed=seed))).token_ids)
        for seed in (0, 0, 1)
    }
    assert 2 == len(sampled)


def test_end_tokens_stop_tokens_and_lengths_are_told_apart(server: VllmServer) -> None:
    """The tokenizer's end, the generation config's, an explicit stop id, and the limit (FR-058)."""
    end = finish(server.generate(decoding=force(EOS), stopping=stops()))
    assert (Reason.STOP, EOS, None, 1) == (
        end.finish_reason,
        end.eos_token_id,
        end.stop_token_id,
        end.num_output_tokens,
    )
    second = finish(server.generate(decoding=force(SECOND_EOS), stopping=stops()))
    assert (Reason.STOP, None, SECOND_EOS) == (second.finish_reason, second.eos_token_id, second.stop_token_id)
    wanted = server.generate(decoding=force(300), stopping=stops(stop_token_ids=[300]))
    assert (300, [300], "") == (finish(wanted).stop_token_id, outputs(wanted).token_ids, outputs(wanted).text)
    limit = finish(server.generate(decoding=force(EOS), stopping=stops(3, ignore_eos=True)))
    assert (Reason.LENGTH, 3, None, None) == (
        limit.finish_reason,
        limit.num_output_tokens,
        limit.eos_token_id,
        limit.stop_token_id,
    )


def test_stop_strings(server: VllmServer) -> None:
    """Across a token boundary, with and without the string itself, and not before the least number of tokens."""
    free = outputs(server.generate(stopping=stops(12, ignore_eos=True)))
    text = free.text
    at = len(text) // 2
    stop = text[at - 1 : at + 2]
    assert len(stop) == 3
    begin = text.index(stop)
    for include, expected in ((False, text[:begin]), (True, text[: begin + 3])):
        stopping = stops(12, ignore_eos=True, stop_strings=[stop], include_stop_strings=include)
        found = server.generate(stopping=stopping)
        assert (expected, stop, Reason.STOP) == (
            outputs(found).text,
            finish(found).stop_string,
            finish(found).finish_reason,
        )
        assert finish(found).num_output_tokens == outputs(found).num_tokens == len(outputs(found).token_ids)
        streamed = list(server.stream(request(stopping=stopping)))
        assert expected == "".join(answer.outputs.text for answer in streamed[1:])
    late = server.generate(
        stopping=wire.StoppingCriteria(max_new_tokens=12, min_new_tokens=12, ignore_eos=True, stop_strings=[stop])
    )
    assert 12 == finish(late).num_output_tokens


SELECTORS = [
    (None, 0),
    (wire.CandidateTokens(top_n=0), 0),
    (wire.CandidateTokens(top_n=1), 1),
    (wire.CandidateTokens(top_n=5), 5),
    (wire.CandidateTokens(token_ids=wire.TokenIds(ids=[7])), 1),
    (wire.CandidateTokens(token_ids=wire.TokenIds(ids=[7, 8, 7])), 3),
]


@pytest.mark.parametrize(("chosen", "count"), SELECTORS)
def test_candidates(server: VllmServer, chosen: wire.CandidateTokens | None, count: int) -> None:
    """One score per token, and as many candidates as asked for, the sampled token among the best again."""
    options = wire.ResponseOptions(output_token_ids=True, output_logprobs=True, output_candidates=chosen)
    found = outputs(server.generate(response=options))
    assert 8 == len(found.token_ids) == len(found.logprobs) == len(found.ranks) == len(found.candidate_tokens)
    assert [count] * 8 == [len(each.tokens) for each in found.candidate_tokens]
    if chosen is not None and chosen.token_ids is not None:
        assert [7] * 8 == [each.tokens[0].id for each in found.candidate_tokens]
    else:
        assert [1] * 8 == found.ranks
        for token, each in zip(found.token_ids, found.candidate_tokens, strict=True):
            assert list(range(1, count + 1)) == [candidate.rank for candidate in each.tokens]
            assert [token] * min(count, 1) == [candidate.id for candidate in each.tokens[:1]]


def test_a_slow_reader_loses_no_candidates(server: VllmServer) -> None:
    """Deltas that queue up are merged without filing candidates by their id."""
    options = wire.ResponseOptions(
        output_token_ids=True, output_logprobs=True, output_candidates=wire.CandidateTokens(top_n=20)
    )
    stream = server.stream(request(stopping=stops(200, ignore_eos=True), response=options))
    next(stream)
    time.sleep(1.0)
    answers = list(stream)
    assert 200 == sum(answer.outputs.num_tokens for answer in answers)
    assert all(len(each.tokens) == 20 for answer in answers for each in answer.outputs.candidate_tokens)


def test_prompt_scores(server: VllmServer) -> None:
    """Four arrays as long as the prompt, the first position a placeholder."""
    options = wire.ResponseOptions(
        prompt_token_ids=True, prompt_logprobs=True, prompt_candidates=wire.CandidateTokens(top_n=2)
    )
    info = server.generate(response=options).prompt_info
    assert info is not None
    assert info.num_prompt_tokens == len(info.token_ids) == len(info.logprobs) == len(info.ranks)
    assert (0.0, 0) == (info.logprobs[0], info.ranks[0])
    assert [0] + [2] * (info.num_prompt_tokens - 1) == [len(each.tokens) for each in info.candidate_tokens]
    assert all(logprob < 0 for logprob in info.logprobs[1:])


def test_the_prefix_cache_is_reported_and_can_be_bypassed(server: VllmServer) -> None:
    """A prompt that was seen counts as cached, unless the request or its salt says otherwise."""
    ids = [(7 * number) % 400 + 10 for number in range(200)]
    prompt = {"text": None, "token_ids": wire.TokenIds(ids=ids)}
    first, again = (finish(server.generate(**prompt)) for _ in range(2))
    assert (0, 128) == (first.num_cached_tokens, again.num_cached_tokens)
    for kv in (wire.KvCacheParameters(bypass_prefix_cache=True), wire.KvCacheParameters(cache_salt="pepper")):
        assert 0 == finish(server.generate(**prompt, kv=kv)).num_cached_tokens


@pytest.mark.rule("FR-069")
def test_structured_output(server: VllmServer) -> None:
    """The answer obeys a JSON schema, a choice and a regex."""
    choice = wire.DecodingParametersStringChoices(choices=["gull", "boat"])
    assert outputs(server.generate(decoding=wire.DecodingParameters(choice=choice), stopping=stops(20))).text in (
        "gull",
        "boat",
    )
    regex = wire.DecodingParameters(regex="[0-9]{3}")
    assert outputs(server.generate(decoding=regex, stopping=stops(20))).text.isdigit()
    schema = wire.DecodingParameters(json='{"enum": [[1, 2], "gull"]}')
    assert json.loads(outputs(server.generate(decoding=schema, stopping=stops(30))).text) in ([1, 2], "gull")


REFUSALS = [
    ("model", grpc.StatusCode.NOT_FOUND, {"model": "nobody"}),
    ("no prompt", grpc.StatusCode.INVALID_ARGUMENT, {"text": None}),
    ("empty prompt", grpc.StatusCode.INVALID_ARGUMENT, {"text": None, "token_ids": wire.TokenIds()}),
    ("prompt id", grpc.StatusCode.INVALID_ARGUMENT, {"text": None, "token_ids": wire.TokenIds(ids=[512])}),
    ("n", grpc.StatusCode.INVALID_ARGUMENT, {"sampling": wire.RandomSampling(num_sequences=2)}),
    ("json", grpc.StatusCode.INVALID_ARGUMENT, {"decoding": wire.DecodingParameters(json="{")}),
    ("schema", grpc.StatusCode.INVALID_ARGUMENT, {
        "decoding": wire.DecodingParameters(json='{"type": "integer", "multipleOf": 3}')
    }),
    ("lora", grpc.StatusCode.NOT_FOUND, {"lora_name": "nobody"}),
    ("candidates", grpc.StatusCode.INVALID_ARGUMENT, {"response": wire.ResponseOptions(
        output_logprobs=True, output_candidates=wire.CandidateTokens(top_n=21)
    )}),
    ("all candidates", grpc.StatusCode.INVALID_ARGUMENT, {"response": wire.ResponseOptions(
        output_logprobs=True, output_candidates=wire.CandidateTokens(all=True)
    )}),
    ("context", grpc.StatusCode.INVALID_ARGUMENT, {"text": None, "token_ids": wire.TokenIds(ids=[9] * CONTEXT)}),
    ("least and most", grpc.StatusCode.INVALID_ARGUMENT, {"stopping": stops(2, min_new_tokens=3)}),
    ("thinking", grpc.StatusCode.INVALID_ARGUMENT, {"stopping": stops(thinking_token_budget=-2)}),
    ("temperature", grpc.StatusCode.INVALID_ARGUMENT, {"temperature": 2.5}),
    ("stop id", grpc.StatusCode.INVALID_ARGUMENT, {"stopping": stops(stop_token_ids=[512])}),
    ("stop string", grpc.StatusCode.INVALID_ARGUMENT, {"stopping": stops(stop_strings=[""])}),
    ("salt", grpc.StatusCode.INVALID_ARGUMENT, {"kv": wire.KvCacheParameters(cache_salt="a@b")}),
    ("truncation", grpc.StatusCode.INVALID_ARGUMENT, {"truncate_prompt_tokens": CONTEXT + 1}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "fields"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_refusals(server: VllmServer, status: grpc.StatusCode, fields: dict[str, Any]) -> None:
    """Unary and streamed alike, and no message comes before the status."""
    assert status == server.refusal(methods.GENERATE, request(**fields))
    stream = server.stream(request(**fields))
    with pytest.raises(grpc.RpcError):
        next(stream)
    assert status == stream.code()


@pytest.mark.parametrize("rank", ["one", "-1", "1", "4294967296"])
def test_ranks(server: VllmServer, rank: str) -> None:
    """Rank 0 is the only one here; what is no rank, and what is not connected, is refused."""
    assert grpc.StatusCode.INVALID_ARGUMENT == server.refusal(
        methods.GENERATE, request(), metadata=[("x-data-parallel-rank", rank)]
    )
    found = server.call(methods.GENERATE, request(), metadata=[("x-data-parallel-rank", " 0 ")])
    assert 8 == finish(found).num_output_tokens


def test_message_sizes(server: VllmServer) -> None:
    """5 MiB are read, and refused for their meaning only; more than 32 MiB are refused for their size."""
    ids = [300] * (5 << 19)
    assert grpc.StatusCode.INVALID_ARGUMENT == server.refusal(
        methods.GENERATE, request(text=None, token_ids=wire.TokenIds(ids=ids))
    )
    assert server.refusal(methods.GENERATE, request(text="a" * (33 << 20))) in (
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


def test_more_requests_than_fit_at_once(server: VllmServer) -> None:
    """The fifth to sixteenth wait for their turn; all get the same answer."""
    expected = outputs(server.generate()).token_ids
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: outputs(server.generate()).token_ids, range(16)))
    assert [expected] * 16 == answers


def long(request_id: str) -> wire.GenerateRequest:
    """A request that would take a while."""
    return request(request_id=request_id, stopping=wire.StoppingCriteria(ignore_eos=True))


def test_abort(server: VllmServer) -> None:
    """Every request with the id ends as ABORTED with OK; other ids, none, and ids that are gone are ignored."""
    streams = [server.stream(long("victim")) for _ in range(2)]
    other = server.stream(long("other"))
    for stream in (*streams, other):
        next(stream)
    server.call(methods.ABORT, wire.AbortRequest())
    server.call(methods.ABORT, wire.AbortRequest(request_ids=["victim", "nobody", "victim"]))
    for stream in streams:
        answers = list(stream)
        last = answers[-1].outputs.finish_info
        assert (Reason.ABORTED, None, grpc.StatusCode.OK) == (last.finish_reason, last.stop_string, stream.code())
        assert last.num_output_tokens == sum(answer.outputs.num_tokens for answer in answers)
    assert Reason.LENGTH == list(other)[-1].outputs.finish_info.finish_reason
    server.call(methods.ABORT, wire.AbortRequest(request_ids=["victim"]))


def test_abort_of_a_unary_call_and_of_one_that_waits(server: VllmServer) -> None:
    """The unary victim gets what there is; one that had no turn yet gets its prompt's message and no tokens."""
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(server.call, methods.GENERATE, long(f"unary-{number}")) for number in range(4)]
        time.sleep(0.2)
        waiting = server.stream(long("waiting"))
        assert waiting.initial_metadata() is not None
        server.call(methods.ABORT, wire.AbortRequest(request_ids=["waiting"]))
        prompt, last = waiting
        assert prompt.prompt_info is not None
        assert (Reason.ABORTED, 0) == (
            last.outputs.finish_info.finish_reason,
            last.outputs.finish_info.num_output_tokens,
        )
        server.call(methods.ABORT, wire.AbortRequest(request_ids=[f"unary-{number}" for number in range(4)]))
        for future in running:
            answer = future.result(CALL)
            assert finish(answer).finish_reason in (Reason.ABORTED, Reason.LENGTH)
            assert answer.prompt_info is not None


CALL = 60


def test_a_queued_request_can_be_cancelled(server: VllmServer) -> None:
    """A client that gives up while it waits for a turn leaves the queue, and later ones get their turn."""
    running = [server.stream(long(f"r{number}")) for number in range(4)]
    queued = [server.stream(long(f"q{number}")) for number in range(20)]
    for stream in (*queued, *running):
        assert stream.initial_metadata() is not None
    for stream in (*queued, *running):
        stream.cancel()
    started = time.monotonic()
    assert 8 == finish(server.generate()).num_output_tokens
    assert time.monotonic() - started < 5


def test_the_model_may_be_named(server: VllmServer) -> None:
    """By its served name."""
    assert 8 == finish(server.generate(model=MODEL_NAME)).num_output_tokens
