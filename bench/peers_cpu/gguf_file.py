"""Writes a GGUF file with random weights of a Qwen3 or Llama shape and no vocabulary: what
llama.cpp needs to be timed.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.serving.model_shape import ModelShape

_MODEL_TYPES = ("llama", "qwen3")
_ALIGN = 32
_BLOCK = 32  # weights of a Q8_0 or Q4_0 block
_SUPER = 256  # of a Q6_K block
# ggml's numbers: F32, Q4_0, Q8_0, Q6_K, BF16.
_TYPES = {"f32": 0, "int4": 2, "int8": 8, "q6_k": 14, "bf16": 30}
# Of one weight.
_BYTES = {
    "f32": 4.0,
    "int4": 18 / _BLOCK,
    "int8": 34 / _BLOCK,
    "q6_k": 210 / _SUPER,
    "bf16": 2.0,
}


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # rows, columns
    kind: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape) * _BYTES[self.kind])


def write(path: Path, folder: Path, weights: str) -> int:
    """A model (qwen3 or llama) of the shape in `folder`/config.json with all matrices as `weights`
    (bf16, int8: Q8_0, int4: Q4_0, its vocabulary matrix Q6_K, as llama-quantize makes it). Returns
    the bytes of the matrices, which a decode step reads (the embedding is the head too). RoPE is
    the plain form: scaling takes no time of its own. Raises ValueError for another kind of model.
    """
    shape = ModelShape.read(folder)
    if shape.model_type not in _MODEL_TYPES:
        expected = " or ".join(_MODEL_TYPES)
        raise ValueError(f"{folder}: model_type is {shape.model_type}, expected {expected}")
    tensors = list(_tensors(shape, weights))
    fields = _fields(shape)
    with path.with_suffix(".new").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        for key, value in fields.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for tensor in tensors:
            sizes = tensor.shape[::-1]
            file.write(_string(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
            file.write(struct.pack("<IQ", _TYPES[tensor.kind], offset))
            offset += -(-tensor.nbytes // _ALIGN) * _ALIGN
        noise = np.random.default_rng(0).standard_normal(1 << 24, np.float32) * np.float32(0.02)
        for index, tensor in enumerate(tensors):
            file.write(b"\0" * (-file.tell() % _ALIGN))
            for rows in _pieces(tensor, noise, index):
                file.write(rows.tobytes())
    path.with_suffix(".new").rename(path)
    return sum(t.nbytes for t in tensors if len(t.shape) == 2)


def _fields(shape: ModelShape) -> dict[str, str | int | float]:
    kind = shape.model_type
    return {
        "general.architecture": kind,
        "general.name": "random",
        "tokenizer.ggml.model": "none",
        f"{kind}.context_length": shape.max_position_embeddings,
        f"{kind}.embedding_length": shape.hidden_size,
        f"{kind}.block_count": shape.num_layers,
        f"{kind}.feed_forward_length": shape.intermediate_size,
        f"{kind}.attention.head_count": shape.num_heads,
        f"{kind}.attention.head_count_kv": shape.num_kv_heads,
        f"{kind}.attention.key_length": shape.head_dim,
        f"{kind}.attention.value_length": shape.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": shape.rms_norm_eps,
        f"{kind}.rope.dimension_count": shape.head_dim,
        f"{kind}.rope.freq_base": shape.rope_theta,
        f"{kind}.vocab_size": shape.vocab_size,
    }


def _tensors(shape: ModelShape, weights: str) -> Iterator[_Tensor]:
    hidden = shape.hidden_size
    inner = shape.intermediate_size
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    embedding = "q6_k" if weights == "int4" else weights
    yield _Tensor(name="token_embd.weight", shape=(shape.vocab_size, hidden), kind=embedding)
    yield _Tensor(name="output_norm.weight", shape=(hidden,), kind="f32")
    matrices = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if shape.model_type == "qwen3":
        norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    for layer in range(shape.num_layers):
        for name, sizes in matrices.items():
            yield _Tensor(name=f"blk.{layer}.{name}.weight", shape=sizes, kind=weights)
        for name, size in norms.items():
            yield _Tensor(name=f"blk.{layer}.{name}.weight", shape=(size,), kind="f32")


def _pieces(tensor: _Tensor, noise: np.ndarray, index: int) -> Iterator[np.ndarray]:
    """The tensor's bytes, a few rows at a time; matrices are stretches of the one noise, each from
    another place."""
    if tensor.kind == "f32":
        yield np.ones(tensor.shape, np.float32)
        return
    left = int(np.prod(tensor.shape))
    at = index * 7919 * _BLOCK % (len(noise) // 2)
    while left:
        part = noise[at : at + left]
        yield _encode(part, tensor.kind)
        left -= len(part)
        at = 0


def _encode(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if kind == "q6_k":
        return _encode_q6_k(values.reshape(-1, 16, 16))
    blocks = values.reshape(-1, _BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    # Q8_0: a float16 step, 32 signed bytes. Q4_0: a float16 step, 32 values plus 8 in 16 bytes, the
    # first 16 low.
    step = (largest / (127 if kind == "int8" else -8)).astype(np.float16)
    scaled = blocks / np.where(step == 0, 1, step).astype(np.float32)
    if kind == "int8":
        steps = np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8)
    else:
        nibbles = np.clip(np.rint(scaled) + 8, 0, 15).astype(np.uint8)
        steps = nibbles[:, :16] | nibbles[:, 16:] << 4
    return np.concatenate([step.view(np.uint8).reshape(len(blocks), 2), steps], 1)


def _encode_q6_k(groups: np.ndarray) -> np.ndarray:
    """groups: [blocks, 16, 16]. A block: low 4 bits of the 256 weights, their high 2 bits, 16
    signed scales, a step."""
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2) / -32
    step = (np.abs(largest).max(1) / 127).astype(np.float16)
    unit = np.where(step == 0, 1, step).astype(np.float32)[:, None]
    scales = np.rint(largest / unit)
    codes = np.clip(np.rint(groups / np.where(scales == 0, 1, scales * unit)) + 32, 0, 63).astype(
        np.uint8
    )
    # Halves of 128 weights as four rows of 32: the low bits of rows 0 and 2, 1 and 3 share bytes,
    # the high of all four.
    rows = codes.reshape(-1, 2, 4, 32)
    low = rows[:, :, :2] & 15 | rows[:, :, 2:] << 4
    high = rows >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    count = len(codes)
    parts = [
        low.reshape(count, 128),
        high.reshape(count, 64),
        scales[..., 0].astype(np.int8).view(np.uint8),
    ]
    return np.concatenate([*parts, step.view(np.uint8).reshape(count, 2)], 1)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<II", 4, value)
