"""KVPool: the device memory of the KV cache."""

import torch

from ..device import Device


class KVPool:
    """Keys and values of every layer, in pages.

        k[layer], v[layer]: [num_pages + 1, page_size, num_kv_heads, head_dim] of `dtype`

    Pages 0 .. num_pages-1 are the page allocator's; page `dummy_page` is never owned: warming up
    uses it. `num_kv_heads` is this rank's share."""

    def __init__(
        self, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, *,
        num_pages: int, dtype: torch.dtype, device: Device,
    ) -> None:  # fmt: skip
        self.dtype, self.page_size = dtype, page_size
        self.num_pages = self.dummy_page = num_pages
        shape = (num_pages + 1, page_size, num_kv_heads, head_dim)
        # Written once, so that memory that is not there is missed now and not under load.
        tensors = [
            torch.empty(shape, dtype=dtype, device=device.torch_device).fill_(0)
            for _ in range(2 * num_layers)
        ]
        self.k, self.v = tensors[::2], tensors[1::2]

    @staticmethod
    def page_bytes(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
