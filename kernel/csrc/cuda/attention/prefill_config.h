// What a prefill kernel is built for, and what its warps share.
#pragma once

#include <type_traits>

#include "cuda/attention/prefill_schedule.h"
#include "cuda/hopper/wgmma_registers.h"

namespace radix::attention::prefill {

using namespace hopper;

// kDim: the head dimension, rounded up to 64 columns. kConsumers: warpgroups of 64 rows. kCluster: blocks that work on
// neighbouring tiles of one head; each copies its share of the keys and values to all of them. kQueryRegisters: queries
// are read from shared memory once a tile.
template <class T_, int kDim_, int kBlockN_, int kConsumers_, int kCluster_, bool kQueryRegisters_>
struct Config {
  using T = T_;
  static constexpr int kDim = kDim_, kBlockN = kBlockN_, kConsumers = kConsumers_, kCluster = kCluster_, kStages = 2;
  static constexpr bool kQueryRegisters = kQueryRegisters_;
  static constexpr Operand kType = std::is_same_v<T, bf16> ? Operand::bf16 : Operand::f16;
  static constexpr int kBlockM = 64 * kConsumers, kThreads = 128 * (kConsumers + 1);
  static constexpr int kColumnBlocks = kDim / 64;             // of 128 bytes
  static constexpr int kIssuers = kColumnBlocks < 2 ? 1 : 2;  // warps that copy keys, and as many values
  static constexpr int kQueryBytes = kBlockM * kDim * 2, kKeyBytes = kBlockN * kDim * 2;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32, kConsumerRegisters = kConsumers == 2 ? 232 : 160;
};

template <class C>
struct Shared {
  alignas(1024) char q[C::kQueryBytes];
  alignas(1024) char k[C::kStages][C::kKeyBytes];
  alignas(1024) char v[C::kStages][C::kKeyBytes];
  uint64_t q_full, q_empty, k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
  Tile tiles[2];
};

}  // namespace radix::attention::prefill
