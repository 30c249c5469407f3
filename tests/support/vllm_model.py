"""A tiny model with weights that vLLM loads, and an adapter for it: numbers from a seed, so the same on every run.

Needs numpy and safetensors, which come with vLLM.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, processors

from support import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 576
"""Width of the logits: more than the tokenizer knows, as with models whose vocabulary is padded."""
SECONDARY_EOS = 6
DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.1, "max_new_tokens": 40}
"""Sampling defaults of the generation config."""

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2, 64, 128, 4, 2, 32
RANK = 8


def make_vllm_model(path: Path, *, context_length: int) -> Tokenizer:
    """Write the directory.

    Returns:
        Its tokenizer, which puts ``<s>`` before a text.
    """
    tokenizer = tiny_model.make_model_directory(path, context_length=context_length)
    start = tiny_model.SPECIAL[tiny_model.BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tiny_model.BOS)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    config |= {
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": tiny_model.BOS, "eos_token_id": [tiny_model.EOS, SECONDARY_EOS]} | DEFAULTS
    (path / "generation_config.json").write_text(json.dumps(generation, indent=1))
    save_file(_weights(), path / "model.safetensors", metadata={"format": "pt"})
    return tokenizer


def make_adapter(path: Path, *, seed: int = 7) -> Path:
    """Write a LoRA adapter that changes what the model says."""
    path.mkdir(parents=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = _normal(random, RANK, HIDDEN, scale=1.0)
            tensors[f"{prefix}.lora_B.weight"] = _normal(random, width, RANK, scale=1.0)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "tiny",
        "modules_to_save": None,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _weights() -> dict[str, np.ndarray[Any, Any]]:
    """Large enough that two tokens are hardly ever equally likely."""
    random = np.random.default_rng(3)
    weights = {
        "model.embed_tokens.weight": _normal(random, VOCAB, HIDDEN, scale=1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": _normal(random, VOCAB, HIDDEN, scale=0.3),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = _normal(random, *shape, scale=0.2)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def _normal(random: np.random.Generator, rows: int, columns: int, *, scale: float) -> np.ndarray[Any, Any]:
    return (random.standard_normal((rows, columns)) * scale).astype(np.float32)
