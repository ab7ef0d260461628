"""Tokenizers, chat templates and model directories, compared with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from radix_runtime import hf
from radix_runtime.errors import ConfigError, RequestError

DEMO = hf.load_tokenizer(hf.DEMO_MODEL_DIR)
CORPUS = ["hello there, world", "naïve café 日本語 text", "1 + 2 = 3", "tabs\tand\nlines"] * 3


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """Like Llama 2: "▁" for a space, unknown characters as <0xNN>."""
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz"))
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, "▁a", "he"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocab)}, [("▁", "a"), ("h", "e")],
            byte_fallback=True, unk_token="<unk>", fuse_unk=True,
        )
    )  # fmt: skip
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_no_torch_and_no_transformers() -> None:
    code = (
        "import sys; from radix_runtime import hf; t = hf.load_tokenizer(hf.DEMO_MODEL_DIR);"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    path = str(Path(hf.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path}, timeout=60)


@pytest.fixture(scope="module")
def reference() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(hf.DEMO_MODEL_DIR))


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


BYTE_LEVEL = hf.Tokenizer(byte_level())


@given(TEXTS.filter(lambda text: "▁" not in text))
@settings(max_examples=150, deadline=None)
def test_bytes_of_sentencepiece_tokens_make_the_text(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    joined = b"".join(map(SENTENCEPIECE.id_to_bytes, ids))
    assert joined == (b" " + text.encode() if text else b"")
    assert len(ids) * SENTENCEPIECE.max_token_bytes >= len(joined)


SENTENCEPIECE = hf.Tokenizer(sentencepiece())


def test_a_long_text_does_not_hold_up_other_threads() -> None:
    """Its ids are those that the library gives one text; meanwhile the event loop goes on."""
    tokenizer = hf.load_tokenizer(hf.DEMO_MODEL_DIR)
    text = "The quick brown fox, 123 <|im_end|>\n\tjumps é 人工智能. " * 8000
    backend = tokenizers.Tokenizer.from_file(str(hf.DEMO_MODEL_DIR / "tokenizer.json"))
    for sample in ("", "a", " a", text[:80], text):
        for special in (True, False):
            assert (
                tokenizer.encode(sample, special)
                == backend.encode(sample, add_special_tokens=special).ids
            )
    worker = threading.Thread(target=tokenizer.encode, args=(text,))
    start = last = time.perf_counter()
    longest = 0.0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert longest < (last - start) / 2


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
        tokenizer = hf.load_tokenizer(tmp_path)
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
    tokenizer = hf.load_tokenizer(tmp_path)
    ids = tokenizer.encode("he said 日", add_special_tokens=False)
    assert b"".join(map(tokenizer.id_to_bytes, ids)).decode() == "he said 日"
    assert tokenizer.id_to_bytes(ids[0]) == b"he"


# Templates --------------------------------------------------------------------------------

USER = [{"role": "user", "content": "x"}]


def render(source: str, messages: Any = USER, **kwargs: Any) -> str:
    template = hf.ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages, add_generation_prompt=True, **kwargs)


def test_template_features() -> None:
    loop = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}ok"
    assert render(loop) == "ok"
    assert render("{{ bos_token }}{{ {'a': '<é>'} | tojson }}") == '<s>{"a": "<é>"}'
    assert render("{% if tools %}no{% endif %}{{ tools is none }}") == "True"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "x"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if enable_thinking %}t{% endif %}", enable_thinking=True) == "t"
    template = hf.ChatTemplate("{{ enable_thinking }}{% set y = 1 %}{{ y }}", {})
    assert template.variables == {"enable_thinking"}


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('only users') }}", "{{ ''.__class__.__mro__ }}",
     "{{ messages.append(1) }}", "{{ messages[0].content.nope.nope }}", "{{ 1 / 0 }}",
     "{{ messages + 1 }}", "{{ cycler.__init__.__globals__ }}"],
)  # fmt: skip
def test_template_errors_are_the_requests(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "chat_template_error", "messages")
    assert len(error.message) <= 200
    assert ("only users" in error.message) == ("only users" in source)


def test_template_sources(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert hf.load_tokenizer(tmp_path).chat_template is None
    with pytest.raises(RequestError, match="no chat template"):
        hf.load_tokenizer(tmp_path).apply_chat_template(USER)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = tmp_path / "tokenizer_config.json"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert hf.load_tokenizer(tmp_path).render_chat(USER) == "J"
    config.write_text(json.dumps({"chat_template": named}))
    assert hf.load_tokenizer(tmp_path).render_chat(USER) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert hf.load_tokenizer(tmp_path).render_chat(USER) == "F"
    own = tmp_path / "own.jinja"
    own.write_text("O{{ bos_token }}")
    assert hf.load_tokenizer(tmp_path, str(own)).render_chat(USER) == "O"
    own.write_text("{% if %}")
    with pytest.raises(ConfigError, match="line 1"):
        hf.load_tokenizer(tmp_path, str(own))
    with pytest.raises(ConfigError, match="cannot read"):
        hf.load_tokenizer(tmp_path, str(tmp_path / "none"))


# Model directories ------------------------------------------------------------------------


def test_generation_config(tmp_path: Path) -> None:
    assert hf.load_generation_config(tmp_path) == hf.GenerationConfig()
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 1, "top_k": 0, "eos_token_id": [7, 8], "other": {}}')
    config = hf.load_generation_config(tmp_path)
    assert config == hf.GenerationConfig(temperature=1.0, top_k=-1, eos_token_id=[7, 8])
    assert config.sampling_defaults() == {"temperature": 1.0, "top_k": -1}
    assert hf.eos_token_ids(tmp_path, DEMO) == (7, 8, 2)
    file.unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert hf.eos_token_ids(tmp_path, None) == (5,)
    assert hf.eos_token_ids(tmp_path, DEMO) == (5, 2)  # not the tokenizer's alone
    file.write_text('{"temperature": 1}')
    assert hf.eos_token_ids(tmp_path, DEMO) == (5, 2)
    file.write_text('{"eos_token_id": 7}')
    assert hf.eos_token_ids(tmp_path, DEMO) == (7, 2)
    for wrong in ('{"temperature": "hot"}', '{"top_k": true}', '{"eos_token_id": "x"}', "[]", "{"):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            hf.load_generation_config(tmp_path)


def test_resolve(tmp_path: Path) -> None:
    assert hf.resolve_model_path(None) == hf.DEMO_MODEL_DIR
    assert hf.resolve_model_path(str(tmp_path)) == tmp_path
    for wrong in ("no such place", "/no/such/place", "a/b/c"):
        with pytest.raises(ConfigError, match="neither"):
            hf.resolve_model_path(wrong)


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/none":
            raise OSError("404 not found\nlong explanation")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hf.resolve_model_path("org/model") == tmp_path
    assert hf.resolve_model_path("org/model", weights=False) == tmp_path
    assert [("*.safetensors" in patterns) for _, patterns in asked] == [True, False]
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for _, p in asked for pattern in p)
    with pytest.raises(ConfigError) as caught:
        hf.resolve_model_path("org/none")
    assert "\n" not in str(caught.value) and "404" in str(caught.value)


def test_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        hf.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot load"):
        hf.load_tokenizer(tmp_path)
