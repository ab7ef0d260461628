"""What a model directory says about generation: sampling defaults and end-of-sequence ids."""

from pathlib import Path
from typing import Any

import msgspec

from ..config import ServerArgs
from ..errors import ConfigError
from ..hub import model_json
from ..sampling_params import SamplingParams
from .tokenizer import Tokenizer


class GenerationConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of generation_config.json that the runtime reads; None where the file has none.

    `top_k` -1 is off.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None

    def sampling_defaults(self) -> dict[str, float | int]:
        """The sampling parameters that the file sets, by the names of SamplingParams. Raises
        ConfigError on a value out of range, which every request would be refused for."""
        given = msgspec.to_builtins(self)
        given.pop("eos_token_id", None)
        for _, message in SamplingParams(**given).violations(vocab_size=1, max_n=1):
            hint = "--sampling-defaults openai leaves the file's values out"
            raise ConfigError(f"generation_config.json: {message} ({hint})")
        return given

    @property
    def eos_token_ids(self) -> list[int]:
        """The end-of-sequence ids as a list, empty if the file has none."""
        if self.eos_token_id is None:
            return []
        if isinstance(self.eos_token_id, int):
            return [self.eos_token_id]
        return self.eos_token_id


def load_generation_config(
    model_dir: Path, file: str = "generation_config.json"
) -> GenerationConfig:
    """Reads `file` of a model; all None if there is none. Raises ConfigError on a wrong
    type."""
    raw = model_json(model_dir, file)
    if raw.get("top_k") == 0:  # transformers' way to switch it off
        raw["top_k"] = -1
    try:
        return msgspec.convert(raw, GenerationConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None


def sampling_defaults(args: ServerArgs, model_dir: Path) -> dict[str, Any]:
    """The values of sampling parameters that a request leaves out: those of the model's
    generation_config.json, or none unless `args.sampling_defaults` is "model"."""
    if args.sampling_defaults != "model":
        return {}
    return dict(load_generation_config(model_dir).sampling_defaults())


def eos_token_ids(model_dir: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a generation: those of generation_config.json (of config.json where it
    names none), and the tokenizer's."""
    found = list(load_generation_config(model_dir).eos_token_ids)
    if not found:
        found = list(load_generation_config(model_dir, "config.json").eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(found))
