"""The tensors of a checkpoint as the layers of a model call them: of their headers, and as they are
read."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ..checkpoint import checkpoint_files, open_checkpoint_file
from ..errors import ConfigError
from ..families.names import Drop, Rename, Rule, apply_rules
from ..families.tensor_views import TensorSource
from ..gguf import is_gguf, open_gguf
from ..layers.base import BuildContext
from ..model_config import ModelConfig
from ..quantization.gguf_tensors import gguf_tensors
from ..specs import ModelSpec

# By the names that safetensors has for them.
_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def open_checkpoint(
    config: ModelConfig, path: Path, ctx: BuildContext
) -> tuple["Checkpoint", BuildContext]:
    """The checkpoint at `path`, and `ctx` for a model that it fills. Reads headers alone; raises
    ConfigError."""
    rules = (*_kv_scales(config.spec), *ctx.quantization.names(), *config.names)
    checkpoint = Checkpoint(path, rules, is_tied=config.spec.tied_head, dtype=ctx.dtype)
    names = frozenset(tensor.name for tensor in checkpoint.headers())
    known = checkpoint.module_names()
    return checkpoint, replace(ctx, checkpoint_names=known, tensor_names=names)


def _kv_scales(spec: ModelSpec) -> Sequence[Rule]:
    """Rules about the scales of an FP8 cache that a checkpoint was calibrated with, which writers
    put beside the attention or the products of keys and values. Latent values have scales of their
    own."""
    if spec.keeps_latents:
        return (Drop(r"\.[kv]_scale$"),)
    return (
        Rename(r"\.([kv])_proj\.(\1_scale|output_scale)$", r".\1_scale"),
        Rename(r"\.self_attn\.attn\.([kv]_scale)$", r".self_attn.\1"),
    )


class CheckpointTensor(NamedTuple):
    """A tensor of a checkpoint. `file` and `key`: where it stands, with the shape `stored`;
    `name`: what the model's layers call it; `dtype`: of its elements, None where they are made of
    codes as they are read, and for a type that reading alone can judge."""

    file: Path
    key: str
    stored: list[int]
    name: str
    source: TensorSource
    dtype: torch.dtype | None

    def unusable(self, error: Exception) -> ConfigError:
        """The error of a tensor that does not fit the model."""
        notes = []
        if self.name != self.key:
            notes.append(f"here {self.name}")
        if self.source.get_shape() != self.stored:
            notes.append(f"{self.stored} in the file")
        note = f" ({', '.join(notes)})" if notes else ""
        return ConfigError(f"{self.file}: {self.key}{note} {error}")


class _Header:
    """What the header of a file tells of a tensor: its shape."""

    def __init__(self, shape: list[int]) -> None:
        self._shape = shape

    def get_shape(self) -> list[int]:
        """TensorSource.get_shape."""
        return self._shape

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("a header holds no elements")


class Checkpoint:
    """The tensors of a checkpoint after name rules; codes of a GGUF file that no rule is about are
    widened to `dtype`. Raises ConfigError when a file cannot be read, or holds other tensors than
    the index says."""

    def __init__(
        self, folder: Path, rules: Sequence[Rule], *, is_tied: bool, dtype: torch.dtype
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._rules = rules
        self._is_tied = is_tied
        self._elsewhere: set[str] = set()
        self._headers = [
            tensor._replace(source=_Header(tensor.source.get_shape())) for tensor in self.tensors()
        ]

    def module_names(self) -> dict[str, str]:
        """The checkpoint's name of each module that has another in the model."""
        names = {}
        for tensor in self._headers:
            ours = tensor.name.rpartition(".")[0]
            theirs = tensor.key.rpartition(".")[0]
            if ours != theirs:
                names[ours] = theirs
        return names

    def leave_out(self, modules: set[str]) -> None:
        """The tensors of these modules are passed over from now on."""
        self._elsewhere = modules

    @property
    def is_whole(self) -> bool:
        """Whether nothing is passed over."""
        return not self._elsewhere

    def headers(self) -> Iterator[CheckpointTensor]:
        """All of them, without their elements."""
        return (tensor for tensor in self._headers if self._is_here(tensor.name))

    def tensors(self) -> Iterator[CheckpointTensor]:
        """All of them, file by file; a source can be read until the next is taken."""
        if is_gguf(self._folder):
            for key, source in gguf_tensors(open_gguf(self._folder), self._dtype):
                yield from self._renamed(self._folder, key, source, None)
            return
        for path, expected in checkpoint_files(self._folder).items():
            with open_checkpoint_file(path, expected, framework="pt") as file:
                for key in file.keys():
                    piece = file.get_slice(key)
                    dtype = _DTYPES.get(piece.get_dtype())
                    yield from self._renamed(path, key, cast(Any, piece), dtype)

    def _renamed(
        self, path: Path, key: str, source: TensorSource, dtype: torch.dtype | None
    ) -> Iterator[CheckpointTensor]:
        # Views bring elements into another order: their type stays.
        stored = source.get_shape()
        whole = CheckpointTensor(
            file=path, key=key, stored=stored, name=key, source=source, dtype=dtype
        )
        found = apply_rules(
            self._rules, [(key, source)], fail=lambda _, error: whole.unusable(error)
        )
        for name, view in found:
            if self._is_here(name) and not _is_surplus(name, self._is_tied):
                yield whole._replace(name=name, source=view)

    def _is_here(self, name: str) -> bool:
        return name.rpartition(".")[0] not in self._elsewhere


def _is_surplus(name: str, is_tied: bool) -> bool:
    """What files carry beyond the model: RoPE frequencies, which follow from the config, and the
    head of a model whose head is its embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
