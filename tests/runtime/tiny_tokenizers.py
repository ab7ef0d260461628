"""Small tokenizers, trained on the spot."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["hello there, world", "naïve café 日本語 text", "1 + 2 = 3", "tabs\tand\nlines"] * 3


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """Like Llama 2: "▁" for a space, unknown characters as <0xNN>."""
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz"))
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, "▁a", "he"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocab)},
            [("▁", "a"), ("h", "e")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend
