"""Settings that follow the device where they are not given: the more memory, the larger a step."""

from dataclasses import replace

from ..config import ServerArgs
from ..device import Device

_GIB = 1 << 30
# Of a GPU with at least so many GiB: requests in a batch, and tokens in a step. Large steps keep a
# fast GPU busy; what they need beside the KV cache a small one does not have.
_BY_GPU_MEMORY = (
    (120, 256, 16384),  # H200, B200, MI300
    (60, 256, 8192),  # A100 and H100 of 80 GB
    (35, 256, 4096),  # A100 of 40 GB, L40S, A6000
    (20, 256, 2048),  # RTX 3090 and 4090, A10, L4
    (0, 128, 2048),
)


def with_device_defaults(args: ServerArgs) -> ServerArgs:
    """`args` with what was left to the device. On a CPU that is what ServerArgs itself says. Raises
    ConfigError when the device is not there."""
    device = Device.resolve(args.device, count=args.tp_size)
    if device.is_cpu:
        rows = args.running_limit
        tokens = args.step_tokens
    else:
        rows, tokens = _of_gpu(device.memory().total)
    return replace(
        args,
        max_running_requests=args.max_running_requests or rows,
        chunked_prefill_size=args.chunked_prefill_size or tokens,
    )


def _of_gpu(memory: int) -> tuple[int, int]:
    for least, rows, tokens in _BY_GPU_MEMORY:
        if memory >= least * _GIB:
            return rows, tokens
    raise AssertionError("the last row holds any GPU")
