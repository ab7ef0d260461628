"""How many KV pages a rank can have."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import ServerArgs
from ..device import Device, Memory
from ..errors import ConfigError
from ..hf import DEMO_MODEL_DIR, resolve_model_path

_CPU_SHARE = 0.25  # of what is available after loading, without --mem-fraction-static
_GPU_FRACTION = 0.88
_DEMO_LIMIT = 512 << 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVNeed:
    """`page_bytes` of this rank; `ranks_here` share the memory; `full_pages`: every running request
    at its longest, more is of no use; `before`: memory before any weights were loaded."""

    page_bytes: int
    ranks_here: int
    full_pages: int
    before: Memory


def kv_pages(args: ServerArgs, device: Device, need: KVNeed) -> int:
    """Pages of this rank's pool, measured after the weights were loaded: `--max-total-tokens`, or
    what the memory gives, but no more than can be used. Raises ConfigError with the numbers."""
    memory = device.memory()
    room = memory.available // need.ranks_here
    if args.max_total_tokens is not None:
        pages = -(-args.max_total_tokens // args.page_size)
        if pages * need.page_bytes > room:
            raise ConfigError(
                f"--max-total-tokens {args.max_total_tokens} needs "
                f"{pages * need.page_bytes // _MIB} MiB, {room // _MIB} MiB are available"
            )
        return pages
    budget = min(room, _budget(args, device, need, memory))
    pages = min(need.full_pages, budget // need.page_bytes)
    if pages < 1:
        raise ConfigError(
            f"no memory for a KV cache: {budget // _MIB} MiB are left after the weights, a page "
            f"takes {need.page_bytes / _MIB:.1f} MiB; see --mem-fraction-static and --page-size"
        )
    return pages


def _budget(args: ServerArgs, device: Device, need: KVNeed, memory: Memory) -> int:
    fraction = args.mem_fraction_static
    if not device.is_cpu:
        used = memory.total - memory.available
        return int(memory.total * (_GPU_FRACTION if fraction is None else fraction)) - used
    if fraction is not None:
        weights = need.before.available - memory.available
        return (int(need.before.available * fraction) - weights) // need.ranks_here
    budget = int(memory.available * _CPU_SHARE)
    if resolve_model_path(args.model_path, weights=False) == DEMO_MODEL_DIR:
        budget = min(budget, _DEMO_LIMIT)
    return budget // need.ranks_here
