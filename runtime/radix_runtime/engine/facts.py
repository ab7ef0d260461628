"""What an engine runs with: settings as they were resolved, and what it holds in memory."""

import os
from typing import Any

import torch

from .. import ops
from ..attention.registry import choose_attention_backend
from ..config import ServerArgs
from ..device import Device
from ..distributed import core_share
from ..model_config import ModelConfig
from .model_runner import ModelRunner

Facts = dict[str, float | int | str | None]


def resolved_settings(args: ServerArgs, config: ModelConfig) -> Facts:
    """The settings that are decided at start, under their names in ServerArgs, with the values that
    they get. Loads nothing; `device` is cpu, cuda or rocm. Raises ConfigError."""
    device = Device.resolve(args.device, count=args.tp_size)
    dtype = config.dtype if args.dtype == "auto" else args.dtype
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    backend = choose_attention_backend(
        args.attention_backend, config, device, getattr(torch, kv_dtype), args.page_size
    )
    return {
        "dtype": dtype,
        "kv_cache_dtype": kv_dtype,
        "device": device.kind,
        "num_threads": _num_threads(args.num_threads) if device.is_cpu else None,
        "attention_backend": backend,
        "context_length": args.context_length or config.max_context,
        "max_queued_requests": args.queue_limit,
    }


def _num_threads(asked: int | None) -> int:
    """CPU threads of all ranks together; no more than CPUs, as `core_share` cuts and tells."""
    if asked is None:
        return core_share(0, 1)[0]
    return min(asked, len(os.sched_getaffinity(0)))


def engine_facts(runner: ModelRunner) -> Facts:
    """What a loaded rank 0 computes on and holds; sizes in bytes, of this rank."""
    device = runner.device
    name = None
    if not device.is_cpu:
        name = torch.cuda.get_device_properties(device.torch_device).name
    pool = runner.kv_pool
    return {
        "device_name": name,
        "isa": ops.capabilities()["isa"] if device.is_cpu else None,
        "weight_bytes": weight_bytes(runner.model),
        "kv_cache_bytes": sum(tensor.nbytes for tensor in (*pool.k, *pool.v)),
    }


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's tensors and packed weights; what two modules share counts once."""
    held: dict[int, Any] = {}
    for module in model.modules():
        for value in (*vars(module).values(), *module.parameters(False), *module.buffers(False)):
            if isinstance(value, (torch.Tensor, ops.PackedWeight)):
                held[id(value)] = value
    return sum(int(value.nbytes) for value in held.values())
