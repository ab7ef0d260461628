// Included ahead of every source of the peer's build (-include). GCC 12's _tile_loadconfig tells the optimiser of 8 of
// the 64 bytes it reads, and its tile loads of none of theirs, so that -O3 drops the stores before them and a machine
// with AMX raises SIGILL. These say what they read.
#pragma once

#if defined(__AMX_TILE__) && !defined(__clang__)
#include <immintrin.h>

static inline void whole_tile_config(const void* config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])config) : "memory");
}
#define _tile_loadconfig(config) whole_tile_config(config)

#undef _tile_loadd
#define _tile_loadd(tile, base, stride) whole_tile_load(tile, base, stride)
#define whole_tile_load(tile, base, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")
#endif
