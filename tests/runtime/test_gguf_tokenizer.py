"""Tokenizers of GGUF files against transformers' for the same vocabulary: byte-level BPE with every
way to cut text, SentencePiece's, special tokens, added tokens, BOS and EOS."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from gguf import GGUFWriter, TokenType
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from radix_runtime.errors import ConfigError
from radix_runtime.text.gguf_splits import WHOLE_TOKENS, pre_tokenizer
from radix_runtime.text.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from tests.runtime.tiny_tokenizers import CORPUS

TEXTS = [
    "", " ", "a", " hello  there, world!\n\n", "I'm, you'RE, we'll; it's 1234567 and 3.14",
    "\t\ttabs\tand\r\nlines\n\n\n  indented\n", "naïve café déjà", "日本語のテキスト 中文 한국어",
    "cafe\u0301 e\u0301 \u212b", "🙂🙃 emoji\u200d", "x" * 300, "CamelCase ALLCAPS mIxEd",
    "https://example.com/a?b=c&d=%20", "def f(x):\n    return x ** 2  # two\n",
    "\u00a0nbsp\u2003em",
    "\x00\x01\x7f", "½ ⅷ ²³ ٣٤٥", "a\u0300\u0301\u0302b", "<s>not</s> <|im_start|>user\n<|im_end|>",
    "<think>a thought</think>", "مرحبا بالعالم שלום", "\n\n1. one\n\n2. two",
]  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>"]


def random_texts(count: int, seed: int) -> list[str]:
    """Pieces of TEXTS, random characters, special and added tokens."""
    rng = random.Random(seed)
    pieces = [*TEXTS, *SPECIAL, *ADDED, *"aé1 \n'"]
    texts = []
    for _ in range(count):
        parts = rng.choices(pieces, k=rng.randint(1, 6))
        parts += [chr(rng.choice([rng.randint(32, 0x2FF), rng.randint(0x3000, 0xD000)]))]
        rng.shuffle(parts)
        texts.append("".join(parts))
    return texts


def byte_level_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small byte-level BPE, trained on text that is cut at spaces alone, so that each cut
    shows."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=1
    )
    texts = [text for text in (*TEXTS, *CORPUS) if "<" not in text]
    pieces = [text[i : i + 9] for text in texts for i in range(0, len(text), 4)]
    backend.train_from_iterator(pieces, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


VOCAB, MERGES = byte_level_vocabulary()


def write_tokenizer(
    path: Path,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    model: str = "gpt2",
    arch: str = "llama",
    merges: Sequence[tuple[str, str]] | None = None,
    scores: Sequence[float] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Path:
    """A file with a tokenizer and nothing else; `values`: further ones of tokenizer.ggml."""
    writer = GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    if merges is not None:
        writer.add_token_merges([" ".join(pair) for pair in merges])
    if scores is not None:
        writer.add_token_scores(list(scores))
    add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}
    for key, value in (values or {}).items():
        add[type(value)](f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level(path: Path, **values: Any) -> Path:
    tokens = [*VOCAB, *SPECIAL, *ADDED]
    tokens.sort(key=lambda token: VOCAB.get(token, len(VOCAB)))
    kinds = dict.fromkeys(SPECIAL, TokenType.CONTROL) | dict.fromkeys(ADDED, TokenType.USER_DEFINED)
    types = [int(kinds.get(token, TokenType.NORMAL)) for token in tokens]
    named = {f"ggml.{key}": value for key, value in values.items()}
    return write_tokenizer(path, tokens, types, merges=MERGES, values=named)


def byte_level_oracle(split: Any, *, ignore_merges: bool, normalizer: Any = None) -> Any:
    """The tokenizer as its maker's tokenizer.json describes it, in transformers."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=VOCAB, merges=MERGES, ignore_merges=ignore_merges)
    )
    backend.pre_tokenizer = split
    backend.normalizer = normalizer
    backend.decoder = tokenizers.decoders.ByteLevel()
    built = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    built.add_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    built.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
    return built


def check_equal(ours: Tokenizer, oracle: Any, texts: Sequence[str]) -> None:
    """Ids, with special tokens and without, and their text."""
    assert ours.vocab_size == len(oracle)
    for text in texts:
        for with_special in (True, False):
            expected = oracle.encode(text, add_special_tokens=with_special)
            assert ours.encode(text, add_special_tokens=with_special) == expected, repr(text)
        decoded = oracle.decode(expected, clean_up_tokenization_spaces=False)
        assert ours.decode(expected, skip_special_tokens=False) == decoded, repr(text)


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-r1-qwen"])
def test_qwen(pre: str, tmp_path: Path) -> None:
    """Against the class of transformers, which brings text to form C first."""
    vocab = {**VOCAB, **{token: len(VOCAB) + i for i, token in enumerate([*SPECIAL, *ADDED])}}
    oracle = transformers.Qwen2Tokenizer(vocab=vocab, merges=MERGES)
    oracle.add_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    oracle.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
    path = write_byte_level(tmp_path / "t.gguf", pre=pre, eos_token_id=len(VOCAB))
    ours = load_tokenizer(path)
    assert ours.eos_token_id == len(VOCAB) and ours.bos_token_id is None
    check_equal(ours, oracle, TEXTS + random_texts(200, seed=1))


@pytest.mark.parametrize(
    "pre", sorted(set(GGUF_PRE_TOKENIZER_SPLITS) - {"qwen35", "talkie", "qwen2"})
)
def test_cuts_are_those_of_transformers(pre: str) -> None:
    """Every name that transformers has for a cut, on text alone."""
    expected = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    ours = pre_tokenizer(pre)
    assert ours is not None
    for text in TEXTS + random_texts(60, seed=2):
        assert ours.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", ["llama-bpe", "dbrx", "tekken", "gpt-4o"])
def test_llama3_and_others(pre: str, tmp_path: Path) -> None:
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    oracle = byte_level_oracle(split, ignore_merges=pre in WHOLE_TOKENS)
    ours = load_tokenizer(write_byte_level(tmp_path / "t.gguf", pre=pre, add_bos_token=False))
    check_equal(ours, oracle, TEXTS + random_texts(200, seed=3))


# Of tokenizer.json of models whose names for a cut transformers does not have.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
OTHER_CUTS = {
    "glm4": _WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "seed-coder": _WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def test_the_cuts_of_deepseek_v3() -> None:
    """The three of its tokenizer.json."""
    marks = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rest = r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    patterns = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", f"{marks}|{words}|{rest}"]
    splits = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in patterns]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected = pre_tokenizers.Sequence([*splits, spelled])
    ours = pre_tokenizer("deepseek-v3")
    assert ours is not None
    texts = ["12345 度 日本語テスト abc's .env\n\n x=1;", *TEXTS, *random_texts(60, seed=6)]
    for text in texts:
        assert ours.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", OTHER_CUTS)
def test_cuts_of_single_models(pre: str) -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(OTHER_CUTS[pre]), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected = pre_tokenizers.Sequence([split, spelled])
    ours = pre_tokenizer(pre)
    assert ours is not None
    for text in TEXTS + random_texts(60, seed=5):
        assert ours.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", ["gpt-2", None, "exaone4", "smollm", "starcoder"])
def test_gpt2_and_digits(pre: str | None, tmp_path: Path) -> None:
    """As the tokenizer.json of GPT-2, and of SmolLM, where every digit stands alone."""
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("smollm", "starcoder"):
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    oracle = byte_level_oracle(split, ignore_merges=False)
    values = {} if pre is None else {"pre": pre}
    ours = load_tokenizer(write_byte_level(tmp_path / "t.gguf", **values))
    check_equal(ours, oracle, TEXTS + random_texts(200, seed=4))


def test_whole_tokens_are_not_merged(tmp_path: Path) -> None:
    """Llama 3 has tokens that its merges do not lead to."""
    tokens = [*VOCAB, "zqzq"]
    types = [1] * len(tokens)
    for pre, count in (("llama-bpe", 1), ("dbrx", 4)):
        path = write_tokenizer(
            tmp_path / f"{pre}.gguf", tokens, types, merges=MERGES, values={"ggml.pre": pre}
        )
        ids = load_tokenizer(path).encode("zqzq")
        assert len(ids) == count


def test_what_stands_around_a_text(tmp_path: Path) -> None:
    bos, _, eos = (len(VOCAB) + i for i in range(3))
    ids = {"bos_token_id": bos, "eos_token_id": eos}
    plain = load_tokenizer(write_byte_level(tmp_path / "0", pre="gpt-2", **ids)).encode("hello")
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"pre": "gpt-2", "add_bos_token": True}, [bos, *plain]),
        ({"pre": "gpt-2", "add_eos_token": True}, [*plain, eos]),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, [bos, *plain, eos]),
        ({"pre": "gpt-2"}, plain),
    ]
    for index, (values, expected) in enumerate(cases, 1):
        ours = load_tokenizer(write_byte_level(tmp_path / str(index), **values, **ids))
        assert ours.encode("hello") == expected
        assert ours.encode("hello", add_special_tokens=False) == plain
    by_default = load_tokenizer(write_byte_level(tmp_path / "9", pre="llama-bpe", **ids))
    assert by_default.encode("hello")[0] == bos  # llama.cpp does, where a file does not say
    assert by_default.special_ids == {bos, bos + 1, eos}


# SentencePiece ----------------------------------------------------------------------------------

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_vocabulary(first: list[str]) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a BPE in SentencePiece's spelling, the best merge first."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.train_from_iterator([*TEXTS, *CORPUS] * 2, trainers.BpeTrainer(vocab_size=600))
    learned = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    pieces = [token for token, _ in learned if len(token) > 1]
    letters = [token for token, _ in learned if len(token) == 1]
    tokens = [*first, *_BYTES, *pieces, *letters]
    scores = [0.0] * (len(first) + 256) + [-float(i) for i in range(len(pieces) + len(letters))]
    kinds = {"<unk>": TokenType.UNKNOWN}
    types = [int(kinds.get(token, TokenType.CONTROL)) for token in first]
    types += [int(TokenType.BYTE)] * 256
    types += [int(TokenType.NORMAL)] * (len(pieces) + len(letters))
    return tokens, scores, types


def test_llama_sentencepiece(tmp_path: Path) -> None:
    """Texts that begin with a space aside, as transformers reads the same file; those as
    SentencePiece, which puts a space before every text."""
    tokens, scores, types = sentencepiece_vocabulary(["<unk>", "<s>", "</s>"])
    ids = {"ggml.unknown_token_id": 0, "ggml.bos_token_id": 1, "ggml.eos_token_id": 2}
    path = write_tokenizer(
        tmp_path / "t.gguf", tokens, types, model="llama", scores=scores, values=ids
    )
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    ours = load_tokenizer(path)
    texts = [t for t in TEXTS + random_texts(200, seed=5) if not t.startswith((" ", "<s>"))]
    check_equal(ours, oracle, [text for text in texts if "<s>" not in text and "</s>" not in text])
    for text in ("hello", " hello", "  hello"):
        pieces = [tokens[i] for i in ours.encode(text, add_special_tokens=False)]
        assert "".join(pieces) == "▁" + text.replace(" ", "▁")
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_gemma(arch: str, tmp_path: Path) -> None:
    tokens, scores, types = sentencepiece_vocabulary(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    # Runs of spaces are tokens of their own, spelled as spaces.
    for count in (2, 3, 4, 8):
        if "▁" * count in tokens:
            tokens[tokens.index("▁" * count)] = " " * count
    ids = {"ggml.unknown_token_id": 3, "ggml.bos_token_id": 2, "ggml.eos_token_id": 1,
           "ggml.padding_token_id": 0, "ggml.add_space_prefix": False,
           "ggml.add_bos_token": True}  # fmt: skip
    path = write_tokenizer(
        tmp_path / "t.gguf", tokens, types, model="llama", arch=arch, scores=scores, values=ids
    )
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    check_equal(load_tokenizer(path), oracle, TEXTS + random_texts(200, seed=6))


def test_a_template_for_tools(tmp_path: Path) -> None:
    """The keys are those of llama.cpp's converter."""
    templates = {"chat_template": "D", "chat_template.tool_use": "T {{ tools }}"}
    types = [int(TokenType.NORMAL)] * len(VOCAB)
    path = write_tokenizer(tmp_path / "t.gguf", list(VOCAB), types, merges=MERGES, values=templates)
    tokenizer = load_tokenizer(path)
    user = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(user) == "D"
    assert tokenizer.render_chat(user, tools=[1]) == "T [1]"


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert not has_tokenizer(tmp_path / "t.gguf")
    with pytest.raises(ConfigError, match=r"'tokenizer\.ggml\.model' is missing"):
        load_tokenizer(tmp_path / "t.gguf")
