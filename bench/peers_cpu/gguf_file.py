"""Writes a GGUF file with random weights of a Qwen3 or Llama shape and no vocabulary: what
llama.cpp needs to be timed.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.serving.model_shape import ModelShape

from .ggml_blocks import TYPES, random_blocks
from .made_file import is_current

# What the file calls each kind of model.
_FAMILIES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_ALIGN = 32
_STRIDE = 7919  # blocks between the beginnings of two tensors in the random ones
# Of all matrices, and of the vocabulary's, as llama-quantize makes them; Q4_K_M has a rule.
_KINDS = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
MIXED = "q4_k_m"
WEIGHTS = (*_KINDS, MIXED)
_MIXED_SIX = ("attn_v", "ffn_down", "ffn_down_exps")  # Q6_K in some layers of a Q4_K_M file


class StepBytes(NamedTuple):
    """What a decode step reads: matrices that every step reads, and all layers' experts."""

    dense: int
    experts: int


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # rows, columns; before them experts
    kind: str

    @property
    def blocks(self) -> int:
        return int(np.prod(self.shape)) // TYPES[self.kind].weights

    @property
    def nbytes(self) -> int:
        return self.blocks * TYPES[self.kind].nbytes


def written(path: Path, folder: Path, weights: str) -> StepBytes:
    """As `write`, unless the file is there and newer than what it follows from."""
    blocks = Path(__file__).with_name("ggml_blocks.py")
    if is_current(path, folder / "config.json", Path(__file__), blocks):
        return _step_bytes(list(_tensors(ModelShape.read(folder), weights)))
    return write(path, folder, weights)


def write(path: Path, folder: Path, weights: str) -> StepBytes:
    """A model (llama, qwen3 or qwen3_moe) of the shape in `folder`/config.json with its matrices as
    `weights`: bf16, int8: Q8_0, int4: Q4_0 with a vocabulary matrix in Q6_K, q4_k_m: Q4_K and Q6_K,
    all as llama-quantize makes them. Returns the bytes that a decode step reads (the embedding is
    the head too). RoPE is the plain form: scaling takes no time of its own. Raises ValueError for
    another kind of model, and for rows that are no whole blocks.
    """
    shape = ModelShape.read(folder)
    if shape.model_type not in _FAMILIES:
        expected = " or ".join(_FAMILIES)
        raise ValueError(f"{folder}: model_type is {shape.model_type}, expected {expected}")
    tensors = list(_tensors(shape, weights))
    for tensor in tensors:
        if tensor.shape[-1] % TYPES[tensor.kind].weights:
            raise ValueError(f"{folder}: rows of {tensor.name} are no whole {tensor.kind} blocks")
    fields = _fields(shape)
    partial = path.with_suffix(f".{os.getpid()}")
    with partial.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        for key, value in fields.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for tensor in tensors:
            sizes = tensor.shape[::-1]
            file.write(_string(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            file.write(struct.pack("<IQ", TYPES[tensor.kind].number, offset))
            offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
        for index, tensor in enumerate(tensors):
            file.write(b"\0" * (-file.tell() % _ALIGN))
            for part in _pieces(tensor, index):
                file.write(part.data)
    partial.rename(path)
    return _step_bytes(tensors)


def _step_bytes(tensors: list[_Tensor]) -> StepBytes:
    return StepBytes(
        dense=sum(each.nbytes for each in tensors if len(each.shape) == 2),
        experts=sum(each.nbytes for each in tensors if len(each.shape) == 3),
    )


def _fields(shape: ModelShape) -> dict[str, str | int | float]:
    family = _FAMILIES[shape.model_type]
    fields: dict[str, str | int | float] = {
        "general.architecture": family,
        "general.name": "random",
        "tokenizer.ggml.model": "none",
        f"{family}.context_length": shape.max_position_embeddings,
        f"{family}.embedding_length": shape.hidden_size,
        f"{family}.block_count": shape.num_layers,
        f"{family}.feed_forward_length": shape.intermediate_size,
        f"{family}.attention.head_count": shape.num_heads,
        f"{family}.attention.head_count_kv": shape.num_kv_heads,
        f"{family}.attention.key_length": shape.head_dim,
        f"{family}.attention.value_length": shape.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": shape.rms_norm_eps,
        f"{family}.rope.dimension_count": shape.head_dim,
        f"{family}.rope.freq_base": shape.rope_theta,
        f"{family}.vocab_size": shape.vocab_size,
    }
    if shape.experts:
        fields[f"{family}.expert_count"] = shape.experts
        fields[f"{family}.expert_used_count"] = shape.experts_per_token
        fields[f"{family}.expert_feed_forward_length"] = shape.expert_size
    return fields


def _tensors(shape: ModelShape, weights: str) -> Iterator[_Tensor]:
    hidden = shape.hidden_size
    embedding = "q6_k" if weights in ("int4", MIXED) else _KINDS[weights]
    yield _Tensor(name="token_embd.weight", shape=(shape.vocab_size, hidden), kind=embedding)
    yield _Tensor(name="output_norm.weight", shape=(hidden,), kind="f32")
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if shape.model_type.startswith("qwen3"):
        norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    for layer in range(shape.num_layers):
        for name, sizes in _matrices(shape).items():
            kind = _kind(weights, name, layer=layer, layers=shape.num_layers)
            yield _Tensor(name=f"blk.{layer}.{name}.weight", shape=sizes, kind=kind)
        if shape.experts:  # llama-quantize leaves routers as they are
            router = f"blk.{layer}.ffn_gate_inp.weight"
            yield _Tensor(name=router, shape=(shape.experts, hidden), kind="f32")
        for name, size in norms.items():
            yield _Tensor(name=f"blk.{layer}.{name}.weight", shape=(size,), kind="f32")


def _matrices(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Those of a layer that are quantized."""
    hidden = shape.hidden_size
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    attention = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
    }
    if shape.experts:
        inner = shape.expert_size
        return {
            **attention,
            "ffn_gate_exps": (shape.experts, inner, hidden),
            "ffn_up_exps": (shape.experts, inner, hidden),
            "ffn_down_exps": (shape.experts, hidden, inner),
        }
    inner = shape.intermediate_size
    return {
        **attention,
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }


def _kind(weights: str, name: str, *, layer: int, layers: int) -> str:
    if weights != MIXED:
        return _KINDS[weights]
    eighth = layers // 8
    has_more_bits = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "q6_k" if name in _MIXED_SIX and has_more_bits else "q4_k"


def _pieces(tensor: _Tensor, index: int) -> Iterator[np.ndarray]:
    """The tensor's bytes, a few rows at a time; matrices are stretches of the same random blocks,
    each from another place."""
    if len(tensor.shape) == 1:
        yield np.ones(tensor.shape, np.float32)
        return
    blocks = random_blocks(tensor.kind)
    left = tensor.blocks
    at = index * _STRIDE % (len(blocks) // 2)
    while left:
        part = blocks[at : at + left]
        yield part
        left -= len(part)
        at = 0


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)
