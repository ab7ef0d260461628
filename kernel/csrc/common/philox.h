// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the uniform
// number that the sampler makes of one word. Shared by host and device code.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace radix {

struct PhiloxBlock {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;  // of the key's words, a round

// One of ten rounds.
RK_HOST_DEVICE inline PhiloxBlock philox_round(const PhiloxBlock& c, uint32_t k0, uint32_t k1) {
  const uint64_t a = uint64_t{kPhiloxFactor0} * c.word[0], b = uint64_t{kPhiloxFactor1} * c.word[2];
  return {{static_cast<uint32_t>(b >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(b),
           static_cast<uint32_t>(a >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(a)}};
}

RK_HOST_DEVICE inline PhiloxBlock philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  PhiloxBlock block = {{c0, c1, c2, c3}};
  for (int round = 0; round < 10; round++) {
    block = philox_round(block, k0, k1);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  return block;
}

// (w + 0.5) * 2^-32 rounded to float32, at most 1 - 2^-24: never 0, never 1.
RK_HOST_DEVICE inline float philox_uniform(uint32_t word) {
  const float u = static_cast<float>((static_cast<double>(word) + 0.5) * 0x1p-32);
  const float most = 0x1.fffffep-1f;
  return u < most ? u : most;
}

}  // namespace radix
