"""Build the model directory that ships with the mock engine.

usage: python tools/make_mock_model.py [OUT_DIR]

There are no weights: the directory holds what a front end reads, which is a tokenizer, a chat template and the few
numbers of a configuration. The tokenizer is a byte-level BPE, trained here on our own list of common words
(``mock_words.txt``), so that every text has an encoding and ordinary English words are one token each. The result
depends on nothing but that list: the same list gives the same files.
"""

from __future__ import annotations

import heapq
import itertools
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).parent
DEFAULT_OUT = HERE.parent / "src" / "trio_sidecar" / "engines" / "mock_model"

SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|developer|>")
BEGIN, END, PAD = 0, 1, 2
CONTEXT = 32768

# ASCII classes only, so that Rust and Python engines cut alike; the limits keep the cost of one piece bounded.
SPLIT = r" ?[A-Za-z]{1,24}(?:'[a-z]{1,2})?| ?[0-9]{1,3}| ?[^ \t\r\nA-Za-z0-9]{1,16}|[ \t\r\n]{1,8}"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

PUNCTUATION = (
    "\n\n",
    ".\n",
    ".\n\n",
    ":\n\n",
    "...",
    ' "',
    '",',
    '".',
    '?"',
    " (",
    ").",
    " -",
    " 1",
    " 2",
    "10",
    "20",
    "100",
)


def byte_alphabet() -> list[str]:
    """One visible character per byte: the byte itself where it prints, else the next free code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(free)) for byte in range(256)]


def corpus(words: list[str]) -> dict[str, int]:
    """Pieces of text with weights: earlier words weigh more, and a leading space is the usual form."""
    weights: Counter[str] = Counter()
    for rank, word in enumerate(words):
        weight = 2_000_000 // (rank + 20)
        weights[" " + word] += weight
        weights[word] += weight // 4 + 1
        weights[word.capitalize()] += weight // 40 + 1
    for text in PUNCTUATION:
        weights[text] += 5_000
    return dict(weights)


def train(pieces: dict[str, int], alphabet: list[str]) -> list[tuple[str, str]]:
    """The merges, most valuable first, until every piece of two characters and more is one token."""
    spelled = {text: [alphabet[byte] for byte in text.encode()] for text in pieces}
    pairs: Counter[tuple[str, str]] = Counter()
    found_in: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def count(text: str, weight: int) -> None:
        for pair in itertools.pairwise(spelled[text]):
            pairs[pair] += weight
            found_in[pair].add(text)
            if not pairs[pair]:
                del pairs[pair]

    for text, weight in pieces.items():
        count(text, weight)
    merges: list[tuple[str, str]] = []
    while pairs:
        # A few merges per choice are much faster than one, and still deterministic.
        used: set[str] = set()
        for pair, _ in heapq.nsmallest(8, pairs.items(), key=lambda item: (-item[1], item[0])):
            if used.isdisjoint(pair):
                used.update((*pair, pair[0] + pair[1]))
                merges.append(pair)
                for text in found_in.pop(pair, ()):
                    count(text, -pieces[text])
                    apply_merge(spelled[text], pair)
                    count(text, pieces[text])
    return merges


def apply_merge(parts: list[str], pair: tuple[str, str]) -> None:
    """Join each occurrence of the pair, left to right, in place."""
    at = 0
    while at < len(parts) - 1:
        if parts[at] == pair[0] and parts[at + 1] == pair[1]:
            parts[at : at + 2] = [pair[0] + pair[1]]
        at += 1


def tokenizer_json(merges: list[tuple[str, str]], alphabet: list[str]) -> dict[str, object]:
    """The tokenizer in the format of the ``tokenizers`` library."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in enumerate(SPECIAL)
    ]
    begin = {"SpecialToken": {"id": SPECIAL[BEGIN], "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SPECIAL[BEGIN]: {"id": SPECIAL[BEGIN], "ids": [BEGIN], "tokens": [SPECIAL[BEGIN]]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


def model_config(vocab_size: int) -> dict[str, object]:
    """A small Llama by its numbers; no weights exist."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }


def tokenizer_config() -> dict[str, object]:
    """What a front end needs beside the tokenizer: the special names and the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": SPECIAL[BEGIN],
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[PAD],
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(index): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, text in enumerate(SPECIAL)
        },
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    """Write the four files."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_OUT
    out.mkdir(parents=True, exist_ok=True)
    words = list(dict.fromkeys((HERE / "mock_words.txt").read_text().split()))
    alphabet = byte_alphabet()
    tokenizer = tokenizer_json(train(corpus(words), alphabet), alphabet)
    vocab: dict[str, int] = tokenizer["model"]["vocab"]  # type: ignore[index]
    vocab_size = -(-len(vocab) // 64) * 64
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config(),
        "config.json": model_config(vocab_size),
        "generation_config.json": {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(words)} words, {len(vocab)} tokens, padded to {vocab_size}, in {out}")  # noqa: T201


if __name__ == "__main__":
    main()
