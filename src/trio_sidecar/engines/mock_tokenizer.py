"""The tokenizer of the mock engine: byte-level BPE in plain Python.

It reads the ``tokenizer.json`` that ships in ``mock_model/`` and gives the same ids and the same text as the
``tokenizers`` library does with that file. It knows only what that file uses.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["MOCK_MODEL_DIR", "Detokenizer", "MockTokenizer"]

MOCK_MODEL_DIR = Path(__file__).parent / "mock_model"
"""The model directory that ships in the package."""

PIECE_CACHE_LIMIT = 20_000
"""How many different pieces of text keep their encoding; beyond that all are forgotten at once."""


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a token stands for: itself where it prints, else code points from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


@attrs.frozen(slots=True, kw_only=True, eq=False)
class MockTokenizer:
    """Text to ids and back.

    Attributes:
        token_bytes: What each id stands for, by id.
        special_ids: Special tokens by their text.
        bos_id: Put before a text prompt.
        eos_id: Ends a reply.
    """

    token_bytes: tuple[bytes, ...] = attrs.field(repr=False)
    special_ids: Mapping[str, int]
    bos_id: int
    eos_id: int
    _id_of_bytes: Mapping[bytes, int] = attrs.field(repr=False)
    _ranks: Mapping[tuple[bytes, bytes], int] = attrs.field(repr=False)
    _pieces: re.Pattern[str] = attrs.field(repr=False)
    _specials: re.Pattern[str] = attrs.field(repr=False)
    _cache: dict[str, tuple[int, ...]] = attrs.field(factory=dict, init=False, repr=False)

    @classmethod
    def load(cls, directory: Path = MOCK_MODEL_DIR) -> MockTokenizer:
        """Read a model directory made by ``tools/make_mock_model.py``.

        Raises:
            OSError: A file is missing.
        """
        tokenizer: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        byte_of = _byte_of_character()
        special_ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        spelled: list[bytes] = [b""] * len(tokenizer["model"]["vocab"])
        for text, index in tokenizer["model"]["vocab"].items():
            spelled[index] = text.encode() if text in special_ids else bytes(byte_of[each] for each in text)
        ranks: dict[tuple[bytes, bytes], int] = {}
        for rank, merge in enumerate(tokenizer["model"]["merges"]):
            left, right = (bytes(byte_of[each] for each in half) for half in merge.split(" "))
            ranks.setdefault((left, right), rank)
        special_numbers = frozenset(special_ids.values())
        return cls(
            token_bytes=tuple(spelled),
            special_ids=special_ids,
            bos_id=config["bos_token_id"],
            eos_id=config["eos_token_id"],
            id_of_bytes={each: index for index, each in enumerate(spelled) if index not in special_numbers},
            ranks=ranks,
            pieces=re.compile(tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]),
            specials=re.compile("(" + "|".join(map(re.escape, special_ids)) + ")"),
        )

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return len(self.token_bytes)

    def encode(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """The ids of a text.

        Args:
            text: Any text without lone surrogates.
            special: Whether the spelling of a special token becomes that token.
            add_bos: Whether to begin with the begin token, as a server does with a text prompt.
        """
        ids = [self.bos_id] if add_bos else []
        for part in self._specials.split(text) if special else (text,):
            number = self.special_ids.get(part) if special else None
            if number is not None:
                ids.append(number)
                continue
            for piece in self._pieces.findall(part):
                ids.extend(self._cache.get(piece) or self._encode_piece(piece))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some ids; what is no UTF-8 becomes U+FFFD, and an id that is not in the vocabulary nothing."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, ids), detokenizer.finish()])

    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        """Merge the pair of the lowest rank, leftmost first, until none is left."""
        parts = [bytes((byte,)) for byte in piece.encode()]
        never = len(self._ranks)
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, never) for pair in itertools.pairwise(parts)]
            best = min(ranks)
            if best == never:
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids = tuple(self._id_of_bytes[part] for part in parts)
        if len(self._cache) >= PIECE_CACHE_LIMIT:
            self._cache.clear()
        self._cache[piece] = ids
        return ids


class Detokenizer:
    """Text of ids that come one by one; a character is held back until its last byte is there."""

    __slots__ = ("_decode", "_special", "_token_bytes")

    def __init__(self, tokenizer: MockTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._special = frozenset(tokenizer.special_ids.values()) if skip_special_tokens else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        """The text that this id completes; may be empty."""
        if token_id in self._special or token_id >= len(self._token_bytes):
            return ""
        return self._decode(self._token_bytes[token_id])

    def finish(self) -> str:
        """U+FFFD if a character was left unfinished, else nothing."""
        return self._decode(b"", final=True)
