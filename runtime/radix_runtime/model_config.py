"""ModelConfig: a model as its checkpoint's config.json describes it. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from .checkpoint import stored_facts
from .config_values import check_values
from .errors import ConfigError
from .families import Family, families, former_names, generic_family
from .families.names import Rule
from .families.rope import merged_rope_settings, rope_settings
from .gguf import is_gguf, open_gguf
from .gguf.architectures import read_model
from .hub import read_json
from .registry import Registry
from .specs import ModelSpec

_OVERRIDES = "--json-model-override-args"
# Model classes of other packages; only their names are asked for here (models/registry.py).
_model_classes: Registry[Any] = Registry(kind="architecture", group="radix.models", items={})
# Keys of a multimodal checkpoint's file that are also about its text.
_OUTER_KEYS = ("architectures", "quantization_config", "dtype", "torch_dtype")


class _Kind(msgspec.Struct, kw_only=True, frozen=True):
    """What config.json says of the kind of model. It is judged first: the names and types of all
    other keys depend on it."""

    architectures: list[str]
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model as its checkpoint's config.json describes it.

    `names`: the name rules of the checkpoint. `quantization`: its `quantization_config`, None where
    its weights are not quantized. `unknown_keys`: keys that the family does not know.
    `raw`: the keys of the file (of its `text_config` where it has one), for a model class of
    another package."""

    architecture: str
    spec: ModelSpec
    names: tuple[Rule, ...]
    quantization: Mapping[str, Any] | None = None
    unknown_keys: tuple[str, ...] = field(compare=False)
    raw: Mapping[str, Any] = field(compare=False)

    @classmethod
    def from_dir(cls, path: str | Path, overrides: str = "{}") -> "ModelConfig":
        """Reads config.json, or what a GGUF file says in its place, and merges `overrides`, a JSON
        object, into it; the RoPE settings of the two are merged key by key. A type that is not
        named is that of the weights, where they are there. Raises ConfigError, naming the key that
        is not supported."""
        if is_gguf(Path(path)):
            model = read_model(open_gguf(Path(path)))
            config = cls._from_file(model.config, overrides)
            return replace(config, names=(*model.rules, *config.names))
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError(_no_config(file))
        return cls._from_file(_with_stored(read_json(file), Path(path)), overrides)

    @classmethod
    def _from_file(cls, raw: Mapping[str, Any], overrides: str) -> "ModelConfig":
        changes = _parse_overrides(overrides)
        known = _family(_architecture({**raw, **changes})).keys.__struct_encode_fields__
        unknown = sorted(set(changes) - {*known, *_Kind.__struct_encode_fields__})
        if unknown:
            raise ConfigError(f"{_OVERRIDES}: {', '.join(unknown)} would change nothing")
        text = _text_keys(raw)
        check_values({**text, **changes})
        rope = merged_rope_settings(text, changes)
        return cls.from_dict({**text, **changes, "rope_scaling": None, "rope_parameters": rope})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """From the keys of a config.json. Raises ConfigError, naming the key that is missing, has
        the wrong type or is not supported."""
        architecture = _architecture(raw)
        family = _family(architecture)
        text = _text_keys(raw)
        check_values(text)
        text["rope_parameters"] = rope_settings(text)
        keys = family.convert(text)
        return cls(
            architecture=architecture,
            spec=family.read(keys),
            names=tuple(family.names(keys)),
            quantization=text.get("quantization_config"),
            unknown_keys=tuple(sorted(family.unknown_keys(text))),
            raw=text,
        )

    @property
    def vocab_size(self) -> int:
        """How many ids the model knows."""
        return self.spec.vocab_size

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self.spec.num_layers

    @property
    def dtype(self) -> str:
        """The type that the checkpoint names: bfloat16, float16 or float32."""
        return self.spec.dtype

    @property
    def max_context(self) -> int:
        """The longest sequence, in tokens, that the positions of the model reach."""
        return self.spec.max_context

    def context_length(self, asked: int | None) -> int:
        """How many tokens a request may have: `asked` (--context-length), or as many as the model
        takes. Raises ConfigError where these are fewer."""
        if asked is not None and asked > self.max_context:
            limit = f"the model's {self.max_context} positions"
            raise ConfigError(f"--context-length {asked} exceeds {limit}")
        return asked or self.max_context

    def check_tp(self, tp_size: int) -> None:
        """Raises ConfigError when the model cannot be split over `tp_size` ranks."""
        self.spec.check_tp(tp_size)


def _with_stored(raw: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """With what the weights tell where the file leaves it out. Whether a multimodal model has a
    head of its own depends on two classes of transformers, whose defaults differ."""
    facts = stored_facts(folder)
    if facts is None:
        return raw
    text = _text_keys(raw)
    found: dict[str, Any] = {}
    if text.get("dtype") is None and text.get("torch_dtype") is None:
        found["torch_dtype"] = facts.dtype
    if "text_config" in raw and text.get("tie_word_embeddings") is None:
        found["tie_word_embeddings"] = not facts.has_head
    return {**raw, **found}


def _no_config(file: Path) -> str:
    folder = file.parent
    found = sorted(folder.glob("*.gguf"))
    if found:
        return f"{folder} has no {file.name}; name the GGUF file itself, such as {found[0]}"
    return f"{file} does not exist"


def _parse_overrides(overrides: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(overrides, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{_OVERRIDES} must be a JSON object: {error}") from None


def _architecture(raw: Mapping[str, Any]) -> str:
    """The architecture of a checkpoint that can be served. Raises ConfigError."""
    given = {key: value for key, value in raw.items() if value is not None}
    try:
        kind = msgspec.convert(given, _Kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from None
    known = [*families.names(), *_model_classes.names()]
    found = [name if name in known else former_names.get(name, name) for name in kind.architectures]
    if len(found) != 1 or found[0] not in known:
        names = ", ".join(known)
        raise ConfigError(
            f"config.json: architecture {kind.architectures} is not supported; supported: {names}"
        )
    return found[0]


def _family(architecture: str) -> Family[Any]:
    if architecture in families.names():
        return families.get(architecture)
    return generic_family


def _text_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys about text: all of them, or those of a multimodal checkpoint's `text_config`."""
    if not isinstance(raw.get("text_config"), dict):
        return dict(raw)
    outer = {key: raw[key] for key in _OUTER_KEYS if raw.get(key) is not None}
    if raw.get("tie_word_embeddings") is not None:
        outer["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return {**raw["text_config"], **outer}
