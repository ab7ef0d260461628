// The shapes of the eight AMX tiles, which are per thread and which other libraries change: load at every kernel's
// entry, release at its end (_tile_release), so that the kernel does not save 8 KiB of state at each context switch.
#pragma once

#include <cstdint>

namespace radix::cpu::RK_ISA {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  // gcc 12's intrinsic declares 8 of the 64 bytes as input and drops the other stores.
  void load() const { asm volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const char(*)[64]>(this)) : "memory"); }
};
static_assert(sizeof(TileShapes) == 64);

}  // namespace radix::cpu::RK_ISA
