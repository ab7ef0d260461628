// The weights of a step, streamed through shared memory by one warp that runs ahead of the others: it waits for room in
// the ring alone, never for the grid. So the memory stays busy while blocks wait for each other.
//
//   stage: kStageRows rows of a weight, kChunk elements of k each, one bulk copy a row. A row begins 64 bytes further
//   than a multiple of 128, so that the eight lanes that read 16 bytes of two rows at a time meet in no bank.
//
// Producer and consumers walk the same order: products of a layer, pairs of row groups, chunks of k, groups of a pair.
// Where the last chunk is a short one, it begins earlier: what it repeats is multiplied by zeros.
#pragma once

#include "sm90/common/mbarrier.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/persistent_decoder/exchange.cuh"
#include "sm90/persistent_decoder/params.cuh"

namespace radix::persistent_decoder {

constexpr int kStageRows = 8;
constexpr int kChunk = 1024;  // elements of k
constexpr int kRowBytes = kChunk * 2 + 64;
constexpr int kStageBytes = kStageRows * kRowBytes;
constexpr int kMinStages = 4;

__host__ __device__ constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

// out[token, row] = x[token, :] * weight[row, :], of which this block makes the rows of its groups. Paired: group i
// stands for group i of the gate and the same of up, `pair_rows` further.
struct Product {
  const bf16* weight;
  int k, pair_rows;
  int begin, end;  // groups of this block

  __device__ Product(const bf16* w, int rows, int k_, bool paired)
      : weight(w), k(k_), pair_rows(paired ? rows / 2 : 0) {
    const unsigned groups = static_cast<unsigned>(paired ? rows / 2 : rows) / kStageRows;
    begin = static_cast<int>(groups * blockIdx.x / gridDim.x);  // host: the product fits 32 bits
    end = static_cast<int>(groups * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ bool paired() const { return pair_rows > 0; }
  // Pairs of groups: two neighbours, or a gate's and its up's.
  __device__ int pairs() const { return paired() ? end - begin : ceil_div(end - begin, 2); }
  __device__ int groups_of(int pair) const { return paired() ? 2 : min(end - begin - 2 * pair, 2); }
  // The first row of group i of a pair.
  __device__ int row(int pair, int i) const {
    return paired() ? (begin + pair) * kStageRows + i * pair_rows : (begin + 2 * pair + i) * kStageRows;
  }
  __device__ int chunks() const { return ceil_div(k, kChunk); }
  __device__ int first_of(int chunk) const { return min(chunk * kChunk, k - kChunk); }
};

constexpr int kProducts = 4;  // of a layer

__device__ inline Product product_of(const Params& p, const Layer& layer, int which) {
  switch (which) {
    case 0: return {layer.qkv, qkv_rows(p), p.hidden_size, false};
    case 1: return {layer.o, p.hidden_size, p.heads * kHeadDim, false};
    case 2: return {layer.gate_up, 2 * p.width, p.hidden_size, true};
    default: return {layer.down, p.hidden_size, p.width, false};
  }
}

// Where the next stage lies, in turn.
struct RingPlace {
  int stages, index = 0;
  uint32_t parity = 0;

  __device__ explicit RingPlace(int count) : stages(count) {}
  __device__ void next() {
    if (++index == stages) {
      index = 0;
      parity ^= 1;
    }
  }
};

struct RingMemory {
  char* stages;
  uint64_t *full, *empty;  // a barrier of each stage
  int count;
};

__device__ inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(sm90::shared_address(shared)),
      "l"(global), "r"(bytes), "r"(sm90::shared_address(barrier)), "l"(static_cast<uint64_t>(sm90::L2Keep::first_out))
      : "memory");
}

// What the layer ahead reads beside its weights: small, and else a miss on everybody's way.
__device__ inline void prefetch_vectors(const Params& p, const Layer& layer) {
  const auto fetch = [](const void* from, int bytes) {
    if (!from) return;
#pragma unroll 1
    for (int i = threadIdx.x % 32 * 128; i < bytes; i += 32 * 128)
      sm90::prefetch_l2(static_cast<const char*>(from) + i);
  };
  fetch(layer.input_norm, p.hidden_size * 2);
  fetch(layer.post_norm, p.hidden_size * 2);
  fetch(layer.qkv_bias, qkv_rows(p) * 2);
  fetch(layer.q_norm, kHeadDim * 4);
  fetch(layer.k_norm, kHeadDim * 4);
}

// The whole step of the feeding warp.
__device__ inline void stream_weights(const Params& p, const RingMemory& ring) {
  const int lane = threadIdx.x % 32;
  RingPlace at(ring.count);
  const auto feed = [&](const bf16* from, int row_step) {
    uint64_t* full = ring.full + at.index;
    sm90::barrier_wait(ring.empty + at.index, at.parity ^ 1);
    if (lane == 0) sm90::barrier_arrive_expect(full, kChunk * 2 * kStageRows);
    __syncwarp();
    if (lane < kStageRows)
      bulk_copy(ring.stages + at.index * kStageBytes + lane * kRowBytes, from + int64_t{lane} * row_step, kChunk * 2,
                full);
    at.next();
  };
#pragma unroll 1
  for (int l = 0; l < p.num_layers; l++) {
    const Layer& layer = p.layers[l];
    if (blockIdx.x == l % gridDim.x && l + 1 < p.num_layers) prefetch_vectors(p, p.layers[l + 1]);
#pragma unroll 1
    for (int which = 0; which < kProducts; which++) {
      const Product product = product_of(p, layer, which);
#pragma unroll 1
      for (int pair = 0; pair < product.pairs(); pair++)
#pragma unroll 1
        for (int chunk = 0; chunk < product.chunks(); chunk++)
#pragma unroll 1
          for (int i = 0; i < product.groups_of(pair); i++)
            feed(product.weight + int64_t{product.row(pair, i)} * product.k + product.first_of(chunk), product.k);
    }
  }
}

}  // namespace radix::persistent_decoder
