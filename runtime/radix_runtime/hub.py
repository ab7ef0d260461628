"""Model directories in the Hugging Face layout: where a name leads, and the JSON files in it."""

import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from .checkpoint import SINGLE_FILE, checkpoint_files
from .errors import ConfigError

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"
DEMO_MODEL_NAME = "radix-demo"

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_METADATA_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_GGUF_MAGIC = b"GGUF"
_TOKEN_HINT = "set HF_TOKEN to a token that has access, or run `hf auth login`"


def resolve_model_path(
    name: str | None, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The local directory of a model's configuration and tokenizer.

    `name` is a path, a name on the Hugging Face hub (`owner/model`, downloaded when it is not in
    the hub's cache) or None for the embedded demo model. Of the hub's models `revision` is the
    branch, tag or commit, and `download_dir` the cache; weights are fetched by `fetch_weights`.
    Raises ConfigError.
    """
    path = DEMO_MODEL_DIR if name is None else Path(name).expanduser()
    if name is None or path.exists():
        if not path.is_dir():
            raise ConfigError(_not_a_directory(path))
        if revision is not None:
            raise ConfigError(f"--revision is for models of the hub; {path} is a directory")
        return path
    if path.suffix == ".gguf":
        raise ConfigError(_not_a_directory(path))
    if name.startswith((".", "/", "~")):
        raise ConfigError(f"there is no directory {name}")
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model {name!r} is neither a directory nor a hub name (owner/model)")
    return _download(name, _METADATA_FILES, revision=revision, download_dir=download_dir)


def fetch_weights(name: str | None, folder: Path, *, download_dir: str | None = None) -> None:
    """Downloads the weights that `folder`, what `resolve_model_path(name)` gave, still lacks: the
    files of its index or model.safetensors, and no second copy of them. Raises ConfigError."""
    if name is None or Path(name).expanduser().exists():
        return
    files = [glob.escape(path.name) for path in checkpoint_files(folder)]
    # The folder of a snapshot is called after its commit: a branch may have moved meanwhile.
    _download(name, files, revision=folder.name, download_dir=download_dir)


def _download(
    name: str, patterns: Sequence[str], *, revision: str | None, download_dir: str | None
) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],  # folders hold the same model for other programs
        )
        return Path(folder)
    except Exception as error:  # the hub client's errors have no common base class
        needs_token = isinstance(error, errors.RepositoryNotFoundError)  # gated ones are, too
        hint = f" ({_TOKEN_HINT})" if needs_token else ""
        reason = f"{_in_one_line(error)}{hint}"
        raise ConfigError(
            f"cannot fetch model {name!r} from the hub (there is no such directory): {reason}"
        ) from error


def _in_one_line(error: Exception) -> str:
    """What the hub says of an error, without the number of the request."""
    text = re.sub(r"\(Request ID:[^)]*\)", "", str(error))
    return " ".join(text.split()) or type(error).__name__


def _not_a_directory(path: Path) -> str:
    kind = "a file"
    if path.suffix == ".gguf" or _starts_with(path, _GGUF_MAGIC):
        kind = "a GGUF file, a format that is not supported"
    return f"{path} is {kind}; a model is a directory with config.json and {SINGLE_FILE}"


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} if there is no such file. Raises ConfigError if it is none."""
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # errors of msgspec and json are ValueErrors
        raise ConfigError(f"cannot read {path}: {error}") from error
