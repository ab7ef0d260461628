"""Train the byte-level BPE tokenizer of the demo model and write the files around the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]
VOCAB_SIZE = 1536
CONTEXT = 2048

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('The demo model knows the roles system, user and assistant.') -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

MODEL_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

GENERATION_CONFIG: dict[str, object] = {
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.95,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}

TOKENIZER_CONFIG: dict[str, object] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONTEXT,
    "bos_token": None,
    "eos_token": IM_END,
    "pad_token": END_OF_TEXT,
    "unk_token": None,
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
    "added_tokens_decoder": {
        str(index): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    },
    "chat_template": CHAT_TEMPLATE,
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB_SIZE entries; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and the JSON files around the weights into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in (
        ("config.json", MODEL_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
