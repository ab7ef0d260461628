"""A capture of steps that runs the recorded work again, for engines on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from radix_runtime.attention.torch_native import TorchNativeAttention
from radix_runtime.batch import ForwardBatch
from radix_runtime.engine.model_runner import ModelRunner

T = TypeVar("T")

# Host values of a batch that differ between steps of one shape: captured work must not read them.
_STEP_VALUES = (
    "num_samples",
    "num_sampling",
    "num_padding",
    "num_decode_rows",
    "rows_of_samples",
)


class Unreadable:
    """Fails whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("captured work reads a host value of one step")

    __index__ = __int__ = __bool__ = __len__ = __iter__ = __add__ = __radd__ = property(
        lambda self: self.__getattr__("operator")
    )


class FakeRecorder:
    """A graph is the recorded work, which sees the host values of the step it was recorded in."""

    def __init__(self) -> None:
        self.batch: ForwardBatch | None = None
        self.recorded = 0
        self.replayed = 0

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        batch = self.batch
        assert batch is not None
        held = dict(vars(batch))
        result = self._run(work, batch, held)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            again = self._run(work, batch, held)
            if isinstance(result, torch.Tensor):
                result.copy_(again)

        return replay, result

    def _run(self, work: Callable[[], T], batch: ForwardBatch, held: dict[str, Any]) -> T:
        """As a graph would: with the addresses and host values of the recorded step."""
        now = dict(vars(batch))
        frozen = {**held, **dict.fromkeys(_STEP_VALUES, Unreadable())}
        if batch.has_chunks:
            frozen["num_decode"] = Unreadable()
        vars(batch).update(frozen)
        try:
            return work()
        finally:
            vars(batch).update(now)


def install(fake: FakeRecorder, set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Makes engines on the CPU pad their steps and capture them by `fake`; `set_attribute` is
    `setattr`, or one that takes it back."""
    upload = ForwardBatch.upload

    def graph_recorder(runner: ModelRunner) -> FakeRecorder:
        return fake

    def seen_upload(batch: ForwardBatch, *args: Any, **options: Any) -> None:
        fake.batch = batch
        upload(batch, *args, **options)

    set_attribute(ForwardBatch, "upload", seen_upload)
    set_attribute(ModelRunner, "pads_steps", lambda runner, args: True)
    set_attribute(ModelRunner, "graph_recorder", graph_recorder)
    set_attribute(TorchNativeAttention, "capturable", True)
