"""A model directory without weights: a real BPE tokenizer, a chat template and a configuration.

Enough for a Dynamo front end and for ``vllm-rs``, both of which read tokenizer and limits only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 512
BOS, EOS, PAD = 0, 1, 2
SPECIAL = ("<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
REPLY = (
    "The harbour wakes before the town does. Gulls argue over the first boats, ropes creak, and somebody laughs at a "
    "joke that the wind takes away. By noon the nets are mended, the fish is sold and the quay smells of tar and "
    "coffee. Ünder the old crane a child counts the waves: one, two, three, and then again from one, because the sea "
    "never stops."
)
CORPUS = (
    REPLY,
    "user assistant system say hello to the harbour, please. What is the weather like today?",
    "0123456789 !?.,:;()[]{}<>+-*/=_\"'",
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """Train the tokenizer; the same on every run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def make_model_directory(path: Path, *, context_length: int) -> Tokenizer:
    """Write the directory.

    Returns:
        Its tokenizer.
    """
    path.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    documents = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": context_length,
            "vocab_size": VOCAB,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "torch_dtype": "float32",
        },
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[BOS],
            "eos_token": SPECIAL[EOS],
            "pad_token": SPECIAL[PAD],
            "model_max_length": context_length,
            "chat_template": TEMPLATE,
        },
    }
    for name, document in documents.items():
        (path / name).write_text(json.dumps(document, indent=1))
    return tokenizer
