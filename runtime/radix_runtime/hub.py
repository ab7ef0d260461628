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
from .gguf import is_gguf, open_gguf
from .gguf.architectures import read_model

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"
DEMO_MODEL_NAME = "radix-demo"

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# The folder of a repository in the hub's cache; its snapshots are called after their commits.
_CACHED_REPOSITORY = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<model>[\w.-]+)")
_METADATA_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_TOKEN_HINT = "set HF_TOKEN to a token that has access, or run `hf auth login`"


def resolve_model_path(
    name: str | None, *, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The local directory of a model's configuration and tokenizer, or its GGUF file.

    `name` is a path, a name on the Hugging Face hub (`owner/model`, downloaded when it is not in
    the hub's cache) or None for the embedded demo model. Of the hub's models `revision` is the
    branch, tag or commit, and `download_dir` the cache; weights are fetched by `fetch_weights`.
    Raises ConfigError.
    """
    path = DEMO_MODEL_DIR if name is None else Path(name).expanduser()
    if name is None or path.exists():
        if not path.is_dir() and not is_gguf(path):
            raise ConfigError(
                f"{path} is a file; a model is a directory with config.json and {SINGLE_FILE}, "
                "or a GGUF file"
            )
        if revision is not None:
            raise ConfigError(f"--revision is for models of the hub; {path} is on this machine")
        return path
    if path.suffix == ".gguf":
        raise ConfigError(f"there is no file {name}")
    if name.startswith((".", "/", "~")):
        raise ConfigError(f"there is no directory {name}")
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"model {name!r} is neither a directory nor a hub name (owner/model)")
    return _download(name, _METADATA_FILES, revision=revision, download_dir=download_dir)


def served_name(model_path: str | None) -> str:
    """What clients call a model that was given as `model_path`: a hub name as it is, a directory by
    its last part, a GGUF file by its name without the ending, and a snapshot in the hub's cache by
    the name that it has on the hub."""
    if model_path is None:
        return DEMO_MODEL_NAME
    folder = Path(model_path).expanduser()
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        return folder.stem
    if not folder.is_dir():
        return model_path
    folder = folder.resolve()
    repository = _CACHED_REPOSITORY.fullmatch(folder.parent.parent.name)
    if repository is not None and folder.parent.name == "snapshots":
        return f"{repository['owner']}/{repository['model']}"
    return folder.name or model_path


def fetch_weights(name: str | None, folder: Path, *, download_dir: str | None = None) -> None:
    """Downloads the weights that `folder`, what `resolve_model_path(name)` gave, still lacks: the
    files of its index or model.safetensors, and no second copy of them. Raises ConfigError."""
    if name is None or Path(name).expanduser().exists():
        return
    files = [glob.escape(path.name) for path in checkpoint_files(folder)]
    # The folder of a snapshot is called after its commit: a branch may have moved meanwhile.
    _download(name, files, revision=folder.name, download_dir=download_dir)


def lacks_weights(name: str | None, folder: Path) -> bool:
    """Whether `fetch_weights` would have something to download. Raises ConfigError."""
    if name is None or Path(name).expanduser().exists():
        return False
    return not all(path.is_file() for path in checkpoint_files(folder))


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


def model_json(model: Path, name: str) -> dict[str, Any]:
    """The JSON object in file `name` of a model's directory, {} if there is none. A GGUF file has
    config.json alone: what its metadata says under those names. Raises ConfigError."""
    if not is_gguf(model):
        return read_json(model / name)
    return dict(read_model(open_gguf(model)).config) if name == "config.json" else {}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} if there is no such file. Raises ConfigError if it is none."""
    if path.exists() and not path.is_file():  # a pipe would never come to its end
        raise ConfigError(f"cannot read {path}: it is not a file")
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
    except FileNotFoundError:
        return {}
    except RecursionError:
        raise ConfigError(f"cannot read {path}: it is nested too deep") from None
    except (OSError, ValueError) as error:  # errors of msgspec and json are ValueErrors
        raise ConfigError(f"cannot read {path}: {error}") from error
