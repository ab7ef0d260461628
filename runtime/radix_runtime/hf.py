"""Model directories in the Hugging Face layout: tokenizer, chat template, generation_config.

Imports no torch: the API and detokenizer processes live on this file. A tokenizer is a
`tokenizer.json`; transformers is asked only for models that have none.
"""

from __future__ import annotations

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
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import ConfigError, RequestError

Messages = Sequence[Mapping[str, Any]]

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"
DEMO_MODEL_NAME = "radix-demo"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_METADATA_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def resolve_model_path(name: str | None, *, weights: bool = True) -> Path:
    """The local path of a model: itself if it exists, else a snapshot of the hub name, else (None)
    the embedded demo model. `weights=False` fetches configuration and tokenizer only. Raises
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
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


class GenerationConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What generation_config.json says; None where it is silent. `top_k` -1 is off."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    def sampling_defaults(self) -> dict[str, float | int]:
        given: dict[str, Any] = msgspec.to_builtins(self)
        given.pop("eos_token_ids", None)
        return given


def load_generation_config(model_dir: Path) -> GenerationConfig:
    """Reads generation_config.json (absent: all None). Raises ConfigError on a wrong type."""
    raw = read_json(model_dir / "generation_config.json")
    raw["eos_token_ids"] = _eos_ids(raw)
    if raw.get("top_k") == 0:
        raw["top_k"] = -1
    try:
        return msgspec.convert(raw, GenerationConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"generation_config.json: {error}") from None


def eos_token_ids(model_dir: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a generation: the tokenizer's, generation_config's and config.json's."""
    found = list(load_generation_config(model_dir).eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found or _eos_ids(read_json(model_dir / "config.json"))))


def _eos_ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    try:
        ids = msgspec.convert(value, int | list[int] | None)
    except msgspec.ValidationError as error:
        raise ConfigError(f"eos_token_id: {error}") from None
    return [ids] if isinstance(ids, int) else ids or []


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template of the operator's, rendered in the immutable sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.globals.update(special_tokens, tools=None, documents=None)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(self, messages: Messages, *, add_generation_prompt: bool = True, **options: Any) -> str:
        """Raises RequestError `chat_template_error` with the template's own sentence."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **options)
        except TemplateError as error:
            message = f"the chat template refuses these messages: {error.message or ''}"[:200]
        except Exception:  # a template fails as Python does on shapes it does not expect
            message = "the chat template cannot render these messages"
        raise RequestError(400, "chat_template_error", message, param="messages")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class Tokenizer:
    """Text to ids and back over one `tokenizers.Tokenizer`. Thread-safe after construction.

    `vocab_size` counts added tokens; the model may have more embedding rows than that.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None, chat_template: str | None = None
    ) -> None:
        config = config or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        special = _special_tokens(config)
        self.bos_token_id = backend.token_to_id(special.get("bos_token", ""))
        self.eos_token_id = backend.token_to_id(special.get("eos_token", ""))
        added = backend.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._style = _byte_style(json.loads(backend.to_str()))
        self._bytes: dict[int, bytes] = {}
        # Llama-class tokenizers obey `add_bos_token` whatever tokenizer.json does.
        is_llama = str(config.get("tokenizer_class", "")).startswith(("Llama", "CodeLlama"))
        self._add_bos: list[int] = []
        if is_llama and config.get("add_bos_token") is True and self.bos_token_id is not None:
            if self.bos_token_id not in backend.encode("a").ids:
                self._add_bos = [self.bos_token_id]
        self.chat_template = ChatTemplate(chat_template, special) if chat_template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in `text` become their ids, as in transformers."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._add_bos + ids if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token are skipped."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Messages, **options: Any) -> str:
        """`options` are ChatTemplate.render's. Raises RequestError `chat_template_error`."""
        if self.chat_template is None:
            reason = "this model has no chat template"
            raise RequestError(400, "chat_template_error", reason, param="messages")
        return self.chat_template.render(messages, **options)

    def apply_chat_template(self, messages: Messages, **options: Any) -> list[int]:
        """Ids of the rendered messages. Raises as `render_chat` does."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The raw bytes that a token stands for (a special token: its text); b"" if unknown."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def id_to_text(self, token_id: int) -> str:
        return self.id_to_bytes(token_id).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**31 else None
        if token is None:
            return b""
        if self._style == "byte_level":
            return bytes(_BYTE_OF_CHAR[c] for c in token if c in _BYTE_OF_CHAR)
        if self._style == "sentencepiece":
            if byte := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(byte[1], 16)])
            return token.replace(_SPACE, " ").encode()
        return str(token).encode()

    @cached_property
    def max_token_bytes(self) -> int:
        """Length of the longest token: a text of more than k times this has more than k tokens."""
        return max((len(self.id_to_bytes(i)) for i in range(self.vocab_size)), default=1) or 1

    @cached_property
    def changes_length(self) -> bool:
        """Whether normalisation may shorten a text before it is cut into tokens."""
        return self._backend.normalizer is not None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name and text of the special tokens; the file has a text or an object with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _byte_style(definition: Mapping[str, Any]) -> str:
    kinds = set(_types(definition.get("decoder"))) or set(_types(definition.get("pre_tokenizer")))
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"} or definition["model"].get("byte_fallback"):
        return "sentencepiece"
    return "plain"


def _types(node: Any) -> Iterable[str]:
    if isinstance(node, dict):
        yield str(node.get("type"))
        for key in ("decoders", "pretokenizers"):
            for child in node.get(key, ()):
                yield from _types(child)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes byte b as chr(b) where that is printable, else as the next free
    character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(256 + i): b for i, b in enumerate(rest)})
    return table


_BYTE_OF_CHAR = _byte_alphabet()


def load_tokenizer(path: Path | str, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model directory; `chat_template` is the path of a template that replaces
    the model's own. Raises ConfigError."""
    directory = Path(path)
    config = {**read_json(directory / "special_tokens_map.json"), **read_json(directory / "tokenizer_config.json")}
    definition = directory / "tokenizer.json"
    sources = (definition.name, "*.model", "vocab*")
    if not any(file for pattern in sources for file in directory.glob(pattern)):
        raise ConfigError(f"{directory} has no tokenizer (tokenizer.json)")
    try:
        if definition.is_file():
            backend = tokenizers.Tokenizer.from_file(str(definition))
        else:
            backend = _convert_with_transformers(directory)
    except Exception as error:  # both libraries raise bare Exception
        raise ConfigError(f"cannot load the tokenizer of {directory}: {error}") from error
    return Tokenizer(backend, config, _template_source(directory, config, chat_template))


def _convert_with_transformers(directory: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    backend = getattr(fast, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("it has no fast form (tokenizer.json)")
    return tokenizers.Tokenizer.from_str(backend.to_str())


def _template_source(directory: Path, config: Mapping[str, Any], override: str | None) -> str | None:
    file = Path(override).expanduser() if override else directory / "chat_template.jinja"
    if override or file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template: {error}") from error
    found = config.get("chat_template")
    if found is None:
        found = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found if isinstance(found, str) else None
