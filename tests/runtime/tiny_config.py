"""The folder of a model that has a config.json alone, for `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 160,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_folder(parent: Path, context: int) -> Path:
    """`parent`/tiny, with the config of a tiny Llama of this context."""
    folder = parent / "tiny"
    folder.mkdir()
    config = {**_CONFIG, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
