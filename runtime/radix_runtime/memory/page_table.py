"""PageTable: the pages of each row, where the kernels read them."""

import numpy as np
import torch

from ..device import Device

_NO_CHANGES = np.zeros((2, 0), np.int32)


class PageTable:
    """int32 [rows, max_pages], at one address. Used on the engine's stream only."""

    def __init__(self, device: Device, shape: tuple[int, int], page: int) -> None:
        """Every element is `page` at first."""
        self.pages = torch.full(shape, page, dtype=torch.int32, device=device.torch_device)

    def take(self, rows: np.ndarray, index: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """What must be uploaded and given to `apply` so that the table has `pages[i]` at `[rows[i],
        index[i]]`; all int32. int32 [2, C]: element of the flat table, page. Of an element that is
        named twice the last page: a device scatter promises no order."""
        if len(pages) == 0:
            return _NO_CHANGES
        elements = rows * self.pages.shape[1] + index
        unique, last = np.unique(elements[::-1], return_index=True)
        return np.stack([unique, pages[::-1][last]])

    def apply(self, changes: torch.Tensor) -> None:
        """Makes `changes`, on the device."""
        if changes.shape[1]:
            self.pages.view(-1).index_put_((changes[0],), changes[1])


class HostPageTable(PageTable):
    """One in host memory. `take` writes the pages, and leaves nothing to upload: the thread that
    calls it runs the steps too, so none reads the table meanwhile."""

    def __init__(self, device: Device, shape: tuple[int, int], page: int) -> None:
        super().__init__(device, shape, page)
        self._array = self.pages.numpy()  # the same memory

    def take(self, rows: np.ndarray, index: np.ndarray, pages: np.ndarray) -> np.ndarray:
        if len(pages):
            self._array[rows, index] = pages  # one after the other, so that the last one counts
        return _NO_CHANGES


def make_page_table(device: Device, shape: tuple[int, int], page: int) -> PageTable:
    """A table of `shape` on the device, with `page` everywhere."""
    kind = HostPageTable if device.is_cpu else PageTable
    return kind(device, shape, page)
