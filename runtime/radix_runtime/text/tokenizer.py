"""Model directories in the Hugging Face layout: tokenizer, chat template, generation_config.
Imports no torch."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

from .errors import ConfigError, refusal

Messages = Sequence[Mapping[str, Any]]

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"
DEMO_MODEL_NAME = "radix-demo"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_METADATA_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte-level BPE writes byte b as chr(b) where that is printable, else as the next free character
# from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF_CHAR = {chr(b): b for b in _PRINTABLE}
_BYTE_OF_CHAR |= {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}


def resolve_model_path(name: str | None, *, weights: bool = True) -> Path:
    """A path, a hub name (fetched; `weights=False`: without them) or None: the demo model. Raises
    ConfigError."""
    if name is None:
        return DEMO_MODEL_DIR
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model {name!r} is neither a directory nor a hub name (owner/model)")
    from huggingface_hub import snapshot_download

    patterns = _METADATA_FILES + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client has no common base class of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"cannot fetch model {name!r} from the hub: {reason}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} if there is no such file. Raises ConfigError on anything else."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # msgspec's and json's errors are ValueErrors
        raise ConfigError(f"cannot read {path}: {error}") from error


class GenerationConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What generation_config.json says; None where it is silent. `top_k` -1 is off."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None

    def sampling_defaults(self) -> dict[str, float | int]:
        return {
            name: value
            for name, value in msgspec.to_builtins(self).items()
            if name != "eos_token_id"
        }

    @property
    def eos_token_ids(self) -> list[int]:
        return (
            [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id or []
        )


def load_generation_config(
    model_dir: Path, file: str = "generation_config.json"
) -> GenerationConfig:
    """What `file` says (absent: all None). Raises ConfigError on a wrong type."""
    raw = read_json(model_dir / file)
    if raw.get("top_k") == 0:
        raw["top_k"] = -1
    try:
        return msgspec.convert(raw, GenerationConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None


def eos_token_ids(model_dir: Path, tokenizer: "Tokenizer | None") -> tuple[int, ...]:
    """Every id that ends a generation: generation_config's, or else config.json's, and the
    tokenizer's."""
    files = ("generation_config.json", "config.json")
    found = next(
        filter(None, (load_generation_config(model_dir, file).eos_token_ids for file in files)), []
    )
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found = [*found, tokenizer.eos_token_id]
    return tuple(dict.fromkeys(found))


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template of the operator's, rendered in the immutable sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        env.globals.update(
            special_tokens, tools=None, documents=None, raise_exception=_raise_exception
        )
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = env.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(env.parse(source)))
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """Raises RequestError `chat_template_error` with the template's own sentence."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **options
            )
        except TemplateError as error:
            message = f"the chat template refuses these messages: {error.message or ''}"[:200]
        except Exception:  # a template fails as Python does on shapes it does not expect
            message = "the chat template cannot render these messages"
        raise refusal("chat_template_error", message, "messages")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class Tokenizer:
    """Text to ids and back; thread-safe. `vocab_size` counts added tokens; the model may have more
    rows than that."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        config, self._backend = config or {}, backend
        backend.no_truncation()
        backend.no_padding()
        self.changes_length = (
            backend.normalizer is not None
        )  # a text may shrink before it is cut into tokens
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        special = _special_tokens(config)
        self.bos_token_id = backend.token_to_id(special.get("bos_token", ""))
        self.eos_token_id = backend.token_to_id(special.get("eos_token", ""))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._style = _byte_style(json.loads(backend.to_str()))
        self._bytes = {index: token.content.encode() for index, token in added.items()}
        # Llama-class tokenizers obey `add_bos_token` whatever tokenizer.json does.
        is_llama = str(config.get("tokenizer_class", "")).startswith(("Llama", "CodeLlama"))
        adds_bos = (
            is_llama and config.get("add_bos_token") is True and self.bos_token_id is not None
        )
        missing = adds_bos and self.bos_token_id not in backend.encode("a").ids
        self._prefix: list[Any] = [self.bos_token_id] if missing else []
        self.chat_template = ChatTemplate(chat_template, special) if chat_template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in `text` become their ids, as in transformers."""
        # A batch, because `encode` of older versions holds the GIL.
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return self._prefix + ids if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token are skipped."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Messages, **options: Any) -> str:
        """`options` are ChatTemplate.render's. Raises RequestError `chat_template_error`."""
        if self.chat_template is None:
            raise refusal("chat_template_error", "this model has no chat template", "messages")
        return self.chat_template.render(messages, **options)

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The raw bytes that a token stands for (a special token: its text); b"" if unknown."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._token_bytes(token_id)
        return self._bytes[token_id]

    def id_to_text(self, token_id: int) -> str:
        return self.id_to_bytes(token_id).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**31 else None
        if token is None:
            return b""
        if self._style == "byte_level":
            return bytes(_BYTE_OF_CHAR[c] for c in token if c in _BYTE_OF_CHAR)
        if self._style == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()
        return str(token).encode()

    @cached_property
    def max_token_bytes(self) -> int:
        """Length of the longest token: a text of more than k times this has more than k tokens."""
        return max(1, *(len(self.id_to_bytes(i)) for i in range(self.vocab_size)))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    values = {
        name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _byte_style(definition: Mapping[str, Any]) -> str:
    steps = definition.get("decoder") or definition.get("pre_tokenizer")
    kinds = set(re.findall(r'"type": "(\w+)"', json.dumps(steps)))  # also those of a sequence
    if "ByteLevel" in kinds:
        return "byte_level"
    is_piece = kinds & {"ByteFallback", "Metaspace"} or definition["model"].get("byte_fallback")
    return "sentencepiece" if is_piece else "plain"


def load_tokenizer(path: Path | str, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a directory; `chat_template`: path of one that replaces the model's. Raises
    ConfigError."""
    directory = Path(path)
    config = read_json(directory / "special_tokens_map.json") | read_json(
        directory / "tokenizer_config.json"
    )
    definition = directory / "tokenizer.json"
    if not any(
        file
        for pattern in (definition.name, "*.model", "vocab*")
        for file in directory.glob(pattern)
    ):
        raise ConfigError(f"{directory} has no tokenizer (tokenizer.json)")
    try:
        if definition.is_file():
            backend = tokenizers.Tokenizer.from_file(str(definition))
        else:
            from transformers import AutoTokenizer  # only for models without a tokenizer.json

            tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
            if not hasattr(tokenizer, "backend_tokenizer"):
                raise ValueError("it has no fast form (tokenizer.json)")
            backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # both libraries raise bare Exception
        raise ConfigError(f"cannot load the tokenizer of {directory}: {error}") from error
    return Tokenizer(backend, config, _template_source(directory, config, chat_template))


def _template_source(
    directory: Path, config: Mapping[str, Any], override: str | None
) -> str | None:
    file = Path(override).expanduser() if override else directory / "chat_template.jinja"
    if override or file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template: {error}") from error
    found = config.get("chat_template") or read_json(directory / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found if isinstance(found, str) else None
