"""The masks of a step on their way into its draw."""

import numpy as np

from ..step_plan import StepPlan


def check_masks(plan: StepPlan, masks: np.ndarray, late: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError unless `masks` are uint32 [S, ceil(V / 32)] and `late`, bool [S], names
    only samples of decode entries with one sample."""
    wanted = (int(plan.num_samples.sum()), -(-vocab_size // 32))
    if masks.dtype != np.uint32 or masks.shape != wanted:
        found = f"{masks.dtype} {list(masks.shape)}"
        raise ValueError(f"they are {found}, the step needs uint32 {list(wanted)}")
    may_be_late = plan.num_samples == 1
    may_be_late[plan.num_decode :] = False
    if late.shape != wanted[:1] or (late & ~np.repeat(may_be_late, plan.num_samples)).any():
        raise ValueError("a sample is late that must not be")


def draw_masks(masks: np.ndarray, late: np.ndarray | None) -> np.ndarray:
    """int32 [S, words] for the draw: a late row is allowed nothing, so that it draws -1 and stays
    where it is."""
    words = np.ascontiguousarray(masks)
    if late is not None and late.any():
        words = words.copy()  # whatever is still written to the late ones does not matter
        words[late] = 0
    return words.view(np.int32)


def late_entries(plan: StepPlan, late: np.ndarray) -> np.ndarray:
    """bool [entries that sample]: those whose first sample is late."""
    starts = plan.num_samples.cumsum() - plan.num_samples
    entries: np.ndarray = late[starts[plan.num_samples > 0]]
    return entries
