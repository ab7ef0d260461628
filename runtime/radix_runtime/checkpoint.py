"""The files of a checkpoint: which they are, whether they can be read, how large they are.

Loads no torch, so that a command finds a broken download before it starts anything."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from .errors import ConfigError
from .gguf import is_gguf, open_gguf

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# By the names that safetensors has for them; the first of them that is found counts.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_HEAD = ".lm_head."
# Files of weights, also in formats that are not read.
_WEIGHT_FILES = ("model*.safetensors", "consolidated*", "pytorch_model*.bin", "*.gguf", INDEX_FILE)
_LFS_POINTER = b"version https://git-lfs"


class CheckpointSize(NamedTuple):
    """What a checkpoint holds: `parameters`, and the `bytes` of its files."""

    parameters: int
    bytes: int


class _Index(msgspec.Struct):
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


def checkpoint_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint with the tensors that the index names in each; None without an
    index. Raises ConfigError."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return {folder / SINGLE_FILE: None}
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from None
    names: dict[Path, set[str]] = {}
    for key, file in weight_map.items():
        if Path(file).name != file:
            raise ConfigError(f"{index} names a file outside of its directory: {file}")
        names.setdefault(folder / file, set()).add(key)
    return dict(sorted(names.items()))


def has_weights(path: Path) -> bool:
    """Whether there are weights at `path`, whether they can be loaded or not: a GGUF file, or a
    directory with those of a model."""
    if path.is_dir():
        return any(any(path.glob(pattern)) for pattern in _WEIGHT_FILES)
    return is_gguf(path)


def check_checkpoint(folder: Path) -> CheckpointSize:
    """Opens every file of a checkpoint, which may be one GGUF file, and reads its header. Raises
    ConfigError."""
    parameters = 0
    if is_gguf(folder):
        tensors = open_gguf(folder).tensors.values()
        parameters = sum(math.prod(entry.shape) for entry in tensors)
        return CheckpointSize(parameters=parameters, bytes=folder.stat().st_size)
    size = 0
    for path, expected in checkpoint_files(folder).items():
        size += path.stat().st_size if path.is_file() else 0
        with open_checkpoint_file(path, expected, framework="numpy") as file:
            for key in file.keys():
                parameters += math.prod(file.get_slice(key).get_shape())
    return CheckpointSize(parameters=parameters, bytes=size)


class StoredFacts(NamedTuple):
    """What a checkpoint's headers tell that its configuration may leave out. `dtype`: the compute
    type, None where there are only codes; `has_head`: a matrix for logits beside the embedding."""

    dtype: str | None
    has_head: bool


def stored_facts(folder: Path) -> StoredFacts | None:
    """By the floats of the first file that are no codes: where they differ, the type is one of 16
    bits, since routers and scales of such models are in float32. None without weights that can be
    read."""
    try:
        files = checkpoint_files(folder)
        path, expected = next(iter(files.items()), (folder, None))
        with open_checkpoint_file(path, expected, framework="numpy") as file:
            found = {file.get_slice(key).get_dtype() for key in file.keys()}
            names = set(file.keys()).union(*(keys or () for keys in files.values()))
    except ConfigError:
        return None  # told where the files are checked
    return StoredFacts(
        dtype=next((name for kind, name in _DTYPES.items() if kind in found), None),
        has_head=any(_HEAD in f".{name}" for name in names),
    )


@contextmanager
def open_checkpoint_file(path: Path, expected: set[str] | None, framework: str) -> Iterator[Any]:
    """One file of a checkpoint as `safe_open` gives it. Raises ConfigError when it cannot be read,
    or holds other tensors than `expected`, those of the index (None without one)."""
    if not path.is_file():
        raise ConfigError(_missing(path))
    try:
        with safe_open(path, framework=framework, device="cpu") as file:
            odd = set() if expected is None else expected.symmetric_difference(file.keys())
            if odd:
                raise ConfigError(f"{path}: the index and the file disagree about {min(odd)}")
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} {_why_unreadable(path, error)}") from None


def _missing(path: Path) -> str:
    folder = path.parent
    if path.name != SINGLE_FILE:
        return f"{path} does not exist, but {INDEX_FILE} names it: the download is incomplete"
    others = sorted(file.name for file in folder.glob("*.gguf")) or sorted(
        file.name for file in folder.glob("*.bin")
    )
    found = f"; {others[0]} is of another format" if others else ""
    return f"{folder} holds no {SINGLE_FILE} (other formats are not supported){found}"


def _why_unreadable(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "is a git-lfs pointer, not the weights themselves: run `git lfs pull`"
    return f"cannot be read: {error}"
