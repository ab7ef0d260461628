"""Which piece of a kernel's work a program does on a chip of several dies.

AMD's MI300 and MI350 deal programs round robin over their dies (XCDs), each of which has an L2 of
its own. Pieces of work that read the same keys and values stand side by side, so that a die gets as
many of them in a row, instead of each die reading them for itself.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

# Compute units of one die.
_UNITS = {"gfx942": 38, "gfx950": 32}


@functools.cache
def count_dies(device: torch.device) -> int:
    """Dies of a GPU, or of the part of it that a partitioned GPU shows; 1 but on MI300 and
    MI350."""
    if torch.version.hip is None or device.type != "cuda":
        return 1
    facts = torch.cuda.get_device_properties(device)
    units = _UNITS.get(facts.gcnArchName.split(":")[0])
    return max(1, facts.multi_processor_count // units) if units else 1


def programs_for(pieces: int, dies: int) -> int:
    """How many programs do so many pieces of work: each die the same number."""
    return -(-pieces // dies) * dies


@triton.jit
def find_piece(program, pieces, DIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The piece that a program does; one past the last has nothing to do."""
    return program % DIES * tl.cdiv(pieces, DIES) + program // DIES
