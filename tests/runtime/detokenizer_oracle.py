"""What the detokenizer must give, slowly: tokenizers that split characters, and an oracle that
decodes everything and then looks for the stop."""

from __future__ import annotations

import json
from functools import lru_cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from radix_runtime.sampling_params import SamplingParams
from radix_runtime.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and STOP means stop. END",
    "München liegt an der Isar; naïve façade, Ærøskøbing — “quotes” and …dots…",
    "人工智能是计算机科学的一个分支。日本語の文章もここにあります。한국어 문장",
    "emoji 😀😃👩‍👩‍👧‍👦🇩🇪 and math ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋",
    "def f(x):\n    return x ** 2\t# tab\r\n",
]
SPECIAL = ["<|end|>", "<|pad|>"]


@lru_cache
def make_tokenizer(kind: str) -> Tokenizer:
    if kind == "byte_level":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1, right=0),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=160,
            special_tokens=[*SPECIAL, "<unk>"],
            limit_alphabet=40,
            show_progress=False,
        )
    backend.train_from_iterator(CORPUS, trainer)
    if kind != "byte_level":
        data = json.loads(backend.to_str())
        vocab = data["model"]["vocab"]
        for byte in range(256):
            vocab[f"<0x{byte:02X}>"] = len(vocab)
        backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    return Tokenizer(backend)


def full_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    """What `ids` add to the prompt, by the tokenizer's own decode of the whole."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assert after.startswith(before)
    return after[len(before) :]


def oracle(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], sampling: SamplingParams
) -> tuple[str, int, str | None]:
    """(text, tokens, matched): grows the output token by token and decodes all of it each time."""
    skip = sampling.skip_special_tokens
    low = sampling.min_new_tokens
    byte_level = tokenizer is make_tokenizer("byte_level")
    whole = full_text(tokenizer, prompt, ids, skip)

    def settled(n: int) -> str:
        # Text that no later token can change: a trailing U+FFFD may still become a character. Byte
        # fallback decodes a whole run of byte tokens as U+FFFD while its end is incomplete.
        text = full_text(tokenizer, prompt, ids[:n], skip)
        if n == len(ids) or not text.endswith("\ufffd"):
            return text
        return text.rstrip("\ufffd") if byte_level else settled(n - 1)

    ignored = len(settled(min(low, len(ids))))
    for n in range(low + 1, len(ids) + 1):
        text = settled(n)
        hits = []
        for stop in sampling.stop:
            start = text.find(stop, ignored)
            if start >= 0:
                hits.append((start + len(stop), start, stop))
        if hits:
            end, start, stop = min(hits)
            return text[: end if sampling.no_stop_trim else start], n, stop
    return whole, len(ids), None
