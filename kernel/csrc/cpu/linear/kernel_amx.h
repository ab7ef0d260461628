// The same product on AMX tiles: bfloat16 operands, float32 accumulation, 16 x 16 outputs a tile.
//
// C tiles 0..3, A tiles 4..5 (16 rows x 32 k), B tile 6..7 straight from pairs16 (16 pairs x 16
// outputs). A tile sums over its k in ascending pairs and the tiles of k follow in ascending order,
// whatever the number of rows, so M = 1 gives the same bits as the same row inside a large batch.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include "common/dtype.h"
#include "cpu/linear/layout.h"

namespace radix::cpu::RK_ISA {

constexpr int kTileRows = 16;

// Tile shapes are per thread and other libraries change them: load at every kernel entry, release at
// its end so that the kernel does not save 8 KiB of state at each context switch.
class AmxScope {
 public:
  AmxScope() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int i = 0; i < 8; ++i) {
      config.bytes_per_row[i] = 64;
      config.rows[i] = kTileRows;
    }
    // gcc 12's intrinsic declares 8 of the 64 bytes as input and drops the other stores.
    asm volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const char(*)[64]>(&config)) : "memory");
  }
  ~AmxScope() { _tile_release(); }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;
};

// x: rows of bf16 [kp], stride kp, 16 * ATiles of them. w: a packed block and a second one `block` elements further
// (0: the same again). out: float [16 * ATiles][2][16].
template <int ATiles>
inline void amx_tile(const bf16* x, const bf16* w, int64_t block, int64_t kp, float* out) {
  static_assert(ATiles == 1 || ATiles == 2);
  const int64_t row_bytes = kp * 2;
  asm volatile("" ::: "memory");  // x may just have been written; the intrinsics do not say so
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (ATiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < kp; k += linear_layout::kPadK) {
    const bf16* b = w + k * linear_layout::kBlockN;
    for (int line = 0; line < 16; ++line) {
      __builtin_prefetch(b + line * 32 + 2048, 0, 3);
      __builtin_prefetch(b + block + line * 32 + 2048, 0, 3);
    }
    _tile_loadd(4, x + k, row_bytes);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + block, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (ATiles == 2) {
      _tile_loadd(5, x + kTileRows * kp + k, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  constexpr int kOutStride = 2 * 16 * sizeof(float);
  _tile_stored(0, out, kOutStride);
  _tile_stored(1, out + 16, kOutStride);
  if constexpr (ATiles == 2) {
    _tile_stored(2, out + kTileRows * 32, kOutStride);
    _tile_stored(3, out + kTileRows * 32 + 16, kOutStride);
  }
  asm volatile("" ::: "memory");
}

}  // namespace radix::cpu::RK_ISA

#endif
