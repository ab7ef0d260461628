"""How many KV pages a rank can have."""

from __future__ import annotations

from ..config import ServerArgs
from ..device import Device, Memory
from ..errors import ConfigError
from ..hf import DEMO_MODEL_DIR, resolve_model_path

_CPU_SHARE = 0.25  # of what is available after loading, without --mem-fraction-static
_GPU_FRACTION = 0.88
_DEMO_LIMIT = 512 << 20
_MIB = 1 << 20


def kv_pages(
    args: ServerArgs, device: Device, page_bytes: int, *, ranks_here: int, full_pages: int, before: Memory
) -> int:
    """Pages of this rank's pool, measured after the weights were loaded: `--max-total-tokens`, or what the memory
    gives, but no more than can be used. Raises ConfigError with the numbers. `page_bytes` of this rank; `ranks_here`
    share the memory; `full_pages`: every running request at its longest; `before`: memory before any weights were
    loaded."""
    memory = device.memory()
    room = memory.available // ranks_here
    if args.max_total_tokens is not None:
        pages = -(-args.max_total_tokens // args.page_size)
        if pages * page_bytes > room:
            needs = f"needs {pages * page_bytes // _MIB} MiB, {room // _MIB} MiB are available"
            raise ConfigError(f"--max-total-tokens {args.max_total_tokens} {needs}")
        return pages
    fraction = args.mem_fraction_static
    if not device.is_cpu:
        used = memory.total - memory.available
        budget = int(memory.total * (fraction or _GPU_FRACTION)) - used
    elif fraction is not None:
        budget = int(before.available * fraction) - (before.available - memory.available)
    else:
        budget = int(memory.available * _CPU_SHARE)
        if resolve_model_path(args.model_path, weights=False) == DEMO_MODEL_DIR:
            budget = min(budget, _DEMO_LIMIT)
    budget = min(room, budget // ranks_here)
    if budget < page_bytes:
        raise ConfigError(
            f"no memory for a KV cache: {budget // _MIB} MiB are left after the weights, a page "
            f"takes {page_bytes / _MIB:.1f} MiB; see --mem-fraction-static and --page-size"
        )
    return min(full_pages, budget // page_bytes)
