"""KVPool: the device memory of the KV cache."""

from collections.abc import Iterator

import torch

from ..device import Device
from .kv_layout import KvLayout, KvPart

_PARTS = ("k", "v", "k_scale", "v_scale", "latent")


class KVPool:
    """What `layout` says of every token, in pages. By the number of the layer:

        k[layer], v[layer]              [num_pages + 1, page_size, num_kv_heads, head_dim]
        k_scale[layer], v_scale[layer]  float32; of INT8 [num_pages + 1, page_size, num_kv_heads],
                                        of FP8 [1]; other caches have none
        latent[layer]                   [num_pages + 1, page_size, latent + rotary values, or bytes]

    Pages 0 .. num_pages-1 are the page allocator's. No request ever owns page `dummy_page`: warm-up
    and padding entries point at it."""

    def __init__(self, layout: KvLayout, *, num_pages: int, device: Device) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.num_pages = num_pages
        self.dummy_page = num_pages
        self._parts: dict[str, dict[int, torch.Tensor]] = {name: {} for name in _PARTS}
        for layer, parts in enumerate(layout.layers):
            for part in parts:
                self._parts[part.name][layer] = self._written_once(part, device)
        self.k = self._parts["k"]
        self.v = self._parts["v"]
        self.k_scale = self._parts["k_scale"]
        self.v_scale = self._parts["v_scale"]
        self.latent = self._parts["latent"]
        if layout.constant_scales:
            one = torch.ones(1, device=device.torch_device)
            self.k_scale = dict.fromkeys(self.k, one)
            self.v_scale = dict.fromkeys(self.v, one)

    def calibrate(self, name: str, layer: int, scale: torch.Tensor) -> None:
        """An FP8 cache divides what it stores of `name`, k or v, by `scale` [1], float32, from now
        on; caches of other types need none. Before the first step."""
        if self.layout.constant_scales:
            scales = self.k_scale if name == "k" else self.v_scale
            scales[layer] = scale

    def _written_once(self, part: KvPart, device: Device) -> torch.Tensor:
        """Zeros that were written, so that memory that is not there fails now, not under load."""
        shape = (self.num_pages + 1, self.page_size, *part.shape)
        tensor = torch.empty(shape, dtype=part.dtype, device=device.torch_device)
        tensor.view(torch.uint8).fill_(0)  # not every type can be filled
        return tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept of tokens."""
        for layers in self._parts.values():
            yield from layers.values()
