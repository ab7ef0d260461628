"""Which FP8 format a chip knows; the numbers of the other are widened, see `float8`."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the chip's matrix units take this FP8 format. Triton's interpreter takes e4m3fn."""
    fnuz = dtype == torch.float8_e4m3fnuz
    if device.type != "cuda":
        return not fnuz
    if not torch.version.hip:
        return not fnuz and torch.cuda.get_device_capability(device) >= (8, 9)
    name = torch.cuda.get_device_properties(device).gcnArchName
    return name.startswith("gfx94") if fnuz else name.startswith(("gfx95", "gfx12"))
