"""A model that a real vLLM loads in no time: random weights, written with numpy, and a LoRA adapter for it.

    python tests/support/plain_vllm_model.py DIRECTORY

makes ``DIRECTORY/model`` and ``DIRECTORY/lora``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from support.tiny_model import EOS, VOCAB, make_model_directory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2, 64, 128, 4, 2, 32
SECOND_EOS = 6
"""``<|end|>``: an end token of the generation config only."""

CONTEXT = 256
RANK, ALPHA = 8, 32


def make_vllm_model(path: Path) -> Tokenizer:
    """Write a model with weights; the same on every run.

    Returns:
        Its tokenizer.
    """
    tokenizer = make_model_directory(path, context_length=CONTEXT)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config))
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [EOS, SECOND_EOS]}))
    save_file(_weights(), path / "model.safetensors", metadata={"format": "pt"})
    return tokenizer


def make_vllm_lora(path: Path) -> None:
    """Write an adapter that changes what the model says."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(7)
    tensors = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = rng.normal(size=(RANK, HIDDEN)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.normal(size=(width, RANK)).astype(np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "tiny",
    }
    (path / "adapter_config.json").write_text(json.dumps(document))


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)

    def random(*shape: int, scale: float = 0.08) -> np.ndarray:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, scale=0.5),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        # Far apart, so that greedy decoding does not hang on the last bit of a sum.
        "lm_head.weight": random(VOCAB, HIDDEN, scale=0.3),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.self_attn.q_proj.weight": random(HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD),
            f"{prefix}.mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    return tensors


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    make_vllm_model(directory / "model")
    make_vllm_lora(directory / "lora")
