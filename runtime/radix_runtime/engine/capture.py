"""Capture: records the parts of padded steps as graphs, before the engine is ready."""

from collections.abc import Callable

from ..device import Device, OutOfMemory
from ..distributed import CommunicatorAborted
from ..errors import ConfigError
from ..step_plan import StepPlan
from .padded_steps import PaddedSteps
from .row_state import RowState

_LEAST_GRAPH_BYTES = 1 << 20  # that a captured step is counted with


class Capture:
    """Runs steps that end in the dummy page, by `run`, and records their parts in `steps`. All
    ranks do so in the same order."""

    def __init__(
        self,
        steps: PaddedSteps,
        *,
        run: Callable[[StepPlan], object],
        state: RowState,
        device: Device,
    ) -> None:
        self._steps = steps
        self._run = run
        self._state = state
        self._device = device

    def everything(self) -> None:
        """Every part of every shape. Raises ConfigError where the model cannot be captured."""
        self._record([*self._steps.capture_plans(), *self._steps.candidate_plans()])

    def largest(self, token_bytes: int) -> int:
        """Records what takes the most memory, and measures. Returns how many bytes all others will
        take beside what has been taken then. `token_bytes`: of a token's hidden state, which the
        body of every shape keeps."""
        plans = self._steps.capture_plans()
        again = self._steps.candidate_plans()
        shapes = self._steps.shapes
        largest = [plans[0], plans[len(shapes.token_sizes)], *again[:1]]
        self._record([*largest, plans[-1]])
        before = self._device.memory().available
        self._record(plans[-2:-1])
        each = max(before - self._device.memory().available, _LEAST_GRAPH_BYTES)
        kept = sum(shapes.token_sizes) + sum(shapes.decode_sizes)
        return each * (len(plans) + len(again)) + kept * token_bytes

    def _record(self, plans: list[StepPlan]) -> None:
        graphs = self._steps.graphs
        graphs.capturing = True
        try:
            for plan in plans:
                self._state.reset(committed_len=int(plan.kv_len[0]) - 1)
                self._run(plan)
        except CommunicatorAborted:  # another rank says what it could not do
            raise
        except (RuntimeError, NotImplementedError) as error:
            if OutOfMemory.of(error) is not None:
                raise
            raise ConfigError(
                f"the model cannot be captured in CUDA graphs ({error}); see --disable-cuda-graph"
            ) from error
        finally:
            graphs.capturing = False
        self._state.reset()
        self._device.synchronize()
