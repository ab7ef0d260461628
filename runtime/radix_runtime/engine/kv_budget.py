"""How many KV pages a rank can have."""

from ..config import ServerArgs
from ..device import Device, Memory
from ..errors import ConfigError
from ..hub import DEMO_MODEL_DIR

_CPU_SHARE = 0.25  # of what is available after loading, without --mem-fraction-static
_CPU_FULL = 4  # times what running requests can fill is enough on a CPU, with cached prefixes
_GPU_FRACTION = 0.88
_DEMO_LIMIT = 512 << 20  # bytes
_MIB = 1 << 20


def kv_pages(
    args: ServerArgs,
    device: Device,
    page_bytes: int,
    *,
    ranks: int,
    full_pages: int,
    before: Memory,
) -> int:
    """Pages of this rank's pool, measured after the weights were loaded: `--max-total-tokens`, or
    what the memory gives (on a GPU, what the largest steps have left).

    `page_bytes` is what a page takes on this rank; `ranks` share the memory; `full_pages` hold
    every running request at its longest; `before` is the memory before any weights were loaded.
    Raises ConfigError with the numbers."""
    memory = device.memory()
    room = memory.available // ranks
    if args.max_total_tokens is not None:
        return _requested_pages(args, page_bytes, room)
    if not device.is_cpu:
        budget = _gpu_budget(args, memory)
    elif args.mem_fraction_static is not None:
        weights = max(0, before.available - memory.available)
        budget = int(before.available * args.mem_fraction_static) - weights
    else:
        most_useful = _CPU_FULL * full_pages * page_bytes * ranks
        budget = min(int(memory.available * _CPU_SHARE), most_useful)
    if args.mem_fraction_static is None and _is_demo_model(args):
        budget = min(budget, _DEMO_LIMIT)
    budget = min(room, budget // ranks)
    if budget < page_bytes:
        left = f"{budget // _MIB} MiB are left after the weights"
        page = f"a page takes {page_bytes / _MIB:.1f} MiB"
        flags = "see --mem-fraction-static and --page-size"
        raise ConfigError(f"no memory for a KV cache: {left}, {page}; {flags}")
    pages = budget // page_bytes
    return min(full_pages, pages) if args.disable_radix_cache else pages


def _requested_pages(args: ServerArgs, page_bytes: int, room: int) -> int:
    assert args.max_total_tokens is not None
    pages = -(-args.max_total_tokens // args.page_size)
    if pages * page_bytes > room:
        needs = f"needs {pages * page_bytes // _MIB} MiB, {room // _MIB} MiB are available"
        raise ConfigError(f"--max-total-tokens {args.max_total_tokens} {needs}")
    return pages


def _gpu_budget(args: ServerArgs, memory: Memory) -> int:
    fraction = args.mem_fraction_static or _GPU_FRACTION
    used = memory.total - memory.available
    return int(memory.total * fraction) - used


def _is_demo_model(args: ServerArgs) -> bool:
    return args.model_path in (None, str(DEMO_MODEL_DIR))
