"""The small tokenizer against the library that front ends use."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trio_sidecar.engines import mock_tokenizer
from trio_sidecar.engines.mock_tokenizer import MOCK_MODEL_DIR, Detokenizer, MockTokenizer

OURS = MockTokenizer.load()
THEIRS = Tokenizer.from_file(str(MOCK_MODEL_DIR / "tokenizer.json"))
PIECES = st.sampled_from(
    [
        "Hello",
        " the",
        "don't",
        "I'm'll",
        "<|user|>",
        "<|end|>",
        "<|",
        "  ",
        "\n\n",
        "\r\n\t",
        "日本",
        "😀",
        "é",
        "...",
        "1234567",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=12).map("".join)


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_encode_agrees_with_the_library(text: str) -> None:
    """Any text has the ids that a front end gives it, special tokens included."""
    assert THEIRS.encode(text, add_special_tokens=False).ids == OURS.encode(text)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, OURS.vocab_size - 1), max_size=16), st.booleans())
def test_decode_agrees_with_the_library(ids: list[int], skip: bool) -> None:
    """Any ids have the text that a front end gives them, broken UTF-8 included."""
    assert THEIRS.decode(ids, skip_special_tokens=skip) == OURS.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=100)
@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    """A text without special tokens survives encoding and decoding."""
    assert text == OURS.decode(OURS.encode(text, special=False))


def test_begin_token_comes_first_if_asked_for() -> None:
    """A server puts the begin token before a text prompt, as the library's post-processor does."""
    assert THEIRS.encode("Hello").ids == OURS.encode("Hello", add_bos=True)


def test_special_tokens_can_be_read_as_plain_text() -> None:
    """What only looks like a special token is not one where the caller says so."""
    ids = OURS.encode("a <|end|> b", special=False)
    assert OURS.eos_id not in ids
    assert "a <|end|> b" == OURS.decode(ids)


def test_common_words_are_one_token() -> None:
    """A reply streams word by word."""
    assert 5 == len(OURS.encode("The weather is fine today"))


def test_a_full_cache_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of pieces stays bounded, and dropping it changes no result."""
    monkeypatch.setattr(mock_tokenizer, "PIECE_CACHE_LIMIT", 10)
    tokenizer = MockTokenizer.load()
    text = " ".join(f"word{'x' * count}" for count in range(30))
    assert OURS.encode(text) == tokenizer.encode(text)


@pytest.mark.rule("FR-071")
def test_characters_are_held_back_until_complete() -> None:
    """A character split over tokens appears once, with its last byte."""
    detokenizer = Detokenizer(OURS)
    pieces = [detokenizer.push(token) for token in OURS.encode("😀")]
    assert [*("" for _ in pieces[:-1]), "😀"] == pieces
    assert "" == detokenizer.finish()


@pytest.mark.rule("FR-071")
def test_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    """A text that was cut inside a character says so, as the library does."""
    ids = OURS.encode("ok 😀")[:-1]
    assert THEIRS.decode(ids) == OURS.decode(ids)
    assert OURS.decode(ids).endswith("\ufffd")


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    """The padding of the vocabulary decodes to nothing."""
    assert "" == OURS.decode([OURS.vocab_size, 2**32 - 1])


def test_a_long_prompt_is_linear() -> None:
    """One endless word is cut into bounded pieces, so that it costs no more than many words."""
    text = "".join(random.Random(1).choices("abcdefgh", k=200_000))
    assert 200_000 == len(OURS.decode(OURS.encode(text)))


def test_the_shipped_directory_is_what_the_tool_makes(tmp_path: Path) -> None:
    """Nobody edits the shipped files by hand."""
    tool = Path(__file__).parents[3] / "tools" / "make_mock_model.py"
    subprocess.run([sys.executable, tool, tmp_path], check=True, capture_output=True, timeout=60)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in MOCK_MODEL_DIR.iterdir()}


def test_config_agrees_with_the_tokenizer() -> None:
    """The end, begin and padding ids of the configuration are those of the tokenizer."""
    config = json.loads((MOCK_MODEL_DIR / "config.json").read_text())
    generation = json.loads((MOCK_MODEL_DIR / "generation_config.json").read_text())
    names = json.loads((MOCK_MODEL_DIR / "tokenizer_config.json").read_text())
    for role in ("bos", "eos", "pad"):
        expected = THEIRS.token_to_id(names[f"{role}_token"])
        assert expected == config[f"{role}_token_id"] == generation[f"{role}_token_id"]
    assert OURS.vocab_size <= config["vocab_size"] < OURS.vocab_size + 64


def test_chat_template_renders_text_and_parts() -> None:
    """A message may be a string or a list of parts; the answer begins after the assistant's mark."""
    names = json.loads((MOCK_MODEL_DIR / "tokenizer_config.json").read_text())
    template = jinja2.Environment(autoescape=False).from_string(names["chat_template"])
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None},
    ]
    rendered = template.render(
        messages=messages, bos_token="<|begin|>", eos_token="<|end|>", add_generation_prompt=True
    )
    expected = "<|begin|><|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n<|end|>\n<|assistant|>\n"
    assert expected == rendered
