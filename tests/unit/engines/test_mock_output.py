"""The mock engine's messages: order, sums, shapes, finishes."""

from __future__ import annotations

from typing import Any

import pytest

from support.mock_engine import (
    answers_to,
    finish_of,
    ids_of,
    mock_settings,
    outputs_of,
    request_of,
    text_of,
    token_settings,
)
from trio_sidecar.engines.mock_tokenizer import MockTokenizer
from trio_sidecar.wire import (
    CandidateTokenInfo,
    CandidateTokens,
    FinishInfoFinishReason,
    GenerateRequest,
    GenerateResponse,
    PromptInfo,
    RandomSampling,
    ResponseOptions,
    TokenIds,
)

LENGTH, STOP = FinishInfoFinishReason.LENGTH, FinishInfoFinishReason.STOP
TOKENIZER = MockTokenizer.load()
TEXT, TOKENS = mock_settings(), token_settings()
IDS = ResponseOptions(output_token_ids=True)


def ask(
    text: str = "Why is the sky blue?", *, stopping: dict[str, Any] | None = None, **fields: Any
) -> GenerateRequest:
    """A question with a token prompt, ids wanted."""
    return request_of(TOKENIZER.encode(text), stopping=stopping, **{"response": IDS, **fields})


@pytest.mark.rule("R16.10", "R16.11")
def test_token_mode_stream() -> None:
    """Prompt info alone, then one token per message, the last one LENGTH with the total; text repeats the ids."""
    answers = answers_to(request_of(request_id="r", stopping={"max_new_tokens": 3}, response=IDS), TOKENS)
    assert GenerateResponse(prompt_info=PromptInfo(num_prompt_tokens=3)) == answers[0]
    assert [1, 1, 1] == [output.num_tokens for output in outputs_of(answers)]
    assert [None, None] == [output.finish_info for output in outputs_of(answers)[:-1]]
    assert (LENGTH, 3, 0) == (
        finish_of(answers).finish_reason,
        finish_of(answers).num_output_tokens,
        finish_of(answers).num_cached_tokens,
    )
    assert "".join(f"<token:{token}>" for token in ids_of(answers)) == text_of(answers)


@pytest.mark.rule("R16.11")
def test_token_ids_depend_on_seed_request_id_and_position_only() -> None:
    """The same three give the same ids, each of them changes them, and all ids are in [1000, 31999]."""

    def ids(prompt: list[int], request_id: str, seed: int, count: int = 2000) -> list[int]:
        request = request_of(prompt, request_id=request_id, stopping={"max_new_tokens": count}, response=IDS)
        return ids_of(answers_to(request, token_settings(seed=seed)))

    first = ids([1], "a", 1)
    assert first == ids([2, 3], "a", 1)
    assert first[:5] == ids([1], "a", 1, 5)
    assert first != ids([1], "b", 1)
    assert first != ids([1], "a", 2)
    assert 1000 <= min(first) < max(first) <= 31999
    assert 1900 < len(set(first))


@pytest.mark.rule("R16.12", "R16.16")
def test_token_mode_logprobs() -> None:
    """The formula of the selected token, candidates each 0.1 lower, and the placeholder of prompt position 0."""
    options = ResponseOptions(
        prompt_token_ids=True,
        prompt_logprobs=True,
        prompt_candidates=CandidateTokens(top_n=1),
        output_token_ids=True,
        output_logprobs=True,
        output_candidates=CandidateTokens(top_n=2),
    )
    answers = answers_to(request_of([11, 22, 33], stopping={"max_new_tokens": 1}, response=options), TOKENS)
    info = answers[0].prompt_info
    assert info is not None
    assert ([11, 22, 33], [0, 1, 1]) == (info.token_ids, info.ranks)
    assert [0.0, -0.3, -0.4] == pytest.approx(info.logprobs)
    assert CandidateTokenInfo() == info.candidate_tokens[0]
    assert [(23, 2), (34, 2)] == [(row.tokens[0].id, row.tokens[0].rank) for row in info.candidate_tokens[1:]]
    output = outputs_of(answers)[0]
    token = output.token_ids[0]
    assert [-0.1 * (token % 10 + 1)] == pytest.approx(output.logprobs)
    assert [1] == output.ranks
    rows = output.candidate_tokens[0].tokens
    assert [(token + 1, 2), (token + 2, 3)] == [(row.id, row.rank) for row in rows]
    assert [output.logprobs[0] - 0.1, output.logprobs[0] - 0.2] == pytest.approx([row.logprob for row in rows])


@pytest.mark.rule("R16.12")
def test_token_mode_explicit_candidates() -> None:
    """Explicit ids are listed in their order."""
    options = ResponseOptions(output_logprobs=True, output_candidates=CandidateTokens(token_ids=TokenIds(ids=[5, 9])))
    output = outputs_of(answers_to(request_of(stopping={"max_new_tokens": 1}, response=options), TOKENS))[0]
    assert [(5, 2), (9, 3)] == [(row.id, row.rank) for row in output.candidate_tokens[0].tokens]


@pytest.mark.rule("R16.9")
def test_token_mode_honours_planned_stop_ids() -> None:
    """A stop id that comes up ends the stream, unless it is too early."""
    planned = ids_of(answers_to(request_of(request_id="r", response=IDS), TOKENS))
    stopping = {"stop_token_ids": [planned[2]], "min_new_tokens": 3}
    answers = answers_to(request_of(request_id="r", stopping=stopping, response=IDS), TOKENS)
    assert planned[:3] == ids_of(answers)
    assert (STOP, planned[2]) == (finish_of(answers).finish_reason, finish_of(answers).stop_token_id)
    late = answers_to(request_of(request_id="r", stopping={**stopping, "min_new_tokens": 4}, response=IDS), TOKENS)
    assert planned == ids_of(late)


def test_text_reply_is_intelligible_and_agrees_with_its_ids() -> None:
    """It quotes the question, tells the prompt's length, ends with the end token, and decodes to its own text."""
    answers = answers_to(ask(), TEXT)
    text = text_of(answers)
    assert "Why is the sky blue?" in text
    assert f"{len(TOKENIZER.encode('Why is the sky blue?'))} tokens" in text
    assert text == TOKENIZER.decode(ids_of(answers))
    assert (STOP, TOKENIZER.eos_id) == (finish_of(answers).finish_reason, finish_of(answers).eos_token_id)
    assert TOKENIZER.eos_id == ids_of(answers)[-1]
    assert len(ids_of(answers)) == finish_of(answers).num_output_tokens


def test_chat_prompt_quotes_the_last_user_message() -> None:
    """Template text and earlier turns are not quoted."""
    prompt = TOKENIZER.encode(
        '<|user|>\nfirst<|end|>\n<|assistant|>\nok<|end|>\n<|user|>\nsecond "one"<|end|>\n<|assistant|>\n'
    )
    text = text_of(answers_to(request_of(prompt), TEXT))
    assert "\"second 'one'\"" in text
    assert "first" not in text


def test_a_prompt_without_words_gets_a_reply_too() -> None:
    """Half a character, special tokens only, spaces only: no crash, and no empty quote."""
    for prompt in ([TOKENIZER.encode("😀")[0]], [0], TOKENIZER.encode("  \n")):
        text = text_of(answers_to(request_of(prompt), TEXT))
        assert "mock engine" in text
        assert '""' not in text


def test_replies_are_deterministic_and_depend_on_the_seeds() -> None:
    """Same prompt, same seed, same reply; the engine's seed and, when sampling, the request's change it."""
    texts = [text_of(answers_to(ask(), mock_settings(seed=seed))) for seed in range(8)]
    assert texts == [text_of(answers_to(ask(), mock_settings(seed=seed))) for seed in range(8)]
    assert 1 < len(set(texts))
    sampled = {text_of(answers_to(ask(temperature=1.0, sampling=RandomSampling(seed=seed)), TEXT)) for seed in range(8)}
    assert 1 < len(sampled)
    greedy = {text_of(answers_to(ask(sampling=RandomSampling(seed=seed)), TEXT)) for seed in range(4)}
    assert 1 == len(greedy)


def test_length_cuts() -> None:
    """max_new_tokens ends the stream as LENGTH, with nothing in the oneof."""
    answers = answers_to(ask(stopping={"max_new_tokens": 4}), TEXT)
    finish = finish_of(answers)
    assert (LENGTH, 4) == (finish.finish_reason, finish.num_output_tokens)
    assert (None, None, None) == (finish.eos_token_id, finish.stop_token_id, finish.stop_string)


@pytest.mark.parametrize("criteria", [{"ignore_eos": True, "max_new_tokens": 300}, {"min_new_tokens": 300}])
def test_the_reply_goes_on_in_whole_sentences(criteria: dict[str, Any]) -> None:
    """With ignore_eos or a minimum the reply continues, and its text still agrees with its ids."""
    answers = answers_to(ask(stopping=criteria), TEXT)
    ids = ids_of(answers)
    assert 300 <= len(ids)
    assert text_of(answers) == TOKENIZER.decode(ids)
    assert TOKENIZER.eos_id not in ids[:-1]


@pytest.mark.rule("FR-058")
def test_the_end_token_as_explicit_stop_id() -> None:
    """It counts as the end token, except with ignore_eos, where only the explicit id can end the stream."""
    eos = TOKENIZER.eos_id
    usual = finish_of(answers_to(ask(stopping={"stop_token_ids": [eos]}), TEXT))
    assert (eos, None) == (usual.eos_token_id, usual.stop_token_id)
    ignored = finish_of(answers_to(ask(stopping={"stop_token_ids": [eos], "ignore_eos": True}), TEXT))
    assert (None, eos) == (ignored.eos_token_id, ignored.stop_token_id)


@pytest.mark.rule("FR-057")
@pytest.mark.parametrize("include", [False, True])
def test_stop_token_is_counted_and_its_text_hidden(include: bool) -> None:
    """The stop token stays in the ids; its text shows only with include_stop_strings."""
    ids = ids_of(answers_to(ask(), TEXT))
    at = next(at for at, token in enumerate(ids) if at > 5 and token not in ids[:at])
    answers = answers_to(ask(stopping={"stop_token_ids": [ids[at]], "include_stop_strings": include}), TEXT)
    assert ids[: at + 1] == ids_of(answers)
    assert ids[at] == finish_of(answers).stop_token_id
    assert TOKENIZER.decode(ids[: at + include]) == text_of(answers)


@pytest.mark.rule("FR-058")
@pytest.mark.parametrize("include", [False, True])
def test_stop_string(include: bool) -> None:
    """A stop string over two tokens ends the text before it, or after it with include; the tokens stay whole."""
    stop = "mock eng"
    answers = answers_to(ask(stopping={"stop_strings": ["never", stop], "include_stop_strings": include}), TEXT)
    whole = text_of(answers_to(ask(), TEXT))
    assert stop == finish_of(answers).stop_string
    assert whole[: whole.index(stop) + len(stop) * include] == text_of(answers)
    assert TOKENIZER.decode(ids_of(answers)).endswith("mock engine")
    assert len(ids_of(answers)) == finish_of(answers).num_output_tokens


def test_stop_string_waits_for_the_minimum() -> None:
    """Up to min_new_tokens a stop string does not count."""
    stop = "mock"
    first = len(ids_of(answers_to(ask(stopping={"stop_strings": [stop]}), TEXT)))
    answers = answers_to(ask(stopping={"stop_strings": [stop], "min_new_tokens": first}), TEXT)
    assert stop in text_of(answers)


def test_held_text_is_flushed_at_the_length_limit() -> None:
    """What was withheld for a stop string that did not come goes out with the last token."""
    answers = answers_to(ask(stopping={"stop_strings": ["z" * 30], "max_new_tokens": 6}), TEXT)
    assert TOKENIZER.decode(ids_of(answers)) == text_of(answers)
    assert LENGTH == finish_of(answers).finish_reason


@pytest.mark.rule("FR-071")
def test_a_cut_inside_a_character_is_flushed() -> None:
    """The last message ends with a replacement character, as the whole text decodes."""
    request = ask("say 😀😀")
    ids = ids_of(answers_to(request, TEXT))
    at = next(at for at in range(len(ids)) if TOKENIZER.decode(ids[: at + 1]).endswith("\ufffd"))
    for stops in ([], ["zzz"]):
        answers = answers_to(ask("say 😀😀", stopping={"max_new_tokens": at + 1, "stop_strings": stops}), TEXT)
        assert TOKENIZER.decode(ids[: at + 1]) == text_of(answers)


def test_options_shape_the_messages() -> None:
    """Text and ids come only if wanted, and stop strings work without text."""
    quiet = answers_to(ask(response=ResponseOptions(output_text=False), stopping={"stop_strings": ["mock"]}), TEXT)
    assert ("", [], "mock") == (text_of(quiet), ids_of(quiet), finish_of(quiet).stop_string)
    assert finish_of(quiet).num_output_tokens == sum(output.num_tokens for output in outputs_of(quiet))


def test_special_tokens_show_if_asked_for() -> None:
    """skip_special_tokens false shows the end token where it is not hidden as a stop."""
    options = ResponseOptions(output_token_ids=True, skip_special_tokens=False)
    shown = text_of(answers_to(ask(response=options, stopping={"include_stop_strings": True}), TEXT))
    assert shown.endswith("<|end|>")
    assert not text_of(answers_to(ask(response=options), TEXT)).endswith("<|end|>")


@pytest.mark.rule("FR-056")
@pytest.mark.parametrize(
    ("candidates", "count"),
    [
        (None, 0),
        (CandidateTokens(top_n=0), 0),
        (CandidateTokens(top_n=1), 1),
        (CandidateTokens(top_n=5), 5),
        (CandidateTokens(all=True), 20),
        (CandidateTokens(all=False), 0),
        (CandidateTokens(token_ids=TokenIds(ids=[])), 0),
        (CandidateTokens(token_ids=TokenIds(ids=[7])), 1),
        (CandidateTokens(token_ids=TokenIds(ids=[7, 8, 7])), 3),
    ],
)
def test_text_mode_candidates(candidates: CandidateTokens | None, count: int) -> None:
    """One row per token, in vLLM's shape: the sampled token is listed again among the best."""
    options = ResponseOptions(output_token_ids=True, output_logprobs=True, output_candidates=candidates)
    for output in outputs_of(answers_to(ask(response=options), TEXT)):
        assert [1, 1, 1] == [len(output.logprobs), len(output.ranks), len(output.candidate_tokens)]
        rows = output.candidate_tokens[0].tokens
        assert list(range(1, count + 1)) == [row.rank for row in rows]
        if candidates is not None and candidates.token_ids is None and count:
            assert (output.token_ids[0], output.logprobs[0]) == (rows[0].id, rows[0].logprob)
        assert all(row.id < TOKENIZER.vocab_size for row in rows)


@pytest.mark.rule("FR-072")
def test_text_mode_prompt_logprobs() -> None:
    """Four arrays of the prompt's length; position 0 is a placeholder, and candidates exclude the scored token."""
    options = ResponseOptions(prompt_token_ids=True, prompt_logprobs=True, prompt_candidates=CandidateTokens(top_n=2))
    request = ask(response=options)
    info = answers_to(request, TEXT)[0].prompt_info
    assert info is not None
    count = info.num_prompt_tokens
    assert [count] * 4 == [len(info.token_ids), len(info.logprobs), len(info.ranks), len(info.candidate_tokens)]
    assert (0.0, 0, []) == (info.logprobs[0], info.ranks[0], info.candidate_tokens[0].tokens)
    for token, row in zip(info.token_ids[1:], info.candidate_tokens[1:], strict=True):
        assert 2 == len(row.tokens)
        assert token not in [each.id for each in row.tokens]
