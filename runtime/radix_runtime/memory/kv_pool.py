"""KVPool: the device memory of the KV cache."""

import torch

from ..device import Device


class KVPool:
    """Keys and values of every layer, in pages.

        k[layer], v[layer]: [num_pages + 1, page_size, num_kv_heads, head_dim] of `dtype`

    Pages 0 .. num_pages-1 are the page allocator's. No request ever owns page `dummy_page`: warm-up
    and padding entries point at it. `num_kv_heads` is this rank's share."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        self.dtype = dtype
        self.page_size = page_size
        self.num_pages = num_pages
        self.dummy_page = num_pages
        shape = (num_pages + 1, page_size, num_kv_heads, head_dim)
        self.k = [_written_once(shape, dtype, device) for _ in range(num_layers)]
        self.v = [_written_once(shape, dtype, device) for _ in range(num_layers)]

    @staticmethod
    def page_bytes(
        *, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that a page takes in all layers, keys and values."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize


def _written_once(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Zeros that were written, so that memory that is not there fails now and not under load."""
    return torch.empty(shape, dtype=dtype, device=device.torch_device).fill_(0)
