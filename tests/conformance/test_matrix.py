"""What a client of the front end sees, on all four pairs of worker and engine.

Where the two workers differ on purpose, the test says so and ``docs/deviations.md`` explains it.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from support.backends import EngineKind
from support.stack import Stack, WorkerKind

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(90)]

LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}


def reply_text(pair: Stack, count: int, *, seed: int) -> str:
    """What the engine says with a seed."""
    return pair.backend.reply_to(pair.backend.prompt, seed=seed).text(count)


async def test_model_is_listed(pair: Stack) -> None:
    """The front end lists the engine's served name with the engine's context length."""
    async with pair.client() as client:
        models = (await client.http.get(f"{client.url}/v1/models")).json()["data"]
    backend = pair.backend
    assert [(backend.model, backend.context_length)] == [(one["id"], one["context_window"]) for one in models]


@pytest.mark.rule("R8.3", "R8.12", "R8.13")
async def test_chat(pair: Stack) -> None:
    """A chat answer holds the engine's text, the reason for its end, and the tokens counted."""
    async with pair.client() as client:
        answer = await client.chat(max_tokens=12)
    prompt, completion, total = answer.usage
    assert (pair.backend.chat_reply.text(12), "length") == (answer.text, answer.finish_reason)
    assert "assistant" == answer.choice["message"]["role"]
    assert completion == 12
    assert 0 < prompt
    assert total == prompt + completion


@pytest.mark.rule("R8.3", "R8.7", "R8.14")
async def test_chat_stream(pair: Stack) -> None:
    """A streamed chat answer is the same text in deltas, with one reason and, unless asked for, without usage."""
    async with pair.client() as client:
        whole = await client.chat(max_tokens=12)
        streamed = await client.stream_chat(max_tokens=12)
    assert whole.text == streamed.text
    assert ["length"] == streamed.finish_reasons
    assert [] == streamed.usages
    assert 1 < len(streamed.deltas) <= 12


@pytest.mark.rule("R8.13", "R8.14")
async def test_usage_is_in_the_last_chunk(pair: Stack) -> None:
    """With ``include_usage`` the last chunk has the usage and no choice."""
    async with pair.client() as client:
        whole = await client.complete(max_tokens=5)
        streamed = await client.stream_complete(max_tokens=5, stream_options={"include_usage": True})
        chat = await client.stream_chat(max_tokens=5, stream_options={"include_usage": True})
    assert [whole.usage] == streamed.usages
    assert ([], []) == (streamed.chunks[-1]["choices"], chat.chunks[-1]["choices"])
    assert 5 == chat.usages[0][1]


async def test_completion_of_token_ids(pair: Stack) -> None:
    """A prompt of token ids is counted as given, and the answer does not depend on how it is delivered."""
    async with pair.client() as client:
        whole = await client.complete(max_tokens=7)
        streamed = await client.stream_complete(max_tokens=7)
    size = len(pair.backend.prompt)
    assert (size, 7, size + 7) == whole.usage
    assert whole.text == streamed.text == pair.backend.reply.text(7)


async def test_seed(pair: Stack) -> None:
    """The seed reaches the engine, and the same seed gives the same text."""
    async with pair.client() as client:
        first, again, other = [
            (await client.complete(max_tokens=40, seed=seed, temperature=0.5)).text for seed in (10, 10, 11)
        ]
    assert reply_text(pair, 40, seed=10) == first
    assert first == again
    assert reply_text(pair, 40, seed=11) == other
    assert first != other


@pytest.mark.rule("FR-059")
async def test_stop_string(pair: Stack) -> None:
    """A stop string ends the answer before itself, also when it spans tokens and when the answer is streamed."""
    full = pair.backend.reply.text(20)
    stop = full[31:36]
    async with pair.client() as client:
        whole = await client.complete(max_tokens=20, stop=[stop, "never said"])
        streamed = await client.stream_complete(max_tokens=20, stop=stop)
    expected = full[: full.index(stop)]
    assert (expected, "stop") == (whole.text, whole.finish_reason)
    assert (expected, ["stop"]) == (streamed.text, streamed.finish_reasons)
    assert whole.usage[1] < 20


@pytest.mark.rule("R8.17")
async def test_end_of_sequence(pair: Stack) -> None:
    """An engine that has said all ends with ``stop``; its end-of-sequence token is counted but not shown."""
    reply = pair.backend.reply
    async with pair.client() as client:
        answer = await client.complete(max_tokens=reply.size + 20)
    assert (reply.text(reply.size), "stop") == (answer.text, answer.finish_reason)
    assert reply.size + 1 == answer.usage[1]


async def test_ignore_eos(pair: Stack) -> None:
    """With ``ignore_eos`` the answer runs to its token limit."""
    count = pair.backend.reply.size + 10
    async with pair.client() as client:
        answer = await client.complete(max_tokens=count, ignore_eos=True)
    assert (pair.backend.reply.text(count), "length") == (answer.text, answer.finish_reason)


@pytest.mark.rule("R8.19", "R8.20")
async def test_chat_logprobs(pair: Stack) -> None:
    """Our worker gives a row per token with its candidates; the Rust sidecar's rows get lost in the front end."""
    async with pair.client() as client:
        whole = await client.chat(max_tokens=4, **LOGPROBS)
        streamed = await client.stream_chat(max_tokens=4, **LOGPROBS)
    assert pair.backend.chat_reply.text(4) == whole.text == streamed.text
    rows = whole.choice["logprobs"]["content"]
    assert rows == [row for chunk in streamed.chunks for row in chunk["choices"][0]["logprobs"]["content"]]
    if pair.worker_kind is WorkerKind.RUST:
        assert [] == rows
        return
    assert pair.backend.chat_reply.tokens(4) == [row["token_id"] for row in rows]
    assert pair.backend.chat_reply.text(4) == "".join(row["token"] for row in rows)
    assert all(row["logprob"] < 0 for row in rows)
    assert all(row["token"] in [one["token"] for one in row["top_logprobs"]] for row in rows)
    assert all(len(row["top_logprobs"]) >= 2 for row in rows)


async def test_completion_logprobs(pair: Stack) -> None:
    """The older endpoint reports tokens, their logprobs and their candidates side by side."""
    async with pair.client() as client:
        answer = await client.complete(max_tokens=4, logprobs=2)
    table = answer.choice["logprobs"]
    if pair.worker_kind is WorkerKind.RUST:
        assert [] == table["tokens"]
        return
    assert pair.backend.reply.text(4) == "".join(table["tokens"])
    assert [4, 4] == [len(table["token_logprobs"]), len(table["top_logprobs"])]
    assert all(token in row for token, row in zip(table["tokens"], table["top_logprobs"], strict=True))


async def test_logprobs_with_a_stop_string(pair: Stack) -> None:
    """Logprobs do not disturb stop strings."""
    full = pair.backend.reply.text(20)
    stop = full[31:36]
    async with pair.client() as client:
        answer = await client.complete(max_tokens=20, logprobs=1, stop=[stop])
    assert (full[: full.index(stop)], "stop") == (answer.text, answer.finish_reason)


@pytest.mark.rule("R10.17")
@pytest.mark.parametrize(
    ("fields", "name", "rust"),
    [
        ({"n": 2}, "n must be 1", "Invalid request"),
        ({"temperature": 9}, "emperature", "emperature"),
        ({"top_p": 1.5}, "op_p", "op_p"),
        ({"max_tokens": 0}, "ax tokens", "ax tokens"),
        ({"prompt": ""}, "Prompt", "Prompt"),
    ],
    ids=["n", "temperature", "top_p", "max_tokens", "prompt"],
)
async def test_wrong_field(pair: Stack, fields: dict[str, Any], name: str, rust: str) -> None:
    """A wrong field is the caller's fault, is named, and does not disturb the next request."""
    async with pair.client() as client:
        refused = await client.post("/v1/completions", {"prompt": client.prompt, "max_tokens": 3} | fields)
        answer = await client.complete(max_tokens=3)
    assert 400 == refused.status
    assert (name if pair.worker_kind is WorkerKind.OURS else rust) in refused.error
    assert pair.backend.reply.text(3) == answer.text


async def test_prompt_beyond_the_context(pair: Stack) -> None:
    """A prompt longer than the context is refused, streamed or not; our worker says what the limit is."""
    prompt = [5] * (pair.backend.context_length + 1)
    async with pair.client() as client:
        refused = await client.complete(prompt=prompt, max_tokens=3)
        answer = await client.complete(max_tokens=3)
    assert 400 == refused.status
    if pair.worker_kind is WorkerKind.OURS:
        assert str(pair.backend.context_length) in refused.error
    assert pair.backend.reply.text(3) == answer.text


async def test_unknown_model(pair: Stack) -> None:
    """The front end itself refuses a model that no worker serves."""
    async with pair.client() as client:
        refused = await client.chat(model="nobody", max_tokens=3)
    assert (404, "Model not found") == (refused.status, refused.error)


async def test_empty_messages(pair: Stack) -> None:
    """The front end itself refuses a chat without messages."""
    async with pair.client() as client:
        refused = await client.post("/v1/chat/completions", {"messages": [], "max_tokens": 3})
    assert 400 == refused.status
    assert "'messages'" in refused.error


async def test_many_at_once(pair: Stack) -> None:
    """Sixty-four requests at once all finish, each with its own text."""
    texts: dict[int, str] = {}

    async with pair.client() as client, trio.open_nursery() as nursery:

        async def one(seed: int) -> None:
            options = {"max_tokens": 20, "seed": seed, "temperature": 0.5, "ignore_eos": True}
            texts[seed] = (await client.stream_complete(**options)).text

        for seed in range(1, 65):
            nursery.start_soon(one, seed)
    assert {seed: reply_text(pair, 20, seed=seed) for seed in range(1, 65)} == texts


def spoken(answer: dict[str, Any]) -> list[int]:
    """All token ids of a raw answer."""
    return [token for chunk in answer["chunks"] for token in chunk["token_ids"]]


def last(answer: dict[str, Any], *keys: str) -> list[Any]:
    """Fields of a raw answer's last chunk; absent is None."""
    assert answer["error"] is None
    return [answer["chunks"][-1].get(key) for key in keys]


@pytest.mark.rule("R8.3", "R8.7", "R8.12", "R8.13", "R8.14", "R8.17")
async def test_raw_tokens_and_endings(pair: Stack) -> None:
    """The router gets ids, one terminal at the end with the usage on it, and a stop reason only if the user set one."""
    reply = pair.backend.reply
    size, prompt = reply.size, len(pair.backend.prompt)
    length, eos, hidden, user, text = await pair.ask(
        {"stop_conditions": {"max_tokens": 5}},
        {"stop_conditions": {"max_tokens": size + 5, "stop_token_ids_hidden": [pair.backend.eos]}},
        {"stop_conditions": {"max_tokens": 20, "stop_token_ids_hidden": [reply.ids[2]]}},
        {"stop_conditions": {"max_tokens": 20, "stop_token_ids": [reply.ids[2]]}},
        {"stop_conditions": {"max_tokens": 20, "stop": [reply.text(3)[-4:]]}},
    )
    assert reply.tokens(5) == spoken(length)
    assert [*reply.tokens(size), pair.backend.eos] == spoken(eos)
    assert reply.tokens(3) == spoken(hidden) == spoken(user) == spoken(text)
    assert ["length", None] == last(length, "finish_reason", "stop_reason")
    assert ["stop", None] == last(eos, "finish_reason", "stop_reason")
    assert ["stop", None] == last(hidden, "finish_reason", "stop_reason")
    assert ["stop", reply.ids[2]] == last(user, "finish_reason", "stop_reason")
    assert ["stop", reply.text(3)[-4:]] == last(text, "finish_reason", "stop_reason")
    (usage,) = last(length, "completion_usage")
    details = usage.pop("prompt_tokens_details", None)
    assert {"prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5} == usage
    assert (0 if pair.worker_kind is WorkerKind.OURS else None) == (details or {}).get("cached_tokens")
    for answer in (length, eos, hidden, user, text):
        endings = [chunk["finish_reason"] for chunk in answer["chunks"] if chunk.get("finish_reason")]
        usages = [chunk["completion_usage"] for chunk in answer["chunks"] if chunk.get("completion_usage")]
        assert (1, 1) == (len(endings), len(usages))
        assert {0} == {chunk.get("index") for chunk in answer["chunks"]}


@pytest.mark.rule("R8.20", "R8.23", "R8.24")
async def test_raw_logprobs(pair: Stack) -> None:
    """Rows of the selected token and its candidates, and the prompt's logprobs once, on the terminal."""
    (answer,) = await pair.ask({"output_options": {"logprobs": 2, "prompt_logprobs": 1}})
    rows = [row for chunk in answer["chunks"] for row in chunk["top_logprobs"]]
    values = [value for chunk in answer["chunks"] for value in chunk["log_probs"]]
    assert pair.backend.reply.tokens(3) == [row[0]["token_id"] for row in rows]
    assert values == [row[0]["logprob"] for row in rows]
    assert [3, 3, 3] == [len(row) for row in rows]
    (data,) = last(answer, "engine_data")
    prompt = data["prompt_logprobs"]
    asked = pair.backend.prompt
    assert (len(asked), None) == (len(prompt), prompt[0])
    assert [] == [token for token, row in zip(asked[1:], prompt[1:], strict=True) if str(token) not in row]
    assert [None] * (len(answer["chunks"]) - 1) == [chunk.get("engine_data") for chunk in answer["chunks"][:-1]]


@pytest.mark.rule("R4.1", "R10.16")
async def test_raw_refusals(pair: Stack) -> None:
    """What the worker cannot pass on it refuses itself; what the engine refuses carries the engine's words."""
    *answers, good = await pair.ask(
        {"sampling_options": {"n": 2}},
        {"token_ids": []},
        {"stop_conditions": {"max_tokens": 3, "stop_token_ids_visible": [9]}},
        {"stop_conditions": {"max_tokens": 3, "min_tokens": 5}},
        {"token_ids": [5] * (pair.backend.context_length + 1)},
        {},
    )
    many, empty, visible, least, long = [answer["error"] for answer in answers]
    assert [[]] * 5 == [answer["chunks"] for answer in answers]
    assert "n must be 1" in many
    assert "token_ids" in empty
    assert "visible" in visible
    assert "GenerateStream: " in least
    assert "(InvalidArgument)" in least
    assert "GenerateStream: " in long
    assert pair.backend.reply.tokens(3) == spoken(good)
    if pair.backend.kind is EngineKind.VLLM_RS:
        assert "min_tokens" in least
