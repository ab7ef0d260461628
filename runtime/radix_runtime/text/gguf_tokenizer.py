"""The tokenizer of a GGUF file, built for the `tokenizers` library from the file's vocabulary.

A file names its algorithm (`tokenizer.ggml.model`): byte-level BPE, "gpt2", with the way in which
text is cut before that (`tokenizer.ggml.pre`), or SentencePiece's BPE, "llama"."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from ..errors import ConfigError
from ..gguf import GgufFile
from .gguf_splits import NORMALIZED, WHOLE_TOKENS, pre_tokenizer

log = logging.getLogger(__name__)

_SPECIAL = {  # the names of tokenizer_config.json: the keys of the file
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
_CONTROL = 3  # types of tokens: special ones, and those that the maker added; others are ordinary
_USER_DEFINED = 4
_SPACE = "\u2581"  # SentencePiece's
_GEMMA = ("gemma2", "gemma3")
_BYTE_LEVEL = "gpt2"
_SENTENCEPIECE = "llama"

Merges = list[tuple[str, str]]


class GgufVocabulary:
    """What a file says of its tokenizer. Raises ConfigError, which names the key that is wrong."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        self.model = self.value("model", str)
        if self.model not in (_BYTE_LEVEL, _SENTENCEPIECE):
            raise self.wrong("model", f"is {self.model!r}; supported: gpt2 and llama")
        self.tokens: Sequence[str] = self._strings("tokens")
        self.types: Sequence[int] = self._numbers("token_type", [1] * len(self.tokens))
        is_sentencepiece = self.model == _SENTENCEPIECE
        starts_by_default = is_sentencepiece or self.pre in WHOLE_TOKENS
        self.adds_bos = self.value("add_bos_token", bool, starts_by_default)
        self.adds_eos = self.value("add_eos_token", bool, False)
        self.adds_space = self.value("add_space_prefix", bool, True)
        self.special: dict[str, str] = {}
        for name, key in _SPECIAL.items():
            index = self.value(key, int, -1)
            if index >= len(self.tokens):
                raise self.wrong(key, f"is {index}, but there are {len(self.tokens)} tokens")
            if index >= 0:
                self.special[name] = self.tokens[index]

    @property
    def pre(self) -> str | None:
        """How text is cut before byte-level BPE; None where the file does not say."""
        found = self.value("pre", str, "")
        return found or None

    def merges(self) -> Merges | None:
        """The file's merges, None where it has none. Raises ConfigError."""
        if "tokenizer.ggml.merges" not in self._file.metadata:
            return None
        pairs = [tuple(merge.split(" ")) for merge in self._strings("merges")]
        wrong = [pair for pair in pairs if len(pair) != 2]
        if wrong:
            raise self.wrong("merges", f"holds {' '.join(wrong[0])!r}, expected two tokens")
        return [(pair[0], pair[1]) for pair in pairs]

    def scores(self) -> Sequence[float]:
        """The score of each token. Raises ConfigError."""
        return self._numbers("scores", None)

    def of_type(self, kind: int) -> list[str]:
        """The tokens of a type."""
        return [
            token for token, given in zip(self.tokens, self.types, strict=True) if given == kind
        ]

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of type `kind`; None for `default`: there must be one. Raises ConfigError."""
        found = self._file.metadata.get(f"tokenizer.ggml.{key}", default)
        if found is None:
            raise self.wrong(key, "is missing")
        if not isinstance(found, kind):
            raise self.wrong(key, f"is {str(found)[:60]!r}, expected {kind.__name__}")
        return found

    def wrong(self, key: str, what: str) -> ConfigError:
        """An error about a key."""
        return ConfigError(f"{self._file.path}: metadata key 'tokenizer.ggml.{key}' {what}")

    def _strings(self, key: str) -> list[str]:
        found = self.value(key, list)
        if not found:
            raise self.wrong(key, "is empty")
        return list(found)

    def _numbers(self, key: str, default: list[int] | None) -> Sequence[Any]:
        found = self._file.metadata.get(f"tokenizer.ggml.{key}", default)
        if found is None:
            raise self.wrong(key, "is missing")
        if len(found) != len(self.tokens):
            raise self.wrong(key, f"has {len(found)} entries for {len(self.tokens)} tokens")
        return list(found)


def gguf_tokenizer(file: GgufFile) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The backend, and what a tokenizer_config.json would say: the special tokens and the chat
    template. Raises ConfigError."""
    vocabulary = GgufVocabulary(file)
    build = _byte_level if vocabulary.model == _BYTE_LEVEL else _sentencepiece
    try:
        backend = build(vocabulary)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file.path}: cannot build its tokenizer: {error}") from None
    backend.add_special_tokens(_added(vocabulary.of_type(_CONTROL), special=True))
    _surround(backend, vocabulary)
    config: dict[str, Any] = dict(vocabulary.special)
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tool_use = file.metadata.get("tokenizer.chat_template.tool_use")
        named = {"default": template, "tool_use": tool_use}
        config["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    return backend, config


def _byte_level(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """GPT-2's algorithm. Tokens that the maker added are found in the text as they stand."""
    pre = vocabulary.pre
    if pre is None:
        log.warning("the GGUF file does not say how its tokenizer cuts text; GPT-2's way is taken")
    split = pre_tokenizer(pre)
    if split is None:
        raise vocabulary.wrong("pre", f"is {pre!r}, which is not supported")
    merges = vocabulary.merges()
    if merges is None:
        raise vocabulary.wrong("merges", "is missing")
    vocab = _by_token(vocabulary.tokens)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in WHOLE_TOKENS)
    )
    if pre in NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added(vocabulary.of_type(_USER_DEFINED), special=False))
    return backend


def _sentencepiece(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's algorithm: the two neighbours are merged whose token has the best score.
    Gemma's tokens stand in the order of their merges, whatever their scores, and its runs of spaces
    are spelled as such in files."""
    tokens = list(vocabulary.tokens)
    is_gemma = vocabulary.architecture in _GEMMA
    if is_gemma:
        tokens = [_SPACE * len(token) if set(token) == {" "} else token for token in tokens]
    merges = vocabulary.merges()
    if merges is None:
        scores = range(0, -len(tokens), -1) if is_gemma else vocabulary.scores()
        merges = _merges_of(tokens, scores)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=_by_token(tokens),
            merges=merges,
            unk_token=vocabulary.special.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spelled: list[Any] = [normalizers.Replace(" ", _SPACE)]
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space and not is_gemma:
        spelled.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.normalizer = normalizers.Sequence(spelled)
    backend.decoder = decoders.Sequence(steps)
    known = set(tokens)
    added = [token for token in vocabulary.of_type(_USER_DEFINED) if token in known]
    backend.add_tokens(_added(added, special=False))
    return backend


def _merges_of(tokens: Sequence[str], scores: Iterable[float]) -> Merges:
    """Every way to make a token of two others, the best token first."""
    ids = _by_token(tokens)
    found = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, pair) for pair in pairs]
    found.sort(key=lambda item: (item[0], len(item[1][0]), len(item[1][1])), reverse=True)
    return [pair for _, pair in found]


def _by_token(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _added(tokens: Iterable[str], *, special: bool) -> list[tokenizers.AddedToken]:
    return [
        tokenizers.AddedToken(token, normalized=False, special=special) for token in tokens if token
    ]


def _surround(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Puts BOS before a text and EOS after it, where the file says so."""
    special: Mapping[str, str] = vocabulary.special
    before = [special["bos_token"]] if vocabulary.adds_bos and "bos_token" in special else []
    after = [special["eos_token"]] if vocabulary.adds_eos and "eos_token" in special else []
    if not before and not after:
        return
    ids = [(token, backend.token_to_id(token)) for token in {*before, *after}]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *before, "$B:1", *after],
        special_tokens=ids,
    )
