"""What is said when memory runs out: for what, how much there is, and which flag goes which way."""

from enum import Enum

from ..config import ServerArgs
from ..device import Device, OutOfMemory
from .kv_budget import used_share

_GIB = 1 << 30
_LEAST_SHARE = 0.05  # of memory: less is no advice


class Stage(Enum):
    """What memory was taken for; the value goes into the message."""

    WEIGHTS = "the weights"
    STEPS = "the largest steps"
    GRAPHS = "CUDA graphs"
    KV_CACHE = "the KV cache"
    SERVING = "a step"


def no_memory(args: ServerArgs, device: Device, stage: Stage, error: OutOfMemory) -> str:
    """One line for `error`. `args`: the settings, with what the device has decided."""
    memory = device.memory()
    wanted = f": {error.wanted}" if error.wanted else ""
    return (
        f"not enough memory on {device.torch_device} for {stage.value}{wanted}; "
        f"{memory.available / _GIB:.2f} of {memory.total / _GIB:.2f} GiB are free; "
        + " or ".join(_remedies(args, device, stage, error))
    )


def step_failure(args: ServerArgs, device: Device, error: BaseException) -> str:
    """Why a step failed with `error`, on one line."""
    failed_allocation = OutOfMemory.of(error)
    if failed_allocation is not None:
        return no_memory(args, device, Stage.SERVING, failed_allocation)
    return f"{type(error).__name__}: {error}"


def _remedies(args: ServerArgs, device: Device, stage: Stage, error: OutOfMemory) -> list[str]:
    chunk = f"lower --chunked-prefill-size (now {args.step_tokens})"
    rows = f"lower --max-running-requests (now {args.running_limit})"
    ranks = f"raise --tp-size (now {args.tp_size})"
    match stage:
        case Stage.WEIGHTS:
            return [ranks, rows, "quantize the weights (--quantization)"]
        case Stage.STEPS:
            return [chunk, rows, ranks]
        case Stage.GRAPHS:
            batch = args.cuda_graph_max_bs or args.running_limit
            graphs = f"lower --cuda-graph-max-bs (now {batch})"
            return [graphs, _lower_share(args, device, error), "set --disable-cuda-graph"]
        case Stage.KV_CACHE:
            if args.max_total_tokens is not None:
                return [f"lower --max-total-tokens (now {args.max_total_tokens})", rows]
            return [_lower_share(args, device, error), rows]
        case Stage.SERVING:
            return [_lower_share(args, device, error), chunk, rows]


def _lower_share(args: ServerArgs, device: Device, error: OutOfMemory) -> str:
    """`--mem-fraction-static` lowered by what the allocation lacked, where that is known."""
    total = device.memory().total
    share = used_share(args, device, total)
    lower = share - error.size / total if error.size else 0.0
    to = f" to {lower:.2f}" if _LEAST_SHARE <= lower < share - 0.005 else ""
    return f"lower --mem-fraction-static (now {share:.3g}){to}"
