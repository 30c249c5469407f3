"""What both servers answer to requests that they accept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support import tiny_model, vllm_model
from support.deviations import deviation
from support.parity import request
from support.vllm_servers import CONTEXT_LENGTH

if TYPE_CHECKING:
    from support.parity import Pair

HELLO = "Hello"
ALL_FIELDS = {"prompt_token_ids": True, "prompt_logprobs": True, "output_token_ids": True, "output_logprobs": True}
HALF = 134
"""A token that is the first byte of a character of two bytes."""
OTHER_HALF = 127


def few(count: int, **more: Any) -> dict[str, Any]:
    """Stop after so many tokens."""
    return {"max_new_tokens": count} | more


@pytest.mark.parametrize(
    "prompt",
    [
        HELLO,
        "The harbour wakes before the town does.",
        "Ünder 😀 x",
        [5, 9, 100, 30],
        [7] * 200,
        [0, 1, 2, 3, 511, 575],
    ],
    ids=["word", "sentence", "unicode", "ids", "long", "special"],
)
def test_greedy(both: Pair, prompt: str | list[int]) -> None:
    """Tokens, text, scores of prompt and output, usage and end are the same, streamed or not."""
    answer = both.agree(request(prompt, stopping=few(24), response=ALL_FIELDS))
    size = answer.said["num_tokens"]
    assert size == len(answer.said["token_ids"]) == len(answer.said["logprobs"])
    assert answer.prompt is not None
    assert answer.prompt["num_prompt_tokens"] == len(answer.prompt["token_ids"]) == len(answer.prompt["logprobs"])


def test_text_is_tokenised_with_special_tokens(both: Pair) -> None:
    """The tokenizer's start token comes before a text, also before an empty one, and not before ids."""
    options: dict[str, Any] = {"stopping": few(3), "response": ALL_FIELDS}
    text = both.agree(request(HELLO, **options))
    empty = both.agree(request(text="", **options))
    ids = both.agree(request([5], **options))
    assert text.prompt is not None
    assert empty.prompt is not None
    assert ids.prompt is not None
    assert [tiny_model.BOS, [tiny_model.BOS], [5]] == [
        text.prompt["token_ids"][0],
        empty.prompt["token_ids"],
        ids.prompt["token_ids"],
    ]


def test_only_what_is_asked_for_comes(both: Pair) -> None:
    """Without options an answer has text and counts and nothing else; without text, not even that."""
    bare = both.agree(request(HELLO, stopping=few(5)))
    silent = both.agree(request(HELLO, stopping=few(5), response={"output_text": False}))
    assert ([], [], [], []) == tuple(bare.said[name] for name in ("token_ids", "logprobs", "ranks", "candidate_tokens"))
    assert (5, 5, "") == (bare.said["num_tokens"], silent.said["num_tokens"], silent.said["text"])
    assert "" != bare.said["text"]
    assert bare.prompt is not None
    assert [] == bare.prompt["token_ids"]


def test_absent_temperature_is_greedy(both: Pair) -> None:
    """The model's own temperature is not used; 0 and absent are the same."""
    absent = both.agree(request(HELLO, stopping=few(20)))
    zero = both.agree(request(HELLO, temperature=0.0, stopping=few(20)))
    assert absent.said["text"] == zero.said["text"]


def test_the_models_defaults(both: Pair, plain: Pair) -> None:
    """Penalty and length of the generation config hold where the request has none, unless the server ignores them."""
    longest = request([7] * (CONTEXT_LENGTH - 80), stopping={"ignore_eos": True})
    ends = [pair.agree(longest) for pair in (both, plain)]
    assert [vllm_model.DEFAULTS["max_new_tokens"], 80] == [answer.said["num_tokens"] for answer in ends]
    assert [("LENGTH", "", None)] * 2 == [answer.end for answer in ends]
    penalised = request([7] * 5, stopping=few(30, ignore_eos=True), response=ALL_FIELDS)
    assert both.agree(penalised).said["token_ids"] != plain.agree(penalised).said["token_ids"]


def test_length_is_clamped_to_the_context(both: Pair) -> None:
    """More tokens than the context holds are asked for in vain."""
    answer = both.agree(request([7] * (CONTEXT_LENGTH - 6), stopping=few(1000, ignore_eos=True)))
    assert (6, ("LENGTH", "", None)) == (answer.said["num_tokens"], answer.end)
    last = both.agree(request([7] * (CONTEXT_LENGTH - 1), stopping=few(9, ignore_eos=True)))
    assert 1 == last.said["num_tokens"]


@pytest.mark.parametrize("seed", [0, 1, -2, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 5}, {"top_k": 0}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 2**32 - 1, "num_sequences": 1}],
    ids=["plain", "top_k", "no-top_k", "top_p", "min_p", "huge-top_k"],
)
def test_seeded_sampling(both: Pair, seed: int, sampling: dict[str, Any]) -> None:
    """With a seed both draw the same tokens, whatever narrows the choice."""
    both.agree(request(HELLO, temperature=1.3, sampling={"seed": seed} | sampling, stopping=few(8)))


@pytest.mark.parametrize(
    "decoding",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.7},
        {"logit_bias": {5: 1000.0}},
        {"logit_bias": {353: -1000.0, 575: 1.0}},
        {"allowed_token_ids": [353, 400, 401]},
        {"bad_words_token_ids": [{"ids": [353]}, {"ids": [30, 31]}]},
    ],
    ids=["presence", "frequency", "repetition", "bias", "counter-bias", "allowed", "bad-words"],
)
def test_decoding(both: Pair, decoding: dict[str, Any]) -> None:
    """What shifts the logits shifts them the same; a bias beyond 100 is cut."""
    both.agree(request(HELLO, decoding=decoding, stopping=few(12), response=ALL_FIELDS))


SELECTORS: list[tuple[dict[str, Any] | None, int]] = [
    (None, 0),
    ({"top_n": 0}, 0),
    ({"top_n": 1}, 1),
    ({"top_n": 5}, 5),
    ({"top_n": 20}, 20),
    ({"all": False}, 0),
    ({"token_ids": {"ids": []}}, 0),
    ({"token_ids": {"ids": [9]}}, 1),
    ({"token_ids": {"ids": [9, 353, 575]}}, 3),
    ({"token_ids": {"ids": [9, 9]}}, 2),
    ({"token_ids": {"ids": list(range(128))}}, 128),
]


@pytest.mark.parametrize(("select", "count"), SELECTORS, ids=[str(select)[:40] for select, _ in SELECTORS])
def test_candidates(both: Pair, select: dict[str, Any] | None, count: int) -> None:
    """Each token has as many candidates as were asked for, the token itself not left out, ranks in order."""
    options = {"output_token_ids": True, "output_logprobs": True, "output_candidates": select}
    said = both.agree(request(HELLO, stopping=few(4), response=options)).said
    rows = [row["tokens"] for row in said["candidate_tokens"]]
    assert [count] * 4 == [len(row) for row in rows]
    assert [list(range(1, count + 1))] * 4 == [[one["rank"] for one in row] for row in rows]
    if select and select.get("top_n"):
        assert said["token_ids"] == [row[rank - 1]["id"] for row, rank in zip(rows, said["ranks"], strict=True)]


@pytest.mark.parametrize("select", [None, {"top_n": 0}, {"top_n": 1}, {"top_n": 5}, {"all": False}], ids=str)
def test_prompt_candidates(both: Pair, select: dict[str, Any] | None) -> None:
    """The first position is a placeholder without candidates; the others have as many as were asked for."""
    options = {"prompt_token_ids": True, "prompt_logprobs": True, "prompt_candidates": select}
    prompt = both.agree(request([5, 9, 100, 30], stopping=few(2), response=options)).prompt
    assert prompt is not None
    count = (select or {}).get("top_n", 0)
    assert (0.0, 0, []) == (prompt["logprobs"][0], prompt["ranks"][0], prompt["candidate_tokens"][0]["tokens"])
    assert [count] * 3 == [len(row["tokens"]) for row in prompt["candidate_tokens"][1:]]
    assert all(value < 0 for value in prompt["logprobs"][1:])


def test_candidates_without_logprobs(both: Pair) -> None:
    """Selectors mean nothing while logprobs are off, not even ones that would be refused."""
    options = {"output_candidates": {"top_n": 10_000}, "prompt_candidates": {"token_ids": {"ids": [10_000]}}}
    answer = both.agree(request(HELLO, stopping=few(2), response=options))
    assert [] == answer.said["candidate_tokens"]


@pytest.mark.parametrize("select", [{"all": True}, {"top_n": 2**32 - 1}, {"top_n": vllm_model.VOCAB}], ids=str)
def test_the_whole_vocabulary(plain: Pair, select: dict[str, Any]) -> None:
    """A server without a limit lists every token, for prompt and output; the largest number means all as well."""
    options = {"output_logprobs": True, "output_candidates": select, "prompt_logprobs": True}
    answer = plain.agree(request([5, 9], stopping=few(2), response=options | {"prompt_candidates": select}))
    assert [vllm_model.VOCAB] * 2 == [len(row["tokens"]) for row in answer.said["candidate_tokens"]]
    assert answer.prompt is not None
    assert [0, vllm_model.VOCAB] == [len(row["tokens"]) for row in answer.prompt["candidate_tokens"]]


@pytest.mark.parametrize("skip", [None, True, False])
def test_special_tokens(both: Pair, skip: bool | None) -> None:
    """They are shown on demand only."""
    options = {"output_token_ids": True} | ({} if skip is None else {"skip_special_tokens": skip})
    wanted = {"allowed_token_ids": [3, 4, 5]}
    said = both.agree(request(HELLO, decoding=wanted, stopping=few(4), response=options)).said
    assert (skip is False) == bool(said["text"])


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("token", [HALF, OTHER_HALF])
def test_incomplete_characters(both: Pair, token: int, count: int) -> None:
    """Bytes that never become a character are shown as such at the end, not lost."""
    said = both.agree(request(HELLO, decoding={"allowed_token_ids": [token]}, stopping=few(count))).said
    assert "\ufffd" * count == said["text"]


def test_characters_across_tokens(both: Pair) -> None:
    """A character of several tokens comes whole, also where the first of them is the prompt's last."""
    said = both.agree(request(HELLO, decoding={"regex": "ü😀ü"}, stopping=few(12))).said
    assert "ü😀ü" == said["text"]
    both.agree(request([HALF], decoding={"allowed_token_ids": [OTHER_HALF]}, stopping=few(4)))
    both.agree(request([5, HALF, HALF], stopping=few(6)))


@pytest.mark.parametrize("size", [3, 300], ids=["short", "long"])
def test_truncation(both: Pair, size: int) -> None:
    """The prompt's last tokens stay, whether it was too long or not; the answer reports what stayed."""
    prompt = [token % 500 for token in range(size)]
    answer = both.agree(request(prompt, truncate_prompt_tokens=5, stopping=few(2), response=ALL_FIELDS))
    assert answer.prompt is not None
    assert prompt[-5:] == answer.prompt["token_ids"]


def test_cached_tokens(both: Pair) -> None:
    """What the prefix cache held is reported, and not read on demand or under another salt."""
    prompt = [token % 500 for token in range(7, 207)]
    options: dict[str, Any] = {"stopping": few(2)}
    for server in both:
        counts = [
            int(server.unary(request(prompt, kv=kv, **options)).finish["num_cached_tokens"])
            for kv in ({}, {}, {"bypass_prefix_cache": True}, {"cache_salt": "pepper"}, {"cache_salt": "pepper"})
        ]
        assert [0, 128, 0, 0, 128] == counts, server.name


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": -5},
        {"session_id": "s"},
        {"session_id": ""},
        {"watermarking": False},
        {"kv_hints": {}},
        {"kv_hints": {"protocol_version": "1", "actions": [{"action_id": "a", "payload": {"n": 1}}]}},
        {"engine_reasoning_gate": {}},
        {"engine_reasoning_gate": {"reasoning_ended": True, "chat_template_kwargs": {"a": 1}}},
        {"kv": {"kv_transfer_params": {"port": 5600, "half": 0.5, "none": None, "list": [1, "a", True]}}},
        {"kv": {"ec_transfer_params": {"a": 1}}},
        {"model": "tiny"},
        {"model": "tiny-alias"},
        {"request_id": "caller-made"},
        {"stopping": {"max_new_tokens": 6, "thinking_token_budget": -1}},
    ],
    ids=lambda fields: str(fields)[:50],
)
def test_fields_that_change_no_token(both: Pair, fields: dict[str, Any]) -> None:
    """They are accepted, and the answer is that of a request without them."""
    bare = both.agree(request(HELLO, stopping=few(6)))
    assert bare.comparable == both.agree(request(HELLO, **({"stopping": few(6)} | fields))).comparable


@pytest.mark.parametrize("rank", ["0", " 0 ", "+0", "00"])
def test_rank(both: Pair, rank: str) -> None:
    """The only rank may be named, in any way that numbers are written."""
    both.agree(request(HELLO, stopping=few(2)), metadata={"x-data-parallel-rank": rank})


def test_unknown_fields_are_ignored(both: Pair) -> None:
    """What a newer client sends is skipped; a known number with an old type is skipped by us, and fails over there."""
    data = request([5], stopping=few(2)).SerializeToString()
    newer, older = data + b"\xf2\x3f\x01a", data + b"\x82\x01\x01a"
    for server in both:
        call = server.channel.unary_unary("/vllm.Inference/Generate")
        assert call(newer, timeout=10)
    deviation("field-type")
    assert both.ours.channel.unary_unary("/vllm.Inference/Generate")(older, timeout=10)
