// The packed weight layouts. A block is 16 outputs wide; N is padded to 16, K to kPadK with zeros.
//
//   pairs16 (bfloat16)          [N/16][K/2][16][2]   one 64-byte line = 16 outputs x 2 consecutive k
//   lanes16 (float32, float16)  [N/16][K][16]        one line = 16 outputs of one k
//
// A block of pairs16 is also a stack of AMX B tiles (16 pairs x 16 outputs, 1 KiB each), which is why
// K is padded to 32 there. Both layouts stream: a thread reads its blocks front to back.
#pragma once

#include <cstdint>

namespace radix::cpu::linear_layout {

constexpr int64_t kBlockN = 16;
constexpr int64_t kPadK = 32;

constexpr int64_t padded_k(int64_t k) {
  return (k + kPadK - 1) / kPadK * kPadK;
}
constexpr int64_t num_blocks(int64_t n) {
  return (n + kBlockN - 1) / kBlockN;
}
constexpr int64_t elements(int64_t n, int64_t k) {
  return num_blocks(n) * kBlockN * padded_k(k);
}

// Offset of weight element (n, k) in elements.
constexpr int64_t pairs16_offset(int64_t n, int64_t k, int64_t kp) {
  return (n / kBlockN) * kBlockN * kp + (k / 2) * 2 * kBlockN + (n % kBlockN) * 2 + k % 2;
}
constexpr int64_t lanes16_offset(int64_t n, int64_t k, int64_t kp) {
  return (n / kBlockN) * kBlockN * kp + k * kBlockN + n % kBlockN;
}

}  // namespace radix::cpu::linear_layout
