"""KVPool: the device memory of the KV cache."""

import math
from collections.abc import Iterator

import torch

from ..device import Device
from .kv_layout import KvLayout, KvPart

_PARTS = ("k", "v", "k_scale", "v_scale", "latent")

# The kinds of devices, of "cpu", "cuda" and "rocm", whose pools are page first.
PAGE_FIRST: tuple[str, ...] = ("cuda",)


class KVPool:
    """What `layout` says of every token, in pages. By the number of the layer:

        k[layer], v[layer]              [num_pages + 1, page_size, num_kv_heads, head_dim]
        k_scale[layer], v_scale[layer]  float32; of INT8 [num_pages + 1, page_size, num_kv_heads],
                                        of FP8 [1]; other caches have none
        latent[layer]                   [num_pages + 1, page_size, latent + rotary values, or bytes]

    Layer first, each of them is a tensor of its own. Page first, they are views of one tensor,
    `pages` [num_pages + 1, page_bytes] uint8: a page of all layers is one piece of memory, in the
    order of `layout.layers`. Their last dimensions are contiguous in both.

    Pages 0 .. num_pages-1 are the page allocator's. No request ever owns page `dummy_page`: warm-up
    and padding entries point at it."""

    def __init__(
        self, layout: KvLayout, *, num_pages: int, device: Device, _page_first: bool | None = None
    ) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.num_pages = num_pages
        self.dummy_page = num_pages
        self.pages: torch.Tensor | None = None
        self._parts: dict[str, dict[int, torch.Tensor]] = {name: {} for name in _PARTS}
        if _page_first is None:
            _page_first = device.kind in PAGE_FIRST
        if _page_first:
            self._make_page_first(device)
        else:
            self._make_layer_first(device)
        self.k = self._parts["k"]
        self.v = self._parts["v"]
        self.k_scale = self._parts["k_scale"]
        self.v_scale = self._parts["v_scale"]
        self.latent = self._parts["latent"]
        if layout.scale_unit is not None:
            unit = torch.full((1,), layout.scale_unit, device=device.torch_device)
            self.k_scale = dict.fromkeys(self.k, unit)
            self.v_scale = dict.fromkeys(self.v, unit)

    def calibrate(self, name: str, layer: int, scale: torch.Tensor) -> None:
        """An FP8 cache divides what it stores of `name`, k or v, by `scale` [1], float32, from now
        on, in the unit of its format: a checkpoint's scale is OCP's. Caches of other types need
        none. Before the first step."""
        unit = self.layout.scale_unit
        if unit is not None:
            scales = self.k_scale if name == "k" else self.v_scale
            scales[layer] = scale if unit == 1 else scale * unit

    def _make_layer_first(self, device: Device) -> None:
        for layer, parts in enumerate(self.layout.layers):
            for part in parts:
                shape = (self.num_pages + 1, *self._page_shape(part))
                self._parts[part.name][layer] = _written_once(shape, part.dtype, device)

    def _make_page_first(self, device: Device) -> None:
        shape = (self.num_pages + 1, self.layout.page_bytes)
        self.pages = _written_once(shape, torch.uint8, device)
        begin = 0
        for layer, parts in enumerate(self.layout.layers):
            for part in parts:
                page = self._page_shape(part)
                used = self.pages[:, begin : begin + math.prod(page) * part.dtype.itemsize]
                self._parts[part.name][layer] = used.view(part.dtype).unflatten(1, page)
                begin += self.layout.part_bytes(part)

    def _page_shape(self, part: KvPart) -> tuple[int, ...]:
        return (self.page_size, *part.shape)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept of tokens."""
        for layers in self._parts.values():
            yield from layers.values()


def _written_once(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Zeros that were written, so that memory that is not there fails now, not under load."""
    tensor = torch.empty(shape, dtype=dtype, device=device.torch_device)
    tensor.view(torch.uint8).fill_(0)  # not every type can be filled
    return tensor
