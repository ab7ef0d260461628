"""Random weights of another engine's model, drawn as our own dummy loader draws them.

What steps cost hangs on values where there are experts: a router whose logits are all alike sends
every token to the same few of them, and a step reads only those. Power, and with it the clock,
hangs on the bits that are multiplied.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import torch
from torch import nn

DEVIATION = 0.02  # of the elements of every matrix, once its codes are widened
FP8_DEVIATION = 32  # of codes in e4m3, far below the largest, 448
INT8_DEVIATION = 73  # of integers from -127 to 127, each as likely
INT4_DEVIATION = 4.6  # of integers from 0 to 15
MXFP4_EXPONENT = 120  # 2^-7 in e8m0: the floats of random codes deviate by 2.9

_KEPT = re.compile(r"[qkv]_(scale|zero_point)|prob_scale")  # of the KV cache
_WORD = 8  # codes of 4 bits in a word of 32
_AWQ_MIDDLE = 0x88  # two zero points in the middle of the range
_GPTQ_MIDDLE = 0x77  # the same, less one, as GPTQ stores them

_Fill = Callable[[nn.Module, str, torch.Tensor, torch.Generator], None]


def fill_parameters(model: nn.Module) -> None:
    """Gives every parameter of `model` random values that are valid for what its type and its name
    say it is: 1 for norms, a normal distribution for 16-bit matrices, biases and corrections of a
    router, random codes with scales of the same deviation for quantized ones. The values follow
    from the parameter's path and shape: ranks agree on what they all hold whole, and of what they
    share each has the same values. Buffers, and the scales and zero points of a KV cache, stay as
    they are. Raises ValueError for a parameter that is of no kind known here, or has no memory
    yet."""
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            path = f"{prefix}.{name}".removeprefix(".")
            if param.is_meta:
                raise ValueError(
                    f"{path} has no memory yet: quantization while loading has no random weights "
                    "here; the engine's own dummy format has"
                )
            if _KEPT.fullmatch(name):
                continue
            memory = param.data
            fill = _fill_of(name, memory.dtype)
            if fill is None:
                raise ValueError(f"{path}: no random values are known for {memory.dtype}")
            generator = torch.Generator(memory.device).manual_seed(zlib.crc32(path.encode()))
            fill(module, name, memory, generator)


def _fill_of(name: str, dtype: torch.dtype) -> _Fill | None:
    """What fills a parameter of this name and type; None where nothing does."""
    kind = re.sub(r"^w(13|2)_", "", name)  # experts' are named by their two products
    if kind in ("weight_scale", "weight_scale_inv", "scales"):
        return _powers if dtype is torch.uint8 else _scales
    if "scale" in kind or "zero_point" in kind:
        return None
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        return _floats
    return _CODES.get((kind, dtype))


def _floats(module: nn.Module, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
    if name == "weight" and memory.dim() == 1:  # of a norm
        memory.fill_(1)
    else:
        memory.normal_(0, DEVIATION, generator=generator)


def _fp8(module: nn.Module, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
    values = torch.empty(memory.shape, dtype=torch.bfloat16, device=memory.device)
    memory.copy_(values.normal_(0, FP8_DEVIATION, generator=generator))


def _int8(module: nn.Module, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
    memory.random_(-127, 128, generator=generator)


def _bytes(module: nn.Module, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
    memory.view(torch.uint8).random_(0, 256, generator=generator)


def _powers(module: nn.Module, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
    memory.fill_(MXFP4_EXPONENT)


def _scales(module: nn.Module, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith("scales"):
        _require_four_bits(module, name)
        memory.fill_(DEVIATION / INT4_DEVIATION)
        return
    codes: torch.Tensor = getattr(module, re.sub(r"_scale(_inv)?$", "", name))
    deviations = {torch.float8_e4m3fn: FP8_DEVIATION, torch.int8: INT8_DEVIATION}
    if codes.dtype not in deviations:
        raise ValueError(f"{name}: no deviation is known of codes in {codes.dtype}")
    memory.fill_(DEVIATION / deviations[codes.dtype])


def _middle(module: nn.Module, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
    is_gptq = hasattr(module, name.replace("qzeros", "g_idx"))
    memory.view(torch.uint8).fill_(_GPTQ_MIDDLE if is_gptq else _AWQ_MIDDLE)


def _groups(module: nn.Module, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
    inputs = memory.shape[-1]
    count = getattr(module, name.replace("g_idx", "scales")).shape[-2]
    memory.copy_(torch.arange(inputs, device=memory.device) // (inputs // count))


def _require_four_bits(module: nn.Module, name: str) -> None:
    """Raises ValueError unless the integers beside these scales have 4 bits."""
    scales = getattr(module, name)
    zeros = getattr(module, name.replace("scales", "qzeros"))
    if scales.shape[-1] != zeros.shape[-1] * _WORD:
        raise ValueError(f"{name}: random integers are known of 4 bits alone")


_CODES: dict[tuple[str, torch.dtype], _Fill] = {
    ("weight", torch.float8_e4m3fn): _fp8,
    ("weight", torch.int8): _int8,
    ("weight", torch.uint8): _bytes,  # two MXFP4 codes in each
    ("qweight", torch.int32): _bytes,
    ("qzeros", torch.int32): _middle,
    ("g_idx", torch.int32): _groups,
}
