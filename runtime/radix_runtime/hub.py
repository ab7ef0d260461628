"""Model directories in the Hugging Face layout: where a name leads, and the JSON files in it."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from .errors import ConfigError

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"
DEMO_MODEL_NAME = "radix-demo"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_METADATA_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHT_FILES = ["*.safetensors"]


def resolve_model_path(name: str | None, *, weights: bool = True) -> Path:
    """The local directory of a model.

    `name` is a path, a name on the Hugging Face hub (`owner/model`, downloaded when it is not in
    the hub's cache) or None for the embedded demo model. With `weights=False` only configuration
    and tokenizer files are downloaded. Raises ConfigError.
    """
    if name is None:
        return DEMO_MODEL_DIR
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model {name!r} is neither a directory nor a hub name (owner/model)")
    from huggingface_hub import snapshot_download

    patterns = _METADATA_FILES + _WEIGHT_FILES if weights else _METADATA_FILES
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client's errors have no common base class
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ConfigError(f"cannot fetch model {name!r} from the hub: {reason}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} if there is no such file. Raises ConfigError if it is none."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # errors of msgspec and json are ValueErrors
        raise ConfigError(f"cannot read {path}: {error}") from error
