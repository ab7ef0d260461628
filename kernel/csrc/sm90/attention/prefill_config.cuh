// What a prefill kernel is built for, and what its warps share.
#pragma once

#include <type_traits>

#include "sm90/attention/prefill_schedule.cuh"
#include "sm90/common/limits.cuh"
#include "sm90/common/wgmma_registers.cuh"

namespace radix::attention::prefill {

using namespace sm90;

// kDim: columns of queries and keys, kVDim: of values, the head dimensions rounded up to rows of 128 bytes. kConsumers:
// warpgroups of 64 rows. kCluster: blocks that work on neighbouring tiles of one head; each copies its share of the
// keys and values to all of them. kHeld: columns of the queries that are read from shared memory once a tile. kStages:
// blocks of keys, and of values, in shared memory. kGather: pages are too small for TMA.
template <class T_, int kDim_, int kVDim_, int kBlockN_, int kConsumers_, int kCluster_, int kHeld_, int kStages_,
          bool kGather_ = false>
struct Config {
  using T = T_;
  static constexpr int kDim = kDim_, kVDim = kVDim_, kBlockN = kBlockN_, kConsumers = kConsumers_;
  static constexpr int kCluster = kCluster_, kStages = kStages_, kTransposedStages = 2, kHeld = kHeld_;
  static constexpr bool kGather = kGather_, kFp8 = std::is_same_v<T, e4m3>;
  static constexpr Operand kType = kOperand<T>;
  static constexpr int kBlockM = 64 * kConsumers, kThreads = 128 * (kConsumers + 1);
  static constexpr int kRowElements = 128 / sizeof(T);  // of 128 bytes
  static constexpr int kKeyColumns = kDim / kRowElements, kValueColumns = kVDim / kRowElements;
  static constexpr int kIssuers = kKeyColumns < 2 ? 1 : 2;  // warps that copy keys, and as many values
  static constexpr int kGatherers = kFp8 ? 2 : 4;           // warps that gather; of FP8 the others transpose
  static constexpr int kKeyBytes = kBlockN * kDim * sizeof(T), kValueBytes = kBlockN * kVDim * sizeof(T);
  // FP8 values with tokens along the rows, in blocks of 128 tokens.
  static constexpr int kTransposedBytes = kFp8 ? (kBlockN + 127) / 128 * kVDim * 128 : 0;
  // Of a tile's queries those that registers hold, and those read in shared memory, which has a second place for them
  // if it fits: then the next tile's queries come while this one is worked on.
  static constexpr int kHeldBytes = kBlockM * kHeld * sizeof(T), kRestBytes = kBlockM * (kDim - kHeld) * sizeof(T);
  static constexpr int kBlockBytes = kStages * (kKeyBytes + kValueBytes) + kTransposedStages * kTransposedBytes;
  static constexpr int kRests = kHeldBytes + 2 * kRestBytes + kBlockBytes <= 226 << 10 ? 2 : 1;
  // Of a thread; addresses of rows to gather take many.
  static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kGather ? 56 : 40;
  static constexpr int kConsumerRegisters = kConsumers > 2 ? 160 : (504 - kProducerRegisters) / 2;
  static constexpr bool kPingPong = !kFp8;  // consumers start their products one after the other
  // FP8 probabilities are 2^8 times as large: their largest is 256 of e4m3's 448, and fewer small ones become 0.
  static constexpr float kProbabilityLog2 = kFp8 ? 8 : 0;
  // A maximum may be outgrown by 2^kSlackLog2 before the output is rescaled: 2^8.8 is 445.7.
  static constexpr float kSlackLog2 = kFp8 ? 0.8f : 8;

  static_assert(kDim % kRowElements == 0 && kVDim % kRowElements == 0, "head dimensions in rows of 128 bytes");
  static_assert(kVDim % 16 == 0 && kVDim <= kMaxWgmmaColumns, "values are wgmma's N");
  static_assert(kBlockN % (kFp8 ? 32 : 16) == 0, "keys of a block are k of the second product");
  static_assert(kBlockN <= kMaxWgmmaColumns && kBlockN <= kMaxBox, "and N of the first, and a TMA box");
  static_assert(kBlockN < 128 || kBlockN % 32 == 0, "half a block is a product of its own");
  static_assert(kConsumers == 2 || kConsumers == 3, "ping-pong needs a second warpgroup; registers suffice for three");
  static_assert(kCluster == 1 || kCluster == 2, "tiles are dealt to blocks alone or in pairs");
  static_assert(kBlockN % kCluster == 0 && kBlockN / kCluster % 8 == 0, "each block copies whole atoms of the swizzle");
  static_assert(!kGather || kCluster == 1, "gathered keys are not multicast");
  static_assert(!kGather || kBlockN % kGatherers == 0, "each warp gathers as many rows");
  static_assert(kStages >= 2, "the ring needs a stage to fill beside the one that is read");
  static_assert(kHeld >= 0 && kHeld <= kDim && kHeld % kRowElements == 0, "whole rows of 128 bytes stay in registers");
  static_assert(!kFp8 || (kKeyColumns == 1 && kValueColumns == 1), "warps 1 and 3 transpose values instead of copying");
  static_assert(!kFp8 || kVDim % 32 == 0, "transposing warps take 16 columns each");
  static_assert(kBlockM <= kMaxBox, "a tile of queries is one TMA box");
  static_assert(kThreads <= kMaxThreads);
  static_assert(registers_fit(1, kProducerRegisters, kConsumers, kConsumerRegisters));
};

// What TMA writes to the second product's operand: values as they are, or FP8 ones on their way to it.
template <class C, bool = C::kFp8>
struct Values {
  alignas(1024) char v[C::kStages][C::kValueBytes];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
};
template <class C>
struct Values<C, true> : Values<C, false> {
  alignas(1024) char t[C::kTransposedStages][C::kTransposedBytes];
  uint64_t t_full[C::kTransposedStages], t_empty[C::kTransposedStages];
};

template <class C>
struct Shared : Values<C> {
  alignas(1024) char q[C::kHeldBytes + C::kRests * C::kRestBytes];
  alignas(1024) char k[C::kStages][C::kKeyBytes];
  uint64_t q_full, q_empty, k_full[C::kStages], k_empty[C::kStages];
  Tile tiles[2];
};

}  // namespace radix::attention::prefill
