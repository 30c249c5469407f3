"""Where the mock engine's tokens come from: an intelligible reply, or ids made from a hash."""

from __future__ import annotations

import random
from array import array
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from trio_sidecar.engines.mock_tokenizer import Detokenizer, MockTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_sidecar.engines.mock_request import MockJob

__all__ = ["HashReply", "Reply", "TextReply"]

QUOTED_WORDS = 8
QUOTED_CHARS = 80
QUESTION_TOKENS = 64

_GREETINGS = ("Hello!", "Hi there!", "Thanks for asking.", "Good question.", "Welcome!")
_OPENINGS = (
    'Your message ends with "{quote}", and it arrived safely.',
    'I read your message up to the last words, "{quote}".',
    'You wrote "{quote}", and I have it here.',
)
_EXPLANATION = (
    "This is the mock engine: it received {count} tokens, and no model was run."
    " The words that you see come one token at a time from a small fixed list, so the same prompt and the same seed"
    " always give the same reply."
)
_CLOSINGS = (
    "If you can read this, the whole way from your request to the engine and back works.",
    "Ask me again, and you will see exactly these words.",
    "For a real answer, start a real engine behind the same worker.",
)
_MORE = (
    "Nothing was computed to write this sentence.",
    "A queue is polite, because everyone waits for the same reason.",
    "Each token was sent as soon as it was due.",
    "The stream goes on until somebody says stop.",
    "A short test today is better than a long night tomorrow.",
    "Small pieces arrive early, and large pieces arrive together.",
    "The sky is blue, the ocean is deep, and this reply is not yet at its end.",
    "Whoever counts the tokens will find that none is missing.",
    "A good worker listens first, then answers, then cleans the table.",
    "Time is fixed here: one step, one token, one more step.",
    "When the reader is slow, the writer waits.",
    "It costs little to be patient, and less to be clear.",
    "Every request that begins must also end.",
    "Rain falls on the garden, and the clock in the kitchen keeps running.",
)


class Reply(Protocol):
    """One request's tokens, in order."""

    def next(self, position: int) -> int:
        """The token at a position; positions are asked for once each, from 0 on."""
        ...


class HashReply:
    """Ids in [1000, 31999] that depend on seed, request id and position only (R16.11)."""

    __slots__ = ("_base",)

    def __init__(self, seed: int, request_id: str) -> None:
        self._base = int.from_bytes(blake2b(f"{seed}:{request_id}".encode(), digest_size=8).digest())

    def next(self, position: int) -> int:
        """The id at a position, any position."""
        # A full hash per token would cost more than the rest of the step; this mixes well enough for a mock.
        mixed = (self._base + position * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        return 1000 + (mixed ^ (mixed >> 27)) % 31000


class TextReply:
    """A short paragraph about the prompt, then the end token, unless more is wanted."""

    __slots__ = ("_job", "_pending", "_random", "_tokenizer")

    def __init__(self, job: MockJob, tokenizer: MockTokenizer, seed: int) -> None:
        self._job = job
        self._tokenizer = tokenizer
        digest = blake2b(f"{seed}:{job.sampling_seed}".encode(), digest_size=16)
        digest.update(array("I", job.prompt).tobytes())
        self._random = random.Random(digest.digest())  # noqa: S311 - repeatable is the point
        self._pending = deque(tokenizer.encode(self._paragraph(), special=False))

    def next(self, position: int) -> int:
        """The next id of the reply; the end token once the reply is told and may end."""
        if not self._pending:
            job = self._job
            if position >= job.min_tokens and (not job.ignore_eos or self._tokenizer.eos_id in job.stop_ids):
                return self._tokenizer.eos_id
            self._pending.extend(self._tokenizer.encode(" " + self._random.choice(_MORE), special=False))
        return self._pending.popleft()

    def _paragraph(self) -> str:
        choice = self._random.choice
        quote = _last_words(self._job.prompt, self._tokenizer)
        parts = [choice(_GREETINGS)]
        if quote:
            parts.append(choice(_OPENINGS).format(quote=quote))
        parts += [_EXPLANATION.format(count=len(self._job.prompt)), choice(_CLOSINGS)]
        return " ".join(parts)


def _last_words(prompt: Sequence[int], tokenizer: MockTokenizer) -> str:
    """The end of the last user message, or of the whole prompt if it is no chat."""
    special = frozenset(tokenizer.special_ids.values())
    user = tokenizer.special_ids["<|user|>"]
    end = len(prompt)
    start = end - prompt[::-1].index(user) if user in prompt else 0
    if start:
        end = next((at for at in range(start, end) if prompt[at] in special), end)
    # Cutting the tokens first keeps the cost of a very long prompt small; the first word may then be half a word.
    detokenizer = Detokenizer(tokenizer)
    text = "".join(map(detokenizer.push, prompt[max(start, end - QUESTION_TOKENS) : end])) + detokenizer.finish()
    return " ".join(text.split()[-QUOTED_WORDS:])[-QUOTED_CHARS:].strip().replace('"', "'")
