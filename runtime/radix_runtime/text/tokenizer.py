"""Tokenizer: text to token ids and back, over the `tokenizers` library."""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tokenizers

from ..config import ServerArgs
from ..errors import ConfigError, refusal
from ..gguf import is_gguf, open_gguf
from ..hub import read_json
from .chat_template import ChatTemplate, Messages, TemplateSources, find_templates
from .gguf_tokenizer import gguf_tokenizer
from .segments import SegmentedEncoder

logger = logging.getLogger(__name__)

_PROMPT_END = 64  # characters of a prompt that tell how its answer begins
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback
_IDS_ONLY = "--skip-tokenizer-init serves token ids without one"
NO_TEMPLATES = TemplateSources(None)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatPrompt(NamedTuple):
    """The ids of a conversation, and by what its answer is parsed: the end of its text, and the
    content of its last message where the answer goes on with that."""

    ids: list[int]
    end: str
    final: str = ""


class Tokenizer:
    """Text to ids and back, over a backend of the `tokenizers` library; thread-safe.

    `config` is the content of tokenizer_config.json, `templates` are Jinja sources. `vocab_size`
    counts added tokens, `base_size` does not; the model's embedding may have more rows.
    `special_ids` are the special tokens that `decode` leaves out, `bos_token_id` and `eos_token_id`
    None where there is none. `changes_length`: a normalizer may shorten a text before it is cut
    into tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        templates: TemplateSources = NO_TEMPLATES,
    ) -> None:
        config = config or {}
        special = _special_tokens(config)
        added = backend.get_added_tokens_decoder()
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.changes_length = backend.normalizer is not None
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.base_size = backend.get_vocab_size(with_added_tokens=False)
        self.bos_token_id = backend.token_to_id(special.get("bos_token", ""))
        self.eos_token_id = backend.token_to_id(special.get("eos_token", ""))
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.chat_template: ChatTemplate | None = None
        if templates.default:
            self.chat_template = ChatTemplate(
                templates.default, special_tokens=special, tool_source=templates.tool_use
            )
        self._style = _byte_style(json.loads(backend.to_str()))
        self._bytes = {index: token.content.encode() for index, token in added.items()}
        self._whole: dict[int, str] = {}
        self._segments = SegmentedEncoder(
            partial(self.encode, add_special_tokens=False), added.values()
        )
        self._prefix: list[int] = []
        if self.bos_token_id is not None and self._lacks_bos(config):
            self._prefix.append(self.bos_token_id)

    def _lacks_bos(self, config: Mapping[str, Any]) -> bool:
        """Whether BOS must be put before what the backend gives.

        Llama-class tokenizers obey `add_bos_token` of the config whatever tokenizer.json does.
        """
        is_llama = str(config.get("tokenizer_class", "")).startswith(("Llama", "CodeLlama"))
        if not is_llama or config.get("add_bos_token") is not True:
            return False
        return self.bos_token_id not in self._backend.encode("a").ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in `text` become their ids, as in transformers."""
        # A batch of one, because `encode` of older versions of the library holds the GIL.
        batch = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return self._prefix + ids if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token are skipped."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Messages, **options: Any) -> str:
        """The prompt of a conversation as text; `options` are those of ChatTemplate.render.

        Raises RequestError `chat_template_error`.
        """
        if self.chat_template is None:
            raise refusal("chat_template_error", "this model has no chat template", "messages")
        return self.chat_template.render(messages, **options)

    def encode_chat(self, text: str) -> ChatPrompt:
        """The prompt that `render_chat` has written, as token ids."""
        ids = self._segments.encode(text)
        return ChatPrompt(ids=ids, end=text[-_PROMPT_END:])

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[int]:
        """The prompt of a conversation as token ids; options and errors of `render_chat`."""
        return self.encode_chat(self.render_chat(messages, **options)).ids

    def added_beyond(self, vocab_size: int) -> list[str]:
        """The added tokens whose ids a model with `vocab_size` ids does not have."""
        added = self._backend.get_added_tokens_decoder()
        return [token.content for index, token in sorted(added.items()) if index >= vocab_size]

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its name, None if there is none."""
        return self._backend.token_to_id(token)

    def definition(self) -> str:
        """The content of its tokenizer.json."""
        return str(self._backend.to_str())

    def id_to_bytes(self, token_id: int) -> bytes:
        """The raw bytes that a token stands for (a special token: its text); b"" if unknown."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._token_bytes(token_id)
        return self._bytes[token_id]

    def whole_text(self, token_id: int) -> str:
        """The text of a token that is not special and has whole characters; "" for others."""
        text = self._whole.get(token_id)
        if text is None:
            text = ""
            if token_id not in self.special_ids:
                with suppress(UnicodeDecodeError):
                    text = self.id_to_bytes(token_id).decode()
            self._whole[token_id] = text
        return text

    def id_to_text(self, token_id: int) -> str:
        """The text of one token; U+FFFD where it holds only a part of a character."""
        return self.id_to_bytes(token_id).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int) -> bytes:
        is_valid = 0 <= token_id < 2**31  # the backend takes no others
        token = self._backend.id_to_token(token_id) if is_valid else None
        if token is None:
            return b""
        if self._style == "byte_level":
            return bytes(_BYTE_OF_CHAR[char] for char in token if char in _BYTE_OF_CHAR)
        if self._style == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()
        return str(token).encode()

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(1, *(len(self.id_to_bytes(i)) for i in range(self.vocab_size)))

    @property
    def max_token_length(self) -> int:
        """Characters that one token may stand for: a text of more than k times this has more than k
        tokens."""
        return self.max_token_bytes * (4 if self.changes_length else 1)


def has_tokenizer(model: Path) -> bool:
    """Whether a model's directory or GGUF file comes with a tokenizer."""
    if is_gguf(model):
        return open_gguf(model).metadata.get("tokenizer.ggml.model", "none") != "none"
    return any((model / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))


def load_tokenizer(path: Path | str, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a directory or of a GGUF file. `chat_template` is the path of a template
    that replaces the model's. Raises ConfigError."""
    directory = Path(path)
    if is_gguf(directory):
        backend, config = gguf_tokenizer(open_gguf(directory))
    else:
        backend = _load_backend(directory)
        config = {
            **read_json(directory / "special_tokens_map.json"),
            **read_json(directory / "tokenizer_config.json"),
        }
    templates = find_templates(directory, config, override=chat_template)
    try:
        return Tokenizer(backend, config=config, templates=templates)
    except ConfigError as error:  # of a template that does not parse
        raise ConfigError(f"{templates.file}: {error}") from error


def served_tokenizer(args: ServerArgs, vocab_size: int | None = None) -> Tokenizer | None:
    """The tokenizer of the settings; None with --skip-tokenizer-init. `vocab_size`: of the model
    that it is checked against. Raises ConfigError."""
    if args.skip_tokenizer_init:
        return None
    path = args.tokenizer_path or args.model_path or ""
    tokenizer = load_tokenizer(path, args.chat_template)
    if vocab_size is not None:
        check_vocabulary(tokenizer, path, vocab_size)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, path: Path | str, vocab_size: int) -> None:
    """Raises ConfigError where the tokenizer of `path` is that of a model with more ids than
    `vocab_size`. Single tokens that were added to it beyond the model's ids are told in the log:
    published models have them (Gemma 3 of 1B has one for images), and texts with them are
    refused."""
    if tokenizer.base_size > vocab_size:
        raise ConfigError(
            f"{path}: the tokenizer has {tokenizer.base_size} tokens, the model {vocab_size}: they "
            "do not belong together"
        )
    beyond = tokenizer.added_beyond(vocab_size)
    if beyond:
        logger.warning(
            "%s: %d tokens are beyond the %d ids of the model, which refuses texts with them: %s",
            path,
            len(beyond),
            vocab_size,
            ", ".join(beyond[:3]),
        )


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    patterns = ("tokenizer.json", "*.model", "vocab*")
    if not any(any(directory.glob(pattern)) for pattern in patterns):
        raise ConfigError(f"{directory} has no tokenizer (tokenizer.json); {_IDS_ONLY}")
    definition = directory / "tokenizer.json"
    try:
        if definition.is_file():
            return tokenizers.Tokenizer.from_file(str(definition))
        from transformers import AutoTokenizer  # only for models without a tokenizer.json

        slow = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        if not hasattr(slow, "backend_tokenizer"):
            raise ValueError("it has no fast form (tokenizer.json)")
        return tokenizers.Tokenizer.from_str(slow.backend_tokenizer.to_str())
    except Exception as error:  # both libraries raise bare Exception
        raise ConfigError(f"cannot load the tokenizer of {directory}: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of BOS, EOS, padding and unknown tokens, by name, as far as they are named."""
    texts = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _byte_style(definition: Mapping[str, Any]) -> Literal["byte_level", "sentencepiece", "plain"]:
    """How the tokens of a tokenizer.json spell bytes."""
    steps = definition.get("decoder") or definition.get("pre_tokenizer")
    kinds = set(re.findall(r'"type": "(\w+)"', json.dumps(steps)))  # also those of a sequence
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"} or definition["model"].get("byte_fallback"):
        return "sentencepiece"
    return "plain"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, as a table from character to byte.

    Byte-level BPE writes byte b as chr(b) where that is printable, else as the next free character
    from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {}
    free = 0x100
    for byte in range(256):
        if byte in printable:
            table[chr(byte)] = byte
        else:
            table[chr(free)] = byte
            free += 1
    return table


_BYTE_OF_CHAR = _byte_level_alphabet()
