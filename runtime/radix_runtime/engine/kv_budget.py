"""How many KV pages a rank can have."""

from ..config import ServerArgs
from ..device import Device, Memory
from ..errors import ConfigError
from ..hub import DEMO_MODEL_DIR

_CPU_SHARE = 0.25  # of what is available after loading, without --mem-fraction-static
_CPU_FULL = 4  # times what running requests can fill is enough on a CPU, with cached prefixes
# Spared on a GPU, without --mem-fraction-static: for penalties, masks and fragmentation.
_GPU_SPARE_SHARE = 0.12
_GPU_SPARE_MOST = 5 << 30  # bytes
_DEMO_LIMIT = 512 << 20  # bytes
_MIB = 1 << 20
_GIB = 1 << 30


def kv_pages(
    args: ServerArgs,
    device: Device,
    page_bytes: int,
    *,
    ranks: int,
    full_pages: int,
    before: Memory,
    reserved: int = 0,
) -> int:
    """Pages of this rank's pool, measured after the weights were loaded: `--max-total-tokens`, or
    what the memory gives (on a GPU, what the largest steps have left).

    `page_bytes` is what a page takes on this rank; `ranks` share the memory; `full_pages` hold
    every running request at its longest; `before` is the memory before any weights were loaded;
    `reserved` bytes of a GPU will be taken by others. Raises ConfigError with the numbers."""
    memory = device.memory()
    room = max(0, memory.available - reserved) // ranks
    if args.max_total_tokens is not None:
        return _requested_pages(args, page_bytes, room)
    if not device.is_cpu:
        budget = _gpu_budget(args, memory) - reserved
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
        text = _no_room(args, device, page_bytes, before=before, now=memory, reserved=reserved)
        raise ConfigError(text)
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
    used = memory.total - memory.available
    return int(memory.total * _gpu_fraction(args, memory.total)) - used


def used_share(args: ServerArgs, device: Device, total: int) -> float:
    """The share of the device's `total` bytes that is used."""
    if device.is_cpu:
        return _CPU_SHARE if args.mem_fraction_static is None else args.mem_fraction_static
    return _gpu_fraction(args, total)


def _gpu_fraction(args: ServerArgs, total: int) -> float:
    """The share of a GPU's `total` bytes that is used."""
    if args.mem_fraction_static is not None:
        return args.mem_fraction_static
    return 1 - min(_GPU_SPARE_SHARE, _GPU_SPARE_MOST / total)


def _no_room(
    args: ServerArgs,
    device: Device,
    page_bytes: int,
    *,
    before: Memory,
    now: Memory,
    reserved: int,
) -> str:
    """Who holds the memory that the KV cache lacks, and what would help."""
    model = max(0, before.available - now.available)
    if device.is_cpu:
        share = used_share(args, device, now.total)
        whole = now.available if args.mem_fraction_static is None else before.available
        of = f"{_gib(whole)} of available memory"
        holders = f"the model takes {_gib(model)}"
    else:
        whole = now.total
        share = _gpu_fraction(args, whole)
        of = f"the GPU's {_gib(whole)}"
        others = max(0, before.total - before.available)
        holders = (
            f"{_gib(others)} were in use before the model was loaded (by other processes and the "
            f"driver), the model and its largest steps take {_gib(model)}"
        )
        if reserved:
            holders += f", CUDA graphs {_gib(reserved)} (--cuda-graph-max-bs)"
    return (
        f"no memory for a KV cache: --mem-fraction-static {share:.3g} of {of} is "
        f"{_gib(int(share * whole))}; {holders}; a page takes {page_bytes / _MIB:.1f} MiB; "
        "raise --mem-fraction-static, free memory, or lower --chunked-prefill-size, "
        "--max-running-requests or --page-size"
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _is_demo_model(args: ServerArgs) -> bool:
    return args.model_path in (None, str(DEMO_MODEL_DIR))
