"""What each of Hopper's kernels may take, as measured with nvcc 13.0: registers of a thread and
bytes of its stack.

A spill lies on the stack, so that a kernel without a stack cannot begin to spill. Registers are
given in eights.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

# Pattern of a kernel's name -> most registers, most bytes of stack. The first that fits is the
# kernel's.
LIMITS = {
    # Decode: queries in two tiles of rows; 256 dimensions.
    "decode_kernel<Config<bf16, bf16, 64, 1> >": (216, 0),
    "decode_kernel<Config<f16, f16, 64, 1> >": (216, 0),
    "decode_kernel<Config<*, e4m3, 64, 1> >": (176, 0),
    "decode_kernel<Config<bf16, e4m3, 64, 2> >": (255, 16),
    "decode_kernel<Config<f16, e4m3, 64, 2> >": (255, 8),
    "decode_kernel<Config<*, 64, 2> >": (248, 0),
    "decode_kernel<Config<*, e4m3, 128, 1> >": (248, 0),
    "decode_kernel<Config<*, 128, 1> >": (248, 0),
    "decode_kernel<Config<*, e4m3, 128, 2> >": (255, 8),
    "decode_kernel<Config<*, 128, 2> >": (255, 8),
    "decode_kernel<Config<*, e4m3, 256, 1> >": (255, 64),
    "decode_kernel<Config<*, 256, 1> >": (255, 40),
    "combine_kernel<*, Layout<256, 16, 128> >": (144, 0),
    "combine_kernel<*, Layout<64, *> >": (112, 0),
    "combine_kernel<*, Layout<128, *> >": (120, 0),
    "combine_kernel<*, SplitFixedLayout<*> >": (120, 0),
    # Prefill: what its producer, with 24 to 40 registers a thread, does not hold.
    "prefill_kernel<Config<*, 64, 64, 128, 3, 1, 0, 2, false> >": (128, 72),
    "prefill_kernel<Config<*, 64, 64, 128, 3, 1, 0, 2, true> >": (128, 88),
    "prefill_kernel<Config<*16, 128, 128, 128, 2, *, 128, 3, false> >": (168, 24),
    "prefill_kernel<Config<*16, 128, 128, 128, 2, 1, 128, 3, true> >": (168, 48),
    "prefill_kernel<Config<e4m3, 128, 128, 160, 2, 1, 128, 3, false> >": (168, 24),
    "prefill_kernel<Config<e4m3, 128, 128, 160, 2, 2, 128, 3, false> >": (168, 32),
    "prefill_kernel<Config<e4m3, 128, 128, 160, 2, 1, 128, 3, true> >": (168, 56),
    "prefill_kernel<Config<*, 192, 128, 128, 2, *, 128, 2, false> >": (168, 64),
    "prefill_kernel<Config<*, 192, 128, 128, 2, 1, 128, 2, true> >": (168, 96),
    "prefill_kernel<Config<*, 192, 192, 96, 2, 1, 0, 2, *> >": (168, 24),
    "prefill_kernel<Config<*, 256, 256, 80, 2, 1, 0, 2, *> >": (168, 24),
    # MLA.
    "mla_decode_split_fixed_kernel<Config<*, 1, *> >": (255, 0),
    "mla_decode_split_fixed_kernel<Config<*, 2, false> >": (255, 408),
    "mla_decode_split_fixed_kernel<Config<bf16, 2, true> >": (255, 384),
    "mla_decode_cluster_h16_kernel<*>": (144, 0),
    "mla_decode_swap_qk_h16_kernel<*>": (128, 0),
    "mla_decode_wgmma_h64_kernel<*, false>": (128, 40),
    "mla_decode_wgmma_h64_kernel<bf16, true>": (128, 104),
    # All layers of a step: of a mixture or not, scaled or not.
    "persistent_decode_kernel<Form<false, *> >": (168, 160),
    "persistent_decode_kernel<Form<true, false> >": (168, 168),
    "persistent_decode_kernel<Form<true, true> >": (168, 184),
    # Products.
    "mma_m16_kernel<*>": (80, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, 1, 16, *> >": (80, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, 1, 32, *> >": (96, 0),
    "wgmma_swap_ab_kernel<2, *, SwapAbTile<1, 1, 64, true, *> >": (104, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, 1, 64, *> >": (96, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<2, 1, 16, *> >": (104, 0),
    "wgmma_swap_ab_kernel<2, *, SwapAbTile<2, 1, 32, *> >": (152, 0),
    "wgmma_swap_ab_kernel<3, *, SwapAbTile<2, 1, 32, *> >": (152, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<2, 1, 32, *> >": (144, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<2, 2, 64, *> >": (168, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, *, 96, *> >": (152, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, *, 128, *> >": (168, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, *, 144, *> >": (168, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, 1, 160, *> >": (184, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, 1, 192, *> >": (200, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, 2, 160, *> >": (168, 0),
    "wgmma_swap_ab_kernel<*, SwapAbTile<1, 2, 192, *> >": (168, 8),  # nine warps have no more
    "wgmma_persistent_kernel<2, *, PersistentTile<128, 2, true>, 1, 0>": (
        168,
        16,
    ),  # one scale a row, 256 tokens
    "wgmma_persistent_kernel<*>": (168, 0),
    # Products with packed weights.
    "mixed_mma_kernel<*, 32, 7, 1, 2, *> >": (224, 0),
    "mixed_mma_kernel<*, 4, 2, 1, *> >": (168, 0),
    "mixed_mma_kernel<*, 8, 1, 1, *> >": (168, 0),
    "mixed_mma_kernel<*>": (96, 0),
    # Four consumers; once, before k begins.
    "mixed_wgmma_kernel<MixedWgmmaTile<bf16, 0, 32, 64, 4, 1> >": (96, 8),
    "mixed_wgmma_kernel<*, 64, 4, 1> >": (96, 0),
    "mixed_wgmma_kernel<*, 64, 2, 2> >": (96, 0),
    "mixed_wgmma_kernel<*>": (168, 0),
    "rows_kernel<*>": (32, 0),
    "numbers_kernel<*>": (32, 0),
    "pack_bytes_kernel": (32, 0),
    "unpack_bytes_kernel": (32, 0),
    "pack_nibbles_kernel": (32, 16),
    "unpack_nibbles_kernel": (24, 16),
    # Experts and grouped products.
    "grouped_persistent_kernel<*>": (168, 0),
    "grouped_swap_ab_kernel<*>": (168, 0),
    "grouped_mixed_kernel<*>": (168, 0),
    "grouped_mixed_mma_kernel<*>": (96, 0),
    "grouped_mma_m16_up_kernel<bf16, e4m3, 1, 4>": (112, 0),
    "grouped_mma_m16_up_kernel<f16, e4m3, 1, 4>": (104, 0),
    "grouped_mma_m16_up_kernel<*, e4m3, 2, 4>": (120, 0),
    "grouped_mma_m16_up_kernel<*, 1, 4>": (80, 0),
    "grouped_mma_m16_up_kernel<*>": (88, 0),
    "grouped_mma_m16_down_kernel<*, e4m3, 1, 8>": (88, 0),
    "grouped_mma_m16_down_kernel<*, e4m3, 2, 8>": (104, 0),
    "grouped_mma_m16_down_kernel<*, 1, 8>": (64, 0),
    "grouped_mma_m16_down_kernel<*>": (72, 0),
    "combine_kernel<*>": (40, 0),
    "gather_kernel<*>": (32, 0),
    "place_kernel<CopyRows*>": (32, 0),
    "place_kernel<*>": (40, 0),
    "contiguous_kernel": (24, 0),
    "list_kernel": (32, 0),
    "prepare_kernel": (48, 8),
    "quantize_kernel": (48, 0),
    "sort_kernel": (56, 0),
}


def pattern_of(name: str) -> str | None:
    """The entry of LIMITS that a kernel comes under."""
    return next((pattern for pattern in LIMITS if fnmatchcase(name, pattern)), None)
