"""Writes a checkpoint of random bfloat16 weights with the names and the shards of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from bench.peers_cpu import ggml_blocks
from bench.peers_cpu.made_file import is_current

from .model_shape import ModelShape

_FAMILIES = ("llama", "qwen3")
_SHARD_BYTES = 5 * 10**9
_BYTES = 2  # of a bfloat16 number
_STRIDE = 7919  # numbers between the beginnings of two tensors in the random ones
_ONE = 0x3F80  # in bfloat16
_SHARDS = "model-*-of-*.safetensors"
_MAKER = "bench.serving load"  # in the index, so that no other checkpoint is written over


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * _BYTES


def write_checkpoint(folder: Path, model: Path) -> int:
    """A checkpoint in `folder` of the shape in `model`/config.json, unless it is there and newer
    than what it follows from; the bytes of its files. Raises ValueError for another kind of model,
    and where the folder holds a checkpoint that is not of this function."""
    shape = ModelShape.read(model)
    if shape.model_type not in _FAMILIES:
        expected = " or ".join(_FAMILIES)
        raise ValueError(f"{model}: model_type is {shape.model_type}, expected {expected}")
    config = json.loads((model / "config.json").read_text())
    index = folder / "model.safetensors.index.json"
    _check_ours(index)
    sources = (model / "config.json", Path(__file__), Path(ggml_blocks.__file__))
    if not is_current(index, *sources):
        folder.mkdir(parents=True, exist_ok=True)
        index.unlink(missing_ok=True)
        for old in folder.glob(_SHARDS):
            old.unlink()
        shutil.copy(model / "config.json", folder)
        _write(index, _shards(_tensors(shape, is_tied=bool(config.get("tie_word_embeddings")))))
    return sum(file.stat().st_size for file in folder.glob(_SHARDS))


def _check_ours(index: Path) -> None:
    if index.exists() and _maker(index) != _MAKER:
        raise ValueError(f"{index.parent} holds another checkpoint: remove it or name a --folder")


def _maker(index: Path) -> str | None:
    """None: another's."""
    maker: str | None = json.loads(index.read_text()).get("metadata", {}).get("maker")
    return maker


def _write(index: Path, shards: list[list[_Tensor]]) -> None:
    """The shards beside the index, and then the index."""
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(index.with_name(name), shard)
        places.update({tensor.name: name for tensor in shard})
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    facts = {"total_size": total, "maker": _MAKER}
    index.write_text(json.dumps({"metadata": facts, "weight_map": places}))


def _tensors(shape: ModelShape, *, is_tied: bool) -> Iterator[_Tensor]:
    hidden = shape.hidden_size
    inner = shape.intermediate_size
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    vocabulary = (shape.vocab_size, hidden)
    yield _Tensor("model.embed_tokens.weight", vocabulary)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_proj": (q, hidden),
        "self_attn.v_proj": (kv, hidden),
    }
    if shape.model_type == "qwen3":
        layer |= {"self_attn.k_norm": (shape.head_dim,), "self_attn.q_norm": (shape.head_dim,)}
    for number in range(shape.num_layers):
        for name, sizes in layer.items():
            yield _Tensor(f"model.layers.{number}.{name}.weight", sizes)
    yield _Tensor("model.norm.weight", (hidden,))
    if not is_tied:
        yield _Tensor("lm_head.weight", vocabulary)


def _shards(tensors: Iterator[_Tensor]) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: list[_Tensor]) -> None:
    header = {}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index, tensor in enumerate(tensors):
            _write_tensor(file, tensor, index)


def _write_tensor(file: BinaryIO, tensor: _Tensor, index: int) -> None:
    if len(tensor.shape) == 1:
        file.write(np.full(tensor.shape, _ONE, np.uint16).tobytes())
        return
    numbers = ggml_blocks.random_blocks("bf16").reshape(-1).view(np.uint16)
    left = int(np.prod(tensor.shape))
    at = index * _STRIDE % (len(numbers) // 2)
    while left:
        part = numbers[at : at + left]
        file.write(part.data)
        left -= len(part)
        at = 0
