"""What an engine runs with: settings as they were resolved, and what it holds in memory."""

import os

import torch

from .. import ops
from ..attention.registry import choose_attention_backend
from ..config import ServerArgs
from ..device import Device
from ..distributed import core_share
from ..layers.weight import weight_bytes
from ..memory.kv_layout import kv_dtype_named, kv_layout
from ..model_config import ModelConfig
from .device_defaults import with_device_defaults
from .model_runner import ModelRunner

Facts = dict[str, float | int | str | None]


def resolved_settings(args: ServerArgs, config: ModelConfig) -> Facts:
    """The settings that are decided at start, under their names in ServerArgs, with the values that
    they get. Loads nothing; `device` is cpu, cuda or rocm. Raises ConfigError."""
    args = with_device_defaults(args)
    device = Device.resolve(args.device, count=args.tp_size)
    dtype = config.dtype if args.dtype == "auto" else args.dtype
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    model_type = getattr(torch, dtype)
    cache_type = kv_dtype_named(kv_dtype, model_type)
    backend = choose_attention_backend(
        args.attention_backend, config, device, cache_type, args.page_size
    )
    kv_layout(  # whether the cache can have that type
        config.spec,
        kv_dtype=cache_type,
        dtype=model_type,
        page_size=args.page_size,
        ranks=args.tp_size,
    )
    return {
        "dtype": dtype,
        "kv_cache_dtype": kv_dtype,
        "device": device.kind,
        "num_threads": _num_threads(args.num_threads) if device.is_cpu else None,
        "attention_backend": backend,
        "context_length": config.context_length(args.context_length),
        "max_running_requests": args.max_running_requests,
        "chunked_prefill_size": args.chunked_prefill_size,
    }


def _num_threads(asked: int | None) -> int:
    """CPU threads of all ranks together; no more than CPUs, as `core_share` cuts and tells."""
    if asked is None:
        return core_share(0, 1)[0]
    return min(asked, len(os.sched_getaffinity(0)))


def _captured_sizes(runner: ModelRunner) -> Facts:
    """The largest steps that are replayed: rows of decode steps, tokens of steps with chunks; 0:
    none are."""
    shapes = runner.shapes
    if shapes is None or not runner.num_graphs:
        return {"captured_rows": 0, "captured_tokens": 0}
    return {
        "captured_rows": shapes.decode_sizes[-1],
        "captured_tokens": max(shapes.token_sizes, default=0),
    }


def engine_facts(runner: ModelRunner) -> Facts:
    """What a loaded rank 0 computes on and holds; sizes in bytes, of this rank."""
    device = runner.device
    name = None
    if not device.is_cpu:
        name = torch.cuda.get_device_properties(device.torch_device).name
    weights = weight_bytes(runner.model)
    kv_cache = sum(tensor.nbytes for tensor in runner.kv_pool.tensors())
    return {
        "device_name": name,
        "isa": ops.capabilities()["isa"] if device.is_cpu else None,
        "cuda_graphs": runner.num_graphs,
        **_captured_sizes(runner),
        "weight_bytes": weights,
        "kv_cache_bytes": kv_cache,
        # What the largest steps, CUDA graphs and their buffers keep.
        "step_bytes": max(0, runner.taken_memory - weights - kv_cache),
        "free_bytes": runner.free_memory,
    }
