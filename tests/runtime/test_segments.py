"""Conversations that are tokenized in parts have exactly the ids of the whole text."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text import segments
from radix_runtime.text.segments import SegmentedEncoder
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.tiny_tokenizers import byte_level, sentencepiece

WORDS = [
    "hello",
    " ",
    "  ",
    "\n",
    "\n\n",
    "there",
    "naïve",
    "日本",
    "1 + 2",
    "\t",
    "a",
    "\u0301",
    "ﬁ",
]


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """As newer conversions of SentencePiece: only the beginning of a text gets a space."""
    backend = sentencepiece()
    backend.normalizer = None  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return backend


def odd_tokens() -> tokenizers.Tokenizer:
    """Tokens that take spaces with them, begin within others, or only count as words."""
    backend = byte_level()
    backend.add_special_tokens(
        [
            AddedToken("<|end|>", special=True, rstrip=True),
            AddedToken("<|start|>", special=True, lstrip=True),
            AddedToken("<|start|>x", special=True),
            AddedToken("hello<|u", special=True),
            AddedToken("<|user|>", special=True),
            AddedToken("word", special=True, single_word=True),
            AddedToken("  ", special=True),
            AddedToken("<|n|>", special=True, normalized=True),
        ]
    )
    return backend


def demo() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))


def encode_with(backend: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "build",
    [
        byte_level,
        sentencepiece,
        lambda: metaspace("first"),
        lambda: metaspace("always"),
        lambda: metaspace("never"),
        odd_tokens,
        demo,
    ],
    ids=["byte level", "sentencepiece", "first", "always", "never", "odd", "demo"],
)
def test_parts_have_the_ids_of_the_whole(
    build: Callable[[], tokenizers.Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_WORTH", 1)
    backend = build()
    encode = encode_with(backend)
    added = list(backend.get_added_tokens_decoder().values())
    cached = SegmentedEncoder(encode, added)
    rng = random.Random()
    pieces = [*WORDS, *(token.content for token in added), *("<|", "|>", "<s", "<|start", "|>x")]
    for _ in range(400):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        for _ in range(2):  # computed, then found
            assert cached.encode(text) == encode(text), repr(text)
    assert cached.bytes > 0


def test_a_word_that_ends_at_a_cut() -> None:
    """`word` counts only where no letter follows; a part that ends behind it does not know."""
    backend = odd_tokens()
    encode = encode_with(backend)
    cached = SegmentedEncoder(encode, backend.get_added_tokens_decoder().values())
    assert cached.encode("<s>wordhello<|u") == encode("<s>wordhello<|u")


def test_a_turn_more_encodes_only_what_is_new() -> None:
    """And what it finds is what was there, whoever asks."""
    backend = byte_level()
    asked: list[str] = []
    encode = encode_with(backend)

    def spy(text: str) -> list[int]:
        asked.append(text)
        return encode(text)

    cached = SegmentedEncoder(spy, backend.get_added_tokens_decoder().values())
    turns = [f"<s>user {i} " + "hello there " * 20 for i in range(50)]
    for count in range(1, 51):
        text = "".join(turns[:count])
        assert cached.encode(text) == encode(text)
    assert sorted(asked) == sorted(turns)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_CAPACITY", 10_000)
    backend = byte_level()
    cached = SegmentedEncoder(encode_with(backend), backend.get_added_tokens_decoder().values())

    def work(number: int) -> None:
        for i in range(100):
            cached.encode(f"<s>{number} {i} " + "hello there " * 20 + "</s>")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < cached.bytes <= 10_000
    assert cached.bytes == sum(segments._size(*entry) for entry in cached._known.items())


def test_no_token_to_cut_at() -> None:
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    assert SegmentedEncoder(encode_with(plain), []).encode("a b a") == [0, 1, 0]


def test_the_chat_of_the_demo_model() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    messages = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"What is {turn} + 5? " * 10})
        text = tokenizer.render_chat(messages)
        assert tokenizer.encode_chat(text).ids == tokenizer.encode(text, add_special_tokens=False)
        messages.append({"role": "assistant", "content": f"It is {turn + 5}."})
    assert tokenizer._segments.bytes > 0
