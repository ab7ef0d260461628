"""How ranks notice that they would not do the same: at the start, and before each step.

Collectives of ranks that disagree wait for ever, or mix tensors that do not belong together."""

import zlib
from collections.abc import Mapping

import numpy as np
import torch

from ..distributed import Communicator
from ..errors import ConfigError
from ..step_plan import EngineCommand, StepPlan, deserialize_plan, serialize_plan
from .draw_settings import ListedRows
from .model_runner import ModelRunner

_SEAL_BYTES = 4


def check_agreement(
    facts: Mapping[str, object], communicator: Communicator, device: torch.device
) -> None:
    """A collective. Raises ConfigError on every rank, with the names, unless the values of `facts`
    print alike on all of them."""
    if communicator.world_size == 1:
        return
    sums = [zlib.crc32(str(value).encode()) for value in facts.values()]
    of_ranks = communicator.all_gather(torch.tensor(sums, dtype=torch.int64, device=device)).cpu()
    differ = (of_ranks != of_ranks[0]).any(0).tolist()
    if any(differ):
        names = [name for name, is_other in zip(facts, differ, strict=True) if is_other]
        raise ConfigError(f"tensor-parallel ranks differ in {', '.join(names)}")


def shared_facts(runner: ModelRunner) -> dict[str, object]:
    """What must be the same on every rank, beside the plans, for their collectives to meet."""
    shapes = runner.shapes
    return {
        "pages of the KV cache": runner.kv_pool.num_pages,
        "rows": runner.max_rows,
        "padded decode steps": None if shapes is None else shapes.decode_sizes,
        "padded steps with chunks": None if shapes is None else shapes.token_sizes,
        "CUDA graphs": runner.num_graphs,
        "draws from candidates": runner.candidates is not None,
    }


class StepSeal:
    """Rank 0 seals each frame that it sends; another rank opens it, before it runs anything, and
    finds out if it has not had the same frames, or would not run this one in the same way.

    A seal is a checksum of all frames so far, and of how the steps in them are run: their shapes,
    and what is drawn from. Each end has an object of its own and sees every frame once."""

    def __init__(self, runner: ModelRunner, rank: int) -> None:
        self._rank = rank
        self._shapes = runner.shapes
        self._lists_candidates = runner.candidates is not None
        self._listed = ListedRows(runner.max_rows)
        self._sum = 0

    def close(self, work: StepPlan | EngineCommand) -> bytes:
        """The frame of `work` with its seal."""
        frame = serialize_plan(work)
        self._add(frame, work)
        return frame + self._sum.to_bytes(_SEAL_BYTES, "little")

    def open(self, sealed: bytes) -> StepPlan | EngineCommand:
        """What `close` was given on rank 0. Raises RuntimeError when it would not be the same work
        here."""
        frame = sealed[:-_SEAL_BYTES]
        work = deserialize_plan(frame)
        self._add(frame, work)
        if self._sum.to_bytes(_SEAL_BYTES, "little") != sealed[-_SEAL_BYTES:]:
            what = f"step {work.step_id}" if isinstance(work, StepPlan) else "a command"
            raise RuntimeError(
                f"rank {self._rank} would run {what} otherwise than rank 0, or has missed a step"
            )
        return work

    def _add(self, frame: bytes, work: StepPlan | EngineCommand) -> None:
        self._sum = zlib.crc32(frame, self._sum)
        if isinstance(work, StepPlan):
            self._sum = zlib.crc32(self._way(work).encode(), self._sum)

    def _way(self, plan: StepPlan) -> str:
        for state in plan.new_rows:
            self._listed.admit(state)
        shape = None if self._shapes is None else self._shapes.of(plan)
        rows = np.repeat(plan.rows, plan.num_samples)
        by_candidates = self._lists_candidates and self._listed.are_listed(rows)
        return f"{shape} {by_candidates and not plan.has_masks}"
