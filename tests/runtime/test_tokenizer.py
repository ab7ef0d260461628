"""Tokenizers, compared with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.tiny_tokenizers import byte_level, sentencepiece

DEMO = load_tokenizer(DEMO_MODEL_DIR)
BYTE_LEVEL = Tokenizer(byte_level())
SENTENCEPIECE = Tokenizer(sentencepiece())
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_no_torch_and_no_transformers() -> None:
    code = (
        "import sys; from radix_runtime.hub import DEMO_MODEL_DIR;"
        "from radix_runtime.text.tokenizer import load_tokenizer;"
        "t = load_tokenizer(DEMO_MODEL_DIR);"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    path = str(DEMO_MODEL_DIR.parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path}, timeout=60)


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(DEMO_MODEL_DIR))


def test_as_transformers(reference: Any) -> None:
    @given(TEXTS, st.booleans())
    @settings(max_examples=150, deadline=None)
    def check(text: str, special: bool) -> None:
        ids = DEMO.encode(text, special)
        assert ids == reference.encode(text, add_special_tokens=special)
        assert DEMO.decode(ids) == reference.decode(ids, skip_special_tokens=True)

    check()
    assert DEMO.eos_token_id == reference.eos_token_id
    assert DEMO.vocab_size == len(reference)


def test_chat_template_as_transformers(reference: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "naïve <|im_end|> 日本"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "1\n2"},
    ]
    for prompt in (True, False):
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=False
        )
        assert DEMO.apply_chat_template(messages, add_generation_prompt=prompt) == expected


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_bytes_of_byte_level_tokens_make_the_text(text: str) -> None:
    for tokenizer in (DEMO, BYTE_LEVEL):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.id_to_bytes, ids)) == text.encode()
        assert all(len(tokenizer.id_to_bytes(i)) <= tokenizer.max_token_bytes for i in ids)


@given(TEXTS.filter(lambda text: "▁" not in text))
@settings(max_examples=150, deadline=None)
def test_bytes_of_sentencepiece_tokens_make_the_text(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    joined = b"".join(map(SENTENCEPIECE.id_to_bytes, ids))
    assert joined == (b" " + text.encode() if text else b"")
    assert len(ids) * SENTENCEPIECE.max_token_bytes >= len(joined)


@pytest.mark.serial
def test_a_long_text_does_not_hold_up_other_threads() -> None:
    """Its ids are those that the library gives one text; meanwhile the event loop goes on."""
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    text = "The quick brown fox, 123 <|im_end|>\n\tjumps é 人工智能. " * 8000
    backend = tokenizers.Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    for sample in ("", "a", " a", text[:80], text):
        for special in (True, False):
            assert (
                tokenizer.encode(sample, special)
                == backend.encode(sample, add_special_tokens=special).ids
            )
    # A busy machine stops this thread too, but not every time.
    assert min(longest_stop(lambda: tokenizer.encode(text)) for _ in range(5)) < 0.5


def longest_stop(work: Callable[[], object]) -> float:
    """The longest time for which another thread, which does `work`, lets this one not run: a part
    of the whole time."""
    worker = threading.Thread(target=work)
    start = last = time.perf_counter()
    longest = 0.0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    return longest / (last - start)


def test_odd_ids() -> None:
    for tokenizer in (DEMO, SENTENCEPIECE):
        for token in (-1, tokenizer.vocab_size, 2**31 - 1, 2**40):
            assert tokenizer.id_to_bytes(token) == b""
    assert DEMO.id_to_bytes(2) == b"<|im_end|>" and 2 in DEMO.special_ids
    assert DEMO.decode([2, 400]) == DEMO.decode([400])
    assert DEMO.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert DEMO.decode([DEMO.vocab_size + 5]) == DEMO.decode([]) == ""


def test_llama_class_obeys_add_bos(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for add, first in ((True, [0]), (False, [])):
        config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": {"content": "<s>"},
                  "eos_token": "</s>", "add_bos_token": add}  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(tmp_path)
        plain = tokenizer.encode("hello", add_special_tokens=False)
        assert tokenizer.encode("hello") == first + plain and plain[0] != 0
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_without_tokenizer_json(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["he"] = len(vocab)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("he said 日", add_special_tokens=False)
    assert b"".join(map(tokenizer.id_to_bytes, ids)).decode() == "he said 日"
    assert tokenizer.id_to_bytes(ids[0]) == b"he"


def test_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot load"):
        load_tokenizer(tmp_path)
