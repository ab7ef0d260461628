"""How text is cut before byte-level BPE, by the names that GGUF files have for it. Each is what the
models that it is named after have in their tokenizer.json."""

from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION}"
_SEED_CODER = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_PUNCTUATION}"

# Words of capitals, then words whose capitals, if any, come first.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_CASED_PUNCTUATION}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_PUNCTUATION}"
)

# Cut three times: numbers, then Chinese and Japanese, then the rest.
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
                 "lfm2", "jina-v5-nano")  # fmt: skip
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan")
_REGEX: dict[str | None, str | tuple[str, ...]] = {
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(_QWEN2_NAMES, _QWEN2),
    "tekken": _TEKKEN,
    "seed-coder": _SEED_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
}
_GPT2_NAMES = (None, "default", "gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais",
               "trillion", "granite-docling", "exaone4")  # fmt: skip
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")

# A piece of text that is a token is that token, whatever the merges make of it.
WHOLE_TOKENS = frozenset({*_LLAMA3_NAMES, "tekken"})
# Text is brought to Unicode's normal form C first.
NORMALIZED = frozenset(_QWEN2_NAMES) - {"stablelm2"}


def pre_tokenizer(name: str | None) -> Any:
    """The cut by its name in files; None for the name: GPT-2's, as in files of before 2024. None
    where the name is not known."""
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGIT_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name not in _REGEX:
        return None
    given = _REGEX[name]
    patterns = (given,) if isinstance(given, str) else given
    pieces = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*pieces, spelled])
